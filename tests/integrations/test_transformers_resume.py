"""Hugging Face Trainer: what is resumed from a checkpoint goes on with the bits of a run that never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle import assert_same
from tiny import WAYS, assert_same_run, assert_same_state, assert_same_weights, llama, sides_and_ways
from trainer import arguments, reference, train, trainer_for

pytestmark = pytest.mark.integrations


def resumed_and_uninterrupted(
    side: Any, tmp_path: Path, way: str, dtype: torch.dtype = torch.float32, **settings: Any
) -> Any:
    """Return a run that was resumed after its fifth step, in new objects, and one that was not."""

    def args(name: str) -> Any:
        return arguments(
            side, tmp_path / name, **{"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 5, **settings}
        )

    whole = train(trainer_for(args("whole"), WAYS[way], model=llama(dtype)))
    torch.manual_seed(99)  # what a new process would have
    with torch.no_grad():
        other = llama(dtype)
        for parameter in other.parameters():
            parameter.zero_()
    checkpoint = shutil.copytree(tmp_path / "whole" / "checkpoint-5", tmp_path / "checkpoint-5")
    resumed = train(trainer_for(args("resumed"), WAYS[way], model=other), resume_from_checkpoint=str(checkpoint))
    return resumed, whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@sides_and_ways()
def test_resumed_is_uninterrupted(side: Any, way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    resumed, whole = resumed_and_uninterrupted(side, tmp_path, way, dtype)
    assert_same_run(resumed, whole, state=True)
    assert len(whole.losses) == 16
    assert resumed.optimizer.stats()["steps"] == 11
    assert ("residual" in whole.optimizer.state_dict()["state"][0]) == (dtype is torch.bfloat16)


@pytest.mark.parametrize("way", ["auto", "offloaded"])
def test_resumed_with_clipping_and_accumulation(device_side: Any, way: str, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "num_train_epochs": 4}
    resumed, whole = resumed_and_uninterrupted(device_side, tmp_path, way, **settings)
    assert_same_run(resumed, whole, state=True)
    assert resumed.norms == whole.norms
    assert len(whole.norms) == 12


def test_the_residual_in_a_checkpoint_matters(side: Any, tmp_path: Path) -> None:
    """Without it the run that is resumed is another: the test above can fail."""
    settings = {"save_strategy": "steps", "save_steps": 5}
    whole = train(trainer_for(arguments(side, tmp_path, **settings), {}, model=llama(torch.bfloat16)))
    path = tmp_path / "checkpoint-5" / "optimizer.pt"
    saved = torch.load(path, weights_only=True)
    for state in saved["state"].values():
        state["residual"].zero_()
    torch.save(saved, path)
    trainer = trainer_for(arguments(side, tmp_path), {}, model=llama(torch.bfloat16))
    resumed = train(trainer, resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed.losses[:6] == whole.losses[:6]
    with pytest.raises(AssertionError):
        assert_same_weights(resumed.model, whole.model)


@pytest.mark.parametrize("way", ["auto", "eager"])
def test_checkpoints_hold_updated_weights(device_side: Any, way: str, tmp_path: Path) -> None:
    """Each is saved while its step's updates are under way."""
    from safetensors.torch import load_file

    settings = {"save_strategy": "steps", "save_steps": 1}
    train(trainer_for(arguments(device_side, tmp_path / "got", **settings), WAYS[way]))
    reference(device_side, arguments(device_side, tmp_path / "wanted", **settings))
    for step in range(1, 9):
        got, wanted = (
            load_file(tmp_path / name / f"checkpoint-{step}" / "model.safetensors") for name in ("got", "wanted")
        )
        assert got.keys() == wanted.keys()
        for name, tensor in got.items():
            assert_same(tensor, wanted[name], f"step {step} {name}")


def test_torchs_checkpoint_is_resumed(side: Any, tmp_path: Path) -> None:
    """And the other way around."""
    settings = {"save_strategy": "steps", "save_steps": 5}
    cls, options = side.reference
    wanted = reference(side, arguments(side, tmp_path / "torch", **settings))
    got = train(
        trainer_for(arguments(side, tmp_path / "a"), {}),
        resume_from_checkpoint=str(tmp_path / "torch" / "checkpoint-5"),
    )
    assert_same_run(got, wanted)
    ours = train(trainer_for(arguments(side, tmp_path / "outboard", **settings), {}))
    if cls is torch.optim.AdamW:
        # A checkpoint's groups come before the constructor's arguments, in torch, and outboard's say fused=None.
        path = tmp_path / "outboard" / "checkpoint-5" / "optimizer.pt"
        saved = torch.load(path, weights_only=True)
        for group in saved["param_groups"]:
            group["fused"] = True
        torch.save(saved, path)
    with side.unattached():
        trainer = trainer_for(arguments(side, tmp_path / "b"), options, cls=cls, attach=False)
        back = train(trainer, resume_from_checkpoint=str(tmp_path / "outboard" / "checkpoint-5"))
    assert_same_run(back, ours)
    if cls is torch.optim.AdamW:
        assert_same_state(ours, got)
