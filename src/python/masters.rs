//! The fp32 values behind weights, read and set on behalf of Python: with the weight, or its copy, in host memory.

use super::core::Core;
use super::parameters::Parameters;
use super::tensor::{DType, Place, RawTensor, Role, TensorReader};
use crate::engine::{Slot, SlotSpec, WeightView};
use crate::error::Error;
use crate::memory::Walks;
use pyo3::prelude::*;

impl Core {
    /// Passes a slot and a view of `weight` (the parameter, or for one on a device a copy in host memory) to `then`.
    fn with_weight<R>(
        &mut self,
        parameter: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        then: impl FnOnce(&mut Slot, WeightView<'_>, &TensorReader) -> PyResult<R>,
    ) -> PyResult<R> {
        let index = self.parameters.slot_of(parameter)?;
        self.parameters.weight(index, parameter)?;
        let Parameters { reader, slots, .. } = &mut self.parameters;
        let slot = &mut slots[index];
        let name = slot.spec.name.to_string();
        let (raw, walks) = reader.read(weight, Role::Parameter, &|| name.clone(), |raw, shape| {
            if raw.place != Place::Host || !shape.has_sizes(&slot.spec.layout.sizes) {
                let message = format!("{name}: expected its weight in host memory");
                return Err(Error::InvalidValue(message).into());
            }
            Ok((raw, Walks::new(&slot.spec.layout, &shape.layout())))
        })?;
        // SAFETY: read just now, of the layout of `walks`, which does not overlap itself; the interpreter stays attached, so
        // nobody else runs, and what `then` reads beside it is a copy that the caller has made for this.
        let view = unsafe { raw.weight_view(walks) };
        then(slot, view, reader)
    }

    /// Copies the fp32 values behind a parameter into `out`, an fp32 tensor of its shape.
    pub(super) fn get_master(
        &mut self,
        parameter: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let read = |slot: &mut Slot, weight: WeightView<'_>, reader: &TensorReader| {
            fp32(reader, out, &slot.spec, |host, walks| {
                // SAFETY: an fp32 tensor of this layout that the caller has just made for this.
                let mut out = unsafe { host.borrow_mut::<f32>(walks) };
                Ok(slot.read_master(&weight, &mut out)?)
            })
        };
        self.with_weight(parameter, weight, read)
    }

    /// Sets `weight` (the parameter or its copy in host memory) and residual or master from fp32 values. With
    /// `write_weight=False` the weight stays as it is.
    pub(super) fn set_master(
        &mut self,
        parameter: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        write_weight: bool,
    ) -> PyResult<()> {
        let write = |slot: &mut Slot, mut view: WeightView<'_>, reader: &TensorReader| {
            fp32(reader, values, &slot.spec.clone(), |host, walks| {
                // SAFETY: an fp32 tensor of this layout; the interpreter stays attached, so nobody writes it.
                let values = unsafe { host.borrow::<f32>(walks) };
                if write_weight {
                    slot.write_master(&mut view, &values)?;
                } else {
                    slot.load_kept(&values)?;
                }
                Ok(())
            })
        };
        self.with_weight(parameter, weight, write)
    }

    /// Sets a full bf16 master from the weight as it is and residuals: an fp32 tensor that holds them as numbers.
    pub(super) fn set_residual(
        &mut self,
        parameter: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        residuals: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let load = |slot: &mut Slot, view: WeightView<'_>, reader: &TensorReader| {
            fp32(reader, residuals, &slot.spec.clone(), |host, walks| {
                // SAFETY: an fp32 tensor of this layout; the interpreter stays attached, so nobody writes it.
                let numbers = unsafe { host.borrow::<f32>(walks) };
                let mut exact = vec![0.0; numbers.len()];
                numbers.gather(0, &mut exact);
                let residuals: Vec<i16> = exact.into_iter().map(|number| number as i16).collect();
                Ok(slot.load_residual(&view, &residuals[..].into())?)
            })
        };
        self.with_weight(parameter, weight, load)
    }

    /// Residuals to zero, or masters to the weight: for a checkpoint that has neither.
    pub(super) fn zero_master(&mut self, parameter: &Bound<'_, PyAny>, weight: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with_weight(parameter, weight, |slot, view, _| Ok(slot.clear_kept(&view)?))
    }
}

/// Reads an fp32 tensor of a slot's shape and passes it on with its walks.
fn fp32<R>(
    reader: &TensorReader,
    tensor: &Bound<'_, PyAny>,
    spec: &SlotSpec,
    then: impl FnOnce(RawTensor, Walks) -> PyResult<R>,
) -> PyResult<R> {
    let name = || spec.name.to_string();
    reader.read(tensor, Role::Parameter, &name, |host, shape| {
        if host.dtype != DType::F32 || !shape.has_sizes(&spec.layout.sizes) {
            let (name, sizes) = (&spec.name, &spec.layout.sizes);
            let found = format!("{} of shape {:?}", host.dtype.name(), shape.sizes);
            return Err(
                Error::InvalidValue(format!("{name}: expected torch.float32 of shape {sizes:?}, not {found}")).into()
            );
        }
        then(host, Walks::new(&spec.layout, &shape.layout()))
    })
}
