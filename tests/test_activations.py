"""`outboard.offload_activations`: gradients to the bit, whatever is saved and whenever backward comes.

Over 500 lines: independent cases, read one at a time.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import outboard
from lanes import LanesDevice
from outboard.bench.models import GPT, Shape


class Mixed(torch.nn.Module):
    """Saves views, transposes, buffers, integers and in-place results."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, 3 * width)
        self.norm = torch.nn.LayerNorm(width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.first(self.norm(x)).chunk(3, dim=-1)
        square = a.transpose(-1, -2) @ b
        picked = c.sort(dim=-1).values * self.scale
        inner = torch.relu_(picked @ square) + torch.nn.functional.dropout(c, 0.25)
        return x + inner.tanh().exp() * c[..., :1]


class Stack(torch.nn.Module):
    """Blocks behind each other."""

    def __init__(self, count: int = 4, block: Callable[[], torch.nn.Module] = Mixed) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def convolutions() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv1d(8, 8, 3, padding=1), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.MaxPool1d(3, 1, 1)
    )


def perceptron() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32), torch.nn.Tanh())


def twins(device: LanesDevice, make: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    model = make().to(device.device)
    return model, copy.deepcopy(model)


def gradients(model: torch.nn.Module, *inputs: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(*inputs).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right) > 0
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(one, other), index


def assert_empty(handle: outboard.ActivationOffload) -> None:
    """Nothing is on the host, and copies touched nothing in no order."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    stats = handle.stats()
    assert (stats["cargos"], stats["bytes"]) == (0, 0)
    assert (stats["pool"]["live"], stats["pool"]["pending"]) == (0, 0)
    for line in handle._lines.values():
        assert line.crossing_bytes == 0
        if line.device.type != "cuda":
            assert line.ferry.hazards() == []


OPTIONS: list[dict[str, Any]] = [
    {},
    {"min_bytes": 0, "keep_last": 0},
    {"min_bytes": 4000, "prefetch": 0},
    {"min_bytes": 4000, "prefetch": 3, "keep_last": 0},
    {"min_bytes": 1 << 30, "keep_last": 0},
    {"min_bytes": 2000, "packed": False},
    {"min_bytes": 1000, "max_crossing_bytes": 1, "keep_last": 0},
    {"min_bytes": 1000, "fraction": 0.5, "keep_last": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["mixed", "gpt", "convolutions"])
def test_gradients_have_the_same_bits(lanes_device: LanesDevice, kind: str, options: dict[str, Any]) -> None:
    shape = Shape(64, 4, 4, vocabulary=128, context=64)
    makers: dict[str, Callable[[], torch.nn.Module]] = {
        "mixed": Stack,
        "gpt": lambda: GPT(shape, dtype=torch.float32, device=torch.device("cpu")),
        "convolutions": lambda: Stack(3, convolutions),
    }
    plain, offloaded = twins(lanes_device, makers[kind])
    handle = outboard.offload_activations(offloaded, **options)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        inputs: list[torch.Tensor] = [torch.randn(4, 8, 32, generator=generator)]
        if kind == "gpt":
            inputs = [torch.randint(128, (2, 33), generator=generator) for _ in range(2)]
        inputs = [value.to(lanes_device.device) for value in inputs]
        assert_same(gradients(plain, *inputs, seed=seed), gradients(offloaded, *inputs, seed=seed))
    stats = handle.stats()
    if options.get("packed", True):
        assert stats["bytes_out"] > 0
    sent = [name for name, nbytes in stats["blocks"].items() if nbytes > 0]
    assert len(sent) <= len(stats["blocks"]) - options.get("keep_last", 1)
    assert_empty(handle)


def test_two_hundred_times(lanes_device: LanesDevice) -> None:
    plain, offloaded = twins(lanes_device, Stack)
    handle = outboard.offload_activations(offloaded, min_bytes=1000, keep_last=0)
    x = torch.randn(4, 8, 32, device=lanes_device.device)
    expected = [gradient.clone() for gradient in gradients(plain, x)]
    for _ in range(200):
        # The memory of activations that have left is written to at once.
        found = gradients(offloaded, x)
        torch.empty(1 << 16, device=lanes_device.device).fill_(float("nan"))
        assert_same(expected, found)
    stats = handle.stats()["pool"]
    assert stats["misses"] <= stats["hits"] / 50
    assert_empty(handle)


# ---- What is saved --------------------------------------------------------------------------------------------------


class Keep(torch.autograd.Function):
    """Saves what it is given, and notes what it gets back."""

    found: list[tuple[torch.Tensor, ...]]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Callable[[torch.Tensor], list[torch.Tensor]]) -> torch.Tensor:
        tensors = make(x.detach() * 2)
        ctx.save_for_backward(*tensors)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        Keep.found.append(ctx.saved_tensors)
        return grad, None


class Keeping(torch.nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Keep.apply(x, self.make)
        return result


def keep(
    device: LanesDevice, make: Callable[[torch.Tensor], list[torch.Tensor]], **options: Any
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor], outboard.ActivationOffload]:
    """Return what came back of tensors that a block has saved, what they were, and the handle."""
    originals: list[torch.Tensor] = []

    def noting(x: torch.Tensor) -> list[torch.Tensor]:
        made = make(x)
        originals.extend(tensor.clone() for tensor in made)
        geometry.extend((tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) for tensor in made)
        return made

    geometry: list[Any] = []
    model = torch.nn.Sequential(Keeping(noting), torch.nn.Identity())
    handle = outboard.offload_activations(model, [model[0]], keep_last=0, **options)
    Keep.found = []
    x = torch.randn(64, 64, device=device.device, requires_grad=True)
    y = model(x)
    # Whoever allocates now gets the memory that has been freed.
    torch.empty(1 << 16, device=device.device).fill_(float("nan"))
    y.sum().backward()
    (found,) = Keep.found
    Keep.found = []
    for tensor, (shape, stride, offset, dtype) in zip(found, geometry, strict=True):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (shape, stride, dtype)
        if offset <= tensor.numel():
            assert tensor.storage_offset() == offset
    for tensor, original in zip(found, originals, strict=True):
        assert torch.equal(tensor, original)
    return found, originals, handle


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_views_of_one_storage_travel_once_and_share_one_when_back(lanes_device: LanesDevice, min_bytes: int) -> None:
    found, _, handle = keep(lanes_device, lambda x: [x, x.t(), x[3:7, 2:5], x, x.view(-1)[100:]], min_bytes=min_bytes)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
    assert handle.stats()["bytes_out"] == 64 * 64 * 4
    del found
    assert_empty(handle)


def test_a_slice_moves_its_own_bytes(lanes_device: LanesDevice) -> None:
    def slices(x: torch.Tensor) -> list[torch.Tensor]:
        large = torch.zeros(1 << 18, device=x.device)
        large[200_000:200_100] = 3.0
        return [large[200_000:200_100], large[200_050:200_101]]

    found, _, handle = keep(lanes_device, slices, min_bytes=0)
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
    assert handle.stats()["bytes_out"] == 101 * 4


def test_dtypes_and_strides(lanes_device: LanesDevice) -> None:
    def various(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.bfloat16(),
            x > 0,
            x.long(),
            torch.view_as_complex(x.view(32, 64, 2)),
            x.double().expand(3, 64, 64),
            x.half()[:, ::3],
            x[:, :1],
            x.sum(),
            x[:0],
        ]

    for min_bytes in (0, 1 << 20):
        keep(lanes_device, various, min_bytes=min_bytes)


def test_what_stays(lanes_device: LanesDevice) -> None:
    model = Stack(3, lambda: torch.nn.Linear(32, 32)).to(lanes_device.device)
    handle = outboard.offload_activations(model, min_bytes=0, keep_last=0)
    x = torch.randn(16, 32, device=lanes_device.device)
    gradients(model, x)
    # Weights stay; a linear layer saves its input, and the last one's output is its caller's.
    assert handle.stats()["bytes_out"] == 3 * 16 * 32 * 4
    assert handle.stats()["blocks"] == {"blocks.0": 2048, "blocks.1": 2048, "blocks.2": 2048}


def test_buffers_of_the_model_stay(lanes_device: LanesDevice) -> None:
    class Rotated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Bilinear(8, 8, 8) for _ in range(3))
            self.register_buffer("table", torch.randn(100, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, self.table[:50])
            return x.sum()

    plain, offloaded = twins(lanes_device, Rotated)
    handle = outboard.offload_activations(offloaded, min_bytes=0, keep_last=0)
    x = torch.randn(50, 8, device=lanes_device.device)
    assert_same(gradients(plain, x), gradients(offloaded, x))
    # Each block's input.
    assert handle.stats()["bytes_out"] == 3 * 50 * 8 * 4
    assert_empty(handle)


def test_what_several_blocks_save_travels_once(lanes_device: LanesDevice) -> None:
    class Crossing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Bilinear(8, 8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            memory = memory * 2
            for block in self.blocks:
                x = block(x, memory)
            return x.sum()

    plain, offloaded = twins(lanes_device, Crossing)
    handle = outboard.offload_activations(offloaded, min_bytes=0, keep_last=0)
    x, memory = torch.randn(2, 50, 8, device=lanes_device.device).unbind()
    assert_same(gradients(plain, x, memory), gradients(offloaded, x, memory))
    # The memory once, and each block's own input.
    assert handle.stats()["bytes_out"] == 4 * 50 * 8 * 4
    assert_empty(handle)


def test_changes_in_place_raise_as_autograd_does(lanes_device: LanesDevice) -> None:
    class Changing(torch.nn.Module):
        early: bool

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(x * 2)
            y = kept[-1].exp() * kept[-1]
            if self.early:
                kept[-1].detach().add_(1)
            return y

    kept: list[torch.Tensor] = []
    for early in (True, False):
        model = torch.nn.Sequential(Changing(), torch.nn.Identity())
        model[0].early = early  # type: ignore[assignment]
        messages = []
        for offloads in (False, True):
            if offloads:
                outboard.offload_activations(model, [model[0]], min_bytes=0, keep_last=0)
            y = model(torch.randn(8, 8, device=lanes_device.device, requires_grad=True))
            if not early:
                kept[-1].detach().add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
                y.sum().backward()
            messages.append(str(raised.value))
        assert "is at version 1; expected version 0" in messages[0]
        assert "is at version 1; expected version 0" in messages[1]
        assert "saved in 0, torch.float32 (8, 8)" in messages[1]


# ---- When backward comes --------------------------------------------------------------------------------------------


def test_retained_graphs_and_double_backward(lanes_device: LanesDevice) -> None:
    plain, offloaded = twins(lanes_device, Stack)
    handle = outboard.offload_activations(offloaded, min_bytes=1000, keep_last=0)
    results = []
    for model in (plain, offloaded):
        torch.manual_seed(1)
        loss = model(torch.randn(4, 8, 32).to(lanes_device.device))
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        second = torch.autograd.grad(loss, parameters, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in second)
        third = torch.autograd.grad(penalty, parameters)
        results.append([*first, *(gradient.detach() for gradient in second), *third])
        del loss, second, penalty
    assert_same(*results)
    assert_empty(handle)


def test_several_forwards_before_a_backward(lanes_device: LanesDevice) -> None:
    plain, offloaded = twins(lanes_device, Stack)
    handle = outboard.offload_activations(offloaded, min_bytes=1000, keep_last=0)
    inputs = [torch.randn(4, 8, 32, device=lanes_device.device) for _ in range(4)]
    for order in ([0, 1, 2, 3], [3, 1, 2, 0]):
        found = []
        for model in (plain, offloaded):
            model.zero_grad()
            torch.manual_seed(2)
            losses = [model(x) for x in inputs]
            for index in order:
                losses[index].backward()
            found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
            del losses
        assert_same(*found)
    assert_empty(handle)


def test_blocks_by_themselves(lanes_device: LanesDevice) -> None:
    # As in stages of a pipeline: the model itself is never called.
    plain, offloaded = twins(lanes_device, Stack)
    handle = outboard.offload_activations(offloaded, min_bytes=1000, keep_last=0)
    inputs = [torch.randn(4, 8, 32, device=lanes_device.device, requires_grad=True) for _ in range(3)]
    found = []
    for model in (plain, offloaded):
        torch.manual_seed(3)
        outputs = [model.blocks[0](x) for x in inputs]  # type: ignore[index, operator]
        outputs = [model.blocks[1](x) for x in outputs]  # type: ignore[index, operator]
        found.append(list(torch.autograd.grad([x.sum() for x in outputs], inputs)))
        del outputs
    assert_same(*found)
    assert_empty(handle)


def test_backward_that_never_comes_and_failures_lose_nothing(lanes_device: LanesDevice) -> None:
    plain, offloaded = twins(lanes_device, Stack)
    handle = outboard.offload_activations(offloaded, min_bytes=1000, keep_last=0)
    x = torch.randn(4, 8, 32, device=lanes_device.device)
    offloaded(x)
    assert_empty(handle)
    failing = offloaded.blocks[2]  # type: ignore[index]
    hook = failing.norm.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("the model has failed")))
    for _ in range(3):
        with pytest.raises(KeyError, match="the model has failed"):
            offloaded(x)
    hook.remove()
    assert_empty(handle)
    hook = offloaded.blocks[1].norm.weight.register_hook(lambda _: 1 / 0)  # type: ignore[index]

    def fail_in_backward() -> None:
        with pytest.raises(ZeroDivisionError):
            offloaded(x).backward()

    # torch's queue of a thread keeps what an exception has left in it, and with it the graph, as long as the thread.
    thread = threading.Thread(target=fail_in_backward)
    thread.start()
    thread.join()
    hook.remove()
    assert_empty(handle)
    with torch.no_grad():
        offloaded(x)
    before = handle.stats()["bytes_out"]
    offloaded.eval()
    plain.eval()
    assert_same(gradients(plain, x), gradients(offloaded, x))
    assert handle.stats()["bytes_out"] > before
    assert_empty(handle)


def test_an_interrupt_in_a_block_leaves_no_hooks_behind(lanes_device: LanesDevice) -> None:
    plain, offloaded = twins(lanes_device, Stack)
    handle = outboard.offload_activations(offloaded, min_bytes=1000, keep_last=0)
    x = torch.randn(4, 8, 32, device=lanes_device.device)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = offloaded.blocks[1].norm.register_forward_pre_hook(interrupt)  # type: ignore[index]
    with pytest.raises(KeyboardInterrupt):
        offloaded(x)
    hook.remove()
    assert_same(gradients(plain, x), gradients(offloaded, x))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert_empty(handle)


def test_nothing_grows_over_fifty_steps(lanes_device: LanesDevice) -> None:
    _, model = twins(lanes_device, Stack)
    handle = outboard.offload_activations(model, min_bytes=1000, keep_last=0)
    x = torch.randn(4, 8, 32, device=lanes_device.device)
    held = []
    for _ in range(50):
        gradients(model, x)
        held.append(handle.stats()["pool"]["held"])
    assert held[3] == held[-1]
    assert_empty(handle)


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context")
@pytest.mark.parametrize("where", ["inside", "around", "selective"])
def test_checkpointing(lanes_device: LanesDevice, where: str) -> None:
    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mixed()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if where == "around":
                return self.inner(x)  # type: ignore[no-any-return]
            context: Any = {}
            if where == "selective":
                from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

                def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
                    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
                    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

                context = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}
            result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False, **context)
            return result

    class Outer(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if where == "around" else block(x)  # type: ignore[assignment]
            return x.square().mean()

    plain, offloaded = twins(lanes_device, lambda: Outer(3, Checkpointed))
    handle = outboard.offload_activations(offloaded, min_bytes=0, keep_last=0)
    x = torch.randn(4, 8, 32, device=lanes_device.device, requires_grad=True)
    for seed in range(2):
        assert_same(gradients(plain, x, seed=seed), gradients(offloaded, x, seed=seed))
    stats = handle.stats()
    if where == "around":
        # What checkpointing keeps is its own business.
        assert stats["bytes_out"] == 0
        assert stats["under_other_hooks"] > 0
    else:
        assert stats["bytes_out"] > 0
    assert_empty(handle)


def test_autocast(lanes_device: LanesDevice) -> None:
    plain, offloaded = twins(lanes_device, Stack)
    handle = outboard.offload_activations(offloaded, min_bytes=1000)
    x = torch.randn(4, 8, 32, device=lanes_device.device)
    for seed in range(2):
        with torch.autocast(lanes_device.device.type, torch.bfloat16):
            left = gradients(plain, x, seed=seed)
            assert_same(left, gradients(offloaded, x, seed=seed))
    assert_empty(handle)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks(lanes_device: LanesDevice) -> None:
    plain, offloaded = twins(lanes_device, lambda: Stack(3, perceptron))
    for model in (plain, offloaded):
        for index, block in enumerate(model.blocks):  # type: ignore[arg-type]
            model.blocks[index] = torch.compile(block, backend="aot_eager")  # type: ignore[index, operator]
    handle = outboard.offload_activations(offloaded, min_bytes=0, keep_last=0)
    x = torch.randn(4, 8, 32, device=lanes_device.device)
    for _ in range(2):
        assert_same(gradients(plain, x), gradients(offloaded, x))
    assert min(handle.stats()["blocks"].values()) > 0
    assert_empty(handle)


# ---- The pool, and errors -------------------------------------------------------------------------------------------


def test_models_share_a_pool_and_handles_end(lanes_device: LanesDevice) -> None:
    pool = outboard.HostPool()
    x = torch.randn(4, 8, 32, device=lanes_device.device)
    pairs = [twins(lanes_device, Stack) for _ in range(2)]
    with (
        outboard.offload_activations(pairs[0][1], min_bytes=1000, pool=pool) as first,
        outboard.offload_activations(pairs[1][1], min_bytes=1000, pool=pool) as second,
    ):
        for plain, offloaded in pairs:
            assert_same(gradients(plain, x), gradients(offloaded, x))
        assert first.pool is second.pool is pool
        sent = first.stats()["bytes_out"]
        assert sent > 0
        assert second.stats()["bytes_out"] == sent
        assert pool.stats()["hits"] > 0
        kept = pairs[0][1](x)
    kept.backward()
    assert_same(gradients(pairs[0][0], x), gradients(pairs[0][1], x))
    after = first.stats()["bytes_out"]
    gradients(pairs[0][1], x)
    assert first.stats()["bytes_out"] == after
    assert_empty(first)


def test_a_full_pool_says_what_did_not_fit_and_the_activations_are_still_there(lanes_device: LanesDevice) -> None:
    plain, offloaded = twins(lanes_device, Stack)
    pool = outboard.HostPool(max_bytes=20_000)
    handle = outboard.offload_activations(offloaded, min_bytes=1000, keep_last=0, pool=pool)
    x = torch.randn(4, 8, 32, device=lanes_device.device)
    with pytest.raises(outboard.ActivationError) as raised:
        gradients(offloaded, x)
    message = str(raised.value)
    for part in ("saved in blocks.", "torch.float32", "could not be copied to the host", "of 20000 bytes allowed"):
        assert part in message
    assert isinstance(raised.value.__cause__, outboard.PoolLimitError)
    del raised
    assert_empty(handle)
    small = Stack().to(lanes_device.device)
    outboard.offload_activations(small, min_bytes=1 << 30, pool=outboard.HostPool(max_bytes=100))
    with pytest.raises(outboard.ActivationError, match=r"a bucket of \d+ small tensors of blocks.0, torch.float32"):
        gradients(small, x)
    handle.remove()
    assert_same(gradients(plain, x), gradients(offloaded, x))


def test_what_is_on_its_way_is_capped(lanes_device: LanesDevice) -> None:
    _, model = twins(lanes_device, lambda: Stack(6))
    x = torch.randn(4, 8, 32, device=lanes_device.device)
    handle = outboard.offload_activations(model, min_bytes=0, keep_last=0, max_crossing_bytes=1)
    gradients(model, x)
    stats = handle.stats()
    # One block's, which is sent at once.
    assert stats["peak_crossing_bytes"] <= max(stats["blocks"].values())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"blocks": []}, ValueError),
        ({"blocks": ["layers.*"]}, ValueError),
        ({"blocks": "blocks.*"}, TypeError),
        ({"blocks": [3]}, TypeError),
        ({"blocks": [torch.nn.Identity()]}, ValueError),
        ({"blocks": ["blocks.0", "blocks.0.norm"]}, ValueError),
        ({"prefetch": -1}, ValueError),
        ({"keep_last": 1.5}, TypeError),
        ({"packed": "yes"}, ValueError),
        ({"pool": 3}, TypeError),
        ({"fraction": 1.5}, ValueError),
        ({"fraction": "half"}, TypeError),
    ],
    ids=str,
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        outboard.offload_activations(Stack(), **arguments)
    with pytest.raises(TypeError):
        outboard.offload_activations(torch.nn.Linear)  # type: ignore[arg-type]


def test_choices_of_blocks() -> None:
    model = Stack()
    names = ["blocks.1", "blocks.3"]
    for blocks in (names, [model.blocks[1], "*.3"], lambda name, _: name in names, ["blocks.[13]"]):
        assert list(outboard.offload_activations(model, blocks).stats()["blocks"]) == names
    assert list(outboard.offload_activations(model).stats()["blocks"]) == [f"blocks.{index}" for index in range(4)]
    with pytest.raises(ValueError, match="no blocks"):
        outboard.offload_activations(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("fraction", "keep_last", "expected"),
    [
        (1.0, 0, [0, 1, 2, 3, 4, 5]),
        (1.0, 2, [0, 1, 2, 3]),
        (0.5, 0, [0, 2, 4]),
        (0.4, 1, [0, 2]),
        (0.0, 1, []),
        (1, 9, []),
    ],
)
def test_a_fraction_is_evenly_spaced(
    lanes_device: LanesDevice, fraction: float, keep_last: int, expected: list[int]
) -> None:
    model = Stack(6).to(lanes_device.device)
    handle = outboard.offload_activations(model, fraction=fraction, keep_last=keep_last, min_bytes=0)
    gradients(model, torch.randn(4, 8, 32, device=lanes_device.device))
    sent = [index for index, nbytes in enumerate(handle.stats()["blocks"].values()) if nbytes > 0]
    assert sent == expected
    assert_empty(handle)


def test_in_host_memory_there_is_nothing_to_offload() -> None:
    model = Stack()
    handle = outboard.offload_activations(model, min_bytes=0, keep_last=0)
    gradients(model, torch.randn(4, 8, 32))
    assert handle.stats()["bytes_out"] == 0
