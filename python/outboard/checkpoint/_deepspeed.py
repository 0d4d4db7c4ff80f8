"""DeepSpeed's ZeRO of stages 1 and 2, with or without offloading: flat fp32 partitions, one file for each rank.

The layout is that of DeepSpeed 0.19: each rank's file says which part of which parameter it holds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from outboard.checkpoint._foreign import read_foreign

_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = "mp_rank_00_model_states.pt"
_SETTINGS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "decoupled_weight_decay",
    "initial_lr",
)
_RECIPE = "convert it with DeepSpeed itself first (load it into stage 1 or 2 and save it again)"


def from_deepspeed(
    folder: str | os.PathLike[str], *, shapes: Mapping[str, Any] | None = None, fp32_weights: bool | None = None
) -> dict[str, Any]:
    """Return the optimizer's state of a DeepSpeed checkpoint (ZeRO-1 or ZeRO-2, offloaded or not) in torch's layout.

    The files are read by torch's restricted unpickler; DeepSpeed is not needed, and none of its code runs. The ranks'
    partitions are merged.

    Parameters
    ----------
    folder : path
        What `save_checkpoint` has written: the folder of one tag, or the one above it, with its file `latest`.
    shapes : mapping of names to shapes, optional
        Shapes of the trained parameters by group's order, if the model's file is not there to say them.
    fp32_weights : bool, optional
        Whether the weights are fp32, and so their own masters; by default what the model's file says, else False.

    Returns
    -------
    dict
        `state` and `param_groups` with `param_names`, for `load_matched`. fp32 masters of 16-bit weights are `master`.

    Raises
    ------
    FileNotFoundError
        If there are no such files, or one of a rank is missing.
    ValueError
        If the layout is another: ZeRO-3, tensor parallelism, or fragments that do not make a parameter, by its name.
    """
    folder = _tag(Path(folder))
    ranks = [content["optimizer_state_dict"] for content in _rank_files(folder)]
    for rank in ranks:
        if "single_partition_of_fp32_groups" not in rank:
            raise ValueError(f"{folder} is not of ZeRO-1 or ZeRO-2 (keys: {', '.join(map(str, rank))}): {_RECIPE}")
    count = len(ranks[0]["single_partition_of_fp32_groups"])
    by_group, dtypes = _shapes(folder, shapes, count)
    state: dict[int, Any] = {}
    groups = []
    for index in range(count):
        settings = _settings(ranks[0]["base_optimizer_state"], index)
        fragments = [_fragments(rank, index) for rank in ranks]
        # With shapes that the caller has given, a group has the parameters that the ranks' files have of it.
        held = dict.fromkeys(name for rank in fragments for name in rank)
        names = list(held) if shapes is not None else list(by_group[index])
        for name in held.keys() - by_group[index].keys():
            raise ValueError(f"{name}: its shape is not known")
        first = len(state)
        for name in names:
            shape = by_group[index][name]
            pieces = [(number, *found[name]) for number, found in enumerate(fragments) if name in found]
            values = _merge(ranks, index, pieces, shape, name) if shape.numel() else {}
            if fp32_weights or (fp32_weights is None and dtypes.get(name) is torch.float32):
                values.pop("master", None)
            state[len(state)] = values
        groups.append({**settings, "params": list(range(first, len(state))), "param_names": names})
    return {"state": {number: values for number, values in state.items() if values}, "param_groups": groups}


def _tag(folder: Path) -> Path:
    latest = folder / "latest"
    return folder / latest.read_text().strip() if latest.is_file() else folder


def _rank_files(folder: Path) -> Iterator[Any]:
    found = {}
    for path in folder.iterdir():
        match = _FILE.fullmatch(path.name)
        if match and int(match[2]):
            raise ValueError(f"{path} is of a model that is itself sharded (tensor parallelism): {_RECIPE}")
        if match:
            found[int(match[1])] = path
    if not found:
        raise FileNotFoundError(f"{folder} has no zero_pp_rank_*_mp_rank_00_optim_states.pt")
    wanted = len(found)
    for rank in range(max(found) + 1):
        if rank not in found:
            raise FileNotFoundError(f"{folder} has no file of rank {rank}, though it has one of rank {max(found)}")
        content = read_foreign(found[rank])
        if "partition_count" in content["optimizer_state_dict"]:
            wanted = max([wanted, *map(int, content["optimizer_state_dict"]["partition_count"])])
        yield content
    if wanted != len(found):
        raise FileNotFoundError(f"{folder} has files of {len(found)} ranks, and its state is in {wanted} partitions")


def _shapes(
    folder: Path, shapes: Mapping[str, Any] | None, groups: int
) -> tuple[list[dict[str, torch.Size]], dict[str, torch.dtype]]:
    """Return the shapes of each group's parameters in order, and the dtypes of the weights."""
    if shapes is not None:
        given = {name: torch.Size(shape) for name, shape in shapes.items()}
        return [given] * groups, {}
    path = folder / _MODEL_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, which says the parameters' shapes: give them as shapes=")
    content = read_foreign(path)
    by_group = [
        {name: torch.Size(shape) for name, shape in group.items()} for group in content.get("param_shapes") or []
    ]
    if len(by_group) != groups:
        raise ValueError(f"{path} has shapes of {len(by_group)} groups, the optimizer's files have {groups}")
    weights = content.get("module") or {}
    return by_group, {name: value.dtype for name, value in weights.items() if isinstance(value, torch.Tensor)}


def _fragments(rank: Mapping[str, Any], index: int) -> dict[str, tuple[int, int]]:
    """Return where each parameter's part begins in a rank's partition, and how many elements it has."""
    mappings = rank.get("param_slice_mappings")
    if not mappings:
        raise ValueError(
            "the files do not say where each parameter is (no param_slice_mappings: DeepSpeed before 0.8): " + _RECIPE
        )
    return {name: (int(part.start), int(part.numel)) for name, part in mappings[index].items()}


def _base(rank: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Return a group's moments and step: of torch's layout, or with `elastic_checkpoint` a list."""
    base = rank["base_optimizer_state"]
    if isinstance(base, Mapping):
        return base["state"].get(base["param_groups"][index]["params"][0], {})  # type: ignore[no-any-return]
    step = rank.get("base_optimizer_state_step")
    return base[index] if step is None else {"step": step, **base[index]}


def _settings(base: Any, index: int) -> dict[str, Any]:
    if not isinstance(base, Mapping):
        return {}  # an elastic checkpoint has none
    group = base["param_groups"][index]
    return {key: tuple(group[key]) if key == "betas" else group[key] for key in _SETTINGS if key in group}


def _merge(
    ranks: list[Any], index: int, pieces: list[tuple[int, int, int]], shape: torch.Size, name: str
) -> dict[str, Any]:
    """Put a parameter's parts together, in the order of the ranks."""
    total = sum(count for _, _, count in pieces)
    if total != shape.numel():
        raise ValueError(f"{name}: its parts in the ranks' files have {total} elements, the parameter {shape.numel()}")
    flat: dict[str, list[torch.Tensor]] = {"exp_avg": [], "exp_avg_sq": [], "master": []}
    steps = []
    for rank, start, count in pieces:
        moments = _base(ranks[rank], index)
        master = ranks[rank]["single_partition_of_fp32_groups"][index]
        for key, parts in flat.items():
            source = master if key == "master" else moments.get(key)
            if source is None:
                raise ValueError(f"{name}: the file of rank {rank} has no {key}")
            if start + count > source.numel():
                raise ValueError(f"{name}: {key} of rank {rank} ends before its part does")
            parts.append(source.detach().view(-1)[start : start + count].float())
        steps.append(float(moments.get("step", 0)))
    if len(set(steps)) > 1:
        raise ValueError(f"{name}: the ranks' files are of different steps ({', '.join(map(str, steps))})")
    return {"step": steps[0], **{key: torch.cat(parts).view(shape) for key, parts in flat.items()}}
