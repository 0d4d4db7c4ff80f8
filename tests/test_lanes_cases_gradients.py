"""Gradients, norms, streams and the ends of optimizers of parameters on a device. Each docstring quotes its case."""

from __future__ import annotations

import math

import pytest
import torch

import outboard
from lanes import Layer, Pair, Rig, Stack, TwinModel, set_grad
from oracle import assert_same, norm64

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
