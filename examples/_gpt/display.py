"""What the user sees while it trains: a live bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

from statistics import fmean

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from .training import LABELS, Run

#: Steps over which loss, speed and share are averaged, so that the figures can be read.
WINDOW = 20
PLAIN_LINES = 8


class TrainingDisplay:
    """Show a run's loss, its speed and the optimizer's share of a step.

    Use as a context manager and call ``update`` after each step.

    Parameters
    ----------
    console : Console
        Where to.
    run : Run
        What to show.
    """

    def __init__(self, console: Console, run: Run) -> None:
        self._console = console
        self._label = LABELS[run.side]
        self._total = run.settings.steps
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            refresh_per_second=4,
            expand=True,
            disable=not console.is_terminal,
        )
        # Padded, so that the two runs' bars begin below each other.
        self._task: TaskID = self._progress.add_task(
            self._label.ljust(max(map(len, LABELS.values()))),
            total=self._total,
            completed=run.step,
            figures=_figures(run) if run.step else "",
        )

    def __enter__(self) -> TrainingDisplay:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def update(self, run: Run) -> None:
        """Show the run as it is now."""
        figures = _figures(run)
        self._progress.update(self._task, completed=run.step, figures=figures)
        every = max(1, self._total // PLAIN_LINES)
        if not self._console.is_terminal and (run.finished or run.step % every == 0):
            line = f"{self._label}: step {run.step}/{self._total}, {figures}"
            self._console.print(line, highlight=False, soft_wrap=True)


def _figures(run: Run) -> str:
    history, settings = run.history, run.settings
    step_ms = fmean(history.step_ms[-WINDOW:])
    speed = settings.batch * settings.context / step_ms * 1e3
    share = fmean(history.optimizer_ms[-WINDOW:]) / step_ms
    loss = fmean(history.losses[-WINDOW:])
    return f"loss {loss:.3f}  {speed:,.0f} tokens/s  optimizer {share:.1%}"
