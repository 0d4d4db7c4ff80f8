"""Matrices that are spread over ranks: each is put together, and orthogonalised, by one rank, its owner.

Shards of several matrices travel to their owners by one all-to-all, and back by another. Both are issued ahead, so that
they are under way while other matrices are worked on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from outboard import _sharded


@dataclass(frozen=True)
class Spread:
    """How a parameter's matrix travels: along one dimension of a mesh, cut along one dimension of the tensor."""

    group: Any
    #: The number of ranks in the group, and this one's place there.
    size: int
    rank: int
    #: The dimension of the tensor that is cut.
    dim: int


def _cut(length: int, size: int, rank: int) -> tuple[int, int]:
    """Return where a rank's shard of a dimension begins and how long it is, as `torch.chunk` cuts."""
    chunk = -(-length // size)
    start = min(length, chunk * rank)
    return start, min(chunk, length - start)


def spread_of(parameter: torch.Tensor) -> Spread | None:
    """Return how a parameter travels; None for one that is cut in another way, or whole."""
    if not _sharded.is_sharded(parameter):
        return None
    spec: Any = parameter._spec  # type: ignore[attr-defined]
    cuts = [(dim, placement) for dim, placement in enumerate(spec.placements) if not placement.is_replicate()]
    if len(cuts) != 1 or type(cuts[0][1]).__name__ != "Shard":
        return None
    mesh_dim, placement = cuts[0]
    size, rank = spec.mesh.size(mesh_dim), spec.mesh.get_local_rank(mesh_dim)
    shape = list(parameter.shape)
    shape[placement.dim] = _cut(shape[placement.dim], size, rank)[1]
    if tuple(shape) != tuple(_sharded.local(parameter).shape):
        return None
    return Spread(spec.mesh.get_group(mesh_dim), size, rank, placement.dim)


def is_whole(parameter: torch.Tensor, flatten: bool | None) -> bool:
    """Whether this rank has whole matrices: a plain tensor, a replica, or some of the matrices of a stack."""
    if not _sharded.is_sharded(parameter):
        return True
    spec: Any = parameter._spec  # type: ignore[attr-defined]
    is_stack = parameter.ndim == 3 and not flatten
    return all(
        placement.is_replicate() or (is_stack and type(placement).__name__ == "Shard" and placement.dim == 0)
        for placement in spec.placements
    )


def owners(costs: Sequence[float], size: int, loads: list[float]) -> list[int]:
    """Choose each matrix's owner so that ranks have about the same to do; the same on all ranks.

    Parameters
    ----------
    costs : sequence of float
        Of each matrix.
    size : int
        Number of ranks.
    loads : list of float
        What each rank has already; added to.
    """
    chosen = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = min(range(size), key=lambda rank: (loads[rank], rank))
        chosen[index] = rank
        loads[rank] += costs[index]
    return chosen


def cost_of(shape: tuple[int, int]) -> float:
    """Return about how long a matrix takes: the products of one Newton-Schulz step."""
    short, long = sorted(shape)
    return 2.0 * short * short * (2 * long + short)


def _as_bytes(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    # gloo does not know bf16, and no backend looks at what it carries.
    flat = [tensor.reshape(-1) for tensor in tensors]
    joined = torch.cat(flat) if flat else torch.empty(0, dtype=torch.bfloat16, device=device)
    return joined.view(torch.uint8)


class Exchange:
    """The shards of some matrices on their way to their owners, and back.

    Parameters
    ----------
    shapes : sequence of torch.Size
        The whole shapes.
    dims : sequence of int
        Along which dimension each is cut.
    owners : sequence of int
        The owner of each, a rank of the group.
    spread : Spread
        The group.
    device : torch.device
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        dims: Sequence[int],
        owners: Sequence[int],
        spread: Spread,
        device: torch.device,
    ) -> None:
        self._shapes, self._dims, self._owners = shapes, dims, owners
        self._spread, self._device = spread, device
        #: Indices of the matrices that this rank owns.
        self.own = [index for index, owner in enumerate(owners) if owner == spread.rank]
        self._work: Any = None
        self._sent: torch.Tensor | None = None
        self._received: torch.Tensor | None = None

    def _shard_shape(self, index: int, rank: int) -> list[int]:
        shape = list(self._shapes[index])
        shape[self._dims[index]] = _cut(shape[self._dims[index]], self._spread.size, rank)[1]
        return shape

    def _bytes_at(self, indices: Sequence[int], rank: int) -> int:
        return sum(2 * math.prod(self._shard_shape(index, rank)) for index in indices)

    def _owned_by(self, rank: int) -> list[int]:
        return [index for index, owner in enumerate(self._owners) if owner == rank]

    def _start(self, tensors: list[torch.Tensor], sent: list[int], received: list[int]) -> None:
        self._sent = _as_bytes(tensors, self._device)
        self._received = torch.empty(sum(received), dtype=torch.uint8, device=self._device)
        self._work = dist.all_to_all_single(
            self._received, self._sent, received, sent, group=self._spread.group, async_op=True
        )

    def _finish(self) -> torch.Tensor:
        assert self._received is not None
        # On CUDA the current stream waits, not the host.
        self._work.wait()
        received = self._received.view(torch.bfloat16)
        self._work = self._sent = self._received = None
        return received

    def gather(self, shards: Sequence[torch.Tensor]) -> None:
        """Start to send this rank's shards (bf16) to their owners."""
        ranks = range(self._spread.size)
        order = [index for rank in ranks for index in self._owned_by(rank)]
        sent = [self._bytes_at(self._owned_by(rank), self._spread.rank) for rank in ranks]
        received = [self._bytes_at(self.own, rank) for rank in ranks]
        self._start([shards[index] for index in order], sent, received)

    def wholes(self) -> list[torch.Tensor]:
        """Return the matrices that this rank owns, put together, in the order of `own`."""
        return self._split(self._finish(), by_rank=True)

    def _split(self, received: torch.Tensor, *, by_rank: bool) -> list[torch.Tensor]:
        pieces: dict[int, list[torch.Tensor]] = {}
        at = 0
        for rank in range(self._spread.size):
            # From a rank come its shards of what is owned here; or, from an owner, the shards of this rank.
            indices, whose = (self.own, rank) if by_rank else (self._owned_by(rank), self._spread.rank)
            for index in indices:
                shape = self._shard_shape(index, whose)
                pieces.setdefault(index, []).append(received[at : at + math.prod(shape)].view(shape))
                at += math.prod(shape)
        return [torch.cat(pieces[index], self._dims[index]) for index in sorted(pieces)]

    def scatter(self, wholes: Sequence[torch.Tensor]) -> None:
        """Start to send the shards of matrices that this rank owns (bf16) back."""
        ranks = range(self._spread.size)
        tensors = []
        for rank in ranks:
            for index, whole in zip(self.own, wholes, strict=True):
                dim = self._dims[index]
                start, length = _cut(whole.shape[dim], self._spread.size, rank)
                tensors.append(whole.narrow(dim, start, length))
        sent = [self._bytes_at(self.own, rank) for rank in ranks]
        received = [self._bytes_at(self._owned_by(rank), self._spread.rank) for rank in ranks]
        self._start(tensors, sent, received)

    def shards(self) -> list[torch.Tensor]:
        """Return this rank's shards of all matrices, in their order."""
        return self._split(self._finish(), by_rank=False)


def check_agreement(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Refuse gradients that only some ranks have, of parameters whose shards travel in host memory.

    On CUDA that would let the host wait for the device.

    Raises
    ------
    RuntimeError
        On all ranks.
    """
    by_group: dict[int, tuple[Any, list[int]]] = {}
    for index, parameter in enumerate(parameters):
        if _sharded.is_sharded(parameter) and _sharded.local(parameter).device.type == "cpu":
            spec: Any = parameter._spec  # type: ignore[attr-defined]
            if spec.mesh.get_coordinate() is None:
                continue  # this rank has nothing of it
            for dim, placement in enumerate(spec.placements):
                if not placement.is_replicate():
                    group = spec.mesh.get_group(dim)
                    by_group.setdefault(id(group), (group, []))[1].append(index)
    for group, indices in by_group.values():
        mine = [float(parameters[index].grad is not None) for index in indices]
        most, least = torch.tensor(mine), -torch.tensor(mine)
        both = torch.cat([most, least])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        differing = [
            names[index]
            for index, high, low in zip(indices, both[: len(mine)].tolist(), both[len(mine) :].tolist(), strict=True)
            if high != -low
        ]
        if differing:
            raise RuntimeError(
                f"only some ranks have gradients of {', '.join(differing)}: all ranks step the same ones"
            )


def whole_of(update: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the whole of which every rank has a part, as it has of a parameter, on all ranks."""
    found: torch.Tensor = _sharded.like(update, parameter).full_tensor()  # type: ignore[attr-defined]
    return found


def part_of_whole(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor of a parameter's shape that all ranks have; nothing is sent."""
    if not _sharded.is_sharded(parameter):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    spec: Any = parameter._spec  # type: ignore[attr-defined]
    replicas = [Replicate()] * spec.mesh.ndim
    spread = DTensor.from_local(whole, spec.mesh, replicas, run_check=False).redistribute(spec.mesh, spec.placements)
    found: torch.Tensor = spread.to_local()
    return found
