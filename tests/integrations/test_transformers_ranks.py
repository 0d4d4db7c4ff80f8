"""Hugging Face Trainer on two processes: it wraps the model in DistributedDataParallel, over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integrations

#: Trains with and without outboard in each of the ways, and compares in each rank.
PROGRAM = """
import json, pathlib, sys
import torch
torch.set_num_threads(1)
from outboard import _roster
from outboard._lanes import LaneOptions
from tiny import WAYS, Side, assert_same_run
from trainer import arguments, reference, train, trainer_for

_roster.TINY_ELEMS = 50
LaneOptions.simulate = 11
side, out = Side("simulated"), pathlib.Path(sys.argv[1])
settings = {"gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
args = arguments(side, out, **settings)
wanted = reference(side, args)
for way in ("auto", "not eager", "offloaded"):
    run = train(trainer_for(args, WAYS[way]))
    assert type(run.extra.model_wrapped).__name__ == "DistributedDataParallel"
    assert_same_run(run, wanted)
    assert len(run.losses) == 2

args = arguments(side, out, max_grad_norm=0.5, **settings)
run = train(trainer_for(args, {}))
with side.unattached():
    wanted = train(trainer_for(arguments(side, out, **settings), {"max_grad_norm": 0.5}, attach=False))
assert_same_run(run, wanted)
norms = torch.tensor(run.norms)
assert len(norms) == 2
weights = torch.cat([p.detach().flatten() for p in run.model.parameters()])
for tensor in (norms, weights):
    both = [torch.empty_like(tensor) for _ in range(2)]
    torch.distributed.all_gather(both, tensor)
    assert torch.equal(*both)
assert run.extra.state.is_world_process_zero == (torch.distributed.get_rank() == 0)
torch.distributed.destroy_process_group()
print("compared")
"""


def test_equals_torch(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(tmp_path)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
        )
    try:
        printed = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, printed, strict=True):
        assert rank.returncode == 0, text
        assert text.endswith("compared\n")
