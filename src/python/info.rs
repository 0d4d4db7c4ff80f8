//! What this build is and what this machine can do, for `doctor` and bug reports.

use crate::cuda;
use crate::kernel::Isa;
use crate::pool::ThreadChoice;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Version, target, instruction-set levels.
#[pyfunction]
pub(super) fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("target", format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS))?;
    info.set_item("profile", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    info.set_item("isa_available", Isa::available().map(Isa::name).collect::<Vec<_>>())?;
    // OUTBOARD_ISA may name no usable level: that is an error for whoever makes an optimizer, not for `import outboard`.
    let (isa, problem) = match Isa::current() {
        Ok(isa) => (Some(isa.name()), None),
        Err(error) => (None, Some(error.to_string())),
    };
    info.set_item("isa", isa)?;
    info.set_item("isa_problem", problem)?;
    info.set_item("nvtx", cuda::has_ranges())?;
    Ok(info)
}

/// What there is of CUDA: asks the driver, which importing the package never does.
#[pyfunction]
pub(super) fn cuda_status(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let cuda::Status { compiled, devices, driver_version, runtime_version, problem } = cuda::status();
    let status = PyDict::new(py);
    status.set_item("compiled", compiled)?;
    status.set_item("devices", devices)?;
    status.set_item("driver_version", driver_version)?;
    status.set_item("runtime_version", runtime_version)?;
    status.set_item("problem", problem)?;
    Ok(status)
}

/// The number of worker threads that an optimizer starts by default, and why.
#[pyfunction]
pub(super) fn default_threads() -> PyResult<(usize, String)> {
    let ThreadChoice { threads, why } = ThreadChoice::detect()?;
    Ok((threads, why))
}

/// Raises `DeviceError` if there is no CUDA device that can be used, with the cause and what to do about it.
#[pyfunction]
pub(super) fn require_device() -> PyResult<()> {
    Ok(cuda::require_device()?)
}
