"""`outboard.HostPool`: pinned host memory that is lent and taken back."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from outboard._arguments import check_choice, check_count
from outboard._native import HostPool as _NativePool


class Event(Protocol):
    """What says when a buffer is no longer in use, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether it has happened."""

    def synchronize(self) -> None:
        """Wait until it has."""


class HostPool:
    """Host memory in buffers of many sizes, each used again once what copies to or from it are done.

    A buffer is at most an eighth larger than what was asked for (small ones: whole cache lines), on huge pages and,
    where there is a GPU, pinned. Many threads may use a pool, and several models; it is of no use to a fork.

    Parameters
    ----------
    max_bytes : int, optional
        The most bytes of host memory that it holds; without, any number.
    pin : "auto", True or False
        Whether to pin memory: where that can be, or else raise, or not.
    threads : int, optional
        Threads that touch new memory; the CPUs that the process may use unless given.

    Raises
    ------
    TypeError, ValueError
    DeviceError
        With ``pin=True`` where there is no CUDA device.
    """

    def __init__(self, *, max_bytes: int | None = None, pin: str | bool = "auto", threads: int | None = None) -> None:
        check_choice("pin", pin, ("auto", True, False))
        most = None if max_bytes is None else check_count("max_bytes", max_bytes, 2**62)
        count = None if threads is None else check_count("threads", threads, 1024)
        pins = pin is True or (pin == "auto" and torch.cuda.is_available())
        device = torch.cuda.current_device() if pins and torch.cuda.is_available() else 0 if pins else None
        self._native = _NativePool(device, max_bytes=most, threads=count, must_pin=pin is True)

    def acquire(self, nbytes: int) -> torch.Tensor:
        """Lend a buffer.

        At the limit it takes a larger one that is free, gives up what other sizes have cached, or waits for the oldest
        one in use by copies that is large enough.

        Parameters
        ----------
        nbytes : int

        Returns
        -------
        Tensor
            uint8, shape (nbytes,), aligned for every dtype, with whatever its last user has left in it. The buffer
            comes back by itself once no tensor is over it.

        Raises
        ------
        PoolLimitError
            If that takes more than `max_bytes`.
        ValueError, MemoryError, ForkedError
        """
        if nbytes < 0:
            raise ValueError(f"Invalid nbytes: {nbytes}")
        made: torch.Tensor = from_dlpack(self._native.acquire(nbytes))
        return made

    def release(self, buffer: torch.Tensor, event: Event | None = None) -> None:
        """Take a buffer back; nobody uses it, nor any tensor over it, from here on.

        Parameters
        ----------
        buffer : Tensor
            What `acquire` returned, or any view of it.
        event : optional
            The buffer is lent anew once this has happened, such as the copy from it; at once without.

        Raises
        ------
        ValueError
            For memory that is not this pool's, and for a buffer that was released before.
        TypeError
        """
        if event is not None and not (hasattr(event, "query") and hasattr(event, "synchronize")):
            raise TypeError(f"event must have query() and synchronize(), as torch.cuda.Event, not {event!r}")
        if not isinstance(buffer, torch.Tensor):
            raise TypeError(f"buffer must be a tensor, not {type(buffer).__name__}")
        address = buffer.data_ptr()
        # A tensor without elements is nowhere.
        if address or buffer.numel():
            self._native.release(address, event)

    def trim(self) -> int:
        """Unmap what is not in use; return how many bytes that are."""
        return self._native.trim()

    def stats(self) -> dict[str, Any]:
        """Return bytes and counts.

        Returns
        -------
        dict
            Bytes of buffers: ``live`` (lent), ``cached`` (free), ``pending`` (given back, in use by copies), ``peak``
            (the most of live and pending at a time), ``waste`` (of live ones, beyond what was asked for); counts:
            ``hits`` and ``misses`` (requests served with a buffer that there was, and with a new one), ``buffers``;
            bytes mapped: ``held``, and of these ``pinned``.
        """
        return self._native.stats()
