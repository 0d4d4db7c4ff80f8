//! The safe layer over the linked library: error codes become [`Error::Cuda`], with CUDA's name of the error and what
//! to do about those that a user can cure.

use super::{BUILD, DeviceUpdate, Status, sys};
use crate::error::{Error, Result};
use std::ffi::{CStr, c_char, c_int};
use std::ptr::from_ref;

// Values of cudaError_t.
const SUCCESS: c_int = 0;
const INSUFFICIENT_DRIVER: c_int = 35;
const NO_DEVICE: c_int = 100;
const NO_KERNEL_IMAGE_FOR_DEVICE: c_int = 209;

pub(super) fn status() -> Status {
    let (mut devices, mut driver, mut runtime) = (0, 0, 0);
    // SAFETY: three valid pointers to ints, written before the call returns.
    let code = unsafe { sys::outboard_cuda_probe(&raw mut devices, &raw mut driver, &raw mut runtime) };
    let devices = u32::try_from(devices).unwrap_or(0);
    let driver_version = version(driver);
    let problem = match code {
        SUCCESS if devices > 0 => None,
        // Some runtimes report an empty list instead.
        SUCCESS => Some(no_device(NO_DEVICE, driver_version)),
        code => Some(no_device(code, driver_version)),
    };
    Status { compiled: Some(BUILD), devices, driver_version, runtime_version: version(runtime), problem }
}

/// CUDA's `1000 * major + 10 * minor` as (major, minor); 0 is no version.
fn version(number: c_int) -> Option<(u32, u32)> {
    let number = u32::try_from(number).ok().filter(|&number| number > 0)?;
    Some((number / 1000, number % 1000 / 10))
}

fn no_device(code: c_int, driver_version: Option<(u32, u32)>) -> String {
    let cause = describe(code);
    match (code, driver_version) {
        (INSUFFICIENT_DRIVER, None) => format!(
            "no NVIDIA driver is installed, or none is visible here ({cause}): install driver R580 or newer, and in a \
             container start it with access to the GPU"
        ),
        (INSUFFICIENT_DRIVER, Some((major, minor))) => format!(
            "the NVIDIA driver is too old: it supports CUDA {major}.{minor}, and the CUDA 13 runtime in this build \
             needs driver R580 or newer ({cause}); update the driver"
        ),
        (NO_DEVICE, _) => format!(
            "no CUDA device is visible ({cause}): check CUDA_VISIBLE_DEVICES, and in a container that it was given \
             the GPU"
        ),
        _ => format!("CUDA could not be started: {cause}"),
    }
}

/// CUDA's name of an error and its explanation: `cudaErrorNoDevice: no CUDA-capable device is detected`.
fn describe(code: c_int) -> String {
    let text = |pointer: *const c_char| {
        // SAFETY: the library returns static, terminated strings for any number.
        unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
    };
    // SAFETY: any number may be asked about.
    let (name, explanation) = unsafe { (sys::outboard_cuda_error_name(code), sys::outboard_cuda_error_string(code)) };
    format!("{}: {}", text(name), text(explanation))
}

/// # Safety
/// As for [`super::adamw`].
pub(super) unsafe fn adamw(update: &DeviceUpdate<'_>) -> Result<()> {
    let DeviceUpdate { parameter, first, len, .. } = *update;
    let n =
        i64::try_from(len).map_err(|_| Error::InvalidValue(format!("{parameter}: {len} elements in one update")))?;
    // SAFETY: the caller vouches for the planes and the stream; the constants are read before the call returns.
    let code = unsafe {
        sys::outboard_cuda_adamw(
            update.weight_kind as c_int,
            update.grad_kind as c_int,
            update.moment_kind as c_int,
            update.weight,
            update.kept,
            update.grad,
            update.exp_avg,
            update.exp_avg_sq,
            update.max_exp_avg_sq,
            n,
            first,
            from_ref(&update.constants),
            update.noise.key(),
            // A division by 1 changes nothing; the kernel leaves it out.
            update.grad_scale.unwrap_or(1.0),
            update.stream,
        )
    };
    match code {
        SUCCESS => Ok(()),
        code => {
            let end = u128::from(first) + len as u128;
            let cure = if code == NO_KERNEL_IMAGE_FOR_DEVICE {
                format!("; this build is for {BUILD}, build with OUTBOARD_CUDA_ARCHS naming your device's capability")
            } else {
                String::new()
            };
            Err(Error::Cuda(format!(
                "cannot update {parameter}, elements {first}..{end}, on the device: {}{cure}",
                describe(code)
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(version(0), None);
        assert_eq!(version(13_000), Some((13, 0)));
        assert_eq!(version(12_080), Some((12, 8)));
    }

    #[test]
    fn problems_say_what_to_do() {
        let old = no_device(INSUFFICIENT_DRIVER, Some((12, 8)));
        assert!(
            old.contains("supports CUDA 12.8") && old.contains("R580") && old.contains("cudaErrorInsufficientDriver"),
            "{old}"
        );
        let none = no_device(INSUFFICIENT_DRIVER, None);
        assert!(none.contains("no NVIDIA driver") && none.contains("R580"), "{none}");
        let hidden = no_device(NO_DEVICE, Some((13, 0)));
        assert!(hidden.contains("CUDA_VISIBLE_DEVICES") && hidden.contains("cudaErrorNoDevice"), "{hidden}");
        assert!(no_device(999, Some((13, 0))).contains("cudaErrorUnknown"));
        assert!(describe(-1).contains("unrecognized"));
    }
}
