//! Which call is right where, and that a wrong one changes nothing.

use super::rig::{CALLER, FOREIGN, Rig, first_bytes, schedules, span};
use crate::device::Device;
use crate::device::simulated::Schedule;
use crate::engine::shuttle::Place;
use crate::error::{Error, Result};

const BYTES: usize = 200;

/// A slot in each place in turn, with memory of its own on the device.
fn slot_at(rig: &mut Rig, place: Place, offset: usize) -> usize {
    let address = rig.memory + offset;
    let id = rig.reserve(&[BYTES])[0];
    if place > Place::Pending {
        rig.shuttle.fill(&[id]).unwrap();
    }
    if place > Place::Host {
        rig.shuttle.bring(vec![(id, span(address, BYTES))], None).unwrap();
    }
    if place > Place::HostToDevice {
        rig.shuttle.arrive(&[id], CALLER).unwrap();
    }
    if place > Place::Device {
        rig.shuttle.send(vec![(id, span(address, BYTES))], CALLER).unwrap();
    }
    assert_eq!(rig.place(id), place);
    id
}

type Call = fn(&mut Rig, &[(usize, usize)]) -> Result<()>;

fn ids(slots: &[(usize, usize)]) -> Vec<usize> {
    slots.iter().map(|&(id, _)| id).collect()
}

fn spans(slots: &[(usize, usize)]) -> Vec<(usize, crate::memory::DeviceSpan)> {
    slots.iter().map(|&(id, address)| (id, span(address, BYTES))).collect()
}

/// Each call, where it is right, and where it leads from the first of those.
const CALLS: [(&str, Call, &[Place], Option<Place>); 7] = [
    ("fill", |rig, slots| rig.shuttle.fill(&ids(slots)), &[Place::Pending], Some(Place::Host)),
    ("bear", |rig, slots| rig.shuttle.bear(&ids(slots), None), &[Place::Pending], Some(Place::Device)),
    (
        "bring",
        |rig, slots| rig.shuttle.bring(spans(slots), None),
        &[Place::Host, Place::DeviceToHost],
        Some(Place::HostToDevice),
    ),
    ("arrive", |rig, slots| rig.shuttle.arrive(&ids(slots), CALLER), &[Place::HostToDevice], Some(Place::Device)),
    ("send", |rig, slots| rig.shuttle.send(spans(slots), CALLER), &[Place::Device], Some(Place::DeviceToHost)),
    (
        "discard",
        |rig, slots| rig.shuttle.discard(&ids(slots), CALLER),
        &[Place::HostToDevice, Place::Device],
        Some(Place::Host),
    ),
    ("free", |rig, slots| rig.shuttle.free(&ids(slots)), &[Place::Pending, Place::Host, Place::DeviceToHost], None),
];

#[test]
fn every_call_is_right_in_its_places_alone() {
    for (name, call, right, leads_to) in CALLS {
        for place in Place::ALL {
            let mut rig = Rig::new(Schedule::Eager, 4096, 64);
            // Another that is where it should be, first: it must not move if the second is wrong.
            let fit = (slot_at(&mut rig, right[0], 0), rig.memory);
            let second = (slot_at(&mut rig, place, 1024), rig.memory + 1024);
            let before = rig.shuttle.stats();
            let result = call(&mut rig, &[fit, second]);
            if right.contains(&place) {
                result.unwrap_or_else(|error| panic!("{name} at {place}: {error}"));
                match leads_to {
                    Some(to) => assert_eq!((rig.place(fit.0), rig.place(second.0)), (to, to), "{name} from {place}"),
                    None => assert!(rig.shuttle.place(second.0).is_err(), "{name} from {place}"),
                }
            } else {
                let error = result.unwrap_err();
                let Error::Transition { name: slot, place: was, asked, .. } = &error else {
                    panic!("{name} at {place}: {error}")
                };
                assert_eq!((&**slot, &**was, *asked), ("exp_avg of layer 0", place.name(), name));
                assert_eq!(rig.shuttle.stats(), before, "{name} at {place} changed something");
                assert_eq!((rig.place(fit.0), rig.place(second.0)), (right[0], place));
            }
            rig.finish();
        }
    }
}

#[test]
fn a_slot_named_twice_or_gone_changes_nothing() {
    for (name, call, right, _) in CALLS {
        let mut rig = Rig::new(Schedule::Eager, 4096, 64);
        let fit = (slot_at(&mut rig, right[0], 0), rig.memory);
        let before = rig.shuttle.stats();
        for wrong in [[fit, (fit.0, fit.1 + 1024)], [fit, (77, fit.1 + 1024)]] {
            let error = call(&mut rig, &wrong).unwrap_err();
            assert!(matches!(error, Error::InvalidValue(_)), "{name}: {error}");
            assert_eq!(rig.shuttle.stats(), before, "{name}");
        }
        rig.finish();
    }
}

#[test]
fn wrong_device_memory_is_refused_before_anything_moves() {
    let mut rig = Rig::new(Schedule::Eager, 4096, 64);
    let slots = rig.filled(&[100, 100]);
    let at = rig.memory;
    let wrong =
        [[span(at, 100), span(at + 128, 99)], [span(at, 100), span(at + 99, 100)], [span(at, 100), span(0, 100)]];
    for [first, second] in wrong {
        let error = rig.shuttle.bring(vec![(slots[0], first), (slots[1], second)], None).unwrap_err();
        assert!(matches!(&error, Error::InvalidValue(message) if message.contains("layer")), "{error}");
        assert_eq!(rig.place(slots[0]), Place::Host);
    }
    let pending = rig.reserve(&[5]);
    assert!(matches!(rig.shuttle.bear(&pending, Some(&[])), Err(Error::InvalidValue(_))));
    rig.finish();
}

#[test]
fn discarding_keeps_the_value_from_before_and_its_memory_from_who_comes_next() {
    for schedule in schedules(40) {
        for arrived in [false, true] {
            let mut rig = Rig::new(schedule, 1024, 64);
            let slots = rig.filled(&[500, 500]);
            for _ in 0..3 {
                rig.shuttle.bring(vec![(slots[0], span(rig.memory, 500))], None).unwrap();
                if arrived {
                    rig.shuttle.arrive(&slots[..1], CALLER).unwrap();
                    rig.add(rig.memory, 500, 9).unwrap();
                }
                rig.shuttle.discard(&slots[..1], CALLER).unwrap();
                // The next one into the same memory, at once.
                rig.shuttle.bring(vec![(slots[1], span(rig.memory, 500))], None).unwrap();
                rig.shuttle.arrive(&slots[1..], CALLER).unwrap();
                rig.add(rig.memory, 500, 1).unwrap();
                rig.shuttle.send(vec![(slots[1], span(rig.memory, 500))], CALLER).unwrap();
            }
            rig.shuttle.settle(&slots).unwrap();
            assert_eq!(rig.read(slots[0]), first_bytes(slots[0], 500));
            let expected: Vec<u8> = first_bytes(slots[1], 500).iter().map(|byte| byte.wrapping_add(3)).collect();
            assert_eq!(rig.read(slots[1]), expected);
            rig.finish();
        }
    }
}

#[test]
fn state_is_born_on_the_device_where_others_have_left() {
    for schedule in schedules(40) {
        let mut rig = Rig::new(schedule, 1024, 64);
        let (old, new) = (rig.filled(&[300])[0], rig.reserve(&[300])[0]);
        let at = rig.memory;
        rig.shuttle.bring(vec![(old, span(at, 300))], None).unwrap();
        rig.shuttle.arrive(&[old], CALLER).unwrap();
        rig.add(at, 300, 1).unwrap();
        rig.shuttle.send(vec![(old, span(at, 300))], CALLER).unwrap();
        rig.shuttle.claim(at, 300, CALLER).unwrap();
        rig.set(at, 300, 5);
        rig.shuttle.bear(&[new], Some(&[at])).unwrap();
        // It has no value at home to fall back to.
        rig.shuttle.discard(&[new], CALLER).unwrap();
        assert_eq!(rig.place(new), Place::Pending);
        rig.shuttle.bring(vec![(old, span(at, 300))], None).unwrap();
        rig.shuttle.arrive(&[old], CALLER).unwrap();
        rig.shuttle.discard(&[old], CALLER).unwrap();
        rig.shuttle.claim(at, 300, CALLER).unwrap();
        rig.set(at, 300, 6);
        rig.shuttle.bear(&[new], None).unwrap();
        rig.shuttle.send(vec![(new, span(at, 300))], CALLER).unwrap();
        rig.shuttle.settle_all().unwrap();
        assert_eq!(rig.read(new), [6; 300]);
        rig.shuttle.settle(&[old]).unwrap();
        assert_eq!(rig.read(old)[0], first_bytes(old, 1)[0].wrapping_add(1));
        rig.finish();
    }
}

#[test]
fn memory_that_the_caller_used_is_entered_behind_it() {
    for schedule in schedules(40) {
        let mut rig = Rig::new(schedule, 1024, 64);
        let id = rig.filled(&[1000])[0];
        rig.set(rig.memory, 1000, 1);
        rig.shuttle.bring(vec![(id, span(rig.memory, 1000))], Some(CALLER)).unwrap();
        rig.shuttle.arrive(&[id], CALLER).unwrap();
        rig.shuttle.send(vec![(id, span(rig.memory, 1000))], CALLER).unwrap();
        rig.shuttle.settle(&[id]).unwrap();
        assert_eq!(rig.read(id), first_bytes(id, 1000));
        rig.finish();
    }
}

#[test]
fn freeing_and_dropping_wait_for_copies_that_touch_host_memory() {
    for seed in 0..40 {
        let mut rig = Rig::new(Schedule::Random { seed }, 4096, 64);
        let slots = rig.filled(&[900, 900, 900]);
        let at = [rig.memory, rig.memory + 1024, rig.memory + 2048];
        let spans: Vec<_> = slots.iter().zip(at).map(|(&id, at)| (id, span(at, 900))).collect();
        rig.shuttle.bring(spans, None).unwrap();
        // The copy in still reads it.
        rig.shuttle.discard(&slots[..1], CALLER).unwrap();
        rig.shuttle.arrive(&slots[1..], CALLER).unwrap();
        rig.shuttle.send(vec![(slots[1], span(at[1], 900))], CALLER).unwrap();
        rig.shuttle.free(&slots[..2]).unwrap();
        rig.shuttle.send(vec![(slots[2], span(at[2], 900))], CALLER).unwrap();
        rig.device.drain(&[FOREIGN]).unwrap();
        rig.finish();
    }
}

#[test]
fn polling_finds_what_has_come_home_and_waits_for_nothing() {
    let mut rig = Rig::new(Schedule::Manual, 1024, 64);
    let id = slot_at(&mut rig, Place::DeviceToHost, 0);
    rig.shuttle.poll().unwrap();
    assert_eq!(rig.place(id), Place::DeviceToHost);
    rig.device.run_all();
    assert_eq!(rig.place(id), Place::DeviceToHost);
    rig.shuttle.poll().unwrap();
    assert_eq!(rig.place(id), Place::Host);
    rig.finish();
}
