//! Shapes and strides: which are dense, which overlap, and how to walk one tensor's memory in the order of another's.

/// Sizes and strides of a tensor, in elements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Number of elements along each dimension.
    pub sizes: Vec<usize>,
    /// Distance in memory between neighbours along each dimension.
    pub strides: Vec<usize>,
}

/// The dimensions of a tensor that has been stripped of those that do not matter, outermost first.
type Dims = Vec<(usize, usize)>;

impl Layout {
    /// A dense run of `len` elements.
    pub fn contiguous(len: usize) -> Self {
        Self { sizes: vec![len], strides: vec![1] }
    }

    /// The row-major layout of these sizes: the order of logical element indices.
    pub fn row_major(sizes: &[usize]) -> Self {
        let mut strides = vec![1; sizes.len()];
        for i in (1..sizes.len()).rev() {
            strides[i - 1] = strides[i] * sizes[i].max(1);
        }
        Self { sizes: sizes.to_vec(), strides }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Number of elements between the first and the last, both counted: what the tensor spans in memory.
    pub fn span(&self) -> usize {
        if self.numel() == 0 {
            return 0;
        }
        1 + self.sizes.iter().zip(&self.strides).map(|(size, stride)| (size - 1) * stride).sum::<usize>()
    }

    /// Indices of the dimensions that matter (more than one element), from the largest stride to the smallest.
    fn order(&self) -> Vec<usize> {
        let mut dims: Vec<usize> = (0..self.sizes.len()).filter(|&dim| self.sizes[dim] > 1).collect();
        dims.sort_by_key(|&dim| std::cmp::Reverse(self.strides[dim]));
        dims
    }

    /// Whether the elements fill their span without a hole, each once.
    pub fn is_dense(&self) -> bool {
        let mut expected = 1;
        self.order().iter().rev().all(|&dim| {
            let fits = self.strides[dim] == expected;
            expected *= self.sizes[dim];
            fits
        }) || self.numel() == 0
    }

    /// Whether two elements may share memory, as in an expanded tensor. Exact for every layout that slicing, transposing
    /// and expanding can make; an `as_strided` that interleaves without colliding counts as overlapping.
    pub fn overlaps_itself(&self) -> bool {
        let mut reach = 0;
        self.numel() > 0
            && self.order().iter().rev().any(|&dim| {
                let collides = self.strides[dim] <= reach;
                reach += (self.sizes[dim] - 1) * self.strides[dim];
                collides
            })
    }

    /// The layout of state for a parameter of this layout: its own where it is dense, else dense in the same order of
    /// dimensions (as `torch.zeros_like` has it).
    #[must_use]
    pub fn dense_like(&self) -> Self {
        if self.is_dense() {
            return self.clone();
        }
        let mut strides = vec![1; self.sizes.len()];
        let mut next = 1;
        // Dimensions of one element go innermost and take part in nothing.
        for dim in self.order().into_iter().rev() {
            strides[dim] = next;
            next *= self.sizes[dim];
        }
        Self { sizes: self.sizes.clone(), strides }
    }

    /// The runs of memory that the elements occupy, as (offset, length), sorted.
    fn runs(&self) -> Vec<(usize, usize)> {
        let mut dims = self.order();
        let run = match dims.last() {
            Some(&dim) if self.strides[dim] == 1 => {
                dims.pop();
                self.sizes[dim]
            }
            _ => 1,
        };
        let mut starts = vec![0];
        for dim in dims {
            let step = self.strides[dim];
            starts = starts.iter().flat_map(|&at| (0..self.sizes[dim]).map(move |i| at + i * step)).collect();
        }
        starts.sort_unstable();
        starts.into_iter().map(|at| (at, run)).collect()
    }
}

/// Whether two tensors share a byte: each is an address, a layout and the size of an element.
pub fn share_memory(a: (usize, &Layout, usize), b: (usize, &Layout, usize)) -> bool {
    let span = |(at, layout, size): (usize, &Layout, usize)| (at, at + layout.span() * size);
    let ((a_start, a_end), (b_start, b_end)) = (span(a), span(b));
    if a_start >= b_end || b_start >= a_end || a_start == a_end || b_start == b_end {
        return false;
    }
    if a.1.is_dense() && b.1.is_dense() {
        return true;
    }
    // Interleaved spans, such as two column slices of one matrix: compare run by run.
    let runs = |(at, layout, size): (usize, &Layout, usize)| -> Vec<(usize, usize)> {
        layout.runs().into_iter().map(|(offset, len)| (at + offset * size, at + (offset + len) * size)).collect()
    };
    let (a_runs, b_runs) = (runs(a), runs(b));
    let mut b_next = b_runs.iter().peekable();
    a_runs.iter().any(|&(start, end)| {
        while b_next.next_if(|&&(_, b_end)| b_end <= start).is_some() {}
        b_next.peek().is_some_and(|&&(b_start, _)| b_start < end)
    })
}

/// A way through a tensor's memory in another tensor's order: nested loops, outermost first, innermost runs merged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    dims: Dims,
}

impl Walk {
    /// The walk through `target` in the memory order of `order` (dense, same sizes); `None` where that is simply one
    /// element after the other.
    pub(crate) fn new(order: &Layout, target: &Layout) -> Option<Self> {
        debug_assert_eq!(order.sizes, target.sizes);
        let mut dims = Dims::new();
        for dim in order.order() {
            let (size, stride) = (target.sizes[dim], target.strides[dim]);
            match dims.last_mut() {
                Some(outer) if outer.1 == stride * size => *outer = (outer.0 * size, stride),
                _ => dims.push((size, stride)),
            }
        }
        match dims[..] {
            [] | [(_, 1)] => None,
            _ if target.numel() == 0 => None,
            _ => Some(Self { dims }),
        }
    }

    /// Number of elements that it spans in memory.
    pub(crate) fn span(&self) -> usize {
        1 + self.dims.iter().map(|(size, stride)| (size - 1) * stride).sum::<usize>()
    }

    /// Calls `visit(offset, stride, count)` for each run of the `len` elements from position `start`: `count` elements
    /// from `offset`, `stride` apart.
    pub(crate) fn runs(&self, start: usize, len: usize, mut visit: impl FnMut(usize, usize, usize)) {
        let (&(inner, stride), outer) = self.dims.split_last().expect("a walk has a dimension");
        let (mut row, mut column) = (start / inner, start % inner);
        let mut left = len;
        while left > 0 {
            let mut rest = row;
            let mut offset = column * stride;
            for &(size, stride) in outer.iter().rev() {
                offset += rest % size * stride;
                rest /= size;
            }
            let count = left.min(inner - column);
            visit(offset, stride, count);
            left -= count;
            row += 1;
            column = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layout(sizes: &[usize], strides: &[usize]) -> Layout {
        Layout { sizes: sizes.to_vec(), strides: strides.to_vec() }
    }

    #[test]
    fn dense_and_overlapping() {
        for (sizes, strides, dense, overlaps) in [
            (&[][..], &[][..], true, false),
            (&[0, 3], &[3, 1], true, false),
            (&[2, 3], &[3, 1], true, false),
            (&[2, 3], &[1, 2], true, false),
            (&[2, 1, 100], &[100, 1, 1], true, false),
            (&[2, 1, 100], &[100, 7777, 1], true, false),
            (&[4, 48], &[64, 1], false, false),
            (&[5], &[2], false, false),
            (&[5, 3], &[0, 1], false, true),
            (&[5], &[0], false, true),
            (&[3, 3], &[1, 1], false, true),
        ] {
            let layout = layout(sizes, strides);
            assert_eq!(layout.is_dense(), dense, "{layout:?}");
            assert_eq!(layout.overlaps_itself(), overlaps, "{layout:?}");
        }
    }

    #[test]
    fn state_is_dense_in_the_parameters_order() {
        assert_eq!(layout(&[4, 48], &[64, 1]).dense_like(), layout(&[4, 48], &[48, 1]));
        assert_eq!(layout(&[48, 4], &[1, 64]).dense_like(), layout(&[48, 4], &[1, 48]));
        assert_eq!(layout(&[2, 1, 3], &[3, 99, 1]).dense_like(), layout(&[2, 1, 3], &[3, 99, 1]));
    }

    #[test]
    fn sharing_memory() {
        let columns = |from: usize, to: usize| (from * 4, layout(&[8, to - from], &[64, 1]));
        let shares = |(a, a_layout): (usize, Layout), (b, b_layout): (usize, Layout)| {
            share_memory((a, &a_layout, 4), (b, &b_layout, 4))
        };
        assert!(!shares(columns(0, 8), columns(8, 56)));
        assert!(shares(columns(0, 9), columns(8, 56)));
        assert!(shares(columns(8, 56), columns(0, 64)));
        assert!(!shares((0, Layout::contiguous(4)), (16, Layout::contiguous(4))));
        assert!(shares((0, Layout::contiguous(5)), (16, Layout::contiguous(4))));
        assert!(!shares((0, layout(&[5], &[2])), (4, layout(&[5], &[2]))), "even and odd elements");
        assert!(!shares((0, layout(&[0], &[1])), (0, Layout::contiguous(4))));
    }

    #[test]
    fn a_tensor_in_its_own_order_needs_no_walk() {
        for sizes in [&[][..], &[5], &[2, 3, 4], &[2, 0, 4]] {
            let layout = Layout::row_major(sizes);
            assert_eq!(Walk::new(&layout, &layout), None);
        }
        let channels_last = layout(&[2, 3, 4, 5], &[60, 1, 15, 3]);
        assert_eq!(Walk::new(&channels_last, &channels_last), None);
        assert!(Walk::new(&Layout::row_major(&[2, 3, 4, 5]), &channels_last).is_some());
    }

    proptest! {
        /// Any order against any layout: the walk visits element by element what indexing says.
        #[test]
        fn walks_as_indexing_does(
            sizes in prop::collection::vec(1_usize..5, 0..5),
            seed in any::<u64>(),
            gap in 1_usize..4,
            start in 0_usize..200,
            len in 0_usize..200,
        ) {
            let permuted = |salt: u64, gap: usize| {
                let mut dims: Vec<usize> = (0..sizes.len()).collect();
                dims.sort_by_key(|&dim| (dim as u64 + 1).wrapping_mul(seed ^ salt).rotate_left(17));
                let mut strides = vec![0; sizes.len()];
                let mut next = gap;
                for dim in dims {
                    strides[dim] = next;
                    next *= sizes[dim] + gap - 1;
                }
                layout(&sizes, &strides)
            };
            let (order, target) = (permuted(1, 1), permuted(0x00AB_CDEF, gap));
            prop_assert!(order.is_dense() && !target.overlaps_itself());
            let numel = order.numel();
            // By indexing: the target's offset of each element, listed in the order's memory order.
            let mut expected = vec![usize::MAX; numel];
            for index in 0..numel {
                let (mut rest, mut at, mut offset) = (index, 0, 0);
                for dim in (0..sizes.len()).rev() {
                    at += rest % sizes[dim] * order.strides[dim];
                    offset += rest % sizes[dim] * target.strides[dim];
                    rest /= sizes[dim];
                }
                expected[at] = offset;
            }
            let start = start.min(numel);
            let len = len.min(numel - start);
            let mut got = Vec::new();
            match Walk::new(&order, &target) {
                None => got.extend(start..start + len),
                Some(walk) => walk.runs(start, len, |offset, stride, count| got.extend((0..count).map(|i| offset + i * stride))),
            }
            prop_assert_eq!(&got, &expected[start..start + len]);
        }
    }
}
