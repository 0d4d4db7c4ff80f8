//! Test data, and the host's side of the comparisons.

use crate::device::DeviceUpdate;
use crate::kernel::{
    self, AdamWConfig, Constants, GradDType, GradSlice, Isa, MomentDType, MomentSlices, Noise, WeightKind, WeightSlices,
};
use half::{bf16, f16};

/// A plane on the host, with room for one of any dtype: 8-byte words keep it aligned for all of them.
#[derive(Clone)]
pub(super) struct Plane(pub(super) Vec<u64>);

impl Plane {
    pub(super) fn of<T: Copy>(values: &[T]) -> Self {
        let mut plane = Self(vec![0; size_of_val(values).div_ceil(8)]);
        plane.slice(values.len()).copy_from_slice(values);
        plane
    }

    /// `T` is f32, bf16, f16 or i16.
    pub(super) fn slice<T: Copy>(&mut self, n: usize) -> &mut [T] {
        assert!(n * size_of::<T>() <= self.0.len() * 8 && align_of::<T>() <= 8);
        // SAFETY: in bounds, aligned, exclusively borrowed, and any bits are a value of these types.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), n) }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) weight: WeightKind,
    pub(super) grad: GradDType,
    pub(super) moment: MomentDType,
    pub(super) config: AdamWConfig,
    pub(super) n: usize,
    pub(super) first: u64,
    pub(super) clip: f32,
    pub(super) scale: Option<f32>,
    /// Bytes by which the weight and the gradient miss alignment.
    pub(super) offset: usize,
    /// The state is in host memory that the device addresses.
    pub(super) mapped: bool,
}

/// Weight, kept, gradient, moments, maximum.
#[derive(Clone)]
pub(super) struct Planes(pub(super) [Plane; 6]);

/// An integer hash, for test data only.
pub(super) fn scramble(x: u32) -> u32 {
    let x = (x ^ (x >> 15)).wrapping_mul(0x2C1B_3C6D).rotate_left(13).wrapping_mul(0x297A_2D39);
    (x ^ (x >> 16)).wrapping_mul(0x2C1B_3C6D)
}

/// Values as they occur in training, one in eight of any bits at all, and one in sixteen special.
pub(super) fn values(n: usize, seed: u32, ordinary: impl Fn(f32) -> f32) -> Vec<f32> {
    const SPECIAL: [u32; 12] = [
        0,
        1,
        0x7FFF,
        0x7F_FFFF,
        0x3F80_8000,
        0x3F81_8000,
        0x3380_0000,
        0x477F_F000,
        0x7F7F_FFFF,
        0x7F80_0000,
        0x7F80_0001,
        0x7FFF_FFFF,
    ];
    (0..n as u32)
        .map(|i| {
            let bits = scramble(scramble(i) ^ (seed << 24));
            let choice = scramble(bits);
            match choice % 16 {
                0 | 1 => f32::from_bits(bits),
                2 => f32::from_bits(SPECIAL[bits as usize % SPECIAL.len()] | (choice & 0x8000_0000)),
                _ => ordinary(bits as f32 / 4_294_967_296.0 - 0.5),
            }
        })
        .collect()
}

pub(super) fn planes(case: &Case) -> Planes {
    let n = case.n;
    let masters = values(n, 1, |x| x * 0.1);
    let grads = values(n, 2, |x| x * x * x * 0.1);
    let to_bf16 = |x: &f32| bf16::from_bits(kernel::f32_to_bf16(*x));
    let to_f16 = |x: &f32| f16::from_bits(kernel::f32_to_f16(*x));
    let bf16s = |values: &[f32]| Plane::of(&values.iter().map(to_bf16).collect::<Vec<_>>());
    let f16s = |values: &[f32]| Plane::of(&values.iter().map(to_f16).collect::<Vec<_>>());
    // Some masters and residuals are not their weight's: others have written it.
    let full = || {
        let stale = |(i, x): (usize, &f32)| if i % 5 == 0 { 0.25 } else { *x };
        Plane::of(&masters.iter().enumerate().map(stale).collect::<Vec<_>>())
    };
    let residuals = || {
        let residual = |(i, x): (usize, &f32)| match i % 5 {
            0 => i16::MIN,
            1 => scramble(i as u32) as i16,
            _ => kernel::encode_split(*x).1,
        };
        Plane::of(&masters.iter().enumerate().map(residual).collect::<Vec<_>>())
    };
    let (weight, kept) = match case.weight {
        WeightKind::F32 => (Plane::of(&masters), Plane(vec![])),
        WeightKind::Bf16Split => (bf16s(&masters), residuals()),
        WeightKind::Bf16Full => (bf16s(&masters), full()),
        WeightKind::F16Full => (f16s(&masters), full()),
    };
    let grad = match case.grad {
        GradDType::F32 => Plane::of(&grads),
        GradDType::Bf16 => bf16s(&grads),
        GradDType::F16 => f16s(&grads),
    };
    let moment = |values: Vec<f32>| match case.moment {
        MomentDType::F32 => Plane::of(&values),
        MomentDType::Bf16 => bf16s(&values),
    };
    let exp_avg = moment(values(n, 3, |x| x * 0.01));
    let exp_avg_sq = moment(values(n, 4, |x| x * x * 1e-4));
    let maximum = if case.config.amsgrad { moment(values(n, 5, |x| x * x * 1e-4)) } else { Plane(vec![]) };
    Planes([weight, kept, grad, exp_avg, exp_avg_sq, maximum])
}

pub(super) fn on_host(case: &Case, planes: &mut Planes, constants: &Constants, noise: Noise) {
    // The host's loops do not cross 2^32.
    let border = ((case.first >> 32) + 1) << 32;
    let head = case.n.min((border - case.first) as usize);
    for (from, to) in [(0, head), (head, case.n)] {
        let Planes([weight, kept, grad, m, v, max]) = planes;
        let n = case.n;
        let weights = match case.weight {
            WeightKind::F32 => WeightSlices::F32(&mut weight.slice(n)[from..to]),
            WeightKind::Bf16Split => {
                WeightSlices::Bf16Split(&mut weight.slice(n)[from..to], &mut kept.slice(n)[from..to])
            }
            WeightKind::Bf16Full => {
                WeightSlices::Bf16Full(&mut weight.slice(n)[from..to], &mut kept.slice(n)[from..to])
            }
            WeightKind::F16Full => WeightSlices::F16Full(&mut weight.slice(n)[from..to], &mut kept.slice(n)[from..to]),
        };
        let grad = match case.grad {
            GradDType::F32 => GradSlice::F32(&grad.slice(n)[from..to]),
            GradDType::Bf16 => GradSlice::Bf16(&grad.slice(n)[from..to]),
            GradDType::F16 => GradSlice::F16(&grad.slice(n)[from..to]),
        };
        let moments = match case.moment {
            MomentDType::F32 => MomentSlices::F32(
                &mut m.slice(n)[from..to],
                &mut v.slice(n)[from..to],
                case.config.amsgrad.then(|| &mut max.slice(n)[from..to]),
            ),
            MomentDType::Bf16 => MomentSlices::Bf16(
                &mut m.slice(n)[from..to],
                &mut v.slice(n)[from..to],
                case.config.amsgrad.then(|| &mut max.slice(n)[from..to]),
            ),
        };
        let isa = Isa::current().unwrap();
        let mut unscaled = vec![0.0; to - from];
        let grad = match case.scale {
            Some(scale) => {
                kernel::unscale(isa, grad, scale, &mut unscaled);
                GradSlice::F32(&unscaled)
            }
            None => grad,
        };
        kernel::update(isa, weights, grad, moments, constants, noise, case.first + from as u64);
    }
}

/// The update of a case whose planes are at these addresses.
pub(super) fn update<'a>(
    case: &Case,
    parameter: &'a str,
    [weight, kept, grad, exp_avg, exp_avg_sq, maximum]: [usize; 6],
    constants: Constants,
    noise: Noise,
) -> DeviceUpdate<'a> {
    DeviceUpdate {
        parameter,
        weight_kind: case.weight,
        grad_dtype: case.grad,
        moments: case.moment,
        weight,
        kept: if case.weight == WeightKind::F32 { 0 } else { kept },
        grad,
        exp_avg,
        exp_avg_sq,
        max_exp_avg_sq: if case.config.amsgrad { maximum } else { 0 },
        len: case.n,
        first: case.first,
        constants,
        noise,
        grad_scale: case.scale,
    }
}

/// The planes of a case: what each is, whether in fp32, and whether it is there.
fn whats(case: &Case) -> [(&'static str, bool, bool); 6] {
    let moments = case.moment == MomentDType::F32;
    let plain = case.weight == WeightKind::F32;
    let full = matches!(case.weight, WeightKind::Bf16Full | WeightKind::F16Full);
    [
        ("weight", plain, true),
        ("kept", full, !plain),
        ("grad", case.grad == GradDType::F32, true),
        ("exp_avg", moments, true),
        ("exp_avg_sq", moments, true),
        ("max_exp_avg_sq", moments, case.config.amsgrad),
    ]
}

/// The same bits, or both NaN.
pub(super) fn compare(case: &Case, host: &mut Planes, device: &mut Planes) {
    let n = case.n;
    for (i, (what, single, there)) in whats(case).into_iter().enumerate() {
        let (host, device) = (&mut host.0[i], &mut device.0[i]);
        if !there {
            continue;
        }
        if single {
            for (i, (a, b)) in host.slice::<f32>(n).iter().zip(device.slice::<f32>(n)).enumerate() {
                let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                assert!(same, "{case:?}: {what}[{i}] is {a:e} on the host and {b:e} on the device");
            }
        } else {
            // Their NaN has one pattern.
            for (i, (a, b)) in host.slice::<i16>(n).iter().zip(device.slice::<i16>(n)).enumerate() {
                assert!(a == b, "{case:?}: {what}[{i}] is {a:04x} on the host and {b:04x} on the device");
            }
        }
    }
}
