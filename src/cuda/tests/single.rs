//! One run of a parameter: the kernel against the host, on the default stream.

use super::data::{Case, Plane, compare, on_host, planes, update};
use super::*;
use crate::kernel::AdamWConfig;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

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
    // After each step, since the next may repair what was wrong in one: a NaN's residual is not looked at again.
    for step in 1..=STEPS {
        let constants = case.config.constants(f64::from(step), case.clip);
        let noise = Noise::new(7, u64::from(step), 3);
        on_host(case, &mut host, &constants, noise);
        let update = update(case, "weight", std::array::from_fn(|i| homes[i].address as usize), constants, noise);
        // SAFETY: the planes have `case.n` elements of these dtypes, and only the default stream touches them.
        unsafe { adamw(&update, 0) }.unwrap();
        for (home, plane) in homes.iter().zip(&mut device.0) {
            if !plane.0.is_empty() {
                home.read(plane);
            }
        }
        compare(case, &mut host, &mut device);
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
        for grad in [GradDType::F32, GradDType::Bf16, GradDType::F16] {
            for moment in [MomentDType::F32, MomentDType::Bf16] {
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
        grad: GradDType::Bf16,
        moment: MomentDType::F32,
        config: AdamWConfig::default(),
        n: 9_000_005,
        first: 0,
        clip: 1.0,
        scale: None,
        offset: 0,
        mapped: false,
    });
}
