"""Random parameters, gradients, settings and sequences of calls against the oracle; guards around every tensor.

The examples are the same on every run. Values come from a seed: a failing example names it, shapes and calls shrink.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import outboard
from oracle import Oracle, assert_same, bits_of, clip_factor, from_bits, norm64

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [FP32, BF16, FP16]

settings.register_profile(
    "outboard",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
PROFILE = settings.get_profile("outboard")

SPECIAL = [
    *(0.0, -0.0, float("nan"), float("inf"), float("-inf"), 3.4e38, -3.4e38, 1e-45, -1e-39, 1.2e-38, 1e-20, 1e20),
    *(65504.0, 65520.0, 6e-8, 1.0, -1.0, 1.00390625, 1.01171875, 0.99609375),
]


def values(seed: int, shape: tuple[int, ...], special: bool) -> torch.Tensor:
    """fp32 values of mixed magnitudes; with `special`, one in four is NaN, infinite, denormal, huge or a tie."""
    generator = torch.Generator().manual_seed(seed)
    result = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 4 - 3)
    if special:
        choice = torch.randint(4 * len(SPECIAL), shape, generator=generator)
        table = torch.tensor(SPECIAL)
        result = torch.where(choice < len(SPECIAL), table[choice.clamp(max=len(SPECIAL) - 1)], result)
        random_bits = torch.randint(0, 1 << 32, shape, generator=generator)
        result = torch.where(choice == len(SPECIAL), from_bits(random_bits, FP32), result)
    return result


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in a buffer: its dimensions from the innermost outward, and the gaps between."""

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    offset: int
    expanded: int | None = None

    def strides(self, shape: tuple[int, ...]) -> list[int]:
        strides, reach = [0] * len(shape), 1
        for dim, gap in zip(self.order, self.gaps, strict=True):
            strides[dim] = reach + gap
            reach = strides[dim] * max(shape[dim], 1)
        if self.expanded is not None:
            strides[self.expanded] = 0
        return strides


class Guarded:
    """A tensor within a larger buffer, the rest of which nobody may write."""

    def __init__(self, value: torch.Tensor, layout: Layout) -> None:
        shape = tuple(value.shape)
        strides = layout.strides(shape)
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if value.numel() else 0
        self.buffer = torch.full((layout.offset + span + 21,), 0.123, dtype=value.dtype)
        self.view = self.buffer.as_strided(shape, strides, layout.offset)
        if layout.expanded is not None and value.numel():
            value = value.narrow(layout.expanded, 0, 1).expand(shape)
            self.view.narrow(layout.expanded, 0, 1).copy_(value.narrow(layout.expanded, 0, 1))
        else:
            self.view.copy_(value)
        own = torch.zeros(len(self.buffer), dtype=torch.bool)
        own.as_strided(shape, strides, layout.offset).fill_(True)
        self.guards = ~own
        self.before = bits_of(self.buffer)

    def check(self, what: str) -> None:
        now = bits_of(self.buffer)
        assert torch.equal(now[self.guards], self.before[self.guards]), f"{what}: wrote beside the tensor"

    def check_unchanged(self, what: str) -> None:
        assert torch.equal(bits_of(self.buffer), self.before), f"{what} was written to"


def order_of(tensor: torch.Tensor) -> list[int]:
    """The strides that matter."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@st.composite
def layouts(draw: st.DrawFn, dims: int, *, may_expand: bool = False) -> Layout:
    if draw(st.booleans()):
        return Layout(tuple(reversed(range(dims))), (0,) * dims, 0)
    order = tuple(draw(st.permutations(range(dims))))
    gaps = tuple(draw(st.integers(0, 2)) for _ in range(dims))
    expanded = draw(st.integers(0, dims - 1)) if may_expand and dims and draw(st.integers(0, 3)) == 0 else None
    return Layout(order, gaps, draw(st.integers(0, 9)), expanded)


SHAPES = st.one_of(
    st.lists(st.integers(1, 6), max_size=4).map(tuple),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(1, 70).map(lambda n: (n,)),
    st.sampled_from([(1024,), (1025,), (4095,), (4097,), (3, 700), (700, 3), (33, 65)]),
)
SEEDS = st.integers(0, 1 << 20)


@dataclass
class Tracked:
    """A parameter, its oracle and all buffers that it has had."""

    parameter: torch.nn.Parameter
    oracle: Oracle
    buffers: list[Guarded]
    grad: Guarded | None = None
    grads: list[tuple[Guarded, bool]] = field(default_factory=list)


@dataclass
class Machine:
    threads: int
    chunk_elems: int


MACHINES = st.builds(Machine, st.sampled_from([1, 2, 3]), st.sampled_from([1, 7, 64, 1000, 1024, 4096, 1 << 20]))
GROUPS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.1, 0.0, 1e-8]),
        "betas": st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.3, 0.99), (0.0, 0.999), (0.9, 0.0)]),
        "eps": st.sampled_from([1e-8, 1e-3, 0.0]),
        "weight_decay": st.sampled_from([0.0, 0.1, 1e-2]),
        "maximize": st.booleans(),
        "amsgrad": st.booleans(),
    }
)
CALLS = st.one_of(
    st.just(("step", None)),
    st.just(("step", None)),
    st.tuples(st.just("clip"), st.sampled_from([1.0, 0.0, 1e-3, 1e30])),
    st.tuples(st.just("scale"), st.sampled_from([1.0, 2.0, 3.0, 65536.0, 1e-2])),
    st.tuples(st.just("lr"), st.sampled_from([1e-2, 3e-4, 0.0])),
    st.tuples(st.just("overwrite"), SEEDS),
    st.tuples(st.just("move"), st.none()),
    st.tuples(st.just("reload"), MACHINES),
    st.just(("read", None)),
)


class Sequence:
    """One optimizer through a sequence of calls."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.special = self.draw(st.booleans(), label="special values")
        self.cls = self.draw(st.sampled_from([outboard.AdamW, outboard.Adam]))
        self.master = self.draw(st.sampled_from(["split", "full"]), label="master")
        self.machine = self.draw(MACHINES)
        self.groups: list[tuple[dict[str, Any], list[Tracked]]] = []
        for _ in range(self.draw(st.integers(1, 2), label="groups")):
            group = self.draw(GROUPS)
            self.groups.append((group, [self.make(group) for _ in range(self.draw(st.integers(1, 3)))]))
        self.optimizer = self.build()

    def make(self, group: dict[str, Any]) -> Tracked:
        shape, dtype = self.draw(SHAPES), self.draw(st.sampled_from(DTYPES))
        start = values(self.draw(SEEDS), shape, self.special).to(dtype)
        guarded = Guarded(start, self.draw(layouts(len(shape))))
        parameter = torch.nn.Parameter(guarded.view)
        parameter.grad_dtype = None
        options = {**group, "master": self.master, "decoupled": self.cls is outboard.AdamW}
        return Tracked(parameter, Oracle(start, **options), [guarded])

    def build(self) -> torch.optim.Optimizer:
        groups = [{**group, "params": [t.parameter for t in tracked]} for group, tracked in self.groups]
        machine = {"threads": self.machine.threads, "chunk_elems": self.machine.chunk_elems}
        return self.cls(groups, master=self.master, nonfinite="propagate", **machine)

    @property
    def all(self) -> list[Tracked]:
        return [tracked for _, group in self.groups for tracked in group]

    def give_gradients(self, scale: float | None) -> None:
        for tracked in self.all:
            tracked.grad = None
            if self.draw(st.integers(0, 4)) == 0:
                tracked.parameter.grad = None
                continue
            shape, dtype = tuple(tracked.parameter.shape), self.draw(st.sampled_from(DTYPES))
            value = values(self.draw(SEEDS), shape, self.special).to(dtype)
            layout = self.draw(layouts(len(shape), may_expand=scale is None))
            tracked.grad = Guarded(value, layout)
            tracked.parameter.grad = tracked.grad.view

    def step(self, *, max_norm: float | None = None, scale: float | None = None) -> None:
        self.give_gradients(scale)
        given = [t for t in self.all if t.grad is not None]
        grads = [t.grad.view.clone() for t in given if t.grad is not None]
        self.optimizer.max_grad_norm = max_norm
        if scale is not None:
            self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
        self.optimizer.step()
        if scale is not None:
            del self.optimizer.grad_scale, self.optimizer.found_inf
        clip = 1.0
        if max_norm is not None:
            norm, exact = self.optimizer.last_grad_norm, norm64(grads)
            assert norm is not None
            assert abs(norm - exact) <= 1e-6 * exact or norm == exact or (norm != norm and exact != exact)
            clip = float("nan") if norm != norm else clip_factor(max_norm, norm)
        for tracked, grad in zip(given, grads, strict=True):
            assert tracked.grad is not None
            if scale is None:
                tracked.grad.check_unchanged("a gradient")
            else:
                tracked.grad.check("a gradient")
                unscaled = (grad.float() / torch.tensor(scale)).to(grad.dtype)
                assert_same(tracked.grad.view, unscaled, "the unscaled gradient")
            tracked.oracle.step(grad, clip=clip, grad_scale=scale)

    def overwrite(self, seed: int) -> None:
        """Somebody else writes weights: some are zeroed, some replaced, some keep their residual."""
        for tracked in self.all:
            p = tracked.parameter.detach()
            mask = torch.rand(p.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
            p.copy_(torch.where(mask, values(seed, tuple(p.shape), False).to(p.dtype) * (seed % 3), p))
            tracked.oracle.weight = p.clone(memory_format=torch.contiguous_format)

    def move(self) -> None:
        """Parameters get other memory and other strides."""
        for tracked in self.all:
            if self.draw(st.booleans()):
                shape = tuple(tracked.parameter.shape)
                guarded = Guarded(tracked.parameter.detach(), self.draw(layouts(len(shape))))
                tracked.buffers[-1].before = bits_of(tracked.buffers[-1].buffer)
                tracked.buffers[-1].guards.fill_(True)  # what it has left is no longer its own
                tracked.buffers.append(guarded)
                tracked.parameter.data = guarded.view

    def reload(self, machine: Machine) -> None:
        """Save, build anew and load, on another number of threads and chunk size."""
        self.machine = machine
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        self.optimizer = self.build()
        self.optimizer.load_state_dict(torch.load(file, weights_only=True))

    def call(self, name: str, argument: Any) -> None:
        if name == "step":
            self.step()
        elif name == "clip":
            self.step(max_norm=argument)
        elif name == "scale":
            self.step(scale=argument)
        elif name == "lr":
            for (group, tracked), live in zip(self.groups, self.optimizer.param_groups, strict=True):
                group["lr"] = live["lr"] = argument
                for each in tracked:
                    each.oracle.lr = argument
        elif name == "overwrite":
            self.overwrite(argument)
        elif name == "move":
            self.move()
        elif name == "reload":
            self.reload(argument)
        else:
            assert len(self.optimizer.state) == len(self.all)
        self.check(name)

    def check(self, name: str) -> None:
        for number, tracked in enumerate(self.all):
            what = f"parameter {number} after {name}"
            for guarded in tracked.buffers:
                guarded.check(what)
            p = tracked.parameter
            assert_same(p, tracked.oracle.weight, f"{what}: weight")
            if tracked.oracle.step_count:
                tracked.oracle.assert_equal(self.optimizer, p, what)
                assert_same(self.optimizer.master(p), tracked.oracle.master, f"{what}: master")
                for key, tensor in self.optimizer.state[p].items():
                    if key != "step" and p.numel():
                        assert order_of(tensor) == order_of(torch.empty_like(p)), f"{what}: strides of {key}"


@settings(PROFILE, max_examples=200)
@given(st.data())
def test_any_sequence_of_calls(data: st.DataObject) -> None:
    """Shapes, strides, dtypes, settings and calls at random: every bit as the oracle's, no byte beside a tensor."""
    sequence = Sequence(data)
    for name, argument in data.draw(st.lists(CALLS, min_size=1, max_size=6), label="calls"):
        sequence.call(name, argument)


@settings(PROFILE, max_examples=60)
@given(st.data())
def test_machines_do_not_matter(data: st.DataObject) -> None:
    """bf16 moments with their random rounding too: other threads and chunks, save and load between, the same bits."""
    draw = data.draw
    group, master, seed = draw(GROUPS), draw(st.sampled_from(["split", "full"])), draw(SEEDS)
    shapes = draw(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=3))
    layout = [draw(layouts(len(shape))) for shape, _ in shapes]
    max_grad_norm = draw(st.sampled_from([None, 0.5]))
    steps = draw(st.integers(1, 4))

    def run(machines: list[Machine]) -> tuple[list[torch.Tensor], list[float | None]]:
        starts = [values(seed + i, shape, False).to(dtype) for i, (shape, dtype) in enumerate(shapes)]
        ps = [torch.nn.Parameter(Guarded(v, lay).view) for v, lay in zip(starts, layout, strict=True)]

        def build(machine: Machine) -> torch.optim.Optimizer:
            options = {"threads": machine.threads, "chunk_elems": machine.chunk_elems, "max_grad_norm": max_grad_norm}
            return outboard.AdamW(ps, master=master, state_dtype=BF16, seed=seed, **options, **group)

        optimizer, norms = build(machines[0]), []
        for step in range(steps):
            if step and len(machines) > 1:
                saved = optimizer.state_dict()
                optimizer = build(machines[step % len(machines)])
                optimizer.load_state_dict(saved)
            for i, p in enumerate(ps):
                p.grad = values(seed + 97 * step + i, tuple(p.shape), False).to(p.dtype)
            optimizer.step()
            norms.append(optimizer.last_grad_norm)
        return [t.detach() for p in ps for t in (p, *optimizer.state[p].values())], norms

    tensors, norms = run([Machine(1, 1 << 20)])
    others, other_norms = run(draw(st.lists(MACHINES, min_size=2, max_size=2)))
    assert other_norms == norms
    for index, (got, wanted) in enumerate(zip(others, tensors, strict=True)):
        assert_same(got, wanted, f"tensor {index}")


@settings(PROFILE, max_examples=60)
@given(st.data())
def test_norms(data: st.DataObject) -> None:
    """Within 1e-6 of the float64 norm, and the same bits wherever the gradients lie and whoever adds them up."""
    draw = data.draw
    shapes = draw(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=4))
    seed, scale = draw(SEEDS), draw(st.sampled_from([None, None, 3.0, 1024.0]))
    grads = [values(seed + i, shape, False).to(dtype) for i, (shape, dtype) in enumerate(shapes)]

    def norm(machine: Machine, strided: bool) -> float | None:
        ps = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes]
        optimizer = outboard.AdamW(
            ps, lr=0.0, compute_grad_norm=True, threads=machine.threads, chunk_elems=machine.chunk_elems
        )
        for p, grad in zip(ps, grads, strict=True):
            p.grad = Guarded(grad, draw(layouts(grad.dim()))).view if strided else grad.clone()
        if scale is not None:
            optimizer.grad_scale = torch.tensor(scale)
        optimizer.step()
        return optimizer.last_grad_norm

    first = norm(Machine(1, 1 << 20), strided=False)
    assert first is not None
    exact = norm64([grad.float() / (scale or 1.0) for grad in grads])
    assert abs(first - exact) <= 1e-6 * exact
    assert norm(draw(MACHINES), strided=True) == first
    assert sum(prod(shape) for shape, _ in shapes) > 0 or first == 0.0
