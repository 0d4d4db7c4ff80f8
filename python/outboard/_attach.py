"""Overlap of updates with backward and forward: hooks on gradients and modules, and what must hold between them.

Hooks hold their attachment weakly, copies of them (deepcopy, pickle) do nothing: a model never keeps or copies its
optimizer.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from outboard import _pending

if TYPE_CHECKING:
    from outboard._optimizer import OffloadedOptimizer

#: Parameters of fewer elements have no hook of their own (ten thousand cost 55 ms a step); they are taken together at
#: the end of backward. As `TINY_ELEMS` of the lanes.
TINY_ELEMS = 64 * 1024


class Abandoned(NamedTuple):
    """What `abandon()` found, as names of parameters."""

    #: Updated in the backward that was given up.
    updated: list[str]
    #: Gradients that were dropped.
    dropped: list[str]


class _Hook:
    """A hook that holds its attachment weakly. Copies are inert."""

    def __init__(self, attachment: Attachment | None = None) -> None:
        self._attachment = None if attachment is None else weakref.ref(attachment)

    @property
    def attachment(self) -> Attachment | None:
        return None if self._attachment is None else self._attachment()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


class _GradientHook(_Hook):
    def __call__(self, parameter: torch.Tensor) -> None:
        attachment = self.attachment
        if attachment is not None:
            attachment.gradient_is_ready(parameter)


class _EndOfBackward(_Hook):
    def __call__(self) -> None:
        attachment = self.attachment
        if attachment is not None:
            attachment.backward_has_ended()


class _ForwardHook(_Hook):
    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        attachment = self.attachment
        if attachment is not None:
            attachment.forward_begins(module)


class _ModelHook(_Hook):
    """On a whole model, for those of its modules that are not called themselves."""

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        attachment = self.attachment
        if attachment is not None:
            attachment.model_begins()


class _CompiledHook(_Hook):
    """Outside a compiled region, for all parameters in it."""

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        attachment = self.attachment
        if attachment is not None:
            attachment.resolve_all()


class _CompiledCall(_Hook):
    """In place of the call of a module that was `.compile()`d, whose hooks are compiled with it."""

    def __init__(self, attachment: Attachment, module: torch.nn.Module) -> None:
        super().__init__(attachment)
        self._module = weakref.ref(module)
        self._call: Any = module._compiled_call_impl
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attachment = self.attachment
        if attachment is not None:
            attachment.model_begins()
            attachment.resolve_all()
        return self._call(*args, **kwargs)

    def remove(self) -> None:
        """Give the module its own call back."""
        module = self._module()
        if module is not None and module._compiled_call_impl is self:
            module._compiled_call_impl = self._call


def _plain_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient without waiting for a pending update."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def _drop_grad(parameter: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = None


class _Taken(NamedTuple):
    """A gradient that an update in backward has used."""

    parameter: torch.Tensor
    #: None where the gradient was let go.
    grad: torch.Tensor | None
    version: int


class Attachment:
    """The hooks of one optimizer on its models."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._self = weakref.ref(self)
        self._gradient_hook = _GradientHook(self)
        self._end_of_backward = _EndOfBackward(self)
        self._handles: list[Any] = []
        self._hooked: dict[int, Any] = {}
        #: Each module's own parameters as they were when it was attached.
        self._owned: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()
        #: Modules that have not been called: others read their weights, or nobody does.
        self._uncalled: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._groups: dict[int, dict[str, Any]] = {}
        self._listed: list[torch.Tensor] = []
        self._frozen: list[torch.Tensor] = []
        self._signature: Any = None
        #: Whether groups have changed since `step()` has last made state for all that wants it.
        self.has_changed = False
        self._pending: dict[int, torch.Tensor] = {}
        #: Whether updates may overlap what follows: not where others read weights past everything that is seen here.
        self.overlaps = True

        self._in_backward = False
        self._backwards = 0
        self._taken: dict[int, _Taken] = {}
        self._offloaded: dict[int, torch.Tensor] = {}
        #: How often, since the last step.
        self._offloads: Counter[int] = Counter()
        self._settings: dict[int, tuple[Any, ...]] = {}
        #: For eager="auto": gradients as they were in the hook, of the step before it decides.
        self._watched: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._is_proven = False

        self._order: dict[int, int] | None = {}
        self.hook_seconds = 0.0
        self.forward_seconds = 0.0

    # ---- making and undoing

    @property
    def _opt(self) -> OffloadedOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "an attachment lives in its optimizer"
        return optimizer

    def add(self, model: torch.nn.Module) -> None:
        """Put hooks on a model's modules and on the parameters that the optimizer has of it."""
        self.refresh()
        self.has_changed = False
        self.overlaps = self.overlaps and not _is_wrapped(model)
        if not self.overlaps:
            return
        ours = self._groups
        forward = _ForwardHook(self)
        compiled: set[torch.nn.Module] = set()
        for module in model.modules():
            if getattr(module, "_compiled_call_impl", None) is not None:
                self._handles.append(_CompiledCall(self, module))
                compiled.update(module.modules())
            elif type(module).__name__ == "OptimizedModule":
                self._handles.append(module.register_forward_pre_hook(_CompiledHook(self), prepend=True))
                compiled.update(inner for inner in module.modules() if inner is not module)
        for module in model.modules():
            own: dict[str, torch.Tensor] = {
                name: p for name, p in module._parameters.items() if p is not None and id(p) in ours
            }
            if not own:
                continue
            self._owned[module] = own
            self._uncalled.add(module)
            if module not in compiled:
                self._handles.append(module.register_forward_pre_hook(forward, prepend=True))
        if model not in compiled:
            self._handles.append(model.register_forward_pre_hook(_ModelHook(self), prepend=True))

    def refresh(self) -> None:
        """Follow the optimizer's groups: hook what is new, or has been unfrozen."""
        groups = self._opt.param_groups
        # By identity: what is compared is kept alive below.
        signature = [(id(group), bool(group["amsgrad"]), *map(id, group["params"])) for group in groups]
        if signature == self._signature and not any(parameter.requires_grad for parameter in self._frozen):
            return
        self._signature = signature
        self.has_changed = True
        self._groups = {id(parameter): group for group in groups for parameter in group["params"]}
        self._listed = [parameter for group in groups for parameter in group["params"]]
        for parameter in self._listed:
            wants_hook = self.overlaps and id(parameter) not in self._hooked and self._wants_hook(parameter)
            # torch refuses a hook on a frozen one: it gets it at the step after it has been unfrozen.
            if wants_hook and parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._gradient_hook)  # type: ignore[no-untyped-call]
                self._hooked[id(parameter)] = handle
        self._frozen = [parameter for parameter in self._listed if not parameter.requires_grad]

    def _wants_hook(self, parameter: torch.Tensor) -> bool:
        return parameter.numel() > TINY_ELEMS and _pending.can_mark(parameter)

    def remove(self) -> None:
        """Take all hooks off; what is under way has been completed."""
        for handle in [*self._handles, *self._hooked.values()]:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self.settled()

    # ---- backward

    def _updates_now(self) -> bool:
        """Whether gradients are used as they come."""
        opt = self._opt
        if opt._eager is False or opt._needs_all_gradients() or self._backwards < opt._lanes.accumulation_steps:
            return False
        if self.has_changed:
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
            grad = parameter.grad
            if grad is None or id(parameter) not in self._groups:
                return
            self._begin_backward()
            if self._updates_now():
                self._take([parameter])
            elif self._opt._lanes.offload_gradients:
                self._offload([parameter])
            elif self._opt._eager == "auto" and not self._is_proven:
                self._watched[id(parameter)] = (weakref.ref(grad), grad._version)
        finally:
            self.hook_seconds += time.perf_counter() - began

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        opt = self._opt
        self.refresh()
        if self._taken:
            raise RuntimeError(
                "a backward has begun although the updates that the last one started were not followed by step(): "
                "call step() after each backward (accumulation_steps=n declares more), or abandon() after an exception"
            )
        steps = opt._lanes.accumulation_steps
        if self._backwards >= steps and (steps > 1 or self._offloaded):
            raise RuntimeError(
                f"this is backward {self._backwards + 1} since the last step(), and accumulation_steps is {steps}"
            )
        self.order_is_known()
        self._in_backward = True
        self._backwards += 1
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_of_backward)

    def _take(self, parameters: list[torch.Tensor]) -> None:
        """Start the updates of parameters whose gradients are complete."""
        opt = self._opt
        entries, grads = [], []
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in parameters:
                grad = parameter.grad
                assert grad is not None
                if id(parameter) in self._taken or grad.requires_grad:
                    self._refuse_gradient(parameter, "eager=False")
                group = self._groups[id(parameter)]
                if id(group) not in self._settings:
                    self._settings[id(group)] = _settings(group)
                entries.append((parameter, group))
                grads.append(grad)
        _pending.settle_others(parameters, self._self)
        # Before their updates begin: an interrupt may come as soon as they have.
        self.expect(parameters)
        left = {id(parameter) for parameter in opt._take_now(entries)}
        keep = opt._eager == "auto"
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, grad in zip(parameters, grads, strict=True):
                if id(parameter) not in left:
                    self._taken[id(parameter)] = _Taken(parameter, grad if keep else None, grad._version)
                    if not keep:
                        parameter.grad = None
        self._wait_for_unseen(parameters)

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
        parameters = [parameter for parameter in parameters if core.is_bound(parameter)]
        for parameter in parameters:
            grad = _plain_grad(parameter)
            if grad is not None and grad.requires_grad:
                self._refuse_gradient(parameter, "offload_gradients=False")
            if self._offloads[id(parameter)] >= self._backwards:
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
                self._offloads[id(parameter)] += 1

    def offloaded(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients are in host memory."""
        return list(self._offloaded.values())

    def backward_has_ended(self) -> None:
        """Take the tiny parameters, which have no hooks."""
        began = time.perf_counter()
        try:
            updates = self._updates_now()
            if updates or self._opt._lanes.offload_gradients:
                tiny = [
                    parameter
                    for parameter in self._listed
                    if id(parameter) not in self._hooked
                    and _pending.can_mark(parameter)
                    and parameter.grad is not None
                    and id(parameter) not in self._taken
                ]
                if tiny and updates:
                    self._take(tiny)
                elif tiny:
                    self._offload(tiny)
            self._in_backward = False
        finally:
            self.hook_seconds += time.perf_counter() - began

    # ---- the step

    def before_step(self, *, scaled: bool) -> None:
        """Check that what backward has begun is what `step()` is to complete."""
        opt = self._opt
        self.refresh()
        if self._offloaded and scaled:
            raise RuntimeError(
                "a gradient scaler cannot unscale gradients that have been offloaded: use offload_gradients=False"
            )
        if self._taken:
            if self._in_backward:
                raise RuntimeError(
                    "the last backward ended with an exception after some parameters had been updated: call abandon(), "
                    "and load a checkpoint if the others must not be left behind"
                )
            if scaled:
                raise RuntimeError(
                    "a gradient scaler came after updates had begun in backward, with scaled gradients: use eager=False"
                )
            if opt._needs_all_gradients():
                raise RuntimeError(
                    "clipping, a norm or a check of all gradients was switched on between backward and step(), after "
                    "updates had begun in backward: switch it on after step()"
                )
            for group in opt.param_groups:
                if self._settings.get(id(group), _settings(group)) != _settings(group):
                    raise RuntimeError(
                        "a parameter group's settings (lr, betas, ...) changed between backward and step(), after they "
                        "had been used: change them after step(), as torch's schedulers do, or use eager=False"
                    )
            self._check_taken()
        elif opt._eager == "auto" and not self._is_proven:
            is_one_step = 0 < self._backwards <= opt._lanes.accumulation_steps and not scaled
            self._is_proven = is_one_step and self._watched != {} and all(map(self._is_untouched, self._listed))

    def _check_taken(self) -> None:
        """Refuse gradients that are not what the updates in backward have used; let go of those that are."""
        # Once around the loop: ten thousand parameters have ten thousand gradients.
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, used, version in self._taken.values():
                grad = parameter.grad
                if used is None and grad is not None:
                    name = self._opt._slots.name_of(parameter)
                    raise RuntimeError(
                        f"{name}: it has another gradient, which came after the update in backward had used the first: "
                        "use eager=False"
                    )
                if used is None:
                    continue
                if grad is not used or used._version != version:
                    name = self._opt._slots.name_of(parameter)
                    raise RuntimeError(
                        f"{name}: its gradient was changed after the update in backward had used it (clipping, an "
                        "averaging of gradients?): use max_grad_norm for clipping, or eager=False"
                    )
                parameter.grad = None

    def _is_untouched(self, parameter: torch.Tensor) -> bool:
        if id(parameter) not in self._hooked:
            return True
        grad = _plain_grad(parameter)
        seen = self._watched.get(id(parameter))
        if grad is None or seen is None:
            return grad is None and seen is None
        return seen[0]() is grad and seen[1] == grad._version

    def after_step(self, stepped: Iterable[torch.Tensor]) -> None:
        """Let go of the gradients that `step()` has taken."""
        stepped = list(stepped)
        for parameter in stepped:
            _drop_grad(parameter)
        self.mark(stepped)
        self._reset_step()

    def _reset_step(self) -> None:
        self._taken.clear()
        self._offloaded.clear()
        self._offloads.clear()
        self._settings.clear()
        self._watched.clear()
        self._backwards = 0
        self._in_backward = False

    def steps_are_over(self, skipped: Iterable[torch.Tensor] = ()) -> None:
        """Forget a step that changed nothing, and the gradients that it has skipped."""
        for parameter in skipped:
            _drop_grad(parameter)
        self._opt._core.drop_offloaded()
        self._reset_step()

    def step_was_refused(self) -> None:
        """Keep the gradients of a step that was refused, those in host memory too; what backward has begun is over."""
        self._taken.clear()
        self._settings.clear()

    def has_begun(self) -> bool:
        """Whether updates have begun in backward that `step()` has not been called for."""
        return bool(self._taken)

    def before_zero_grad(self) -> None:
        """Refuse to drop gradients whose updates have begun."""
        if self._taken:
            raise RuntimeError(
                "zero_grad() before step(): updates have begun in backward, and only step() completes them; after an "
                "exception call abandon()"
            )
        self._reset_step()

    def abandon(self) -> Abandoned:
        """Drop what has not begun; say what has."""
        name = {id(parameter): name for _, _, name, parameter in self._opt._slots.named()}
        updated = [name[key] for key in self._taken if key in name]
        dropped = [name[key] for key in self._offloaded if key in name]
        self._opt._core.drop_offloaded()
        for parameter in self._listed:
            if _plain_grad(parameter) is not None:
                if id(parameter) not in self._taken:
                    dropped.append(name[id(parameter)])
                _drop_grad(parameter)
        self._reset_step()
        return Abandoned(updated, dropped)

    # ---- readers of weights

    def expect(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let readers of these parameters wait for updates, where that is possible."""
        marked = [parameter for parameter in parameters if _pending.can_mark(parameter)]
        _pending.mark(marked, self._self)
        for parameter in marked:
            self._pending[id(parameter)] = parameter

    def mark(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let readers of these parameters wait for their updates, which have begun."""
        parameters = list(parameters)
        self.expect(parameters)
        self._wait_for_unseen(parameters)

    def _wait_for_unseen(self, parameters: Iterable[torch.Tensor]) -> None:
        """Wait for parameters whose readers nobody would see."""
        unseen = [parameter for parameter in parameters if not _pending.can_mark(parameter)]
        if unseen:
            self._opt._core.wait(unseen)

    def resolve(self, parameters: list[torch.Tensor], *, are_used: bool = True) -> None:
        """Order the current stream after these parameters' updates."""
        began = time.perf_counter()
        if are_used:
            self._note_use(parameters)
        waiting = [parameter for parameter in parameters if id(parameter) in self._pending]
        if waiting:
            with self._opt._lock:
                try:
                    self._opt._core.wait(waiting)
                except Exception:
                    self._forget(waiting)
                    raise
                # Not after an interrupt, which may have come first.
                self._forget(waiting)
        self.forward_seconds += time.perf_counter() - began

    def _forget(self, parameters: list[torch.Tensor]) -> None:
        _pending.unmark(parameters)
        for parameter in parameters:
            self._pending.pop(id(parameter), None)

    def resolve_all(self) -> None:
        """Order the current stream after everything."""
        self.resolve(list(self._pending.values()))

    def settled(self) -> None:
        """Everything has landed: nobody needs to wait."""
        _pending.unmark(self._pending.values())
        self._pending.clear()

    def forward_begins(self, module: torch.nn.Module) -> None:
        """Wait for a module's own parameters, and note when they are used."""
        owned = self._owned.get(module)
        if owned is None:
            return
        self._uncalled.discard(module)
        self._refuse_replaced(module, owned)
        waiting = [known for known in owned.values() if id(known) in self._pending]
        if self._order is not None:
            self._note_use(owned.values())
        if waiting:
            self.resolve(waiting)

    def model_begins(self) -> None:
        """Look at those modules of a model that are not called: theirs may be replaced, too."""
        for module in list(self._uncalled):
            self._refuse_replaced(module, self._owned[module])

    def _refuse_replaced(self, module: torch.nn.Module, owned: dict[str, torch.Tensor]) -> None:
        for name, known in owned.items():
            parameter = module._parameters.get(name)
            # Another tensor than a parameter is there for one call only (torch.func.functional_call).
            if parameter is known or not isinstance(parameter, torch.nn.Parameter) or not parameter.requires_grad:
                continue
            self.refresh()
            if id(parameter) in self._groups:
                owned[name] = parameter
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

    def count_pending(self) -> int:
        """Return the number of parameters whose updates may be under way."""
        return len(self._pending)


def _settings(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return what an update has used of a group."""
    values = []
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, torch.Tensor):
            value = value.item()
        elif key == "betas":
            value = tuple(float(beta) for beta in value)
        if isinstance(value, (int, float, bool, str, tuple)) or value is None:
            values.append((key, value))
    return tuple(values)


def _is_wrapped(model: torch.nn.Module) -> bool:
    """Whether gradients are final, or weights are read, at other times than autograd and modules tell."""
    from torch.nn.parallel import DistributedDataParallel

    def is_sharded(module: torch.nn.Module) -> bool:
        return any(base.__name__ in ("FSDPModule", "FullyShardedDataParallel") for base in type(module).__mro__)

    if any(isinstance(module, DistributedDataParallel) or is_sharded(module) for module in model.modules()):
        return True
    return any(not _pending.can_mark(parameter) for parameter in model.parameters())
