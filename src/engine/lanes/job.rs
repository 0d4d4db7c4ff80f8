//! The jobs that parts are queued as: large parameters alone, tiny ones in bundles.

use super::parts::{Chunk, Gradient, Home, Offload, Part, Planes, Recipe, update};
use crate::device::{Device, DeviceUpdate};
use crate::engine::slot::TINY_ELEMS;
use crate::error::Failure;
use crate::kernel::{GradDType, MomentDType, WeightKind};
use crate::memory::DeviceSpan;
use rustc_hash::FxHashSet;
use std::any::Any;
use std::sync::Arc;

/// What a job is made of.
#[derive(Debug)]
pub(super) enum Work {
    /// A parameter whose state is on the device: one launch.
    Resident(Vec<(Recipe, usize, DeviceSpan, Gradient, Planes<DeviceSpan>)>),
    /// A parameter to take chunk by chunk: what is left of it.
    Chunks(Chunk),
    /// Tiny parameters to take together, whole.
    Bundle(Vec<Chunk>),
    /// A gradient to bring to host memory chunk by chunk: what is left of it.
    Offload(Offload),
}

impl Work {
    /// The updates of a resident job.
    pub(super) fn resident_updates(
        parts: &[(Recipe, usize, DeviceSpan, Gradient, Planes<DeviceSpan>)],
    ) -> Vec<DeviceUpdate<'_>> {
        parts
            .iter()
            .map(|(recipe, len, weight, grad, planes)| {
                let at = |plane: &Option<DeviceSpan>| plane.as_ref().map_or(0, DeviceSpan::address);
                let state = [
                    planes.exp_avg.address(),
                    planes.exp_avg_sq.address(),
                    at(&planes.max_exp_avg_sq),
                    at(&planes.kept),
                ];
                update(recipe, 0, *len, weight.address(), grad.address(), state)
            })
            .collect()
    }

    /// Whether a device can copy the state by itself.
    pub(super) fn is_pinned(&self) -> bool {
        let pinned = |chunk: &Chunk| chunk.planes.are_pinned();
        match self {
            Self::Resident(_) | Self::Offload(_) => true,
            Self::Chunks(chunk) => pinned(chunk),
            Self::Bundle(chunks) => chunks.iter().all(pinned),
        }
    }
}

/// A slot in a job.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) slot: usize,
    pub(super) name: Arc<str>,
    /// Elements of its parameter.
    pub(super) len: usize,
}

impl Member {
    /// That none of it, or nobody knows how much, has been updated.
    pub(super) fn failure(&self, cause: &str) -> (usize, Failure) {
        let Self { slot, name, len } = self;
        (*slot, Failure { parameter: name.to_string(), first: 0, len: *len, cause: cause.to_owned() })
    }
}

/// One entry of the queue.
#[derive(Debug)]
pub(super) struct Job<D: Device> {
    /// Its number, in the order in which jobs are accepted.
    pub(super) id: u64,
    /// Not the lesser part of one that has been split.
    pub(super) whole: bool,
    pub(super) work: Work,
    /// Whose updates it holds; as many keeps, in their order.
    pub(super) slots: Vec<Member>,
    pub(super) elements: usize,
    pub(super) grad_bytes: usize,
    /// When its weights are needed next: smaller is earlier.
    pub(super) next_use: u64,
    /// Done when gradients (and the last readers of the weights) are.
    pub(super) ready: Arc<D::Event>,
    /// The stream of `ready`; events of one stream are done in order.
    pub(super) producer: usize,
    /// Gradients to divide by their scale in place once they have been used, by slot.
    pub(super) unscale: Vec<(usize, crate::device::DeviceGrad, f32)>,
    /// Keeps the tensors behind the spans.
    pub(super) keep: Vec<Box<dyn Any + Send>>,
}

/// Most parts of a bundle: what a table holds.
pub(super) const BUNDLE_PARTS: usize = 1024;

/// The slots of the lanes' rings, which bound a bundle.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) device_slot: usize,
    pub(super) host_slot: usize,
}

impl Limits {
    /// Whether a bundle of so many parts and elements fits, whatever its dtypes and wherever its planes lie: 16 bytes of
    /// state and 8 of weight and gradient are the most an element has, and each plane may need two lines more.
    fn hold(self, parts: usize, elements: usize) -> bool {
        parts <= BUNDLE_PARTS
            && 16 * elements + parts * 4 * 2 * 256 <= self.device_slot
            && 8 * elements + parts * 2 * 64 <= self.host_slot
    }
}

/// What is asked of the engine.
#[derive(Debug)]
pub enum Order {
    /// An update.
    Update(Part),
    /// A gradient to bring to host memory, for a later update.
    Offload(Offload),
}

impl Order {
    /// The slot it is for.
    pub fn slot(&self) -> usize {
        match self {
            Self::Update(part) => part.recipe.slot,
            Self::Offload(offload) => offload.slot,
        }
    }
}

/// An order with what comes with it.
#[derive(Debug)]
pub struct Request {
    /// What to do.
    pub order: Order,
    /// When its weight is needed next: smaller is earlier.
    pub next_use: u64,
    /// Divide the gradient by its scale in place once it has been used.
    pub write_unscaled: bool,
    /// Keeps the tensors behind the spans until the update has landed.
    pub keep: Box<dyn Any + Send>,
}

/// Makes jobs of parts that became ready together; tiny ones are bundled where their kernels are the same.
pub(super) fn jobs<D: Device>(
    requests: Vec<Request>,
    ready: &Arc<D::Event>,
    producer: usize,
    limits: Limits,
) -> Vec<Job<D>> {
    let mut jobs = Vec::new();
    // At most one bundle of a kind.
    let mut open: Vec<(Kind, Job<D>)> = Vec::new();
    let mut slots = FxHashSet::default();
    let is_only = requests.len() == 1;
    for Request { order, next_use, write_unscaled, keep } in requests {
        let slot = order.slot();
        if !is_only && !slots.insert(slot) {
            // The second update of a slot comes after the first.
            jobs.extend(open.drain(..).map(|(_, job)| job));
            slots.clear();
            slots.insert(slot);
        }
        let part = match order {
            Order::Update(part) => part,
            Order::Offload(offload) => {
                jobs.push(offload_job(offload, keep, Arc::clone(ready), producer));
                continue;
            }
        };
        let single =
            |part, tiny, keep| Job::new(part, tiny, next_use, write_unscaled, keep, Arc::clone(ready), producer);
        if part.len > TINY_ELEMS || !limits.hold(1, part.len) {
            jobs.push(single(part, false, keep));
            continue;
        }
        let kind = Kind::of(&part);
        match open.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, job)) if limits.hold(job.slots.len() + 1, job.elements + part.len) => {
                job.push(part, next_use, write_unscaled, keep);
            }
            // One that is full for this part is as good as full.
            Some((_, job)) => jobs.push(std::mem::replace(job, single(part, true, keep))),
            None => open.push((kind, single(part, true, keep))),
        }
    }
    jobs.extend(open.into_iter().map(|(_, job)| job));
    jobs
}

/// What parts of one bundle have in common.
#[derive(PartialEq, Eq)]
struct Kind {
    kernel: (WeightKind, GradDType, MomentDType),
    /// Of the state; `None`: it is on the device.
    is_pinned: Option<bool>,
}

impl Kind {
    fn of(part: &Part) -> Self {
        let is_pinned = match &part.home {
            Home::Host(planes) => Some(planes.are_pinned()),
            Home::Device(_) => None,
        };
        Self { kernel: part.recipe.kernel(), is_pinned }
    }
}

fn offload_job<D: Device>(
    offload: Offload,
    keep: Box<dyn Any + Send>,
    ready: Arc<D::Event>,
    producer: usize,
) -> Job<D> {
    let Offload { slot, len, .. } = offload;
    Job {
        id: 0,
        whole: true,
        slots: vec![Member { slot, name: Arc::clone(&offload.name), len }],
        elements: len,
        grad_bytes: offload.grad.len(),
        // Its memory is wanted back.
        next_use: 0,
        ready,
        producer,
        unscale: Vec::new(),
        keep: vec![keep],
        work: Work::Offload(offload),
    }
}

impl<D: Device> Job<D> {
    /// One part's job: of a tiny one, to which others may be added.
    fn new(
        part: Part,
        tiny: bool,
        next_use: u64,
        write_unscaled: bool,
        keep: Box<dyn Any + Send>,
        ready: Arc<D::Event>,
        producer: usize,
    ) -> Self {
        let Part { recipe, len, weight, grad, home } = part;
        let slots = vec![Member { slot: recipe.slot, name: Arc::clone(&recipe.name), len }];
        let unscale = recipe.unscaled(&grad, len, write_unscaled).into_iter().collect();
        let grad_bytes = grad.device_bytes();
        let work = match home {
            Home::Device(planes) => Work::Resident(vec![(recipe, len, weight, grad, planes)]),
            Home::Host(planes) if tiny => Work::Bundle(vec![Chunk { recipe, first: 0, len, weight, grad, planes }]),
            Home::Host(planes) => Work::Chunks(Chunk { recipe, first: 0, len, weight, grad, planes }),
        };
        let keep = vec![keep];
        Self { id: 0, whole: true, work, slots, elements: len, grad_bytes, next_use, ready, producer, unscale, keep }
    }

    /// Parts from the others those whose slots are `apart`.
    pub(super) fn split(mut self, apart: impl Fn(usize) -> bool) -> (Option<Self>, Option<Self>) {
        let count = self.slots.iter().filter(|member| apart(member.slot)).count();
        if count == 0 {
            return (Some(self), None);
        }
        if count == self.slots.len() {
            return (None, Some(self));
        }
        let (rest, work, grad_bytes, elements);
        match self.work {
            Work::Resident(parts) => {
                let (more, others): (Vec<_>, Vec<_>) = parts.into_iter().partition(|(recipe, ..)| apart(recipe.slot));
                grad_bytes = more.iter().map(|(_, _, _, grad, _)| grad.device_bytes()).sum();
                elements = more.iter().map(|&(_, len, ..)| len).sum();
                (rest, work) = (Work::Resident(others), Work::Resident(more));
            }
            Work::Bundle(chunks) => {
                let (more, others): (Vec<_>, Vec<_>) = chunks.into_iter().partition(|chunk| apart(chunk.recipe.slot));
                grad_bytes = more.iter().map(|chunk| chunk.grad.device_bytes()).sum();
                elements = more.iter().map(|chunk| chunk.len).sum();
                (rest, work) = (Work::Bundle(others), Work::Bundle(more));
            }
            work => unreachable!("{work:?} has one slot"),
        }
        self.work = rest;
        let keeps = self.slots.into_iter().zip(self.keep);
        let (more, others): (Vec<_>, Vec<_>) = keeps.partition(|(member, _)| apart(member.slot));
        let (slots, keep) = more.into_iter().unzip();
        (self.slots, self.keep) = others.into_iter().unzip();
        let (unscale, others) = self.unscale.into_iter().partition(|(slot, ..)| apart(*slot));
        self.unscale = others;
        self.grad_bytes -= grad_bytes;
        self.elements -= elements;
        let Self { id, next_use, producer, .. } = self;
        let ready = Arc::clone(&self.ready);
        let more =
            Self { id, whole: false, work, slots, elements, grad_bytes, next_use, ready, producer, unscale, keep };
        (Some(self), Some(more))
    }

    /// Takes over another tiny part of the same kind.
    fn push(&mut self, part: Part, next_use: u64, write_unscaled: bool, keep: Box<dyn Any + Send>) {
        let Part { recipe, len, weight, grad, home } = part;
        self.slots.push(Member { slot: recipe.slot, name: Arc::clone(&recipe.name), len });
        self.elements += len;
        self.grad_bytes += grad.device_bytes();
        self.next_use = self.next_use.min(next_use);
        self.keep.push(keep);
        self.unscale.extend(recipe.unscaled(&grad, len, write_unscaled));
        match (&mut self.work, home) {
            (Work::Resident(parts), Home::Device(planes)) => parts.push((recipe, len, weight, grad, planes)),
            (Work::Bundle(chunks), Home::Host(planes)) => {
                chunks.push(Chunk { recipe, first: 0, len, weight, grad, planes });
            }
            (work, home) => unreachable!("{work:?} does not take {home:?}"),
        }
    }
}
