"""Muon's state and that of `offload_state` on a CUDA device: what memory they take, and that nothing grows."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import outboard

pytestmark = pytest.mark.cuda

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_compilation() -> Iterator[None]:
    was = outboard.muon.ns_compile()
    outboard.muon.set_ns_compile(False)
    yield
    outboard.muon.set_ns_compile(was)


def matrices(count: int, shape: tuple[int, int]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda").requires_grad_() for _ in range(count)]


def step(parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()


def make(kind: str, parameters: list[torch.Tensor]) -> tuple[torch.optim.Optimizer, Any]:
    """Return an optimizer and what turns its offload off and on."""
    if kind == "muon":
        muon = outboard.Muon([{"params": parameters, "use_muon": True}], lr=0.02)
        muon.turn_on_cpu_offload()
        return muon, muon
    adamw = torch.optim.AdamW(parameters, lr=0.02, fused=True)
    return adamw, outboard.offload_state(adamw, batch_bytes=4 * MIB)


def plain(kind: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    if kind == "muon":
        return outboard.Muon([{"params": parameters, "use_muon": True}], lr=0.02)
    return torch.optim.AdamW(parameters, lr=0.02, fused=True)


def storages(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the bytes on the device of each tensor of the state."""
    return [
        value.untyped_storage().size() if value.device.type == "cuda" else 0
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    ]


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_storages_are_empty_and_buffers_pinned_after_steps(kind: str) -> None:
    parameters = matrices(8, (512, 1024))
    optimizer, handle = make(kind, parameters)
    for seed in range(2):
        step(parameters, optimizer, seed)
        assert storages(optimizer) == [0] * (8 if kind == "muon" else 16)
        buffers = handle.host_buffers()
        assert all(buffer.is_pinned() and buffer.dtype == torch.uint8 for buffer in buffers)
        assert sum(buffer.numel() for buffer in buffers) >= sum(p.numel() * 4 for p in parameters)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_off_and_on_again_returns_to_the_level(kind: str) -> None:
    parameters = matrices(8, (512, 1024))
    optimizer, handle = make(kind, parameters)
    step(parameters, optimizer, 0)
    step(parameters, optimizer, 1)
    level = torch.cuda.memory_allocated()
    handle.turn_off_cpu_offload()
    assert torch.cuda.memory_allocated() > level + 8 * MIB
    step(parameters, optimizer, 2)
    handle.turn_on_cpu_offload()
    step(parameters, optimizer, 3)
    assert abs(torch.cuda.memory_allocated() - level) <= 4 * MIB


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_fifty_steps_do_not_grow(kind: str) -> None:
    parameters = matrices(8, (512, 1024))
    optimizer, _ = make(kind, parameters)
    for seed in range(3):
        step(parameters, optimizer, seed)
    device, host = torch.cuda.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(3, 50):
        step(parameters, optimizer, seed)
        assert torch.cuda.memory_allocated() <= device
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host < 50 * 1024


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_less_is_allocated_than_without_and_a_load_is_pinned_again(kind: str) -> None:
    parameters = matrices(8, (1024, 2048))
    before = torch.cuda.memory_allocated()
    resident = plain(kind, parameters)
    step(parameters, resident, 0)
    without = torch.cuda.memory_allocated() - before
    saved = resident.state_dict()
    saved = {
        "state": {
            index: {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
            for index, state in saved["state"].items()
        },
        "param_groups": saved["param_groups"],
    }
    del resident
    optimizer, handle = make(kind, parameters)
    step(parameters, optimizer, 0)
    level = torch.cuda.memory_allocated()
    assert level - before < without
    handle.turn_off_cpu_offload()
    off = torch.cuda.memory_allocated()
    assert off > level
    optimizer.load_state_dict(saved)
    handle.turn_on_cpu_offload()
    assert all(buffer.is_pinned() for buffer in handle.host_buffers())
    step(parameters, optimizer, 1)
    assert abs(torch.cuda.memory_allocated() - level) <= 4 * MIB


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_step_takes_a_few_batches_of_memory(kind: str) -> None:
    parameters = matrices(32, (1024, 1024))
    optimizer, _ = make(kind, parameters)
    for seed in range(2):
        step(parameters, optimizer, seed)
    torch.manual_seed(9)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    state = sum(p.numel() * 4 for p in parameters) * (1 if kind == "muon" else 2)
    # Two arenas; of Muon also the updates of the chunks that are worked on, and Newton-Schulz itself.
    assert torch.cuda.max_memory_allocated() - before < state * 0.75


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_first_step_makes_state_batch_by_batch(kind: str) -> None:
    parameters = matrices(32, (1024, 1024))
    optimizer, _ = make(kind, parameters)
    torch.manual_seed(9)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    state = sum(p.numel() * 4 for p in parameters) * (1 if kind == "muon" else 2)
    assert torch.cuda.max_memory_allocated() - before < state * 0.75


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_host_does_not_wait_for_the_device(kind: str) -> None:
    parameters = matrices(8, (512, 1024))
    optimizer, _ = make(kind, parameters)
    for seed in range(3):
        step(parameters, optimizer, seed)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(4_000_000_000)  # some two seconds of the device's clock
    done.record()  # type: ignore[no-untyped-call]
    optimizer.step()
    is_waited_for = done.query()
    torch.cuda.synchronize()
    assert not is_waited_for


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    with warnings.catch_warnings():
        # The first time it says that it does not see everything.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rates_on_the_device_are_not_waited_for() -> None:
    lr = torch.tensor(0.02, device="cuda")
    steps = []
    for rate in (lr, 0.02):
        parameters = matrices(4, (64, 128))
        vector = torch.ones(256, device="cuda", requires_grad=True)
        groups = [{"params": parameters, "use_muon": True}, {"params": [vector], "use_muon": False}]
        optimizer = outboard.Muon(groups, lr=rate)
        step([*parameters, vector], optimizer, 0)
        for parameter in (*parameters, vector):
            parameter.grad = torch.ones_like(parameter)
        torch.cuda.synchronize()
        with refusing_to_wait():
            optimizer.step()
        steps.append([*parameters, vector])
    for one, other in zip(*steps, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_deleting_frees_the_device_and_the_host_at_once(kind: str) -> None:
    parameters = matrices(8, (512, 1024))
    before = torch.cuda.memory_allocated()
    optimizer, handle = make(kind, parameters)
    step(parameters, optimizer, 0)
    del optimizer, handle
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_bits_with_work_on_the_stream(kind: str) -> None:
    # No synchronisation between steps: forward at once after step, copies home still under way.
    one, other = matrices(12, (256, 512)), matrices(12, (256, 512))
    theirs, (ours, _) = plain(kind, one), make(kind, other)
    for seed in range(60):
        for parameters, optimizer in ((one, theirs), (other, ours)):
            torch.manual_seed(seed)
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter) + 0.01 * parameter.detach()
            optimizer.step()
            torch.empty(int(parameters[0].numel()) * 3, device="cuda").fill_(float("nan"))
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right)


def test_equal_to_the_muon_of_torch() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        shapes = ((512, 1024), (1024, 512), (2048, 1024), (64, 64), (64, 64), (64, 64))

        def some(shapes: tuple[tuple[int, int], ...] = shapes, dtype: torch.dtype = dtype) -> list[torch.Tensor]:
            torch.manual_seed(0)
            return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]

        one, other = some(), some()
        theirs = torch.optim.Muon(one, lr=0.02, adjust_lr_fn="match_rms_adamw")
        ours = outboard.Muon([{"params": other, "use_muon": True}], lr=0.02)
        for seed in range(3):
            step(one, theirs, seed)
            step(other, ours, seed)
        for left, right in zip(one, other, strict=True):
            assert torch.equal(left, right)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch 2.11's own, when its compiler is imported
def test_compiled_and_together_is_about_the_same() -> None:
    one, other = matrices(6, (64, 128)), matrices(6, (64, 128))
    theirs, ours = plain("muon", one), plain("muon", other)
    for seed in range(2):
        step(one, theirs, seed)
        outboard.muon.set_ns_compile(True)
        step(other, ours, seed)
        outboard.muon.set_ns_compile(False)
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=2e-2, atol=2e-3)
