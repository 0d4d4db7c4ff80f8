"""Graphs that use a weight in several ways, with updates that begin in backward.

An update may write a weight while backward goes on: right where every use of the weight in the graph adds to its
gradient. Where one does not, autograd says so; `eager=False` is the cure.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from fused import EAGER, EAGER_IDS, FusedRig

pytestmark = pytest.mark.usefixtures("small_ones_have_hooks")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 64)
        self.last = torch.nn.Linear(64, 16)


#: Each computes an output of a model.
SAFE: dict[str, Callable[[Model, torch.Tensor], torch.Tensor]] = {
    "two uses of one weight": lambda m, x: m.last(torch.tanh(m.first(m.last(torch.tanh(m.first(x)))))),
    "slices": lambda m, x: (
        functional.linear(x, m.first.weight[:32], m.first.bias[:32]).tanh() @ m.last.weight[:, :32].t()
        + functional.linear(x, m.first.weight[32:], m.first.bias[32:]).sin() @ m.last.weight[:, 32:].t()
        + m.last.bias
    ),
    "a weight and its square": lambda m, x: (
        m.last(m.first(x).tanh()) + (m.last.weight**2).mean() + m.first.weight.sum()
    ),
    "tied by the transpose": lambda m, x: functional.linear(m.first(x).tanh(), m.first.weight.t()) + m.last(m.first(x)),
    "a detached output": lambda m, x: m.last(m.first(x).tanh()) * m.first(x).detach().mean(),
}

#: Uses that do not feed the gradient, which backward reads after the update.
UNSAFE: dict[str, Callable[[Model, torch.Tensor], torch.Tensor]] = {
    # The detached use is nearer to the input: its backward comes after the one that completes the gradient.
    "detach": lambda m, x: m.last(
        functional.linear(functional.linear(m.first(x), m.last.weight.detach()), m.first.weight)
    ),
}


def rig_of(lanes_device, use, **when) -> FusedRig:
    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        x = torch.linspace(-1, 1, 64, device=next(iter(model.parameters())).device).reshape(4, 16)
        result: torch.Tensor = (use(model, x + step % 3) - 0.5).square().mean()
        return result

    return FusedRig(lanes_device, Model(), loss, lr=0.01, **when)


@pytest.mark.parametrize("when", EAGER[1:3], ids=EAGER_IDS[1:3])
@pytest.mark.parametrize("name", SAFE)
def test_every_use_adds_to_the_gradient(lanes_device, name, when) -> None:
    rig = rig_of(lanes_device, SAFE[name], **when)
    for step in range(5):
        rig.step(step)
    assert rig.eager_updates > 0
    rig.check(name)


@pytest.mark.parametrize("name", UNSAFE)
def test_a_use_that_does_not_is_told(lanes_device, name) -> None:
    """By autograd, since the version of a weight is raised in the hook, before anything is written."""
    rig = rig_of(lanes_device, UNSAFE[name], eager=True)
    loss = rig.loss(rig.model, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert rig.opt.abandon().updated
    late = rig_of(lanes_device, UNSAFE[name], eager=False)
    for step in range(4):
        late.step(step)
    late.check(name)


def test_data_in_a_graph_with_updates_at_step(lanes_device) -> None:
    """`.data`, which autograd does not see, nearer to the input than the uses that complete the gradient."""

    def use(m: Model, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = functional.linear(m.first(x), m.last.weight.data)
        return m.last(functional.linear(hidden, m.first.weight))

    rig = rig_of(lanes_device, use, eager=False)
    for step in range(4):
        rig.step(step)
    rig.check()
