//! One parameter's update (a part) and the runs that lanes take of it (chunks).

use crate::device::{DeviceGrad, DeviceUpdate};
use crate::kernel::{Constants, GradDType, MomentDType, Noise, WeightKind};
use crate::memory::{DeviceSpan, HostSpan};
use std::sync::Arc;

/// One parameter's state, or a run of it.
#[derive(Debug)]
pub struct Planes<S> {
    /// First moments.
    pub exp_avg: S,
    /// Second moments.
    pub exp_avg_sq: S,
    /// Maxima of the second moments (amsgrad), if they are used.
    pub max_exp_avg_sq: Option<S>,
    /// Residuals or masters, if the weight has any.
    pub kept: Option<S>,
}

impl Planes<HostSpan> {
    /// Whether a device can copy all of them by itself: maxima that come later lie in another slab.
    pub(super) fn are_pinned(&self) -> bool {
        let optional = [&self.max_exp_avg_sq, &self.kept];
        self.exp_avg.is_pinned()
            && self.exp_avg_sq.is_pinned()
            && optional.into_iter().flatten().all(HostSpan::is_pinned)
    }
}

/// Where a parameter's state is.
#[derive(Debug)]
pub enum Home {
    /// In host memory.
    Host(Planes<HostSpan>),
    /// On the device.
    Device(Planes<DeviceSpan>),
}

/// Where a gradient is.
#[derive(Debug)]
pub enum Gradient {
    /// On the device.
    Device(DeviceSpan),
    /// In host memory, where it has been offloaded.
    Host(HostSpan),
}

impl Gradient {
    /// Its address, as the device knows it.
    pub(super) fn address(&self) -> usize {
        match self {
            Self::Device(span) => span.address(),
            Self::Host(span) => span.address(),
        }
    }

    pub(super) fn device_bytes(&self) -> usize {
        match self {
            Self::Device(span) => span.len(),
            Self::Host(_) => 0,
        }
    }

    pub(super) fn split_front(&mut self, bytes: usize) -> Self {
        match self {
            Self::Device(span) => Self::Device(span.split_front(bytes)),
            Self::Host(span) => Self::Host(span.split_front(bytes)),
        }
    }
}

/// What becomes of a gradient that leaves the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sum {
    /// It is kept in its own dtype.
    Keep,
    /// It is the first of a sum in fp32.
    Set,
    /// It is added to a sum in fp32.
    Add,
}

/// A gradient to bring to host memory.
#[derive(Debug)]
pub struct Offload {
    /// The parameter's slot.
    pub slot: usize,
    /// Its name, for messages.
    pub name: Arc<str>,
    /// The gradient's dtype.
    pub grad_dtype: GradDType,
    /// Number of elements.
    pub len: usize,
    /// The gradient, contiguous in the order of the state.
    pub grad: DeviceSpan,
    /// Where to: elements of its dtype ([`Sum::Keep`]) or of fp32.
    pub to: HostSpan,
    /// What becomes of it.
    pub sum: Sum,
}

impl Offload {
    /// Cuts off the first `len` elements.
    pub(super) fn split_front(&mut self, len: usize) -> Self {
        let bytes = len * self.grad_dtype.bytes();
        let to = if self.sum == Sum::Keep { bytes } else { len * 4 };
        self.len -= len;
        let (grad, to) = (self.grad.split_front(bytes), self.to.split_front(to));
        Self { name: Arc::clone(&self.name), len, grad, to, ..*self }
    }
}

/// What an update of a parameter needs beside its memory.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The parameter's slot in its optimizer.
    pub slot: usize,
    /// Its name, for messages.
    pub name: Arc<str>,
    /// Dtype and master of the weight.
    pub weight_kind: WeightKind,
    /// Dtype of the gradient.
    pub grad_dtype: GradDType,
    /// Dtype of the moments.
    pub moments: MomentDType,
    /// Its group's constants at this step, with the clip factor.
    pub constants: Constants,
    /// The random bits of bf16 moments.
    pub noise: Noise,
    /// Gradients are divided by it first.
    pub grad_scale: Option<f32>,
}

impl Recipe {
    /// Bytes of state per element, and whether there are maxima.
    pub(super) fn state_bytes(&self, amsgrad: bool) -> usize {
        self.moments.bytes() * (2 + usize::from(amsgrad)) + self.weight_kind.kept_bytes()
    }

    /// Its slot, its gradient and the scale to divide that by where it is, once it has been used.
    pub(super) fn unscaled(&self, grad: &Gradient, len: usize, in_place: bool) -> Option<(usize, DeviceGrad, f32)> {
        let grad = DeviceGrad { address: grad.address(), len, dtype: self.grad_dtype };
        self.grad_scale.filter(|_| in_place).map(|scale| (self.slot, grad, scale))
    }

    /// What decides which compiled kernel runs: a bundle has one.
    pub(super) fn kernel(&self) -> (WeightKind, GradDType, MomentDType) {
        (self.weight_kind, self.grad_dtype, self.moments)
    }
}

/// One parameter's update.
#[derive(Debug)]
pub struct Part {
    /// What to do.
    pub recipe: Recipe,
    /// Number of elements.
    pub len: usize,
    /// The live weights.
    pub weight: DeviceSpan,
    /// The gradients, contiguous in the order of the state.
    pub grad: Gradient,
    /// The state.
    pub home: Home,
}

/// A run of a parameter whose state is in host memory: what a lane takes at once.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) recipe: Recipe,
    /// The parameter's index of its first element.
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) weight: DeviceSpan,
    pub(super) grad: Gradient,
    pub(super) planes: Planes<HostSpan>,
}

impl Chunk {
    pub(super) fn state_bytes(&self) -> usize {
        self.len * self.recipe.state_bytes(self.planes.max_exp_avg_sq.is_some())
    }

    /// Bytes that the CPU lane moves down: the weight and, unless it is there, the gradient.
    pub(super) fn live_bytes(&self) -> usize {
        self.weight.len() + self.grad.device_bytes()
    }

    /// Cuts off the first `len` elements.
    pub(super) fn split_front(&mut self, len: usize) -> Self {
        let Recipe { weight_kind, grad_dtype, moments, .. } = self.recipe;
        let Planes { exp_avg, exp_avg_sq, max_exp_avg_sq, kept } = &mut self.planes;
        let moment = len * moments.bytes();
        let planes = Planes {
            exp_avg: exp_avg.split_front(moment),
            exp_avg_sq: exp_avg_sq.split_front(moment),
            max_exp_avg_sq: max_exp_avg_sq.as_mut().map(|plane| plane.split_front(moment)),
            kept: kept.as_mut().map(|plane| plane.split_front(len * weight_kind.kept_bytes())),
        };
        let front = Self {
            recipe: self.recipe.clone(),
            first: self.first,
            len,
            weight: self.weight.split_front(len * weight_kind.live_bytes()),
            grad: self.grad.split_front(len * grad_dtype.bytes()),
            planes,
        };
        self.first += len;
        self.len -= len;
        front
    }

    /// The update of this run with its state at other addresses.
    pub(super) fn update(&self, exp_avg: usize, exp_avg_sq: usize, max: usize, kept: usize) -> DeviceUpdate<'_> {
        let Self { recipe, first, len, weight, grad, .. } = self;
        update(recipe, *first, *len, weight.address(), grad.address(), [exp_avg, exp_avg_sq, max, kept])
    }

    /// The update of this run with its state where it is, for a device that can address it.
    pub(super) fn update_in_place(&self) -> DeviceUpdate<'_> {
        let Planes { exp_avg, exp_avg_sq, max_exp_avg_sq, kept } = &self.planes;
        let at = |plane: &Option<HostSpan>| plane.as_ref().map_or(0, HostSpan::address);
        self.update(exp_avg.address(), exp_avg_sq.address(), at(max_exp_avg_sq), at(kept))
    }
}

pub(super) fn update(
    recipe: &Recipe,
    first: usize,
    len: usize,
    weight: usize,
    grad: usize,
    [exp_avg, exp_avg_sq, max_exp_avg_sq, kept]: [usize; 4],
) -> DeviceUpdate<'_> {
    DeviceUpdate {
        parameter: &recipe.name,
        weight_kind: recipe.weight_kind,
        grad_dtype: recipe.grad_dtype,
        moments: recipe.moments,
        weight,
        kept,
        grad,
        exp_avg,
        exp_avg_sq,
        max_exp_avg_sq,
        len,
        first: first as u64,
        constants: recipe.constants,
        noise: recipe.noise,
        grad_scale: recipe.grad_scale,
    }
}
