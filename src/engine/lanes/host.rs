//! The CPU lane: gradient and weight come down to a ring in host memory, the worker pool updates them against the state
//! where it lives, and the weight goes up again.

use super::parts::{Chunk, Gradient, Offload, Sum};
use super::report::{Landed, LaneTotals};
use super::workers::{Computed, Workers, add_up, compute};
use crate::device::{Device, DeviceCopy, Stream, TABLE_ENTRY_BYTES};
use crate::error::{Error, Result};
use crate::memory::{HostRing, HostSpan};
use std::collections::VecDeque;

/// The lane's name in a timeline.
const LANE: &str = "cpu lane";
/// Elements of a gradient that is kept as it is, at once.
const KEPT_ELEMS: usize = 8 << 20;
/// Where tensors start in a slot of the ring.
const ALIGNMENT: usize = 64;

#[derive(Debug)]
struct InFlight {
    job: u64,
    elements: usize,
    began: f64,
    /// When all of it had come down, and when the workers were done.
    stages: [f64; 2],
    /// The weights and gradients on the device, and (until the workers have them) the planes.
    chunks: Vec<Chunk>,
    /// Instead of them, a gradient that goes to host memory.
    offload: Option<Offload>,
    /// What the device reads or writes in the ring, kept until it is done.
    lent: Vec<HostSpan>,
}

#[derive(Debug)]
struct Slot<D: Device> {
    down: D::Event,
    up: D::Event,
    work: Option<InFlight>,
}

/// The CPU lane of one device.
#[derive(Debug)]
pub(super) struct HostLane<D: Device> {
    slots: Vec<Slot<D>>,
    ring: HostRing,
    tables: HostRing,
    slot_bytes: usize,
    free: Vec<usize>,
    downloading: VecDeque<usize>,
    uploading: VecDeque<usize>,
    chunk_elems: usize,
    pub(super) totals: LaneTotals,
    /// Of gradients that leave the device, and how many runs of them are in flight.
    pub(super) offload: LaneTotals,
    offloading: usize,
    pub(super) adding_seconds: f64,
    /// The same of updates.
    pub(super) compute_seconds: f64,
}

impl<D: Device> HostLane<D> {
    /// A lane over a ring of slots; `tables` has a slot for each.
    pub(super) fn new(
        device: &D,
        ring: HostRing,
        slots: usize,
        slot_bytes: usize,
        chunk_elems: usize,
        tables: HostRing,
    ) -> Result<Self> {
        let free = (0..slots).rev().collect();
        let slots = (0..slots)
            .map(|_| Ok(Slot { down: device.event()?, up: device.event()?, work: None }))
            .collect::<Result<_>>()?;
        let (downloading, uploading, totals) = (VecDeque::new(), VecDeque::new(), LaneTotals::default());
        let (offload, offloading, adding_seconds, compute_seconds) = (totals, 0, 0.0, 0.0);
        Ok(Self {
            slots,
            ring,
            tables,
            slot_bytes,
            free,
            downloading,
            uploading,
            chunk_elems,
            totals,
            offload,
            offloading,
            adding_seconds,
            compute_seconds,
        })
    }

    pub(super) fn ring_bytes(&self) -> usize {
        self.ring.bytes() + self.tables.bytes()
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// How many elements of a chunk to take at once.
    pub(super) fn chunk_len(&self, chunk: &Chunk) -> usize {
        let live = (chunk.live_bytes() / chunk.len.max(1)).max(1);
        let fits = self.slot_bytes.saturating_sub(2 * ALIGNMENT) / live / ALIGNMENT * ALIGNMENT;
        chunk.len.min(self.chunk_elems).min(fits.max(ALIGNMENT))
    }

    /// Starts bringing weights and gradients of chunks (several: tiny parameters, whole) down. The lane has room.
    ///
    /// After a failure, too, the memory stays in flight until all that was given to the stream is over; if nobody can say
    /// when that is, `lost` says so.
    pub(super) fn start(
        &mut self,
        device: &D,
        job: u64,
        chunks: Vec<Chunk>,
        now: f64,
        lost: &mut Option<Error>,
    ) -> Result<()> {
        let slot = self.free.pop().expect("the caller has asked for room");
        let elements = chunks.iter().map(|chunk| chunk.len).sum();
        let down = chunks.iter().map(Chunk::live_bytes).sum();
        let up = chunks.iter().map(|chunk| chunk.weight.len()).sum();
        self.totals.begin(self.in_flight() == 1, now);
        self.totals.count(elements, up, down);
        let mut work =
            InFlight { job, elements, began: now, stages: [now; 2], chunks, offload: None, lent: Vec::new() };
        let given = self.download(device, slot, &mut work);
        let over = mark(device, &self.slots[slot].down, Stream::Down, lost);
        self.slots[slot].work = Some(work);
        self.downloading.push_back(slot);
        given.and(over)
    }

    /// How many elements of a gradient to take at once.
    pub(super) fn offload_len(&self, offload: &Offload) -> usize {
        let fits = match offload.sum {
            Sum::Keep => KEPT_ELEMS,
            Sum::Set | Sum::Add => self.slot_bytes / offload.grad_dtype.bytes() / ALIGNMENT * ALIGNMENT,
        };
        offload.len.min(self.chunk_elems).min(fits)
    }

    /// Starts bringing a run of a gradient down. As [`Self::start`].
    pub(super) fn start_offload(
        &mut self,
        device: &D,
        job: u64,
        offload: Offload,
        now: f64,
        lost: &mut Option<Error>,
    ) -> Result<()> {
        let slot = self.free.pop().expect("the caller has asked for room");
        self.totals.begin(self.in_flight() == 1, now);
        self.totals.bytes_out += offload.grad.len() as u64;
        self.offload.begin(self.offloading == 0, now);
        self.offload.count(offload.len, 0, offload.grad.len());
        self.offloading += 1;
        let mut lent = Vec::new();
        let given = if offload.sum == Sum::Keep {
            device.copy_out(&offload.to, &offload.grad, Stream::Down)
        } else {
            let mut memory = self.ring.lend(slot).expect("a free slot's memory is free");
            let here = place(&mut memory, offload.grad.len());
            let given = device.copy_out(&here, &offload.grad, Stream::Down);
            lent.push(here);
            given
        };
        let over = mark(device, &self.slots[slot].down, Stream::Down, lost);
        let elements = offload.len;
        let work =
            InFlight { job, elements, began: now, stages: [now; 2], chunks: Vec::new(), offload: Some(offload), lent };
        self.slots[slot].work = Some(work);
        self.downloading.push_back(slot);
        given.and(over)
    }

    fn download(&mut self, device: &D, slot: usize, work: &mut InFlight) -> Result<()> {
        let mut memory = self.ring.lend(slot).expect("a free slot's memory is free");
        let is_single = work.chunks.len() == 1;
        let mut copies = Vec::with_capacity(2 * work.chunks.len());
        for chunk in &mut work.chunks {
            let here = place(&mut memory, chunk.weight.len());
            if is_single {
                device.copy_out(&here, &chunk.weight, Stream::Down)?;
            }
            copies.push(DeviceCopy { to: here.address(), from: chunk.weight.address(), bytes: here.len() });
            work.lent.push(here);
            match &mut chunk.grad {
                Gradient::Device(grad) => {
                    let here = place(&mut memory, grad.len());
                    if is_single {
                        device.copy_out(&here, grad, Stream::Down)?;
                    }
                    copies.push(DeviceCopy { to: here.address(), from: grad.address(), bytes: here.len() });
                    work.lent.push(here);
                }
                // It is where the workers want it.
                Gradient::Host(grad) => work.lent.push(grad.split_front(grad.len())),
            }
        }
        if is_single {
            return Ok(());
        }
        let mut table = self.tables.lend(slot).expect("a free slot's table is free");
        let result = device.copy_many(&mut table, &copies, Stream::Down);
        work.lent.push(table);
        result
    }

    /// Hands what has come down to the workers, and reports chunks whose weights are up again.
    pub(super) fn poll(
        &mut self,
        device: &D,
        workers: &Workers,
        now: f64,
        is_lost: impl Fn(u64) -> bool,
        landed: &mut Vec<Landed>,
    ) -> Result<bool> {
        let mut progress = false;
        while let Some(&slot) = self.downloading.front() {
            if !device.is_done(&self.slots[slot].down)? {
                break;
            }
            self.downloading.pop_front();
            progress = true;
            let work = self.slots[slot].work.as_mut().expect("a busy slot has work");
            work.stages = [now; 2];
            let lent = std::mem::take(&mut work.lent);
            if is_lost(work.job) {
                // Half of it failed to start, or another chunk of the parameter did: nothing of it is to go up.
                drop(lent);
                self.finish(slot, now, false, landed);
                continue;
            }
            match &mut work.offload {
                Some(offload) if offload.sum == Sum::Keep => self.finish(slot, now, false, landed),
                Some(offload) => add_up(slot, offload, lent, workers)?,
                None => compute(slot, std::mem::take(&mut work.chunks), lent, workers)?,
            }
        }
        while let Some(&slot) = self.uploading.front() {
            if !device.is_done(&self.slots[slot].up)? {
                break;
            }
            self.uploading.pop_front();
            progress = true;
            self.finish(slot, now, true, landed);
        }
        Ok(progress)
    }

    fn finish(&mut self, slot: usize, now: f64, issued: bool, landed: &mut Vec<Landed>) {
        let work = self.slots[slot].work.take().expect("a busy slot has work");
        let InFlight { job, elements, began, stages, offload, .. } = work;
        if offload.is_some() {
            self.offloading -= 1;
            self.offload.end(self.offloading == 0, now);
        }
        self.free.push(slot);
        self.totals.end(self.in_flight() == 0, now);
        landed.push(Landed { job, elements, began, stages: Some(stages), issued, lane: LANE });
    }

    /// The job of a slot that the workers are done with.
    pub(super) fn job_of(&self, computed: &Computed) -> u64 {
        self.slots[computed.slot].work.as_ref().expect("a busy slot has work").job
    }

    /// Ends a slot whose gradient the workers have added up; `None` if it has weights to send up.
    pub(super) fn end_offload(&mut self, computed: &Computed, now: f64) -> Option<Landed> {
        self.slots[computed.slot].work.as_ref().filter(|work| work.offload.is_some())?;
        self.adding_seconds += computed.spent.as_secs_f64();
        let mut landed = Vec::new();
        self.finish(computed.slot, now, false, &mut landed);
        landed.pop()
    }

    /// Sends the weights of a computed slot up, but for those with broken pieces. `lost` as for [`Self::start`].
    pub(super) fn upload(&mut self, device: &D, computed: Computed, now: f64, lost: &mut Option<Error>) -> Result<()> {
        let Computed { slot, chunks, broken, spent } = computed;
        self.compute_seconds += spent.as_secs_f64();
        let work = self.slots[slot].work.as_mut().expect("a busy slot has work");
        work.stages[1] = now;
        work.chunks = chunks;
        let is_broken = |chunk: &Chunk| broken.iter().any(|broken| broken.slot == chunk.recipe.slot);
        // The pieces are back: the whole slot can be lent again, cut in the same way.
        let mut memory = self.ring.lend(slot).expect("the workers have given the memory back");
        let mut up = Vec::with_capacity(work.chunks.len());
        for chunk in &work.chunks {
            let weight = place(&mut memory, chunk.weight.len());
            drop(place(&mut memory, chunk.grad.device_bytes()));
            if !is_broken(chunk) {
                up.push((weight, chunk));
            }
        }
        let result = match &up[..] {
            [] => Ok(()),
            [(weight, chunk)] => device.copy_in(&chunk.weight, weight, Stream::Up),
            up => {
                let copy = |(weight, chunk): &(HostSpan, &Chunk)| DeviceCopy {
                    to: chunk.weight.address(),
                    from: weight.address(),
                    bytes: weight.len(),
                };
                let copies: Vec<DeviceCopy> = up.iter().map(copy).collect();
                let mut table = self.tables.lend(slot).expect("the table's last use is over");
                let result = device.copy_many(&mut table, &copies, Stream::Up);
                work.lent.push(table);
                result
            }
        };
        work.lent.extend(up.into_iter().map(|(weight, _)| weight));
        self.uploading.push_back(slot);
        let over = mark(device, &self.slots[slot].up, Stream::Up, lost);
        result.and(over)
    }

    /// As [`super::gpu::GpuLane::abandon`]; what the workers have comes back through their message all the same.
    pub(super) fn abandon(&mut self) -> Vec<Landed> {
        let mut lost = Vec::new();
        let uploading = std::mem::take(&mut self.uploading);
        for (slot, issued) in
            self.downloading.drain(..).map(|slot| (slot, false)).chain(uploading.into_iter().map(|slot| (slot, true)))
        {
            let work = self.slots[slot].work.take().expect("a busy slot has work");
            let InFlight { job, elements, began, .. } = work;
            lost.push(Landed { job, elements, began, stages: None, issued, lane: LANE });
            std::mem::forget(work);
        }
        lost
    }

    /// Takes back a slot from the workers after the device has failed.
    pub(super) fn give_up(&mut self, computed: &Computed) -> Landed {
        let work = self.slots[computed.slot].work.take().expect("a busy slot has work");
        let InFlight { job, elements, began, .. } = work;
        Landed { job, elements, began, stages: None, issued: false, lane: LANE }
    }
}

/// Marks a stream, or waits for it.
fn mark<D: Device>(device: &D, event: &D::Event, stream: Stream, lost: &mut Option<Error>) -> Result<()> {
    let marked = device.record(event, stream);
    if marked.is_err()
        && let Err(error) = device.drain(&[stream])
    {
        lost.get_or_insert(error);
    }
    marked
}

/// Bytes of a table for the copies of a bundle.
pub(super) fn table_bytes() -> usize {
    2 * super::job::BUNDLE_PARTS * TABLE_ENTRY_BYTES
}

/// The next `bytes` bytes of a slot, on a line of their own.
fn place(memory: &mut HostSpan, bytes: usize) -> HostSpan {
    let here = memory.split_front(bytes);
    let padding = memory.address().next_multiple_of(ALIGNMENT) - memory.address();
    drop(memory.split_front(padding.min(memory.len())));
    here
}
