//! Failures of calls, and of the device.

use super::{arithmetic, device, host, kinds, message, table};
use crate::device::simulated::{OperationKind, Schedule, SimulatedDevice};
use crate::device::{Device, DeviceCopy, DeviceGrad, Stream};
use crate::kernel::GradDType;
use crate::memory::page_size;
use std::time::Duration;

#[test]
fn calls_fail_when_told_to() {
    let device = device(Schedule::Eager);
    let event = device.event().unwrap();
    device.fail_next(OperationKind::Record, 1, false);
    device.record(&event, Stream::Up).unwrap();
    assert!(message(device.record(&event, Stream::Up)).contains("simulated: cudaErrorUnknown in record on Up"));
    device.record(&event, Stream::Up).unwrap();
    device.fail_next(OperationKind::Order, 0, true);
    device.record(&event, Stream::Up).unwrap();
    assert!(device.order(Stream::Down, &event).is_err() && device.order(Stream::Down, &event).is_err());
    device.clear_failures();
    device.order(Stream::Down, &event).unwrap();

    let (span, _guard) = device.allocate(64).unwrap();
    let page = page_size();
    let fail = |kind| device.fail_next(kind, 0, false);
    let grad = DeviceGrad { address: 0, len: 0, dtype: GradDType::F32 };
    let mut bytes = [0; 8];
    let span_of_host = host(&mut bytes);
    let none = &mut host(&mut [0_u8; 0]);
    let partials = host(&mut [0_u8; 0]);
    OPERATIONS.into_iter().for_each(fail);
    let results = [
        device.copy_in(&span, &span_of_host, Stream::Up),
        device.copy_out(&span_of_host, &span, Stream::Up),
        device.update(&arithmetic::nothing("a.weight"), Stream::Up),
        device.update_many(none, &[arithmetic::nothing("b.weight")], Stream::Up),
        device.copy_many(none, &[], Stream::Up),
        device.squares(none, &partials, &[], 1.0, Stream::Up),
        device.unscale(&grad, 1.0, Stream::Up),
        device.push(Stream::Up, || panic!("not started")),
        device.event().map(drop),
        device.allocate(1).map(drop),
        device.pin(page, page).map(drop),
    ];
    let said = results.map(message);
    for (said, kind) in said.iter().zip(OPERATIONS) {
        assert!(said.contains(&format!("simulated: cudaErrorUnknown in {kind}")), "{said}");
    }
    assert!(said[2].ends_with("a.weight") && said[3].contains("b.weight"));
    assert_eq!(kinds(&device).len(), 4, "the marks and the order");
    device.event().unwrap();
}

const OPERATIONS: [OperationKind; 11] = [
    OperationKind::CopyIn,
    OperationKind::CopyOut,
    OperationKind::Update,
    OperationKind::UpdateMany,
    OperationKind::CopyMany,
    OperationKind::Squares,
    OperationKind::Unscale,
    OperationKind::Push,
    OperationKind::Event,
    OperationKind::Allocate,
    OperationKind::Pin,
];

#[test]
fn a_broken_device_says_so_and_runs_nothing_more() {
    for schedule in [Schedule::Manual, Schedule::Random { seed: 5 }] {
        let device = device(schedule);
        let (event, done) = (device.event().unwrap(), device.event().unwrap());
        device.hold(Stream::Up);
        device.push(Stream::Up, || panic!("not run")).unwrap();
        device.record(&event, Stream::Up).unwrap();
        let said = std::thread::scope(|threads| {
            let waiting = threads.spawn(|| message(device.wait(&event)));
            device.break_device();
            waiting.join().unwrap()
        });
        assert!(said.contains("simulated: cudaErrorLaunchFailure"), "{said}");
        device.release(Stream::Up);
        device.run_all();
        assert_eq!(message(device.is_done(&event)), said);
        assert_eq!(message(device.is_done(&done)), said, "of any event");
        assert_eq!(message(device.push(Stream::Down, || {})), said);
        assert_eq!(message(device.enter_thread()), said);
        assert_eq!(device.counters().unfinished, 0);
    }
}

#[test]
fn a_device_breaks_after_so_many_operations_or_where_one_panics() {
    let device = device(Schedule::Random { seed: 0 });
    let event = device.event().unwrap();
    device.break_after(3);
    for _ in 0..5 {
        // The later ones may find the device broken.
        drop(device.push(Stream::Up, || {}));
    }
    drop(device.record(&event, Stream::Up));
    while device.is_done(&event).is_ok() {
        std::thread::yield_now();
    }
    assert_eq!(device.log().len(), 3);

    let device = SimulatedDevice::new(Schedule::Eager).unwrap();
    device.push(Stream::Foreign(0), || panic!("in the backward pass")).unwrap();
    assert!(message(device.event()).contains("#0 push on Foreign(0): panicked: in the backward pass"));
}

#[test]
fn waiting_in_vain_is_an_error_that_says_for_what() {
    let device = device(Schedule::Manual);
    let event = device.event().unwrap();
    device.set_patience(Duration::from_millis(5));
    device.copy_many(&mut host(&mut table(1)), &[DeviceCopy { to: 0, from: 0, bytes: 0 }], Stream::Up).unwrap();
    device.record(&event, Stream::Up).unwrap();
    let said = message(device.wait(&event));
    assert!(said.ends_with("nothing has run for 5ms; Up: 2 unfinished, next #0 copy_many"), "{said}");
}
