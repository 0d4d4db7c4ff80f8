"""Attached optimizers: who owns whom, copies, closures, compiled models."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

import outboard
from lanes import (
    Rig,
    Stack,
    Twin,
    TwinModel,
    assert_untouched,
    set_grad,
)
from oracle import assert_same
from outboard import _pending

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = [pytest.mark.timeout(60, method="thread"), pytest.mark.usefixtures("small_ones_have_hooks")]

FP32, BF16 = torch.float32, torch.bfloat16


# ---- who owns whom


def test_hooks_hold_no_strong_reference(lanes_device) -> None:
    rig = Rig(lanes_device)
    rig.train(2)
    rig.backward(2)
    rig.opt.step()
    rig.twin.model.loss(2).backward()
    rig.twin.step()
    model, twin, optimizer = rig.model, rig.twin, weakref.ref(rig.opt)
    gc.disable()
    try:
        del rig
        assert optimizer() is None
    finally:
        gc.enable()
    twin.check_weights("after the optimizer went, with updates under way,")
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    model.loss(3).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_optimizer_goes_while_its_state_is_in_use(lanes_device) -> None:
    """A view of the state keeps the native half; updates are complete all the same."""
    model = Stack(800_000, 300_000).to(lanes_device.device)
    twin = TwinModel(model)
    opt = outboard.AdamW(model.parameters(), threads=1, chunk_elems=2_000).attach(model)
    state = opt.state
    model.loss().backward()
    opt.step()
    del opt
    seen = [p.detach().clone() for p in model.parameters()]
    twin.model.loss().backward()
    twin.step()
    for p, wanted in zip(seen, twin.twin.params, strict=True):
        assert_same(p.cpu(), wanted)
    assert len(state) == 2


def test_dropped_with_work_under_way_many_times(lanes_device) -> None:
    for round_ in range(40):
        rig = Rig(lanes_device, 70_000, 60, 700, eager=round_ % 2 == 0)
        rig.backward(round_)
        if round_ % 3:
            rig.opt.step()
        model, twin = rig.model, rig.twin
        twin.model.loss(round_).backward()
        twin.step()
        del rig
        if round_ % 3 or round_ % 2 == 0:
            twin.check_weights(f"round {round_}")
        del model


def test_the_model_goes_before_its_optimizer(lanes_device) -> None:
    rig = Rig(lanes_device)
    rig.train()
    rig.backward(1)
    rig.opt.step()
    opt, model = rig.opt, weakref.ref(rig.model)
    rig.twin.original = None
    del rig
    gc.collect()
    assert model() is None
    opt.synchronize()
    assert len(opt.state) == 4
    opt.detach()


@pytest.mark.parametrize("moment", ["idle", "in backward", "after step"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "copy of modules"])
def test_copies_of_an_attached_model(lanes_device, moment, how, tmp_path) -> None:
    rig = Rig(lanes_device, 3000, 60, 700, 66_000, eager=True)
    rig.train(2)
    if moment != "idle":
        rig.backward(2)
        rig.twin.model.loss(2).backward()
        rig.twin.step()
    if moment == "after step":
        rig.opt.step()
    if how == "deepcopy":
        copied = copy.deepcopy(rig.model)
    elif how == "copy of modules":
        copied = Stack(*(p.numel() for p in rig.params)).to(lanes_device.device)
        for index, layer in enumerate(rig.model):
            copied[index] = copy.deepcopy(layer)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(rig.model))
    else:
        torch.save(rig.model, tmp_path / "model.pt")
        copied = torch.load(tmp_path / "model.pt", weights_only=False)
    for p, twin in zip(copied.parameters(), rig.twin.twin.params, strict=True):
        assert type(p) is torch.nn.Parameter
        assert_same(p.detach().cpu(), twin)
    # It trains without the optimizer's doing.
    updates = rig.eager_updates
    copied.loss(3).backward()
    assert rig.eager_updates == updates
    assert all(p.grad is not None for p in copied.parameters())
    if moment == "in backward":
        rig.opt.step()
    rig.train(2, 4)
    rig.check()


@pytest.mark.parametrize("name", ["_GradientHook", "_ForwardHook", "_ModelHook", "_CompiledHook"])
def test_pickles_of_earlier_versions_find_their_hooks(name) -> None:
    hook = pickle.loads(b"coutboard._attach\n" + name.encode() + b"\n(tR.")
    assert hook(None, None) is None if name != "_GradientHook" else hook(None) is None


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_an_attached_optimizer(lanes_device, how) -> None:
    rig = Rig(lanes_device, eager=True)
    rig.train(2)
    rig.backward(2)
    rig.opt.step()
    rig.twin.model.loss(2).backward()
    rig.twin.step()
    copied = copy.deepcopy(rig.opt) if how == "deepcopy" else pickle.loads(pickle.dumps(rig.opt))
    params = copied.param_groups[0]["params"]
    assert not any(p is q for p, q in zip(params, rig.params, strict=True))
    grads = [torch.randn_like(p) for p in params]
    mine = Twin(params)
    mine.optimizer.load_state_dict(copied.state_dict())
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    mine.step()
    copied.step()
    mine.check(copied)
    rig.train(2, 3)
    rig.check()


def test_two_optimizers_for_one_parameter(lanes_device) -> None:
    """The second reads what the first has written."""
    p = lanes_device.parameter(torch.randn(600_000))
    module = torch.nn.Module()
    module.p = p
    first = outboard.AdamW([p], lr=0.1, threads=1, chunk_elems=2_000).attach(module)
    second = outboard.Adam([p], lr=0.1, threads=1, chunk_elems=3_000)
    third = torch.optim.SGD([p], lr=0.1)
    twin = Twin([p], lr=0.1)
    with_adam = Twin([p], outboard.Adam, lr=0.1)
    for attached in (False, True):
        if attached:
            second.attach(module)
        for _ in range(3):
            grads = [torch.randn_like(p) for _ in range(3)]
            for opt, grad in zip((first, second, third), grads, strict=True):
                set_grad(p, grad)
                opt.step()
            twin.step([grads[0]])
            with torch.no_grad():
                with_adam.params[0].copy_(twin.params[0])
            with_adam.step([grads[1]])
            with torch.no_grad():
                twin.params[0].copy_(with_adam.params[0]).sub_(grads[2].cpu(), alpha=0.1)
        assert_same(p.detach().cpu(), twin.params[0])


def test_nothing_is_left_behind(lanes_device) -> None:
    gc.collect()
    before = len(_pending._waiters)
    for _ in range(5):
        rig = Rig(lanes_device)
        rig.train()
        rig.backward()
        rig.opt.step()
        del rig
        gc.collect()
    assert len(_pending._waiters) == before


# ---- other callers


@pytest.mark.parametrize("eager", ["auto", False])
def test_closure(lanes_device, eager) -> None:
    rig = Rig(lanes_device, eager=eager)
    for step in range(3):
        calls = []

        def closure(step: int = step, calls: list[int] = calls) -> torch.Tensor:
            calls.append(step)
            rig.opt.zero_grad()
            loss = rig.model.loss(step)
            loss.backward()
            return loss

        loss = rig.opt.step(closure)
        wanted = rig.twin.model.loss(step)
        assert_same(loss.detach().cpu(), wanted.detach().cpu())
        wanted.backward()
        rig.twin.step()
        assert calls == [step]
    rig.check()


def test_step_hooks_and_profiler(lanes_device) -> None:
    rig = Rig(lanes_device)
    calls = []
    rig.opt.register_step_pre_hook(lambda *_: calls.append("before"))
    rig.opt.register_step_post_hook(lambda *_: calls.append("after"))
    rig.train(2)
    assert calls == ["before", "after"] * 2
    rig.check()


def test_no_grad_and_inference_mode_forwards(lanes_device) -> None:
    rig = Rig(lanes_device, 300_000, 700, 200_000)
    for step in range(3):
        rig.backward(step)
        rig.opt.step()
        context = torch.no_grad() if step % 2 else torch.inference_mode()
        with context:
            got = rig.model.eval().loss(7)
        rig.model.train()
        rig.twin.model.loss(step).backward()
        rig.twin.step()
        with torch.no_grad():
            assert_same(got.cpu(), rig.twin.model.loss(7).cpu())
    rig.check()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
# torch 2.11 hides this one by a filter of its own, which does not hide errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("how", ["torch.compile", "model.compile", "a part"])
def test_compiled_models(lanes_device, how) -> None:
    """Hooks outside of the compiled region, none inside; the graph does not break."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    rig = Rig(lanes_device, 300_000, 700, 200_000)
    rig.opt.detach()

    def compile_(model: Stack, counter: Any) -> Any:
        if how == "torch.compile":
            return torch.compile(model, backend=counter, fullgraph=True)
        if how == "model.compile":
            model.compile(backend=counter, fullgraph=True)
        else:
            model[0] = torch.compile(model[0], backend=counter, fullgraph=True)
        return model

    alone, counter = CompileCounter(), CompileCounter()
    without = compile_(copy.deepcopy(rig.model), alone)
    compiled = compile_(rig.model, counter)
    rig.opt.attach(compiled)

    def loss(model: Any, step: int) -> torch.Tensor:
        return model(torch.full((3,), 0.1 * step, device=lanes_device.device)).sum()

    for step in range(4):
        loss(compiled, step).backward()
        rig.opt.step()
        loss(rig.twin.model, step).backward()
        rig.twin.step()
    rig.check()
    # One, or (torch 2.11, model.compile()) one for each layer.
    loss(without, 0)
    assert counter.frame_count == alone.frame_count
    rig.opt.detach()
    loss(compiled, 4)
    assert counter.frame_count == alone.frame_count
    assert_untouched(rig.model)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*DataParallel:FutureWarning")
@pytest.mark.parametrize("eager", [True, "auto"])
def test_data_parallel_is_not_overlapped(lanes_device, eager) -> None:
    """Its gradients are final later than hooks say, and its weights are read by native code, which nobody sees."""
    model = Stack(3000, 700).to(lanes_device.device)
    twin = TwinModel(model)
    wrapped, theirs = torch.nn.DataParallel(model), torch.nn.DataParallel(twin.model)
    opt = outboard.AdamW(model.parameters(), threads=1, eager=eager).attach(model).attach(wrapped)
    for step in range(3):
        wrapped(torch.full((3,), 0.1 * step, device=lanes_device.device)).sum().backward()
        assert not any(p.grad is None for p in model.parameters())
        opt.step()
        # As native code reads them: nobody waits any more.
        with torch._C.DisableTorchFunctionSubclass():
            weights = [p.detach().cpu() for p in model.parameters()]
        theirs(torch.full((3,), 0.1 * step, device=lanes_device.device)).sum().backward()
        twin.step()
        for weight, wanted in zip(weights, twin.twin.params, strict=True):
            assert_same(weight, wanted.detach())
    twin.check(opt)
