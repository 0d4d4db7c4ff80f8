//! Stands in for the CUDA library in a crate that was built without it.

use super::{BUILD, DeviceUpdate, Status};
use crate::error::{Error, Result};

fn problem() -> String {
    format!(
        "this build of outboard has no CUDA library ({BUILD}): install a wheel that has it, or build where CUDA's \
         compiler is found, with OUTBOARD_CUDA=require to be told if it is not"
    )
}

pub(super) fn status() -> Status {
    Status { compiled: None, devices: 0, driver_version: None, runtime_version: None, problem: Some(problem()) }
}

/// # Safety
/// None is needed: the pointers are not used. It is unsafe as its counterpart is.
pub(super) unsafe fn adamw(update: &DeviceUpdate<'_>) -> Result<()> {
    Err(Error::Cuda(format!("cannot update {} on the device: {}", update.parameter, problem())))
}
