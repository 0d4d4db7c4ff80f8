"""Runs of the Trainer of Hugging Face transformers, for several files of tests."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

import outboard
from tiny import Run, Side, Tokens, llama

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import Trainer, TrainingArguments

    from outboard.integrations.transformers import AttachCallback, optimizer_for


def arguments(side: Side, out: Path, **changes: Any) -> TrainingArguments:
    """Return arguments of a run of eight steps: no clipping, one log a step, a schedule, no checkpoint."""
    settings = {
        "output_dir": str(out),
        "use_cpu": side.device.type == "cpu",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**settings, **changes})


def trainer_for(
    args: TrainingArguments,
    options: dict[str, Any] | None,
    *,
    cls: Any = outboard.AdamW,
    model: torch.nn.Module | None = None,
    attach: bool = True,
    kind: type[Trainer] = Trainer,
    data: Any = None,
    **settings: Any,
) -> Trainer:
    """Make a Trainer with outboard, or, with a class of torch's, without."""
    if issubclass(cls, outboard.AdamW):
        recipe: Any = optimizer_for(args, cls, **(options or {}))
    else:
        recipe = (cls, {"lr": args.learning_rate, **(options or {})})
    trainer = kind(
        llama() if model is None else model,
        args,
        train_dataset=Tokens() if data is None else data,
        optimizer_cls_and_kwargs=recipe,
        **settings,
    )
    if attach and issubclass(cls, outboard.AdamW):
        trainer.add_callback(AttachCallback(trainer))
    return trainer


def train(trainer: Trainer, **options: Any) -> Run:
    """Train, and return what is left."""
    trainer.train(**options)
    return left_by(trainer)


def left_by(trainer: Trainer) -> Run:
    history = trainer.state.log_history
    return Run(
        trainer.model,
        trainer.optimizer.optimizer,
        [entry["loss"] for entry in history if "loss" in entry],
        [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        trainer,
    )


def reference(side: Side, args: TrainingArguments, **settings: Any) -> Run:
    """Return a run that says what is right."""
    cls, options = side.reference
    with side.unattached():
        return train(trainer_for(args, options, cls=cls, attach=False, **settings))
