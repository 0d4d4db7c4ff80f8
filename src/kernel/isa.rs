//! Which instruction set a kernel is compiled for, and which this machine can run.

use crate::error::{Error, Result};
use std::sync::OnceLock;

/// An instruction-set level. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// 512-bit vectors: AVX-512 F, BW, DQ, VL.
    Avx512,
    /// 256-bit vectors: AVX2 and FMA.
    Avx2,
    /// 128-bit vectors of aarch64.
    Neon,
    /// What every machine of the architecture has, with a software `fma`.
    Portable,
}

impl Isa {
    /// Every level, best first.
    pub const ALL: [Self; 4] = [Self::Avx512, Self::Avx2, Self::Neon, Self::Portable];

    /// The level's name, as `OUTBOARD_ISA` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Neon => "neon",
            Self::Portable => "portable",
        }
    }

    /// Whether this machine can run it. Tests every feature that the level enables.
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => true,
            Self::Portable => true,
            #[cfg(not(target_arch = "aarch64"))]
            Self::Neon => false,
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx512 | Self::Avx2 => false,
        }
    }

    /// The levels this machine can run, best first.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The level in use: the best available, or what the environment variable `OUTBOARD_ISA` forces. Read once.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] when the variable names no level or one this machine cannot run.
    pub fn current() -> Result<Self> {
        static CHOICE: OnceLock<std::result::Result<Isa, String>> = OnceLock::new();
        CHOICE
            .get_or_init(|| Self::choose(std::env::var("OUTBOARD_ISA").ok().as_deref()))
            .clone()
            .map_err(Error::InvalidValue)
    }

    fn choose(forced: Option<&str>) -> std::result::Result<Self, String> {
        let Some(name) = forced.filter(|name| !name.is_empty()) else {
            return Ok(Self::available().next().unwrap_or(Self::Portable));
        };
        match Self::ALL.into_iter().find(|isa| isa.name() == name) {
            Some(isa) if isa.is_available() => Ok(isa),
            found => {
                let available = Self::available().map(Self::name).collect::<Vec<_>>().join(", ");
                let problem = if found.is_some() { "is not available on this machine" } else { "is not a level" };
                Err(format!("OUTBOARD_ISA={name} {problem}; available: {available}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choice() {
        assert!(Isa::choose(None).unwrap().is_available());
        assert_eq!(Isa::choose(Some("")), Isa::choose(None));
        assert_eq!(Isa::choose(Some("portable")), Ok(Isa::Portable));
        assert!(Isa::choose(Some("sse9")).unwrap_err().contains("available: "));
        if let Some(missing) = Isa::ALL.into_iter().find(|isa| !isa.is_available()) {
            assert!(Isa::choose(Some(missing.name())).unwrap_err().contains("not available on this machine"));
        }
    }
}
