"""What bits do not show: that state is on the device, that it is pinned, that an option does anything at all."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import outboard
from lanes import RIG_SIZES, Layer, Rig, Stack, Twin, TwinModel, host_only, is_pending, plain_grad, set_grad, train
from oracle import assert_same

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = [pytest.mark.timeout(60, method="thread"), pytest.mark.usefixtures("small_ones_have_hooks")]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MODES = ("cpu", "gpu", "auto")


# ---- the tests' own model


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("sizes", [RIG_SIZES, (70_000, 5, 90_000), (1, 300_000, 7)], ids=str)
def test_the_tests_have_gradients(dtype, sizes) -> None:
    """A twin shows a weight that was read too early by its gradients: not if these are all zero."""
    model = Stack(*sizes, dtype=dtype)
    for step in range(3):
        model.zero_grad()
        model.loss(step).backward()
        for p in model.parameters():
            assert (p.grad != 0).float().mean() > 0.9, f"{p.numel()} elements in step {step}"


# ---- state on the device


@pytest.mark.parametrize("attached", [False, True], ids=["plain", "attached"])
@pytest.mark.parametrize("share", [1.0, 0.03, 40_000])
@pytest.mark.parametrize("mode", MODES)
def test_resident_state(lanes_device, attached, share, mode) -> None:
    rig = Rig(lanes_device, attached=attached, device_state_bytes=share, mode=mode)
    rig.train(3)
    rig.opt.synchronize()
    stats = rig.opt.stats()
    # Of 24,000, 40, 5,600 and 528,000 bytes; 0.03 of all is 16,729.
    resident = [RIG_SIZES[number] for number in {1.0: (0, 1, 2, 3), 0.03: (1, 2), 40_000: (0, 1, 2)}[share]]
    # `step` is counted with them.
    resident_bytes = 8 * sum(resident) + 8 * len(resident)
    assert stats["resident_bytes"] == resident_bytes
    assert stats["resident_parameters"] == len(resident)
    (device,) = stats["devices"].values()
    assert device["resident_elements"] == 3 * sum(resident)
    assert stats["state_bytes"] + stats["resident_bytes"] == 8 * sum(RIG_SIZES) + 8 * len(RIG_SIZES)
    plan = rig.opt.plan()
    assert plan["device_bytes"]["state_resident"] == resident_bytes
    assert plan["resident_gib"] == resident_bytes / 2**30
    rig.check()


@pytest.mark.parametrize("settings", [{}, {"master": "full"}, {"state_dtype": BF16}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_resident_state_of_every_dtype(lanes_device, settings, dtype) -> None:
    rig = Rig(lanes_device, dtype=dtype, device_state_bytes=1.0, **settings)
    rig.train(3)
    rig.check()
    assert rig.opt.stats()["state_bytes"] == 0
    planes = [plane for state in rig.opt.state.values() for key, plane in state.items() if key != "step"]
    assert all(plane.device == lanes_device.put(torch.ones(1)).device for plane in planes)


@pytest.mark.parametrize("to", [0, 1.0])
@pytest.mark.parametrize("share", [0, 0.03, 1.0])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_checkpoints_of_resident_state(lanes_device, share, to, dtype) -> None:
    rig = Rig(lanes_device, dtype=dtype, device_state_bytes=share)
    rig.train(3)
    saved = copy.deepcopy(rig.opt.state_dict())
    for state in saved["state"].values():
        assert {key: value.shape for key, value in state.items() if key != "step"}
    rig.opt.detach()
    rig.opt = outboard.AdamW(rig.params, threads=1, device_state_bytes=to)
    rig.opt.load_state_dict(saved)
    rig.opt.attach(rig.model)
    rig.train(3, 3)
    rig.check()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_resident_state_is_reset_written_and_copied(lanes_device, dtype) -> None:
    rig = Rig(lanes_device, dtype=dtype, device_state_bytes=1.0)
    rig.train(2)
    mine, twins = rig.params[2], rig.twin.twin.params[2]
    rig.opt.reset(mine)
    rig.twin.optimizer.reset(twins)
    rig.train(2, 2)
    rig.check("after reset")
    values = torch.randn(mine.shape)
    rig.opt.load_master(mine, values)
    rig.twin.optimizer.load_master(twins, values)
    rig.twin.copy_back()
    rig.check("after load_master")
    rig.train(2, 4)
    assert_same(rig.opt.master(mine).cpu(), rig.twin.optimizer.master(twins))
    for opt, p in ((rig.opt, mine), (rig.twin.optimizer, twins)):
        opt.state[p]["exp_avg"] = torch.full(p.shape, 0.5)
        opt.state[p]["exp_avg_sq"].fill_(2.0)
    rig.train(2, 6)
    rig.check("after writing state")
    for opt in (rig.opt, rig.twin.optimizer):
        opt.param_groups[0]["amsgrad"] = True
    rig.train(2, 8)
    rig.check("after amsgrad")
    rig.backward_both(9)
    for other in (copy.deepcopy(rig.opt), pickle.loads(pickle.dumps(rig.opt))):
        assert other.stats()["resident_parameters"] == 4
    rig.step_both()
    rig.check("after copies")


@pytest.mark.parametrize("share", [0, 1.0], ids=["on the host", "resident"])
@pytest.mark.parametrize("how", ["load_state_dict", "update", "dict item", "data"])
def test_planes_that_are_exchanged(lanes_device, share, how) -> None:
    """Live state of one parameter for another, and of one moment for the other, arrives exchanged.

    By `load_state_dict`, by the mapping, and behind its back.
    """
    params = [lanes_device.parameter(torch.randn(300)) for _ in range(2)]
    opt = outboard.AdamW(params, device_state_bytes=share)
    for p in params:
        p.grad = torch.randn_like(p)
    opt.step()
    twin = Twin(params)
    keys = ("exp_avg", "exp_avg_sq")
    before = [{key: opt.state[p][key].clone() for key in keys} for p in params]
    live = [{key: opt.state[p][key] for key in keys} for p in params]
    new = [{"exp_avg": of["exp_avg_sq"], "exp_avg_sq": of["exp_avg"]} for of in reversed(live)]
    if how == "load_state_dict":
        saved = opt.state_dict()
        opt.load_state_dict({**saved, "state": {number: {"step": 1.0, **new[number]} for number in range(2)}})
    elif how == "update":
        opt.state.update(dict(zip(params, new, strict=True)))
    elif how == "dict item":
        for p, values in zip(params, new, strict=True):
            dict.update(opt.state[p], values)
    else:
        values = [{key: value.data for key, value in of.items()} for of in new]
        for of, replaced in zip(live, values, strict=True):
            for key in keys:
                of[key].data = replaced[key]
    wanted = [{"exp_avg": of["exp_avg_sq"], "exp_avg_sq": of["exp_avg"]} for of in reversed(before)]
    twin.optimizer.load_state_dict(
        {
            "state": {number: {"step": 1.0, **of} for number, of in enumerate(wanted)},
            "param_groups": twin.optimizer.state_dict()["param_groups"],
        }
    )
    for p in params:
        p.grad = torch.randn_like(p)
    twin.step()
    opt.step()
    twin.check(opt, how)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("look", ["step", "state_dict"])
def test_resident_tensors_replaced_behind_our_back(lanes_device, look, dtype) -> None:
    """`tensor.data = tensor.data.to(...)`, as loops over the state that move an optimizer do, moves no plane.

    The engine went on with the old memory, which was free.
    """
    rig = Rig(lanes_device, 3000, 300, dtype=dtype, attached=False, device_state_bytes=1.0)
    rig.train(2)
    kept, new = [], torch.randn(3000)
    for opt, p in ((rig.opt, rig.params[0]), (rig.twin.optimizer, rig.twin.twin.params[0])):
        for key, tensor in opt.state[p].items():
            kept.append(tensor.data)  # a plane that is used is to be there, so that this fails and does not crash
            tensor.data = new.to(p.device, copy=True) if key == "exp_avg" else tensor.data.clone()
    if look == "state_dict":
        assert_same(rig.opt.state_dict()["state"][0]["exp_avg"].cpu(), new)
    rig.train(2, 2)
    rig.check()


def test_resident_parameter_that_moves_is_refused(lanes_device) -> None:
    rig = Rig(lanes_device, device_state_bytes=1.0)
    rig.train(1)
    p = rig.params[0]
    p.data = torch.zeros(6000, device=p.device)[::2]
    set_grad(p, torch.zeros_like(p))
    with pytest.raises(ValueError, match=r"device_state_bytes.*moved or changed its strides"):
        rig.opt.step()


@pytest.mark.parametrize("value", [1.5, -1, -0.1, float("nan"), float("inf")])
def test_shares_out_of_range(lanes_device, value) -> None:
    with pytest.raises(ValueError, match="device_state_bytes must be 0, a number of bytes"):
        outboard.AdamW([lanes_device.parameter(torch.ones(3))], device_state_bytes=value)


@pytest.mark.parametrize("value", [True, "0.25", None, [1]])
def test_shares_of_wrong_types(lanes_device, value) -> None:
    with pytest.raises(TypeError, match="device_state_bytes must be a number"):
        outboard.AdamW([lanes_device.parameter(torch.ones(3))], device_state_bytes=value)


# ---- what options ask for is what happens


@pytest.mark.parametrize("name", ["eager", "pin", "offload_gradients", "compute_grad_norm"])
@pytest.mark.parametrize("value", [0, 1, 1.0])
def test_numbers_are_no_switches(lanes_device, name, value) -> None:
    """`eager=1` was taken, and then was neither "auto" nor True nor False."""
    with pytest.raises(ValueError, match=rf"{name} must be one of"):
        outboard.AdamW([lanes_device.parameter(torch.ones(3))], **{name: value})


def test_rings_and_lanes_are_what_was_asked_for(lanes_device) -> None:
    """Bits do not say whether an option does anything."""

    def device(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        rig = Rig(lanes_device, **options)
        rig.train(2)
        rig.check()
        stats = rig.opt.stats()
        assert stats["mode"] == options.get("mode", "auto")
        return stats, next(iter(stats["devices"].values()))

    _, small = device(device_ring_bytes=1 << 20, host_ring_bytes=2 << 20, chunk_elems=None)
    _, large = device(device_ring_bytes=8 << 20, host_ring_bytes=32 << 20, chunk_elems=None)
    assert large["device_ring_bytes"] - small["device_ring_bytes"] == 7 << 20
    assert large["host_ring_bytes"] - small["host_ring_bytes"] == 30 << 20
    total = 2 * sum(RIG_SIZES)
    _, gpu = device(mode="gpu")
    assert (gpu["gpu_lane"]["elements"], gpu["cpu_lane"]["elements"]) == (total, 0)
    _, cpu = device(mode="cpu")
    assert (cpu["gpu_lane"]["elements"], cpu["cpu_lane"]["elements"]) == (0, total)
    _, in_place = device(mode="gpu", transfer="zero_copy")
    assert in_place["device_ring_bytes"] == 0
    _, fine = device(mode="gpu", chunk_elems=1_000)
    assert fine["gpu_lane"]["chunks"] >= 2 * 66 > gpu["gpu_lane"]["chunks"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pin", ["auto", True, False])
def test_pinned_and_pageable_bytes(lanes_device, mode, pin) -> None:
    rig = Rig(lanes_device, mode=mode, pin=pin)
    rig.train(2)
    stats, plan = rig.opt.stats(), rig.opt.plan()
    pinned = pin is True or (pin == "auto" and mode != "cpu")
    assert stats["pinned_bytes"] + stats["pageable_bytes"] == stats["arena_bytes"] >= stats["state_bytes"]
    assert (stats["pinned_bytes"] > 0, stats["pageable_bytes"] > 0) == (pinned, not pinned)
    assert plan["host_bytes"]["state_pinned"] == stats["pinned_bytes"]
    assert plan["host_bytes"]["state_pageable"] == stats["pageable_bytes"]
    assert plan["host_bytes"]["gradients_pinned"] == plan["host_bytes"]["gradients_pageable"] == 0
    assert plan["host_bytes"]["rings_pinned"] > 64 << 20
    (device,) = stats["devices"].values()
    if not pinned:
        assert device["gpu_lane"]["elements"] == 0, "what is pageable is the CPU lane's"
    if not lanes_device.is_simulated:
        assert all(state["exp_avg"].is_pinned() == pinned for state in rig.opt.state.values())
    rig.check()


def test_added_state_is_pinned_too(lanes_device) -> None:
    rig = Rig(lanes_device)
    before = rig.opt.stats()["pinned_bytes"]
    more = Layer(500_000).to(lanes_device.device)
    rig.opt.add_param_group({"params": more.parameters()})
    more(torch.ones(1, device=lanes_device.device)).sum().backward()
    rig.opt.step()
    stats = rig.opt.stats()
    assert stats["pinned_bytes"] >= before + 8 * 500_000
    assert stats["pageable_bytes"] == 0


def test_a_plan_before_anything(lanes_device) -> None:
    p = lanes_device.parameter(torch.ones(1000))
    opt = outboard.AdamW([p], device_state_bytes=0.5)
    plan = opt.plan()
    assert (plan["parameters"], plan["update_seconds"], plan["gelem_per_s"]["is_measured"]) == (0, 0.0, False)
    opt.state  # noqa: B018
    plan = opt.plan()
    assert (plan["parameters"], plan["elements"], plan["state_bytes_per_element"]) == (1, 1000, 8.008)
    assert plan["gelem_per_s"] == {"all": pytest.approx(50 / 8.008), "is_measured": False}
    assert plan["update_seconds"] == pytest.approx((0.0 if plan["resident_gib"] else 1000) / (50e9 / 8.008))
    assert plan["resident_gib_for_all"] == 8008 / 2**30


# ---- one optimizer beside another


def test_two_optimizers_with_a_half_of_a_model_each(lanes_device) -> None:
    model = Stack(*RIG_SIZES).to(lanes_device.device)
    twin = TwinModel(model)
    params, twins = list(model.parameters()), twin.twin.params
    with host_only():
        halves = [outboard.AdamW(twins[::2], threads=1), outboard.Adam(twins[1::2], lr=0.02, threads=1)]
    first = outboard.AdamW(params[::2], threads=1, eager=True).attach(model)
    second = outboard.Adam(params[1::2], lr=0.02, threads=1, device_state_bytes=1.0).attach(model)
    for step in range(4):
        model.loss(step).backward()
        first.step()
        second.step()
        twin.model.loss(step).backward()
        for p, mine in zip(twins, twin.model.parameters(), strict=True):
            set_grad(p, plain_grad(mine).cpu())
        for half in halves:
            half.step()
        twin.copy_back()
        twin.model.zero_grad()
    twin.check_weights()


@pytest.mark.parametrize("eager", ["auto", True, False])
def test_attached_and_detached_in_mid_flight(lanes_device, eager) -> None:
    rig = Rig(lanes_device, attached=False, eager=eager)
    for step in range(6):
        rig.backward_both(step)
        if step % 2:
            rig.opt.attach(rig.model)
        rig.step_both()
        rig.model.zero_grad()
        if step % 2:
            rig.opt.detach()
    rig.check()


def test_a_twin_is_on_the_host() -> None:
    """The twins of this file have no lanes."""
    p = torch.nn.Parameter(torch.ones(70_000))
    twin = Twin([p])
    twin.step([torch.ones_like(p)])
    assert twin.optimizer.stats()["devices"] == {}
    model = Stack(5, 6)
    train(model, torch.optim.SGD(model.parameters(), lr=0.0), TwinModel(model, lr=0.0, weight_decay=0.0), 1)


def test_two_optimizers_with_one_parameter_of_which_one_steps_it(lanes_device) -> None:
    """The other lists it, and has stepped without its gradient: who waits for it there must not take the mark off."""
    shared, own = Stack(90_000).to(lanes_device.device), Stack(80_000).to(lanes_device.device)
    weight = shared[0].weight
    beside = outboard.AdamW([*own.parameters(), weight], eager=False, threads=1).attach(own)
    first = outboard.AdamW([weight], eager=False, threads=1, chunk_elems=2_000).attach(shared)
    twin = Twin([weight])
    for step in range(5):
        own.loss(step).backward()
        beside.step()
        grad = torch.randn_like(weight.detach())
        set_grad(weight, grad)
        twin.step([grad])
        first.step()
        assert is_pending(weight)
        beside.wait([weight])
        assert is_pending(weight)
        twin.check_weights(f"step {step}")


class Past(torch.nn.Module):
    """Its weights are read past their modules' hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(300, 300, bias=False) for _ in range(3))

    def loss(self, step: int) -> torch.Tensor:
        x = torch.full((3, 300), 0.1 * (step % 7) - 0.3, device=self.layers[0].weight.device)
        for layer in self.layers:
            x = torch.tanh(torch.nn.functional.linear(x, layer.weight))
        return x.square().sum()


def test_two_optimizers_that_step_one_after_the_other(lanes_device) -> None:
    """The second finds no gradients, and must not take over whom the readers wait for."""
    rig = Rig(lanes_device, model=Past(), eager=False, lr=0.01)
    second = outboard.AdamW(rig.model.parameters(), eager=False, threads=1).attach(rig.model)
    for step in range(12):
        rig.backward(step)
        rig.opt.step()
        second.step()
        rig.twin.model.loss(step).backward()
        rig.twin.step()
    rig.check()


def test_two_optimizers_that_both_step(lanes_device) -> None:
    """Each waits for the other's updates of the same parameters."""
    params = [lanes_device.parameter(torch.randn(n)) for n in (90_000, 700)]
    twin = Twin(params, lr=0.01)
    model = torch.nn.ParameterList(params)
    both = [outboard.AdamW(params, eager=False, threads=1, lr=0.01, chunk_elems=3_000).attach(model) for _ in range(2)]
    both[1].step()
    with host_only():
        other = outboard.AdamW(twin.params, threads=1, lr=0.01)
    for _ in range(10):
        for opt, host in zip(both, (twin.optimizer, other), strict=True):
            grads = [torch.randn_like(p.detach()) for p in params]
            for p, twin_p, grad in zip(params, twin.params, grads, strict=True):
                set_grad(p, grad)
                set_grad(twin_p, grad.detach().cpu().clone())
            opt.step()
            host.step()
    twin.check_weights()


def test_maxima_that_cannot_be_pinned(lanes_device) -> None:
    """They come in a slab of their own: state of which a part is pageable is the CPU lane's."""
    rig = Rig(lanes_device, 100_000, mode="gpu", eager=False, max_pinned_bytes=1_050_000)
    rig.train(1)
    for opt in (rig.opt, rig.twin.optimizer):
        opt.param_groups[0]["amsgrad"] = True
    with pytest.warns(RuntimeWarning, match="stays pageable"):
        rig.train(1, 1)
    rig.train(1, 2)
    rig.opt.synchronize()
    (device,) = rig.opt.stats()["devices"].values()
    assert (device["gpu_lane"]["elements"], device["cpu_lane"]["elements"]) == (100_000, 200_000)
    rig.check()


def test_maxima_count_as_resident_state(lanes_device) -> None:
    rig = Rig(lanes_device, 1_000, device_state_bytes=12_000, eager=False)
    rig.train(1)
    rig.opt.param_groups[0]["amsgrad"] = True
    rig.train(1, 1)
    rig.opt.add_param_group({"params": Stack(500).to(lanes_device.device).parameters()})
    rig.opt.state  # noqa: B018
    assert rig.opt.stats()["resident_parameters"] == 1


@pytest.mark.parametrize("eager", ["auto", True])
def test_a_poisoned_parameter_stops_updates_in_backward(lanes_device, eager) -> None:
    rig = Rig(lanes_device, 70_000, 90_000, mode="cpu", eager=eager)
    rig.train(2)
    rig.opt._core.fail_next_step(rig.params[1], 3)
    rig.opt.synchronize()
    for p in rig.params:
        set_grad(p, torch.ones_like(p.detach()))
    with contextlib.suppress(outboard.WorkerError):
        rig.opt.step()
    with contextlib.suppress(outboard.WorkerError):
        rig.opt.synchronize()
    assert len(rig.opt.stats()["poisoned"]) == 1
    before = rig.params[0].detach().clone()
    with pytest.raises(outboard.PoisonedError):
        rig.model[0](torch.ones(3, device=lanes_device.device)).sum().backward()
    assert_same(rig.params[0].detach(), before)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_plan_tells_gradients_from_state(lanes_device, steps) -> None:
    rig = Rig(lanes_device, 70_000, 3_000, offload_gradients=True, accumulation_steps=steps, dtype=BF16)
    bytes_ = rig.opt.plan()["host_bytes"]
    assert bytes_["gradients_pinned"] == 73_000 * (2 if steps == 1 else 4)
    assert bytes_["gradients_pageable"] == 0
    assert bytes_["state_pinned"] + bytes_["gradients_pinned"] == rig.opt.stats()["pinned_bytes"]


def test_a_share_of_the_state_is_a_share_of_what_is_added_too(lanes_device) -> None:
    rig = Rig(lanes_device, 70_000, 3_000, device_state_bytes=1.0, eager=False)
    rig.train(2)
    more = Stack(66_000, 60).to(lanes_device.device)
    rig.opt.add_param_group({"params": more.parameters()})
    rig.opt.attach(more)
    rig.train(1, 2)
    more.loss(1).backward()
    rig.opt.step()
    assert rig.opt.stats()["resident_parameters"] == 4
    fixed = Rig(lanes_device, 70_000, 3_000, device_state_bytes=70_000 * 8)
    fixed.opt.add_param_group({"params": Stack(66_000).to(lanes_device.device).parameters()})
    fixed.opt.state  # noqa: B018
    assert fixed.opt.stats()["resident_parameters"] == 1


def test_flushing_denormals_changes_no_bits(lanes_device) -> None:
    """Also not those of constants: an eps this small is one in fp32."""
    rig = Rig(lanes_device, 70_000, 60, eps=1e-40, lr=1e-3)
    rig.train(1)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormals")
        # The twin's kernels are the host's, which other tests hold to this.
        rig.train(3, 1)
    finally:
        torch.set_flush_denormal(False)
    rig.check()


@pytest.mark.parametrize("options", [{"eager": True}, {"offload_gradients": True}])
def test_a_scaler_is_refused_whatever_the_sizes(lanes_device, options) -> None:
    """Also where no gradient has been used in backward: another batch's might be."""
    rig = Rig(lanes_device, 3, 5, **options)
    rig.backward()
    rig.opt.grad_scale, rig.opt.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    with pytest.raises(RuntimeError, match=r"eager=False|offload_gradients=False"):
        rig.opt.step()


@pytest.mark.parametrize("name", ["mode", "eager", "accumulation_steps", "offload_gradients"])
def test_options_that_stay_as_they_are(lanes_device, name) -> None:
    rig = Rig(lanes_device)
    before = getattr(rig.opt, name)
    with pytest.raises(AttributeError):
        setattr(rig.opt, name, before)


@pytest.mark.parametrize("name", ["host_ring_bytes", "max_waiting_bytes", "accumulation_steps", "chunk_elems"])
def test_counts_are_named_when_refused_and_may_be_numpys(lanes_device, name) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    if name != "chunk_elems":
        with pytest.raises(TypeError, match=f"{name} must be an int, not None"):
            outboard.AdamW([parameter], **{name: None})
    outboard.AdamW([parameter], **{name: np.int64(1 << 20)})


@pytest.mark.parametrize("attached", [True, False])
def test_a_poisoned_parameter_stops_steps_without_it(lanes_device, attached) -> None:
    rig = Rig(lanes_device, 70_000, 700, attached=attached, mode="cpu", eager=False)
    rig.train(1)

    def step_and_wait() -> None:
        rig.opt.step()
        rig.opt.synchronize()

    rig.opt._core.fail_next_step(rig.params[1], 3)
    rig.backward(1)
    with pytest.raises(outboard.WorkerError):
        step_and_wait()
    for p in rig.params:
        set_grad(p, None)
    with pytest.raises(outboard.PoisonedError):
        rig.opt.step()
    set_grad(rig.params[0], torch.ones_like(rig.params[0]))
    with pytest.raises(outboard.PoisonedError):
        rig.opt.step()
    rig.opt.reset(rig.params[1])
    rig.opt.step()
