"""What DeepSpeed's unit tests of its CPU Adam are given, given to outboard.

The inputs are those of its tests of CPU Adam, AdamW, hybrid Adam and subgroups (sizes, dtypes, settings, numbers of
steps; its largest sizes scaled down). It compares norms within a hundredth; here bits are compared, with the recipe
written a second time (`oracle`), with torch's fused kernels, or with another way to the same result.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch

import outboard
from fused import SMALL_RINGS, fused
from lanes import Pair, host_only, set_grad
from oracle import Oracle, Ref, assert_same

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [FP16, BF16, FP32]
SIZES = [3, 8, 16, 22, 64, 127, 128, 1000, 1003, 1024, 100_003]
#: Together in one call there.
TOGETHER = [64, 22, 1024, 131_072]
CLASSES = {True: outboard.AdamW, False: outboard.Adam}


def leaf(values: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values.clone())


def noise(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size).to(dtype)


# ---- one parameter of each size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_ten_steps_of_each_size(size, dtype) -> None:
    values = noise(size, dtype)
    p = leaf(values)
    optimizer, oracle = outboard.AdamW([p]), Oracle(p)
    for _ in range(10 if size < 10_000 else 3):
        p.grad = noise(size, dtype)
        optimizer.step()
        oracle.step(p.grad)
    oracle.assert_equal(optimizer, p)


@pytest.mark.parametrize(("size", "steps"), [(1_048_576, 10), (3_000_000, 2)])
def test_large_ones_have_the_bits_of_torch_fused(size, steps, torch_threads) -> None:
    values = noise(size, FP32)
    p, q = leaf(values), leaf(values)
    ours, theirs = outboard.AdamW([p]), fused([q])
    for _ in range(steps):
        p.grad = noise(size, FP32)
        q.grad = p.grad
        ours.step()
        theirs.step()
    assert_same(p, q)
    for key in ("exp_avg", "exp_avg_sq"):
        assert_same(ours.state[p][key], theirs.state[q][key], key)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [22, 64, 1024, 1_048_576])
def test_on_a_device(lanes_device, mode, size, dtype) -> None:
    """There a parameter on a device is an assertion that fails; here its update has the bits of the host's."""
    pair = Pair([lanes_device.parameter(noise(size, dtype))], mode=mode, chunk_elems=300_000, **SMALL_RINGS)
    for _ in range(2):
        pair.step()
    pair.check()


# ---- AdamW's rule of weight decay and Adam's


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_both_rules(adamw_mode, dtype) -> None:
    """Three parameters of 1024, weight decay 0.1, 5 steps: as the recipe; and near the mathematics, for fp32."""
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    params = [leaf(noise(1024, dtype)) for _ in range(3)]
    optimizer = CLASSES[adamw_mode](params, **settings)
    oracles = [Oracle(p, decoupled=adamw_mode, **settings) for p in params]
    exact = [Ref(p, decoupled=adamw_mode, **settings) for p in params]
    for _ in range(5):
        for p, oracle, ref in zip(params, oracles, exact, strict=True):
            p.grad = noise(1024, dtype)
            oracle.step(p.grad)
            ref.step(p.grad)
        optimizer.step()
    for p, oracle, ref in zip(params, oracles, exact, strict=True):
        oracle.assert_equal(optimizer, p)
        # Within fp32's own resolution of the float64 values; the masters of 16-bit weights, too.
        torch.testing.assert_close(optimizer.master(p).double(), ref.weight, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("cls", "adamw_mode", "is_right"),
    [
        (outboard.AdamW, True, True),
        (outboard.AdamW, False, False),
        (outboard.Adam, False, True),
        (outboard.Adam, True, False),
    ],
)
def test_the_class_says_the_rule(cls, adamw_mode, is_right) -> None:
    """There an Adam with `adam_w_mode` is an AdamW without a word; here the contradiction is an error."""
    p = leaf(noise(10, FP16))
    if is_right:
        optimizer = cls([p], lr=0.00015, decoupled_weight_decay=adamw_mode, max_grad_norm=1.0)
        assert optimizer.defaults["decoupled_weight_decay"] is adamw_mode
    else:
        with pytest.raises(ValueError, match=r"decoupled_weight_decay=.* contradicts"):
            cls([p], lr=0.00015, decoupled_weight_decay=adamw_mode, max_grad_norm=1.0)


def test_bias_correction_is_not_an_option() -> None:
    """Nor is it in torch: refused by name, not ignored."""
    for cls in (outboard.AdamW, torch.optim.AdamW):
        with pytest.raises(TypeError, match="bias_correction"):
            cls([leaf(torch.ones(4))], bias_correction=False)


# ---- fp32 weights with 16-bit gradients that are scaled


@pytest.mark.parametrize("grad_scale", [1.0, 128.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_scaled_gradients_of_16_bits(dtype, adamw_mode, weight_decay, grad_scale) -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": weight_decay}
    p = leaf(noise(1003, FP32))
    optimizer, oracle = CLASSES[adamw_mode]([p], **settings), Oracle(p, decoupled=adamw_mode, **settings)
    for _ in range(5):
        grad = noise(1003, dtype)
        set_grad(p, grad.clone())
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(grad_scale), torch.tensor(0.0)
        optimizer.step()
        oracle.step(grad, grad_scale=grad_scale)
    oracle.assert_equal(optimizer, p)


def test_groups_keep_their_own_steps_and_settings() -> None:
    """Two fp32 parameters with gradients of two dtypes, one of which has been trained for 3 steps before."""
    settings: list[dict[str, Any]] = [{"lr": 1e-2, "weight_decay": 0.0}, {"lr": 2e-3, "weight_decay": 0.1}]
    params = [leaf(noise(1003, FP32)) for _ in range(2)]
    common: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6}
    groups = [{"params": [p], **own} for p, own in zip(params, settings, strict=True)]
    optimizer = outboard.AdamW(groups, **common)
    oracles = [Oracle(p, **own, **common) for p, own in zip(params, settings, strict=True)]
    optimizer.state[params[1]]["step"].fill_(3)
    oracles[1].step_count = 3
    for _ in range(5):
        for p, oracle, dtype in zip(params, oracles, (FP16, BF16), strict=True):
            grad = noise(1003, dtype)
            set_grad(p, grad.clone())
            oracle.step(grad, grad_scale=128.0)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(128.0), torch.tensor(0.0)
        optimizer.step()
    for p, oracle in zip(params, oracles, strict=True):
        oracle.assert_equal(optimizer, p)
    assert [float(optimizer.state[p]["step"]) for p in params] == [5, 8]


# ---- many at once and one by one; many threads and one


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_together_as_one_by_one_with_any_number_of_threads(dtype) -> None:
    values = [noise(size, dtype) for size in TOGETHER]
    grads = [[noise(size, dtype) for size in TOGETHER] for _ in range(5)]
    settings = {"lr": 1e-3, "weight_decay": 0.0}
    found = []
    for threads, together in ((1, True), (min(4, os.cpu_count() or 1) + 1, True), (2, False)):
        params = [leaf(v) for v in values]
        lists = [params] if together else [[p] for p in params]
        optimizers = [outboard.AdamW(of, threads=threads, chunk_elems=5_000, **settings) for of in lists]
        for of_step in grads:
            for p, grad in zip(params, of_step, strict=True):
                p.grad = grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        states = {p: state for optimizer in optimizers for p, state in optimizer.state.items()}
        found.append([(p.detach(), states[p]["exp_avg"], states[p]["exp_avg_sq"]) for p in params])
    for other in found[1:]:
        for wanted, got in zip(found[0], other, strict=True):
            for a, b in zip(wanted, got, strict=True):
                assert_same(b, a)


# ---- moments in 16 bits


@pytest.mark.parametrize("size", [64, 1024])
def test_moments_of_16_bits(size) -> None:
    values = noise(size, BF16)
    p, q = leaf(values), leaf(values)
    wide, narrow = outboard.AdamW([p]), outboard.AdamW([q], state_dtype=BF16)
    for _ in range(10):
        p.grad = noise(size, BF16)
        q.grad = p.grad.clone()
        wide.step()
        narrow.step()
    for key in ("exp_avg", "exp_avg_sq"):
        assert wide.state[p][key].dtype is FP32
        assert narrow.state[q][key].dtype is BF16
        assert narrow.state[q][key].device.type == "cpu"
    # The one place where a tolerance is meant: half of the one of its test.
    torch.testing.assert_close(q.float().norm(), p.float().norm(), rtol=2.5e-2, atol=0.0)


# ---- subgroups: some parameters of an optimizer are stepped, others are not


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 128, 1024])
def test_subgroups_step_by_themselves(size, dtype) -> None:
    """There `step_subgroup(id)`; here those that have a gradient are stepped, each with a count of its own."""
    params = [leaf(noise(size, dtype)) for _ in range(2)]
    optimizer, oracles = outboard.AdamW([{"params": [p]} for p in params]), [Oracle(p) for p in params]
    for which in (0, 1, 0, 0, 1):
        optimizer.zero_grad()
        params[which].grad = noise(size, dtype)
        optimizer.step()
        oracles[which].step(params[which].grad)
    assert [float(optimizer.state[p]["step"]) for p in params] == [3, 2]
    for p, oracle in zip(params, oracles, strict=True):
        oracle.assert_equal(optimizer, p)


def test_parameters_swapped_in_one_group() -> None:
    """Two parameters take turns in one group of an optimizer: each has its own state, and the same bits."""
    values = noise(128, FP32)
    a, b = leaf(values), leaf(values)
    optimizer, oracle = outboard.AdamW([a]), Oracle(a)
    for step in range(1, 5):
        grad = noise(128, FP32)
        oracle.step(grad)
        for p in (a, b):
            optimizer.param_groups[0]["params"] = [p]
            p.grad = grad.clone()
            optimizer.step()
            oracle.assert_equal(optimizer, p, f"step {step}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rollback(dtype) -> None:
    """There `rollback_subgroup` counts a step back; here what was saved before is loaded, which undoes all."""
    p = leaf(noise(64, dtype))
    optimizer = outboard.AdamW([p])
    grads = [noise(64, dtype) for _ in range(3)]
    before = []
    for grad in grads:
        before.append((p.detach().clone(), copy.deepcopy(optimizer.state_dict())))
        p.grad = grad.clone()
        optimizer.step()
    after = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
    for step in (2, 1, 0):
        weights, saved = before[step]
        with torch.no_grad():
            p.copy_(weights)
        optimizer.load_state_dict(saved)
        assert float(optimizer.state[p]["step"]) == step
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    assert_same(p, after[0])
    for key, value in after[1]["state"][0].items():
        assert_same(optimizer.state[p][key], value, key)


def test_nothing_to_roll_back() -> None:
    """An optimizer that has never stepped: what it saves is empty, and loading that is no error."""
    p = leaf(noise(64, FP32))
    optimizer = outboard.AdamW([p])
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    optimizer.load_state_dict(saved)
    assert float(optimizer.state[p]["step"]) == 0


# ---- a half on the host, a half on a device


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 16])
def test_hybrid(lanes_device, size, dtype) -> None:
    """One tensor in host memory; its halves, one on the host and one on a device, have its bits."""
    values, grad = noise(size, dtype), noise(size, dtype)
    here, there = (half.clone() for half in values.chunk(2))
    whole, on_host, on_device = leaf(values), leaf(here), lanes_device.parameter(there)
    with host_only():
        optimizers = [outboard.AdamW([whole]), outboard.AdamW([on_host])]
    optimizers.append(outboard.AdamW([on_device], **SMALL_RINGS))
    for _ in range(3):
        whole.grad = grad
        on_host.grad, device_grad = (half.clone() for half in grad.chunk(2))
        on_device.grad = lanes_device.put(device_grad)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(torch.cat([on_host.detach(), on_device.detach().cpu()]), whole.detach())
