"""What autograd saves in a block: tensors that are handed over at the block's end, storage by storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outboard._activations._line import Cargo, Line
from outboard._native import OutboardError

#: Runs begin on multiples of it.
ALIGNMENT = 64


class ActivationError(OutboardError):
    """An activation could not be brought to the host, or back; the message says which."""


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def bytes_of(storage: torch.UntypedStorage, start: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a run of a storage's bytes as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, start, (nbytes,), (1,))


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a strided tensor in its storage, and the one behind its last."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return begin, begin
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (int(last) + 1) * size


@dataclass(eq=False)
class Run:
    """Bytes of one storage that travel together.

    Attributes
    ----------
    start, nbytes : int
        In their storage.
    cargo : Cargo
    offset : int or None
        Where they begin in the cargo of a bucket; None: they are all of the cargo.
    """

    start: int
    nbytes: int
    cargo: Cargo
    bucket: Bucket | None = None
    _memory: torch.Tensor | None = field(default=None, repr=False)

    @property
    def base(self) -> int:
        """Byte of the storage of old with which the storage of now begins: 0, unless the run is far behind that."""
        return 0 if self.start <= self.nbytes else self.start // ALIGNMENT * ALIGNMENT

    @property
    def prefix(self) -> int:
        """Bytes of the storage of now before the run."""
        return self.start - self.base

    def bring(self) -> None:
        """Start to bring it back."""
        if self.bucket is not None:
            self.bucket.bring()
        else:
            self.cargo.bring(self.prefix)

    def arrive(self) -> torch.UntypedStorage | None:
        """Return the storage of now, for the current stream; None while the one of old is there."""
        memory = self.cargo.arrive(self.prefix) if self.bucket is None else self.bucket.arrive(self)
        return None if memory is None else memory.untyped_storage()


class Bucket:
    """Small runs of one block and dtype, which share a buffer and a copy each way.

    Parameters
    ----------
    cargo : Cargo
        Of all of them, each at a multiple of `ALIGNMENT`.
    """

    def __init__(self, cargo: Cargo) -> None:
        self.cargo = cargo
        #: By run: where it begins.
        self.offsets: dict[int, int] = {}
        self._runs: list[weakref.ref[Run]] = []
        self._memories: dict[int, torch.Tensor] = {}

    def add(self, run: Run, offset: int) -> None:
        """Note where a run is."""
        self.offsets[id(run)] = offset
        self._runs.append(weakref.ref(run))

    def bring(self) -> None:
        """Start to bring all of them back."""
        if not self._memories:
            self.cargo.bring()

    def arrive(self, run: Run) -> torch.Tensor | None:
        """Return a run's memory; each has its own, as before."""
        if not self._memories:
            whole = self.cargo.arrive()
            if whole is None:
                whole = self.cargo.held
                assert whole is not None
            sources, made = [], []
            for reference in self._runs:
                other = reference()
                if other is None:
                    continue
                memory = torch.empty(other.prefix + other.nbytes, dtype=torch.uint8, device=whole.device)
                at = self.offsets[id(other)]
                sources.append(whole[at : at + other.nbytes])
                made.append(memory[other.prefix :])
                self._memories[id(other)] = memory
            torch._foreach_copy_(made, sources)
            self.cargo.leave()
        return self._memories[id(run)]

    def leave(self) -> None:
        """Let go of the memory that they were brought to."""
        self.cargo.leave()
        self._memories.clear()


@dataclass(eq=False)
class Saved:
    """One tensor that autograd has saved: what it gets instead.

    Attributes
    ----------
    alias : Tensor
        Shares the tensor's memory until that has left, and its version for good.
    """

    alias: torch.Tensor
    version: int
    producer: str
    group: Group
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    run: Run | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, group: Group) -> Saved:
        """Note a tensor down."""
        producer = "an input" if tensor.grad_fn is None else tensor.grad_fn.name()
        alias = tensor.detach()
        return cls(alias, tensor._version, producer, group, alias.shape, alias.stride(), int(alias.storage_offset()))

    def describe(self) -> str:
        """Return what it is, for messages."""
        dtype, device = self.alias.dtype, self.alias.device
        return f"{self.producer} saved in {self.group.name}, {dtype} {tuple(self.shape)} on {device}"

    def leave(self, run: Run) -> None:
        """Let go of the memory: it is in a run now."""
        self.run = run
        self.alias.data = self.alias.new_empty(0)

    def unpack(self) -> torch.Tensor:
        """Return the tensor.

        Raises
        ------
        RuntimeError
            If it has been changed in place since it was saved, as autograd would.
        """
        if self.alias._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.describe()} is at version {self.alias._version}; expected version {self.version}"
            )
        try:
            self.group.reached()
            storage = None if self.run is None else self.run.arrive()
        except Exception as error:
            raise ActivationError(f"{self.describe()} could not be brought back: {error}") from error
        if self.run is None:
            return self.alias
        base = self.run.base
        if storage is None:
            # Still where it was.
            held = self.run.cargo.held
            assert held is not None
            storage, base = held.untyped_storage(), 0
        made = self.alias.new_empty(0)
        with torch.no_grad():
            return made.set_(storage, self.offset - base // made.element_size(), self.shape, self.stride)


class Group:
    """One run of a block's forward: what it has saved.

    Parameters
    ----------
    name : str
        The block's.
    index : int
        Its place in its forward.
    sends : bool
        Whether what it saves leaves.
    on_reach : callable
        Told when backward comes to something of this group.
    """

    def __init__(self, name: str, index: int, sends: bool, on_reach: Callable[[Group], None]) -> None:
        self.name = name
        self.index = index
        #: Whether what it saves leaves.
        self.sends = sends
        self._on_reach = on_reach
        #: Until the block's end.
        self.open: list[Saved] | None = []
        self._runs: list[weakref.ref[Run]] = []
        self.sent_bytes = 0

    def reached(self) -> None:
        """Backward has come to this group."""
        self._on_reach(self)

    def runs(self) -> list[Run]:
        """Return the runs that are still needed, those that backward needs first at the front."""
        return [run for reference in reversed(self._runs) for run in [reference()] if run is not None]

    def bring(self) -> None:
        """Start to bring everything back."""
        for run in self.runs():
            run.bring()

    def leave(self) -> None:
        """Let go of the memory on the device that it was brought to."""
        for run in self.runs():
            (run.cargo if run.bucket is None else run.bucket).leave()

    def add(self, run: Run) -> None:
        """Note a run that something of this group is in."""
        self._runs.append(weakref.ref(run))

    def hand_over(self, line: Line, entries: Sequence[Saved], *, min_bytes: int, packed: bool) -> list[Run]:
        """Send tensors to the host, each byte of a storage once; return the runs that were sent.

        Raises
        ------
        ActivationError
            Everything is still on the device then.
        """
        large: list[tuple[torch.UntypedStorage, int, int, list[Saved]]] = []
        small: dict[torch.dtype, list[tuple[torch.UntypedStorage, int, int, list[Saved]]]] = {}
        for storage, start, nbytes, theirs in _runs_of(entries):
            if nbytes >= min_bytes:
                large.append((storage, start, nbytes, theirs))
            elif packed:
                small.setdefault(theirs[0].alias.dtype, []).append((storage, start, nbytes, theirs))
        what = self.name
        sent: list[Cargo] = []
        moved: list[tuple[Run, list[Saved]]] = []
        try:
            for storage, start, nbytes, theirs in large:
                what = theirs[0].describe()
                cargo = line.send(what, bytes_of(storage, start, nbytes, line.device))
                sent.append(cargo)
                moved.append((Run(start, nbytes, cargo), theirs))
            for dtype, members in small.items():
                count = sum(nbytes for _, _, nbytes, _ in members)
                what = (
                    f"a bucket of {len(members)} small tensors of {self.name}, {dtype}, "
                    f"{count // dtype.itemsize} elements, {count} bytes"
                )
                cargo, runs = _send_bucket(line, what, members)
                sent.append(cargo)
                moved += zip(runs, (theirs for _, _, _, theirs in members), strict=True)
        except Exception as error:
            for cargo in sent:
                cargo.let_go()
            raise ActivationError(f"{what} could not be copied to the host: {error}") from error
        for run, theirs in moved:
            self.sent_bytes += run.nbytes
            take(run, theirs)
        return [run for run, _ in moved]


def take(run: Run, entries: Iterable[Saved]) -> None:
    """Let tensors go that are in a run."""
    entries = list(entries)
    for group in {saved.group for saved in entries}:
        group.add(run)
    for saved in entries:
        saved.leave(run)


def _send_bucket(line: Line, what: str, members: Sequence[Any]) -> tuple[Cargo, list[Run]]:
    offsets, total = [], 0
    for _, _, nbytes, _ in members:
        offsets.append(total)
        total += _padded(nbytes)
    whole = torch.empty(total, dtype=torch.uint8, device=line.device)
    places = [whole[at : at + nbytes] for at, (_, _, nbytes, _) in zip(offsets, members, strict=True)]
    torch._foreach_copy_(
        places, [bytes_of(storage, start, nbytes, line.device) for storage, start, nbytes, _ in members]
    )
    cargo = line.send(what, whole)
    bucket = Bucket(cargo)
    runs = []
    for at, (_, start, nbytes, _) in zip(offsets, members, strict=True):
        run = Run(start, nbytes, cargo, bucket)
        bucket.add(run, at)
        runs.append(run)
    return cargo, runs


def bytes_of_runs(entries: Sequence[Saved]) -> int:
    """Return the bytes that tensors would send: each byte of a storage once."""
    return sum(nbytes for _, _, nbytes, _ in _runs_of([saved for saved in entries if saved.run is None]))


def _runs_of(entries: Sequence[Saved]) -> list[tuple[torch.UntypedStorage, int, int, list[Saved]]]:
    """Return the runs of bytes that tensors need, as they were saved first: a storage, start, bytes, and whose."""
    by_storage: dict[int, list[tuple[int, int, int, Saved]]] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for order, saved in enumerate(entries):
        storage = saved.alias.untyped_storage()
        storages.setdefault(storage.data_ptr(), storage)
        begin, end = extent(saved.alias)
        by_storage.setdefault(storage.data_ptr(), []).append((begin, end, order, saved))
    found: list[tuple[int, torch.UntypedStorage, int, int, list[Saved]]] = []
    for key, ranges in by_storage.items():
        merged: list[list[Any]] = []
        for begin, end, order, saved in sorted(ranges, key=lambda one: one[:3]):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
                merged[-1][2] = min(merged[-1][2], order)
                merged[-1][3].append(saved)
            else:
                merged.append([begin, end, order, [saved]])
        found += [(order, storages[key], begin, end - begin, theirs) for begin, end, order, theirs in merged]
    return [one[1:] for one in sorted(found, key=lambda one: one[0]) if one[3] > 0]
