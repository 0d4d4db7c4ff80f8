//! State of any optimizer that travels between host memory and a device in batches: the binding of `engine::shuttle`.

use super::core::shared_pool;
use super::dlpack::PyPlane;
use crate::cuda::CudaDevice;
use crate::device::Stream;
use crate::device::simulated::{Schedule, SimulatedDevice};
use crate::engine::shuttle::{Caller, Place, Shuttle, ShuttleOptions, ShuttleStats};
use crate::error::{Error, Result};
use crate::memory::DeviceSpan;
use crate::pool::ThreadChoice;
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

/// A shuttle, whatever its device.
enum Inner {
    Cuda(Shuttle<CudaDevice>),
    Simulated(Shuttle<SimulatedDevice>),
    /// Closed, with what was counted until then.
    Closed(ShuttleStats),
}

/// The same call on either.
macro_rules! on {
    ($inner:expr, $shuttle:ident => $call:expr) => {
        match $inner {
            Inner::Cuda($shuttle) => $call,
            Inner::Simulated($shuttle) => $call,
            Inner::Closed(_) => Err(Error::InvalidValue("this shuttle is closed".into())),
        }
    };
}

/// The GPU of this number, for all shuttles, and for good: torch's allocator asks the streams of copies when memory that
/// they have used comes free, which may be long after a shuttle has gone. A stream that was destroyed crashes it.
pub(super) fn shared_device(ordinal: u32) -> Result<Arc<CudaDevice>> {
    static DEVICES: Mutex<Vec<(u32, Arc<CudaDevice>)>> = Mutex::new(Vec::new());
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, device)) = devices.iter().find(|(known, _)| *known == ordinal) {
        return Ok(Arc::clone(device));
    }
    let device = Arc::new(CudaDevice::new(ordinal)?);
    devices.push((ordinal, Arc::clone(&device)));
    Ok(device)
}

/// Optimizer state that lives in host memory and travels to a device in batches. Slots are numbers from `reserve`;
/// addresses are the device's (on a simulated device the host's), and streams are `cudaStream_t` as numbers. Whoever passes
/// an address answers for it: as many bytes as the slot has, there until the copies to or from it are done, and touched
/// by nobody else but in the order that `arrive`, `send` and `claim` make.
#[pyclass(module = "outboard._native", frozen)]
pub(super) struct StateShuttle {
    inner: Mutex<Inner>,
    /// The simulated device, where that is the device; it outlives `close` for its hazards.
    simulated: Option<Arc<SimulatedDevice>>,
    streams: Vec<usize>,
    process: u32,
}

impl StateShuttle {
    /// Without the interpreter's lock: a call may wait for the device.
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

/// The slots with their memory on the device.
fn spans(inner: &Inner, slots: &[usize], addresses: &[usize]) -> Result<Vec<(usize, DeviceSpan)>> {
    if slots.len() != addresses.len() {
        return Err(Error::InvalidValue(format!("{} addresses for {} slots", addresses.len(), slots.len())));
    }
    let span = |(&slot, &address): (&usize, &usize)| {
        let bytes = on!(inner, shuttle => shuttle.bytes(slot))?;
        // SAFETY: what the class asks of whoever passes addresses.
        Ok((slot, unsafe { DeviceSpan::new(address, bytes) }))
    };
    slots.iter().zip(addresses).map(span).collect()
}

#[allow(clippy::needless_pass_by_value)] // lists come from Python as vectors
#[pymethods]
impl StateShuttle {
    #[new]
    #[pyo3(signature = (device, *, simulate=None, threads=None, pin=None, piece_bytes=16_777_216,
        simulated_pinnable_bytes=None))]
    fn new(
        py: Python<'_>,
        device: Option<u32>,
        simulate: Option<u64>,
        threads: Option<usize>,
        pin: Option<bool>,
        piece_bytes: usize,
        simulated_pinnable_bytes: Option<usize>,
    ) -> PyResult<Self> {
        let options = ShuttleOptions { pin, piece_bytes };
        let made = py.detach(|| {
            let threads = threads.map_or_else(|| ThreadChoice::detect().map(|choice| choice.threads), Ok)?;
            let pool = shared_pool(threads)?;
            match (device, simulate) {
                (Some(ordinal), None) => {
                    let device = shared_device(ordinal)?;
                    let streams = [Stream::StateIn, Stream::StateOut].map(|stream| device.stream_handle(stream));
                    Ok((Inner::Cuda(Shuttle::new(device, pool, options)?), None, streams.to_vec()))
                }
                (None, Some(seed)) => {
                    let device = Arc::new(SimulatedDevice::new(Schedule::Random { seed })?);
                    if let Some(bytes) = simulated_pinnable_bytes {
                        device.set_pinnable_bytes(bytes);
                    }
                    let shuttle = Shuttle::new(Arc::clone(&device), pool, options)?;
                    Ok((Inner::Simulated(shuttle), Some(device), Vec::new()))
                }
                _ => Err(Error::InvalidValue("either a device or simulate is needed, and not both".into())),
            }
        });
        let (inner, simulated, streams) = made?;
        Ok(Self { inner: Mutex::new(inner), simulated, streams, process: crate::process::id() })
    }

    /// Finds host memory for slots, and maps it for those of the sizes in `coming` as well, if it has to map any; the
    /// slots are pending.
    #[pyo3(signature = (names, sizes, coming=Vec::new()))]
    fn reserve(
        &self,
        py: Python<'_>,
        names: Vec<String>,
        sizes: Vec<usize>,
        coming: Vec<usize>,
    ) -> PyResult<Vec<usize>> {
        if names.len() != sizes.len() {
            return Err(Error::InvalidValue(format!("{} sizes for {} names", sizes.len(), names.len())).into());
        }
        let wanted: Vec<_> = names.into_iter().zip(sizes).collect();
        let (slots, warning) = self.with(py, |inner| on!(inner, shuttle => shuttle.reserve(&wanted, &coming)))?;
        if let Some(warning) = warning.and_then(|warning| CString::new(warning).ok())
            && let Err(error) = PyErr::warn(py, &py.get_type::<PyUserWarning>(), &warning, 1)
        {
            // Warnings are errors here: nobody will know the slots.
            self.with(py, |inner| on!(inner, shuttle => shuttle.free(&slots)))?;
            return Err(error);
        }
        Ok(slots)
    }

    /// The slot's host memory, for `torch.from_dlpack`: one dimension of uint8.
    fn tensor(&self, py: Python<'_>, slot: usize) -> PyResult<PyPlane> {
        self.with(py, |inner| {
            on!(inner, shuttle => {
                let (start, memory) = shuttle.share(slot)?;
                Ok(PyPlane::of_bytes(start, shuttle.bytes(slot)?, memory))
            })
        })
    }

    /// Host memory that was mapped together and has live slots, each as `tensor`: the bytes in use, from the first slot's
    /// first to the end of the last slot's padding.
    fn buffers(&self, py: Python<'_>) -> PyResult<Vec<PyPlane>> {
        let buffers = self.with(py, |inner| on!(inner, shuttle => Ok(shuttle.buffers())))?;
        Ok(buffers.into_iter().map(|buffer| PyPlane::of_bytes(buffer.start, buffer.bytes, buffer.handle)).collect())
    }

    /// Pending to host: what the host memory holds is the value.
    fn fill(&self, py: Python<'_>, slots: Vec<usize>) -> PyResult<()> {
        self.with(py, |inner| on!(inner, shuttle => shuttle.fill(&slots)))
    }

    /// Pending to device: the value was made there.
    #[pyo3(signature = (slots, addresses=None))]
    fn bear(&self, py: Python<'_>, slots: Vec<usize>, addresses: Option<Vec<usize>>) -> PyResult<()> {
        self.with(py, |inner| on!(inner, shuttle => shuttle.bear(&slots, addresses.as_deref())))
    }

    /// Host (or on its way there) to on its way to the device, behind what stream `after` has been given so far.
    #[pyo3(signature = (slots, addresses, after=None))]
    fn bring(&self, py: Python<'_>, slots: Vec<usize>, addresses: Vec<usize>, after: Option<usize>) -> PyResult<()> {
        let after = after.map(|stream| self.caller(stream));
        self.with(py, |inner| {
            let spans = spans(inner, &slots, &addresses)?;
            on!(inner, shuttle => shuttle.bring(spans, after))
        })
    }

    /// On the device, for what the stream is given from now on.
    fn arrive(&self, py: Python<'_>, slots: Vec<usize>, stream: usize) -> PyResult<()> {
        let caller = self.caller(stream);
        self.with(py, |inner| on!(inner, shuttle => shuttle.arrive(&slots, caller)))
    }

    /// Device to on its way home, behind what the stream has been given so far.
    fn send(&self, py: Python<'_>, slots: Vec<usize>, addresses: Vec<usize>, stream: usize) -> PyResult<()> {
        let caller = self.caller(stream);
        self.with(py, |inner| {
            let spans = spans(inner, &slots, &addresses)?;
            on!(inner, shuttle => shuttle.send(spans, caller))
        })
    }

    /// Off the device without a copy home: the value is what it was before it was brought.
    fn discard(&self, py: Python<'_>, slots: Vec<usize>, stream: usize) -> PyResult<()> {
        let caller = self.caller(stream);
        self.with(py, |inner| on!(inner, shuttle => shuttle.discard(&slots, caller)))
    }

    /// As `discard`, of all slots on the device or on their way there.
    fn recall(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        let caller = self.caller(stream);
        self.with(py, |inner| on!(inner, shuttle => shuttle.recall(caller)))
    }

    /// Lets the stream wait for what still uses this memory of the device.
    fn claim(&self, py: Python<'_>, address: usize, bytes: usize, stream: usize) -> PyResult<()> {
        let caller = self.caller(stream);
        self.with(py, |inner| on!(inner, shuttle => shuttle.claim(address, bytes, caller)))
    }

    /// Waits until no copy touches the host memory of these slots, or of all on their way home.
    #[pyo3(signature = (slots=None))]
    fn settle(&self, py: Python<'_>, slots: Option<Vec<usize>>) -> PyResult<()> {
        self.with(py, |inner| {
            on!(inner, shuttle => match &slots {
                Some(slots) => shuttle.settle(slots),
                None => shuttle.settle_all(),
            })
        })
    }

    /// Notes which slots have come home. Does not wait.
    fn poll(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |inner| on!(inner, shuttle => shuttle.poll()))
    }

    /// Lets slots go.
    fn free(&self, py: Python<'_>, slots: Vec<usize>) -> PyResult<()> {
        self.with(py, |inner| on!(inner, shuttle => shuttle.free(&slots)))
    }

    /// Where the slots' values are: "pending", "host", "h2d", "device" or "d2h".
    fn places(&self, py: Python<'_>, slots: Vec<usize>) -> PyResult<Vec<&'static str>> {
        self.with(py, |inner| {
            slots.iter().map(|&slot| Ok(on!(inner, shuttle => shuttle.place(slot))?.name())).collect()
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
                Inner::Cuda(shuttle) => shuttle.stats(),
                Inner::Simulated(shuttle) => shuttle.stats(),
                Inner::Closed(stats) => stats.clone(),
            })
        })?;
        let dict = PyDict::new(py);
        dict.set_item("host_bytes", stats.host_bytes)?;
        dict.set_item("pinned_bytes", stats.pinned_bytes)?;
        dict.set_item("copies_in", stats.copies_in)?;
        dict.set_item("bytes_in", stats.bytes_in)?;
        dict.set_item("copies_out", stats.copies_out)?;
        dict.set_item("bytes_out", stats.bytes_out)?;
        dict.set_item("under_way", stats.under_way)?;
        let places = PyDict::new(py);
        for (place, count) in Place::ALL.iter().zip(stats.places) {
            places.set_item(place.name(), count)?;
        }
        dict.set_item("places", places)?;
        Ok(dict)
    }

    /// What a simulated device has found to touch the same bytes in no order.
    fn hazards(&self) -> PyResult<Vec<String>> {
        let none = || Error::InvalidValue("hazards are known on a simulated device only".into());
        Ok(self.simulated.as_ref().ok_or_else(none)?.hazards())
    }

    /// Waits until no copy is under way, and lets all slots go. Tensors over them keep their memory mapped.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |inner| {
            let mut stats = match inner {
                Inner::Cuda(shuttle) => shuttle.stats(),
                Inner::Simulated(shuttle) => shuttle.stats(),
                Inner::Closed(_) => return Ok(()),
            };
            (stats.host_bytes, stats.pinned_bytes, stats.under_way, stats.places) = (0, 0, 0, [0; 5]);
            *inner = Inner::Closed(stats);
            Ok(())
        })
    }
}
