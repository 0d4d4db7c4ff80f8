"""The command line: arguments in, a table, plain text or JSON out.

rich is imported where something is drawn in a terminal and nowhere else; without it, or without a
terminal, the same content is plain text.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NoReturn

from outboard import _native, bench, doctor

_PROGRAM = "python -m outboard"
_USAGE = 2
_INTERRUPTED = 130
_NO_READER = 141

_EPILOG = """\
examples:
  python -m outboard doctor                          what this build and machine can do
  python -m outboard doctor --json                   the same for a program or a bug report
  python -m outboard bench host                      outboard beside torch's fused AdamW
  python -m outboard bench host --numel 1e6 --json   smaller, as JSON
"""
_DOCTOR_EPILOG = """\
exit status: 0 if tensors in host memory can be updated, 1 if a finding is a problem

examples:
  python -m outboard doctor
  python -m outboard doctor --json
"""
_BENCH_EPILOG = """\
examples:
  python -m outboard bench host
  python -m outboard bench host --numel 16Mi --dtype float32
  python -m outboard bench host --threads 8 --json > bench.json
"""

_MULTIPLES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}

#: More threads than this end in the system's own failures, some of which abort.
_MOST_THREADS = max(1024, os.cpu_count() or 1)

#: Bytes that the benchmark holds at its peak for each element, and beside that.
_BENCH_BYTES = {"float32": 48, "bfloat16": 36, "all": 48}
_BENCH_BYTES_BESIDE = 512 << 20

_CASES = {
    "fp32": "fp32 weights and moments",
    "tiny": "fp32, {parameters:,} small parameters",
    "bf16": "bf16 weights, fp32 moments",
    "bf16_moments": "bf16 weights and moments",
}
_NOTES = {
    "torch_fused_gain_from_huge_pages": "torch's own gain from huge pages: {}",
    "stream_gb_per_s": "stream loop over the same tensors: {} GB/s",
    "bandwidth_fraction": "bandwidth, as a fraction of the stream loop's: {}",
    "bits_equal": "the same bits as torch: {}",
}
_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE, f"{self.prog}: {message} (see --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Without the program's name; None: those of this process.

    Returns
    -------
    int
        0; 1 when a finding of `doctor` is a problem or a benchmark fails; 130 after Ctrl-C; 141 when
        nobody reads the output.

    Raises
    ------
    SystemExit
        With status 2 for arguments that cannot be used, with 0 after `--help` and `--version`.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if "run" not in options:
        options.parser.print_help(sys.stderr)
        return _USAGE
    try:
        status = int(options.run(options))
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has what it wanted; Python would flush once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _command(_Parser(prog=_PROGRAM), "Look at this machine, or measure it.", _EPILOG)
    version = f"outboard {_native.build_info()['version']}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    text = "Say what this build and this machine can do, and what to do about it."
    checkup = _command(commands.add_parser("doctor", help=text), text, _DOCTOR_EPILOG)
    checkup.add_argument("--json", action="store_true", help="print JSON")
    checkup.set_defaults(run=_doctor)

    text = "Measure outboard beside torch, both sides in one run."
    measure = _command(commands.add_parser("bench", help=text), text, _BENCH_EPILOG)
    benchmarks = measure.add_subparsers(title="benchmarks", metavar="BENCHMARK")

    text = "Measure the update of tensors in host memory: medians of alternating blocks."
    host = _command(benchmarks.add_parser("host", help=text), text, _BENCH_EPILOG)
    host.add_argument(
        "--numel",
        type=_numel,
        default=64 << 20,
        metavar="N",
        help="elements of the large parameter, such as 1e6, 500k or 64Mi (default: 64Mi)",
    )
    host.add_argument(
        "--threads",
        type=_threads,
        metavar="N",
        help="threads of both sides (default: as many as an optimizer starts)",
    )
    host.add_argument(
        "--dtype",
        choices=("all", "float32", "bfloat16"),
        default="all",
        help="dtype of the weights (default: all)",
    )
    host.add_argument("--json", action="store_true", help="print JSON")
    host.set_defaults(run=_bench_host)
    return parser


def _command(parser: argparse.ArgumentParser, description: str, epilog: str) -> argparse.ArgumentParser:
    parser.description, parser.epilog = description, epilog
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(parser=parser)
    return parser


def _numel(text: str) -> int:
    parts = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)([A-Za-z]*)", text)
    if parts is None or parts[2] not in _MULTIPLES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 1e6, 500k or 64Mi")
    value = float(parts[1]) * _MULTIPLES[parts[2]]
    if not 1 <= value < 2**53 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(value)


def _threads(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= _MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MOST_THREADS}")
    return int(text)


def _doctor(options: argparse.Namespace) -> int:
    findings = doctor.report()
    usable = doctor.usable(findings)
    if options.json:
        entries = [asdict(finding) for finding in findings]
        print(json.dumps({"usable": usable, "findings": entries}, indent=2))
        return 0 if usable else 1
    verdict = (
        "outboard can update tensors in host memory here."
        if usable
        else "outboard cannot update tensors in host memory here: see what is marked as a problem."
    )
    if not _draw(lambda: _findings_table(findings, verdict)):
        print(_findings_text(findings, verdict))
    return 0 if usable else 1


def _findings_table(findings: list[doctor.Finding], verdict: str) -> list[Any]:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)
    for heading in ("status", "finding"):
        table.add_column(heading, no_wrap=True)
    table.add_column("found, and what to do")
    for finding in findings:
        text = Text(finding.found)
        if finding.advice:
            text.append("\n-> ", "bold").append(finding.advice)
        table.add_row(Text(finding.status, _COLOURS[finding.status]), Text(finding.name), text)
    return [table, Text(verdict)]


def _findings_text(findings: list[doctor.Finding], verdict: str) -> str:
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<7}  {finding.name:<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<7}  {'':<{width}}  -> {finding.advice}")
    return "\n".join([*lines, "", verdict])


def _bench_host(options: argparse.Namespace) -> int:
    needed = options.numel * _BENCH_BYTES[options.dtype] + _BENCH_BYTES_BESIDE
    available = doctor.available_memory()
    if available is not None and needed > available[0]:
        have, _ = available
        options.parser.error(
            f"argument --numel: {options.numel:,} elements need about {needed / 2**30:,.1f} GiB of "
            f"host memory, and {have / 2**30:,.1f} GiB are available"
        )
    try:
        with _progress() as progress:
            result = bench.host(options.numel, options.threads, options.dtype, progress)
    except ValueError as error:
        options.parser.error(str(error))
    except (RuntimeError, MemoryError) as error:
        line = " ".join(str(error).split()) or type(error).__name__
        print(f"{options.parser.prog}: {line}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(result, indent=2))
    elif not _draw(lambda: _bench_table(result)):
        print(_bench_text(result))
    return 0


def _bench_rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """Return a benchmark's column headings, its rows, and lines for what fits in no column."""
    headings = ["case", "outboard, ms", "torch fused, ms", "ratio", "Gel/s", "GB/s"]
    rows, notes = [], []
    for case, values in result.items():
        if not isinstance(values, dict) or "ms" not in values:
            continue
        rest = dict(values)
        torch_key = next((k for k in rest if re.fullmatch(r"torch_fused\w*_ms", k)), "")
        keys = ("ms", torch_key, "ratio_to_torch_fused", "gelem_per_s", "gb_per_s")
        name = _CASES.get(case, case).format_map(values)
        rows.append([name, *(_figure(rest.pop(key, None)) for key in keys)])
        if "fp32_copies" in torch_key:
            notes.append(f"{case}: torch's side updates fp32 copies")
        for key, value in rest.items():
            if f"{{{key}" in _CASES.get(case, ""):
                continue
            note = _NOTES.get(key, key.replace("_", " ") + ": {}")
            notes.append(f"{case}: {note.format(_figure(value))}")
    return headings, rows, notes


def _bench_heading(result: dict[str, Any]) -> str:
    threads = "1 thread" if result["threads"] == 1 else f"{result['threads']} threads"
    return (
        f"AdamW on tensors in host memory: {result['numel']:,} elements, {threads}, "
        f"medians of {bench.BLOCKS} alternating blocks"
    )


def _bench_lines(result: dict[str, Any], notes: list[str]) -> list[str]:
    machine = result["machine"]
    names = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [
        "ratio: torch's time over outboard's; above 1, outboard is faster. Gel/s: 1e9 elements "
        "per second. GB/s: bytes that must move.",
        *notes,
        f"machine: {', '.join(str(value) for value in machine.values() if value)}",
        f"versions: {names}",
    ]


def _bench_table(result: dict[str, Any]) -> list[Any]:
    from rich.table import Table
    from rich.text import Text

    headings, rows, notes = _bench_rows(result)
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return [Text(_bench_heading(result)), table, *map(Text, _bench_lines(result, notes))]


def _bench_text(result: dict[str, Any]) -> str:
    headings, rows, notes = _bench_rows(result)
    widths = [max(len(cell) for cell in column) for column in zip(headings, *rows, strict=True)]
    lines = [_bench_heading(result), ""]
    for row in [headings, *rows]:
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        lines.append("  ".join(cells))
    return "\n".join([*lines, "", *_bench_lines(result, notes)])


def _figure(value: Any) -> str:
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


def _draw(renderables: Callable[[], list[Any]]) -> bool:
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
def _progress() -> Iterator[bench.Progress]:
    """Yield what shows a line of progress on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    try:
        from rich.console import Console
        from rich.live import Live

        # Drawn when there is news only: what moves by itself takes time from what is measured.
        live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
    except Exception:  # A broken rich: plain lines say the same.
        yield lambda message: print(f"measuring {message}", file=sys.stderr)
        return
    with live:
        yield lambda message: live.update(f"measuring {message}", refresh=True)
