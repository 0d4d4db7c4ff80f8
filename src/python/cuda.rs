//! The device kernel on raw pointers, for the tests that compare it with the host.

use super::groups::config;
use crate::cuda;
use crate::device::DeviceUpdate;
use crate::error::Error;
use crate::kernel::{GradDType, MomentDType, Noise, WeightKind};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// One dtype or kind by its name.
fn named<T: Copy>(what: &str, name: &str, known: &[(&str, T)]) -> PyResult<T> {
    known.iter().find(|(known, _)| *known == name).map(|&(_, value)| value).ok_or_else(|| {
        let listed = known.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        Error::InvalidValue(format!("{what} must be one of {listed}, not {name}")).into()
    })
}

/// Updates `len` elements on the device, whose first has index `first`, as step number `step`. Addresses are device
/// addresses (0 for none) of tensors of the given kinds; `group` holds a parameter group's settings.
#[pyfunction]
#[pyo3(signature = (group, *, weight_kind, grad_kind, moment_kind, weight, kept, grad, exp_avg, exp_avg_sq,
    max_exp_avg_sq, len, first, step, clip, seed, number, grad_scale, stream))]
pub(super) fn cuda_adamw(
    group: &Bound<'_, PyDict>,
    weight_kind: &str,
    grad_kind: &str,
    moment_kind: &str,
    weight: usize,
    kept: usize,
    grad: usize,
    exp_avg: usize,
    exp_avg_sq: usize,
    max_exp_avg_sq: usize,
    len: usize,
    first: u64,
    step: f64,
    clip: f32,
    seed: u64,
    number: u64,
    grad_scale: Option<f32>,
    stream: usize,
) -> PyResult<()> {
    let weight_kind = named(
        "weight_kind",
        weight_kind,
        &[
            ("float32", WeightKind::F32),
            ("bfloat16-split", WeightKind::Bf16Split),
            ("bfloat16-full", WeightKind::Bf16Full),
            ("float16-full", WeightKind::F16Full),
        ],
    )?;
    let grads = [("float32", GradDType::F32), ("bfloat16", GradDType::Bf16), ("float16", GradDType::F16)];
    let moments = [("float32", MomentDType::F32), ("bfloat16", MomentDType::Bf16)];
    let update = DeviceUpdate {
        parameter: "a test's parameter",
        weight_kind,
        grad_dtype: named("grad_kind", grad_kind, &grads)?,
        moments: named("moment_kind", moment_kind, &moments)?,
        weight,
        kept,
        grad,
        exp_avg,
        exp_avg_sq,
        max_exp_avg_sq,
        len,
        first,
        constants: config(group)?.constants(step, clip),
        noise: Noise::new(seed, step as u64, number),
        grad_scale,
    };
    // SAFETY: the caller is a test that passes addresses of live tensors of these kinds and lengths; that is what this
    // private function asks of it.
    Ok(unsafe { cuda::adamw(&update, stream) }?)
}
