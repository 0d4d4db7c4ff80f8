"""What counts as a backward: accumulation, checkpointing, exceptions, other threads, CUDA graphs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import outboard
from lanes import (
    Checkpointed,
    FailsInTheMiddle,
    Layer,
    Rig,
    Stack,
    backward_fails,
    plain_grad,
)
from oracle import assert_same
from outboard import _attach, _capture, _stepping

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = [pytest.mark.timeout(60, method="thread"), pytest.mark.usefixtures("small_ones_have_hooks")]

FP32, BF16 = torch.float32, torch.bfloat16


# ---- checkpointing


def test_checkpointing_without_reentry(lanes_device) -> None:
    model = Checkpointed(3000, 5, 700)
    model.times = 2
    rig = Rig(lanes_device, model=model, eager=True)
    rig.train(3)
    assert rig.eager_updates == 3 * rig.hooked > 0
    rig.check()


def test_reentrant_checkpointing_is_not_taken_for_proof(lanes_device) -> None:
    """Each segment is a backward of its own; without eager updates that is no matter."""
    for eager in ("auto", False):
        model = Checkpointed(3000, 5, 700)
        model.use_reentrant = True
        model.times = 2
        rig = Rig(lanes_device, model=model, eager=eager)
        rig.train(3)
        rig.check()


def test_reentrant_checkpointing_with_accumulation(lanes_device) -> None:
    model = Checkpointed(3000, 5, 700)
    model.use_reentrant = True
    rig = Rig(lanes_device, model=model, eager=False, accumulation_steps=2)
    for step in range(2):
        for m in (rig.model, rig.twin.model):
            m.loss(step).backward()
            m.loss(step + 5).backward()
        rig.opt.step()
        rig.twin.step()
    rig.check()


def test_reentrant_checkpointing_of_a_module_used_twice_with_eager(lanes_device) -> None:
    model = Checkpointed(3000, 700)
    model.use_reentrant = True
    model.times = 2
    rig = Rig(lanes_device, model=model, eager=True)
    with pytest.raises(RuntimeError, match=r"eager=False|accumulation_steps"):
        rig.backward()
    rig.opt.abandon()


# ---- accumulation


@pytest.mark.parametrize("eager", ["auto", True, False])
def test_accumulation(lanes_device, eager) -> None:
    rig = Rig(lanes_device, eager=eager, accumulation_steps=3)
    for step in range(4):
        for model in (rig.model, rig.twin.model):
            for micro in range(3):
                model.loss(10 * step + micro).backward()
        rig.opt.step()
        rig.opt.zero_grad()
        rig.twin.step()
    assert rig.eager_updates == {"auto": 3, True: 4, False: 0}[eager] * rig.hooked
    rig.check()


@pytest.mark.parametrize("eager", ["auto", True, False])
def test_more_backwards_than_declared(lanes_device, eager) -> None:
    rig = Rig(lanes_device, eager=eager, accumulation_steps=2)
    rig.backward(0)
    rig.backward(1)
    with pytest.raises(RuntimeError, match=r"accumulation_steps|step\(\)"):
        rig.backward(2)


@pytest.mark.parametrize("eager", ["auto", True])
def test_fewer_backwards_than_declared(lanes_device, eager) -> None:
    """The last batch of an epoch: what has come is taken at step()."""
    rig = Rig(lanes_device, eager=eager, accumulation_steps=3)
    for step in range(3):
        for micro in range(2):
            rig.model.loss(10 * step + micro).backward()
            rig.twin.model.loss(10 * step + micro).backward()
        rig.opt.step()
        rig.twin.step()
    assert rig.eager_updates == 0
    rig.check()


class Routed(torch.nn.Module):
    """Experts that not every backward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([Layer(800), Layer(900), Layer(7), Layer(70_000)])

    def loss(self, route: tuple[int, ...]) -> torch.Tensor:
        x = torch.full((3,), 0.1, device=self.experts[0].weight.device)
        for expert in route:
            x = self.experts[expert](x)
        return x.sum()


@pytest.mark.parametrize("eager", ["auto", True, False])
def test_accumulation_counts_backwards_not_gradients(lanes_device, eager) -> None:
    """Three and one gradients in four backwards, none in the last one, and some experts never used."""
    routes = [
        [(0, 1), (0,), (0, 2), (1,)],
        [(2,), (2,), (1,), (0,)],
        [(0, 1, 2, 3)] * 4,
        [(3,), (0,), (3, 1), (2,)],
    ]
    rig = Rig(lanes_device, model=Routed(), eager=eager, accumulation_steps=4)
    for of_step in routes * 2:
        for model in (rig.model, rig.twin.model):
            for route in of_step:
                model.loss(route).backward()
        rig.opt.step()
        rig.opt.zero_grad()
        rig.twin.step()
    rig.check()


@pytest.mark.parametrize("eager", ["auto", True, False])
def test_gradients_that_are_missing_on_some_steps(lanes_device, eager) -> None:
    rig = Rig(lanes_device, model=Routed(), eager=eager)
    for route in [(0, 1, 2, 3), (0,), (2,), (1, 3), (3,), (0, 1)]:
        for model in (rig.model, rig.twin.model):
            model.loss(route).backward()
        rig.opt.step()
        rig.twin.step()
    rig.check()
    counts = [float(rig.opt.state[p]["step"]) for p in rig.params]
    assert counts == [3.0, 3.0, 2.0, 3.0]


# ---- exceptions


@pytest.mark.parametrize("eager", ["auto", True])
def test_exception_in_backward(lanes_device, eager) -> None:
    rig = Rig(lanes_device, model=FailsInTheMiddle(3000, 700, 66_000, 5), eager=eager)
    rig.train()
    before = [p.detach().clone() for p in rig.params]
    with backward_fails():
        rig.backward(1)
    for call in (rig.opt.step, rig.opt.zero_grad, lambda: rig.backward(1)):
        with pytest.raises(RuntimeError, match="abandon"):
            call()
    abandoned = rig.opt.abandon()
    assert abandoned.updated == ["parameter 2 of group 0, shape (66000,)"]
    assert abandoned.dropped == ["parameter 3 of group 0, shape (5,)"]
    assert all(plain_grad(p) is None for p in rig.params)
    # What had begun is complete, the rest is as it was.
    rig.twin.model.loss(1).backward()
    for index in (0, 1, 3):
        assert_same(rig.params[index].detach(), before[index])
        list(rig.twin.model.parameters())[index].grad = None
    rig.twin.step()
    rig.check()
    rig.train(2, 2)
    rig.check()


def test_exception_in_a_backward_that_updates_nothing(lanes_device) -> None:
    """Before anything has begun, torch's way: zero_grad() and on."""
    rig = Rig(lanes_device, model=FailsInTheMiddle(3000, 700, 66_000, 5), eager=False)
    with backward_fails():
        rig.backward()
    rig.opt.zero_grad()
    rig.train(2)
    rig.check()
    with backward_fails():
        rig.backward()
    abandoned = rig.opt.abandon()
    assert abandoned.updated == []
    assert abandoned.dropped == ["parameter 2 of group 0, shape (66000,)", "parameter 3 of group 0, shape (5,)"]
    rig.train(2)
    rig.check()


def test_abandon_of_an_optimizer_that_is_not_attached(lanes_device) -> None:
    p, q = lanes_device.parameter(torch.ones(3)), lanes_device.parameter(torch.ones(4))
    opt = outboard.AdamW([("p", p), ("q", q)])
    p.grad = torch.ones_like(p)
    abandoned = opt.abandon()
    assert abandoned == ([], ["p"])
    assert p.grad is None


def test_exception_in_forward(lanes_device) -> None:
    rig = Rig(lanes_device, eager=True)
    rig.train()
    with pytest.raises(ZeroDivisionError):
        _ = rig.model.loss(1) / (1 // 0)
    rig.train(2, 1)
    rig.check()


# ---- what counts


def accumulate(rig: Rig, steps: int = 2) -> None:
    """Two backwards for each step, of model and twin."""
    for step in range(steps):
        for model in (rig.model, rig.twin.model):
            model.loss(step).backward()
            model.loss(step + 5).backward()
        rig.opt.step()
        rig.twin.step()


class Nested(Stack):
    """Reentrant checkpoints within a reentrant checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def first(x: torch.Tensor) -> torch.Tensor:
            return self[1](checkpoint(self[0], x, use_reentrant=True))

        return self[2](checkpoint(first, x.requires_grad_(), use_reentrant=True))


@pytest.mark.parametrize("eager", ["auto", True, False])
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "nested", "twice"])
def test_checkpointing_with_accumulation(lanes_device, eager, kind) -> None:
    """However many backwards run within: a backward of the model is one."""
    model = (Nested if kind == "nested" else Checkpointed)(3000, 5, 700)
    model.use_reentrant = kind != "not reentrant"
    model.times = 2 if kind == "twice" else 1
    rig = Rig(lanes_device, model=model, eager=eager, accumulation_steps=2)
    if kind == "twice" and eager is True:
        with pytest.raises(RuntimeError, match="second gradient before step"):
            accumulate(rig)
        rig.opt.abandon()
        return
    accumulate(rig, 3)
    assert rig.eager_updates == {True: 3, "auto": 0 if kind == "twice" else 2, False: 0}[eager] * rig.hooked
    rig.check()
    rig.backward(0)
    rig.backward(1)
    with pytest.raises(RuntimeError, match=r"accumulation_steps|step\(\)"):
        rig.backward(2)


def test_reentrant_checkpointing_without_torchs_private_function(lanes_device, monkeypatch) -> None:
    """Each segment counts then: right without accumulation, an error with it, nothing silent."""
    monkeypatch.setattr(_attach, "backward_here", lambda: -1)
    model = Checkpointed(3000, 5, 700)
    model.use_reentrant = True
    rig = Rig(lanes_device, model=model, eager=False)
    rig.train(3)
    rig.check()
    model = Checkpointed(3000, 600, 700)
    model.use_reentrant = True
    rig = Rig(lanes_device, model=model, eager=False, accumulation_steps=2)
    with pytest.raises(RuntimeError, match=r"backward 3 since.*accumulation_steps is 2"):
        rig.backward()


def test_a_gradient_penalty_of_checkpoints_is_no_backward(lanes_device) -> None:
    """`autograd.grad` computes segments anew and completes no gradient of a parameter."""
    model = Checkpointed(3000, 5, 700)
    rig = Rig(lanes_device, model=model, eager=True, accumulation_steps=2)

    def loss(model: Any, step: int) -> torch.Tensor:
        x = torch.full((3,), 0.1 * step, device=lanes_device.device, requires_grad=True)
        value = model(x).sum()
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return value + slope.square().sum()

    for step in range(2):
        for m in (rig.model, rig.twin.model):
            loss(m, step).backward()
            loss(m, step + 5).backward()
        rig.opt.step()
        rig.twin.step()
    assert rig.eager_updates == 2 * rig.hooked > 0
    rig.check()


def test_a_checkpointed_backward_that_raises_is_forgotten(lanes_device) -> None:
    """Its end never comes; the next backward is followed to its own."""
    model = Checkpointed(3000, 5, 700)
    model.use_reentrant = True
    rig = Rig(lanes_device, model=model, eager=True, accumulation_steps=2)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    loss = rig.model.loss()
    handle = rig.params[0].register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss.backward()
    handle.remove()
    rig.opt.abandon()
    accumulate(rig)
    assert rig.eager_updates == 2 * rig.hooked > 0
    rig.check()


def test_backwards_of_two_models_count_each(lanes_device) -> None:
    first, second = (Stack(3000, 700).to(lanes_device.device) for _ in range(2))
    opt = outboard.AdamW([*first.parameters(), *second.parameters()], threads=1, accumulation_steps=2, eager=True)
    opt.attach(first).attach(second)
    for step in range(2):
        first.loss(step).backward()
        second.loss(step).backward()
        opt.step()
    assert all(opt.state[p]["step"] == 2 for p in [*first.parameters(), *second.parameters()])
    first.loss().backward()
    second.loss().backward()
    with pytest.raises(RuntimeError, match=r"accumulation_steps|step\(\)"):
        first.loss().backward()


def test_backwards_on_another_thread(lanes_device) -> None:
    model = Checkpointed(3000, 5, 700)
    model.use_reentrant = True
    rig = Rig(lanes_device, model=model, eager=True, accumulation_steps=2)
    thread = threading.Thread(target=accumulate, args=(rig,))
    thread.start()
    thread.join()
    assert rig.eager_updates == 2 * rig.hooked > 0
    rig.check()


# ---- CUDA graphs


@pytest.mark.parametrize("what", ["backward", "step"])
def test_a_stream_that_is_being_captured(lanes_device, monkeypatch, what) -> None:
    rig = Rig(lanes_device, eager=True)
    rig.train()
    if what == "step":
        rig.backward(1)
        # A simulated device is host memory, whose steps nobody captures.
        monkeypatch.setattr(_stepping, "_is_on_cuda", lambda _: True)
    loss = rig.model.loss(1)
    with monkeypatch.context() as patch:
        patch.setattr(_capture, "is_capturing", lambda: True)
        with pytest.raises(RuntimeError, match=r"captured into a CUDA graph.*not attached"):
            rig.opt.step() if what == "step" else loss.backward()
    if what == "step":
        rig.opt.step()
        rig.twin.model.loss(1).backward()
        rig.twin.step()
    else:
        rig.opt.abandon()
    rig.check()


def test_asking_about_capture_does_not_initialise_cuda(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("CUDA was asked"))
    assert not _capture.is_capturing()


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node.s stream does not match:UserWarning")  # once in a process
@pytest.mark.parametrize("what", ["backward", "step"])
def test_a_real_capture(what) -> None:
    model = torch.nn.Linear(300, 300, device="cuda")
    opt = outboard.AdamW(model.parameters(), eager=True).attach(model)
    x = torch.randn(4, 300, device="cuda")
    model(x).sum().backward()
    opt.step()
    opt.synchronize()
    graph = torch.cuda.CUDAGraph()
    work = opt.step if what == "step" else lambda: model(x).sum().backward()
    with pytest.raises(RuntimeError, match="captured into a CUDA graph"), torch.cuda.graph(graph):
        work()
    torch.cuda.synchronize()
    opt.abandon()
    model(x).sum().backward()
    opt.step()
    opt.synchronize()
