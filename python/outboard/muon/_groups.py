"""Muon's parameter groups: what they may hold, and the usual split of a model."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch

from outboard import _sharded
from outboard.muon._newton_schulz import Triple

Group = dict[str, Any]

#: How the learning rate grows with a matrix's shape.
ADJUSTMENTS = ("original", "match_rms_adamw")


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check_number(group: Group, key: str, *, below: float = math.inf) -> None:
    value = group[key]
    if not _is_number(value):
        raise TypeError(f"{key} must be a number, not {value!r}")
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return  # the host would wait for the device, in each step
    if not 0.0 <= float(value) < below:
        raise ValueError(f"Invalid {key}: {value}" + (f" (from 0 to below {below:g})" if below < math.inf else ""))


def _check_bool(group: Group, key: str) -> None:
    if not isinstance(group[key], bool):
        raise TypeError(f"{key} must be True or False, not {group[key]!r}")


def _check_count(value: object, key: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{key} must be a whole number, not {value!r}")
    if int(value) < least:
        raise ValueError(f"Invalid {key}: {value} (at least {least})")


def coefficients_of(group: Group) -> list[Triple]:
    """Return the coefficients of each Newton-Schulz step of a group.

    Raises
    ------
    TypeError, ValueError
    """
    given, steps = group["ns_coefficients"], group["ns_steps"]
    if not isinstance(given, (tuple, list)) or not given:
        raise TypeError(f"ns_coefficients must be three numbers, or a list of such triples, not {given!r}")
    is_one = all(map(_is_number, given))
    triples = [given] * steps if is_one else list(given)
    for triple in triples:
        if not isinstance(triple, (tuple, list)) or len(triple) != 3 or not all(map(_is_number, triple)):
            raise ValueError(f"ns_coefficients must be triples of numbers, not {triple!r}")
    if len(triples) != steps:
        raise ValueError(f"ns_coefficients has {len(triples)} triples for ns_steps={steps}")
    return [(float(a), float(b), float(c)) for a, b, c in triples]


def check_group(group: Group) -> None:
    """Check a group's settings; those of the other kind are not looked at.

    Raises
    ------
    TypeError, ValueError
    """
    if "use_muon" not in group:
        raise ValueError(
            "a parameter group says use_muon=True (matrices, by Muon) or use_muon=False (by AdamW): "
            "outboard.muon.param_groups(model) makes such groups"
        )
    _check_bool(group, "use_muon")
    _check_number(group, "lr")
    _check_number(group, "weight_decay")
    if group["use_muon"]:
        _check_number(group, "momentum", below=1.0)
        _check_count(group["ns_steps"], "ns_steps", 1)
        coefficients_of(group)
        _check_bool(group, "nesterov")
        _check_bool(group, "none_grad")
        if group["adjust_lr"] not in ADJUSTMENTS:
            raise ValueError(f"adjust_lr must be one of {', '.join(ADJUSTMENTS)}, not {group['adjust_lr']!r}")
        if group.get("flatten") not in (None, True, False):
            raise ValueError(f"flatten must be None, True or False, not {group['flatten']!r}")
        _check_count(group.get("split", 1), "split", 1)
    else:
        betas = group["adamw_betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise TypeError(f"adamw_betas must be a pair of numbers, not {betas!r}")
        for beta in betas:
            _check_number({"adamw_betas": beta}, "adamw_betas", below=1.0)
        _check_number(group, "adamw_eps")


def check_options(chunk_size: object, warmup_step: object) -> None:
    """Check the constructor's own options.

    Raises
    ------
    TypeError, ValueError
    """
    _check_count(chunk_size, "chunk_size", -1)
    if chunk_size == 0:
        raise ValueError("Invalid chunk_size: 0 (a number of matrices, or -1: four per rank)")
    _check_count(warmup_step, "warmup_step", 0)


def check_parameter(parameter: torch.Tensor, group: Group, name: str) -> None:
    """Check that a parameter can be in its group.

    Raises
    ------
    TypeError, ValueError
    """
    if not parameter.is_floating_point():
        raise TypeError(f"{name}: its dtype is {parameter.dtype}; Muon updates floating-point parameters")
    if group["use_muon"] and parameter.ndim < 2:
        raise ValueError(
            f"{name}: Muon updates matrices, and its shape is {tuple(parameter.shape)}: put it into a group with "
            "use_muon=False"
        )
    split = group.get("split", 1)
    if group["use_muon"] and split > 1 and (parameter.ndim != 2 or parameter.shape[0] % split):
        raise ValueError(f"{name}: its shape {tuple(parameter.shape)} is not {split} matrices on top of each other")


def names_of(group: Group) -> list[str] | None:
    """Return the names of a group's parameters, if it has them.

    Raises
    ------
    ValueError
        If there are more or fewer names than parameters.
    """
    names = group.get("names") or group.get("param_names")
    if names is None:
        return None
    if len(names) != len(group["params"]):
        raise ValueError(f"a group has {len(names)} names for {len(group['params'])} parameters")
    return list(names)


def as_matrices(tensor: torch.Tensor, flatten: bool | None, split: int = 1) -> torch.Tensor:
    """Return a tensor as the matrix, or the stack of matrices, that Muon takes it for.

    Three dimensions are a stack of matrices (experts), more are one matrix with a row for each index of the first
    (convolutions). `flatten` decides otherwise. A matrix may be `split` ones on top of each other.
    """
    if tensor.ndim == 2:
        return tensor if split == 1 else tensor.reshape(split, tensor.shape[0] // split, tensor.shape[1])
    if flatten is None:
        flatten = tensor.ndim > 3
    # Written out: of no elements, torch cannot tell a size of -1.
    if flatten:
        return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    return tensor.reshape(math.prod(tensor.shape[:-2]), *tensor.shape[-2:])


def matrix_shape(shape: torch.Size, flatten: bool | None, split: int = 1) -> tuple[int, int]:
    """Return rows and columns of each of the matrices that a shape stands for."""
    if len(shape) == 2:
        return shape[0] // split, shape[1]
    if len(shape) > 2 and (len(shape) > 3 if flatten is None else flatten):
        return shape[0], math.prod(shape[1:])
    return shape[-2], shape[-1]


def adjusted_lr(lr: Any, how: str, shape: tuple[int, int]) -> Any:
    """Return the learning rate for matrices of a shape, as `torch.optim.Muon` defines it."""
    rows, columns = shape
    if how == "original":
        # Of no columns there is nothing to scale.
        return lr * math.sqrt(max(1.0, rows / max(columns, 1)))
    return lr * (0.2 * math.sqrt(max(rows, columns)))


#: Names of last layers, whose outputs are not features.
_HEADS = ("lm_head", "head", "output", "embed_out", "classifier", "score")
_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.ConvTranspose1d)


def param_groups(
    model: torch.nn.Module, is_muon: Callable[[str, torch.Tensor], bool] | None = None, **settings: Any
) -> list[Group]:
    """Split a model's parameters as is usual: matrices by Muon; embeddings, head, norms and biases by AdamW.

    Parameters
    ----------
    model : Module
    is_muon : callable, optional
        Takes a parameter's name and the parameter, and says whether Muon is to update it; parameters with fewer than
        two dimensions cannot be. Unless given: all with two dimensions or more, but for

        - weights of `nn.Embedding` and `nn.EmbeddingBag` (also where another module shares them), and parameters whose
          own name contains embed, such as pos_embed,
        - the head: the weight of a linear layer whose name ends in lm_head, head, output, embed_out, classifier or
          score, or that has as many outputs as an embedding has entries,
        - norms: what modules hold whose class has Norm in its name,
        - biases: parameters whose own name is bias, or begins or ends so (bias_k, in_proj_bias),
        - what has one row or one column: a direction, which orthogonalising would only normalise.
    **settings
        Put into all groups, such as ``lr=1e-3``.

    Returns
    -------
    list of dict
        Up to three groups with ``names``: matrices (and stacks of them), weights of 1-d convolutions
        (``flatten=True``), the rest. Frozen parameters are in them, so that they can be unfrozen; tied ones are there
        once.
    """
    others, flat = set(), set()
    embeddings = [one for one in model.modules() if isinstance(one, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
    entries = {module.num_embeddings for module in embeddings}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            named = name.rpartition(".")[2] in _HEADS
            if named or module.out_features in entries:
                others.add(id(module.weight))
        if isinstance(module, _CONVOLUTIONS):
            flat.add(id(module.weight))
        is_other = module in embeddings or "Norm" in type(module).__name__
        for own, parameter in module.named_parameters(recurse=False):
            if is_other or "embed" in own or own.startswith("bias") or own.endswith("_bias"):
                others.add(id(parameter))

    def usual(_: str, parameter: torch.Tensor) -> bool:
        rows, columns = matrix_shape(parameter.shape, True if id(parameter) in flat else None)
        return id(parameter) not in others and min(rows, columns) > 1

    chosen = usual if is_muon is None else is_muon
    groups: list[Group] = [
        {"use_muon": True, **settings, "params": [], "names": []},
        {"use_muon": True, "flatten": True, **settings, "params": [], "names": []},
        {"use_muon": False, **settings, "params": [], "names": []},
    ]
    for name, parameter in model.named_parameters():
        if not (parameter.ndim >= 2 and chosen(name, parameter)):
            group = groups[2]
        else:
            group = groups[1] if id(parameter) in flat else groups[0]
        group["params"].append(parameter)
        group["names"].append(name)
    return [group for group in groups if group["params"]]


def check_gradient(parameter: torch.Tensor, name: str) -> None:
    """Refuse gradients that cannot be used.

    Raises
    ------
    RuntimeError
    """
    grad = parameter.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise RuntimeError(f"{name}: Muon does not support sparse gradients (its layout is {grad.layout})")
    if _sharded.is_sharded(parameter) != _sharded.is_sharded(grad):
        raise RuntimeError(f"{name}: of the parameter and its gradient, one is a DTensor and the other is not")


def check_loaded(groups: list[Group], state_dict: dict[str, Any], names: list[list[str]]) -> None:
    """Refuse a state dict that these groups could not be stepped with; torch looks at the number of parameters only.

    Parameters
    ----------
    groups : list of dict
        The optimizer's.
    state_dict : dict
        As of `Muon.state_dict`.
    names : list of list of str
        Of the parameters of each group.

    Raises
    ------
    TypeError, ValueError
    """
    saved = state_dict["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        return  # torch says so
    for group, own, theirs in zip(groups, names, saved, strict=True):
        check_group(theirs)
        for parameter, name, index in zip(group["params"], own, theirs["params"], strict=True):
            check_parameter(parameter, theirs, name)
            state = state_dict["state"].get(index, {})
            for key in ("momentum_buffer",) if theirs["use_muon"] else ("moment1", "moment2"):
                value = state.get(key)
                if value is None and not state:
                    continue
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else value
                # A rank's own part of a DTensor, or the whole.
                if shape not in (tuple(parameter.shape), tuple(_sharded.local(parameter).shape)):
                    raise ValueError(
                        f"{key} of {name} is {'missing' if value is None else shape} in what is loaded, and the "
                        f"parameter is {tuple(parameter.shape)}"
                    )
