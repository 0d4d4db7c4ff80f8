"""What a training run is made of, and the errors a user can do something about."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

#: The attention heads' width; the residual stream is a whole number of them.
HEAD_WIDTH = 32


class UsageError(Exception):
    """Something the user can put right; its text is one line, the exit code is 2."""


def default_threads() -> int:
    """Processors this process may run on, at most eight: the model is too small for more."""
    if hasattr(os, "sched_getaffinity"):
        return min(8, len(os.sched_getaffinity(0)))
    return min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Settings:
    """Everything that the bits of a run depend on, apart from the text itself.

    Attributes
    ----------
    steps, batch, context : int
        Optimizer steps, sequences in a step, bytes in a sequence.
    layers, width : int
        Size of the model; ``width`` is a multiple of ``HEAD_WIDTH``.
    learning_rate, weight_decay : float
        Peak of the schedule, and the decay of the matrices.
    seed : int
        For the initial weights, the batches and the sample.
    threads : int
        Threads of torch and of outboard. outboard's bits do not depend on it; those of torch's
        matrix products do.
    device : {"cpu", "cuda"}
        Where the model is.
    text : str or None
        Path of the text; None for the standard library's sources.
    """

    steps: int = 1200
    batch: int = 4
    context: int = 128
    layers: int = 2
    width: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    seed: int = 0
    threads: int = 1
    device: str = "cpu"
    text: str | None = None

    def check(self) -> None:
        """Refuse what cannot work.

        Raises
        ------
        UsageError
            Names the option and says what it takes.
        """
        for name in ("steps", "batch", "context", "layers", "width", "threads"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"--{name} must be at least 1, got {value}")
        if self.width % HEAD_WIDTH:
            raise UsageError(f"--width must be a multiple of {HEAD_WIDTH}, got {self.width}")
        if not 0 < self.learning_rate < float("inf"):
            raise UsageError(f"--learning-rate must be above 0, got {self.learning_rate}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be between 0 and 2**63 - 1, got {self.seed}")

    def as_dict(self) -> dict[str, int | float | str | None]:
        """Return the fields as a plain dict, as checkpoint and summary store them."""
        return asdict(self)

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rate rises to its peak."""
        return max(1, self.steps // 20)

    @property
    def evaluate_every(self) -> int:
        """Steps between two looks at the validation loss."""
        return max(1, self.steps // 8)
