"""`optimizer.state` while state is on the host: torch's mapping, whose readers first wait for copies under way.

A copy of it (deepcopy, pickle) is torch's ordinary mapping, with each tensor on its parameter's device: the copy of an
optimizer is an ordinary optimizer.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, Protocol

import torch

from outboard._offload._travel import Item, local, rewrap


class Lodging(Protocol):
    """Where state lives."""

    def settle(self) -> None:
        """Wait until what is under way is home."""

    def items_of(self, parameter: Any) -> dict[str, Item]:
        """Return what a parameter has on the host."""


def on_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a device, of the same strides, spread over ranks in the same way."""
    own = local(value)
    made = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=device)
    made.copy_(own)
    return rewrap(made, value)


class HostState(defaultdict[Any, Any]):
    """The states of all parameters; what is on the host is tensors over the slots' memory."""

    def __init__(self, residence: Lodging) -> None:
        super().__init__(dict)
        # Deleting the optimizer frees everything at once: no cycle. Once the residence is gone, nothing is under way.
        self._residence = weakref.ref(residence)

    def _settle(self) -> None:
        residence = self._residence()
        if residence is not None:
            residence.settle()

    def _items_of(self, key: Any) -> dict[str, Item]:
        residence = self._residence()
        return {} if residence is None else residence.items_of(key)

    # ---- Without waiting, for the owner ----------------------------------------------------------------------------

    def raw(self, key: Any) -> dict[str, Any]:
        """Return a parameter's state as it is, an empty one if it has none."""
        if not dict.__contains__(self, key):
            dict.__setitem__(self, key, {})
        found: dict[str, Any] = dict.__getitem__(self, key)
        return found

    def peek(self, key: Any) -> dict[str, Any]:
        """Return a parameter's state as it is, to look at."""
        found: dict[str, Any] = dict.get(self, key, {})
        return found

    def set_raw(self, key: Any, state: Any) -> None:
        """Put an entry in."""
        dict.__setitem__(self, key, state)

    def has(self, key: object) -> bool:
        """Whether there is an entry."""
        return dict.__contains__(self, key)

    def plain(self) -> defaultdict[Any, Any]:
        """Return torch's own mapping, with copies of what is on the host on the parameters' devices."""
        self._settle()
        made: defaultdict[Any, Any] = defaultdict(dict)
        for key, state in dict.items(self):
            items = self._items_of(key)
            if isinstance(key, torch.Tensor) and isinstance(state, dict):
                device = local(key).device
                state = {
                    name: on_device(value, device) if name in items and value is items[name].host else value
                    for name, value in state.items()
                }
            made[key] = state
        return made

    # ---- Whoever reads, waits --------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        self._settle()
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a parameter's state."""
        self._settle()
        return super().get(key, default)

    def pop(self, *args: Any) -> Any:
        """Remove and return a parameter's state."""
        self._settle()
        return super().pop(*args)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return a parameter's state, which is `default` if it has none."""
        self._settle()
        return super().setdefault(key, default)

    def items(self) -> Any:
        """Return parameters and their states."""
        self._settle()
        return super().items()

    def values(self) -> Any:
        """Return the states."""
        self._settle()
        return super().values()

    def __iter__(self) -> Iterator[Any]:
        self._settle()
        return super().__iter__()

    def copy(self) -> Any:
        """Return torch's own mapping, with copies on the parameters' devices."""
        return self.plain()

    def __copy__(self) -> Any:
        return self.plain()

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Any, Any]:
        return deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)
