"""`outboard.Muon`: one step as a pipeline of chunks of matrices, and batches of AdamW's parameters."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from outboard import _capture, _sharded
from outboard._native import default_threads
from outboard._offload._hollow import HollowStates, HollowTraffic, shell_like
from outboard._offload._host_state import on_device
from outboard.muon import _checkpoint, _groups
from outboard.muon._chunks import Batch, Chunk, Entry, cut, first_state, missing_keys
from outboard.muon._clip import QkClip
from outboard.muon._newton_schulz import COEFFICIENTS, Triple
from outboard.muon._spread import check_agreement

Group = dict[str, Any]


class _State(defaultdict[Any, Any]):
    """The states of all parameters.

    torch's tools ask whether there is any, and otherwise step once with zeros to make it, which counts. They find it.
    """

    def __init__(self, optimizer: Muon, states: Mapping[Any, Any]) -> None:
        super().__init__(dict, states)
        self._optimizer = weakref.ref(optimizer)

    def __bool__(self) -> bool:
        optimizer = self._optimizer()
        if not len(self) and optimizer is not None:
            optimizer._make_state()
        return len(self) > 0

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


class Muon(Optimizer):
    """Momentum orthogonalised by Newton-Schulz, for matrices; AdamW for the rest.

    On unsharded matrices it gives the bits of `torch.optim.Muon` (with `adjust_lr` as there, and compilation of
    Newton-Schulz off), on sharded ones (`DTensor`) the same within the rounding of bf16 products; ranks agree exactly.
    Each sharded matrix is put together and orthogonalised by one rank.

    Parameters
    ----------
    params : iterable of dict
        Groups, each with ``use_muon``: True for matrices, False for what AdamW updates. `outboard.muon.param_groups`
        makes them. Optional in each: ``names``, one for each parameter; ``flatten`` for tensors of more than two
        dimensions: three are taken as a stack of matrices, more as one matrix with a row for each index of the first,
        unless ``flatten`` is True or False. ``split`` of fused matrices (3 of queries, keys and values): so many parts
        of their rows are orthogonalised each by itself.
    lr : float or Tensor
    weight_decay : float
        Decoupled, for both kinds.
    momentum : float
    nesterov : bool
    ns_steps : int
        Newton-Schulz steps.
    none_grad : bool
        Whether to drop each gradient of a matrix once it is in the momentum.
    adamw_betas : pair of float
    adamw_eps : float
    ns_coefficients : triple, or list of triples
        Of the quintic, for all steps or one for each.
    adjust_lr : {"match_rms_adamw", "original"}
        How the learning rate grows with a matrix's shape, as in `torch.optim.Muon`. By default updates have about the
        size of AdamW's, so that one `lr` serves both kinds.
    clip_config : mapping, optional
        For QK clipping: see `step`, and `outboard.muon._clip.QkClip`.
    chunk_size : int
        Matrices that are worked on together; -1: four per rank.
    warmup_step : int
        Chunks whose shards are sent ahead of the one that is worked on.

    Raises
    ------
    ValueError, TypeError
        For groups without ``use_muon``, and values out of range.

    Notes
    -----
    State: ``momentum_buffer`` of a matrix, in the dtype of its gradient; ``step`` (a number), ``moment1`` and
    ``moment2`` of the rest. With `turn_on_cpu_offload` the tensors among it are in host memory between steps.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        none_grad: bool = True,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        *,
        ns_coefficients: Triple | Sequence[Triple] = COEFFICIENTS,
        adjust_lr: str = "match_rms_adamw",
        clip_config: Mapping[str, Any] | None = None,
        chunk_size: int = -1,
        warmup_step: int = 5,
    ) -> None:
        _groups.check_options(chunk_size, warmup_step)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "none_grad": none_grad,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "ns_coefficients": ns_coefficients,
            "adjust_lr": adjust_lr,
        }
        # What both kinds have is checked also where no group of that kind is.
        for use_muon in (True, False):
            _groups.check_group({**defaults, "use_muon": use_muon})
        self._chunk_size, self._warmup_step = int(chunk_size), int(warmup_step)
        self._clip = None if clip_config is None else QkClip(clip_config)
        self._hollow: HollowStates | None = None
        self._cpu_offload = False
        self._can_checkpoint = False
        super().__init__(params, defaults)
        self.state = _State(self, {})
        _checkpoint.register(self)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, with ``use_muon``.

        Raises
        ------
        ValueError, TypeError
        """
        if "use_muon" not in param_group:
            _groups.check_group(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group, len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, group: Group, index: int) -> None:
        _groups.check_group(group)
        names = _groups.names_of(group)
        if self._clip is not None and names is None and group["use_muon"]:
            raise ValueError("clip_config needs the names of parameters: put names into each group")
        for parameter, name in zip(group["params"], self._names(group, index), strict=True):
            _groups.check_parameter(parameter, group, name)

    def _names(self, group: Group, index: int) -> list[str]:
        given = _groups.names_of(group)
        return given or [f"parameter {at} of group {index}" for at in range(len(group["params"]))]

    # ---- The step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        qk_logits: Mapping[int, torch.Tensor] | None = None,
    ) -> Any:
        """Update all parameters that have gradients. On sharded parameters all ranks call it, with the same ones.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss anew; called once, with gradients enabled.
        qk_logits : mapping, optional
            For each layer, the largest attention logit of each head, shape (number of logits in `clip_config`,): query
            and key projections of heads with a larger one than the threshold are scaled by sqrt(threshold / logit),
            after the update.

        Returns
        -------
        What the closure returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if _capture.is_capturing():
            raise _capture.refuse("step() of Muon")
        entries = self._entries(qk_logits)
        batches = cut(entries, self._chunk_size)
        traffic = self._begin_traffic(entries, batches)
        try:
            self._run(batches, traffic)
            if traffic is not None:
                traffic.end()
        except BaseException:
            if traffic is not None:
                # What has failed is to be seen, not what could not be done about it.
                with suppress(Exception):
                    traffic.abandon()
            raise
        if qk_logits is not None and self._clip is not None:
            for name, parameter in self._named():
                self._clip.apply(name, parameter, qk_logits)
        return loss

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [
            pair
            for index, group in enumerate(self.param_groups)
            for pair in zip(self._names(group, index), group["params"], strict=True)
        ]

    def _entries(self, qk_logits: Mapping[int, torch.Tensor] | None) -> list[Entry]:
        """Check everything that can be checked before anything changes; return the parameters with gradients."""
        if qk_logits is not None:
            if self._clip is None:
                raise ValueError("qk_logits without clip_config: it says which heads they are of, and the threshold")
            self._clip.check(self._named(), qk_logits)
        entries = []
        for index, group in enumerate(self.param_groups):
            _groups.check_group(group)
            names = self._names(group, index)
            for parameter, name in zip(group["params"], names, strict=True):
                if parameter.grad is not None:
                    _groups.check_gradient(parameter, name)
                    entries.append(Entry(parameter, name, group, self.state))
        named = [
            (name, parameter)
            for index, group in enumerate(self.param_groups)
            if group["use_muon"]
            for name, parameter in zip(self._names(group, index), group["params"], strict=True)
        ]
        check_agreement([parameter for _, parameter in named], [name for name, _ in named])
        of = {id(entry.parameter): entry.name for entry in entries}
        with torch.no_grad():
            _sharded.complete_gradients([entry.parameter for entry in entries], lambda one: of[id(one)])
        return entries

    def _begin_traffic(self, entries: Sequence[Entry], batches: Sequence[Batch]) -> HollowTraffic | None:
        if self._hollow is None:
            return None
        self._hollow.carriers.check_process()
        # What others have put into the state since the last step.
        self._hollow.keep_only(tensor for _, tensor in self._named_states())
        self._hollow.take(self._named_states())
        self._make_on_host((one.name, one.parameter, one.like, one.group["use_muon"]) for one in entries)
        return HollowTraffic(self._hollow, [batch.state_tensors() for batch in batches])

    def _run(self, batches: Sequence[Batch], traffic: HollowTraffic | None) -> None:
        """Work through the batches: shards travel ahead of the products, and back behind them."""
        gathering: deque[Chunk] = deque()
        scattering: deque[Chunk] = deque()
        for index, batch in enumerate(batches):
            if traffic is not None:
                traffic.arrive(index)
            batch.update_state()
            if traffic is not None:
                traffic.leave(index)
            if not isinstance(batch, Chunk):
                continue
            batch.gather()
            gathering.append(batch)
            if len(gathering) > (self._warmup_step if batch.travels else 0):
                self._work_on(gathering, scattering)
        while gathering:
            self._work_on(gathering, scattering)
        while scattering:
            scattering.popleft().apply()

    @staticmethod
    def _work_on(gathering: deque[Chunk], scattering: deque[Chunk]) -> None:
        chunk = gathering.popleft()
        chunk.orthogonalize()
        scattering.append(chunk)
        # The shards of the one before have come back meanwhile.
        while len(scattering) > 1:
            scattering.popleft().apply()

    def _make_state(self) -> None:
        """Make the state that the first step would find, for all parameters."""
        names = iter(self._named())
        wanted = [
            (name, parameter, _sharded.local(parameter), group["use_muon"])
            for group in self.param_groups
            for parameter, (name, _) in zip(group["params"], names, strict=False)
            if parameter.requires_grad
        ]
        if self._hollow is not None:
            self._make_on_host(wanted)
        for _, parameter, like, use_muon in wanted:
            first_state(self.state[parameter], parameter, like, use_muon=use_muon)

    def _make_on_host(self, wanted: Iterable[tuple[str, torch.Tensor, torch.Tensor, bool]]) -> None:
        """Make zeros for (name, parameter, what its state is like, use_muon), where there are none and they can leave.

        Made at once, they lie side by side in one buffer, and are nowhere on the device.
        """
        assert self._hollow is not None
        made = []
        for name, parameter, like, use_muon in wanted:
            for key in missing_keys(self.state.get(parameter, {}), use_muon):
                tensor = shell_like(like, parameter)
                if tensor is not None:
                    made.append((name, parameter, key, tensor))
        zero = torch.zeros(())
        self._hollow.take(
            [(f"{key} of {name}", tensor) for name, _, key, tensor in made], {id(one[3]): zero for one in made}
        )
        for _, parameter, key, tensor in made:
            self.state[parameter][key] = tensor
            if key != "momentum_buffer":
                self.state[parameter]["step"] = 0

    # ---- State on the host -----------------------------------------------------------------------------------------

    @property
    def cpu_offload(self) -> bool:
        """Whether state is in host memory between steps."""
        return self._cpu_offload

    def _named_states(self) -> list[tuple[str, torch.Tensor]]:
        """Return the state tensors that there are, with names."""
        found = []
        for name, parameter in self._named():
            state = self.state.get(parameter, {})
            found += [(f"{key} of {name}", value) for key, value in state.items() if isinstance(value, torch.Tensor)]
        return found

    def turn_on_cpu_offload(self, checkpoint: bool | None = None) -> None:
        """Keep state in host memory between steps, from now on; it may exist already, or not yet.

        The state's tensors stay the same objects, of the same shape, dtype and device; their storage on the device has
        0 bytes between steps. In a step state comes to the device batch by batch, and goes back. Results have the same
        bits. What is in host memory by itself stays there.

        Parameters
        ----------
        checkpoint : bool, optional
            Whether `state_dict` and `load_state_dict` work meanwhile, from and into host memory; they raise otherwise.
            Unless given, it is as an earlier call has said, or else they raise.
        """
        if checkpoint is not None:
            self._can_checkpoint = bool(checkpoint)
        if self._cpu_offload:
            return
        hollow = HollowStates(default_threads()[0])
        try:
            hollow.take(self._named_states())
        except BaseException:
            # There is not enough host memory: everything stays where it was.
            hollow.give_back()
            raise
        self._hollow = hollow
        self._cpu_offload = True

    def turn_off_cpu_offload(self) -> None:
        """Bring state back to the device and free host memory."""
        if self._hollow is not None:
            self._hollow.give_back()
        self._hollow = None
        self._cpu_offload = self._can_checkpoint = False

    def host_buffers(self) -> list[torch.Tensor]:
        """Return the host memory that state is in: flat uint8 tensors, pinned where that can be; none while off."""
        return [] if self._hollow is None else self._hollow.carriers.buffers()

    # ---- Copies ----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state: Any = self.state
        if self._hollow is not None:
            self._hollow.carriers.settle()
            state = defaultdict(dict, state)
            for parameter, own in list(state.items()):
                device = _sharded.local(parameter).device
                state[parameter] = {key: self._exported(value, device) for key, value in own.items()}
        settings = {"_chunk_size": self._chunk_size, "_warmup_step": self._warmup_step, "_clip": self._clip}
        return {"defaults": self.defaults, "state": state, "param_groups": self.param_groups, **settings}

    def _exported(self, value: Any, device: torch.device) -> Any:
        assert self._hollow is not None
        host = self._hollow.host_of(value) if isinstance(value, torch.Tensor) else None
        return value if host is None else on_device(host, device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_new = "_hollow" not in self.__dict__
        super().__setstate__(state)
        self.state = _State(self, self.state)
        if is_new:
            # A copy has its state on the device.
            self._hollow, self._cpu_offload, self._can_checkpoint = None, False, False
            _checkpoint.register(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Muon:
        made: Muon = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(deepcopy(self.__getstate__(), memo))
        return made
