//! Host memory that is lent and taken back: buffers of many sizes, pinned if asked, that are used again only once what
//! copies to or from them is done.

mod book;
mod classes;
#[cfg(test)]
mod tests;

pub use classes::class_of;

use super::span::HostSpan;
use super::sys::Mapping;
use crate::error::{Error, Result};
use crate::pool::WorkerPool;
use book::{Book, Lent};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// When a buffer that has been given back is no longer in use.
pub trait Fence: Send {
    /// Whether it is. Does not wait.
    ///
    /// # Errors
    /// [`Error::Cuda`]: nobody can say. The buffer is not used again.
    fn is_done(&self) -> Result<bool>;

    /// Waits until it is.
    ///
    /// # Errors
    /// As [`Self::is_done`].
    fn wait(&self) -> Result<()>;
}

/// Pins a run of memory, by address and bytes; what is returned ends that when it is dropped.
pub type Pin = dyn Fn(usize, usize) -> Result<Box<dyn Any + Send + Sync>> + Send + Sync;

/// How a pool gets its memory.
#[derive(Default)]
pub struct HostPoolOptions {
    /// The most bytes that it maps; `None`: any number.
    pub max_bytes: Option<usize>,
    /// Pins what it maps; `None`: nothing is pinned.
    pub pin: Option<Box<Pin>>,
    /// Whether memory that cannot be pinned is an error; else it stays pageable, with a warning.
    pub must_pin: bool,
}

impl fmt::Debug for HostPoolOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { max_bytes, pin, must_pin } = self;
        let pin = pin.is_some();
        f.debug_struct("HostPoolOptions")
            .field("max_bytes", max_bytes)
            .field("pin", &pin)
            .field("must_pin", must_pin)
            .finish()
    }
}

/// What a pool holds. Bytes are those of buffers, rounded as they are, unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPoolStats {
    /// Lent.
    pub live: usize,
    /// Free to be lent.
    pub cached: usize,
    /// Given back, and still in use by copies.
    pub pending: usize,
    /// The most that was lent or in use by copies at a time.
    pub peak: usize,
    /// Requests that were served with a buffer that there was.
    pub hits: u64,
    /// Requests that were served with a new one.
    pub misses: u64,
    /// Of what is lent, bytes beyond those asked for.
    pub waste: usize,
    /// Bytes mapped.
    pub held: usize,
    /// Bytes mapped and pinned.
    pub pinned: usize,
    /// Number of buffers.
    pub buffers: usize,
}

/// A pool of host memory, for many threads. A clone is the same pool.
///
/// Buffers that are dropped without being given back come back by themselves, and memory outlives the pool as long as a
/// buffer of it does.
///
/// ```
/// use outboard::memory::host_pool::{HostPool, HostPoolOptions};
/// use outboard::WorkerPool;
/// use std::sync::Arc;
///
/// let pool = HostPool::new(Arc::new(WorkerPool::new(1)?), HostPoolOptions::default());
/// let mut buffer = pool.acquire(1000)?;
/// buffer.as_mut_slice().fill(7);
/// pool.release(buffer, None)?;
/// assert_eq!(pool.acquire(1010)?.as_slice()[0], 7);
/// # Ok::<(), outboard::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct HostPool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    book: Mutex<Book>,
    /// Buffers that were dropped: noted down where nothing else is, for whoever drops one may hold any lock.
    dropped: Mutex<Vec<Lent>>,
    process: u32,
}

/// A buffer that is lent: the only safe handle to its bytes.
#[derive(Debug)]
pub struct HostBuffer {
    start: NonNull<u8>,
    bytes: usize,
    mapping: Option<Arc<Mapping>>,
    lent: Option<(Lent, Weak<Shared>)>,
}

// SAFETY: the buffer is the only safe handle to its bytes, so sending it sends plain bytes.
unsafe impl Send for HostBuffer {}
// SAFETY: `&HostBuffer` gives out shared access to plain bytes, an address and a length.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Number of bytes, as asked for.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Where it starts: aligned to [`super::ALIGNMENT`].
    pub fn address(&self) -> usize {
        self.start.as_ptr().expose_provenance()
    }

    /// Whether a device can copy to and from it by itself.
    pub fn is_pinned(&self) -> bool {
        self.mapping.as_ref().is_none_or(|mapping| mapping.is_pinned())
    }

    /// The bytes: what the last user has left there.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: a run of a live mapping, initialised (the kernel maps zeros), lent to nobody else; `&self` excludes
        // writers that go through the buffer.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`; `&mut self` excludes every other access that goes through the buffer.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// Bytes from `offset` on, for a copy.
    ///
    /// # Safety
    /// Until the span is dropped and copies that it was given to are done, the buffer is not lent anew, and nobody touches
    /// these bytes but in the order of those copies.
    ///
    /// # Panics
    /// If they reach beyond the buffer.
    pub unsafe fn span(&self, offset: usize, bytes: usize) -> HostSpan {
        assert!(offset + bytes <= self.bytes, "{bytes} bytes from {offset} of a buffer of {}", self.bytes);
        // SAFETY: inside the mapping, by the assertion.
        let start = unsafe { self.start.add(offset) };
        // SAFETY: initialised bytes; the caller keeps everybody else away.
        unsafe { HostSpan::new(start, bytes, self.mapping.clone()) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if let Some((lent, pool)) = self.lent.take()
            && let Some(pool) = pool.upgrade()
        {
            lock(&pool.dropped).push(lent);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HostPool {
    /// A pool without memory; `workers` touch what it maps.
    pub fn new(workers: Arc<WorkerPool>, options: HostPoolOptions) -> Self {
        let book = Mutex::new(Book::new(workers, options));
        Self { shared: Arc::new(Shared { book, dropped: Mutex::default(), process: crate::process::id() }) }
    }

    fn check_process(&self) -> Result<()> {
        let used_in = crate::process::id();
        if used_in == self.shared.process {
            return Ok(());
        }
        // Another thread may have held a lock at the fork: then it is held for good.
        Err(Error::Forked { made_in: self.shared.process, used_in })
    }

    /// The books, with what was dropped meanwhile taken back.
    fn book(&self) -> Result<MutexGuard<'_, Book>> {
        self.check_process()?;
        let mut book = lock(&self.shared.book);
        let dropped = std::mem::take(&mut *lock(&self.shared.dropped));
        for lent in dropped {
            book.take_back(&lent);
        }
        Ok(book)
    }

    /// Lends `bytes` bytes; of 0, a buffer that is nowhere.
    ///
    /// A free buffer of that size serves, or one that copies are done with, or a new one. Where that would exceed
    /// `max_bytes`, a larger free buffer does, or what other sizes have cached is given up, or it waits for the oldest buffer
    /// in use by copies that is large enough.
    ///
    /// # Errors
    /// [`Error::PoolLimit`] if there is no such buffer; [`Error::OutOfMemory`], [`Error::Forked`]; [`Error::Cuda`] if memory
    /// must be pinned and cannot be, or nobody can say when a copy is done.
    pub fn acquire(&self, bytes: usize) -> Result<HostBuffer> {
        if bytes == 0 {
            self.check_process()?;
            return Ok(HostBuffer { start: NonNull::dangling(), bytes, mapping: None, lent: None });
        }
        let mut book = self.book()?;
        loop {
            match book.lend(bytes)? {
                book::Answer::Buffer { start, mapping, lent } => {
                    let lent = Some((lent, Arc::downgrade(&self.shared)));
                    return Ok(HostBuffer { start, bytes, mapping: Some(mapping), lent });
                }
                book::Answer::WaitFor(pending) => {
                    // Others go on meanwhile.
                    drop(book);
                    let waited = pending.fence.wait();
                    book = self.book()?;
                    book.has_waited(&pending, waited.is_ok());
                    waited?;
                }
            }
        }
    }

    /// Takes a buffer back. It is lent anew once `until` is done, or at once without.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a buffer of another pool, which goes back there; [`Error::Forked`].
    pub fn release(&self, mut buffer: HostBuffer, until: Option<Box<dyn Fence>>) -> Result<()> {
        let mut book = self.book()?;
        let Some((lent, pool)) = buffer.lent.take() else { return Ok(()) };
        if !std::ptr::eq(pool.as_ptr(), Arc::as_ptr(&self.shared)) {
            buffer.lent = Some((lent, pool));
            return Err(Error::InvalidValue("release of a buffer that is another pool's".into()));
        }
        book.give_back(&lent, until);
        Ok(())
    }

    /// As [`Self::release`], of the buffer that the byte at `address` is in; its [`HostBuffer`] does nothing any more when it
    /// is dropped, and nobody uses it.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if no buffer that is lent is there; [`Error::Forked`].
    #[cfg(any(test, feature = "python"))]
    pub(crate) fn release_at(&self, address: usize, until: Option<Box<dyn Fence>>) -> Result<()> {
        let mut book = self.book()?;
        let lent = book.find(address)?;
        book.give_back(&lent, until);
        Ok(())
    }

    /// Unmaps what is not in use; returns how many bytes that are.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::Cuda`] if nobody can say when a copy is done.
    pub fn trim(&self) -> Result<usize> {
        self.book()?.trim()
    }

    /// What the pool holds now.
    ///
    /// # Errors
    /// As [`Self::trim`].
    pub fn stats(&self) -> Result<HostPoolStats> {
        let mut book = self.book()?;
        book.collect()?;
        Ok(book.stats())
    }

    /// What was to be told since the last call: memory that could not be pinned.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn take_warnings(&self) -> Result<Vec<String>> {
        Ok(std::mem::take(&mut self.book()?.warnings))
    }
}

impl Drop for Shared {
    /// Waits until no copy touches its memory.
    fn drop(&mut self) {
        let is_ours = crate::process::id() == self.process;
        self.book.get_mut().unwrap_or_else(PoisonError::into_inner).end(is_ours);
    }
}
