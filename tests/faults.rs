//! What goes wrong, and what must not follow from it: failing chunks, refused calls, optimizers and pools dropped in any
//! order and used from several threads at once.
//!
//! Over 500 lines: independent cases in the order of their table, read one at a time.

use half::{bf16, f16};
use outboard::engine::{
    self, Kept, MomentDType, Moments, NonFinite, Slot, SlotSpec, StepOptions, StepReport, Update, WeightKind,
    WeightView,
};
use outboard::memory::{ALIGNMENT, Layout, Plane, Slab, StridedMut, StridedRef, Walks, plane_bytes, share_memory};
use outboard::{AdamW, AdamWConfig, Arena, Error, Isa, ThreadChoice, WorkerPool};
use std::sync::Arc;

/// The weights of one parameter, of any kind.
#[derive(Clone, Debug, PartialEq)]
enum Weights {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Weights {
    fn view(&mut self) -> WeightView<'_> {
        match self {
            Self::F32(values) => values[..].as_mut().into(),
            Self::Bf16(values) => values[..].as_mut().into(),
            Self::F16(values) => values[..].as_mut().into(),
        }
    }
}

struct Parameter {
    slot: Slot,
    weights: Weights,
    grads: Vec<f32>,
}

/// Everything of a parameter that a call may change, as bits.
#[derive(Debug, PartialEq)]
struct Snapshot {
    weights: Weights,
    grads: Vec<u32>,
    steps: f64,
    planes: Vec<u32>,
    poisoned: Option<String>,
}

fn bits(plane: &Plane<f32>) -> impl Iterator<Item = u32> + '_ {
    plane.as_slice().iter().map(|value| value.to_bits())
}

impl Parameter {
    fn new(name: &str, kind: WeightKind, len: usize, amsgrad: bool, pool: &WorkerPool) -> Self {
        let layout = Layout::contiguous(len);
        let (weight, moments) = (kind, MomentDType::F32);
        let spec = SlotSpec { name: name.into(), number: 0, layout, weight, moments, amsgrad };
        let mut slab = Arena::default().slab(spec.bytes().unwrap(), pool).unwrap();
        let value = |i: usize| (i as f32 * 0.7).sin();
        let weights = match kind {
            WeightKind::F32 => Weights::F32((0..len).map(value).collect()),
            WeightKind::F16Full => Weights::F16((0..len).map(|i| f16::from_f32(value(i))).collect()),
            _ => Weights::Bf16((0..len).map(|i| bf16::from_f32(value(i))).collect()),
        };
        Self { slot: Slot::carve(spec, &mut slab), weights, grads: (0..len).map(|i| value(i + 5)).collect() }
    }

    fn snapshot(&self) -> Snapshot {
        let Moments::F32(moments) = &self.slot.moments else { unreachable!() };
        let mut planes: Vec<u32> = bits(&moments.exp_avg).chain(bits(&moments.exp_avg_sq)).collect();
        planes.extend(moments.max_exp_avg_sq.iter().flat_map(bits));
        match &self.slot.kept {
            Kept::Nothing => {}
            Kept::Residual(plane) => planes.extend(plane.as_slice().iter().map(|&residual| residual as u32)),
            Kept::Master(plane) => planes.extend(bits(plane)),
        }
        Snapshot {
            weights: self.weights.clone(),
            grads: self.grads.iter().map(|g| g.to_bits()).collect(),
            steps: self.slot.steps(),
            planes,
            poisoned: self.slot.poisoned.clone(),
        }
    }

    fn update(&mut self) -> Update<'_> {
        let Self { slot, weights, grads } = self;
        let config = AdamWConfig { amsgrad: slot.spec.amsgrad, ..AdamWConfig::default() };
        Update { slot, weight: weights.view(), grad: grads[..].into(), config }
    }
}

fn four(pool: &WorkerPool) -> Vec<Parameter> {
    vec![
        Parameter::new("embedding", WeightKind::F32, 1000, false, pool),
        Parameter::new("projection", WeightKind::Bf16Split, 777, true, pool),
        Parameter::new("head", WeightKind::Bf16Full, 64, false, pool),
        Parameter::new("bias", WeightKind::F16Full, 1, false, pool),
    ]
}

fn step(pool: &WorkerPool, parameters: &mut [Parameter], options: &StepOptions) -> outboard::Result<StepReport> {
    let updates = parameters.iter_mut().map(Parameter::update).collect();
    engine::step(pool, Isa::current().unwrap(), updates, options)
}

fn snapshots(parameters: &[Parameter]) -> Vec<Snapshot> {
    parameters.iter().map(Parameter::snapshot).collect()
}

// ---- failures in the middle of a step

#[test]
fn a_failed_chunk_is_named_and_only_its_parameter_is_poisoned() {
    for (threads, chunk_elems) in [(1, 1 << 20), (1, 100), (3, 100), (2, 1)] {
        let pool = WorkerPool::new(threads).unwrap();
        let options = StepOptions { chunk_elems, ..StepOptions::default() };
        let mut whole = four(&pool);
        step(&pool, &mut whole, &options).unwrap();
        for (failing, element) in [(0, 0), (0, 999), (1, 333), (2, 63), (3, 0)] {
            let mut parameters = four(&pool);
            let before = snapshots(&parameters);
            let fail_at = vec![(failing, element)];
            let result = step(&pool, &mut parameters, &StepOptions { fail_at, ..options.clone() });
            let Err(Error::Worker(failures)) = result else { panic!("{result:?}") };
            let [failure] = &failures[..] else { panic!("{failures:?}") };
            let len = parameters[failing].grads.len();
            let first = element / chunk_elems * chunk_elems;
            assert_eq!(failure.parameter, *parameters[failing].slot.spec.name);
            assert_eq!((failure.first, failure.len), (first, chunk_elems.min(len - first)));
            assert!(failure.cause.contains("failure asked for by a test"), "{failure}");
            let message = Error::Worker(failures.clone()).to_string();
            assert!(message.contains(&format!("{}, elements {first}..", failure.parameter)), "{message}");
            for (index, (parameter, clean)) in parameters.iter().zip(&whole).enumerate() {
                if index == failing {
                    assert_eq!(parameter.slot.poisoned.as_ref(), Some(&failure.cause));
                    assert_eq!(parameter.slot.steps(), 0.0, "a step that failed is not counted");
                } else {
                    assert_eq!(parameter.snapshot(), clean.snapshot(), "the others are updated");
                }
            }
            if len <= chunk_elems {
                let Snapshot { weights, planes, .. } = parameters[failing].snapshot();
                assert_eq!((&weights, &planes), (&before[failing].weights, &before[failing].planes), "not begun");
            }
        }
    }
}

#[test]
fn all_failures_of_a_step_are_kept_in_order() {
    for threads in [1, 2, 3] {
        let pool = WorkerPool::new(threads).unwrap();
        let mut whole = four(&pool);
        let clean = StepOptions { chunk_elems: 100, ..StepOptions::default() };
        step(&pool, &mut whole, &clean).unwrap();
        let mut parameters = four(&pool);
        // Two elements of one chunk are one failure; what is not there fails nothing.
        let fail_at = vec![(3, 0), (0, 999), (1, 700), (0, 5), (0, 99), (0, 450), (2, 64), (7, 0)];
        let result = step(&pool, &mut parameters, &StepOptions { fail_at, ..clean });
        let Err(Error::Worker(failures)) = result else { panic!("{result:?}") };
        let wanted = [
            ("embedding", 0, 100),
            ("embedding", 400, 100),
            ("embedding", 900, 100),
            ("projection", 700, 77),
            ("bias", 0, 1),
        ];
        let got: Vec<_> = failures.iter().map(|failure| (&failure.parameter[..], failure.first, failure.len)).collect();
        assert_eq!(got, wanted);
        let message = Error::Worker(failures).to_string();
        assert!(message.starts_with("5 of this step's chunks failed: embedding, elements 0..100: "), "{message}");
        assert!(message.contains("; bias, elements 0..1: "), "{message}");
        let poisoned: Vec<bool> = parameters.iter().map(|parameter| parameter.slot.poisoned.is_some()).collect();
        assert_eq!(poisoned, [true, true, false, true]);
        assert_eq!(parameters[2].snapshot(), whole[2].snapshot());
        assert_eq!(parameters.iter().map(|p| p.slot.steps()).collect::<Vec<_>>(), [0.0, 0.0, 1.0, 0.0]);
    }
}

#[test]
fn a_poisoned_parameter_refuses_every_step_until_it_is_reset() {
    let pool = WorkerPool::new(2).unwrap();
    let mut parameters = four(&pool);
    let failing = StepOptions { chunk_elems: 100, fail_at: vec![(1, 250)], ..StepOptions::default() };
    step(&pool, &mut parameters, &failing).unwrap_err();
    let after_failure = snapshots(&parameters);
    for options in [StepOptions::default(), StepOptions { found_inf: true, ..StepOptions::default() }, failing] {
        let result = step(&pool, &mut parameters, &options);
        let Err(Error::Poisoned { parameter, cause }) = result else { panic!("{result:?}") };
        assert_eq!(parameter, "projection");
        assert!(cause.contains("failure asked for by a test"), "{cause}");
        assert_eq!(snapshots(&parameters), after_failure);
    }
    // Without the poisoned one the rest goes on.
    let updates = parameters.iter_mut().filter(|p| p.slot.poisoned.is_none()).map(Parameter::update).collect();
    engine::step(&pool, Isa::Portable, updates, &StepOptions::default()).unwrap();
    parameters[1].slot.reset();
    let fresh = Parameter::new("projection", WeightKind::Bf16Split, 777, true, &pool).snapshot();
    let Snapshot { planes, steps, poisoned, .. } = parameters[1].snapshot();
    assert_eq!((planes, steps, poisoned), (fresh.planes, 0.0, None), "as if never stepped");
    assert_eq!(step(&pool, &mut parameters, &StepOptions::default()).unwrap().parameters, 4);
    assert_eq!(parameters.iter().map(|p| p.slot.steps()).collect::<Vec<_>>(), [3.0, 1.0, 3.0, 3.0]);
}

#[test]
fn the_pool_keeps_every_failure_in_order() {
    let pool = WorkerPool::new(3).unwrap();
    for _ in 0..20 {
        let failures = pool.for_each(0..200_usize, |item| assert!(item % 3 > 0, "item {item}")).unwrap();
        let wanted: Vec<_> = (0..200).step_by(3).map(|item| (item, format!("panic: item {item}"))).collect();
        assert_eq!(failures, wanted);
    }
    let any = pool.for_each(0..2_usize, |_| std::panic::panic_any(7_u8)).unwrap();
    assert_eq!(any.len(), 2);
    assert_eq!(pool.for_each(0..100_usize, |_| ()).unwrap(), []);
}

// ---- refused calls

/// Steps that are refused, or skipped, leave every bit as it was.
#[test]
fn refused_steps_change_nothing() {
    let pool = WorkerPool::new(2).unwrap();
    let defaults = StepOptions::default();
    for nan in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut parameters = four(&pool);
        step(&pool, &mut parameters, &defaults).unwrap();
        parameters[1].grads[500] = nan;
        parameters[3].grads[0] = nan;
        let before = snapshots(&parameters);

        let raise = StepOptions { nonfinite: NonFinite::Raise, ..defaults.clone() };
        let result = step(&pool, &mut parameters, &raise);
        let Err(Error::NonFinite { norm, parameters: named }) = result else { panic!("{result:?}") };
        assert!(!norm.is_finite());
        assert_eq!(named, ["projection", "bias"]);
        assert_eq!(snapshots(&parameters), before);

        for max_grad_norm in [None, Some(1.0)] {
            let skip = StepOptions { nonfinite: NonFinite::Skip, max_grad_norm, ..defaults.clone() };
            let report = step(&pool, &mut parameters, &skip).unwrap();
            assert!(report.skipped);
            assert_eq!((report.parameters, report.elements), (0, 0));
            assert_eq!(report.grad_norm.is_some(), max_grad_norm.is_some());
            assert!(report.grad_norm.is_none_or(|norm| !norm.is_finite()));
            assert_eq!(snapshots(&parameters), before);
        }
    }

    let mut parameters = four(&pool);
    step(&pool, &mut parameters, &defaults).unwrap();
    let before = snapshots(&parameters);
    let found = step(&pool, &mut parameters, &StepOptions { found_inf: true, ..defaults.clone() }).unwrap();
    assert!(found.skipped);
    assert_eq!(snapshots(&parameters), before);
    for options in [
        StepOptions { chunk_elems: 0, ..defaults.clone() },
        StepOptions { max_grad_norm: Some(f64::NAN), ..defaults.clone() },
        StepOptions { max_grad_norm: Some(-1.0), ..defaults.clone() },
    ] {
        assert!(matches!(step(&pool, &mut parameters, &options), Err(Error::InvalidValue(_))), "{options:?}");
        assert_eq!(snapshots(&parameters), before);
    }
}

/// Lengths and kinds that do not fit are errors that name the parameter; the fitting ones beside it stay as they are.
#[test]
fn what_does_not_fit_is_refused() {
    let pool = WorkerPool::new(2).unwrap();
    let mut parameters = four(&pool);
    let before = snapshots(&parameters);
    let (long, short) = (vec![0.5_f32; 65], vec![0.5_f32; 63]);
    let half = [bf16::ONE; 63];
    let mut weights = [
        Weights::Bf16(vec![bf16::ONE; 63]),
        Weights::Bf16(vec![bf16::ONE; 65]),
        Weights::F32(vec![1.0; 64]),
        Weights::F16(vec![f16::ONE; 64]),
        Weights::Bf16(vec![]),
    ];
    let refused = |updates: Vec<Update<'_>>| match engine::step(&pool, Isa::Portable, updates, &StepOptions::default())
    {
        Err(Error::InvalidValue(message)) => assert!(message.contains("head"), "{message}"),
        other => panic!("{other:?}"),
    };
    for grad in [&long[..], &short[..], &[]] {
        let mut updates: Vec<Update<'_>> = parameters.iter_mut().map(Parameter::update).collect();
        updates[2].grad = grad.into();
        refused(updates);
    }
    let mut updates: Vec<Update<'_>> = parameters.iter_mut().map(Parameter::update).collect();
    updates[2].grad = half[..].into();
    refused(updates);
    for weight in &mut weights {
        let mut updates: Vec<Update<'_>> = parameters.iter_mut().map(Parameter::update).collect();
        updates[2].weight = weight.view();
        refused(updates);
    }
    let mut updates: Vec<Update<'_>> = parameters.iter_mut().map(Parameter::update).collect();
    updates[2].config.amsgrad = true;
    refused(updates);
    assert_eq!(snapshots(&parameters), before);

    // Masters: another length or dtype, and residuals for what has none.
    let (mut out, values) = (vec![0.0_f32; 63], vec![1.0_f32; 65]);
    let (residuals, mut floats) = (vec![0_i16; 64], vec![0.5_f32; 64]);
    let Parameter { slot, weights: Weights::Bf16(live), .. } = &mut parameters[2] else { unreachable!() };
    assert!(slot.read_master(&live[..].as_mut().into(), &mut out[..].as_mut().into()).is_err());
    assert!(slot.write_master(&mut live[..].as_mut().into(), &values[..].into()).is_err());
    assert!(slot.load_kept(&values[..].into()).is_err());
    assert!(slot.load_residual(&live[..].as_mut().into(), &residuals[1..].into()).is_err());
    assert!(slot.clear_kept(&floats[..].as_mut().into()).is_err(), "an fp32 weight for bf16 state");
    assert!(slot.write_master(&mut floats[..].as_mut().into(), &values[..64].into()).is_err(), "an fp32 weight");
    let Parameter { slot, weights: Weights::F16(live), .. } = &mut parameters[3] else { unreachable!() };
    assert!(slot.load_residual(&live[..].as_mut().into(), &residuals[..1].into()).is_err(), "fp16 has no residual");
    assert_eq!(snapshots(&parameters), before);
    assert_eq!((out, floats), (vec![0.0; 63], vec![0.5; 64]));
}

/// Planes of another length than the slot says: an error beforehand, never half a step.
#[test]
fn a_slot_whose_planes_do_not_fit_is_refused() {
    let pool = WorkerPool::new(2).unwrap();
    let shorter = |len: usize| -> Plane<f32> {
        let mut slab: Slab = Arena::default().slab(plane_bytes::<f32>(len).unwrap(), &pool).unwrap();
        slab.carve(len)
    };
    let damages: [fn(&mut Slot, Plane<f32>); 4] = [
        |slot, plane| {
            let Moments::F32(moments) = &mut slot.moments else { unreachable!() };
            moments.exp_avg = plane;
        },
        |slot, plane| {
            let Moments::F32(moments) = &mut slot.moments else { unreachable!() };
            moments.exp_avg_sq = plane;
        },
        |slot, plane| slot.kept = Kept::Master(plane),
        |slot, _| slot.spec.amsgrad = true, // without its plane
    ];
    for damage in damages {
        for len in [63, 65, 1] {
            let mut parameters = four(&pool);
            damage(&mut parameters[2].slot, shorter(len));
            let before = snapshots(&parameters);
            let options = StepOptions { chunk_elems: 16, ..StepOptions::default() };
            let result = step(&pool, &mut parameters, &options);
            assert!(matches!(&result, Err(Error::InvalidValue(message)) if message.contains("head")), "{result:?}");
            assert_eq!(snapshots(&parameters), before);
        }
    }
}

#[test]
fn the_optimizer_refuses_unknown_repeated_and_misfitting_parameters() {
    let pool = Arc::new(WorkerPool::new(2).unwrap());
    let mut optimizer = AdamW::new(Arc::clone(&pool), AdamWConfig::default()).unwrap();
    let mut other = AdamW::new(pool, AdamWConfig::default()).unwrap();
    let (a, b) = (optimizer.register("a", 3).unwrap(), optimizer.register("b", 2).unwrap());
    other.register("x", 3).unwrap();
    other.register("y", 2).unwrap();
    let unknown = other.register("z", 3).unwrap();
    let (mut p, mut q, g) = (vec![1.0_f32; 3], vec![1.0_f32; 3], vec![0.5_f32; 3]);
    let named = |result: outboard::Result<StepReport>, name: &str| match result {
        Err(Error::InvalidValue(message)) => assert!(message.contains(name), "{message}"),
        other => panic!("{other:?}"),
    };
    named(optimizer.step([(a, &mut p[..], &g[..]), (unknown, &mut q[..], &g[..])]), "not registered");
    named(optimizer.step([(a, &mut p[..], &g[..]), (a, &mut q[..], &g[..])]), "a is given twice");
    named(optimizer.step([(a, &mut p[..], &g[..]), (b, &mut q[..], &g[..])]), "b:");
    named(optimizer.step([(a, &mut p[..], &g[..2])]), "a:");
    for change in [
        (|config: &mut AdamWConfig| config.lr = -1.0) as fn(&mut AdamWConfig),
        |config| config.lr = f64::NAN,
        |config| config.betas.0 = 1.0,
        |config| config.betas.1 = -0.1,
        |config| config.eps = -1e-9,
        |config| config.weight_decay = f64::NAN,
    ] {
        let good = *optimizer.config_mut();
        change(optimizer.config_mut());
        assert!(AdamW::new(Arc::new(WorkerPool::new(1).unwrap()), *optimizer.config_mut()).is_err());
        named(optimizer.step([(a, &mut p[..], &g[..])]), "Invalid");
        *optimizer.config_mut() = good;
    }
    // Registered without the plane: refused rather than ignored.
    optimizer.config_mut().amsgrad = true;
    named(optimizer.step([(a, &mut p[..], &g[..])]), "a");
    optimizer.config_mut().amsgrad = false;

    assert_eq!((&p, &q), (&vec![1.0; 3], &vec![1.0; 3]));
    assert_eq!(optimizer.moments(a).unwrap(), (&[0.0; 3][..], &[0.0; 3][..]));
    assert_eq!((optimizer.steps(a).unwrap(), optimizer.steps(b).unwrap()), (0, 0));
    assert!(optimizer.steps(unknown).is_err() && optimizer.moments(unknown).is_err());
    optimizer.step([(a, &mut p[..], &g[..])]).unwrap();
    assert_eq!((optimizer.steps(a).unwrap(), optimizer.steps(b).unwrap()), (1, 0));
}

#[test]
fn steps_over_nothing() {
    let pool = WorkerPool::new(2).unwrap();
    let norm = StepOptions { compute_grad_norm: true, ..StepOptions::default() };
    let report = engine::step(&pool, Isa::Portable, vec![], &norm).unwrap();
    assert_eq!(report, StepReport { grad_norm: Some(0.0), ..StepReport::default() });
    let mut parameters: Vec<Parameter> =
        (0..100).map(|i| Parameter::new("p", WeightKind::F32, usize::from(i % 7 == 3), true, &pool)).collect();
    let report = step(&pool, &mut parameters, &norm).unwrap();
    assert_eq!((report.parameters, report.elements), (100, 14));
    assert!(parameters.iter().all(|parameter| parameter.slot.steps() == 1.0));
    // An empty parameter can fail, too, and is then named.
    let failing = StepOptions { fail_at: vec![(0, 0)], ..StepOptions::default() };
    assert!(matches!(step(&pool, &mut parameters, &failing), Err(Error::Worker(failures)) if failures.len() == 1));
}

// ---- memory

/// `carve` says that it panics where the slab is too small: also where the bytes wrap around.
#[test]
fn planes_beyond_the_slab_are_not_carved() {
    let pool = WorkerPool::new(1).unwrap();
    let attempt = |carve: &mut dyn FnMut()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(carve)).is_ok();
    for len in [1 << 62, (1 << 62) + 16, usize::MAX / 4, usize::MAX, 1 << 20] {
        let mut arena = Arena::default();
        let mut slab = arena.slab(plane_bytes::<f32>(1000).unwrap(), &pool).unwrap();
        assert!(!attempt(&mut || drop(slab.carve::<f32>(len))), "{len} elements");
        let plane = slab.carve::<f32>(1000);
        assert_eq!(plane.as_slice(), [0.0; 1000], "the slab is still whole");
        // One byte takes a cache line: there are as many as the mapping has left.
        let left = arena.bytes() - plane_bytes::<f32>(1000).unwrap();
        let mut carved = Vec::new();
        while attempt(&mut || carved.push(slab.carve::<u8_like::Byte>(1))) {}
        assert_eq!(carved.len() * ALIGNMENT, left);
    }
}

/// An element type of one byte, made outside the crate.
mod u8_like {
    #[derive(Clone, Copy, Debug)]
    pub(super) struct Byte(#[allow(dead_code, reason = "only its size matters")] u8);
    // SAFETY: any byte is a value, and 1 divides the alignment of planes.
    unsafe impl outboard::memory::Element for Byte {}
}

/// Specs whose bytes do not fit the address space are errors, not small slabs.
#[test]
fn impossible_specs_are_errors() {
    let pool = Arc::new(WorkerPool::new(1).unwrap());
    let mut optimizer = AdamW::new(Arc::clone(&pool), AdamWConfig::default()).unwrap();
    for len in [usize::MAX, usize::MAX / 4, 1 << 61, 1 << 62, 1 << 50] {
        let result = optimizer.register("huge", len);
        assert!(matches!(result, Err(Error::InvalidValue(_) | Error::OutOfMemory { .. })), "{len}: {result:?}");
    }
    let id = optimizer.register("small", 2).unwrap();
    let mut weights = [1.0_f32, 2.0];
    optimizer.step([(id, &mut weights[..], &[1.0, 1.0][..])]).unwrap();
    assert!(weights[0] < 1.0 && weights[1] < 2.0);
}

/// A tensor without elements shares memory with nothing, wherever it lies.
#[test]
fn nothing_shares_no_memory() {
    let (nothing, four) = (Layout::contiguous(0), Layout::contiguous(4));
    let strided = Layout { sizes: vec![4], strides: vec![2] };
    for at in [0, 4, 8, 16, 100] {
        for other in [&four, &strided, &nothing] {
            assert!(!share_memory((at, &nothing, 4), (0, other, 4)), "at {at} of {other:?}");
            assert!(!share_memory((0, other, 4), (at, &nothing, 4)), "at {at} of {other:?}");
        }
    }
}

/// Views split a matrix among parameters without touching what lies between: every other column of one matrix each.
#[test]
fn interleaved_parameters_of_one_buffer() {
    const ROWS: usize = 300;
    let pool = WorkerPool::new(3).unwrap();
    let mut matrix: Vec<f32> = (0..ROWS * 8).map(|i| i as f32 * 0.01).collect();
    let old = matrix.clone();
    let columns = Layout { sizes: vec![ROWS, 2], strides: vec![8, 3] };
    let walks = Walks::new(&columns.dense_like(), &columns);
    let mut slots: Vec<Slot> = (0..2)
        .map(|number| {
            let layout = columns.dense_like();
            let (weight, moments) = (WeightKind::F32, MomentDType::F32);
            let spec = SlotSpec { name: "columns".into(), number, layout, weight, moments, amsgrad: false };
            Slot::carve(spec.clone(), &mut Arena::default().slab(spec.bytes().unwrap(), &pool).unwrap())
        })
        .collect();
    let grads = old.clone();
    let base = matrix.as_mut_ptr();
    let updates = slots
        .iter_mut()
        .zip([1, 2]) // columns 1 and 4, columns 2 and 5
        .map(|(slot, column)| {
            // SAFETY: the two views reach distinct columns of `matrix` and `grads`, which outlive them and are not used
            // while they live.
            let (weight, grad) = unsafe {
                (
                    StridedMut::new(base.add(column), 2 * ROWS, walks.clone()),
                    StridedRef::new(grads.as_ptr().add(column), 2 * ROWS, walks.clone()),
                )
            };
            let grad = engine::GradView::F32(engine::GradElements::Shared(grad));
            Update { slot, weight: WeightView::F32(weight), grad, config: AdamWConfig::default() }
        })
        .collect();
    let options = StepOptions { chunk_elems: 7, ..StepOptions::default() };
    engine::step(&pool, Isa::current().unwrap(), updates, &options).unwrap();
    for (at, (new, old)) in matrix.iter().zip(&old).enumerate() {
        let stepped = [1, 2, 4, 5].contains(&(at % 8));
        assert_eq!(new != old, stepped, "element {at}");
    }
}

// ---- lifetimes and threads

#[test]
fn pools_optimizers_and_planes_go_in_any_order() {
    for order in 0..6 {
        let pool = Arc::new(WorkerPool::new(2).unwrap());
        let mut arena = Arena::default();
        let mut slab = arena.slab(1 << 20, &pool).unwrap();
        let mut plane = slab.carve::<f32>(1000);
        plane.as_mut_slice().fill(3.0);
        let (start, handle) = plane.share();
        let mut optimizer = AdamW::new(Arc::clone(&pool), AdamWConfig::default()).unwrap();
        let id = optimizer.register("p", 100).unwrap();
        let mut weights = [1.0_f32; 100];
        optimizer.step([(id, &mut weights[..], &[1.0; 100][..])]).unwrap();
        let mut parts: [Option<Box<dyn Send>>; 5] =
            [Some(Box::new(pool)), Some(Box::new(optimizer)), Some(Box::new(slab)), Some(Box::new(plane)), None];
        for turn in 0..5 {
            let part = parts[(order + turn * (1 + order % 2 * 2)) % 5].take();
            if turn % 2 == 0 {
                std::thread::spawn(move || drop(part)).join().unwrap();
            }
        }
        drop(parts);
        assert!(arena.bytes() >= 1 << 20, "the handle keeps the slab");
        // SAFETY: `handle` keeps the plane's 1000 elements mapped and nobody else is left to write them.
        let values = unsafe { std::slice::from_raw_parts(start.as_ptr(), 1000) };
        assert_eq!(values, [3.0; 1000]);
        drop(handle);
        assert_eq!(arena.bytes(), 0);
    }
}

/// Optimizers that share a pool and step at once neither mix nor wait for each other for ever.
#[test]
fn threads_step_different_optimizers_at_once() {
    let pool = Arc::new(WorkerPool::new(2).unwrap());
    let train = |pool: Arc<WorkerPool>, seed: u32, len: usize| {
        let mut optimizer = AdamW::new(pool, AdamWConfig::default()).unwrap();
        optimizer.options.chunk_elems = 64;
        optimizer.options.compute_grad_norm = true;
        let id = optimizer.register("p", len).unwrap();
        let mut weights = vec![0.5_f32; len];
        for step in 0..50_u32 {
            let grads: Vec<f32> = (0..len).map(|i| ((i as u32 ^ (seed * 7919 + step)) % 101) as f32 - 50.0).collect();
            optimizer.step([(id, &mut weights[..], &grads[..])]).unwrap();
        }
        weights
    };
    let work: Vec<(u32, usize)> = (0..8).map(|seed| (seed, 1 + seed as usize * 531)).collect();
    let alone: Vec<Vec<f32>> =
        work.iter().map(|&(seed, len)| train(Arc::new(WorkerPool::new(1).unwrap()), seed, len)).collect();
    let together: Vec<Vec<f32>> = std::thread::scope(|scope| {
        let threads: Vec<_> = work
            .iter()
            .map(|&(seed, len)| {
                let pool = Arc::clone(&pool);
                scope.spawn(move || train(pool, seed, len))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(together, alone);
}

/// A panic in one thread's step leaves the pool whole for the other threads.
#[test]
fn failures_beside_other_steps() {
    let pool = WorkerPool::new(2).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..20 {
                    let mut parameters = four(pool);
                    let fails = (thread + round) % 2 == 0;
                    let fail_at = if fails { vec![(0, 500), (2, 1)] } else { vec![] };
                    let options = StepOptions { chunk_elems: 64, fail_at, ..StepOptions::default() };
                    assert_eq!(step(pool, &mut parameters, &options).is_err(), fails);
                }
            });
        }
    });
}

#[test]
fn too_many_threads_are_an_error() {
    assert!(matches!(WorkerPool::new(0), Err(Error::InvalidValue(_))));
    let choice = ThreadChoice::detect().unwrap();
    assert!(choice.threads >= 1 && !choice.why.is_empty());
}
