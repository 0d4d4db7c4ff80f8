//! One slot: its name, its size, and where its value is.

use crate::error::{Error, Result};
use std::fmt;
use std::sync::Arc;

/// Where a slot's value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// It has none yet.
    Pending,
    /// In host memory.
    Host,
    /// On its way to the device; host memory holds it, too.
    HostToDevice,
    /// On the device; host memory holds an older one.
    Device,
    /// On its way home: host memory will hold it. Or it was given up on the device, and host memory is still being read.
    DeviceToHost,
    /// A copy home has failed half way.
    Lost,
}

impl fmt::Display for Whereabouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pending => "pending",
            Self::Host => "host",
            Self::HostToDevice => "h2d",
            Self::Device => "device",
            Self::DeviceToHost => "d2h",
            Self::Lost => "lost",
        })
    }
}

#[derive(Debug)]
pub(super) struct Slot<E> {
    pub(super) name: String,
    pub(super) bytes: usize,
    pub(super) place: Whereabouts,
    /// Of the last copy in.
    pub(super) arrival: Option<Arc<E>>,
    /// Of what uses host memory since the value has left the device.
    pub(super) home: Option<Arc<E>>,
    /// Its addresses on the device: first, and one past the last.
    pub(super) range: (usize, usize),
    cause: String,
}

impl<E> Slot<E> {
    pub(super) fn new(name: &str, bytes: usize) -> Self {
        let (name, place, cause) = (name.to_owned(), Whereabouts::Pending, String::new());
        Self { name, bytes, place, arrival: None, home: None, range: (0, 0), cause }
    }

    /// Refuses what is not possible from where the value is.
    pub(super) fn check(&self, from: &[Whereabouts], asked: &'static str) -> Result<()> {
        if from.contains(&self.place) {
            return Ok(());
        }
        let at = match self.place {
            Whereabouts::Pending => "without a value yet".to_owned(),
            Whereabouts::Host => "on the host".to_owned(),
            Whereabouts::HostToDevice => "on its way to the device".to_owned(),
            Whereabouts::Device => "on the device".to_owned(),
            Whereabouts::DeviceToHost => "on its way home".to_owned(),
            Whereabouts::Lost => format!("lost, since its copy home has failed ({}); load it anew", self.cause),
        };
        Err(Error::Misplaced { slot: self.name.clone(), at, asked })
    }

    pub(super) fn come_home(&mut self) {
        self.place = Whereabouts::Host;
        self.home = None;
    }

    /// `last`: behind what has been given of its copy home.
    pub(super) fn lose(&mut self, cause: &str, last: Option<Arc<E>>) {
        self.place = Whereabouts::Lost;
        (self.arrival, self.home) = (None, last);
        cause.clone_into(&mut self.cause);
    }
}
