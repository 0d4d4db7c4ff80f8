//! The device's methods: arguments are checked and accesses listed, and the work goes to a stream.

use super::hazards::Access;
use super::memory::{self, Pin};
use super::streams::{Mark, State, refusal};
use super::work::{self, Stamp};
use super::{OperationKind, RangeEntry, SimulatedDevice, SimulatedEvent, Stream};
use crate::device::{Device, DeviceCopy, DeviceGrad, DeviceUpdate, TABLE_ENTRY_BYTES};
use crate::error::{Error, Result};
use crate::memory::{DeviceSpan, HostSpan, page_size};
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

fn invalid(kind: OperationKind, what: &str) -> Error {
    refusal("cudaErrorInvalidValue", kind, what)
}

/// Refuses kernels what they cannot address.
fn check_host(state: &State, kind: OperationKind, what: &str, accesses: &[Access]) -> Result<()> {
    if !state.can_address_host && accesses.iter().any(|access| state.memory.is_pinned(access)) {
        return Err(refusal("cudaErrorIllegalAddress", kind, &format!("{what}: pinned host memory")));
    }
    Ok(())
}

fn check_update(kind: OperationKind, update: &DeviceUpdate<'_>) -> Result<()> {
    work::problem_of(update).map_or(Ok(()), |problem| Err(invalid(kind, &format!("with {problem}"))))
}

fn check_grad(kind: OperationKind, grad: &DeviceGrad) -> Result<()> {
    let DeviceGrad { address, len, dtype } = *grad;
    if len > 0 && (address == 0 || !address.is_multiple_of(dtype.bytes())) {
        return Err(invalid(kind, &format!("of a gradient at {address:#x}")));
    }
    Ok(())
}

fn check_span(kind: OperationKind, to: usize, from: usize) -> Result<()> {
    if to < from { Err(invalid(kind, &format!("of {from} bytes to {to}"))) } else { Ok(()) }
}

impl SimulatedDevice {
    fn owned<'a>(&self, event: &'a SimulatedEvent) -> Result<&'a Mutex<Option<Arc<Mark>>>> {
        if Arc::ptr_eq(&event.shared, &self.shared) {
            Ok(&event.mark)
        } else {
            Err(Error::Cuda("simulated: cudaErrorInvalidResourceHandle: an event of another device".into()))
        }
    }

    fn mark_of(&self, event: &SimulatedEvent) -> Result<Option<Arc<Mark>>> {
        Ok(self.owned(event)?.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    fn give_copy<'a>(&'a self, state: MutexGuard<'a, State>, kind: OperationKind, copy: DeviceCopy, stream: Stream) {
        let job = move || {
            work::copy(copy.to, copy.from, copy.bytes);
            Ok(())
        };
        self.shared.give(state, kind, stream, accesses_of_copy(&copy).into(), Box::new(job));
    }

    /// Gives work that takes its descriptions from a table.
    fn launch_table<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        kind: OperationKind,
        table: &mut HostSpan,
        entries: usize,
        mut accesses: Vec<Access>,
        stream: Stream,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<()> {
        if !table.is_pinned() || table.len() / TABLE_ENTRY_BYTES < entries {
            let pinned = if table.is_pinned() { "pinned" } else { "not pinned" };
            return Err(invalid(
                kind,
                &format!("with a table of {} bytes ({pinned}) for {entries} items", table.len()),
            ));
        }
        let stamp = Stamp::write(table, entries, state.next_sequence());
        state.checker.host(Access::write(table.address(), stamp.bytes()), "writing a table");
        accesses.push(Access::read(table.address(), stamp.bytes()));
        let job = move || {
            if !stamp.is_intact() {
                return Err("table overwritten while in use".into());
            }
            work();
            Ok(())
        };
        self.shared.give(state, kind, stream, accesses, Box::new(job));
        Ok(())
    }
}

impl Device for SimulatedDevice {
    type Event = SimulatedEvent;

    fn enter_thread(&self) -> Result<()> {
        self.shared.lock().check()
    }

    fn event(&self) -> Result<SimulatedEvent> {
        let mut state = self.shared.admit(OperationKind::Event, "")?;
        state.memory.live_events += 1;
        Ok(SimulatedEvent { shared: Arc::clone(&self.shared), mark: Mutex::new(None) })
    }

    fn record(&self, event: &SimulatedEvent, stream: Stream) -> Result<()> {
        let owned = self.owned(event)?;
        let state = self.shared.admit(OperationKind::Record, &format!("on {stream:?}"))?;
        self.shared.mark(state, stream, owned);
        Ok(())
    }

    fn order(&self, stream: Stream, after: &SimulatedEvent) -> Result<()> {
        let mark = self.mark_of(after)?;
        let state = self.shared.admit(OperationKind::Order, &format!("on {stream:?}"))?;
        if let Some(mark) = mark {
            self.shared.after(state, stream, mark);
        }
        Ok(())
    }

    fn is_done(&self, event: &SimulatedEvent) -> Result<bool> {
        let mark = self.mark_of(event)?;
        let mut state = self.shared.lock();
        state.check()?;
        let Some(mark) = mark else { return Ok(true) };
        if mark.is_done() {
            state.checker.seen(&mark.clock);
        }
        Ok(mark.is_done())
    }

    fn wait(&self, event: &SimulatedEvent) -> Result<()> {
        match self.mark_of(event)? {
            Some(mark) => self.shared.wait(&mark),
            None => self.shared.lock().check(),
        }
    }

    fn copy_in(&self, to: &DeviceSpan, from: &HostSpan, stream: Stream) -> Result<()> {
        let kind = OperationKind::CopyIn;
        let state = self.shared.admit(kind, "")?;
        check_span(kind, to.len(), from.len())?;
        let (to, from, bytes) = (to.address(), from.address(), from.len());
        self.give_copy(state, kind, DeviceCopy { to, from, bytes }, stream);
        Ok(())
    }

    fn copy_out(&self, to: &HostSpan, from: &DeviceSpan, stream: Stream) -> Result<()> {
        let kind = OperationKind::CopyOut;
        let state = self.shared.admit(kind, "")?;
        check_span(kind, from.len(), to.len())?;
        let (to, from, bytes) = (to.address(), from.address(), to.len());
        self.give_copy(state, kind, DeviceCopy { to, from, bytes }, stream);
        Ok(())
    }

    fn update(&self, update: &DeviceUpdate<'_>, stream: Stream) -> Result<()> {
        let (kind, what) = (OperationKind::Update, format!("of {}", update.parameter));
        let state = self.shared.admit(kind, &what)?;
        check_update(kind, update)?;
        let accesses: Vec<_> = work::accesses_of(update).collect();
        check_host(&state, kind, &what, &accesses)?;
        let (isa, update) = (self.isa, work::nameless(update));
        let job = move || {
            work::update(isa, &update);
            Ok(())
        };
        self.shared.give(state, kind, stream, accesses, Box::new(job));
        Ok(())
    }

    fn update_many(&self, table: &mut HostSpan, updates: &[DeviceUpdate<'_>], stream: Stream) -> Result<()> {
        let kind = OperationKind::UpdateMany;
        let Some(first) = updates.first() else { return self.shared.admit(kind, "").map(drop) };
        let what = format!("of {} and {} more", first.parameter, updates.len() - 1);
        let state = self.shared.admit(kind, &what)?;
        let dtypes = |update: &DeviceUpdate<'_>| (update.weight_kind, update.grad_dtype, update.moments);
        for update in updates {
            check_update(kind, update)?;
            if dtypes(update) != dtypes(first) {
                let (parameter, found, wanted) = (update.parameter, dtypes(update), dtypes(first));
                return Err(invalid(kind, &format!("of {parameter}, {found:?}, with {wanted:?}")));
            }
        }
        let accesses: Vec<_> = updates.iter().flat_map(work::accesses_of).collect();
        check_host(&state, kind, &what, &accesses)?;
        let (isa, updates) = (self.isa, updates.iter().map(work::nameless).collect::<Vec<_>>());
        self.launch_table(state, kind, table, updates.len(), accesses, stream, move || {
            for update in updates {
                work::update(isa, &update);
            }
        })
    }

    fn copy_many(&self, table: &mut HostSpan, copies: &[DeviceCopy], stream: Stream) -> Result<()> {
        let kind = OperationKind::CopyMany;
        let what = format!("of {} runs", copies.len());
        let state = self.shared.admit(kind, &what)?;
        if copies.is_empty() {
            return Ok(());
        }
        if let Some(copy) = copies.iter().find(|copy| copy.bytes > 0 && (copy.to | copy.from) % 2 != 0) {
            return Err(invalid(kind, &format!("of {copy:x?}")));
        }
        let accesses: Vec<_> = copies.iter().flat_map(accesses_of_copy).collect();
        check_host(&state, kind, &what, &accesses)?;
        let copies = copies.to_vec();
        self.launch_table(state, kind, table, copies.len(), accesses, stream, move || {
            for DeviceCopy { to, from, bytes } in copies {
                work::copy(to, from, bytes);
            }
        })
    }

    fn squares(
        &self,
        table: &mut HostSpan,
        partials: &HostSpan,
        grads: &[DeviceGrad],
        scale: f32,
        stream: Stream,
    ) -> Result<()> {
        let kind = OperationKind::Squares;
        let what = format!("of {} gradients", grads.len());
        let state = self.shared.admit(kind, &what)?;
        if grads.is_empty() {
            return Ok(());
        }
        grads.iter().try_for_each(|grad| check_grad(kind, grad))?;
        let blocks = work::blocks_of(grads);
        let address = partials.address();
        if !partials.is_pinned() || partials.len() / 8 < blocks || !address.is_multiple_of(8) {
            let pinned = if partials.is_pinned() { "pinned" } else { "not pinned" };
            let problem = format!("with {} bytes ({pinned}) at {address:#x} for {blocks} blocks", partials.len());
            return Err(invalid(kind, &problem));
        }
        let mut accesses: Vec<_> = grads.iter().map(access_of_grad).collect();
        check_host(&state, kind, &what, &accesses)?;
        accesses.push(Access::write(address, blocks * 8));
        let (isa, grads) = (self.isa, grads.to_vec());
        self.launch_table(state, kind, table, grads.len(), accesses, stream, move || {
            work::squares(isa, &grads, scale, address);
        })
    }

    fn unscale(&self, grad: &DeviceGrad, scale: f32, stream: Stream) -> Result<()> {
        let kind = OperationKind::Unscale;
        let state = self.shared.admit(kind, "")?;
        check_grad(kind, grad)?;
        let accesses = vec![Access::write(grad.address, grad.len.saturating_mul(grad.dtype.bytes()))];
        check_host(&state, kind, "of a gradient", &accesses)?;
        let (isa, grad) = (self.isa, *grad);
        let job = move || {
            work::unscale(isa, &grad, scale);
            Ok(())
        };
        self.shared.give(state, kind, stream, accesses, Box::new(job));
        Ok(())
    }

    fn allocate(&self, bytes: usize) -> Result<(DeviceSpan, Box<dyn Any + Send + Sync>)> {
        let kind = OperationKind::Allocate;
        let what = format!("of {bytes} bytes");
        let mut state = self.shared.admit(kind, &what)?;
        let (span, guard) =
            memory::allocate(&self.shared, bytes).ok_or_else(|| refusal("cudaErrorMemoryAllocation", kind, &what))?;
        state.memory.allocated_bytes += bytes;
        Ok((span, Box::new(guard)))
    }

    fn pin(&self, start: usize, bytes: usize) -> Result<Box<dyn Any + Send + Sync>> {
        let (kind, what) = (OperationKind::Pin, format!("of {bytes} bytes at {start:#x}"));
        let mut state = self.shared.admit(kind, &what)?;
        if bytes == 0 || !(start | bytes).is_multiple_of(page_size()) {
            return Err(invalid(kind, &what));
        }
        if state.memory.is_pinned(&Access::read(start, bytes)) {
            return Err(refusal("cudaErrorHostMemoryAlreadyRegistered", kind, &what));
        }
        if state.memory.pinnable_bytes.is_some_and(|most| state.memory.pinned_bytes() + bytes > most) {
            return Err(refusal("cudaErrorMemoryAllocation", kind, &what));
        }
        state.memory.pins.push((start, bytes));
        Ok(Box::new(Pin { shared: Arc::clone(&self.shared), start, bytes }))
    }

    fn can_address_host(&self) -> bool {
        self.shared.lock().can_address_host
    }

    fn begin_range(&self, message: &str) -> Box<dyn Any + Send> {
        let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        ranges.push(RangeEntry { message: message.to_owned(), ends: 0 });
        let (index, shown) = (ranges.len() - 1, crate::cuda::Range::begin(message));
        Box::new(Range { log: Arc::clone(&self.ranges), index, _shown: shown })
    }
}

/// A range in the log, and in a profiler's where there is one: it needs no GPU.
struct Range {
    log: Arc<Mutex<Vec<RangeEntry>>>,
    index: usize,
    _shown: crate::cuda::Range,
}

impl Drop for Range {
    fn drop(&mut self) {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)[self.index].ends += 1;
    }
}

fn accesses_of_copy(copy: &DeviceCopy) -> [Access; 2] {
    [Access::read(copy.from, copy.bytes), Access::write(copy.to, copy.bytes)]
}

fn access_of_grad(grad: &DeviceGrad) -> Access {
    Access::read(grad.address, grad.len.saturating_mul(grad.dtype.bytes()))
}
