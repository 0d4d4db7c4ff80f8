"""Checkpoints over ranks: torch.distributed.checkpoint, its helpers, other numbers of ranks, torch's own optimizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import outboard
from oracle import assert_same
from ranks import batches, host, model, small_ones_have_hooks, whole, with_lanes


def shard(module: torch.nn.Module, device: str) -> Any:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    module = module.to(device)
    for block in module:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def ours(module: Any, **options: Any) -> outboard.AdamW:
    with with_lanes():
        optimizer = outboard.AdamW(module.parameters(), lr=1e-2, threads=1, **options)
    return optimizer.attach(module)


def torchs(module: Any, device: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)


def train(module: Any, optimizer: torch.optim.Optimizer, device: str, seed: int, dtype: torch.dtype) -> list[float]:
    """Train on the same batches on every rank: the mean of equal gradients is the same over 1, 2 and 4 ranks."""
    losses = []
    for x in batches(3, seed=seed, dtype=dtype):
        loss = module(x.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything(module: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return all weights and all state, whole, in host memory."""
    found = {}
    for name, p in module.named_parameters():
        found[name] = whole(p).detach().cpu().clone()
        for key, value in optimizer.state[p].items():
            if isinstance(value, DTensor):
                mesh, local = value.device_mesh, value.to_local()
                # Gathered on the mesh's device: the state is in host memory.
                on_mesh = DTensor.from_local(
                    local.to(mesh.device_type), mesh, value.placements, shape=value.shape, stride=value.stride()
                )
                # gloo knows no int16.
                value = (
                    on_mesh.to(torch.int32).full_tensor().to(torch.int16)
                    if local.dtype is torch.int16
                    else whole(on_mesh)
                )
            found[f"{name}.{key}"] = value.detach().cpu().clone()
    return found


def check(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_same(got[name].to(value.dtype), value, name)


def save(device: str, path: str, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    small_ones_have_hooks()
    module = shard(model(dtype=dtype), device)
    optimizer = ours(module)
    train(module, optimizer, device, 1, dtype)
    weights, state = get_state_dict(module, optimizer)
    planes = [value for entry in state["state"].values() for key, value in entry.items() if key != "step"]
    assert all(isinstance(plane, DTensor) for plane in planes)
    assert all(plane.to_local().device.type == "cpu" for plane in planes)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{path}/dcp")
    saved = everything(module, optimizer)
    losses = train(module, optimizer, device, 2, dtype)
    after = everything(module, optimizer)
    if dist.get_rank() == 0:
        torch.save((saved, losses, after), f"{path}/wanted.pt")


def load(device: str, path: str, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    small_ones_have_hooks()
    saved, losses, after = torch.load(f"{path}/wanted.pt")
    module = shard(model(dtype=dtype), device)
    # It has made steps of its own, which are to be forgotten.
    optimizer = ours(module)
    train(module, optimizer, device, 7, dtype)
    weights, state = get_state_dict(module, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{path}/dcp")
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=state)
    check(everything(module, optimizer), saved)
    got = train(module, optimizer, device, 2, dtype)
    if dtype is torch.float32:
        # Means of equal gradients over 1, 2 and 4 ranks have the same bits.
        assert got == losses
        check(everything(module, optimizer), after)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_by_two_ranks_loaded_by_one_and_by_four(ranks, tmp_path, dtype) -> None:
    ranks(save, 2, str(tmp_path), dtype)
    for world_size in (2, 1, 4):
        ranks(load, world_size, str(tmp_path), dtype, at_least=1)


def fresh(device: str, path: str) -> None:
    """As `load`, into an optimizer that nobody has asked for its state."""
    saved, _, _ = torch.load(f"{path}/wanted.pt")
    module = shard(model(), device)
    optimizer = ours(module)
    state = {"model": get_model_state_dict(module), "optimizer": get_optimizer_state_dict(module, optimizer)}
    dcp.load(state, checkpoint_id=f"{path}/dcp")
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    check(everything(module, optimizer), saved)


def test_loaded_by_a_fresh_optimizer(ranks, tmp_path) -> None:
    ranks(save, 2, str(tmp_path), "float32")
    ranks(fresh, 2, str(tmp_path))


def directions(device: str) -> None:
    """From torch's AdamW and back, each going on with the bits of never having changed."""
    wanted = shard(model(), device)
    theirs = torchs(wanted, device)
    train(wanted, theirs, device, 1, torch.float32)

    def move(old: Any, old_optimizer: Any, new: Any, new_optimizer: Any) -> None:
        # Copied: torch's own takes over the very tensors.
        weights, state = copy.deepcopy(get_state_dict(old, old_optimizer))
        set_state_dict(new, new_optimizer, model_state_dict=weights, optim_state_dict=state)

    got = shard(model(), device)
    optimizer = ours(got)
    move(wanted, theirs, got, optimizer)
    back = shard(model(), device)
    again = torchs(back, device)
    move(got, optimizer, back, again)
    losses = train(wanted, theirs, device, 2, torch.float32)
    assert train(back, again, device, 2, torch.float32) == losses
    for p, q in zip(wanted.parameters(), back.parameters(), strict=True):
        assert_same(host(q), host(p))
    if device == "cpu":
        assert train(got, optimizer, device, 2, torch.float32) == losses
        for p, q in zip(wanted.parameters(), got.parameters(), strict=True):
            assert_same(host(q), host(p))
            assert_same(host(optimizer.state[q]["exp_avg"]), host(theirs.state[p]["exp_avg"]))


def test_from_torch_and_back(ranks) -> None:
    ranks(directions, 2)


def full(device: str, path: str) -> None:
    """A whole state dict, gathered on rank 0 a tensor at a time, and loaded by all or from rank 0."""
    module = shard(model(), device)
    optimizer = ours(module)
    train(module, optimizer, device, 1, torch.float32)
    saved = everything(module, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(module, optimizer, options=options)
    if dist.get_rank() == 0:
        for name, p in model().named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                value = state["state"][name][key]
                assert type(value) is torch.Tensor
                assert value.shape == p.shape
                assert_same(value, saved[f"{name}.{key}"], f"{key} of {name}")
    for broadcasts in (False, True):
        other = shard(model(), device)
        another = ours(other)
        if not broadcasts:
            whole_state = [copy.deepcopy((weights, state)) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(whole_state, src=0)
            given = whole_state[0]
        else:
            # Copied: what is given is changed.
            given = copy.deepcopy((weights, state)) if dist.get_rank() == 0 else ({}, {})
        into = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcasts)
        set_model_state_dict(other, given[0], options=into)
        set_optimizer_state_dict(other, another, given[1], options=into)
        check(everything(other, another), saved)


def test_full_state_dicts(ranks, tmp_path) -> None:
    ranks(full, 2, str(tmp_path))


def whole_by_hand(device: str) -> None:
    """A checkpoint of one process, loaded by `load_state_dict` on every rank: each takes its part."""
    alone = model().to(device)
    single = outboard.AdamW(alone.parameters(), lr=1e-2, threads=1)
    train(alone, single, device, 1, torch.float32)
    module = shard(model(), device)
    optimizer = ours(module)
    optimizer.load_state_dict(single.state_dict())
    for (name, p), q in zip(alone.named_parameters(), module.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            found = everything(module, optimizer)[f"{name}.{key}"]
            assert_same(found, single.state[p][key].cpu(), f"{key} of {name}")
        assert float(optimizer.state[q]["step"]) == 3


def test_a_checkpoint_of_one_process(ranks) -> None:
    ranks(whole_by_hand, 2)


def asynchronous(device: str, path: str) -> None:
    """Steps go on while a checkpoint is written; what is written is what was when it was asked for."""
    # The writer's thread talks over a group of its own, in host memory.
    group = dist.new_group(backend="gloo")
    module = shard(model(), device)
    optimizer = ours(module)
    train(module, optimizer, device, 1, torch.float32)
    saved = everything(module, optimizer)
    state = {"optimizer": get_optimizer_state_dict(module, optimizer), "model": get_model_state_dict(module)}
    future = dcp.async_save(state, checkpoint_id=f"{path}/async", process_group=group)
    train(module, optimizer, device, 2, torch.float32)
    future.result()
    other = shard(model(), device)
    another = ours(other)
    state = {"optimizer": get_optimizer_state_dict(other, another), "model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=f"{path}/async")
    set_state_dict(other, another, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    check(everything(other, another), saved)


def test_async_save(ranks, tmp_path) -> None:
    ranks(asynchronous, 2, str(tmp_path))


def uneven(device: str, path: str) -> None:
    """Shards of different sizes, and none on some ranks, of weights and state."""
    torch.manual_seed(5)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    module = torch.nn.Sequential(torch.nn.Linear(64, 3), torch.nn.Linear(3, 7, bias=False), torch.nn.Linear(7, 64))
    module = fully_shard(module.to(device), mesh=mesh)
    optimizer = ours(module)
    is_first = dist.get_world_size() == 4
    if is_first:
        train(module, optimizer, device, 1, torch.float32)
        assert any(not host(p).numel() for p in module.parameters()) == (dist.get_rank() == 3)
        saved = everything(module, optimizer)
        dcp.save({"optimizer": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=f"{path}/uneven")
        if dist.get_rank() == 0:
            torch.save({k: v for k, v in saved.items() if "exp_avg" in k}, f"{path}/uneven.pt")
    else:
        state = {"optimizer": get_optimizer_state_dict(module, optimizer)}
        dcp.load(state, checkpoint_id=f"{path}/uneven")
        set_optimizer_state_dict(module, optimizer, state["optimizer"])
        found = everything(module, optimizer)
        check({k: v for k, v in found.items() if "exp_avg" in k}, torch.load(f"{path}/uneven.pt"))


def test_uneven_and_empty_shards(ranks, tmp_path) -> None:
    ranks(uneven, 4, str(tmp_path))
    for world_size in (1, 2, 3):
        ranks(uneven, world_size, str(tmp_path))


def files(device: str, path: str) -> None:
    """A file of one rank's part is refused; a whole state dict goes into files, and each rank loads its part of it."""
    module = shard(model(), device)
    optimizer = ours(module)
    train(module, optimizer, device, 1, torch.float32)
    for save_one in (outboard.checkpoint.save, outboard.checkpoint.save_safetensors):
        with pytest.raises(ValueError, match="spread over ranks"):
            save_one(optimizer, f"{path}/part")
    # By position, as `load_state_dict` has it: the helper's names are turned back.
    names = [name for name, _ in module.named_parameters()]
    whole_state = get_optimizer_state_dict(
        module, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank() == 0:
        state = {number: whole_state["state"][name] for number, name in enumerate(names)}
        groups = [{**whole_state["param_groups"][0], "params": list(range(len(names)))}]
        outboard.checkpoint.save({"state": state, "param_groups": groups}, f"{path}/whole.pt")
        outboard.checkpoint.save_safetensors({"state": state, "param_groups": groups}, f"{path}/whole")
    dist.barrier()
    saved = everything(module, optimizer)
    for load_one, name in (
        (outboard.checkpoint.load, "whole.pt"),
        (outboard.checkpoint.load_safetensors, "whole"),
    ):
        other = shard(model(), device)
        another = ours(other)
        load_one(f"{path}/{name}", another)
        found = everything(other, another)
        check(
            {key: value for key, value in found.items() if "exp_avg" in key},
            {key: value for key, value in saved.items() if "exp_avg" in key},
        )


def test_files_of_one_process(ranks, tmp_path) -> None:
    ranks(files, 2, str(tmp_path))
