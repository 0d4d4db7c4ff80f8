//! `Core`: the optimizer's native half. Maps parameters to slots, checks and borrows their tensors, and steps with the
//! interpreter released.

use super::dlpack::PyPlane;

use super::tensor::{DType, HostTensor, Role, Shape, TensorReader};
use crate::engine::{
    self, Kept, MomentDType, Moments, NonFinite, Slot, SlotSpec, StepOptions, StepReport, Update,
    WeightKind, WeightView,
};
use crate::error::Error;
use crate::kernel::{AdamWConfig, Isa};
use crate::memory::{Arena, Layout, Walks, share_memory};
use crate::pool::WorkerPool;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What is remembered of a parameter between steps.
struct Binding {
    /// The parameter itself: kept alive, so that its address names it.
    parameter: Py<PyAny>,
    /// Address of its elements when its overlaps were last checked.
    data: usize,
    layout: Layout,
    walks: Walks,
    /// The layout and walks of its latest gradient, if they are not the parameter's own.
    grad: Option<(Layout, Walks)>,
}

impl Binding {
    /// The walks of a gradient of this shape.
    fn grad_walks(&mut self, state: &Layout, shape: &Shape<'_>) -> Walks {
        if shape.is(&self.layout) {
            return self.walks.clone();
        }
        match &self.grad {
            Some((layout, walks)) if shape.is(layout) => walks.clone(),
            _ => {
                let layout = shape.layout();
                let walks = Walks::new(state, &layout);
                self.grad = Some((layout, walks.clone()));
                walks
            }
        }
    }
}

/// A parameter's share of a step, read and checked.
struct Job<'py> {
    weight: HostTensor,
    grad: HostTensor,
    grad_walks: Walks,
    /// Keeps the gradient's memory while the interpreter is released.
    _grad: Bound<'py, PyAny>,
    config: AdamWConfig,
}

/// The native half of an optimizer over parameters in host memory.
#[pyclass(name = "Core", module = "outboard._native")]
pub(super) struct Core {
    pool: Option<Arc<WorkerPool>>,
    threads: usize,
    isa: Isa,
    arena: Arena,
    reader: TensorReader,
    slots: Vec<Slot>,
    bindings: Vec<Binding>,
    /// From a parameter's address to its slot.
    index: HashMap<usize, usize>,
    fail_at: Option<(usize, usize)>,
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

fn address(object: &Bound<'_, PyAny>) -> usize {
    object.as_ptr() as usize
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

    fn slot_of(&self, parameter: &Bound<'_, PyAny>) -> PyResult<usize> {
        let not_bound = || Error::InvalidValue("the parameter has no state in this optimizer".into()).into();
        self.index.get(&address(parameter)).copied().ok_or_else(not_bound)
    }

    /// Reads a bound parameter and brings its slot up to date with its strides.
    fn weight(&mut self, index: usize, parameter: &Bound<'_, PyAny>, relaid: &mut Vec<usize>) -> PyResult<HostTensor> {
        let (spec, binding) = (&self.slots[index].spec, &self.bindings[index]);
        let name = || spec.name.clone();
        let (weight, changed) = self.reader.read(parameter, Role::Parameter, &name, |weight, shape| {
            Ok((weight, (!shape.is(&binding.layout)).then(|| shape.layout())))
        })?;
        let bound = dtype_of(spec.weight);
        if weight.dtype != bound {
            let (name, was, is) = (&spec.name, bound.name(), weight.dtype.name());
            let message = format!("{name}: its state was made for {was} and it is {is} now; build a new optimizer for it");
            return Err(Error::UnsupportedType(message).into());
        }
        if let Some(layout) = changed {
            self.follow(index, layout, relaid)?;
        }
        Ok(weight)
    }

    /// Takes over a parameter's new strides; its planes are reordered if they no longer have its order.
    fn follow(&mut self, index: usize, layout: Layout, relaid: &mut Vec<usize>) -> PyResult<()> {
        let (slot, binding) = (&mut self.slots[index], &mut self.bindings[index]);
        if layout.sizes != slot.spec.layout.sizes {
            let (name, was, is) = (&slot.spec.name, &slot.spec.layout.sizes, &layout.sizes);
            let message = format!("{name}: its state has shape {was:?} and it has shape {is:?} now");
            return Err(Error::InvalidValue(message).into());
        }
        if layout.overlaps_itself() {
            return Err(overlaps_itself(&slot.spec.name));
        }
        let state = layout.dense_like();
        if state != slot.spec.layout {
            slot.follow(state)?;
            relaid.push(index);
        }
        binding.walks = Walks::new(&slot.spec.layout, &layout);
        binding.layout = layout;
        binding.grad = None;
        Ok(())
    }

    /// Looks where bound parameters are now: memory that one has left may be another's.
    fn refresh_addresses(&mut self, py: Python<'_>) {
        for (binding, slot) in self.bindings.iter_mut().zip(&self.slots) {
            let name = || slot.spec.name.clone();
            let read = |weight: HostTensor, _: &Shape<'_>| Ok(weight.data);
            // One that cannot be read any more is refused when it is stepped.
            if let Ok(data) = self.reader.read(binding.parameter.bind(py), Role::Parameter, &name, read) {
                binding.data = data;
            }
        }
    }

    /// Refuses parameters that share memory, by name.
    fn check_overlaps(&self, tensors: &[(usize, usize)]) -> crate::Result<()> {
        let mut order: Vec<(usize, usize)> = tensors.to_vec();
        order.sort_unstable_by_key(|&(_, data)| data);
        let shape = |index: usize| (&self.bindings[index].layout, dtype_size(self.slots[index].spec.weight));
        // Compare each with those before it whose spans reach it.
        let mut reaching: Vec<(usize, usize, usize)> = Vec::new();
        for (index, data) in order {
            let (layout, size) = shape(index);
            reaching.retain(|&(_, _, end)| end > data);
            for &(other, other_data, _) in &reaching {
                let (other_layout, other_size) = shape(other);
                if share_memory((data, layout, size), (other_data, other_layout, other_size)) {
                    let (a, b) = (&self.slots[other.min(index)].spec.name, &self.slots[other.max(index)].spec.name);
                    return Err(Error::InvalidValue(format!("{a} and {b} share memory; give the optimizer one of them")));
                }
            }
            reaching.push((index, data, data + layout.span() * size));
        }
        Ok(())
    }

    fn with_weight<R>(
        &mut self,
        parameter: &Bound<'_, PyAny>,
        then: impl FnOnce(&mut Slot, WeightView<'_>, &TensorReader) -> PyResult<R>,
    ) -> PyResult<(R, bool)> {
        let index = self.slot_of(parameter)?;
        let mut relaid = Vec::new();
        let weight = self.weight(index, parameter, &mut relaid)?;
        let walks = self.bindings[index].walks.clone();
        // SAFETY: read just now, of the layout of `walks`, which does not overlap itself; the interpreter stays attached, so nobody else runs.
        let view = unsafe { weight.weight_view(walks) };
        then(&mut self.slots[index], view, &self.reader).map(|value| (value, !relaid.is_empty()))
    }
}

fn dtype_of(kind: WeightKind) -> DType {
    match kind {
        WeightKind::F32 => DType::F32,
        WeightKind::Bf16Split | WeightKind::Bf16Full => DType::Bf16,
        WeightKind::F16Full => DType::F16,
    }
}

fn dtype_size(kind: WeightKind) -> usize {
    if kind == WeightKind::F32 { 4 } else { 2 }
}

fn overlaps_itself(name: &str) -> PyErr {
    Error::InvalidValue(format!("{name}: its elements share memory (an expanded tensor?); give the optimizer the original"))
        .into()
}

/// A value of a parameter group.
fn entry<'py>(group: &Bound<'py, PyDict>, key: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
    group.get_item(key)?.ok_or_else(|| Error::InvalidValue(format!("a parameter group has no {key}")).into())
}

/// A number of a parameter group: a float, an int or a tensor of one element.
fn number<'py>(group: &Bound<'py, PyDict>, key: &Bound<'py, PyString>) -> PyResult<f64> {
    let value = entry(group, key)?;
    value.extract().map_err(|_| Error::UnsupportedType(format!("{key} of a parameter group is not a number: {value}")).into())
}

/// One parameter group's settings, from its dict.
fn config(group: &Bound<'_, PyDict>) -> PyResult<AdamWConfig> {
    let py = group.py();
    let flag = |key| -> PyResult<bool> { entry(group, key)?.is_truthy() };
    Ok(AdamWConfig {
        lr: number(group, intern!(py, "lr"))?,
        betas: entry(group, intern!(py, "betas"))?.extract()?,
        eps: number(group, intern!(py, "eps"))?,
        weight_decay: number(group, intern!(py, "weight_decay"))?,
        amsgrad: flag(intern!(py, "amsgrad"))?,
        maximize: flag(intern!(py, "maximize"))?,
        decoupled_weight_decay: flag(intern!(py, "decoupled_weight_decay"))?,
    })
}

/// What a step did, and whose state tensors have new strides since.
#[pyclass(name = "StepOutcome", module = "outboard._native", frozen, get_all)]
pub(super) struct StepOutcome {
    grad_norm: Option<f64>,
    skipped: bool,
    parameters: usize,
    elements: usize,
    relaid: Vec<Py<PyAny>>,
}

#[pymethods]
impl Core {
    #[new]
    fn new(py: Python<'_>, threads: usize) -> PyResult<Self> {
        if threads == 0 {
            return Err(Error::InvalidValue("threads must be at least 1, not 0".into()).into());
        }
        Ok(Self {
            pool: None,
            threads,
            isa: Isa::current()?,
            arena: Arena::default(),
            reader: TensorReader::new(py)?,
            slots: Vec::new(),
            bindings: Vec::new(),
            index: HashMap::new(),
            fail_at: None,
        })
    }

    /// Whether a parameter has a slot.
    fn is_bound(&self, parameter: &Bound<'_, PyAny>) -> bool {
        self.index.contains_key(&address(parameter))
    }

    /// The parameters of the groups that have a gradient and no slot, or lack the plane that amsgrad needs; with `all`,
    /// those without a gradient that want one (`requires_grad`), too.
    fn unbound<'py>(&self, groups: &Bound<'py, PyList>, all: bool) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let py = groups.py();
        let mut missing = Vec::new();
        for group in groups.iter() {
            let group = group.cast::<PyDict>()?;
            let amsgrad = group.get_item(intern!(py, "amsgrad"))?.is_some_and(|value| value.is_truthy().unwrap_or(false));
            let Some(parameters) = group.get_item(intern!(py, "params"))? else { continue };
            for parameter in parameters.try_iter()? {
                let parameter = parameter?;
                let bound = self.index.get(&address(&parameter));
                if bound.is_some_and(|&slot| self.slots[slot].spec.amsgrad || !amsgrad) {
                    continue;
                }
                let wanted = !parameter.getattr(intern!(py, "grad"))?.is_none()
                    || (all && parameter.getattr(intern!(py, "requires_grad"))?.is_truthy()?);
                if wanted {
                    missing.push(parameter);
                }
            }
        }
        Ok(missing)
    }

    /// Makes state for parameters, all zeros, in one slab: for each a tuple of parameter, name, number in the optimizer,
    /// whether the master is full, whether the moments are bf16, and amsgrad. Nothing is made if one is refused.
    fn bind(&mut self, py: Python<'_>, entries: Vec<(Bound<'_, PyAny>, String, u64, bool, bool, bool)>) -> PyResult<()> {
        let mut specs: Vec<(SlotSpec, Binding)> = Vec::new();
        let mut widened = Vec::new();
        for (parameter, name, number, full_master, bf16_moments, amsgrad) in entries {
            if let Some(&slot) = self.index.get(&address(&parameter)) {
                if amsgrad && !self.slots[slot].spec.amsgrad {
                    widened.push(slot);
                }
                continue;
            }
            if specs.iter().any(|(_, binding)| binding.parameter.is(&parameter)) {
                continue;
            }
            let (spec, binding) = self.reader.read(&parameter, Role::Parameter, &|| name.clone(), |weight, shape| {
                let layout = shape.layout();
                if layout.overlaps_itself() {
                    return Err(overlaps_itself(&name));
                }
                let weight_kind = match (weight.dtype, full_master) {
                    (DType::F32, _) => WeightKind::F32,
                    (DType::Bf16, false) => WeightKind::Bf16Split,
                    (DType::Bf16, true) => WeightKind::Bf16Full,
                    (DType::F16, _) => WeightKind::F16Full,
                };
                let state = layout.dense_like();
                let walks = Walks::new(&state, &layout);
                let moments = if bf16_moments { MomentDType::Bf16 } else { MomentDType::F32 };
                let spec = SlotSpec { name: name.clone(), number, layout: state, weight: weight_kind, moments, amsgrad };
                let binding =
                    Binding { parameter: parameter.clone().unbind(), data: weight.data, layout, walks, grad: None };
                Ok((spec, binding))
            })?;
            specs.push((spec, binding));
        }
        let pool = self.pool()?;
        let mut bytes = 0_usize;
        for (spec, _) in &specs {
            bytes = bytes.saturating_add(spec.bytes()?);
        }
        for &slot in &widened {
            let spec = &self.slots[slot].spec;
            bytes = bytes.saturating_add(SlotSpec { amsgrad: true, ..spec.clone() }.bytes()? - spec.bytes()?);
        }
        let mut slab = self.arena.slab(bytes, &pool)?;
        let first = self.slots.len();
        for (spec, binding) in specs {
            self.index.insert(binding.parameter.as_ptr() as usize, self.slots.len());
            self.slots.push(Slot::carve(spec, &mut slab));
            self.bindings.push(binding);
        }
        self.refresh_addresses(py);
        let tensors: Vec<(usize, usize)> = self.bindings.iter().map(|binding| binding.data).enumerate().collect();
        if let Err(error) = self.check_overlaps(&tensors) {
            for binding in self.bindings.drain(first..) {
                self.index.remove(&(binding.parameter.as_ptr() as usize));
            }
            self.slots.truncate(first);
            return Err(error.into());
        }
        for slot in widened {
            self.slots[slot].add_amsgrad(&mut slab);
        }
        Ok(())
    }

    /// Steps every parameter of the groups that has a gradient. All of them must be bound.
    #[pyo3(signature = (groups, *, max_grad_norm, compute_grad_norm, nonfinite, grad_scale, found_inf, seed, chunk_elems))]
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
            fail_at: self.fail_at.take(),
        };
        let mut relaid = Vec::new();
        let pool = self.pool()?;
        let jobs = self.collect(groups, grad_scale.is_some(), &mut relaid)?;
        let relaid = relaid.into_iter().map(|slot: usize| self.bindings[slot].parameter.clone_ref(py)).collect();
        let stepped: Vec<&Py<PyAny>> =
            jobs.iter().zip(&self.bindings).filter(|(job, _)| job.is_some()).map(|(_, b)| &b.parameter).collect();
        let stepped = PyList::new(py, stepped)?;
        let result = self.run(py, &pool, jobs, &options);
        let changed = match &result {
            Ok(report) => !report.skipped,
            Err(error) => matches!(error, Error::Worker(_)),
        };
        if changed {
            // A backward through a graph that saved the old weights must fail, as it does after torch's own step.
            py.import(intern!(py, "torch.autograd.graph"))?.call_method1(intern!(py, "increment_version"), (stepped,))?;
        }
        let report = result?;
        Ok(StepOutcome {
            grad_norm: report.grad_norm,
            skipped: report.skipped,
            parameters: report.parameters,
            elements: report.elements,
            relaid,
        })
    }

    /// A parameter's planes by torch's names, `step` first.
    fn planes(&self, parameter: &Bound<'_, PyAny>) -> PyResult<Vec<(&'static str, PyPlane)>> {
        let slot = &self.slots[self.slot_of(parameter)?];
        let layout = || slot.spec.layout.clone();
        let mut planes = vec![("step", PyPlane::new(&slot.step, Layout::row_major(&[])))];
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
    fn read_master(&mut self, parameter: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>) -> PyResult<bool> {
        let read = |slot: &mut Slot, weight: WeightView<'_>, reader: &TensorReader| {
            fp32(reader, out, &slot.spec, |host, walks| {
                // SAFETY: an fp32 tensor of this layout that the caller has just made for this.
                let mut out = unsafe { host.borrow_mut::<f32>(walks) };
                Ok(slot.read_master(&weight, &mut out)?)
            })
        };
        self.with_weight(parameter, read).map(|((), relaid)| relaid)
    }

    /// Sets weight and residual (or master) from fp32 values. With `weight=False` the weight stays as it is.
    fn write_master(&mut self, parameter: &Bound<'_, PyAny>, values: &Bound<'_, PyAny>, weight: bool) -> PyResult<bool> {
        let write = |slot: &mut Slot, mut view: WeightView<'_>, reader: &TensorReader| {
            fp32(reader, values, &slot.spec.clone(), |host, walks| {
                // SAFETY: an fp32 tensor of this layout; the interpreter stays attached, so nobody writes it.
                let values = unsafe { host.borrow::<f32>(walks) };
                if weight { slot.write_master(&mut view, &values)? } else { slot.load_kept(&values)? }
                Ok(())
            })
        };
        self.with_weight(parameter, write).map(|((), relaid)| relaid)
    }

    /// Sets a full bf16 master from the weight as it is and residuals: an fp32 tensor that holds them as numbers.
    fn load_residual(&mut self, parameter: &Bound<'_, PyAny>, residuals: &Bound<'_, PyAny>) -> PyResult<bool> {
        let load = |slot: &mut Slot, view: WeightView<'_>, reader: &TensorReader| {
            fp32(reader, residuals, &slot.spec.clone(), |host, walks| {
                // SAFETY: an fp32 tensor of this layout; the interpreter stays attached, so nobody writes it.
                let numbers = unsafe { host.borrow::<f32>(walks) };
                let mut exact = vec![0.0; numbers.len()];
                numbers.gather(0, &mut exact);
                let residuals: Vec<i16> = exact.into_iter().map(|number| number as i16).collect();
                Ok(slot.load_residual(&view, &residuals[..].into())?)
            })
        };
        self.with_weight(parameter, load).map(|((), relaid)| relaid)
    }

    /// Residuals to zero, or masters to the weight: for a checkpoint that has neither.
    fn clear_master(&mut self, parameter: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.with_weight(parameter, |slot, view, _| Ok(slot.clear_kept(&view)?)).map(|((), relaid)| relaid)
    }

    /// A parameter's state back to zeros, as if it had never been stepped; cures a poisoned one.
    fn reset(&mut self, parameter: &Bound<'_, PyAny>) -> PyResult<()> {
        let slot = self.slot_of(parameter)?;
        self.slots[slot].reset();
        Ok(())
    }

    /// Declares a parameter's state whole again, after all of it has been loaded.
    fn heal(&mut self, parameter: &Bound<'_, PyAny>) -> PyResult<()> {
        let slot = self.slot_of(parameter)?;
        self.slots[slot].poisoned = None;
        Ok(())
    }

    /// Refuses to go on in a fork of the process that made the state.
    fn check_process(&self) -> PyResult<()> {
        Ok(self.pool.as_ref().map_or(Ok(()), |pool| pool.check_process())?)
    }

    /// Makes the chunk of the next step that holds this element of this parameter panic. For tests of what follows.
    fn fail_next_step(&mut self, parameter: &Bound<'_, PyAny>, element: usize) -> PyResult<()> {
        self.fail_at = Some((self.slot_of(parameter)?, element));
        Ok(())
    }

    /// Counts and sizes, for `stats()`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        let elements = |slot: &Slot| slot.spec.layout.numel();
        stats.set_item("parameters", self.slots.len())?;
        stats.set_item("elements", self.slots.iter().map(elements).sum::<usize>())?;
        let bytes = |slot: &Slot| size_of::<f64>() + elements(slot) * slot.spec.bytes_per_element();
        stats.set_item("state_bytes", self.slots.iter().map(bytes).sum::<usize>())?;
        stats.set_item("arena_bytes", self.arena.bytes())?;
        stats.set_item("threads", self.threads)?;
        stats.set_item("isa", self.isa.name())?;
        let poisoned = self.slots.iter().filter_map(|slot| Some((&slot.spec.name, slot.poisoned.as_ref()?)));
        stats.set_item("poisoned", poisoned.collect::<HashMap<_, _>>())?;
        Ok(stats)
    }
}

impl Core {
    /// Reads and checks all that the step needs; changes nothing but the order of planes.
    fn collect<'py>(
        &mut self,
        groups: &Bound<'py, PyList>,
        unscale: bool,
        relaid: &mut Vec<usize>,
    ) -> PyResult<Vec<Option<Job<'py>>>> {
        let py = groups.py();
        let mut jobs: Vec<Option<Job<'py>>> = Vec::new();
        jobs.resize_with(self.slots.len(), || None);
        let mut moved = false;
        for group in groups.iter() {
            let group = group.cast::<PyDict>()?;
            let config = config(group)?;
            let parameters = group.get_item(intern!(py, "params"))?;
            for parameter in parameters.iter().flat_map(|list| list.try_iter()).flatten() {
                let parameter = parameter?;
                let grad = parameter.getattr(intern!(py, "grad"))?;
                if grad.is_none() {
                    continue;
                }
                let index = self.slot_of(&parameter)?;
                if jobs[index].is_some() {
                    continue; // listed twice: one update
                }
                let weight = self.weight(index, &parameter, relaid)?;
                moved |= weight.data != self.bindings[index].data;
                let (grad_tensor, grad_walks) = self.gradient(index, &grad, unscale)?;
                jobs[index] = Some(Job { weight, grad: grad_tensor, grad_walks, _grad: grad, config });
            }
        }
        if moved {
            let data = |(index, job): (usize, &Option<Job<'_>>)| {
                (index, job.as_ref().map_or(self.bindings[index].data, |job| job.weight.data))
            };
            let tensors: Vec<(usize, usize)> = jobs.iter().enumerate().map(data).collect();
            self.check_overlaps(&tensors)?;
            for (index, data) in tensors {
                self.bindings[index].data = data;
            }
        }
        Ok(jobs)
    }

    fn gradient(&mut self, index: usize, grad: &Bound<'_, PyAny>, unscale: bool) -> PyResult<(HostTensor, Walks)> {
        let Self { reader, slots, bindings, .. } = self;
        let (slot, binding) = (&slots[index], &mut bindings[index]);
        let name = &slot.spec.name;
        reader.read(grad, Role::Gradient, &|| name.clone(), |tensor, shape| {
            if !shape.has_sizes(&slot.spec.layout.sizes) {
                let (sizes, found) = (&slot.spec.layout.sizes, &shape.sizes);
                let message = format!("the gradient of {name} has shape {found:?}, the parameter {sizes:?}");
                return Err(Error::InvalidValue(message).into());
            }
            let own_layout = shape.is(&binding.layout);
            // A view that negates on reading has the strides of a complex tensor's part, or no dimension at all.
            if (!own_layout || shape.sizes.is_empty()) && grad.call_method0(intern!(grad.py(), "is_neg"))?.is_truthy()? {
                let message = format!("the gradient of {name} is a negated view; assign its .resolve_neg()");
                return Err(Error::UnsupportedType(message).into());
            }
            if unscale && !own_layout && shape.layout().overlaps_itself() {
                let message = format!("the gradient of {name} cannot be unscaled in place: its elements share memory");
                return Err(Error::InvalidValue(message).into());
            }
            Ok((tensor, binding.grad_walks(&slot.spec.layout, shape)))
        })
    }

    /// Steps with the interpreter released.
    fn run(
        &mut self,
        py: Python<'_>,
        pool: &WorkerPool,
        jobs: Vec<Option<Job<'_>>>,
        options: &StepOptions,
    ) -> crate::Result<StepReport> {
        let isa = self.isa;
        let unscale = options.grad_scale.is_some();
        let mut updates = Vec::with_capacity(jobs.len());
        let mut kept_alive = Vec::with_capacity(jobs.len());
        let mut options = options.clone();
        let fail_at = options.fail_at.take();
        for (index, ((slot, binding), job)) in self.slots.iter_mut().zip(&self.bindings).zip(jobs).enumerate() {
            let Some(job) = job else { continue };
            if let Some((_, element)) = fail_at.filter(|&(slot, _)| slot == index) {
                options.fail_at = Some((updates.len(), element));
            }
            let Job { weight, grad, grad_walks, _grad, config } = job;
            let walks = binding.walks.clone();
            // SAFETY: read under this attachment to the interpreter and compared with the slot: dtype, sizes, the layout
            // behind `walks`; no two parameters overlap (`check_overlaps`) nor one itself. The parameter and, below, the
            // gradient are kept alive; that no other thread resizes or writes them meanwhile is the caller's part of the
            // bargain, as it is with any torch operation.
            let weight = unsafe { weight.weight_view(walks) };
            // SAFETY: as above; written only if unscaled, and then `gradient` has checked that it does not overlap itself.
            let grad = unsafe { grad.grad_view(grad_walks, unscale) };
            kept_alive.push(_grad);
            updates.push(Update { slot, weight, grad, config });
        }
        py.detach(|| engine::step(pool, isa, updates, &options))
    }
}

/// Reads an fp32 tensor of a slot's shape and passes it on with its walks.
fn fp32<R>(
    reader: &TensorReader,
    tensor: &Bound<'_, PyAny>,
    spec: &SlotSpec,
    then: impl FnOnce(HostTensor, Walks) -> PyResult<R>,
) -> PyResult<R> {
    let name = || spec.name.clone();
    reader.read(tensor, Role::Parameter, &name, |host, shape| {
        if host.dtype != DType::F32 || !shape.has_sizes(&spec.layout.sizes) {
            let (name, sizes) = (&spec.name, &spec.layout.sizes);
            let found = format!("{} of shape {:?}", host.dtype.name(), shape.sizes);
            return Err(Error::InvalidValue(format!("{name}: expected torch.float32 of shape {sizes:?}, not {found}")).into());
        }
        then(host, Walks::new(&spec.layout, &shape.layout()))
    })
}

