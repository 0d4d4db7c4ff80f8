"""Loading state: what checkpoints of outboard and of torch hold, checked as a whole before anything is changed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from outboard import _sharded
from outboard._slots import Group, Slots

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass
class Plan:
    """What loading one parameter's state will do."""

    parameter: torch.Tensor
    name: str
    step: float | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    #: Only what is given changes; otherwise what is missing becomes zero.
    partial: bool = False


def step_count(value: Any, name: str) -> float:
    """Return a step count given as an int, a float or a tensor of one element.

    Raises
    ------
    TypeError, ValueError
        Naming the parameter, if it is not a count.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}: step must be one number, not of shape {tuple(value.shape)}")
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: step must be a number, not {value!r}")
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{name}: step must be at least 0, not {value}")
    return float(value)


def check_tensor(value: Any, key: str, name: str, parameter: torch.Tensor, integer: bool = False) -> torch.Tensor:
    """Return a state tensor, detached; of a DTensor's, what belongs to this rank.

    Raises
    ------
    TypeError, ValueError
        Naming the parameter, if it is no dense tensor of the parameter's shape and of the right kind of dtype.
    """
    shape = parameter.shape
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {key} must be a tensor, not {type(value).__name__}")
    if value.shape != shape:
        found, wanted = tuple(value.shape), tuple(shape)
        raise ValueError(f"{name}: {key} has shape {found}, the parameter {wanted}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name}: {key} must be a dense tensor, not {value.layout}")
    if value.is_meta:
        raise TypeError(f"{name}: {key} is on the meta device and has no values")
    if not integer and not value.is_floating_point():
        raise TypeError(f"{name}: {key} must be floating point, not {value.dtype}")
    return _sharded.part_of(value.detach(), parameter, f"{name}: its {key}")


def plan(
    slots: Slots,
    parameter: torch.Tensor,
    values: Mapping[str, Any],
    *,
    partial: bool,
) -> Plan:
    """Check one parameter's state and say what loading it will do; change nothing.

    Raises
    ------
    TypeError, ValueError
        For a value of another kind or shape, or a state without moments; the message names the parameter.
    """
    name = slots.name_of(parameter)
    if not isinstance(values, Mapping):
        raise TypeError(f"{name}: its state must be a mapping, not {type(values).__name__}")
    result = Plan(parameter, name, partial=partial)
    for key, value in values.items():
        if key == "step":
            result.step = step_count(value, name)
        elif key in MOMENTS or key == "master":
            result.tensors[key] = check_tensor(value, key, name, parameter)
        elif key == "residual":
            tensor = check_tensor(value, key, name, parameter, integer=True)
            if tensor.dtype is torch.int16:
                result.tensors[key] = tensor
            else:
                # A loader that casts state to the parameter's dtype has destroyed it.
                warnings.warn(
                    f"{name}: its residual is {tensor.dtype}, not torch.int16, and is dropped",
                    stacklevel=2,
                )
        else:
            result.extra[key] = value
    if not partial and values and not {"exp_avg", "exp_avg_sq"} <= result.tensors.keys():
        keys = ", ".join(map(str, values))
        raise ValueError(f"{name}: its state has no exp_avg and exp_avg_sq (found: {keys})")
    if not partial and values and result.step is None:
        raise ValueError(f"{name}: its state has no step")
    _check_master(result)
    return result


def _check_master(result: Plan) -> None:
    """Drop what the parameter's dtype has no use for, with a warning."""
    dtype = result.parameter.dtype
    useless = set()
    if dtype is torch.float32:
        useless = result.tensors.keys() & {"master", "residual"}
    elif dtype is torch.float16:
        useless = result.tensors.keys() & {"residual"}
    for key in sorted(useless):
        del result.tensors[key]
        warnings.warn(f"{result.name}: its {key} is dropped, since the parameter is {dtype}", stacklevel=2)


def commit(slots: Slots, plans: list[Plan], reset: Iterable[torch.Tensor] = ()) -> None:
    """Load checked states and set those of `reset` to zero.

    A source may be the plane itself, or another plane of this optimizer. What has no plane is left in each plan's
    `extra`.
    """
    slots.bind([item.parameter for item in plans])
    planes = {id(item.parameter): slots.planes(item.parameter) for item in plans}
    resident = slots.resident.addresses()
    for item in plans:
        for key, tensor in item.tensors.items():
            target = planes[id(item.parameter)].get(key)
            is_state = tensor.device.type == "cpu" and slots.core.holds(tensor.data_ptr())
            is_state = is_state or (bool(resident) and tensor.untyped_storage().data_ptr() in resident)
            if is_state and (target is None or not _is_same(tensor, target)):
                item.tensors[key] = tensor.clone()
    for parameter in reset:
        slots.reset(parameter)
    for item in plans:
        _commit_one(slots, item, planes[id(item.parameter)])


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype


def _commit_one(slots: Slots, item: Plan, planes: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        if item.step is not None:
            planes["step"].fill_(item.step)
        elif not item.partial:
            planes["step"].zero_()
        for key in MOMENTS:
            plane, source = planes.get(key), item.tensors.get(key)
            if plane is None and source is not None:
                # Until the group turns amsgrad on.
                item.extra[key] = _sharded.like(source.clone(), item.parameter)
            elif plane is not None and source is not None:
                plane.copy_(source)
            elif plane is not None and not item.partial:
                plane.zero_()
        _commit_master(slots, item, planes)
    if not item.partial or planes.keys() <= item.tensors.keys() | {"step"}:
        slots.core.heal(item.parameter)


def _commit_master(slots: Slots, item: Plan, planes: dict[str, torch.Tensor]) -> None:
    parameter = item.parameter
    residual, master = item.tensors.get("residual"), item.tensors.get("master")
    if item.partial and residual is None and master is None:
        return
    slots.pending_residuals.pop(parameter, None)
    if "residual" in planes and residual is not None:
        planes["residual"].copy_(residual)
    elif "master" in planes and master is not None:
        planes["master"].copy_(master)
    elif "residual" in planes and master is not None:
        # The weight is the master's high half and stays what the model says.
        slots.write_master(parameter, master.to("cpu", torch.float32, copy=True), write_weight=False)
    elif "master" in planes and residual is not None:
        slots.pending_residuals[parameter] = residual.to("cpu", torch.float32, copy=True)
    else:
        slots.clear_master(parameter)


def merge_groups(
    groups: list[Group], saved_groups: list[Group], defaults: dict[str, Any], optimizer_name: str
) -> list[Group]:
    """Return the optimizer's groups with a checkpoint's settings.

    The class's rule of weight decay stays, with one warning if the checkpoint's is the other.
    """
    decoupled = defaults["decoupled_weight_decay"]
    result = []
    contradicted = False
    for group, saved in zip(groups, saved_groups, strict=True):
        merged = {key: value for key, value in saved.items() if key != "params"}
        for key, value in defaults.items():
            merged.setdefault(key, value)
        if "param_names" in group:
            merged.setdefault("param_names", group["param_names"])
        contradicted |= bool(merged["decoupled_weight_decay"]) != decoupled
        merged["decoupled_weight_decay"] = decoupled
        merged["params"] = group["params"]
        result.append(merged)
    if contradicted:
        kept = "decoupled (AdamW)" if decoupled else "coupled (Adam)"
        warnings.warn(
            f"the checkpoint was written by the other of Adam and AdamW; {optimizer_name} keeps its own rule, "
            f"weight decay {kept}",
            stacklevel=3,
        )
    return result
