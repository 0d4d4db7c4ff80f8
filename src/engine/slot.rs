//! A slot: one parameter's state, as planes in the arena.

use super::views::{Split, WeightView};
use crate::error::{Error, Result};
use crate::kernel::{MomentDType, MomentSlices, WeightKind};
use crate::memory::{Element, Layout, Plane, Slab, StridedRef, Walks, plane_bytes};
use half::bf16;
use std::sync::Arc;

/// Parameters of at most so many elements are handled together: in the arena, and as jobs of the lanes, where a copy of fewer
/// bytes costs about as much as one of these.
pub(super) const TINY_ELEMS: usize = 64 * 1024;

/// What a slot is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotSpec {
    /// The parameter's name, for messages.
    pub name: Arc<str>,
    /// Its number in the optimizer, for the noise of stochastic rounding.
    pub number: u64,
    /// The dense layout of its planes.
    pub layout: Layout,
    /// Dtype and master of the weight.
    pub weight: WeightKind,
    /// Dtype of the moments.
    pub moments: MomentDType,
    /// Whether there is a plane for the maximum of the second moments.
    pub amsgrad: bool,
}

impl SlotSpec {
    /// Bytes of its planes in a slab.
    ///
    /// # Errors
    /// [`crate::Error::InvalidValue`] if they exceed the address space.
    pub fn bytes(&self) -> Result<usize> {
        let len = self.layout.numel();
        let moment = match self.moments {
            MomentDType::F32 => plane_bytes::<f32>(len)?,
            MomentDType::Bf16 => plane_bytes::<bf16>(len)?,
        };
        let kept = match self.weight {
            WeightKind::F32 => 0,
            WeightKind::Bf16Split => plane_bytes::<i16>(len)?,
            WeightKind::Bf16Full | WeightKind::F16Full => plane_bytes::<f32>(len)?,
        };
        let moments = moment.saturating_mul(if self.amsgrad { 3 } else { 2 });
        Ok(plane_bytes::<f64>(1)?.saturating_add(moments).saturating_add(kept))
    }

    /// Bytes per parameter element that the state takes, without padding.
    pub fn bytes_per_element(&self) -> usize {
        let moment = if self.moments == MomentDType::F32 { 4 } else { 2 };
        let kept = match self.weight {
            WeightKind::F32 => 0,
            WeightKind::Bf16Split => 2,
            WeightKind::Bf16Full | WeightKind::F16Full => 4,
        };
        moment * (2 + usize::from(self.amsgrad)) + kept
    }
}

/// What the host keeps of a weight beside it.
#[derive(Debug)]
pub enum Kept {
    /// Nothing.
    Nothing,
    /// The low halves of split masters.
    Residual(Plane<i16>),
    /// Full fp32 masters.
    Master(Plane<f32>),
}

/// The moments of one dtype.
#[derive(Debug)]
pub struct MomentPlanes<T> {
    /// First moment.
    pub exp_avg: Plane<T>,
    /// Second moment.
    pub exp_avg_sq: Plane<T>,
    /// Maximum of the second moments so far (amsgrad).
    pub max_exp_avg_sq: Option<Plane<T>>,
}

impl<T: Element> MomentPlanes<T> {
    fn carve(slab: &mut Slab, len: usize, amsgrad: bool) -> Self {
        Self { exp_avg: slab.carve(len), exp_avg_sq: slab.carve(len), max_exp_avg_sq: amsgrad.then(|| slab.carve(len)) }
    }

    fn have_len(&self, len: usize) -> bool {
        let planes = [Some(&self.exp_avg), Some(&self.exp_avg_sq), self.max_exp_avg_sq.as_ref()];
        planes.into_iter().flatten().all(|plane| plane.as_slice().len() == len)
    }

    fn reorder(&mut self, walks: &Walks) {
        reorder(&mut self.exp_avg, walks);
        reorder(&mut self.exp_avg_sq, walks);
        if let Some(plane) = &mut self.max_exp_avg_sq {
            reorder(plane, walks);
        }
    }

    fn slices(&mut self) -> MomentRun<'_, T> {
        MomentRun {
            exp_avg: self.exp_avg.as_mut_slice(),
            exp_avg_sq: self.exp_avg_sq.as_mut_slice(),
            max_exp_avg_sq: self.max_exp_avg_sq.as_mut().map(Plane::as_mut_slice),
        }
    }
}

/// Puts a plane's elements in the order of a walk through it.
fn reorder<T: Element>(plane: &mut Plane<T>, walks: &Walks) {
    let old = plane.as_slice().to_vec();
    StridedRef::walk_slice(&old, walks.clone()).gather(0, plane.as_mut_slice());
}

/// The moments.
#[derive(Debug)]
pub enum Moments {
    /// fp32.
    F32(MomentPlanes<f32>),
    /// bf16.
    Bf16(MomentPlanes<bf16>),
}

/// One parameter's state.
#[derive(Debug)]
pub struct Slot {
    /// What it is for.
    pub spec: SlotSpec,
    /// Steps taken, one element. In the arena too, so that a tensor over it counts along.
    pub step: Plane<f64>,
    /// The moments.
    pub moments: Moments,
    /// What is kept of the weight.
    pub kept: Kept,
    /// The failure that left it half updated, if one did.
    pub poisoned: Option<String>,
}

impl Slot {
    /// Cuts the planes of slots off a slab that has at least [`SlotSpec::bytes`] left for each: step counts first, then
    /// the planes of tiny parameters one behind the other, so that few copies carry many, then the others.
    ///
    /// # Panics
    /// If the slab is too small.
    pub fn carve_all(specs: Vec<SlotSpec>, slab: &mut Slab) -> Vec<Self> {
        let mut steps: Vec<Plane<f64>> = specs.iter().map(|_| slab.carve(1)).collect();
        let is_tiny = |spec: &SlotSpec| spec.layout.numel() <= TINY_ELEMS;
        let (tiny, others): (Vec<_>, Vec<_>) = specs.into_iter().enumerate().partition(|(_, spec)| is_tiny(spec));
        let carved = tiny.into_iter().chain(others);
        let mut slots: Vec<(usize, Self)> =
            carved.map(|(index, spec)| (index, Self::carve_planes(spec, slab))).collect();
        slots.sort_by_key(|&(index, _)| index);
        let slots = slots.into_iter().zip(steps.drain(..));
        slots.map(|((_, slot), step)| Self { step, ..slot }).collect()
    }

    /// Cuts one slot's planes off a slab that has at least [`SlotSpec::bytes`] left.
    ///
    /// # Panics
    /// If it has not.
    pub fn carve(spec: SlotSpec, slab: &mut Slab) -> Self {
        let step = slab.carve(1);
        Self { step, ..Self::carve_planes(spec, slab) }
    }

    /// A slot whose planes are not in host memory, but for the step count: somebody else's device has them. It cannot be
    /// stepped on the host.
    pub fn elsewhere(spec: SlotSpec, slab: &mut Slab) -> Self {
        let moments = MomentPlanes { exp_avg: Plane::default(), exp_avg_sq: Plane::default(), max_exp_avg_sq: None };
        Self { spec, step: slab.carve(1), moments: Moments::F32(moments), kept: Kept::Nothing, poisoned: None }
    }

    fn carve_planes(spec: SlotSpec, slab: &mut Slab) -> Self {
        let len = spec.layout.numel();
        let moments = match spec.moments {
            MomentDType::F32 => Moments::F32(MomentPlanes::carve(slab, len, spec.amsgrad)),
            MomentDType::Bf16 => Moments::Bf16(MomentPlanes::carve(slab, len, spec.amsgrad)),
        };
        let kept = match spec.weight {
            WeightKind::F32 => Kept::Nothing,
            WeightKind::Bf16Split => Kept::Residual(slab.carve(len)),
            WeightKind::Bf16Full | WeightKind::F16Full => Kept::Master(slab.carve(len)),
        };
        // `carve_all` puts the step count in its place.
        Self { spec, step: Plane::default(), moments, kept, poisoned: None }
    }

    /// Whether a weight is of the slot's kind.
    pub(super) fn is_for(&self, weight: &WeightView<'_>) -> bool {
        matches!(
            (weight, self.spec.weight),
            (WeightView::F32(_), WeightKind::F32)
                | (WeightView::Bf16(_), WeightKind::Bf16Split | WeightKind::Bf16Full)
                | (WeightView::F16(_), WeightKind::F16Full)
        )
    }

    /// Whether every plane is there and as long as the layout says. Planes are public, so this cannot be taken for granted.
    pub(super) fn is_whole(&self) -> bool {
        let len = self.spec.layout.numel();
        let kept = match (&self.kept, self.spec.weight) {
            (Kept::Nothing, WeightKind::F32) => true,
            (Kept::Residual(plane), WeightKind::Bf16Split) => plane.as_slice().len() == len,
            (Kept::Master(plane), WeightKind::Bf16Full | WeightKind::F16Full) => plane.as_slice().len() == len,
            _ => false,
        };
        let moments = match &self.moments {
            Moments::F32(planes) => planes.have_len(len),
            Moments::Bf16(planes) => planes.have_len(len),
        };
        let has_max = match &self.moments {
            Moments::F32(planes) => planes.max_exp_avg_sq.is_some(),
            Moments::Bf16(planes) => planes.max_exp_avg_sq.is_some(),
        };
        kept && moments && has_max == self.spec.amsgrad && self.step.as_slice().len() == 1
    }

    /// Steps taken so far.
    pub fn steps(&self) -> f64 {
        self.step.as_slice()[0]
    }

    /// Sets the count of steps taken.
    pub fn set_steps(&mut self, steps: f64) {
        self.step.as_mut_slice()[0] = steps;
    }

    /// Everything back to zero, as if it had never been stepped.
    pub fn reset(&mut self) {
        self.set_steps(0.0);
        match self.moments_mut() {
            MomentsMut::F32(run) => run.zero(0.0),
            MomentsMut::Bf16(run) => run.zero(bf16::ZERO),
        }
        match &mut self.kept {
            Kept::Nothing => {}
            Kept::Residual(plane) => plane.as_mut_slice().fill(0),
            Kept::Master(plane) => plane.as_mut_slice().fill(0.0),
        }
        self.poisoned = None;
    }

    /// Reorders the planes for a parameter whose memory format has changed (`.to(memory_format=...)`): the same values, in
    /// the dense order of its new layout.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if the sizes have changed, too.
    pub fn follow(&mut self, layout: Layout) -> Result<()> {
        let old = &self.spec.layout;
        if layout.sizes != old.sizes {
            let name = &self.spec.name;
            return Err(Error::InvalidValue(format!(
                "{name}: its state has shape {:?}, not {:?}",
                old.sizes, layout.sizes
            )));
        }
        let walks = Walks::new(&layout, old);
        match &mut self.moments {
            Moments::F32(planes) => planes.reorder(&walks),
            Moments::Bf16(planes) => planes.reorder(&walks),
        }
        match &mut self.kept {
            Kept::Nothing => {}
            Kept::Residual(plane) => reorder(plane, &walks),
            Kept::Master(plane) => reorder(plane, &walks),
        }
        self.spec.layout = layout;
        Ok(())
    }

    /// Adds the plane that amsgrad needs, all zeros, from a slab that has room for it.
    pub fn add_amsgrad(&mut self, slab: &mut Slab) {
        let len = self.spec.layout.numel();
        match &mut self.moments {
            Moments::F32(planes) => planes.max_exp_avg_sq = Some(slab.carve(len)),
            Moments::Bf16(planes) => planes.max_exp_avg_sq = Some(slab.carve(len)),
        }
        self.spec.amsgrad = true;
    }

    fn moments_mut(&mut self) -> MomentsMut<'_> {
        match &mut self.moments {
            Moments::F32(planes) => MomentsMut::F32(planes.slices()),
            Moments::Bf16(planes) => MomentsMut::Bf16(planes.slices()),
        }
    }

    /// The planes for the chunks to update (the maximum only if it is used), and what is written once they are done: the new
    /// step count, or the failure.
    pub(super) fn split_for_update(&mut self, steps: f64, amsgrad: bool) -> (PlanesMut<'_>, AfterUpdate<'_>) {
        let Self { spec, step, moments, kept, poisoned } = self;
        let kept = match kept {
            Kept::Nothing => KeptMut::Nothing,
            Kept::Residual(plane) => KeptMut::Residual(plane.as_mut_slice()),
            Kept::Master(plane) => KeptMut::Master(plane.as_mut_slice()),
        };
        let moments = match moments {
            Moments::F32(planes) => MomentsMut::F32(planes.slices().used(amsgrad)),
            Moments::Bf16(planes) => MomentsMut::Bf16(planes.slices().used(amsgrad)),
        };
        let after = AfterUpdate { name: &spec.name, step: &mut step.as_mut_slice()[0], steps, poisoned };
        (PlanesMut { moments, kept }, after)
    }
}

/// The part of a slot that no chunk touches.
#[derive(Debug)]
pub(super) struct AfterUpdate<'a> {
    name: &'a str,
    step: &'a mut f64,
    steps: f64,
    poisoned: &'a mut Option<String>,
}

impl AfterUpdate<'_> {
    pub(super) fn name(&self) -> &str {
        self.name
    }

    /// Marks the slot as half updated.
    pub(super) fn fail(&mut self, cause: &str) {
        *self.poisoned = Some(cause.to_owned());
    }

    /// Counts the step, unless a chunk failed.
    pub(super) fn finish(self) {
        if self.poisoned.is_none() {
            *self.step = self.steps;
        }
    }
}

/// Borrowed moments of one dtype.
#[derive(Debug)]
pub(super) struct MomentRun<'a, T> {
    exp_avg: &'a mut [T],
    exp_avg_sq: &'a mut [T],
    max_exp_avg_sq: Option<&'a mut [T]>,
}

impl<'a, T> MomentRun<'a, T> {
    pub(super) fn new(exp_avg: &'a mut [T], exp_avg_sq: &'a mut [T], max_exp_avg_sq: Option<&'a mut [T]>) -> Self {
        Self { exp_avg, exp_avg_sq, max_exp_avg_sq }
    }
}

impl<T: Copy> MomentRun<'_, T> {
    fn used(self, amsgrad: bool) -> Self {
        Self { max_exp_avg_sq: self.max_exp_avg_sq.filter(|_| amsgrad), ..self }
    }

    fn zero(self, zero: T) {
        for plane in [Some(self.exp_avg), Some(self.exp_avg_sq), self.max_exp_avg_sq].into_iter().flatten() {
            plane.fill(zero);
        }
    }

    fn range(&mut self, at: usize, len: usize) -> (&mut [T], &mut [T], Option<&mut [T]>) {
        let range = at..at + len;
        (
            &mut self.exp_avg[range.clone()],
            &mut self.exp_avg_sq[range.clone()],
            self.max_exp_avg_sq.as_deref_mut().map(|max| &mut max[range]),
        )
    }
}

impl<T> Split for MomentRun<'_, T> {
    fn split_at(self, n: usize) -> (Self, Self) {
        let (exp_avg, exp_avg_tail) = Split::split_at(self.exp_avg, n);
        let (exp_avg_sq, exp_avg_sq_tail) = Split::split_at(self.exp_avg_sq, n);
        let (max_exp_avg_sq, max_tail) = Split::split_at(self.max_exp_avg_sq, n);
        (
            Self { exp_avg, exp_avg_sq, max_exp_avg_sq },
            Self { exp_avg: exp_avg_tail, exp_avg_sq: exp_avg_sq_tail, max_exp_avg_sq: max_tail },
        )
    }
}

/// Borrowed moments.
#[derive(Debug)]
pub(super) enum MomentsMut<'a> {
    F32(MomentRun<'a, f32>),
    Bf16(MomentRun<'a, bf16>),
}

impl MomentsMut<'_> {
    /// `len` elements from `at` on, as the kernel takes them.
    pub(super) fn range(&mut self, at: usize, len: usize) -> MomentSlices<'_> {
        match self {
            Self::F32(run) => {
                let (m, v, max) = run.range(at, len);
                MomentSlices::F32(m, v, max)
            }
            Self::Bf16(run) => {
                let (m, v, max) = run.range(at, len);
                MomentSlices::Bf16(m, v, max)
            }
        }
    }
}

/// What is kept of a weight, borrowed.
#[derive(Debug)]
pub(super) enum KeptMut<'a> {
    Nothing,
    Residual(&'a mut [i16]),
    Master(&'a mut [f32]),
}

/// All planes of one parameter or chunk, borrowed.
#[derive(Debug)]
pub(super) struct PlanesMut<'a> {
    pub(super) moments: MomentsMut<'a>,
    pub(super) kept: KeptMut<'a>,
}

impl Split for PlanesMut<'_> {
    fn split_at(self, n: usize) -> (Self, Self) {
        let (moments, moments_tail) = match self.moments {
            MomentsMut::F32(run) => {
                let (head, tail) = run.split_at(n);
                (MomentsMut::F32(head), MomentsMut::F32(tail))
            }
            MomentsMut::Bf16(run) => {
                let (head, tail) = run.split_at(n);
                (MomentsMut::Bf16(head), MomentsMut::Bf16(tail))
            }
        };
        let (kept, kept_tail) = match self.kept {
            KeptMut::Nothing => (KeptMut::Nothing, KeptMut::Nothing),
            KeptMut::Residual(plane) => {
                let (head, tail) = Split::split_at(plane, n);
                (KeptMut::Residual(head), KeptMut::Residual(tail))
            }
            KeptMut::Master(plane) => {
                let (head, tail) = Split::split_at(plane, n);
                (KeptMut::Master(head), KeptMut::Master(tail))
            }
        };
        (Self { moments, kept }, Self { moments: moments_tail, kept: kept_tail })
    }
}
