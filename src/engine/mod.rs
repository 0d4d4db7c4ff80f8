//! The engine: parameter slots, chunks, and the step that brings them together with weights and gradients. It knows
//! neither Python nor torch; all its memory accesses are safe, through `memory`'s views and planes.

mod chunk;
mod master;
mod norm;
mod slot;
mod step;
mod views;

pub use slot::{Kept, MomentDType, MomentPlanes, Moments, Slot, SlotSpec, WeightKind};
pub use step::{DEFAULT_CHUNK_ELEMS, NonFinite, StepOptions, StepReport, Update, step};
pub use views::{GradElements, GradView, WeightView};
