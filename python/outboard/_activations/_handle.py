"""`outboard.offload_activations`: hooks on a model's blocks, within which saved tensors go to the host."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from outboard import _sharded
from outboard._activations._blocks import Chosen, choose, spaced
from outboard._activations._line import Line
from outboard._activations._policy import Auto, DeviceMeter, HostMeter, Link
from outboard._activations._saved import Group, Run, Saved, bytes_of_runs, extent, take
from outboard._arguments import check_choice, check_count
from outboard._host_pool import HostPool
from outboard._lanes import LaneOptions
from outboard._offload._carrier import can_offload

MIB = 1 << 20


class _Forward:
    """The blocks of one forward, in their order, and how far backward has come.

    Parameters
    ----------
    prefetch : int
        Blocks that are brought back ahead of the one that backward is in.
    """

    def __init__(self, prefetch: int) -> None:
        self._prefetch = prefetch
        #: Groups live as long as something that they have saved does.
        self._groups: list[weakref.ref[Group]] = []
        self._current: int | None = None
        #: Saved by a block that has returned the same memory: they leave with the next block, if at all.
        self.carried: list[Saved] = []
        #: What has left, by the address of its storage: the storage, its version, and the run.
        self.known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, weakref.ref[Run]]] = {}

    def begin(self, name: str, sends: bool) -> Group:
        """Return the group of a block that begins."""
        group = Group(name, len(self._groups), sends, self._reach)
        self._groups.append(weakref.ref(group))
        return group

    def _reach(self, group: Group) -> None:
        if group.index == self._current:
            return
        self._current = group.index
        for reference in self._groups[group.index + 1 :]:
            later = reference()
            if later is not None:
                later.leave()
        group.bring()
        ahead = 0
        for reference in reversed(self._groups[: group.index]):
            if ahead == self._prefetch:
                break
            earlier = reference()
            if earlier is not None and earlier.runs():
                earlier.bring()
                ahead += 1

    @property
    def is_alive(self) -> bool:
        """Whether anything is saved."""
        return any(reference() is not None for reference in self._groups)


class _Running(threading.local):
    """The forward that a thread is in, and its open blocks."""

    def __init__(self) -> None:
        self.forward: _Forward | None = None
        #: Storages of the model's parameters and buffers, which blocks may be given, too.
        self.own: set[int] = set()
        self.open: list[tuple[Group, saved_tensors_hooks] | None] = []


class ActivationOffload:
    """What `outboard.offload_activations` returns: a handle, and a context that ends it.

    The model keeps it; it does not keep the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        blocks: list[tuple[str, torch.nn.Module]],
        *,
        prefetch: int,
        sends: set[str],
        auto: Auto | None,
        min_bytes: int,
        packed: bool,
        max_crossing_bytes: int | None,
        pool: HostPool,
    ) -> None:
        self.pool = pool
        self._prefetch, self._sends, self._auto = prefetch, sends, auto
        self._min_bytes, self._packed, self._cap = min_bytes, packed, max_crossing_bytes
        self._running = _Running()
        self._lines: dict[torch.device, Line] = {}
        self._blocks = {name: 0 for name, _ in blocks}
        self._other_hooks = 0
        self._kept_bytes = 0
        self._handles = [
            model.register_forward_pre_hook(self._begin_forward, prepend=True),
            model.register_forward_hook(self._end_forward, always_call=True),
        ]
        for name, module in blocks:
            # Last before the block, first behind it: what other hooks do is not its own.
            self._handles.append(module.register_forward_pre_hook(self._begin_block(name)))
            self._handles.append(module.register_forward_hook(self._end_block, prepend=True, always_call=True))

    # ---- Forward ---------------------------------------------------------------------------------------------------

    def _begin_forward(self, module: torch.nn.Module, args: Any) -> None:
        # What an interrupt has left open: torch runs no hooks then.
        for opened in reversed(self._running.open):
            if opened is not None:
                opened[1].__exit__(None, None, None)
        self._running.open.clear()
        self._running.forward = _Forward(self._prefetch)
        self._running.own = _storages([*module.parameters(), *module.buffers()])
        if self._auto is not None and torch.is_grad_enabled():
            self._auto.begin()
            self._sends = self._auto.sends

    def _end_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._auto is not None and torch.is_grad_enabled() and output is not None:
            self._auto.end()
        if self._running.forward is not None:
            # The rest are outputs of the last block, which the loss is computed from.
            self._running.forward.carried.clear()
            self._running.forward = None

    def _begin_block(self, name: str) -> Any:
        def begin(module: torch.nn.Module, args: Any) -> None:
            running = self._running
            if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                # Somebody else says what becomes of saved tensors, such as checkpointing.
                self._other_hooks += torch.is_grad_enabled()
                running.open.append(None)
                return
            if running.forward is None or (not running.forward.is_alive and not running.forward.carried):
                running.forward = _Forward(self._prefetch)
            group = running.forward.begin(name, name in self._sends)
            # Of the block itself now: FSDP2 has put whole ones in the shards' place.
            own = running.own | _storages([*module.parameters(), *module.buffers()])

            def pack(tensor: torch.Tensor) -> Any:
                if group.open is None or not _can_leave(tensor) or _address(tensor) in own:
                    return tensor
                saved = Saved.of(tensor, group)
                group.open.append(saved)
                return saved

            hooks = saved_tensors_hooks(pack, _unpack)
            hooks.__enter__()
            running.open.append((group, hooks))

        return begin

    def _end_block(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._running.open:
            return
        opened = self._running.open.pop()
        if opened is None:
            return
        group, hooks = opened
        hooks.__exit__(None, None, None)
        entries, group.open = group.open or [], None
        forward = self._running.forward
        if output is None or forward is None:
            # It has failed, and so will everything: or it returns nothing.
            return
        self._hand_over(forward, group, entries, output)

    def _hand_over(self, forward: _Forward, group: Group, entries: list[Saved], output: Any) -> None:
        """Let what a block has saved leave, but for what its caller holds: its outputs."""
        entries = forward.carried + entries
        forward.carried = []
        returned = _storages(_tensors(output))
        by_line: dict[Line, list[Saved]] = {}
        # Memory that another block keeps is there in any case.
        kept = {_address(saved.alias) for saved in entries if not saved.group.sends}
        for saved in entries:
            if saved.alias._version != saved.version:
                continue  # changed since, and of no use
            if _address(saved.alias) in returned:
                forward.carried.append(saved)
            elif _address(saved.alias) in kept:
                self._kept_bytes += saved.alias.numel() * saved.alias.element_size()
            elif not self._is_known(forward, saved):
                by_line.setdefault(self._line(saved.alias.device), []).append(saved)
        for line, theirs in by_line.items():
            storages = [(saved, saved.alias.untyped_storage()) for saved in theirs]
            with line.lock:
                group.hand_over(line, theirs, min_bytes=self._min_bytes, packed=self._packed)
                line.end_block(group.sent_bytes)
            for saved, storage in storages:
                if saved.run is not None:
                    forward.known[storage.data_ptr()] = (weakref.ref(storage), saved.version, weakref.ref(saved.run))
        self._blocks[group.name] = group.sent_bytes
        if self._auto is not None and not self._auto.is_settled:
            own = [saved for saved in entries if saved.group is group]
            self._auto.bytes_of[group.name] = group.sent_bytes or bytes_of_runs(own)

    def _is_known(self, forward: _Forward, saved: Saved) -> bool:
        """Let a tensor go that has left with an earlier block; says whether it has."""
        found = forward.known.get(_address(saved.alias))
        if found is None:
            return False
        storage, version, reference = found
        run = reference()
        if run is None or storage() is None or version != saved.version:
            return False
        begin, end = extent(saved.alias)
        if not run.start <= begin <= end <= run.start + run.nbytes:
            return False
        take(run, [saved])
        return True

    def _line(self, device: torch.device) -> Line:
        if device not in self._lines:
            self._lines[device] = Line(device, self.pool, self._cap)
        return self._lines[device]

    # ---- For users -------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counts and bytes.

        Returns
        -------
        dict
            ``blocks``: by name, bytes that the last forward has sent; ``bytes_out``, ``bytes_in``, ``copies_out``,
            ``copies_in`` so far; ``bytes`` on the host; ``peak_crossing_bytes`` that were on their way out at a time;
            ``kept_bytes`` of blocks that keep theirs, so far; ``under_other_hooks``: blocks that ran while other hooks
            for saved tensors were in place, such as checkpointing's; ``pool``: see `HostPool.stats`.
        """
        total: dict[str, Any] = {"peak_crossing_bytes": 0, "bytes": 0, "cargos": 0}
        total |= {f"{what}_{way}": 0 for what in ("bytes", "copies") for way in ("out", "in")}
        for line in self._lines.values():
            for key, value in line.ferry.stats().items():
                total[key] += value
            total["peak_crossing_bytes"] += line.peak_crossing_bytes
        total |= {"blocks": dict(self._blocks), "kept_bytes": self._kept_bytes}
        return total | {"under_other_hooks": self._other_hooks, "pool": self.pool.stats()}

    def plan(self) -> dict[str, Any]:
        """Return which blocks' activations leave, and why.

        Returns
        -------
        dict
            ``blocks``, their names, and ``why``; ``is_settled``. With ``fraction="auto"`` also milliseconds:
            ``step_ms`` and ``forward_ms`` with nothing away, ``predicted_ms`` and ``measured_ms`` that a step takes
            longer; ``bytes_away`` and ``bytes_of_all`` blocks.
        """
        if self._auto is not None:
            return self._auto.plan()
        names = [name for name in self._blocks if name in self._sends]
        return {"is_settled": True, "blocks": names, "why": f"{len(names)} of {len(self._blocks)} blocks, as asked"}

    def remove(self) -> None:
        """End it: later forwards keep their activations on the device. What has left comes back as it would."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> ActivationOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _unpack(packed: Any) -> Any:
    if not isinstance(packed, Saved):
        return packed
    return packed.unpack()


def _address(tensor: torch.Tensor) -> int:
    return _sharded.local(tensor).untyped_storage().data_ptr()


def _storages(tensors: list[torch.Tensor]) -> set[int]:
    return {_address(tensor) for tensor in tensors if tensor.layout is torch.strided}


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors within what a module returns."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for one in value for tensor in _tensors(one)]
    if hasattr(value, "__dict__"):
        return [tensor for one in vars(value).values() if one is not value for tensor in _tensors(one)]
    return []


def _can_leave(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor may leave: not a parameter, nor a subclass, nor what has no strided memory on a device."""
    return (
        type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() > 0 and can_offload(tensor)
    )


def offload_activations(
    model: torch.nn.Module,
    blocks: Chosen | None = None,
    *,
    fraction: float | str = 1.0,
    max_slowdown: float = 0.05,
    target_bytes: int | None = None,
    prefetch: int = 1,
    keep_last: int = 1,
    min_bytes: int = MIB,
    packed: bool = True,
    max_crossing_bytes: int | None = None,
    pool: HostPool | None = None,
) -> ActivationOffload:
    """Keep what autograd saves in a model's blocks in host memory between forward and backward.

    At a block's end what it has saved is copied to pinned host memory, and the device's is freed once that is done; in
    backward it comes back a block ahead. Values, strides and storage offsets are as they were.

    Parameters
    ----------
    model : Module
        Each call of it is one forward.
    blocks : optional
        The modules whose saved tensors leave: names (with wildcards, such as ``["layers.*"]``) and modules, or a
        function of a name and its module. Unless given: the entries of the largest list of modules that are alike.
    fraction : float or "auto"
        How many of these blocks, from 0 to 1: evenly spaced, so that copies run beside the blocks between. ``"auto"``
        measures some steps and the link, predicts how many fit, checks that and corrects it; see `plan`. It takes each
        call of the model for a step.
    max_slowdown : float
        For ``"auto"``: how much longer a step may take.
    target_bytes : int, optional
        For ``"auto"``, instead: the fewest blocks that leave at most so many bytes of the blocks' activations on the
        device, whatever that takes.
    prefetch : int
        Blocks that come back ahead of the one that backward is in, of those whose tensors have left.
    keep_last : int
        Blocks at the end that keep theirs in any case: they would be back at once.
    min_bytes : int
        Smaller tensors travel together, or stay.
    packed : bool
        Whether smaller tensors of a block and dtype travel as one; they stay otherwise.
    max_crossing_bytes : int, optional
        The most bytes on their way to the host when a block ends: the device waits rather than holding more. What the
        largest block sends unless given: a block's copies may take as long as it takes to the end of the next one.
    pool : HostPool, optional
        Where host memory comes from; one of its own unless given.

    Returns
    -------
    ActivationOffload
        A handle, and a context manager, at whose end it is removed.

    Raises
    ------
    TypeError, ValueError
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"offload_activations takes a torch.nn.Module, not {type(model).__name__}")
    check_choice("packed", packed, (True, False))
    if pool is not None and not isinstance(pool, HostPool):
        raise TypeError(f"pool must be an outboard.HostPool, not {type(pool).__name__}")
    found = choose(model, blocks)
    last = 0 if keep_last == 0 else check_count("keep_last", keep_last, 2**20)
    names = [name for name, _ in found]
    names = names[: max(len(names) - last, 0)]
    pool = HostPool() if pool is None else pool
    auto = None
    if fraction == "auto":
        auto = _auto(model, names, max_slowdown, target_bytes, pool)
    return ActivationOffload(
        model,
        found,
        prefetch=0 if prefetch == 0 else check_count("prefetch", prefetch, 2**20),
        sends=set() if auto is not None else spaced(names, fraction),
        auto=auto,
        min_bytes=0 if min_bytes == 0 else check_count("min_bytes", min_bytes, 2**62),
        packed=packed,
        max_crossing_bytes=None if max_crossing_bytes is None else check_count("bytes", max_crossing_bytes, 2**62),
        pool=pool,
    )


def _auto(
    model: torch.nn.Module, names: list[str], max_slowdown: Any, target_bytes: int | None, pool: HostPool
) -> Auto:
    if isinstance(max_slowdown, bool) or not isinstance(max_slowdown, (int, float)):
        raise TypeError(f"max_slowdown must be a number, not {max_slowdown!r}")
    if not max_slowdown >= 0:
        raise ValueError(f"Invalid max_slowdown: {max_slowdown} (such as 0.05)")
    target = None if target_bytes is None else check_count("target_bytes", target_bytes, 2**62)
    device = next((_sharded.local(one).device for one in model.parameters() if can_offload(one)), torch.device("cpu"))
    if device.type != "cuda" and LaneOptions.simulate is None:
        names = []
    links: list[Link] = []

    def rates() -> tuple[float, float] | None:
        if not links:
            links.append(Link(device, pool))
        return links[0].rates()

    meter = DeviceMeter() if device.type == "cuda" else HostMeter()
    return Auto(names, max_slowdown=max_slowdown, target_bytes=target, meter=meter, rates=rates)
