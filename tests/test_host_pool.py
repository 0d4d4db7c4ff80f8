"""`outboard.HostPool`: buffers of the size asked for, lent anew once copies are done, from any thread."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import outboard

MIB = 1 << 20


class Mark:
    """An event that a test completes."""

    def __init__(self) -> None:
        self._happened = threading.Event()

    def set(self) -> None:
        self._happened.set()

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        self._happened.wait()


def test_a_buffer_has_the_logical_size_and_any_dtype() -> None:
    pool = outboard.HostPool(pin=False)
    for nbytes in (16, 48, 1000, 4096, 3 * MIB + 16):
        buffer = pool.acquire(nbytes)
        assert (buffer.dtype, tuple(buffer.shape), buffer.device.type) == (torch.uint8, (nbytes,), "cpu")
        assert buffer.data_ptr() % 64 == 0
        if nbytes % 16 == 0:
            buffer.view(torch.complex128).fill_(1j)
            buffer.view(torch.bfloat16).fill_(2)
    nothing = pool.acquire(0)
    assert nothing.numel() == 0
    pool.release(nothing)


def test_released_by_any_view_and_dropped_buffers_come_back_by_themselves() -> None:
    pool = outboard.HostPool(pin=False)
    buffer = pool.acquire(1000)
    address = buffer.data_ptr()
    pool.release(buffer[400:].view(torch.float32).view(10, 15)[3])
    again = pool.acquire(1000)
    assert again.data_ptr() == address
    # The tensor of before is nobody's, and takes nothing back.
    del buffer
    gc.collect()
    assert pool.stats()["live"] == 1024
    view = again.view(torch.int16)[7:9]
    del again
    assert pool.stats()["live"] == 1024
    del view
    assert pool.stats() == {
        "live": 0,
        "cached": 1024,
        "pending": 0,
        "peak": 1024,
        "hits": 1,
        "misses": 1,
        "waste": 0,
        "held": 4096,
        "pinned": 0,
        "buffers": 1,
    }
    assert pool.trim() == 4096
    assert pool.stats()["held"] == 0


def test_memory_outlives_the_pool() -> None:
    pool = outboard.HostPool(pin=False)
    buffer = pool.acquire(MIB)
    del pool
    assert buffer.fill_(3).sum() == 3 * MIB


def test_foreign_and_twice_released_buffers_are_refused() -> None:
    pool, other = outboard.HostPool(pin=False), outboard.HostPool(pin=False)
    buffer = pool.acquire(100)
    for foreign in (torch.empty(100, dtype=torch.uint8), other.acquire(100)):
        with pytest.raises(ValueError, match="not this pool's"):
            pool.release(foreign)
    pool.release(buffer)
    with pytest.raises(ValueError, match="released before"):
        pool.release(buffer)
    mark = Mark()
    buffer = pool.acquire(100)
    pool.release(buffer, mark)
    with pytest.raises(ValueError, match="released before"):
        pool.release(buffer)
    mark.set()


def test_an_event_is_waited_for_only_at_the_limit() -> None:
    pool = outboard.HostPool(max_bytes=40 * MIB, pin=False)
    first = pool.acquire(18 * MIB)
    addresses, marks = [first.data_ptr()], [Mark(), Mark()]
    pool.release(first, marks[0])
    second = pool.acquire(18 * MIB)
    addresses.append(second.data_ptr())
    assert addresses[0] != addresses[1]
    pool.release(second, marks[1])
    assert pool.stats()["pending"] == 36 * MIB
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(pool.acquire(17 * MIB).data_ptr()))
    waiting.start()
    marks[1].set()
    time.sleep(0.05)
    # It had decided for the oldest, or found the other one free by itself.
    marks[0].set()
    waiting.join()
    assert found[0] in addresses
    with pytest.raises(outboard.PoolLimitError, match=r"cannot lend 52428800 bytes.*of 41943040 bytes allowed"):
        pool.acquire(50 * MIB)


def test_an_event_that_fails_is_told() -> None:
    class Failing(Mark):
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

        synchronize = query  # type: ignore[assignment]

    pool = outboard.HostPool(pin=False)
    buffer = pool.acquire(100)
    address = buffer.data_ptr()
    pool.release(buffer, Failing())
    with pytest.raises(outboard.DeviceError, match="illegal memory access"):
        pool.acquire(100)
    assert pool.acquire(100).data_ptr() != address


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda pool: pool.acquire(-1), ValueError),
        (lambda pool: pool.acquire(2**60), MemoryError),
        (lambda pool: pool.acquire("many"), TypeError),
        (lambda pool: pool.release(b"bytes"), TypeError),
        (lambda pool: pool.release(pool.acquire(1), "event"), TypeError),
        (lambda _: outboard.HostPool(max_bytes=0), ValueError),
        (lambda _: outboard.HostPool(pin="maybe"), ValueError),
        (lambda _: outboard.HostPool(threads=0), ValueError),
    ],
)
def test_bad_arguments(call: Callable[[outboard.HostPool], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        call(outboard.HostPool(pin=False))


def test_many_threads() -> None:
    pool = outboard.HostPool(max_bytes=64 * MIB, pin=False)
    marks: list[Mark] = []
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        held: list[tuple[torch.Tensor, int]] = []
        try:
            for _ in range(2000):
                if len(held) < 8 and chance.random() < 0.5:
                    buffer = pool.acquire(chance.choice([1, 100, 5000, 70_000, 300_000]))
                    stamp = chance.randrange(256)
                    buffer[0] = buffer[-1] = stamp
                    held.append((buffer, stamp))
                elif held:
                    buffer, stamp = held.pop(chance.randrange(len(held)))
                    assert buffer[0] == stamp == buffer[-1]
                    kind = chance.randrange(3)
                    if kind == 1:
                        pool.release(buffer)
                    elif kind == 2:
                        mark = Mark()
                        pool.release(buffer, mark)
                        marks.append(mark)
                    del buffer
                while len(marks) > 16:
                    marks.pop(0).set()
        except BaseException as error:  # told by the thread that joins
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for mark in marks:
        mark.set()
    stats = pool.stats()
    assert (stats["live"], stats["pending"], stats["waste"]) == (0, 0, 0)
    pool.trim()
    assert pool.stats()["held"] == 0


def test_what_autograd_saves_wastes_at_most_an_eighth() -> None:
    # Of sizes that are no powers of two: on the meta device.
    where: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("meta")}
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    encoder = torch.nn.TransformerEncoderLayer(1000, 8, dim_feedforward=2730, batch_first=True, **where)
    convolutions = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 7, 2, 3, **where),
        torch.nn.BatchNorm2d(64, **where),
        torch.nn.Conv2d(64, 192, 3, **where),
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        encoder(torch.empty(1, 777, 1000, requires_grad=True, **where))
        convolutions(torch.empty(3, 3, 225, 225, requires_grad=True, **where))
    pool = outboard.HostPool(pin=False)
    asked = waste = 0
    for size in sizes:
        buffer = pool.acquire(size)
        asked += size
        waste += pool.stats()["waste"]
        pool.release(buffer)
    assert asked > 100 << 20
    assert waste <= asked / 8
    # Held: one buffer of each class, and what is left of the memory that they are cut from.
    assert pool.stats()["held"] <= 1.2 * sum(set(sizes))


def test_a_fork_is_refused(python: Callable[..., str]) -> None:
    program = """
        import os, outboard
        pool = outboard.HostPool(pin=False)
        kept = pool.acquire(100)
        pool.release(pool.acquire(5000))
        child = os.fork()
        if child == 0:
            try:
                pool.acquire(100)
            except outboard.ForkedError:
                del kept, pool
                os._exit(3)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert pool.acquire(5000).fill_(1).sum() == 5000
        print("goes on")
    """
    assert "goes on" in python(program)


@pytest.mark.cuda
def test_pinned_buffers_and_events_of_cuda() -> None:
    pool = outboard.HostPool(max_bytes=256 * MIB)
    source = torch.randint(256, (64 * MIB,), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(20):
        buffer = pool.acquire(64 * MIB)
        assert buffer.is_pinned()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            buffer.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        pool.release(buffer, event)
    torch.cuda.synchronize()
    stats = pool.stats()
    assert (stats["pending"], stats["live"]) == (0, 0)
    assert stats["pinned"] == stats["held"] <= 256 * MIB
    assert stats["buffers"] <= 4
    buffer = pool.acquire(64 * MIB)
    assert torch.equal(buffer, source.cpu())
