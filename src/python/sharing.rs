//! Tensors that share memory, found and refused by name.

use super::binding::{Binding, Job};
use super::tensor::RawTensor;
use crate::engine::Slot;
use crate::error::Error;
use crate::memory::{Arena, Layout, share_memory};
use pyo3::prelude::*;

/// What a tensor occupies.
pub(super) struct Extent<'a> {
    pub(super) name: &'a str,
    pub(super) is_grad: bool,
    pub(super) data: usize,
    pub(super) size: usize,
    pub(super) layout: Layout,
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
pub(super) fn refuse_first_shared(
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

/// Refuses gradients that share memory with a weight or with state, which the step writes while it reads them; and with
/// each other, if it unscales them in place.
pub(super) fn refuse_aliased_gradients(
    slots: &[Slot],
    bindings: &[Binding],
    jobs: &[Option<Job<'_>>],
    arena: &Arena,
    unscale: bool,
) -> PyResult<()> {
    // Spans first, by address and without a copy of any layout: that settles every ordinary step.
    let mut spans: Vec<(usize, usize, usize, bool)> = Vec::with_capacity(2 * jobs.len());
    for (index, job) in jobs.iter().enumerate() {
        let Some(job) = job else { continue };
        let binding = &bindings[index];
        let end = |tensor: &RawTensor, layout: &Layout| tensor.data + layout.span() * tensor.dtype.size();
        if job.is_offloaded {
            continue;
        }
        let (weight_end, grad_end) =
            (end(&job.weight, &binding.layout), end(&job.grad, binding.grad_layout(job.grad_has_own_layout)));
        spans.push((job.weight.data, weight_end, index, false));
        spans.push((job.grad.data, grad_end, index, true));
        if arena.holds(job.grad.data, grad_end) || arena.holds(job.weight.data, weight_end) {
            let name = &slots[index].spec.name;
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
        let binding = &bindings[index];
        let (tensor, layout) = if is_grad {
            (&job.grad, binding.grad_layout(job.grad_has_own_layout))
        } else {
            (&job.weight, &binding.layout)
        };
        let name = &slots[index].spec.name;
        extents.push(Extent { name, is_grad, data, size: tensor.dtype.size(), layout: layout.clone() });
    }
    // Two weights have been compared when they came or moved; two gradients that are only read may share.
    let matters =
        |a: &Extent<'_>, b: &Extent<'_>| if a.is_grad && b.is_grad { unscale } else { a.is_grad || b.is_grad };
    refuse_first_shared(&mut extents, matters, "clone one of them")
}
