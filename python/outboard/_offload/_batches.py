"""Batches of state: how parameters are cut into them, and where in an arena each tensor lies."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate

import torch

from outboard._offload._carrier import Carrier
from outboard._offload._travel import Item, padded


def _cut(sizes: Sequence[int], most: int) -> list[int]:
    """Return where each run begins when runs are filled one after the other with at most `most` bytes."""
    starts, total = [], most + 1
    for index, size in enumerate(sizes):
        if total + size > most:
            starts.append(index)
            total = 0
        total += size
    return starts


def balance(sizes: Sequence[int], *, batches: int | None = None, batch_bytes: int | None = None) -> list[range]:
    """Cut a list into runs of about the same number of bytes.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of each parameter's state, in the order in which they are used.
    batches : int, optional
        The number of runs (fewer where there are fewer parameters).
    batch_bytes : int, optional
        Instead: as few runs as hold at most so much each. A parameter with more is a run of its own.

    Returns
    -------
    list of range
        Indices of each run, none empty. Of all ways to cut so many runs, one whose largest has the fewest bytes.
    """
    if not sizes:
        return []
    largest, total = max(sizes), sum(sizes)
    if batches is None:
        assert batch_bytes is not None
        batches = len(_cut(sizes, max(batch_bytes, largest)))
    # The smallest capacity with which that many runs suffice.
    low, high = max(largest, -(-total // batches)), total
    while low < high:
        middle = (low + high) // 2
        if len(_cut(sizes, middle)) <= batches:
            high = middle
        else:
            low = middle + 1
    starts = _cut(sizes, high)
    runs = [range(start, end) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]
    return _split(runs, sizes, min(batches, len(sizes)))


def _split(runs: list[range], sizes: Sequence[int], count: int) -> list[range]:
    """Halve the largest of runs until there are so many: where one entry is large, fewer suffice for the capacity."""
    sums = [0, *accumulate(sizes)]
    heap = [(sums[run.start] - sums[run.stop], run.start, run.stop) for run in runs]
    heapify(heap)
    found: list[tuple[int, int, int]] = []
    while heap and len(heap) + len(found) < count:
        size, start, stop = heappop(heap)
        if stop - start == 1:
            found.append((size, start, stop))
            continue
        middle = bisect_left(sums, (sums[start] + sums[stop]) / 2, start + 1, stop - 1)
        if middle - 1 > start and sums[stop] - sums[middle - 1] <= sums[middle] - sums[start]:
            middle -= 1
        for begin, end in ((start, middle), (middle, stop)):
            heappush(heap, (sums[begin] - sums[end], begin, end))
    return sorted((range(start, stop) for _, start, stop in heap + found), key=lambda run: run.start)


def lay_out(items: list[Item], start: int) -> int:
    """Give items places in an arena as far apart as they are in host memory, so that neighbours travel together.

    Returns
    -------
    int
        Where the last one ends, in bytes.
    """
    at = start
    last_end: int | None = None
    for item in sorted(items, key=lambda item: item.address):
        begin = item.address
        gap = None if last_end is None else begin - last_end
        # What lies between two neighbours is padding.
        at = at + gap if gap is not None and 0 <= gap <= 2 * padded(1) else padded(at)
        item.offset = at
        at, last_end = at + item.nbytes, begin + item.nbytes
    return padded(at)


@dataclass(eq=False)
class Batch:
    """State that is on the device at the same time."""

    carrier: Carrier
    #: Its place among the batches of its device.
    index: int
    parameters: list[torch.Tensor] = field(default_factory=list)
    #: Of the arena, as far as it is known.
    nbytes: int = 0
    #: Parameters that have no state yet, and the bytes that it will have where that is known.
    unborn: list[tuple[torch.Tensor, int | None]] = field(default_factory=list)

    @property
    def which(self) -> int:
        """The arena that it uses."""
        return self.index % 2


@dataclass(eq=False)
class Plan:
    """The batches of a step, in the order in which the optimizer comes to them."""

    batches: list[Batch]
    batch_of: dict[torch.Tensor, Batch]
    #: The parameters of all groups when the plan was made, by identity, and their devices.
    order: list[tuple[int, torch.device]]

    def after(self, batch: Batch) -> Iterator[Batch]:
        """Yield the batches of the same device that follow."""
        at = self.batches.index(batch) + 1
        return (other for other in self.batches[at:] if other.carrier is batch.carrier)
