"""Checkpoints: written so that an interrupted write harms nothing, refused with a reason."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from .settings import Settings, UsageError

FORMAT = 1


def save(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at ``path``, or leave it as it was when that fails."""
    temporary = path.with_name(path.name + ".partial")
    try:
        with temporary.open("wb") as file:
            torch.save({"format": FORMAT, "torch": str(torch.__version__), **state}, file)
            file.flush()
            # Or a power cut could leave the new name on a file without its contents.
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Raises
    ------
    UsageError
        There is none, or it is not one of ``examples/train_gpt.py``.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"no checkpoint at {path}: start without --resume") from None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"cannot read the checkpoint {path}: {reason}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UsageError(f"{path} is no checkpoint of this program (format {FORMAT})")
    return state


def settings_to_resume(state: dict[str, Any], asked: dict[str, Any]) -> Settings:
    """Return the settings of a checkpoint, unless the user asked for others.

    Parameters
    ----------
    state : dict
        As ``load`` returns it.
    asked : dict
        The settings given on the command line.

    Raises
    ------
    UsageError
        A given setting differs: the run would not be the one that was begun.
    """
    saved = {**Settings().as_dict(), **state["settings"]}
    # The text may have moved; whether it is the same is seen from its contents.
    for name, value in asked.items():
        if name != "text" and value != saved[name]:
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"the checkpoint was made with {option} {saved[name]}, not {value}: "
                f"leave {option} out, or start anew without --resume"
            )
    return Settings(**{**saved, "text": asked.get("text", saved["text"])})
