"""Compiled models, functions and backward passes, with an optimizer that is attached or not.

The compiled twin is torch's fused optimizer over a copy that is compiled in the same way: the same bits, and as many
graphs as without outboard. Backends "eager" and "aot_eager" trace as inductor does and take no C++ compiler; inductor
itself is asked once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import outboard
from fused import EAGER, EAGER_IDS, SMALL_RINGS, FusedRig, FusedTwin, fused
from lanes import is_pending
from oracle import assert_same

pytestmark = [
    pytest.mark.usefixtures("small_ones_have_hooks", "compiler"),
    # torch's compiler's own: of parts of torch that it still uses, and of gradients that it looks for.
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


@pytest.fixture
def compiler() -> Iterator[None]:
    """Forget what was compiled before and after a test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(torch.nn.Module):
    """Layers that are called, one that another module reads, and a weight of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 320)
        self.outer = torch.nn.Linear(320, 16)
        self.read = torch.nn.Linear(16, 16, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.outer(torch.tanh(self.inner(x)))
        return torch.nn.functional.linear(x, self.read.weight) * self.scale


def batch(model: torch.nn.Module, step: int, rows: int = 4) -> torch.Tensor:
    device = next(iter(model.parameters())).device
    return torch.sin(torch.arange(16.0 * rows, device=device).reshape(rows, 16) * (1 + step % 3))


def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    result: torch.Tensor = model(batch(model, step)).square().mean()
    return result


def train(model: Any, step: Callable[[], Any], numbers: range, rows: int = 4) -> None:
    for number in numbers:
        model(batch(model, number, rows)).square().mean().backward()
        step()


def compiled(model: torch.nn.Module, how: str, backend: Any, **options: Any) -> Any:
    if how == "torch.compile":
        return torch.compile(model, backend=backend, **options)
    model.compile(backend=backend, **options)
    return model


# ---- compiled models


@pytest.mark.parametrize(
    ("how", "when"),
    [*(("torch.compile", when) for when in EAGER), ("model.compile", EAGER[1])],
    ids=[*EAGER_IDS, "model.compile, auto"],
)
def test_one_graph_and_the_same_bits(lanes_device, how, when) -> None:
    """Without a break and without compiling anew, whatever the time at which updates begin."""
    torch.manual_seed(2)
    model = Model().to(lanes_device.device)
    twin = FusedTwin(model)
    ours, theirs = CompileCounterWithBackend("aot_eager"), CompileCounterWithBackend("aot_eager")
    mine = compiled(model, how, ours, fullgraph=True)
    other = compiled(twin.model, how, theirs, fullgraph=True)
    opt = outboard.AdamW(model.parameters(), threads=1, **SMALL_RINGS, **when).attach(mine)
    train(mine, lambda: (opt.step(), opt.zero_grad()), range(4))
    train(other, twin.step, range(4))
    assert ours.frame_count == theirs.frame_count == 1
    assert (opt.stats()["eager_updates"] > 0) == (when["eager"] is not False)
    twin.check(opt)
    # Batches of another size: one more graph, as without outboard.
    train(mine, lambda: (opt.step(), opt.zero_grad()), range(4, 6), rows=6)
    train(other, twin.step, range(4, 6), rows=6)
    assert ours.frame_count == theirs.frame_count
    twin.check(opt)


@pytest.mark.parametrize("how", ["torch.compile", "model.compile"])
def test_attached_after_the_first_compiled_call(lanes_device, how) -> None:
    """Hooks that are added then never fire in the compiled region; what waits is outside of it."""
    model = Model().to(lanes_device.device)
    twin = FusedTwin(model)
    counter = CompileCounter()
    mine = compiled(model, how, counter, fullgraph=True)
    mine(batch(model, 0))
    opt = outboard.AdamW(model.parameters(), threads=1, **SMALL_RINGS).attach(mine)
    for number in range(4):
        train(mine, opt.step, range(number, number + 1))
        assert is_pending(model.read.weight)
    train(twin.model, twin.step, range(4))
    assert counter.frame_count == 1
    assert opt.stats()["eager_updates"] > 0
    twin.check(opt)


def test_a_compiled_part(lanes_device) -> None:
    """The rest of the model has its own hooks."""
    model = Model().to(lanes_device.device)
    twin = FusedTwin(model)
    counter = CompileCounterWithBackend("aot_eager")
    model.inner = torch.compile(model.inner, backend=counter, fullgraph=True)
    twin.model.inner = torch.compile(twin.model.inner, backend="aot_eager", fullgraph=True)
    opt = outboard.AdamW(model.parameters(), threads=1, **SMALL_RINGS).attach(model)
    train(model, lambda: (opt.step(), opt.zero_grad()), range(4))
    train(twin.model, twin.step, range(4))
    assert counter.frame_count == 1
    twin.check(opt)


def test_autocast_in_a_compiled_model(lanes_device) -> None:
    model = Model().to(lanes_device.device)
    twin = FusedTwin(model)
    opt = outboard.AdamW(model.parameters(), threads=1, **SMALL_RINGS)
    mine, other = (torch.compile(m, backend="aot_eager", fullgraph=True) for m in (model, twin.model))
    opt.attach(mine)
    with torch.autocast(lanes_device.device.type, torch.bfloat16):
        train(mine, lambda: (opt.step(), opt.zero_grad()), range(3))
        train(other, twin.step, range(3))
    assert opt.stats()["eager_updates"] > 0
    twin.check(opt)


@pytest.mark.slow
def test_inductor(lanes_device) -> None:
    """torch's own compiler, default mode, the whole graph. It rounds as its twin, which it has compiled as well."""
    if lanes_device.is_simulated and shutil.which("g++") is None:
        pytest.skip("inductor compiles C++ for the CPU, and there is no g++")
    model = torch.nn.Sequential(torch.nn.Linear(16, 320), torch.nn.Tanh(), torch.nn.Linear(320, 16))
    model.to(lanes_device.device)
    twin = FusedTwin(model)
    mine, other = (torch.compile(m, fullgraph=True) for m in (model, twin.model))
    opt = outboard.AdamW(model.parameters(), threads=1, **SMALL_RINGS).attach(mine)
    train(mine, lambda: (opt.step(), opt.zero_grad()), range(4))
    train(other, twin.step, range(4))
    assert opt.stats()["eager_updates"] > 0
    twin.check(opt)


# ---- compiled functions


def test_a_compiled_function_that_reads_weights_comes_after_wait(lanes_device) -> None:
    """An average by hand, say: the compiler would see marked parameters, so the program waits before it."""
    rig = FusedRig(lanes_device, Model(), loss, lr=0.01)
    counter = CompileCounter()

    def follow(averages: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
        return [a * 0.75 + w.detach() * 0.25 for a, w in zip(averages, weights, strict=True)]

    graph = torch.compile(follow, backend=counter, fullgraph=True)
    ours, theirs = ([p.detach().clone() for p in m.parameters()] for m in (rig.model, rig.their_model))
    for step in range(4):
        rig.step(step)
        rig.opt.wait()
        ours = graph(ours, list(rig.model.parameters()))
        theirs = follow(theirs, list(rig.their_model.parameters()))
    assert counter.frame_count == 1
    for p, q in zip(ours, theirs, strict=True):
        assert_same(p.cpu(), q.cpu())
    rig.check()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_whole_training_step(lanes_device, backend) -> None:
    """Forward, backward, step and `zero_grad` in one compiled function, with an optimizer that is not attached."""
    rig = FusedRig(lanes_device, Model(), loss, lr=0.01, attached=False)
    rig.opt.compute_grad_norm = True

    @torch.compile(backend=backend)
    def step(number: int) -> None:
        rig.loss(rig.model, number).backward()
        rig.opt.step()
        rig.opt.zero_grad()

    @torch.compile(backend=backend)
    def their_backward(number: int) -> None:
        rig.loss(rig.their_model, number).backward()

    for number in range(4):
        step(number)
        their_backward(number)
        rig.twin.step()
    assert rig.opt.last_grad_norm
    rig.check()


def test_a_compiled_step_says_that_it_is_not_compiled() -> None:
    """`torch.compile(optimizer.step)`: without `fullgraph` it runs, with it the reason is told."""
    p, q = (torch.nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(2))
    ours, theirs = outboard.AdamW([p]), fused([q])
    p.grad, q.grad = torch.sin(p.detach()), torch.sin(q.detach())
    step = torch.compile(lambda: ours.step(), backend="eager")
    for _ in range(3):
        step()
        theirs.step()
    assert_same(p, q)
    whole = torch.compile(lambda: ours.step(), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"AdamW\.step|step.*(skip|disable)|(skip|disable).*step"):
        whole()
    assert float(ours.state[p]["step"]) == 3


# ---- compiled autograd


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's, of what it cannot trace
def test_compiled_autograd_of_a_model_that_is_not_attached(lanes_device) -> None:
    """Gradients come from a compiled backward; nothing of the optimizer is in it."""
    rig = FusedRig(lanes_device, Model(), loss, lr=0.01, attached=False)
    counter = CompileCounter()
    for number in range(4):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=counter)):
            rig.loss(rig.model, number).backward()
        rig.opt.step()
        rig.opt.zero_grad()
        rig.loss(rig.their_model, number).backward()
        rig.twin.step()
    assert counter.frame_count >= 1, "backward has been compiled"
    rig.check()
