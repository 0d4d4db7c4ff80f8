"""Every kind of checkpoint of parameters on a device: the bits go on, and no state passes through VRAM."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from checkpoints import LanesRun
from lanes import LanesDevice
from outboard import checkpoint

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = pytest.mark.timeout(60, method="thread")


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    """Let torch warn that there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(process group|torch.distributed is|no_dist|single process).*")
        yield


def by_torch(run: LanesRun, path: Path) -> Callable[[LanesRun], object]:
    torch.save(run.opt.state_dict(), path)
    return lambda again: again.opt.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def by_save(run: LanesRun, path: Path) -> Callable[[LanesRun], object]:
    checkpoint.save(run.opt, path, progress=False)
    return lambda again: checkpoint.load(path, again.opt, progress=False)


def by_save_mapped(run: LanesRun, path: Path) -> Callable[[LanesRun], object]:
    checkpoint.save(run.opt, path, progress=False)
    return lambda again: checkpoint.load(path, again.opt, mmap=True)


def by_safetensors(run: LanesRun, path: Path) -> Callable[[LanesRun], object]:
    checkpoint.save_safetensors(run.opt, path, max_shard_bytes=1 << 20, progress=False)
    return lambda again: checkpoint.load_safetensors(path, again.opt, progress=False)


def load_dcp(again: LanesRun, path: Path, options: StateDictOptions | None = None) -> None:
    found = get_optimizer_state_dict(again.model, again.opt, options=options)
    dcp.load({"optimizer": found}, checkpoint_id=path, no_dist=True)
    set_optimizer_state_dict(again.model, again.opt, found, options=options)


def by_dcp(run: LanesRun, path: Path) -> Callable[[LanesRun], object]:
    dcp.save({"optimizer": get_optimizer_state_dict(run.model, run.opt)}, checkpoint_id=path, no_dist=True)
    return lambda again: load_dcp(again, path)


def by_async_save(run: LanesRun, path: Path) -> Callable[[LanesRun], object]:
    content = {"optimizer": get_optimizer_state_dict(run.model, run.opt)}
    dcp.async_save(content, checkpoint_id=path, no_dist=True).result()
    return lambda again: load_dcp(again, path)


def by_dcp_full(run: LanesRun, path: Path) -> Callable[[LanesRun], object]:
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    content = {"optimizer": get_optimizer_state_dict(run.model, run.opt, options=full)}
    dcp.save(content, checkpoint_id=path, no_dist=True)
    return lambda again: load_dcp(again, path, full)


WAYS = [by_torch, by_save, by_save_mapped, by_safetensors, by_dcp, by_async_save]


@pytest.mark.parametrize("share", [0, 0.5], ids=["on the host", "resident"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_resume(lanes_device, attached, way, share, tmp_path) -> None:
    """Saved while updates may be under way, loaded into state that is elsewhere; then the same bits."""
    run = LanesRun(lanes_device, attached=attached, device_state_bytes=share, amsgrad=True, lr=1e-2)
    run.train(range(3))
    load = way(run, tmp_path / "x")
    weights = copy.deepcopy(run.model.state_dict())
    moment = run.moment()
    again = LanesRun(lanes_device, 1, attached=attached, device_state_bytes=0.5 - share, amsgrad=True, lr=9.0)
    again.train(range(50, 52))
    again.model.load_state_dict(weights)
    load(again)
    again.follow(moment)
    assert again.opt.param_groups[0]["lr"] == 1e-2
    again.check("as loaded")
    for each in (run, again):
        each.train(range(3, 6))
        each.check()


def device_bytes(call: Callable[[], Any]) -> tuple[int, Any]:
    """Return by how much the device's memory grew, at most, during a call, and what it returned."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result


@pytest.mark.cuda
@pytest.mark.parametrize("way", [*WAYS, by_dcp_full], ids=lambda way: way.__name__)
def test_state_does_not_pass_through_the_device(attached, way, tmp_path) -> None:
    """Saving from the arena, and loading into it, never passes through VRAM."""
    run = LanesRun(LanesDevice("cuda"), sizes=(600_000, 500_000), attached=attached)
    run.train(range(2))
    run.opt.synchronize()
    grew, load = device_bytes(lambda: way(run, tmp_path / "x"))
    assert grew < 100_000, "state is 10 MB"
    run.train(range(2, 3))
    run.opt.synchronize()
    grew, _ = device_bytes(lambda: load(run))
    assert grew < 100_000


@pytest.mark.cuda
def test_the_measure_sees_what_passes(tmp_path) -> None:
    """So that the test above can fail."""
    run = LanesRun(LanesDevice("cuda"), sizes=(600_000, 500_000))
    run.train(range(1))

    def through_the_device() -> None:
        for state in run.opt.state.values():
            state["exp_avg"].cuda().cpu()

    grew, _ = device_bytes(through_the_device)
    assert grew > 2_000_000


@pytest.mark.cuda
@pytest.mark.parametrize("way", [by_torch, by_save, by_save_mapped, by_safetensors], ids=lambda way: way.__name__)
def test_resident_state_is_not_copied_on_the_device(way, tmp_path) -> None:
    """State that stays on the device leaves it, and comes back, without a second copy there."""
    run = LanesRun(LanesDevice("cuda"), sizes=(600_000, 500_000), device_state_bytes=1.0)
    run.train(range(2))
    run.opt.synchronize()
    assert run.opt.stats()["resident_bytes"] > 5_000_000
    grew, load = device_bytes(lambda: way(run, tmp_path / "x"))
    assert grew < 100_000
    grew, _ = device_bytes(lambda: load(run))
    assert grew < 3_000_000, "one tensor at a time"
