"""bitsandbytes' AdamW and Adam, of 32 bits and of 8 bits in blocks, paged or not.

The layout is that of bitsandbytes 0.50, and of earlier ones that keep the same keys beside `step` rather than wrapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_WRAPPED = "__bnb_optimizer_quant_state__"
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "initial_lr", "param_names")

#: Elements of a block: 256 now, 2048 before.
_BLOCKS = (256, 2048, 4096, 1024, 512, 128, 64)


def from_bitsandbytes(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of a bitsandbytes optimizer in torch's layout.

    Parameters
    ----------
    state_dict : mapping
        Of Adam or AdamW of 32 or 8 bits (blockwise), paged or not, as `torch.load` gives it.

    Returns
    -------
    dict
        `state` and `param_groups`, for `load_state_dict` of an optimizer of the same groups. Moments are fp32. Settings
        that torch's AdamW does not have are left out.

    Raises
    ------
    ValueError
        Naming the parameter by its number, for state of another optimizer, or in 8 bits without blocks.
    """
    return {
        "state": {number: _state(values, number) for number, values in state_dict["state"].items() if values},
        "param_groups": [
            {**{key: group[key] for key in _SETTINGS if key in group}, "params": list(group["params"])}
            for group in state_dict["param_groups"]
        ],
    }


def _state(values: Mapping[str, Any], number: Any) -> dict[str, Any]:
    values = {**values, **values.get(_WRAPPED, {})}
    missing = [key for key in ("step", "state1", "state2") if key not in values]
    if missing:
        raise ValueError(
            f"parameter {number}: its state has no {missing[0]}, so it is not of bitsandbytes' Adam or AdamW"
        )
    return {
        "step": values["step"],
        "exp_avg": _moment(values, "1", number),
        "exp_avg_sq": _moment(values, "2", number),
    }


def _moment(values: Mapping[str, Any], which: str, number: Any) -> torch.Tensor:
    codes: torch.Tensor = values[f"state{which}"]
    if codes.dtype is not torch.uint8:
        return codes
    qmap, absmax = values.get(f"qmap{which}"), values.get(f"absmax{which}")
    if qmap is None or absmax is None:
        raise ValueError(
            f"parameter {number}: its state is in 8 bits without blocks (no absmax{which}), which cannot be read"
        )
    count = codes.numel()
    size = next((size for size in _BLOCKS if -(-count // size) == absmax.numel()), None)
    if size is None:
        raise ValueError(f"parameter {number}: {absmax.numel()} blocks do not make {count} elements")
    # The last block may be short.
    scale: torch.Tensor = absmax.float().repeat_interleave(size)[:count].view(codes.shape)
    numbers: torch.Tensor = qmap.float()[codes.int()]
    return numbers * scale
