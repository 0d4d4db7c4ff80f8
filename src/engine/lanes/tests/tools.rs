//! A watchdog, random numbers, and memory of the simulated device.

use crate::kernel::{GradDType, f32_to_bf16, f32_to_f16};
use crate::memory::Element;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Runs a scenario that must not hang.
pub(super) fn within<T: Send + 'static>(what: &str, scenario: impl FnOnce() -> T + Send + 'static) -> T {
    const PATIENCE: Duration = Duration::from_secs(60);
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || drop(tell.send(catch_unwind(AssertUnwindSafe(scenario)))));
    match told.recv_timeout(PATIENCE) {
        Ok(Ok(result)) => result,
        Ok(Err(panic)) => resume_unwind(panic),
        Err(error) => panic!("{what}: a deadlock, nothing came within {PATIENCE:?}: {error}"),
    }
}

/// Waits for something that is to come about by itself.
pub(super) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < Duration::from_secs(20), "never: {what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Random numbers: `SplitMix64`.
#[derive(Clone, Debug)]
pub(super) struct Chance(pub(super) u64);

impl Chance {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }

    /// Mostly of ordinary size, some zero, tiny or huge; the square of the huge ones overflows.
    fn value(&mut self) -> f32 {
        let bits = self.next();
        let ordinary = (bits as u32 as f32 / 4e9 - 0.5) * 0.1;
        match bits >> 54 {
            0 => 0.0,
            1 => ordinary * 1e-38,
            2 => ordinary * 1e30,
            _ => ordinary,
        }
    }

    pub(super) fn values(&mut self, dtype: GradDType, len: usize) -> Vec<u8> {
        let values = (0..len).map(|_| self.value());
        match dtype {
            GradDType::F32 => values.flat_map(f32::to_ne_bytes).collect(),
            GradDType::Bf16 => values.flat_map(|value| f32_to_bf16(value).to_ne_bytes()).collect(),
            // No infinities.
            GradDType::F16 => values.flat_map(|value| f32_to_f16(value.clamp(-6e4, 6e4)).to_ne_bytes()).collect(),
        }
    }
}

/// A tensor in the simulated device's memory, which is the heap. Not on a line of its own.
pub(super) struct Tensor {
    words: *mut [u64],
    offset: usize,
    bytes: usize,
}

// SAFETY: plain memory; who touches it when is what the tests are about.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

impl Tensor {
    pub(super) fn new(bytes: usize, offset: usize) -> Self {
        let words = vec![0x5555_5555_5555_5555_u64; (bytes + offset).div_ceil(8).max(1)];
        let words = Box::into_raw(words.into_boxed_slice());
        words.cast::<u64>().expose_provenance();
        Self { words, offset, bytes }
    }

    pub(super) fn holding(values: &[u8], offset: usize) -> Self {
        let tensor = Self::new(values.len(), offset);
        tensor.write(values);
        tensor
    }

    fn start(&self) -> *mut u8 {
        self.words.cast::<u8>().wrapping_add(self.offset)
    }

    pub(super) fn address(&self) -> usize {
        self.start() as usize
    }

    pub(super) fn run(&self) -> (usize, usize) {
        (self.address(), self.bytes)
    }

    /// Its bytes, while nobody writes them.
    pub(super) fn read(&self) -> Vec<u8> {
        // SAFETY: the tensor's own memory; the callers look when the device is done with it, or in its stream order.
        unsafe { std::slice::from_raw_parts(self.start(), self.bytes) }.to_vec()
    }

    /// Sets its bytes, while nobody touches them.
    pub(super) fn write(&self, values: &[u8]) {
        assert_eq!(values.len(), self.bytes);
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.start(), self.bytes) };
    }

    pub(super) fn elements<T: Element>(&mut self) -> &mut [T] {
        let start = self.start().cast::<T>();
        assert!(start.is_aligned());
        // SAFETY: the tensor's own memory, aligned, and any bytes are a `T`; an exclusive tensor is no device's.
        unsafe { std::slice::from_raw_parts_mut(start, self.bytes / size_of::<T>()) }
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: from `Box::into_raw`, once.
        drop(unsafe { Box::from_raw(self.words) });
    }
}
