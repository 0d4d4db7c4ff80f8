"""A whole training step with each optimizer, each in a process of its own. Also `python -m outboard bench step`."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from outboard._arguments import check_choice, check_count
from outboard.bench import sides
from outboard.bench.common import MODES, Progress, check_device, check_dtypes, need_device, silent, versions
from outboard.bench.models import check_model
from outboard.bench.setup import BASELINE, EAGER, OUTBOARD, PEERS, Setup

#: Seconds after which a side is given up.
TIMEOUT = 900.0

#: What is the median over the rounds; the rest is the last round's.
_MEDIANS = ("step_ms", "start_seconds", "peak_device_gib", "host_gib", "hook_ms_per_step", "forward_stall_ms")

#: The keys of a side that was measured, in their order; those that the side does not have are None.
_KEYS = (
    "side",
    "title",
    "resident",
    "step_ms",
    "ratio_to_torch_fused",
    "peak_device_gib",
    "device_gib_over_forward_backward",
    "device_gib_outside_torch",
    "device_used_gib_before",
    "device_used_gib_after",
    "host_gib",
    "start_seconds",
    "loss_first",
    "loss_last",
    "hook_ms_per_step",
    "forward_stall_ms",
    "step_ms_of_rounds",
    "warnings",
    "error",
)


def training_step(
    model: str = "gpt-1.3b",
    batch: int = 8,
    seq: int | None = None,
    clip: float | None = None,
    mode: str = "auto",
    eager: bool | str | None = None,
    resident: Sequence[float] = (0.0,),
    peers: Sequence[str] = PEERS,
    steps: int = 8,
    warmup: int = 3,
    rounds: int = 1,
    device: str = "cuda",
    dtype: str = "bfloat16",
    state_dtype: str = "float32",
    threads: int | None = None,
    tiny: int = 0,
    timeline: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Measure a training step: forward and backward alone, outboard, and other optimizers.

    Each side runs in a process of its own, one after the other, and all of them once in each round. The parameters are
    the same in all. On "cpu" outboard's host optimizer is measured, not attached, beside torch's fused one.

    Parameters
    ----------
    model : {"gpt-1.3b", "gpt-350m", "gpt-125m", "gpt-tiny"}
        What is trained, on random tokens that stay the same.
    batch, seq : int
        Sequences in a batch and tokens in a sequence; None: as many as the model can take (2,048; gpt-tiny 128).
    clip : float, optional
        Clip gradients to this norm: outboard inside the optimizer, the others as they do.
    mode : {"auto", "cpu", "gpu"}
        Of outboard.
    eager : {"auto", True, False}, optional
        Of outboard; None: True where nothing is clipped, else "auto".
    resident : sequence of float
        Shares of outboard's state to keep on the device, each a side.
    peers : sequence of {"torch", "torchao", "deepspeed", "trainstream"}
        Optimizers to measure beside it. "torch" is the fused AdamW with nothing offloaded, to which ratios refer.
    steps, warmup : int
        Timed steps, and those before them.
    rounds : int
        Times that each side is run; medians over them are reported.
    device : str
        "cuda", "cuda:N" or "cpu".
    dtype : {"bfloat16", "float32", "float16"}
        Of weights and gradients.
    state_dtype : {"float32", "bfloat16"}
        Of the moments of outboard and of trainstream. torch and torchao keep the weights' dtype and no master.
    threads : int, optional
        Worker threads of outboard; on "cpu" those of torch too.
    tiny : int
        Parameters of 1,000 elements to add beside the model.
    timeline : bool
        Also record where one step of the first outboard side went.
    progress : callable
        Told what is measured next.

    Returns
    -------
    dict
        What was asked for, `parameters`, `tokens_per_step`, `machine`, `versions`, and `sides`: by name
        (`forward_backward`, `torch`, `outboard`, `outboard_resident_0.25`, peers) a dict with `title`, `resident`,
        `step_ms`, `ratio_to_torch_fused` (torch's time over this side's), `peak_device_gib` (torch's own count),
        `device_gib_over_forward_backward` (that, and what is taken outside of torch, less the same of
        `forward_backward`), `device_gib_outside_torch`, `device_used_gib_before` and `_after` (the whole device),
        `host_gib`, `start_seconds` (to make and attach the optimizer), `loss_first`, `loss_last`, `hook_ms_per_step`,
        `forward_stall_ms`, `step_ms_of_rounds`, `warnings`, `error`; where outboard says them, `stats` and `plan`;
        where asked for, `timeline` (track, label, start and end in ms). A side that could not be measured has None
        for its figures and says why in `error`.

    Raises
    ------
    TypeError, ValueError
        For arguments that cannot be used; the message lists the allowed values.
    RuntimeError
        If torch finds no such device.
    """
    shape = check_model(model)
    seq = shape.context if seq is None else check_count("seq", seq, shape.context)
    check_choice("mode", mode, MODES)
    eager = (clip is None or "auto") if eager is None else eager
    check_choice("eager", eager, EAGER)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be above 0, not {clip}")
    if not isinstance(tiny, int) or tiny < 0:
        raise ValueError(f"tiny must be an int of at least 0, not {tiny!r}")
    for peer in peers:
        check_choice("peers", peer, PEERS)
    check_dtypes(dtype, state_dtype)
    place = check_device(device)
    shares = _check_resident(resident, place.type)
    common = Setup(
        side=BASELINE,
        model=model,
        batch=check_count("batch", batch),
        seq=seq,
        dtype=dtype,
        state_dtype=state_dtype,
        device=device,
        steps=check_count("steps", steps),
        warmup=check_count("warmup", warmup),
        clip=None if clip is None else float(clip),
        mode=mode,
        eager=eager,
        threads=None if threads is None else check_count("threads", threads),
        tiny=tiny,
    )
    rounds = check_count("rounds", rounds)
    need_device(place)
    setups = [common]
    setups += [replace(common, side="torch")] if "torch" in peers else []
    setups += [
        replace(common, side=OUTBOARD, resident=share, timeline=timeline and index == 0)
        for index, share in enumerate(shares)
    ]
    setups += [replace(common, side=peer) for peer in PEERS if peer in peers and peer != "torch"]
    answers = _run(setups, rounds, progress)
    return _result(common, setups, rounds, answers)


def _check_resident(resident: Sequence[float], device: str) -> list[float]:
    shares = list(dict.fromkeys(float(share) for share in resident))
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"resident must be shares from 0 to 1, not {list(resident)}")
    if device == "cpu" and shares != [0]:
        raise ValueError("resident must be 0 where device is 'cpu': there is no device to keep state on")
    return shares


def _run(setups: list[Setup], rounds: int, progress: Progress) -> dict[str, list[dict[str, Any]]]:
    """Return each side's answers, those of a round one after the other."""
    answers: dict[str, list[dict[str, Any]]] = {setup.name: [] for setup in setups}
    for setup in setups:
        if reason := _impossible(setup):
            answers[setup.name].append({"error": reason})
    possible = [setup for setup in setups if not answers[setup.name]]
    for number in range(rounds):
        for index, setup in enumerate(possible, 1):
            if any("error" in answer for answer in answers[setup.name]):
                continue
            progress(f"{setup.title} ({number * len(possible) + index} of {rounds * len(possible)})")
            timed = replace(setup, timeline=setup.timeline and number == rounds - 1)
            answers[setup.name].append(_ask(timed))
    return answers


def _impossible(setup: Setup) -> str:
    """Return why a side cannot be measured here; empty if it can."""
    if not sides.installed(setup.side):
        return "not installed"
    if setup.device == "cpu" and setup.side not in (BASELINE, OUTBOARD, "torch"):
        return "needs a CUDA device"
    return ""


def _ask(setup: Setup) -> dict[str, Any]:
    """Return what a side's process answers; `error` says why it does not."""
    command = [sys.executable, "-m", "outboard.bench.worker", json.dumps(asdict(setup))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TIMEOUT:.0f} s"}
    for line in done.stdout.splitlines():
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer
    return {"error": _reason(done.stderr) or f"exit status {done.returncode}"}


def _reason(stderr: str) -> str:
    """Return the line that says what was raised, else the last one."""
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    raised = [line for line in said if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
    return (raised or said or [""])[-1]


def _result(
    common: Setup, setups: list[Setup], rounds: int, answers: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    asked = {key: value for key, value in asdict(common).items() if key not in ("side", "resident", "timeline")}
    measured = [answer[-1] for answer in answers.values() if "error" not in answer[-1]]
    rows = {setup.name: _row(setup, answers[setup.name]) for setup in setups}
    torch_ms = rows.get("torch", {}).get("step_ms")
    floor = _device_gib(rows[BASELINE])
    for row in rows.values():
        if torch_ms is not None and row["step_ms"] is not None:
            row["ratio_to_torch_fused"] = torch_ms / row["step_ms"]
        taken = _device_gib(row)
        if taken is not None and floor is not None:
            row["device_gib_over_forward_backward"] = taken - floor
    peers = [setup.side for setup in setups if setup.side in PEERS and setup.side != "torch"]
    return {
        **asked,
        "rounds": rounds,
        "tokens_per_step": common.batch * common.seq,
        "parameters": measured[0]["parameters"] if measured else None,
        "machine": measured[0]["machine"] if measured else {},
        "versions": versions(*peers),
        "sides": rows,
    }


def _row(setup: Setup, answers: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(_KEYS)
    row.update(
        warnings=[], side=setup.side, title=setup.title, resident=setup.resident if setup.side == OUTBOARD else None
    )
    last = answers[-1]
    if "error" in last:
        return {**row, "error": last["error"]}
    row.update({key: value for key, value in last.items() if key not in ("machine", "parameters")})
    row["step_ms_of_rounds"] = [answer["step_ms"] for answer in answers]
    for key in _MEDIANS:
        values = [answer[key] for answer in answers if answer.get(key) is not None]
        row[key] = statistics.median(values) if values else None
    return row


def _device_gib(row: dict[str, Any]) -> float | None:
    """Return the most that a side had of the device: by torch's count, and outside of torch at the end."""
    if row["peak_device_gib"] is None:
        return None
    return float(row["peak_device_gib"] + row["device_gib_outside_torch"])
