"""Benchmarks: both sides in one run, alternating, medians. Also `python -m outboard bench`.

Speed is a ratio: `ratio_to_torch_fused` above 1 means that outboard is faster than `torch.optim.AdamW(fused=True)` on
the same values, on this machine, in this run.
"""

from outboard.bench.common import PlotError, Progress, machine
from outboard.bench.host import host
from outboard.bench.lanes import lanes
from outboard.bench.step import training_step

#: Alternating blocks per measurement of `host`; the medians over them are reported.
BLOCKS = 9

#: Timed calls in a block of `host`.
TIMED = 3

#: The many small parameters of `host`.
TINY_PARAMETERS, TINY_ELEMENTS = 10_000, 1_000

__all__ = [
    "host",
    "lanes",
    "training_step",
    "machine",
    "BLOCKS",
    "TIMED",
    "TINY_PARAMETERS",
    "TINY_ELEMENTS",
    "PlotError",
    "Progress",
]
