"""Checkpoints in torch's own format, written atomically and with progress."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from outboard._sharded import is_sharded
from outboard.checkpoint._files import CountingFile, replacing
from outboard.checkpoint._match import load_matched
from outboard.checkpoint._progress import Progress, ProgressOption, check_progress

Path = str | os.PathLike[str]


def save(state: torch.optim.Optimizer | Mapping[str, Any], path: Path, *, progress: ProgressOption = "auto") -> None:
    """Save an optimizer's state with `torch.save`, so that `path` holds either the old checkpoint or the new one.

    The file is written under another name beside `path`, synced to the disk, and renamed. Tensors are written from
    where they live, without a second copy.

    Parameters
    ----------
    state : Optimizer or mapping
        An optimizer, or a state dict: anything that `torch.save` takes, such as a dict of several.
    path : path
        The file. Its folder must exist.
    progress : "auto", bool or callable
        `"auto"` draws a bar on stderr if that is a terminal and the save takes longer than two seconds; True draws it
        at once; a function is called with the bytes done and the bytes in all.

    Raises
    ------
    ValueError
        If there are DTensors, of which each rank has a part.
    """
    check_progress(progress)
    content = state_of(state)
    refuse_sharded(content)
    total = sum(storages(content).values())
    with Progress("saving", total, progress) as counter, replacing(path) as file:
        torch.save(content, CountingFile(file, counter))  # type: ignore[arg-type]


def load(
    path: Path, optimizer: torch.optim.Optimizer | None = None, *, progress: ProgressOption = "auto", mmap: bool = False
) -> Any:
    """Load what `save`, or `torch.save`, has written: with `torch.load(weights_only=True)`, into host memory.

    Parameters
    ----------
    path : path
        The file.
    optimizer : Optimizer, optional
        Where to load it, as `load_matched` does.
    progress : "auto", bool or callable
        As for `save`.
    mmap : bool
        Map the file instead of reading it: the tensors take no memory of their own, and are read when they are used.
        Nothing is counted then. The file must stay as it is for as long as they live.

    Returns
    -------
    object
        What was saved.
    """
    check_progress(progress)
    if mmap:
        content = torch.load(os.fspath(path), map_location="cpu", weights_only=True, mmap=True)
    else:
        with open(path, "rb") as file, Progress("loading", os.path.getsize(path), progress) as counter:
            content = torch.load(CountingFile(file, counter), map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    if optimizer is not None:
        load_matched(optimizer, content)
    return content


def state_of(state: Any) -> Any:
    """Return the state dict of an optimizer; what is none is returned as it is."""
    return state.state_dict() if callable(getattr(state, "state_dict", None)) else state


def refuse_sharded(content: Any) -> None:
    """Refuse DTensors: the ranks would write over each other's parts."""
    if any(map(is_sharded, tensors(content))):
        raise ValueError(
            "the state is spread over ranks (DTensor), and a file would have this rank's part: save it by "
            "torch.distributed.checkpoint, or a whole state dict (StateDictOptions(full_state_dict=True)) on one rank"
        )


def storages(content: Any) -> dict[int, int]:
    """Return the address and size of each memory that tensors within `content` lie in."""
    return {
        storage.data_ptr(): storage.nbytes()
        for tensor in tensors(content)
        if tensor.layout is torch.strided
        for storage in (tensor.untyped_storage(),)
    }


def tensors(content: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors within dicts, lists and tuples."""
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from tensors(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from tensors(value)
