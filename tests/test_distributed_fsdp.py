"""FSDP2 (`fully_shard`), real ranks: updates begin in backward, and each gather of a unit waits for its shards.

Over 500 lines: independent cases, read one at a time.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import outboard
from oracle import assert_same
from outboard import _pending
from ranks import Fails, agree, batches, host, model, small_ones_have_hooks, with_lanes

STEPS = 6


def shard(module: torch.nn.Module, device: str, *, prefetch: bool = False, **options: Any) -> Any:
    """Shard a model, each of its blocks as a unit of its own."""
    is_offloaded = isinstance(options.get("offload_policy"), CPUOffloadPolicy)
    if not is_offloaded:
        module = module.to(device)
    if "mesh" not in options:
        options["mesh"] = init_device_mesh(device, (dist.get_world_size(),))
    for block in module:
        fully_shard(block, **options)
    fully_shard(module, **options)
    if prefetch:
        blocks = list(module)
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
    return module


def reference(device: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    """Return torch's own on a CPU; its kernel on a GPU rounds otherwise, and there ours without overlap is the one."""
    if device == "cpu":
        return torch.optim.AdamW(params, lr=1e-2, fused=True, **options)
    return outboard.AdamW(params, lr=1e-2, mode="cpu", **options)


def train(
    module: Any,
    optimizer: torch.optim.Optimizer,
    device: str,
    steps: int = STEPS,
    accumulate: int = 1,
    sync: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    losses = []
    for number, x in enumerate(batches(steps * accumulate, seed=seed * 100 + dist.get_rank(), dtype=dtype)):
        is_last = number % accumulate == accumulate - 1
        module.set_requires_gradient_sync(sync or is_last)
        loss = module(x.to(device)).square().mean() / accumulate
        loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def check_weights_and_state(wanted: Any, theirs: Any, got: Any, ours: Any) -> None:
    for (name, p), q in zip(wanted.named_parameters(), got.named_parameters(), strict=True):
        q = q[1]
        assert q.placements == p.placements
        assert_same(host(q), host(p), name)
        if p not in theirs.state:
            continue
        for key in ("exp_avg", "exp_avg_sq"):
            plane = ours.state[q][key]
            assert plane.placements == q.placements
            assert plane.shape == q.shape
            assert_same(host(plane), host(theirs.state[p][key]), f"{key} of {name}")


def equal(device: str, eager: Any, accumulate: int, sync: bool, options: dict[str, Any], ours: dict[str, Any]) -> None:
    small_ones_have_hooks()
    wanted = shard(model(), device, **options)
    theirs = reference(device, wanted.parameters())
    losses = train(wanted, theirs, device, accumulate=accumulate, sync=sync)
    got = shard(model(), device, **options)
    with with_lanes():
        optimizer = outboard.AdamW(got.parameters(), lr=1e-2, eager=eager, threads=1, **ours).attach(got)
    assert train(got, optimizer, device, accumulate=accumulate, sync=sync) == losses
    check_weights_and_state(wanted, theirs, got, optimizer)
    declared = ours.get("accumulation_steps", 1) == (accumulate if sync else 1)
    begins = eager is True or (eager == "auto" and declared)
    begins &= not ours.get("offload_gradients") or (eager is True and ours.get("accumulation_steps", 1) == 1)
    assert (optimizer.stats()["eager_updates"] > 0) == begins
    assert optimizer.stats()["elements"] < sum(p.numel() for p in got.parameters())
    optimizer.detach()
    assert not any("unshard" in vars(group) for m in got.modules() for group in groups(m))


def groups(module: Any) -> list[Any]:
    from outboard import _wrappers

    return _wrappers._groups_of(module) or [] if hasattr(module, "_get_fsdp_state") else []


@pytest.mark.parametrize("eager", ["auto", True, False])
@pytest.mark.parametrize("prefetch", [False, True])
def test_equal_to_torch(ranks, eager, prefetch) -> None:
    ranks(equal, 2, eager, 1, True, {"prefetch": prefetch}, {})


@pytest.mark.parametrize("reshard", [True, False])
def test_reshard_after_forward(ranks, reshard) -> None:
    ranks(equal, 2, True, 1, True, {"reshard_after_forward": reshard}, {})


def test_one_rank(ranks) -> None:
    """The shards are copied on the current stream then, not gathered on another."""
    ranks(equal_on_one, 1)


def equal_on_one(device: str) -> None:
    small_ones_have_hooks()
    wanted = shard(model(), device)
    theirs = reference(device, wanted.parameters())
    losses = train(wanted, theirs, device)
    got = shard(model(), device)
    with with_lanes():
        optimizer = outboard.AdamW(got.parameters(), lr=1e-2, eager=True, threads=1).attach(got)
    assert train(got, optimizer, device) == losses
    check_weights_and_state(wanted, theirs, got, optimizer)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(
    "ours",
    [{}, {"accumulation_steps": 3}, {"offload_gradients": True, "accumulation_steps": 3}],
    ids=lambda ours: "-".join(ours) or "plain",
)
def test_accumulation(ranks, sync, ours) -> None:
    """Gradients that are reduced in each backward, or in the last alone, where hooks see one backward of three."""
    if not sync and ours:
        ours = {**ours, "accumulation_steps": 1}
    ranks(equal, 2, "auto", 3, sync, {}, ours)


def offloaded(device: str, is_attached: bool) -> None:
    small_ones_have_hooks()
    policy = CPUOffloadPolicy(pin_memory=device == "cuda")
    wanted = shard(model(), device, offload_policy=policy)
    theirs = torch.optim.AdamW(wanted.parameters(), lr=1e-2, fused=True)
    losses = train(wanted, theirs, device)
    got = shard(model(), device, offload_policy=policy)
    # Where weights are in host memory there are no lanes.
    optimizer = outboard.AdamW(got.parameters(), lr=1e-2, threads=1)
    if is_attached:
        optimizer.attach(got)
    assert train(got, optimizer, device) == losses
    assert all(p.device.type == "cpu" for p in got.parameters())
    if device == "cuda":
        assert not any(p._post_accumulate_grad_hooks for p in got.parameters())
    check_weights_and_state(wanted, theirs, got, optimizer)


@pytest.mark.parametrize("is_attached", [False, True], ids=["plain", "attached"])
def test_cpu_offload_policy(ranks, is_attached) -> None:
    ranks(offloaded, 2, is_attached)


def mixed(device: str) -> None:
    """bf16 in forward and backward, fp32 shards; and bf16 throughout, with split masters."""
    small_ones_have_hooks()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wanted = shard(model(), device, mp_policy=policy)
    theirs = reference(device, wanted.parameters())
    losses = train(wanted, theirs, device)
    got = shard(model(), device, mp_policy=policy)
    with with_lanes():
        optimizer = outboard.AdamW(got.parameters(), lr=1e-2, eager=True, threads=1).attach(got)
    assert train(got, optimizer, device) == losses
    check_weights_and_state(wanted, theirs, got, optimizer)

    runs = []
    for attaches in (False, True):
        module = shard(model(dtype=torch.bfloat16), device)
        with with_lanes():
            optimizer = outboard.AdamW(module.parameters(), lr=1e-2, eager=True, threads=1, mode="cpu")
        if attaches:
            optimizer.attach(module)
        losses = train(module, optimizer, device, dtype=torch.bfloat16)
        masters = [optimizer.master(p) for p in module.parameters()]
        assert all(m.placements == p.placements for m, p in zip(masters, module.parameters(), strict=True))
        residuals = [optimizer.state[p]["residual"] for p in module.parameters()]
        assert any(host(residual).any() for residual in residuals)
        runs.append((losses, [host(m) for m in masters]))
    assert runs[0][0] == runs[1][0]
    for a, b in zip(runs[0][1], runs[1][1], strict=True):
        assert_same(a, b)


def test_mixed_precision(ranks) -> None:
    ranks(mixed, 2)


def clipped(device: str, inside: bool) -> None:
    small_ones_have_hooks()

    def norm_of(module: Any, limit: float) -> float:
        total = torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
        return total.full_tensor().item()

    wanted = shard(model(), device)
    theirs = reference(device, wanted.parameters())
    got = shard(model(), device)
    with with_lanes():
        limit = {"max_grad_norm": 0.05} if inside else {}
        optimizer = outboard.AdamW(got.parameters(), lr=1e-2, threads=1, **limit).attach(got)
    for number, x in enumerate(batches(STEPS, seed=dist.get_rank())):
        wanted(x.to(device)).square().mean().backward()
        squares = torch.tensor(
            sum(host(p.grad).double().square().sum().item() for p in wanted.parameters()), device=device
        )
        dist.all_reduce(squares)
        norm = norm_of(wanted, 0.05)
        theirs.step()
        theirs.zero_grad()
        loss = got(x.to(device)).square().mean()
        loss.backward()
        if not inside:
            norm_of(got, 0.05)
        optimizer.step()
        assert norm > 0.05
        if inside:
            # torch's own norm is that of fp32 sums.
            assert optimizer.last_grad_norm == pytest.approx(squares.item() ** 0.5, rel=1e-6 if number == 0 else 1e-3)
            agree(optimizer.last_grad_norm)
        optimizer.zero_grad()
    for p, q in zip(wanted.parameters(), got.parameters(), strict=True):
        if inside:
            torch.testing.assert_close(host(q), host(p), rtol=0, atol=1e-4)
        else:
            assert_same(host(q), host(p))
    assert optimizer.stats()["eager_updates"] == 0


@pytest.mark.parametrize("inside", [False, True], ids=["by torch", "by outboard"])
def test_clipping(ranks, inside) -> None:
    ranks(clipped, 2, inside)


def nonfinite(device: str, policy: str) -> None:
    """An infinite gradient in one rank's shard is every rank's affair."""
    small_ones_have_hooks()
    module = shard(model(), device)
    with with_lanes():
        optimizer = outboard.AdamW(module.parameters(), lr=1e-2, threads=1, nonfinite=policy).attach(module)
    x = next(batches(1)).to(device)
    module(x).square().mean().backward()
    before = [host(p).clone() for p in module.parameters()]
    if dist.get_rank() == 1:
        module[1].up.weight.grad.to_local()[0, 0] = float("inf")
    if policy == "raise":
        with pytest.raises(outboard.NonFiniteError, match=r"parameter 8 of group 0"):
            optimizer.step()
    else:
        with pytest.warns(RuntimeWarning, match="changed nothing"):
            optimizer.step()
        assert optimizer.stats()["skipped_steps"] == 1
    for p, old in zip(module.parameters(), before, strict=True):
        assert_same(host(p), old)


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_nonfinite_on_one_rank(ranks, policy) -> None:
    ranks(nonfinite, 2, policy)


def readers(device: str) -> None:
    """Whoever reads a shard right after `step()` sees it updated, however slow the update is."""
    small_ones_have_hooks()
    for number, read in enumerate(READERS):
        module = shard(model(), device)
        with with_lanes():
            optimizer = outboard.AdamW(module.parameters(), lr=1e-2, eager=False, threads=1).attach(module)
        module(next(batches(1)).to(device)).square().mean().backward()
        optimizer.step()
        # It has returned with updates under way: they overlap what follows.
        assert all(map(_pending.is_pending, module.parameters()))
        early = read(module)
        optimizer.synchronize()
        assert not any(map(_pending.is_pending, module.parameters()))
        late = read(module)
        for a, b in zip(early, late, strict=True):
            assert_same(a, b, f"reader {number}")


READERS = [
    lambda module: [p.to_local().detach().cpu().clone() for p in module.parameters()],
    lambda module: [p.full_tensor().detach().cpu() for p in module.parameters()],
    lambda module: [p._local_tensor.cpu().clone() for p in module.parameters()],
    lambda module: [(p * 1).to_local().detach().cpu() for p in module.parameters()],
    lambda module: [p.data.to_local().cpu().clone() for p in module.parameters()],
    lambda module: [p.to_local().cpu().clone() for p in module.state_dict().values()],
    lambda module: [gathered(module[0])],
]


def gathered(block: Any) -> torch.Tensor:
    """Return a weight of a unit that the user gathers."""
    block.unshard()
    found = block.up.weight.detach().cpu().clone()
    block.reshard()
    return found


def test_readers_of_shards(ranks) -> None:
    ranks(readers, 2)


def delayed(device: str) -> None:
    """Updates that come late, by a random while each, are waited for by every gather."""
    small_ones_have_hooks()
    chance = random.Random(dist.get_rank())
    wanted = shard(model(width=256), device, prefetch=True)
    theirs = reference(device, wanted.parameters())
    got = shard(model(width=256), device, prefetch=True)
    with with_lanes():
        optimizer = outboard.AdamW(got.parameters(), lr=1e-2, eager=True, threads=1).attach(got)
    backward = optimizer._attachment.backward
    take = backward._take

    def late(*arguments: Any) -> None:
        if device == "cuda":
            torch.cuda._sleep(chance.randrange(20_000_000))
        take(*arguments)

    backward._take = late
    for x in batches(12, width=256, seed=dist.get_rank()):
        for module, opt in ((wanted, theirs), (got, optimizer)):
            loss = module(x.to(device)).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
        if device == "cuda":
            torch.cuda._sleep(chance.randrange(10_000_000))
    for p, q in zip(wanted.parameters(), got.parameters(), strict=True):
        assert_same(host(q), host(p))


def test_delays(ranks) -> None:
    ranks(delayed, 2)


def sharded_after(device: str) -> None:
    """A model that is sharded after `attach` has other parameters than the optimizer."""
    module = model().to(device)
    with with_lanes():
        optimizer = outboard.AdamW(module.parameters(), lr=1e-2, threads=1).attach(module)
    shard(module, device)
    with pytest.raises(RuntimeError, match="another parameter than the one that the optimizer trains"):
        module(next(batches(1)).to(device))
    optimizer.detach()


def test_sharded_after_attach(ranks) -> None:
    ranks(sharded_after, 2)


def flattened(device: str) -> None:
    """FSDP1 is stepped without overlap; a norm of what one rank has is refused."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    device_id = torch.device(device, dist.get_rank()) if device == "cuda" else torch.device("cpu")

    def wrap() -> Any:
        return FullyShardedDataParallel(model().to(device), use_orig_params=True, device_id=device_id)

    wanted, got = wrap(), wrap()
    theirs = reference(device, wanted.parameters())
    with with_lanes():
        ours = outboard.AdamW(got.parameters(), lr=1e-2, threads=1).attach(got)
    for x in batches(4, seed=dist.get_rank()):
        for module, optimizer in ((wanted, theirs), (got, ours)):
            module(x.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(wanted.parameters(), got.parameters(), strict=True):
        assert_same(host(q), host(p))
    ours.max_grad_norm = 1.0
    got(x.to(device)).square().mean().backward()
    with pytest.raises(ValueError, match="FSDP1"):
        ours.step()


def test_fsdp1(ranks) -> None:
    ranks(flattened, 2)


def gathers(device: str) -> None:
    """Each gather of a unit, in forward and in backward, first waits for this unit's shards, and no other's."""
    small_ones_have_hooks()
    module = shard(model(), device)
    with with_lanes():
        optimizer = outboard.AdamW(module.parameters(), lr=1e-2, eager=False, threads=1).attach(module)
    readers, waits = optimizer._attachment.readers, []
    resolve = readers.resolve

    def counted(parameters: list[torch.Tensor], **options: Any) -> None:
        waits.append({id(p) for p in parameters})
        resolve(parameters, **options)

    readers.resolve = counted
    units = [{id(p) for p in block.parameters()} for block in module]
    for x in batches(2, seed=dist.get_rank()):
        waits.clear()
        module(x.to(device)).square().mean().backward()
        found = [wait for wait in waits if wait in units]
        # Each unit in forward; in backward those that were resharded.
        assert [found.index(unit) for unit in units] == [0, 1, 2]
        optimizer.step()
        optimizer.zero_grad()


def test_gathers_wait_for_their_own_shards(ranks) -> None:
    ranks(gathers, 2)


def two_optimizers(device: str) -> None:
    """Two optimizers, each of some parameters of every unit; one goes, and the other's gathers still wait."""
    small_ones_have_hooks()

    def halves(module: Any) -> list[list[torch.Tensor]]:
        params = list(module.parameters())
        return [params[::2], params[1::2]]

    wanted, got = shard(model(), device), shard(model(), device)
    theirs = [reference(device, half) for half in halves(wanted)]
    with with_lanes():
        ours = [outboard.AdamW(half, lr=1e-2, threads=1, eager=False) for half in halves(got)]
    for optimizer in ours:
        optimizer.attach(got)
    for number, x in enumerate(batches(5, seed=dist.get_rank())):
        if number == 3:
            ours[0].detach()
        for module, optimizers in ((wanted, theirs), (got, ours)):
            module(x.to(device)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for p, q in zip(wanted.parameters(), got.parameters(), strict=True):
        assert_same(host(q), host(p))
    ours[1].detach()
    # Optimizers that go without a word leave nothing behind them.
    for _ in range(30):
        with with_lanes():
            outboard.AdamW(got.parameters(), lr=1e-2, threads=1).attach(got)
    hook, length = vars(groups(got[0])[0]).get("unshard"), 0
    while hook is not None:
        hook, length = hook._other, length + 1
    assert length <= 2


def test_two_optimizers_of_one_model(ranks) -> None:
    ranks(two_optimizers, 2)


def failed(device: str) -> None:
    """After a backward that failed, the next one and `step()` raise, also where it reaches other units alone."""
    small_ones_have_hooks()
    module = shard(model(), device)
    with with_lanes():
        optimizer = outboard.AdamW(module.parameters(), lr=1e-2, eager=True, threads=1).attach(module)
    x = next(batches(1, seed=dist.get_rank())).to(device)

    handle = module[0].register_forward_hook(lambda block, args, output: Fails.apply(output))
    with pytest.raises(RuntimeError, match="in backward"):
        module(x).square().mean().backward()
    handle.remove()
    assert optimizer.stats()["eager_updates"] > 0
    with pytest.raises(RuntimeError, match="abandon"):
        optimizer.step()
    assert optimizer.abandon().updated


def test_an_exception_in_backward(ranks) -> None:
    ranks(failed, 2)
