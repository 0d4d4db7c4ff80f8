"""Measure training steps with an optimizer's state on the device, and in host memory between steps.

    python benchmarks/state_offload.py [--model gpt-1.3b] [--batch 8] [--batch-mib 448] [--json out.json]

torch's fused AdamW with and without `outboard.offload_state`, and `outboard.Muon` with and without
`turn_on_cpu_offload`, on one CUDA device. Each side is a process of its own; rounds alternate between sides, and the
median of all steps counts. Losses of both sides of a pair are compared; the backward of attention adds up in no order,
so that even one side differs from itself. Bits are compared by the tests.
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

SIDES = ("none", "adamw", "adamw offload_state", "muon", "muon offloaded")
PAIRS = (("adamw", "adamw offload_state"), ("muon", "muon offloaded"))
GIB = 1 << 30
MIB = 1 << 20


def make(side: str, model: torch.nn.Module, batch_mib: int) -> torch.optim.Optimizer | None:
    """Return the optimizer of a side; None for forward and backward alone."""
    if side == "none":
        return None
    if side.startswith("adamw"):
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if side != "adamw":
            outboard.offload_state(optimizer, batch_bytes=batch_mib * MIB)
        return optimizer
    muon = outboard.Muon(outboard.muon.param_groups(model), lr=1e-4)
    if side != "muon":
        muon.turn_on_cpu_offload()
    return muon


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return one side's figures."""
    torch.cuda.set_device(0)
    model = build(options.model, 0, torch.bfloat16, torch.device("cuda", 0))
    optimizer = make(options.side, model, options.batch_mib)
    weights = torch.cuda.memory_allocated()
    context = MODELS[options.model].context
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (options.batch, context)
    times, losses, extras, peaks = [], [], [], []
    for _ in range(options.warmup + options.steps):
        tokens = torch.randint(MODELS[options.model].vocabulary, shape, device="cuda", generator=generator)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        end.record()
        # The next forward does not wait for copies home, and neither does this.
        end.synchronize()
        times.append(start.elapsed_time(end))
        losses.append(loss.item())
        peaks.append(torch.cuda.max_memory_allocated())
    # What the step itself takes at its largest, beside what is there when it begins but for the state.
    model(tokens, tokens.roll(-1, 1)).backward()
    torch.cuda.synchronize()
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
    torch.cuda.reset_peak_memory_stats()
    if optimizer is not None:
        optimizer.step()
    torch.cuda.synchronize()
    extras.append(torch.cuda.max_memory_allocated() - weights - gradients)
    model.zero_grad()
    torch.cuda.synchronize()
    return {
        "ms": times[options.warmup :],
        "losses": losses,
        "held": torch.cuda.memory_allocated() - weights,
        "step_extra": max(extras),
        "peak": max(peaks),
    }


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(abs(float(left) - float(right)) for left, right in zip(one["losses"], other["losses"], strict=True))


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return the Markdown of all sides."""
    lines = [
        "| side | step, ms | ratio | held between steps, GiB | most of the step itself, GiB | peak of all, GiB |",
        "|---|---|---|---|---|---|",
    ]
    middle = {side: statistics.median(ms for run in runs for ms in run["ms"]) for side, runs in results.items()}
    base = {offloaded: resident for resident, offloaded in PAIRS}
    for side, runs in results.items():
        ratio = f"**{middle[side] / middle[base[side]]:.2f}**" if base.get(side) in middle else ""
        held, extra, peak = (max(run[key] for run in runs) / GIB for key in ("held", "step_extra", "peak"))
        lines.append(f"| {side} | {middle[side]:.1f} | {ratio} | {held:.2f} | {extra:.2f} | {peak:.2f} |")
    for resident, offloaded in PAIRS:
        if results.get(resident) and results.get(offloaded):
            first, again, other = results[resident][0], results[resident][-1], results[offloaded][0]
            lines += [
                "",
                f"Losses of {offloaded}: at most {_apart(first, other):.1e} from those of {resident}; its own rounds "
                f"differ by {_apart(first, again):.1e}.",
            ]
    return "\n".join(lines)


def main() -> None:
    """Measure all sides, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt-1.3b")
    parser.add_argument("--batch", type=int, default=8, help="sequences of the model's context")
    parser.add_argument("--batch-mib", type=int, default=448, help="MiB of state in a batch of offload_state")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
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
            for name in ("model", "batch", "batch_mib", "steps", "warmup"):
                command += ["--" + name.replace("_", "-"), str(getattr(options, name))]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[side].append(json.loads(done.stdout.splitlines()[-1]))
    if options.json:
        options.json.write_text(json.dumps(results))
    print(table(results))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; {options.model}, batch {options.batch}.")


if __name__ == "__main__":
    main()
