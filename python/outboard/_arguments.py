"""Checks of what users pass in: torch's rules, torch's exception types, messages that say what was found."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any, SupportsIndex

import torch

#: Settings a parameter group may carry, with the rule each obeys.
_NUMBERS = {
    "lr": "learning rate",
    "eps": "epsilon value",
    "weight_decay": "weight_decay value",
}


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_group(group: dict[str, Any], where: str = "") -> None:
    """Check the hyperparameters of a group (or of the constructor).

    Parameters
    ----------
    group : dict
        Must hold `lr`, `betas`, `eps` and `weight_decay`; may hold `capturable` and `differentiable`.
    where : str
        Put behind the message, such as ``" in parameter group 1"``.

    Raises
    ------
    TypeError
        For a value that is not a number (or a one-element tensor).
    ValueError
        For a value out of range, NaN included; the texts are torch's. For `capturable` or `differentiable`, which ask
        for what a step outside CUDA graphs and autograd cannot do.
    """
    if group.get("differentiable"):
        raise ValueError(f"differentiable=True is not supported: the step runs outside autograd{where}")
    if group.get("capturable"):
        raise ValueError(f"capturable=True is not supported: the step runs on the host, outside CUDA graphs{where}")
    for key, called in _NUMBERS.items():
        value = group[key]
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ValueError(f"Tensor {key} must be 1-element{where}")
        if not _is_number(value):
            raise TypeError(f"{key} must be a number, not {value!r}{where}")
        if not float(value) >= 0.0 or math.isinf(float(value)):
            raise ValueError(f"Invalid {called}: {value}{where}")
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas must be a pair of numbers, not {betas!r}{where}")
    for index, beta in enumerate(betas):
        if isinstance(beta, torch.Tensor) and beta.numel() != 1:
            raise ValueError(f"Tensor betas[{index}] must be 1-element{where}")
        if not _is_number(beta):
            raise TypeError(f"betas[{index}] must be a number, not {beta!r}{where}")
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}{where}")
    if isinstance(betas[0], torch.Tensor) != isinstance(betas[1], torch.Tensor):
        raise ValueError(f"betas must be either both floats or both Tensors{where}")


def check_torch_switches(
    *,
    lr: object,
    betas: tuple[object, object],
    foreach: bool | None,
    fused: bool | None,
) -> None:
    """Check the switches by which torch chooses among its own implementations.

    `foreach` and `fused` are accepted and change nothing: there is one implementation. As in torch, the constructor's
    are checked, those of groups are not.
    """
    if foreach:
        for name, value in (("lr", lr), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
            if isinstance(value, torch.Tensor):
                raise ValueError(f"{name} as a Tensor is not supported for capturable=False and foreach=True")
    if fused and foreach:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise a ValueError that lists the allowed values. 1 is not True: who asks `is True` later would miss it."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
        listed = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{name} must be one of {listed}, not {value!r}")


def check_count(name: str, value: object, most: int = 2**62) -> int:
    """Return `value` as an int from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an int, not {value!r}")
    value = operator.index(value)
    if not 1 <= value <= most:
        raise ValueError(f"{name} must be at least 1 and at most {most}, not {value}")
    return value


def check_max_grad_norm(value: object) -> float | None:
    """Return the norm to clip to as a float, or None."""
    if value is None:
        return None
    if not _is_number(value):
        raise TypeError(f"max_grad_norm must be a number or None, not {value!r}")
    norm = float(value)  # type: ignore[arg-type]
    if not norm >= 0.0:
        raise ValueError(f"max_grad_norm must be at least 0, not {value}")
    return norm
