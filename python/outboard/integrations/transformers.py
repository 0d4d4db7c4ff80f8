"""outboard with the Trainer of Hugging Face transformers, and with what is built on it, such as TRL's."""

from __future__ import annotations

import weakref
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

import outboard
from outboard._optimizer import OffloadedOptimizer
from outboard.integrations import accelerate
from outboard.integrations._common import check_accumulation, unwrap


def optimizer_for(
    args: TrainingArguments, cls: type[OffloadedOptimizer] = outboard.AdamW, **options: Any
) -> tuple[type[OffloadedOptimizer], dict[str, Any]]:
    """Return what the Trainer takes as `optimizer_cls_and_kwargs`.

    The Trainer itself makes groups with and without weight decay. Learning rate, betas, eps and the backward passes in
    a step are those of the arguments.

    Parameters
    ----------
    args : TrainingArguments
        The Trainer's.
    cls : type
        `outboard.AdamW` or `outboard.Adam`.
    **options
        The optimizer's own, which come before those of `args`.
    """
    settings = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "accumulation_steps": args.gradient_accumulation_steps,
    }
    return cls, {**settings, **options}


class AttachCallback(TrainerCallback):
    """Attaches the Trainer's optimizer to its model while it trains; `trainer.add_callback(AttachCallback(trainer))`.

    Clipping (`args.max_grad_norm`, 1.0 unless it is set) is done inside the step, and the `grad_norm` that the Trainer
    logs is the optimizer's. With ``max_grad_norm=0`` updates may begin in backward, and no norm is logged, unless the
    optimizer is made with ``compute_grad_norm=True``.

    Parameters
    ----------
    trainer : Trainer
        Whose optimizer is, or will be, one of outboard's.

    Raises
    ------
    TypeError
        When training begins, if the optimizer is none of outboard's.
    ValueError
        When training begins, if ``eager=True`` and the Trainer is to clip, or if ``eager=True`` or
        ``offload_gradients=True`` and `accumulation_steps` is not ``args.gradient_accumulation_steps``.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the optimizer, which has been made and prepared, to the model as it is called."""
        trainer = self._trainer()
        assert trainer is not None, "it calls its callbacks"
        optimizer = unwrap(trainer.optimizer, "pass optimizer_cls_and_kwargs=optimizer_for(args) to the Trainer")
        check_accumulation(optimizer, args.gradient_accumulation_steps, "TrainingArguments.gradient_accumulation_steps")
        if optimizer.eager is True and args.max_grad_norm > 0:
            raise ValueError(
                f"TrainingArguments.max_grad_norm is {args.max_grad_norm}, and eager=True uses gradients before their "
                "norm is known: max_grad_norm=0, or eager='auto'"
            )
        # As the Trainer does with the model's: those that are in host memory it cannot see.
        optimizer.zero_grad()
        optimizer.attach(trainer.model_wrapped)
        clipping = accelerate.attach_clipping(trainer.accelerator, optimizer)
        if clipping is not None:
            # The Trainer asks for a norm at each step, also where it clips nothing and logs nothing.
            clipping.computes_unclipped = False
            if args.max_grad_norm > 0:
                clipping.expect(optimizer, args.max_grad_norm)

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete all updates and take the hooks off."""
        trainer = self._trainer()
        assert trainer is not None, "it calls its callbacks"
        accelerate.detach_clipping(trainer.accelerator)
        unwrap(trainer.optimizer, "").detach()
