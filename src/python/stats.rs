//! Counts and sizes, for `stats()`.

use super::binding::Offloaded;
use super::core::Core;
use crate::engine::Slot;
use crate::engine::lanes::LaneStats;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::HashMap;

impl Core {
    /// As a dict that Python adds to.
    pub(super) fn describe<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        let elements = |slot: &Slot| slot.spec.layout.numel();
        let slots = &self.parameters.slots;
        stats.set_item("parameters", slots.len())?;
        stats.set_item("elements", slots.iter().map(elements).sum::<usize>())?;
        let bytes = |slot: &Slot| size_of::<f64>() + elements(slot) * slot.spec.bytes_per_element();
        let resident = |index: &usize| self.parameters.bindings[*index].resident.is_some();
        let (on_device, on_host): (Vec<usize>, Vec<usize>) = (0..slots.len()).partition(resident);
        let sum = |indices: Vec<usize>| indices.into_iter().map(|index| bytes(&slots[index])).sum::<usize>();
        stats.set_item("state_bytes", sum(on_host))?;
        stats.set_item("resident_bytes", sum(on_device))?;
        stats.set_item("arena_bytes", self.arena.bytes())?;
        stats.set_item("threads", self.threads)?;
        stats.set_item("isa", self.isa.name())?;
        let poisoned = slots.iter().filter_map(|slot| Some((&*slot.spec.name, slot.poisoned.as_ref()?)));
        stats.set_item("poisoned", poisoned.collect::<HashMap<_, _>>())?;
        stats.set_item("pinned_bytes", self.arena.pinned_bytes())?;
        stats.set_item("pageable_bytes", self.arena.bytes() - self.arena.pinned_bytes())?;
        let offloaded = self.parameters.bindings.iter().filter_map(|binding| binding.offloaded.as_ref());
        let (pinned, pageable): (Vec<_>, Vec<_>) = offloaded.partition(|offloaded| offloaded.plane.is_pinned());
        let sum =
            |all: Vec<&Offloaded>| all.into_iter().map(|offloaded| offloaded.plane.as_slice().len()).sum::<usize>();
        stats.set_item("gradient_bytes", (sum(pinned), sum(pageable)))?;
        stats.set_item("eager_updates", self.counts.eager_updates)?;
        stats.set_item("hook_stall_seconds", self.counts.hook_stall_seconds)?;
        stats.set_item("forward_stall_seconds", self.counts.forward_stall_seconds)?;
        let devices = PyDict::new(py);
        for (place, engine) in self.engines.all() {
            devices.set_item(place.to_string(), lane_stats(py, &engine.stats()?)?)?;
        }
        stats.set_item("devices", devices)?;
        Ok(stats)
    }
}

/// One device's lanes, for `stats()`.
fn lane_stats<'py>(py: Python<'py>, stats: &LaneStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, lane) in [("gpu_lane", &stats.gpu), ("cpu_lane", &stats.cpu)] {
        let totals = PyDict::new(py);
        totals.set_item("chunks", lane.chunks)?;
        totals.set_item("elements", lane.elements)?;
        totals.set_item("bytes_to_device", lane.bytes_in)?;
        totals.set_item("bytes_from_device", lane.bytes_out)?;
        totals.set_item("seconds", lane.seconds)?;
        let rate = |bytes: u64| if lane.seconds > 0.0 { bytes as f64 / lane.seconds / 1e9 } else { 0.0 };
        totals.set_item("gb_per_s_to_device", rate(lane.bytes_in))?;
        totals.set_item("gb_per_s_from_device", rate(lane.bytes_out))?;
        dict.set_item(name, totals)?;
    }
    dict.set_item("accumulation_seconds", stats.offload.seconds)?;
    dict.set_item("accumulation_thread_seconds", stats.adding_seconds)?;
    dict.set_item("offloaded_elements", stats.offload.elements)?;
    dict.set_item("offloaded_bytes", stats.offload.bytes_out)?;
    dict.set_item("resident_elements", stats.resident_elements)?;
    dict.set_item("device_ring_bytes", stats.device_ring_bytes)?;
    dict.set_item("host_ring_bytes", stats.host_ring_bytes)?;
    dict.set_item("waiting_gradient_bytes", stats.waiting_bytes.0)?;
    dict.set_item("most_waiting_gradient_bytes", stats.waiting_bytes.1)?;
    dict.set_item("queued", stats.queue.0)?;
    dict.set_item("most_queued", stats.queue.1)?;
    dict.set_item("most_gpu_chunks_in_flight", stats.in_flight.0)?;
    dict.set_item("most_cpu_chunks_in_flight", stats.in_flight.1)?;
    dict.set_item("compute_seconds", stats.compute_seconds)?;
    dict.set_item("dispatcher_sleep_seconds", stats.dispatcher_sleep_seconds)?;
    dict.set_item("last_issue_seconds", stats.issue_seconds)?;
    Ok(dict)
}
