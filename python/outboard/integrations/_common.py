"""What the frameworks have in common: an optimizer behind wrappers, and options that contradict the framework's."""

from __future__ import annotations

from typing import Any

from outboard._optimizer import OffloadedOptimizer


def unwrap(optimizer: Any, instead: str) -> OffloadedOptimizer:
    """Return the outboard optimizer behind a framework's wrappers.

    Raises
    ------
    TypeError
        If there is none; the message says what to do `instead`.
    """
    inner = optimizer
    while not isinstance(inner, OffloadedOptimizer) and getattr(inner, "optimizer", None) is not None:
        inner = inner.optimizer
    if not isinstance(inner, OffloadedOptimizer):
        raise TypeError(f"the optimizer is a {type(inner).__name__}, none of outboard's: {instead}")
    return inner


def uses_gradients_in_backward(optimizer: OffloadedOptimizer) -> bool:
    """Whether gradients may be gone before the framework looks at them."""
    return optimizer.eager is True or optimizer.offload_gradients


def check_accumulation(optimizer: OffloadedOptimizer, steps: int, setting: str) -> None:
    """Refuse another number of backward passes in a step than the framework's, where it matters.

    Elsewhere gradients add up in `p.grad`, and updates begin at `step()`.

    Raises
    ------
    ValueError
        With the framework's `setting` by name.
    """
    if steps != optimizer.accumulation_steps and uses_gradients_in_backward(optimizer):
        raise ValueError(
            f"{setting} is {steps}, and the optimizer's accumulation_steps is {optimizer.accumulation_steps}: with "
            f"eager=True or offload_gradients=True it has to be told, accumulation_steps={steps}"
        )
