//! Any sequence of right calls beside a plain model of what the bytes are.

use super::rig::{CALLER, Chance, Rig, first_bytes, schedules, span};
use crate::engine::shuttle::Place;
use crate::memory::DeviceSpan;

/// Slots fit into one cell of the device each; some fill it up to the padding, so that neighbours travel together.
const CELL: usize = 128;
const CELLS: usize = 12;
const SIZES: [usize; 6] = [0, 1, 70, 100, 127, 128];

/// What a slot should be.
struct Expected {
    id: usize,
    place: Place,
    home: Vec<u8>,
    has_value: bool,
    there: Vec<u8>,
    cell: Option<usize>,
}

struct World {
    rig: Rig,
    slots: Vec<Expected>,
    chance: Chance,
}

impl World {
    /// A random few of the slots in these places, in their order.
    fn some(&mut self, places: &[Place]) -> Vec<usize> {
        let Self { slots, chance, .. } = self;
        (0..slots.len()).filter(|&i| places.contains(&slots[i].place) && chance.below(2) == 0).collect()
    }

    fn ids(&self, some: &[usize]) -> Vec<usize> {
        some.iter().map(|&i| self.slots[i].id).collect()
    }

    fn address(&self, i: usize) -> usize {
        self.rig.memory + self.slots[i].cell.unwrap() * CELL
    }

    fn spans(&self, some: &[usize]) -> Vec<(usize, DeviceSpan)> {
        some.iter().map(|&i| (self.slots[i].id, span(self.address(i), self.slots[i].home.len()))).collect()
    }

    /// Gives cells to as many as there are free ones for.
    fn settle_in(&mut self, some: &mut Vec<usize>) {
        let free: Vec<usize> =
            (0..CELLS).filter(|cell| self.slots.iter().all(|slot| slot.cell != Some(*cell))).collect();
        some.truncate(free.len());
        for (&i, cell) in some.iter().zip(free) {
            self.slots[i].cell = Some(cell);
        }
    }

    fn turn(&mut self) {
        match self.chance.below(11) {
            0 => {
                let sizes: Vec<usize> = (0..self.chance.below(5)).map(|_| SIZES[self.chance.below(6)]).collect();
                for (id, bytes) in self.rig.reserve(&sizes).into_iter().zip(sizes) {
                    let home = vec![0; bytes];
                    let (place, there) = (Place::Pending, home.clone());
                    self.slots.push(Expected { id, place, home, has_value: false, there, cell: None });
                }
            }
            1 => {
                let some = self.some(&[Place::Pending]);
                let ids = self.ids(&some);
                for &i in &some {
                    let slot = &mut self.slots[i];
                    slot.home = first_bytes(slot.id, slot.home.len());
                    self.rig.write(slot.id, &slot.home);
                    (slot.place, slot.has_value) = (Place::Host, true);
                }
                self.rig.shuttle.fill(&ids).unwrap();
            }
            2 => {
                let mut some = self.some(&[Place::Pending]);
                self.settle_in(&mut some);
                for &i in &some {
                    let (address, value) = (self.address(i), self.chance.below(256) as u8);
                    let bytes = self.slots[i].home.len();
                    self.rig.shuttle.claim(address, bytes, CALLER).unwrap();
                    self.rig.set(address, bytes, value);
                    (self.slots[i].there, self.slots[i].place) = (vec![value; bytes], Place::Device);
                }
                let addresses: Vec<usize> = some.iter().map(|&i| self.address(i)).collect();
                self.rig.shuttle.bear(&self.ids(&some), Some(&addresses)).unwrap();
            }
            3 | 4 => {
                let mut some = self.some(&[Place::Host, Place::DeviceToHost]);
                self.settle_in(&mut some);
                self.rig.shuttle.bring(self.spans(&some), None).unwrap();
                for &i in &some {
                    self.slots[i].there = self.slots[i].home.clone();
                    self.slots[i].place = Place::HostToDevice;
                }
            }
            5 | 6 => {
                let some = self.some(&[Place::HostToDevice]);
                self.rig.shuttle.arrive(&self.ids(&some), CALLER).unwrap();
                for &i in &some {
                    self.slots[i].place = Place::Device;
                }
                for i in self.some(&[Place::Device]) {
                    self.rig.add(self.address(i), self.slots[i].home.len(), 3).unwrap();
                    self.slots[i].there.iter_mut().for_each(|byte| *byte = byte.wrapping_add(3));
                }
            }
            7 | 8 => {
                let some = self.some(&[Place::Device]);
                self.rig.shuttle.send(self.spans(&some), CALLER).unwrap();
                for &i in &some {
                    let slot = &mut self.slots[i];
                    (slot.home, slot.place) = (slot.there.clone(), Place::DeviceToHost);
                    (slot.has_value, slot.cell) = (true, None);
                }
            }
            9 => {
                let some = self.some(&[Place::Device, Place::HostToDevice]);
                self.rig.shuttle.discard(&self.ids(&some), CALLER).unwrap();
                for &i in &some {
                    let slot = &mut self.slots[i];
                    (slot.place, slot.cell) = (if slot.has_value { Place::Host } else { Place::Pending }, None);
                }
            }
            _ => {
                let some = self.some(&[Place::Host, Place::DeviceToHost]);
                self.rig.shuttle.settle(&self.ids(&some)).unwrap();
                for &i in &some {
                    self.slots[i].place = Place::Host;
                    assert_eq!(self.rig.read(self.slots[i].id), self.slots[i].home);
                }
                if self.chance.below(3) == 0 {
                    let gone = self.some(&[Place::Host, Place::Pending, Place::DeviceToHost]);
                    let ids = self.ids(&gone);
                    self.rig.shuttle.free(&ids).unwrap();
                    self.slots.retain(|slot| !ids.contains(&slot.id));
                }
            }
        }
        for slot in &self.slots {
            assert_eq!(self.rig.place(slot.id), slot.place, "slot {}", slot.id);
        }
    }
}

#[test]
fn any_right_calls_do_what_the_model_does() {
    let (mut copies, mut slots_in) = (0, 0);
    for (round, schedule) in schedules(150).enumerate() {
        let rig = Rig::new(schedule, CELLS * CELL, [50, 128, 1 << 20][round % 3]);
        let mut world = World { rig, slots: Vec::new(), chance: Chance::new(round as u64 + 1) };
        for _ in 0..120 {
            world.turn();
        }
        let World { mut rig, slots, .. } = world;
        let ids: Vec<usize> = slots.iter().map(|slot| slot.id).collect();
        rig.shuttle.settle(&ids).unwrap();
        for slot in slots.iter().filter(|slot| slot.has_value) {
            assert_eq!(rig.read(slot.id), slot.home, "slot {}, {schedule:?}", slot.id);
        }
        let stats = rig.shuttle.stats();
        copies += stats.copies_in;
        slots_in += stats.bytes_in;
        rig.finish();
    }
    assert!(copies > 1000 && slots_in > 100_000, "{copies} copies of {slots_in} bytes: too little happened");
}
