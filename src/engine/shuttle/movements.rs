//! What is under way between host and device: each copy with the bytes that it touches on either side and the event that
//! says when it is done. Numbers order the copies of one direction, whose stream does them in that order.

use crate::device::{Device, Stream};
use crate::error::Result;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// One copy.
#[derive(Debug)]
pub(super) struct Movement<E> {
    number: u64,
    host: Range<usize>,
    device: Range<usize>,
    event: Arc<E>,
}

/// Device memory that a caller's stream may still be using, though no slot is there any more.
#[derive(Debug)]
struct Left<E> {
    device: Range<usize>,
    event: Arc<E>,
    /// Whether what comes in is ordered behind it already.
    is_followed: bool,
}

#[derive(Debug)]
pub(super) struct Movements<D: Device> {
    last: u64,
    ins: VecDeque<Movement<D::Event>>,
    outs: VecDeque<Movement<D::Event>>,
    left: Vec<Left<D::Event>>,
    /// The last copy out that the stream of copies in is ordered behind, and the other way round.
    in_follows: u64,
    out_follows: u64,
}

impl<D: Device> Default for Movements<D> {
    fn default() -> Self {
        let (ins, outs, left) = (VecDeque::new(), VecDeque::new(), Vec::new());
        Self { last: 0, ins, outs, left, in_follows: 0, out_follows: 0 }
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The last of those that match.
fn last<E>(movements: &VecDeque<Movement<E>>, matches: impl Fn(&Movement<E>) -> bool) -> Option<&Movement<E>> {
    movements.iter().rev().find(|movement| matches(movement))
}

fn forget_done<D: Device>(device: &D, movements: &mut VecDeque<Movement<D::Event>>) -> Result<()> {
    while let Some(first) = movements.front() {
        if !device.is_done(&first.event)? {
            break;
        }
        movements.pop_front();
    }
    Ok(())
}

impl<D: Device> Movements<D> {
    /// Number of copies and of left memory that are not known to be done.
    pub(super) fn len(&self) -> usize {
        self.ins.len() + self.outs.len() + self.left.len()
    }

    /// Forgets what is done.
    pub(super) fn prune(&mut self, device: &D) -> Result<()> {
        forget_done(device, &mut self.ins)?;
        forget_done(device, &mut self.outs)?;
        let mut kept = Vec::new();
        let mut failure = None;
        for left in self.left.drain(..) {
            match device.is_done(&left.event) {
                Ok(true) => {}
                Ok(false) => kept.push(left),
                Err(error) => {
                    failure = Some(error);
                    kept.push(left);
                }
            }
        }
        self.left = kept;
        failure.map_or(Ok(()), Err)
    }

    /// Lets the next copy in, to and from these bytes, come behind the copies out that touch them and behind whoever has
    /// left there.
    pub(super) fn clear_in(&mut self, device: &D, host: &Range<usize>, to: &Range<usize>) -> Result<()> {
        let touches = |out: &Movement<D::Event>| overlap(&out.device, to) || overlap(&out.host, host);
        if let Some(out) = last(&self.outs, touches).filter(|out| out.number > self.in_follows) {
            device.order(Stream::StateIn, &out.event)?;
            self.in_follows = out.number;
        }
        let waits = |left: &Left<D::Event>| !left.is_followed && overlap(&left.device, to);
        while let Some(event) = self.left.iter().find(|left| waits(left)).map(|left| Arc::clone(&left.event)) {
            device.order(Stream::StateIn, &event)?;
            // One event stands for all that left at once.
            self.left
                .iter_mut()
                .filter(|left| Arc::ptr_eq(&left.event, &event))
                .for_each(|left| left.is_followed = true);
        }
        Ok(())
    }

    /// Lets the next copy out, to and from these bytes, come behind the copies in that touch them.
    pub(super) fn clear_out(&mut self, device: &D, host: &Range<usize>, from: &Range<usize>) -> Result<()> {
        let touches = |a: &Movement<D::Event>| overlap(&a.device, from) || overlap(&a.host, host);
        if let Some(arrival) = last(&self.ins, touches).filter(|arrival| arrival.number > self.out_follows) {
            device.order(Stream::StateOut, &arrival.event)?;
            self.out_follows = arrival.number;
        }
        Ok(())
    }

    /// Notes a copy that has been given, in or out; its number.
    pub(super) fn push(&mut self, inward: bool, host: Range<usize>, device: Range<usize>, event: Arc<D::Event>) -> u64 {
        self.last += 1;
        let list = if inward { &mut self.ins } else { &mut self.outs };
        list.push_back(Movement { number: self.last, host, device, event });
        self.last
    }

    /// Notes memory that is in use until `event`.
    pub(super) fn leave(&mut self, device: Range<usize>, event: Arc<D::Event>) {
        if !device.is_empty() {
            self.left.push(Left { device, event, is_followed: false });
        }
    }

    /// The event of a copy in; `None` once it is known to be done.
    pub(super) fn arrival(&self, number: u64) -> Option<&Arc<D::Event>> {
        last(&self.ins, |arrival| arrival.number == number).map(|arrival| &arrival.event)
    }

    /// The event of a copy out; `None` once it is known to be done.
    pub(super) fn departure(&self, number: u64) -> Option<&Arc<D::Event>> {
        last(&self.outs, |out| out.number == number).map(|out| &out.event)
    }

    /// The events behind which this memory of the device is in no other use.
    pub(super) fn users(&self, range: &Range<usize>) -> Vec<Arc<D::Event>> {
        let touches = |movement: &Movement<D::Event>| overlap(&movement.device, range);
        let copies = [last(&self.ins, touches), last(&self.outs, touches)];
        let left = self.left.iter().filter(|left| overlap(&left.device, range)).map(|left| &left.event);
        let mut events: Vec<_> = copies.into_iter().flatten().map(|copy| &copy.event).chain(left).cloned().collect();
        events.dedup_by(|a, b| Arc::ptr_eq(a, b));
        events
    }
}
