"""Twins that torch's own fused optimizers step, for tests that compare with torch itself.

Parameters are fp32 and of a multiple of 16 elements: there torch's fused CPU kernels give outboard's bits. On a device
the twin computes its gradients there, and its weights are stepped in host memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

import outboard
from lanes import NUMERIC, TwinModel

#: torch's class for each of outboard's.
THEIRS: dict[Any, Any] = {outboard.AdamW: torch.optim.AdamW, outboard.Adam: torch.optim.Adam}

#: Everything that says when and where updates of an attached model begin.
EAGER = [
    {"eager": False},
    {"eager": "auto"},
    {"eager": True},
    {"eager": True, "offload_gradients": True},
]
#: The default ones take longer to make than a test to run.
SMALL_RINGS = {"host_ring_bytes": 2 << 20, "device_ring_bytes": 2 << 20}
EAGER_IDS = ["at step", "auto", "in backward", "offloaded"]


def fused(params: Iterable[Any], cls: Any = outboard.AdamW, **options: Any) -> torch.optim.Optimizer:
    """Return torch's fused optimizer for one of outboard's classes; options of outboard alone are left out."""
    known = {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"}
    assert not (options.keys() & NUMERIC) - known, "torch has no such option"
    return THEIRS[cls](params, fused=True, **{key: value for key, value in options.items() if key in known})


class FusedTwin(TwinModel):
    """A copy of a model on its device, stepped by torch's fused optimizer in host memory.

    Parameters
    ----------
    groups : callable, optional
        Makes parameter groups from a list of parameters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        groups: Callable[[list[Any]], list[Any]] | None = None,
        cls: Any = outboard.AdamW,
        **options: Any,
    ) -> None:
        super().__init__(model)
        assert all(p.numel() % 16 == 0 and p.dtype is torch.float32 for p in model.parameters())
        params = self.twin.params
        self.twin.optimizer = fused(params if groups is None else groups(params), cls, **options)


class FusedRig:
    """A model with an optimizer of outboard, attached unless it is not to be, and its twin.

    Parameters
    ----------
    model : Module
        fp32, each parameter of a multiple of 16 elements; copied to the device.
    loss : callable
        Takes a model and the number of a step.
    """

    def __init__(
        self,
        lanes_device: Any,
        model: torch.nn.Module,
        loss: Callable[[torch.nn.Module, int], torch.Tensor],
        *,
        groups: Callable[[list[Any]], list[Any]] | None = None,
        cls: Any = outboard.AdamW,
        attached: bool = True,
        **options: Any,
    ) -> None:
        self.model = copy.deepcopy(model).to(lanes_device.device)
        self.loss = loss
        self.twin = FusedTwin(self.model, groups, cls, **options)
        params = list(self.model.parameters())
        self.opt = cls(params if groups is None else groups(params), **{"threads": 1, "chunk_elems": 5_000, **options})
        if attached:
            self.opt.attach(self.model)

    @property
    def their_model(self) -> torch.nn.Module:
        """The twin's model, on the device."""
        return self.twin.model

    @property
    def theirs(self) -> torch.optim.Optimizer:
        """torch's optimizer."""
        return self.twin.optimizer

    @property
    def eager_updates(self) -> int:
        return int(self.opt.stats()["eager_updates"])

    def step(self, number: int = 0) -> None:
        """Train both for one step; nothing is read in between."""
        self.loss(self.model, number).backward()
        self.opt.step()
        self.opt.zero_grad()
        self.loss(self.their_model, number).backward()
        self.twin.step()

    def check(self, what: str = "") -> None:
        self.twin.check(self.opt, what)


def mlp(wide: int = 320) -> torch.nn.Sequential:
    """Return a small perceptron with buffers for inputs of 16 numbers."""
    return torch.nn.Sequential(
        torch.nn.Linear(16, wide), torch.nn.BatchNorm1d(wide), torch.nn.Tanh(), torch.nn.Linear(wide, 16)
    )


def mlp_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    """Return a loss of 8 samples that differ from step to step."""
    device = next(iter(model.parameters())).device
    x = torch.sin(torch.arange(128.0, device=device).reshape(8, 16) * (1 + step % 5))
    result: torch.Tensor = (model(x) - x).square().mean()
    return result
