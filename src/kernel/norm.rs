//! The sum of squares behind the gradient norm, with an order of additions that depends on nothing but the logical
//! element index: the same bits for any chunking, thread count, memory layout and lane.
//!
//! A block of [`BLOCK`] elements has [`LANES`] f64 sums; element `i` of the block goes to lane `i % LANES`, rows in
//! order; lanes are then added in halves (`lane[j] += lane[j + half]`). The blocks' sums are reduced by the same rule,
//! without the squares, until one is left. The square of an fp32 value is exact in f64.

use super::recipe::GradElement;

/// Elements in a block of the norm's sum.
pub const BLOCK: usize = 4096;
/// Partial sums in a block.
const LANES: usize = 256;

/// Adds up one block (at most [`BLOCK`] elements; a short one counts as padded with zeros).
#[inline(always)]
fn reduce_block<T: Copy>(block: &[T], term: impl Fn(T) -> f64) -> f64 {
    let mut lanes = [0.0_f64; LANES];
    let mut rows = block.chunks_exact(LANES);
    for row in &mut rows {
        for (lane, &x) in lanes.iter_mut().zip(row) {
            *lane += term(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rows.remainder()) {
        *lane += term(x);
    }
    let mut half = LANES / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        for (a, &b) in low.iter_mut().zip(&*high) {
            *a += b;
        }
        half /= 2;
    }
    lanes[0]
}

/// The sum of squares of one block of gradient elements, divided by `scale` first (1 leaves them).
#[inline(always)]
pub(crate) fn block_sum_of_squares<G: GradElement>(block: &[G], scale: f32) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    if scale == 1.0 {
        reduce_block(block, |x| square(x.load()))
    } else {
        reduce_block(block, |x| square(x.load() / scale))
    }
}

/// The sum of blocks' sums.
pub(crate) fn reduce_partials(mut partials: Vec<f64>) -> f64 {
    while partials.len() > 1 {
        partials = partials.chunks(BLOCK).map(|block| reduce_block(block, |x| x)).collect();
    }
    partials.first().copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_to_the_exact_sum() {
        let values: Vec<f32> =
            (0..100_003_u32).map(|i| (i.wrapping_mul(2_654_435_761) as f32 / 4e9 - 0.5) * 1e-3).collect();
        let partials = values.chunks(BLOCK).map(|block| block_sum_of_squares(block, 1.0)).collect();
        let exact: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        assert!((reduce_partials(partials) / exact - 1.0).abs() < 1e-12);
    }

    #[test]
    fn the_order_is_the_stated_one() {
        // One value too small to survive beside 1e16 unless it is added in a lane of its own first.
        let mut block = vec![0.0_f32; BLOCK];
        block[0] = 1e8; // lane 0
        block[LANES] = 1.0; // lane 0, next row: lost
        block[1] = 1.0; // lane 1
        block[129] = 1.0; // lane 129 joins lane 1 before lane 0: kept, 1e16 + 2
        assert_eq!(block_sum_of_squares(&block, 1.0), 1e16 + 2.0);
    }

    #[test]
    fn short_blocks_and_none() {
        assert_eq!(block_sum_of_squares(&[3.0_f32, 4.0], 1.0), 25.0);
        assert_eq!(block_sum_of_squares(&[3.0_f32, 4.0], 0.5), 100.0);
        assert_eq!(reduce_partials(vec![]), 0.0);
        assert!(block_sum_of_squares(&[f32::NAN], 1.0).is_nan());
        assert_eq!(block_sum_of_squares(&[f32::INFINITY], 1.0), f64::INFINITY);
        assert_eq!(block_sum_of_squares(&[f32::MAX; 9], 1.0), 9.0 * f64::from(f32::MAX).powi(2));
    }
}
