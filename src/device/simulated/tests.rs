//! Order, hazards and memory of the simulated device.

mod arithmetic;
mod failures;

use super::*;
use crate::device::{Device, DeviceCopy, DeviceGrad, TABLE_ENTRY_BYTES};
use crate::kernel::GradDType;
use crate::memory::{DeviceSpan, HostSpan, page_size};
use std::collections::HashSet;
use std::ptr::{NonNull, with_exposed_provenance};

const STREAMS: [Stream; 5] = [Stream::StateIn, Stream::Update, Stream::StateOut, Stream::Down, Stream::Up];

fn device(schedule: Schedule) -> SimulatedDevice {
    let device = SimulatedDevice::new(schedule).unwrap();
    device.keep_log();
    device
}

/// A span over a buffer that is good and left alone until the device is done with it: each test sees to that.
fn host<T>(buffer: &mut [T]) -> HostSpan {
    let bytes = size_of_val(buffer);
    let start = NonNull::from(&mut *buffer).cast();
    // SAFETY: as said above.
    unsafe { HostSpan::new(start, bytes, None) }
}

fn table(entries: usize) -> Vec<u8> {
    vec![0; entries * TABLE_ENTRY_BYTES]
}

fn contents(span: &DeviceSpan) -> Vec<u8> {
    // SAFETY: the tests look when the device is done.
    unsafe { std::slice::from_raw_parts(with_exposed_provenance(span.address()), span.len()) }.to_vec()
}

fn kinds(device: &SimulatedDevice) -> Vec<OperationKind> {
    device.log().into_iter().map(|entry| entry.kind).collect()
}

/// All streams and the host come together.
fn finish(device: &SimulatedDevice) {
    for stream in STREAMS {
        let event = device.event().unwrap();
        device.record(&event, stream).unwrap();
        device.wait(&event).unwrap();
    }
}

fn message<T>(result: Result<T>) -> String {
    match result {
        Err(Error::Cuda(message)) => message,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("no error"),
    }
}

#[test]
fn random_schedules_keep_each_stream_in_order_and_differ_between_streams() {
    let mut orders = HashSet::new();
    for seed in 0..12 {
        let device = device(Schedule::Random { seed });
        for _ in 0..20 {
            for stream in STREAMS {
                device.push(stream, || {}).unwrap();
            }
        }
        finish(&device);
        let log: Vec<_> = device.log().into_iter().filter(|entry| entry.kind == OperationKind::Push).collect();
        assert_eq!(log.len(), 100);
        for stream in STREAMS {
            let own: Vec<u64> = log.iter().filter(|entry| entry.stream == stream).map(|entry| entry.sequence).collect();
            assert!(own.is_sorted() && own.len() == 20, "{own:?}");
        }
        orders.insert(log.iter().map(|entry| entry.sequence).collect::<Vec<_>>());
    }
    assert!(orders.len() > 6, "{} different orders", orders.len());
}

#[test]
fn the_random_executor_goes_its_own_way_while_the_caller_goes_on() {
    let device = device(Schedule::Random { seed: 1 });
    let (go, gone) = std::sync::mpsc::channel::<()>();
    device.push(Stream::Update, move || gone.recv().unwrap()).unwrap();
    let event = device.event().unwrap();
    device.record(&event, Stream::Update).unwrap();
    assert!(!device.is_done(&event).unwrap());
    go.send(()).unwrap();
    device.wait(&event).unwrap();
    assert!(device.is_done(&event).unwrap());
}

#[test]
fn an_order_means_the_mark_as_it_was() {
    let device = device(Schedule::Manual);
    let (event, end) = (device.event().unwrap(), device.event().unwrap());
    assert!(device.is_done(&event).unwrap(), "never recorded");
    device.wait(&event).unwrap();
    device.order(Stream::Up, &event).unwrap(); // a mark that is not there: nothing to wait for

    device.push(Stream::StateIn, || {}).unwrap();
    device.record(&event, Stream::StateIn).unwrap();
    device.order(Stream::Update, &event).unwrap();
    device.record(&end, Stream::Update).unwrap();
    device.push(Stream::StateIn, || {}).unwrap();
    device.record(&event, Stream::StateIn).unwrap(); // again: the order above stays as it is
    device.order(Stream::Down, &event).unwrap();

    assert!(!device.run_one(Stream::Update) && !device.run_one(Stream::Down));
    assert!(device.run_one(Stream::StateIn)); // the push
    assert!(!device.run_one(Stream::Update));
    assert!(device.run_one(Stream::StateIn)); // the first mark
    assert!(!device.is_done(&event).unwrap(), "it was recorded again");
    assert!(!device.run_one(Stream::Down));
    assert!(device.run_one(Stream::Update) && device.run_one(Stream::Update));
    assert!(device.is_done(&end).unwrap());
    device.run_all();
    assert!(device.is_done(&event).unwrap());
    assert_eq!(device.counters().unfinished, 0);
    drop((event, end));
    assert_eq!(device.counters(), Counters::default());
}

#[test]
fn nothing_runs_by_hand_but_marks_on_idle_foreign_streams() {
    let device = device(Schedule::Manual);
    let foreign = Stream::Foreign(7);
    let (idle, busy, own) = (device.event().unwrap(), device.event().unwrap(), device.event().unwrap());
    device.record(&idle, foreign).unwrap();
    device.record(&own, Stream::Update).unwrap();
    assert!(device.is_done(&idle).unwrap() && !device.is_done(&own).unwrap());
    device.push(foreign, || {}).unwrap();
    device.record(&busy, foreign).unwrap();
    assert!(!device.is_done(&busy).unwrap());
    assert!(device.run_one(foreign));
    assert!(device.is_done(&busy).unwrap(), "the mark follows by itself");
    assert!(!device.run_one(foreign));
    device.order(foreign, &own).unwrap();
    device.record(&busy, foreign).unwrap();
    assert!(!device.is_done(&busy).unwrap());
    assert!(device.run_one(Stream::Update));
    assert!(device.is_done(&busy).unwrap());
}

#[test]
fn eager_work_is_done_at_once_unless_it_is_held() {
    use OperationKind::{Order, Push, Record};
    let device = device(Schedule::Eager);
    let event = device.event().unwrap();
    device.push(Stream::Up, || {}).unwrap();
    device.record(&event, Stream::Up).unwrap();
    assert!(device.is_done(&event).unwrap());
    device.hold(Stream::Up);
    device.push(Stream::Up, || {}).unwrap();
    device.record(&event, Stream::Up).unwrap();
    device.order(Stream::Down, &event).unwrap();
    device.push(Stream::Down, || {}).unwrap();
    assert_eq!(device.counters().unfinished, 4);
    device.release(Stream::Up);
    assert_eq!(device.counters().unfinished, 0);
    assert_eq!(kinds(&device), [Push, Record, Push, Record, Order, Push]);
}

#[test]
fn copies_look_at_memory_when_they_run() {
    let device = device(Schedule::Manual);
    let (span, guard) = device.allocate(8).unwrap();
    assert_eq!(contents(&span), [0xA5; 8]);
    assert_eq!(span.address() % 256, 0);
    let (mut from, mut to) = ([1_u8; 8], [0_u8; 8]);
    let mut lent = host(&mut from);
    device.copy_in(&span, &lent, Stream::StateIn).unwrap();
    lent.as_mut_slice::<i16>()[0] = 0x0102;
    device.run_all();
    assert_eq!(contents(&span), [2, 1, 1, 1, 1, 1, 1, 1]);
    device.copy_out(&host(&mut to[..5]), &span, Stream::StateIn).unwrap();
    device.run_all();
    assert_eq!(to, [2, 1, 1, 1, 1, 0, 0, 0]);
    assert!(message(device.copy_in(&span, &host(&mut [0_u8; 9]), Stream::StateIn)).contains("of 9 bytes to 8"));
    assert!(message(device.copy_out(&host(&mut [0_u8; 9]), &span, Stream::StateIn)).contains("of 9 bytes to 8"));
    assert_eq!(device.counters().allocated_bytes, 8);
    assert_eq!(device.counters().unfinished, 0, "what is refused has not been started");
    drop(guard);
}

#[test]
fn a_missing_order_is_found_under_any_schedule() {
    for schedule in [Schedule::Eager, Schedule::Random { seed: 3 }, Schedule::Manual] {
        for ordered in [true, false] {
            let device = device(schedule);
            let mut buffer = vec![1_u8; 64];
            let (span, _guard) = device.allocate(64).unwrap();
            let event = device.event().unwrap();
            let buffer = host(&mut buffer);
            device.copy_in(&span, &buffer, Stream::StateIn).unwrap();
            device.record(&event, Stream::StateIn).unwrap();
            if ordered {
                device.order(Stream::StateOut, &event).unwrap();
            }
            device.copy_out(&buffer, &span, Stream::StateOut).unwrap();
            device.run_all();
            finish_by_hand(&device);
            let hazards = device.hazards();
            assert_eq!(hazards.is_empty(), ordered, "{hazards:?}");
            if !ordered {
                assert_eq!(hazards.len(), 2, "the span and the buffer");
                assert!(hazards[0].starts_with("#2 copy_out on StateOut "), "{hazards:?}");
                assert!(hazards[0].contains("while #0 copy_in on StateIn "), "{hazards:?}");
            }
        }
    }
}

/// As [`finish`], where nobody else runs anything.
fn finish_by_hand(device: &SimulatedDevice) {
    let events = STREAMS.map(|stream| {
        let event = device.event().unwrap();
        device.record(&event, stream).unwrap();
        event
    });
    device.run_all();
    for event in &events {
        device.wait(event).unwrap();
    }
}

#[test]
fn orders_reach_through_streams_and_the_host() {
    let device = device(Schedule::Eager);
    let touch = |stream, write| {
        let range = [(4096, 64)];
        let (reads, writes) = if write { (&[][..], &range[..]) } else { (&range[..], &[][..]) };
        device.push_accessing(stream, reads, writes, || {}).unwrap();
    };
    let (one, two) = (device.event().unwrap(), device.event().unwrap());
    touch(Stream::StateIn, true);
    device.record(&one, Stream::StateIn).unwrap();
    device.order(Stream::Update, &one).unwrap();
    device.record(&two, Stream::Update).unwrap();
    device.order(Stream::Down, &two).unwrap();
    touch(Stream::Down, false);
    device.order(Stream::Up, &one).unwrap();
    touch(Stream::Up, false); // reads do not mind each other
    assert_eq!(device.hazards(), [""; 0]);
    device.host_access(4096, 1, false);
    assert_eq!(device.hazards().len(), 1, "the host has not seen the write done");
    assert!(device.is_done(&one).unwrap());
    device.host_access(4096, 1, false);
    assert_eq!(device.hazards().len(), 1);
    device.host_access(4159, 1, true);
    assert_eq!(device.hazards().len(), 3, "nor the reads");
    device.host_access(4160, 1, true);
    finish(&device);
    device.host_access(4096, 64, true);
    touch(Stream::StateOut, true); // given after the host has seen all
    assert_eq!(device.hazards().len(), 3);
    // A re-recorded event stands for the new mark only.
    device.record(&one, Stream::Up).unwrap();
    assert!(device.is_done(&one).unwrap());
    touch(Stream::Up, false);
    assert_eq!(device.hazards().len(), 4);
}

#[test]
fn items_of_one_launch_must_not_touch_each_others_bytes() {
    let device = device(Schedule::Eager);
    let (mut buffer, mut entries) = ([0_u16; 16], table(2));
    let at = buffer.as_mut_ptr().expose_provenance();
    let copy = |to, from| DeviceCopy { to: at + to, from: at + from, bytes: 8 };
    device.copy_many(&mut host(&mut entries), &[copy(8, 0), copy(16, 0)], Stream::Up).unwrap();
    assert_eq!(device.hazards(), [""; 0]);
    finish(&device);
    device.copy_many(&mut host(&mut entries), &[copy(8, 0), copy(16, 8)], Stream::Up).unwrap();
    assert_eq!(device.hazards().len(), 1);
    assert!(device.hazards()[0].contains("at once"), "{:?}", device.hazards());
}

#[test]
fn long_runs_leave_no_records_behind() {
    let device = device(Schedule::Eager);
    let event = device.event().unwrap();
    for i in 0..20_000 {
        let stream = STREAMS[i % 2];
        device.order(stream, &event).unwrap();
        device.push_accessing(stream, &[(1 << 20, 64)], &[(4096 + 64 * (i % 100), 64)], || {}).unwrap();
        device.record(&event, stream).unwrap();
    }
    assert_eq!(device.hazards(), [""; 0]);
    assert!(device.shared.lock().checker.pending() <= 102);
    device.wait(&event).unwrap();
    assert_eq!(device.shared.lock().checker.pending(), 0);
}

#[test]
fn tables_must_be_left_alone() {
    let device = device(Schedule::Manual);
    let mut buffer = [1_u16, 2, 3, 4];
    let mut entries = table(3);
    let at = buffer.as_mut_ptr().expose_provenance();
    let copies = [DeviceCopy { to: at + 4, from: at, bytes: 2 }, DeviceCopy { to: at + 6, from: at, bytes: 2 }];
    let event = device.event().unwrap();
    assert!(message(device.copy_many(&mut host(&mut entries[..383]), &copies, Stream::Up)).contains("383 bytes"));
    assert!(
        message(device.copy_many(&mut host(&mut entries), &[DeviceCopy { to: at + 1, ..copies[0] }], Stream::Up))
            .contains("cudaErrorInvalidValue in copy_many")
    );
    device.copy_many(&mut host(&mut entries), &copies, Stream::Up).unwrap();
    device.run_all();
    assert_eq!(buffer, [1, 2, 1, 1]);
    device.record(&event, Stream::Up).unwrap();
    device.run_all();
    device.wait(&event).unwrap();
    device.copy_many(&mut host(&mut entries), &copies, Stream::Up).unwrap();
    assert_eq!(device.hazards(), [""; 0]);
    // The same table again, from its second entry, before that is done.
    device.copy_many(&mut host(&mut entries[TABLE_ENTRY_BYTES..]), &copies, Stream::Up).unwrap();
    assert!(device.hazards()[0].starts_with("writing a table on the host "), "{:?}", device.hazards());
    device.record(&event, Stream::Up).unwrap();
    device.run_all();
    for said in [message(device.is_done(&event)), message(device.wait(&event)), message(device.event())] {
        assert!(said.contains("copy_many on Up: table overwritten while in use"), "{said}");
    }
    assert_eq!(device.counters().unfinished, 0);
}

#[test]
fn memory_is_counted_and_freeing_it_too_early_is_found() {
    let device = device(Schedule::Manual);
    let (span, guard) = device.allocate(1 << 10).unwrap();
    let (other, other_guard) = device.allocate(0).unwrap();
    assert!(other.is_empty());
    assert_eq!(device.counters().allocated_bytes, 1 << 10);
    let mut to = vec![0_u8; 1 << 10];
    device.copy_out(&host(&mut to), &span, Stream::Down).unwrap();
    drop((guard, other_guard));
    assert_eq!(device.counters().allocated_bytes, 0);
    assert!(device.hazards()[0].starts_with("freeing on the host "), "{:?}", device.hazards());
    device.run_all();
    assert_eq!(to, [0xA5; 1 << 10]);

    let page = page_size();
    assert!(message(device.pin(page + 1, page)).contains("cudaErrorInvalidValue"));
    let pin = device.pin(16 * page, 2 * page).unwrap();
    assert!(message(device.pin(17 * page, page)).contains("AlreadyRegistered"));
    assert_eq!(device.counters().pinned_bytes, 2 * page);
    assert!(device.can_address_host());
    device.set_can_address_host(false);
    assert!(!device.can_address_host());
    let grad = DeviceGrad { address: 17 * page, len: 1, dtype: GradDType::F32 };
    assert!(message(device.unscale(&grad, 2.0, Stream::Down)).contains("cudaErrorIllegalAddress"));
    drop(pin);
    assert_eq!(device.counters(), Counters::default());
    let huge = device.allocate(usize::MAX);
    assert!(message(huge).contains("cudaErrorMemoryAllocation"));
}

#[test]
fn a_dropped_device_discards_what_is_waiting_and_its_guards_live_on() {
    for schedule in [Schedule::Eager, Schedule::Manual, Schedule::Random { seed: 9 }] {
        let device = device(schedule);
        let (_, guard) = device.allocate(64).unwrap();
        let event = device.event().unwrap();
        device.hold(Stream::Up);
        let token = Arc::new(());
        let inside = Arc::clone(&token);
        device.push(Stream::Up, move || panic!("not run with {inside:?}")).unwrap();
        device.record(&event, Stream::Up).unwrap();
        let other = SimulatedDevice::new(Schedule::Eager).unwrap();
        assert!(message(other.is_done(&event)).contains("an event of another device"));
        drop(device);
        assert_eq!(Arc::strong_count(&token), 1);
        drop((guard, event));
    }
}
