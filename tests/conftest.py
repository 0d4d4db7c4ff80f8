"""Fixtures that every test of the package may use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def lanes_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a device with lanes: one made of host memory, with an order of completion of each test's own, or CUDA's.

    `OUTBOARD_LANES_SEED` gives every test another order.
    """
    from lanes import LanesDevice
    from outboard._lanes import LaneOptions

    if request.param == "cuda":
        return LanesDevice("cuda")
    seed = zlib.crc32(request.node.name.encode()) ^ int(os.environ.get("OUTBOARD_LANES_SEED", "0"))
    monkeypatch.setattr(LaneOptions, "simulate", seed)
    return LanesDevice("cpu")


@pytest.fixture(params=["cpu", "gpu", "auto"])
def mode(request: pytest.FixtureRequest) -> str:
    """Return each choice of lanes."""
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["plain", "attached"])
def attached(request: pytest.FixtureRequest) -> bool:
    """Whether the optimizer is attached to a model."""
    return bool(request.param)


@pytest.fixture
def small_ones_have_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let parameters of more than 50 elements have hooks, so that models may be small."""
    from outboard import _roster

    monkeypatch.setattr(_roster, "TINY_ELEMS", 50)


#: Imports torch, which takes seconds, and forks a process for each program that it is told to run. outboard is imported
#: by each program itself, so each is as a fresh interpreter to it.
NURSERY = """
import json, os, sys, traceback, warnings
import torch
torch.set_num_threads(1)
torch.optim.SGD([torch.ones(1, requires_grad=True)])  # imports the rest of torch, which is lazy
for line in sys.stdin:
    order = json.loads(line)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12's, of forks beside threads
        child = os.fork()
    if not child:
        warnings.simplefilter("error")
        os.environ.update(order["environment"])
        sys.argv = ["program", *order["arguments"]]
        for number, name in ((0, os.devnull), (1, order["stdout"]), (2, order["stderr"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
        sys.stdout = open(1, "w", closefd=False)
        exec(compile(order["program"], "program", "exec"), {"__name__": "__main__"})
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def _nursery() -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", NURSERY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    yield process
    process.stdin.close()
    process.stdout.close()
    process.wait()


@pytest.fixture
def python(_nursery: Any, tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a program in a process of its own and returns what it printed."""

    def run(program: str, *arguments: str, expect: int | tuple[int, ...] = 0, **environment: str) -> str:
        stdout, stderr = tmp_path / "stdout", tmp_path / "stderr"
        for file in (stdout, stderr):
            file.write_text("")
        order = {
            "program": textwrap.dedent(program),
            "arguments": arguments,
            "environment": environment,
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        print(json.dumps(order), file=_nursery.stdin, flush=True)
        status = int(_nursery.stdout.readline())
        assert status in (expect if isinstance(expect, tuple) else (expect,)), (
            f"exit status {status}\n{stdout.read_text()}\n{stderr.read_text()}"
        )
        return stdout.read_text()

    return run


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def ranks(request: pytest.FixtureRequest, python: Callable[..., str]) -> Callable[..., str]:
    """Return a function that calls a worker (see `ranks.run`) in several processes, and returns what they printed.

    Over gloo, with host memory as a device with lanes, or over NCCL with a GPU for each: fewer, if there are no more
    and the worker can do with `at_least` as many.
    """
    seed = zlib.crc32(request.node.name.encode()) ^ int(os.environ.get("OUTBOARD_LANES_SEED", "0"))
    is_cuda = request.param == "cuda"

    def run(worker: Callable[..., None], world_size: int, *arguments: Any, at_least: int | None = None) -> str:
        if is_cuda:
            devices = min(torch.cuda.device_count(), int(os.environ.get("OUTBOARD_NPROC") or 1024))
            if devices < (at_least or world_size):
                pytest.skip(f"needs {at_least or world_size} CUDA devices, there are {devices}")
            world_size = min(world_size, devices)
        program = f"""
            import json, sys, warnings
            import {worker.__module__}
            import ranks
            world_size, device, seed, arguments = json.loads(sys.argv[1])
            warnings.simplefilter("ignore")
            ranks.run({worker.__module__}.{worker.__name__}, world_size, device, seed, *arguments)
            """
        order = [world_size, "cuda" if is_cuda else "cpu", None if is_cuda else seed, arguments]
        return python(program, json.dumps(order))

    return run
