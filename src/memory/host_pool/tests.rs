use super::*;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

const MIB: usize = 1 << 20;

fn pool(max_bytes: Option<usize>) -> HostPool {
    let workers = Arc::new(WorkerPool::new(1).unwrap());
    HostPool::new(workers, HostPoolOptions { max_bytes, ..HostPoolOptions::default() })
}

/// An event that a test completes.
#[derive(Clone, Debug, Default)]
struct Mark(Arc<AtomicBool>);

impl Mark {
    fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn fence(&self) -> Box<dyn Fence> {
        Box::new(self.clone())
    }
}

impl Fence for Mark {
    fn is_done(&self) -> Result<bool> {
        Ok(self.0.load(Ordering::Acquire))
    }

    fn wait(&self) -> Result<()> {
        while !self.0.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_micros(10));
        }
        Ok(())
    }
}

/// An event of a device that has failed.
struct Broken;

impl Fence for Broken {
    fn is_done(&self) -> Result<bool> {
        Err(Error::Cuda("the device has failed".into()))
    }

    fn wait(&self) -> Result<()> {
        self.is_done().map(|_| ())
    }
}

#[test]
fn a_buffer_has_the_size_asked_for_and_comes_back() {
    let pool = pool(None);
    let mut first = pool.acquire(1000).unwrap();
    assert_eq!((first.len(), first.address() % 64, first.is_pinned()), (1000, 0, false));
    assert_eq!(first.as_slice(), vec![0; 1000]);
    first.as_mut_slice().fill(7);
    let address = first.address();
    let stats = pool.stats().unwrap();
    assert_eq!((stats.live, stats.waste, stats.cached, stats.misses, stats.hits), (1024, 24, 0, 1, 0));
    pool.release(first, None).unwrap();
    let again = pool.acquire(1010).unwrap();
    assert_eq!((again.address(), again.as_slice()[0]), (address, 7));
    assert_eq!(pool.stats().unwrap().hits, 1);
    // Another size has another buffer.
    assert_ne!(pool.acquire(900).unwrap().address(), address);
    drop(again);
    let stats = pool.stats().unwrap();
    assert_eq!((stats.live, stats.cached, stats.buffers, stats.peak), (0, 1024 + 960, 2, 1024 + 960));
}

#[test]
fn nothing_is_a_buffer_too() {
    let pool = pool(Some(0));
    let nothing = pool.acquire(0).unwrap();
    assert!(nothing.is_empty() && nothing.as_slice().is_empty());
    pool.release(nothing, None).unwrap();
    assert_eq!(pool.stats().unwrap(), HostPoolStats::default());
}

#[test]
fn a_buffer_in_use_by_a_copy_is_lent_once_that_is_done() {
    let pool = pool(None);
    let mark = Mark::default();
    let first = pool.acquire(MIB).unwrap();
    let address = first.address();
    pool.release(first, Some(mark.fence())).unwrap();
    assert_eq!(pool.stats().unwrap().pending, MIB);
    // Nobody waits: another one serves.
    let second = pool.acquire(MIB).unwrap();
    assert_ne!(second.address(), address);
    mark.set();
    assert_eq!(pool.acquire(MIB).unwrap().address(), address);
    let stats = pool.stats().unwrap();
    assert_eq!((stats.pending, stats.peak), (0, 2 * MIB));
}

#[test]
fn at_the_limit_what_others_have_cached_is_given_up() {
    let pool = pool(Some(64 * MIB));
    for size in [20, 24, 20] {
        let buffer = pool.acquire(size * MIB).unwrap();
        pool.release(buffer, None).unwrap();
    }
    assert_eq!(pool.stats().unwrap().held, 44 * MIB);
    // A larger one serves.
    let larger = pool.acquire(22 * MIB).unwrap();
    assert_eq!(pool.stats().unwrap().waste, 2 * MIB);
    drop(larger);
    let whole = pool.acquire(60 * MIB).unwrap();
    assert_eq!((whole.len(), pool.stats().unwrap().held), (60 * MIB, 60 * MIB));
}

#[test]
fn at_the_limit_the_oldest_buffer_that_is_large_enough_is_waited_for() {
    let pool = pool(Some(60 * MIB));
    let [small, first, second] = [16, 20, 24].map(|size| pool.acquire(size * MIB).unwrap());
    let addresses = [first.address(), second.address()];
    let marks = [Mark::default(), Mark::default(), Mark::default()];
    pool.release(small, Some(marks[0].fence())).unwrap();
    pool.release(first, Some(marks[1].fence())).unwrap();
    pool.release(second, Some(marks[2].fence())).unwrap();
    let waiting = {
        let pool = pool.clone();
        std::thread::spawn(move || pool.acquire(18 * MIB).map(|buffer| buffer.address()))
    };
    std::thread::sleep(Duration::from_millis(20));
    assert!(!waiting.is_finished());
    // Others may use the pool meanwhile.
    drop(pool.acquire(0).unwrap());
    assert_eq!(pool.stats().unwrap().live, 0);
    marks[1].set();
    assert_eq!(waiting.join().unwrap().unwrap(), addresses[0]);
    marks[2].set();
    marks[0].set();
    assert_eq!(pool.acquire(24 * MIB).unwrap().address(), addresses[1]);
}

#[test]
fn smaller_buffers_in_use_are_waited_for_where_their_memory_would_do() {
    let pool = pool(Some(40 * MIB));
    let [first, second] = [20, 20].map(|size| pool.acquire(size * MIB).unwrap());
    let marks = [Mark::default(), Mark::default()];
    pool.release(first, Some(marks[0].fence())).unwrap();
    pool.release(second, Some(marks[1].fence())).unwrap();
    marks[0].set();
    marks[1].set();
    assert_eq!(pool.acquire(40 * MIB).unwrap().len(), 40 * MIB);
}

#[test]
fn beyond_the_limit_the_error_says_what_there_is() {
    let pool = pool(Some(20 * MIB));
    let kept = pool.acquire(16 * MIB + 1).unwrap();
    let error = pool.acquire(5 * MIB + 1).unwrap_err();
    assert!(matches!(error, Error::PoolLimit { .. }), "{error}");
    let message = error.to_string();
    for part in ["5242881 bytes", "5767168 as rounded", "holds 18874368 of 20971520", "18874368 of them lent"] {
        assert!(message.contains(part), "{message}");
    }
    // What is lent cannot be waited for.
    let pending = pool.acquire(MIB).unwrap();
    pool.release(pending, Some(Mark::default().fence())).unwrap();
    assert!(matches!(pool.acquire(10 * MIB), Err(Error::PoolLimit { .. })));
    drop(kept);
    assert_eq!(pool.acquire(5 * MIB + 1).unwrap().len(), 5 * MIB + 1);
    assert!(matches!(pool.acquire(usize::MAX), Err(Error::InvalidValue(_))));
    std::mem::forget(pool); // nobody sets that mark
}

#[test]
fn foreign_buffers_and_those_released_before_are_errors() {
    let (one, other) = (pool(None), pool(None));
    let buffer = one.acquire(100).unwrap();
    let error = other.release(buffer, None).unwrap_err();
    assert!(error.to_string().contains("another pool's"), "{error}");
    assert_eq!((one.stats().unwrap().live, one.stats().unwrap().cached), (0, 128), "it went home");
    let buffer = one.acquire(100).unwrap();
    let address = buffer.address();
    for foreign in [address - 1, address + 128, 8] {
        let error = one.release_at(foreign, None).unwrap_err();
        assert!(error.to_string().contains("not this pool's"), "{error}");
    }
    one.release_at(address + 99, None).unwrap();
    let error = one.release_at(address, None).unwrap_err();
    assert!(error.to_string().contains("released before"), "{error}");
    // What still has the old handle takes nothing back that others have.
    let again = one.acquire(100).unwrap();
    drop(buffer);
    assert_eq!(one.stats().unwrap().live, 128);
    drop(again);
    assert_eq!(one.stats().unwrap().live, 0);
}

#[test]
fn small_buffers_share_memory_and_trim_gives_back_what_nobody_uses() {
    let pool = pool(None);
    let buffers: Vec<_> = (0..100).map(|_| pool.acquire(10_000).unwrap()).collect();
    let held = pool.stats().unwrap().held;
    assert!(held < 2 * 100 * 10_240, "{held}");
    let large = pool.acquire(20 * MIB).unwrap();
    pool.release(large, None).unwrap();
    assert_eq!(pool.trim().unwrap(), 20 * MIB);
    let kept = buffers.into_iter().next().unwrap();
    let freed = pool.trim().unwrap();
    let stats = pool.stats().unwrap();
    assert_eq!(stats.held, held - freed);
    assert_eq!(stats.live, 10_240);
    drop(kept);
    pool.trim().unwrap();
    assert_eq!(pool.stats().unwrap().held, 0);
}

#[test]
fn memory_outlives_its_pool() {
    let pool = pool(None);
    let mut kept = pool.acquire(3 * MIB).unwrap();
    drop(pool);
    kept.as_mut_slice().fill(1);
    assert_eq!(kept.as_slice()[3 * MIB - 1], 1);
}

#[test]
fn a_device_that_has_failed_is_told_and_its_buffer_is_not_used_again() {
    let pool = pool(None);
    let buffer = pool.acquire(100).unwrap();
    let address = buffer.address();
    pool.release(buffer, Some(Box::new(Broken))).unwrap();
    assert!(matches!(pool.acquire(100), Err(Error::Cuda(_))));
    assert_ne!(pool.acquire(100).unwrap().address(), address);
    assert_eq!(pool.trim().unwrap(), 0, "a copy may still write there");
}

#[test]
fn memory_is_pinned_or_told_of_once() {
    let workers = Arc::new(WorkerPool::new(1).unwrap());
    let unpinned = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&unpinned);
    let pin = move |_: usize, bytes: usize| -> Result<Box<dyn Any + Send + Sync>> {
        struct Guard(Arc<AtomicUsize>, usize);
        impl Drop for Guard {
            fn drop(&mut self) {
                self.0.fetch_add(self.1, Ordering::Relaxed);
            }
        }
        Ok(Box::new(Guard(Arc::clone(&counter), bytes)))
    };
    let options = HostPoolOptions { pin: Some(Box::new(pin)), ..HostPoolOptions::default() };
    let pool = HostPool::new(Arc::clone(&workers), options);
    assert!(pool.acquire(4 * MIB).unwrap().is_pinned());
    assert_eq!(pool.stats().unwrap().pinned, 4 * MIB);
    pool.trim().unwrap();
    assert_eq!(unpinned.load(Ordering::Relaxed), 4 * MIB);

    let refuse = |_: usize, _: usize| Err(Error::Cuda("no".into()));
    for must_pin in [false, true] {
        let options = HostPoolOptions { pin: Some(Box::new(refuse)), must_pin, ..HostPoolOptions::default() };
        let pool = HostPool::new(Arc::clone(&workers), options);
        let results = [pool.acquire(100), pool.acquire(4 * MIB)].map(|result| result.is_ok());
        assert_eq!(results, [!must_pin; 2]);
        let warnings = pool.take_warnings().unwrap();
        assert_eq!(warnings.len(), usize::from(!must_pin), "{warnings:?}");
        assert!(warnings.iter().all(|warning| warning.contains("pageable")));
        assert_eq!(pool.stats().unwrap().pinned, 0);
    }
}

/// A number below `most`, of a generator's state.
fn random(state: &mut u64, most: usize) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    usize::try_from(*state % most as u64).unwrap()
}

/// Buffers of many threads never overlap, whatever the order in which copies are done, and nothing is lost.
fn many_threads(rounds: usize) {
    let pool = pool(Some(256 * MIB));
    let in_flight: Mutex<Vec<Mark>> = Mutex::default();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (pool, in_flight) = (&pool, &in_flight);
            scope.spawn(move || {
                let mut state = 0x9E37_79B9_7F4A_7C15 ^ (thread + 1);
                let mut held: Vec<(HostBuffer, u8)> = Vec::new();
                for _ in 0..rounds {
                    if held.len() < 24 && random(&mut state, 2) == 0 {
                        let most = 1 << (4 + random(&mut state, 14));
                        let bytes = 1 + random(&mut state, most);
                        let mut buffer = pool.acquire(bytes).unwrap();
                        let stamp = u8::try_from(random(&mut state, 256)).unwrap();
                        let slice = buffer.as_mut_slice();
                        slice[0] = stamp;
                        slice[bytes - 1] = stamp;
                        held.push((buffer, stamp));
                    } else if !held.is_empty() {
                        let (buffer, stamp) = held.swap_remove(random(&mut state, held.len()));
                        let slice = buffer.as_slice();
                        assert_eq!((slice[0], slice[slice.len() - 1]), (stamp, stamp), "somebody else wrote there");
                        match random(&mut state, 3) {
                            0 => drop(buffer),
                            1 => pool.release(buffer, None).unwrap(),
                            _ => {
                                let mark = Mark::default();
                                pool.release(buffer, Some(mark.fence())).unwrap();
                                lock(in_flight).push(mark);
                            }
                        }
                    }
                    let mut marks = lock(in_flight);
                    if marks.len() > 32 || (!marks.is_empty() && random(&mut state, 3) == 0) {
                        let at = random(&mut state, marks.len());
                        marks.swap_remove(at).set();
                    }
                }
            });
        }
    });
    for mark in lock(&in_flight).drain(..) {
        mark.set();
    }
    let stats = pool.stats().unwrap();
    assert_eq!((stats.live, stats.pending, stats.waste), (0, 0, 0));
    pool.trim().unwrap();
    let stats = pool.stats().unwrap();
    assert_eq!((stats.held, stats.cached, stats.buffers), (0, 0, 0));
}

#[test]
fn four_threads_and_random_events() {
    many_threads(20_000);
}

#[test]
#[ignore = "a million in all: make test-exhaustive"]
fn four_threads_and_a_million_random_events() {
    many_threads(250_000);
}

proptest! {
    /// The books of any sequence add up.
    #[test]
    fn the_books_add_up(steps in prop::collection::vec((0..4_u8, 1_usize..200_000, 0..8_usize), 1..120)) {
        let pool = pool(Some(8 * MIB));
        let mut held: HashMap<usize, HostBuffer> = HashMap::new();
        let mut marks: Vec<(usize, Mark)> = Vec::new();
        for (kind, bytes, at) in steps {
            match kind {
                0 | 1 => match pool.acquire(bytes) {
                    Ok(buffer) => {
                        let (start, end) = (buffer.address(), buffer.address() + buffer.len());
                        let overlaps = |other: &HostBuffer| start < other.address() + other.len() && other.address() < end;
                        prop_assert!(!held.values().any(overlaps));
                        held.insert(start, buffer);
                    }
                    Err(error) => {
                        let is_the_limit = matches!(error, Error::PoolLimit { .. });
                        prop_assert!(is_the_limit);
                    }
                },
                2 => {
                    let chosen = held.keys().nth(at).copied();
                    if let Some(buffer) = chosen.and_then(|key| held.remove(&key)) {
                        let mark = Mark::default();
                        marks.push((class_of(buffer.len()).unwrap(), mark.clone()));
                        pool.release(buffer, Some(mark.fence())).unwrap();
                    }
                    // Never so many that a request would wait for one.
                    while marks.iter().map(|(bytes, _)| bytes).sum::<usize>() > MIB {
                        marks.remove(0).1.set();
                    }
                }
                _ => {
                    if at < marks.len() {
                        marks.swap_remove(at).1.set();
                    }
                }
            }
            for (_, mark) in if pool.stats().unwrap().held > 5 * MIB { std::mem::take(&mut marks) } else { Vec::new() } {
                mark.set();
            }
            let stats = pool.stats().unwrap();
            let classes: usize = held.values().map(|buffer| class_of(buffer.len()).unwrap()).sum();
            prop_assert!(stats.live >= classes);
            prop_assert_eq!(stats.live - stats.waste, held.values().map(HostBuffer::len).sum::<usize>());
            prop_assert_eq!(stats.pending, marks.iter().map(|(bytes, _)| bytes).sum::<usize>());
            prop_assert!(stats.live + stats.cached + stats.pending <= stats.held);
            prop_assert!(stats.held <= 8 * MIB);
        }
        drop(held);
        for (_, mark) in marks {
            mark.set();
        }
        pool.trim().unwrap();
        prop_assert_eq!(pool.stats().unwrap().held, 0);
    }
}
