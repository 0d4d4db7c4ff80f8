"""DTensors, real ranks: tensor parallelism, meshes of two dimensions, uneven and empty shards, one norm for all.

Over 500 lines: independent cases, read one at a time.
"""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import outboard
from oracle import assert_same
from outboard import _sharded
from ranks import agree, batches, host, model, small_ones_have_hooks, whole, with_lanes

STEPS = 5


def parallel(module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Spread blocks over ranks: columns, rows, and norms whose gradients ranks have parts of."""
    for block in module:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(block, mesh, plan)
    return module


def build(kind: str, device: str) -> tuple[torch.nn.Module, int]:
    """Return a model, and the number of the batches that this rank gets."""
    size = dist.get_world_size()
    module = model().to(device)
    if kind == "tensor parallel":
        return parallel(module, init_device_mesh(device, (size,))), 0
    mesh = init_device_mesh(device, (2, size // 2), mesh_dim_names=("outer", "inner"))
    if kind == "tensor parallel and fsdp":
        parallel(module, mesh["inner"])
        mesh = mesh["outer"]
        seed = mesh.get_local_rank()
    else:
        seed = dist.get_rank()
    for block in module:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh), seed


def reference(device: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    """Return torch's own on a CPU; its kernel on a GPU rounds otherwise, and there ours without overlap is the one."""
    if device == "cpu":
        return torch.optim.AdamW(params, lr=1e-2, fused=True, **options)
    return outboard.AdamW(params, lr=1e-2, mode="cpu", **options)


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int, device: str) -> list[float]:
    losses = []
    for x in batches(STEPS, seed=seed):
        loss = module(x.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss).item())
    return losses


def equal(device: str, kind: str, eager: Any, attaches: bool) -> None:
    small_ones_have_hooks()
    wanted, seed = build(kind, device)
    theirs = reference(device, wanted.parameters())
    losses = train(wanted, theirs, seed, device)
    got, _ = build(kind, device)
    with with_lanes():
        optimizer = outboard.AdamW(got.parameters(), lr=1e-2, eager=eager, threads=1)
    if attaches:
        optimizer.attach(got)
    assert train(got, optimizer, seed, device) == losses
    for (name, p), q in zip(wanted.named_parameters(), got.parameters(), strict=True):
        assert q.placements == p.placements
        assert_same(host(q), host(p), name)
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same(host(optimizer.state[q][key]), host(theirs.state[p][key]), f"{key} of {name}")
    assert (optimizer.stats()["eager_updates"] > 0) == (attaches and eager is not False)


@pytest.mark.parametrize(
    ("kind", "world_size"), [("tensor parallel", 2), ("tensor parallel and fsdp", 4), ("hybrid sharding", 4)]
)
@pytest.mark.parametrize(("eager", "attaches"), [("auto", False), ("auto", True), (True, True), (False, True)])
def test_equal_to_torch(ranks, kind, world_size, eager, attaches) -> None:
    ranks(equal, world_size, kind, eager, attaches, at_least=2)


#: Global shape and placements over a mesh of 2 x 2: rows that do not divide, fewer rows than ranks, none, one element.
SHAPES = [
    ((64, 32), (Shard(0), Replicate())),
    ((64, 32), (Replicate(), Replicate())),
    ((64, 32), (Shard(0), Shard(1))),
    ((64, 32), (Shard(0), Shard(0))),
    ((7, 33), (Shard(0), Shard(0))),
    ((3, 16), (Shard(0), Shard(0))),
    ((1, 16), (Shard(0), Replicate())),
    ((33, 5), (Replicate(), Shard(1))),
    ((0, 16), (Shard(0), Replicate())),
    ((1,), (Shard(0), Shard(0))),
    ((), (Replicate(), Replicate())),
]


def parameters(device: str, dtype: torch.dtype) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    """Return parameters spread in every way, and whole copies of them, the same on all ranks."""
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2))
    generator = torch.Generator().manual_seed(3)
    wholes = [torch.randn(shape, generator=generator).to(dtype) for shape, _ in SHAPES]
    spread = [
        torch.nn.Parameter(distribute_tensor(value.to(device), mesh, placements))
        for value, (_, placements) in zip(wholes, SHAPES, strict=True)
    ]
    return spread, wholes


def spread_as(parameter: Any, value: torch.Tensor, device: str) -> DTensor:
    """Return a value that every rank has, spread as a parameter is; nothing is sent."""
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(device), mesh, placements, src_data_rank=None)


def every_shape(device: str, dtype_name: str, limit: float | None, share: float) -> None:
    """The same bits as one process with the whole tensors, also of state and masters; one norm."""
    dtype = getattr(torch, dtype_name)
    spread, wholes = parameters(device, dtype)
    options = {"lr": 1e-2, "threads": 1, "max_grad_norm": limit, "weight_decay": 0.1, "amsgrad": True}
    alone = [torch.nn.Parameter(value.clone()) for value in wholes]
    single = outboard.AdamW(alone, **options)
    with with_lanes():
        optimizer = outboard.AdamW(spread, **options, device_state_bytes=share)
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        for p, q in zip(alone, spread, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            q.grad = spread_as(q, p.grad, device)
        single.step()
        optimizer.step()
        if limit is not None:
            squares = sum(p.grad.double().square().sum().item() for p in alone)
            assert optimizer.last_grad_norm == pytest.approx(math.sqrt(squares), rel=1e-9)
            agree(optimizer.last_grad_norm)
    for p, q in zip(alone, spread, strict=True):
        what = f"{tuple(p.shape)} {q.placements}"
        part = spread_as(q, p.detach(), device)
        if limit is None:
            assert_same(host(q), host(part), what)
        else:
            # The norm is that of other sums: the last bit of the factor may differ, and no more.
            torch.testing.assert_close(host(q), host(part), rtol=2**-7 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)
        for key, plane in optimizer.state[q].items():
            if key == "step":
                assert float(plane) == 3
                continue
            assert isinstance(plane, DTensor)
            assert (plane.shape, plane.placements) == (q.shape, q.placements)
            assert (
                plane.to_local().device.type == ("cpu" if share == 0 or device == "cpu" else "cuda")
                or not plane.numel()
            )
            if limit is None:
                value = spread_as(q, single.state[p][key], device)
                assert_same(host(plane), host(value), f"{key} of {what}")
        if limit is None:
            master = optimizer.master(q)
            assert master.placements == q.placements
            assert_same(host(master), host(spread_as(q, single.master(p), device)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("share", [0, 1.0])
def test_every_shape(ranks, dtype, limit, share) -> None:
    ranks(every_shape, 4, dtype, limit, share, at_least=2)


def gradients(device: str) -> None:
    """Gradients that are spread otherwise than their parameters are brought there, as torch's optimizers do."""
    mesh = init_device_mesh(device, (2,))
    rank = dist.get_rank()
    value = torch.arange(64.0).reshape(16, 4)
    grad = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    given = {
        "partial": DTensor.from_local(grad.to(device) * (0.25 if rank else 0.75), mesh, [Partial()]),
        "replicated": DTensor.from_local(grad.to(device), mesh, [Replicate()]),
        "by columns": distribute_tensor(grad.to(device), mesh, [Shard(1)]),
    }
    alone = torch.nn.Parameter(value.clone())
    alone.grad = grad.clone()
    outboard.AdamW([alone], lr=1e-2, threads=1).step()
    for name, spread in given.items():
        for placement in (Shard(0), Replicate()):
            p = torch.nn.Parameter(distribute_tensor(value.clone().to(device), mesh, [placement]))
            p.grad = spread.clone()
            with with_lanes():
                outboard.AdamW([p], lr=1e-2, threads=1).step()
            torch.testing.assert_close(whole(p).detach().cpu(), alone.detach(), rtol=1e-6, atol=0, msg=name)
    p = torch.nn.Parameter(distribute_tensor(value.to(device), mesh, [Shard(0)]))
    optimizer = outboard.AdamW([p], threads=1)
    with torch._C.DisableTorchFunctionSubclass():
        p.grad = torch.zeros(16, 4, device=device)
    before = host(p).clone()
    with pytest.raises(TypeError, match="parameter 0 of group 0, shape \\(16, 4\\) is a plain tensor"):
        optimizer.step()
    assert_same(host(p), before)


def test_gradients_of_other_placements(ranks) -> None:
    ranks(gradients, 2)


def missing(device: str) -> None:
    """A parameter whose gradient one rank lacks: nobody waits for ever, and the norm is that of what there is."""
    mesh = init_device_mesh(device, (2,))
    params = [torch.nn.Parameter(distribute_tensor(torch.ones(16, 16, device=device), mesh, [Shard(0)])) for _ in "ab"]
    with with_lanes():
        optimizer = outboard.AdamW(params, compute_grad_norm=True, threads=1)
    for p in params[: 1 + dist.get_rank()]:
        p.grad = distribute_tensor(torch.ones(16, 16, device=device), mesh, [Shard(0)])
    if dist.get_rank() == 0:
        # distribute_tensor is of both ranks.
        distribute_tensor(torch.ones(16, 16, device=device), mesh, [Shard(0)])
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(math.sqrt(256 + 128))
    agree(optimizer.last_grad_norm)


def test_a_gradient_on_one_rank_only(ranks) -> None:
    ranks(missing, 2)


def watched(device: str) -> None:
    """Whatever writes a gradient is noticed; what reads it is not an offence."""
    mesh = init_device_mesh(device, (2,))

    def gradient() -> DTensor:
        grad = distribute_tensor(torch.ones(16, 16, device=device), mesh, [Shard(0)])
        assert _sharded.is_unchanged(grad, _sharded.watch(grad)) is True
        return grad

    p = torch.nn.Parameter(distribute_tensor(torch.ones(16, 16, device=device), mesh, [Shard(0)]))

    def clip(grad: DTensor, foreach: bool) -> None:
        p.grad = grad
        torch.nn.utils.clip_grad_norm_([p], 0.1, foreach=foreach)

    writes = {
        "clip, foreach": lambda grad: clip(grad, True),
        "clip": lambda grad: clip(grad, False),
        "mul_": lambda grad: grad.mul_(2),
        "*=": lambda grad: grad.__imul__(2),
        "out=": lambda grad: torch.mul(gradient(), 2, out=grad),
        "zero_": lambda grad: grad.zero_(),
        "foreach": lambda grad: torch._foreach_mul_([grad], 2.0),
        "local": lambda grad: grad.to_local().mul_(2),
        "_local_tensor": lambda grad: grad._local_tensor.mul_(2),
        "detach": lambda grad: grad.detach().mul_(2),
        "data": lambda grad: grad.data.mul_(2),
        "view": lambda grad: grad.view(256).mul_(2),
        "view of a view": lambda grad: grad.detach().view(256).mul_(2),
        "local of a view": lambda grad: grad.detach().to_local().mul_(2),
        "chunk, all at once": lambda grad: torch._foreach_mul_(list(grad.chunk(2, 1)), 2.0),
        "unbind": lambda grad: torch._foreach_mul_(list(grad.unbind(1)), 2.0),
        "narrow": lambda grad: torch.narrow(input=grad, dim=1, start=0, length=4).mul_(2),
        "[...]": lambda grad: grad[...].mul_(2),
    }
    for name, write in writes.items():
        grad = gradient()
        seen = _sharded.watch(grad)
        write(grad)
        assert not _sharded.is_unchanged(grad, seen), name
        assert type(grad) is DTensor, name
        assert not (host(grad) == 1).all(), name
    reads = {
        "norm": lambda grad: torch.linalg.vector_norm(grad).full_tensor(),
        "get_total_norm": lambda grad: torch.nn.utils.get_total_norm([grad]),
        "full_tensor": lambda grad: grad.full_tensor(),
        "abs": lambda grad: grad.abs().max(),
        "shape": lambda grad: (grad.shape, grad.device, grad.dtype, grad.placements, grad.numel(), grad.requires_grad),
        "clone": lambda grad: grad.clone().zero_(),
        "isfinite": lambda grad: grad.isfinite().all(),
        "repr": lambda grad: (repr(grad), f"{grad}", len(grad)),
        "==": lambda grad: (grad == 1).all(),
        "redistribute": lambda grad: grad.redistribute(grad.device_mesh, [Replicate()]),
        "redistribute, later": lambda grad: grad.redistribute(grad.device_mesh, [Replicate()], async_op=True),
        "detach": lambda grad: grad.detach().norm(),
        "data": lambda grad: grad.data.norm(),
        "flatten": lambda grad: grad.flatten().norm(),
        "a source": lambda grad: gradient().add_(grad),
        "sources": lambda grad: torch._foreach_add_([gradient()], [grad]),
    }
    for name, read in reads.items():
        grad = gradient()
        seen = _sharded.watch(grad)
        read(grad)
        assert _sharded.is_unchanged(grad, seen), name
    whole_one = distribute_tensor(torch.ones(16, 16, device=device), mesh, [Replicate()])
    seen = _sharded.watch(whole_one)
    whole_one.full_tensor().mul_(2)
    assert _sharded.is_unchanged(whole_one, seen)
    assert (host(whole_one) == 1).all()
    for copier in (copy.deepcopy, lambda grad: pickle.loads(pickle.dumps(grad))):
        if copier is copy.deepcopy:
            assert type(copier(gradient())) is DTensor


def test_gradients_are_watched(ranks) -> None:
    ranks(watched, 2)


def changed(device: str) -> None:
    """A gradient that is clipped after updates have begun in backward is an error, also where no version tells."""
    small_ones_have_hooks()
    mesh = init_device_mesh(device, (2,))
    module = model().to(device)
    for block in module:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    with with_lanes():
        optimizer = outboard.AdamW(module.parameters(), lr=1e-2, threads=1).attach(module)
    for number, x in enumerate(batches(4, seed=dist.get_rank())):
        module(x.to(device)).square().mean().backward()
        if number == 2:
            # Seen by nobody as a change.
            torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
        if number == 3:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
            with pytest.raises(RuntimeError, match="its gradient was changed after the update"):
                optimizer.step()
            break
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.stats()["eager_updates"] > 0
    optimizer.abandon()


def test_clipping_after_updates_have_begun(ranks) -> None:
    ranks(changed, 2)


def subclasses(device: str) -> None:
    """What is neither a plain tensor nor spread over ranks is refused by name."""
    mesh = init_device_mesh(device, (2,))
    p = torch.nn.Parameter(distribute_tensor(torch.ones(8, 4, dtype=torch.float64, device=device), mesh, [Shard(0)]))
    with pytest.raises(TypeError, match=r"a\.weight: its dtype is torch\.float64"):
        outboard.AdamW([("a.weight", p)], threads=1)
    q = torch.nn.Parameter(distribute_tensor(torch.ones(8, 4, device=device), mesh, [Shard(0)]))
    optimizer = outboard.AdamW([("b.weight", q)], threads=1)
    for value, error in (
        (torch.zeros(4, 4), "b.weight: exp_avg has shape"),
        (distribute_tensor(torch.zeros(8, 4, device=device), mesh, [Shard(1)]), "b.weight: its exp_avg is spread as"),
    ):
        with pytest.raises(ValueError, match=error):
            optimizer.state[q] = {"step": 1.0, "exp_avg": value, "exp_avg_sq": value}
    r = torch.nn.Parameter(torch.ones(8, 4, device=device))
    plain = outboard.AdamW([("c.weight", r)], threads=1)
    value = distribute_tensor(torch.zeros(8, 4, device=device), mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"c\.weight: its exp_avg is a DTensor.*full_tensor"):
        plain.state[r] = {"step": 1.0, "exp_avg": value, "exp_avg_sq": value}


def test_what_does_not_fit_is_refused(ranks) -> None:
    ranks(subclasses, 2)


def offloaded_parts(device: str, eager: Any, accumulate: int) -> None:
    """A gradient that ranks have parts of is added up, also where gradients leave the device in backward."""
    small_ones_have_hooks()
    mesh = init_device_mesh(device, (2,))
    rank = dist.get_rank()
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(16, 16, device=device), mesh, [Replicate()]))
    module = torch.nn.Module()
    module.weight = weight
    options = {"eager": eager, "offload_gradients": True, "accumulation_steps": accumulate}
    with with_lanes():
        optimizer = outboard.AdamW([weight], lr=1e-2, threads=1, **options).attach(module)
    for _ in range(2):
        for _ in range(accumulate):
            x = DTensor.from_local(torch.full((4, 16), 1.0 + rank, device=device), mesh, [Shard(0)])
            (x @ weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # Four rows of ones and four of twos.
    expected = torch.full((16, 16), 12.0 * accumulate)
    twin = torch.nn.Parameter(torch.ones(16, 16))
    single = outboard.AdamW([twin], lr=1e-2, threads=1)
    for _ in range(2):
        twin.grad = expected.clone()
        single.step()
    assert_same(host(optimizer.state[weight]["exp_avg"]), single.state[twin]["exp_avg"])
    assert_same(host(weight), twin.detach())


@pytest.mark.parametrize("eager", ["auto", True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_offloaded_gradients_that_ranks_have_parts_of(ranks, eager, accumulate) -> None:
    ranks(offloaded_parts, 2, eager, accumulate)


def bound_in_another_order(device: str) -> None:
    """Ranks that have bound their parameters in different orders add up the same gradients."""
    mesh = init_device_mesh(device, (2,))
    params = [
        torch.nn.Parameter(distribute_tensor(torch.ones(16, 16, device=device), mesh, [Replicate()])) for _ in "ab"
    ]
    with with_lanes():
        optimizer = outboard.AdamW(params, lr=1e-2, threads=1)
    if dist.get_rank() == 0:
        optimizer.master(params[1])
    for number, p in enumerate(params):
        p.grad = DTensor.from_local(torch.full((16, 16), 1.0 + 99 * number, device=device), mesh, [Partial()])
    optimizer.step()
    for number, p in enumerate(params):
        wanted = torch.full((16, 16), 2 * (1.0 + 99 * number)) * (1 - torch.tensor(0.9))
        torch.testing.assert_close(host(optimizer.state[p]["exp_avg"]), wanted)


def test_ranks_that_have_bound_in_another_order(ranks) -> None:
    ranks(bound_in_another_order, 2)


def noise(device: str) -> None:
    """Shards round by noise of their own, replicas by the same."""
    mesh = init_device_mesh(device, (2,))
    found = {}
    for placement in (Shard(0), Shard(1), Replicate()):
        p = torch.nn.Parameter(distribute_tensor(torch.ones(64, 64, device=device), mesh, [placement]))
        with with_lanes():
            optimizer = outboard.AdamW([p], lr=1e-2, threads=1, state_dtype=torch.bfloat16)
        for step in range(3):
            p.grad = distribute_tensor(torch.full((64, 64), 0.3 + step, device=device), mesh, [placement])
            optimizer.step()
        local = host(optimizer.state[p]["exp_avg"]).float().to(device)
        parts = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(parts, local.contiguous())
        found[str(placement)] = (parts[0] == parts[1]).float().mean().item()
    assert found[str(Replicate())] == 1
    assert found[str(Shard(0))] < 0.9, found
    assert found[str(Shard(1))] < 0.9, found


def test_noise_of_shards(ranks) -> None:
    ranks(noise, 2)


def beside(device: str) -> None:
    """Plain parameters beside DTensors: one norm if their gradients are the same on all ranks, or no step on any."""
    mesh = init_device_mesh(device, (2,))
    spread = torch.nn.Parameter(distribute_tensor(torch.ones(16, 16, device=device), mesh, [Shard(0)]))
    plain = torch.nn.Parameter(torch.ones(16, device=device))
    with with_lanes():
        optimizer = outboard.AdamW([plain, spread], lr=1e-2, threads=1, max_grad_norm=0.5)
    spread.grad = distribute_tensor(torch.ones(16, 16, device=device), mesh, [Shard(0)])
    plain.grad = torch.ones(16, device=device)
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(math.sqrt(256 + 16))
    # In the last bits they may differ: then all ranks go by the first.
    plain.grad = torch.full((16,), 1.0 + 1e-6 * dist.get_rank(), device=device)
    optimizer.step()
    agree(optimizer.last_grad_norm)
    plain.grad = torch.full((16,), math.inf if dist.get_rank() else 1.0, device=device)
    with pytest.warns(RuntimeWarning, match="changed nothing"):
        optimizer.step()
    plain.grad = torch.full((16,), 1.0 + dist.get_rank(), device=device)
    before = host(spread).clone()
    with pytest.raises(ValueError, match="differ between ranks"):
        optimizer.step()
    assert_same(host(spread), before)


def test_plain_parameters_beside_dtensors(ranks) -> None:
    ranks(beside, 2)


def strided(device: str) -> None:
    """A whole tensor for shards that are not one piece of it is refused, not taken by the wrong rows."""
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh(device, (2, 1))
    spec = [_StridedShard(0, split_factor=2), Replicate()]
    p = torch.nn.Parameter(distribute_tensor(torch.arange(32.0, device=device).view(8, 4), mesh, spec))
    optimizer = outboard.AdamW([("w", p)], threads=1)
    value = torch.arange(32.0).view(8, 4)
    with pytest.raises(ValueError, match=r"w: its exp_avg is a whole tensor"):
        optimizer.state[p] = {"step": 1.0, "exp_avg": value, "exp_avg_sq": value}


def test_whole_tensors_for_strided_shards(ranks) -> None:
    ranks(strided, 2)
