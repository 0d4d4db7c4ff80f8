//! The norm of many gradients: blocks on the worker pool, sums in the fixed order of `kernel::norm`.

use super::views::GradView;
use crate::error::{Error, Failure, Result};
use crate::kernel::norm::{BLOCK, reduce_partials};
use crate::kernel::{self, DefaultFloatEnvironment, Isa};
use crate::pool::WorkerPool;

/// Blocks that one worker takes at once.
const BLOCKS_PER_ITEM: usize = 64;

/// The sum of squares of each gradient divided by `scale`.
///
/// # Errors
/// [`Error::Worker`], [`Error::Forked`].
pub fn squared_norms(pool: &WorkerPool, isa: Isa, grads: &[&GradView<'_>], scale: f32) -> Result<Vec<f64>> {
    let mut partials: Vec<Vec<f64>> = grads.iter().map(|grad| vec![0.0; grad.len().div_ceil(BLOCK)]).collect();
    let mut items = Vec::new();
    for (grad, partials) in grads.iter().zip(&mut partials) {
        for (index, run) in partials.chunks_mut(BLOCKS_PER_ITEM).enumerate() {
            items.push((*grad, index * BLOCKS_PER_ITEM, run));
        }
    }
    // Many tiny gradients make many tiny items: hand them out by the dozen.
    let bundle = items.len().div_ceil(pool.threads() * 16).clamp(1, BLOCKS_PER_ITEM);
    let failures = pool.for_each(items.chunks_mut(bundle), |items| {
        let _environment = DefaultFloatEnvironment::enter();
        for (grad, first_block, partials) in items {
            for (index, partial) in partials.iter_mut().enumerate() {
                let at = (*first_block + index) * BLOCK;
                let len = BLOCK.min(grad.len() - at);
                *partial =
                    grad.with_logical_block::<BLOCK, _>(at, len, |block| kernel::sum_of_squares(isa, block, scale));
            }
        }
    })?;
    if let Some((_, cause)) = failures.into_iter().next() {
        return Err(Error::Worker(vec![Failure { parameter: "the gradient norm".into(), first: 0, len: 0, cause }]));
    }
    Ok(partials.into_iter().map(reduce_partials).collect())
}
