"""What torch's wrappers of models do with gradients and weights: DDP, FSDP2, and those that cannot be followed.

- `DistributedDataParallel` averages gradients at the end of backward: they are final after it.
- FSDP2 (`fully_shard`) reads the weights as flat shards, on streams of its own, whenever it gathers the parameters of a
  unit. Their gradients are final in their own hooks.
- `DataParallel` copies weights in C++, and FSDP1 reads and writes flat tensors that the parameters are views of.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import nullcontext
from typing import Any

import torch

from outboard import _pending


def is_made_by_zero() -> bool:
    """Whether an optimizer is being made by `ZeroRedundancyOptimizer`, which gives it a share of the parameters."""
    # It says so nowhere else. From here: this function, the constructors of the optimizer, and who calls them.
    frame = sys._getframe(1) if "torch.distributed.optim.zero_redundancy_optimizer" in sys.modules else None
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "torch.distributed.optim.zero_redundancy_optimizer":
            return True
        frame = frame.f_back
    return False


def is_flattened(parameter: torch.Tensor) -> bool:
    """Whether FSDP1 keeps a parameter in a flat one, of which a rank has what no attribute tells."""
    return getattr(parameter, "_fsdp_flattened", False) is True


def ddp_modules(model: torch.nn.Module) -> list[Any]:
    """Return the modules of a model that average gradients."""
    from torch.nn.parallel import DistributedDataParallel

    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def active_ddp() -> Any:
    """Return the DDP wrapper whose forward is under way on this thread, or None."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    # Private in torch: without it, a model that is wrapped after `attach` is not noticed.
    return getattr(getattr(module, "DistributedDataParallel", None), "_active_ddp_module", None)


def _is_fsdp2(module: torch.nn.Module) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def is_opaque(model: torch.nn.Module) -> bool:
    """Whether weights are read, or gradients changed, at times that nobody tells."""
    from torch.nn.parallel import DataParallel

    for module in model.modules():
        if isinstance(module, DataParallel) or type(module).__name__ == "FullyShardedDataParallel":
            return True
        if _is_fsdp2(module) and _groups_of(module) is None:
            return True
    return any(not _pending.can_mark(parameter) for parameter in model.parameters())


def _groups_of(module: Any) -> list[Any] | None:
    """Return the groups of parameters that a module of FSDP2 gathers; None if this torch has them elsewhere."""
    try:
        state = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        groups = [group for group in groups if group is not None]
        known = all(callable(group.unshard) and callable(group.comm_ctx.get_all_gather_streams) for group in groups)
        known = known and all(isinstance(p.sharded_param, torch.Tensor) for group in groups for p in group.fsdp_params)
    except AttributeError:
        return None
    return groups if known else None


def fsdp_groups(model: torch.nn.Module) -> list[Any]:
    """Return all groups of parameters that FSDP2 gathers for a model, each once."""
    groups: dict[int, Any] = {}
    for module in model.modules():
        if _is_fsdp2(module):
            groups.update((id(group), group) for group in _groups_of(module) or ())
    return list(groups.values())


def shards_of(group: Any) -> list[torch.Tensor]:
    """Return the sharded parameters of a group of FSDP2, as they are now."""
    return [parameter.sharded_param for parameter in group.fsdp_params]


def reading_stream(group: Any, async_op: bool) -> Any:
    """Return a context in which the current stream is that on which FSDP2 is going to read a group's shards."""
    stream, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
    return torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else nullcontext()


def keeps_gradients_in_buckets(module: Any) -> bool:
    """Whether a DDP wrapper's gradients are views of its buckets, which the next backward writes to."""
    return bool(getattr(module, "gradient_as_bucket_view", False))


def copies_gradients_to_host(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 keeps a parameter in host memory, and its copies of gradients overlap only if none is hooked."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and mesh.device_type != "cpu" and parameter.device.type == "cpu"


class Averaging:
    """Whether the gradients of DDP wrappers are averaged in the backward that follows: not under `no_sync()`."""

    def __init__(self) -> None:
        self._wrappers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._noted: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()

    def add(self, wrapper: torch.nn.Module) -> None:
        """Know a wrapper."""
        self._wrappers.add(wrapper)

    def note(self, wrapper: Any) -> None:
        """Note in forward, where it decides, what a wrapper is going to do: not in one that has no backward."""
        if torch.is_grad_enabled():
            self._noted[wrapper] = bool(wrapper.require_backward_grad_sync)

    def note_all(self, references: list[weakref.ref[Any]]) -> bool:
        """Note the wrappers in a forward that is compiled as a whole; whether any has gradients in buckets."""
        wrappers = [wrapper for reference in references if (wrapper := reference()) is not None]
        for wrapper in wrappers:
            self.note(wrapper)
        return any(map(keeps_gradients_in_buckets, wrappers))

    def is_on(self) -> bool:
        """Whether all of them average."""
        wrappers: list[Any] = list(self._wrappers)
        return all(self._noted.get(wrapper, wrapper.require_backward_grad_sync) for wrapper in wrappers)
