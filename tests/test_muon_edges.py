"""`outboard.Muon` at the edges: tensors of no elements, memory with gaps, rates in tensors, checkpoints of others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import outboard
from outboard.muon import _newton_schulz, orthogonalize, set_ns_compile


@pytest.fixture(autouse=True)
def no_compilation() -> Iterator[None]:
    was = outboard.muon.ns_compile()
    set_ns_compile(False)
    yield
    set_ns_compile(was)


def ones(*shape: int) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape)
    return parameter


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("flatten", [None, True, False])
@pytest.mark.parametrize(
    "shape", [(0, 5), (5, 0), (0, 0), (3, 0, 5), (0, 4, 5), (3, 4, 0), (0, 3, 3, 3), (2, 0, 3, 3), (2, 3, 0, 3)]
)
def test_matrices_of_no_elements(shape: tuple[int, ...], flatten: bool | None, adjust_lr: str) -> None:
    empty, beside, alone = ones(*shape), ones(4, 4), ones(4, 4)
    for parameters in ([empty, beside], [alone]):
        group = {"params": parameters, "use_muon": True, "flatten": flatten}
        outboard.Muon([group], adjust_lr=adjust_lr).step()
    assert torch.equal(beside, alone)
    assert not torch.equal(beside, torch.ones(4, 4))


def test_parts_of_a_fused_matrix_of_no_columns() -> None:
    empty = ones(6, 0)
    optimizer = outboard.Muon([{"params": [empty], "use_muon": True, "split": 3}])
    optimizer.step()
    assert optimizer.state[empty]["momentum_buffer"].shape == (6, 0)


def test_a_rate_in_a_tensor_for_memory_with_gaps() -> None:
    results = []
    for lr in (torch.tensor(0.25), 0.25):
        base = torch.ones(8, 64)
        parameter = torch.nn.Parameter(base[:, 8:56])
        parameter.grad = torch.ones(8, 48)
        outboard.Muon([{"params": [parameter], "use_muon": False}], lr=lr).step()
        results.append(base)
    assert torch.equal(*results)
    assert torch.equal(results[0][:, :8], torch.ones(8, 8))
    assert not torch.equal(results[0][:, 8:56], torch.ones(8, 48))


@pytest.mark.parametrize("logit", [123.4, 150.0, 1000.0])
def test_factors_of_clipping_are_not_rounded_to_bf16(logit: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(256, 256).bfloat16()
    parameter = torch.nn.Parameter(values.clone())
    optimizer = outboard.Muon(
        [{"params": [parameter], "use_muon": True, "names": ["layers.0.q_proj.weight"]}],
        clip_config={"q_indices": [0], "k_indices": [0], "head_dim": 256, "threshold": 100.0},
    )
    optimizer.step(qk_logits={0: torch.tensor([logit])})
    factor = (100 / logit) ** 0.5
    ratio = parameter.detach().double().norm() / values.double().norm()
    assert ratio.item() == pytest.approx(factor, rel=2e-4)


def test_running_out_of_memory_is_no_failure_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(_newton_schulz, "_function", lambda *_: fails)
    with pytest.raises(torch.OutOfMemoryError):
        orthogonalize(torch.ones(4, 4), [_newton_schulz.COEFFICIENTS])
    assert not _newton_schulz._has_failed


def test_any_number_of_shapes_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=backend, **options))
    monkeypatch.setattr(_newton_schulz, "_compiled", {})
    set_ns_compile(True)
    coefficients = [_newton_schulz.COEFFICIENTS] * 2
    cuda = torch.device("cuda")
    shapes = [(4 + rows, 40) for rows in range(12)] + [(3, 4, 40)]
    for _ in range(2):
        for shape in shapes:
            x = torch.ones(shape, dtype=torch.bfloat16)
            function = _newton_schulz._function(cuda, x.shape, coefficients)
            assert torch.equal(function(x, coefficients), _newton_schulz._iterate(x, coefficients))
    assert len(graphs) == len(shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lr", [1e-3, 3e-4, 0.0123, 0.77])
def test_rates_in_tensors_have_the_bits_of_torch(lr: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values, grad = torch.randn(2, 48, 32).to(dtype).unbind()
    one, other = torch.nn.Parameter(values.clone()), torch.nn.Parameter(values.clone())
    one.grad, other.grad = grad.clone(), grad.clone()
    torch.optim.Muon([one], lr=torch.tensor(lr), adjust_lr_fn="match_rms_adamw").step()
    outboard.Muon([{"params": [other], "use_muon": True}], lr=torch.tensor(lr)).step()
    assert torch.equal(one, other)


def _trained(*groups: tuple[bool, tuple[int, ...]]) -> outboard.Muon:
    optimizer = outboard.Muon([{"params": [ones(*shape)], "use_muon": use_muon} for use_muon, shape in groups])
    optimizer.step()
    return optimizer


def _other_shape(_: dict[str, Any]) -> dict[str, Any]:
    return _trained((True, (8, 4)), (False, (6,))).state_dict()


def _other_kinds(_: dict[str, Any]) -> dict[str, Any]:
    return _trained((False, (4, 4)), (True, (6, 1))).state_dict()


def _no_kinds(state_dict: dict[str, Any]) -> dict[str, Any]:
    for group in state_dict["param_groups"]:
        del group["use_muon"]
    return state_dict


def _no_second_moment(state_dict: dict[str, Any]) -> dict[str, Any]:
    del state_dict["state"][1]["moment2"]
    return state_dict


def _bad_momentum(state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict["param_groups"][0]["momentum"] = -1.0
    return state_dict


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_shape, r"momentum_buffer of parameter 0 of group 0 is \(8, 4\) .* \(4, 4\)"),
        (_other_kinds, "Muon updates matrices"),
        (_no_kinds, "use_muon"),
        (_no_second_moment, "moment2 of parameter 0 of group 1 is missing"),
        (_bad_momentum, "momentum"),
    ],
)
def test_checkpoints_that_do_not_fit_change_nothing(change: Any, message: str) -> None:
    optimizer = _trained((True, (4, 4)), (False, (6,)))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(change(copy.deepcopy(before)))
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(after["state"][index][key]), torch.as_tensor(value))
    optimizer.load_state_dict(before)
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    optimizer.step()
