//! What streams that wait may rely on.

use super::rig::{Kind, Rig, STREAMS, Setup, Terms};
use super::tools::within;
use crate::device::simulated::Schedule;
use crate::device::{Device, Stream};
use std::sync::{Arc, Mutex};

const KINDS: [Kind; 4] = [Kind::f32(90_000), Kind::split(100), Kind::split(300), Kind::split(130_000)];

fn setups(schedule: Schedule) -> [Setup; 5] {
    let modes = [(true, false), (false, true), (true, true)].map(|(gpu, cpu)| Setup::new(schedule, gpu, cpu));
    let [gpu, cpu, both] = modes;
    let unpinned = Setup { pinned: false, ..gpu.clone() };
    [gpu.clone().chunks(20_000), gpu.zero_copy(), cpu.chunks(50_000), both.chunks(9_999), unpinned]
}

/// Reads the weights on a stream.
fn read_weights(rig: &Rig, stream: usize) -> Vec<Arc<Mutex<Vec<u8>>>> {
    let read = |index: usize| {
        let weight = Arc::clone(&rig.parameters[index].weight);
        let (got, run) = (Arc::new(Mutex::new(Vec::new())), weight.run());
        let to = Arc::clone(&got);
        let read = move || *to.lock().unwrap() = weight.read();
        rig.device.push_accessing(Stream::Foreign(stream), &[run], &[], read).unwrap();
        got
    };
    (0..rig.parameters.len()).map(read).collect()
}

fn finish_stream(rig: &Rig, stream: usize) {
    let event = rig.device.event().unwrap();
    rig.device.record(&event, Stream::Foreign(stream)).unwrap();
    rig.device.wait(&event).unwrap();
}

#[test]
fn a_stream_that_waits_reads_new_weights() {
    for seed in 0..8 {
        for setup in setups(Schedule::Random { seed }) {
            within("a stream that waits", move || {
                let mut rig = Rig::new(&setup, &KINDS);
                for _ in 0..2 {
                    rig.submit(&[0, 1, 2, 3], 1, &Terms::default());
                    rig.engine().wait(&[0, 1, 2, 3], 7).unwrap();
                    let got = read_weights(&rig, 7);
                    finish_stream(&rig, 7);
                    for (got, parameter) in got.iter().zip(&rig.parameters) {
                        assert!(*got.lock().unwrap() == parameter.twin_weight.read(), "{}", parameter.slot.spec.name);
                    }
                    assert_eq!(rig.device.hazards(), [] as [String; 0]);
                    // The next update comes after this read: it has been seen done.
                }
                rig.finish();
            });
        }
    }
}

/// The same without waiting, to see that the test above can fail; and waiting on another stream does not help.
#[test]
fn a_stream_that_does_not_wait_is_a_hazard() {
    for setup in setups(Schedule::Eager) {
        within("a stream that does not wait", move || {
            let mut rig = Rig::new(&setup, &KINDS);
            rig.device.hold(Stream::Update);
            rig.device.hold(Stream::Up);
            rig.submit(&[1, 2], 1, &Terms::default());
            rig.engine().wait(&[1, 2], 15).unwrap();
            assert_eq!(rig.device.hazards(), [] as [String; 0]);
            read_weights(&rig, 7);
            assert!(!rig.device.hazards().is_empty());
            rig.release_all();
            rig.engine().synchronize().unwrap();
            rig.compare_all();
        });
    }
}

/// What has landed needs no event, and what was never submitted none either.
#[test]
fn waiting_for_nothing_returns() {
    within("waiting for nothing", || {
        let mut rig = Rig::new(&Setup::new(Schedule::Random { seed: 5 }, true, true), &KINDS);
        rig.engine().wait(&[], 7).unwrap();
        rig.engine().wait(&[0, 1, 99], 7).unwrap();
        rig.engine().wait_on_host(&[3]).unwrap();
        rig.submit(&[0, 1, 2, 3], 1, &Terms::default());
        rig.engine().synchronize().unwrap();
        assert!((0..4).all(|slot| !rig.engine().is_under_way(slot)));
        rig.engine().wait(&[0, 1, 2, 3], 7).unwrap();
        read_weights(&rig, 7);
        finish_stream(&rig, 7);
        assert_eq!(rig.engine().submit(Vec::new(), 1, true).unwrap(), 0.0);
        rig.finish();
    });
}

/// A gradient that is written back unscaled is there for streams that wait, and for the host after `synchronize`; until
/// it is, the request keeps it.
#[test]
fn unscaled_gradients_are_waited_for() {
    for seed in 0..4 {
        for setup in setups(Schedule::Random { seed }) {
            within("unscaled gradients", move || {
                let mut rig = Rig::new(&setup, &KINDS);
                rig.frees = false;
                let terms = Terms { grad_scale: Some(1024.0), write_unscaled: true, ..Terms::default() };
                let grads = rig.submit(&[0, 1, 2, 3], 1, &terms);
                rig.engine().wait(&[0, 1, 2, 3], 7).unwrap();
                for grad in &grads {
                    rig.device.push_accessing(Stream::Foreign(7), &[grad.run()], &[], || {}).unwrap();
                }
                finish_stream(&rig, 7);
                assert_eq!(rig.device.hazards(), [] as [String; 0], "after wait");
                rig.frees = true;
                let grads = rig.submit(&[0, 1, 2, 3], 1, &terms);
                rig.engine().synchronize().unwrap();
                for grad in &grads {
                    rig.device.host_access(grad.address(), grad.run().1, true);
                }
                assert_eq!(rig.device.hazards(), [] as [String; 0], "after synchronize");
                rig.finish();
            });
        }
    }
}

/// `wait` returns once all is in the streams, however long these take; `wait_on_host` when it has been done.
#[test]
fn waiting_is_for_the_issue() {
    within("waiting for the issue", || {
        let mut rig = Rig::new(&Setup::new(Schedule::Eager, true, false), &KINDS);
        rig.device.hold(Stream::Update);
        rig.submit(&[1], 1, &Terms::default());
        rig.engine().wait(&[1], 7).unwrap();
        assert!(rig.engine().is_under_way(1));
        let device = Arc::clone(&rig.device);
        let release = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            device.release(Stream::Update);
        });
        rig.engine().wait_on_host(&[1]).unwrap();
        assert!(rig.parameters[1].weight.read() == rig.parameters[1].twin_weight.read());
        release.join().unwrap();
        rig.finish();
    });
}

/// Each of the engine's streams held for a while: nothing is lost, and nothing overtakes what it depends on.
#[test]
fn any_stream_may_be_late() {
    for late in STREAMS {
        for setup in setups(Schedule::Eager) {
            within("a late stream", move || {
                let mut rig = Rig::new(&setup, &KINDS);
                rig.device.hold(late);
                for round in 0..2 {
                    rig.submit(&[3, 0], 1 + round, &Terms::default());
                    rig.submit(&[2, 1], 1 + round, &Terms::default());
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
                rig.device.release(late);
                rig.finish();
            });
        }
    }
}
