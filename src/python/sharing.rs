//! Tensors that share memory, found and refused by name.

use crate::error::Error;
use crate::memory::{Layout, share_memory};
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
