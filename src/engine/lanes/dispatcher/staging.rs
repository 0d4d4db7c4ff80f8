//! Gradients in host memory that the device cannot address, for updates of resident state: they come back to the device
//! for as long as the update takes. Pinned ones are read where they are.

use crate::device::{Device, DeviceUpdate, Stream};
use crate::engine::lanes::parts::Gradient;
use crate::error::Result;
use std::any::Any;
use std::sync::Arc;

/// What frees memory on the device.
pub(super) type Guard = Box<dyn Any + Send + Sync>;

/// Copies of gradients on the device. Dropped before [`Self::started`], it waits for them.
pub(super) struct Staging<D: Device> {
    device: Arc<D>,
    guards: Vec<Guard>,
}

impl<D: Device> Staging<D> {
    pub(super) fn new(device: &Arc<D>) -> Self {
        Self { device: Arc::clone(device), guards: Vec::new() }
    }

    /// Lets an update use a copy of its gradient, if the gradient is where the device cannot read it. The copy takes device
    /// memory, and may wait: what is pinned is what ought to be offloaded.
    pub(super) fn bring(&mut self, grad: &Gradient, update: &mut DeviceUpdate<'_>) -> Result<()> {
        let Gradient::Host(span) = grad else { return Ok(()) };
        if span.is_pinned() && self.device.can_address_host() {
            return Ok(());
        }
        let (copy, guard) = self.device.allocate(span.len())?;
        self.guards.push(guard);
        self.device.copy_in(&copy, span, Stream::Update)?;
        update.grad = copy.address();
        Ok(())
    }

    /// The updates have been started: what to keep until they are done.
    pub(super) fn started(mut self) -> Vec<Guard> {
        std::mem::take(&mut self.guards)
    }
}

impl<D: Device> Drop for Staging<D> {
    fn drop(&mut self) {
        if !self.guards.is_empty() && self.device.drain(&[Stream::Update]).is_err() {
            // The device has failed, and may still write there.
            std::mem::forget(std::mem::take(&mut self.guards));
        }
    }
}
