//! One parameter's tensors as a step borrows them, dtype known at run time, and how they split into chunks.

use crate::kernel::GradSlice;
use crate::memory::{Element, StridedMut, StridedRef};
use half::{bf16, f16};

/// Splits into the first `n` elements and the rest.
pub(super) trait Split: Sized {
    fn split_at(self, n: usize) -> (Self, Self);
}

impl<T> Split for &mut [T] {
    fn split_at(self, n: usize) -> (Self, Self) {
        self.split_at_mut(n)
    }
}

impl<S: Split> Split for Option<S> {
    fn split_at(self, n: usize) -> (Self, Self) {
        self.map_or((None, None), |all| {
            let (head, tail) = all.split_at(n);
            (Some(head), Some(tail))
        })
    }
}

/// Splits whichever variant it is.
macro_rules! split_by_dtype {
    ($view:expr, $n:expr) => {
        match $view {
            Self::F32(view) => {
                let (head, tail) = view.split_at($n);
                (Self::F32(head), Self::F32(tail))
            }
            Self::Bf16(view) => {
                let (head, tail) = view.split_at($n);
                (Self::Bf16(head), Self::Bf16(tail))
            }
            Self::F16(view) => {
                let (head, tail) = view.split_at($n);
                (Self::F16(head), Self::F16(tail))
            }
        }
    };
}

/// A weight, to update in place.
#[derive(Debug)]
pub enum WeightView<'a> {
    /// fp32.
    F32(StridedMut<'a, f32>),
    /// bf16.
    Bf16(StridedMut<'a, bf16>),
    /// fp16.
    F16(StridedMut<'a, f16>),
}

impl WeightView<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(view) => view.view().len(),
            Self::Bf16(view) => view.view().len(),
            Self::F16(view) => view.view().len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Split for WeightView<'_> {
    fn split_at(self, n: usize) -> (Self, Self) {
        split_by_dtype!(self, n)
    }
}

/// A gradient's elements: only to read, or also to write the unscaled gradient back to.
#[derive(Debug)]
pub enum GradElements<'a, T> {
    /// Only to read.
    Shared(StridedRef<'a, T>),
    /// To read and write.
    Exclusive(StridedMut<'a, T>),
}

impl<T: Element> GradElements<'_, T> {
    /// The elements, to read.
    pub fn view(&self) -> &StridedRef<'_, T> {
        match self {
            Self::Shared(view) => view,
            Self::Exclusive(view) => view.view(),
        }
    }

    fn write(&mut self, at: usize, values: &[f32], convert: impl Fn(f32) -> T) {
        if let Self::Exclusive(view) = self {
            let converted: Vec<T> = values.iter().map(|&value| convert(value)).collect();
            view.scatter(at, &converted);
        }
    }

    fn split_at(self, n: usize) -> (Self, Self) {
        match self {
            Self::Shared(view) => {
                let (head, tail) = view.split_at(n);
                (Self::Shared(head), Self::Shared(tail))
            }
            Self::Exclusive(view) => {
                let (head, tail) = view.split_at(n);
                (Self::Exclusive(head), Self::Exclusive(tail))
            }
        }
    }
}

/// A gradient; its dtype need not be the weight's.
#[derive(Debug)]
pub enum GradView<'a> {
    /// fp32.
    F32(GradElements<'a, f32>),
    /// bf16.
    Bf16(GradElements<'a, bf16>),
    /// fp16.
    F16(GradElements<'a, f16>),
}

/// Calls a generic closure-like expression for the view's dtype, with the matching `GradSlice` constructor.
macro_rules! with_grad {
    ($grad:expr, |$view:ident, $slice:ident, $zero:ident| $body:expr) => {
        match $grad {
            GradView::F32($view) => {
                let ($slice, $zero) = (GradSlice::F32, 0.0_f32);
                $body
            }
            GradView::Bf16($view) => {
                let ($slice, $zero) = (GradSlice::Bf16, bf16::ZERO);
                $body
            }
            GradView::F16($view) => {
                let ($slice, $zero) = (GradSlice::F16, f16::ZERO);
                $body
            }
        }
    };
}

impl GradView<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        with_grad!(self, |view, _slice, _zero| view.view().len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The gradient as it lies, if it lies in the order of the state.
    pub(super) fn as_slice(&self) -> Option<GradSlice<'_>> {
        with_grad!(self, |view, slice, _zero| view.view().as_slice().map(slice))
    }

    /// Hands `len` elements from position `at` on (in the order of the state) to `use_them`, gathered if need be.
    pub(super) fn with_block<const BLOCK: usize, R>(
        &self,
        at: usize,
        len: usize,
        use_them: impl FnOnce(GradSlice<'_>) -> R,
    ) -> R {
        with_grad!(self, |grad, slice, zero| if let Some(all) = grad.view().as_slice() {
            use_them(slice(&all[at..at + len]))
        } else {
            let mut buffer = [zero; BLOCK];
            grad.view().gather(at, &mut buffer[..len]);
            use_them(slice(&buffer[..len]))
        })
    }

    /// As `with_block`, by logical index.
    pub(super) fn with_logical_block<const BLOCK: usize, R>(
        &self,
        at: usize,
        len: usize,
        use_them: impl FnOnce(GradSlice<'_>) -> R,
    ) -> R {
        with_grad!(self, |grad, slice, zero| if let Some(all) = grad.view().as_logical_slice() {
            use_them(slice(&all[at..at + len]))
        } else {
            let mut buffer = [zero; BLOCK];
            grad.view().gather_logical(at, &mut buffer[..len]);
            use_them(slice(&buffer[..len]))
        })
    }

    /// Writes fp32 values back, rounded to the gradient's dtype; does nothing to a gradient that is only to be read.
    pub(super) fn write_back(&mut self, at: usize, values: &[f32]) {
        match self {
            Self::F32(view) => view.write(at, values, |value| value),
            Self::Bf16(view) => view.write(at, values, |value| bf16::from_bits(crate::kernel::f32_to_bf16(value))),
            Self::F16(view) => view.write(at, values, |value| f16::from_bits(crate::kernel::f32_to_f16(value))),
        }
    }
}

impl Split for GradView<'_> {
    fn split_at(self, n: usize) -> (Self, Self) {
        split_by_dtype!(self, n)
    }
}

impl<'a> From<&'a mut [f32]> for WeightView<'a> {
    fn from(values: &'a mut [f32]) -> Self {
        Self::F32(values.into())
    }
}

impl<'a> From<&'a mut [bf16]> for WeightView<'a> {
    fn from(values: &'a mut [bf16]) -> Self {
        Self::Bf16(values.into())
    }
}

impl<'a> From<&'a mut [f16]> for WeightView<'a> {
    fn from(values: &'a mut [f16]) -> Self {
        Self::F16(values.into())
    }
}

impl<'a> From<&'a [f32]> for GradView<'a> {
    fn from(values: &'a [f32]) -> Self {
        Self::F32(GradElements::Shared(values.into()))
    }
}

impl<'a> From<&'a [bf16]> for GradView<'a> {
    fn from(values: &'a [bf16]) -> Self {
        Self::Bf16(GradElements::Shared(values.into()))
    }
}

impl<'a> From<&'a [f16]> for GradView<'a> {
    fn from(values: &'a [f16]) -> Self {
        Self::F16(GradElements::Shared(values.into()))
    }
}
