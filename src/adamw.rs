//! The optimizer for Rust programs: parameters are slices, named once and handed to each step.

use crate::engine::{self, MomentDType, Moments, Slot, SlotSpec, StepOptions, StepReport, Update, WeightKind};
use crate::error::{Error, Result};
use crate::kernel::{AdamWConfig, Isa};
use crate::memory::{Arena, Layout};
use crate::pool::WorkerPool;
use std::sync::Arc;

/// AdamW over fp32 slices (Adam with `decoupled_weight_decay: false`).
#[derive(Debug)]
pub struct AdamW {
    pool: Arc<WorkerPool>,
    isa: Isa,
    arena: Arena,
    config: AdamWConfig,
    slots: Vec<Slot>,
    /// Settings of the whole step: chunk size, clipping, policy for non-finite gradients.
    pub options: StepOptions,
}

/// A registered parameter of one [`AdamW`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ParameterId(usize);

impl AdamW {
    /// An optimizer without parameters, working on `pool`.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if a value of `config` is out of range, or `OUTBOARD_ISA` names no usable level.
    pub fn new(pool: Arc<WorkerPool>, config: AdamWConfig) -> Result<Self> {
        config.validate()?;
        let isa = Isa::current()?;
        Ok(Self { pool, isa, arena: Arena::default(), config, slots: Vec::new(), options: StepOptions::default() })
    }

    /// Adds a parameter of `len` elements and makes its state, all zeros, in a slab of its own; for many parameters,
    /// [`Self::register_all`] takes one slab.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Forked`].
    pub fn register(&mut self, name: &str, len: usize) -> Result<ParameterId> {
        Ok(self.register_all([(name, len)])?[0])
    }

    /// Adds parameters, each a name and a number of elements, and makes their state, all zeros, in one slab.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Forked`]: none has been added.
    pub fn register_all<'a>(
        &mut self,
        parameters: impl IntoIterator<Item = (&'a str, usize)>,
    ) -> Result<Vec<ParameterId>> {
        let first = self.slots.len();
        let specs: Vec<SlotSpec> =
            parameters.into_iter().zip(first..).map(|((name, len), number)| self.spec(name, number, len)).collect();
        let mut bytes = 0_usize;
        for spec in &specs {
            bytes = bytes.saturating_add(spec.bytes()?);
        }
        let mut slab = self.arena.slab(bytes, &self.pool)?;
        self.slots.extend(Slot::carve_all(specs, &mut slab));
        Ok((first..self.slots.len()).map(ParameterId).collect())
    }

    fn spec(&self, name: &str, number: usize, len: usize) -> SlotSpec {
        SlotSpec {
            name: name.into(),
            number: number as u64,
            layout: Layout::contiguous(len),
            weight: WeightKind::F32,
            moments: MomentDType::F32,
            amsgrad: self.config.amsgrad,
        }
    }

    /// The settings, to change between steps (a schedule's learning rate).
    pub fn config_mut(&mut self) -> &mut AdamWConfig {
        &mut self.config
    }

    /// Updates the given parameters, each at most once, with their gradients.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for an unknown or repeated id, a length that is not the registered one or a setting out of
    /// range; [`Error::NonFinite`], [`Error::Poisoned`], [`Error::Forked`]: nothing has been changed. [`Error::Worker`]: see
    /// [`engine::step`].
    pub fn step<'a>(
        &mut self,
        parameters: impl IntoIterator<Item = (ParameterId, &'a mut [f32], &'a [f32])>,
    ) -> Result<StepReport> {
        self.config.validate()?;
        let mut jobs: Vec<Option<(&mut [f32], &[f32])>> = Vec::new();
        jobs.resize_with(self.slots.len(), || None);
        for (ParameterId(index), weight, grad) in parameters {
            match jobs.get_mut(index) {
                None => return Err(Error::InvalidValue(format!("parameter {index} is not registered"))),
                Some(Some(_)) => {
                    let name = &self.slots[index].spec.name;
                    return Err(Error::InvalidValue(format!("{name} is given twice")));
                }
                Some(job) => *job = Some((weight, grad)),
            }
        }
        let config = self.config;
        let updates = self.slots.iter_mut().zip(jobs).filter_map(|(slot, job)| {
            job.map(|(weight, grad)| Update { slot, weight: weight.into(), grad: grad.into(), config })
        });
        engine::step(&self.pool, self.isa, updates.collect(), &self.options)
    }

    /// Steps that a parameter has taken.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for an unknown id.
    pub fn steps(&self, id: ParameterId) -> Result<u64> {
        Ok(self.slot(id)?.steps() as u64)
    }

    /// A parameter's first and second moments.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for an unknown id.
    pub fn moments(&self, id: ParameterId) -> Result<(&[f32], &[f32])> {
        match &self.slot(id)?.moments {
            Moments::F32(planes) => Ok((planes.exp_avg.as_slice(), planes.exp_avg_sq.as_slice())),
            Moments::Bf16(_) => unreachable!("`register` makes fp32 moments"),
        }
    }

    fn slot(&self, id: ParameterId) -> Result<&Slot> {
        self.slots.get(id.0).ok_or_else(|| Error::InvalidValue(format!("parameter {} is not registered", id.0)))
    }
}
