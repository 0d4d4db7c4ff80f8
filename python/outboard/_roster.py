"""The parameters that an attached optimizer follows: which group each is in, and which have a gradient hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outboard import _pending, _sharded, _wrappers

#: Parameters of no more elements have no hook of their own (ten thousand cost 55 ms a step): `step()` takes them all at
#: once. Taken at the end of backward, they had to be read again at `step()`, to compare. As `TINY_ELEMS` of the lanes.
TINY_ELEMS = 64 * 1024


class Roster:
    """Follows the groups of an optimizer.

    Parameters
    ----------
    param_groups : callable
        Returns the optimizer's groups as they are now.
    gradient_hook : callable
        What is called with a parameter whose gradient is complete.
    """

    def __init__(self, param_groups: Callable[[], list[dict[str, Any]]], gradient_hook: Callable[[Any], None]) -> None:
        self._param_groups = param_groups
        self._gradient_hook = gradient_hook
        #: The group of each parameter, by its id.
        self.groups: dict[int, dict[str, Any]] = {}
        self.listed: list[torch.Tensor] = []
        #: The handles of gradient hooks, by the parameter's id.
        self.hooked: dict[int, Any] = {}
        #: Those that can be marked (`_pending`), by their ids, and those that cannot.
        self.markable: dict[int, torch.Tensor] = {}
        self.unmarkable: list[torch.Tensor] = []
        #: Those without a hook that can be marked.
        self.unhooked: list[torch.Tensor] = []
        #: Whether groups have changed since `step()` has last made state for all that wants it.
        self.has_changed = False
        #: Whether updates may overlap what follows: not where others read weights past everything that is seen here.
        self.overlaps = True
        #: Whether gradients are final only after backward, since DDP averages them at its end.
        self.finishes_late = False
        self._frozen: list[torch.Tensor] = []
        self._signature: Any = None

    def refresh(self) -> None:
        """Follow the optimizer's groups: hook what is new, or has been unfrozen."""
        groups = self._param_groups()
        # By identity: what is compared is kept alive below.
        signature = [(id(group), bool(group["amsgrad"]), *map(id, group["params"])) for group in groups]
        if signature == self._signature and not any(parameter.requires_grad for parameter in self._frozen):
            return
        self._signature = signature
        self.has_changed = True
        self.groups = {id(parameter): group for group in groups for parameter in group["params"]}
        # Once each: torch only warns of one that is listed twice, and it is updated once.
        self.listed = list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())
        for parameter in self.listed:
            wants_hook = self.overlaps and id(parameter) not in self.hooked and self._wants_hook(parameter)
            # torch refuses a hook on a frozen one: it gets it at the step after it has been unfrozen.
            if wants_hook and parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._gradient_hook)  # type: ignore[no-untyped-call]
                self.hooked[id(parameter)] = handle
        self.markable = {id(parameter): parameter for parameter in self.listed if _pending.can_mark(parameter)}
        self.unmarkable = [parameter for parameter in self.listed if id(parameter) not in self.markable]
        self.unhooked = [parameter for key, parameter in self.markable.items() if key not in self.hooked]
        self._frozen = [parameter for parameter in self.listed if not parameter.requires_grad]

    def _wants_hook(self, parameter: torch.Tensor) -> bool:
        if not _pending.can_mark(parameter) or _wrappers.copies_gradients_to_host(parameter):
            return False
        return _sharded.local(parameter).numel() > TINY_ELEMS

    def remove(self) -> None:
        """Take the gradient hooks off."""
        for handle in self.hooked.values():
            handle.remove()
        self.hooked.clear()
