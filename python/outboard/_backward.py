"""Gradients from the hook that completes them to the step that lets go of them.

When updates begin, what counts as a backward, and what must hold between the two: see "Eager" in docs/gpu.md.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from outboard import _capture, _pending, _sharded
from outboard._hooks import _EndOfBackward, nothing
from outboard._native import GroupSettings
from outboard._owner import Owner
from outboard._readers import Readers
from outboard._roster import Roster
from outboard._wrappers import Averaging

#: The number of the backward that runs on this thread; -1: none. Private in torch: without it reentrant checkpointing
#: counts a backward for each of its segments.
backward_here: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class Abandoned(NamedTuple):
    """What `abandon()` found, as names of parameters."""

    #: Updated in the backward that was given up.
    updated: list[str]
    #: Gradients that were dropped.
    dropped: list[str]


def _plain_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient without waiting for a pending update."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def _drop_grad(parameter: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = None


class _Taken:
    """The gradients that updates in backward have used (None where one was let go), their parameters and versions.

    Lists beside each other: of ten thousand tuples the garbage collector makes 300 ms of work now and then.
    """

    def __init__(self) -> None:
        self.keys: set[int] = set()
        self.parameters: list[torch.Tensor] = []
        self.grads: list[torch.Tensor | None] = []
        self.versions: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.keys)

    def __contains__(self, key: int) -> bool:
        return key in self.keys

    def add(self, parameter: torch.Tensor, key: int, grad: torch.Tensor | None, version: int) -> None:
        self.keys.add(key)
        self.parameters.append(parameter)
        self.grads.append(grad)
        self.versions.append(version)

    def clear(self) -> None:
        for kept in (self.keys, self.parameters, self.grads, self.versions):
            kept.clear()


class Backward:
    """The gradients of one attached optimizer."""

    def __init__(self, optimizer: Callable[[], Owner | None], roster: Roster, readers: Readers) -> None:
        self._optimizer = optimizer
        self._roster = roster
        self._readers = readers
        self._beginning = threading.RLock()
        #: Whether DDP averages the gradients of the backward that is under way.
        self.averaging = Averaging()
        #: Whether the end of backward has been seen, after which DDP's own is still to come.
        self._ends_late = False
        #: Whether a backward has been counted that has not ended (or has with an exception, if `_end` is gone).
        self._in_backward = False
        #: The end of the backward that is under way, if it is known.
        self._end: Callable[[], _EndOfBackward | None] = nothing
        #: What is done with gradients in this backward.
        self._takes = self._offloads = self._watches = False
        self._backwards = 0
        self._taken = _Taken()
        self._offloaded: dict[int, torch.Tensor] = {}
        #: How often, since the last step.
        self._times_offloaded: Counter[int] = Counter()
        #: What updates in this backward use of each group: as it was, and as the native half has read it.
        self._settings: dict[int, tuple[tuple[Any, ...], GroupSettings]] = {}
        #: For eager="auto": gradients as they were in the hook, of the step before it decides.
        self._watched: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        #: Whether a backward has completed one gradient twice.
        self._has_repeats = False
        self._is_proven = False
        #: Whether a backward that has begun updates ended with an exception.
        self._has_failed = False
        self.hook_seconds = 0.0

    @property
    def _opt(self) -> Owner:
        optimizer = self._optimizer()
        assert optimizer is not None, "an attachment lives in its optimizer"
        return optimizer

    # ---- in backward

    def _updates_now(self) -> bool:
        """Whether gradients are used as they come."""
        opt = self._opt
        if opt._eager is False or opt._needs_all_gradients() or self._backwards < opt._lanes.accumulation_steps:
            return False
        if self._roster.has_changed:
            # There may be no state yet, which is made and pinned in `step()`.
            return False
        if opt._lanes.offload_gradients and opt._lanes.accumulation_steps > 1:
            # The last gradient is the smaller part: it is added to the sum in host memory, which `step()` uses.
            return False
        return opt._eager is True or self._is_proven

    def gradient_is_ready(self, parameter: torch.Tensor) -> None:
        """Handle a complete gradient of a parameter: update now, or note it for `step()`."""
        began = time.perf_counter()
        try:
            key = id(parameter)
            grad = parameter.grad
            group = self._roster.groups.get(key)
            if grad is None or group is None:
                return
            if not self._in_backward or self._end() is None:
                # Autograd has a thread for each device: one of them begins.
                with self._beginning:
                    if not self._in_backward or self._end() is None:
                        self._begin_backward()
            if not self._roster.finishes_late:
                self._use(parameter, key, grad, group)
        finally:
            self.hook_seconds += time.perf_counter() - began

    def _use(self, parameter: torch.Tensor, key: int, grad: torch.Tensor, group: dict[str, Any]) -> None:
        """Do with a final gradient what this backward does."""
        if self._takes:
            self._take(parameter, key, grad, group)
        elif self._offloads:
            self._offload([parameter])
        elif self._watches:
            seen = self._watched.get(key)
            self._has_repeats |= seen is not None and seen[2] == self._backwards
            self._watched[key] = (weakref.ref(grad), _sharded.watch(grad), self._backwards)

    def notice(self) -> None:
        """Follow the backward that this forward is a part of to its end.

        Reentrant checkpointing computes its segments anew in the backward that is to be counted, and then runs a
        backward within for each: their gradients belong to the outer one. There the parameters may have no gradients
        of their own, so that this is where it is seen.
        """
        if self._end() is None:
            if self._in_backward:
                self._last_has_failed()
            self._follow_backward()

    def _last_has_failed(self) -> None:
        """Forget a backward that ended with an exception, but not that what it began was not followed by a step."""
        self._backwards -= 1
        self._in_backward = False
        self._has_failed |= bool(self._taken)

    def _follow_backward(self) -> None:
        end = _EndOfBackward(self)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(end)
        self._end = weakref.ref(end)

    def _begin_backward(self) -> None:
        """Count a backward at its first gradient."""
        opt = self._opt
        if self._in_backward:
            self._last_has_failed()
        self._ends_late = False
        if _capture.is_capturing():
            raise _capture.refuse("a backward of an attached model")
        self._roster.refresh()
        if self._taken:
            raise RuntimeError(
                "a backward has begun although the updates that the last one started were not followed by step(): "
                "call step() after each backward (accumulation_steps=n declares more), or abandon() after an exception"
            )
        steps = opt._lanes.accumulation_steps
        if self._backwards >= steps and (steps > 1 or self._offloaded):
            raise RuntimeError(
                f"this is backward {self._backwards + 1} since the last step(), and accumulation_steps is {steps}: "
                "call step() after so many, or declare more; zero_grad() of the optimizer drops what has come so far"
            )
        self._readers.order_is_known()
        self._backwards += 1
        self._takes = self._updates_now()
        self._offloads = opt._lanes.offload_gradients
        self._watches = opt._eager == "auto" and not self._is_proven
        if self._end() is None:
            self._follow_backward()
        if self._takes:
            try:
                # In `step()` it would be too late: these updates would be undone, or `step()` refused after them.
                opt._core.check_poisoned()
                opt._adopt()
            except BaseException:
                self._backwards -= 1
                raise
        # Last: what other threads go by is known now.
        self._in_backward = True

    def _settings_of(self, group: dict[str, Any]) -> GroupSettings:
        known = self._settings.get(id(group))
        if known is None:
            known = self._settings[id(group)] = (_settings(group), GroupSettings(group))
        return known[1]

    def _take(self, parameter: torch.Tensor, key: int, grad: torch.Tensor, group: dict[str, Any]) -> None:
        """Start the update of a parameter whose gradient is complete."""
        if key in self._taken or grad.requires_grad:
            self._refuse_gradient(parameter, "eager=False")
        if type(parameter) is not torch.nn.Parameter:
            _pending.settle_others([parameter], self._readers.waiter)
        if not _sharded.is_complete(parameter, grad):
            return  # to `step()`, which lets ranks add up what is due
        opt = self._opt
        settings = self._settings_of(group)
        version = _sharded.watch(grad)
        # Both in one turn: a thread that waits for everything in between would take the mark off.
        with opt._lock:
            # Before its update begins: an interrupt may come as soon as it has.
            self._readers.expect(parameter, key)
            if not opt._take_one(parameter, grad, settings):
                return
        keeps = opt._eager == "auto"
        self._taken.add(parameter, key, grad if keeps else None, version)
        if not keeps:
            _drop_grad(parameter)

    def _refuse_gradient(self, parameter: torch.Tensor, instead: str) -> None:
        """Say why a gradient cannot be used in backward."""
        name = self._opt._slots.name_of(parameter)
        if id(parameter) in self._taken:
            raise RuntimeError(
                f"{name}: a second gradient before step(), after its update has begun. Use eager=False (a module "
                "that is used twice under reentrant checkpointing fires twice), accumulation_steps=n for n "
                "backwards a step, or abandon() after an exception in backward"
            )
        raise RuntimeError(
            f"{name}: its gradient has a graph of its own (create_graph=True), which a later backward needs; "
            f"use {instead}"
        )

    def _offload(self, parameters: list[torch.Tensor]) -> None:
        """Let gradients leave the device."""
        core = self._opt._core
        # What has been added or unfrozen since the last step has no state, nor memory for gradients, before the next.
        bound = [parameter for parameter in parameters if core.is_bound(parameter)]
        # Nor what ranks have parts of: `step()` lets them add it up.
        parameters = [p for p in bound if (grad := _plain_grad(p)) is None or _sharded.is_complete(p, grad)]
        for parameter in parameters:
            grad = _plain_grad(parameter)
            if grad is not None and grad.requires_grad:
                self._refuse_gradient(parameter, "offload_gradients=False")
            if self._times_offloaded[id(parameter)] >= self._backwards:
                name = self._opt._slots.name_of(parameter)
                raise RuntimeError(
                    f"{name}: a second gradient of one backward, after the first was offloaded, or one of a backward "
                    "that ended with an exception: call zero_grad() of the optimizer, or abandon(), after an "
                    "exception; a module that is used twice under reentrant checkpointing needs "
                    "offload_gradients=False"
                )
        left = {id(parameter) for parameter in self._opt._offload_now(parameters)}
        for parameter in parameters:
            if id(parameter) not in left:
                parameter.grad = None
                self._offloaded[id(parameter)] = parameter
                self._times_offloaded[id(parameter)] += 1

    def wait_for_offloads(self) -> None:
        """Wait until gradients that are leaving the device have left it: what has them is about to be written."""
        if self._offloaded:
            self._opt._core.synchronize()

    def backward_has_ended(self) -> None:
        """Offload the gradients of those that have no hooks; `step()` takes them otherwise."""
        self._end = nothing
        if not self._in_backward:
            return
        if self._roster.finishes_late and not self._ends_late:
            # DDP has queued its own end of this backward behind this one, when its last bucket was ready.
            self._ends_late = True
            self._follow_backward()
            return
        self._ends_late = False
        began = time.perf_counter()
        try:
            averages = not self._roster.finishes_late or self.averaging.is_on()
            if self._roster.finishes_late and averages:
                self._use_all()
            if self._offloads and not self._takes and averages:
                found = [parameter for parameter in self._roster.unhooked if _plain_grad(parameter) is not None]
                if found:
                    self._offload(found)
            self._in_backward = False
        finally:
            self.hook_seconds += time.perf_counter() - began

    def _use_all(self) -> None:
        """Use gradients that are final only now; DDP has also given some to parameters that have none of this rank."""
        for parameter in self._roster.listed:
            key = id(parameter)
            grad = _plain_grad(parameter) if key in self._roster.hooked else None
            group = self._roster.groups.get(key)
            if grad is not None and group is not None:
                self._use(parameter, key, grad, group)

    # ---- the step

    def before_step(self, *, scaled: bool) -> None:
        """Check that what backward has begun is what `step()` is to complete."""
        opt = self._opt
        self._roster.refresh()
        if opt._lanes.offload_gradients and scaled and self._roster.overlaps:
            raise RuntimeError(
                "a gradient scaler cannot unscale gradients that have been offloaded: use offload_gradients=False"
            )
        if self._taken:
            if self._in_backward or self._has_failed:
                raise RuntimeError(
                    "the last backward ended with an exception after some parameters had been updated: call abandon(), "
                    "and load a checkpoint if the others must not be left behind"
                )
            if scaled:
                raise RuntimeError(
                    "a gradient scaler came after updates had begun in backward, with scaled gradients: use "
                    "eager=False; abandon() gives this step up"
                )
            if opt._needs_all_gradients():
                raise RuntimeError(
                    "clipping, a norm or a check of all gradients was switched on between backward and step(), after "
                    "updates had begun in backward: switch it on after step(); abandon() gives this step up"
                )
            for group in opt.param_groups:
                used = self._settings.get(id(group))
                if used is not None and used[0] != _settings(group):
                    raise RuntimeError(
                        "a parameter group's settings (lr, betas, ...) changed between backward and step(), after they "
                        "had been used: change them after step(), as torch's schedulers do, or use eager=False; "
                        "abandon() gives this step up"
                    )
            self._check_taken()
        elif opt._eager is True and scaled and self._roster.overlaps:
            raise RuntimeError(
                "a gradient scaler unscales gradients in step(), and eager=True uses them in backward: use eager=False"
            )
        elif opt._eager == "auto" and not self._is_proven:
            is_one_step = 0 < self._backwards <= opt._lanes.accumulation_steps and not scaled
            is_one_step = is_one_step and not self._has_repeats
            self._is_proven = is_one_step and self._watched != {} and all(map(self._is_untouched, self._roster.listed))

    def _check_taken(self) -> None:
        """Refuse gradients that are not what the updates in backward have used; let go of those that are."""
        # Once around the loop: ten thousand parameters have ten thousand gradients.
        with torch._C.DisableTorchFunctionSubclass():
            taken = self._taken
            for parameter, used, version in zip(taken.parameters, taken.grads, taken.versions, strict=True):
                grad = parameter.grad
                if used is None and grad is not None:
                    name = self._opt._slots.name_of(parameter)
                    raise RuntimeError(
                        f"{name}: it has another gradient, which came after the update in backward had used the first: "
                        "use eager=False; abandon() gives this step up"
                    )
                if used is None:
                    continue
                if grad is not used or not _sharded.is_unchanged(used, version):
                    name = self._opt._slots.name_of(parameter)
                    raise RuntimeError(
                        f"{name}: its gradient was changed after the update in backward had used it (clipping, an "
                        "averaging of gradients?): use max_grad_norm for clipping, or eager=False; abandon() gives "
                        "this step up"
                    )
            # Only once all are right: a step that is refused leaves them.
            for parameter in taken.parameters:
                parameter.grad = None

    def _is_untouched(self, parameter: torch.Tensor) -> bool:
        if id(parameter) not in self._roster.hooked:
            return True
        grad = _plain_grad(parameter)
        seen = self._watched.get(id(parameter))
        if grad is None or seen is None:
            return grad is None and seen is None
        return seen[0]() is grad and _sharded.is_unchanged(grad, seen[1])

    def after_step(self) -> None:
        """Begin anew after `step()` has taken all gradients, and let go of them."""
        self._readers.wait_for_unseen()
        self._reset_step()

    def _reset_step(self) -> None:
        self._taken.clear()
        self._offloaded.clear()
        self._times_offloaded.clear()
        self._settings.clear()
        self._watched.clear()
        self._has_repeats = False
        self._has_failed = False
        self._backwards = 0
        self._in_backward = False

    def step_was_skipped(self) -> None:
        """Forget a step that changed nothing, and offloaded gradients."""
        self._opt._core.drop_offloaded()
        self._reset_step()

    def step_was_refused(self) -> None:
        """Keep the gradients of a step that was refused, those in host memory too; what backward has begun is over."""
        self._taken.clear()
        self._settings.clear()
        self._has_failed = False

    def refuse_before_step(self, call: str) -> None:
        """Refuse a call where updates have begun in backward that `step()` has not been called for."""
        if self._taken:
            raise RuntimeError(
                f"{call} before step(): updates have begun in backward, and only step() completes them; after an "
                "exception call abandon()"
            )

    def before_zero_grad(self) -> None:
        """Refuse to drop gradients whose updates have begun."""
        self.refuse_before_step("zero_grad()")
        self._reset_step()

    def abandon(self) -> Abandoned:
        """Drop what has not begun; say what has."""
        name = {id(parameter): name for _, _, name, parameter in self._opt._slots.named()}
        updated = [name[id(parameter)] for parameter in self._taken.parameters if id(parameter) in name]
        dropped = [name[key] for key in self._offloaded if key in name]
        self._opt._core.drop_offloaded()
        for parameter in self._roster.listed:
            if _plain_grad(parameter) is not None:
                if id(parameter) not in self._taken:
                    dropped.append(name[id(parameter)])
                _drop_grad(parameter)
        self._reset_step()
        return Abandoned(updated, dropped)


def _settings(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return what an update uses of a group; the user's own keys are none of it."""
    numbers = [group.get(key) for key in ("lr", "eps", "weight_decay")]
    betas = group.get("betas")
    numbers += betas if isinstance(betas, (tuple, list)) else [betas]
    switches = [bool(group.get(key)) for key in ("amsgrad", "maximize", "decoupled_weight_decay")]
    return (*map(_number, numbers), *switches)


def _number(value: Any) -> Any:
    """Return a number, as torch, numpy or Python has it, so that equal ones compare equal; else the value."""
    if isinstance(value, str):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return value  # which reading the settings refuses
    return number if number == number else "nan"
