//! `Core`: the optimizer's native half. Steps with the interpreter released, and hands out state as tensors.
//!
//! Over 500 lines: all that Python may call of it is here, and what is done then elsewhere.

use super::dlpack::PyPlane;
use super::errors::WorkerError;
use super::groups::{amsgrad, for_each_parameter};
use super::lanes::{Choices, Engines, Lanes, transfer_named};
use super::overlap::{GroupSettings, increment_version, order_after, submit};
use super::parameters::{BindEntry, Parameters};
use super::pinning::pin;
use super::sharded::Sharded;
use super::tensor::Place;
use crate::engine::{Kept, Moments, NonFinite, Slot, StepOptions, StepReport};
use crate::error::Error;
use crate::kernel::Isa;
use crate::memory::{Arena, Layout, Slab};
use crate::pool::WorkerPool;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple, PyType};
use pyo3::{PyTraverseError, PyVisit};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The native half of an optimizer over parameters in host memory.
#[pyclass(name = "Core", module = "outboard._native")]
pub(super) struct Core {
    // First, to be dropped first: what is under way is completed while all else is there.
    pub(super) engines: Engines,
    pub(super) pool: Option<Arc<WorkerPool>>,
    pub(super) threads: usize,
    pub(super) isa: Isa,
    pub(super) arena: Arena,
    pub(super) parameters: Parameters,
    pub(super) fail_at: Vec<(usize, usize)>,
    /// What Python is to warn of.
    pub(super) warnings: Vec<String>,
    pub(super) counts: DeviceCounts,
    /// The stream of each device in whose order the program goes on: that of its latest `step`.
    pub(super) homes: Vec<(Place, usize)>,
}

/// What has been counted of device work.
#[derive(Default)]
pub(super) struct DeviceCounts {
    pub(super) hook_stall_seconds: f64,
    pub(super) forward_stall_seconds: f64,
    pub(super) eager_updates: u64,
}

/// Pools of this process by thread count: optimizers share their threads, and the last one to go joins them.
pub(super) fn shared_pool(threads: usize) -> crate::Result<Arc<WorkerPool>> {
    static POOLS: Mutex<Vec<(usize, Weak<WorkerPool>)>> = Mutex::new(Vec::new());
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    pools.retain(|(_, pool)| pool.strong_count() > 0);
    let usable = |pool: &Arc<WorkerPool>| pool.threads() == threads && pool.check_process().is_ok();
    if let Some(pool) = pools.iter().filter_map(|(_, pool)| pool.upgrade()).find(usable) {
        return Ok(pool);
    }
    let pool = Arc::new(WorkerPool::new(threads)?);
    pools.push((threads, Arc::downgrade(&pool)));
    Ok(pool)
}

impl Core {
    fn pool(&mut self) -> crate::Result<Arc<WorkerPool>> {
        if let Some(pool) = &self.pool {
            pool.check_process()?;
            return Ok(Arc::clone(pool));
        }
        let pool = shared_pool(self.threads)?;
        self.pool = Some(Arc::clone(&pool));
        Ok(pool)
    }

    /// The engine of a device.
    pub(super) fn engine(&mut self, place: Place) -> crate::Result<Arc<dyn Lanes>> {
        if let Some(engine) = self.engines.get(place) {
            return Ok(engine);
        }
        let engine = self.engines.of(place, self.isa)?;
        self.parameters.lanes = self.engines.all().map(|(_, engine)| Arc::downgrade(engine)).collect();
        Ok(engine)
    }

    /// The stream in whose order a device's tensors are produced and used: torch's current one.
    pub(super) fn stream(&self, py: Python<'_>, place: Place) -> PyResult<usize> {
        match place {
            Place::Cuda(device) => self.parameters.reader.current_stream(py, device),
            Place::Host | Place::Simulated => Ok(0),
        }
    }

    /// Notes what has failed on the devices; an error if anything has.
    pub(super) fn collect_failures(&mut self) -> crate::Result<()> {
        let mut failures = Vec::new();
        for (_, engine) in self.engines.all() {
            for (index, failure) in engine.take_failures() {
                let slot = &mut self.parameters.slots[index];
                if slot.poisoned.is_none() {
                    // A step that failed does not count.
                    slot.set_steps(slot.steps() - 1.0);
                }
                slot.poisoned.get_or_insert_with(|| failure.cause.clone());
                failures.push(failure);
            }
        }
        if failures.is_empty() { Ok(()) } else { Err(Error::Worker(failures)) }
    }
}

/// Refuses to step a slot that is half updated.
pub(super) fn refuse_poisoned(slot: &Slot) -> crate::Result<()> {
    slot.poisoned
        .as_ref()
        .map_or(Ok(()), |cause| Err(Error::Poisoned { parameter: slot.spec.name.to_string(), cause: cause.clone() }))
}

/// What a step did.
#[pyclass(name = "StepOutcome", module = "outboard._native", frozen, get_all)]
pub(super) struct StepOutcome {
    grad_norm: Option<f64>,
    skipped: bool,
    pub(super) parameters: usize,
    elements: usize,
}

#[pymethods]
impl Core {
    #[new]
    fn new(py: Python<'_>, threads: usize, lanes: &Bound<'_, PyDict>) -> PyResult<Self> {
        if threads == 0 {
            return Err(Error::InvalidValue("threads must be at least 1, not 0".into()).into());
        }
        let choices = Choices::from_dict(lanes)?;
        let simulate = choices.simulate.is_some();
        Ok(Self {
            engines: Engines::new(choices),
            pool: None,
            threads,
            isa: Isa::current()?,
            arena: Arena::default(),
            parameters: Parameters::new(py, simulate)?,
            fail_at: Vec::new(),
            warnings: Vec::new(),
            counts: DeviceCounts::default(),
            homes: Vec::new(),
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.parameters.bindings.iter().try_for_each(|binding| visit.call(&binding.parameter))
    }

    fn __clear__(&mut self) {
        self.parameters.clear();
    }

    /// Whether a parameter has a slot.
    fn is_bound(&self, parameter: &Bound<'_, PyAny>) -> bool {
        self.parameters.find(parameter).is_some()
    }

    /// The parameters of the groups that have a gradient and no slot, or lack the plane that amsgrad needs; with `all`,
    /// those without a gradient that want one (`requires_grad`), too.
    fn unbound<'py>(&self, groups: &Bound<'py, PyList>, all: bool) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let py = groups.py();
        let mut missing = Vec::new();
        for_each_parameter(groups, |group, parameter| {
            let slot = self.parameters.find(&parameter).map(|slot| &self.parameters.slots[slot]);
            if slot.is_some_and(|slot| slot.spec.amsgrad) || (slot.is_some() && !amsgrad(group)?) {
                return Ok(());
            }
            let wanted = !parameter.getattr(intern!(py, "grad"))?.is_none()
                || (all && parameter.getattr(intern!(py, "requires_grad"))?.is_truthy()?);
            if wanted {
                missing.push(parameter);
            }
            Ok(())
        })?;
        Ok(missing)
    }

    /// Makes state for parameters of the groups, all zeros, in a slab per device: for each a tuple of parameter, name, number
    /// in the optimizer, whether the master is full, whether the moments are bf16, amsgrad, and None or the planes' tensors
    /// by name, for state that is to be on the device. Nothing is made if one is refused.
    fn bind(&mut self, groups: &Bound<'_, PyList>, entries: Vec<BindEntry<'_>>) -> PyResult<()> {
        let pool = self.pool()?;
        let Self { engines, parameters, arena, isa, warnings, .. } = self;
        let mut pinned = arena.pinned_bytes();
        let offload = engines.choices.offload;
        let mut pin = |place: Place, slab: &Slab| pin(engines, *isa, place, slab, &mut pinned, warnings);
        parameters.bind(groups, entries, arena, &pool, offload, &mut pin)?;
        parameters.lanes = engines.all().map(|(_, engine)| Arc::downgrade(engine)).collect();
        Ok(())
    }

    /// Chooses how the GPU lanes meet the state, for engines that are still to be made.
    fn set_transfer(&mut self, transfer: &str) {
        self.engines.choices.lanes.transfer = transfer_named(transfer);
    }

    /// What is to be warned of since the last call.
    fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// The class that parameters have while their update is under way.
    fn set_pending_type(&mut self, pending_type: Bound<'_, PyType>) {
        self.parameters.reader.set_pending_type(pending_type.unbind());
    }

    /// The class of tensors that are spread over ranks, the ones that such a parameter has while its update is under way and
    /// its gradient while it is watched, and the descriptor of the tensor within.
    fn set_sharded_types(
        &mut self,
        kind: Bound<'_, PyType>,
        pending: Bound<'_, PyType>,
        watched: Bound<'_, PyType>,
        local: Bound<'_, PyAny>,
    ) {
        let types = [kind, pending, watched].map(Bound::unbind);
        self.parameters.reader.set_sharded(Sharded::new(types, local.unbind()));
    }

    /// Takes a parameter and its gradient for an update that begins at once, in a hook. Whether it was taken: not one in host
    /// memory, or whose strides ask for copies that `step` makes.
    fn update_one<'py>(
        slf: &Bound<'py, Self>,
        parameter: &Bound<'py, PyAny>,
        grad: &Bound<'py, PyAny>,
        settings: &GroupSettings,
        seed: u64,
    ) -> PyResult<bool> {
        let Some(begun) = slf.borrow_mut().begin_update(parameter, grad, settings, seed)? else { return Ok(false) };
        submit(slf, begun)?;
        Ok(true)
    }

    /// Takes gradients of parameters to host memory, from where `step` uses them. Returns the parameters whose gradients
    /// stay on the device: their dtypes or strides ask for more than a copy.
    fn offload_now<'py>(
        slf: &Bound<'py, Self>,
        parameters: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let begun = slf.borrow_mut().begin_offloads(slf.py(), parameters)?;
        submit(slf, begun)
    }

    /// Lets torch's current stream of each device wait for the weights of these parameters.
    fn wait(slf: &Bound<'_, Self>, parameters: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        order_after(slf, parameters)
    }

    /// Forgets all gradients that were taken to host memory.
    fn drop_offloaded(&mut self) {
        for offloaded in self.parameters.bindings.iter_mut().filter_map(|binding| binding.offloaded.as_mut()) {
            offloaded.count = 0;
        }
    }

    /// Waits until every update that was begun is complete, on the devices and in host memory.
    fn synchronize(slf: &Bound<'_, Self>) -> PyResult<()> {
        // Not borrowed while it waits: other threads may ask for something else.
        let engines: Vec<Arc<dyn Lanes>> = slf.borrow().engines.all().map(|(_, engine)| Arc::clone(engine)).collect();
        if engines.is_empty() {
            return Ok(());
        }
        slf.py().detach(|| engines.iter().try_for_each(|engine| engine.synchronize()))?;
        Ok(slf.borrow_mut().collect_failures()?)
    }

    /// Completes every update that was begun and ends the dispatchers; the next device step starts new ones.
    fn close(slf: &Bound<'_, Self>) {
        let engines = slf.borrow_mut().engines.take();
        slf.py().detach(|| drop(engines));
    }

    /// The order in which weights are used by a forward: smaller is earlier.
    fn set_next_use(&mut self, parameter: &Bound<'_, PyAny>, order: u64) -> PyResult<()> {
        let slot = self.parameters.slot_of(parameter)?;
        self.parameters.next_use[slot] = order;
        Ok(())
    }

    /// Starts or stops recording when each chunk was under way.
    fn record_timeline(&mut self, record: bool) {
        self.engines.record_timeline(record);
    }

    /// Starts or stops showing each chunk as a range in profilers.
    fn emit_ranges(&mut self, emit: bool) -> PyResult<()> {
        if emit && !crate::cuda::has_ranges() {
            let message = "this build of outboard has no NVTX: build with CUDA's compiler and nvidia-nvtx beside it";
            return Err(Error::Cuda(message.into()).into());
        }
        self.engines.emit_ranges(emit);
        Ok(())
    }

    /// What has been recorded: track, label, start and end, in seconds before now.
    fn take_timeline(&mut self) -> PyResult<Vec<(String, String, f64, f64)>> {
        let mut all = Vec::new();
        for (_, engine) in self.engines.all() {
            let (stretches, origin) = engine.take_timeline()?;
            let now = origin.elapsed().as_secs_f64();
            let stretches = stretches.into_iter();
            all.extend(stretches.map(|(track, label, start, end)| (track.to_owned(), label, start - now, end - now)));
        }
        Ok(all)
    }

    /// The parameters whose planes have been reordered since this was last asked: their state tensors have other strides now.
    fn take_relaid(&mut self, py: Python<'_>) -> Vec<Py<PyAny>> {
        let Parameters { relaid, bindings, .. } = &mut self.parameters;
        std::mem::take(relaid).into_iter().map(|slot| bindings[slot].parameter.clone_ref(py)).collect()
    }

    /// Steps every parameter of the groups that has a gradient. All of them must be bound.
    /// `attached`: returns once engines have taken over, with parameters on devices marked as pending. `lets_go`: their
    /// gradients are dropped once they are taken, or skipped. `combine`, where parameters are spread over ranks, is called
    /// with those that have a gradient here and the sum of squares of each; it returns the names of all that the norm is of,
    /// and their sums.
    #[pyo3(signature = (groups, *, max_grad_norm, compute_grad_norm, nonfinite, grad_scale, found_inf, seed, chunk_elems,
        attached, lets_go, combine=None))]
    #[allow(clippy::fn_params_excessive_bools)] // keywords, of one caller
    fn step(
        &mut self,
        py: Python<'_>,
        groups: &Bound<'_, PyList>,
        max_grad_norm: Option<f64>,
        compute_grad_norm: bool,
        nonfinite: &str,
        grad_scale: Option<f32>,
        found_inf: bool,
        seed: u64,
        chunk_elems: usize,
        attached: bool,
        lets_go: bool,
        combine: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<StepOutcome> {
        let nonfinite = match nonfinite {
            "propagate" => NonFinite::Propagate,
            "skip" => NonFinite::Skip,
            "raise" => NonFinite::Raise,
            other => {
                let allowed = "'propagate', 'skip' or 'raise'";
                return Err(Error::InvalidValue(format!("nonfinite must be {allowed}, not {other:?}")).into());
            }
        };
        let options = StepOptions {
            chunk_elems,
            max_grad_norm,
            compute_grad_norm,
            nonfinite,
            grad_scale,
            found_inf,
            seed,
            fail_at: std::mem::take(&mut self.fail_at),
        };
        let pool = self.pool()?;
        if !lets_go {
            // An attachment has just asked: what has failed since is told by the next call, with these gradients taken.
            self.collect_failures()?;
        }
        // Also where only others have gradients: nobody is to train on beside a parameter that is half updated.
        self.check_poisoned()?;
        let mut jobs = self.parameters.collect(groups, &self.arena, grad_scale.is_some())?;
        for (index, job) in jobs.iter_mut().enumerate() {
            if let Some(job) = job.as_mut().filter(|job| job.place() != Place::Host) {
                let parameter = self.parameters.bindings[index].parameter.bind(py).clone();
                self.parameters.ready_for_device(index, &parameter, job)?;
            }
        }
        let stepped = jobs.iter().zip(&self.parameters.bindings).filter(|(job, _)| job.is_some());
        let written = PyList::new(py, stepped.map(|(_, binding)| &binding.parameter))?;
        if grad_scale.is_some() {
            jobs.iter().flatten().try_for_each(|job| written.append(&job.keep))?;
        }
        let mut on_devices = Vec::new();
        if attached || lets_go {
            let places = jobs.iter().zip(&self.parameters.bindings);
            let taken = places.filter(|(job, _)| job.as_ref().is_some_and(|job| job.place() != Place::Host));
            on_devices.extend(taken.map(|(_, binding)| binding.parameter.clone_ref(py)));
        }
        if attached {
            // Before anything begins: other threads may read weights as soon as the interpreter is let go.
            on_devices.iter().try_for_each(|parameter| self.parameters.reader.mark(parameter.bind(py)))?;
        }
        let result = self.run(py, &pool, jobs, options, attached, combine);
        if attached {
            let places: Vec<Place> = self.engines.all().map(|(place, _)| place).collect();
            self.homes =
                places.into_iter().map(|place| Ok((place, self.stream(py, place)?))).collect::<PyResult<_>>()?;
        }
        let has_failed = result.as_ref().is_err_and(|error| error.is_instance_of::<WorkerError>(py));
        if lets_go && (result.is_ok() || has_failed) {
            let grad = intern!(py, "grad");
            on_devices.iter().try_for_each(|parameter| parameter.bind(py).setattr(grad, py.None()))?;
        }
        if has_failed || result.as_ref().is_ok_and(|report| !report.skipped) {
            // A backward through a graph that saved the old values must fail, as it does after torch's own step.
            increment_version(py, &written)?;
        }
        let report = result?;
        let StepReport { grad_norm, skipped, parameters, elements } = report;
        Ok(StepOutcome { grad_norm, skipped, parameters, elements })
    }

    /// A parameter's planes by torch's names, `step` first.
    fn planes(&self, parameter: &Bound<'_, PyAny>) -> PyResult<Vec<(&'static str, PyPlane)>> {
        let slot = &self.parameters.slots[self.parameters.slot_of(parameter)?];
        let layout = || slot.spec.layout.clone();
        let mut planes = vec![("step", PyPlane::new(&slot.step, Layout::row_major(&[])))];
        if self.parameters.bindings[self.parameters.slot_of(parameter)?].resident.is_some() {
            return Ok(planes); // the others are tensors that Python has made
        }
        macro_rules! moments {
            ($moments:expr) => {{
                planes.push(("exp_avg", PyPlane::new(&$moments.exp_avg, layout())));
                planes.push(("exp_avg_sq", PyPlane::new(&$moments.exp_avg_sq, layout())));
                if let Some(plane) = &$moments.max_exp_avg_sq {
                    planes.push(("max_exp_avg_sq", PyPlane::new(plane, layout())));
                }
            }};
        }
        match &slot.moments {
            Moments::F32(moments) => moments!(moments),
            Moments::Bf16(moments) => moments!(moments),
        }
        match &slot.kept {
            Kept::Nothing => {}
            Kept::Residual(plane) => planes.push(("residual", PyPlane::new(plane, layout()))),
            Kept::Master(plane) => planes.push(("master", PyPlane::new(plane, layout()))),
        }
        Ok(planes)
    }

    /// Copies the fp32 values behind a parameter into `out`, an fp32 tensor of its shape.
    fn read_master(
        &mut self,
        parameter: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.get_master(parameter, weight, out)
    }

    /// Sets `weight` (the parameter or its copy in host memory) and residual or master from fp32 values. With
    /// `write_weight=False` the weight stays as it is.
    fn write_master(
        &mut self,
        parameter: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        write_weight: bool,
    ) -> PyResult<()> {
        self.set_master(parameter, weight, values, write_weight)
    }

    /// Sets a full bf16 master from the weight as it is and residuals: an fp32 tensor that holds them as numbers.
    fn load_residual(
        &mut self,
        parameter: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        residuals: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.set_residual(parameter, weight, residuals)
    }

    /// Residuals to zero, or masters to the weight: for a checkpoint that has neither.
    fn clear_master(&mut self, parameter: &Bound<'_, PyAny>, weight: &Bound<'_, PyAny>) -> PyResult<()> {
        self.zero_master(parameter, weight)
    }

    /// A parameter's state back to zeros, as if it had never been stepped; cures a poisoned one.
    fn reset(&mut self, parameter: &Bound<'_, PyAny>) -> PyResult<()> {
        let slot = self.parameters.slot_of(parameter)?;
        self.parameters.slots[slot].reset();
        self.engines.all().for_each(|(_, engine)| engine.heal(slot));
        Ok(())
    }

    /// Declares a parameter's state whole again, after all of it has been loaded.
    fn heal(&mut self, parameter: &Bound<'_, PyAny>) -> PyResult<()> {
        let slot = self.parameters.slot_of(parameter)?;
        self.parameters.slots[slot].poisoned = None;
        self.engines.all().for_each(|(_, engine)| engine.heal(slot));
        Ok(())
    }

    /// Refuses to go on in a fork of the process that made the state.
    fn check_process(&self) -> PyResult<()> {
        Ok(self.pool.as_ref().map_or(Ok(()), |pool| pool.check_process())?)
    }

    /// Whether a parameter's state has another tensor in a plane's place, or one with other memory, than the plane's own.
    /// `states` are those of class `kind`, whose `_handed_out` has the tensor and its address by name.
    fn has_foreign(&self, states: &Bound<'_, PyDict>, kind: &Bound<'_, PyType>) -> PyResult<bool> {
        let handed_out = intern!(states.py(), "_handed_out");
        for (_, state) in states.iter().filter(|(_, state)| state.get_type().is(kind)) {
            // SAFETY of the order: nothing below runs Python code, so neither dict changes while it is read.
            let held = state.cast::<PyDict>()?;
            for (name, known) in state.getattr(handed_out)?.cast::<PyDict>()?.iter() {
                let known = known.cast::<PyTuple>()?;
                let (tensor, address) = (known.get_item(0)?, known.get_item(1)?);
                let is_own = held.get_item(name)?.is_some_and(|found| found.is(&tensor));
                if !is_own || self.parameters.reader.address(&tensor)? != address.extract::<usize>()? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Whether an address is one of this optimizer's state.
    fn holds(&self, address: usize) -> bool {
        self.arena.holds(address, address.saturating_add(1))
    }

    /// Refuses to export state of which a part is half updated.
    fn check_poisoned(&self) -> PyResult<()> {
        let poisoned = self.parameters.slots.iter().find_map(|slot| Some((&slot.spec.name, slot.poisoned.as_ref()?)));
        poisoned.map_or(Ok(()), |(parameter, cause)| {
            Err(Error::Poisoned { parameter: parameter.to_string(), cause: cause.clone() }.into())
        })
    }

    /// Makes the chunk of the next step that holds this element of this parameter panic. For tests of what follows.
    fn fail_next_step(&mut self, parameter: &Bound<'_, PyAny>, element: usize) -> PyResult<()> {
        self.fail_at.push((self.parameters.slot_of(parameter)?, element));
        Ok(())
    }

    /// Counts and sizes, for `stats()`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.describe(py)
    }
}
