//! One step over parameters in host memory and on devices: one norm, one verdict, then both at once.

use super::binding::{Binding, Job};
use super::core::{Core, refuse_poisoned};
use super::lanes::{Lanes, Terms, device_grad, request};
use super::parameters::Parameters;
use super::tensor::Place;
use crate::device::DeviceGrad;
use crate::engine::lanes::Request;
use crate::engine::{self, GradView, Slot, StepOptions, StepReport, Update, Verdict};
use crate::error::Error;
use crate::kernel::{AdamWConfig, Constants, Isa};
use crate::pool::WorkerPool;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use std::sync::Arc;

/// A device that takes part in a step: where it is, its engine, and torch's current stream on it.
struct Party {
    place: Place,
    engine: Arc<dyn Lanes>,
    stream: usize,
}

/// A slot on a device with its share of the step.
struct DeviceJob<'a, 'py> {
    index: usize,
    slot: &'a mut Slot,
    job: Job<'py>,
    /// Its device, as a position in the list of parties.
    party: usize,
}

/// Where the update of a slot is, in the order of slots: that of the norm.
#[derive(Clone, Copy)]
enum Whose {
    Host(usize),
    Device(usize),
}

impl Core {
    /// Steps with the interpreter released. `attached`: returns once the devices' engines have taken over.
    pub(super) fn run(
        &mut self,
        py: Python<'_>,
        pool: &Arc<WorkerPool>,
        jobs: Vec<Option<Job<'_>>>,
        mut options: StepOptions,
        attached: bool,
        combine: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<StepReport> {
        let isa = self.isa;
        let parties = self.parties(py, &jobs)?;
        self.engines.all().for_each(|(_, engine)| engine.mark_issue());
        let fail_at = std::mem::take(&mut options.fail_at);
        let Parameters { slots, bindings, next_use, .. } = &mut self.parameters;

        let mut updates = Vec::with_capacity(jobs.len());
        let mut on_devices: Vec<DeviceJob<'_, '_>> = Vec::new();
        let mut order = Vec::with_capacity(jobs.len());
        let mut with_gradient = Vec::with_capacity(jobs.len());
        let mut kept_alive = Vec::with_capacity(jobs.len());
        for (index, ((slot, binding), job)) in slots.iter_mut().zip(&*bindings).zip(jobs).enumerate() {
            let Some(job) = job else { continue };
            with_gradient.push(index);
            if let Some(party) = parties.iter().position(|party| party.place == job.place()) {
                refuse_poisoned(slot)?;
                order.push(Whose::Device(on_devices.len()));
                on_devices.push(DeviceJob { index, slot, job, party });
                continue;
            }
            order.push(Whose::Host(updates.len()));
            let of_this = fail_at.iter().filter(|&&(slot, _)| slot == index);
            options.fail_at.extend(of_this.map(|&(_, element)| (updates.len(), element)));
            let Job { weight, grad, grad_walks, keep, config, .. } = job;
            // SAFETY: read under this attachment to the interpreter and compared with the slot: dtype, sizes, and the layout
            // behind `walks`. `Parameters::collect` has refused weights that share memory with each other, with a gradient
            // or with state. The parameter and, below, the gradient are kept alive; that no other thread resizes or writes
            // them meanwhile is the caller's part of the bargain, as it is with any torch operation.
            let weight = unsafe { weight.weight_view(binding.walks.clone()) };
            // SAFETY: as above; it is written only if unscaled, and then `collect` has also refused those that share memory
            // with each other or with themselves.
            let grad = unsafe { grad.grad_view(grad_walks, options.grad_scale.is_some()) };
            kept_alive.push(keep);
            updates.push(Update { slot, weight, grad, config });
        }
        engine::check(pool, &updates, &options)?;

        let squares = squares(py, pool, isa, &updates, &on_devices, &order, &parties, &options)?;
        let name = |position: usize| match order[position] {
            Whose::Host(at) => updates[at].slot.spec.name.to_string(),
            Whose::Device(at) => on_devices[at].slot.spec.name.to_string(),
        };
        let verdict = match combine.filter(|_| options.want_norm()) {
            Some(combine) => {
                let parameters = PyList::new(py, with_gradient.iter().map(|&index| &bindings[index].parameter))?;
                let (names, squares): (Vec<String>, Vec<f64>) = combine.call1((parameters, squares))?.extract()?;
                engine::judge(&options, &squares, |position| names[position].clone())?
            }
            None => engine::judge(&options, &squares, name)?,
        };
        if verdict.skipped {
            return Ok(StepReport { grad_norm: verdict.grad_norm, skipped: true, ..StepReport::default() });
        }
        for &(slot, element) in &fail_at {
            if let Some(job) = on_devices.iter().find(|job| job.index == slot) {
                parties[job.party].engine.fail_at(slot, element);
            }
        }
        let parameters = on_devices.len();
        let elements: usize = on_devices.iter().map(|job| job.slot.spec.layout.numel()).sum();
        let given = requests(on_devices, bindings, next_use, &verdict, &options, attached, parties.len());
        let Requests { by_party, stand_ins, scaled } = given;
        // Stand-ins are copied back before anybody can read the weights.
        let wait = !attached || !stand_ins.is_empty();
        let report = py.detach(|| -> crate::Result<StepReport> {
            let mut waits = Vec::new();
            for (Party { engine, stream, .. }, requests) in parties.iter().zip(by_party) {
                let slots: Vec<usize> = requests.iter().map(|request| request.order.slot()).collect();
                engine.submit(requests, *stream)?;
                waits.push((engine, slots, *stream));
            }
            let report = engine::update(pool, isa, updates, &verdict, &options);
            for (engine, slots, stream) in waits.into_iter().filter(|_| wait) {
                engine.wait(&slots, stream)?;
                // Failures of the last chunks are known once they have landed, a moment later.
                engine.synchronize()?;
            }
            report
        });
        for (index, stand_in) in stand_ins {
            let weight = self.parameters.reader.local(self.parameters.bindings[index].parameter.bind(py))?;
            weight.call_method0(intern!(py, "detach"))?.call_method1(intern!(py, "copy_"), (stand_in,))?;
        }
        for grad in scaled {
            // The same division in fp32, rounded once.
            grad.call_method0(intern!(py, "detach"))?.call_method1(intern!(py, "div_"), (options.grad_scale,))?;
        }
        // What goes on behind an attached step is told by the next call, whenever it fails.
        let failed = if wait { self.collect_failures() } else { Ok(()) };
        let report = match (report, failed) {
            (Err(Error::Worker(mut all)), Err(Error::Worker(more))) => {
                all.extend(more);
                return Err(Error::Worker(all).into());
            }
            (report, failed) => {
                failed?;
                report?
            }
        };
        Ok(StepReport { parameters: report.parameters + parameters, elements: report.elements + elements, ..report })
    }

    /// The devices of these jobs.
    fn parties(&mut self, py: Python<'_>, jobs: &[Option<Job<'_>>]) -> PyResult<Vec<Party>> {
        let mut parties: Vec<Party> = Vec::new();
        for place in jobs.iter().flatten().map(Job::place).filter(|&place| place != Place::Host) {
            if !parties.iter().any(|party| party.place == place) {
                parties.push(Party { place, engine: self.engine(place)?, stream: self.stream(py, place)? });
            }
        }
        Ok(parties)
    }
}

/// The sum of squares of each gradient of a step, wherever it is, in the order of slots, if the options ask for a norm.
fn squares(
    py: Python<'_>,
    pool: &WorkerPool,
    isa: Isa,
    updates: &[Update<'_>],
    on_devices: &[DeviceJob<'_, '_>],
    order: &[Whose],
    parties: &[Party],
    options: &StepOptions,
) -> PyResult<Vec<f64>> {
    let mut squares = Vec::new();
    if options.want_norm() {
        let of_devices = device_squares(py, pool, isa, on_devices, parties, options)?;
        let of_host = py.detach(|| engine::squared_norms_of(pool, isa, updates, options))?;
        squares.extend(order.iter().map(|whose| match *whose {
            Whose::Host(at) => of_host[at],
            Whose::Device(at) => of_devices[at],
        }));
    }
    Ok(squares)
}

/// The sum of squares of each gradient of a device's parameters, on the device or where it has been offloaded to.
fn device_squares(
    py: Python<'_>,
    pool: &WorkerPool,
    isa: Isa,
    jobs: &[DeviceJob<'_, '_>],
    parties: &[Party],
    options: &StepOptions,
) -> PyResult<Vec<f64>> {
    let scale = options.grad_scale.unwrap_or(1.0);
    let mut alive = Vec::new(); // gradients that had to be put in logical order, until they are added up
    let mut grads: Vec<Vec<DeviceGrad>> = parties.iter().map(|_| Vec::new()).collect();
    let mut positions: Vec<Vec<usize>> = parties.iter().map(|_| Vec::new()).collect();
    let (mut offloaded, mut offloaded_positions): (Vec<GradView<'_>>, Vec<usize>) = (Vec::new(), Vec::new());
    for (position, DeviceJob { job, party, .. }) in jobs.iter().enumerate() {
        if job.is_offloaded {
            // SAFETY: a plane of this optimizer's arena, of this dtype and length, which the engine is done with once it
            // has been synchronised, and which nobody else knows.
            offloaded.push(unsafe { job.grad.grad_view(job.grad_walks.clone(), false) });
            offloaded_positions.push(position);
            continue;
        }
        let mut address = job.original_grad;
        if !job.grad_walks.is_row_major() {
            let row_major = job.keep.call_method0(intern!(py, "contiguous"))?;
            address = row_major.call_method0(intern!(py, "data_ptr"))?.extract()?;
            alive.push(row_major);
        }
        grads[*party].push(device_grad(address, job.grad.numel, job.grad.dtype));
        positions[*party].push(position);
    }
    let mut squares = vec![0.0; jobs.len()];
    py.detach(|| -> crate::Result<()> {
        if !offloaded.is_empty() {
            parties.iter().try_for_each(|party| party.engine.synchronize())?;
        }
        let views: Vec<&GradView<'_>> = offloaded.iter().collect();
        for (position, square) in offloaded_positions.into_iter().zip(engine::squared_norms(pool, isa, &views, scale)?)
        {
            squares[position] = square;
        }
        for ((party, grads), positions) in parties.iter().zip(&grads).zip(positions) {
            let of_party = party.engine.squared_norms(grads, scale, party.stream)?;
            for (position, square) in positions.into_iter().zip(of_party) {
                squares[position] = square;
            }
        }
        Ok(())
    })?;
    drop(alive);
    Ok(squares)
}

/// What the engines are asked for.
struct Requests<'py> {
    by_party: Vec<Vec<Request>>,
    /// Slots whose weights are updated in a copy.
    stand_ins: Vec<(usize, Bound<'py, PyAny>)>,
    /// Gradients that stay and were used in a copy: to be unscaled, too.
    scaled: Vec<Bound<'py, PyAny>>,
}

/// Counts the step of each device job and makes its request.
fn requests<'py>(
    jobs: Vec<DeviceJob<'_, 'py>>,
    bindings: &mut [Binding],
    next_use: &[u64],
    verdict: &Verdict,
    options: &StepOptions,
    attached: bool,
    parties: usize,
) -> Requests<'py> {
    let mut by_party: Vec<Vec<Request>> = (0..parties).map(|_| Vec::new()).collect();
    let (mut stand_ins, mut scaled) = (Vec::new(), Vec::new());
    // Most parameters of a group are at the same step.
    let mut latest: Option<(AdamWConfig, f64, Constants)> = None;
    for DeviceJob { index, slot, mut job, party } in jobs {
        let steps = slot.steps() + 1.0;
        slot.set_steps(steps);
        if slot.spec.layout.numel() == 0 {
            continue;
        }
        let constants = match &latest {
            Some((config, at, constants)) if *at == steps && *config == job.config => *constants,
            _ => latest.insert((job.config, steps, job.config.constants(steps, verdict.clip))).2,
        };
        let unscales = options.grad_scale.is_some() && !attached;
        let is_copy = job.grad.data != job.original_grad;
        if unscales && is_copy {
            scaled.push(job.keep.clone());
        }
        let terms = Terms {
            index,
            steps,
            constants,
            seed: options.seed,
            amsgrad: job.config.amsgrad,
            grad_scale: options.grad_scale,
            write_unscaled: unscales && !is_copy,
            next_use: next_use[index],
        };
        let Binding { resident, offloaded, .. } = &mut bindings[index];
        let offloaded = offloaded.as_mut().filter(|_| job.is_offloaded);
        // SAFETY: read under this attachment to the interpreter and compared with the slot; `collect` has refused tensors
        // that share memory, and `ready_for_device` has put them in the order of the planes and holds them. Whoever reads or
        // writes state waits for the engine first.
        by_party[party].push(unsafe { request(slot, resident.as_ref(), offloaded, job.tensors(), &terms) });
        if let Some(stand_in) = job.stand_in {
            stand_ins.push((index, stand_in));
        }
    }
    for offloaded in bindings.iter_mut().filter_map(|binding| binding.offloaded.as_mut()) {
        offloaded.count = 0;
    }
    Requests { by_party, stand_ins, scaled }
}
