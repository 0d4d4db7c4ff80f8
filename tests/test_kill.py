"""Processes that end in the middle of training: exit status, no hang, and no update that was accepted is lost.

`make test-kill` runs each case fifty times, with other options and another order of the device's work each time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kill

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
REPEATS = int(os.environ.get("OUTBOARD_KILL_REPEATS", "5"))


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", kill.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.stdin.close()
    process.stdout.close()
    process.wait()


@pytest.mark.parametrize("device", ["simulated", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDS_CUDA])])
@pytest.mark.parametrize("kind", kill.STATUS)
@pytest.mark.timeout(60 + 60 * REPEATS)
def test_killed(runner: subprocess.Popen[str], tmp_path: Path, kind: str, device: str) -> None:
    order = {
        "kinds": [kind],
        "seeds": list(range(REPEATS)),
        "device": device,
        "folder": str(tmp_path),
        "parallel": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(order), file=runner.stdin, flush=True)
    results = json.loads(runner.stdout.readline())
    assert len(results) == REPEATS
    wrong = []
    for kind, seed, status, _ in results:
        output = tmp_path / f"{kind} {seed}"
        printed = output.with_name(output.name + ".out").read_text()
        errors = output.with_name(output.name + ".err").read_text()
        is_told = kind != "interrupt" or errors.rstrip().endswith("KeyboardInterrupt")
        if status not in kill.STATUS[kind] or printed != "checked\n" or not is_told:
            wrong.append(f"{kind}, seed {seed}: exit status {status}, printed {printed!r}\n{errors[-3000:]}")
    assert not wrong, "\n".join(wrong)
    print(f"{kind}, {device}: {REPEATS} of {REPEATS}; the slowest took {max(result[3] for result in results):.1f} s")
