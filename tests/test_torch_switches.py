"""The switches by which torch chooses among its implementations, and `zero_grad(set_to_none=False)`.

`foreach` and `fused` change nothing. `capturable` and `differentiable` are refused, wherever they are given; a
checkpoint that has them loads.
"""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch

import outboard
from fused import EAGER, EAGER_IDS, SMALL_RINGS, FusedRig, fused, mlp, mlp_loss
from lanes import Pair, plain_grad
from oracle import assert_same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of numba and others, which torch's test tools import where they are installed
    from torch.testing._internal.common_optimizers import (
        TensorTracker,
        _get_optim_inputs_including_global_cliquey_kwargs,
        optim_db,
    )
    from torch.testing._internal.common_utils import TestCase

DATABASE = {info.name: info for info in optim_db if info.name in ("Adam", "AdamW")}
OURS = {"Adam": outboard.Adam, "AdamW": outboard.AdamW}
REFUSED = {"capturable": "outside CUDA graphs", "differentiable": "outside autograd"}


def all_inputs() -> list[Any]:
    """Return every constructor input of torch's database with every switch that torch's own tests add to it."""
    return [
        pytest.param(name, entry.kwargs, id=f"{name}-{number}-{entry.desc}")
        for name, info in DATABASE.items()
        for number, entry in enumerate(
            # As for a GPU, where torch has all of them.
            _get_optim_inputs_including_global_cliquey_kwargs("cuda", torch.float32, info)
        )
    ]


def plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return settings as torch's fused optimizer takes them on the CPU: tensors as the numbers that they hold."""

    def number(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(number, value))
        return value.item() if isinstance(value, torch.Tensor) else value

    return {key: number(value) for key, value in kwargs.items() if key not in ("foreach", "fused")}


@pytest.mark.parametrize(("name", "kwargs"), all_inputs())
def test_every_input_with_every_switch(name, kwargs) -> None:
    """As torch's fused optimizer, milestone by milestone, or refused with the switch's name."""
    wrong = [key for key in REFUSED if kwargs.get(key)]
    p, q = (torch.nn.Parameter(torch.linspace(-1, 1, 176).reshape(11, 16)) for _ in range(2))
    if wrong:
        with pytest.raises(ValueError, match=f"{wrong[-1]}=True is not supported.*{REFUSED[wrong[-1]]}"):
            OURS[name]([p], **kwargs)
        return
    ours, theirs = OURS[name]([p], **kwargs), fused([q], OURS[name], **plain(kwargs))
    assert ours.param_groups[0].keys() == theirs.param_groups[0].keys()
    # torch's own way of comparing two implementations, here without any tolerance.
    milestones = TensorTracker(assert_eq_kwargs={"rtol": 0, "atol": 0})
    case = TestCase()
    for step in range(4):
        for parameter in (p, q):
            parameter.grad = torch.cos(parameter.detach() * (step + 1))
        theirs.step()
        ours.step()
        of_torch = theirs.state[q]
        for tensor in (q, *(value for key, value in of_torch.items() if key != "step")):
            milestones.add(tensor)
        # It also writes what it has compared, through the views of the state.
        for tensor in (p, *(ours.state[p][key] for key in of_torch if key != "step")):
            milestones.pop_check_set(tensor, case)
        assert milestones.all_popped()
        assert float(ours.state[p]["step"]) == float(of_torch["step"])


@pytest.mark.usefixtures("small_ones_have_hooks")
@pytest.mark.parametrize("name", DATABASE)
def test_every_input_attached(lanes_device, name) -> None:
    """Each constructor input, with updates that begin in backward."""
    seen = 0
    for entry in DATABASE[name].optim_inputs_func(device="cuda", dtype=torch.float32):
        options = {key: value for key, value in entry.kwargs.items() if key != "capturable"}
        rig = FusedRig(lanes_device, mlp(64), mlp_loss, cls=OURS[name], eager=True)
        # With tensors where the database has them; torch's fused CPU kernel wants numbers.
        rig.opt.detach()
        rig.opt = OURS[name](rig.model.parameters(), threads=1, eager=True, **SMALL_RINGS, **options).attach(rig.model)
        rig.twin.twin.optimizer = fused(rig.twin.twin.params, OURS[name], **plain(options))
        for step in range(3):
            rig.step(step)
        assert rig.eager_updates > 0
        rig.check(entry.desc)
        seen += 1
    assert seen >= 10


# ---- the constructor, groups, checkpoints


@pytest.mark.parametrize("cls", OURS.values())
@pytest.mark.parametrize("switch", REFUSED)
def test_refused_wherever_it_is_given(cls, switch) -> None:
    p, q = torch.nn.Parameter(torch.ones(16)), torch.nn.Parameter(torch.ones(16))
    message = f"{switch}=True is not supported.*{REFUSED[switch]}"
    with pytest.raises(ValueError, match=message + "$"):
        cls([p], **{switch: True})
    with pytest.raises(ValueError, match=f"{message}.* in parameter group 1"):
        cls([{"params": [p]}, {"params": [q], switch: True}])
    # The group's own word counts, as in torch; False in every group does not excuse the constructor's True.
    with pytest.raises(ValueError, match=message):
        cls([{"params": [p], switch: False}], **{switch: True})
    optimizer = cls([{"params": [p], switch: False}])
    with pytest.raises(ValueError, match=f"{message}.* in parameter group 1"):
        optimizer.add_param_group({"params": [q], switch: True})
    assert len(optimizer.param_groups) == 1, "nothing has been added"
    optimizer.add_param_group({"params": [q]})
    assert [group[switch] for group in optimizer.param_groups] == [False, False]


@pytest.mark.parametrize("switch", ["foreach", "fused"])
@pytest.mark.parametrize("value", [None, False, True])
def test_accepted_and_without_effect(switch, value) -> None:
    """In the constructor, in a group, and set later; they stay as they were given."""
    p, q, r = (torch.nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(3))
    ours = [outboard.AdamW([p], **{switch: value}), outboard.AdamW([{"params": [q], switch: value}])]
    theirs = fused([r])
    for step in range(3):
        for parameter in (p, q, r):
            parameter.grad = torch.sin(parameter.detach() + step)
        for optimizer in (*ours, theirs):
            optimizer.step()
        if step == 1:
            ours[0].param_groups[0][switch] = not value
    assert ours[1].param_groups[0][switch] is value
    assert_same(p, r)
    assert_same(q, r)


def test_contradicting_switches_as_torch() -> None:
    p = torch.nn.Parameter(torch.ones(16))
    for cls in (outboard.AdamW, torch.optim.AdamW):
        with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
            cls([p], fused=True, foreach=True)
        with pytest.raises(ValueError, match="lr as a Tensor is not supported for capturable=False and foreach=True"):
            cls([p], lr=torch.tensor(1e-3), foreach=True)


def torch_checkpoint(**switches: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return weights and the state of torch's optimizer after two steps, as a file would give it."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 64))
    optimizer = fused([p], lr=0.01)
    for step in range(2):
        p.grad = torch.sin(p.detach() + step)
        optimizer.step()
    # As a run on a GPU would have had them: there torch has no fused AdamW that is differentiable, say.
    optimizer.param_groups[0].update({"fused": None, **switches})
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return p.detach().clone(), torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "switches",
    [
        {"capturable": True},
        {"differentiable": True},
        {"capturable": True, "differentiable": True},
        {"foreach": True},
        {"fused": True},
    ],
    ids=lambda switches: " ".join(switches),
)
def test_a_checkpoint_of_torchs_that_has_them(switches) -> None:
    """Loads, and goes on with the bits of having trained with torch; what is refused elsewhere is False afterwards."""
    weights, saved = torch_checkpoint(**switches)
    p, q = (torch.nn.Parameter(weights.clone()) for _ in range(2))
    ours, theirs = outboard.AdamW([p]), fused([q])
    kept = copy.deepcopy(saved)
    ours.load_state_dict(saved)
    assert saved["param_groups"] == kept["param_groups"], "the user's dict is not changed"
    theirs.load_state_dict({**kept, "param_groups": [{**kept["param_groups"][0], "capturable": False, "fused": True}]})
    group = ours.param_groups[0]
    assert group["capturable"] is False
    assert group["differentiable"] is False
    for key in ("foreach", "fused"):
        assert group[key] is switches.get(key)
    theirs.param_groups[0]["differentiable"] = theirs.param_groups[0]["foreach"] = False
    for step in range(2, 4):
        for parameter in (p, q):
            parameter.grad = torch.sin(parameter.detach() + step)
        ours.step()
        theirs.step()
    assert_same(p, q)
    # Its groups may be given to another optimizer: nothing in them is refused.
    other = outboard.AdamW([{**group, "params": [torch.nn.Parameter(torch.ones(3))]}])
    assert other.param_groups[0]["lr"] == 0.01
    # And back: torch steps what outboard saved, on the CPU too, where it refuses `capturable`.
    back = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone())])
    back.load_state_dict(ours.state_dict())
    back.param_groups[0]["params"][0].grad = torch.ones(64)
    back.step()


def test_a_checkpoint_with_them_of_an_attached_model(lanes_device) -> None:
    rig = FusedRig(lanes_device, mlp(64), mlp_loss, lr=0.01)
    for step in range(2):
        rig.step(step)
    saved = copy.deepcopy(rig.theirs.state_dict())
    for group in saved["param_groups"]:
        group.update(capturable=True, foreach=True, fused=None)
    rig.opt.load_state_dict(saved)
    for step in range(2, 4):
        rig.step(step)
    assert rig.opt.param_groups[0]["capturable"] is False
    rig.check()


# ---- zero_grad(set_to_none=False)


@pytest.mark.parametrize("value", ["set_to_none=False", "of the model", "default"])
def test_gradients_that_are_zeroed_stay(lanes_device, value) -> None:
    """Not attached: `p.grad` is the same tensor, zeroed once the step has read it, and filled again."""
    torch.manual_seed(1)
    pair = Pair([lanes_device.parameter(torch.randn(size)) for size in (70_000, 300, 5)], lr=0.01)
    grads = [torch.zeros_like(p.detach()) for p in pair.params]
    for _ in range(5):
        for p, grad in zip(pair.params, grads, strict=True):
            p.grad = grad
            grad.copy_(torch.randn(p.shape))
        pair.step_with(grads)
        # At once: on a device the updates have been ordered, not finished.
        if value == "set_to_none=False":
            pair.opt.zero_grad(set_to_none=False)
        elif value == "of the model":
            pair.model.zero_grad(set_to_none=False)
        else:
            pair.opt.zero_grad()
        for p, grad in zip(pair.params, grads, strict=True):
            if value == "default":
                assert plain_grad(p) is None
            else:
                assert plain_grad(p) is grad
                assert not grad.any()
    pair.check()


@pytest.mark.usefixtures("small_ones_have_hooks")
@pytest.mark.parametrize("of", ["optimizer", "model"])
@pytest.mark.parametrize("when", EAGER, ids=EAGER_IDS)
def test_attached_there_is_nothing_left_to_zero(lanes_device, when, of) -> None:
    """Gradients are let go as they are used, whatever `set_to_none` says; such a loop has torch's bits."""
    rig = FusedRig(lanes_device, mlp(), mlp_loss, lr=0.01, **when)
    for step in range(5):
        rig.loss(rig.model, step).backward()
        rig.opt.step()
        (rig.opt if of == "optimizer" else rig.model).zero_grad(set_to_none=False)
        assert all(plain_grad(p) is None for p in rig.model.parameters())
        rig.loss(rig.their_model, step).backward()
        rig.twin.step()
    assert (rig.eager_updates > 0) == (when["eager"] is not False)
    rig.check()


@pytest.mark.parametrize("when", EAGER[:3], ids=EAGER_IDS[:3])
def test_attached_zeroed_before_step(lanes_device, when, small_ones_have_hooks) -> None:
    """What has not begun is zeroed and stays; where updates have begun in backward it is refused."""
    rig = FusedRig(lanes_device, mlp(), mlp_loss, lr=0.01, **when)
    for step in range(2):
        rig.step(step)
    rig.loss(rig.model, 2).backward()
    if when["eager"] is not False:
        assert rig.eager_updates > 0
        with pytest.raises(RuntimeError, match=r"zero_grad\(\) before step\(\)"):
            rig.opt.zero_grad(set_to_none=False)
        rig.opt.step()
        rig.loss(rig.their_model, 2).backward()
    else:
        rig.opt.zero_grad(set_to_none=False)
        grads = [plain_grad(p) for p in rig.model.parameters()]
        assert all(grad is not None and not grad.any() for grad in grads)
        rig.opt.step()
        for p in rig.their_model.parameters():
            p.grad = torch.zeros_like(p)
    rig.twin.step()
    rig.check()
