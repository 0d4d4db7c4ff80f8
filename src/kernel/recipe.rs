//! The recipe: AdamW for one element, and the loop over a chunk. One generic body serves every dtype, and the dispatcher
//! compiles it once per ISA level; there are no intrinsics here and no `unsafe`.
//!
//! All arithmetic is fp32, correctly rounded, contracted nowhere but in the `fma`s that are written; this is the order
//! of operations of `torch.optim.AdamW(fused=True)` on CPU tensors, which it equals bit for bit.

use super::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_bf16_stochastic, f32_to_f16};
use super::fma::Fma;
use super::fpenv::DefaultFloatEnvironment;
use super::master::{decode_split, encode_split, follow_bf16, follow_f16};
use super::noise::{Noise, hash32};
use crate::error::{Error, Result};

/// One parameter group's settings, as the user gives them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Decay rates of the first and the second moment, each in [0, 1).
    pub betas: (f64, f64),
    /// Added to the root of the second moment, at least 0.
    pub eps: f64,
    /// Weight decay, at least 0.
    pub weight_decay: f64,
    /// Use the maximum of all second moments so far in the denominator.
    pub amsgrad: bool,
    /// Climb instead of descending.
    pub maximize: bool,
    /// `AdamW`: decay the weight by `1 - lr * weight_decay`. Otherwise `Adam`: add `weight_decay * weight` to the gradient.
    pub decoupled_weight_decay: bool,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 1e-2,
            amsgrad: false,
            maximize: false,
            decoupled_weight_decay: true,
        }
    }
}

impl AdamWConfig {
    /// The constants of step number `step` (1 for the first), with gradients multiplied by `clip` (1 leaves them).
    ///
    /// Formed in f64 and rounded to f32 once: rounding `1 - beta2` from an fp32 beta2 puts the second moment off by 1e-5.
    pub fn constants(&self, step: f64, clip: f32) -> Constants {
        // The caller may flush denormals to zero, which a tiny eps is in f32.
        let _environment = DefaultFloatEnvironment::enter();
        let Self { lr, betas: (beta1, beta2), eps, weight_decay, .. } = *self;
        let lerp_weight = (1.0 - beta1) as f32;
        // torch's lerp forms the result from whichever end is nearer.
        let from_gradient = lerp_weight.abs() >= 0.5;
        Constants {
            gradient_factor: if self.maximize { -clip } else { clip },
            lerp_factor: if from_gradient { lerp_weight - 1.0 } else { lerp_weight },
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            step_size: (lr / (1.0 - beta1.powf(step))) as f32,
            bias_correction2_sqrt: (1.0 - beta2.powf(step)).sqrt() as f32,
            eps: eps as f32,
            decay_factor: if self.decoupled_weight_decay { (1.0 - lr * weight_decay) as f32 } else { 1.0 },
            coupled_decay: if self.decoupled_weight_decay { 0.0 } else { weight_decay as f32 },
            lerp_from_gradient: u32::from(from_gradient),
        }
    }
}

/// What the loop needs of a group at one step. Crosses to the CUDA kernel as it is.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Constants {
    /// Multiplies the gradient: the clip factor, negated when maximising.
    pub gradient_factor: f32,
    /// `1 - beta1`, or that minus 1 where the lerp starts from the gradient.
    pub lerp_factor: f32,
    /// `beta2`.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// `lr / (1 - beta1^t)`.
    pub step_size: f32,
    /// `sqrt(1 - beta2^t)`.
    pub bias_correction2_sqrt: f32,
    /// `eps`.
    pub eps: f32,
    /// `1 - lr * weight_decay`, or 1.
    pub decay_factor: f32,
    /// Adam's weight decay; 0 skips it, since `fma(inf, 0, g)` would be NaN.
    pub coupled_decay: f32,
    /// 1 where the lerp starts from the gradient, else 0.
    pub lerp_from_gradient: u32,
}

/// A gradient element.
pub(crate) trait GradElement: Copy {
    fn load(self) -> f32;
}

impl GradElement for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }
}

impl GradElement for half::bf16 {
    #[inline(always)]
    fn load(self) -> f32 {
        bf16_to_f32(self.to_bits())
    }
}

impl GradElement for half::f16 {
    #[inline(always)]
    fn load(self) -> f32 {
        f16_to_f32(self.to_bits())
    }
}

/// A moment as it is stored. `noise` holds 16 random bits for those that round stochastically.
pub(crate) trait MomentElement: Copy {
    const STOCHASTIC: bool;
    fn load(self) -> f32;
    fn store(value: f32, noise: u32) -> Self;
    /// For the running maximum, which only takes over values that were stored before or exceed them: stochastic rounding
    /// would ratchet it upward.
    fn store_nearest(value: f32) -> Self;
}

impl MomentElement for f32 {
    const STOCHASTIC: bool = false;
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }
    #[inline(always)]
    fn store(value: f32, _noise: u32) -> Self {
        value
    }
    #[inline(always)]
    fn store_nearest(value: f32) -> Self {
        value
    }
}

impl MomentElement for half::bf16 {
    const STOCHASTIC: bool = true;
    #[inline(always)]
    fn load(self) -> f32 {
        bf16_to_f32(self.to_bits())
    }
    #[inline(always)]
    fn store(value: f32, noise: u32) -> Self {
        Self::from_bits(f32_to_bf16_stochastic(value, noise))
    }
    #[inline(always)]
    fn store_nearest(value: f32) -> Self {
        Self::from_bits(f32_to_bf16(value))
    }
}

/// How a weight and what the host keeps beside it make an fp32 value, and back.
pub(crate) trait WeightCodec {
    /// The live weight.
    type Live: Copy;
    /// What the host keeps: nothing (`()`, which takes no memory), a residual or a full master.
    type Kept: Copy;
    fn load(live: Self::Live, kept: Self::Kept) -> f32;
    fn store(value: f32) -> (Self::Live, Self::Kept);
}

pub(crate) struct Plain;
pub(crate) struct SplitBf16;
pub(crate) struct FullBf16;
pub(crate) struct FullF16;

impl WeightCodec for Plain {
    type Live = f32;
    type Kept = ();
    #[inline(always)]
    fn load(live: f32, (): ()) -> f32 {
        live
    }
    #[inline(always)]
    fn store(value: f32) -> (f32, ()) {
        (value, ())
    }
}

impl WeightCodec for SplitBf16 {
    type Live = half::bf16;
    type Kept = i16;
    #[inline(always)]
    fn load(live: half::bf16, residual: i16) -> f32 {
        decode_split(live.to_bits(), residual)
    }
    #[inline(always)]
    fn store(value: f32) -> (half::bf16, i16) {
        let (weight, residual) = encode_split(value);
        (half::bf16::from_bits(weight), residual)
    }
}

impl WeightCodec for FullBf16 {
    type Live = half::bf16;
    type Kept = f32;
    #[inline(always)]
    fn load(live: half::bf16, master: f32) -> f32 {
        follow_bf16(live.to_bits(), master)
    }
    #[inline(always)]
    fn store(value: f32) -> (half::bf16, f32) {
        (half::bf16::from_bits(f32_to_bf16(value)), value)
    }
}

impl WeightCodec for FullF16 {
    type Live = half::f16;
    type Kept = f32;
    #[inline(always)]
    fn load(live: half::f16, master: f32) -> f32 {
        follow_f16(live.to_bits(), master)
    }
    #[inline(always)]
    fn store(value: f32) -> (half::f16, f32) {
        (half::f16::from_bits(f32_to_f16(value)), value)
    }
}

/// Updates a chunk: `live`, `kept`, the moments and (if `AMSGRAD`) the maximum in place, from `grad`. All slices are of
/// one length, but `max_exp_avg_sq`, which is empty without `AMSGRAD`. `first` is the parameter's index of element 0.
///
/// Each slice is an argument of its own so that the compiler knows them disjoint: passed in a struct, they cost fifteen
/// run-time overlap checks or the vectorisation.
#[inline(always)]
pub(crate) fn update<F: Fma, W: WeightCodec, G: GradElement, M: MomentElement, const AMSGRAD: bool>(
    live: &mut [W::Live],
    kept: &mut [W::Kept],
    grad: &[G],
    exp_avg: &mut [M],
    exp_avg_sq: &mut [M],
    max_exp_avg_sq: &mut [M],
    c: &Constants,
    noise: Noise,
    first: u64,
) {
    let n = live.len();
    let (kept, grad) = (&mut kept[..n], &grad[..n]);
    let (exp_avg, exp_avg_sq) = (&mut exp_avg[..n], &mut exp_avg_sq[..n]);
    let max_exp_avg_sq = if AMSGRAD { &mut max_exp_avg_sq[..n] } else { max_exp_avg_sq };
    let c = *c;
    let from_gradient = c.lerp_from_gradient != 0;
    let coupled = c.coupled_decay != 0.0;
    let stream = if M::STOCHASTIC { noise.stream((first >> 32) as u32) } else { 0 };

    for i in 0..n {
        let mut p = W::load(live[i], kept[i]);
        let mut g = c.gradient_factor * grad[i].load();
        let with_decay = F::fma(p, c.coupled_decay, g);
        g = if coupled { with_decay } else { g };

        let m = exp_avg[i].load();
        let m = F::fma(c.lerp_factor, g - m, if from_gradient { g } else { m });
        let v = F::fma(c.one_minus_beta2 * g, g, c.beta2 * exp_avg_sq[i].load());
        let bits = if M::STOCHASTIC { hash32(stream, (first as u32).wrapping_add(i as u32)) } else { 0 };
        exp_avg[i] = M::store(m, bits & 0xFFFF);
        exp_avg_sq[i] = M::store(v, bits >> 16);

        let mut root = v;
        if AMSGRAD {
            let max = max_exp_avg_sq[i].load();
            // Not f32::max, which drops a NaN.
            root = if v > max || v.is_nan() { v } else { max };
            max_exp_avg_sq[i] = M::store_nearest(root);
        }
        let denominator = root.sqrt() / c.bias_correction2_sqrt + c.eps;
        p *= c.decay_factor;
        p -= (c.step_size * m) / denominator;
        (live[i], kept[i]) = W::store(p);
    }
}

impl AdamWConfig {
    /// Checks the ranges that torch checks.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] that says which value is out of range.
    pub fn validate(&self) -> Result<()> {
        let at_least_zero = |name: &str, value: f64| {
            if value >= 0.0 { Ok(()) } else { Err(Error::InvalidValue(format!("Invalid {name}: {value}"))) }
        };
        at_least_zero("learning rate", self.lr)?;
        at_least_zero("epsilon value", self.eps)?;
        at_least_zero("weight_decay value", self.weight_decay)?;
        for (index, beta) in [self.betas.0, self.betas.1].into_iter().enumerate() {
            if !(0.0..1.0).contains(&beta) {
                return Err(Error::InvalidValue(format!("Invalid beta parameter at index {index}: {beta}")));
            }
        }
        Ok(())
    }
}
