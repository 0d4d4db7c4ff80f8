//! Failures of the device at every call: where slots are then, and that it goes on.

use super::rig::{CALLER, Rig, first_bytes, span};
use crate::device::simulated::{OperationKind, Schedule};
use crate::engine::shuttle::Place;
use crate::error::Error;

const SIZES: [usize; 4] = [300, 64, 0, 500];

/// Repeats a call until it succeeds, with what it still has to do; the number of failures.
fn insist(
    rig: &mut Rig,
    ids: &[usize],
    from: &[Place],
    call: impl Fn(&mut Rig, &[usize]) -> crate::Result<()>,
) -> usize {
    for failures in 0.. {
        let left: Vec<usize> = ids.iter().copied().filter(|&id| from.contains(&rig.place(id))).collect();
        match call(rig, &left) {
            Ok(()) => return failures,
            Err(Error::Cuda(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    unreachable!()
}

/// Three turns in the same memory; each slot's bytes are one more after each, whatever failed.
fn turns(rig: &mut Rig, ids: &[usize]) -> usize {
    let mut failures = 0;
    let spans = |rig: &Rig, left: &[usize]| {
        let all = rig.packed(ids, rig.memory);
        all.into_iter().filter(|(id, _)| left.contains(id)).collect::<Vec<_>>()
    };
    for _ in 0..3 {
        failures += insist(rig, ids, &[Place::Host, Place::DeviceToHost], |rig, left| {
            let spans = spans(rig, left);
            rig.shuttle.bring(spans, Some(CALLER))
        });
        failures += insist(rig, ids, &[Place::HostToDevice], |rig, left| rig.shuttle.arrive(left, CALLER));
        for (id, span) in rig.packed(ids, rig.memory) {
            rig.add(span.address(), rig.bytes(id), 1).unwrap();
        }
        failures += insist(rig, ids, &[Place::Device], |rig, left| {
            let spans = spans(rig, left);
            rig.shuttle.send(spans, CALLER)
        });
    }
    failures
}

#[test]
fn one_failure_anywhere_loses_nothing() {
    use OperationKind::{CopyIn, CopyOut, Event, Order, Record};
    for kind in [CopyIn, CopyOut, Record, Order, Event] {
        let mut seen = 0;
        for skip in 0.. {
            let mut rig = Rig::new(Schedule::Random { seed: skip as u64 }, 2048, 128);
            let ids = rig.filled(&SIZES);
            rig.device.fail_next(kind, skip, false);
            let failures = turns(&mut rig, &ids);
            rig.device.clear_failures();
            rig.shuttle.settle_all().unwrap();
            for &id in &ids {
                let expected: Vec<u8> =
                    first_bytes(id, rig.bytes(id)).iter().map(|byte| byte.wrapping_add(3)).collect();
                assert_eq!(rig.read(id), expected, "slot {id}, {kind} {skip}");
            }
            rig.finish();
            seen += failures;
            // Marks of copies are tried twice: those of the caller's stream are the ones that fail.
            if failures == 0 && skip > 100 {
                break;
            }
        }
        assert!(seen >= 6, "{kind}: {seen} failures were seen");
    }
}

#[test]
fn a_failure_names_the_slot_and_leaves_it_where_it_was() {
    let mut rig = Rig::new(Schedule::Eager, 4096, 100);
    let ids = rig.filled(&[300, 300, 300]);
    // Pieces of 100 of a run of 320 + 320 + 300: the fifth is the second slot's.
    rig.device.fail_next(OperationKind::CopyIn, 4, false);
    let error = rig.shuttle.bring(rig.packed(&ids, rig.memory), None).unwrap_err();
    assert!(error.to_string().starts_with("exp_avg of layer 1 on its way to the device: "), "{error}");
    let places = |rig: &Rig| ids.iter().map(|&id| rig.place(id)).collect::<Vec<_>>();
    assert_eq!(places(&rig), [Place::HostToDevice, Place::Host, Place::Host]);
    let spans = rig.packed(&ids, rig.memory).split_off(1);
    rig.shuttle.bring(spans, None).unwrap();
    rig.shuttle.arrive(&ids, CALLER).unwrap();
    rig.device.fail_next(OperationKind::CopyOut, 4, false);
    let error = rig.shuttle.send(rig.packed(&ids, rig.memory), CALLER).unwrap_err();
    assert!(error.to_string().starts_with("exp_avg of layer 1 on its way from the device: "), "{error}");
    assert_eq!(places(&rig), [Place::DeviceToHost, Place::Device, Place::Device]);
    // Half of the second is home: there is no going back to what was there before.
    let error = rig.shuttle.discard(&ids[1..2], CALLER).unwrap_err();
    assert!(matches!(&error, Error::Transition { place, .. } if place.contains("half written")), "{error}");
    rig.shuttle.discard(&ids[2..], CALLER).unwrap();
    let spans = rig.packed(&ids, rig.memory).into_iter().skip(1).take(1).collect();
    rig.shuttle.send(spans, CALLER).unwrap();
    rig.shuttle.settle_all().unwrap();
    for &id in &ids {
        assert_eq!(rig.read(id), first_bytes(id, 300));
    }
    rig.finish();
}

#[test]
fn everything_can_be_recalled_wherever_it_is() {
    let mut rig = Rig::new(Schedule::Random { seed: 3 }, 4096, 100);
    let ids = rig.filled(&[300, 300, 300, 300]);
    let fresh = rig.reserve(&[64]);
    let start = rig.memory;
    rig.shuttle.recall(CALLER).unwrap();
    rig.shuttle.bring(rig.packed(&ids[..3], start), None).unwrap();
    rig.shuttle.arrive(&ids[..1], CALLER).unwrap();
    rig.shuttle.bear(&fresh, None).unwrap();
    rig.add(start, 300, 1).unwrap();
    rig.shuttle.recall(CALLER).unwrap();
    let places = |rig: &Rig| ids.iter().chain(&fresh).map(|&id| rig.place(id)).collect::<Vec<_>>();
    assert_eq!(places(&rig), [Place::Host, Place::Host, Place::Host, Place::Host, Place::Pending]);
    // The memory is free for others, behind what used it.
    rig.shuttle.bring(vec![(ids[3], span(start, 300))], None).unwrap();
    rig.shuttle.arrive(&ids[3..], CALLER).unwrap();
    rig.device.fail_next(OperationKind::CopyOut, 1, false);
    assert!(rig.shuttle.send(vec![(ids[3], span(start, 300))], CALLER).is_err());
    rig.device.clear_failures();
    rig.shuttle.recall(CALLER).unwrap();
    assert_eq!(rig.place(ids[3]), Place::Device, "its host memory is half written");
    rig.shuttle.send(vec![(ids[3], span(start, 300))], CALLER).unwrap();
    rig.shuttle.settle_all().unwrap();
    for &id in &ids {
        assert_eq!(rig.read(id), first_bytes(id, 300));
    }
    rig.finish();
}

#[test]
fn copies_that_cannot_be_marked_end_it() {
    for skip in 0..3 {
        let mut rig = Rig::new(Schedule::Eager, 4096, 100);
        let ids = rig.filled(&[300]);
        rig.device.fail_next(OperationKind::Record, skip, true);
        assert!(matches!(rig.shuttle.bring(rig.packed(&ids, rig.memory), None), Err(Error::Cuda(_))));
        rig.device.clear_failures();
        let error = rig.shuttle.poll().unwrap_err();
        assert!(error.to_string().contains("lost track of"), "{error}");
        assert!(rig.shuttle.free(&ids).is_err());
        assert_eq!(rig.shuttle.stats().places[Place::Host as usize], 1);
        rig.finish();
    }
}

#[test]
fn a_device_that_breaks_is_an_error_and_never_a_hang() {
    for schedule in [Schedule::Eager, Schedule::Random { seed: 3 }] {
        let mut survived = false;
        for operations in 1..400 {
            let mut rig = Rig::new(schedule, 2048, 128);
            let ids = rig.filled(&SIZES);
            rig.device.break_after(operations);
            let result = (0..3).try_for_each(|_| {
                rig.shuttle.bring(rig.packed(&ids, rig.memory), Some(CALLER))?;
                rig.shuttle.arrive(&ids, CALLER)?;
                rig.add(rig.memory, 300, 1)?;
                rig.shuttle.send(rig.packed(&ids, rig.memory), CALLER)?;
                rig.shuttle.settle_all()
            });
            let Rig { device, shuttle, .. } = rig;
            match result {
                Ok(()) => survived = true,
                Err(error) => {
                    assert!(matches!(error, Error::Cuda(_)), "{error}");
                    let stats = shuttle.stats();
                    assert_eq!(stats.places.iter().sum::<usize>(), SIZES.len());
                }
            }
            drop(shuttle);
            assert_eq!(device.counters().live_events, 0);
            if survived {
                break;
            }
        }
        assert!(survived);
    }
}

#[test]
fn a_device_that_cannot_pin_in_the_middle_leaves_no_slots() {
    let mut rig = Rig::new(Schedule::Eager, 2048, 128);
    rig.device.fail_next(OperationKind::Pin, 0, false);
    let (ids, warning) = rig.shuttle.reserve(&super::rig::names(&[10]), &[]).unwrap();
    assert!(warning.unwrap().contains("cudaErrorUnknown"));
    assert_eq!(rig.shuttle.stats().pinned_bytes, 0);
    rig.shuttle.fill(&ids).unwrap();
    rig.shuttle.bring(vec![(ids[0], span(rig.memory, 10))], None).unwrap();
    rig.finish();
}
