"""How many blocks' activations leave: measured, predicted, checked and corrected over the first steps."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from outboard._activations._blocks import evenly
from outboard._host_pool import HostPool

#: Steps before anything is measured: allocations, compilation.
WARMUP = 2

#: Steps that are measured with each choice, after one that is not.
MEASURED = 3


class Meter(Protocol):
    """Tells the time, also that of a device, without waiting for it."""

    def mark(self) -> Any:
        """Note the time."""

    def between(self, begin: Any, end: Any) -> float | None:
        """Return the milliseconds between two marks; None as long as the device has not come to them."""


class HostMeter:
    """The time of the host."""

    def mark(self) -> Any:
        """Note the time."""
        return time.perf_counter()

    def between(self, begin: Any, end: Any) -> float | None:
        """Return the milliseconds between two marks."""
        return float(end - begin) * 1e3


class DeviceMeter:
    """The time of the current stream."""

    def mark(self) -> Any:
        """Note the time when the stream comes here."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float | None:
        """Return the milliseconds between two marks."""
        return float(begin.elapsed_time(end)) if end.query() else None


def predict(
    count: int, *, blocks: int, nbytes: float, forward: float, backward: float, out_rate: float, in_rate: float
) -> float:
    """Return the milliseconds that a step takes longer with a number of evenly spaced blocks.

    Parameters
    ----------
    count, blocks : int
        Blocks that leave, and blocks there are.
    nbytes : float
        Of one block.
    forward, backward : float
        Milliseconds of all blocks.
    out_rate, in_rate : float
        Bytes per millisecond of the link, each way.
    """
    if not count:
        return 0.0
    places = evenly(blocks, count)
    stalls = 0.0
    done = 0.0
    for index, place in enumerate(places):
        end = (place + 1) * forward / blocks + stalls
        if index:
            # One block may be under way when the next has been sent: the one before has to have landed.
            stalls += max(0.0, done - end)
            end = max(end, done)
        done = max(done, end) + nbytes / out_rate
    for earlier, later in itertools.pairwise(places):
        # It comes back while backward is in the blocks behind it.
        stalls += max(0.0, nbytes / in_rate - (later - earlier) * backward / blocks)
    return stalls


class Auto:
    """Chooses blocks so that a step takes at most a little longer, or so that few bytes stay.

    Parameters
    ----------
    names : sequence of str
        Blocks that may leave, in their order.
    max_slowdown : float
        Such as 0.05.
    target_bytes : int or None
        Instead: as few blocks as leave at most so many bytes of the blocks' activations on the device.
    meter : Meter
    rates : callable
        Returns bytes per millisecond out and in, or None as long as that is not known.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        max_slowdown: float,
        target_bytes: int | None,
        meter: Meter,
        rates: Callable[[], tuple[float, float] | None],
    ) -> None:
        self._names = list(names)
        self._max_slowdown, self._target = max_slowdown, target_bytes
        self._meter, self._rates = meter, rates
        self.bytes_of: dict[str, int] = {}
        self._count = 0
        self._step = 0
        #: Of steps with the present choice: where they begin, and where their forward ends.
        self._marks: list[tuple[Any, Any]] = []
        self._begin: Any = None
        #: By the number of blocks: milliseconds of a step.
        self._measured: dict[int, float] = {}
        self._forward = 0.0
        self._predicted: dict[int, float] = {}
        self.is_settled = not self._names
        self._why = "nothing is measured yet" if self._names else "there are no blocks to choose from"

    @property
    def sends(self) -> set[str]:
        """The blocks that leave now."""
        return {self._names[index] for index in evenly(len(self._names), self._count)}

    # ---- Steps -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that a forward begins."""
        if self.is_settled:
            return
        self._step += 1
        if self._step > WARMUP:
            self._begin = self._meter.mark()
            self._consider()

    def end(self) -> None:
        """Note that a forward ends."""
        if not self.is_settled and self._begin is not None:
            self._marks.append((self._begin, self._meter.mark()))
            self._begin = None

    def _consider(self) -> None:
        """Choose anew once enough steps have been measured; the step that begins is the first of a new choice."""
        # Not the first with a choice: what it begins with is another's.
        begins = [begin for begin, _ in self._marks[1:]] + [self._begin]
        # As far as the device has come.
        steps = [self._meter.between(one, other) for one, other in itertools.pairwise(begins)]
        forwards = [self._meter.between(begin, end) for begin, end in self._marks[1:]]
        known = [pair for pair in zip(steps, forwards, strict=False) if None not in pair]
        if len(known) < MEASURED:
            return
        rates = self._rates()
        if rates is None:
            return
        self._measured[self._count] = statistics.median(step for step, _ in known if step is not None)
        if not self._count:
            self._forward = statistics.median(forward for _, forward in known if forward is not None)
        self._choose(rates)
        self._marks.clear()

    def _choose(self, rates: tuple[float, float]) -> None:
        base = self._measured[0]
        nbytes = statistics.mean(self.bytes_of.get(name, 0) for name in self._names)
        if not nbytes:
            self._settle(0, "the blocks save nothing that could leave")
            return
        if not self._predicted:
            shares = {"forward": self._forward, "backward": base - self._forward}
            self._predicted = {
                count: predict(
                    count, blocks=len(self._names), nbytes=nbytes, out_rate=rates[0], in_rate=rates[1], **shares
                )
                for count in range(len(self._names) + 1)
            }
        if self._target is not None:
            self._settle_under_target(nbytes)
            return
        allowed = base * self._max_slowdown
        if not self._count and len(self._measured) == 1:
            self._count = max(count for count, stall in self._predicted.items() if stall <= allowed)
            self._why = f"{self._count} blocks are predicted to take {self._predicted[self._count]:.1f} ms"
            if not self._count:
                self._settle(0, f"one block is predicted to take {self._predicted[1]:.1f} ms, and {allowed:.1f} may be")
            return
        fitting = [count for count, step in self._measured.items() if step - base <= allowed]
        best = max(fitting)
        slower = self._measured[self._count] - base
        if slower > allowed:
            lower = self._count - 1
            if lower in self._measured:
                self._settle(best, f"{self._count} blocks took {slower:.1f} ms, and {allowed:.1f} may be")
            else:
                self._count = lower
        elif self._count == len(self._names) or self._count + 1 in self._measured:
            self._settle(self._count, f"{self._count} blocks took {slower:.1f} ms, and {allowed:.1f} may be")
        else:
            self._count += 1

    def _settle_under_target(self, nbytes: float) -> None:
        assert self._target is not None
        total = nbytes * len(self._names)
        # One block is still under way at the end.
        left = {count: total - max(count - 1, 0) * nbytes for count in range(len(self._names) + 1)}
        found = [count for count, kept in left.items() if kept <= self._target]
        if found:
            self._settle(min(found), f"{min(found)} blocks leave {left[min(found)]:.0f} bytes, of {self._target} asked")
        else:
            count = len(self._names)
            self._settle(count, f"all blocks leave {left[count]:.0f} bytes, more than the {self._target} asked for")

    def _settle(self, count: int, why: str) -> None:
        self._count, self._why, self.is_settled = count, why, True

    def plan(self) -> dict[str, Any]:
        """Return what was chosen, and why."""
        base = self._measured.get(0)
        measured = self._measured.get(self._count)
        return {
            "is_settled": self.is_settled,
            "blocks": [name for name in self._names if name in self.sends],
            "why": self._why,
            "step_ms": base,
            "forward_ms": self._forward or None,
            "predicted_ms": self._predicted.get(self._count),
            "measured_ms": None if base is None or measured is None else measured - base,
            "bytes_away": sum(self.bytes_of.get(name, 0) for name in self.sends),
            "bytes_of_all": sum(self.bytes_of.values()),
        }


class Link:
    """The speed of the link to a device, found out with one copy each way, beside whatever the device does."""

    NBYTES = 64 << 20

    def __init__(self, device: torch.device, pool: HostPool) -> None:
        self._host = pool.acquire(self.NBYTES)
        self._pool = pool
        self._device = torch.empty(self.NBYTES, dtype=torch.uint8, device=device)
        self._rates: tuple[float, float] | None = None
        self._marks: list[Any] = []
        self._meter: Meter = DeviceMeter() if device.type == "cuda" else HostMeter()
        if device.type != "cuda":
            self._copy()
            return
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The memory may have been somebody's until now.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._copy()

    def _copy(self) -> None:
        self._marks.append(self._meter.mark())
        self._host.copy_(self._device, non_blocking=True)
        self._marks.append(self._meter.mark())
        self._device.copy_(self._host, non_blocking=True)
        self._marks.append(self._meter.mark())

    def rates(self) -> tuple[float, float] | None:
        """Return bytes per millisecond out and in; None as long as the copies are not done."""
        if self._rates is None:
            begin, middle, end = self._marks
            if self._meter.between(begin, end) is None:
                return None
            out, back = self._meter.between(begin, middle), self._meter.between(middle, end)
            assert out is not None
            assert back is not None
            self._rates = self.NBYTES / max(out, 1e-6), self.NBYTES / max(back, 1e-6)
            self._pool.release(self._host)
            del self._host, self._device
        return self._rates
