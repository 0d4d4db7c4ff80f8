"""QK clipping: query and key projections of heads whose attention logits have grown too large are scaled down.

After "Kimi K2: Open Agentic Intelligence" (MuonClip): where the largest logit of a head exceeds a threshold, query and
key weights are each multiplied by sqrt(threshold / logit), so that their product is by threshold / logit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from outboard import _sharded
from outboard.muon._spread import part_of_whole

_QUERIES = frozenset(("q_proj", "wq", "q", "query", "to_q"))
_KEYS = frozenset(("k_proj", "wk", "k", "key", "to_k"))


def parse_qk_name(name: str) -> tuple[int, str] | None:
    """Return the layer and the kind ("q" or "k") of a projection by its parameter's name; None for other parameters.

    The layer is the first number among the parts between dots; the kind is by a part among q_proj, wq, q, query, to_q,
    or k_proj, wk, k, key, to_k: ``layers.3.attention.q_proj.weight`` is ``(3, "q")``. Biases are projections' too.
    """
    parts = name.split(".")
    layer = next((int(part) for part in parts if re.fullmatch(r"\d+", part)), None)
    kind = "q" if _QUERIES & set(parts) else "k" if _KEYS & set(parts) else None
    return None if layer is None or kind is None else (layer, kind)


class QkClip:
    """The settings of clipping.

    Parameters
    ----------
    config : mapping
        ``q_indices``, ``k_indices``: for each logit, the head (block of rows) of the query and of the key projection
        that it belongs to; with grouped queries several share a key head. ``head_dim``: rows of a head. ``threshold``.
        Optional ``parse``: instead of `parse_qk_name`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        known = {"q_indices", "k_indices", "head_dim", "threshold", "parse"}
        missing = sorted(known - {"parse"} - config.keys())
        unknown = sorted(config.keys() - known)
        if missing or unknown:
            raise ValueError(f"clip_config lacks {missing} and has unknown {unknown}; it takes {sorted(known)}")
        self.indices = {"q": [int(one) for one in config["q_indices"]], "k": [int(one) for one in config["k_indices"]]}
        if len(self.indices["q"]) != len(self.indices["k"]) or not self.indices["q"]:
            raise ValueError(
                f"clip_config has {len(self.indices['q'])} q_indices and {len(self.indices['k'])} k_indices: one of "
                "each for every logit"
            )
        if min(*self.indices["q"], *self.indices["k"]) < 0:
            raise ValueError("indices of heads begin at 0")
        self.head_dim = int(config["head_dim"])
        self.threshold = float(config["threshold"])
        if self.head_dim < 1 or not self.threshold > 0:
            raise ValueError(f"head_dim and threshold must be positive, not {self.head_dim} and {self.threshold}")
        self._on_device: dict[tuple[str, torch.device], torch.Tensor] = {}
        self.parse: Callable[[str], tuple[int, str] | None] = config.get("parse") or parse_qk_name

    def check(self, named: list[tuple[str, torch.Tensor]], logits: Mapping[int, torch.Tensor]) -> None:
        """Check the logits of a step, before it changes anything.

        Raises
        ------
        ValueError
        """
        layers = set()
        for name, parameter in named:
            found = self.parse(name)
            if found is None:
                continue
            layer, kind = found
            layers.add(layer)
            heads = parameter.shape[0] // self.head_dim
            if layer in logits and (parameter.shape[0] % self.head_dim or max(self.indices[kind]) >= heads):
                raise ValueError(
                    f"{name} has {parameter.shape[0]} rows: no {max(self.indices[kind]) + 1} heads of {self.head_dim}"
                )
        unknown = sorted(set(logits) - layers)
        if unknown:
            raise ValueError(f"qk_logits has layers {unknown}; query or key projections are in {sorted(layers)}")
        for layer, values in logits.items():
            if not isinstance(values, torch.Tensor) or tuple(values.shape) != (len(self.indices["q"]),):
                shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
                raise ValueError(
                    f"qk_logits[{layer}] must be a tensor of shape ({len(self.indices['q'])},), as clip_config has "
                    f"indices, not {shape}"
                )

    @torch.no_grad()
    def apply(self, name: str, parameter: torch.Tensor, logits: Mapping[int, torch.Tensor]) -> None:
        """Scale the rows of a query or key projection; others, and heads below the threshold, are left as they are."""
        found = self.parse(name)
        if found is None or found[0] not in logits:
            return
        layer, kind = found
        own = _sharded.local(parameter)
        # All on the device: the host does not wait to see a logit.
        largest = logits[layer].detach().to(own.device, torch.float32)
        factors = torch.where(
            (largest > self.threshold) & largest.isfinite(), (self.threshold / largest).sqrt(), torch.ones_like(largest)
        )
        heads = torch.ones(parameter.shape[0] // self.head_dim, device=own.device)
        key = (kind, own.device)
        if key not in self._on_device:
            self._on_device[key] = torch.tensor(self.indices[kind], device=own.device)
        index = self._on_device[key]
        heads.scatter_reduce_(0, index, factors, "amin")
        rows = heads.repeat_interleave(self.head_dim, output_size=parameter.shape[0])
        # Products are rounded to bf16, factors are not: that would be up to 0.2 % off, and of all rows of a head alike.
        wide = torch.promote_types(own.dtype, torch.float32)
        whole = rows.to(wide).view(-1, *[1] * (parameter.ndim - 1)).expand(parameter.shape)
        own.copy_(own.to(wide) * part_of_whole(whole, parameter))
        # Not seen by autograd otherwise, of a DTensor.
        if own is not parameter:
            torch.autograd.graph.increment_version(parameter)
