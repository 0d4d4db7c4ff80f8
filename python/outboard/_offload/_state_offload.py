"""`outboard.offload_state`: hooks on an optimizer, between which its state is on the host."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from typing import Any

import torch

from outboard import _capture, _sharded
from outboard._arguments import check_choice, check_count
from outboard._base import BaseOptimizer
from outboard._native import ForkedError, default_threads
from outboard._offload._residence import Entry, Options, Residence
from outboard._offload._stand_in import is_stand_in, is_walking, stand_in_for
from outboard._offload._walk import StateWalk

MIB = 1 << 20

#: Bytes of state in a batch. Two batches are on the device at once, less than a GiB: what they hold comes while the
#: device is still in backward. A step of 1.3 billion parameters and 16k tokens took 349 ms with 256 MiB, 336 with 480.
BATCH_BYTES = 448 * MIB

_offloads: weakref.WeakKeyDictionary[torch.optim.Optimizer, StateOffload] = weakref.WeakKeyDictionary()


class StateOffload:
    """What `outboard.offload_state` returns: a handle on where an optimizer's state is.

    The optimizer itself is stepped, saved and loaded as before. It keeps this handle; the handle does not keep it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._options = options
        self._residence: Residence | None = None
        self._walk: StateWalk | None = None
        #: What is for the host of a state_dict, between the hooks around its loading.
        self._loading: list[Entry] | None = None
        self._steps = 0
        self.turn_on_cpu_offload()
        self._register(optimizer)
        # Whoever keeps the handle does not keep what the state was in.
        weakref.finalize(optimizer, _close, weakref.ref(self)).atexit = False  # type: ignore[misc]

    # ---- Hooks -----------------------------------------------------------------------------------------------------

    def _register(self, optimizer: torch.optim.Optimizer) -> None:
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            after := optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_state_dict_post_hook(self._after_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        # What other hooks find after a step is a step that is over.
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # A subclass that calls the step of its base is in its own: that one's walk goes on.
        residence = None if is_stand_in(args[0]) else self._settled()
        if residence is None:
            return None
        if _capture.is_capturing():
            raise _capture.refuse("step() of an optimizer whose state is offloaded")
        self._adopt(optimizer)
        self._walk = StateWalk(residence, optimizer.param_groups, residence.plan(optimizer))
        return (stand_in_for(optimizer, self._walk), *args[1:]), kwargs

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._walk is None or self._residence is None or is_stand_in(optimizer):
            return
        # Kept until it is done: else whatever comes next ends it.
        self._walk.finish()
        self._walk = None
        for carrier in self._residence.carriers.all():
            carrier.end_step()
        self._steps += 1
        if self._steps == 1:
            self._residence.check_keys()

    def _before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        residence = self._standing()
        if self._walk is not None and self._walk.has_begun:
            raise _within_step()
        if residence is not None:
            self._adopt(optimizer)
            residence.settle()

    def _after_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self._residence is None:
            return None
        ours = {id(item.host) for _, item in self._residence.all_items()}
        state_dict["state"] = {
            index: {key: value.clone() if id(value) in ours else value for key, value in state.items()}
            if isinstance(state, dict)
            else state
            for index, state in state_dict["state"].items()
        }
        return state_dict

    def _before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        self._loading = None
        residence = self._settled()
        if residence is None:
            return None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ids = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        if len(ids) != len(parameters):
            return None  # torch says what is wrong with it
        of_id = dict(zip(ids, parameters, strict=True))
        state: dict[Any, Any] = {}
        loading: list[Entry] = []
        for index, entry in state_dict["state"].items():
            parameter = of_id.get(index)
            state[index] = entry
            if parameter is None or not isinstance(entry, dict) or residence.carrier_for(parameter) is None:
                continue
            state[index] = rest = {}
            for key, value in entry.items():
                if residence.is_for_host(key, value):
                    own = _sharded.part_of(value, parameter, f"{key} of {residence.name_of(parameter)}")
                    loading.append((parameter, key, _sharded.like(own, parameter)))
                else:
                    rest[key] = value
        # torch would bring them to the device, in the parameter's dtype.
        self._loading = loading
        return {**state_dict, "state": state}

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        loading, self._loading = self._loading, None
        if self._residence is not None and loading is not None:
            self._residence.replace(dict(optimizer.state), loading)
            optimizer.state = self._residence.state

    # ---- Between steps ---------------------------------------------------------------------------------------------

    def _settled(self) -> Residence | None:
        """Return where state lives, after a step that failed in the middle has been ended; None while off.

        Raises
        ------
        RuntimeError
            Within step().
        ForkedError
        """
        found = self._standing()
        if self._walk is not None:
            # Its state is on the device, and is not to be taken away.
            raise _within_step()
        return found

    def _standing(self) -> Residence | None:
        """As `_settled`, also within step(), for what only looks."""
        if self._residence is not None:
            self._residence.carriers.check_process()
            if self._walk is not None and not is_walking(self._walk):
                walk, self._walk = self._walk, None
                walk.abandon()
                # State that was made and had not gone home yet goes now.
                self._adopt(self._require())
        return self._residence

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over what others have put into the state since the last step."""
        residence = self._residence
        assert residence is not None
        if optimizer.state is not residence.state:
            residence.replace(dict(optimizer.state), [])
            optimizer.state = residence.state
        residence.adopt()

    def _require(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("the optimizer of this handle is gone")
        return optimizer

    # ---- For users -------------------------------------------------------------------------------------------------

    @property
    def cpu_offload(self) -> bool:
        """Whether state is on the host between steps."""
        return self._residence is not None

    def turn_on_cpu_offload(self) -> None:
        """Bring the state to the host; nothing happens if it is there."""
        optimizer = self._require()
        if self._residence is not None:
            return
        residence = Residence(optimizer, self._options)
        residence.look_ahead(optimizer)
        residence.replace(dict(optimizer.state), [])
        residence.adopt()
        residence.check_keys()
        self._residence = residence
        optimizer.state = residence.state

    def turn_off_cpu_offload(self) -> None:
        """Bring the state back to the device and free host memory and arenas; nothing happens if it is there."""
        optimizer = self._require()
        residence = self._settled()
        if residence is None:
            return
        self._adopt(optimizer)
        optimizer.state = residence.state.plain()
        self._residence = None
        residence.close()

    def remove(self) -> None:
        """Bring the state back and leave the optimizer as it was before `offload_state`."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self.turn_off_cpu_offload()
            _offloads.pop(optimizer, None)
        for handle in self._handles:
            handle.remove()

    def synchronize(self) -> None:
        """Wait on the host until all state is home."""
        residence = self._settled()
        if residence is not None:
            residence.settle()

    def host_buffers(self) -> list[torch.Tensor]:
        """Return the host memory that state is in: uint8 tensors, pinned where that is possible; none while off."""
        residence = self._settled()
        if residence is None:
            return []
        return residence.carriers.buffers()

    def places(self) -> dict[str, str]:
        """Return where each tensor of the state that travels is, by its name.

        One of ``"pending"``, ``"host"``, ``"h2d"``, ``"device"``, ``"d2h"``: no value yet, at home, on its way to the
        device, there, on its way home. Between steps it is ``"host"`` or ``"d2h"``.
        """
        residence = self._standing()
        return {} if residence is None else residence.places()

    def staying(self) -> dict[str, str]:
        """Return why each tensor of the state that stays on the device does, by its name.

        0-d tensors, integers, sparse ones, tensors in a storage that others share, subclasses, and what `min_numel` and
        `state_keys` exclude.
        """
        residence = self._standing()
        return {} if residence is None else residence.staying()

    def stats(self) -> dict[str, Any]:
        """Return counts and bytes.

        Returns
        -------
        dict
            ``steps``; ``batches`` of the next step, or of the one that goes on; ``host_bytes``, ``pinned_bytes``;
            ``device_bytes`` of the arenas; ``bytes_in``, ``bytes_out``, ``copies_in``, ``copies_out`` so far.
        """
        residence = self._standing()
        if residence is None:
            return {"steps": self._steps}
        plan = residence.plan(self._require()) if self._walk is None else self._walk.plan
        return {"steps": self._steps, "batches": len(plan.batches)} | residence.stats()


def _within_step() -> RuntimeError:
    return RuntimeError("state_dict() and the like within step() of an optimizer whose state is offloaded")


def _close(reference: weakref.ref[StateOffload]) -> None:
    """Free the host memory of an optimizer that is gone."""
    handle = reference()
    if handle is None or handle._residence is None:
        return
    residence, handle._residence, handle._walk = handle._residence, None, None
    # In a fork it is the parent's.
    with suppress(ForkedError):
        residence.close()


def offload_state(
    optimizer: torch.optim.Optimizer,
    *,
    batches: int | None = None,
    batch_bytes: int | None = None,
    state_keys: Iterable[str] | None = None,
    min_numel: int = 0,
    packed: bool = True,
    pin: str | bool = "auto",
    threads: int | None = None,
) -> StateOffload:
    """Keep the state of any torch optimizer in host memory between steps.

    In `step()` state comes to the device in batches, is updated there by the optimizer's own code, and returns; the
    next batch comes while one is used and the last one leaves. The results have the bits of the optimizer by itself.
    It stays the object that schedulers, GradScaler and checkpoints work with.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any that loops over `self.param_groups` and looks up `self.state[parameter]`, as torch's own do. Its state may
        exist already.
    batches : int, optional
        The number of batches of a step, about equal in bytes; a parameter is in one.
    batch_bytes : int, optional
        Instead: the most bytes of a batch (a parameter with more is a batch of its own); 448 MiB unless given. Two
        batches are on the device at once.
    state_keys : iterable of str, optional
        Which tensors of a parameter's state leave the device, such as ``["exp_avg"]``; all of them unless given.
    min_numel : int
        Tensors with fewer elements stay on the device.
    packed : bool
        Whether a batch's tensors lie side by side in an arena that stays allocated, so that few large copies bring it,
        beginning while the device is still in backward. False gives each tensor memory of its own in each step, and
        waits on the host for earlier batches.
    pin : "auto", True or False
        Whether to pin host memory: where it can be, or else raise, or not.
    threads : int, optional
        Threads that touch new host memory; the CPUs that the process may use unless given.

    Returns
    -------
    StateOffload
        A handle: where the state is, and turning this off and on.

    Raises
    ------
    TypeError
        For something that is not a torch optimizer; for `outboard`'s own, whose state is on the host already, or goes
        there by `turn_on_cpu_offload`.
    ValueError
        For counts that are not positive, both `batches` and `batch_bytes`, and for an entry of `state_keys` that no
        state has: now where that can be known, else after the first step.
    RuntimeError
        If the optimizer's state is offloaded already.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"offload_state takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, BaseOptimizer):
        raise TypeError(f"the state of outboard.{type(optimizer).__name__} is on the host already")
    if hasattr(optimizer, "turn_on_cpu_offload"):
        raise TypeError(f"outboard.{type(optimizer).__name__} does this by itself: call its turn_on_cpu_offload()")
    if optimizer in _offloads:
        raise RuntimeError("this optimizer's state is offloaded already: use the handle that offload_state returned")
    if batches is not None and batch_bytes is not None:
        raise ValueError("give batches or batch_bytes, not both")
    if isinstance(state_keys, str):
        raise TypeError(f"state_keys must be a list of keys, not {state_keys!r}")
    check_choice("pin", pin, ("auto", True, False))
    check_choice("packed", packed, (True, False))
    options = Options(
        batches=None if batches is None else check_count("batches", batches),
        batch_bytes=BATCH_BYTES if batch_bytes is None else check_count("batch_bytes", batch_bytes, 2**48),
        state_keys=None if state_keys is None else frozenset(state_keys),
        min_numel=0 if min_numel == 0 else check_count("min_numel", min_numel, 2**62),
        packed=packed,
        pin=None if pin == "auto" else bool(pin),
        threads=default_threads()[0] if threads is None else check_count("threads", threads, 1024),
    )
    made = StateOffload(optimizer, options)
    _offloads[optimizer] = made
    return made
