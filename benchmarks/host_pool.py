"""Measure `outboard.HostPool`: microseconds of lending a cached buffer and taking it back."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

import outboard


def microseconds(call: Callable[[], object], repeats: int, rounds: int) -> float:
    """Return the median over rounds of a call's mean duration."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        found.append((time.perf_counter() - begin) / repeats * 1e6)
    return statistics.median(found)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1 << 20)
    parser.add_argument("--repeats", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    pool = outboard.HostPool()

    def lend_and_take_back() -> None:
        pool.release(pool.acquire(arguments.bytes))

    def lend_and_drop() -> None:
        pool.acquire(arguments.bytes)

    sides: dict[str, Callable[[], object]] = {
        "acquire and release": lend_and_take_back,
        "acquire, dropped": lend_and_drop,
        "torch.empty": lambda: torch.empty(arguments.bytes, dtype=torch.uint8),
    }
    if torch.cuda.is_available():
        sides["torch.empty pinned"] = lambda: torch.empty(arguments.bytes, dtype=torch.uint8, pin_memory=True)
    for call in sides.values():
        microseconds(call, arguments.repeats // 10, 1)
    result = {name: microseconds(call, arguments.repeats, arguments.rounds) for name, call in sides.items()}
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:>20}  {value:6.2f} microseconds")


if __name__ == "__main__":
    main()
