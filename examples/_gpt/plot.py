"""The plot: loss curves of both sides on the left, optimizer step times on the right."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import machine_name
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
    "legend.framealpha": 0.9,
    "legend.edgecolor": "white",
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
            f"{runs[0].text.source} ({machine_name(settings.device)}, threads: {settings.threads})",
            fontsize=11,
        )
        figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, runs: list[Run]) -> None:
    # Equal curves cover each other: a wide line below a thin one shows both. Single losses are
    # too noisy for that, so they are a pale background to their running mean.
    window = max(1, runs[0].step // 40)
    for run, width in zip(runs, (6.0, 1.5), strict=False):
        losses, colour = run.history.losses, COLOURS[run.side]
        steps = range(1, run.step + 1)
        axes.plot(steps, losses, color=colour, linewidth=width / 4, alpha=0.25)
        label = f"{LABELS[run.side]}, train"
        if window > 1:
            label += f" (mean of {window} steps)"
        axes.plot(steps, _running_mean(losses, window), color=colour, linewidth=width, label=label)
    for run, size in zip(runs, (11, 5), strict=False):
        axes.plot(
            *zip(*run.history.validation, strict=True),
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


def _running_mean(values: list[float], window: int) -> list[float]:
    """Mean of each value and those before it, ``window`` at most."""
    sums = [0.0, *accumulate(values)]
    starts = [max(0, end - window) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, start=1)]


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
    # The few steps that other programs interrupted would press all others onto the axis.
    everything = [t for run in runs for t in run.history.optimizer_ms]
    top = 4 * max(median(run.history.optimizer_ms) for run in runs)
    above = sum(t > top for t in everything)
    axes.set_ylim(0, top)
    axes.set(xlabel="step", ylabel="time of optimizer.step() (ms)", title="Optimizer step")
    if above:
        axes.set_title(f"{above:,} of {len(everything):,} above", loc="right", fontsize=8)
    axes.legend(loc="upper right")
