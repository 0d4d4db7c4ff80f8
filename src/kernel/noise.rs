//! The counter-based random bits of stochastic rounding. They are a function of (seed, step, parameter, element) alone,
//! so every lane, thread count and chunk size draws the same ones.

/// Random bits for one parameter at one step.
///
/// One 32-bit hash per element serves both moments: its low half rounds `exp_avg`, its high half `exp_avg_sq`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Noise {
    key: u64,
}

impl Noise {
    /// The noise of parameter number `parameter` at step `step` (the count after the step) under `seed`.
    pub fn new(seed: u64, step: u64, parameter: u64) -> Self {
        let key = [seed, step, parameter].into_iter().fold(0, |key, word| mix64(key ^ word).wrapping_add(GOLDEN));
        Self { key }
    }

    /// The key for the 2^32 elements from `high << 32`. A slice that is updated in one call may not cross such a border.
    pub(crate) fn stream(self, high: u32) -> u32 {
        let mixed = mix64(self.key ^ u64::from(high));
        (mixed ^ (mixed >> 32)) as u32
    }

    /// The key as it crosses to the CUDA kernel.
    pub fn key(self) -> u64 {
        self.key
    }
}

/// 2^64 over the golden ratio.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A 64-bit finaliser: the constants are those of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
fn mix64(mut x: u64) -> u64 {
    x = x.wrapping_add(GOLDEN);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// The 32 random bits of element `low` (the low half of its index) in a stream. 32-bit multiplications only: AVX2 has no
/// others. The constants are those of MurmurHash3's 32-bit finaliser (A. Appleby).
#[inline(always)]
pub(crate) fn hash32(stream: u32, low: u32) -> u32 {
    let mut x = low.wrapping_mul(0x9E37_79B1) ^ stream;
    x = (x ^ (x >> 16)).wrapping_mul(0x85EB_CA6B);
    x = (x ^ (x >> 13)).wrapping_mul(0xC2B2_AE35);
    x ^ (x >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_input_matters() {
        let base = Noise::new(1, 2, 3);
        assert_ne!(base, Noise::new(0, 2, 3));
        assert_ne!(base, Noise::new(1, 3, 3));
        assert_ne!(base, Noise::new(1, 2, 4));
        assert_ne!(base, Noise::new(2, 1, 3));
        assert_ne!(base.stream(0), base.stream(1));
    }

    #[test]
    fn both_halves_are_uniform() {
        let stream = Noise::new(0, 1, 0).stream(0);
        let n = 1 << 20;
        let (mut low, mut high, mut product) = (0_f64, 0_f64, 0_f64);
        for i in 0..n {
            let bits = hash32(stream, i);
            let (a, b) = (f64::from(bits & 0xFFFF) / 65536.0 - 0.5, f64::from(bits >> 16) / 65536.0 - 0.5);
            low += a;
            high += b;
            product += a * b;
        }
        // Standard deviations: 0.2887 / sqrt(n) = 2.8e-4 for the means, 1/12 / sqrt(n) = 8e-5 for the product.
        let n = f64::from(n);
        assert!((low / n).abs() < 1.5e-3 && (high / n).abs() < 1.5e-3 && (product / n).abs() < 4e-4);
    }
}
