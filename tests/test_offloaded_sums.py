"""Gradients that add up in host memory are used once, whenever updates may begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import outboard
from lanes import Twin
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
