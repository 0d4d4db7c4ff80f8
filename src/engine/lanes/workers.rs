//! The workers of the CPU lane: a chunk that has come down is cut into pieces, which the pool's threads update, and whoever
//! is last tells the dispatcher.

use super::parts::{Chunk, Offload, Planes, Recipe, Sum};
use crate::engine::chunk::{self, next_len};
use crate::engine::slot::{KeptMut, MomentRun, MomentsMut, PlanesMut};
use crate::engine::views::{GradView, WeightView};
use crate::error::Result;
use crate::kernel::{GradDType, GradSlice, Isa, MomentDType, WeightKind, accumulate};
use crate::memory::{Element, HostSpan};
use crate::pool::{WorkerPool, attempt};
use half::{bf16, f16};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Elements of the pieces that workers take: small enough for a chunk's last pieces to even out over the threads.
const PIECE_ELEMS: usize = 64 * 1024;

/// A piece that a worker could not update.
#[derive(Clone, Debug)]
pub(super) struct Broken {
    pub(super) slot: usize,
    pub(super) name: Arc<str>,
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) cause: String,
}

/// Says that the workers are done with a slot of the ring.
#[derive(Debug)]
pub(super) struct Computed {
    pub(super) slot: usize,
    pub(super) chunks: Vec<Chunk>,
    pub(super) broken: Vec<Broken>,
    /// By the threads together.
    pub(super) spent: Duration,
}

impl Computed {
    pub(super) fn elements(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.len).sum()
    }
}

/// How to tell the dispatcher: called by the worker that finishes last.
pub(super) type Tell = Arc<dyn Fn(Computed) + Send + Sync>;

/// What a worker needs of the outside.
#[derive(Clone)]
pub(super) struct Workers {
    pub(super) pool: Arc<WorkerPool>,
    pub(super) isa: Isa,
    pub(super) tell: Tell,
    /// For tests: a slot and an element whose piece panics.
    pub(super) fail_at: Arc<Mutex<Vec<(usize, usize)>>>,
}

/// One worker's share.
struct Piece {
    recipe: Recipe,
    first: usize,
    len: usize,
    weight: HostSpan,
    grad: HostSpan,
    planes: Planes<HostSpan>,
}

/// Cuts a slot's work into pieces and hands them to the pool. `lent` holds weight and gradient of each chunk, in turn.
pub(super) fn compute(slot: usize, mut chunks: Vec<Chunk>, lent: Vec<HostSpan>, workers: &Workers) -> Result<()> {
    let mut pieces: Vec<Vec<Piece>> = Vec::new();
    let mut open = 0;
    let mut lent = lent.into_iter();
    for chunk in &mut chunks {
        let (Some(mut weight), Some(mut grad)) = (lent.next(), lent.next()) else { break };
        let Recipe { weight_kind, grad_dtype, moments, .. } = chunk.recipe;
        let mut done = 0;
        while done < chunk.len {
            let len = next_len(chunk.first + done, chunk.len - done, PIECE_ELEMS);
            let planes = &mut chunk.planes;
            let moment = len * moments.bytes();
            let kept = len * weight_kind.kept_bytes();
            let piece = Piece {
                recipe: chunk.recipe.clone(),
                first: chunk.first + done,
                len,
                weight: weight.split_front(len * weight_kind.live_bytes()),
                grad: grad.split_front(len * grad_dtype.bytes()),
                planes: Planes {
                    exp_avg: planes.exp_avg.split_front(moment),
                    exp_avg_sq: planes.exp_avg_sq.split_front(moment),
                    max_exp_avg_sq: planes.max_exp_avg_sq.as_mut().map(|plane| plane.split_front(moment)),
                    kept: planes.kept.as_mut().map(|plane| plane.split_front(kept)),
                },
            };
            // Tiny ones share an item of work.
            if open + len > PIECE_ELEMS || pieces.is_empty() {
                pieces.push(Vec::new());
                open = 0;
            }
            open += len;
            pieces.last_mut().expect("one was pushed").push(piece);
            done += len;
        }
    }
    drop(lent);
    let shared = Arc::new(Shared {
        slot,
        left: AtomicUsize::new(pieces.len().max(1)),
        chunks: Mutex::new(chunks),
        broken: Mutex::default(),
        spent: AtomicU64::new(0),
        tell: Arc::clone(&workers.tell),
    });
    if pieces.is_empty() {
        shared.done();
        return Ok(());
    }
    workers.pool.spawn_all(pieces.into_iter().map(|pieces| -> Box<dyn FnOnce() + Send> {
        let (shared, isa, fail_at) = (Arc::clone(&shared), workers.isa, Arc::clone(&workers.fail_at));
        Box::new(move || {
            let began = Instant::now();
            for piece in pieces {
                shared.run(piece, isa, &fail_at);
            }
            shared.spent.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
            shared.done();
        })
    }))
}

/// Cuts a gradient that has come down into pieces and lets the pool add them to the sum.
pub(super) fn add_up(slot: usize, offload: &mut Offload, lent: Vec<HostSpan>, workers: &Workers) -> Result<()> {
    let mut pieces = Vec::new();
    if let Some(mut grad) = lent.into_iter().next() {
        let bytes = offload.grad_dtype.bytes();
        while !grad.is_empty() {
            let len = (grad.len() / bytes).min(PIECE_ELEMS);
            pieces.push((grad.split_front(len * bytes), offload.to.split_front(len * 4)));
        }
    }
    let shared = Arc::new(Shared {
        slot,
        left: AtomicUsize::new(pieces.len().max(1)),
        chunks: Mutex::default(),
        broken: Mutex::default(),
        spent: AtomicU64::new(0),
        tell: Arc::clone(&workers.tell),
    });
    if pieces.is_empty() {
        shared.done();
        return Ok(());
    }
    workers.pool.spawn_all(pieces.into_iter().map(|(mut grad, mut to)| -> Box<dyn FnOnce() + Send> {
        let (shared, isa, of, name) = (Arc::clone(&shared), workers.isa, offload.slot, Arc::clone(&offload.name));
        let (dtype, sum) = (offload.grad_dtype, offload.sum);
        Box::new(move || {
            let work = || {
                let grad = match dtype {
                    GradDType::F32 => GradSlice::F32(grad.as_mut_slice()),
                    GradDType::Bf16 => GradSlice::Bf16(grad.as_mut_slice()),
                    GradDType::F16 => GradSlice::F16(grad.as_mut_slice()),
                };
                accumulate(isa, grad, sum == Sum::Add, to.as_mut_slice());
            };
            let began = Instant::now();
            if let Err(cause) = attempt(work) {
                let broken = Broken { slot: of, name, first: 0, len: 0, cause };
                shared.broken.lock().unwrap_or_else(PoisonError::into_inner).push(broken);
            }
            shared.spent.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
            drop((grad, to));
            shared.done();
        })
    }))
}

/// What the pieces of one slot share.
struct Shared {
    slot: usize,
    left: AtomicUsize,
    chunks: Mutex<Vec<Chunk>>,
    broken: Mutex<Vec<Broken>>,
    /// Nanoseconds.
    spent: AtomicU64,
    tell: Tell,
}

impl Shared {
    fn run(&self, piece: Piece, isa: Isa, fail_at: &Mutex<Vec<(usize, usize)>>) {
        let (slot, name, first, len) = (piece.recipe.slot, Arc::clone(&piece.recipe.name), piece.first, piece.len);
        let fails = {
            let mut wanted = fail_at.lock().unwrap_or_else(PoisonError::into_inner);
            let hit = wanted.iter().position(|&(at, element)| at == slot && (first..first + len).contains(&element));
            hit.map(|hit| wanted.swap_remove(hit)).is_some()
        };
        let work = || {
            assert!(!fails, "failure asked for by a test");
            piece.run(isa);
        };
        if let Err(cause) = attempt(work) {
            let broken = Broken { slot, name, first, len, cause };
            self.broken.lock().unwrap_or_else(PoisonError::into_inner).push(broken);
        }
    }

    fn done(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let chunks = std::mem::take(&mut *self.chunks.lock().unwrap_or_else(PoisonError::into_inner));
            let broken = std::mem::take(&mut *self.broken.lock().unwrap_or_else(PoisonError::into_inner));
            let spent = Duration::from_nanos(self.spent.load(Ordering::Relaxed));
            (self.tell)(Computed { slot: self.slot, chunks, broken, spent });
        }
    }
}

impl Piece {
    fn run(mut self, isa: Isa) {
        let Self { recipe, first, len, weight, grad, planes } = &mut self;
        let weight = match recipe.weight_kind {
            WeightKind::F32 => WeightView::from(weight.as_mut_slice::<f32>()),
            WeightKind::Bf16Split | WeightKind::Bf16Full => WeightView::from(weight.as_mut_slice::<bf16>()),
            WeightKind::F16Full => WeightView::from(weight.as_mut_slice::<f16>()),
        };
        let grad = match recipe.grad_dtype {
            GradDType::F32 => GradView::from(&*grad.as_mut_slice::<f32>()),
            GradDType::Bf16 => GradView::from(&*grad.as_mut_slice::<bf16>()),
            GradDType::F16 => GradView::from(&*grad.as_mut_slice::<f16>()),
        };
        let Planes { exp_avg, exp_avg_sq, max_exp_avg_sq, kept } = planes;
        let moments = match recipe.moments {
            MomentDType::F32 => MomentsMut::F32(run(exp_avg, exp_avg_sq, max_exp_avg_sq)),
            MomentDType::Bf16 => MomentsMut::Bf16(run(exp_avg, exp_avg_sq, max_exp_avg_sq)),
        };
        let kept = match (recipe.weight_kind, kept) {
            (WeightKind::Bf16Split, Some(kept)) => KeptMut::Residual(kept.as_mut_slice()),
            (WeightKind::Bf16Full | WeightKind::F16Full, Some(kept)) => KeptMut::Master(kept.as_mut_slice()),
            _ => KeptMut::Nothing,
        };
        let planes = PlanesMut { moments, kept };
        let (constants, noise) = (recipe.constants, recipe.noise);
        let piece = chunk::Chunk { update: 0, first: *first, len: *len, weight, grad, planes, constants, noise };
        piece.run(isa, recipe.grad_scale);
    }
}

fn run<'a, T: Element>(
    exp_avg: &'a mut HostSpan,
    exp_avg_sq: &'a mut HostSpan,
    max_exp_avg_sq: &'a mut Option<HostSpan>,
) -> MomentRun<'a, T> {
    let max = max_exp_avg_sq.as_mut().map(HostSpan::as_mut_slice);
    MomentRun::new(exp_avg.as_mut_slice(), exp_avg_sq.as_mut_slice(), max)
}
