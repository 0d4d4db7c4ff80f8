//! The end of an engine, at any moment; and that it does nothing when there is nothing to do.

use super::rig::{Kind, Rig, STREAMS, Setup, Terms};
use super::tools::{Chance, within};
use crate::device::Stream;
use crate::device::simulated::Schedule;
use std::sync::Arc;
use std::time::Duration;

const KINDS: [Kind; 5] = [Kind::f32(70_000), Kind::split(100), Kind::f32(50), Kind::split(0), Kind::split(130_000)];

#[test]
fn dropping_completes_what_was_accepted() {
    for seed in 0..40 {
        within("a drop", move || {
            let mut chance = Chance(seed);
            let (gpu, cpu) = chance.pick(&[(true, false), (false, true), (true, true)]);
            let schedule = chance.pick(&[Schedule::Eager, Schedule::Random { seed }]);
            let setup = Setup::new(schedule, gpu, cpu).chunks(chance.pick(&[3_000, 30_000, 1 << 20]));
            let setup = if chance.below(3) == 0 { setup.zero_copy() } else { setup };
            let mut rig = Rig::new(&setup, &KINDS);
            let held: Vec<Stream> = STREAMS.into_iter().chain([Stream::Foreign(1)]).collect();
            let held: Vec<Stream> = held.into_iter().filter(|_| chance.below(2) == 0).collect();
            for &stream in &held {
                rig.device.hold(stream);
            }
            rig.device.push(Stream::Foreign(1), || {}).unwrap();
            let write = chance.below(3) == 0;
            let terms = Terms { grad_scale: write.then_some(8.0), write_unscaled: write, ..Terms::default() };
            for _ in 0..chance.below(5) {
                let mut all = [0, 1, 2, 3, 4];
                chance.shuffle(&mut all);
                let (first, rest) = all.split_at(chance.below(6));
                for group in [first, rest] {
                    rig.submit(group, 1, &terms);
                }
            }
            let device = Arc::clone(&rig.device);
            let pause = Duration::from_micros(chance.below(3000) as u64);
            std::thread::sleep(pause);
            let release = std::thread::spawn(move || {
                for stream in held {
                    std::thread::sleep(pause);
                    device.release(stream);
                }
            });
            let engine = rig.engine.take().unwrap();
            drop(engine);
            rig.compare_all();
            release.join().unwrap();
            rig.close();
        });
    }
}

/// The engine keeps no device, no pool and no memory beyond its end.
#[test]
fn nothing_is_left() {
    within("nothing is left", || {
        for schedule in [Schedule::Eager, Schedule::Random { seed: 1 }] {
            let mut rig = Rig::new(&Setup::new(schedule, true, true), &KINDS);
            rig.submit(&[0, 1, 2, 3, 4], 1, &Terms::default());
            drop(rig.engine.take());
            assert_eq!(Arc::strong_count(&rig.pool), 1);
            assert_eq!(Arc::strong_count(&rig.device), 1);
            rig.close();
        }
    });
}

#[test]
fn an_idle_engine_does_not_spin() {
    within("idling", || {
        let mut rig = Rig::new(&Setup::new(Schedule::Random { seed: 1 }, true, true), &KINDS);
        rig.submit(&[0, 1, 2, 3, 4], 1, &Terms::default());
        rig.engine().synchronize().unwrap();
        // What it still has to do after it has told.
        std::thread::sleep(Duration::from_millis(20));
        let before = rig.device.dispatcher_time().expect("a thread has a clock");
        std::thread::sleep(Duration::from_millis(300));
        let spent = rig.device.dispatcher_time().unwrap().checked_sub(before).unwrap();
        assert!(spent < Duration::from_millis(5), "{spent:?} of CPU time in 300 ms");
        rig.finish();
    });
}

/// Waiting for a gradient costs naps, not a CPU.
#[test]
fn a_waiting_engine_sleeps_in_between() {
    within("waiting", || {
        let mut rig = Rig::new(&Setup::new(Schedule::Random { seed: 1 }, true, true), &KINDS);
        rig.device.hold(Stream::Foreign(1));
        rig.device.push(Stream::Foreign(1), || {}).unwrap();
        rig.submit(&[0, 1], 1, &Terms::default());
        std::thread::sleep(Duration::from_millis(20));
        let before = rig.device.dispatcher_time().expect("a thread has a clock");
        std::thread::sleep(Duration::from_millis(300));
        let spent = rig.device.dispatcher_time().unwrap().checked_sub(before).unwrap();
        assert!(spent < Duration::from_millis(200), "{spent:?} of CPU time in 300 ms");
        rig.device.release(Stream::Foreign(1));
        rig.finish();
    });
}
