//! State that comes and goes: any optimizer's tensors, as bytes, live in host memory between steps and on a device while
//! they are used there. This module knows where each slot is, and lets copies run on two streams of the device's in
//! the right order: behind the work that they follow and ahead of what waits for them, both directions at once. The caller
//! decides what travels when, and where on the device it goes. Nothing here waits on the host but [`Shuttle::settle`] and
//! what says so.
//!
//! ```text
//! pending -> host <-> on its way in <-> device <-> on its way home -> host
//! ```
//!
//! A value that was made on the device begins there ([`Shuttle::bear`]); one that is not to come home is dropped there
//! ([`Shuttle::discard`]). Any other way is an error, found before anything has changed.

mod flights;
mod slot;
#[cfg(test)]
mod tests;

use crate::device::{Device, Stream};
use crate::error::{Error, Result};
use crate::memory::{DeviceSpan, HostSpan, join_moves};
use flights::Flights;
use slot::Slot;
pub use slot::Whereabouts;
use std::sync::Arc;

/// Bytes of one copy, at most: what follows into the same memory can begin behind each.
pub const PIECE_BYTES: usize = 16 << 20;

/// A slot's memory on both sides, of the slot's length.
#[derive(Debug)]
pub struct Move {
    /// The slot.
    pub slot: usize,
    /// Its bytes in host memory.
    pub host: HostSpan,
    /// Where it is to be on the device, or is.
    pub device: DeviceSpan,
}

/// Copies and bytes so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Copies to the device.
    pub copies_in: u64,
    /// Copies from the device.
    pub copies_out: u64,
    /// Bytes to the device, padding included.
    pub bytes_in: u64,
    /// Bytes from the device, padding included.
    pub bytes_out: u64,
}

/// The slots of one device.
#[derive(Debug)]
pub struct Shuttle<D: Device> {
    device: Arc<D>,
    slots: Vec<Option<Slot<D::Event>>>,
    flights: Flights<D>,
    piece_bytes: usize,
    traffic: Traffic,
    process: u32,
}

impl<D: Device> Shuttle<D> {
    /// A shuttle without slots, whose copies have at most `piece_bytes` bytes.
    pub fn new(device: Arc<D>, piece_bytes: usize) -> Self {
        let flights = Flights::new(Arc::clone(&device));
        let (slots, traffic, process) = (Vec::new(), Traffic::default(), crate::process::id());
        Self { device, slots, flights, piece_bytes: piece_bytes.max(1), traffic, process }
    }

    /// The device.
    pub fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// Refuses use in another process than the one that made it.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn check_process(&self) -> Result<()> {
        let used_in = crate::process::id();
        if used_in == self.process { Ok(()) } else { Err(Error::Forked { made_in: self.process, used_in }) }
    }

    /// Makes a slot, without a value yet. `name` is for messages.
    pub fn add(&mut self, name: &str, bytes: usize) -> usize {
        self.slots.push(Some(Slot::new(name, bytes)));
        self.slots.len() - 1
    }

    fn slot(&self, id: usize) -> Result<&Slot<D::Event>> {
        let found = self.slots.get(id).and_then(Option::as_ref);
        found.ok_or_else(|| Error::InvalidValue(format!("there is no slot {id}: it was freed, or never made")))
    }

    /// Checks that all slots are in one of the places from which `asked` is possible, and each named once.
    fn check(&self, ids: impl Iterator<Item = usize>, from: &[Whereabouts], asked: &'static str) -> Result<()> {
        self.check_process()?;
        let mut seen = std::collections::HashSet::new();
        for id in ids {
            let slot = self.slot(id)?;
            if !seen.insert(id) {
                return Err(Error::InvalidValue(format!("{} is named twice in one call", slot.name)));
            }
            slot.check(from, asked)?;
        }
        Ok(())
    }

    fn set(&mut self, ids: impl Iterator<Item = usize>, mut change: impl FnMut(&mut Slot<D::Event>)) {
        for id in ids {
            if let Some(slot) = self.slots.get_mut(id).and_then(Option::as_mut) {
                change(slot);
            }
        }
    }

    /// Where a slot's value is.
    ///
    /// # Errors
    /// [`Error::InvalidValue`]: there is no such slot.
    pub fn whereabouts(&self, id: usize) -> Result<Whereabouts> {
        self.slot(id).map(|slot| slot.place)
    }

    /// Number of bytes of a slot.
    ///
    /// # Errors
    /// As [`Self::whereabouts`].
    pub fn bytes(&self, id: usize) -> Result<usize> {
        self.slot(id).map(|slot| slot.bytes)
    }

    /// Copies and bytes so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// What is in host memory is these slots' value from now on. Those that were lost are to be settled before that is
    /// written.
    ///
    /// # Errors
    /// [`Error::Misplaced`] unless they have none, or have lost it; nothing has changed then.
    pub fn fill(&mut self, ids: &[usize]) -> Result<()> {
        self.check(ids.iter().copied(), &[Whereabouts::Pending, Whereabouts::Lost], "filled")?;
        self.set(ids.iter().copied(), |slot| slot.place = Whereabouts::Host);
        Ok(())
    }

    /// These slots' first value is on the device.
    ///
    /// # Errors
    /// [`Error::Misplaced`] unless they have none; nothing has changed then.
    pub fn bear(&mut self, ids: &[usize]) -> Result<()> {
        self.check(ids.iter().copied(), &[Whereabouts::Pending], "made on the device")?;
        self.set(ids.iter().copied(), |slot| slot.place = Whereabouts::Device);
        Ok(())
    }

    /// Starts copies to the device, behind everything that still uses the memory there: piece by piece, so that a batch
    /// can follow right behind the one that leaves. Neighbours on both sides travel in one copy if `joined`, with the
    /// padding between them. `after`: also behind what this stream of the caller's has been given so far, for memory that
    /// was just allocated on it.
    ///
    /// # Errors
    /// [`Error::Misplaced`] unless all are on the host or on their way there; [`Error::InvalidValue`] for spans of other
    /// lengths; nothing has changed then. [`Error::Cuda`]: none is brought; what the device has been given before still
    /// reads host memory, so all are as on their way home until they are settled.
    pub fn bring(&mut self, moves: Vec<Move>, joined: bool, after: Option<usize>) -> Result<()> {
        let ids: Vec<usize> = moves.iter().map(|step| step.slot).collect();
        self.check(ids.iter().copied(), &[Whereabouts::Host, Whereabouts::DeviceToHost], "brought to the device")?;
        self.check_lengths(&moves)?;
        let ranges: Vec<(usize, usize)> =
            moves.iter().map(|step| (step.device.address(), step.device.address() + step.device.len())).collect();
        if let Some(stream) = after {
            self.flights.order_behind(Stream::StateIn, Stream::Foreign(stream))?;
        }
        // What is still on its way home is read from there.
        let homecoming = ids.iter().filter_map(|&id| self.slots[id].as_ref().and_then(|slot| slot.home.clone()));
        self.flights.order_after(Stream::StateIn, homecoming.collect())?;
        self.flights.land()?;
        let mut given = Vec::new();
        let outcome = self.copy_in(moves, joined, &mut given);
        // Also of what has been given before a failure.
        let event = self.flights.depart(Stream::StateIn, given);
        if let (Err(_), Ok(event)) = (&outcome, &event) {
            self.set(ids.iter().copied(), |slot| {
                slot.place = Whereabouts::DeviceToHost;
                slot.home = Some(Arc::clone(event));
            });
        }
        outcome?;
        let event = event?;
        for (&id, range) in ids.iter().zip(ranges) {
            if let Some(slot) = self.slots[id].as_mut() {
                slot.place = Whereabouts::HostToDevice;
                slot.arrival = Some(Arc::clone(&event));
                slot.home = None;
                slot.range = range;
            }
        }
        Ok(())
    }

    fn copy_in(&mut self, moves: Vec<Move>, joined: bool, given: &mut Vec<(HostSpan, DeviceSpan)>) -> Result<()> {
        for (mut host, mut device) in runs(moves, joined) {
            while !host.is_empty() {
                let bytes = self.piece_bytes.min(host.len());
                let (from, to) = (host.split_front(bytes), device.split_front(bytes));
                self.flights.order_behind_use(Stream::StateIn, to.address(), bytes)?;
                self.device.copy_in(&to, &from, Stream::StateIn)?;
                self.traffic.copies_in += 1;
                self.traffic.bytes_in += bytes as u64;
                given.push((from, to));
            }
        }
        Ok(())
    }

    fn check_lengths(&self, moves: &[Move]) -> Result<()> {
        for step in moves {
            let slot = self.slot(step.slot)?;
            if (step.host.len(), step.device.len()) != (slot.bytes, slot.bytes) {
                let (host, device) = (step.host.len(), step.device.len());
                let name = &slot.name;
                return Err(Error::InvalidValue(format!(
                    "{name} has {} bytes, not {host} on the host and {device} on the device",
                    slot.bytes
                )));
            }
        }
        Ok(())
    }

    /// Lets a stream of the caller's wait, on the device, for the copies of these slots: from here on they are there.
    ///
    /// # Errors
    /// [`Error::Misplaced`] unless all are on their way; nothing has changed then. [`Error::Cuda`]: they still are.
    pub fn arrive(&mut self, ids: &[usize], stream: usize) -> Result<()> {
        self.check(ids.iter().copied(), &[Whereabouts::HostToDevice], "taken as arrived")?;
        let arrivals = self.arrivals(ids);
        self.flights.order_after(Stream::Foreign(stream), arrivals)?;
        self.set(ids.iter().copied(), |slot| slot.place = Whereabouts::Device);
        Ok(())
    }

    /// Waits on the host for the copies of slots that are on their way to the device: for a device that is host memory, on
    /// which the caller works by itself.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn wait_for_arrival(&self, ids: &[usize]) -> Result<()> {
        self.check_process()?;
        self.arrivals(ids).iter().try_for_each(|event| self.device.wait(event))
    }

    /// The events of the copies of slots that are on their way in, each once.
    fn arrivals(&self, ids: &[usize]) -> Vec<Arc<D::Event>> {
        ids.iter().filter_map(|&id| self.slots.get(id)?.as_ref()?.arrival.clone()).collect()
    }

    /// Starts copies home, behind what `stream` of the caller's has been given so far. `joined` as for [`Self::bring`].
    ///
    /// # Errors
    /// [`Error::Misplaced`] unless all are on the device; [`Error::InvalidValue`] for spans of other lengths; nothing has
    /// changed then. [`Error::Cuda`]: all are on the device still if no copy had begun; else all are lost, since host
    /// memory may hold a part of them: [`Self::fill`] them before the next use, or free them.
    pub fn send(&mut self, moves: Vec<Move>, joined: bool, stream: usize) -> Result<()> {
        let ids: Vec<usize> = moves.iter().map(|step| step.slot).collect();
        self.check(ids.iter().copied(), &[Whereabouts::Device], "sent home")?;
        self.check_lengths(&moves)?;
        self.flights.order_behind(Stream::StateOut, Stream::Foreign(stream))?;
        let mut last = None;
        let mut begun = false;
        for (mut host, mut device) in runs(moves, joined) {
            while !host.is_empty() {
                let bytes = self.piece_bytes.min(host.len());
                let (to, from) = (host.split_front(bytes), device.split_front(bytes));
                let outcome = self.device.copy_out(&to, &from, Stream::StateOut).and_then(|()| {
                    begun = true;
                    self.flights.depart(Stream::StateOut, vec![(to, from)])
                });
                match outcome {
                    Ok(event) => last = Some(event),
                    Err(error) => {
                        if begun {
                            let cause = error.to_string();
                            self.set(ids.iter().copied(), |slot| slot.lose(&cause, last.clone()));
                        }
                        return Err(error);
                    }
                }
                self.traffic.copies_out += 1;
                self.traffic.bytes_out += bytes as u64;
            }
        }
        self.set(ids.iter().copied(), |slot| {
            slot.place = Whereabouts::DeviceToHost;
            slot.arrival = None;
            // Without bytes there is nothing to wait for.
            slot.home.clone_from(&last);
        });
        Ok(())
    }

    /// Gives up what is on the device or on its way there: the host's value is that from before. The memory there is in
    /// use until what `stream` has been given so far is done. The copy in, and the copy home that it may have waited for,
    /// use host memory until they are done: as if on their way home, slots are to be settled before that is touched.
    ///
    /// # Errors
    /// [`Error::Misplaced`]; nothing has changed then. [`Error::Cuda`]: they are where they were.
    pub fn discard(&mut self, ids: &[usize], stream: usize) -> Result<()> {
        self.check(ids.iter().copied(), &[Whereabouts::HostToDevice, Whereabouts::Device], "dropped from the device")?;
        let ranges = ids.iter().filter_map(|&id| self.slots[id].as_ref().map(|slot| slot.range)).collect();
        self.flights.keep_until(Stream::Foreign(stream), ranges)?;
        self.set(ids.iter().copied(), |slot| {
            slot.home = slot.arrival.take();
            slot.place = if slot.home.is_some() { Whereabouts::DeviceToHost } else { Whereabouts::Host };
        });
        Ok(())
    }

    /// Lets a stream of the caller's wait, on the device, for all copies into and out of a range of its memory: before
    /// something else is written there.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn claim(&mut self, address: usize, bytes: usize, stream: usize) -> Result<()> {
        self.check_process()?;
        self.flights.land()?;
        self.flights.order_behind_use(Stream::Foreign(stream), address, bytes)
    }

    /// As [`Self::claim`], waiting on the host.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn wait_for_use(&mut self, address: usize, bytes: usize) -> Result<()> {
        self.check_process()?;
        self.flights.wait_for_use(address, bytes)
    }

    /// Waits on the host until slots that are on their way home are there, and until nothing writes to the memory of those
    /// that were lost; others are not looked at.
    ///
    /// # Errors
    /// [`Error::Cuda`]: nobody can say what is in host memory; they are still on their way.
    pub fn settle(&mut self, ids: &[usize]) -> Result<()> {
        self.check_process()?;
        for &id in ids {
            let Some(slot) = self.slots.get_mut(id).and_then(Option::as_mut) else { continue };
            if slot.place == Whereabouts::DeviceToHost {
                if let Some(event) = &slot.home {
                    self.device.wait(event)?;
                }
                slot.come_home();
            } else if let Some(event) = &slot.home {
                self.device.wait(event)?; // of what was lost
            }
        }
        self.flights.land()
    }

    /// As [`Self::settle`], of all slots.
    ///
    /// # Errors
    /// As [`Self::settle`].
    pub fn settle_all(&mut self) -> Result<()> {
        let ids: Vec<usize> = (0..self.slots.len()).collect();
        self.settle(&ids)
    }

    /// Notes which slots have come home, without waiting.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn poll(&mut self) -> Result<()> {
        self.check_process()?;
        for slot in self.slots.iter_mut().flatten() {
            if slot.place == Whereabouts::DeviceToHost {
                let is_done = slot.home.as_ref().map_or(Ok(true), |event| self.device.is_done(event))?;
                if is_done {
                    slot.come_home();
                }
            }
        }
        self.flights.land()
    }

    /// Takes slots away, once those that are on their way home are there. Their numbers are not used again.
    ///
    /// # Errors
    /// [`Error::Misplaced`] for those that are on the device or on their way there; nothing has changed then.
    /// [`Error::Cuda`]: as [`Self::settle`].
    pub fn free(&mut self, ids: &[usize]) -> Result<()> {
        let from = [Whereabouts::Pending, Whereabouts::Host, Whereabouts::DeviceToHost, Whereabouts::Lost];
        self.check(ids.iter().copied(), &from, "freed")?;
        self.settle(ids)?;
        for &id in ids {
            self.slots[id] = None;
        }
        Ok(())
    }

    /// Waits until every copy is done.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn drain(&mut self) -> Result<()> {
        self.check_process()?;
        self.device.drain(&[Stream::StateIn, Stream::StateOut])?;
        self.flights.land()
    }
}

impl<D: Device> Drop for Shuttle<D> {
    /// Copies end before the memory goes.
    fn drop(&mut self) {
        let is_here = self.check_process().is_ok();
        if is_here && self.device.drain(&[Stream::StateIn, Stream::StateOut]).is_ok() {
            return;
        }
        // Nobody can say when copies end: their memory stays. In a fork threads and locks are the parent's, events too.
        self.flights.leak();
        if !is_here {
            std::mem::forget(std::mem::take(&mut self.slots));
            std::mem::forget(Arc::clone(&self.device));
        }
    }
}

/// The runs to copy: of neighbours on both sides one, if they may be joined.
fn runs(moves: Vec<Move>, joined: bool) -> Vec<(HostSpan, DeviceSpan)> {
    let pairs = moves.into_iter().map(|step| (step.host, step.device)).collect();
    if joined { join_moves(pairs) } else { pairs }
}
