"""What is asked of the optimizer that a model is attached to, by all that follows the model for it."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from outboard._lanes import LaneOptions
from outboard._native import Core, GroupSettings
from outboard._slots import Slots


class Owner(Protocol):
    """An optimizer, as far as hooks, gradients and readers go."""

    param_groups: list[dict[str, Any]]
    _lock: threading.RLock
    _slots: Slots
    _lanes: LaneOptions
    _eager: str | bool
    _seed: int
    _has_a_share: bool

    @property
    def _core(self) -> Core: ...

    def _needs_all_gradients(self) -> bool:
        """Whether options ask for all gradients before the first update."""

    def _adopt(self) -> None:
        """Take over state tensors that others have replaced."""

    def _take_one(self, parameter: torch.Tensor, grad: torch.Tensor, settings: GroupSettings) -> bool:
        """Begin the update of one parameter; whether `step()` need not."""

    def _offload_now(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Take gradients to host memory; return the parameters whose gradients stay."""


class Follower(Protocol):
    """What hooks on a model call."""

    def gradient_is_ready(self, parameter: torch.Tensor) -> None:
        """Handle a complete gradient of a parameter."""

    def forward_begins(self, module: torch.nn.Module, uses: Any) -> None:
        """Let a module's forward wait for its own weights."""

    def model_begins(self) -> None:
        """Look at those modules of a model that are not called, and at who calls it."""

    def compiled_begins(self, module: Any) -> None:
        """Wait for all that a compiled region may use."""

    def wrapper_begins(self, wrapper: torch.nn.Module) -> None:
        """Note whether a DDP wrapper is going to average gradients."""

    def buckets_are_written(self) -> None:
        """Let the backward that follows wait for what still reads its buckets."""

    def shards_are_read(self, group: Any, async_op: bool) -> None:
        """Let the stream on which FSDP2 reads shards wait for them."""


class Ending(Protocol):
    """What is told of the end of a backward."""

    def backward_has_ended(self) -> None:
        """Do what is to be done once all gradients are there."""
