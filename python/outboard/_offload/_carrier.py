"""Copies of state between the host and one device, batch by batch, into two arenas on the device that take turns.

What orders what is the native half's (`src/engine/shuttle`): copies run on streams of their own, behind and ahead of
the caller's. Nothing here waits on the host but `settle`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress

import torch
from torch.utils.dlpack import from_dlpack

from outboard import _engines, _pending, _slots
from outboard._lanes import LaneOptions
from outboard._native import ForkedError, StateShuttle
from outboard._offload._travel import Item, local


class Carrier:
    """Brings state of one device and takes it home.

    Parameters
    ----------
    device : torch.device
        A CUDA device, or host memory that plays one in tests.
    pin : bool or None
        Whether to pin host memory; None where it can be.
    keep_arenas : bool
        Whether the arenas stay allocated between steps, so that copies may begin before the device has come to the
        step.
    """

    def __init__(self, device: torch.device, *, threads: int, pin: bool | None, keep_arenas: bool) -> None:
        self.device = device
        self._is_simulated = device.type != "cuda"
        self.shuttle = StateShuttle(
            None if self._is_simulated else device.index,
            simulate=LaneOptions.simulate if self._is_simulated else None,
            threads=threads,
            pin=pin,
            simulated_pinnable_bytes=LaneOptions.simulated_pinnable_bytes,
        )
        self._keeps = keep_arenas
        self._arenas: list[torch.Tensor | None] = [None, None]
        #: Arenas that were allocated on the current stream, and not used since.
        self._fresh: set[int] = set()
        #: The bytes that an arena is to have.
        self.arena_bytes = 0
        self._is_under_way = False
        #: Tensors in host memory that are on their way home: whoever reads one waits.
        self._arriving: list[torch.Tensor] = []
        #: Device memory of items' own that copies in may still write to: nobody waits for them yet.
        self._held: dict[Item, torch.Tensor] = {}
        self._reference = weakref.ref(self)
        end = weakref.finalize(self, _let_go, self.shuttle, self._arriving, self._reference)
        end.atexit = False  # type: ignore[misc]
        _engines.register(self)

    @property
    def stream(self) -> int:
        """The current stream, as its handle."""
        return 0 if self._is_simulated else torch.cuda.current_stream(self.device).cuda_stream

    # ---- Host memory -----------------------------------------------------------------------------------------------

    def buffers(self) -> list[torch.Tensor]:
        """Return the host memory of all slots, as uint8 tensors."""
        return [from_dlpack(buffer) for buffer in self.shuttle.buffers()]

    # ---- Arenas ----------------------------------------------------------------------------------------------------

    def arena(self, which: int) -> torch.Tensor:
        """Return one of the two arenas, allocated now if need be."""
        found = self._arenas[which]
        if found is None or found.numel() < self.arena_bytes:
            if found is not None:
                self._drop(which)
            found = torch.empty(self.arena_bytes, dtype=torch.uint8, device=self.device)
            self._arenas[which] = found
            self._fresh.add(which)
        return found

    def _drop(self, which: int) -> None:
        arena = self._arenas[which]
        if arena is None:
            return
        self._outlive_copies(arena)
        self._arenas[which] = None
        self._fresh.discard(which)

    def end_step(self) -> None:
        """Give the arenas back unless they are kept."""
        if not self._keeps:
            self.drop_arenas()

    def drop_arenas(self) -> None:
        """Give the arenas back; items' views are of them no longer."""
        for which in range(len(self._arenas)):
            self._drop(which)

    @property
    def device_bytes(self) -> int:
        """Bytes of the arenas."""
        return sum(arena.numel() for arena in self._arenas if arena is not None)

    # ---- Copies ----------------------------------------------------------------------------------------------------

    def _ways(self, items: Iterable[Item], which: int) -> tuple[list[int], list[int]]:
        """Return slots and their addresses in an arena, as they lie in host memory: neighbours travel together."""
        base = self.arena(which).data_ptr()
        ordered = sorted(items, key=lambda item: item.address)
        return [item.slot for item in ordered], [base + item.offset for item in ordered]

    def bring(self, items: Sequence[Item], which: int) -> None:
        """Start copies from the host into an arena."""
        slots, addresses = self._ways(items, which)
        after = self.stream if which in self._fresh else None
        self._fresh.discard(which)
        self._is_under_way = True
        self.shuttle.bring(slots, addresses, after=after)

    def arrive(self, items: Sequence[Item]) -> None:
        """Let the current stream wait for what has been brought."""
        self.shuttle.arrive([item.slot for item in items], self.stream)
        for item in items:
            self._held.pop(item, None)

    def claim(self, which: int) -> None:
        """Let the current stream wait until an arena is free, to write to it."""
        arena = self.arena(which)
        self._fresh.discard(which)
        self.shuttle.claim(arena.data_ptr(), arena.numel(), self.stream)

    def send(self, items: Sequence[Item], which: int) -> None:
        """Start copies home, once the current stream has done what it has been given so far."""
        self._mark(items)
        slots, addresses = self._ways(items, which)
        self.shuttle.send(slots, addresses, self.stream)

    def discard(self, items: Sequence[Item]) -> None:
        """Leave what the host has as it was: the device's copy is dropped."""
        if items:
            self.shuttle.discard([item.slot for item in items], self.stream)
            self._release(items)

    def recall(self) -> None:
        """After a failure, leave what the host has as it was, of all that is on the device or on its way there."""
        self.shuttle.recall(self.stream)
        self._release(list(self._held))

    def _release(self, items: Iterable[Item]) -> None:
        for item in items:
            memory = self._held.pop(item, None)
            if memory is not None:
                self._outlive_copies(memory)

    def bring_apart(self, items: Sequence[Item]) -> dict[Item, torch.Tensor]:
        """Start copies into device memory of each tensor's own, allocated now; return the tensors."""
        memory = [torch.empty(item.nbytes, dtype=torch.uint8, device=self.device) for item in items]
        self._is_under_way = True
        for item, run in zip(items, memory, strict=True):
            self._held[item] = run
            # One by one: those of one call travel together where they lie as on the host, with what is between them.
            self.shuttle.bring([item.slot], [run.data_ptr()], after=self.stream)
        return {item: item.over(run) for item, run in zip(items, memory, strict=True)}

    def send_apart(self, tensors: Mapping[Item, torch.Tensor]) -> None:
        """Start copies home from memory that is each tensor's own, and may be given up at once."""
        self._mark(tensors)
        for item, tensor in tensors.items():
            own = local(tensor)
            self.shuttle.send([item.slot], [own.data_ptr()], self.stream)
            self._outlive_copies(own)

    def _outlive_copies(self, tensor: torch.Tensor) -> None:
        """Let the allocator give a tensor's memory to others behind the copies only."""
        if self._is_simulated:
            self.shuttle.claim(tensor.data_ptr(), tensor.numel() * tensor.element_size(), self.stream)
        else:
            for handle in self.shuttle.streams():
                stream = torch.cuda.ExternalStream(handle, device=self.device)  # type: ignore[no-untyped-call]
                tensor.record_stream(stream)

    def settle(self) -> None:
        """Wait on the host until everything is home."""
        if self._is_under_way:
            self.shuttle.settle()
            self._is_under_way = False
            _pending.unmark(self._arriving, self._reference)
            self._arriving.clear()

    def resolve(self, tensors: list[torch.Tensor]) -> None:
        """Wait for tensors that somebody is about to use."""
        self.settle()
        # Not under way, and marked all the same: by what has failed.
        _pending.unmark(tensors, self._reference)

    def _mark(self, items: Iterable[Item]) -> None:
        self._is_under_way = True
        for item in items:
            # Those of the step before may still be marked: nobody has read them since.
            if not _pending.is_pending(item.host):
                _pending.mark_state(item.host, self._reference)
                self._arriving.append(item.host)

    @property
    def is_under_way(self) -> bool:
        """Whether copies home may be under way."""
        return self._is_under_way

    def close(self) -> None:
        """End copies, at the end of the process."""
        self.shuttle.close()


def _let_go(shuttle: StateShuttle, arriving: list[torch.Tensor], reference: weakref.ref[Carrier]) -> None:
    """Let tensors that are on their way home when their carrier goes arrive, and be ordinary ones."""
    if arriving:
        with suppress(Exception):
            shuttle.settle()
        _pending.unmark(arriving, reference)


def can_offload(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory can leave its device: not what is in host memory, unless that plays a device."""
    device = local(tensor).device
    return device.type == "cuda" or (device.type == "cpu" and LaneOptions.simulate is not None)


class Carriers:
    """The carriers of one optimizer's devices, made when they are first needed.

    Parameters
    ----------
    owner : str
        The optimizer's name, for messages.
    threads, pin, keep_arenas
        As for `Carrier`.
    """

    def __init__(self, owner: str, *, threads: int, pin: bool | None, keep_arenas: bool) -> None:
        self._owner = owner
        self._settings = {"threads": threads, "pin": pin, "keep_arenas": keep_arenas}
        self._by_device: dict[torch.device, Carrier] = {}
        self._process = os.getpid()

    def of(self, tensor: torch.Tensor) -> Carrier | None:
        """Return what carries state to a tensor's device; None where there is nothing to offload."""
        device = local(tensor).device
        if device not in self._by_device:
            if not can_offload(tensor):
                return None
            self._by_device[device] = Carrier(device, **self._settings)  # type: ignore[arg-type]
        return self._by_device[device]

    def all(self) -> list[Carrier]:
        """Return those that there are."""
        return list(self._by_device.values())

    def check_process(self) -> None:
        """Refuse use in a fork, where host memory is not what it was.

        Raises
        ------
        ForkedError
        """
        if self._by_device and _slots.is_other_process(self._process):
            raise ForkedError(
                f"the offloaded state of {self._owner} belongs to process {self._process} and was used in its fork "
                f"{os.getpid()}: state does not survive a fork; build the optimizer in the process that steps it"
            )

    def settle(self) -> None:
        """Wait on the host until what is under way is home.

        Raises
        ------
        ForkedError
        """
        self.check_process()
        for carrier in self._by_device.values():
            carrier.settle()

    def recall(self) -> None:
        """After a failure, take everything off the devices: every one, also where one cannot."""
        with ExitStack() as stack:
            for carrier in self._by_device.values():
                stack.callback(carrier.recall)

    def buffers(self) -> list[torch.Tensor]:
        """Return all host memory, as uint8 tensors, once nothing is under way."""
        self.settle()
        return [buffer for carrier in self._by_device.values() for buffer in carrier.buffers()]

    def close(self) -> None:
        """Give everything back; tensors that were handed out keep their memory."""
        self.settle()
        for carrier in self._by_device.values():
            carrier.drop_arenas()
            carrier.close()
        self._by_device.clear()
