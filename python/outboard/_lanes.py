"""The options of the lanes, checked: where updates of parameters on devices are computed, and with what memory."""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass
from typing import Any, ClassVar, SupportsIndex

from outboard._arguments import check_choice, check_count

#: Elements that one worker takes at once in a step on the host: 1 MiB of each fp32 plane.
HOST_CHUNK_ELEMS = 256 * 1024

#: The share of the machine's memory that may be pinned unless `max_pinned_bytes` says otherwise.
PINNED_SHARE = 0.7

MIB = 1 << 20

#: Bytes of state in a chunk of the GPU lane.
CHUNK_BYTES = 20 * MIB


@dataclass
class LaneOptions:
    """See `outboard.AdamW` for the fields."""

    mode: str = "auto"
    transfer: str = "auto"
    chunk_elems: int | None = None
    device_ring_bytes: int | None = None
    host_ring_bytes: int = 64 * MIB
    max_waiting_bytes: int = 8192 * MIB
    pin: str | bool = "auto"
    max_pinned_bytes: int | None = None
    device_state_bytes: float = 0
    offload_gradients: bool = False
    accumulation_steps: int = 1

    #: Tests set it to the seed of a device that is made of host memory and takes the place of CUDA devices.
    simulate: ClassVar[int | None] = None
    #: The bytes that this device lets be pinned, rings included; None: all.
    simulated_pinnable_bytes: ClassVar[int | None] = None
    #: Chunks in flight in each lane, for measurements of the lanes themselves.
    device_depth: ClassVar[int | None] = None
    host_depth: ClassVar[int] = 16
    #: For comparison only: updates in the order in which gradients came.
    fifo: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("auto", "cpu", "gpu"))
        check_choice("transfer", self.transfer, ("auto", "staged", "zero_copy"))
        check_choice("pin", self.pin, ("auto", True, False))
        if self.chunk_elems is not None:
            self.chunk_elems = check_count("chunk_elems", self.chunk_elems)
        if self.device_ring_bytes is not None:
            self.device_ring_bytes = check_count("device_ring_bytes", self.device_ring_bytes, 2**48)
        self.host_ring_bytes = check_count("host_ring_bytes", self.host_ring_bytes, 2**48)
        self.max_waiting_bytes = check_count("max_waiting_bytes", self.max_waiting_bytes, 2**48)
        check_choice("offload_gradients", self.offload_gradients, (True, False))
        self.accumulation_steps = check_count("accumulation_steps", self.accumulation_steps)
        share: Any = self.device_state_bytes
        if isinstance(share, SupportsIndex) and not isinstance(share, bool):
            share = self.device_state_bytes = operator.index(share)  # numpy's, too
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise TypeError(f"device_state_bytes must be a number of bytes or a fraction of the state, not {share!r}")
        if not share >= 0 or (isinstance(share, float) and share > 1):
            raise ValueError(
                f"device_state_bytes must be 0, a number of bytes (an int), or a fraction from 0.0 to 1.0, not {share}"
            )
        if self.max_pinned_bytes is not None:
            self.max_pinned_bytes = check_count("max_pinned_bytes", self.max_pinned_bytes, 2**62)

    @property
    def host_chunk_elems(self) -> int:
        """Elements that one worker takes at once in a step on the host."""
        return HOST_CHUNK_ELEMS if self.chunk_elems is None else self.chunk_elems

    def native(self, threads: int, *, is_asked_for: bool) -> dict[str, Any]:
        """Return them as the native half takes them, with the optimizer's worker threads."""
        # Alone, the GPU lane saturates the link with four chunks in flight; beside the CPU lane more than two stand
        # in its way, since copy engines serve first come, first served.
        depth = self.device_depth or (4 if self.mode == "gpu" else 2)
        most = self.max_pinned_bytes
        if most is None:
            most = int(PINNED_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return {
            "mode": self.mode,
            "transfer": self.transfer,
            "chunk_elems": self.chunk_elems,
            "device_ring_bytes": self.device_ring_bytes or depth * CHUNK_BYTES,
            "host_ring_bytes": self.host_ring_bytes,
            "max_waiting_bytes": self.max_waiting_bytes,
            "pin": None if self.pin == "auto" else self.pin,
            "max_pinned_bytes": most,
            "offload": self.accumulation_steps > 1 if self.offload_gradients else None,
            "simulate": self.simulate,
            "simulated_pinnable_bytes": self.simulated_pinnable_bytes,
            # The dispatcher and the program's own thread need a core each to be in time: with 16 workers on 16 cores
            # the lanes reached 4.9 Gel/s.
            "threads": threads if is_asked_for else max(1, threads - max(1, threads // 8)),
            "device_depth": depth,
            "host_depth": self.host_depth,
            "fifo": self.fifo,
        }
