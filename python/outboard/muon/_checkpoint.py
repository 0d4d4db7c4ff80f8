"""Muon's checkpoints: hooks around `state_dict` and `load_state_dict`, for state that may be on the host."""

from __future__ import annotations

from typing import Any

import torch

from outboard import _sharded
from outboard._offload._hollow import HollowStates, shell_like
from outboard.muon import _groups


def register(optimizer: Any) -> None:
    """Put the hooks in place. They are functions: the optimizer's own methods would keep it."""
    optimizer.register_state_dict_pre_hook(_before_state_dict)
    optimizer.register_state_dict_post_hook(_after_state_dict)
    optimizer.register_load_state_dict_pre_hook(_before_load)
    optimizer.register_load_state_dict_post_hook(_after_load)


def _guard(optimizer: Any, when: str) -> bool:
    """Whether state is on the host; refuse checkpoints then unless they were asked for."""
    if not optimizer._cpu_offload:
        return False
    if not optimizer._can_checkpoint:
        raise RuntimeError(
            f"Muon's state is on the host: call turn_off_cpu_offload() before checkpoint {when}, or turn it on by "
            "turn_on_cpu_offload(checkpoint=True)"
        )
    return optimizer._hollow is not None


def _before_state_dict(optimizer: Any) -> None:
    if _guard(optimizer, "save"):
        optimizer._hollow.carriers.settle()


def _after_state_dict(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    hollow: HollowStates | None = optimizer._hollow
    if hollow is None:
        return None

    def exported(value: Any) -> Any:
        host = hollow.host_of(value) if isinstance(value, torch.Tensor) else None
        return value if host is None else host.clone()

    state_dict["state"] = {
        index: {key: exported(value) for key, value in state.items()} if isinstance(state, dict) else state
        for index, state in state_dict["state"].items()
    }
    return state_dict


def _before_load(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    is_on_host = _guard(optimizer, "load")
    names = [optimizer._names(group, index) for index, group in enumerate(optimizer.param_groups)]
    _groups.check_loaded(optimizer.param_groups, state_dict, names)
    if not is_on_host:
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    if len(ids) != len(parameters):
        return None  # torch says what is wrong with it
    of_id = dict(zip(ids, parameters, strict=True))
    kept: dict[Any, Any] = {}
    loading = []
    for index, entry in state_dict["state"].items():
        parameter = of_id.get(index)
        if parameter is None or not isinstance(entry, dict):
            kept[index] = entry
            continue
        kept[index] = {}
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                own = _sharded.part_of(value, parameter, f"{key} of a parameter")
                loading.append((parameter, key, own))
            else:
                kept[index][key] = value
    # torch would bring them to the device.
    optimizer._loading = ({parameter: dict(state) for parameter, state in optimizer.state.items()}, loading)
    return {**state_dict, "state": kept}


def _after_load(optimizer: Any) -> None:
    found = optimizer.__dict__.pop("_loading", None)
    hollow: HollowStates | None = optimizer._hollow
    if hollow is None:
        # torch keeps the very tensors that were loaded where they fit, and a step would change the checkpoint.
        for state in optimizer.state.values():
            state.update({key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)})
    if found is None or hollow is None:
        return
    before, loading = found
    hollow.carriers.settle()
    made: list[tuple[str, torch.Tensor]] = []
    values: dict[int, torch.Tensor] = {}
    for parameter, key, own in loading:
        tensor = before.get(parameter, {}).get(key)
        host = None if tensor is None else hollow.host_of(tensor)
        if host is not None and host.shape == _sharded.like(own, parameter).shape:
            hollow.write(tensor, own)
        else:
            tensor = shell_like(_sharded.local(parameter), parameter)
            if tensor is None:
                tensor = _sharded.like(torch.empty_like(_sharded.local(parameter)).copy_(own), parameter)
            else:
                made.append((f"{key} of a parameter", tensor))
                values[id(tensor)] = own
        optimizer.state[parameter][key] = tensor
    hollow.take(made, values)
    hollow.keep_only(tensor for _, tensor in optimizer._named_states())
