//! A chunk: a run of one parameter that one worker updates at once.

use super::slot::{KeptMut, PlanesMut};
use super::views::{GradView, Split, WeightView};
use crate::kernel::{self, Constants, DefaultFloatEnvironment, GradSlice, Isa, MomentSlices, Noise, WeightSlices};
use crate::memory::{Element, StridedMut};
use half::{bf16, f16};

/// Elements staged at a time where a tensor is not one run of memory, or the gradient is unscaled: they and what goes
/// with them stay in the first-level cache.
const STAGED: usize = 1024;

/// Parameters are never cut across a multiple of this many elements: the noise of stochastic rounding changes its key there.
const NOISE_SPAN: u64 = 1 << 32;

/// A run of elements with all that their update needs.
#[derive(Debug)]
pub(super) struct Chunk<'a> {
    /// Which update of the step it belongs to.
    pub(super) update: usize,
    /// Index of its first element in the parameter, in the order of the state.
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) weight: WeightView<'a>,
    pub(super) grad: GradView<'a>,
    pub(super) planes: PlanesMut<'a>,
    pub(super) constants: Constants,
    pub(super) noise: Noise,
}

/// How many elements the next chunk takes of a parameter of which `first` have been taken and `left` are left.
pub(super) fn next_len(first: usize, left: usize, chunk_elems: usize) -> usize {
    let to_border = NOISE_SPAN - first as u64 % NOISE_SPAN;
    left.min(chunk_elems).min(usize::try_from(to_border).unwrap_or(usize::MAX))
}

impl<'a> Chunk<'a> {
    /// Cuts a whole parameter into chunks of at most `chunk_elems` elements and hands each to `emit`.
    pub(super) fn cut(mut self, chunk_elems: usize, mut emit: impl FnMut(Chunk<'a>)) {
        loop {
            let len = next_len(self.first, self.len, chunk_elems);
            if len == self.len {
                return emit(self);
            }
            let (weight, weight_tail) = self.weight.split_at(len);
            let (grad, grad_tail) = self.grad.split_at(len);
            let (planes, planes_tail) = self.planes.split_at(len);
            let (constants, noise, update) = (self.constants, self.noise, self.update);
            emit(Chunk { update, first: self.first, len, weight, grad, planes, constants, noise });
            self = Chunk {
                update,
                first: self.first + len,
                len: self.len - len,
                weight: weight_tail,
                grad: grad_tail,
                planes: planes_tail,
                constants,
                noise,
            };
        }
    }

    /// Updates the chunk. With `scale`, gradients are divided by it first and written back unscaled where they may be.
    pub(super) fn run(mut self, isa: Isa, scale: Option<f32>) {
        let _environment = DefaultFloatEnvironment::enter();
        let in_place = self.weight.is_slice() && self.grad.as_slice().is_some() && scale.is_none();
        let block = if in_place { self.len } else { STAGED };
        let mut at = 0;
        while at < self.len {
            let len = block.min(self.len - at);
            let Self { first, weight, grad, planes: PlanesMut { moments, kept }, constants, noise, .. } = &mut self;
            let job = Job { isa, constants, noise: *noise, first: (*first + at) as u64 };
            let moments = moments.range(at, len);
            if let Some(scale) = scale {
                let mut unscaled = [0.0; STAGED];
                let unscaled = &mut unscaled[..len];
                grad.with_block::<STAGED, _>(at, len, |raw| kernel::unscale(isa, raw, scale, unscaled));
                grad.write_back(at, unscaled);
                job.update(weight, kept, at, GradSlice::F32(unscaled), moments);
            } else {
                grad.with_block::<STAGED, _>(at, len, |grad| job.update(weight, kept, at, grad, moments));
            }
            at += len;
        }
    }
}

impl WeightView<'_> {
    fn is_slice(&mut self) -> bool {
        match self {
            Self::F32(view) => view.as_mut_slice().is_some(),
            Self::Bf16(view) => view.as_mut_slice().is_some(),
            Self::F16(view) => view.as_mut_slice().is_some(),
        }
    }
}

/// What a kernel call needs beside its slices.
struct Job<'a> {
    isa: Isa,
    constants: &'a Constants,
    noise: Noise,
    first: u64,
}

impl Job<'_> {
    fn update(
        &self,
        weight: &mut WeightView<'_>,
        kept: &mut KeptMut<'_>,
        at: usize,
        grad: GradSlice<'_>,
        moments: MomentSlices<'_>,
    ) {
        let range = at..at + grad.len();
        let Self { isa, constants, noise, first } = *self;
        let update = |weights: WeightSlices<'_>| kernel::update(isa, weights, grad, moments, constants, noise, first);
        match (weight, kept) {
            (WeightView::F32(view), KeptMut::Nothing) => {
                staged(view, range, 0.0, |live| update(WeightSlices::F32(live)));
            }
            (WeightView::Bf16(view), KeptMut::Residual(plane)) => {
                let kept = &mut plane[range.clone()];
                staged(view, range, bf16::ZERO, |live| update(WeightSlices::Bf16Split(live, kept)));
            }
            (WeightView::Bf16(view), KeptMut::Master(plane)) => {
                let kept = &mut plane[range.clone()];
                staged(view, range, bf16::ZERO, |live| update(WeightSlices::Bf16Full(live, kept)));
            }
            (WeightView::F16(view), KeptMut::Master(plane)) => {
                let kept = &mut plane[range.clone()];
                staged(view, range, f16::ZERO, |live| update(WeightSlices::F16Full(live, kept)));
            }
            (weight, kept) => unreachable!("a {weight:?} with {kept:?}: `step` compares them first"),
        }
    }
}

/// Hands a range of a weight to `update`: as it lies, or gathered and scattered again.
fn staged<T: Element>(
    view: &mut StridedMut<'_, T>,
    range: std::ops::Range<usize>,
    zero: T,
    update: impl FnOnce(&mut [T]),
) {
    if let Some(all) = view.as_mut_slice() {
        return update(&mut all[range]);
    }
    let mut buffer = [zero; STAGED];
    let buffer = &mut buffer[..range.len()];
    view.view().gather(range.start, buffer);
    update(buffer);
    view.scatter(range.start, buffer);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters beyond 2^31 and 2^32 elements are cut to the last element, without having to exist.
    #[test]
    fn cuts_cover_parameters_of_any_size() {
        for numel in [0, 1, 4095, 4096, 4097, (1 << 31) + 5, (1 << 33) + 4097_usize] {
            for chunk_elems in [3 << 20, (1 << 22) - 1] {
                let (mut first, mut cuts) = (0, 0);
                while first < numel {
                    let len = next_len(first, numel - first, chunk_elems);
                    assert!(len > 0 && len <= chunk_elems);
                    assert_eq!(first as u64 / NOISE_SPAN, (first + len - 1) as u64 / NOISE_SPAN, "across the border");
                    first += len;
                    cuts += 1;
                }
                assert_eq!(first, numel);
                assert!(cuts <= numel.div_ceil(chunk_elems) + numel / (1 << 32));
            }
        }
    }
}
