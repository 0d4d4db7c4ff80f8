//! The dtypes that the recipe knows, as values. The numbers are those of `cuda/outboard_cuda.h`.

/// The dtype of a weight and how its fp32 master is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(i32)]
pub enum WeightKind {
    /// fp32: the weight is its own master.
    F32 = 0,
    /// bf16 with a 16-bit residual.
    Bf16Split = 1,
    /// bf16 with a full fp32 master.
    Bf16Full = 2,
    /// fp16 with a full fp32 master.
    F16Full = 3,
}

impl WeightKind {
    /// Bytes of one live weight.
    pub fn live_bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// Bytes kept beside one live weight.
    pub fn kept_bytes(self) -> usize {
        match self {
            Self::F32 => 0,
            Self::Bf16Split => 2,
            Self::Bf16Full | Self::F16Full => 4,
        }
    }
}

/// The dtype of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(i32)]
pub enum GradDType {
    /// fp32.
    F32 = 0,
    /// bf16.
    Bf16 = 1,
    /// fp16.
    F16 = 2,
}

impl GradDType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

/// The dtype in which the moments are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(i32)]
pub enum MomentDType {
    /// fp32.
    #[default]
    F32 = 0,
    /// bf16, rounded stochastically when stored.
    Bf16 = 1,
}

impl MomentDType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}
