"""`optimizer.state`: torch's mapping from parameters to their state tensors, over planes of the arena.

Reading gives zero-copy tensors. Writing copies into the planes, so that a tensor of any dtype and device may be assigned,
as ZeRO, Lightning and the like do. Both are dict subclasses because torch's tools test for dicts; what leaves through
`state_dict()` is plain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from outboard._host import HostOptimizer

#: Names of planes, in the order in which they are listed.
PLANES = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "residual", "master")

_MISSING: Any = object()


class ParameterState(dict[str, Any]):
    """The state of one parameter. Planes are written through; other keys are kept as they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A bare instance is what `type(state)(mapping)` makes in tools that rebuild containers: a plain dict until it
        # is assigned to `optimizer.state`.
        super().__init__(*args, **kwargs)
        self._owner: tuple[HostOptimizer, torch.Tensor] | None = None

    @classmethod
    def over(cls, optimizer: HostOptimizer, parameter: torch.Tensor) -> ParameterState:
        """Make the state of a bound parameter."""
        state = cls()
        state._owner = (optimizer, parameter)
        state.refresh()
        return state

    def refresh(self) -> None:
        """Take the planes' tensors anew: amsgrad has added one, or the parameter's strides have changed."""
        assert self._owner is not None
        optimizer, parameter = self._owner
        for name, plane in optimizer._core.planes(parameter):
            super().__setitem__(name, torch.from_dlpack(plane))

    def __setitem__(self, key: str, value: Any) -> None:
        if self._owner is None or key not in PLANES:
            super().__setitem__(key, value)
            return
        optimizer, parameter = self._owner
        if super().get(key) is value:
            return
        optimizer._load_parameter_state(parameter, {key: value}, partial=True)

    def __delitem__(self, key: str) -> None:
        if self._owner is not None and key in PLANES and key in self:
            raise TypeError(
                f"{key!r} cannot be deleted from a parameter's state; "
                "optimizer.reset(parameter) sets all of it to zero"
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
        if self._owner is not None:
            optimizer, parameter = self._owner
            optimizer._core.reset(parameter)
        for key in [key for key in self if self._owner is None or key not in PLANES]:
            super().__delitem__(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Assign several keys; nothing is assigned if a plane's value is refused."""
        new = dict(*args, **kwargs)
        if self._owner is not None:
            optimizer, parameter = self._owner
            planes = {key: value for key, value in new.items() if key in PLANES and super(ParameterState, self).get(key) is not value}
            if planes:
                optimizer._load_parameter_state(parameter, planes, partial=True)
        for key, value in new.items():
            if self._owner is None or key not in PLANES:
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
        return {key: self[key] for key in PLANES if key in self}

    def drop_extra(self) -> None:
        """Forget the user's own keys."""
        for key in [key for key in self if key not in PLANES]:
            super().__delitem__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (self.plain(),))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        from copy import deepcopy

        return deepcopy(self.plain(), memo)


class State(dict[torch.Tensor, Any]):
    """Maps each parameter with state to its `ParameterState`; other keys (torch allows any) are kept as they are."""

    def __init__(self, optimizer: HostOptimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    def _attach(self, parameter: torch.Tensor) -> ParameterState:
        state = ParameterState.over(self._optimizer, parameter)
        super().__setitem__(parameter, state)
        return state

    def __missing__(self, key: torch.Tensor) -> Any:
        # As torch's defaultdict(dict).
        if isinstance(key, torch.Tensor) and self._optimizer._is_listed(key):
            self._optimizer._bind([key])
            return self._attach(key)
        value: dict[str, Any] = {}
        super().__setitem__(key, value)
        return value

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        optimizer = self._optimizer
        if not (isinstance(key, torch.Tensor) and optimizer._is_listed(key)):
            super().__setitem__(key, value)
            return
        if value is super().get(key):
            return
        if not isinstance(value, Mapping):
            raise TypeError(f"the state of a parameter is a mapping, not {type(value).__name__}")
        optimizer._bind([key])
        state = cast("ParameterState", self[key])
        values = {name: item for name, item in value.items() if state.get(name) is not item}
        planes = {name: item for name, item in values.items() if name in PLANES}
        if planes:
            optimizer._load_parameter_state(key, planes, partial=True)
        elif not value:
            state.clear()
        for name, item in values.items():
            if name not in PLANES:
                state[name] = item

    def __delitem__(self, key: torch.Tensor) -> None:
        state = self[key] if key in self else None
        if isinstance(state, ParameterState) and state._owner is not None:
            state.clear()
        super().__delitem__(key)

    def pop(self, key: torch.Tensor, default: Any = _MISSING) -> Any:
        """Remove a parameter's state (it starts from zero again) and return a copy of it."""
        if key not in self:
            if default is _MISSING:
                raise KeyError(key)
            return default
        value = self[key]
        if isinstance(value, ParameterState):
            value = {
                name: item.clone() if isinstance(item, torch.Tensor) else item
                for name, item in value.items()
            }
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

    def refresh(self, parameters: list[torch.Tensor]) -> None:
        """Take the tensors of these parameters' planes anew."""
        for parameter in parameters:
            state = super().get(parameter)
            if isinstance(state, ParameterState):
                state.refresh()

    def plain(self) -> dict[Any, Any]:
        """Return plain dicts of the same values."""
        return {
            key: value.plain() if isinstance(value, ParameterState) else value
            for key, value in self.items()
        }

    def foreign(self) -> Iterator[tuple[Any, Any]]:
        """Yield what is not a parameter's state."""
        return ((key, value) for key, value in self.items() if not isinstance(value, ParameterState))

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (self.plain(),))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        from copy import deepcopy

        return deepcopy(self.plain(), memo)
