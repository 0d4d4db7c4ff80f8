//! Reading torch tensors: address, dtype, device, sizes and strides. In one C call where torch publishes its DLPack function
//! table (about 20 ns), through attributes otherwise (about 1 microsecond).

use super::dlpack::{self, DLDataType, DLDevice, DLTensor, ExchangeApi};
use super::sharded::Sharded;
use crate::engine::{GradElements, GradView, WeightView};
use crate::error::Error;
use crate::memory::{Element, Layout, StridedMut, StridedRef, Walks};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;
use std::mem::MaybeUninit;

/// The dtypes that weights and gradients may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DType {
    F32,
    Bf16,
    F16,
}

impl DType {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F32 => "torch.float32",
            Self::Bf16 => "torch.bfloat16",
            Self::F16 => "torch.float16",
        }
    }

    pub(super) fn size(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

/// Where a tensor's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Place {
    /// Host memory.
    Host,
    /// The CUDA device of this ordinal.
    Cuda(i32),
    /// Host memory that plays a device's part, for tests.
    Simulated,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Simulated => f.write_str("a simulated device"),
        }
    }
}

/// A tensor's memory, as it was when it was read.
#[derive(Clone, Debug)]
pub(super) struct RawTensor {
    pub(super) data: usize,
    pub(super) dtype: DType,
    pub(super) numel: usize,
    pub(super) place: Place,
}

impl RawTensor {
    /// Borrows the tensor's elements, to read.
    ///
    /// # Safety
    /// As [`StridedRef::new`]: the tensor read was in host memory and of dtype `T`, `walks` are its layout's, and it stays alive and unwritten.
    pub(super) unsafe fn borrow<'a, T: Element>(&self, walks: Walks) -> StridedRef<'a, T> {
        // SAFETY: the caller's promise.
        unsafe { StridedRef::new(self.data as *const T, self.numel, walks) }
    }

    /// Borrows the tensor's elements, to write.
    ///
    /// # Safety
    /// As [`StridedMut::new`]: the tensor read was of dtype `T`, `walks` are its layout's, it does not overlap itself, and
    /// nobody else touches it.
    pub(super) unsafe fn borrow_mut<'a, T: Element>(&self, walks: Walks) -> StridedMut<'a, T> {
        // SAFETY: the caller's promise.
        unsafe { StridedMut::new(self.data as *mut T, self.numel, walks) }
    }

    /// Borrows a weight of whatever dtype it is.
    ///
    /// # Safety
    /// As [`Self::borrow_mut`].
    pub(super) unsafe fn weight_view<'a>(&self, walks: Walks) -> WeightView<'a> {
        // SAFETY: the caller's promise, and the dtype that was read.
        unsafe {
            match self.dtype {
                DType::F32 => WeightView::F32(self.borrow_mut(walks)),
                DType::Bf16 => WeightView::Bf16(self.borrow_mut(walks)),
                DType::F16 => WeightView::F16(self.borrow_mut(walks)),
            }
        }
    }

    /// Borrows a gradient of whatever dtype it is, to write it too if `writable`.
    ///
    /// # Safety
    /// As [`Self::borrow_mut`] if `writable`, else as [`Self::borrow`].
    pub(super) unsafe fn grad_view<'a>(&self, walks: Walks, writable: bool) -> GradView<'a> {
        // SAFETY: the caller's promise, and the dtype that was read.
        unsafe {
            match self.dtype {
                DType::F32 => GradView::F32(self.grad_elements(walks, writable)),
                DType::Bf16 => GradView::Bf16(self.grad_elements(walks, writable)),
                DType::F16 => GradView::F16(self.grad_elements(walks, writable)),
            }
        }
    }

    /// # Safety
    /// As [`Self::grad_view`], of dtype `T`.
    unsafe fn grad_elements<'a, T: Element>(&self, walks: Walks, writable: bool) -> GradElements<'a, T> {
        // SAFETY: the caller's promise.
        unsafe {
            if writable {
                GradElements::Exclusive(self.borrow_mut(walks))
            } else {
                GradElements::Shared(self.borrow(walks))
            }
        }
    }
}

/// Sizes and strides next to their tensor, borrowed where the C call lent them.
pub(super) struct Shape<'a> {
    pub(super) sizes: std::borrow::Cow<'a, [i64]>,
    pub(super) strides: std::borrow::Cow<'a, [i64]>,
}

impl Shape<'_> {
    /// As the engine has it. torch's strides are never negative.
    pub(super) fn layout(&self) -> Layout {
        let unsigned = |values: &[i64]| values.iter().map(|&value| usize::try_from(value).unwrap_or(0)).collect();
        Layout { sizes: unsigned(&self.sizes), strides: unsigned(&self.strides) }
    }

    /// Whether it is exactly this layout.
    pub(super) fn is(&self, layout: &Layout) -> bool {
        let same = |signed: &[i64], unsigned: &[usize]| {
            signed.len() == unsigned.len() && signed.iter().zip(unsigned).all(|(&a, &b)| a == b as i64)
        };
        same(&self.sizes, &layout.sizes) && same(&self.strides, &layout.strides)
    }

    /// Whether it has exactly these sizes.
    pub(super) fn has_sizes(&self, sizes: &[usize]) -> bool {
        self.sizes.len() == sizes.len() && self.sizes.iter().zip(sizes).all(|(&a, &b)| a == b as i64)
    }
}

/// Keeps a tensor's memory, on any thread.
pub(super) enum Hold {
    /// The memory.
    Memory(#[allow(dead_code, reason = "dropped")] dlpack::Managed),
    /// The tensor, where torch does not give away the memory alone.
    Object(#[allow(dead_code, reason = "dropped")] Py<PyAny>),
}

/// What keeps the tensors of one update until it has landed.
#[derive(Default)]
pub(super) struct Holds {
    pub(super) grad: Option<Hold>,
    pub(super) weight: Option<Hold>,
}

/// Which of a parameter's tensors is read, for messages.
#[derive(Clone, Copy)]
pub(super) enum Role {
    Parameter,
    Gradient,
}

impl Role {
    fn of(self, name: &str) -> String {
        match self {
            Self::Parameter => name.to_owned(),
            Self::Gradient => format!("the gradient of {name}"),
        }
    }
}

/// Reads tensors.
pub(super) struct TensorReader {
    api: Option<&'static ExchangeApi>,
    tensor_type: Py<PyType>,
    parameter_type: Py<PyType>,
    /// The class that parameters have while their update is under way.
    pending_type: Option<Py<PyType>>,
    /// The class of tensors that are spread over ranks, once there is one.
    sharded: Option<Sharded>,
}

impl TensorReader {
    pub(super) fn new(py: Python<'_>) -> PyResult<Self> {
        let tensor_type = py.import("torch")?.getattr("Tensor")?;
        let parameter_type = py.import("torch.nn")?.getattr("Parameter")?;
        Ok(Self {
            api: dlpack::exchange_api(&tensor_type),
            tensor_type: tensor_type.cast_into::<PyType>()?.unbind(),
            parameter_type: parameter_type.cast_into::<PyType>()?.unbind(),
            pending_type: None,
            sharded: None,
        })
    }

    /// Reads parameters of this class, too, as they are.
    pub(super) fn set_pending_type(&mut self, pending_type: Py<PyType>) {
        self.pending_type = Some(pending_type);
    }

    /// Reads what this rank has of tensors of a class that are spread over ranks.
    pub(super) fn set_sharded(&mut self, sharded: Sharded) {
        self.sharded = Some(sharded);
    }

    /// The tensor that has the memory: what this rank has of one that is spread over ranks, or the tensor itself.
    pub(super) fn local<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let within = self.sharded.as_ref().and_then(|sharded| sharded.local(tensor));
        within.unwrap_or_else(|| Ok(tensor.clone()))
    }

    /// Gives a parameter the class of those whose update is under way, if it is one that can have it.
    pub(super) fn mark(&self, parameter: &Bound<'_, PyAny>) -> PyResult<()> {
        let pending = if parameter.get_type().is(&self.parameter_type) {
            self.pending_type.as_ref()
        } else {
            self.sharded.as_ref().and_then(|sharded| sharded.pending_for(parameter))
        };
        match pending {
            Some(pending) => parameter.setattr(intern!(parameter.py(), "__class__"), pending),
            None => Ok(()),
        }
    }

    fn is_plain(&self, kind: &Bound<'_, PyType>) -> bool {
        kind.is(&self.tensor_type)
            || kind.is(&self.parameter_type)
            || self.pending_type.as_ref().is_some_and(|pending| kind.is(pending))
    }

    /// A hold on a tensor's memory, also if the tensor is given other memory meanwhile.
    pub(super) fn hold(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Hold> {
        let tensor = &self.local(tensor)?;
        match self.api.filter(|_| self.is_plain(&tensor.get_type())) {
            Some(api) => Ok(Hold::Memory(dlpack::Managed::of(api, tensor)?)),
            None => Ok(Hold::Object(tensor.clone().unbind())),
        }
    }

    /// torch's current stream on a CUDA device, as its handle.
    pub(super) fn current_stream(&self, py: Python<'_>, device: i32) -> PyResult<usize> {
        if let Some(stream) = self.api.and_then(|api| dlpack::current_stream(api, device)) {
            return Ok(stream);
        }
        let stream = py.import(intern!(py, "torch"))?.getattr("cuda")?.call_method1("current_stream", (device,))?;
        stream.getattr("cuda_stream")?.extract()
    }

    /// The address of a tensor's elements, whatever its dtype and device.
    pub(super) fn address(&self, tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
        let tensor = &self.local(tensor)?;
        if let Some(read) = self.api.filter(|_| self.is_plain(&tensor.get_type())).and_then(dlpack::reader) {
            let mut raw = MaybeUninit::<DLTensor>::uninit();
            // SAFETY: torch's own function on an object of exactly its tensor type; it fills `raw` if it returns 0.
            if unsafe { read(tensor.as_ptr(), raw.as_mut_ptr()) } == 0 {
                // SAFETY: filled, as it returned 0.
                let raw = unsafe { raw.assume_init() };
                return Ok(raw.data as usize + raw.byte_offset as usize);
            }
            let _ = PyErr::take(tensor.py()); // torch's own method says it better
        }
        tensor.call_method0(intern!(tensor.py(), "data_ptr"))?.extract()
    }

    /// Reads a tensor that must be strided, in host memory or on a CUDA device, and of a supported dtype, and passes it
    /// and its shape on.
    pub(super) fn read<R>(
        &self,
        tensor: &Bound<'_, PyAny>,
        role: Role,
        name: &dyn Fn() -> String,
        then: impl FnOnce(RawTensor, &Shape<'_>) -> PyResult<R>,
    ) -> PyResult<R> {
        let tensor = &self.local(tensor)?;
        let kind = tensor.get_type();
        if let Some(read) = self.api.filter(|_| self.is_plain(&kind)).and_then(dlpack::reader) {
            let mut raw = MaybeUninit::<DLTensor>::uninit();
            // SAFETY: torch's own function on an object of exactly its tensor type; it fills `raw` if it returns 0.
            let failed = unsafe { read(tensor.as_ptr(), raw.as_mut_ptr()) } != 0;
            if failed {
                let _ = PyErr::take(tensor.py()); // the slow path says it better
            } else {
                // SAFETY: filled, as it returned 0.
                let raw = unsafe { raw.assume_init() };
                if let (Some(dtype), Some(place)) = (supported(raw.dtype), place(raw.device)) {
                    let ndim = usize::try_from(raw.ndim).unwrap_or(0);
                    // SAFETY: `ndim` sizes and strides that the tensor owns; it is alive and nothing resizes it while
                    // this thread is attached to the interpreter and runs no Python code.
                    let (sizes, strides) = unsafe { (dimensions(raw.shape, ndim), dimensions(raw.strides, ndim)) };
                    let numel = sizes.iter().product::<i64>() as usize;
                    let data = raw.data as usize + raw.byte_offset as usize;
                    let shape = Shape { sizes: sizes.into(), strides: strides.into() };
                    let host = RawTensor { data, dtype, numel, place };
                    check_memory(tensor, &host, &shape, role, name)?;
                    return then(host, &shape);
                }
            }
        }
        let (host, shape) = read_attributes(tensor, role, name)?;
        check_memory(tensor, &host, &shape, role, name)?;
        then(host, &shape)
    }
}

/// # Safety
/// `values` points to `count` numbers that stay as they are for `'a`, or `count` is 0.
unsafe fn dimensions<'a>(values: *const i64, count: usize) -> &'a [i64] {
    // SAFETY: the caller's promise.
    if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(values, count) } }
}

fn place(device: DLDevice) -> Option<Place> {
    match device.device_type {
        dlpack::CPU => Some(Place::Host),
        dlpack::CUDA => Some(Place::Cuda(device.device_id)),
        _ => None,
    }
}

fn supported(dtype: DLDataType) -> Option<DType> {
    match dtype {
        dlpack::FLOAT32 => Some(DType::F32),
        dlpack::BFLOAT16 => Some(DType::Bf16),
        dlpack::FLOAT16 => Some(DType::F16),
        _ => None,
    }
}

/// No heap of a 64-bit process lies below this address, but for that of an executable that is not position-independent.
/// A freed storage leaves its tensors with the address 0 plus their offset.
const SUSPICIOUSLY_LOW: usize = 1 << 32;

/// Checks that a tensor's memory is there and aligned for its dtype.
fn check_memory(
    tensor: &Bound<'_, PyAny>,
    host: &RawTensor,
    shape: &Shape<'_>,
    role: Role,
    name: &dyn Fn() -> String,
) -> PyResult<()> {
    if host.numel == 0 {
        return Ok(());
    }
    let size = host.dtype.size();
    let refuse = |problem: String| Err(Error::InvalidValue(format!("{}: {problem}", role.of(&name()))).into());
    if host.data < SUSPICIOUSLY_LOW {
        let storage = tensor.call_method0("untyped_storage")?.call_method0("nbytes")?.extract::<usize>()?;
        let offset = tensor.call_method0("storage_offset")?.extract::<usize>()?;
        let needed = (offset + shape.layout().span()) * size;
        if storage < needed {
            return refuse(format!("its storage has been freed (it has {storage} bytes, and needs {needed})"));
        }
    }
    if !host.data.is_multiple_of(size) {
        return refuse(format!("its memory is not aligned to the {size} bytes of {}", host.dtype.name()));
    }
    Ok(())
}

/// The slow path, which also finds the words for what cannot be read.
fn read_attributes(
    tensor: &Bound<'_, PyAny>,
    role: Role,
    name: &dyn Fn() -> String,
) -> PyResult<(RawTensor, Shape<'static>)> {
    let py = tensor.py();
    let who = role.of(&name());
    let unsupported = |what: String| PyErr::from(Error::UnsupportedType(format!("{who}: {what}")));
    let text = |attribute: &str| -> PyResult<String> { Ok(tensor.getattr(attribute)?.str()?.to_string()) };

    let layout = text("layout")?;
    if layout != "torch.strided" {
        return Err(unsupported(format!(
            "its layout is {layout}; outboard updates dense (torch.strided) tensors (for an embedding: sparse=False)"
        )));
    }
    let dtype = match text("dtype")?.as_str() {
        "torch.float32" => DType::F32,
        "torch.bfloat16" => DType::Bf16,
        "torch.float16" => DType::F16,
        other => {
            let supported = "torch.float32, torch.bfloat16 and torch.float16";
            return Err(unsupported(format!("its dtype is {other}; outboard updates {supported}")));
        }
    };
    let dispatch = tensor.get_type().getattr(intern!(py, "__torch_dispatch__"))?;
    if !dispatch.is(&py.import("torch")?.getattr("_C")?.getattr("_disabled_torch_dispatch_impl")?) {
        let kind = tensor.get_type().fully_qualified_name()?;
        return Err(unsupported(format!("it is a {kind}, a tensor subclass without memory of its own")));
    }
    let device = tensor.getattr(intern!(py, "device"))?;
    let place = match device.getattr("type")?.to_string().as_str() {
        "cpu" => Place::Host,
        "cuda" => Place::Cuda(device.getattr("index")?.extract()?),
        _ => {
            let supported = "host memory (cpu) or on a CUDA device";
            return Err(
                Error::Cuda(format!("{who}: it is on {device}; outboard updates parameters in {supported}")).into()
            );
        }
    };
    let data: usize = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
    let sizes: Vec<i64> = tensor.getattr(intern!(py, "shape"))?.extract()?;
    let strides: Vec<i64> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
    let numel = sizes.iter().product::<i64>() as usize;
    Ok((RawTensor { data, dtype, numel, place }, Shape { sizes: sizes.into(), strides: strides.into() }))
}
