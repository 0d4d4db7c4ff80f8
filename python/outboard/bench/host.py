"""The update of tensors in host memory beside torch's fused AdamW. Also `python -m outboard bench host`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from outboard import bench
from outboard._adam import AdamW
from outboard._arguments import check_choice, check_count
from outboard._lanes import HOST_CHUNK_ELEMS
from outboard._native import default_threads, host_tensor, stream_pass
from outboard.bench.common import Progress, machine, silent, torch_threads, versions

#: Bytes that one element's update must read and write, by the dtype of weight and gradient and that of the moments.
_BYTES = {"fp32": 28, "bf16": 26, "bf16_moments": 18}


def host(
    numel: int = 64 * 1024 * 1024,
    threads: int | None = None,
    dtype: str = "all",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Measure the host step against torch's fused AdamW.

    Parameters
    ----------
    numel : int
        Elements of the one large parameter.
    threads : int, optional
        Worker threads of both sides; None: as many as an optimizer takes by default.
    dtype : {"all", "float32", "bfloat16"}
        Which weights to measure. The 10,000 tiny parameters belong to float32.
    progress : callable
        Told what is measured next.

    Returns
    -------
    dict
        `numel`, `threads`, `machine`, `versions` and one entry per case: `fp32`, `tiny`, `bf16` (bf16 weights and
        gradients, fp32 moments), `bf16_moments`. Times are medians in ms, `gelem_per_s` is 1e9 elements per second,
        `gb_per_s` counts the bytes that must move. `fp32` also has `torch_fused_gain_from_huge_pages` (torch's kernel
        on its own pages over torch's kernel on the arena's), `bandwidth_fraction` (outboard's bytes per second over
        those of a stream loop over the same tensors) and `bits_equal`.
    """
    numel = check_count("numel", numel)
    threads = default_threads()[0] if threads is None else check_count("threads", threads)
    check_choice("dtype", dtype, ("all", "float32", "bfloat16"))
    result: dict[str, Any] = {
        "numel": numel,
        "threads": threads,
        "machine": machine(),
        "versions": versions(),
    }
    with torch_threads(threads):
        if dtype in ("all", "float32"):
            progress("fp32")
            result["fp32"] = _fp32(numel, threads)
            progress("tiny parameters")
            result["tiny"] = _tiny(threads)
        if dtype in ("all", "bfloat16"):
            progress("bf16 weights")
            result["bf16"] = _bf16(numel, threads, torch.float32)
            progress("bf16 weights and moments")
            result["bf16_moments"] = _bf16(numel, threads, torch.bfloat16)
    return result


def _medians(sides: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return each side's median time in ms over `bench.BLOCKS` alternating blocks.

    A block is one call that is not timed and `bench.TIMED` that are. The first call of a block would also measure the
    other side: OpenMP's threads spin for milliseconds after torch's kernel, on the cores that the next one needs. On 16
    cores that made either side 20 % slower than it is by itself.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(bench.BLOCKS):
        for name, run in sides.items():
            run()
            began = time.perf_counter()
            for _ in range(bench.TIMED):
                run()
            times[name].append((time.perf_counter() - began) * 1e3 / bench.TIMED)
    return {name: statistics.median(values) for name, values in times.items()}


def _rates(ms: float, numel: int, bytes_per_element: int) -> dict[str, float]:
    return {
        "ms": ms,
        "gelem_per_s": numel / ms / 1e6,
        "gb_per_s": numel * bytes_per_element / ms / 1e6,
    }


def _parameter(values: torch.Tensor, grad: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(values)
    parameter.grad = grad
    return parameter


def _torch_on(values: torch.Tensor, grad: torch.Tensor, threads: int, arena: bool) -> tuple[Any, Any]:
    """Return torch's fused AdamW over a copy of the values, all its tensors on its own pages or on the arena's."""

    def place(source: torch.Tensor) -> torch.Tensor:
        if not arena:
            return source.clone()
        return from_dlpack(host_tensor(source.numel(), "float32", threads)).copy_(source)

    parameter = _parameter(place(values), place(grad))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    if arena:
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": place(torch.zeros_like(values)),
            "exp_avg_sq": place(torch.zeros_like(values)),
        }
    return parameter, optimizer


def _values(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)


def _fp32(numel: int, threads: int) -> dict[str, Any]:
    values, grad = _values(numel)
    ours = _parameter(values.clone(), grad.clone())
    optimizer = AdamW([ours], threads=threads)
    theirs, torch_optimizer = _torch_on(values, grad, threads, arena=False)
    _, torch_on_arena = _torch_on(values, grad, threads, arena=True)
    del values, grad
    steps = _medians(
        {
            "outboard": optimizer.step,
            "torch": torch_optimizer.step,
            "torch_on_arena": torch_on_arena.step,
        }
    )
    bits_equal = torch.equal(ours, theirs)
    del theirs, torch_optimizer, torch_on_arena
    # The same tensors, in the same run: the loop may spoil them now.
    state = optimizer.state[ours]
    assert ours.grad is not None
    tensors = (ours.detach(), state["exp_avg"], state["exp_avg_sq"], ours.grad.mul_(1e-9))
    pair = _medians(
        {
            "outboard": optimizer.step,
            "stream": lambda: stream_pass(tensors, threads, HOST_CHUNK_ELEMS),
        }
    )
    return {
        **_rates(steps["outboard"], numel, _BYTES["fp32"]),
        "torch_fused_ms": steps["torch"],
        "ratio_to_torch_fused": steps["torch"] / steps["outboard"],
        "torch_fused_gain_from_huge_pages": steps["torch"] / steps["torch_on_arena"],
        "stream_gb_per_s": numel * _BYTES["fp32"] / pair["stream"] / 1e6,
        "bandwidth_fraction": pair["stream"] / pair["outboard"],
        "bits_equal": bits_equal,
    }


def _tiny(threads: int) -> dict[str, Any]:
    values, grad = _values(bench.TINY_PARAMETERS * bench.TINY_ELEMENTS)

    def parameters() -> list[torch.nn.Parameter]:
        pairs = zip(torch.split(values, bench.TINY_ELEMENTS), torch.split(grad, bench.TINY_ELEMENTS), strict=True)
        return [_parameter(value.clone(), gradient.clone()) for value, gradient in pairs]

    ours = AdamW(parameters(), threads=threads)
    theirs = torch.optim.AdamW(parameters(), fused=True)
    steps = _medians({"outboard": ours.step, "torch": theirs.step})
    return {
        "parameters": bench.TINY_PARAMETERS,
        **_rates(steps["outboard"], values.numel(), _BYTES["fp32"]),
        "torch_fused_ms": steps["torch"],
        "ratio_to_torch_fused": steps["torch"] / steps["outboard"],
    }


def _bf16(numel: int, threads: int, state_dtype: torch.dtype) -> dict[str, Any]:
    values, grad = (tensor.bfloat16() for tensor in _values(numel))
    optimizer = AdamW([_parameter(values.clone(), grad.clone())], threads=threads, state_dtype=state_dtype)
    _, torch_optimizer = _torch_on(values.float(), grad.float(), threads, arena=False)
    steps = _medians({"outboard": optimizer.step, "torch": torch_optimizer.step})
    bytes_per_element = _BYTES["bf16" if state_dtype is torch.float32 else "bf16_moments"]
    return {
        **_rates(steps["outboard"], numel, bytes_per_element),
        "torch_fused_on_fp32_copies_ms": steps["torch"],
        "ratio_to_torch_fused": steps["torch"] / steps["outboard"],
    }
