"""The Python in README and docs runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outboard._lanes import LaneOptions

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Its blocks need the frameworks: they run in tests/integrations.
FRAMEWORKS = ROOT / "docs" / "frameworks.md"
NEEDS_A_GPU = "# needs a GPU"
RANKS = re.compile(r"^# torchrun --nproc-per-node (\d+)")


def blocks(pages: list[Path]) -> list[object]:
    found = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start(1)) + 1
            marks = [pytest.mark.cuda] if NEEDS_A_GPU in block[1] else []
            # Line numbers in tracebacks are the page's.
            code = "\n" * (line - 1) + block[1]
            found.append(pytest.param(page, code, marks=marks, id=f"{page.name}:{line}"))
    return found


@pytest.mark.parametrize(("page", "code"), blocks([page for page in PAGES if page != FRAMEWORKS]))
def test_block(page: Path, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = RANKS.match(code.lstrip("\n"))
    if ranks:
        program = tmp_path / "this.py"
        program.write_text(code)
        devices = torch.cuda.device_count()
        if 0 < devices < int(ranks[1]):
            pytest.skip(f"needs {ranks[1]} CUDA devices or none, there are {devices}")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks[1]]
        subprocess.run([*launch, str(program)], check=True, timeout=120)
        return
    run_block(page, code, tmp_path, monkeypatch)


def run_block(page: Path, code: str, where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a block in a directory of its own, where there is no GPU on a device with lanes."""
    monkeypatch.chdir(where)
    if not torch.cuda.is_available():
        monkeypatch.setattr(LaneOptions, "simulate", 7)
    exec(compile(code, page, "exec"), {"__name__": "__main__"})


def test_there_are_blocks_and_links_lead_somewhere() -> None:
    assert {parameters.values[0].name for parameters in blocks(PAGES)} >= {"README.md", "gpu.md", FRAMEWORKS.name}
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tests_of_the_compatibility_table_exist() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests/[\w/]+\.py)?(?:::\w+)?)`", text)
    file, found = "", set()
    for name in filter(None, named):
        path, _, test = name.partition("::")
        file = path or file
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not test or f"\ndef {test}(" in source, f"{file} has no {test}"
        found.add(file)
    assert len(found) > 30
    for row in text.splitlines():
        if row.startswith("| ") and not row.startswith("| |"):
            assert "`tests/" in row, f"no test: {row}"


def test_nothing_is_left_to_be_filled_in() -> None:
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            assert not re.fullmatch(r"(TABLE|TODO|TBD)\b.*", line.strip()), f"{page.name}: {line}"
