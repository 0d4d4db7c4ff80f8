"""TRL's SFTTrainer: the recipe of the Trainer, with its own data, losses and adapters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import WAYS, assert_same_run, changed, llama, sides_and_ways
from trainer import train, trainer_for

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

pytestmark = [
    pytest.mark.integrations,
    # Of transformers, in what PEFT and TRL call of it.
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpointing.* is deprecated and will be removed in v6:FutureWarning"
    ),
]

WORDS = [f"word{number}" for number in range(60)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return one token a word, made here."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    inner = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(special + WORDS)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def texts() -> Dataset:
    """Return sentences of several lengths, which are padded, or packed."""
    rows = [" ".join(WORDS[(row * 7 + place) % 60] for place in range(4 + row % 9)) for row in range(32)]
    return Dataset.from_dict({"text": rows})


def arguments(side: Any, out: Path, **changes: Any) -> SFTConfig:
    settings = {
        "output_dir": str(out),
        "use_cpu": side.device.type == "cpu",
        "bf16": False,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "max_length": 16,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return SFTConfig(**{**settings, **changes})


def sft(args: SFTConfig, options: Any, **settings: Any) -> Any:
    return trainer_for(args, options, kind=SFTTrainer, data=texts(), processing_class=tokenizer(), **settings)


def reference(side: Any, args: SFTConfig, **settings: Any) -> Any:
    cls, options = side.reference
    with side.unattached():
        return train(sft(args, options, cls=cls, attach=False, **settings))


@sides_and_ways()
def test_equals_torch(side: Any, way: str, tmp_path: Path) -> None:
    args = arguments(side, tmp_path, gradient_accumulation_steps=2)
    run = train(sft(args, WAYS[way]))
    assert_same_run(run, reference(side, args))
    assert len(run.losses) == 4
    assert (run.eager_updates > 0) == (way in ("auto", "eager") and side.has_lanes)


@sides_and_ways("auto", "eager", "offloaded")
def test_adapters(side: Any, way: str, tmp_path: Path) -> None:
    def config() -> LoraConfig:
        return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    args = arguments(side, tmp_path)
    run = train(sft(args, WAYS[way], peft_config=config()))
    wanted = reference(side, args, peft_config=config())
    assert_same_run(run, wanted)
    assert run.optimizer.stats()["elements"] == sum(p.numel() for p in run.model.parameters() if p.requires_grad)


def test_resumed_is_uninterrupted(side: Any, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 5, "max_grad_norm": 0.5}
    whole = train(sft(arguments(side, tmp_path, **settings), {}, model=llama(torch.bfloat16)))
    resumed = train(
        sft(arguments(side, tmp_path / "resumed", max_grad_norm=0.5), {}, model=llama(torch.bfloat16)),
        resume_from_checkpoint=str(tmp_path / "checkpoint-5"),
    )
    assert_same_run(resumed, whole, state=True)
    assert resumed.norms == whole.norms
    assert changed(whole.model, llama(torch.bfloat16))
