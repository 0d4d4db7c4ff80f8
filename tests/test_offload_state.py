"""`outboard.offload_state`: any torch optimizer with its state on the host, to the bits of the optimizer by itself.

Over 500 lines: independent cases, read one at a time.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import outboard
from lanes import LanesDevice
from offloading import Counting, Failing, assert_same_state, assert_same_weights, groups_of, hazards, make_model, train
from outboard._offload._batches import balance

CLASSES = [
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    # Not that one: it is the base. Gradients are dense. Muon takes matrices alone, and has a test of its own.
    and name not in ("Optimizer", "SparseAdam", "Muon", "LBFGS")
]

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{"amsgrad": True}, {"lr": torch.tensor(1e-3), "foreach": False}, {"fused": True}],
    "AdamW": [{}, {"foreach": True, "amsgrad": True}, {"fused": True}, {"maximize": True}],
    "SGD": [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "fused": True}, {}],
    "RMSprop": [{"momentum": 0.5, "centered": True}],
}

OPTIONS: list[dict[str, Any]] = [
    {"batches": 3},
    {"batch_bytes": 20_000},
    {},
    {"batches": 2, "packed": False},
    {"min_numel": 100},
]


# ---- Bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_every_optimizer_of_torch_gives_its_own_bits(
    lanes_device: LanesDevice, name: str, options: dict[str, Any]
) -> None:
    for settings in SETTINGS.get(name, [{}]):
        plain, offloaded = make_model(lanes_device), make_model(lanes_device)
        kind = getattr(torch.optim, name)
        theirs = kind(groups_of(plain), **copy.deepcopy(settings))
        ours = kind(groups_of(offloaded), **copy.deepcopy(settings))
        handle = outboard.offload_state(ours, **options)
        for model, optimizer in ((plain, theirs), (offloaded, ours)):
            # The third parameter has no gradient in the third step: its batch may be skipped altogether.
            layer = model[2]
            train(model, optimizer, 4, drop=lambda index, layer=layer: [layer.weight] if index == 2 else [])
        assert_same_weights(plain, offloaded)
        assert_same_state(theirs.state_dict(), ours.state_dict())
        assert set(handle.places().values()) <= {"host"}
        if lanes_device.is_simulated:
            assert hazards(handle) == []


def test_muon_of_torch(lanes_device: LanesDevice) -> None:
    plain, offloaded = make_model(lanes_device), make_model(lanes_device)
    theirs, ours = (
        torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.1) for model in (plain, offloaded)
    )
    outboard.offload_state(ours, batches=2)
    train(plain, theirs, 3)
    train(offloaded, ours, 3)
    assert_same_weights(plain, offloaded)


def test_lbfgs_keeps_what_it_can_on_the_host(lanes_device: LanesDevice) -> None:
    models = [make_model(lanes_device), make_model(lanes_device)]
    optimizers = [torch.optim.LBFGS(model.parameters(), max_iter=3) for model in models]
    handle = outboard.offload_state(optimizers[1], batches=2)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(lanes_device.device)
    for model, optimizer in zip(models, optimizers, strict=True):

        def closure(model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    assert_same_weights(*models)
    assert "d of parameter 0" in handle.places()


def test_four_matrices_over_three_steps_and_toggling_over_six(lanes_device: LanesDevice) -> None:
    def make() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(64, 128)] * 4 + [(128,)] * 3
        return [torch.randn(shape, generator=generator).to(lanes_device.device).requires_grad_() for shape in shapes]

    one, other = make(), make()
    theirs, ours = torch.optim.AdamW(one, lr=0.1), torch.optim.AdamW(other, lr=0.1)
    handle = outboard.offload_state(ours, batches=3)
    for step in range(6):
        (handle.turn_on_cpu_offload if step // 2 % 2 == 0 else handle.turn_off_cpu_offload)()
        for parameters, optimizer in ((one, theirs), (other, ours)):
            generator = torch.Generator().manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(lanes_device.device)
            optimizer.step()
        for left, right in zip(one, other, strict=True):
            assert torch.equal(left, right)
        assert handle.cpu_offload == (step // 2 % 2 == 0)
        assert bool(handle.host_buffers()) == handle.cpu_offload
    assert_same_state(theirs.state_dict(), ours.state_dict())


def test_strides_and_dtypes_are_kept(lanes_device: LanesDevice) -> None:
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(8, 16, 3).to(lanes_device.device, torch.bfloat16, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(convolution.parameters())
    handle = outboard.offload_state(optimizer)
    x = torch.randn(2, 8, 9, 9, device=lanes_device.device, dtype=torch.bfloat16)
    for _ in range(2):
        convolution(x).square().mean().backward()
        optimizer.step()
    state = optimizer.state[convolution.weight]
    assert state["exp_avg"].stride() == convolution.weight.stride()
    assert state["exp_avg"].dtype == torch.bfloat16
    assert state["exp_avg"].device.type == "cpu"
    handle.turn_off_cpu_offload()
    assert optimizer.state[convolution.weight]["exp_avg"].stride() == convolution.weight.stride()
    assert optimizer.state[convolution.weight]["exp_avg"].device == convolution.weight.device


# ---- One step, however many batches ---------------------------------------------------------------------------------


def test_what_is_counted_per_step_is_counted_once(lanes_device: LanesDevice) -> None:
    plain, offloaded = make_model(lanes_device), make_model(lanes_device)
    theirs, ours = Counting(plain.parameters()), Counting(offloaded.parameters())
    handle = outboard.offload_state(ours, batches=4)
    calls = []
    ours.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append(("before", optimizer is ours)))
    ours.register_step_post_hook(lambda optimizer, args, kwargs: calls.append(("after", optimizer is ours)))
    train(plain, theirs, 3)
    train(offloaded, ours, 3)
    assert handle.stats()["batches"] == 4
    assert_same_weights(plain, offloaded)
    assert calls == [("before", True), ("after", True)] * 3
    assert ours.total == theirs.total == 3
    for left, right in zip(theirs.param_groups, ours.param_groups, strict=True):
        assert {**left, "params": None} == {**right, "params": None}
        assert right["log"] == [1, 2, 3]
    assert [len(group["params"]) for group in ours.param_groups] == [6]
    assert "dtype torch.int64" in handle.staying()["integers of parameter 0"]


@pytest.mark.parametrize("first", ["scheduler", "offload"])
def test_schedulers_work_in_either_order(lanes_device: LanesDevice, first: str) -> None:
    rates = []
    models = [make_model(lanes_device), make_model(lanes_device)]
    for index, model in enumerate(models):
        optimizer = torch.optim.AdamW(model.parameters())
        if index == 1 and first == "offload":
            outboard.offload_state(optimizer, batches=2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        if index == 1 and first == "scheduler":
            outboard.offload_state(optimizer, batches=2)
        for step in range(4):
            train(model, optimizer, 1, seed=step)
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    assert_same_weights(*models)
    assert rates[:4] == rates[4:]


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_skips_and_unscales(lanes_device: LanesDevice, fused: bool) -> None:
    models = [make_model(lanes_device), make_model(lanes_device)]
    scales = []
    for index, model in enumerate(models):
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        if index:
            outboard.offload_state(optimizer, batches=3)
        scaler = torch.amp.GradScaler(lanes_device.device.type, init_scale=128.0)
        for step in range(4):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(lanes_device.device)
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            if step == 2:
                model[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    assert_same_weights(*models)
    assert scales[:4] == scales[4:] == [128.0, 128.0, 64.0, 64.0]


def test_a_closure_runs_once(lanes_device: LanesDevice) -> None:
    model = make_model(lanes_device)
    optimizer = torch.optim.AdamW(model.parameters())
    outboard.offload_state(optimizer, batches=3)
    x = torch.randn(16, 64).to(lanes_device.device)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    assert isinstance(optimizer.step(closure), torch.Tensor)
    assert calls == [True]


class Decaying(torch.optim.AdamW):
    """Uses the step of its base, and then state once more."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(self.state[parameter]["exp_avg"], alpha=1e-3)
                    self.state[parameter]["exp_avg"].mul_(0.5)


def test_a_subclass_that_calls_the_step_of_its_base(lanes_device: LanesDevice) -> None:
    models = [make_model(lanes_device), make_model(lanes_device)]
    optimizers = [Decaying(groups_of(model), foreach=True) for model in models]
    handle = outboard.offload_state(optimizers[1], batches=3)
    calls = []
    optimizers[1].register_step_post_hook(lambda optimizer, args, kwargs: calls.append(type(optimizer)))
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 3)
    assert_same_weights(*models)
    assert_same_state(optimizers[0].state_dict(), optimizers[1].state_dict())
    assert handle.stats()["steps"] == 3


def test_nothing_grows_over_fifty_steps(lanes_device: LanesDevice) -> None:
    model = make_model(lanes_device)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = outboard.offload_state(optimizer, batches=3)
    train(model, optimizer, 3)
    assert handle._residence is not None
    carriers = handle._residence.carriers.all()
    before = [(len(carrier._arriving), carrier.shuttle.stats()["host_bytes"]) for carrier in carriers]
    train(model, optimizer, 47)
    assert [(len(carrier._arriving), carrier.shuttle.stats()["host_bytes"]) for carrier in carriers] == before
    handle.synchronize()
    assert [carrier.shuttle.stats()["under_way"] for carrier in carriers] == [0] * len(carriers)


class TwoPasses(Counting):
    """Looks at all state before it changes any parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        total = 0.0
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter].setdefault("sum", torch.zeros_like(parameter))
                total += float(state.add_(parameter.grad).abs().sum())
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(self.state[parameter]["sum"] / total)


class Collecting(Counting):
    """Looks up state after it has been through all groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in [parameter for group in self.param_groups for parameter in group["params"]]:
            state = self.state[parameter].setdefault("sum", torch.zeros_like(parameter))
            parameter.data.sub_(state.add_(parameter.grad))


class Peeking(Counting):
    """Looks at the state of the parameter behind, and of the one before, which may be in other batches."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [parameter for group in self._groups_at_rest() for parameter in group["params"]]
        number = {id(parameter): index for index, parameter in enumerate(every)}
        for group in self.param_groups:
            for parameter in group["params"]:
                index = number[id(parameter)]
                state = self.state[parameter].setdefault("sum", torch.zeros_like(parameter))
                state.add_(parameter.grad)
                for other in (every[index - 1], every[(index + 1) % len(every)]):
                    beside = self.state[other].setdefault("sum", torch.zeros_like(other))
                    beside.mul_(0.9)
                    parameter.data.sub_(beside.mean())

    def _groups_at_rest(self) -> list[dict[str, Any]]:
        return [self.param_groups[index] for index in range(len(self.param_groups))]


class Shifting(Counting):
    """Exchanges tensors of its state, and writes to a dict that it has given."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state = self.state[parameter] = {}
                    state["now"], state["before"] = torch.zeros_like(parameter), torch.ones_like(parameter)
                state["now"], state["before"] = state["before"], state["now"]
                state["now"].add_(parameter.grad)
                parameter.data.sub_(state["now"] + 2 * state["before"], alpha=0.01)


class Keeping(Counting):
    """Keeps state tensors of all groups, and uses them at the end."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        kept = []
        for group in self.param_groups:
            for parameter in group["params"]:
                kept.append((parameter, self.state[parameter].setdefault("sum", torch.zeros_like(parameter))))
        for parameter, total in kept:
            parameter.data.sub_(total.add_(parameter.grad))


def test_state_that_is_kept_past_its_batch_is_refused_and_works_in_one(lanes_device: LanesDevice) -> None:
    models = [make_model(lanes_device), make_model(lanes_device), make_model(lanes_device)]
    optimizers = [Keeping(model.parameters()) for model in models]
    outboard.offload_state(optimizers[1], batches=1)
    outboard.offload_state(optimizers[2], batches=3)
    for model, optimizer in zip(models[:2], optimizers[:2], strict=True):
        train(model, optimizer, 3)
    assert_same_weights(*models[:2])
    train(models[2], optimizers[2], 1)
    with pytest.raises(RuntimeError, match="on the host"):
        train(models[2], optimizers[2], 1)


@pytest.mark.parametrize("kind", [TwoPasses, Collecting, Peeking, Shifting])
def test_optimizers_that_do_not_go_group_by_group(lanes_device: LanesDevice, kind: type[Counting]) -> None:
    plain, offloaded = make_model(lanes_device), make_model(lanes_device)
    theirs, ours = kind(plain.parameters()), kind(offloaded.parameters())
    handle = outboard.offload_state(ours, batches=3)
    train(plain, theirs, 3)
    train(offloaded, ours, 3)
    assert_same_weights(plain, offloaded)
    assert len(handle.places()) == (12 if kind is Shifting else 6)


class Coupled(Counting):
    """Adds something up over a group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["norm"] = 0.0
            for parameter in group["params"]:
                self.state[parameter].setdefault("sum", torch.zeros_like(parameter)).add_(1)
                group["norm"] += float(parameter.grad.norm())


def test_sums_over_a_group_are_refused_in_parts_and_work_in_one(lanes_device: LanesDevice) -> None:
    model = make_model(lanes_device)
    optimizer = Coupled(model.parameters())
    handle = outboard.offload_state(optimizer, batches=2)
    with pytest.raises(RuntimeError, match=r"Coupled computes 'norm'.*batches=1"):
        train(model, optimizer, 1)
    handle.remove()
    outboard.offload_state(optimizer, batches=1)
    train(model, optimizer, 2)
    assert optimizer.param_groups[0]["norm"] > 0


# ---- State ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "third-party"])
def test_state_that_is_made_batch_by_batch_lies_in_few_buffers(lanes_device: LanesDevice, name: str) -> None:
    parameters = [torch.randn(32, 48, device=lanes_device.device).requires_grad_() for _ in range(24)]
    kind: Any = Counting if name == "third-party" else getattr(torch.optim, name)
    optimizer = kind(parameters, **({"momentum": 0.9} if name == "SGD" else {}))
    handle = outboard.offload_state(optimizer, batches=12)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    used = sum(buffer.numel() for buffer in handle.host_buffers())
    travelling = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0
    )
    assert used >= travelling
    # What Adafactor keeps is not like the parameter, and cannot be foreseen to the byte.
    assert len(handle.host_buffers()) <= (3 if name == "Adafactor" else 1)
    assert handle.stats()["host_bytes"] < travelling + (1 << 16)


def test_existing_state_is_taken_to_the_host_and_back(lanes_device: LanesDevice) -> None:
    plain, offloaded = make_model(lanes_device), make_model(lanes_device)
    theirs, ours = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(offloaded.parameters())
    train(plain, theirs, 2)
    train(offloaded, ours, 2)
    handle = outboard.offload_state(ours, batches=2)
    assert_same_state(theirs.state_dict(), ours.state_dict())
    train(plain, theirs, 2, seed=2)
    train(offloaded, ours, 2, seed=2)
    handle.remove()
    assert type(ours.state) is type(theirs.state)
    for state in ours.state.values():
        assert state["exp_avg"].device == lanes_device.device or state["exp_avg"].device.type == "cuda"
    train(plain, theirs, 2, seed=3)
    train(offloaded, ours, 2, seed=3)
    assert_same_weights(plain, offloaded)
    assert handle.host_buffers() == []


@pytest.mark.parametrize("into", ["plain", "offloaded"])
def test_save_load_and_go_on(lanes_device: LanesDevice, into: str) -> None:
    whole, first = make_model(lanes_device), make_model(lanes_device)
    uninterrupted, saving = torch.optim.AdamW(whole.parameters()), torch.optim.AdamW(first.parameters())
    outboard.offload_state(saving, batches=2)
    train(whole, uninterrupted, 3)
    train(first, saving, 3)
    file = io.BytesIO()
    torch.save(saving.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same_state(uninterrupted.state_dict(), loaded)

    second = make_model(lanes_device)
    second.load_state_dict(first.state_dict())
    resumed = torch.optim.AdamW(second.parameters())
    if into == "offloaded":
        outboard.offload_state(resumed, batches=3)
    resumed.load_state_dict(loaded)
    train(whole, uninterrupted, 3, seed=2)
    train(second, resumed, 3, seed=2)
    assert_same_weights(whole, second)
    assert_same_state(uninterrupted.state_dict(), resumed.state_dict())


def test_a_state_dict_is_a_copy(lanes_device: LanesDevice) -> None:
    model = make_model(lanes_device)
    optimizer = torch.optim.AdamW(model.parameters())
    outboard.offload_state(optimizer, batches=2)
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    train(model, optimizer, 1, seed=2)
    for index, state in saved["state"].items():
        assert torch.equal(state["exp_avg"], before["state"][index]["exp_avg"])


def test_loading_keeps_the_dtype_of_the_checkpoint(lanes_device: LanesDevice) -> None:
    fp32 = make_model(lanes_device)
    theirs = torch.optim.AdamW(fp32.parameters())
    train(fp32, theirs, 1)
    model = make_model(lanes_device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    outboard.offload_state(optimizer)
    optimizer.load_state_dict(theirs.state_dict())
    for parameter, other in zip(model.parameters(), fp32.parameters(), strict=True):
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
        assert torch.equal(optimizer.state[parameter]["exp_avg"], theirs.state[other]["exp_avg"].cpu())


def test_a_refused_load_changes_nothing(lanes_device: LanesDevice) -> None:
    model = make_model(lanes_device)
    optimizer = torch.optim.AdamW(model.parameters())
    outboard.offload_state(optimizer, batches=2)
    train(model, optimizer, 1)
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({"state": before["state"], "param_groups": before["param_groups"] * 2})
    assert_same_state(before, optimizer.state_dict())


def test_copies_are_ordinary_optimizers(lanes_device: LanesDevice) -> None:
    model = make_model(lanes_device)
    optimizer = torch.optim.AdamW(model.parameters())
    outboard.offload_state(optimizer, batches=2)
    train(model, optimizer, 2)
    for copied_model, copied in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        for parameter in copied_model.parameters():
            assert copied.state[parameter]["exp_avg"].device == parameter.device
        twin_model, twin = copy.deepcopy((model, optimizer))
        train(copied_model, copied, 2, seed=5)
        train(twin_model, twin, 2, seed=5)
        assert_same_weights(copied_model, twin_model)


def test_what_others_assign_is_taken_over(lanes_device: LanesDevice) -> None:
    models = [make_model(lanes_device), make_model(lanes_device)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    handle = outboard.offload_state(optimizers[1], batches=2)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 1)
        first, second, third = list(model.parameters())[:3]
        optimizer.state[first]["exp_avg"] = torch.ones_like(first)
        optimizer.state[second]["mine"] = torch.ones(7, device=lanes_device.device)
        optimizer.state[third]["exp_avg"].zero_()
        del optimizer.state[list(model.parameters())[4]]
        train(model, optimizer, 2, seed=2)
    assert_same_weights(*models)
    assert torch.equal(optimizers[1].state[list(models[1].parameters())[1]]["mine"], torch.ones(7))
    assert handle.places()["mine of parameter 1"] == "host"


def test_whoever_reads_state_waits_for_its_copy_home(lanes_device: LanesDevice) -> None:
    model = make_model(lanes_device)
    optimizer = Failing(model.parameters())
    outboard.offload_state(optimizer, batches=3)
    train(model, optimizer, 1)
    held = [optimizer.state[parameter]["sum"] for parameter in model.parameters()]
    for step in range(2, 30):
        train(model, optimizer, 1)
        assert [tensor.sum().item() for tensor in held] == [float(step * tensor.numel()) for tensor in held]
        assert {type(tensor) for tensor in held} == {torch.Tensor}


@pytest.mark.cuda
def test_parameters_that_move_take_their_state_along() -> None:
    models = [make_model(LanesDevice("cuda")), make_model(LanesDevice("cuda"))]
    optimizers = [torch.optim.AdamW(model.parameters(), foreach=True) for model in models]
    handle = outboard.offload_state(optimizers[1], batches=2)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 1)
        model.cpu()
        for state in optimizer.state.values():
            state.update({key: value.cpu() for key, value in state.items()})
        train(model, optimizer, 1, seed=2)
    assert handle.places() == {}
    for model, optimizer in zip(models, optimizers, strict=True):
        model.cuda()
        for state in optimizer.state.values():
            state.update({key: value.cuda() for key, value in state.items() if key != "step"})
        train(model, optimizer, 1, seed=3)
    assert set(handle.places().values()) <= {"host", "d2h"}
    assert len(handle.places()) == 12
    assert_same_weights(*models)


def test_groups_may_be_added(lanes_device: LanesDevice) -> None:
    models = [make_model(lanes_device), make_model(lanes_device)]
    for index, model in enumerate(models):
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters[:2])
        if index:
            outboard.offload_state(optimizer, batches=2)
        train(model, optimizer, 2)
        optimizer.add_param_group({"params": parameters[2:], "lr": 0.01})
        train(model, optimizer, 2, seed=2)
    assert_same_weights(*models)


def test_deleting_the_optimizer_frees_everything_at_once(lanes_device: LanesDevice) -> None:
    model = make_model(lanes_device)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = outboard.offload_state(optimizer, batches=2)
    train(model, optimizer, 2)
    assert handle._residence is not None
    carriers = [weakref.ref(carrier) for carrier in handle._residence.carriers.all()]
    slots = weakref.ref(handle._residence)
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer, handle
        assert gone() is None
        assert slots() is None
        assert [carrier() for carrier in carriers] == [None]
    finally:
        gc.enable()


# ---- Arguments ------------------------------------------------------------------------------------------------------


def test_bad_arguments(lanes_device: LanesDevice) -> None:
    model = make_model(lanes_device)

    def make() -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, not Sequential"):
        outboard.offload_state(model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"outboard.AdamW is on the host already"):
        outboard.offload_state(outboard.AdamW(model.parameters()))
    with pytest.raises(TypeError, match="turn_on_cpu_offload"):
        outboard.offload_state(outboard.Muon([{"params": [model[0].weight], "use_muon": True}]))
    with pytest.raises(ValueError, match="not both"):
        outboard.offload_state(make(), batches=1, batch_bytes=1)
    for options in ({"batches": 0}, {"batch_bytes": -1}, {"min_numel": -1}, {"pin": "maybe"}):
        with pytest.raises(ValueError):
            outboard.offload_state(make(), **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="list of keys"):
        outboard.offload_state(make(), state_keys="exp_avg")
    with pytest.raises(ValueError, match=r"state_keys names 'exp_agv'.*'exp_avg', 'exp_avg_sq', 'step'"):
        outboard.offload_state(make(), state_keys=["exp_agv"])
    optimizer = make()
    outboard.offload_state(optimizer)
    with pytest.raises(RuntimeError, match="already"):
        outboard.offload_state(optimizer)


def test_unknown_keys_of_other_optimizers_are_told_after_the_first_step(lanes_device: LanesDevice) -> None:
    model = make_model(lanes_device)
    optimizer = Counting(model.parameters())
    outboard.offload_state(optimizer, state_keys=["sum", "exp_avg"])
    with pytest.raises(ValueError, match=r"'exp_avg'.*'integers', 'sum'"):
        train(model, optimizer, 1)


def test_state_keys_choose(lanes_device: LanesDevice) -> None:
    models = [make_model(lanes_device), make_model(lanes_device)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    handle = outboard.offload_state(optimizers[1], state_keys=["exp_avg_sq"], batches=2)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 3)
    assert_same_weights(*models)
    assert {name.partition(" ")[0] for name in handle.places()} == {"exp_avg_sq"}
    assert handle.staying()["exp_avg of parameter 0"] == "not among state_keys"


def test_parameters_in_host_memory_are_left_alone() -> None:
    model = make_model(LanesDevice("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    handle = outboard.offload_state(optimizer)
    train(model, optimizer, 2)
    assert handle.places() == {}
    assert handle.host_buffers() == []
    assert handle.cpu_offload
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    handle.turn_off_cpu_offload()
    assert not handle.cpu_offload


@pytest.mark.parametrize(
    ("sizes", "asked", "expected"),
    [
        ([], {"batches": 3}, []),
        ([5], {"batches": 3}, [[5]]),
        ([1, 1, 1, 1], {"batches": 2}, [[1, 1], [1, 1]]),
        ([1, 9, 1, 1], {"batches": 2}, [[1, 9], [1, 1]]),
        ([4, 4, 4, 4, 4], {"batch_bytes": 9}, [[4, 4], [4, 4], [4]]),
        ([20, 1, 1], {"batch_bytes": 3}, [[20], [1, 1]]),
        ([0, 0, 0], {"batches": 2}, [[0], [0, 0]]),
        ([100, 3, 2, 2, 1, 1], {"batches": 4}, [[100], [3], [2], [2, 1, 1]]),
        ([1, 100, 4, 4], {"batches": 9}, [[1], [100], [4], [4]]),
        ([2, 1, 100], {"batches": 2}, [[2, 1], [100]]),
    ],
)
def test_batches_are_balanced(sizes: list[int], asked: dict[str, int], expected: list[list[int]]) -> None:
    runs = balance(sizes, **asked)
    assert [[sizes[index] for index in run] for run in runs] == expected


# ---- Processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["offload_state", "muon"])
def test_a_fork_is_refused_and_the_parent_goes_on(python: Callable[..., str], kind: str) -> None:
    program = f"""
        import os, torch, outboard
        from outboard._lanes import LaneOptions

        LaneOptions.simulate = 3
        parameters = [torch.ones(64, 64, requires_grad=True)]
        if {kind!r} == "muon":
            optimizer = outboard.Muon([{{"params": parameters, "use_muon": True}}])
            optimizer.turn_on_cpu_offload()
            read = optimizer.host_buffers
        else:
            optimizer = torch.optim.AdamW(parameters)
            outboard.offload_state(optimizer)
            read = lambda: optimizer.state[parameters[0]]

        def step():
            parameters[0].grad = torch.ones(64, 64)
            optimizer.step()

        step()
        child = os.fork()
        if not child:
            refused = 0
            for call in (step, read):
                try:
                    call()
                except outboard.ForkedError as error:
                    refused += "fork" in str(error)
            os._exit(0 if refused == 2 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        step()
        read()
        print("done")
        """
    assert "done" in python(program)


def test_exit_with_copies_under_way(python: Callable[..., str]) -> None:
    program = """
        import torch, outboard
        from outboard._lanes import LaneOptions

        LaneOptions.simulate = 3
        parameters = [torch.ones(256, 256, requires_grad=True) for _ in range(8)]
        optimizer = torch.optim.AdamW(parameters)
        handle = outboard.offload_state(optimizer, batches=4)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        print("done")
        """
    assert "done" in python(program)
