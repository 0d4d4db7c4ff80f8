"""CUDA graphs: what runs on the host is not captured, and queries of events from other threads break the capture."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph; does not initialise CUDA."""
    is_initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_initialized and torch.cuda.is_current_stream_capturing()


def refuse(what: str) -> RuntimeError:
    """Return the error that says what cannot be captured."""
    return RuntimeError(
        f"{what} on a stream that is being captured into a CUDA graph: updates run on the host and on streams of their "
        "own, which a graph does not hold. Capture forward and backward alone with an optimizer that is not attached, "
        "and call step() after each replay"
    )
