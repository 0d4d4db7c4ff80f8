"""What the tests of state on the host share: a small model, its training, and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import outboard
from lanes import LanesDevice


def make_model(device: LanesDevice, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    )
    return layers.to(device.device, dtype)


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.1}]


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    seed: int = 1,
    drop: Callable[[int], list[torch.Tensor]] = lambda _: [],
) -> None:
    weight = next(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    for index in range(steps):
        x = torch.randn(16, 64, generator=generator).to(weight)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for parameter in drop(index):
            parameter.grad = None
        optimizer.step()


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, left), right in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right), name


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one["state"]) == list(other["state"])
    for index, left in one["state"].items():
        right = other["state"][index]
        assert list(left) == list(right)
        for key, value in left.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == right[key].dtype
                assert torch.equal(value.cpu(), right[key].cpu()), (index, key)
            else:
                assert value == right[key]


def hazards(owner: outboard.StateOffload | outboard.Muon) -> list[str]:
    """Return what copies have touched in no order; of CUDA it is not known."""
    kept = owner._hollow if isinstance(owner, outboard.Muon) else owner._residence
    assert kept is not None
    carriers = [carrier for carrier in kept.carriers.all() if carrier.device.type != "cuda"]
    return [hazard for carrier in carriers for hazard in carrier.shuttle.hazards()]


class Counting(torch.optim.Optimizer):
    """Counts steps of itself and of its groups, and has state that travels and state that does not."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "step": 0, "count": torch.zeros(()), "log": []})
        self.total = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.total += 1
        for group in self.param_groups:
            group["step"] += 1
            group["count"] += 1
            group["log"].append(group["step"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros_like(parameter)
                    state["integers"] = torch.zeros(3, dtype=torch.int64, device=parameter.device)
                with torch.no_grad():
                    state["sum"] = state["sum"] * 0.9 + parameter.grad  # another tensor each time
                    state["integers"] += 1
                    parameter.sub_(state["sum"], alpha=group["lr"] / group["step"])


class Failing(Counting):
    """Fails at one parameter."""

    at: int | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        seen = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if seen == self.at:
                    raise RuntimeError("the math has failed")
                seen += 1
                self.state[parameter].setdefault("sum", torch.zeros_like(parameter)).add_(1)
