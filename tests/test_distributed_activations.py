"""`outboard.offload_activations` under DDP and FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import outboard
from ranks import with_lanes
from test_activations import Stack

Run = Callable[..., str]


def full(gradient: Any) -> torch.Tensor:
    found: torch.Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def wrapped(device: str, how: str, steps: int) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    models: list[Any] = [Stack().to(device)]
    models.append(copy.deepcopy(models[0]))
    with with_lanes():
        for index, model in enumerate(models):
            if index == 1:
                handle = outboard.offload_activations(model, min_bytes=1000, keep_last=0)
            if how == "ddp":
                models[index] = DistributedDataParallel(model)
            else:
                mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
                for block in model.blocks:
                    fully_shard(block, mesh=mesh)
                fully_shard(model, mesh=mesh)
        for step in range(steps):
            found = []
            for model in models:
                model.zero_grad()
                torch.manual_seed(100 * step + torch.distributed.get_rank())
                model(torch.randn(4, 8, 32).to(device)).backward()
                found.append([full(parameter.grad) for parameter in model.parameters()])
            assert len(found[0]) > 0
            assert all(map(torch.equal, *found))
        stats = handle.stats()
    assert stats["bytes_out"] > 0
    assert (stats["cargos"], stats["pool"]["live"]) == (0, 0)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_gradients_have_the_same_bits(ranks: Run, how: str) -> None:
    ranks(wrapped, 2, how, 3, at_least=1)
