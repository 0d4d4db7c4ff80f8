"""What `attach` makes: hooks on a model; behind them gradients (`_backward`) and readers of weights (`_readers`)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from outboard import _pending
from outboard._backward import Abandoned, Backward, backward_here
from outboard._hooks import (
    Uses,
    _CompiledCall,
    _CompiledHook,
    _EndOfBackward,
    _ForwardHook,
    _GradientHook,
    _ModelHook,
)
from outboard._readers import Readers
from outboard._roster import Roster

if TYPE_CHECKING:
    from outboard._stepping import SteppingOptimizer


class Attachment:
    """The hooks of one optimizer on its models."""

    def __init__(self, optimizer: SteppingOptimizer) -> None:
        reference = weakref.ref(optimizer)

        def groups() -> list[dict[str, Any]]:
            optimizer = reference()
            return [] if optimizer is None else optimizer.param_groups

        self.roster = Roster(groups, _GradientHook(self))
        self.readers = Readers(reference, self.roster)
        self.backward = Backward(reference, self.roster, self.readers)
        #: What a gradient hook calls.
        self.gradient_is_ready = self.backward.gradient_is_ready
        self._handles: list[Any] = []
        #: The models that have been attached, and compiled modules in them: each is hooked once.
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def add(self, model: torch.nn.Module) -> None:
        """Put hooks on a model's modules and on the parameters that the optimizer has of it."""
        # Before any gradient is hooked: in such a model it may be final later.
        if _is_wrapped(model):
            self.roster.overlaps = False
            self.roster.remove()
        self.roster.refresh()
        self.roster.has_changed = False
        if not self.roster.overlaps:
            return
        ours = self.roster.groups
        compiled: set[torch.nn.Module] = set()
        for module in model.modules():
            if getattr(module, "_compiled_call_impl", None) is not None:
                if not any(isinstance(call, _CompiledCall) and call.is_on(module) for call in self._handles):
                    self._handles.append(_CompiledCall(self, module))
                compiled.update(module.modules())
            elif type(module).__name__ == "OptimizedModule":
                if module not in self._models:
                    self._handles.append(module.register_forward_pre_hook(_CompiledHook(self), prepend=True))
                self._models.add(module)
                compiled.update(inner for inner in module.modules() if inner is not module)
        for module in model.modules():
            own: dict[str, torch.Tensor] = {
                name: p for name, p in module._parameters.items() if p is not None and id(p) in ours
            }
            if not own:
                continue
            uses, is_new = self.readers.add(module, own)
            if is_new and module not in compiled:
                self._handles.append(module.register_forward_pre_hook(_ForwardHook(self, uses), prepend=True))
        if model not in compiled and model not in self._models:
            self._handles.append(model.register_forward_pre_hook(_ModelHook(self), prepend=True))
        self._models.add(model)

    def remove(self) -> None:
        """Take all hooks off; what is under way has been completed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._models.clear()
        self.roster.remove()
        self.readers.settled()

    def forward_begins(self, module: torch.nn.Module, uses: Uses) -> None:
        """Let a module's forward wait for its own weights."""
        if backward_here() != -1:
            self.backward.notice()
        self.readers.forward_begins(module, uses)

    def compiled_begins(self) -> None:
        """Wait for all that a compiled region may use."""
        if backward_here() != -1:
            self.backward.notice()
        self.readers.resolve_all()

    def model_begins(self) -> None:
        """Look at those modules of a model that are not called."""
        self.readers.model_begins()


def _is_wrapped(model: torch.nn.Module) -> bool:
    """Whether gradients are final, or weights are read, at other times than autograd and modules tell."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    def is_sharded(module: torch.nn.Module) -> bool:
        return any(base.__name__ in ("FSDPModule", "FullyShardedDataParallel") for base in type(module).__mro__)

    # DataParallel's replicas are copied from the weights by native code.
    wrappers = (DataParallel, DistributedDataParallel)
    if any(isinstance(module, wrappers) or is_sharded(module) for module in model.modules()):
        return True
    return any(not _pending.can_mark(parameter) for parameter in model.parameters())


# Pickles of models that were made with an earlier version name the hooks here.
__all__ = [
    "Abandoned",
    "Attachment",
    "_CompiledCall",
    "_CompiledHook",
    "_EndOfBackward",
    "_ForwardHook",
    "_GradientHook",
    "_ModelHook",
]
