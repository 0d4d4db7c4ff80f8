"""The update of parameters on a GPU, by each lane alone and by both. Also `python -m outboard bench lanes`."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch

from outboard._adam import AdamW
from outboard._arguments import check_count
from outboard._native import default_threads
from outboard.bench.common import (
    Progress,
    check_device,
    check_dtypes,
    machine,
    need_device,
    silent,
    synchronize,
    torch_threads,
    versions,
)

#: Name in the flat keys, mode and transfer of each row.
_ROWS = (
    ("gpu", "gpu", "staged"),
    ("gpu_zero_copy", "gpu", "zero_copy"),
    ("cpu", "cpu", "auto"),
    ("auto", "auto", "auto"),
)

#: Parameters that the elements are divided among.
PARAMETERS = 16

#: Steps before those that are timed: the first binds slots and pins memory.
WARMUP = 2

#: Host bytes per element beside the moments: the residual of a split master, a full master, none.
_MASTER_BYTES = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 0}


def lanes(
    numel: int = 256 * 1024 * 1024,
    threads: int | None = None,
    device: str = "cuda:0",
    dtype: str = "bfloat16",
    state_dtype: str = "float32",
    repeats: int = 7,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Measure one unattached step of the GPU lane, staged and zero-copy, of the CPU lane and of both.

    Parameters
    ----------
    numel : int
        Elements in all, divided among 16 parameters, equal but for one element.
    threads : int, optional
        Worker threads; None: as many as an optimizer takes by default.
    device : str
        Where weights and gradients are: "cuda", "cuda:N", or "cpu", which has no GPU lane to measure.
    dtype : {"bfloat16", "float32", "float16"}
        Of weights and gradients.
    state_dtype : {"float32", "bfloat16"}
        Of the moments.
    repeats : int
        Timed steps of each row, after 2 that are not; the median is reported.
    progress : callable
        Told what is measured next.

    Returns
    -------
    dict
        `rows`, each with `mode`, `transfer`, `seconds` (the median of a step), `gelem_per_s` (1e9 elements per
        second), `gb_per_s_to_device` and `gb_per_s_from_device` (1e9 bytes per second that the lane must move each
        way: the GPU lane the state, both ways; the CPU lane gradient and weight down and the weight up; None where
        lanes share the work and `opt.stats()` has no `gpu_share`). Flat: `gpu_gelem_per_s`,
        `gpu_zero_copy_gelem_per_s`, `cpu_gelem_per_s`, `auto_gelem_per_s` (None: not measured). Beside them what was
        asked for, `state_bytes_per_element`, `machine` and `versions`.

    Raises
    ------
    TypeError, ValueError
        For arguments that cannot be used; the message lists the allowed values.
    RuntimeError
        If torch finds no such device.
    """
    numel = check_count("numel", numel)
    repeats = check_count("repeats", repeats)
    threads = default_threads()[0] if threads is None else check_count("threads", threads)
    weights, moments = check_dtypes(dtype, state_dtype)
    place = check_device(device)
    need_device(place)
    result: dict[str, Any] = {
        "numel": numel,
        "parameters": min(PARAMETERS, numel),
        "threads": threads,
        "device": str(place),
        "dtype": dtype,
        "state_dtype": state_dtype,
        "state_bytes_per_element": state_bytes(weights, moments),
        "repeats": repeats,
        "machine": machine(place),
        "versions": versions(),
        "rows": [],
    }
    with torch_threads(threads):
        parameters = _parameters(numel, weights, place)
        for name, mode, transfer in _ROWS:
            seconds = share = None
            if mode != "gpu" or place.type == "cuda":
                progress(f"{mode}, {transfer}" if mode == "gpu" else mode)
                seconds, share = _step(parameters, place, mode, transfer, threads, moments, repeats)
                row = _row(numel, seconds, mode, share, weights, moments, place)
                result["rows"].append({"mode": mode, "transfer": transfer, **row})
            result[f"{name}_gelem_per_s"] = None if seconds is None else numel / seconds / 1e9
    return result


def state_bytes(dtype: torch.dtype, state_dtype: torch.dtype) -> int:
    """Return the bytes of state of one element: both moments and what the weight lacks of its fp32 master."""
    return 2 * state_dtype.itemsize + _MASTER_BYTES[dtype]


def _parameters(numel: int, dtype: torch.dtype, device: torch.device) -> list[torch.nn.Parameter]:
    count = min(PARAMETERS, numel)
    least, larger = divmod(numel, count)
    generator = torch.Generator(device).manual_seed(0)
    parameters = []
    for size in [least + 1] * larger + [least] * (count - larger):
        values = torch.empty(size, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
        parameters.append(torch.nn.Parameter(values))
        parameters[-1].grad = torch.empty_like(values).normal_(0, 1e-3, generator=generator)
    return parameters


def _step(
    parameters: list[torch.nn.Parameter],
    device: torch.device,
    mode: str,
    transfer: str,
    threads: int,
    state_dtype: torch.dtype,
    repeats: int,
) -> tuple[float, float | None]:
    """Return the median seconds of a step and the GPU lane's share of the elements, if the optimizer says it."""
    options: dict[str, Any] = {"lr": 1e-6, "mode": mode, "threads": threads, "state_dtype": state_dtype}
    if device.type == "cuda":
        options["transfer"] = transfer
    optimizer = AdamW(parameters, **options)
    times = []
    for repeat in range(WARMUP + repeats):
        synchronize(device)
        began = time.perf_counter()
        optimizer.step()
        synchronize(device)
        if repeat >= WARMUP:
            times.append(time.perf_counter() - began)
    share = {"gpu": 1.0, "cpu": 0.0}.get(mode, optimizer.stats().get("gpu_share"))
    # Its pinned memory goes before the next one takes as much.
    del optimizer
    gc.collect()
    return statistics.median(times), share


def _row(
    numel: int,
    seconds: float,
    mode: str,
    share: float | None,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    to_device = from_device = None
    if device.type == "cpu":
        to_device = from_device = 0.0
    elif share is not None:
        state, weight = state_bytes(dtype, state_dtype), dtype.itemsize
        to_device = (share * state + (1 - share) * weight) * numel / seconds / 1e9
        from_device = (share * state + (1 - share) * 2 * weight) * numel / seconds / 1e9
    row = {
        "gelem_per_s": numel / seconds / 1e9,
        "seconds": seconds,
        "gb_per_s_to_device": to_device,
        "gb_per_s_from_device": from_device,
    }
    return {**row, "gpu_share": share} if mode == "auto" and device.type == "cuda" else row
