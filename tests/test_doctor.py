"""`outboard.doctor` and `python -m outboard doctor`: what it says is true here, and it never crashes.

Over 500 lines: independent cases in the order of their table, read one at a time.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import outboard
from outboard import _native, doctor
from outboard._cli import main

NAMES = [
    "build",
    "python",
    "torch",
    "torch_cuda",
    "isa",
    "threads",
    "host_step",
    "huge_pages",
    "torch_huge_pages",
    "memory",
    "memory_lock",
    "cuda",
]
STATUSES = {"ok", "note", "warning", "problem"}
ENVIRONMENT = ("OUTBOARD_NUM_THREADS", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE")
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def findings() -> Iterator[dict[str, doctor.Finding]]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)
        yield {finding.name: finding for finding in doctor.report()}


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the root of the file system; a test writes what its machine has."""
    monkeypatch.setattr(doctor, "_ROOT", tmp_path)
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def probe(name: str) -> doctor.Finding:
    return next(doctor._find(*entry) for entry in doctor._PROBES if entry[0] == name)


def native(monkeypatch: pytest.MonkeyPatch, **instead: object) -> None:
    """Replace functions of the native half, for the doctor alone."""
    monkeypatch.setattr(doctor, "_native", SimpleNamespace(**{**vars(_native), **instead}))


# What is true here


def test_shape(findings: dict[str, doctor.Finding]) -> None:
    assert list(findings) == NAMES
    for finding in findings.values():
        assert finding.status in STATUSES
        assert finding.found
        assert "probing failed" not in finding.found
        assert "\n" not in finding.found + finding.advice
        assert finding.status in ("ok", "note") or finding.advice


def test_a_working_machine_has_no_problem(findings: dict[str, doctor.Finding]) -> None:
    assert doctor.usable(list(findings.values()))
    assert findings["host_step"].status == "ok"
    broken = replace(findings["cuda"], status="problem")
    assert not doctor.usable([*findings.values(), broken])


def test_build_python_and_torch(findings: dict[str, doctor.Finding]) -> None:
    info = outboard.build_info()
    for part in (outboard.__version__, info["target"], info["profile"]):
        assert part in findings["build"].found
    assert (findings["build"].status == "ok") == (info["profile"] == "release")
    assert platform.python_version() in findings["python"].found
    assert torch.__version__ in findings["torch"].found
    built_for = torch.version.cuda or "without CUDA"
    assert built_for in findings["torch_cuda"].found


def test_isa(findings: dict[str, doctor.Finding]) -> None:
    info = outboard.build_info()
    found = findings["isa"].found
    assert found.startswith(f"{info['isa']} in use")
    assert found.endswith(f"available: {', '.join(info['isa_available'])}")


def test_threads_here(findings: dict[str, doctor.Finding]) -> None:
    threads, why = _native.default_threads()
    assert re.match(rf"{threads} worker threads? by default: ", findings["threads"].found)
    assert why in findings["threads"].found


def test_huge_pages_here(findings: dict[str, doctor.Finding]) -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists():
        assert "the kernel does not say" in findings["huge_pages"].found
        return
    chosen = enabled.read_text().split("[")[1].split("]")[0]
    assert f"transparent huge pages: {chosen}" in findings["huge_pages"].found
    part = re.search(r"(\d+) of (\d+) MiB on huge pages", findings["huge_pages"].found)
    if part is not None:
        assert (findings["huge_pages"].status == "ok") == (int(part[1]) >= 0.9 * int(part[2]))


def test_memory_here(findings: dict[str, doctor.Finding]) -> None:
    free = re.match(r"([\d.]+) GiB available ", findings["memory"].found)
    assert free is not None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    assert 0 < float(free[1]) <= total + 0.1


def test_memory_lock_here(findings: dict[str, doctor.Finding]) -> None:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024:,} KiB"
    assert f"memory-lock limit: {shown}" in findings["memory_lock"].found


def test_cuda_here(findings: dict[str, doctor.Finding]) -> None:
    status, finding = _native.cuda_status(), findings["cuda"]
    if status["compiled"] is None:
        assert "no CUDA library" in finding.found
    else:
        assert status["compiled"] in finding.found
        assert f"{status['devices']} device" in finding.found
    if status["problem"]:
        assert finding.status != "ok"
        assert status["problem"] in finding.advice


# Other machines


def test_nothing_readable(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = {finding.name: finding for finding in doctor.report()}
    assert list(report) == NAMES
    assert doctor.usable(list(report.values()))
    assert not any("probing failed" in finding.found for finding in report.values())
    assert report["huge_pages"].status == report["torch_huge_pages"].status == "note"
    assert "not known" in report["huge_pages"].found
    assert "not known" in report["memory"].found
    assert doctor.available_memory() is None
    monkeypatch.setattr(platform, "system", lambda: "Elsewhere")
    assert "Linux" not in probe("huge_pages").found


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        ({"enabled": "always madvise [never]"}, "echo madvise >"),
        ({"enabled": "always [madvise] never", "hpage_pmd_size": "536870912"}, "512 MiB"),
        ({"enabled": "always [madvise] never", "status": "THP_enabled:\t0"}, "PR_SET_THP_DISABLE"),
        ({"enabled": "[always] madvise never", "hpage_pmd_size": "2097152"}, "compact_memory"),
    ],
)
def test_small_pages(system: Path, files: dict[str, str], advice: str) -> None:
    where = {"status": "proc/self/status"}
    settings = {where.get(name, f"{doctor._HUGE_PAGES}/{name}"): text for name, text in files.items()}
    smaps = "1000-ffffffffffff rw-p 00000000 00:00 0\nRss:  65536 kB\nAnonHugePages:  2048 kB\n"
    write(system, {**settings, "proc/self/smaps": smaps})
    finding = probe("huge_pages")
    assert finding.status == "warning"
    assert "2 of 64 MiB" in finding.found
    assert advice in finding.advice


def test_pages_of_torch(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smaps = "1000-ffffffffffff rw-p 00000000 00:00 0\nRss:  65536 kB\nAnonHugePages:  {} kB\n"
    mode = f"{doctor._HUGE_PAGES}/enabled"
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    write(system, {"proc/self/smaps": smaps.format(0), mode: "always [madvise] never"})
    assert "THP_MEM_ALLOC_ENABLE=1" in probe("torch_huge_pages").advice
    write(system, {mode: "always madvise [never]"})
    assert "THP_MEM_ALLOC_ENABLE" not in probe("torch_huge_pages").advice
    write(system, {"proc/self/smaps": smaps.format(63488)})
    assert probe("torch_huge_pages").status == "ok"


def test_only_the_tensors_own_mapping_counts(system: Path) -> None:
    tensor = torch.zeros(4)
    address = tensor.data_ptr()
    smaps = [
        "0-10 rw-p 0 0:0 0\nRss: 4 kB\nAnonHugePages: 8192 kB",
        f"{address:x}-{address + 16:x} rw-p 0 0:0 0\nRss: 4096 kB\nAnonHugePages: 2048 kB\nVmFlags: rd wr hg",
        f"{address + 16:x}-ffffffffffff rw-p 0 0:0 0\nRss: 4 kB\nAnonHugePages: 4096 kB",
    ]
    write(system, {"proc/self/smaps": "\n".join(smaps)})
    assert doctor._huge_part(tensor) == (2 << 20, 4 << 20)


MEMINFO = f"MemTotal: {64 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {48 * GIB >> 10} kB\n"
MOUNT_V2 = "30 23 0:26 {root} /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"
MOUNT_V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
OTHER_V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "expected"),
    [
        pytest.param("", "", {}, 48, id="no cgroups"),
        pytest.param(
            "0::/job/step\n",
            MOUNT_V2.format(root="/"),
            {
                "job/step/memory.max": "max\n",
                "job/step/memory.current": "1\n",
                "job/memory.max": f"{8 * GIB}\n",
                "job/memory.current": f"{3 * GIB}\n",
                "job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            6,
            id="v2, the limit above counts, the page cache does not",
        ),
        pytest.param(
            "0::/../elsewhere\n",
            MOUNT_V2.format(root="/"),
            {"memory.max": f"{4 * GIB}", "memory.current": f"{5 * GIB}"},
            0,
            id="v2, over the limit, a namespace's odd path",
        ),
        pytest.param(
            "9:name=systemd:/\n4:memory:/docker/1f\n1:cpu:/docker/1f\n0::/\n",
            OTHER_V1 + MOUNT_V1.format(root="/docker/1f"),
            {"memory/memory.limit_in_bytes": f"{16 * GIB}\n", "memory/memory.usage_in_bytes": f"{GIB}\n"},
            15,
            id="v1, a container",
        ),
        pytest.param(
            "4:memory:/\n0::/\n",
            OTHER_V1 + MOUNT_V1.format(root="/"),
            {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "4096\n"},
            48,
            id="v1, no limit",
        ),
        pytest.param("nonsense\n", "nonsense\n", {}, 48, id="nonsense"),
    ],
)
def test_cgroup_limits(system: Path, cgroup: str, mounts: str, files: dict[str, str], expected: int) -> None:
    write(
        system,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": cgroup,
            "proc/self/mountinfo": mounts,
            **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
        },
    )
    available = doctor.available_memory()
    assert available is not None
    assert available[0] == expected * GIB
    finding = probe("memory")
    assert finding.found.startswith(f"{expected}.0 GiB available ")
    assert finding.status == ("ok" if expected else "warning")
    assert ("below the cgroup's limit" in finding.found) == (expected != 48)


@pytest.mark.parametrize(
    ("status", "uid_map", "expected"),
    [
        ("CapEff:\t000001ffffffffff\n", "         0          0 4294967295\n", "ok"),
        ("CapEff:\t000001ffffffffff\n", "         0       1000          1\n", "note"),
        ("CapEff:\t0000000000000000\n", "         0          0 4294967295\n", "note"),
        ("", "", "note"),
    ],
)
def test_memory_lock(system: Path, monkeypatch: pytest.MonkeyPatch, status: str, uid_map: str, expected: str) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, resource.RLIM_INFINITY))
    write(system, {"proc/self/status": status, "proc/self/uid_map": uid_map})
    finding = probe("memory_lock")
    assert finding.status == expected
    assert finding.found.startswith("memory-lock limit: 8,192 KiB (may be raised to unlimited)")
    assert bool(finding.advice) == (expected == "note")


def test_memory_lock_on_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert probe("memory_lock").status == "ok"
    monkeypatch.setattr(platform, "release", lambda: "5.15.90.1-microsoft-standard-WSL2")
    assert "WSL" in probe("memory_lock").advice


@pytest.mark.parametrize(
    ("environment", "status", "found", "advice"),
    [
        ({"OUTBOARD_NUM_THREADS": "1"}, "ok", "1 worker thread by default: OUTBOARD_NUM_THREADS=1", ""),
        ({"OUTBOARD_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}, "ok", "OMP_NUM_THREADS=1 is not read", ""),
        ({"OMP_NUM_THREADS": "12345"}, "note", "OMP_NUM_THREADS=12345 is not read", "OUTBOARD_NUM_THREADS"),
        ({"OUTBOARD_NUM_THREADS": "99999"}, "warning", "99999 worker threads", "lower OUTBOARD_NUM_THREADS"),
        ({"LOCAL_WORLD_SIZE": "two"}, "warning", "worker thread", "LOCAL_WORLD_SIZE=two is no number"),
        ({"OUTBOARD_NUM_THREADS": "many"}, "problem", "OUTBOARD_NUM_THREADS=many is not a number", "cure"),
    ],
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], status: str, found: str, advice: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    finding = probe("threads")
    assert finding.status == status
    assert found in finding.found
    assert advice in finding.advice
    assert bool(advice) == bool(finding.advice)


def test_ranks_share_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    assert probe("threads").found.startswith("1 worker thread by default: ")
    assert "LOCAL_WORLD_SIZE" in probe("threads").found


@pytest.mark.parametrize(
    ("isa", "available", "forced", "status"),
    [
        ("avx512", ["avx512", "avx2", "portable"], None, "ok"),
        ("avx512", ["avx512", "avx2", "portable"], "avx512", "ok"),
        ("avx2", ["avx512", "avx2", "portable"], "avx2", "note"),
        ("portable", ["portable"], None, "warning"),
    ],
)
def test_isa_levels(
    monkeypatch: pytest.MonkeyPatch, isa: str, available: list[str], forced: str | None, status: str
) -> None:
    monkeypatch.delenv("OUTBOARD_ISA", raising=False)
    if forced is not None:
        monkeypatch.setenv("OUTBOARD_ISA", forced)
    native(monkeypatch, build_info=lambda: {"isa": isa, "isa_available": available})
    finding = probe("isa")
    assert finding.status == status
    assert (f"OUTBOARD_ISA={forced}" in finding.found) == (forced is not None)


def test_debug_build(monkeypatch: pytest.MonkeyPatch) -> None:
    native(monkeypatch, build_info=lambda: {**outboard.build_info(), "profile": "debug"})
    assert probe("build").status == "warning"


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.11.0+cu130", "ok"),
        ("2.14.1", "ok"),
        ("3.0.0a0+git1234", "ok"),
        ("2.9.1", "warning"),
        ("1.13.1", "warning"),
        ("main", "note"),
    ],
)
def test_torch_versions(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert probe("torch").status == status


def test_oldest_torch_is_the_packages() -> None:
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, doctor.OLDEST_TORCH))}"' in pyproject


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert probe("torch_cuda").status == "note"


def test_free_threaded_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sysconfig, "get_config_var", lambda _: 1)
    assert probe("python").status == "problem"


LIBRARY = {"compiled": "nvcc 13.0.88, sm_80 compute_80", "runtime_version": (13, 0)}


@pytest.mark.parametrize(
    ("cuda", "status", "found"),
    [
        ({"driver_version": (13, 1), "devices": 2}, "ok", "the driver supports CUDA 13.1; 2 devices usable"),
        ({"driver_version": (13, 0), "devices": 1}, "ok", "1 device usable"),
        ({"driver_version": (12, 8), "problem": "too old"}, "warning", "supports CUDA 12.8; 0 devices"),
        ({"problem": "no driver"}, "note", "no NVIDIA driver, 0 devices"),
        ({"compiled": None, "runtime_version": None, "problem": "built without"}, "note", "no CUDA library"),
    ],
)
def test_cuda(system: Path, monkeypatch: pytest.MonkeyPatch, cuda: dict[str, Any], status: str, found: str) -> None:
    answer = {**LIBRARY, "driver_version": None, "devices": 0, "problem": None, **cuda}
    native(monkeypatch, cuda_status=lambda: answer)
    finding = probe("cuda")
    assert finding.status == status
    assert found in finding.found
    assert (answer["problem"] or "") in finding.advice
    if answer["compiled"] is None:
        write(system, {"dev/nvidiactl": ""})
        assert probe("cuda").status == "warning"


# Failures


class Panic(BaseException):
    """As pyo3's, no Exception."""


@pytest.mark.parametrize("error", [OSError("no such thing"), Panic("no such thing")])
@pytest.mark.parametrize("name", NAMES)
def test_a_probe_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, error: BaseException
) -> None:
    def fail() -> Any:
        raise error

    needed = {entry[0]: entry[2] for entry in doctor._PROBES}
    fine: doctor._Answer = ("ok", "fine", "")
    probes = [(n, fail if n == name else lambda: fine, needed[n]) for n in NAMES]
    monkeypatch.setattr(doctor, "_PROBES", probes)
    report = {finding.name: finding for finding in doctor.report()}
    assert list(report) == NAMES
    assert report[name].found == f"probing failed: {type(error).__name__}: no such thing"
    assert report[name].status == ("problem" if needed[name] else "warning")
    assert report[name].advice
    assert main(["doctor"]) == (1 if needed[name] else 0)
    assert "probing failed" in capsys.readouterr().out


def test_ctrl_c_is_no_failed_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_PROBES", [("build", interrupt, True)])
    assert main(["doctor"]) == 130


def test_other_bits_than_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    assert probe("host_step").status == "warning"
    assert "report it" in probe("host_step").advice


# The command


@pytest.fixture
def report_of_two(monkeypatch: pytest.MonkeyPatch) -> list[doctor.Finding]:
    report = [
        doctor.Finding("build", "ok", "as [it] should be", ""),
        doctor.Finding("threads", "note", "as it is", "Do [bold]this[/bold]."),
    ]
    monkeypatch.setattr(doctor, "report", lambda: report)
    return report


def test_json_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "outboard", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert list(answer) == ["usable", "findings"]
    assert answer["usable"] is True
    assert [finding["name"] for finding in answer["findings"]] == NAMES
    assert all(list(finding) == ["name", "status", "found", "advice"] for finding in answer["findings"])


def test_json_is_the_report(report_of_two: list[doctor.Finding], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"usable": True, "findings": [asdict(finding) for finding in report_of_two]}


def test_text(report_of_two: list[doctor.Finding], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok       build    as [it] should be",
        "note     threads  as it is",
        "                  -> Do [bold]this[/bold].",
        "",
        "outboard can update tensors in host memory here.",
    ]
    report_of_two.append(doctor.Finding("isa", "problem", "not there", "Cure it."))
    assert main(["doctor"]) == 1
    assert "outboard cannot update tensors in host memory here" in capsys.readouterr().out


def test_terminal(
    report_of_two: list[doctor.Finding], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["doctor"]) == 0
    table = capsys.readouterr().out
    assert "│" in table
    assert "as [it] should be" in table
    assert "Do [bold]this[/bold]." in table
    # Without rich the same is there as text.
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("ok       build    as [it] should be\n")


@pytest.mark.usefixtures("report_of_two")
def test_a_reader_that_has_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["doctor"]) == 141
    assert capsys.readouterr().err == ""


def test_a_level_that_is_not_there_is_a_problem_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        **_native.build_info(),
        "isa": None,
        "isa_problem": "OUTBOARD_ISA=sse9 is not a level; available: portable",
    }
    monkeypatch.setattr(_native, "build_info", lambda: known)
    finding = next(finding for finding in doctor.report() if finding.name == "isa")
    assert finding.status == "problem"
    assert "sse9" in finding.found
    assert "OUTBOARD_ISA" in finding.advice
