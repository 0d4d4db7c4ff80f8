"""Gradients that leave the device during backward: what leaves, what stays, and what is never used twice or lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import outboard
from lanes import (
    RIG_SIZES,
    FailsInTheMiddle,
    Rig,
    Stack,
    TwinModel,
    backward_fails,
    host_only,
    plain_grad,
)
from oracle import assert_same

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = [pytest.mark.timeout(60, method="thread"), pytest.mark.usefixtures("small_ones_have_hooks")]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def offloading(lanes_device: Any, **options: Any) -> Rig:
    """Make a model whose gradients are offloaded; its third layer can fail in backward."""
    model = FailsInTheMiddle(*RIG_SIZES, dtype=options.pop("dtype", FP32))
    return Rig(lanes_device, model=model, **{"offload_gradients": True, **options})


def failing_backward(rig: Rig) -> None:
    with backward_fails():
        rig.backward(5)
    assert plain_grad(rig.params[3]) is None, "it was offloaded"


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("mode", ["cpu", "gpu", "auto"])
def test_gradients_leave_in_backward(lanes_device, mode, dtype, clip) -> None:
    rig = offloading(lanes_device, dtype=dtype, mode=mode, max_grad_norm=clip)
    for step in range(3):
        rig.backward_both(step)
        assert all(plain_grad(p) is None for p in rig.params)
        rig.step_both()
        if clip is not None:
            assert rig.opt.last_grad_norm == rig.twin.optimizer.last_grad_norm
    rig.check()


def test_without_the_option_they_stay(lanes_device) -> None:
    """So that the test above can fail."""
    rig = offloading(lanes_device, offload_gradients=False)
    rig.backward_both()
    assert all(plain_grad(p) is not None for p in rig.params)
    rig.step_both()
    rig.check()


def test_host_memory_for_gradients(lanes_device) -> None:
    """The weight's size for each element; as a sum 4 bytes."""
    with_sum, kept, without = (
        offloading(lanes_device, dtype=BF16, accumulation_steps=steps, offload_gradients=offloads).opt.stats()[
            "arena_bytes"
        ]
        for steps, offloads in ((2, True), (1, True), (1, False))
    )
    assert without <= kept <= with_sum


def test_norm_of_offloaded_gradients_in_logical_order(lanes_device) -> None:
    """The norm's tree goes by logical index, whatever the order of state and of offloaded gradients."""
    base = torch.randn(300, 411)
    norms = []
    for offloads in (False, True):
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(lanes_device.put(base).t())
        opt = outboard.AdamW([layer.weight], compute_grad_norm=True, offload_gradients=offloads).attach(layer)
        (layer.weight * lanes_device.put(base).t().exp()).sum().backward()
        assert (plain_grad(layer.weight) is None) == offloads
        opt.step()
        norms.append(opt.last_grad_norm)
    assert norms[0] == norms[1]


# ---- dropped gradients are dropped


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_failed_backward_is_not_added_to_the_next(lanes_device, dtype, steps) -> None:
    """`model.zero_grad()` does not know of what has been offloaded; a bf16 sum would end the dispatcher."""
    rig = offloading(lanes_device, dtype=dtype, accumulation_steps=steps)
    failing_backward(rig)
    rig.model.zero_grad()
    with pytest.raises(RuntimeError, match=r"a second gradient of one backward.*abandon"):
        rig.model.loss(1).backward()
    rig.opt.abandon()
    rig.twin.model.zero_grad()
    for step in range(steps):
        rig.backward_both(step)
    if dtype is FP32 or steps == 1:
        rig.step_both()
        rig.check()


@pytest.mark.parametrize("how", ["zero_grad", "abandon"])
def test_a_failed_backward_can_be_dropped(lanes_device, how) -> None:
    rig = offloading(lanes_device)
    rig.train(2)
    failing_backward(rig)
    getattr(rig.opt, how)()
    rig.train(2, 2)
    rig.check()


@pytest.mark.parametrize("again", [False, True])
def test_gradients_dropped_after_detach(lanes_device, again) -> None:
    rig = offloading(lanes_device)
    rig.model.loss(3).backward()
    rig.opt.detach()
    rig.opt.zero_grad()
    before = [p.detach().clone() for p in rig.params]
    rig.opt.step()
    for p, was in zip(rig.params, before, strict=True):
        assert_same(p.detach(), was)
        assert float(rig.opt.state[p]["step"]) == 0
    if again:
        rig.opt.attach(rig.model)
    rig.train(1)
    rig.check()


def test_gradients_used_after_detach(lanes_device) -> None:
    rig = offloading(lanes_device)
    rig.backward_both()
    rig.opt.detach()
    rig.step_both()
    rig.check()


def test_a_refused_step_keeps_offloaded_gradients(lanes_device) -> None:
    rig = offloading(lanes_device)
    rig.backward_both()
    rig.params[1].grad = torch.ones_like(rig.params[1])
    with pytest.raises(ValueError, match="beside the one that was offloaded"):
        rig.opt.step()
    rig.params[1].grad = None
    rig.step_both()
    rig.train(2, 1)
    rig.check()


# ---- what has no memory for gradients yet


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("size", [7, 900], ids=["tiny", "hooked"])
@pytest.mark.parametrize("how", ["added", "unfrozen"])
def test_parameters_that_come_later(lanes_device, how, size, steps) -> None:
    model = Stack(3000, 5, 700, size).to(lanes_device.device)
    late = model[3].weight
    late.requires_grad_(how == "added")
    twin = TwinModel(model)
    late_twins = (twin.twin.params[3], twin.model[3].weight)
    params, twins = list(model.parameters()), twin.twin.params
    listed = slice(None, 3) if how == "added" else slice(None)
    with host_only():
        twin.twin.optimizer = outboard.AdamW(twins[listed], threads=1)
    opt = outboard.AdamW(params[listed], threads=1, offload_gradients=True, accumulation_steps=steps).attach(model)
    for step in range(4):
        if step == 1 and how == "added":
            opt.add_param_group({"params": [late], "lr": 0.01})
            twin.optimizer.add_param_group({"params": [twins[3]], "lr": 0.01})
        elif step == 1:
            for p in (late, *late_twins):
                p.requires_grad_(True)
        for part in range(steps):
            model.loss(step + part).backward()
            twin.model.loss(step + part).backward()
        opt.step()
        twin.step()
        model.zero_grad()
    twin.check(opt)


# ---- strides


def test_strides_that_change_after_offloading(lanes_device) -> None:
    """The gradient in host memory has the order of the strides as they were."""
    layer = torch.nn.Conv2d(8, 16, 3).to(lanes_device.device)
    opt = outboard.AdamW(layer.parameters(), threads=1, offload_gradients=True).attach(layer)
    x = torch.randn(2, 8, 6, 6, device=lanes_device.device)
    twin = TwinModel(layer)
    layer(x).square().sum().backward()
    layer.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"strides have changed since its gradient was offloaded"):
        opt.step()
    opt.zero_grad()
    layer(x).square().sum().backward()
    twin.model.to(memory_format=torch.channels_last)
    twin.model(x).square().sum().backward()
    opt.step()
    twin.step()
    twin.check(opt)


@pytest.mark.parametrize("first", [0, 1])
def test_gradients_of_alternating_strides_add_up(lanes_device, first) -> None:
    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            ctx.grad = grad
            return (p * grad).sum()

        @staticmethod
        def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
            return ctx.grad.clone(), None

    module = torch.nn.Module()
    module.p = lanes_device.parameter(torch.randn(4, 6, 3, 3))
    twin = TwinModel(module)
    opt = outboard.AdamW([module.p], threads=1, offload_gradients=True, accumulation_steps=2).attach(module)
    for _ in range(3):
        for part in range(2):
            grad = torch.randn(4, 6, 3, 3, device=lanes_device.device)
            if part == first:
                grad = grad.to(memory_format=torch.channels_last)
            for model in (module, twin.model):
                Weighted.apply(model.p, grad).backward()
        opt.step()
        twin.step()
    twin.check(opt)
