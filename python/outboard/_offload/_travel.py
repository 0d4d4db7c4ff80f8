"""Which tensors of an optimizer's state can leave the device between steps, and what is kept of one that does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from outboard import _sharded
from outboard._native import StateShuttle


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor, waiting for nothing."""
    return _sharded.local(tensor)


#: Slots begin on cache lines, in an arena as in host memory.
ALIGNMENT = 64


def padded(nbytes: int) -> int:
    """Return the bytes that a tensor takes in an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements on this rank."""
    own = local(tensor)
    return own.numel() * own.element_size()


def rewrap(own: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """Return a tensor over `own` that is spread over ranks as `pattern` is; of a plain one, `own` itself."""
    return _sharded.like(own, pattern) if _sharded.is_sharded(pattern) else own


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one run of memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def why_it_stays(
    value: torch.Tensor, device: torch.device, *, min_numel: int, shared: frozenset[int] = frozenset()
) -> str | None:
    """Return why a tensor cannot leave the device, in words; None if it can.

    Parameters
    ----------
    value : Tensor
        A tensor of a parameter's state.
    device : torch.device
        The parameter's.
    min_numel : int
        Tensors with fewer elements on this rank stay.
    shared : frozenset of int
        Addresses of storages that several tensors of the state are in.
    """
    if type(value) not in (torch.Tensor, torch.nn.Parameter) and not _sharded.is_sharded(value):
        return f"a tensor subclass ({type(value).__name__})"
    if value.layout is not torch.strided:
        return f"not dense ({value.layout})"
    own = local(value)
    if type(own) is not torch.Tensor:
        return f"a tensor subclass within ({type(own).__name__})"
    if own.device != device:
        return f"on {own.device} by itself"
    if own.dim() == 0:
        return "0-d"
    if not own.is_floating_point():
        return f"of dtype {own.dtype}"
    if own.requires_grad:
        return "requires a gradient"
    if own.numel() == 0:
        return "empty"
    if own.numel() < min_numel:
        return f"fewer elements than min_numel={min_numel}"
    if own.untyped_storage().data_ptr() in shared or own.untyped_storage().nbytes() != nbytes(own):
        return "in a storage that others share"
    if not is_dense(own):
        return "of strides with gaps"
    return None


def shared_storages(values: list[torch.Tensor]) -> frozenset[int]:
    """Return the addresses of the storages that several of these tensors are in."""
    seen: set[int] = set()
    shared: set[int] = set()
    for value in values:
        if value.layout is not torch.strided:
            continue
        address = local(value).untyped_storage().data_ptr()
        (shared if address in seen else seen).add(address)
    return frozenset(shared)


@dataclass(eq=False)
class Item:
    """A tensor of a parameter's state that lives on the host between steps."""

    name: str
    key: str
    slot: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    #: What `optimizer.state` shows: over the slot's host memory, a DTensor where the parameter is one.
    host: torch.Tensor
    #: Of the host memory.
    address: int = 0
    #: In its batch's arena.
    offset: int = 0
    _view: torch.Tensor | None = None
    _arena: Any = field(default=None, repr=False)

    def view(self, arena: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the batch's arena (uint8) on the device; the same one each time."""
        if self._arena is not arena:
            self._view = self.over(arena[self.offset : self.offset + self.nbytes])
            self._arena = arena
        assert self._view is not None
        return self._view

    def over(self, run: torch.Tensor) -> torch.Tensor:
        """Return the tensor in a run of its bytes (uint8)."""
        elements = run.view(self.dtype)
        return rewrap(elements.as_strided(self.shape, self.stride, elements.storage_offset()), self.host)

    def forget(self) -> None:
        """Let go of the arena."""
        self._view = self._arena = None


def make_item(name: str, key: str, pattern: torch.Tensor, slot: int, shuttle: StateShuttle) -> Item:
    """Make the item of a reserved slot for a tensor like `pattern`; its values are the slot's."""
    own = local(pattern)
    item = Item(name, key, slot, nbytes(own), own.dtype, own.shape, own.stride(), pattern)
    run = from_dlpack(shuttle.tensor(slot))
    item.host, item.address = item.over(run), run.data_ptr()
    return item
