"""torch optimizers whose state lives outside the GPU, with the same bits as torch's own.

`outboard.AdamW` and `outboard.Adam` are ordinary torch optimizers. Importing this package never initialises CUDA.
"""

import sysconfig as _sysconfig

if _sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise ImportError(
        "outboard's extension is built for Python's stable ABI, which a free-threaded Python cannot load: use a Python "
        "with the global interpreter lock (python3.14 rather than python3.14t)"
    )

from outboard import bench, doctor
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
    "doctor",
    "build_info",
    "OutboardError",
    "WorkerError",
    "PoisonedError",
    "NonFiniteError",
    "ForkedError",
    "DeviceError",
    "__version__",
]
