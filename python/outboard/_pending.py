"""Parameters whose update is under way: whoever reads or writes one first waits for it.

While its update is pending a parameter's class is `PendingParameter`, whose `__torch_function__` waits, gives the
parameter its own class back and goes on. A module's forward hook does so beforehand for the module's own parameters,
which is cheaper; this catches everyone else: a weight that another module uses, a loss on weights, an average of
weights, `state_dict`, `deepcopy`, in-place writes, `p.data = ...`. A DTensor has a class of its own for this, which
also waits when somebody asks for the shard within.

It cannot see tensor subclasses of others, views taken earlier (the flat shards of FSDP2 are such, see `_wrappers`), and
readers in C++.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, Protocol

import torch

from outboard import _sharded


class Waiter(Protocol):
    """Whoever can wait for parameters."""

    def resolve(self, parameters: list[torch.Tensor]) -> None:
        """Order the current stream after the updates of these parameters and settle them."""


#: Who waits for a pending parameter, by its id. A parameter here is kept alive by its optimizer.
_waiters: dict[int, weakref.ref[Any]] = {}

#: What neither reads nor writes a weight's values.
HARMLESS: frozenset[Any] = frozenset(
    getter
    for name in (
        "grad",
        "requires_grad",
        "shape",
        "dtype",
        "device",
        "layout",
        "is_leaf",
        "grad_fn",
        "_version",
        "ndim",
        "is_cuda",
    )
    for attribute in [getattr(torch.Tensor, name)]
    for getter in (attribute.__get__, attribute.__set__, attribute.__delete__)
) | frozenset(
    (
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.stride,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.is_contiguous,
        torch.Tensor.element_size,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.register_hook,
    )
)


class _Pending:
    """What waits for an update before its tensor is used."""

    # Without slots of its own a class can be exchanged for its base, in place.
    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Wait for the pending parameters among the arguments, then call `func`."""
        kwargs = kwargs or {}
        if func not in HARMLESS:
            found: list[torch.Tensor] = []
            _find(args, found)
            _find(kwargs.values(), found)
            settle(found)
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Copy the parameter once it is updated."""
        settle([self])
        return deepcopy(self, memo)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle the parameter once it is updated."""
        settle([self])
        return self.__reduce_ex__(protocol)


class PendingParameter(_Pending, torch.nn.Parameter):
    """A parameter whose update is under way."""


class PendingTensor(_Pending, torch.Tensor):
    """State in host memory that is on its way home."""


#: What a parameter of each class becomes while its update is under way, and back.
_PENDING_OF: dict[type, Any] = {torch.nn.Parameter: PendingParameter}
_PLAIN_OF: dict[type, Any] = {PendingParameter: torch.nn.Parameter, PendingTensor: torch.Tensor}


def pending_sharded() -> Any:
    """Return the class of DTensors whose update is under way."""
    dtensor = _sharded.kind()
    if dtensor not in _PENDING_OF:
        descriptor = _sharded.local_descriptor()

        def get_local(self: torch.Tensor) -> torch.Tensor:
            # Whoever uses a DTensor comes here, torch's dispatcher in C++ too.
            settle([self])
            found: torch.Tensor = descriptor.__get__(self)
            return found

        def set_local(self: torch.Tensor, value: torch.Tensor) -> None:
            settle([self])
            descriptor.__set__(self, value)

        members = {"__slots__": (), "_local_tensor": property(get_local, set_local), "__module__": __name__}
        made = type("PendingDTensor", (_Pending, dtensor), members)
        _PENDING_OF[dtensor], _PLAIN_OF[made] = made, dtensor
    return _PENDING_OF[dtensor]


def is_pending(value: object) -> bool:
    """Whether a value is a parameter whose update is under way."""
    return type(value) in _PLAIN_OF


def _find(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        if type(value) in _PLAIN_OF:
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _find(value, found)
        elif isinstance(value, dict):
            _find(value.values(), found)


def can_mark(parameter: torch.Tensor) -> bool:
    """Whether a parameter's class can be exchanged: not a tensor subclass of somebody else's."""
    known = type(parameter)
    if known not in _PENDING_OF and known is _sharded.kind():
        pending_sharded()
    return known in _PENDING_OF or known in _PLAIN_OF


def mark(parameter: torch.Tensor, key: int, waiter: weakref.ref[Any]) -> None:
    """Let whoever touches this parameter, of this id, wait first."""
    _waiters[key] = waiter
    parameter.__class__ = _PENDING_OF.get(type(parameter), type(parameter))


def mark_state(tensor: torch.Tensor, waiter: weakref.ref[Any]) -> None:
    """Let whoever touches this tensor of an optimizer's state, a plain one or a DTensor, wait first."""
    _waiters[id(tensor)] = waiter
    if type(tensor) is torch.Tensor:
        tensor.__class__ = PendingTensor
    elif type(tensor) is _sharded.kind():
        tensor.__class__ = pending_sharded()


def announce(keys: Iterable[int], waiter: weakref.ref[Any]) -> None:
    """Say who waits for parameters of these ids that the native half is about to mark."""
    _waiters.update(dict.fromkeys(keys, waiter))


def unmark(parameters: Iterable[torch.Tensor], waiter: weakref.ref[Any]) -> None:
    """Give parameters that this one waits for their own class back; not those that another has announced since."""
    for parameter in parameters:
        if _waiters.get(id(parameter)) is waiter:
            del _waiters[id(parameter)]
            _restore(parameter)


def _restore(parameter: torch.Tensor) -> None:
    plain = _PLAIN_OF.get(type(parameter))
    if plain is not None:
        parameter.__class__ = plain


def settle_others(parameters: Iterable[torch.Tensor], waiter: weakref.ref[Any] | None) -> None:
    """Wait for what other optimizers are doing to these parameters."""
    others: list[torch.Tensor] = [
        parameter
        for parameter in parameters
        if type(parameter) in _PLAIN_OF and _waiters.get(id(parameter)) is not waiter
    ]
    if others:
        settle(others)


def settle(parameters: list[torch.Tensor]) -> None:
    """Wait for pending parameters; each has its own class afterwards, or is pending anew."""
    waiting: dict[int, tuple[Waiter, list[torch.Tensor]]] = {}
    orphans = []
    for parameter in parameters:
        reference = _waiters.get(id(parameter))
        waiter = None if reference is None else reference()
        if waiter is None:
            orphans.append(parameter)
        else:
            waiting.setdefault(id(waiter), (waiter, []))[1].append(parameter)
    for waiter, theirs in waiting.values():
        # It takes the marks off in its optimizer's turn: to do so here could take one off that has come since.
        waiter.resolve(theirs)
    # Those whose optimizer is gone: it completed their updates before it went.
    for parameter in orphans:
        _waiters.pop(id(parameter), None)
        _restore(parameter)
