"""Gradients that add up in host memory are used once, whenever updates may begin; what that takes is told."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import outboard
from lanes import Stack, Twin
from oracle import assert_same

pytestmark = [pytest.mark.timeout(60, method="thread"), pytest.mark.usefixtures("small_ones_have_hooks")]


@pytest.mark.parametrize("eager", ["auto", True, False])
@pytest.mark.parametrize("backwards", [1, 2, 3])
def test_offloaded_sums(lanes_device: Any, eager: Any, backwards: int) -> None:
    model = torch.nn.Linear(70, 40).to(lanes_device.device)
    inputs = [lanes_device.put(torch.randn(4, 70)) for _ in range(3 * backwards)]
    copy = torch.nn.Linear(70, 40).to(lanes_device.device)
    copy.load_state_dict(model.state_dict())
    options = {"eager": eager, "accumulation_steps": backwards, "offload_gradients": True}
    optimizer = outboard.AdamW(model.parameters(), threads=1, **options).attach(model)
    twin = Twin(copy.parameters())
    for step in range(3):
        for x in inputs[step * backwards : (step + 1) * backwards]:
            model(x).square().mean().backward()
            copy(x).square().mean().backward()
        optimizer.step()
        twin.step()
        copy.zero_grad()
        with torch.no_grad():
            for p, master in zip(copy.parameters(), twin.params, strict=True):
                p.copy_(master)
    for p, master in zip(model.parameters(), twin.params, strict=True):
        assert optimizer.state[p]["step"] == 3
        assert_same(p.detach().cpu(), master, f"{eager}, {backwards}")


@pytest.mark.parametrize("share", [0, 0.5])
@pytest.mark.parametrize("backwards", [1, 3])
def test_accumulation_seconds(lanes_device: Any, backwards: int, share: float) -> None:
    sizes = (70_000, 5, 140_000, 300)
    model = Stack(*sizes).to(lanes_device.device)
    options = {"accumulation_steps": backwards, "offload_gradients": True, "device_state_bytes": share, "threads": 2}
    opt = outboard.AdamW(model.parameters(), **options).attach(model)
    assert opt.stats()["accumulation_seconds"] == 0
    began = time.perf_counter()
    for _ in range(2):
        for _ in range(backwards):
            model.loss().backward()
        opt.step()
    opt.synchronize()
    elements = 2 * backwards * sum(sizes)
    (lanes,) = opt.stats()["devices"].values()
    while lanes["offloaded_elements"] < elements or not lanes["accumulation_seconds"]:
        # Told a moment after all have landed.
        (lanes,) = opt.stats()["devices"].values()
    spent = time.perf_counter() - began
    stats = opt.stats()
    (lanes,) = stats["devices"].values()
    assert (lanes["offloaded_elements"], lanes["offloaded_bytes"]) == (elements, 4 * elements)
    assert lanes["offloaded_bytes"] <= lanes["cpu_lane"]["bytes_from_device"]
    assert 0 < lanes["accumulation_seconds"] < spent
    # One gradient is kept as it comes.
    assert (lanes["accumulation_thread_seconds"] > 0) is (backwards > 1)
    assert lanes["accumulation_thread_seconds"] < 2 * spent
    assert stats["accumulation_seconds"] == lanes["accumulation_seconds"]
    assert stats["accumulation_ms_per_step"] == pytest.approx(stats["accumulation_seconds"] * 1e3 / 2)


def test_no_accumulation(lanes_device: Any) -> None:
    model = Stack(70_000, 5).to(lanes_device.device)
    opt = outboard.AdamW(model.parameters(), threads=2).attach(model)
    model.loss().backward()
    opt.step()
    opt.synchronize()
    stats = opt.stats()
    assert stats["accumulation_seconds"] == stats["accumulation_ms_per_step"] == 0
    (lanes,) = stats["devices"].values()
    assert lanes["accumulation_thread_seconds"] == lanes["offloaded_bytes"] == 0
