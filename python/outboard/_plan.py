"""What an optimizer takes and what it gives: bytes on host and device, lane speeds, the time of an update."""

from __future__ import annotations

from typing import Any

#: Bytes moved each way per second that are assumed until something has been measured: PCIe 5 x16, both ways at once.
ASSUMED_LINK_BYTES_PER_S = 50e9
GIB = 2**30


def plan(stats: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of an optimizer with these `stats()`; its keys are described at `OffloadedOptimizer.plan`."""
    elements = stats["elements"]
    state = stats["state_bytes"] + stats["resident_bytes"]
    per_element = state / elements if elements else 0.0
    devices = stats["devices"].values()
    lanes = {
        name: sum(device[name]["elements"] for device in devices) / seconds / 1e9
        for name in ("gpu_lane", "cpu_lane")
        if (seconds := sum(device[name]["seconds"] for device in devices)) > 0
    }
    measured = sum(lanes.values())
    rate = measured if measured else (ASSUMED_LINK_BYTES_PER_S / per_element / 1e9 if per_element else 0.0)
    resident = stats["resident_bytes"]
    gradients_pinned, gradients_pageable = stats["gradient_bytes"]
    streamed = elements * (1 - resident / state) if state else 0.0
    return {
        "parameters": stats["parameters"],
        "elements": elements,
        "host_bytes": {
            "state_pinned": stats["pinned_bytes"] - gradients_pinned,
            "state_pageable": stats["pageable_bytes"] - gradients_pageable,
            "gradients_pinned": gradients_pinned,
            "gradients_pageable": gradients_pageable,
            "rings_pinned": sum(device["host_ring_bytes"] for device in devices),
        },
        "device_bytes": {
            "state_resident": resident,
            "rings": sum(device["device_ring_bytes"] for device in devices),
        },
        "state_bytes_per_element": per_element,
        "gelem_per_s": {**lanes, "all": rate, "is_measured": bool(measured)},
        "update_seconds": streamed / (rate * 1e9) if rate else 0.0,
        "resident_gib": resident / GIB,
        "seconds_saved_per_resident_gib": GIB / per_element / (rate * 1e9) if rate and per_element else 0.0,
        "resident_gib_for_all": state / GIB,
    }
