//! A simulated device that counts refused calls, breaks at a given look at an event, and knows the dispatcher's thread.

use crate::device::simulated::{Schedule, SimulatedDevice, SimulatedEvent};
use crate::device::{Device, DeviceCopy, DeviceGrad, DeviceUpdate, Stream};
use crate::error::Result;
use crate::memory::{DeviceSpan, HostSpan};
use std::any::Any;
use std::ops::Deref;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Watched {
    inner: SimulatedDevice,
    /// Calls of `is_done` until the device breaks, just before that call.
    looks_left: AtomicU64,
    refused: AtomicUsize,
    /// Whether the next copy panics, and breaks the device before.
    panics: AtomicBool,
    breaks: AtomicBool,
    /// The dispatcher's thread.
    entered: Mutex<Option<libc::pthread_t>>,
}

impl Watched {
    pub(super) fn new(schedule: Schedule) -> Self {
        let inner = SimulatedDevice::new(schedule).unwrap();
        let (looks_left, refused) = (AtomicU64::new(u64::MAX), AtomicUsize::new(0));
        Self {
            inner,
            looks_left,
            refused,
            panics: AtomicBool::new(false),
            breaks: AtomicBool::new(false),
            entered: Mutex::new(None),
        }
    }

    /// Breaks at the `look`th look at an event from now on, 0 being the next.
    pub(super) fn break_at_look(&self, look: u64) {
        self.looks_left.store(look, Ordering::SeqCst);
    }

    /// Lets the next copy to or from the device panic.
    pub(super) fn panic_next(&self, breaks: bool) {
        self.breaks.store(breaks, Ordering::SeqCst);
        self.panics.store(true, Ordering::SeqCst);
    }

    fn panic_if_asked(&self) {
        if self.panics.swap(false, Ordering::SeqCst) {
            if self.breaks.load(Ordering::SeqCst) {
                self.inner.break_device();
            }
            panic!("asked for by a test");
        }
    }

    /// Calls that were errors.
    pub(super) fn refused(&self) -> usize {
        self.refused.load(Ordering::SeqCst)
    }

    /// What the dispatcher's thread has spent of a CPU's time; it must be alive.
    pub(super) fn dispatcher_time(&self) -> Option<Duration> {
        let thread = (*self.entered.lock().unwrap())?;
        let mut clock = 0;
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the thread is alive, by the engine that the caller holds; the pointers are to locals.
        let known = unsafe {
            libc::pthread_getcpuclockid(thread, &raw mut clock) == 0 && libc::clock_gettime(clock, &raw mut time) == 0
        };
        known.then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }

    fn watch<T>(&self, result: Result<T>) -> Result<T> {
        self.refused.fetch_add(usize::from(result.is_err()), Ordering::SeqCst);
        result
    }
}

impl Deref for Watched {
    type Target = SimulatedDevice;

    fn deref(&self) -> &SimulatedDevice {
        &self.inner
    }
}

impl Device for Watched {
    type Event = SimulatedEvent;

    fn enter_thread(&self) -> Result<()> {
        // SAFETY: has no preconditions.
        *self.entered.lock().unwrap() = Some(unsafe { libc::pthread_self() });
        self.watch(self.inner.enter_thread())
    }

    fn event(&self) -> Result<SimulatedEvent> {
        self.watch(self.inner.event())
    }

    fn record(&self, event: &SimulatedEvent, stream: Stream) -> Result<()> {
        self.watch(self.inner.record(event, stream))
    }

    fn order(&self, stream: Stream, after: &SimulatedEvent) -> Result<()> {
        self.watch(self.inner.order(stream, after))
    }

    fn is_done(&self, event: &SimulatedEvent) -> Result<bool> {
        let count = |left: u64| (left != u64::MAX).then(|| left.checked_sub(1).unwrap_or(u64::MAX));
        if self.looks_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, count) == Ok(0) {
            self.inner.break_device();
        }
        self.watch(self.inner.is_done(event))
    }

    fn wait(&self, event: &SimulatedEvent) -> Result<()> {
        self.watch(self.inner.wait(event))
    }

    fn copy_in(&self, to: &DeviceSpan, from: &HostSpan, stream: Stream) -> Result<()> {
        self.panic_if_asked();
        self.watch(self.inner.copy_in(to, from, stream))
    }

    fn copy_out(&self, to: &HostSpan, from: &DeviceSpan, stream: Stream) -> Result<()> {
        self.panic_if_asked();
        self.watch(self.inner.copy_out(to, from, stream))
    }

    fn update(&self, update: &DeviceUpdate<'_>, stream: Stream) -> Result<()> {
        self.watch(self.inner.update(update, stream))
    }

    fn update_many(&self, table: &mut HostSpan, updates: &[DeviceUpdate<'_>], stream: Stream) -> Result<()> {
        self.watch(self.inner.update_many(table, updates, stream))
    }

    fn copy_many(&self, table: &mut HostSpan, copies: &[DeviceCopy], stream: Stream) -> Result<()> {
        self.watch(self.inner.copy_many(table, copies, stream))
    }

    fn squares(
        &self,
        table: &mut HostSpan,
        partials: &HostSpan,
        grads: &[DeviceGrad],
        scale: f32,
        stream: Stream,
    ) -> Result<()> {
        self.watch(self.inner.squares(table, partials, grads, scale, stream))
    }

    fn unscale(&self, grad: &DeviceGrad, scale: f32, stream: Stream) -> Result<()> {
        self.watch(self.inner.unscale(grad, scale, stream))
    }

    fn allocate(&self, bytes: usize) -> Result<(DeviceSpan, Box<dyn Any + Send + Sync>)> {
        self.watch(self.inner.allocate(bytes))
    }

    fn pin(&self, start: usize, bytes: usize) -> Result<Box<dyn Any + Send + Sync>> {
        self.watch(self.inner.pin(start, bytes))
    }

    fn can_address_host(&self) -> bool {
        self.inner.can_address_host()
    }

    fn begin_range(&self, message: &str) -> Box<dyn Any + Send> {
        self.inner.begin_range(message)
    }
}
