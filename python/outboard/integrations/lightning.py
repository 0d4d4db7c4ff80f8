"""outboard with PyTorch Lightning, as `lightning` or as `pytorch_lightning`."""

from __future__ import annotations

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.enums import GradClipAlgorithmType
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.utilities.enums import GradClipAlgorithmType
    from pytorch_lightning.utilities.model_helpers import is_overridden

from outboard._optimizer import OffloadedOptimizer
from outboard.integrations._common import check_accumulation, uses_gradients_in_backward


class AttachCallback(Callback):
    """Attaches the outboard optimizers of a module to it while it is fitted; ``Trainer(callbacks=[AttachCallback()])``.

    Clipping by norm (`gradient_clip_val`) is done inside the step. Clipping by value, and a module's own
    `configure_gradient_clipping`, go on as without outboard, and updates then begin at `step()`.

    Raises
    ------
    TypeError
        When training begins, if none of the module's optimizers is outboard's.
    ValueError
        When training begins, if the optimizer uses gradients in backward (``eager=True``, ``offload_gradients=True``)
        and something else needs them: clipping, or another number of backward passes in a step than
        `accumulate_grad_batches`.
    """

    def __init__(self) -> None:
        #: What Lightning is to clip to, while the optimizers do it.
        self._clip_val: float | None = None
        #: The optimizers, with their own `max_grad_norm`.
        self._attached: list[tuple[OffloadedOptimizer, float | None]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the optimizers to the model as it is called."""
        optimizers = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, OffloadedOptimizer)]
        if not optimizers:
            kinds = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "no optimizer"
            raise TypeError(f"the module has {kinds}: return an outboard.AdamW from configure_optimizers()")
        clips_inside = self._clips_by_norm(trainer, pl_module)
        for optimizer in optimizers:
            if pl_module.automatic_optimization:
                check_accumulation(optimizer, trainer.accumulate_grad_batches, "Trainer(accumulate_grad_batches)")
            if uses_gradients_in_backward(optimizer):
                self._check_clipping(optimizer, trainer, pl_module, clips_inside)
        for optimizer in optimizers:
            self._attached.append((optimizer, optimizer.max_grad_norm))
            if clips_inside:
                own = optimizer.max_grad_norm
                optimizer.max_grad_norm = (
                    trainer.gradient_clip_val if own is None else min(own, trainer.gradient_clip_val)
                )
            optimizer.attach(trainer.strategy.model)
        if clips_inside:
            self._clip_val, trainer.gradient_clip_val = trainer.gradient_clip_val, None

    @staticmethod
    def _clips_by_norm(trainer: Trainer, pl_module: LightningModule) -> bool:
        """Whether Lightning would clip, and a step can do it."""
        return (
            bool(trainer.gradient_clip_val)
            and trainer.gradient_clip_algorithm in (None, GradClipAlgorithmType.NORM)
            and not is_overridden("configure_gradient_clipping", pl_module)
            and len(trainer.optimizers) == 1
            # Where gradients are sharded each process's own norm is not the norm.
            and type(trainer.strategy).__name__ in ("SingleDeviceStrategy", "DDPStrategy")
        )

    @staticmethod
    def _check_clipping(
        optimizer: OffloadedOptimizer, trainer: Trainer, pl_module: LightningModule, clips_inside: bool
    ) -> None:
        if clips_inside and optimizer.eager is not True:
            return
        if trainer.gradient_clip_val or is_overridden("configure_gradient_clipping", pl_module):
            raise ValueError(
                "Lightning is to clip gradients, and the optimizer lets go of them in backward (eager=True or "
                "offload_gradients=True): clip with Trainer(gradient_clip_val), by norm, and eager='auto'"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Complete all updates and take the hooks off."""
        self._give_back(trainer)
        for optimizer, _ in self._attached:
            optimizer.detach()
        self._attached.clear()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the Trainer as it was; updates that have begun are the optimizer's (see `abandon`)."""
        self._give_back(trainer)
        self._attached.clear()

    def _give_back(self, trainer: Trainer) -> None:
        if self._clip_val is not None:
            trainer.gradient_clip_val, self._clip_val = self._clip_val, None
            for optimizer, own in self._attached:
                optimizer.max_grad_norm = own


__all__ = ["AttachCallback"]
