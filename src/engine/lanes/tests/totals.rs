//! What the engine tells of itself.

use super::rig::{Kind, Rig, Setup, Terms};
use super::tools::{eventually, within};
use crate::device::Stream;
use crate::device::simulated::{RangeEntry, Schedule};
use crate::engine::lanes::Stretch;

const KINDS: [Kind; 5] = [Kind::f32(70_000), Kind::split(100), Kind::split(300), Kind::f32(5), Kind::split(130_000)];
const ALL: [usize; 5] = [0, 1, 2, 3, 4];

#[test]
fn lanes_share_all_elements() {
    for seed in 0..4 {
        for (gpu, cpu) in [(true, false), (false, true), (true, true)] {
            within("totals", move || {
                let mut rig = Rig::new(&Setup::new(Schedule::Random { seed }, gpu, cpu).chunks(10_000), &KINDS);
                for steps in 1..4_u64 {
                    rig.submit(&ALL, 1, &Terms::default());
                    rig.engine().synchronize().unwrap();
                    let stats = rig.engine().stats();
                    let elements = KINDS.iter().map(|kind| kind.len as u64).sum::<u64>() * steps;
                    assert_eq!(stats.gpu.elements + stats.cpu.elements + stats.resident_elements, elements);
                    // 7 and 13 chunks, and two bundles.
                    assert_eq!(stats.gpu.chunks + stats.cpu.chunks, (7 + 13 + 2) * steps);
                    assert!(gpu || stats.gpu.elements == 0);
                    assert!(cpu || stats.cpu.elements == 0);
                    assert_eq!(stats.gpu.bytes_in, stats.gpu.bytes_out);
                    // 8 bytes of state for fp32, 10 for split weights; 8 and 4 of weight and gradient.
                    assert!((8 * stats.gpu.elements..=10 * stats.gpu.elements).contains(&stats.gpu.bytes_in));
                    assert!((4 * stats.cpu.elements..=8 * stats.cpu.elements).contains(&stats.cpu.bytes_out));
                    assert_eq!(stats.cpu.bytes_in * 2, stats.cpu.bytes_out);
                    assert_eq!(stats.waiting_bytes.0, 0);
                    assert!(stats.in_flight.0 <= 2 && stats.in_flight.1 <= 16, "{:?}", stats.in_flight);
                    assert!(stats.gpu.seconds >= 0.0 && stats.cpu.seconds >= 0.0);
                }
                rig.finish();
            });
        }
    }
}

/// A range for each chunk, with what it holds; none once that is not wanted any more.
#[test]
fn ranges_are_the_chunks() {
    for (gpu, cpu) in [(true, false), (false, true), (true, true)] {
        within("ranges", move || {
            let mut rig = Rig::new(&Setup::new(Schedule::Random { seed: 8 }, gpu, cpu).chunks(10_000), &KINDS);
            rig.submit(&ALL, 1, &Terms::default());
            rig.engine().synchronize().unwrap();
            let ranges = rig.device.ranges();
            assert!(ranges.iter().all(|range| range.ends == 1), "{ranges:?}");
            let in_lane = |range: &RangeEntry| {
                let lane = ["gpu lane ", "cpu lane "].into_iter().find_map(|lane| range.message.strip_prefix(lane));
                assert!(gpu || !range.message.starts_with("gpu"));
                assert!(cpu || !range.message.starts_with("cpu"));
                lane.unwrap().to_owned()
            };
            let mut found: Vec<String> = ranges.iter().map(in_lane).collect();
            found.sort_unstable();
            let mut wanted = vec!["p1 and 1 more [0:400]".to_owned(), "p3 [0:5]".to_owned()];
            for (name, len) in [("p0", 70_000), ("p4", 130_000)] {
                let cuts: Vec<usize> = (0..len).step_by(10_000).chain([len]).collect();
                wanted.extend(cuts.windows(2).map(|cut| format!("{name} [{}:{}]", cut[0], cut[1])));
            }
            wanted.sort_unstable();
            assert_eq!(found, wanted);
            rig.engine().emit_ranges(false);
            rig.submit(&ALL, 1, &Terms::default());
            rig.engine().synchronize().unwrap();
            assert_eq!(rig.device.ranges().len(), ranges.len());
            rig.finish();
        });
    }
}

/// Ranges end when what they show has landed, not when it was given.
#[test]
fn ranges_last_as_long_as_chunks() {
    within("a range that lasts", || {
        let mut rig = Rig::new(&Setup::new(Schedule::Eager, true, false), &KINDS);
        rig.device.hold(Stream::StateOut);
        rig.submit(&[0], 1, &Terms::default());
        eventually("it is begun", || !rig.device.ranges().is_empty());
        assert_eq!(rig.device.ranges()[0].ends, 0);
        rig.device.release(Stream::StateOut);
        rig.engine().synchronize().unwrap();
        assert!(rig.device.ranges().iter().all(|range| range.ends == 1));
        rig.finish();
    });
}

/// Unpinned state is the CPU lane's in every mode.
#[test]
fn unpinned_state_is_the_cpu_lanes() {
    within("unpinned", || {
        let setup = Setup { pinned: false, ..Setup::new(Schedule::Random { seed: 3 }, true, false) };
        let mut rig = Rig::new(&setup, &KINDS);
        rig.submit(&ALL, 1, &Terms::default());
        rig.engine().synchronize().unwrap();
        let stats = rig.engine().stats();
        assert_eq!((stats.gpu.elements, stats.cpu.elements), (0, KINDS.iter().map(|kind| kind.len as u64).sum()));
        rig.finish();
    });
}

#[test]
fn the_queue_is_as_long_as_what_has_not_landed() {
    within("the queue", || {
        let mut rig = Rig::new(&Setup::new(Schedule::Eager, true, true), &KINDS);
        assert_eq!(rig.engine().stats().queue, (0, 0));
        rig.device.hold(Stream::Foreign(1));
        rig.device.push(Stream::Foreign(1), || {}).unwrap();
        rig.submit(&[0], 1, &Terms::default());
        rig.submit(&[0], 1, &Terms::default());
        rig.submit(&[1, 2], 1, &Terms::default());
        eventually("all are counted", || rig.engine().stats().queue == (3, 3));
        assert_eq!(rig.engine().stats().waiting_bytes, (2 * 70_000 * 4 + 400 * 2, 2 * 70_000 * 4 + 400 * 2));
        rig.device.release(Stream::Foreign(1));
        for _ in 0..50 {
            rig.engine().synchronize().unwrap();
            assert_eq!(rig.engine().stats().queue.0, 0, "after synchronize");
            rig.submit(&[3], 2, &Terms::default());
        }
        rig.finish();
    });
}

#[test]
fn rings_are_what_was_asked_for() {
    within("rings", || {
        for (gpu, device_ring, host_ring) in [(true, 3 << 20, 5 << 20), (true, 0, 0), (false, 3 << 20, 1 << 20)] {
            let mut setup = Setup::new(Schedule::Eager, gpu, true);
            setup.options.device_ring_bytes = device_ring;
            setup.options.host_ring_bytes = host_ring;
            let mut rig = Rig::new(&setup, &[]);
            let stats = rig.engine().stats();
            assert_eq!(stats.device_ring_bytes, rig.device.counters().allocated_bytes);
            assert_eq!(stats.host_ring_bytes, rig.device.counters().pinned_bytes);
            assert_eq!(stats.device_ring_bytes, if gpu { device_ring.max(128 << 10) } else { 0 });
            assert!(stats.host_ring_bytes >= host_ring.max(1 << 20));
            rig.close();
        }
    });
}

#[test]
fn a_timeline_is_kept_when_asked_for() {
    within("the timeline", || {
        let mut rig = Rig::new(&Setup::new(Schedule::Random { seed: 2 }, true, true).chunks(10_000), &KINDS);
        rig.submit(&ALL, 1, &Terms::default());
        rig.engine().synchronize().unwrap();
        assert!(rig.engine().take_timeline().0.is_empty());
        rig.engine().record_timeline(true);
        rig.submit(&ALL, 1, &Terms::default());
        rig.engine().synchronize().unwrap();
        rig.engine().record_timeline(false);
        let (all, started) = rig.engine().take_timeline();
        let (stages, timeline): (Vec<_>, Vec<_>) = all.into_iter().partition(|(track, ..)| track.contains(':'));
        assert_eq!(timeline.len(), 7 + 13 + 2);
        for (lane, name, began, ended) in &timeline {
            assert!(["gpu lane", "cpu lane"].contains(lane), "{lane}");
            assert!(name.starts_with('p'));
            assert!(0.0 <= *began && began <= ended && *ended <= started.elapsed().as_secs_f64());
            // Copy, update and copy, one behind the other, make up the whole.
            let inside = |stage: &&Stretch| {
                stage.0.starts_with(lane) && stage.1 == *name && *began <= stage.2 && stage.3 <= *ended
            };
            let joined = |a: &Stretch, b: &Stretch| a.3 == b.2;
            let parts: Vec<&Stretch> = stages.iter().filter(inside).collect();
            let from = |part: &&&Stretch| part.2 == *began && part.0.contains("copy");
            let whole = parts.iter().filter(from).any(|first| {
                let update = |part: &&&Stretch| part.0.ends_with("update") && joined(first, part);
                let to_end = |second: &&Stretch| parts.iter().any(|part| joined(second, part) && part.3 == *ended);
                parts.iter().filter(update).any(to_end)
            });
            assert!(whole, "{lane} {name}");
        }
        assert_eq!(timeline.iter().filter(|(_, name, ..)| name == "p4").count(), 13);
        rig.submit(&ALL, 1, &Terms::default());
        rig.engine().synchronize().unwrap();
        assert!(rig.engine().take_timeline().0.is_empty());
        rig.finish();
    });
}

#[test]
fn the_time_to_the_last_issue() {
    within("the issue", || {
        let mut rig = Rig::new(&Setup::new(Schedule::Eager, true, true), &KINDS);
        rig.engine().mark_issue();
        assert_eq!(rig.engine().stats().issue_seconds, 0.0);
        rig.submit(&ALL, 1, &Terms::default());
        rig.engine().synchronize().unwrap();
        let seconds = rig.engine().stats().issue_seconds;
        assert!(seconds > 0.0 && seconds < 60.0, "{seconds}");
        rig.finish();
    });
}
