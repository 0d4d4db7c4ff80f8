//! Tensors that are spread over ranks (torch's DTensor): what this rank has of one is a tensor within.

use pyo3::prelude::*;
use pyo3::types::PyType;

/// The classes of such tensors, and how to get at what is within.
pub(super) struct Sharded {
    /// As torch makes them, while an update is under way, and gradients that are watched.
    types: [Py<PyType>; 3],
    /// The descriptor of the tensor within. Not by attribute: that of a pending one waits for its update.
    local: Py<PyAny>,
}

impl Sharded {
    /// `types`: the class itself, the one of pending parameters, and the one of watched gradients.
    pub(super) fn new(types: [Py<PyType>; 3], local: Py<PyAny>) -> Self {
        Self { types, local }
    }

    /// The tensor within, if this is one of the class.
    pub(super) fn local<'py>(&self, tensor: &Bound<'py, PyAny>) -> Option<PyResult<Bound<'py, PyAny>>> {
        let kind = tensor.get_type();
        let is_one = self.types.iter().any(|known| kind.is(known));
        is_one.then(|| self.local.bind(tensor.py()).call_method1(pyo3::intern!(tensor.py(), "__get__"), (tensor,)))
    }

    /// The class that one has while its update is under way, if it is to be given to this tensor.
    pub(super) fn pending_for(&self, tensor: &Bound<'_, PyAny>) -> Option<&Py<PyType>> {
        let [plain, pending, _] = &self.types;
        tensor.get_type().is(plain).then_some(pending)
    }
}
