//! The calls that move slots between host and device.

use super::movements::Movements;
use super::slot::{Place, Slot};
use super::{Caller, Shuttle};
use crate::device::{Device, Stream};
use crate::error::{Error, Result};
use crate::memory::{DeviceSpan, plane_bytes};
use std::sync::Arc;

/// Slots that lie side by side on both sides, and travel in the same copies.
struct Run {
    /// Ids, and where each slot's bytes start in the run.
    slots: Vec<(usize, usize)>,
    slab: usize,
    host: usize,
    span: DeviceSpan,
    /// Where in host memory the next plane starts.
    next: usize,
}

/// Names what a failure of the device happened to.
fn about(slot: &Slot, way: &str, error: Error) -> Error {
    match error {
        Error::Cuda(cause) => Error::Cuda(format!("{} {way} the device: {cause}", slot.name)),
        other => other,
    }
}

impl<D: Device> Shuttle<D> {
    /// Brings slots to the device, in this order: host, or on its way there, to on its way in. Neighbours in host memory
    /// whose device addresses are as far apart as their host addresses travel in one copy, with the padding between them.
    /// Each copy is ordered behind what still leaves from where it goes ([`Self::send`], [`Self::discard`]), and all of
    /// them behind what `after` has been given so far: for memory that is still in use there.
    ///
    /// # Errors
    /// [`Error::Transition`]; [`Error::InvalidValue`] for spans of other lengths than the slots' or that overlap;
    /// [`Error::Cuda`] with a slot's name; [`Error::Forked`].
    pub fn bring(&mut self, wanted: Vec<(usize, DeviceSpan)>, after: Option<Caller>) -> Result<()> {
        self.begin()?;
        let places = [Place::Host, Place::DeviceToHost];
        self.require(wanted.iter().map(|(id, _)| *id), &places, "bring", "on the host or on its way home")?;
        self.check_spans(&wanted, "bring")?;
        self.movements.prune(&*self.device)?;
        if let Some(caller) = after {
            caller.lead(&*self.device, Stream::StateIn)?;
        }
        self.travel(wanted, true)
    }

    /// Sends slots home: device to on its way home. The copies are ordered behind what the caller's stream has been given
    /// so far. Copies are joined as in [`Self::bring`].
    ///
    /// # Errors
    /// As [`Self::bring`]. A slot whose copies were given in part is still on the device; as long as it has not been sent
    /// again, [`Self::discard`] of it is an error.
    pub fn send(&mut self, wanted: Vec<(usize, DeviceSpan)>, caller: Caller) -> Result<()> {
        self.begin()?;
        self.require(wanted.iter().map(|(id, _)| *id), &[Place::Device], "send", "on the device")?;
        self.check_spans(&wanted, "send")?;
        self.movements.prune(&*self.device)?;
        caller.lead(&*self.device, Stream::StateOut)?;
        self.travel(wanted, false)
    }

    /// Refuses spans that are not the slots' size, are nowhere, or overlap.
    fn check_spans(&self, wanted: &[(usize, DeviceSpan)], asked: &str) -> Result<()> {
        let mut ranges = Vec::with_capacity(wanted.len());
        for (id, span) in wanted {
            let slot = self.slot(*id)?;
            let (found, needed) = (span.len(), slot.berth.len());
            if found != needed {
                let message = format!("{asked}: {found} bytes on the device for {}, which has {needed}", slot.name);
                return Err(Error::InvalidValue(message));
            }
            if needed == 0 {
                continue;
            }
            let end = span.address().checked_add(needed).filter(|_| span.address() != 0);
            let Some(end) = end else {
                let message = format!("{asked}: {} at device address {:#x}", slot.name, span.address());
                return Err(Error::InvalidValue(message));
            };
            ranges.push((span.address(), end, *id));
        }
        ranges.sort_unstable();
        for pair in ranges.windows(2) {
            if pair[1].0 < pair[0].1 {
                let names = (&self.slot(pair[0].2)?.name, &self.slot(pair[1].2)?.name);
                let message = format!("{asked}: {} and {} overlap on the device", names.0, names.1);
                return Err(Error::InvalidValue(message));
            }
        }
        Ok(())
    }

    /// Gives the copies of slots that have been looked at.
    fn travel(&mut self, wanted: Vec<(usize, DeviceSpan)>, inward: bool) -> Result<()> {
        let mut runs: Vec<Run> = Vec::new();
        for (id, span) in wanted {
            let slot = self.slot_mut(id);
            let (host, bytes) = (slot.host().start, slot.berth.len());
            let Some(slab) = slot.slab else {
                self.advance(id, inward, 0, 0..0);
                continue;
            };
            let next = host + plane_bytes::<u8>(bytes)?;
            match runs.last_mut() {
                Some(run)
                    if run.slab == slab
                        && run.next == host
                        && span.address().checked_sub(run.span.address()) == Some(host - run.host) =>
                {
                    run.slots.push((id, host - run.host));
                    run.span.append(&span);
                    run.next = next;
                }
                _ => runs.push(Run { slots: vec![(id, 0)], slab, host, span, next }),
            }
        }
        runs.into_iter().try_for_each(|run| self.give(run, inward))
    }

    /// Gives the copies of one run. Slots move on as soon as their last byte is on its way.
    fn give(&mut self, mut run: Run, inward: bool) -> Result<()> {
        let first = run.slots[0].0;
        let (start, mut at, mut done) = (run.span.address(), 0, 0);
        while !run.span.is_empty() {
            let piece = run.span.split_front(self.options.piece_bytes.min(run.span.len()));
            let (host, device) = (run.host + at..run.host + at + piece.len(), start + at..start + at + piece.len());
            let given = self.copy(first, at, &piece, host, device, inward);
            let number = match given {
                Ok(number) => number,
                Err(error) => {
                    let slot = self.slot(run.slots[done].0)?;
                    return Err(about(slot, if inward { "on its way to" } else { "on its way from" }, error));
                }
            };
            at += piece.len();
            for &(id, offset) in &run.slots[done..] {
                let bytes = self.slot_mut(id).berth.len();
                if offset < at {
                    // What touches its host memory last, whether or not all of it gets there.
                    let slot = self.slot_mut(id);
                    *(if inward { &mut slot.arrival } else { &mut slot.departure }) = number;
                }
                if offset + bytes > at {
                    // Whole again once its last byte is on its way home.
                    self.slot_mut(id).is_torn |= !inward && offset < at;
                    break;
                }
                done += 1;
                self.advance(id, inward, number, start + offset..start + offset + bytes);
            }
        }
        Ok(())
    }

    /// Gives one copy, ordered and marked; its number.
    fn copy(
        &mut self,
        first: usize,
        at: usize,
        piece: &DeviceSpan,
        host: std::ops::Range<usize>,
        device: std::ops::Range<usize>,
        inward: bool,
    ) -> Result<u64> {
        let Self { slots, movements, device: on, broken, stats, .. } = self;
        let Some(slot) = &slots[first] else { unreachable!("slot {first} has been looked at") };
        let event = Arc::new(on.event()?);
        let memory = slot.berth.span(at, piece.len());
        let stream = if inward {
            movements.clear_in(&**on, &host, &device)?;
            on.copy_in(piece, &memory, Stream::StateIn)?;
            (stats.copies_in, stats.bytes_in) = (stats.copies_in + 1, stats.bytes_in + piece.len() as u64);
            Stream::StateIn
        } else {
            movements.clear_out(&**on, &host, &device)?;
            on.copy_out(&memory, piece, Stream::StateOut)?;
            (stats.copies_out, stats.bytes_out) = (stats.copies_out + 1, stats.bytes_out + piece.len() as u64);
            Stream::StateOut
        };
        // A copy without a mark would be one that nobody can wait for.
        if let Err(error) = on.record(&event, stream).or_else(|_| on.record(&event, stream)) {
            *broken = Some(format!("this state's copies are lost track of since a mark on {stream:?} failed: {error}"));
            return Err(error);
        }
        Ok(movements.push(inward, host, device, event))
    }

    /// A slot's bytes are all on their way.
    fn advance(&mut self, id: usize, inward: bool, number: u64, device: std::ops::Range<usize>) {
        let slot = self.slot_mut(id);
        if inward {
            let was_leaving = slot.place == Place::DeviceToHost;
            (slot.place, slot.arrival, slot.device) = (Place::HostToDevice, number, device);
            if was_leaving {
                self.leaving.retain(|&leaving| leaving != id);
            }
        } else {
            (slot.place, slot.departure, slot.device) = (Place::DeviceToHost, number, 0..0);
            (slot.has_value, slot.is_torn) = (true, false);
            self.leaving.push(id);
        }
    }

    /// Lets the caller's stream wait for slots that are on their way in: they are on the device, for what it is given from
    /// now on.
    ///
    /// # Errors
    /// [`Error::Transition`], [`Error::InvalidValue`], [`Error::Cuda`], [`Error::Forked`]; nothing has changed.
    pub fn arrive(&mut self, ids: &[usize], caller: Caller) -> Result<()> {
        self.begin()?;
        self.require(ids.iter().copied(), &[Place::HostToDevice], "arrive", "on its way to the device")?;
        let mut last = 0;
        for &id in ids {
            last = last.max(self.slot(id)?.arrival);
        }
        // Copies in are done in the order of their numbers: the last stands for all.
        if let Some(event) = self.movements.arrival(last) {
            caller.follow(&*self.device, event)?;
        }
        for &id in ids {
            self.slot_mut(id).place = Place::Device;
        }
        Ok(())
    }

    /// Takes slots off the device without copying them home: what they were before they were brought is their value, on
    /// the host, and those that have never been there are pending again. Their device memory stays in use until what the
    /// caller's stream has been given so far is done: what is brought there comes behind that.
    ///
    /// # Errors
    /// [`Error::Transition`] unless all are on the device or on their way to it, and for those that a copy home has left
    /// half written; [`Error::InvalidValue`], [`Error::Cuda`], [`Error::Forked`]. Nothing has changed then.
    pub fn discard(&mut self, ids: &[usize], caller: Caller) -> Result<()> {
        self.begin()?;
        let places = [Place::HostToDevice, Place::Device];
        self.require(ids.iter().copied(), &places, "discard", "on the device or on its way to it")?;
        for &id in ids {
            let slot = self.slot(id)?;
            if slot.is_torn {
                let (name, place) = (slot.name.clone(), "on the device, its host memory half written".into());
                return Err(Error::Transition { name, place, asked: "discard", wanted: "sent home in full" });
            }
        }
        let event = match caller {
            Caller::Stream(handle) if !ids.is_empty() => {
                let event = Arc::new(self.device.event()?);
                self.device.record(&event, Stream::Foreign(handle))?;
                Some(event)
            }
            _ => None,
        };
        for &id in ids {
            let slot = self.slot_mut(id);
            slot.place = if slot.has_value { Place::Host } else { Place::Pending };
            let device = std::mem::take(&mut slot.device);
            if let Some(event) = &event {
                self.movements.leave(device, Arc::clone(event));
            }
        }
        Ok(())
    }

    /// Takes everything off the device that is there or on its way there, as [`Self::discard`] does: after a failure,
    /// whatever was on its way. What a copy home has left half written stays where it is.
    ///
    /// # Errors
    /// As [`Self::discard`].
    pub fn recall(&mut self, caller: Caller) -> Result<()> {
        let is_away = |slot: &Slot| matches!(slot.place, Place::HostToDevice | Place::Device) && !slot.is_torn;
        let slots = self.slots.iter().enumerate();
        let away: Vec<_> = slots.filter(|(_, slot)| slot.as_ref().is_some_and(is_away)).map(|(id, _)| id).collect();
        self.discard(&away, caller)
    }

    /// Lets the caller's stream wait for what still uses this memory of the device: before the caller writes there itself.
    ///
    /// # Errors
    /// [`Error::Cuda`], [`Error::Forked`].
    pub fn claim(&mut self, address: usize, bytes: usize, caller: Caller) -> Result<()> {
        self.begin()?;
        let users = self.movements.users(&(address..address.saturating_add(bytes)));
        users.iter().try_for_each(|event| caller.follow(&*self.device, event))
    }

    /// Waits on the host until no copy touches these slots' host memory. Those on their way home are on the host then;
    /// the others stay where they are.
    ///
    /// # Errors
    /// [`Error::InvalidValue`], [`Error::Cuda`], [`Error::Forked`].
    pub fn settle(&mut self, ids: &[usize]) -> Result<()> {
        self.begin()?;
        let (mut arrival, mut departure) = (0, 0);
        for &id in ids {
            let slot = self.slot(id)?;
            (arrival, departure) = (arrival.max(slot.arrival), departure.max(slot.departure));
        }
        for event in [self.movements.arrival(arrival), self.movements.departure(departure)].into_iter().flatten() {
            self.device.wait(event)?;
        }
        for &id in ids {
            let slot = self.slot_mut(id);
            if slot.place == Place::DeviceToHost {
                slot.place = Place::Host;
            }
        }
        self.movements.prune(&*self.device)?;
        let Self { leaving, slots, .. } = self;
        leaving.retain(|&id| slots[id].as_ref().is_some_and(|slot| slot.place == Place::DeviceToHost));
        Ok(())
    }

    /// As [`Self::settle`], of all slots on their way home.
    ///
    /// # Errors
    /// As [`Self::settle`].
    pub fn settle_all(&mut self) -> Result<()> {
        let leaving = self.leaving.clone();
        self.settle(&leaving)
    }

    /// Those slots on their way home that have come there are on the host. Does not wait.
    ///
    /// # Errors
    /// [`Error::Cuda`], [`Error::Forked`].
    pub fn poll(&mut self) -> Result<()> {
        self.begin()?;
        self.movements.prune(&*self.device)?;
        let Self { leaving, slots, movements, .. } = self;
        leaving.retain(|&id| {
            let Some(slot) = &mut slots[id] else { return false };
            let is_home = Movements::departure(movements, slot.departure).is_none();
            if is_home {
                slot.place = Place::Host;
            }
            !is_home
        });
        Ok(())
    }
}
