"""Train a GPT over several GPUs with torch's AdamW and with outboard's, under DDP and FSDP2, and compare.

    python benchmarks/ranks.py [--gpus 2] [--model gpt-350m] [--batch 4] [--steps 20] [--wrap ddp fsdp2] [--json]

fp32 weights, bf16 autocast, every side in processes of its own on the same batches. torch runs four times: its fused
kernel thrice, and its foreach one, which rounds otherwise; that is how far apart torch's own results are. `loss` and
`weight` are the largest differences to torch's first run, over all steps and over all weights of rank 0 (under FSDP2,
of its shards). `step` is the median of the steps after the first three; `held` is device memory that is allocated after
the last step, `peak` the most there was; both in GiB and of rank 0. `state` is the state that the rank has in host
memory, in GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import outboard
from outboard.bench.common import machine, versions
from outboard.bench.models import MODELS, build

SIDES = ("torch fused", "torch fused, second run", "torch fused, third run", "torch foreach", "outboard")
GIB = 2**30


def wrap(model: Any, how: str, world_size: int, device: torch.device) -> Any:
    """Return a model under DDP, or with its blocks as units of FSDP2."""
    if how == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index], gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def optimizer_of(side: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return a side's optimizer."""
    if side == "outboard":
        return outboard.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1).attach(model)
    is_foreach = side.endswith("foreach")
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=not is_foreach, foreach=is_foreach)


def train(rank: int, options: argparse.Namespace, how: str, side: str, folder: str) -> None:
    """Train one side on one rank, and leave its figures and weights in a folder."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.gpus))
    os.environ.update(LOCAL_WORLD_SIZE=str(options.gpus))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = f"file://{folder}/store-{how}-{SIDES.index(side)}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=rank, world_size=options.gpus)
    model = wrap(build(options.model, 0, torch.float32, device), how, options.gpus, device)
    optimizer = optimizer_of(side, model)
    generator = torch.Generator().manual_seed(rank)
    shape = MODELS[options.model]
    losses, seconds = [], []
    for _ in range(options.steps):
        tokens = torch.randint(shape.vocabulary, (options.batch, shape.context + 1), generator=generator).to(device)
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    weights = [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]
    torch.cuda.synchronize(device)
    figures = {
        "losses": losses,
        "step_ms": statistics.median(seconds[3:]) * 1e3,
        "held_gib": torch.cuda.memory_allocated(device) / GIB,
        "peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "state_gib": 0.0,
    }
    if isinstance(optimizer, outboard.AdamW):
        stats = optimizer.stats()
        figures |= {"state_gib": stats["state_bytes"] / GIB, "eager_updates": stats["eager_updates"]}
        figures["device_ring_gib"] = stats["device_bytes"] / GIB
    if rank == 0:
        torch.save([weight.cpu() for weight in weights], f"{folder}/{how}-{side}.pt")
        Path(folder, f"{how}-{side}.json").write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def compare(folder: str, how: str) -> list[dict[str, Any]]:
    """Return a row for each side, with its differences to the first."""
    rows: list[dict[str, Any]] = []
    first = torch.load(f"{folder}/{how}-{SIDES[0]}.pt")
    for side in SIDES:
        row = {"wrap": how, "side": side, **json.loads(Path(folder, f"{how}-{side}.json").read_text(encoding="utf-8"))}
        weights = torch.load(f"{folder}/{how}-{side}.pt")
        pairs = [(a, b) for a, b in zip(first, weights, strict=True) if a.numel()]
        row["weight_difference"] = max((a - b).abs().max().item() for a, b in pairs)
        losses = zip((rows or [row])[0]["losses"], row["losses"], strict=True)
        row["loss_difference"] = max(abs(a - b) for a, b in losses)
        rows.append(row)
    return rows


def main() -> None:
    """Train all sides and print a table, or everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt-350m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--wrap", nargs="+", choices=("ddp", "fsdp2"), default=["ddp", "fsdp2"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if torch.cuda.device_count() < options.gpus:
        parser.error(f"{options.gpus} GPUs are asked for, and there are {torch.cuda.device_count()}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for how in options.wrap:
            for side in SIDES:
                spawn(train, (options, how, side, folder), nprocs=options.gpus)  # type: ignore[no-untyped-call]
            rows += compare(folder, how)
    if options.json:
        print(json.dumps({"machine": machine(), "versions": versions(), "rows": rows}))
        return
    print(f"{options.model}, {options.gpus} GPUs, batch {options.batch}, {options.steps} steps; {versions()}")
    print("| wrap | side | loss | weight | step, ms | held, GiB | peak, GiB | state on the host, GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [row["wrap"], row["side"], f"{row['loss_difference']:.2e}", f"{row['weight_difference']:.2e}"]
        cells += [f"{row[key]:.2f}" for key in ("step_ms", "held_gib", "peak_gib", "state_gib")]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
