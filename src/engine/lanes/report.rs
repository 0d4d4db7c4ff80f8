//! What lanes tell: chunks that have landed, and totals for `stats()`.

/// Elements of a job whose update is complete, on the device and at home.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Landed {
    pub(super) job: u64,
    pub(super) elements: usize,
    /// When the chunk was given to its lane, in seconds since the engine started.
    pub(super) began: f64,
    /// When its tensors had come to where they were updated, and when that was done, if anybody has looked.
    pub(super) stages: Option<[f64; 2]>,
    /// Whether it has been counted as issued.
    pub(super) issued: bool,
    /// The lane's name.
    pub(super) lane: &'static str,
}

/// What one lane has done since the engine started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LaneTotals {
    /// Chunks updated, a bundle of tiny parameters counting as one.
    pub chunks: u64,
    /// Elements updated.
    pub elements: u64,
    /// Bytes copied to the device.
    pub bytes_in: u64,
    /// Bytes copied from the device.
    pub bytes_out: u64,
    /// Seconds in which at least one chunk was in flight.
    pub seconds: f64,
    busy_since: f64,
}

impl LaneTotals {
    pub(super) fn begin(&mut self, was_idle: bool, now: f64) {
        if was_idle {
            self.busy_since = now;
        }
    }

    pub(super) fn end(&mut self, is_idle: bool, now: f64) {
        if is_idle {
            self.seconds += now - self.busy_since;
        }
    }

    pub(super) fn count(&mut self, elements: usize, bytes_in: usize, bytes_out: usize) {
        self.chunks += 1;
        self.elements += elements as u64;
        self.bytes_in += bytes_in as u64;
        self.bytes_out += bytes_out as u64;
    }
}

/// What the engine of one device has done, and what it holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LaneStats {
    /// The GPU lane.
    pub gpu: LaneTotals,
    /// The CPU lane.
    pub cpu: LaneTotals,
    /// Gradients brought to host memory; `bytes_out` of them are part of the CPU lane's. A gradient that is added to a
    /// sum is in flight until it has been.
    pub offload: LaneTotals,
    /// Seconds of worker threads spent adding gradients up, of all threads together.
    pub adding_seconds: f64,
    /// Elements updated whose state is on the device.
    pub resident_elements: u64,
    /// Device memory of the ring.
    pub device_ring_bytes: usize,
    /// Pinned host memory of rings and tables.
    pub host_ring_bytes: usize,
    /// Gradient bytes accepted and not landed, now and at most.
    pub waiting_bytes: (usize, usize),
    /// Jobs accepted and not landed, now and at most.
    pub queue: (usize, usize),
    /// Chunks in flight at most, in the GPU lane and in the CPU lane.
    pub in_flight: (usize, usize),
    /// Seconds that the worker threads have spent in updates, all threads together.
    pub compute_seconds: f64,
    /// Seconds that the dispatcher has slept.
    pub dispatcher_sleep_seconds: f64,
    /// Seconds from the latest `mark_issue` to the last weight issued after it.
    pub issue_seconds: f64,
}

/// A stretch of one lane's work, for a picture of a step: track, label, start and end in seconds since the engine started.
pub type Stretch = (&'static str, String, f64, f64);

/// What a chunk is in a timeline: its whole way, and what was done on it.
pub(super) fn stretches(
    lane: &'static str,
    label: &str,
    [began, landed]: [f64; 2],
    stages: Option<[f64; 2]>,
) -> impl Iterator<Item = Stretch> + use<> {
    let names = match lane {
        "gpu lane" => Some(["gpu lane: copy in", "gpu lane: update", "gpu lane: copy out"]),
        "cpu lane" => Some(["cpu lane: copy out", "cpu lane: update", "cpu lane: copy in"]),
        _ => None,
    };
    let label = label.to_owned();
    let whole = (lane, label.clone(), began, landed);
    let parts = names.zip(stages).into_iter().flat_map(move |(names, [come, updated])| {
        let moments = [began, come, updated, landed];
        let label = label.clone();
        (0..3).map(move |part| (names[part], label.clone(), moments[part], moments[part + 1]))
    });
    std::iter::once(whole).chain(parts)
}
