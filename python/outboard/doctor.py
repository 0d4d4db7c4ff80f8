"""What this build and this machine can do for outboard. Also `python -m outboard doctor`.

Each finding is looked up in its own function; one that fails becomes a finding that says so. Files
of the system are read through `_read` alone. Nothing here changes a setting.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.utils.dlpack import from_dlpack

from outboard import _native
from outboard._adam import AdamW

Status = Literal["ok", "note", "warning", "problem"]

#: Oldest torch (major, minor) that outboard supports; pyproject.toml states the same.
OLDEST_TORCH = (2, 11)

#: First Linux (major, minor) with `MADV_COLLAPSE`, which makes huge pages of memory that exists.
COLLAPSE_LINUX = (6, 1)

#: Host bytes of state for one parameter: bf16 weights (residual and fp32 moments), fp32 weights.
_STATE_BYTES = {"bf16": 10, "fp32": 8}

#: Large enough that torch's allocator maps it afresh.
_TESTED_BYTES = 64 << 20

_GIB = 1 << 30
_IPC_LOCK = 14  # Bit of CAP_IPC_LOCK in a capability mask.
_FOR_GPU = "Tensors in host memory do not need it. For a GPU:"
_ROOT = Path("/")
_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked up.

    Attributes
    ----------
    name : str
        Stable; what to look a finding up by.
    status : {"ok", "note", "warning", "problem"}
        "note": good to know, nothing is wrong. "warning": something is slower or missing.
        "problem": tensors in host memory cannot be updated.
    found : str
        What was found.
    advice : str
        What to do about it; empty if nothing.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


#: What a probe returns: status, what was found, advice.
_Answer = tuple[Status, str, str]


def report() -> list[Finding]:
    """Look everything up.

    It maps 128 MiB for a moment, runs one step on 1,024 elements and, in a build with the CUDA
    library, starts the CUDA driver; no context is made on any device.

    Returns
    -------
    list of Finding
        Always the same names in the same order: `build`, `python`, `torch`, `torch_cuda`, `isa`,
        `threads`, `host_step`, `huge_pages`, `torch_huge_pages`, `memory`, `memory_lock`, `cuda`.
    """
    return [_find(name, probe, needed) for name, probe, needed in _PROBES]


def usable(findings: list[Finding]) -> bool:
    """Whether tensors in host memory can be updated: no finding is a problem."""
    return all(finding.status != "problem" for finding in findings)


def _find(name: str, probe: Callable[[], _Answer], needed: bool) -> Finding:
    try:
        return Finding(name, *probe())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # A panic in the native half is no Exception.
        found = f"probing failed: {type(error).__name__}: {error}"
    if needed:
        return Finding(name, "problem", found, "Optimizers need this: cure the error first.")
    return Finding(name, "warning", found, "The other findings do not depend on it.")


def _build() -> _Answer:
    info = _native.build_info()
    found = f"outboard {info['version']} for {info['target']}, {info['profile']} build"
    if info["profile"] != "release":
        return "warning", found, "It is many times slower than a release build: `make build`."
    return "ok", found, ""


def _python() -> _Answer:
    found = f"{platform.python_implementation()} {platform.python_version()}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        advice = "The wheel (abi3) cannot be loaded in a free-threaded Python: use the usual build."
        return "problem", f"{found}, free-threaded", advice
    return "ok", f"{found}; the extension is abi3: one build for 3.10 and newer", ""


def _torch() -> _Answer:
    oldest = ".".join(map(str, OLDEST_TORCH))
    found = f"torch {torch.__version__} (oldest supported: {oldest})"
    version = _version(torch.__version__)
    if version is None:
        return "note", found, f"Its version cannot be compared: see that it is {oldest} or newer."
    if version < OLDEST_TORCH:
        return "warning", found, f"Not tested with outboard: install torch {oldest} or newer."
    return "ok", found, ""


def _torch_cuda() -> _Answer:
    if torch.version.cuda is not None:
        return "ok", f"torch is built for CUDA {torch.version.cuda}", ""
    advice = "Enough for tensors in host memory; models on an NVIDIA GPU need a CUDA build of torch."
    return "note", "torch is built without CUDA", advice


def _isa() -> _Answer:
    info = _native.build_info()
    level, available = info["isa"], info["isa_available"]
    if info.get("isa_problem"):
        return "problem", info["isa_problem"], "Unset OUTBOARD_ISA, or set it to one of those."
    forced = os.environ.get("OUTBOARD_ISA")
    origin = f"forced by OUTBOARD_ISA={forced}" if forced else "the best; OUTBOARD_ISA is not set"
    found = f"{level} in use ({origin}); available: {', '.join(available)}"
    if level != available[0]:
        advice = f"Unset OUTBOARD_ISA to use {available[0]}: the same bits, sooner."
        return "note", found, advice
    if level == "portable":
        advice = "The same bits as anywhere, slowly: a CPU with AVX2 and FMA is many times faster."
        return "warning", found, advice
    return "ok", found, ""


def _threads() -> _Answer:
    threads, why = _native.default_threads()
    found = f"{threads} worker {'thread' if threads == 1 else 'threads'} by default: {why}"
    status: Status = "ok"
    advice = []
    omp = os.environ.get("OMP_NUM_THREADS")
    if omp:
        found += f"; OMP_NUM_THREADS={omp} is not read"
        if omp != str(threads):
            status = "note"
            advice.append("To choose another number, set OUTBOARD_NUM_THREADS or pass threads=.")
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    if ranks and not ranks.isdecimal():
        status = "warning"
        advice.append(f"LOCAL_WORLD_SIZE={ranks} is no number and is taken as 1: correct it.")
    cpus = len(os.sched_getaffinity(0))
    if threads > cpus:
        status = "warning"
        advice.append(f"Only {cpus} CPUs can be used: lower OUTBOARD_NUM_THREADS.")
    return status, found, " ".join(advice)


def _host_step() -> _Answer:
    values = torch.linspace(-1, 1, 1024, dtype=torch.float32, device="cpu")
    ours, theirs = (torch.nn.Parameter(values.clone()) for _ in range(2))
    ours.grad, theirs.grad = values.flip(0), values.flip(0)
    AdamW([ours]).step()
    torch.optim.AdamW([theirs], fused=True).step()
    found = "one AdamW step on 1,024 fp32 elements"
    if torch.equal(ours, theirs):
        return "ok", f"{found}: the same bits as torch.optim.AdamW(fused=True)", ""
    advice = "It should: please report it with what `python -m outboard doctor --json` prints."
    return "warning", f"{found} differs from torch.optim.AdamW(fused=True)", advice


def _huge_pages() -> _Answer:
    plane = _native.host_tensor(_TESTED_BYTES // 4, "float32", 1)
    measured = _huge_part(from_dlpack(plane))
    mode, linux = _huge_page_mode(), _linux()
    found = f"{_huge_text(measured)}; transparent huge pages: {mode or 'the kernel does not say'}"
    if linux is not None:
        knows = "with" if linux >= COLLAPSE_LINUX else "before 6.1, without"
        found += f"; Linux {linux[0]}.{linux[1]}, {knows} MADV_COLLAPSE"
    if measured is not None and measured[0] >= 0.9 * measured[1]:
        return "ok", f"state: {found}", ""
    status: Status = "note" if measured is None else "warning"
    return status, f"state: {found}", _huge_page_advice(mode, measured is not None)


def _huge_page_advice(mode: str | None, measured: bool) -> str:
    if mode == "never":
        return f"Up to twice as fast with them; as root: echo madvise > /{_HUGE_PAGES}/enabled"
    if re.search(r"^THP_enabled:\s*0", _read("proc/self/status") or "", re.MULTILINE):
        return (
            "They are off for this process (prctl PR_SET_THP_DISABLE), by whatever started it: "
            "start Python without that."
        )
    size = (_read(f"{_HUGE_PAGES}/hpage_pmd_size") or "").strip()
    if size.isdecimal() and int(size) > 2 << 20:
        return (
            f"This kernel's huge pages are {int(size) >> 20} MiB: only large optimizers get any. "
            "Kernels with 4 KiB pages have huge ones of 2 MiB."
        )
    if not measured:
        return "Nothing needs them, but memory-bound steps are up to twice as fast with them."
    return (
        "Free memory may be in pieces: as root, echo 1 > /proc/sys/vm/compact_memory, then start "
        "again; or run fewer programs beside it."
    )


def _torch_huge_pages() -> _Answer:
    tensor = torch.ones(_TESTED_BYTES // 4, dtype=torch.float32, device="cpu")
    measured = _huge_part(tensor)
    found = f"torch's own CPU tensors: {_huge_text(measured)}"
    if measured is None:
        return "note", found, ""
    if measured[0] >= 0.5 * measured[1]:
        return "ok", found, ""
    if _huge_page_mode() == "never" or os.environ.get("THP_MEM_ALLOC_ENABLE") == "1":
        return "note", found, "What huge_pages says comes first."
    advice = (
        "For weights and gradients that live on the CPU: set THP_MEM_ALLOC_ENABLE=1 before Python "
        "starts (torch reads it)."
    )
    return "note", found, advice


def _huge_page_mode() -> str | None:
    chosen = re.search(r"\[(\w+)\]", _read(f"{_HUGE_PAGES}/enabled") or "")
    return chosen[1] if chosen else None


def _huge_part(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the bytes on huge pages and the bytes in memory of the mapping a tensor lies in.

    A neighbour of the same kind may share the mapping, so that it can be larger than the tensor.
    """
    address, inside = tensor.data_ptr(), False
    sizes: dict[str, int] = {}
    for line in (_read("proc/self/smaps") or "").splitlines():
        if heading := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(heading[1], 16) <= address < int(heading[2], 16)
        elif inside and (size := re.match(r"(\w+):\s*(\d+) kB", line)):
            sizes[size[1]] = int(size[2]) << 10
    huge, resident = sizes.get("AnonHugePages"), sizes.get("Rss")
    return (huge, resident) if huge is not None and resident else None


def _huge_text(measured: tuple[int, int] | None) -> str:
    if measured is None:
        return "not known whether on huge pages (/proc/self/smaps does not say)"
    huge, resident = measured
    return f"{huge >> 20} of {resident >> 20} MiB on huge pages when tried"


def _linux() -> tuple[int, int] | None:
    return _version(platform.release()) if platform.system() == "Linux" else None


def _version(text: str) -> tuple[int, int] | None:
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def available_memory() -> tuple[int, str] | None:
    """Return the bytes of host memory that this process can still take and what bounds them.

    The lesser of what the machine has and what is left below the memory limits of the process's
    cgroups (both versions). None if the system tells neither.
    """
    bounds = []
    machine = _meminfo()
    if "MemAvailable" in machine:
        total = machine.get("MemTotal", machine["MemAvailable"])
        bounds.append((machine["MemAvailable"], f"of {total / _GIB:.1f} GiB of host memory"))
    for limit, used in _cgroup_limits():
        if limit < machine.get("MemTotal", sys.maxsize):
            bounds.append((max(limit - used, 0), f"below the cgroup's limit of {limit / _GIB:.1f} GiB"))
    return min(bounds, default=None)


def _memory() -> _Answer:
    limits = [limit for limit, _ in _cgroup_limits()]
    bound = available_memory()
    if bound is None:
        return "note", "available host memory is not known (/proc/meminfo does not say)", ""
    free, text = bound
    total = _meminfo().get("MemTotal", sys.maxsize)
    found = f"{free / _GIB:.1f} GiB available {text}"
    if not any(limit < total for limit in limits):
        found += "; no cgroup limit below that" if limits else "; no cgroup limit found"
    room = (f"{free / each / 1e9:.1f} billion {name}" for name, each in _STATE_BYTES.items())
    found += f"; room for the state of {' or '.join(room)} parameters"
    if free < _GIB:
        return "warning", found, "Optimizer state lives here: free memory or raise the limit."
    return "ok", found, ""


def _meminfo() -> dict[str, int]:
    pairs = re.findall(r"^(\w+):\s*(\d+) kB", _read("proc/meminfo") or "", re.MULTILINE)
    return {name: int(kib) << 10 for name, kib in pairs}


def _cgroup_limits() -> list[tuple[int, int]]:
    """Return (limit, used) in bytes of the process's cgroup and those above it that have a limit.

    Used bytes are without the page cache that the kernel would give up first.
    """
    limits = []
    for folder, version in _cgroup_folders():
        names = {
            2: ("memory.max", "memory.current", "inactive_file"),
            1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        }[version]
        limit, used = ((_read(f"{folder}/{name}") or "").strip() for name in names[:2])
        if limit.isdecimal() and used.isdecimal():
            stat = _read(f"{folder}/memory.stat") or ""
            cache = re.search(rf"^{names[2]} (\d+)", stat, re.MULTILINE)
            limits.append((int(limit), max(int(used) - int(cache[1] if cache else 0), 0)))
    return limits


def _cgroup_folders() -> list[tuple[str, int]]:
    """Return the folders of the process's memory cgroups, innermost first, with their version."""
    paths: dict[int, str] = {}
    for line in (_read("proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    folders = []
    for line in (_read("proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if kind[0] == "cgroup2" else 1
        if version not in paths or (version == 1 and "memory" not in kind[-1].split(",")):
            continue
        # A container may see its own cgroup as the root of the mount.
        root, mount, path = fields[3].rstrip("/"), fields[4], paths[version]
        below = path[len(root) :] if path == root or path.startswith(f"{root}/") else ""
        parts = [part for part in below.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            folders.append(("/".join([mount.lstrip("/"), *parts[:depth]]), version))
    return folders


def _memory_lock() -> _Answer:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = f"memory-lock limit: {_limit(soft)}"
    if soft != resource.RLIM_INFINITY:
        found += f" (may be raised to {_limit(hard)})" if hard != soft else " (soft and hard)"
        if _exempt_from_memory_lock():
            found += ", not enforced for this process (CAP_IPC_LOCK)"
        else:
            return (
                "note",
                found,
                "Only matters where state is pinned for a GPU. If pinning fails: ulimit -l "
                "unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity for systemd.",
            )
    if "microsoft" in platform.release().lower():
        return "note", f"{found}; WSL", "WSL limits pinned memory on its own account."
    return "ok", found, ""


def _exempt_from_memory_lock() -> bool:
    mask = re.search(r"^CapEff:\s*([0-9a-f]+)", _read("proc/self/status") or "", re.MULTILINE)
    # The capability counts in the first user namespace only, not in that of a rootless container.
    first_namespace = (_read("proc/self/uid_map") or "").split() == ["0", "0", "4294967295"]
    return first_namespace and mask is not None and bool(int(mask[1], 16) >> _IPC_LOCK & 1)


def _limit(value: int) -> str:
    import resource

    return "unlimited" if value == resource.RLIM_INFINITY else f"{value >> 10:,} KiB"


def _cuda() -> _Answer:
    status = _native.cuda_status()
    compiled, devices, driver = status["compiled"], status["devices"], status["driver_version"]
    problem = status["problem"] or ""
    if compiled is None:
        found = "this build has no CUDA library"
        if (_ROOT / "dev/nvidiactl").exists():
            return "warning", f"{found}, and the machine has an NVIDIA driver", f"{problem}."
        return "note", f"{found}; no NVIDIA driver is visible", f"{_FOR_GPU} {problem}."
    runtime = status["runtime_version"]
    found = f"CUDA library present ({compiled}; runtime {_dotted(runtime)})"
    if driver is None:
        return "note", f"{found}; no NVIDIA driver, 0 devices", f"{_FOR_GPU} {problem}."
    found += f"; the driver supports CUDA {_dotted(driver)}; {devices} device"
    found += "" if devices == 1 else "s"
    if problem:
        return "warning", found, f"{problem}."
    return "ok", f"{found} usable", ""


def _dotted(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else ".".join(map(str, version))


def _read(path: str) -> str | None:
    """Return a system file's text, None if there is none; `path` is relative to the root."""
    try:
        return (_ROOT / path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


#: Name, probe, and whether tensors in host memory cannot be updated when the probe raises.
_PROBES: tuple[tuple[str, Callable[[], _Answer], bool], ...] = (
    ("build", _build, True),
    ("python", _python, False),
    ("torch", _torch, False),
    ("torch_cuda", _torch_cuda, False),
    ("isa", _isa, True),
    ("threads", _threads, True),
    ("host_step", _host_step, True),
    ("huge_pages", _huge_pages, False),
    ("torch_huge_pages", _torch_huge_pages, False),
    ("memory", _memory, False),
    ("memory_lock", _memory_lock, False),
    ("cuda", _cuda, False),
)
