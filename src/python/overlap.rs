//! What hooks begin while a backward or a forward is under way: updates of gradients as they come, gradients that leave the
//! device, streams that wait for weights.

use super::binding::{Binding, Offloaded, Tensors};
use super::core::{Core, refuse_poisoned};
use super::groups::config;
use super::lanes::{Lanes, Terms, offload_request, request};
use super::parameters::Parameters;
use super::tensor::{DType, Place};
use crate::engine::lanes::Request;
use crate::kernel::AdamWConfig;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};
use std::sync::Arc;

/// What a parameter group says of an update, read once for all its parameters.
#[pyclass(name = "GroupSettings", module = "outboard._native", frozen)]
pub(super) struct GroupSettings(AdamWConfig);

#[pymethods]
impl GroupSettings {
    #[new]
    fn new(group: &Bound<'_, PyDict>) -> PyResult<Self> {
        Ok(Self(config(group)?))
    }
}

/// Tells autograd that tensors, a list or a tuple, have been written: a backward through a graph that saved the old values
/// must fail.
pub(super) fn increment_version(py: Python<'_>, written: &Bound<'_, PyAny>) -> PyResult<()> {
    static INCREMENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let increment = INCREMENT.get_or_try_init(py, || -> PyResult<_> {
        // What torch's public function calls, in half the time.
        let quick = py.import("torch")?.getattr("_C")?.getattr("_increment_version");
        let public = |_| py.import("torch.autograd.graph")?.getattr("increment_version");
        Ok(quick.or_else(public)?.unbind())
    })?;
    increment.call1(py, (written,))?;
    Ok(())
}

/// Lets the interpreter go while something is waited for. Getting it back can take milliseconds: that is why engines ask for
/// this only where there is something to wait for.
fn detached(py: Python<'_>) -> impl FnMut(&mut (dyn FnMut() + Send)) {
    move |wait| py.detach(wait)
}

/// A parameter and its gradient, read, checked and held for an update that begins at once.
struct Ready {
    index: usize,
    place: Place,
    tensors: Tensors,
}

impl Core {
    /// Reads and checks a parameter and its gradient for an update that begins at once, and holds their memory. `None` for
    /// one that is in host memory, or whose strides ask for copies that `step` makes.
    fn ready_update<'py>(
        &mut self,
        parameter: &Bound<'py, PyAny>,
        grad: &Bound<'py, PyAny>,
        settings: &GroupSettings,
    ) -> PyResult<Option<Ready>> {
        let index = self.parameters.slot_of(parameter)?;
        refuse_poisoned(&self.parameters.slots[index])?;
        let mut job = self.parameters.job(index, parameter, grad, settings.0, false)?;
        let walks_are_dense = job.grad_walks.is_dense() && self.parameters.bindings[index].walks.is_dense();
        if job.place() == Place::Host || !walks_are_dense {
            return Ok(None);
        }
        self.parameters.ready_for_device(index, parameter, &mut job)?;
        Ok(Some(Ready { index, place: job.place(), tensors: job.tensors() }))
    }

    /// Counts the step of an update that is ready; its request, unless it has no elements.
    fn eager_request(&mut self, ready: Ready, config: &AdamWConfig, seed: u64) -> Option<Request> {
        let Ready { index, tensors, .. } = ready;
        let next_use = self.parameters.next_use[index];
        let slot = &mut self.parameters.slots[index];
        let steps = slot.steps() + 1.0;
        slot.set_steps(steps);
        self.counts.eager_updates += 1;
        if slot.spec.layout.numel() == 0 {
            return None;
        }
        let constants = config.constants(steps, 1.0);
        let (amsgrad, grad_scale, write_unscaled) = (config.amsgrad, None, false);
        let terms = Terms { index, steps, constants, seed, amsgrad, grad_scale, write_unscaled, next_use };
        let resident = self.parameters.bindings[index].resident.as_ref();
        // SAFETY: as in `step::requests`; autograd has produced the gradient just now, in memory of its own.
        Some(unsafe { request(slot, resident, None, tensors, &terms) })
    }

    /// Takes a parameter and its gradient for an update that begins at once; `None`: see `ready_update`.
    pub(super) fn begin_update<'py>(
        &mut self,
        parameter: &Bound<'py, PyAny>,
        grad: &Bound<'py, PyAny>,
        settings: &GroupSettings,
        seed: u64,
    ) -> PyResult<Option<Begun<'py>>> {
        let py = parameter.py();
        self.collect_failures()?;
        let Some(ready) = self.ready_update(parameter, grad, settings)? else { return Ok(None) };
        let written = PyTuple::new(py, [parameter])?;
        increment_version(py, &written)?;
        let place = ready.place;
        let by_place = self.eager_request(ready, &settings.0, seed).map(|request| (place, vec![request]));
        self.begun(py, by_place.into_iter().collect(), Vec::new()).map(Some)
    }

    /// Takes gradients of parameters to host memory, from where `step` uses them. Returns the parameters whose gradients
    /// stay on the device: their dtypes or strides ask for more than a copy.
    pub(super) fn begin_offloads<'py>(
        &mut self,
        py: Python<'py>,
        parameters: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Begun<'py>> {
        self.collect_failures()?;
        let mut left = Vec::new();
        let mut by_place: Vec<(Place, Vec<Request>)> = Vec::new();
        for parameter in parameters {
            let index = self.parameters.slot_of(&parameter)?;
            let grad = parameter.getattr(intern!(py, "grad"))?;
            let mut job = self.parameters.job(index, &parameter, &grad, AdamWConfig::default(), false)?;
            let Parameters { reader, slots, bindings, .. } = &mut self.parameters;
            let Binding { offloaded, walks, .. } = &mut bindings[index];
            // Only fp32 can be added to.
            let fits = |offloaded: &&mut Offloaded| {
                offloaded.dtype == DType::F32 || (offloaded.dtype == job.grad.dtype && offloaded.count == 0)
            };
            let is_dense = job.grad_walks.is_dense() && walks.is_dense();
            let Some(offloaded) = offloaded.as_mut().filter(fits).filter(|_| is_dense) else {
                left.push(parameter);
                continue;
            };
            job.holds.grad = Some(reader.hold(&job.keep)?);
            let place = job.place();
            // SAFETY: as in `step::requests`.
            let request = unsafe { offload_request(index, &slots[index], offloaded, job.tensors()) };
            match by_place.iter_mut().find(|(known, _)| *known == place) {
                Some((_, requests)) => requests.push(request),
                None => by_place.push((place, vec![request])),
            }
        }
        self.begun(py, by_place, left)
    }

    fn begun<'py>(
        &mut self,
        py: Python<'py>,
        by_place: Vec<(Place, Vec<Request>)>,
        left: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Begun<'py>> {
        let mut submissions = Vec::with_capacity(by_place.len());
        for (place, requests) in by_place {
            submissions.push((self.engine(place)?, self.stream(py, place)?, requests));
        }
        Ok(Begun { submissions, left })
    }
}

/// Work for the engines, and the parameters that are left to `step`.
pub(super) struct Begun<'py> {
    submissions: Vec<(Arc<dyn Lanes>, usize, Vec<Request>)>,
    left: Vec<Bound<'py, PyAny>>,
}

/// Hands work to the engines, waiting for room there. The optimizer is not borrowed meanwhile: other threads may ask for
/// something else.
pub(super) fn submit<'py>(core: &Bound<'py, Core>, begun: Begun<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let Begun { submissions, left } = begun;
    let mut stalled = 0.0;
    for (engine, stream, requests) in submissions {
        stalled += engine.submit_with(requests, stream, &mut detached(core.py()))?;
    }
    if stalled > 0.0 {
        core.borrow_mut().counts.hook_stall_seconds += stalled;
    }
    Ok(left)
}

/// Slots of one device that a stream is to wait for.
struct Wait {
    place: Place,
    engine: Arc<dyn Lanes>,
    stream: usize,
    /// The stream of the latest `step`, if it is another: whoever waits takes the mark off, so that stream's later reads
    /// would wait for nothing (FSDP2 reads weights on streams of its own).
    home: Option<usize>,
    slots: Vec<usize>,
}

/// Lets torch's current stream of each device wait for the weights of these parameters. The optimizer is not borrowed while
/// the host waits.
pub(super) fn order_after(core: &Bound<'_, Core>, parameters: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
    let py = core.py();
    let mut waits: Vec<Wait> = Vec::new();
    {
        let core = core.borrow();
        for parameter in parameters {
            let Some(index) = core.parameters.find(&parameter) else { continue };
            let place = core.parameters.bindings[index].place;
            if let Some(wait) = waits.iter_mut().find(|wait| wait.place == place) {
                wait.slots.push(index);
            } else if let Some(engine) = core.engines.get(place) {
                // Without an engine nothing is under way.
                let stream = core.stream(py, place)?;
                let home = core.homes.iter().find(|&&(known, home)| known == place && home != stream);
                let home = home.map(|&(_, home)| home);
                waits.push(Wait { place, engine, stream, home, slots: vec![index] });
            }
        }
    }
    let mut stalled = 0.0;
    for Wait { place, engine, stream, home, slots } in waits {
        stalled += engine.wait_with(&slots, stream, &mut detached(py))?;
        if let Some(home) = home {
            stalled += engine.wait_with(&slots, home, &mut detached(py))?;
        }
        if place == Place::Simulated {
            // Those who read it next do so at once.
            py.detach(|| engine.wait_on_host(&slots))?;
        }
    }
    let mut core = core.borrow_mut();
    core.counts.forward_stall_seconds += stalled;
    Ok(core.collect_failures()?)
}
