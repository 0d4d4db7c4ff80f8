//! What the host benchmark needs beside an optimizer: tensors on the arena's pages, and its yardstick.

use super::core::shared_pool;
use super::dlpack::PyPlane;
use super::tensor::{DType, RawTensor, Role, TensorReader};
use crate::error::Error;
use crate::kernel::{DefaultFloatEnvironment, Isa, stream};
use crate::memory::{Arena, Layout, Plane, Walks, plane_bytes};
use half::bf16;
use pyo3::prelude::*;

/// A tensor of `numel` zeros on the arena's pages, for `torch.from_dlpack`; `dtype` is "float32" or "bfloat16".
#[pyfunction]
pub(super) fn host_tensor(numel: usize, dtype: &str, threads: usize) -> PyResult<PyPlane> {
    let pool = shared_pool(threads)?;
    let mut arena = Arena::default();
    let layout = Layout::contiguous(numel);
    match dtype {
        "float32" => {
            let plane: Plane<f32> = arena.slab(plane_bytes::<f32>(numel)?, &pool)?.carve(numel);
            Ok(PyPlane::new(&plane, layout))
        }
        "bfloat16" => {
            let plane: Plane<bf16> = arena.slab(plane_bytes::<bf16>(numel)?, &pool)?.carve(numel);
            Ok(PyPlane::new(&plane, layout))
        }
        other => Err(Error::InvalidValue(format!("dtype must be 'float32' or 'bfloat16', not {other:?}")).into()),
    }
}

/// One pass of the stream loop over four fp32 tensors: reads all, writes the first three, 28 bytes per element.
#[pyfunction]
pub(super) fn stream_pass(
    py: Python<'_>,
    tensors: [Bound<'_, PyAny>; 4],
    threads: usize,
    chunk_elems: usize,
) -> PyResult<()> {
    let reader = TensorReader::new(py)?;
    let read = |tensor: &Bound<'_, PyAny>| {
        reader.read(tensor, Role::Parameter, &|| "a stream tensor".into(), |host, shape| {
            let dense = shape.layout() == Layout::row_major(&shape.layout().sizes);
            if host.dtype == DType::F32 && dense {
                return Ok(host);
            }
            Err(Error::InvalidValue("stream tensors must be contiguous and torch.float32".into()).into())
        })
    };
    let [p, m, v, g] = &tensors;
    let [p, m, v, g] = [read(p)?, read(m)?, read(v)?, read(g)?];
    if [&m, &v, &g].iter().any(|tensor| tensor.numel != p.numel) {
        return Err(Error::InvalidValue("stream tensors must be of one size".into()).into());
    }
    let pool = shared_pool(threads)?;
    let isa = Isa::current()?;
    let whole = |tensor: RawTensor| {
        // SAFETY: an fp32 tensor, dense, alive through `tensors`; the benchmark hands in four distinct ones.
        unsafe { tensor.borrow_mut::<f32>(Walks::default()) }
    };
    let (mut p, mut m, mut v, mut g) = (whole(p), whole(m), whole(v), whole(g));
    let slices = (p.as_mut_slice(), m.as_mut_slice(), v.as_mut_slice(), g.as_mut_slice());
    let (Some(p), Some(m), Some(v), Some(g)) = slices else { unreachable!("dense tensors are slices") };
    py.detach(|| {
        let chunks = p.chunks_mut(chunk_elems).zip(m.chunks_mut(chunk_elems));
        let chunks = chunks.zip(v.chunks_mut(chunk_elems)).zip(g.chunks(chunk_elems));
        pool.for_each(chunks, |(((p, m), v), g)| {
            let _environment = DefaultFloatEnvironment::enter();
            stream(isa, p, m, v, g);
        })
    })?;
    drop(tensors); // alive until here
    Ok(())
}
