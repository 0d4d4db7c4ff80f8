"""torchao's optimizers: state that is offloaded by parameter, and moments of 8 or 4 bits or fp8.

The layouts are those that torchao 0.18 writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

#: torchao leaves out what its optimizers call it: settings that torch's AdamW has not.
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay", "initial_lr")


def from_torchao(
    state_dict: Mapping[str, Any], params: Iterable[Any] | None = None, *, minimal_size: int = 4096
) -> dict[str, Any]:
    """Return the state dict of a torchao optimizer in torch's layout.

    Parameters
    ----------
    state_dict : mapping
        Of `torchao.optim.CPUOffloadOptimizer`, or of Adam or AdamW of 8 bits, 4 bits or fp8, from `read_foreign`.
    params : iterable of tensors, of (name, tensor) or of groups
        What the CPUOffloadOptimizer was made with, in the same order: its state dict does not say which parameter a
        state belongs to. Not needed for the others.
    minimal_size : int
        The CPUOffloadOptimizer's own `minimal_size`: smaller parameters were not offloaded.

    Returns
    -------
    dict
        `state` and `param_groups`, for `load_state_dict` of an optimizer of the same groups. Quantised moments become
        fp32.

    Raises
    ------
    ValueError, TypeError
        If the state does not fit the parameters, or is of another layout; the message says where.
    """
    if "offloaded" in state_dict:
        if params is None:
            raise ValueError("the state of a CPUOffloadOptimizer names no parameters: give those it was made with")
        return _from_offloaded(state_dict, _groups(params), minimal_size)
    return {
        "state": {
            number: _state(values, f"parameter {number}") for number, values in dict(state_dict["state"]).items()
        },
        "param_groups": [{**_settings(group), "params": list(group["params"])} for group in state_dict["param_groups"]],
    }


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    listed = list(params)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    result = []
    for group in groups:
        members = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        named = bool(members) and isinstance(members[0], tuple)
        result.append(
            {
                "params": [member[1] for member in members] if named else members,
                **({"param_names": [member[0] for member in members]} if named else {}),
            }
        )
    return result


def _from_offloaded(state_dict: Mapping[str, Any], groups: list[dict[str, Any]], minimal_size: int) -> dict[str, Any]:
    """Each large parameter has a state dict of its own, in order; the small ones share one."""
    offloaded = list(state_dict["offloaded"])
    on_device = state_dict.get("on-device", {"state": {}, "param_groups": []})
    is_large = [[p.requires_grad and p.numel() >= minimal_size for p in group["params"]] for group in groups]
    is_small = [[p.requires_grad and p.numel() < minimal_size for p in group["params"]] for group in groups]
    large, small = sum(map(sum, is_large)), [sum(group) for group in is_small if any(group)]
    if large != len(offloaded) or small != [len(group["params"]) for group in on_device["param_groups"]]:
        raise ValueError(
            f"the checkpoint has {len(offloaded)} offloaded parameters and "
            f"{[len(group['params']) for group in on_device['param_groups']]} on the device in groups; of those given "
            f"{large} have at least {minimal_size} elements and {small} have fewer: give the parameters, and "
            "minimal_size, that the optimizer was made with"
        )
    own, shared = iter(offloaded), iter(on_device["param_groups"])
    state: dict[int, Any] = {}
    result, number = [], 0
    for group, larges, smalls in zip(groups, is_large, is_small, strict=True):
        settings = None
        here = next(shared) if any(smalls) else None
        keys = iter(here["params"] if here is not None else [])
        numbers = []
        for place, parameter in enumerate(group["params"]):
            name = group["param_names"][place] if "param_names" in group else f"parameter {number}"
            values: Mapping[str, Any] = {}
            if larges[place]:
                single = next(own)
                values = single["state"].get(single["param_groups"][0]["params"][0], {})
                settings = settings or single["param_groups"][0]
            elif smalls[place]:
                values = on_device["state"].get(next(keys), {})
            if values:
                state[number] = _state(values, name)
                _check_shape(state[number], parameter, name)
            numbers.append(number)
            number += 1
        # Without a parameter that is trained there is nothing that says a group's settings.
        found = settings or here or {}
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        result.append({**_settings(found), **names, "params": numbers})
    return {"state": state, "param_groups": result}


def _check_shape(state: Mapping[str, Any], parameter: torch.Tensor, name: str) -> None:
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
            found, wanted = tuple(value.shape), tuple(parameter.shape)
            raise ValueError(f"{name}: {key} has shape {found}, the parameter {wanted}")


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: group[key] for key in _SETTINGS if key in group}
    # torchao keeps the learning rate in a tensor.
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in settings.items()}


def _state(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: _dequantise(value, f"{name}: {key}") for key, value in values.items()}


def _dequantise(value: Any, where: str) -> Any:
    """Return the fp32 values of a quantised moment; what is not quantised is returned as it is."""
    codes, scale = getattr(value, "codes", None), getattr(value, "scale", None)
    if codes is None or scale is None:
        if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor:
            raise TypeError(f"{where} is a {type(value).__name__}, whose layout is not known")
        return value
    shape = value.shape
    qmap = getattr(value, "qmap", None)
    if qmap is not None and codes.numel() * 2 == shape.numel():
        # Two codes of 4 bits in a byte, the first in its upper half.
        codes = torch.stack([codes >> 4, codes & 15], dim=-1)
    if codes.numel() != shape.numel() or scale.numel() == 0 or codes.numel() % scale.numel():
        raise ValueError(f"{where}: {codes.numel()} codes and {scale.numel()} scales do not make {tuple(shape)}")
    numbers = codes.float() if qmap is None else qmap[codes.int()]
    return (numbers.view(scale.numel(), -1) * scale.view(-1, 1)).view(shape)
