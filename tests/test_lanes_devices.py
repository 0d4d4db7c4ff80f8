"""One optimizer over several devices: a dispatcher for each, one norm, the host's bits."""

from __future__ import annotations

import pytest
import torch

import outboard
from lanes import Twin

NEEDS_TWO = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.parametrize(
        "where",
        [
            pytest.param(["cuda:0", "cpu", "cuda:0", "cpu", "cuda:0"], id="one and the host"),
            pytest.param(["cuda:0", "cpu", "cuda:1", "cuda:1", "cuda:0"], id="two and the host", marks=NEEDS_TWO),
        ],
    ),
]

SIZES = [300_000, 70_001, 5, 2_500_000, 1_200_000]


def parameters(where: list[str]) -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    dtypes = [torch.bfloat16, torch.float32] * 3
    return [
        torch.nn.Parameter(torch.randn(size).to(dtype).to(device))
        for size, device, dtype in zip(SIZES, where, dtypes, strict=False)
    ]


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in params:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * 3).to(parameter)


@pytest.mark.parametrize("mode", ["auto", "cpu", "gpu"])
def test_unattached(where: list[str], mode: str) -> None:
    params = parameters(where)
    opt = outboard.AdamW(params, lr=1e-2, mode=mode, max_grad_norm=1.0, threads=4)
    twin = Twin(params, lr=1e-2, max_grad_norm=1.0)
    for step in range(5):
        set_gradients(params, step)
        twin.step()
        opt.step()
        assert opt.last_grad_norm == twin.optimizer.last_grad_norm
        twin.check(opt, f"{mode} step {step}")
    assert set(opt.stats()["devices"]) == set(where) - {"cpu"}


class Spread(torch.nn.Module):
    """Layers on devices, and some on the host between them."""

    def __init__(self, where: list[str]) -> None:
        super().__init__()
        params = parameters(where)
        self.weights = torch.nn.ParameterList(params)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x.to(weight.device) + weight.float().sum() * 1e-3 + (weight.float() ** 2).sum() * 1e-6)
        return x.sum()


@pytest.mark.parametrize("options", [{"eager": True}, {"max_grad_norm": 1.0}, {"eager": False}], ids=str)
def test_attached(where: list[str], options: dict[str, object]) -> None:
    """Bit for bit what a run gives that waits for every step."""
    results = []
    for attached in (False, True):
        model = Spread(where)
        opt = outboard.AdamW(model.parameters(), lr=1e-2, threads=4, **({} if not attached else options))
        if not attached and "max_grad_norm" in options:
            opt.max_grad_norm = 1.0
        if attached:
            opt.attach(model)
        for step in range(12):
            model(torch.full((3,), 0.1 * step)).backward()
            opt.step()
            opt.zero_grad()
        opt.synchronize()
        results.append([weight.detach().cpu() for weight in model.weights])
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)
