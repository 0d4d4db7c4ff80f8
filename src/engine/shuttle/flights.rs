//! What is under way between host and device: which memory it uses, and the event that ends that.

use crate::device::{Device, Stream};
use crate::error::Result;
use crate::memory::{DeviceSpan, HostSpan};
use std::sync::Arc;

/// Work that uses memory of the device until its event is done.
#[derive(Debug)]
struct Flight<E> {
    stream: Stream,
    event: Arc<E>,
    /// Addresses on the device: first, and one past the last.
    ranges: Vec<(usize, usize)>,
    /// What the copies were given, kept until they are done.
    _spans: Vec<(HostSpan, DeviceSpan)>,
}

/// All that is under way, in the order in which it was given.
#[derive(Debug)]
pub(super) struct Flights<D: Device> {
    device: Arc<D>,
    under_way: Vec<Flight<D::Event>>,
}

impl<D: Device> Flights<D> {
    pub(super) fn new(device: Arc<D>) -> Self {
        Self { device, under_way: Vec::new() }
    }

    fn mark(&self, stream: Stream) -> Result<Arc<D::Event>> {
        let event = self.device.event()?;
        self.device.record(&event, stream)?;
        Ok(Arc::new(event))
    }

    /// Lets one stream go on behind what another has been given so far.
    pub(super) fn order_behind(&self, stream: Stream, other: Stream) -> Result<()> {
        self.device.order(stream, &*self.mark(other)?)
    }

    /// Lets a stream go on behind events, each once.
    pub(super) fn order_after(&self, stream: Stream, events: Vec<Arc<D::Event>>) -> Result<()> {
        let mut seen: Vec<*const D::Event> = Vec::new();
        for event in events {
            let address = Arc::as_ptr(&event);
            // Those of one call follow each other.
            if seen.last() != Some(&address) && !seen.contains(&address) {
                self.device.order(stream, &event)?;
                seen.push(address);
            }
        }
        Ok(())
    }

    /// Notes copies that a stream has just been given; returns the event behind them. If that cannot be recorded, the
    /// copies have an end that nobody can see: they are waited for.
    pub(super) fn depart(&mut self, stream: Stream, spans: Vec<(HostSpan, DeviceSpan)>) -> Result<Arc<D::Event>> {
        match self.mark(stream) {
            Ok(event) => {
                let ranges = spans.iter().map(|(_, device)| (device.address(), device.address() + device.len()));
                let flight = Flight { stream, event: Arc::clone(&event), ranges: ranges.collect(), _spans: spans };
                self.under_way.push(flight);
                Ok(event)
            }
            Err(error) => {
                if self.device.drain(&[stream]).is_err() {
                    // Nobody can say when they end: their memory stays.
                    std::mem::forget(spans);
                }
                Err(error)
            }
        }
    }

    /// Notes that ranges of the device's memory are in use until what a stream has been given so far is done.
    pub(super) fn keep_until(&mut self, stream: Stream, ranges: Vec<(usize, usize)>) -> Result<()> {
        let event = self.mark(stream)?;
        self.under_way.push(Flight { stream, event, ranges, _spans: Vec::new() });
        Ok(())
    }

    /// The events of what uses a range of the device's memory. A stream's own earlier work needs none.
    fn users(&self, start: usize, bytes: usize, but: Option<Stream>) -> Vec<Arc<D::Event>> {
        let end = start + bytes;
        let overlaps = |flight: &&Flight<D::Event>| {
            Some(flight.stream) != but && flight.ranges.iter().any(|&(first, last)| first < end && start < last)
        };
        self.under_way.iter().filter(overlaps).map(|flight| Arc::clone(&flight.event)).collect()
    }

    /// Lets a stream go on behind everything that uses a range of the device's memory.
    pub(super) fn order_behind_use(&self, stream: Stream, start: usize, bytes: usize) -> Result<()> {
        self.order_after(stream, self.users(start, bytes, Some(stream)))
    }

    /// Waits on the host for everything that uses a range of the device's memory.
    pub(super) fn wait_for_use(&mut self, start: usize, bytes: usize) -> Result<()> {
        self.users(start, bytes, None).iter().try_for_each(|event| self.device.wait(event))?;
        self.land()
    }

    /// Keeps the memory of what is under way for good, and the events.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.under_way));
    }

    /// Strikes off what is done.
    pub(super) fn land(&mut self) -> Result<()> {
        let mut failure = Ok(());
        let device = &self.device;
        self.under_way.retain(|flight| match device.is_done(&flight.event) {
            Ok(done) => !done,
            Err(error) => {
                failure = Err(error);
                true
            }
        });
        failure
    }
}
