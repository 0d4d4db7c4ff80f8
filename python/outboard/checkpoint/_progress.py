"""Progress of long saves and loads: a bar in the terminal, or a function of the caller's."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Literal

#: `"auto"`, yes, no, or a function of the bytes done and the bytes in all.
ProgressOption = Literal["auto"] | bool | Callable[[int, int], object]

#: What is over sooner needs no bar.
_SECONDS_BEFORE_BAR = 2.0


def check_progress(progress: ProgressOption) -> None:
    """Refuse what is no choice of progress, before any file is touched.

    Raises
    ------
    TypeError
        Naming the choices.
    """
    if not (progress == "auto" or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress must be 'auto', True, False or a function of two ints, not {progress!r}")


class Progress:
    """Counts bytes for as long as the `with` block takes, and shows them.

    Parameters
    ----------
    what : str
        What the bar says it is doing.
    total : int
        Bytes in all, as far as it is known beforehand.
    progress : "auto", bool or callable
        `"auto"` draws a bar on stderr if that is a terminal and two seconds have passed; True draws it at once; a
        function is called with the bytes done, never more than the total, and the total.
    """

    def __init__(self, what: str, total: int, progress: ProgressOption) -> None:
        self._what, self._total, self._done = what, total, 0
        self._call = progress if callable(progress) else None
        self._wants_bar = progress is True or (progress == "auto" and sys.stderr is not None and sys.stderr.isatty())
        self._begin_at = time.monotonic() + (_SECONDS_BEFORE_BAR if progress == "auto" else 0.0)
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def advance(self, count: int) -> None:
        """Count bytes that are done."""
        self._done += count
        self._show(min(self._done, self._total))

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            # What is not a tensor's is in no total, and a reader skips what it does not need.
            if kind is None and self._done != self._total:
                self._show(self._total)
        finally:
            if self._bar is not None:
                self._bar.stop()

    def _show(self, done: int) -> None:
        if self._call is not None:
            self._call(done, self._total)
        elif self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif self._wants_bar and time.monotonic() >= self._begin_at:
            self._begin(done)

    def _begin(self, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars

        self._bar = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(self._what, total=self._total, completed=done)
        self._bar.start()
