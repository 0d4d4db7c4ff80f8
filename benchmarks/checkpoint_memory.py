"""Prints how much host memory each kind of save and load takes beside the state: the growth of the process's peak.

Needs Linux (`/proc/self/clear_refs`) and safetensors. Writes twice the state's size to a temporary folder.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch

import outboard
from outboard import checkpoint


def peak() -> float:
    """Return the most MiB that the process has had, pages of mapped files counted."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024


def stepped(parameters: int, elements: int) -> outboard.AdamW:
    """Return an optimizer of fp32 parameters that has state."""
    params = [torch.nn.Parameter(torch.ones(elements)) for _ in range(parameters)]
    optimizer = outboard.AdamW(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p in params:
        p.grad = None
    return optimizer


def main() -> None:
    """Measure each call after a small one of its kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=24)
    parser.add_argument("--elements", type=int, default=8 << 20, help="of each parameter")
    parser.add_argument("--folder", help="where to write; default: the system's temporary one")
    options = parser.parse_args()
    small, optimizer = stepped(1, 1000), stepped(options.parameters, options.elements)
    print(f"state {optimizer.stats()['state_bytes'] / 2**20:.0f} MiB; torch {torch.__version__}", end="; ")
    print(f"safetensors {safetensors.__version__}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        file, shards = Path(folder) / "x.pt", Path(folder) / "x"
        small_file, small_shards = Path(folder) / "small.pt", Path(folder) / "small"
        calls: dict[str, Callable[[outboard.AdamW, Path, Path], object]] = {
            "save": lambda opt, file, _: checkpoint.save(opt, file),
            "load": lambda opt, file, _: checkpoint.load(file, opt),
            "load, mmap=True": lambda opt, file, _: checkpoint.load(file, opt, mmap=True),
            "save_safetensors": lambda opt, _, shards: checkpoint.save_safetensors(opt, shards),
            "load_safetensors": lambda opt, _, shards: checkpoint.load_safetensors(shards, opt),
            "load_safetensors, no optimizer": lambda opt, _, shards: checkpoint.load_safetensors(shards),
        }
        for name, call in calls.items():
            call(small, small_file, small_shards)
            Path("/proc/self/clear_refs").write_text("5")
            before, start = peak(), time.perf_counter()
            call(optimizer, file, shards)
            print(f"{name:32} {peak() - before:8.0f} MiB {time.perf_counter() - start:8.2f} s")


if __name__ == "__main__":
    main()
