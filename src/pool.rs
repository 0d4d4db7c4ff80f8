//! The worker pool: a private rayon pool that hands out items in order, keeps every failure, joins its threads when it is
//! dropped and refuses to work in a fork. It knows nothing of parameters.

use crate::error::{Error, Result};
use std::any::Any;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

/// Threads that update chunks. May be shared by several optimizers.
#[derive(Debug)]
pub struct WorkerPool {
    rayon: ManuallyDrop<rayon::ThreadPool>,
    /// rayon does not join its threads when a pool is dropped; these handles do.
    threads: Vec<JoinHandle<()>>,
    process: u32,
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
        Ok(Self { rayon: ManuallyDrop::new(pool), threads: handles, process: std::process::id() })
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

    /// Hands `work` to whichever thread is free next, after what was handed in before; returns at once. A panic in it is
    /// kept from the pool, which goes on; `work` reports its own failures.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub(crate) fn spawn(&self, work: impl FnOnce() + Send + 'static) -> Result<()> {
        self.check_process()?;
        self.rayon.spawn_fifo(move || drop(attempt(work)));
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
            online,
            variable("LOCAL_WORLD_SIZE").and_then(|value| value.parse().ok()).unwrap_or(1),
        )
    }

    fn choose(forced: Option<&str>, usable: usize, online: usize, ranks: usize) -> Result<Self> {
        if let Some(value) = forced {
            return match value.parse() {
                Ok(threads) if threads > 0 => Ok(Self { threads, why: format!("OUTBOARD_NUM_THREADS={value}") }),
                _ => Err(Error::InvalidValue(format!("OUTBOARD_NUM_THREADS={value} is not a number of at least 1"))),
            };
        }
        let limit =
            if usable < online { format!("{usable} of {online} CPUs usable") } else { format!("{usable} CPUs") };
        let ranks = ranks.max(1);
        // A rank that has been bound to its share of the CPUs already need not share that again.
        if ranks == 1 || usable * ranks <= online {
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
        let choose =
            |forced, usable, online, ranks| ThreadChoice::choose(forced, usable, online, ranks).unwrap().threads;
        assert_eq!(choose(None, 16, 16, 1), 16);
        assert_eq!(choose(None, 2, 64, 1), 2, "a cgroup of two CPUs");
        assert_eq!(choose(None, 16, 16, 4), 4, "four ranks share");
        assert_eq!(choose(None, 4, 16, 4), 4, "four ranks, each bound to its own");
        assert_eq!(choose(None, 2, 2, 8), 1);
        assert_eq!(choose(Some("7"), 16, 16, 4), 7);
        for bad in ["0", "-1", "many"] {
            assert!(ThreadChoice::choose(Some(bad), 16, 16, 1).is_err(), "{bad}");
        }
    }
}
