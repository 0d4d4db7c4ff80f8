//! The Python module `outboard._native`: checks arguments, releases the interpreter, calls the engine, maps its one error
//! type. No arithmetic.

mod bench;
mod binding;
mod core;
mod cuda;
mod dlpack;
mod errors;
mod ferry;
mod groups;
mod host_pool;
mod info;
mod lanes;
mod masters;
mod overlap;
mod parameters;
mod pinning;
mod sharded;
mod sharing;
mod shuttle;
mod stats;
mod step;
mod tensor;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    errors::add(module)?;
    module.add_class::<core::Core>()?;
    module.add_class::<core::StepOutcome>()?;
    module.add_class::<overlap::GroupSettings>()?;
    module.add_class::<dlpack::PyPlane>()?;
    module.add_class::<shuttle::StateShuttle>()?;
    module.add_class::<host_pool::PyHostPool>()?;
    module.add_class::<ferry::PyFerry>()?;
    module.add_function(wrap_pyfunction!(info::build_info, module)?)?;
    module.add_function(wrap_pyfunction!(info::cuda_status, module)?)?;
    module.add_function(wrap_pyfunction!(info::default_threads, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::cuda_adamw, module)?)?;
    module.add_function(wrap_pyfunction!(info::require_device, module)?)?;
    module.add_function(wrap_pyfunction!(bench::host_tensor, module)?)?;
    module.add_function(wrap_pyfunction!(bench::stream_pass, module)?)
}
