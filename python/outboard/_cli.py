"""The command line: arguments in, a table, plain text or JSON out."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from outboard import _native, doctor
from outboard.bench import command as bench_command
from outboard.bench import terminal

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
  python -m outboard bench step                      a training step beside other optimizers
"""
_DOCTOR_EPILOG = """\
exit status: 0 if tensors in host memory can be updated, 1 if a finding is a problem

examples:
  python -m outboard doctor
  python -m outboard doctor --json
"""
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

    bench_command.add(commands, _command)
    return parser


def _command(parser: argparse.ArgumentParser, description: str, epilog: str) -> argparse.ArgumentParser:
    parser.description, parser.epilog = description, epilog
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(parser=parser)
    return parser


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
    if not terminal.draw(lambda: _findings_table(findings, verdict)):
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
