"""What the tests of lanes share: devices with lanes, and twins in host memory that say what is right.

A test that takes the fixture `lanes_device` runs on a device made of host memory, and on CUDA where there is one. Bits
are compared with the host optimizer's on the same gradients. A twin of a model computes these by itself, on the same
device (CUDA's forward differs from the CPU's) and from its own weights: a forward that reads a weight too early has
other gradients, which the twin does not share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import outboard
from oracle import assert_same
from outboard import _pending, _roster
from outboard._lanes import LaneOptions

#: What changes bits, and so goes to the twin too.
NUMERIC = {
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "max_grad_norm",
    "compute_grad_norm",
    "nonfinite",
    "state_dtype",
    "master",
    "seed",
}


@contextmanager
def host_only() -> Iterator[None]:
    """Let optimizers that are made here update host memory as such."""
    seed, LaneOptions.simulate = LaneOptions.simulate, None
    try:
        yield
    finally:
        LaneOptions.simulate = seed


class LanesDevice:
    """A device whose parameters are updated by lanes."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    @property
    def is_simulated(self) -> bool:
        return self.device.type == "cpu"

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, of the same strides."""
        return tensor.detach().clone().to(self.device)

    def parameter(self, values: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.put(values))


def is_pending(parameter: torch.Tensor) -> bool:
    """Whether whoever reads a parameter has to wait."""
    return _pending.is_pending(parameter)


def plain_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a gradient without touching the parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def set_grad(parameter: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set a gradient of any dtype."""
    with torch._C.DisableTorchFunctionSubclass():
        if grad is not None and grad.dtype is not parameter.dtype:
            parameter.grad_dtype = None
        parameter.grad = grad


class Twin:
    """Copies of parameters in host memory, with a host optimizer over them."""

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        cls: type[torch.optim.Optimizer] = outboard.AdamW,
        **options: Any,
    ) -> None:
        self.originals = list(params)
        self.params = [torch.nn.Parameter(p.detach().cpu().clone(), p.requires_grad) for p in self.originals]
        with host_only():
            self.optimizer = cls(self.params, threads=1, **{k: v for k, v in options.items() if k in NUMERIC})

    def step(self, grads: Iterable[torch.Tensor | None] | None = None) -> None:
        """Step with copies of gradients, by default those that the originals have now."""
        grads = [plain_grad(p) for p in self.originals] if grads is None else list(grads)
        for p, grad in zip(self.params, grads, strict=True):
            set_grad(p, None if grad is None else grad.detach().cpu().clone())
        self.optimizer.step()

    def check_weights(self, what: str = "") -> None:
        for number, (p, twin) in enumerate(zip(self.originals, self.params, strict=True)):
            assert_same(p.detach().cpu(), twin, f"{what} weight {number}, {tuple(p.shape)} {p.dtype}")

    def check(self, optimizer: torch.optim.Optimizer, what: str = "") -> None:
        """Fail unless the weights and all state are the twin's, bit for bit."""
        self.check_weights(what)
        for number, (p, twin) in enumerate(zip(self.originals, self.params, strict=True)):
            if twin not in self.optimizer.state:
                continue
            wanted, got = self.optimizer.state[twin], optimizer.state[p]
            assert got.keys() == wanted.keys()
            for name, value in wanted.items():
                if name == "step":
                    assert float(got[name]) == float(value), f"{what} step of {number}"
                else:
                    assert_same(got[name].cpu(), value, f"{what} {name} of {number}")


class Pair:
    """Parameters on a device with an optimizer, attached or not, and their twin.

    Parameters
    ----------
    params : iterable of Parameter
        On the device. Attached, they are a model that is never called.
    groups : callable, optional
        Makes parameter groups from a list of parameters, for the optimizer and for its twin.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        groups: Callable[[list[Any]], list[Any]] | None = None,
        *,
        cls: Any = outboard.AdamW,
        attached: bool = False,
        **options: Any,
    ) -> None:
        self.params = list(params)
        self.twin = Twin(self.params, cls, **options)
        options = {"threads": 2, "chunk_elems": 9_000, **options}
        if groups is not None:
            with host_only():
                numeric = {name: value for name, value in options.items() if name in NUMERIC}
                self.twin.optimizer = cls(groups(self.twin.params), threads=1, **numeric)
        self.opt = cls(self.params if groups is None else groups(self.params), **options)
        self.model = torch.nn.ParameterList(self.params)
        if attached:
            self.opt.attach(self.model)

    def step(self, scale: float = 1.0) -> None:
        """Step both with the same random gradients."""
        self.step_with([(torch.randn(p.shape) * scale).to(p.device, p.dtype) for p in self.params])

    def step_with(self, grads: Iterable[torch.Tensor | None]) -> None:
        """Step both with gradients on the device."""
        for p, grad in zip(self.params, grads, strict=True):
            set_grad(p, grad)
        self.twin.step()
        self.opt.step()

    def check(self, what: str = "") -> None:
        self.twin.check(self.opt, what)


class TwinModel:
    """A copy of a model on its device, stepped by a host optimizer; computes gradients by itself."""

    def __init__(
        self,
        model: torch.nn.Module,
        cls: type[torch.optim.Optimizer] = outboard.AdamW,
        *,
        equal: torch.nn.Module | None = None,
        **options: Any,
    ) -> None:
        """Copy a model, or take over one that is equal."""
        self.original = model
        self.model = copy.deepcopy(model) if equal is None else equal
        self.twin = Twin(self.model.parameters(), cls, **options)
        self.twin.originals = list(model.parameters())

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.twin.optimizer

    def step(self) -> None:
        """Step with the gradients of the copy, and drop them."""
        self.twin.step([p.grad for p in self.model.parameters()])
        self.copy_back()
        self.model.zero_grad()

    def copy_back(self) -> None:
        with torch.no_grad():
            for p, twin in zip(self.model.parameters(), self.twin.params, strict=True):
                p.copy_(twin)

    def check_weights(self, what: str = "") -> None:
        self.twin.check_weights(what)

    def check(self, optimizer: torch.optim.Optimizer, what: str = "") -> None:
        self.twin.check(optimizer, what)


class Layer(torch.nn.Module):
    """A layer whose output and gradients depend on every element of its weight, however many there are."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter((torch.randn(shape) * 0.5).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight.float()
        # Of order 1 for any number of elements: a tanh that is 1 to the last bit has no gradient.
        count = max(1, w.numel())
        return torch.tanh(x + (w * w).sum() / count + w.sum() / count**0.5)


class Stack(torch.nn.Sequential):
    """Layers of given numbers of elements, one after another."""

    def __init__(self, *sizes: int, dtype: torch.dtype | Callable[[int], torch.dtype] = torch.float32) -> None:
        dtype_of = dtype if callable(dtype) else lambda _: dtype
        super().__init__(*(Layer(size, dtype=dtype_of(number)) for number, size in enumerate(sizes)))

    def loss(self, step: int = 0) -> torch.Tensor:
        """Another function at each step."""
        device = self[0].weight.device
        return (self(torch.full((3,), 0.1 * (step % 7) - 0.3, device=device)) * (1 + step % 3)).sum()


def train(model: Stack, optimizer: torch.optim.Optimizer, twin: TwinModel, steps: int, first: int = 0) -> None:
    """Train a model and its twin side by side; nothing is read in between."""
    for step in range(first, first + steps):
        model.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for step in range(first, first + steps):
        twin.model.loss(step).backward()
        twin.step()


class BackwardFails(Exception):
    """What a backward raises that is to fail."""


class Fails(torch.autograd.Function):
    """The identity, until its backward is to fail."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Fails.armed:
            raise BackwardFails("asked for in backward")
        return grad


@contextmanager
def backward_fails() -> Iterator[None]:
    """Let every backward through `Fails` fail, and fail unless one did."""
    Fails.armed = True
    try:
        yield
    except BackwardFails:
        return
    finally:
        Fails.armed = False
    raise AssertionError("no backward has failed")


class FailsInTheMiddle(Stack):
    """A stack with `Fails` in front of its third layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self):
            x = layer(Fails.apply(x) if number == 2 else x)
        return x


#: Elements of a `Rig`'s layers: all but the second are hooked by themselves under `small_ones_have_hooks`.
RIG_SIZES = (3000, 5, 700, 66_000)


class Rig:
    """A model with an optimizer, attached unless it is not to be, and its twin."""

    def __init__(
        self,
        lanes_device: Any,
        *sizes: int,
        model: Any = None,
        dtype: Any = torch.float32,
        cls: Any = outboard.AdamW,
        attached: bool = True,
        **options: Any,
    ) -> None:
        model = Stack(*(sizes or RIG_SIZES), dtype=dtype) if model is None else model
        self.model = model.to(lanes_device.device)
        self.twin = TwinModel(self.model, cls, **options)
        options = {"threads": 1, "chunk_elems": 5_000, **options}
        self.opt = cls(self.model.parameters(), **options)
        if attached:
            self.opt.attach(self.model)

    @property
    def params(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    @property
    def eager_updates(self) -> int:
        return self.opt.stats()["eager_updates"]

    @property
    def hooked(self) -> int:
        """How many parameters have hooks: those that can be updated in backward."""
        return sum(p.numel() > _roster.TINY_ELEMS for p in self.params)

    def backward(self, step: int = 0) -> None:
        self.model.loss(step).backward()

    def backward_both(self, step: int = 0) -> None:
        """Compute gradients, and the twin its own."""
        self.backward(step)
        self.twin.model.loss(step).backward()

    def step_both(self) -> None:
        """Step, and let the twin follow."""
        self.opt.step()
        self.twin.step()

    def train(self, steps: int = 1, first: int = 0) -> None:
        train(self.model, self.opt, self.twin, steps, first)

    def check(self, what: str = "") -> None:
        self.twin.check(self.opt, what)

    def proven(self) -> Rig:
        """After the clean step that eager='auto' wants to see."""
        self.train()
        assert self.eager_updates == 0
        return self


class Checkpointed(Stack):
    use_reentrant = False
    times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(self.times):
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


def assert_untouched(model: torch.nn.Module) -> None:
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_pre_hooks_with_kwargs
        assert not module._forward_hooks
        assert not module._backward_hooks
    for p in model.parameters():
        assert type(p) is torch.nn.Parameter
        assert not p._post_accumulate_grad_hooks
        assert not p._backward_hooks
