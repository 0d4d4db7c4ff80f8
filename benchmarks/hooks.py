"""Measure what an attached optimizer costs the host: gradient hooks, `step()` and module hooks, per parameter.

    python benchmarks/hooks.py [--device simulated|cuda] [--parameters 300] [--numel 65600] [--steps 12] [--json]

A model of many parameters, and nothing else: the forward reads no weight, the backward hands out gradients that are
there already. `hook` is what the optimizer counts itself (`stats()["hook_ms_per_step"]`); the other columns also hold
what torch does, so the first row, without hooks, is to be taken off. On `simulated` host memory plays the device, which
needs no GPU: its threads compete with the hooks for the processor, so look at the columns that count the main thread's
time on the processor (`cpu`). On `cuda` hooks run on a thread of torch's, so look at the others. The least of all
steps, in microseconds for each parameter.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

import outboard
from outboard._lanes import LaneOptions
from outboard.bench.common import machine, versions

#: Steps before those that count; eager="auto" begins in backward after one.
WARMUP = 3


class Leaf(torch.nn.Module):
    """One parameter, which the forward does not read."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(numel))
        torch.nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return x


class HandOut(torch.autograd.Function):
    """Has each parameter as its input, and hands out gradients."""

    @staticmethod
    def forward(ctx: Any, grads: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
        ctx.grads = grads
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        """Return the gradients; nobody else has them."""
        grads = tuple(ctx.grads)
        ctx.grads = None
        return (None, *grads)


COLUMNS = ("hook", "backward", "backward cpu", "step", "step cpu", "forward", "forward cpu")


def measure(
    *, device: str, parameters: int, numel: int, steps: int, threads: int | None, eager: str | bool, attached: bool
) -> dict[str, float]:
    """Return the least by column."""
    place = "cpu" if device == "simulated" else device
    model = torch.nn.Sequential(*(Leaf(numel) for _ in range(parameters))).to(place)
    leaves = list(model.parameters())
    x = torch.zeros(1, device=place)
    opt = outboard.AdamW(model.parameters(), eager=eager, threads=threads, max_waiting_bytes=1 << 40)
    if attached:
        opt.attach(model)
    rows: dict[str, list[float]] = {column: [] for column in COLUMNS}

    def time_of(column: str, work: Callable[[], Any]) -> None:
        began, cpu = time.perf_counter(), time.thread_time()
        work()
        rows[f"{column} cpu"].append(time.thread_time() - cpu)
        rows[column].append(time.perf_counter() - began)

    def step() -> None:
        if attached:
            opt.step()
        else:
            for leaf in leaves:
                leaf.grad = None

    hooks = 0.0
    for _ in range(steps + WARMUP):
        grads = [torch.full((numel,), 1e-3, device=place) for _ in leaves]
        time_of("forward", lambda: model(x))
        loss = HandOut.apply(grads, *leaves)
        del grads
        time_of("backward", loss.backward)
        time_of("step", step)
        opt.synchronize()
        stats = opt.stats()
        so_far = stats["hook_ms_per_step"] / 1e3 * max(1, stats["steps"])
        rows["hook"].append(so_far - hooks)
        hooks = so_far
    opt.close()
    return {column: min(values[WARMUP:]) * 1e6 / parameters for column, values in rows.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="simulated")
    parser.add_argument("--parameters", type=int, default=300)
    parser.add_argument("--numel", type=int, default=65_600, help="elements of each; up to 65,536 they have no hooks")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.device == "simulated":
        LaneOptions.simulate = 1
        torch.set_num_threads(1)
    settings: dict[str, Any] = {
        name: getattr(options, name) for name in ("device", "parameters", "numel", "steps", "threads")
    }
    rows = {"not attached": measure(**settings, eager="auto", attached=False)}
    for eager in (True, "auto", False):
        rows[f"eager={eager!r}"] = measure(**settings, eager=eager, attached=True)
    if options.json:
        print(json.dumps({"machine": machine(), "versions": versions(), **settings, "microseconds": rows}, indent=1))
        return
    print(", ".join(map(str, [*machine().values(), *(f"{k} {v}" for k, v in versions().items())])))
    print(f"microseconds for each of {options.parameters} parameters of {options.numel} elements, {options.device}\n")
    print(f"{'':14}" + "".join(f"{column:>14}" for column in COLUMNS))
    for name, row in rows.items():
        print(f"{name:14}" + "".join(f"{row[column]:14.2f}" for column in COLUMNS))


if __name__ == "__main__":
    main()
