//! Memory of a device that spends a while on the host: the binding of `engine::ferry`.

use super::host_pool::PyHostPool;
use super::shuttle::shared_device;
use crate::cuda::CudaDevice;
use crate::device::Stream;
use crate::device::simulated::{Schedule, SimulatedDevice};
use crate::engine::ferry::{Caller, Ferry, FerryStats, PIECE_BYTES};
use crate::error::{Error, Result};
use crate::memory::DeviceSpan;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::sync::{Arc, Mutex, PoisonError};

/// A ferry, whatever its device.
enum Inner {
    Cuda(Ferry<CudaDevice>),
    Simulated(Ferry<SimulatedDevice>),
    /// Closed, with what was counted until then.
    Closed(FerryStats),
}

/// The same call on either.
macro_rules! on {
    ($inner:expr, $ferry:ident => $call:expr) => {
        match $inner {
            Inner::Cuda($ferry) => $call,
            Inner::Simulated($ferry) => $call,
            Inner::Closed(_) => Err(Error::InvalidValue("this ferry is closed".into())),
        }
    };
}

/// Carries memory between a device and a pool of host memory. Addresses are the device's (on a simulated device the host's),
/// streams are `cudaStream_t` as numbers. Whoever passes an address answers for it: as many bytes as are said, there until
/// the copies to or from it are done, and touched by nobody else but in the order that `landed` and `arrive` make.
#[pyclass(name = "Ferry", module = "outboard._native", frozen)]
pub(super) struct PyFerry {
    inner: Mutex<Inner>,
    simulated: Option<Arc<SimulatedDevice>>,
    streams: Vec<usize>,
    process: u32,
}

impl PyFerry {
    /// Without the interpreter's lock: a call may wait for the device, and for the pool.
    fn with<T: Send>(&self, py: Python<'_>, call: impl FnOnce(&mut Inner) -> Result<T> + Send) -> PyResult<T> {
        let used_in = crate::process::id();
        if used_in != self.process {
            // Another thread may have held the lock at the fork: then it is held for good.
            return Err(Error::Forked { made_in: self.process, used_in }.into());
        }
        Ok(py.detach(|| call(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner)))?)
    }

    fn caller(&self, stream: usize) -> Caller {
        if self.simulated.is_some() { Caller::Host } else { Caller::Stream(stream) }
    }
}

/// Runs of the device's memory, each an address and a number of bytes.
fn spans(runs: &[(usize, usize)]) -> Vec<DeviceSpan> {
    // SAFETY: what the class asks of whoever passes addresses.
    runs.iter().map(|&(address, bytes)| unsafe { DeviceSpan::new(address, bytes) }).collect()
}

#[allow(clippy::needless_pass_by_value)] // lists come from Python as vectors
#[pymethods]
impl PyFerry {
    #[new]
    #[pyo3(signature = (pool, device, *, simulate=None, piece_bytes=PIECE_BYTES))]
    fn new(
        py: Python<'_>,
        pool: &PyHostPool,
        device: Option<u32>,
        simulate: Option<u64>,
        piece_bytes: usize,
    ) -> PyResult<Self> {
        let pool = pool.pool();
        let made = py.detach(|| match (device, simulate) {
            (Some(ordinal), None) => {
                let device = shared_device(ordinal)?;
                let streams = [Stream::StateIn, Stream::StateOut].map(|stream| device.stream_handle(stream));
                Ok((Inner::Cuda(Ferry::new(device, pool, piece_bytes)?), None, streams.to_vec()))
            }
            (None, Some(seed)) => {
                let device = Arc::new(SimulatedDevice::new(Schedule::Random { seed })?);
                let ferry = Ferry::new(Arc::clone(&device), pool, piece_bytes)?;
                Ok((Inner::Simulated(ferry), Some(device), Vec::new()))
            }
            _ => Err(Error::InvalidValue("either a device or simulate is needed, and not both".into())),
        });
        let (inner, simulated, streams) = made?;
        Ok(Self { inner: Mutex::new(inner), simulated, streams, process: crate::process::id() })
    }

    /// Sends runs to the host as one cargo, behind what the stream has been given; its number.
    fn send(&self, py: Python<'_>, name: String, runs: Vec<(usize, usize)>, stream: usize) -> PyResult<u64> {
        let caller = self.caller(stream);
        self.with(py, |inner| on!(inner, ferry => ferry.send(&name, spans(&runs), caller)))
    }

    /// Lets the stream follow a cargo's copy out.
    fn landed(&self, py: Python<'_>, cargo: u64, stream: usize) -> PyResult<()> {
        let caller = self.caller(stream);
        self.with(py, |inner| on!(inner, ferry => ferry.landed(cargo, caller)))
    }

    /// Whether a cargo's copy out is done.
    fn has_landed(&self, py: Python<'_>, cargo: u64) -> PyResult<bool> {
        self.with(py, |inner| on!(inner, ferry => ferry.has_landed(cargo)))
    }

    /// Brings a cargo's runs to these places, behind what the stream has been given.
    fn bring(&self, py: Python<'_>, cargo: u64, runs: Vec<(usize, usize)>, stream: usize) -> PyResult<()> {
        let caller = self.caller(stream);
        self.with(py, |inner| on!(inner, ferry => ferry.bring(cargo, spans(&runs), caller)))
    }

    /// Lets the stream follow a cargo's last copy in.
    fn arrive(&self, py: Python<'_>, cargo: u64, stream: usize) -> PyResult<()> {
        let caller = self.caller(stream);
        self.with(py, |inner| on!(inner, ferry => ferry.arrive(cargo, caller)))
    }

    /// Lets a cargo go.
    fn drop(&self, py: Python<'_>, cargo: u64) -> PyResult<()> {
        self.with(py, |inner| match inner {
            Inner::Closed(_) => Ok(()),
            inner => on!(inner, ferry => ferry.drop_cargo(cargo)),
        })
    }

    /// The streams of copies in and out; none on a simulated device.
    fn streams<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.streams)
    }

    /// Counts and sizes.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(py, |inner| {
            Ok(match inner {
                Inner::Cuda(ferry) => ferry.stats(),
                Inner::Simulated(ferry) => ferry.stats(),
                Inner::Closed(stats) => *stats,
            })
        })?;
        let dict = PyDict::new(py);
        dict.set_item("cargos", stats.cargos)?;
        dict.set_item("bytes", stats.bytes)?;
        dict.set_item("copies_out", stats.copies_out)?;
        dict.set_item("bytes_out", stats.bytes_out)?;
        dict.set_item("copies_in", stats.copies_in)?;
        dict.set_item("bytes_in", stats.bytes_in)?;
        Ok(dict)
    }

    /// What a simulated device has found to touch the same bytes in no order.
    fn hazards(&self) -> PyResult<Vec<String>> {
        let none = || Error::InvalidValue("hazards are known on a simulated device only".into());
        Ok(self.simulated.as_ref().ok_or_else(none)?.hazards())
    }

    /// Lets all cargos go.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |inner| {
            let mut stats = match inner {
                Inner::Cuda(ferry) => ferry.stats(),
                Inner::Simulated(ferry) => ferry.stats(),
                Inner::Closed(_) => return Ok(()),
            };
            (stats.cargos, stats.bytes) = (0, 0);
            *inner = Inner::Closed(stats);
            Ok(())
        })
    }
}
