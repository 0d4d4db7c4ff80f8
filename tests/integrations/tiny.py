"""What the tests of frameworks share: tiny models with random weights, data, and what a run leaves to be compared.

On the CPU a run is compared with that of `torch.optim.AdamW(fused=True)` in the same framework, on CUDA, where torch's
kernel rounds otherwise, with that of outboard unattached. Sizes of parameters are multiples of 16, for which the bits
are torch's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import outboard
from lanes import host_only
from oracle import assert_same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the frameworks' own imports deprecate
    from transformers import LlamaConfig, LlamaForCausalLM

#: Options of an attached optimizer, as an argument of a test.
WAYS = {
    "auto": {},
    "not eager": {"eager": False},
    "eager": {"eager": True},
    "offloaded": {"offload_gradients": True},
}


def sides_and_ways(*ways: str) -> pytest.MarkDecorator:
    """Let a test run in each of these ways (by default all) where there are lanes, and in one in host memory.

    There the optimizer has nothing to begin early, and no gradient leaves.
    """
    ways = ways or tuple(WAYS)
    found = [pytest.param("host", ways[0], id=f"host-{ways[0]}")]
    found += [pytest.param("simulated", way, id=f"simulated-{way}") for way in ways]
    found += [pytest.param("cuda", way, id=f"cuda-{way}", marks=pytest.mark.cuda) for way in ways]
    return pytest.mark.parametrize(("side", "way"), found, indirect=["side"])


class Side:
    """Where a model is trained."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device("cuda" if name == "cuda" else "cpu")

    @property
    def has_lanes(self) -> bool:
        return self.name != "host"

    @property
    def reference(self) -> tuple[Any, dict[str, Any]]:
        """The class of optimizer, and options, that say what is right in fp32."""
        return (outboard.AdamW, {}) if self.name == "cuda" else (torch.optim.AdamW, {"fused": True})

    def unattached(self) -> Any:
        """Let outboard optimizers that are made in this context update what is in host memory there."""
        return nullcontext() if self.name == "cuda" else host_only()


def llama(dtype: torch.dtype = torch.float32, **options: Any) -> LlamaForCausalLM:
    """Make a model whose attention drops out, so that losses depend on the state of random numbers too."""
    torch.manual_seed(7)
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "attention_dropout": 0.1,
        # With a backward that is deterministic on CUDA.
        "attn_implementation": "eager",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **options})).to(dtype)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sentences."""

    def __init__(self, rows: int = 32, seed: int = 1) -> None:
        self.rows = torch.randint(3, 64, (rows, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


@dataclass
class Run:
    """What a run leaves."""

    model: torch.nn.Module
    optimizer: Any
    losses: list[float]
    eval_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    extra: Any = None

    @property
    def eager_updates(self) -> int:
        return int(self.optimizer.stats()["eager_updates"])


def assert_same_run(got: Run, wanted: Run, *, state: bool = False) -> None:
    """Fail unless losses and weights, and the optimizers' state if asked, are equal to the bit."""
    assert got.losses, "nothing has been trained"
    assert got.losses == wanted.losses
    assert got.eval_losses == wanted.eval_losses
    assert_same_weights(got.model, wanted.model)
    if state:
        assert_same_state(got, wanted)


def assert_same_weights(got: torch.nn.Module, wanted: torch.nn.Module) -> None:
    others = dict(wanted.named_parameters())
    assert others
    for name, parameter in got.named_parameters():
        assert_same(parameter.detach().cpu(), others.pop(name).detach().cpu(), name)
    assert not others


def assert_same_state(got: Run, wanted: Run) -> None:
    mine, theirs = got.optimizer.state_dict()["state"], wanted.optimizer.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    assert mine
    for number, values in mine.items():
        assert values.keys() == theirs[number].keys()
        for key, value in values.items():
            assert_same(value.cpu(), theirs[number][key].cpu(), f"{key} of {number}")


def changed(model: torch.nn.Module, original: torch.nn.Module) -> set[str]:
    """Return the names of parameters that have changed."""
    before = dict(original.named_parameters())
    return {name for name, p in model.named_parameters() if not torch.equal(p.detach().cpu(), before[name].cpu())}


def names(parameters: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    return {name for name, _ in parameters}
