//! Memory of a device that spends a while in host memory and comes back elsewhere: each cargo goes out once, to a buffer of
//! a [`HostPool`], and comes in as often as it is needed. Its bytes mean nothing here.
//!
//! Copies out run behind what the caller's stream has been given, copies in behind that and behind the copy out. Nothing
//! waits on the host, but for a pool that is full.

#[cfg(test)]
mod tests;

pub use super::caller::Caller;

use crate::device::{Device, Stream};
use crate::error::{Error, Result};
use crate::memory::host_pool::{Fence, HostBuffer, HostPool};
use crate::memory::{ALIGNMENT, DeviceSpan};
use std::collections::HashMap;
use std::sync::Arc;

/// Bytes of a copy at most: others, such as the optimizer's, come between two.
pub const PIECE_BYTES: usize = 16 << 20;

/// Counts and sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FerryStats {
    /// Cargos on the host, or on their way there.
    pub cargos: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Copies from the device given so far, and their bytes.
    pub copies_out: u64,
    /// See [`Self::copies_out`].
    pub bytes_out: u64,
    /// Copies to the device given so far, and their bytes.
    pub copies_in: u64,
    /// See [`Self::copies_in`].
    pub bytes_in: u64,
}

#[derive(Debug)]
struct Cargo<D: Device> {
    name: String,
    /// `None` only while it is being dropped.
    buffer: Option<HostBuffer>,
    out: Arc<D::Event>,
    /// The last copy in.
    last: Option<Arc<D::Event>>,
}

/// A mark on a device, for the pool.
struct Mark<D: Device> {
    device: Arc<D>,
    event: Arc<D::Event>,
}

impl<D: Device> Fence for Mark<D> {
    fn is_done(&self) -> Result<bool> {
        self.device.is_done(&self.event)
    }

    fn wait(&self) -> Result<()> {
        self.device.wait(&self.event)
    }
}

/// Carries memory between one device and a pool of host memory.
#[derive(Debug)]
pub struct Ferry<D: Device> {
    device: Arc<D>,
    pool: HostPool,
    cargos: HashMap<u64, Cargo<D>>,
    next: u64,
    piece_bytes: usize,
    stats: FerryStats,
}

/// Where each of several runs begins in a buffer that they share, and the bytes of all: each aligned to [`ALIGNMENT`].
///
/// # Errors
/// [`Error::InvalidValue`] beyond the address space.
pub fn offsets(sizes: impl IntoIterator<Item = usize>) -> Result<(Vec<usize>, usize)> {
    let mut at = 0_usize;
    let mut starts = Vec::new();
    for bytes in sizes {
        starts.push(at);
        let next = bytes.checked_next_multiple_of(ALIGNMENT).and_then(|padded| at.checked_add(padded));
        at = next.ok_or_else(|| Error::InvalidValue(format!("{bytes} bytes exceed the address space")))?;
    }
    Ok((starts, at))
}

impl<D: Device> Ferry<D> {
    /// A ferry without cargo.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for pieces of no bytes.
    pub fn new(device: Arc<D>, pool: HostPool, piece_bytes: usize) -> Result<Self> {
        if piece_bytes == 0 {
            return Err(Error::InvalidValue("pieces of 0 bytes".into()));
        }
        Ok(Self { device, pool, cargos: HashMap::new(), next: 0, piece_bytes, stats: FerryStats::default() })
    }

    /// Sends runs of the device's memory to the host as one cargo, once the caller has done what it has been given so far.
    /// They stay as they are until that has landed: see [`Self::landed`] and [`Self::has_landed`].
    ///
    /// # Errors
    /// [`Error::PoolLimit`] and what else [`HostPool::acquire`] returns; [`Error::Cuda`] with the name. There is no cargo
    /// then, and the runs are free.
    pub fn send(&mut self, name: &str, runs: Vec<DeviceSpan>, caller: Caller) -> Result<u64> {
        let (starts, bytes) = offsets(runs.iter().map(DeviceSpan::len))?;
        let buffer = self.pool.acquire(bytes)?;
        let sent = self.give_out(&buffer, runs, &starts, caller);
        let out = match sent {
            Ok(event) => event,
            Err(error) => {
                self.give_up(buffer);
                return Err(about(name, "to the host", error));
            }
        };
        self.next += 1;
        self.stats.cargos += 1;
        self.stats.bytes += bytes;
        self.cargos.insert(self.next, Cargo { name: name.into(), buffer: Some(buffer), out, last: None });
        Ok(self.next)
    }

    fn give_out(
        &mut self,
        buffer: &HostBuffer,
        runs: Vec<DeviceSpan>,
        starts: &[usize],
        caller: Caller,
    ) -> Result<Arc<D::Event>> {
        let out = Arc::new(self.device.event()?);
        caller.lead(&*self.device, Stream::StateOut)?;
        for (mut run, &start) in runs.into_iter().zip(starts) {
            // SAFETY: the buffer is this cargo's, given back behind the copies, and read by copies in behind them only.
            let mut host = unsafe { buffer.span(start, run.len()) };
            while !run.is_empty() {
                let bytes = self.piece_bytes.min(run.len());
                let (piece, memory) = (run.split_front(bytes), host.split_front(bytes));
                self.device.copy_out(&memory, &piece, Stream::StateOut)?;
                self.stats.copies_out += 1;
                self.stats.bytes_out += bytes as u64;
            }
        }
        self.device.record(&out, Stream::StateOut)?;
        Ok(out)
    }

    /// Takes back a buffer that copies may have begun to use.
    fn give_up(&self, buffer: HostBuffer) {
        let marked = self.device.event().and_then(|event| {
            self.device.record(&event, Stream::StateOut)?;
            Ok(event)
        });
        match marked {
            Ok(event) => {
                let mark = Mark { device: Arc::clone(&self.device), event: Arc::new(event) };
                // In a fork, where this fails, nothing copies.
                let _ = self.pool.release(buffer, Some(Box::new(mark)));
            }
            // Nobody can say when a copy is done with it.
            Err(_) => std::mem::forget(buffer),
        }
    }

    fn cargo(&self, id: u64) -> Result<&Cargo<D>> {
        self.cargos.get(&id).ok_or_else(|| Error::InvalidValue(format!("cargo {id} is not there")))
    }

    /// Lets the caller follow a cargo's copy out: the memory that it was in is free for what the caller is given from now
    /// on.
    ///
    /// # Errors
    /// [`Error::InvalidValue`], [`Error::Cuda`].
    pub fn landed(&self, id: u64, caller: Caller) -> Result<()> {
        let cargo = self.cargo(id)?;
        caller.follow(&*self.device, &cargo.out).map_err(|error| about(&cargo.name, "to the host", error))
    }

    /// Whether a cargo's copy out is done. Does not wait.
    ///
    /// # Errors
    /// [`Error::InvalidValue`], [`Error::Cuda`].
    pub fn has_landed(&self, id: u64) -> Result<bool> {
        let cargo = self.cargo(id)?;
        self.device.is_done(&cargo.out).map_err(|error| about(&cargo.name, "to the host", error))
    }

    /// Brings a cargo's runs into memory of the device that the caller may write to, behind what it has been given so far.
    /// What it is given from now on may read it after [`Self::arrive`].
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for other numbers of runs or bytes than were sent; [`Error::Cuda`] with the name.
    pub fn bring(&mut self, id: u64, runs: Vec<DeviceSpan>, caller: Caller) -> Result<()> {
        let (starts, bytes) = offsets(runs.iter().map(DeviceSpan::len))?;
        let Self { cargos, device, stats, piece_bytes, .. } = self;
        let cargo = cargos.get_mut(&id).ok_or_else(|| Error::InvalidValue(format!("cargo {id} is not there")))?;
        let Some(buffer) = &cargo.buffer else { unreachable!("a cargo without a buffer") };
        if bytes != buffer.len() {
            let message = format!("bring: {bytes} bytes on the device for {}, which has {}", cargo.name, buffer.len());
            return Err(Error::InvalidValue(message));
        }
        let give = || -> Result<()> {
            let last = Arc::new(device.event()?);
            caller.lead(&**device, Stream::StateIn)?;
            device.order(Stream::StateIn, &cargo.out)?;
            for (mut run, start) in runs.into_iter().zip(starts) {
                // SAFETY: written by the copy out alone, which this one is behind.
                let mut host = unsafe { buffer.span(start, run.len()) };
                while !run.is_empty() {
                    let bytes = (*piece_bytes).min(run.len());
                    let (piece, memory) = (run.split_front(bytes), host.split_front(bytes));
                    let given = device.copy_in(&piece, &memory, Stream::StateIn);
                    // Whatever was given has to be waited for.
                    device.record(&last, Stream::StateIn)?;
                    cargo.last = Some(Arc::clone(&last));
                    given?;
                    stats.copies_in += 1;
                    stats.bytes_in += bytes as u64;
                }
            }
            Ok(())
        };
        give().map_err(|error| about(&cargo.name, "to the device", error))
    }

    /// Lets the caller follow a cargo's last copy in.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if there was none, [`Error::Cuda`].
    pub fn arrive(&self, id: u64, caller: Caller) -> Result<()> {
        let cargo = self.cargo(id)?;
        match &cargo.last {
            Some(event) => {
                caller.follow(&*self.device, event).map_err(|error| about(&cargo.name, "to the device", error))
            }
            None if cargo.buffer.as_ref().is_some_and(HostBuffer::is_empty) => Ok(()),
            None => Err(Error::InvalidValue(format!("arrive: {} has not been brought", cargo.name))),
        }
    }

    /// Lets a cargo go: its buffer is lent anew once the copies that use it are done.
    ///
    /// # Errors
    /// [`Error::InvalidValue`], [`Error::Forked`].
    pub fn drop_cargo(&mut self, id: u64) -> Result<()> {
        let mut cargo =
            self.cargos.remove(&id).ok_or_else(|| Error::InvalidValue(format!("cargo {id} is not there")))?;
        let Some(buffer) = cargo.buffer.take() else { return Ok(()) };
        self.stats.cargos -= 1;
        self.stats.bytes -= buffer.len();
        // A copy in is behind the copy out.
        let event = cargo.last.take().unwrap_or(cargo.out);
        self.pool.release(buffer, Some(Box::new(Mark { device: Arc::clone(&self.device), event })))
    }

    /// Counts and sizes.
    pub fn stats(&self) -> FerryStats {
        self.stats
    }
}

impl<D: Device> Drop for Ferry<D> {
    fn drop(&mut self) {
        let ids: Vec<u64> = self.cargos.keys().copied().collect();
        for id in ids {
            // In a fork, where this fails, the memory is the parent's.
            let _ = self.drop_cargo(id);
        }
    }
}

fn about(name: &str, way: &str, error: Error) -> Error {
    match error {
        Error::Cuda(cause) => Error::Cuda(format!("{name} on its way {way}: {cause}")),
        other => other,
    }
}
