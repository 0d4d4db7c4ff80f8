"""Models to measure a training step with: plain GPTs, nothing recomputed, and many tiny parameters beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from outboard._arguments import check_choice


@dataclass(frozen=True)
class Shape:
    """The dimensions of a GPT.

    Attributes
    ----------
    width, layers, heads : int
        Of the residual stream, blocks, attention heads per block.
    vocabulary, context : int
        Tokens there are, and tokens of the longest sequence.
    """

    width: int
    layers: int
    heads: int
    vocabulary: int = 32_000
    context: int = 2048


#: 1,343 million parameters, 369, 135, and 0.17.
MODELS = {
    "gpt-1.3b": Shape(2048, 24, 16),
    "gpt-350m": Shape(1024, 24, 16),
    "gpt-125m": Shape(768, 12, 12),
    "gpt-tiny": Shape(64, 2, 4, vocabulary=512, context=128),
}

#: Elements of each of the many tiny parameters.
TINY_ELEMENTS = 1_000


def check_model(name: str) -> Shape:
    """Return the dimensions of the model of this name; a ValueError lists the names."""
    check_choice("model", name, tuple(MODELS))
    return MODELS[name]


class Block(torch.nn.Module):
    """Causal self-attention and a perceptron four times as wide, each behind a norm and added to its input."""

    def __init__(self, shape: Shape, **where: Any) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = torch.nn.LayerNorm(width, **where)
        self.query_key_value = torch.nn.Linear(width, 3 * width, **where)
        self.attention_out = torch.nn.Linear(width, width, **where)
        self.perceptron_norm = torch.nn.LayerNorm(width, **where)
        self.widen = torch.nn.Linear(width, 4 * width, **where)
        self.narrow = torch.nn.Linear(4 * width, width, **where)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the residual stream, (batch, tokens, width), after this block."""
        heads = self.query_key_value(self.attention_norm(stream)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(mixed.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.widen(self.perceptron_norm(stream)), approximate="tanh")
        output: torch.Tensor = stream + self.narrow(hidden)
        return output


class GPT(torch.nn.Module):
    """A decoder with learned positions whose output is the loss.

    Parameters
    ----------
    shape : Shape
        Its dimensions.
    tiny : int
        Parameters of `TINY_ELEMENTS` elements to add beside it.
    dtype, device
        Of all parameters.
    """

    def __init__(self, shape: Shape, tiny: int = 0, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        self.tokens = torch.nn.Embedding(shape.vocabulary, shape.width, **where)
        self.positions = torch.nn.Parameter(torch.empty(shape.context, shape.width, **where))
        self.blocks = torch.nn.ModuleList(Block(shape, **where) for _ in range(shape.layers))
        self.norm = torch.nn.LayerNorm(shape.width, **where)
        self.head = torch.nn.Linear(shape.width, shape.vocabulary, bias=False, **where)
        self.tiny = Tiny(tiny, **where) if tiny else None
        for table in (self.tokens.weight, self.positions):
            torch.nn.init.normal_(table, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in fp32 of `targets`; both arguments are (batch, tokens) of int64."""
        stream = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        scores = self.head(self.norm(stream)).float()
        loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        return loss if self.tiny is None else loss + self.tiny()


class Tiny(torch.nn.Module):
    """Many small parameters, read in one operation, so that they cost the host as little as they can.

    Their gradients are views of one tensor. Autograd takes some microseconds of the host for each all the same.
    """

    def __init__(self, count: int, **where: Any) -> None:
        super().__init__()
        for index in range(count):
            self.register_parameter(f"p{index}", torch.nn.Parameter(torch.zeros(TINY_ELEMENTS, **where)))

    def forward(self) -> torch.Tensor:
        """Return a thousandth of the sum of all elements, in fp32."""
        return (torch.cat([*self._parameters.values()]) * 1e-3).sum(dtype=torch.float32)  # type: ignore[list-item]


def build(name: str, tiny: int, dtype: torch.dtype, device: torch.device) -> GPT:
    """Return the model of this name with the same values each time."""
    torch.manual_seed(0)
    return GPT(check_model(name), tiny, dtype=dtype, device=device)
