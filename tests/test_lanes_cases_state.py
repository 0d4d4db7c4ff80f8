"""Checkpoints, copies and memory of the state of parameters on a device. Each docstring quotes its case."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

import outboard
from lanes import Pair, Rig, Twin, plain_grad, set_grad
from oracle import assert_same
from outboard._lanes import LaneOptions

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = pytest.mark.timeout(60, method="thread")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SIZES = (70_001, 5, 300, 1)


def mixed(number: int) -> torch.dtype:
    return (FP32, BF16, FP16)[number % 3]


def parameters(lanes_device: Any) -> list[torch.nn.Parameter]:
    return [lanes_device.parameter(torch.randn(size).to(mixed(number))) for number, size in enumerate(SIZES)]


def through_file(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def same_start(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


# ---- checkpoints


STEPS: dict[str, Callable[[int, Any], Any]] = {
    "int": lambda count, device: count,
    "float": lambda count, device: float(count),
    "0-d": lambda count, device: torch.tensor(float(count), device=device),
    "1-d": lambda count, device: torch.tensor([float(count)], device=device),
    "0-d, integer": lambda count, device: torch.tensor(count, device=device),
}


@pytest.mark.parametrize("form", STEPS)
@pytest.mark.parametrize("saved_at", ["host", "device"])
@pytest.mark.parametrize("loaded_at", ["host", "device"])
def test_loaded_elsewhere(lanes_device, attached, saved_at, loaded_at, form) -> None:
    """state_dict saved on one device, loaded with map_location on another; step as int, float, 0-d tensor, 1-d tensor.

    Saved from state that is in host memory, and from state that stays on the device; and loaded into the other kind.
    """
    pair = Pair(parameters(lanes_device), device_state_bytes=1.0 if saved_at == "device" else 0, amsgrad=True)
    for _ in range(3):
        pair.step()
    places = {"host": torch.device("cpu"), "device": pair.params[0].device}
    assert {state["exp_avg"].device for state in pair.opt.state.values()} == {places[saved_at]}
    where = places[loaded_at]
    saved = through_file(pair.opt.state_dict(), map_location=where, weights_only=True)
    for state in saved["state"].values():
        assert state["exp_avg"].device == where
        state["step"] = STEPS[form](int(state["step"]), where)
    params = same_start(pair.params)
    again = Pair(params, attached=attached, device_state_bytes=0 if saved_at == "device" else 0.5, amsgrad=True, lr=0.5)
    again.opt.load_state_dict(saved)
    again.twin.optimizer.load_state_dict(pair.twin.optimizer.state_dict())
    assert again.opt.param_groups[0]["lr"] == 1e-3
    again.check("as loaded")
    for p in params:
        step = again.opt.state[p]["step"]
        assert (step.dtype, step.shape, float(step)) == (torch.float64, (), 3.0)
    again.step()
    again.step()
    again.check()
    assert float(again.opt.state[params[0]]["step"]) == 5


def test_group_settings(lanes_device, mode, attached) -> None:
    """Group settings (lr, betas, custom keys, initial_lr) across save and load: restored, and used."""

    def groups(params: list[Any]) -> list[dict[str, Any]]:
        return [
            {"params": params[:1], "lr": 0.1, "betas": (0.8, 0.9), "tag": "decay"},
            {"params": params[1:], "weight_decay": 0.0, "extra": [1, 2]},
        ]

    pair = Pair(parameters(lanes_device), groups, attached=attached, mode=mode)
    for opt in (pair.opt, pair.twin.optimizer):
        torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
        opt.param_groups[0]["lr"] = 0.025
        opt.param_groups[1]["eps"] = 1e-5
        opt.param_groups[1]["maximize"] = True
    pair.step()
    saved = through_file(pair.opt.state_dict(), map_location=lanes_device.device, weights_only=True)
    params = same_start(pair.params)

    def others(params: list[Any]) -> list[dict[str, Any]]:
        return [{"params": params[:1]}, {"params": params[1:], "own": 1}]

    again = Pair(params, others, attached=attached, mode=mode, lr=9.0)
    again.opt.load_state_dict(saved)
    again.twin.optimizer.load_state_dict(pair.twin.optimizer.state_dict())
    a, b = again.opt.param_groups
    assert (a["lr"], a["initial_lr"], tuple(a["betas"]), a["tag"]) == (0.025, 0.1, (0.8, 0.9), "decay")
    assert (b["lr"], b["weight_decay"], b["eps"], b["maximize"], b["extra"]) == (1e-3, 0.0, 1e-5, True, [1, 2])
    assert a["params"][0] is params[0]
    saved["param_groups"][1]["extra"].append(3)
    assert b["extra"] == [1, 2], "the loaded groups are the optimizer's own"
    # A scheduler that goes on begins at `initial_lr`.
    schedules = [
        torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5, last_epoch=1) for opt in (again.opt, again.twin.optimizer)
    ]
    for _ in range(3):
        again.step()
        for schedule in schedules:
            schedule.step()
    assert again.opt.param_groups[0]["lr"] == again.twin.optimizer.param_groups[0]["lr"] != 0.025
    again.check()


class Made(TorchDispatchMode):
    """Counts the bytes of each device's tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
                self.bytes += made.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("share", [0, 1.0], ids=["on the host", "resident"])
def test_loading_takes_no_device_memory(lanes_device, mode, attached, share) -> None:
    """Loading a checkpoint: device memory stays flat.

    On the simulated device, whose memory is the host's, no operation of a load makes a tensor: what it loads goes
    straight to where it stays.
    """
    pair = Pair(
        [lanes_device.parameter(torch.randn(500_000).to(dtype)) for dtype in (BF16, FP32)],
        attached=attached,
        mode=mode,
        device_state_bytes=share,
    )
    pair.step()
    saved = copy.deepcopy(pair.opt.state_dict())
    saved["state"] = {
        number: {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        for number, state in saved["state"].items()
    }
    pair.step()
    pair.opt.synchronize()
    if lanes_device.is_simulated:
        with Made() as made:
            pair.opt.load_state_dict(saved)
        assert made.bytes < 10_000, "state is 6 MB"
    else:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pair.opt.load_state_dict(saved)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < 100_000, "state is 9 MB"
    pair.twin.optimizer.load_state_dict(saved)
    pair.check("as loaded")
    pair.step()
    pair.check()


def test_a_dispatch_mode_sees_what_is_made() -> None:
    """So that the test above can fail."""
    with Made() as made:
        torch.ones(1000).clone().view(10, 100).add_(1)
    assert made.bytes == 8000


@pytest.mark.parametrize("with_gradients", [False, True], ids=["without gradients", "with gradients"])
def test_reading_before_the_first_step(lanes_device, mode, attached, with_gradients) -> None:
    """`get_optimizer_state_dict` / `state_dict` before the first step: changes nothing that follows; full, correct."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    readers: dict[str, Callable[[Any, Any], Any]] = {
        "state_dict": lambda model, opt: opt.state_dict(),
        "state and state_dict": lambda model, opt: (opt.state, opt.state_dict()),
        "get_optimizer_state_dict": get_optimizer_state_dict,
        "full": lambda model, opt: get_optimizer_state_dict(model, opt, options=full),
    }
    for reader, read in readers.items():
        # With eps 0, a step that does nothing but divide would leave NaN.
        pair = Pair(parameters(lanes_device), attached=attached, mode=mode, eps=0.0)
        if with_gradients:
            for p in pair.params:
                set_grad(p, torch.full_like(p.detach(), 0.25))
        before = [p.detach().clone() for p in pair.params]
        found = read(pair.model, pair.opt)
        if reader not in ("state_dict", "state and state_dict"):
            assert set(found["state"]) == {"0", "1", "2", "3"}
            assert not any(
                value.any()
                for state in found["state"].values()
                for key, value in state.items()
                if key in ("step", "exp_avg", "exp_avg_sq")
            )
        for p, old in zip(pair.params, before, strict=True):
            assert_same(p.detach(), old, reader)
            grad = plain_grad(p)
            assert (grad is not None) == with_gradients
            assert grad is None or bool((grad == 0.25).all())
        pair.step()
        pair.step()
        pair.check(reader)


@pytest.mark.usefixtures("small_ones_have_hooks")
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("master", ["split", "full"])
def test_weights_reloaded_in_mid_run(lanes_device, mode, attached, dtype, master) -> None:
    """Weights reloaded in mid-run without optimizer state: new weights kept, old moments and step kept."""
    rig = Rig(lanes_device, dtype=dtype, attached=attached, mode=mode, master=master, lr=0.01)
    rig.train(3)
    other = {key: torch.randn_like(value) * 0.5 for key, value in rig.model.state_dict().items()}
    rig.model.load_state_dict(other)
    rig.twin.model.load_state_dict(other)
    with torch.no_grad():
        for mine, value in zip(rig.twin.twin.params, other.values(), strict=True):
            mine.copy_(value)
    for p, value in zip(rig.params, other.values(), strict=True):
        assert_same(p.detach(), value)
    rig.train(3, 3)
    rig.check()
    assert float(rig.opt.state[rig.params[0]]["step"]) == 6


def test_loading_from_another_optimizer_is_a_copy(lanes_device, mode, attached) -> None:
    """`b.load_state_dict(a.state_dict())`, then step both: independent."""
    a = Pair(parameters(lanes_device), attached=attached, mode=mode)
    a.step()
    a.step()
    b = Pair(same_start(a.params), attached=attached, mode=mode)
    b.opt.load_state_dict(a.opt.state_dict())
    b.twin.optimizer.load_state_dict(a.twin.optimizer.state_dict())
    for pair, steps in ((b, 3), (a, 2), (b, 1)):
        for _ in range(steps):
            pair.step()
    a.check()
    b.check()
    for p, q in zip(a.params, b.params, strict=True):
        assert (float(a.opt.state[p]["step"]), float(b.opt.state[q]["step"])) == (4, 6)
        for key, value in a.opt.state[p].items():
            assert value.data_ptr() != b.opt.state[q][key].data_ptr()


@pytest.mark.usefixtures("small_ones_have_hooks")
@pytest.mark.parametrize("share", [0, 0.5], ids=["on the host", "resident"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("moment", ["idle", "after step"])
def test_copies_step_as_the_original(lanes_device, mode, attached, how, share, moment) -> None:
    """deepcopy and pickle, then step: works, same bits as the original would. Also while updates are under way."""
    rig = Rig(lanes_device, 3000, 5, 70_001, dtype=mixed, attached=attached, mode=mode, device_state_bytes=share)
    rig.train(3)
    if moment == "idle":
        rig.opt.synchronize()
    pair: Any = (rig.model, rig.opt)
    if how == "deepcopy":
        pair = copy.deepcopy(pair)
    elif how == "pickle":
        pair = pickle.loads(pickle.dumps(pair))
    else:
        pair = through_file(pair, weights_only=False)
    model, opt = pair
    assert all(p is q for p, q in zip(model.parameters(), opt.param_groups[0]["params"], strict=True))
    for step in range(3, 6):
        model.loss(step).backward()
        opt.step()
        opt.zero_grad()
    rig.check("the original, meanwhile")
    assert float(rig.opt.state[rig.params[0]]["step"]) == 3
    rig.train(3, 3)
    rig.check()
    rig.twin.twin.originals = list(model.parameters())
    rig.twin.check(opt, "the copy")
    assert opt.stats()["resident_parameters"] == rig.opt.stats()["resident_parameters"] == (2 if share else 0)


# ---- pinned memory, and parameters of many elements


@pytest.mark.parametrize("power", [16, 23])
def test_pinned_size_against_bytes_asked_for(lanes_device, power) -> None:
    """Pinned size against bytes asked for, sizes 2^k + 1 page: at most 1.05x, or the rest of a huge page.

    Of gradients in host memory, and of a lane's ring, too.
    """
    numel, ring = (1 << power) + 2048, (1 << power + 2) + 4096
    p = lanes_device.parameter(torch.zeros(numel, dtype=BF16))
    rings = []
    for offloads, host_ring_bytes in ((False, 1 << 20), (True, ring)):
        opt = outboard.AdamW([p], pin=True, offload_gradients=offloads, host_ring_bytes=host_ring_bytes)
        opt.attach(torch.nn.ParameterList([p]))
        stats = opt.stats()
        assert stats["pinned_bytes"] == stats["arena_bytes"]
        assert 10 * numel <= stats["state_bytes"] <= 10 * numel + 4096
        asked = (12 if offloads else 10) * numel
        assert asked <= stats["pinned_bytes"] <= max(1.05 * asked, asked + (2 << 20))
        (device,) = stats["devices"].values()
        rings.append(device["host_ring_bytes"])
        opt.detach()
    # The tables beside a ring are of one size; the small ring is less than a huge page.
    tables = rings[0] - (1 << 20)
    assert ring <= rings[1] - tables <= max(1.05 * ring, ring + (2 << 20))


@pytest.mark.parametrize("offloads", [False, True])
def test_zero_bytes_are_not_pinned(lanes_device, mode, offloads) -> None:
    """Zero bytes registered: skipped."""
    params = [lanes_device.parameter(torch.empty(shape)) for shape in ((0,), (0, 4), (3, 0))]
    pair = Pair(params, attached=True, mode=mode, pin=True, offload_gradients=offloads)
    pair.step()
    pair.check()
    page = os.sysconf("SC_PAGE_SIZE")
    assert pair.opt.stats()["pinned_bytes"] <= (1 + offloads) * page
    more = lanes_device.parameter(torch.randn(70_000))
    pair.opt.add_param_group({"params": [more]})
    set_grad(more, torch.ones_like(more.detach()))
    twin = Twin([more])
    twin.step()
    pair.opt.step()
    twin.check(pair.opt)


def test_registration_limit_reached(lanes_device, mode, attached, monkeypatch) -> None:
    """Registration limit reached: falls back, says so. What was pinned before stays so, and all goes on."""
    if not lanes_device.is_simulated:
        pytest.skip("needs a system with a limit")
    params = [lanes_device.parameter(torch.randn(size)) for size in (70_000, 5, 80_000, 6)]
    options = {"attached": attached, "mode": mode, "host_ring_bytes": 1 << 20}
    full = Pair(params[:2], pin=True, **options)
    assert full.opt.state
    before = full.opt.stats()
    (device,) = before["devices"].values()
    # Another optimizer on a device that is as full.
    monkeypatch.setattr(LaneOptions, "simulated_pinnable_bytes", device["host_ring_bytes"] + before["pinned_bytes"])
    pair = Pair(params, lambda ps: [{"params": ps[:2]}], **options)
    for step in range(4):
        grads = [torch.randn_like(p.detach()) if number < 2 or step > 1 else None for number, p in enumerate(params)]
        if step == 2:
            for opt, of in ((pair.opt, params), (pair.twin.optimizer, pair.twin.params)):
                opt.add_param_group({"params": of[2:], "lr": 0.1})
        if step == 2 and mode != "cpu":  # which pins no state
            with pytest.warns(RuntimeWarning, match=r"cannot pin.*cudaErrorMemoryAllocation.*CPU lane alone") as told:
                pair.step_with(grads)
            assert len(told) == 1
        else:
            pair.step_with(grads)
    pair.check()
    after = pair.opt.stats()
    assert after["pinned_bytes"] == (0 if mode == "cpu" else before["pinned_bytes"])
    assert after["pageable_bytes"] >= 8 * 80_006
    (device,) = after["devices"].values()
    assert mode != "gpu" or device["gpu_lane"]["elements"] >= 4 * 70_005, "what is pinned is still the GPU lane's"
    assert device["cpu_lane"]["elements"] >= 2 * 80_006, "what is not is the CPU lane's"


def test_elements_beyond_2_31_of_their_storage(lanes_device, mode, attached) -> None:
    """More than 2^31 elements (where memory is short: so many apart): the tail is updated.

    Rows of a tensor whose second begins beyond element 2^31: bf16, so beyond byte 2^32 too. In host memory, only the
    pages touched take any.
    """
    apart = (1 << 31) + 5
    try:
        bases = [torch.empty(apart + 70_000, dtype=BF16, device=lanes_device.device) for _ in range(2)]
    except RuntimeError as error:
        pytest.skip(f"no address space for twice 4 GiB: {error}")
    weight, grad = (base.as_strided((2, 70_000), (apart, 1)).copy_(torch.randn(2, 70_000)) for base in bases)
    pair = Pair([torch.nn.Parameter(weight)], attached=attached, mode=mode, lr=0.1, compute_grad_norm=True)
    for _ in range(2):
        pair.step_with([grad])
        assert pair.opt.last_grad_norm == pair.twin.optimizer.last_grad_norm
    pair.check()
