//! What can be tested without a device, and the comparison of the kernel with the host's loops, bit for bit, which
//! skips itself where there is none.

use super::*;

#[test]
fn status_answers_on_any_machine() {
    let status = status();
    assert_eq!(status.compiled.is_some(), cfg!(outboard_cuda));
    assert_eq!(status.devices == 0, status.problem.is_some(), "{status:?}");
    if cfg!(outboard_cuda) {
        assert!(status.runtime_version.is_some(), "{status:?}");
    }
    match (require_device(), status.problem) {
        (Ok(()), None) => {}
        (Err(Error::Cuda(said)), Some(problem)) => assert_eq!(said, problem),
        other => panic!("{other:?}"),
    }
}

fn nothing(parameter: &str) -> DeviceUpdate<'_> {
    let nowhere = std::ptr::null_mut();
    DeviceUpdate {
        parameter,
        weight_kind: WeightKind::F32,
        grad_kind: GradKind::F32,
        moment_kind: MomentKind::F32,
        weight: nowhere,
        kept: nowhere,
        grad: nowhere,
        exp_avg: nowhere,
        exp_avg_sq: nowhere,
        max_exp_avg_sq: nowhere,
        len: 0,
        first: 0,
        constants: crate::AdamWConfig::default().constants(1.0, 1.0),
        noise: Noise::default(),
        grad_scale: None,
        stream: nowhere,
    }
}

#[cfg(not(outboard_cuda))]
#[test]
fn without_the_library_the_error_names_the_parameter_and_the_cure() {
    // SAFETY: the stand-in does not use the pointers.
    let Err(Error::Cuda(said)) = (unsafe { adamw(&nothing("head.weight")) }) else { panic!("no error") };
    assert!(said.contains("head.weight") && said.contains("OUTBOARD_CUDA=require"), "{said}");
}

#[cfg(outboard_cuda)]
mod linked {
    use super::*;
    use crate::kernel::{self, AdamWConfig, GradSlice, Isa, MomentSlices, WeightSlices};
    use half::{bf16, f16};
    use std::ffi::c_int;
    use std::ptr::{null_mut, without_provenance_mut};

    #[test]
    fn no_elements_need_no_device() {
        // SAFETY: with no elements the pointers are not looked at.
        unsafe { adamw(&nothing("empty")) }.unwrap();
    }

    #[test]
    fn wrong_arguments_are_refused_before_anything_starts() {
        const INVALID_VALUE: c_int = 1;
        let plane = without_provenance_mut(64);
        let constants = AdamWConfig::default().constants(1.0, 1.0);
        let call = |kinds: [c_int; 3], weight, kept, exp_avg, n, first, constants: *const Constants| {
            // SAFETY: each call below has one argument that is refused, so no plane is looked at.
            unsafe {
                sys::outboard_cuda_adamw(
                    kinds[0],
                    kinds[1],
                    kinds[2],
                    weight,
                    kept,
                    plane,
                    exp_avg,
                    plane,
                    null_mut(),
                    n,
                    first,
                    constants,
                    0,
                    1.0,
                    null_mut(),
                )
            }
        };
        let odd = without_provenance_mut(65);
        for (what, code) in [
            ("weight kind", call([4, 0, 0], plane, null_mut(), plane, 8, 0, &raw const constants)),
            ("grad kind", call([0, 3, 0], plane, null_mut(), plane, 8, 0, &raw const constants)),
            ("moment kind", call([0, 0, -1], plane, null_mut(), plane, 8, 0, &raw const constants)),
            ("kind of an empty run", call([4, 0, 0], plane, null_mut(), plane, 0, 0, &raw const constants)),
            ("negative length", call([0, 0, 0], plane, null_mut(), plane, -1, 0, &raw const constants)),
            ("end beyond 2^64", call([0, 0, 0], plane, null_mut(), plane, 8, u64::MAX - 7, &raw const constants)),
            ("no constants", call([0, 0, 0], plane, null_mut(), plane, 8, 0, std::ptr::null())),
            ("no weight", call([0, 0, 0], null_mut(), null_mut(), plane, 8, 0, &raw const constants)),
            ("no residual", call([1, 0, 0], plane, null_mut(), plane, 8, 0, &raw const constants)),
            ("misaligned weight", call([1, 0, 0], odd, plane, plane, 8, 0, &raw const constants)),
            (
                "misaligned moment",
                call([0, 0, 0], plane, null_mut(), without_provenance_mut(66), 8, 0, &raw const constants),
            ),
        ] {
            assert_eq!(code, INVALID_VALUE, "{what}");
        }
    }

    #[test]
    fn a_refused_update_names_the_parameter_and_cudas_error() {
        // SAFETY: refused because its planes are null.
        let error = unsafe { adamw(&DeviceUpdate { len: 8, first: 16, ..nothing("layers.3.weight") }) }.unwrap_err();
        let said = error.to_string();
        assert!(said.contains("layers.3.weight, elements 16..24") && said.contains("cudaErrorInvalidValue"), "{said}");
    }

    // ---- The kernel against the host --------------------------------------------------------------------------------

    // The static runtime is linked already; only the tests allocate through it.
    unsafe extern "C" {
        fn cudaMalloc(pointer: *mut *mut c_void, bytes: usize) -> c_int;
        fn cudaFree(pointer: *mut c_void) -> c_int;
        fn cudaHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: u32) -> c_int;
        fn cudaHostGetDevicePointer(device: *mut *mut c_void, host: *mut c_void, flags: u32) -> c_int;
        fn cudaFreeHost(pointer: *mut c_void) -> c_int;
        fn cudaMemcpy(to: *mut c_void, from: *const c_void, bytes: usize, kind: c_int) -> c_int;
    }
    const MAPPED: u32 = 2;
    const COPY_EITHER_WAY: c_int = 4;

    fn check(code: c_int) {
        assert_eq!(code, 0, "CUDA error");
    }

    /// A plane on the host, with room for one of any dtype: 8-byte words keep it aligned for all of them.
    #[derive(Clone)]
    struct Plane(Vec<u64>);

    impl Plane {
        fn of<T: Copy>(values: &[T]) -> Self {
            let mut plane = Self(vec![0; size_of_val(values).div_ceil(8)]);
            plane.slice(values.len()).copy_from_slice(values);
            plane
        }

        /// `T` is f32, bf16, f16 or i16.
        fn slice<T: Copy>(&mut self, n: usize) -> &mut [T] {
            assert!(n * size_of::<T>() <= self.0.len() * 8);
            // SAFETY: in bounds, aligned, exclusively borrowed, and any bits are a value of these types.
            unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), n) }
        }
    }

    /// Room for a plane where the device can reach it, `offset` bytes behind an aligned address.
    struct DevicePlane {
        allocation: *mut c_void,
        address: *mut c_void,
        mapped: bool,
    }

    impl DevicePlane {
        fn new(plane: &Plane, offset: usize, mapped: bool) -> Self {
            let bytes = plane.0.len() * 8;
            let (mut allocation, mut base) = (null_mut(), null_mut());
            // SAFETY: the pointers receive an allocation that is large enough for what is copied behind the offset.
            unsafe {
                if mapped {
                    check(cudaHostAlloc(&raw mut allocation, bytes + offset, MAPPED));
                    check(cudaHostGetDevicePointer(&raw mut base, allocation, 0));
                } else {
                    check(cudaMalloc(&raw mut allocation, bytes + offset));
                    base = allocation;
                }
                let address = base.byte_add(offset);
                check(cudaMemcpy(address, plane.0.as_ptr().cast(), bytes, COPY_EITHER_WAY));
                Self { allocation, address, mapped }
            }
        }

        /// Waits for the default stream and copies the plane back.
        fn read(&self, plane: &mut Plane) {
            // SAFETY: `plane` is as long as the one that this was made from.
            check(unsafe { cudaMemcpy(plane.0.as_mut_ptr().cast(), self.address, plane.0.len() * 8, COPY_EITHER_WAY) });
        }
    }

    impl Drop for DevicePlane {
        fn drop(&mut self) {
            // SAFETY: allocated by the function that belongs to this one. Its error, if any, was seen before.
            let _ = unsafe { if self.mapped { cudaFreeHost(self.allocation) } else { cudaFree(self.allocation) } };
        }
    }

    #[derive(Clone, Copy, Debug)]
    struct Case {
        weight: WeightKind,
        grad: GradKind,
        moment: MomentKind,
        config: AdamWConfig,
        n: usize,
        first: u64,
        clip: f32,
        scale: Option<f32>,
        /// Bytes by which the weight and the gradient miss alignment.
        offset: usize,
        /// The state is in mapped host memory.
        mapped: bool,
    }

    /// Weight, kept, gradient, moments, maximum.
    #[derive(Clone)]
    struct Planes([Plane; 6]);

    /// An integer hash, for test data only.
    fn scramble(x: u32) -> u32 {
        let x = (x ^ (x >> 15)).wrapping_mul(0x2C1B_3C6D).rotate_left(13).wrapping_mul(0x297A_2D39);
        (x ^ (x >> 16)).wrapping_mul(0x2C1B_3C6D)
    }

    /// Values as they occur in training, one in eight of any bits at all, and one in sixteen special.
    fn values(n: usize, seed: u32, ordinary: impl Fn(f32) -> f32) -> Vec<f32> {
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

    fn planes(case: &Case) -> Planes {
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
            GradKind::F32 => Plane::of(&grads),
            GradKind::Bf16 => bf16s(&grads),
            GradKind::F16 => f16s(&grads),
        };
        let moment = |values: Vec<f32>| match case.moment {
            MomentKind::F32 => Plane::of(&values),
            MomentKind::Bf16 => bf16s(&values),
        };
        let exp_avg = moment(values(n, 3, |x| x * 0.01));
        let exp_avg_sq = moment(values(n, 4, |x| x * x * 1e-4));
        let maximum = if case.config.amsgrad { moment(values(n, 5, |x| x * x * 1e-4)) } else { Plane(vec![]) };
        Planes([weight, kept, grad, exp_avg, exp_avg_sq, maximum])
    }

    fn on_host(case: &Case, planes: &mut Planes, constants: &Constants, noise: Noise) {
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
                WeightKind::F16Full => {
                    WeightSlices::F16Full(&mut weight.slice(n)[from..to], &mut kept.slice(n)[from..to])
                }
            };
            let grad = match case.grad {
                GradKind::F32 => GradSlice::F32(&grad.slice(n)[from..to]),
                GradKind::Bf16 => GradSlice::Bf16(&grad.slice(n)[from..to]),
                GradKind::F16 => GradSlice::F16(&grad.slice(n)[from..to]),
            };
            let moments = match case.moment {
                MomentKind::F32 => MomentSlices::F32(
                    &mut m.slice(n)[from..to],
                    &mut v.slice(n)[from..to],
                    case.config.amsgrad.then(|| &mut max.slice(n)[from..to]),
                ),
                MomentKind::Bf16 => MomentSlices::Bf16(
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

    fn on_device(case: &Case, planes: &[DevicePlane; 6], constants: Constants, noise: Noise) {
        let [weight, kept, grad, exp_avg, exp_avg_sq, maximum] = planes;
        let update = DeviceUpdate {
            weight_kind: case.weight,
            grad_kind: case.grad,
            moment_kind: case.moment,
            weight: weight.address,
            kept: if case.weight == WeightKind::F32 { null_mut() } else { kept.address },
            grad: grad.address,
            exp_avg: exp_avg.address,
            exp_avg_sq: exp_avg_sq.address,
            max_exp_avg_sq: if case.config.amsgrad { maximum.address } else { null_mut() },
            len: case.n,
            first: case.first,
            constants,
            noise,
            grad_scale: case.scale,
            ..nothing("weight")
        };
        // SAFETY: the planes have `case.n` elements of these dtypes, and only the default stream touches them.
        unsafe { adamw(&update) }.unwrap();
    }

    /// The same bits, or both NaN.
    fn compare(case: &Case, what: &str, single: bool, host: &mut Plane, device: &mut Plane) {
        let n = case.n;
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

    fn run(case: &Case) {
        const STEPS: u32 = 3;
        let mut host = planes(case);
        let mut device = host.clone();
        let offsets = [case.offset, 0, case.offset, 0, 0, 0];
        let homes: [DevicePlane; 6] = std::array::from_fn(|i| {
            let state = [1, 3, 4, 5].contains(&i);
            // An absent plane is given a word, since no memory is no address.
            let plane = if host.0[i].0.is_empty() { &Plane(vec![0]) } else { &host.0[i] };
            DevicePlane::new(plane, offsets[i], state && case.mapped)
        });
        let moments = case.moment == MomentKind::F32;
        let plain = case.weight == WeightKind::F32;
        let full = matches!(case.weight, WeightKind::Bf16Full | WeightKind::F16Full);
        let whats = [
            ("weight", plain, true),
            ("kept", full, !plain),
            ("grad", case.grad == GradKind::F32, true),
            ("exp_avg", moments, true),
            ("exp_avg_sq", moments, true),
            ("max_exp_avg_sq", moments, case.config.amsgrad),
        ];
        // After each step, since the next may repair what was wrong in one: a NaN's residual is not looked at again.
        for step in 1..=STEPS {
            let constants = case.config.constants(f64::from(step), case.clip);
            let noise = Noise::new(7, u64::from(step), 3);
            on_host(case, &mut host, &constants, noise);
            on_device(case, &homes, constants, noise);
            for (i, (what, single, there)) in whats.into_iter().enumerate() {
                if there {
                    homes[i].read(&mut device.0[i]);
                    compare(case, what, single, &mut host.0[i], &mut device.0[i]);
                }
            }
        }
    }

    #[test]
    fn same_bits_as_the_host() {
        if let Some(problem) = status().problem {
            eprintln!("not compared: {problem}");
            return;
        }
        let base = AdamWConfig { lr: 1e-2, ..AdamWConfig::default() };
        let configs = [
            base,
            AdamWConfig { betas: (0.3, 0.99), amsgrad: true, maximize: true, ..base },
            AdamWConfig { betas: (0.0, 0.9), decoupled_weight_decay: false, eps: 0.0, ..base },
            AdamWConfig { weight_decay: 0.0, decoupled_weight_decay: false, amsgrad: true, ..base },
        ];
        let weights = [WeightKind::F32, WeightKind::Bf16Split, WeightKind::Bf16Full, WeightKind::F16Full];
        for weight in weights {
            for grad in [GradKind::F32, GradKind::Bf16, GradKind::F16] {
                for moment in [MomentKind::F32, MomentKind::Bf16] {
                    let border = (1 << 32) - 1001;
                    for (i, (config, n, first)) in configs
                        .into_iter()
                        .flat_map(|config| [(4099, 0), (70_001, border), (1, 5)].map(|(n, first)| (config, n, first)))
                        .enumerate()
                    {
                        let case = Case {
                            weight,
                            grad,
                            moment,
                            config,
                            n,
                            first,
                            clip: if i % 2 == 0 { 1.0 } else { 0.37 },
                            scale: (i % 3 == 1).then_some(3.0),
                            offset: if i % 4 == 2 { 12 } else { 0 },
                            mapped: i % 5 == 3,
                        };
                        run(&case);
                    }
                }
            }
        }
    }

    /// More elements than all threads of a device take at once, so that they stride.
    #[test]
    fn same_bits_over_many_elements() {
        if let Some(problem) = status().problem {
            eprintln!("not compared: {problem}");
            return;
        }
        run(&Case {
            weight: WeightKind::Bf16Split,
            grad: GradKind::Bf16,
            moment: MomentKind::F32,
            config: AdamWConfig::default(),
            n: 9_000_005,
            first: 0,
            clip: 1.0,
            scale: None,
            offset: 0,
            mapped: false,
        });
    }
}
