"""Nothing here is collected unless it is asked for: the frameworks are no dependencies, and take 20 s to import."""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# Read when the frameworks are imported, and when CUDA begins.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    is_asked_for = re.search(r"(?<!not )\bintegrations\b", str(config.option.markexpr)) is not None
    return None if is_asked_for else True


@pytest.fixture(params=["host", "simulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return where a model is trained: in host memory, on a device with lanes made of it, or on CUDA.

    Small parameters have hooks, so that updates of small models begin in backward.
    """
    yield from _side(request, monkeypatch)


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def device_side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return where a model is trained, as `side`, without host memory."""
    yield from _side(request, monkeypatch)


def _side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from outboard import _roster
    from outboard._lanes import LaneOptions
    from tiny import Side

    name = request.param
    monkeypatch.setattr(_roster, "TINY_ELEMS", 50)
    if name == "simulated":
        monkeypatch.setattr(LaneOptions, "simulate", zlib.crc32(request.node.name.encode()))
    # Two runs on CUDA are compared to the bit.
    torch.use_deterministic_algorithms(name == "cuda")
    yield Side(name)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Let no framework talk."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
