//! A pool's books: which buffers there are, who has them, and where the next one comes from.

use super::{Fence, HostPoolOptions, HostPoolStats, class_of};
use crate::error::{Error, Result};
use crate::memory::arena::touch;
use crate::memory::span::pin_mapping;
use crate::memory::sys::{HUGE_PAGE, Mapping, locked_memory_limit, page_size};
use crate::pool::WorkerPool;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Buffers from this size on have a mapping of their own; smaller ones are cut from one.
const OWN: usize = 16 << 20;

/// The most bytes that are mapped for smaller buffers at a time.
const CHUNK: usize = 32 << 20;

/// One lending of a buffer.
#[derive(Clone, Debug)]
pub(super) struct Lent {
    start: usize,
    number: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// Lent, the how manieth time in this pool, and the bytes asked for.
    Lent {
        number: u64,
        bytes: usize,
    },
    Pending,
}

#[derive(Debug)]
struct Buffer {
    class: usize,
    /// Where its mapping starts.
    chunk: usize,
    state: State,
}

#[derive(Debug)]
struct Chunk {
    mapping: Arc<Mapping>,
    used: usize,
}

/// A buffer that copies still use.
pub(super) struct Pending {
    start: usize,
    class: usize,
    pub(super) fence: Box<dyn Fence>,
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({:#x}, {})", self.start, self.class)
    }
}

/// What a request comes to.
pub(super) enum Answer {
    Buffer {
        start: NonNull<u8>,
        mapping: Arc<Mapping>,
        lent: Lent,
    },
    /// The pool is full: wait for this, say so, and ask again.
    WaitFor(Pending),
}

#[derive(Debug)]
pub(super) struct Book {
    workers: Arc<WorkerPool>,
    options: HostPoolOptions,
    /// By where they start.
    chunks: BTreeMap<usize, Chunk>,
    /// By where they start.
    buffers: BTreeMap<usize, Buffer>,
    /// Free ones, by class; the one given back last is lent first.
    free: BTreeMap<usize, Vec<usize>>,
    /// Oldest first.
    pending: VecDeque<Pending>,
    /// Buffers of which nobody can say when copies are done with them: not used again, and never unmapped.
    lost: Vec<usize>,
    lendings: u64,
    live: usize,
    cached: usize,
    in_use: usize,
    asked: usize,
    peak: usize,
    hits: u64,
    misses: u64,
    pub(super) warnings: Vec<String>,
}

impl Book {
    pub(super) fn new(workers: Arc<WorkerPool>, options: HostPoolOptions) -> Self {
        Self {
            workers,
            options,
            chunks: BTreeMap::new(),
            buffers: BTreeMap::new(),
            free: BTreeMap::new(),
            pending: VecDeque::new(),
            lost: Vec::new(),
            lendings: 0,
            live: 0,
            cached: 0,
            in_use: 0,
            asked: 0,
            peak: 0,
            hits: 0,
            misses: 0,
            warnings: Vec::new(),
        }
    }

    // ---- Lending -----------------------------------------------------------------------------------------------------

    /// Serves a request, or says what to wait for.
    pub(super) fn lend(&mut self, bytes: usize) -> Result<Answer> {
        let too_large = || Error::InvalidValue(format!("{bytes} bytes exceed the address space"));
        let class = class_of(bytes).ok_or_else(too_large)?;
        if let Some(start) = self.pop_free(class) {
            return Ok(self.hand_out(start, bytes, false));
        }
        self.collect_of(Some(class))?;
        if let Some(start) = self.pop_free(class) {
            return Ok(self.hand_out(start, bytes, false));
        }
        if let Some(start) = self.cut(class)? {
            return Ok(self.hand_out(start, bytes, true));
        }
        self.lend_at_the_limit(class, bytes)
    }

    fn lend_at_the_limit(&mut self, class: usize, bytes: usize) -> Result<Answer> {
        self.collect()?;
        let larger = self.free.range(class..).find(|(_, starts)| !starts.is_empty()).map(|(&class, _)| class);
        if let Some(start) = larger.and_then(|class| self.pop_free(class)) {
            return Ok(self.hand_out(start, bytes, false));
        }
        self.make_room(Self::mapped_for(class));
        if let Some(start) = self.cut(class)? {
            return Ok(self.hand_out(start, bytes, true));
        }
        let oldest = self.pending.iter().position(|pending| pending.class >= class);
        // A smaller one may be all that keeps a mapping from being given up.
        let oldest = oldest.or_else(|| (!self.pending.is_empty() && self.could_fit(class)).then_some(0));
        if let Some(pending) = oldest.and_then(|at| self.pending.remove(at)) {
            return Ok(Answer::WaitFor(pending));
        }
        let (held, allowed) = (self.held(), self.options.max_bytes.unwrap_or(usize::MAX));
        Err(Error::PoolLimit { asked: bytes, rounded: class, held, live: self.live, allowed })
    }

    /// Whether a class would have room if nothing were in use by copies.
    fn could_fit(&self, class: usize) -> bool {
        let kept = |start: &usize, chunk: &Chunk| {
            let end = *start + chunk.mapping.bytes();
            self.buffers.range(*start..end).any(|(_, buffer)| matches!(buffer.state, State::Lent { .. }))
        };
        let kept: usize = self
            .chunks
            .iter()
            .filter(|(start, chunk)| kept(start, chunk))
            .map(|(_, chunk)| chunk.mapping.bytes())
            .sum();
        self.options.max_bytes.is_none_or(|most| kept + Self::mapped_for(class) <= most)
    }

    fn pop_free(&mut self, class: usize) -> Option<usize> {
        let start = self.free.get_mut(&class)?.pop()?;
        self.cached -= class;
        Some(start)
    }

    fn hand_out(&mut self, start: usize, bytes: usize, is_new: bool) -> Answer {
        *(if is_new { &mut self.misses } else { &mut self.hits }) += 1;
        self.lendings += 1;
        let number = self.lendings;
        let Some(buffer) = self.buffers.get_mut(&start) else { unreachable!("a buffer at {start:#x}") };
        buffer.state = State::Lent { number, bytes };
        self.live += buffer.class;
        self.asked += bytes;
        self.peak = self.peak.max(self.live + self.in_use);
        let Some(chunk) = self.chunks.get(&buffer.chunk) else { unreachable!("a mapping at {:#x}", buffer.chunk) };
        let mapping = Arc::clone(&chunk.mapping);
        // SAFETY: buffers lie inside their mapping.
        let start_pointer = unsafe { mapping.base().add(start - buffer.chunk) };
        Answer::Buffer { start: start_pointer, mapping, lent: Lent { start, number } }
    }

    // ---- Memory ------------------------------------------------------------------------------------------------------

    fn held(&self) -> usize {
        self.chunks.values().map(|chunk| chunk.mapping.bytes()).sum()
    }

    /// The bytes of a mapping that holds one buffer of a class.
    fn mapped_for(class: usize) -> usize {
        let granule = if class >= HUGE_PAGE { HUGE_PAGE } else { page_size() };
        class.checked_next_multiple_of(granule).unwrap_or(usize::MAX)
    }

    /// Makes a buffer, of memory that is left over or that is mapped now; `None` at the limit. It counts as nothing yet.
    fn cut(&mut self, class: usize) -> Result<Option<usize>> {
        let left = |chunk: &Chunk| chunk.mapping.bytes() - chunk.used >= class;
        let chunk = match self.chunks.iter().find(|(_, chunk)| left(chunk)) {
            Some((&start, _)) => start,
            None => match self.map_for(class)? {
                Some(start) => start,
                None => return Ok(None),
            },
        };
        let Some(found) = self.chunks.get_mut(&chunk) else { unreachable!("a mapping at {chunk:#x}") };
        let start = chunk + found.used;
        found.used += class;
        self.buffers.insert(start, Buffer { class, chunk, state: State::Free });
        Ok(Some(start))
    }

    /// Maps memory for a class: of small ones for several, the more the larger the pool is.
    fn map_for(&mut self, class: usize) -> Result<Option<usize>> {
        let (held, needed) = (self.held(), Self::mapped_for(class));
        let room = self.options.max_bytes.map_or(usize::MAX, |most| most.saturating_sub(held));
        if needed > room {
            return Ok(None);
        }
        let wanted = if class >= OWN { needed } else { needed.max(CHUNK.min(held / 8)) };
        let bytes = if Self::mapped_for(wanted) <= room { wanted } else { needed };
        let mapping = Mapping::new(bytes)?;
        touch(&mapping, &self.workers)?;
        self.pin(&mapping)?;
        let start = mapping.base().as_ptr().expose_provenance();
        self.chunks.insert(start, Chunk { mapping: Arc::new(mapping), used: 0 });
        Ok(Some(start))
    }

    fn pin(&mut self, mapping: &Mapping) -> Result<()> {
        let Some(pin) = &self.options.pin else { return Ok(()) };
        let Err(error) = pin_mapping(mapping, pin) else { return Ok(()) };
        let limit = locked_memory_limit().map_or("unlimited".to_owned(), |limit| format!("{limit} bytes"));
        let what = format!("cannot pin {} bytes of host memory ({error}; locked memory: {limit})", mapping.bytes());
        if self.options.must_pin {
            return Err(Error::Cuda(format!("pin=True: {what}: raise the limit of locked memory")));
        }
        let cost = "it stays pageable: copies are slower, and do not run beside the GPU's work";
        // Told once: the next mapping will fare no better.
        self.options.pin = None;
        self.warnings.push(format!("{what}: {cost}; raise the limit of locked memory"));
        Ok(())
    }

    /// Unmaps memory that nobody uses until so many bytes may be mapped, if that is possible.
    fn make_room(&mut self, bytes: usize) {
        let Some(most) = self.options.max_bytes else { return };
        let unused: Vec<(usize, usize)> = self.unused();
        let mut held = self.held();
        for (start, size) in unused {
            if held.saturating_add(bytes) <= most {
                break;
            }
            self.unmap(start);
            held -= size;
        }
    }

    /// Mappings all of whose buffers are free, and their bytes.
    fn unused(&self) -> Vec<(usize, usize)> {
        let sizes = self.chunks.iter().map(|(&start, chunk)| (start, chunk.mapping.bytes()));
        let is_unused = |&(start, bytes): &(usize, usize)| {
            self.buffers.range(start..start + bytes).all(|(_, b)| b.state == State::Free)
        };
        sizes.filter(is_unused).collect()
    }

    fn unmap(&mut self, start: usize) {
        let Some(chunk) = self.chunks.remove(&start) else { return };
        let theirs: Vec<usize> =
            self.buffers.range(start..start + chunk.mapping.bytes()).map(|(&buffer, _)| buffer).collect();
        for buffer in theirs {
            if let Some(gone) = self.buffers.remove(&buffer) {
                self.cached -= gone.class;
                if let Some(starts) = self.free.get_mut(&gone.class) {
                    starts.retain(|&other| other != buffer);
                }
            }
        }
    }

    /// Unmaps all that nobody uses; returns how many bytes.
    pub(super) fn trim(&mut self) -> Result<usize> {
        self.collect()?;
        let unused = self.unused();
        for &(start, _) in &unused {
            self.unmap(start);
        }
        Ok(unused.iter().map(|(_, bytes)| bytes).sum())
    }

    // ---- Taking back -------------------------------------------------------------------------------------------------

    /// The lending of the buffer that a byte is in.
    #[cfg(any(test, feature = "python"))]
    pub(super) fn find(&self, address: usize) -> Result<Lent> {
        let found = self.buffers.range(..=address).next_back();
        let Some((&start, buffer)) = found.filter(|(start, buffer)| address < *start + buffer.class) else {
            return Err(Error::InvalidValue(format!("release of memory at {address:#x}, which is not this pool's")));
        };
        match buffer.state {
            State::Lent { number, .. } => Ok(Lent { start, number }),
            State::Free | State::Pending => Err(Error::InvalidValue(format!(
                "release of a buffer of {} bytes at {start:#x} that is not lent: it was released before",
                buffer.class
            ))),
        }
    }

    /// Takes a buffer back that was dropped, unless that lending is over.
    pub(super) fn take_back(&mut self, lent: &Lent) {
        let is_lent = |buffer: &Buffer| matches!(buffer.state, State::Lent { number, .. } if number == lent.number);
        if self.buffers.get(&lent.start).is_some_and(is_lent) {
            self.give_back(lent, None);
        }
    }

    /// Ends a lending.
    pub(super) fn give_back(&mut self, lent: &Lent, until: Option<Box<dyn Fence>>) {
        let Some(buffer) = self.buffers.get_mut(&lent.start) else { return };
        let State::Lent { number, bytes } = buffer.state else { return };
        debug_assert_eq!(number, lent.number);
        let class = buffer.class;
        self.live -= class;
        self.asked -= bytes;
        if let Some(fence) = until {
            buffer.state = State::Pending;
            self.in_use += class;
            self.pending.push_back(Pending { start: lent.start, class, fence });
        } else {
            self.set_free(lent.start, class);
        }
    }

    fn set_free(&mut self, start: usize, class: usize) {
        if let Some(buffer) = self.buffers.get_mut(&start) {
            buffer.state = State::Free;
            self.cached += class;
            self.free.entry(class).or_default().push(start);
        }
    }

    /// Takes back what copies are done with.
    pub(super) fn collect(&mut self) -> Result<()> {
        self.collect_of(None)
    }

    fn collect_of(&mut self, class: Option<usize>) -> Result<()> {
        let mut at = 0;
        while at < self.pending.len() {
            let pending = &self.pending[at];
            if class.is_some_and(|class| class != pending.class) {
                at += 1;
                continue;
            }
            match pending.fence.is_done() {
                Ok(false) => at += 1,
                done => {
                    if let Some(pending) = self.pending.remove(at) {
                        self.has_waited(&pending, done.is_ok());
                    }
                    done?;
                }
            }
        }
        Ok(())
    }

    /// A buffer that copies have used is free now, or, if nobody can say, lost.
    pub(super) fn has_waited(&mut self, pending: &Pending, is_done: bool) {
        if is_done {
            self.in_use -= pending.class;
            self.set_free(pending.start, pending.class);
        } else {
            self.lost.push(pending.start);
        }
    }

    // ---- The end -----------------------------------------------------------------------------------------------------

    pub(super) fn stats(&self) -> HostPoolStats {
        let pinned = self.chunks.values().filter(|chunk| chunk.mapping.is_pinned());
        HostPoolStats {
            live: self.live,
            cached: self.cached,
            pending: self.in_use,
            peak: self.peak,
            hits: self.hits,
            misses: self.misses,
            waste: self.live - self.asked,
            held: self.held(),
            pinned: pinned.map(|chunk| chunk.mapping.bytes()).sum(),
            buffers: self.buffers.len(),
        }
    }

    /// Waits for copies. What nobody can wait for stays mapped for good: in a fork, where it is the parent's, all of it.
    pub(super) fn end(&mut self, is_ours: bool) {
        for pending in std::mem::take(&mut self.pending) {
            if !is_ours {
                // Its event is the parent's, too.
                std::mem::forget(pending.fence);
                self.lost.push(pending.start);
            } else if pending.fence.wait().is_err() {
                self.lost.push(pending.start);
            }
        }
        for start in std::mem::take(&mut self.lost) {
            if let Some(chunk) = self.buffers.get(&start).and_then(|buffer| self.chunks.get(&buffer.chunk)) {
                std::mem::forget(Arc::clone(&chunk.mapping));
            }
        }
    }
}
