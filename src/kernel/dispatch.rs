//! From dtypes and ISA levels known at run time to one compiled loop: with `unsafe` for the calls into `target_feature` functions and nothing else.

use super::fma::{HardwareFma, SoftwareFma};
use super::isa::Isa;
use super::noise::Noise;
use super::norm::{BLOCK, block_sum_of_squares};
use super::recipe::{self, Constants, FullBf16, FullF16, GradElement, MomentElement, Plain, SplitBf16, WeightCodec};
use half::{bf16, f16};

/// A run of weights with what the host keeps beside them.
pub(crate) enum WeightSlices<'a> {
    F32(&'a mut [f32]),
    Bf16Split(&'a mut [bf16], &'a mut [i16]),
    Bf16Full(&'a mut [bf16], &'a mut [f32]),
    F16Full(&'a mut [f16], &'a mut [f32]),
}

/// A run of gradients.
#[derive(Clone, Copy)]
pub(crate) enum GradSlice<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

/// A run of both moments; the maximum is there with amsgrad only.
pub(crate) enum MomentSlices<'a> {
    F32(&'a mut [f32], &'a mut [f32], Option<&'a mut [f32]>),
    Bf16(&'a mut [bf16], &'a mut [bf16], Option<&'a mut [bf16]>),
}

/// Widens gradients to fp32 and divides them by `scale` (1 only widens).
#[inline(always)]
fn unscale_body<G: GradElement>(grad: &[G], scale: f32, out: &mut [f32]) {
    for (out, g) in out.iter_mut().zip(grad) {
        *out = g.load() / scale;
    }
}

/// The benchmark's yardstick: what AdamW moves for an fp32 weight (read four arrays, write three), with no arithmetic to
/// speak of.
#[inline(always)]
fn stream_body(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32]) {
    let n = p.len();
    let (m, v, g) = (&mut m[..n], &mut v[..n], &g[..n]);
    for i in 0..n {
        let x = g[i];
        p[i] += x;
        m[i] += x;
        v[i] += x;
    }
}

/// The loops, compiled for one ISA level.
macro_rules! level {
    ($module:ident, $fma:ty $(, #[$attribute:meta])?) => {
        mod $module {
            use super::*;

            $(#[$attribute])?
            pub(super) fn update<W: WeightCodec, G: GradElement, M: MomentElement, const AMSGRAD: bool>(
                live: &mut [W::Live], kept: &mut [W::Kept], grad: &[G],
                exp_avg: &mut [M], exp_avg_sq: &mut [M], max_exp_avg_sq: &mut [M],
                constants: &Constants, noise: Noise, first: u64,
            ) {
                recipe::update::<$fma, W, G, M, AMSGRAD>(
                    live, kept, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, constants, noise, first,
                );
            }

            $(#[$attribute])?
            pub(super) fn sum_of_squares<G: GradElement>(block: &[G], scale: f32) -> f64 {
                block_sum_of_squares(block, scale)
            }

            $(#[$attribute])?
            pub(super) fn unscale<G: GradElement>(grad: &[G], scale: f32, out: &mut [f32]) {
                unscale_body(grad, scale, out);
            }

            $(#[$attribute])?
            pub(super) fn stream(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32]) {
                stream_body(p, m, v, g);
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
level!(avx512, HardwareFma, #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]);
#[cfg(target_arch = "x86_64")]
level!(avx2, HardwareFma, #[target_feature(enable = "avx2,fma")]);
#[cfg(target_arch = "aarch64")]
level!(neon, HardwareFma, #[target_feature(enable = "neon")]);
level!(portable, SoftwareFma);

/// Calls one of the loops at a level. A level that this machine lacks runs the portable loop: same bits, no illegal
/// instruction.
macro_rules! at_level {
    ($isa:expr, $($call:tt)+) => {
        match $isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the guard has just detected every feature that `avx512`'s functions enable.
            Isa::Avx512 if Isa::Avx512.is_available() => unsafe { avx512::$($call)+ },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the guard has just detected every feature that `avx2`'s functions enable.
            Isa::Avx2 if Isa::Avx2.is_available() => unsafe { avx2::$($call)+ },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: NEON is part of the aarch64 baseline that this crate is compiled for.
            Isa::Neon => unsafe { neon::$($call)+ },
            _ => portable::$($call)+,
        }
    };
}

/// Updates a run of elements whose first has index `first` in its parameter.
///
/// # Panics
/// If the slices differ in length, or the run crosses a multiple of 2^32 elements.
pub(crate) fn update(
    isa: Isa,
    weights: WeightSlices<'_>,
    grad: GradSlice<'_>,
    moments: MomentSlices<'_>,
    constants: &Constants,
    noise: Noise,
    first: u64,
) {
    let call = Call { isa, constants, noise, first };
    match weights {
        WeightSlices::F32(live) => {
            let units = &mut vec![(); live.len()]; // () takes no memory
            call.with_weights::<Plain>(live, units, grad, moments);
        }
        WeightSlices::Bf16Split(live, residual) => call.with_weights::<SplitBf16>(live, residual, grad, moments),
        WeightSlices::Bf16Full(live, master) => call.with_weights::<FullBf16>(live, master, grad, moments),
        WeightSlices::F16Full(live, master) => call.with_weights::<FullF16>(live, master, grad, moments),
    }
}

/// The arguments that every dtype passes on.
struct Call<'a> {
    isa: Isa,
    constants: &'a Constants,
    noise: Noise,
    first: u64,
}

impl Call<'_> {
    fn with_weights<W: WeightCodec>(
        self,
        live: &mut [W::Live],
        kept: &mut [W::Kept],
        grad: GradSlice<'_>,
        moments: MomentSlices<'_>,
    ) {
        match grad {
            GradSlice::F32(grad) => self.with_grad::<W, _>(live, kept, grad, moments),
            GradSlice::Bf16(grad) => self.with_grad::<W, _>(live, kept, grad, moments),
            GradSlice::F16(grad) => self.with_grad::<W, _>(live, kept, grad, moments),
        }
    }

    fn with_grad<W: WeightCodec, G: GradElement>(
        self,
        live: &mut [W::Live],
        kept: &mut [W::Kept],
        grad: &[G],
        moments: MomentSlices<'_>,
    ) {
        match moments {
            MomentSlices::F32(m, v, max) => self.run::<W, G, _>(live, kept, grad, m, v, max),
            MomentSlices::Bf16(m, v, max) => self.run::<W, G, _>(live, kept, grad, m, v, max),
        }
    }

    fn run<W: WeightCodec, G: GradElement, M: MomentElement>(
        self,
        live: &mut [W::Live],
        kept: &mut [W::Kept],
        grad: &[G],
        m: &mut [M],
        v: &mut [M],
        max: Option<&mut [M]>,
    ) {
        let Self { isa, constants, noise, first } = self;
        let n = live.len();
        let lengths = [kept.len(), grad.len(), m.len(), v.len(), max.as_ref().map_or(n, |max| max.len())];
        assert!(lengths.iter().all(|&len| len == n), "planes of {n} and {lengths:?} elements");
        assert!(n == 0 || first >> 32 == (first + n as u64 - 1) >> 32, "a run across 2^32 elements");
        match max {
            None => at_level!(isa, update::<W, G, M, false>(live, kept, grad, m, v, &mut [], constants, noise, first)),
            Some(max) => at_level!(isa, update::<W, G, M, true>(live, kept, grad, m, v, max, constants, noise, first)),
        }
    }
}

/// The sum of squares of one block of at most [`BLOCK`] gradient elements, divided by `scale` first (1 leaves them).
pub(crate) fn sum_of_squares(isa: Isa, block: GradSlice<'_>, scale: f32) -> f64 {
    debug_assert!(block.len() <= BLOCK);
    match block {
        GradSlice::F32(block) => at_level!(isa, sum_of_squares(block, scale)),
        GradSlice::Bf16(block) => at_level!(isa, sum_of_squares(block, scale)),
        GradSlice::F16(block) => at_level!(isa, sum_of_squares(block, scale)),
    }
}

/// Widens gradients to fp32 and divides them by `scale` (1 only widens); `out` has their length.
pub(crate) fn unscale(isa: Isa, grad: GradSlice<'_>, scale: f32, out: &mut [f32]) {
    debug_assert_eq!(grad.len(), out.len());
    match grad {
        GradSlice::F32(grad) => at_level!(isa, unscale(grad, scale, out)),
        GradSlice::Bf16(grad) => at_level!(isa, unscale(grad, scale, out)),
        GradSlice::F16(grad) => at_level!(isa, unscale(grad, scale, out)),
    }
}

/// Widens gradients to fp32 and stores them in `sum`, or adds them to it; `sum` has their length.
pub(crate) fn accumulate(isa: Isa, grad: GradSlice<'_>, add: bool, sum: &mut [f32]) {
    const BLOCK: usize = 1024;
    let _environment = super::DefaultFloatEnvironment::enter();
    debug_assert_eq!(grad.len(), sum.len());
    let mut at = 0;
    for sum in sum.chunks_mut(BLOCK) {
        let range = at..at + sum.len();
        at = range.end;
        let grad = match grad {
            GradSlice::F32(grad) => GradSlice::F32(&grad[range]),
            GradSlice::Bf16(grad) => GradSlice::Bf16(&grad[range]),
            GradSlice::F16(grad) => GradSlice::F16(&grad[range]),
        };
        if add {
            let mut wide = [0.0; BLOCK];
            let wide = &mut wide[..sum.len()];
            unscale(isa, grad, 1.0, wide);
            sum.iter_mut().zip(wide).for_each(|(sum, g)| *sum += *g);
        } else {
            unscale(isa, grad, 1.0, sum);
        }
    }
}

/// One pass of the benchmarks' stream loop, the yardstick of memory: adds `g` to `p`, `m` and `v`, four arrays of one length.
///
/// # Panics
/// If `m`, `v` or `g` is shorter than `p`.
pub fn stream(isa: Isa, p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32]) {
    at_level!(isa, stream(p, m, v, g));
}

impl GradSlice<'_> {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F32(grad) => grad.len(),
            Self::Bf16(grad) => grad.len(),
            Self::F16(grad) => grad.len(),
        }
    }
}
