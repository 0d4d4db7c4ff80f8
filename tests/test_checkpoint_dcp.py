"""torch.distributed.checkpoint in one process: save, load, its helpers for state dicts, and saves that go on meanwhile.

On a device with lanes: on CUDA where there is one, else on one made of host memory.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import outboard
from checkpoints import LanesRun
from lanes import Rig
from oracle import assert_same

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = pytest.mark.timeout(60, method="thread")

OPTIONS = {
    "plain": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "cpu_offload": StateDictOptions(cpu_offload=True),
    "full, cpu_offload": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}
# Full and flat at once, torch 2.14 saves and cannot set again, whichever optimizer it is (a KeyError of its own).


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    """Let torch warn that there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(process group|torch.distributed is|no_dist|single process).*")
        yield


def leaves(content: Any, where: str = "") -> dict[str, Any]:
    """Return what is in nested dicts and lists by its path."""
    if isinstance(content, (dict, list)):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        return {path: leaf for key, value in items for path, leaf in leaves(value, f"{where}/{key}").items()}
    return {where: content}


def assert_equal_content(got: Any, wanted: Any) -> None:
    got, wanted = leaves(got), leaves(wanted)
    assert got.keys() == wanted.keys()
    for path, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert_same(got[path].cpu(), value.cpu(), path)
        else:
            assert got[path] == value, path


def emptied(content: Any) -> Any:
    """Return a copy with other values, for `dcp.load` to fill."""
    content = copy.deepcopy(content)
    for value in leaves(content).values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    return content


# ---- the helpers


@pytest.mark.parametrize(("options", "share"), [*((name, 0) for name in OPTIONS), ("plain", 0.5), ("full", 0.5)])
def test_helpers_save_load_go_on(lanes_device, attached, options, share, tmp_path) -> None:
    """`get_optimizer_state_dict`, `dcp.save`, `dcp.load`, `set_optimizer_state_dict`: the bits go on."""
    run = LanesRun(lanes_device, attached=attached, device_state_bytes=share, lr=1e-2)
    run.train(range(3))  # no synchronize(): whoever reads waits
    saved = get_optimizer_state_dict(run.model, run.opt, options=OPTIONS[options])
    weights = copy.deepcopy(run.model.state_dict())
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path, no_dist=True)
    for path, value in leaves(saved).items():
        if isinstance(value, torch.Tensor) and "cpu_offload" in options:
            assert value.device.type == "cpu", path

    again = LanesRun(lanes_device, seed=1, attached=attached, lr=9.0)
    again.train(range(50, 52))
    found = get_optimizer_state_dict(again.model, again.opt, options=OPTIONS[options])
    dcp.load({"optimizer": found}, checkpoint_id=tmp_path, no_dist=True)
    again.model.load_state_dict(weights)
    set_optimizer_state_dict(again.model, again.opt, found, options=OPTIONS[options])
    again.follow(run.moment())
    assert again.opt.param_groups[0]["lr"] == 1e-2
    again.check("as loaded")
    for each in (run, again):
        each.train(range(3, 6))
        each.check()


@pytest.mark.parametrize("options", ["plain", "full, cpu_offload", "flat"])
def test_with_torch_in_both_directions(options, tmp_path) -> None:
    """What torch's AdamW has saved through the helpers, outboard's goes on with, and the reverse."""
    for source, target in ((outboard, torch.optim), (torch.optim, outboard)):
        one, two = (torch.nn.Linear(32, 16) for _ in range(2))
        first = source.AdamW(one.parameters(), lr=1e-2)
        second = target.AdamW(two.parameters(), lr=5.0)

        def step(model: Any, optimizer: Any, number: int) -> None:
            for p in model.parameters():
                p.grad = torch.linspace(-1, number, p.numel()).view(p.shape)
            if isinstance(optimizer, torch.optim.AdamW):
                optimizer.param_groups[0].update({"fused": True, "foreach": False})
            optimizer.step()

        for number in range(3):
            step(one, first, number)
            step(two, second, 7)
        folder = tmp_path / source.__name__
        saved = get_optimizer_state_dict(one, first, options=OPTIONS[options])
        # Settings that only one of the classes has are not asked for by the other.
        dcp.save({"optimizer": saved}, checkpoint_id=folder, no_dist=True)
        found = emptied(saved)
        dcp.load({"optimizer": found}, checkpoint_id=folder, no_dist=True)
        two.load_state_dict(one.state_dict())
        set_optimizer_state_dict(two, second, found, options=OPTIONS[options])
        for number in range(3, 6):
            step(one, first, number)
            step(two, second, number)
        assert second.param_groups[0]["lr"] == 1e-2
        assert_same(two.weight.detach(), one.weight.detach(), source.__name__)


def test_stateful_model_and_optimizer_together(lanes_device, attached, tmp_path) -> None:
    """`get_state_dict` and `set_state_dict`, as an application's Stateful calls them."""

    class App:
        def __init__(self, run: LanesRun) -> None:
            self.run = run

        def state_dict(self) -> dict[str, Any]:
            model, optimizer = get_state_dict(self.run.model, self.run.opt)
            return {"model": model, "optimizer": optimizer}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            set_state_dict(
                self.run.model,
                self.run.opt,
                model_state_dict=state_dict["model"],
                optim_state_dict=state_dict["optimizer"],
            )

    run = LanesRun(lanes_device, attached=attached)
    run.train(range(3))
    dcp.save({"app": App(run)}, checkpoint_id=tmp_path, no_dist=True)
    again = LanesRun(lanes_device, seed=1, attached=attached)
    dcp.load({"app": App(again)}, checkpoint_id=tmp_path, no_dist=True)
    again.follow(run.moment())
    again.check("as loaded")
    for each in (run, again):
        each.train(range(3, 5))
        each.check()


# ---- saves that go on while training does


class Gate:
    """Holds back every write of a checkpoint until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_open = threading.Event()
        self.reached = threading.Event()
        write = dcp.FileSystemWriter.write_data
        gate = self

        def held(writer: Any, *args: Any, **kwargs: Any) -> Any:
            gate.reached.set()
            assert gate._is_open.wait(30)
            return write(writer, *args, **kwargs)

        monkeypatch.setattr(dcp.FileSystemWriter, "write_data", held)

    def open(self) -> None:
        self._is_open.set()


def saved_while_training(
    run: LanesRun, folder: Path, gate: Gate, options: StateDictOptions, **how: Any
) -> tuple[Any, dict[str, Any]]:
    """Begin a save, train on, let the save write; return what a load finds, and what the state was at the call."""
    content = {"optimizer": get_optimizer_state_dict(run.model, run.opt, options=options)}
    wanted = copy.deepcopy(content)
    if "storage_writer" in how:
        how = {**how, "storage_writer": how["storage_writer"](folder)}
    else:
        how = {**how, "checkpoint_id": folder}
    future = dcp.async_save(content, no_dist=True, **how)
    # At once: the write has perhaps not begun, and cannot end before these steps have.
    run.train(range(10, 13))
    run.opt.synchronize()
    assert not future.done()
    gate.open()
    future.result()
    found = emptied(wanted)
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found, wanted


@pytest.mark.parametrize("share", [0, 0.5], ids=["on the host", "resident"])
@pytest.mark.parametrize(
    ("options", "how"), [("plain", "by path"), ("plain", "by writer"), ("cpu_offload", "by path"), ("flat", "by path")]
)
def test_async_save_is_of_the_moment_it_was_called(
    lanes_device, attached, options, how, share, tmp_path, monkeypatch
) -> None:
    """The planes are live memory that steps write. What is saved is the state at the call, whatever follows."""
    run = LanesRun(lanes_device, attached=attached, device_state_bytes=share)
    run.train(range(3))
    gate = Gate(monkeypatch)
    more = {"storage_writer": dcp.FileSystemWriter} if how == "by writer" else {}
    found, wanted = saved_while_training(run, tmp_path, gate, OPTIONS[options], **more)
    assert gate.reached.is_set()
    assert_equal_content(found, wanted)
    run.check("training was not disturbed")


class StagesNothing(AsyncStager):
    """Gives the live state to the writer."""

    should_synchronize_after_execute = False

    def stage(self, state_dict: Any) -> Any:
        return state_dict

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_save_without_staging_sees_later_steps(lanes_device, tmp_path, monkeypatch) -> None:
    """So that the test above can fail: it is the copy before `async_save` returns that makes it right."""
    run = LanesRun(lanes_device)
    run.train(range(3))
    gate = Gate(monkeypatch)
    found, wanted = saved_while_training(run, tmp_path, gate, OPTIONS["plain"], async_stager=StagesNothing())
    with pytest.raises(AssertionError):
        assert_equal_content(found, wanted)


def test_resume_from_an_async_save(lanes_device, attached, tmp_path, monkeypatch) -> None:
    """Train 3, save meanwhile train on; load, and train the same again: same bits."""
    run = LanesRun(lanes_device, attached=attached)
    run.train(range(3))
    weights, moment = copy.deepcopy(run.model.state_dict()), run.moment()
    found, _ = saved_while_training(run, tmp_path, Gate(monkeypatch), OPTIONS["plain"])
    again = LanesRun(lanes_device, seed=1, attached=attached)
    again.model.load_state_dict(weights)
    set_optimizer_state_dict(again.model, again.opt, found["optimizer"])
    again.follow(moment)
    again.check("as loaded")
    again.train(range(10, 13))
    again.check()
    again.follow(run.moment())
    again.check("as the run that went on")


@pytest.mark.usefixtures("small_ones_have_hooks")
def test_async_save_between_backward_and_step(lanes_device, tmp_path, monkeypatch) -> None:
    """Updates that backward has begun are complete in what is saved: it is a whole state of some moment."""
    rig = Rig(lanes_device, eager=True)
    rig.train(2)
    rig.model.loss(2).backward()
    gate = Gate(monkeypatch)
    content = {"optimizer": get_optimizer_state_dict(rig.model, rig.opt)}
    wanted = copy.deepcopy(content)
    future = dcp.async_save(content, checkpoint_id=tmp_path, no_dist=True)
    rig.opt.step()
    rig.twin.model.loss(2).backward()
    rig.twin.step()
    rig.train(2, 3)
    gate.open()
    future.result()
    found = emptied(wanted)
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert_equal_content(found, wanted)
    rig.check()
