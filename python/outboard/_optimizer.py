"""The torch optimizer around the native half: groups, steps, state, checkpoints. No arithmetic on tensors' contents."""

from __future__ import annotations

import functools
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch.optim import Optimizer

from outboard import _checkpoint, _engines, _pending, _plan
from outboard._arguments import check_choice, check_count, check_group, check_max_grad_norm
from outboard._attach import Abandoned, Attachment
from outboard._lanes import LaneOptions
from outboard._native import Core, NonFiniteError, WorkerError, default_threads, require_device
from outboard._slots import Slots, check_parameter, parameter_name
from outboard._state import State

if TYPE_CHECKING:
    from typing_extensions import Self

#: Options of the whole optimizer that live outside the parameter groups, and travel with copies and pickles.
_OPTIONS = (
    "_max_grad_norm",
    "_compute_grad_norm",
    "_nonfinite",
    "_bf16_state",
    "_full_master",
    "_threads",
    "_threads_why",
    "_lanes",
    "_eager",
    "_seed",
    "_counts",
    "_last_grad_norm",
)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _outside_dynamo(function: _Function) -> _Function:
    """Make a compiled caller break its graph here: there is nothing to compile, and tracing in fails.

    `torch.compiler.disable` would do, but imports the compiler (seconds) at once; this is what torch's optimizers use.
    """
    return cast("_Function", torch._disable_dynamo(function))  # type: ignore[attr-defined]


def _one_at_a_time(function: _Function) -> _Function:
    """Let threads that use one optimizer (a training loop, one that saves, autograd's) take turns."""

    @functools.wraps(function)
    def locked(self: OffloadedOptimizer, *args: Any, **kwargs: Any) -> Any:
        if self._slots.is_forked():
            # Whoever had the lock is not in this process; what cannot be done here says so itself.
            return function(self, *args, **kwargs)
        with self._lock:
            return function(self, *args, **kwargs)

    return cast("_Function", locked)


class OffloadedOptimizer(Optimizer):
    """Adam and AdamW with state in host memory; see `outboard.AdamW` for the arguments."""

    #: The class's rule of weight decay.
    _decoupled: bool = True
    #: torch's GradScaler hands `grad_scale` and `found_inf` to the step instead of unscaling first.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        lanes: LaneOptions,
        eager: str | bool,
        max_grad_norm: float | None,
        compute_grad_norm: bool,
        nonfinite: str | None,
        state_dtype: torch.dtype,
        master: str,
        threads: int | None,
        seed: int,
    ) -> None:
        check_choice("eager", eager, ("auto", True, False))
        if lanes.mode == "gpu" and lanes.simulate is None:
            require_device()
        self._lanes = lanes
        self._eager = eager
        check_choice("state_dtype", state_dtype, (torch.float32, torch.bfloat16))
        check_choice("master", master, ("split", "full"))
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an int, not {seed!r}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be at least 0 and below 2**64, not {seed}")
        self.max_grad_norm = max_grad_norm
        self.compute_grad_norm = compute_grad_norm
        self.nonfinite = nonfinite
        self._bf16_state = state_dtype is torch.bfloat16
        self._full_master = master == "full"
        self._seed = seed
        if threads is None:
            self._threads, self._threads_why = default_threads()
        else:
            self._threads, self._threads_why = check_count("threads", threads, 1024), "asked for"
        self._counts: Counter[str] = Counter()
        self._last_grad_norm: float | None = None
        self._start()
        super().__init__(params, defaults)

    def _start(self) -> None:
        """Make what does not travel with copies: the slots and the mapping over them."""
        this = weakref.ref(self)

        def groups() -> list[dict[str, Any]]:
            optimizer = this()
            return optimizer.param_groups if optimizer is not None and hasattr(optimizer, "param_groups") else []

        self._slots = Slots(
            groups,
            threads=self._threads,
            threads_are_asked_for=self._threads_why == "asked for",
            lanes=self._lanes,
            full_master=self._full_master,
            bf16_state=self._bf16_state,
        )
        self._attachment: Attachment | None = None
        self._lock = threading.RLock()
        _engines.register(self)
        self._state = State(self._slots)
        self._step_seconds = 0.0

    @property
    def _core(self) -> Core:
        return self._slots.core

    # ---- options that may change between steps

    @property
    def max_grad_norm(self) -> float | None:
        """Gradients are scaled down so that their joint norm is at most this; None leaves them."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        value = check_max_grad_norm(value)
        self._refuse_with_eager("max_grad_norm", value is not None)
        self._max_grad_norm = value

    @property
    def compute_grad_norm(self) -> bool:
        """Whether each step computes `last_grad_norm` even if nothing is clipped."""
        return self._compute_grad_norm

    @compute_grad_norm.setter
    def compute_grad_norm(self, value: bool) -> None:
        check_choice("compute_grad_norm", value, (True, False))
        self._refuse_with_eager("compute_grad_norm", bool(value))
        self._compute_grad_norm = bool(value)

    @property
    def nonfinite(self) -> str | None:
        """What a step with infinite or NaN gradients does: "skip", "raise", "propagate", or None for the default."""
        return self._nonfinite

    @nonfinite.setter
    def nonfinite(self, value: str | None) -> None:
        check_choice("nonfinite", value, (None, "skip", "raise", "propagate"))
        self._refuse_with_eager(f"nonfinite={value!r}", value in ("skip", "raise"))
        self._nonfinite = value

    @property
    def last_grad_norm(self) -> float | None:
        """Norm of all gradients together at the latest step that computed it, before clipping; None until then."""
        return self._last_grad_norm

    def _refuse_with_eager(self, option: str, is_set: bool) -> None:
        if is_set and self._eager is True:
            raise ValueError(
                f"{option} needs all gradients before the first update, and eager=True starts updates in backward: "
                "use eager='auto', which waits for step() then"
            )

    def _needs_all_gradients(self) -> bool:
        return self._max_grad_norm is not None or self._compute_grad_norm or self._nonfinite in ("skip", "raise")

    # ---- parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `torch.optim.Optimizer.add_param_group`; nothing is added if it is refused."""
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        try:
            self._check_group(self.param_groups[index], index)
        except BaseException:
            del self.param_groups[index]
            raise
        self._state.invalidate()

    def _check_group(self, group: dict[str, Any], index: int) -> None:
        self._check_rules(group, f" in parameter group {index}")
        for position, parameter in enumerate(group["params"]):
            check_parameter(parameter, parameter_name(group, index, position))

    def _check_rules(self, group: dict[str, Any], where: str = "") -> None:
        check_group(group, where)
        decoupled = group["decoupled_weight_decay"]
        if bool(decoupled) != self._decoupled:
            name, other = ("AdamW", "Adam") if self._decoupled else ("Adam", "AdamW")
            raise ValueError(f"decoupled_weight_decay={decoupled} contradicts {name}{where}; use outboard.{other}")

    # ---- the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_outside_dynamo
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

    @_one_at_a_time
    def _step(self) -> None:
        self._slots.check_process()
        began = time.perf_counter()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        attachment = self._attachment
        if attachment is not None:
            attachment.before_step(scaled=scale is not None or found_inf is not None)
        overlaps = attachment is not None and attachment.overlaps
        self._settle_others()
        self._adopt()
        if attachment is not None and attachment.has_changed:
            self._slots.bind_wanted(without_gradient=True)
            attachment.has_changed = False
        else:
            self._slots.bind_wanted(without_gradient=False)
        self._state.refresh()
        self._slots.settle()
        stepped = []
        if attachment is not None:
            stepped = [*self._slots.with_device_gradient(), *attachment.offloaded()]
            self._core.wait([])  # raises what has failed since the last step, before anything is taken
            # Before anything begins: an interrupt may come as soon as it has.
            attachment.expect(stepped)
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
                )
        except WorkerError:
            # Some have failed, all have been taken.
            if attachment is not None:
                attachment.after_step(stepped)
            raise
        except NonFiniteError:
            if attachment is not None:
                attachment.steps_are_over()
            raise
        except BaseException:
            # Nothing has been changed, and gradients stay where they are.
            if attachment is not None:
                attachment.step_was_refused()
            raise
        finally:
            self._state.refresh()
        if attachment is not None and outcome.skipped:
            attachment.steps_are_over(stepped)
        elif attachment is not None:
            attachment.after_step(stepped)
        if outcome.grad_norm is not None:
            self._last_grad_norm = outcome.grad_norm
        self._step_seconds = time.perf_counter() - began
        self._counts["steps"] += 1
        if outcome.skipped:
            self._count_skipped(by_scaler=found_inf is not None and float(found_inf) != 0.0)

    def _settle_others(self) -> None:
        """Wait for what other optimizers are doing to the same parameters."""
        attachment = self._attachment
        if _pending.are_pending(0 if attachment is None else attachment.count_pending()):
            _pending.settle_others(self._slots.listed(), None if attachment is None else attachment._self)

    def _adopt(self) -> None:
        """Take over state tensors that others have replaced; what has landed is compared only."""
        if self._state.has_foreign():
            # It is copied into its plane, which must not be in use.
            self.synchronize()
            self._state.adopt()

    @_one_at_a_time
    def _take_now(self, entries: list[tuple[torch.Tensor, dict[str, Any]]]) -> list[torch.Tensor]:
        """Begin the updates of parameters whose gradients are complete; return those that `step()` has to do."""
        self._slots.check_process()
        with torch._C.DisableTorchFunctionSubclass():
            return self._core.update_now(entries, seed=self._seed)

    @_one_at_a_time
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
            self._attachment.before_zero_grad()
        # Also of an optimizer that was detached after a backward.
        self._core.drop_offloaded()
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)

    # ---- overlap

    @_outside_dynamo
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

    @_outside_dynamo
    def detach(self) -> Self:
        """Undo `attach()`, once all that was begun is complete.

        Raises
        ------
        RuntimeError
            If updates have begun in backward and `step()` has not been called since.
        """
        attachment = self._attachment
        if attachment is not None:
            if attachment.has_begun():
                raise RuntimeError(
                    "detach() before step(): updates have begun in backward, and only step() completes them; after an "
                    "exception call abandon()"
                )
            try:
                self.synchronize()
            finally:
                attachment.remove()
                self._attachment = None
        return self

    @_outside_dynamo
    @_one_at_a_time
    def synchronize(self) -> None:
        """Wait until every update that was begun is complete, weights and state.

        Raises
        ------
        WorkerError
            For what has failed since the last call.
        """
        self._slots.check_process()
        attachment = self._attachment
        try:
            self._core.synchronize()
        except Exception:
            if attachment is not None:
                attachment.settled()
            raise
        # Not after an interrupt, which may have come first.
        if attachment is not None:
            attachment.settled()

    @_outside_dynamo
    @_one_at_a_time
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
            self._attachment.resolve(list(listed), are_used=False)
        self._core.wait([parameter for parameter in listed if self._core.is_bound(parameter)])

    @_outside_dynamo
    def abandon(self) -> Abandoned:
        """Give up a step after an exception in backward: complete what has begun, drop all other gradients.

        Returns the names of the parameters that have been updated, and of those whose gradients were dropped.
        """
        self.synchronize()
        if self._attachment is None:
            dropped = [name for _, _, name, parameter in self._slots.named() if parameter.grad is not None]
            self.zero_grad()
            return Abandoned([], dropped)
        return self._attachment.abandon()

    def close(self) -> None:
        """Complete what was begun and end the threads of the devices; the next step starts them again.

        Warns of updates that have failed.
        """
        try:
            self.synchronize()
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

    # ---- state

    @property  # type: ignore[override]
    @_outside_dynamo
    def state(self) -> State:
        """Each parameter's state as zero-copy tensors, once all updates are complete.

        Reading it makes the state, all zeros, where there is none yet.
        """
        self.synchronize()
        self._state.complete()
        return self._state

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        if value is self._state:
            return
        self.synchronize()
        entries = dict(value)
        ours = {key: item for key, item in entries.items() if self._slots.is_listed(key)}
        # An empty mapping is state that starts from zero; what is no mapping is refused by `plan`.
        given = {key: item for key, item in ours.items() if item or not isinstance(item, Mapping)}
        plans = [_checkpoint.plan(self._slots, key, item, partial=False) for key, item in given.items()]
        self._load(plans)
        for key in [key for key, _ in self._state.foreign() if key not in entries]:
            del self._state[key]
        self._state.update({key: item for key, item in entries.items() if key not in ours})

    def _load(self, plans: list[_checkpoint.Plan]) -> None:
        """Load checked states; all other state starts from zero again."""
        planned = {id(item.parameter) for item in plans}
        self._state.load(plans, [parameter for parameter in self._slots.bound if id(parameter) not in planned])

    @_outside_dynamo
    @_one_at_a_time
    def reset(self, parameter: torch.Tensor) -> None:
        """Set a parameter's state back to zero, as if it had never been stepped; cures a poisoned one."""
        self._slots.name_of(parameter)
        self._settle_quietly()
        self._slots.reset(parameter)

    @_outside_dynamo
    @_one_at_a_time
    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a copy of the fp32 values behind a parameter: an fp32 tensor of its shape.

        For an fp32 parameter, its own values.
        """
        self._slots.name_of(parameter)
        self.synchronize()
        self._slots.bind([parameter])
        self._slots.settle()
        out = torch.empty_like(parameter, dtype=torch.float32, device="cpu", requires_grad=False)
        try:
            self._slots.read_master(parameter, out)
        finally:
            self._state.refresh()
        return out.to(parameter.device)

    @_outside_dynamo
    @_one_at_a_time
    def load_master(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Set a parameter to fp32 values: the weight to the rounded ones, residual or master to what rounding drops.

        Raises
        ------
        TypeError, ValueError
            If `value` is not a floating-point tensor of the parameter's shape; nothing is changed.
        """
        _checkpoint.check_tensor(value, "master", self._slots.name_of(parameter), parameter.shape)
        self.synchronize()
        self._slots.bind([parameter])
        self._slots.pending_residuals.pop(parameter, None)
        try:
            # A copy: the value may be a view of the weight or of its state.
            self._slots.write_master(parameter, value.detach().to("cpu", torch.float32, copy=True), write_weight=True)
        finally:
            self._state.refresh()
        torch.autograd.graph.increment_version(parameter)

    # ---- checkpoints

    @_outside_dynamo
    @_one_at_a_time
    def state_dict(self) -> dict[str, Any]:
        """Return the state in the layout of torch's AdamW, plus `residual` or `master` for 16-bit parameters.

        The tensors are the live state, as torch's are. Empty before the first step, if `state` has not been read.

        Raises
        ------
        PoisonedError
            If a parameter is half updated: such a checkpoint would be wrong without a word.
        """
        self.synchronize()
        self._core.check_poisoned()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        numbers: dict[int, int] = {}
        for number, _, _, parameter in self._slots.named():
            numbers.setdefault(id(parameter), number)
        groups = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [numbers[id(parameter)] for parameter in group["params"]],
            }
            for group in self.param_groups
        ]
        state: dict[Any, Any] = {}
        if self._slots.bound:
            live = self.state
            live.adopt()
            for parameter in self._slots.bound:
                if id(parameter) in numbers:
                    state[numbers[id(parameter)]] = live[parameter].plain()
            state = {number: state[number] for number in sorted(state)}
        state.update(self._state.foreign())
        packed: dict[str, Any] = {"state": state, "param_groups": groups}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, packed)
            if replaced is not None:
                packed = replaced
        return packed

    @_outside_dynamo
    @_one_at_a_time
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of outboard, or of torch's Adam or AdamW; nothing is loaded if any of it is refused.

        Moments keep the configured `state_dtype`, whatever the checkpoint's. A `master` or `residual` loads into split
        and full masters alike; a dict with neither leaves the weights and zeroes the residuals. The sources are copied.

        Raises
        ------
        ValueError
            If groups or shapes do not match; it names the parameter.
        TypeError
            If a state is not made of tensors.
        """
        self._settle_quietly()
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        saved_groups = deepcopy(state_dict["param_groups"])
        if len(saved_groups) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        pairs = list(zip(self.param_groups, saved_groups, strict=True))
        if any(len(group["params"]) != len(saved["params"]) for group, saved in pairs):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
            )
        by_number = {
            number: parameter
            for group, saved in pairs
            for number, parameter in zip(saved["params"], group["params"], strict=True)
        }
        saved_state = state_dict["state"]
        plans = [
            _checkpoint.plan(self._slots, by_number[key], values, partial=False)
            for key, values in saved_state.items()
            if key in by_number
        ]
        foreign = {key: value for key, value in saved_state.items() if key not in by_number}
        groups = _checkpoint.merge_groups(self.param_groups, saved_groups, self.defaults, type(self).__name__)

        old_groups = self.param_groups
        self.param_groups = groups
        try:
            self._slots.bind([item.parameter for item in plans])
        except BaseException:
            self.param_groups = old_groups
            raise
        self._state.refresh()
        self._load(plans)
        for key, value in foreign.items():
            self._state[key] = value
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _settle_quietly(self) -> None:
        """Wait for what is under way; what has failed is about to be replaced."""
        try:
            self.synchronize()
        except WorkerError as error:
            warnings.warn(f"an earlier step failed: {error}", RuntimeWarning, stacklevel=4)

    # ---- copies and pickles

    @_one_at_a_time
    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        self._core.check_poisoned()
        live = self.state if self._slots.bound else State(self._slots)
        live.adopt()
        return {
            "defaults": self.defaults,
            "param_groups": self.param_groups,
            "state": live.plain(),
            "options": {name: getattr(self, name) for name in _OPTIONS},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        saved_state, options = state.pop("state", None), state.pop("options", None)
        if options is not None:
            self.__dict__.update(options)
            self._start()
        super().__setstate__(state)
        # As torch's own: whatever keys are given are taken over.
        if saved_state is not None:
            self.state = saved_state

    # ---- inspection

    def plan(self) -> dict[str, Any]:
        """Return what the optimizer takes, and how fast its lanes are.

        Keys: `parameters`, `elements`; `host_bytes` and `device_bytes` by purpose; `state_bytes_per_element`;
        `gelem_per_s` of each lane and of all together while they worked at once, measured since construction, or
        assumed from PCIe 5 if nothing has been (`is_measured`); `update_seconds` that one step's updates take, hidden
        behind backward and forward or not; `resident_gib` of state kept on devices, what each further GiB of
        `device_state_bytes` saves of `update_seconds` (`seconds_saved_per_resident_gib`), and `resident_gib_for_all`.
        """
        return _plan.plan(self.stats())

    def record_timeline(self, record: bool) -> None:
        """Start or stop recording when each chunk of state was under way."""
        self._core.record_timeline(record)

    def take_timeline(self) -> list[tuple[str, str, float, float]]:
        """Return and forget what was recorded: lane, parameter, start and end on the clock of `time.perf_counter`."""
        now = time.perf_counter()
        return [(lane, name, now + start, now + end) for lane, name, start, end in self._core.take_timeline()]

    @_one_at_a_time
    def stats(self) -> dict[str, Any]:
        """Return counts and sizes: what the optimizer holds, where, and what it has done.

        Keys: `parameters` and `elements` that have state; `state_bytes` of host memory that the state takes,
        `arena_bytes` mapped for it, `pinned_bytes` and `pageable_bytes` of those; `resident_bytes` of state on devices,
        `device_bytes` with the rings; `state_dtype`, `master`, `mode`, `transfer`; `threads`, `threads_why`, `isa`;
        `steps`, `skipped_steps`, `eager_updates`; `last_step_seconds`; `last_grad_norm`; `poisoned` (name to cause);
        times of hooks and waits, and what each lane of each device has done (`devices`): see docs/gpu.md.
        """
        core = self._core.stats()
        attachment = self._attachment
        devices = core["devices"].values()
        by_gpu = sum(device["gpu_lane"]["elements"] + device["resident_elements"] for device in devices)
        by_cpu = sum(device["cpu_lane"]["elements"] for device in devices)
        steps = max(1, self._counts["steps"])
        return {
            **core,
            "device_bytes": sum(device["device_ring_bytes"] for device in devices) + core["resident_bytes"],
            "state_dtype": "bfloat16" if self._bf16_state else "float32",
            "master": "full" if self._full_master else "split",
            "mode": self._lanes.mode,
            "transfer": self._slots.transfer,
            "resident_parameters": len(self._slots.resident.tensors),
            "threads_why": self._threads_why,
            "steps": self._counts["steps"],
            "skipped_steps": self._counts["skipped_steps"],
            "last_step_seconds": self._step_seconds,
            "last_grad_norm": self._last_grad_norm,
            "hook_ms_per_step": 0.0 if attachment is None else attachment.hook_seconds * 1e3 / steps,
            "forward_stall_ms": 0.0 if attachment is None else attachment.forward_seconds * 1e3 / steps,
            "gpu_share": by_gpu / (by_gpu + by_cpu) if by_gpu + by_cpu else 0.0,
        }


__all__ = ["OffloadedOptimizer"]
