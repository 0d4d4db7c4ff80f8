"""Attached optimizers: when updates begin, and what is refused because they have begun."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch

from lanes import (
    Rig,
    Stack,
    is_pending,
    plain_grad,
)
from oracle import assert_same
from outboard import _roster

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = [pytest.mark.timeout(60, method="thread"), pytest.mark.usefixtures("small_ones_have_hooks")]

FP32, BF16 = torch.float32, torch.bfloat16


# ---- when updates begin


def test_auto_learns_from_one_clean_step(lanes_device) -> None:
    rig = Rig(lanes_device)
    rig.train()
    assert rig.eager_updates == 0
    rig.train(3, 1)
    assert rig.eager_updates == 3 * rig.hooked > 0
    rig.check()


def test_auto_keeps_gradients_until_step(lanes_device) -> None:
    rig = Rig(lanes_device).proven()
    rig.backward(1)
    assert rig.eager_updates == rig.hooked > 0
    assert all(plain_grad(p) is not None for p in rig.params)
    rig.twin.model.loss(1).backward()
    for p, twin in zip(rig.params, rig.twin.model.parameters(), strict=True):
        assert_same(plain_grad(p).cpu(), twin.grad.cpu())
    rig.opt.step()
    assert all(plain_grad(p) is None for p in rig.params)
    rig.twin.step()
    rig.check()


def test_eager_frees_gradients_in_backward(lanes_device) -> None:
    rig = Rig(lanes_device, eager=True)
    rig.backward()
    assert rig.eager_updates == rig.hooked > 0
    # Those without hooks are taken by step().
    assert sum(plain_grad(p) is None for p in rig.params) == rig.hooked
    rig.opt.step()
    assert all(plain_grad(p) is None for p in rig.params)
    rig.twin.model.loss().backward()
    rig.twin.step()
    rig.check()


def test_eager_false_never_updates_in_backward(lanes_device) -> None:
    rig = Rig(lanes_device, eager=False)
    rig.train(3)
    assert rig.eager_updates == 0
    rig.check()


def test_weights_are_updated_between_backward_and_step(lanes_device) -> None:
    """Eager updates are under way after backward, and whoever reads sees them."""
    rig = Rig(lanes_device, eager=True)
    rig.backward()
    assert sum(map(is_pending, rig.params)) == rig.hooked > 0
    rig.twin.model.loss().backward()
    rig.twin.step()
    for p, twin in zip(rig.params, rig.twin.twin.params, strict=True):
        if p.numel() > _roster.TINY_ELEMS:
            assert_same(p.detach().cpu(), twin)
    rig.opt.step()
    rig.check()


@pytest.mark.parametrize("touch", ["clip", "clip nothing", "scale", "replace", "drop", "hook"])
def test_auto_is_not_proven_by_a_touched_gradient(lanes_device, touch) -> None:
    """Clipping at every step works for good: it is never updated in backward."""
    rig = Rig(lanes_device)
    params = rig.params

    def quarter(p: torch.Tensor) -> None:
        p.grad.mul_(0.25)

    def change(model: torch.nn.Module) -> None:
        ps = list(model.parameters())
        if touch.startswith("clip"):
            torch.nn.utils.clip_grad_norm_(ps, 1e-3 if touch == "clip" else 1e9)
        elif touch == "scale":
            ps[0].grad.mul_(0.5)
        elif touch == "replace":
            ps[2].grad = ps[2].grad * 2
        elif touch == "drop":
            ps[3].grad = None

    if touch == "hook":
        for model in (rig.model, rig.twin.model):
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(quarter)
    for step in range(3):
        rig.model.loss(step).backward()
        change(rig.model)
        rig.opt.step()
        rig.twin.model.loss(step).backward()
        change(rig.twin.model)
        rig.twin.step()
    assert rig.eager_updates == 0
    assert all(plain_grad(p) is None for p in params)
    rig.check()


@pytest.mark.parametrize("touch", ["clip", "clip nothing", "scale", "replace", "drop"])
def test_a_gradient_touched_once_updates_have_begun(lanes_device, touch) -> None:
    rig = Rig(lanes_device).proven()
    rig.backward(1)
    params = rig.params
    if touch.startswith("clip"):
        torch.nn.utils.clip_grad_norm_(params, 1e-3 if touch == "clip" else 1e9)
    elif touch == "scale":
        params[0].grad.mul_(0.5)
    elif touch == "replace":
        params[2].grad = params[2].grad * 2
    else:
        params[3].grad = None
    with pytest.raises(RuntimeError, match=r"parameter . of group 0.*gradient was changed.*max_grad_norm.*eager=False"):
        rig.opt.step()
    with pytest.raises(RuntimeError, match=r"gradient was changed|abandon"):
        rig.opt.step()
    assert len(rig.opt.abandon().updated) == rig.hooked
    rig.train(0)


def test_a_tiny_gradient_touched_once_updates_have_begun(lanes_device) -> None:
    """It has no hook: step() takes it as it is then."""
    rig = Rig(lanes_device).proven()
    for step in (1, 2):
        rig.backward_both(step)
        for model in (rig.model, rig.twin.model):
            tiny = list(model.parameters())[1]
            assert tiny.numel() <= _roster.TINY_ELEMS
            tiny.grad.mul_(0.5)
        rig.step_both()
    assert rig.eager_updates == 2 * rig.hooked > 0
    rig.check()


def test_a_model_of_tiny_parameters(lanes_device) -> None:
    for eager in ("auto", True, False):
        rig = Rig(lanes_device, 3, 4, 5, eager=eager)
        rig.train(3)
        rig.check()


def test_learning_rate_changed_between_backward_and_step(lanes_device) -> None:
    rig = Rig(lanes_device, eager=True)
    rig.backward()
    rig.opt.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=r"settings \(lr.*changed between backward and step.*eager=False"):
        rig.opt.step()
    rig.opt.param_groups[0]["lr"] = 1e-3
    rig.opt.step()
    rig.twin.model.loss().backward()
    rig.twin.step()
    rig.check()


@pytest.mark.parametrize("key", ["betas", "eps", "weight_decay", "maximize", "amsgrad"])
def test_other_settings_changed_between_backward_and_step(lanes_device, key) -> None:
    rig = Rig(lanes_device, eager=True)
    rig.backward()
    new = {"betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.3, "maximize": True, "amsgrad": True}[key]
    rig.opt.param_groups[0][key] = new
    with pytest.raises(RuntimeError, match="changed between backward and step"):
        rig.opt.step()


@pytest.mark.parametrize("lr", [0.5, 1e-3])
def test_numpy_learning_rate_changed_between_backward_and_step(lanes_device, lr) -> None:
    """Schedules made with numpy give its numbers, in fp32 too; an equal one is no change."""
    rig = Rig(lanes_device, eager=True, lr=np.float32(1e-3))
    rig.backward_both()
    rig.opt.param_groups[0]["lr"] = np.float32(lr)
    if lr == 0.5:
        with pytest.raises(RuntimeError, match="changed between backward and step"):
            rig.opt.step()
    else:
        rig.step_both()
        rig.check()


def test_the_users_own_keys_of_a_group_are_no_settings(lanes_device) -> None:
    """Whatever they are, they may change between backward and step, and a scheduler may be made there."""
    rig = Rig(lanes_device, eager=True)
    for step, value in enumerate([torch.ones(2), torch.zeros(2), [1], math.nan, "decay", None]):
        rig.backward_both(step)
        rig.opt.param_groups[0]["own"] = value
        if step == 3:
            torch.optim.lr_scheduler.StepLR(rig.opt, 1, gamma=0.5)
        rig.step_both()
    assert rig.eager_updates == 6 * rig.hooked > 0
    rig.check()


def test_tensor_learning_rate_filled_between_backward_and_step(lanes_device) -> None:
    rig = Rig(lanes_device, eager=True)
    rate = torch.tensor(0.25)
    rig.opt.param_groups[0]["lr"] = rate
    rig.backward()
    rate.fill_(0.5)
    with pytest.raises(RuntimeError, match="changed between backward and step"):
        rig.opt.step()


@pytest.mark.parametrize("eager", ["auto", True, False])
def test_schedulers(lanes_device, eager) -> None:
    rig = Rig(lanes_device, eager=eager, lr=0.01)
    ours = torch.optim.lr_scheduler.OneCycleLR(rig.opt, 0.1, total_steps=8)
    theirs = torch.optim.lr_scheduler.OneCycleLR(rig.twin.optimizer, 0.1, total_steps=8)
    for step in range(6):
        rig.train(1, step)
        ours.step()
        theirs.step()
    rig.check()


@pytest.mark.parametrize("eager", ["auto", True])
def test_zero_grad_before_step(lanes_device, eager) -> None:
    rig = Rig(lanes_device, eager=eager)
    rig.train()
    rig.backward(1)
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) before step\(\).*abandon"):
        rig.opt.zero_grad()
    rig.opt.step()
    rig.opt.zero_grad()
    rig.twin.model.loss(1).backward()
    rig.twin.step()
    rig.check()


@pytest.mark.parametrize("eager", ["auto", True])
def test_load_state_dict_before_step(lanes_device, eager) -> None:
    """The rest of the step would be done on what is loaded."""
    rig = Rig(lanes_device, eager=eager)
    rig.train()
    saved = copy.deepcopy(rig.opt.state_dict())
    rig.backward(1)
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) before step\(\).*abandon"):
        rig.opt.load_state_dict(saved)
    rig.opt.step()
    rig.twin.model.loss(1).backward()
    rig.twin.step()
    rig.check()
    rig.opt.load_state_dict(saved)


def test_zero_grad_drops_what_has_not_begun(lanes_device) -> None:
    rig = Rig(lanes_device, eager=False)
    rig.backward()
    rig.opt.zero_grad()
    rig.opt.step()
    rig.train(2)
    rig.check()


@pytest.mark.parametrize("eager", ["auto", True])
def test_a_second_backward_before_step(lanes_device, eager) -> None:
    rig = Rig(lanes_device, eager=eager)
    rig.train()
    rig.backward(1)
    with pytest.raises(RuntimeError, match=r"not followed by step\(\).*accumulation_steps=n.*abandon"):
        rig.backward(2)
    abandoned = rig.opt.abandon()
    assert len(abandoned.updated) == rig.hooked
    assert len(abandoned.dropped) == len(rig.params) - rig.hooked
    rig.backward(2)
    rig.opt.step()


def test_undeclared_accumulation_never_begins_in_backward(lanes_device) -> None:
    """With 'auto' and two backwards a step, the first step is no proof that one is enough."""
    rig = Rig(lanes_device)
    for step in range(3):
        for model in (rig.model, rig.twin.model):
            model.loss(step).backward()
            model.loss(step + 10).backward()
        rig.opt.step()
        rig.twin.step()
    assert rig.eager_updates == 0
    rig.check()


def test_create_graph(lanes_device) -> None:
    rig = Rig(lanes_device, eager=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the cycle
        with pytest.raises(RuntimeError, match=r"create_graph=True.*eager=False"):
            rig.model.loss().backward(create_graph=True)
    rig.opt.abandon()
    for p in rig.params:
        p.grad = None


def test_gradient_penalty(lanes_device) -> None:
    """Two uses of a weight in one graph, by way of autograd.grad: one gradient, the sum."""
    rig = Rig(lanes_device, eager=True)

    def loss(model: Stack, step: int) -> torch.Tensor:
        value = model.loss(step)
        grads = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        return value + sum((grad**2).sum() for grad in grads)

    for step in range(3):
        loss(rig.model, step).backward()
        rig.opt.step()
        loss(rig.twin.model, step).backward()
        rig.twin.step()
    assert rig.eager_updates == 3 * rig.hooked > 0
    rig.check()


@pytest.mark.parametrize("option", [{"max_grad_norm": 1.0}, {"compute_grad_norm": True}, {"nonfinite": "skip"}])
def test_options_that_need_all_gradients_first(lanes_device, option) -> None:
    with pytest.raises(ValueError, match="eager=True"):
        Rig(lanes_device, eager=True, **option)
    rig = Rig(lanes_device, **option)
    rig.train(4)
    assert rig.eager_updates == 0
    rig.check()


def test_clipping_switched_on_later(lanes_device) -> None:
    rig = Rig(lanes_device).proven()
    rig.train(1, 1)
    assert rig.eager_updates == rig.hooked > 0
    rig.opt.max_grad_norm = rig.twin.optimizer.max_grad_norm = 0.01
    rig.train(2, 2)
    assert rig.eager_updates == rig.hooked > 0
    assert rig.opt.last_grad_norm == rig.twin.optimizer.last_grad_norm
    rig.check()


def test_clipping_switched_on_between_backward_and_step(lanes_device) -> None:
    """Its gradients are used up: an error, not a step that is clipped in part."""
    rig = Rig(lanes_device).proven()
    rig.backward(1)
    rig.opt.max_grad_norm = 0.01
    with pytest.raises(RuntimeError, match="backward"):
        rig.opt.step()


def test_a_gradient_assigned_after_its_update(lanes_device) -> None:
    """With eager=True nothing is there to compare with; the weight must not be updated twice."""
    rig = Rig(lanes_device, eager=True)
    rig.backward()
    rig.params[0].grad = torch.ones_like(rig.params[0])
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0.*gradient"):
        rig.opt.step()


@pytest.mark.parametrize("eager", ["auto", True])
def test_a_step_that_is_refused_after_backward_has_begun(lanes_device, eager, monkeypatch) -> None:
    """What has begun is over; nothing has to be abandoned."""

    def fail() -> None:
        raise OSError("asked for")

    rig = Rig(lanes_device, eager=eager)
    rig.train()
    rig.backward(1)
    with monkeypatch.context() as patch:
        patch.setattr(rig.opt._slots, "settle", fail)
        with pytest.raises(OSError, match="asked for"):
            rig.opt.step()
    rig.opt.step()  # takes what had no hook
    rig.twin.model.loss(1).backward()
    rig.twin.step()
    rig.opt.load_state_dict(copy.deepcopy(rig.opt.state_dict()))
    rig.train(2, 2)
    rig.check()
