"""Hugging Face accelerate: prepared, accumulated, clipped, scaled, saved and resumed with the bits of torch's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outboard
from lanes import assert_untouched
from oracle import assert_same, norm64
from tiny import WAYS, Run, Tokens, assert_same_run, assert_same_weights, llama, sides_and_ways

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from outboard.integrations.accelerate import attach, detach_clipping

pytestmark = pytest.mark.integrations


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Let each test have an accelerator of its own: their state is shared in a process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accelerator_on(side: Any, **options: Any) -> Accelerator:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(cpu=side.device.type == "cpu", **options)


class Loop:
    """A training loop as accelerate's documentation writes it."""

    def __init__(
        self,
        side: Any,
        cls: Any = outboard.AdamW,
        *,
        attached: bool | str = True,
        accumulation: int = 1,
        clip: float | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.accelerator = accelerator_on(side, gradient_accumulation_steps=accumulation)
        self.clip = clip
        model = llama(dtype)
        optimizer = cls(model.parameters(), lr=1e-2, **options)
        if attached == "before":
            optimizer.attach(model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        data = torch.utils.data.DataLoader(Tokens(), batch_size=4)
        self.model, self.optimizer, self.data, self.schedule = self.accelerator.prepare(
            model, optimizer, data, schedule
        )
        if attached == "by hand":
            self.optimizer.optimizer.attach(self.model)
        elif attached is True:
            attach(self.accelerator, self.model, self.optimizer)
        self.run = Run(model, optimizer, [])

    def epoch(self, skip: int = 0) -> None:
        data = self.accelerator.skip_first_batches(self.data, skip) if skip else self.data
        for batch in data:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                norm = None
                if self.accelerator.sync_gradients and self.clip is not None:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            if norm is not None:
                self.run.norms.append(norm.item())
            self.run.losses.append(loss.item())


def trained(*args: Any, epochs: int = 2, **options: Any) -> Run:
    loop = Loop(*args, **options)
    torch.manual_seed(5)
    for _ in range(epochs):
        loop.epoch()
    return loop.run


def reference(side: Any, **settings: Any) -> Run:
    cls, options = side.reference
    with side.unattached():
        return trained(side, cls, attached=False, **options, **settings)


@pytest.mark.parametrize("attached", [True, "by hand", "before"])
@sides_and_ways()
def test_equals_torch(side: Any, way: str, attached: Any) -> None:
    run = trained(side, attached=attached, **WAYS[way])
    assert_same_run(run, reference(side))
    assert (run.eager_updates > 0) == (way in ("auto", "eager") and side.has_lanes)


@pytest.mark.parametrize("way", WAYS)
def test_accumulation(device_side: Any, way: str) -> None:
    # The last step of an epoch has two backward passes.
    run = trained(device_side, accumulation=3, accumulation_steps=3, **WAYS[way])
    assert_same_run(run, reference(device_side, accumulation=3))
    assert (run.eager_updates > 0) == (way in ("auto", "eager"))


def test_accumulation_that_the_optimizer_was_not_told_is_refused(side: Any) -> None:
    with pytest.raises(ValueError, match="accelerator's gradient_accumulation_steps is 3"):
        Loop(side, accumulation=3, eager=True)
    assert_same_run(trained(side, accumulation=3), reference(side, accumulation=3))


def test_state_survives_prepare(side: Any) -> None:
    """`prepare` takes the state out, to put it on the accelerator's device, and loads it again."""
    model = llama()
    optimizer = outboard.AdamW(model.parameters())
    for value in optimizer.state.values():
        value["step"].fill_(3)
        value["exp_avg"].normal_()
        value["exp_avg_sq"].uniform_()
    before = {id(p): {key: value.clone() for key, value in state.items()} for p, state in optimizer.state.items()}
    accelerator = accelerator_on(side)
    prepared = accelerator.prepare(model, optimizer)[1]
    assert prepared.optimizer is optimizer
    assert before
    for parameter, state in optimizer.state.items():
        for key, value in before[id(parameter)].items():
            assert_same(state[key], value, key)
            assert state[key].device.type == "cpu"


# ---- clipping


@pytest.mark.parametrize("eager", ["auto", False])
def test_accelerates_own_clipping_is_right(side: Any, eager: Any) -> None:
    run = trained(side, attached="by hand", clip=0.5, eager=eager)
    wanted = reference(side, clip=0.5)
    assert_same_run(run, wanted)
    assert run.norms == wanted.norms
    assert max(run.norms) > 0.5


@sides_and_ways("auto", "not eager", "offloaded")
def test_clipping_inside(side: Any, way: str) -> None:
    run = trained(side, clip=0.5, accumulation=2, accumulation_steps=2, **WAYS[way])
    with side.unattached():
        wanted = trained(side, attached=False, accumulation=2, max_grad_norm=0.5)
    assert_same_run(run, wanted)
    assert run.norms == pytest.approx(reference(side, clip=0.5, accumulation=2).norms, rel=1e-2)
    assert len(run.norms) == 8


def backward(loop: Loop, step: int) -> None:
    torch.manual_seed(step)
    loop.accelerator.backward(
        loop.model(**{k: v[None].to(loop.accelerator.device) for k, v in Tokens()[step].items()}).loss
    )


@sides_and_ways("auto", "offloaded")
def test_only_steps_that_are_asked_to_clip(side: Any, way: str) -> None:
    loop = Loop(side, **WAYS[way])
    with side.unattached():
        twin = Loop(side, attached=False)
    asked = {0: 0.5, 1: 0.5, 2: 0.2, 4: math.inf, 6: 0.5}
    for step in range(8):
        backward(loop, step)
        norm = None
        if step in asked:
            norm = loop.accelerator.clip_grad_norm_(loop.model.parameters(), asked[step])
            assert norm.isnan()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        backward(twin, step)
        true = norm64([p.grad for p in twin.model.parameters()])
        twin.optimizer.optimizer.max_grad_norm = asked.get(step) if asked.get(step) != math.inf else None
        twin.optimizer.step()
        twin.optimizer.zero_grad()
        if norm is not None:
            assert norm.item() == pytest.approx(true, rel=1e-6)
        assert_same_weights(loop.model, twin.model)


def test_clipping_that_begins_after_updates_in_backward_is_refused(device_side: Any) -> None:
    loop = Loop(device_side)
    for step in range(2):
        backward(loop, step)
        if step == 1:
            loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1.0)
            with pytest.raises(RuntimeError, match="clipping, a norm or a check of all gradients was switched on"):
                loop.optimizer.step()
        else:
            loop.optimizer.step()


def test_what_cannot_be_clipped_inside(side: Any) -> None:
    loop = Loop(side)
    clip = loop.accelerator.clip_grad_norm_
    backward(loop, 0)
    parameters = list(loop.model.parameters())
    with pytest.raises(ValueError, match="1 are missing, and 0 with a gradient are not"):
        clip(parameters[1:], 1.0)
    with pytest.raises(ValueError, match="knows the norm 2, not inf"):
        clip(parameters, 1.0, norm_type=math.inf)
    other = torch.nn.Parameter(torch.zeros(16, device=parameters[0].device))
    other.grad = torch.full_like(other, 3.0)
    with pytest.raises(ValueError, match="0 are missing, and 1 with a gradient are not"):
        clip([*parameters, other], 1.0)
    # Those of nobody's are clipped at once, as ever.
    assert clip([other], 1.0).item() == 12.0
    assert torch.allclose(other.grad, torch.full_like(other, 0.25))
    other.grad = None
    clip(iter([*parameters, other]), 1.0)
    loop.optimizer.step()
    second = outboard.AdamW([other])
    attach(loop.accelerator, torch.nn.ParameterList([other]), second)
    assert loop.accelerator.clip_grad_norm_ is clip
    with pytest.raises(ValueError, match="parameters of several outboard optimizers"):
        clip([*parameters, other], 1.0)


def test_eager_with_clipping_is_refused(side: Any) -> None:
    """Its gradients are gone: the accelerator itself would find a norm of 0."""
    loop = Loop(side, eager=True)
    backward(loop, 0)
    with pytest.raises(ValueError, match="max_grad_norm needs all gradients"):
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1.0)


def test_detached(side: Any) -> None:
    loop = Loop(side, clip=0.5)
    loop.epoch()
    optimizer = loop.optimizer.optimizer
    detach_clipping(loop.accelerator)
    optimizer.detach()
    assert optimizer.max_grad_norm is None
    assert "clip_grad_norm_" not in vars(loop.accelerator)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert_untouched(loop.model)
    loop.epoch()


def test_another_optimizer_is_refused(side: Any) -> None:
    loop = Loop(side, torch.optim.AdamW, attached=False)
    with pytest.raises(TypeError, match=r"optimizer is a AdamW, none of outboard's: prepare an outboard\.AdamW"):
        attach(loop.accelerator, loop.model, loop.optimizer)


# ---- a scaler


class Overflows:
    """Makes one gradient infinite in the backward passes of some steps."""

    def __init__(self, model: torch.nn.Module, steps: set[int]) -> None:
        self.steps = steps
        self.step = 0
        next(model.parameters()).register_hook(self)

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        return grad * math.inf if self.step in self.steps else grad


def scaled_run(side: Any, cls: Any, attached: bool, clip: float | None = None, **options: Any) -> Run:
    """Eight steps with a scaler in accelerate's optimizer, of which two overflow."""
    loop = Loop(side, torch.optim.SGD, attached=False)
    optimizer = cls(loop.model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler(side.device.type, init_scale=2.0**10, growth_interval=3)
    prepared = AcceleratedOptimizer(optimizer, scaler=scaler)
    if attached:
        optimizer.attach(loop.model)
    overflows = Overflows(loop.model, {2, 6})
    run = Run(loop.model, optimizer, [], extra=[])
    for step in range(8):
        overflows.step = step
        torch.manual_seed(step)
        loss = loop.model(**{k: v[None].to(side.device) for k, v in Tokens()[step].items()}).loss
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), clip)
        prepared.step()
        run.losses.append(loss.item())
        run.extra.append((scaler.get_scale(), prepared.step_was_skipped))
        prepared.zero_grad()
    return run


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("eager", ["auto", False])
def test_scaler(side: Any, eager: Any, clip: float | None) -> None:
    """The same skipped steps and the same history of scales, also in what accelerate says of a fused optimizer."""
    cls, options = side.reference
    run = scaled_run(side, outboard.AdamW, True, clip, eager=eager)
    with side.unattached():
        wanted = scaled_run(side, cls, False, clip, **options)
    assert_same_run(run, wanted)
    assert run.extra == wanted.extra
    assert [scale for scale, _ in run.extra] == [1024, 1024, 512, 512, 512, 1024, 512, 512]
    assert float(run.optimizer.state_dict()["state"][0]["step"]) == 6
    assert run.optimizer.stats()["skipped_steps"] == 2


@sides_and_ways("eager", "offloaded")
def test_scaler_that_cannot_be_is_refused(side: Any, way: str) -> None:
    with pytest.raises(RuntimeError, match="a gradient scaler"):
        scaled_run(side, outboard.AdamW, True, **WAYS[way])


# ---- checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@sides_and_ways()
def test_resumed_is_uninterrupted(side: Any, way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    whole = Loop(side, dtype=dtype, **WAYS[way])
    torch.manual_seed(5)
    whole.epoch()
    whole.accelerator.save_state(str(tmp_path))
    whole.epoch()
    resumed = Loop(side, dtype=dtype, **WAYS[way])
    for parameter in resumed.model.parameters():
        parameter.data.zero_()
    torch.manual_seed(99)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.epoch()
    resumed.run.losses[:0] = whole.run.losses[:8]
    assert_same_run(resumed.run, whole.run, state=True)
    assert len(whole.run.losses) == 16
    # Loading it again, into an optimizer that is under way, gives them once more.
    resumed.accelerator.load_state(str(tmp_path))
    del resumed.run.losses[8:]
    resumed.epoch()
    assert_same_run(resumed.run, whole.run, state=True)
