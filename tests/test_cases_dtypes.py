"""Dtypes, step counts, hyperparameters out of range. Each docstring quotes its case or rule.

Over 500 lines: independent cases in the order of their table, read one at a time.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import outboard
from oracle import (
    FLOAT,
    Oracle,
    assert_same,
    bits_of,
    decode,
    encode,
    from_bits,
    ref,
    round_to,
)

BF16, FP16 = torch.bfloat16, torch.float16
CLASSES = [outboard.AdamW, outboard.Adam]


def leaf(values: torch.Tensor) -> torch.Tensor:
    return values.detach().clone().requires_grad_()


# ---- mixtures


@pytest.mark.parametrize("across", [False, True], ids=["one group", "across groups"])
@pytest.mark.parametrize("master", ["split", "full"])
def test_mixed_dtypes(master, across) -> None:
    """fp32 and bf16 parameters mixed in one group and across groups: each by its own rule.

    And: parameters already fp32 beside bf16 ones with masters: works.
    """
    dtypes = [FLOAT, BF16, FP16, BF16, FLOAT, FP16]
    parameters = [leaf(torch.randn(17, 5).to(dtype)) for dtype in dtypes]
    groups = [{"params": parameters}]
    if across:
        groups = [{"params": parameters[:3], "lr": 1e-2}, {"params": parameters[3:], "lr": 1e-3}]
    optimizer = outboard.AdamW(groups, lr=1e-2, master=master)
    oracles = [
        Oracle(p, lr=1e-3 if across and number >= 3 else 1e-2, master=master) for number, p in enumerate(parameters)
    ]
    for _ in range(5):
        for p, oracle in zip(parameters, oracles, strict=True):
            p.grad = torch.randn(p.shape).to(p.dtype)
            oracle.step(p.grad)
        optimizer.step()
    for p, oracle in zip(parameters, oracles, strict=True):
        oracle.assert_equal(optimizer, p, str(p.dtype))
        assert_same(optimizer.master(p), oracle.master, str(p.dtype))
        kept = {FLOAT: set(), BF16: {"residual" if master == "split" else "master"}, FP16: {"master"}}[p.dtype]
        assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"} | kept


@pytest.mark.parametrize("dtype", [FLOAT, BF16, FP16], ids=str)
def test_default_dtype_float64(dtype) -> None:
    """`set_default_dtype(float64)`: works."""
    start = torch.randn(100).to(dtype)
    grad = torch.randn(100).to(dtype)
    torch.set_default_dtype(torch.float64)
    p = leaf(start)
    optimizer, oracle = outboard.AdamW([p], lr=torch.tensor(1e-2), amsgrad=True), Oracle(start, lr=1e-2, amsgrad=True)
    for _ in range(3):
        p.grad = grad.clone()
        optimizer.step()
        oracle.step(grad)
    oracle.assert_equal(optimizer, p)
    assert optimizer.state[p]["exp_avg"].dtype is FLOAT
    assert optimizer.state[p]["step"].dtype is torch.float64
    assert optimizer.master(p).dtype is FLOAT


def test_fp16_zero_gradient() -> None:
    """fp16 parameter, zero gradient, eps 1e-8: finite; only the decay moves it."""
    p = leaf(torch.linspace(-2, 2, 1001).to(FP16))
    optimizer = outboard.AdamW([p], lr=0.1, weight_decay=0.1, eps=1e-8)
    start = p.detach().clone()
    for _ in range(10):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert bool(p.isfinite().all())
    wanted = ref(start, [torch.zeros(1001)] * 10, lr=0.1, weight_decay=0.1)
    assert torch.allclose(optimizer.master(p).double(), wanted, rtol=1e-5, atol=0)
    assert_same(p, round_to(optimizer.master(p), FP16))
    still = leaf(torch.linspace(-2, 2, 1001).to(FP16))
    optimizer = outboard.AdamW([still], weight_decay=0.0)
    still.grad = torch.zeros_like(still)
    optimizer.step()
    assert_same(still, start, "without decay nothing moves")


@pytest.mark.parametrize("asked", [None, FLOAT, BF16], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT, BF16, FP16], ids=str)
def test_state_is_fp32_unless_asked(dtype, asked) -> None:
    """bf16 parameters: state is fp32 unless asked otherwise, and `stats()` says which."""
    p = leaf(torch.ones(10, dtype=dtype))
    options = {} if asked is None else {"state_dtype": asked}
    optimizer = outboard.AdamW([p], amsgrad=True, **options)
    p.grad = torch.ones_like(p)
    optimizer.step()
    wanted = asked or FLOAT
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert optimizer.state[p][key].dtype is wanted
    assert optimizer.stats()["state_dtype"] == str(wanted).removeprefix("torch.")


def test_state_bytes() -> None:
    """Host bytes per parameter: 8 for fp32, 10 for bf16 split, 12 for bf16 full and fp16; bf16 moments half."""
    for dtype, options, each in (
        (FLOAT, {}, 8),
        (BF16, {}, 10),
        (BF16, {"master": "full"}, 12),
        (FP16, {}, 12),
        (FLOAT, {"amsgrad": True}, 12),
        (BF16, {"state_dtype": BF16}, 6),
        (FLOAT, {"state_dtype": BF16}, 4),
    ):
        p = torch.ones(1 << 16, dtype=dtype, requires_grad=True)
        optimizer = outboard.AdamW([p], **options)
        assert optimizer.stats()["state_bytes"] == 0
        p.grad = torch.ones_like(p)
        optimizer.step()
        stats = optimizer.stats()
        # Beside the planes, a little for the step count and alignment.
        assert each * p.numel() <= stats["state_bytes"] <= each * p.numel() + 1024, (dtype, options)
        assert stats["elements"] == p.numel()
        assert stats["parameters"] == 1
        assert stats["device_bytes"] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32, torch.float8_e4m3fn], ids=str)
def test_unsupported_parameter_dtype(dtype) -> None:
    """Sparse gradient, complex parameter: clear error naming it. fp64 parameters: supported, or one clear error."""
    good, bad = torch.ones(3, requires_grad=True), torch.ones(3).to(dtype)
    good.grad = torch.ones(3)
    if dtype.is_floating_point or dtype.is_complex:
        bad.requires_grad_()
        bad.grad = torch.ones_like(bad)

    def use() -> None:
        optimizer = outboard.AdamW([("good", good), ("embed.bad", bad)])
        # torch lets nobody give an integer tensor a gradient; it can be asked for its state.
        optimizer.step() if bad.requires_grad else optimizer.state[bad]

    with pytest.raises(TypeError, match=rf"embed\.bad.*{dtype}"):
        use()
    assert_same(good, torch.ones(3), "a refused call changes nothing")


def test_unsupported_gradient_dtype() -> None:
    good, bad = (torch.ones(3, requires_grad=True) for _ in range(2))
    bad.grad_dtype = None
    good.grad, bad.grad = torch.ones(3), torch.ones(3, dtype=torch.float64)
    optimizer = outboard.AdamW([("good", good), ("bad", bad)])
    with pytest.raises(TypeError, match=r"gradient of bad.*float64"):
        optimizer.step()
    assert_same(good, torch.ones(3))
    assert not any(float(s["step"]) for s in optimizer.state.values())


# ---- step counts


@pytest.mark.parametrize("start", [2**24 - 1, 2**24, 2**24 + 1, 2**31 + 1, 2**40 + 1])
def test_step_count_past_2_24(start) -> None:
    """Step count past 2^24: counted exactly, exact in the state_dict."""
    p = torch.ones(4, requires_grad=True)
    optimizer = outboard.AdamW([p])
    p.grad = torch.ones(4)
    optimizer.step()
    optimizer.state[p]["step"] = start
    for _ in range(3):
        optimizer.step()
    assert int(optimizer.state[p]["step"]) == start + 3
    saved = optimizer.state_dict()["state"][0]["step"]
    assert int(saved) == start + 3
    assert saved.dtype is torch.float64
    assert saved.shape == ()
    other = outboard.AdamW([q := torch.ones(4, requires_grad=True)])
    other.load_state_dict(optimizer.state_dict())
    q.grad = torch.ones(4)
    other.step()
    assert int(other.state[q]["step"]) == start + 4


def test_step_is_honoured_when_assigned() -> None:
    """`step` is a float64 0-d tensor, honoured when assigned, in whatever form."""
    forms = [
        lambda state: state.__setitem__("step", 100),
        lambda state: state.__setitem__("step", 100.0),
        lambda state: state.__setitem__("step", torch.tensor(100)),
        lambda state: state.__setitem__("step", torch.tensor([100.0])),
        lambda state: state["step"].fill_(100),
        lambda state: state["step"].add_(99),
        lambda state: state.update(step=torch.tensor(100.0)),
    ]
    for assign in forms:
        p = torch.ones(4, requires_grad=True)
        optimizer, oracle = outboard.AdamW([p]), Oracle(p)
        for _ in range(2):
            p.grad = torch.full((4,), 0.5)
            optimizer.step()
            oracle.step(p.grad)
            if oracle.step_count == 1:
                assign(optimizer.state[p])
                oracle.step_count = 100
        oracle.assert_equal(optimizer, p)


# ---- hyperparameters

BAD = [
    ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
    ({"lr": math.nan}, ValueError, "Invalid learning rate: nan"),
    ({"lr": "1e-3"}, TypeError, "lr.*'1e-3'"),
    ({"lr": None}, TypeError, "lr"),
    ({"lr": torch.tensor([0.1, 0.2])}, ValueError, "Tensor lr must be 1-element"),
    ({"lr": torch.tensor(-0.1)}, ValueError, "Invalid learning rate"),
    ({"lr": 1j}, TypeError, "lr"),
    ({"eps": -1e-8}, ValueError, "Invalid epsilon value: -1e-08"),
    ({"eps": math.nan}, ValueError, "Invalid epsilon value: nan"),
    ({"eps": "tiny"}, TypeError, "eps.*'tiny'"),
    ({"weight_decay": -1}, ValueError, "Invalid weight_decay value: -1"),
    ({"weight_decay": math.nan}, ValueError, "Invalid weight_decay value: nan"),
    ({"weight_decay": "no"}, TypeError, "weight_decay.*'no'"),
    ({"betas": (1.0, 0.9)}, ValueError, "Invalid beta parameter at index 0: 1.0"),
    ({"betas": (0.9, 1.0)}, ValueError, "Invalid beta parameter at index 1: 1.0"),
    ({"betas": (-0.1, 0.9)}, ValueError, "Invalid beta parameter at index 0: -0.1"),
    ({"betas": (0.9, math.nan)}, ValueError, "Invalid beta parameter at index 1: nan"),
    ({"betas": (0.9, "b")}, TypeError, r"betas\[1\].*'b'"),
    ({"betas": 0.9}, TypeError, "betas.*0.9"),
    ({"betas": (0.9,)}, TypeError, "betas"),
    ({"betas": (0.9, 0.99, 0.999)}, TypeError, "betas"),
    ({"betas": (0.9, torch.tensor(0.99))}, ValueError, "both floats or both Tensors"),
]
IDS = [" ".join(f"{key}={value!r}" for key, value in bad.items()) for bad, _, _ in BAD]


@pytest.mark.parametrize(("bad", "error", "message"), BAD, ids=IDS)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_bad_hyperparameters(cls, bad, error, message) -> None:
    """Bad lr, betas, eps, weight_decay (negative, NaN, beta = 1, strings): ValueError or TypeError, as torch."""
    p = torch.ones(3, requires_grad=True)
    with pytest.raises(error, match=message):
        cls([p], **bad)
    # In a group, at construction and later; nothing is added.
    with pytest.raises(error, match=message):
        cls([{"params": [p], **bad}])
    optimizer = cls([p])
    q = torch.ones(2, requires_grad=True)
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [q], **bad})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [q]})


@pytest.mark.parametrize("make", [np.float32, np.float64, np.int64, torch.tensor], ids=lambda make: make.__name__)
def test_numpy_scalars(make) -> None:
    """torch takes whatever is a number, as schedules and configurations made with numpy give them."""
    p, q = (torch.linspace(-1, 1, 64).requires_grad_() for _ in range(2))
    whole = make is np.int64
    lr, weight_decay, eps = make(1), make(0 if whole else 0.25), make(1 if whole else 2.0**-20)
    ours = outboard.AdamW([p], lr=lr, weight_decay=weight_decay, eps=eps, max_grad_norm=make(1 << 20))
    theirs = torch.optim.AdamW([q], lr=1.0, weight_decay=float(weight_decay), eps=float(eps), fused=True)
    for _ in range(2):
        p.grad = torch.randn(64)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    assert_same(p, q)


@pytest.mark.parametrize(
    "bad", [{"lr": "1e-3"}, {"lr": None}, {"betas": (0.9, "b")}, {"eps": "x"}, {"weight_decay": ()}]
)
def test_a_setting_that_is_no_number_is_refused_at_the_step(bad) -> None:
    p, q = (torch.ones(3, requires_grad=True) for _ in range(2))
    optimizer = outboard.AdamW([{"params": [p]}, {"params": [q]}])
    p.grad, q.grad = torch.ones(3), torch.ones(3)
    optimizer.param_groups[1].update(bad)
    with pytest.raises((ValueError, TypeError), match=next(iter(bad))):
        optimizer.step()
    assert_same(p, torch.ones(3), "a refused call changes nothing")
    assert not any(s["step"] for s in optimizer.state.values())


@pytest.mark.parametrize("changed", [{"lr": -1e-3}, {"weight_decay": -0.1}, {"lr": 0.0}, {"eps": 0.0}], ids=str)
def test_settings_changed_later_are_used_as_torch_uses_them(changed) -> None:
    """Nothing but the type of a setting is checked at a step: a scheduler may end an ulp below zero."""
    p, q = (torch.linspace(-1, 1, 64).requires_grad_() for _ in range(2))
    ours, theirs = outboard.AdamW([p]), torch.optim.AdamW([q], fused=True)
    for _ in range(3):
        p.grad = torch.randn(64)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        for optimizer in (ours, theirs):
            optimizer.param_groups[0].update(changed)
    assert_same(p, q)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threads": 0}, ValueError, "threads"),
        ({"threads": -1}, ValueError, "threads"),
        ({"threads": 1.5}, TypeError, "threads"),
        ({"threads": "2"}, TypeError, "threads"),
        ({"chunk_elems": 0}, ValueError, "chunk_elems"),
        ({"chunk_elems": -4}, ValueError, "chunk_elems"),
        ({"chunk_elems": 4096.0}, TypeError, "chunk_elems"),
        ({"state_dtype": FP16}, ValueError, "state_dtype.*float16"),
        ({"state_dtype": "bf16"}, ValueError, "state_dtype"),
        ({"master": "half"}, ValueError, "master.*'split'"),
        ({"mode": "fast"}, ValueError, "mode.*'auto'"),
        ({"mode": "gpu"}, outboard.DeviceError, "."),
        ({"nonfinite": "ignore"}, ValueError, "nonfinite.*'skip'"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm"),
        ({"max_grad_norm": math.nan}, ValueError, "max_grad_norm"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm"),
        ({"compute_grad_norm": "yes"}, (TypeError, ValueError), "compute_grad_norm"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 0.5}, TypeError, "seed"),
        ({"capturable": True}, ValueError, "capturable"),
        ({"differentiable": True}, ValueError, "differentiable"),
        ({"unknown": 1}, TypeError, "unknown"),
    ],
    ids=str,
)
def test_bad_options(options, error, message) -> None:
    with pytest.raises(error, match=message):
        outboard.AdamW([torch.ones(3, requires_grad=True)], **options)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("max_grad_norm", -1.0, ValueError),
        ("max_grad_norm", "x", TypeError),
        ("nonfinite", "never", ValueError),
        ("compute_grad_norm", 3, (TypeError, ValueError)),
    ],
)
def test_bad_options_set_later(name, value, error) -> None:
    optimizer = outboard.AdamW([torch.ones(3, requires_grad=True)])
    before = getattr(optimizer, name)
    with pytest.raises(error, match=name):
        setattr(optimizer, name, value)
    assert getattr(optimizer, name) == before


@pytest.mark.parametrize(("cls", "other", "value"), [(outboard.AdamW, "Adam", False), (outboard.Adam, "AdamW", True)])
def test_contradicting_weight_decay_rule(cls, other, value) -> None:
    """`decoupled_weight_decay` per optimizer and per group; a value that contradicts the class raises."""
    p = torch.ones(3, requires_grad=True)
    for make in (
        lambda: cls([p], decoupled_weight_decay=value),
        lambda: cls([{"params": [p], "decoupled_weight_decay": value}]),
    ):
        with pytest.raises(ValueError, match=f"decoupled_weight_decay.*outboard.{other}"):
            make()
    optimizer = cls([p], decoupled_weight_decay=not value)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is not value
    with pytest.raises(ValueError, match="decoupled_weight_decay"):
        optimizer.add_param_group({"params": [torch.ones(1)], "decoupled_weight_decay": value})
    assert len(optimizer.param_groups) == 1


def test_classes_and_signature() -> None:
    for ours, theirs in ((outboard.AdamW, torch.optim.AdamW), (outboard.Adam, torch.optim.Adam)):
        p = torch.ones(3, requires_grad=True)
        a, b = ours([p]), theirs([p])
        assert isinstance(a, torch.optim.Optimizer)
        for key, value in b.defaults.items():
            assert a.defaults[key] == value, key
        assert set(b.param_groups[0]) <= set(a.param_groups[0])
    assert issubclass(outboard.OutboardError, RuntimeError)


def test_torch_switches_are_accepted() -> None:
    p = torch.ones(3, requires_grad=True)
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False}):
        outboard.AdamW([p], **options)


# ---- split and full masters


def split(weight: torch.Tensor, residual: torch.Tensor, **options) -> tuple[outboard.AdamW, torch.Tensor]:
    p = leaf(weight)
    optimizer = outboard.AdamW([p], **options)
    optimizer.state[p]["residual"] = residual
    return optimizer, p


def test_decode_of_every_weight() -> None:
    """Decode: the residual counts as 0 where weight and residual cannot belong together.

    +-0 with a negative residual, +-inf with a positive one, NaN, and -32768 beside odd bits.
    """
    weights = from_bits(torch.arange(1 << 16), BF16)
    for residual in (0, 1, -1, 2, 12_345, -12_345, 32_767, -32_767, -32_768):
        residuals = torch.full((1 << 16,), residual, dtype=torch.int16)
        optimizer, p = split(weights, residuals)
        got = optimizer.master(p)
        assert_same(got, decode(weights, residuals), str(residual))
        assert bool((got.isnan() == weights.isnan()).all()), "a NaN that was none"
        assert_same(p, weights, "reading changes nothing")
        assert_same(optimizer.state[p]["residual"], residuals, "reading changes nothing")
    random = torch.randint(-(1 << 15), 1 << 15, (1 << 16,), dtype=torch.int16)
    optimizer, p = split(weights, random)
    assert_same(optimizer.master(p), decode(weights, random))


def masters() -> torch.Tensor:
    high = torch.arange(1 << 16) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x4000, 0xC000])
    return from_bits((high[:, None] + low).flatten(), FLOAT)


@pytest.mark.parametrize("master", ["split", "full"])
def test_encode_of_masters(master) -> None:
    """Encode: NaN gives weight 0x7FC0 and residual 0; else nearest even; a finite one that rounds to inf keeps its
    residual. `opt.load_master` sets weight and residual, `opt.master` returns the fp32 values.
    """
    values = masters()
    p = torch.zeros(values.shape, dtype=BF16, requires_grad=True)
    optimizer = outboard.AdamW([p], master=master)
    optimizer.load_master(p, values)
    weight, residual = encode(values)
    assert_same(p, weight)
    nan = values.isnan()
    assert bool((bits_of(p)[nan] == 0x7FC0).all())
    if master == "split":
        assert_same(optimizer.state[p]["residual"], residual)
        assert_same(optimizer.master(p), decode(weight, residual))
        largest = from_bits(torch.tensor(0x7F7FFFFF), FLOAT)
        at = (values == largest).nonzero()[0, 0]
        assert bool(p[at].isinf())
        assert float(optimizer.master(p)[at]) == float(largest)
    else:
        assert_same(optimizer.master(p), values)
        assert_same(optimizer.state[p]["master"], values)


def test_fp16_masters() -> None:
    values = masters()[:: 1 << 3]
    values = torch.cat([values, torch.randn(5000), torch.randn(5000) * 1e-6])
    p = torch.zeros(values.shape, dtype=FP16, requires_grad=True)
    optimizer = outboard.AdamW([p])
    optimizer.load_master(p, values)
    assert_same(p, round_to(values, FP16))
    assert_same(optimizer.master(p), values)


def test_master_of_fp32_is_the_weight() -> None:
    p = leaf(torch.randn(3, 4))
    optimizer = outboard.AdamW([p])
    copy = optimizer.master(p)
    assert_same(copy, p.detach())
    copy.zero_()
    assert bool((p != 0).all()), "a copy"
    optimizer.load_master(p, torch.full((3, 4), 2.5, dtype=torch.float64))
    assert_same(p, torch.full((3, 4), 2.5))


@pytest.mark.parametrize("dtype", [FLOAT, BF16, FP16], ids=str)
def test_load_master_refuses(dtype) -> None:
    p = leaf(torch.ones(3, 4, dtype=dtype))
    optimizer = outboard.AdamW([("layer.weight", p)])
    for bad, error in (
        (torch.ones(4, 3), ValueError),
        (torch.ones(12), ValueError),
        (torch.ones(3, 4, dtype=torch.int64), TypeError),
        ([1.0], TypeError),
        (None, TypeError),
    ):
        with pytest.raises(error, match=r"layer\.weight"):
            optimizer.load_master(p, bad)
    assert_same(p, torch.ones(3, 4, dtype=dtype))
    with pytest.raises((ValueError, KeyError)):
        optimizer.load_master(torch.ones(3, 4, dtype=dtype), torch.ones(3, 4))
    with pytest.raises((ValueError, KeyError)):
        optimizer.master(torch.ones(3, 4, dtype=dtype))


def test_load_master_bumps_the_version() -> None:
    """Updates bump the autograd version of the weight, so a stale backward fails as it does in torch."""
    p = leaf(torch.ones(3, dtype=BF16))
    optimizer = outboard.AdamW([p])
    version = p._version
    optimizer.load_master(p, torch.ones(3))
    assert p._version > version


def test_zeroed_weights_stay_numbers() -> None:
    """Zeroing a weight (padding row, pruning, LoRA B) after one split step made half of the masters NaN."""
    p = leaf(torch.randn(100_000).to(BF16))
    optimizer = outboard.AdamW([p])
    p.grad = torch.randn(100_000).to(BF16)
    optimizer.step()
    p.data.zero_()
    assert bool((optimizer.master(p) == 0).all() | (optimizer.master(p).abs() < 1e-38).all())
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert bool(p.isfinite().all())


def test_foreign_weights_keep_their_residual() -> None:
    """Weights written by others keep their residual (at most half a bf16 ulp off)."""
    for write in (
        lambda p, new: p.data.copy_(new),
        lambda p, new: torch.no_grad()(lambda: p.copy_(new))(),
        lambda p, new: setattr(p, "data", new.clone()),
    ):
        p = leaf(torch.randn(1000).to(BF16))
        optimizer = outboard.AdamW([p])
        p.grad = torch.randn(1000).to(BF16)
        optimizer.step()
        residual = optimizer.state[p]["residual"].clone()
        assert bool((residual != 0).any())
        new = torch.randn(1000).to(BF16)
        write(p, new)
        assert_same(optimizer.master(p), decode(new, residual))
        half_ulp = (new.float().abs() * 2**-8).clamp(min=1e-38)
        assert bool(((optimizer.master(p) - new.float()).abs() <= half_ulp).all())
        oracle = Oracle(new)
        oracle.residual, oracle.step_count = residual, 1
        oracle.exp_avg, oracle.exp_avg_sq = (optimizer.state[p][k].clone() for k in ("exp_avg", "exp_avg_sq"))
        p.grad = torch.randn(1000).to(BF16)
        optimizer.step()
        oracle.step(p.grad)
        oracle.assert_equal(optimizer, p)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_full_masters_follow(dtype) -> None:
    """Full masters follow too: where `round(master) != weight`, `master = upcast(weight)` before the update."""
    p = leaf(torch.randn(1000).to(dtype))
    optimizer, oracle = outboard.AdamW([p], master="full"), Oracle(p, master="full")
    for step in range(4):
        if step == 2:
            # Some written with other values, some with zero, some with the same.
            with torch.no_grad():
                p[:300] = torch.randn(300).to(dtype)
                p[300:400] = 0
                p[400:500] = -0.0
                oracle.weight = p.detach().clone()
            assert_same(optimizer.master(p), oracle.master)
        p.grad = torch.randn(1000).to(dtype)
        optimizer.step()
        oracle.step(p.grad)
        oracle.assert_equal(optimizer, p, f"step {step}")


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_weight_that_rounds_to_infinity_comes_back(dtype) -> None:
    """A finite master that rounds to inf keeps its residual (or its full master): it is finite again when it falls."""
    largest = torch.finfo(dtype).max
    # With these betas each update is lr, up or down.
    options = {"lr": largest * 0.75 * 2.0 ** (-8 if dtype is BF16 else -11), "betas": (0.0, 0.0), "weight_decay": 0.0}
    p = torch.full((8,), largest, dtype=dtype, requires_grad=True)
    optimizer, oracle = outboard.AdamW([p], **options), Oracle(p, **options)
    seen = []
    for sign in (-1, 1, 1):
        p.grad = torch.full((8,), float(sign), dtype=dtype)
        optimizer.step()
        oracle.step(p.grad)
        oracle.assert_equal(optimizer, p)
        assert bool(optimizer.master(p).isfinite().all())
        seen.append(bool(p.isinf().all()))
    assert seen[0]
    assert not seen[-1]


@pytest.mark.parametrize("dtype", [FLOAT, BF16, FP16], ids=str)
def test_nan_stays_and_infinities_stay(dtype) -> None:
    p = leaf(torch.tensor([math.nan, math.inf, -math.inf, 1.0, -0.0]).to(dtype))
    optimizer, oracle = outboard.AdamW([p]), Oracle(p)
    for _ in range(2):
        p.grad = torch.full((5,), 0.5, dtype=dtype)
        optimizer.step()
        oracle.step(p.grad)
    oracle.assert_equal(optimizer, p)
    assert p[0].isnan()
    assert p[1] == math.inf
    assert p[2] == -math.inf
    assert p[3:].isfinite().all()


def test_coupled_decay_is_skipped_when_zero() -> None:
    """Coupled decay is skipped when weight decay is 0 (`fma(inf, 0, g)` is NaN)."""
    p = leaf(torch.tensor([math.inf, 1.0]))
    optimizer, oracle = outboard.Adam([p], weight_decay=0.0), Oracle(p, weight_decay=0.0, decoupled=False)
    p.grad = torch.ones(2)
    optimizer.step()
    oracle.step(p.grad)
    oracle.assert_equal(optimizer, p)
    assert p.detach()[0] == math.inf
    q = leaf(torch.tensor([math.inf, 1.0]))
    theirs = torch.optim.Adam([q], weight_decay=0.0, fused=True)
    q.grad = torch.ones(2)
    theirs.step()
    assert_same(p, q)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_an_unsupported_dtype_is_refused_when_the_optimizer_is_made(dtype: torch.dtype) -> None:
    """fp64 parameters: one clear error, by name, before training starts; a frozen one may be listed."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)
    outboard.AdamW([("head.bias", parameter)])
    parameter.requires_grad_()
    with pytest.raises(TypeError, match=rf"head\.bias.*{dtype}.*torch\.bfloat16"):
        outboard.AdamW([("head.bias", parameter)])
    optimizer = outboard.AdamW([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(TypeError, match="float"):
        optimizer.add_param_group({"params": [parameter]})
    assert len(optimizer.param_groups) == 1
