"""Results of the benchmarks as tables for a person."""

from __future__ import annotations

import re
from typing import Any

from outboard import bench
from outboard.bench.terminal import Table, figure

_CASES = {
    "fp32": "fp32 weights and moments",
    "tiny": "fp32, {parameters:,} small parameters",
    "bf16": "bf16 weights, fp32 moments",
    "bf16_moments": "bf16 weights and moments",
}
_NOTES = {
    "torch_fused_gain_from_huge_pages": "torch's own gain from huge pages: {}",
    "stream_gb_per_s": "stream loop over the same tensors: {} GB/s",
    "bandwidth_fraction": "bandwidth, as a fraction of the stream loop's: {}",
    "bits_equal": "the same bits as torch: {}",
}


def host(result: dict[str, Any]) -> Table:
    """Return the table of a result of `outboard.bench.host`."""
    headings = ["case", "outboard, ms", "torch fused, ms", "ratio", "Gel/s", "GB/s"]
    rows, notes = [], []
    for case, values in result.items():
        if not isinstance(values, dict) or "ms" not in values:
            continue
        rest = dict(values)
        torch_key = next((k for k in rest if re.fullmatch(r"torch_fused\w*_ms", k)), "")
        keys = ("ms", torch_key, "ratio_to_torch_fused", "gelem_per_s", "gb_per_s")
        name = _CASES.get(case, case).format_map(values)
        rows.append([name, *(figure(rest.pop(key, None)) for key in keys)])
        if "fp32_copies" in torch_key:
            notes.append(f"{case}: torch's side updates fp32 copies")
        for key, value in rest.items():
            if f"{{{key}" in _CASES.get(case, ""):
                continue
            note = _NOTES.get(key, key.replace("_", " ") + ": {}")
            notes.append(f"{case}: {note.format(figure(value))}")
    title = (
        f"AdamW on tensors in host memory: {result['numel']:,} elements, {_threads(result)}, "
        f"medians of {bench.BLOCKS} alternating blocks"
    )
    meaning = (
        "ratio: torch's time over outboard's; above 1, outboard is faster. Gel/s: 1e9 elements "
        "per second. GB/s: bytes that must move."
    )
    return Table(title, headings, rows, [meaning, *notes, *machine(result)])


def lanes(result: dict[str, Any]) -> Table:
    """Return the table of a result of `outboard.bench.lanes`."""
    headings = ["lane", "ms", "Gel/s", "GB/s to device", "GB/s from device"]
    rows = [
        [
            {"auto": "both"}.get(row["mode"], f"{row['mode']}, {row['transfer']}" if row["mode"] == "gpu" else "cpu"),
            figure(row["seconds"] * 1e3),
            *(figure(row[key]) for key in ("gelem_per_s", "gb_per_s_to_device", "gb_per_s_from_device")),
        ]
        for row in result["rows"]
    ]
    title = (
        f"AdamW on {result['device']}, not attached: {result['numel']:,} {result['dtype']} elements in "
        f"{result['parameters']} parameters, {result['state_dtype']} moments, {_threads(result)}, "
        f"medians of {result['repeats']} steps"
    )
    meaning = (
        "Gel/s: 1e9 elements per second. GB/s: what the lane must move each way; the GPU lane "
        f"{result['state_bytes_per_element']} bytes of state per element both ways."
    )
    return Table(title, headings, rows, [meaning, *machine(result)])


def step(result: dict[str, Any]) -> Table:
    """Return the table of a result of `outboard.bench.training_step`."""
    columns = {
        "step, ms": "step_ms",
        "ratio": "ratio_to_torch_fused",
        "peak device GiB": "peak_device_gib",
        "over fwd+bwd": "device_gib_over_forward_backward",
        "host GiB": "host_gib",
        "start, s": "start_seconds",
        "first loss": "loss_first",
        "last loss": "loss_last",
        "hooks, ms": "hook_ms_per_step",
        "stall, ms": "forward_stall_ms",
    }
    sides = result["sides"].values()
    rows = [[row["title"], *(figure(row[key]) for key in columns.values())] for row in sides if row["error"] is None]
    clip = f", clip {result['clip']:g}" if result["clip"] is not None else ""
    tiny = f" and {result['tiny']:,} tiny ones" if result["tiny"] else ""
    eager = "" if result["device"] == "cpu" else f", eager {result['eager']}"
    rounds = "1 round" if result["rounds"] == 1 else f"{result['rounds']} rounds"
    title = (
        f"Training step on {result['device']}: {result['model']}{tiny}, {figure(result['parameters'])} "
        f"{result['dtype']} parameters, {result['batch']} x {result['seq']:,} tokens{clip}; "
        f"outboard: mode {result['mode']}{eager}; {result['steps']} steps after {result['warmup']}, {rounds}"
    )
    notes = [
        "ratio: torch's time over this side's; above 1, this side is faster. over fwd+bwd: GiB of the device "
        "beyond what forward and backward alone take. hooks, stall: of each step, as outboard counts them."
    ]
    notes += [f"{row['title']}: {row['error']}" for row in sides if row["error"] is not None]
    notes += [
        f"{row['title']} warned: {line}" for row in sides for line in row["warnings"] if row["side"] == "outboard"
    ]
    if any(row["side"] in ("torch", "torchao") for row in sides) and result["dtype"] != "float32":
        notes.append(
            f"torch and torchao keep {result['dtype']} moments and no master; outboard {result['state_dtype']} moments "
            "and an fp32 master"
        )
    return Table(title, ["side", *columns], rows, [*notes, *machine(result)])


def machine(result: dict[str, Any]) -> list[str]:
    """Return the lines that say where and with what a result was made."""
    names = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [
        f"machine: {', '.join(str(value) for value in result['machine'].values() if value) or 'not known'}",
        f"versions: {names}",
    ]


def _threads(result: dict[str, Any]) -> str:
    return "1 thread" if result["threads"] == 1 else f"{result['threads']} threads"
