"""Measure training steps whose activations spend the time between forward and backward in host memory.

    python benchmarks/activations.py [--model gpt-1.3b] [--batch 8] [--rounds 2] [--sides none 1] [--json out.json]

Sides: forward and backward alone; with `outboard.offload_activations` of a fraction of the model's blocks; each also
with `outboard.AdamW`, attached (``adamw+``). Each side is a process of its own; rounds alternate between sides, and the
median of all steps counts. `activations` is device memory that the forward has left behind, `peak` the most of a step,
both beyond what is there before it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import outboard
from outboard.bench.models import MODELS, build

GIB = 1 << 30


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return one side's figures."""
    torch.cuda.set_device(0)
    model = build(options.model, 0, torch.bfloat16, torch.device("cuda", 0))
    optimizer, _, count = options.side.rpartition("+") if "+" in options.side else ("", "", options.side)
    adamw = outboard.AdamW(model.parameters(), lr=1e-4).attach(model) if optimizer == "adamw" else None
    handle = None
    if count != "none":
        fraction = count if count == "auto" else float(count)
        handle = outboard.offload_activations(model, fraction=fraction, prefetch=options.prefetch)
    context = MODELS[options.model].context
    generator = torch.Generator(device="cuda").manual_seed(0)
    times: list[float] = []
    activations, peaks, losses = [], [], []
    warmup = options.warmup
    while len(times) < warmup + options.steps:
        if len(times) == warmup and handle is not None and not handle.plan()["is_settled"] and warmup < 100:
            # Until it has chosen.
            warmup += 1
        tokens = torch.randint(
            MODELS[options.model].vocabulary, (options.batch, context), device="cuda", generator=generator
        )
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        loss = model(tokens, tokens.roll(-1, 1))
        activations.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        if adamw is not None:
            adamw.step()
        model.zero_grad()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
        losses.append(loss.item())
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return {
        "ms": times[warmup:],
        "losses": losses,
        "activations": max(activations[warmup:]),
        "peak": max(peaks[warmup:]),
        "stats": None if handle is None else handle.stats(),
        "plan": None if handle is None else handle.plan(),
    }


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return the Markdown of all sides."""
    middle = {side: statistics.median(ms for run in runs for ms in run["ms"]) for side, runs in results.items()}
    lines = [
        "| side | step, ms | ratio | activations, GiB | fewer by | peak, GiB | out, GiB a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for side, runs in results.items():
        base = side.replace(side.rpartition("+")[2], "none")
        ratio = f"{middle[side] / middle[base]:.2f}" if base in middle and base != side else ""
        kept, peak = (max(run[key] for run in runs) / GIB for key in ("activations", "peak"))
        fewer = ""
        if base in results and base != side:
            fewer = f"{1 - kept * GIB / max(run['activations'] for run in results[base]):.0%}"
        stats = runs[0]["stats"]
        out = "" if stats is None else f"{sum(stats['blocks'].values()) / GIB:.2f}"
        lines.append(f"| {side} | {middle[side]:.1f} | {ratio} | {kept:.2f} | {fewer} | {peak:.2f} | {out} |")
    for side, runs in results.items():
        if side.endswith("auto"):
            lines += ["", f"{side}: {runs[0]['plan']['why']}; {len(runs[0]['plan']['blocks'])} blocks leave."]
    return "\n".join(lines)


def main() -> None:
    """Measure all sides, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt-1.3b")
    parser.add_argument("--batch", type=int, default=8, help="sequences of the model's context")
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--sides", nargs="+", default=["none", "auto", "0.17", "1", "adamw+none", "adamw+auto", "adamw+1"]
    )
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options)))
        return
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: this measures steps on one")
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides}
    for _ in range(options.rounds):
        for side in options.sides:
            command = [sys.executable, __file__, "--side", side]
            for name in ("model", "batch", "steps", "warmup", "prefetch"):
                command += ["--" + name, str(getattr(options, name))]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[side].append(json.loads(done.stdout.splitlines()[-1]))
    if options.json:
        options.json.write_text(json.dumps(results))
    print(table(results))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; {options.model}, batch {options.batch}.")


if __name__ == "__main__":
    main()
