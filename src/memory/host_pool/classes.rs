//! The sizes of buffers: eight between one power of two and the next, so that a request is rounded up by less than an
//! eighth.

use crate::memory::ALIGNMENT;

/// The size of the buffer that a request of `bytes` (more than 0) is served with: whole cache lines, and from 512 bytes on
/// less than 9/8 of what is asked for. `None` beyond the address space.
pub fn class_of(bytes: usize) -> Option<usize> {
    // The highest bit and three bits behind it are kept.
    let step = (1_usize << bytes.max(1).ilog2()) >> 3;
    bytes.checked_next_multiple_of(step.max(ALIGNMENT))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn eight_classes_between_powers_of_two() {
        let mut classes: Vec<usize> = (1025..=2048).map(|bytes| class_of(bytes).unwrap()).collect();
        classes.dedup();
        assert_eq!(classes, [1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048]);
        assert_eq!([1, 64, 65, 512, 513].map(|bytes| class_of(bytes).unwrap()), [64, 64, 128, 512, 576]);
        assert_eq!(class_of(usize::MAX), None);
        assert_eq!(class_of(1 << 63), Some(1 << 63));
    }

    /// Bytes of what autograd saves, in the order in which it does, in bf16: a block of a GPT of 2048 columns at 8x2048
    /// tokens; attention and an encoder layer of 1000 columns at 7x333 and 3x1111; a few convolutions at 5x225x225.
    const SAVED: [usize; 75] = [
        4096,
        67_108_864,
        4096,
        65_536,
        65_536,
        67_108_864,
        25_165_824,
        134_217_728,
        134_217_728,
        134_217_728,
        67_108_864,
        8_388_608,
        4096,
        67_108_864,
        4096,
        65_536,
        65_536,
        67_108_864,
        33_554_432,
        268_435_456,
        268_435_456,
        33_554_432,
        4_662_000,
        6_000_000,
        4_662_000,
        4_662_000,
        326_340,
        4_662_000,
        326_340,
        4_662_000,
        2_000_000,
        6_000_000,
        6_666_000,
        13_332_000,
        13_332_000,
        118_494_816,
        118_494_816,
        13_332_000,
        118_494_816,
        6_666_000,
        2_000_000,
        6_666_000,
        2000,
        6_666_000,
        2000,
        13_332,
        13_332,
        6_666_000,
        5_460_000,
        18_198_180,
        18_198_180,
        18_198_180,
        5_460_000,
        6_666_000,
        2000,
        6_666_000,
        2000,
        13_332,
        13_332,
        1_518_750,
        18_816,
        8_172_160,
        128,
        128,
        128,
        256,
        256,
        8_172_160,
        8_172_160,
        8_317_440,
        2_079_360,
        221_184,
        5_808_000,
        384,
        80,
    ];

    #[test]
    fn what_autograd_saves_wastes_at_most_an_eighth() {
        let asked: usize = SAVED.iter().sum();
        let given: usize = SAVED.iter().map(|&bytes| class_of(bytes).unwrap()).sum();
        assert!((given - asked) * 8 <= asked, "{} of {asked}", given - asked);
    }

    proptest! {
        #[test]
        fn rounding_wastes_less_than_an_eighth(bytes in 512_usize..1 << 50) {
            let class = class_of(bytes).unwrap();
            prop_assert!(class >= bytes && class.is_multiple_of(ALIGNMENT));
            prop_assert!((class - bytes) * 8 < bytes);
            prop_assert_eq!(class_of(class), Some(class));
        }

        #[test]
        fn larger_requests_have_no_smaller_classes(bytes in 1_usize..1 << 50) {
            prop_assert!(class_of(bytes).unwrap() <= class_of(bytes + 1).unwrap());
        }
    }
}
