"""Every learning rate scheduler of torch, over an optimizer that is attached, with every time at which updates begin.

The unattached ones are in test_cases_groups.py. Compared with torch's fused optimizer under the same scheduler: the
same history of learning rates and betas, and the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.optim.swa_utils
from torch.optim.lr_scheduler import LRScheduler

import outboard
from fused import EAGER, EAGER_IDS, SMALL_RINGS, FusedRig
from lanes import Stack
from test_cases_groups import SCHEDULERS

SIZES = (704, 16, 3200)
pytestmark = pytest.mark.usefixtures("small_ones_have_hooks")


def subclasses(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


def test_every_scheduler_of_torch_is_tested() -> None:
    """By introspection, wherever in torch it is: one that torch adds fails here until it is in the list."""
    found = {
        cls.__name__
        for cls in subclasses(LRScheduler)
        if cls.__module__.startswith("torch.optim.") and not cls.__name__.startswith("_")
    }
    assert {"OneCycleLR", "SWALR", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler"} <= found
    assert found == {name.split()[0] for name in SCHEDULERS}


def groups(params: list[Any]) -> list[dict[str, Any]]:
    return [
        {"params": params[:1], "lr": 1e-2},
        {"params": params[1:2], "lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95)},
        {"params": params[2:], "weight_decay": 0.1},
    ]


def rig_of(lanes_device: Any, **options: Any) -> FusedRig:
    return FusedRig(
        lanes_device, Stack(*SIZES), lambda model, step: model.loss(step), groups=groups, lr=2e-3, **options
    )


def rates(optimizer: torch.optim.Optimizer) -> list[tuple[float, ...]]:
    return [(float(group["lr"]), *map(float, group["betas"])) for group in optimizer.param_groups]


def follow(rig: FusedRig, schedules: list[Any], name: str, first: int, steps: int) -> list[Any]:
    """Train, and let the schedulers of both sides step after each; return the history of the rates."""
    history = []
    for step in range(first, first + steps):
        rig.step(step)
        for schedule in schedules:
            schedule.step(*([1.0 / (1 + step % 4)] if "Plateau" in name else []))
        assert rates(rig.opt) == rates(rig.theirs), f"after step {step}"
        last = [schedule.get_last_lr() for schedule in schedules]
        assert last[0] == last[1]
        history.append(rates(rig.opt))
    return history


@pytest.mark.parametrize("when", EAGER[:3], ids=EAGER_IDS[:3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_same_rates_and_bits_as_torch_fused(lanes_device, name, when) -> None:
    rig = rig_of(lanes_device, **when)
    schedules = [SCHEDULERS[name](optimizer) for optimizer in (rig.opt, rig.theirs)]
    history = follow(rig, schedules, name, 0, 9)
    assert len({lr for of_step in history for lr, *_ in of_step}) > 3, "it changes something"
    assert (rig.eager_updates > 0) == (when["eager"] is not False)
    rig.check(name)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_resumed(lanes_device, name) -> None:
    """Saved with its optimizer, loaded into new ones of an attached model, and on: as torch's."""
    rig = rig_of(lanes_device)
    schedules = [SCHEDULERS[name](optimizer) for optimizer in (rig.opt, rig.theirs)]
    follow(rig, schedules, name, 0, 4)
    saved = [copy.deepcopy(schedule.state_dict()) for schedule in schedules]
    state = copy.deepcopy(rig.opt.state_dict()), copy.deepcopy(rig.theirs.state_dict())
    rig.opt.detach()

    rig.opt = outboard.AdamW(groups(list(rig.model.parameters())), lr=2e-3, threads=1, **SMALL_RINGS).attach(rig.model)
    rig.twin.twin.optimizer = torch.optim.AdamW(groups(rig.twin.twin.params), lr=2e-3, fused=True)
    schedules = [SCHEDULERS[name](optimizer) for optimizer in (rig.opt, rig.theirs)]
    for optimizer, schedule, of_optimizer, of_schedule in zip(
        (rig.opt, rig.theirs), schedules, state, saved, strict=True
    ):
        optimizer.load_state_dict(of_optimizer)
        schedule.load_state_dict(of_schedule)
    follow(rig, schedules, name, 4, 5)
    assert rig.eager_updates > 0
    rig.check(name)


@pytest.mark.parametrize("when", EAGER[1:], ids=EAGER_IDS[1:])
def test_a_scheduler_before_step_is_told(lanes_device, when) -> None:
    """Stepped between backward and `step()`, against torch's order: updates have used the old rate, and say so."""
    rig = rig_of(lanes_device, **when)
    schedule = torch.optim.lr_scheduler.ExponentialLR(rig.opt, 0.5)
    for step in range(2):
        rig.step(step)
    rig.loss(rig.model, 2).backward()
    assert rig.eager_updates > 0
    schedule.step()
    with pytest.raises(RuntimeError, match=r"settings \(lr, betas, ...\) changed between backward and step\(\)"):
        rig.opt.step()
    rig.opt.abandon()
