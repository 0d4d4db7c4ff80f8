"""AdamW for what is no matrix: torch's own kernels on what this rank has of each parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw

from outboard._offload._travel import is_dense
from outboard._sharded import local


def step(parameters: list[torch.Tensor], states: list[dict[str, Any]], group: dict[str, Any]) -> None:
    """Update parameters with a group's settings; their states exist, and are on their devices."""
    owns = [(local(parameter), parameter, state) for parameter, state in zip(parameters, states, strict=True)]
    owns = [(own, parameter, state) for own, parameter, state in owns if own.numel() > 0]
    for state in states:
        state["step"] += 1
    by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]] = {}
    for one in owns:
        by_device.setdefault(one[0].device, []).append(one)
    beta1, beta2 = group["adamw_betas"]
    for device, theirs in by_device.items():
        # torch's fused kernel on the CPU writes past rows of memory with gaps; its other one takes no tensor as lr.
        is_fused = device.type in ("cuda", "cpu") and all(is_dense(own) for own, _, _ in theirs)
        steps = _steps([state["step"] - 1 for _, _, state in theirs], device if is_fused else torch.device("cpu"))
        grads = []
        for own, parameter, _ in theirs:
            assert parameter.grad is not None
            grad = local(parameter.grad)
            # It takes memory as it lies.
            grads.append(grad if grad.stride() == own.stride() else torch.empty_like(own).copy_(grad))
        adamw(
            [own for own, _, _ in theirs],
            grads,
            [local(state["moment1"]) for _, _, state in theirs],
            [local(state["moment2"]) for _, _, state in theirs],
            [],
            steps,
            fused=is_fused,
            foreach=not is_fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"] if is_fused else float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )


def _steps(before: list[int], device: torch.device) -> list[torch.Tensor]:
    """Return counts as torch's kernels take them, which count one on: each in memory of its own.

    Filled on the device: a copy from the host would be waited for.
    """
    if len(set(before)) == 1:
        return list(torch.full((len(before),), float(before[0]), dtype=torch.float32, device=device).unbind())
    return [torch.full((), float(count), dtype=torch.float32, device=device) for count in before]
