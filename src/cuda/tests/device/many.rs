//! Kernels on many runs at once, against the host's loops and bit for bit.

use super::super::data::{self, Case, Planes, compare, on_host, planes, values};
use super::*;
use crate::device::{DeviceGrad, TABLE_ENTRY_BYTES};
use crate::kernel::{self, AdamWConfig, GradSlice, Isa, NORM_BLOCK};
use half::{bf16, f16};

const WEIGHTS: [WeightKind; 4] = [WeightKind::F32, WeightKind::Bf16Split, WeightKind::Bf16Full, WeightKind::F16Full];
const GRADS: [GradDType; 3] = [GradDType::F32, GradDType::Bf16, GradDType::F16];

fn table(device: &CudaDevice, items: usize) -> Pinned {
    Pinned::new(device, items * TABLE_ENTRY_BYTES)
}

// ---- Updates --------------------------------------------------------------------------------------------------------

/// One run of several: its data on the host, and where it is in the image.
struct Run {
    case: Case,
    host: Planes,
    at: [usize; 6],
    name: String,
}

/// Puts the planes of cases into an image; those that are absent get no room.
fn put(device: &CudaDevice, cases: &[Case], on_device: bool) -> (Image, Vec<Run>) {
    let all: Vec<Planes> = cases.iter().map(planes).collect();
    let bytes = all.iter().flat_map(|planes| &planes.0).map(|plane| plane.0.len() * 8 + 512).sum();
    let mut image = Image::new(device, bytes, on_device);
    let runs = cases.iter().zip(all).enumerate().map(|(i, (&case, mut host))| {
        let at = std::array::from_fn(|i| {
            let len = host.0[i].0.len() * 8;
            // The weight and the gradient of some miss alignment.
            image.put(bytes_of(&mut host.0[i], len), if i % 2 == 0 && i < 4 { case.offset } else { 0 })
        });
        Run { case, host, at, name: format!("parameter {i}") }
    });
    let runs = runs.collect();
    image.upload(device);
    (image, runs)
}

fn step(device: &CudaDevice, image: &mut Image, runs: &mut [Run], steps: u32) {
    let table = table(device, runs.len());
    for step in 1..=steps {
        let settings: Vec<_> = runs
            .iter()
            .enumerate()
            .map(|(i, run)| {
                let constants = run.case.config.constants(f64::from(step), run.case.clip);
                (constants, Noise::new(7, u64::from(step), i as u64))
            })
            .collect();
        let updates: Vec<_> = runs
            .iter()
            .zip(&settings)
            .map(|(run, &(constants, noise))| {
                data::update(&run.case, &run.name, run.at.map(|at| image.address(at)), constants, noise)
            })
            .collect();
        let mut span = table.span(0, runs.len() * TABLE_ENTRY_BYTES);
        device.update_many(&mut span, &updates, Stream::Update).unwrap();
        image.download(device, Stream::Update);
        for (run, (constants, noise)) in runs.iter_mut().zip(settings) {
            let mut found = run.host.clone();
            for (plane, at) in found.0.iter_mut().zip(run.at) {
                let len = plane.0.len() * 8;
                bytes_of(plane, len).copy_from_slice(&image.host.bytes()[at..at + len]);
            }
            if run.case.n > 0 {
                on_host(&run.case, &mut run.host, &constants, noise);
            }
            compare(&run.case, &mut run.host, &mut found);
        }
    }
}

fn cases(weight: WeightKind, grad: GradDType, moment: MomentDType, lengths: &[usize]) -> Vec<Case> {
    let base = AdamWConfig { lr: 1e-2, ..AdamWConfig::default() };
    let configs = [
        base,
        AdamWConfig { betas: (0.3, 0.99), amsgrad: true, maximize: true, ..base },
        AdamWConfig { betas: (0.0, 0.9), decoupled_weight_decay: false, eps: 0.0, ..base },
        AdamWConfig { weight_decay: 0.0, decoupled_weight_decay: false, amsgrad: true, ..base },
    ];
    lengths
        .iter()
        .enumerate()
        .map(|(i, &n)| Case {
            weight,
            grad,
            moment,
            config: configs[i % configs.len()],
            n,
            first: [0, (1 << 32) - 1001, 5][i % 3],
            clip: if i % 2 == 0 { 1.0 } else { 0.37 },
            scale: [None, Some(3.0), None, Some(1024.0)][i / 2 % 4],
            offset: [0, 4, 12, 0, 16][i % 5],
            mapped: false,
        })
        .collect()
}

#[test]
fn updates_of_all_dtypes_at_once() {
    let Some(device) = device() else { return };
    let lengths = [0, 1, 7, 8, 9, 0, 255, 2047, 2048, 2049, 4096, 4099, 70_001, 16, 300_000, 0];
    for weight in WEIGHTS {
        for grad in GRADS {
            for moment in [MomentDType::F32, MomentDType::Bf16] {
                let cases = cases(weight, grad, moment, &lengths);
                let (mut image, mut runs) = put(&device, &cases, true);
                step(&device, &mut image, &mut runs, 2);
            }
        }
    }
}

#[test]
fn updates_of_any_number() {
    let Some(device) = device() else { return };
    // Beyond 512 the kernel searches in the table too.
    for count in [1, 2, 3, 100, 511, 512, 513, 1000, 1500] {
        let lengths: Vec<usize> = (0..count).map(|i| if i % 7 == 6 { 0 } else { i * 37 % 613 + 1 }).collect();
        let cases = cases(WeightKind::Bf16Split, GradDType::Bf16, MomentDType::Bf16, &lengths);
        let (mut image, mut runs) = put(&device, &cases, true);
        step(&device, &mut image, &mut runs, 1);
    }
    device.update_many(&mut table(&device, 1).span(0, 0), &[], Stream::Update).unwrap();
}

/// More tiles than the device takes at once, in few runs and in many.
#[test]
fn updates_of_many_elements() {
    let Some(device) = device() else { return };
    for lengths in [vec![5_000_003], vec![2_000_000, 3, 2_500_001], vec![9000; 600]] {
        let cases = cases(WeightKind::Bf16Split, GradDType::Bf16, MomentDType::F32, &lengths);
        let (mut image, mut runs) = put(&device, &cases, true);
        step(&device, &mut image, &mut runs, 1);
    }
}

#[test]
fn updates_in_pinned_host_memory() {
    let Some(device) = device() else { return };
    if !device.can_address_host() {
        eprintln!("not tested: the device does not address host memory as the host does");
        return;
    }
    for (weight, moment) in [(WeightKind::F32, MomentDType::F32), (WeightKind::Bf16Split, MomentDType::Bf16)] {
        let cases = cases(weight, GradDType::Bf16, moment, &[1, 4099, 70_001, 0, 1_000_003]);
        let (mut image, mut runs) = put(&device, &cases, false);
        step(&device, &mut image, &mut runs, 2);
        // And one by one.
        for (i, run) in runs.iter_mut().enumerate() {
            let (constants, noise) = (run.case.config.constants(3.0, 1.0), Noise::new(7, 3, i as u64));
            let addresses = run.at.map(|at| image.address(at));
            let update = data::update(&run.case, &run.name, addresses, constants, noise);
            device.update(&update, Stream::Update).unwrap();
            image.download(&device, Stream::Update);
            let mut found = run.host.clone();
            for (plane, at) in found.0.iter_mut().zip(run.at) {
                let len = plane.0.len() * 8;
                bytes_of(plane, len).copy_from_slice(&image.host.bytes()[at..at + len]);
            }
            if run.case.n > 0 {
                on_host(&run.case, &mut run.host, &constants, noise);
            }
            compare(&run.case, &mut run.host, &mut found);
        }
    }
}

#[test]
fn a_refused_update_of_many_is_named() {
    let Some(device) = device() else { return };
    let table = table(&device, 2);
    let mut span = table.span(0, 2 * TABLE_ENTRY_BYTES);
    let refused = DeviceUpdate { len: 8, first: 16, ..nothing("layers.3.weight") };
    let text = said(device.update_many(&mut span, &[nothing("empty"), refused], Stream::Update));
    assert!(text.contains("layers.3.weight, elements 16..24") && text.contains("cudaErrorInvalidValue"), "{text}");
}

// ---- Copies ---------------------------------------------------------------------------------------------------------

#[test]
fn copies_of_any_size_and_alignment() {
    let Some(device) = device() else { return };
    let sizes = [0, 1, 2, 3, 8, 14, 15, 16, 17, 30, 64, 255, 4096, 16_383, 16_384, 16_386, 16_400, 100_001];
    let mut copies = Vec::new();
    for (i, size) in sizes.into_iter().cycle().take(40 * sizes.len()).enumerate() {
        copies.push((size, (i / sizes.len()) % 8 * 2, (i / sizes.len() / 8) * 6));
    }
    copies.push((20_000_006, 2, 2));
    let room: usize = copies.iter().map(|(size, ..)| size + 600).sum();
    // Device to device, host to device, device to host.
    for (from_device, to_device) in [(true, true), (false, true), (true, false)] {
        let on_device = from_device && to_device;
        if !on_device && !device.can_address_host() {
            eprintln!("not tested: the device does not address host memory as the host does");
            continue;
        }
        let mut from = Image::new(&device, room, from_device);
        let mut to = Image::new(&device, room, to_device);
        let mut expected = Vec::new();
        let mut places = Vec::new();
        for (i, &(size, to_offset, from_offset)) in copies.iter().enumerate() {
            let bytes = noise_bytes(size, i as u32);
            places.push((to.put(&vec![0; size], to_offset), from.put(&bytes, from_offset)));
            expected.push(bytes);
        }
        from.upload(&device);
        to.upload(&device);
        let table = table(&device, copies.len());
        // A few at a time, and all.
        for (first, count) in [(7, 1), (0, 5), (0, copies.len())] {
            let given: Vec<DeviceCopy> = (first..first + count)
                .map(|i| DeviceCopy {
                    to: to.address(places[i].0),
                    from: from.address(places[i].1),
                    bytes: copies[i].0,
                })
                .collect();
            let mut span = table.span(0, count * TABLE_ENTRY_BYTES);
            device.copy_many(&mut span, &given, Stream::Down).unwrap();
            to.download(&device, Stream::Down);
            for i in first..first + count {
                let (at, size) = (places[i].0, copies[i].0);
                assert!(to.host.bytes()[at..at + size] == expected[i][..], "{:?}", copies[i]);
            }
        }
        from.download(&device, Stream::Down);
    }
}

// ---- Gradients ------------------------------------------------------------------------------------------------------

/// Gradients on the host: fp32 values in one dtype.
struct Gradient {
    dtype: GradDType,
    plane: Plane,
    len: usize,
    at: usize,
}

impl Gradient {
    fn new(dtype: GradDType, values: &[f32]) -> Self {
        let plane = match dtype {
            GradDType::F32 => Plane::of(values),
            GradDType::Bf16 => Plane::of(&values.iter().map(|&x| kernel::f32_to_bf16(x)).collect::<Vec<_>>()),
            GradDType::F16 => Plane::of(&values.iter().map(|&x| kernel::f32_to_f16(x)).collect::<Vec<_>>()),
        };
        Self { dtype, plane, len: values.len(), at: 0 }
    }

    fn bytes(&self) -> usize {
        self.len * self.dtype.bytes()
    }

    fn slice(&mut self) -> GradSlice<'_> {
        let n = self.len;
        match self.dtype {
            GradDType::F32 => GradSlice::F32(self.plane.slice(n)),
            GradDType::Bf16 => GradSlice::Bf16(self.plane.slice::<bf16>(n)),
            GradDType::F16 => GradSlice::F16(self.plane.slice::<f16>(n)),
        }
    }

    fn partials(&mut self, scale: f32) -> Vec<f64> {
        let isa = Isa::current().unwrap();
        let sum = |block: GradSlice<'_>| kernel::sum_of_squares(isa, block, scale);
        match self.slice() {
            GradSlice::F32(grad) => grad.chunks(NORM_BLOCK).map(|block| sum(GradSlice::F32(block))).collect(),
            GradSlice::Bf16(grad) => grad.chunks(NORM_BLOCK).map(|block| sum(GradSlice::Bf16(block))).collect(),
            GradSlice::F16(grad) => grad.chunks(NORM_BLOCK).map(|block| sum(GradSlice::F16(block))).collect(),
        }
    }
}

/// Ordinary gradients, or some that are anything at all.
fn gradients(lengths: &[usize], special: bool) -> Vec<Gradient> {
    let mut all = Vec::new();
    for (i, &len) in lengths.iter().enumerate() {
        for dtype in GRADS {
            let mut grads = values(len, 40 + i as u32 % 64, |x| x * x * x * 0.1);
            if !special {
                // Finite in all dtypes.
                grads.iter_mut().filter(|x| x.is_nan() || x.abs() > 60_000.0).for_each(|x| *x = 0.125);
            }
            all.push(Gradient::new(dtype, &grads));
        }
    }
    all
}

/// Puts gradients into an image, every other one element behind a border of 16 bytes.
fn put_gradients(device: &CudaDevice, gradients: &mut [Gradient]) -> Image {
    let bytes = gradients.iter().map(|grad| grad.bytes() + 600).sum();
    let mut image = Image::new(device, bytes, true);
    for (i, grad) in gradients.iter_mut().enumerate() {
        let bytes = grad.bytes();
        let misaligned = if i / 3 % 2 == 0 { 0 } else { grad.dtype.bytes() };
        grad.at = image.put(bytes_of(&mut grad.plane, bytes), misaligned);
    }
    image.upload(device);
    image
}

fn compare_squares(device: &CudaDevice, lengths: &[usize], special: bool, scales: &[f32]) {
    let mut gradients = gradients(lengths, special);
    let mut image = put_gradients(device, &mut gradients);
    let table = table(device, gradients.len());
    let blocks: usize = gradients.iter().map(|grad| grad.len.div_ceil(NORM_BLOCK)).sum();
    let mut partials = Pinned::new(device, (blocks + 1) * 8);
    let given: Vec<DeviceGrad> = gradients
        .iter()
        .map(|grad| DeviceGrad { address: image.address(grad.at), len: grad.len, dtype: grad.dtype })
        .collect();
    for &scale in scales {
        partials.bytes().fill(UNTOUCHED);
        let mut span = table.span(0, gradients.len() * TABLE_ENTRY_BYTES);
        device.squares(&mut span, &partials.span(0, blocks * 8), &given, scale, Stream::Update).unwrap();
        image.download(device, Stream::Update);
        let expected: Vec<f64> = gradients.iter_mut().flat_map(|grad| grad.partials(scale)).collect();
        assert_eq!(expected.len(), blocks);
        let mut found = partials.span(0, blocks * 8);
        for (i, (a, b)) in expected.iter().zip(found.as_mut_slice::<f64>()).enumerate() {
            let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            assert!(same, "scale {scale}, block {i} of {blocks}: {a:e} on the host and {b:e} on the device");
        }
        assert!(partials.bytes()[blocks * 8..].iter().all(|&byte| byte == UNTOUCHED));
    }
}

#[test]
fn squares_have_the_hosts_bits() {
    let Some(device) = device() else { return };
    let lengths = [1, 0, 255, 256, 4095, 4096, 4097, 100_003, 5, 4096, 8192, 1_000_000, 257];
    let twice: Vec<usize> = lengths.iter().chain(&lengths[1..]).copied().collect();
    let scales = [1.0, 3.0, 1024.0, 65_536.0, 0.1, -0.25, 1e-42, 1.7e38, f32::INFINITY, 0.0];
    compare_squares(&device, &twice, false, &scales);
    compare_squares(&device, &twice, true, &scales);
    compare_squares(&device, &[4097], false, &[1.0]);
}

#[test]
fn squares_of_any_number_of_gradients() {
    let Some(device) = device() else { return };
    for count in [1, 170, 171, 500] {
        // Three dtypes of each.
        let lengths: Vec<usize> = (0..count).map(|i| if i % 11 == 5 { 0 } else { i * 997 % 9001 + 1 }).collect();
        compare_squares(&device, &lengths, false, &[1.0, 7.0]);
    }
    let none = Pinned::new(&device, 8);
    device.squares(&mut none.span(0, 0), &none.span(0, 0), &[], 1.0, Stream::Update).unwrap();
}

/// So many blocks that each warp has more than 32.
#[test]
fn squares_of_many_elements() {
    const PART: usize = 32 << 20;
    const PARTS: usize = 16;
    let Some(device) = device() else { return };
    let mut part = Gradient::new(GradDType::Bf16, &values(PART, 9, |x| x * 0.01));
    let mut host = Pinned::new(&device, part.bytes());
    let bytes = part.bytes();
    host.bytes().copy_from_slice(bytes_of(&mut part.plane, bytes));
    let (mut memory, _guard) = device.allocate(PARTS * bytes).unwrap();
    let grad = DeviceGrad { address: memory.address(), len: PARTS * PART, dtype: GradDType::Bf16 };
    for _ in 0..PARTS {
        device.copy_in(&memory.split_front(bytes), &host.span(0, bytes), Stream::Update).unwrap();
    }
    let table = table(&device, 1);
    let blocks = PARTS * PART / NORM_BLOCK;
    let partials = Pinned::new(&device, blocks * 8);
    for scale in [1.0, 3.0] {
        // The first launch loads the kernel.
        for round in 0..2 {
            finish(&device, Stream::Update);
            let start = std::time::Instant::now();
            let mut span = table.span(0, TABLE_ENTRY_BYTES);
            device.squares(&mut span, &partials.span(0, blocks * 8), &[grad], scale, Stream::Update).unwrap();
            finish(&device, Stream::Update);
            let seconds = start.elapsed().as_secs_f64();
            let rate = (PARTS * bytes) as f64 / seconds / 1e9;
            eprintln!("squares of {} MiB, scale {scale}, round {round}: {rate:.0} GB/s", (PARTS * bytes) >> 20);
        }
        let expected = part.partials(scale);
        let mut found = partials.span(0, blocks * 8);
        for (i, found) in found.as_mut_slice::<f64>().iter().enumerate() {
            let expected = expected[i % expected.len()];
            let same = expected.to_bits() == found.to_bits() || (expected.is_nan() && found.is_nan());
            assert!(same, "scale {scale}, block {i}: {expected:e} on the host and {found:e} on the device");
        }
    }
}

#[test]
fn unscaling_has_the_hosts_bits() {
    let Some(device) = device() else { return };
    let lengths = [1, 2, 0, 7, 8, 9, 15, 16, 17, 255, 4099, 3_000_001];
    let twice: Vec<usize> = lengths.iter().chain(&lengths[1..]).copied().collect();
    for scale in [3.0, 1024.0, 0.1, 1.0, 1e-42, -0.5] {
        let mut gradients = gradients(&twice, true);
        let mut image = put_gradients(&device, &mut gradients);
        for grad in &gradients {
            let given = DeviceGrad { address: image.address(grad.at), len: grad.len, dtype: grad.dtype };
            device.unscale(&given, scale, Stream::Down).unwrap();
        }
        image.download(&device, Stream::Down);
        for grad in &mut gradients {
            let mut unscaled = vec![0.0; grad.len];
            kernel::unscale(Isa::current().unwrap(), grad.slice(), scale, &mut unscaled);
            let mut expected = Gradient::new(grad.dtype, &unscaled);
            let bytes = grad.bytes();
            bytes_of(&mut grad.plane, bytes).copy_from_slice(&image.host.bytes()[grad.at..grad.at + bytes]);
            let (len, dtype) = (grad.len, grad.dtype);
            for i in 0..len {
                // A NaN of 16 bits has one pattern.
                let (same, a, b) = if dtype == GradDType::F32 {
                    let (a, b) = (expected.plane.slice::<f32>(len)[i], grad.plane.slice::<f32>(len)[i]);
                    (a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), a.to_bits(), b.to_bits())
                } else {
                    let (a, b) = (expected.plane.slice::<u16>(len)[i], grad.plane.slice::<u16>(len)[i]);
                    (a == b, u32::from(a), u32::from(b))
                };
                assert!(same, "{dtype:?} / {scale}, [{i}] of {len}: {a:08x} on the host and {b:08x} on the device");
            }
        }
    }
}
