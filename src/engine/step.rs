//! One step over any number of parameters: policies first (norm, clipping, non-finite gradients), while nothing has been
//! changed; then every parameter, chunk by chunk, on the worker pool.

use super::chunk::Chunk;
use super::norm::squared_norms;
use super::slot::Slot;
use super::views::{GradView, WeightView};
use crate::error::{Error, Failure, Result};
use crate::kernel::{AdamWConfig, Constants, DefaultFloatEnvironment, Isa, Noise};
use crate::pool::WorkerPool;

/// Elements in a chunk, unless the caller says otherwise. 1 MiB of each fp32 plane: large enough that handing it out
/// costs nothing, small enough that the last chunks of a step even out over the threads.
pub const DEFAULT_CHUNK_ELEMS: usize = 256 * 1024;

/// What to do about infinite and NaN gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonFinite {
    /// Let them through, as torch does.
    #[default]
    Propagate,
    /// Change nothing in such a step.
    Skip,
    /// Change nothing and return [`Error::NonFinite`].
    Raise,
}

/// Settings of a whole step.
#[derive(Clone, Debug)]
pub struct StepOptions {
    /// The largest number of elements that one worker takes at once, at least 1.
    pub chunk_elems: usize,
    /// Scale gradients down so that their joint norm is at most this.
    pub max_grad_norm: Option<f64>,
    /// Compute the norm even if nothing is clipped.
    pub compute_grad_norm: bool,
    /// Policy for non-finite gradients.
    pub nonfinite: NonFinite,
    /// Divide gradients by this first (a gradient scaler's scale), and write them back where they may be written.
    pub grad_scale: Option<f32>,
    /// The scaler has found infinities: change nothing.
    pub found_inf: bool,
    /// Seed of the noise of stochastic rounding.
    pub seed: u64,
    /// For tests of what failures do: the chunks that hold these elements panic, each an index of an update and one of an
    /// element.
    #[doc(hidden)]
    pub fail_at: Vec<(usize, usize)>,
}

impl Default for StepOptions {
    fn default() -> Self {
        Self {
            chunk_elems: DEFAULT_CHUNK_ELEMS,
            max_grad_norm: None,
            compute_grad_norm: false,
            nonfinite: NonFinite::Propagate,
            grad_scale: None,
            found_inf: false,
            seed: 0,
            fail_at: Vec::new(),
        }
    }
}

/// One parameter's share of a step.
#[derive(Debug)]
pub struct Update<'a> {
    /// Its state.
    pub slot: &'a mut Slot,
    /// The weight, of the slot's kind and layout.
    pub weight: WeightView<'a>,
    /// The gradient, of any dtype and strides.
    pub grad: GradView<'a>,
    /// Its group's settings.
    pub config: AdamWConfig,
}

/// What a step did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepReport {
    /// The norm of all gradients together, unscaled and before clipping, if it was computed.
    pub grad_norm: Option<f64>,
    /// Whether the step changed nothing because of non-finite gradients.
    pub skipped: bool,
    /// Parameters updated.
    pub parameters: usize,
    /// Elements updated.
    pub elements: usize,
}

/// Steps every parameter of `updates` once.
///
/// # Errors
/// Before anything has been changed: [`Error::Forked`], [`Error::Poisoned`], [`Error::NonFinite`],
/// [`Error::InvalidValue`] for lengths, kinds or a layout that do not fit. [`Error::Worker`] after every other parameter has been updated; those it
/// names are poisoned.
pub fn step(pool: &WorkerPool, isa: Isa, updates: Vec<Update<'_>>, options: &StepOptions) -> Result<StepReport> {
    check(pool, &updates, options)?;
    // For the constants, the clip factor and the last additions of the norm, which are formed on this thread.
    let _environment = DefaultFloatEnvironment::enter();
    let squares = if options.want_norm() { squared_norms_of(pool, isa, &updates, options)? } else { Vec::new() };
    let verdict = judge(options, &squares, |index| updates[index].slot.spec.name.to_string())?;
    if verdict.skipped {
        return Ok(StepReport { grad_norm: verdict.grad_norm, skipped: true, ..StepReport::default() });
    }
    update(pool, isa, updates, &verdict, options)
}

impl StepOptions {
    /// Whether a step has to look at all gradients before it changes anything.
    pub fn want_norm(&self) -> bool {
        !self.found_inf && (self.wants_value() || self.nonfinite != NonFinite::Propagate)
    }

    fn wants_value(&self) -> bool {
        self.max_grad_norm.is_some() || self.compute_grad_norm
    }
}

/// What the policies make of a step's gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verdict {
    /// What gradients are multiplied by.
    pub clip: f32,
    /// The norm of all gradients together, if it was wanted.
    pub grad_norm: Option<f64>,
    /// Whether the step changes nothing.
    pub skipped: bool,
}

/// Applies the policies, given the sums of squares of all gradients in the order of parameters (none unless
/// [`StepOptions::want_norm`]).
///
/// # Errors
/// [`Error::NonFinite`], with the names that `name` gives by position.
pub fn judge(options: &StepOptions, squares: &[f64], name: impl Fn(usize) -> String) -> Result<Verdict> {
    let mut verdict = Verdict { clip: 1.0, grad_norm: None, skipped: options.found_inf };
    if !options.want_norm() {
        return Ok(verdict);
    }
    let norm = squares.iter().sum::<f64>().sqrt();
    verdict.grad_norm = options.wants_value().then_some(norm);
    if !norm.is_finite() {
        match options.nonfinite {
            NonFinite::Propagate => {}
            NonFinite::Skip => {
                verdict.skipped = true;
                return Ok(verdict);
            }
            NonFinite::Raise => {
                let bad = squares.iter().enumerate().filter(|(_, squares)| !squares.is_finite());
                return Err(Error::NonFinite { norm, parameters: bad.map(|(index, _)| name(index)).collect() });
            }
        }
    }
    verdict.clip = options.max_grad_norm.map_or(1.0, |max_norm| clip_factor(norm, max_norm));
    Ok(verdict)
}

/// The sum of squares of each update's gradient.
///
/// # Errors
/// [`Error::Worker`], [`Error::Forked`].
pub fn squared_norms_of(
    pool: &WorkerPool,
    isa: Isa,
    updates: &[Update<'_>],
    options: &StepOptions,
) -> Result<Vec<f64>> {
    let grads: Vec<&GradView<'_>> = updates.iter().map(|update| &update.grad).collect();
    squared_norms(pool, isa, &grads, options.grad_scale.unwrap_or(1.0))
}

/// Refuses, before anything is changed, what [`step`] refuses.
///
/// # Errors
/// As [`step`].
pub fn check(pool: &WorkerPool, updates: &[Update<'_>], options: &StepOptions) -> Result<()> {
    pool.check_process()?;
    validate(updates, options)
}

/// Updates every parameter of `updates`, which have been checked, as the policies say.
///
/// # Errors
/// [`Error::Worker`], as [`step`].
pub fn update(
    pool: &WorkerPool,
    isa: Isa,
    mut updates: Vec<Update<'_>>,
    verdict: &Verdict,
    options: &StepOptions,
) -> Result<StepReport> {
    let _environment = DefaultFloatEnvironment::enter();
    let report = StepReport {
        grad_norm: verdict.grad_norm,
        skipped: false,
        parameters: updates.len(),
        elements: updates.iter().map(|update| update.weight.len()).sum(),
    };
    let failures = run(pool, isa, &mut updates, verdict.clip, options)?;
    if failures.is_empty() { Ok(report) } else { Err(Error::Worker(failures)) }
}

/// torch's `clip_grad_norm_`: `min(1, max_norm / (norm + 1e-6))`, formed in f64 and rounded once. NaN stays NaN.
fn clip_factor(norm: f64, max_norm: f64) -> f32 {
    let factor = max_norm / (norm + 1e-6);
    (if factor > 1.0 { 1.0 } else { factor }) as f32
}

fn validate(updates: &[Update<'_>], options: &StepOptions) -> Result<()> {
    if options.chunk_elems == 0 {
        return Err(Error::InvalidValue("chunk_elems must be at least 1, not 0".into()));
    }
    if let Some(max_norm) = options.max_grad_norm.filter(|max| max.is_nan() || *max < 0.0) {
        return Err(Error::InvalidValue(format!("max_grad_norm must be at least 0, not {max_norm}")));
    }
    for Update { slot, weight, grad, config } in updates {
        let name = &slot.spec.name;
        if let Some(cause) = &slot.poisoned {
            return Err(Error::Poisoned { parameter: name.to_string(), cause: cause.clone() });
        }
        if !slot.is_for(weight) || !slot.is_whole() {
            let kind = slot.spec.weight;
            return Err(Error::InvalidValue(format!(
                "{name}: weight and planes do not fit its state, which is {kind:?}"
            )));
        }
        if config.amsgrad && !slot.spec.amsgrad {
            return Err(Error::InvalidValue(format!("{name}: amsgrad for state that was made without its plane")));
        }
        let expected = slot.spec.layout.numel();
        if (weight.len(), grad.len()) != (expected, expected) {
            let (weight, grad) = (weight.len(), grad.len());
            return Err(Error::InvalidValue(format!(
                "{name}: state of {expected} elements for a weight of {weight} and a gradient of {grad}"
            )));
        }
    }
    Ok(())
}

/// Updates everything and counts the step; failed parameters are poisoned and not counted.
fn run(
    pool: &WorkerPool,
    isa: Isa,
    updates: &mut Vec<Update<'_>>,
    clip: f32,
    options: &StepOptions,
) -> Result<Vec<Failure>> {
    let mut constants = ConstantsCache::default();
    let mut bundles = Bundles::new(options.chunk_elems);
    let mut slots = Vec::with_capacity(updates.len());
    for (index, Update { slot, weight, grad, config }) in std::mem::take(updates).into_iter().enumerate() {
        let Slot { spec, step, poisoned, .. } = &*slot;
        debug_assert!(poisoned.is_none());
        let steps = step.as_slice()[0] + 1.0;
        let noise = Noise::new(options.seed, steps as u64, spec.number);
        let constants = constants.get(&config, steps, clip);
        let len = weight.len();
        // The step count and the failure mark are written once all chunks are done, the planes by the chunks.
        let (planes, after) = slot.split_for_update(steps, config.amsgrad);
        slots.push(after);
        let whole = Chunk { update: index, first: 0, len, weight, grad, planes, constants, noise };
        whole.cut(options.chunk_elems, |chunk| bundles.push(chunk));
    }
    let bundles = bundles.finish();
    let failures = std::sync::Mutex::new(Vec::new());
    let broken = pool.for_each(bundles.into_iter(), |bundle| {
        for chunk in bundle {
            let (update, first, len) = (chunk.update, chunk.first, chunk.len);
            let fails = options
                .fail_at
                .iter()
                .any(|&(at, element)| at == update && (first..first + len.max(1)).contains(&element));
            let work = || {
                assert!(!fails, "failure asked for by a test");
                chunk.run(isa, options.grad_scale);
            };
            if let Err(cause) = crate::pool::attempt(work) {
                failures.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((update, first, len, cause));
            }
        }
    })?;
    debug_assert!(broken.is_empty(), "every chunk is attempted by itself");
    let mut failures = failures.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    failures.sort_unstable();
    let mut kept = Vec::with_capacity(failures.len());
    for (update, first, len, cause) in failures {
        slots[update].fail(&cause);
        kept.push(Failure { parameter: slots[update].name().to_owned(), first, len, cause });
    }
    slots.into_iter().for_each(super::slot::AfterUpdate::finish);
    Ok(kept)
}

/// Chunks in order, tiny ones bundled: a bundle is one item of work, of about `chunk_elems` elements.
struct Bundles<'a> {
    chunk_elems: usize,
    done: Vec<Vec<Chunk<'a>>>,
    open: Vec<Chunk<'a>>,
    open_elems: usize,
}

/// What handling a chunk costs, in elements: bounds a bundle of empty or one-element parameters.
const CHUNK_OVERHEAD_ELEMS: usize = 256;

impl<'a> Bundles<'a> {
    fn new(chunk_elems: usize) -> Self {
        Self { chunk_elems, done: Vec::new(), open: Vec::new(), open_elems: 0 }
    }

    fn push(&mut self, chunk: Chunk<'a>) {
        self.open_elems += chunk.len + CHUNK_OVERHEAD_ELEMS;
        self.open.push(chunk);
        if self.open_elems >= self.chunk_elems {
            self.close();
        }
    }

    fn close(&mut self) {
        if !self.open.is_empty() {
            self.done.push(std::mem::take(&mut self.open));
            self.open_elems = 0;
        }
    }

    fn finish(mut self) -> Vec<Vec<Chunk<'a>>> {
        self.close();
        self.done
    }
}

/// The constants of neighbouring parameters are mostly the same, and two `powf` cost more than a tiny update.
#[derive(Default)]
struct ConstantsCache {
    last: Option<(AdamWConfig, f64, Constants)>,
}

impl ConstantsCache {
    fn get(&mut self, config: &AdamWConfig, steps: f64, clip: f32) -> Constants {
        match &self.last {
            Some((last_config, last_steps, constants)) if last_config == config && *last_steps == steps => *constants,
            _ => {
                let constants = config.constants(steps, clip);
                self.last = Some((*config, steps, constants));
                constants
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clip_factors_are_torchs() {
        assert_eq!(clip_factor(2.0, 1.0), (1.0 / 2.000_001) as f32);
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert_eq!(clip_factor(0.0, f64::INFINITY), 1.0);
        assert_eq!(clip_factor(f64::INFINITY, 1.0), 0.0);
        assert!(clip_factor(f64::NAN, 1.0).is_nan(), "a NaN norm must not look like no clipping");
    }
}
