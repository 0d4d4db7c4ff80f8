"""Where an optimizer's state lives while it is offloaded: slots of host memory, and what is listed as staying."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outboard._offload._batches import Batch, Plan, balance, lay_out
from outboard._offload._carrier import Carrier, Carriers
from outboard._offload._host_state import HostState
from outboard._offload._probe import Expected, expected_bytes, expected_state
from outboard._offload._travel import (
    Item,
    local,
    make_item,
    nbytes,
    padded,
    rewrap,
    shared_storages,
    why_it_stays,
)

Group = dict[str, Any]

#: A parameter, a key of its state, and a tensor.
Entry = tuple[torch.Tensor, str, torch.Tensor]


@dataclass(frozen=True)
class Options:
    """See `outboard.offload_state`."""

    batches: int | None
    batch_bytes: int
    state_keys: frozenset[str] | None
    min_numel: int
    packed: bool
    pin: bool | None
    threads: int


class Residence:
    """The state of one optimizer, by parameter and key: in host memory, or, where it cannot leave, on the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self.options = options
        self._kind = type(optimizer).__name__
        self._names = _names(optimizer.param_groups)
        self._items: dict[torch.Tensor, dict[str, Item]] = {}
        self.carriers = Carriers(self._kind, threads=options.threads, pin=options.pin, keep_arenas=options.packed)
        self._expected: dict[tuple[int, torch.dtype, int], Expected | None] = {}
        #: What carries each item.
        self._home: dict[Item, Carrier] = {}
        #: Why tensors stay on the device, by parameter and key.
        self._reasons: dict[tuple[torch.Tensor, str], str] = {}
        self._plan: Plan | None = None
        self._keys_seen: set[str] = set()
        self.state = HostState(self)

    def describe(self) -> str:
        """Return the optimizer's name, for messages."""
        return self._kind

    def name_of(self, parameter: Any) -> str:
        """Return a parameter's name, for messages."""
        return self._names.get(id(parameter), "a parameter")

    def items_of(self, parameter: Any) -> dict[str, Item]:
        """Return what a parameter has on the host."""
        found = self._items.get(parameter) if isinstance(parameter, torch.Tensor) else None
        return {} if found is None else found

    def all_items(self) -> Iterator[tuple[torch.Tensor, Item]]:
        """Yield everything on the host."""
        for parameter, items in self._items.items():
            for item in items.values():
                yield parameter, item

    # ---- Devices ---------------------------------------------------------------------------------------------------

    def carrier_for(self, parameter: torch.Tensor) -> Carrier | None:
        """Return what carries state to a parameter's device; None where there is nothing to offload."""
        return self.carriers.of(parameter)

    def settle(self) -> None:
        """Wait on the host until what is under way is home."""
        self.carriers.settle()

    def close(self) -> None:
        """Give everything back; what was handed out stays as it is."""
        for _, item in self.all_items():
            item.forget()
        self._items.clear()
        self._home.clear()
        self.carriers.close()
        self._plan = None

    def places(self) -> dict[str, str]:
        """Return where each item is, by its name."""
        found: dict[str, str] = {}
        for carrier in self.carriers.all():
            carrier.shuttle.poll()
        for _, item in self.all_items():
            found[item.name] = self._home[item].shuttle.places([item.slot])[0]
        return found

    def stats(self) -> dict[str, Any]:
        """Return bytes and counts, summed over devices."""
        total: dict[str, Any] = {"device_bytes": 0}
        for carrier in self.carriers.all():
            total["device_bytes"] += carrier.device_bytes
            for key, value in carrier.shuttle.stats().items():
                if isinstance(value, int):
                    total[key] = total.get(key, 0) + value
        return total

    # ---- Slots -----------------------------------------------------------------------------------------------------

    def reserve(self, wanted: Sequence[Entry], carrier: Carrier, coming: Sequence[int] = ()) -> list[Item]:
        """Make items, side by side in host memory, for (parameter, key, a tensor like it); their values are unset.

        There is room beside them for those of the sizes in `coming`, in bytes.
        """
        names = [f"{key} of {self.name_of(parameter)}" for parameter, key, _ in wanted]
        slots = carrier.shuttle.reserve(names, [nbytes(value) for _, _, value in wanted], list(coming))
        made = []
        for (parameter, key, value), name, slot in zip(wanted, names, slots, strict=True):
            item = make_item(name, key, value, slot, carrier.shuttle)
            self._items.setdefault(parameter, {})[key] = item
            self._home[item] = carrier
            self._reasons.pop((parameter, key), None)
            made.append(item)
        self._plan = None
        return made

    def forget(self, parameter: torch.Tensor, key: str) -> Item:
        """Strike an item off; its slot is still to be freed."""
        self._plan = None
        return self._items[parameter].pop(key)

    def free(self, carrier: Carrier, items: Sequence[Item]) -> None:
        """Give slots back."""
        if items:
            carrier.settle()
            carrier.shuttle.free([item.slot for item in items])
            for item in items:
                del self._home[item]

    def put(self, values: Sequence[Entry]) -> None:
        """Give host slots these values, of any device: over what is there, or in new slots where that does not fit."""
        self.settle()
        new: dict[Carrier, list[Entry]] = {}
        for parameter, key, value in values:
            carrier = self.carrier_for(parameter)
            assert carrier is not None
            item = self.items_of(parameter).get(key)
            own = local(value)
            fits = item is not None and (item.dtype, item.shape) == (own.dtype, own.shape)
            if item is not None and fits and self._home[item] is carrier:
                # A copy that was given up may still read there.
                carrier.shuttle.settle([item.slot])
                local(item.host).copy_(own)
                if carrier.shuttle.places([item.slot]) == ["pending"]:
                    # It was to go home at the end of a step that has failed.
                    carrier.shuttle.fill([item.slot])
                self.state.raw(parameter)[key] = item.host
                continue
            if item is not None:
                self._drop(parameter, key)
            new.setdefault(carrier, []).append((parameter, key, value))
        for carrier, wanted in new.items():
            wanted.sort(key=lambda one: str(one[2].dtype))
            dense = [(parameter, key, _dense_like(value)) for parameter, key, value in wanted]
            for item, (parameter, key, value) in zip(self.reserve(dense, carrier), wanted, strict=True):
                local(item.host).copy_(local(value))
                self.state.raw(parameter)[key] = item.host
                carrier.shuttle.fill([item.slot])

    def replace(self, states: dict[Any, Any], values: Sequence[Entry]) -> None:
        """Make these states all there are, with values on the host beside what they hold."""
        self.settle()
        kept = {(parameter, key) for parameter, key, _ in values}
        for parameter, item in list(self.all_items()):
            is_there = states.get(parameter, {}).get(item.key) is item.host
            if not is_there and (parameter, item.key) not in kept:
                self._drop(parameter, item.key)
        self._reasons.clear()
        self._plan = None
        dict.clear(self.state)
        for key, state in states.items():
            self.state.set_raw(key, state)
        self.put(values)

    def _drop(self, parameter: torch.Tensor, key: str) -> None:
        item = self.forget(parameter, key)
        self.free(self._home[item], [item])

    def adopt(self) -> None:
        """Take over what others have put into the state, or have taken out of it, and follow parameters elsewhere."""
        foreign = []
        for parameter, items in list(self._items.items()):
            state = dict.get(self.state, parameter, {})
            carrier = self.carrier_for(parameter)
            for key, item in list(items.items()):
                value = state.get(key)
                if value is item.host:
                    if self._home[item] is carrier:
                        continue
                    # The parameter is on another device now.
                    self.settle()
                    value = state[key] = rewrap(local(item.host).clone(), item.host)
                if carrier is None:
                    self._drop(parameter, key)
                    continue
                if isinstance(value, torch.Tensor) and self.is_for_host(key, value):
                    foreign.append((parameter, key, value))
                else:
                    self._drop(parameter, key)
        fresh = []
        for parameter, state in dict.items(self.state):
            if not isinstance(parameter, torch.Tensor) or not isinstance(state, dict):
                continue
            items = self.items_of(parameter)
            new = {
                key: value
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and key not in items and (parameter, key) not in self._reasons
            }
            if new and self.carrier_for(parameter) is not None:
                fresh.append((parameter, new))
        foreign += self.sort_out(fresh) if fresh else []
        if foreign:
            self.put(foreign)

    # ---- What travels ----------------------------------------------------------------------------------------------

    def _reason(self, parameter: torch.Tensor, key: str, value: torch.Tensor, shared: frozenset[int]) -> str | None:
        keys = self.options.state_keys
        self._keys_seen.add(key)
        if keys is not None and key not in keys:
            return "not among state_keys"
        return why_it_stays(value, local(parameter).device, min_numel=self.options.min_numel, shared=shared)

    def sort_out(self, states: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> list[Entry]:
        """Return the tensors of states that travel; note why the others stay."""
        tensors = [value for _, state in states for value in state.values() if isinstance(value, torch.Tensor)]
        # A parameter or its gradient, kept as it is, lives on the device by itself.
        tensors += [own for parameter, _ in states for own in (parameter, parameter.grad) if own is not None]
        shared = shared_storages(tensors)
        found = []
        for parameter, state in states:
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                reason = self._reason(parameter, key, value, shared)
                if reason is None:
                    found.append((parameter, key, value))
                else:
                    self._reasons[parameter, key] = reason
        return found

    def is_for_host(self, key: str, value: Any) -> bool:
        """Whether a value, wherever it is, goes to the host when it is assigned or loaded: see `why_it_stays`."""
        if not isinstance(value, torch.Tensor):
            return False
        keys, own = self.options.state_keys, local(value)
        return (
            (keys is None or key in keys)
            and own.layout is torch.strided
            and type(own) in (torch.Tensor, torch.nn.Parameter)
            and value.dim() > 0
            and own.is_floating_point()
            and own.numel() >= max(self.options.min_numel, 1)
        )

    def staying(self) -> dict[str, str]:
        """Return why each tensor of the state that stays on the device does, by its name."""
        return {
            f"{key} of {self.name_of(parameter)}": reason
            for (parameter, key), reason in self._reasons.items()
            if key in self.state.raw(parameter)
        }

    def check_keys(self) -> None:
        """Refuse state keys that no parameter's state has.

        Raises
        ------
        ValueError
        """
        wanted = self.options.state_keys
        unknown = sorted((wanted or frozenset()) - self._keys_seen)
        if unknown and self._keys_seen:
            raise ValueError(
                f"state_keys names {', '.join(map(repr, unknown))}, and the state of {self._kind} has "
                f"{', '.join(map(repr, sorted(self._keys_seen)))}"
            )

    def look_ahead(self, optimizer: torch.optim.Optimizer) -> None:
        """Find out which state the optimizer will keep, where that can be known."""
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                kind = (index, parameter.dtype, parameter.dim())
                if kind not in self._expected:
                    self._expected[kind] = expected_state(optimizer, group, parameter)
        self._keys_seen.update(*(found.keys for found in self._expected.values() if found is not None))

    # ---- Births ----------------------------------------------------------------------------------------------------

    def take_home(self, states: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> list[Entry]:
        """Keep what an optimizer has left in states, items' keys left out; return new tensors that travel."""
        fresh = []
        for parameter, state in states:
            real, items = self.state.raw(parameter), self.items_of(parameter)
            for key in [key for key in real if key not in state and key not in items]:
                del real[key]
            real.update(state)
            new = {
                key: value
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and (parameter, key) not in self._reasons
            }
            if new:
                fresh.append((parameter, new))
        return self.sort_out(fresh) if fresh else []

    def bear(self, batch: Batch, born: list[Entry], following: Iterable[Batch]) -> None:
        """Send state home that the optimizer has just made on the device, ahead of what is to come in other batches."""
        carrier = batch.carrier
        # Of one dtype side by side, so that they travel in few copies.
        born = sorted(born, key=lambda one: str(one[2].dtype))
        items = self.reserve(born, carrier, self._coming(born, following))
        carrier.shuttle.bear([item.slot for item in items])
        in_use = max((other.offset + padded(other.nbytes) for other in self._items_in(batch, items)), default=0)
        end = lay_out(items, in_use)
        if self.options.packed and end <= carrier.arena_bytes:
            # By way of the arena: what the optimizer has allocated goes back at once, in the order of the stream.
            carrier.claim(batch.which)
            arena = carrier.arena(batch.which)
            for item, (_, _, value) in zip(items, born, strict=True):
                local(item.view(arena)).copy_(local(value))
            carrier.send(items, batch.which)
        else:
            carrier.send_apart(dict(zip(items, (value for _, _, value in born), strict=True)))
        for item, (parameter, key, _) in zip(items, born, strict=True):
            self.state.raw(parameter)[key] = item.host

    def _coming(self, born: list[Entry], following: Iterable[Batch]) -> list[int]:
        """Return the bytes of state that batches are about to make: as is known, or else as what has just been made."""
        made = sum(nbytes(value) for _, _, value in born)
        of = sum(nbytes(parameter) for parameter in {parameter for parameter, _, _ in born})
        return [
            made * nbytes(parameter) // of if size is None else size
            for batch in following
            for parameter, size in batch.unborn
            if parameter.grad is not None and local(parameter).numel() >= self.options.min_numel
        ]

    def bear_apart(self, carrier: Carrier, born: list[Entry]) -> None:
        """As `bear`, of a parameter that was asked for out of turn."""
        items = self.reserve(born, carrier)
        carrier.shuttle.bear([item.slot for item in items])
        carrier.send_apart(dict(zip(items, (value for _, _, value in born), strict=True)))
        for item, (parameter, key, _) in zip(items, born, strict=True):
            self.state.raw(parameter)[key] = item.host

    def _items_in(self, batch: Batch, but: list[Item]) -> Iterator[Item]:
        left_out = set(map(id, but))
        for parameter in batch.parameters:
            for item in self.items_of(parameter).values():
                if id(item) not in left_out:
                    yield item

    # ---- Batches ---------------------------------------------------------------------------------------------------

    def plan(self, optimizer: torch.optim.Optimizer) -> Plan:
        """Return the batches of a step: those of the last one unless something has changed."""
        groups = optimizer.param_groups
        order = [(id(parameter), local(parameter).device) for group in groups for parameter in group["params"]]
        if self._plan is not None and self._plan.order == order:
            return self._plan
        self._names.update(_names(groups))
        self.look_ahead(optimizer)
        by_carrier: dict[Carrier, list[tuple[torch.Tensor, int]]] = {}
        known: set[torch.Tensor] = set()
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                carrier = self.carrier_for(parameter)
                if self._expected.get((index, parameter.dtype, parameter.dim())) is not None:
                    known.add(parameter)
                if carrier is not None:
                    by_carrier.setdefault(carrier, []).append((parameter, self._bytes_of(index, parameter)))
        plan = Plan([], {}, order)
        for carrier, sized in by_carrier.items():
            runs = balance(
                [size for _, size in sized], batches=self.options.batches, batch_bytes=self.options.batch_bytes
            )
            for index, run in enumerate(runs):
                batch = Batch(carrier, index, [sized[at][0] for at in run])
                items = [item for parameter in batch.parameters for item in self.items_of(parameter).values()]
                for item in items:
                    item.forget()
                batch.nbytes = max(lay_out(items, 0), sum(sized[at][1] for at in run))
                batch.unborn = [
                    (parameter, size if parameter in known else None)
                    for parameter, size in (sized[at] for at in run)
                    if not self.state.has(parameter)
                ]
                plan.batches.append(batch)
                plan.batch_of.update(dict.fromkeys(batch.parameters, batch))
            carrier.arena_bytes = max((b.nbytes for b in plan.batches if b.carrier is carrier), default=0)
        self._plan = plan
        return plan

    def _bytes_of(self, group: int, parameter: torch.Tensor) -> int:
        items = self.items_of(parameter)
        if items or self.state.has(parameter):
            return sum(padded(item.nbytes) for item in items.values())
        expected = self._expected.get((group, parameter.dtype, parameter.dim()))
        return padded(expected_bytes(expected, parameter, self.options.state_keys)) + 4 * padded(1)


def _dense_like(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype, on no device, whose elements fill one run of memory."""
    own = local(value)
    return rewrap(torch.empty_like(own, device="meta", memory_format=torch.preserve_format), value)


def _names(groups: Sequence[Group]) -> dict[int, str]:
    names: dict[int, str] = {}
    number = 0
    for group in groups:
        given = group.get("param_names") or group.get("names") or []
        for index, parameter in enumerate(group["params"]):
            names[id(parameter)] = given[index] if index < len(given) else f"parameter {number}"
            number += 1
    return names
