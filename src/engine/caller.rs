//! Whoever gives the engine work, and waits for it.

use crate::device::{Device, Stream};
use crate::error::Result;

/// In whose order the caller works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// A stream, by its handle: it is ordered, and nothing waits on the host.
    Stream(usize),
    /// The calling thread itself, on a device whose memory is the host's: calls wait.
    Host,
}

impl Caller {
    /// Lets the caller follow an event.
    pub(super) fn follow<D: Device>(self, device: &D, event: &D::Event) -> Result<()> {
        match self {
            Self::Stream(handle) => device.order(Stream::Foreign(handle), event),
            Self::Host => device.wait(event),
        }
    }

    /// Lets what is given to `stream` from now on follow what the caller has been given so far.
    pub(super) fn lead<D: Device>(self, device: &D, stream: Stream) -> Result<()> {
        match self {
            Self::Stream(handle) => {
                let event = device.event()?;
                device.record(&event, Stream::Foreign(handle))?;
                device.order(stream, &event)
            }
            // What it has done is done.
            Self::Host => Ok(()),
        }
    }
}
