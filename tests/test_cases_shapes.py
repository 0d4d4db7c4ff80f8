"""Shapes and memory layouts that have gone wrong in other optimizers. Each docstring quotes its case."""

from __future__ import annotations

from math import prod

import pytest
import torch

import outboard
from oracle import FLOAT, Oracle, assert_same, ref

CHUNK = 4096
BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = [FLOAT, BF16, FP16]


def distinct(numel: int, dtype: torch.dtype, start: float = 0.5, stop: float = 4.0) -> torch.Tensor:
    """Values that differ from place to place as far as the dtype can tell, in an order that is not sorted."""
    ramp = torch.linspace(start, stop, numel, dtype=torch.float64)
    return ramp[torch.randperm(numel)].to(dtype)


def close_to_ref(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Every element as AdamW in float64, to within the rounding of the dtype."""
    ulp = {FLOAT: 2**-22, BF16: 2**-8, FP16: 2**-11}[got.dtype]
    error = (got.detach().double() - wanted).abs()
    limit = wanted.abs() * ulp + 1e-6
    assert bool((error <= limit).all()), (
        f"{int((error > limit).sum())} of {got.numel()} off, worst {float(error.max())}"
    )


def test_two_million_ones() -> None:
    """Two 1 Mi parameters of ones, gradients of ones, lr 0.01, 2 steps: equal to ref and to each other."""
    p, q = (torch.ones(1 << 20, requires_grad=True) for _ in range(2))
    optimizer = outboard.AdamW([p, q], lr=0.01)
    grads = [torch.ones(1 << 20)] * 2
    for grad in grads:
        p.grad, q.grad = grad.clone(), grad.clone()
        optimizer.step()
    assert_same(p, q)
    assert len(p.unique()) == 1
    close_to_ref(p, ref(torch.ones(1 << 20), grads, lr=0.01))


@pytest.mark.parametrize("chunk_elems", [CHUNK, 256 * 1024])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_16_bit_parameters_of_two_and_a_half_chunks(dtype, chunk_elems) -> None:
    """bf16 and fp16 parameters of 2.5 internal chunks with distinct values: every element as ref, the tail too."""
    size = chunk_elems * 5 // 2
    start, grad = distinct(size, dtype), distinct(size, dtype, -2, 2)
    p = start.clone().requires_grad_()
    optimizer = outboard.AdamW([p], lr=0.05, chunk_elems=chunk_elems)
    oracle = Oracle(start, lr=0.05)
    grads = [grad, grad.flip(0)]
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
        oracle.step(g)
    close_to_ref(p, ref(start, grads, lr=0.05))
    oracle.assert_equal(optimizer, p)
    assert bool((p[-CHUNK // 2 :] != start[-CHUNK // 2 :]).any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1])
def test_guard_bytes(numel, dtype) -> None:
    """numel = chunk-1, chunk, chunk+1, 2*chunk+1; guard bytes around the buffers: no guard byte touched.

    Buffers begin at every offset from an aligned address that the dtype allows up to 7 elements.
    """
    for offset in (0, 1, 2, 3, 7):
        guard = 64 + offset
        where = slice(guard, guard + numel)
        weights = torch.full((numel + 2 * guard,), 3.25, dtype=dtype)
        grads = torch.full((numel + 2 * guard,), -7.5, dtype=dtype)
        weights[where], grads[where] = distinct(numel, dtype), distinct(numel, dtype, -1, 1)
        before, grads_before = weights.clone(), grads.clone()
        p = weights[where].requires_grad_()
        p.grad = grads[where]
        optimizer = outboard.AdamW([p], chunk_elems=CHUNK, amsgrad=True)
        oracle = Oracle(before[where], amsgrad=True)
        for _ in range(2):
            optimizer.step()
            oracle.step(grads_before[where])
        oracle.assert_equal(optimizer, p, f"offset {offset}")
        weights = weights.detach()
        assert_same(weights[:guard], before[:guard], "guard in front")
        assert_same(weights[guard + numel :], before[guard + numel :], "guard behind")
        assert_same(grads, grads_before, "gradient")


def test_planes_are_each_others_guards() -> None:
    """Neighbouring parameters' state lies side by side in the arena: none is touched by another's update."""
    sizes = [CHUNK - 1, 1, CHUNK, 3, CHUNK + 1, 7, 2 * CHUNK + 1]
    parameters = [distinct(size, dtype).requires_grad_() for size in sizes for dtype in DTYPES]
    optimizer = outboard.AdamW(parameters, chunk_elems=CHUNK, amsgrad=True)
    oracles = {p: Oracle(p, amsgrad=True) for p in parameters}
    for step in range(3):
        for number, p in enumerate(parameters):
            p.grad = None
            if (number + step) % 3 != 0:
                p.grad = distinct(p.numel(), p.dtype, -1, 1)
                oracles[p].step(p.grad)
        optimizer.step()
        for p in parameters:
            if oracles[p].step_count:
                oracles[p].assert_equal(optimizer, p, f"{p.dtype} {p.numel()}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 1000), (1000, 3), (2, 3, 5), ()], ids=str)
def test_every_row_moves(shape, dtype) -> None:
    """Shapes (3,1000), (1000,3), (2,3,5), (): every row moves as ref."""
    start = distinct(prod(shape), dtype).view(shape)
    grads = [distinct(prod(shape), dtype, 1, 2).view(shape) for _ in range(3)]
    p = start.clone().requires_grad_()
    optimizer = outboard.AdamW([p], lr=0.1, chunk_elems=CHUNK)
    oracle = Oracle(start, lr=0.1)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
        oracle.step(grad)
    close_to_ref(p, ref(start, grads, lr=0.1))
    oracle.assert_equal(optimizer, p)
    assert bool((p != start).all())
    assert optimizer.state[p]["exp_avg"].shape == shape
    assert optimizer.state[p]["step"].shape == ()


# ---- gradients of other strides


def column_slice(grad: torch.Tensor) -> torch.Tensor:
    """Lay out a matrix as columns of a wider one."""
    wide = torch.full((grad.shape[0], grad.shape[1] + 17), 99.0, dtype=grad.dtype)
    wide[:, 5 : 5 + grad.shape[1]] = grad
    return wide[:, 5 : 5 + grad.shape[1]]


GRADS = {
    "column slice": column_slice,
    "transposed": lambda grad: grad.t().contiguous().t(),
    "every second": lambda grad: grad.repeat_interleave(2, 1)[:, ::2],
    "rows apart": lambda grad: torch.cat([grad, grad * 9], 1).view(grad.shape[0] * 2, -1)[::2],
    "offset": lambda grad: torch.cat([torch.ones(3, dtype=grad.dtype), grad.flatten()])[3:].view(grad.shape),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", GRADS)
def test_gradient_layouts(layout, dtype) -> None:
    """A gradient that is a column slice of a larger tensor: same as its contiguous copy."""
    start = distinct(90 * 101, dtype).view(90, 101)
    p, q = (start.clone().requires_grad_() for _ in range(2))
    ours, plain = outboard.AdamW([p], chunk_elems=CHUNK), outboard.AdamW([q])
    for _ in range(3):
        q.grad = distinct(90 * 101, dtype, -1, 1).view(90, 101)
        p.grad = GRADS[layout](q.grad)
        assert torch.equal(p.grad, q.grad)
        if layout != "offset":
            assert p.grad.stride() != q.grad.stride()
        ours.step()
        plain.step()
        assert_same(p, q)
    for key, value in plain.state[q].items():
        assert_same(ours.state[p][key], value, key)


def test_gradient_of_stride_100_1_1() -> None:
    """autograd's stride (100,1,1) for a (2,1,100) parameter: same as its contiguous copy."""
    p, q = (torch.linspace(-1, 1, 200).view(2, 1, 100).requires_grad_() for _ in range(2))
    ours, plain = outboard.AdamW([p]), outboard.AdamW([q])
    for _ in range(3):
        q.grad = torch.randn(2, 1, 100)
        p.grad = q.grad.clone().as_strided((2, 1, 100), (100, 1, 1))
        assert p.grad.stride() == (100, 1, 1)
        ours.step()
        plain.step()
    assert_same(p, q)
    assert ours.state[p]["exp_avg"].stride() == (100, 100, 1)


def test_expanded_gradient() -> None:
    """Gradients are only read, so one whose elements share memory (`loss = p.sum()`) is like any other."""
    p, q = (torch.linspace(-1, 1, 9000).view(90, 100).requires_grad_() for _ in range(2))
    ours, plain = outboard.AdamW([p], chunk_elems=CHUNK), outboard.AdamW([q])
    row = torch.randn(100)
    for grad in (torch.tensor(0.5).expand(90, 100), row.expand(90, 100), row[:90, None].expand(90, 100)):
        p.grad, q.grad = grad, grad.contiguous()
        ours.step()
        plain.step()
    assert_same(p, q)


# ---- parameters of other strides


def layouts(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Bases and parameters that are views of them."""
    image = distinct(2 * 3 * 20 * 30, dtype).view(2, 3, 20, 30)
    matrix = distinct(64 * 70, dtype).view(64, 70)
    last = image.contiguous(memory_format=torch.channels_last)
    volume = distinct(3 * 4 * 5 * 6 * 7, dtype).view(3, 4, 5, 6, 7)
    dense_volume = volume.contiguous(memory_format=torch.channels_last_3d)
    shared = distinct(200 * 70, dtype).view(200, 70)
    return {
        "transposed": (matrix, matrix.t()),
        "channels_last": (last, last),
        "channels_last_3d": (dense_volume, dense_volume),
        "base[:, 8:56]": (shared, shared[:, 8:56]),
        "base[1::3]": (shared, shared[1::3]),
        "base[:, ::2].t()": (shared, shared[:, ::2].t()),
        "permuted": (image, image.permute(3, 1, 0, 2)),
        "diagonal": (shared, shared[:70].diagonal()),
        "one column": (shared, shared[:, 3]),
        "one element": (shared, shared[17, 3]),
        "a slice of channels_last": (last, last[:, 1:, 2:, ::3]),
        "a dimension of size 1": (shared, shared[:, 8:9].unsqueeze(0)),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", list(layouts(FLOAT)))
def test_parameter_layouts(layout, dtype) -> None:
    """A parameter that is transposed, channels_last or `base[:, 8:56]`: as ref, neighbours untouched."""
    base, view = layouts(dtype)[layout]
    before = base.clone(memory_format=torch.preserve_format)
    mask = torch.zeros(base.untyped_storage().nbytes() // base.element_size(), dtype=torch.bool)
    mask = mask.as_strided(view.shape, view.stride(), view.storage_offset())
    mask.fill_(True)
    flat_mask = mask.as_strided((base.numel(),), (1,), 0)
    start = view.clone()
    p = view.detach().requires_grad_()
    assert p.data_ptr() == view.data_ptr()
    optimizer = outboard.AdamW([p], lr=0.05, chunk_elems=CHUNK, amsgrad=True)
    oracle = Oracle(start, lr=0.05, amsgrad=True)
    grads = [distinct(p.numel(), dtype, -1, 1).view(p.shape) for _ in range(3)]
    for number, grad in enumerate(grads):
        # One gradient that is contiguous, others of the parameter's strides.
        p.grad = grad.clone() if number == 1 else torch.empty_like(p).copy_(grad).detach()
        optimizer.step()
        oracle.step(grad)
    oracle.assert_equal(optimizer, p)
    if dtype is FLOAT:
        plain = torch.optim.AdamW([q := start.contiguous().requires_grad_()], lr=0.05, amsgrad=True)
        for grad in grads:
            q.grad = grad
            plain.step()
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-5)
        close_to_ref(optimizer.state[p]["exp_avg"], plain.state[q]["exp_avg"].double())
    memory = base.detach().as_strided((base.numel(),), (1,), 0)
    memory_before = before.as_strided((base.numel(),), (1,), 0)
    assert_same(memory[~flat_mask], memory_before[~flat_mask], "neighbours")
    assert bool((memory[flat_mask] != memory_before[flat_mask]).any())


def test_planes_have_the_strides_of_a_dense_parameter() -> None:
    """A plane takes the strides of a dense parameter when first bound, as torch's state does."""
    last = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    for view in (last, torch.randn(6, 7).t(), torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(9, 9)[:, 2:5]):
        p, q = view.clone().detach(), view.clone().detach()
        p, q = (torch.empty_strided(view.shape, view.stride()).copy_(x).requires_grad_() for x in (p, q))
        ours, theirs = outboard.AdamW([p], amsgrad=True), torch.optim.AdamW([q], amsgrad=True)
        p.grad = q.grad = torch.randn(view.shape)
        ours.step()
        theirs.step()
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            assert ours.state[p][key].stride() == theirs.state[q][key].stride(), (key, view.stride())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(1).expand(10),
        lambda: torch.zeros(10).expand(3, 10),
        lambda: torch.zeros(20).as_strided((5, 4), (2, 1)),
        lambda: torch.zeros(3, 1).expand(3, 4),
        lambda: torch.zeros(20).unfold(0, 5, 3),
    ],
    ids=["scalar", "rows", "windows", "columns", "unfold"],
)
@pytest.mark.parametrize("when", ["step", "state"])
def test_overlapping_parameter_is_refused(make, when) -> None:
    """A parameter that is expanded from a view; overlapping memory: a clear error."""
    bad = make().requires_grad_()
    good = torch.ones(5, requires_grad=True)
    optimizer = outboard.AdamW([("good", good), ("layer.bad", bad)])
    good.grad, bad.grad = torch.ones(5), torch.ones(bad.shape)
    with pytest.raises(ValueError, match=r"layer\.bad.*share memory"):
        optimizer.step() if when == "step" else optimizer.state
    assert_same(good, torch.ones(5), "a refused call changes nothing")
    assert bool((bad == 0).all())


def test_parameters_that_share_memory_are_refused() -> None:
    """Parameters whose memory overlaps are refused by name."""
    base = torch.zeros(10, 10)
    for first, second in (
        (base[:5], base[4:]),
        (base, base[3:4, 3:4]),
        (base[:, :5], base[2:3]),
        (base.flatten()[:7], base.flatten()[6:8]),
    ):
        p, q = first.detach().requires_grad_(), second.detach().requires_grad_()
        p.grad, q.grad = torch.ones(p.shape), torch.ones(q.shape)
        optimizer = outboard.AdamW([("one", p), ("two", q)])
        with pytest.raises(ValueError, match="one and two share memory"):
            optimizer.step()
        assert bool((base == 0).all())


def test_interleaved_parameters_are_accepted() -> None:
    """Views of one tensor that share no element are no overlap, however their spans interleave."""
    base = torch.linspace(-1, 1, 200).view(10, 20).clone()
    views = [base[:, :5], base[:, 5:13], base[:, 13:20:2], base[:, 14:20:2]]
    wanted = [view.clone() for view in views]
    parameters = [view.detach().requires_grad_() for view in views]
    optimizer = outboard.AdamW(parameters, lr=0.1)
    oracles = [Oracle(view, lr=0.1) for view in wanted]
    for _ in range(2):
        for p, oracle in zip(parameters, oracles, strict=True):
            p.grad = torch.randn(p.shape)
            oracle.step(p.grad)
        optimizer.step()
    for p, oracle in zip(parameters, oracles, strict=True):
        oracle.assert_equal(optimizer, p)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alternating_gradient_formats(dtype) -> None:
    """channels_last and contiguous gradients for the same parameter on alternate steps: as ref."""
    shape = (4, 6, 10, 12)
    start = distinct(prod(shape), dtype).view(shape)
    for memory_format in (torch.channels_last, torch.contiguous_format):
        p = start.clone(memory_format=memory_format).requires_grad_()
        optimizer = outboard.AdamW([p], lr=0.05, chunk_elems=CHUNK)
        oracle = Oracle(start, lr=0.05)
        grads = []
        for step in range(6):
            grad = distinct(prod(shape), dtype, -1, 1).view(shape)
            grads.append(grad)
            p.grad = grad.contiguous(memory_format=torch.channels_last if step % 2 else torch.contiguous_format)
            optimizer.step()
            oracle.step(grad)
        oracle.assert_equal(optimizer, p)
        if dtype is FLOAT:
            close_to_ref(p, ref(start, grads, lr=0.05))


def test_parameter_format_changes_between_steps() -> None:
    """When a parameter's strides change later (`.to(memory_format=...)`) its planes are reordered."""
    module = torch.nn.Conv2d(5, 7, 3)
    for dtype in (FLOAT, BF16):
        module = module.to(dtype)
        optimizer = outboard.AdamW(module.parameters(), lr=0.05, amsgrad=True)
        p = module.weight
        oracle = Oracle(p, lr=0.05, amsgrad=True)
        for memory_format in (
            torch.contiguous_format,
            torch.channels_last,
            torch.channels_last,
            torch.contiguous_format,
        ):
            module.to(memory_format=memory_format)
            assert module.weight is p
            assert p.is_contiguous(memory_format=memory_format)
            p.grad = torch.randn(p.shape).to(dtype)
            optimizer.step()
            oracle.step(p.grad)
            oracle.assert_equal(optimizer, p)
            assert optimizer.state[p]["exp_avg"].stride() == p.stride()
            assert_same(optimizer.master(p), oracle.master)


@pytest.mark.parametrize("where", ["first", "last", "between", "everywhere"])
def test_zero_element_parameters(where) -> None:
    """Zero-element parameters among 100 others, anywhere in the list: the others are updated."""
    full = [torch.full((1 + i % 7, 3), float(i), requires_grad=True) for i in range(100)]
    shapes = [(0,), (0, 3), (3, 0, 2)]
    empty = [torch.empty(shapes[i % 3], requires_grad=True) for i in range(101)]
    parameters = {
        "first": [*empty[:3], *full],
        "last": [*full, *empty[:3]],
        "between": [*full[:50], *empty[:3], *full[50:]],
        "everywhere": [p for pair in zip(empty, full, strict=False) for p in pair] + empty[100:],
    }[where]
    optimizer = outboard.AdamW(parameters, lr=0.1, max_grad_norm=1e9)
    oracles = {p: Oracle(p, lr=0.1) for p in full}
    for _ in range(2):
        for p in parameters:
            p.grad = torch.randn(p.shape)
            if p.numel():
                oracles[p].step(p.grad)
        optimizer.step()
    for p, oracle in oracles.items():
        oracle.assert_equal(optimizer, p)
    for p in parameters:
        assert optimizer.state[p]["exp_avg"].shape == p.shape
        assert float(optimizer.state[p]["step"]) == 2
    restored = outboard.AdamW(parameters, lr=0.1)
    restored.load_state_dict(optimizer.state_dict())
    restored.step()


def test_nothing_but_zero_elements() -> None:
    """Zero bytes to map: an optimizer of empty parameters alone steps and saves."""
    p = torch.empty(0, 4, requires_grad=True)
    optimizer = outboard.AdamW([p], compute_grad_norm=True)
    p.grad = torch.empty(0, 4)
    optimizer.step()
    assert optimizer.last_grad_norm == 0.0
    assert float(optimizer.state_dict()["state"][0]["step"]) == 1
    assert optimizer.stats()["elements"] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_bias_in_its_own_group(dtype) -> None:
    """A one-element bias in a group of its own: works."""
    weight = torch.randn(8, 8).to(dtype).requires_grad_()
    bias = torch.ones(1, dtype=dtype, requires_grad=True)
    optimizer = outboard.AdamW([{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}])
    oracles = {weight: Oracle(weight, weight_decay=0.1), bias: Oracle(bias, weight_decay=0.0)}
    for _ in range(3):
        for p, oracle in oracles.items():
            p.grad = torch.randn(p.shape).to(dtype)
            oracle.step(p.grad)
        optimizer.step()
    for p, oracle in oracles.items():
        oracle.assert_equal(optimizer, p)


def free_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return found["MemAvailable"]


def test_elements_beyond_2_31_of_their_storage() -> None:
    """More than 2^31 elements (where memory is short: so many apart): the tail is updated.

    Two rows of a tensor whose second begins beyond element 2^31: bf16, so beyond byte 2^32 too. Only the pages touched
    take memory.
    """
    apart = (1 << 31) + 5
    try:
        base = torch.empty(apart + 1000, dtype=BF16)
    except RuntimeError as error:
        pytest.skip(f"no address space for 4 GiB: {error}")
    p = base.as_strided((2, 1000), (apart, 1)).requires_grad_()
    with torch.no_grad():
        p.copy_(distinct(2000, BF16).view(2, 1000))
    grad_base = torch.empty(apart + 1000, dtype=BF16)
    p.grad = grad_base.as_strided((2, 1000), (apart, 1)).copy_(distinct(2000, BF16, -1, 1).view(2, 1000))
    optimizer, oracle = outboard.AdamW([p]), Oracle(p)
    optimizer.step()
    oracle.step(p.grad)
    oracle.assert_equal(optimizer, p)


@pytest.mark.slow
def test_more_than_2_31_elements() -> None:
    """More than 2^31 elements: the tail is updated."""
    numel = (1 << 31) + 10_007
    needed = numel * 10 + (4 << 30)
    if free_bytes() < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free memory, has {free_bytes() >> 30}")
    p = torch.zeros(numel, dtype=BF16, requires_grad=True)
    grad = torch.ones(1, dtype=BF16).expand(numel)
    p.grad = grad
    optimizer = outboard.AdamW([p], lr=0.5, state_dtype=BF16, weight_decay=0.0)
    optimizer.step()
    assert optimizer.stats()["elements"] == numel
    for where in (slice(0, 5000), slice((1 << 31) - 5000, (1 << 31) + 5000), slice(numel - 5000, numel)):
        assert bool((p[where] == -0.5).all())
        assert bool((optimizer.state[p]["exp_avg"][where] > 0).all())
