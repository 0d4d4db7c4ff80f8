//! Bytes on loan to work that outlives every borrow: copies under way and updates on other threads. A span is the only
//! handle to its bytes, like a `Box<[u8]>` that does not own them; it is cut, never copied.

use super::arena::{Element, plane_bytes};
use super::sys::Mapping;
use crate::error::Result;
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

/// Host memory: a run of bytes of a mapping, which it keeps mapped.
#[derive(Debug)]
pub struct HostSpan {
    start: NonNull<u8>,
    bytes: usize,
    mapping: Option<Arc<Mapping>>,
    /// Counts the parts of a ring's slot that are still out.
    lease: Option<Arc<()>>,
}

// SAFETY: the span is the only handle to its bytes (see `new`), so sending it sends plain bytes.
unsafe impl Send for HostSpan {}
// SAFETY: `&HostSpan` gives out an address and a length, nothing else.
unsafe impl Sync for HostSpan {}

impl HostSpan {
    /// Lends `bytes` bytes from `start`, which lie in `mapping` (or are none).
    ///
    /// # Safety
    /// While the span or any part cut off it lives, the bytes are initialised and nobody else reads or writes them.
    pub(crate) unsafe fn new(start: NonNull<u8>, bytes: usize, mapping: Option<Arc<Mapping>>) -> Self {
        Self { start, bytes, mapping, lease: None }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Where it starts.
    pub fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// Whether a device can copy to and from it by itself, and address it.
    pub fn is_pinned(&self) -> bool {
        self.mapping.as_ref().is_none_or(|mapping| mapping.is_pinned())
    }

    /// Cuts off the first `bytes` bytes.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn split_front(&mut self, bytes: usize) -> Self {
        assert!(bytes <= self.bytes, "{bytes} bytes of a span of {}", self.bytes);
        let (mapping, lease) = (self.mapping.clone(), self.lease.clone());
        let front = Self { start: self.start, bytes, mapping, lease };
        // SAFETY: stays inside the span, or points one past its end.
        self.start = unsafe { self.start.add(bytes) };
        self.bytes -= bytes;
        front
    }

    /// The bytes as elements.
    ///
    /// # Panics
    /// If the span is not a whole number of aligned elements.
    pub fn as_mut_slice<T: Element>(&mut self) -> &mut [T] {
        assert!(self.bytes.is_multiple_of(size_of::<T>()), "{} bytes as elements of {}", self.bytes, size_of::<T>());
        if self.bytes == 0 {
            return &mut [];
        }
        let start = self.start.cast::<T>();
        assert!(start.is_aligned(), "a span at {start:?} as elements of {}", size_of::<T>());
        // SAFETY: `new`'s contract: initialised bytes that nobody else touches, for as long as the span lives; any bytes
        // are a valid `T`, and the length and alignment have been checked.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), self.bytes / size_of::<T>()) }
    }

    /// The span as parts that do not cross a border between pieces of memory that were pinned one by one: a copy that
    /// crosses one fails. Each is an offset and a length.
    pub fn pieces(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (start, bytes) = (self.address(), self.bytes);
        let piece =
            self.mapping.as_ref().and_then(|mapping| Some((mapping.base().as_ptr() as usize, mapping.piece()?)));
        let mut at = 0;
        std::iter::from_fn(move || {
            let left = bytes.checked_sub(at).filter(|&left| left > 0)?;
            let len = piece.map_or(left, |(base, piece)| left.min(piece - (start + at - base) % piece));
            at += len;
            Some((at - len, len))
        })
    }
}

/// Joins spans of planes that lie one behind the other in the arena, so that one copy carries them all: with the padding
/// between them, which is nobody's.
pub fn join_neighbours(mut spans: Vec<HostSpan>) -> Vec<HostSpan> {
    spans.retain(|span| !span.is_empty());
    spans.sort_by_key(HostSpan::address);
    let mut joined: Vec<HostSpan> = Vec::new();
    let mut next = 0; // where the plane behind the last one starts
    for span in spans {
        let (address, bytes) = (span.address(), span.bytes);
        let same = |last: &HostSpan| match (&last.mapping, &span.mapping) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        match joined.last_mut() {
            Some(last) if address == next && same(last) => last.bytes = address + bytes - last.address(),
            _ => joined.push(span),
        }
        next = address + plane_bytes::<u8>(bytes).unwrap_or(bytes);
    }
    joined
}

/// A fixed number of equal slots of host memory, each lent out and taken back again and again.
#[derive(Debug)]
pub struct HostRing {
    mapping: Arc<Mapping>,
    slot_bytes: usize,
    leases: Vec<Arc<()>>,
}

impl HostRing {
    /// A ring of `slots` slots of `slot_bytes` bytes.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn new(slots: usize, slot_bytes: usize) -> Result<Self> {
        let slot_bytes = slot_bytes.next_multiple_of(4096);
        let mapping = Arc::new(Mapping::new(slots.max(1) * slot_bytes.max(1))?);
        Ok(Self { mapping, slot_bytes, leases: (0..slots).map(|_| Arc::new(())).collect() })
    }

    /// Pins the whole ring.
    ///
    /// # Errors
    /// What `pin` returns; nothing is pinned then.
    pub fn pin(&self, pin: impl Fn(usize, usize) -> Result<Box<dyn Any + Send + Sync>>) -> Result<()> {
        pin_mapping(&self.mapping, pin)
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> usize {
        self.mapping.bytes()
    }

    /// Lends a slot; `None` while any part of it is out.
    pub fn lend(&mut self, slot: usize) -> Option<HostSpan> {
        let lease = &self.leases[slot];
        if Arc::strong_count(lease) > 1 {
            return None;
        }
        // SAFETY: the slot lies inside the mapping, as `new` sized it.
        let start = unsafe { self.mapping.base().add(slot * self.slot_bytes) };
        // SAFETY: mapped zeros; slots do not overlap, and of this one no part is out.
        let mut span = unsafe { HostSpan::new(start, self.slot_bytes, Some(Arc::clone(&self.mapping))) };
        span.lease = Some(Arc::clone(lease));
        Some(span)
    }
}

/// Pins a mapping piece by piece.
pub(crate) fn pin_mapping(
    mapping: &Mapping,
    pin: impl Fn(usize, usize) -> Result<Box<dyn Any + Send + Sync>>,
) -> Result<()> {
    let guards = mapping.pieces().map(|(start, bytes)| pin(start, bytes)).collect::<Result<Vec<_>>>()?;
    mapping.set_pinned(guards);
    Ok(())
}

/// Memory that a device can address: its own, or host memory that is pinned and mapped.
#[derive(Debug)]
pub struct DeviceSpan {
    start: usize,
    bytes: usize,
    lease: Option<Arc<()>>,
}

impl DeviceSpan {
    /// Lends `bytes` bytes from device address `start`.
    ///
    /// # Safety
    /// While the span or any part cut off it is in use, and until the work given to the device with it is done, the
    /// device can address the bytes, and nobody else touches them but in that work's order.
    pub unsafe fn new(start: usize, bytes: usize) -> Self {
        Self { start, bytes, lease: None }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Where it starts, as the device knows it.
    pub fn address(&self) -> usize {
        self.start
    }

    /// Cuts off the first `bytes` bytes.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn split_front(&mut self, bytes: usize) -> Self {
        assert!(bytes <= self.bytes, "{bytes} bytes of a span of {}", self.bytes);
        let front = Self { start: self.start, bytes, lease: self.lease.clone() };
        self.start += bytes;
        self.bytes -= bytes;
        front
    }

    /// Extends to the end of `next`, which lies behind it: what is between the two is in nobody else's use either.
    ///
    /// # Panics
    /// If `next` does not lie behind it.
    pub(crate) fn append(&mut self, next: &Self) {
        let between = next.start.checked_sub(self.start).filter(|&at| at >= self.bytes);
        let Some(at) = between else { panic!("a span at {:#x} behind one at {:#x}", next.start, self.start) };
        self.bytes = at + next.bytes;
    }
}

/// As [`HostRing`], of a device's memory.
#[derive(Debug)]
pub struct DeviceRing {
    start: usize,
    slot_bytes: usize,
    leases: Vec<Arc<()>>,
    _memory: Box<dyn Any + Send + Sync>,
}

impl DeviceRing {
    /// Cuts memory, and what frees it, into slots.
    pub fn new(memory: &DeviceSpan, guard: Box<dyn Any + Send + Sync>, slots: usize) -> Self {
        let slot_bytes = memory.len() / slots.max(1);
        let leases = (0..slots).map(|_| Arc::new(())).collect();
        Self { start: memory.address(), slot_bytes, leases, _memory: guard }
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> usize {
        self.slot_bytes * self.leases.len()
    }

    /// Lends a slot; `None` while any part of it is out.
    pub fn lend(&mut self, slot: usize) -> Option<DeviceSpan> {
        let lease = &self.leases[slot];
        (Arc::strong_count(lease) == 1).then(|| DeviceSpan {
            start: self.start + slot * self.slot_bytes,
            bytes: self.slot_bytes,
            lease: Some(Arc::clone(lease)),
        })
    }
}
