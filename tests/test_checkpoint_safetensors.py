"""State as safetensors: every kind of state there and back, shards, refusals, interruptions, memory.

Over 500 lines: independent cases, read one at a time.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import outboard
from checkpoints import (
    BF16,
    CONFIGURATIONS,
    assert_equal_snapshots,
    make,
    settings,
    snapshot,
    train,
)
from oracle import assert_same
from outboard import checkpoint
from outboard.checkpoint import _files, _safetensors

INDEX = _safetensors.INDEX


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


# ---- there and back


@pytest.mark.parametrize("named", [False, True], ids=["by position", "by name"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_resume(name, named, tmp_path) -> None:
    """Split, full and bf16 state, amsgrad, 0-d, empty, strided, tied and frozen parameters: the same bits go on."""
    model, optimizer = make(name, named=named)
    train(model, optimizer, range(3))
    weights = copy.deepcopy(model.state_dict())
    checkpoint.save_safetensors(optimizer, tmp_path / "a", max_shard_bytes=500)
    wanted = snapshot(model, optimizer)
    train(model, optimizer, range(3, 6))

    fresh, again = make(name, named=named, lr=9.0)
    train(fresh, again, range(50, 52))  # what is there is replaced
    fresh.load_state_dict(weights)
    assert checkpoint.load_safetensors(tmp_path / "a", again) is None
    assert settings(again) == settings(optimizer)
    assert_equal_snapshots(snapshot(fresh, again), wanted)
    assert again.state[fresh.transposed]["exp_avg"].stride() == fresh.transposed.stride()
    train(fresh, again, range(3, 6))
    assert_equal_snapshots(snapshot(fresh, again), snapshot(model, optimizer))


def test_in_another_order_by_name(tmp_path) -> None:
    """Groups and parameters in another order: each parameter has its state, and its group's settings."""
    model, optimizer = make("bf16 split")
    train(model, optimizer, range(3))
    checkpoint.save_safetensors(optimizer, tmp_path)
    fresh, again = make("bf16 split", swapped=True)
    fresh.load_state_dict(model.state_dict())
    checkpoint.load_safetensors(tmp_path, again)
    assert [group["param_names"][0] for group in again.param_groups] == ["bias", "frozen"]
    assert [group["lr"] for group in again.param_groups] == [0.002, 0.01]
    assert again.param_groups[1]["tag"] == "decay"
    for each in (model, optimizer), (fresh, again):
        train(*each, range(3, 6))
    assert_equal_snapshots(snapshot(fresh, again), snapshot(model, optimizer))


@pytest.mark.parametrize("cls", ["Adam", "AdamW"])
def test_with_torch_in_both_directions(cls, tmp_path) -> None:
    """torch's optimizers save and load the same files."""
    ours, theirs = getattr(outboard, cls), getattr(torch.optim, cls)
    for source, target in ((ours, theirs), (theirs, ours)):
        start = torch.randn(64, 32)
        options = {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}
        p, q = (start.clone().requires_grad_() for _ in range(2))
        one = source([p], **options, **({"fused": True} if source is theirs else {}))
        for _ in range(3):
            p.grad = torch.randn(64, 32)
            one.step()
        checkpoint.save_safetensors(one, tmp_path / source.__module__)
        with torch.no_grad():
            q.copy_(p)
        two = target([q], **({"fused": True} if target is theirs else {}))
        checkpoint.load_safetensors(tmp_path / source.__module__, two)
        two.param_groups[0].update({"fused": True, "foreach": False} if target is theirs else {})
        for _ in range(3):
            p.grad = torch.randn(64, 32)
            q.grad = p.grad.clone()
            one.step()
            two.step()
        assert_same(q, p, f"{source.__module__} to {target.__module__}")


@pytest.mark.parametrize(("old", "new"), [("bf16 split", "bf16 full"), ("bf16 full", "bf16 split")])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_split_and_full_load_into_each_other(old, new, order, tmp_path) -> None:
    model, optimizer = make(old)
    train(model, optimizer, range(3))
    checkpoint.save_safetensors(optimizer, tmp_path)
    through_torch, direct = make(new), make(new)
    for (fresh, again), load in (
        (through_torch, lambda opt: opt.load_state_dict(copy.deepcopy(optimizer.state_dict()))),
        (direct, lambda opt: checkpoint.load_safetensors(tmp_path, opt)),
    ):
        if order == "optimizer first":
            load(again)
        fresh.load_state_dict(model.state_dict())
        if order == "model first":
            load(again)
    assert_equal_snapshots(snapshot(*direct), snapshot(*through_torch))
    assert_same(direct[1].master(direct[0].bias), through_torch[1].master(through_torch[0].bias))


def test_everything_else_travels(tmp_path) -> None:
    """Unknown keys, tensors and what JSON can say, of parameters, of the state, of groups, of the state dict."""
    model, optimizer = make("fp32", named=False)
    train(model, optimizer, range(1))
    extra = {
        "note": "mine",
        "sum": torch.arange(6).reshape(2, 3),
        "list": [1, 2.5, None, True, (3, "x")],
        "nested": {"a": {1: torch.ones(2, dtype=torch.float64), (2, 3): "key"}},
        "$": "a tag of ours",
        "numbers": (float("inf"), float("-inf"), 2**70, -0.0),
        "dtype": BF16,
        "shape": torch.Size([2, 3]),
        "set": {3, 1},
    }
    for key, value in extra.items():
        optimizer.state[model.weight][key] = value
    optimizer.state["global"] = 5
    optimizer.state["counts"] = torch.tensor([1, 2])
    optimizer.param_groups[0]["own"] = {"schedule": (1, 2)}
    optimizer.register_state_dict_post_hook(lambda opt, packed: {**packed, "version": 3, "rng": torch.arange(4)})
    saved = optimizer.state_dict()
    checkpoint.save_safetensors(optimizer, tmp_path)

    loaded = checkpoint.load_safetensors(tmp_path)
    assert loaded is not None
    assert loaded["version"] == 3
    assert_same(loaded["rng"], torch.arange(4))
    assert loaded["param_groups"] == saved["param_groups"]
    assert list(loaded["state"]) == list(saved["state"])

    fresh, again = make("fp32", named=False)
    checkpoint.load_safetensors(tmp_path, again)
    state = again.state[fresh.weight]
    for key in extra.keys() - {"sum", "nested"}:
        assert state[key] == extra[key], key
        assert type(state[key]) is type(extra[key]), key
    assert_same(state["sum"], extra["sum"])
    assert_same(state["nested"]["a"][1], extra["nested"]["a"][1])
    assert state["nested"]["a"][2, 3] == "key"
    assert again.state["global"] == 5
    assert_same(again.state["counts"], torch.tensor([1, 2]))
    assert again.param_groups[0]["own"] == {"schedule": (1, 2)}
    # Nothing that was loaded lives in the files: they may go, or be written over.
    for path in tmp_path.iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size)
    assert_same(state["sum"], extra["sum"])


def test_a_maximum_that_waits_for_amsgrad(tmp_path) -> None:
    model, optimizer = make("fp32 amsgrad")
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["amsgrad"] = False
    checkpoint.save_safetensors(saved, tmp_path)
    fresh, again = make("fp32")
    checkpoint.load_safetensors(tmp_path, again)
    assert_same(again.state[fresh.weight]["max_exp_avg_sq"], saved["state"][0]["max_exp_avg_sq"])


def test_before_the_first_step_and_partly_stepped(tmp_path) -> None:
    model, optimizer = make()
    checkpoint.save_safetensors(optimizer, tmp_path)
    assert os.listdir(tmp_path) == [INDEX]
    fresh, again = make()
    train(fresh, again, range(2))
    checkpoint.load_safetensors(tmp_path, again)
    assert not any(float(state["step"]) for state in again.state.values())
    model.bias.grad = torch.ones_like(model.bias)
    optimizer.step()
    checkpoint.save_safetensors(optimizer, tmp_path)
    train(fresh, again, range(2))
    checkpoint.load_safetensors(tmp_path, again)
    assert float(again.state[fresh.bias]["step"]) == 1
    assert float(again.state[fresh.weight]["step"]) == 0


def test_a_parameter_that_is_listed_twice(tmp_path) -> None:
    model, _ = make()
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = outboard.AdamW([model.weight, model.bias, model.weight])
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
    optimizer.step()
    wanted = snapshot(model, optimizer)
    checkpoint.save_safetensors(optimizer, tmp_path)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    checkpoint.load_safetensors(tmp_path, optimizer)
    assert_equal_snapshots(snapshot(model, optimizer), wanted)


def test_names_and_shards(tmp_path) -> None:
    """One tensor for each (parameter, state), shards of bounded size, an index as for models."""
    model, optimizer = make("bf16 split")
    train(model, optimizer, range(1))
    optimizer.state[model.weight]["exp_avg"].mul_(2)
    checkpoint.save_safetensors(optimizer, tmp_path, max_shard_bytes=300)
    index = json.loads((tmp_path / INDEX).read_text())
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    assert {"weight.exp_avg", "weight.residual", "scale.step", "nothing.exp_avg_sq"} <= index["weight_map"].keys()
    assert not any(name.startswith(("frozen", "tied")) for name in index["weight_map"])
    assert sorted(set(index["weight_map"].values())) == shards
    total = 0
    for shard in shards:
        with safe_open(tmp_path / shard, framework="pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
            assert sum(sizes) <= 300 or len(sizes) == 1
            total += sum(sizes)
            if "weight.residual" in opened.keys():  # noqa: SIM118
                assert opened.get_tensor("weight.residual").dtype is torch.int16
    assert total == index["metadata"]["total_size"]
    # Any reader of safetensors has the state.
    with safe_open(tmp_path / index["weight_map"]["weight.exp_avg"], framework="pt") as opened:
        assert_same(opened.get_tensor("weight.exp_avg"), optimizer.state[model.weight]["exp_avg"])
    checkpoint.save_safetensors(optimizer, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1, "what the old index named is gone"


def test_names_that_meet(tmp_path) -> None:
    """A parameter's name and a state's name may make what another pair makes."""
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = outboard.AdamW([("x", a), ("x.y", b)])
    for p, value in ((a, 1.0), (b, 2.0)):
        p.grad = torch.full((3,), value)
    optimizer.step()
    optimizer.state[a]["y.exp_avg"] = torch.full((3,), 7.0)
    optimizer.state[a]["#"] = torch.full((3,), 8.0)
    wanted = {id(p): {key: value.clone() for key, value in optimizer.state[p].items()} for p in (a, b)}
    checkpoint.save_safetensors(optimizer, tmp_path)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    checkpoint.load_safetensors(tmp_path, optimizer)
    for p in (a, b):
        for key, value in wanted[id(p)].items():
            assert_same(optimizer.state[p][key], value, key)


def test_hooks_see_the_whole(tmp_path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(2))
    checkpoint.save_safetensors(optimizer, tmp_path)
    wanted = snapshot(model, optimizer)
    seen = []

    def pre(opt, state_dict):
        seen.append(state_dict["state"][0]["exp_avg"].clone())

    optimizer.register_load_state_dict_pre_hook(pre)
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append(opt.state[model.weight]["exp_avg"].clone()))
    train(model, optimizer, range(2, 4))
    checkpoint.load_safetensors(tmp_path, optimizer)
    assert len(seen) == 2
    for tensor in seen:
        assert_same(tensor, wanted["weight exp_avg"])


# ---- refusals: nothing is loaded


def broken(folder: Path) -> dict[str, tuple[Any, str]]:
    def first_shard() -> Path:
        return min(folder.glob("*.safetensors"))

    def rewrite(change: Any) -> None:
        index = json.loads((folder / INDEX).read_text())
        path = folder / index["weight_map"]["bias.exp_avg"]
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata()
            content = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
        change(content, metadata)
        save_file(content, path, metadata)

    return {
        "no index": (lambda: (folder / INDEX).unlink(), "no optimizer.safetensors.index.json"),
        "index cut": (lambda: os.truncate(folder / INDEX, 50), "no index of an optimizer's state"),
        "another format": (lambda: edit_index(folder, lambda i: i["metadata"].update(format="x")), "format 'x'"),
        "shard missing": (lambda: first_shard().unlink(), "is missing"),
        "shard cut": (lambda: os.truncate(first_shard(), first_shard().stat().st_size - 1), "cannot be read"),
        "shard is no such file": (lambda: first_shard().write_bytes(b"x" * 100), "cannot be read"),
        "of another save": (lambda: rewrite(lambda c, m: m.update(save="0" * 8)), "of another save"),
        "tensor missing": (lambda: rewrite(lambda c, m: c.pop("bias.exp_avg")), "bias.exp_avg"),
        "tensor too many": (lambda: rewrite(lambda c, m: c.update(more=torch.ones(1))), "more"),
        "shape": (lambda: rewrite(lambda c, m: c.update({"bias.exp_avg": torch.ones(31)})), r"bias: exp_avg has shape"),
        "dtype": (
            lambda: rewrite(lambda c, m: c.update({"bias.exp_avg": torch.ones(32, dtype=torch.int32)})),
            "bias: exp_avg must be floating point",
        ),
        "step": (
            lambda: rewrite(lambda c, m: c.update({"bias.step": torch.tensor(-1.0)})),
            "bias: step must be at least 0",
        ),
        "outside": (
            lambda: edit_index(folder, lambda i: i["weight_map"].update({"bias.exp_avg": "../x.safetensors"})),
            "no shard of an optimizer's state",
        ),
        "unknown value": (
            lambda: edit_index(folder, lambda i: i["metadata"]["state_dict"]["rest"].update(x={"$": "code"})),
            "unknown kind 'code'",
        ),
    }


@pytest.mark.parametrize("case", broken(Path()))
def test_a_broken_checkpoint_changes_nothing(case, tmp_path) -> None:
    model, optimizer = make("bf16 split")
    train(model, optimizer, range(2))
    checkpoint.save_safetensors(optimizer, tmp_path, max_shard_bytes=400)
    train(model, optimizer, range(2, 4))
    optimizer.param_groups[0]["lr"] = 0.5
    before, groups = snapshot(model, optimizer), settings(optimizer)
    change, message = broken(tmp_path)[case]
    change()
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        checkpoint.load_safetensors(tmp_path, optimizer)
    assert_equal_snapshots(snapshot(model, optimizer), before)
    assert settings(optimizer) == groups


def test_another_model_is_refused_by_name(tmp_path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    checkpoint.save_safetensors(optimizer, tmp_path)
    weight, bias, scale = model.weight, model.bias, model.scale
    rest = [("transposed", model.transposed), ("frozen", model.frozen)]
    small = [("scale", scale), ("nothing", model.nothing), ("bias", bias)]
    cases = [
        ([rest, small], "weight: the checkpoint has this parameter, the optimizer has not"),
        (
            [[("weight", weight), *rest, ("more", torch.ones(1, requires_grad=True))], small],
            "more: the checkpoint does",
        ),
        ([[("weight", torch.ones(6, 16, requires_grad=True)), *rest], small], r"weight: exp_avg has shape \(16, 6\)"),
        ([[("weight", weight), *rest, *small]], "has 2 parameter groups, the optimizer 1"),
        (
            [[("weight", weight), *rest, ("scale", scale)], small[1:]],
            "scale: it is in one group with weight, and the checkpoint has them in groups 1 and 0",
        ),
        ([[weight, model.transposed], [scale, model.nothing, bias]], "group 0 of the checkpoint has 3 parameters"),
    ]
    for groups, message in cases:
        other = outboard.AdamW([{"params": group} for group in groups])
        with pytest.raises(ValueError, match=message):
            checkpoint.load_safetensors(tmp_path, other)
        assert other.state_dict()["state"] == {}
    unnamed = outboard.AdamW(
        [{"params": [bias, model.transposed, model.frozen]}, {"params": [scale, model.nothing, weight]}]
    )
    with pytest.raises(ValueError, match=re.escape("parameter 0 of group 0, shape (32,): exp_avg has shape (16, 6)")):
        checkpoint.load_safetensors(tmp_path, unnamed)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "weight.bad is of type object"),
        ([1, object()], "weight.bad.1 is of type object"),
        (torch.ones(2, dtype=torch.complex64), "weight.bad: .*complex64"),
        (torch.ones(2, device="meta"), "weight.bad: .*meta"),
        (torch.ones(2).to_sparse(), "weight.bad: .*sparse"),
    ],
    ids=["object", "in a list", "complex", "meta", "sparse"],
)
def test_what_cannot_be_saved_is_refused_by_name(value, message, tmp_path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    checkpoint.save_safetensors(optimizer, tmp_path)
    before = files(tmp_path)
    optimizer.state[model.weight]["bad"] = value
    with pytest.raises(TypeError, match=message):
        checkpoint.save_safetensors(optimizer, tmp_path)
    assert files(tmp_path) == before
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="max_shard_bytes"):
            checkpoint.save_safetensors(optimizer, tmp_path, max_shard_bytes=bad)


def test_without_the_library(tmp_path, monkeypatch) -> None:
    _, optimizer = make()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (checkpoint.save_safetensors, lambda opt, path: checkpoint.load_safetensors(path, opt)):
        with pytest.raises(ImportError, match=re.escape("pip install outboard[safetensors]")):
            call(optimizer, tmp_path / "a")
    assert not (tmp_path / "a").exists()


# ---- interruptions


class Stopped(BaseException):
    """As KeyboardInterrupt."""


@pytest.mark.parametrize("at", range(5))
def test_an_interrupted_save_leaves_the_old_checkpoint(at, tmp_path, monkeypatch) -> None:
    """At whatever moment: after a shard, before and at the rename of the index."""
    model, optimizer = make()
    train(model, optimizer, range(2))
    checkpoint.save_safetensors(optimizer, tmp_path, max_shard_bytes=600)
    wanted = snapshot(model, optimizer)
    before = files(tmp_path)
    train(model, optimizer, range(2, 4))
    calls = []

    def count(real: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(real)
            if len(calls) == at + 1:
                raise Stopped
            return real(*args, **kwargs)

        return counted

    monkeypatch.setattr(_safetensors, "sync_file", count(_files.sync_file))
    monkeypatch.setattr(os, "replace", count(os.replace))
    monkeypatch.setattr(_safetensors, "sync_folder", count(_files.sync_folder))
    with pytest.raises(Stopped):
        checkpoint.save_safetensors(optimizer, tmp_path, max_shard_bytes=600)
    monkeypatch.undo()
    assert len(calls) == at + 1
    assert at < 4 or calls[-1] is os.replace, "the rename is the last of them"
    assert files(tmp_path) == before
    fresh, again = make()
    fresh.load_state_dict({name.split()[0]: value for name, value in wanted.items() if " " not in name}, strict=False)
    checkpoint.load_safetensors(tmp_path, again)
    assert_equal_snapshots(snapshot(fresh, again), wanted)


def test_a_killed_save_leaves_the_old_checkpoint(tmp_path, python) -> None:
    """A process that is killed removes nothing: the next save does."""
    program = """
        import os, sys
        from checkpoints import make, train
        from outboard import checkpoint
        from outboard.checkpoint import _safetensors
        model, optimizer = make()
        train(model, optimizer, range(2))
        checkpoint.save_safetensors(optimizer, sys.argv[1], max_shard_bytes=600)
        train(model, optimizer, range(2))
        calls = []
        def kill(done, total):
            calls.append(done)
            if len(calls) == 2:
                os.kill(os.getpid(), 9)
        checkpoint.save_safetensors(optimizer, sys.argv[1], max_shard_bytes=600, progress=kill)
    """
    folder = tmp_path / "a"
    python(program, str(folder), expect=-9)
    left = set(files(folder))
    index = json.loads((folder / INDEX).read_text())
    assert left > {INDEX, *index["weight_map"].values()}
    model, optimizer = make()
    train(model, optimizer, range(2))
    fresh, again = make()
    fresh.load_state_dict(model.state_dict())
    checkpoint.load_safetensors(folder, again)
    assert_equal_snapshots(snapshot(fresh, again), snapshot(model, optimizer))
    checkpoint.save_safetensors(again, folder)
    assert len(files(folder)) == 2


def test_a_shard_that_cannot_be_read_after_the_checks(tmp_path, monkeypatch) -> None:
    model, optimizer = make()
    train(model, optimizer, range(2))
    checkpoint.save_safetensors(optimizer, tmp_path, max_shard_bytes=600)
    real, calls = _safetensors._Checkpoint._shard, []

    def fail(self: Any, shard: str) -> Any:
        calls.append(shard)
        if len(calls) == 2 * len(set(self.shard_of.values())) + 2:
            raise OSError("the disk is gone")
        return real(self, shard)

    monkeypatch.setattr(_safetensors._Checkpoint, "_shard", fail)
    with pytest.raises(RuntimeError, match=r"loaded in part only.*the disk is gone"):
        checkpoint.load_safetensors(tmp_path, optimizer)
    monkeypatch.undo()
    checkpoint.load_safetensors(tmp_path, optimizer)


# ---- progress and memory


def test_progress(tmp_path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    for call in (
        lambda show: checkpoint.save_safetensors(optimizer, tmp_path, max_shard_bytes=500, progress=show),
        lambda show: checkpoint.load_safetensors(tmp_path, optimizer, progress=show),
        lambda show: checkpoint.load_safetensors(tmp_path, progress=show),
    ):
        seen: list[tuple[int, int]] = []
        call(lambda done, total, seen=seen: seen.append((done, total)))
        total = sum(t.nbytes for s in optimizer.state_dict()["state"].values() for t in s.values())
        assert len(seen) > 3
        assert {each[1] for each in seen} == {total}
        assert [each[0] for each in seen] == sorted(each[0] for each in seen)
        assert seen[-1] == (total, total)
    with pytest.raises(TypeError, match="progress must be"):
        checkpoint.save_safetensors(optimizer, tmp_path, progress="yes")


def test_memory(tmp_path, python) -> None:
    """No second copy of the whole state: 96 MiB of it take less than 24 MiB more, also from one shard."""
    program = """
        import sys
        import torch, outboard
        from outboard import checkpoint
        from outboard.checkpoint import _safetensors

        _safetensors._MOST_MAPPED = 8 << 20
        def peak():
            lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
            return int(lines["VmHWM"].split()[0]) / 1024

        def forget_the_peak():
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")

        params = [torch.nn.Parameter(torch.ones(1 << 20)) for _ in range(12)]
        optimizer = outboard.AdamW(params)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        checkpoint.save_safetensors(outboard.AdamW([torch.ones(1, requires_grad=True)]), sys.argv[1] + "/warm")
        for call in (
            lambda: checkpoint.save_safetensors(optimizer, sys.argv[1]),
            lambda: checkpoint.load_safetensors(sys.argv[1], optimizer),
        ):
            forget_the_peak()
            before = peak()
            call()
            print("grew by", round(peak() - before, 1))
    """
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not let a process forget its peak of memory (/proc/self/clear_refs)")
    grew = [float(line.split()[2]) for line in python(program, str(tmp_path)).splitlines() if line.startswith("grew")]
    assert len(grew) == 2
    assert max(grew) < 24, grew
