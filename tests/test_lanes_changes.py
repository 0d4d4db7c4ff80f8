"""Attached optimizers whose groups, parameters or weights change."""

from __future__ import annotations

import copy

import pytest
import torch

import outboard
from lanes import (
    Rig,
    Stack,
    Twin,
    TwinModel,
    assert_untouched,
    train,
)
from oracle import assert_same

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = [pytest.mark.timeout(60, method="thread"), pytest.mark.usefixtures("small_ones_have_hooks")]

FP32, BF16 = torch.float32, torch.bfloat16


# ---- groups and parameters that change


@pytest.mark.parametrize("eager", ["auto", True, False])
@pytest.mark.parametrize("sizes", [(3000, 700, 66_000), (5, 6, 7)], ids=["hooked", "tiny"])
def test_unfrozen_later(lanes_device, eager, sizes) -> None:
    model = Stack(800, *sizes)
    for p in list(model.parameters())[1:]:
        p.requires_grad_(False)
    rig = Rig(lanes_device, model=model, eager=eager)
    rig.train(3)
    # One before backward, one between backward and step, when it has no gradient yet.
    for m in (rig.model, rig.twin.model):
        m[1].weight.requires_grad_()
    rig.train(2, 3)
    rig.model.loss(5).backward()
    rig.model[2].weight.requires_grad_()
    rig.opt.step()
    rig.twin.model.loss(5).backward()
    rig.twin.model[2].weight.requires_grad_()
    rig.twin.step()
    rig.train(3, 6)
    rig.check()
    assert float(rig.opt.state[rig.model[1].weight]["step"]) == 6
    assert float(rig.opt.state[rig.model[2].weight]["step"]) == 3


@pytest.mark.parametrize("eager", ["auto", True, False])
def test_frozen_later(lanes_device, eager) -> None:
    rig = Rig(lanes_device, eager=eager)
    rig.train(2)
    for m in (rig.model, rig.twin.model):
        m[2].weight.requires_grad_(False)
    rig.train(3, 2)
    rig.check()


@pytest.mark.parametrize("eager", ["auto", True, False])
@pytest.mark.parametrize("when", ["before forward", "before step"])
def test_add_param_group_after_attach(lanes_device, eager, when) -> None:
    model = Stack(3000, 5, 700, 66_000, 6).to(lanes_device.device)
    twin = TwinModel(model)
    opt = outboard.AdamW(list(model.parameters())[:2], threads=1, eager=eager).attach(model)
    twin.optimizer.param_groups.clear()
    twin.optimizer.add_param_group({"params": twin.twin.params[:2]})

    def add() -> None:
        opt.add_param_group({"params": list(model.parameters())[2:], "lr": 0.1, "weight_decay": 0.5})
        twin.optimizer.add_param_group({"params": twin.twin.params[2:], "lr": 0.1, "weight_decay": 0.5})

    for step in range(2):
        train(model, opt, twin, 1, step)
    if when == "before forward":
        model.zero_grad()
        add()
    else:
        model.zero_grad()
        model.loss(2).backward()
        for p in list(model.parameters())[2:]:
            p.grad = None
        add()
        opt.step()
        twin.model.loss(2).backward()
        for p in list(twin.model.parameters())[2:]:
            p.grad = None
        twin.step()
    for step in range(3, 6):
        train(model, opt, twin, 1, step)
    twin.check(opt)


@pytest.mark.parametrize("eager", ["auto", True, False])
def test_settings_of_a_loaded_state_dict_are_used_in_backward(lanes_device, eager) -> None:
    rig = Rig(lanes_device, eager=eager, lr=0.001)
    rig.train(2)
    for opt in (rig.opt, rig.twin.optimizer):
        saved = copy.deepcopy(opt.state_dict())
        saved["param_groups"][0]["lr"] = 0.3
        saved["param_groups"][0]["betas"] = (0.2, 0.3)
        opt.load_state_dict(saved)
    rig.train(2, 2)
    for opt in (rig.opt, rig.twin.optimizer):
        opt.param_groups[0]["lr"] = 0.05
    rig.train(2, 4)
    rig.check()


@pytest.mark.parametrize("eager", ["auto", True, False])
@pytest.mark.parametrize("share", [0, 0.5, 1.0])
@pytest.mark.parametrize("how", ["data", "dict item"])
def test_state_moved_between_steps(lanes_device, eager, share, how) -> None:
    """Loops over the state that move each tensor elsewhere: the next update uses what they leave, in backward too.

    Updates that had begun in backward were undone by `step()`, which took over what was there before them.
    """
    rig = Rig(lanes_device, eager=eager, device_state_bytes=share)
    for step in range(0, 6, 2):
        rig.train(2, step)
        for opt in (rig.opt, rig.twin.optimizer):
            for state in opt.state.values():
                for key, tensor in list(state.items()):
                    moved = tensor.data.clone() if key == "step" else tensor.data * 1.5
                    if how == "data":
                        tensor.data = moved
                    else:
                        dict.__setitem__(state, key, moved)
    rig.train(2, 6)
    rig.check()
    if how == "dict item" and eager is True:
        # What is refused there has not begun anything.
        kept = rig.opt.state[rig.params[2]]["exp_avg"]
        dict.__setitem__(rig.opt.state[rig.params[2]], "exp_avg", torch.ones(3))
        with pytest.raises(ValueError, match="exp_avg has shape"):
            rig.backward(8)
        rig.opt.state[rig.params[2]]["exp_avg"] = kept
        rig.opt.zero_grad()
        rig.train(2, 9)
        rig.check()
    assert (rig.eager_updates > 0) == (eager is not False)


@pytest.mark.parametrize("eager", ["auto", True, False])
def test_amsgrad_switched_on_later(lanes_device, eager) -> None:
    rig = Rig(lanes_device, eager=eager, betas=(0.5, 0.6))
    rig.train(3)
    for opt in (rig.opt, rig.twin.optimizer):
        opt.param_groups[0]["amsgrad"] = True
    rig.train(3, 3)
    rig.check()


def test_groups_that_others_rebuild(lanes_device) -> None:
    """`param_groups` assigned anew, and a parameter replaced in place of its list, as accelerate does."""
    rig = Rig(lanes_device, eager=True)
    rig.train()
    for opt in (rig.opt, rig.twin.optimizer):
        opt.param_groups = [{**group, "lr": 0.2} for group in opt.param_groups]
    rig.train(2, 1)
    rig.check()
    new = torch.nn.Parameter(rig.model[0].weight.detach() * 2)
    rig.model[0].weight = new
    rig.opt.param_groups[0]["params"][0] = new
    twin = TwinModel(rig.model)
    with torch.no_grad():
        twin.optimizer.load_state_dict(rig.opt.state_dict())
    train(rig.model, rig.opt, twin, 3)
    twin.check(rig.opt)


def test_parameters_that_modules_share(lanes_device) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(300, 40)
            self.inner = torch.nn.Linear(40, 40)
            self.head = torch.nn.Linear(40, 300, bias=False)
            self.head.weight = self.embedding.weight
            self.again = self.inner

        def loss(self, step: int) -> torch.Tensor:
            tokens = (torch.arange(60, device=self.head.weight.device) * (step + 1)) % 300
            x = self.again(torch.tanh(self.inner(self.embedding(tokens))))
            return torch.nn.functional.cross_entropy(self.head(x), tokens)

    for eager in ("auto", True, False):
        rig = Rig(lanes_device, model=Tied(), eager=eager, lr=0.01)
        rig.train(4)
        assert len(rig.params) == 3
        assert rig.eager_updates == {"auto": 3, True: 4, False: 0}[eager] * rig.hooked
        rig.check()


def test_several_models(lanes_device) -> None:
    one, two = Stack(3000, 5).to(lanes_device.device), Stack(700, 66_000).to(lanes_device.device)
    both = torch.nn.ModuleList([one, two])
    both.loss = lambda step: two(one(torch.full((3,), 0.1 * step, device=lanes_device.device))).sum()
    twin = TwinModel(one)
    twin.model = copy.deepcopy(torch.nn.ModuleList([one, two]))
    a, b = twin.model
    twin.model.loss = lambda step: b(a(torch.full((3,), 0.1 * step, device=lanes_device.device))).sum()
    params = [*one.parameters(), *two.parameters()]
    twin.twin = Twin(params)
    opt = outboard.AdamW(params, threads=1, eager=True).attach(one).attach(two)
    train(both, opt, twin, 4)
    assert opt.stats()["eager_updates"] == 4 * 3
    twin.check(opt)
    opt.detach()
    assert not any(p._post_accumulate_grad_hooks for p in params)


def test_attaching_twice(lanes_device) -> None:
    rig = Rig(lanes_device)
    hooks = [len(module._forward_pre_hooks) for module in rig.model.modules()]
    for _ in range(3):
        rig.opt.attach(rig.model)
    assert [len(module._forward_pre_hooks) for module in rig.model.modules()] == hooks
    rig.train(4)
    assert rig.eager_updates == 3 * rig.hooked > 0
    rig.check()
    rig.opt.detach()
    assert_untouched(rig.model)


def test_what_attach_refuses(lanes_device) -> None:
    model = Stack(5, 6).to(lanes_device.device)
    opt = outboard.AdamW(model.parameters())
    with pytest.raises(TypeError, match="takes the model"):
        opt.attach(list(model.parameters()))
    with pytest.raises(ValueError, match="none of the model's parameters"):
        opt.attach(Stack(5))
    assert opt.attach(model) is opt
    assert opt.detach() is opt
    assert opt.detach() is opt


class MyParameter(torch.nn.Parameter):
    """Somebody's subclass."""


@pytest.mark.parametrize("kind", ["plain tensor", "subclass", "subclass in the model"])
@pytest.mark.parametrize("eager", ["auto", True, False])
def test_parameters_that_cannot_be_marked(lanes_device, kind, eager) -> None:
    """A learned temperature, say, listed beside a model: whoever reads it after step() sees its new value."""
    model = Stack(66_000, 700).to(lanes_device.device)
    values = torch.randn(400_000)
    if kind == "plain tensor":
        extra = lanes_device.put(values).requires_grad_()
    else:
        extra = MyParameter(lanes_device.put(values))
    if kind == "subclass in the model":
        model[1].register_parameter("extra", extra)
    params = [*model.parameters()]
    if kind != "subclass in the model":
        params.append(extra)
    at = next(index for index, p in enumerate(params) if p is extra)
    twin = Twin(params, lr=0.01)
    opt = outboard.AdamW(params, lr=0.01, threads=1, eager=eager, chunk_elems=2_000).attach(model)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        twin.step()
        opt.step()
        seen = extra.detach().clone()
        assert_same(seen.cpu(), twin.params[at])
    twin.check(opt)
    assert type(extra) is (torch.Tensor if kind == "plain tensor" else MyParameter)


# ---- weights replaced


def test_parameter_replaced_by_load_state_dict_assign(lanes_device) -> None:
    rig = Rig(lanes_device)
    rig.train()
    rig.model.load_state_dict({k: v.clone() for k, v in rig.model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"weight of Layer is another parameter.*assign=True.*anew"):
        rig.model.loss()


def test_parameter_of_a_module_that_is_never_called_is_replaced(lanes_device) -> None:
    """MultiheadAttention reads its out_proj's weight itself; the error is the same."""
    model = torch.nn.Sequential(torch.nn.MultiheadAttention(32, 2)).to(lanes_device.device)
    opt = outboard.AdamW(model.parameters(), threads=1).attach(model)
    x = torch.randn(4, 1, 32, device=lanes_device.device)

    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = model[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x)[0]

    root = Root()
    opt.detach().attach(root)
    root(x).sum().backward()
    opt.step()
    with torch.no_grad():
        model[0].out_proj.weight = torch.nn.Parameter(torch.zeros_like(model[0].out_proj.weight))
    with pytest.raises(RuntimeError, match="another parameter"):
        root(x)


def test_functional_call_is_no_replacement(lanes_device) -> None:
    rig = Rig(lanes_device)
    rig.train()
    rig.backward(1)
    rig.opt.step()
    weights = {name: p * 2 for name, p in rig.model.named_parameters()}
    x = torch.full((3,), 0.1, device=lanes_device.device)
    got = torch.func.functional_call(rig.model, weights, (x,))
    rig.twin.model.loss(1).backward()
    rig.twin.step()
    doubled = {name: p * 2 for name, p in rig.twin.model.named_parameters()}
    assert_same(got.cpu(), torch.func.functional_call(rig.twin.model, doubled, (x,)).cpu())


@pytest.mark.parametrize("eager", [True, False])
def test_data_replaced_after_attach(lanes_device, eager) -> None:
    rig = Rig(lanes_device, eager=eager)
    rig.train(2)
    rig.backward(2)
    rig.opt.step()
    for p in rig.params:
        p.data = torch.full_like(p, 0.25)
    rig.twin.model.loss(2).backward()
    rig.twin.step()
    with torch.no_grad():
        for p in (*rig.twin.model.parameters(), *rig.twin.twin.params):
            p.fill_(0.25)
    rig.train(2, 3)
    rig.check()


@pytest.mark.parametrize("eager", [True, False])
def test_dtype_changed_after_attach(lanes_device, eager) -> None:
    rig = Rig(lanes_device, eager=eager)
    rig.train()
    rig.model.to(BF16)

    def step() -> None:
        rig.backward(1)
        rig.opt.step()

    with pytest.raises(TypeError, match=r"parameter . of group 0.*torch.float32.*bfloat16.*build a new optimizer"):
        step()


def test_parameters_moved_after_construction_and_before_attach(lanes_device) -> None:
    """`.to(bf16)` keeps the object and changes its memory: slots bind at attach."""
    model = Stack(3000, 700)
    opt = outboard.AdamW(model.parameters(), threads=1)
    model.to(lanes_device.device, BF16)
    twin = TwinModel(model)
    opt.attach(model)
    train(model, opt, twin, 3)
    assert opt.state[model[0].weight]["residual"].dtype is torch.int16
    twin.check(opt)


def test_amsgrad_later_for_a_parameter_that_has_moved_to_the_device() -> None:
    """Bound in host memory, its state stays there, whatever may be resident by now."""
    from outboard._lanes import LaneOptions

    p = torch.nn.Parameter(torch.randn(3000))
    opt = outboard.AdamW([p], device_state_bytes=1.0, threads=1)
    twin = Twin([p])
    p.grad = torch.randn_like(p)
    twin.step()
    opt.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaneOptions, "simulate", 3)
        for group in (opt.param_groups[0], twin.optimizer.param_groups[0]):
            group["amsgrad"] = True
        twin.step()
        opt.step()
        twin.check(opt)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("options", [{"eager": True}, {"eager": "auto"}, {"offload_gradients": True}], ids=str)
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_listed_twice(lanes_device, options, accumulation_steps) -> None:
    """One update a step, of those without a hook too."""
    model = Stack(3000, 5, 700).to(lanes_device.device)
    twin = TwinModel(model)
    params = list(model.parameters())
    listed = [*params, params[1], params[2]]
    opt = outboard.AdamW(listed, threads=1, accumulation_steps=accumulation_steps, **options).attach(model)
    for step in range(4):
        for _ in range(accumulation_steps):
            model.loss(step).backward()
            twin.model.loss(step).backward()
        opt.step()
        twin.step()
    twin.check(opt)
