//! The floating-point environment. A thread inherits flush-to-zero and rounding modes from whoever starts it
//! (`torch.set_flush_denormal(True)` before the pool exists flushed every denormal), so every job sets the default and
//! puts back what it found.

/// Default rounding and denormal handling until dropped.
#[must_use]
pub(crate) struct DefaultFloatEnvironment {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    saved: Register,
}

#[cfg(target_arch = "x86_64")]
type Register = u32;
#[cfg(target_arch = "aarch64")]
type Register = u64;

/// All exceptions masked, round to nearest, no flushing.
#[cfg(target_arch = "x86_64")]
const DEFAULT: Register = 0x1F80;
#[cfg(target_arch = "aarch64")]
const DEFAULT: Register = 0;

/// The sticky exception flags: not part of the mode, and not worth a write.
#[cfg(target_arch = "x86_64")]
const FLAGS: Register = 0x3F;
#[cfg(target_arch = "aarch64")]
const FLAGS: Register = 0;

#[cfg(target_arch = "x86_64")]
fn read() -> Register {
    let mut value: Register = 0;
    // SAFETY: stores the 32 bits of MXCSR to the address of a live u32; SSE is part of x86-64.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
    value
}

#[cfg(target_arch = "x86_64")]
fn write(value: Register) {
    // SAFETY: loads MXCSR from a live u32 whose reserved bits are zero, since it is `DEFAULT` or came from `read`.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack)) };
}

#[cfg(target_arch = "aarch64")]
fn read() -> Register {
    let value: Register;
    // SAFETY: FPCR may be read at any exception level.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

#[cfg(target_arch = "aarch64")]
fn write(value: Register) {
    // SAFETY: FPCR may be written at any exception level; the value is `DEFAULT` or came from `read`.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) value, options(nomem, nostack, preserves_flags)) };
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl DefaultFloatEnvironment {
    pub(crate) fn enter() -> Self {
        let saved = read();
        if saved & !FLAGS != DEFAULT {
            write(DEFAULT);
        }
        Self { saved }
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl Drop for DefaultFloatEnvironment {
    fn drop(&mut self) {
        if self.saved & !FLAGS != DEFAULT {
            write(self.saved);
        }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
impl DefaultFloatEnvironment {
    pub(crate) fn enter() -> Self {
        Self {}
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use std::hint::black_box;

    #[test]
    fn denormals_survive_a_flushing_caller_who_keeps_his_setting() {
        let flushing = DEFAULT | 0x8040; // flush to zero, denormals are zero
        write(flushing);
        let half_smallest_normal = {
            let _environment = DefaultFloatEnvironment::enter();
            black_box(f32::MIN_POSITIVE) * black_box(0.5)
        };
        let after = read() & !FLAGS;
        write(DEFAULT);
        assert_eq!(half_smallest_normal.to_bits(), 0x0040_0000);
        assert_eq!(after, flushing);
    }
}
