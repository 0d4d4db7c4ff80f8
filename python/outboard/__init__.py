"""torch optimizers whose state lives outside the GPU, with the same bits as torch's own.

`outboard.AdamW` and `outboard.Adam` are ordinary torch optimizers. Importing this package never initialises CUDA.
"""

from outboard import bench
from outboard._adam import Adam, AdamW
from outboard._native import (
    DeviceError,
    ForkedError,
    NonFiniteError,
    OutboardError,
    PoisonedError,
    WorkerError,
    build_info,
)

__version__: str = build_info()["version"]

__all__ = [
    "AdamW",
    "Adam",
    "bench",
    "build_info",
    "OutboardError",
    "WorkerError",
    "PoisonedError",
    "NonFiniteError",
    "ForkedError",
    "DeviceError",
    "__version__",
]
