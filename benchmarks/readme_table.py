"""Run `outboard.bench.host()` and print the README's table, as Markdown.

    python benchmarks/readme_table.py [--numel 67108864] [--threads N]

Every figure in the README's table comes from one run of this script.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import outboard

ROWS = (
    ("fp32", "fp32 weights and state, {numel} Mi elements", "torch_fused_ms"),
    ("tiny", "10,000 fp32 parameters of 1,000 elements", "torch_fused_ms"),
    ("bf16", "bf16 weights, fp32 moments, {numel} Mi elements", "torch_fused_on_fp32_copies_ms"),
    ("bf16_moments", "bf16 weights and moments, {numel} Mi elements", "torch_fused_on_fp32_copies_ms"),
)


def table(result: dict[str, Any]) -> str:
    """Return the Markdown of a result of `outboard.bench.host`."""
    numel = result["numel"] // 1024**2
    lines = [
        "| one step | outboard, ms | Gel/s | GB/s | torch fused, ms | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for key, title, torch_key in ROWS:
        case = result[key]
        lines.append(
            f"| {title.format(numel=numel)} | {case['ms']:.1f} | {case['gelem_per_s']:.2f} | {case['gb_per_s']:.1f} "
            f"| {case[torch_key]:.1f} | **{case['ratio_to_torch_fused']:.2f}** |"
        )
    fp32, machine, versions = result["fp32"], result["machine"], result["versions"]
    equal = "equal" if fp32["bits_equal"] else "NOT equal"
    lines += [
        "",
        f"{machine['cpu']}, {result['threads']} threads, {machine['isa']}; torch {versions['torch']}; medians of "
        f"{outboard.bench.BLOCKS} alternating blocks. The fp32 step moves {fp32['bandwidth_fraction']:.2f} of the "
        "bytes per second that a plain stream loop reaches on the same tensors. torch's own kernel gains "
        f"{fp32['torch_fused_gain_from_huge_pages']:.2f}x on the arena's pages. The fp32 weights of both sides are "
        f"{equal} bit for bit.",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=int, default=64 * 1024**2)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", help="also write the whole result to this file")
    arguments = parser.parse_args()
    result = outboard.bench.host(
        arguments.numel, arguments.threads, progress=lambda what: print(f"measuring {what} ...", file=sys.stderr)
    )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
