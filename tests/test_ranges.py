"""A range for each chunk in profilers: NVTX's, and the tracks that are added to torch's traces."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import outboard
from lanes import Stack

pytestmark = pytest.mark.timeout(120, method="thread")

#: What a profiler does: NVTX loads it at its first call, and it puts its functions into NVTX's table.
INJECTION = r"""
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*function)(void);
typedef struct {
    size_t struct_size;
    int (*table_of_module)(int module, function ***table, unsigned *size);
} callbacks;
typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char *message;
} attributes;

static int out = -1;
static uint64_t last;

static void *create_domain(const char *name) { return strdup(name); }

static uint64_t start(void *domain, const attributes *range) {
    const uint64_t id = __atomic_add_fetch(&last, 1, __ATOMIC_SEQ_CST);
    const int known = range->size == sizeof *range && range->message_type == 1;
    dprintf(out, "start\t%llu\t%s\t%s\n", (unsigned long long)id, (const char *)domain, known ? range->message : "?");
    return id;
}

static void end(void *domain, uint64_t id) {
    dprintf(out, "end\t%llu\t%s\n", (unsigned long long)id, (const char *)domain);
}

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const callbacks *given = export_table(1);
    function **table;
    unsigned size;
    if (!given || !given->table_of_module(5, &table, &size) || size < 13) return 0;
    out = open(getenv("RANGES"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    *table[2] = (function)start;
    *table[3] = (function)end;
    *table[12] = (function)create_domain;
    return out >= 0;
}
"""

TRAINING = """
    import sys
    import torch
    import outboard
    from lanes import Stack
    from outboard._lanes import LaneOptions

    LaneOptions.simulate = 5
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = [70_000, 5, 140_000, 300, 66_001]
    model = Stack(*sizes)
    named = [(f"layer{i}", p) for i, p in enumerate(model.parameters())]
    opt = outboard.AdamW(
        named, threads=2, chunk_elems=30_000, device_state_bytes=0.3, offload_gradients="offload" in sys.argv
    )

    def step():
        model.loss().backward()
        opt.step()
        opt.synchronize()

    opt.record_timeline(True)
    if "early" in sys.argv:
        opt.emit_nvtx()
    opt.attach(model)
    opt.emit_nvtx()
    step()
    chunks = opt.take_timeline()
    if "fails" in sys.argv:
        opt._core.fail_next_step(model[2].weight, 50_000)
        model.loss().backward()
        try:
            opt.step()
            opt.synchronize()
        except outboard.WorkerError:
            print("failed")
    elif "close" in sys.argv:
        opt.close()
        step()
    chunks += opt.take_timeline()
    opt.emit_nvtx(False)
    if "fails" not in sys.argv:
        step()
    assert len(opt.take_timeline()) or "fails" in sys.argv
    opt.close()
    for lane, name, start, end in chunks:
        if ":" not in lane:
            print(lane, name, sep="\\t")
"""


@pytest.fixture(scope="session")
def injection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not outboard.build_info()["nvtx"]:
        pytest.skip("this build has no NVTX")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("injection")
    (folder / "ranges.c").write_text(INJECTION)
    library = folder / "libranges.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, folder / "ranges.c"], check=True)
    return library


def ranges_of(log: Path) -> list[str]:
    """Return the messages of ranges that a log has; fail unless each is ended once, after it was begun."""
    begun, ended = {}, Counter()
    for line in log.read_text().splitlines():
        what, number, domain, *message = line.split("\t")
        assert domain == "outboard"
        if what == "start":
            begun[number] = message[0]
        else:
            assert number in begun, "ended before it was begun"
            ended[number] += 1
    assert ended == dict.fromkeys(begun, 1)
    return list(begun.values())


@pytest.mark.parametrize("how", ["plain", "early", "offload", "close"])
def test_a_range_per_chunk(injection: Path, python: Callable[..., str], tmp_path: Path, how: str) -> None:
    log = tmp_path / "log"
    log.touch()
    said = python(TRAINING, how, NVTX_INJECTION64_PATH=str(injection), RANGES=str(log))
    messages = ranges_of(log)
    pattern = re.compile(r"(gpu lane|cpu lane|resident) (\w+)(?: and (\d+) more)? \[(\d+):(\d+)\]")
    matches = [pattern.fullmatch(message) for message in messages]
    assert all(matches), messages
    # Those that the timeline has; its chunks are those of the lanes.
    chunks = Counter(tuple(line.split("\t")) for line in said.splitlines())
    assert Counter((match[1], match[2]) for match in matches) == chunks
    assert {lane for lane, _ in chunks} >= {"resident", "cpu lane"}
    steps = 2 if how == "close" else 1
    covered: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for match in matches:
        if match[3] is None:
            covered[match[2]].append((int(match[4]), int(match[5])))
    of_update = {"layer2": 140_000, "layer4": 66_001}
    for name, length in of_update.items():
        times = steps * (2 if how == "offload" else 1)
        assert Counter(index for first, last in covered[name] for index in range(first, last)) == dict.fromkeys(
            range(length), times
        )
        assert all(last - first <= 30_000 for first, last in covered[name])
    assert covered["layer0"].count((0, 70_000)) == steps


def test_ranges_end_where_updates_fail(injection: Path, python: Callable[..., str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    python(TRAINING, "fails", NVTX_INJECTION64_PATH=str(injection), RANGES=str(log))
    assert ranges_of(log)


def test_no_ranges_unless_asked(injection: Path, python: Callable[..., str], tmp_path: Path) -> None:
    """NVTX is not even started."""
    log = tmp_path / "log"
    program = TRAINING.replace("    opt.emit_nvtx()\n", "")
    python(program, NVTX_INJECTION64_PATH=str(injection), RANGES=str(log))
    assert not log.exists()


def test_without_nvtx() -> None:
    if outboard.build_info()["nvtx"]:
        pytest.skip("this build has NVTX")
    opt = outboard.AdamW([torch.ones(3, requires_grad=True)])
    with pytest.raises(outboard.DeviceError, match=r"no NVTX.*nvidia-nvtx"):
        opt.emit_nvtx()
    opt.emit_nvtx(False)


def test_nothing_listens(lanes_device: Any) -> None:
    """Without a profiler ranges go nowhere."""
    if not outboard.build_info()["nvtx"]:
        pytest.skip("this build has no NVTX")
    model = Stack(70_000, 5).to(lanes_device.device)
    opt = outboard.AdamW(model.parameters(), threads=2).attach(model)
    opt.emit_nvtx()
    for _ in range(2):
        model.loss().backward()
        opt.step()
    opt.synchronize()


def test_a_timeline_from_the_start(lanes_device: Any) -> None:
    """Asked for before there are lanes, and after they have ended."""
    model = Stack(70_000, 5).to(lanes_device.device)
    opt = outboard.AdamW(model.parameters(), threads=2)
    opt.record_timeline(True)
    opt.attach(model)
    for _ in range(2):
        model.loss().backward()
        opt.step()
        opt.synchronize()
        assert len([lane for lane, *_ in opt.take_timeline() if ":" not in lane]) == 2
        opt.close()
    opt.record_timeline(False)
    model.loss().backward()
    opt.step()
    opt.synchronize()
    assert opt.take_timeline() == []


# ---- torch's traces


def export(profiler: Any, path: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profiler.export_chrome_trace(str(path))
    return read(path)


def read(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_chunks_in_a_trace(lanes_device: Any, tmp_path: Path, name: str) -> None:
    """Chunks lie where the trace's own events say that they were: within the step that waits for them."""
    path = tmp_path / name
    model = Stack(70_000, 5, 140_000).to(lanes_device.device)
    opt = outboard.AdamW(model.parameters(), threads=2, chunk_elems=30_000).attach(model)
    opt.record_timeline(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(2):
                with record_function("whole step"):
                    model.loss().backward()
                    opt.step()
                    opt.synchronize()
                time.sleep(0.05)
    timeline = opt.take_timeline()
    before = export(profiler, path)
    outboard.add_chunks_to_trace(path, timeline)
    after = read(path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    count = len(before["traceEvents"])
    assert after["traceEvents"][:count] == before["traceEvents"]
    assert {key: value for key, value in after.items() if key != "traceEvents"} == {
        key: value for key, value in before.items() if key != "traceEvents"
    }
    events = after["traceEvents"][count:]
    chunks = [event for event in events if event["ph"] == "X"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert Counter((lanes[event["tid"]], event["name"]) for event in chunks) == Counter(
        (lane, parameter) for lane, parameter, *_ in timeline
    )
    steps = [
        (event["ts"], event["ts"] + event["dur"])
        for event in before["traceEvents"]
        if event["name"] == "whole step" and event["ph"] == "X" and event["cat"] == "user_annotation"
    ]
    assert len(steps) == 2
    slack = 2000  # microseconds; the steps are 50 ms apart
    for event in chunks:
        start, end = event["ts"], event["ts"] + event["dur"]
        assert any(begin - slack <= start <= end <= over + slack for begin, over in steps), (event, steps)
    # Chunks of a track are one after the other.
    for track in lanes:
        row = sorted((event["ts"], event["ts"] + event["dur"]) for event in chunks if event["tid"] == track)
        assert row
        assert all(earlier[1] <= later[0] + 0.002 for earlier, later in pairwise(row))


def test_tracks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": []}))
    timeline = [("a", "p", 1.0, 3.0), ("b", "q", 1.5, 2.0), ("a", "r", 2.0, 4.0), ("a", "s", 3.0, 5.0)]
    outboard.add_chunks_to_trace(path, timeline)
    events = [event for event in read(path)["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["tid"], round(event["dur"])) for event in events] == [
        ("p", 1, 2_000_000),
        ("q", 2, 500_000),
        ("r", 3, 2_000_000),
        ("s", 1, 2_000_000),
    ]
    # Without a base the trace counts from 1970.
    now = (time.time() - time.perf_counter()) * 1e6
    assert events[0]["ts"] == pytest.approx(now + 1e6, abs=1e5)


@pytest.mark.parametrize("text", ["[]", '{"events": []}', '{"traceEvents": 1}', "not JSON"])
def test_what_is_no_trace(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError):
        outboard.add_chunks_to_trace(path, [])
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert path.read_text() == text
