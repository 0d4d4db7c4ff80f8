"""The torch optimizer around the native half: `_stepping` with state, checkpoints, copies and inspection on top.

No arithmetic on tensors' contents.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from outboard import _checkpoint, _plan, _sharded
from outboard._base import one_at_a_time, outside_dynamo
from outboard._native import WorkerError
from outboard._state import State
from outboard._stepping import SteppingOptimizer

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
    "_has_a_share",
    "_seed",
    "_counts",
    "_last_grad_norm",
)


class OffloadedOptimizer(SteppingOptimizer):
    """Adam and AdamW with state in host memory; see `outboard.AdamW` for the arguments."""

    # ---- state

    @property  # type: ignore[override]
    @outside_dynamo
    def state(self) -> State:
        """Each parameter's state as zero-copy tensors, once all updates are complete.

        Reading it makes the state, all zeros, where there is none yet.
        """
        self.synchronize()
        self._state.complete()
        self._state.is_handed_out = True
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

    @outside_dynamo
    @one_at_a_time
    def reset(self, parameter: torch.Tensor) -> None:
        """Set a parameter's state back to zero, as if it had never been stepped; cures a poisoned one."""
        self._slots.name_of(parameter)
        self._settle_quietly()
        self._slots.reset(parameter)

    @outside_dynamo
    @one_at_a_time
    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a copy of the fp32 values behind a parameter: an fp32 tensor of its shape.

        For an fp32 parameter, its own values.
        """
        self._slots.name_of(parameter)
        self.synchronize()
        self._slots.bind([parameter])
        self._slots.settle()
        own = _sharded.local(parameter)
        out = torch.empty_like(own, dtype=torch.float32, device="cpu", requires_grad=False)
        try:
            self._slots.read_master(parameter, out)
        finally:
            self._state.refresh()
        return _sharded.like(out.to(own.device), parameter)

    @outside_dynamo
    @one_at_a_time
    def load_master(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Set a parameter to fp32 values: the weight to the rounded ones, residual or master to what rounding drops.

        Raises
        ------
        TypeError, ValueError
            If `value` is not a floating-point tensor of the parameter's shape; nothing is changed.
        """
        value = _checkpoint.check_tensor(value, "master", self._slots.name_of(parameter), parameter)
        self.synchronize()
        self._slots.bind([parameter])
        self._slots.pending_residuals.pop(parameter, None)
        try:
            # A copy: the value may be a view of the weight or of its state.
            self._slots.write_master(parameter, value.to("cpu", torch.float32, copy=True), write_weight=True)
        finally:
            self._state.refresh()
        torch.autograd.graph.increment_version(parameter)

    # ---- checkpoints

    @outside_dynamo
    @one_at_a_time
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

    @outside_dynamo
    @one_at_a_time
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of outboard, or of torch's Adam or AdamW; nothing is loaded if any of it is refused.

        Moments keep the configured `state_dtype`, whatever the checkpoint's. A `master` or `residual` loads into split
        and full masters alike; a dict with neither leaves the weights and zeroes the residuals. The sources are copied.
        `capturable` and `differentiable` of its groups are set to False.

        Raises
        ------
        ValueError
            If groups or shapes do not match; it names the parameter.
        TypeError
            If a state is not made of tensors.
        RuntimeError
            If updates have begun in backward and `step()` has not been called since.
        """
        if self._attachment is not None:
            # The step that they belong to would be counted, and the rest of it done, on the state that is loaded.
            self._attachment.backward.refuse_before_step("load_state_dict()")
        self._settle_quietly()
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        saved_groups = deepcopy(state_dict["param_groups"])
        for saved in saved_groups:
            # They say how torch's step ran, not what was computed.
            saved.update({key: False for key in ("capturable", "differentiable") if saved.get(key)})
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

    @one_at_a_time
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

    @one_at_a_time
    def record_timeline(self, record: bool) -> None:
        """Start or stop recording when each chunk of state was under way."""
        self._core.record_timeline(record)

    @one_at_a_time
    def emit_nvtx(self, emit: bool = True) -> None:
        """Start or stop showing each chunk of state as a range in profilers that know NVTX, in the domain "outboard".

        Raises
        ------
        DeviceError
            If this build has no NVTX.
        """
        self._core.emit_ranges(emit)

    @one_at_a_time
    def take_timeline(self) -> list[tuple[str, str, float, float]]:
        """Return and forget what was recorded: lane, parameter, start and end on the clock of `time.perf_counter`."""
        now = time.perf_counter()
        return [(lane, name, now + start, now + end) for lane, name, start, end in self._core.take_timeline()]

    @one_at_a_time
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
        accumulation = sum(device["accumulation_seconds"] for device in devices)
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
            "accumulation_seconds": accumulation,
            "accumulation_ms_per_step": accumulation * 1e3 / steps,
            "hook_ms_per_step": 0.0 if attachment is None else attachment.backward.hook_seconds * 1e3 / steps,
            "forward_stall_ms": 0.0 if attachment is None else attachment.readers.forward_seconds * 1e3 / steps,
            "gpu_share": by_gpu / (by_gpu + by_cpu) if by_gpu + by_cpu else 0.0,
        }


__all__ = ["OffloadedOptimizer"]
