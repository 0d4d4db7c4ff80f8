"""`outboard.checkpoint.save` and `load`: torch's own format, whole or not at all, with progress, matched by name."""

from __future__ import annotations

import copy
import io
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import outboard
from checkpoints import CONFIGURATIONS, assert_equal_snapshots, make, settings, snapshot, train
from oracle import assert_same
from outboard import checkpoint
from outboard.checkpoint import _files
from outboard.checkpoint._progress import Progress


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_resume(name, mmap, tmp_path) -> None:
    """Train 6 steps; train 3, save, build anew, load, train 3: same bits."""
    model, optimizer = make(name)
    train(model, optimizer, range(3))
    weights = copy.deepcopy(model.state_dict())
    path = tmp_path / "optimizer.pt"
    checkpoint.save(optimizer, path)
    train(model, optimizer, range(3, 6))
    fresh, again = make(name, lr=9.0)
    train(fresh, again, range(50, 52))
    fresh.load_state_dict(weights)
    loaded = checkpoint.load(path, again, mmap=mmap)
    assert loaded["state"].keys() == optimizer.state_dict()["state"].keys()
    assert settings(again) == settings(optimizer)
    path.write_bytes(b"\xff" * path.stat().st_size)  # nothing of the state is the file's memory
    train(fresh, again, range(3, 6))
    assert_equal_snapshots(snapshot(fresh, again), snapshot(model, optimizer))


def test_it_is_torchs_format(tmp_path) -> None:
    """`torch.load` reads what `save` writes, and `load` what `torch.save` writes; any dict may be saved."""
    model, optimizer = make("bf16 split")
    train(model, optimizer, range(2))
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    checkpoint.save(content, tmp_path / "ours.pt")
    torch.save(content, tmp_path / "theirs.pt")
    for found in (torch.load(tmp_path / "ours.pt", weights_only=True), checkpoint.load(tmp_path / "theirs.pt")):
        assert found["step"] == 2
        assert found["optimizer"]["param_groups"] == content["optimizer"]["param_groups"]
        for number, state in content["optimizer"]["state"].items():
            for key, value in state.items():
                assert_same(found["optimizer"]["state"][number][key], value, key)
        for key, value in content["model"].items():
            assert_same(found["model"][key], value, key)
    # The format from before torch 1.6 is read line by line.
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert_same(checkpoint.load(tmp_path / "old.pt")["model"]["bias"], model.bias.detach())


@pytest.mark.parametrize("cls", ["Adam", "AdamW"])
def test_with_torch_in_both_directions(cls, tmp_path) -> None:
    """torch's optimizers save and load the same files, parameters in another order too."""
    ours, theirs = getattr(outboard, cls), getattr(torch.optim, cls)
    for source, target in ((ours, theirs), (theirs, ours)):
        start = [torch.randn(64, 32), torch.randn(48)]
        p, q = ([each.clone().requires_grad_() for each in start] for _ in range(2))
        one = source(list(zip("ab", p, strict=True)), lr=1e-2, weight_decay=0.1)
        one.param_groups[0].update({"fused": True, "foreach": False} if source is theirs else {})
        two = target(list(zip("ba", reversed(q), strict=True)), lr=3.0)

        def step(params: Any, optimizer: Any) -> None:
            for each in params:
                each.grad = torch.linspace(-1, 1, each.numel()).view(each.shape)
            optimizer.step()

        for _ in range(3):
            step(p, one)
        checkpoint.save(one, tmp_path / "x.pt")
        with torch.no_grad():
            for a, b in zip(p, q, strict=True):
                b.copy_(a)
        checkpoint.load(tmp_path / "x.pt", two)
        assert two.param_groups[0]["param_names"] == ["b", "a"]
        assert two.param_groups[0]["lr"] == 1e-2
        two.param_groups[0].update({"fused": True, "foreach": False} if target is theirs else {})
        for _ in range(3):
            step(p, one)
            step(q, two)
        for a, b in zip(p, q, strict=True):
            assert_same(b, a, f"{source.__module__} to {target.__module__}")


def test_only_weights_are_loaded(tmp_path) -> None:
    """A pickle that would run code is refused."""
    torch.save({"state": {}, "param_groups": [], "x": Path("/")}, tmp_path / "x.pt")
    for mmap in (False, True):
        with pytest.raises(Exception, match=r"weights_only|Weights only"):
            checkpoint.load(tmp_path / "x.pt", mmap=mmap)


# ---- matching


def test_names_from_a_model() -> None:
    """Groups without names: the model says them."""
    model, optimizer = make()
    train(model, optimizer, range(2))
    fresh, again = make(named=False, swapped=True)
    fresh.load_state_dict(model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    checkpoint.load_matched(again, saved, model=fresh)
    assert_equal_snapshots(snapshot(fresh, again), snapshot(model, optimizer))
    assert "param_names" not in again.param_groups[0]
    assert again.param_groups[1]["tag"] == "decay"
    # By position they do not fit, and the message says which.
    with pytest.raises(ValueError, match=re.escape("parameter 0 of group 0, shape (32,): exp_avg has shape (16, 6)")):
        checkpoint.load_matched(again, saved)


def test_one_name_for_two_parameters_matches_by_position() -> None:
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = outboard.AdamW([{"params": [a]}, {"params": [b]}])
    for group in optimizer.param_groups:
        group["param_names"] = ["same"]
    a.grad, b.grad = torch.ones(3), torch.full((3,), 2.0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict({**saved, "state": {}})
    checkpoint.load_matched(optimizer, saved)
    assert_same(optimizer.state[b]["exp_avg"], saved["state"][1]["exp_avg"])


def test_torchs_optimizers_are_checked_too() -> None:
    """torch's own `load_state_dict` takes any shape."""
    p = torch.ones(4, requires_grad=True)
    theirs = torch.optim.AdamW([("p", p)])
    p.grad = torch.ones(4)
    theirs.step()
    saved = copy.deepcopy(theirs.state_dict())
    saved["state"][0]["exp_avg_sq"] = torch.ones(5)
    before = theirs.state[p]["exp_avg_sq"].clone()
    with pytest.raises(ValueError, match=re.escape("p: exp_avg_sq has shape (5,), the parameter (4,)")):
        checkpoint.load_matched(theirs, saved)
    assert_same(theirs.state[p]["exp_avg_sq"], before)


# ---- whole or not at all


class Stopped(BaseException):
    """As KeyboardInterrupt."""


@pytest.mark.parametrize("where", ["writing", "sync", "rename"])
def test_an_interrupted_save_leaves_the_old_file(where, tmp_path, monkeypatch) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    path = tmp_path / "x.pt"
    checkpoint.save(optimizer, path)
    before = path.read_bytes()
    train(model, optimizer, range(1))

    def stop(*_: object) -> None:
        raise Stopped

    if where != "writing":
        monkeypatch.setattr(os, {"sync": "fsync", "rename": "replace"}[where], stop)
    with pytest.raises(Stopped):
        checkpoint.save(optimizer, path, progress=stop if where == "writing" else False)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.pt"]
    checkpoint.save(optimizer, path)
    assert path.read_bytes() != before


def test_a_killed_save_leaves_the_old_file(tmp_path, python) -> None:
    program = """
        import os, sys
        from checkpoints import make, train
        from outboard import checkpoint
        model, optimizer = make()
        train(model, optimizer, range(2))
        checkpoint.save(optimizer, sys.argv[1])
        train(model, optimizer, range(2))
        checkpoint.save(optimizer, sys.argv[1], progress=lambda done, total: os.kill(os.getpid(), 9))
    """
    python(program, str(tmp_path / "x.pt"), expect=-9)
    model, optimizer = make()
    train(model, optimizer, range(2))
    fresh, again = make()
    fresh.load_state_dict(model.state_dict())
    checkpoint.load(tmp_path / "x.pt", again)
    assert_equal_snapshots(snapshot(fresh, again), snapshot(model, optimizer))


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path) -> None:
    path = tmp_path / "x.pt"
    checkpoint.save({"a": 1}, path)
    with pytest.raises(Exception, match=r"pickle|lambda"):
        checkpoint.save({"a": lambda: 1}, path)
    assert checkpoint.load(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.pt"]
    with pytest.raises(FileNotFoundError):
        checkpoint.save({"a": 1}, tmp_path / "no folder" / "x.pt")
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "no file.pt")


def test_links_and_modes(tmp_path) -> None:
    """A link is followed; a new file has the mode that any new file has."""
    (tmp_path / "there").mkdir()
    (tmp_path / "x.pt").symlink_to(tmp_path / "there" / "y.pt")
    checkpoint.save({"a": 1}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").is_symlink()
    assert checkpoint.load(tmp_path / "there" / "y.pt") == {"a": 1}
    (tmp_path / "plain").write_bytes(b"")
    mode = stat.S_IMODE((tmp_path / "there" / "y.pt").stat().st_mode)
    assert mode == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_the_file_is_on_the_disk_before_its_name(tmp_path, monkeypatch) -> None:
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(stat.S_ISDIR(os.fstat(fd).st_mode)), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("rename"), replace(*paths)))
    checkpoint.save({"a": 1}, tmp_path / "x.pt")
    assert order == [False, "rename", True]


# ---- progress


def test_progress_is_the_files(tmp_path) -> None:
    """Bytes as they are written and read: within a large tensor, never more than the total, which comes last."""
    content = {"x": torch.zeros(10 << 20), "y": torch.ones(3)}  # more than two pieces
    for call in (
        lambda show: checkpoint.save(content, tmp_path / "x.pt", progress=show),
        lambda show: checkpoint.load(tmp_path / "x.pt", progress=show),
    ):
        seen: list[tuple[int, int]] = []
        call(lambda done, total, seen=seen: seen.append((done, total)))
        done, totals = zip(*seen, strict=True)
        (total,) = set(totals)
        assert (40 << 20) <= total < (41 << 20)
        assert list(done) == sorted(done)
        assert done[-1] == total
        assert any(0 < each < (32 << 20) for each in done)


@pytest.mark.parametrize("progress", ["yes", None, 1, 0])
def test_other_choices_of_progress_are_refused(progress, tmp_path) -> None:
    for call in (checkpoint.save, lambda content, path, **options: checkpoint.load(path, **options)):
        with pytest.raises(TypeError, match="progress must be 'auto', True, False or a function"):
            call({"a": 1}, tmp_path / "x.pt", progress=progress)
    assert os.listdir(tmp_path) == []


class Terminal(io.StringIO):
    is_terminal = True

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [False, True], ids=["a file", "a terminal"])
@pytest.mark.parametrize("seconds", [0.5, 3.0])
@pytest.mark.parametrize("progress", ["auto", True, False], ids=str)
def test_when_a_bar_is_drawn(progress, seconds, is_terminal, monkeypatch) -> None:
    """`"auto"`: on a terminal, and when it takes longer than two seconds."""
    stderr = Terminal()
    stderr.is_terminal = is_terminal
    clock = [100.0]
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("outboard.checkpoint._progress.time.monotonic", lambda: clock[0])
    with Progress("saving", 1000, progress) as counter:
        for _ in range(4):
            clock[0] += seconds / 4
            counter.advance(250)
    is_drawn = progress is True or (progress == "auto" and is_terminal and seconds > 2)
    assert ("saving" in stderr.getvalue()) == is_drawn
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw and some daemons
    with Progress("saving", 1000, "auto") as counter:
        counter.advance(1000)


def test_a_counting_file_reads_as_the_file(tmp_path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(256)) * 10)
    with open(path, "rb") as file, open(path, "rb") as plain, Progress("x", 1, False) as progress:
        counting: Any = _files.CountingFile(file, progress)
        for each in (counting, plain):
            each.seek(5)
        assert counting.read(7) == plain.read(7)
        assert counting.readline() == plain.readline()
        assert counting.tell() == plain.tell()
        assert counting.seek(-100, 2) == plain.seek(-100, 2)
        buffers = bytearray(200), bytearray(200)
        assert counting.readinto(buffers[0]) == plain.readinto(buffers[1]) == 100
        assert buffers[0] == buffers[1]
        assert counting.read() == plain.read() == b""


def test_it_is_imported_when_it_is_asked_for(python) -> None:
    """Training needs none of it, nor safetensors."""
    program = """
        import sys
        import outboard
        assert "outboard.checkpoint" not in sys.modules
        assert callable(outboard.checkpoint.save)
        assert "checkpoint" in outboard.__all__
        assert "safetensors" not in sys.modules
        print("lazy")
    """
    assert python(program).strip() == "lazy"
