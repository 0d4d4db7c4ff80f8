"""The sides of the training-step benchmark: how each optimizer is made, driven and waited for."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outboard._adam import AdamW
from outboard.bench.common import STATE_DTYPES
from outboard.bench.setup import BASELINE, OUTBOARD, Setup

LEARNING_RATE = 1e-4


def _nothing() -> None:
    """Do nothing."""


@dataclass
class Side:
    """What the loop calls, in this order: `forward`, `backward`, `update`; `synchronize` at a window's ends.

    Attributes
    ----------
    forward : callable
        Of tokens and targets; returns the loss.
    backward : callable
        Of the loss.
    update : callable
        Steps the optimizer and drops the gradients.
    synchronize : callable
        Waits for what the optimizer still does; what is enqueued on the device is waited for beside it.
    optimizer : object
        What may know `stats()`, `plan()` and `record_timeline()`.
    """

    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    update: Callable[[], None]
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    synchronize: Callable[[], None] = _nothing
    optimizer: Any = None


def installed(side: str) -> bool:
    """Whether the package of this side can be found; nothing is imported."""
    return side in (BASELINE, OUTBOARD) or importlib.util.find_spec(side) is not None


def make(setup: Setup, model: torch.nn.Module) -> Side:
    """Return the side over this model."""
    return _MAKERS[setup.side](setup, model)


def _package(name: str) -> Any:
    """Return a peer's package, which need not be installed where types are checked."""
    return importlib.import_module(name)


def _baseline(_: Setup, model: torch.nn.Module) -> Side:
    return Side(model, model.zero_grad)


def _outboard(setup: Setup, model: torch.nn.Module) -> Side:
    options: dict[str, Any] = {
        "lr": LEARNING_RATE,
        "mode": setup.mode,
        "max_grad_norm": setup.clip,
        "threads": setup.threads,
        "state_dtype": STATE_DTYPES[setup.state_dtype],
    }
    attached = torch.device(setup.device).type != "cpu"
    if attached:
        options["eager"] = setup.eager
        options["device_state_bytes"] = float(setup.resident) if setup.resident else 0
    # A type that knows less than the one of GPU parameters: what is called exists once there is a device.
    optimizer: Any = AdamW(model.named_parameters(), **options)
    if attached:
        optimizer.attach(model)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Side(model, update, synchronize=optimizer.synchronize if attached else _nothing, optimizer=optimizer)


def _torch(setup: Setup, model: torch.nn.Module) -> Side:
    return _stepped(setup, model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True))


def _torchao(setup: Setup, model: torch.nn.Module) -> Side:
    # Gradients that are offloaded in backward cannot be clipped.
    early = setup.clip is None
    optimizer = _package("torchao.optim").CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=early, lr=LEARNING_RATE, fused=True
    )
    return _stepped(setup, model, optimizer)


def _trainstream(setup: Setup, model: torch.nn.Module) -> Side:
    wrapped, optimizer = _package("trainstream").wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
        offload=True,
        optimizer_mode="cpu" if setup.mode == "cpu" else "gpu",
        moment_dtype=setup.state_dtype,
        max_grad_norm=setup.clip,
        activation_offload=False,
        param_offload=False,
        quantize=None,
    )

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Side(wrapped, update, synchronize=getattr(optimizer, "synchronize", _nothing))


def _deepspeed(setup: Setup, model: torch.nn.Module) -> Side:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()})
    settings = {
        "train_micro_batch_size_per_gpu": setup.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": setup.clip or 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "bf16": {"enabled": setup.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }
    engine, *_ = _package("deepspeed").initialize(model=model, model_parameters=model.parameters(), config=settings)
    return Side(engine, engine.step, backward=engine.backward)


def _stepped(setup: Setup, model: torch.nn.Module, optimizer: Any) -> Side:
    """Return the side of an optimizer that is used as torch's are."""
    parameters = list(model.parameters())

    def update() -> None:
        if setup.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, setup.clip)
        optimizer.step()
        optimizer.zero_grad()

    return Side(model, update)


_MAKERS: dict[str, Callable[[Setup, torch.nn.Module], Side]] = {
    BASELINE: _baseline,
    OUTBOARD: _outboard,
    "torch": _torch,
    "torchao": _torchao,
    "trainstream": _trainstream,
    "deepspeed": _deepspeed,
}
