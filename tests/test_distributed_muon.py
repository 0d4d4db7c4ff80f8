"""`outboard.Muon` and `offload_state` over ranks: sharded matrices as the unsharded optimizer, and ranks that agree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import outboard
from ranks import with_lanes

Run = Callable[..., str]

MATRICES = ((64, 128),) * 4
#: Uneven over every number of ranks here, and fewer rows than ranks.
UNEVEN = ((64, 128), (128, 64), (33, 20), (3, 50), (1, 7), (64, 128))
VECTORS = ((128,), (128,), (128,))


def whole(shapes: Any, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]


def placed(names: list[str]) -> list[Any]:
    """Return placements by their names: R, S0, S1."""
    return [Replicate() if name == "R" else Shard(int(name[1:])) for name in names]


def spread(tensors: list[torch.Tensor], mesh: Any, placements: Any) -> list[torch.nn.Parameter]:
    def fitting(tensor: torch.Tensor) -> list[Any]:
        # Vectors have one dimension.
        return [Shard(0) if isinstance(one, Shard) and one.dim >= tensor.ndim else one for one in placements]

    return [torch.nn.Parameter(distribute_tensor(tensor.detach().clone(), mesh, fitting(tensor))) for tensor in tensors]


def give_gradients(plain: list[torch.Tensor], sharded: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for parameter, other in zip(plain, sharded, strict=True):
        grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.grad = grad
        other.grad = distribute_tensor(grad.clone(), other.device_mesh, other.placements)  # type: ignore[attr-defined]


def make(matrices: list[Any], vectors: list[Any], **options: Any) -> outboard.Muon:
    groups = [{"params": matrices, "use_muon": True}]
    if vectors:
        groups.append({"params": vectors, "use_muon": False})
    return outboard.Muon(groups, lr=0.02, **options)


def assert_as_whole(plain: list[torch.Tensor], sharded: list[torch.nn.Parameter], device: str) -> None:
    for index, (one, other) in enumerate(zip(plain, sharded, strict=True)):
        full = other.full_tensor()  # type: ignore[attr-defined]
        if device == "cpu":
            assert torch.equal(one, full), index
        else:
            # Products of another number of matrices at once may add up in another order.
            torch.testing.assert_close(one, full, rtol=2e-2, atol=2e-3)
        everywhere = [torch.empty_like(full) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, full.contiguous())
        assert all(torch.equal(full, theirs) for theirs in everywhere), index


def as_whole(device: str, mesh_shape: list[int], names: list[str], shapes: Any, options: Any) -> None:
    outboard.muon.set_ns_compile(False)
    placements = placed(names)
    mesh = init_device_mesh(device, tuple(mesh_shape) if len(mesh_shape) > 1 else (dist.get_world_size(),))
    matrices, vectors = whole(shapes, device), whole(VECTORS, device)
    sharded, sharded_vectors = spread(matrices, mesh, placements), spread(vectors, mesh, placements)
    theirs = make(matrices, vectors)
    ours = make(list(sharded), list(sharded_vectors), **options)
    with with_lanes():
        ours.turn_on_cpu_offload()
        for seed in range(3):
            give_gradients(matrices + vectors, sharded + sharded_vectors, seed)
            theirs.step()
            ours.step()
        assert_as_whole(matrices + vectors, sharded + sharded_vectors, device)
        for parameter in sharded + sharded_vectors:
            for value in ours.state[parameter].values():
                if isinstance(value, torch.Tensor):
                    assert isinstance(value, DTensor)
                    assert value.placements == parameter.placements  # type: ignore[attr-defined]
                    assert value.device_mesh == parameter.device_mesh  # type: ignore[attr-defined]
                    own = value._local_tensor
                    assert own.untyped_storage().size() == 0
                    if own.numel() > 0:
                        refuses_use(value)


def refuses_use(value: DTensor) -> None:
    own = value._local_tensor
    assert value.to_local().untyped_storage().size() == 0
    assert "on the host" in repr(value)
    # Each would read, or write, at address 0.
    for use in (value.sum, value.clone, value.full_tensor, value.zero_, own.sum, lambda: value + 1):
        with pytest.raises(RuntimeError, match="on the host"):
            use()


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1, "warmup_step": 0}], ids=str)
@pytest.mark.parametrize("names", ["S0", "S1", "R"])
def test_sharded_as_the_unsharded(ranks: Run, names: str, options: dict[str, Any]) -> None:
    ranks(as_whole, 2, [2], [names], UNEVEN, options, at_least=1)


@pytest.mark.parametrize("names", [["R", "S0"], ["S0", "S1"], ["S0", "S0"]], ids="-".join)
def test_over_two_dimensions_of_a_mesh(ranks: Run, names: list[str]) -> None:
    ranks(as_whole, 4, [2, 2], names, UNEVEN, {})


def test_eight_ranks_and_four_matrices(ranks: Run) -> None:
    ranks(as_whole, 8, [8], ["S0"], MATRICES, {}, at_least=1)


def gradients_on_some(device: str) -> None:
    mesh = init_device_mesh(device, (2,))
    plain = whole(MATRICES, device)
    sharded = spread(plain, mesh, [Shard(0)])
    optimizer = make(list(sharded), [])
    give_gradients(plain, sharded, 0)
    if dist.get_rank() == 1:
        sharded[2].grad = None
    before = [parameter.to_local().clone() for parameter in sharded]  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="only some ranks have gradients of parameter 2"):
        optimizer.step()
    for parameter, was in zip(sharded, before, strict=True):
        assert torch.equal(parameter.to_local(), was)  # type: ignore[attr-defined]


def test_gradients_that_only_some_ranks_have_are_refused(ranks: Run, request: pytest.FixtureRequest) -> None:
    if "cuda" in request.node.name:
        pytest.skip("not looked for on CUDA: the host would wait for the device")
    ranks(gradients_on_some, 2)


def meshes_of_some(device: str) -> None:
    outboard.muon.set_ns_compile(False)
    pair, everyone = DeviceMesh(device, [0, 1]), DeviceMesh(device, [0, 1, 2])
    plain = whole(((16, 24), (24, 16)), device)
    sharded = spread(plain[:1], pair, [Shard(0)]) + spread(plain[1:], everyone, [Shard(1)])
    theirs, ours = make(list(plain), []), make(list(sharded), [])
    for seed in range(2):
        give_gradients(plain, sharded, seed)
        if dist.get_rank() == 2:
            sharded[0].grad = None
        theirs.step()
        ours.step()
    for one, other in zip(plain, sharded, strict=True):
        if other.device_mesh.get_coordinate() is not None:  # type: ignore[attr-defined]
            torch.testing.assert_close(one, other.full_tensor())  # type: ignore[attr-defined]


def test_a_mesh_that_a_rank_is_not_in(ranks: Run) -> None:
    ranks(meshes_of_some, 3)


def fused_and_mixed(device: str, dim: int) -> None:
    outboard.muon.set_ns_compile(False)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    # Borders of shards lie within the second of three parts; every second matrix is bf16.
    plain = whole(((192, 64),) * 4, device)
    plain = [
        one.detach().to(torch.bfloat16 if i % 2 else torch.float32).requires_grad_() for i, one in enumerate(plain)
    ]
    sharded = spread(plain, mesh, [Shard(dim)])
    theirs, ours = (
        outboard.Muon([{"params": list(some), "use_muon": True, "split": 3}], lr=0.02) for some in (plain, sharded)
    )
    for seed in range(2):
        give_gradients(plain, sharded, seed)
        theirs.step()
        ours.step()
    assert_as_whole(plain, sharded, device)


@pytest.mark.parametrize("dim", [0, 1])
def test_fused_matrices_and_mixed_dtypes(ranks: Run, dim: int) -> None:
    ranks(fused_and_mixed, 2, dim, at_least=1)


def stacks_and_convolutions(device: str, dim: int) -> None:
    outboard.muon.set_ns_compile(False)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    shapes = ((5, 16, 32), (9, 4, 3, 3))
    plain = whole(shapes, device)
    sharded = spread(plain, mesh, [Shard(dim)])
    theirs, ours = make(plain, []), make(list(sharded), [])
    for seed in range(2):
        give_gradients(plain, sharded, seed)
        theirs.step()
        ours.step()
    assert_as_whole(plain, sharded, device)


@pytest.mark.parametrize("dim", [0, 1])
def test_more_dimensions(ranks: Run, dim: int) -> None:
    ranks(stacks_and_convolutions, 2, dim, at_least=1)


def clipped(device: str, dim: int) -> None:
    outboard.muon.set_ns_compile(False)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    # With a border between shards within a head: 3 heads of 6 rows.
    shapes = ((18, 16), (18, 16))
    config = {"q_indices": [0, 1, 2], "k_indices": [0, 1, 2], "head_dim": 6, "threshold": 10.0}
    names = ["layers.0.q_proj.weight", "layers.0.k_proj.weight"]
    plain = whole(shapes, device)
    sharded = spread(plain, mesh, [Shard(dim)])
    theirs, ours = (
        outboard.Muon([{"params": list(some), "use_muon": True, "names": names}], clip_config=config)
        for some in (plain, sharded)
    )
    logits = {0: torch.tensor([40.0, 5.0, 11.0])}
    for seed in range(2):
        give_gradients(plain, sharded, seed)
        theirs.step(qk_logits=logits)
        ours.step(qk_logits=logits)
    assert_as_whole(plain, sharded, device)


@pytest.mark.parametrize("dim", [0, 1])
def test_clipping_of_sharded_projections(ranks: Run, dim: int) -> None:
    ranks(clipped, 2, dim, at_least=1)


# ---- Without and with offload, and checkpoints: bit for bit ---------------------------------------------------------


class Model(torch.nn.Module):
    """Four matrices and three vectors."""

    def __init__(self, mesh: Any, device: str, vectors: Any) -> None:
        super().__init__()
        for name, shapes in (("matrix", MATRICES), ("vector", vectors)):
            for index, one in enumerate(spread(whole(shapes, device), mesh, [Shard(0)])):
                self.register_parameter(f"{name}{index}", one)

    def split(self) -> tuple[list[Any], list[Any]]:
        parameters = dict(self.named_parameters())
        return tuple(  # type: ignore[return-value]
            [value for name, value in parameters.items() if name.startswith(kind)] for kind in ("matrix", "vector")
        )


def make_muon(model: Model) -> torch.optim.Optimizer:
    return make(*model.split())


def make_adamw(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True)


def make_sgd(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, foreach=True)


MAKERS = {"muon": make_muon, "adamw": make_adamw, "sgd": make_sgd}


def turn_on(optimizer: torch.optim.Optimizer) -> Any:
    """Keep the state of either kind on the host; return what turns that off and on."""
    if isinstance(optimizer, outboard.Muon):
        optimizer.turn_on_cpu_offload()
        return optimizer
    return outboard.offload_state(optimizer, batches=3)


def step(model: Model, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    optimizer.step()


def assert_same(one: Model, other: Model) -> None:
    for (name, left), right in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(left.to_local(), right.to_local()), name  # type: ignore[operator]


def on_and_off(device: str, kind: str, vectors: Any, toggles: bool) -> None:
    make_one = MAKERS[kind]
    outboard.muon.set_ns_compile(False)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    one, other = Model(mesh, device, vectors), Model(mesh, device, vectors)
    theirs, ours = make_one(one), make_one(other)
    with with_lanes():
        handle = turn_on(ours)
        for seed in range(6 if toggles else 3):
            if toggles:
                (handle.turn_on_cpu_offload if seed // 2 % 2 == 0 else handle.turn_off_cpu_offload)()
            step(one, theirs, seed)
            step(other, ours, seed)
            assert_same(one, other)


@pytest.mark.parametrize("toggles", [False, True])
@pytest.mark.parametrize("vectors", [(), VECTORS], ids=["matrices", "and-vectors"])
@pytest.mark.parametrize("kind", list(MAKERS))
@pytest.mark.parametrize("size", [1, 2])
def test_the_same_bits_as_without(ranks: Run, size: int, kind: str, vectors: Any, toggles: bool) -> None:
    ranks(on_and_off, size, kind, vectors, toggles)


def checkpointed(device: str, kind: str, vectors: Any, folder: str, asks: bool) -> None:
    make_one = MAKERS[kind]
    outboard.muon.set_ns_compile(False)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    one, first, second = (Model(mesh, device, vectors) for _ in range(3))
    uninterrupted, saving, resumed = make_one(one), make_one(first), make_one(second)
    with with_lanes():
        turn_on(saving)
        for seed in range(3):
            step(one, uninterrupted, seed)
            step(first, saving, seed)
        if isinstance(saving, outboard.Muon):
            # Saved after it was turned off, or as it is where that was asked for.
            (saving.turn_on_cpu_offload if asks else saving.turn_off_cpu_offload)(*[True] * asks)
        through_torch = copy.deepcopy(saving.state_dict())
        dcp.save({"optimizer": get_optimizer_state_dict(first, saving)}, checkpoint_id=folder)

        third = Model(mesh, device, vectors)
        deep = make_one(third)
        for model in (second, third):
            for target, source in zip(model.parameters(), first.parameters(), strict=True):
                target.data.copy_(source.data)
        deep.load_state_dict(through_torch)
        if asks:
            turn_on(resumed)
            if isinstance(resumed, outboard.Muon):
                resumed.turn_on_cpu_offload(checkpoint=True)
        loaded = {"optimizer": get_optimizer_state_dict(second, resumed)}
        dcp.load(loaded, checkpoint_id=folder)
        set_optimizer_state_dict(second, resumed, loaded["optimizer"], options=StateDictOptions(strict=True))
        if not asks:
            turn_on(resumed)
        for seed in range(3, 6):
            step(one, uninterrupted, seed)
            step(second, resumed, seed)
            step(third, deep, seed)
        assert_same(one, second)
        assert_same(one, third)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize(("size", "vectors"), [(1, VECTORS), (2, VECTORS), (8, ((3,), (5,), (128,)))])
@pytest.mark.parametrize("asks", [False, True], ids=["turned-off", "while-on"])
def test_checkpoints_go_on_with_the_same_bits(
    ranks: Run, size: int, vectors: Any, kind: str, asks: bool, tmp_path: Path
) -> None:
    # Over eight ranks some own no matrix, and vectors are shorter than the ranks are many.
    ranks(checkpointed, size, kind, vectors, str(tmp_path / "checkpoint"), asks)
