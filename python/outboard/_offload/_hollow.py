"""State tensors that stay the same objects on the device while their memory comes and goes.

Between steps such a tensor has its shape, dtype and device, and a storage of 0 bytes; its values are in host memory.
Whoever uses its values then gets an error instead of a read at address 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from outboard._offload._batches import lay_out
from outboard._offload._carrier import Carrier, Carriers, can_offload
from outboard._offload._travel import Item, is_dense, local, make_item, nbytes, padded
from outboard._pending import HARMLESS

#: What may be asked of a tensor whose values are elsewhere.
_HARMLESS = HARMLESS | frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in ("is_sparse", "is_meta", "nbytes")),
        *(torch.Tensor.untyped_storage, torch.Tensor.storage_offset, torch.Tensor.data_ptr, torch.Tensor.is_pinned),
    )
)

#: What returns the same tensor once more.
_ALIASES = frozenset((torch.Tensor.detach, torch.Tensor.view_as))


class HollowTensor(torch.Tensor):
    """A state tensor whose values are on the host."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what needs no values; refuse the rest."""
        if func not in _HARMLESS and func not in _ALIASES:
            name = getattr(func, "__name__", str(func))
            raise RuntimeError(
                f"{name} of a state tensor whose values are on the host: call turn_off_cpu_offload() first, or read "
                "host_buffers()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _ALIASES:
            result.__class__ = cls
        return result

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"HollowTensor({tuple(self.shape)}, {self.dtype}, {self.device}: its values are on the host)"


class _Tenant:
    """A state tensor and its item."""

    def __init__(self, tensor: torch.Tensor, item: Item) -> None:
        self.tensor = tensor
        self.item = item
        own = local(tensor)
        # What the tensor is over while its values are elsewhere. Its own storage may be a checkpoint's, too.
        self._shell = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device)
        self._shell.untyped_storage().resize_(0)

    def enter(self, memory: torch.Tensor) -> None:
        """Give the tensor memory on the device."""
        own = local(self.tensor)
        if type(own) is HollowTensor:
            own.__class__ = torch.Tensor  # type: ignore[assignment]
        own.data = memory

    def leave(self) -> None:
        """Leave the tensor without memory."""
        own = local(self.tensor)
        own.data = self._shell
        own.__class__ = HollowTensor


#: A name for messages, and a tensor.
Named = tuple[str, torch.Tensor]


class HollowStates:
    """Moves an optimizer's state tensors between the host and their devices.

    Parameters
    ----------
    threads : int
        Threads that touch new host memory.
    """

    def __init__(self, threads: int) -> None:
        self.carriers = Carriers("Muon", threads=threads, pin=None, keep_arenas=False)
        #: By the tensor's id; the tensors are kept.
        self._tenants: dict[int, _Tenant] = {}

    def host_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the host memory of a state tensor's values, after `settle`; None if it has not left the device."""
        found = self._tenants.get(id(tensor))
        return None if found is None else found.item.host

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Give a state tensor that is on the host other values, of what this rank has of it."""
        tenant = self._tenants[id(tensor)]
        # A copy that was given up may still read there.
        self._carrier(tensor).shuttle.settle([tenant.item.slot])
        local(tenant.item.host).copy_(values)

    def _carrier(self, tensor: torch.Tensor) -> Carrier:
        found = self.carriers.of(tensor)
        assert found is not None
        return found

    def take(self, named: Sequence[Named]) -> None:
        """Bring state tensors to the host, and leave them without memory; those that are there stay there."""
        new = [(name, tensor) for name, tensor in named if id(tensor) not in self._tenants and _can_leave(tensor)]
        for carrier, tenants in self._reserve(new):
            for tenant in tenants:
                local(tenant.item.host).copy_(local(tenant.tensor))
                carrier.shuttle.fill([tenant.item.slot])
                tenant.leave()

    def _reserve(self, named: Sequence[Named]) -> list[tuple[Carrier, list[_Tenant]]]:
        """Make tenants of tensors, side by side by dtype in the host memory of their devices."""
        by_carrier: dict[Carrier, list[Named]] = {}
        for name, tensor in sorted(named, key=lambda one: str(one[1].dtype)):
            by_carrier.setdefault(self._carrier(tensor), []).append((name, tensor))
        made = []
        for carrier, theirs in by_carrier.items():
            slots = carrier.shuttle.reserve([name for name, _ in theirs], [nbytes(tensor) for _, tensor in theirs])
            tenants = []
            for (name, tensor), slot in zip(theirs, slots, strict=True):
                tenant = _Tenant(tensor, make_item(name, "", tensor, slot, carrier.shuttle))
                self._tenants[id(tensor)] = tenant
                tenants.append(tenant)
            made.append((carrier, tenants))
        return made

    def keep_only(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give up the host memory of tensors that are no longer among these."""
        kept = {id(tensor) for tensor in tensors}
        for key, tenant in list(self._tenants.items()):
            if key not in kept:
                self._carrier(tenant.tensor).shuttle.free([tenant.item.slot])
                del self._tenants[key]

    def give_back(self) -> None:
        """Bring all values back to their devices, in memory of their own, and free the host memory."""
        self.carriers.settle()
        for tenant in self._tenants.values():
            own, host = local(tenant.tensor), local(tenant.item.host)
            memory = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=own.device)
            tenant.enter(memory.copy_(host))
        self._free()

    def _free(self) -> None:
        self._tenants.clear()
        self.carriers.close()

    def tenants(self, tensors: Iterable[torch.Tensor]) -> dict[Carrier, list[_Tenant]]:
        """Return those of these tensors that are on the host, by what carries them."""
        found: dict[Carrier, list[_Tenant]] = {}
        for tensor in tensors:
            tenant = self._tenants.get(id(tensor))
            if tenant is not None:
                found.setdefault(self._carrier(tensor), []).append(tenant)
        return found


def _can_leave(tensor: torch.Tensor) -> bool:
    own = local(tensor)
    return tensor.dim() > 0 and own.numel() > 0 and own.is_floating_point() and is_dense(own) and can_offload(tensor)


class HollowTraffic:
    """One step's way through batches of state tensors: each comes before it is used, and goes after.

    Parameters
    ----------
    states : HollowStates
        Where they live between steps.
    batches : sequence of callables
        Each returns the state tensors of a batch as they are now, with names: what does not exist yet is missing.
    """

    def __init__(self, states: HollowStates, batches: Sequence[Callable[[], list[Named]]]) -> None:
        self._states = states
        self._batches = batches
        self._coming: dict[int, dict[Carrier, list[_Tenant]]] = {}
        self._there: dict[int, dict[Carrier, list[_Tenant]]] = {}
        sizes: dict[Carrier, int] = {}
        for batch in batches:
            for carrier, tenants in states.tenants(tensor for _, tensor in batch()).items():
                end = lay_out([tenant.item for tenant in tenants], 0)
                sizes[carrier] = max(sizes.get(carrier, 0), end)
        for carrier, size in sizes.items():
            carrier.arena_bytes = size

    def _bring(self, index: int) -> None:
        if index >= len(self._batches) or index in self._coming:
            return
        self._coming[index] = self._states.tenants(tensor for _, tensor in self._batches[index]())
        for carrier, tenants in self._coming[index].items():
            carrier.bring([tenant.item for tenant in tenants], index % 2)

    def arrive(self, index: int) -> None:
        """Let the current stream have the state of a batch from here on."""
        self._bring(index)
        # The next one follows behind it, into the other arena.
        self._bring(index + 1)
        self._there[index] = self._coming.pop(index)
        for carrier, tenants in self._there[index].items():
            carrier.arrive([tenant.item for tenant in tenants])
            arena = carrier.arena(index % 2)
            for tenant in tenants:
                tenant.enter(local(tenant.item.view(arena)))

    def leave(self, index: int) -> None:
        """Send the state of a batch home: what uses it has been issued."""
        there = self._there.pop(index)
        known = {id(tenant.tensor) for tenants in there.values() for tenant in tenants}
        for carrier, tenants in there.items():
            carrier.send([tenant.item for tenant in tenants], index % 2)
            for tenant in tenants:
                tenant.leave()
                tenant.item.forget()
        born = [(name, tensor) for name, tensor in self._batches[index]() if id(tensor) not in known]
        for carrier, tenants in self._states._reserve([one for one in born if _can_leave(one[1])]):
            self._bear(carrier, tenants, index % 2)

    def _bear(self, carrier: Carrier, tenants: list[_Tenant], which: int) -> None:
        items = [tenant.item for tenant in tenants]
        carrier.shuttle.bear([item.slot for item in items])
        # By way of an arena: what the optimizer has allocated goes back at once, in the order of the stream, and the
        # device's memory does not grow with what is still on its way.
        needed = sum(padded(item.nbytes) + padded(1) for item in items)
        if needed > carrier.arena_bytes and any(carrier in coming for coming in self._coming.values()):
            # Others lie in the arenas, which cannot be exchanged now.
            carrier.send_apart({tenant.item: tenant.tensor for tenant in tenants})
            for tenant in tenants:
                tenant.leave()
            return
        carrier.arena_bytes = max(carrier.arena_bytes, needed)
        lay_out(items, 0)
        carrier.claim(which)
        arena = carrier.arena(which)
        for tenant in tenants:
            local(tenant.item.view(arena)).copy_(local(tenant.tensor))
        carrier.send(items, which)
        for tenant in tenants:
            tenant.leave()
            tenant.item.forget()

    def end(self) -> None:
        """End the step: give the arenas back."""
        for index, by_carrier in list(self._coming.items()):
            for carrier, tenants in by_carrier.items():
                carrier.discard([tenant.item for tenant in tenants])
            del self._coming[index]
        for carrier in self._states.carriers.all():
            carrier.end_step()

    def abandon(self) -> None:
        """End a step whose math has failed: the host keeps what it had of the batch that was under way."""
        for by_carrier in self._there.values():
            for carrier, tenants in by_carrier.items():
                carrier.discard([tenant.item for tenant in tenants])
                for tenant in tenants:
                    tenant.leave()
                    tenant.item.forget()
        self._there.clear()
        self.end()
