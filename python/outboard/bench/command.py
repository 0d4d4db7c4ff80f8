"""`python -m outboard bench`: arguments in, a table or JSON out, and plots."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from outboard import bench, doctor
from outboard._native import default_threads
from outboard.bench import plot, tables, terminal
from outboard.bench.common import DTYPES, MODES, STATE_DTYPES, check_device, check_dtypes
from outboard.bench.lanes import state_bytes
from outboard.bench.models import MODELS
from outboard.bench.setup import PEERS

_EPILOG = """\
examples:
  python -m outboard bench host
  python -m outboard bench lanes
  python -m outboard bench step --model gpt-350m --batch 4
"""
_HOST_EPILOG = """\
examples:
  python -m outboard bench host
  python -m outboard bench host --numel 16Mi --dtype float32
  python -m outboard bench host --threads 8 --json > bench.json
"""
_LANES_EPILOG = """\
examples:
  python -m outboard bench lanes
  python -m outboard bench lanes --numel 64Mi --state-dtype bfloat16 --plot lanes.png
  python -m outboard bench lanes --device cpu --json
"""
_STEP_EPILOG = """\
examples:
  python -m outboard bench step
  python -m outboard bench step --clip 1.0 --peers torch,torchao --rounds 3
  python -m outboard bench step --resident 0,0.25,0.5 --plot resident.png
  python -m outboard bench step --device cpu --model gpt-tiny --plot timeline.png
"""

#: Bytes of host memory that a benchmark holds at its peak for each element, and beside that.
_HOST_BYTES = {"float32": 48, "bfloat16": 36, "all": 48}
_BYTES_BESIDE = 512 << 20

#: What a benchmark raises when it cannot be done here: one line and status 1.
_FAILURES = (RuntimeError, MemoryError)


def add(commands: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `bench` and its benchmarks to the commands; `command` gives a parser its texts."""
    text = "Measure outboard beside torch, both sides in one run."
    measure = command(commands.add_parser("bench", help=text), text, _EPILOG)
    benchmarks = measure.add_subparsers(title="benchmarks", metavar="BENCHMARK")

    text = "Measure the update of tensors in host memory: medians of alternating blocks."
    host = command(benchmarks.add_parser("host", help=text), text, _HOST_EPILOG)
    _numel(host, 64 << 20, "elements of the large parameter, such as 1e6, 500k or 64Mi (default: 64Mi)")
    _threads(host, "threads of both sides")
    _choice(host, "--dtype", ("all", "float32", "bfloat16"), "all", "dtype of the weights")
    host.add_argument("--json", action="store_true", help="print JSON")
    host.set_defaults(run=_host)

    text = "Measure the update of parameters on a GPU: each lane alone, and both."
    lanes = command(benchmarks.add_parser("lanes", help=text), text, _LANES_EPILOG)
    _numel(lanes, 256 << 20, "elements in all, such as 1e6, 500k or 64Mi (default: 256Mi)")
    _threads(lanes, "worker threads")
    _where(lanes, "cuda:0")
    _count(lanes, "--repeats", 7, "timed steps of each row")
    _output(lanes, "draw the lanes' speeds")
    lanes.set_defaults(run=_lanes)

    text = "Measure a whole training step: forward and backward alone, outboard, other optimizers."
    step = command(benchmarks.add_parser("step", help=text), text, _STEP_EPILOG)
    _choice(step, "--model", tuple(MODELS), "gpt-1.3b", "what is trained")
    _count(step, "--batch", 8, "sequences in a batch")
    step.add_argument(
        "--seq",
        type=terminal.whole(1, 10**9),
        metavar="N",
        help="tokens in a sequence (default: the most there can be)",
    )
    step.add_argument("--clip", type=terminal.above_zero, metavar="NORM", help="clip gradients to this norm")
    _choice(step, "--mode", MODES, "auto", "outboard's lanes")
    step.add_argument(
        "--eager",
        choices=("auto", "true", "false"),
        help="when outboard updates in backward (default: true; with --clip auto)",
    )
    step.add_argument(
        "--resident",
        type=terminal.shares,
        default=[0.0],
        metavar="SHARES",
        help="shares of outboard's state to keep on the device, such as 0,0.25,0.5 (default: 0)",
    )
    step.add_argument(
        "--peers",
        type=terminal.some_of(PEERS),
        default=list(PEERS),
        metavar="NAMES",
        help=f"what to measure beside it, or none (default: {','.join(PEERS)}; what is not installed is named)",
    )
    _count(step, "--steps", 8, "timed steps")
    _count(step, "--warmup", 3, "steps before those")
    _count(step, "--rounds", 1, "runs of each side")
    _where(step, "cuda")
    _threads(step, "outboard's worker threads")
    step.add_argument(
        "--tiny",
        type=terminal.whole(0, 10**6),
        default=0,
        metavar="N",
        help="parameters of 1,000 elements to add beside the model (default: 0)",
    )
    _output(step, "draw one step's timeline, or with several --resident their times and memory")
    step.set_defaults(run=_step)


def _numel(parser: argparse.ArgumentParser, default: int, text: str) -> None:
    parser.add_argument("--numel", type=terminal.numel, default=default, metavar="N", help=text)


def _threads(parser: argparse.ArgumentParser, text: str) -> None:
    text += " (default: as many as an optimizer starts)"
    parser.add_argument("--threads", type=terminal.threads, metavar="N", help=text)


def _choice(parser: argparse.ArgumentParser, name: str, choices: tuple[str, ...], default: str, text: str) -> None:
    parser.add_argument(name, choices=choices, default=default, help=f"{text} (default: {default})")


def _count(parser: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    parser.add_argument(
        name, type=terminal.whole(1, 10**6), default=default, metavar="N", help=f"{text} (default: {default})"
    )


def _where(parser: argparse.ArgumentParser, device: str) -> None:
    parser.add_argument("--device", default=device, help=f"cpu, cuda or cuda:N (default: {device})")
    _choice(parser, "--dtype", tuple(DTYPES), "bfloat16", "dtype of weights and gradients")
    _choice(parser, "--state-dtype", tuple(STATE_DTYPES), "float32", "dtype of the moments")


def _output(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE.png", help=f"{text}; needs matplotlib")


def _host(options: argparse.Namespace) -> int:
    _need_memory(options, options.numel * _HOST_BYTES[options.dtype])

    def measure() -> dict[str, Any]:
        with terminal.progress() as progress:
            return bench.host(options.numel, options.threads, options.dtype, progress)

    return _run(options, measure, tables.host)


def _lanes(options: argparse.Namespace) -> int:
    weights, moments = check_dtypes(options.dtype, options.state_dtype)

    def measure() -> dict[str, Any]:
        on_host = check_device(options.device).type == "cpu"
        _need_memory(
            options, options.numel * (state_bytes(weights, moments) + (2 * weights.itemsize if on_host else 0))
        )
        with terminal.progress(long=True) as progress:
            return bench.lanes(
                options.numel,
                options.threads,
                options.device,
                options.dtype,
                options.state_dtype,
                options.repeats,
                progress,
            )

    return _run(options, measure, tables.lanes, plot.lanes)


def _step(options: argparse.Namespace) -> int:
    draws_timeline = len(options.resident) == 1

    def measure() -> dict[str, Any]:
        with terminal.progress(long=True) as progress:
            return bench.training_step(
                model=options.model,
                batch=options.batch,
                seq=options.seq,
                clip=options.clip,
                mode=options.mode,
                eager={"true": True, "false": False}.get(options.eager, options.eager),
                resident=options.resident,
                peers=options.peers,
                steps=options.steps,
                warmup=options.warmup,
                rounds=options.rounds,
                device=options.device,
                dtype=options.dtype,
                state_dtype=options.state_dtype,
                threads=options.threads,
                tiny=options.tiny,
                timeline=options.plot is not None and draws_timeline,
                progress=progress,
            )

    return _run(options, measure, tables.step, plot.timeline if draws_timeline else plot.resident, step_failed)


def step_failed(result: dict[str, Any]) -> bool:
    """Whether a side failed that needs nothing but torch and outboard."""
    return any(
        row["error"] for row in result["sides"].values() if row["side"] in ("forward_backward", "torch", "outboard")
    )


def _run(
    options: argparse.Namespace,
    measure: Callable[[], dict[str, Any]],
    table: Callable[[dict[str, Any]], terminal.Table],
    draw: Callable[[dict[str, Any], str], None] | None = None,
    failed: Callable[[dict[str, Any]], bool] = lambda _: False,
) -> int:
    """Measure, print and draw; return the exit status."""
    path = getattr(options, "plot", None)
    try:
        if path is not None:
            plot.check(path)
        if options.threads is None:
            default_threads()  # What OUTBOARD_NUM_THREADS says is refused before anything runs.
        result = measure()
    except ValueError as error:
        options.parser.error(str(error))
    except _FAILURES as error:
        return _failure(options, error)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        table(result).show()
    if draw is not None and path is not None:
        try:
            draw(result, path)
        except _FAILURES as error:
            return _failure(options, error)
    return 1 if failed(result) else 0


def _failure(options: argparse.Namespace, error: BaseException) -> int:
    line = " ".join(str(error).split()) or type(error).__name__
    print(f"{options.parser.prog}: {line}", file=sys.stderr)
    return 1


def _need_memory(options: argparse.Namespace, bytes_of_elements: int) -> None:
    needed = bytes_of_elements + _BYTES_BESIDE
    available = doctor.available_memory()
    if available is not None and needed > available[0]:
        options.parser.error(
            f"argument --numel: {options.numel:,} elements need about {needed / 2**30:,.1f} GiB of "
            f"host memory, and {available[0] / 2**30:,.1f} GiB are available"
        )
