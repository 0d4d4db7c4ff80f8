"""Shapes, dtypes, groups and schedulers of parameters on a device. Each docstring quotes its case.

The cases of `test_cases_*.py`, which are of host memory, in every mode, attached and not. What other tests of lanes
have is not repeated.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import outboard
from lanes import Pair, Rig, Stack, Twin, TwinModel, host_only, set_grad, train
from oracle import assert_same, ref, round_to
from test_cases_groups import SCHEDULERS

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = pytest.mark.timeout(60, method="thread")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [FP32, BF16, FP16]
#: More than is taken in bundles.
CHUNK = 70_000
INF = math.inf


# ---- shapes and memory


def test_two_million_ones(lanes_device, mode, attached) -> None:
    """Two 1 Mi parameters of ones, gradients of ones, lr 0.01, 2 steps: equal to ref and to each other."""
    ones = torch.ones(1 << 20)
    pair = Pair(
        [lanes_device.parameter(ones) for _ in range(2)], attached=attached, mode=mode, lr=0.01, chunk_elems=None
    )
    for _ in range(2):
        pair.step_with([lanes_device.put(ones) for _ in pair.params])
    p, q = pair.params
    assert_same(p.detach().cpu(), q.detach().cpu())
    assert len(p.detach().unique()) == 1
    wanted = ref(ones[:1], [ones[:1]] * 2, lr=0.01)
    assert float(p.detach()[-1]) == pytest.approx(float(wanted), rel=1e-6)
    pair.check()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_16_bit_parameters_of_two_and_a_half_chunks(lanes_device, mode, dtype) -> None:
    """bf16 and fp16 parameters of 2.5 internal chunks with distinct values: every element as ref, the tail too."""
    start = torch.linspace(-2, 2, CHUNK * 5 // 2).to(dtype)
    grads = [torch.linspace(-1, 3, start.numel()).to(dtype), torch.linspace(3, -1, start.numel()).to(dtype)]
    pair = Pair([lanes_device.parameter(start)], mode=mode, lr=0.05, chunk_elems=CHUNK)
    for grad in grads:
        pair.step_with([lanes_device.put(grad)])
    pair.check()
    master = pair.opt.master(pair.params[0]).cpu()
    wanted = ref(start, grads, lr=0.05)
    assert torch.allclose(master.double(), wanted, rtol=1e-5, atol=1e-6)
    assert (master[-CHUNK // 2 :] != start[-CHUNK // 2 :]).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transfer", ["staged", "zero_copy"])
def test_guard_bytes(lanes_device, mode, transfer, dtype) -> None:
    """numel = chunk-1, chunk, chunk+1, 2*chunk+1; guard bytes around the buffers: no guard byte touched.

    Those of a bundle too; at several offsets from an aligned address. Their planes are each other's guards.
    """
    sizes = [CHUNK - 1, 4_095, CHUNK, 1, CHUNK + 1, 33, 2 * CHUNK + 1]
    guards = [64, 65, 67, 71, 66, 64, 65]
    weights, grads, around = [], [], []
    for size, guard in zip(sizes, guards, strict=True):
        where = slice(guard, guard + size)
        buffers = [torch.full((size + 2 * guard,), value, dtype=dtype) for value in (3.25, -7.5)]
        for buffer in buffers:
            buffer[where] = torch.randn(size).to(dtype)
        weight, grad = (lanes_device.put(buffer) for buffer in buffers)
        around.append((weight, grad, buffers[1], guard))
        weights.append(torch.nn.Parameter(weight[where]))
        grads.append(grad[where])
    pair = Pair(weights, mode=mode, transfer=transfer, chunk_elems=CHUNK, amsgrad=True)
    for step in range(3):
        # Not all of them: who has no gradient is not touched.
        pair.step_with([None if (number + step) % 3 == 0 else grad for number, grad in enumerate(grads)])
    pair.check()
    for weight, grad, grad_before, guard in around:
        for outside in (slice(None, guard), slice(-guard, None)):
            assert bool((weight[outside] == 3.25).all())
        assert_same(grad.cpu(), grad_before, "the gradient and what is around it")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_row_moves(lanes_device, mode, attached, dtype) -> None:
    """Shapes (3,1000), (1000,3), (2,3,5), (): every row moves as ref."""
    shapes = [(3, 1000), (1000, 3), (2, 3, 5), (), (70, 1001)]
    start = [torch.randn(shape).to(dtype) for shape in shapes]
    pair = Pair([lanes_device.parameter(values) for values in start], attached=attached, mode=mode, lr=0.1)
    grads = [torch.randn(shape).to(dtype) + 3 for shape in shapes]
    pair.step_with([lanes_device.put(grad) for grad in grads])
    pair.check()
    for p, values, grad in zip(pair.params, start, grads, strict=True):
        wanted = ref(values, [grad], lr=0.1)
        assert torch.allclose(pair.opt.master(p).cpu().double(), wanted, rtol=1e-5, atol=1e-6)
        moved = p.detach().cpu() != values
        assert bool(moved.any(-1).all() if moved.ndim else moved)


def test_alternating_gradient_formats(lanes_device, mode, attached) -> None:
    """channels_last and contiguous gradients for the same parameter on alternate steps: as ref."""
    shape = (16, 24, 15, 15)
    params = [lanes_device.parameter(torch.randn(shape)) for _ in range(2)]
    params[1].data = params[1].data.to(memory_format=torch.channels_last)
    pair = Pair(params, attached=attached, mode=mode)
    for step in range(4):
        formats = [torch.channels_last, torch.contiguous_format]
        grads = [torch.randn(shape).to(memory_format=formats[(step + number) % 2]) for number in range(2)]
        pair.step_with([lanes_device.put(grad) for grad in grads])
    pair.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone"])
def test_one_element_bias_in_its_own_group(lanes_device, mode, attached, dtype, alone) -> None:
    """A one-element bias in a group of its own: works."""

    def groups(params: list[Any]) -> list[Any]:
        *others, bias = params
        return [{"params": others, "weight_decay": 0.1}] * bool(others) + [{"params": [bias], "weight_decay": 0.0}]

    shapes = [(1,)] if alone else [(300, 300), (8, 8), (1,)]
    params = [lanes_device.parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    before = params[-1].detach().clone()
    pair = Pair(params, groups, attached=attached, mode=mode, lr=0.05)
    for _ in range(3):
        pair.step()
    pair.check()
    assert bool((params[-1].detach() != before).all())


def free_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}["MemAvailable"]


@pytest.mark.slow
@pytest.mark.timeout(600, method="thread")
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "cpu"},
        {"mode": "gpu", "transfer": "staged"},
        {"mode": "gpu", "transfer": "zero_copy", "chunk_elems": 1 << 32},
        {"mode": "auto"},
        {"device_state_bytes": 1.0},
    ],
    ids=str,
)
def test_more_than_2_31_elements(lanes_device, options) -> None:
    """More than 2^31 elements: the tail is updated."""
    numel = (1 << 31) + 10_007
    state = 6 * numel
    needed = state + (4 << 30) + (4 * numel if lanes_device.is_simulated else 0)
    if free_bytes() < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free memory, has {free_bytes() >> 30}")
    if not lanes_device.is_simulated and torch.cuda.mem_get_info()[0] < 4 * numel + state:
        pytest.skip("needs 21 GiB of free memory on the device")
    p = torch.nn.Parameter(torch.zeros(numel, dtype=BF16, device=lanes_device.device))
    p.grad = torch.ones_like(p.detach())
    opt = outboard.AdamW([p], lr=0.5, state_dtype=BF16, weight_decay=0.0, compute_grad_norm=True, **options)
    opt.step()
    assert opt.stats()["elements"] == numel
    assert opt.last_grad_norm == pytest.approx(numel**0.5, rel=1e-9)
    for where in (slice(0, 5000), slice((1 << 31) - 5000, (1 << 31) + 5000), slice(numel - 5000, numel)):
        assert bool((p.detach()[where] == -0.5).all())
        assert bool((opt.state[p]["exp_avg"][where] > 0).all())
    assert bool((p.detach() == -0.5).all())


# ---- dtypes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_default_dtype_float64(lanes_device, mode, attached, dtype) -> None:
    """`set_default_dtype(float64)`: works, and changes no bit."""
    params = [lanes_device.parameter(torch.randn(size).to(dtype)) for size in (70_001, 100)]
    twin = Twin(params, lr=torch.tensor(1e-2), amsgrad=True, max_grad_norm=1.0)
    grads = [[torch.randn_like(p) for p in params] for _ in range(3)]
    for of_step in grads:
        twin.step(of_step)
    torch.set_default_dtype(torch.float64)
    pair = Pair(
        params, attached=attached, mode=mode, lr=torch.tensor(1e-2, dtype=FP32), amsgrad=True, max_grad_norm=1.0
    )
    for of_step in grads:
        pair.step_with(of_step)
    twin.check(pair.opt)
    for p in params:
        state = pair.opt.state[p]
        assert [state[key].dtype for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")] == [FP32] * 3
        assert state["step"].dtype is torch.float64
        assert pair.opt.master(p).dtype is FP32
    assert pair.opt.last_grad_norm == twin.optimizer.last_grad_norm


@pytest.mark.parametrize("size", [1001, 70_001], ids=["tiny", "large"])
def test_fp16_zero_gradient(lanes_device, mode, attached, size) -> None:
    """fp16 parameter, zero gradient, eps 1e-8: finite; only the decay moves it."""
    start = torch.linspace(-2, 2, size).to(FP16)
    for decay in (0.1, 0.0):
        pair = Pair([lanes_device.parameter(start)], attached=attached, mode=mode, lr=0.1, weight_decay=decay, eps=1e-8)
        for _ in range(10):
            pair.step_with([torch.zeros_like(pair.params[0])])
        pair.check()
        p, master = pair.params[0].detach().cpu(), pair.opt.master(pair.params[0]).cpu()
        assert bool(p.isfinite().all())
        wanted = ref(start, [torch.zeros(size)] * 10, lr=0.1, weight_decay=decay)
        assert torch.allclose(master.double(), wanted, rtol=1e-5, atol=0)
        assert_same(p, round_to(master, FP16) if decay else start)


@pytest.mark.parametrize("asked", [None, FP32, BF16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0, 1.0], ids=["on the host", "resident"])
def test_state_is_fp32_unless_asked(lanes_device, share, dtype, asked) -> None:
    """bf16 parameters: state is fp32 unless asked otherwise, and `stats()` says which."""
    options = {} if asked is None else {"state_dtype": asked}
    pair = Pair([lanes_device.parameter(torch.randn(100).to(dtype))], device_state_bytes=share, amsgrad=True, **options)
    pair.step()
    wanted = asked or FP32
    state = pair.opt.state[pair.params[0]]
    assert {state[key].dtype for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")} == {wanted}
    assert pair.opt.stats()["state_dtype"] == str(wanted).removeprefix("torch.")
    pair.check()


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": -1.0},
        {"lr": math.nan},
        {"lr": "0.1"},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"weight_decay": math.nan},
    ],
    ids=str,
)
def test_bad_hyperparameters(lanes_device, attached, bad) -> None:
    """Bad lr, betas, eps, weight_decay (negative, NaN, beta = 1, strings): ValueError or TypeError, as torch."""
    p, q = (lanes_device.parameter(torch.randn(70_000)) for _ in range(2))
    with pytest.raises((ValueError, TypeError)):
        torch.optim.AdamW([q], **bad)
    with pytest.raises((ValueError, TypeError)):
        outboard.AdamW([q], **bad)
    pair = Pair([p], attached=attached)
    pair.step()
    with pytest.raises((ValueError, TypeError)):
        pair.opt.add_param_group({"params": [q], **bad})
    assert len(pair.opt.param_groups) == 1
    pair.step()
    pair.check()


@pytest.mark.parametrize("bad", [{"lr": "0.1"}, {"betas": (0.9, None)}, {"eps": "x"}, {"weight_decay": None}], ids=str)
def test_a_setting_that_is_no_number_is_refused_at_the_step(lanes_device, mode, attached, bad) -> None:
    """The step that refuses it changes nothing, and the next is right."""
    pair = Pair([lanes_device.parameter(torch.randn(size)) for size in (70_000, 5)], attached=attached, mode=mode)
    pair.step()
    good = dict(pair.opt.param_groups[0])
    pair.opt.param_groups[0].update(bad)
    for p in pair.params:
        set_grad(p, torch.ones_like(p.detach()))
    with pytest.raises((ValueError, TypeError), match=next(iter(bad))):
        pair.opt.step()
    pair.check("after the refusal")
    pair.opt.param_groups[0].update(good)
    pair.step()
    pair.check()


# ---- groups, schedulers, frozen parameters


@pytest.fixture(params=["cpu, float", "gpu, attached, tensor", "auto, attached, float", "auto, tensor"])
def setting(request: pytest.FixtureRequest) -> str:
    """Return a mode, whether attached, and the kind of learning rate."""
    return str(request.param)


@pytest.mark.usefixtures("small_ones_have_hooks")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(lanes_device, name, setting) -> None:
    """Every torch scheduler, OneCycle and ReduceLROnPlateau included, over several groups, float and tensor lr."""
    model = Stack(700, 5, 3000, 60).to(lanes_device.device)
    twin = TwinModel(model)

    def number(value: float) -> Any:
        return torch.tensor(value, dtype=torch.float64) if "tensor" in setting else value

    def groups(params: list[Any]) -> list[dict[str, Any]]:
        return [
            {"params": params[:1], "lr": number(1e-2)},
            {"params": params[1:3], "lr": number(3e-3), "weight_decay": 0.0, "betas": (0.8, 0.95)},
            {"params": params[3:], "weight_decay": 0.1},
        ]

    with host_only():
        twin.twin.optimizer = outboard.AdamW(groups(twin.twin.params), lr=number(2e-3), threads=1)
    opt = outboard.AdamW(groups(list(model.parameters())), lr=number(2e-3), mode=setting.split(",")[0], threads=1)
    if "attached" in setting:
        opt.attach(model)
    schedules = [SCHEDULERS[name](optimizer) for optimizer in (opt, twin.optimizer)]
    rates = set()
    for step in range(12):
        train(model, opt, twin, 1, step)
        if step < 11:
            for schedule in schedules:
                schedule.step(*([1.0 / (1 + step % 4)] if "Plateau" in name else []))
        for a, b in zip(opt.param_groups, twin.optimizer.param_groups, strict=True):
            assert float(a["lr"]) == float(b["lr"])
            assert isinstance(a["lr"], torch.Tensor) == ("tensor" in setting)
            rates.add(float(a["lr"]))
    assert len(rates) > 3, "it changes something"
    assert (opt.stats()["eager_updates"] > 0) == ("attached" in setting)
    twin.check(opt)


@pytest.mark.usefixtures("small_ones_have_hooks")
@pytest.mark.parametrize("sizes", [(70_000, 300, 66_000), (5, 6, 7)], ids=["hooked", "tiny"])
def test_frozen_parameters(lanes_device, mode, attached, sizes) -> None:
    """Frozen parameters in the list; one unfrozen later: skipped; then trained."""
    model = Stack(800, *sizes)
    model[2].weight.requires_grad_(False)
    model[3].weight.requires_grad_(False)
    rig = Rig(lanes_device, model=model, attached=attached, mode=mode)
    start = [p.detach().clone() for p in rig.params]
    rig.train(3)
    rig.check()
    for index in (2, 3):
        assert_same(rig.params[index].detach(), start[index])
    assert set(rig.opt.state_dict()["state"]) == {0, 1}
    for m in (rig.model, rig.twin.model):
        m[2].weight.requires_grad_(True)
    rig.twin.twin.params[2].requires_grad_(True)
    rig.train(3, 3)
    rig.check()
    assert [float(rig.opt.state[rig.params[index]]["step"]) for index in range(3)] == [6, 6, 3]
    assert set(rig.opt.state_dict()["state"]) == {0, 1, 2}
    assert_same(rig.params[3].detach(), start[3])


def test_decay_and_no_decay(lanes_device, mode, attached) -> None:
    """Decay / no-decay split; a group with a single bias; add_param_group after some steps: as torch."""
    shapes = [(300, 300), (16,), (1,), (70_001,), (32, 16)]
    params = [lanes_device.parameter(torch.randn(shape)) for shape in shapes]

    def groups(params: list[Any]) -> list[Any]:
        return [
            {"params": [params[0]], "weight_decay": 0.1},
            {"params": [params[1]], "weight_decay": 0.0},
            {"params": params[2], "weight_decay": 0.0, "lr": 1e-2},
        ]

    pair = Pair(params, groups, attached=attached, mode=mode, lr=3e-3)
    torchs = [p.detach().cpu().clone().requires_grad_() for p in params]
    reference = torch.optim.AdamW(groups(torchs), lr=3e-3, fused=True)
    added = {3: {"params": 3, "betas": (0.5, 0.9)}, 6: {"params": 4, "lr": 0.1, "maximize": True}}
    for step in range(9):
        if step in added:
            for opt, of in ((pair.opt, params), (pair.twin.optimizer, pair.twin.params), (reference, torchs)):
                opt.add_param_group({**added[step], "params": of[added[step]["params"]]})
        listed = 3 + (step >= 3) + (step >= 6)
        grads = [torch.randn(shape) if number < listed else None for number, shape in enumerate(shapes)]
        for p, grad in zip(torchs, grads, strict=True):
            p.grad = grad
        reference.step()
        pair.step_with([None if grad is None else lanes_device.put(grad) for grad in grads])
    pair.check()
    assert [float(pair.opt.state[p]["step"]) for p in params] == [9, 9, 9, 6, 3]
    for p, q in zip(params, torchs, strict=True):
        assert torch.allclose(p.detach().cpu(), q.detach(), rtol=1e-6, atol=1e-7)
