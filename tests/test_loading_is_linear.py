"""Loading looks at each parameter a bounded number of times: 10,000 small ones took 14 to 17 s."""

from __future__ import annotations

import copy

import pytest
import torch

import outboard
from outboard import _slots


@pytest.mark.parametrize("how", ["load_state_dict", "assignment to state", "deepcopy"])
def test_loading_asks_for_names_a_bounded_number_of_times(how, monkeypatch) -> None:
    count = 300
    params = [torch.ones(3, requires_grad=True) for _ in range(count)]
    optimizer = outboard.AdamW(params)
    for p in params:
        p.grad = torch.ones(3)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    asked = [0]
    real = _slots.parameter_name

    def counted(*args: object) -> str:
        asked[0] += 1
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(_slots, "parameter_name", counted)
    if how == "load_state_dict":
        optimizer.load_state_dict(saved)
    elif how == "deepcopy":
        copy.deepcopy(optimizer)
    else:
        optimizer.state.update({p: saved["state"][n] for n, p in enumerate(params)})
    assert asked[0] <= 20 * count, f"{asked[0]} names for {count} parameters"
