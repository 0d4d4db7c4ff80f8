//! The GPU lane: state comes to the weights, is updated on the device and goes home. Staged through a ring on the device,
//! with copies both ways at once and the update between them; or read and written in place, in pinned host memory.

use super::parts::{Chunk, Planes};
use super::report::{Landed, LaneTotals};
use crate::device::{Device, DeviceUpdate, Stream};
use crate::error::{Error, Result};
use crate::memory::{DeviceRing, DeviceSpan, HostRing, HostSpan, join_neighbours};
use std::collections::VecDeque;

/// Planes in the ring start on these borders, so that kernels and copies use whole lines.
const ALIGNMENT: usize = 256;

/// What a slot of the ring is busy with.
#[derive(Debug)]
struct InFlight {
    slot: usize,
    job: u64,
    elements: usize,
    began: f64,
    chunks: Vec<Chunk>,
    /// A bundle's planes, as they are copied.
    joined: Vec<HostSpan>,
    staged: Vec<DeviceSpan>,
    table: Option<HostSpan>,
    /// When it had arrived, and when it was updated, for a timeline.
    stages: [Option<f64>; 2],
}

#[derive(Debug)]
struct Slot<D: Device> {
    arrived: D::Event,
    updated: D::Event,
    home: D::Event,
    busy: bool,
}

/// The GPU lane of one device.
#[derive(Debug)]
pub(super) struct GpuLane<D: Device> {
    slots: Vec<Slot<D>>,
    /// `None` where the device works on host memory in place.
    ring: Option<DeviceRing>,
    slot_bytes: usize,
    tables: HostRing,
    in_flight: VecDeque<InFlight>,
    next: usize,
    /// The most elements in a chunk, whatever the ring would hold.
    chunk_elems: usize,
    pub(super) totals: LaneTotals,
}

impl<D: Device> GpuLane<D> {
    /// A lane with `depth` chunks in flight, each of at most `slot_bytes` bytes of state. `tables` has a slot for each.
    pub(super) fn new(
        device: &D,
        depth: usize,
        slot_bytes: usize,
        chunk_elems: usize,
        in_place: bool,
        tables: HostRing,
    ) -> Result<Self> {
        let slot_bytes = slot_bytes.next_multiple_of(ALIGNMENT);
        let ring = if in_place {
            None
        } else {
            let (memory, guard) = device.allocate(depth * slot_bytes)?;
            Some(DeviceRing::new(&memory, guard, depth))
        };
        let slots = (0..depth)
            .map(|_| {
                Ok(Slot { arrived: device.event()?, updated: device.event()?, home: device.event()?, busy: false })
            })
            .collect::<Result<_>>()?;
        let (in_flight, totals) = (VecDeque::new(), LaneTotals::default());
        Ok(Self { slots, ring, slot_bytes, tables, in_flight, next: 0, chunk_elems, totals })
    }

    pub(super) fn ring_bytes(&self) -> usize {
        self.ring.as_ref().map_or(0, DeviceRing::bytes)
    }

    pub(super) fn table_bytes(&self) -> usize {
        self.tables.bytes()
    }

    /// Whether there is room for another chunk.
    pub(super) fn has_room(&self) -> bool {
        !self.slots[self.next].busy
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// How many elements of a chunk to take at once.
    pub(super) fn chunk_len(&self, chunk: &Chunk) -> usize {
        let state = (chunk.state_bytes() / chunk.len.max(1)).max(1);
        // Cut on lines, so that all planes stay aligned.
        let fits = self.slot_bytes.saturating_sub(4 * ALIGNMENT) / state / ALIGNMENT * ALIGNMENT;
        chunk.len.min(self.chunk_elems).min(fits.max(ALIGNMENT))
    }

    /// Starts the update of chunks (several: tiny parameters, whole) that belong to `job`. The lane has room.
    ///
    /// After a failure, too, the memory stays in flight until all that was given to the streams is over; if nobody can say
    /// when that is, `lost` says so.
    pub(super) fn start(
        &mut self,
        device: &D,
        job: u64,
        chunks: Vec<Chunk>,
        now: f64,
        lost: &mut Option<Error>,
    ) -> Result<()> {
        let slot = self.next;
        let bytes = chunks.iter().map(Chunk::state_bytes).sum::<usize>();
        let elements = chunks.iter().map(|chunk| chunk.len).sum();
        let (joined, staged) = (Vec::new(), Vec::new());
        let mut entry =
            InFlight { slot, job, elements, began: now, chunks, joined, staged, table: None, stages: [None; 2] };
        let started = self.give(device, &mut entry);
        let Slot { arrived, updated, home, busy } = &mut self.slots[slot];
        let over = match started {
            Ok(()) => Ok(()),
            // Some copies to the device may be under way.
            Err(_) => device.record(arrived, Stream::StateIn).and_then(|()| device.order(Stream::Update, arrived)),
        };
        let over = over
            .and_then(|()| device.record(updated, Stream::Update))
            .and_then(|()| device.order(Stream::StateOut, updated))
            .and_then(|()| copy_home(device, &entry, started.is_ok()))
            .and_then(|()| device.record(home, Stream::StateOut));
        if over.is_err()
            && let Err(error) = device.drain(&[Stream::StateIn, Stream::Update, Stream::StateOut])
        {
            lost.get_or_insert(error);
        }
        *busy = true;
        self.next = (slot + 1) % self.slots.len();
        self.totals.begin(self.in_flight.is_empty(), now);
        self.totals.count(elements, bytes, bytes);
        self.in_flight.push_back(entry);
        started.and(over)
    }

    /// Everything up to the update.
    fn give(&mut self, device: &D, entry: &mut InFlight) -> Result<()> {
        let Self { slots, ring, tables, .. } = self;
        let slot = &slots[entry.slot];
        if entry.chunks.len() > 1 {
            entry.table = Some(tables.lend(entry.slot).expect("a free slot's table is free"));
        }
        let updates: Vec<DeviceUpdate<'_>> = match ring {
            None => entry.chunks.iter().map(Chunk::update_in_place).collect(),
            Some(ring) => {
                // Where each plane is at home, before the planes are joined.
                let homes: Vec<[usize; 4]> = entry.chunks.iter().map(home_addresses).collect();
                let planes = entry.chunks.iter_mut().flat_map(|chunk| take_planes(&mut chunk.planes)).collect();
                entry.joined = join_neighbours(planes);
                let mut memory = ring.lend(entry.slot).expect("a free slot's memory is free");
                for joined in &entry.joined {
                    // The same place within a line as at home: what is aligned there is aligned here.
                    let to_line = memory.address().next_multiple_of(ALIGNMENT) - memory.address();
                    drop(memory.split_front(to_line + joined.address() % ALIGNMENT));
                    let staged = memory.split_front(joined.len());
                    device.copy_in(&staged, joined, Stream::StateIn)?;
                    entry.staged.push(staged);
                }
                device.record(&slot.arrived, Stream::StateIn)?;
                device.order(Stream::Update, &slot.arrived)?;
                let (joined, staged) = (&entry.joined, &entry.staged);
                let here = |home: usize| {
                    let index = joined.partition_point(|joined| joined.address() <= home);
                    if home == 0 { 0 } else { staged[index - 1].address() + (home - joined[index - 1].address()) }
                };
                entry
                    .chunks
                    .iter()
                    .zip(homes)
                    .map(|(chunk, [m, v, max, kept])| chunk.update(here(m), here(v), here(max), here(kept)))
                    .collect()
            }
        };
        match (&mut entry.table, &updates[..]) {
            (None, [update]) => device.update(update, Stream::Update),
            (Some(table), updates) => device.update_many(table, updates, Stream::Update),
            (None, _) => Ok(()),
        }
    }

    /// Reports the chunks whose state is home again, oldest first; `watch` for a timeline how far the others are.
    pub(super) fn poll(&mut self, device: &D, now: f64, watch: bool, landed: &mut Vec<Landed>) -> Result<()> {
        if watch {
            self.watch(device, now)?;
        }
        while let Some(entry) = self.in_flight.front() {
            if !device.is_done(&self.slots[entry.slot].home)? {
                break;
            }
            let InFlight { slot, job, elements, began, stages, .. } = *entry;
            let stages = watch.then(|| stages.map(|stage| stage.unwrap_or(now)));
            self.in_flight.pop_front();
            self.slots[slot].busy = false;
            self.totals.end(self.in_flight.is_empty(), now);
            landed.push(Landed { job, elements, began, stages, issued: true, lane: "gpu lane" });
        }
        Ok(())
    }

    fn watch(&mut self, device: &D, now: f64) -> Result<()> {
        if self.ring.is_none() {
            return Ok(());
        }
        for InFlight { slot, stages, .. } in &mut self.in_flight {
            let Slot { arrived, updated, .. } = &self.slots[*slot];
            for (stage, event) in stages.iter_mut().zip([arrived, updated]) {
                if stage.is_none() && device.is_done(event)? {
                    *stage = Some(now);
                }
            }
        }
        Ok(())
    }

    /// The jobs of all chunks in flight, when the device has failed and none will land. Their memory is given up: the
    /// device may still write to it.
    pub(super) fn abandon(&mut self) -> Vec<Landed> {
        let lost = self.in_flight.drain(..).map(|entry| {
            let InFlight { job, elements, began, .. } = entry;
            let landed = Landed { job, elements, began, stages: None, issued: true, lane: "gpu lane" };
            std::mem::forget(entry);
            landed
        });
        lost.collect()
    }
}

/// The copies of staged planes home, if the update was started.
fn copy_home<D: Device>(device: &D, entry: &InFlight, updated: bool) -> Result<()> {
    if !updated {
        return Ok(());
    }
    entry
        .joined
        .iter()
        .zip(&entry.staged)
        .try_for_each(|(joined, staged)| device.copy_out(joined, staged, Stream::StateOut))
}

fn take_planes(planes: &mut Planes<HostSpan>) -> impl Iterator<Item = HostSpan> + use<> {
    let Planes { exp_avg, exp_avg_sq, max_exp_avg_sq, kept } = planes;
    let whole = |plane: &mut HostSpan| plane.split_front(plane.len());
    let maybe = |plane: &mut Option<HostSpan>| plane.as_mut().map(whole);
    [Some(whole(exp_avg)), Some(whole(exp_avg_sq)), maybe(max_exp_avg_sq), maybe(kept)].into_iter().flatten()
}

fn home_addresses(chunk: &Chunk) -> [usize; 4] {
    let Planes { exp_avg, exp_avg_sq, max_exp_avg_sq, kept } = &chunk.planes;
    let at = |plane: &HostSpan| if plane.is_empty() { 0 } else { plane.address() };
    let maybe = |plane: &Option<HostSpan>| plane.as_ref().map_or(0, at);
    [at(exp_avg), at(exp_avg_sq), maybe(max_exp_avg_sq), maybe(kept)]
}
