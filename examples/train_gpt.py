"""Train a small byte-level GPT with outboard.AdamW, then with torch's AdamW, and compare.

The text is the standard library's own source, or a file of yours. Both runs start from the
same weights and see the same batches; a table shows both sides and what each optimizer's step took.

On the CPU every loss and every weight must be equal bit for bit, and the table says whether they are.
On a GPU (--device cuda) outboard is attached to the model, keeps its state in host RAM and gives the
bits of torch's CPU kernel; torch's optimizer runs on the GPU, with a kernel that rounds otherwise. So
there the table says how far apart the losses are, and the runs agree if that is within a tolerance.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from _gpt.settings import HEAD_WIDTH, Settings, UsageError, default_threads

EXAMPLES = """\
examples:
  python examples/train_gpt.py                      both sides, one to two minutes on two cores
  python examples/train_gpt.py --device cpu         not on a GPU, although there is one
  python examples/train_gpt.py --no-compare         outboard only
  python examples/train_gpt.py --text book.txt      another text
  python examples/train_gpt.py --steps 5000 --width 256 --batch 8
                                                    a longer run of a larger model
  python examples/train_gpt.py --resume             go on after Ctrl-C, to the same bits
  python examples/train_gpt.py --device cuda --offload-activations --width 1024 --layers 12 --context 512
                                                    activations in host RAM between forward and backward
"""
INTERRUPTED = 130
USAGE = 2


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser; settings that are not given are left out of its result."""
    result = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = Settings()

    def setting(name: str, kind: type, what: str, default: object = None) -> None:
        shown = getattr(usual, name.replace("-", "_")) if default is None else default
        result.add_argument(
            f"--{name}",
            type=kind,
            default=argparse.SUPPRESS,
            metavar=name.rpartition("-")[2].upper(),
            help=f"{what} (default: {shown})",
        )

    setting("steps", int, "optimizer steps; the schedule ends there")
    setting("batch", int, "sequences in a step")
    setting("context", int, "bytes in a sequence")
    setting("layers", int, "transformer blocks")
    setting("width", int, f"size of the residual stream, a multiple of {HEAD_WIDTH}")
    setting("learning-rate", float, "peak of the cosine schedule")
    setting("seed", int, "for the initial weights, the batches and the sample")
    setting("threads", int, "threads of torch and of outboard", default_threads())
    setting("text", str, "file to train on", "the sources of Python's standard library")
    result.add_argument(
        "--out",
        type=Path,
        default=Path("runs/latest"),
        metavar="FOLDER",
        help="for checkpoint.pt, summary.json and losses.png (default: %(default)s)",
    )
    result.add_argument(
        "--save-every",
        type=int,
        default=100,
        metavar="STEPS",
        help="steps between two checkpoints (default: %(default)s)",
    )
    result.add_argument(
        "--resume",
        action="store_true",
        help="go on from the checkpoint in --out, with its settings",
    )
    result.add_argument(
        "--no-compare",
        dest="compare",
        action="store_false",
        help="skip the run with torch's optimizer",
    )
    result.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where the model is trained; auto: on a GPU if torch finds one (default: %(default)s)",
    )
    result.add_argument(
        "--offload-activations",
        action="store_true",
        help="on a GPU: keep what outboard's side saves for backward in host RAM, of all blocks but the last",
    )
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the program.

    Returns
    -------
    int
        0; 1 when the two sides are not equal (on a GPU: too far apart); 2 for bad input; 130 after Ctrl-C.
    """
    options = parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a generated character must not end the run.
        sys.stdout.reconfigure(errors="replace")
    asked = {f.name: getattr(options, f.name) for f in fields(Settings) if hasattr(options, f.name)}
    if options.device == "auto":
        del asked["device"]
    try:
        if options.save_every < 1:
            raise UsageError(f"--save-every must be at least 1, got {options.save_every}")
        Settings(**asked).check()
        return train(options, asked)
    except UsageError as error:
        print(f"train_gpt.py: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def train(options: argparse.Namespace, asked: dict[str, Any]) -> int:
    """Train both sides and report; see ``main`` for the result."""
    # torch's idle OpenMP threads spin for milliseconds before they sleep, and meanwhile nobody
    # else gets their core: neither outboard's threads nor another program. On two cores that are
    # shared with a build, these small steps ran at 1,000 tokens/s, and with this at 9,000. On two
    # idle cores it costs torch: 20,000 tokens/s instead of 24,000, 1.1 ms in its optimizer
    # instead of 0.9. It is read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Without it cuBLAS may not give the same bits every time, and torch refuses to use it; read when it is loaded.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Here, so that --help and bad options are answered before torch has been loaded.
    try:
        from _gpt.session import Session
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed for {sys.executable}; `make train` sees to it") from error

    return Session(options, asked).run()


if __name__ == "__main__":
    sys.exit(main())
