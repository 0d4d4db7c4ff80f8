//! What fails is told by name, once; all else goes on, and nothing hangs.

use super::rig::{Kind, Rig, Setup, Terms};
use super::tools::{eventually, within};
use crate::device::Stream;
use crate::device::simulated::OperationKind::{
    self, CopyIn, CopyMany, CopyOut, Event, Order, Record, Unscale, Update, UpdateMany,
};
use crate::device::simulated::Schedule;
use crate::engine::lanes::{Engine, Transfer};
use crate::error::Error;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const KINDS: [Kind; 7] = [
    Kind::f32(70_001),
    Kind::split(100),
    Kind::split(250),
    Kind::split(0),
    Kind::split(120_000),
    Kind::f32(50),
    Kind::f32(0),
];
/// What is submitted together.
const GROUPS: [&[usize]; 4] = [&[0], &[1, 2, 3], &[4], &[5]];

fn setups(schedule: Schedule) -> [Setup; 4] {
    let [gpu, cpu, both] =
        [(true, false), (false, true), (true, true)].map(|(gpu, cpu)| Setup::new(schedule, gpu, cpu));
    [gpu.clone().chunks(30_000), gpu.zero_copy().chunks(50_000), cpu.chunks(40_000), both.chunks(30_000)]
}

/// Slots that failed, after a look at what was told of them: once each, with their names.
fn failed(rig: &Rig) -> BTreeSet<usize> {
    let failures = rig.failures();
    let slots: BTreeSet<usize> = failures.iter().map(|&(slot, _)| slot).collect();
    assert_eq!(slots.len(), failures.len(), "told once each: {failures:?}");
    for (slot, failure) in failures {
        assert_eq!(failure.parameter, format!("p{slot}"));
        assert!(!failure.cause.is_empty());
        assert!(failure.first + failure.len <= KINDS[slot].len, "{failure:?}");
    }
    slots
}

/// After a failure: the others are right; those that failed go on failing until they are healed, and then are right.
fn recover(rig: &mut Rig, failed_slots: &BTreeSet<usize>, terms: &Terms) {
    let is_failed = |slot: &usize| failed_slots.contains(slot);
    (0..KINDS.len()).filter(|slot| !is_failed(slot)).for_each(|slot| rig.compare(slot));
    for &slot in failed_slots {
        rig.submit(&[slot], 1, terms);
        rig.engine().wait(&[slot], 7).unwrap();
        rig.engine().synchronize().unwrap();
        let again = rig.failures();
        assert!(matches!(&again[..], [(again, failure)] if *again == slot && failure.cause.contains("half updated")));
    }
    // Together with others, in whatever bundle: only those fail.
    for group in GROUPS.into_iter().filter(|group| group.iter().any(is_failed)) {
        rig.submit(group, 1, terms);
        rig.engine().synchronize().unwrap();
        let again = failed(rig);
        assert!(again.is_subset(failed_slots), "{again:?}, but only {failed_slots:?} are half updated");
        group.iter().filter(|slot| !is_failed(slot)).for_each(|&slot| rig.compare(slot));
    }
    for &slot in failed_slots {
        rig.heal(slot);
    }
    for group in GROUPS {
        rig.submit(group, 1, terms);
    }
    rig.engine().synchronize().unwrap();
    assert_eq!(rig.failures(), []);
    rig.compare_all();
}

/// Whether each element of a weight is what it was, or updated: nothing else has been written to it.
fn is_old_or_new(rig: &Rig, slot: usize, old: &[u8]) -> bool {
    let (now, new) = (rig.parameters[slot].weight.read(), rig.parameters[slot].twin_weight.read());
    let size = KINDS[slot].weight.live_bytes();
    let elements = now.chunks(size).zip(old.chunks(size)).zip(new.chunks(size));
    elements.into_iter().all(|((now, old), new)| now == old || now == new)
}

/// One failure at the `skip`th call of a kind; whether there was one.
fn fail_once(setup: &Setup, kind: OperationKind, skip: usize, terms: &Terms) -> bool {
    let mut rig = Rig::new(setup, &KINDS);
    let old: Vec<Vec<u8>> = rig.parameters.iter().map(|parameter| parameter.weight.read()).collect();
    rig.device.fail_next(kind, skip, false);
    let mut refused = false;
    for group in GROUPS {
        while let Err(error) = rig.try_submit(group, 1, terms) {
            assert!(matches!(error, Error::Cuda(_)), "{error}");
            // As long as nothing else of the group has been submitted.
            assert!(group.iter().all(|&slot| !rig.engine().is_under_way(slot)));
            refused = true;
        }
    }
    let all: Vec<usize> = (0..KINDS.len()).collect();
    // Waiters wake up; the call itself may be the one that fails.
    drop(rig.engine().wait(&all, 7));
    rig.engine().synchronize().unwrap();
    let failed_slots = failed(&rig);
    let hit = rig.device.refused() > 0;
    rig.device.clear_failures();
    let told = refused || !failed_slots.is_empty() || matches!(kind, Order | Event | Record);
    assert!(!hit || told, "a call failed, and nobody was told");
    for &slot in &failed_slots {
        assert!(is_old_or_new(&rig, slot, &old[slot]), "something else has been written to weight {slot}");
    }
    recover(&mut rig, &failed_slots, terms);
    rig.close();
    hit
}

fn campaign(kind: OperationKind, most: usize) {
    for schedule in [Schedule::Eager, Schedule::Random { seed: 11 }] {
        for setup in setups(schedule) {
            within("a failure", move || {
                let write = kind == Unscale;
                let terms = Terms { grad_scale: write.then_some(64.0), write_unscaled: write, ..Terms::default() };
                let count = (0..most).take_while(|&skip| fail_once(&setup, kind, skip, &terms)).count();
                assert!(count < most, "more than {most} calls of {kind}");
            });
        }
    }
}

#[test]
fn a_copy_in_fails() {
    campaign(CopyIn, 60);
}

#[test]
fn a_copy_out_fails() {
    campaign(CopyOut, 60);
}

#[test]
fn a_launch_fails() {
    campaign(Update, 30);
    campaign(UpdateMany, 10);
    campaign(CopyMany, 10);
    campaign(Unscale, 10);
}

#[test]
fn a_mark_fails() {
    campaign(Record, 100);
}

#[test]
fn an_order_fails() {
    campaign(Order, 100);
}

#[test]
fn an_event_fails() {
    campaign(Event, 40);
}

/// All calls of a kind fail from some moment on: everything is told and ends.
#[test]
fn all_calls_fail_from_now_on() {
    for kind in [CopyIn, CopyOut, Update, UpdateMany, CopyMany, Record, Order, Event] {
        for setup in setups(Schedule::Random { seed: 3 }) {
            within("failures without end", move || {
                for skip in [0, 1, 5, 20] {
                    let mut rig = Rig::new(&setup, &KINDS);
                    rig.device.fail_next(kind, skip, true);
                    let mut accepted = BTreeSet::new();
                    // Without marks nobody can say when the device is done with the gradients.
                    let mut grads = Vec::new();
                    for group in GROUPS {
                        if let Ok(tensors) = rig.try_submit(group, 1, &Terms::default()) {
                            accepted.extend(group);
                            grads.extend(tensors);
                        }
                    }
                    rig.engine().synchronize().unwrap();
                    let told: BTreeSet<usize> = rig.failures().into_iter().map(|(slot, _)| slot).collect();
                    assert!(told.is_subset(&accepted));
                    accepted.difference(&told).for_each(|&slot| rig.compare(slot));
                    drop(rig.engine.take());
                    assert_eq!(rig.dropped.load(Ordering::SeqCst), rig.made);
                    rig.device.break_device();
                    drop(grads);
                }
            });
        }
    }
}

/// A worker panics: the piece's elements are told, its weight stays; others of its bundle are updated.
#[test]
fn a_worker_panics() {
    for seed in 0..3 {
        within("a panic", move || {
            let setup = Setup::new(Schedule::Random { seed }, false, true).chunks(30_000);
            let mut rig = Rig::new(&setup, &KINDS);
            let old = rig.parameters[0].weight.read();
            rig.engine().fail_at(0, 35_000);
            rig.engine().fail_at(2, 249);
            for group in GROUPS {
                rig.submit(group, 1, &Terms::default());
            }
            rig.engine().wait(&[0, 1, 2], 7).unwrap();
            rig.engine().synchronize().unwrap();
            let mut failures = rig.failures();
            failures.sort_by_key(|&(slot, _)| slot);
            let (slots, failures): (Vec<usize>, Vec<_>) = failures.into_iter().unzip();
            assert_eq!(slots, [0, 2]);
            let [panicked, bundled] = &failures[..] else { unreachable!() };
            assert_eq!((bundled.first, bundled.len), (0, 250));
            let elements = panicked.first..panicked.first + panicked.len;
            assert!(elements.contains(&35_000) && elements.len() <= 30_000, "{panicked:?}");
            assert!(failures.iter().all(|failure| failure.cause.contains("asked for by a test")));
            let bytes = elements.start * 4..elements.end * 4;
            assert!(rig.parameters[0].weight.read()[bytes.clone()] == old[bytes], "the weight of a chunk that failed");
            recover(&mut rig, &[0, 2].into(), &Terms::default());
            rig.close();
        });
    }
}

/// Where one of a chunk's pieces has panicked, the pieces that went well stay at home, too.
#[test]
fn a_chunk_with_a_panic_is_not_uploaded() {
    within("a panic in a chunk", || {
        let mut setup = Setup::new(Schedule::Eager, false, true);
        setup.options.host_ring_bytes = 16 << 20;
        let mut rig = Rig::new(&setup, &KINDS);
        let old = rig.parameters[4].weight.read();
        rig.engine().fail_at(4, 100_000);
        rig.submit(&[4], 1, &Terms::default());
        rig.engine().synchronize().unwrap();
        let failures = rig.failures();
        let [(4, failure)] = &failures[..] else { panic!("{failures:?}") };
        assert_eq!((failure.first, failure.len), (65_536, 120_000 - 65_536));
        assert!(rig.parameters[4].weight.read() == old);
        rig.heal(4);
        rig.finish();
    });
}

/// Ends an engine whose device has broken: whatever was accepted is told or done, nothing waits, nothing is left.
fn end_broken(mut rig: Rig, accepted: &[usize]) {
    let all: Vec<usize> = (0..KINDS.len()).collect();
    drop(rig.engine().wait(&all, 7));
    drop(rig.engine().wait_on_host(&all));
    rig.engine().synchronize().unwrap();
    let told: BTreeSet<usize> = rig.failures().into_iter().map(|(slot, _)| slot).collect();
    for slot in accepted {
        if !told.contains(slot) {
            rig.compare(*slot);
        }
    }
    rig.device.break_device();
    assert!(matches!(rig.try_submit(&[0], 1, &Terms::default()), Err(Error::Cuda(_))));
    assert_eq!(rig.engine().stats().waiting_bytes.0, 0);
    drop(rig.engine.take());
    assert_eq!(rig.dropped.load(Ordering::SeqCst), rig.made, "keeps dropped");
    assert_eq!(rig.device.hazards(), [] as [String; 0]);
}

fn submit_groups(rig: &mut Rig, terms: &Terms) -> Vec<usize> {
    let mut accepted = Vec::new();
    for group in GROUPS.into_iter().chain(GROUPS) {
        // A step that is refused is not the twin's either.
        if rig.try_submit(group, 1 + group[0] % 2, terms).is_ok() {
            accepted.extend(group);
        }
    }
    accepted
}

#[test]
fn the_device_breaks_after_any_operation() {
    for schedule in [Schedule::Eager, Schedule::Random { seed: 4 }] {
        for setup in setups(schedule) {
            within("a broken device", move || {
                for operations in (0..60).chain([80, 120, 200]) {
                    let mut rig = Rig::new(&setup, &KINDS);
                    rig.device.break_after(operations);
                    let terms =
                        Terms { grad_scale: Some(2.0), write_unscaled: operations % 3 == 0, ..Terms::default() };
                    let accepted = submit_groups(&mut rig, &terms);
                    end_broken(rig, &accepted);
                }
            });
        }
    }
}

/// The dispatcher finds out at each look at an event, with whatever it has in its hands then.
#[test]
fn the_device_breaks_at_any_look() {
    for schedule in [Schedule::Eager, Schedule::Random { seed: 5 }] {
        for setup in setups(schedule) {
            within("a broken device", move || {
                for look in 0..50 {
                    let mut rig = Rig::new(&setup, &KINDS);
                    // So that the first look has many.
                    for stream in [1, 2] {
                        rig.device.hold(Stream::Foreign(stream));
                        rig.device.push(Stream::Foreign(stream), || {}).unwrap();
                    }
                    let accepted = submit_groups(&mut rig, &Terms::default());
                    let device = Arc::clone(&rig.device);
                    device.release(Stream::Foreign(1));
                    device.break_at_look(look);
                    device.release(Stream::Foreign(2));
                    end_broken(rig, &accepted);
                }
            });
        }
    }
}

/// The device breaks while chunks are in every stage and jobs of no elements wait behind them.
#[test]
fn the_device_breaks_while_streams_are_held() {
    for held in [Stream::StateIn, Stream::Update, Stream::StateOut, Stream::Down, Stream::Up, Stream::Foreign(1)] {
        for setup in setups(Schedule::Eager) {
            within("a broken device", move || {
                let mut rig = Rig::new(&setup.clone().chunks(1000), &KINDS);
                rig.device.hold(held);
                rig.device.push(Stream::Foreign(1), || {}).unwrap();
                let mut accepted = submit_groups(&mut rig, &Terms::default());
                rig.submit(&[6], 2, &Terms::default());
                accepted.push(6);
                eventually("all are known", || rig.engine().stats().queue.1 > 0);
                std::thread::sleep(Duration::from_millis(2));
                rig.device.break_device();
                end_broken(rig, &accepted);
            });
        }
    }
}

/// A bounded submit that waits for room when the device breaks is let go.
#[test]
fn a_bounded_submit_is_let_go() {
    within("a bounded submit", || {
        let mut setup = Setup::new(Schedule::Eager, true, true);
        setup.options.max_waiting_bytes = 10;
        let mut rig = Rig::new(&setup, &KINDS);
        rig.device.hold(Stream::StateIn);
        rig.device.hold(Stream::Down);
        rig.submit(&[0], 1, &Terms::default());
        let grad = rig.grad(&[0; 200]);
        let request = rig.request(5, &grad, &Terms::default());
        let (engine, device) = (rig.engine(), Arc::clone(&rig.device));
        let is_accepted = std::thread::scope(|scope| {
            let submitting = scope.spawn(move || engine.submit(vec![request], 1, true));
            std::thread::sleep(Duration::from_millis(10));
            device.break_device();
            submitting.join().unwrap().is_ok()
        });
        // Accepted and told as failed, or refused.
        end_broken(rig, if is_accepted { &[0, 5] } else { &[0] });
    });
}

/// An engine that cannot be made leaves nothing behind.
#[test]
fn an_engine_that_cannot_be_made() {
    within("no engine", || {
        for kind in [OperationKind::Allocate, OperationKind::Pin, Event] {
            for skip in 0..6 {
                let rig = Rig::new(&Setup::new(Schedule::Eager, true, true), &[]);
                let before = rig.device.counters();
                rig.device.fail_next(kind, skip, false);
                let options = rig.engine().options().clone();
                let made = Engine::new(Arc::clone(&rig.device), Arc::clone(&rig.pool), rig.isa, options);
                drop(made);
                assert_eq!(rig.device.counters(), before);
            }
        }
        let rig = Rig::new(&Setup::new(Schedule::Eager, true, true), &[]);
        let make = |options| Engine::new(Arc::clone(&rig.device), Arc::clone(&rig.pool), rig.isa, options);
        let options = rig.engine().options().clone();
        let no_chunks = crate::engine::lanes::LaneOptions { chunk_elems: Some(0), ..options.clone() };
        assert!(matches!(make(no_chunks), Err(Error::InvalidValue(_))));
        rig.device.set_can_address_host(false);
        let zero_copy = crate::engine::lanes::Transfer::ZeroCopy;
        let in_place = crate::engine::lanes::LaneOptions { transfer: zero_copy, ..options };
        assert!(matches!(make(in_place), Err(Error::InvalidValue(_))));
    });
}

/// A panic in the dispatcher itself is told, and nobody hangs: not who waits, not who submits later, not who drops the engine.
#[test]
fn the_dispatcher_panics() {
    for seed in 0..6 {
        for setup in setups(Schedule::Random { seed }) {
            if setup.options.transfer == Transfer::ZeroCopy {
                continue;
            }
            within("a panic", move || {
                let mut rig = Rig::new(&setup, &KINDS);
                rig.submit(&[0, 4], 1, &Terms::default());
                if seed % 2 == 0 {
                    // Else with chunks under way.
                    rig.engine().synchronize().unwrap();
                }
                rig.device.panic_next(false);
                // Refused, if it came to that with what is under way.
                let is_accepted = rig.try_submit(&[0, 1, 5], 1, &Terms::default()).is_ok();
                rig.engine().wait_on_host(&[0, 1, 5]).unwrap();
                rig.engine().synchronize().unwrap();
                let failed = failed(&rig);
                assert!(failed.contains(&0) || (!is_accepted && failed.contains(&4)), "{failed:?}");
                let grad = rig.grad(&[0; 200]);
                let request = rig.request(5, &grad, &Terms::default());
                let refused = rig.engine().submit(vec![request], 1, true);
                assert!(matches!(refused, Err(Error::Cuda(cause)) if cause.contains("asked for by a test")));
                assert_eq!(rig.engine().stats().queue.0, 0);
                rig.close();
            });
        }
    }
}

/// The same of a device that does not answer any more: what it may still write to is kept for good, and nobody hangs.
#[test]
fn the_dispatcher_panics_over_a_broken_device() {
    for setup in setups(Schedule::Random { seed: 1 }).into_iter().filter(|s| s.options.transfer == Transfer::Staged) {
        within("a panic", move || {
            let mut rig = Rig::new(&setup, &KINDS);
            rig.device.panic_next(true);
            rig.submit(&[0, 1, 5], 1, &Terms::default());
            rig.engine().synchronize().unwrap();
            assert!(failed(&rig).contains(&0));
            drop(rig.engine.take());
        });
    }
}
