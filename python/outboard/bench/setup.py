"""What one side of the training-step benchmark is to do; sent to its process as JSON."""

from __future__ import annotations

from dataclasses import dataclass

#: Values of `eager`; None: True where nothing is clipped, else "auto".
EAGER = ("auto", True, False)

#: Other optimizers to measure with; "torch" is `torch.optim.AdamW(fused=True)` with nothing offloaded.
PEERS = ("torch", "torchao", "deepspeed", "trainstream")

BASELINE, OUTBOARD = "forward_backward", "outboard"


@dataclass(frozen=True)
class Setup:
    """One side and what it trains.

    Attributes
    ----------
    side : str
        `BASELINE`, `OUTBOARD` or one of `PEERS`.
    resident : float
        Share of outboard's state to keep on the device.
    timeline : bool
        Also record where one step's time goes.
    """

    side: str
    model: str
    batch: int
    seq: int
    dtype: str
    state_dtype: str
    device: str
    steps: int
    warmup: int
    clip: float | None = None
    mode: str = "auto"
    eager: bool | str = "auto"
    threads: int | None = None
    tiny: int = 0
    resident: float = 0.0
    timeline: bool = False

    @property
    def name(self) -> str:
        """Of the side in results: with the resident share where there is one."""
        return f"{self.side}_resident_{self.resident:g}" if self.resident else self.side

    @property
    def title(self) -> str:
        """Of the side, for a person."""
        return TITLES[self.side] + (f", {self.resident:.0%} resident" if self.resident else "")


TITLES = {
    BASELINE: "forward and backward alone",
    "torch": "torch fused, nothing offloaded",
    OUTBOARD: "outboard",
    "torchao": "torchao CPUOffloadOptimizer",
    "deepspeed": "DeepSpeed ZeRO-2 offload",
    "trainstream": "trainstream",
}
