"""State that stays on the device: which parameters' planes, and the tensors that hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from outboard import _sharded

#: Bytes of a moment and of what is kept beside a weight, by dtype.
_KEPT = {torch.float32: None, torch.bfloat16: ("residual", torch.int16), torch.float16: ("master", torch.float32)}


class ResidentPlanes:
    """Chooses parameters, in the order in which they are bound, as long as they fit into what is left of the share.

    Parameters
    ----------
    share : int or float
        Bytes for each device, or a fraction (at most 1) of the state of the parameters on it.
    bf16_state, full_master : bool
        As the optimizer's.
    """

    def __init__(self, share: float, *, bf16_state: bool, full_master: bool) -> None:
        self._share = share
        self._moment = torch.bfloat16 if bf16_state else torch.float32
        self._full_master = full_master
        self._left: dict[torch.device, float] = {}
        #: Bytes of the planes that each device has.
        self._given: Counter[torch.device] = Counter()
        #: The planes by parameter.
        self.tensors: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def budget(self, parameters: Iterable[tuple[torch.Tensor, bool]]) -> None:
        """Set what each device has left, from all the parameters that are listed, each with its amsgrad."""
        if not self._share:
            return
        totals: Counter[torch.device] = Counter()
        for parameter, amsgrad in parameters:
            totals[parameter.device] += self.bytes_of(parameter, amsgrad) if parameter.requires_grad else 0
        is_fraction = isinstance(self._share, float)
        for device, total in totals.items():
            share = self._share * total if is_fraction else self._share
            self._left[device] = share - self._given[device]

    def bytes_of(self, parameter: torch.Tensor, amsgrad: bool = False) -> int:
        """Bytes of a parameter's planes."""
        kept = self._kept(parameter)
        per_element = self._moment.itemsize * (3 if amsgrad else 2) + (kept[1].itemsize if kept else 0)
        return _sharded.local(parameter).numel() * per_element

    def _kept(self, parameter: torch.Tensor) -> tuple[str, torch.dtype] | None:
        kept = _KEPT[parameter.dtype]
        return ("master", torch.float32) if kept is not None and self._full_master else kept

    def take(self, parameter: torch.Tensor, *, amsgrad: bool, is_device: bool) -> dict[str, torch.Tensor] | None:
        """Return the planes of a parameter that is to be resident, or None."""
        if parameter in self.tensors:
            planes = self.tensors[parameter]
            if amsgrad and "max_exp_avg_sq" not in planes:
                plane = planes["max_exp_avg_sq"] = torch.zeros_like(planes["exp_avg"])
                self._given[parameter.device] += plane.nbytes
                self._left[parameter.device] -= plane.nbytes
            return planes
        left = self._left.get(parameter.device, 0.0) if is_device else 0.0
        if left <= 0:
            return None
        needed = self.bytes_of(parameter, amsgrad)
        own = _sharded.local(parameter)
        if not own.numel() or needed > left or not _is_dense(own):
            return None
        self._left[parameter.device] = left - needed
        self._given[parameter.device] += needed
        kept = self._kept(parameter)
        dtypes = {"exp_avg": self._moment, "exp_avg_sq": self._moment}
        if amsgrad:
            dtypes["max_exp_avg_sq"] = self._moment
        if kept is not None:
            dtypes[kept[0]] = kept[1]
        planes = {
            name: torch.zeros_like(own, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)
            for name, dtype in dtypes.items()
        }
        self.tensors[parameter] = planes
        return planes

    def give_back(self, parameters: Iterable[torch.Tensor]) -> None:
        """Undo `take`, for parameters that have not been bound after all."""
        for parameter in parameters:
            planes = self.tensors.pop(parameter, {})
            if planes:
                given = sum(plane.nbytes for plane in planes.values())
                self._left[parameter.device] += given
                self._given[parameter.device] -= given

    def views(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return tensors over a resident parameter's planes: `tensor.data = ...` on one moves no plane."""
        with torch.inference_mode(False):
            return {name: plane.detach() for name, plane in self.tensors.get(parameter, {}).items()}

    def addresses(self) -> set[int]:
        """Return where the storages of all planes are."""
        return {plane.untyped_storage().data_ptr() for planes in self.tensors.values() for plane in planes.values()}

    def zero(self, parameter: torch.Tensor) -> None:
        """Set a resident parameter's planes to zero."""
        for plane in self.tensors.get(parameter, {}).values():
            plane.zero_()


def _is_dense(parameter: torch.Tensor) -> bool:
    """Whether the elements fill their span, so that `zeros_like` keeps the strides."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
