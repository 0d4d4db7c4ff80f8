//! The engine: parameter slots, chunks, and the step that brings them together with weights and gradients. It knows
//! neither Python nor torch; all its memory accesses are safe, through `memory`'s views and planes.

mod caller;
mod chunk;
pub mod ferry;
pub mod lanes;
mod master;
mod norm;
pub mod shuttle;
mod slot;
mod step;
mod views;

pub use crate::kernel::{MomentDType, WeightKind};
pub use norm::squared_norms;
pub use slot::{Kept, MomentPlanes, Moments, Slot, SlotSpec};
pub use step::{
    DEFAULT_CHUNK_ELEMS, NonFinite, StepOptions, StepReport, Update, Verdict, check, judge, squared_norms_of, step,
    update,
};
pub use views::{GradElements, GradView, WeightView};
