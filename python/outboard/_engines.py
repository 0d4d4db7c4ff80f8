"""The optimizers of this process whose engines must end before the interpreter, and CUDA with it, does."""

from __future__ import annotations

import atexit
import os
import traceback
import weakref
from typing import Protocol


class _Closable(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()
_process = os.getpid()


def register(optimizer: _Closable) -> None:
    """Let an optimizer complete its updates when the interpreter exits."""
    _open.add(optimizer)


@atexit.register
def _close_all() -> None:
    if os.getpid() != _process:
        return
    for optimizer in list(_open):
        try:
            optimizer.close()
        except Exception:
            # Told, and the others are closed all the same.
            traceback.print_exc()
