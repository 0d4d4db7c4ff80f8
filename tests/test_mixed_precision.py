"""Autocast, with and without a GradScaler: the same skipped steps, scales and weights as with torch's fused AdamW.

Weights are fp32 and the loss is computed in bf16 or fp16. torch's optimizer in host memory has a GradScaler of its own
over copies of the same gradients; on the host both sides run the whole loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import outboard
from fused import EAGER, EAGER_IDS, FusedRig, fused, mlp, mlp_loss
from lanes import plain_grad
from oracle import assert_same

pytestmark = pytest.mark.usefixtures("small_ones_have_hooks")

BF16, FP16 = torch.bfloat16, torch.float16
INF = float("inf")
#: When updates of an attached model begin where a GradScaler is used: at step(), by promise or by what "auto" sees.
LATE = [{"eager": False}, {"eager": "auto"}]
LATE_IDS = ["at step", "auto"]


def autocast_loss(dtype: torch.dtype) -> Callable[[torch.nn.Module, int], torch.Tensor]:
    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        with torch.autocast(next(iter(model.parameters())).device.type, dtype):
            return mlp_loss(model, step).float()

    return loss


class Scaled:
    """A `FusedRig` and a GradScaler for each side.

    Parameters
    ----------
    overflows : set of int
        Steps whose loss is infinite.
    by : callable, optional
        What the user does with an optimizer, its scaler and its parameters, between backward and the step, computing on
        a device.
    """

    def __init__(self, rig: FusedRig, overflows: set[int], by: Callable[..., None] | None = None) -> None:
        self.rig, self.overflows, self.by = rig, overflows, by
        device = next(iter(rig.model.parameters())).device
        self.scalers = [
            torch.amp.GradScaler(kind, init_scale=2.0**10, growth_interval=2) for kind in (device.type, "cpu")
        ]
        self.device = device
        self.scales: list[float] = []

    def backward(self, number: int, share: float = 1.0) -> None:
        """Both sides' losses, scaled, of a step or a part of it."""
        factor = share * (INF if number in self.overflows else 1.0)
        for model, scaler in zip((self.rig.model, self.rig.their_model), self.scalers, strict=True):
            loss = self.rig.loss(model, number) * factor
            scale = scaler.scale(torch.ones((), device=scaler._device))
            (loss * scale.to(self.device)).backward()

    def step(self, number: int, parts: int = 1) -> None:
        rig = self.rig
        for part in range(parts):
            self.backward(number + part, 1 / parts)
        ours, theirs = self.scalers
        if self.by is not None:
            self.by(rig.opt, ours, list(rig.model.parameters()), self.device)
        ours.step(rig.opt)
        ours.update()
        rig.opt.zero_grad()
        for p, q in zip(rig.twin.twin.params, rig.their_model.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.cpu()
        if self.by is not None:
            self.by(rig.theirs, theirs, rig.twin.twin.params, self.device)
        theirs.step(rig.theirs)
        theirs.update()
        rig.theirs.zero_grad()
        rig.twin.copy_back()
        rig.their_model.zero_grad()
        assert ours.get_scale() == theirs.get_scale(), f"scale after step {number}"
        self.scales.append(ours.get_scale())

    def check(self, steps: int, skipped: int) -> None:
        """Fail unless both sides have the same weights, state and skipped steps."""
        stats = self.rig.opt.stats()
        assert stats["skipped_steps"] == skipped
        assert stats["eager_updates"] == 0
        assert {float(state["step"]) for state in self.rig.theirs.state.values()} == {steps - skipped}
        assert len(set(self.scales)) > 2, "the scale has changed"
        self.rig.check()


def clip(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    params: list[torch.Tensor],
    device: torch.device | None = None,
) -> None:
    """Do as the usual recipe does; the norm is computed on a device, where it rounds otherwise than on the host."""
    scaler.unscale_(optimizer)
    with_grads = params
    if device is not None and params[0].device.type != device.type:
        with_grads = [torch.nn.Parameter(torch.empty_like(p, device=device)) for p in params]
        for stand_in, p in zip(with_grads, params, strict=True):
            stand_in.grad = p.grad.to(device)
    torch.nn.utils.clip_grad_norm_(with_grads, 1e-3)
    for stand_in, p in zip(with_grads, params, strict=True):
        if stand_in is not p:
            p.grad.copy_(stand_in.grad)


def rig_of(lanes_device: Any, dtype: torch.dtype, **options: Any) -> FusedRig:
    return FusedRig(lanes_device, mlp(), autocast_loss(dtype), lr=0.01, **options)


@pytest.mark.parametrize("when", EAGER, ids=EAGER_IDS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_autocast_without_a_scaler(lanes_device, dtype, when) -> None:
    """Gradients of fp32 weights are fp32, and final in their hooks: updates begin in backward."""
    rig = rig_of(lanes_device, dtype, **when)
    for step in range(5):
        rig.step(step)
    assert (rig.eager_updates > 0) == (when["eager"] is not False)
    rig.check()


@pytest.mark.parametrize("when", [*LATE, None], ids=[*LATE_IDS, "not attached"])
@pytest.mark.parametrize("by", [None, clip], ids=["scaler alone", "unscaled and clipped"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_grad_scaler(lanes_device, dtype, by, when) -> None:
    rig = rig_of(lanes_device, dtype, attached=when is not None, **(when or {}))
    run = Scaled(rig, {0, 3, 4}, by)
    for step in range(9):
        run.step(step)
    assert run.scales == [512.0, 512.0, 1024.0, 512.0, 256.0, 256.0, 512.0, 512.0, 1024.0]
    run.check(9, 3)


@pytest.mark.parametrize("when", LATE, ids=LATE_IDS)
@pytest.mark.parametrize("declared", [1, 3])
def test_accumulation_under_a_scaler(lanes_device, when, declared) -> None:
    """Three scaled backward passes a step, declared or not; one that overflows spoils the whole step."""
    run = Scaled(rig_of(lanes_device, FP16, accumulation_steps=declared, **when), {4})
    for step in range(6):
        run.step(3 * step, parts=3)
    assert run.scales[1] < run.scales[0]
    run.check(6, 1)


@pytest.mark.parametrize("when", LATE, ids=LATE_IDS)
def test_two_optimizers_with_one_scaler(lanes_device, when) -> None:
    """One overflows and is skipped, the other steps; one scale for both, lowered by either."""
    torch.manual_seed(3)
    kind = lanes_device.device.type
    models = [mlp(64).to(lanes_device.device) for _ in range(2)]
    rigs = [FusedRig(lanes_device, model, autocast_loss(FP16), lr=0.01, **when) for model in models]
    ours, theirs = (torch.amp.GradScaler(of, init_scale=256.0, growth_interval=2) for of in (kind, "cpu"))
    scales = []
    for step in range(6):
        for number, rig in enumerate(rigs):
            factor = INF if (step, number) in ((1, 0), (4, 1)) else 1.0
            for model, scaler in ((rig.model, ours), (rig.their_model, theirs)):
                scale = scaler.scale(torch.ones((), device=scaler._device)).to(lanes_device.device)
                (rig.loss(model, step) * factor * scale).backward()
        for rig in rigs:
            ours.step(rig.opt)
            rig.opt.zero_grad()
            for p, q in zip(rig.twin.twin.params, rig.their_model.parameters(), strict=True):
                p.grad = q.grad.cpu()
            theirs.step(rig.theirs)
            rig.twin.copy_back()
            rig.their_model.zero_grad()
        ours.update()
        theirs.update()
        assert ours.get_scale() == theirs.get_scale()
        scales.append(ours.get_scale())
    assert scales == [256.0, 128.0, 128.0, 256.0, 128.0, 128.0]
    assert [rig.opt.stats()["skipped_steps"] for rig in rigs] == [1, 1]
    for rig in rigs:
        rig.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eager": True}, "scaler.*use eager=False"),
        ({"offload_gradients": True}, "scaler.*offload.*use offload_gradients=False"),
        ({"eager": True, "offload_gradients": True}, "scaler.*offload_gradients=False"),
    ],
    ids=["in backward", "offloaded", "both"],
)
def test_what_a_scaler_cannot_be_used_with(lanes_device, options, message) -> None:
    """Says so at `step()`, which is where a scaler shows itself; the weights are those of before, or told to be wrong.

    Parameters that are too small for hooks make no difference: here some gradients are seen by the scaler.
    """
    rig = rig_of(lanes_device, FP16, **options)
    scaler = torch.amp.GradScaler(lanes_device.device.type, init_scale=4.0)
    scaler.scale(rig.loss(rig.model, 0)).backward()
    if not any(plain_grad(p) is not None for p in rig.model.parameters()):
        # torch's scaler finds nothing to look at, and says that first.
        message = f"{message}|No inf checks were recorded"
    with pytest.raises((RuntimeError, AssertionError), match=message):
        scaler.step(rig.opt)
    rig.opt.abandon()
    # Without the scaler it goes on.
    rig.loss(rig.model, 1).backward()
    rig.opt.step()
    rig.opt.synchronize()


def test_a_scaler_that_is_switched_off(lanes_device) -> None:
    """`enabled=False`, as configurations for bf16 have it: nothing is scaled, and updates begin in backward."""
    rig = rig_of(lanes_device, BF16)
    scaler = torch.amp.GradScaler(lanes_device.device.type, enabled=False)
    for step in range(4):
        scaler.scale(rig.loss(rig.model, step)).backward()
        scaler.unscale_(rig.opt)
        scaler.step(rig.opt)
        scaler.update()
        rig.opt.zero_grad()
        rig.loss(rig.their_model, step).backward()
        rig.twin.step()
    assert rig.eager_updates > 0
    rig.check()


@pytest.mark.parametrize("by", [None, clip], ids=["scaler alone", "unscaled and clipped"])
def test_a_scalers_checkpoint(by) -> None:
    """Saved and loaded with model and optimizer, in host memory, both sides whole: losses, scales and weights go on."""
    runs = []
    for make in (outboard.AdamW, fused):
        torch.manual_seed(7)
        model = mlp(64)
        loss = autocast_loss(FP16)
        optimizer = make(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
        history = []
        for step in range(10):
            if step == 5:
                saved = {"model": model, "optimizer": optimizer, "scaler": scaler}
                saved = {name: value.state_dict() for name, value in saved.items()}
                model = mlp(64)
                model.load_state_dict(saved["model"])
                optimizer = make(model.parameters(), lr=1.0)
                optimizer.load_state_dict(saved["optimizer"])
                scaler = torch.amp.GradScaler("cpu")
                scaler.load_state_dict(saved["scaler"])
            of_step = loss(model, step) * (INF if step in (2, 6) else 1.0)
            scaler.scale(of_step).backward()
            if by is not None:
                by(optimizer, scaler, list(model.parameters()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            history.append((of_step.item(), scaler.get_scale()))
        runs.append((history, list(model.parameters()), optimizer))
    (ours, our_params, our_optimizer), (theirs, their_params, _) = runs
    assert ours == theirs
    assert [scale for _, scale in ours] == [4096.0, 4096.0, *[2048.0] * 3, 4096.0, *[2048.0] * 3, 4096.0]
    assert our_optimizer.stats()["skipped_steps"] == 1, "since it was made"
    for p, q in zip(our_params, their_params, strict=True):
        assert_same(p, q)
