//! The device's memory, which is the host's, and what is pinned of the host's own.

use super::hazards::Access;
use super::streams::Shared;
use crate::memory::DeviceSpan;
use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

/// As CUDA aligns its own.
const ALIGNMENT: usize = 256;

/// What memory holds that nobody has written.
const POISON: u8 = 0xA5;

/// What is in use.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pub(super) allocated_bytes: usize,
    pub(super) live_events: usize,
    /// Address and bytes.
    pub(super) pins: Vec<(usize, usize)>,
    /// The most that may be pinned.
    pub(super) pinnable_bytes: Option<usize>,
    /// Blocks that were freed while work was under way that uses them: that is a hazard, and reported; nothing worse
    /// shall come of it.
    quarantine: Vec<Block>,
}

impl Memory {
    pub(super) fn pinned_bytes(&self) -> usize {
        self.pins.iter().map(|&(_, bytes)| bytes).sum()
    }

    pub(super) fn is_pinned(&self, access: &Access) -> bool {
        self.pins.iter().any(|&(start, bytes)| access.overlaps(start, start + bytes))
    }
}

#[derive(Debug)]
struct Block {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the block owns its bytes and gives out no reference to them.
unsafe impl Send for Block {}
// SAFETY: as above; nothing can be done with a `&Block`.
unsafe impl Sync for Block {}

impl Block {
    fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()?;
        // SAFETY: the layout has at least one byte.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        let block = Self { start, layout };
        block.poison();
        Some(block)
    }

    /// To be called while nothing else uses the block.
    fn poison(&self) {
        // SAFETY: the block's own bytes.
        unsafe { self.start.write_bytes(POISON, self.layout.size()) };
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Frees a block when it is dropped.
struct Allocation {
    shared: Arc<Shared>,
    block: Option<Block>,
    bytes: usize,
}

/// A block of the device's memory; `None` if there is none left.
pub(super) fn allocate(shared: &Arc<Shared>, bytes: usize) -> Option<(DeviceSpan, impl Send + Sync + 'static)> {
    let block = Block::new(bytes)?;
    // SAFETY: the block is made of host memory, which this device can address, and nobody else has its address.
    let span = unsafe { DeviceSpan::new(block.start.as_ptr().expose_provenance(), bytes) };
    Some((span, Allocation { shared: Arc::clone(shared), block: Some(block), bytes }))
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        let mut state = self.shared.lock();
        state.memory.allocated_bytes -= self.bytes;
        let access = Access::write(block.start.as_ptr() as usize, self.bytes);
        if state.checker.host(access, "freeing") {
            if state.is_still() {
                // Operations begin under the lock: none can run now.
                block.poison();
            }
            state.memory.quarantine.push(block);
        }
    }
}

/// Ends a pin when it is dropped.
pub(super) struct Pin {
    pub(super) shared: Arc<Shared>,
    pub(super) start: usize,
    pub(super) bytes: usize,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.memory.pins.retain(|&(start, _)| start != self.start);
        state.checker.host(Access::write(self.start, self.bytes), "unpinning");
    }
}
