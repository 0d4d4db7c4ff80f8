//! From torch parameters to slots: binding them, reading them and their gradients anew at each step, following moves and
//! new strides, and refusing by name what cannot be updated.

use super::groups::{config, for_each_parameter};
use super::tensor::{DType, HostTensor, Role, Shape, TensorReader};
use crate::engine::{MomentDType, Slot, SlotSpec, WeightKind};
use crate::error::Error;
use crate::kernel::AdamWConfig;
use crate::memory::{Arena, Layout, Walks, share_memory};
use crate::pool::WorkerPool;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::collections::{HashMap, HashSet};

/// What is remembered of a parameter between steps.
pub(super) struct Binding {
    /// The parameter itself: kept alive, so that its address names it.
    pub(super) parameter: Py<PyAny>,
    /// Address of its elements when it was last read.
    data: usize,
    layout: Layout,
    pub(super) walks: Walks,
    /// Whether the layout could be that of a view that negates on reading: a part of complex numbers, two elements apart.
    may_be_negated: bool,
    /// The layout and walks of its latest gradient, if they are not the parameter's own.
    grad: Option<(Layout, Walks)>,
}

impl Binding {
    fn new(parameter: &Bound<'_, PyAny>, data: usize, layout: Layout, state: &Layout) -> Self {
        let parameter = parameter.clone().unbind();
        let (walks, empty) = (Walks::default(), Layout::default());
        let mut binding = Self { parameter, data, layout: empty, walks, may_be_negated: true, grad: None };
        binding.lay_out(layout, state);
        binding
    }

    /// Takes over a layout of the parameter, whose state has the layout `state`.
    fn lay_out(&mut self, layout: Layout, state: &Layout) {
        self.walks = Walks::new(state, &layout);
        self.may_be_negated = layout.numel() == 1 || !layout.is_dense();
        self.layout = layout;
        self.grad = None;
    }

    /// The walks of a gradient of this shape.
    fn grad_walks(&mut self, state: &Layout, shape: &Shape<'_>) -> Walks {
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
    fn grad_layout(&self, is_own: bool) -> &Layout {
        self.grad.as_ref().filter(|_| !is_own).map_or(&self.layout, |(layout, _)| layout)
    }
}

/// A parameter's share of a step, read and checked.
pub(super) struct Job<'py> {
    pub(super) weight: HostTensor,
    pub(super) grad: HostTensor,
    pub(super) grad_walks: Walks,
    grad_has_own_layout: bool,
    /// Keeps the gradient's memory while the interpreter is released.
    pub(super) keep: Bound<'py, PyAny>,
    pub(super) config: AdamWConfig,
}

/// What `bind` is told of a parameter: itself, its name, its number in the optimizer, whether its master is full, whether
/// its moments are bf16, and amsgrad.
pub(super) type BindEntry<'py> = (Bound<'py, PyAny>, String, u64, bool, bool, bool);

/// The parameters of one optimizer with their slots, by the order of binding.
pub(super) struct Parameters {
    pub(super) reader: TensorReader,
    pub(super) slots: Vec<Slot>,
    pub(super) bindings: Vec<Binding>,
    /// From a parameter's address to its slot.
    index: HashMap<usize, usize>,
    /// Whether a parameter has moved or changed its strides since all were last compared for shared memory.
    unchecked: bool,
    /// Slots whose planes have been reordered or joined by another since Python last took their tensors.
    pub(super) relaid: Vec<usize>,
}

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
    pub(super) fn new(py: Python<'_>) -> PyResult<Self> {
        Ok(Self {
            reader: TensorReader::new(py)?,
            slots: Vec::new(),
            bindings: Vec::new(),
            index: HashMap::new(),
            unchecked: false,
            relaid: Vec::new(),
        })
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
    ) -> PyResult<()> {
        let mut fresh: Vec<(SlotSpec, Binding)> = Vec::new();
        let mut widened = Vec::new();
        let mut seen = HashSet::new();
        for (parameter, name, number, full_master, bf16_moments, amsgrad) in entries {
            if !seen.insert(address(&parameter)) {
                continue;
            }
            if let Some(slot) = self.find(&parameter) {
                if amsgrad && !self.slots[slot].spec.amsgrad {
                    widened.push(slot);
                }
                continue;
            }
            let read = |weight: HostTensor, shape: &Shape<'_>| Ok((weight, shape.layout()));
            let (weight, layout) = self.reader.read(&parameter, Role::Parameter, &|| name.clone(), read)?;
            refuse_overlap(&name, &layout)?;
            refuse_negated(&parameter, &name)?;
            let state = layout.dense_like();
            let binding = Binding::new(&parameter, weight.data, layout, &state);
            let moments = if bf16_moments { MomentDType::Bf16 } else { MomentDType::F32 };
            let weight = kind_of(weight.dtype, full_master);
            fresh.push((SlotSpec { name, number, layout: state, weight, moments, amsgrad }, binding));
        }
        self.refuse_shared(groups, &fresh)?;

        let mut bytes = 0_usize;
        for (spec, _) in &fresh {
            bytes = bytes.saturating_add(spec.bytes()?);
        }
        for &slot in &widened {
            let spec = &self.slots[slot].spec;
            bytes = bytes.saturating_add(SlotSpec { amsgrad: true, ..spec.clone() }.bytes()? - spec.bytes()?);
        }
        let mut slab = arena.slab(bytes, pool)?;
        for (spec, binding) in fresh {
            self.index.insert(binding.parameter.as_ptr() as usize, self.slots.len());
            self.slots.push(Slot::carve(spec, &mut slab));
            self.bindings.push(binding);
        }
        for slot in widened {
            self.slots[slot].add_amsgrad(&mut slab);
            self.relaid.push(slot);
        }
        Ok(())
    }

    /// Refuses, by name, parameters of the groups that share memory as they are now: those that are bound and those about
    /// to be. What the optimizer no longer lists does not count.
    fn refuse_shared(&self, groups: &Bound<'_, PyList>, fresh: &[(SlotSpec, Binding)]) -> PyResult<()> {
        let py = groups.py();
        let mut listed = HashSet::new();
        for_each_parameter(groups, |_, parameter| {
            listed.insert(address(&parameter));
            Ok(())
        })?;
        let mut tensors = Vec::new();
        for (slot, binding) in self.slots.iter().zip(&self.bindings) {
            if !listed.contains(&(binding.parameter.as_ptr() as usize)) {
                continue;
            }
            let name = || slot.spec.name.clone();
            let read = |weight: HostTensor, shape: &Shape<'_>| Ok((weight, shape.layout()));
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
    pub(super) fn weight(&mut self, index: usize, parameter: &Bound<'_, PyAny>) -> PyResult<HostTensor> {
        let (spec, binding) = (&self.slots[index].spec, &self.bindings[index]);
        let name = || spec.name.clone();
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
        self.unchecked |= changed.is_some() || weight.data != binding.data;
        if binding.may_be_negated || changed.is_some() {
            refuse_negated(parameter, &spec.name)?;
        }
        if let Some(layout) = changed {
            self.follow(index, layout)?;
        }
        self.bindings[index].data = weight.data;
        Ok(weight)
    }

    /// Takes over a parameter's new strides; its planes are reordered if they no longer have its order.
    fn follow(&mut self, index: usize, layout: Layout) -> PyResult<()> {
        let (slot, binding) = (&mut self.slots[index], &mut self.bindings[index]);
        if layout.sizes != slot.spec.layout.sizes {
            let (name, was, is) = (&slot.spec.name, &slot.spec.layout.sizes, &layout.sizes);
            let message = format!("{name}: its state has shape {was:?} and it has shape {is:?} now");
            return Err(Error::InvalidValue(message).into());
        }
        refuse_overlap(&slot.spec.name, &layout)?;
        let state = layout.dense_like();
        if state != slot.spec.layout {
            slot.follow(state)?;
            self.relaid.push(index);
        }
        binding.lay_out(layout, &slot.spec.layout);
        Ok(())
    }

    /// Reads a gradient and checks that it fits its parameter.
    fn gradient(
        &mut self,
        index: usize,
        grad: &Bound<'_, PyAny>,
        unscale: bool,
    ) -> PyResult<(HostTensor, Walks, bool)> {
        let Self { reader, slots, bindings, .. } = self;
        let (slot, binding) = (&slots[index], &mut bindings[index]);
        let name = &slot.spec.name;
        reader.read(grad, Role::Gradient, &|| name.clone(), |tensor, shape| {
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
            if grad.is_none() {
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
            let weight = self.weight(index, &parameter)?;
            let (grad_tensor, grad_walks, grad_has_own_layout) = self.gradient(index, &grad, unscale)?;
            jobs[index] = Some(Job { weight, grad: grad_tensor, grad_walks, grad_has_own_layout, keep: grad, config });
            Ok(())
        })?;
        if self.unchecked {
            self.refuse_shared(groups, &[])?;
            self.unchecked = false;
        }
        self.refuse_aliased_gradients(&jobs, arena, unscale)?;
        Ok(jobs)
    }

    /// Refuses gradients that share memory with a weight or with state, which the step writes while it reads them; and with
    /// each other, if it unscales them in place.
    fn refuse_aliased_gradients(&self, jobs: &[Option<Job<'_>>], arena: &Arena, unscale: bool) -> PyResult<()> {
        // Spans first, by address and without a copy of any layout: that settles every ordinary step.
        let mut spans: Vec<(usize, usize, usize, bool)> = Vec::with_capacity(2 * jobs.len());
        for (index, job) in jobs.iter().enumerate() {
            let Some(job) = job else { continue };
            let binding = &self.bindings[index];
            let end = |tensor: &HostTensor, layout: &Layout| tensor.data + layout.span() * tensor.dtype.size();
            let (weight_end, grad_end) =
                (end(&job.weight, &binding.layout), end(&job.grad, binding.grad_layout(job.grad_has_own_layout)));
            spans.push((job.weight.data, weight_end, index, false));
            spans.push((job.grad.data, grad_end, index, true));
            if arena.holds(job.grad.data, grad_end) || arena.holds(job.weight.data, weight_end) {
                let name = &self.slots[index].spec.name;
                let message = format!("{name}: it or its gradient lies in this optimizer's state; clone it first");
                return Err(Error::InvalidValue(message).into());
            }
        }
        spans.sort_unstable();
        let mut reach = 0;
        let apart = spans.iter().all(|&(start, end, ..)| {
            let apart = start >= reach || start == end;
            reach = reach.max(end);
            apart
        });
        if apart {
            return Ok(());
        }
        let mut extents = Vec::with_capacity(spans.len());
        for (data, _, index, is_grad) in spans {
            let Some(job) = &jobs[index] else { continue };
            let binding = &self.bindings[index];
            let (tensor, layout) = if is_grad {
                (&job.grad, binding.grad_layout(job.grad_has_own_layout))
            } else {
                (&job.weight, &binding.layout)
            };
            let name = &self.slots[index].spec.name;
            extents.push(Extent { name, is_grad, data, size: tensor.dtype.size(), layout: layout.clone() });
        }
        // Two weights have been compared when they came or moved; two gradients that are only read may share.
        let matters =
            |a: &Extent<'_>, b: &Extent<'_>| if a.is_grad && b.is_grad { unscale } else { a.is_grad || b.is_grad };
        refuse_first_shared(&mut extents, matters, "clone one of them")
    }
}

/// What a tensor occupies.
struct Extent<'a> {
    name: &'a str,
    is_grad: bool,
    data: usize,
    size: usize,
    layout: Layout,
}

impl Extent<'_> {
    fn end(&self) -> usize {
        self.data + self.layout.span() * self.size
    }

    fn shares_memory(&self, other: &Self) -> bool {
        share_memory((self.data, &self.layout, self.size), (other.data, &other.layout, other.size))
    }
}

impl std::fmt::Display for Extent<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.is_grad { "the gradient of " } else { "" })?;
        f.write_str(self.name)
    }
}

/// Refuses, by name, the first two tensors that share memory and matter to each other.
fn refuse_first_shared(
    tensors: &mut [Extent<'_>],
    matters: impl Fn(&Extent<'_>, &Extent<'_>) -> bool,
    cure: &str,
) -> PyResult<()> {
    tensors.sort_by_key(|tensor| tensor.data);
    // Each is compared with those before it whose spans reach it.
    let mut reaching: Vec<&Extent<'_>> = Vec::new();
    for tensor in &*tensors {
        reaching.retain(|other| other.end() > tensor.data);
        if let Some(other) = reaching.iter().find(|other| matters(other, tensor) && other.shares_memory(tensor)) {
            return Err(Error::InvalidValue(format!("{other} and {tensor} share memory; {cure}")).into());
        }
        reaching.push(tensor);
    }
    Ok(())
}
