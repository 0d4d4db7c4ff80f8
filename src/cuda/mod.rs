//! The CUDA library in `cuda/`: what it can do on this machine, and a GPU as a [`crate::device::Device`], behind
//! functions that return [`Error::Cuda`]. This layer knows device pointers and streams as numbers, and the recipe's
//! constants; it knows no parameters, queues or tensors.
//!
//! A crate built without the library (no compiler found, or the feature `cuda` off) has the same functions; they say so
//! in the error, with the cure. Nothing here is called when the crate is loaded, and a machine without a driver is an
//! answer, not a crash: the library holds the static CUDA runtime, which opens the driver at its first call.

#[cfg(not(outboard_cuda))]
mod absent;
#[cfg(outboard_cuda)]
mod device;
#[cfg(outboard_cuda)]
mod linked;
#[cfg(outboard_cuda)]
mod sys;
#[cfg(test)]
mod tests;

#[cfg(not(outboard_cuda))]
use absent as implementation;
#[cfg(outboard_cuda)]
use linked as implementation;

#[cfg(not(outboard_cuda))]
pub use absent::{CudaDevice, CudaEvent, Range};
#[cfg(outboard_cuda)]
pub use device::{CudaDevice, CudaEvent};
#[cfg(outboard_cuda)]
pub use linked::Range;

use crate::device::DeviceUpdate;
use crate::error::{Error, Result};
use crate::kernel::Constants;
use std::mem::offset_of;

/// What build.rs says of the library: what compiled it and for which devices, or why it is not there.
const BUILD: &str = env!("OUTBOARD_CUDA_BUILD");

/// What this build and this machine have of CUDA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The compiler and the devices that the library was compiled for (`nvcc 13.0.88, sm_80 sm_90 compute_90`); `None`
    /// if the crate was built without it.
    pub compiled: Option<&'static str>,
    /// Number of devices that can be used.
    pub devices: u32,
    /// The CUDA version (major, minor) that the machine's driver supports; `None` without a driver.
    pub driver_version: Option<(u32, u32)>,
    /// The version of the CUDA runtime in the library.
    pub runtime_version: Option<(u32, u32)>,
    /// Why no device can be used, and what to do about it; `None` if one can.
    pub problem: Option<String>,
}

/// What this build and this machine have of CUDA. It starts the driver, but makes no context on any device.
pub fn status() -> Status {
    implementation::status()
}

/// Whether [`Range`]s are shown by profilers that know NVTX: whether the library was compiled with it.
pub fn has_ranges() -> bool {
    implementation::has_ranges()
}

/// Checks that there is a device to use.
///
/// # Errors
/// [`Error::Cuda`] that says what is missing and what to do about it.
pub fn require_device() -> Result<()> {
    status().problem.map_or(Ok(()), |problem| Err(Error::Cuda(problem)))
}

/// Starts an update on the calling thread's current device, on one of its streams (a `cudaStream_t`; 0 is the default
/// stream), and returns; failures of the device itself come from later calls on the stream.
///
/// # Errors
/// [`Error::Cuda`] with the parameter's name and CUDA's name of the error. Nothing has been started then.
///
/// # Safety
/// Until the stream has done the work, each plane must be `update.len` contiguous elements of its dtype in memory that
/// the current device can address (its own, or host memory registered as mapped, by its device address); nothing else
/// may write the planes, or read any of them but `grad`, except in the stream's order; they do not overlap. `stream`
/// belongs to the current device.
pub unsafe fn adamw(update: &DeviceUpdate<'_>, stream: usize) -> Result<()> {
    // SAFETY: the caller vouches for the addresses as `implementation::adamw` asks.
    unsafe { implementation::adamw(update, stream) }
}

// The layout that the static_asserts in cuda/adamw.cu state for the other side.
const _: () = {
    assert!(size_of::<Constants>() == 40 && align_of::<Constants>() == 4);
    assert!(offset_of!(Constants, gradient_factor) == 0);
    assert!(offset_of!(Constants, lerp_factor) == 4);
    assert!(offset_of!(Constants, beta2) == 8);
    assert!(offset_of!(Constants, one_minus_beta2) == 12);
    assert!(offset_of!(Constants, step_size) == 16);
    assert!(offset_of!(Constants, bias_correction2_sqrt) == 20);
    assert!(offset_of!(Constants, eps) == 24);
    assert!(offset_of!(Constants, decay_factor) == 28);
    assert!(offset_of!(Constants, coupled_decay) == 32);
    assert!(offset_of!(Constants, lerp_from_gradient) == 36);
};
