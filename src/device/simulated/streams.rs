//! The streams: queues of operations, marks between them, and who runs which when.

use super::hazards::{Access, Checker, Clock, Who};
use super::memory::Memory;
use super::{LogEntry, OperationKind, Schedule, Stream};
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// A place in a stream. The flag changes under the lock of the state only.
#[derive(Debug)]
pub(super) struct Mark {
    done: AtomicBool,
    pub(super) clock: Clock,
}

impl Mark {
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }
}

/// What an operation does when it runs; what it says went wrong is a failure of the device.
pub(super) type Job = Box<dyn FnOnce() -> std::result::Result<(), String> + Send>;

enum Work {
    Mark(Arc<Mark>),
    After(Arc<Mark>),
    Job(Job),
}

impl Work {
    fn is_blocked(&self) -> bool {
        matches!(self, Self::After(mark) if !mark.is_done())
    }
}

struct Operation {
    sequence: u64,
    kind: OperationKind,
    work: Work,
}

/// Where an operation goes: the index of its stream, and its number.
#[derive(Clone, Copy)]
struct Place {
    index: usize,
    sequence: u64,
    kind: OperationKind,
}

/// One stream.
pub(super) struct Queue {
    stream: Stream,
    waiting: VecDeque<Operation>,
    /// Whoever is running its first operation, which is no longer in `waiting`.
    runs_on: Option<ThreadId>,
    pub(super) held: bool,
}

impl Queue {
    fn is_ready(&self) -> bool {
        !self.held && self.runs_on.is_none() && self.waiting.front().is_some_and(|next| !next.work.is_blocked())
    }

    fn unfinished(&self) -> usize {
        self.waiting.len() + usize::from(self.runs_on.is_some())
    }
}

/// A failure to come.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) kind: OperationKind,
    pub(super) skip: usize,
    pub(super) sticky: bool,
}

pub(super) struct State {
    schedule: Schedule,
    queues: Vec<Queue>,
    sequence: u64,
    /// Operations that have run.
    finished: u64,
    pub(super) log: Option<Vec<LogEntry>>,
    pub(super) failures: Vec<Failure>,
    /// How many more operations may run.
    pub(super) lifetime: Option<u64>,
    broken: Option<String>,
    stopped: bool,
    pub(super) patience: Duration,
    pub(super) can_address_host: bool,
    pub(super) checker: Checker,
    pub(super) memory: Memory,
}

/// What has been taken out of the queues, to be dropped when the state is unlocked: a job may own anything.
#[must_use]
pub(super) struct Discarded(#[expect(dead_code, reason = "held to be dropped")] Vec<VecDeque<Operation>>);

impl State {
    /// The index of a stream, which is made where it is new.
    pub(super) fn index(&mut self, stream: Stream) -> usize {
        self.queues.iter().position(|queue| queue.stream == stream).unwrap_or_else(|| {
            self.queues.push(Queue { stream, waiting: VecDeque::new(), runs_on: None, held: false });
            self.queues.len() - 1
        })
    }

    pub(super) fn queue(&mut self, stream: Stream) -> &mut Queue {
        let index = self.index(stream);
        &mut self.queues[index]
    }

    pub(super) fn unfinished(&self) -> usize {
        self.queues.iter().map(Queue::unfinished).sum()
    }

    /// Whether no operation is being run.
    pub(super) fn is_still(&self) -> bool {
        self.queues.iter().all(|queue| queue.runs_on.is_none())
    }

    pub(super) fn is_ready(&self, stream: usize) -> bool {
        self.broken.is_none() && self.queues[stream].is_ready()
    }

    pub(super) fn ready(&self) -> Vec<usize> {
        (0..self.queues.len()).filter(|&index| self.is_ready(index)).collect()
    }

    /// Gives the next operation its place, which is what the checker looks at.
    fn place(&mut self, kind: OperationKind, stream: Stream, accesses: Vec<Access>) -> Place {
        let (index, sequence) = (self.index(stream), self.sequence);
        self.sequence += 1;
        self.checker.given(index, Who { sequence, kind, stream }, accesses);
        Place { index, sequence, kind }
    }

    /// The number that the next operation will have.
    pub(super) fn next_sequence(&self) -> u64 {
        self.sequence
    }

    pub(super) fn check(&self) -> Result<()> {
        self.broken.as_ref().map_or(Ok(()), |cause| Err(Error::Cuda(cause.clone())))
    }

    /// Whether the stream's first operation runs as soon as it can, on whichever thread made that so.
    fn runs_by_itself(&self, stream: usize) -> bool {
        let queue = &self.queues[stream];
        match self.schedule {
            Schedule::Eager => true,
            Schedule::Random { .. } => false,
            Schedule::Manual => {
                let is_marker = !matches!(queue.waiting.front(), Some(Operation { work: Work::Job(_), .. }));
                matches!(queue.stream, Stream::Foreign(_)) && is_marker
            }
        }
    }

    /// Nothing that is waiting will run.
    fn discard(&mut self) -> Discarded {
        self.checker.forget();
        Discarded(self.queues.iter_mut().map(|queue| std::mem::take(&mut queue.waiting)).collect())
    }

    fn fail(&mut self, cause: String) -> Discarded {
        self.broken.get_or_insert(cause);
        self.discard()
    }

    /// What is waiting, for messages.
    fn describe(&self) -> String {
        let describe = |queue: &Queue| {
            let next = match queue.waiting.front() {
                _ if queue.runs_on.is_some() => "one running".into(),
                Some(Operation { sequence, kind, .. }) => format!("next #{sequence} {kind}"),
                None => return None,
            };
            let held = if queue.held { ", held" } else { "" };
            Some(format!("{:?}: {} unfinished, {next}{held}", queue.stream, queue.unfinished()))
        };
        self.queues.iter().filter_map(describe).collect::<Vec<_>>().join("; ")
    }
}

/// The device's state, and the news that it has changed.
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    pub(super) fn new(schedule: Schedule) -> Self {
        let state = State {
            schedule,
            queues: Vec::new(),
            sequence: 0,
            finished: 0,
            log: None,
            failures: Vec::new(),
            lifetime: None,
            broken: None,
            stopped: false,
            patience: Duration::from_secs(30),
            can_address_host: true,
            checker: Checker::default(),
            memory: Memory::default(),
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes whoever waits for a change.
    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }

    fn sleep<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a call: it fails if the device is broken or a test wants it to. `what` goes into the message.
    pub(super) fn admit(&self, kind: OperationKind, what: &str) -> Result<MutexGuard<'_, State>> {
        let mut state = self.lock();
        state.check()?;
        let mut fails = false;
        state.failures.retain_mut(|failure| {
            let due = failure.kind == kind && failure.skip == 0;
            if failure.kind == kind && !due {
                failure.skip -= 1;
            }
            fails |= due;
            !due || failure.sticky
        });
        if fails { Err(refusal("cudaErrorUnknown", kind, what)) } else { Ok(state) }
    }

    /// Gives an operation to a stream.
    pub(super) fn give<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        kind: OperationKind,
        stream: Stream,
        accesses: Vec<Access>,
        job: Job,
    ) {
        let place = state.place(kind, stream, accesses);
        self.enqueue(state, place, Work::Job(job));
    }

    /// Gives a mark to a stream, and to `slot` before anything runs.
    pub(super) fn mark<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        stream: Stream,
        slot: &Mutex<Option<Arc<Mark>>>,
    ) {
        let place = state.place(OperationKind::Record, stream, Vec::new());
        let mark = Arc::new(Mark { done: AtomicBool::new(false), clock: state.checker.clock(place.index) });
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&mark));
        self.enqueue(state, place, Work::Mark(mark));
    }

    /// Lets a stream go on after a mark only.
    pub(super) fn after<'a>(&'a self, mut state: MutexGuard<'a, State>, stream: Stream, mark: Arc<Mark>) {
        let place = state.place(OperationKind::Order, stream, Vec::new());
        state.checker.ordered(place.index, &mark.clock);
        self.enqueue(state, place, Work::After(mark));
    }

    fn enqueue<'a>(&'a self, mut state: MutexGuard<'a, State>, place: Place, work: Work) {
        let Place { index, sequence, kind } = place;
        state.queues[index].waiting.push_back(Operation { sequence, kind, work });
        self.changed.notify_all();
        drop(self.settle(state));
    }

    /// Runs what runs by itself.
    pub(super) fn settle<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        loop {
            let ready = state.ready();
            let Some(&index) = ready.iter().find(|&&index| state.runs_by_itself(index)) else { return state };
            state = self.run_front(state, index);
        }
    }

    /// Runs the first operation of a stream that is ready, with the state unlocked meanwhile.
    pub(super) fn run_front<'a>(&'a self, mut state: MutexGuard<'a, State>, index: usize) -> MutexGuard<'a, State> {
        let Some(Operation { sequence, kind, work }) = state.queues[index].waiting.pop_front() else { return state };
        let stream = state.queues[index].stream;
        let mut outcome = Ok(());
        match work {
            Work::Mark(mark) => mark.done.store(true, Ordering::Release),
            Work::After(_) => {}
            Work::Job(job) => {
                state.queues[index].runs_on = Some(std::thread::current().id());
                drop(state);
                outcome = catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|panic| {
                    let said = panic.downcast_ref::<&str>().copied();
                    let said = said.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
                    Err(format!("panicked: {}", said.unwrap_or("no message")))
                });
                state = self.lock();
                state.queues[index].runs_on = None;
            }
        }
        state.finished += 1;
        if let Some(log) = &mut state.log {
            log.push(LogEntry { sequence, stream, kind });
        }
        let mut cause = outcome.err();
        if let Some(left) = &mut state.lifetime {
            *left = left.saturating_sub(1);
            if *left == 0 {
                cause.get_or_insert_with(|| "the device was to fail now".into());
            }
        }
        self.changed.notify_all();
        let Some(cause) = cause else { return state };
        let who = Who { sequence, kind, stream };
        let discarded = state.fail(format!("simulated: cudaErrorLaunchFailure in {who}: {cause}"));
        drop(state);
        drop(discarded);
        self.lock()
    }

    /// Waits for a mark.
    pub(super) fn wait(&self, mark: &Mark) -> Result<()> {
        let mut state = self.lock();
        let (mut finished, mut since) = (state.finished, Instant::now());
        loop {
            state.check()?;
            if mark.is_done() {
                state.checker.seen(&mark.clock);
                return Ok(());
            }
            if state.finished != finished {
                (finished, since) = (state.finished, Instant::now());
            }
            let Some(left) = state.patience.checked_sub(since.elapsed()) else {
                let (patience, queues) = (state.patience, state.describe());
                return Err(Error::Cuda(format!("simulated: nothing has run for {patience:?}; {queues}")));
            };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lets the device fail, and waits until nothing runs any more but, perhaps, the caller.
    pub(super) fn break_device(&self) {
        let mut state = self.lock();
        let discarded = state.fail("simulated: cudaErrorLaunchFailure: the device was broken".into());
        self.changed.notify_all();
        let me = std::thread::current().id();
        while state.queues.iter().any(|queue| queue.runs_on.is_some_and(|thread| thread != me)) {
            state = self.sleep(state);
        }
        drop(state);
        drop(discarded);
    }

    /// Discards what is waiting and lets the executor end.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        let discarded = state.discard();
        self.changed.notify_all();
        drop(state);
        drop(discarded);
    }

    /// The executor of [`Schedule::Random`].
    pub(super) fn execute(&self, seed: u64) {
        let mut chance = Chance(seed);
        // A stream that is put off for some picks: a fair choice would keep the streams nearly in step.
        let mut slow = (0, 0);
        let mut state = self.lock();
        while !state.stopped {
            let mut ready = state.ready();
            if ready.is_empty() {
                state = self.sleep(state);
                continue;
            }
            // Let the caller go on for a while, and give more.
            let pause = chance.below(16);
            if pause < 3 {
                drop(state);
                if pause == 0 {
                    std::thread::sleep(Duration::from_micros(chance.below(50)));
                } else {
                    std::thread::yield_now();
                }
                state = self.lock();
                continue;
            }
            if slow.1 == 0 {
                slow = (chance.below(state.queues.len() as u64) as usize, chance.below(24));
            }
            slow.1 = slow.1.saturating_sub(1);
            if ready.len() > 1 {
                ready.retain(|&index| index != slow.0);
            }
            let index = ready[chance.below(ready.len() as u64) as usize];
            state = self.run_front(state, index);
        }
    }
}

/// A call that is refused.
pub(super) fn refusal(error: &str, kind: OperationKind, what: &str) -> Error {
    let space = if what.is_empty() { "" } else { " " };
    Error::Cuda(format!("simulated: {error} in {kind}{space}{what}"))
}

/// Random numbers: `SplitMix64` (Steele, Lea, Flood, OOPSLA 2014).
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % end.max(1)
    }
}
