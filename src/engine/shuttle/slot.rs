//! One optimizer state's bytes: where they are, and what is known of their copies.

use crate::error::{Error, Result};
use crate::memory::Berth;
use std::fmt;
use std::ops::Range;

/// Where a slot's value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// Nowhere: it has none yet.
    Pending,
    /// In its host memory.
    Host,
    /// On its way to the device.
    HostToDevice,
    /// On the device; its host memory holds what was there before.
    Device,
    /// On its way to its host memory.
    DeviceToHost,
}

impl Place {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Pending, Self::Host, Self::HostToDevice, Self::Device, Self::DeviceToHost];

    /// In a word: pending, host, h2d, device or d2h.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Host => "host",
            Self::HostToDevice => "h2d",
            Self::Device => "device",
            Self::DeviceToHost => "d2h",
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One slot.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) name: String,
    pub(super) berth: Berth,
    /// The index of its slab; `None` without bytes.
    pub(super) slab: Option<usize>,
    pub(super) place: Place,
    /// Whether its host memory has ever been the value: what [`Place::Device`] can fall back to.
    pub(super) has_value: bool,
    /// Whether a copy home has failed half way, so that its host memory holds neither value.
    pub(super) is_torn: bool,
    /// Where on the device it is or will be; empty where nobody said.
    pub(super) device: Range<usize>,
    /// The last copy in and the last copy out, by their numbers; 0 for none.
    pub(super) arrival: u64,
    pub(super) departure: u64,
}

impl Slot {
    /// Refuses what is asked of it elsewhere than in `places`.
    pub(super) fn require(&self, places: &[Place], asked: &'static str, wanted: &'static str) -> Result<()> {
        if places.contains(&self.place) {
            return Ok(());
        }
        Err(Error::Transition { name: self.name.clone(), place: self.place.name().into(), asked, wanted })
    }

    /// Where in host memory it is.
    pub(super) fn host(&self) -> Range<usize> {
        let start = self.berth.share().0;
        start..start + self.berth.len()
    }
}
