"""Nested Python values as JSON beside tensors, and back to the same types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: The key of an object that stands for what JSON has no word for.
_TAG = "$"


def encode(value: Any, where: str, keep: Callable[[torch.Tensor, str], str]) -> Any:
    """Return what JSON can hold of a value.

    Parameters
    ----------
    value : object
        None, bools, numbers, strings, dtypes, tensors; lists, tuples, sets and dicts of them, with keys of those kinds.
    where : str
        What the value is, for messages and for the names of tensors.
    keep : callable
        Takes a tensor and what it is, and returns the name it is kept under.

    Raises
    ------
    TypeError
        Saying what and where, for a value of another kind.
    """
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", "name": keep(value, where)}
    if isinstance(value, (bool, type(None), str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "value": str(float(value))}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return {_TAG: "size", "items": [int(item) for item in value]}
    if isinstance(value, list):
        return [encode(item, f"{where}.{number}", keep) for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": encode(list(value), where, keep)}
    if isinstance(value, (set, frozenset)):
        return {_TAG: "set", "items": encode(sorted(value, key=repr), where, keep)}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: encode(item, f"{where}.{key}", keep) for key, item in value.items()}
        pairs = [
            [encode(key, f"a key of {where}", keep), encode(item, f"{where}.{key}", keep)]
            for key, item in value.items()
        ]
        return {_TAG: "dict", "items": pairs}
    raise TypeError(
        f"{where} is of type {type(value).__name__}, which is neither a tensor nor anything that JSON holds"
    )


def decode(value: Any, find: Callable[[str], torch.Tensor]) -> Any:
    """Return what `encode` was given.

    Parameters
    ----------
    value : object
        What `encode` returned.
    find : callable
        Returns the tensor that is kept under a name.

    Raises
    ------
    ValueError
        For an object of a kind that `encode` does not write.
    """
    if isinstance(value, list):
        return [decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(item, find) for key, item in value.items()}
    if kind == "tensor":
        return find(value["name"])
    if kind == "float":
        return float(value["value"])
    if kind == "dtype":
        dtype = getattr(torch, value["value"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"this torch has no dtype {value['value']!r}")
        return dtype
    if kind == "size":
        return torch.Size(value["items"])
    if kind == "tuple":
        return tuple(decode(value["items"], find))
    if kind == "set":
        return set(decode(value["items"], find))
    if kind == "dict":
        return {decode(key, find): decode(item, find) for key, item in value["items"]}
    raise ValueError(f"a value of the unknown kind {kind!r}")
