"""Fixtures that every test of the package may use."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """Give each test the same random numbers and one torch thread, and take back what it set process-wide.

    With one thread the last elements of a tensor are all that torch's kernels handle as a tail, and the many small
    tensor operations of the oracle do not wait for threads on a busy machine.
    """
    dtype = torch.get_default_dtype()
    torch.manual_seed(20240229)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(dtype)
    torch.set_flush_denormal(False)


@pytest.fixture
def torch_threads() -> None:
    """Let torch's kernels use several threads."""
    torch.set_num_threads(4)


@pytest.fixture
def python() -> Callable[..., str]:
    """Return a function that runs a program in a fresh interpreter and returns what it printed."""

    def run(program: str, *arguments: str, expect: int = 0, **environment: str) -> str:
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        assert done.returncode == expect, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
