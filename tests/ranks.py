"""Tests over several ranks: real processes with a process group, forked from one that has imported torch."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from outboard._lanes import LaneOptions

_seed: int | None = None


def run(worker: Callable[..., None], world_size: int, device: str, seed: int | None, *arguments: Any) -> None:
    """Call `worker(device, *arguments)` in as many processes with a process group; fail if any of them fails.

    Parameters
    ----------
    device : {"cpu", "cuda"}
        Of the process group, and on CUDA each rank's own.
    seed : int, optional
        Lets host memory play the part of a device with lanes, for `with_lanes`.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world_size):
            child = os.fork()
            if not child:
                os._exit(_rank(worker, rank, world_size, device, seed, arguments, f"file://{folder}/store"))
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(statuses):
        sys.exit(f"ranks ended with {statuses}")


def _rank(
    worker: Callable[..., None],
    rank: int,
    world_size: int,
    device: str,
    seed: int | None,
    arguments: tuple[Any, ...],
    store: str,
) -> int:
    global _seed
    _seed = seed
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        torch.set_num_threads(1)
        if device == "cuda":
            torch.cuda.set_device(rank)
        # State is in host memory: what is gathered or sent of it there goes over gloo.
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        limit = timedelta(seconds=60)
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size, timeout=limit)
        worker(device, *arguments)
        # Nobody goes while others still talk to it.
        dist.barrier()
        dist.destroy_process_group()
        return 0
    except BaseException:
        print(f"rank {rank} of {world_size}:", file=sys.stderr)
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@contextmanager
def with_lanes() -> Iterator[None]:
    """Let optimizers that are made here take host memory for a device, unless there are real ones."""
    LaneOptions.simulate = _seed
    try:
        yield
    finally:
        LaneOptions.simulate = None


class Block(torch.nn.Module):
    """A normalised two-layer block, whose layers can be parallelised. Sizes are multiples of 16 on up to 4 ranks."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width, bias)
        self.down = torch.nn.Linear(2 * width, width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Fails(torch.autograd.Function):
    """Passes a tensor on, and fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("in backward")


def model(blocks: int = 3, width: int = 64, bias: bool = True, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return a model of blocks with the same weights on every rank."""
    torch.manual_seed(20240229)
    return torch.nn.Sequential(*(Block(width, bias) for _ in range(blocks))).to(dtype)


def batches(count: int, width: int = 64, seed: int = 0, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    """Yield batches of a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(8, width, generator=generator).to(dtype)


def host(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor, in host memory."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).cpu()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor, of which ranks have parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def agree(value: Any) -> None:
    """Fail unless all ranks have the same value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == value for other in values), values


def small_ones_have_hooks() -> None:
    """Let parameters of more than 50 elements have hooks."""
    from outboard import _roster

    _roster.TINY_ELEMS = 50
