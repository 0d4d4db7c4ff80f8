"""Gradients, accumulation, norms and what is not finite. Each docstring quotes its case or rule.

Over 500 lines: independent cases in the order of their table, read one at a time.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import outboard
from oracle import FLOAT, Oracle, assert_same, clip_factor, norm64

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = [FLOAT, BF16, FP16]
INF, NAN = math.inf, math.nan


def leaf(values: torch.Tensor) -> torch.Tensor:
    return values.detach().clone().requires_grad_()


def make(shapes, dtype: torch.dtype = FLOAT, **options):
    parameters = [leaf(torch.randn(shape).to(dtype)) for shape in shapes]
    return outboard.AdamW([(f"layer.{i}", p) for i, p in enumerate(parameters)], **options), parameters


def copies(optimizer, parameters):
    return [
        [
            p.detach().clone(),
            *(value.clone() for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)),
        ]
        for p in parameters
    ]


def assert_unchanged(optimizer, parameters, before) -> None:
    for now, old in zip(copies(optimizer, parameters), before, strict=True):
        for a, b in zip(now, old, strict=True):
            assert_same(a, b)


# ---- accumulation and norms


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulated_norm(dtype) -> None:
    """Accumulation: reported norm against `clip_grad_norm_` on the summed gradients: within 1e-6 relative of the
    float64 norm.
    """
    model = torch.nn.Sequential(torch.nn.Linear(70, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3)).to(dtype)
    optimizer = outboard.AdamW(model.parameters(), max_grad_norm=0.5)
    oracles = {p: Oracle(p) for p in model.parameters()}
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(4):
            model(torch.randn(9, 70).to(dtype)).float().square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        wanted = norm64(grads)
        optimizer.step()
        assert optimizer.last_grad_norm == pytest.approx(wanted, rel=1e-6, abs=0)
        assert wanted > 0.5
        for (p, oracle), grad in zip(oracles.items(), grads, strict=True):
            assert_same(p.grad, grad, "p.grad is not changed")
            oracle.step(grad, clip=clip_factor(0.5, optimizer.last_grad_norm))
            oracle.assert_equal(optimizer, p)
        if dtype is FLOAT:
            theirs = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert float(theirs) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_large_gradients(dtype) -> None:
    """torch's own norm: bf16 3.5e-3 off, fp32 of 64 Mi elements 5.1e-3: ours within 1e-6 relative of float64."""
    optimizer, (p, q) = make([(3_000_017,), (5,)], dtype, compute_grad_norm=True, lr=0.0)
    for scale in (1.0, 1e-7, 100.0):
        p.grad = (torch.rand(p.shape) * scale).to(dtype)
        q.grad = torch.full((5,), scale).to(dtype)
        optimizer.step()
        assert optimizer.last_grad_norm == pytest.approx(norm64([p.grad, q.grad]), rel=1e-6, abs=0)


def test_norm_beyond_fp32() -> None:
    """Squares over- and underflow fp32 long before a norm does."""
    optimizer, (p,) = make([(1000,)], compute_grad_norm=True)
    for value in (3e38, 1e20, 1e-20, 1e-38, 1e-45, 0.0):
        p.grad = torch.full((1000,), value)
        optimizer.step()
        assert optimizer.last_grad_norm == pytest.approx(norm64([p.grad]), rel=1e-6, abs=0)
    assert optimizer.stats()["skipped_steps"] == 0


def test_norm_has_the_same_bits_for_any_layout_chunk_and_thread() -> None:
    """Its tree is fixed by logical element index: the same bits for any strides, chunks and threads."""
    grad = torch.randn(301, 203) * torch.logspace(-6, 6, 203)
    wide = torch.empty(301, 300)
    wide[:, 7:210] = grad
    layouts = {
        "contiguous": grad,
        "transposed": grad.t().contiguous().t(),
        "columns": wide[:, 7:210],
        "every second": grad.repeat_interleave(2, 1)[:, ::2],
    }
    tail = torch.randn(5000)
    found = set()
    for parameter in (torch.zeros(301, 203), torch.zeros(203, 301).t(), torch.zeros(301, 220)[:, :203]):
        for value in layouts.values():
            for threads, chunk_elems in ((1, 4096), (2, 1 << 18), (3, 5000), (8, 777)):
                p, q = (
                    parameter.clone(memory_format=torch.preserve_format).requires_grad_(),
                    torch.zeros(5000).requires_grad_(),
                )
                optimizer = outboard.AdamW([p, q], compute_grad_norm=True, threads=threads, chunk_elems=chunk_elems)
                p.grad, q.grad = value, tail
                optimizer.step()
                found.add(optimizer.last_grad_norm)
    assert len(found) == 1
    assert found.pop() == pytest.approx(norm64([grad, tail]), rel=1e-6, abs=0)


def test_constant_gradient() -> None:
    """The same constant gradient for 100 steps: norm constant."""
    optimizer, (p,) = make([(30_000,)], max_grad_norm=1.0)
    norms = set()
    for _ in range(100):
        p.grad = torch.full((30_000,), 0.125)
        optimizer.step()
        norms.add(optimizer.last_grad_norm)
    assert norms == {math.sqrt(30_000) * 0.125}


def test_clip_factor_is_torchs() -> None:
    """The clip factor is torch's, `min(1, max_norm / (norm + 1e-6))`; both may change between steps."""
    optimizer, parameters = make([(100, 3), (7,)], BF16)
    oracles = [Oracle(p) for p in parameters]
    assert optimizer.last_grad_norm is None
    for max_norm, compute in (
        (None, False),
        (0.1, False),
        (1e9, False),
        (None, True),
        (0.0, False),
        (0.1, True),
        (INF, False),
    ):
        optimizer.max_grad_norm, optimizer.compute_grad_norm = max_norm, compute
        before = optimizer.last_grad_norm
        for p in parameters:
            p.grad = torch.randn(p.shape).to(BF16)
        optimizer.step()
        norm = norm64([p.grad for p in parameters])
        clip = 1.0
        if max_norm is None and not compute:
            assert optimizer.last_grad_norm == before, "no pass over the gradients was asked for"
        else:
            assert optimizer.last_grad_norm == pytest.approx(norm, rel=1e-6, abs=0)
            if max_norm is not None:
                clip = clip_factor(max_norm, optimizer.last_grad_norm)
        for p, oracle in zip(parameters, oracles, strict=True):
            oracle.step(p.grad, clip=clip)
            oracle.assert_equal(optimizer, p, f"{max_norm} {compute}")
        assert optimizer.stats()["last_grad_norm"] == optimizer.last_grad_norm


def test_max_grad_norm_takes_a_tensor() -> None:
    optimizer, (p,) = make([(10,)], max_grad_norm=torch.tensor(0.5))
    p.grad = torch.ones(10)
    optimizer.step()
    assert optimizer.max_grad_norm == 0.5


def test_norm_counts_what_is_stepped() -> None:
    """Parameters without a gradient do not count; frozen ones and zero-element ones do no harm."""
    optimizer, (p, q, r) = make([(10,), (20,), (0,)], compute_grad_norm=True)
    p.grad, r.grad = torch.full((10,), 3.0), torch.empty(0)
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(math.sqrt(90), rel=1e-12)
    p.grad = r.grad = None
    optimizer.step()
    assert optimizer.last_grad_norm == 0.0
    assert float(optimizer.state[q]["step"]) == 0


# ---- missing gradients


def test_missing_gradients() -> None:
    """Gradients None for some parameters on some steps: skipped; own step counts."""
    ours_at = [leaf(torch.randn(64)) for _ in range(5)]
    theirs_at = [leaf(p) for p in ours_at]
    ours, theirs = outboard.AdamW(ours_at), torch.optim.AdamW(theirs_at, fused=True)
    pattern = ["11111", "10101", "00000", "01110", "10000", "11111"]
    for present in pattern:
        for p, q, there in zip(ours_at, theirs_at, present, strict=True):
            p.grad = torch.randn(64) if there == "1" else None
            q.grad = p.grad.clone() if there == "1" else None
        ours.step()
        theirs.step()
    for number, (p, q) in enumerate(zip(ours_at, theirs_at, strict=True)):
        assert_same(p, q)
        assert float(ours.state[p]["step"]) == sum(row[number] == "1" for row in pattern)
        assert float(ours.state[p]["step"]) == float(theirs.state[q]["step"])


def test_no_gradients_at_all() -> None:
    optimizer, parameters = make([(3,), (4,)])
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.stats()["state_bytes"] == 0
    for p in parameters:
        assert p not in dict(optimizer.state_dict()["state"])


# ---- not finite


@pytest.mark.parametrize("value", [INF, -INF, NAN], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinite_gradient_with_a_norm(dtype, value) -> None:
    """+inf in one gradient at step 3, with `max_grad_norm` set: nothing changes, counted, reported."""
    optimizer, parameters = make([(5000,), (3, 3), (1,)], dtype, max_grad_norm=1.0, chunk_elems=4096)
    for step in range(1, 6):
        for p in parameters:
            p.grad = torch.randn(p.shape).to(dtype)
        if step == 3:
            parameters[0].grad[4999] = value
            before, versions = copies(optimizer, parameters), [p._version for p in parameters]
            with pytest.warns(RuntimeWarning, match="changed nothing"):
                optimizer.step()
            assert_unchanged(optimizer, parameters, before)
            assert [p._version for p in parameters] == versions
            assert not math.isfinite(optimizer.last_grad_norm)
        else:
            optimizer.step()
            assert math.isfinite(optimizer.last_grad_norm)
    assert optimizer.stats()["skipped_steps"] == 1
    assert optimizer.stats()["steps"] == 5
    assert float(optimizer.state[parameters[0]]["step"]) == 4


@pytest.mark.parametrize("value", [INF, -INF, NAN], ids=str)
def test_infinite_gradient_without_a_norm(value) -> None:
    """Without it as torch."""
    p, q = (torch.linspace(-1, 1, 64).requires_grad_() for _ in range(2))
    ours, theirs = outboard.AdamW([p]), torch.optim.AdamW([q], fused=True)
    for step in range(5):
        p.grad = torch.randn(64)
        if step == 2:
            p.grad[7] = value
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        assert_same(p, q)
    assert p[7].isnan()
    assert int(p.isnan().sum()) == 1
    assert ours.stats()["skipped_steps"] == 0


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("policy", ["skip", "raise", "propagate"])
def test_nonfinite_policies(policy, where) -> None:
    """`nonfinite="skip"|"raise"|"propagate"`, whether a norm is asked for or not; may change between steps."""
    for options in ({}, {"compute_grad_norm": True}, {"max_grad_norm": 1.0}):
        optimizer, parameters = make([(20_000,), (50,)], nonfinite=policy, chunk_elems=4096, **options)
        for p in parameters:
            p.grad = torch.randn(p.shape)
        optimizer.step()
        before = copies(optimizer, parameters)
        parameters[0].grad[{"first": 0, "middle": 11_111, "last": 19_999}[where]] = INF
        if policy == "skip":
            with pytest.warns(RuntimeWarning):
                optimizer.step()
            optimizer.step()  # warns once
            assert_unchanged(optimizer, parameters, before)
            assert optimizer.stats()["skipped_steps"] == 2
        elif policy == "raise":
            with pytest.raises(outboard.NonFiniteError, match=r"layer\.0"):
                optimizer.step()
            assert_unchanged(optimizer, parameters, before)
            optimizer.nonfinite = "propagate"
            optimizer.step()
            assert float(optimizer.state[parameters[0]]["step"]) == 2
        else:
            optimizer.step()
            assert float(optimizer.state[parameters[0]]["step"]) == 2
            if "max_grad_norm" not in options:
                assert int(parameters[0].isnan().sum()) == 1
            else:
                # torch's factor with an infinite norm: 0, and 0 * inf is NaN.
                assert parameters[0].isnan().any()
        assert issubclass(outboard.NonFiniteError, outboard.OutboardError)


@pytest.mark.parametrize("value", [INF, NAN], ids=str)
def test_clipping_by_a_norm_that_is_not_finite(value) -> None:
    """ "propagate" with `max_grad_norm`: torch's factor is 0 for an infinite norm and NaN for a NaN, not 1."""
    p, q = (torch.linspace(-1, 1, 64).requires_grad_() for _ in range(2))
    ours, theirs = outboard.AdamW([p], max_grad_norm=1.0, nonfinite="propagate"), torch.optim.AdamW([q], fused=True)
    p.grad = torch.randn(64)
    p.grad[3] = value
    q.grad = p.grad.clone()
    ours.step()
    torch.nn.utils.clip_grad_norm_([q], 1.0)
    theirs.step()
    assert_same(p, q)
    assert int(p.isnan().sum()) == (1 if value == INF else 64)


def test_skipping_from_the_first_step_on() -> None:
    optimizer, (p,) = make([(4,)], max_grad_norm=1.0)
    p.grad = torch.full((4,), NAN)
    with pytest.warns(RuntimeWarning):
        optimizer.step()
    assert float(optimizer.state[p]["step"]) == 0
    p.grad = torch.ones(4)
    oracle = Oracle(p)
    optimizer.step()
    oracle.step(p.grad, clip=clip_factor(1.0, optimizer.last_grad_norm))
    oracle.assert_equal(optimizer, p)


# ---- GradScaler


def scaled_run(cls, dtype: torch.dtype, clip: bool, **options):
    torch.manual_seed(11)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)).to(dtype)
    optimizer = cls(model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales, losses = [], []
    for step in range(8):
        optimizer.zero_grad()
        x = torch.randn(8, 16)
        with torch.autocast("cpu", dtype=FP16):
            loss = model(x.to(dtype)).float().square().mean()
        if step == 1:
            loss = loss * INF
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    return model, optimizer, scales, losses


@pytest.mark.parametrize("clip", [False, True], ids=["plain", "unscaled and clipped by torch"])
def test_grad_scaler(clip) -> None:
    """GradScaler with autocast fp16, overflow at step 2: skipped, scale halved, then as torch."""
    ours_at, ours, our_scales, our_losses = scaled_run(outboard.AdamW, FLOAT, clip)
    theirs_at, theirs, their_scales, their_losses = scaled_run(torch.optim.AdamW, FLOAT, clip, fused=True)
    assert our_scales == their_scales
    assert our_scales[:2] == [1024.0, 512.0]
    for p, q in zip(ours_at.parameters(), theirs_at.parameters(), strict=True):
        assert_same(p, q)
        assert_same(p.grad, q.grad, "unscaled gradients are written back, as torch does")
        assert float(ours.state[p]["step"]) == float(theirs.state[q]["step"]) == 7
    assert [x for x in our_losses if math.isfinite(x)] == [x for x in their_losses if math.isfinite(x)]
    assert ours.stats()["skipped_steps"] == 1


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_unscaling_is_a_division_and_is_written_back(grad_dtype) -> None:
    """Unscaling is a division, and torch writes the result back to `p.grad`; so do we when the gradient stays."""
    p = leaf(torch.randn(1000).to(BF16 if grad_dtype is BF16 else FLOAT))
    if grad_dtype is not p.dtype:
        p.grad_dtype = None
    optimizer, oracle = outboard.AdamW([p]), Oracle(p)
    scale = 3.0
    for _ in range(2):
        grad = (torch.randn(1000) * 8).to(grad_dtype)
        p.grad = grad.clone()
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
        optimizer.step()
        oracle.step(grad, grad_scale=scale)
        oracle.assert_equal(optimizer, p)
        assert_same(p.grad, (grad.float() / scale).to(grad_dtype))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor([scale]), torch.tensor([1.0])
    before = p.grad.clone()
    optimizer.step()
    oracle.assert_equal(optimizer, p)
    assert_same(p.grad, before, "a skipped step leaves the gradient")
    del optimizer.grad_scale, optimizer.found_inf
    optimizer.step()
    oracle.step(p.grad)
    oracle.assert_equal(optimizer, p)


def test_grad_scale_like_torch_fused() -> None:
    p, q = (torch.linspace(-1, 1, 64).requires_grad_() for _ in range(2))
    ours, theirs = outboard.AdamW([p], amsgrad=True), torch.optim.AdamW([q], amsgrad=True, fused=True)
    for scale, found in ((7.0, 0.0), (7.0, 1.0), (0.1, 0.0), (65536.0, 0.0)):
        p.grad = torch.randn(64)
        q.grad = p.grad.clone()
        for optimizer in (ours, theirs):
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(found)
            optimizer.step()
        assert_same(p, q)
        if not found:
            assert_same(p.grad, q.grad)
        assert float(ours.state[p]["step"]) == float(theirs.state[q]["step"])


def test_clipping_sees_unscaled_gradients() -> None:
    """With a GradScaler, `max_grad_norm` is about what is left after unscaling."""
    optimizer, (p,) = make([(100,)], max_grad_norm=1.0)
    oracle = Oracle(p)
    grad = torch.randn(100)
    p.grad = grad * 4096
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4096.0), torch.tensor(0.0)
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(norm64([grad]), rel=1e-6)
    oracle.step(grad * 4096, grad_scale=4096.0, clip=clip_factor(1.0, optimizer.last_grad_norm))
    oracle.assert_equal(optimizer, p)


def test_a_scaler_that_finds_inf_does_not_warn() -> None:
    """A scaler skips steps by design while it looks for its scale."""
    optimizer, (p,) = make([(10,)])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    p.grad = torch.full((10,), INF)
    scaler.scale(torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.stats()["skipped_steps"] == 1
    assert scaler.get_scale() == 512.0


def test_scaler_does_not_change_what_was_set_beside_it() -> None:
    """GradScaler sets and removes its attributes; the wrapper must be the object torch talks to."""
    optimizer, (p,) = make([(16,)])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    (scaler.scale(p.sum())).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    assert_same(p.grad, torch.ones(16))


# ---- refused


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_refused_gradients(kind) -> None:
    """Sparse gradient, complex parameter: clear error naming it."""
    good = leaf(torch.ones(3))
    bad = leaf(torch.ones(4, 4))
    optimizer = outboard.AdamW([("good", good), ("embed.weight", bad)])
    good.grad, bad.grad = torch.ones(3), torch.ones(4, 4)
    optimizer.step()
    before = copies(optimizer, [good, bad])
    bad.grad = None
    if kind == "sparse":
        bad.grad = torch.ones(4, 4).to_sparse()
    else:
        bad.grad_dtype = None
        bad.grad = torch.ones(4, 4, dtype=torch.complex64)
    with pytest.raises(TypeError, match=r"gradient of embed\.weight"):
        optimizer.step()
    assert_unchanged(optimizer, [good, bad], before)
    bad.grad = torch.ones(4, 4)
    optimizer.step()


def test_sparse_embedding() -> None:
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = outboard.AdamW(embedding.named_parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"weight.*sparse"):
        optimizer.step()


# ---- closure


def test_closure() -> None:
    """Closure: runs once, with gradients enabled; its loss is returned."""
    p, q = (torch.linspace(-1, 1, 64).requires_grad_() for _ in range(2))
    ours, theirs = outboard.AdamW([p]), torch.optim.AdamW([q], fused=True)
    calls = []

    def closure(optimizer, x):
        def run():
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = (x**2).sum()
            loss.backward()
            return loss

        return run

    for mode in (torch.enable_grad, torch.no_grad):
        calls.clear()
        with mode():
            loss = ours.step(closure(ours, p))
        assert calls == [True]
        with mode():
            wanted = theirs.step(closure(theirs, q))
        assert float(loss.detach()) == float(wanted.detach())
        assert_same(p, q)
    assert ours.step() is None


def test_an_exception_in_the_closure() -> None:
    optimizer, (p,) = make([(4,)])
    p.grad = torch.ones(4)
    before = p.detach().clone()

    def closure():
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        optimizer.step(closure)
    assert_same(p, before)
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 1


# ---- gradients of another dtype


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_another_dtype(dtype, grad_dtype) -> None:
    """fp32 / bf16 / fp16 parameters and gradients in any combination; DeepSpeed's gave garbage."""
    p = leaf(torch.randn(77, 30).to(dtype))
    p.grad_dtype = None
    optimizer, oracle = outboard.AdamW([p], max_grad_norm=5.0), Oracle(p)
    for number in range(4):
        # The dtype may change from step to step.
        kind = grad_dtype if number % 2 else dtype
        grad = torch.randn(77, 30).to(kind)
        p.grad = None
        p.grad = grad if number < 2 else grad.t().contiguous().t()
        optimizer.step()
        assert optimizer.last_grad_norm == pytest.approx(norm64([grad]), rel=1e-6)
        oracle.step(grad, clip=clip_factor(5.0, optimizer.last_grad_norm))
        oracle.assert_equal(optimizer, p)
