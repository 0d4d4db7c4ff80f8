use super::*;
use crate::device::simulated::{OperationKind, Schedule, SimulatedDevice};
use crate::memory::host_pool::HostPoolOptions;
use crate::pool::WorkerPool;
use std::any::Any;

const CALLER: Caller = Caller::Stream(7);
const FOREIGN: Stream = Stream::Foreign(7);

struct Rig {
    device: Arc<SimulatedDevice>,
    pool: HostPool,
    ferry: Ferry<SimulatedDevice>,
    memory: usize,
    guard: Box<dyn Any + Send + Sync>,
}

fn slice<'a>(address: usize, bytes: usize) -> &'a mut [u8] {
    // SAFETY: inside the rig's memory; the device's checker looks for races.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), bytes) }
}

impl Rig {
    fn new(schedule: Schedule, piece_bytes: usize, max_bytes: Option<usize>) -> Self {
        let device = Arc::new(SimulatedDevice::new(schedule).unwrap());
        let options = HostPoolOptions { max_bytes, ..HostPoolOptions::default() };
        let pool = HostPool::new(Arc::new(WorkerPool::new(1).unwrap()), options);
        let ferry = Ferry::new(Arc::clone(&device), pool.clone(), piece_bytes).unwrap();
        let (span, guard) = device.allocate(1 << 16).unwrap();
        Self { device, pool, ferry, memory: span.address(), guard }
    }

    fn span(&self, offset: usize, bytes: usize) -> DeviceSpan {
        // SAFETY: inside the rig's memory, which outlives the ferry; what orders accesses is under test.
        unsafe { DeviceSpan::new(self.memory + offset, bytes) }
    }

    /// The caller's stream writes a pattern.
    fn write(&self, offset: usize, bytes: usize, seed: u8) {
        let address = self.memory + offset;
        let work = move || slice(address, bytes).iter_mut().enumerate().for_each(|(i, b)| *b = pattern(seed, i));
        self.device.push_accessing(FOREIGN, &[], &[(address, bytes)], work).unwrap();
    }

    /// The caller's stream looks at a pattern, and notes down whether it is there.
    fn check(&self, offset: usize, bytes: usize, seed: u8) -> Arc<std::sync::atomic::AtomicBool> {
        let (address, found) = (self.memory + offset, Arc::default());
        let note: Arc<std::sync::atomic::AtomicBool> = Arc::clone(&found);
        let work = move || {
            let is_there = slice(address, bytes).iter().enumerate().all(|(i, &b)| b == pattern(seed, i));
            note.store(is_there, std::sync::atomic::Ordering::Release);
        };
        self.device.push_accessing(FOREIGN, &[(address, bytes)], &[], work).unwrap();
        found
    }

    fn finish(self) {
        self.device.drain(&[FOREIGN, Stream::StateIn, Stream::StateOut]).unwrap();
        assert_eq!(self.device.hazards(), Vec::<String>::new());
        drop(self.ferry);
        let stats = self.pool.stats().unwrap();
        assert_eq!((stats.live, stats.pending), (0, 0));
        drop(self.guard);
    }
}

fn pattern(seed: u8, index: usize) -> u8 {
    u8::try_from((index * 31 + usize::from(seed) * 7) % 251).unwrap()
}

fn schedules() -> impl Iterator<Item = Schedule> {
    std::iter::once(Schedule::Eager).chain((0..20).map(|seed| Schedule::Random { seed }))
}

#[test]
fn cargos_come_back_as_they_went_whatever_the_order() {
    for schedule in schedules() {
        let mut rig = Rig::new(schedule, 100, None);
        let mut checks = Vec::new();
        for round in 0..6_u8 {
            // Out of memory that is written anew as soon as it has landed, in as soon as it is asked for.
            let mut cargos = Vec::new();
            for (index, bytes) in [(0_u8, 1000), (1, 64), (2, 333)] {
                let at = usize::from(index) * 2048;
                rig.write(at, bytes, round * 3 + index);
                let runs = vec![rig.span(at, bytes / 2), rig.span(at + bytes / 2, bytes - bytes / 2)];
                cargos.push((rig.ferry.send("a cargo", runs, CALLER).unwrap(), bytes, round * 3 + index));
                rig.ferry.landed(cargos[usize::from(index)].0, CALLER).unwrap();
                rig.write(at, bytes, 99);
            }
            for (id, bytes, seed) in cargos.into_iter().rev() {
                for _ in 0..2 {
                    let runs = vec![rig.span(8192, bytes / 2), rig.span(8192 + bytes / 2, bytes - bytes / 2)];
                    rig.ferry.bring(id, runs, CALLER).unwrap();
                    rig.ferry.arrive(id, CALLER).unwrap();
                    checks.push(rig.check(8192, bytes, seed));
                }
                rig.ferry.drop_cargo(id).unwrap();
            }
        }
        let stats = rig.ferry.stats();
        assert_eq!((stats.cargos, stats.bytes, stats.bytes_out), (0, 0, 6 * 1397));
        assert_eq!(stats.bytes_in, 2 * stats.bytes_out);
        assert_eq!(rig.ferry.stats().copies_out, 6 * (10 + 2 + 4));
        rig.device.drain(&[FOREIGN]).unwrap();
        assert!(checks.iter().all(|check| check.load(std::sync::atomic::Ordering::Acquire)));
        rig.finish();
    }
}

#[test]
fn a_cargo_that_nobody_brings_back_leaves_its_buffer_behind_its_copy() {
    let mut rig = Rig::new(Schedule::Manual, 1 << 20, None);
    let runs = vec![rig.span(0, 4096)];
    let id = rig.ferry.send("a cargo", runs, CALLER).unwrap();
    assert!(!rig.ferry.has_landed(id).unwrap());
    rig.ferry.drop_cargo(id).unwrap();
    assert_eq!(rig.pool.stats().unwrap().pending, 4096);
    rig.device.run_all();
    assert_eq!(rig.pool.stats().unwrap().cached, 4096);
    assert!(matches!(rig.ferry.drop_cargo(id), Err(Error::InvalidValue(_))));
    assert!(matches!(rig.ferry.landed(id, CALLER), Err(Error::InvalidValue(_))));
}

#[test]
fn nothing_travels_too() {
    let mut rig = Rig::new(Schedule::Eager, 64, None);
    let id = rig.ferry.send("nothing", Vec::new(), CALLER).unwrap();
    rig.ferry.bring(id, Vec::new(), CALLER).unwrap();
    rig.ferry.arrive(id, CALLER).unwrap();
    rig.ferry.drop_cargo(id).unwrap();
    rig.finish();
}

#[test]
fn a_full_pool_is_an_error_and_nothing_is_lost() {
    let mut rig = Rig::new(Schedule::Eager, 64, Some(8192));
    let runs = vec![rig.span(0, 8000)];
    let id = rig.ferry.send("first", runs, CALLER).unwrap();
    let runs = vec![rig.span(8192, 4000)];
    assert!(matches!(rig.ferry.send("second", runs, CALLER), Err(Error::PoolLimit { .. })));
    rig.ferry.drop_cargo(id).unwrap();
    let runs = vec![rig.span(8192, 4000)];
    let id = rig.ferry.send("second", runs, CALLER).unwrap();
    let wrong = vec![rig.span(0, 100)];
    let error = rig.ferry.bring(id, wrong, CALLER).unwrap_err();
    assert!(error.to_string().contains("128 bytes on the device for second, which has 4032"), "{error}");
    assert!(matches!(rig.ferry.arrive(id, CALLER), Err(Error::InvalidValue(_))));
    rig.finish();
}

#[test]
fn a_copy_that_fails_names_the_cargo_and_gives_its_buffer_back() {
    for (kind, skip) in [(OperationKind::CopyOut, 0), (OperationKind::CopyOut, 3), (OperationKind::CopyIn, 2)] {
        let mut rig = Rig::new(Schedule::Random { seed: 5 }, 64, None);
        rig.write(0, 512, 1);
        rig.device.fail_next(kind, skip, false);
        let runs = vec![rig.span(0, 512)];
        let sent = rig.ferry.send("grad of layers.3", runs, CALLER);
        let id = match sent {
            Err(error) => {
                assert_eq!(kind, OperationKind::CopyOut);
                assert!(error.to_string().contains("grad of layers.3 on its way to the host"), "{error}");
                let runs = vec![rig.span(0, 512)];
                rig.ferry.send("again", runs, CALLER).unwrap()
            }
            Ok(id) => {
                let runs = vec![rig.span(4096, 512)];
                let error = rig.ferry.bring(id, runs, CALLER).unwrap_err();
                assert!(error.to_string().contains("on its way to the device"), "{error}");
                id
            }
        };
        let runs = vec![rig.span(4096, 512)];
        rig.ferry.bring(id, runs, CALLER).unwrap();
        rig.ferry.arrive(id, CALLER).unwrap();
        let is_there = rig.check(4096, 512, 1);
        rig.device.drain(&[FOREIGN]).unwrap();
        assert!(is_there.load(std::sync::atomic::Ordering::Acquire));
        rig.finish();
    }
}
