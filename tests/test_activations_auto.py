"""How `outboard.offload_activations` chooses blocks by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import outboard
from lanes import LanesDevice
from outboard._activations._policy import MEASURED, WARMUP, Auto, predict
from test_activations import Stack, assert_empty, assert_same, gradients

MIB = 1 << 20


class Machine:
    """A device whose steps take what a test says, and which is some steps behind its host."""

    def __init__(self, stall: Any, *, behind: int = 0) -> None:
        self.stall = stall
        self.behind = behind
        self.now = 0.0
        self.marked = 0

    def mark(self) -> tuple[float, int]:
        self.marked += 1
        return self.now, self.marked

    def between(self, begin: tuple[float, int], end: tuple[float, int]) -> float | None:
        return None if end[1] > self.marked - self.behind else end[0] - begin[0]

    def run(self, auto: Auto, steps: int, forward: float = 90.0, step: float = 260.0) -> list[int]:
        """Run steps; return how many blocks left in each."""
        found = []
        for _ in range(steps):
            auto.begin()
            found.append(len(auto.sends))
            self.now += forward
            auto.end()
            self.now += step - forward + self.stall(len(auto.sends))
        return found


def make(machine: Machine, count: int = 24, nbytes: int = 1024 * MIB, **options: Any) -> Auto:
    """Return a choice between blocks of a GiB, over a link of 50 GiB/s."""
    names = [f"blocks.{index}" for index in range(count)]
    settings: dict[str, Any] = {"max_slowdown": 0.05, "target_bytes": None} | options
    auto = Auto(names, meter=machine, rates=lambda: (50 * MIB, 50 * MIB), **settings)
    auto.bytes_of = dict.fromkeys(names, nbytes)
    return auto


def test_predictions() -> None:
    numbers = {"blocks": 24, "nbytes": 1024.0 * MIB, "forward": 90.0, "backward": 170.0}
    fast = {"out_rate": 50.0 * MIB, "in_rate": 50.0 * MIB}
    # 20 ms for a GiB, and 3.75 for a block: four fit beside forward, and what does not is waited for.
    assert [predict(count, **numbers, **fast) for count in (0, 1, 4)] == [0.0, 0.0, 0.0]
    assert predict(12, **numbers, **fast) == pytest.approx(11 * (20.48 - 7.5) + 11 * (20.48 - 170 / 12), rel=0.1)
    assert predict(24, **numbers, **fast) > 600
    stalls = [predict(count, **numbers, **fast) for count in range(25)]
    assert stalls == sorted(stalls)


def test_the_prediction_is_checked_and_corrected() -> None:
    # As predicted: one more is tried, and is too slow.
    machine = Machine(lambda count: 0.0 if count <= 4 else 20.0 * (count - 4))
    auto = make(machine)
    counts = machine.run(auto, 40)
    assert counts[: WARMUP + MEASURED + 1] == [0] * (WARMUP + MEASURED + 1)
    assert auto.is_settled
    assert counts[-1] == len(auto.plan()["blocks"]) == 4
    assert max(counts) <= 6
    plan = auto.plan()
    assert (plan["step_ms"], plan["forward_ms"], plan["measured_ms"]) == (260.0, 90.0, 0.0)
    assert plan["why"] == "4 blocks took 0.0 ms, and 13.0 may be"
    assert plan["bytes_away"] == 4 * 1024 * MIB
    # Slower than predicted: fewer.
    machine = Machine(lambda count: 10.0 * count)
    auto = make(machine)
    assert machine.run(auto, 60)[-1] == 1
    # Nothing fits.
    machine = Machine(lambda count: 50.0 * count)
    auto = make(machine)
    assert machine.run(auto, 60)[-1] == 0
    assert auto.is_settled
    # Everything does.
    machine = Machine(lambda _: 0.0)
    auto = make(machine, nbytes=MIB)
    assert machine.run(auto, 60)[-1] == 24


def test_a_device_that_is_behind_is_not_waited_for() -> None:
    machine = Machine(lambda count: 0.0 if count <= 4 else 20.0 * (count - 4), behind=9)
    auto = make(machine)
    assert machine.run(auto, 80)[-1] == 4
    assert auto.is_settled


def test_a_target_of_bytes() -> None:
    for target, expected in ((24 * 1024 * MIB, 0), (20 * 1024 * MIB, 5), (1024 * MIB, 24), (1, 24)):
        machine = Machine(lambda count: 20.0 * count)
        auto = make(machine, target_bytes=target)
        assert machine.run(auto, 12)[-1] == expected, target
        assert auto.is_settled
        assert str(target) in auto.plan()["why"]


def test_nothing_to_choose_from() -> None:
    machine = Machine(lambda _: 0.0)
    auto = make(machine, count=0)
    assert auto.is_settled
    assert machine.run(auto, 3) == [0, 0, 0]
    auto = make(machine, nbytes=0)
    machine.run(auto, 12)
    assert auto.plan()["why"] == "the blocks save nothing that could leave"


def test_gradients_have_the_same_bits_whatever_is_chosen(lanes_device: LanesDevice) -> None:
    torch.manual_seed(0)
    plain = Stack(6).to(lanes_device.device)
    for options in ({"max_slowdown": 100.0}, {"target_bytes": 1}, {"max_slowdown": 0.0}):
        model = copy.deepcopy(plain)
        settings: dict[str, Any] = {"keep_last": 0, "min_bytes": 0} | options
        handle = outboard.offload_activations(model, fraction="auto", **settings)
        assert not handle.plan()["is_settled"]
        for step in range(40):
            x = torch.randn(4, 8, 32, device=lanes_device.device)
            assert_same(gradients(plain, x, seed=step), gradients(model, x, seed=step))
            if not lanes_device.is_simulated:
                torch.cuda.synchronize()
        plan = handle.plan()
        assert plan["is_settled"], plan
        if "target_bytes" in options:
            assert len(plan["blocks"]) == 6
            assert min(handle.stats()["blocks"].values()) > 0
        assert plan["bytes_of_all"] > 0
        handle.remove()
        assert_empty(handle)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_slowdown": "little"}, TypeError),
        ({"max_slowdown": -0.1}, ValueError),
        ({"max_slowdown": float("nan")}, ValueError),
        ({"target_bytes": 0}, ValueError),
        ({"fraction": "some"}, TypeError),
    ],
    ids=str,
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        outboard.offload_activations(Stack(), **{"fraction": "auto", **options})


def test_in_host_memory_there_is_nothing_to_choose() -> None:
    handle = outboard.offload_activations(Stack(), fraction="auto")
    assert handle.plan()["why"] == "there are no blocks to choose from"
    assert outboard.offload_activations(Stack(), fraction=0.5).plan()["why"] == "2 of 4 blocks, as asked"
