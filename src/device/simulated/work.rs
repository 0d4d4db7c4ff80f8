//! What operations do to memory, when they run. The addresses are those that the device was given: the contracts of
//! [`DeviceUpdate`], [`DeviceCopy`](crate::device::DeviceCopy), [`DeviceGrad`] and the spans make them good to use until
//! the work is done, and keep everybody else away.

use super::hazards::Access;
use crate::device::{DeviceGrad, DeviceUpdate, TABLE_ENTRY_BYTES};
use crate::kernel::{
    self, DefaultFloatEnvironment, GradDType, GradSlice, Isa, MomentDType, MomentSlices, NORM_BLOCK, WeightKind,
    WeightSlices,
};
use crate::memory::Element;
use half::{bf16, f16};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

/// Elements unscaled at a time.
const STAGED: usize = 1024;

/// The noise changes its key at multiples of this.
const NOISE_SPAN: u64 = 1 << 32;

/// The stamp's entries are all different, and differ from those of other operations.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// Copies bytes.
pub(super) fn copy(to: usize, from: usize, bytes: usize) {
    if bytes > 0 {
        // SAFETY: both runs are good for `bytes` bytes until the copy is done, by the contract of the spans or of
        // `DeviceCopy`; `copy` minds no overlap.
        unsafe { std::ptr::copy(with_exposed_provenance::<u8>(from), with_exposed_provenance_mut::<u8>(to), bytes) };
    }
}

/// Elements `at..at + len` of a plane.
///
/// # Safety
/// As for `DeviceUpdate`: the plane is good, aligned and nobody else's for as long as the slice is used.
unsafe fn elements<'a, T: Element>(plane: usize, at: usize, len: usize) -> &'a mut [T] {
    // SAFETY: the caller vouches for the plane, which holds `at + len` elements; any bytes are a valid `T`.
    unsafe { std::slice::from_raw_parts_mut(with_exposed_provenance_mut::<T>(plane).add(at), len) }
}

/// Elements `at..at + len` of a gradient.
///
/// # Safety
/// As for [`elements`], but that others may read it.
unsafe fn gradient<'a>(dtype: GradDType, plane: usize, at: usize, len: usize) -> GradSlice<'a> {
    /// # Safety
    /// As for `gradient`.
    unsafe fn slice<'a, T: Element>(plane: usize, at: usize, len: usize) -> &'a [T] {
        // SAFETY: as in `elements`.
        unsafe { std::slice::from_raw_parts(with_exposed_provenance::<T>(plane).add(at), len) }
    }
    // SAFETY: the caller vouches for the plane.
    unsafe {
        match dtype {
            GradDType::F32 => GradSlice::F32(slice(plane, at, len)),
            GradDType::Bf16 => GradSlice::Bf16(slice(plane, at, len)),
            GradDType::F16 => GradSlice::F16(slice(plane, at, len)),
        }
    }
}

/// The planes that an update has: name, address, bytes of an element, whether it is written.
fn planes(update: &DeviceUpdate<'_>) -> impl Iterator<Item = (&'static str, usize, usize, bool)> {
    let moment = update.moments.bytes();
    let max = if update.max_exp_avg_sq == 0 { 0 } else { moment };
    [
        ("weight", update.weight, update.weight_kind.live_bytes(), true),
        ("kept", update.kept, update.weight_kind.kept_bytes(), true),
        ("grad", update.grad, update.grad_dtype.bytes(), false),
        ("exp_avg", update.exp_avg, moment, true),
        ("exp_avg_sq", update.exp_avg_sq, moment, true),
        ("max_exp_avg_sq", update.max_exp_avg_sq, max, true),
    ]
    .into_iter()
    .filter(|&(_, _, bytes, _)| bytes > 0)
}

/// What is wrong with an update's addresses, if anything is.
pub(super) fn problem_of(update: &DeviceUpdate<'_>) -> Option<String> {
    let (plane, address, ..) = planes(update)
        .find(|&(_, address, bytes, _)| update.len > 0 && (address == 0 || !address.is_multiple_of(bytes)))?;
    Some(format!("{plane} of {} at {address:#x}", update.parameter))
}

/// What an update touches.
pub(super) fn accesses_of(update: &DeviceUpdate<'_>) -> impl Iterator<Item = Access> {
    let len = update.len;
    planes(update).map(move |(_, address, bytes, write)| Access::new(address, len.saturating_mul(bytes), write))
}

/// The update without its name, which is borrowed.
pub(super) fn nameless(update: &DeviceUpdate<'_>) -> DeviceUpdate<'static> {
    let DeviceUpdate { weight_kind, grad_dtype, moments, weight, kept, grad, exp_avg, exp_avg_sq, .. } = *update;
    let DeviceUpdate { max_exp_avg_sq, len, first, constants, noise, grad_scale, .. } = *update;
    DeviceUpdate {
        parameter: "",
        weight_kind,
        grad_dtype,
        moments,
        weight,
        kept,
        grad,
        exp_avg,
        exp_avg_sq,
        max_exp_avg_sq,
        len,
        first,
        constants,
        noise,
        grad_scale,
    }
}

/// Updates one run with the host's loops.
pub(super) fn update(isa: Isa, update: &DeviceUpdate<'_>) {
    let _environment = DefaultFloatEnvironment::enter();
    let longest = if update.grad_scale.is_some() { STAGED } else { usize::MAX };
    let mut at = 0;
    while at < update.len {
        let first = update.first + at as u64;
        let to_border = usize::try_from(NOISE_SPAN - first % NOISE_SPAN).unwrap_or(usize::MAX);
        let len = (update.len - at).min(longest).min(to_border);
        // SAFETY: `DeviceUpdate`'s contract: planes of `update.len` elements, aligned, which do not overlap and are
        // nobody else's until the work is done.
        let (weights, mut grad, moments) = unsafe {
            (weights(update, at, len), gradient(update.grad_dtype, update.grad, at, len), moments(update, at, len))
        };
        let mut unscaled = [0.0; STAGED];
        if let Some(scale) = update.grad_scale {
            kernel::unscale(isa, grad, scale, &mut unscaled[..len]);
            grad = GradSlice::F32(&unscaled[..len]);
        }
        kernel::update(isa, weights, grad, moments, &update.constants, update.noise, first);
        at += len;
    }
}

/// # Safety
/// As for [`elements`].
unsafe fn weights<'a>(update: &DeviceUpdate<'_>, at: usize, len: usize) -> WeightSlices<'a> {
    let DeviceUpdate { weight, kept, .. } = *update;
    // SAFETY: the caller vouches for the planes.
    unsafe {
        match update.weight_kind {
            WeightKind::F32 => WeightSlices::F32(elements(weight, at, len)),
            WeightKind::Bf16Split => WeightSlices::Bf16Split(elements(weight, at, len), elements(kept, at, len)),
            WeightKind::Bf16Full => WeightSlices::Bf16Full(elements(weight, at, len), elements(kept, at, len)),
            WeightKind::F16Full => WeightSlices::F16Full(elements(weight, at, len), elements(kept, at, len)),
        }
    }
}

/// # Safety
/// As for [`elements`].
unsafe fn moments<'a>(update: &DeviceUpdate<'_>, at: usize, len: usize) -> MomentSlices<'a> {
    let DeviceUpdate { exp_avg: m, exp_avg_sq: v, max_exp_avg_sq: max, .. } = *update;
    // SAFETY: the caller vouches for the planes.
    unsafe {
        match update.moments {
            MomentDType::F32 => {
                let max = (max != 0).then(|| elements(max, at, len));
                MomentSlices::F32(elements(m, at, len), elements(v, at, len), max)
            }
            MomentDType::Bf16 => {
                let max = (max != 0).then(|| elements(max, at, len));
                MomentSlices::Bf16(elements(m, at, len), elements(v, at, len), max)
            }
        }
    }
}

/// The number of blocks of the norm.
pub(super) fn blocks_of(grads: &[DeviceGrad]) -> usize {
    grads.iter().map(|grad| grad.len.div_ceil(NORM_BLOCK)).sum()
}

/// Writes the sums of squares of each gradient's blocks to `partials`.
pub(super) fn squares(isa: Isa, grads: &[DeviceGrad], scale: f32, partials: usize) {
    let _environment = DefaultFloatEnvironment::enter();
    let blocks = grads
        .iter()
        .flat_map(|grad| (0..grad.len).step_by(NORM_BLOCK).map(move |at| (grad, at, NORM_BLOCK.min(grad.len - at))));
    for (index, (grad, at, len)) in blocks.enumerate() {
        // SAFETY: `DeviceGrad`'s contract.
        let block = unsafe { gradient(grad.dtype, grad.address, at, len) };
        // SAFETY: the span's contract; it holds an f64 for each block.
        let partial = unsafe { elements::<f64>(partials, index, 1) };
        partial[0] = kernel::sum_of_squares(isa, block, scale);
    }
}

/// Divides a gradient in place.
pub(super) fn unscale(isa: Isa, grad: &DeviceGrad, scale: f32) {
    let _environment = DefaultFloatEnvironment::enter();
    for at in (0..grad.len).step_by(STAGED) {
        let len = STAGED.min(grad.len - at);
        let mut buffer = [0.0; STAGED];
        let unscaled = &mut buffer[..len];
        // SAFETY: `DeviceGrad`'s contract. The slice is gone before the gradient is written.
        kernel::unscale(isa, unsafe { gradient(grad.dtype, grad.address, at, len) }, scale, unscaled);
        // SAFETY: `DeviceGrad`'s contract.
        unsafe {
            match grad.dtype {
                GradDType::F32 => store(grad.address, at, unscaled, |x| x),
                GradDType::Bf16 => store(grad.address, at, unscaled, |x| bf16::from_bits(kernel::f32_to_bf16(x))),
                GradDType::F16 => store(grad.address, at, unscaled, |x| f16::from_bits(kernel::f32_to_f16(x))),
            }
        }
    }
}

/// Writes a gradient's elements from `at` on.
///
/// # Safety
/// As for [`elements`].
unsafe fn store<T: Element>(plane: usize, at: usize, values: &[f32], round: impl Fn(f32) -> T) {
    // SAFETY: the caller vouches for the plane.
    let out = unsafe { elements(plane, at, values.len()) };
    for (out, &value) in out.iter_mut().zip(values) {
        *out = round(value);
    }
}

/// What is written to a table, in each entry's place, to find out whether the table is left alone until it is done with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamp {
    table: usize,
    entries: usize,
    sequence: u64,
}

impl Stamp {
    /// Stamps the first entries of a table, which the caller holds.
    pub(super) fn write(table: &mut crate::memory::HostSpan, entries: usize, sequence: u64) -> Self {
        let stamp = Self { table: table.address(), entries, sequence };
        assert!(stamp.bytes() <= table.len(), "a table of {} bytes for {entries} entries", table.len());
        for (at, value) in stamp.values() {
            // SAFETY: inside the table, by the assertion, which is exclusively borrowed.
            unsafe { with_exposed_provenance_mut::<u64>(at).write_unaligned(value) };
        }
        stamp
    }

    /// Whether it is still there.
    pub(super) fn is_intact(&self) -> bool {
        // SAFETY: inside the table, which is to stay until the work is done.
        self.values().all(|(at, value)| unsafe { with_exposed_provenance::<u64>(at).read_unaligned() } == value)
    }

    /// The bytes of the table in use.
    pub(super) fn bytes(&self) -> usize {
        self.entries * TABLE_ENTRY_BYTES
    }

    fn values(&self) -> impl Iterator<Item = (usize, u64)> {
        let Self { table, entries, sequence } = *self;
        (0..entries).map(move |entry| {
            (table + entry * TABLE_ENTRY_BYTES, (sequence << 32 | entry as u64).wrapping_add(1).wrapping_mul(GOLDEN))
        })
    }
}
