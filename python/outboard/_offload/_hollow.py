"""State tensors that stay the same objects on the device while their memory comes and goes.

Between steps such a tensor has its shape, dtype and device, and a storage of 0 bytes; its values are in host memory.
Whoever uses its values then gets an error instead of a read at address 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from outboard import _sharded
from outboard._offload._batches import lay_out
from outboard._offload._carrier import Carrier, Carriers, can_offload
from outboard._offload._travel import Item, is_dense, local, make_item, nbytes
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


def _refuse(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} of a state tensor whose values are on the host: call turn_off_cpu_offload() first, or read "
        "host_buffers(); an optimizer that uses state beyond its part of a group needs offload_state(..., batches=1)"
    )


class _Hollow:
    """What answers for a tensor whose values are elsewhere."""

    # Without slots of its own a class can be exchanged for its base, in place.
    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what needs no values; refuse the rest."""
        if func not in _HARMLESS and func not in _ALIASES:
            raise _refuse(getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _ALIASES:
            _mark(result)
        return result

    def __repr__(self: Any, **_: Any) -> str:
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {self.device}: its values are on the host)"


class HollowTensor(_Hollow, torch.Tensor):  # type: ignore[misc]
    """A state tensor whose values are on the host."""

    __slots__ = ()


def _full_tensor(self: Any, *_: Any, **__: Any) -> Any:
    raise _refuse("full_tensor")


def _redistribute(self: Any, *_: Any, **__: Any) -> Any:
    raise _refuse("redistribute")


@functools.cache
def _hollow_sharded() -> Any:
    """Return the class of DTensors whose values are on the host.

    The tensor within is a `HollowTensor`, which by itself would not do: torch's dispatcher calls kernels on it.
    """
    members = {"__slots__": (), "__module__": __name__, "full_tensor": _full_tensor, "redistribute": _redistribute}
    return type("HollowDTensor", (_Hollow, _sharded.kind()), members)


def _mark(tensor: torch.Tensor) -> None:
    own = local(tensor)
    if own is not tensor:
        tensor.__class__ = _hollow_sharded()
    own.__class__ = HollowTensor


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are elsewhere."""
    return type(local(tensor)) is HollowTensor


def hollow_out(tensor: torch.Tensor, shell: torch.Tensor) -> None:
    """Put a tensor, a plain one or a DTensor, over a shell, and refuse to whoever uses its values."""
    if not is_hollow(tensor):
        local(tensor).data = shell
        _mark(tensor)


def fill_in(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Put a tensor over memory; its values may be used."""
    own = local(tensor)
    if type(own) is HollowTensor:
        own.__class__ = torch.Tensor  # type: ignore[assignment]
        if own is not tensor:
            tensor.__class__ = _sharded.kind()
    own.data = memory


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
        fill_in(self.tensor, memory)

    def leave(self) -> None:
        """Leave the tensor without memory; nothing happens if it has none."""
        hollow_out(self.tensor, self._shell)
        self.item.forget()


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

    def take(self, named: Sequence[Named], values: Mapping[int, torch.Tensor] | None = None) -> None:
        """Bring state tensors to the host, and leave them without memory; those that are there stay there.

        Parameters
        ----------
        named : sequence of (str, Tensor)
        values : mapping, optional
            By a tensor's id: other values than those that it has on the device, which are not read then.
        """
        new = [(name, tensor) for name, tensor in named if id(tensor) not in self._tenants and _can_leave(tensor)]
        try:
            for carrier, tenants in self._reserve(new):
                for tenant in tenants:
                    source = (values or {}).get(id(tenant.tensor), tenant.tensor)
                    local(tenant.item.host).copy_(local(source))
                    carrier.shuttle.fill([tenant.item.slot])
                    tenant.leave()
        except BaseException:
            self.recover()
            raise

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

    def recover(self) -> None:
        """After a failure: tensors with values on the host have none on the device, and the others are as they were.

        Whatever was on its way to the device is taken off it: the host keeps what it had.
        """
        try:
            self.carriers.recall()
        finally:
            for key, tenant in list(self._tenants.items()):
                shuttle = self._carrier(tenant.tensor).shuttle
                if shuttle.places([tenant.item.slot]) != ["pending"]:
                    tenant.leave()
                else:
                    shuttle.free([tenant.item.slot])
                    del self._tenants[key]

    def keep_only(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give up the host memory of tensors that are no longer among these."""
        kept = {id(tensor) for tensor in tensors}
        for key, tenant in list(self._tenants.items()):
            if key not in kept:
                carrier = self._carrier(tenant.tensor)
                carrier.settle()
                carrier.shuttle.free([tenant.item.slot])
                del self._tenants[key]

    def give_back(self) -> None:
        """Bring all values back to their devices, in memory of their own, and free the host memory."""
        self.carriers.settle()
        try:
            for tenant in self._tenants.values():
                own, host = local(tenant.tensor), local(tenant.item.host)
                memory = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=own.device)
                tenant.enter(memory.copy_(host))
        except BaseException:
            # The device has no room: everything stays where it was.
            for tenant in self._tenants.values():
                tenant.leave()
            raise
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


def shell_like(pattern: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
    """Make a state tensor for `HollowStates.take` with other values: it has no memory on the device.

    Parameters
    ----------
    pattern : Tensor
        It has the state's shape on this rank, strides, dtype and device.
    parameter : Tensor
        The state is spread over ranks as this is.

    Returns
    -------
    Tensor or None
        None for what stays on its device.
    """
    own = torch.empty_like(pattern, memory_format=torch.preserve_format)
    made = _sharded.like(own, parameter)
    if not _can_leave(made):
        return None
    own.untyped_storage().resize_(0)
    return made


class HollowTraffic:
    """One step's way through batches of state tensors: each comes before it is used, and goes after.

    Parameters
    ----------
    states : HollowStates
        Where they live between steps.
    batches : sequence of sequences of Tensor
        The state tensors of each batch. Those that stay on the device are left alone.
    """

    def __init__(self, states: HollowStates, batches: Sequence[Sequence[torch.Tensor]]) -> None:
        self._states = states
        self._batches = [states.tenants(tensors) for tensors in batches]
        self._is_coming = [False] * len(batches)
        sizes: dict[Carrier, int] = {}
        for by_carrier in self._batches:
            for carrier, tenants in by_carrier.items():
                end = lay_out([tenant.item for tenant in tenants], 0)
                sizes[carrier] = max(sizes.get(carrier, 0), end)
        for carrier, size in sizes.items():
            carrier.arena_bytes = size

    def _bring(self, index: int) -> None:
        if index < len(self._batches) and not self._is_coming[index]:
            self._is_coming[index] = True
            for carrier, tenants in self._batches[index].items():
                carrier.bring([tenant.item for tenant in tenants], index % 2)

    def arrive(self, index: int) -> None:
        """Let the current stream have the state of a batch from here on."""
        self._bring(index)
        # The next one follows behind it, into the other arena.
        self._bring(index + 1)
        for carrier, tenants in self._batches[index].items():
            carrier.arrive([tenant.item for tenant in tenants])
            arena = carrier.arena(index % 2)
            for tenant in tenants:
                tenant.enter(local(tenant.item.view(arena)))

    def leave(self, index: int) -> None:
        """Send the state of a batch home: what uses it has been issued."""
        for carrier, tenants in self._batches[index].items():
            carrier.send([tenant.item for tenant in tenants], index % 2)
            for tenant in tenants:
                tenant.leave()

    def end(self) -> None:
        """End the step: give the arenas back."""
        for carrier in self._states.carriers.all():
            carrier.end_step()

    def abandon(self) -> None:
        """End a step that has failed: the host keeps what it had of what was on the device."""
        try:
            self._states.recover()
        finally:
            self.end()
