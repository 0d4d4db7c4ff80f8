//! How many copies there are, memory, and what the shuttle says of itself.

use super::rig::{CALLER, Rig, names, span};
use crate::device::Device;
use crate::device::simulated::{Counters, Schedule, SimulatedDevice};
use crate::engine::shuttle::{Place, Shuttle, ShuttleOptions};
use crate::error::Error;
use crate::memory::plane_bytes;
use crate::pool::WorkerPool;
use std::sync::Arc;

/// Copies that slots of these sizes take with `gap` bytes more than needed before each on the device, both ways.
fn copies(sizes: &[usize], gap: usize, piece_bytes: usize) -> (u64, u64, u64) {
    let mut rig = Rig::new(Schedule::Eager, 64 << 10, piece_bytes);
    let ids = rig.filled(sizes);
    let place = |rig: &Rig| {
        let mut at = rig.memory;
        let spans = ids.iter().map(|&id| {
            let bytes = rig.bytes(id);
            at += gap;
            let span = span(at, bytes);
            at += plane_bytes::<u8>(bytes).unwrap();
            (id, span)
        });
        spans.collect::<Vec<_>>()
    };
    rig.shuttle.bring(place(&rig), None).unwrap();
    rig.shuttle.arrive(&ids, CALLER).unwrap();
    rig.shuttle.send(place(&rig), CALLER).unwrap();
    rig.shuttle.settle_all().unwrap();
    assert!(ids.iter().all(|&id| rig.place(id) == Place::Host));
    let stats = rig.shuttle.stats();
    assert_eq!(stats.copies_in, stats.copies_out);
    rig.finish();
    (stats.copies_in, stats.bytes_in, stats.bytes_out)
}

#[test]
fn neighbours_share_copies_of_at_most_a_piece() {
    // 10 slots of 128 bytes are one run of 1280.
    assert_eq!(copies(&[128; 10], 0, 1 << 20), (1, 1280, 1280));
    assert_eq!(copies(&[128; 10], 0, 1280), (1, 1280, 1280));
    assert_eq!(copies(&[128; 10], 0, 1279), (2, 1280, 1280));
    assert_eq!(copies(&[128; 10], 0, 100), (13, 1280, 1280));
    // With the padding behind all but the last.
    assert_eq!(copies(&[100, 1, 65], 0, 1 << 20), (1, 128 + 64 + 65, 128 + 64 + 65));
    // Apart on the device: copies of their own.
    assert_eq!(copies(&[100, 1, 65], 64, 1 << 20), (3, 166, 166));
    // Nothing to copy, and nothing between neighbours.
    assert_eq!(copies(&[0, 0], 0, 64), (0, 0, 0));
    assert_eq!(copies(&[128, 0, 128], 0, 1 << 20), (1, 256, 256));
    // A plane of whole pages ends a line later.
    assert_eq!(copies(&[4096, 64], 0, 1 << 20), (1, 4096 + 64 + 64, 4096 + 64 + 64));
}

#[test]
fn another_order_is_another_copy() {
    let mut rig = Rig::new(Schedule::Eager, 4096, 1 << 20);
    let ids = rig.filled(&[64, 64]);
    let other = rig.filled(&[64]);
    let spans = vec![(ids[1], span(rig.memory, 64)), (ids[0], span(rig.memory + 64, 64))];
    rig.shuttle.bring(spans, None).unwrap();
    assert_eq!(rig.shuttle.stats().copies_in, 2);
    rig.shuttle.bring(vec![(other[0], span(rig.memory + 128, 64))], None).unwrap();
    assert_eq!(rig.shuttle.stats().copies_in, 3);
    rig.finish();
}

#[test]
fn slabs_go_with_their_last_slot_and_ids_are_not_used_again() {
    let mut rig = Rig::new(Schedule::Eager, 4096, 1 << 20);
    let first = rig.filled(&[100, 0, 200]);
    let second = rig.reserve(&[5000]);
    let buffers = rig.shuttle.buffers();
    assert_eq!(buffers.iter().map(|buffer| buffer.bytes).collect::<Vec<_>>(), [128 + 256, 5056]);
    assert!(buffers.iter().all(|buffer| buffer.is_pinned));
    assert_eq!(buffers[0].start, rig.shuttle.share(first[0]).unwrap().0);
    drop(buffers);
    let stats = rig.shuttle.stats();
    assert_eq!((stats.host_bytes, stats.pinned_bytes), (4096 + 8192, 4096 + 8192));
    rig.shuttle.free(&first[..2]).unwrap();
    assert_eq!(rig.shuttle.stats().host_bytes, 4096 + 8192, "one slot of it is left");
    let (_, tensor) = rig.shuttle.share(first[2]).unwrap();
    rig.shuttle.free(&first[2..]).unwrap();
    assert_eq!(rig.shuttle.buffers().len(), 1);
    assert_eq!(rig.shuttle.stats().host_bytes, 4096 + 8192, "a tensor over it is left");
    drop(tensor);
    assert_eq!(rig.shuttle.stats().host_bytes, 8192);
    assert!(matches!(rig.shuttle.free(&first[..1]), Err(Error::InvalidValue(_))));
    assert!(matches!(rig.shuttle.place(99), Err(Error::InvalidValue(_))));
    assert!(rig.reserve(&[1])[0] > second[0]);
    assert_eq!(rig.shuttle.name(second[0]).unwrap(), "exp_avg of layer 0");
    rig.finish();
}

#[test]
fn slots_that_were_announced_lie_beside_the_first() {
    let mut rig = Rig::new(Schedule::Eager, 4096, 1 << 20);
    let of = |rig: &mut Rig, sizes: &[usize], coming: &[usize]| rig.shuttle.reserve(&names(sizes), coming).unwrap().0;
    let buffers = |rig: &Rig| rig.shuttle.buffers().iter().map(|buffer| buffer.bytes).collect::<Vec<_>>();
    let first = of(&mut rig, &[100, 0], &[4096, 0, 64]);
    assert_eq!(buffers(&rig), [128]);
    let mapped = rig.shuttle.stats().host_bytes;
    // Those of no bytes take no room, and make none.
    assert_eq!(of(&mut rig, &[0], &[50]).len(), 1);
    let second = of(&mut rig, &[4096], &[9999]);
    let third = of(&mut rig, &[64], &[]);
    assert_eq!((buffers(&rig), rig.shuttle.stats().host_bytes), (vec![128 + 4160 + 64], mapped));
    let start = |id: usize| rig.shuttle.share(id).unwrap().0;
    assert_eq!(start(second[0]) - start(first[0]), 128);
    assert_eq!(start(third[0]) - start(second[0]), 4160);
    // The room is used up.
    let other = of(&mut rig, &[64], &[64, 64]);
    assert_eq!(buffers(&rig), [128 + 4160 + 64, 64]);
    // What does not fit leaves room for what does.
    let large = of(&mut rig, &[200], &[]);
    assert_eq!(buffers(&rig).len(), 3);
    let fits = of(&mut rig, &[128], &[]);
    assert_eq!(buffers(&rig), [128 + 4160 + 64, 64 + 128, 256]);
    rig.shuttle.free(&[first[0], first[1], second[0], third[0], large[0]]).unwrap();
    assert_eq!(buffers(&rig), [64 + 128]);
    rig.shuttle.free(&[other[0], fits[0]]).unwrap();
    // Room goes with the last slot beside it.
    let last = of(&mut rig, &[64], &[640]);
    rig.shuttle.free(&last).unwrap();
    assert_eq!((buffers(&rig), rig.shuttle.stats().host_bytes), (vec![], 0));
    assert!(matches!(rig.shuttle.reserve(&names(&[1]), &[usize::MAX]), Err(Error::InvalidValue(_))));
    rig.finish();
}

fn shuttle(pin: Option<bool>, pinnable: usize) -> (Arc<SimulatedDevice>, Shuttle<SimulatedDevice>) {
    let device = Arc::new(SimulatedDevice::new(Schedule::Eager).unwrap());
    device.set_pinnable_bytes(pinnable);
    let pool = Arc::new(WorkerPool::new(1).unwrap());
    let options = ShuttleOptions { pin, ..ShuttleOptions::default() };
    (Arc::clone(&device), Shuttle::new(device, pool, options).unwrap())
}

#[test]
fn what_cannot_be_pinned_is_a_warning_or_an_error() {
    let (device, mut auto) = shuttle(None, 4096);
    assert_eq!(auto.reserve(&names(&[4096 - 64]), &[]).unwrap().1, None);
    let (ids, warning) = auto.reserve(&names(&[10_000]), &[]).unwrap();
    let warning = warning.unwrap();
    for part in ["cannot pin 12288 bytes", "locked memory", "pageable", "raise the limit"] {
        assert!(warning.contains(part), "{warning}");
    }
    assert_eq!(auto.stats().pinned_bytes, 4096);
    // It travels all the same.
    let (memory, guard) = device.allocate(10_000).unwrap();
    auto.fill(&ids).unwrap();
    auto.bring(vec![(ids[0], memory)], None).unwrap();
    drop(auto);
    drop(guard);
    assert_eq!(device.counters(), Counters::default());

    let (device, mut strict) = shuttle(Some(true), 4096);
    let error = strict.reserve(&names(&[10_000]), &[]).unwrap_err();
    assert!(matches!(&error, Error::Cuda(message) if message.starts_with("pin=True: cannot pin")), "{error}");
    assert_eq!(strict.stats().host_bytes, 0);
    assert_eq!(strict.reserve(&names(&[10]), &[]).unwrap().0, [0]);
    drop(strict);
    assert_eq!(device.counters(), Counters::default());

    let (device, mut never) = shuttle(Some(false), 0);
    assert_eq!(never.reserve(&names(&[10_000]), &[]).unwrap().1, None);
    assert_eq!(device.counters().pinned_bytes, 0);
}

#[test]
fn impossible_sizes_and_pieces_are_errors() {
    let (_, mut shuttle) = shuttle(None, 4096);
    assert!(matches!(shuttle.reserve(&names(&[usize::MAX]), &[]), Err(Error::InvalidValue(_))));
    assert!(matches!(shuttle.reserve(&names(&[1 << 63, 1 << 63]), &[]), Err(Error::InvalidValue(_))));
    assert!(matches!(shuttle.reserve(&names(&[1 << 60]), &[]), Err(Error::OutOfMemory { .. })));
    let (device, pool) = (SimulatedDevice::new(Schedule::Eager).unwrap(), WorkerPool::new(1).unwrap());
    let options = ShuttleOptions { pin: None, piece_bytes: 0 };
    assert!(matches!(Shuttle::new(Arc::new(device), Arc::new(pool), options), Err(Error::InvalidValue(_))));
}
