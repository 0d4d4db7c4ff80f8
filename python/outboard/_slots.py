"""The parameters of one optimizer and the slots of the native half that hold their state: names, binding, planes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from outboard._native import Core, DeviceError

#: What parameters that are trained may be.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Group = dict[str, Any]


class Slots:
    """Binds parameters of an optimizer's groups to slots of its native half.

    Parameters
    ----------
    groups : callable
        Returns the optimizer's `param_groups` as they are now: they may be replaced at any time.
    threads : int
        Worker threads.
    full_master, bf16_state : bool
        How 16-bit weights keep their fp32 values, and the dtype of the moments.
    """

    def __init__(self, groups: Callable[[], list[Group]], *, threads: int, full_master: bool, bf16_state: bool) -> None:
        self._groups = groups
        self._full_master = full_master
        self._bf16_state = bf16_state
        self._process = os.getpid()
        self.core = Core(threads)
        #: Parameters that have a slot, in the order of binding.
        self.bound: list[torch.Tensor] = []
        #: Residuals that were loaded for full masters; the other half is the weight, which may be loaded later.
        self.pending_residuals: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def groups(self) -> list[Group]:
        """The optimizer's parameter groups."""
        return self._groups()

    def check_process(self) -> None:
        """Raise `ForkedError` in a fork of the process that made the state."""
        if self._process != os.getpid():
            self.core.check_process()

    def listed(self) -> Iterator[torch.Tensor]:
        """Return the parameters of all groups."""
        return chain.from_iterable(group["params"] for group in self.groups)

    def is_listed(self, parameter: object) -> bool:
        """Whether a tensor is, or once was, a parameter of the optimizer."""
        if not isinstance(parameter, torch.Tensor):
            return False
        return self.core.is_bound(parameter) or any(listed is parameter for listed in self.listed())

    def named(self) -> Iterator[tuple[int, Group, str, torch.Tensor]]:
        """Yield number, group, name and parameter of all that are listed."""
        number = 0
        for index, group in enumerate(self.groups):
            for position, parameter in enumerate(group["params"]):
                yield number, group, parameter_name(group, index, position), parameter
                number += 1

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return a listed parameter's name, for messages."""
        for _, _, name, listed in self.named():
            if listed is parameter:
                return name
        raise ValueError("the tensor is not a parameter of this optimizer")

    def bind_wanted(self, *, without_gradient: bool) -> None:
        """Bind what has a gradient and no slot, or lacks a plane; perhaps also what only wants a gradient."""
        self.bind(self.core.unbound(self.groups, without_gradient))

    def bind(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make the state of parameters that have none; all of them or, if one is refused, none."""
        wanted = {id(parameter) for parameter in parameters}
        if not wanted:
            return
        self.check_process()
        entries, fresh = [], {}
        for number, group, name, parameter in self.named():
            if id(parameter) not in wanted:
                continue
            amsgrad = bool(group["amsgrad"])
            if not self.core.is_bound(parameter):
                check_parameter(parameter, name)
                fresh[id(parameter)] = parameter
            elif not amsgrad:
                continue
            entries.append((parameter, name, number, self._full_master, self._bf16_state, amsgrad))
        if entries:
            self.core.bind(self.groups, entries)
            self.bound.extend(fresh.values())

    def planes(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return fresh zero-copy tensors over a bound parameter's planes, by torch's names."""
        # A tensor made in inference mode could not be written outside of it, ever.
        with torch.inference_mode(False):
            return {name: from_dlpack(plane) for name, plane in self.core.planes(parameter)}

    def reset(self, parameter: torch.Tensor) -> None:
        """Set a parameter's state to zero."""
        self.bind([parameter])
        self.pending_residuals.pop(parameter, None)
        self.core.reset(parameter)

    def settle(self) -> None:
        """Combine pending residuals with the weights as they are now."""
        for parameter, residual in list(self.pending_residuals.items()):
            self.core.load_residual(parameter, residual)
            # Not before: a parameter that is refused now keeps its residual for the next try.
            del self.pending_residuals[parameter]


def parameter_name(group: Group, index: int, position: int) -> str:
    """Return the name the user gave a parameter, or one that says where it stands."""
    names = group.get("param_names")
    if names is not None and position < len(names):
        return str(names[position])
    return f"parameter {position} of group {index}, shape {tuple(group['params'][position].shape)}"


def check_parameter(parameter: torch.Tensor, name: str) -> None:
    """Refuse what cannot be updated, by name, before any state is made."""
    if torch.nn.parameter.is_lazy(parameter):
        raise ValueError(f"{name}: it is not initialised yet; run the model once before making the optimizer")
    if parameter.is_complex():
        raise TypeError(f"{name}: its dtype is {parameter.dtype}; complex parameters are not supported")
    if parameter.is_neg():
        raise TypeError(f"{name}: it is a negated view; give the optimizer its .resolve_neg()")
    if parameter.requires_grad and parameter.dtype not in _DTYPES:
        raise TypeError(
            f"{name}: its dtype is {parameter.dtype}; outboard updates torch.float32, torch.bfloat16 and torch.float16"
        )
    # Parameters on the meta device get their memory later.
    if parameter.requires_grad and parameter.device.type not in ("cpu", "meta"):
        raise DeviceError(f"{name}: it is on {parameter.device}; this version updates parameters in host memory (cpu)")
