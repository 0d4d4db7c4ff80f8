//! Who comes first, and who waits for whom.

use super::rig::{Kind, Rig, Setup, Terms};
use super::tools::{eventually, within};
use crate::device::Stream;
use crate::device::simulated::Schedule;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Holds a stream, with work that is not done before it is released.
fn hold(rig: &Rig, stream: usize) {
    rig.device.hold(Stream::Foreign(stream));
    rig.device.push(Stream::Foreign(stream), || {}).unwrap();
}

fn next_use(next_use: u64) -> Terms {
    Terms { next_use, ..Terms::default() }
}

/// The names of the chunks in the order in which the lanes took them, each name once where it follows itself.
fn taken(rig: &Rig) -> Vec<String> {
    let (mut timeline, _) = rig.engine().take_timeline();
    timeline.retain(|(track, ..)| !track.contains(':'));
    timeline.sort_by(|(_, _, a, _), (_, _, b, _)| a.total_cmp(b));
    let mut names: Vec<String> = timeline.into_iter().map(|(_, name, ..)| name).collect();
    names.dedup();
    names
}

const MODES: [(bool, bool); 3] = [(true, false), (false, true), (true, true)];

#[test]
fn chunks_go_by_next_use() {
    for (gpu, cpu) in MODES {
        for fifo in [false, true] {
            within("next use", move || {
                let mut setup = Setup::new(Schedule::Eager, gpu, cpu).chunks(15_000);
                setup.options.fifo = fifo;
                let kinds = [70_000, 66_000, 100, 90_000, 5, 80_000].map(Kind::f32);
                let mut rig = Rig::new(&setup, &kinds);
                rig.engine().record_timeline(true);
                hold(&rig, 1);
                for (index, when) in [30, 10, 50, 0, 40, 20].into_iter().enumerate() {
                    rig.submit(&[index], 1, &next_use(when));
                }
                std::thread::sleep(Duration::from_millis(5));
                assert_eq!(taken(&rig), [] as [String; 0], "before the gradients are there");
                rig.device.release(Stream::Foreign(1));
                rig.engine().synchronize().unwrap();
                let order = if fifo { [0, 1, 2, 3, 4, 5] } else { [3, 1, 5, 0, 4, 2] };
                assert_eq!(taken(&rig), order.map(|index| format!("p{index}")), "fifo: {fifo}");
                rig.finish();
            });
        }
    }
}

/// A bundle goes when the first of it is needed.
#[test]
fn a_bundle_goes_with_its_first() {
    within("a bundle", || {
        let kinds = [70_000, 10, 20, 66_000].map(Kind::f32);
        let mut rig = Rig::new(&Setup::new(Schedule::Eager, true, false), &kinds);
        rig.engine().record_timeline(true);
        hold(&rig, 1);
        let mut requests = Vec::new();
        for (index, when) in [(0, 5), (1, 9), (2, 4), (3, 1)] {
            let grad = rig.grad(&vec![0; kinds[index].len * 4]);
            requests.push(rig.request(index, &grad, &next_use(when)));
        }
        rig.engine().submit(requests, 1, false).unwrap();
        rig.device.release(Stream::Foreign(1));
        rig.engine().synchronize().unwrap();
        assert_eq!(taken(&rig), ["p3", "p1", "p0"]);
        rig.close();
    });
}

#[test]
fn what_is_needed_earlier_overtakes() {
    for (gpu, cpu, late) in
        [(true, false, Stream::StateOut), (true, false, Stream::StateIn), (false, true, Stream::Down)]
    {
        for fifo in [false, true] {
            within("overtaking", move || {
                let mut setup = Setup::new(Schedule::Eager, gpu, cpu).chunks(3_000);
                setup.options.fifo = fifo;
                let mut rig = Rig::new(&setup, &[Kind::f32(90_000), Kind::f32(70_000), Kind::f32(7)]);
                rig.engine().record_timeline(true);
                rig.device.hold(late);
                rig.submit(&[0], 1, &next_use(10));
                let most = |rig: &Rig| rig.engine().stats().in_flight;
                eventually("the lane is full", || most(&rig) == if gpu { (2, 0) } else { (0, 16) });
                rig.submit(&[1], 2, &next_use(3));
                rig.submit(&[2], 1, &next_use(1));
                eventually("both are known", || rig.engine().stats().queue.0 == 3);
                rig.device.release(late);
                rig.engine().synchronize().unwrap();
                let order: &[&str] = if fifo { &["p0", "p1", "p2"] } else { &["p0", "p2", "p1", "p0"] };
                let got = taken(&rig);
                // Arrival order within one look at several streams is nobody's business.
                if !fifo || got[1] == "p1" {
                    assert_eq!(got, order, "fifo: {fifo}");
                }
                rig.finish();
            });
        }
    }
}

#[test]
fn a_gradient_that_does_not_come_blocks_nobody_else() {
    for (gpu, cpu) in MODES {
        within("a gradient that does not come", move || {
            let kinds = [Kind::f32(70_000), Kind::f32(80_000), Kind::split(50), Kind::split(60)];
            let mut rig = Rig::new(&Setup::new(Schedule::Eager, gpu, cpu).chunks(9_000), &kinds);
            hold(&rig, 1);
            hold(&rig, 3);
            rig.submit(&[0], 1, &next_use(0));
            rig.submit(&[2], 3, &next_use(0));
            for _ in 0..2 {
                rig.submit(&[1, 3], 2, &next_use(5));
                rig.engine().wait(&[1], 7).unwrap();
                rig.engine().wait_on_host(&[3]).unwrap();
                eventually("they land", || !rig.engine().is_under_way(1) && !rig.engine().is_under_way(3));
                rig.compare(1);
                rig.compare(3);
            }
            assert!(rig.engine().is_under_way(0) && rig.engine().is_under_way(2));
            rig.device.release(Stream::Foreign(3));
            rig.engine().wait_on_host(&[2]).unwrap();
            assert!(rig.engine().is_under_way(0));
            rig.device.release(Stream::Foreign(1));
            rig.finish();
        });
    }
}

/// An update that waits for an earlier one of its slot blocks nobody else.
#[test]
fn an_update_that_waits_for_another_blocks_nobody_else() {
    within("a parked update", || {
        let kinds = [Kind::f32(70_000), Kind::f32(30), Kind::f32(40)];
        let mut rig = Rig::new(&Setup::new(Schedule::Eager, true, true), &kinds);
        // What is in the GPU lane does not land; the CPU lane goes on.
        rig.device.hold(Stream::StateOut);
        rig.device.hold(Stream::Down);
        rig.submit(&[0], 1, &next_use(0));
        rig.submit(&[0], 1, &next_use(0));
        rig.device.release(Stream::Down);
        rig.device.hold(Stream::StateIn);
        eventually("the first is issued", || rig.engine().stats().in_flight != (0, 0));
        rig.device.release(Stream::StateIn);
        rig.device.release(Stream::StateOut);
        rig.submit(&[1, 2], 1, &next_use(9));
        rig.engine().wait_on_host(&[1, 2]).unwrap();
        rig.finish();
    });
}

fn bounded(bytes: usize) -> Setup {
    let mut setup = Setup::new(Schedule::Eager, true, true);
    setup.options.max_waiting_bytes = bytes;
    setup
}

#[test]
fn a_bounded_submit_waits_for_room() {
    within("back-pressure", || {
        let kinds = [Kind::f32(100); 10];
        let mut rig = Rig::new(&bounded(1000), &kinds);
        rig.device.hold(Stream::StateIn);
        rig.device.hold(Stream::Down);
        let mut requests = Vec::new();
        for index in 0..10 {
            let grad = rig.grad(&[0; 400]);
            requests.push(rig.request(index, &grad, &next_use(0)));
        }
        let (engine, accepted) = (rig.engine(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            let submitting = scope.spawn(|| {
                let mut stalls = Vec::new();
                for request in requests {
                    stalls.push(engine.submit(vec![request], 1, true).unwrap());
                    accepted.fetch_add(1, Ordering::SeqCst);
                }
                stalls
            });
            eventually("two are in", || accepted.load(Ordering::SeqCst) == 2);
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(accepted.load(Ordering::SeqCst), 2, "1200 bytes are too many");
            assert_eq!(engine.stats().waiting_bytes, (800, 800));
            rig.device.release(Stream::StateIn);
            rig.device.release(Stream::Down);
            let stalls = submitting.join().unwrap();
            assert_eq!(stalls[..2], [0.0, 0.0]);
            assert!(stalls[2] >= 0.03, "{stalls:?}");
        });
        engine.synchronize().unwrap();
        let (now, most) = engine.stats().waiting_bytes;
        assert!(now == 0 && most <= 1000, "{most}");
        rig.close();
    });
}

#[test]
fn one_gradient_is_always_let_in() {
    within("a large gradient", || {
        let mut rig = Rig::new(&bounded(0), &[Kind::f32(100_000), Kind::f32(10), Kind::f32(0)]);
        for index in [0, 1, 2, 0] {
            let grad = rig.grad(&vec![0; rig.parameters[index].kind.len * 4]);
            let request = rig.request(index, &grad, &next_use(0));
            rig.engine().submit(vec![request], 1, true).unwrap();
        }
        rig.engine().synchronize().unwrap();
        assert_eq!(rig.engine().stats().waiting_bytes, (0, 400_000));
        rig.close();
    });
}

/// What several threads submit at once stays within the bound, too.
#[test]
fn several_threads_keep_to_the_bound() {
    within("several bounded threads", || {
        const THREADS: usize = 6;
        const EACH: usize = 150;
        let mut rig = Rig::new(&bounded(1000), &[Kind::f32(100); THREADS]);
        let mut all: Vec<Vec<_>> = (0..THREADS).map(|_| Vec::new()).collect();
        for _ in 0..EACH {
            for (index, requests) in all.iter_mut().enumerate() {
                let grad = rig.grad(&[0; 400]);
                requests.push(rig.request(index, &grad, &next_use(0)));
            }
        }
        let (engine, barrier) = (rig.engine(), Arc::new(std::sync::Barrier::new(THREADS)));
        std::thread::scope(|scope| {
            for requests in all {
                let barrier = Arc::clone(&barrier);
                scope.spawn(move || {
                    barrier.wait();
                    for request in requests {
                        engine.submit(vec![request], 1, true).unwrap();
                    }
                });
            }
        });
        engine.synchronize().unwrap();
        let most = engine.stats().waiting_bytes.1;
        assert!(most <= 1000, "{most} bytes waited");
        rig.close();
    });
}
