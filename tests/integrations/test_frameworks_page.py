"""The Python in docs/frameworks.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tiny  # noqa: F401  (the frameworks' imports warn)
from test_documentation import FRAMEWORKS, ROOT, blocks, run_block

pytestmark = [
    pytest.mark.integrations,
    # What the frameworks say of defaults that the snippets leave, and deprecate in each other.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpointing.* is deprecated and will be removed in v6:FutureWarning"
    ),
]


@pytest.mark.parametrize(("page", "code"), blocks([FRAMEWORKS]))
def test_block(page: Path, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_block(page, code, tmp_path, monkeypatch)


def test_each_framework_has_a_block() -> None:
    sections = re.split(r"^## ", FRAMEWORKS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert [section.splitlines()[0] for section in sections] == [
        "Hugging Face Trainer",
        "accelerate",
        "PyTorch Lightning",
        "PEFT",
        "TRL",
    ]
    assert all(section.count("```python") == 1 for section in sections)


def test_versions_are_those_that_are_tested() -> None:
    pins = dict(re.findall(r'"([a-z]+)==(\d+\.\d+)\.\d+"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    text = FRAMEWORKS.read_text(encoding="utf-8")
    for name in ("transformers", "accelerate", "lightning", "peft", "trl"):
        assert re.search(rf"{name} {re.escape(pins[name])}\b", text, re.IGNORECASE), name
