"""Text as bytes: where it comes from, how it is split, which batch belongs to which step."""

from __future__ import annotations

import hashlib
import platform
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .settings import UsageError

MEBIBYTE = 1 << 20
#: Enough for a short run to see little of it twice, and quick to read.
TEXT_LIMIT = 4 * MEBIBYTE
VALIDATION_SHARE = 0.1
VALIDATION_BATCHES = 8


@dataclass(frozen=True)
class Text:
    """A text, split into a training part and the validation part behind it.

    Attributes
    ----------
    source : str
        Where it comes from, in words.
    train, validation : Tensor
        uint8, one dimension.
    sha256 : str
        Of the whole text as used.
    """

    source: str
    train: Tensor
    validation: Tensor
    sha256: str

    @property
    def size(self) -> int:
        """Bytes in both parts."""
        return len(self.train) + len(self.validation)

    def unigram_entropy(self) -> float:
        """Nats per byte that knowing only how frequent each byte is would cost."""
        counts = torch.bincount(torch.cat([self.train, self.validation]), minlength=256)
        share = counts[counts > 0].double() / self.size
        return -float((share * share.log()).sum())


def load_text(path: str | None, context: int) -> Text:
    """Read a text and split it.

    Parameters
    ----------
    path : str or None
        A file, or None for the sources of the running interpreter's standard library: real
        text that every machine has, in the same order every time.
    context : int
        Bytes in a training sequence; decides how short a text may be.

    Returns
    -------
    Text
        At most ``TEXT_LIMIT`` bytes.

    Raises
    ------
    UsageError
        The file cannot be read, or is too short to train on.
    """
    if path is None:
        source, data = _standard_library()
    else:
        source = path
        try:
            with open(path, "rb") as file:
                data = file.read(TEXT_LIMIT)
        except OSError as error:
            raise UsageError(f"cannot read --text {path}: {error.strerror}") from error
    validation_bytes = int(len(data) * VALIDATION_SHARE)
    if validation_bytes < context + 1:
        least = int((context + 1) / VALIDATION_SHARE) + 1
        raise UsageError(
            f"text too short: {source} has {len(data):,} bytes, and sequences of "
            f"{context} (--context) need at least {least:,}"
        )
    # bytearray, because torch warns about memory that it must not write to.
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    split = len(data) - validation_bytes
    return Text(source, tensor[:split], tensor[split:], hashlib.sha256(data).hexdigest())


def _standard_library() -> tuple[str, bytes]:
    folder = Path(sysconfig.get_path("stdlib"))
    # _sysconfigdata lists the compiler flags and folders of whoever built this Python.
    files = sorted(f for f in folder.glob("*.py") if not f.name.startswith("_sysconfigdata"))
    data = b"".join(file.read_bytes() for file in files)[:TEXT_LIMIT]
    python = f"{platform.python_implementation()} {platform.python_version()}"
    source = f"standard library of {python}"
    if not files:
        raise UsageError(f"the {source} has no sources here: give a text with --text FILE")
    return source, data


def training_batch(text: Text, *, batch: int, context: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of one step.

    It is a function of seed and step alone, so a resumed run needs no reader's state to see
    what an uninterrupted one would.

    Returns
    -------
    tuple of Tensor
        Bytes and the bytes that follow each of them, int64, ``(batch, context)``.
    """
    # torch's generator would use only 32 bits of a seed made of two numbers; this one hashes.
    generator = random.Random(f"{seed}/{step}")
    last = len(text.train) - context - 1
    return _windows(text.train, [generator.randint(0, last) for _ in range(batch)], context)


def validation_batches(text: Text, *, batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
    """Return the fixed validation batches: windows spread evenly over the validation part."""
    count = VALIDATION_BATCHES * batch
    last = len(text.validation) - context - 1
    starts = [last * i // max(1, count - 1) for i in range(count)]
    return [_windows(text.validation, starts[i : i + batch], context) for i in range(0, count, batch)]


def _windows(data: Tensor, starts: list[int], context: int) -> tuple[Tensor, Tensor]:
    window = torch.stack([data[start : start + context + 1] for start in starts]).long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
