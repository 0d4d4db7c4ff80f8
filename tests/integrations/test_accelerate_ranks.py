"""accelerate on two processes: it wraps the model in DistributedDataParallel, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integrations

#: Trains with torch's optimizer and with outboard's in each of the ways, and compares in each rank.
PROGRAM = """
import sys
import torch
torch.set_num_threads(1)
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
import outboard
from outboard import _roster
from outboard._lanes import LaneOptions
from outboard.integrations.accelerate import attach

_roster.TINY_ELEMS = 50


def train(kind, clip=None, mixed="no", save=None, load=None):
    AcceleratorState._reset_state(False)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    LaneOptions.simulate = 11 if kind in ("attach", "by hand") else None
    if kind == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    else:
        optimizer = outboard.AdamW(model.parameters(), lr=1e-2, threads=1, accumulation_steps=2)
    LaneOptions.simulate = None
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    rows = torch.randn(64, 32, generator=torch.Generator().manual_seed(5))
    data = torch.utils.data.DataLoader(rows, batch_size=4)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    assert type(model).__name__ == "DistributedDataParallel"
    if kind == "attach":
        attach(accelerator, model, optimizer)
    elif kind == "by hand":
        optimizer.optimizer.attach(model)
    if load:
        accelerator.load_state(load)
    losses = []
    for epoch in range(1 if load else 2):
        for x in data:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        if save and not epoch:
            accelerator.save_state(save)
            accelerator.wait_for_everyone()
    begun = 0 if kind == "torch" else optimizer.optimizer.stats()["eager_updates"]
    return losses, [p.detach().clone() for p in model.parameters()], begun


def same(a, b):
    return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))


for mixed in ("no", "bf16"):
    wanted = train("torch", mixed=mixed)
    for kind in ("plain", "attach", "by hand"):
        got = train(kind, mixed=mixed)
        assert same(got, wanted), (mixed, kind)
        assert (got[2] > 0) == (kind != "plain"), (mixed, kind)
wanted = train("torch", clip=0.05)
for kind in ("plain", "by hand"):
    assert same(train(kind, clip=0.05), wanted), kind
# Inside the step the norm is that of fp64.
inside = train("attach", clip=0.05)
for a, b in zip(inside[1], wanted[1], strict=True):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
uninterrupted = train("attach", clip=0.05, save=sys.argv[1])
resumed = train("attach", clip=0.05, load=sys.argv[1])
assert uninterrupted[0][len(resumed[0]) :] == resumed[0]
assert all(map(torch.equal, uninterrupted[1], resumed[1]))
weights = torch.cat([p.flatten() for p in resumed[1]])
both = [torch.empty_like(weights) for _ in range(2)]
dist.all_gather(both, weights)
assert torch.equal(*both)
dist.destroy_process_group()
print("compared")
"""


def test_equals_torch(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*launch, str(tmp_path / "state")], capture_output=True, text=True, env=environment, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("compared") == 2
