"""Hugging Face Trainer: the recipe of two lines gives torch's bits, whatever the Trainer does beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import outboard
from lanes import assert_untouched
from oracle import norm64
from tiny import WAYS, Tokens, assert_same_run, assert_same_weights, llama, sides_and_ways
from trainer import arguments, left_by, reference, train, trainer_for

pytestmark = pytest.mark.integrations


@sides_and_ways()
def test_equals_torch(side: Any, way: str, tmp_path: Path) -> None:
    args = arguments(side, tmp_path)
    run = train(trainer_for(args, WAYS[way]))
    assert_same_run(run, reference(side, args))
    if way in ("auto", "eager") and side.has_lanes:
        assert run.eager_updates > 0
    else:
        assert run.eager_updates == 0
    assert len(run.losses) == 8
    # Groups with and without decay, made by the Trainer.
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.1, 0.0]
    # No norm was asked for, and none is made up.
    assert run.norms == []
    assert_untouched(run.model)


def test_unattached_equals_torch(side: Any, tmp_path: Path) -> None:
    args = arguments(side, tmp_path, max_grad_norm=0.5)
    run = train(trainer_for(args, {}, attach=False))
    wanted = reference(side, args)
    assert_same_run(run, wanted)
    assert run.norms == wanted.norms


@pytest.mark.parametrize("way", WAYS)
def test_accumulation(device_side: Any, way: str, tmp_path: Path) -> None:
    # The last step of the epoch has two backward passes.
    args = arguments(device_side, tmp_path, gradient_accumulation_steps=3, num_train_epochs=2)
    run = train(trainer_for(args, WAYS[way]))
    assert run.optimizer.accumulation_steps == 3
    assert_same_run(run, reference(device_side, args))
    assert len(run.losses) == 6
    assert (run.eager_updates > 0) == (way in ("auto", "eager"))


@sides_and_ways("eager", "offloaded")
def test_accumulation_that_the_optimizer_was_not_told_is_refused(side: Any, way: str, tmp_path: Path) -> None:
    trainer = trainer_for(
        arguments(side, tmp_path, gradient_accumulation_steps=3), {**WAYS[way], "accumulation_steps": 1}
    )
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps is 3, and .* accumulation_steps is 1"):
        trainer.train()
    assert_same_weights(trainer.model, llama())


def test_accumulation_without_a_word_begins_at_step(device_side: Any, tmp_path: Path) -> None:
    args = arguments(device_side, tmp_path, gradient_accumulation_steps=3)
    run = train(trainer_for(args, {"accumulation_steps": 1}))
    assert_same_run(run, reference(device_side, args))
    assert run.eager_updates == 0


# ---- clipping


@pytest.mark.parametrize("eager", ["auto", False])
def test_the_trainers_own_clipping_is_right(side: Any, eager: Any, tmp_path: Path) -> None:
    """By hand: attached without the callback, so that `clip_grad_norm_` changes gradients before `step()`."""
    args = arguments(side, tmp_path, max_grad_norm=0.5)
    trainer = trainer_for(args, {"eager": eager}, attach=False)
    trainer.create_optimizer().attach(trainer.model)
    run = train(trainer)
    wanted = reference(side, args)
    assert_same_run(run, wanted)
    assert run.norms == wanted.norms
    assert max(run.norms) > 0.5
    assert run.eager_updates == 0


@pytest.mark.parametrize("way", ["eager", "offloaded"])
def test_what_the_page_warns_of(device_side: Any, way: str, tmp_path: Path) -> None:
    """Attached by hand, with gradients that are gone when the Trainer looks: its norm is that of the others."""
    trainer = trainer_for(arguments(device_side, tmp_path, max_grad_norm=0.5), WAYS[way], attach=False)
    trainer.create_optimizer().attach(trainer.model)
    run = train(trainer)
    wanted = reference(device_side, arguments(device_side, tmp_path, max_grad_norm=0.5))
    # The first step after the optimizer was prepared begins at `step()`; later ones leave the smallest parameters.
    assert max(run.norms[1:]) < 0.5 < 0.9 < min(wanted.norms)
    with pytest.raises(AssertionError):
        assert_same_weights(run.model, wanted.model)


class Norms(TrainerCallback):
    """The float64 norm of gradients before each step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.norms.append(norm64([p.grad for p in model.parameters()]))


@sides_and_ways("auto", "not eager", "offloaded")
@pytest.mark.parametrize("max_grad_norm", [0.5, 50.0])
def test_clipping_inside(side: Any, way: str, max_grad_norm: float, tmp_path: Path) -> None:
    run = train(trainer_for(arguments(side, tmp_path, max_grad_norm=max_grad_norm), WAYS[way]))
    seen = Norms()
    with side.unattached():
        args = arguments(side, tmp_path)
        wanted = train(trainer_for(args, {"max_grad_norm": max_grad_norm}, attach=False, callbacks=[seen]))
    assert_same_run(run, wanted)
    assert run.norms == pytest.approx(seen.norms, rel=1e-6)
    assert len(run.norms) == 8
    # The Trainer's arguments and the optimizer are as they were.
    assert run.extra.args.max_grad_norm == max_grad_norm
    assert run.optimizer.max_grad_norm is None
    assert "clip_grad_norm_" not in vars(run.extra.accelerator)
    if max_grad_norm == 50.0 and side.name != "cuda":
        assert_same_run(run, reference(side, args))


def test_clipping_inside_of_accumulated_gradients(device_side: Any, tmp_path: Path) -> None:
    args = {"gradient_accumulation_steps": 3}
    run = train(trainer_for(arguments(device_side, tmp_path, max_grad_norm=0.5, **args), {"offload_gradients": True}))
    with device_side.unattached():
        wanted = train(trainer_for(arguments(device_side, tmp_path, **args), {"max_grad_norm": 0.5}, attach=False))
    assert_same_run(run, wanted)


def test_a_norm_is_logged_where_it_is_computed(side: Any, tmp_path: Path) -> None:
    args = arguments(side, tmp_path)
    run = train(trainer_for(args, {"compute_grad_norm": True}))
    wanted = reference(side, args)
    assert_same_run(run, wanted)
    assert run.norms == pytest.approx(wanted.norms, rel=1e-5)
    assert run.optimizer.compute_grad_norm


def test_eager_with_clipping_is_refused(side: Any, tmp_path: Path) -> None:
    trainer = trainer_for(arguments(side, tmp_path, max_grad_norm=1.0), {"eager": True})
    with pytest.raises(ValueError, match=r"max_grad_norm is 1\.0, and eager=True"):
        trainer.train()
    assert_same_weights(trainer.model, llama())


def test_another_optimizer_is_refused(side: Any, tmp_path: Path) -> None:
    from outboard.integrations.transformers import AttachCallback

    trainer = trainer_for(arguments(side, tmp_path), None, cls=torch.optim.AdamW)
    trainer.add_callback(AttachCallback(trainer))
    with pytest.raises(TypeError, match=r"optimizer is a AdamW, none of outboard's: pass optimizer_cls_and_kwargs"):
        trainer.train()


def test_adam_is_possible(side: Any, tmp_path: Path) -> None:
    from outboard.integrations.transformers import optimizer_for

    args = arguments(side, tmp_path, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6)
    cls, options = optimizer_for(args, outboard.Adam, eps=1e-5)
    assert cls is outboard.Adam
    assert options == {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-5, "accumulation_steps": 1}


# ---- what a Trainer does besides


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_gradient_checkpointing(device_side: Any, way: str, use_reentrant: bool, tmp_path: Path) -> None:
    settings = {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": use_reentrant},
    }
    run = train(trainer_for(arguments(device_side, tmp_path, **settings), WAYS[way]))
    wanted = reference(device_side, arguments(device_side, tmp_path, **settings))
    assert_same_run(run, wanted)
    assert (run.eager_updates > 0) == (way in ("auto", "eager"))


@pytest.mark.parametrize("way", WAYS)
def test_tied_embeddings_and_autocast(device_side: Any, way: str, tmp_path: Path) -> None:
    args = arguments(device_side, tmp_path, bf16=True)
    run = train(trainer_for(args, WAYS[way], model=llama(tie_word_embeddings=True)))
    assert_same_run(run, reference(device_side, args, model=llama(tie_word_embeddings=True)))


@sides_and_ways("auto", "eager", "offloaded")
def test_evaluation_and_the_best_model(side: Any, way: str, tmp_path: Path) -> None:
    """Evaluation and checkpoints read weights whose updates are under way; the best weights are put back at the end."""
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_on_start": True,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        # Too much: the best model is not the last one.
        "learning_rate": 0.5,
    }
    runs = []
    for name, run in (("got", train), ("wanted", reference)):
        args = arguments(side, tmp_path / name, **settings)
        if run is train:
            runs.append(train(trainer_for(args, WAYS[way], eval_dataset=Tokens(8, seed=2))))
        else:
            runs.append(reference(side, args, eval_dataset=Tokens(8, seed=2)))
    assert_same_run(*runs)
    assert len(runs[0].eval_losses) == 9
    best = [run.extra.state.best_global_step for run in runs]
    assert best[0] == best[1]
    assert 0 < best[0] < 8
    assert runs[0].extra.evaluate()["eval_loss"] == min(runs[0].eval_losses[1:])


@sides_and_ways("auto", "eager", "offloaded")
def test_training_twice(side: Any, way: str, tmp_path: Path) -> None:
    args = arguments(side, tmp_path)
    trainer = trainer_for(args, WAYS[way])
    first = train(trainer).losses
    assert_untouched(trainer.model)
    run = train(trainer)
    assert_untouched(trainer.model)
    cls, options = side.reference
    with side.unattached():
        other = trainer_for(args, options, cls=cls, attach=False)
        assert train(other).losses == first
        assert_same_run(run, train(other))
    assert run.losses != first
    assert float(run.optimizer.state_dict()["state"][0]["step"]) == 16


class StopsAmidAccumulation(TrainerCallback):
    """Ends training after the first of several backward passes of the second step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = state.global_step == 1
        return control


@pytest.mark.parametrize("way", ["auto", "eager", "offloaded"])
def test_gradients_of_a_step_that_was_given_up_are_dropped(device_side: Any, way: str, tmp_path: Path) -> None:
    args = arguments(device_side, tmp_path, gradient_accumulation_steps=3)

    def twice(trainer: Any) -> Any:
        stop = StopsAmidAccumulation()
        trainer.add_callback(stop)
        trainer.train()
        assert trainer.state.global_step == 1
        trainer.remove_callback(stop)
        trainer.train()
        return left_by(trainer)

    run = twice(trainer_for(args, WAYS[way]))
    cls, options = device_side.reference
    with device_side.unattached():
        wanted = twice(trainer_for(args, options, cls=cls, attach=False))
    assert_same_run(run, wanted)


@pytest.mark.parametrize("way", ["auto", "eager"])
def test_compiled(device_side: Any, way: str, tmp_path: Path) -> None:
    """The Trainer calls the compiled model; its backend here leaves the operations as they are."""
    args = arguments(device_side, tmp_path, torch_compile=True, torch_compile_backend="eager")
    run = train(trainer_for(args, WAYS[way]))
    assert_same_run(run, reference(device_side, args))
    assert type(run.extra.model_wrapped).__name__ == "OptimizedModule"
    assert run.eager_updates > 0


class FailsInBackward(TrainerCallback):
    """Lets the backward of the fourth step fail, after some gradients."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 3:
            model.model.embed_tokens.weight.register_hook(self.fail)

    @staticmethod
    def fail(grad: torch.Tensor) -> None:
        raise MemoryError


@pytest.mark.parametrize("way", WAYS)
def test_after_an_exception_in_backward(device_side: Any, way: str, tmp_path: Path) -> None:
    """Training again is refused where some parameters have been updated, until `abandon()`."""
    trainer = trainer_for(arguments(device_side, tmp_path), WAYS[way], callbacks=[FailsInBackward()])
    with pytest.raises(MemoryError):
        trainer.train()
    trainer.remove_callback(FailsInBackward)
    trainer.model.model.embed_tokens.weight._backward_hooks.clear()
    if way in ("auto", "eager"):
        with pytest.raises(RuntimeError, match="only step\\(\\) completes them; after an exception call abandon"):
            trainer.train()
        assert trainer.optimizer.optimizer.abandon().updated
    trainer.train()
    assert_untouched(trainer.model)


@pytest.mark.parametrize("side", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_fp16_scaler(side: Any, max_grad_norm: float, tmp_path: Path) -> None:
    """Scaled, skipped and scaled down again as without attaching.

    accelerate scales on CUDA only; in tests/integrations/test_accelerate.py its optimizer has a scaler of the CPU's.
    """
    run = train(trainer_for(arguments(side, tmp_path, fp16=True, max_grad_norm=max_grad_norm), {}))
    plain = {"max_grad_norm": max_grad_norm} if max_grad_norm else {}
    wanted = train(trainer_for(arguments(side, tmp_path, fp16=True), plain, attach=False))
    assert_same_run(run, wanted)
    assert run.extra.accelerator.scaler.get_scale() == wanted.extra.accelerator.scaler.get_scale()
