"""Plots of benchmark results, as files. matplotlib is needed here and nowhere else in the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outboard.bench.common import PlotError
from outboard.bench.setup import BASELINE, OUTBOARD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Endings of files that can be written.
ENDINGS = (".png", ".pdf", ".svg")

#: Rows of a timeline from the top, and their colours.
_TRACKS = {
    "forward": "#4477aa",
    "backward": "#66ccee",
    "gpu lane": "#228833",
    "gpu lane: copy in": "#ee6677",
    "gpu lane: update": "#228833",
    "gpu lane: copy out": "#aa3377",
    "cpu lane": "#ccbb44",
    "cpu lane: copy out": "#aa3377",
    "cpu lane: update": "#ccbb44",
    "cpu lane: copy in": "#ee6677",
}
_OTHER = "#888888"
_OURS, _THEIRS = "#228833", "#ee6677"
_DOTS_PER_INCH = 144


def check(path: str | Path) -> Path:
    """Return the path if a plot can be written there, before anything is measured.

    Raises
    ------
    ValueError
        For an ending that is none of `ENDINGS`, or a folder that does not exist.
    PlotError
        If matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise ValueError(f"plot must end in one of {', '.join(ENDINGS)}, not {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"plot: there is no folder {str(path.parent)!r}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise PlotError(f"a plot needs matplotlib: pip install 'outboard[plot]' ({error})") from error
    return path


def timeline(result: dict[str, Any], path: str | Path) -> None:
    """Draw where one step of `training_step(timeline=True)` went: a row for each lane, copy direction and pass."""
    rows = [row for row in result["sides"].values() if row.get("timeline")]
    if not rows:
        raise PlotError("there is no timeline to draw: " + (_error(result) or "it was not recorded"))
    row = rows[0]
    found = {span[0] for span in row["timeline"]}
    tracks = [track for track in _TRACKS if track in found] + sorted(found - _TRACKS.keys())
    figure, (axes,) = _figure(1, 1.5 + 0.5 * len(tracks))
    for index, track in enumerate(tracks):
        bars = [(start, end - start) for name, _, start, end in row["timeline"] if name == track]
        colour = _TRACKS.get(track, _OTHER)
        # Outlined: a chunk may be narrower than a pixel.
        axes.broken_barh(bars, (index - 0.38, 0.76), facecolor=colour, edgecolor=colour, linewidth=0.3)
    axes.set_yticks(range(len(tracks)), tracks)
    axes.set_ylim(len(tracks) - 0.5, -0.5)
    axes.set_xlim(0, max(span[3] for span in row["timeline"]))
    axes.set_xlabel("ms after the start of the forward pass")
    axes.set_title(f"One step: {_asked(result)}, {row['title']} ({row['step_ms']:.4g} ms unrecorded)", fontsize=9)
    _write(figure, path)


def resident(result: dict[str, Any], path: str | Path) -> None:
    """Draw step time and device memory against the share of state that stays on the device."""
    sides = result["sides"]
    rows = [row for row in sides.values() if row["side"] == OUTBOARD and row["step_ms"] is not None]
    rows.sort(key=lambda row: row["resident"])
    if not rows:
        raise PlotError("there is no step of outboard to draw: " + _error(result))
    figure, panels = _figure(2, 5.0)
    keys = (("step_ms", "step, ms"), ("device_gib_over_forward_backward", "GiB over forward\nand backward"))
    for axes, (key, label) in zip(panels, keys, strict=True):
        points = [(row["resident"] * 100, row[key]) for row in rows if row[key] is not None]
        axes.plot(*zip(*points, strict=True) if points else ((), ()), "o-", color=_OURS, label="outboard")
        for name, colour in (("torch", _THEIRS), (BASELINE, _TRACKS["forward"])):
            if (value := sides.get(name, {}).get(key)) is not None:
                axes.axhline(value, linestyle="--", color=colour, label=sides[name]["title"])
        axes.set_ylabel(label)
        axes.margins(y=0.15)
        axes.set_ylim(0, max(axes.get_ylim()[1], 0.1))
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    panels[0].set_title(_asked(result), fontsize=9)
    panels[-1].set_xlabel("share of the state on the device, %")
    _write(figure, path)


def lanes(result: dict[str, Any], path: str | Path) -> None:
    """Draw the speed of each lane that `lanes` measured."""
    figure, (axes,) = _figure(1, 3.0)
    names = [f"{row['mode']}, {row['transfer']}" if row["mode"] == "gpu" else row["mode"] for row in result["rows"]]
    colours = [_TRACKS.get(f"{row['mode']} lane", _OTHER) for row in result["rows"]]
    bars = axes.bar(names, [row["gelem_per_s"] for row in result["rows"]], color=colours)
    axes.bar_label(bars, fmt="%.3g")
    axes.set_ylabel("1e9 elements per second")
    axes.margins(y=0.15)
    axes.set_title(f"{result['numel']:,} {result['dtype']} elements, {_machine(result)}", fontsize=9)
    _write(figure, path)


def _figure(panels: int, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), dpi=_DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False)
    return figure, list(axes[:, 0])


def _write(figure: Figure, path: str | Path) -> None:
    save: Callable[[str], None] = figure.savefig
    try:
        save(str(path))
    except OSError as error:
        raise PlotError(f"the plot cannot be written: {error}") from error


def _asked(result: dict[str, Any]) -> str:
    clip = f", clip {result['clip']:g}" if result["clip"] is not None else ""
    return f"{result['model']}, {result['batch']} x {result['seq']:,} tokens{clip}, {_machine(result)}"


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return str(machine.get("gpu") or machine.get("cpu") or "no machine")


def _error(result: dict[str, Any]) -> str:
    return str(next((row["error"] for row in result["sides"].values() if row["side"] == OUTBOARD), ""))
