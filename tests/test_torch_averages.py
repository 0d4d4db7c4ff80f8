"""Averages of weights (`torch.optim.swa_utils`) over a model whose updates are under way.

`AveragedModel` reads every weight right after `step()`, past the model's hooks. Twins are torch's fused optimizer and
torch's average over the twin's model.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import (
    SWALR,
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
    update_bn,
)

from fused import EAGER, EAGER_IDS, FusedRig, mlp, mlp_loss
from lanes import is_pending
from oracle import assert_same

pytestmark = pytest.mark.usefixtures("small_ones_have_hooks")

AVERAGES: dict[str, dict[str, Any]] = {
    "SWA": {},
    "SWA with buffers": {"use_buffers": True},
    "SWA, one by one": {"avg_fn": get_swa_avg_fn()},
    "SWA, all at once": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "EMA, one by one": {"avg_fn": get_ema_avg_fn(0.9)},
    "EMA, all at once": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "EMA with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "a function of the user's": {"avg_fn": lambda average, weight, number: 0.25 * weight + 0.75 * average},
}


def assert_equal_models(a: torch.nn.Module, b: torch.nn.Module, what: str = "") -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert_same(value.cpu(), theirs[key].cpu(), f"{what} {key}")


def torch_averages_integers(device: torch.device) -> bool:
    """Whether torch's SWA can average integer buffers, such as the count of a BatchNorm: 2.11 cannot on CUDA."""
    norm = torch.nn.BatchNorm1d(4).to(device)
    average = AveragedModel(norm, use_buffers=True)
    try:
        average.update_parameters(norm)
        average.update_parameters(norm)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("when", EAGER[:3:2], ids=EAGER_IDS[:3:2])
@pytest.mark.parametrize("name", AVERAGES)
def test_averages_of_an_attached_model(lanes_device, name, when) -> None:
    if name == "SWA with buffers" and not torch_averages_integers(lanes_device.device):
        pytest.skip(f"torch {torch.__version__} cannot average integer buffers on {lanes_device.device}")
    rig = FusedRig(lanes_device, mlp(), mlp_loss, lr=0.01, **when)
    averages = [AveragedModel(model, **AVERAGES[name]) for model in (rig.model, rig.their_model)]
    pending = 0
    for step in range(6):
        rig.step(step)
        if step >= 2:
            pending += any(map(is_pending, rig.model.parameters()))
            averages[0].update_parameters(rig.model)
            averages[1].update_parameters(rig.their_model)
    assert pending, "the average has had something to wait for"
    assert_equal_models(*averages, name)
    # A copy of the model, which nobody has attached: it computes with the averages it has.
    x = torch.randn(4, 16, device=lanes_device.device)
    assert_same(averages[0].eval()(x).cpu(), averages[1].eval()(x).cpu())
    rig.check(name)


@pytest.mark.parametrize("when", EAGER, ids=EAGER_IDS)
def test_the_whole_recipe(lanes_device, when) -> None:
    """SWALR, an average from the middle of training on, `update_bn` with updates under way, and a checkpoint of it."""
    rig = FusedRig(lanes_device, mlp(), mlp_loss, lr=0.01, **when)
    models = rig.model, rig.their_model
    schedules = [SWALR(optimizer, swa_lr=5e-4, anneal_epochs=3) for optimizer in (rig.opt, rig.theirs)]
    averages: list[AveragedModel] = []
    for step in range(7):
        rig.step(step)
        if step == 2:
            # Made while updates are under way: the copy waits.
            averages = [AveragedModel(model) for model in models]
        if step >= 2:
            for average, model, schedule in zip(averages, models, schedules, strict=True):
                average.update_parameters(model)
                schedule.step()
            assert rig.opt.param_groups[0]["lr"] == rig.theirs.param_groups[0]["lr"]
    batches = [torch.randn(8, 16) for _ in range(3)]
    rig.step(7)
    for average in averages:
        update_bn(batches, average, device=lanes_device.device)
    # And of the model itself, whose weights are on their way.
    for model in models:
        update_bn(batches, model, device=lanes_device.device)
    assert_equal_models(*averages)
    assert_equal_models(*models)
    assert int(averages[0].n_averaged) == 5
    rig.check()

    loaded = AveragedModel(copy.deepcopy(rig.their_model))
    loaded.load_state_dict(averages[0].state_dict())
    assert_equal_models(loaded, averages[1])


def test_training_goes_on_from_an_average(lanes_device) -> None:
    """The average is copied into the model while its updates are under way: they come first, and the masters follow."""
    rig = FusedRig(lanes_device, mlp(), mlp_loss, lr=0.01)
    averages = [AveragedModel(model) for model in (rig.model, rig.their_model)]
    for step in range(8):
        rig.step(step)
        for average, model in zip(averages, (rig.model, rig.their_model), strict=True):
            average.update_parameters(model)
        if step == 4:
            rig.step(5)
            rig.model.load_state_dict(averages[0].module.state_dict())
            rig.their_model.load_state_dict(averages[1].module.state_dict())
            with torch.no_grad():
                for p, q in zip(rig.twin.twin.params, rig.their_model.parameters(), strict=True):
                    p.copy_(q)
    assert rig.eager_updates > 0
    rig.check()


def test_an_average_on_the_host(lanes_device) -> None:
    """`AveragedModel(model, device="cpu")`: weights come down as they are averaged."""
    rig = FusedRig(lanes_device, mlp(), mlp_loss, lr=0.01)
    averages = [
        AveragedModel(model, device="cpu", avg_fn=get_ema_avg_fn(0.5)) for model in (rig.model, rig.their_model)
    ]
    for step in range(4):
        rig.step(step)
        for average, model in zip(averages, (rig.model, rig.their_model), strict=True):
            average.update_parameters(model)
    assert all(p.device.type == "cpu" for p in averages[0].parameters())
    assert_equal_models(*averages)
    rig.check()
