//! The device's bits are the host's.

use super::{device, host, message, table};
use crate::device::simulated::{Schedule, SimulatedDevice};
use crate::device::{Device, DeviceGrad, DeviceUpdate, Stream};
use crate::kernel::norm::reduce_partials;
use crate::kernel::{
    self, AdamWConfig, GradDType, GradSlice, Isa, MomentDType, MomentSlices, NORM_BLOCK, Noise, WeightKind,
    WeightSlices,
};
use crate::{AdamW, WorkerPool};
use half::{bf16, f16};
use std::sync::Arc;

/// An update of no elements.
pub(super) fn nothing(parameter: &str) -> DeviceUpdate<'_> {
    DeviceUpdate {
        parameter,
        weight_kind: WeightKind::F32,
        grad_dtype: GradDType::F32,
        moments: MomentDType::F32,
        weight: 0,
        kept: 0,
        grad: 0,
        exp_avg: 0,
        exp_avg_sq: 0,
        max_exp_avg_sq: 0,
        len: 0,
        first: 0,
        constants: AdamWConfig::default().constants(3.0, 0.5),
        noise: Noise::new(1, 2, 3),
        grad_scale: None,
    }
}

fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let number = |i: u32| (i.wrapping_add(seed).wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0;
    (0..len as u32).map(number).collect()
}

fn bf16s(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&x| bf16::from_f32(x)).collect()
}

/// bf16 with residuals, fp16 gradients, bf16 moments with amsgrad.
#[derive(Clone, Debug, PartialEq)]
struct Small {
    weight: Vec<bf16>,
    residual: Vec<i16>,
    grad: Vec<f16>,
    m: Vec<bf16>,
    v: Vec<bf16>,
    max: Vec<bf16>,
}

impl Small {
    fn new(len: usize, seed: u32) -> Self {
        let squares: Vec<f32> = numbers(len, seed + 1).iter().map(|x| x * x).collect();
        Self {
            weight: bf16s(&numbers(len, seed)),
            residual: (0..len).map(|i| i as i16).collect(),
            grad: numbers(len, seed + 2).iter().map(|&x| f16::from_f32(x)).collect(),
            m: bf16s(&numbers(len, seed + 3)),
            v: bf16s(&squares),
            max: bf16s(&squares),
        }
    }

    fn update(&mut self, first: u64, grad_scale: Option<f32>) -> DeviceUpdate<'static> {
        DeviceUpdate {
            weight_kind: WeightKind::Bf16Split,
            grad_dtype: GradDType::F16,
            moments: MomentDType::Bf16,
            weight: self.weight.as_mut_ptr().expose_provenance(),
            kept: self.residual.as_mut_ptr().expose_provenance(),
            grad: self.grad.as_mut_ptr().expose_provenance(),
            exp_avg: self.m.as_mut_ptr().expose_provenance(),
            exp_avg_sq: self.v.as_mut_ptr().expose_provenance(),
            max_exp_avg_sq: self.max.as_mut_ptr().expose_provenance(),
            len: self.weight.len(),
            first,
            grad_scale,
            ..nothing("small")
        }
    }

    /// Updates it with the host's loop, in two runs that meet at `border`.
    fn expect(mut self, first: u64, border: usize, grad_scale: Option<f32>) -> Self {
        let DeviceUpdate { constants, noise, .. } = nothing("");
        let isa = Isa::current().unwrap();
        let mut grad = vec![0.0; self.grad.len()];
        kernel::unscale(isa, GradSlice::F16(&self.grad), grad_scale.unwrap_or(1.0), &mut grad);
        for range in [0..border, border..self.weight.len()] {
            let (weight, residual) = (&mut self.weight[range.clone()], &mut self.residual[range.clone()]);
            let (m, v) = (&mut self.m[range.clone()], &mut self.v[range.clone()]);
            let moments = MomentSlices::Bf16(m, v, Some(&mut self.max[range.clone()]));
            let first = first + range.start as u64;
            let weights = WeightSlices::Bf16Split(weight, residual);
            kernel::update(isa, weights, GradSlice::F32(&grad[range]), moments, &constants, noise, first);
        }
        self
    }
}

#[test]
fn updates_have_the_bits_of_the_hosts_loops() {
    for schedule in [Schedule::Eager, Schedule::Random { seed: 2 }] {
        let device = device(schedule);
        let border = 1500;
        for (first, grad_scale) in
            [(0, None), ((1 << 32) - border as u64, None), ((1 << 33) - border as u64, Some(3.0))]
        {
            let mut small = Small::new(5000, 1);
            let expected = small.clone().expect(first, border, grad_scale);
            device.update(&small.update(first, grad_scale), Stream::Update).unwrap();
            wait(&device);
            assert_eq!(small, expected);
        }
    }
}

#[test]
fn many_updates_are_as_many_single_ones() {
    let device = device(Schedule::Random { seed: 4 });
    let mut many: Vec<Small> = [1, 0, 700, 5000].into_iter().zip(0..).map(|(len, i)| Small::new(len, i * 10)).collect();
    let expected: Vec<Small> = many.iter().map(|one| one.clone().expect(0, 0, Some(0.5))).collect();
    let mut entries = table(many.len());
    let updates: Vec<_> = many.iter_mut().map(|one| one.update(0, Some(0.5))).collect();
    device.update_many(&mut host(&mut entries), &updates, Stream::Foreign(1)).unwrap();
    let event = device.event().unwrap();
    device.record(&event, Stream::Foreign(1)).unwrap();
    device.wait(&event).unwrap();
    assert_eq!(many, expected);
    assert_eq!(device.hazards(), [""; 0]);
}

#[test]
fn every_dtype_arrives_at_its_loop() {
    let (device, isa, len) = (device(Schedule::Eager), Isa::current().unwrap(), 300);
    let DeviceUpdate { constants, noise, .. } = nothing("");
    let (mut m, mut v, mut grad) = (numbers(len, 1), vec![0.25; len], numbers(len, 2));
    let (m2, v2) = (&mut m.clone(), &mut v.clone());
    let common = DeviceUpdate {
        exp_avg: m.as_mut_ptr().expose_provenance(),
        exp_avg_sq: v.as_mut_ptr().expose_provenance(),
        grad: grad.as_mut_ptr().expose_provenance(),
        len,
        ..nothing("common")
    };

    let mut plain = numbers(len, 3);
    let mut expected = plain.clone();
    let weight = plain.as_mut_ptr().expose_provenance();
    device.update(&DeviceUpdate { weight, ..common }, Stream::Update).unwrap();
    let (slices, moments) = (WeightSlices::F32(&mut expected), MomentSlices::F32(m2, v2, None));
    kernel::update(isa, slices, GradSlice::F32(&grad), moments, &constants, noise, 0);
    assert_eq!(plain, expected);

    let (mut live, mut master) = (bf16s(&numbers(len, 4)), numbers(len, 4));
    let (mut live2, mut master2, grad16) = (live.clone(), master.clone(), bf16s(&grad));
    let update = DeviceUpdate {
        weight_kind: WeightKind::Bf16Full,
        grad_dtype: GradDType::Bf16,
        weight: live.as_mut_ptr().expose_provenance(),
        kept: master.as_mut_ptr().expose_provenance(),
        grad: grad16.as_ptr().expose_provenance(),
        ..common
    };
    device.update(&update, Stream::Update).unwrap();
    let (slices, moments) = (WeightSlices::Bf16Full(&mut live2, &mut master2), MomentSlices::F32(m2, v2, None));
    kernel::update(isa, slices, GradSlice::Bf16(&grad16), moments, &constants, noise, 0);
    assert_eq!((&live, &master), (&live2, &master2));

    let mut live: Vec<f16> = numbers(len, 4).iter().map(|&x| f16::from_f32(x)).collect();
    let mut live2 = live.clone();
    let weight = live.as_mut_ptr().expose_provenance();
    let kept = master.as_mut_ptr().expose_provenance();
    let update = DeviceUpdate { weight_kind: WeightKind::F16Full, weight, kept, ..common };
    device.update(&update, Stream::Update).unwrap();
    let (slices, moments) = (WeightSlices::F16Full(&mut live2, &mut master2), MomentSlices::F32(m2, v2, None));
    kernel::update(isa, slices, GradSlice::F32(&grad), moments, &constants, noise, 0);
    assert_eq!((&live, &master), (&live2, &master2));
    assert_eq!((&m, &v), (&*m2, &*v2));

    // Nothing starts with addresses that cannot be right, or mixed dtypes.
    let said = message(device.update(&DeviceUpdate { weight: weight + 1, ..update }, Stream::Update));
    assert!(said.contains("weight of common"), "{said}");
    let said = message(device.update(&DeviceUpdate { kept: 0, ..update }, Stream::Update));
    assert!(said.contains("kept of common at 0x0"), "{said}");
    let said = message(device.update_many(&mut host(&mut table(2)), &[nothing("a"), update], Stream::Update));
    assert!(said.contains("of common, (F16Full, F32, F32), with (F32, F32, F32)"), "{said}");
    device.update(&nothing("nothing"), Stream::Update).unwrap();
}

fn wait(device: &SimulatedDevice) {
    let event = device.event().unwrap();
    device.record(&event, Stream::Update).unwrap();
    device.wait(&event).unwrap();
}

fn grad<T>(values: &[T], dtype: GradDType) -> DeviceGrad {
    DeviceGrad { address: values.as_ptr().expose_provenance(), len: values.len(), dtype }
}

#[test]
fn squares_add_up_to_the_engines_norm() {
    let device = device(Schedule::Random { seed: 6 });
    let lens = [1, NORM_BLOCK, 0, 3 * NORM_BLOCK + 5];
    let grads: Vec<Vec<f32>> = lens.iter().zip(0..).map(|(&len, seed)| numbers(len, seed)).collect();
    let described: Vec<DeviceGrad> = grads.iter().map(|values| grad(values, GradDType::F32)).collect();
    for scale in [1.0, 3.0] {
        let mut partials = vec![0.0_f64; 6];
        device
            .squares(&mut host(table_for(&described)), &host(&mut partials), &described, scale, Stream::Update)
            .unwrap();
        wait(&device);
        let mut partials = partials.into_iter();
        let mut total = 0.0;
        for values in &grads {
            total += reduce_partials(partials.by_ref().take(values.len().div_ceil(NORM_BLOCK)).collect());
        }

        let mut optimizer = AdamW::new(Arc::new(WorkerPool::new(2).unwrap()), AdamWConfig::default()).unwrap();
        optimizer.options.compute_grad_norm = true;
        optimizer.options.grad_scale = Some(scale);
        let mut weights = grads.clone();
        let ids: Vec<_> = lens.iter().map(|&len| optimizer.register("grad", len).unwrap()).collect();
        let parameters =
            weights.iter_mut().zip(&grads).zip(ids).map(|((weight, grad), id)| (id, &mut weight[..], &grad[..]));
        let report = optimizer.step(parameters).unwrap();
        assert_eq!(report.grad_norm.unwrap().to_bits(), total.sqrt().to_bits());
    }
    let short = device.squares(&mut host(&mut table(4)), &host(&mut [0.0_f64; 5]), &described, 1.0, Stream::Update);
    assert!(message(short).contains("40 bytes (pinned)"));
}

/// Never dropped: the device reads it when it likes.
fn table_for(grads: &[DeviceGrad]) -> &'static mut [u8] {
    table(grads.len()).leak()
}

#[test]
fn gradients_are_unscaled_in_place_and_rounded_once() {
    let device = device(Schedule::Eager);
    let values = numbers(2500, 1);
    let (full, bf, half) =
        (values.clone(), bf16s(&values), values.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>());
    device.unscale(&grad(&full, GradDType::F32), 3.0, Stream::Up).unwrap();
    device.unscale(&grad(&bf, GradDType::Bf16), 3.0, Stream::Up).unwrap();
    device.unscale(&grad(&half, GradDType::F16), 3.0, Stream::Up).unwrap();
    for (i, x) in values.into_iter().enumerate() {
        assert_eq!(full[i], x / 3.0);
        assert_eq!(bf[i], bf16::from_f32(bf16::from_f32(x).to_f32() / 3.0));
        assert_eq!(half[i], f16::from_f32(f16::from_f32(x).to_f32() / 3.0));
    }
}
