//! Updates of parameters on a device whose state is in host memory: one queue, ordered by when a weight is needed next, and
//! two lanes that take chunks from it. The GPU lane brings state to the weights, the CPU lane gradient and weight to the
//! state; both compute the same bits, so who takes what is a matter of time only.
//!
//! A parameter's way: [`Engine::submit`] (its gradient's event has been recorded), the dispatcher's list of those whose
//! event is not done, the queue, a lane chunk by chunk, issued (all that the device needs to do is in its streams:
//! [`Engine::wait`] lets a stream follow it), landed (its state is home again).

mod dispatcher;
mod gpu;
mod host;
mod job;
mod parts;
mod queue;
mod report;
#[cfg(test)]
mod tests;
mod workers;

pub use job::{Order, Request};
pub use parts::{Gradient, Home, Offload, Part, Planes, Recipe, Sum};
pub use report::{LaneStats, LaneTotals, Stretch};

use crate::device::{Device, DeviceGrad, Stream, TABLE_ENTRY_BYTES};
use crate::error::{Error, Failure, Result};
use crate::kernel::norm::{BLOCK, reduce_partials};
use crate::kernel::{DefaultFloatEnvironment, Isa};
use crate::memory::HostRing;
use crate::pool::WorkerPool;
use dispatcher::Dispatcher;
use job::{Job, Limits};
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How the GPU lane meets the state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transfer {
    /// Through a ring on the device, with the copy engines.
    #[default]
    Staged,
    /// In place: the kernel reads and writes pinned host memory.
    ZeroCopy,
}

/// Which lanes there are, and their sizes.
#[allow(clippy::struct_excessive_bools)] // independent switches, each named where it is set
#[derive(Clone, Debug)]
pub struct LaneOptions {
    /// Whether there is a GPU lane.
    pub gpu: bool,
    /// Whether the CPU lane takes what the GPU lane could take, too. What is not pinned it takes always.
    pub cpu: bool,
    /// How the GPU lane meets the state.
    pub transfer: Transfer,
    /// Bytes of the ring on the device.
    pub device_ring_bytes: usize,
    /// Bytes of the ring in host memory.
    pub host_ring_bytes: usize,
    /// The most elements in a chunk; `None` leaves it to the rings.
    pub chunk_elems: Option<usize>,
    /// Gradient bytes that may wait before [`Engine::submit`] does. One gradient is always let in.
    pub max_waiting_bytes: usize,
    /// Whether to pin the ring in host memory.
    pub pin_ring: bool,
    /// Chunks in flight in the GPU lane. Alone it saturates the link with 4. Copy engines serve first come, first served,
    /// so beside a CPU lane it takes 2: what is issued deeper stands in the other's way. Tried on an H200 without gain:
    /// more slots of which only 2 copy in one direction at once (4,000 tokens: 193 to 199 ms, against 184 to 193), and to
    /// let the GPU lane wait while many of the CPU lane's copies do (190 ms without, 196 to 219 ms).
    pub device_depth: usize,
    /// Chunks in flight in the CPU lane: rate times latency.
    pub host_depth: usize,
    /// For comparison: jobs in the order in which they became ready.
    #[doc(hidden)]
    pub fifo: bool,
}

impl Default for LaneOptions {
    fn default() -> Self {
        Self {
            gpu: true,
            cpu: true,
            transfer: Transfer::Staged,
            device_ring_bytes: 40 << 20,
            host_ring_bytes: 64 << 20,
            chunk_elems: None,
            max_waiting_bytes: 8 << 30,
            pin_ring: true,
            device_depth: 2,
            host_depth: 16,
            fifo: false,
        }
    }
}

/// What the engine knows of a slot that is under way.
#[derive(Debug)]
struct Progress<D: Device> {
    /// Updates accepted and not issued.
    unissued: usize,
    /// Updates accepted and not landed.
    unlanded: usize,
    /// What a stream that needs the weight has to follow.
    events: Vec<Arc<D::Event>>,
}

/// Failures that nobody has taken, and whether there are any for those who have no lock.
#[derive(Debug, Default)]
struct Failures {
    told: Vec<(usize, Failure)>,
    are_there: Arc<AtomicBool>,
}

impl Failures {
    fn push(&mut self, failure: (usize, Failure)) {
        self.told.push(failure);
        self.are_there.store(true, Ordering::Release);
    }
}

#[derive(Debug)]
struct State<D: Device> {
    inbox: Vec<Job<D>>,
    computed: Vec<workers::Computed>,
    progress: FxHashMap<usize, Progress<D>>,
    failures: Failures,
    /// Slots half updated: their updates fail until they are healed.
    poisoned: FxHashSet<usize>,
    /// Why the device is of no use any more.
    broken: Option<String>,
    waiting_bytes: usize,
    stop: bool,
    /// Whether the dispatcher sleeps until it is woken. While anything is under way it naps for some tens of microseconds,
    /// and to wake it in every hook would cost more than it gains.
    is_asleep: bool,
    stats: LaneStats,
    issue_mark: f64,
    timeline: Vec<Stretch>,
}

impl<D: Device> State<D> {
    /// Whether so many more gradient bytes may wait; one gradient is always let in.
    fn has_room(&self, bytes: usize, most: usize) -> bool {
        self.waiting_bytes == 0 || self.waiting_bytes + bytes <= most
    }
}

/// What the dispatcher sleeps on.
#[derive(Default)]
struct Bell(Condvar);

impl Bell {
    /// Sleeps until it is rung, or for no reason.
    fn wait<'a, D: Device>(&self, mut state: MutexGuard<'a, State<D>>) -> MutexGuard<'a, State<D>> {
        state.is_asleep = true;
        let mut state = self.0.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.is_asleep = false;
        state
    }

    /// Sleeps for `nap` at most.
    fn wait_timeout<'a, D: Device>(&self, state: MutexGuard<'a, State<D>>, nap: Duration) -> MutexGuard<'a, State<D>> {
        self.0.wait_timeout(state, nap).unwrap_or_else(PoisonError::into_inner).0
    }

    fn notify_one(&self) {
        self.0.notify_one();
    }
}

/// What the callers' threads, the workers and the dispatcher share.
struct Shared<D: Device> {
    state: Mutex<State<D>>,
    /// For the dispatcher: something has come.
    wake: Bell,
    /// For callers: something has been issued, or has landed.
    moved: Condvar,
    /// Whether there are failures that nobody has taken.
    has_failures: Arc<AtomicBool>,
    record_timeline: AtomicBool,
    emit_ranges: AtomicBool,
    started: Instant,
}

impl<D: Device> Shared<D> {
    fn lock(&self) -> MutexGuard<'_, State<D>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells callers what has failed, before they are told that anything was issued.
    fn tell_failures(&self, failures: impl Iterator<Item = (usize, Failure)>) {
        let mut state = self.lock();
        for (slot, failure) in failures {
            state.poisoned.insert(slot);
            state.failures.push((slot, failure));
        }
    }

    fn now(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// Waits until `done`; returns the seconds it took, and the state as it is then.
    fn wait_until(&self, done: impl Fn(&State<D>) -> bool) -> (f64, MutexGuard<'_, State<D>>) {
        let mut state = self.lock();
        if done(&state) {
            return (0.0, state);
        }
        let began = self.now();
        while !done(&state) {
            state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        (self.now() - began, state)
    }
}

/// What a caller does around a wait on the host, where there is one (with a lock of its own, let it go): called with what
/// waits.
pub type Aside<'a> = &'a mut dyn FnMut(&mut (dyn FnMut() + Send));

/// Memory of [`Engine::squared_norms`].
#[derive(Debug)]
struct NormScratch {
    partials: HostRing,
    table: HostRing,
}

/// Blocks whose sums are on their way at once, and gradients.
const NORM_BLOCKS: usize = if cfg!(test) { 8 } else { 512 * 1024 };
const NORM_GRADS: usize = if cfg!(test) { 5 } else { 4096 };

/// The dispatcher of one device, with its lanes.
pub struct Engine<D: Device> {
    device: Arc<D>,
    shared: Arc<Shared<D>>,
    options: LaneOptions,
    limits: Limits,
    norm: Mutex<Option<NormScratch>>,
    fail_at: Arc<Mutex<Vec<(usize, usize)>>>,
    /// The dispatcher, and the thread that lets tensors go, which ends after it.
    threads: Vec<JoinHandle<()>>,
    process: u32,
}

impl<D: Device> std::fmt::Debug for Engine<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("device", &self.device).field("options", &self.options).finish_non_exhaustive()
    }
}

impl<D: Device> Engine<D> {
    /// Starts the dispatcher of `device`, and its lanes' rings.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for options without a lane or with a ring that holds nothing, [`Error::Cuda`],
    /// [`Error::OutOfMemory`], [`Error::Threads`].
    pub fn new(device: Arc<D>, pool: Arc<WorkerPool>, isa: Isa, options: LaneOptions) -> Result<Self> {
        const LEAST: usize = 64 * 1024;
        let started = Instant::now();
        let chunk_elems = options.chunk_elems.unwrap_or(usize::MAX);
        if chunk_elems == 0 || options.device_depth == 0 || options.host_depth == 0 {
            return Err(Error::InvalidValue("chunk_elems and the lanes' depths must be at least 1, not 0".into()));
        }
        if options.transfer == Transfer::ZeroCopy && !device.can_address_host() {
            let message = "transfer='zero_copy': this device cannot address pinned host memory; use 'staged'";
            return Err(Error::InvalidValue(message.into()));
        }
        let device_slot = (options.device_ring_bytes / options.device_depth).max(LEAST);
        let host_slot = (options.host_ring_bytes / options.host_depth).max(LEAST);
        let pinned_ring = |slots: usize, bytes: usize| -> Result<HostRing> {
            let ring = HostRing::new(slots, bytes)?;
            if options.pin_ring {
                ring.pin(|start, bytes| device.pin(start, bytes))?;
            }
            Ok(ring)
        };
        let gpu = if options.gpu {
            let tables = pinned_ring(options.device_depth, job::BUNDLE_PARTS * TABLE_ENTRY_BYTES)?;
            let in_place = options.transfer == Transfer::ZeroCopy;
            Some(gpu::GpuLane::new(&*device, options.device_depth, device_slot, chunk_elems, in_place, tables)?)
        } else {
            None
        };
        let tables = pinned_ring(options.host_depth, host::table_bytes())?;
        let ring = pinned_ring(options.host_depth, host_slot)?;
        let host = host::HostLane::new(&*device, ring, options.host_depth, host_slot, chunk_elems, tables)?;
        let resident_tables = pinned_ring(dispatcher::RESIDENT_TABLES, job::BUNDLE_PARTS * TABLE_ENTRY_BYTES)?;
        let stats = LaneStats {
            device_ring_bytes: gpu.as_ref().map_or(0, gpu::GpuLane::ring_bytes),
            host_ring_bytes: host.ring_bytes()
                + gpu.as_ref().map_or(0, gpu::GpuLane::table_bytes)
                + resident_tables.bytes(),
            ..LaneStats::default()
        };
        let failures = Failures::default();
        let has_failures = Arc::clone(&failures.are_there);
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                inbox: Vec::new(),
                computed: Vec::new(),
                progress: FxHashMap::default(),
                failures,
                poisoned: FxHashSet::default(),
                broken: None,
                waiting_bytes: 0,
                stop: false,
                is_asleep: false,
                stats,
                issue_mark: 0.0,
                timeline: Vec::new(),
            }),
            wake: Bell::default(),
            moved: Condvar::new(),
            has_failures,
            record_timeline: AtomicBool::new(false),
            emit_ranges: AtomicBool::new(false),
            started,
        });
        let fail_at: Arc<Mutex<Vec<(usize, usize)>>> = Arc::default();
        let tell: workers::Tell = {
            // Weak: a message that comes after everything is over is for nobody, and must not keep the engine's memory.
            let shared = Arc::downgrade(&shared);
            Arc::new(move |computed| {
                if let Some(shared) = shared.upgrade() {
                    shared.lock().computed.push(computed);
                    shared.wake.notify_one();
                }
            })
        };
        let workers = workers::Workers { pool, isa, tell, fail_at: Arc::clone(&fail_at) };
        let (ending, over) = std::sync::mpsc::channel();
        let dispatcher = Dispatcher::new(
            Arc::clone(&device),
            Arc::clone(&shared),
            workers,
            gpu,
            host,
            resident_tables,
            ending,
            (options.cpu, options.fifo),
        );
        let start = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
            thread.map_err(|error| Error::Threads { threads: 2, cause: error.to_string() })
        };
        let releasing = Arc::clone(&shared);
        let releaser = start("outboard-release", Box::new(move || dispatcher::release_all(&releasing, &over)))?;
        let threads = vec![start("outboard-dispatcher", Box::new(move || dispatcher.run()))?, releaser];
        let limits = Limits { device_slot, host_slot };
        let process = crate::process::id();
        Ok(Self { device, shared, options, limits, norm: Mutex::new(None), fail_at, threads, process })
    }

    /// The device.
    pub fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// The options that it was made with.
    pub fn options(&self) -> &LaneOptions {
        &self.options
    }

    /// Refuses to go on in a fork, where the dispatcher does not exist.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn check_process(&self) -> Result<()> {
        let used_in = crate::process::id();
        if used_in == self.process { Ok(()) } else { Err(Error::Forked { made_in: self.process, used_in }) }
    }

    /// Takes over updates whose gradients are complete once `stream` has done what it was given so far; returns at once,
    /// or with `bounded` once no more than the allowed gradient bytes wait. The seconds it waited for that.
    ///
    /// # Errors
    /// [`Error::Cuda`], [`Error::Forked`]: nothing has been taken over.
    pub fn submit(&self, requests: Vec<Request>, stream: usize, bounded: bool) -> Result<f64> {
        let mut at_once = |wait: &mut (dyn FnMut() + Send)| wait();
        self.submit_with(requests, stream, bounded.then_some(&mut at_once))
    }

    /// As [`Self::submit`], bounded if there is an `aside`: that is called to wait, if there is no room. (A caller with a
    /// lock of its own lets it go there.)
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub fn submit_with(&self, requests: Vec<Request>, stream: usize, aside: Option<Aside<'_>>) -> Result<f64> {
        self.check_process()?;
        if requests.is_empty() {
            return Ok(0.0);
        }
        let ready = Arc::new(self.device.event()?);
        self.device.record(&ready, Stream::Foreign(stream))?;
        let jobs = job::jobs::<D>(requests, &ready, stream, self.limits);
        let bytes: usize = jobs.iter().map(|job| job.grad_bytes).sum();
        let most = self.options.max_waiting_bytes;
        let mut stalled = 0.0;
        let mut state = self.shared.lock();
        if let Some(aside) = aside {
            let may_go_on = |state: &State<D>| state.broken.is_some() || state.has_room(bytes, most);
            // Again: another thread may take the room between the wait and the lock.
            while !may_go_on(&state) {
                drop(state);
                aside(&mut || stalled += self.shared.wait_until(may_go_on).0);
                state = self.shared.lock();
            }
        }
        if let Some(cause) = &state.broken {
            return Err(Error::Cuda(cause.clone()));
        }
        let must_wake = std::mem::take(&mut state.is_asleep);
        for member in jobs.iter().flat_map(|job| &job.slots) {
            let fresh = || Progress { unissued: 0, unlanded: 0, events: Vec::new() };
            let progress = state.progress.entry(member.slot).or_insert_with(fresh);
            progress.unissued += 1;
            progress.unlanded += 1;
        }
        state.waiting_bytes += bytes;
        let waiting = state.waiting_bytes;
        let stats = &mut state.stats;
        stats.waiting_bytes.1 = stats.waiting_bytes.1.max(waiting);
        stats.queue.0 += jobs.len();
        stats.queue.1 = stats.queue.1.max(stats.queue.0);
        state.inbox.extend(jobs);
        drop(state);
        if must_wake {
            self.shared.wake.notify_one();
        }
        Ok(stalled)
    }

    /// Lets `stream` go on only once the weights of these slots are updated; returns as soon as all of that is in the
    /// device's streams. The seconds that took.
    ///
    /// # Errors
    /// [`Error::Cuda`], [`Error::Forked`]. Failed updates are not an error here: see [`Self::take_failures`].
    pub fn wait(&self, slots: &[usize], stream: usize) -> Result<f64> {
        self.wait_with(slots, stream, &mut |wait: &mut (dyn FnMut() + Send)| wait())
    }

    /// As [`Self::wait`]; `aside` is called to wait on the host, if that is needed.
    ///
    /// # Errors
    /// As [`Self::wait`].
    pub fn wait_with(&self, slots: &[usize], stream: usize, aside: Aside<'_>) -> Result<f64> {
        let (stalled, events) = self.events_of(slots, aside)?;
        events.iter().try_for_each(|event| self.device.order(Stream::Foreign(stream), event))?;
        Ok(stalled)
    }

    /// Waits until the weights of these slots are updated.
    ///
    /// # Errors
    /// As [`Self::wait`].
    pub fn wait_on_host(&self, slots: &[usize]) -> Result<()> {
        let events = self.events_of(slots, &mut |wait: &mut (dyn FnMut() + Send)| wait())?.1;
        events.iter().try_for_each(|event| self.device.wait(event))
    }

    /// Once all updates of these slots are issued: the events to follow, and the seconds it took.
    fn events_of(&self, slots: &[usize], aside: Aside<'_>) -> Result<(f64, Vec<Arc<D::Event>>)> {
        self.check_process()?;
        let issued = |state: &State<D>| {
            slots.iter().all(|slot| state.progress.get(slot).is_none_or(|progress| progress.unissued == 0))
        };
        let mut stalled = 0.0;
        let mut state = self.shared.lock();
        while !issued(&state) {
            drop(state);
            aside(&mut || stalled += self.shared.wait_until(issued).0);
            state = self.shared.lock();
        }
        let mut events: Vec<Arc<D::Event>> = Vec::new();
        for event in slots.iter().filter_map(|slot| state.progress.get(slot)).flat_map(|progress| &progress.events) {
            if !events.iter().any(|known| Arc::ptr_eq(known, event)) {
                events.push(Arc::clone(event));
            }
        }
        Ok((stalled, events))
    }

    /// Waits until all that was taken over has landed.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn synchronize(&self) -> Result<()> {
        self.check_process()?;
        let _ = self.shared.wait_until(|state| state.progress.is_empty());
        Ok(())
    }

    /// Whether a slot's update has not landed yet.
    pub fn is_under_way(&self, slot: usize) -> bool {
        self.shared.lock().progress.contains_key(&slot)
    }

    /// The failures since the last call, by slot. Their slots' updates fail until [`Self::heal`].
    pub fn take_failures(&self) -> Vec<(usize, Failure)> {
        // Asked in every hook: only where there are any is the dispatcher kept waiting.
        if self.shared.has_failures.swap(false, Ordering::Acquire) {
            std::mem::take(&mut self.shared.lock().failures.told)
        } else {
            Vec::new()
        }
    }

    /// Declares a slot's state whole again.
    pub fn heal(&self, slot: usize) {
        self.shared.lock().poisoned.remove(&slot);
    }

    /// The sum of squares of each gradient, divided by `scale` first; they are complete once `stream` has done what it was
    /// given so far. Waits for that. The bits are the host's.
    ///
    /// # Panics
    /// Never: the scratch memory is locked while it is lent.
    ///
    /// # Errors
    /// [`Error::Cuda`], [`Error::OutOfMemory`], [`Error::Forked`].
    pub fn squared_norms(&self, grads: &[DeviceGrad], scale: f32, stream: usize) -> Result<Vec<f64>> {
        self.check_process()?;
        let _environment = DefaultFloatEnvironment::enter();
        let mut scratch = self.norm.lock().unwrap_or_else(PoisonError::into_inner);
        let NormScratch { partials, table } = if let Some(scratch) = &mut *scratch {
            scratch
        } else {
            let pinned = |bytes| -> Result<HostRing> {
                let ring = HostRing::new(1, bytes)?;
                ring.pin(|start, bytes| self.device.pin(start, bytes))?;
                Ok(ring)
            };
            let (partials, table) = (pinned(NORM_BLOCKS * 8)?, pinned(NORM_GRADS * TABLE_ENTRY_BYTES)?);
            scratch.insert(NormScratch { partials, table })
        };
        let event = self.device.event()?;
        let mut sums: Vec<Vec<f64>> = grads.iter().map(|grad| Vec::with_capacity(grad.len.div_ceil(BLOCK))).collect();
        let (mut grad, mut done) = (0, 0); // the next gradient, and its elements that are done
        while grad < grads.len() {
            let mut batch: Vec<(usize, DeviceGrad)> = Vec::new();
            let mut blocks = 0;
            while grad < grads.len() && batch.len() < NORM_GRADS && blocks < NORM_BLOCKS {
                let DeviceGrad { address, len, dtype } = grads[grad];
                let take = (len - done).min((NORM_BLOCKS - blocks) * BLOCK);
                if take > 0 {
                    batch.push((grad, DeviceGrad { address: address + done * dtype.bytes(), len: take, dtype }));
                    blocks += take.div_ceil(BLOCK);
                }
                done += take;
                if done == len {
                    (grad, done) = (grad + 1, 0);
                }
            }
            if batch.is_empty() {
                continue;
            }
            let mut out = partials.lend(0).expect("the scratch is locked").split_front(blocks * 8);
            let mut entries = table.lend(0).expect("the scratch is locked");
            let of_batch: Vec<DeviceGrad> = batch.iter().map(|&(_, grad)| grad).collect();
            self.device.squares(&mut entries, &out, &of_batch, scale, Stream::Foreign(stream))?;
            self.device.record(&event, Stream::Foreign(stream))?;
            self.device.wait(&event)?;
            let mut values = out.as_mut_slice::<f64>().iter();
            for (index, grad) in batch {
                sums[index].extend(values.by_ref().take(grad.len.div_ceil(BLOCK)));
            }
        }
        Ok(sums.into_iter().map(reduce_partials).collect())
    }

    /// Starts measuring the time to the last weight issued.
    pub fn mark_issue(&self) {
        let now = self.shared.now();
        let mut state = self.shared.lock();
        state.issue_mark = now;
        state.stats.issue_seconds = 0.0;
    }

    /// What it has done and holds.
    pub fn stats(&self) -> LaneStats {
        let state = self.shared.lock();
        let mut stats = state.stats.clone();
        stats.waiting_bytes.0 = state.waiting_bytes;
        stats
    }

    /// Starts or stops recording each chunk's time.
    pub fn record_timeline(&self, record: bool) {
        self.shared.record_timeline.store(record, Ordering::Relaxed);
    }

    /// Starts or stops showing each chunk as a range in profilers: [`Device::begin_range`].
    pub fn emit_ranges(&self, emit: bool) {
        self.shared.emit_ranges.store(emit, Ordering::Relaxed);
    }

    /// What has been recorded, and the moment that its times count from.
    pub fn take_timeline(&self) -> (Vec<Stretch>, Instant) {
        (std::mem::take(&mut self.shared.lock().timeline), self.shared.started)
    }

    /// For tests: lets the CPU lane's piece that holds this element of this slot panic, once.
    #[doc(hidden)]
    pub fn fail_at(&self, slot: usize, element: usize) {
        self.fail_at.lock().unwrap_or_else(PoisonError::into_inner).push((slot, element));
    }
}

impl<D: Device> Drop for Engine<D> {
    /// Completes every update that was taken over, then ends the dispatcher.
    fn drop(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        if self.check_process().is_err() {
            // The threads are not in this process; what they share may be locked for good.
            std::mem::forget((threads, Arc::clone(&self.shared), Arc::clone(&self.device)));
            return;
        }
        self.shared.lock().stop = true;
        self.shared.wake.notify_one();
        for thread in threads {
            let _ = thread.join();
        }
    }
}
