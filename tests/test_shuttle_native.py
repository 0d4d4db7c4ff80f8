"""The native shuttle of opaque state: tensors over its memory, round trips with torch's kernels, refusals."""

from __future__ import annotations

import gc
import os
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import outboard
from outboard import _native


@dataclass
class Rig:
    """A shuttle and memory for its slots on the device."""

    shuttle: _native.StateShuttle
    device: str
    area: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.area = torch.empty(1 << 20, dtype=torch.uint8, device=self.device)

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream) if self.device == "cuda" else 0

    def host(self, slot: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.from_dlpack(self.shuttle.tensor(slot)).view(dtype)  # type: ignore[attr-defined]

    def there(self, offset: int, numel: int) -> torch.Tensor:
        """Return a part of the device's memory as fp32."""
        return self.area[offset : offset + 4 * numel].view(torch.float32)

    def address(self, offset: int) -> int:
        return self.area.data_ptr() + offset

    def finish(self) -> None:
        """Close it; nothing raced."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.shuttle.close()
        if self.device != "cuda":
            assert self.shuttle.hazards() == []


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def make_rig(request: pytest.FixtureRequest) -> Callable[..., Rig]:
    """Return what makes a rig on a device made of host memory, or on CUDA's."""

    def make(**options: Any) -> Rig:
        if request.param == "cuda":
            return Rig(_native.StateShuttle(0, threads=2, **options), "cuda")
        seed = zlib.crc32(request.node.name.encode()) ^ int(os.environ.get("OUTBOARD_LANES_SEED", "0"))
        return Rig(_native.StateShuttle(None, simulate=seed, threads=2, **options), "cpu")

    return make


def test_slots_that_are_announced_share_a_buffer(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    shuttle = rig.shuttle
    (first,) = shuttle.reserve(["a"], [100], [200, 300])
    second, third = (shuttle.reserve([name], [size])[0] for name, size in (("b", 200), ("c", 300)))
    (other,) = shuttle.reserve(["d"], [64])
    whole, apart = (torch.from_dlpack(buffer) for buffer in shuttle.buffers())  # type: ignore[attr-defined]
    assert (whole.numel(), apart.numel()) == (128 + 256 + 320, 64)
    starts = [rig.host(slot, torch.uint8).data_ptr() - whole.data_ptr() for slot in (first, second, third)]
    assert starts == [0, 128, 384]
    assert rig.host(other, torch.uint8).data_ptr() == apart.data_ptr()
    rig.finish()


def test_recalled_slots_have_the_values_of_before(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    shuttle = rig.shuttle
    slots = shuttle.reserve(["a", "b", "c"], [400, 400, 400])
    for index, slot in enumerate(slots):
        rig.host(slot).fill_(index)
    shuttle.fill(slots)
    (born,) = shuttle.reserve(["d"], [400])
    shuttle.bring(slots[:2], [rig.address(0), rig.address(400)])
    shuttle.arrive(slots[:1], rig.stream)
    rig.there(0, 100).add_(7)
    shuttle.bear([born])
    shuttle.recall(rig.stream)
    assert shuttle.places([*slots, born]) == ["host", "host", "host", "pending"]
    shuttle.settle(slots)
    assert [rig.host(slot).unique().tolist() for slot in slots] == [[0.0], [1.0], [2.0]]
    rig.finish()


SIZES = [1000, 16, 0, 4099, 77]


def test_round_trips_with_torch_kernels_between(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(piece_bytes=1 << 10)
    shuttle, half = rig.shuttle, 1 << 19
    slots = shuttle.reserve([f"exp_avg of layers.{i}.weight" for i in range(len(SIZES))], [4 * n for n in SIZES])
    expected = [torch.randn(n) for n in SIZES]
    for slot, value in zip(slots, expected, strict=True):
        rig.host(slot).copy_(value)
    shuttle.fill(slots)
    for turn in range(6):
        offsets = [turn % 2 * half + 32_768 * i for i in range(len(SIZES))]
        addresses = [rig.address(offset) for offset in offsets]
        shuttle.bring(slots, addresses, after=rig.stream if turn == 0 else None)
        assert shuttle.places(slots) == ["h2d"] * len(slots)
        shuttle.arrive(slots, rig.stream)
        for i, (offset, numel) in enumerate(zip(offsets, SIZES, strict=True)):
            rig.there(offset, numel).mul_(0.9).add_(turn)
            expected[i].mul_(0.9).add_(turn)
        shuttle.send(slots, addresses, rig.stream)
        shuttle.poll()
        assert set(shuttle.places(slots)) <= {"d2h", "host"}
    shuttle.settle()
    assert shuttle.places(slots) == ["host"] * len(slots)
    for slot, value in zip(slots, expected, strict=True):
        torch.testing.assert_close(rig.host(slot), value, rtol=1e-6, atol=1e-6)
    stats = shuttle.stats()
    # Two of the slots have more than one piece, and the empty one has none.
    assert stats["copies_in"] == stats["copies_out"] == 6 * (4 + 1 + 0 + 17 + 1)
    assert stats["bytes_in"] == 6 * 4 * sum(SIZES)
    assert stats["places"] == {"pending": 0, "host": len(SIZES), "h2d": 0, "device": 0, "d2h": 0}
    rig.finish()


def test_state_is_born_on_the_device_and_may_be_discarded(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    shuttle, numel = rig.shuttle, 5000
    (slot,) = shuttle.reserve(["momentum"], [4 * numel])
    assert shuttle.places([slot]) == ["pending"]
    address = rig.address(0)
    shuttle.claim(address, 4 * numel, rig.stream)
    rig.there(0, numel).fill_(2.0)
    shuttle.bear([slot])
    shuttle.send([slot], [address], rig.stream)
    shuttle.claim(address, 4 * numel, rig.stream)
    rig.there(0, numel).fill_(7.0)
    shuttle.settle([slot])
    assert torch.equal(rig.host(slot), torch.full([numel], 2.0))
    shuttle.bring([slot], [address], after=rig.stream)
    shuttle.arrive([slot], rig.stream)
    rig.there(0, numel).add_(1.0)
    shuttle.discard([slot], rig.stream)
    shuttle.bring([slot], [address])
    shuttle.arrive([slot], rig.stream)
    assert rig.there(0, numel).sum().item() == 2.0 * numel
    shuttle.discard([slot], rig.stream)
    shuttle.free([slot])
    assert shuttle.stats()["host_bytes"] == 0
    rig.finish()


def test_wrong_calls_name_the_state_and_change_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    shuttle = rig.shuttle
    first, second = shuttle.reserve(["exp_avg of a", "exp_avg of b"], [100, 100])
    shuttle.fill([first])
    with pytest.raises(outboard.StateError, match=r"^bring: exp_avg of b is pending, and must be on the host"):
        shuttle.bring([first, second], [rig.address(0), rig.address(128)])
    with pytest.raises(outboard.StateError, match=r"^arrive: exp_avg of a is host, and must be on its way"):
        shuttle.arrive([first], rig.stream)
    assert shuttle.places([first, second]) == ["host", "pending"]
    for call in (
        lambda: shuttle.bring([first], []),
        lambda: shuttle.bring([first], [0]),
        lambda: shuttle.fill([second, second]),
        lambda: shuttle.fill([99]),
        lambda: shuttle.reserve(["a"], []),
    ):
        with pytest.raises(ValueError):
            call()
    assert shuttle.stats()["copies_in"] == 0
    rig.finish()
    with pytest.raises(ValueError, match="closed"):
        shuttle.fill([second])
    assert shuttle.stats()["host_bytes"] == 0


def test_tensors_outlive_slots_and_shuttle(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    slots = rig.shuttle.reserve(["a", "b"], [100, 4096])
    tensors = [torch.from_dlpack(rig.shuttle.tensor(slot)) for slot in slots]  # type: ignore[attr-defined]
    (buffer,) = [torch.from_dlpack(buffer) for buffer in rig.shuttle.buffers()]  # type: ignore[attr-defined]
    assert (buffer.dtype, buffer.numel()) == (torch.uint8, 128 + 4096 + 64)
    assert buffer.data_ptr() == tensors[0].data_ptr()
    assert [tensor.numel() for tensor in tensors] == [100, 4096]
    tensors[1].fill_(9)
    assert buffer[128:4224].eq(9).all()
    rig.shuttle.free(slots)
    rig.finish()
    del rig
    gc.collect()
    assert buffer.sum().item() == 9 * 4096


def test_what_cannot_be_pinned_is_a_warning_or_an_error() -> None:
    def make(pin: bool | None) -> _native.StateShuttle:
        return _native.StateShuttle(None, simulate=1, threads=1, pin=pin, simulated_pinnable_bytes=4096)

    with pytest.warns(UserWarning, match="cannot pin 12288 bytes of optimizer state .* stays pageable"):
        assert make(None).reserve(["a"], [10_000]) == [0]
    with pytest.raises(outboard.DeviceError, match="pin=True: cannot pin"):
        make(True).reserve(["a"], [10_000])
    assert make(False).reserve(["a"], [10_000]) == [0]
    shuttle = make(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            shuttle.reserve(["a"], [10_000])
    assert shuttle.stats()["host_bytes"] == 0, "nobody knows these slots"


def test_one_device_is_needed() -> None:
    for arguments in ({"device": None}, {"device": 0, "simulate": 1}):
        with pytest.raises(ValueError, match="either a device or simulate"):
            _native.StateShuttle(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="piece_bytes"):
        _native.StateShuttle(None, simulate=1, piece_bytes=0)
    assert _native.StateShuttle(None, simulate=1).streams() == ()


def test_a_fork_is_refused_and_leaves_in_peace() -> None:
    shuttle = _native.StateShuttle(None, simulate=3, threads=1)
    slots = shuttle.reserve(["a"], [1000])
    shuttle.fill(slots)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            shuttle.stats()
        except outboard.ForkedError:
            del shuttle
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shuttle.places(slots) == ["host"]


@pytest.mark.cuda
def test_host_memory_is_pinned_for_torch_too() -> None:
    shuttle = _native.StateShuttle(0, threads=2)
    slots = shuttle.reserve(["a", "b"], [1000, 5 << 20])
    for slot in slots:
        assert torch.from_dlpack(shuttle.tensor(slot)).is_pinned()  # type: ignore[attr-defined]
    pageable = _native.StateShuttle(0, threads=2, pin=False)
    (slot,) = pageable.reserve(["a"], [1000])
    assert not torch.from_dlpack(pageable.tensor(slot)).is_pinned()  # type: ignore[attr-defined]
    stats = shuttle.stats()
    assert stats["pinned_bytes"] == stats["host_bytes"] > 0


@pytest.mark.cuda
def test_its_streams_are_torch_streams() -> None:
    shuttle = _native.StateShuttle(0, threads=2)
    area = torch.empty(4000, dtype=torch.uint8, device="cuda")
    (slot,) = shuttle.reserve(["a"], [4000])
    torch.from_dlpack(shuttle.tensor(slot)).fill_(3)  # type: ignore[attr-defined]
    shuttle.fill([slot])
    into, out = shuttle.streams()
    assert into != out
    shuttle.bring([slot], [area.data_ptr()], after=int(torch.cuda.current_stream().cuda_stream))
    arrivals = torch.cuda.ExternalStream(into)
    area.record_stream(arrivals)
    arrivals.synchronize()
    assert area.eq(3).all()
    # The allocator asks the stream when the memory comes free: also when the shuttle has gone.
    shuttle.close()
    del shuttle
    del area
    torch.cuda.synchronize()
    torch.empty(4000, dtype=torch.uint8, device="cuda").fill_(1)
