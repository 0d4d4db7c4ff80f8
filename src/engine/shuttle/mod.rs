//! State of any optimizer, as bytes: it lives in host memory, is brought to the device in batches, is used there by
//! somebody else's kernels on the caller's stream, and returns. This module owns the host memory, where each slot's value
//! is, and the order between the copies and the caller's work; it knows neither parameters nor dtypes, and the caller says
//! what a batch is and where on the device it goes.
//!
//! A slot's way: pending, [`Shuttle::fill`] to the host or [`Shuttle::bear`] on the device; then round and round
//! [`Shuttle::bring`] (on its way in), [`Shuttle::arrive`] (on the device), [`Shuttle::send`] (on its way home),
//! [`Shuttle::settle`] or [`Shuttle::poll`] (on the host). [`Shuttle::discard`] takes a slot off the device without a copy
//! home. A call on several slots checks all of them first: if one is elsewhere, that is [`Error::Transition`] and nothing
//! has changed. What the caller's work on the device touches stays ordered as long as it goes through these calls;
//! nothing waits on the host but where it says so.
//!
//! When a call to the device fails, slots whose bytes had all been given to a stream by then have moved on, and all others
//! of the call are where they were, values included: a copy does not change where it comes from. Copies that were given
//! for those remain known, so the next call is ordered behind them. If even the end of a copy that was given cannot be
//! marked, or the device is broken for good, every later call is an error but [`Shuttle::stats`] and dropping.

mod movements;
mod slot;
#[cfg(test)]
mod tests;
mod travel;

pub use super::caller::Caller;
pub use slot::Place;

use crate::device::{Device, Stream};
use crate::error::{Error, Result};
use crate::memory::{Arena, Berth, Slab, SlabHandle, locked_memory_limit, plane_bytes};
use crate::pool::WorkerPool;
use movements::Movements;
use rustc_hash::FxHashSet;
use slot::Slot;
use std::sync::Arc;

/// What to do with memory that cannot be pinned, and the size of copies.
#[derive(Clone, Debug)]
pub struct ShuttleOptions {
    /// Whether to pin host memory: `None` does and falls back to pageable memory with a warning, `Some(true)` makes that
    /// an error.
    pub pin: Option<bool>,
    /// The most bytes in one copy. What comes in follows what leaves copy by copy.
    pub piece_bytes: usize,
}

impl Default for ShuttleOptions {
    fn default() -> Self {
        Self { pin: None, piece_bytes: 16 << 20 }
    }
}

/// Counts and sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShuttleStats {
    /// Bytes of host memory mapped and in use by a slot or a tensor over one.
    pub host_bytes: usize,
    /// Bytes of those that are pinned.
    pub pinned_bytes: usize,
    /// Copies to the device given so far, and their bytes.
    pub copies_in: u64,
    /// See [`Self::copies_in`].
    pub bytes_in: u64,
    /// Copies from the device given so far, and their bytes.
    pub copies_out: u64,
    /// See [`Self::copies_out`].
    pub bytes_out: u64,
    /// Copies and left memory not known to be done.
    pub under_way: usize,
    /// Live slots by place, in the order of [`Place::ALL`].
    pub places: [usize; 5],
}

/// A slab with live slots, up to the end of its last plane.
#[derive(Debug)]
struct Buffer {
    start: usize,
    bytes: usize,
    handle: SlabHandle,
    is_pinned: bool,
    live: usize,
}

/// What is left of a slab for slots that were announced.
#[derive(Debug)]
struct Room {
    slab: Slab,
    /// Its buffer.
    index: usize,
    bytes: usize,
}

/// A slab, for tensors over it.
#[derive(Debug)]
pub struct BufferView {
    /// Where it starts.
    pub start: usize,
    /// Bytes from the first plane's first to the end of the last plane, padding included.
    pub bytes: usize,
    /// Keeps it mapped.
    pub handle: SlabHandle,
    /// Whether it is pinned.
    pub is_pinned: bool,
}

/// State that travels between host memory and one device.
#[derive(Debug)]
pub struct Shuttle<D: Device> {
    slots: Vec<Option<Slot>>,
    buffers: Vec<Option<Buffer>>,
    room: Option<Room>,
    /// Slots on their way home.
    leaving: Vec<usize>,
    movements: Movements<D>,
    arena: Arena,
    stats: ShuttleStats,
    broken: Option<String>,
    options: ShuttleOptions,
    pool: Arc<WorkerPool>,
    device: Arc<D>,
    process: u32,
}

impl<D: Device> Shuttle<D> {
    /// A shuttle without slots.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for pieces of 0 bytes.
    pub fn new(device: Arc<D>, pool: Arc<WorkerPool>, options: ShuttleOptions) -> Result<Self> {
        if options.piece_bytes == 0 {
            return Err(Error::InvalidValue("piece_bytes must be at least 1, not 0".into()));
        }
        Ok(Self {
            slots: Vec::new(),
            buffers: Vec::new(),
            room: None,
            leaving: Vec::new(),
            movements: Movements::default(),
            arena: Arena::default(),
            stats: ShuttleStats::default(),
            broken: None,
            options,
            pool,
            device,
            process: crate::process::id(),
        })
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Refuses other processes, and to go on where nobody knows what is under way.
    fn begin(&self) -> Result<()> {
        let used_in = crate::process::id();
        if used_in != self.process {
            return Err(Error::Forked { made_in: self.process, used_in });
        }
        self.broken.as_ref().map_or(Ok(()), |cause| Err(Error::Cuda(cause.clone())))
    }

    fn slot(&self, id: usize) -> Result<&Slot> {
        let slot = self.slots.get(id).and_then(Option::as_ref);
        slot.ok_or_else(|| Error::InvalidValue(format!("there is no slot {id}: it was freed, or never reserved")))
    }

    /// Refuses a slot that is named twice, is not there, or is elsewhere than in `places`.
    fn require(
        &self,
        ids: impl Iterator<Item = usize>,
        places: &[Place],
        asked: &'static str,
        wanted: &'static str,
    ) -> Result<()> {
        let mut seen = FxHashSet::default();
        for id in ids {
            let slot = self.slot(id)?;
            if !seen.insert(id) {
                return Err(Error::InvalidValue(format!("{asked}: {} is named twice", slot.name)));
            }
            slot.require(places, asked, wanted)?;
        }
        Ok(())
    }

    fn slot_mut(&mut self, id: usize) -> &mut Slot {
        match &mut self.slots[id] {
            Some(slot) => slot,
            None => unreachable!("slot {id} has been looked at"),
        }
    }

    /// Finds memory for slots, by name and bytes, side by side in this order, each aligned as planes are: in what an
    /// earlier call has mapped for those that were to come, or else in a slab of their own, with as many bytes more as
    /// slots of the sizes in `coming` will take. They are pending. Returns their ids, and a warning if the memory could
    /// not be pinned.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Forked`]; with `pin: Some(true)` [`Error::Cuda`] if it cannot be pinned. There
    /// are no new slots then.
    pub fn reserve(&mut self, wanted: &[(String, usize)], coming: &[usize]) -> Result<(Vec<usize>, Option<String>)> {
        self.begin()?;
        let mut total: usize = 0;
        for (name, bytes) in wanted {
            total = add_plane(total, *bytes)
                .ok_or_else(|| Error::InvalidValue(format!("{name}: {bytes} bytes exceed the address space")))?;
        }
        // Of no bytes, there is nothing that the others could lie beside.
        let coming = if total > 0 { coming } else { &[] };
        let (mut room, warning) = if let Some(room) = self.room.take_if(|room| room.bytes >= total) {
            (room, None)
        } else {
            let mapped = coming.iter().try_fold(total, |sum, bytes| add_plane(sum, *bytes));
            let mapped =
                mapped.ok_or_else(|| Error::InvalidValue("the slots to come exceed the address space".into()))?;
            let slab = self.arena.slab(mapped, &self.pool)?;
            let warning = self.pin(&slab)?;
            (Room { slab, index: self.buffers.len(), bytes: mapped }, warning)
        };
        let first = self.slots.len();
        for (name, bytes) in wanted {
            let plane = room.slab.carve::<u8>(*bytes);
            let is_pinned = plane.is_pinned();
            let berth = Berth::new(plane);
            if *bytes > 0 {
                if room.index == self.buffers.len() {
                    let (start, handle) = berth.share();
                    self.buffers.push(Some(Buffer { start, bytes: 0, handle, is_pinned, live: 0 }));
                }
                if let Some(buffer) = &mut self.buffers[room.index] {
                    buffer.live += 1;
                }
            }
            self.slots.push(Some(Slot {
                name: name.clone(),
                berth,
                slab: (*bytes > 0).then_some(room.index),
                place: Place::Pending,
                has_value: false,
                is_torn: false,
                device: 0..0,
                arrival: 0,
                departure: 0,
            }));
        }
        if let Some(Some(buffer)) = self.buffers.get_mut(room.index) {
            buffer.bytes += total;
        }
        room.bytes -= total;
        if self.room.as_ref().map_or(0, |other| other.bytes) < room.bytes {
            self.room = Some(room);
        }
        Ok(((first..self.slots.len()).collect(), warning))
    }

    fn pin(&self, slab: &Slab) -> Result<Option<String>> {
        if self.options.pin == Some(false) || slab.bytes() == 0 {
            return Ok(None);
        }
        let Err(error) = slab.pin(|start, bytes| self.device.pin(start, bytes)) else { return Ok(None) };
        let bytes = slab.bytes();
        let limit = locked_memory_limit().map_or("unlimited".to_owned(), |limit| format!("{limit} bytes"));
        let what = format!("cannot pin {bytes} bytes of optimizer state ({error}; locked memory: {limit})");
        let cure = "raise the limit of locked memory";
        if self.options.pin == Some(true) {
            return Err(Error::Cuda(format!("pin=True: {what}: {cure}, or leave such state pageable with pin=None")));
        }
        let cost = "this state stays pageable: its copies are slower, and do not run beside the GPU's work";
        Ok(Some(format!("{what}: {cost}; {cure}")))
    }

    /// What the slots' host memory holds, zeros or what was written through [`Self::share`], is their value: pending to
    /// host.
    ///
    /// # Errors
    /// [`Error::Transition`], [`Error::InvalidValue`], [`Error::Forked`].
    pub fn fill(&mut self, ids: &[usize]) -> Result<()> {
        self.begin()?;
        self.require(ids.iter().copied(), &[Place::Pending], "fill", "pending")?;
        for &id in ids {
            let slot = self.slot_mut(id);
            (slot.place, slot.has_value) = (Place::Host, true);
        }
        Ok(())
    }

    /// The slots' value was made on the device: pending to device. With addresses, [`Self::discard`] knows which memory
    /// it leaves.
    ///
    /// # Errors
    /// As [`Self::fill`].
    pub fn bear(&mut self, ids: &[usize], addresses: Option<&[usize]>) -> Result<()> {
        self.begin()?;
        self.require(ids.iter().copied(), &[Place::Pending], "bear", "pending")?;
        if let Some(addresses) = addresses.filter(|addresses| addresses.len() != ids.len()) {
            return Err(Error::InvalidValue(format!("bear: {} addresses for {} slots", addresses.len(), ids.len())));
        }
        for (i, &id) in ids.iter().enumerate() {
            let slot = self.slot_mut(id);
            slot.place = Place::Device;
            slot.device = addresses.map_or(0..0, |addresses| addresses[i]..addresses[i] + slot.berth.len());
        }
        Ok(())
    }

    /// Lets the slots go, and their slab with its last one; waits on the host for copies that still touch them. Their ids
    /// are not used again. Tensors over them keep the memory mapped.
    ///
    /// # Errors
    /// [`Error::Transition`] unless all are pending, on the host or on their way to it; as [`Self::settle`].
    pub fn free(&mut self, ids: &[usize]) -> Result<()> {
        self.begin()?;
        let places = [Place::Pending, Place::Host, Place::DeviceToHost];
        self.require(ids.iter().copied(), &places, "free", "pending, on the host or on its way home")?;
        self.settle(ids)?;
        for &id in ids {
            let Some(index) = self.slots[id].take().and_then(|slot| slot.slab) else { continue };
            if let Some(buffer) = &mut self.buffers[index] {
                buffer.live -= 1;
                if buffer.live == 0 {
                    self.buffers[index] = None;
                    self.room.take_if(|room| room.index == index);
                }
            }
        }
        Ok(())
    }

    /// Where the slot's value is.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if there is no such slot, as for the other questions.
    pub fn place(&self, id: usize) -> Result<Place> {
        self.slot(id).map(|slot| slot.place)
    }

    /// Its bytes.
    ///
    /// # Errors
    /// As [`Self::place`].
    pub fn bytes(&self, id: usize) -> Result<usize> {
        self.slot(id).map(|slot| slot.berth.len())
    }

    /// Its name.
    ///
    /// # Errors
    /// As [`Self::place`].
    pub fn name(&self, id: usize) -> Result<&str> {
        self.slot(id).map(|slot| &*slot.name)
    }

    /// Its host memory's address, and a handle that keeps it mapped. Whoever reads it does so while the slot is on the
    /// host, and whoever writes it then settles the slot first.
    ///
    /// # Errors
    /// As [`Self::place`].
    pub fn share(&self, id: usize) -> Result<(usize, SlabHandle)> {
        self.slot(id).map(|slot| slot.berth.share())
    }

    /// The slabs that have live slots.
    pub fn buffers(&self) -> Vec<BufferView> {
        let view = |buffer: &Buffer| BufferView {
            start: buffer.start,
            bytes: buffer.bytes,
            handle: buffer.handle.clone(),
            is_pinned: buffer.is_pinned,
        };
        self.buffers.iter().flatten().map(view).collect()
    }

    /// Counts and sizes, as of now.
    pub fn stats(&self) -> ShuttleStats {
        let mut stats = self.stats.clone();
        (stats.host_bytes, stats.pinned_bytes) = (self.arena.bytes(), self.arena.pinned_bytes());
        stats.under_way = self.movements.len();
        for slot in self.slots.iter().flatten() {
            stats.places[slot.place as usize] += 1;
        }
        stats
    }
}

/// A sum of bytes, and those of one more slot.
fn add_plane(sum: usize, bytes: usize) -> Option<usize> {
    plane_bytes::<u8>(bytes).ok().and_then(|padded| sum.checked_add(padded))
}

impl<D: Device> Drop for Shuttle<D> {
    /// Waits until no copy touches the host memory, then lets it go. It stays mapped, for good, in a fork, where it is the
    /// parent's, and where nobody can say when that is.
    fn drop(&mut self) {
        if crate::process::id() != self.process {
            std::mem::forget((std::mem::take(&mut self.slots), std::mem::take(&mut self.buffers)));
            std::mem::forget((std::mem::take(&mut self.movements), Arc::clone(&self.device), Arc::clone(&self.pool)));
            return;
        }
        // Once more, where the first failure was a passing one.
        let is_drained = (0..2).any(|_| self.device.drain(&[Stream::StateIn, Stream::StateOut]).is_ok());
        if !is_drained && (self.movements.len() > 0 || self.broken.is_some()) {
            std::mem::forget((std::mem::take(&mut self.slots), std::mem::take(&mut self.buffers)));
        }
    }
}
