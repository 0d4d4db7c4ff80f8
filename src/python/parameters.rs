//! From torch parameters to slots: binding them, reading them and their gradients anew at each step, following moves and
//! new strides, and refusing by name what cannot be updated.

use super::binding::{Binding, Job, Offloaded, Resident};
use super::groups::{config, for_each_parameter};
use super::lanes::Lanes;
use super::sharing::{Extent, refuse_aliased_gradients, refuse_first_shared};
use super::tensor::{DType, Holds, Place, RawTensor, Role, Shape, TensorReader};
use crate::engine::{MomentDType, Slot, SlotSpec, WeightKind};
use crate::error::Error;
use crate::kernel::AdamWConfig;
use crate::memory::{Arena, Layout, Slab, Walks, plane_bytes};
use crate::pool::WorkerPool;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::Weak;

/// What `bind` is told of a parameter: itself, its name, its number in the optimizer, whether its master is full, whether
/// its moments are bf16, amsgrad, and the planes' tensors by name if they are to be on the device.
pub(super) type BindEntry<'py> = (Bound<'py, PyAny>, String, u64, bool, bool, bool, Option<Bound<'py, PyDict>>);

/// The parameters of one optimizer with their slots, by the order of binding.
pub(super) struct Parameters {
    pub(super) reader: TensorReader,
    pub(super) slots: Vec<Slot>,
    pub(super) bindings: Vec<Binding>,
    /// From a parameter's address to its slot.
    index: FxHashMap<usize, usize>,
    /// Whether a parameter has moved or changed its strides since all were last compared for shared memory.
    unchecked: bool,
    /// Slots whose planes have been reordered or joined by another since Python last took their tensors.
    pub(super) relaid: Vec<usize>,
    /// When each slot's weight is needed next, as far as it is known.
    pub(super) next_use: Vec<u64>,
    /// The engines that may be at work on planes.
    pub(super) lanes: Vec<Weak<dyn Lanes>>,
    /// Whether host memory plays a device's part.
    simulate: bool,
}

/// Of a slot's number those bits that are the parameter's number in the optimizer; above them, where its shard begins.
const NUMBER_BITS: u32 = 20;

fn address(object: &Bound<'_, PyAny>) -> usize {
    object.as_ptr() as usize
}

fn dtype_of(kind: WeightKind) -> DType {
    match kind {
        WeightKind::F32 => DType::F32,
        WeightKind::Bf16Split | WeightKind::Bf16Full => DType::Bf16,
        WeightKind::F16Full => DType::F16,
    }
}

fn kind_of(dtype: DType, full_master: bool) -> WeightKind {
    match (dtype, full_master) {
        (DType::F32, _) => WeightKind::F32,
        (DType::Bf16, false) => WeightKind::Bf16Split,
        (DType::Bf16, true) => WeightKind::Bf16Full,
        (DType::F16, _) => WeightKind::F16Full,
    }
}

/// The dtype in which a parameter's offloaded gradient is kept: fp32 where several are added up (`offload` is then true),
/// else its own.
fn offload_dtype(offload: Option<bool>, spec: &SlotSpec, binding: &Binding) -> Option<DType> {
    let may = binding.place != Place::Host && spec.layout.numel() > 0;
    let adds_up = offload.filter(|_| may)?;
    Some(if adds_up { DType::F32 } else { dtype_of(spec.weight) })
}

fn refuse_overlap(name: &str, layout: &Layout) -> PyResult<()> {
    if !layout.overlaps_itself() {
        return Ok(());
    }
    let message = "its elements share memory (an expanded tensor?); give the optimizer the original";
    Err(Error::InvalidValue(format!("{name}: {message}")).into())
}

fn refuse_negated(tensor: &Bound<'_, PyAny>, who: &str) -> PyResult<()> {
    if !tensor.call_method0(intern!(tensor.py(), "is_neg"))?.is_truthy()? {
        return Ok(());
    }
    Err(Error::UnsupportedType(format!("{who} is a view that negates on reading; use its .resolve_neg()")).into())
}

impl Parameters {
    pub(super) fn new(py: Python<'_>, simulate: bool) -> PyResult<Self> {
        Ok(Self {
            reader: TensorReader::new(py)?,
            slots: Vec::new(),
            bindings: Vec::new(),
            index: FxHashMap::default(),
            unchecked: false,
            relaid: Vec::new(),
            next_use: Vec::new(),
            lanes: Vec::new(),
            simulate,
        })
    }

    fn place_of(&self, place: Place) -> Place {
        if self.simulate && place == Place::Host { Place::Simulated } else { place }
    }

    pub(super) fn find(&self, parameter: &Bound<'_, PyAny>) -> Option<usize> {
        self.index.get(&address(parameter)).copied()
    }

    pub(super) fn slot_of(&self, parameter: &Bound<'_, PyAny>) -> PyResult<usize> {
        let not_bound = || Error::InvalidValue("the parameter has no state in this optimizer".into()).into();
        self.find(parameter).ok_or_else(not_bound)
    }

    /// Forgets everything, for the garbage collector.
    pub(super) fn clear(&mut self) {
        self.index.clear();
        self.bindings.clear();
        self.slots.clear();
    }

    /// Makes the slots of parameters that have none, and the planes of those that now want amsgrad: all of them or, if one
    /// is refused, none.
    pub(super) fn bind(
        &mut self,
        groups: &Bound<'_, PyList>,
        entries: Vec<BindEntry<'_>>,
        arena: &mut Arena,
        pool: &WorkerPool,
        offload: Option<bool>,
        pin: &mut dyn FnMut(Place, &Slab) -> PyResult<()>,
    ) -> PyResult<()> {
        let mut fresh: Vec<(SlotSpec, Binding)> = Vec::new();
        let mut widened = Vec::new();
        let mut seen = FxHashSet::default();
        for (parameter, name, number, full_master, bf16_moments, amsgrad, resident) in entries {
            if !seen.insert(address(&parameter)) {
                continue;
            }
            if let Some(slot) = self.find(&parameter) {
                if let Some(planes) = resident {
                    self.bindings[slot].resident = Some(Resident::new(&self.reader, &planes)?);
                    self.slots[slot].spec.amsgrad = amsgrad;
                    self.relaid.push(slot);
                } else if amsgrad && !self.slots[slot].spec.amsgrad {
                    widened.push(slot);
                }
                continue;
            }
            let read = |weight: RawTensor, shape: &Shape<'_>| Ok((weight, shape.layout()));
            let (mut weight, layout) = self.reader.read(&parameter, Role::Parameter, &|| name.clone(), read)?;
            weight.place = self.place_of(weight.place);
            refuse_overlap(&name, &layout)?;
            refuse_negated(&self.reader.local(&parameter)?, &name)?;
            let state = layout.dense_like();
            let mut binding = Binding::new(&parameter, &weight, layout, &state);
            binding.resident = resident.map(|planes| Resident::new(&self.reader, &planes)).transpose()?;
            let moments = if bf16_moments { MomentDType::Bf16 } else { MomentDType::F32 };
            let weight = kind_of(weight.dtype, full_master);
            fresh.push((SlotSpec { name: name.into(), number, layout: state, weight, moments, amsgrad }, binding));
        }
        self.refuse_shared(groups, &fresh)?;

        // A slab for each place: a device's is pinned.
        let mut places: Vec<Place> = fresh.iter().map(|(_, binding)| binding.place).collect();
        places.extend(widened.iter().map(|&slot| self.bindings[slot].place));
        places.sort_unstable();
        places.dedup();
        let mut slabs = Vec::with_capacity(places.len());
        for place in places {
            let mut bytes = 0_usize;
            for (spec, binding) in fresh.iter().filter(|(_, binding)| binding.place == place) {
                let planes = if binding.resident.is_some() { plane_bytes::<f64>(1)? } else { spec.bytes()? };
                bytes = bytes.saturating_add(planes);
                if let Some(dtype) = offload_dtype(offload, spec, binding) {
                    bytes = bytes.saturating_add(plane_bytes::<u8>(spec.layout.numel() * dtype.size())?);
                }
            }
            for &slot in widened.iter().filter(|&&slot| self.bindings[slot].place == place) {
                let spec = &self.slots[slot].spec;
                bytes = bytes.saturating_add(SlotSpec { amsgrad: true, ..spec.clone() }.bytes()? - spec.bytes()?);
            }
            let slab = arena.slab(bytes, pool)?;
            pin(place, &slab)?;
            slabs.push((place, slab));
        }
        for (place, slab) in &mut slabs {
            let (here, elsewhere) = fresh.into_iter().partition(|(_, binding)| binding.place == *place);
            fresh = elsewhere;
            let (resident, here): (Vec<_>, Vec<_>) =
                here.into_iter().partition(|(_, binding)| binding.resident.is_some());
            let (specs, mut bindings): (Vec<_>, Vec<Binding>) = here.into_iter().unzip();
            let mut slots = Slot::carve_all(specs, slab);
            for (spec, binding) in resident {
                slots.push(Slot::elsewhere(spec, slab));
                bindings.push(binding);
            }
            for (slot, mut binding) in slots.into_iter().zip(bindings) {
                binding.offloaded = offload_dtype(offload, &slot.spec, &binding).map(|dtype| {
                    let plane = slab.carve(slot.spec.layout.numel() * dtype.size());
                    Offloaded { plane, dtype, count: 0 }
                });
                self.index.insert(binding.parameter.as_ptr() as usize, self.slots.len());
                self.next_use.push(slot.spec.number % (1 << NUMBER_BITS));
                self.slots.push(slot);
                self.bindings.push(binding);
            }
            for &slot in widened.iter().filter(|&&slot| self.bindings[slot].place == *place) {
                self.slots[slot].add_amsgrad(slab);
                self.relaid.push(slot);
            }
        }
        Ok(())
    }

    /// Refuses, by name, parameters of the groups that share memory as they are now: those that are bound and those about
    /// to be. What the optimizer no longer lists does not count.
    fn refuse_shared(&self, groups: &Bound<'_, PyList>, fresh: &[(SlotSpec, Binding)]) -> PyResult<()> {
        let py = groups.py();
        let mut listed = FxHashSet::default();
        for_each_parameter(groups, |_, parameter| {
            listed.insert(address(&parameter));
            Ok(())
        })?;
        let mut tensors = Vec::new();
        for (slot, binding) in self.slots.iter().zip(&self.bindings) {
            if !listed.contains(&(binding.parameter.as_ptr() as usize)) {
                continue;
            }
            let name = || slot.spec.name.to_string();
            let read = |weight: RawTensor, shape: &Shape<'_>| Ok((weight, shape.layout()));
            // One that cannot be read any more is refused when it is stepped.
            if let Ok((weight, layout)) = self.reader.read(binding.parameter.bind(py), Role::Parameter, &name, read) {
                let name = &slot.spec.name;
                tensors.push(Extent { name, is_grad: false, data: weight.data, size: weight.dtype.size(), layout });
            }
        }
        tensors.extend(fresh.iter().map(|(spec, binding)| Extent {
            name: &spec.name,
            is_grad: false,
            data: binding.data,
            size: dtype_of(spec.weight).size(),
            layout: binding.layout.clone(),
        }));
        refuse_first_shared(&mut tensors, |_, _| true, "give the optimizer one of them")
    }

    /// Reads a bound parameter and brings its slot up to date with its strides.
    pub(super) fn weight(&mut self, index: usize, parameter: &Bound<'_, PyAny>) -> PyResult<RawTensor> {
        let (spec, binding) = (&self.slots[index].spec, &self.bindings[index]);
        let name = || spec.name.to_string();
        let (weight, changed) = self.reader.read(parameter, Role::Parameter, &name, |weight, shape| {
            Ok((weight, (!shape.is(&binding.layout)).then(|| shape.layout())))
        })?;
        let bound = dtype_of(spec.weight);
        if weight.dtype != bound {
            let (name, was, is) = (&spec.name, bound.name(), weight.dtype.name());
            let message =
                format!("{name}: its state was made for {was} and it is {is} now; build a new optimizer for it");
            return Err(Error::UnsupportedType(message).into());
        }
        if binding.resident.is_some() && (changed.is_some() || self.place_of(weight.place) != binding.place) {
            let message =
                "its state is kept on its device (device_state_bytes), and it has moved or changed its strides";
            return Err(Error::InvalidValue(format!("{}: {message}; build a new optimizer for it", spec.name)).into());
        }
        self.unchecked |= changed.is_some() || weight.data != binding.data;
        if binding.may_be_negated || changed.is_some() {
            refuse_negated(&self.reader.local(parameter)?, &spec.name)?;
        }
        if let Some(layout) = changed {
            self.follow(parameter.py(), index, layout)?;
        }
        let weight = RawTensor { place: self.place_of(weight.place), ..weight };
        let binding = &mut self.bindings[index];
        (binding.data, binding.place) = (weight.data, weight.place);
        Ok(weight)
    }

    /// Takes over a parameter's new strides; its planes are reordered if they no longer have its order.
    fn follow(&mut self, py: Python<'_>, index: usize, layout: Layout) -> PyResult<()> {
        let (slot, binding) = (&mut self.slots[index], &mut self.bindings[index]);
        if layout.sizes != slot.spec.layout.sizes {
            let (name, was, is) = (&slot.spec.name, &slot.spec.layout.sizes, &layout.sizes);
            let message = format!("{name}: its state has shape {was:?} and it has shape {is:?} now");
            return Err(Error::InvalidValue(message).into());
        }
        refuse_overlap(&slot.spec.name, &layout)?;
        let state = layout.dense_like();
        if state != slot.spec.layout {
            if binding.is_offloaded() {
                let message = "its strides have changed since its gradient was offloaded: zero_grad() drops that";
                return Err(Error::InvalidValue(format!("{}: {message}", slot.spec.name)).into());
            }
            // The planes may still be on their way home.
            let lanes: Vec<_> = self.lanes.iter().filter_map(Weak::upgrade).collect();
            py.detach(|| lanes.iter().try_for_each(|lanes| lanes.synchronize()))?;
            slot.follow(state)?;
            self.relaid.push(index);
        }
        binding.lay_out(layout, &slot.spec.layout);
        Ok(())
    }

    /// Reads a gradient and checks that it fits its parameter.
    fn gradient(&mut self, index: usize, grad: &Bound<'_, PyAny>, unscale: bool) -> PyResult<(RawTensor, Walks, bool)> {
        let Self { reader, slots, bindings, .. } = self;
        let (slot, binding) = (&slots[index], &mut bindings[index]);
        let name = &slot.spec.name;
        reader.read(grad, Role::Gradient, &|| name.to_string(), |tensor, shape| {
            if !shape.has_sizes(&slot.spec.layout.sizes) {
                let (sizes, found) = (&slot.spec.layout.sizes, &shape.sizes);
                let message = format!("the gradient of {name} has shape {found:?}, the parameter {sizes:?}");
                return Err(Error::InvalidValue(message).into());
            }
            let own_layout = shape.is(&binding.layout);
            if !own_layout || binding.may_be_negated {
                refuse_negated(grad, &format!("the gradient of {name}"))?;
            }
            if unscale && !own_layout && shape.layout().overlaps_itself() {
                let message = format!("the gradient of {name} cannot be unscaled in place: its elements share memory");
                return Err(Error::InvalidValue(message).into());
            }
            Ok((tensor, binding.grad_walks(&slot.spec.layout, shape), own_layout))
        })
    }

    /// Reads and checks a parameter's share of a step; `None` without a gradient.
    pub(super) fn job<'py>(
        &mut self,
        index: usize,
        parameter: &Bound<'py, PyAny>,
        grad: &Bound<'py, PyAny>,
        config: AdamWConfig,
        unscale: bool,
    ) -> PyResult<Job<'py>> {
        let grad = self.reader.local(grad)?;
        let weight = self.weight(index, parameter)?;
        let (mut grad_tensor, grad_walks, grad_has_own_layout) = self.gradient(index, &grad, unscale)?;
        grad_tensor.place = self.place_of(grad_tensor.place);
        if grad_tensor.place != weight.place {
            let (name, place, found) = (&self.slots[index].spec.name, weight.place, grad_tensor.place);
            let message = format!("{name}: it is on {place} and its gradient on {found}");
            return Err(Error::InvalidValue(message).into());
        }
        let (holds, stand_in) = (Holds::default(), None);
        let original_grad = grad_tensor.data;
        Ok(Job {
            weight,
            grad: grad_tensor,
            original_grad,
            grad_walks,
            grad_has_own_layout,
            keep: grad,
            config,
            holds,
            is_offloaded: false,
            stand_in,
        })
    }

    /// A parameter's share of a step whose gradient has been offloaded.
    fn offloaded_job<'py>(
        &mut self,
        index: usize,
        parameter: &Bound<'py, PyAny>,
        grad: &Bound<'py, PyAny>,
        config: AdamWConfig,
    ) -> PyResult<Job<'py>> {
        let weight = self.weight(index, parameter)?;
        let (name, binding) = (&self.slots[index].spec.name, &self.bindings[index]);
        if !grad.is_none() {
            let message = "it has a gradient beside the one that was offloaded in backward (offload_gradients=True)";
            let cure = "of a backward too many, of one that reached small parameters alone, or set by hand? zero_grad() of the \
                        optimizer drops both";
            return Err(Error::InvalidValue(format!("{name}: {message}, {cure}")).into());
        }
        let Some(offloaded) = &binding.offloaded else { return Err(Error::InvalidValue(name.to_string()).into()) };
        let data = offloaded.plane.share().0.as_ptr() as usize;
        let grad = RawTensor { data, dtype: offloaded.dtype, numel: weight.numel, place: weight.place };
        // In the order of the state, and for the norm in the logical order of that layout.
        let layout = &self.slots[index].spec.layout;
        Ok(Job {
            weight,
            grad,
            original_grad: data,
            grad_walks: Walks::new(layout, layout),
            grad_has_own_layout: true,
            keep: parameter.clone(),
            config,
            holds: Holds::default(),
            is_offloaded: true,
            stand_in: None,
        })
    }

    /// Readies a job for a device's lanes: tensors that are not in the order of the state are copied, by torch and on its
    /// current stream, and all are held until the update has landed.
    pub(super) fn ready_for_device<'py>(
        &self,
        index: usize,
        parameter: &Bound<'py, PyAny>,
        job: &mut Job<'py>,
    ) -> PyResult<()> {
        let layout = &self.slots[index].spec.layout;
        let copy = |tensor: &Bound<'py, PyAny>| -> PyResult<(Bound<'py, PyAny>, usize)> {
            let py = tensor.py();
            let tensor = tensor.call_method0(intern!(py, "detach"))?;
            let options = PyDict::new(py);
            for name in ["dtype", "device"] {
                options.set_item(name, tensor.getattr(name)?)?;
            }
            let sizes = PyTuple::new(py, &layout.sizes)?;
            let strides = PyTuple::new(py, &layout.strides)?;
            let dense =
                py.import(intern!(py, "torch"))?.call_method("empty_strided", (sizes, strides), Some(&options))?;
            dense.call_method1(intern!(py, "copy_"), (&tensor,))?;
            let address = dense.call_method0(intern!(py, "data_ptr"))?.extract()?;
            Ok((dense, address))
        };
        if job.is_offloaded {
            // The engine holds it.
        } else if job.grad_walks.is_dense() {
            job.holds.grad = Some(self.reader.hold(&job.keep)?);
        } else {
            let (dense, address) = copy(&job.keep)?;
            job.grad.data = address;
            job.holds.grad = Some(self.reader.hold(&dense)?);
        }
        if self.bindings[index].walks.is_dense() {
            job.holds.weight = Some(self.reader.hold(parameter)?);
        } else {
            let (dense, address) = copy(&self.reader.local(parameter)?)?;
            job.weight.data = address;
            job.holds.weight = Some(self.reader.hold(&dense)?);
            job.stand_in = Some(dense);
        }
        Ok(())
    }

    /// Reads and checks all that a step needs, by slot; changes nothing but the order of planes.
    pub(super) fn collect<'py>(
        &mut self,
        groups: &Bound<'py, PyList>,
        arena: &Arena,
        unscale: bool,
    ) -> PyResult<Vec<Option<Job<'py>>>> {
        let py = groups.py();
        let mut jobs: Vec<Option<Job<'py>>> = Vec::new();
        jobs.resize_with(self.slots.len(), || None);
        let mut current: Option<(Bound<'py, PyDict>, AdamWConfig)> = None;
        for_each_parameter(groups, |group, parameter| {
            let grad = parameter.getattr(intern!(py, "grad"))?;
            let offloaded = self.find(&parameter).filter(|&slot| self.bindings[slot].is_offloaded());
            if grad.is_none() && offloaded.is_none() {
                return Ok(());
            }
            let config = match &current {
                Some((of, config)) if of.is(group) => *config,
                _ => current.insert((group.clone(), config(group)?)).1,
            };
            let index = self.slot_of(&parameter)?;
            if jobs[index].is_some() {
                return Ok(()); // listed twice: one update
            }
            if offloaded.is_some() {
                jobs[index] = Some(self.offloaded_job(index, &parameter, &grad, config)?);
                return Ok(());
            }
            jobs[index] = Some(self.job(index, &parameter, &grad, config, unscale)?);
            Ok(())
        })?;
        if self.unchecked {
            self.refuse_shared(groups, &[])?;
            self.unchecked = false;
        }
        refuse_aliased_gradients(&self.slots, &self.bindings, &jobs, arena, unscale)?;
        Ok(jobs)
    }
}
