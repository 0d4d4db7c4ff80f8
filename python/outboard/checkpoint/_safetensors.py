"""State as safetensors: one tensor for each state of each parameter, in shards, with an index that says the rest.

A checkpoint is a folder. `optimizer.safetensors.index.json` maps tensors to shards, as the indices of models do, and
holds everything that is no tensor in its `metadata`. Each save gives its shards names of their own, and the index is
renamed into place after all of them are on the disk: whatever ends a save before that leaves the old index, and the old
shards that it names.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from outboard._optimizer import OffloadedOptimizer
from outboard._state import State
from outboard.checkpoint._files import replacing, sync_file, sync_folder
from outboard.checkpoint._match import arrange
from outboard.checkpoint._progress import Progress, ProgressOption, check_progress
from outboard.checkpoint._torch import refuse_sharded, state_of
from outboard.checkpoint._tree import decode, encode

INDEX = "optimizer.safetensors.index.json"
_SHARD = re.compile(r"optimizer-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors")
_OURS = re.compile(rf"{_SHARD.pattern}|\.{re.escape(INDEX)}\.[0-9a-f]+\.tmp")
_FORMAT = "outboard 1"

#: A shard's pages stay in memory for as long as it is open: it is opened anew after this many bytes.
_MOST_MAPPED = 64 << 20

#: safetensors' names of dtypes.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def save_safetensors(
    state: torch.optim.Optimizer | Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 1 << 30,
    progress: ProgressOption = "auto",
) -> None:
    """Save an optimizer's state as safetensors.

    The folder holds either the old checkpoint or the new one, whatever happens meanwhile. Tensors are written from
    where they live; what is not contiguous or not in host memory is copied shard by shard.

    Parameters
    ----------
    state : Optimizer or mapping
        An optimizer or a state dict of torch's layout.
    folder : path
        Made if it does not exist.
    max_shard_bytes : int
        Bound of a shard's tensors; a larger tensor has a shard of its own.
    progress : "auto", bool or callable
        As for `outboard.checkpoint.save`, shard by shard.

    Raises
    ------
    ImportError
        If safetensors is not installed.
    TypeError, ValueError
        If the state holds what neither safetensors nor JSON can, or DTensors, of which each rank has a part; nothing
        is written then.
    """
    library = _library()
    check_progress(progress)
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be an int of at least 1, not {max_shard_bytes!r}")
    kept: dict[str, torch.Tensor] = {}
    given = state_of(state)
    refuse_sharded(given)
    content = _encode(given, kept)
    shards = _divide(kept, max_shard_bytes)
    save_id = secrets.token_hex(4)
    files = [f"optimizer-{save_id}-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    total = sum(_bytes(tensor) for tensor in kept.values())
    index = {
        "metadata": {"total_size": total, "format": _FORMAT, "save": save_id, "state_dict": content},
        "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
    }
    text = json.dumps(index, allow_nan=False).encode()

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    try:
        with Progress("saving", total, progress) as counter:
            for file, names in zip(files, shards, strict=True):
                shard = {name: _plain(kept[name]) for name in names}
                library.save_file(shard, target / file, {"format": "pt", "save": save_id})
                sync_file(target / file)
                counter.advance(sum(map(_bytes, shard.values())))
        # The names of the shards are on the disk before the one that refers to them.
        sync_folder(target)
        with replacing(target / INDEX) as out:
            out.write(text)
    except BaseException:
        _remove(target, files)
        raise
    # The old shards, and what saves have left that were killed.
    _remove(target, [name for name in os.listdir(target) if _OURS.fullmatch(name) and name not in files])


def load_safetensors(
    folder: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    progress: ProgressOption = "auto",
) -> dict[str, Any] | None:
    """Load what `save_safetensors` has written.

    Into one of outboard's optimizers it goes shard by shard, without a second copy of the whole: first all headers are
    read, and names, shapes and dtypes are checked as `load_state_dict` checks them; if anything is refused, nothing is
    loaded. Parameters are matched by name, as `load_matched` does. An optimizer of another class, or one with hooks on
    `load_state_dict`, is given the whole at once.

    Parameters
    ----------
    folder : path
        The checkpoint.
    optimizer : Optimizer, optional
        Where to load it.
    progress : "auto", bool or callable
        As for `outboard.checkpoint.save`.

    Returns
    -------
    dict or None
        Without an optimizer the state dict, in host memory.

    Raises
    ------
    ImportError
        If safetensors is not installed.
    ValueError
        If shards are missing, are of another save or do not hold what the index says; or, naming the parameter, if the
        optimizer has other parameters.
    RuntimeError
        If a shard cannot be read after the checks, or `progress` raises: then the state is loaded in part, and must be
        loaded again.
    """
    library = _library()
    check_progress(progress)
    checkpoint = _Checkpoint.open(Path(folder), library)
    with Progress("loading", checkpoint.total, progress) as counter:
        if optimizer is None:
            return checkpoint.whole(counter)
        if isinstance(optimizer, OffloadedOptimizer) and not _has_load_hooks(optimizer):
            _load_by_shards(optimizer, checkpoint, counter)
        else:
            optimizer.load_state_dict(arrange(optimizer, checkpoint.whole(counter)))
    return None


def _library() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "checkpoints in safetensors need the library safetensors: pip install outboard[safetensors]"
        ) from error
    return safetensors.torch


# ---- saving


def _encode(state_dict: Mapping[str, Any], kept: dict[str, torch.Tensor]) -> Any:
    """Return a state dict as JSON, and put its tensors into `kept` under readable names."""
    names = _names_of_numbers(state_dict)

    def keep(tensor: torch.Tensor, where: str) -> str:
        _check(tensor, where)
        name, count = where, 1
        while name in kept:
            count += 1
            name = f"{where}#{count}"
        kept[name] = tensor
        return name

    state = [
        [encode(key, "a key of the state", keep), encode(values, names.get(key, f"state.{key}"), keep)]
        for key, values in state_dict["state"].items()
    ]
    rest = {key: value for key, value in state_dict.items() if key != "state"}
    return {"state": state, "rest": encode(rest, "state_dict", keep)}


def _names_of_numbers(state_dict: Mapping[str, Any]) -> dict[Any, str]:
    result: dict[Any, str] = {}
    for group in state_dict["param_groups"]:
        names = group.get("param_names") or []
        for place, number in enumerate(group["params"]):
            result.setdefault(number, str(names[place]) if place < len(names) else str(number))
    return result


def _check(tensor: torch.Tensor, where: str) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"{where} is a {type(tensor).__name__}, which safetensors cannot hold; torch.distributed.checkpoint saves "
            "sharded state"
        )
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in _DTYPES.values():
        what = (
            tensor.layout if tensor.layout is not torch.strided else tensor.device if tensor.is_meta else tensor.dtype
        )
        raise TypeError(f"{where}: safetensors cannot hold a tensor of {what}")


def _divide(kept: Mapping[str, torch.Tensor], bound: int) -> list[list[str]]:
    """Return names of tensors, in their order, in shards of at most `bound` bytes, or of one tensor."""
    shards: list[list[str]] = []
    size = bound
    for name, tensor in kept.items():
        if size + _bytes(tensor) > bound or not shards:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _bytes(tensor)
    return shards


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes_of(shape: list[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with memory of its own, in host memory, in row-major order: itself, if it is so."""
    plain = tensor.detach().to("cpu").resolve_neg().contiguous()
    is_alone = plain.untyped_storage().nbytes() == _bytes(plain)
    return plain if is_alone else plain.clone()


def _remove(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


# ---- loading


@dataclass
class _Checkpoint:
    """An index, and what its shards' headers say."""

    folder: Path
    library: ModuleType
    content: Any
    #: The shard of each tensor.
    shard_of: dict[str, str]
    #: Shape and dtype of each tensor.
    headers: dict[str, tuple[list[int], torch.dtype]]
    total: int

    @classmethod
    def open(cls, folder: Path, library: ModuleType) -> _Checkpoint:
        """Read the index and all headers, and check that they belong together."""
        path = folder / INDEX
        if not path.exists():
            raise FileNotFoundError(
                f"{folder} holds no {INDEX}: it is no checkpoint that save_safetensors has completed"
            )
        try:
            index = json.loads(path.read_bytes())
            metadata, shard_of = index["metadata"], dict(index["weight_map"])
            content, save_id = metadata["state_dict"], metadata["save"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no index of an optimizer's state: {error!r}") from error
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"{path} has the format {metadata.get('format')!r}; this outboard reads {_FORMAT!r}")
        checkpoint = cls(folder, library, content, shard_of, {}, 0)
        shards = dict.fromkeys(shard_of.values())
        for shard in shards:
            if not _SHARD.fullmatch(shard):
                raise ValueError(f"{path} names {shard!r}, which is no shard of an optimizer's state")
        for shard in shards:
            checkpoint._read_header(shard, save_id)
        checkpoint.total = sum(_bytes_of(shape, dtype) for shape, dtype in checkpoint.headers.values())
        return checkpoint

    def _read_header(self, shard: str, save_id: str) -> None:
        with self._shard(shard) as opened:
            if (opened.metadata() or {}).get("save") != save_id:
                raise ValueError(f"{self.folder / shard} is of another save than the index")
            found, wanted = set(opened.keys()), {name for name, file in self.shard_of.items() if file == shard}
            for name in found ^ wanted:
                raise ValueError(f"{self.folder / shard} and the index do not agree about {name}")
            for name in wanted:
                piece = opened.get_slice(name)
                dtype = _DTYPES.get(piece.get_dtype())
                if dtype is None:
                    raise ValueError(f"{name} has dtype {piece.get_dtype()}, which no state has")
                self.headers[name] = (list(piece.get_shape()), dtype)

    def _shard(self, shard: str) -> Any:
        path = self.folder / shard
        if not path.exists():
            raise ValueError(f"{path} is missing")
        try:
            return self.library.safe_open(os.fspath(path), framework="pt", device="cpu")
        except Exception as error:  # safetensors' own class is no subclass of anything more telling
            raise ValueError(f"{path} cannot be read: {error}") from error

    def read(self, names: Iterable[str]) -> Iterator[dict[str, torch.Tensor]]:
        """Yield tensors by name, some at a time. They are the file's memory: not to be kept, nor written."""
        by_shard: dict[str, list[str]] = {}
        for name in names:
            by_shard.setdefault(self.shard_of[name], []).append(name)
        for shard, wanted in by_shard.items():
            left = wanted[::-1]
            while left:
                found: dict[str, torch.Tensor] = {}
                mapped = 0
                with self._shard(shard) as opened:
                    while left and mapped < _MOST_MAPPED:
                        name = left.pop()
                        mapped += _bytes_of(*self.headers[name])
                        found[name] = opened.get_tensor(name)
                yield found
                del found  # its pages, before the next are mapped

    def stand_in(self, name: str) -> torch.Tensor:
        """Return zeros of a tensor's shape and dtype that take the memory of one element."""
        shape, dtype = self._header(name)
        return torch.zeros((), dtype=dtype).expand(shape)

    def _header(self, name: str) -> tuple[list[int], torch.dtype]:
        if name not in self.headers:
            raise ValueError(f"the index has no shard for {name}")
        return self.headers[name]

    def whole(self, counter: Progress) -> dict[str, Any]:
        """Return the whole state dict, in memory of its own."""
        loaded = {}
        for found in self.read(self.shard_of):
            for name, tensor in found.items():
                loaded[name] = tensor.clone()
                counter.advance(_bytes(tensor))

        def find(name: str) -> torch.Tensor:
            self._header(name)
            return loaded[name]

        return self.decode(find)

    def decode(self, find: Any) -> dict[str, Any]:
        """Return the state dict with tensors from `find`."""
        state = {decode(key, find): decode(values, find) for key, values in self.content["state"]}
        return {"state": state, **decode(self.content["rest"], find)}


def _has_load_hooks(optimizer: OffloadedOptimizer) -> bool:
    return bool(optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks)


def _load_by_shards(optimizer: OffloadedOptimizer, checkpoint: _Checkpoint, counter: Progress) -> None:
    # Single numbers, such as steps, are checked by their values, and what is no parameter's tensor stays as it is:
    # both are read first. Of the rest the headers are enough to be checked.
    small = [name for name, (shape, _) in checkpoint.headers.items() if not shape]
    early = {name: tensor.clone() for found in checkpoint.read(small) for name, tensor in found.items()}
    stand_ins: dict[str, torch.Tensor] = {}

    def find(name: str) -> torch.Tensor:
        if name not in early and name not in stand_ins:
            stand_ins[name] = checkpoint.stand_in(name)
        return early[name] if name in early else stand_ins[name]

    arranged = arrange(optimizer, checkpoint.decode(find))
    name_of = {id(tensor): name for name, tensor in (*early.items(), *stand_ins.items())}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    #: Where each tensor goes: its parameter, and the name of the state.
    targets: dict[str, tuple[torch.Tensor, str]] = {}
    for number, values in arranged["state"].items():
        if isinstance(number, int) and number < len(parameters) and isinstance(values, dict):
            for key, value in values.items():
                if id(value) in name_of:
                    targets[name_of[id(value)]] = (parameters[number], key)
    others = [name for name in stand_ins if name not in targets]
    for found in checkpoint.read(others):
        early.update({name: tensor.clone() for name, tensor in found.items()})
    # The optimizer checks all of it, by its own rules, and changes nothing if it refuses. Stand-ins are zeros.
    optimizer.load_state_dict(arrange(optimizer, checkpoint.decode(find)) if others else arranged)
    counter.advance(sum(map(_bytes, early.values())))
    # Reading the state combines residuals that wait with the weights as they are now: before those that are loaded.
    state = optimizer.state
    try:
        with warnings.catch_warnings():
            # What it drops, it has told.
            warnings.simplefilter("ignore")
            for found in checkpoint.read(targets):
                _assign(state, [(*targets[name], tensor) for name, tensor in found.items()])
                counter.advance(sum(_bytes(tensor) for name, tensor in found.items() if name not in early))
                del found
    except Exception as error:
        raise RuntimeError(f"the state is loaded in part only, and must be loaded again: {error}") from error


def _assign(state: State, items: list[tuple[torch.Tensor, str, torch.Tensor]]) -> None:
    """Copy tensors of a file into the state of their parameters."""
    by_parameter: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for parameter, key, tensor in items:
        by_parameter.setdefault(parameter, {})[key] = tensor
    state.update(by_parameter)
    # What is no plane is kept as it is: it must not be the file's memory.
    kept: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for parameter, key, tensor in items:
        if state[parameter].get(key) is tensor:
            kept.setdefault(parameter, {})[key] = tensor.clone()
    if kept:
        state.update(kept)
