"""Which of a checkpoint's parameters is which of an optimizer's: by name where both have names, else by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

#: State that has the shape of its parameter.
_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "residual", "master")

Group = dict[str, Any]


def load_matched(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], *, model: torch.nn.Module | None = None
) -> None:
    """Load a state dict whose parameters may be in another order: `optimizer.load_state_dict`, matched by names.

    A parameter's name is what `param_names` of its group says, as groups have them that were made of
    `model.named_parameters()`. If the optimizer or the checkpoint has no names, order and groups must be the same.
    Settings of a group that the checkpoint does not have stay as they are.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any of torch's layout, not only outboard's.
    state_dict : mapping
        `state` and `param_groups`, as from `state_dict()` or a converter of this module.
    model : Module, optional
        Says the names if the optimizer's groups have none.

    Raises
    ------
    ValueError
        Naming the parameter, if the checkpoint does not know it, or knows one more, or if a state has another shape;
        nothing is loaded then.
    """
    optimizer.load_state_dict(arrange(optimizer, state_dict, model=model))


def arrange(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], *, model: torch.nn.Module | None = None
) -> dict[str, Any]:
    """Return a state dict in the optimizer's order of groups and parameters; nothing of it is copied."""
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    if len(groups) != len(saved_groups):
        raise ValueError(
            f"the checkpoint has {len(saved_groups)} parameter groups, the optimizer {len(groups)}: "
            "make the optimizer with the groups it was saved with"
        )
    names = _names(groups, model)
    saved_names = _names(saved_groups, None)
    if names is None or saved_names is None:
        order = _by_position(groups, saved_groups)
    else:
        order = _by_name(groups, names, saved_names, saved_groups)
    numbers: dict[int, int] = {}
    state: dict[Any, Any] = {}
    arranged, position = [], 0
    for index, (group, (saved, keys)) in enumerate(zip(groups, order, strict=True)):
        listed = []
        for place, (parameter, key) in enumerate(zip(group["params"], keys, strict=True)):
            number = numbers.setdefault(id(parameter), position)
            position += 1
            listed.append(number)
            # Listed twice, it has one state.
            if key in state_dict["state"] and number not in state:
                values = state_dict["state"][key]
                _check_shapes(values, parameter, _name(group, names, index, place))
                state[number] = values
        entry = {name: value for name, value in saved.items() if name not in ("params", "param_names")}
        # Settings that the checkpoint does not have stay: other libraries' have only some.
        entry.update({name: group[name] for name in optimizer.defaults if name in group and name not in entry})
        if "param_names" in group:
            entry["param_names"] = list(group["param_names"])
        elif "param_names" in saved and names is None:
            entry["param_names"] = list(saved["param_names"])
        arranged.append({**entry, "params": listed})
    known = {key for saved in saved_groups for key in saved["params"]}
    # What belongs to no parameter is taken over as it is, as torch does.
    state.update({key: value for key, value in state_dict["state"].items() if key not in known and key not in state})
    rest = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
    return {"state": state, "param_groups": arranged, **rest}


def _by_position(groups: Sequence[Group], saved_groups: Sequence[Group]) -> list[tuple[Group, list[Any]]]:
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        found, wanted = len(saved["params"]), len(group["params"])
        if found != wanted:
            first = min(found, wanted)
            what = _name(group, None, index, first) if first < wanted else f"parameter {first} of group {index}"
            raise ValueError(
                f"group {index} of the checkpoint has {found} parameters, the optimizer's {wanted}; {what} is the "
                "first that only one of them has"
            )
    return [(saved, list(saved["params"])) for saved in saved_groups]


def _by_name(
    groups: Sequence[Group], names: list[list[str]], saved_names: list[list[str]], saved_groups: Sequence[Group]
) -> list[tuple[Group, list[Any]]]:
    found = {
        name: (index, key)
        for index, saved in enumerate(saved_groups)
        for name, key in zip(saved_names[index], saved["params"], strict=True)
    }
    wanted = {
        name: parameter
        for listed, group in zip(names, groups, strict=True)
        for name, parameter in zip(listed, group["params"], strict=True)
    }
    for name, parameter in wanted.items():
        # DeepSpeed leaves out parameters without elements.
        if name not in found and parameter.numel():
            raise ValueError(f"{name}: the checkpoint does not know this parameter")
    for name in found:
        if name not in wanted:
            raise ValueError(f"{name}: the checkpoint has this parameter, the optimizer has not")
    result = []
    for index, group in enumerate(names):
        sources: dict[int, str] = {}
        for name in group:
            if name in found:
                sources.setdefault(found[name][0], name)
        if len(sources) > 1:
            (one, name), (two, other) = list(sources.items())[:2]
            raise ValueError(
                f"{other}: it is in one group with {name}, and the checkpoint has them in groups {two} and {one}, each "
                "with settings of its own"
            )
        source = next(iter(sources), index)
        result.append((saved_groups[source], [found.get(name, (source, None))[1] for name in group]))
    return result


def _names(groups: Sequence[Group], model: torch.nn.Module | None) -> list[list[str]] | None:
    """Return each group's names, or None if any is unknown or stands for two parameters."""
    by_id = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    result: list[list[str]] = []
    owner: dict[Any, Any] = {}
    for group in groups:
        given = group.get("param_names")
        if given is None or len(given) != len(group["params"]):
            given = [by_id.get(id(parameter)) for parameter in group["params"]]
        if any(name is None for name in given):
            return None
        for name, parameter in zip(given, group["params"], strict=True):
            # In a checkpoint a parameter is a number.
            identity = id(parameter) if isinstance(parameter, torch.Tensor) else parameter
            if owner.setdefault(name, identity) != identity:
                return None
        result.append([str(name) for name in given])
    return result


def _name(group: Group, names: list[list[str]] | None, index: int, place: int) -> str:
    if names is not None:
        return names[index][place]
    given = group.get("param_names")
    if given is not None and place < len(given):
        return str(given[place])
    return f"parameter {place} of group {index}, shape {tuple(group['params'][place].shape)}"


def _check_shapes(values: Any, parameter: torch.Tensor, name: str) -> None:
    if not isinstance(values, Mapping):
        raise TypeError(f"{name}: its state must be a mapping, not {type(values).__name__}")
    for key in _SHAPED:
        value = values.get(key)
        if isinstance(value, torch.Tensor) and value.shape != parameter.shape:
            found, wanted = tuple(value.shape), tuple(parameter.shape)
            raise ValueError(f"{name}: {key} has shape {found}, the parameter {wanted}")


__all__ = ["arrange", "load_matched"]
