"""torch optimizers whose state lives outside the GPU, with the same bits as torch's own.

`outboard.AdamW` and `outboard.Adam` are ordinary torch optimizers. Importing this package never initialises CUDA.
"""

import sysconfig as _sysconfig
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise ImportError(
        "outboard's extension is built for Python's stable ABI, which a free-threaded Python cannot load: use a Python "
        "with the global interpreter lock (python3.14 rather than python3.14t)"
    )

from outboard import doctor
from outboard._activations import ActivationError, ActivationOffload, offload_activations
from outboard._adam import Adam, AdamW
from outboard._host_pool import HostPool
from outboard._native import (
    DeviceError,
    ForkedError,
    NonFiniteError,
    OutboardError,
    PoisonedError,
    PoolLimitError,
    StateError,
    WorkerError,
    build_info,
)
from outboard._offload import StateOffload, offload_state
from outboard._trace import add_chunks_to_trace

if _TYPE_CHECKING:
    from outboard import bench, checkpoint, muon
    from outboard.muon import Muon

__version__: str = build_info()["version"]


def __getattr__(name: str) -> object:
    """Import what not all training needs when it is first asked for."""
    import importlib

    if name in ("bench", "checkpoint", "muon"):
        return importlib.import_module(f"outboard.{name}")
    if name == "Muon":
        return importlib.import_module("outboard.muon").Muon
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ActivationOffload",
    "AdamW",
    "Adam",
    "HostPool",
    "Muon",
    "StateOffload",
    "add_chunks_to_trace",
    "bench",
    "checkpoint",
    "doctor",
    "muon",
    "offload_activations",
    "offload_state",
    "build_info",
    "OutboardError",
    "WorkerError",
    "PoisonedError",
    "NonFiniteError",
    "ForkedError",
    "DeviceError",
    "StateError",
    "PoolLimitError",
    "ActivationError",
    "__version__",
]
