"""PyTorch Lightning: automatic optimization with the bits of torch's optimizer, clipped, saved and resumed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outboard
from lanes import assert_untouched
from oracle import norm64
from tiny import WAYS, Run, Tokens, assert_same_run, assert_same_weights, llama, sides_and_ways

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
    from lightning.pytorch.plugins.precision import MixedPrecision

    from outboard.integrations.lightning import AttachCallback

pytestmark = [
    pytest.mark.integrations,
    # Lightning's own advice, and what it uses of torch's that is deprecated.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
]


class Module(LightningModule):
    """A small model with its optimizer, a schedule that steps each step, and a validation."""

    def __init__(self, cls: Any, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = llama(dtype)
        self.cls, self.settings = cls, options
        self.losses: list[float] = []
        self.eval_losses: list[float] = []
        self.norms: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = self.cls(self.parameters(), lr=1e-2, **self.settings)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.eval_losses.append(self.model(**batch).loss.item())


class ClipsItself(Module):
    def configure_gradient_clipping(self, optimizer: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")


class Norms(Callback):
    """The float64 norm of gradients before each step."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        module.norms.append(norm64([p.grad for p in module.parameters()]))


class Logged(Callback):
    """The optimizer's own norm after each step."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        module.norms.append(trainer.optimizers[0].last_grad_norm)


def trainer_on(side: Any, *callbacks: Any, **settings: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet = {"enable_checkpointing": False, "num_sanity_val_steps": 0, "max_epochs": 1, **quiet}
    accelerator = "cpu" if side.device.type == "cpu" else "gpu"
    return Trainer(accelerator=accelerator, devices=1, callbacks=list(callbacks), **{**quiet, **settings})


def fit(trainer: Trainer, module: Module, **options: Any) -> Run:
    torch.manual_seed(5)
    train, validate = (torch.utils.data.DataLoader(Tokens(seed=seed), batch_size=4) for seed in (1, 2))
    trainer.fit(module, train, validate, **options)
    return Run(module.model, trainer.optimizers[0], module.losses, module.eval_losses, module.norms, trainer)


def attached(side: Any, options: dict[str, Any], kind: Callable[..., Module] = Module, **settings: Any) -> Run:
    return fit(trainer_on(side, AttachCallback(), **settings), kind(outboard.AdamW, options))


def unattached(side: Any, options: dict[str, Any], *callbacks: Any, **settings: Any) -> Run:
    with side.unattached():
        return fit(trainer_on(side, *callbacks, **settings), Module(outboard.AdamW, options))


def reference(side: Any, kind: Callable[..., Module] = Module, **settings: Any) -> Run:
    cls, options = side.reference
    with side.unattached():
        return fit(trainer_on(side, **settings), kind(cls, options))


@sides_and_ways()
def test_equals_torch(side: Any, way: str) -> None:
    # Validation in between reads weights whose updates are under way.
    settings = {"max_epochs": 2, "val_check_interval": 2}
    run = attached(side, WAYS[way], **settings)
    assert_same_run(run, reference(side, **settings))
    assert len(run.losses) == 16
    assert len(run.eval_losses) == 2 * 4 * 8
    assert_untouched(run.model)


@pytest.mark.parametrize("way", WAYS)
def test_eager_updates(device_side: Any, way: str) -> None:
    seen = []

    class Count(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            seen.append(trainer.optimizers[0].stats()["eager_updates"])

    fit(trainer_on(device_side, Count(), AttachCallback()), Module(outboard.AdamW, WAYS[way]))
    assert (seen[0] > 0) == (way in ("auto", "eager"))


@pytest.mark.parametrize("way", WAYS)
def test_accumulation(device_side: Any, way: str) -> None:
    # The last step of an epoch has two backward passes.
    settings = {"max_epochs": 2, "accumulate_grad_batches": 3}
    run = attached(device_side, {"accumulation_steps": 3, **WAYS[way]}, **settings)
    assert_same_run(run, reference(device_side, **settings))


@sides_and_ways("eager", "offloaded")
def test_accumulation_that_the_optimizer_was_not_told_is_refused(side: Any, way: str) -> None:
    with pytest.raises(ValueError, match=r"Trainer\(accumulate_grad_batches\) is 3"):
        attached(side, WAYS[way], accumulate_grad_batches=3)


# ---- clipping


@sides_and_ways("auto", "not eager", "offloaded")
def test_clipping_inside(side: Any, way: str) -> None:
    trainer = trainer_on(side, AttachCallback(), Logged(), gradient_clip_val=0.5)
    run = fit(trainer, Module(outboard.AdamW, WAYS[way]))
    wanted = unattached(side, {"max_grad_norm": 0.5}, Norms())
    assert_same_run(run, wanted)
    assert run.norms == pytest.approx(wanted.norms, rel=1e-6)
    assert max(run.norms) > 0.5
    assert trainer.gradient_clip_val == 0.5
    assert run.optimizer.max_grad_norm is None


@pytest.mark.parametrize("eager", ["auto", False])
def test_clipping_by_value_and_by_the_module_are_right(side: Any, eager: Any) -> None:
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    assert_same_run(attached(side, {"eager": eager}, **by_value), reference(side, **by_value))
    assert_same_run(attached(side, {"eager": eager}, ClipsItself), reference(side, ClipsItself))


@pytest.mark.parametrize("eager", ["auto", False])
def test_lightnings_own_clipping_is_right(side: Any, eager: Any) -> None:
    """By hand: attached without the callback."""

    class Attached(Module):
        def on_train_start(self) -> None:
            self.trainer.optimizers[0].attach(self)

    module = Attached(outboard.AdamW, {"eager": eager})
    assert_same_run(fit(trainer_on(side, gradient_clip_val=0.5), module), reference(side, gradient_clip_val=0.5))


@pytest.mark.parametrize(
    ("way", "kind", "settings"),
    [
        ("eager", Module, {"gradient_clip_val": 0.5}),
        ("eager", ClipsItself, {}),
        ("offloaded", ClipsItself, {}),
        ("offloaded", Module, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}),
    ],
)
def test_clipping_of_gradients_that_are_gone_is_refused(side: Any, way: str, kind: Any, settings: Any) -> None:
    module = kind(outboard.AdamW, WAYS[way])
    trainer = trainer_on(side, AttachCallback(), **settings)
    with pytest.raises(ValueError, match="Lightning is to clip gradients"):
        fit(trainer, module)
    assert_same_weights(module.model, llama())
    assert trainer.gradient_clip_val == settings.get("gradient_clip_val")


def test_another_optimizer_is_refused(side: Any) -> None:
    with pytest.raises(TypeError, match=r"the module has AdamW: return an outboard\.AdamW"):
        fit(trainer_on(side, AttachCallback()), Module(torch.optim.AdamW, {}))


def test_an_exception_leaves_the_trainer_as_it_was(side: Any) -> None:
    class Fails(Module):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if index == 3:
                raise MemoryError
            return super().training_step(batch, index)

    trainer = trainer_on(side, AttachCallback(), gradient_clip_val=0.5)
    with pytest.raises(MemoryError):
        fit(trainer, Fails(outboard.AdamW, {}))
    assert trainer.gradient_clip_val == 0.5


# ---- others who read weights


@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch", "ignore:Swapping scheduler")
@pytest.mark.parametrize("way", ["auto", "eager"])
def test_stochastic_weight_averaging(device_side: Any, way: str) -> None:
    def averaging() -> Callback:
        return StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)

    trainer = trainer_on(device_side, averaging(), AttachCallback(), max_epochs=3)
    run = fit(trainer, Module(outboard.AdamW, WAYS[way]))
    cls, options = device_side.reference
    with device_side.unattached():
        wanted = fit(trainer_on(device_side, averaging(), max_epochs=3), Module(cls, options))
    assert_same_run(run, wanted)


class Manual(Module):
    """Two optimizers, stepped by hand, of which the second has a part of the model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        head = list(self.model.lm_head.parameters())
        body = [p for p in self.parameters() if all(p is not other for other in head)]
        return [self.cls(body, lr=1e-2, **self.settings), self.cls(head, lr=1e-3, **self.settings)]

    def training_step(self, batch: Any, index: int) -> None:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_manual_optimization_of_two_optimizers(device_side: Any, way: str) -> None:
    assert_same_run(attached(device_side, WAYS[way], Manual), reference(device_side, Manual))


# ---- scalers


def test_scaler_and_clipping(side: Any) -> None:
    """Lightning refuses to clip for an optimizer that unscales by itself, such as torch's fused one."""

    def plugins() -> dict[str, Any]:
        device = side.device.type
        scaler = torch.amp.GradScaler(device, init_scale=2.0**24, growth_interval=3)
        return {"plugins": [MixedPrecision("16-mixed", device, scaler)]}

    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        unattached(side, {}, gradient_clip_val=0.5, **plugins())
    run = attached(side, {}, gradient_clip_val=0.5, **plugins())
    assert_same_run(run, unattached(side, {"max_grad_norm": 0.5}, **plugins()))
    skipped = run.optimizer.stats()["skipped_steps"]
    assert 0 < skipped < 8
    scaled = reference(side, **plugins())
    assert_same_run(attached(side, {}, **plugins()), scaled)


# ---- state


@sides_and_ways()
def test_fitting_twice(side: Any, way: str) -> None:
    """Lightning moves the state to the device, and to the CPU at the end; each fit makes a new optimizer."""
    cls, options = side.reference
    module, twin = Module(outboard.AdamW, WAYS[way]), Module(cls, options)
    for _ in range(2):
        run = fit(trainer_on(side, AttachCallback()), module)
        with side.unattached():
            assert_same_run(run, fit(trainer_on(side), twin))
        optimizer = run.optimizer
        planes = [value for state in optimizer.state.values() for value in state.values()]
        assert planes
        assert all(value.device.type == "cpu" for value in planes)
        assert not optimizer._state.has_foreign()
        assert next(module.parameters()).device.type == "cpu"


class Seeds(Callback):
    """Random numbers of each step's own: Lightning's checkpoints do not hold their state."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        torch.manual_seed(trainer.global_step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@sides_and_ways()
def test_resumed_is_uninterrupted(side: Any, way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=8, save_top_k=-1, filename="{step}")
    settings = {"max_epochs": 2, "limit_val_batches": 0}
    trainer = trainer_on(side, AttachCallback(), save, Seeds(), enable_checkpointing=True, **settings)
    whole = fit(trainer, Module(outboard.AdamW, WAYS[way], dtype))
    module = Module(outboard.AdamW, WAYS[way], dtype)
    for parameter in module.parameters():
        parameter.data.zero_()
    path = str(tmp_path / "step=8.ckpt")
    resumed = fit(trainer_on(side, AttachCallback(), Seeds(), **settings), module, ckpt_path=path, weights_only=False)
    assert len(resumed.losses) == 8
    resumed.losses[:0] = whole.losses[:8]
    assert_same_run(resumed, whole, state=True)
