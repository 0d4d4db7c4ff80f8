"""How the GPU lane meets the state on this machine: measured once per device, and kept."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from outboard._lanes import LaneOptions
from outboard._native import Core

#: Elements and repetitions of the measurement: 160 MB of state, some 50 ms for each way.
_NUMEL = 16 * 1024 * 1024
_REPEATS = 5

_known: dict[str, str] = {}


def choose(device: torch.device) -> str:
    """Return "staged" or "zero_copy", whichever updated more elements per second on this device."""
    key = _key(device)
    if key not in _known:
        _known[key] = _read(key) or _measure(device, key)
    return _known[key]


def _key(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {getattr(properties, 'uuid', '')} on {os.uname().nodename}"


def _file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "outboard" / "transfer.json"


def _read(key: str) -> str | None:
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError):
        choice = json.loads(_file().read_text(encoding="utf-8"))[key]["transfer"]
        return choice if choice in ("staged", "zero_copy") else None
    return None


def _measure(device: torch.device, key: str) -> str:
    seconds = {transfer: _seconds(device, transfer) for transfer in ("staged", "zero_copy")}
    # Zero-copy occupies the device's processors while it waits for the link; it has to be clearly faster.
    choice = "zero_copy" if seconds["zero_copy"] < 0.9 * seconds["staged"] else "staged"
    _write(key, {"transfer": choice, **{f"{name}_gelem_per_s": _NUMEL / s / 1e9 for name, s in seconds.items()}})
    return choice


def _seconds(device: torch.device, transfer: str) -> float:
    """Return the median time of a step of the GPU lane alone."""
    lanes = replace(LaneOptions(), mode="gpu", transfer=transfer).native(1, is_asked_for=True)
    core = Core(1, {**lanes, "simulate": None})
    parameter = torch.nn.Parameter(torch.zeros(_NUMEL, dtype=torch.bfloat16, device=device))
    parameter.grad = torch.zeros_like(parameter)
    group = {"params": [parameter], "lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    group |= {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
    core.bind([group], [(parameter, "a measurement", 0, False, False, False, None)])
    times = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        core.step(
            [group],
            max_grad_norm=None,
            compute_grad_norm=False,
            nonfinite="propagate",
            grad_scale=None,
            found_inf=False,
            seed=0,
            chunk_elems=_NUMEL,
            attached=False,
            lets_go=False,
        )
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    core.close()
    return statistics.median(times[1:])


def _write(key: str, found: dict[str, object]) -> None:
    """Keep what was measured; where that is not possible, the next process measures again."""
    with contextlib.suppress(OSError, ValueError):
        path = _file()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = {}
        known[key] = found
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(known, file, indent=1)
        os.replace(file.name, path)
