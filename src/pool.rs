//! The worker pool: a private rayon pool that hands out items in order, keeps every failure, joins its threads when it is
//! dropped and refuses to work in a fork. It knows nothing of parameters.

use crate::error::{Error, Result};
use crossbeam_deque::{Injector, Steal};
use std::any::Any;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a thread looks for more of what [`WorkerPool::spawn_all`] hands in before it sleeps. To wake one costs who hands
/// in some microseconds, and chunks come every few hundred.
const LOOK_AROUND: Duration = Duration::from_micros(if cfg!(test) { 5 } else { 200 });

type Task = Box<dyn FnOnce() + Send>;

/// Threads that update chunks. May be shared by several optimizers.
#[derive(Debug)]
pub struct WorkerPool {
    rayon: ManuallyDrop<rayon::ThreadPool>,
    /// rayon does not join its threads when a pool is dropped; these handles do.
    threads: Vec<JoinHandle<()>>,
    tasks: Arc<Tasks>,
    process: u32,
}

/// What was handed in and returned from at once.
#[derive(Debug, Default)]
struct Tasks {
    queue: Injector<Task>,
    /// Threads that take from the queue.
    takers: AtomicUsize,
}

impl Tasks {
    /// Counts another thread in, if there are fewer than `most`.
    fn join(&self, most: usize) -> bool {
        let more = |takers| (takers < most).then_some(takers + 1);
        self.takers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
    }

    /// A counted thread's work: takes tasks until none has come for a while.
    fn take_all(&self, most: usize) {
        loop {
            let mut idle_since = None;
            loop {
                match self.queue.steal() {
                    Steal::Success(task) => {
                        idle_since = None;
                        drop(attempt(task));
                        // What `for_each` has broadcast has its turn.
                        rayon::yield_local();
                    }
                    Steal::Retry => std::hint::spin_loop(),
                    Steal::Empty => {
                        rayon::yield_local();
                        if idle_since.get_or_insert_with(Instant::now).elapsed() > LOOK_AROUND {
                            break;
                        }
                        (0..32).for_each(|_| std::hint::spin_loop());
                        std::thread::yield_now();
                    }
                }
            }
            self.takers.fetch_sub(1, Ordering::SeqCst);
            // Who handed something in just now may have counted on this thread.
            if self.queue.is_empty() || !self.join(most) {
                break;
            }
        }
    }
}

impl WorkerPool {
    /// Starts `threads` threads (at least 1).
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for 0 threads, [`Error::Threads`] if the system refuses them.
    pub fn new(threads: usize) -> Result<Self> {
        if threads == 0 {
            return Err(Error::InvalidValue("threads must be at least 1, not 0".into()));
        }
        let mut handles = Vec::with_capacity(threads);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .spawn_handler(|worker| {
                let name = format!("outboard-{}", worker.index());
                handles.push(std::thread::Builder::new().name(name).spawn(|| worker.run())?);
                Ok(())
            })
            .build()
            .map_err(|error| Error::Threads { threads, cause: error.to_string() })?;
        let tasks = Arc::default();
        Ok(Self { rayon: ManuallyDrop::new(pool), threads: handles, tasks, process: std::process::id() })
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Refuses to go on in a fork, where the threads do not exist.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn check_process(&self) -> Result<()> {
        let used_in = std::process::id();
        if used_in == self.process { Ok(()) } else { Err(Error::Forked { made_in: self.process, used_in }) }
    }

    /// Calls `work` on every item, each on whichever thread is free next, in the iterator's order; returns once all are
    /// done. An item that panics is a failure: its position and the panic's message; the others go on.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn for_each<T: Send>(
        &self,
        items: impl ExactSizeIterator<Item = T> + Send,
        work: impl Fn(T) + Sync,
    ) -> Result<Vec<(usize, String)>> {
        self.check_process()?;
        let failures = Mutex::new(Vec::new());
        let run = |position: usize, item: T| {
            if let Err(cause) = attempt(|| work(item)) {
                failures.lock().unwrap_or_else(PoisonError::into_inner).push((position, cause));
            }
        };
        if items.len() <= 1 {
            // Waking a thread would take longer than most single items do.
            items.enumerate().for_each(|(position, item)| run(position, item));
        } else {
            let queue = Mutex::new(items.enumerate());
            self.rayon.broadcast(|_| {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some((position, item)) = next else { break };
                    run(position, item);
                }
            });
        }
        let mut failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
        failures.sort_by_key(|&(position, _)| position);
        Ok(failures)
    }

    /// Hands in `tasks`, for whichever thread is free next, after what was handed in before; returns at once. A panic in
    /// one is kept from the pool, which goes on; a task reports its own failures.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub(crate) fn spawn_all(&self, tasks: impl IntoIterator<Item = Task>) -> Result<()> {
        self.check_process()?;
        let mut wanted = 0;
        for task in tasks {
            self.tasks.queue.push(task);
            wanted += 1;
        }
        let most = self.threads();
        while wanted > 0 && !self.tasks.queue.is_empty() && self.tasks.join(most) {
            let tasks = Arc::clone(&self.tasks);
            self.rayon.spawn_fifo(move || tasks.take_all(most));
            wanted -= 1;
        }
        Ok(())
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            // The threads are not in this process: joining them would wait for ever, and so might rayon.
            std::mem::take(&mut self.threads).into_iter().for_each(std::mem::forget);
            return;
        }
        // SAFETY: dropped here once and not touched again; `self` is going away.
        unsafe { ManuallyDrop::drop(&mut self.rayon) };
        for thread in self.threads.drain(..) {
            // A worker that panicked has reported it through `for_each`.
            let _ = thread.join();
        }
    }
}

/// Shortens the calling thread's timer slack (50 microseconds by default), so that its short sleeps are short.
pub(crate) fn sleep_precisely() {
    const NANOSECONDS: libc::c_ulong = 1000;
    // SAFETY: sets a property of the calling thread; a refusal changes nothing.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, NANOSECONDS) };
}

/// Runs `work`; a panic in it becomes the error, with its message.
pub(crate) fn attempt(work: impl FnOnce()) -> std::result::Result<(), String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| message(&*panic))
}

/// A panic's message.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panic: {}", text.unwrap_or("of an unknown kind"))
}

/// The number of CPUs that this process may run on by its affinity, whatever its cgroup's quota.
fn affinity() -> Option<usize> {
    // SAFETY: a set of bits, all of which may be zero.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: it writes at most the size that it is told, into the set; 0 is this thread.
    let failed = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) } != 0;
    // SAFETY: reads the set.
    (!failed).then(|| usize::try_from(unsafe { libc::CPU_COUNT(&set) }).ok()).flatten().filter(|&count| count > 0)
}

/// How many worker threads to use, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadChoice {
    /// Number of threads, at least 1.
    pub threads: usize,
    /// The reason, for a person.
    pub why: String,
}

impl ThreadChoice {
    /// `OUTBOARD_NUM_THREADS` if it is set; else the CPUs that the process may use (affinity and cgroup quota), shared
    /// with the other ranks on this machine (`LOCAL_WORLD_SIZE`, set by torchrun). `OMP_NUM_THREADS` is not read:
    /// torchrun sets it to 1 for its own reasons, which would make every optimizer serial.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if `OUTBOARD_NUM_THREADS` is not a number of at least 1.
    pub fn detect() -> Result<Self> {
        let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
        let usable = std::thread::available_parallelism().map_or(1, usize::from);
        // SAFETY: sysconf only reads a number of the system.
        let online =
            usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(usable).max(usable);
        Self::choose(
            variable("OUTBOARD_NUM_THREADS").as_deref(),
            usable,
            affinity().unwrap_or(usable).clamp(usable, online),
            online,
            variable("LOCAL_WORLD_SIZE").and_then(|value| value.parse().ok()).unwrap_or(1),
        )
    }

    /// `usable` CPUs by all limits, of those that the process may run on by its affinity, of all that are online.
    fn choose(forced: Option<&str>, usable: usize, affinity: usize, online: usize, ranks: usize) -> Result<Self> {
        if let Some(value) = forced {
            return match value.parse() {
                Ok(threads) if threads > 0 => Ok(Self { threads, why: format!("OUTBOARD_NUM_THREADS={value}") }),
                _ => Err(Error::InvalidValue(format!("OUTBOARD_NUM_THREADS={value} is not a number of at least 1"))),
            };
        }
        let limit =
            if usable < online { format!("{usable} of {online} CPUs usable") } else { format!("{usable} CPUs") };
        let ranks = ranks.max(1);
        // A rank that has been bound to its share of the CPUs already need not share that again. An affinity can be a
        // rank's own; a quota of a cgroup is all ranks' together.
        if ranks == 1 || (affinity * ranks <= online && usable == affinity) {
            let bound = if ranks > 1 { format!(", this rank's own (LOCAL_WORLD_SIZE={ranks})") } else { String::new() };
            return Ok(Self { threads: usable, why: format!("{limit}{bound}") });
        }
        let threads = (usable / ranks).max(1);
        Ok(Self { threads, why: format!("{limit}, shared by {ranks} ranks (LOCAL_WORLD_SIZE)") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_item_once_and_every_failure_kept() {
        for threads in [1, 2, 8] {
            let pool = WorkerPool::new(threads).unwrap();
            let seen: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
            let failures = pool
                .for_each(0..1000_usize, |i| {
                    seen[i].fetch_add(1, Ordering::Relaxed);
                    assert!(i % 400 != 7, "item {i}");
                })
                .unwrap();
            assert_eq!(failures, [7, 407, 807].map(|i| (i, format!("panic: item {i}"))));
            assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn a_single_item_fails_as_many_do() {
        let pool = WorkerPool::new(2).unwrap();
        let failures = pool.for_each(0..1_usize, |_| panic!("alone")).unwrap();
        assert_eq!(failures, [(0, "panic: alone".to_string())]);
        assert_eq!(pool.for_each(0..0_usize, |_| unreachable!()).unwrap(), []);
    }

    #[test]
    fn tasks_run_once_whenever_they_come_and_dropping_drains_them() {
        for threads in [1, 2, 8] {
            let pool = WorkerPool::new(threads).unwrap();
            let seen: Arc<Vec<AtomicUsize>> = Arc::new((0..3000).map(|_| AtomicUsize::new(0)).collect());
            for batch in 0..300 {
                let tasks = (0..10).map(|i| -> Task {
                    let seen = Arc::clone(&seen);
                    Box::new(move || {
                        seen[10 * batch + i].fetch_add(1, Ordering::Relaxed);
                        assert!(i != 3, "kept from the pool");
                    })
                });
                pool.spawn_all(tasks).unwrap();
                if batch % 16 == 0 {
                    // Long enough for the threads to have gone to sleep.
                    std::thread::sleep(Duration::from_micros(300));
                }
            }
            drop(pool);
            assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn broadcast_work_has_its_turn_between_tasks() {
        static HANDED_IN: AtomicUsize = AtomicUsize::new(0);
        fn hand_in(pool: &Arc<WorkerPool>, stop: &Arc<AtomicUsize>) {
            HANDED_IN.fetch_add(1, Ordering::Relaxed);
            let (again, stop) = (Arc::clone(pool), Arc::clone(stop));
            let task: Task = Box::new(move || {
                if stop.load(Ordering::Relaxed) == 0 {
                    hand_in(&again, &stop);
                }
            });
            pool.spawn_all([task]).unwrap();
        }
        let pool = Arc::new(WorkerPool::new(2).unwrap());
        let stop = Arc::new(AtomicUsize::new(0));
        (0..4).for_each(|_| hand_in(&pool, &stop));
        assert_eq!(pool.for_each(0..100_usize, |_| ()).unwrap(), []);
        stop.store(1, Ordering::Relaxed);
        assert!(HANDED_IN.load(Ordering::Relaxed) >= 4);
        // The last task must not be the one that drops the pool.
        while Arc::strong_count(&pool) > 1 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn dropping_joins_the_threads() {
        static ENDED: AtomicUsize = AtomicUsize::new(0);
        struct Ends;
        impl Drop for Ends {
            fn drop(&mut self) {
                ENDED.fetch_add(1, Ordering::SeqCst);
            }
        }
        thread_local!(static MARK: Ends = const { Ends });
        let pool = WorkerPool::new(3).unwrap();
        pool.rayon.broadcast(|_| MARK.with(|_| ()));
        drop(pool);
        assert_eq!(ENDED.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn zero_threads_are_refused() {
        assert!(matches!(WorkerPool::new(0), Err(Error::InvalidValue(_))));
    }

    #[test]
    fn thread_count() {
        let choose = |forced, usable, affinity, online, ranks| {
            ThreadChoice::choose(forced, usable, affinity, online, ranks).unwrap().threads
        };
        assert_eq!(choose(None, 16, 16, 16, 1), 16);
        assert_eq!(choose(None, 2, 64, 64, 1), 2, "a cgroup of two CPUs");
        assert_eq!(choose(None, 16, 16, 16, 4), 4, "four ranks share");
        assert_eq!(choose(None, 4, 4, 16, 4), 4, "four ranks, each bound to its own");
        assert_eq!(choose(None, 4, 64, 64, 8), 1, "a quota of four CPUs, which eight ranks share");
        assert_eq!(choose(None, 16, 64, 64, 4), 4, "a quota of a rank's share of the machine");
        assert_eq!(choose(None, 2, 2, 2, 8), 1);
        assert_eq!(choose(Some("7"), 16, 16, 16, 4), 7);
        for bad in ["0", "-1", "many"] {
            assert!(ThreadChoice::choose(Some(bad), 16, 16, 16, 1).is_err(), "{bad}");
        }
    }
}
