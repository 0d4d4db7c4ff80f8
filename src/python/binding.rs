//! What is remembered of a parameter between steps, and what is read of it for one.

use super::tensor::{DType, Hold, Holds, Place, RawTensor, Shape, TensorReader};
use crate::kernel::AdamWConfig;
use crate::memory::{Layout, Plane, Walks};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// What is remembered of a parameter between steps.
pub(super) struct Binding {
    /// The parameter itself: kept alive, so that its address names it.
    pub(super) parameter: Py<PyAny>,
    /// Address of its elements when it was last read, and where that is.
    pub(super) data: usize,
    pub(super) place: Place,
    pub(super) layout: Layout,
    pub(super) walks: Walks,
    /// Whether the layout could be that of a view that negates on reading: a part of complex numbers, two elements apart.
    pub(super) may_be_negated: bool,
    /// The layout and walks of its latest gradient, if they are not the parameter's own.
    pub(super) grad: Option<(Layout, Walks)>,
    /// Its planes, where they are tensors on the device.
    pub(super) resident: Option<Resident>,
    /// Its gradient in host memory, where gradients are offloaded.
    pub(super) offloaded: Option<Offloaded>,
}

/// A gradient in pinned host memory, in the order of the state.
pub(super) struct Offloaded {
    pub(super) plane: Plane<u8>,
    pub(super) dtype: DType,
    /// How many have been added up.
    pub(super) count: u32,
}

/// Planes on a device: their addresses (0 for those that are not there), and what keeps them.
pub(super) struct Resident {
    pub(super) exp_avg: usize,
    pub(super) exp_avg_sq: usize,
    pub(super) max_exp_avg_sq: usize,
    pub(super) kept: usize,
    _holds: Vec<Hold>,
}

impl Resident {
    /// Over tensors that Python has made for them: dense, of the parameter's strides, on its device.
    pub(super) fn new(reader: &TensorReader, planes: &Bound<'_, PyDict>) -> PyResult<Self> {
        let mut holds = Vec::new();
        let mut address = |names: &[&str]| -> PyResult<usize> {
            for name in names {
                if let Some(tensor) = planes.get_item(name)? {
                    holds.push(reader.hold(&tensor)?);
                    return tensor.call_method0(intern!(tensor.py(), "data_ptr"))?.extract();
                }
            }
            Ok(0)
        };
        let (exp_avg, exp_avg_sq) = (address(&["exp_avg"])?, address(&["exp_avg_sq"])?);
        let (max_exp_avg_sq, kept) = (address(&["max_exp_avg_sq"])?, address(&["residual", "master"])?);
        Ok(Self { exp_avg, exp_avg_sq, max_exp_avg_sq, kept, _holds: holds })
    }
}

impl Binding {
    pub(super) fn is_offloaded(&self) -> bool {
        self.offloaded.as_ref().is_some_and(|offloaded| offloaded.count > 0)
    }

    pub(super) fn new(parameter: &Bound<'_, PyAny>, weight: &RawTensor, layout: Layout, state: &Layout) -> Self {
        let parameter = parameter.clone().unbind();
        let (walks, empty) = (Walks::default(), Layout::default());
        let RawTensor { data, place, .. } = *weight;
        let mut binding = Self {
            parameter,
            data,
            place,
            layout: empty,
            walks,
            may_be_negated: true,
            grad: None,
            resident: None,
            offloaded: None,
        };
        binding.lay_out(layout, state);
        binding
    }

    /// Takes over a layout of the parameter, whose state has the layout `state`.
    pub(super) fn lay_out(&mut self, layout: Layout, state: &Layout) {
        self.walks = Walks::new(state, &layout);
        self.may_be_negated = layout.numel() == 1 || !layout.is_dense();
        self.layout = layout;
        self.grad = None;
    }

    /// The walks of a gradient of this shape.
    pub(super) fn grad_walks(&mut self, state: &Layout, shape: &Shape<'_>) -> Walks {
        if shape.is(&self.layout) {
            return self.walks.clone();
        }
        match &self.grad {
            Some((layout, walks)) if shape.is(layout) => walks.clone(),
            _ => {
                let layout = shape.layout();
                let walks = Walks::new(state, &layout);
                self.grad = Some((layout, walks.clone()));
                walks
            }
        }
    }

    /// The layout of its latest gradient.
    pub(super) fn grad_layout(&self, is_own: bool) -> &Layout {
        self.grad.as_ref().filter(|_| !is_own).map_or(&self.layout, |(layout, _)| layout)
    }
}

/// A parameter's share of a step, read and checked.
pub(super) struct Job<'py> {
    pub(super) weight: RawTensor,
    pub(super) grad: RawTensor,
    /// Where the gradient itself is, whatever `grad` points to.
    pub(super) original_grad: usize,
    pub(super) grad_walks: Walks,
    pub(super) grad_has_own_layout: bool,
    /// Keeps the gradient's memory while the interpreter is released.
    pub(super) keep: Bound<'py, PyAny>,
    pub(super) config: AdamWConfig,
    /// What keeps a device's tensors until the update has landed.
    pub(super) holds: Holds,
    /// Whether the gradient is in host memory, offloaded.
    pub(super) is_offloaded: bool,
    /// A dense copy that is updated in place of a weight on a device, to be copied back.
    pub(super) stand_in: Option<Bound<'py, PyAny>>,
}

/// Where a weight and its gradient are, each in the order of the state, and what holds them.
pub(super) struct Tensors {
    pub(super) weight: usize,
    pub(super) grad: usize,
    pub(super) grad_dtype: DType,
    pub(super) holds: Holds,
}

impl Job<'_> {
    pub(super) fn place(&self) -> Place {
        self.weight.place
    }

    /// What a device's lanes need of it; the holds go with it.
    pub(super) fn tensors(&mut self) -> Tensors {
        let holds = std::mem::take(&mut self.holds);
        Tensors { weight: self.weight.data, grad: self.grad.data, grad_dtype: self.grad.dtype, holds }
    }
}
