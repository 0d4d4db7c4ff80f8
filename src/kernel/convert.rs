//! Conversions between fp32 and the 16-bit formats, written with selects and integer arithmetic only so that the loops
//! around them vectorise at every ISA level and give the same bits there. (`half`'s slice conversions are scalar; it
//! serves as the oracle in the tests.)

/// The NaN that outboard writes in bf16.
pub const BF16_NAN: u16 = 0x7FC0;

/// bf16 bits to fp32, exact.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The value, or the one NaN whose bf16 is [`BF16_NAN`]: canonical before rounding, a NaN needs no further care. (Choosing
/// after rounding makes the compiler narrow the choice to 16-bit lanes, with a shuffle each way: a fifth more instructions
/// in AVX2.)
#[inline(always)]
pub(super) fn with_canonical_nan(value: f32) -> f32 {
    if value.is_nan() { f32::from_bits(0x7FC0_0000) } else { value }
}

/// fp32 to bf16 bits, round to nearest even; every NaN becomes [`BF16_NAN`].
///
/// Adding `0x7FFF` without looking for NaN first would turn CUDA's canonical NaN `0x7FFF_FFFF` into -0.0.
#[inline(always)]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = with_canonical_nan(value).to_bits();
    (bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// fp32 to bf16 bits with stochastic rounding: `noise` is uniform over 16 bits, and the value is rounded away from zero
/// with the probability that its distance from the lower neighbour says. NaN and infinities stay.
#[inline(always)]
pub fn f32_to_bf16_stochastic(value: f32, noise: u32) -> u16 {
    let bits = with_canonical_nan(value).to_bits();
    let is_finite = bits & 0x7F80_0000 != 0x7F80_0000;
    (bits.wrapping_add(if is_finite { noise & 0xFFFF } else { 0 }) >> 16) as u16
}

/// fp16 bits to fp32, exact.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = (u32::from(bits) & 0x8000) << 16;
    let magnitude = u32::from(bits) & 0x7FFF;
    // The fp16 exponent sits 112 below fp32's; a multiplication by 2^112 moves it and normalises denormals, exactly.
    let finite = (f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000)).to_bits();
    let special = (magnitude << 13) | 0x7F80_0000;
    f32::from_bits(sign | if magnitude >= 0x7C00 { special } else { finite })
}

/// fp32 to fp16 bits, round to nearest even; every NaN becomes `0x7E00`.
#[inline(always)]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = with_canonical_nan(value).to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7FFF_FFFF;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0x0FFF + ((magnitude >> 13) & 1)) >> 13;
    // 0.5 has the spacing of fp16's denormals: the addition rounds to it.
    let denormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3F00_0000);
    let special = if magnitude > 0x7F80_0000 { 0x7E00 } else { 0x7C00 };
    let small = if magnitude < 0x3880_0000 { denormal } else { normal };
    (sign | if magnitude >= 0x4780_0000 { special } else { small }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
    }

    #[test]
    fn every_16_bit_pattern_widens_as_half_does() {
        for bits in 0..=u16::MAX {
            assert!(same(bf16_to_f32(bits), half::bf16::from_bits(bits).to_f32()), "bf16 {bits:04x}");
            assert!(same(f16_to_f32(bits), half::f16::from_bits(bits).to_f32()), "f16 {bits:04x}");
        }
    }

    /// All 2^32 patterns would take a minute; every exponent with every pattern near a rounding boundary does not.
    #[test]
    fn narrowing_rounds_to_nearest_even_as_half_does() {
        let tails: Vec<u32> =
            (0..1_u32 << 13).map(|i| i.wrapping_mul(0x9E37_79B9) & 0x7F_FFFF).chain(near_boundaries()).collect();
        for high in 0..=0x1FF_u32 {
            for &tail in &tails {
                let value = f32::from_bits((high << 23) | tail);
                if value.is_nan() {
                    assert_eq!(f32_to_bf16(value), BF16_NAN);
                    assert_eq!(f32_to_f16(value), 0x7E00);
                    continue;
                }
                assert_eq!(f32_to_bf16(value), half::bf16::from_f32(value).to_bits(), "{value:e}");
                assert_eq!(f32_to_f16(value), half::f16::from_f32(value).to_bits(), "{value:e}");
            }
        }
    }

    fn near_boundaries() -> impl Iterator<Item = u32> {
        (0..=23).flat_map(|bit| (-2..=2_i64).map(move |near| ((1_i64 << bit) + near).rem_euclid(1 << 23) as u32))
    }

    #[test]
    fn stochastic_rounding_keeps_what_is_representable_and_special() {
        for bits in 0..=u16::MAX {
            let value = bf16_to_f32(bits);
            for noise in [0, 1, 0x7FFF, 0xFFFF] {
                let got = f32_to_bf16_stochastic(value, noise);
                assert_eq!(got, if value.is_nan() { BF16_NAN } else { bits });
            }
        }
    }

    #[test]
    fn stochastic_rounding_is_unbiased() {
        let value = f32::from_bits(0x3F80_4000); // a quarter of the way from 1.0 to its neighbour
        let up = (0..=0xFFFF).filter(|&noise| f32_to_bf16_stochastic(value, noise) == 0x3F81).count();
        assert_eq!(up, 0x4000);
    }
}
