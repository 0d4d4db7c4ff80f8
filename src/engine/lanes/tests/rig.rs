//! What the tests share: parameters in the simulated device's memory, their state in a pinned slab, and for each a twin
//! that the host steps.

use super::tools::{Chance, Tensor, eventually};
use super::watched::Watched;
use crate::device::simulated::{Counters, Schedule};
use crate::device::{Device, Stream};
use crate::engine::lanes::{Engine, Gradient, Home, LaneOptions, Order, Part, Planes, Recipe, Request, Transfer};
use crate::engine::{
    self, GradElements, GradView, Kept, Moments, Slot, SlotSpec, StepOptions, StepReport, Update, WeightView,
};
use crate::error::{Error, Failure};
use crate::kernel::{AdamWConfig, Constants, GradDType, Isa, MomentDType, Noise, WeightKind};
use crate::memory::{Arena, DeviceSpan, Element, HostSpan, Layout, Plane};
use crate::pool::WorkerPool;
use half::{bf16, f16};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) len: usize,
    pub(super) weight: WeightKind,
    pub(super) grad: GradDType,
    pub(super) moments: MomentDType,
    pub(super) amsgrad: bool,
}

impl Kind {
    pub(super) const fn f32(len: usize) -> Self {
        let (weight, grad, moments) = (WeightKind::F32, GradDType::F32, MomentDType::F32);
        Self { len, weight, grad, moments, amsgrad: false }
    }

    pub(super) const fn split(len: usize) -> Self {
        let (weight, grad) = (WeightKind::Bf16Split, GradDType::Bf16);
        Self { weight, grad, ..Self::f32(len) }
    }
}

pub(super) struct Parameter {
    pub(super) kind: Kind,
    pub(super) config: AdamWConfig,
    pub(super) slot: Slot,
    pub(super) weight: Arc<Tensor>,
    pub(super) twin: Slot,
    pub(super) twin_weight: Tensor,
}

#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) schedule: Schedule,
    pub(super) options: LaneOptions,
    pub(super) pinned: bool,
    pub(super) seed: u64,
}

impl Setup {
    pub(super) fn new(schedule: Schedule, gpu: bool, cpu: bool) -> Self {
        let (device_ring_bytes, host_ring_bytes) = (512 << 10, 2 << 20);
        let (device_depth, host_depth) = (2, 16);
        let depths = LaneOptions { device_depth, host_depth, ..LaneOptions::default() };
        let options = LaneOptions { gpu, cpu, device_ring_bytes, host_ring_bytes, ..depths };
        Self { schedule, options, pinned: true, seed: 1 }
    }

    pub(super) fn zero_copy(mut self) -> Self {
        self.options.transfer = Transfer::ZeroCopy;
        self
    }

    pub(super) fn chunks(mut self, elems: usize) -> Self {
        self.options.chunk_elems = Some(elems);
        self
    }
}

/// What a request says beside the tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) clip: f32,
    pub(super) grad_scale: Option<f32>,
    pub(super) write_unscaled: bool,
    pub(super) next_use: u64,
    /// In place of those of the parameter's settings.
    pub(super) constants: Option<Constants>,
}

impl Default for Terms {
    fn default() -> Self {
        Self { clip: 1.0, grad_scale: None, write_unscaled: false, next_use: 0, constants: None }
    }
}

/// Each update adds 1 to the weight and, for gradients of 1, to the second moment.
pub(super) const COUNTING: Constants = Constants {
    gradient_factor: 1.0,
    lerp_factor: 0.0,
    beta2: 1.0,
    one_minus_beta2: 1.0,
    step_size: -1.0,
    bias_correction2_sqrt: f32::INFINITY,
    eps: 1.0,
    decay_factor: 1.0,
    coupled_decay: 0.0,
    lerp_from_gradient: 1,
};

/// What a request keeps: says when it is dropped that the host may now do as it likes with the gradient, or only read it.
struct Keep {
    device: Arc<Watched>,
    grad: Arc<Tensor>,
    frees: bool,
    dropped: Arc<AtomicUsize>,
}

impl Drop for Keep {
    fn drop(&mut self) {
        let (start, bytes) = self.grad.run();
        self.device.host_access(start, bytes, self.frees);
        self.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

pub(super) struct Rig {
    pub(super) engine: Option<Engine<Watched>>,
    pub(super) parameters: Vec<Parameter>,
    pub(super) device: Arc<Watched>,
    pub(super) pool: Arc<WorkerPool>,
    pub(super) isa: Isa,
    pub(super) chance: Chance,
    /// Whether gradients go with their requests.
    pub(super) frees: bool,
    pub(super) made: usize,
    pub(super) dropped: Arc<AtomicUsize>,
}

pub(super) const STREAMS: [Stream; 5] = [Stream::StateIn, Stream::Update, Stream::StateOut, Stream::Down, Stream::Up];

impl Rig {
    pub(super) fn new(setup: &Setup, kinds: &[Kind]) -> Self {
        let pool = Arc::new(WorkerPool::new(2).unwrap());
        let device = Arc::new(Watched::new(setup.schedule));
        let isa = Isa::current().unwrap();
        let mut chance = Chance(setup.seed);
        let specs: Vec<SlotSpec> = kinds.iter().enumerate().map(|(index, kind)| spec(index, kind)).collect();
        let bytes = specs.iter().map(|spec| spec.bytes().unwrap()).sum();
        let carve = |pinned: bool| {
            let mut slab = Arena::default().slab(bytes, &pool).unwrap();
            if pinned {
                slab.pin(|start, bytes| device.pin(start, bytes)).unwrap();
            }
            Slot::carve_all(specs.clone(), &mut slab)
        };
        let slots = carve(setup.pinned).into_iter().zip(carve(false));
        let parameters = slots.zip(kinds).map(|((slot, twin), kind)| {
            let (dtype, offset) = match kind.weight {
                WeightKind::F32 => (GradDType::F32, 4),
                WeightKind::Bf16Split | WeightKind::Bf16Full => (GradDType::Bf16, 2),
                WeightKind::F16Full => (GradDType::F16, 6),
            };
            let values = chance.values(dtype, kind.len);
            let weight = Arc::new(Tensor::holding(&values, offset));
            let config = AdamWConfig { amsgrad: kind.amsgrad, ..AdamWConfig::default() };
            Parameter { kind: *kind, config, slot, weight, twin, twin_weight: Tensor::holding(&values, 0) }
        });
        let parameters = parameters.collect();
        let engine = Engine::new(Arc::clone(&device), Arc::clone(&pool), isa, setup.options.clone()).unwrap();
        engine.emit_ranges(true);
        let (frees, made, dropped) = (true, 0, Arc::default());
        Self { engine: Some(engine), parameters, device, pool, isa, chance, frees, made, dropped }
    }

    pub(super) fn engine(&self) -> &Engine<Watched> {
        self.engine.as_ref().unwrap()
    }

    /// A gradient that is there already.
    pub(super) fn grad(&mut self, values: &[u8]) -> Arc<Tensor> {
        Arc::new(Tensor::holding(values, 8 * self.chance.below(3)))
    }

    /// A gradient that a stream will have made when it comes to it. Making it uses the weight.
    pub(super) fn produce(&mut self, index: usize, values: Vec<u8>, stream: usize) -> Arc<Tensor> {
        let grad = Arc::new(Tensor::new(values.len(), 8 * self.chance.below(3)));
        let (weight, to) = (&self.parameters[index].weight, Arc::clone(&grad));
        let make = move || to.write(&values);
        self.device.push_accessing(Stream::Foreign(stream), &[weight.run()], &[grad.run()], make).unwrap();
        grad
    }

    /// The request for a parameter's next step.
    pub(super) fn request(&mut self, index: usize, grad: &Arc<Tensor>, terms: &Terms) -> Request {
        let Parameter { kind, config, slot, weight, .. } = &mut self.parameters[index];
        let steps = slot.steps() + 1.0;
        slot.set_steps(steps);
        let recipe = Recipe {
            slot: index,
            name: Arc::clone(&slot.spec.name),
            weight_kind: kind.weight,
            grad_dtype: kind.grad,
            moments: kind.moments,
            constants: terms.constants.unwrap_or_else(|| config.constants(steps, terms.clip)),
            noise: Noise::new(0, steps as u64, slot.spec.number),
            grad_scale: terms.grad_scale,
        };
        let amsgrad = config.amsgrad;
        macro_rules! planes {
            ($moments:expr, $kept:expr) => {
                // SAFETY: the tests look at planes, and write them, only while no update is under way; of two updates of
                // one slot the engine lets the second wait.
                unsafe {
                    Planes {
                        exp_avg: $moments.exp_avg.lend(),
                        exp_avg_sq: $moments.exp_avg_sq.lend(),
                        max_exp_avg_sq: $moments.max_exp_avg_sq.as_mut().filter(|_| amsgrad).map(|plane| plane.lend()),
                        kept: $kept,
                    }
                }
            };
        }
        // SAFETY: as above.
        let kept = unsafe {
            match &mut slot.kept {
                Kept::Nothing => None,
                Kept::Residual(plane) => Some(plane.lend()),
                Kept::Master(plane) => Some(plane.lend()),
            }
        };
        let planes = match &mut slot.moments {
            Moments::F32(moments) => planes!(moments, kept),
            Moments::Bf16(moments) => planes!(moments, kept),
        };
        let ((weight, weight_bytes), (start, bytes)) = (weight.run(), grad.run());
        // SAFETY: the tensors live as long as the rig or the request, and are touched in stream order only.
        let (weight, span) = unsafe { (DeviceSpan::new(weight, weight_bytes), DeviceSpan::new(start, bytes)) };
        let part = Part { recipe, len: kind.len, weight, grad: Gradient::Device(span), home: Home::Host(planes) };
        self.made += 1;
        let (device, grad, dropped) = (Arc::clone(&self.device), Arc::clone(grad), Arc::clone(&self.dropped));
        let keep = Box::new(Keep { device, grad, frees: self.frees, dropped });
        Request { order: Order::Update(part), next_use: terms.next_use, write_unscaled: terms.write_unscaled, keep }
    }

    /// As [`Self::try_submit`], which succeeds.
    pub(super) fn submit(&mut self, indices: &[usize], stream: usize, terms: &Terms) -> Vec<Arc<Tensor>> {
        self.try_submit(indices, stream, terms).unwrap()
    }

    /// Submits steps with random gradients that are there already, and lets the twins follow.
    pub(super) fn try_submit(
        &mut self,
        indices: &[usize],
        stream: usize,
        terms: &Terms,
    ) -> Result<Vec<Arc<Tensor>>, Error> {
        let (mut requests, mut tensors, mut all) = (Vec::new(), Vec::new(), Vec::new());
        for &index in indices {
            let Kind { grad, len, .. } = self.parameters[index].kind;
            let values = self.chance.values(grad, len);
            tensors.push(self.grad(&values));
            requests.push(self.request(index, &tensors[tensors.len() - 1], terms));
            all.push((index, Tensor::holding(&values, 0)));
        }
        if let Err(error) = self.engine().submit(requests, stream, false) {
            // Nothing has been taken over.
            for &index in indices {
                let slot = &mut self.parameters[index].slot;
                slot.set_steps(slot.steps() - 1.0);
            }
            return Err(error);
        }
        let options = StepOptions { grad_scale: terms.grad_scale, ..StepOptions::default() };
        self.step_twins(&mut all, &options, terms.write_unscaled);
        Ok(tensors)
    }

    /// Steps twins on the host.
    pub(super) fn step_twins(
        &mut self,
        grads: &mut [(usize, Tensor)],
        options: &StepOptions,
        write_unscaled: bool,
    ) -> StepReport {
        let Self { parameters, pool, isa, .. } = self;
        let mut grads: Vec<Option<&mut Tensor>> = {
            let mut by_index: Vec<Option<&mut Tensor>> = parameters.iter().map(|_| None).collect();
            for (index, grad) in grads {
                by_index[*index] = Some(grad);
            }
            by_index
        };
        let with_grads = parameters.iter_mut().zip(&mut grads).filter_map(|(parameter, grad)| {
            let Parameter { kind, config, twin, twin_weight, .. } = parameter;
            let grad = grad_view(grad.as_deref_mut()?, kind.grad, write_unscaled);
            Some(Update { slot: twin, weight: weight_view(twin_weight, kind.weight), grad, config: *config })
        });
        engine::step(pool, *isa, with_grads.collect(), options).unwrap()
    }

    /// Compares a parameter with its twin.
    pub(super) fn compare(&self, index: usize) {
        let Parameter { kind, slot, weight, twin, twin_weight, .. } = &self.parameters[index];
        let differ = |what: &str, got: &[u8], want: &[u8]| {
            assert_eq!(got.len(), want.len());
            let at = got.iter().zip(want).position(|(got, want)| got != want);
            assert!(at.is_none(), "{what} of {} ({kind:?}) differs from byte {} on", slot.spec.name, at.unwrap());
        };
        differ("the weight", &weight.read(), &twin_weight.read());
        for ((what, got), (_, want)) in planes_of(slot).into_iter().zip(planes_of(twin)) {
            differ(what, got, want);
        }
        assert_eq!(slot.steps(), twin.steps(), "{}", slot.spec.name);
    }

    pub(super) fn compare_all(&self) {
        (0..self.parameters.len()).for_each(|index| self.compare(index));
    }

    /// Completes everything: nothing has failed, every parameter is as its twin.
    pub(super) fn finish(mut self) {
        self.engine().synchronize().unwrap();
        assert_eq!(self.engine().take_failures(), []);
        self.compare_all();
        self.close();
    }

    /// Drops everything; nothing is left, nothing has touched what it should not.
    pub(super) fn close(&mut self) {
        drop(self.engine.take());
        assert_eq!(self.dropped.load(Ordering::SeqCst), self.made, "keeps dropped");
        self.parameters.clear();
        assert_eq!(self.device.hazards(), [] as [String; 0]);
        let left: Vec<_> = self.device.ranges().into_iter().filter(|range| range.ends != 1).collect();
        assert_eq!(left, [], "ranges that have not ended once");
        // The last marks are for nobody any more.
        eventually("all streams are empty", || self.device.counters().unfinished == 0);
        assert_eq!(self.device.counters(), Counters::default());
    }

    /// Puts a failed parameter into its twin's place, and lets the engine know.
    pub(super) fn heal(&mut self, index: usize) {
        let Parameter { slot, weight, twin, twin_weight, .. } = &mut self.parameters[index];
        self.device.host_access(weight.address(), weight.run().1, true);
        weight.write(&twin_weight.read());
        for (_, plane) in planes_of(slot) {
            self.device.host_access(plane.as_ptr() as usize, plane.len(), true);
        }
        copy_planes(slot, twin);
        slot.set_steps(twin.steps());
        self.engine().heal(index);
    }

    pub(super) fn release_all(&self) {
        STREAMS.into_iter().chain((0..16).map(Stream::Foreign)).for_each(|stream| self.device.release(stream));
    }

    pub(super) fn failures(&self) -> Vec<(usize, Failure)> {
        self.engine().take_failures()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // So that a test that fails does not hang.
        self.release_all();
    }
}

/// Lets an update find its planes where they are, as if that were the device.
pub(super) fn make_resident(request: &mut Request) {
    let at = |span: &HostSpan| {
        // SAFETY: the simulated device's memory is the host's; the slot's planes stay.
        unsafe { DeviceSpan::new(span.address(), span.len()) }
    };
    if let Order::Update(part) = &mut request.order
        && let Home::Host(Planes { exp_avg, exp_avg_sq, max_exp_avg_sq, kept }) = &part.home
    {
        let (exp_avg, exp_avg_sq) = (at(exp_avg), at(exp_avg_sq));
        let (max_exp_avg_sq, kept) = (max_exp_avg_sq.as_ref().map(at), kept.as_ref().map(at));
        part.home = Home::Device(Planes { exp_avg, exp_avg_sq, max_exp_avg_sq, kept });
    }
}

fn spec(index: usize, kind: &Kind) -> SlotSpec {
    SlotSpec {
        name: format!("p{index}").into(),
        number: index as u64,
        layout: Layout::contiguous(kind.len),
        weight: kind.weight,
        moments: kind.moments,
        amsgrad: kind.amsgrad,
    }
}

fn weight_view(tensor: &mut Tensor, kind: WeightKind) -> WeightView<'_> {
    match kind {
        WeightKind::F32 => tensor.elements::<f32>().into(),
        WeightKind::Bf16Split | WeightKind::Bf16Full => tensor.elements::<bf16>().into(),
        WeightKind::F16Full => tensor.elements::<f16>().into(),
    }
}

/// A gradient, to write if it is to be unscaled.
pub(super) fn grad_view(tensor: &mut Tensor, dtype: GradDType, write: bool) -> GradView<'_> {
    fn elements<T: Element>(tensor: &mut Tensor, write: bool) -> GradElements<'_, T> {
        let elements = tensor.elements::<T>();
        if write { GradElements::Exclusive(elements.into()) } else { GradElements::Shared((&*elements).into()) }
    }
    match dtype {
        GradDType::F32 => GradView::F32(elements(tensor, write)),
        GradDType::Bf16 => GradView::Bf16(elements(tensor, write)),
        GradDType::F16 => GradView::F16(elements(tensor, write)),
    }
}

/// The bytes of a slot's planes.
fn planes_of(slot: &Slot) -> Vec<(&'static str, &[u8])> {
    fn bytes<T: Element>(plane: &Plane<T>) -> &[u8] {
        let elements = plane.as_slice();
        // SAFETY: the bytes of plain numbers.
        unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
    }
    macro_rules! moments {
        ($moments:expr) => {
            [
                Some(("exp_avg", bytes(&$moments.exp_avg))),
                Some(("exp_avg_sq", bytes(&$moments.exp_avg_sq))),
                $moments.max_exp_avg_sq.as_ref().map(|plane| ("max_exp_avg_sq", bytes(plane))),
            ]
        };
    }
    let moments = match &slot.moments {
        Moments::F32(moments) => moments!(moments),
        Moments::Bf16(moments) => moments!(moments),
    };
    let kept = match &slot.kept {
        Kept::Nothing => None,
        Kept::Residual(plane) => Some(("residual", bytes(plane))),
        Kept::Master(plane) => Some(("master", bytes(plane))),
    };
    moments.into_iter().flatten().chain(kept).collect()
}

fn copy_planes(to: &mut Slot, from: &Slot) {
    macro_rules! moments {
        ($to:expr, $from:expr) => {{
            $to.exp_avg.as_mut_slice().copy_from_slice($from.exp_avg.as_slice());
            $to.exp_avg_sq.as_mut_slice().copy_from_slice($from.exp_avg_sq.as_slice());
            if let (Some(to), Some(from)) = (&mut $to.max_exp_avg_sq, &$from.max_exp_avg_sq) {
                to.as_mut_slice().copy_from_slice(from.as_slice());
            }
        }};
    }
    match (&mut to.moments, &from.moments) {
        (Moments::F32(to), Moments::F32(from)) => moments!(to, from),
        (Moments::Bf16(to), Moments::Bf16(from)) => moments!(to, from),
        other => unreachable!("{other:?}"),
    }
    match (&mut to.kept, &from.kept) {
        (Kept::Nothing, Kept::Nothing) => {}
        (Kept::Residual(to), Kept::Residual(from)) => to.as_mut_slice().copy_from_slice(from.as_slice()),
        (Kept::Master(to), Kept::Master(from)) => to.as_mut_slice().copy_from_slice(from.as_slice()),
        other => unreachable!("{other:?}"),
    }
}
