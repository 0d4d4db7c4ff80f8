"""What the tests of `outboard.Muon` in one process share."""

from __future__ import annotations

from typing import Any

import torch

import outboard

MATRICES = ((64, 128),) * 4
VECTORS = ((128,),) * 3


def make(
    shapes: tuple[tuple[int, ...], ...] = MATRICES, dtype: torch.dtype = torch.float32, device: Any = "cpu"
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def give_gradients(parameters: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


def step(parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer, seed: int) -> None:
    give_gradients(parameters, seed)
    optimizer.step()


def muon(matrices: list[torch.Tensor], vectors: list[torch.Tensor] | None = None, **options: Any) -> outboard.Muon:
    groups = [{"params": matrices, "use_muon": True}]
    if vectors:
        groups.append({"params": vectors, "use_muon": False})
    return outboard.Muon(groups, **{"lr": 0.02, **options})


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(one, other), index


def twins(offload: bool, **options: Any) -> tuple[list[torch.Tensor], outboard.Muon]:
    matrices, vectors = make(), make(VECTORS)
    optimizer = muon(matrices, vectors, **options)
    if offload:
        optimizer.turn_on_cpu_offload(checkpoint=True)
    return matrices + vectors, optimizer


def storages(optimizer: outboard.Muon) -> list[int]:
    return [
        value.untyped_storage().size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
