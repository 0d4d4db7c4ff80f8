"""`outboard.bench.training_step` and `python -m outboard bench step`: what is returned, shown and drawn.

Over 500 lines: independent cases, read one at a time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import outboard
from outboard import bench
from outboard._cli import main
from outboard.bench import models, plot, sides, step, worker
from outboard.bench.setup import PEERS, Setup

SMALL: dict[str, Any] = {"model": "gpt-tiny", "device": "cpu", "batch": 2, "seq": 16, "steps": 2, "warmup": 1}
OPTIONS = [f"--{name}={value}" for name, value in SMALL.items()]
KEYS = {
    "side",
    "title",
    "resident",
    "step_ms",
    "ratio_to_torch_fused",
    "peak_device_gib",
    "device_gib_over_forward_backward",
    "device_gib_outside_torch",
    "device_used_gib_before",
    "device_used_gib_after",
    "host_gib",
    "start_seconds",
    "loss_first",
    "loss_last",
    "hook_ms_per_step",
    "forward_stall_ms",
    "step_ms_of_rounds",
    "warnings",
    "error",
}


def setup(**changes: Any) -> Setup:
    given = {"side": "outboard", "dtype": "float32", "state_dtype": "float32", **SMALL}
    return Setup(**{**given, **changes})


def not_blank(path: Path) -> bool:
    """Whether a PNG has more than its background: several colours, and not only at its edges."""
    from matplotlib.image import imread

    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = torch.from_numpy(imread(path)[..., :3].copy())
    height, width, _ = pixels.shape
    middle = pixels[height // 5 : -height // 5, width // 5 : -width // 5].reshape(-1, 3)
    return len(middle.unique(dim=0)) >= 3 and bool((middle != 1).any(1).float().mean() > 0.001)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(["bench", "step", *arguments])
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


# The function, for real, on the CPU


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    heard: list[str] = []
    result = bench.training_step(**SMALL, clip=1.0, tiny=3, timeline=True, dtype="float32", progress=heard.append)
    assert heard == [
        "forward and backward alone (1 of 3)",
        "torch fused, nothing offloaded (2 of 3)",
        "outboard (3 of 3)",
    ]
    return result


def test_keys(measured: dict[str, Any]) -> None:
    json.dumps(measured, allow_nan=False)
    assert list(measured["sides"]) == ["forward_backward", "torch", "outboard", "torchao", "deepspeed", "trainstream"]
    assert all(row.keys() >= KEYS for row in measured["sides"].values())
    assert {key: measured[key] for key in SMALL} == SMALL
    assert (measured["clip"], measured["tiny"], measured["rounds"], measured["eager"]) == (1.0, 3, 1, "auto")
    assert measured["tokens_per_step"] == 32
    shape = models.MODELS["gpt-tiny"]
    assert measured["parameters"] > 2 * shape.vocabulary * shape.width + 3000
    assert measured["versions"] == {"outboard": outboard.__version__, "torch": torch.__version__}
    assert measured["machine"] == bench.machine()


def test_figures(measured: dict[str, Any]) -> None:
    rows = measured["sides"]
    for name in ("forward_backward", "torch", "outboard"):
        row = rows[name]
        assert row["error"] is None
        assert row["step_ms"] > 0
        assert row["start_seconds"] >= 0
        assert 0.05 < row["host_gib"] < 64
        assert row["warnings"] == []
        assert row["ratio_to_torch_fused"] == rows["torch"]["step_ms"] / row["step_ms"]
        assert row["step_ms_of_rounds"] == [row["step_ms"]]
        assert row["peak_device_gib"] is row["device_gib_over_forward_backward"] is None
    # The same model and tokens; only what has an optimizer learns.
    assert rows["forward_backward"]["loss_first"] == rows["torch"]["loss_first"] == rows["outboard"]["loss_first"]
    assert rows["forward_backward"]["loss_last"] == rows["forward_backward"]["loss_first"]
    assert rows["torch"]["loss_last"] < rows["torch"]["loss_first"]
    assert rows["outboard"]["loss_last"] == pytest.approx(rows["torch"]["loss_last"], rel=1e-4)
    assert rows["outboard"]["stats"]["steps"] == 3
    for peer in ("torchao", "deepspeed", "trainstream"):
        assert rows[peer]["error"] in ("not installed", "needs a CUDA device")
        assert rows[peer]["step_ms"] is None


def test_timeline_is_one_step(measured: dict[str, Any]) -> None:
    spans = measured["sides"]["outboard"]["timeline"]
    assert [span[0] for span in spans] == ["forward", "backward", "cpu lane"]
    assert spans[0][2] == 0
    for (*_, end), (_, _, start, _) in pairwise(spans):
        assert start == pytest.approx(end, abs=1)
    assert "timeline" not in measured["sides"]["torch"]


def test_timeline_plot(measured: dict[str, Any], tmp_path: Path) -> None:
    plot.timeline(measured, tmp_path / "timeline.png")
    assert not_blank(tmp_path / "timeline.png")


def test_command_with_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plot.png"
    assert main(["bench", "step", *OPTIONS, "--peers", "none", "--json", "--plot", str(path)]) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert list(answer["sides"]) == ["forward_backward", "outboard"]
    assert answer["dtype"] == "bfloat16"
    assert answer["eager"] is True
    assert all(row["ratio_to_torch_fused"] is None for row in answer["sides"].values())
    assert said.err.splitlines() == [
        "measuring forward and backward alone (1 of 2)",
        "measuring outboard (2 of 2)",
    ]
    assert not_blank(path)


def test_a_side_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", *OPTIONS, "--peers", "none", "--mode", "gpu", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["sides"]
    assert "DeviceError" in rows["outboard"]["error"]
    assert rows["outboard"]["step_ms"] is None
    assert rows["forward_backward"]["error"] is None


# The function, with answers that are made up


def answer(asked: Setup, **changes: Any) -> dict[str, Any]:
    device = {"peak_device_gib": 20.0, "device_gib_outside_torch": 0.5}
    ours = {"hook_ms_per_step": 1.5, "forward_stall_ms": 2.5} if asked.side == "outboard" else {}
    return {
        "step_ms": 100.0,
        "start_seconds": 0.5,
        "parameters": 1000,
        "loss_first": 6.0,
        "loss_last": 5.0,
        "host_gib": 13.5,
        "device_used_gib_before": 1.0,
        "device_used_gib_after": 25.0,
        **device,
        **ours,
        "machine": {"cpu": "A CPU", "architecture": "x86_64", "isa": "avx512", "gpu": "A GPU"},
        **changes,
    }


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> list[Setup]:
    """Answer as if there were a CUDA device; return what was asked, in its order."""
    asked: list[Setup] = []

    def ask(setup: Setup) -> dict[str, Any]:
        asked.append(setup)
        if setup.side == "deepspeed":
            return {"error": "OutOfMemoryError: too little"}
        times = {"forward_backward": 80.0, "torch": 90.0, "outboard": 100.0 + len(asked)}
        device = {"forward_backward": 20.0, "torch": 25.0, "outboard": 20.25 + 12 * setup.resident}
        changes = {"step_ms": times.get(setup.side, 300.0), "peak_device_gib": device.get(setup.side, 22.0)}
        if setup.side == "outboard":
            changes["device_gib_outside_torch"] = 1.0
            changes["warnings"] = ["state could not be pinned"]
        if setup.timeline:
            changes["timeline"] = [["forward", "f", 0.0, 30.0], ["gpu lane", "g", 1.0, 2.0], ["other", "o", 5.0, 9.0]]
        return answer(setup, **changes)

    monkeypatch.setattr(step, "_ask", ask)
    monkeypatch.setattr(step, "need_device", lambda _: None)
    monkeypatch.setattr(sides, "installed", lambda side: side != "trainstream")
    return asked


def test_rounds_are_interleaved_and_medians(on_a_device: list[Setup]) -> None:
    result = bench.training_step("gpt-350m", resident=[0, 0.25], rounds=3, timeline=True)
    once = ["forward_backward", "torch", "outboard", "outboard_resident_0.25", "torchao"]
    assert [setup.name for setup in on_a_device] == [*once, "deepspeed", *once, *once]
    assert [setup.timeline for setup in on_a_device if setup.side == "outboard"] == [False] * 4 + [True, False]
    rows = result["sides"]
    assert rows["outboard"]["step_ms_of_rounds"] == [103, 109, 114]
    assert rows["outboard"]["step_ms"] == 109
    assert rows["outboard"]["ratio_to_torch_fused"] == 90 / 109
    assert rows["outboard"]["device_gib_over_forward_backward"] == pytest.approx(0.75)
    assert rows["outboard_resident_0.25"]["device_gib_over_forward_backward"] == pytest.approx(3.75)
    assert rows["outboard_resident_0.25"]["resident"] == 0.25
    assert rows["torch"]["device_gib_over_forward_backward"] == 5
    assert rows["outboard"]["hook_ms_per_step"] == 1.5
    assert rows["deepspeed"]["error"] == "OutOfMemoryError: too little"
    assert rows["trainstream"]["error"] == "not installed"
    assert result["seq"] == 2048
    assert result["machine"]["gpu"] == "A GPU"


def test_text(on_a_device: list[Setup], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--resident", "0,0.25", "--clip", "1", "--tiny", "10"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
        "Training step on cuda: gpt-1.3b and 10 tiny ones, 1,000 bfloat16 parameters, 8 x 2,048 tokens, clip 1; "
        "outboard: mode auto, eager auto; 8 steps after 3, 1 round"
    )
    assert said[2].split("  ")[0] == "side"
    assert said[2].rstrip().endswith("stall, ms")
    by_title = {line.split("  ")[0]: line for line in said}
    assert by_title["outboard, 25% resident"].split()[3:7] == ["104", "0.865", "23.2", "3.75"]
    assert "DeepSpeed ZeRO-2 offload: OutOfMemoryError: too little" in said
    assert "trainstream: not installed" in said
    assert "outboard, 25% resident warned: state could not be pinned" in said
    assert said[-2] == "machine: A CPU, x86_64, avx512, A GPU"
    assert all(setup.eager == "auto" and setup.clip == 1 for setup in on_a_device)


@pytest.mark.parametrize("resident", ["0", "0,0.25,0.5"])
def test_plots(on_a_device: list[Setup], resident: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plot.png"
    assert main(["bench", "step", "--resident", resident, "--plot", str(path), "--json"]) == 0
    assert not_blank(path)
    recorded = any("timeline" in row for row in json.loads(capsys.readouterr().out)["sides"].values())
    assert recorded is (resident == "0")


def test_several_plots_differ(on_a_device: list[Setup], tmp_path: Path) -> None:
    result = bench.training_step(resident=[0, 0.5], timeline=True)
    plot.timeline(result, tmp_path / "a.png")
    plot.resident(result, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_nothing_to_draw(on_a_device: list[Setup], tmp_path: Path) -> None:
    result = bench.training_step()
    with pytest.raises(bench.PlotError, match="no timeline"):
        plot.timeline(result, tmp_path / "a.png")
    result["sides"]["outboard"].update(step_ms=None, error="DeviceError: none")
    with pytest.raises(bench.PlotError, match="DeviceError: none"):
        plot.resident(result, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(
    on_a_device: list[Setup], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["bench", "step", "--plot", str(tmp_path / "plot.png")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "pip install 'outboard[plot]'" in said.err
    assert said.err.count("\n") == 1
    assert not on_a_device  # It says so before it measures.
    assert main(["bench", "step"]) == 0


@pytest.mark.parametrize("name", ["plot.gif", "plot", "missing/plot.png"])
def test_where_no_plot_can_be(
    on_a_device: list[Setup], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(["--plot", str(tmp_path / name)], capsys)
    assert ".png" in line or "no folder" in line
    assert not on_a_device


def test_importing_outboard_loads_neither(python: Callable[..., str]) -> None:
    python("""
        import sys, outboard
        assert not {"matplotlib", "outboard.bench", "rich"} & sys.modules.keys()
        assert callable(outboard.bench.host) and outboard.bench.BLOCKS == 9
        assert not {"matplotlib", "rich"} & sys.modules.keys()
        from outboard.bench import host, lanes, training_step
        assert host is outboard.bench.host
        try:
            outboard.benches
        except AttributeError as error:
            assert "benches" in str(error)
        else:
            raise AssertionError
        names = {}
        exec("from outboard import *", names)
        assert names["bench"] is outboard.bench
    """)


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "gpt-4"}, "gpt-1.3b.*gpt-350m.*gpt-125m.*gpt-tiny"),
        ({"batch": 0}, "batch"),
        ({"seq": 4096}, "seq.*2048"),
        ({"steps": 0}, "steps"),
        ({"warmup": 0}, "warmup"),
        ({"rounds": 0}, "rounds"),
        ({"threads": 0}, "threads"),
        ({"tiny": -1}, "tiny"),
        ({"clip": 0.0}, "clip"),
        ({"mode": "both"}, "auto.*cpu.*gpu"),
        ({"eager": "never"}, "auto.*True.*False"),
        ({"peers": ["torch", "jax"]}, "torch.*torchao.*deepspeed.*trainstream.*jax"),
        ({"resident": []}, "resident"),
        ({"resident": [1.5]}, "0 to 1"),
        ({"device": "cpu", "resident": [0.5]}, "device is 'cpu'"),
        ({"device": "tpu"}, "cpu.*cuda"),
        ({"device": "meta"}, "cpu.*cuda"),
        ({"dtype": "float64"}, "bfloat16.*float32.*float16"),
        ({"state_dtype": "float16"}, "float32.*bfloat16"),
    ],
)
def test_bad_arguments(on_a_device: list[Setup], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench.training_step(**arguments)
    assert not on_a_device


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        (["--model", "gpt-4"], "gpt-350m"),
        (["--mode", "both"], "gpu"),
        (["--eager", "never"], "true"),
        (["--peers", "torch,jax"], "torchao, deepspeed, trainstream, or none"),
        (["--resident", "0,2"], "0 to 1"),
        (["--resident", ""], "0 to 1"),
        (["--clip", "0"], "above 0"),
        (["--clip", "nan"], "above 0"),
        (["--batch", "0"], "from 1"),
        (["--tiny", "many"], "from 0"),
        (["--dtype", "float64"], "bfloat16"),
        (["--state-dtype", "float16"], "bfloat16"),
        (["--device", "tpu"], "cuda:N"),
        (["--seq", "4096"], "2048"),
        (["--device", "cpu", "--resident", "0.5"], "device is 'cpu'"),
    ],
)
def test_bad_options(
    on_a_device: list[Setup], options: list[str], allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert allowed in refused(options, capsys)
    assert not on_a_device


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said without a CUDA device, and there is one")
def test_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step"]) == 1
    assert "no CUDA device" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "step", "--help"])
    assert end.value.code == 0
    assert "examples:" in capsys.readouterr().out


# A side


def fake_optimizer(calls: list[Any]) -> type:
    class Fake:
        def __init__(self, parameters: Any, *arguments: Any, **options: Any) -> None:
            calls.append(options)
            self.recording = False
            self.spans: list[Any] = []

        def attach(self, model: torch.nn.Module) -> Any:
            calls.append("attach")
            return self

        def step(self) -> None:
            calls.append("step")
            now = time.perf_counter()
            self.spans.append(("copy in", "chunk 0", now - 1e-5, now))

        def zero_grad(self) -> None:
            calls.append("zero_grad")

        def synchronize(self) -> None:
            calls.append("synchronize")

        def record_timeline(self, on: bool) -> None:
            calls.append(("record", on))
            self.spans.clear()

        def take_timeline(self) -> list[Any]:
            return list(self.spans)

        def stats(self) -> dict[str, Any]:
            return {"hook_ms_per_step": 0.5, "forward_stall_ms": float("nan"), "dtype": torch.float32, "a": (1, [2.5])}

        def plan(self) -> dict[str, Any]:
            return {"host_bytes": 10}

    return Fake


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"eager": True}, {"eager": True, "device_state_bytes": 0, "max_grad_norm": None}),
        ({"clip": 1.0, "resident": 0.25}, {"eager": "auto", "device_state_bytes": 0.25, "max_grad_norm": 1.0}),
        ({"resident": 1.0, "state_dtype": "bfloat16"}, {"device_state_bytes": 1.0, "state_dtype": torch.bfloat16}),
    ],
)
def test_outboard_on_a_device(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(sides, "AdamW", fake_optimizer(calls))
    side = sides.make(setup(device="cuda:0", **changes), torch.nn.Linear(2, 2))
    side.update()
    side.synchronize()
    assert options.items() <= calls[0].items()
    assert all(type(calls[0][key]) is type(value) for key, value in options.items())
    assert calls[1:] == ["attach", "step", "zero_grad", "synchronize"]


def test_what_the_optimizer_records(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(sides, "AdamW", fake_optimizer(calls))
    result = worker.measure(setup(timeline=True))
    json.dumps(result, allow_nan=False)
    assert [span[0] for span in result["timeline"]] == ["forward", "backward", "copy in"]
    assert result["hook_ms_per_step"] == 0.5
    assert result["forward_stall_ms"] is None
    assert result["stats"]["dtype"] == "torch.float32"
    assert result["plan"] == {"host_bytes": 10}
    assert calls.count("step") == 3 + 3
    assert calls[-1] == ("record", False)


def test_cut() -> None:
    spans = [("b", "", 3.0, 9.0), ("a", "", 0.0, 1.0), ("a", "", 0.5, 2.5), ("c", "", 4.0, 5.0)]
    assert worker.cut(spans, 2.0, 4.0) == [("a", "", 0.0, 500.0), ("b", "", 1000.0, 2000.0)]


@pytest.mark.parametrize("peer", ["torchao", "deepspeed", "trainstream"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_peers_are_driven(monkeypatch: pytest.MonkeyPatch, peer: str, clip: float | None) -> None:
    """With stand-ins of their packages: nothing here can install them."""
    given: dict[str, Any] = {}
    inner: list[torch.optim.Optimizer] = []

    class Engine:
        def __init__(self, model: torch.nn.Module) -> None:
            self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)

        def __call__(self, *arguments: torch.Tensor) -> torch.Tensor:
            return self.model(*arguments)

        def backward(self, loss: torch.Tensor) -> None:
            loss.backward()

        def step(self) -> None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def offload(parameters: Any, kind: Any, **options: Any) -> torch.optim.Optimizer:
        given.update(options)
        inner.append(torch.optim.SGD(parameters, lr=0.1))
        return inner[0]

    def wrap(model: Any, optimizer: Any, **options: Any) -> Any:
        given.update(options)
        return model, optimizer

    def initialize(model: Any, model_parameters: Any, config: dict[str, Any]) -> Any:
        given.update(config)
        return Engine(model), None, None, None

    made = {
        "torchao.optim": SimpleNamespace(CPUOffloadOptimizer=offload),
        "trainstream": SimpleNamespace(wrap=wrap),
        "deepspeed": SimpleNamespace(initialize=initialize),
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    result = worker.measure(setup(side=peer, clip=clip))
    assert result["loss_last"] < result["loss_first"]
    expected = {
        "torchao": {"offload_gradients": clip is None},
        "trainstream": {"max_grad_norm": clip, "optimizer_mode": "gpu", "moment_dtype": "float32"},
        "deepspeed": {"gradient_clipping": clip or 0.0, "train_micro_batch_size_per_gpu": 2},
    }
    assert expected[peer].items() <= given.items()


def test_a_process_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert step._ask(setup()) == {"error": "exit status 1"}
    monkeypatch.undo()
    monkeypatch.setattr(step, "TIMEOUT", 0.01)
    assert step._ask(setup()) == {"error": "no answer within 0 s"}


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("", ""),
        ("Traceback\n  x\ntorch.OutOfMemoryError: CUDA out of memory.\nSee the advice.\n", "torch.OutOfMemoryError: "),
        ("Segmentation fault\n", "Segmentation fault"),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
    ],
)
def test_reason(stderr: str, reason: str) -> None:
    found = step._reason(stderr)
    assert found.startswith(reason)
    assert bool(found) is bool(reason)


def test_a_setup_survives_json() -> None:
    made = setup(clip=0.5, resident=0.25, timeline=True)
    assert Setup(**json.loads(json.dumps(asdict(made)))) == made


# Models


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt-1.3b", 1343), ("gpt-350m", 369), ("gpt-125m", 135), ("gpt-tiny", 0)]
)
def test_sizes(name: str, millions: int) -> None:
    model = models.build(name, 0, torch.bfloat16, torch.device("meta"))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count // 10**6 == millions
    if name == "gpt-1.3b":
        per_block = 12 * 2048**2 + 13 * 2048
        assert count == 24 * per_block + (2 * 32_000 + 2048 + 2) * 2048


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_causal(dtype: torch.dtype) -> None:
    model = models.build("gpt-tiny", 0, dtype, torch.device("cpu"))
    tokens = torch.randint(512, (1, 128))
    logits = []
    handle = model.head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[:, :64]))
    model(tokens, tokens)
    tokens = tokens.clone()
    tokens[:, 64:] = 0
    model(tokens, tokens)
    handle.remove()
    assert torch.equal(*logits)
    assert logits[0].dtype == dtype


def test_tiny_parameters_get_constant_gradients() -> None:
    model = models.build("gpt-tiny", 5, torch.bfloat16, torch.device("cpu"))
    plain = models.build("gpt-tiny", 0, torch.bfloat16, torch.device("cpu"))
    tokens = torch.randint(512, (2, 16))
    loss = model(tokens, tokens)
    assert loss == plain(tokens, tokens)
    loss.backward()
    assert model.tiny is not None
    gradients = [parameter.grad for parameter in model.tiny.parameters()]
    assert len(gradients) == 5
    for gradient in gradients:
        assert gradient is not None
        assert gradient.shape == (1000,)
        assert torch.equal(gradient, torch.full_like(gradient, 1e-3))
    # One buffer, not a tensor each.
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients if gradient is not None}) == 1


# The table of all GPU figures


def table_script() -> Any:
    path = Path(__file__).parent.parent / "benchmarks" / "gpu_table.py"
    spec = importlib.util.spec_from_file_location("gpu_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gpu_table(
    on_a_device: list[Setup], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = table_script()
    row = {"gelem_per_s": 5.0, "gb_per_s_to_device": 50.0, "gb_per_s_from_device": 50.0}
    rows = [{"mode": "gpu", "transfer": "staged", **row}, {"mode": "cpu", "transfer": "auto", **row}]
    monkeypatch.setattr(script, "lanes", lambda _: {"numel": 1 << 28, "dtype": "bfloat16", "rows": rows})
    monkeypatch.setattr(sys, "argv", ["gpu_table.py", "--json", str(tmp_path / "gpu.json")])
    assert script.main() == 0
    said = capsys.readouterr().out.splitlines()
    assert (
        "| 256 Mi bfloat16 elements, not attached | GPU lane, staged | 5.00 Gel/s (50.0 GB/s to the device, 50.0"
        in (said[2])
    )
    assert any(line.startswith("| gpt-1.3b, 16,384 tokens, clip 1 | outboard, 25% resident |") for line in said)
    assert any("10,000 tiny parameters | outboard |" in line for line in said)
    assert {line.count("|") for line in said if line.startswith("|")} == {8}
    assert any("A GPU; versions: outboard" in line for line in said)
    assert list(json.loads((tmp_path / "gpu.json").read_text())) == list(script.PARTS)
    assert len(on_a_device) == 19
    assert not {setup.side for setup in on_a_device} & set(PEERS[1:])


def test_gpu_table_in_part(
    on_a_device: list[Setup], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = table_script()
    arguments = ["--parts", "batch2", "--resident", "0", "--peers", "deepspeed", "--model", "gpt-125m"]
    monkeypatch.setattr(sys, "argv", ["gpu_table.py", *arguments])
    assert script.main() == 1  # A peer that was asked for failed.
    assert "OutOfMemoryError: too little" in capsys.readouterr().out
    assert [setup.name for setup in on_a_device] == ["forward_backward", "torch", "outboard", "deepspeed"]
    monkeypatch.setattr(sys, "argv", ["gpu_table.py", "--parts", "all"])
    with pytest.raises(SystemExit):
        script.main()
    assert "lanes, batch8, batch4, batch2, clip, tiny" in capsys.readouterr().err


# On a device


@pytest.mark.cuda
def test_on_cuda(tmp_path: Path) -> None:
    result = bench.training_step(
        "gpt-tiny", resident=[0, 0.25], peers=["torch"], steps=3, warmup=2, tiny=20, timeline=True
    )
    rows = result["sides"]
    assert {name: row["error"] for name, row in rows.items()} == dict.fromkeys(
        ["forward_backward", "torch", "outboard", "outboard_resident_0.25"]
    )
    for row in rows.values():
        assert row["step_ms"] > 0
        assert 0 < row["peak_device_gib"] < row["device_used_gib_after"]
        # Of the whole device: tests that others run on it at the same time count, too.
        assert os.environ.get("PYTEST_XDIST_WORKER") or row["device_gib_outside_torch"] > -0.1
        assert os.environ.get("PYTEST_XDIST_WORKER") or row["device_used_gib_after"] >= row["device_used_gib_before"]
        assert row["loss_first"] == rows["torch"]["loss_first"]
    assert rows["forward_backward"]["device_gib_over_forward_backward"] == 0
    assert rows["outboard"]["loss_last"] == pytest.approx(rows["torch"]["loss_last"], rel=1e-2)
    assert "gpu" in result["machine"]
    assert {"forward", "backward"} <= {span[0] for span in rows["outboard"]["timeline"]}
    plot.timeline(result, tmp_path / "timeline.png")
    plot.resident(result, tmp_path / "resident.png")
    assert not_blank(tmp_path / "timeline.png")
    assert not_blank(tmp_path / "resident.png")


@pytest.mark.cuda
def test_clipping_on_cuda() -> None:
    rows = bench.training_step("gpt-tiny", clip=0.1, peers=["torch"], steps=3, warmup=2)["sides"]
    assert rows["outboard"]["error"] is None
    assert rows["outboard"]["loss_last"] == pytest.approx(rows["torch"]["loss_last"], rel=1e-2)


@pytest.mark.cuda
def test_marks_on_cuda() -> None:
    device = torch.device("cuda")
    began = time.perf_counter()
    marks = worker._Marks(device)
    values = torch.ones(4096, 4096, device=device)
    marks.set()
    for _ in range(20):
        values = values @ values * 0.0
    marks.set()
    torch.cuda.synchronize()
    ended = time.perf_counter()
    first, second = marks.seconds()
    assert began - 1e-3 < first < second < ended + 1e-3
