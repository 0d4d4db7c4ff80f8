"""What `attach` makes: hooks on a model; behind them gradients (`_backward`) and readers of weights (`_readers`)."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from outboard import _wrappers
from outboard._backward import Abandoned, Backward, backward_here
from outboard._hooks import (
    Uses,
    _CompiledCall,
    _CompiledHook,
    _EndOfBackward,
    _EndOfForward,
    _ForwardHook,
    _GradientHook,
    _ModelHook,
    _Unshard,
    _WrapperHook,
)
from outboard._owner import Owner
from outboard._readers import Readers
from outboard._roster import Roster


class Attachment:
    """The hooks of one optimizer on its models."""

    def __init__(self, optimizer: Owner) -> None:
        reference = weakref.ref(optimizer)
        self._has_a_share = optimizer._has_a_share
        #: The DDP wrappers within compiled modules.
        self._compiled_wrappers: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()
        #: The ids of parameters that FSDP2 gathers.
        self._gathered: set[int] = set()

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
        self._wrapped: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def add(self, model: torch.nn.Module) -> None:
        """Put hooks on a model's modules and on the parameters that the optimizer has of it."""
        # Before any gradient is hooked: in such a model it may be final later.
        # ZeroRedundancyOptimizer sends the weights to other ranks as soon as its optimizer's `step()` has returned.
        if _wrappers.is_opaque(model) or self._has_a_share:
            self.roster.overlaps = False
            self.roster.remove()
        self.roster.refresh()
        self.roster.has_changed = False
        if not self.roster.overlaps:
            return
        # What FSDP2 gathers is not in the modules while they are called.
        self._follow_gathers(model)
        ours = {key: group for key, group in self.roster.groups.items() if key not in self._gathered}
        compiled = self._follow_compiled(model)
        for wrapper in _wrappers.ddp_modules(model):
            self._follow_wrapper(wrapper, is_compiled=wrapper in compiled)
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

    def _follow_compiled(self, model: torch.nn.Module) -> set[torch.nn.Module]:
        """Put hooks around compiled regions; return the modules within, which get none."""
        compiled: set[torch.nn.Module] = set()
        for module in model.modules():
            if getattr(module, "_compiled_call_impl", None) is not None:
                if not any(isinstance(call, _CompiledCall) and call.is_on(module) for call in self._handles):
                    self._handles.append(_CompiledCall(self, module))
                compiled.update(module.modules())
                self._compiled_wrappers[module] = list(map(weakref.ref, _wrappers.ddp_modules(module)))
            elif type(module).__name__ == "OptimizedModule":
                if module not in self._models:
                    self._handles.append(module.register_forward_pre_hook(_CompiledHook(self), prepend=True))
                self._models.add(module)
                self._compiled_wrappers[module] = list(map(weakref.ref, _wrappers.ddp_modules(module)))
                compiled.update(inner for inner in module.modules() if inner is not module)
        return compiled

    def _follow_wrapper(self, wrapper: Any, *, is_compiled: bool) -> None:
        """Follow a DDP wrapper: from now on gradients are final after backward."""
        self.roster.finishes_late = True
        self.backward.averaging.add(wrapper)
        if is_compiled or wrapper in self._wrapped:
            return
        self._wrapped.add(wrapper)
        # First of all it sees the model's forward, also when it is not itself what is called.
        self._handles.append(wrapper.register_forward_pre_hook(_WrapperHook(self), prepend=True))
        if _wrappers.keeps_gradients_in_buckets(wrapper):
            self._handles.append(wrapper.register_forward_hook(_EndOfForward(self)))

    def _follow_gathers(self, model: torch.nn.Module) -> None:
        """Stand before FSDP2's reads of shards, and know the parameters that it gathers."""
        for group in _wrappers.fsdp_groups(model):
            if not any(isinstance(handle, _Unshard) and handle.is_on(group) for handle in self._handles):
                self._handles.append(_Unshard(self, group))
        groups = [handle.group for handle in self._handles if isinstance(handle, _Unshard)]
        self._gathered = {id(p) for group in groups if group is not None for p in _wrappers.shards_of(group)}

    def remove(self) -> None:
        """Take all hooks off; what is under way has been completed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._models.clear()
        self._wrapped.clear()
        self.roster.remove()
        self.readers.settled()

    def forward_begins(self, module: torch.nn.Module, uses: Uses) -> None:
        """Let a module's forward wait for its own weights."""
        if backward_here() != -1:
            self.backward.notice()
        self._notice_wrapper()
        self.readers.forward_begins(module, uses)

    def compiled_begins(self, module: Any) -> None:
        """Wait for all that a compiled region may use; FSDP2's gathers wait by themselves, there too."""
        is_within = backward_here() != -1
        if is_within:
            self.backward.notice()
        self.readers.resolve_all(but=self._gathered)
        # Those within it, which nobody else sees; what is computed anew in a backward decides nothing.
        wrappers = [] if is_within else self._compiled_wrappers.get(module, [])
        if self.backward.averaging.note_all(wrappers):
            self.backward.wait_for_offloads()

    def model_begins(self) -> None:
        """Look at those modules of a model that are not called, and at who calls it."""
        self._notice_wrapper()
        self.readers.model_begins()

    def _notice_wrapper(self) -> None:
        """Follow a DDP wrapper that this forward is a part of: it came after `attach`, or a part was attached."""
        wrapper = _wrappers.active_ddp()
        if wrapper is not None and wrapper not in self._wrapped and self.roster.overlaps:
            self._follow_wrapper(wrapper, is_compiled=False)
            self.wrapper_begins(wrapper)

    def wrapper_begins(self, wrapper: torch.nn.Module) -> None:
        """Note whether a DDP wrapper is going to average gradients."""
        self.backward.averaging.note(wrapper)

    def buckets_are_written(self) -> None:
        """Let the backward that follows wait for what still reads its buckets: updates, and gradients on their way."""
        self.readers.resolve_all()
        self.backward.wait_for_offloads()

    def shards_are_read(self, group: Any, async_op: bool) -> None:
        """Let the stream on which FSDP2 reads shards wait for them."""
        if backward_here() != -1:
            self.backward.notice()
        shards = _wrappers.shards_of(group)
        with _wrappers.reading_stream(group, async_op):
            self.readers.resolve(shards)


# Pickles of models that were made with an earlier version name the hooks here.
__all__ = [
    "Abandoned",
    "Attachment",
    "_CompiledCall",
    "_CompiledHook",
    "_EndOfBackward",
    "_EndOfForward",
    "_ForwardHook",
    "_GradientHook",
    "_ModelHook",
    "_Unshard",
    "_WrapperHook",
]
