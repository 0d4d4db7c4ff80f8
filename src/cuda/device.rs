//! A GPU as the engine sees it: [`Device`] over the linked library.

use super::linked::{SUCCESS, check, failure};
use super::{require_device, status, sys};
use crate::device::{Device, DeviceCopy, DeviceGrad, DeviceUpdate, Stream, TABLE_ENTRY_BYTES};
use crate::error::{Error, Result};
use crate::kernel::NORM_BLOCK;
use crate::memory::{DeviceSpan, HostSpan};
use std::any::Any;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// What CUDA gave and is to be given back: with the device that it is of, and the process, since in a fork CUDA does
/// not work and what it gave is the parent's.
#[derive(Debug)]
struct Owned {
    handle: usize,
    device: c_int,
    process: u32,
    give_back: unsafe extern "C" fn(c_int, *mut c_void) -> c_int,
}

impl Owned {
    /// # Safety
    /// `give_back` may be called with `handle`, once, on any thread.
    unsafe fn new(
        handle: *mut c_void,
        device: c_int,
        give_back: unsafe extern "C" fn(c_int, *mut c_void) -> c_int,
    ) -> Self {
        Self { handle: handle as usize, device, process: std::process::id(), give_back }
    }

    fn handle(&self) -> *mut c_void {
        self.handle as *mut c_void
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if std::process::id() == self.process {
            // Its error, if any, is that of a device that has failed, which every call reports.
            // SAFETY: `new`'s contract, and this is the once.
            let _ = unsafe { (self.give_back)(self.device, self.handle()) };
        }
    }
}

/// A mark on a stream of a [`CudaDevice`]: a CUDA event. It goes back to the device's spare ones, if that still is.
#[derive(Debug)]
pub struct CudaEvent {
    event: Option<Owned>,
    spare: Weak<Mutex<Vec<Owned>>>,
}

impl CudaEvent {
    pub(super) fn handle(&self) -> *mut c_void {
        self.event.as_ref().map_or(null_mut(), Owned::handle)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // What others wait for is what they have seen recorded: recording it anew is no change to them.
        let here = |event: &Owned| event.process == std::process::id();
        if let (Some(spare), Some(event)) = (self.spare.upgrade(), self.event.take_if(|event| here(event))) {
            spare.lock().unwrap_or_else(PoisonError::into_inner).push(event);
        }
    }
}

/// A GPU, with streams of its own. Events, memory and pins that it has given may outlive it.
#[derive(Debug)]
pub struct CudaDevice {
    ordinal: c_int,
    /// In the order of [`own_index`].
    streams: [Owned; 5],
    can_address_host: bool,
    /// Events that nobody has: making one takes a gradient hook 2 to 7 microseconds.
    spare: Arc<Mutex<Vec<Owned>>>,
}

/// The index of one of the device's own streams, and whether it has the high priority: what others wait for, or what
/// keeps the lanes busy. Copies from the device are as late as their lane lets them be.
fn own_index(stream: Stream) -> Option<(usize, bool)> {
    match stream {
        Stream::StateIn => Some((0, true)),
        Stream::Update => Some((1, true)),
        Stream::StateOut => Some((2, false)),
        Stream::Down => Some((3, false)),
        Stream::Up => Some((4, true)),
        Stream::Foreign(_) => None,
    }
}

const OWN_STREAMS: [Stream; 5] = [Stream::StateIn, Stream::Update, Stream::StateOut, Stream::Down, Stream::Up];

impl CudaDevice {
    /// Device number `ordinal` of those that this process sees, with a context on it if it had none.
    ///
    /// # Errors
    /// [`Error::Cuda`]: there is no such device, or it cannot be used.
    pub fn new(ordinal: u32) -> Result<Self> {
        require_device()?;
        let devices = status().devices;
        let known = c_int::try_from(ordinal).ok().filter(|_| ordinal < devices);
        let Some(device) = known else {
            return Err(Error::Cuda(format!("there is no CUDA device {ordinal}: {devices} are visible, from 0")));
        };
        let mut streams = Vec::with_capacity(OWN_STREAMS.len());
        for stream in OWN_STREAMS {
            let high = own_index(stream).is_some_and(|(_, high)| high);
            let mut handle = null_mut();
            // SAFETY: the pointer receives a stream before the call returns.
            let code = unsafe { sys::outboard_cuda_stream_create(device, c_int::from(high), &raw mut handle) };
            check(code, || format!("cannot make a stream on CUDA device {ordinal}"))?;
            // SAFETY: the stream is this device's, and whoever has its handle has it through this value.
            streams.push(unsafe { Owned::new(handle, device, sys::outboard_cuda_stream_destroy) });
        }
        let mut can_address_host = 0;
        // SAFETY: the pointer is to an int, written before the call returns.
        let code = unsafe { sys::outboard_cuda_can_address_host(device, &raw mut can_address_host) };
        check(code, || format!("cannot ask CUDA device {ordinal} how it addresses host memory"))?;
        let streams = streams.try_into().unwrap_or_else(|_| unreachable!("a stream for each"));
        Ok(Self { ordinal: device, streams, can_address_host: can_address_host != 0, spare: Arc::default() })
    }

    /// The handle (`cudaStream_t`) of one of its streams, which lives as long as the device.
    pub fn stream_handle(&self, stream: Stream) -> usize {
        self.stream(stream) as usize
    }

    pub(super) fn stream(&self, stream: Stream) -> *mut c_void {
        match (stream, own_index(stream)) {
            (Stream::Foreign(handle), _) => handle as *mut c_void,
            (_, Some((index, _))) => self.streams[index].handle(),
            (_, None) => unreachable!("{stream:?} is the device's own"),
        }
    }

    /// Copies piece by piece: CUDA refuses a copy across a border between memory that was registered bit by bit.
    fn copy(&self, direction: c_int, device: &DeviceSpan, host: &HostSpan, stream: Stream) -> Result<()> {
        assert_eq!(device.len(), host.len(), "a copy between spans of different lengths");
        let on = self.stream(stream);
        for (offset, bytes) in host.pieces() {
            let (device, host) = ((device.address() + offset) as *mut c_void, (host.address() + offset) as *mut c_void);
            let (to, from) = if direction == sys::TO_DEVICE { (device, host) } else { (host, device) };
            // SAFETY: the spans' contracts: both runs are there and in nobody else's way until the work is done, which
            // the caller of `Device`'s methods sees to.
            let code = unsafe {
                sys::outboard_cuda_copy_async(self.ordinal, direction, to, from.cast_const(), bytes as u64, on)
            };
            check(code, || {
                let way = if direction == sys::TO_DEVICE { "to" } else { "from" };
                format!("cannot copy {bytes} bytes {way} the device on {stream:?}")
            })?;
        }
        Ok(())
    }
}

/// The kinds as the library numbers them.
fn kinds(update: &DeviceUpdate<'_>) -> [c_int; 3] {
    [update.weight_kind as c_int, update.grad_dtype as c_int, update.moments as c_int]
}

fn to_sys(update: &DeviceUpdate<'_>) -> sys::Update {
    sys::Update {
        constants: update.constants,
        weight: update.weight as *mut c_void,
        kept: update.kept as *mut c_void,
        grad: update.grad as *const c_void,
        exp_avg: update.exp_avg as *mut c_void,
        exp_avg_sq: update.exp_avg_sq as *mut c_void,
        max_exp_avg_sq: update.max_exp_avg_sq as *mut c_void,
        n: update.len as u64,
        first: update.first,
        noise_key: update.noise.key(),
        // A division by 1 changes nothing; the kernel leaves it out.
        grad_scale: update.grad_scale.unwrap_or(1.0),
    }
}

fn sys_grad(grad: &DeviceGrad) -> sys::Grad {
    sys::Grad { address: grad.address as *mut c_void, n: grad.len as u64, kind: grad.dtype as i32 }
}

fn cannot_update(update: &DeviceUpdate<'_>) -> String {
    let end = u128::from(update.first) + update.len as u128;
    format!("cannot update {}, elements {}..{end}, on the device", update.parameter, update.first)
}

/// Updates on a device, which may be the calling thread's current one.
///
/// # Safety
/// As for [`super::adamw`].
pub(super) unsafe fn update(device: c_int, update: &DeviceUpdate<'_>, stream: *mut c_void) -> Result<()> {
    let [weight, grad, moments] = kinds(update);
    let given = to_sys(update);
    let per_processor = u32::from(update.len <= CHUNK);
    // SAFETY: the caller vouches for the planes and the stream; the update is read before the call returns.
    let code =
        unsafe { sys::outboard_cuda_adamw(device, weight, grad, moments, &raw const given, per_processor, stream) };
    check(code, || cannot_update(update))
}

/// Checks a table's contract as far as it can be seen, and gives its address and length.
fn table_of(table: &mut HostSpan, items: usize) -> (*mut c_void, u64) {
    assert!(table.is_pinned() || items == 0, "the table is not pinned");
    let needed = items * TABLE_ENTRY_BYTES;
    assert!(table.len() >= needed, "a table of {} bytes for {items} items of {TABLE_ENTRY_BYTES}", table.len());
    (table.address() as *mut c_void, table.len() as u64)
}

/// Runs up to this length are chunks of state that passes by: one block for each multiprocessor keeps up with the bus, and
/// a step of a model beside it was faster so (282 ms against 296 with as many blocks as fit).
const CHUNK: usize = 4 << 20;

/// Between two looks at an event that somebody waits for.
const NAP: Duration = Duration::from_micros(20);

impl Device for CudaDevice {
    type Event = CudaEvent;

    fn enter_thread(&self) -> Result<()> {
        // SAFETY: changes nothing but what CUDA keeps for this thread.
        let code = unsafe { sys::outboard_cuda_enter_thread(self.ordinal) };
        check(code, || format!("cannot use CUDA device {} in a thread", self.ordinal))
    }

    /// An event that may have been recorded before: whoever asks for one records it first.
    fn event(&self) -> Result<CudaEvent> {
        let spare = Arc::downgrade(&self.spare);
        let kept = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if kept.is_some() {
            return Ok(CudaEvent { event: kept, spare });
        }
        let mut handle = null_mut();
        // SAFETY: the pointer receives an event before the call returns.
        let code = unsafe { sys::outboard_cuda_event_create(self.ordinal, &raw mut handle) };
        check(code, || "cannot make a CUDA event".to_owned())?;
        // SAFETY: the event is this device's, and whoever has its handle has it through this value.
        let event = unsafe { Owned::new(handle, self.ordinal, sys::outboard_cuda_event_destroy) };
        Ok(CudaEvent { event: Some(event), spare })
    }

    fn record(&self, event: &CudaEvent, stream: Stream) -> Result<()> {
        // SAFETY: a live event of this device, and a live stream: one of its own, or one for which the caller vouches.
        let code = unsafe { sys::outboard_cuda_event_record(self.ordinal, event.handle(), self.stream(stream)) };
        check(code, || format!("cannot record a CUDA event on {stream:?}"))
    }

    fn order(&self, stream: Stream, after: &CudaEvent) -> Result<()> {
        // SAFETY: as for `record`.
        let code = unsafe { sys::outboard_cuda_stream_wait_event(self.ordinal, self.stream(stream), after.handle()) };
        check(code, || format!("cannot let {stream:?} wait for a CUDA event"))
    }

    fn is_done(&self, event: &CudaEvent) -> Result<bool> {
        let mut done = 0;
        // SAFETY: a live event, and a pointer to an int, written before the call returns.
        let code = unsafe { sys::outboard_cuda_event_query(self.ordinal, event.handle(), &raw mut done) };
        check(code, || "work on the device has failed".to_owned())?;
        Ok(done != 0)
    }

    fn wait(&self, event: &CudaEvent) -> Result<()> {
        // CUDA's own wait spins, or else (cudaEventBlockingSync) the device raises an interrupt at every event.
        while !self.is_done(event)? {
            std::thread::sleep(NAP);
        }
        Ok(())
    }

    fn copy_in(&self, to: &DeviceSpan, from: &HostSpan, stream: Stream) -> Result<()> {
        self.copy(sys::TO_DEVICE, to, from, stream)
    }

    fn copy_out(&self, to: &HostSpan, from: &DeviceSpan, stream: Stream) -> Result<()> {
        self.copy(sys::TO_HOST, from, to, stream)
    }

    fn update(&self, given: &DeviceUpdate<'_>, stream: Stream) -> Result<()> {
        // SAFETY: whoever gives work to a `Device` vouches for its memory until the work is done.
        unsafe { update(self.ordinal, given, self.stream(stream)) }
    }

    fn update_many(&self, table: &mut HostSpan, updates: &[DeviceUpdate<'_>], stream: Stream) -> Result<()> {
        let Some(first) = updates.first() else { return Ok(()) };
        let [weight, grad, moments] = kinds(first);
        let alike = updates.iter().all(|update| kinds(update) == kinds(first));
        assert!(alike, "updates of different dtypes in one launch");
        let (table, bytes) = table_of(table, updates.len());
        let given: Vec<sys::Update> = updates.iter().map(to_sys).collect();
        let mut refused = 0;
        // SAFETY: as for `update`; the table is nobody else's by its span's contract, and checked. The list is read,
        // and the number written, before the call returns.
        let code = unsafe {
            sys::outboard_cuda_adamw_many(
                self.ordinal,
                weight,
                grad,
                moments,
                table,
                bytes,
                given.as_ptr(),
                given.len() as u64,
                &raw mut refused,
                self.stream(stream),
            )
        };
        check(code, || match updates.get(refused as usize) {
            Some(update) => cannot_update(update),
            None => {
                format!("cannot update {} and {} more runs on the device at once", first.parameter, updates.len() - 1)
            }
        })
    }

    fn copy_many(&self, table: &mut HostSpan, copies: &[DeviceCopy], stream: Stream) -> Result<()> {
        let (table, bytes) = table_of(table, copies.len());
        let to_sys = |copy: &DeviceCopy| sys::Copy {
            to: copy.to as *mut c_void,
            from: copy.from as *const c_void,
            bytes: copy.bytes as u64,
        };
        let given: Vec<sys::Copy> = copies.iter().map(to_sys).collect();
        let on = self.stream(stream);
        // SAFETY: as for `update_many`.
        let code =
            unsafe { sys::outboard_cuda_copy_many(self.ordinal, table, bytes, given.as_ptr(), given.len() as u64, on) };
        check(code, || format!("cannot copy {} runs on the device at once", copies.len()))
    }

    fn squares(
        &self,
        table: &mut HostSpan,
        partials: &HostSpan,
        grads: &[DeviceGrad],
        scale: f32,
        stream: Stream,
    ) -> Result<()> {
        let blocks: usize = grads.iter().map(|grad| grad.len.div_ceil(NORM_BLOCK)).sum();
        assert!(partials.is_pinned() || blocks == 0, "the partial sums are not pinned");
        assert!(partials.len() >= blocks * size_of::<f64>(), "{} bytes for {blocks} partial sums", partials.len());
        let (table, bytes) = table_of(table, grads.len());
        let given: Vec<sys::Grad> = grads.iter().map(sys_grad).collect();
        // SAFETY: as for `update_many`; the partial sums have room, and are nobody else's by their span's contract.
        let code = unsafe {
            sys::outboard_cuda_squares(
                self.ordinal,
                table,
                bytes,
                partials.address() as *mut f64,
                (partials.len() / size_of::<f64>()) as u64,
                given.as_ptr(),
                given.len() as u64,
                scale,
                self.stream(stream),
            )
        };
        check(code, || format!("cannot add up the squares of {} gradients on the device", grads.len()))
    }

    fn unscale(&self, grad: &DeviceGrad, scale: f32, stream: Stream) -> Result<()> {
        let given = sys_grad(grad);
        // SAFETY: as for `update`; the gradient's description is read before the call returns.
        let code = unsafe { sys::outboard_cuda_unscale(self.ordinal, &raw const given, scale, self.stream(stream)) };
        check(code, || format!("cannot unscale a gradient of {} elements on the device", grad.len))
    }

    fn allocate(&self, bytes: usize) -> Result<(DeviceSpan, Box<dyn Any + Send + Sync>)> {
        if bytes == 0 {
            // SAFETY: no bytes.
            return Ok((unsafe { DeviceSpan::new(0, 0) }, Box::new(())));
        }
        let mut memory = null_mut();
        // SAFETY: the pointer receives an address before the call returns.
        let code = unsafe { sys::outboard_cuda_malloc(self.ordinal, bytes as u64, &raw mut memory) };
        check(code, || format!("cannot allocate {bytes} bytes on CUDA device {}", self.ordinal))?;
        // SAFETY: fresh memory, freed once.
        let guard = unsafe { Owned::new(memory, self.ordinal, sys::outboard_cuda_free) };
        // SAFETY: fresh memory that nobody else knows; whoever has the span keeps the guard.
        Ok((unsafe { DeviceSpan::new(memory as usize, bytes) }, Box::new(guard)))
    }

    fn pin(&self, start: usize, bytes: usize) -> Result<Box<dyn Any + Send + Sync>> {
        if bytes == 0 {
            return Ok(Box::new(()));
        }
        let memory = start as *mut c_void;
        // SAFETY: registering memory changes neither its contents nor who may touch it; CUDA refuses addresses that are
        // not mapped. Whoever keeps the guard keeps the memory mapped.
        let code = unsafe { sys::outboard_cuda_host_register(self.ordinal, memory, bytes as u64) };
        match code {
            SUCCESS => {}
            code => {
                let cure = "; less may be pinned than the machine has (a container's memory limit, the kernel's), or \
                            something else has pinned it";
                return Err(failure(code, &format!("cannot pin {bytes} bytes of host memory"), cure));
            }
        }
        // SAFETY: registered just now, unregistered once.
        Ok(Box::new(unsafe { Owned::new(memory, self.ordinal, sys::outboard_cuda_host_unregister) }))
    }

    fn can_address_host(&self) -> bool {
        self.can_address_host
    }

    fn begin_range(&self, message: &str) -> Box<dyn Any + Send> {
        Box::new(super::Range::begin(message))
    }
}
