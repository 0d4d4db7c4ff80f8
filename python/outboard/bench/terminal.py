"""How the command line reads numbers and draws tables.

rich is imported where something is drawn in a terminal and nowhere else; without it, or without a terminal, the same
content is plain text.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from outboard.bench.common import Progress

_MULTIPLES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}

#: More threads than this end in the system's own failures, some of which abort.
_MOST_THREADS = max(1024, os.cpu_count() or 1)


@dataclass(frozen=True)
class Table:
    """What a benchmark shows: a line, a table whose first column is text, and lines for what fits in no column."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    def show(self) -> None:
        """Draw it in the terminal, or print it as text."""
        if not draw(self._renderables):
            print(self.text())

    def text(self) -> str:
        """Return it as plain text."""
        widths = [max(map(len, column)) for column in zip(self.headings, *self.rows, strict=True)]
        lines = [self.title, ""]
        for row in (self.headings, *self.rows):
            cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
            lines.append("  ".join(cells))
        return "\n".join([*lines, "", *self.notes])

    def _renderables(self) -> list[Any]:
        from rich.table import Table as Drawn
        from rich.text import Text

        drawn = Drawn()
        for index, heading in enumerate(self.headings):
            drawn.add_column(heading, justify="right" if index else "left")
        for row in self.rows:
            drawn.add_row(*map(Text, row))
        return [Text(self.title), drawn, *map(Text, self.notes)]


def figure(value: Any) -> str:
    """Return a value for a person: a float with three significant digits and no exponent."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float) or value == 0 or not math.isfinite(value):
        return str(value)
    decimals = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(decimals, 0), 9)}f}"


def draw(renderables: Callable[[], list[Any]]) -> bool:
    """Draw in the terminal; False if there is none or rich cannot, and nothing was written."""
    if not sys.stdout.isatty():
        return False
    try:
        from rich.console import Console

        console = Console(file=sys.stdout, highlight=False)
        parts = renderables()
    except Exception:  # A broken rich: plain text says the same.
        return False
    console.print(*parts, sep="\n")
    return True


@contextmanager
def progress(long: bool = False) -> Iterator[Progress]:
    """Yield what shows a line of progress on stderr, if that is a terminal.

    Parameters
    ----------
    long : bool
        Print plain lines where there is no terminal, so that a log says what is running.
    """

    def print_line(message: str) -> None:
        print(f"measuring {message}", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield print_line if long else lambda _: None
        return
    try:
        from rich.console import Console
        from rich.live import Live

        # Drawn when there is news only: what moves by itself takes time from what is measured.
        live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
    except Exception:  # A broken rich: plain lines say the same.
        yield print_line
        return
    with live:
        yield lambda message: live.update(f"measuring {message}", refresh=True)


def numel(text: str) -> int:
    """Return a number of elements such as 1e6, 500k or 64Mi."""
    parts = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)([A-Za-z]*)", text)
    if parts is None or parts[2] not in _MULTIPLES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 1e6, 500k or 64Mi")
    value = float(parts[1]) * _MULTIPLES[parts[2]]
    if not 1 <= value < 2**53 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(value)


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of whole numbers in this range."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return read


threads = whole(1, _MOST_THREADS)


def above_zero(text: str) -> float:
    """Return a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def shares(text: str) -> list[float]:
    """Return shares from 0 to 1, separated by commas."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of shares from 0 to 1, such as 0,0.25,0.5")
    return values


def some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a reader of names separated by commas; "none" is none of them."""

    def read(text: str) -> list[str]:
        chosen = [] if text == "none" else text.split(",")
        for name in chosen:
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(names)}, or none")
        return chosen

    return read
