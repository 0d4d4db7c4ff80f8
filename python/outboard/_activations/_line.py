"""Copies of activations between one device and a pool of host memory, and what is held while they are under way."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch

from outboard import _engines
from outboard._host_pool import HostPool
from outboard._lanes import LaneOptions
from outboard._native import Ferry


class Line:
    """Copies out and in on one device.

    Parameters
    ----------
    device : torch.device
        A CUDA device, or host memory that plays one in tests.
    pool : HostPool
        Where buffers come from.
    max_crossing_bytes : int or None
        The most bytes on their way out when a block ends; None: what the largest block sends, which is on its way then.
    """

    def __init__(self, device: torch.device, pool: HostPool, max_crossing_bytes: int | None) -> None:
        self.device = device
        self._is_simulated = device.type != "cuda"
        index = None if self._is_simulated else device.index
        self.ferry = Ferry(pool._native, index, simulate=LaneOptions.simulate if self._is_simulated else None)
        self._cap = max_crossing_bytes
        self._largest = 0
        #: What has been sent and may not have landed, oldest first.
        self._crossing: deque[weakref.ref[Cargo]] = deque()
        self.crossing_bytes = 0
        self.peak_crossing_bytes = 0
        #: Forward and backward may be different threads.
        self.lock = threading.RLock()
        _engines.register(self)

    @property
    def stream(self) -> int:
        """The current stream, as its handle."""
        return 0 if self._is_simulated else torch.cuda.current_stream(self.device).cuda_stream

    def send(self, name: str, run: torch.Tensor) -> Cargo:
        """Start to copy a run of bytes (uint8, contiguous) to the host; it is held until that is done."""
        nbytes = run.numel()
        cargo = Cargo(self, self.ferry.send(name, [(run.data_ptr(), nbytes)], self.stream), nbytes, run)
        self._crossing.append(weakref.ref(cargo))
        self.peak_crossing_bytes = max(self.peak_crossing_bytes, self.crossing_bytes)
        return cargo

    def end_block(self, nbytes: int) -> None:
        """Let go of what has landed; where too much is under way, the current stream waits for the oldest first.

        Parameters
        ----------
        nbytes : int
            What the block has sent.
        """
        self._largest = max(self._largest, nbytes)
        cap = self._largest if self._cap is None else self._cap
        while self._crossing:
            cargo = self._crossing[0]()
            if cargo is not None and cargo.held is not None:
                if self.crossing_bytes <= cap and not cargo.has_landed():
                    break
                cargo.let_go()
            self._crossing.popleft()

    def close(self) -> None:
        """End copies, at the end of the process."""
        self.ferry.close()


class Cargo:
    """A run of bytes that is away, or on its way.

    Parameters
    ----------
    number : int
        The ferry's.
    nbytes : int
    held : Tensor
        The memory on the device that it is copied from, uint8.
    """

    def __init__(self, line: Line, number: int, nbytes: int, held: torch.Tensor) -> None:
        self.line = line
        self.number = number
        self.nbytes = nbytes
        #: The memory that it came from, until the copy is known to be done.
        self.held: torch.Tensor | None = held
        line.crossing_bytes += nbytes
        #: Where it is once it is back, and whether the current stream follows its copy.
        self._memory: torch.Tensor | None = None
        self._has_arrived = False

    def has_landed(self) -> bool:
        """Whether the copy out is done."""
        return self.line.ferry.has_landed(self.number)

    def let_go(self) -> None:
        """Let the current stream follow the copy out, and free the memory that it came from."""
        if self.held is not None:
            self.line.ferry.landed(self.number, self.line.stream)
            self.held = None
            self.line.crossing_bytes -= self.nbytes

    def bring(self, prefix: int = 0) -> None:
        """Start to copy it back, into memory that is allocated now, `prefix` bytes behind where that begins."""
        if self.held is not None or self._memory is not None:
            return
        memory = torch.empty(prefix + self.nbytes, dtype=torch.uint8, device=self.line.device)
        try:
            self.line.ferry.bring(self.number, [(memory.data_ptr() + prefix, self.nbytes)], self.line.stream)
        except BaseException:
            self.line.ferry.arrive(self.number, self.line.stream)
            raise
        self._memory, self._has_arrived = memory, False

    def arrive(self, prefix: int = 0) -> torch.Tensor | None:
        """Return the memory that it is in, for the current stream; None if it has never left."""
        if self.held is not None:
            return None
        self.bring(prefix)
        if not self._has_arrived:
            self.line.ferry.arrive(self.number, self.line.stream)
            self._has_arrived = True
        assert self._memory is not None
        return self._memory

    def leave(self) -> None:
        """Let go of the memory that it was brought to."""
        if self._memory is not None and not self._has_arrived:
            # A copy writes there.
            self.line.ferry.arrive(self.number, self.line.stream)
        self._memory = None

    def __del__(self) -> None:
        try:
            self.leave()
            self.let_go()
            self.line.ferry.drop(self.number)
        except Exception:
            # A fork, or a device that has failed: nothing is copied any more.
            return
