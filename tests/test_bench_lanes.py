"""`outboard.bench.lanes` and `python -m outboard bench lanes`: what is returned, shown and drawn; no time is tested."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import outboard
from outboard import bench, doctor
from outboard._cli import main
from outboard.bench import plot, tables
from test_bench_step import not_blank

#: The module; the package's own name of it is the function.
module = importlib.import_module("outboard.bench.lanes")

FLAT = {"gpu_gelem_per_s", "gpu_zero_copy_gelem_per_s", "cpu_gelem_per_s", "auto_gelem_per_s"}
ROW = {"mode", "transfer", "gelem_per_s", "seconds", "gb_per_s_to_device", "gb_per_s_from_device"}
ASKED = {"numel", "parameters", "threads", "device", "dtype", "state_dtype", "state_bytes_per_element", "repeats"}


@pytest.mark.parametrize(
    ("numel", "parameters", "dtype", "state_dtype", "state_bytes"),
    [
        (16_000, 16, "bfloat16", "float32", 10),
        (1_001, 16, "float32", "float32", 8),
        (3, 3, "bfloat16", "bfloat16", 6),
        (17, 16, "float16", "float32", 12),
    ],
)
def test_on_the_cpu(numel: int, parameters: int, dtype: str, state_dtype: str, state_bytes: int) -> None:
    heard: list[str] = []
    result = bench.lanes(numel, 2, "cpu", dtype, state_dtype, 2, heard.append)
    json.dumps(result, allow_nan=False)
    assert set(result) == ASKED | FLAT | {"machine", "versions", "rows"}
    assert (result["numel"], result["threads"], result["repeats"], result["device"]) == (numel, 2, 2, "cpu")
    assert result["parameters"] == parameters
    assert result["state_bytes_per_element"] == state_bytes
    assert result["versions"] == {"outboard": outboard.__version__, "torch": torch.__version__}
    assert result["machine"] == bench.machine()
    assert [(row["mode"], row["transfer"]) for row in result["rows"]] == [("cpu", "auto"), ("auto", "auto")]
    for row in result["rows"]:
        assert set(row) == ROW
        assert row["seconds"] > 0
        assert row["gelem_per_s"] == numel / row["seconds"] / 1e9 == result[f"{row['mode']}_gelem_per_s"]
        assert row["gb_per_s_to_device"] == row["gb_per_s_from_device"] == 0
    assert result["gpu_gelem_per_s"] is result["gpu_zero_copy_gelem_per_s"] is None
    assert heard == ["cpu", "auto"]


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 31, 33, 1000])
def test_parameters_hold_all_elements(numel: int) -> None:
    parameters = module._parameters(numel, torch.float32, torch.device("cpu"))
    assert sum(parameter.numel() for parameter in parameters) == numel
    assert len(parameters) == min(module.PARAMETERS, numel)
    sizes = {parameter.numel() for parameter in parameters}
    assert max(sizes) - min(sizes) <= 1
    assert all(parameter.grad is not None and parameter.grad.shape == parameter.shape for parameter in parameters)


@pytest.mark.parametrize(
    ("mode", "share", "to_device", "from_device"),
    [
        ("gpu", 1.0, 10.0, 10.0),
        ("cpu", 0.0, 2.0, 4.0),
        ("auto", 0.5, 6.0, 7.0),
        ("auto", None, None, None),
    ],
)
def test_bytes_of_lanes(mode: str, share: float | None, to_device: float | None, from_device: float | None) -> None:
    """1e9 elements of bf16 in a second: 10 bytes of state both ways, or gradient and weight down and the weight up."""
    device = torch.device("cuda")
    row = module._row(10**9, 1.0, mode, share, torch.bfloat16, torch.float32, device)
    assert (row["gb_per_s_to_device"], row["gb_per_s_from_device"]) == (to_device, from_device)
    assert row["gelem_per_s"] == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"numel": 0}, ValueError, "numel"),
        ({"numel": 1.5}, TypeError, "numel"),
        ({"threads": 0}, ValueError, "threads"),
        ({"repeats": 0}, ValueError, "repeats"),
        ({"device": "tpu"}, ValueError, "cpu.*cuda"),
        ({"device": "xla:0"}, ValueError, "cpu.*cuda"),
        ({"dtype": "float64"}, ValueError, "bfloat16.*float32.*float16"),
        ({"state_dtype": "float16"}, ValueError, "float32.*bfloat16"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bench.lanes(**{"numel": 10, "device": "cpu", **arguments})


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        (["--numel", "many"], "64Mi"),
        (["--threads", "0"], "from 1"),
        (["--repeats", "0"], "from 1"),
        (["--dtype", "float64"], "bfloat16"),
        (["--state-dtype", "float16"], "bfloat16"),
        (["--device", "tpu"], "cuda:N"),
        (["--plot", "lanes.gif"], ".png"),
        (["--unknown"], "--unknown"),
    ],
)
def test_bad_options(options: list[str], allowed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "lanes", "--device", "cpu", *options])
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert allowed in said.err


def test_more_than_the_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: (1 << 30, "of 2 GiB"))
    with pytest.raises(SystemExit) as end:
        main(["bench", "lanes", "--device", "cpu"])
    assert end.value.code == 2
    # 10 bytes of state, 4 of weight and gradient, and half a GiB.
    assert "--numel: 268,435,456 elements need about 4.0 GiB" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said without a CUDA device, and there is one")
def test_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "lanes", "--numel", "10"]) == 1
    assert "no CUDA device" in capsys.readouterr().err


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lanes.png"
    options = ["--device", "cpu", "--numel", "1e4", "--threads", "1", "--repeats", "1"]
    assert main(["bench", "lanes", *options, "--json", "--plot", str(path)]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out).keys() >= FLAT
    assert said.err == "measuring cpu\nmeasuring auto\n"
    assert not_blank(path)


RESULT: dict[str, Any] = {
    "numel": 1 << 28,
    "parameters": 16,
    "threads": 14,
    "device": "cuda:0",
    "dtype": "bfloat16",
    "state_dtype": "float32",
    "state_bytes_per_element": 10,
    "repeats": 7,
    "machine": {"cpu": "A CPU", "architecture": "x86_64", "isa": "avx512", "gpu": "A GPU"},
    "versions": {"outboard": "0.1.0", "torch": "2.14.1"},
    "rows": [
        {"mode": "gpu", "transfer": "staged", "seconds": 0.0538, "gelem_per_s": 4.99}
        | {"gb_per_s_to_device": 49.9, "gb_per_s_from_device": 49.9},
        {"mode": "auto", "transfer": "auto", "seconds": 0.0373, "gelem_per_s": 7.2}
        | {"gb_per_s_to_device": None, "gb_per_s_from_device": None},
    ],
}


def test_text() -> None:
    assert tables.lanes(RESULT).text().splitlines() == [
        "AdamW on cuda:0, not attached: 268,435,456 bfloat16 elements in 16 parameters, float32 moments, 14 threads, "
        "medians of 7 steps",
        "",
        "lane           ms  Gel/s  GB/s to device  GB/s from device",
        "gpu, staged  53.8   4.99            49.9              49.9",
        "both         37.3   7.20               -                 -",
        "",
        "Gel/s: 1e9 elements per second. GB/s: what the lane must move each way; the GPU lane 10 bytes of state per "
        "element both ways.",
        "machine: A CPU, x86_64, avx512, A GPU",
        "versions: outboard 0.1.0, torch 2.14.1",
    ]


def test_plot(tmp_path: Path) -> None:
    plot.lanes(RESULT, tmp_path / "lanes.png")
    assert not_blank(tmp_path / "lanes.png")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_cuda(dtype: str, tmp_path: Path) -> None:
    result = bench.lanes(1 << 20, device="cuda:0", dtype=dtype, repeats=2)
    assert [(row["mode"], row["transfer"]) for row in result["rows"]] == [
        ("gpu", "staged"),
        ("gpu", "zero_copy"),
        ("cpu", "auto"),
        ("auto", "auto"),
    ]
    assert all(result[key] > 0 for key in FLAT)
    for row in result["rows"][:3]:
        assert row["gb_per_s_to_device"] > 0
        assert row["gb_per_s_from_device"] > 0
    assert "gpu" in result["machine"]
    plot.lanes(result, tmp_path / "lanes.png")
    assert not_blank(tmp_path / "lanes.png")
