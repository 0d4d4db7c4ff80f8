"""`optimizer.state`: torch's mapping from parameters to their state tensors, over planes of the arena.

Reading gives zero-copy tensors. Writing copies into the planes, so that a tensor of any dtype and device may be
assigned, as ZeRO, Lightning and the like do. Both are dict subclasses because torch's tools test for dicts; what leaves
through `state_dict()` is plain. Neither holds its optimizer: dropping that frees the state at once, without a garbage
collection, unless its state is still in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, cast

import torch

from outboard import _checkpoint, _sharded
from outboard._slots import Slots

_MISSING: Any = object()

#: What is kept beside 16-bit weights, in either form.
_KEPT = ("residual", "master")


class ParameterState(dict[str, Any]):
    """The state of one parameter. Planes are written through; other keys are kept as they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A bare instance is what `type(state)(mapping)` makes in tools that rebuild containers: a plain dict until it
        # is assigned to `optimizer.state`.
        super().__init__(*args, **kwargs)
        self._slots: Slots | None = None
        self._parameter: torch.Tensor | None = None
        #: The planes' tensors as they were handed out, with the addresses of their elements.
        self._handed_out: dict[str, tuple[torch.Tensor, int]] = {}

    @classmethod
    def over(cls, slots: Slots, parameter: torch.Tensor) -> ParameterState:
        """Make the state of a bound parameter."""
        state = cls()
        state._slots, state._parameter = slots, parameter
        state.refresh()
        return state

    def refresh(self) -> None:
        """Take the planes' tensors anew: amsgrad has added one, or the parameter's strides have changed."""
        assert self._slots is not None
        assert self._parameter is not None
        planes = self._slots.planes(self._parameter)
        # The step is a count, and the same on all ranks.
        tensors = {
            key: plane if key == "step" else _sharded.like(plane, self._parameter) for key, plane in planes.items()
        }
        for name, tensor in tensors.items():
            if name not in self._handed_out and name in self:
                # Kept from a checkpoint until there was a plane for it.
                tensor.copy_(self[name])
            super().__setitem__(name, tensor)
        self._handed_out = {name: (tensor, planes[name].data_ptr()) for name, tensor in tensors.items()}

    def plan(self, values: Mapping[str, Any]) -> tuple[_checkpoint.Plan, dict[str, Any]]:
        """Check an assignment of several keys; return what it does to the planes, and the rest."""
        assert self._slots is not None
        assert self._parameter is not None
        new = {key: value for key, value in values.items() if self.get(key, _MISSING) is not value}
        # A master for a split parameter, or a residual for a full one, is converted.
        planes = {key: value for key, value in new.items() if key in self._handed_out or key in _KEPT}
        plan = _checkpoint.plan(self._slots, self._parameter, planes, partial=True)
        return plan, {key: value for key, value in new.items() if key not in planes}

    def keep(self, extra: Mapping[str, Any]) -> None:
        """Store keys that are no planes."""
        super().update(extra)

    def plan_foreign(self) -> _checkpoint.Plan | None:
        """Check what was put in planes' place past `__setitem__`, by `dict.__setitem__` or `tensor.data =`, if any was.

        Return what copying it into the planes does. What is refused is put out of the planes' place.
        """
        assert self._slots is not None
        assert self._parameter is not None
        foreign = {
            name: self[name]
            for name, (tensor, address) in self._handed_out.items()
            if self.get(name) is not tensor or _sharded.local(tensor).data_ptr() != address
        }
        try:
            return _checkpoint.plan(self._slots, self._parameter, foreign, partial=True) if foreign else None
        except BaseException:
            self.refresh()
            raise

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
        if self._slots is not None and self._parameter is not None:
            self._slots.reset(self._parameter)
        self.drop_extra()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Assign several keys; nothing is assigned if a plane's value is refused."""
        extra = dict(*args, **kwargs)
        if self._slots is not None:
            plan, extra = self.plan(extra)
            _checkpoint.commit(self._slots, [plan])
        self.keep(extra)

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

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self._slots = slots
        #: How many parameters were listed when each that wanted state got it; -1 when some may lack it.
        self._complete_for = -1
        #: Whether anybody can have put tensors into it past `__setitem__`.
        self.is_handed_out = False

    def complete(self) -> None:
        """Make the state, all zeros, of each parameter that wants it and has none."""
        listed = sum(1 for _ in self._slots.listed())
        if listed != self._complete_for:
            self._slots.bind_wanted(without_gradient=True)
            for parameter in self._slots.bound:
                if parameter not in self:
                    self._attach(parameter)
            self._complete_for = listed
        self.refresh()
        self._slots.settle()

    def refresh(self) -> None:
        """Take the tensors anew of those planes that are not where they were."""
        for parameter in self._slots.core.take_relaid():
            state = self.get(parameter)
            if isinstance(state, ParameterState):
                state.refresh()

    def invalidate(self) -> None:
        """Let the next reader look again for parameters without state."""
        self._complete_for = -1

    def load(self, plans: list[_checkpoint.Plan], reset: list[torch.Tensor]) -> None:
        """Load checked states and set those of `reset` to zero."""
        _checkpoint.commit(self._slots, plans, reset)
        for parameter in reset:
            self._of(parameter).drop_extra()
        for item in plans:
            state = self._of(item.parameter)
            state.drop_extra()
            state.keep(item.extra)
        self.invalidate()

    def _of(self, parameter: torch.Tensor) -> ParameterState:
        return cast("ParameterState", self[parameter])

    def _attach(self, parameter: torch.Tensor) -> ParameterState:
        state = ParameterState.over(self._slots, parameter)
        super().__setitem__(parameter, state)
        return state

    def __missing__(self, key: torch.Tensor) -> Any:
        # As torch's defaultdict(dict).
        if self._slots.is_listed(key):
            # Not one by one what has been bound together: each call looks at all parameters.
            if not self._slots.core.is_bound(key):
                self._slots.bind([key])
            return self._attach(key)
        value: dict[str, Any] = {}
        super().__setitem__(key, value)
        return value

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        self.update({key: value})

    def __delitem__(self, key: torch.Tensor) -> None:
        state = self.get(key)
        if isinstance(state, ParameterState):
            state.clear()
        super().__delitem__(key)
        self.invalidate()

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
        """Assign the state of several parameters; nothing is assigned if any of it is refused."""
        new = {key: value for key, value in dict(*args, **kwargs).items() if value is not self.get(key, _MISSING)}
        ours = {key: value for key, value in new.items() if self._slots.is_listed(key)}
        for value in ours.values():
            if not isinstance(value, Mapping):
                raise TypeError(f"the state of a parameter is a mapping, not {type(value).__name__}")
        self._slots.bind(ours)
        self.refresh()
        changes = [(self._of(key), *self._of(key).plan(value)) for key, value in ours.items() if value]
        _checkpoint.commit(
            self._slots, [plan for _, plan, _ in changes], [key for key, value in ours.items() if not value]
        )
        for state, _, extra in changes:
            state.keep(extra)
        for key, value in new.items():
            if key not in ours:
                super().__setitem__(key, value)

    def __ior__(self, other: Any) -> State:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, key: torch.Tensor, default: Any = None) -> Any:
        """Return a parameter's state, assigned `default` first if it has none."""
        if key not in self:
            self[key] = {} if default is None else default
        return self[key]

    def has_foreign(self) -> bool:
        """Whether a tensor has been put in a plane's place past `__setitem__`."""
        # Natively, and not before there can be any: ten thousand parameters have forty thousand tensors, 9 ms a step.
        return self.is_handed_out and self._slots.core.has_foreign(self, ParameterState)

    def adopt(self) -> None:
        """Copy into the planes what has been put in their place past `__setitem__`."""
        # All before the first is written: two parameters may have exchanged theirs.
        states = [state for state in self.values() if isinstance(state, ParameterState)]
        changes = [(state, plan) for state in states if (plan := state.plan_foreign()) is not None]
        for state, _ in changes:
            state.refresh()
        _checkpoint.commit(self._slots, [plan for _, plan in changes])

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
