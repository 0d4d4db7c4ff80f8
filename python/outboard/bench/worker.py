"""One side of the training-step benchmark, in a process of its own: a `Setup` as JSON in, one line of JSON out.

    python -m outboard.bench.worker '{"side": "torch", ...}'

Whatever else is printed goes to stderr.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from outboard.bench import models, sides
from outboard.bench.common import DTYPES, machine, need_device, synchronize
from outboard.bench.setup import Setup

_GIB = 1 << 30

#: Of `opt.stats()`: what a result has beside the whole of it.
_FROM_STATS = ("hook_ms_per_step", "forward_stall_ms")

#: Steps that the timeline is cut from; the second is shown, with what reaches into it.
_RECORDED = 3

#: Track, label, start and end in seconds.
Span = tuple[str, str, float, float]


def measure(setup: Setup) -> dict[str, Any]:
    """Train and return what it took.

    Parameters
    ----------
    setup : Setup
        What to train with what.

    Returns
    -------
    dict
        `step_ms` over all timed steps, synchronised at both ends of them alone; `start_seconds` until the optimizer is
        made and attached; `parameters`; `loss_first` and `loss_last`, None where not finite; `host_gib`, the most
        memory that the process has had; `peak_device_gib`, torch's own count from the start to the end,
        `device_used_gib_before` and `device_used_gib_after`, of the whole device, before the model and after the
        steps, and `device_gib_outside_torch`, what was taken between the two and torch does not count; what
        `opt.stats()` says, and `timeline`.
    """
    device = torch.device(setup.device)
    need_device(device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if setup.threads is not None and device.type == "cpu":
        torch.set_num_threads(setup.threads)
    used_before = _device_used(device)
    model = models.build(setup.model, setup.tiny, DTYPES[setup.dtype], device)
    generator = torch.Generator(device).manual_seed(1)
    size = (setup.batch, setup.seq)
    vocabulary = models.check_model(setup.model).vocabulary
    tokens, targets = (torch.randint(vocabulary, size, generator=generator, device=device) for _ in range(2))
    synchronize(device)

    torch.optim.SGD([torch.ones(1, requires_grad=True)])  # Imports what is lazy in torch and no side's own.
    began = time.perf_counter()
    side = sides.make(setup, model)
    side.synchronize()
    synchronize(device)
    start_seconds = time.perf_counter() - began

    losses = [_step(side, tokens, targets) for _ in range(setup.warmup)]
    seconds = _window(side, device, lambda: losses.append(_step(side, tokens, targets)), setup.steps)
    result = {
        "step_ms": seconds * 1e3 / setup.steps,
        "start_seconds": start_seconds,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "loss_first": _plain(losses[0].item()),
        "loss_last": _plain(losses[-1].item()),
        "host_gib": _most_memory() / _GIB,
        **_device_memory(device, used_before),
        **_optimizer(side.optimizer),
        "machine": machine(device),
    }
    if setup.timeline:
        result["timeline"] = timeline(side, device, tokens, targets)
    return result


def _step(side: sides.Side, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = side.forward(tokens, targets)
    side.backward(loss)
    side.update()
    return loss.detach()


def _window(side: sides.Side, device: torch.device, step: Callable[[], object], steps: int) -> float:
    """Return the seconds of so many steps, everything that belongs to them done."""
    side.synchronize()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    side.synchronize()
    synchronize(device)
    return time.perf_counter() - began


def _most_memory() -> int:
    """Return the most bytes of memory that this process has had.

    ru_maxrss, which also counts what the parent had when it started this one, where the kernel says nothing better.
    """
    try:
        with open("/proc/self/status", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _device_used(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _device_memory(device: torch.device, used_before: int) -> dict[str, Any]:
    if device.type == "cpu":
        keys = ("peak_device_gib", "device_used_gib_before", "device_used_gib_after", "device_gib_outside_torch")
        return dict.fromkeys(keys)
    used = _device_used(device)
    return {
        "peak_device_gib": torch.cuda.max_memory_allocated(device) / _GIB,
        "device_used_gib_before": used_before / _GIB,
        "device_used_gib_after": used / _GIB,
        "device_gib_outside_torch": (used - used_before - torch.cuda.memory_reserved(device)) / _GIB,
    }


def _optimizer(optimizer: Any) -> dict[str, Any]:
    """Return what outboard's optimizer says of itself, nothing of another."""
    result: dict[str, Any] = {}
    if hasattr(optimizer, "stats"):
        result["stats"] = _plain(optimizer.stats())
        result.update({key: result["stats"].get(key) for key in _FROM_STATS})
    if hasattr(optimizer, "plan"):
        result["plan"] = _plain(optimizer.plan())
    return result


def _plain(value: Any) -> Any:
    """Return what JSON can have: None for a float that is not finite, text for what it does not know."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


class _Marks:
    """Moments in the order of the work they stand between, on `time.perf_counter`'s clock.

    On a CUDA device they are events on the current stream; one that was waited for ties their clock to the host's, to
    some tens of microseconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self._began = 0.0
        if device.type == "cuda":
            synchronize(device)
            self._first = self._event()
            self._first.synchronize()
            self._began = time.perf_counter()

    def _event(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def set(self) -> None:
        """Mark the moment at which all that was enqueued is done."""
        self._marks.append(time.perf_counter() if self._device.type == "cpu" else self._event())

    def seconds(self) -> list[float]:
        """Return all moments; the device must be synchronised."""
        if self._device.type == "cpu":
            return list(self._marks)
        return [self._began + self._first.elapsed_time(event) / 1e3 for event in self._marks]


def timeline(
    side: sides.Side, device: torch.device, tokens: torch.Tensor, targets: torch.Tensor
) -> list[tuple[str, str, float, float]]:
    """Return what happened from the start of one forward to that of the next: track, label, start and end in ms."""
    side.synchronize()
    optimizer = side.optimizer
    records = hasattr(optimizer, "record_timeline")
    if records:
        optimizer.record_timeline(True)
    marks = _Marks(device)
    for _ in range(_RECORDED):
        marks.set()
        loss = side.forward(tokens, targets)
        marks.set()
        side.backward(loss)
        marks.set()
        side.update()
    marks.set()
    side.synchronize()
    synchronize(device)
    spans: list[Span] = []
    if records:
        spans += optimizer.take_timeline()
        optimizer.record_timeline(False)
    has_lanes = bool(spans)
    moments = marks.seconds()
    for index in range(0, 3 * _RECORDED, 3):
        started, forward, backward, updated = moments[index : index + 4]
        spans.append(("forward", "forward", started, forward))
        spans.append(("backward", "backward", forward, backward))
        if not has_lanes:
            # Tensors in host memory: the update is the call.
            spans.append(("cpu lane" if device.type == "cpu" else "gpu lane", "step", backward, updated))
    return cut(spans, moments[3], moments[6])


def cut(spans: list[Span], began: float, ended: float) -> list[Span]:
    """Return the parts of the spans between two moments, in ms after the first, in order of their start."""
    return sorted(
        (
            (track, label, (max(start, began) - began) * 1e3, (min(end, ended) - began) * 1e3)
            for track, label, start, end in spans
            if end > began and start < ended
        ),
        key=lambda span: span[2:],
    )


def main() -> None:
    """Measure what the first argument says."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with warnings.catch_warnings(record=True) as caught:
        result = measure(Setup(**json.loads(sys.argv[1])))
    result["warnings"] = list(dict.fromkeys(" ".join(str(warning.message).split()) for warning in caught))
    print(json.dumps(result, allow_nan=False), file=out, flush=True)


if __name__ == "__main__":
    main()
