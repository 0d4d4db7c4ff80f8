//! Gradients that leave the device, and the updates that use them from host memory.

use super::rig::{Kind, Rig, Setup, Terms, make_resident};
use super::tools::{Tensor, eventually, within};
use crate::device::Device;
use crate::device::simulated::OperationKind::{Allocate, CopyIn, CopyOut, Record, Update, UpdateMany};
use crate::device::simulated::{RangeEntry, Schedule};
use crate::engine::StepOptions;
use crate::engine::lanes::{Gradient, Offload, Order, Request, Sum};
use crate::memory::{Arena, DeviceSpan, Plane, plane_bytes};
use std::collections::BTreeSet;
use std::sync::Arc;

const KINDS: [Kind; 5] = [Kind::f32(70_001), Kind::split(100), Kind::split(250), Kind::f32(150_000), Kind::split(9)];

/// Host memory for a gradient of each parameter.
fn host_gradients(rig: &Rig, pinned: bool) -> Vec<Plane<u8>> {
    let lens: Vec<usize> = KINDS.iter().map(|kind| kind.len * kind.grad.bytes()).collect();
    let bytes = lens.iter().map(|&len| plane_bytes::<u8>(len).unwrap()).sum();
    let mut slab = Arena::default().slab(bytes, &rig.pool).unwrap();
    if pinned {
        slab.pin(|start, bytes| rig.device.pin(start, bytes)).unwrap();
    }
    lens.into_iter().map(|len| slab.carve(len)).collect()
}

/// A step of all parameters with offloaded gradients, and the twins'; those of even number have their state on the device.
/// Says whether all has been taken over.
fn try_step(rig: &mut Rig, homes: &mut [Plane<u8>]) -> (Vec<Arc<Tensor>>, bool) {
    let (mut tensors, mut twins, mut offloads, mut updates) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (index, (kind, home)) in KINDS.iter().zip(homes).enumerate() {
        let values = rig.chance.values(kind.grad, kind.len);
        let grad = rig.grad(&values);
        let mut update = rig.request(index, &grad, &Terms::default());
        // SAFETY: of two jobs of one slot the engine lets the second wait, and nobody else knows the plane.
        let (to, from) = unsafe { (home.lend(), home.lend()) };
        let (address, bytes) = grad.run();
        let offload = Offload {
            slot: index,
            name: format!("p{index}").into(),
            grad_dtype: kind.grad,
            len: kind.len,
            // SAFETY: the tensor is kept until all is over.
            grad: unsafe { DeviceSpan::new(address, bytes) },
            to,
            sum: Sum::Keep,
        };
        let keep = Box::new(Arc::clone(&grad));
        offloads.push(Request { order: Order::Offload(offload), next_use: 0, write_unscaled: false, keep });
        if let Order::Update(part) = &mut update.order {
            part.grad = Gradient::Host(from);
        }
        if index % 2 == 0 {
            make_resident(&mut update);
        }
        updates.push(update);
        twins.push((index, Tensor::holding(&values, 0)));
        tensors.push(grad);
    }
    let taken = rig.engine().submit(offloads, 1, false).and_then(|_| rig.engine().submit(updates, 1, false));
    rig.step_twins(&mut twins, &StepOptions::default(), false);
    (tensors, taken.is_ok())
}

/// As [`try_step`], which succeeds.
fn step(rig: &mut Rig, homes: &mut [Plane<u8>]) -> Vec<Arc<Tensor>> {
    let (tensors, taken) = try_step(rig, homes);
    assert!(taken);
    tensors
}

fn setup(seed: u64, mode: (bool, bool), pinned: bool) -> Setup {
    Setup { pinned, ..Setup::new(Schedule::Random { seed }, mode.0, mode.1) }
}

/// Read in place where that is possible; else brought back, and nothing of it stays.
#[test]
fn updates_use_host_gradients() {
    for seed in 0..6 {
        for (pinned, addresses) in [(true, true), (true, false), (false, true), (false, false)] {
            for mode in [(true, false), (false, true), (true, true)] {
                within("host gradients", move || {
                    // The planes play the device's memory: pinned, they could not where none can be addressed.
                    let mut rig = Rig::new(&setup(seed, mode, pinned && addresses), &KINDS);
                    let mut homes = host_gradients(&rig, pinned);
                    // Where kernels cannot address pinned memory, one that is to do so fails.
                    rig.device.set_can_address_host(addresses);
                    let before = rig.device.counters().allocated_bytes;
                    for _ in 0..3 {
                        let _tensors = step(&mut rig, &mut homes);
                        rig.engine().synchronize().unwrap();
                        assert_eq!(rig.failures(), []);
                        rig.compare_all();
                        eventually("the copies are gone", || rig.device.counters().allocated_bytes == before);
                    }
                    let resident: usize = KINDS.iter().step_by(2).map(|kind| kind.len).sum();
                    assert_eq!(rig.engine().stats().resident_elements, 3 * resident as u64);
                    let of_resident = |range: &RangeEntry| range.message.starts_with("resident p");
                    // Three of them, two in a bundle.
                    assert_eq!(rig.device.ranges().iter().filter(|range| of_resident(range)).count(), 3 * 2);
                    drop(homes);
                    rig.finish();
                });
            }
        }
    }
}

/// A failure is told by name and nothing is in use after it; what is not in order shows as a hazard.
#[test]
fn a_call_fails() {
    for kind in [Allocate, CopyIn, CopyOut, Update, UpdateMany, Record] {
        within("a failure", move || {
            for skip in 0..12 {
                let mut rig = Rig::new(&setup(skip as u64, (true, true), false), &KINDS);
                let mut homes = host_gradients(&rig, false);
                let before = rig.device.counters().allocated_bytes;
                rig.device.keep_log();
                rig.device.fail_next(kind, skip, false);
                if kind == Record && skip < 2 {
                    rig.device.clear_failures(); // the caller's own
                }
                let (tensors, taken) = try_step(&mut rig, &mut homes);
                rig.engine().synchronize().unwrap();
                if !taken {
                    // The caller records an event for the updates, too, while the dispatcher does for the gradients. What
                    // was not taken has let go of these, which shows as a hazard though others hold them as well.
                    assert_eq!(kind, Record);
                    continue;
                }
                rig.device.clear_failures();
                let failed: BTreeSet<usize> = rig.failures().into_iter().map(|(slot, _)| slot).collect();
                (0..KINDS.len()).filter(|slot| !failed.contains(slot)).for_each(|slot| rig.compare(slot));
                assert!(kind != Allocate || failed.iter().all(|slot| slot % 2 == 0), "{failed:?}");
                assert!(skip > 0 || kind != Allocate || !failed.is_empty());
                eventually("the copies are gone", || rig.device.counters().allocated_bytes == before);
                drop((tensors, homes));
                rig.close();
            }
        });
    }
}

/// The device fails while copies are there: everything is told, and nothing is freed that it may write to.
#[test]
fn the_device_fails() {
    within("the device fails", || {
        for operations in 0..40 {
            let mut rig = Rig::new(&setup(operations, (true, true), false), &KINDS);
            let mut homes = host_gradients(&rig, false);
            rig.device.break_after(operations + 2);
            let (tensors, taken) = try_step(&mut rig, &mut homes);
            rig.engine().synchronize().unwrap();
            let failed: BTreeSet<usize> = rig.failures().into_iter().map(|(slot, _)| slot).collect();
            let whole = |slot: &usize| taken && !failed.contains(slot);
            (0..KINDS.len()).filter(whole).for_each(|slot| rig.compare(slot));
            drop(rig.engine.take());
            assert!(rig.device.ranges().iter().all(|range| range.ends == 1), "{:?}", rig.device.ranges());
            drop((tensors, homes));
        }
    });
}
