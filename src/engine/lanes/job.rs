//! What the lanes work on: one parameter's update (a part), and the jobs that parts are queued as.

use crate::device::{Device, DeviceUpdate};
use crate::error::Failure;
use crate::kernel::{Constants, GradDType, MomentDType, Noise, WeightKind};
use crate::memory::{DeviceSpan, HostSpan};
use std::any::Any;
use std::collections::HashSet;
use std::sync::Arc;

/// One parameter's state, or a run of it.
#[derive(Debug)]
pub struct Planes<S> {
    /// First moments.
    pub exp_avg: S,
    /// Second moments.
    pub exp_avg_sq: S,
    /// Maxima of the second moments (amsgrad), if they are used.
    pub max_exp_avg_sq: Option<S>,
    /// Residuals or masters, if the weight has any.
    pub kept: Option<S>,
}

/// Where a parameter's state is.
#[derive(Debug)]
pub enum Home {
    /// In host memory.
    Host(Planes<HostSpan>),
    /// On the device.
    Device(Planes<DeviceSpan>),
}

/// Where a gradient is.
#[derive(Debug)]
pub enum Gradient {
    /// On the device.
    Device(DeviceSpan),
    /// In pinned host memory that the device can address, where it has been offloaded.
    Host(HostSpan),
}

impl Gradient {
    /// Its address, as the device knows it.
    pub(super) fn address(&self) -> usize {
        match self {
            Self::Device(span) => span.address(),
            Self::Host(span) => span.address(),
        }
    }

    pub(super) fn device_bytes(&self) -> usize {
        match self {
            Self::Device(span) => span.len(),
            Self::Host(_) => 0,
        }
    }

    pub(super) fn split_front(&mut self, bytes: usize) -> Self {
        match self {
            Self::Device(span) => Self::Device(span.split_front(bytes)),
            Self::Host(span) => Self::Host(span.split_front(bytes)),
        }
    }
}

/// What becomes of a gradient that leaves the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sum {
    /// It is kept in its own dtype.
    Keep,
    /// It is the first of a sum in fp32.
    Set,
    /// It is added to a sum in fp32.
    Add,
}

/// A gradient to bring to host memory.
#[derive(Debug)]
pub struct Offload {
    /// The parameter's slot.
    pub slot: usize,
    /// Its name, for messages.
    pub name: Arc<str>,
    /// The gradient's dtype.
    pub grad_dtype: GradDType,
    /// Number of elements.
    pub len: usize,
    /// The gradient, contiguous in the order of the state.
    pub grad: DeviceSpan,
    /// Where to: elements of its dtype ([`Sum::Keep`]) or of fp32.
    pub to: HostSpan,
    /// What becomes of it.
    pub sum: Sum,
}

impl Offload {
    /// Cuts off the first `len` elements.
    pub(super) fn split_front(&mut self, len: usize) -> Self {
        let bytes = len * self.grad_dtype.bytes();
        let to = if self.sum == Sum::Keep { bytes } else { len * 4 };
        self.len -= len;
        let (grad, to) = (self.grad.split_front(bytes), self.to.split_front(to));
        Self { name: Arc::clone(&self.name), len, grad, to, ..*self }
    }
}

/// What an update of a parameter needs beside its memory.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The parameter's slot in its optimizer.
    pub slot: usize,
    /// Its name, for messages.
    pub name: Arc<str>,
    /// Dtype and master of the weight.
    pub weight_kind: WeightKind,
    /// Dtype of the gradient.
    pub grad_dtype: GradDType,
    /// Dtype of the moments.
    pub moments: MomentDType,
    /// Its group's constants at this step, with the clip factor.
    pub constants: Constants,
    /// The random bits of bf16 moments.
    pub noise: Noise,
    /// Gradients are divided by it first.
    pub grad_scale: Option<f32>,
}

impl Recipe {
    /// Bytes of state per element, and whether there are maxima.
    pub(super) fn state_bytes(&self, amsgrad: bool) -> usize {
        self.moments.bytes() * (2 + usize::from(amsgrad)) + self.weight_kind.kept_bytes()
    }

    /// What decides which compiled kernel runs: a bundle has one.
    fn kernel(&self) -> (WeightKind, GradDType, MomentDType) {
        (self.weight_kind, self.grad_dtype, self.moments)
    }
}

/// One parameter's update.
#[derive(Debug)]
pub struct Part {
    /// What to do.
    pub recipe: Recipe,
    /// Number of elements.
    pub len: usize,
    /// The live weights.
    pub weight: DeviceSpan,
    /// The gradients, contiguous in the order of the state.
    pub grad: Gradient,
    /// The state.
    pub home: Home,
}

impl Part {
    fn is_on_host(&self) -> bool {
        matches!(self.home, Home::Host(_))
    }
}

/// A run of a parameter whose state is in host memory: what a lane takes at once.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) recipe: Recipe,
    /// The parameter's index of its first element.
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) weight: DeviceSpan,
    pub(super) grad: Gradient,
    pub(super) planes: Planes<HostSpan>,
}

impl Chunk {
    pub(super) fn state_bytes(&self) -> usize {
        self.len * self.recipe.state_bytes(self.planes.max_exp_avg_sq.is_some())
    }

    /// Bytes that the CPU lane moves down: the weight and, unless it is there, the gradient.
    pub(super) fn live_bytes(&self) -> usize {
        self.weight.len() + self.grad.device_bytes()
    }

    /// Cuts off the first `len` elements.
    pub(super) fn split_front(&mut self, len: usize) -> Self {
        let Recipe { weight_kind, grad_dtype, moments, .. } = self.recipe;
        let Planes { exp_avg, exp_avg_sq, max_exp_avg_sq, kept } = &mut self.planes;
        let moment = len * moments.bytes();
        let planes = Planes {
            exp_avg: exp_avg.split_front(moment),
            exp_avg_sq: exp_avg_sq.split_front(moment),
            max_exp_avg_sq: max_exp_avg_sq.as_mut().map(|plane| plane.split_front(moment)),
            kept: kept.as_mut().map(|plane| plane.split_front(len * weight_kind.kept_bytes())),
        };
        let front = Self {
            recipe: self.recipe.clone(),
            first: self.first,
            len,
            weight: self.weight.split_front(len * weight_kind.live_bytes()),
            grad: self.grad.split_front(len * grad_dtype.bytes()),
            planes,
        };
        self.first += len;
        self.len -= len;
        front
    }

    /// The update of this run with its state at other addresses.
    pub(super) fn update(&self, exp_avg: usize, exp_avg_sq: usize, max: usize, kept: usize) -> DeviceUpdate<'_> {
        let Self { recipe, first, len, weight, grad, .. } = self;
        update(recipe, *first, *len, weight.address(), grad.address(), [exp_avg, exp_avg_sq, max, kept])
    }

    /// The update of this run with its state where it is, for a device that can address it.
    pub(super) fn update_in_place(&self) -> DeviceUpdate<'_> {
        let Planes { exp_avg, exp_avg_sq, max_exp_avg_sq, kept } = &self.planes;
        let at = |plane: &Option<HostSpan>| plane.as_ref().map_or(0, HostSpan::address);
        self.update(exp_avg.address(), exp_avg_sq.address(), at(max_exp_avg_sq), at(kept))
    }
}

fn update(
    recipe: &Recipe,
    first: usize,
    len: usize,
    weight: usize,
    grad: usize,
    [exp_avg, exp_avg_sq, max_exp_avg_sq, kept]: [usize; 4],
) -> DeviceUpdate<'_> {
    DeviceUpdate {
        parameter: &recipe.name,
        weight_kind: recipe.weight_kind,
        grad_dtype: recipe.grad_dtype,
        moments: recipe.moments,
        weight,
        kept,
        grad,
        exp_avg,
        exp_avg_sq,
        max_exp_avg_sq,
        len,
        first: first as u64,
        constants: recipe.constants,
        noise: recipe.noise,
        grad_scale: recipe.grad_scale,
    }
}

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
        let pinned = |chunk: &Chunk| chunk.planes.exp_avg.is_pinned();
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

/// Tiny parameters are bundled: a copy of fewer bytes costs about as much as one of these.
pub(in crate::engine) const TINY_ELEMS: usize = 64 * 1024;
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
    let mut open: Vec<Job<D>> = Vec::new();
    let mut slots = HashSet::new();
    for Request { order, next_use, write_unscaled, keep } in requests {
        let slot = order.slot();
        if !slots.insert(slot) {
            // The second update of a slot comes after the first.
            jobs.append(&mut open);
            slots = HashSet::from([slot]);
        }
        let part = match order {
            Order::Update(part) => part,
            Order::Offload(offload) => {
                jobs.push(offload_job(offload, keep, Arc::clone(ready), producer));
                continue;
            }
        };
        let key = part.recipe.kernel();
        let tiny = part.len <= TINY_ELEMS && limits.hold(1, part.len);
        let on_host = part.is_on_host();
        let single = job::<D>(part, tiny, next_use, write_unscaled, keep, Arc::clone(ready), producer);
        if !tiny {
            jobs.push(single);
            continue;
        }
        let fits = |job: &Job<D>| {
            job.kernel() == key
                && job.is_on_host() == on_host
                && job.work.is_pinned() == single.work.is_pinned()
                && limits.hold(job.slots.len() + 1, job.elements + single.elements)
        };
        if let Some(job) = open.iter_mut().find(|job| fits(job)) {
            job.absorb(single);
            continue;
        }
        // One that is full for this part is as good as full.
        let full = open.iter().position(|job| job.kernel() == key && job.is_on_host() == on_host);
        if let Some(full) = full {
            jobs.push(open.swap_remove(full));
        }
        open.push(single);
    }
    jobs.extend(open);
    jobs
}

fn job<D: Device>(
    part: Part,
    tiny: bool,
    next_use: u64,
    write_unscaled: bool,
    keep: Box<dyn Any + Send>,
    ready: Arc<D::Event>,
    producer: usize,
) -> Job<D> {
    let grad_bytes = part.grad.device_bytes();
    let Part { recipe, len, weight, grad, home } = part;
    let slots = vec![Member { slot: recipe.slot, name: Arc::clone(&recipe.name), len }];
    let unscale = match recipe.grad_scale {
        Some(scale) if write_unscaled => {
            let grad = crate::device::DeviceGrad { address: grad.address(), len, dtype: recipe.grad_dtype };
            vec![(recipe.slot, grad, scale)]
        }
        _ => Vec::new(),
    };
    let work = match home {
        Home::Device(planes) => Work::Resident(vec![(recipe, len, weight, grad, planes)]),
        Home::Host(planes) if tiny => Work::Bundle(vec![Chunk { recipe, first: 0, len, weight, grad, planes }]),
        Home::Host(planes) => Work::Chunks(Chunk { recipe, first: 0, len, weight, grad, planes }),
    };
    Job {
        id: 0,
        whole: true,
        work,
        slots,
        elements: len,
        grad_bytes,
        next_use,
        ready,
        producer,
        unscale,
        keep: vec![keep],
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
    fn kernel(&self) -> (WeightKind, GradDType, MomentDType) {
        match &self.work {
            Work::Offload(offload) => unreachable!("{offload:?} is not bundled"),
            Work::Resident(parts) => parts[0].0.kernel(),
            Work::Chunks(chunk) => chunk.recipe.kernel(),
            Work::Bundle(chunks) => chunks[0].recipe.kernel(),
        }
    }

    fn is_on_host(&self) -> bool {
        !matches!(self.work, Work::Resident(_))
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

    /// Takes over a single tiny part of the same kind.
    fn absorb(&mut self, other: Self) {
        match (&mut self.work, other.work) {
            (Work::Resident(parts), Work::Resident(more)) => parts.extend(more),
            (Work::Bundle(chunks), Work::Bundle(more)) => chunks.extend(more),
            (work, other) => unreachable!("{work:?} does not take {other:?}"),
        }
        self.slots.extend(other.slots);
        self.elements += other.elements;
        self.grad_bytes += other.grad_bytes;
        self.next_use = self.next_use.min(other.next_use);
        self.unscale.extend(other.unscale);
        self.keep.extend(other.keep);
    }
}
