"""The state of `outboard.Muon` in one process: saved and loaded, copied, and on the host between steps."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import outboard
from lanes import LanesDevice, host_only
from muons import MATRICES, VECTORS, assert_same, give_gradients, make, muon, step, storages, twins
from offloading import hazards
from outboard.muon import param_groups, set_ns_compile


@pytest.fixture(autouse=True)
def no_compilation() -> Iterator[None]:
    was = outboard.muon.ns_compile()
    set_ns_compile(False)
    yield
    set_ns_compile(was)


# ---- Checkpoints and copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("source", [False, True])
def test_save_load_and_go_on(lanes_device: LanesDevice, source: bool, into: bool) -> None:
    if not lanes_device.is_simulated:
        pytest.skip("the same on CUDA: tests/test_muon_cuda.py")
    whole, uninterrupted = twins(False)
    first, saving = twins(source)
    for seed in range(3):
        step(whole, uninterrupted, seed)
        step(first, saving, seed)
    file = io.BytesIO()
    torch.save(saving.state_dict(), file)
    file.seek(0)
    second, resumed = twins(into)
    with torch.no_grad():
        for left, right in zip(second, first, strict=True):
            left.copy_(right)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for seed in range(3, 6):
        step(whole, uninterrupted, seed)
        step(second, resumed, seed)
    assert_same(whole, second)
    assert resumed.state[second[-1]]["step"] == 6


def test_reading_before_the_first_step_changes_nothing() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [outboard.Muon(param_groups(model), lr=0.02) for model in models]
    assert optimizers[0].state_dict()["state"] == {}
    get_optimizer_state_dict(models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        for seed in range(2):
            step(list(model.parameters()), optimizer, seed)
    assert_same(list(models[0].parameters()), list(models[1].parameters()))


@pytest.mark.parametrize("offload", [False, True])
def test_copies_go_on_with_the_same_bits(lanes_device: LanesDevice, offload: bool) -> None:
    if not lanes_device.is_simulated:
        pytest.skip("the same on CUDA: tests/test_muon_cuda.py")
    parameters, optimizer = twins(offload)
    step(parameters, optimizer, 0)
    others = [copy.deepcopy((parameters, optimizer)), pickle.loads(pickle.dumps((parameters, optimizer)))]
    step(parameters, optimizer, 1)
    for copied, theirs in others:
        assert not theirs.cpu_offload
        step(copied, theirs, 1)
        assert_same(parameters, copied)
        with pytest.raises(ValueError, match="use_muon"):
            theirs.add_param_group({"params": make(VECTORS)})


# ---- State on the host ----------------------------------------------------------------------------------------------


@pytest.fixture
def simulated(lanes_device: LanesDevice) -> LanesDevice:
    if not lanes_device.is_simulated:
        pytest.skip("the same on CUDA: tests/test_muon_cuda.py")
    return lanes_device


@pytest.mark.parametrize("vectors", [(), VECTORS])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"chunk_size": 3, "warmup_step": 0}])
def test_the_same_bits_as_without(
    simulated: LanesDevice, vectors: tuple[tuple[int, ...], ...], options: dict[str, Any]
) -> None:
    one, other = make(MATRICES + vectors), make(MATRICES + vectors)
    theirs = muon(one[:4], one[4:], **options)
    ours = muon(other[:4], other[4:], **options)
    ours.turn_on_cpu_offload()
    assert ours.host_buffers() == []
    for seed in range(3):
        step(one, theirs, seed)
        step(other, ours, seed)
        assert_same(one, other)
        assert set(storages(ours)) == {0}
    assert sum(buffer.numel() for buffer in ours.host_buffers()) >= 4 * 64 * 128 * 4
    assert {buffer.dtype for buffer in ours.host_buffers()} == {torch.uint8}
    assert hazards(ours) == []


def test_first_states_whatever_the_order_of_copies(simulated: LanesDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    # Products would give the copies time.
    monkeypatch.setattr("outboard.muon._chunks.orthogonalize", lambda matrices, _: matrices.bfloat16())
    shapes = ((512, 512),) * 8
    for order in range(4):
        monkeypatch.setattr("outboard._lanes.LaneOptions.simulate", order)
        one, other = make(shapes), make(shapes)
        theirs, ours = muon(one, chunk_size=1), muon(other, chunk_size=1)
        ours.turn_on_cpu_offload()
        step(one, theirs, 0)
        step(other, ours, 0)
        ours.turn_off_cpu_offload()
        for left, right in zip(one, other, strict=True):
            assert torch.equal(theirs.state[left]["momentum_buffer"], ours.state[right]["momentum_buffer"])


def test_first_states_beside_states_that_are_there_already(simulated: LanesDevice) -> None:
    # A larger matrix has its first gradient late.
    shapes = ((64, 64), (96, 96), (256, 128), (64, 64))
    one, other = make(shapes), make(shapes)
    theirs, ours = muon(one[:3], one[3:], chunk_size=1), muon(other[:3], other[3:], chunk_size=1)
    ours.turn_on_cpu_offload()
    for seed in range(4):
        for parameters, optimizer in ((one, theirs), (other, ours)):
            give_gradients(parameters, seed)
            if seed < 2:
                parameters[2].grad = None
            optimizer.step()
        assert_same(one, other)
    assert set(storages(ours)) == {0}


def test_toggled_every_second_step(simulated: LanesDevice) -> None:
    one, theirs = twins(False)
    other, ours = twins(False)
    tensors: dict[Any, Any] = {}
    for seed in range(6):
        (ours.turn_on_cpu_offload if seed // 2 % 2 == 0 else ours.turn_off_cpu_offload)()
        (ours.turn_on_cpu_offload if seed // 2 % 2 == 0 else ours.turn_off_cpu_offload)()  # again: nothing happens
        step(one, theirs, seed)
        step(other, ours, seed)
        assert_same(one, other)
        assert ours.cpu_offload == (seed // 2 % 2 == 0)
        assert bool(ours.host_buffers()) == ours.cpu_offload
        for parameter, state in ours.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    # The same objects, of the same shape and dtype, wherever their values are.
                    assert tensors.setdefault((parameter, key), value) is value
                    assert value.shape == parameter.shape
                    assert value.dtype == parameter.dtype
    ours.turn_off_cpu_offload()
    for index, state in theirs.state_dict()["state"].items():
        for key, value in state.items():
            twin = ours.state_dict()["state"][index][key]
            assert torch.equal(value, twin) if isinstance(value, torch.Tensor) else value == twin


def test_checkpoints_are_refused_or_asked_for(simulated: LanesDevice) -> None:
    parameters, optimizer = twins(False)
    step(parameters, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.turn_on_cpu_offload()
    with pytest.raises(RuntimeError, match=r"turn_off_cpu_offload\(\) before checkpoint save"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"turn_off_cpu_offload\(\) before checkpoint load"):
        optimizer.load_state_dict(saved)
    optimizer.turn_on_cpu_offload(checkpoint=True)
    again = optimizer.state_dict()
    for index, state in saved["state"].items():
        for key, value in state.items():
            assert torch.equal(value, again["state"][index][key]) if isinstance(value, torch.Tensor) else True
    optimizer.load_state_dict(saved)
    assert set(storages(optimizer)) == {0}
    optimizer.turn_off_cpu_offload()
    # What is loaded while off stays on the device, and leaves when turned on.
    optimizer.load_state_dict(saved)
    assert 0 not in storages(optimizer)
    assert optimizer.host_buffers() == []
    optimizer.turn_on_cpu_offload()
    assert set(storages(optimizer)) == {0}
    # torch's loading shares memory with what is loaded, which is nobody's to take.
    assert torch.isfinite(saved["state"][0]["momentum_buffer"].sum())
    for index, state in saved["state"].items():
        for key, value in state.items():
            assert torch.equal(value, again["state"][index][key]) if isinstance(value, torch.Tensor) else True


def test_values_that_are_elsewhere_are_not_read(simulated: LanesDevice) -> None:
    parameters, optimizer = twins(False)
    optimizer.turn_on_cpu_offload()
    step(parameters, optimizer, 0)
    buffer = optimizer.state[parameters[0]]["momentum_buffer"]
    for read in (lambda: buffer.sum(), lambda: buffer + 1, lambda: buffer.clone(), lambda: torch.equal(buffer, buffer)):
        with pytest.raises(RuntimeError, match=r"on the host.*turn_off_cpu_offload"):
            read()
    assert "on the host" in repr(buffer)
    optimizer.turn_off_cpu_offload()
    assert type(buffer) is torch.Tensor
    assert buffer.abs().sum() > 0


def test_a_failure_in_mid_step_can_be_gone_on_from(simulated: LanesDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from outboard.muon import _chunks

    parameters, optimizer = twins(False, chunk_size=2)
    optimizer.turn_on_cpu_offload()
    step(parameters, optimizer, 0)
    with monkeypatch.context() as patch:
        patch.setattr(_chunks._adamw, "step", lambda *_: (_ for _ in ()).throw(RuntimeError("the math has failed")))
        with pytest.raises(RuntimeError, match="the math has failed"):
            step(parameters, optimizer, 1)
    assert set(storages(optimizer)) == {0}
    optimizer.turn_off_cpu_offload()
    optimizer.turn_on_cpu_offload()
    step(parameters, optimizer, 2)
    assert set(storages(optimizer)) == {0}


def test_deleting_frees_everything_at_once(simulated: LanesDevice) -> None:
    parameters, optimizer = twins(False)
    optimizer.turn_on_cpu_offload()
    step(parameters, optimizer, 0)
    assert optimizer._hollow is not None
    gone = [weakref.ref(optimizer), weakref.ref(optimizer._hollow)]
    gone += [weakref.ref(carrier) for carrier in optimizer._hollow.carriers.all()]  # type: ignore[arg-type]
    gc.disable()
    try:
        del optimizer
        assert [reference() for reference in gone] == [None] * 3
    finally:
        gc.enable()


def test_in_host_memory_there_is_nothing_to_offload() -> None:
    one, theirs = twins(False)
    other, ours = twins(False)
    ours.turn_on_cpu_offload()
    for seed in range(2):
        step(one, theirs, seed)
        step(other, ours, seed)
    assert ours.cpu_offload
    assert ours.host_buffers() == []
    assert 0 not in storages(ours)
    with pytest.raises(RuntimeError, match="before checkpoint save"):
        ours.state_dict()
    ours.turn_off_cpu_offload()
    ours.load_state_dict(ours.state_dict())
    assert_same(one, other)


# ---- Random runs ----------------------------------------------------------------------------------------------------


def random_run(seed: int, order: int | None, gives: float) -> list[torch.Tensor]:
    """Train matrices and vectors with random shapes, gradients, loads and toggles; return the weights.

    Parameters
    ----------
    seed : int
        Of everything but what is on the host.
    order : int, optional
        The order in which copies are done; None for an optimizer whose state stays on the device.
    gives : float
        How often a parameter has a gradient.
    """
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    matrices = [
        tensor(chance.choice([4, 16, 9]), chance.choice([4, 32])).requires_grad_() for _ in range(chance.randint(1, 9))
    ]
    vectors = [tensor(chance.choice([5, 64])).requires_grad_() for _ in range(chance.randint(1, 4))]
    chunk_size, warmup_step = chance.choice([-1, 1, 2]), chance.choice([0, 1, 5])
    optimizer = muon(matrices, vectors, chunk_size=chunk_size, warmup_step=warmup_step)
    if order is not None:
        optimizer.turn_on_cpu_offload(checkpoint=True)
    saved = None
    for _ in range(7):
        for parameter in matrices + vectors:
            grad = tensor(*parameter.shape)
            parameter.grad = grad if chance.random() < gives else None
        optimizer.step()
        event = chance.random()
        if event < 0.15:
            # torch's are the tensors themselves.
            saved = copy.deepcopy(optimizer.state_dict())
        elif event < 0.3 and saved is not None:
            optimizer.load_state_dict(copy.deepcopy(saved))
        elif event < 0.4:
            larger = tensor(40, 40).requires_grad_()
            matrices.append(larger)
            saved = None
            optimizer.add_param_group({"params": [larger], "use_muon": True})
        elif event < 0.6 and order is not None:
            if optimizer.cpu_offload:
                optimizer.turn_off_cpu_offload()
            else:
                optimizer.turn_on_cpu_offload(checkpoint=True)
    assert not optimizer.cpu_offload or hazards(optimizer) == []
    return matrices + vectors


@pytest.mark.parametrize("gives", [1.0, 0.6])
@pytest.mark.parametrize("seed", range(30))
def test_random_runs(simulated: LanesDevice, monkeypatch: pytest.MonkeyPatch, seed: int, gives: float) -> None:
    monkeypatch.setattr("outboard._lanes.LaneOptions.simulate", seed)
    with host_only():
        expected = random_run(seed, None, gives)
    assert_same(random_run(seed, seed, gives), expected)
