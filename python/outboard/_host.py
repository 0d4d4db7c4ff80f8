"""The torch optimizer around the native half: groups, steps, state, checkpoints. No arithmetic on tensors' contents."""

from __future__ import annotations

import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, TypeVar, cast, overload

import torch
from torch.optim import Optimizer

from outboard import _checkpoint
from outboard._arguments import (
    check_choice,
    check_count,
    check_group,
    check_max_grad_norm,
)
from outboard._native import Core, default_threads, require_gpu_lane
from outboard._slots import Slots, check_parameter, parameter_name
from outboard._state import State

#: Options of the whole optimizer that live outside the parameter groups, and travel with copies and pickles.
_OPTIONS = (
    "_max_grad_norm",
    "_compute_grad_norm",
    "_nonfinite",
    "_bf16_state",
    "_full_master",
    "_threads",
    "_threads_why",
    "_chunk_elems",
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


class HostOptimizer(Optimizer):
    """Adam and AdamW over parameters in host memory; see `outboard.AdamW` for its arguments."""

    #: The class's rule of weight decay.
    _decoupled: bool = True
    #: torch's GradScaler hands `grad_scale` and `found_inf` to the step instead of unscaling first.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        mode: str,
        max_grad_norm: float | None,
        compute_grad_norm: bool,
        nonfinite: str | None,
        state_dtype: torch.dtype,
        master: str,
        threads: int | None,
        chunk_elems: int,
        seed: int,
    ) -> None:
        check_choice("mode", mode, ("auto", "cpu", "gpu"))
        if mode == "gpu":
            require_gpu_lane()
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
        self._chunk_elems = check_count("chunk_elems", chunk_elems)
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

        self._slots = Slots(groups, threads=self._threads, full_master=self._full_master, bf16_state=self._bf16_state)
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
        self._max_grad_norm = check_max_grad_norm(value)

    @property
    def compute_grad_norm(self) -> bool:
        """Whether each step computes `last_grad_norm` even if nothing is clipped."""
        return self._compute_grad_norm

    @compute_grad_norm.setter
    def compute_grad_norm(self, value: bool) -> None:
        check_choice("compute_grad_norm", value, (True, False))
        self._compute_grad_norm = bool(value)

    @property
    def nonfinite(self) -> str | None:
        """What a step with infinite or NaN gradients does: "skip", "raise", "propagate", or None for the default."""
        return self._nonfinite

    @nonfinite.setter
    def nonfinite(self, value: str | None) -> None:
        check_choice("nonfinite", value, (None, "skip", "raise", "propagate"))
        self._nonfinite = value

    @property
    def last_grad_norm(self) -> float | None:
        """Norm of all gradients together at the latest step that computed it, before clipping; None until then."""
        return self._last_grad_norm

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
        """Update every parameter that has a gradient; weights are updated when this returns.

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
        WorkerError, PoisonedError, ForkedError
            See the classes.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._slots.check_process()
        began = time.perf_counter()
        self._state.adopt()
        self._slots.bind_wanted(without_gradient=False)
        self._state.refresh()
        self._slots.settle()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        try:
            outcome = self._core.step(
                self.param_groups,
                max_grad_norm=self._max_grad_norm,
                compute_grad_norm=self._compute_grad_norm,
                nonfinite=self._policy(),
                grad_scale=None if scale is None else float(scale),
                found_inf=found_inf is not None and float(found_inf) != 0.0,
                seed=self._seed,
                chunk_elems=self._chunk_elems,
            )
        finally:
            self._state.refresh()
        if outcome.grad_norm is not None:
            self._last_grad_norm = outcome.grad_norm
        self._step_seconds = time.perf_counter() - began
        self._counts["steps"] += 1
        if outcome.skipped:
            self._count_skipped(by_scaler=found_inf is not None and float(found_inf) != 0.0)
        return loss

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
        """Each parameter's state as zero-copy tensors.

        Reading it makes the state, all zeros, where there is none yet.
        """
        self._slots.check_process()
        self._state.complete()
        return self._state

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        if value is self._state:
            return
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
    def reset(self, parameter: torch.Tensor) -> None:
        """Set a parameter's state back to zero, as if it had never been stepped; cures a poisoned one."""
        self._slots.name_of(parameter)
        self._slots.reset(parameter)

    @_outside_dynamo
    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a copy of the fp32 values behind a parameter: an fp32 tensor of its shape.

        For an fp32 parameter, its own values.
        """
        self._slots.name_of(parameter)
        self._slots.bind([parameter])
        self._slots.settle()
        out = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
        try:
            self._core.read_master(parameter, out)
        finally:
            self._state.refresh()
        return out

    @_outside_dynamo
    def load_master(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Set a parameter to fp32 values: the weight to the rounded ones, residual or master to what rounding drops.

        Raises
        ------
        TypeError, ValueError
            If `value` is not a floating-point tensor of the parameter's shape; nothing is changed.
        """
        _checkpoint.check_tensor(value, "master", self._slots.name_of(parameter), parameter.shape)
        self._slots.bind([parameter])
        self._slots.pending_residuals.pop(parameter, None)
        try:
            # A copy: the value may be a view of the weight or of its state.
            self._core.write_master(parameter, value.detach().to("cpu", torch.float32, copy=True), True)
        finally:
            self._state.refresh()
        torch.autograd.graph.increment_version(parameter)

    # ---- checkpoints

    @_outside_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Return the state in the layout of torch's AdamW, plus `residual` or `master` for 16-bit parameters.

        The tensors are the live state, as torch's are. Empty before the first step, if `state` has not been read.

        Raises
        ------
        PoisonedError
            If a parameter is half updated: such a checkpoint would be wrong without a word.
        """
        self._slots.check_process()
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
        self._slots.check_process()
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

    # ---- copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        self._slots.check_process()
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

    def stats(self) -> dict[str, Any]:
        """Return counts and sizes: what the optimizer holds, where, and what it has done.

        Keys: `parameters` and `elements` that have state; `state_bytes` of host memory that the state takes and
        `arena_bytes` mapped for it; `device_bytes` (0: nothing is kept on a device); `state_dtype`, `master`;
        `threads`, `threads_why`, `isa`; `steps`, `skipped_steps`; `last_step_seconds`; `last_grad_norm`; `poisoned`
        (name to cause).
        """
        core = self._core.stats()
        return {
            **core,
            "device_bytes": 0,
            "state_dtype": "bfloat16" if self._bf16_state else "float32",
            "master": "full" if self._full_master else "split",
            "threads_why": self._threads_why,
            "steps": self._counts["steps"],
            "skipped_steps": self._counts["skipped_steps"],
            "last_step_seconds": self._step_seconds,
            "last_grad_norm": self._last_grad_norm,
        }


__all__ = ["HostOptimizer"]
