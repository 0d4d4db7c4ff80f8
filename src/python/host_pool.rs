//! The pool of host memory: the binding of `memory::host_pool`.

use super::core::shared_pool;
use super::dlpack::{UINT8, capsule};
use super::shuttle::shared_device;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::host_pool::{self, Fence, HostPoolOptions};
use crate::pool::ThreadChoice;
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ffi::{CString, c_void};
use std::ptr::NonNull;

/// An event of Python's: an object with `query()` and `synchronize()`, as torch's are.
struct PyFence(Py<PyAny>);

impl PyFence {
    fn ask<T>(&self, method: &str, read: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T> {
        let asked = Python::try_attach(|py| {
            let answer = self.0.bind(py).call_method0(method).and_then(|answer| read(&answer));
            answer.map_err(|error| {
                Error::Cuda(format!("{method}() of the event that a buffer was released with: {error}"))
            })
        });
        asked.unwrap_or_else(|| Err(Error::Cuda("the interpreter is gone, and the events with it".into())))
    }
}

impl Fence for PyFence {
    fn is_done(&self) -> Result<bool> {
        self.ask("query", |answer| answer.is_truthy())
    }

    fn wait(&self) -> Result<()> {
        self.ask("synchronize", |_| Ok(()))
    }
}

/// Pinned host memory that is lent and taken back. Buffers are named by the address of any of their bytes.
#[pyclass(name = "HostPool", module = "outboard._native", frozen)]
pub(super) struct PyHostPool {
    pool: host_pool::HostPool,
}

impl PyHostPool {
    pub(super) fn pool(&self) -> host_pool::HostPool {
        self.pool.clone()
    }
}

#[pymethods]
impl PyHostPool {
    #[new]
    #[pyo3(signature = (device=None, *, max_bytes=None, threads=None, must_pin=false))]
    fn new(
        py: Python<'_>,
        device: Option<u32>,
        max_bytes: Option<usize>,
        threads: Option<usize>,
        must_pin: bool,
    ) -> PyResult<Self> {
        let pool = py.detach(|| -> Result<_> {
            let threads = threads.map_or_else(|| ThreadChoice::detect().map(|choice| choice.threads), Ok)?;
            let mut options = HostPoolOptions { max_bytes, pin: None, must_pin };
            if let Some(ordinal) = device {
                let device = shared_device(ordinal)?;
                options.pin = Some(Box::new(move |start, bytes| device.pin(start, bytes)));
            }
            Ok(host_pool::HostPool::new(shared_pool(threads)?, options))
        });
        Ok(Self { pool: pool? })
    }

    /// Lends memory: a DLPack capsule of one dimension of uint8. The buffer comes back when no tensor is over it.
    fn acquire<'py>(&self, py: Python<'py>, bytes: usize) -> PyResult<Bound<'py, PyAny>> {
        let (buffer, warnings) = py.detach(|| -> Result<_> {
            let buffer = self.pool.acquire(bytes)?;
            let warnings = if buffer.is_pinned() { Vec::new() } else { self.pool.take_warnings()? };
            Ok((buffer, warnings))
        })?;
        for warning in warnings {
            PyErr::warn(py, &py.get_type::<PyUserWarning>(), &CString::new(warning)?, 1)?;
        }
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut::<c_void>(buffer.address()));
        capsule(py, start.unwrap_or(NonNull::dangling()), UINT8, vec![i64::try_from(bytes)?], vec![1], buffer)
    }

    /// Takes back the buffer that the byte at `address` is in, to be lent anew once `event` is done.
    #[pyo3(signature = (address, event=None))]
    fn release(&self, py: Python<'_>, address: usize, event: Option<Py<PyAny>>) -> PyResult<()> {
        let until = event.map(|event| Box::new(PyFence(event)) as Box<dyn Fence>);
        Ok(py.detach(|| self.pool.release_at(address, until))?)
    }

    /// Unmaps what is not in use; the bytes that are unmapped.
    fn trim(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(py.detach(|| self.pool.trim())?)
    }

    /// Bytes and counts.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.pool.stats())?;
        let dict = PyDict::new(py);
        dict.set_item("live", stats.live)?;
        dict.set_item("cached", stats.cached)?;
        dict.set_item("pending", stats.pending)?;
        dict.set_item("peak", stats.peak)?;
        dict.set_item("hits", stats.hits)?;
        dict.set_item("misses", stats.misses)?;
        dict.set_item("waste", stats.waste)?;
        dict.set_item("held", stats.held)?;
        dict.set_item("pinned", stats.pinned)?;
        dict.set_item("buffers", stats.buffers)?;
        Ok(dict)
    }
}
