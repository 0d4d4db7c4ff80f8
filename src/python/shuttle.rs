//! The shuttle of one device, and the pointer edge where slots of host memory and addresses on the device become spans
//! that copies may work on after the call has returned.

#![allow(clippy::needless_pass_by_value, reason = "PyO3 makes vectors of Python's lists")]

use super::core::shared_pool;
use super::dlpack::PyPlane;
use crate::cuda::CudaDevice;
use crate::device::simulated::{Schedule, SimulatedDevice};
use crate::device::{Device, Stream};
use crate::engine::shuttle::{Move, PIECE_BYTES, Shuttle};
use crate::error::{Error, Result};
use crate::memory::{Arena, DeviceSpan, Plane, Slab, SlabHandle, locked_memory_limit, plane_bytes};
use crate::pool::WorkerPool;
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ffi::CString;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A shuttle, whatever its device.
enum Any {
    Cuda(Shuttle<CudaDevice>),
    /// Host memory is the device, and the caller its stream: it waits where a stream would.
    Simulated(Shuttle<SimulatedDevice>),
}

/// One call for either device.
macro_rules! each {
    ($any:expr, $shuttle:ident => $call:expr) => {
        match $any {
            Any::Cuda($shuttle) => $call,
            Any::Simulated($shuttle) => $call,
        }
    };
}

/// The memory of one slot.
struct Lodging {
    plane: Plane<u8>,
    slab: usize,
}

/// A slab with slots in it.
struct Buffer {
    start: NonNull<u8>,
    bytes: usize,
    handle: SlabHandle,
    /// Slots that are still there.
    live: usize,
}

struct State {
    shuttle: Any,
    arena: Arena,
    pool: Arc<WorkerPool>,
    pin: Option<bool>,
    lodgings: Vec<Option<Lodging>>,
    buffers: Vec<Option<Buffer>>,
    is_closed: bool,
}

// SAFETY: `Buffer` holds an address that nothing reads here; all else is Send by itself.
unsafe impl Send for State {}

impl State {
    fn check(&self) -> Result<()> {
        each!(&self.shuttle, shuttle => shuttle.check_process())?;
        if self.is_closed {
            return Err(Error::InvalidValue("this shuttle of optimizer state is closed".into()));
        }
        Ok(())
    }

    /// Pins a slab, as far as that is wanted and possible; what is not is a warning, or with `pin=True` an error.
    fn pin(&self, slab: &Slab) -> Result<Option<String>> {
        if self.pin == Some(false) || slab.bytes() == 0 {
            return Ok(None);
        }
        let Err(error) = each!(&self.shuttle, shuttle => slab.pin(|start, bytes| shuttle.device().pin(start, bytes)))
        else {
            return Ok(None);
        };
        let limit = locked_memory_limit().map_or("unlimited".to_owned(), |limit| format!("{limit} bytes"));
        let what = format!(
            "cannot pin {} bytes of optimizer state ({error}; locked memory: {limit}): raise the limit of locked memory",
            slab.bytes()
        );
        if self.pin == Some(true) {
            return Err(Error::Cuda(format!("pin=True: {what}; pin='auto' leaves such state pageable")));
        }
        Ok(Some(format!(
            "{what}; this state stays pageable, and its copies hold up the program and take about twice as long"
        )))
    }

    /// The memory of slots on both sides.
    fn moves(&mut self, slots: &[usize], addresses: &[usize]) -> Result<Vec<Move>> {
        if slots.len() != addresses.len() {
            return Err(Error::InvalidValue(format!("{} slots and {} addresses", slots.len(), addresses.len())));
        }
        let mut seen = std::collections::HashSet::new();
        let mut moves = Vec::with_capacity(slots.len());
        for (&slot, &address) in slots.iter().zip(addresses) {
            let bytes = each!(&self.shuttle, shuttle => shuttle.bytes(slot))?;
            let Some(lodging) = self.lodgings.get_mut(slot).and_then(Option::as_mut).filter(|_| seen.insert(slot))
            else {
                return Err(Error::InvalidValue(format!("slot {slot} is named twice in one call")));
            };
            // SAFETY: a slot is in at most one copy at a time, which the shuttle sees to, or in several that it has put in
            // an order; and `outboard._offload` keeps readers of the host's memory away until a copy home is done.
            let host = unsafe { lodging.plane.lend() };
            // SAFETY: the caller's promise: `bytes` bytes of the device's memory from there on are the slot's until it has
            // been sent home or discarded, and are given to others in the order that `bring` and `claim` establish.
            let device = unsafe { DeviceSpan::new(address, bytes) };
            moves.push(Move { slot, host, device });
        }
        Ok(moves)
    }
}

/// Where the state of an optimizer on one device lives between steps, and its copies to and from there.
///
/// The caller vouches for addresses on the device: see `outboard._offload._carrier`.
#[pyclass(name = "StateShuttle", module = "outboard._native", frozen)]
pub(super) struct StateShuttle {
    state: Mutex<State>,
}

impl StateShuttle {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks and calls, with the interpreter's lock released: drops of spans may unmap memory.
    fn with<R: Send>(&self, py: Python<'_>, call: impl FnOnce(&mut State) -> Result<R> + Send) -> PyResult<R> {
        Ok(py.detach(|| {
            let mut state = self.lock();
            state.check()?;
            call(&mut state)
        })?)
    }
}

#[pymethods]
impl StateShuttle {
    #[new]
    #[pyo3(signature = (device, *, simulate=None, threads=1, pin=None, piece_bytes=PIECE_BYTES,
        simulated_pinnable_bytes=None))]
    fn new(
        device: Option<u32>,
        simulate: Option<u64>,
        threads: usize,
        pin: Option<bool>,
        piece_bytes: usize,
        simulated_pinnable_bytes: Option<usize>,
    ) -> PyResult<Self> {
        let shuttle = match (device, simulate) {
            (Some(ordinal), None) => Any::Cuda(Shuttle::new(Arc::new(CudaDevice::new(ordinal)?), piece_bytes)),
            (None, Some(seed)) => {
                let device = SimulatedDevice::new(Schedule::Random { seed })?;
                if let Some(bytes) = simulated_pinnable_bytes {
                    device.set_pinnable_bytes(bytes);
                }
                Any::Simulated(Shuttle::new(Arc::new(device), piece_bytes))
            }
            _ => return Err(Error::InvalidValue("give a device, or a seed to simulate one".into()).into()),
        };
        let (arena, pool) = (Arena::default(), shared_pool(threads)?);
        let (lodgings, buffers, is_closed) = (Vec::new(), Vec::new(), false);
        Ok(Self { state: Mutex::new(State { shuttle, arena, pool, pin, lodgings, buffers, is_closed }) })
    }

    /// Makes slots, side by side in one buffer of pinned zeros; they have no value yet. Returns their numbers.
    fn reserve(&self, py: Python<'_>, names: Vec<String>, sizes: Vec<usize>) -> PyResult<Vec<usize>> {
        if names.len() != sizes.len() {
            return Err(Error::InvalidValue(format!("{} names and {} sizes", names.len(), sizes.len())).into());
        }
        let (ids, warning) = self.with(py, |state| {
            let mut total = 0_usize;
            for &bytes in &sizes {
                let too_large = || Error::InvalidValue(format!("slots of {sizes:?} bytes exceed the address space"));
                total = total.checked_add(plane_bytes::<u8>(bytes)?).ok_or_else(too_large)?;
            }
            let mut slab = state.arena.slab(total, &state.pool)?;
            let warning = state.pin(&slab)?;
            let buffer = state.buffers.len();
            let live = sizes.len();
            let shared = slab.share().filter(|_| live > 0);
            state.buffers.push(shared.map(|(start, handle)| Buffer { start, bytes: total, handle, live }));
            let mut ids = Vec::with_capacity(live);
            for (name, &bytes) in names.iter().zip(&sizes) {
                ids.push(each!(&mut state.shuttle, shuttle => shuttle.add(name, bytes)));
                state.lodgings.push(Some(Lodging { plane: slab.carve(bytes), slab: buffer }));
            }
            Ok((ids, warning))
        })?;
        if let Some(warning) = warning {
            let message = CString::new(warning).unwrap_or_default();
            PyErr::warn(py, &py.get_type::<PyUserWarning>(), &message, 2)?;
        }
        Ok(ids)
    }

    /// The host memory of a slot: uint8, its bytes.
    fn tensor(&self, slot: usize) -> PyResult<PyPlane> {
        let state = self.lock();
        let Some(lodging) = state.lodgings.get(slot).and_then(Option::as_ref) else {
            return Err(Error::InvalidValue(format!("there is no slot {slot}")).into());
        };
        let (start, handle) = lodging.plane.share();
        Ok(PyPlane::of_bytes(start, lodging.plane.as_slice().len(), handle))
    }

    /// The host memory of all slots, buffer by buffer: uint8, as many bytes as the slots and their padding take.
    fn buffers(&self) -> Vec<PyPlane> {
        let state = self.lock();
        let buffers = state.buffers.iter().flatten();
        buffers.map(|buffer| PyPlane::of_bytes(buffer.start, buffer.bytes, buffer.handle.clone())).collect()
    }

    /// What host memory holds is these slots' value.
    fn fill(&self, py: Python<'_>, slots: Vec<usize>) -> PyResult<()> {
        self.with(py, |state| each!(&mut state.shuttle, shuttle => shuttle.fill(&slots)))
    }

    /// These slots' first value is on the device.
    fn bear(&self, py: Python<'_>, slots: Vec<usize>) -> PyResult<()> {
        self.with(py, |state| each!(&mut state.shuttle, shuttle => shuttle.bear(&slots)))
    }

    /// Starts copies to addresses on the device; `packed`: neighbours on both sides in one, with what lies between them.
    #[pyo3(signature = (slots, addresses, *, packed=true, after=None))]
    fn bring(
        &self,
        py: Python<'_>,
        slots: Vec<usize>,
        addresses: Vec<usize>,
        packed: bool,
        after: Option<usize>,
    ) -> PyResult<()> {
        self.with(py, |state| {
            let moves = state.moves(&slots, &addresses)?;
            each!(&mut state.shuttle, shuttle => shuttle.bring(moves, packed, after))
        })
    }

    /// Lets a stream wait for copies to the device.
    fn arrive(&self, py: Python<'_>, slots: Vec<usize>, stream: usize) -> PyResult<()> {
        self.with(py, |state| {
            if let Any::Simulated(shuttle) = &state.shuttle {
                shuttle.wait_for_arrival(&slots)?;
            }
            each!(&mut state.shuttle, shuttle => shuttle.arrive(&slots, stream))
        })
    }

    /// Starts copies home from addresses on the device, behind a stream.
    #[pyo3(signature = (slots, addresses, stream, *, packed=true))]
    fn send(
        &self,
        py: Python<'_>,
        slots: Vec<usize>,
        addresses: Vec<usize>,
        stream: usize,
        packed: bool,
    ) -> PyResult<()> {
        self.with(py, |state| {
            let moves = state.moves(&slots, &addresses)?;
            each!(&mut state.shuttle, shuttle => shuttle.send(moves, packed, stream))
        })
    }

    /// Gives up what is on the device or on its way there.
    fn discard(&self, py: Python<'_>, slots: Vec<usize>, stream: usize) -> PyResult<()> {
        self.with(py, |state| each!(&mut state.shuttle, shuttle => shuttle.discard(&slots, stream)))
    }

    /// Lets a stream wait for all copies into and out of a range of the device's memory.
    fn claim(&self, py: Python<'_>, address: usize, bytes: usize, stream: usize) -> PyResult<()> {
        self.with(py, |state| {
            if let Any::Simulated(shuttle) = &mut state.shuttle {
                shuttle.wait_for_use(address, bytes)?;
            }
            each!(&mut state.shuttle, shuttle => shuttle.claim(address, bytes, stream))
        })
    }

    /// Waits until slots, or all, are home.
    #[pyo3(signature = (slots=None))]
    fn settle(&self, py: Python<'_>, slots: Option<Vec<usize>>) -> PyResult<()> {
        self.with(py, |state| match slots {
            Some(slots) => each!(&mut state.shuttle, shuttle => shuttle.settle(&slots)),
            None => each!(&mut state.shuttle, shuttle => shuttle.settle_all()),
        })
    }

    /// Waits until no copy is under way, in either direction.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |state| each!(&mut state.shuttle, shuttle => shuttle.drain()))
    }

    /// Notes which slots have come home.
    fn poll(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |state| each!(&mut state.shuttle, shuttle => shuttle.poll()))
    }

    /// Gives slots and their memory back.
    fn free(&self, py: Python<'_>, slots: Vec<usize>) -> PyResult<()> {
        self.with(py, |state| {
            each!(&mut state.shuttle, shuttle => shuttle.free(&slots))?;
            for slot in slots {
                let Some(lodging) = state.lodgings[slot].take() else { continue };
                if let Some(buffer) = &mut state.buffers[lodging.slab] {
                    buffer.live -= 1;
                    if buffer.live == 0 {
                        state.buffers[lodging.slab] = None;
                    }
                }
            }
            Ok(())
        })
    }

    /// Where slots are: "pending", "host", "h2d", "device", "d2h" or "lost".
    fn places(&self, slots: Vec<usize>) -> PyResult<Vec<String>> {
        let state = self.lock();
        let place = |slot| each!(&state.shuttle, shuttle => shuttle.whereabouts(slot));
        Ok(slots.into_iter().map(|slot| Ok(place(slot)?.to_string())).collect::<Result<_>>()?)
    }

    /// Bytes of host memory, and copies and bytes so far.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let state = self.lock();
        let traffic = each!(&state.shuttle, shuttle => shuttle.traffic());
        let stats = PyDict::new(py);
        stats.set_item("host_bytes", state.arena.bytes())?;
        stats.set_item("pinned_bytes", state.arena.pinned_bytes())?;
        stats.set_item("copies_in", traffic.copies_in)?;
        stats.set_item("copies_out", traffic.copies_out)?;
        stats.set_item("bytes_in", traffic.bytes_in)?;
        stats.set_item("bytes_out", traffic.bytes_out)?;
        Ok(stats)
    }

    /// The streams of copies in and out, as CUDA's handles; none of a simulated device.
    fn streams(&self) -> Vec<usize> {
        match &self.lock().shuttle {
            Any::Cuda(shuttle) => {
                [Stream::StateIn, Stream::StateOut].map(|stream| shuttle.device().handle(stream)).to_vec()
            }
            Any::Simulated(_) => Vec::new(),
        }
    }

    /// Work on a simulated device that nothing orders.
    fn hazards(&self) -> Vec<String> {
        match &self.lock().shuttle {
            Any::Simulated(shuttle) => shuttle.device().hazards(),
            Any::Cuda(_) => Vec::new(),
        }
    }

    /// Waits until no copy is under way; later calls are errors. Nothing happens in a fork, or a second time.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| {
            let mut state = self.lock();
            if state.is_closed || each!(&state.shuttle, shuttle => shuttle.check_process()).is_err() {
                return Ok(());
            }
            state.is_closed = true;
            each!(&mut state.shuttle, shuttle => shuttle.settle_all().and(shuttle.drain()))
        })?)
    }
}

impl Drop for StateShuttle {
    /// Without the interpreter's lock: it waits for copies.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let drain = || {
            if state.check().is_ok() {
                // A device that has failed copies nothing any more.
                let _ = each!(&mut state.shuttle, shuttle => shuttle.drain());
            }
        };
        let mut drain = Some(drain);
        // Nothing is attached at the very end of a process.
        let attached = Python::try_attach(|py| {
            if let Some(drain) = drain.take() {
                py.detach(drain);
            }
        });
        if attached.is_none()
            && let Some(mut drain) = drain
        {
            drain();
        }
    }
}
