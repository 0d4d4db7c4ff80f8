"""Saving, loading, copying. Each docstring quotes its case or rule.

Over 500 lines: independent cases in the order of their table, read one at a time.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import outboard
from oracle import (
    FLOAT,
    Oracle,
    assert_same,
    bits_of,
    decode,
    encode,
    same_bits,
)

BF16, FP16 = torch.bfloat16, torch.float16
#: What may be configured and reaches the state.
CONFIGURATIONS = {
    "fp32": (FLOAT, {}),
    "fp32 amsgrad": (FLOAT, {"amsgrad": True}),
    "fp32 bf16 moments": (FLOAT, {"state_dtype": BF16, "seed": 5}),
    "bf16 split": (BF16, {}),
    "bf16 full": (BF16, {"master": "full"}),
    "bf16 all bf16": (BF16, {"state_dtype": BF16, "amsgrad": True}),
    "fp16": (FP16, {}),
}


class Model(torch.nn.Module):
    """Three parameters of different kinds; every loss below is a function of the step number alone."""

    def __init__(self, dtype: torch.dtype = FLOAT) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weight = torch.nn.Parameter(torch.randn(13, 7, generator=generator).to(dtype))
        self.bias = torch.nn.Parameter(torch.randn(7, generator=generator).to(dtype))
        self.scale = torch.nn.Parameter(torch.randn((), generator=generator).to(dtype))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for number, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of all weights and all state."""
    found = {}
    for number, (name, p) in enumerate(model.named_parameters()):
        found[name] = p.detach().clone()
        for key, value in optimizer.state_dict()["state"].get(number, {}).items():
            found[f"{name} {key}"] = value.clone()
    return found


def assert_equal_snapshots(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert_same(got[key], value, key)


def through_file(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


# ---- what is saved


def test_fp32_moments_of_a_bf16_parameter() -> None:
    """bf16 parameter, fp32 moments, save, load: moments still fp32, bit for bit."""
    model = Model(BF16)
    optimizer = outboard.AdamW(model.parameters())
    train(model, optimizer, range(3))
    saved = through_file(optimizer.state_dict())
    fresh = outboard.AdamW(model.parameters())
    fresh.load_state_dict(saved)
    for p in model.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert fresh.state[p][key].dtype is FLOAT
            assert_same(fresh.state[p][key], optimizer.state[p][key], key)
            assert bool((bits_of(fresh.state[p][key]) & 0xFFFF).any()), "nothing that bf16 would have lost"
        assert fresh.state[p]["residual"].dtype is torch.int16
        assert_same(fresh.state[p]["residual"], optimizer.state[p]["residual"])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_weights_only(name) -> None:
    """`torch.load(weights_only=True)` of a saved state_dict: loads, and is plain dicts and tensors."""
    dtype, options = CONFIGURATIONS[name]
    model = Model(dtype)
    optimizer = outboard.AdamW(model.parameters(), **options)
    train(model, optimizer, range(2))
    state_dict = optimizer.state_dict()
    assert type(state_dict) is dict
    assert type(state_dict["state"]) is dict
    assert all(type(state) is dict for state in state_dict["state"].values())
    assert all(type(t) is torch.Tensor for state in state_dict["state"].values() for t in state.values())
    loaded = through_file(state_dict, weights_only=True)
    fresh = outboard.AdamW(model.parameters(), **options)
    fresh.load_state_dict(loaded)
    assert_equal_snapshots(snapshot(model, fresh), snapshot(model, optimizer))


def test_layout_of_torch() -> None:
    """torch's AdamW layout (`step`, `exp_avg`, `exp_avg_sq`, ...) plus `residual` for split masters."""
    model, other = Model(), Model()
    ours, theirs = outboard.AdamW(model.parameters(), amsgrad=True), torch.optim.AdamW(other.parameters(), amsgrad=True)
    train(model, ours, range(1))
    train(other, theirs, range(1))
    a, b = ours.state_dict(), theirs.state_dict()
    assert a["state"].keys() == b["state"].keys()
    for number, state in b["state"].items():
        assert set(a["state"][number]) == set(state)
        for key, value in state.items():
            assert a["state"][number][key].shape == value.shape
    for mine, yours in zip(a["param_groups"], b["param_groups"], strict=True):
        assert mine["params"] == yours["params"]
        assert set(yours) <= set(mine)


def test_a_plane_saves_and_copies_itself_alone() -> None:
    """Views of one slab tensor: one plane saved or deepcopied the whole slab, and saving mixed dtypes raised."""
    p = torch.zeros(1 << 20, dtype=BF16, requires_grad=True)
    q = torch.zeros(10, dtype=BF16, requires_grad=True)
    optimizer = outboard.AdamW([p, q])
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict()["state"][1], file)
    assert file.tell() < 10_000
    assert copy.deepcopy(optimizer.state[q]["exp_avg"]).untyped_storage().nbytes() <= 64
    for state in optimizer.state_dict()["state"].values():
        for tensor in state.values():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_planes_outlive_the_optimizer() -> None:
    """Slabs outlive the engine."""
    p = torch.ones(100_000, requires_grad=True)
    optimizer = outboard.AdamW([p])
    p.grad = torch.full((100_000,), 2.0)
    optimizer.step()
    plane = optimizer.state[p]["exp_avg"]
    saved = optimizer.state_dict()
    wanted = plane.clone()
    del optimizer
    others = []
    for _ in range(5):  # would land where the slab was, had it been unmapped
        other = outboard.AdamW([q := torch.ones(100_000, requires_grad=True)])
        q.grad = torch.full((100_000,), 3.0)
        other.step()
        others.append(other)
    assert_same(plane, wanted)
    assert_same(saved["state"][0]["exp_avg"], wanted)
    plane.add_(1.0)


# ---- before the first step


@pytest.mark.parametrize("with_gradients", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_reading_before_the_first_step(name, with_gradients) -> None:
    """`get_optimizer_state_dict` / `state_dict` before the first step, with and without gradients present: changes
    nothing that follows; full and correct.
    """
    dtype, options = CONFIGURATIONS[name]
    readers = {
        "nothing": lambda model, optimizer: None,
        "state_dict": lambda model, optimizer: optimizer.state_dict(),
        "state": lambda model, optimizer: [len(optimizer.state[p]) for p in model.parameters()],
        "state and state_dict": lambda model, optimizer: (optimizer.state, optimizer.state_dict()),
        "get_optimizer_state_dict": lambda model, optimizer: get_optimizer_state_dict(model, optimizer),
        "get_state_dict": lambda model, optimizer: get_state_dict(model, optimizer),
        "full": lambda model, optimizer: get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        ),
    }
    found = {}
    for reader, read in readers.items():
        model = Model(dtype)
        optimizer = outboard.AdamW(model.parameters(), eps=0.0 if dtype is FLOAT else 1e-8, **options)
        if with_gradients:
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.25)
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        read(model, optimizer)
        for key, value in model.state_dict().items():
            assert_same(value, weights[key], reader)
        for p in model.parameters():
            assert p.grad is None or bool((p.grad == 0.25).all()), reader
        train(model, optimizer, range(2))
        found[reader] = snapshot(model, optimizer)
    for values in found.values():
        assert_equal_snapshots(values, found["nothing"])


def test_state_dict_before_the_first_step() -> None:
    """`state_dict()` of an optimizer that has never stepped and whose `state` nobody has read has an empty `state`, as
    torch's; reading `opt.state` materialises zeros, after which `state_dict()` is full.
    """
    model = Model(BF16)
    optimizer = outboard.AdamW(model.parameters())
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.state_dict() == outboard.AdamW(model.parameters()).state_dict()
    state = optimizer.state
    assert len(state) == 3
    full = optimizer.state_dict()["state"]
    assert set(full) == {0, 1, 2}
    for number, p in enumerate(model.parameters()):
        assert set(full[number]) == {"step", "exp_avg", "exp_avg_sq", "residual"}
        for value in full[number].values():
            assert not value.any()
        assert full[number]["exp_avg"].shape == p.shape


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_dcp_before_the_first_step_is_full(name) -> None:
    dtype, options = CONFIGURATIONS[name]
    model = Model(dtype)
    optimizer = outboard.AdamW(model.parameters(), **options)
    found = get_optimizer_state_dict(model, optimizer)
    assert set(found["state"]) == {"weight", "bias", "scale"}
    for entry in found["state"].values():
        assert {"step", "exp_avg", "exp_avg_sq"} <= set(entry)
        assert float(entry["step"]) == 0
        assert not entry["exp_avg"].any()


# ---- resuming


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("cls", [outboard.AdamW, outboard.Adam], ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_resume(name, cls, order) -> None:
    """Train 6 steps; train 3, save, build anew, load, train 3: same bits.

    "Optimizer loaded first, model second" must keep the resumed bits.
    """
    dtype, options = CONFIGURATIONS[name]
    options = {"lr": 1e-2, **options}
    model = Model(dtype)
    optimizer = cls(model.parameters(), **options)
    train(model, optimizer, range(6))
    wanted = snapshot(model, optimizer)

    model = Model(dtype)
    optimizer = cls(model.parameters(), **options)
    train(model, optimizer, range(3))
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for used in (False, True):
        fresh = Model(dtype)
        with torch.no_grad():
            fresh.weight.fill_(9.0)
        again = cls(fresh.parameters(), **options)
        if used:
            train(fresh, again, range(50, 52))
        if order == "model first":
            fresh.load_state_dict(saved["model"])
            again.load_state_dict(saved["optimizer"])
        else:
            again.load_state_dict(saved["optimizer"])
            fresh.load_state_dict(saved["model"])
        train(fresh, again, range(3, 6))
        assert_equal_snapshots(snapshot(fresh, again), wanted)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize(("old", "new"), [("split", "full"), ("full", "split")])
def test_split_and_full_checkpoints_load_into_each_other(old, new, order) -> None:
    """State dicts with a `master` load into split and full; split and full checkpoints load into each other."""
    model = Model(BF16)
    optimizer = outboard.AdamW(model.parameters(), lr=1e-2, master=old)
    train(model, optimizer, range(3))
    masters = [optimizer.master(p) for p in model.parameters()]
    if old == "full":
        # What does not fit a split master is a tie that rounds down: there none.
        masters = [decode(*encode(master)) for master in masters]
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    fresh = Model(BF16)
    with torch.no_grad():
        fresh.weight.fill_(9.0)
    again = outboard.AdamW(fresh.parameters(), lr=1e-2, master=new)
    if order == "model first":
        fresh.load_state_dict(saved["model"])
        again.load_state_dict(saved["optimizer"])
    else:
        again.load_state_dict(saved["optimizer"])
        fresh.load_state_dict(saved["model"])
    for p, q, master in zip(fresh.parameters(), model.parameters(), masters, strict=True):
        assert_same(p, q, "weights")
        assert_same(again.master(p), master, "master")
    assert ("residual" in again.state[fresh.weight]) == (new == "split")
    # On from there: as an oracle that began with these masters.
    for p, q in zip(fresh.parameters(), model.parameters(), strict=True):
        oracle = Oracle(p, lr=1e-2, master=new)
        oracle.step_count = 3
        oracle.exp_avg, oracle.exp_avg_sq = (optimizer.state[q][k].clone() for k in ("exp_avg", "exp_avg_sq"))
        if new == "split":
            oracle.residual = again.state[p]["residual"].clone()
        else:
            oracle.full = again.state[p]["master"].clone()
        p.grad = torch.full_like(p, 0.5)
        oracle.step(p.grad)
        p.oracle = oracle
    again.step()
    for p in fresh.parameters():
        p.oracle.assert_equal(again, p)


def test_weights_reloaded_in_mid_run() -> None:
    """Weights reloaded in mid-run without optimizer state: new weights kept, old moments and step kept."""
    for dtype, master in ((FLOAT, "split"), (BF16, "split"), (BF16, "full"), (FP16, "full")):
        model = Model(dtype)
        optimizer = outboard.AdamW(model.parameters(), lr=1e-2, master=master)
        oracles = {p: Oracle(p, lr=1e-2, master=master) for p in model.parameters()}
        for step in range(6):
            if step == 3:
                other = {key: torch.randn(value.shape).to(dtype) for key, value in model.state_dict().items()}
                model.load_state_dict(other)
                for name, p in model.named_parameters():
                    assert_same(p, other[name])
                    oracles[p].weight = other[name]
            train(model, optimizer, range(step, step + 1))
            for p, oracle in oracles.items():
                oracle.step(p.grad)
        for p, oracle in oracles.items():
            oracle.assert_equal(optimizer, p, f"{dtype} {master}")


def test_group_settings() -> None:
    """Group settings (lr, betas, custom keys, initial_lr) across save and load: restored."""
    model = Model()

    def groups():
        return [
            {"params": [model.weight], "lr": 0.1, "betas": (0.8, 0.9), "tag": "decay"},
            {"params": [model.bias, model.scale], "weight_decay": 0.0, "extra": [1, 2]},
        ]

    optimizer = outboard.AdamW(groups(), amsgrad=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.param_groups[0]["lr"] = 0.025
    optimizer.param_groups[1]["eps"] = 1e-5
    optimizer.param_groups[1]["maximize"] = True
    train(model, optimizer, range(1))
    saved = through_file(optimizer.state_dict())

    again = outboard.AdamW(
        [{"params": [model.weight]}, {"params": [model.bias, model.scale], "own": 1}], lr=9.0, amsgrad=True
    )
    again.load_state_dict(saved)
    a, b = again.param_groups
    assert a["lr"] == 0.025
    assert a["initial_lr"] == 0.1
    assert tuple(a["betas"]) == (0.8, 0.9)
    assert a["tag"] == "decay"
    assert a["params"][0] is model.weight
    assert b["weight_decay"] == 0.0
    assert b["eps"] == 1e-5
    assert b["maximize"] is True
    assert b["extra"] == [1, 2]
    # The loaded groups are the optimizer's own.
    saved["param_groups"][1]["extra"].append(3)
    assert b["extra"] == [1, 2]


def test_loading_asks_nothing_of_cuda(monkeypatch) -> None:
    """Loading a checkpoint: device memory stays flat; an optimizer of CPU parameters never initialises CUDA."""
    calls = []
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: calls.append(1))
    model = Model(BF16)
    optimizer = outboard.AdamW(model.parameters(), max_grad_norm=1.0)
    train(model, optimizer, range(2))
    saved = through_file(optimizer.state_dict(), map_location="cpu")
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(2))
    copy.deepcopy(optimizer).stats()
    assert not calls


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_loading_from_another_optimizer_is_a_copy(name) -> None:
    """`b.load_state_dict(a.state_dict())`, then step both: independent."""
    dtype, options = CONFIGURATIONS[name]
    one, two, alone = Model(dtype), Model(dtype), Model(dtype)
    a, b, c = (outboard.AdamW(m.parameters(), lr=1e-2, **options) for m in (one, two, alone))
    train(one, a, range(2))
    train(alone, c, range(2))
    two.load_state_dict(one.state_dict())
    b.load_state_dict(a.state_dict())
    train(two, b, range(2, 5))
    assert_equal_snapshots(snapshot(one, a), snapshot(alone, c))
    train(one, a, range(2, 5))
    assert_equal_snapshots(snapshot(one, a), snapshot(two, b))
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        for key in a.state[p]:
            assert a.state[p][key].data_ptr() != b.state[q][key].data_ptr()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_source_that_is_the_plane_itself(name) -> None:
    """DCP calls `load_state_dict(state_dict=...)` by keyword with tensors that alias live state: legal."""
    dtype, options = CONFIGURATIONS[name]
    model = Model(dtype)
    optimizer = outboard.AdamW(model.parameters(), **options)
    train(model, optimizer, range(2))
    before = snapshot(model, optimizer)
    pointers = [optimizer.state[p]["exp_avg"].data_ptr() for p in model.parameters()]
    optimizer.load_state_dict(state_dict=optimizer.state_dict())
    assert_equal_snapshots(snapshot(model, optimizer), before)
    assert [optimizer.state[p]["exp_avg"].data_ptr() for p in model.parameters()] == pointers


def test_sources_that_are_other_planes() -> None:
    """Planes exchanged between parameters and between moments of one optimizer arrive exchanged."""
    p, q = (torch.zeros(50, requires_grad=True) for _ in range(2))
    optimizer = outboard.AdamW([p, q])
    p.grad, q.grad = torch.randn(50), torch.randn(50)
    optimizer.step()
    saved = optimizer.state_dict()
    mp, vp, mq, vq = (optimizer.state[x][k].clone() for x in (p, q) for k in ("exp_avg", "exp_avg_sq"))
    saved["state"][0], saved["state"][1] = saved["state"][1], saved["state"][0]
    saved["state"][1]["exp_avg"], saved["state"][1]["exp_avg_sq"] = (
        saved["state"][1]["exp_avg_sq"],
        saved["state"][1]["exp_avg"],
    )
    optimizer.load_state_dict(saved)
    assert_same(optimizer.state[p]["exp_avg"], mq)
    assert_same(optimizer.state[p]["exp_avg_sq"], vq)
    assert_same(optimizer.state[q]["exp_avg"], vp)
    assert_same(optimizer.state[q]["exp_avg_sq"], mp)
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].flip(0)
    assert_same(optimizer.state[p]["exp_avg"], mq.flip(0))
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].view(5, 10).t().reshape(50)
    optimizer.state[q]["exp_avg"] = optimizer.state[q]["exp_avg_sq"]
    assert_same(optimizer.state[q]["exp_avg"], mp)
    optimizer.state[q]["exp_avg_sq"].zero_()
    assert_same(optimizer.state[q]["exp_avg"], mp, "a copy, not the other plane")


# ---- other people's state dicts


@pytest.mark.parametrize(
    "form",
    [int, float, torch.tensor, lambda t: torch.tensor([float(t)]), lambda t: torch.tensor(t, dtype=torch.float64)],
    ids=["int", "float", "0-d", "1-d", "float64"],
)
def test_forms_of_step(form) -> None:
    """step as int, float, 0-d tensor, 1-d tensor: loads."""
    model = Model()
    optimizer = outboard.AdamW(model.parameters())
    train(model, optimizer, range(3))
    saved = through_file(optimizer.state_dict(), map_location="cpu")
    for state in saved["state"].values():
        state["step"] = form(int(state["step"]))
    weights = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(3, 5))
    wanted = snapshot(model, optimizer)
    model.load_state_dict(weights)
    again = outboard.AdamW(model.parameters())
    again.load_state_dict(saved)
    for p in model.parameters():
        step = again.state[p]["step"]
        assert step.dtype is torch.float64
        assert step.shape == ()
        assert float(step) == 3
    train(model, again, range(3, 5))
    assert_equal_snapshots(snapshot(model, again), wanted)


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_torch_dicts_load_and_go_on(name, how) -> None:
    """Loads torch Adam/AdamW dicts (any device, step as int or tensor); and torch loads ours."""
    ours_class, torch_class = getattr(outboard, name), getattr(torch.optim, name)
    options = {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}
    start = torch.randn(1024)
    p, q, r = (start.clone().requires_grad_() for _ in range(3))
    theirs = torch_class([p], **how, **options)
    for _ in range(3):
        p.grad = torch.randn(1024)
        theirs.step()
    with torch.no_grad():
        q.copy_(p)
        r.copy_(p)
    ours = ours_class([q])
    ours.load_state_dict(through_file(theirs.state_dict()))
    assert ours.param_groups[0]["weight_decay"] == 0.1
    assert ours.param_groups[0]["amsgrad"] is True
    there_and_back = torch_class([r], fused=True)
    there_and_back.load_state_dict(through_file(ours.state_dict()))
    there_and_back.param_groups[0].update(fused=True, foreach=False)
    theirs.param_groups[0].update(fused=True, foreach=False)
    for _ in range(3):
        for x in (p, q, r):
            x.grad = torch.linspace(-1, 1, 1024)
        theirs.step()
        ours.step()
        there_and_back.step()
    assert_same(q, p, "ours after torch's")
    assert_same(r, p, "torch's after ours")


@pytest.mark.parametrize(("old", "new"), [("Adam", "AdamW"), ("AdamW", "Adam")])
@pytest.mark.parametrize("source", [outboard, torch.optim], ids=["outboard", "torch"])
def test_the_other_class_keeps_its_rule(source, old, new) -> None:
    """Loading an Adam dict into AdamW or the reverse keeps the class's rule, with one warning."""
    model = Model()
    optimizer = getattr(source, old)(model.parameters(), weight_decay=0.25)
    train(model, optimizer, range(2))
    saved = through_file(optimizer.state_dict())
    for group in saved["param_groups"]:
        # Written by an old torch: without the key there is nothing to warn of for AdamW's.
        assert "decoupled_weight_decay" in group
    fresh = getattr(outboard, new)(model.parameters())
    with pytest.warns(UserWarning, match=f"{new}") as caught:
        fresh.load_state_dict(saved)
    assert len(caught) == 1
    assert fresh.param_groups[0]["decoupled_weight_decay"] is (new == "AdamW")
    assert fresh.param_groups[0]["weight_decay"] == 0.25
    oracle = Oracle(model.weight, weight_decay=0.25, decoupled=new == "AdamW")
    oracle.step_count = 2
    oracle.exp_avg, oracle.exp_avg_sq = (fresh.state[model.weight][k].clone() for k in ("exp_avg", "exp_avg_sq"))
    train(model, fresh, range(2, 3))
    oracle.step(model.weight.grad)
    oracle.assert_equal(fresh, model.weight)


def test_the_same_class_does_not_warn() -> None:
    for name in ("AdamW", "Adam"):
        model = Model()
        theirs = getattr(torch.optim, name)(model.parameters())
        train(model, theirs, range(1))
        saved = theirs.state_dict()
        for group in saved["param_groups"]:
            group.pop("decoupled_weight_decay")  # older torch has no such key
        getattr(outboard, name)(model.parameters()).load_state_dict(saved)


@pytest.mark.parametrize("dtype", [FLOAT, BF16, FP16, torch.float64], ids=str)
@pytest.mark.parametrize("kept", [FLOAT, BF16], ids=["fp32 state", "bf16 state"])
def test_configured_state_dtype_is_kept(kept, dtype) -> None:
    """Keeps the configured state dtype, whatever the checkpoint's."""
    p = torch.ones(64, requires_grad=True)
    values = (torch.rand(64) + 0.5).to(dtype)
    saved = {
        "state": {0: {"step": 7, "exp_avg": values, "exp_avg_sq": values.clone()}},
        "param_groups": outboard.AdamW([p]).state_dict()["param_groups"],
    }
    optimizer = outboard.AdamW([p], state_dtype=kept)
    optimizer.load_state_dict(saved)
    assert_same(optimizer.state[p]["exp_avg"], values.to(kept))
    assert values.dtype is dtype


@pytest.mark.parametrize("master", ["split", "full"])
def test_a_dict_with_neither_master_nor_residual(master) -> None:
    """A dict with neither leaves the weights and zeroes the residuals."""
    model = Model(BF16)
    optimizer = outboard.AdamW(model.parameters(), master=master, lr=0.1)
    train(model, optimizer, range(3))
    weights = copy.deepcopy(model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state.pop("residual" if master == "split" else "master")
    train(model, optimizer, range(3, 5))
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    for name, p in model.named_parameters():
        assert_same(p, weights[name])
        assert_same(optimizer.master(p), p.detach().float())
        if master == "split":
            assert not optimizer.state[p]["residual"].any()


def test_master_into_split_and_full() -> None:
    """State dicts with a `master` load into split and full."""
    start = torch.randn(100).to(BF16)
    values = start.float() + torch.randn(100) * 1e-6
    values = torch.where(values.to(BF16) == start, values, start.float())
    for master in ("split", "full"):
        p = start.clone().requires_grad_()
        optimizer = outboard.AdamW([p], master=master)
        optimizer.load_state_dict(
            {
                "state": {0: {"step": 1, "exp_avg": torch.ones(100), "exp_avg_sq": torch.ones(100), "master": values}},
                "param_groups": optimizer.state_dict()["param_groups"],
            }
        )
        assert_same(p, start, "the weight stays what the model says")
        assert_same(optimizer.master(p), values, master)


@pytest.mark.parametrize("dtype", [BF16, FLOAT, torch.int32], ids=str)
def test_a_residual_of_another_dtype_is_dropped(dtype) -> None:
    """The inherited load casts (`residual` became bf16): a `residual` that is not int16 is dropped with a warning."""
    model = Model(BF16)
    optimizer = outboard.AdamW(model.parameters())
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["residual"] = saved["state"][0]["residual"].to(dtype)
    kept = optimizer.state[model.bias]["residual"].clone()
    with pytest.warns(UserWarning, match="residual.*int16") as caught:
        optimizer.load_state_dict(saved)
    assert len(caught) == 1
    assert not optimizer.state[model.weight]["residual"].any()
    assert_same(optimizer.state[model.bias]["residual"], kept)


def broken_dicts():
    """Ways in which one parameter's state can be wrong, with the error."""
    wrong = torch.ones(3, 3)
    return {
        "exp_avg shape": ({"exp_avg": wrong}, ValueError),
        "exp_avg flat": ({"exp_avg": torch.ones(91)}, ValueError),
        "exp_avg_sq shape": ({"exp_avg_sq": wrong}, ValueError),
        "residual shape": ({"residual": wrong.to(torch.int16)}, ValueError),
        "master shape": ({"master": wrong}, ValueError),
        "exp_avg is a list": ({"exp_avg": [1.0]}, TypeError),
        "exp_avg is integer": ({"exp_avg": torch.ones(13, 7, dtype=torch.int64)}, TypeError),
        "exp_avg is complex": ({"exp_avg": torch.ones(13, 7, dtype=torch.complex64)}, TypeError),
        "exp_avg on meta": ({"exp_avg": torch.ones(13, 7, device="meta")}, (TypeError, ValueError)),
        "exp_avg is sparse": ({"exp_avg": torch.ones(13, 7).to_sparse()}, (TypeError, ValueError)),
        "exp_avg missing": ({"exp_avg": None}, (TypeError, ValueError)),
        "step negative": ({"step": -1}, ValueError),
        "step NaN": ({"step": float("nan")}, ValueError),
        "step of two": ({"step": torch.ones(2)}, ValueError),
        "step is a string": ({"step": "3"}, TypeError),
    }


@pytest.mark.parametrize("case", broken_dicts())
@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
def test_a_refused_dict_changes_nothing(case, named) -> None:
    """A moment or master of another shape: ValueError that names the parameter, and nothing is loaded."""
    changes, error = broken_dicts()[case]
    model = Model(BF16)
    optimizer = outboard.AdamW(model.named_parameters() if named else model.parameters())
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 4))
    saved["param_groups"][0]["lr"] = 99.0
    # The broken one is in the middle: others come before and after.
    saved["state"] = {1: saved["state"][1], 0: {**saved["state"][0], **changes}, 2: saved["state"][2]}
    before = snapshot(model, optimizer)
    with pytest.raises(error, match="weight" if named else re.escape("parameter 0 of group 0, shape (13, 7)")):
        optimizer.load_state_dict(saved)
    assert_equal_snapshots(snapshot(model, optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    if case == "master shape":
        return  # not a plane of a split master: see the tests of assignments to `state`
    # Assigning the same to `state` is refused as well.
    with pytest.raises(error):
        optimizer.state[model.weight] = {**optimizer.state[model.weight], **changes}
    assert_equal_snapshots(snapshot(model, optimizer), before)


def test_other_groups_are_refused() -> None:
    model = Model()
    optimizer = outboard.AdamW(model.parameters())
    train(model, optimizer, range(1))
    before = snapshot(model, optimizer)
    for groups in ([[model.weight], [model.bias, model.scale]], [[model.weight, model.bias]]):
        saved = outboard.AdamW([{"params": group} for group in groups]).state_dict()
        for cls in (outboard.AdamW, torch.optim.AdamW):
            with pytest.raises(ValueError, match="parameter group"):
                (optimizer if cls is outboard.AdamW else cls(model.parameters())).load_state_dict(saved)
    assert_equal_snapshots(snapshot(model, optimizer), before)


def test_state_of_some_parameters_only() -> None:
    """A dict that knows only some of the parameters: the others begin anew."""
    model = Model()
    optimizer = outboard.AdamW(model.parameters())
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][1]
    optimizer.load_state_dict(saved)
    assert float(optimizer.state[model.weight]["step"]) == 2
    assert float(optimizer.state[model.bias]["step"]) == 0
    assert not optimizer.state[model.bias]["exp_avg"].any()
    optimizer.load_state_dict({**saved, "state": {}})
    assert not any(float(state["step"]) for state in optimizer.state.values())


def test_state_for_frozen_parameters_is_kept() -> None:
    model = Model()
    optimizer = outboard.AdamW(model.parameters())
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    other = Model()
    other.bias.requires_grad = False
    again = outboard.AdamW(other.parameters())
    again.load_state_dict(saved)
    assert_same(again.state[other.bias]["exp_avg"], saved["state"][1]["exp_avg"])
    assert float(again.state_dict()["state"][1]["step"]) == 2


def test_own_keys_of_users_travel() -> None:
    model = Model()
    optimizer = outboard.AdamW(model.parameters())
    train(model, optimizer, range(1))
    optimizer.state[model.weight]["note"] = "mine"
    optimizer.state[model.weight]["sum"] = torch.ones(2)
    optimizer.state["global"] = 5
    saved = through_file(optimizer.state_dict())
    again = outboard.AdamW(model.parameters())
    again.load_state_dict(saved)
    assert again.state[model.weight]["note"] == "mine"
    assert_same(again.state[model.weight]["sum"], torch.ones(2))
    assert again.state["global"] == 5
    copied = copy.deepcopy(again)
    assert copied.state["global"] == 5
    assert copied.state[copied.param_groups[0]["params"][0]]["note"] == "mine"


def test_checkpoints_of_another_dtype() -> None:
    """Moments load whatever the weights' dtype; what only the other dtype has is dropped, with a warning."""
    narrow, wide = Model(BF16), Model(FLOAT)
    ours = outboard.AdamW(narrow.parameters())
    train(narrow, ours, range(2))
    other = outboard.AdamW(wide.parameters())
    with pytest.warns(UserWarning, match="residual is dropped"):
        other.load_state_dict(ours.state_dict())
    assert set(other.state[wide.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert_same(other.state[wide.weight]["exp_avg"], ours.state[narrow.weight]["exp_avg"])
    train(wide, other, range(2, 4))
    back = outboard.AdamW(narrow.parameters())
    back.load_state_dict(other.state_dict())
    assert not back.state[narrow.weight]["residual"].any()
    assert_same(back.state[narrow.weight]["exp_avg_sq"], other.state[wide.weight]["exp_avg_sq"])


def test_amsgrad_maximum_waits_for_its_group() -> None:
    """A maximum that a checkpoint holds is kept while the group's amsgrad is off, as torch keeps it."""
    model = Model()
    optimizer = outboard.AdamW(model.parameters(), amsgrad=True)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    oracle = Oracle(model.weight, amsgrad=True)
    oracle.step_count = 3
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        setattr(oracle, key, saved["state"][0][key].clone())
    saved["param_groups"][0]["amsgrad"] = False
    again = outboard.AdamW(model.parameters())
    again.load_state_dict(saved)
    again.param_groups[0]["amsgrad"] = True
    train(model, again, range(3, 4))
    oracle.step(model.weight.grad)
    oracle.assert_equal(again, model.weight)
    # And one that has none begins at zero.
    for state in saved["state"].values():
        del state["max_exp_avg_sq"]
    saved["param_groups"][0]["amsgrad"] = True
    again.load_state_dict(saved)
    assert not again.state[model.weight]["max_exp_avg_sq"].any()


@pytest.mark.parametrize(
    "bad",
    [
        None,
        {},
        {"state": {}},
        {"state": {}, "param_groups": [{}]},
        {"state": [], "param_groups": [{"params": [0, 1, 2]}]},
        {"state": {0: 5}, "param_groups": [{"params": [0, 1, 2]}]},
        {"state": {0: {"momentum_buffer": torch.ones(13, 7)}}, "param_groups": [{"params": [0, 1, 2]}]},
    ],
    ids=["None", "empty", "no groups", "no params", "state is a list", "state is a number", "of SGD"],
)
def test_what_is_no_state_dict_changes_nothing(bad) -> None:
    model = Model()
    optimizer = outboard.AdamW(model.parameters())
    train(model, optimizer, range(2))
    before = snapshot(model, optimizer)
    with pytest.raises((TypeError, ValueError, KeyError, AttributeError)):
        optimizer.load_state_dict(bad)
    assert_equal_snapshots(snapshot(model, optimizer), before)
    train(model, optimizer, range(2, 3))


# ---- the helpers of torch.distributed.checkpoint


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_dcp_round_trip(name, tmp_path) -> None:
    """torch's own state_dict, DCP and FSDP tools see the planes: save, load and go on with the same bits."""
    dtype, options = CONFIGURATIONS[name]
    model = Model(dtype)
    optimizer = outboard.AdamW(model.parameters(), lr=1e-2, **options)
    train(model, optimizer, range(3))
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        dcp.save(parts, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    train(model, optimizer, range(3, 5))
    wanted = snapshot(model, optimizer)

    fresh = Model(dtype)
    again = outboard.AdamW(fresh.parameters(), **options)
    with torch.no_grad():
        fresh.weight.fill_(9.0)
    parts = dict(zip(("model", "optimizer"), get_state_dict(fresh, again), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(parts, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    set_state_dict(fresh, again, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    assert again.param_groups[0]["lr"] == 1e-2
    train(fresh, again, range(3, 5))
    assert_equal_snapshots(snapshot(fresh, again), wanted)


def test_set_optimizer_state_dict_on_a_fresh_optimizer() -> None:
    model = Model(BF16)
    optimizer = outboard.AdamW(model.parameters())
    train(model, optimizer, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    fresh = Model(BF16)
    fresh.load_state_dict(model.state_dict())
    again = outboard.AdamW(fresh.parameters())
    set_optimizer_state_dict(fresh, again, saved)
    assert_equal_snapshots(snapshot(fresh, again), snapshot(model, optimizer))


@pytest.mark.parametrize("kind", ["fp32", "bf16 split", "bf16 full"])
def test_zero_redundancy_optimizer(kind, python) -> None:
    """`ZeroRedundancyOptimizer(optimizer_class=outboard.AdamW)` writes `opt.state[p]`: step, save, load, step."""
    program = """
        import copy, sys, warnings
        import torch
        warnings.simplefilter("ignore")  # torch.distributed's own
        import torch.distributed as dist
        from torch.distributed.optim import ZeroRedundancyOptimizer
        import outboard
        from oracle import assert_same
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        kind = sys.argv[1].split()
        dtype = torch.float32 if kind == ["fp32"] else torch.bfloat16
        options = {"lr": 1e-2, "master": kind[-1] if len(kind) == 2 else "split"}

        def step(model, optimizer, number):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1 * number)
            optimizer.step()

        def make(cls=outboard.AdamW, **options):
            torch.manual_seed(0)
            model = torch.nn.Linear(16, 16).to(dtype)
            return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=cls, **options)

        model, optimizer = make(**options)
        for number in range(3):
            step(model, optimizer, number)
        optimizer.consolidate_state_dict()
        saved = copy.deepcopy(optimizer.state_dict())
        other, again = make(**options)
        other.load_state_dict(model.state_dict())
        again.load_state_dict(saved)
        step(model, optimizer, 3)
        step(other, again, 3)
        assert_same(other.weight, model.weight)
        assert_same(again.optim.master(other.weight), optimizer.optim.master(model.weight))
        if dtype is torch.float32:
            theirs_at, theirs = make(torch.optim.AdamW, lr=1e-2, fused=True)
            for number in range(4):
                step(theirs_at, theirs, number)
            assert_same(model.weight, theirs_at.weight)
        dist.destroy_process_group()
        print("same")
    """
    assert python(program, kind).strip().endswith("same")


# ---- copies and pickles


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_copies_step_as_the_original(name, how) -> None:
    """deepcopy and pickle, then step: works, same bits as the original would."""
    dtype, options = CONFIGURATIONS[name]
    model = Model(dtype)
    optimizer = outboard.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.5, threads=2, chunk_elems=4096, **options)
    train(model, optimizer, range(3))
    before = snapshot(model, optimizer)
    pair = {"model": model, "optimizer": optimizer}
    if how == "deepcopy":
        pair = copy.deepcopy(pair)
    elif how == "pickle":
        pair = pickle.loads(pickle.dumps(pair))
    else:
        pair = through_file(pair, weights_only=False)
    other, copied = pair["model"], pair["optimizer"]
    assert copied.param_groups[0]["params"][0] is other.weight
    assert_equal_snapshots(snapshot(other, copied), before)
    assert copied.max_grad_norm == 1.5
    assert copied.last_grad_norm == optimizer.last_grad_norm
    assert copied.defaults == optimizer.defaults
    for key in ("state_dtype", "master", "threads", "steps"):
        assert copied.stats()[key] == optimizer.stats()[key], key
    train(other, copied, range(3, 5))
    assert_equal_snapshots(snapshot(model, optimizer), before)
    train(model, optimizer, range(3, 5))
    assert_equal_snapshots(snapshot(other, copied), snapshot(model, optimizer))
    assert copied.last_grad_norm == optimizer.last_grad_norm


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_of_one_that_never_stepped(how) -> None:
    model = Model(BF16)
    copied = how({"model": model, "optimizer": outboard.AdamW(model.parameters())})
    optimizer = outboard.AdamW(model.parameters())
    train(model, optimizer, range(2))
    train(copied["model"], copied["optimizer"], range(2))
    assert_equal_snapshots(snapshot(copied["model"], copied["optimizer"]), snapshot(model, optimizer))


def test_shallow_copy_of_an_optimizer_alone() -> None:
    """deepcopy of the optimizer alone copies its parameters, as torch's does."""
    model = Model()
    optimizer = outboard.AdamW(model.parameters())
    train(model, optimizer, range(2))
    weights = copy.deepcopy(model.state_dict())
    copied = copy.deepcopy(optimizer)
    p = copied.param_groups[0]["params"][0]
    assert p is not model.weight
    p.grad = torch.ones_like(p)
    copied.step()
    assert_same(model.weight, weights["weight"])
    assert float(copied.state[p]["step"]) == 3
    assert float(optimizer.state[model.weight]["step"]) == 2


def test_state_itself_can_be_copied_and_pickled() -> None:
    model = Model(BF16)
    optimizer = outboard.AdamW(model.parameters())
    train(model, optimizer, range(2))
    copied = copy.deepcopy(optimizer.state[model.weight])
    assert type(copied) is dict
    optimizer.state[model.weight]["exp_avg"].zero_()
    assert bool(copied["exp_avg"].any())
    assert same_bits(
        pickle.loads(pickle.dumps(optimizer.state[model.bias]))["exp_avg"], optimizer.state[model.bias]["exp_avg"]
    )


def test_setstate_as_torch_takes_it() -> None:
    """torch's `__setstate__` takes any part of what `__getstate__` gives; wrappers pass `state` and `param_groups`."""
    model, other = Model(BF16), Model(BF16)
    optimizer, alone = outboard.AdamW(model.parameters()), outboard.AdamW(other.parameters())
    train(model, optimizer, range(2))
    train(other, alone, range(4))
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    train(model, optimizer, range(2, 3))
    optimizer.__setstate__(optimizer.__getstate__())
    train(model, optimizer, range(3, 4))
    assert_equal_snapshots(snapshot(model, optimizer), snapshot(other, alone))


# ---- hooks


def test_a_hook_that_raises() -> None:
    """The step is done, or is not, by what the hook came after."""
    model = Model()
    optimizer = outboard.AdamW(model.parameters())

    def fail(*args: object) -> None:
        raise RuntimeError("mine")

    for register, steps in ((optimizer.register_step_pre_hook, 0), (optimizer.register_step_post_hook, 1)):
        handle = register(fail)
        with pytest.raises(RuntimeError, match="mine"):
            train(model, optimizer, range(1))
        handle.remove()
        assert float(optimizer.state[model.weight]["step"]) == steps
    train(model, optimizer, range(1))
    assert float(optimizer.state[model.weight]["step"]) == 2


def test_state_dict_hooks_fire() -> None:
    """Override `state`, `load_state_dict`, `state_dict`; test that step and state_dict hooks still fire."""
    model = Model()
    optimizer = outboard.AdamW(model.parameters())
    train(model, optimizer, range(1))
    calls: list[str] = []

    def replace(opt, state_dict):
        calls.append("save post")
        return {**state_dict, "mine": 1}

    def unpack(opt, state_dict):
        calls.append("load pre")
        state_dict = {**state_dict}
        assert state_dict.pop("mine") == 1
        return state_dict

    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("save pre"))
    optimizer.register_state_dict_post_hook(replace)
    optimizer.register_load_state_dict_pre_hook(unpack)
    optimizer.register_load_state_dict_pre_hook(lambda opt, d: calls.append("load pre first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("load post"))
    saved = optimizer.state_dict()
    assert saved["mine"] == 1
    keys = set(saved)
    optimizer.load_state_dict(saved)
    assert set(saved) == keys, "the caller's dict is not changed"
    assert calls == ["save pre", "save post", "load pre first", "load pre", "load post"]


def test_step_hooks_fire() -> None:
    model = Model()
    optimizer = outboard.AdamW(model.parameters())
    calls: list[str] = []

    def pre(opt, args, kwargs):
        calls.append("pre")
        assert opt is optimizer

    handles = [
        optimizer.register_step_pre_hook(pre),
        optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append("post")),
        register_optimizer_step_pre_hook(lambda *a: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *a: calls.append("global post")),
    ]
    train(model, optimizer, range(1))
    assert sorted(calls) == ["global post", "global pre", "post", "pre"]
    assert calls.index("pre") < calls.index("post")
    for handle in handles:
        handle.remove()
    train(model, optimizer, range(1))
    assert len(calls) == 4


def test_named_parameters_travel() -> None:
    model = Model()
    optimizer = outboard.AdamW(model.named_parameters())
    train(model, optimizer, range(1))
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["weight", "bias", "scale"]
    again = outboard.AdamW(model.named_parameters())
    again.load_state_dict(saved)
    assert again.param_groups[0]["param_names"] == ["weight", "bias", "scale"]
    unnamed = outboard.AdamW(model.parameters())
    unnamed.load_state_dict(saved)
    theirs = torch.optim.AdamW(model.parameters())
    theirs.load_state_dict(saved)
    assert unnamed.param_groups[0].get("param_names") == theirs.param_groups[0].get("param_names")
