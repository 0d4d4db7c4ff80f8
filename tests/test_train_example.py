"""The main job, `examples/train_gpt.py`, run as a user runs it, at a tiny size."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "examples" / "train_gpt.py"
STEPS = 240
SIZES = {"steps": STEPS, "batch": 2, "context": 32, "layers": 1, "width": 32}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()] + ["--threads=1", "--save-every=10"]
TINY = [*SMALL, "--device=cpu"]


def command(*arguments):
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


def run(*arguments, cwd):
    return subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Both sides, uninterrupted, with the default text and folder."""
    folder = tmp_path_factory.mktemp("compared")
    result = run(*TINY, cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "runs" / "latest", result


def test_both_sides_are_equal(compared):
    out, _ = compared
    summary = json.loads((out / "summary.json").read_text())
    assert summary["device"] == "cpu"
    assert summary["agrees"] is True
    assert summary["loss_tolerance"] is None
    assert summary["losses_equal"] is True
    assert summary["weights_equal"] is True
    assert summary["losses_compared"] == STEPS + 8
    assert summary["weights_compared"] == summary["parameters"] > 10_000
    assert all(summary["optimizer_ms"][side] > 0 for side in ("outboard", "torch"))
    assert summary["train_loss"]["outboard"] == summary["train_loss"]["torch"]
    assert summary["validation_loss"]["outboard"] == summary["validation_loss"]["torch"]
    # exp_avg and exp_avg_sq, and a few bytes per parameter for its step.
    for size in summary["state_bytes"].values():
        assert 8 * summary["parameters"] <= size <= 8 * summary["parameters"] + 1024


def test_text_is_real(compared):
    out, _ = compared
    text = json.loads((out / "summary.json").read_text())["text"]
    assert "standard library" in text["source"]
    assert text["bytes"] > 1_000_000
    assert text["bytes"] == text["train_bytes"] + text["validation_bytes"]


def test_loss_falls(compared):
    out, _ = compared
    losses = torch.load(out / "checkpoint.pt", weights_only=True)["history"]["losses"]
    assert len(losses) == STEPS
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_output_without_a_terminal_is_short_and_plain(compared):
    _, result = compared
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    assert "\r" not in result.stdout
    assert len(re.findall(rf"step \d+/{STEPS}, loss .* tokens/s .*optimizer", result.stdout)) == 2 * 8
    assert result.stdout.count("all equal") == 2
    assert "def " in result.stdout


def test_plot_is_a_png(compared):
    out, _ = compared
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_interrupted_and_resumed_is_as_uninterrupted(compared, tmp_path):
    whole, _ = compared
    checkpoint = tmp_path / "parts" / "checkpoint.pt"
    process = subprocess.Popen(
        command(*TINY, "--out", "parts", "--no-compare"),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert len(errors.splitlines()) == 1
    assert "--resume --out parts --no-compare" in errors
    interrupted = torch.load(checkpoint, weights_only=True)
    assert 10 <= interrupted["step"] < STEPS
    assert sorted(p.name for p in checkpoint.parent.iterdir()) == ["checkpoint.pt"]

    # The settings come from the checkpoint.
    result = run("--resume", "--out", "parts", "--no-compare", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    a = torch.load(whole / "checkpoint.pt", weights_only=True)
    b = torch.load(checkpoint, weights_only=True)
    assert a["step"] == b["step"] == STEPS
    assert a["history"]["losses"] == b["history"]["losses"]
    assert a["history"]["validation"] == b["history"]["validation"]
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)
    torch.testing.assert_close(a["optimizer"]["state"], b["optimizer"]["state"], rtol=0, atol=0)
    assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]
    assert a["scheduler"] == b["scheduler"]
    assert torch.equal(a["rng"], b["rng"])


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Call the program inside this process, which saves loading torch for each bad input."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.chdir(tmp_path)
    import train_gpt

    def refused(*arguments):
        assert train_gpt.main(list(map(str, arguments))) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        return line

    return refused


def test_resume_refuses_other_settings_and_other_text(compared, refused, tmp_path):
    out, _ = compared
    line = refused("--resume", "--out", out, "--batch", 3)
    assert "the checkpoint was made with --batch 2, not 3" in line
    (tmp_path / "other.txt").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 50)
    line = refused("--resume", "--out", out, "--text", "other.txt")
    assert "is not the text of the checkpoint" in line


def test_resume_refuses_a_file_that_is_no_checkpoint(refused, tmp_path):
    for content in (b"", b"no checkpoint"):
        (tmp_path / "checkpoint.pt").write_bytes(content)
        assert "cannot read the checkpoint" in refused("--resume", "--out", ".")
    torch.save({"model": {}}, tmp_path / "checkpoint.pt")
    assert "is no checkpoint of this program" in refused("--resume", "--out", ".")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "missing.txt"], "cannot read --text missing.txt: No such file"),
        (["--text", "short.txt"], "text too short: short.txt has 5 bytes"),
        (["--text", "."], "cannot read --text .: Is a directory"),
        (["--resume"], "no checkpoint at runs/latest/checkpoint.pt: start without --resume"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--save-every", "0"], "--save-every must be at least 1, got 0"),
        (["--width", "50"], "--width must be a multiple of 32, got 50"),
        (["--learning-rate", "nan"], "--learning-rate must be above 0, got nan"),
        (["--out", "short.txt"], "cannot write to --out short.txt"),
        (["--offload-activations", "--out", "."], "--offload-activations: this needs a GPU"),
    ],
)
def test_bad_input(refused, tmp_path, arguments, message):
    (tmp_path / "short.txt").write_bytes(b"short")
    assert message in refused(*TINY, *arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["short.txt"]


def test_a_gpu_that_is_not_there(refused, monkeypatch, compared):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refused(*SMALL, "--device", "cuda", "--out", "new")
    assert line.startswith("train_gpt.py: --device cuda: this needs a GPU")
    assert "use --device cpu" in line
    # Nor is a run that was begun on the CPU taken elsewhere.
    out, _ = compared
    line = refused("--resume", "--out", out, "--device", "cuda")
    assert "the checkpoint was made with --device cpu, not cuda" in line


def test_attached_and_resumed_is_as_on_the_cpu(monkeypatch):
    """What a GPU's run does beside placing the model there, with a device made of host memory."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from _gpt.data import load_text
    from _gpt.settings import Settings
    from _gpt.training import Run

    from outboard._lanes import LaneOptions

    settings = Settings(**{**SIZES, "steps": 12, "width": 160, "layers": 2})
    text = load_text(None, settings.context)
    plain = Run("outboard", settings, text)
    while not plain.finished:
        plain.train_step()

    def attached():
        run = Run("outboard", settings, text, offload_activations=True)
        run.optimizer.attach(run.model)
        return run

    monkeypatch.setattr(LaneOptions, "simulate", 7)
    first = attached()
    while first.step < 5:
        first.train_step()
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    second = attached()
    second.load_state_dict(torch.load(saved, weights_only=True))
    while not second.finished:
        second.train_step()
    assert second.optimizer.stats()["eager_updates"] > 0
    assert second.activations.stats()["bytes_out"] > 0
    assert second.history.losses == plain.history.losses
    assert second.history.validation == plain.history.validation
    a, b = second.state_dict(), plain.state_dict()
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)
    torch.testing.assert_close(a["optimizer"]["state"], b["optimizer"]["state"], rtol=0, atol=0)


@pytest.mark.cuda
@pytest.mark.timeout(600)
def test_on_a_gpu(tmp_path):
    result = run(*SMALL, "--out", "whole", cwd=tmp_path)
    assert result.returncode == 0, result.stderr + result.stdout
    assert result.stderr == ""
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["device"] == "cuda"
    assert summary["agrees"] is True
    assert 0 <= summary["loss_distance"] <= summary["loss_tolerance"]
    assert summary["state_home"]["outboard"].startswith("host RAM")
    assert summary["state_home"]["torch"].startswith("the GPU")
    assert summary["machine"]["gpu"]
    assert "losses, how far apart" in result.stdout
    assert "bit for bit" not in result.stdout

    # Stopped at a checkpoint and resumed: outboard's side has the same bits.
    process = subprocess.Popen(
        command(*SMALL, "--out", "parts", "--no-compare"), cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    checkpoint = tmp_path / "parts" / "checkpoint.pt"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    assert torch.load(checkpoint, weights_only=True)["step"] < STEPS
    result = run("--resume", "--out", "parts", "--no-compare", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    a = torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)
    b = torch.load(checkpoint, weights_only=True)
    assert a["history"]["losses"] == b["history"]["losses"]
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)
    torch.testing.assert_close(a["optimizer"]["state"], b["optimizer"]["state"], rtol=0, atol=0)


def test_bad_input_is_exit_code_2(tmp_path):
    result = run("--text", "missing.txt", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == ("train_gpt.py: cannot read --text missing.txt: No such file or directory\n")


def test_help_shows_examples(tmp_path):
    result = run("--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "examples:" in result.stdout
    assert "--resume" in result.stdout
