//! A device made of host memory, whose order of completion a test controls: for testing the dispatcher and its lanes
//! without a GPU.
//!
//! Its memory is the heap's, and its addresses are the host's. Its streams are queues; [`Schedule`] says who runs what is
//! in them, and when. Operations touch memory when they run, not when they are given. What would be undefined on a GPU is
//! looked for: work that touches the same bytes in no order ([`SimulatedDevice::hazards`]), tables that are written while
//! they are in use (a failure of the device), wrong lengths and addresses (errors). Failures can be ordered:
//! [`SimulatedDevice::fail_next`] for calls, [`SimulatedDevice::break_device`] and [`SimulatedDevice::break_after`] for
//! the device.
//!
//! The arithmetic is that of [`crate::kernel`], so the results have the bits of the CPU lane.

mod device;
mod hazards;
mod memory;
mod streams;
#[cfg(test)]
mod tests;
mod work;

use super::Stream;
use crate::error::{Error, Result};
use crate::kernel::Isa;
use hazards::Access;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use streams::{Failure, Mark, Shared};

/// Who runs what a stream has been given, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// The caller, at once; what is blocked or held, whoever unblocks it.
    Eager,
    /// One thread, which picks among the streams at random and pauses now and then while the caller goes on. The seed
    /// decides the choices, but what there is to choose from depends on how fast the caller is.
    Random {
        /// The seed.
        seed: u64,
    },
    /// Nobody, until the test says so ([`SimulatedDevice::run_one`], [`SimulatedDevice::run_all`]). Only marks and orders
    /// that come first in a [`Stream::Foreign`] are run as under [`Self::Eager`]: a caller's stream that nothing has been
    /// pushed to is always up to date.
    Manual,
}

/// What a device is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum OperationKind {
    /// [`copy_in`](super::Device::copy_in).
    CopyIn,
    /// [`copy_out`](super::Device::copy_out).
    CopyOut,
    /// [`update`](super::Device::update).
    Update,
    /// [`update_many`](super::Device::update_many).
    UpdateMany,
    /// [`copy_many`](super::Device::copy_many).
    CopyMany,
    /// [`squares`](super::Device::squares).
    Squares,
    /// [`unscale`](super::Device::unscale).
    Unscale,
    /// [`record`](super::Device::record).
    Record,
    /// [`order`](super::Device::order).
    Order,
    /// [`SimulatedDevice::push`].
    Push,
    /// [`event`](super::Device::event).
    Event,
    /// [`allocate`](super::Device::allocate).
    Allocate,
    /// [`pin`](super::Device::pin).
    Pin,
}

impl fmt::Display for OperationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CopyIn => "copy_in",
            Self::CopyOut => "copy_out",
            Self::Update => "update",
            Self::UpdateMany => "update_many",
            Self::CopyMany => "copy_many",
            Self::Squares => "squares",
            Self::Unscale => "unscale",
            Self::Record => "record",
            Self::Order => "order",
            Self::Push => "push",
            Self::Event => "event",
            Self::Allocate => "allocate",
            Self::Pin => "pin",
        })
    }
}

/// An operation that has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Its place among all operations, in the order in which they were given.
    pub sequence: u64,
    /// Its stream.
    pub stream: Stream,
    /// What it was.
    pub kind: OperationKind,
}

/// A range that was begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeEntry {
    /// What it says.
    pub message: String,
    /// How often it has been ended.
    pub ends: usize,
}

/// What a device has in use: all 0 when everything has been given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes of its memory that are allocated.
    pub allocated_bytes: usize,
    /// Bytes of host memory that are pinned.
    pub pinned_bytes: usize,
    /// Events.
    pub live_events: usize,
    /// Operations given and not done.
    pub unfinished: usize,
}

/// A device made of host memory. Operations that are waiting when it is dropped are discarded.
pub struct SimulatedDevice {
    ranges: Arc<Mutex<Vec<RangeEntry>>>,
    isa: Isa,
    schedule: Schedule,
    shared: Arc<Shared>,
    executor: Option<JoinHandle<()>>,
}

/// A mark on a stream of a [`SimulatedDevice`].
pub struct SimulatedEvent {
    shared: Arc<Shared>,
    mark: Mutex<Option<Arc<Mark>>>,
}

impl SimulatedDevice {
    /// A device with nothing to do.
    ///
    /// # Errors
    /// [`Error::Threads`]; [`Error::InvalidValue`] for the environment variable `OUTBOARD_ISA`.
    pub fn new(schedule: Schedule) -> Result<Self> {
        let isa = Isa::current()?;
        let shared = Arc::new(Shared::new(schedule));
        let mut executor = None;
        if let Schedule::Random { seed } = schedule {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name("outboard-simulated".into());
            let started = thread.spawn(move || shared.execute(seed));
            executor = Some(started.map_err(|error| Error::Threads { threads: 1, cause: error.to_string() })?);
        }
        Ok(Self { ranges: Arc::default(), isa, schedule, shared, executor })
    }

    /// Gives work to a stream: a test's own kernel.
    ///
    /// # Errors
    /// [`Error::Cuda`], as from any call.
    pub fn push(&self, stream: Stream, work: impl FnOnce() + Send + 'static) -> Result<()> {
        self.push_accessing(stream, &[], &[], work)
    }

    /// As [`Self::push`], saying which memory the work reads and writes: addresses and bytes, for [`Self::hazards`].
    ///
    /// # Errors
    /// [`Error::Cuda`], as from any call.
    pub fn push_accessing(
        &self,
        stream: Stream,
        reads: &[(usize, usize)],
        writes: &[(usize, usize)],
        work: impl FnOnce() + Send + 'static,
    ) -> Result<()> {
        let state = self.shared.admit(OperationKind::Push, "")?;
        let reads = reads.iter().map(|&(start, bytes)| Access::read(start, bytes));
        let writes = writes.iter().map(|&(start, bytes)| Access::write(start, bytes));
        let job = move || {
            work();
            Ok(())
        };
        self.shared.give(state, OperationKind::Push, stream, reads.chain(writes).collect(), Box::new(job));
        Ok(())
    }

    /// Runs the first operation of a stream in the calling thread, whatever the schedule; says whether there was one that
    /// was not blocked.
    pub fn run_one(&self, stream: Stream) -> bool {
        let mut state = self.shared.lock();
        let index = state.index(stream);
        let is_ready = state.is_ready(index);
        if is_ready {
            let state = self.shared.run_front(state, index);
            drop(self.shared.settle(state));
        }
        is_ready
    }

    /// Runs operations in the calling thread, whatever the schedule, until none is left that is not blocked. One of each
    /// stream in turn.
    pub fn run_all(&self) {
        let mut state = self.shared.lock();
        loop {
            let ready = state.ready();
            if ready.is_empty() {
                return;
            }
            for index in ready {
                // Meanwhile another thread may have run it.
                if state.is_ready(index) {
                    state = self.shared.run_front(state, index);
                }
            }
        }
    }

    /// Holds a stream: what it has not begun waits for [`Self::release`], whatever the schedule.
    pub fn hold(&self, stream: Stream) {
        self.shared.lock().queue(stream).held = true;
    }

    /// Lets a held stream go on.
    pub fn release(&self, stream: Stream) {
        let mut state = self.shared.lock();
        state.queue(stream).held = false;
        self.shared.notify();
        drop(self.shared.settle(state));
    }

    /// Lets a call fail: of those of that kind from now on, the one after the next `skip`; if `sticky`, all after it,
    /// too. Nothing has been started then, and the device goes on. Failures that were ordered before stay.
    pub fn fail_next(&self, kind: OperationKind, skip: usize, sticky: bool) {
        self.shared.lock().failures.push(Failure { kind, skip, sticky });
    }

    /// No more failures but those that have happened.
    pub fn clear_failures(&self) {
        let mut state = self.shared.lock();
        state.failures.clear();
        state.lifetime = None;
    }

    /// Lets the device fail for good: what is waiting will not run, and every call and event is an error. Waits for
    /// operations that are being run by other threads, so that memory may be freed then.
    pub fn break_device(&self) {
        self.shared.break_device();
    }

    /// Lets the device fail once `operations` more have run, as by [`Self::break_device`].
    pub fn break_after(&self, operations: u64) {
        if operations == 0 {
            self.break_device();
        } else {
            self.shared.lock().lifetime = Some(operations);
        }
    }

    /// What has touched the same bytes, at least once to write them, with nothing that orders it: on streams, or on a
    /// stream and the host, which has to see an event done before. The host's own accesses are known where a call makes
    /// them (tables are written, memory is freed or unpinned) and from [`Self::host_access`]. All threads count as one:
    /// what one has seen done, all have.
    ///
    /// Accesses are compared when they are given, so what is found does not depend on the schedule. Only the first
    /// thousand are kept.
    pub fn hazards(&self) -> Vec<String> {
        self.shared.lock().checker.found().to_vec()
    }

    /// Says that the host now touches memory, for [`Self::hazards`].
    pub fn host_access(&self, address: usize, bytes: usize, write: bool) {
        self.shared.lock().checker.host(Access::new(address, bytes, write), "a test");
    }

    /// Keeps a log from now on; it starts empty.
    pub fn keep_log(&self) {
        self.shared.lock().log = Some(Vec::new());
    }

    /// The operations that have run since [`Self::keep_log`], in that order.
    pub fn log(&self) -> Vec<LogEntry> {
        self.shared.lock().log.clone().unwrap_or_default()
    }

    /// All ranges, in the order in which they were begun.
    pub fn ranges(&self) -> Vec<RangeEntry> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What is in use.
    pub fn counters(&self) -> Counters {
        let state = self.shared.lock();
        Counters {
            allocated_bytes: state.memory.allocated_bytes,
            pinned_bytes: state.memory.pinned_bytes(),
            live_events: state.memory.live_events,
            unfinished: state.unfinished(),
        }
    }

    /// What [`can_address_host`](super::Device::can_address_host) says. Where kernels cannot, a call that lets one
    /// address pinned memory is an error.
    pub fn set_can_address_host(&self, can: bool) {
        self.shared.lock().can_address_host = can;
    }

    /// The most bytes of host memory that may be pinned at once, as a system's limit: more is an error.
    pub fn set_pinnable_bytes(&self, bytes: usize) {
        self.shared.lock().memory.pinnable_bytes = Some(bytes);
    }

    /// How long [`wait`](super::Device::wait) stays while nothing runs at all, 30 seconds unless set: then it is an error
    /// that says what is waiting, instead of a test that hangs.
    pub fn set_patience(&self, patience: Duration) {
        self.shared.lock().patience = patience;
    }
}

impl fmt::Debug for SimulatedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedDevice").field("schedule", &self.schedule).finish_non_exhaustive()
    }
}

impl Drop for SimulatedDevice {
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(executor) = self.executor.take()
            // The last handle to the device may have been an operation's.
            && executor.thread().id() != std::thread::current().id()
        {
            // It catches what operations panic with.
            drop(executor.join());
        }
    }
}

impl fmt::Debug for SimulatedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedEvent").field("mark", &self.mark).finish_non_exhaustive()
    }
}

impl Drop for SimulatedEvent {
    fn drop(&mut self) {
        self.shared.lock().memory.live_events -= 1;
    }
}
