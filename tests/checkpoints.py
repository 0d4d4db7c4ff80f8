"""What the tests of `outboard.checkpoint` share: optimizers with every kind of state, and comparisons to the bit."""

from __future__ import annotations

import copy
from typing import Any

import torch

import outboard
from lanes import Twin, set_grad
from oracle import assert_same

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

#: What may be configured and reaches the state.
CONFIGURATIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (FP32, {}),
    "fp32 amsgrad": (FP32, {"amsgrad": True}),
    "fp32 bf16 moments": (FP32, {"state_dtype": BF16, "seed": 5}),
    "bf16 split": (BF16, {}),
    "bf16 full": (BF16, {"master": "full"}),
    "bf16 all bf16": (BF16, {"state_dtype": BF16, "amsgrad": True}),
    "fp16": (FP16, {}),
}


class Model(torch.nn.Module):
    """Parameters of every shape that a file may get wrong: two dimensions, strides, none, empty, tied, frozen."""

    def __init__(self, dtype: torch.dtype = FP32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

        self.weight = parameter(16, 6)
        self.transposed = torch.nn.Parameter(parameter(4, 8).detach().t())
        self.scale = parameter()
        self.nothing = parameter(0, 3)
        self.frozen = parameter(5)
        self.frozen.requires_grad = False
        self.tied = self.weight
        self.bias = parameter(32)


def groups(model: Model, *, named: bool, swapped: bool = False) -> list[dict[str, Any]]:
    """Two groups with settings of their own, in this order or another."""
    names = [["weight", "transposed", "frozen"], ["scale", "nothing", "bias"]]
    settings = [{"lr": 0.01, "betas": (0.8, 0.95), "tag": "decay"}, {"lr": 0.002, "weight_decay": 0.0}]
    if swapped:
        names = [list(reversed(group)) for group in reversed(names)]
        settings = [{}, {}]
    return [
        {"params": [(name, getattr(model, name)) if named else getattr(model, name) for name in group], **options}
        for group, options in zip(names, settings, strict=True)
    ]


def make(
    name: str = "fp32", *, named: bool = True, swapped: bool = False, cls: Any = outboard.AdamW, **more: Any
) -> tuple[Model, Any]:
    """Make a model and an optimizer of a configuration."""
    dtype, options = CONFIGURATIONS[name]
    model = Model(dtype)
    return model, cls(groups(model, named=named, swapped=swapped), **{**options, **more})


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Step with gradients that are functions of step and name alone."""
    for step in steps:
        for number, (_, p) in enumerate(sorted(model.named_parameters())):
            if p.requires_grad:
                generator = torch.Generator().manual_seed(100 * step + number)
                p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        optimizer.step()


def snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return copies of all weights and all state, by the parameters' names."""
    found = {}
    state = {id(p): values for p, values in optimizer.state.items() if isinstance(p, torch.Tensor)}
    for name, p in model.named_parameters():
        found[name] = p.detach().cpu().clone()
        for key, value in state.get(id(p), {}).items():
            found[f"{name} {key}"] = value.cpu().clone() if isinstance(value, torch.Tensor) else value
    return found


def assert_equal_snapshots(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert_same(got[key], value, key)
        else:
            assert got[key] == value, key


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


# ---- on a device with lanes


class LanesModel(torch.nn.Module):
    """Parameters of all dtypes, by name; one of them has no gradient, ever."""

    def __init__(self, lanes_device: Any, seed: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for number, size in enumerate(sizes):
            values = torch.randn(size, generator=generator).to((FP32, BF16, FP16)[number % 3])
            self.register_parameter(f"p{number}", lanes_device.parameter(values))
        self.frozen = lanes_device.parameter(torch.ones(7))
        self.frozen.requires_grad = False


def gradients(params: list[torch.Tensor], step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in params]


class LanesRun:
    """A model, its optimizer on a device with lanes, and their twin in host memory."""

    def __init__(
        self, lanes_device: Any, seed: int = 0, sizes: tuple[int, ...] = (70_001, 5, 300, 1), **options: Any
    ) -> None:
        attached = options.pop("attached", False)
        self.model = LanesModel(lanes_device, seed, sizes)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.opt = outboard.AdamW(self.model.parameters(), threads=2, chunk_elems=9_000, **options)
        if attached:
            self.opt.attach(self.model)
        self.twin = Twin(self.params, **options)

    def train(self, steps: range) -> None:
        for step in steps:
            for p, grad in zip(self.params, gradients(self.params, step), strict=True):
                set_grad(p, grad)
            self.twin.step()
            self.opt.step()

    def check(self, what: str = "") -> None:
        self.twin.check(self.opt, what)

    def moment(self) -> Any:
        """Return the twin as it is now."""
        return copy.deepcopy(([p.detach() for p in self.twin.params], self.twin.optimizer.state_dict()))

    def follow(self, moment: Any) -> None:
        """Let this twin be as another run's was."""
        values, state = moment
        for mine, theirs in zip(self.twin.params, values, strict=True):
            with torch.no_grad():
                mine.copy_(theirs)
        self.twin.optimizer.load_state_dict(state)
