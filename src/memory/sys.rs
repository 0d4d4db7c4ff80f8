//! The system calls behind the arena: map, advise, unmap.

use crate::error::{Error, Result};
use std::any::Any;
use std::ptr::NonNull;
use std::sync::OnceLock;

/// The size of a huge page, and what slabs of at least that size are rounded to.
pub const HUGE_PAGE: usize = 2 << 20;

/// A private anonymous mapping.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    pins: OnceLock<Pins>,
}

/// What keeps a mapping pinned, piece by piece.
#[derive(Debug)]
struct Pins {
    piece: usize,
    guards: Vec<Box<dyn Any + Send + Sync>>,
}

/// The size of the pieces in which memory is pinned: registering one range above 512 GiB fails, and a smaller piece
/// lets the workers share the work.
const PIECE: usize = 1 << 30;

// SAFETY: a mapping is plain memory that no thread owns; whoever hands out access to it answers for races.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods only read the address and the size.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `bytes` (more than 0) of zeros: whole huge pages, aligned to them and advised to become them, from
    /// [`HUGE_PAGE`] on; ordinary pages below. Not inherited by a fork: a child that touched it would cost the parent
    /// its huge pages for good, so the child finds zeros instead (where the kernel knows how).
    pub(crate) fn new(bytes: usize) -> Result<Self> {
        let huge = bytes >= HUGE_PAGE;
        let granule = if huge { HUGE_PAGE } else { page_size() };
        let out_of_memory = |cause| Error::OutOfMemory { bytes, cause };
        let too_large = || out_of_memory(std::io::Error::from_raw_os_error(libc::ENOMEM));
        let rounded = bytes.checked_next_multiple_of(granule).ok_or_else(too_large)?;
        // mmap aligns to ordinary pages: map one granule more and give back what sticks out.
        let slack = if huge { HUGE_PAGE } else { 0 };
        let asked = rounded.checked_add(slack).ok_or_else(too_large)?;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches no other memory.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                asked,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(out_of_memory(std::io::Error::last_os_error()));
        }
        let raw = raw.cast::<u8>();
        let head = raw.align_offset(granule).min(slack);
        let tail = slack - head;
        let base = raw.wrapping_add(head);
        for (start, len) in [(raw, head), (base.wrapping_add(rounded), tail)] {
            if len > 0 {
                // SAFETY: the range lies inside the mapping just made, on page borders, and nothing points into it yet.
                unsafe { libc::munmap(start.cast(), len) };
            }
        }
        let base = NonNull::new(base).ok_or_else(too_large)?;
        let mapping = Self { base, bytes: rounded, pins: OnceLock::new() };
        if huge {
            mapping.advise(libc::MADV_HUGEPAGE);
        }
        mapping.advise(libc::MADV_WIPEONFORK);
        Ok(mapping)
    }

    /// Advice is a wish: some machines (gVisor) know none of it, and nothing depends on it.
    fn advise(&self, advice: libc::c_int) {
        // SAFETY: the range is this mapping; neither advice changes what a reader of this process sees.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.bytes, advice) };
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The ranges (address and bytes) in which to pin it.
    pub(crate) fn pieces(&self) -> impl ExactSizeIterator<Item = (usize, usize)> + use<> {
        let (base, bytes) = (self.base.as_ptr() as usize, self.bytes);
        (0..bytes).step_by(PIECE).map(move |at| (base + at, PIECE.min(bytes - at)))
    }

    /// Takes over the guards of its pieces, all of them, in any order. Once only.
    pub(crate) fn set_pinned(&self, guards: Vec<Box<dyn Any + Send + Sync>>) {
        debug_assert_eq!(guards.len(), self.pieces().len());
        let set = self.pins.set(Pins { piece: PIECE, guards });
        debug_assert!(set.is_ok(), "pinned twice");
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.pins.get().is_some()
    }

    /// The size of its pinned pieces, if it is pinned.
    pub(crate) fn piece(&self) -> Option<usize> {
        self.pins.get().map(|pins| pins.piece)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Before the memory goes.
        if let Some(pins) = self.pins.take() {
            drop(pins.guards);
        }
        // SAFETY: the range was mapped by `new` and is unmapped once; planes, which point into it, keep it alive.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// The size of an ordinary page.
pub fn page_size() -> usize {
    // SAFETY: sysconf only reads a constant of the system.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// The bytes that the process may lock in memory (`RLIMIT_MEMLOCK`); `None`: any number, or nobody knows.
pub fn locked_memory_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills the struct that it is given.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0;
    (!failed && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}
