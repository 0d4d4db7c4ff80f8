"""The optimizer as its own `step` sees it: the same object, but groups come batch by batch, and state on demand.

Optimizers loop over `self.param_groups` and look up `self.state[parameter]`. A step pre-hook puts a stand-in in the
optimizer's place; its groups are handed out in parts, one batch of state after the other, and what was counted per
group is counted once. So one call of the optimizer's own `step` is one step, however many batches it takes; an
optimizer that loops twice is served twice.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import copy
from types import FrameType
from typing import Any, Protocol

import torch

Group = dict[str, Any]


class Walk(Protocol):
    """One step's way through the batches."""

    #: The thread that steps.
    thread: int

    def parts(self) -> Iterator[Group]:
        """Yield the groups in parts, each of one batch; bring and send state between them."""

    def touch(self, key: Any) -> Any:
        """Return the state of a parameter, its tensors on the device."""

    def put(self, key: Any, state: Any) -> None:
        """Replace the state of a parameter."""

    def knows(self, key: object) -> bool:
        """Whether a parameter has state."""

    def keys(self) -> list[Any]:
        """Return the parameters that have state."""


class _Groups(list[Group]):
    """The optimizer's groups, whose iteration is the walk."""

    def __init__(self, groups: list[Group], walk: Walk) -> None:
        super().__init__(groups)
        self.walk = walk

    def __iter__(self) -> Iterator[Group]:
        return self.walk.parts()


class _State(defaultdict[Any, Any]):
    """What `self.state` is in a step: asks the walk for everything, and keeps nothing."""

    def __init__(self, walk: Walk) -> None:
        super().__init__(dict)
        self._walk = walk

    def __missing__(self, key: Any) -> Any:
        return self._walk.touch(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._walk.put(key, value)

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def __contains__(self, key: object) -> bool:
        return self._walk.knows(key)

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        found = dict(self[key])
        self[key].clear()
        return found

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._walk.keys())

    def __len__(self) -> int:
        return len(self._walk.keys())

    def keys(self) -> Any:
        return self._walk.keys()

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]


class _StandIn:
    """What a stand-in has of its own. Its other attributes are the optimizer's: both have one `__dict__`."""

    __slots__ = ()

    @property
    def param_groups(self) -> Any:
        return _walks[id(self)][0]

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        raise RuntimeError("an optimizer whose state is offloaded cannot replace its param_groups within step()")

    @property
    def state(self) -> Any:
        return _walks[id(self)][1]

    @state.setter
    def state(self, value: Any) -> None:
        raise RuntimeError("an optimizer whose state is offloaded cannot replace its state within step()")


#: The groups and the state of each stand-in, by its id: attributes of its own it has none.
_walks: dict[int, tuple[_Groups, _State]] = {}
_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def _class_of(kind: type) -> type:
    made = _classes.get(kind)
    if made is None:
        made = type(kind.__name__, (_StandIn, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
        _classes[kind] = made
    return made


def stand_in_for(optimizer: torch.optim.Optimizer, walk: Walk) -> Any:
    """Make the stand-in of an optimizer for one step."""
    made: Any = object.__new__(_class_of(type(optimizer)))
    _walks[id(made)] = (_Groups(optimizer.param_groups, walk), _State(walk))
    weakref.finalize(made, _walks.pop, id(made), None)
    # Whatever the optimizer notes down in its step, it notes down for good.
    made.__dict__ = optimizer.__dict__
    return made


def is_stand_in(value: object) -> bool:
    """Whether an object takes an optimizer's place in a step."""
    return isinstance(value, _StandIn)


def is_walking(walk: Walk) -> bool:
    """Whether the step of this walk goes on: among the callers of this function, or in the thread that steps."""
    is_here = walk.thread == threading.get_ident()
    frame: FrameType | None = sys._getframe(1) if is_here else sys._current_frames().get(walk.thread)
    while frame is not None:
        # The step itself, or torch's wrapper around it, which runs the other hooks.
        arguments = frame.f_locals.get("args")
        callers = (frame.f_locals.get("self"), *(arguments[:1] if type(arguments) is tuple else ()))
        if any(isinstance(one, _StandIn) and id(one) in _walks and _walks[id(one)][0].walk is walk for one in callers):
            return True
        frame = frame.f_back
    return False


class GroupValues:
    """Group-level values over a step in parts: each part begins with those from before, the last one's stay.

    What the parts leave must be the same: else the optimizer adds something up over a group's parameters, which a part
    does not see.
    """

    def __init__(self, group: Group, describe: Callable[[], str]) -> None:
        self._group = group
        self._describe = describe
        self._before = {key: _Value(value) for key, value in group.items() if key != "params"}
        self._after: Group | None = None

    def part(self, params: list[torch.Tensor]) -> Group:
        """Return the group with some of its parameters and its values from before."""
        return {"params": params} | {key: value.restored() for key, value in self._before.items()}

    def take(self, part: Group) -> None:
        """Take over what the optimizer has left in a part."""
        left = {key: value for key, value in part.items() if key != "params"}
        seen = {key: _Value(value).then for key, value in left.items()}
        if self._after is not None:
            differing = [key for key in seen.keys() | self._after.keys() if not _same(seen, self._after, key)]
            if differing:
                raise RuntimeError(
                    f"{self._describe()} computes {', '.join(map(repr, sorted(differing)))} of a group from all of the "
                    "group's parameters, and state comes in batches: call offload_state(..., batches=1)"
                )
        self._after = seen
        for key in [key for key in self._group if key != "params" and key not in left]:
            del self._group[key]
        self._group.update(left)


class _Value:
    """A value of a group, and what it was when this was made."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.then = value
        if isinstance(value, torch.Tensor):
            self.then, self._version = value.detach().clone(), value._version
        elif isinstance(value, (list, dict, set)):
            self.then = copy(value)

    def restored(self) -> Any:
        """Return the value as it was."""
        if isinstance(self._value, torch.Tensor):
            if self._value._version != self._version:
                with torch.no_grad():
                    self._value.copy_(self.then)
                self._version = self._value._version
            return self._value
        return copy(self.then) if isinstance(self.then, (list, dict, set)) else self.then


def _same(left: Group, right: Group, key: str) -> bool:
    if key not in left or key not in right:
        return False
    one, other = left[key], right[key]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # On a device it would be waited for.
        return not (one.device.type == other.device.type == "cpu") or torch.equal(one, other)
    if one is other:
        return True
    try:
        return bool(one == other) or (one != one and other != other)
    except Exception:
        return True
