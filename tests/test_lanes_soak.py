"""Long trainings hold no more memory than short ones."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

import outboard
from lanes import Stack

PAGE = os.sysconf("SC_PAGE_SIZE")

#: Some pages come and go with the interpreter's and torch's own pools; a leak of one chunk, gradient or event a step is
#: more by far.
SLACK = 24 << 20

HOW: dict[str, dict[str, Any]] = {
    "eager": {"eager": True},
    "clipped": {"max_grad_norm": 1.0},
    "offloaded": {"offload_gradients": True, "accumulation_steps": 2},
    "resident": {"device_state_bytes": 0.5, "mode": "gpu"},
}


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE


def device_bytes(device: torch.device) -> int:
    """Bytes in use on a device, by anybody's count: torch's own, and what is not torch's in this process."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_allocated(device) + (total - free - torch.cuda.memory_reserved(device))


@pytest.mark.parametrize("how", HOW)
def test_memory_stays_flat(lanes_device, how: str) -> None:
    steps = 200 if lanes_device.is_simulated else 2000
    model = Stack(300_000, 7, 120_000, 70_001, dtype=torch.bfloat16).to(lanes_device.device)
    opt = outboard.AdamW(model.parameters(), lr=1e-4, threads=2, **HOW[how]).attach(model)

    def train(count: int) -> None:
        for step in range(count):
            for _ in range(HOW[how].get("accumulation_steps", 1)):
                model.loss(step).backward()
            opt.step()
            opt.zero_grad()
        opt.synchronize()
        gc.collect()

    train(steps // 4)
    host, device = resident_bytes(), device_bytes(lanes_device.device)
    train(steps)
    assert resident_bytes() - host < SLACK
    # Others may use the device at the same time; torch's own count is of this process alone.
    assert device_bytes(lanes_device.device) - device < SLACK or os.environ.get("PYTEST_XDIST_WORKER")
    stats = opt.stats()["devices"].values()
    assert [(of_device["waiting_gradient_bytes"], of_device["queued"]) for of_device in stats] == [(0, 0)]
