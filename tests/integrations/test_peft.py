"""PEFT's LoRA: adapters are trained with torch's bits, the frozen base has no state and stays as it is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import outboard
from oracle import assert_same
from tiny import WAYS, Run, Tokens, assert_same_run, assert_same_weights, changed, llama, names, sides_and_ways
from trainer import arguments, reference, train, trainer_for

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.utils import get_peft_model_state_dict

pytestmark = [
    pytest.mark.integrations,
    # Of transformers, in what PEFT and TRL call of it.
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpointing.* is deprecated and will be removed in v6:FutureWarning"
    ),
]


def lora(dtype: torch.dtype = torch.float32, *, fp32_adapters: bool = False) -> Any:
    """Make a model with adapters: A is random, B is zero. PEFT's default is adapters in fp32."""
    model = llama(dtype)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=fp32_adapters)


def adapters(model: torch.nn.Module) -> set[str]:
    return {name for name in names(model.named_parameters()) if "lora_" in name}


@sides_and_ways()
def test_adapters_are_trained(side: Any, way: str, tmp_path: Path) -> None:
    args = arguments(side, tmp_path, num_train_epochs=2)
    run = train(trainer_for(args, WAYS[way], model=lora()))
    assert_same_run(run, reference(side, args, model=lora()))
    assert changed(run.model, lora()) == adapters(run.model)
    assert run.optimizer.stats()["elements"] == sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    assert (run.eager_updates > 0) == (way in ("auto", "eager") and side.has_lanes)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_checkpointing_of_a_frozen_base(device_side: Any, way: str, use_reentrant: bool, tmp_path: Path) -> None:
    args = arguments(
        device_side,
        tmp_path,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": use_reentrant},
    )
    run = train(trainer_for(args, WAYS[way], model=lora()))
    assert_same_run(run, reference(device_side, args, model=lora()))
    assert (run.eager_updates > 0) == (way in ("auto", "eager"))


class Loop:
    """A loop whose optimizer is given all parameters, the frozen ones too."""

    def __init__(self, side: Any, cls: Any, dtype: torch.dtype = torch.float32, attached: bool = True, **options: Any):
        self.model = lora(dtype).to(side.device)
        self.optimizer = cls(self.model.parameters(), lr=1e-2, **options)
        if attached:
            self.optimizer.attach(self.model)
        self.data = Tokens()
        self.losses: list[float] = []

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            rows = self.data[len(self.losses)]
            torch.manual_seed(len(self.losses))
            loss = self.model(**{key: value[None].to(self.model.device) for key, value in rows.items()}).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    @property
    def run(self) -> Run:
        return Run(self.model, self.optimizer, self.losses)


def pair(side: Any, way: str, dtype: torch.dtype = torch.float32) -> tuple[Loop, Loop]:
    """Return a loop, and one that says what is right."""
    cls, options = side.reference if dtype is torch.float32 else (outboard.AdamW, {})
    with side.unattached():
        wanted = Loop(side, cls, dtype, attached=False, **options)
    return Loop(side, outboard.AdamW, dtype, **WAYS[way]), wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@sides_and_ways()
def test_frozen_parameters_have_no_state(side: Any, way: str, dtype: torch.dtype) -> None:
    loop, wanted = pair(side, way, dtype)
    loop.step(6)
    wanted.step(6)
    assert_same_run(loop.run, wanted.run)
    # B has left zero.
    assert changed(loop.model, lora(dtype)) == adapters(loop.model)
    trained = sum(p.numel() for p in loop.model.parameters() if p.requires_grad)
    assert loop.optimizer.stats()["elements"] == trained < 0.2 * sum(p.numel() for p in loop.model.parameters())


@sides_and_ways()
def test_merged_and_unmerged(side: Any, way: str) -> None:
    """Merging reads adapters whose updates are under way, and writes the frozen base."""
    loop, wanted = pair(side, way)
    for _ in range(2):
        loop.step(3)
        loop.model.merge_adapter()
        wanted.step(3)
        wanted.model.merge_adapter()
        assert_same_weights(loop.model, wanted.model)
        assert any("base_layer" in name for name in changed(loop.model, lora()))
        loop.model.unmerge_adapter()
        wanted.model.unmerge_adapter()
    loop.step(2)
    wanted.step(2)
    assert_same_run(loop.run, wanted.run)
    assert_same_weights(loop.model.merge_and_unload(), wanted.model.merge_and_unload())


@pytest.mark.parametrize("way", ["auto", "eager"])
def test_saved_adapters_are_updated(device_side: Any, way: str, tmp_path: Path) -> None:
    loop, wanted = pair(device_side, way)
    loop.step(4)
    loop.model.save_pretrained(tmp_path)
    wanted.step(4)
    saved = PeftModel.from_pretrained(llama(), str(tmp_path))
    got, right = get_peft_model_state_dict(saved), get_peft_model_state_dict(wanted.model)
    assert got.keys() == right.keys()
    assert got
    for name, tensor in got.items():
        assert_same(tensor.cpu(), right[name].cpu(), name)


@sides_and_ways()
def test_unfrozen_later(side: Any, way: str) -> None:
    """A layer of the base joins after some steps: the optimizer has had it all along."""
    loop, wanted = pair(side, way)
    for one in (loop, wanted):
        one.step(3)
        one.model.base_model.model.lm_head.weight.requires_grad_(True)
        one.step(3)
    assert_same_run(loop.run, wanted.run)
    assert changed(loop.model, lora()) == adapters(loop.model) | {"base_model.model.lm_head.weight"}


def resumed_and_uninterrupted(side: Any, out: Path, dtype: torch.dtype, *, fp32_adapters: bool) -> Any:
    def model() -> Any:
        return lora(dtype, fp32_adapters=fp32_adapters)

    settings = {"save_strategy": "steps", "save_steps": 5}
    whole = train(trainer_for(arguments(side, out, **settings), {}, model=model()))
    trainer = trainer_for(arguments(side, out / "resumed"), {}, model=model())
    return train(trainer, resume_from_checkpoint=str(out / "checkpoint-5")), whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_resumed_is_uninterrupted(side: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    resumed, whole = resumed_and_uninterrupted(side, tmp_path, dtype, fp32_adapters=True)
    assert_same_run(resumed, whole, state=True)


def test_adapters_of_16_bits_that_the_trainer_resumes_in_32_are_told(side: Any, tmp_path: Path) -> None:
    """The Trainer loads adapters as PEFT makes them by default, in fp32, whatever they were."""
    with pytest.warns(UserWarning, match=r"its residual is dropped, since the parameter is torch\.float32"):
        resumed, whole = resumed_and_uninterrupted(side, tmp_path, torch.bfloat16, fp32_adapters=False)
    for run, dtype in ((whole, torch.bfloat16), (resumed, torch.float32)):
        assert {p.dtype for p in run.model.parameters() if p.requires_grad} == {dtype}
