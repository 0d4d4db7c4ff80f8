"""Gradients, norms, streams and the ends of optimizers of parameters on a device. Each docstring quotes its case."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from typing import Any

import pytest
import torch

import outboard
from lanes import Layer, Pair, Rig, Stack, TwinModel, plain_grad, set_grad
from oracle import assert_same, norm64
from outboard._lanes import LaneOptions

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = pytest.mark.timeout(60, method="thread")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [FP32, BF16, FP16]
INF = math.inf


# ---- gradients, accumulation, norms, non-finite


@pytest.mark.usefixtures("small_ones_have_hooks")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offloads", [False, True], ids=["on the device", "offloaded"])
def test_accumulated_norm(lanes_device, mode, dtype, offloads) -> None:
    """Accumulation: reported norm against the summed gradients: within 1e-6 relative of the float64 norm.

    On the device they add up as torch does it, in their dtype; in host memory in fp32.
    """
    model = Stack(3000, 5, 70_001, dtype=dtype).to(lanes_device.device)
    copied = Stack(3000, 5, 70_001, dtype=dtype).to(lanes_device.device)
    copied.load_state_dict(model.state_dict())
    options = {"max_grad_norm": 1e-3, "accumulation_steps": 4, "offload_gradients": offloads}
    opt = outboard.AdamW(model.parameters(), mode=mode, threads=1, chunk_elems=9_000, **options).attach(model)
    for step in range(2):
        sums = [torch.zeros(p.shape, dtype=torch.float64) for p in copied.parameters()]
        for part in range(4):
            model.loss(4 * step + part).backward()
            copied.loss(4 * step + part).backward()
            if offloads:
                for total, p in zip(sums, copied.parameters(), strict=True):
                    total += p.grad.cpu()
                copied.zero_grad()
        wanted = norm64(sums if offloads else [p.grad.cpu() for p in copied.parameters()])
        assert wanted > 1e-3, "it is clipped"
        opt.step()
        assert opt.last_grad_norm == pytest.approx(wanted, rel=1e-6, abs=0)
        copied.zero_grad()
        copied.load_state_dict(model.state_dict())


def test_constant_gradient(lanes_device, mode) -> None:
    """The same constant gradient for 100 steps: norm constant."""
    pair = Pair([lanes_device.parameter(torch.randn(size)) for size in (70_001, 33)], mode=mode, compute_grad_norm=True)
    grads = [torch.full_like(p.detach(), 1e-3) for p in pair.params]
    norms = set()
    for _ in range(100):
        pair.step_with(grads)
        norms.add(pair.opt.last_grad_norm)
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(float(grads[0][0]) * math.sqrt(70_034), rel=1e-6)
    pair.check()


@pytest.mark.usefixtures("small_ones_have_hooks")
@pytest.mark.parametrize("max_norm", [1.0, None])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_infinity_in_one_gradient_at_step_3(lanes_device, mode, attached, max_norm, layer) -> None:
    """+inf in one gradient at step 3: with `max_grad_norm` nothing changes, counted, reported; without it as torch."""
    rig = Rig(lanes_device, 3000, 5, 70_001, attached=attached, mode=mode, max_grad_norm=max_norm)
    rig.train(2)
    for model in (rig.model, rig.twin.model):
        # As it is complete, before any hook of the optimizer's: within backward.
        hook = model[layer].weight.register_hook(
            lambda grad: grad.index_fill(0, torch.tensor([3]).to(grad.device), INF)
        )
        model.loss(2).backward()
        hook.remove()
    if max_norm is None:
        rig.step_both()
        assert int(rig.params[layer].detach().isnan().sum()) == 1
    else:
        before = [p.detach().clone() for p in rig.params]
        with pytest.warns(RuntimeWarning, match="changed nothing"):
            rig.opt.step()
        with pytest.warns(RuntimeWarning, match="changed nothing"):
            rig.twin.step()
        for p, old in zip(rig.params, before, strict=True):
            assert_same(p.detach(), old)
        assert rig.opt.last_grad_norm == INF
    assert rig.opt.stats()["skipped_steps"] == (max_norm is not None)
    rig.opt.zero_grad()
    rig.train(2, 3)
    rig.check()
    steps = [float(rig.opt.state[p]["step"]) for p in rig.params]
    assert steps == [4 if max_norm else 5] * 3


@pytest.mark.parametrize("eager", ["auto", True])
@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_refused_gradients(lanes_device, kind, eager, attached) -> None:
    """Sparse gradient, complex gradient: clear error naming it."""
    model = torch.nn.Module()
    model.good, model.embed = Layer(300), torch.nn.Embedding(700, 101, sparse=kind == "sparse")
    model.to(lanes_device.device)
    opt = outboard.AdamW(model.named_parameters(), eager=eager, threads=1)
    if attached:
        opt.attach(model)
    before = [p.detach().clone() for p in model.parameters()]
    tokens, x = torch.tensor([1, 2]).to(lanes_device.device), torch.ones(1).to(lanes_device.device)

    def give_gradient() -> None:
        if kind == "sparse":
            model.embed(tokens).sum().backward()
        else:
            set_grad(model.embed.weight, torch.ones(700, 101, dtype=torch.complex64).to(lanes_device.device))
        opt.step()

    with pytest.raises(TypeError, match=rf"gradient of embed\.weight.*{kind}"):
        give_gradient()
    for p, old in zip(model.parameters(), before, strict=True):
        assert_same(p.detach(), old)
    if attached:
        opt.abandon()
    opt.zero_grad()
    model.embed.sparse = False
    twin = TwinModel(model)
    for m in (model, twin.model):
        (m.embed(tokens).sum() + m.good(x).sum()).backward()
    opt.step()
    twin.step()
    twin.check(opt)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_complex_parameters(lanes_device, requires_grad) -> None:
    """Complex parameter: clear error naming it."""
    good = lanes_device.parameter(torch.ones(3))
    bad = torch.nn.Parameter(lanes_device.put(torch.ones(3, dtype=torch.complex64)), requires_grad)
    for make in (
        lambda: outboard.AdamW([("good", good), ("layer.bad", bad)]),
        lambda: outboard.AdamW([("good", good)]).add_param_group({"params": [("layer.bad", bad)]}),
    ):
        with pytest.raises(TypeError, match=r"layer\.bad.*complex"):
            make()


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_grad_scaler_with_autocast(lanes_device, mode, attached, dtype) -> None:
    """GradScaler with autocast fp16, overflow at step 2: skipped, scale halved, then as torch."""
    layers = [torch.nn.Linear(64, 1100), torch.nn.Tanh(), torch.nn.Linear(1100, 1)]
    model = torch.nn.Sequential(*layers).to(lanes_device.device, dtype)
    twin = TwinModel(model, lr=0.01)
    opt = outboard.AdamW(model.parameters(), lr=0.01, mode=mode, threads=1, chunk_elems=9_000)
    if attached:
        opt.attach(model)
    kind = lanes_device.device.type
    scalers = [torch.amp.GradScaler(of, init_scale=64.0, growth_interval=100) for of in (kind, "cpu")]
    for step in range(5):
        x = torch.randn(8, 64).to(lanes_device.device, dtype) * (INF if step == 2 else 1.0)
        for m, scaler in ((model, scalers[0]), (twin.model, scalers[1])):
            with torch.autocast(kind, torch.float16):
                loss = m(x).float().square().mean()
            scale = 64.0 if step < 3 else 32.0
            of_scaler = scaler.scale(torch.ones((), device=kind if m is model else "cpu"))
            assert float(of_scaler) == scale
            (loss * scale).backward()
        scalers[0].step(opt)
        scalers[0].update()
        opt.zero_grad()
        for p, q in zip(twin.twin.params, twin.model.parameters(), strict=True):
            p.grad = q.grad.cpu()
        scalers[1].step(twin.optimizer)
        scalers[1].update()
        twin.copy_back()
        twin.model.zero_grad()
        assert opt.stats()["skipped_steps"] == (step >= 2)
    twin.check(opt)
    assert float(opt.state[model[0].weight]["step"]) == 4


# ---- streams


def run_ahead(lanes_device: Any, seed: int | None, mode: str, eager: Any, steps: int, synchronous: bool) -> list[Any]:
    """Train tiny and huge layers, each forward at once after the step before; return losses, weights and state."""
    with pytest.MonkeyPatch.context() as patch:
        if seed is not None:
            patch.setattr(LaneOptions, "simulate", seed)
        torch.manual_seed(5)
        model = Stack(3, 70_000, 1, 90_000, 7, dtype=lambda n: (FP32, BF16)[n // 2 % 2])
        model.to(lanes_device.device)
        options = {"lr": 3e-3, "threads": 2, "chunk_elems": 20_000}
        options |= {"host_ring_bytes": 2 << 20, "device_ring_bytes": 2 << 20}
        opt = outboard.AdamW(model.parameters(), mode=mode, eager=eager, **options).attach(model)
        losses = []
        for step in range(steps):
            loss = model.loss(step)
            loss.backward()
            opt.step()
            losses.append(loss.detach())
            if synchronous:
                opt.synchronize()
        return [
            *losses,
            *(p.detach() for p in model.parameters()),
            *(value for p in model.parameters() for value in opt.state[p].values()),
        ]


@pytest.mark.timeout(240, method="thread")
@pytest.mark.filterwarnings("ignore:.*AccumulateGrad")
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("in_a_side_stream", [False, pytest.param(True, marks=pytest.mark.cuda)])
def test_run_ahead_200_times(lanes_device, mode, eager, in_a_side_stream) -> None:
    """Alternating tiny and huge layers, forward at once after step, 200 repeats against a synchronous run.

    Equal every time; and a whole training inside a side stream. The simulated device does its work in another order in
    each training.
    """
    if in_a_side_stream and lanes_device.is_simulated:
        pytest.skip("has no streams of torch's")
    seed = LaneOptions.simulate
    wanted = run_ahead(lanes_device, seed, mode, eager, 5, True)
    assert len({float(loss) for loss in wanted[:5]}) == 5
    with contextlib.ExitStack() as stack:
        if in_a_side_stream:
            torch.cuda.synchronize()
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        for number in range(50):
            # Four times in each.
            got = run_ahead(lanes_device, None if seed is None else seed + number, mode, eager, 5, False)
            for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
                assert_same(a.cpu(), b.cpu(), f"training {number}, {index}")


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:.*AccumulateGrad")
@pytest.mark.parametrize("how", ["set", "forward", "backward"])
def test_gradients_from_a_side_stream(lanes_device, mode, attached, how) -> None:
    """Gradients produced on a side stream: ordered.

    Set to what a side stream computes late, as torch asks for it (the stream of `step()` waits); from a forward in the
    side stream, whose backward is called in the main one; and from a backward in the side stream.
    """
    if lanes_device.is_simulated:
        pytest.skip("has no streams of torch's")
    rig = Rig(lanes_device, 70_000, 5, 66_000, attached=attached, mode=mode, eager=how != "set")
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for step in range(50):
        rig.twin.model.loss(step).backward()
        side.wait_stream(main)
        if how == "set":
            with torch.cuda.stream(side):
                grads = [plain_grad(p).clone() for p in rig.twin.model.parameters()]
                torch.cuda._sleep(200_000)
                late = [grad * 1.0 for grad in grads]
            main.wait_stream(side)
            for p, grad in zip(rig.params, late, strict=True):
                set_grad(p, grad)
        else:
            with torch.cuda.stream(side):
                rig.opt.wait()
                torch.cuda._sleep(200_000)
                loss = rig.model.loss(step)
                if how == "backward":
                    loss.backward()
            main.wait_stream(side)
            if how == "forward":
                loss.backward()
        rig.step_both()
        rig.opt.zero_grad()
    rig.check()


# ---- optimizers that come and go


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def count_of(what: str) -> int:
    return len(os.listdir(f"/proc/self/{what}"))


@pytest.mark.usefixtures("small_ones_have_hooks")
def test_built_twice_and_dropped(lanes_device, mode) -> None:
    """Optimizer built twice in one process; dropped while work is queued: no leak, no crash.

    Over two models at once, and again over the same parameters.
    """
    options = {"mode": mode, "host_ring_bytes": 4 << 20, "device_ring_bytes": 4 << 20}

    def once(number: int) -> None:
        both = ((70_000, 5, 66_000), (99, 300))
        rigs = [Rig(lanes_device, *sizes, eager=number % 2 == 0, **options) for sizes in both]
        for again in (False, True):
            if again:
                rigs = [Rig(lanes_device, model=rig.model, **options) for rig in rigs]
            for rig in rigs if number % 3 else reversed(rigs):
                rig.train(1, number)
                rig.backward_both(number + 1)
                rig.step_both()
                del rig.opt
            for rig in rigs:
                rig.twin.check_weights(f"round {number}")

    for number in range(6):
        once(number)
    gc.collect()
    before = resident_bytes(), count_of("task"), count_of("fd")
    for number in range(40):
        once(number)
    gc.collect()
    # One leaked optimizer in ten would be 16 of rings of 8 MiB.
    assert resident_bytes() - before[0] < 40 << 20
    assert count_of("task") <= before[1]
    assert count_of("fd") <= before[2]


PROGRAM = """
import hashlib
import sys

import torch

import outboard
from lanes import Stack
from outboard._lanes import LaneOptions

device, mode = sys.argv[1:]
if device == "cpu":
    LaneOptions.simulate = 3
torch.manual_seed(1)
dtypes = [torch.float32, torch.bfloat16, torch.float16]
model = Stack(70_001, 66_003, 66_005, 7, dtype=lambda number: dtypes[number % 3]).to(device)
opt = outboard.AdamW(model.parameters(), amsgrad=True, max_grad_norm=0.5, mode=mode, chunk_elems=9_000).attach(model)
for step in range(3):
    model.loss(step).backward()
    opt.step()
digest = hashlib.sha256()
for p in model.parameters():
    for tensor in (p.detach(), *opt.state[p].values()):
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
(lanes,) = opt.stats()["devices"].values()
print(opt.stats()["isa"], digest.hexdigest(), lanes["cpu_lane"]["elements"] + lanes["gpu_lane"]["elements"])
"""


def test_bits_at_every_isa_level_and_thread_count(lanes_device, mode, python) -> None:
    """A CPU without AVX-512 or AVX2 (force each level off): same bits, no illegal instruction.

    And host thread count with OMP_NUM_THREADS=1, with 4 local ranks.
    """
    levels = outboard.build_info()["isa_available"]
    device = lanes_device.device.type
    found = [python(PROGRAM, device, mode, OUTBOARD_ISA=level).split() for level in levels]
    assert [of_level[0] for of_level in found] == levels
    for environment in ({"OMP_NUM_THREADS": "1"}, {"LOCAL_WORLD_SIZE": "4"}):
        found.append(python(PROGRAM, device, mode, OUTBOARD_ISA="", **environment).split())
    assert len({bits for _, bits, _ in found}) == 1
    assert {int(elements) for *_, elements in found} == {3 * (70_001 + 66_003 + 66_005 + 7)}
