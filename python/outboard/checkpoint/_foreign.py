"""Reading files of other libraries without their code.

torch's restricted unpickler does the reading. What a file names that torch does not know is an inert stand-in here: it
takes whatever the file gives it, and does nothing.
"""

from __future__ import annotations

import os
from typing import Any

import torch

#: torchao's classes of quantised state, which are tensors of torch's wrapper kind.
_TENSORS = "torchao."


class Inert:
    """What a file has said about an object of a class that is not here: its name, arguments and attributes."""

    #: The class's name in its library.
    named = ""
    #: What it was made with.
    arguments: tuple[Any, ...] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Take any arguments."""
        self = super().__new__(cls)
        self.arguments = args
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"<{self.named} that was not loaded>"


class InertTensor(torch.Tensor):
    """A tensor of a class that is not here: a shape, and attributes. No operation works on it."""

    named = ""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func} of a {cls.named} that was not loaded: outboard.checkpoint converts it")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{self.named} that was not loaded>"


def read_foreign(path: str | os.PathLike[str], *, mmap: bool = True) -> Any:
    """Read a file that another library has written with `torch.save`, without that library, and run none of its code.

    (A library that is imported may have told torch to load its classes: then these are what is found.)

    Parameters
    ----------
    path : path
        The file.
    mmap : bool
        Map the file, so that tensors are read when they are used.

    Returns
    -------
    object
        What was saved, in host memory, with inert stand-ins for objects of classes that torch does not load by itself.

    Raises
    ------
    pickle.UnpicklingError
        If the file does what torch's restricted unpickler never does.
    """
    path = os.fspath(path)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    known: list[Any] = [(_stand_in(name), name) for name in names]
    with torch.serialization.safe_globals(known):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _stand_in(name: str) -> type:
    base = InertTensor if name.startswith(_TENSORS) and name.rpartition(".")[2].startswith("OptimState") else Inert
    return type(name.rpartition(".")[2], (base,), {"named": name})
