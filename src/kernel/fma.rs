//! The two ways to a fused multiply-add: the machine's instruction, and software for a CPU that has none. Both are
//! correctly rounded, so they give the same bits.

/// A fused multiply-add, `a * b + c` rounded once.
pub(crate) trait Fma {
    fn fma(a: f32, b: f32, c: f32) -> f32;
}

/// The machine's instruction. Only to be inlined below a `target_feature` that has it (or on an architecture whose
/// baseline does): elsewhere the compiler calls the C library for every element.
pub(crate) struct HardwareFma;

impl Fma for HardwareFma {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// Software: the product is exact in f64; the sum is rounded to odd there, which has 29 bits to spare over fp32 and so
/// makes the second rounding harmless (S. Boldo, G. Melquiond, "Emulation of a FMA and correctly rounded sums: proved
/// algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008).
pub(crate) struct SoftwareFma;

impl Fma for SoftwareFma {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        let product = f64::from(a) * f64::from(b);
        let addend = f64::from(c);
        let sum = product + addend;
        // Knuth's two-sum: the exact error of `sum`.
        let b_virtual = sum - product;
        let error = (product - (sum - b_virtual)) + (addend - b_virtual);
        let bits = sum.to_bits();
        // Round to odd: an inexact sum whose last bit is even moves one step toward the error.
        let toward_zero = (error < 0.0) == (sum > 0.0);
        let stepped = if toward_zero { bits.wrapping_sub(1) } else { bits.wrapping_add(1) };
        let inexact = error != 0.0 && error.is_finite() && sum.is_finite();
        let odd = if inexact && bits & 1 == 0 { stepped } else { bits };
        f64::from_bits(odd) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn same(a: f32, b: f32, c: f32) {
        let (got, want) = (SoftwareFma::fma(a, b, c), a.mul_add(b, c));
        assert!(
            got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
            "fma({a:e}, {b:e}, {c:e}) = {got:e}, not {want:e}"
        );
    }

    #[test]
    fn edges() {
        let edges = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            f32::MIN_POSITIVE,
            -f32::MIN_POSITIVE,
            f32::from_bits(1),
            -f32::from_bits(1),
            f32::MAX,
            f32::MIN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            f32::EPSILON,
            1.0 + f32::EPSILON,
            1.0 - f32::EPSILON / 2.0,
            3.0e-23,
            1.5e19,
        ];
        for a in edges {
            for b in edges {
                for c in edges {
                    same(a, b, c);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200_000))]
        #[test]
        fn any_bits(a: u32, b: u32, c: u32) {
            same(f32::from_bits(a), f32::from_bits(b), f32::from_bits(c));
        }

        /// Random bits seldom cancel; here the addend is close to the product, or to half an ulp of it.
        #[test]
        fn near_cancellation(a in 0x3f00_0000_u32..0x4080_0000, b in 0x3f00_0000_u32..0x4080_0000, steps in -4_i32..5, shift in 0_u32..40) {
            let (a, b) = (f32::from_bits(a), f32::from_bits(b));
            let near = f32::from_bits((-(a * b)).to_bits().wrapping_add_signed(steps));
            same(a, b, near);
            same(a, b, near * (-(shift as f32)).exp2());
        }
    }
}
