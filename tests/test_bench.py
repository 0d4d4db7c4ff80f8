"""`outboard.bench.host` and `python -m outboard bench host`: what is returned and shown; no time is tested."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outboard
from outboard import bench, doctor
from outboard._cli import main
from outboard.bench import terminal

CASES = {
    "all": ["fp32", "tiny", "bf16", "bf16_moments"],
    "float32": ["fp32", "tiny"],
    "bfloat16": ["bf16", "bf16_moments"],
}
COMMON = {"ms", "gelem_per_s", "gb_per_s", "ratio_to_torch_fused"}
FP32 = {"torch_fused_ms", "torch_fused_gain_from_huge_pages", "stream_gb_per_s", "bandwidth_fraction", "bits_equal"}
PROGRAM = "python -m outboard bench host"


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BLOCKS", 2)
    monkeypatch.setattr(bench, "TINY_PARAMETERS", 20)


def keys(value: Any) -> Any:
    return {name: keys(inner) for name, inner in value.items()} if isinstance(value, dict) else None


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers(inner)
    elif isinstance(value, int | float):
        yield value


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that the command says before it ends with status 2."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


# The function


@pytest.mark.parametrize("dtype", ["all", "float32", "bfloat16"])
def test_every_key_and_finite(dtype: str) -> None:
    heard: list[str] = []
    result = bench.host(1000, 1, dtype, heard.append)
    assert list(result) == ["numel", "threads", "machine", "versions", *CASES[dtype]]
    assert (result["numel"], result["threads"]) == (1000, 1)
    assert result["versions"] == {"outboard": outboard.__version__, "torch": torch.__version__}
    assert result["machine"]["isa"] == outboard.build_info()["isa"]
    for case in CASES[dtype]:
        assert set(result[case]) >= COMMON
    if "fp32" in result:
        assert set(result["fp32"]) >= FP32
        assert result["tiny"]["parameters"] == bench.TINY_PARAMETERS
    assert all(math.isfinite(value) for value in numbers(result))
    assert all(result[case]["ms"] > 0 for case in CASES[dtype])
    assert len(heard) == len(CASES[dtype])
    json.dumps(result, allow_nan=False)


def test_both_sides_have_the_same_bits() -> None:
    assert bench.host(1024, 1, "float32")["fp32"]["bits_equal"] is True


def test_threads_of_torch_are_put_back() -> None:
    before = torch.get_num_threads()
    assert bench.host(10, 2, "bfloat16")["threads"] == 2
    assert torch.get_num_threads() == before


def test_default_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOARD_NUM_THREADS", "1")
    assert bench.host(10, dtype="bfloat16")["threads"] == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"numel": 0}, ValueError, "numel"),
        ({"numel": 1.5}, TypeError, "numel"),
        ({"numel": 10, "threads": 0}, ValueError, "threads"),
        ({"numel": 10, "threads": "two"}, TypeError, "threads"),
        ({"numel": 10, "dtype": "float64"}, ValueError, "dtype"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bench.host(**arguments)


# The command


def test_json_has_the_functions_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", "--numel", "1e3", "--threads", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    answer = json.loads(said.out)
    assert keys(answer) == keys(bench.host(1000, 1))
    assert (answer["numel"], answer["threads"]) == (1000, 1)
    assert all(math.isfinite(value) for value in numbers(answer))


def test_json_in_a_process_with_a_broken_rich(tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("raise RuntimeError('this rich is broken')")
    # Importing the package alone must load neither rich nor the command line.
    program = """
import sys, outboard
assert not {"rich", "outboard._cli"} & sys.modules.keys()
from outboard._cli import main
sys.exit(main())
"""
    options = ["--numel", "100", "--threads", "1", "--dtype", "bfloat16", "--json"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, "bench", "host", *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["numel"] == 100


RESULT: dict[str, Any] = {
    "numel": 1000,
    "threads": 2,
    "machine": {"cpu": "A CPU [2 cores]", "architecture": "x86_64", "isa": "avx2"},
    "versions": {"outboard": "0.1.0", "torch": "2.14.1"},
    "fp32": {
        "ms": 1234.5,
        "gelem_per_s": 0.05432,
        "gb_per_s": 22.34,
        "torch_fused_ms": 80.06,
        "ratio_to_torch_fused": 1.3,
        "torch_fused_gain_from_huge_pages": 1.9,
        "stream_gb_per_s": 0.0,
        "bandwidth_fraction": 0.95,
        "bits_equal": True,
        "some_new_figure": 3,
    },
    "tiny": {
        "parameters": 10_000,
        "ms": 1.0,
        "gelem_per_s": 1.0,
        "gb_per_s": 28.0,
        "torch_fused_ms": 3.0,
        "ratio_to_torch_fused": 3.0,
    },
    "bf16": {
        "ms": 1.0,
        "gelem_per_s": 1.0,
        "gb_per_s": 26.0,
        "torch_fused_on_fp32_copies_ms": 1.5,
        "ratio_to_torch_fused": 1.5,
    },
}


def test_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "host", lambda *_: RESULT)
    assert main(["bench", "host"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "AdamW on tensors in host memory: 1,000 elements, 2 threads, medians of 2 alternating blocks",
        "",
        "case                           outboard, ms  torch fused, ms  ratio   Gel/s  GB/s",
        "fp32 weights and moments              1,234             80.1   1.30  0.0543  22.3",
        "fp32, 10,000 small parameters          1.00             3.00   3.00    1.00  28.0",
        "bf16 weights, fp32 moments             1.00             1.50   1.50    1.00  26.0",
        "",
        "ratio: torch's time over outboard's; above 1, outboard is faster. Gel/s: 1e9 elements per second. GB/s: bytes "
        "that must move.",
        "fp32: torch's own gain from huge pages: 1.90",
        "fp32: stream loop over the same tensors: 0.0 GB/s",
        "fp32: bandwidth, as a fraction of the stream loop's: 0.950",
        "fp32: the same bits as torch: yes",
        "fp32: some new figure: 3",
        "bf16: torch's side updates fp32 copies",
        "machine: A CPU [2 cores], x86_64, avx2",
        "versions: outboard 0.1.0, torch 2.14.1",
    ]


def test_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def host(_numel: int, _threads: int | None, _dtype: str, progress: bench.Progress) -> dict[str, Any]:
        progress("something")
        return RESULT

    monkeypatch.setattr(bench, "host", host)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["bench", "host"]) == 0
    said = capsys.readouterr()
    assert "│" in said.out
    assert "A CPU [2 cores]" in said.out
    assert "measuring something" in said.err
    # Without rich the same is there as text.
    monkeypatch.setitem(sys.modules, "rich.table", None)
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert main(["bench", "host"]) == 0
    said = capsys.readouterr()
    assert "│" not in said.out
    assert "22.3" in said.out
    assert said.err == "measuring something\n"


@pytest.mark.parametrize(
    ("text", "numel"),
    [
        ("1", 1),
        ("1e6", 1_000_000),
        ("1_000", 1000),
        ("2.5e3", 2500),
        ("500k", 500_000),
        ("1.5Ki", 1536),
        ("64Mi", 64 << 20),
        ("3M", 3_000_000),
        ("1Gi", 1 << 30),
        ("2G", 2_000_000_000),
    ],
)
def test_numel(text: str, numel: int) -> None:
    assert terminal.numel(text) == numel


@pytest.mark.parametrize(
    "options",
    [
        *(["--numel", value] for value in ("0", "-1", "1.5", "64Ti", "many", "", "1e99", "0x10", "nan", "inf")),
        *(["--threads", value] for value in ("0", "-1", "1.5", "many", "", "999999999")),
        ["--dtype", "float64"],
        ["--unknown"],
        ["more"],
    ],
)
def test_bad_values(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(["bench", "host", *options], capsys)
    assert options[-1] in line


def test_more_than_the_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: (1 << 30, "of 2 GiB"))
    line = refused(["bench", "host"], capsys)
    assert line.startswith(f"{PROGRAM}: argument --numel: 67,108,864 elements need about ")
    assert "1.0 GiB are available" in line


def test_bad_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OUTBOARD_NUM_THREADS", "many")
    assert "OUTBOARD_NUM_THREADS=many" in refused(["bench", "host", "--numel", "10"], capsys)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RuntimeError("no\nmemory"), 1, f"{PROGRAM}: no memory"),
        (MemoryError(), 1, f"{PROGRAM}: MemoryError"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, line: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(bench, "host", fail)
    assert main(["bench", "host", "--numel", "10"]) == status
    assert capsys.readouterr() == ("", f"{line}\n")


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_a_command_is_missing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "usage: python -m outboard" in said.err
    assert "examples:" in said.err


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'fly'" in refused(["fly"], capsys)


@pytest.mark.parametrize("command", [[], ["doctor"], ["bench"], ["bench", "host"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(" ".join(["usage: python -m outboard", *command]))
    assert "examples:" in said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"outboard {outboard.__version__}\n"
