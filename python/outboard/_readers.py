"""Who reads weights whose updates are under way: modules by their hooks, everybody else by the parameter's class.

The order in which the first forward uses weights is that of the queue: it is recorded here.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from outboard import _pending
from outboard._hooks import Uses
from outboard._owner import Owner
from outboard._roster import Roster


class Readers:
    """The parameters of one optimizer that are waited for, and those who wait."""

    def __init__(self, optimizer: Callable[[], Owner | None], roster: Roster) -> None:
        self._optimizer = optimizer
        self._roster = roster
        #: Who waits, for `_pending`.
        self.waiter: weakref.ref[Any] = weakref.ref(self)
        self._pending: dict[int, torch.Tensor] = {}
        #: Modules with parameters of the optimizer that have not been called.
        self._uncalled: list[tuple[weakref.ref[torch.nn.Module], Uses]] = []
        self._uses: weakref.WeakKeyDictionary[torch.nn.Module, Uses] = weakref.WeakKeyDictionary()
        self._order: dict[int, int] | None = {}
        self.forward_seconds = 0.0

    @property
    def _opt(self) -> Owner:
        optimizer = self._optimizer()
        assert optimizer is not None, "an attachment lives in its optimizer"
        return optimizer

    def add(self, module: torch.nn.Module, parameters: dict[str, torch.Tensor]) -> tuple[Uses, bool]:
        """Know a module's own parameters; say whether the module is new."""
        known = self._uses.get(module)
        if known is not None:
            known.follow(parameters)
            return known, False
        uses = self._uses[module] = Uses(parameters)
        self._uncalled.append((weakref.ref(module), uses))
        return uses, True

    def expect(self, parameter: torch.Tensor, key: int) -> None:
        """Let readers of a parameter, of this id, wait for its update."""
        self._pending[key] = parameter
        _pending.mark(parameter, key, self.waiter)

    def expect_all(self) -> None:
        """Let readers of all parameters that the native half marks wait for their updates."""
        # All that it may mark: which it will, it finds out itself, and to wait for another is no wait.
        self._pending.update(self._roster.markable)
        _pending.announce(self._roster.markable, self.waiter)

    def wait_for_unseen(self) -> None:
        """Wait for parameters whose readers nobody would see."""
        core = self._opt._core
        unseen = [parameter for parameter in self._roster.unmarkable if core.is_bound(parameter)]
        if unseen:
            core.wait(unseen)

    def resolve(self, parameters: list[torch.Tensor], *, are_used: bool = True) -> None:
        """Order the current stream after these parameters' updates."""
        began = time.perf_counter()
        if are_used and self._order is not None:
            self._note_use(parameters)
        pending, opt = self._pending, self._opt
        # In one turn: what a hook begins meanwhile must keep its mark.
        with opt._lock:
            waiting = [parameter for parameter in parameters if id(parameter) in pending]
            if waiting:
                try:
                    opt._core.wait(waiting)
                except Exception:
                    self._forget(waiting)
                    raise
                # Not after an interrupt, which may have come first.
                self._forget(waiting)
        self.forward_seconds += time.perf_counter() - began

    def _forget(self, parameters: list[torch.Tensor]) -> None:
        _pending.unmark(parameters, self.waiter)
        for parameter in parameters:
            self._pending.pop(id(parameter), None)

    def resolve_all(self, but: Collection[int] = ()) -> None:
        """Order the current stream after everything but the parameters of these ids."""
        self.resolve([parameter for key, parameter in list(self._pending.items()) if key not in but])

    def settled(self) -> None:
        """Everything has landed: nobody needs to wait."""
        _pending.unmark(self._pending.values(), self.waiter)
        self._pending.clear()

    def forward_begins(self, module: torch.nn.Module, uses: Uses) -> None:
        """Wait for a module's own parameters, and note when they are used."""
        uses.is_called = True
        own, pending = module._parameters, self._pending
        waiting = []
        for name, known, key in uses.parameters:
            if own.get(name) is not known:
                self._refuse_replaced(module, uses)
            if key in pending:
                waiting.append(known)
        if self._order is not None:
            self._note_use(known for _, known, _ in uses.parameters)
        if waiting:
            self.resolve(waiting)

    def model_begins(self) -> None:
        """Look at those modules of a model that are not called: theirs may be replaced, too."""
        if self._uncalled:
            self._uncalled = [(reference, uses) for reference, uses in self._uncalled if not uses.is_called]
            for reference, uses in self._uncalled:
                module = reference()
                if module is not None:
                    self._refuse_replaced(module, uses)

    def _refuse_replaced(self, module: torch.nn.Module, uses: Uses) -> None:
        for index, (name, known, _) in enumerate(uses.parameters):
            parameter = module._parameters.get(name)
            # Another tensor than a parameter is there for one call only (torch.func.functional_call).
            if parameter is known or not isinstance(parameter, torch.nn.Parameter) or not parameter.requires_grad:
                continue
            self._roster.refresh()
            if id(parameter) in self._roster.groups:
                uses.parameters[index] = (name, parameter, id(parameter))
                continue
            raise RuntimeError(
                f"{name} of {type(module).__name__} is another parameter than the one that the optimizer trains "
                "(load_state_dict(assign=True)?): build the optimizer anew"
            )

    def _note_use(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record the order of the first forward; a second use of the first weight ends it."""
        if self._order is None:
            return
        core = self._opt._core
        for parameter in parameters:
            if id(parameter) not in self._order and core.is_bound(parameter):
                self._order[id(parameter)] = len(self._order)
                core.set_next_use(parameter, self._order[id(parameter)])

    def order_is_known(self) -> None:
        """End the recording of the order of use."""
        if self._order:
            self._order = None
