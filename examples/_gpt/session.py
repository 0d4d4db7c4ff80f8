"""The whole job in order: text, outboard's run, the same with torch, report."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text as RichText

from . import checkpoint
from .data import load_text
from .display import TrainingDisplay
from .model import generate
from .plot import write_plot
from .report import compare, machine_name, print_table, readable, write_summary
from .settings import Settings, UsageError, default_threads
from .training import Run, StopOnInterrupt, check_device, default_device, prepare_torch

INTERRUPTED = 130
PROMPT = b"def "
SAMPLE_BYTES = 500


class Session:
    """One call of the program.

    Parameters
    ----------
    options : argparse.Namespace
        ``out``, ``save_every``, ``resume``, ``compare`` and ``offload_activations``.
    asked : dict
        The settings given on the command line.

    Raises
    ------
    UsageError
        Something the user can put right.
    """

    def __init__(self, options: argparse.Namespace, asked: dict[str, Any]) -> None:
        self.options = options
        self.console = Console()
        self.out: Path = options.out
        self.checkpoint = self.out / "checkpoint.pt"
        self.stop = StopOnInterrupt()
        self.saved = False
        state = checkpoint.load(self.checkpoint) if options.resume else None
        if state is None:
            self.settings = Settings(**{"threads": default_threads(), "device": default_device(), **asked})
        else:
            self.settings = checkpoint.settings_to_resume(state, asked)
        check_device(self.settings.device)
        self.text = load_text(self.settings.text, self.settings.context)
        if state is not None and state["text_sha256"] != self.text.sha256:
            raise UsageError(
                f"the {self.text.source} is not the text of the checkpoint: give that text with "
                "--text, or start anew without --resume"
            )
        if state is None:
            self._make_room()
        prepare_torch(self.settings)
        if options.offload_activations and self.settings.device == "cpu":
            raise UsageError(
                "--offload-activations: this needs a GPU; on the CPU activations are in host RAM by themselves"
            )
        self.run_outboard = Run("outboard", self.settings, self.text, options.offload_activations)
        if state is not None:
            self.run_outboard.load_state_dict(state)
            self.saved = True
            if state["torch"] != str(torch.__version__):
                self.console.print(
                    f"note: the checkpoint is torch {state['torch']}'s and this is "
                    f"{torch.__version__}; their last bits may differ",
                    soft_wrap=True,
                )

    def _make_room(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            # What an earlier run left would belong to other settings.
            for name in ("summary.json", "losses.png"):
                (self.out / name).unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write to --out {self.out}: {error.strerror}") from error

    def run(self) -> int:
        """Train, compare and report; returns the exit code."""
        try:
            return self._run()
        except KeyboardInterrupt:
            return self._interrupted()

    def _run(self) -> int:
        self._introduce()
        ours = self.run_outboard
        if not self._train(ours):
            return self._interrupted()
        sample = generate(ours.model, PROMPT, SAMPLE_BYTES, seed=self.settings.seed)
        runs = [ours]
        if self.options.compare:
            theirs = Run("torch", self.settings, self.text)
            if not self._train(theirs):
                return self._interrupted()
            runs.append(theirs)
        comparison = compare(*runs) if self.options.compare else None
        write_plot(self.out / "losses.png", runs)
        write_summary(self.out / "summary.json", runs, comparison, readable(sample))
        self.console.print(Panel(RichText(readable(sample)), title="a sample", title_align="left"))
        print_table(self.console, runs, comparison)
        self.console.print(
            f"written to {self.out}: losses.png, summary.json, checkpoint.pt",
            highlight=False,
            soft_wrap=True,
        )
        return 0 if comparison is None or comparison.agrees else 1

    def _introduce(self) -> None:
        settings, text, run = self.settings, self.text, self.run_outboard
        parameters = sum(p.numel() for p in run.model.parameters())
        begun = f", from step {run.step:,} on" if run.step else ""
        self.console.print(
            f"GPT with {parameters:,} parameters on the {text.source} ({text.size:,} bytes); "
            f"{settings.steps:,} steps of {settings.batch} x {settings.context} bytes{begun}; "
            f"{machine_name(settings.device)}, --threads {settings.threads}",
            highlight=False,
            soft_wrap=True,
        )

    def _train(self, run: Run) -> bool:
        """Train one side to its end; returns False when the user interrupted."""
        if run.finished:
            return True
        ours = run is self.run_outboard
        with self.stop, TrainingDisplay(self.console, run) as display:

            def after_step(run: Run) -> None:
                display.update(run)
                if ours and run.step % self.options.save_every == 0:
                    self._save()

            run.train(stop=self.stop, after_step=after_step)
            if ours:
                self._save()
        return run.finished

    def _save(self) -> None:
        checkpoint.save(self.checkpoint, self.run_outboard.state_dict())
        self.saved = True

    def _interrupted(self) -> int:
        if not self.saved:
            print("interrupted before the first checkpoint", file=sys.stderr)
            return INTERRUPTED
        command = [sys.executable, sys.argv[0], "--resume", "--out", str(self.out)]
        if not self.options.compare:
            command.append("--no-compare")
        run = self.run_outboard
        missing = "; the comparison is to be run again" if run.finished else ""
        print(
            f"interrupted; {self.checkpoint} holds step {run.step:,} of {self.settings.steps:,}"
            f"{missing}; go on with: {shlex.join(command)}",
            file=sys.stderr,
        )
        return INTERRUPTED
