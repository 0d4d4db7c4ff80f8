//! One Python exception class per thing a caller can do something about.

use crate::error::Error;
use pyo3::create_exception;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;

create_exception!(outboard, OutboardError, PyRuntimeError, "Base of what outboard raises beyond Python's own errors.");
create_exception!(
    outboard,
    WorkerError,
    OutboardError,
    "Workers failed in the middle of a step. The message lists every failure (parameter, elements, cause). Those parameters \
     are poisoned until their state is loaded or reset; all others have been updated."
);
create_exception!(
    outboard,
    PoisonedError,
    OutboardError,
    "A step was asked for while a parameter's state is half updated. Load its state, or call `optimizer.reset(parameter)`."
);
create_exception!(
    outboard,
    NonFiniteError,
    OutboardError,
    "A gradient is infinite or NaN and `nonfinite=\"raise\"`. Nothing has been changed."
);
create_exception!(
    outboard,
    ForkedError,
    OutboardError,
    "The optimizer was made in another process and reached this one by a fork. Build it in the process that steps it."
);
create_exception!(
    outboard,
    DeviceError,
    OutboardError,
    "A device that is not there, or that this build cannot update on."
);
create_exception!(
    outboard,
    StateError,
    OutboardError,
    "State was asked for what it cannot do where it is (on the host, on the device or on its way). Nothing was changed."
);

create_exception!(
    outboard,
    PoolLimitError,
    OutboardError,
    "A pool of host memory has no buffer left and may map no more. Release buffers, or raise `max_bytes`."
);

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::InvalidValue(_) => PyValueError::new_err(message),
            Error::UnsupportedType(_) => PyTypeError::new_err(message),
            Error::OutOfMemory { .. } => PyMemoryError::new_err(message),
            Error::Threads { .. } => OutboardError::new_err(message),
            Error::Worker(_) => WorkerError::new_err(message),
            Error::Poisoned { .. } => PoisonedError::new_err(message),
            Error::NonFinite { .. } => NonFiniteError::new_err(message),
            Error::Forked { .. } => ForkedError::new_err(message),
            Error::Transition { .. } => StateError::new_err(message),
            Error::PoolLimit { .. } => PoolLimitError::new_err(message),
            Error::Cuda(_) => DeviceError::new_err(message),
        }
    }
}

/// Adds the classes to the module.
pub(super) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("OutboardError", py.get_type::<OutboardError>())?;
    module.add("WorkerError", py.get_type::<WorkerError>())?;
    module.add("PoisonedError", py.get_type::<PoisonedError>())?;
    module.add("NonFiniteError", py.get_type::<NonFiniteError>())?;
    module.add("ForkedError", py.get_type::<ForkedError>())?;
    module.add("DeviceError", py.get_type::<DeviceError>())?;
    module.add("StateError", py.get_type::<StateError>())?;
    module.add("PoolLimitError", py.get_type::<PoolLimitError>())
}
