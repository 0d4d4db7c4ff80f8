"""The two runs side by side: comparison, table, summary, sample."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import outboard

from .training import LABELS, Run

#: The training loss of one batch says little; the last few together do.
FINAL_STEPS = 20
#: How far apart two losses may be on a GPU, in nats per byte. Rounding that differs in the last bits grows in training:
#: on a CPU two of torch's own kernels, fused and foreach, came to differ by 0.09 in one of 1,200 training losses, and
#: by 0.015 in a late one on average.
GPU_TOLERANCE = 0.3


@dataclass(frozen=True)
class Comparison:
    """How far two runs are from each other; all zeros and Nones when they are the same.

    Attributes
    ----------
    tolerance : float or None
        How far apart losses may be, in nats per byte; None where all bits must be equal.
    losses, weights : int
        How many were compared.
    first_unequal_step : int or None
        Step (from 1) of the first training loss whose bits differ.
    unequal_losses, unequal_weights : int
        How many have other bits, of training and validation losses, and of single weights.
    loss_distance, weight_distance : float
        Largest absolute difference.
    """

    tolerance: float | None
    losses: int
    weights: int
    first_unequal_step: int | None
    unequal_losses: int
    unequal_weights: int
    loss_distance: float
    weight_distance: float

    @property
    def losses_equal(self) -> bool:
        """Whether all training and validation losses have the same bits."""
        return self.unequal_losses == 0

    @property
    def weights_equal(self) -> bool:
        """Whether all weights have the same bits."""
        return self.unequal_weights == 0

    @property
    def agrees(self) -> bool:
        """Whether the runs are as they must be: equal, or with a tolerance, no farther apart."""
        if self.tolerance is None:
            return self.losses_equal and self.weights_equal
        return self.loss_distance <= self.tolerance


def compare(a: Run, b: Run) -> Comparison:
    """Compare two finished runs of the same settings: bit for bit, and how far apart they are."""
    losses_a, losses_b = _all_losses(a), _all_losses(b)
    # As integers, because == calls 0.0 and -0.0 equal, and NaN unequal to itself.
    loss_differs = losses_a.view(torch.int64) != losses_b.view(torch.int64)
    train_differs = loss_differs[: a.step].nonzero()
    weights_a, weights_b = _all_weights(a), _all_weights(b)
    return Comparison(
        tolerance=None if a.settings.device == "cpu" else GPU_TOLERANCE,
        losses=len(losses_a),
        weights=len(weights_a),
        first_unequal_step=int(train_differs[0]) + 1 if len(train_differs) else None,
        unequal_losses=int(loss_differs.sum()),
        unequal_weights=int((weights_a.view(torch.int32) != weights_b.view(torch.int32)).sum()),
        loss_distance=float((losses_a - losses_b).abs().max()),
        weight_distance=float((weights_a - weights_b).abs().max()),
    )


def _all_losses(run: Run) -> torch.Tensor:
    validation = [loss for _, loss in run.history.validation]
    return torch.tensor(run.history.losses + validation, dtype=torch.float64)


def _all_weights(run: Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()]).cpu()


def final_train_loss(run: Run) -> float:
    """Mean training loss of the last ``FINAL_STEPS`` steps."""
    return fmean(run.history.losses[-FINAL_STEPS:])


def tokens_per_second(run: Run) -> float:
    """Training speed over the whole run, without the looks at the validation part."""
    settings = run.settings
    return settings.batch * settings.context / fmean(run.history.step_ms) * 1e3


def optimizer_share(run: Run) -> float:
    """Share of the steps' time that was spent in ``optimizer.step()``."""
    return sum(run.history.optimizer_ms) / sum(run.history.step_ms)


def print_table(console: Console, runs: list[Run], comparison: Comparison | None) -> None:
    """Print one column per run, and below whether they are equal or how far apart."""
    # On a GPU step() returns when the update has been started.
    timed = "optimizer" if runs[0].settings.device == "cpu" else "step() on the host"
    table = Table(title=f"{runs[0].step:,} steps on the {runs[0].text.source}")
    table.add_column("")
    for run in runs:
        table.add_column(LABELS[run.side], justify="right")
    final = min(FINAL_STEPS, runs[0].step)
    rows: list[tuple[str, list[str]]] = [
        (f"train loss, last {final}", [f"{final_train_loss(r):.6f}" for r in runs]),
        ("validation loss", [f"{r.history.validation[-1][1]:.6f}" for r in runs]),
        (f"{timed}, median", [f"{median(r.history.optimizer_ms):.3f} ms/step" for r in runs]),
        (f"{timed}, share", [f"{optimizer_share(r):.1%}" for r in runs]),
        ("speed", [f"{tokens_per_second(r):,.0f} tokens/s" for r in runs]),
        ("optimizer state", [f"{r.state_bytes():,} bytes" for r in runs]),
        ("it lives in", [r.state_home() for r in runs]),
    ]
    for name, values in rows:
        table.add_row(name, *values)
    if comparison is not None:
        c = comparison
        table.add_section()
        if c.tolerance is None:
            table.add_row("losses, bit for bit", f"{c.losses:,} compared", _loss_verdict(c))
            table.add_row("weights, bit for bit", f"{c.weights:,} compared", _weight_verdict(c))
        else:
            table.add_row("losses, how far apart", f"{c.losses:,} compared", _distance_verdict(c))
    console.print(table)


def _loss_verdict(c: Comparison) -> str:
    if c.losses_equal:
        return "[green]all equal[/]"
    since = f" from step {c.first_unequal_step}" if c.first_unequal_step else ""
    return f"[red]{c.unequal_losses:,} differ{since}, by up to {c.loss_distance:.3g}[/]"


def _distance_verdict(c: Comparison) -> str:
    colour, than = ("green", "at most") if c.agrees else ("red", "more than")
    return f"[{colour}]by up to {c.loss_distance:.3g}, {than} {c.tolerance:g}[/]"


def _weight_verdict(c: Comparison) -> str:
    if c.weights_equal:
        return "[green]all equal[/]"
    return f"[red]{c.unequal_weights:,} differ, by up to {c.weight_distance:.3g}[/]"


def write_summary(path: Path, runs: list[Run], comparison: Comparison | None, sample: str) -> None:
    """Write everything the table says, and what it was measured on, as JSON.

    Values of a side that did not run are null.
    """
    by_side = {run.side: run for run in runs}

    def each(value: Any) -> dict[str, Any]:
        return {s: value(by_side[s]) if s in by_side else None for s in ("outboard", "torch")}

    first = runs[0]
    summary = {
        "device": first.settings.device,
        "agrees": comparison.agrees if comparison else None,
        "loss_tolerance": comparison.tolerance if comparison else None,
        "losses_equal": comparison.losses_equal if comparison else None,
        "weights_equal": comparison.weights_equal if comparison else None,
        "losses_compared": comparison.losses if comparison else 0,
        "weights_compared": comparison.weights if comparison else 0,
        "loss_distance": comparison.loss_distance if comparison else None,
        "weight_distance": comparison.weight_distance if comparison else None,
        "optimizer_ms": each(lambda r: median(r.history.optimizer_ms)),
        "optimizer_share": each(optimizer_share),
        "tokens_per_second": each(tokens_per_second),
        "train_loss": each(final_train_loss),
        "validation_loss": each(lambda r: r.history.validation[-1][1]),
        "unigram_entropy": first.text.unigram_entropy(),
        "state_bytes": each(Run.state_bytes),
        "state_home": each(Run.state_home),
        "training_seconds": each(lambda r: sum(r.history.step_ms) / 1e3),
        "text": {
            "source": first.text.source,
            "bytes": first.text.size,
            "train_bytes": len(first.text.train),
            "validation_bytes": len(first.text.validation),
            "sha256": first.text.sha256,
        },
        "parameters": sum(p.numel() for p in first.model.parameters()),
        "settings": first.settings.as_dict(),
        "sample": sample,
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "outboard": outboard.__version__,
        },
        "machine": {
            "cpu": cpu_name(),
            "gpu": gpu_name() if first.settings.device == "cuda" else None,
            "processors": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "torch_simd": torch.backends.cpu.get_cpu_capability(),
            "openmp": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "GOMP_"))},
        },
    }
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def machine_name(device: str) -> str:
    """Return the name of what the model is trained on."""
    return gpu_name() if device == "cuda" else cpu_name()


def gpu_name() -> str:
    """Return the current GPU's name."""
    return torch.cuda.get_device_name()


def cpu_name() -> str:
    """Return the processor's name, as well as the system can tell it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def readable(sample: bytes) -> str:
    """Decode generated bytes for a terminal; what it could misread becomes a middle dot."""
    text = sample.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
