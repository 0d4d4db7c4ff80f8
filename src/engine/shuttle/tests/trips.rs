//! Round trips: two areas on the device, batches in turn, and the caller's kernels between.

use super::rig::{CALLER, Chance, Rig, first_bytes, schedules};
use crate::device::Stream;
use crate::device::simulated::{OperationKind, Schedule};
use crate::engine::shuttle::{Caller, Place};

const SIZES: [usize; 17] = [100, 64, 0, 1, 1000, 4096, 63, 65, 128, 0, 777, 640, 64, 300, 5, 2048, 129];
const AREA: usize = 16 << 10;

/// Steps over all batches, each in the area that the one before the last has left.
fn train(rig: &mut Rig, ids: &[usize], steps: usize, chance: &mut Chance) {
    let batches: Vec<Vec<usize>> = ids.chunks(5).map(<[usize]>::to_vec).collect();
    let areas = [rig.memory, rig.memory + AREA];
    let order: Vec<usize> = (0..steps).flat_map(|_| 0..batches.len()).collect();
    let bring = |rig: &mut Rig, turn: usize| {
        let spans = rig.packed(&batches[order[turn]], areas[turn % 2]);
        rig.shuttle.bring(spans, None).unwrap();
    };
    bring(rig, 0);
    for turn in 0..order.len() {
        let (batch, area) = (&batches[order[turn]], areas[turn % 2]);
        // A batch cannot be brought while it is here.
        let overlaps = turn + 1 < order.len() && order[turn + 1] != order[turn];
        if overlaps {
            bring(rig, turn + 1);
        }
        rig.shuttle.arrive(batch, CALLER).unwrap();
        for (id, span) in rig.packed(batch, area) {
            rig.add(span.address(), rig.bytes(id), 1).unwrap();
        }
        let spans = rig.packed(batch, area);
        rig.shuttle.send(spans, CALLER).unwrap();
        match chance.below(4) {
            0 => rig.shuttle.poll().unwrap(),
            1 => rig.shuttle.settle(batch).unwrap(),
            _ => {}
        }
        if !overlaps && turn + 1 < order.len() {
            bring(rig, turn + 1);
        }
    }
}

#[test]
fn bytes_are_as_computed_in_order_under_any_schedule() {
    for (round, schedule) in schedules(60).enumerate() {
        for piece_bytes in [96, 1 << 10, 1 << 20] {
            let mut rig = Rig::new(schedule, 2 * AREA, piece_bytes);
            let ids = rig.filled(&SIZES);
            train(&mut rig, &ids, 4, &mut Chance::new(round as u64));
            rig.shuttle.settle_all().unwrap();
            for &id in &ids {
                assert_eq!(rig.place(id), Place::Host);
                let expected: Vec<u8> =
                    first_bytes(id, rig.bytes(id)).iter().map(|byte| byte.wrapping_add(4)).collect();
                assert_eq!(rig.read(id), expected, "slot {id}, {schedule:?}, pieces of {piece_bytes}");
            }
            assert_eq!(rig.shuttle.stats().under_way, 0);
            rig.finish();
        }
    }
}

#[test]
fn a_caller_on_the_host_waits_instead() {
    for seed in 0..40 {
        let mut rig = Rig::new(Schedule::Random { seed }, AREA, 256);
        let ids = rig.filled(&SIZES[..6]);
        for _ in 0..3 {
            let spans = rig.packed(&ids, rig.memory);
            rig.shuttle.bring(spans, Some(Caller::Host)).unwrap();
            rig.shuttle.arrive(&ids, Caller::Host).unwrap();
            for (id, span) in rig.packed(&ids, rig.memory) {
                rig.device.host_access(span.address(), rig.bytes(id), true);
            }
            let spans = rig.packed(&ids, rig.memory);
            rig.shuttle.send(spans, Caller::Host).unwrap();
            rig.shuttle.claim(rig.memory, AREA, Caller::Host).unwrap();
            rig.device.host_access(rig.memory, AREA, true);
        }
        rig.shuttle.settle_all().unwrap();
        for &id in &ids {
            assert_eq!(rig.read(id), first_bytes(id, rig.bytes(id)));
        }
        rig.finish();
    }
}

/// Copies of a kind that have run.
fn ran(rig: &Rig, kind: OperationKind) -> usize {
    rig.device.log().iter().filter(|entry| entry.kind == kind).count()
}

#[test]
fn a_batch_enters_right_behind_the_one_that_leaves() {
    const PIECES: usize = 6;
    let mut rig = Rig::new(Schedule::Manual, PIECES * 64, 64);
    let (leaving, entering) = (rig.filled(&[PIECES * 64])[0], rig.filled(&[PIECES * 64])[0]);
    rig.shuttle.bring(rig.packed(&[leaving], rig.memory), None).unwrap();
    rig.shuttle.arrive(&[leaving], CALLER).unwrap();
    rig.device.run_all();
    rig.device.keep_log();
    rig.shuttle.send(rig.packed(&[leaving], rig.memory), CALLER).unwrap();
    rig.shuttle.bring(rig.packed(&[entering], rig.memory), None).unwrap();
    let mut pairs = Vec::new();
    loop {
        while rig.device.run_one(Stream::StateIn) {}
        let pair = (ran(&rig, OperationKind::CopyOut), ran(&rig, OperationKind::CopyIn));
        if pairs.last() != Some(&pair) {
            pairs.push(pair);
        }
        if !rig.device.run_one(Stream::StateOut) {
            break;
        }
    }
    // Each piece enters as soon as its own has left, and not before: one copy behind, for the mark.
    let mut expected = vec![(0, 0)];
    for left in 1..=PIECES {
        expected.extend([(left, left - 1), (left, left)]);
    }
    assert_eq!(pairs, expected);
    rig.device.run_all();
    rig.shuttle.settle_all().unwrap();
    assert_eq!(rig.read(leaving), first_bytes(leaving, PIECES * 64));
    rig.finish();
}

#[test]
fn a_slot_on_its_way_home_may_be_brought_at_once() {
    for schedule in schedules(30) {
        let mut rig = Rig::new(schedule, 2 * AREA, 128);
        let ids = rig.filled(&[1000, 70, 500]);
        for turn in 0..6 {
            let area = rig.memory + turn % 2 * AREA;
            rig.shuttle.bring(rig.packed(&ids, area), None).unwrap();
            rig.shuttle.arrive(&ids, CALLER).unwrap();
            for (id, span) in rig.packed(&ids, area) {
                rig.add(span.address(), rig.bytes(id), 1).unwrap();
            }
            rig.shuttle.send(rig.packed(&ids, area), CALLER).unwrap();
        }
        rig.shuttle.settle(&ids).unwrap();
        for &id in &ids {
            let expected: Vec<u8> = first_bytes(id, rig.bytes(id)).iter().map(|byte| byte.wrapping_add(6)).collect();
            assert_eq!(rig.read(id), expected);
        }
        rig.finish();
    }
}
