//! The host's bits, whatever the lanes, their sizes and the device's order.

use super::rig::{Kind, Rig, Setup, Terms, grad_view, make_resident};
use super::tools::{Chance, Tensor, within};
use crate::device::simulated::Schedule;
use crate::device::{Device, DeviceGrad, Stream};
use crate::engine::lanes::{LaneOptions, Transfer};
use crate::engine::{NonFinite, StepOptions, judge};
use crate::kernel::{AdamWConfig, GradDType, MomentDType, WeightKind};
use proptest::prelude::*;
use std::sync::{Arc, Mutex};

fn kinds() -> impl Strategy<Value = Vec<Kind>> {
    use WeightKind::{Bf16Full, Bf16Split, F16Full, F32};
    let len = prop_oneof![
        2 => 0_usize..3,
        6 => 3_usize..900,
        2 => 3_900_usize..4_200,
        2 => (64 << 10) - 2..(64_usize << 10) + 3,
        2 => 66_000_usize..200_000,
    ];
    let weight = prop::sample::select(vec![F32, Bf16Split, Bf16Full, F16Full]);
    let grad = prop::sample::select(vec![GradDType::F32, GradDType::Bf16, GradDType::F16]);
    let moments = prop::sample::select(vec![MomentDType::F32, MomentDType::Bf16]);
    let kind = (len, weight, grad, moments, any::<bool>());
    prop::collection::vec(
        kind.prop_map(|(len, weight, grad, moments, amsgrad)| Kind { len, weight, grad, moments, amsgrad }),
        1..12,
    )
}

fn setups() -> impl Strategy<Value = Setup> {
    let modes = prop::sample::select(vec![(true, false), (false, true), (true, true)]);
    let transfer = prop::sample::select(vec![Transfer::Staged, Transfer::ZeroCopy]);
    let chunk_elems = prop_oneof![
        3 => Just(None),
        2 => (700_usize..9_000).prop_map(Some),
        2 => (9_000_usize..70_000).prop_map(Some),
    ];
    // A slot is no smaller than 64 KiB: 0 is as small as it gets.
    let ring = prop_oneof![Just(0_usize), 1_usize..3_000_000];
    let schedule =
        prop_oneof![1 => Just(Schedule::Eager), 5 => any::<u64>().prop_map(|seed| Schedule::Random { seed })];
    let options = (modes, transfer, chunk_elems, ring.clone(), ring, any::<bool>());
    (options, schedule, prop::bool::weighted(0.85), any::<u64>()).prop_map(
        |(((gpu, cpu), transfer, chunk_elems, device_ring_bytes, host_ring_bytes, fifo), schedule, pinned, seed)| {
            let options = LaneOptions {
                gpu,
                cpu,
                transfer,
                device_ring_bytes,
                host_ring_bytes,
                chunk_elems,
                max_waiting_bytes: 100_000,
                fifo,
                ..LaneOptions::default()
            };
            Setup { schedule, options, pinned, seed }
        },
    )
}

fn config(kind: &Kind, chance: &mut Chance) -> AdamWConfig {
    AdamWConfig {
        lr: chance.pick(&[1e-3, 0.1, 0.0]),
        betas: chance.pick(&[(0.9, 0.999), (0.3, 0.95), (0.0, 0.0)]),
        eps: chance.pick(&[1e-8, 1e-3]),
        weight_decay: chance.pick(&[0.0, 0.01]),
        // The state's plane need not be used.
        amsgrad: kind.amsgrad && chance.below(4) > 0,
        maximize: chance.below(4) == 0,
        decoupled_weight_decay: chance.below(4) > 0,
    }
}

/// What differs between runs beside the setup.
#[derive(Clone, Debug)]
struct Policies {
    steps: usize,
    grad_scale: Option<f32>,
    write_unscaled: bool,
    max_grad_norm: Option<f64>,
}

fn run(setup: &Setup, kinds: &[Kind], policies: &Policies) {
    let mut rig = Rig::new(setup, kinds);
    rig.frees = false;
    let mut chance = Chance(setup.seed.wrapping_add(99));
    for parameter in &mut rig.parameters {
        parameter.config = config(&parameter.kind, &mut chance);
    }
    let mut order: Vec<usize> = (0..kinds.len()).collect();
    for _ in 0..policies.steps {
        chance.shuffle(&mut order);
        // Some have no gradient this time.
        let taken = if chance.below(3) == 0 { &order[..kinds.len().div_ceil(2)] } else { &order[..] };
        let checks = step(&mut rig, &mut chance, taken, policies);
        if chance.below(2) == 0 {
            rig.engine().synchronize().unwrap();
        }
        if chance.below(2) == 0 {
            rig.engine().wait_on_host(taken).unwrap();
            for &index in taken {
                let parameter = &rig.parameters[index];
                let same = parameter.weight.read() == parameter.twin_weight.read();
                assert!(same, "weight {index} after wait_on_host");
            }
        }
        let read = rig.device.event().unwrap();
        rig.device.record(&read, Stream::Foreign(READER)).unwrap();
        rig.device.wait(&read).unwrap();
        for (what, got, want) in checks {
            assert!(*got.lock().unwrap() == want, "{what}, as a stream that waited has read it");
        }
        rig.engine().synchronize().unwrap();
    }
    rig.finish();
}

/// The stream that reads what has been updated.
const READER: usize = 9;

type Check = (String, Arc<Mutex<Vec<u8>>>, Vec<u8>);

/// One training step: gradients come from some streams in turn, and a stream that waits reads the weights.
fn step(rig: &mut Rig, chance: &mut Chance, taken: &[usize], policies: &Policies) -> Vec<Check> {
    let Policies { grad_scale, write_unscaled, max_grad_norm, .. } = *policies;
    let read = rig.device.event().unwrap();
    rig.device.record(&read, Stream::Foreign(READER)).unwrap();
    let mut grads = Vec::new();
    let mut twins = Vec::new();
    for &index in taken {
        let stream = 1 + chance.below(3);
        let Kind { grad, len, .. } = rig.parameters[index].kind;
        let values = chance.values(grad, len);
        twins.push((index, Tensor::holding(&values, 0)));
        // Forward and backward come after the last update and the last reader.
        rig.engine().wait(&[index], stream).unwrap();
        rig.device.order(Stream::Foreign(stream), &read).unwrap();
        let grad = rig.produce(index, values, stream);
        grads.push((index, stream, grad));
    }
    let options = StepOptions {
        max_grad_norm,
        grad_scale,
        nonfinite: NonFinite::Propagate,
        chunk_elems: 10_000,
        ..StepOptions::default()
    };
    let mut squares = Vec::new();
    if options.want_norm() {
        // In the order of parameters, as the host adds them up.
        let mut in_order: Vec<_> = grads.iter().collect();
        in_order.sort_by_key(|(index, ..)| *index);
        for (index, stream, tensor) in in_order {
            let Kind { grad: dtype, len, .. } = rig.parameters[*index].kind;
            let grad = DeviceGrad { address: tensor.address(), len, dtype };
            squares.extend(rig.engine().squared_norms(&[grad], grad_scale.unwrap_or(1.0), *stream).unwrap());
        }
    }
    let verdict = judge(&options, &squares, |index| index.to_string()).unwrap();
    let mut from = 0;
    while from < grads.len() {
        // Neighbours from one stream may go together.
        let (stream, together) = (grads[from].1, 1 + chance.below(6));
        let run = grads[from..].iter().take(together).take_while(|(_, other, _)| *other == stream).count();
        let requests = grads[from..from + run].iter().map(|(index, _, grad)| {
            let next_use = chance.below(10) as u64;
            let terms = Terms { clip: verdict.clip, grad_scale, write_unscaled, next_use, constants: None };
            rig.request(*index, grad, &terms)
        });
        let requests = requests.collect();
        rig.engine().submit(requests, stream, chance.below(2) == 0).unwrap();
        from += run;
    }
    let report = rig.step_twins(&mut twins, &options, write_unscaled);
    assert_eq!(report.grad_norm, verdict.grad_norm);
    rig.engine().wait(taken, READER).unwrap();
    let mut checks = Vec::new();
    let mut read = |what: String, tensor: &Arc<Tensor>, want: Vec<u8>| {
        let got = Arc::new(Mutex::new(Vec::new()));
        let (from, to) = (Arc::clone(tensor), Arc::clone(&got));
        let read = move || *to.lock().unwrap() = from.read();
        rig.device.push_accessing(Stream::Foreign(READER), &[tensor.run()], &[], read).unwrap();
        checks.push((what, got, want));
    };
    for &index in taken {
        let want = rig.parameters[index].twin_weight.read();
        read(format!("weight {index}"), &rig.parameters[index].weight, want);
    }
    for ((index, _, grad), (_, twin)) in grads.iter().zip(&twins) {
        read(format!("gradient {index}"), grad, twin.read());
    }
    checks
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 72, max_shrink_iters: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_hosts_bits(
        setup in setups(),
        kinds in kinds(),
        steps in 1_usize..4,
        grad_scale in prop::option::weighted(0.3, prop::sample::select(vec![1.0_f32, 2.0, 1024.0, 3.0])),
        write_unscaled in any::<bool>(),
        max_grad_norm in prop::option::weighted(0.3, prop::sample::select(vec![1e-3, 1.0, 1e9])),
    ) {
        let policies = Policies { steps, grad_scale, write_unscaled, max_grad_norm };
        within("the host's bits", move || run(&setup, &kinds, &policies));
    }
}

/// Chunks of a single element, of odd sizes, and slots that hold no bundle.
#[test]
fn the_smallest_chunks() {
    let kinds = [
        Kind::f32(301),
        Kind { amsgrad: true, moments: MomentDType::Bf16, ..Kind::split(97) },
        Kind { weight: WeightKind::F16Full, grad: GradDType::F16, amsgrad: true, ..Kind::f32(33) },
        Kind { weight: WeightKind::Bf16Full, ..Kind::split(70_001) },
    ];
    for (gpu, cpu) in [(true, false), (false, true), (true, true)] {
        for (elems, kinds) in [(1, &kinds[..3]), (3, &kinds[..3]), (255, &kinds), (257, &kinds)] {
            let kinds = kinds.to_vec();
            within("the smallest chunks", move || {
                let mut setup = Setup::new(Schedule::Random { seed: 7 }, gpu, cpu).chunks(elems);
                setup.options.device_ring_bytes = 0;
                setup.options.host_ring_bytes = 0;
                let mut rig = Rig::new(&setup, &kinds);
                for _ in 0..2 {
                    (0..kinds.len()).for_each(|index| drop(rig.submit(&[index], 1, &Terms::default())));
                    rig.engine().synchronize().unwrap();
                }
                rig.finish();
            });
        }
    }
}

/// State that is on the device: one launch for each, or for a bundle.
#[test]
fn resident_state() {
    within("resident state", || {
        for seed in 0..6 {
            let kinds: Vec<Kind> = (0..700).map(|i| Kind::split(i % 23)).chain([Kind::f32(150_000)]).collect();
            let setup = Setup::new(Schedule::Random { seed }, true, true).zero_copy();
            let mut rig = Rig::new(&setup, &kinds);
            let mut twins = Vec::new();
            let mut requests = Vec::new();
            for (index, kind) in kinds.iter().enumerate() {
                let values = rig.chance.values(kind.grad, kind.len);
                let grad = rig.grad(&values);
                let mut request = rig.request(index, &grad, &Terms::default());
                make_resident(&mut request);
                twins.push((index, Tensor::holding(&values, 0)));
                requests.push(request);
            }
            // Few at a time: more bundles than there are tables.
            while !requests.is_empty() {
                let batch = requests.split_off(requests.len().saturating_sub(60));
                rig.engine().submit(batch, 1, false).unwrap();
            }
            rig.step_twins(&mut twins, &StepOptions::default(), false);
            rig.engine().synchronize().unwrap();
            let elements: usize = kinds.iter().map(|kind| kind.len).sum();
            assert_eq!(rig.engine().stats().resident_elements, elements as u64);
            rig.finish();
        }
    });
}

/// Norms: around blocks, more blocks and more gradients than the scratch holds (8 and 5 in tests).
#[test]
fn squared_norms_are_the_hosts() {
    within("norms", || {
        let lens = [0, 1, 4095, 4096, 4097, 0, 8192, 8 * 4096, 8 * 4096 + 1, 100_000, 0, 5, 3, 2, 1, 0, 40_000, 0];
        for (seed, scale) in [(1, 1.0), (2, 3.0), (3, 1024.0)] {
            let mut rig = Rig::new(&Setup::new(Schedule::Random { seed }, true, true), &[]);
            let mut tensors: Vec<(GradDType, Tensor)> = Vec::new();
            for (i, len) in lens.into_iter().cycle().take(50).enumerate() {
                let dtype = [GradDType::F32, GradDType::Bf16, GradDType::F16][(i / 2) % 3];
                tensors.push((dtype, Tensor::holding(&rig.chance.values(dtype, len), 8)));
            }
            for count in [0, 1, 5, 6, 50] {
                let tensors = &mut tensors[..count];
                let grads = tensors.iter().map(|(dtype, tensor)| {
                    let (address, bytes) = tensor.run();
                    DeviceGrad { address, len: bytes / dtype.bytes(), dtype: *dtype }
                });
                let grads: Vec<DeviceGrad> = grads.collect();
                let got = rig.engine().squared_norms(&grads, scale, 3).unwrap();
                let views: Vec<_> =
                    tensors.iter_mut().map(|(dtype, tensor)| grad_view(tensor, *dtype, false)).collect();
                let views: Vec<_> = views.iter().collect();
                let want = crate::engine::norm::squared_norms(&rig.pool, rig.isa, &views, scale).unwrap();
                assert_eq!(got, want);
            }
            rig.close();
        }
    });
}
