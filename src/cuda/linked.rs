//! The safe layer over the linked library: error codes become [`Error::Cuda`], with CUDA's name of the error and what
//! to do about those that a user can cure.

use super::{BUILD, Status, device, sys};
use crate::device::DeviceUpdate;
use crate::error::{Error, Result};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

// Values of cudaError_t.
pub(super) const SUCCESS: c_int = 0;
const INSUFFICIENT_DRIVER: c_int = 35;
const NO_DEVICE: c_int = 100;
const NO_KERNEL_IMAGE_FOR_DEVICE: c_int = 209;
const STREAM_CAPTURE_FIRST: c_int = 900;
const STREAM_CAPTURE_LAST: c_int = 908;

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

pub(super) fn has_ranges() -> bool {
    // SAFETY: has no preconditions.
    unsafe { sys::outboard_cuda_has_ranges() != 0 }
}

/// The domain of all ranges, as a number.
fn range_domain() -> usize {
    static DOMAIN: OnceLock<usize> = OnceLock::new();
    // SAFETY: a terminated string, which NVTX copies.
    *DOMAIN.get_or_init(|| unsafe { sys::outboard_cuda_range_domain(c"outboard".as_ptr()) } as usize)
}

/// A range that profilers show, until it is dropped.
#[derive(Debug)]
pub struct Range(u64);

impl Range {
    /// Begins a range. A NUL in the message ends it.
    pub fn begin(message: &str) -> Self {
        let mut bytes = message.as_bytes().to_vec();
        bytes.push(0);
        // SAFETY: the string is terminated, and copied before the call returns.
        Self(unsafe { sys::outboard_cuda_range_begin(range_domain() as *mut c_void, bytes.as_ptr().cast()) })
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: begun in this domain, and ended once.
        unsafe { sys::outboard_cuda_range_end(range_domain() as *mut c_void, self.0) };
    }
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

/// The error of a call, with what was being done and what to do about it where a user can do something.
pub(super) fn failure(code: c_int, what: &str, cure: &str) -> Error {
    let general = match code {
        NO_KERNEL_IMAGE_FOR_DEVICE => {
            format!("; this build is for {BUILD}, build with OUTBOARD_CUDA_ARCHS naming your device's capability")
        }
        STREAM_CAPTURE_FIRST..=STREAM_CAPTURE_LAST => {
            "; a CUDA graph capture is under way: call this outside of what is captured".to_owned()
        }
        _ => String::new(),
    };
    Error::Cuda(format!("{what}: {}{general}{cure}", describe(code)))
}

/// The result of a call that was to do `what`.
pub(super) fn check(code: c_int, what: impl FnOnce() -> String) -> Result<()> {
    if code == SUCCESS { Ok(()) } else { Err(failure(code, &what(), "")) }
}

/// # Safety
/// As for [`super::adamw`].
pub(super) unsafe fn adamw(update: &DeviceUpdate<'_>, stream: usize) -> Result<()> {
    // SAFETY: the caller vouches for the planes and the stream.
    unsafe { device::update(sys::CURRENT_DEVICE, update, stream as *mut c_void) }
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
