"""The base of the optimizer: its options, its parameter groups with their checks, and what its methods are wrapped in.

It knows no step: see `_stepping`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

from outboard import _wrappers
from outboard._arguments import check_choice, check_count, check_group, check_max_grad_norm
from outboard._attach import Attachment
from outboard._lanes import LaneOptions
from outboard._native import Core, default_threads, require_device
from outboard._slots import Slots, check_parameter, parameter_name
from outboard._state import State

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_dynamo(function: _Function) -> _Function:
    """Make a compiled caller break its graph here: there is nothing to compile, and tracing in fails.

    `torch.compiler.disable` would do, but imports the compiler (seconds) at once; this is what torch's optimizers use.
    """
    return cast("_Function", torch._disable_dynamo(function))  # type: ignore[attr-defined]


def one_at_a_time(function: _Function) -> _Function:
    """Let threads that use one optimizer (a training loop, one that saves, autograd's) take turns."""

    @functools.wraps(function)
    def locked(self: BaseOptimizer, *args: Any, **kwargs: Any) -> Any:
        if self._slots.is_forked():
            # Whoever had the lock is not in this process; what cannot be done here says so itself.
            return function(self, *args, **kwargs)
        with self._lock:
            return function(self, *args, **kwargs)

    return cast("_Function", locked)


class BaseOptimizer(Optimizer):
    """What steps, checkpoints and inspection have in common."""

    #: The class's rule of weight decay.
    _decoupled: bool = True
    #: torch's GradScaler hands `grad_scale` and `found_inf` to the step instead of unscaling first.
    _step_supports_amp_scaling = True
    #: Whether it has a share of the parameters of others of its kind (ZeRO); copies of earlier versions do not say.
    _has_a_share = False

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
        self._has_a_share = _wrappers.is_made_by_zero()
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
        self._state = State(self._slots)
        self._step_seconds = 0.0

    @property
    def _core(self) -> Core:
        return self._slots.core

    # ---- options that stay as they are

    @property
    def mode(self) -> str:
        """Which lanes update parameters on devices; set when the optimizer is made."""
        return self._lanes.mode

    @property
    def eager(self) -> str | bool:
        """Whether updates begin in backward; set when the optimizer is made."""
        return self._eager

    @property
    def accumulation_steps(self) -> int:
        """Backward passes in a step; set when the optimizer is made."""
        return self._lanes.accumulation_steps

    @property
    def offload_gradients(self) -> bool:
        """Whether gradients leave the device during backward; set when the optimizer is made."""
        return self._lanes.offload_gradients

    # ---- options that may change between steps

    @property
    def max_grad_norm(self) -> float | None:
        """Gradients are scaled down so that their joint norm is at most this; None leaves them."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        value = check_max_grad_norm(value)
        self._refuse_without_all("max_grad_norm", value is not None)
        self._max_grad_norm = value

    @property
    def compute_grad_norm(self) -> bool:
        """Whether each step computes `last_grad_norm` even if nothing is clipped."""
        return self._compute_grad_norm

    @compute_grad_norm.setter
    def compute_grad_norm(self, value: bool) -> None:
        check_choice("compute_grad_norm", value, (True, False))
        self._refuse_without_all("compute_grad_norm", bool(value))
        self._compute_grad_norm = bool(value)

    @property
    def nonfinite(self) -> str | None:
        """What a step with infinite or NaN gradients does: "skip", "raise", "propagate", or None for the default."""
        return self._nonfinite

    @nonfinite.setter
    def nonfinite(self, value: str | None) -> None:
        check_choice("nonfinite", value, (None, "skip", "raise", "propagate"))
        self._refuse_without_all(f"nonfinite={value!r}", value in ("skip", "raise"))
        self._nonfinite = value

    @property
    def last_grad_norm(self) -> float | None:
        """Norm of all gradients together at the latest step that computed it, before clipping; None until then."""
        return self._last_grad_norm

    def _refuse_without_all(self, option: str, is_set: bool) -> None:
        if is_set and self._eager is True:
            raise ValueError(
                f"{option} needs all gradients before the first update, and eager=True starts updates in backward: "
                "use eager='auto', which waits for step() then"
            )
        if is_set and self._has_a_share:
            raise ValueError(
                f"{option} needs all gradients, and under ZeroRedundancyOptimizer this rank's optimizer has a share of "
                "them: call torch.nn.utils.clip_grad_norm_ on the model's parameters before step()"
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
