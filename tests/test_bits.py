"""The same bits as torch's fused CPU AdamW and Adam, and as the recipe, whatever the threads, chunks and instruction
set.

Run as a program this file prints fingerprints of updates, which is how instruction-set levels are compared: a process
chooses its level once.

Over 500 lines: independent cases in the order of their table, read one at a time.
"""

from __future__ import annotations

import hashlib
import json
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import outboard
from oracle import (
    Oracle,
    assert_same,
    bits_of,
    decode,
    encode,
    from_bits,
    round_to,
    same_bits,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CLASSES = {"AdamW": (outboard.AdamW, torch.optim.AdamW), "Adam": (outboard.Adam, torch.optim.Adam)}
BETAS = [(0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.3, 0.99)]
STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "residual", "master")
#: torch's vector kernel handles 16 elements at most; fewer at the end of a tensor go through its scalar loop.
VECTOR = 16


def leaf(values: torch.Tensor) -> torch.Tensor:
    return values.detach().clone().requires_grad_()


def set_grad(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """Set a gradient of any dtype."""
    if grad.dtype is not parameter.dtype:
        parameter.grad_dtype = None
    parameter.grad = grad


def assert_like_torch(ours, theirs, ours_at, theirs_at, what: str) -> None:
    assert_same(ours_at, theirs_at, f"{what} weight")
    for name, wanted in theirs.state[theirs_at].items():
        if name == "step":
            assert float(ours.state[ours_at]["step"]) == float(wanted)
        else:
            assert_same(ours.state[ours_at][name], wanted, f"{what} {name}")


# ---- torch's bits


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["plain", "amsgrad"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", BETAS, ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_fp32_has_the_bits_of_torch_fused(name, betas, weight_decay, amsgrad, maximize) -> None:
    ours_class, torch_class = CLASSES[name]
    options = {
        "lr": 1e-2,
        "betas": betas,
        "weight_decay": weight_decay,
        "amsgrad": amsgrad,
        "maximize": maximize,
    }
    start = [torch.randn(size) for size in (1024, 4096, 20_000)]
    ours_at, theirs_at = [leaf(p) for p in start], [leaf(p) for p in start]
    ours, theirs = ours_class(ours_at, **options), torch_class(theirs_at, fused=True, **options)
    for step in range(20):
        for p, q in zip(ours_at, theirs_at, strict=True):
            # Magnitudes from 1e-9 to 1e3, so that eps counts in some places and not in others.
            p.grad = torch.randn(p.shape) * torch.logspace(-9, 3, p.numel()).roll(step * 37)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(ours_at, theirs_at, strict=True):
        assert_like_torch(ours, theirs, p, q, f"{p.numel()}")


EXTREMES = [
    {"betas": (0.0, 0.0)},
    {"betas": (0.99999999, 0.9999999999)},
    {"betas": (0.5000001, 0.1)},
    {"betas": (0.49999997, 0.999)},
    {"eps": 0.0},
    {"eps": 1e-41},
    {"eps": 1e10},
    {"lr": 1e-30},
    {"lr": 1e20},
    {"lr": 0.0, "weight_decay": 1.0},
    {"weight_decay": 1e5},
    {"weight_decay": 1e-12},
]


@pytest.mark.parametrize("first", [0, 999, 123_456, (1 << 24) - 8])
@pytest.mark.parametrize("options", EXTREMES, ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_extreme_settings_have_the_bits_of_torch_fused(name, options, first) -> None:
    ours_class, torch_class = CLASSES[name]
    start = torch.randn(1024)
    p, q = leaf(start), leaf(start)
    options = {"weight_decay": 0.1, **options}
    ours, theirs = ours_class([p], **options), torch_class([q], fused=True, **options)
    for step in range(4):
        p.grad = torch.randn(1024) * torch.logspace(-9, 3, 1024)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        if first and step == 0:
            ours.state[p]["step"].fill_(first)
            theirs.state[q]["step"].fill_(first)
    assert_like_torch(ours, theirs, p, q, str(options))


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(("name", "amsgrad"), [("AdamW", False), ("AdamW", True), ("Adam", False)])
def test_fp32_has_the_bits_of_torch_fused_up_to_ten_million(name, amsgrad) -> None:
    ours_class, torch_class = CLASSES[name]
    sizes = [10 << 20] if (name, amsgrad) == ("AdamW", False) else [1 << 20, (3 << 18) + VECTOR]
    for size in sizes:
        start, noise = torch.randn(size), torch.randn(size)
        p, q = leaf(start), leaf(start)
        options = {"weight_decay": 0.1, "amsgrad": amsgrad}
        ours, theirs = ours_class([p], **options), torch_class([q], fused=True, **options)
        for step in range(20 if size < 2 << 20 else 8):
            p.grad = q.grad = noise.roll(step * 999_983).mul_(1.0 + step)
            ours.step()
            theirs.step()
        assert_like_torch(ours, theirs, p, q, f"{size}")


@pytest.mark.parametrize("grad_dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("master", ["split", "full"])
@pytest.mark.parametrize("name", CLASSES)
def test_bf16_weights_are_torch_fused_on_fp32_copies_rounded(name, master, grad_dtype) -> None:
    """bf16 weights equal the reference run on fp32 copies with fp32 gradients and rounded, ties as documented."""
    ours_class, torch_class = CLASSES[name]
    start = torch.randn(65_536).to(BF16)
    p, q = leaf(start), leaf(start.float())
    options = {"lr": 3e-3, "weight_decay": 0.1}
    ours = ours_class([p], master=master, **options)
    theirs = torch_class([q], fused=True, **options)
    ties = 0
    for step in range(20):
        grad = (torch.randn(p.shape) * (1 + step)).to(grad_dtype)
        set_grad(p, grad)
        q.grad = grad.float()
        ours.step()
        theirs.step()
        assert_same(p, round_to(q, BF16), f"step {step}")
        if master == "split":
            moved = decode(*encode(q))
            ties += int((moved != q.detach()).sum())
            with torch.no_grad():
                q.copy_(moved)
        assert_same(ours.master(p), q.detach(), f"step {step} master")
    assert (ties > 0) == (master == "split"), "the case of a tie that rounds down did not occur"
    for key in ("exp_avg", "exp_avg_sq"):
        assert_same(ours.state[p][key], theirs.state[q][key], key)


@pytest.mark.parametrize("name", CLASSES)
def test_fp16_weights_are_torch_fused_on_fp32_copies_rounded(name) -> None:
    ours_class, torch_class = CLASSES[name]
    start = torch.randn(65_536).to(FP16)
    p, q = leaf(start), leaf(start.float())
    ours, theirs = ours_class([p], lr=3e-3), torch_class([q], fused=True, lr=3e-3)
    for step in range(20):
        p.grad = torch.randn(p.shape).to(FP16)
        q.grad = p.grad.float()
        ours.step()
        theirs.step()
        assert_same(p, round_to(q, FP16), f"step {step}")
    assert_same(ours.master(p), q.detach())


# ---- the recipe's bits


def run_against_oracle(
    sizes, *, dtype=FP32, grad_dtype=None, steps=20, ours=outboard.AdamW, chunk_elems=4096, **options
):
    """Step parameters of these sizes; the oracle holds all of them end to end."""
    parts = [torch.randn(size).to(dtype) for size in sizes]
    oracle_options = {key: value for key, value in options.items() if key != "threads"}
    oracle = Oracle(torch.cat(parts), decoupled=ours is outboard.AdamW, **oracle_options)
    parameters = [leaf(part) for part in parts]
    optimizer = ours(parameters, chunk_elems=chunk_elems, **options)
    for step in range(steps):
        grad = torch.randn(oracle.weight.shape) * torch.logspace(-8, 2, oracle.weight.numel())
        grad = (grad * (1 + step)).to(grad_dtype or dtype)
        for parameter, part in zip(parameters, grad.split(sizes), strict=True):
            set_grad(parameter, part.clone())
        optimizer.step()
        oracle.step(grad)
    assert_same(torch.cat([p.detach() for p in parameters]), oracle.weight, "weight")
    for key, wanted in (
        ("exp_avg", oracle.exp_avg),
        ("exp_avg_sq", oracle.exp_avg_sq),
        ("max_exp_avg_sq", oracle.max_exp_avg_sq),
        ("residual", oracle.residual),
        ("master", oracle.full),
    ):
        states = [optimizer.state[p] for p in parameters]
        assert all((key in state) == (wanted is not None) for state in states), key
        if wanted is not None:
            assert_same(torch.cat([state[key] for state in states]), wanted, key)


@pytest.mark.parametrize("betas", BETAS, ids=str)
@pytest.mark.parametrize("ours", [outboard.AdamW, outboard.Adam], ids=lambda c: c.__name__)
def test_sizes_1_to_70(ours, betas) -> None:
    for amsgrad, maximize in product([False, True], repeat=2):
        options = {"betas": betas, "weight_decay": 0.1, "amsgrad": amsgrad, "maximize": maximize}
        run_against_oracle(list(range(1, 71)), ours=ours, lr=1e-2, **options)


@pytest.mark.parametrize("grad_dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("dtype", "master"),
    [(FP32, "split"), (BF16, "split"), (BF16, "full"), (FP16, "split")],
    ids=["fp32", "bf16-split", "bf16-full", "fp16"],
)
def test_every_dtype_at_every_small_size(dtype, master, grad_dtype) -> None:
    run_against_oracle(list(range(1, 71)), dtype=dtype, grad_dtype=grad_dtype, master=master, lr=1e-2)


@pytest.mark.parametrize("threads", [1, 3])
def test_chunk_boundaries_and_odd_lengths(threads) -> None:
    sizes = [4095, 4096, 4097, 8191, 8193, 12_289, 5, 20_011]
    run_against_oracle(sizes, steps=4, threads=threads, lr=1e-2)
    run_against_oracle(sizes, steps=4, threads=threads, lr=1e-2, dtype=BF16, amsgrad=True)


def test_default_chunk_boundaries() -> None:
    chunk = 256 * 1024
    run_against_oracle([chunk - 1, chunk, chunk + 1], steps=2, chunk_elems=chunk)


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance of two non-negative fp32 tensors."""
    return (bits_of(a) - bits_of(b)).abs()


@pytest.mark.parametrize("sizes", [range(1, 71), (1027, 4095, 4097, 8193, 12_301)], ids=["small", "odd"])
@pytest.mark.parametrize("name", CLASSES)
def test_torch_fused_but_for_one_ulp_in_its_scalar_tail(name, sizes) -> None:
    ours_class, torch_class = CLASSES[name]
    start = [torch.randn(size) for size in sizes]
    ours_at, theirs_at = [leaf(p) for p in start], [leaf(p) for p in start]
    ours = ours_class(ours_at, weight_decay=0.1, chunk_elems=4096)
    theirs = torch_class(theirs_at, fused=True, weight_decay=0.1)
    seen = 0
    for step in range(20):
        for p, q in zip(ours_at, theirs_at, strict=True):
            p.grad = torch.randn(p.shape) * (1 + step)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        for p, q in zip(ours_at, theirs_at, strict=True):
            a, b = ours.state[p], theirs.state[q]
            whole = p.numel() // VECTOR * VECTOR
            assert_same(a["exp_avg"], b["exp_avg"])
            assert_same(a["exp_avg_sq"][:whole], b["exp_avg_sq"][:whole])
            assert_same(p[:whole], q[:whole])
            off = ulps(a["exp_avg_sq"], b["exp_avg_sq"])
            assert int(off.max()) <= 1
            seen += int(off.sum())
            # An ulp of v moves the update (of about lr) by about an ulp.
            assert torch.allclose(p, q, rtol=2**-22, atol=1e-3 * 2**-20)
            with torch.no_grad():
                q.copy_(p)
                b["exp_avg_sq"].copy_(a["exp_avg_sq"])
    assert seen > 0, "torch's tail has no ulp of its own any more: compare whole tensors"


HARD = [0, 1 << 31, 1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001]


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    weights=st.lists(st.sampled_from(HARD) | st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    grads=st.lists(st.sampled_from(HARD) | st.integers(0, 2**32 - 1), min_size=40, max_size=40),
    dtype=st.sampled_from([FP32, BF16, FP16]),
    master=st.sampled_from(["split", "full"]),
    betas=st.sampled_from([*BETAS, (0.0, 0.9)]),
    eps=st.sampled_from([0.0, 1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_any_bits_as_the_oracle(weights, grads, dtype, master, betas, eps, weight_decay, flags) -> None:
    """NaN, infinities, denormals and everything else, in weights and gradients."""
    amsgrad, maximize, decoupled = flags

    def make(patterns: list[int]) -> torch.Tensor:
        bits = torch.tensor(patterns)
        return from_bits(bits if dtype is FP32 else bits >> 16, dtype)

    options = {
        "lr": 0.1,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "amsgrad": amsgrad,
        "maximize": maximize,
        "master": master,
    }
    start = make(weights)
    p = leaf(start)
    optimizer = (outboard.AdamW if decoupled else outboard.Adam)([p], **options)
    oracle = Oracle(start, decoupled=decoupled, **options)
    for step in range(3):
        p.grad = make(grads[: len(weights)]).roll(step)
        optimizer.step()
        oracle.step(p.grad)
        oracle.assert_equal(optimizer, p, f"step {step}")


# ---- the same bits however the work is cut


def fingerprint(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for p in parameters:
        state = optimizer.state[p]
        for tensor in [p.detach(), *(state[key] for key in STATE if key in state)]:
            # NaNs are equal, whatever their bits.
            bits = bits_of(tensor)
            if tensor.is_floating_point():
                bits = bits.masked_fill(tensor.isnan(), -1)
            digest.update(bits.contiguous().numpy().tobytes())
    return digest.hexdigest()


def values(size: int, seed: int) -> torch.Tensor:
    """Ordinary numbers and, here and there, every kind of other ones."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(size, generator=generator) * torch.logspace(-6, 2, size)
    hard = from_bits(torch.tensor(HARD), FP32)
    places = torch.randperm(size, generator=generator)
    some, tiny = places[: min(size // 8, 300)], places[size // 2 : size // 2 + size // 8]
    tensor[some] = hard[torch.arange(len(some)) % len(hard)]
    # Denormals of every size, so that a flush anywhere shows.
    tensor[tiny] = from_bits(torch.randint(1, 0x007FFFFF, (len(tiny),), generator=generator), FP32)
    return tensor


SCENARIOS = {
    "fp32": {},
    "fp32 amsgrad maximize": {"amsgrad": True, "maximize": True, "weight_decay": 0.1},
    "fp32 bf16 moments": {"state_dtype": BF16},
    "fp32 clipped": {"max_grad_norm": 0.5, "nonfinite": "propagate"},
    "bf16": {"dtype": BF16},
    "bf16 full": {"dtype": BF16, "master": "full"},
    "bf16 bf16 moments amsgrad": {"dtype": BF16, "state_dtype": BF16, "amsgrad": True, "seed": 7},
    "bf16 fp32 gradients": {"dtype": BF16, "grad_dtype": FP32},
    "fp16": {"dtype": FP16},
    "fp16 bf16 gradients": {"dtype": FP16, "grad_dtype": BF16},
    "fp32 fp16 gradients": {"grad_dtype": FP16},
    "coupled": {"coupled": True, "weight_decay": 0.1},
    "coupled bf16": {"coupled": True, "weight_decay": 0.1, "dtype": BF16},
}
SIZES = [70_001, 4096, 1, 33, 9_973]


def run_scenario(name: str, **how) -> str:
    options = dict(SCENARIOS[name])
    dtype = options.pop("dtype", FP32)
    grad_dtype = options.pop("grad_dtype", dtype)
    make = outboard.Adam if options.pop("coupled", False) else outboard.AdamW
    finite = "max_grad_norm" in options
    parameters = [leaf(values(size, size).to(dtype)) for size in SIZES]
    # One that is not contiguous and one whose gradient is not.
    parameters.append(values(12_000, 3).to(dtype).view(100, 120).t()[3:90].detach().requires_grad_())
    optimizer = make(parameters, lr=1e-2, **options, **how)
    for step in range(3):
        for number, p in enumerate(parameters):
            grad = values(p.numel(), 1000 * step + number).to(grad_dtype)
            if finite:
                grad = grad.nan_to_num(0.5, 0.25, -0.25).clamp(-10, 10)
            grad = grad.view(p.shape) if number % 2 else grad.repeat_interleave(2)[::2].view(p.shape)
            set_grad(p, grad)
        optimizer.step()
    return fingerprint(optimizer, parameters) + str(optimizer.last_grad_norm)


@pytest.fixture(scope="module")
def usual() -> dict[str, str]:
    return {name: run_scenario(name, threads=2) for name in SCENARIOS}


@pytest.mark.parametrize("chunk_elems", [4096, 5000, 65_536, 4 << 20])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_and_chunks_change_no_bit(threads, chunk_elems, usual) -> None:
    """The same bits for threads 1, 2, 3, 8 and chunks of 4K to 4M elements, bf16 moments too."""
    for name, wanted in usual.items():
        assert run_scenario(name, threads=threads, chunk_elems=chunk_elems) == wanted, name


OTHER_LEVELS = sorted({*outboard.build_info()["isa_available"]} - {outboard.build_info()["isa"]})


@pytest.mark.parametrize("isa", OTHER_LEVELS)
def test_isa_levels_change_no_bit(isa, usual, python) -> None:
    """A CPU without AVX-512 or AVX2 (force each level off): the same bits, no illegal instruction."""
    program = """
        import json, outboard, test_bits
        found = {name: test_bits.run_scenario(name, threads=2) for name in test_bits.SCENARIOS}
        print(json.dumps({"isa": outboard.build_info()["isa"], "fingerprints": found}))
    """
    printed = json.loads(python(program, OUTBOARD_ISA=isa))
    assert printed["isa"] == isa
    assert printed["fingerprints"] == usual


def test_unknown_isa_level_is_refused(python) -> None:
    program = """
        import torch
        p = torch.ones(3, requires_grad=True)
        try:
            import outboard
            outboard.AdamW([p])
        except ValueError as error:
            print(error)
    """
    message = python(program, OUTBOARD_ISA="sse9")
    assert "sse9" in message
    for level in outboard.build_info()["isa_available"]:
        assert level in message


def test_fingerprints_can_differ(usual) -> None:
    assert run_scenario("bf16", threads=2, betas=(0.9, 0.9990001)) != usual["bf16"]
    assert len(set(usual.values())) == len(usual)


# ---- bf16 moments


def test_bf16_moments_are_neighbours_of_the_exact_ones_and_unbiased() -> None:
    """The step uses the unrounded m and v; storing rounds them stochastically."""
    size = 1 << 16
    p = leaf(torch.randn(size))
    optimizer = outboard.AdamW([p], lr=1e-2, state_dtype=BF16)
    oracle = Oracle(p, lr=1e-2)
    for step in range(3):
        p.grad = torch.randn(size)
        optimizer.step()
        oracle.step(p.grad)
        assert_same(p, oracle.weight, f"step {step}: the weight comes from the unrounded moments")
        for key in ("exp_avg", "exp_avg_sq"):
            stored, exact = optimizer.state[p][key], getattr(oracle, key)
            assert stored.dtype is BF16
            below = from_bits(bits_of(exact) >> 16, BF16)
            above = from_bits((bits_of(exact) >> 16) + 1, BF16)
            assert bool(((stored == below) | (stored == above)).all()), key
            ulp = (above.float() - below.float()).abs()
            up = (stored == above).double()
            chance = ((exact - below.float()).abs() / ulp).double()
            # The difference has variance chance * (1 - chance): five deviations.
            assert abs(float((up - chance).sum())) < 5 * float((chance * (1 - chance)).sum().sqrt())
            setattr(oracle, key, stored.float())
    # Draws for the two moments and for neighbouring elements are not the same.
    one, other = (optimizer.state[p][key].float() for key in ("exp_avg", "exp_avg_sq"))
    assert float(torch.corrcoef(torch.stack([one.abs(), other]))[0, 1]) < 0.99


def rounded_up(**options) -> dict[str, torch.Tensor]:
    """One step over equal elements with bf16 moments: which elements were rounded up."""
    p = torch.zeros(4096, requires_grad=True)
    optimizer = outboard.AdamW([p], state_dtype=BF16, **options)
    p.grad = torch.full((4096,), 1.2345)
    optimizer.step()
    found = {}
    for key in ("exp_avg", "exp_avg_sq"):
        stored = optimizer.state[p][key].float()
        assert len(stored.unique()) == 2
        found[key] = stored == stored.max()
    return found


def test_stochastic_rounding_draws_by_seed_moment_and_element() -> None:
    a, again, other = rounded_up(seed=1), rounded_up(seed=1, threads=3), rounded_up(seed=2)
    assert torch.equal(a["exp_avg"], again["exp_avg"])
    assert not torch.equal(a["exp_avg"], other["exp_avg"])
    # Independent: agreement as by chance (each is up with its own frequency).
    for x, y in (
        (a["exp_avg"], a["exp_avg_sq"]),
        (a["exp_avg"], other["exp_avg"]),
        (a["exp_avg"][:-1], a["exp_avg"][1:]),
    ):
        matrix = torch.stack([x.double(), y.double()])
        assert abs(float(torch.corrcoef(matrix)[0, 1])) < 5 / 64


def test_stochastic_rounding_draws_anew_each_step_and_parameter() -> None:
    p, q = (torch.zeros(4096, requires_grad=True) for _ in range(2))
    optimizer = outboard.AdamW([p, q], state_dtype=BF16, betas=(0.0, 0.0))
    seen = []
    for _ in range(2):
        for x in (p, q):
            x.grad = torch.full((4096,), 1.2345)
        optimizer.step()
        for x in (p, q):
            m = optimizer.state[x]["exp_avg"].float()
            assert len(m.unique()) == 2
            seen.append((m == m.max()).double())
    correlations = torch.corrcoef(torch.stack(seen)) - torch.eye(4)
    assert float(correlations.abs().max()) < 5 / 64


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_bf16_second_moment_decays_over_5000_steps(dtype) -> None:
    """With b2 = 0.999 round-to-nearest would never let v fall."""
    p = leaf(torch.ones(4096).to(dtype))
    optimizer = outboard.AdamW([p], lr=0.0, betas=(0.9, 0.999), state_dtype=BF16, threads=1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    start = float(optimizer.state[p]["exp_avg_sq"].float().mean())
    assert start == pytest.approx(1e-3, rel=1e-3)
    p.grad.zero_()
    for steps in (1000, 4000):
        for _ in range(steps):
            optimizer.step()
        now = float(optimizer.state[p]["exp_avg_sq"].double().mean())
        done = int(optimizer.state[p]["step"]) - 1
        assert now == pytest.approx(start * 0.999**done, rel=0.02)
    assert done == 5000


def test_bf16_moments_keep_infinities_and_nan() -> None:
    p = torch.ones(4096, requires_grad=True)
    optimizer = outboard.AdamW([p], state_dtype=BF16)
    p.grad = torch.ones(4096)
    p.grad[:1000], p.grad[1000:2000], p.grad[2000:3000] = float("inf"), float("nan"), 1e30
    optimizer.step()
    m, v = optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]
    assert bool((m[:1000] == float("inf")).all())
    assert bool((v[:1000] == float("inf")).all())
    assert bool(m[1000:2000].isnan().all())
    assert bool(v[1000:2000].isnan().all())
    assert bool(m[2000:].isfinite().all())
    assert bool((v[2000:3000] == float("inf")).all()), "(1e30)^2 is infinite in fp32"
    assert same_bits(m[3000:].float().mean(), m[3000:].float().mean())


# ---- the floating-point environment


@pytest.mark.parametrize("threads", [1, 5])
def test_flush_denormal_before_the_pool_exists_flushes_nothing(threads) -> None:
    """Threads inherit MXCSR: every job sets the default and restores the caller's."""
    start = from_bits(torch.randint(1, 0x007FFFFF, (50_001,)), FP32)
    grad = from_bits(torch.randint(1, 0x007FFFFF, (50_001,)), FP32)
    oracle = Oracle(start, lr=0.0, betas=(0.5, 0.9), amsgrad=True)
    for _ in range(2):
        oracle.step(grad)
    assert bool((oracle.exp_avg > 0).all())
    p = leaf(start)
    if not torch.set_flush_denormal(True):
        pytest.skip("torch.set_flush_denormal says that this CPU cannot flush denormals")
    tiny = from_bits(torch.tensor([1 << 20]), FP32)
    assert int(bits_of(tiny * 1.0)) == 0, "the caller flushes"
    optimizer = outboard.AdamW([p], lr=0.0, betas=(0.5, 0.9), amsgrad=True, threads=threads, chunk_elems=4096)
    p.grad = grad.clone()
    for _ in range(2):
        optimizer.step()
        assert int(bits_of(tiny * 1.0)) == 0, "the caller's mode is restored"
    norm = outboard.AdamW([p], lr=0.0, compute_grad_norm=True, threads=threads, chunk_elems=4096)
    norm.step()
    torch.set_flush_denormal(False)
    oracle.assert_equal(optimizer, p)
    assert norm.last_grad_norm == pytest.approx(float(torch.linalg.vector_norm(grad.double())), rel=1e-6, abs=0)
