//! Host memory: where state lives (the arena), and borrowed tensors of any strides. It knows bytes and layouts, neither
//! parameters nor steps.

mod arena;
pub mod host_pool;
mod layout;
mod span;
mod strided;
mod sys;

pub(crate) use arena::Berth;
pub use arena::{ALIGNMENT, Arena, Element, Plane, Slab, SlabHandle, plane_bytes};
pub use layout::{Layout, share_memory};
pub use span::{DeviceRing, DeviceSpan, HostRing, HostSpan, join_neighbours};
pub use strided::{StridedMut, StridedRef, Walks};
#[cfg(all(test, outboard_cuda))]
pub(crate) use sys::Mapping;
pub use sys::{HUGE_PAGE, locked_memory_limit, page_size};
