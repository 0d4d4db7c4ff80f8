//! `Core`: the optimizer's native half. Steps with the interpreter released, and hands out state as tensors.

use super::dlpack::PyPlane;
use super::groups::{amsgrad, for_each_parameter};
use super::parameters::{BindEntry, Job, Parameters};
use super::tensor::{DType, HostTensor, Role, TensorReader};
use crate::engine::{self, Kept, Moments, NonFinite, Slot, SlotSpec, StepOptions, StepReport, Update, WeightView};
use crate::error::Error;
use crate::kernel::Isa;
use crate::memory::{Arena, Layout, Walks};
use crate::pool::WorkerPool;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use pyo3::{PyTraverseError, PyVisit};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The native half of an optimizer over parameters in host memory.
#[pyclass(name = "Core", module = "outboard._native")]
pub(super) struct Core {
    pool: Option<Arc<WorkerPool>>,
    threads: usize,
    isa: Isa,
    arena: Arena,
    parameters: Parameters,
    fail_at: Vec<(usize, usize)>,
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

    fn with_weight<R>(
        &mut self,
        parameter: &Bound<'_, PyAny>,
        then: impl FnOnce(&mut Slot, WeightView<'_>, &TensorReader) -> PyResult<R>,
    ) -> PyResult<R> {
        let index = self.parameters.slot_of(parameter)?;
        let weight = self.parameters.weight(index, parameter)?;
        let Parameters { reader, slots, bindings, .. } = &mut self.parameters;
        // SAFETY: read just now, of the layout of `walks`, which does not overlap itself; the interpreter stays attached, so
        // nobody else runs, and what `then` reads beside it is a copy that the caller has made for this.
        let view = unsafe { weight.weight_view(bindings[index].walks.clone()) };
        then(&mut slots[index], view, reader)
    }

    /// Steps with the interpreter released.
    fn run(
        &mut self,
        py: Python<'_>,
        pool: &WorkerPool,
        jobs: Vec<Option<Job<'_>>>,
        mut options: StepOptions,
    ) -> crate::Result<StepReport> {
        let isa = self.isa;
        let unscale = options.grad_scale.is_some();
        let mut updates = Vec::with_capacity(jobs.len());
        let mut kept_alive = Vec::with_capacity(jobs.len());
        let fail_at = std::mem::take(&mut options.fail_at);
        let Parameters { slots, bindings, .. } = &mut self.parameters;
        for (index, ((slot, binding), job)) in slots.iter_mut().zip(bindings).zip(jobs).enumerate() {
            let Some(Job { weight, grad, grad_walks, keep, config, .. }) = job else { continue };
            let of_this = fail_at.iter().filter(|&&(slot, _)| slot == index);
            options.fail_at.extend(of_this.map(|&(_, element)| (updates.len(), element)));
            // SAFETY: read under this attachment to the interpreter and compared with the slot: dtype, sizes, and the layout
            // behind `walks`. `Parameters::collect` has refused weights that share memory with each other, with a gradient
            // or with state. The parameter and, below, the gradient are kept alive; that no other thread resizes or writes
            // them meanwhile is the caller's part of the bargain, as it is with any torch operation.
            let weight = unsafe { weight.weight_view(binding.walks.clone()) };
            // SAFETY: as above; it is written only if unscaled, and then `collect` has also refused those that share memory
            // with each other or with themselves.
            let grad = unsafe { grad.grad_view(grad_walks, unscale) };
            kept_alive.push(keep);
            updates.push(Update { slot, weight, grad, config });
        }
        py.detach(|| engine::step(pool, isa, updates, &options))
    }
}

/// What a step did.
#[pyclass(name = "StepOutcome", module = "outboard._native", frozen, get_all)]
pub(super) struct StepOutcome {
    grad_norm: Option<f64>,
    skipped: bool,
    parameters: usize,
    elements: usize,
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
            parameters: Parameters::new(py)?,
            fail_at: Vec::new(),
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

    /// Makes state for parameters of the groups, all zeros, in one slab: for each a tuple of parameter, name, number in the
    /// optimizer, whether the master is full, whether the moments are bf16, and amsgrad. Nothing is made if one is refused.
    fn bind(&mut self, groups: &Bound<'_, PyList>, entries: Vec<BindEntry<'_>>) -> PyResult<()> {
        let pool = self.pool()?;
        self.parameters.bind(groups, entries, &mut self.arena, &pool)
    }

    /// The parameters whose planes have been reordered since this was last asked: their state tensors have other strides now.
    fn take_relaid(&mut self, py: Python<'_>) -> Vec<Py<PyAny>> {
        let Parameters { relaid, bindings, .. } = &mut self.parameters;
        std::mem::take(relaid).into_iter().map(|slot| bindings[slot].parameter.clone_ref(py)).collect()
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
            fail_at: std::mem::take(&mut self.fail_at),
        };
        let pool = self.pool()?;
        let jobs = self.parameters.collect(groups, &self.arena, grad_scale.is_some())?;
        let stepped = jobs.iter().zip(&self.parameters.bindings).filter(|(job, _)| job.is_some());
        let written = PyList::new(py, stepped.map(|(_, binding)| &binding.parameter))?;
        if grad_scale.is_some() {
            jobs.iter().flatten().try_for_each(|job| written.append(&job.keep))?;
        }
        let result = self.run(py, &pool, jobs, options);
        let changed = match &result {
            Ok(report) => !report.skipped,
            Err(error) => matches!(error, Error::Worker(_)),
        };
        if changed {
            // A backward through a graph that saved the old values must fail, as it does after torch's own step.
            py.import(intern!(py, "torch.autograd.graph"))?
                .call_method1(intern!(py, "increment_version"), (written,))?;
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
    fn read_master(&mut self, parameter: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let read = |slot: &mut Slot, weight: WeightView<'_>, reader: &TensorReader| {
            fp32(reader, out, &slot.spec, |host, walks| {
                // SAFETY: an fp32 tensor of this layout that the caller has just made for this.
                let mut out = unsafe { host.borrow_mut::<f32>(walks) };
                Ok(slot.read_master(&weight, &mut out)?)
            })
        };
        self.with_weight(parameter, read)
    }

    /// Sets weight and residual (or master) from fp32 values. With `weight=False` the weight stays as it is.
    fn write_master(&mut self, parameter: &Bound<'_, PyAny>, values: &Bound<'_, PyAny>, weight: bool) -> PyResult<()> {
        let write = |slot: &mut Slot, mut view: WeightView<'_>, reader: &TensorReader| {
            fp32(reader, values, &slot.spec.clone(), |host, walks| {
                // SAFETY: an fp32 tensor of this layout; the interpreter stays attached, so nobody writes it.
                let values = unsafe { host.borrow::<f32>(walks) };
                if weight {
                    slot.write_master(&mut view, &values)?;
                } else {
                    slot.load_kept(&values)?;
                }
                Ok(())
            })
        };
        self.with_weight(parameter, write)
    }

    /// Sets a full bf16 master from the weight as it is and residuals: an fp32 tensor that holds them as numbers.
    fn load_residual(&mut self, parameter: &Bound<'_, PyAny>, residuals: &Bound<'_, PyAny>) -> PyResult<()> {
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
        self.with_weight(parameter, load)
    }

    /// Residuals to zero, or masters to the weight: for a checkpoint that has neither.
    fn clear_master(&mut self, parameter: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with_weight(parameter, |slot, view, _| Ok(slot.clear_kept(&view)?))
    }

    /// A parameter's state back to zeros, as if it had never been stepped; cures a poisoned one.
    fn reset(&mut self, parameter: &Bound<'_, PyAny>) -> PyResult<()> {
        let slot = self.parameters.slot_of(parameter)?;
        self.parameters.slots[slot].reset();
        Ok(())
    }

    /// Declares a parameter's state whole again, after all of it has been loaded.
    fn heal(&mut self, parameter: &Bound<'_, PyAny>) -> PyResult<()> {
        let slot = self.parameters.slot_of(parameter)?;
        self.parameters.slots[slot].poisoned = None;
        Ok(())
    }

    /// Refuses to go on in a fork of the process that made the state.
    fn check_process(&self) -> PyResult<()> {
        Ok(self.pool.as_ref().map_or(Ok(()), |pool| pool.check_process())?)
    }

    /// Whether an address is one of this optimizer's state.
    fn holds(&self, address: usize) -> bool {
        self.arena.holds(address, address.saturating_add(1))
    }

    /// Refuses to export state of which a part is half updated.
    fn check_poisoned(&self) -> PyResult<()> {
        let poisoned = self.parameters.slots.iter().find_map(|slot| Some((&slot.spec.name, slot.poisoned.as_ref()?)));
        poisoned.map_or(Ok(()), |(parameter, cause)| {
            Err(Error::Poisoned { parameter: parameter.clone(), cause: cause.clone() }.into())
        })
    }

    /// Makes the chunk of the next step that holds this element of this parameter panic. For tests of what follows.
    fn fail_next_step(&mut self, parameter: &Bound<'_, PyAny>, element: usize) -> PyResult<()> {
        self.fail_at.push((self.parameters.slot_of(parameter)?, element));
        Ok(())
    }

    /// Counts and sizes, for `stats()`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        let elements = |slot: &Slot| slot.spec.layout.numel();
        let slots = &self.parameters.slots;
        stats.set_item("parameters", slots.len())?;
        stats.set_item("elements", slots.iter().map(elements).sum::<usize>())?;
        let bytes = |slot: &Slot| size_of::<f64>() + elements(slot) * slot.spec.bytes_per_element();
        stats.set_item("state_bytes", slots.iter().map(bytes).sum::<usize>())?;
        stats.set_item("arena_bytes", self.arena.bytes())?;
        stats.set_item("threads", self.threads)?;
        stats.set_item("isa", self.isa.name())?;
        let poisoned = slots.iter().filter_map(|slot| Some((&slot.spec.name, slot.poisoned.as_ref()?)));
        stats.set_item("poisoned", poisoned.collect::<HashMap<_, _>>())?;
        Ok(stats)
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
            return Err(
                Error::InvalidValue(format!("{name}: expected torch.float32 of shape {sizes:?}, not {found}")).into()
            );
        }
        then(host, Walks::new(&spec.layout, &shape.layout()))
    })
}
