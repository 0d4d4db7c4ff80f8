//! Optimizer steps on state that lives in host memory: AdamW and Adam in SIMD over a worker pool, the same bits for any
//! number of threads, chunk size and instruction set, and the same bits as `torch.optim.AdamW(fused=True)` on fp32 CPU
//! tensors.
//!
//! ```
//! use outboard::{AdamW, AdamWConfig, WorkerPool};
//! use std::sync::Arc;
//!
//! let mut optimizer = AdamW::new(Arc::new(WorkerPool::new(2)?), AdamWConfig { lr: 0.1, ..Default::default() })?;
//! let mut weights = vec![1.0_f32, -2.0, 3.0];
//! let id = optimizer.register("weights", weights.len())?;
//! for _ in 0..200 {
//!     let gradients: Vec<f32> = weights.iter().map(|w| 2.0 * w).collect();
//!     optimizer.step([(id, &mut weights[..], &gradients[..])])?;
//! }
//! assert!(weights.iter().all(|w| w.abs() < 0.05));
//! # Ok::<(), outboard::Error>(())
//! ```
//!
//! Layers, each knowing only those before it: [`Error`]; [`kernel`], pure functions over slices; [`WorkerPool`];
//! [`memory`], where state lives; [`engine`], slots and steps; [`AdamW`], the optimizer for Rust programs, and the Python
//! bindings.

mod adamw;
pub mod device;
pub mod engine;
mod error;
pub mod kernel;
pub mod memory;
mod pool;
mod process;

pub mod cuda;
#[cfg(feature = "python")]
mod python;

pub use adamw::{AdamW, ParameterId};
pub use error::{Error, Failure, Result};
pub use kernel::{AdamWConfig, Isa};
pub use memory::Arena;
pub use pool::{ThreadChoice, WorkerPool};
