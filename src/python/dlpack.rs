//! The DLPack structures (<https://dmlc.github.io/dlpack>), as far as they are used: to read a torch tensor in one C call,
//! and to hand a plane to torch as a tensor without copying it.

use crate::memory::{Element, Layout, Plane, SlabHandle};
use half::bf16;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct DLDevice {
    pub(super) device_type: i32,
    pub(super) device_id: i32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(super) struct DLDataType {
    pub(super) code: u8,
    pub(super) bits: u8,
    pub(super) lanes: u16,
}

#[repr(C)]
pub(super) struct DLTensor {
    pub(super) data: *mut c_void,
    pub(super) device: DLDevice,
    pub(super) ndim: i32,
    pub(super) dtype: DLDataType,
    pub(super) shape: *mut i64,
    pub(super) strides: *mut i64,
    pub(super) byte_offset: u64,
}

#[repr(C)]
struct DLManagedTensor {
    dl_tensor: DLTensor,
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// The flavour of [`DLManagedTensor`] that the function table deals in.
#[repr(C)]
struct DLManagedTensorVersioned {
    major: u32,
    minor: u32,
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    flags: u64,
    dl_tensor: DLTensor,
}

pub(super) const CPU: i32 = 1;
pub(super) const CUDA: i32 = 2;
const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;

pub(super) const FLOAT32: DLDataType = DLDataType { code: FLOAT, bits: 32, lanes: 1 };
pub(super) const FLOAT16: DLDataType = DLDataType { code: FLOAT, bits: 16, lanes: 1 };
pub(super) const UINT8: DLDataType = DLDataType { code: UINT, bits: 8, lanes: 1 };
pub(super) const BFLOAT16: DLDataType = DLDataType { code: BFLOAT, bits: 16, lanes: 1 };

/// Fills the `DLTensor` from a Python tensor, without ownership: valid while the tensor is and is not resized.
pub(super) type ReadTensor = unsafe extern "C" fn(tensor: *mut ffi::PyObject, out: *mut DLTensor) -> c_int;

/// The function table that torch publishes on its tensor type from 2.10 on (DLPack 1.3).
#[repr(C)]
pub(super) struct ExchangeApi {
    major: u32,
    minor: u32,
    previous: *mut ExchangeApi,
    allocate: *const c_void,
    managed_from_object:
        Option<unsafe extern "C" fn(tensor: *mut ffi::PyObject, out: *mut *mut DLManagedTensorVersioned) -> c_int>,
    managed_to_object: *const c_void,
    read: Option<ReadTensor>,
    current_stream: Option<unsafe extern "C" fn(device_type: i32, device: i32, out: *mut *mut c_void) -> c_int>,
}

// SAFETY: a table of functions that never changes.
unsafe impl Sync for ExchangeApi {}

/// torch's function to read a tensor.
pub(super) fn reader(api: &ExchangeApi) -> Option<ReadTensor> {
    api.read
}

/// torch's current stream on a CUDA device.
pub(super) fn current_stream(api: &ExchangeApi, device: i32) -> Option<usize> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: torch's own function; it fills `stream` if it returns 0.
    let failed = unsafe { api.current_stream?(CUDA, device, &raw mut stream) } != 0;
    if failed {
        // SAFETY: called by threads that are attached to the interpreter, where a failure may have set an error.
        unsafe { ffi::PyErr_Clear() };
        return None;
    }
    Some(stream as usize)
}

/// A tensor's memory, held without its Python object: let go on any thread, without the interpreter.
#[derive(Debug)]
pub(super) struct Managed(NonNull<DLManagedTensorVersioned>);

// SAFETY: the protocol lets any thread call the deleter, and nothing else is done with it.
unsafe impl Send for Managed {}
// SAFETY: a shared reference gives access to nothing.
unsafe impl Sync for Managed {}

impl Managed {
    pub(super) fn of(api: &ExchangeApi, tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let unsupported = || PyBufferError::new_err("this torch exports no tensors through DLPack's function table");
        let export = api.managed_from_object.ok_or_else(unsupported)?;
        let mut managed = std::ptr::null_mut();
        // SAFETY: torch's own function on one of its tensors (the caller's check); it fills `managed` if it returns 0.
        let failed = unsafe { export(tensor.as_ptr(), &raw mut managed) } != 0;
        match NonNull::new(managed).filter(|_| !failed) {
            Some(managed) => Ok(Self(managed)),
            None => Err(PyErr::take(tensor.py()).unwrap_or_else(unsupported)),
        }
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: exported by `of`, owned by this and deleted once.
        unsafe {
            if let Some(delete) = self.0.as_ref().deleter {
                delete(self.0.as_ptr());
            }
        }
    }
}

/// torch's function table, where this torch has one.
pub(super) fn exchange_api(tensor_type: &Bound<'_, PyAny>) -> Option<&'static ExchangeApi> {
    const NAME: &CStr = c"dlpack_exchange_api";
    let capsule = tensor_type.getattr("__dlpack_c_exchange_api__").ok()?;
    // SAFETY: returns null and sets an error unless the object is a capsule of this name.
    let api = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr().cast::<c_char>()) };
    if api.is_null() {
        let _ = PyErr::take(tensor_type.py());
        return None;
    }
    // SAFETY: a capsule of this name holds a pointer to a table that lives as long as the process (DLPack 1.3); its
    // layout is fixed within major version 1.
    let api: &'static ExchangeApi = unsafe { &*api.cast::<ExchangeApi>() };
    (api.major == 1).then_some(api)
}

/// An element type that DLPack can name.
pub(super) trait DLElement: Element {
    const DTYPE: DLDataType;
}

impl DLElement for f32 {
    const DTYPE: DLDataType = FLOAT32;
}
impl DLElement for f64 {
    const DTYPE: DLDataType = DLDataType { code: FLOAT, bits: 64, lanes: 1 };
}
impl DLElement for i16 {
    const DTYPE: DLDataType = DLDataType { code: INT, bits: 16, lanes: 1 };
}
impl DLElement for u8 {
    const DTYPE: DLDataType = UINT8;
}
impl DLElement for bf16 {
    const DTYPE: DLDataType = BFLOAT16;
}

/// What a capsule owns: the shape that its tensor points to, and what keeps the memory behind it.
struct Owner<M> {
    tensor: DLManagedTensor,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    _memory: M,
}

/// A capsule, for `torch.from_dlpack`, of the elements from `start` on, which `memory` keeps.
pub(super) fn capsule<M: Send + 'static>(
    py: Python<'_>,
    start: NonNull<c_void>,
    dtype: DLDataType,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    memory: M,
) -> PyResult<Bound<'_, PyAny>> {
    let ndim = i32::try_from(sizes.len()).map_err(|_| PyBufferError::new_err("too many dimensions"))?;
    let tensor = DLTensor {
        data: start.as_ptr(),
        device: DLDevice { device_type: CPU, device_id: 0 },
        ndim,
        dtype,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let tensor = DLManagedTensor { dl_tensor: tensor, manager_ctx: std::ptr::null_mut(), deleter: Some(delete::<M>) };
    let mut owner = Box::new(Owner { tensor, sizes, strides, _memory: memory });
    owner.tensor.dl_tensor.shape = owner.sizes.as_mut_ptr();
    owner.tensor.dl_tensor.strides = owner.strides.as_mut_ptr();
    let owner = Box::into_raw(owner);
    // SAFETY: `owner` is a live allocation that the capsule owns from here on.
    let tensor = unsafe {
        (*owner).tensor.manager_ctx = owner.cast();
        &raw mut (*owner).tensor
    };
    // SAFETY: a fresh capsule over a live pointer under a static name; `destroy` fits what it holds.
    let capsule = unsafe { ffi::PyCapsule_New(tensor.cast(), UNUSED.as_ptr(), Some(destroy)) };
    if capsule.is_null() {
        // SAFETY: nobody else has seen the tensor; this is its only deletion.
        unsafe { delete::<M>(tensor) };
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a new reference that is not null.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) })
}

/// Memory of the arena, for `torch.from_dlpack`: a tensor over it that keeps it mapped and copies nothing.
#[pyclass(name = "Plane", module = "outboard._native", frozen)]
pub(super) struct PyPlane {
    start: NonNull<c_void>,
    dtype: DLDataType,
    layout: Layout,
    memory: SlabHandle,
}

// SAFETY: an address and a handle; the capsule's consumer answers for accesses.
unsafe impl Send for PyPlane {}
// SAFETY: as above.
unsafe impl Sync for PyPlane {}

impl PyPlane {
    pub(super) fn new<T: DLElement>(plane: &Plane<T>, layout: Layout) -> Self {
        let (start, memory) = plane.share();
        debug_assert_eq!(plane.as_slice().len(), layout.numel());
        Self { start: start.cast(), dtype: T::DTYPE, layout, memory }
    }

    /// A run of `bytes` bytes from `start`, which `memory` keeps mapped.
    pub(super) fn of_bytes(start: usize, bytes: usize, memory: SlabHandle) -> Self {
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(start)).unwrap_or(NonNull::dangling());
        Self { start, dtype: u8::DTYPE, layout: Layout::contiguous(bytes), memory }
    }
}

#[pymethods]
impl PyPlane {
    /// The protocol's export; `stream` and the like do not concern host memory.
    #[pyo3(signature = (**_options))]
    fn __dlpack__<'py>(&self, py: Python<'py>, _options: Option<&Bound<'_, PyDict>>) -> PyResult<Bound<'py, PyAny>> {
        let signed = |values: &[usize]| -> PyResult<Vec<i64>> {
            values
                .iter()
                .map(|&v| i64::try_from(v).map_err(|_| PyBufferError::new_err("dimension beyond 2^63")))
                .collect()
        };
        let (sizes, strides) = (signed(&self.layout.sizes)?, signed(&self.layout.strides)?);
        capsule(py, self.start, self.dtype, sizes, strides, self.memory.clone())
    }

    #[allow(clippy::unused_self)] // the protocol calls it on the object
    fn __dlpack_device__(&self) -> (i32, i32) {
        (CPU, 0)
    }
}

/// The protocol's name of a capsule whose tensor nobody has taken over yet.
const UNUSED: &CStr = c"dltensor";

/// Frees a tensor that a consumer is done with.
///
/// # Safety
/// `tensor` came from [`capsule`] with this `M` and is not used afterwards.
unsafe extern "C" fn delete<M>(tensor: *mut DLManagedTensor) {
    // SAFETY: `manager_ctx` is the box that `capsule` leaked, and this is its only return.
    drop(unsafe { Box::from_raw((*tensor).manager_ctx.cast::<Owner<M>>()) });
}

/// Frees a capsule; its tensor too if nobody took it over (a consumer renames the capsule).
///
/// # Safety
/// Called by Python once, with a capsule made by [`capsule`].
unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
    // SAFETY: a live capsule; the pointer it holds under this name is the tensor it owns.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, UNUSED.as_ptr()) == 1 {
            let tensor: *mut DLManagedTensor = ffi::PyCapsule_GetPointer(capsule, UNUSED.as_ptr()).cast();
            if let Some(delete) = (*tensor).deleter {
                delete(tensor);
            }
        }
    }
}
