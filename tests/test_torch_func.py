"""`torch.func` over the parameters of an attached model whose updates are under way.

With `functional_call` the modules' hooks wait, as in any forward. A transform that is given a parameter itself wraps it
in native code, which nobody sees: `optimizer.wait()` comes before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.utils._pytree import tree_leaves

from fused import EAGER, EAGER_IDS, FusedRig
from lanes import is_pending
from oracle import assert_same

pytestmark = [
    pytest.mark.usefixtures("small_ones_have_hooks"),
    # torch's own, of jvp.
    pytest.mark.filterwarnings("ignore:`torch.jit.script.* is deprecated"),
]


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 320), torch.nn.Tanh(), torch.nn.Linear(320, 16))


def samples(m: torch.nn.Module) -> torch.Tensor:
    return torch.linspace(-1, 1, 80, device=m[0].weight.device).reshape(5, 16)


def loss(m: torch.nn.Module, step: int) -> torch.Tensor:
    device = next(iter(m.parameters())).device
    x = torch.linspace(-1, 1, 80, device=device).reshape(5, 16) + step % 3
    return m(x).square().mean()


def named(m: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(m.named_parameters())


def detached(m: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in m.named_parameters()}


def of_weights(m: torch.nn.Module, x: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    return lambda weights: functional_call(m, weights, (x,)).square().sum()


def per_sample(m: torch.nn.Module, weights: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    """Return the gradients of each sample."""
    of_one = grad(lambda weights, sample: functional_call(m, weights, (sample[None],)).square().sum())
    return vmap(of_one, in_dims=(None, 0))(weights, x)


#: Each takes a model and inputs.
THROUGH_MODULES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "functional_call": lambda m, x: functional_call(m, named(m), (x,)),
    "functional_call, detached": lambda m, x: functional_call(m, detached(m), (x,)),
    "functional_call, some weights": lambda m, x: functional_call(m, {"0.bias": torch.ones_like(m[0].bias)}, (x,)),
    "grad": lambda m, x: grad(of_weights(m, x))(named(m)),
    "grad, detached": lambda m, x: grad(of_weights(m, x))(detached(m)),
    "grad_and_value": lambda m, x: grad_and_value(of_weights(m, x))(named(m)),
    "gradients of each sample": lambda m, x: per_sample(m, named(m), x),
    "gradients of each sample, detached": lambda m, x: per_sample(m, detached(m), x),
    "vmap over the model": lambda m, x: vmap(m)(x),
    "vjp": lambda m, x: vjp(lambda w: functional_call(m, w, (x,)), named(m))[1](torch.ones_like(x)),
    "jvp": lambda m, x: jvp(
        lambda w: functional_call(m, w, (x,)), (named(m),), ({k: torch.ones_like(v) for k, v in detached(m).items()},)
    ),
    "jacrev": lambda m, x: jacrev(lambda w: functional_call(m, w, (x,)).sum(0))(named(m)),
    "jacfwd of inputs": lambda m, x: jacfwd(lambda inputs: functional_call(m, named(m), (inputs,)).sum(0))(x),
    "hessian of inputs": lambda m, x: hessian(lambda inputs: m(inputs).sum())(x[0]),
    "an ensemble": lambda m, x: vmap(lambda w: functional_call(m, w, (x,)))(stack_module_state([m, m])[0]),
    "a weight in a closure": lambda m, x: vmap(lambda row: m[0].weight @ row)(x),
}


def assert_like(a: Any, b: Any, what: str) -> None:
    ours, theirs = tree_leaves(a), tree_leaves(b)
    assert len(ours) == len(theirs) > 0
    for p, q in zip(ours, theirs, strict=True):
        assert_same(p.detach().cpu(), q.detach().cpu(), what)


def rig_under_way(lanes_device: Any, **options: Any) -> FusedRig:
    """After three steps, with the last updates under way."""
    rig = FusedRig(lanes_device, model(), loss, lr=0.01, **options)
    for step in range(3):
        rig.step(step)
    assert all(map(is_pending, rig.model.parameters()))
    return rig


@pytest.mark.parametrize("when", EAGER[:3:2], ids=EAGER_IDS[:3:2])
@pytest.mark.parametrize("name", THROUGH_MODULES)
def test_what_goes_through_modules_waits(lanes_device, name, when) -> None:
    rig = rig_under_way(lanes_device, **when)
    ours, theirs = (THROUGH_MODULES[name](m, samples(rig.their_model)) for m in (rig.model, rig.their_model))
    assert_like(ours, theirs, name)
    # And training goes on from there: nothing has been left marked, replaced or counted as a backward.
    rig.step(3)
    rig.check(name)


#: Each takes a weight.
GIVEN_A_PARAMETER: dict[str, Callable[[torch.Tensor], Any]] = {
    "grad": grad(lambda w: (w * w).sum()),
    "vmap": vmap(lambda row: (row * row).sum()),
    "jvp": lambda w: jvp(lambda v: v.sin().sum(0), (w,), (torch.ones_like(w.detach()),)),
    "jacrev": jacrev(lambda w: w.cos().sum(0)),
}


@pytest.mark.parametrize("waits", ["wait", "synchronize", "reads"])
@pytest.mark.parametrize("name", GIVEN_A_PARAMETER)
def test_what_is_given_a_parameter_comes_after_wait(lanes_device, name, waits) -> None:
    rig = rig_under_way(lanes_device, eager=True)
    if waits == "wait":
        rig.opt.wait(rig.model[0].weight)
    elif waits == "synchronize":
        rig.opt.synchronize()
    weight = rig.model[0].weight.detach() if waits == "reads" else rig.model[0].weight
    transform = GIVEN_A_PARAMETER[name]
    assert_like(transform(weight), transform(rig.their_model[0].weight), name)
    rig.check(name)


def test_gradients_of_torch_func_are_stepped(lanes_device) -> None:
    """A training loop without `backward()`: gradients from `torch.func.grad`, averaged over samples by the user."""
    rig = FusedRig(lanes_device, model(), loss, lr=0.01)
    for step in range(4):
        for m, optimizer in ((rig.model, rig.opt), (rig.their_model, None)):
            grads = per_sample(m, detached(m), samples(rig.their_model) + step)
            for name, p in m.named_parameters():
                p.grad = grads[name].mean(0)
            if optimizer is not None:
                optimizer.step()
        rig.twin.step()
    assert rig.eager_updates == 0, "no hook has seen a gradient"
    rig.check()
