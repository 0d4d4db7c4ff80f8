"""`optimizer.state`: torch's mapping from parameters to their state tensors, over planes of the arena.

Reading gives zero-copy tensors. Writing copies into the planes, so that a tensor of any dtype and device may be
assigned, as ZeRO, Lightning and the like do. Both are dict subclasses because torch's tools test for dicts; what leaves
through `state_dict()` is plain. Neither holds its optimizer: dropping that frees the state at once, without a garbage
collection.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.dlpack import from_dlpack

if TYPE_CHECKING:
    from outboard._host import HostOptimizer

_MISSING: Any = object()

#: What is kept beside 16-bit weights, in either form.
_KEPT = ("residual", "master")


class ParameterState(dict[str, Any]):
    """The state of one parameter. Planes are written through; other keys are kept as they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A bare instance is what `type(state)(mapping)` makes in tools that rebuild containers: a plain dict until it
        # is assigned to `optimizer.state`.
        super().__init__(*args, **kwargs)
        self._optimizer: weakref.ref[HostOptimizer] | None = None
        self._parameter: torch.Tensor | None = None
        #: The planes' tensors as they were handed out, with the addresses of their elements.
        self._handed_out: dict[str, tuple[torch.Tensor, int]] = {}

    @classmethod
    def over(cls, optimizer: HostOptimizer, parameter: torch.Tensor) -> ParameterState:
        """Make the state of a bound parameter."""
        state = cls()
        state._optimizer, state._parameter = weakref.ref(optimizer), parameter
        state.refresh()
        return state

    def _owner(self) -> tuple[HostOptimizer, torch.Tensor] | None:
        """Return the optimizer and the parameter, if the former still lives."""
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is None or self._parameter is None:
            return None
        return optimizer, self._parameter

    def refresh(self) -> None:
        """Take the planes' tensors anew: amsgrad has added one, or the parameter's strides have changed."""
        owner = self._owner()
        assert owner is not None
        optimizer, parameter = owner
        tensors = {name: from_dlpack(plane) for name, plane in optimizer._core.planes(parameter)}
        for name, tensor in tensors.items():
            if name not in self._handed_out and name in self:
                # Kept from a checkpoint until there was a plane for it.
                tensor.copy_(self[name])
            super().__setitem__(name, tensor)
        self._handed_out = {name: (tensor, tensor.data_ptr()) for name, tensor in tensors.items()}

    def adopt(self) -> None:
        """Copy into the planes what was put in their place past `__setitem__`: `dict.__setitem__`, `tensor.data =`."""
        foreign = {
            name: self[name]
            for name, (tensor, address) in self._handed_out.items()
            if self.get(name) is not tensor or tensor.data_ptr() != address
        }
        owner = self._owner()
        if foreign and owner is not None:
            self.refresh()
            owner[0]._load_parameter_state(owner[1], foreign)

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def __delitem__(self, key: str) -> None:
        if key in self._handed_out:
            raise TypeError(
                f"{key!r} cannot be deleted from a parameter's state; optimizer.reset(parameter) sets all of it to zero"
            )
        super().__delitem__(key)

    def pop(self, key: str, default: Any = _MISSING) -> Any:
        """Remove and return a key of the user's own."""
        if key not in self:
            if default is _MISSING:
                raise KeyError(key)
            return default
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        """Refuse: which item goes would be arbitrary."""
        raise TypeError("popitem() is not supported on a parameter's state")

    def clear(self) -> None:
        """Reset the planes to zero and drop the user's own keys."""
        owner = self._owner()
        if owner is not None:
            optimizer, parameter = owner
            optimizer.reset(parameter)
        self.drop_extra()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Assign several keys; nothing is assigned if a plane's value is refused."""
        new = {k: v for k, v in dict(*args, **kwargs).items() if self.get(k, _MISSING) is not v}
        owner = self._owner()
        if owner is None and any(key in self._handed_out for key in new):
            raise TypeError("the optimizer of this state is gone")
        # A master for a split parameter, or a residual for a full one, is converted.
        planes = {key: value for key, value in new.items() if key in self._handed_out or (owner and key in _KEPT)}
        if planes and owner is not None:
            optimizer, parameter = owner
            optimizer._load_parameter_state(parameter, planes)
        for key, value in new.items():
            if key not in planes:
                super().__setitem__(key, value)

    def __ior__(self, other: Any) -> ParameterState:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, assigned `default` first if it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def plain(self) -> dict[str, Any]:
        """Return a plain dict of the same values."""
        return dict(self)

    def planes(self) -> dict[str, torch.Tensor]:
        """Return the planes' tensors alone."""
        return {key: tensor for key, (tensor, _) in self._handed_out.items()}

    def drop_extra(self) -> None:
        """Forget the user's own keys."""
        for key in [key for key in self if key not in self._handed_out]:
            super().__delitem__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (self.plain(),))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return deepcopy(self.plain(), memo)


class State(dict[torch.Tensor, Any]):
    """Maps each parameter with state to its `ParameterState`; other keys (torch allows any) are kept as they are."""

    def __init__(self, optimizer: HostOptimizer) -> None:
        super().__init__()
        self._optimizer = weakref.ref(optimizer)

    def _owner_of(self, key: object) -> HostOptimizer | None:
        """Return the optimizer, if it still lives and the key is a parameter of its."""
        optimizer = self._optimizer()
        if optimizer is None or not isinstance(key, torch.Tensor) or not optimizer._is_listed(key):
            return None
        return optimizer

    def attach(self, parameter: torch.Tensor) -> ParameterState:
        """Make the entry of a bound parameter."""
        optimizer = self._optimizer()
        assert optimizer is not None
        state = ParameterState.over(optimizer, parameter)
        super().__setitem__(parameter, state)
        return state

    def __missing__(self, key: torch.Tensor) -> Any:
        # As torch's defaultdict(dict).
        optimizer = self._owner_of(key)
        if optimizer is not None:
            optimizer._bind([key])
            return self.attach(key)
        value: dict[str, Any] = {}
        super().__setitem__(key, value)
        return value

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        optimizer = self._owner_of(key)
        if optimizer is None:
            super().__setitem__(key, value)
            return
        if value is self.get(key, _MISSING):
            return
        if not isinstance(value, Mapping):
            raise TypeError(f"the state of a parameter is a mapping, not {type(value).__name__}")
        state = cast("ParameterState", self[key])
        if value:
            state.update(value)
        else:
            state.clear()

    def __delitem__(self, key: torch.Tensor) -> None:
        state = self.get(key)
        if isinstance(state, ParameterState):
            state.clear()
        super().__delitem__(key)
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._state_is_stale = True

    def pop(self, key: torch.Tensor, default: Any = _MISSING) -> Any:
        """Remove a parameter's state (it starts from zero again) and return a copy of it."""
        if key not in self:
            if default is _MISSING:
                raise KeyError(key)
            return default
        value = self[key]
        if isinstance(value, ParameterState):
            value = {name: item.clone() if isinstance(item, torch.Tensor) else item for name, item in value.items()}
        del self[key]
        return value

    def popitem(self) -> tuple[torch.Tensor, Any]:
        """Remove and return the last item."""
        if not self:
            raise KeyError("popitem(): the state is empty")
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        """Set all state back to zero."""
        for key in list(self):
            del self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Assign the state of several parameters."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> State:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, key: torch.Tensor, default: Any = None) -> Any:
        """Return a parameter's state, assigned `default` first if it has none."""
        if key not in self:
            self[key] = {} if default is None else default
        return self[key]

    def adopt(self) -> None:
        """Copy into the planes what has been put in their place past `__setitem__`."""
        for state in list(self.values()):
            if isinstance(state, ParameterState):
                state.adopt()

    def refresh(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take the tensors of these parameters' planes anew."""
        for parameter in parameters:
            state = self.get(parameter)
            if isinstance(state, ParameterState):
                state.refresh()

    def plain(self) -> dict[Any, Any]:
        """Return plain dicts of the same values."""
        return {key: value.plain() if isinstance(value, ParameterState) else value for key, value in self.items()}

    def foreign(self) -> Iterator[tuple[Any, Any]]:
        """Yield what is not a parameter's state."""
        return ((key, value) for key, value in self.items() if not isinstance(value, ParameterState))

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (self.plain(),))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return deepcopy(self.plain(), memo)
