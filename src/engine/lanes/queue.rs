//! The dispatcher's queue: jobs in order of next use, apart by who may take them, so that nobody looks past another's.

use super::job::Work;
use std::collections::BTreeSet;

/// When a job's weight is needed next, and its number.
pub(super) type Key = (u64, u64);

/// Jobs of which something is left to take.
#[derive(Debug)]
pub(super) struct Queue {
    /// Gradients that are to leave the device.
    offloads: BTreeSet<Key>,
    /// What only the CPU lane can update.
    host: BTreeSet<Key>,
    /// What the GPU lane can update, and the CPU lane too if it `shares`.
    device: BTreeSet<Key>,
    has_device: bool,
    shares: bool,
}

impl Queue {
    /// A queue for a CPU lane and, if it `has_device`, a GPU lane, of whose work the first takes a part if it `shares`.
    pub(super) fn new(has_device: bool, shares: bool) -> Self {
        let (offloads, host, device) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        Self { offloads, host, device, has_device, shares }
    }

    pub(super) fn insert(&mut self, key: Key, work: &Work) {
        let set = match work {
            Work::Offload(_) => &mut self.offloads,
            // What the GPU lane cannot take is the CPU lane's, whatever the mode.
            _ if self.has_device && work.is_pinned() => &mut self.device,
            _ => &mut self.host,
        };
        set.insert(key);
    }

    /// Takes a job out; whether it was in.
    pub(super) fn remove(&mut self, key: Key) -> bool {
        [&mut self.offloads, &mut self.host, &mut self.device].into_iter().any(|set| set.remove(&key))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.offloads.is_empty() && self.host.is_empty() && self.device.is_empty()
    }

    pub(super) fn first_offload(&self) -> Option<Key> {
        self.offloads.first().copied()
    }

    pub(super) fn first_for_cpu_lane(&self) -> Option<Key> {
        let shared = self.device.first().filter(|_| self.shares);
        self.host.first().into_iter().chain(shared).min().copied()
    }

    pub(super) fn first_for_gpu_lane(&self) -> Option<Key> {
        self.device.first().copied()
    }
}
