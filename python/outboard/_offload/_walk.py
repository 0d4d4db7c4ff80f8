"""One step's way through the batches: state comes before its part of a group, and goes after it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from outboard._offload._batches import Batch, Plan
from outboard._offload._carrier import Carrier
from outboard._offload._hollow import hollow_out
from outboard._offload._stand_in import Group, GroupValues
from outboard._offload._travel import Item, local

if TYPE_CHECKING:
    from outboard._offload._residence import Entry, Residence


@dataclass(eq=False)
class _Load:
    """Items that are on the device or on their way, with their tensors there."""

    views: dict[Item, torch.Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class _Part:
    group: int
    parameters: list[torch.Tensor]
    batch: Batch | None


class StateWalk:
    """Serves one call of an optimizer's own `step`. See `_stand_in.Walk`.

    Parameters
    ----------
    residence : Residence
        Where the optimizer's state lives.
    """

    def __init__(self, residence: Residence, groups: list[Group], plan: Plan) -> None:
        self._residence = residence
        self._groups = groups
        self.plan = plan
        #: The thread that steps.
        self.thread = threading.get_ident()
        #: The state of parameters whose batch is there, its tensors on the device.
        self.present: dict[torch.Tensor, dict[str, Any]] = {}
        #: What is on its way to the device for a batch that has not begun.
        self._coming: dict[Batch, _Load] = {}
        #: What is on the device, by batch.
        self._there: dict[Batch, _Load] = {}
        self._turn: Batch | None = None
        #: Parameters that were asked for out of turn.
        self._apart: dict[torch.Tensor, _Load] = {}

    @property
    def has_begun(self) -> bool:
        """Whether anything is on the device."""
        return any((self.present, self._coming, self._there, self._apart))

    # ---- What the stand-in asks for --------------------------------------------------------------------------------

    def _parts(self) -> list[_Part]:
        parts: list[_Part] = []
        for index, group in enumerate(self._groups):
            parts.append(_Part(index, [], None))
            for parameter in group["params"]:
                batch = self.plan.batch_of.get(parameter)
                current = parts[-1]
                if batch is not None and current.batch is not None and batch is not current.batch:
                    current = _Part(index, [], batch)
                    parts.append(current)
                current.batch = current.batch or batch
                current.parameters.append(parameter)
        return parts

    def parts(self) -> Iterator[Group]:
        """Yield the groups in parts, each of one batch."""
        parts = self._parts()
        count = [sum(part.group == index for part in parts) for index in range(len(self._groups))]
        values: dict[int, GroupValues] = {}
        for part in parts:
            group = self._groups[part.group]
            if part.batch is not None and part.batch is not self._turn:
                self.end_turn()
                self._turn = part.batch
            if count[part.group] == 1:
                yield group
                continue
            if part.group not in values:
                values[part.group] = GroupValues(group, self._residence.describe)
            narrowed = values[part.group].part(part.parameters)
            yield narrowed
            values[part.group].take(narrowed)
        if len(self.plan.batches) > 1:
            self.end_turn()

    def knows(self, key: object) -> bool:
        """Whether a parameter has state."""
        return self._residence.state.has(key)

    def put(self, key: Any, state: Any) -> None:
        """Replace the state of a parameter."""
        if isinstance(key, torch.Tensor) and key in self.plan.batch_of and isinstance(state, dict):
            if self.touch(key) is not state:
                # The optimizer writes to the one that it has given.
                self.present[key] = state
        else:
            self._residence.state.set_raw(key, state)

    def keys(self) -> list[Any]:
        """Return what has state."""
        return list(dict.keys(self._residence.state))

    def touch(self, key: Any) -> Any:
        """Return the state of a parameter, its tensors on the device."""
        # As torch's mapping does, for whoever asks afterwards whether there is any.
        self._residence.state.raw(key)
        found = self.present.get(key)
        if found is not None:
            return found
        batch = self.plan.batch_of.get(key) if isinstance(key, torch.Tensor) else None
        if batch is None:
            return self._residence.state.raw(key)
        if batch is not self._turn:
            return self._bring_apart(key)
        if batch not in self._there:
            self._begin(batch)
        if key not in self.present:
            # It has no gradient, and is asked for all the same.
            self._let_in(batch, [key], self._load(batch, list(self._residence.items_of(key).values())))
        return self.present[key]

    # ---- Batches ---------------------------------------------------------------------------------------------------

    def _due(self, batch: Batch) -> list[torch.Tensor]:
        return [
            parameter for parameter in batch.parameters if parameter.grad is not None and parameter not in self._apart
        ]

    def _bring(self, batch: Batch) -> bool:
        """Start a batch's copies; says whether there is anything to do in it."""
        if batch in self._coming:
            return True
        due = self._due(batch)
        if due:
            items = [item for parameter in due for item in self._residence.items_of(parameter).values()]
            self._coming[batch] = self._load(batch, items)
        return bool(due)

    def _load(self, batch: Batch, items: list[Item]) -> _Load:
        if not items:
            return _Load()
        if self._residence.options.packed:
            batch.carrier.bring(items, batch.which)
            arena = batch.carrier.arena(batch.which)
            return _Load({item: item.view(arena) for item in items})
        # Of the memory that is allocated now, what earlier batches had can be part only once they are home.
        batch.carrier.settle()
        return _Load(batch.carrier.bring_apart(items))

    def _begin(self, batch: Batch) -> None:
        self._bring(batch)
        if self._residence.options.packed:
            # The next one follows behind it, if it goes into the other arena: those without gradients are left out.
            following = next((other for other in self.plan.after(batch) if self._due(other)), batch)
            if following.which != batch.which:
                self._bring(following)
        self._let_in(batch, self._due(batch), self._coming.pop(batch, _Load()))

    def _let_in(self, batch: Batch, parameters: list[torch.Tensor], load: _Load) -> None:
        self._there.setdefault(batch, _Load()).views.update(load.views)
        if load.views:
            batch.carrier.arrive(list(load.views))
        for parameter in parameters:
            state = dict(self._residence.state.peek(parameter))
            for key, item in self._residence.items_of(parameter).items():
                state[key] = load.views[item]
            self.present[parameter] = state

    def end_turn(self) -> None:
        """Send the state of the batch whose turn it was home."""
        batch, self._turn = self._turn, None
        if batch is None:
            return
        if batch in self._there:
            load = self._there[batch]
            own = [parameter for parameter in batch.parameters if parameter not in self._apart]
            born = self._settle_states(batch.carrier, own, load)
            if load.views:
                if self._residence.options.packed:
                    batch.carrier.send(list(load.views), batch.which)
                else:
                    batch.carrier.send_apart(load.views)
                _end_views(load)
            del self._there[batch]
            if born:
                self._residence.bear(batch, born, self.plan.after(batch))
        else:
            batch.carrier.discard(list(self._coming.pop(batch, _Load()).views))

    def _settle_states(self, carrier: Carrier, parameters: Iterable[torch.Tensor], load: _Load) -> list[Entry]:
        """Take over what the optimizer has left in the states of parameters; return new tensors that travel."""
        left = []
        gone: list[Item] = []
        replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        storages = {local(view).untyped_storage().data_ptr() for view in load.views.values()}
        for parameter in parameters:
            state = self.present.pop(parameter, None)
            if state is None or not self.knows(parameter):
                # Nobody has asked for it.
                continue
            for key, item in list(self._residence.items_of(parameter).items()):
                view, value = load.views[item], state.pop(key, None)
                if value is view:
                    continue
                if isinstance(value, torch.Tensor) and _fits(value, item):
                    # The optimizer has put another tensor in its place: perhaps another key's.
                    source = local(value)
                    is_shared = source.untyped_storage().data_ptr() in storages
                    replaced.append((local(view), source.clone() if is_shared else source))
                    continue
                gone.append(self._residence.forget(parameter, key))
                del load.views[item]
                if value is not None:
                    state[key] = value
            left.append((parameter, state))
        for view, source in replaced:
            view.copy_(source)
        if gone:
            carrier.discard(gone)
            self._residence.free(carrier, gone)
        return self._residence.take_home(left)

    def _bring_apart(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Bring a parameter's state out of turn, into memory of its own, until the step is over."""
        batch = self.plan.batch_of[parameter]
        carrier, items = batch.carrier, self._residence.items_of(parameter)
        # On its way already, with its batch: that comes when its turn does.
        carrier.discard(list(self._coming.pop(batch, _Load()).views))
        load = self._apart[parameter] = _Load(carrier.bring_apart(list(items.values())) if items else {})
        if items:
            carrier.arrive(list(items.values()))
        state = dict(self._residence.state.raw(parameter)) | {key: load.views[item] for key, item in items.items()}
        self.present[parameter] = state
        return state

    # ---- The end ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the step: what is still on the device goes home."""
        self.end_turn()
        for batch, load in self._coming.items():
            batch.carrier.discard(list(load.views))
        self._coming.clear()
        for parameter, load in self._apart.items():
            carrier = self.plan.batch_of[parameter].carrier
            born = self._settle_states(carrier, [parameter], load)
            if load.views:
                carrier.send_apart(load.views)
                _end_views(load)
            if born:
                self._residence.bear_apart(carrier, born)
        self._apart.clear()

    def abandon(self) -> None:
        """End a step whose math has failed: what is on the device is dropped, the host keeps what it had."""
        try:
            self._residence.carriers.recall()
        finally:
            for load in (*self._coming.values(), *self._there.values(), *self._apart.values()):
                _end_views(load)
            for left in (self._coming, self._there, self._apart, self.present):
                left.clear()
            self._turn = None


def _end_views(load: _Load) -> None:
    """Empty tensors whose memory on the device is no longer theirs: whoever has kept one would write to another's."""
    for item, view in load.views.items():
        item.forget()
        hollow_out(view, local(view).new_empty(0))


def _fits(value: torch.Tensor, item: Item) -> bool:
    own = local(value)
    return own.dtype == item.dtype and own.shape == item.shape
