"""The parameters of one optimizer and the slots of the native half that hold their state: names, binding, planes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from outboard import _sharded, _transfer
from outboard._lanes import LaneOptions
from outboard._native import Core, DeviceError
from outboard._pending import PendingParameter, pending_sharded
from outboard._resident import ResidentPlanes

#: This process: asking the system in every hook costs as much as the rest of it where system calls are intercepted.
_process = os.getpid()


def _in_child() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_in_child)


def is_other_process(process: int) -> bool:
    """Whether this process is not the one of that id, but a fork of it."""
    return process != _process


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
    threads_are_asked_for : bool
        Whether that is the user's number, also for the lanes of devices.
    lanes : LaneOptions
        The options of the lanes of devices.
    full_master, bf16_state : bool
        How 16-bit weights keep their fp32 values, and the dtype of the moments.
    """

    def __init__(
        self,
        groups: Callable[[], list[Group]],
        *,
        threads: int,
        threads_are_asked_for: bool,
        lanes: LaneOptions,
        full_master: bool,
        bf16_state: bool,
    ) -> None:
        self._groups = groups
        self._full_master = full_master
        self._bf16_state = bf16_state
        self._process = _process
        self._threads = threads
        self._lanes = lanes
        self._transfer = lanes.transfer
        self.resident = ResidentPlanes(lanes.device_state_bytes, bf16_state=bf16_state, full_master=full_master)
        self.core = Core(threads, lanes.native(threads, is_asked_for=threads_are_asked_for))
        self.core.set_pending_type(PendingParameter)
        self._knows_sharded = False
        #: Parameters that have a slot, in the order of binding, and those of them that are spread over ranks.
        self.bound: list[torch.Tensor] = []
        self.sharded: list[torch.Tensor] = []
        self._places: dict[int, tuple[int, int]] = {}
        #: Residuals that were loaded for full masters; the other half is the weight, which may be loaded later.
        self.pending_residuals: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def groups(self) -> list[Group]:
        """The optimizer's parameter groups."""
        return self._groups()

    @property
    def is_at_home(self) -> bool:
        """Whether this is the process that made the state."""
        return self._process == _process

    def is_forked(self) -> bool:
        """Whether this is a fork of the process that made the state."""
        return self._process != _process

    def check_process(self) -> None:
        """Raise `ForkedError` in a fork of the process that made the state."""
        if self.is_forked():
            self.core.check_process()

    def listed(self) -> Iterator[torch.Tensor]:
        """Return the parameters of all groups."""
        return chain.from_iterable(group["params"] for group in self.groups)

    def is_listed(self, parameter: object) -> bool:
        """Whether a tensor is, or once was, a parameter of the optimizer."""
        if not isinstance(parameter, torch.Tensor):
            return False
        return self.core.is_bound(parameter) or self._place_of(parameter) is not None

    def named(self) -> Iterator[tuple[int, Group, str, torch.Tensor]]:
        """Yield number, group, name and parameter of all that are listed."""
        number = 0
        for index, group in enumerate(self.groups):
            for position, parameter in enumerate(group["params"]):
                yield number, group, parameter_name(group, index, position), parameter
                number += 1

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return a listed parameter's name, for messages."""
        place = self._place_of(parameter)
        if place is None:
            raise ValueError("the tensor is not a parameter of this optimizer")
        index, position = place
        return parameter_name(self.groups[index], index, position)

    def _place_of(self, parameter: torch.Tensor) -> tuple[int, int] | None:
        """Return the group of a parameter and its place there: at once, where it still is where it was last time."""
        for _ in range(2):
            index, position = self._places.get(id(parameter), (0, -1))
            groups = self.groups
            params = groups[index]["params"] if index < len(groups) else []
            if 0 <= position < len(params) and params[position] is parameter:
                return index, position
            self._places = {
                id(listed): (index, position)
                for index, group in reversed(list(enumerate(groups)))
                for position, listed in reversed(list(enumerate(group["params"])))
            }
        return None

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
        is_device = self._is_on_device
        self.resident.budget((p, bool(group["amsgrad"])) for _, group, _, p in self.named() if is_device(p))
        self._know_sharded()
        for number, group, name, parameter in self.named():
            if id(parameter) not in wanted:
                continue
            amsgrad = bool(group["amsgrad"])
            if not self.core.is_bound(parameter):
                check_parameter(parameter, name)
                fresh[id(parameter)] = parameter
            elif not amsgrad:
                continue
            # Not fresh planes over the state of one that was bound on the host, and has moved.
            may_be_resident = id(parameter) in fresh or parameter in self.resident.tensors
            planes = self._resident_planes(parameter, amsgrad) if may_be_resident else None
            place = _sharded.noise_number(number, parameter)
            entries.append((parameter, name, place, self._full_master, self._bf16_state, amsgrad, planes))
        if entries:
            self._choose_transfer(parameter for parameter, *_ in entries)
            try:
                self.core.bind(self.groups, entries)
            except BaseException:
                self.resident.give_back(fresh.values())
                raise
            self.bound.extend(fresh.values())
            self.sharded.extend(filter(_sharded.is_sharded, fresh.values()))
            for warning in self.core.take_warnings():
                warnings.warn(warning, RuntimeWarning, stacklevel=5)

    def _know_sharded(self) -> None:
        """Let the native half read what this rank has of DTensors."""
        if not self._knows_sharded and self.has_sharded():
            self.core.set_sharded_types(
                _sharded.kind(), pending_sharded(), _sharded.watched(), _sharded.local_descriptor()
            )
            self._knows_sharded = True

    def has_sharded(self) -> bool:
        """Whether any listed parameter is spread over ranks."""
        return _sharded.kind() is not None and any(map(_sharded.is_sharded, self.listed()))

    def sums_over_ranks(self, parameters: list[torch.Tensor], squares: list[float]) -> tuple[list[str], list[float]]:
        """Return the names of all listed parameters, and the sum of squares over all ranks of the gradient of each.

        Parameters
        ----------
        parameters, squares : list
            Those with a gradient on this rank, and the sum of what this rank has of it.
        """
        # All that are listed, since other ranks may have gradients where this one has none.
        named = {id(parameter): (name, parameter) for _, _, name, parameter in self.named()}
        own = {id(parameter): square for parameter, square in zip(parameters, squares, strict=True)}
        names, listed = zip(*named.values(), strict=True)
        return list(names), _sharded.sums_over_ranks(list(listed), own)

    def _is_on_device(self, parameter: torch.Tensor) -> bool:
        return parameter.is_cuda or (self._lanes.simulate is not None and parameter.device.type == "cpu")

    def _resident_planes(self, parameter: torch.Tensor, amsgrad: bool) -> dict[str, torch.Tensor] | None:
        is_device = self._is_on_device(parameter)
        with torch.inference_mode(False):
            planes = self.resident.take(parameter, amsgrad=amsgrad, is_device=is_device)
        if planes and parameter.is_cuda:
            # The zeros are written in the order of this stream, and used in that of others.
            torch.cuda.current_stream(parameter.device).synchronize()
        return planes

    def _choose_transfer(self, parameters: Iterable[torch.Tensor]) -> None:
        """Choose how the GPU lane meets the state, once, by what has been measured on this machine."""
        if self._transfer != "auto" or self._lanes.mode == "cpu" or self._lanes.simulate is not None:
            return
        device = next((parameter.device for parameter in parameters if parameter.is_cuda), None)
        if device is not None:
            self._transfer = _transfer.choose(device)
            self.core.set_transfer(self._transfer)

    @property
    def transfer(self) -> str:
        """How the GPU lane meets the state: "auto" until it has been chosen."""
        return self._transfer

    def planes(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a bound parameter's planes by torch's names: fresh zero-copy tensors, or those on the device.

        Each is of the shape of the parameter, or of what this rank has of it.
        """
        # A tensor made in inference mode could not be written outside of it, ever.
        with torch.inference_mode(False):
            planes = {name: from_dlpack(plane) for name, plane in self.core.planes(parameter)}
        # Empty planes share their address with whatever comes next, and torch.save refuses two dtypes at one.
        planes = {name: tensor if tensor.numel() else torch.empty_like(tensor) for name, tensor in planes.items()}
        return {**planes, **self.resident.views(parameter)}

    # ---- the fp32 values behind weights

    def read_master(self, parameter: torch.Tensor, out: torch.Tensor) -> None:
        """Copy a bound parameter's fp32 values into a tensor in host memory."""
        with self._on_host(parameter) as (core, key, weight):
            core.read_master(key, weight, out)

    def write_master(self, parameter: torch.Tensor, values: torch.Tensor, *, write_weight: bool) -> None:
        """Set residual or master, and perhaps the weight, from fp32 values in host memory."""
        with self._on_host(parameter) as (core, key, weight):
            core.write_master(key, weight, values, write_weight)
            own = _sharded.local(parameter).detach()
            if write_weight and own.data_ptr() != weight.data_ptr():
                own.copy_(weight)

    def load_residual(self, parameter: torch.Tensor, residual: torch.Tensor) -> None:
        """Set a full master from the weight as it is and residuals in host memory."""
        with self._on_host(parameter) as (core, key, weight):
            core.load_residual(key, weight, residual)

    def clear_master(self, parameter: torch.Tensor) -> None:
        """Set residuals to zero, or masters to the weight."""
        with self._on_host(parameter) as (core, key, weight):
            core.clear_master(key, weight)

    @contextmanager
    def _on_host(self, parameter: torch.Tensor) -> Iterator[tuple[Core, torch.Tensor, torch.Tensor]]:
        """Yield a native half that has the parameter's planes in host memory, its key there, and the weight there."""
        weight = host_weight(parameter)
        resident = self.resident.tensors.get(parameter)
        if resident is None:
            yield self.core, parameter, weight
            return
        # A native half of its own, for as long as this takes, around copies.
        key = torch.nn.Parameter(weight.detach(), requires_grad=parameter.requires_grad)
        core = Core(self._threads, LaneOptions().native(self._threads, is_asked_for=True) | {"simulate": None})
        amsgrad = "max_exp_avg_sq" in resident
        core.bind([{"params": [key]}], [(key, "a copy", 0, self._full_master, self._bf16_state, amsgrad, None)])
        with torch.inference_mode(False), torch.no_grad():
            copies = {name: from_dlpack(plane) for name, plane in core.planes(key)}
            for name, plane in resident.items():
                copies[name].copy_(plane)
            yield core, key, key
            for name, plane in resident.items():
                plane.copy_(copies[name])

    def reset(self, parameter: torch.Tensor) -> None:
        """Set a parameter's state to zero."""
        self.bind([parameter])
        self.pending_residuals.pop(parameter, None)
        self.core.reset(parameter)
        self.resident.zero(parameter)

    def settle(self) -> None:
        """Combine pending residuals with the weights as they are now."""
        for parameter, residual in list(self.pending_residuals.items()):
            self.load_residual(parameter, residual)
            # Not before: a parameter that is refused now keeps its residual for the next try.
            del self.pending_residuals[parameter]


def host_weight(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a parameter, or a copy of it in host memory with its order of elements."""
    own = _sharded.local(parameter)
    return own if own.device.type == "cpu" else own.detach().to("cpu")


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
    if parameter.requires_grad and parameter.device.type not in ("cpu", "cuda", "meta"):
        raise DeviceError(
            f"{name}: it is on {parameter.device}; outboard updates parameters in host memory (cpu) and on CUDA devices"
        )
