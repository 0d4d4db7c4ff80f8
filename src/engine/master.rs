//! Reading and setting the fp32 values behind weights, outside a step.

use super::slot::{Kept, Slot};
use super::views::WeightView;
use crate::error::{Error, Result};
use crate::kernel::{
    DefaultFloatEnvironment, bf16_to_f32, decode_split, encode_split, f16_to_f32, f32_to_bf16, f32_to_f16, follow_bf16,
    follow_f16,
};
use crate::memory::{Element, StridedMut, StridedRef};
use half::{bf16, f16};

/// Elements copied at a time.
const BLOCK: usize = 4096;

/// Calls `each(range, gathered block)` for the whole tensor.
fn blocks<T: Element>(view: &StridedRef<'_, T>, zero: T, mut each: impl FnMut(std::ops::Range<usize>, &mut [T])) {
    let mut buffer = [zero; BLOCK];
    for at in (0..view.len()).step_by(BLOCK) {
        let range = at..view.len().min(at + BLOCK);
        let block = &mut buffer[..range.len()];
        view.gather(at, block);
        each(range, block);
    }
}

/// As `blocks`, and writes what `each` has made of the block.
fn blocks_mut<T: Element>(
    view: &mut StridedMut<'_, T>,
    zero: T,
    mut each: impl FnMut(std::ops::Range<usize>, &mut [T]),
) {
    let mut buffer = [zero; BLOCK];
    for at in (0..view.view().len()).step_by(BLOCK) {
        let range = at..view.view().len().min(at + BLOCK);
        let block = &mut buffer[..range.len()];
        each(range, block);
        view.scatter(at, block);
    }
}

impl Slot {
    fn check_len(&self, what: &str, len: usize) -> Result<()> {
        let expected = self.spec.layout.numel();
        if len == expected {
            return Ok(());
        }
        Err(Error::InvalidValue(format!("{}: {what} of {len} elements, not {expected}", self.spec.name)))
    }

    /// The fp32 values that the next step starts from, into `out`; everything in the order of the state.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if lengths or dtypes do not fit.
    pub fn read_master(&self, weight: &WeightView<'_>, out: &mut StridedMut<'_, f32>) -> Result<()> {
        let _environment = DefaultFloatEnvironment::enter();
        self.check_len("a weight", weight.len())?;
        self.check_len("an fp32 copy", out.view().len())?;
        match (weight, &self.kept) {
            (WeightView::F32(live), Kept::Nothing) => {
                blocks(live.view(), 0.0, |range, block| out.scatter(range.start, block));
            }
            (WeightView::Bf16(live), Kept::Residual(plane)) => {
                read(live.view(), bf16::ZERO, plane.as_slice(), out, |w, r| decode_split(w.to_bits(), r));
            }
            (WeightView::Bf16(live), Kept::Master(plane)) => {
                read(live.view(), bf16::ZERO, plane.as_slice(), out, |w, m| follow_bf16(w.to_bits(), m));
            }
            (WeightView::F16(live), Kept::Master(plane)) => {
                read(live.view(), f16::ZERO, plane.as_slice(), out, |w, m| follow_f16(w.to_bits(), m));
            }
            _ => return Err(self.wrong_dtype()),
        }
        Ok(())
    }

    /// Sets the weight to the rounded values and what is kept of it to the rest.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if lengths or dtypes do not fit.
    pub fn write_master(&mut self, weight: &mut WeightView<'_>, values: &StridedRef<'_, f32>) -> Result<()> {
        let _environment = DefaultFloatEnvironment::enter();
        self.check_len("a weight", weight.len())?;
        if !self.is_for(weight) {
            return Err(self.wrong_dtype());
        }
        self.load_kept(values)?;
        macro_rules! write {
            ($live:expr, $zero:expr, $convert:expr) => {
                blocks_mut($live, $zero, |range, block| {
                    let mut source = [0.0; BLOCK];
                    values.gather(range.start, &mut source[..range.len()]);
                    block.iter_mut().zip(source).for_each(|(live, value)| *live = $convert(value));
                })
            };
        }
        match weight {
            WeightView::F32(live) => write!(live, 0.0, |value: f32| value),
            WeightView::Bf16(live) => write!(live, bf16::ZERO, |value| bf16::from_bits(f32_to_bf16(value))),
            WeightView::F16(live) => write!(live, f16::ZERO, |value| f16::from_bits(f32_to_f16(value))),
        }
        Ok(())
    }

    /// Sets what is kept beside the weight from fp32 masters, and leaves the weight alone: it may be loaded later.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if the length does not fit.
    pub fn load_kept(&mut self, values: &StridedRef<'_, f32>) -> Result<()> {
        let _environment = DefaultFloatEnvironment::enter();
        self.check_len("a master", values.len())?;
        match &mut self.kept {
            Kept::Nothing => {}
            Kept::Residual(plane) => {
                let plane = plane.as_mut_slice();
                blocks(values, 0.0, |range, block| {
                    plane[range].iter_mut().zip(block).for_each(|(kept, value)| *kept = encode_split(*value).1);
                });
            }
            Kept::Master(plane) => values.gather(0, plane.as_mut_slice()),
        }
        Ok(())
    }

    /// Sets full masters from a split checkpoint's residuals and the weight as it now is.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if lengths do not fit, or the slot has no full bf16 master.
    pub fn load_residual(&mut self, weight: &WeightView<'_>, residuals: &StridedRef<'_, i16>) -> Result<()> {
        let _environment = DefaultFloatEnvironment::enter();
        self.check_len("a weight", weight.len())?;
        self.check_len("a residual", residuals.len())?;
        let (WeightView::Bf16(live), Kept::Master(plane)) = (weight, &mut self.kept) else {
            return Err(self.wrong_dtype());
        };
        let plane = plane.as_mut_slice();
        blocks(live.view(), bf16::ZERO, |range, block| {
            let mut source = [0; BLOCK];
            residuals.gather(range.start, &mut source[..range.len()]);
            let pairs = block.iter().zip(source);
            plane[range].iter_mut().zip(pairs).for_each(|(kept, (w, r))| *kept = decode_split(w.to_bits(), r));
        });
        Ok(())
    }

    /// Sets full masters to the weight itself, for a checkpoint that has none.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if lengths or dtypes do not fit.
    pub fn clear_kept(&mut self, weight: &WeightView<'_>) -> Result<()> {
        let _environment = DefaultFloatEnvironment::enter();
        self.check_len("a weight", weight.len())?;
        match (weight, &mut self.kept) {
            (_, Kept::Nothing) => {}
            (_, Kept::Residual(plane)) => plane.as_mut_slice().fill(0),
            (WeightView::Bf16(live), Kept::Master(plane)) => {
                let plane = plane.as_mut_slice();
                blocks(live.view(), bf16::ZERO, |range, block| {
                    plane[range].iter_mut().zip(block).for_each(|(kept, w)| *kept = bf16_to_f32(w.to_bits()));
                });
            }
            (WeightView::F16(live), Kept::Master(plane)) => {
                let plane = plane.as_mut_slice();
                blocks(live.view(), f16::ZERO, |range, block| {
                    plane[range].iter_mut().zip(block).for_each(|(kept, w)| *kept = f16_to_f32(w.to_bits()));
                });
            }
            _ => return Err(self.wrong_dtype()),
        }
        Ok(())
    }

    fn wrong_dtype(&self) -> Error {
        Error::InvalidValue(format!("{}: the weight is not {:?}, as its state is", self.spec.name, self.spec.weight))
    }
}

fn read<T: Element, K: Copy>(
    live: &StridedRef<'_, T>,
    zero: T,
    kept: &[K],
    out: &mut StridedMut<'_, f32>,
    decode: impl Fn(T, K) -> f32,
) {
    blocks(live, zero, |range, block| {
        let mut values = [0.0; BLOCK];
        let pairs = block.iter().zip(&kept[range.clone()]);
        values.iter_mut().zip(pairs).for_each(|(value, (&w, &k))| *value = decode(w, k));
        out.scatter(range.start, &values[..range.len()]);
    });
}
