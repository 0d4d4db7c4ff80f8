//! Host memory for state: slabs mapped exactly to size and first touched by the worker pool, cut into planes. One plane
//! is one contiguous run of one parameter's state; it keeps its slab alive, so a tensor over a plane outlives the arena.

use super::span::{HostSpan, pin_mapping};
use super::sys::{HUGE_PAGE, Mapping, page_size};
use crate::error::{Error, Result};
use crate::kernel::DefaultFloatEnvironment;
use crate::pool::WorkerPool;
use half::{bf16, f16};
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

/// Planes start on cache lines.
pub const ALIGNMENT: usize = 64;

/// A type whose values are any bytes, zeros included: what a plane may hold.
///
/// # Safety
/// Every bit pattern of the type's size is a valid value, and its alignment divides [`ALIGNMENT`].
pub unsafe trait Element: Copy + Send + Sync + 'static {}
// SAFETY: plain numbers.
unsafe impl Element for f32 {}
// SAFETY: plain numbers.
unsafe impl Element for f64 {}
// SAFETY: plain numbers.
unsafe impl Element for i16 {}
// SAFETY: plain bytes.
unsafe impl Element for u8 {}
// SAFETY: a transparent u16.
unsafe impl Element for bf16 {}
// SAFETY: a transparent u16.
unsafe impl Element for f16 {}

/// One contiguous run of zero-initialised elements in a slab.
#[derive(Debug)]
pub struct Plane<T> {
    start: NonNull<T>,
    len: usize,
    /// `None` for a plane without elements.
    slab: Option<Arc<Mapping>>,
}

// SAFETY: a plane is the only safe handle to its range of the slab, so sending it sends the elements, which are Send.
unsafe impl<T: Element> Send for Plane<T> {}
// SAFETY: shared access reads elements, which are Sync.
unsafe impl<T: Element> Sync for Plane<T> {}

impl<T> Default for Plane<T> {
    /// A plane without elements.
    fn default() -> Self {
        Self { start: NonNull::dangling(), len: 0, slab: None }
    }
}

impl<T: Element> Plane<T> {
    /// The elements.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: the range lies in a live slab, is aligned, initialised (the kernel maps zeros) and, by `carve`, no
        // other plane's; `&self` excludes writers that go through the plane.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The elements, to write.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`; `&mut self` excludes every other access that goes through the plane.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Lends the plane's bytes to work that outlives this borrow.
    ///
    /// # Safety
    /// Until the span and all parts of it are dropped, nobody reads or writes the plane, through it or through an address
    /// that [`Self::share`] has given out.
    #[cfg(any(test, feature = "python"))]
    pub(crate) unsafe fn lend(&mut self) -> HostSpan {
        // SAFETY: the plane's own bytes, which its mapping keeps; the caller keeps everybody else away.
        unsafe { HostSpan::new(self.start.cast(), self.len * size_of::<T>(), self.slab.clone()) }
    }

    /// The address, and a handle that keeps the memory behind it mapped: for tensors of another library over this plane.
    /// Whoever reads or writes through the address keeps out of the way of a step, as with any tensor.
    pub fn share(&self) -> (NonNull<T>, SlabHandle) {
        (self.start, SlabHandle { _slab: self.slab.clone() })
    }

    /// Whether its slab is pinned.
    pub fn is_pinned(&self) -> bool {
        self.slab.as_ref().is_some_and(|slab| slab.is_pinned())
    }
}

/// A plane of bytes that this crate only has copied: it makes no reference to them, so that copies may be under way while
/// others hold its address. Its copies' order is the business of whoever asks for spans of it.
#[derive(Debug)]
pub(crate) struct Berth(Plane<u8>);

impl Berth {
    /// Takes over a plane.
    pub(crate) fn new(plane: Plane<u8>) -> Self {
        Self(plane)
    }

    /// Number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len
    }

    /// As [`Plane::share`], the address as a number.
    pub(crate) fn share(&self) -> (usize, SlabHandle) {
        let (start, handle) = self.0.share();
        (start.as_ptr().expose_provenance(), handle)
    }

    /// Bytes of the slab from `offset` on, counted from this plane's first, for a copy that [`Plane::share`]'s holders know
    /// of. They may reach into the planes behind this one, which are berths of the same owner.
    ///
    /// # Panics
    /// If they reach beyond the slab.
    pub(crate) fn span(&self, offset: usize, bytes: usize) -> HostSpan {
        let Some(slab) = &self.0.slab else { panic!("{bytes} bytes of a plane without elements") };
        let start = self.0.start.as_ptr().addr() - slab.base().as_ptr().addr() + offset;
        assert!(start + bytes <= slab.bytes(), "{bytes} bytes from {start} of a slab of {}", slab.bytes());
        // SAFETY: inside the slab, by the assertion.
        let start = unsafe { slab.base().add(start) };
        // SAFETY: mapped zeros to begin with; no reference to a berth's bytes is ever made (`new` takes the plane, and
        // nothing here gives out a slice), and a span that is only copied from or to makes none either.
        unsafe { HostSpan::new(start, bytes, Some(Arc::clone(slab))) }
    }
}

/// Keeps a slab mapped.
#[derive(Clone, Debug)]
pub struct SlabHandle {
    _slab: Option<Arc<Mapping>>,
}

/// The slabs of one optimizer.
#[derive(Debug, Default)]
pub struct Arena {
    slabs: Vec<std::sync::Weak<Mapping>>,
}

/// A slab being cut into planes.
#[derive(Debug)]
pub struct Slab {
    mapping: Option<Arc<Mapping>>,
    used: usize,
}

/// The bytes that a plane of `len` elements takes of a slab: whole cache lines, and one more where the next plane would
/// start on the same line of a page. Neighbouring planes of 2^k bytes would otherwise have the same low address bits, and
/// the level-1 cache of Zen processors, which tells lines apart by a hash of those, throws one plane's lines out for the
/// other's: 64 Mi-element moments took 119 ms of CPU time a step, and 73 ms a cache line apart.
///
/// # Errors
/// [`Error::InvalidValue`] if they exceed the address space.
pub fn plane_bytes<T: Element>(len: usize) -> Result<usize> {
    let padded = |bytes: usize| {
        let bytes = bytes.checked_next_multiple_of(ALIGNMENT)?;
        if bytes > 0 && bytes.is_multiple_of(4096) { bytes.checked_add(ALIGNMENT) } else { Some(bytes) }
    };
    len.checked_mul(size_of::<T>()).and_then(padded).ok_or_else(|| {
        Error::InvalidValue(format!("{len} elements of {} bytes exceed the address space", size_of::<T>()))
    })
}

impl Arena {
    /// Maps a slab of `bytes` in all, touched by the pool's threads so that its pages are theirs and are there before
    /// the first step.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Forked`].
    pub fn slab(&mut self, bytes: usize, pool: &WorkerPool) -> Result<Slab> {
        if bytes == 0 {
            return Ok(Slab { mapping: None, used: 0 });
        }
        let mapping = Arc::new(Mapping::new(bytes)?);
        touch(&mapping, pool)?;
        self.slabs.retain(|slab| slab.strong_count() > 0);
        self.slabs.push(Arc::downgrade(&mapping));
        Ok(Slab { mapping: Some(mapping), used: 0 })
    }

    /// Whether any byte from address `start` to `end` is this arena's.
    pub fn holds(&self, start: usize, end: usize) -> bool {
        self.slabs.iter().filter_map(std::sync::Weak::upgrade).any(|slab| {
            let base = slab.base().as_ptr() as usize;
            start < base + slab.bytes() && base < end
        })
    }

    /// Bytes of those that are pinned.
    pub fn pinned_bytes(&self) -> usize {
        let slabs = self.slabs.iter().filter_map(std::sync::Weak::upgrade);
        slabs.filter(|slab| slab.is_pinned()).map(|slab| slab.bytes()).sum()
    }

    /// Bytes mapped and still in use by a plane or a tensor over one.
    pub fn bytes(&self) -> usize {
        self.slabs.iter().filter_map(std::sync::Weak::upgrade).map(|slab| slab.bytes()).sum()
    }
}

impl Slab {
    /// Bytes mapped.
    pub fn bytes(&self) -> usize {
        self.mapping.as_ref().map_or(0, |mapping| mapping.bytes())
    }

    /// Pins the whole slab, piece by piece.
    ///
    /// # Errors
    /// What `pin` returns; nothing is pinned then.
    pub fn pin(&self, pin: impl Fn(usize, usize) -> Result<Box<dyn Any + Send + Sync>>) -> Result<()> {
        self.mapping.as_ref().map_or(Ok(()), |mapping| pin_mapping(mapping, pin))
    }

    /// Cuts the next plane off the slab.
    ///
    /// # Panics
    /// If the slab was made smaller than its planes.
    pub fn carve<T: Element>(&mut self, len: usize) -> Plane<T> {
        let bytes = plane_bytes::<T>(len).unwrap_or_else(|error| panic!("{error}"));
        if len == 0 {
            return Plane::default();
        }
        let Some(mapping) = &self.mapping else { panic!("a plane of {len} elements from an empty slab") };
        assert!(
            mapping.bytes() - self.used >= bytes,
            "a plane of {bytes} bytes from {} left",
            mapping.bytes() - self.used
        );
        // SAFETY: `used + bytes` is at most the mapping's size, by the assertion.
        let start = unsafe { mapping.base().add(self.used) }.cast::<T>();
        self.used += bytes;
        Plane { start, len, slab: Some(Arc::clone(mapping)) }
    }
}

/// Writes one byte to every page, in parallel.
pub(super) fn touch(mapping: &Mapping, pool: &WorkerPool) -> Result<()> {
    const PIECE: usize = 4 * HUGE_PAGE;
    let page = page_size();
    let starts = (0..mapping.bytes()).step_by(PIECE);
    let failures = pool.for_each(starts, |start| {
        let _environment = DefaultFloatEnvironment::enter();
        for offset in (start..mapping.bytes().min(start + PIECE)).step_by(page) {
            // SAFETY: the byte lies in the mapping, which nobody else has seen yet; its value stays zero.
            unsafe { mapping.base().add(offset).as_ptr().write_volatile(0) };
        }
    })?;
    match failures.into_iter().next() {
        None => Ok(()),
        Some((_, cause)) => Err(Error::OutOfMemory { bytes: mapping.bytes(), cause: std::io::Error::other(cause) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena() -> (Arena, WorkerPool) {
        (Arena::default(), WorkerPool::new(2).unwrap())
    }

    #[test]
    fn planes_are_zero_aligned_and_disjoint() {
        let (mut arena, pool) = arena();
        let lens = [1, 0, 17, 1000];
        let bytes =
            lens.iter().map(|&len| plane_bytes::<f32>(len).unwrap()).sum::<usize>() + plane_bytes::<i16>(5).unwrap();
        let mut slab = arena.slab(bytes, &pool).unwrap();
        let mut planes: Vec<Plane<f32>> = lens.iter().map(|&len| slab.carve(len)).collect();
        let mut shorts = slab.carve::<i16>(5);
        for (i, plane) in planes.iter_mut().enumerate() {
            assert_eq!(plane.as_slice(), vec![0.0; lens[i]]);
            assert_eq!(plane.share().0.as_ptr() as usize % if lens[i] > 0 { ALIGNMENT } else { 1 }, 0);
            plane.as_mut_slice().fill(i as f32 + 1.0);
        }
        shorts.as_mut_slice().fill(-1);
        for (i, plane) in planes.iter().enumerate() {
            assert_eq!(plane.as_slice(), vec![i as f32 + 1.0; lens[i]]);
        }
    }

    #[test]
    fn planes_of_whole_pages_do_not_start_alike() {
        let (mut arena, pool) = arena();
        let len = HUGE_PAGE / 4;
        let mut slab = arena.slab(3 * plane_bytes::<f32>(len).unwrap(), &pool).unwrap();
        let starts: Vec<usize> = (0..3).map(|_| slab.carve::<f32>(len).share().0.as_ptr() as usize % 4096).collect();
        assert_eq!(starts, [0, ALIGNMENT, 2 * ALIGNMENT]);
    }

    #[test]
    fn slabs_are_sized_to_need_and_freed_with_their_last_plane() {
        let (mut arena, pool) = arena();
        let small = arena.slab(100, &pool).unwrap().carve::<f32>(25);
        assert_eq!(arena.bytes(), page_size());
        let large = arena.slab(HUGE_PAGE + 1, &pool).unwrap().carve::<f32>(25);
        assert_eq!(arena.bytes(), page_size() + 2 * HUGE_PAGE);
        assert_eq!(large.share().0.as_ptr() as usize % HUGE_PAGE, 0);
        let (_, handle) = large.share();
        drop(large);
        assert_eq!(arena.bytes(), page_size() + 2 * HUGE_PAGE, "a tensor over the plane is still there");
        drop((handle, small));
        assert_eq!(arena.bytes(), 0);
    }

    #[test]
    fn impossible_sizes_are_errors() {
        let (mut arena, pool) = arena();
        assert!(matches!(arena.slab(1 << 60, &pool), Err(Error::OutOfMemory { .. })));
        assert!(matches!(arena.slab(usize::MAX, &pool), Err(Error::OutOfMemory { .. })));
        assert!(plane_bytes::<f32>(usize::MAX / 2).is_err());
        assert_eq!(arena.slab(0, &pool).unwrap().carve::<f32>(0).as_slice(), &[] as &[f32]);
    }
}
