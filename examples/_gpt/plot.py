"""The plot: loss curves of both sides on the left, optimizer step times on the right."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import cpu_name
from .training import LABELS, Run, Side

# Okabe and Ito's palette: told apart by every eye, and in print.
COLOURS: dict[Side, str] = {"outboard": "#E69F00", "torch": "#0072B2"}
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def write_plot(path: Path, runs: list[Run]) -> None:
    """Draw the runs, the first below the second, to a PNG."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 4.8), layout="constrained")
        loss_axes, time_axes = figure.subplots(1, 2, width_ratios=[3, 2])
        _draw_losses(loss_axes, runs)
        _draw_times(time_axes, runs)
        settings = runs[0].settings
        parameters = sum(p.numel() for p in runs[0].model.parameters())
        figure.suptitle(
            f"Byte-level GPT, {parameters / 1e6:.2f} M parameters, on the "
            f"{runs[0].text.source} ({cpu_name()}, threads: {settings.threads})",
            fontsize=11,
        )
        figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, runs: list[Run]) -> None:
    # Equal curves cover each other: a wide pale line below a thin dark one shows both.
    widths = (5.0, 1.0)
    for run, width in zip(runs, widths, strict=False):
        history, colour = run.history, COLOURS[run.side]
        steps = range(1, run.step + 1)
        label = LABELS[run.side]
        axes.plot(steps, history.losses, color=colour, linewidth=width, label=f"{label}, train")
    sizes = (11, 5)
    for run, size in zip(runs, sizes, strict=False):
        at, losses = zip(*run.history.validation, strict=True)
        axes.plot(
            at,
            losses,
            "o",
            markersize=size,
            color=COLOURS[run.side],
            markeredgecolor="white",
            markeredgewidth=0.8,
            label=f"{LABELS[run.side]}, validation",
        )
    entropy = runs[0].text.unigram_entropy()
    axes.axhline(entropy, color="#666666", linestyle=":", linewidth=1.2)
    axes.annotate(
        "byte frequencies alone",
        xy=(1, entropy),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        color="#666666",
        fontsize=9,
    )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Loss")
    axes.legend()


def _draw_times(axes: Axes, runs: list[Run]) -> None:
    for run in runs:
        times, colour = run.history.optimizer_ms, COLOURS[run.side]
        middle = median(times)
        axes.plot(range(1, run.step + 1), times, ".", markersize=3, color=colour, alpha=0.45)
        axes.axhline(
            middle,
            color=colour,
            linewidth=1.8,
            label=f"{LABELS[run.side]}, median {middle:.2f} ms",
        )
    # A few steps that the system interrupted would press all others onto the axis.
    everything = sorted(t for run in runs for t in run.history.optimizer_ms)
    axes.set_ylim(0, 1.6 * everything[int(0.95 * (len(everything) - 1))])
    axes.set(xlabel="step", ylabel="time of optimizer.step() (ms)", title="Optimizer step")
    axes.legend(loc="upper right")
