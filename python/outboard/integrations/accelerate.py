"""outboard with Hugging Face accelerate: `attach` after `accelerator.prepare`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from outboard._optimizer import OffloadedOptimizer
from outboard.integrations._common import check_accumulation, unwrap

#: Where each process has the whole of every gradient, so that its own norm is the norm.
_WHOLE_GRADIENTS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def attach(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> OffloadedOptimizer:
    """Attach a prepared optimizer to its prepared model, and let `accelerator.clip_grad_norm_` clip inside the step.

    The norm that `accelerator.clip_grad_norm_` then returns is a tensor without dimensions, NaN until `step()` has
    written the norm before clipping into it.

    Parameters
    ----------
    accelerator : Accelerator
        Whose `prepare` made the other two.
    model : Module
        As `prepare` returned it: wrapped, where it wraps.
    optimizer : Optimizer
        As `prepare` returned it, or the outboard optimizer itself.

    Returns
    -------
    OffloadedOptimizer
        The outboard optimizer; its `detach()` undoes this, together with `detach_clipping(accelerator)`.

    Raises
    ------
    TypeError
        If the optimizer is none of outboard's.
    ValueError
        If ``eager=True`` or ``offload_gradients=True``, and `accumulation_steps` is not the accelerator's.
    """
    inner = unwrap(optimizer, "prepare an outboard.AdamW")
    check_accumulation(inner, accelerator.gradient_accumulation_steps, "the accelerator's gradient_accumulation_steps")
    inner.attach(model)
    attach_clipping(accelerator, inner)
    return inner


def attach_clipping(accelerator: Accelerator, optimizer: OffloadedOptimizer) -> ClipInside | None:
    """Let `accelerator.clip_grad_norm_` clip this optimizer's gradients inside its step.

    Returns what has taken the method's place; None where gradients are sharded, and it is left as it is.
    """
    if accelerator.distributed_type not in _WHOLE_GRADIENTS:
        return None
    clipping = accelerator.__dict__.get("clip_grad_norm_")
    if not isinstance(clipping, ClipInside):
        clipping = accelerator.clip_grad_norm_ = ClipInside(accelerator.clip_grad_norm_)
    clipping.add(optimizer)
    return clipping


def detach_clipping(accelerator: Accelerator) -> None:
    """Give an accelerator its own `clip_grad_norm_` back, and its optimizers their own `max_grad_norm`."""
    clipping = accelerator.__dict__.get("clip_grad_norm_")
    if isinstance(clipping, ClipInside):
        clipping.remove()
        del accelerator.__dict__["clip_grad_norm_"]


class ClipInside:
    """Takes the place of `accelerator.clip_grad_norm_`: the steps of its optimizers clip.

    Gradients that have been used in backward, or have left the device, are none that the accelerator could clip: it
    would find a norm of 0 and say nothing. What it is not told of an optimizer's, it clips as before.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._optimizers: list[_Clipped] = []
        #: Whether a norm that clips nothing (max_norm=inf) is worth waiting for all gradients.
        self.computes_unclipped = True

    def add(self, optimizer: OffloadedOptimizer) -> None:
        """Clip the gradients of this optimizer, too."""
        if all(clipped.optimizer() is not optimizer for clipped in self._optimizers):
            self._optimizers.append(_Clipped(optimizer))

    def expect(self, optimizer: OffloadedOptimizer, max_norm: float) -> None:
        """Know beforehand what will be asked, so that no update begins in a backward that is to be clipped."""
        for clipped in self._optimizers:
            if clipped.optimizer() is optimizer:
                clipped.expect(max_norm, self.computes_unclipped)

    def remove(self) -> None:
        """Leave the optimizers as they were."""
        for clipped in self._optimizers:
            clipped.remove()
        self._optimizers.clear()

    def __call__(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clip at the next `step()`; return the norm that it will have found.

        None for a norm that is not computed.

        Raises
        ------
        ValueError
            For what cannot be clipped inside a step: other norms than 2, a part of an optimizer's parameters, those of
            several optimizers together; with ``eager=True``, which has used the gradients.
        """
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        asked = {id(parameter): parameter for parameter in parameters}
        found = [clipped for clipped in self._optimizers if clipped.has_any_of(asked)]
        if not found:
            norm: torch.Tensor = self._original(parameters, max_norm, norm_type=norm_type)
            return norm
        if len(found) > 1:
            raise ValueError(
                "clip_grad_norm_() of parameters of several outboard optimizers: each clips inside its own step, to "
                "its own norm; call it for each"
            )
        if norm_type != 2:
            raise ValueError(f"clip_grad_norm_() inside an outboard step knows the norm 2, not {norm_type}")
        found[0].check_is_whole(asked)
        return found[0].ask(float(max_norm), self.computes_unclipped)


class _Clipped:
    """An optimizer whose steps clip to what was asked for since the last one."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        #: The optimizer's own settings, for steps that nobody asked to clip.
        self._own = (optimizer.max_grad_norm, optimizer.compute_grad_norm)
        self._asked: tuple[float | None, bool] | None = None
        self._norms: list[torch.Tensor] = []
        self._is_asked = False
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        optimizer = self.optimizer()
        if optimizer is not None:
            self._set(optimizer, self._own)

    def has_any_of(self, asked: dict[int, torch.Tensor]) -> bool:
        optimizer = self.optimizer()
        groups = () if optimizer is None else optimizer.param_groups
        return any(id(parameter) in asked for group in groups for parameter in group["params"])

    def check_is_whole(self, asked: dict[int, torch.Tensor]) -> None:
        """Refuse a norm over other parameters than those of the step."""
        optimizer = self.optimizer()
        assert optimizer is not None, "it has been found by its parameters"
        ours = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
        missing = [parameter for key, parameter in ours.items() if key not in asked and parameter.requires_grad]
        foreign = [p for key, p in asked.items() if key not in ours and p.grad is not None]
        if missing or foreign:
            raise ValueError(
                "clip_grad_norm_() inside an outboard step takes all of its parameters and no others: "
                f"{len(missing)} are missing, and {len(foreign)} with a gradient are not the optimizer's"
            )

    def expect(self, max_norm: float, computes_unclipped: bool) -> None:
        """Set the optimizer as a call with these arguments does."""
        optimizer = self.optimizer()
        assert optimizer is not None, "it has been found by its parameters"
        own_norm, own_compute = self._own
        if math.isinf(max_norm):
            asked = (own_norm, own_compute or computes_unclipped)
        else:
            # As one after the other would.
            asked = (max_norm if own_norm is None else min(max_norm, own_norm), own_compute)
        self._set(optimizer, asked)
        self._asked = asked

    def ask(self, max_norm: float, computes_unclipped: bool) -> torch.Tensor | None:
        """Clip in the next step; return what the norm will be written to."""
        self.expect(max_norm, computes_unclipped)
        self._is_asked = True
        if self._asked == (None, False):
            return None
        norm = torch.full((), math.nan)
        self._norms.append(norm)
        return norm

    @staticmethod
    def _set(optimizer: OffloadedOptimizer, settings: tuple[float | None, bool]) -> None:
        optimizer.max_grad_norm, optimizer.compute_grad_norm = settings

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        assert isinstance(optimizer, OffloadedOptimizer)
        if not self._is_asked:
            self._set(optimizer, self._own)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        assert isinstance(optimizer, OffloadedOptimizer)
        for norm in self._norms:
            norm.fill_(math.nan if optimizer.last_grad_norm is None else optimizer.last_grad_norm)
        self._norms.clear()
        self._is_asked = False
        if self._asked is not None:
            # For the next backward, which begins no updates if it will be asked again.
            self._set(optimizer, self._asked)
