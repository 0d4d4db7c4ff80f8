"""The hooks that an attached optimizer leaves on parameters and modules.

They hold what they call weakly, and copies of them (deepcopy, pickle) do nothing: a model never keeps or copies its
optimizer. Pickles of models name these classes, also as `outboard._attach` has them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from outboard._owner import Ending, Follower

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_compiled(function: _Function) -> _Function:
    """Make a compiled caller break its graph at a hook that waits, and say why where it may not (`fullgraph=True`)."""
    outside: Any = torch._disable_dynamo(function)  # type: ignore[attr-defined]
    outside._torchdynamo_disable = True
    outside._torchdynamo_disable_msg = (
        "outboard waits for weights here, which cannot be compiled: compile the model first, and attach() what "
        "torch.compile() has returned, or the model that was .compile()d"
    )
    return cast("_Function", outside)


class Uses:
    """A module's own parameters as they were when it was attached."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        #: Name, parameter and its id.
        self.parameters: list[tuple[str, torch.Tensor, int]] = []
        self.follow(parameters)
        #: Whether it has been called: if not, others read its weights, or nobody does.
        self.is_called = False

    def follow(self, parameters: dict[str, torch.Tensor]) -> None:
        """Know these parameters instead."""
        self.parameters = [(name, parameter, id(parameter)) for name, parameter in parameters.items()]


def nothing() -> None:
    """Stand for a weak reference in copies."""


class _Hook:
    """A hook that holds weakly what it calls. Copies are inert."""

    def __init__(self, target: Any = None) -> None:
        #: Returns what is called, while there is one.
        self._target: Callable[[], Any] = nothing if target is None else weakref.ref(target)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


class _GradientHook(_Hook):
    def __call__(self, parameter: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            # Compiled autograd traces hooks. `step()` takes the gradients of such a backward.
            return
        attachment: Follower | None = self._target()
        if attachment is not None:
            attachment.gradient_is_ready(parameter)


class _EndOfBackward(_Hook):
    """Queued in one backward, which alone keeps it: it goes with a backward that ends with an exception."""

    def __call__(self) -> None:
        backward: Ending | None = self._target()
        if backward is not None:
            backward.backward_has_ended()


class _ForwardHook(_Hook):
    """On one module, for its own parameters."""

    def __init__(self, attachment: Follower | None = None, uses: Uses | None = None) -> None:
        super().__init__(attachment)
        self._uses = None if uses is None else weakref.ref(uses)

    @outside_compiled
    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        attachment: Follower | None = self._target()
        if attachment is not None:
            uses = self._uses()  # type: ignore[misc]
            if uses is not None:
                attachment.forward_begins(module, uses)


class _ModelHook(_Hook):
    """On a whole model, for those of its modules that are not called themselves."""

    @outside_compiled
    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        attachment: Follower | None = self._target()
        if attachment is not None:
            attachment.model_begins()


class _CompiledHook(_Hook):
    """Outside a compiled region, for all parameters in it."""

    @outside_compiled
    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        attachment: Follower | None = self._target()
        if attachment is not None:
            attachment.compiled_begins(module)


class _WrapperHook(_Hook):
    """On a DDP wrapper."""

    @outside_compiled
    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        attachment: Follower | None = self._target()
        if attachment is not None:
            attachment.wrapper_begins(module)


class _EndOfForward(_Hook):
    """On a DDP wrapper whose gradients are views of buckets that the next backward writes to."""

    @outside_compiled
    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        attachment: Follower | None = self._target()
        if attachment is not None:
            attachment.buckets_are_written()


class _Unshard(_Hook):
    """In place of the method by which FSDP2 reads the shards of a group of parameters, wherever it is called from."""

    def __init__(self, attachment: Follower | None = None, group: Any = None) -> None:
        super().__init__(attachment)
        self._group: Callable[[], Any] = nothing if group is None else weakref.ref(group)
        #: That of another optimizer, whose parameters are in the same group.
        self._other: Any = None
        if group is not None:
            self._other = _living(group.__dict__.get("unshard"))
            group.unshard = self

    def __call__(self, async_op: bool = False) -> Any:
        group = self._group()
        attachment: Follower | None = self._target()
        if attachment is not None:
            attachment.shards_are_read(group, async_op)
        return type(group).unshard(group, async_op) if self._other is None else self._other(async_op)

    @property
    def group(self) -> Any:
        """The group, while there is one."""
        return self._group()

    def is_on(self, group: Any) -> bool:
        """Whether it is in place of this group's method."""
        return self._group() is group

    def remove(self) -> None:
        """Give the group its own method back."""
        group = self._group()
        self._target = nothing
        if group is not None:
            first = _living(group.__dict__.pop("unshard", None))
            if first is not None:
                group.unshard = first


def _living(hook: Any) -> Any:
    """Return the first hook of a chain whose optimizer is there, with those behind it that are not taken out."""
    while isinstance(hook, _Unshard) and hook._target() is None:
        hook = hook._other
    if isinstance(hook, _Unshard):
        hook._other = _living(hook._other)
    return hook


class _CompiledCall(_Hook):
    """In place of the call of a module that was `.compile()`d, whose hooks are compiled with it."""

    def __init__(self, attachment: Follower, module: torch.nn.Module) -> None:
        super().__init__(attachment)
        self._module = weakref.ref(module)
        self._call: Any = module._compiled_call_impl
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attachment: Follower | None = self._target()
        if attachment is not None:
            attachment.model_begins()
            attachment.compiled_begins(self._module())
        return self._call(*args, **kwargs)

    def is_on(self, module: torch.nn.Module) -> bool:
        """Whether it is in place of this module's call."""
        return self._module() is module

    def remove(self) -> None:
        """Give the module its own call back."""
        module = self._module()
        if module is not None and module._compiled_call_impl is self:
            module._compiled_call_impl = self._call
