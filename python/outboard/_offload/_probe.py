"""What state torch's own optimizers keep of a parameter, found out beforehand on a tiny one in host memory."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from outboard import _sharded

#: Settings that tie a group to its device.
_HOST_SETTINGS = {"capturable": False, "fused": None, "foreach": False, "differentiable": False}


@dataclass(frozen=True)
class Expected:
    """What one parameter's state takes: the keys of all its tensors, and the bytes per element of those like it."""

    keys: frozenset[str]
    #: By key: bytes per element of the parameter.
    bytes_per_element: dict[str, int]


def expected_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> Expected | None:
    """Step a 4-element parameter of the same dtype with a group's settings; None where that says nothing.

    Only torch's own classes are asked: what another's kernels do with host memory nobody knows.
    """
    if type(optimizer).__module__.partition(".")[0] != "torch" or not parameter.is_floating_point():
        return None
    step: Any = getattr(type(optimizer).step, "__wrapped__", None)
    if step is None:
        return None
    shape = [2] * max(parameter.dim(), 1)
    tiny = torch.zeros(shape, dtype=parameter.dtype, requires_grad=True)
    tiny.grad = torch.zeros_like(tiny)
    double: Any = object.__new__(type(optimizer))
    double.__dict__.update(optimizer.__dict__)
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
    settings.update({key: value for key, value in _HOST_SETTINGS.items() if key in settings})
    settings = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in settings.items()}
    double.param_groups = [{**settings, "params": [tiny]}]
    double.state = defaultdict(dict)
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            step(double)
    except Exception:
        return None
    state = double.state.get(tiny, {})
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    like = {key: value.element_size() for key, value in tensors.items() if value.shape == tiny.shape}
    return Expected(frozenset(tensors), like)


def expected_bytes(expected: Expected | None, parameter: torch.Tensor, keys: frozenset[str] | None) -> int:
    """Return the bytes that a parameter's state will have on this rank, about."""
    numel = _sharded.local(parameter).numel()
    if expected is None:
        # Two moments in fp32 are what most keep.
        return 8 * numel
    return sum(numel * size for key, size in expected.bytes_per_element.items() if keys is None or key in keys)
