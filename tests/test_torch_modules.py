"""torch's own database of modules (`module_db`): each is trained with updates under way, and none reads a weight early.

Modules read their weights in many ways: through a list that was made at construction (recurrent layers), as another
module's (attention, transformers), by a native function. The twin is outboard's optimizer in host memory, over a copy
that computes its own gradients.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

import outboard
from fused import SMALL_RINGS
from lanes import TwinModel, is_pending

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of numba and others, which torch's test tools import where they are installed
    from torch.testing._internal.common_modules import module_db


def made(info: Any) -> list[tuple[torch.nn.Module, Any]]:
    """Return modules with parameters and what they are called with: of each module's inputs up to three."""
    found: list[tuple[torch.nn.Module, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arguments that are deprecated
        for entry in info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
        ):
            of_module = entry.constructor_input
            module = info.module_cls(*of_module.args, **of_module.kwargs).float()
            for part in module.modules():
                # What it draws on a device does not start anew with the seed.
                if isinstance(getattr(part, "dropout", None), float):
                    part.dropout = 0.0
                elif isinstance(part, torch.nn.Dropout):
                    part.p = 0.0
            if entry.forward_input is not None and list(module.parameters()):
                found.append((module, entry.forward_input))
            if len(found) == 3:
                break
    return found


#: Lazy modules have no parameters before their first call, and so nothing to make an optimizer of.
TRAINED = [info for info in module_db if "Lazy" not in info.name and made(info)]


def test_the_database_has_what_is_tested() -> None:
    names = {info.name for info in TRAINED}
    assert len(TRAINED) >= 28
    assert {"nn.LSTM", "nn.GRU", "nn.MultiheadAttention", "nn.Transformer", "nn.Embedding", "nn.BatchNorm2d"} <= names


def loss(module: torch.nn.Module, call: Any, step: int) -> torch.Tensor:
    """Return a number that depends on everything that a module returns."""
    torch.manual_seed(step)
    device = next(iter(module.parameters())).device

    def there(x: Any) -> Any:
        if isinstance(x, PackedSequence):
            return x.to(device)
        return x.detach().clone().to(device) if isinstance(x, torch.Tensor) else x

    args, kwargs = tree_map(there, (call.args, call.kwargs), is_leaf=lambda x: isinstance(x, PackedSequence))
    leaves = tree_leaves(module(*args, **kwargs))
    return sum(
        (x.float().square().mean() for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad),
        torch.zeros((), device=device),
    )


@pytest.mark.usefixtures("small_ones_have_hooks")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of modules, about their own arguments
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("info", TRAINED, ids=lambda info: info.name)
def test_modules(lanes_device, info, monkeypatch) -> None:
    """Three steps, each forward at once after the step before."""
    from outboard import _roster

    monkeypatch.setattr(_roster, "TINY_ELEMS", 3)
    if not lanes_device.is_simulated:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for number, (module, call) in enumerate(made(info)):
            module = module.to(lanes_device.device)
            twin = TwinModel(module, equal=copy.deepcopy(module), lr=0.01)
            opt = outboard.AdamW(module.parameters(), lr=0.01, threads=1, eager=number != 1, **SMALL_RINGS)
            opt.attach(module)
            pending = False
            for step in range(3):
                of_step = loss(module, call, step)
                if not of_step.requires_grad:
                    break
                of_step.backward()
                opt.step()
                pending |= any(map(is_pending, module.parameters()))
            for step in range(3):
                of_step = loss(twin.model, call, step)
                if not of_step.requires_grad:
                    break
                of_step.backward()
                twin.step()
            assert pending or not of_step.requires_grad
            twin.check(opt, f"{info.name} {number}")
    finally:
        torch.use_deterministic_algorithms(False)
