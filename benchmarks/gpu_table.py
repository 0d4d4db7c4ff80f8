"""Run every GPU benchmark and print one Markdown table.

    python benchmarks/gpu_table.py [--parts lanes,batch8,...] [--peers torchao,deepspeed] [--json gpu.json]

Every figure in the README's table of GPU figures comes from one run of this script. Each side of a training step is a
process of its own that builds the model anew, 5 to 10 seconds; with the defaults there are 19 of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import outboard
from outboard.bench import terminal
from outboard.bench.models import MODELS
from outboard.bench.setup import PEERS
from outboard.bench.tables import machine

#: Tiny parameters of the part of that name.
TINY = 10_000

#: Options of `outboard.bench.training_step` that each part sets.
STEPS: dict[str, dict[str, Any]] = {
    "batch8": {"batch": 8},
    "batch4": {"batch": 4},
    "batch2": {"batch": 2},
    "clip": {"batch": 8, "clip": 1.0},
    "tiny": {"batch": 8, "tiny": TINY, "resident": [0.0]},
}
PARTS = ("lanes", *STEPS)


def lanes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of `outboard bench lanes`, from a process that gives its memory back."""
    command = [sys.executable, "-m", "outboard", "bench", "lanes", "--json", "--device", options.device]
    command += ["--numel", str(options.numel)]
    command += ["--threads", str(options.threads)] if options.threads else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"error": f"exit status {done.returncode}", "rows": []}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def step(options: argparse.Namespace, part: str, progress: Callable[[str], None]) -> dict[str, Any]:
    """Return the result of one part of training steps."""
    settings: dict[str, Any] = {
        "model": options.model,
        "device": options.device,
        "resident": options.resident,
        "peers": ["torch", *options.peers],
        "steps": options.steps,
        "rounds": options.rounds,
        "threads": options.threads,
        "progress": progress,
    }
    return outboard.bench.training_step(**{**settings, **STEPS[part]})


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the Markdown of the results by part."""
    lines = [
        "| measured | side | result | ratio to torch fused | device GiB over fwd+bwd | host GiB | start, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for part, result in results.items():
        lines += _lane_rows(result) if part == "lanes" else _step_rows(result)
    known = [result for result in results.values() if result.get("machine")]
    if known:
        lines += ["", "; ".join(machine(known[0])) + "."]
    for part, result in results.items():
        if part != "lanes":
            lines += [
                "",
                f"{terminal.figure(result['parameters'])} {result['dtype']} parameters; {result['steps']} steps after "
                f"{result['warmup']}, {result['rounds']} interleaved round(s). A ratio above 1 is faster than torch's "
                "fused AdamW, which offloads nothing and keeps no fp32 master.",
            ]
            break
    return "\n".join(lines)


def _lane_rows(result: dict[str, Any]) -> list[str]:
    if "error" in result:
        return [f"| lanes | outboard | {result['error']} | | | | |"]
    rows = []
    for row in result["rows"]:
        name = {"gpu": f"GPU lane, {row['transfer']}", "cpu": "CPU lane", "auto": "both lanes"}[row["mode"]]
        rates = [terminal.figure(row[key]) for key in ("gb_per_s_to_device", "gb_per_s_from_device")]
        rows.append(
            f"| {result['numel'] / 2**20:g} Mi {result['dtype']} elements, not attached | {name} "
            f"| {row['gelem_per_s']:.2f} Gel/s ({rates[0]} GB/s to the device, {rates[1]} from it) | | | | |"
        )
    return rows


def _step_rows(result: dict[str, Any]) -> list[str]:
    name = f"{result['model']}, {result['tokens_per_step']:,} tokens"
    name += f", clip {result['clip']:g}" if result["clip"] is not None else ""
    name += f", {result['tiny']:,} tiny parameters" if result["tiny"] else ""
    rows = []
    for row in result["sides"].values():
        keys = ("ratio_to_torch_fused", "device_gib_over_forward_backward", "host_gib", "start_seconds")
        cells = ["" if row[key] is None else f"{row[key]:.2f}" for key in keys]
        found = row["error"] or f"{row['step_ms']:.1f} ms"
        rows.append(f"| {name} | {row['title']} | {found} | {' | '.join(cells)} |")
    return rows


def main() -> int:
    """Run the parts, print the table; what is done so far is in the JSON file after each part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", type=terminal.some_of(PARTS), default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--model", choices=tuple(MODELS), default="gpt-1.3b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--numel", type=terminal.numel, default=256 << 20, help="elements for the lanes")
    parser.add_argument("--resident", type=terminal.shares, default=[0.0, 0.25])
    parser.add_argument("--peers", type=terminal.some_of(PEERS[1:]), default=[], help=f"of {','.join(PEERS[1:])}")
    parser.add_argument("--steps", type=terminal.whole(1, 1000), default=8)
    parser.add_argument("--rounds", type=terminal.whole(1, 100), default=1)
    parser.add_argument("--threads", type=terminal.threads)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    options = parser.parse_args()
    if options.device == "cpu":
        options.resident = [0.0]
    results: dict[str, dict[str, Any]] = {}
    began = time.monotonic()

    def say(part: str) -> Callable[[str], None]:
        return lambda what: print(f"{time.monotonic() - began:4.0f} s  {part}: {what}", file=sys.stderr, flush=True)

    for part in options.parts:
        if part == "lanes":
            say(part)("each lane and both")
            results[part] = lanes(options)
        else:
            results[part] = step(options, part, say(part))
        if options.json:
            options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results))
    failed = [row["error"] for result in results.values() for row in result.get("sides", {}).values() if row["error"]]
    failed += [result["error"] for result in results.values() if "error" in result]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
