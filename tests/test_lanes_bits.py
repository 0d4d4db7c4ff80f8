"""Parameters on a device have the bits of the host optimizer, whichever lane, transfer, time and chunk it was."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import outboard
from lanes import Layer, Stack, Twin, TwinModel, is_pending, plain_grad, set_grad, train
from oracle import assert_same
from outboard import _roster

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = pytest.mark.timeout(60, method="thread")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MODES = ("cpu", "gpu", "auto")
TRANSFERS = ("staged", "zero_copy")
#: Above what is bundled and below, odd, one and none.
SIZES = (5, 70_001, 1, 0, 131_072, 33)


def mixed(number: int) -> torch.dtype:
    return (FP32, BF16, FP16)[number % 3]


# ---- the lanes' options change no bits


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("eager", ["auto", True, False, None], ids=["auto", "eager", "at step", "not attached"])
def test_modes_transfers_and_times(lanes_device, mode, transfer, eager) -> None:
    model = Stack(*SIZES, dtype=mixed).to(lanes_device.device)
    twin = TwinModel(model, lr=0.01)
    options = {} if eager is None else {"eager": eager}
    opt = outboard.AdamW(
        model.parameters(), lr=0.01, mode=mode, transfer=transfer, threads=2, chunk_elems=9000, **options
    )
    if eager is not None:
        opt.attach(model)
    train(model, opt, twin, 4)
    twin.check(opt)
    lanes = next(iter(opt.stats()["devices"].values()))
    assert (lanes["gpu_lane"]["chunks"] > 0) or mode != "gpu"
    assert (lanes["cpu_lane"]["chunks"] > 0) or mode != "cpu"
    assert lanes["gpu_lane"]["chunks"] == 0 or mode != "cpu"
    # All 4 steps with eager=True, the ones after the first with "auto".
    in_backward = {"auto": 3, True: 4}.get(eager, 0)
    assert opt.stats()["eager_updates"] == in_backward * sum(size > _roster.TINY_ELEMS for size in SIZES)


@pytest.mark.parametrize("eager", ["auto", False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_fifty_steps_of_tiny_and_huge_layers(lanes_device, mode, transfer, eager) -> None:
    model = Stack(7, 150_000, 64, 100_003, 1, 90_000, 300, dtype=lambda n: (BF16, FP32)[n % 2]).to(lanes_device.device)
    twin = TwinModel(model, lr=3e-3)
    opt = outboard.AdamW(
        model.parameters(), lr=3e-3, mode=mode, transfer=transfer, eager=eager, threads=2, chunk_elems=20_000
    ).attach(model)
    train(model, opt, twin, 50)
    twin.check(opt)


CHUNKS_AND_RINGS = [
    {"chunk_elems": 1_000},
    {"chunk_elems": 65_537},
    {"chunk_elems": 64, "sizes": (2_000, 131, 66_000)},
    {"chunk_elems": 17, "sizes": (65_600, 3)},
    {"device_ring_bytes": 1},
    {"host_ring_bytes": 1},
    {"device_ring_bytes": 300_001, "host_ring_bytes": 2_000_003, "chunk_elems": 12_345},
    {"max_waiting_bytes": 1, "chunk_elems": 8_000},
    {"pin": False},
    {"max_pinned_bytes": 1},
]


@pytest.mark.parametrize("options", CHUNKS_AND_RINGS, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.filterwarnings("ignore:.*may be pinned")
def test_chunks_and_rings(lanes_device, options, dtype, transfer) -> None:
    options = dict(options)
    sizes = options.pop("sizes", SIZES)
    model = Stack(*sizes, dtype=dtype).to(lanes_device.device)
    twin = TwinModel(model, lr=0.01)
    opt = outboard.AdamW(model.parameters(), lr=0.01, eager=True, threads=2, transfer=transfer, **options).attach(model)
    train(model, opt, twin, 2)
    twin.check(opt)


def test_many_parameters_of_every_size(lanes_device) -> None:
    sizes = [int(n) for n in torch.randint(0, 300, (400,))] + [70_000, 65_536, 65_537, 4_096]
    model = Stack(*sizes, dtype=mixed).to(lanes_device.device)
    twin = TwinModel(model, lr=0.01)
    opt = outboard.AdamW(model.parameters(), lr=0.01, threads=2, chunk_elems=30_000).attach(model)
    train(model, opt, twin, 3)
    twin.check(opt)


@pytest.mark.parametrize("chunk_elems", [None, 100])
@pytest.mark.parametrize("length", [65_535, 65_536, 65_537, 131_073])
def test_edges_of_bundles_and_chunks(lanes_device, chunk_elems, length) -> None:
    chunk = chunk_elems or length
    sizes = {length, chunk - 1, chunk, chunk + 1, 2 * chunk + 1}
    params = [lanes_device.parameter(torch.randn(n).to(dtype)) for n in sizes for dtype in (FP32, BF16)]
    twin = Twin(params)
    opt = outboard.AdamW(params, threads=2, chunk_elems=chunk_elems and 16_411)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        twin.step()
        opt.step()
    twin.check(opt)


# ---- dtypes and settings


SETTINGS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0},
    {"weight_decay": 0.3, "lr": 0.1, "betas": (0.3, 0.9)},
    {"amsgrad": True, "betas": (0.5, 0.9)},
    {"maximize": True},
    {"master": "full"},
    {"state_dtype": BF16, "seed": 7},
    {"state_dtype": BF16, "amsgrad": True, "master": "full", "maximize": True},
    {"cls": outboard.Adam},
    {"cls": outboard.Adam, "weight_decay": 0.2, "amsgrad": True},
    {"cls": outboard.Adam, "weight_decay": 0.2, "state_dtype": BF16, "master": "full"},
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_pair_of_dtypes_and_gradients_that_change_theirs(lanes_device, settings, mode) -> None:
    settings = {"lr": 0.01, **settings}
    cls = settings.pop("cls", outboard.AdamW)
    sizes, dtypes = (70_000, 700), (FP32, BF16, FP16)
    params = [lanes_device.parameter(torch.randn(n).to(dtype)) for n in sizes for dtype in dtypes for _ in dtypes]
    twin = Twin(params, cls, **settings)
    opt = cls(params, mode=mode, threads=2, chunk_elems=33_000, **settings)
    for step in range(4):
        for number, p in enumerate(params):
            grad = torch.randn(p.shape, device=p.device) * 10.0 ** (step - 2)
            set_grad(p, grad.to(dtypes[(number + step) % 3]))
        twin.step()
        opt.step()
    twin.check(opt)


@pytest.mark.parametrize("eager", [True, False])
def test_settings_of_several_groups_attached(lanes_device, eager) -> None:
    model = Stack(70_000, 20, 90_000, 3, dtype=BF16).to(lanes_device.device)
    settings = [{"lr": 0.1}, {"weight_decay": 0.5}, {"betas": (0.1, 0.2)}, {"amsgrad": True, "eps": 1e-3}]
    twin = TwinModel(model)
    for group, extra in zip(list(model.parameters()), settings, strict=True):
        del group, extra
    groups = [{"params": [p], **extra} for p, extra in zip(model.parameters(), settings, strict=True)]
    twin.optimizer.param_groups.clear()
    for p, extra in zip(twin.twin.params, settings, strict=True):
        twin.optimizer.add_param_group({"params": [p], **extra})
    opt = outboard.AdamW(groups, threads=2, eager=eager, chunk_elems=30_000).attach(model)
    train(model, opt, twin, 4)
    twin.check(opt)


def test_values_that_are_not_ordinary(lanes_device) -> None:
    """Infinities, NaN, zeros of both signs and subnormal numbers, in weights and gradients."""
    values = torch.tensor([0.0, -0.0, 1e-40, -1e-45, 1.0, -3e38, float("inf"), float("-inf"), float("nan"), 65504.0])
    for mode in MODES:
        grads = values.repeat_interleave(len(values))
        params = [lanes_device.parameter(values.repeat(len(values)).to(dtype)) for dtype in (FP32, BF16, FP16)]
        twin = Twin(params, lr=0.1)
        opt = outboard.AdamW(params, lr=0.1, mode=mode, threads=1)
        for step in range(3):
            for p in params:
                p.grad = lanes_device.put(grads.roll(step)).to(p.dtype)
            twin.step()
            opt.step()
        twin.check(opt, mode)


def test_weights_written_by_others_between_steps(lanes_device) -> None:
    """The master follows: zeroed, rescaled, and nudged by less than the residual holds."""
    params = [lanes_device.parameter(torch.randn(70_000).to(dtype)) for dtype in (BF16, FP16, FP32)]
    for master in ("split", "full"):
        twin = Twin(params, lr=0.05, master=master)
        opt = outboard.AdamW(params, lr=0.05, master=master, threads=2)
        for step in range(5):
            for p in params:
                p.grad = torch.randn_like(p)
            twin.step()
            opt.step()
            with torch.no_grad():
                for p in (*params, *twin.params):
                    p[step * 100 : step * 100 + 50].zero_()
                    p[-500:] *= 1.5
        twin.check(opt, master)


# ---- shapes and strides


def strided(kind: str, base: torch.Tensor) -> torch.Tensor:
    """Return a view of 40 x 64 (or of as many) elements of a guarded buffer."""
    flat = base[1:-1]
    if kind == "columns":
        return flat[: 40 * 100].view(40, 100)[:, 8:72]
    if kind == "transposed":
        return flat[: 40 * 64].view(64, 40).t()
    if kind == "every second":
        return flat[: 2 * 40 * 64].view(40, 128)[:, ::2]
    if kind == "channels_last":
        return flat[: 40 * 64].view(5, 4, 16, 8).permute(0, 3, 1, 2)
    if kind == "scalar":
        return flat[3]
    assert kind == "offset"
    return flat[7 : 7 + 40 * 64]


KINDS = ("columns", "transposed", "every second", "channels_last", "scalar", "offset")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attached", [False, True], ids=["plain", "attached"])
def test_strided_parameters_and_their_neighbours(lanes_device, mode, attached) -> None:
    """Guards around and between the elements are never written."""
    bases, params = [], []
    for kind, dtype in product(KINDS, (FP32, BF16, FP16)):
        base = lanes_device.put(torch.full((8_000,), 7.25, dtype=dtype))
        view = strided(kind, base)
        view.copy_(torch.randn(view.shape))
        bases.append((base, base.clone()))
        params.append(torch.nn.Parameter(view))
    twin = Twin(params, lr=0.01)
    opt = outboard.AdamW(params, lr=0.01, mode=mode, threads=2)
    model = torch.nn.Module()
    model.list = torch.nn.ParameterList(params)
    if attached:
        opt.attach(model)
    for _ in range(3):
        for p in params:
            set_grad(p, torch.randn(p.shape, device=p.device).to(p.dtype))
        twin.step()
        opt.step()
    twin.check(opt)
    for (base, before), p in zip(bases, params, strict=True):
        untouched = torch.ones(base.shape, dtype=torch.bool, device=base.device)
        untouched.as_strided(p.shape, p.stride(), p.storage_offset()).fill_(False)
        assert_same(base[untouched].cpu(), before[untouched].cpu(), f"{tuple(p.stride())}")


@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradients_of_other_strides(lanes_device, clip) -> None:
    """Column slices, transposed, expanded and of alternating memory formats, with the norm over logical elements."""
    p = lanes_device.parameter(torch.randn(6, 8, 40, 64))
    q = lanes_device.parameter(torch.randn(300, 256).to(BF16))
    params = [p, q]
    twin = Twin(params, lr=0.01, max_grad_norm=clip)
    opt = outboard.AdamW(params, lr=0.01, max_grad_norm=clip, threads=2, chunk_elems=20_000)
    for step in range(6):
        wide = torch.randn(300, 400, device=q.device)
        q_grads = [wide.to(BF16)[:, 50:306], wide.to(BF16)[:, :256], wide[:1, :256].expand(300, 256).to(BF16)]
        q_grads += [wide[:1, :256].to(BF16).expand(300, 256), torch.randn(256, 300, device=q.device).to(BF16).t()]
        q.grad = q_grads[step % 5]
        grad = torch.randn(p.shape, device=p.device)
        p.grad = grad.contiguous(memory_format=torch.channels_last) if step % 2 else grad
        twin.step()
        opt.step()
        assert opt.last_grad_norm == twin.optimizer.last_grad_norm
    twin.check(opt)


def test_autograds_odd_strides_in_backward(lanes_device) -> None:
    """A convolution's weight gradient, and the (100, 1, 1) of a (2, 1, 100) parameter."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = torch.nn.Parameter(torch.randn(700, 1, 100))
            self.wide = torch.nn.Parameter(torch.randn(300, 256).t().contiguous().t())

        def loss(self, step: int) -> torch.Tensor:
            return (self.odd.transpose(0, 2) ** 2).sum() * 0.1 + (self.wide.t() * (step + 1)).tanh().sum()

    model = Model().to(lanes_device.device)
    twin = TwinModel(model, lr=0.01)
    opt = outboard.AdamW(model.parameters(), lr=0.01, threads=2, eager=True).attach(model)
    train(model, opt, twin, 3)
    twin.check(opt)


def test_overlapping_memory_is_refused_by_name(lanes_device) -> None:
    good = lanes_device.parameter(torch.ones(5))
    expanded = torch.nn.Parameter(lanes_device.put(torch.ones(1)).expand(5))
    opt = outboard.AdamW([("good", good), ("expanded", expanded)])
    good.grad = torch.ones_like(good)
    expanded.grad = lanes_device.put(torch.ones(5))
    with pytest.raises(ValueError, match=r"expanded.*share memory"):
        opt.step()
    assert_same(good.detach().cpu(), torch.ones(5))
    base = lanes_device.put(torch.ones(10))
    twice = [("first", torch.nn.Parameter(base[:6])), ("second", torch.nn.Parameter(base[5:]))]
    opt = outboard.AdamW(twice)
    for _, p in twice:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"first and second share memory"):
        opt.step()
    assert_same(base.cpu(), torch.ones(10))


@pytest.mark.parametrize("eager", [True, False])
def test_zero_element_parameters_anywhere(lanes_device, eager) -> None:
    for place in (0, 50, 99):
        sizes = [3] * 100
        sizes[place] = 0
        sizes[(place + 1) % 100] = 66_000
        model = Stack(*sizes).to(lanes_device.device)
        twin = TwinModel(model)
        opt = outboard.AdamW(model.parameters(), threads=1, eager=eager).attach(model)
        train(model, opt, twin, 2)
        twin.check(opt)


def test_only_zero_elements(lanes_device) -> None:
    model = Stack(0, 0).to(lanes_device.device)
    opt = outboard.AdamW(model.parameters(), threads=1, max_grad_norm=1.0).attach(model)
    train(model, opt, TwinModel(model), 3)
    opt.wait()
    opt.synchronize()
    assert [float(opt.state[p]["step"]) for p in model.parameters()] == [3.0, 3.0]
    assert opt.last_grad_norm == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_strides_that_change_between_steps(lanes_device, mode) -> None:
    """The planes are reordered; what is still on its way home then must not be lost."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(33, 8, 16, 32))
    model.other = torch.nn.Parameter(torch.randn(33, 8, 16, 32).to(BF16))
    model.to(lanes_device.device)
    params = list(model.parameters())
    twin = Twin(params, lr=0.01)
    opt = outboard.AdamW(params, lr=0.01, threads=2, mode=mode, chunk_elems=5_000).attach(model)
    grads = [[torch.randn_like(p) for p in params] for _ in range(30)]
    for step, of_step in enumerate(grads):
        for p, grad in zip(params, of_step, strict=True):
            set_grad(p, grad)
        opt.step()
        fmt = torch.channels_last if step % 2 == 0 else torch.contiguous_format
        for p in params:
            p.data = p.data.contiguous(memory_format=fmt)
    for of_step in grads:
        twin.step(of_step)
    twin.check(opt)


@pytest.mark.parametrize("eager", [True, False])
def test_weights_moved_to_other_memory(lanes_device, eager) -> None:
    model = Stack(70_000, 5, 66_000, dtype=BF16).to(lanes_device.device)
    twin = TwinModel(model)
    opt = outboard.AdamW(model.parameters(), threads=2, eager=eager).attach(model)
    old = []
    for step in range(4):
        train(model, opt, twin, 1, step)
        for p in model.parameters():
            old.append((p.data, p.data.clone()))
            p.data = p.data.clone()
    twin.check(opt)
    for before, copy in old:
        assert_same(before.cpu(), copy.cpu(), "memory that the parameter has left")


# ---- what the tests above rest on


def test_updates_are_really_under_way_after_step(lanes_device) -> None:
    model = Stack(70_000, 5).to(lanes_device.device)
    opt = outboard.AdamW(model.parameters(), threads=1).attach(model)
    model.loss().backward()
    opt.step()
    assert all(is_pending(p) for p in model.parameters())
    assert all(plain_grad(p) is None for p in model.parameters())
    model.loss()
    assert not any(is_pending(p) for p in model.parameters())


def test_a_layer_reads_every_element() -> None:
    layer = Layer(1000)
    before = layer(torch.zeros(3))
    with torch.no_grad():
        layer.weight[-1] += 1
    assert not torch.equal(layer(torch.zeros(3)), before)
