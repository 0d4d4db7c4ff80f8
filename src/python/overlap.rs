//! What hooks begin while a backward or a forward is under way: updates of gradients as they come, gradients that leave the
//! device, streams that wait for weights.

use super::binding::{Binding, Offloaded};
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
use pyo3::types::{PyDict, PyList};
use std::sync::Arc;

/// Tells autograd that tensors have been written: a backward through a graph that saved the old values must fail.
pub(super) fn increment_version(py: Python<'_>, written: &Bound<'_, PyList>) -> PyResult<()> {
    static INCREMENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    INCREMENT.import(py, "torch.autograd.graph", "increment_version")?.call1((written,))?;
    Ok(())
}

impl Core {
    /// Takes parameters, each with its group and a gradient, for an update that begins at once. Returns those that were
    /// not taken: they are in host memory, or their strides ask for copies that `step` makes.
    pub(super) fn begin_updates<'py>(
        &mut self,
        py: Python<'py>,
        entries: Vec<(Bound<'py, PyAny>, Bound<'py, PyDict>)>,
        seed: u64,
    ) -> PyResult<Begun<'py>> {
        self.collect_failures()?;
        let mut left = Vec::new();
        let mut taken = Vec::new();
        let mut current: Option<(Bound<'py, PyDict>, AdamWConfig)> = None;
        for (parameter, group) in entries {
            let config = match &current {
                Some((of, config)) if of.is(&group) => *config,
                _ => current.insert((group.clone(), config(&group)?)).1,
            };
            let index = self.parameters.slot_of(&parameter)?;
            refuse_poisoned(&self.parameters.slots[index])?;
            let grad = parameter.getattr(intern!(py, "grad"))?;
            let mut job = self.parameters.job(index, &parameter, grad, config, false)?;
            let walks_are_dense = job.grad_walks.is_dense() && self.parameters.bindings[index].walks.is_dense();
            if job.place() == Place::Host || !walks_are_dense {
                left.push(parameter);
                continue;
            }
            self.parameters.ready_for_device(index, &parameter, &mut job)?;
            taken.push((index, parameter, job));
        }
        if taken.is_empty() {
            return Ok(Begun { submissions: Vec::new(), left });
        }
        // Before the first write: a backward that still needs the old values must fail.
        let written = PyList::new(py, taken.iter().map(|(_, parameter, _)| parameter))?;
        increment_version(py, &written)?;
        let mut by_place: Vec<(Place, Vec<Request>)> = Vec::new();
        for (index, _, mut job) in taken {
            let next_use = self.parameters.next_use[index];
            let slot = &mut self.parameters.slots[index];
            let steps = slot.steps() + 1.0;
            slot.set_steps(steps);
            self.counts.eager_updates += 1;
            if slot.spec.layout.numel() == 0 {
                continue;
            }
            let constants = job.config.constants(steps, 1.0);
            let (amsgrad, grad_scale, write_unscaled) = (job.config.amsgrad, None, false);
            let terms = Terms { index, steps, constants, seed, amsgrad, grad_scale, write_unscaled, next_use };
            let place = job.place();
            let resident = self.parameters.bindings[index].resident.as_ref();
            // SAFETY: as in `step::requests`; autograd has produced the gradient just now, in memory of its own.
            let request = unsafe { request(slot, resident, None, &mut job, &terms) };
            match by_place.iter_mut().find(|(known, _)| *known == place) {
                Some((_, requests)) => requests.push(request),
                None => by_place.push((place, vec![request])),
            }
        }
        self.begun(py, by_place, left)
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
            let mut job = self.parameters.job(index, &parameter, grad, AdamWConfig::default(), false)?;
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
            job.holds.push(reader.hold(&job.keep)?);
            let place = job.place();
            // SAFETY: as in `step::requests`.
            let request = unsafe { offload_request(index, &slots[index], offloaded, &mut job) };
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
        // Getting the interpreter back can take milliseconds: it is only let go where there is something to wait for. Who
        // submits to one optimizer takes turns (`_one_at_a_time` in Python), so the room is still there.
        stalled += if engine.has_room(&requests) {
            engine.submit(requests, stream, false)?
        } else {
            core.py().detach(|| engine.submit(requests, stream, true))?
        };
    }
    core.borrow_mut().counts.hook_stall_seconds += stalled;
    Ok(left)
}

/// Slots of one device that a stream is to wait for.
struct Wait {
    place: Place,
    engine: Arc<dyn Lanes>,
    stream: usize,
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
                waits.push(Wait { place, engine, stream: core.stream(py, place)?, slots: vec![index] });
            }
        }
    }
    let mut stalled = 0.0;
    for Wait { place, engine, stream, slots } in waits {
        stalled += if engine.are_issued(&slots) {
            engine.wait(&slots, stream)?
        } else {
            py.detach(|| engine.wait(&slots, stream))?
        };
        if place == Place::Simulated {
            // Those who read it next do so at once.
            py.detach(|| engine.wait_on_host(&slots))?;
        }
    }
    let mut core = core.borrow_mut();
    core.counts.forward_stall_seconds += stalled;
    Ok(core.collect_failures()?)
}
