"""Which modules' activations leave the device."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

#: Patterns of names, modules, or what says of a name and its module whether it is a block.
Chosen = Iterable[str | torch.nn.Module] | Callable[[str, torch.nn.Module], bool]


def choose(model: torch.nn.Module, blocks: Chosen | None) -> list[tuple[str, torch.nn.Module]]:
    """Return blocks with their names, in the order of the model's modules.

    Raises
    ------
    ValueError
        If nothing is chosen, a pattern or a module is not in the model, or a block is within another.
    TypeError
    """
    named = [(name or type(model).__name__, module) for name, module in model.named_modules()]
    if blocks is None:
        found = _layers(model, named)
    elif isinstance(blocks, (str, torch.nn.Module)):
        raise TypeError(f"blocks must be a list of names and modules, not {type(blocks).__name__}")
    elif callable(blocks):
        found = [(name, module) for name, module in named if blocks(name, module)]
    else:
        found = _listed(named, blocks)
    if not found:
        raise ValueError("no blocks: name modules of the model whose activations are to leave the device")
    inner = {id(child): name for name, module in found for child in module.modules() if child is not module}
    for name, module in found:
        if id(module) in inner:
            raise ValueError(f"the block {name} is within the block {inner[id(module)]}")
    return found


def _listed(
    named: list[tuple[str, torch.nn.Module]], blocks: Iterable[str | torch.nn.Module]
) -> list[tuple[str, torch.nn.Module]]:
    chosen: set[int] = set()
    for one in blocks:
        if isinstance(one, str):
            matching = {id(module) for name, module in named if fnmatchcase(name, one)}
        elif isinstance(one, torch.nn.Module):
            matching = {id(module) for _, module in named if module is one}
        else:
            raise TypeError(f"blocks must be names and modules, not {one!r}")
        if not matching:
            raise ValueError(f"no module of the model is {one if isinstance(one, str) else type(one).__name__}")
        chosen |= matching
    return [(name, module) for name, module in named if id(module) in chosen]


def _layers(model: torch.nn.Module, named: list[tuple[str, torch.nn.Module]]) -> list[tuple[str, torch.nn.Module]]:
    """Return the layers of the list of alike modules that holds the most parameters."""
    best: list[torch.nn.Module] = []
    most = 0
    for _, module in named:
        if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        children = list(module)
        kinds = {type(child) for child in children}
        size = sum(parameter.numel() for parameter in module.parameters())
        if len(kinds) == 1 and size > most:
            best, most = children, size
    chosen = set(map(id, best))
    return [(name, module) for name, module in named if id(module) in chosen]


def spaced(names: list[str], fraction: Any) -> set[str]:
    """Return a fraction of blocks, evenly spaced from the first on.

    Raises
    ------
    TypeError, ValueError
    """
    if isinstance(fraction, bool) or not isinstance(fraction, numbers.Real):
        raise TypeError(f"fraction must be a number, not {fraction!r}")
    if not 0.0 <= float(fraction) <= 1.0:
        raise ValueError(f"Invalid fraction: {fraction} (from 0 to 1)")
    return {names[index] for index in evenly(len(names), round(float(fraction) * len(names)))}


def evenly(length: int, count: int) -> list[int]:
    """Return so many indices of a list, evenly spaced from the first on."""
    return [index * length // count for index in range(count)]
