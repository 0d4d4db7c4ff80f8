"""DistributedDataParallel, real ranks: gradients are averaged at the end of backward, and never taken before."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import outboard
from oracle import assert_same
from ranks import Fails, agree, batches, host, model, small_ones_have_hooks, with_lanes

STEPS = 6


def wrap(module: torch.nn.Module, device: str, **options: Any) -> DistributedDataParallel:
    compress = options.pop("compress", False)
    # A MiB holds less than the whole model: several buckets, ready at different times.
    wrapped = DistributedDataParallel(module.to(device), **{"bucket_cap_mb": 0.05, **options})
    if compress:
        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


def train(
    wrapped: DistributedDataParallel, optimizer: torch.optim.Optimizer, device: str, accumulate: int = 1
) -> list[float]:
    losses = []
    data = batches(STEPS * accumulate, seed=dist.get_rank())
    for number, x in enumerate(data):
        is_last = number % accumulate == accumulate - 1
        with contextlib.nullcontext() if is_last else wrapped.no_sync():
            loss = wrapped(x.to(device)).square().mean() / accumulate
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def reference(device: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    """Return torch's own on a CPU; its kernel on a GPU rounds otherwise, and there ours without overlap is the one."""
    if device == "cpu":
        return torch.optim.AdamW(params, lr=1e-2, fused=True)
    return outboard.AdamW(params, lr=1e-2, mode="cpu", **options)


def check_equal(
    device: str,
    *,
    when: str = "after",
    accumulate: int = 1,
    ddp: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> outboard.AdamW:
    """Train twice, and compare every loss and weight."""
    small_ones_have_hooks()
    ddp, options = ddp or {}, options or {}
    wanted = wrap(model(), device, **ddp)
    losses = train(wanted, reference(device, wanted.parameters()), device, accumulate)
    inner = model().to(device)
    with with_lanes():
        optimizer = outboard.AdamW(inner.parameters(), lr=1e-2, threads=1, **options)
    if when == "before":
        optimizer.attach(inner)
    wrapped = wrap(inner, device, **ddp)
    if when != "before":
        optimizer.attach(inner if when == "inner" else wrapped)
    assert train(wrapped, optimizer, device, accumulate) == losses
    for (name, p), q in zip(wanted.named_parameters(), wrapped.parameters(), strict=True):
        assert_same(host(q), host(p), name)
        agree(host(q).double().sum().item())
    assert optimizer._attachment is not None
    assert optimizer._attachment.roster.finishes_late
    return optimizer


def equal(device: str, when: str, accumulate: int, ddp: dict[str, Any], options: dict[str, Any]) -> None:
    optimizer = check_equal(device, when=when, accumulate=accumulate, ddp=ddp, options=options)
    declared = accumulate == options.get("accumulation_steps", 1)
    offloads = options.get("offload_gradients", False)
    begins = options["eager"] is True and not (offloads and options.get("accumulation_steps", 1) > 1)
    begins |= options["eager"] == "auto" and declared and not offloads
    assert (optimizer.stats()["eager_updates"] > 0) == begins


@pytest.mark.parametrize("when", ["before", "after", "inner"])
@pytest.mark.parametrize("eager", ["auto", True, False])
def test_equal_to_torch(ranks, when, eager) -> None:
    ranks(equal, 2, when, 1, {}, {"eager": eager})


@pytest.mark.parametrize(
    "ddp",
    [
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"compress": True},
    ],
    ids=lambda ddp: next(iter(ddp)),
)
@pytest.mark.parametrize("eager", ["auto", True])
def test_options_of_ddp(ranks, ddp, eager) -> None:
    ranks(equal, 2, "after", 1, ddp, {"eager": eager})


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulation_steps": 3},
        {"offload_gradients": True},
        {"offload_gradients": True, "accumulation_steps": 3},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("eager", ["auto", True])
def test_no_sync(ranks, bucket_view, options, eager) -> None:
    """Gradients of backward passes that average nothing stay, and are averaged with the last."""
    ranks(equal, 2, "after", 3, {"gradient_as_bucket_view": bucket_view}, {"eager": eager, **options})


def norm(device: str) -> None:
    small_ones_have_hooks()
    wanted = wrap(model(), device)
    theirs = reference(device, wanted.parameters())
    norms = []
    for x in batches(STEPS, seed=dist.get_rank()):
        wanted(x.to(device)).square().mean().backward()
        squares = sum(host(p.grad).double().square().sum().item() for p in wanted.parameters())
        norms.append(squares**0.5)
        theirs.step()
        theirs.zero_grad()
    wrapped = wrap(model(), device)
    with with_lanes():
        optimizer = outboard.AdamW(wrapped.parameters(), lr=1e-2, compute_grad_norm=True, threads=1).attach(wrapped)
    for x, expected in zip(batches(STEPS, seed=dist.get_rank()), norms, strict=True):
        wrapped(x.to(device)).square().mean().backward()
        optimizer.step()
        assert optimizer.last_grad_norm == pytest.approx(expected, rel=1e-9)
        agree(optimizer.last_grad_norm)


def test_norm_of_averaged_gradients(ranks) -> None:
    ranks(norm, 2)


class Two(torch.nn.Module):
    """Uses one of two layers, by turns of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
        self.last = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.last(self.layers[which](x))


def unused(device: str, bucket_view: bool, eager: Any) -> None:
    small_ones_have_hooks()

    def run(optimizer_of: Any) -> Any:
        wrapped = wrap(Two(), device, find_unused_parameters=True, gradient_as_bucket_view=bucket_view)
        optimizer = optimizer_of(wrapped)
        for number, x in enumerate(batches(8, seed=dist.get_rank())):
            # On some steps both ranks use the same, so that the other layer has a gradient nowhere.
            which = (number + dist.get_rank()) % 2 if number % 3 else 0
            wrapped(x.to(device), which).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return wrapped

    def ours(wrapped: Any) -> outboard.AdamW:
        with with_lanes():
            return outboard.AdamW(wrapped.parameters(), lr=1e-2, eager=eager, threads=1).attach(wrapped)

    wanted = run(lambda wrapped: reference(device, wrapped.parameters()))
    got = run(ours)
    for p, q in zip(wanted.parameters(), got.parameters(), strict=True):
        assert_same(host(q), host(p))


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("eager", ["auto", True])
def test_parameters_that_one_rank_does_not_use(ranks, bucket_view, eager) -> None:
    ranks(unused, 2, bucket_view, eager)


def failing(device: str) -> None:
    small_ones_have_hooks()
    wrapped = wrap(model(), device)
    with with_lanes():
        optimizer = outboard.AdamW(wrapped.parameters(), lr=1e-2, eager=True, threads=1).attach(wrapped)
    before = [host(p).clone() for p in wrapped.parameters()]

    x = next(batches(1)).to(device)
    first, *others = wrapped.module
    hidden = Fails.apply(first(x))
    with wrapped.no_sync():
        for block in others:
            hidden = block(hidden)
        loss = hidden.square().mean()
        with pytest.raises(RuntimeError, match="in backward"):
            loss.backward()
    # Nothing was final, so nothing has begun.
    for p, old in zip(wrapped.parameters(), before, strict=True):
        assert_same(host(p), old)
    optimizer.zero_grad()
    wrapped(x).square().mean().backward()
    optimizer.step()
    agree([host(p).double().sum().item() for p in wrapped.parameters()])


def test_an_exception_in_backward_has_begun_nothing(ranks) -> None:
    ranks(failing, 2)


def zero(device: str, attaches: bool, bucket_view: bool) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    small_ones_have_hooks()

    def run(cls: Any, **options: Any) -> tuple[list[float], torch.nn.Module, Any]:
        wrapped = wrap(model(), device)
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(), cls, parameters_as_bucket_view=bucket_view, lr=1e-2, **options
        )
        if attaches and "threads" in options:
            # Without overlap: the weights are sent to other ranks as soon as its step has returned.
            optimizer.optim.attach(wrapped)
        return train(wrapped, optimizer, device), wrapped, optimizer

    cls, options = (torch.optim.AdamW, {"fused": True}) if device == "cpu" else (outboard.AdamW, {"mode": "cpu"})
    losses, wanted, theirs = run(cls, **options)
    with with_lanes():
        got_losses, got, ours = run(outboard.AdamW, threads=1)
    assert got_losses == losses
    for p, q in zip(wanted.parameters(), got.parameters(), strict=True):
        assert_same(host(q), host(p))
    for optimizer in (theirs, ours):
        optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        mine, other = ours.state_dict()["state"], theirs.state_dict()["state"]
        assert mine.keys() == other.keys()
        for key, values in mine.items():
            for name in ("exp_avg", "exp_avg_sq"):
                assert_same(values[name].cpu(), other[key][name].cpu())
    # Only its share has state here.
    held = ours.optim.stats()["elements"]
    assert 0 < held < sum(p.numel() for p in got.parameters())
    # And back, into a fresh one.
    saved = [ours.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    with with_lanes():
        again = ZeroRedundancyOptimizer(got.parameters(), optimizer_class=outboard.AdamW, lr=1e-2, threads=1)
    again.load_state_dict(saved[0])
    assert train(got, again, device) == train(wanted, theirs, device)


@pytest.mark.parametrize("attaches", [False, True], ids=["plain", "attached"])
@pytest.mark.parametrize("bucket_view", [False, True])
def test_zero_redundancy_optimizer(ranks, attaches, bucket_view) -> None:
    ranks(zero, 2, attaches, bucket_view)


def zero_clips(device: str) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = wrap(model(), device)
    with pytest.raises(ValueError, match="clip_grad_norm_"):
        ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=outboard.AdamW, lr=1e-2, max_grad_norm=1.0)


def test_a_norm_of_a_share_of_the_gradients_is_refused(ranks) -> None:
    ranks(zero_clips, 2)


def looked_at_between(device: str, compiles: bool) -> None:
    """A forward without gradients between one under `no_sync()` and its backward says nothing of that backward."""
    small_ones_have_hooks()

    def run(optimizer_of: Any) -> Any:
        # The compiler cuts graphs at buckets, and refuses such small ones.
        wrapped = wrap(model(), device, bucket_cap_mb=25)
        optimizer = optimizer_of(wrapped)
        called = torch.compile(wrapped, backend="eager") if compiles else wrapped
        if isinstance(optimizer, outboard.AdamW):
            optimizer.attach(called)
        data = list(batches(8, seed=dist.get_rank()))
        for first, second in zip(data[::2], data[1::2], strict=True):
            with wrapped.no_sync():
                loss = called(first.to(device)).square().mean()
            if not compiles:
                with torch.no_grad():
                    called(first.to(device))
            # Outside of the context: DDP has decided in forward.
            loss.backward()
            called(second.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return wrapped

    def ours(wrapped: Any) -> outboard.AdamW:
        options = {"offload_gradients": True, "accumulation_steps": 2}
        with with_lanes():
            return outboard.AdamW(wrapped.parameters(), lr=1e-2, threads=1, **options)

    wanted = run(lambda wrapped: reference(device, wrapped.parameters()) if device == "cpu" else plain(wrapped))
    got = run(ours)
    for p, q in zip(wanted.parameters(), got.parameters(), strict=True):
        assert_same(host(q), host(p))


def plain(wrapped: Any) -> torch.optim.Optimizer:
    """Return outboard's optimizer, which is not attached: `run` attaches those of its own class alone."""

    class Plain(torch.optim.SGD):
        def __init__(self) -> None:
            super().__init__(wrapped.parameters(), lr=0)
            self.inner = outboard.AdamW(wrapped.parameters(), lr=1e-2, mode="cpu")

        def step(self) -> None:  # type: ignore[override]
            self.inner.step()

    return Plain()


@pytest.mark.parametrize("compiles", [False, True], ids=["looked at", "compiled"])
def test_no_sync_around_the_forward_alone(ranks, compiles) -> None:
    ranks(looked_at_between, 2, compiles)


def computed_anew(device: str) -> None:
    """A compiled part that is computed anew within a backward says nothing of what DDP does in that backward."""
    small_ones_have_hooks()

    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
            self.last = torch.nn.Linear(64, 64)
            self.first.compile(backend="eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=False))

    wrapped = wrap(Parts(), device, bucket_cap_mb=25)
    with with_lanes():
        optimizer = outboard.AdamW(wrapped.parameters(), lr=1e-2, threads=1).attach(wrapped)
    data = list(batches(4, seed=dist.get_rank()))
    for x in data[:3]:
        wrapped(x.to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    begun = optimizer.stats()["eager_updates"]
    assert begun > 0
    with wrapped.no_sync():
        loss = wrapped(data[3].to(device)).square().mean()
    loss.backward()
    assert optimizer.stats()["eager_updates"] == begun
    wrapped(data[3].to(device)).square().mean().backward()
    optimizer.step()
    agree([host(p).double().sum().item() for p in wrapped.parameters()])


def test_a_compiled_part_that_is_computed_anew(ranks) -> None:
    ranks(computed_anew, 2)
