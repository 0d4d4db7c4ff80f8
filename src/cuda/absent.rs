//! Stands in for the CUDA library in a crate that was built without it.

use super::{BUILD, Status, require_device};
use crate::device::{Device, DeviceCopy, DeviceGrad, DeviceUpdate, Stream};
use crate::error::{Error, Result};
use crate::memory::{DeviceSpan, HostSpan};
use std::any::Any;

fn problem() -> String {
    format!(
        "this build of outboard has no CUDA library ({BUILD}): install a wheel that has it, or build where CUDA's \
         compiler is found, with OUTBOARD_CUDA=require to be told if it is not"
    )
}

pub(super) fn status() -> Status {
    Status { compiled: None, devices: 0, driver_version: None, runtime_version: None, problem: Some(problem()) }
}

pub(super) fn has_ranges() -> bool {
    false
}

/// A range that profilers would show.
#[derive(Debug)]
pub struct Range;

impl Range {
    /// Does nothing.
    pub fn begin(_message: &str) -> Self {
        Self
    }
}

/// # Safety
/// None is needed: the addresses are not used. It is unsafe as its counterpart is.
pub(super) unsafe fn adamw(update: &DeviceUpdate<'_>, _stream: usize) -> Result<()> {
    Err(Error::Cuda(format!("cannot update {} on the device: {}", update.parameter, problem())))
}

/// A GPU: there is none without the library.
#[derive(Debug)]
pub enum CudaDevice {}

/// A mark on a stream of a [`CudaDevice`].
#[derive(Debug)]
pub enum CudaEvent {}

impl CudaDevice {
    /// Device number `ordinal` of those that this process sees.
    ///
    /// # Errors
    /// [`Error::Cuda`], always: the library is missing.
    pub fn new(_ordinal: u32) -> Result<Self> {
        require_device()?;
        Err(Error::Cuda(problem()))
    }

    /// The handle of one of its streams.
    pub fn stream_handle(&self, _: Stream) -> usize {
        match *self {}
    }
}

impl Device for CudaDevice {
    type Event = CudaEvent;

    fn enter_thread(&self) -> Result<()> {
        match *self {}
    }

    fn event(&self) -> Result<CudaEvent> {
        match *self {}
    }

    fn record(&self, _: &CudaEvent, _: Stream) -> Result<()> {
        match *self {}
    }

    fn order(&self, _: Stream, _: &CudaEvent) -> Result<()> {
        match *self {}
    }

    fn is_done(&self, _: &CudaEvent) -> Result<bool> {
        match *self {}
    }

    fn wait(&self, _: &CudaEvent) -> Result<()> {
        match *self {}
    }

    fn copy_in(&self, _: &DeviceSpan, _: &HostSpan, _: Stream) -> Result<()> {
        match *self {}
    }

    fn copy_out(&self, _: &HostSpan, _: &DeviceSpan, _: Stream) -> Result<()> {
        match *self {}
    }

    fn update(&self, _: &DeviceUpdate<'_>, _: Stream) -> Result<()> {
        match *self {}
    }

    fn update_many(&self, _: &mut HostSpan, _: &[DeviceUpdate<'_>], _: Stream) -> Result<()> {
        match *self {}
    }

    fn copy_many(&self, _: &mut HostSpan, _: &[DeviceCopy], _: Stream) -> Result<()> {
        match *self {}
    }

    fn squares(&self, _: &mut HostSpan, _: &HostSpan, _: &[DeviceGrad], _: f32, _: Stream) -> Result<()> {
        match *self {}
    }

    fn unscale(&self, _: &DeviceGrad, _: f32, _: Stream) -> Result<()> {
        match *self {}
    }

    fn allocate(&self, _: usize) -> Result<(DeviceSpan, Box<dyn Any + Send + Sync>)> {
        match *self {}
    }

    fn pin(&self, _: usize, _: usize) -> Result<Box<dyn Any + Send + Sync>> {
        match *self {}
    }

    fn can_address_host(&self) -> bool {
        match *self {}
    }

    fn begin_range(&self, _: &str) -> Box<dyn Any + Send> {
        match *self {}
    }
}
