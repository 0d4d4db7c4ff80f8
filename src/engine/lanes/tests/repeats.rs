//! Each accepted update happens once, also when a slot's next one comes before the last has landed.

use super::rig::{COUNTING, Kind, Rig, Setup, Terms};
use super::tools::within;
use crate::device::simulated::Schedule;
use crate::engine::Moments;
use crate::engine::lanes::Request;
use std::sync::Arc;

fn ones(kind: &Kind) -> Vec<u8> {
    std::iter::repeat_n(1.0_f32.to_ne_bytes(), kind.len).flatten().collect()
}

/// A rig with weights of 0, and requests that each add 1.
fn counted(setup: &Setup, kinds: &[Kind], updates: usize) -> (Rig, Vec<Vec<Request>>) {
    let mut rig = Rig::new(setup, kinds);
    let mut all = Vec::new();
    for update in 0..updates {
        let mut requests = Vec::new();
        for (index, kind) in kinds.iter().enumerate() {
            rig.parameters[index].weight.write(&vec![0; kind.len * 4]);
            let grad = rig.grad(&ones(kind));
            let next_use = ((update * 7 + index * 3) % 5) as u64;
            let terms = Terms { constants: Some(COUNTING), next_use, ..Terms::default() };
            requests.push(rig.request(index, &grad, &terms));
        }
        all.push(requests);
    }
    (rig, all)
}

/// Every element of every parameter has been updated so often.
fn check(rig: &mut Rig, updates: usize) {
    rig.engine().synchronize().unwrap();
    assert_eq!(rig.failures(), []);
    for (index, parameter) in rig.parameters.iter().enumerate() {
        let weight = parameter.weight.read();
        let (counts, rest) = weight.as_chunks::<4>();
        assert!(rest.is_empty());
        let wrong = counts.iter().map(|bytes| f32::from_ne_bytes(*bytes)).position(|count| count != updates as f32);
        assert_eq!(wrong, None, "an element of weight {index}");
        let Moments::F32(moments) = &parameter.slot.moments else { unreachable!() };
        let wrong = moments.exp_avg_sq.as_slice().iter().position(|&count| count != updates as f32);
        assert_eq!(wrong, None, "an element of state {index}");
    }
    rig.close();
}

const KINDS: [Kind; 5] = [Kind::f32(5), Kind::f32(1000), Kind::f32(64 << 10), Kind::f32(80_001), Kind::f32(3)];

fn setups() -> Vec<Setup> {
    let mut setups = Vec::new();
    for (seed, (gpu, cpu)) in [(true, false), (false, true), (true, true), (true, true)].into_iter().enumerate() {
        let seed = seed as u64;
        setups.push(Setup::new(Schedule::Random { seed }, gpu, cpu).chunks(10_000 + seed as usize));
        setups.push(Setup { pinned: false, ..Setup::new(Schedule::Random { seed: seed + 10 }, gpu, cpu) });
        setups.push(Setup::new(Schedule::Random { seed: seed + 20 }, gpu, cpu).chunks(7_777).zero_copy());
    }
    setups
}

#[test]
fn from_several_streams() {
    for setup in setups() {
        within("several streams", move || {
            let (mut rig, all) = counted(&setup, &KINDS, 6);
            for (update, requests) in all.into_iter().enumerate() {
                // In other company each time: bundles overlap in part.
                let mut groups: Vec<Vec<Request>> = vec![Vec::new(), Vec::new()];
                for (index, request) in requests.into_iter().enumerate() {
                    groups[(index >> (update % 3)) % 2].push(request);
                }
                for (group, requests) in groups.into_iter().enumerate() {
                    rig.engine().submit(requests, 1 + (update + group) % 3, group == 0).unwrap();
                }
            }
            check(&mut rig, 6);
        });
    }
}

#[test]
fn from_several_threads() {
    for setup in setups() {
        within("several threads", move || {
            let (mut rig, all) = counted(&setup, &KINDS, 8);
            let engine = rig.engine();
            std::thread::scope(|scope| {
                for (update, requests) in all.into_iter().enumerate() {
                    scope.spawn(move || {
                        for request in requests {
                            let slot = request.order.slot();
                            engine.submit(vec![request], update % 3, update % 2 == 0).unwrap();
                            match update % 4 {
                                0 => drop(engine.wait(&[slot], 7).unwrap()),
                                1 => engine.wait_on_host(&[slot]).unwrap(),
                                2 => engine.synchronize().unwrap(),
                                _ => {}
                            }
                        }
                    });
                }
            });
            check(&mut rig, 8);
        });
    }
}

/// Twice in one call: the second waits for the first, tiny or not.
#[test]
fn twice_in_one_call() {
    for setup in setups() {
        within("twice in one call", move || {
            let (mut rig, all) = counted(&setup, &KINDS, 3);
            rig.engine().submit(all.into_iter().flatten().collect(), 1, false).unwrap();
            check(&mut rig, 3);
        });
    }
}

/// Updates of one slot are done in the order in which they were submitted: constants and gradients are each step's own.
/// Here bundles overlap in part, so that a later one could slip past an earlier one that waits for another slot.
#[test]
fn in_the_order_of_submission() {
    for setup in setups() {
        within("the order of submission", move || {
            let kinds = [Kind::f32(2000), Kind::f32(50), Kind::split(100_000), Kind::f32(70)];
            let mut rig = Rig::new(&setup, &kinds);
            for seed in 0..4 {
                let first: &[&[usize]] = match seed {
                    0 => &[&[0], &[0, 1], &[1], &[1, 3], &[3]],
                    1 => &[&[2], &[2], &[0, 1, 3], &[1], &[2, 1]],
                    2 => &[&[3], &[3, 1], &[1, 0], &[0], &[0, 3]],
                    _ => &[&[0], &[1, 0], &[1, 0], &[1], &[0]],
                };
                let mut keep = Vec::new();
                for (at, group) in first.iter().enumerate() {
                    let terms = Terms { next_use: (10 - at) as u64, ..Terms::default() };
                    keep.extend(rig.submit(group, 1, &terms));
                }
                rig.engine().synchronize().unwrap();
                rig.compare_all();
            }
            rig.finish();
        });
    }
}

/// The same, with gradients of different streams that come out of order.
#[test]
fn in_the_order_of_submission_whichever_stream_is_first() {
    within("the order of submission over streams", || {
        let setup = Setup::new(Schedule::Eager, true, true);
        let mut rig = Rig::new(&setup, &[Kind::f32(100), Kind::f32(100_000)]);
        rig.device.hold(crate::device::Stream::Foreign(1));
        for index in [0, 1] {
            // Work that has not begun, so that the mark behind it is not done.
            rig.device.push(crate::device::Stream::Foreign(1), || {}).unwrap();
            drop(rig.submit(&[index], 1, &Terms::default()));
            drop(rig.submit(&[index], 2, &Terms::default()));
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        rig.device.release(crate::device::Stream::Foreign(1));
        rig.finish();
    });
}

/// The tensors that a request keeps go with its update, not with the engine.
#[test]
fn keeps_go_when_updates_land() {
    within("keeps", || {
        let setup = Setup::new(Schedule::Eager, true, true);
        let mut rig = Rig::new(&setup, &KINDS);
        let all: Vec<usize> = (0..KINDS.len()).collect();
        let grads = rig.submit(&all, 1, &Terms::default());
        rig.engine().synchronize().unwrap();
        assert!(grads.iter().all(|grad| Arc::strong_count(grad) == 1), "synchronize returns, and they are still held");
        rig.finish();
    });
}
