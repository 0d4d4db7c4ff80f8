//! Pinning state for devices, as far as the options and the system allow.

use super::lanes::Engines;
use super::tensor::Place;
use crate::error::Error;
use crate::kernel::Isa;
use crate::memory::{Slab, locked_memory_limit};
use pyo3::prelude::*;

/// Pins a slab for the device at `place`, counting it in `pinned` bytes. What cannot be pinned is a warning, or with
/// `pin=True` an error.
pub(super) fn pin(
    engines: &mut Engines,
    isa: Isa,
    place: Place,
    slab: &Slab,
    pinned: &mut usize,
    warnings: &mut Vec<String>,
) -> PyResult<()> {
    if place == Place::Host {
        return Ok(());
    }
    // Also where nothing is pinned: a device that cannot be used is found out now, not in a hook.
    let engine = engines.of(place, isa)?;
    if !engines.choices.pins_state() || slab.bytes() == 0 {
        return Ok(());
    }
    let (bytes, most) = (slab.bytes(), engines.choices.max_pinned_bytes);
    let (what, error, cure): (_, fn(String) -> Error, _) = if *pinned + bytes > most {
        let limit = format!("the {most} bytes that may be pinned ({pinned} are)");
        let what = format!("{bytes} bytes of optimizer state would exceed {limit}");
        (what, Error::InvalidValue, "raise max_pinned_bytes if the machine has the memory")
    } else if let Err(error) = engine.pin(slab) {
        let limit = locked_memory_limit().map_or("unlimited".to_owned(), |limit| format!("{limit} bytes"));
        let what = format!("cannot pin {bytes} bytes of optimizer state ({error}; locked memory: {limit})");
        (what, Error::Cuda, "raise the limit of locked memory")
    } else {
        *pinned += bytes;
        return Ok(());
    };
    if engines.choices.pin == Some(true) {
        let instead = "pin='auto' leaves such state pageable, served by the CPU lane alone";
        return Err(error(format!("pin=True: {what}: {cure}; {instead}")).into());
    }
    let served = "this state stays pageable and is served by the CPU lane alone";
    warnings.push(format!("{what}: {served}; {cure}"));
    Ok(())
}
