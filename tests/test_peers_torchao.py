"""What torchao's tests of its optimizers are given, given to outboard: above all those of its CPU-offload wrapper.

The inputs are those of its tests (models, batches, the frozen layer, the scheduler, numbers of steps and of gradients
accumulated); the widest layer is 64 times narrower. It compares with a tolerance; here bits are compared, with torch's
fused AdamW over the same gradients. As there, one side trains to the end before the other begins: what has not been
waited for would not be there in time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import outboard
from fused import SMALL_RINGS, FusedTwin, fused
from lanes import Stack, TwinModel, plain_grad
from oracle import assert_same

FP32, BF16 = torch.float32, torch.bfloat16
pytestmark = pytest.mark.usefixtures("small_ones_have_hooks")


def wide_model() -> nn.Sequential:
    """Return layers of little arithmetic for their size, of which one is frozen, and small ones."""
    model = nn.Sequential(
        nn.Linear(32, 2048),
        nn.ReLU(),
        nn.Linear(2048, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 128),
    )
    model[2].requires_grad_(False)
    return model


def two_layers(wide: int, out: int, dtype: torch.dtype = FP32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, wide), nn.ReLU(), nn.Linear(wide, out)).to(dtype)


def inputs(device: torch.device, seed: int = 42) -> Callable[[], torch.Tensor]:
    """Return a source of the same batches each time."""
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.randn(4, 32, generator=generator).to(device)


def train(
    model: nn.Module, step: Callable[[], Any], batch: Callable[[], torch.Tensor], steps: int = 2, accumulated: int = 1
) -> None:
    dtype = next(iter(model.parameters())).dtype
    for _ in range(steps):
        for _ in range(accumulated):
            model(batch().to(dtype)).sum().backward()
        step()


# ---- the wrapper that offloads: here the optimizer itself


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("offloads", [False, True], ids=["gradients stay", "gradients leave"])
@pytest.mark.parametrize("eager", [False, "auto", True])
def test_offload_correctness(lanes_device, offloads, accumulated, eager) -> None:
    """With all four of offloaded gradients and accumulation, of which torchao allows three."""
    model = wide_model().to(lanes_device.device)
    twin = FusedTwin(model)
    frozen = model[2].weight.detach().cpu().clone()
    opt = outboard.AdamW(
        model.parameters(),
        offload_gradients=offloads,
        accumulation_steps=accumulated,
        eager=eager,
        threads=2,
        **SMALL_RINGS,
    ).attach(model)
    schedules = [CosineAnnealingLR(optimizer, 100) for optimizer in (opt, twin.optimizer)]

    def ours() -> None:
        opt.step()
        opt.zero_grad()
        schedules[0].step()

    def theirs() -> None:
        twin.step()
        schedules[1].step()

    train(model, ours, inputs(lanes_device.device), 3, accumulated)
    train(twin.model, theirs, inputs(lanes_device.device), 3, accumulated)
    assert opt.param_groups[0]["lr"] == twin.optimizer.param_groups[0]["lr"] != 1e-3
    # Of gradients in host memory, updates begin in backward by promise alone, and none that are sums.
    begins = eager is not False and not (offloads and (accumulated > 1 or eager == "auto"))
    assert (opt.stats()["eager_updates"] > 0) == begins
    twin.check(opt)
    assert_same(model[2].weight.detach().cpu(), frozen, "the frozen layer")


def test_offloaded_gradients_are_gone_after_backward(lanes_device) -> None:
    model = wide_model().to(lanes_device.device)
    opt = outboard.AdamW(model.parameters(), offload_gradients=True, threads=2, **SMALL_RINGS).attach(model)
    for _ in range(2):
        model(inputs(lanes_device.device)()).sum().backward()
        assert all(plain_grad(p) is None for p in model.parameters())
        opt.step()


@pytest.mark.parametrize("offloads", [False, True], ids=["gradients stay", "gradients leave"])
def test_several_groups(lanes_device, offloads) -> None:
    """Groups of different settings, one of which is a bias alone, and one that is added later."""
    model = two_layers(1024, 128).to(lanes_device.device)

    def groups(params: list[Any]) -> list[dict[str, Any]]:
        return [{"params": params[:1], "lr": 1e-2}, {"params": params[1:2], "weight_decay": 0.0}]

    twin = FusedTwin(model, groups)
    params = list(model.parameters())
    opt = outboard.AdamW(groups(params), offload_gradients=offloads, threads=2, **SMALL_RINGS).attach(model)
    for optimizer, mine in ((opt, params), (twin.optimizer, twin.twin.params)):
        optimizer.add_param_group({"params": mine[2:], "betas": (0.8, 0.9), "lr": 3e-3})

    train(model, lambda: (opt.step(), opt.zero_grad()), inputs(lanes_device.device), 3)
    train(twin.model, twin.step, inputs(lanes_device.device), 3)
    twin.check(opt)


@pytest.mark.parametrize("offloads", [False, True], ids=["gradients stay", "gradients leave"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_mixed_dtypes(lanes_device, offloads, accumulated) -> None:
    """bf16, fp16 and fp32 layers in one model and one group. The twin is the optimizer of the host.

    Accumulated in host memory, gradients add up in fp32, which is not what `p.grad` does: there the twin does, too.
    """
    dtypes = (BF16, FP32, torch.float16, BF16)
    model = Stack(70_000, 300, 3000, 64, dtype=lambda number: dtypes[number]).to(lanes_device.device)
    twin = TwinModel(model)
    opt = outboard.AdamW(
        model.parameters(), offload_gradients=offloads, accumulation_steps=accumulated, threads=2, **SMALL_RINGS
    ).attach(model)
    for step in range(3):
        for part in range(accumulated):
            model.loss(step + part).backward()
        opt.step()
        opt.zero_grad()
    for step in range(3):
        sums: list[torch.Tensor] = []
        for part in range(accumulated):
            twin.model.loss(step + part).backward()
            if offloads and accumulated > 1:
                grads = [p.grad.float() for p in twin.model.parameters()]
                sums = grads if not sums else [a + b for a, b in zip(sums, grads, strict=True)]
                twin.model.zero_grad()
        if sums:
            twin.twin.step(sums)
            twin.copy_back()
        else:
            twin.step()
    twin.check(opt)


# ---- saved and loaded


@pytest.mark.parametrize("offloads", [False, True], ids=["gradients stay", "gradients leave"])
@pytest.mark.parametrize(
    ("wide", "out", "dtype"), [(1024, 128, FP32), (256, 32, FP32), (256, 32, BF16)], ids=["wide", "small", "bf16"]
)
def test_save_load(lanes_device, tmp_path: Path, wide, out, dtype, offloads) -> None:
    """Through a file that is mapped to the host, into an optimizer of a copy of the model; both train on alike."""
    torch.manual_seed(9)
    options: dict[str, Any] = {"offload_gradients": offloads, "threads": 2, **SMALL_RINGS}
    first = two_layers(wide, out, dtype).to(lanes_device.device)
    batch = inputs(lanes_device.device)
    one = outboard.AdamW(first.parameters(), **options).attach(first)
    train(first, lambda: (one.step(), one.zero_grad()), batch)
    torch.save(one.state_dict(), tmp_path / "optimizer.pt")
    saved = torch.load(tmp_path / "optimizer.pt", map_location="cpu", weights_only=True)

    second = copy.deepcopy(first)
    two = outboard.AdamW(second.parameters(), lr=1.0, **options).attach(second)
    two.load_state_dict(saved)
    for model, optimizer in ((first, one), (second, two)):
        train(model, lambda o=optimizer: (o.step(), o.zero_grad()), inputs(lanes_device.device, 43))
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert_same(q.detach().cpu(), p.detach().cpu())
        for key, value in one.state[p].items():
            assert torch.equal(two.state[q][key].cpu(), value.cpu()), key


@pytest.mark.parametrize("offloads", [False, True], ids=["gradients stay", "gradients leave"])
@pytest.mark.parametrize("direction", ["from torch", "to torch"])
def test_save_load_across(lanes_device, tmp_path: Path, direction, offloads) -> None:
    """Between torch's AdamW and this one, both ways, in the middle of training: as torch all along."""
    torch.manual_seed(9)
    model = two_layers(1024, 128).to(lanes_device.device)
    twin = FusedTwin(model)
    options: dict[str, Any] = {"offload_gradients": offloads, "threads": 2, **SMALL_RINGS}
    opt = outboard.AdamW(model.parameters(), **options).attach(model)
    train(model, lambda: (opt.step(), opt.zero_grad()), inputs(lanes_device.device))
    train(twin.model, twin.step, inputs(lanes_device.device))
    file = tmp_path / "optimizer.pt"
    if direction == "from torch":
        torch.save(twin.optimizer.state_dict(), file)
        opt.detach()
        opt = outboard.AdamW(model.parameters(), lr=1.0, **options).attach(model)
        opt.load_state_dict(torch.load(file, weights_only=True))
    else:
        torch.save(opt.state_dict(), file)
        twin.twin.optimizer = fused(twin.twin.params, lr=1.0)
        twin.optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        twin.optimizer.param_groups[0]["fused"] = True
    train(model, lambda: (opt.step(), opt.zero_grad()), inputs(lanes_device.device, 43))
    train(twin.model, twin.step, inputs(lanes_device.device, 43))
    twin.check(opt)


# ---- bf16 weights with a small learning rate


@pytest.mark.parametrize("master", ["split", "full"])
def test_bf16_weights_follow_fp32_ones(lanes_device, master) -> None:
    """lr=1e-5, one sample: bf16 weights with their masters are what fp32 weights would be, rounded.

    torchao rounds weights stochastically and compares losses. Without masters the updates would be lost here.
    """
    torch.manual_seed(2024)
    model = two_layers(1024, 128, BF16).to(lanes_device.device)
    before = [p.detach().cpu().clone() for p in model.parameters()]
    copies = [nn.Parameter(p.float()) for p in before]
    opt = outboard.AdamW(model.parameters(), lr=1e-5, master=master, eager=False, threads=2, **SMALL_RINGS)
    opt.attach(model)
    theirs = fused(copies, lr=1e-5)
    x = torch.randn(4, 32).to(lanes_device.device, BF16)
    losses = []
    for _ in range(5):
        loss = model(x).sum()
        loss.backward()
        for p, q in zip(model.parameters(), copies, strict=True):
            q.grad = plain_grad(p).cpu().float()
        opt.step()
        opt.zero_grad()
        theirs.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for p, q, old in zip(model.parameters(), copies, before, strict=True):
        # A tie moves a split master by one ulp of fp32; there are none among full ones.
        atol = 2e-8 if master == "split" else 0.0
        torch.testing.assert_close(opt.master(p).cpu(), q.detach(), rtol=0.0, atol=atol)
        assert_same(p.detach().cpu(), opt.master(p).cpu().to(BF16))
        assert not torch.equal(opt.master(p).cpu(), old.float())
