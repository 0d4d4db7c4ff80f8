"""Tensors that are spread over ranks (torch's DTensor): what this rank has of them, and sums over all ranks.

An update is one rank's own: the shard of the weight, that of the gradient, and state of the same shape. Only the norm
of all gradients, and what is decided by it, is the same for all ranks.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

#: Of a parameter's number within an optimizer, below where its shard begins. As in the native half.
NUMBER_BITS = 20


def kind() -> Any:
    """Return the class DTensor, or None where nobody can have made one: importing it takes a while."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor, replicated ones too."""
    if type(tensor) is torch.nn.Parameter or type(tensor) is torch.Tensor:
        return False
    dtensor = kind()
    return dtensor is not None and isinstance(tensor, dtensor)


def local_descriptor() -> Any:
    """Return what gets a DTensor's local tensor: also of one whose update is under way, without waiting for it."""
    return kind().__dict__["_local_tensor"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a DTensor, of its shard's shape, or the tensor itself; waits for nothing."""
    if not is_sharded(tensor):
        return tensor
    found: torch.Tensor = local_descriptor().__get__(tensor)
    return found


class _Watched:
    """A gradient until somebody may have changed it: then it has its own class again.

    Versions do not tell. `clip_grad_norm_` (foreach) raises neither that of the DTensor nor that of the tensor within,
    and the latter is shared by all gradients that FSDP2 reduces together.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call an operation; give gradients that it may write their own class back."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_dunder = name.startswith("__")
        writes = name in _WRITING_DUNDERS if is_dunder else name.endswith("_")
        # A copy is of the class that it is made of.
        if writes or func == _SET_DATA or name in ("__deepcopy__", "__reduce_ex__"):
            _unwatch((args[:1], kwargs.get("self"), kwargs.get("input")))
        _unwatch(kwargs.get("out"))
        given = _find_watched((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = _read(func, *args, **kwargs)
        for own in given:
            _hand_out(own, result)
        return result

    def full_tensor(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As that of DTensor, which reads."""
        whole = _read(kind().full_tensor, self, *args, **kwargs)
        # Of a replicated one it would be the memory itself, and nobody sees what is done to that.
        return whole.clone() if _shares_memory(self, whole) else whole

    def redistribute(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As that of DTensor, which reads."""
        result = _read(kind().redistribute, self, *args, **kwargs)
        _hand_out(self, result)
        return result

    def __repr__(self: Any) -> str:
        text: str = _read(kind().__repr__, self)
        return text


#: The methods with underscores on both sides that write.
_WRITING_DUNDERS = frozenset(
    f"__{name}__"
    for name in (
        *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
)


class _Reading(threading.local):
    #: Whether what asks for the tensor within a gradient only reads it.
    is_on = False


_reading = _Reading()
_watched: Any = None


def watched() -> Any:
    """Return the class of gradients that are watched."""
    global _watched
    if _watched is None:
        descriptor = local_descriptor()

        def get_local(self: Any) -> torch.Tensor:
            if not _reading.is_on:
                _unwatch(self)  # whoever has the tensor within may write to it
            found: torch.Tensor = descriptor.__get__(self)
            return found

        members = {"__slots__": (), "_local_tensor": property(get_local, descriptor.__set__), "__module__": __name__}
        _watched = type("WatchedDTensor", (_Watched, kind()), members)
    return _watched


def _read(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before, _reading.is_on = _reading.is_on, True
    try:
        return method(*args, **kwargs)
    finally:
        _reading.is_on = before


#: Gives a tensor other memory.
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _find_watched(value: Any) -> list[Any]:
    if type(value) is _watched:
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [own for item in value for own in _find_watched(item)] if isinstance(value, (tuple, list)) else []


def _shares_memory(own: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether a tensor lies in the memory of a gradient; what a collective is still to fill has memory of its own."""
    if type(local(result)) is not torch.Tensor:
        return False
    here, there = (local(tensor).untyped_storage().data_ptr() for tensor in (own, result))
    return here == there and here != 0


def _hand_out(own: Any, result: Any) -> None:
    """Watch what an operation on a gradient has returned on the gradient's behalf, if it is a view of it."""
    if isinstance(result, (tuple, list)):
        for item in result:
            _hand_out(own, item)
    elif isinstance(result, torch.Tensor) and result is not own and type(own) is _watched:
        if not _shares_memory(own, result):
            return
        if is_sharded(result):
            result.__class__ = watched()
            result._watched_for = own  # type: ignore[attr-defined]
        else:
            _unwatch(own)  # nobody sees what is done to it


def _unwatch(value: Any) -> None:
    if type(value) is _watched:
        value.__class__ = kind()
        _unwatch(value.__dict__.pop("_watched_for", None))
    elif isinstance(value, (tuple, list)):
        for item in value:
            _unwatch(item)
    elif isinstance(value, dict):
        _unwatch(list(value.values()))


def watch(grad: torch.Tensor) -> int:
    """Return what `is_unchanged` is to be asked with later, for a gradient as it is now."""
    if is_sharded(grad):
        grad.__class__ = watched()
    return grad._version


def is_unchanged(grad: torch.Tensor, seen: int) -> bool:
    """Whether a gradient is as it was when `watch` returned `seen`."""
    return grad._version == seen and (type(grad) is _watched or not is_sharded(grad))


def like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a DTensor over a tensor of the shape of a parameter's shard, on any device; a plain one's own tensor."""
    if not is_sharded(parameter):
        return tensor
    # As torch's FSDP2 makes its own: the public constructor moves what is in host memory to the mesh's device.
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec: Any = parameter._spec  # type: ignore[attr-defined]
    meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, tensor.dtype)
    made: torch.Tensor = kind()(tensor, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)
    return made


def part_of(value: torch.Tensor, parameter: torch.Tensor, what: str) -> torch.Tensor:
    """Return what belongs to this rank of a value for a parameter, of the parameter's (global) shape.

    Raises
    ------
    TypeError, ValueError
        For a DTensor that is not spread as the parameter is; nothing is sent to other ranks here.
    """
    if not is_sharded(value) and not is_sharded(parameter):
        return value
    if not is_sharded(parameter):
        raise TypeError(f"{what} is a DTensor, and the parameter is not: give its full_tensor()")
    spec: Any = parameter._spec  # type: ignore[attr-defined]
    if is_sharded(value):
        found: Any = value._spec  # type: ignore[attr-defined]
        if found.mesh != spec.mesh or found.placements != spec.placements:
            raise ValueError(
                f"{what} is spread as {found.placements} over {found.mesh}, the parameter as {spec.placements} over "
                f"{spec.mesh}: load it by torch.distributed.checkpoint, which brings shards to where they belong"
            )
        return local(value)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(parameter.shape, spec.mesh, spec.placements)
    own = local(parameter)
    if 0 in own.shape:
        return value.new_empty(own.shape)
    if tuple(shape) != tuple(own.shape) or not _is_one_piece(spec.placements):
        raise ValueError(
            f"{what} is a whole tensor, of which this rank's part ({tuple(own.shape)}) cannot be told: load it by "
            "torch.distributed.checkpoint"
        )
    return value[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def noise_number(number: int, parameter: torch.Tensor) -> int:
    """Return what the noise of stochastic rounding is made from: a parameter's number, and where its shard begins.

    Replicas draw the same noise, and shards each their own. In fewer than 64 bits for up to a million parameters.
    """
    if not is_sharded(parameter):
        return number
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spec: Any = parameter._spec  # type: ignore[attr-defined]
    if spec.mesh.get_coordinate() is None:
        return number  # this rank has nothing of it
    _, offset = compute_local_shape_and_global_offset(parameter.shape, spec.mesh, spec.placements)
    first = 0
    for size, start in zip(parameter.shape, offset, strict=True):
        first = first * size + start
    return (number ^ (first << NUMBER_BITS)) % 2**64


def _is_one_piece(placements: Iterable[Any]) -> bool:
    """Whether a rank's part is one piece: a strided shard (FSDP2's) is, together with that of tensor parallelism."""
    placements = list(placements)
    for index, placement in enumerate(placements):
        if type(placement).__name__ == "_StridedShard":
            others = (other for other in placements[index + 1 :] if not other.is_replicate())
            if not any(type(other).__name__ == "Shard" and other.dim == placement.dim for other in others):
                return False
    return True


def is_complete(parameter: torch.Tensor, grad: torch.Tensor) -> bool:
    """Whether a gradient can be used as it is: a DTensor that is spread as its parameter, and has arrived."""
    if not is_sharded(parameter):
        return True
    same: bool = is_sharded(grad) and grad._spec.placements == parameter._spec.placements  # type: ignore[attr-defined]
    return same and type(local(grad)) is torch.Tensor


def complete_gradients(parameters: Iterable[torch.Tensor], name_of: Callable[[torch.Tensor], str]) -> None:
    """Bring gradients of DTensors to where their parameters are: sums over ranks that are due, other placements.

    As torch's own optimizers do within their operations. In the order of the parameters, on every rank.
    """
    for parameter in parameters:
        grad = parameter.grad
        if grad is None or is_complete(parameter, grad):
            continue
        if not is_sharded(grad):
            raise TypeError(f"the gradient of {name_of(parameter)} is a plain tensor, and the parameter a DTensor")
        spec: Any = parameter._spec  # type: ignore[attr-defined]
        with torch.no_grad():
            moved = grad.redistribute(spec.mesh, spec.placements)  # type: ignore[attr-defined]
            # What a collective is still to fill is waited for.
            arrived = moved.to_local()
            arrived = arrived.wait() if hasattr(arrived, "wait") else arrived
            parameter.grad = like(arrived, parameter)


def sums_over_ranks(parameters: list[torch.Tensor], own: dict[int, float]) -> list[float]:
    """Return the sum of squares of each gradient over all ranks that have a part of it, in fp64.

    Parameters
    ----------
    parameters : list of Tensor
        The same on all ranks, in the same order.
    own : dict
        This rank's sums by the parameter's id; nothing for one that has no gradient here.

    Returns
    -------
    list of float
        The same bits on all ranks: ranks are added up in the order of the mesh.

    Raises
    ------
    ValueError
        If gradients of plain parameters beside DTensors differ between ranks: on all of them. On a rank outside of a
        parameter's mesh.
    """
    sums = [own.get(id(parameter), 0.0) for parameter in parameters]
    families: dict[Any, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if is_sharded(parameter):
            spec: Any = parameter._spec  # type: ignore[attr-defined]
            spread = tuple(dim for dim, placement in enumerate(spec.placements) if not placement.is_replicate())
            if spec.mesh.get_coordinate() is None:
                raise ValueError(
                    f"a norm needs the gradients of all parameters, and this rank is not in {spec.mesh}, which one of "
                    "them is spread over: give each rank's optimizer its own parameters"
                )
            if spread:
                families.setdefault((spec.mesh, spread), []).append(index)
    for (mesh, spread), indices in families.items():
        vector = torch.tensor([sums[index] for index in indices], dtype=torch.float64, device=mesh.device_type)
        for dim in spread:
            group = mesh.get_group(dim)
            parts = [torch.empty_like(vector) for _ in range(group.size())]
            torch.distributed.all_gather(parts, vector, group=group)
            vector = parts[0]
            for part in parts[1:]:
                vector = vector + part
        for index, total in zip(indices, vector.tolist(), strict=True):
            sums[index] = total
    plain = [index for index, parameter in enumerate(parameters) if not is_sharded(parameter)]
    if plain and families:
        agreed = _agree([sums[index] for index in plain], next(iter(families))[0])
        for index, total in zip(plain, agreed, strict=True):
            sums[index] = total
    return sums


#: How far apart the sums of squares of one gradient may be that two ranks have computed alike.
_TOLERANCE = 1e-3


def _agree(sums: list[float], mesh: Any) -> list[float]:
    """Return the sums of plain parameters of the first rank, on all ranks; NaN for one that is not finite anywhere.

    Raises
    ------
    ValueError
        If those of two ranks are not about the same, on all ranks: what they had to average has not been averaged.
    """
    differs = 0.0
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        row = torch.tensor([*sums, differs], dtype=torch.float64, device=mesh.device_type)
        gathered = [torch.empty_like(row) for _ in range(group.size())]
        torch.distributed.all_gather(gathered, row, group=group)
        rows: list[list[float]] = torch.stack(gathered).tolist()
        first = rows[0][:-1]
        for index, total in enumerate(first):
            others = [other[index] for other in rows]
            if not all(map(math.isfinite, others)):
                first[index] = math.nan
            elif any(not math.isclose(other, total, rel_tol=_TOLERANCE) for other in others):
                differs = 1.0
        differs = max(differs, *(other[-1] for other in rows))
        sums = first
    if differs:
        raise ValueError(
            "gradients of plain parameters, beside DTensors, differ between ranks, and so would the norm: average them "
            "(torch.distributed.all_reduce) before step(), or make them DTensors too"
        )
    return sums
