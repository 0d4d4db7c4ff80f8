"""`outboard.Muon` in one process: against torch's own, its groups, QK clipping.

Over 500 lines: independent cases, read one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import outboard
from muons import MATRICES, VECTORS, assert_same, give_gradients, make, muon, step
from outboard.muon import orthogonalize, param_groups, parse_qk_name, set_ns_compile
from outboard.muon._newton_schulz import COEFFICIENTS
from outboard.muon._spread import owners

MIXED = ((64, 128), (128, 64), (33, 20), (64, 64), (64, 64), (1, 7), (7, 1))


@pytest.fixture(autouse=True)
def no_compilation() -> Iterator[None]:
    was = outboard.muon.ns_compile()
    set_ns_compile(False)
    yield
    set_ns_compile(was)


# ---- Bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(("dtype", "nesterov"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("options", [{}, {"ns_steps": 3, "momentum": 0.8, "weight_decay": 0.0}, {"chunk_size": 1}])
def test_the_bits_of_torch(adjust_lr: str, nesterov: bool, dtype: torch.dtype, options: dict[str, Any]) -> None:
    one, other = make(MIXED, dtype), make(MIXED, dtype)
    settings = {key: value for key, value in options.items() if key != "chunk_size"}
    theirs = torch.optim.Muon(one, lr=0.02, nesterov=nesterov, adjust_lr_fn=adjust_lr, **settings)
    ours = muon(other, nesterov=nesterov, adjust_lr=adjust_lr, **options)
    for seed in range(4):
        step(one, theirs, seed)
        step(other, ours, seed)
        assert_same(one, other)


def test_bf16_momentum_is_not_divided_by_its_norm() -> None:
    # torch.optim.Muon's is, without Nesterov (2.11 to 2.14): it is orthogonalised in its own memory.
    one, other = make(MATRICES, torch.bfloat16), make(MATRICES, torch.bfloat16)
    theirs = torch.optim.Muon(one, lr=0.02, nesterov=False, adjust_lr_fn="match_rms_adamw")
    ours = muon(other, nesterov=False)
    step(one, theirs, 0)
    step(other, ours, 0)
    assert_same(one, other)
    assert other[0].grad is None
    give_gradients(other, 0)
    assert other[0].grad is not None
    expected = torch.zeros_like(other[0]).lerp_(other[0].grad, 1 - 0.95)
    assert torch.equal(ours.state[other[0]]["momentum_buffer"], expected)


def test_adamw_groups_have_the_bits_of_torch() -> None:
    one, other = make(VECTORS), make(VECTORS)
    theirs = torch.optim.AdamW(one, lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    ours = outboard.Muon([{"params": other, "use_muon": False}], lr=0.02)
    for seed in range(4):
        step(one, theirs, seed)
        step(other, ours, seed)
        assert_same(one, other)
    state = ours.state[other[0]]
    assert set(state) == {"step", "moment1", "moment2"}
    assert state["step"] == 4


def test_the_whole_step_in_float64() -> None:
    parameters = make(((48, 96),))
    optimizer = muon(parameters)
    weight, momentum = parameters[0].detach().double(), torch.zeros(48, 96, dtype=torch.float64)
    for seed in range(3):
        give_gradients(parameters, seed)
        assert parameters[0].grad is not None
        grad = parameters[0].grad.double()
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * grad
        x = 0.05 * grad + 0.95 * momentum
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = COEFFICIENTS[0] * x + (COEFFICIENTS[1] * gram + COEFFICIENTS[2] * gram @ gram) @ x
        weight = weight * (1 - 0.02 * 0.1) - 0.02 * 0.2 * math.sqrt(96) * x
    # What bf16 products leave.
    torch.testing.assert_close(parameters[0].double(), weight, rtol=0, atol=0.02 * 0.2 * math.sqrt(96) * 3 * 0.02)


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (40, 40), (3, 16, 32)])
def test_singular_values_come_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape), [COEFFICIENTS] * 5).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


@given(count=st.integers(2, 5), rows=st.integers(1, 40), columns=st.integers(1, 40), stacked=st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_matrix_has_the_same_bits_whatever_is_stepped_beside_it(
    count: int, rows: int, columns: int, stacked: bool
) -> None:
    one, other = make(((rows, columns),) * count), make(((rows, columns),) * count)
    give_gradients(one, 0)
    give_gradients(other, 0)
    if stacked:
        # A stack of matrices is each of them, too.
        stack = torch.stack([parameter.detach() for parameter in one]).requires_grad_()
        stack.grad = torch.stack([parameter.grad for parameter in one if parameter.grad is not None])
        muon([stack]).step()
        one = list(stack.detach().unbind())
    else:
        muon(one).step()
    for parameter in other:
        muon([parameter]).step()
    assert_same(one, other)


@given(count=st.integers(2, 5), rows=st.integers(1, 40), columns=st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_matrices_together_are_about_each_alone(count: int, rows: int, columns: int) -> None:
    # As they go on CUDA when compiled: products of several at once may add up in another order.
    torch.manual_seed(rows * 41 + columns)
    stack = torch.randn(count, rows, columns)
    together = orthogonalize(stack, [COEFFICIENTS] * 5)
    for index in range(count):
        alone = orthogonalize(stack[index], [COEFFICIENTS] * 5)
        torch.testing.assert_close(together[index], alone, rtol=0, atol=0.05)


def test_coefficients_of_each_step() -> None:
    triples = [(3.0, -3.2, 1.2), (2.5, -2.0, 0.7)]
    parameters, twin = make(((16, 32),)), make(((16, 32),))
    step(parameters, muon(parameters, ns_steps=2, ns_coefficients=triples, weight_decay=0.0, momentum=0.0), 0)
    give_gradients(twin, 0)
    assert twin[0].grad is not None
    expected = orthogonalize(twin[0].grad, triples)
    with torch.no_grad():
        twin[0].add_(expected, alpha=-0.02 * (0.2 * math.sqrt(32)))
    assert_same(parameters, twin)


# ---- More than two dimensions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "flatten", "as_two"),
    [
        ((3, 16, 32), None, "stack"),
        ((3, 16, 32), False, "stack"),
        ((3, 16, 32), True, "flat"),
        ((8, 4, 3, 3), None, "flat"),
        ((8, 4, 2, 3, 3), None, "flat"),
        ((8, 4, 3, 3), False, "stack"),
    ],
)
def test_more_dimensions(shape: tuple[int, ...], flatten: bool | None, as_two: str) -> None:
    whole = make((shape,))
    if as_two == "flat":
        parts = [whole[0].detach().clone().reshape(shape[0], -1).requires_grad_()]
    else:
        parts = [part.clone().requires_grad_() for part in whole[0].detach().reshape(-1, *shape[-2:]).unbind()]
    theirs = torch.optim.Muon(parts, lr=0.02, adjust_lr_fn="match_rms_adamw")
    ours = outboard.Muon([{"params": whole, "use_muon": True, "flatten": flatten}], lr=0.02)
    for seed in range(2):
        give_gradients(whole, seed)
        assert whole[0].grad is not None
        grad = whole[0].grad
        pieces = [grad.reshape(shape[0], -1)] if as_two == "flat" else grad.reshape(-1, *shape[-2:]).unbind()
        for part, piece in zip(parts, pieces, strict=True):
            part.grad = piece.clone()
        theirs.step()
        ours.step()
    together = parts[0] if as_two == "flat" else torch.stack(parts)
    assert torch.equal(whole[0], together.reshape(shape))


def test_parts_of_a_fused_matrix() -> None:
    fused = make(((48, 32),))
    parts = [part.clone().requires_grad_() for part in fused[0].detach().chunk(3)]
    theirs = torch.optim.Muon(parts, lr=0.02, adjust_lr_fn="match_rms_adamw")
    ours = outboard.Muon([{"params": fused, "use_muon": True, "split": 3}], lr=0.02)
    for seed in range(2):
        give_gradients(fused, seed)
        assert fused[0].grad is not None
        for part, grad in zip(parts, fused[0].grad.chunk(3), strict=True):
            part.grad = grad.clone()
        theirs.step()
        ours.step()
    assert torch.equal(fused[0], torch.cat(parts))
    with pytest.raises(ValueError, match="not 5 matrices"):
        outboard.Muon([{"params": fused, "use_muon": True, "split": 5}])


# ---- Groups and arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": -1},
        {"momentum": 1.0},
        {"ns_steps": -1},
        {"ns_steps": 0},
        {"chunk_size": 0},
        {"chunk_size": -2},
        {"warmup_step": -1},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"weight_decay": -0.1},
        {"adamw_betas": (0.9, 1.0)},
        {"adamw_eps": -1e-8},
        {"adjust_lr": "spectral"},
        {"ns_coefficients": [(3.0, -3.0, 1.0)] * 4},
        {"ns_coefficients": [(3.0, -3.0)] * 5},
    ],
    ids=str,
)
def test_values_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        muon(make(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": "fast"},
        {"ns_steps": 2.5},
        {"chunk_size": "all"},
        {"adamw_betas": 0.9},
        {"nesterov": "no"},
        {"none_grad": 1},
    ],
    ids=str,
)
def test_values_of_other_types(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        muon(make(), **options)


def test_groups() -> None:
    with pytest.raises(ValueError, match="use_muon"):
        outboard.Muon(make())
    with pytest.raises(ValueError, match="use_muon"):
        outboard.Muon([{"params": make()}])
    with pytest.raises(ValueError, match=r"matrices.*\(128,\)"):
        muon(make(VECTORS))
    # Keys of the other kind do no harm.
    optimizer = outboard.Muon([{"params": make(), "use_muon": True, "adamw_betas": "nonsense", "adamw_eps": -1}])
    with pytest.raises(ValueError, match="use_muon"):
        optimizer.add_param_group({"params": make(VECTORS)})
    with pytest.raises(ValueError):
        optimizer.add_param_group({"params": make(VECTORS), "use_muon": True})
    assert len(optimizer.param_groups) == 1
    vectors = make(VECTORS)
    optimizer.add_param_group({"params": vectors, "use_muon": False, "momentum": -3})
    step(vectors, optimizer, 0)
    with pytest.raises(ValueError, match="2 names for 4"):
        outboard.Muon([{"params": make(), "use_muon": True, "names": ["a", "b"]}])


def test_values_that_were_changed_are_checked_before_anything_changes() -> None:
    parameters = make()
    optimizer = muon(parameters)
    before = [parameter.detach().clone() for parameter in parameters]
    give_gradients(parameters, 0)
    optimizer.param_groups[0]["momentum"] = 2.0
    with pytest.raises(ValueError, match="momentum"):
        optimizer.step()
    assert_same(parameters, before)
    assert len(optimizer.state) == 0


def test_gradients_are_dropped_or_kept() -> None:
    for none_grad in (True, False):
        matrices, vectors = make(), make(VECTORS)
        optimizer = muon(matrices, vectors, none_grad=none_grad)
        give_gradients(matrices + vectors, 0)
        before = [parameter.grad for parameter in matrices]
        copies = [grad.clone() for grad in before if grad is not None]
        optimizer.step()
        assert all((parameter.grad is None) == none_grad for parameter in matrices)
        assert all(parameter.grad is not None for parameter in vectors)
        if not none_grad:
            assert_same([grad for grad in before if grad is not None], copies)


def test_parameters_without_gradients_are_left_alone() -> None:
    matrices, vectors = make(), make(VECTORS)
    optimizer = muon(matrices, vectors)
    give_gradients([matrices[1], vectors[0]], 0)
    before = matrices[0].detach().clone()
    optimizer.step()
    assert torch.equal(matrices[0], before)
    assert set(optimizer.state) == {matrices[1], vectors[0]}


def test_refused_gradients_name_the_parameter() -> None:
    parameters = make()
    optimizer = outboard.Muon([{"params": parameters, "use_muon": True, "names": ["a", "b", "c", "d"]}])
    parameters[2].grad = torch.randn(64, 128).to_sparse()
    with pytest.raises(RuntimeError, match=r"c: .*sparse"):
        optimizer.step()
    with pytest.raises(TypeError, match="complex"):
        muon([torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)])


def test_closures_schedulers_and_tensor_rates() -> None:
    one, other = make(), make()
    theirs = torch.optim.Muon(one, lr=0.02, adjust_lr_fn="match_rms_adamw")
    ours = muon(other)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5) for optimizer in (theirs, ours)]
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        give_gradients(other, len(calls) - 1)
        return 3.0

    for seed in range(3):
        step(one, theirs, seed)
        assert ours.step(closure) == 3.0
        for scheduler in schedulers:
            scheduler.step()
    assert calls == [True] * 3
    assert_same(one, other)

    floats, tensors = make(), make()
    step(floats, muon(floats, lr=0.5), 0)
    step(tensors, muon(tensors, lr=torch.tensor(0.5)), 0)
    for left, right in zip(floats, tensors, strict=True):
        torch.testing.assert_close(left, right)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.conv = torch.nn.Conv1d(16, 16, 3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.norm = torch.nn.LayerNorm(16)
        self.experts = torch.nn.Parameter(torch.randn(4, 16, 16))
        self.lm_head = torch.nn.Linear(16, 50, bias=False)


def test_the_usual_split() -> None:
    groups = param_groups(_Model(), lr=0.1)
    assert [group["names"] for group in groups] == [
        ["experts", "layers.0.weight", "layers.1.weight"],
        ["conv.weight"],
        ["embed.weight", "conv.bias", "layers.0.bias", "layers.1.bias", "norm.weight", "norm.bias", "lm_head.weight"],
    ]
    assert [group["use_muon"] for group in groups] == [True, True, False]
    assert [group.get("flatten") for group in groups] == [None, True, None]
    assert {group["lr"] for group in groups} == {0.1}
    tied = _Model()
    tied.lm_head.weight = tied.embed.weight
    assert [group["names"].count("embed.weight") for group in param_groups(tied)] == [0, 0, 1]
    chosen = param_groups(_Model(), lambda name, _: name.startswith("layers"))
    assert chosen[0]["names"] == ["layers.0.weight", "layers.1.weight"]
    model = _Model()
    optimizer = outboard.Muon(param_groups(model))
    step(list(model.parameters()), optimizer, 0)
    assert optimizer.state_dict()["param_groups"][0]["names"] == groups[0]["names"]


class RMSNorm2d(torch.nn.Module):
    """A norm of somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4, 8))


def test_what_else_is_no_matrix() -> None:
    model = torch.nn.ModuleDict(
        {
            "bag": torch.nn.EmbeddingBag(50, 8),
            "layer_norm": torch.nn.LayerNorm((4, 8)),
            "rms_norm": torch.nn.RMSNorm((4, 8)),
            "other_norm": RMSNorm2d(),
            "attention": torch.nn.MultiheadAttention(8, 2, add_bias_kv=True),
            "value": torch.nn.Linear(8, 1),
            "stem": torch.nn.Conv1d(1, 1, 7),
            "conv": torch.nn.Conv1d(4, 6, 1),
        }
    )
    model.pos_embed = torch.nn.Parameter(torch.zeros(1, 16, 8))
    model.cls_token = torch.nn.Parameter(torch.zeros(1, 1, 8))
    matrices, convolutions, rest = param_groups(model)
    assert matrices["names"] == ["attention.in_proj_weight", "attention.out_proj.weight"]
    assert convolutions["names"] == ["conv.weight"]
    assert len(rest["names"]) == len(list(model.parameters())) - 3


# ---- QK clipping ----------------------------------------------------------------------------------------------------


CLIP: dict[str, Any] = {"q_indices": [0, 1, 2, 3], "k_indices": [0, 0, 1, 1], "head_dim": 8, "threshold": 50.0}


def qk_optimizer(parameters: list[torch.Tensor], **options: Any) -> outboard.Muon:
    names = ["layers.0.attn.q_proj.weight", "layers.0.attn.k_proj.weight", "layers.0.mlp.weight"]
    group = {"params": parameters, "use_muon": True, "names": names}
    return outboard.Muon([group], lr=0.02, clip_config=CLIP, **options)


def test_heads_above_the_threshold_are_scaled() -> None:
    shapes = ((32, 32), (16, 32), (16, 32))
    one, other = make(shapes), make(shapes)
    plain, clipped = qk_optimizer(one), qk_optimizer(other)
    logits = torch.tensor([100.0, 200.0, 10.0, 55.0])
    give_gradients(one, 0)
    plain.step()
    give_gradients(other, 0)
    clipped.step(qk_logits={0: logits})
    factors = [math.sqrt(50 / logit) if logit > 50 else 1.0 for logit in logits.tolist()]
    with torch.no_grad():
        for head, factor in enumerate(factors):
            one[0][8 * head : 8 * head + 8] *= torch.tensor(factor)
        # Logits that share a key head: the smallest scale.
        one[1][:8] *= torch.tensor(min(factors[:2]))
        one[1][8:] *= torch.tensor(min(factors[2:]))
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=0)


@pytest.mark.parametrize("logit", [50.0, 1.0, -3.0, float("inf"), float("nan")])
def test_other_heads_keep_their_bits(logit: float) -> None:
    shapes = ((32, 32), (16, 32), (16, 32))
    one, other = make(shapes), make(shapes)
    step(one, qk_optimizer(one), 0)
    give_gradients(other, 0)
    qk_optimizer(other).step(qk_logits={0: torch.full((4,), logit)})
    assert_same(one, other)


def test_refused_clipping_changes_nothing() -> None:
    shapes = ((32, 32), (16, 32), (16, 32))
    parameters = make(shapes)
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = qk_optimizer(parameters)
    give_gradients(parameters, 0)
    for logits in ({0: torch.ones(3)}, {7: torch.ones(4)}, {0: [1.0] * 4}):
        with pytest.raises(ValueError, match="qk_logits"):
            optimizer.step(qk_logits=logits)  # type: ignore[arg-type]
    unclipped = outboard.Muon([{"params": parameters, "use_muon": True}])
    with pytest.raises(ValueError, match="clip_config"):
        unclipped.step(qk_logits={0: torch.ones(4)})
    assert_same(parameters, before)
    for config in ({**CLIP, "k_indices": [0]}, {**CLIP, "threshold": 0.0}, {"head_dim": 8}, {**CLIP, "other": 1}):
        with pytest.raises(ValueError):
            outboard.Muon(param_groups(_Model()), clip_config=config)
    with pytest.raises(ValueError, match="names"):
        outboard.Muon([{"params": parameters, "use_muon": True}], clip_config=CLIP)
    small = make(((16, 32), (16, 32), (16, 32)))
    give_gradients(small, 0)
    with pytest.raises(ValueError, match="16 rows: no 4 heads of 8"):
        qk_optimizer(small).step(qk_logits={0: torch.ones(4)})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.3.attention.q_proj.weight", (3, "q")),
        ("blocks.12.attn.wk.weight", (12, "k")),
        ("h.0.attn.to_q.weight", (0, "q")),
        ("encoder.layer.5.attention.self.key.weight", (5, "k")),
        ("layers.3.mlp.weight", None),
        ("q_proj.weight", None),
    ],
)
def test_names_of_projections(name: str, expected: tuple[int, str] | None) -> None:
    assert parse_qk_name(name) == expected


# ---- Owners -------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1, 1e9), max_size=20), st.integers(1, 8))
def test_owners_share_the_work(costs: list[float], size: int) -> None:
    loads = [0.0] * size
    chosen = owners(costs, size, loads)
    assert chosen == owners(costs, size, [0.0] * size)
    assert sum(loads) == pytest.approx(sum(costs))
    if costs:
        # No rank has more than a fair share and one matrix.
        assert max(loads) <= sum(costs) / size + max(costs) + 1e-3
