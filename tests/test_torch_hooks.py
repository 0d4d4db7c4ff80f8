"""Hooks of optimizers and what profilers see of them: called with the object that the user holds, as often as torch's.

Plain host parameters, and a model on a device, attached or not.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

import outboard
from fused import EAGER, EAGER_IDS, FusedRig, fused, mlp, mlp_loss
from lanes import LanesDevice
from outboard._lanes import LaneOptions

OURS = [outboard.AdamW, outboard.Adam]


class Named(outboard.AdamW):
    """A user's own subclass."""


@pytest.fixture(params=["host", "on a device", *EAGER_IDS])
def rig(
    request: pytest.FixtureRequest, lanes_device: Any, small_ones_have_hooks: None, monkeypatch: pytest.MonkeyPatch
) -> FusedRig:
    """Return a model with an optimizer in every setting."""
    if request.param == "host":
        monkeypatch.setattr(LaneOptions, "simulate", None)
        lanes_device = LanesDevice("cpu")
    when = EAGER[EAGER_IDS.index(request.param)] if request.param in EAGER_IDS else {}
    return FusedRig(lanes_device, mlp(), mlp_loss, lr=0.01, attached=request.param in EAGER_IDS, **when)


def test_step_hooks(rig) -> None:
    """Before and after, in the order of registration; with the user's object, the arguments, and until removed."""
    seen: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []

    def hook(name: str) -> Any:
        return lambda *arguments: seen.append((name, *arguments))

    handles = [rig.opt.register_step_pre_hook(hook("before")), rig.opt.register_step_pre_hook(hook("before, second"))]
    handles += [rig.opt.register_step_post_hook(hook("after"))]
    for step in range(3):
        rig.step(step)
    assert [name for name, *_ in seen] == ["before", "before, second", "after"] * 3
    assert all(optimizer is rig.opt for _, optimizer, _, _ in seen)
    # torch counts `self` among the arguments.
    assert all(args == (rig.opt,) and kwargs == {} for _, _, args, kwargs in seen)
    for handle in handles:
        handle.remove()
    rig.step(3)
    assert len(seen) == 9
    rig.check()


def test_a_hook_before_step_may_change_settings_and_arguments(rig) -> None:
    """A closure that a hook puts in is called; a weight decay that it sets is used by updates that begin at step(), and
    refused where they have begun in backward.
    """
    calls = []

    def closure() -> float:
        calls.append("closure")
        return 2.5

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        optimizer.param_groups[0]["weight_decay"] = 0.5
        return (args[0], closure), kwargs

    for optimizer in (rig.opt, rig.theirs):
        optimizer.register_step_pre_hook(before)
    if rig.opt.eager is True and rig.opt._attachment is not None:
        with pytest.raises(RuntimeError, match=r"settings .* changed between backward and step"):
            rig.step()
        rig.opt.abandon()
        return
    rig.step()
    assert calls == ["closure"] * 2
    assert rig.opt.param_groups[0]["weight_decay"] == 0.5
    rig.check()


def test_a_hook_after_step_reads_updated_weights(rig) -> None:
    """What is under way is waited for."""
    found, wanted = [], []
    rig.opt.register_step_post_hook(lambda *_: found.append([p.detach().clone() for p in rig.model.parameters()]))
    rig.theirs.register_step_post_hook(lambda *_: wanted.append([p.detach().clone() for p in rig.twin.twin.params]))
    for step in range(3):
        rig.step(step)
    assert len(found) == len(wanted) == 3
    for ours, theirs in zip(found, wanted, strict=True):
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p.cpu(), q)


@pytest.fixture
def global_hooks() -> Iterator[list[tuple[str, Any]]]:
    """Register hooks on all optimizers, and return what they saw."""
    seen: list[tuple[str, Any]] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: seen.append(("before", optimizer))),
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: seen.append(("after", optimizer))),
    ]
    yield seen
    for handle in handles:
        handle.remove()


def test_global_step_hooks(rig, global_hooks) -> None:
    """`register_optimizer_step_pre_hook` and `..._post_hook` of torch.optim.optimizer: every optimizer's, once each."""
    rig.opt.register_step_pre_hook(lambda optimizer, *_: global_hooks.append(("own, before", optimizer)))
    rig.opt.register_step_post_hook(lambda optimizer, *_: global_hooks.append(("own, after", optimizer)))
    for step in range(2):
        rig.step(step)
    ours = [name for name, optimizer in global_hooks if optimizer is rig.opt]
    # torch's order: global hooks come first before the step, and last after it.
    assert ours == ["before", "own, before", "own, after", "after"] * 2
    assert [name for name, optimizer in global_hooks if optimizer is rig.theirs] == ["before", "after"] * 2
    rig.check()


def test_state_dict_hooks(rig) -> None:
    """All four kinds, with the user's object; what they return is used."""
    for step in range(2):
        rig.step(step)
    seen: list[str] = []

    def noted(name: str) -> Any:
        def hook(optimizer: Any, *rest: Any) -> None:
            assert optimizer is rig.opt
            seen.append(name)

        return hook

    handles = [
        rig.opt.register_state_dict_pre_hook(noted("before saving")),
        rig.opt.register_state_dict_pre_hook(noted("before saving, first"), prepend=True),
        rig.opt.register_state_dict_post_hook(noted("after saving")),
        rig.opt.register_state_dict_post_hook(lambda optimizer, saved: {**saved, "more": 1}),
        rig.opt.register_load_state_dict_pre_hook(noted("before loading")),
        rig.opt.register_load_state_dict_pre_hook(
            lambda optimizer, saved: {
                **saved,
                "param_groups": [{**group, "lr": 0.25} for group in saved["param_groups"]],
            }
        ),
        rig.opt.register_load_state_dict_post_hook(noted("after loading")),
    ]
    saved = rig.opt.state_dict()
    assert saved["more"] == 1
    assert seen == ["before saving, first", "before saving", "after saving"]
    rig.opt.load_state_dict(saved)
    assert seen[3:] == ["before loading", "after loading"]
    assert rig.opt.param_groups[0]["lr"] == 0.25
    for handle in handles:
        handle.remove()
    assert "more" not in rig.opt.state_dict()
    assert len(seen) == 5
    rig.theirs.param_groups[0]["lr"] = 0.25
    rig.step(2)
    rig.check()


def pickled(optimizer: Any) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("how", [copy.deepcopy, pickled])
def test_copies_have_no_hooks_as_torchs(rig, how) -> None:
    """A hook of the original is not called for a copy, nor with a copy."""
    rig.step()
    seen = []
    rig.opt.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    copied = how(rig.opt)
    for p in copied.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    copied.step()
    assert seen == []
    copied.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    copied.step()
    assert len(seen) == 1
    assert seen[0] is copied


def marks(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> list[str]:
    """Return the names that a profiler shows of two steps, in their order."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()
    return [event.name for event in profiler.events() if event.name.startswith("Optimizer.")]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11
@pytest.mark.parametrize("cls", OURS)
def test_profilers_show_the_marks_of_torch(lanes_device, attached, cls) -> None:
    """`Optimizer.step#AdamW.step` and `Optimizer.zero_grad#AdamW.zero_grad`, once a step: what tools look for."""
    params = [lanes_device.parameter(torch.ones(48)), lanes_device.parameter(torch.ones(70_400))]
    optimizer = cls(params, threads=1)
    if attached:
        optimizer.attach(torch.nn.ParameterList(params))
    host = [torch.nn.Parameter(torch.ones(48))]
    wanted = marks(fused(host, cls), host)
    assert wanted == [f"Optimizer.{name}#{cls.__name__}.{name}" for name in ("step", "zero_grad")] * 2
    assert marks(optimizer, params) == wanted


def test_a_subclass_has_marks_of_its_own_name_and_hooks() -> None:
    """As torch: `profile_hook_step` is put around each class's step once."""
    p = torch.nn.Parameter(torch.ones(16))
    optimizer = Named([p])
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    assert marks(optimizer, [p]) == [f"Optimizer.{name}#Named.{name}" for name in ("step", "zero_grad")] * 2
    assert seen == ["after"] * 2, "once a step, however many classes have been patched"
    assert getattr(Named.step, "hooked", False)
    assert getattr(outboard.AdamW.step, "hooked", False)


def test_a_step_of_the_users_own_may_be_hooked_by_torchs_decorator() -> None:
    """A subclass that overrides `step` and decorates it with `Optimizer.profile_hook_step`, as torch's classes do."""
    calls = []

    class Counted(outboard.AdamW):
        @torch.optim.Optimizer.profile_hook_step
        def step(self, closure: Any = None) -> Any:
            calls.append("step")
            return super().step(closure)

    p, q = (torch.nn.Parameter(torch.linspace(-1, 1, 32)) for _ in range(2))
    ours, theirs = Counted([p], lr=0.1), fused([q], lr=0.1)
    seen = []
    ours.register_step_pre_hook(lambda *_: seen.append("before"))
    for _ in range(3):
        p.grad, q.grad = torch.sin(p.detach()), torch.sin(q.detach())
        ours.step()
        theirs.step()
    assert calls == ["step"] * 3
    assert torch.equal(p, q)
    # torch's decorator calls the hooks of each decorated step; its own class does, too.
    alike = []

    class Theirs(torch.optim.AdamW):
        @torch.optim.Optimizer.profile_hook_step
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    other = Theirs([q], lr=0.1)
    other.register_step_pre_hook(lambda *_: alike.append("before"))
    for _ in range(3):
        other.step()
    assert seen == alike
