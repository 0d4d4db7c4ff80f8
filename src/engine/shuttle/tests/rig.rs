//! What the tests share: a simulated device with some memory, a shuttle, and the caller's stream.

use crate::device::simulated::{Counters, Schedule, SimulatedDevice};
use crate::device::{Device, Stream};
use crate::engine::shuttle::{Caller, Place, Shuttle, ShuttleOptions};
use crate::error::Result;
use crate::memory::DeviceSpan;
use crate::pool::WorkerPool;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) const CALLER: Caller = Caller::Stream(7);
pub(super) const FOREIGN: Stream = Stream::Foreign(7);

pub(super) struct Rig {
    pub(super) device: Arc<SimulatedDevice>,
    pub(super) shuttle: Shuttle<SimulatedDevice>,
    /// Address of the device's memory.
    pub(super) memory: usize,
    guard: Box<dyn Any + Send + Sync>,
}

/// A generator of numbers; the seed decides them all.
pub(super) struct Chance(u64);

impl Chance {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }
}

/// The schedules under which every order has to hold.
pub(super) fn schedules(seeds: u64) -> impl Iterator<Item = Schedule> {
    std::iter::once(Schedule::Eager).chain((0..seeds).map(|seed| Schedule::Random { seed }))
}

pub(super) fn names(sizes: &[usize]) -> Vec<(String, usize)> {
    sizes.iter().enumerate().map(|(i, &bytes)| (format!("exp_avg of layer {i}"), bytes)).collect()
}

/// `bytes` bytes of the device.
pub(super) fn span(address: usize, bytes: usize) -> DeviceSpan {
    // SAFETY: inside the rig's memory, which outlives the shuttle; what orders accesses is under test.
    unsafe { DeviceSpan::new(address, bytes) }
}

fn slice<'a>(address: usize, bytes: usize) -> &'a mut [u8] {
    if bytes == 0 {
        return &mut [];
    }
    // SAFETY: initialised bytes of the rig's memory or of a live slot; the device's checker looks for races.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), bytes) }
}

impl Rig {
    pub(super) fn new(schedule: Schedule, device_bytes: usize, piece_bytes: usize) -> Self {
        let device = Arc::new(SimulatedDevice::new(schedule).unwrap());
        let (memory, guard) = device.allocate(device_bytes).unwrap();
        let pool = Arc::new(WorkerPool::new(1).unwrap());
        let options = ShuttleOptions { pin: None, piece_bytes };
        let shuttle = Shuttle::new(Arc::clone(&device), pool, options).unwrap();
        Self { device, shuttle, memory: memory.address(), guard }
    }

    pub(super) fn reserve(&mut self, sizes: &[usize]) -> Vec<usize> {
        let (ids, warning) = self.shuttle.reserve(&names(sizes), &[]).unwrap();
        assert_eq!(warning, None);
        ids
    }

    /// Slots on the host, with their first bytes: `id + position`.
    pub(super) fn filled(&mut self, sizes: &[usize]) -> Vec<usize> {
        let ids = self.reserve(sizes);
        for &id in &ids {
            self.write(id, &first_bytes(id, self.shuttle.bytes(id).unwrap()));
        }
        self.shuttle.fill(&ids).unwrap();
        ids
    }

    pub(super) fn write(&self, id: usize, bytes: &[u8]) {
        let (address, _handle) = self.shuttle.share(id).unwrap();
        self.device.host_access(address, bytes.len(), true);
        slice(address, bytes.len()).copy_from_slice(bytes);
    }

    pub(super) fn read(&self, id: usize) -> Vec<u8> {
        let (address, _handle) = self.shuttle.share(id).unwrap();
        let bytes = self.shuttle.bytes(id).unwrap();
        self.device.host_access(address, bytes, false);
        slice(address, bytes).to_vec()
    }

    pub(super) fn bytes(&self, id: usize) -> usize {
        self.shuttle.bytes(id).unwrap()
    }

    pub(super) fn place(&self, id: usize) -> Place {
        self.shuttle.place(id).unwrap()
    }

    /// Slots with spans of the device, one behind the other as they are in host memory, from `address`.
    pub(super) fn packed(&self, ids: &[usize], address: usize) -> Vec<(usize, DeviceSpan)> {
        let mut at = address;
        let place = |&id: &usize| {
            let bytes = self.bytes(id);
            let span = span(at, bytes);
            at += crate::memory::plane_bytes::<u8>(bytes).unwrap();
            (id, span)
        };
        ids.iter().map(place).collect()
    }

    /// The caller's kernel: adds to each byte.
    pub(super) fn add(&self, address: usize, bytes: usize, amount: u8) -> Result<()> {
        let range = [(address, bytes)];
        // A write stands for the read, too.
        self.device.push_accessing(FOREIGN, &[], &range, move || {
            for byte in slice(address, bytes) {
                *byte = byte.wrapping_add(amount);
            }
        })
    }

    /// The caller's kernel: sets each byte.
    pub(super) fn set(&self, address: usize, bytes: usize, value: u8) {
        let range = [(address, bytes)];
        self.device.push_accessing(FOREIGN, &[], &range, move || slice(address, bytes).fill(value)).unwrap();
    }

    /// Everything is given back, and nothing raced.
    pub(super) fn finish(self) {
        let Self { device, shuttle, guard, .. } = self;
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // Dropping waits, and with a manual schedule nobody else runs what it waits for.
            scope.spawn(|| {
                while !is_done.load(Ordering::Acquire) {
                    device.run_all();
                    std::thread::yield_now();
                }
            });
            device.drain(&[FOREIGN]).unwrap();
            drop(shuttle);
            is_done.store(true, Ordering::Release);
        });
        drop(guard);
        assert_eq!(device.hazards(), Vec::<String>::new());
        assert_eq!(device.counters(), Counters::default());
    }
}

pub(super) fn first_bytes(id: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|position| (id * 31 + position) as u8).collect()
}
