"""One training run: model, optimizer, schedule and what was measured on the way."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import outboard

from .data import Text, training_batch, validation_batches
from .model import GPT, parameter_groups
from .settings import Settings, UsageError

Side = Literal["outboard", "torch"]
LABELS: dict[Side, str] = {
    "outboard": "outboard.AdamW",
    "torch": "torch AdamW(fused=True)",
}
BETAS = (0.9, 0.95)


@dataclass
class History:
    """What a run has measured, one entry per step unless said otherwise.

    Attributes
    ----------
    losses : list of float
        Training loss in nats per byte; fp32 values, so they convert without loss.
    validation : list of list
        ``[step, loss]`` for each look at the validation part.
    optimizer_ms, step_ms : list of float
        Milliseconds in ``optimizer.step()``, and in the whole step. On a GPU the former are the host's: what it has
        started there goes on behind them.
    """

    losses: list[float] = field(default_factory=list)
    validation: list[list[float]] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)


def prepare_torch(settings: Settings) -> None:
    """Make torch give the same bits every time: fixed threads, deterministic kernels only."""
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    # It would also fill every fresh tensor with NaN, which finds bugs and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def default_device() -> str:
    """Return "cuda" where torch finds a GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Refuse a device that is not there.

    Raises
    ------
    UsageError
        Says what to do.
    """
    if device == "cuda" and not torch.cuda.is_available():
        why = "finds none" if torch.version.cuda else "is built without CUDA"
        raise UsageError(
            f"--device cuda: this needs a GPU, and torch {torch.__version__} {why}: use --device cpu "
            "(`python -m outboard doctor` says more)"
        )


class Run:
    """A model in training with one of the two optimizers.

    Both sides start from the same weights and see the same batches. On a GPU outboard's is attached to the model.

    Parameters
    ----------
    side : {"outboard", "torch"}
        Whose AdamW.
    settings : Settings
        See there.
    text : Text
        What to learn.
    offload_activations : bool
        Whether what blocks save for backward is in host RAM until then.
    """

    def __init__(self, side: Side, settings: Settings, text: Text, offload_activations: bool = False) -> None:
        self.side = side
        self.settings = settings
        self.text = text
        self.history = History()
        torch.manual_seed(settings.seed)
        # Made on the CPU, so that the initial weights are the same wherever they are trained.
        self.model = GPT(settings.width, settings.layers, settings.context).to(settings.device)
        # Both optimizers must round alike. torch's kernel deals out units of 16 elements to its
        # threads and finishes a last, incomplete unit with scalar code that rounds exp_avg_sq
        # one ulp differently; there is none where every parameter is whole units long.
        assert all(p.numel() % 16 == 0 for p in self.model.parameters())
        self.activations = outboard.offload_activations(self.model) if offload_activations else None
        self.optimizer = self._build_optimizer()
        warmup, steps = settings.warmup_steps, settings.steps
        self.scheduler = SequentialLR(
            self.optimizer,
            [
                LinearLR(self.optimizer, start_factor=1 / (warmup + 1), total_iters=warmup),
                CosineAnnealingLR(
                    self.optimizer,
                    T_max=max(1, steps - warmup),
                    eta_min=settings.learning_rate / 20,
                ),
            ],
            milestones=[warmup],
        )
        self._validation = validation_batches(text, batch=settings.batch, context=settings.context)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        groups = parameter_groups(self.model, self.settings.weight_decay)
        lr = self.settings.learning_rate
        if self.side == "outboard":
            optimizer = outboard.AdamW(groups, lr=lr, betas=BETAS, threads=self.settings.threads)
            return optimizer if self.settings.device == "cpu" else optimizer.attach(self.model)
        return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return len(self.history.losses)

    @property
    def finished(self) -> bool:
        """Whether all steps have been taken."""
        return self.step >= self.settings.steps

    def train_step(self) -> None:
        """Take one step; look at the validation loss too when it is due."""
        settings = self.settings
        start = time.perf_counter()
        tokens, targets = training_batch(
            self.text,
            batch=settings.batch,
            context=settings.context,
            seed=settings.seed,
            step=self.step,
        )
        loss = self._loss(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        before_update = time.perf_counter()
        self.optimizer.step()
        after_update = time.perf_counter()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.history.losses.append(loss.item())
        self.history.optimizer_ms.append((after_update - before_update) * 1e3)
        self.history.step_ms.append((time.perf_counter() - start) * 1e3)
        if self.finished or self.step % settings.evaluate_every == 0:
            self.history.validation.append([self.step, self.validation_loss()])

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss over the fixed validation batches, in nats per byte."""
        losses = [self._loss(tokens, targets).item() for tokens, targets in self._validation]
        return sum(losses) / len(losses)

    def _loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        device = self.settings.device
        return self.model.loss(tokens.to(device), targets.to(device))

    def state_bytes(self) -> int:
        """Bytes of optimizer state."""
        if isinstance(self.optimizer, outboard.AdamW):
            stats = self.optimizer.stats()
            return int(stats["state_bytes"] + stats["resident_bytes"])
        return sum(tensor.nbytes for tensor in self._state_tensors())

    def state_home(self) -> str:
        """Where the optimizer state lives, in words."""
        devices = {tensor.device.type for tensor in self._state_tensors()}
        place = " and ".join("host RAM" if d == "cpu" else "the GPU" for d in sorted(devices))
        return place + (", one arena" if self.side == "outboard" else ", per tensor")

    def _state_tensors(self) -> list[torch.Tensor]:
        states = self.optimizer.state.values()
        return [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on to the same bits, loadable with ``weights_only=True``."""
        return {
            "settings": self.settings.as_dict(),
            "text_sha256": self.text.sha256,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "history": asdict(self.history),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` of a run with the same settings returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        self.history = History(**state["history"])

    def train(self, *, stop: StopOnInterrupt, after_step: Callable[[Run], None]) -> None:
        """Train to the end, or to the end of the step in which the user interrupts.

        Parameters
        ----------
        stop : StopOnInterrupt
            Asked after each step.
        after_step : callable
            Called with this run after each step.
        """
        while not (self.finished or stop.requested):
            self.train_step()
            after_step(self)


class StopOnInterrupt:
    """While entered, Ctrl-C only sets ``requested``; a second one interrupts as usual."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopOnInterrupt:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._previous)
