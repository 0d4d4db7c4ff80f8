"""Waiting for updates, and undoing `attach`."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import outboard
from lanes import (
    Rig,
    Stack,
    assert_untouched,
    is_pending,
)
from oracle import assert_same

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = [pytest.mark.timeout(60, method="thread"), pytest.mark.usefixtures("small_ones_have_hooks")]

FP32, BF16 = torch.float32, torch.bfloat16


# ---- waiting


def test_wait_synchronize_and_detach(lanes_device) -> None:
    rig = Rig(lanes_device, 66_000, 700, 80_000)
    rig.backward()
    rig.opt.step()
    first, second, third = rig.params
    assert all(is_pending(p) for p in (first, second, third))
    rig.opt.wait(second)
    assert [is_pending(p) for p in (first, second, third)] == [True, False, True]
    rig.opt.wait([first])
    assert [is_pending(p) for p in (first, second, third)] == [False, False, True]
    rig.opt.wait()
    assert not is_pending(third)
    rig.twin.model.loss().backward()
    rig.twin.step()
    rig.twin.check_weights()
    rig.backward(1)
    rig.opt.step()
    rig.opt.synchronize()
    assert not any(is_pending(p) for p in rig.params)
    rig.twin.model.loss(1).backward()
    rig.twin.step()
    rig.check()
    with pytest.raises(ValueError, match="not a parameter"):
        rig.opt.wait(torch.nn.Parameter(torch.ones(1)))
    rig.opt.wait([])


def test_wait_of_an_optimizer_that_has_not_begun(lanes_device) -> None:
    p = lanes_device.parameter(torch.ones(3))
    opt = outboard.AdamW([p])
    opt.wait()
    opt.wait(p)
    opt.synchronize()
    opt.detach()
    opt.close()
    assert not opt.state_dict()["state"]


def test_weights_seen_through_a_view_are_there_after_wait(lanes_device) -> None:
    """A view taken earlier is not followed; wait() is what to call."""
    rig = Rig(lanes_device, 500_000, 300_000)
    views = [p.detach() for p in rig.params]
    rig.backward()
    rig.opt.step()
    rig.opt.wait()
    got = [view.clone().cpu() for view in views]
    rig.twin.model.loss().backward()
    rig.twin.step()
    for view, twin in zip(got, rig.twin.twin.params, strict=True):
        assert_same(view, twin)


def test_close_and_go_on(lanes_device) -> None:
    rig = Rig(lanes_device)
    rig.train(2)
    rig.backward(2)
    rig.opt.step()
    rig.opt.close()
    rig.twin.model.loss(2).backward()
    rig.twin.step()
    rig.check()
    rig.train(2, 3)
    rig.check()


def test_versions_make_a_stale_backward_fail(lanes_device) -> None:
    for eager in (True, False):
        rig = Rig(lanes_device, eager=eager)
        versions = [p._version for p in rig.params]
        stale = rig.model.loss(1)
        rig.backward()
        if eager:
            seen = [p._version > version for p, version in zip(rig.params, versions, strict=True)]
            assert sum(seen) == rig.hooked > 0
        rig.opt.step()
        assert all(p._version > version for p, version in zip(rig.params, versions, strict=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()


def test_gradients_that_wait_are_bounded(lanes_device) -> None:
    """By `max_waiting_bytes`, to the byte: a gradient that would exceed it waits in its hook."""
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 300, bias=False) for _ in range(8)]).to(lanes_device.device)
    each = 300 * 300 * 4
    opt = outboard.AdamW(model.parameters(), eager=True, threads=1, chunk_elems=2_000, max_waiting_bytes=2 * each + 8)
    opt.attach(model)
    for _ in range(5):
        model(torch.randn(4, 300, device=lanes_device.device)).square().mean().backward()
        opt.step()
    opt.synchronize()
    (device,) = opt.stats()["devices"].values()
    assert each <= device["most_waiting_gradient_bytes"] <= 2 * each + 8


def test_a_step_in_the_middle_of_threads_that_read(lanes_device) -> None:
    """A thread that saves or averages weights beside the training."""
    rig = Rig(lanes_device, 100_000, 700, 80_000)
    stop, errors = threading.Event(), []

    def read() -> None:
        try:
            while not stop.is_set():
                for p in rig.params:
                    p.detach().sum()
                rig.model.state_dict()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for step in range(30):
            rig.backward(step)
            rig.opt.step()
            rig.opt.synchronize()
    finally:
        stop.set()
        thread.join()
    assert errors == []
    for step in range(30):
        rig.twin.model.loss(step).backward()
        rig.twin.step()
    rig.check()


@pytest.mark.parametrize("call", ["synchronize", "state_dict", "state", "weights"])
@pytest.mark.parametrize("eager", ["auto", True, False])
def test_another_thread_waits_while_updates_begin(lanes_device, eager, call) -> None:
    """What begins after its wait keeps its mark: the next forward reads no weight too early."""
    rig = Rig(lanes_device, 90_000, 80_000, 70_000, eager=eager)
    stop, errors = threading.Event(), []

    def wait() -> None:
        try:
            while not stop.is_set():
                if call == "weights":
                    for p in rig.params:
                        p.detach().sum()
                elif call == "state":
                    rig.opt.state  # noqa: B018
                else:
                    getattr(rig.opt, call)()
                time.sleep(5e-4)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        for step in range(60):
            rig.backward(step)
            rig.opt.step()
    finally:
        stop.set()
        thread.join()
    assert errors == []
    for step in range(60):
        rig.twin.model.loss(step).backward()
        rig.twin.step()
    rig.check()


def test_no_thread_comes_between_a_mark_and_its_update(lanes_device, monkeypatch) -> None:
    rig = Rig(lanes_device, eager=True)
    take, threads, marked = rig.opt._take_one, [], []

    def take_slowly(parameter: torch.Tensor, *others: object) -> bool:
        threads.append(threading.Thread(target=rig.opt.synchronize))
        threads[-1].start()
        threads[-1].join(0.1)
        taken = take(parameter, *others)
        marked.append(is_pending(parameter))
        return taken

    monkeypatch.setattr(rig.opt, "_take_one", take_slowly)
    rig.backward()
    assert marked == [True] * rig.hooked
    for thread in threads:
        thread.join()
    rig.opt.step()
    rig.twin.model.loss().backward()
    rig.twin.step()
    rig.check()


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("listed", ["in order", "reversed"])
def test_updates_come_in_the_order_of_the_first_forward(lanes_device, listed, eager) -> None:
    """However the optimizer lists them; in backward the last ones have begun before the first are known."""
    model = Stack(*[70_000] * 6).to(lanes_device.device)
    named = list(model.named_parameters())
    if listed == "reversed":
        named.reverse()
    opt = outboard.AdamW(named, threads=1, mode="cpu", eager=eager).attach(model)
    opt.record_timeline(True)
    for step in range(3):
        model.loss(step).backward()
        opt.step()
        opt.synchronize()
        chunks = sorted((start, name) for lane, name, start, _ in opt.take_timeline() if lane == "cpu lane")
        taken = [name for _, name in chunks]
        assert len(taken) == 6
        if not eager:
            assert taken == sorted(taken)
    opt.close()


# ---- detach


def test_detach_restores_everything(lanes_device) -> None:
    for when in ("at once", "under way", "trained"):
        rig = Rig(lanes_device)
        assert any(module._forward_pre_hooks for module in rig.model.modules())
        assert any(p._post_accumulate_grad_hooks for p in rig.params)
        if when != "at once":
            rig.train(2)
        if when == "under way":
            rig.backward(2)
            rig.opt.step()
            assert any(is_pending(p) for p in rig.params)
            rig.twin.model.loss(2).backward()
            rig.twin.step()
        rig.opt.detach()
        assert_untouched(rig.model)
        rig.check()
        # A plain optimizer again: gradients stay.
        rig.backward(3)
        rig.opt.step()
        assert all(p.grad is not None for p in rig.params)
        rig.opt.zero_grad()
        rig.twin.model.loss(3).backward()
        rig.twin.step()
        rig.check()
        rig.opt.attach(rig.model)
        rig.train(3, 4)
        rig.check()


def test_detach_between_backward_and_step(lanes_device) -> None:
    """What backward has updated must not be updated again by a step that does not know."""
    for eager in ("auto", True):
        rig = Rig(lanes_device, eager=eager)
        rig.train()
        rig.backward(1)
        with pytest.raises(RuntimeError, match=r"step\(\)|abandon"):
            rig.opt.detach()
        rig.opt.step()
        rig.twin.model.loss(1).backward()
        rig.twin.step()
        rig.opt.detach()
        rig.check()
