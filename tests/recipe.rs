//! Every number that a step writes, against a scalar oracle that is written here from the recipe and shares no code with
//! the crate: all kinds of weights, gradients and moments, any layout, every instruction set, thread count and chunk size,
//! NaN, infinities and denormals in every input. Guard elements surround every buffer.
//!
//! Over 500 lines: independent cases in the order of their table, read one at a time.

use half::{bf16, f16};
use outboard::engine::{
    self, GradElements, GradView, Kept, MomentDType, MomentPlanes, Moments, Slot, SlotSpec, StepOptions, StepReport,
    Update, WeightKind, WeightView,
};
use outboard::memory::{Element, Layout, Plane, StridedMut, StridedRef, Walks, plane_bytes};
use outboard::{AdamWConfig, Arena, Error, Isa, WorkerPool};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::RngSeed;
use std::fmt::Debug;
use std::sync::LazyLock;

/// Cases that are the same on every run. `PROPTEST_CASES` sets how many.
fn deterministic() -> ProptestConfig {
    ProptestConfig { rng_seed: RngSeed::Fixed(0x6f75_7462), failure_persistence: None, ..ProptestConfig::default() }
}

const THREADS: [usize; 4] = [1, 2, 3, 8];

fn pool(threads: usize) -> &'static WorkerPool {
    static POOLS: LazyLock<Vec<WorkerPool>> =
        LazyLock::new(|| THREADS.iter().map(|&threads| WorkerPool::new(threads).unwrap()).collect());
    POOLS.iter().find(|pool| pool.threads() == threads).unwrap()
}

// ---- numbers

/// Equal to the bit, or both NaN.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// An element type of weights and gradients.
trait Number: Element + Debug {
    fn from_low_bits(bits: u32) -> Self;
    fn bits(self) -> u32;
    fn widen(self) -> f32;
    /// To nearest, ties to even.
    fn narrow(value: f32) -> Self;
}

impl Number for f32 {
    fn from_low_bits(bits: u32) -> Self {
        Self::from_bits(bits)
    }
    fn bits(self) -> u32 {
        self.to_bits()
    }
    fn widen(self) -> f32 {
        self
    }
    fn narrow(value: f32) -> Self {
        value
    }
}

impl Number for bf16 {
    fn from_low_bits(bits: u32) -> Self {
        Self::from_bits(bits as u16)
    }
    fn bits(self) -> u32 {
        u32::from(self.to_bits())
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }
}

impl Number for f16 {
    fn from_low_bits(bits: u32) -> Self {
        Self::from_bits(bits as u16)
    }
    fn bits(self) -> u32 {
        u32::from(self.to_bits())
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }
}

// ---- tensors between guards

/// Elements on either side of a tensor's span.
const GUARDS: usize = 37;

/// A tensor of any strides in memory of its own, everything else of which is a guard.
#[derive(Clone, Debug)]
struct Guarded<T> {
    memory: Vec<T>,
    layout: Layout,
}

/// Where the element of a logical (row-major) index lies in a layout.
fn offset(layout: &Layout, index: usize) -> usize {
    let mut rest = index;
    let mut offset = 0;
    for (size, stride) in layout.sizes.iter().zip(&layout.strides).rev() {
        offset += rest % size * stride;
        rest /= size;
    }
    offset
}

impl<T: Number> Guarded<T> {
    fn guard(at: usize) -> T {
        T::from_low_bits(0x4242_4200 + at as u32)
    }

    fn new(layout: Layout) -> Self {
        let memory = (0..layout.span() + 2 * GUARDS).map(Self::guard).collect();
        Self { memory, layout }
    }

    fn at(&self, index: usize) -> usize {
        GUARDS + offset(&self.layout, index)
    }

    fn fill(&mut self, value: impl Fn(usize) -> f32) {
        for index in 0..self.layout.numel() {
            let at = self.at(index);
            self.memory[at] = T::narrow(value(index));
        }
    }

    fn get(&self, index: usize) -> T {
        self.memory[self.at(index)]
    }

    fn read(&self, state: &Layout) -> StridedRef<'_, T> {
        let walks = Walks::new(state, &self.layout);
        // SAFETY: every element of the layout lies between the guards of `memory`, which is borrowed for as long.
        unsafe { StridedRef::new(self.memory.as_ptr().add(GUARDS), self.layout.numel(), walks) }
    }

    fn write(&mut self, state: &Layout) -> StridedMut<'_, T> {
        assert!(!self.layout.overlaps_itself());
        let walks = Walks::new(state, &self.layout);
        // SAFETY: as in `read`; no two elements are the same.
        unsafe { StridedMut::new(self.memory.as_mut_ptr().add(GUARDS), self.layout.numel(), walks) }
    }

    fn assert_guards(&self, what: &str) {
        let mut own = vec![false; self.memory.len()];
        (0..self.layout.numel()).for_each(|index| own[self.at(index)] = true);
        for (at, own) in own.into_iter().enumerate() {
            assert!(
                own || self.memory[at].bits() == Self::guard(at).bits(),
                "{what}: wrote beside {:?}, at {at}",
                self.layout
            );
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum DType {
    F32,
    Bf16,
    F16,
}

#[derive(Clone, Debug)]
enum Tensor {
    F32(Guarded<f32>),
    Bf16(Guarded<bf16>),
    F16(Guarded<f16>),
}

macro_rules! each {
    ($tensor:expr, $inner:ident => $body:expr) => {
        match $tensor {
            Tensor::F32($inner) => $body,
            Tensor::Bf16($inner) => $body,
            Tensor::F16($inner) => $body,
        }
    };
}

impl Tensor {
    fn new(dtype: DType, layout: Layout) -> Self {
        match dtype {
            DType::F32 => Self::F32(Guarded::new(layout)),
            DType::Bf16 => Self::Bf16(Guarded::new(layout)),
            DType::F16 => Self::F16(Guarded::new(layout)),
        }
    }

    fn fill(&mut self, value: impl Fn(usize) -> f32) {
        each!(self, tensor => tensor.fill(value));
    }

    fn bits(&self, index: usize) -> u32 {
        each!(self, tensor => tensor.get(index).bits())
    }

    fn value(&self, index: usize) -> f32 {
        each!(self, tensor => tensor.get(index).widen())
    }

    /// The value once it has been stored in this tensor's dtype.
    fn rounded(&self, value: f32) -> f32 {
        match self {
            Self::F32(_) => value,
            Self::Bf16(_) => bf16::narrow(value).widen(),
            Self::F16(_) => f16::narrow(value).widen(),
        }
    }

    fn assert_guards(&self, what: &str) {
        each!(self, tensor => tensor.assert_guards(what));
    }

    fn weight(&mut self, state: &Layout) -> WeightView<'_> {
        match self {
            Self::F32(tensor) => WeightView::F32(tensor.write(state)),
            Self::Bf16(tensor) => WeightView::Bf16(tensor.write(state)),
            Self::F16(tensor) => WeightView::F16(tensor.write(state)),
        }
    }

    fn grad(&mut self, state: &Layout, exclusive: bool) -> GradView<'_> {
        fn elements<'a, T: Number>(tensor: &'a mut Guarded<T>, state: &Layout, exclusive: bool) -> GradElements<'a, T> {
            if exclusive {
                GradElements::Exclusive(tensor.write(state))
            } else {
                GradElements::Shared(tensor.read(state))
            }
        }
        match self {
            Self::F32(tensor) => GradView::F32(elements(tensor, state, exclusive)),
            Self::Bf16(tensor) => GradView::Bf16(elements(tensor, state, exclusive)),
            Self::F16(tensor) => GradView::F16(elements(tensor, state, exclusive)),
        }
    }
}

// ---- the oracle

/// What is stored of one element, as bits of whatever dtype it has.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stored {
    weight: u32,
    kept: u32,
    m: u32,
    v: u32,
    max: u32,
}

/// One element after a step, before anything is rounded to a storage dtype.
#[derive(Clone, Copy, Debug)]
struct Stepped {
    p: f32,
    m: f32,
    v: f32,
    root: f32,
}

/// The fp32 value behind a weight and what is kept of it.
fn master(kind: WeightKind, weight: u32, kept: u32) -> f32 {
    match kind {
        WeightKind::F32 => f32::from_bits(weight),
        WeightKind::Bf16Split => {
            let residual = i64::from(kept as u16 as i16);
            let magnitude = weight & 0x7FFF;
            let ignored = (magnitude == 0 && residual < 0)
                || (magnitude == 0x7F80 && residual > 0)
                || magnitude > 0x7F80
                || (residual == -32768 && weight % 2 == 1);
            let bits = (i64::from(weight) << 16) + if ignored { 0 } else { residual };
            f32::from_bits(u32::try_from(bits).unwrap())
        }
        WeightKind::Bf16Full => {
            let (weight, kept) = (bf16::from_bits(weight as u16), f32::from_bits(kept));
            if bf16::from_f32(kept).to_bits() == weight.to_bits() { kept } else { weight.to_f32() }
        }
        WeightKind::F16Full => {
            let (weight, kept) = (f16::from_bits(weight as u16), f32::from_bits(kept));
            if f16::from_f32(kept).to_bits() == weight.to_bits() { kept } else { weight.to_f32() }
        }
    }
}

/// The recipe for one element: `g` is the gradient, unscaled.
fn oracle(config: &AdamWConfig, steps: f64, clip: f32, p: f32, g: f32, m: f32, v: f32, max: Option<f32>) -> Stepped {
    let (beta1, beta2) = config.betas;
    let mut g = clip * g;
    if config.maximize {
        g = -g;
    }
    let decay = config.weight_decay as f32;
    if !config.decoupled_weight_decay && decay != 0.0 {
        g = p.mul_add(decay, g);
    }
    let w = (1.0 - beta1) as f32;
    let m = if w < 0.5 { w.mul_add(g - m, m) } else { (w - 1.0).mul_add(g - m, g) };
    let squared = (1.0 - beta2) as f32 * g;
    let v = squared.mul_add(g, beta2 as f32 * v);
    let root = match max {
        Some(max) if !(v.is_nan() || v > max) => max,
        _ => v,
    };
    let denominator = root.sqrt() / (1.0 - beta2.powf(steps)).sqrt() as f32 + config.eps as f32;
    let mut p = p;
    if config.decoupled_weight_decay {
        p *= (1.0 - config.lr * config.weight_decay) as f32;
    }
    let step_size = (config.lr / (1.0 - beta1.powf(steps))) as f32;
    p -= (step_size * m) / denominator;
    Stepped { p, m, v, root }
}

/// Whether a moment was stored as it should be: as it is in fp32, as one of its two neighbours in bf16.
fn moment_is_stored(dtype: MomentDType, stored: u32, value: f32) -> bool {
    match dtype {
        MomentDType::F32 => same(f32::from_bits(stored), value),
        MomentDType::Bf16 => {
            let got = bf16::from_bits(stored as u16).to_f32();
            if !value.is_finite() {
                return same(got, value);
            }
            let toward_zero = value.to_bits() >> 16;
            let is_exact = value.to_bits().trailing_zeros() >= 16;
            stored == toward_zero || (!is_exact && stored == toward_zero + 1)
        }
    }
}

fn assert_stored(kind: WeightKind, moments: MomentDType, amsgrad: bool, stored: Stored, wanted: Stepped, what: &str) {
    let p = wanted.p;
    let full = |rounded: f32, weight: f32| same(weight, rounded) && same(f32::from_bits(stored.kept), p);
    let weight_is_stored = match kind {
        WeightKind::F32 => same(f32::from_bits(stored.weight), p),
        WeightKind::Bf16Split if p.is_nan() => (stored.weight, stored.kept) == (0x7FC0, 0),
        WeightKind::Bf16Split => {
            let weight = u32::from(bf16::from_f32(p).to_bits());
            // The one residual that does not fit belongs to a tie that rounds down.
            let residual = (i64::from(p.to_bits()) - (i64::from(weight) << 16)).min(0x7FFF);
            (stored.weight, stored.kept) == (weight, u32::from(residual as u16))
        }
        WeightKind::Bf16Full => full(bf16::from_f32(p).to_f32(), bf16::from_bits(stored.weight as u16).to_f32()),
        WeightKind::F16Full => full(f16::from_f32(p).to_f32(), f16::from_bits(stored.weight as u16).to_f32()),
    };
    assert!(weight_is_stored, "{what}: weight and master {stored:x?}, wanted {wanted:?} of {kind:?}");
    assert!(moment_is_stored(moments, stored.m, wanted.m), "{what}: exp_avg {stored:x?}, wanted {wanted:?}");
    assert!(moment_is_stored(moments, stored.v, wanted.v), "{what}: exp_avg_sq {stored:x?}, wanted {wanted:?}");
    if amsgrad {
        let max_is_stored = match moments {
            MomentDType::F32 => same(f32::from_bits(stored.max), wanted.root),
            MomentDType::Bf16 => same(bf16::from_bits(stored.max as u16).to_f32(), bf16::narrow(wanted.root).widen()),
        };
        assert!(max_is_stored, "{what}: max_exp_avg_sq {stored:x?}, wanted {wanted:?}");
    }
}

// ---- a parameter under test

/// One parameter: what there is of it and in which layout.
#[derive(Clone, Debug)]
struct Plan {
    kind: WeightKind,
    moments: MomentDType,
    amsgrad: bool,
    grad: DType,
    weight_layout: Layout,
    grad_layout: Layout,
    /// Whether an unscaled gradient is written back.
    exclusive: bool,
}

fn weight_dtype(kind: WeightKind) -> DType {
    match kind {
        WeightKind::F32 => DType::F32,
        WeightKind::Bf16Split | WeightKind::Bf16Full => DType::Bf16,
        WeightKind::F16Full => DType::F16,
    }
}

impl Plan {
    fn contiguous(kind: WeightKind, moments: MomentDType, amsgrad: bool, grad: DType, len: usize) -> Self {
        let layout = Layout::contiguous(len);
        Self { kind, moments, amsgrad, grad, weight_layout: layout.clone(), grad_layout: layout, exclusive: false }
    }

    fn spec(&self, number: u64) -> SlotSpec {
        SlotSpec {
            name: format!("p{number}").into(),
            number,
            layout: self.weight_layout.dense_like(),
            weight: self.kind,
            moments: self.moments,
            amsgrad: self.amsgrad,
        }
    }
}

/// A parameter and its state. Its planes lie between planes of guards.
struct Parameter {
    plan: Plan,
    slot: Slot,
    weight: Tensor,
    grad: Tensor,
    guards: [Plane<f32>; 2],
}

const PLANE_GUARD: f32 = -7.25;

impl Parameter {
    /// Makes parameters side by side in one slab; their state starts from `values` (NaN and negative moments included).
    fn make(plans: &[Plan], values: &[f32], first_step: f64) -> Vec<Self> {
        let specs: Vec<SlotSpec> = plans.iter().zip(0..).map(|(plan, number)| plan.spec(number)).collect();
        let guards = 2 * plane_bytes::<f32>(GUARDS).unwrap();
        let bytes = specs.iter().map(|spec| spec.bytes().unwrap() + guards).sum();
        let mut slab = Arena::default().slab(bytes, pool(1)).unwrap();
        let guard = |slab: &mut outboard::memory::Slab| {
            let mut plane = slab.carve::<f32>(GUARDS);
            plane.as_mut_slice().fill(PLANE_GUARD);
            plane
        };
        plans
            .iter()
            .zip(specs)
            .map(|(plan, spec)| {
                let before = guard(&mut slab);
                let mut slot = Slot::carve(spec, &mut slab);
                slot.set_steps(first_step);
                let value = |salt: usize, index: usize| values[(index * 7 + salt) % values.len()];
                match &mut slot.moments {
                    Moments::F32(planes) => start(planes, value),
                    Moments::Bf16(planes) => start(planes, value),
                }
                match &mut slot.kept {
                    Kept::Nothing => {}
                    Kept::Residual(plane) => {
                        for (i, residual) in plane.as_mut_slice().iter_mut().enumerate() {
                            *residual = match i % 7 {
                                0 => i16::MIN,
                                1 => i16::MAX,
                                2 => -1,
                                _ => (value(5, i).to_bits() >> 3) as i16,
                            };
                        }
                    }
                    Kept::Master(plane) => {
                        plane.as_mut_slice().iter_mut().enumerate().for_each(|(i, kept)| *kept = value(5, i));
                    }
                }
                let mut weight = Tensor::new(weight_dtype(plan.kind), plan.weight_layout.clone());
                weight.fill(|index| value(0, index));
                let grad = Tensor::new(plan.grad, plan.grad_layout.clone());
                Self { plan: plan.clone(), slot, weight, grad, guards: [before, guard(&mut slab)] }
            })
            .collect()
    }

    fn numel(&self) -> usize {
        self.plan.weight_layout.numel()
    }

    /// Everything that is stored, by logical index.
    fn stored(&self) -> Vec<Stored> {
        let at = |index| offset(&self.slot.spec.layout, index);
        (0..self.numel())
            .map(|index| {
                let (m, v, max) = match &self.slot.moments {
                    Moments::F32(planes) => moment_bits(planes, at(index)),
                    Moments::Bf16(planes) => moment_bits(planes, at(index)),
                };
                let kept = match &self.slot.kept {
                    Kept::Nothing => 0,
                    Kept::Residual(plane) => u32::from(plane.as_slice()[at(index)] as u16),
                    Kept::Master(plane) => plane.as_slice()[at(index)].to_bits(),
                };
                Stored { weight: self.weight.bits(index), kept, m, v, max }
            })
            .collect()
    }

    fn widened_moment(&self, bits: u32) -> f32 {
        if self.plan.moments == MomentDType::F32 { f32::from_bits(bits) } else { bf16::from_bits(bits as u16).to_f32() }
    }

    fn update(&mut self, config: AdamWConfig) -> Update<'_> {
        let Self { plan, slot, weight, grad, .. } = self;
        let state = slot.spec.layout.clone();
        Update { slot, weight: weight.weight(&state), grad: grad.grad(&state, plan.exclusive), config }
    }

    fn assert_guards(&self, what: &str) {
        self.weight.assert_guards(&format!("{what}, weight"));
        self.grad.assert_guards(&format!("{what}, gradient"));
        for plane in &self.guards {
            assert!(plane.as_slice().iter().all(|&guard| guard == PLANE_GUARD), "{what}: wrote beside its planes");
        }
    }
}

/// Sets moments to values of any kind, those of a second moment mostly not negative.
fn start<T: Number>(planes: &mut MomentPlanes<T>, value: impl Fn(usize, usize) -> f32) {
    planes.exp_avg.as_mut_slice().iter_mut().enumerate().for_each(|(i, m)| *m = T::narrow(value(1, i)));
    let squared = |salt, i: usize| if i % 11 == 3 { value(salt, i) } else { value(salt, i).abs() };
    planes.exp_avg_sq.as_mut_slice().iter_mut().enumerate().for_each(|(i, v)| *v = T::narrow(squared(2, i)));
    if let Some(max) = &mut planes.max_exp_avg_sq {
        max.as_mut_slice().iter_mut().enumerate().for_each(|(i, max)| *max = T::narrow(squared(3, i)));
    }
}

fn moment_bits<T: Number>(planes: &MomentPlanes<T>, at: usize) -> (u32, u32, u32) {
    let max = planes.max_exp_avg_sq.as_ref().map_or(0, |plane| plane.as_slice()[at].bits());
    (planes.exp_avg.as_slice()[at].bits(), planes.exp_avg_sq.as_slice()[at].bits(), max)
}

/// Where and how a step is computed: nothing that may change a bit.
#[derive(Clone, Copy, Debug)]
struct Machine {
    isa: Isa,
    threads: usize,
    chunk_elems: usize,
}

/// What a step is about.
#[derive(Clone, Debug)]
struct Settings {
    config: AdamWConfig,
    max_grad_norm: Option<f64>,
    grad_scale: Option<f32>,
    seed: u64,
}

/// One step of all parameters, with every stored number compared with the oracle's.
fn checked_step(
    parameters: &mut [Parameter],
    settings: &Settings,
    machine: Machine,
    values: &[f32],
    salt: usize,
) -> StepReport {
    for (number, parameter) in parameters.iter_mut().enumerate() {
        parameter.grad.fill(|index| values[(index * 5 + salt + number) % values.len()]);
    }
    let before: Vec<Vec<Stored>> = parameters.iter().map(Parameter::stored).collect();
    let gradients: Vec<Vec<f32>> =
        parameters.iter().map(|p| (0..p.numel()).map(|index| p.grad.value(index)).collect()).collect();
    let counts: Vec<f64> = parameters.iter().map(|p| p.slot.steps()).collect();
    let options = StepOptions {
        chunk_elems: machine.chunk_elems,
        max_grad_norm: settings.max_grad_norm,
        grad_scale: settings.grad_scale,
        seed: settings.seed,
        ..StepOptions::default()
    };
    let updates = parameters.iter_mut().map(|parameter| parameter.update(settings.config)).collect();
    let report = engine::step(pool(machine.threads), machine.isa, updates, &options).unwrap();

    assert_eq!(report.parameters, parameters.len());
    assert_eq!(report.elements, parameters.iter().map(Parameter::numel).sum::<usize>());
    assert!(!report.skipped);
    let unscaled = |g: f32| settings.grad_scale.map_or(g, |scale| g / scale);
    let clip = settings.max_grad_norm.map_or(1.0, |max_norm| {
        let squares = gradients.iter().flatten().map(|&g| f64::from(unscaled(g)).powi(2));
        let norm = squares.sum::<f64>().sqrt();
        let reported = report.grad_norm.unwrap();
        let close = (reported - norm).abs() <= 1e-9 * norm || (reported.is_nan() && norm.is_nan()) || reported == norm;
        assert!(close, "norm {reported}, wanted {norm}");
        let factor = max_norm / (reported + 1e-6);
        (if factor > 1.0 { 1.0 } else { factor }) as f32
    });
    for (number, parameter) in parameters.iter().enumerate() {
        let Plan { kind, moments, amsgrad, exclusive, .. } = parameter.plan;
        let steps = counts[number] + 1.0;
        assert_eq!(parameter.slot.steps(), steps);
        for (index, stored) in parameter.stored().into_iter().enumerate() {
            let what = format!("p{number}[{index}] on {machine:?}");
            let old = before[number][index];
            let g = unscaled(gradients[number][index]);
            let max = amsgrad.then(|| parameter.widened_moment(old.max));
            let (m, v) = (parameter.widened_moment(old.m), parameter.widened_moment(old.v));
            let p = master(kind, old.weight, old.kept);
            let wanted = oracle(&settings.config, steps, clip, p, g, m, v, max);
            assert_stored(kind, moments, amsgrad, stored, wanted, &what);

            let written = settings.grad_scale.is_some() && exclusive;
            let wanted_grad = if written { parameter.grad.rounded(g) } else { gradients[number][index] };
            let grad = parameter.grad.value(index);
            assert!(same(grad, wanted_grad), "{what}: the gradient is {grad:e} now, wanted {wanted_grad:e}");
        }
        parameter.assert_guards(&format!("p{number} on {machine:?}"));
    }
    report
}

// ---- what is generated

/// Any layout of these sizes: dense or with gaps, dimensions in any order; with `expand`, one dimension may have stride 0.
fn layout(sizes: &[usize], seed: u32, expand: bool) -> Layout {
    let mut layout = Layout::row_major(sizes);
    if !seed.is_multiple_of(3) {
        let mut dims: Vec<usize> = (0..sizes.len()).collect();
        dims.sort_by_key(|&dim| (dim as u32 + 1).wrapping_mul(seed | 1).rotate_left(11));
        let mut next = 1 + (seed >> 8) as usize % 2;
        for dim in dims {
            layout.strides[dim] = next;
            next = next * sizes[dim].max(1) + (seed >> 10) as usize % 3;
        }
    }
    if expand && !sizes.is_empty() && (seed >> 16).is_multiple_of(3) {
        layout.strides[(seed >> 18) as usize % sizes.len()] = 0;
    }
    layout
}

/// fp32 values of every kind.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => -2.0_f32..2.0,
        2 => any::<u32>().prop_map(f32::from_bits),
        2 => (-150.0_f32..-100.0, any::<bool>()).prop_map(|(e, minus)| if minus { -e.exp2() } else { e.exp2() }),
        1 => (-26.0_f32..-10.0).prop_map(f32::exp2),
        2 => select(vec![
            0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1.0, -1.0,
            f32::from_bits(1), f32::from_bits(0x807F_FFFF), f32::from_bits(0x7FFF_FFFF), f32::from_bits(0xFFC0_0000),
            65504.0, 65520.0, 1e20, f32::from_bits(0x3F80_8000), f32::from_bits(0x3F81_8000),
        ]),
    ]
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        5 => prop::collection::vec(0_usize..7, 0..4),
        5 => prop::collection::vec(1_usize..9, 1..4),
        3 => (0_usize..71).prop_map(|n| vec![n]),
        1 => (1020_usize..1030).prop_map(|n| vec![n]),
        1 => select(vec![vec![3, 700], vec![700, 3], vec![2, 3, 350], vec![41, 51]]),
    ]
}

fn plan() -> impl Strategy<Value = Plan> {
    let kinds = [WeightKind::F32, WeightKind::Bf16Split, WeightKind::Bf16Full, WeightKind::F16Full];
    (
        select(kinds.to_vec()),
        select(vec![MomentDType::F32, MomentDType::F32, MomentDType::Bf16]),
        select(vec![DType::F32, DType::Bf16, DType::F16]),
        sizes(),
        any::<(u32, u32)>(),
        any::<(bool, bool)>(),
    )
        .prop_map(|(kind, moments, grad, sizes, (weight_seed, grad_seed), (exclusive, expand))| Plan {
            kind,
            moments,
            amsgrad: false,
            grad,
            weight_layout: layout(&sizes, weight_seed, false),
            grad_layout: layout(&sizes, grad_seed, expand && !exclusive),
            exclusive,
        })
}

fn config() -> impl Strategy<Value = AdamWConfig> {
    (
        select(vec![1e-3, 0.0, 0.1, 1e-9, 3.0]),
        select(vec![(0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.3, 0.99), (0.0, 0.0), (0.0, 0.999), (0.51, 0.0)]),
        select(vec![1e-8, 0.0, 1e-3, 1e-41]),
        select(vec![0.0, 0.1, 1e-2, 10.0]),
        any::<(bool, bool, bool)>(),
    )
        .prop_map(|(lr, betas, eps, weight_decay, (amsgrad, maximize, decoupled_weight_decay))| AdamWConfig {
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize,
            decoupled_weight_decay,
        })
}

fn settings() -> impl Strategy<Value = Settings> {
    (
        config(),
        select(vec![None, None, Some(1.0), Some(0.0), Some(0.3), Some(1e-42), Some(f64::INFINITY)]),
        select(vec![None, None, Some(1.0), Some(3.0), Some(65536.0), Some(1e-3)]),
        any::<u64>(),
    )
        .prop_map(|(config, max_grad_norm, grad_scale, seed)| Settings { config, max_grad_norm, grad_scale, seed })
}

fn machine() -> impl Strategy<Value = Machine> {
    let chunks = select(vec![1, 2, 3, 17, 64, 255, 1024, 1025, 4096, 1 << 22]);
    (select(Isa::available().collect::<Vec<_>>()), select(THREADS.to_vec()), chunks)
        .prop_map(|(isa, threads, chunk_elems)| Machine { isa, threads, chunk_elems })
}

proptest! {
    #![proptest_config(deterministic())]

    /// Whatever the parameters, their layouts and values, a step stores what the oracle says, on any two machines.
    #[test]
    fn every_number_is_the_oracles(
        mut plans in prop::collection::vec(plan(), 1..4),
        settings in settings(),
        values in prop::collection::vec(value(), 1..40),
        machines in (machine(), machine()),
        first_step in select(vec![0.0, 0.0, 1.0, 6.0, 16_777_216.0, 1e15]),
        steps in 1_usize..4,
    ) {
        for plan in &mut plans {
            plan.amsgrad = settings.config.amsgrad;
        }
        let run = |machine| {
            let mut parameters = Parameter::make(&plans, &values, first_step);
            let norms: Vec<_> = (0..steps)
                .map(|salt| checked_step(&mut parameters, &settings, machine, &values, salt * 3))
                .map(|report| report.grad_norm.map(f64::to_bits))
                .collect();
            (norms, parameters.iter().map(Parameter::stored).collect::<Vec<_>>())
        };
        let ((norms_a, stored_a), (norms_b, stored_b)) = (run(machines.0), run(machines.1));
        let is_nan = |bits: &Option<u64>| bits.is_some_and(|bits| f64::from_bits(bits).is_nan());
        prop_assert!(norms_a.iter().zip(&norms_b).all(|(a, b)| a == b || (is_nan(a) && is_nan(b))), "{norms_a:?} {norms_b:?}");
        // fp32 NaNs may differ in sign and payload between vector and scalar code; stochastic rounding must not.
        for (plan, (a, b)) in plans.iter().zip(stored_a.iter().zip(&stored_b)) {
            if plan.moments == MomentDType::Bf16 {
                let moments = |stored: &[Stored]| stored.iter().map(|s| (s.m, s.v, s.max)).collect::<Vec<_>>();
                prop_assert_eq!(moments(a), moments(b));
            }
        }
    }

    /// Masters read, written, loaded and cleared through any strides.
    #[test]
    fn masters_in_and_out(
        plan in plan(),
        other_seed in any::<u32>(),
        values in prop::collection::vec(value(), 1..40),
    ) {
        let mut parameter = Parameter::make(std::slice::from_ref(&plan), &values, 0.0).pop().unwrap();
        let state = parameter.slot.spec.layout.clone();
        let mut copy = Guarded::<f32>::new(layout(&plan.weight_layout.sizes, other_seed, false));
        let before = parameter.stored();

        parameter.slot.read_master(&parameter.weight.weight(&state), &mut copy.write(&state)).unwrap();
        for (index, old) in before.iter().enumerate() {
            let wanted = master(plan.kind, old.weight, old.kept);
            prop_assert!(same(copy.get(index), wanted), "read {} of {:x?}, wanted {}", copy.get(index), old, wanted);
        }
        prop_assert_eq!(&parameter.stored(), &before, "reading changed something");

        let new = |index: usize| values[(index * 3 + 1) % values.len()];
        copy.fill(new);
        parameter.slot.load_kept(&copy.read(&state)).unwrap();
        let weights_only = |stored: &[Stored]| stored.iter().map(|s| s.weight).collect::<Vec<_>>();
        prop_assert_eq!(weights_only(&parameter.stored()), weights_only(&before), "the weight stays");

        parameter.slot.write_master(&mut parameter.weight.weight(&state), &copy.read(&state)).unwrap();
        for (index, (stored, old)) in parameter.stored().iter().zip(&before).enumerate() {
            let p = new(index);
            let zero = Stepped { p, m: parameter.widened_moment(old.m), v: parameter.widened_moment(old.v), root: 0.0 };
            assert_stored(plan.kind, plan.moments, false, *stored, zero, &format!("wrote {p:e} to [{index}]"));
        }
        parameter.slot.clear_kept(&parameter.weight.weight(&state)).unwrap();
        for stored in parameter.stored() {
            let weight = match weight_dtype(plan.kind) {
                DType::F32 => f32::from_bits(stored.weight),
                DType::Bf16 => bf16::from_bits(stored.weight as u16).to_f32(),
                DType::F16 => f16::from_bits(stored.weight as u16).to_f32(),
            };
            prop_assert!(same(master(plan.kind, stored.weight, stored.kept), weight));
        }
        if plan.kind == WeightKind::Bf16Full {
            let mut residuals = Parameter::make(&[Plan { kind: WeightKind::Bf16Split, ..plan.clone() }], &values, 0.0).pop().unwrap();
            let Kept::Residual(plane) = &residuals.slot.kept else { unreachable!() };
            parameter.slot.load_residual(&parameter.weight.weight(&state), &plane.as_slice().into()).unwrap();
            residuals.weight = parameter.weight.clone();
            for (full, split) in parameter.stored().iter().zip(residuals.stored()) {
                prop_assert!(same(f32::from_bits(full.kept), master(WeightKind::Bf16Split, split.weight, split.kept)));
            }
        }
        parameter.assert_guards("masters");
        copy.assert_guards("the fp32 copy");
    }

    /// State follows a parameter to another order of its dimensions, element by element.
    #[test]
    fn state_follows_a_memory_format(
        mut plan in plan(),
        amsgrad in any::<bool>(),
        other_seed in any::<u32>(),
        values in prop::collection::vec(value(), 1..40),
    ) {
        plan.amsgrad = amsgrad;
        let mut parameter = Parameter::make(std::slice::from_ref(&plan), &values, 3.0).pop().unwrap();
        let before = parameter.stored();
        let target = layout(&plan.weight_layout.sizes, other_seed, false).dense_like();
        parameter.slot.follow(target.clone()).unwrap();
        prop_assert_eq!(&parameter.slot.spec.layout, &target);
        prop_assert_eq!(parameter.stored(), before);
        let mut wrong = target;
        wrong.sizes.push(2);
        wrong.strides.push(1);
        prop_assert!(matches!(parameter.slot.follow(wrong), Err(Error::InvalidValue(_))));
        parameter.assert_guards("follow");
    }
}

/// Sizes around vectors, blocks and chunks, on every level, thread count and chunk size.
#[test]
fn sizes_around_every_border() {
    let values: Vec<f32> = (0..97_u16).map(|i| (f32::from(i) * 0.37).sin() * 2.0).collect();
    let settings = Settings {
        config: AdamWConfig { amsgrad: true, ..AdamWConfig::default() },
        max_grad_norm: None,
        grad_scale: None,
        seed: 5,
    };
    let plans = |len: usize| {
        [
            Plan::contiguous(WeightKind::F32, MomentDType::F32, true, DType::F32, len),
            Plan::contiguous(WeightKind::Bf16Split, MomentDType::F32, true, DType::Bf16, len),
            Plan::contiguous(WeightKind::F16Full, MomentDType::Bf16, true, DType::F16, len),
        ]
    };
    println!("levels compared: {:?}", Isa::available().collect::<Vec<_>>());
    for isa in Isa::available() {
        for len in (0..=70).chain([255, 256, 257, 513, 1023, 1024, 1025, 2049]) {
            for (threads, chunk_elems) in [(1, 1 << 22), (3, 256), (8, 1024)] {
                let mut parameters = Parameter::make(&plans(len), &values, 0.0);
                checked_step(&mut parameters, &settings, Machine { isa, threads, chunk_elems }, &values, 1);
            }
        }
        for threads in THREADS {
            for chunk_elems in [4095, 4096, 4097, 1 << 18, 1 << 22] {
                let mut parameters = Parameter::make(&plans(2 * 4096 + 1), &values, 0.0);
                checked_step(&mut parameters, &settings, Machine { isa, threads, chunk_elems }, &values, 2);
            }
        }
    }
}

/// The norm is that of the float64 sum, with the same bits for every layout, level and thread count.
#[test]
fn one_norm_for_all() {
    let values: Vec<f32> =
        (0..8191_u32).map(|i| ((f64::from(i) * 0.61).sin() * 10_f64.powi((i % 40) as i32 - 20)) as f32).collect();
    let config = AdamWConfig { lr: 0.0, weight_decay: 0.0, ..AdamWConfig::default() };
    for grad in [DType::F32, DType::Bf16, DType::F16] {
        let mut norms = Vec::new();
        for seed in [0_u32, 0x0001_0704, 0x2000_0d05] {
            for isa in Isa::available() {
                for (threads, chunk_elems) in [(1, 1 << 22), (3, 100), (8, 4096)] {
                    let mut plan = Plan::contiguous(WeightKind::F32, MomentDType::F32, false, grad, 0);
                    plan.weight_layout = Layout::row_major(&[130, 3, 131]);
                    plan.grad_layout = layout(&[130, 3, 131], seed, false);
                    let mut parameters = Parameter::make(&[plan], &[1.0], 0.0);
                    let settings = Settings { config, max_grad_norm: Some(1.0), grad_scale: None, seed: 0 };
                    let report =
                        checked_step(&mut parameters, &settings, Machine { isa, threads, chunk_elems }, &values, 0);
                    norms.push(report.grad_norm.unwrap().to_bits());
                }
            }
        }
        assert!(norms.iter().all(|norm| *norm == norms[0]), "{norms:x?}");
    }
}

/// With nearest rounding a bf16 second moment would never fall at beta2 = 0.999.
#[test]
fn bf16_moments_decay_on_average() {
    let plan = Plan::contiguous(WeightKind::F32, MomentDType::Bf16, false, DType::F32, 512);
    let mut parameter = Parameter::make(&[plan], &[0.0], 0.0).pop().unwrap();
    let Moments::Bf16(planes) = &mut parameter.slot.moments else { unreachable!() };
    planes.exp_avg_sq.as_mut_slice().fill(bf16::ONE);
    parameter.grad.fill(|_| 0.0);
    for _ in 0..3000 {
        let updates = vec![parameter.update(AdamWConfig::default())];
        engine::step(pool(1), Isa::Portable, updates, &StepOptions::default()).unwrap();
    }
    let Moments::Bf16(planes) = &parameter.slot.moments else { unreachable!() };
    let mean = planes.exp_avg_sq.as_slice().iter().map(|v| v.to_f64()).sum::<f64>() / 512.0;
    let wanted = 0.999_f64.powi(3000);
    assert!((mean / wanted - 1.0).abs() < 0.05, "{mean} after 3000 steps, wanted {wanted}");
}

/// The group's flag decides, not whether there is a plane: torch leaves the maximum alone while amsgrad is off.
#[test]
fn amsgrad_switched_off_uses_the_second_moment_itself() {
    let plan = Plan::contiguous(WeightKind::F32, MomentDType::F32, true, DType::F32, 40);
    let mut parameter = Parameter::make(&[plan], &[0.5, 1.5, 0.25], 3.0).pop().unwrap();
    let Moments::F32(planes) = &mut parameter.slot.moments else { unreachable!() };
    planes.max_exp_avg_sq.as_mut().unwrap().as_mut_slice().fill(100.0);
    parameter.grad.fill(|_| 0.125);
    let before = parameter.stored();
    let config = AdamWConfig { amsgrad: false, ..AdamWConfig::default() };
    engine::step(pool(1), Isa::Portable, vec![parameter.update(config)], &StepOptions::default()).unwrap();
    for (old, new) in before.iter().zip(parameter.stored()) {
        let bits = f32::from_bits;
        let wanted = oracle(&config, 4.0, 1.0, bits(old.weight), 0.125, bits(old.m), bits(old.v), None);
        assert_eq!(bits(new.weight), wanted.p);
        assert_eq!(bits(new.max), 100.0);
    }
}

/// Asking for amsgrad where there is no plane for it must not be ignored.
#[test]
fn amsgrad_without_its_plane_is_refused() {
    let plan = Plan::contiguous(WeightKind::F32, MomentDType::F32, false, DType::F32, 4);
    let mut parameter = Parameter::make(&[plan], &[0.5], 0.0).pop().unwrap();
    parameter.grad.fill(|_| 1.0);
    let before = parameter.stored();
    let config = AdamWConfig { amsgrad: true, ..AdamWConfig::default() };
    let result = engine::step(pool(1), Isa::Portable, vec![parameter.update(config)], &StepOptions::default());
    assert!(matches!(result, Err(Error::InvalidValue(_))), "{result:?}");
    assert_eq!(parameter.stored(), before);
}

/// The caller's rounding and flushing modes.
#[cfg(target_arch = "x86_64")]
mod float_environment {
    use super::*;
    use std::arch::asm;

    const DEFAULT: u32 = 0x1F80;
    const MODES: u32 = 0xFFC0;
    const FLUSHING: u32 = DEFAULT | 0x8040;
    const UPWARD: u32 = DEFAULT | 0x4000;

    fn get() -> u32 {
        let mut value = 0_u32;
        // SAFETY: stores MXCSR to a live u32.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack)) };
        value
    }

    fn set(value: u32) {
        // SAFETY: loads MXCSR from a live u32 that came from `get` or is one of the constants above.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack)) };
    }

    /// Calls `work` under these modes and asserts that it leaves them as they are. `None` where the machine (an emulator)
    /// does not have them.
    fn under<R>(modes: u32, work: impl FnOnce() -> R) -> Option<R> {
        let old = get();
        set(modes);
        if get() & MODES != modes & MODES {
            set(old);
            return None;
        }
        let result = work();
        let after = get();
        set(old);
        assert_eq!(after & MODES, modes & MODES, "the caller's modes were changed");
        Some(result)
    }

    /// A step of all kinds with denormals in inputs, constants and results, and everything read afterwards. Only the pool's
    /// start, whose threads inherit the modes, and the step are under them.
    fn stepped(
        modes: u32,
        threads: usize,
        chunk_elems: usize,
        config: AdamWConfig,
        max_grad_norm: Option<f64>,
    ) -> Option<Vec<u32>> {
        let tiny = |i: u8| f32::from_bits(u32::from(i) * 0x0001_2345 + 1);
        let values: Vec<f32> = (0..60_u8)
            .map(|i| match i % 4 {
                0 => tiny(i),
                1 => -tiny(i),
                2 => f32::from(i) * 1e-7, // denormal in fp16
                _ => f32::from(i) * 0.013 - 0.3,
            })
            .collect();
        let plans = [
            Plan::contiguous(WeightKind::F32, MomentDType::F32, false, DType::F32, 600),
            Plan::contiguous(WeightKind::Bf16Split, MomentDType::F32, false, DType::Bf16, 600),
            Plan::contiguous(WeightKind::F16Full, MomentDType::F32, false, DType::F16, 600),
        ];
        let mut parameters = Parameter::make(&plans, &values, 0.0);
        for parameter in &mut parameters {
            parameter.grad.fill(|index| values[(index * 5 + 2) % values.len()]);
        }
        let options = StepOptions { chunk_elems, max_grad_norm, compute_grad_norm: true, ..StepOptions::default() };
        let isa = Isa::available().next().unwrap();
        let updates = parameters.iter_mut().map(|parameter| parameter.update(config)).collect();
        let report = under(modes, || {
            let fresh = WorkerPool::new(threads).unwrap();
            engine::step(&fresh, isa, updates, &options).unwrap()
        })?;
        let norm = report.grad_norm.unwrap().to_bits();
        let stored = parameters.iter().flat_map(Parameter::stored).flat_map(|s| [s.weight, s.kept, s.m, s.v]);
        Some(stored.chain([norm as u32, (norm >> 32) as u32]).collect())
    }

    /// What of them a caller's modes may not reach: the first difference, for a message.
    fn first_difference(a: &[u32], b: &[u32]) -> Option<(usize, u32, u32)> {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).enumerate().find(|(_, (a, b))| a != b).map(|(at, (&a, &b))| (at, a, b))
    }

    fn check(modes: u32, lr: f64, eps: f64, max_grad_norm: Option<f64>) {
        let config = AdamWConfig { lr, eps, ..AdamWConfig::default() };
        for (threads, chunk_elems) in [(1, 1 << 20), (3, 100)] {
            let step = |modes| stepped(modes, threads, chunk_elems, config, max_grad_norm);
            let wanted = step(DEFAULT).unwrap();
            if let Some(got) = step(modes) {
                assert_eq!(first_difference(&got, &wanted), None, "{threads} threads, modes {modes:x}, {config:?}");
            }
        }
    }

    #[test]
    fn flushing_reaches_no_element() {
        check(FLUSHING, 1e-3, 1e-8, Some(1.0));
    }

    #[test]
    fn rounding_upward_reaches_no_element() {
        check(UPWARD, 1e-3, 1e-8, None);
    }

    /// lr, eps and the clip factor become fp32 constants, here denormal ones, on the calling thread.
    #[test]
    fn flushing_reaches_no_constant() {
        check(FLUSHING, 1e-3, 1e-40, None);
        check(FLUSHING, 1e-41, 1e-8, None);
        check(FLUSHING, 1e-3, 1e-8, Some(1e-41));
    }

    #[test]
    fn rounding_upward_reaches_no_constant() {
        for lr in [1e-3, 3e-4, 7e-5, 0.1] {
            check(UPWARD, lr, 1e-8, Some(0.37));
        }
    }

    /// fp16 weights below 6e-5 are denormal: reading their masters is arithmetic.
    #[test]
    fn flushing_reaches_no_master() {
        let plan = Plan::contiguous(WeightKind::F16Full, MomentDType::F32, false, DType::F32, 64);
        let values: Vec<f32> = (0..64_u8).map(|i| f32::from(i) * 9e-7).collect();
        let masters = |modes| {
            let mut parameter = Parameter::make(std::slice::from_ref(&plan), &values, 0.0).pop().unwrap();
            let state = parameter.slot.spec.layout.clone();
            let mut copy = vec![0.0_f32; 64];
            under(modes, || {
                parameter.slot.read_master(&parameter.weight.weight(&state), &mut (&mut copy[..]).into()).unwrap();
                parameter.slot.clear_kept(&parameter.weight.weight(&state)).unwrap();
            })?;
            let kept = parameter.stored().into_iter().map(|stored| stored.kept);
            Some(copy.iter().map(|master| master.to_bits()).chain(kept).collect::<Vec<_>>())
        };
        let wanted = masters(DEFAULT).unwrap();
        if let Some(got) = masters(FLUSHING) {
            assert_eq!(first_difference(&got, &wanted), None);
        }
    }
}
