"""Cutting state into batches: runs of consecutive parameters whose largest is as small as can be."""

from __future__ import annotations

from collections.abc import Sequence


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
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]
