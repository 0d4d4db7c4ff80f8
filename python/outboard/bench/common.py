"""What the benchmarks share: the machine, versions, dtypes and devices by name."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from outboard._arguments import check_choice
from outboard._native import build_info

#: Told what is measured next.
Progress = Callable[[str], None]

#: Dtypes of weights by the names that the command line and JSON have for them.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}

#: Dtypes of the moments.
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

MODES = ("auto", "cpu", "gpu")


class PlotError(RuntimeError):
    """A plot cannot be drawn: matplotlib is missing, or the file cannot be written."""


def silent(_: str) -> None:
    """Say nothing of the progress."""


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Return the processor's name, its architecture and the ISA level in use; with a CUDA device, its name too."""
    name = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    except OSError:
        pass
    result = {"cpu": name, "architecture": platform.machine(), "isa": build_info()["isa"]}
    if device is not None and device.type == "cuda":
        result["gpu"] = torch.cuda.get_device_name(device)
    return result


def versions(*distributions: str) -> dict[str, str]:
    """Return the versions of outboard, torch and those of the distributions that are installed."""
    result = {"outboard": str(build_info()["version"]), "torch": str(torch.__version__)}
    for name in distributions:
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


def check_device(device: str) -> torch.device:
    """Return the device of a name such as "cpu", "cuda" or "cuda:1"; this does not initialise CUDA.

    Raises
    ------
    ValueError
        For another name.
    """
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', not {device!r}")
    return found


def need_device(device: torch.device) -> None:
    """Raise a RuntimeError if torch cannot use the device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"torch finds no CUDA device for {device}; 'cpu' measures the host's side alone")


def check_dtypes(dtype: str, state_dtype: str) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of weights and moments of these names."""
    check_choice("dtype", dtype, tuple(DTYPES))
    check_choice("state_dtype", state_dtype, tuple(STATE_DTYPES))
    return DTYPES[dtype], STATE_DTYPES[state_dtype]


def synchronize(device: torch.device) -> None:
    """Wait for what was enqueued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Let torch's CPU kernels use this many threads for a while; None changes nothing."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
