"""The Newton-Schulz iteration: about the nearest matrix with orthonormal rows or columns, by matrix products in bf16.

The quintic and its coefficients are Keller Jordan's (https://kellerjordan.github.io/posts/muon/).
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

Triple = tuple[float, float, float]

#: Takes matrices and the coefficients of each step.
Iteration = Callable[[torch.Tensor, Sequence[Triple]], torch.Tensor]

#: The coefficients of X -> aX + b(XX')X + c(XX')^2 X.
COEFFICIENTS: Triple = (3.4445, -4.775, 2.0315)

#: The smallest norm that is divided by.
EPS = 1e-7

_is_compiled = True
#: What was compiled, by the shape and the coefficients.
_compiled: dict[Any, Iteration] = {}
_has_failed = False


def set_ns_compile(enabled: bool) -> None:
    """Turn compilation of the iteration on CUDA (`torch.compile`) on or off, for all optimizers of the process.

    It is on at first. Compiled, intermediate results are rounded less often, so bits differ; they are those of
    `torch.optim.Muon` when it is off. What is in host memory is never compiled.
    """
    global _is_compiled
    _is_compiled = bool(enabled)


def ns_compile() -> bool:
    """Whether the iteration is compiled on CUDA."""
    return _is_compiled


def can_be_together(device: torch.device) -> bool:
    """Whether matrices of the same shape may be orthogonalised in one call.

    Products of several matrices at once may add up in another order than those of each alone, on the CPU too (seen of
    small ones). With compilation off, bits are those of `torch.optim.Muon`, and matrices go one by one.
    """
    return device.type == "cuda" and _is_compiled and not _has_failed


def _iterate(x: torch.Tensor, coefficients: Sequence[Triple]) -> torch.Tensor:
    """Iterate on a matrix, or a stack of matrices, with no more rows than columns."""
    if x.ndim == 2:
        x = x / x.norm().clamp(min=EPS)
        for a, b, c in coefficients:
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _function(device: torch.device, shape: torch.Size, coefficients: Sequence[Triple]) -> Iteration:
    if not _is_compiled or _has_failed or device.type != "cuda":
        return _iterate
    key = shape, tuple(coefficients)
    if key not in _compiled:
        # torch compiles a code object for eight shapes and runs the others eagerly, with a line in the log. A copy for
        # each has no such limit.
        copy = types.FunctionType(_iterate.__code__.replace(), _iterate.__globals__, _iterate.__name__)
        _compiled[key] = torch.compile(copy, dynamic=False)
    return _compiled[key]


def orthogonalize(matrices: torch.Tensor, coefficients: Sequence[Triple]) -> torch.Tensor:
    """Return about the nearest semi-orthogonal matrices, in bf16.

    Parameters
    ----------
    matrices : Tensor, shape (..., rows, columns)
        One matrix, or a stack of them, each by itself; left as it is. Rounded to bf16 first.
    coefficients : sequence of triples
        Those of each step.

    Returns
    -------
    Tensor
        Of the same shape, in bf16.
    """
    global _has_failed
    x = matrices.bfloat16()
    if x.numel() == 0:
        return x
    if x.ndim > 3:
        x = x.reshape(-1, *x.shape[-2:])
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    function = _function(x.device, x.shape, coefficients)
    try:
        x = function(x, coefficients)
    except Exception as error:
        if function is _iterate or isinstance(error, torch.OutOfMemoryError):
            raise
        # Without a compiler, say.
        warnings.warn(
            f"Newton-Schulz could not be compiled ({type(error).__name__}: {error}), and runs without: "
            "outboard.muon.set_ns_compile(False) asks for that",
            stacklevel=2,
        )
        _has_failed = True
        x = _iterate(x, coefficients)
    return (x.mT if is_tall else x).reshape(matrices.shape)
