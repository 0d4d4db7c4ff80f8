//! Reading torch's parameter groups.

use crate::error::Error;
use crate::kernel::AdamWConfig;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

/// A value of a parameter group.
fn entry<'py>(group: &Bound<'py, PyDict>, key: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
    group.get_item(key)?.ok_or_else(|| Error::InvalidValue(format!("a parameter group has no {key}")).into())
}

/// A number of a parameter group: a float, an int or a tensor of one element.
fn number<'py>(group: &Bound<'py, PyDict>, key: &Bound<'py, PyString>) -> PyResult<f64> {
    let value = entry(group, key)?;
    let not_a_number = |_| Error::UnsupportedType(format!("{key} of a parameter group is not a number: {value}"));
    value.extract().map_err(not_a_number).map_err(PyErr::from)
}

/// One group's settings.
pub(super) fn config(group: &Bound<'_, PyDict>) -> PyResult<AdamWConfig> {
    let py = group.py();
    let betas = entry(group, intern!(py, "betas"))?;
    // A tuple, or the list that a settings file makes of it.
    let pair: Option<[f64; 2]> = betas.extract::<Vec<f64>>().ok().and_then(|betas| betas.try_into().ok());
    let not_a_pair = || format!("betas of a parameter group is not a pair of numbers: {betas}");
    let [beta1, beta2] = pair.ok_or_else(|| Error::UnsupportedType(not_a_pair()))?;
    Ok(AdamWConfig {
        lr: number(group, intern!(py, "lr"))?,
        betas: (beta1, beta2),
        eps: number(group, intern!(py, "eps"))?,
        weight_decay: number(group, intern!(py, "weight_decay"))?,
        amsgrad: amsgrad(group)?,
        maximize: entry(group, intern!(py, "maximize"))?.is_truthy()?,
        decoupled_weight_decay: entry(group, intern!(py, "decoupled_weight_decay"))?.is_truthy()?,
    })
}

/// Whether a group uses amsgrad.
pub(super) fn amsgrad(group: &Bound<'_, PyDict>) -> PyResult<bool> {
    entry(group, intern!(group.py(), "amsgrad"))?.is_truthy()
}

/// Calls `each` for every group and each of its parameters, in order.
pub(super) fn for_each_parameter<'py>(
    groups: &Bound<'py, PyList>,
    mut each: impl FnMut(&Bound<'py, PyDict>, Bound<'py, PyAny>) -> PyResult<()>,
) -> PyResult<()> {
    for group in groups.iter() {
        let group = group.cast::<PyDict>()?;
        for parameter in entry(group, intern!(groups.py(), "params"))?.try_iter()? {
            each(group, parameter?)?;
        }
    }
    Ok(())
}
