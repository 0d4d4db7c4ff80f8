//! The recipe over slices: per dtype, compiled per ISA level; norms; conversions. Pure functions: this layer knows neither
//! parameters nor threads.

mod convert;
mod dispatch;
mod fma;
mod fpenv;
mod isa;
mod kinds;
mod master;
mod noise;
pub(crate) mod norm;
mod recipe;

pub use convert::{BF16_NAN, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_bf16_stochastic, f32_to_f16};
pub use dispatch::stream;
pub(crate) use dispatch::{GradSlice, MomentSlices, WeightSlices, accumulate, sum_of_squares, unscale, update};
pub(crate) use fpenv::DefaultFloatEnvironment;
pub use isa::Isa;
pub use kinds::{GradDType, MomentDType, WeightKind};
pub use master::{decode_split, encode_split, follow_bf16, follow_f16};
pub use noise::Noise;
pub use norm::BLOCK as NORM_BLOCK;
pub use recipe::{AdamWConfig, Constants};
