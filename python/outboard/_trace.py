"""Chunks of a recorded timeline in the traces that `torch.profiler` exports."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: What the tracks are listed under.
PROCESS = "outboard"


def add_chunks_to_trace(path: str | os.PathLike[str], timeline: Iterable[tuple[str, str, float, float]]) -> None:
    """Add the chunks of a timeline to a trace that `torch.profiler` has exported, as tracks of their own.

    To be called in the process that was profiled, soon after: chunks are timed by `time.perf_counter`, the trace by the
    time of day, and what lies between the two is asked for now. A change of the system's clock since then shifts them.

    Parameters
    ----------
    path : path
        What `profile.export_chrome_trace` has written, `.json` or `.json.gz`. It is replaced once all is written.
    timeline : iterable
        From `optimizer.take_timeline()`: lane, parameter, start and end in seconds.

    Raises
    ------
    ValueError
        If the file is not such a trace; it is left as it is.
    """
    path = Path(path)
    is_packed = path.suffix == ".gz"
    raw = path.read_bytes()
    trace = json.loads(gzip.decompress(raw) if is_packed else raw)
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path} is not a trace that torch.profiler has exported: it has no traceEvents")
    # The trace counts microseconds from a moment that it names by its Unix time, or from 1970.
    to_trace = _unix_time_of_perf_counter() - int(trace.get("baseTimeNanoseconds", 0))
    trace["traceEvents"].extend(_events(timeline, to_trace))
    text = json.dumps(trace).encode()
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(gzip.compress(text) if is_packed else text)
    os.replace(beside, path)


def _unix_time_of_perf_counter() -> int:
    """Return the Unix time at which `time.perf_counter` was 0, in nanoseconds."""
    readings = []
    for _ in range(20):
        before, now, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, now - (before + after) // 2))
    # The one that was interrupted least.
    return min(readings)[1]


def _events(timeline: Iterable[tuple[str, str, float, float]], to_trace: int) -> list[dict[str, Any]]:
    """Return a track for each lane, or as many as it takes for chunks beside each other."""
    events: list[dict[str, Any]] = [_meta("process_name", {"name": PROCESS})]
    #: For each lane, the tracks: number, and when the last chunk ends.
    tracks: dict[str, list[list[float]]] = {}
    count = 0
    for lane, parameter, start, end in sorted(timeline, key=lambda chunk: chunk[2]):
        free = [track for track in tracks.setdefault(lane, []) if track[1] <= start]
        if free:
            track = free[0]
        else:
            count += 1
            track = [count, 0.0]
            tracks[lane].append(track)
            events.append(_meta("thread_name", {"name": lane}, count))
        track[1] = end
        began = (round(start * 1e9) + to_trace) / 1e3
        events.append(
            {
                "ph": "X",
                "cat": PROCESS,
                "name": parameter,
                "pid": PROCESS,
                "tid": int(track[0]),
                "ts": began,
                "dur": (end - start) * 1e6,
            }
        )
    return events


def _meta(name: str, arguments: dict[str, Any], track: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": PROCESS, "tid": track, "ts": 0, "args": arguments}


__all__ = ["add_chunks_to_trace"]
