//! fp32 masters of 16-bit weights.
//!
//! A *split* master is the live bf16 weight plus a 16-bit residual: `master_bits = (weight_bits << 16) +
//! sign_extend(residual)`. There is no second copy of the weight to go stale: load other weights and the master has
//! followed. A *full* master is an fp32 value that follows its weight whenever it no longer rounds to it.
//!
//! Decoding has cases of its own, all from weights written by others under an old residual: they must never turn a
//! finite weight into NaN or change its sign.

use super::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, with_canonical_nan};

/// The fp32 master of a bf16 weight and its residual.
///
/// The residual counts as 0 where the sum would leave the weight's neighbourhood: at ±0 with a negative residual, at
/// ±infinity with a positive one, at NaN, and at residual -32768 under an odd weight (no encoder writes it, ties go to
/// even).
#[inline(always)]
pub fn decode_split(weight: u16, residual: i16) -> f32 {
    // By looking at the sum, in 32-bit lanes: it changes sign only at ±0, and is NaN only at infinity or at NaN. Its low half
    // is 0x8000 only under the residual -32768, and then bit 16 is clear if the weight was odd. Testing the 16-bit weight
    // and residual instead costs a quarter more instructions.
    let high = u32::from(weight) << 16;
    let sum = high.wrapping_add_signed(i32::from(residual));
    let changes_sign = ((sum ^ high) as i32) < 0;
    let is_nan = f32::from_bits(sum).is_nan();
    let is_odd_tie = sum & 0x1_FFFF == 0x8000;
    f32::from_bits(if changes_sign | is_nan | is_odd_tie { high } else { sum })
}

/// The bf16 weight (round to nearest even) and residual of an fp32 master.
///
/// A NaN gives `(0x7FC0, 0)`. A tie that rounds down has the residual +32768, which does not fit: there the master moves
/// one fp32 ulp toward the weight. A finite master that rounds to infinity keeps its (negative) residual.
#[inline(always)]
pub fn encode_split(master: f32) -> (u16, i16) {
    let bits = with_canonical_nan(master).to_bits();
    let weight = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) & 0xFFFF_0000;
    let residual = (bits.wrapping_sub(weight) as i32).min(i32::from(i16::MAX));
    ((weight >> 16) as u16, residual as i16)
}

/// The master in force for a bf16 weight with a full fp32 master: the master while it rounds to the weight, bit for
/// bit; else the weight has been written by others and is the master.
#[inline(always)]
pub fn follow_bf16(weight: u16, master: f32) -> f32 {
    if f32_to_bf16(master) == weight { master } else { bf16_to_f32(weight) }
}

/// As [`follow_bf16`], for fp16 weights.
#[inline(always)]
pub fn follow_f16(weight: u16, master: f32) -> f32 {
    if f32_to_f16(master) == weight { master } else { f16_to_f32(weight) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a master becomes once encoded: itself, but for the tie that rounds down.
    fn after_encoding(master: f32) -> f32 {
        let bits = master.to_bits();
        let tie_rounds_down = bits & 0xFFFF == 0x8000 && (bits >> 16) & 1 == 0;
        if tie_rounds_down { f32::from_bits(bits - 1) } else { master }
    }

    fn check_master(bits: u32) {
        let master = f32::from_bits(bits);
        let (weight, residual) = encode_split(master);
        if master.is_nan() {
            assert_eq!((weight, residual), (0x7FC0, 0), "{bits:08x}");
            return;
        }
        assert_eq!(weight, f32_to_bf16(master), "{bits:08x}");
        assert_eq!(decode_split(weight, residual).to_bits(), after_encoding(master).to_bits(), "{bits:08x}");
    }

    fn check_pair(weight: u16, residual: i16) {
        let value = bf16_to_f32(weight);
        let master = decode_split(weight, residual);
        if value.is_nan() {
            assert!(master.is_nan());
            return;
        }
        assert!(!master.is_nan(), "{weight:04x} {residual}");
        assert_eq!(master.is_sign_negative(), value.is_sign_negative(), "{weight:04x} {residual}");
        // Never further than half a bf16 ulp: the weight is what the master rounds to.
        let (again, _) = encode_split(master);
        assert!(again == weight, "{weight:04x} {residual} -> {again:04x}");
    }

    /// A sample of all 2^32 masters and pairs; the whole of both is `every_master_and_every_pair`.
    #[test]
    fn masters_and_pairs() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, high.wrapping_mul(0x9E37)] {
                check_master((u32::from(high) << 16) | u32::from(low));
                check_pair(high, low as i16);
            }
        }
    }

    #[test]
    #[ignore = "2^32 masters and as many pairs take about a minute: `make test-exhaustive` runs it"]
    fn every_master_and_every_pair() {
        use rayon::prelude::*;
        (0..=u16::MAX).into_par_iter().for_each(|high| {
            for low in 0..=u16::MAX {
                check_master((u32::from(high) << 16) | u32::from(low));
                check_pair(high, low as i16);
            }
        });
    }

    #[test]
    fn zeroed_weights_stay_zero_under_any_residual() {
        for residual in i16::MIN..0 {
            assert_eq!(decode_split(0x0000, residual).to_bits(), 0);
            assert_eq!(decode_split(0x8000, residual).to_bits(), 0x8000_0000);
        }
    }

    #[test]
    fn full_masters_follow_the_weight() {
        assert_eq!(follow_bf16(0x3F80, 1.001), 1.001);
        assert_eq!(follow_bf16(0x4000, 1.001), 2.0);
        assert_eq!(follow_bf16(0x8000, 0.0).to_bits(), 0x8000_0000, "the sign of zero is the weight's");
        assert!(follow_bf16(0x7FC1, 1.0).is_nan());
        assert_eq!(follow_f16(0x3C00, 1.0001), 1.0001);
        assert_eq!(follow_f16(0x4000, 1.0001), 2.0);
    }
}
