"""`outboard.Muon` at the edges: tensors of no elements, memory with gaps, rates in tensors, checkpoints of others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import outboard
from outboard.muon import set_ns_compile


@pytest.fixture(autouse=True)
def no_compilation() -> Iterator[None]:
    was = outboard.muon.ns_compile()
    set_ns_compile(False)
    yield
    set_ns_compile(was)


def ones(*shape: int) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape)
    return parameter


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("flatten", [None, True, False])
@pytest.mark.parametrize(
    "shape", [(0, 5), (5, 0), (0, 0), (3, 0, 5), (0, 4, 5), (3, 4, 0), (0, 3, 3, 3), (2, 0, 3, 3), (2, 3, 0, 3)]
)
def test_matrices_of_no_elements(shape: tuple[int, ...], flatten: bool | None, adjust_lr: str) -> None:
    empty, beside, alone = ones(*shape), ones(4, 4), ones(4, 4)
    for parameters in ([empty, beside], [alone]):
        group = {"params": parameters, "use_muon": True, "flatten": flatten}
        outboard.Muon([group], adjust_lr=adjust_lr).step()
    assert torch.equal(beside, alone)
    assert not torch.equal(beside, torch.ones(4, 4))


def test_parts_of_a_fused_matrix_of_no_columns() -> None:
    empty = ones(6, 0)
    optimizer = outboard.Muon([{"params": [empty], "use_muon": True, "split": 3}])
    optimizer.step()
    assert optimizer.state[empty]["momentum_buffer"].shape == (6, 0)


def test_a_rate_in_a_tensor_for_memory_with_gaps() -> None:
    results = []
    for lr in (torch.tensor(0.25), 0.25):
        base = torch.ones(8, 64)
        parameter = torch.nn.Parameter(base[:, 8:56])
        parameter.grad = torch.ones(8, 48)
        outboard.Muon([{"params": [parameter], "use_muon": False}], lr=lr).step()
        results.append(base)
    assert torch.equal(*results)
    assert torch.equal(results[0][:, :8], torch.ones(8, 8))
    assert not torch.equal(results[0][:, 8:56], torch.ones(8, 48))
