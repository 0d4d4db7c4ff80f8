"""Steps: all at once in `step()`, or begun in backward once a model is attached; and waiting for them.

Checkpoints are above this: see `_optimizer`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, overload

import torch

from outboard import _capture, _engines, _pending, _sharded, _wrappers
from outboard._attach import Abandoned, Attachment
from outboard._base import BaseOptimizer, one_at_a_time, outside_dynamo
from outboard._native import GroupSettings, NonFiniteError, WorkerError

if TYPE_CHECKING:
    from typing_extensions import Self


class SteppingOptimizer(BaseOptimizer):
    """The optimizer without its checkpoints."""

    def _start(self) -> None:
        super()._start()
        _engines.register(self)

    # ---- the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @outside_dynamo
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        The weights are updated when this returns, on a device in the order of the current stream. After `attach()`
        updates go on behind it, and whoever reads a weight waits for its own.

        Parameters
        ----------
        closure : callable, optional
            Evaluates the model again and returns the loss; called once, with gradients enabled.

        Raises
        ------
        TypeError, ValueError
            For a gradient or parameter that cannot be updated, by name; nothing has been changed.
        NonFiniteError
            If `nonfinite="raise"` and a gradient is not finite; nothing has been changed.
        RuntimeError
            If updates have begun in backward, and a gradient or setting that they used has changed since, or that
            backward ended with an exception (see `abandon`).
        WorkerError, PoisonedError, ForkedError
            See the classes. After `attach()` an update that fails is told by the next call.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Not around the closure: its backward may come here from other threads.
        self._step()
        return loss

    @one_at_a_time
    def _step(self) -> None:
        self._slots.check_process()
        if _capture.is_capturing() and _is_on_cuda(self._slots.listed()):
            raise _capture.refuse("step()")
        began = time.perf_counter()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        attachment = self._attachment
        if attachment is not None:
            attachment.backward.before_step(scaled=scale is not None or found_inf is not None)
        overlaps = attachment is not None and attachment.roster.overlaps
        try:
            self._ready(attachment)
        except BaseException:
            # What has begun in backward is over all the same; the gradients that `step()` would take stay.
            if attachment is not None:
                attachment.backward.step_was_refused()
            raise
        try:
            # The native half asks pending parameters for what an update does not change; to wait would call it again.
            with torch._C.DisableTorchFunctionSubclass():
                outcome = self._core.step(
                    self.param_groups,
                    max_grad_norm=self._max_grad_norm,
                    compute_grad_norm=self._compute_grad_norm,
                    nonfinite=self._policy(),
                    grad_scale=None if scale is None else float(scale),
                    found_inf=found_inf is not None and float(found_inf) != 0.0,
                    seed=self._seed,
                    chunk_elems=self._lanes.host_chunk_elems,
                    attached=overlaps,
                    lets_go=attachment is not None,
                    combine=self._combine(),
                )
        except WorkerError:
            # Some have failed, all have been taken.
            if attachment is not None:
                attachment.backward.after_step()
            raise
        except NonFiniteError:
            if attachment is not None:
                attachment.backward.step_was_skipped()
            raise
        except BaseException:
            # Nothing has been changed, and gradients stay where they are.
            if attachment is not None:
                attachment.backward.step_was_refused()
            raise
        finally:
            self._state.refresh()
        if attachment is not None and outcome.skipped:
            attachment.backward.step_was_skipped()
        elif attachment is not None:
            attachment.backward.after_step()
        if outcome.grad_norm is not None:
            self._last_grad_norm = outcome.grad_norm
        self._step_seconds = time.perf_counter() - began
        self._counts["steps"] += 1
        if outcome.skipped:
            self._count_skipped(by_scaler=found_inf is not None and float(found_inf) != 0.0)

    def _combine(self) -> Callable[[list[torch.Tensor], list[float]], tuple[list[str], list[float]]] | None:
        """Return what adds up norms over ranks, where there is a norm of parameters that are spread over ranks."""
        if not self._needs_all_gradients():
            return None
        if any(map(_wrappers.is_flattened, self._slots.listed())):
            raise ValueError(
                "max_grad_norm, compute_grad_norm and nonfinite need the gradients of all ranks, and parameters of "
                "FullyShardedDataParallel (FSDP1) do not tell which rank has what: call the model's clip_grad_norm_(), "
                "or use fully_shard (FSDP2)"
            )
        return self._slots.sums_over_ranks if self._slots.has_sharded() else None

    def _ready(self, attachment: Attachment | None) -> None:
        """Make what state there is to be, raise what has failed, let readers wait for what is to begin."""
        self._settle_others()
        self._adopt()
        if attachment is not None and attachment.roster.has_changed:
            self._slots.bind_wanted(without_gradient=True)
            attachment.roster.has_changed = False
        else:
            self._slots.bind_wanted(without_gradient=False)
        self._state.refresh()
        self._slots.settle()
        if self._slots.sharded:
            # In the order of the groups, which is that of all ranks; that of binding need not be.
            _sharded.complete_gradients(filter(_sharded.is_sharded, self._slots.listed()), self._slots.name_of)
        if attachment is not None:
            self._core.wait([])  # raises what has failed since the last step, before anything is taken
            # Before anything begins: an interrupt may come as soon as it has.
            attachment.readers.expect_all()

    def _settle_others(self) -> None:
        """Wait for what other optimizers are doing to the same parameters."""
        attachment = self._attachment
        # Each by its mark: how many wait says nothing, since `expect_all` announces more than are marked.
        _pending.settle_others(self._slots.listed(), None if attachment is None else attachment.readers.waiter)

    @one_at_a_time
    def _adopt(self) -> None:
        """Take over state tensors that others have replaced; what has landed is compared only."""
        if self._state.has_foreign():
            # It is copied into its plane, which must not be in use.
            self.synchronize()
            self._state.adopt()

    def _take_one(self, parameter: torch.Tensor, grad: torch.Tensor, settings: GroupSettings) -> bool:
        """Begin the update of one parameter, in its hook; whether `step()` need not."""
        if self._slots.is_forked():
            self._slots.check_process()
        # The parameter is marked already: a native half that asks it for an attribute must not wait for itself.
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            return self._slots.core.update_one(parameter, grad, settings, self._seed)

    @one_at_a_time
    def _offload_now(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Take gradients to host memory; return the parameters whose gradients stay."""
        self._slots.check_process()
        return self._core.offload_now(parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients, as `torch.optim.Optimizer.zero_grad`.

        Raises
        ------
        RuntimeError
            If updates have begun in backward and `step()` has not been called since.
        """
        if self._attachment is not None:
            self._attachment.backward.before_zero_grad()
        # Also of an optimizer that was detached after a backward.
        self._core.drop_offloaded()
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)

    # ---- overlap

    @outside_dynamo
    def attach(self, model: torch.nn.Module) -> Self:
        """Overlap updates with the backward and the next forward of a model; makes all state now, and pins it.

        Updates begin in backward (see `eager`) or at `step()`, which returns at once; each module's forward waits, on
        the device, for the module's own weights, and so does whoever else reads a weight. Gradients are let go as
        they are used: `p.grad` is None after `step()`. Several models may be attached to one optimizer.

        Returns the optimizer.
        """
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"attach() takes the model, a torch.nn.Module, not {type(model).__name__}")
        self._slots.check_process()
        ours = {id(parameter) for parameter in self._slots.listed()}
        if not any(id(parameter) in ours for parameter in model.parameters()):
            raise ValueError("attach(): none of the model's parameters is this optimizer's")
        self._state.complete()
        if self._attachment is None:
            self._attachment = Attachment(self)
        self._attachment.add(model)
        return self

    @outside_dynamo
    def detach(self) -> Self:
        """Undo `attach()`, once all that was begun is complete.

        Raises
        ------
        RuntimeError
            If updates have begun in backward and `step()` has not been called since.
        """
        attachment = self._attachment
        if attachment is not None:
            attachment.backward.refuse_before_step("detach()")
            try:
                self.synchronize()
            finally:
                attachment.remove()
                self._attachment = None
        return self

    @outside_dynamo
    def synchronize(self) -> None:
        """Wait until every update that was begun is complete, weights and state.

        Raises
        ------
        WorkerError
            For what has failed since the last call.
        """
        self._complete()

    @one_at_a_time
    def _complete(self) -> None:
        """As `synchronize`, for the interpreter's end too, when it is late to import the compiler."""
        self._slots.check_process()
        attachment = self._attachment
        try:
            self._core.synchronize()
        except Exception:
            if attachment is not None:
                attachment.readers.settled()
            raise
        # Not after an interrupt, which may have come first.
        if attachment is not None:
            attachment.readers.settled()

    @outside_dynamo
    @one_at_a_time
    def wait(self, params: torch.Tensor | Iterable[torch.Tensor] | None = None) -> None:
        """Let the current stream of each device wait for the weights of `params`, or of all parameters.

        The host waits only until their updates are in the device's queues.
        """
        self._slots.check_process()
        if isinstance(params, torch.Tensor):
            params = [params]
        listed = self._slots.bound if params is None else list(params)
        for parameter in () if params is None else listed:
            self._slots.name_of(parameter)
        if self._attachment is not None:
            self._attachment.readers.resolve(list(listed), are_used=False)
        self._core.wait([parameter for parameter in listed if self._core.is_bound(parameter)])

    @outside_dynamo
    def abandon(self) -> Abandoned:
        """Give up a step after an exception in backward: complete what has begun, drop all other gradients.

        Returns the names of the parameters that have been updated, and of those whose gradients were dropped.
        """
        self.synchronize()
        # A GradScaler leaves these behind when the step that it calls raises.
        for name in ("grad_scale", "found_inf"):
            self.__dict__.pop(name, None)
        if self._attachment is None:
            dropped = [name for _, _, name, parameter in self._slots.named() if parameter.grad is not None]
            self.zero_grad()
            return Abandoned([], dropped)
        return self._attachment.backward.abandon()

    def close(self) -> None:
        """Complete what was begun and end the threads of the devices; the next step starts them again.

        Warns of updates that have failed.
        """
        try:
            self._complete()
        except WorkerError as error:
            warnings.warn(f"the last updates of an optimizer that is closed have failed: {error}", RuntimeWarning, 2)
        finally:
            self._core.close()

    def __del__(self) -> None:
        # Here and not when the native half goes: that may be later (a view of the state keeps it), and it would wait
        # with the interpreter's lock, which the dispatcher needs to let tensors go. In a fork there is no dispatcher.
        slots = self.__dict__.get("_slots")
        if slots is not None and slots.is_at_home:
            self.close()

    def _policy(self) -> str:
        if self._nonfinite is not None:
            return self._nonfinite
        # A pass over all gradients for this alone would cost a seventh of a step, so torch's way is the default unless
        # a norm is computed anyhow. A GradScaler has looked by itself and says found_inf.
        uses_norm = self._max_grad_norm is not None or self._compute_grad_norm
        return "skip" if uses_norm else "propagate"

    def _count_skipped(self, by_scaler: bool) -> None:
        self._counts["skipped_steps"] += 1
        # A scaler skips steps by design while it looks for its scale.
        if not by_scaler and not self._counts["skip_warnings"]:
            self._counts["skip_warnings"] += 1
            warnings.warn(
                f"step {self._counts['steps']} changed nothing: a gradient is infinite or NaN. Further such steps are "
                "counted without a warning in stats()['skipped_steps']; nonfinite='raise' makes them an error",
                RuntimeWarning,
                stacklevel=4,
            )


def _is_on_cuda(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether any parameter is on a CUDA device."""
    return any(parameter.device.type == "cuda" for parameter in parameters)
