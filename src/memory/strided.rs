//! Borrowed tensors of any strides, walked in the order of the state that belongs to them. The pointer edge makes them
//! (`unsafe`, once per tensor and step); the engine splits, gathers and scatters them safely.

use super::arena::Element;
use super::layout::{Layout, Walk};
use std::marker::PhantomData;
use std::sync::Arc;

/// The ways through a tensor: in the order of its state's memory, and by logical element index.
#[derive(Clone, Debug, Default)]
pub struct Walks {
    memory: Option<Arc<Walk>>,
    logical: Option<Arc<Walk>>,
}

impl Walks {
    /// The walks of a tensor of layout `tensor` whose state has the dense layout `state`, of the same sizes.
    pub fn new(state: &Layout, tensor: &Layout) -> Self {
        let logical = Layout::row_major(&tensor.sizes);
        Self { memory: Walk::new(state, tensor).map(Arc::new), logical: Walk::new(&logical, tensor).map(Arc::new) }
    }
}

impl Walks {
    /// Whether the tensor lies in the order of its state.
    pub fn is_dense(&self) -> bool {
        self.memory.is_none()
    }

    /// Whether the tensor lies in logical order.
    pub fn is_row_major(&self) -> bool {
        self.logical.is_none()
    }
}

/// A tensor to read.
#[derive(Clone, Debug)]
pub struct StridedRef<'a, T> {
    base: *const T,
    start: usize,
    len: usize,
    walks: Walks,
    borrow: PhantomData<&'a [T]>,
}

/// A tensor to read and write.
#[derive(Debug)]
pub struct StridedMut<'a, T> {
    view: StridedRef<'a, T>,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: a `StridedRef` is a shared borrow of its elements, which are Sync.
unsafe impl<T: Element> Send for StridedRef<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for StridedRef<'_, T> {}
// SAFETY: a `StridedMut` is the exclusive borrow of its elements, which are Send.
unsafe impl<T: Element> Send for StridedMut<'_, T> {}

impl<'a, T: Element> StridedRef<'a, T> {
    /// Borrows the `len` elements that `walks` reaches from `base`.
    ///
    /// # Safety
    /// For the whole of `'a`, every element is valid, aligned memory that nobody writes.
    pub unsafe fn new(base: *const T, len: usize, walks: Walks) -> Self {
        // A tensor without elements may have a null address, a slice may not.
        let base = if len == 0 { std::ptr::NonNull::dangling().as_ptr() } else { base };
        Self { base, start: 0, len, walks, borrow: PhantomData }
    }

    /// A dense tensor's memory, walked in another order.
    ///
    /// # Panics
    /// If the walk leaves the slice.
    pub(crate) fn walk_slice(values: &'a [T], walks: Walks) -> Self {
        let inside = |walk: &Option<Arc<Walk>>| walk.as_ref().is_none_or(|walk| walk.span() <= values.len());
        assert!(inside(&walks.memory) && inside(&walks.logical), "a walk of another tensor");
        // SAFETY: a shared slice is valid memory that nobody writes during its lifetime; the walks stay inside it.
        unsafe { Self::new(values.as_ptr(), values.len(), walks) }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements as they lie, where they lie in the order of the state.
    pub fn as_slice(&self) -> Option<&[T]> {
        // SAFETY: `new`'s contract; without a walk the elements are `len` neighbours from `base + start`.
        self.walks.memory.is_none().then(|| unsafe { slice(self.base, self.start, self.len) })
    }

    /// The elements as they lie, where they lie in logical order.
    pub(crate) fn as_logical_slice(&self) -> Option<&[T]> {
        debug_assert_eq!(self.start, 0, "logical order is the whole tensor's");
        // SAFETY: as in `as_slice`.
        self.walks.logical.is_none().then(|| unsafe { slice(self.base, self.start, self.len) })
    }

    /// Copies `out.len()` elements from position `at` on, in the order of the state.
    pub(crate) fn gather(&self, at: usize, out: &mut [T]) {
        self.gather_by(self.walks.memory.as_deref(), at, out);
    }

    /// Copies `out.len()` elements from logical index `at` on.
    pub(crate) fn gather_logical(&self, at: usize, out: &mut [T]) {
        debug_assert_eq!(self.start, 0, "logical order is the whole tensor's");
        self.gather_by(self.walks.logical.as_deref(), at, out);
    }

    fn gather_by(&self, walk: Option<&Walk>, at: usize, out: &mut [T]) {
        assert!(at + out.len() <= self.len);
        let Some(walk) = walk else {
            // SAFETY: `new`'s contract, within bounds by the assertion.
            out.copy_from_slice(unsafe { slice(self.base, self.start + at, out.len()) });
            return;
        };
        let mut done = 0;
        walk.runs(self.start + at, out.len(), |offset, stride, count| {
            for (i, out) in out[done..done + count].iter_mut().enumerate() {
                // SAFETY: the walk reaches only elements of the tensor, which `new`'s contract covers.
                *out = unsafe { self.base.add(offset + i * stride).read() };
            }
            done += count;
        });
    }

    /// The first `n` elements, and the rest.
    pub(crate) fn split_at(self, n: usize) -> (Self, Self) {
        assert!(n <= self.len);
        let tail = Self { start: self.start + n, len: self.len - n, walks: self.walks.clone(), ..self };
        (Self { len: n, ..self }, tail)
    }
}

impl<T: Element> StridedMut<'_, T> {
    /// Borrows the `len` elements that `walks` reaches from `base`.
    ///
    /// # Safety
    /// For the whole of `'a`, every element is valid, aligned memory that nobody else reads or writes, and no two
    /// elements share memory.
    pub unsafe fn new(base: *mut T, len: usize, walks: Walks) -> Self {
        // SAFETY: the caller promises more than is needed.
        Self { view: unsafe { StridedRef::new(base, len, walks) }, borrow: PhantomData }
    }

    /// The elements, to read.
    pub fn view(&self) -> &StridedRef<'_, T> {
        &self.view
    }

    /// The elements as they lie, where they lie in the order of the state.
    pub fn as_mut_slice(&mut self) -> Option<&mut [T]> {
        let StridedRef { base, start, len, .. } = self.view;
        // SAFETY: `new`'s contract; without a walk the elements are `len` neighbours from `base + start`, and `&mut self`
        // excludes every other access through this borrow.
        self.view
            .walks
            .memory
            .is_none()
            .then(|| unsafe { std::slice::from_raw_parts_mut(base.cast_mut().add(start), len) })
    }

    /// Writes `values` from position `at` on, in the order of the state.
    pub(crate) fn scatter(&mut self, at: usize, values: &[T]) {
        let StridedRef { base, start, len, .. } = self.view;
        assert!(at + values.len() <= len);
        let base = base.cast_mut();
        let Some(walk) = self.view.walks.memory.as_deref() else {
            // SAFETY: `new`'s contract, within bounds by the assertion.
            unsafe { std::slice::from_raw_parts_mut(base.add(start + at), values.len()) }.copy_from_slice(values);
            return;
        };
        let mut done = 0;
        walk.runs(start + at, values.len(), |offset, stride, count| {
            for (i, &value) in values[done..done + count].iter().enumerate() {
                // SAFETY: the walk reaches only elements of the tensor, which `new`'s contract covers.
                unsafe { base.add(offset + i * stride).write(value) };
            }
            done += count;
        });
    }

    /// The first `n` elements, and the rest.
    pub(crate) fn split_at(self, n: usize) -> (Self, Self) {
        let (head, tail) = self.view.split_at(n);
        (Self { view: head, borrow: PhantomData }, Self { view: tail, borrow: PhantomData })
    }
}

/// Neighbours in memory.
///
/// # Safety
/// `len` elements from `base + start` are valid, aligned and not written during `'a`.
unsafe fn slice<'a, T>(base: *const T, start: usize, len: usize) -> &'a [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(base.add(start), len) }
}

impl<'a, T: Element> From<&'a [T]> for StridedRef<'a, T> {
    fn from(values: &'a [T]) -> Self {
        // SAFETY: a shared slice is valid memory that nobody writes during its lifetime.
        unsafe { Self::new(values.as_ptr(), values.len(), Walks::default()) }
    }
}

impl<'a, T: Element> From<&'a mut [T]> for StridedMut<'a, T> {
    fn from(values: &'a mut [T]) -> Self {
        // SAFETY: a mutable slice is valid memory that nobody else touches during its lifetime.
        unsafe { Self::new(values.as_mut_ptr(), values.len(), Walks::default()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_of_a_matrix() {
        // Columns 2..5 of a 4 x 8 matrix, walked row by row; the rest of the matrix is not touched.
        let mut matrix: Vec<f32> = (0..32_u8).map(f32::from).collect();
        let columns = Layout { sizes: vec![4, 3], strides: vec![8, 1] };
        let walks = Walks::new(&columns.dense_like(), &columns);
        // SAFETY: 12 distinct elements inside `matrix`, which outlives the view and is not used while it lives.
        let mut view = unsafe { StridedMut::new(matrix.as_mut_ptr().add(2), 12, walks) };
        assert!(view.as_mut_slice().is_none());
        let mut out = [0.0; 5];
        view.view().gather(2, &mut out);
        assert_eq!(out, [4.0, 10.0, 11.0, 12.0, 18.0]);
        let (head, mut tail) = view.split_at(4);
        assert_eq!((head.view().len(), tail.view().len()), (4, 8));
        tail.scatter(1, &[-1.0, -2.0]);
        assert_eq!((matrix[12], matrix[18], matrix[19], matrix[13]), (-1.0, -2.0, 19.0, 13.0));
    }

    #[test]
    fn logical_order_of_a_transposed_tensor() {
        let values: Vec<f32> = (0..6_u8).map(f32::from).collect();
        let transposed = Layout { sizes: vec![2, 3], strides: vec![1, 2] };
        let walks = Walks::new(&transposed, &transposed);
        // SAFETY: 6 elements inside `values`, which outlives the view.
        let view = unsafe { StridedRef::new(values.as_ptr(), 6, walks) };
        assert_eq!(view.as_slice(), Some(&values[..]));
        assert!(view.as_logical_slice().is_none());
        let mut out = [0.0; 6];
        view.gather_logical(0, &mut out);
        assert_eq!(out, [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
    }
}
