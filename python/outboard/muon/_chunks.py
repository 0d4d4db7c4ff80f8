"""A step's work: chunks of matrices, and batches of what AdamW updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outboard import _sharded
from outboard.muon import _adamw
from outboard.muon._groups import adjusted_lr, as_matrices, coefficients_of, matrix_shape
from outboard.muon._newton_schulz import can_be_together, orthogonalize
from outboard.muon._spread import Exchange, Spread, cost_of, is_whole, owners, part_of_whole, spread_of, whole_of

#: Matrices of a chunk unless the user says how many, for each rank.
PER_RANK = 4

#: Bytes of AdamW's state in a batch.
ADAMW_BYTES = 64 << 20

#: Matrices of at most so many elements are orthogonalised together: their products are short, and launches dominate.
#: Larger ones fill a GPU by themselves.
TOGETHER = 1 << 20


def missing_keys(state: dict[str, Any], use_muon: bool) -> tuple[str, ...]:
    """Return the keys of the tensors that a parameter's state lacks: all of them or none."""
    keys = ("momentum_buffer",) if use_muon else ("moment1", "moment2")
    return () if keys[0] in state else keys


def first_state(
    state: dict[str, Any], parameter: torch.Tensor, like: torch.Tensor, *, use_muon: bool
) -> dict[str, Any]:
    """Put zeros into a parameter's state where it has none yet; `like` has the momentum's dtype and strides."""
    for key in missing_keys(state, use_muon):
        own = torch.zeros_like(_sharded.local(like), memory_format=torch.preserve_format)
        state[key] = _sharded.like(own, parameter)
        if not use_muon:
            state["step"] = 0
    return state


@dataclass(eq=False)
class Entry:
    """A parameter with a gradient."""

    parameter: torch.Tensor
    name: str
    group: dict[str, Any]
    states: Any

    @property
    def like(self) -> torch.Tensor:
        """What its state is like on this rank: AdamW's like the parameter, a momentum like the gradient."""
        assert self.parameter.grad is not None
        return _sharded.local(self.parameter.grad if self.group["use_muon"] else self.parameter)

    def state_tensors(self) -> list[torch.Tensor]:
        """Return its state tensors that there are."""
        state = self.states.get(self.parameter, {})
        return [value for value in state.values() if isinstance(value, torch.Tensor)]

    @property
    def flatten(self) -> bool | None:
        """How more than two dimensions are taken."""
        found: bool | None = self.group.get("flatten")
        return found

    @property
    def form(self) -> dict[str, Any]:
        """What matrices its tensor stands for: see `as_matrices`."""
        return {"flatten": self.flatten, "split": self.group.get("split", 1)}


@dataclass(eq=False)
class Batch:
    """Parameters whose state is on the device at the same time."""

    entries: list[Entry]

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the state tensors that there are."""
        return [tensor for entry in self.entries for tensor in entry.state_tensors()]

    def update_state(self) -> None:
        """Do all that reads or writes state."""
        raise NotImplementedError


class AdamBatch(Batch):
    """Parameters of one group that AdamW updates."""

    def update_state(self) -> None:
        """Update the parameters."""
        states = []
        for entry in self.entries:
            states.append(first_state(entry.states[entry.parameter], entry.parameter, entry.like, use_muon=False))
        _adamw.step([entry.parameter for entry in self.entries], states, self.entries[0].group)


@dataclass(eq=False)
class Chunk(Batch):
    """Matrices that are worked on together: all of one way to their owners, or all whole here."""

    spread: Spread | None = None
    #: The owner of each, where they travel.
    owners: list[int] = field(default_factory=list)
    _updates: list[torch.Tensor] = field(default_factory=list)
    _exchange: Exchange | None = None

    @property
    def travels(self) -> bool:
        """Whether shards are sent."""
        return self.spread is not None

    def update_state(self) -> None:
        """Update the momentum; what is to be orthogonalised is kept, in bf16."""
        for entry in self.entries:
            parameter, group = entry.parameter, entry.group
            assert parameter.grad is not None
            grad = _sharded.local(parameter.grad)
            state = first_state(entry.states[parameter], parameter, entry.like, use_muon=True)
            buffer = _sharded.local(state["momentum_buffer"])
            buffer.lerp_(grad, 1 - group["momentum"])
            update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
            # A copy in any case: the buffer may leave.
            self._updates.append(update.to(torch.bfloat16, copy=update is buffer))
            if group["none_grad"]:
                parameter.grad = None

    def gather(self) -> None:
        """Start to send shards to their owners."""
        if self.spread is None:
            return
        dims = [_dim(entry) for entry in self.entries]
        shapes = [entry.parameter.shape for entry in self.entries]
        device = _sharded.local(self.entries[0].parameter).device
        self._exchange = Exchange(shapes, dims, self.owners, self.spread, device)
        self._exchange.gather(self._updates)

    def orthogonalize(self) -> None:
        """Orthogonalise what this rank has whole, or owns, and start to send that back."""
        if self._exchange is None:
            self._updates = [
                update if is_whole(entry.parameter, entry.flatten) else whole_of(update, entry.parameter)
                for entry, update in zip(self.entries, self._updates, strict=True)
            ]
            self._updates = _orthogonal(self.entries, self._updates)
        else:
            own = [self.entries[index] for index in self._exchange.own]
            self._exchange.scatter(_orthogonal(own, self._exchange.wholes()))

    def apply(self) -> None:
        """Change the weights."""
        updates = self._updates if self._exchange is None else self._exchange.shards()
        for entry, update in zip(self.entries, updates, strict=True):
            parameter, group = entry.parameter, entry.group
            if self._exchange is None and not is_whole(parameter, entry.flatten):
                update = part_of_whole(update, parameter)
            weight = _sharded.local(parameter)
            lr = group["lr"]
            if isinstance(lr, torch.Tensor):
                lr = lr.squeeze()
                # On the device it is not waited for. In host memory arithmetic is that of tensors, as torch's.
                lr = lr if lr.device.type == "cpu" else lr.to(weight.device)
            rate = adjusted_lr(lr, group["adjust_lr"], matrix_shape(parameter.shape, **entry.form))
            weight.mul_(1 - lr * group["weight_decay"])
            if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
                wide = torch.promote_types(weight.dtype, torch.float32)
                weight.copy_(weight.to(wide) - update.to(wide) * rate)
            else:
                rate = float(rate)
                weight.add_(update, alpha=-rate)
            # Not seen by autograd otherwise, of a DTensor.
            if weight is not parameter:
                torch.autograd.graph.increment_version(parameter)
        self._updates, self._exchange = [], None


def _dim(entry: Entry) -> int:
    found = spread_of(entry.parameter)
    assert found is not None
    return found.dim


def _orthogonal(entries: Sequence[Entry], wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Orthogonalise whole tensors, small ones of the same shape and settings together."""
    results: list[torch.Tensor | None] = [None] * len(wholes)
    together: dict[Any, list[int]] = {}
    for index, (entry, whole) in enumerate(zip(entries, wholes, strict=True)):
        matrices = as_matrices(whole, **entry.form)
        coefficients = tuple(coefficients_of(entry.group))
        if matrices.ndim == 2 and matrices.numel() <= TOGETHER and can_be_together(matrices.device):
            together.setdefault((tuple(matrices.shape), coefficients, matrices.device), []).append(index)
        elif matrices.ndim == 2 or can_be_together(matrices.device):
            results[index] = orthogonalize(matrices, coefficients).reshape(whole.shape)
        else:
            each = [orthogonalize(matrix, coefficients) for matrix in matrices.unbind()]
            results[index] = (torch.stack(each) if each else matrices.bfloat16()).reshape(whole.shape)
    for (_, coefficients, _), indices in together.items():
        alike = [as_matrices(wholes[index], **entries[index].form) for index in indices]
        if len(alike) > 1:
            found = list(orthogonalize(torch.stack(alike), coefficients).unbind())
        else:
            found = [orthogonalize(alike[0], coefficients)]
        for index, result in zip(indices, found, strict=True):
            results[index] = result.reshape(wholes[index].shape)
    return [result for result in results if result is not None]


def cut(entries: Sequence[Entry], chunk_size: int) -> list[Batch]:
    """Cut a step into chunks and batches, in the same way on all ranks.

    Parameters
    ----------
    entries : sequence of Entry
        Parameters with gradients, in the order of the groups.
    chunk_size : int
        Matrices of a chunk; -1: `PER_RANK` for each rank.
    """
    ways: dict[Any, list[Entry]] = {}
    adam: dict[int, list[Entry]] = {}
    spreads: dict[Any, Spread | None] = {}
    for entry in entries:
        if not entry.group["use_muon"]:
            adam.setdefault(id(entry.group), []).append(entry)
            continue
        way = None if is_whole(entry.parameter, entry.flatten) else spread_of(entry.parameter)
        device = _sharded.local(entry.parameter).device
        # What goes by the general path is apart: it is put together by all ranks at once.
        general = way is None and not is_whole(entry.parameter, entry.flatten)
        key = (device, general, None if way is None else id(way.group))
        spreads[key] = way
        ways.setdefault(key, []).append(entry)
    batches: list[Batch] = []
    for key, members in ways.items():
        way = spreads[key]
        size = 1 if way is None else way.size
        count = PER_RANK * size if chunk_size == -1 else chunk_size
        # Of equal shapes together.
        members = sorted(members, key=lambda entry: tuple(entry.parameter.shape))
        loads = [0.0] * size
        for start in range(0, len(members), count):
            chunk = members[start : start + count]
            costs = [cost_of(matrix_shape(entry.parameter.shape, **entry.form)) for entry in chunk]
            batches.append(Chunk(chunk, way, owners(costs, size, loads) if way is not None else []))
    for members in adam.values():
        at, total = 0, 0
        for index, entry in enumerate(members):
            own = _sharded.local(entry.parameter)
            size = 2 * own.numel() * own.element_size()
            if total + size > ADAMW_BYTES and index > at:
                batches.append(AdamBatch(members[at:index]))
                at, total = index, 0
            total += size
        batches.append(AdamBatch(members[at:]))
    return batches
