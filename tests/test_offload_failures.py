"""State on the host when a step fails at any place, and when others ask in the middle of one."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import outboard
from lanes import LanesDevice
from offloading import Failing, assert_same_state, assert_same_weights, hazards, make_model, train
from outboard._offload import _carrier, _residence
from outboard._offload._hollow import is_hollow


@pytest.fixture(autouse=True)
def no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take milliseconds, and bits are torch's."""
    monkeypatch.setattr("outboard.muon._newton_schulz._is_compiled", False)


# ---- Who asks within a step -----------------------------------------------------------------------------------------


def test_who_asks_within_a_step_is_answered_or_refused_and_it_goes_on(lanes_device: LanesDevice) -> None:
    models = [make_model(lanes_device), make_model(lanes_device)]
    optimizers = [torch.optim.LBFGS(model.parameters(), lr=0.1) for model in models]
    handle = outboard.offload_state(optimizers[1], batches=2)

    def log_in_a_thread() -> None:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend((handle.stats(), handle.places(), handle.staying())))
        thread.start()
        thread.join()
        assert found[0]["batches"] == 2

    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(lanes_device.device)
    for model, optimizer in zip(models, optimizers, strict=True):

        def closure(model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            if optimizer is optimizers[1]:
                for ask in (optimizer.state_dict, handle.turn_off_cpu_offload, handle.synchronize):
                    with pytest.raises(RuntimeError, match=r"within step\(\)"):
                        ask()
                log_in_a_thread()
                assert handle.stats()["batches"] == 2
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    assert_same_weights(*models)


@pytest.mark.parametrize("batches", [1, 2])
def test_other_hooks_and_closures_may_ask(lanes_device: LanesDevice, batches: int) -> None:
    models = [make_model(lanes_device), make_model(lanes_device)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    saved: list[Any] = [[], []]
    for optimizer, theirs in zip(optimizers, saved, strict=True):
        optimizer.register_step_post_hook(
            lambda optimizer, args, kwargs, theirs=theirs: theirs.append(copy.deepcopy(optimizer.state_dict()["state"]))
        )
    handle = outboard.offload_state(optimizers[1], batches=batches)
    for optimizer, theirs in zip(optimizers, saved, strict=True):
        optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs, theirs=theirs: theirs.append(copy.deepcopy(optimizer.state_dict()["state"]))
        )
    optimizers[1].register_step_pre_hook(lambda optimizer, args, kwargs: handle.stats() and None)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(lanes_device.device)
    for model, optimizer, theirs in zip(models, optimizers, saved, strict=True):

        def closure(
            model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer, theirs: Any = theirs
        ) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            theirs.append(copy.deepcopy(optimizer.state_dict()["state"]))
            return loss

        for _ in range(3):
            optimizer.step(closure)
    assert_same_weights(*models)
    assert handle.stats()["steps"] == 3
    for one, other in zip(*saved, strict=True):
        assert_same_state({"state": one}, {"state": other})


# ---- Failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(6))
def test_an_exception_leaves_the_state_of_whole_batches(lanes_device: LanesDevice, at: int) -> None:
    model = make_model(lanes_device)
    optimizer = Failing(model.parameters())
    handle = outboard.offload_state(optimizer, batches=3)
    train(model, optimizer, 1)
    batches = [
        [
            index
            for index, parameter in enumerate(model.parameters())
            if any(parameter is one for one in batch.parameters)
        ]
        for batch in handle._residence.plan(optimizer).batches  # type: ignore[union-attr]
    ]
    optimizer.at = at
    with pytest.raises(RuntimeError, match="the math has failed"):
        train(model, optimizer, 1)
    assert set(handle.places().values()) <= {"host", "d2h"}
    handle.synchronize()
    assert set(handle.places().values()) == {"host"}
    sums = [optimizer.state[parameter]["sum"].flatten()[0].item() for parameter in model.parameters()]
    # A batch is updated if all of it was before the failure; what was on the device is dropped.
    done = {index for batch in batches if max(batch) < at for index in batch}
    assert sums == [2.0 if index in done else 1.0 for index in range(6)]
    optimizer.at = None
    train(model, optimizer, 1)
    assert [optimizer.state[p]["sum"].flatten()[0].item() for p in model.parameters()] == [s + 1 for s in sums]


class Boom(BaseException):
    """No exception that anybody catches, as KeyboardInterrupt."""


@contextmanager
def failing_at(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, call: int) -> Iterator[list[int]]:
    """Let a method's calls be counted, and one of them fail before it does anything; -1: none."""
    real: Callable[..., Any] = getattr(kind, name)
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise Boom(name)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(kind, name, counted)
        yield calls


PLACES = [
    *((_carrier.Carrier, name) for name in ("arena", "bring", "arrive", "claim", "send", "bring_apart", "send_apart")),
    *((_carrier.Carrier, name) for name in ("settle", "discard", "end_step")),
    (_residence.Residence, "reserve"),
    (torch.optim.AdamW, "_init_group"),
]


@pytest.mark.parametrize("options", [{}, {"packed": False}, {"kind": "asking"}], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
@pytest.mark.parametrize("before", [0, 1])
def test_a_step_may_fail_anywhere(
    lanes_device: LanesDevice,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    place: tuple[type, str],
    before: int,
) -> None:
    asking = "kind" in options

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, outboard.StateOffload]:
        model = make_model(lanes_device)
        optimizer = (Asking if asking else torch.optim.AdamW)(model.parameters(), lr=0.1)
        return model, optimizer, outboard.offload_state(optimizer, batches=3, packed=options.get("packed", True))

    whole, steady, _ = make()
    train(whole, steady, before)
    with failing_at(monkeypatch, *place, -1) as calls:
        train(whole, steady, 1, seed=2)
    done = steady.state_dict()
    for call in range(1, calls[0] + 1):
        model, optimizer, handle = make()
        train(model, optimizer, before)
        old = optimizer.state_dict()
        with pytest.raises(Boom), failing_at(monkeypatch, *place, call):
            train(model, optimizer, 1, seed=2)
        assert set(handle.places().values()) <= {"host", "d2h"}
        # Each parameter's state is that of before the step or that of after it.
        left = optimizer.state_dict()
        for index, state in left["state"].items():
            for key, value in state.items():
                if key != "step":
                    others = [one["state"][index][key] for one in (old, done) if key in one["state"].get(index, {})]
                    assert any(torch.equal(value, other) for other in others), (call, index, key)
        # It goes on as if it had been loaded.
        twin = copy.deepcopy(model)
        plain = type(optimizer)(twin.parameters(), lr=0.1)
        plain.load_state_dict(copy.deepcopy(left))
        train(model, optimizer, 2, seed=3)
        train(twin, plain, 2, seed=3)
        assert_same_weights(twin, model)
        assert_same_state(plain.state_dict(), optimizer.state_dict())
        assert hazards(handle) == []


class Asking(torch.optim.AdamW):
    """Asks for the last parameter's state first, out of turn."""

    def _init_group(self, group: Any, *args: Any) -> Any:
        last = self.param_groups[-1]["params"]
        if last and "exp_avg" in self.state.get(last[-1], {}):
            self.state[last[-1]]["exp_avg"].mul_(1)
        return super()._init_group(group, *args)


@pytest.mark.parametrize("place", ["arena", "bring", "arrive", "send", "end_step"])
@pytest.mark.parametrize("before", [0, 1])
def test_a_step_of_muon_may_fail_anywhere(
    lanes_device: LanesDevice, monkeypatch: pytest.MonkeyPatch, place: str, before: int
) -> None:
    def make() -> tuple[list[torch.Tensor], outboard.Muon]:
        torch.manual_seed(0)
        matrices = [torch.randn(16, 32).to(lanes_device.device).requires_grad_() for _ in range(8)]
        vectors = [torch.randn(32).to(lanes_device.device).requires_grad_() for _ in range(3)]
        groups = [{"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}]
        return matrices + vectors, outboard.Muon(groups, chunk_size=2)

    def train(parameters: list[torch.Tensor], optimizer: outboard.Muon, steps: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
            optimizer.step()

    whole, steady = make()
    steady.turn_on_cpu_offload(checkpoint=True)
    train(whole, steady, before)
    with failing_at(monkeypatch, _carrier.Carrier, place, -1) as calls:
        train(whole, steady, 1, seed=2)
    assert calls[0] > 0
    done = steady.state_dict()
    for call in range(1, calls[0] + 1):
        parameters, optimizer = make()
        optimizer.turn_on_cpu_offload(checkpoint=True)
        train(parameters, optimizer, before)
        old = optimizer.state_dict()
        with pytest.raises(Boom), failing_at(monkeypatch, _carrier.Carrier, place, call):
            train(parameters, optimizer, 1, seed=2)
        left = optimizer.state_dict()
        for index, state in left["state"].items():
            for key, value in state.items():
                if key != "step":
                    before_it = old["state"].get(index, {}).get(key, torch.zeros_like(value))
                    assert any(torch.equal(value, other) for other in (before_it, done["state"][index][key]))
        twins = [parameter.detach().clone().requires_grad_() for parameter in parameters]
        plain = make()[1]
        for group, at in zip(plain.param_groups, (0, 8), strict=True):
            group["params"] = twins[at : at + len(group["params"])]
        plain.load_state_dict(left)
        train(parameters, optimizer, 2, seed=3)
        assert hazards(optimizer) == []
        optimizer.turn_off_cpu_offload()
        train(twins, plain, 2, seed=3)
        assert all(map(torch.equal, parameters, twins))
        assert_same_state(plain.state_dict(), optimizer.state_dict())


def test_there_may_be_no_memory_to_turn_it_on_or_off(
    lanes_device: LanesDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outboard._offload import _hollow

    parameters = [torch.randn(16, 32, device=lanes_device.device).requires_grad_() for _ in range(4)]
    optimizer = outboard.Muon([{"params": parameters, "use_muon": True}])
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    states = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
    values = [state.clone() for state in states]
    with pytest.raises(Boom), failing_at(monkeypatch, _hollow._Tenant, "leave", 3):
        optimizer.turn_on_cpu_offload()
    assert not optimizer.cpu_offload
    assert not any(map(is_hollow, states))
    assert all(map(torch.equal, states, values))
    optimizer.turn_on_cpu_offload()
    with pytest.raises(Boom), failing_at(monkeypatch, _hollow._Tenant, "enter", 3):
        optimizer.turn_off_cpu_offload()
    assert optimizer.cpu_offload
    assert all(map(is_hollow, states))
    optimizer.turn_off_cpu_offload()
    assert all(map(torch.equal, states, values))


def test_memory_that_copies_still_write_to_is_kept(lanes_device: LanesDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(lanes_device)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = outboard.offload_state(optimizer, batches=2, packed=False)
    train(model, optimizer, 1)
    with pytest.raises(Boom), failing_at(monkeypatch, _carrier.Carrier, "arrive", 1):
        train(model, optimizer, 1)
    assert handle._residence is not None
    (carrier,) = handle._residence.carriers.all()
    assert sum(memory.numel() for memory in carrier._held.values()) > 0
    assert set(handle.places().values()) == {"host"}
    assert not carrier._held


# ---- Ends -----------------------------------------------------------------------------------------------------------


def test_a_handle_keeps_no_memory_of_an_optimizer_that_is_gone(lanes_device: LanesDevice) -> None:
    model = make_model(lanes_device)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = outboard.offload_state(optimizer, batches=2)
    train(model, optimizer, 2)
    kept = optimizer.state[model[0].weight]["exp_avg"]
    values = kept.clone()
    train(model, optimizer, 1)
    gc.disable()
    try:
        del optimizer
        assert handle._residence is None
        assert handle.host_buffers() == []
        assert not torch.equal(kept, values)
        with pytest.raises(RuntimeError, match="is gone"):
            handle.turn_on_cpu_offload()
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["offload_state", "muon"])
def test_deleted_optimizers_leave_nothing_behind(lanes_device: LanesDevice, kind: str) -> None:
    from outboard import _pending

    def once() -> None:
        model = make_model(lanes_device)
        optimizer: torch.optim.Optimizer
        if kind == "muon":
            optimizer = muon = outboard.Muon([{"params": model.parameters(), "use_muon": False}])
            muon.turn_on_cpu_offload()
        else:
            optimizer = torch.optim.AdamW(model.parameters())
            outboard.offload_state(optimizer, batches=2)
        train(model, optimizer, 2)

    once()
    assert [key for key, waiter in _pending._waiters.items() if waiter() is None] == []


def test_state_that_is_replaced_after_each_step_is_let_go(lanes_device: LanesDevice) -> None:
    weight = torch.randn(16, 32, device=lanes_device.device).requires_grad_()
    optimizer = outboard.Muon([{"params": [weight], "use_muon": True}])
    optimizer.turn_on_cpu_offload()
    for _ in range(5):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    assert optimizer._hollow is not None
    (carrier,) = optimizer._hollow.carriers.all()
    assert len(carrier._arriving) <= 1
    assert len(optimizer.host_buffers()) <= 1
