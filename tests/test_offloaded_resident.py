"""Offloaded gradients of parameters whose state is on the device leave it, too, and give the same bits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import outboard
from lanes import Stack, Twin, is_pending, plain_grad

pytestmark = pytest.mark.timeout(60, method="thread")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
#: Large ones with hooks of their own, tiny ones in bundles.
SIZES = (70_000, 5, 140_000, 300, 1, 66_001, 9)


class Case:
    """A model with offloaded gradients, a copy that keeps its own, and a host optimizer over that."""

    def __init__(self, lanes_device: Any, *, dtype: Any = FP32, share: float = 0.5, **options: Any) -> None:
        self.model = Stack(*SIZES, dtype=dtype).to(lanes_device.device)
        self.copy = Stack(*SIZES, dtype=dtype).to(lanes_device.device)
        self.copy.load_state_dict(self.model.state_dict())
        options = {"lr": 0.01, "threads": 2, **options}
        self.opt = outboard.AdamW(
            self.model.parameters(), offload_gradients=True, device_state_bytes=share, **options
        ).attach(self.model)
        self.twin = Twin(self.copy.parameters(), **options)
        self.backwards = options.get("accumulation_steps", 1)

    def step(self, number: int, check: Callable[[], None] = lambda: None) -> None:
        sums: list[torch.Tensor | None] = [None for _ in self.copy.parameters()]
        for micro in range(self.backwards):
            self.model.loss(7 * number + micro).backward()
            check()
            self.copy.loss(7 * number + micro).backward()
            for index, p in enumerate(self.copy.parameters()):
                grad, p.grad = p.grad, None
                # As in host memory: several are added up in fp32.
                known = sums[index]
                if self.backwards == 1:
                    sums[index] = grad
                else:
                    sums[index] = grad.float() if known is None else known + grad.float()
        self.opt.step()
        self.twin.step(sums)
        with torch.no_grad():
            for p, master in zip(self.copy.parameters(), self.twin.params, strict=True):
                p.copy_(master)

    def check(self) -> None:
        self.opt.synchronize()
        self.twin.originals = list(self.model.parameters())
        self.twin.check(self.opt)


@pytest.mark.parametrize("clip", [{}, {"max_grad_norm": 1e-3}], ids=["plain", "clipped"])
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_bits(lanes_device: Any, dtype: Any, share: float, backwards: int, clip: dict[str, float]) -> None:
    case = Case(lanes_device, dtype=dtype, share=share, accumulation_steps=backwards, **clip)
    resident = case.opt.stats()["resident_parameters"]
    assert resident == len(SIZES) if share == 1.0 else 0 < resident < len(SIZES)

    def all_have_left() -> None:
        assert [plain_grad(p) for p in case.model.parameters()] == [None] * len(SIZES)

    for number in range(3):
        case.step(number, all_have_left)
        if clip:
            assert case.opt.last_grad_norm == case.twin.optimizer.last_grad_norm > 1e-3
    case.check()
    (lanes,) = case.opt.stats()["devices"].values()
    on_device = sum(p.numel() for p in case.opt._slots.resident.tensors)
    assert lanes["resident_elements"] == 3 * on_device


@pytest.mark.parametrize(
    "options", [{"pin": False}, {"mode": "cpu"}, {"mode": "gpu"}, {"transfer": "zero_copy"}], ids=str
)
@pytest.mark.parametrize("backwards", [1, 3])
def test_wherever_the_gradient_is(lanes_device: Any, backwards: int, options: dict[str, Any]) -> None:
    """Not pinned, it comes back to the device for the update; nothing of it stays there."""
    case = Case(lanes_device, accumulation_steps=backwards, **options)
    pinned = case.opt.stats()["pinned_bytes"]
    assert bool(pinned) is ("pin" not in options and options.get("mode") != "cpu")

    def all_have_left() -> None:
        assert [plain_grad(p) for p in case.model.parameters()] == [None] * len(SIZES)

    for number in range(3):
        case.step(number, all_have_left)
    case.check()


@pytest.mark.usefixtures("small_ones_have_hooks")
@pytest.mark.parametrize("eager", ["auto", True, False])
def test_settings_of_eager(lanes_device: Any, eager: Any) -> None:
    """With eager=True and one backward the update uses the gradient where it is, as for all others."""
    case = Case(lanes_device, eager=eager, state_dtype=BF16)
    for number in range(4):
        case.step(number)
    case.check()


def test_memory_leaves_in_backward(lanes_device: Any) -> None:
    """The gradient's tensor goes once its copy has landed, while backward goes on or after it."""
    import weakref

    case = Case(lanes_device, share=1.0)
    p = case.model[0].weight
    grads = []
    handle = p.register_hook(lambda grad: grads.append(weakref.ref(grad.untyped_storage())))
    case.model.loss(0).backward()
    handle.remove()
    case.opt._core.synchronize()
    deadline = time.monotonic() + 20
    while any(grad() is not None for grad in grads) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert grads
    assert [grad() for grad in grads] == [None]
    assert not is_pending(p)
    (lanes,) = case.opt.stats()["devices"].values()
    assert lanes["waiting_gradient_bytes"] == 0
    assert case.opt.stats()["steps"] == 0


def test_dropped_gradients(lanes_device: Any) -> None:
    """zero_grad() drops what has left, and the next sum begins anew."""
    case = Case(lanes_device, accumulation_steps=2)
    case.model.loss(1).backward()
    case.opt.zero_grad()
    case.step(0)
    case.check()
