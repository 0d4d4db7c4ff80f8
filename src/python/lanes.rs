//! The engines of an optimizer's devices, and the pointer edge where its slots, weights and gradients become spans that
//! they may work on after the call has returned.

use super::binding::{Offloaded, Resident, Tensors};
use super::core::shared_pool;
use super::tensor::{DType, Place};
use crate::cuda::CudaDevice;
use crate::device::simulated::{Schedule, SimulatedDevice};
use crate::device::{Device, DeviceGrad};
use crate::engine::lanes::{
    Aside, Engine, Gradient, Home, LaneOptions, LaneStats, Offload, Order, Part, Planes, Recipe, Request, Stretch, Sum,
    Transfer,
};
use crate::engine::{Kept, Moments, Slot};
use crate::error::{Error, Failure, Result};
use crate::kernel::{Constants, GradDType, Isa, Noise};
use crate::memory::{DeviceSpan, HostSpan, Slab};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Arc;
use std::time::Instant;

/// An engine, whatever its device.
pub(super) trait Lanes: Send + Sync {
    fn submit(&self, requests: Vec<Request>, stream: usize) -> Result<f64>;
    fn submit_with(&self, requests: Vec<Request>, stream: usize, aside: Aside<'_>) -> Result<f64>;
    fn wait(&self, slots: &[usize], stream: usize) -> Result<f64>;
    fn wait_with(&self, slots: &[usize], stream: usize, aside: Aside<'_>) -> Result<f64>;
    fn wait_on_host(&self, slots: &[usize]) -> Result<()>;
    fn synchronize(&self) -> Result<()>;
    fn take_failures(&self) -> Vec<(usize, Failure)>;
    fn heal(&self, slot: usize);
    fn squared_norms(&self, grads: &[DeviceGrad], scale: f32, stream: usize) -> Result<Vec<f64>>;
    fn mark_issue(&self);
    fn stats(&self) -> Result<LaneStats>;
    fn record_timeline(&self, record: bool);
    fn take_timeline(&self) -> Result<(Vec<Stretch>, Instant)>;
    fn emit_ranges(&self, emit: bool);
    fn fail_at(&self, slot: usize, element: usize);
    fn pin(&self, slab: &Slab) -> Result<()>;
}

impl<D: Device> Lanes for Engine<D> {
    fn submit(&self, requests: Vec<Request>, stream: usize) -> Result<f64> {
        Engine::submit(self, requests, stream, false)
    }
    fn submit_with(&self, requests: Vec<Request>, stream: usize, aside: Aside<'_>) -> Result<f64> {
        Engine::submit_with(self, requests, stream, Some(aside))
    }
    fn wait_with(&self, slots: &[usize], stream: usize, aside: Aside<'_>) -> Result<f64> {
        Engine::wait_with(self, slots, stream, aside)
    }
    fn wait(&self, slots: &[usize], stream: usize) -> Result<f64> {
        Engine::wait(self, slots, stream)
    }
    fn wait_on_host(&self, slots: &[usize]) -> Result<()> {
        Engine::wait_on_host(self, slots)
    }
    fn synchronize(&self) -> Result<()> {
        Engine::synchronize(self)
    }
    fn take_failures(&self) -> Vec<(usize, Failure)> {
        Engine::take_failures(self)
    }
    fn heal(&self, slot: usize) {
        Engine::heal(self, slot);
    }
    fn squared_norms(&self, grads: &[DeviceGrad], scale: f32, stream: usize) -> Result<Vec<f64>> {
        Engine::squared_norms(self, grads, scale, stream)
    }
    fn mark_issue(&self) {
        Engine::mark_issue(self);
    }
    /// Not in a fork: a lock that the dispatcher held there is held for good.
    fn stats(&self) -> Result<LaneStats> {
        self.check_process()?;
        Ok(Engine::stats(self))
    }
    fn record_timeline(&self, record: bool) {
        Engine::record_timeline(self, record);
    }
    fn take_timeline(&self) -> Result<(Vec<Stretch>, Instant)> {
        self.check_process()?;
        Ok(Engine::take_timeline(self))
    }
    fn emit_ranges(&self, emit: bool) {
        Engine::emit_ranges(self, emit);
    }
    fn fail_at(&self, slot: usize, element: usize) {
        Engine::fail_at(self, slot, element);
    }
    fn pin(&self, slab: &Slab) -> Result<()> {
        slab.pin(|start, bytes| self.device().pin(start, bytes))
    }
}

/// What the user has chosen for the lanes.
#[derive(Clone, Debug)]
pub(super) struct Choices {
    pub(super) lanes: LaneOptions,
    /// Whether to pin state: `None` where it pays.
    pub(super) pin: Option<bool>,
    pub(super) max_pinned_bytes: usize,
    /// Worker threads of the lanes.
    pub(super) threads: usize,
    /// Whether gradients may be offloaded, and if so whether several are added up.
    pub(super) offload: Option<bool>,
    /// The seed of the simulated device that takes the place of real ones.
    pub(super) simulate: Option<u64>,
    /// What the simulated device lets be pinned.
    pub(super) simulated_pinnable_bytes: Option<usize>,
}

impl Choices {
    /// From the constructor's options, which Python has checked.
    pub(super) fn from_dict(options: &Bound<'_, PyDict>) -> PyResult<Self> {
        let get = |key: &str| -> PyResult<Bound<'_, PyAny>> {
            options.get_item(key)?.ok_or_else(|| Error::InvalidValue(format!("no lane option {key}")).into())
        };
        let mode: String = get("mode")?.extract()?;
        let transfer: String = get("transfer")?.extract()?;
        let lanes = LaneOptions {
            gpu: mode != "cpu",
            cpu: mode != "gpu",
            transfer: transfer_named(&transfer),
            device_ring_bytes: get("device_ring_bytes")?.extract()?,
            host_ring_bytes: get("host_ring_bytes")?.extract()?,
            chunk_elems: get("chunk_elems")?.extract()?,
            max_waiting_bytes: get("max_waiting_bytes")?.extract()?,
            pin_ring: true,
            device_depth: get("device_depth")?.extract()?,
            host_depth: get("host_depth")?.extract()?,
            fifo: get("fifo")?.extract()?,
        };
        let (pin, max_pinned_bytes) = (get("pin")?.extract()?, get("max_pinned_bytes")?.extract()?);
        let threads = get("threads")?.extract()?;
        let offload = get("offload")?.extract()?;
        let simulate = get("simulate")?.extract()?;
        let simulated_pinnable_bytes = get("simulated_pinnable_bytes")?.extract()?;
        Ok(Self { lanes, pin, max_pinned_bytes, threads, offload, simulate, simulated_pinnable_bytes })
    }

    /// Whether state is to be pinned where it can be.
    pub(super) fn pins_state(&self) -> bool {
        // The CPU lane alone reads state where it is.
        self.pin.unwrap_or(self.lanes.gpu)
    }
}

/// The engines by device, made when they are first needed.
pub(super) struct Engines {
    pub(super) choices: Choices,
    by_place: Vec<(Place, Arc<dyn Lanes>)>,
    /// Whether to record when chunks are under way, also of engines that are still to be made.
    record_timeline: bool,
    /// Whether to show them in profilers.
    emit_ranges: bool,
}

impl Engines {
    pub(super) fn new(choices: Choices) -> Self {
        Self { choices, by_place: Vec::new(), record_timeline: false, emit_ranges: false }
    }

    /// The engine of a device.
    pub(super) fn of(&mut self, place: Place, isa: Isa) -> Result<Arc<dyn Lanes>> {
        if let Some(engine) = self.get(place) {
            return Ok(engine);
        }
        let (pool, options) = (shared_pool(self.choices.threads)?, self.choices.lanes.clone());
        let engine: Arc<dyn Lanes> = match place {
            Place::Host => return Err(Error::InvalidValue("host memory has no lanes".into())),
            Place::Cuda(ordinal) => {
                Arc::new(Engine::new(Arc::new(CudaDevice::new(ordinal.cast_unsigned())?), pool, isa, options)?)
            }
            Place::Simulated => {
                let schedule = Schedule::Random { seed: self.choices.simulate.unwrap_or(0) };
                let device = SimulatedDevice::new(schedule)?;
                if let Some(bytes) = self.choices.simulated_pinnable_bytes {
                    device.set_pinnable_bytes(bytes);
                }
                Arc::new(Engine::new(Arc::new(device), pool, isa, options)?)
            }
        };
        engine.record_timeline(self.record_timeline);
        engine.emit_ranges(self.emit_ranges);
        self.by_place.push((place, Arc::clone(&engine)));
        Ok(engine)
    }

    /// Starts or stops recording when chunks are under way.
    pub(super) fn record_timeline(&mut self, record: bool) {
        self.record_timeline = record;
        self.all().for_each(|(_, engine)| engine.record_timeline(record));
    }

    /// Starts or stops showing chunks in profilers.
    pub(super) fn emit_ranges(&mut self, emit: bool) {
        self.emit_ranges = emit;
        self.all().for_each(|(_, engine)| engine.emit_ranges(emit));
    }

    /// The engine of a device, if there is one.
    pub(super) fn get(&self, place: Place) -> Option<Arc<dyn Lanes>> {
        self.by_place.iter().find(|(known, _)| *known == place).map(|(_, engine)| Arc::clone(engine))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (Place, &Arc<dyn Lanes>)> {
        self.by_place.iter().map(|(place, engine)| (*place, engine))
    }

    /// Gives the engines away: they complete everything and end when they are dropped.
    pub(super) fn take(&mut self) -> Vec<(Place, Arc<dyn Lanes>)> {
        std::mem::take(&mut self.by_place)
    }
}

/// The transfer of this name; what is not chosen is staged.
pub(super) fn transfer_named(name: &str) -> Transfer {
    if name == "zero_copy" { Transfer::ZeroCopy } else { Transfer::Staged }
}

impl Drop for Engines {
    /// Without the interpreter's lock: letting a tensor go may need it, and the dispatchers let tensors go.
    fn drop(&mut self) {
        let mut engines = Some(self.take());
        // Nothing is attached at the very end of a process.
        let _ = Python::try_attach(|py| py.detach(|| drop(engines.take())));
    }
}

fn grad_dtype(dtype: DType) -> GradDType {
    match dtype {
        DType::F32 => GradDType::F32,
        DType::Bf16 => GradDType::Bf16,
        DType::F16 => GradDType::F16,
    }
}

/// A gradient for the norm.
pub(super) fn device_grad(address: usize, len: usize, dtype: DType) -> DeviceGrad {
    DeviceGrad { address, len, dtype: grad_dtype(dtype) }
}

/// What a device update needs beside its slot and its tensors.
pub(super) struct Terms {
    pub(super) index: usize,
    pub(super) steps: f64,
    pub(super) constants: Constants,
    pub(super) seed: u64,
    pub(super) amsgrad: bool,
    pub(super) grad_scale: Option<f32>,
    pub(super) write_unscaled: bool,
    pub(super) next_use: u64,
}

/// The request for one slot's update.
///
/// # Safety
/// `tensors` were read under this attachment to the interpreter; weight and gradient are contiguous in the order of the slot's
/// planes, do not overlap, and nobody touches the planes, or (but in the device's stream order) weight and gradient, until
/// the update has landed.
pub(super) unsafe fn request(
    slot: &mut Slot,
    resident: Option<&Resident>,
    offloaded: Option<&mut Offloaded>,
    tensors: Tensors,
    terms: &Terms,
) -> Request {
    let len = slot.spec.layout.numel();
    let recipe = Recipe {
        slot: terms.index,
        name: Arc::clone(&slot.spec.name),
        weight_kind: slot.spec.weight,
        grad_dtype: grad_dtype(tensors.grad_dtype),
        moments: slot.spec.moments,
        constants: terms.constants,
        noise: Noise::new(terms.seed, terms.steps as u64, slot.spec.number),
        grad_scale: terms.grad_scale,
    };
    let home = match resident {
        // SAFETY: the caller's promise, of planes that are tensors on the device.
        Some(resident) => Home::Device(unsafe { resident_planes(slot, resident, terms.amsgrad) }),
        // SAFETY: the caller's promise.
        None => Home::Host(unsafe { host_planes(slot, terms.amsgrad) }),
    };
    // SAFETY: the caller's promise.
    let weight = unsafe { DeviceSpan::new(tensors.weight, len * slot.spec.weight.live_bytes()) };
    let grad = match offloaded {
        // SAFETY: the caller's promise; the plane's next use is ordered behind this one, as the slot's.
        Some(offloaded) => Gradient::Host(unsafe { offloaded.plane.lend() }),
        // SAFETY: the caller's promise.
        None => Gradient::Device(unsafe { DeviceSpan::new(tensors.grad, len * tensors.grad_dtype.size()) }),
    };
    let part = Part { recipe, len, weight, grad, home };
    let keep = Box::new(tensors.holds);
    let order = Order::Update(part);
    Request { order, next_use: terms.next_use, write_unscaled: terms.write_unscaled, keep }
}

/// The request that brings a slot's gradient to host memory.
///
/// # Safety
/// As [`request`], for the gradient and its place in host memory.
pub(super) unsafe fn offload_request(
    index: usize,
    slot: &Slot,
    offloaded: &mut Offloaded,
    tensors: Tensors,
) -> Request {
    let len = slot.spec.layout.numel();
    let sum = match (offloaded.dtype == tensors.grad_dtype, offloaded.count) {
        (true, 0) => Sum::Keep,
        (_, 0) => Sum::Set,
        _ => Sum::Add,
    };
    let offload = Offload {
        slot: index,
        name: Arc::clone(&slot.spec.name),
        grad_dtype: grad_dtype(tensors.grad_dtype),
        len,
        // SAFETY: the caller's promise.
        grad: unsafe { DeviceSpan::new(tensors.grad, len * tensors.grad_dtype.size()) },
        // SAFETY: the caller's promise; what is done with the plane before and after is ordered by the slot.
        to: unsafe { offloaded.plane.lend() },
        sum,
    };
    offloaded.count += 1;
    let keep = Box::new(tensors.holds);
    Request { order: Order::Offload(offload), next_use: 0, write_unscaled: false, keep }
}

/// # Safety
/// As [`request`].
unsafe fn resident_planes(slot: &Slot, resident: &Resident, amsgrad: bool) -> Planes<DeviceSpan> {
    let (len, spec) = (slot.spec.layout.numel(), &slot.spec);
    let moment = len * spec.moments.bytes();
    // SAFETY: the caller's promise; the binding keeps the tensors.
    let span = |address: usize, bytes: usize| unsafe { DeviceSpan::new(address, bytes) };
    let maybe = |address: usize, bytes: usize| (address != 0).then(|| span(address, bytes));
    Planes {
        exp_avg: span(resident.exp_avg, moment),
        exp_avg_sq: span(resident.exp_avg_sq, moment),
        max_exp_avg_sq: maybe(resident.max_exp_avg_sq, moment).filter(|_| amsgrad),
        kept: maybe(resident.kept, len * spec.weight.kept_bytes()),
    }
}

/// # Safety
/// As [`request`].
unsafe fn host_planes(slot: &mut Slot, amsgrad: bool) -> Planes<HostSpan> {
    // SAFETY: the caller's promise.
    unsafe {
        let kept = match &mut slot.kept {
            Kept::Nothing => None,
            Kept::Residual(plane) => Some(plane.lend()),
            Kept::Master(plane) => Some(plane.lend()),
        };
        macro_rules! planes {
            ($moments:expr) => {
                Planes {
                    exp_avg: $moments.exp_avg.lend(),
                    exp_avg_sq: $moments.exp_avg_sq.lend(),
                    max_exp_avg_sq: $moments.max_exp_avg_sq.as_mut().filter(|_| amsgrad).map(|plane| plane.lend()),
                    kept,
                }
            };
        }
        match &mut slot.moments {
            Moments::F32(moments) => planes!(moments),
            Moments::Bf16(moments) => planes!(moments),
        }
    }
}
