//! A GPU as a [`Device`]: streams, events, memory, copies. Its kernels on many runs are in `many`.

mod many;

use super::data::{Plane, scramble};
use super::*;
use crate::device::{Device, DeviceCopy, Stream};
use crate::memory::{DeviceSpan, HostSpan, Mapping};
use std::any::Any;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

/// What memory holds where nothing has been put.
const UNTOUCHED: u8 = 0xA5;

fn device() -> Option<CudaDevice> {
    match status().problem {
        Some(problem) => {
            eprintln!("not tested: {problem}");
            None
        }
        None => Some(CudaDevice::new(0).unwrap()),
    }
}

/// Waits for all that a stream has been given.
fn finish(device: &CudaDevice, stream: Stream) {
    let event = device.event().unwrap();
    device.record(&event, stream).unwrap();
    device.wait(&event).unwrap();
    assert!(device.is_done(&event).unwrap());
}

/// Pinned host memory.
struct Pinned(Arc<Mapping>);

impl Pinned {
    fn new(device: &CudaDevice, bytes: usize) -> Self {
        let mapping = Mapping::new(bytes.max(1)).unwrap();
        let pins = mapping.pieces().map(|(start, bytes)| device.pin(start, bytes).unwrap()).collect();
        mapping.set_pinned(pins);
        Self(Arc::new(mapping))
    }

    fn address(&self) -> usize {
        self.0.base().as_ptr() as usize
    }

    /// No two spans in use at once have bytes in common, nor with what is read or written by `bytes`.
    fn span(&self, at: usize, bytes: usize) -> HostSpan {
        assert!(at + bytes <= self.0.bytes());
        // SAFETY: in bounds, by the assertion; the tests keep to what is said above.
        unsafe { HostSpan::new(self.0.base().add(at), bytes, Some(Arc::clone(&self.0))) }
    }

    /// All bytes, while no work is under way on them.
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping's bytes; the tests wait for the device before they ask for them.
        unsafe { std::slice::from_raw_parts_mut(self.0.base().as_ptr(), self.0.bytes()) }
    }
}

/// Planes side by side in the device's memory, or in host memory that it addresses, with room between them that nobody
/// is to write.
struct Image {
    host: Pinned,
    /// The same bytes on the device; without one, kernels use the host's.
    device: Option<(DeviceSpan, Box<dyn Any + Send + Sync>)>,
    /// Offsets and lengths of what has been put in.
    used: Vec<(usize, usize)>,
}

impl Image {
    fn new(device: &CudaDevice, bytes: usize, on_device: bool) -> Self {
        let mut host = Pinned::new(device, bytes);
        host.bytes().fill(UNTOUCHED);
        let device = on_device.then(|| device.allocate(host.0.bytes()).unwrap());
        Self { host, device, used: vec![] }
    }

    /// Puts bytes in, `misaligned` bytes behind a border of 256, and says where.
    fn put(&mut self, bytes: &[u8], misaligned: usize) -> usize {
        let free = self.used.last().map_or(0, |&(at, len)| at + len + 16);
        let at = free.next_multiple_of(256) + misaligned;
        self.host.bytes()[at..at + bytes.len()].copy_from_slice(bytes);
        self.used.push((at, bytes.len()));
        at
    }

    /// The address at which kernels find what is at an offset.
    fn address(&self, at: usize) -> usize {
        self.device.as_ref().map_or(self.host.address(), |(span, _)| span.address()) + at
    }

    fn upload(&self, device: &CudaDevice) {
        if let Some((span, _)) = &self.device {
            device.copy_in(span, &self.host.span(0, span.len()), Stream::StateIn).unwrap();
            finish(device, Stream::StateIn);
        }
    }

    /// Brings back what kernels have done on a stream, and checks that they have left the room between alone.
    fn download(&mut self, device: &CudaDevice, stream: Stream) {
        if let Some((span, _)) = &self.device {
            device.copy_out(&self.host.span(0, span.len()), span, stream).unwrap();
        }
        finish(device, stream);
        let mut end = 0;
        let borders = self.used.iter().copied().chain([(self.host.0.bytes(), 0)]).collect::<Vec<_>>();
        for (at, len) in borders {
            let between = &self.host.bytes()[end..at];
            let stray = between.iter().position(|&byte| byte != UNTOUCHED);
            assert!(stray.is_none(), "a stray write at {}, behind {end}, before {at}", end + stray.unwrap_or(0));
            end = at + len;
        }
    }
}

fn bytes_of(plane: &mut Plane, bytes: usize) -> &mut [u8] {
    plane.slice::<u8>(bytes)
}

fn noise_bytes(n: usize, seed: u32) -> Vec<u8> {
    (0..n as u32).map(|i| scramble(i ^ (seed << 20)) as u8).collect()
}

fn said<T>(result: Result<T>) -> String {
    result.map(|_| ()).unwrap_err().to_string()
}

// CUDA's own functions, where the tests need what the library does not have.
unsafe extern "C" {
    fn cudaStreamCreateWithFlags(stream: *mut *mut c_void, flags: u32) -> c_int;
    fn cudaStreamDestroy(stream: *mut c_void) -> c_int;
    fn cudaStreamBeginCapture(stream: *mut c_void, mode: c_int) -> c_int;
    fn cudaStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) -> c_int;
    fn cudaGraphDestroy(graph: *mut c_void) -> c_int;
    fn cudaStreamGetPriority(stream: *mut c_void, priority: *mut c_int) -> c_int;
    fn cudaStreamGetFlags(stream: *mut c_void, flags: *mut u32) -> c_int;
}
const NON_BLOCKING: u32 = 1;

fn current_device() -> c_int {
    let mut device = -1;
    // SAFETY: the pointer is to an int.
    assert_eq!(unsafe { sys::outboard_cuda_current_device(&raw mut device) }, 0);
    device
}

#[test]
fn events_begin_done_and_can_be_dropped_early() {
    let Some(device) = device() else { return };
    let event = device.event().unwrap();
    assert!(device.is_done(&event).unwrap());
    device.wait(&event).unwrap();
    let host = Pinned::new(&device, 64 << 20);
    let (memory, _guard) = device.allocate(64 << 20).unwrap();
    for stream in [Stream::StateIn, Stream::Up, Stream::Foreign(0)] {
        device.copy_in(&memory, &host.span(0, memory.len()), stream).unwrap();
        device.record(&event, stream).unwrap();
        let early = device.event().unwrap();
        device.record(&early, stream).unwrap();
        drop(early);
        device.wait(&event).unwrap();
        assert!(device.is_done(&event).unwrap());
    }
    // Also events that outlive their device.
    drop(device);
    drop(event);
}

#[test]
fn streams_are_of_the_device_and_of_two_priorities() {
    let Some(device) = device() else { return };
    let own = [Stream::StateIn, Stream::Update, Stream::StateOut, Stream::Down, Stream::Up];
    let priorities = own.map(|stream| {
        let (mut priority, mut flags) = (9, 9);
        // SAFETY: live streams, and pointers to ints.
        unsafe {
            assert_eq!(cudaStreamGetPriority(device.stream(stream), &raw mut priority), 0);
            assert_eq!(cudaStreamGetFlags(device.stream(stream), &raw mut flags), 0);
        }
        assert_eq!(flags, NON_BLOCKING, "{stream:?}");
        priority
    });
    let [state_in, update, state_out, down, up] = priorities;
    assert!(state_in == update && update == up && state_out == down && up <= down, "{priorities:?}");
}

#[test]
fn events_order_streams() {
    const BYTES: usize = 64 << 20;
    let Some(device) = device() else { return };
    let mut host = Pinned::new(&device, 3 * BYTES);
    host.bytes()[..BYTES].fill(1);
    host.bytes()[BYTES..2 * BYTES].fill(2);
    let (memory, _guard) = device.allocate(BYTES).unwrap();
    let event = device.event().unwrap();
    // The mark moves: the second one counts.
    for round in 0..4 {
        device.copy_in(&memory, &host.span(0, BYTES), Stream::StateIn).unwrap();
        device.record(&event, Stream::StateIn).unwrap();
        device.copy_in(&memory, &host.span(BYTES, BYTES), Stream::StateIn).unwrap();
        device.record(&event, Stream::StateIn).unwrap();
        device.order(Stream::Down, &event).unwrap();
        device.copy_out(&host.span(2 * BYTES, BYTES), &memory, Stream::Down).unwrap();
        finish(&device, Stream::Down);
        assert!(host.bytes()[2 * BYTES..].iter().all(|&byte| byte == 2), "round {round}");
        // The next round's first copy comes after this round's reading.
        device.record(&event, Stream::Down).unwrap();
        device.order(Stream::StateIn, &event).unwrap();
    }
}

#[test]
fn copies_cross_the_borders_between_pins() {
    let Some(device) = device() else { return };
    let mut host = Pinned::new(&device, (1 << 30) + (4 << 20));
    let pieces: Vec<_> = host.0.pieces().collect();
    assert_eq!(pieces.len(), 2);
    let (before, len) = (100_002, 3 << 20);
    let start = pieces[0].1 - before;
    let span = host.span(start, len);
    assert_eq!(span.pieces().collect::<Vec<_>>(), [(0, before), (before, len - before)]);
    let pattern = noise_bytes(len, 1);
    host.bytes()[start..start + len].copy_from_slice(&pattern);
    let (memory, _guard) = device.allocate(len).unwrap();
    device.copy_in(&memory, &span, Stream::Up).unwrap();
    finish(&device, Stream::Up);
    host.bytes()[start..start + len].fill(0);
    device.copy_out(&span, &memory, Stream::StateOut).unwrap();
    finish(&device, Stream::StateOut);
    assert!(host.bytes()[start..start + len] == pattern[..]);
    assert!(host.bytes()[..start].iter().rev().take(4096).all(|&byte| byte == 0));
    assert!(host.bytes()[start + len..].iter().all(|&byte| byte == 0));
}

#[test]
fn memory_is_pinned_as_long_as_its_guard_lives() {
    let Some(device) = device() else { return };
    let mapping = Mapping::new(1 << 20).unwrap();
    let start = mapping.base().as_ptr() as usize;
    let pin = device.pin(start, 1 << 20).unwrap();
    let twice = said(device.pin(start, 1 << 20));
    assert!(twice.contains("cannot pin 1048576 bytes") && twice.contains("AlreadyRegistered"), "{twice}");
    drop(pin);
    drop(device.pin(start, 1 << 20).unwrap());
    drop(device.pin(0, 0).unwrap());
    assert!(said(device.pin(1 << 12, 4096)).contains("cuda"), "memory that is not there");
}

#[test]
fn memory_beyond_the_devices_is_an_error_and_none_is_none() {
    let Some(device) = device() else { return };
    let text = said(device.allocate(1 << 50));
    assert!(text.contains(&(1_u64 << 50).to_string()) && text.contains("cudaErrorMemoryAllocation"), "{text}");
    let (span, guard) = device.allocate(0).unwrap();
    assert!(span.is_empty());
    drop(guard);
    // The error was that call's alone.
    drop(device.allocate(1 << 20).unwrap());
}

#[test]
fn the_current_device_stays() {
    let Some(device) = device() else { return };
    let before = current_device();
    let last = CudaDevice::new(status().devices - 1).unwrap();
    let mut host = Pinned::new(&last, 4096);
    host.bytes().fill(7);
    let (memory, _guard) = last.allocate(4096).unwrap();
    last.copy_in(&memory, &host.span(0, 4096), Stream::Up).unwrap();
    finish(&last, Stream::Up);
    // Pins hold for every device.
    let (other, _other_guard) = device.allocate(4096).unwrap();
    device.copy_in(&other, &host.span(0, 4096), Stream::Up).unwrap();
    finish(&device, Stream::Up);
    assert_eq!(current_device(), before);
    std::thread::spawn(move || {
        last.enter_thread().unwrap();
        assert_eq!(current_device(), status().devices as c_int - 1);
    })
    .join()
    .unwrap();
    assert_eq!(current_device(), before);
}

#[test]
fn a_stream_under_capture_is_refused_and_its_capture_goes_on() {
    const THREAD_LOCAL: c_int = 1;
    let Some(device) = device() else { return };
    let mut host = Pinned::new(&device, 8192);
    let (memory, _guard) = device.allocate(4096).unwrap();
    let (event, finished) = (device.event().unwrap(), device.event().unwrap());
    let mut stream = null_mut();
    // SAFETY: the pointer receives a stream, which lives until the end of the test.
    unsafe {
        assert_eq!(cudaStreamCreateWithFlags(&raw mut stream, NON_BLOCKING), 0);
        assert_eq!(cudaStreamBeginCapture(stream, THREAD_LOCAL), 0);
    }
    let captured = Stream::Foreign(stream as usize);
    let mut table = host.span(4096, 4096);
    let copies = [DeviceCopy { to: memory.address(), from: memory.address() + 2048, bytes: 64 }];
    for text in [
        said(device.record(&event, captured)),
        said(device.order(captured, &finished)),
        said(device.copy_in(&memory, &host.span(0, 4096), captured)),
        said(device.copy_many(&mut table, &copies, captured)),
    ] {
        assert!(text.contains("a CUDA graph capture is under way"), "{text}");
        assert!(text.contains("cudaErrorStreamCapture"), "{text}");
    }
    // Calls that CUDA refuses in a thread that captures, unless they are said to have nothing to do with it.
    let (more, more_guard) = device.allocate(4096).unwrap();
    let other = Pinned::new(&device, 4096);
    device.copy_in(&more, &other.span(0, 4096), Stream::Up).unwrap();
    device.record(&finished, Stream::Up).unwrap();
    let _ = device.is_done(&finished).unwrap();
    device.wait(&finished).unwrap();
    let mut graph = null_mut();
    // SAFETY: ends what was begun above; the pointer receives the graph.
    unsafe {
        assert_eq!(cudaStreamEndCapture(stream, &raw mut graph), 0, "the capture was broken");
        assert_eq!(cudaGraphDestroy(graph), 0);
    }
    drop((more_guard, other));
    device.record(&event, captured).unwrap();
    device.wait(&event).unwrap();
    // SAFETY: made above, and done.
    assert_eq!(unsafe { cudaStreamDestroy(stream) }, 0);
    host.bytes().fill(0);
}

#[test]
fn events_are_used_again_and_may_outlive_the_device() {
    let Some(device) = device() else { return };
    let first = device.event().unwrap();
    device.record(&first, Stream::Update).unwrap();
    let handle = first.handle();
    drop(first);
    let again = device.event().unwrap();
    assert_eq!(again.handle(), handle);
    let other = device.event().unwrap();
    assert_ne!(other.handle(), handle);
    for event in [&again, &other] {
        device.record(event, Stream::StateIn).unwrap();
        device.wait(event).unwrap();
    }
    drop(device);
    drop((again, other));
}
