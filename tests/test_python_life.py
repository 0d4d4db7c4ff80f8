"""Processes and threads as programs have them: children that are sent an optimizer, torchrun's ranks, the limits of
containers, threads that each train a model.

Forks, exits, copies and what a thread count is made of are in test_process.py, test_cases_process.py,
test_lanes_exit.py and test_lanes_owners.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fused import EAGER, EAGER_IDS, FusedRig, mlp, mlp_loss

TESTS = Path(__file__).parent


def run(script: Path, text: str, *command: str, **environment: str) -> str:
    """Run a program from a file, as children that import it anew need; return what it printed."""
    script.write_text(textwrap.dedent(text))
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OUTBOARD_", "OMP_"))}
    kept["PYTHONPATH"] = os.pathsep.join([str(TESTS), kept.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command, str(script)],
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# ---- children that are sent an optimizer


def test_spawn_and_forkserver_children(tmp_path) -> None:
    """They receive an attached model with its optimizer, and a plain one: each trains on with the parent's bits.

    Sent as an argument, tensors move to memory that both processes share, as with any optimizer of torch's: the parent
    follows its own there. Sent as bytes they are copies.
    """
    run(
        tmp_path / "program.py",
        """
        import multiprocessing, pickle

        import torch

        import outboard
        from outboard import _roster
        from outboard._lanes import LaneOptions

        torch.set_num_threads(1)
        LaneOptions.simulate = 11
        _roster.TINY_ELEMS = 50


        def train(model, optimizer, steps):
            for step in range(steps):
                model(torch.linspace(-1, 1, 32).reshape(2, 16) * (step + 1)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()


        def bits(model, optimizer):
            state = optimizer.state_dict()["state"]
            tensors = [*(p.detach() for p in model.parameters()), *(v for s in state.values() for v in s.values())]
            return [t.double().tolist() for t in tensors]


        def work(queue, name, pair, data):
            try:
                for model, optimizer in (pair, pickle.loads(data)):
                    assert optimizer.param_groups[0]["params"][0] is model[0].weight, "one object in one message"
                    assert not model[0]._forward_pre_hooks or all(
                        hook._target() is None for hook in model[0]._forward_pre_hooks.values()
                    )
                    if name != "plain":
                        optimizer.attach(model)
                    train(model, optimizer, 2)
                    queue.put((name, bits(model, optimizer)))
            except BaseException as error:
                queue.put((name, repr(error)))
                raise


        def pair_of(name):
            torch.manual_seed(4)
            model = torch.nn.Sequential(torch.nn.Linear(16, 48), torch.nn.Tanh(), torch.nn.Linear(48, 16))
            optimizer = outboard.AdamW(model.parameters(), lr=0.01, threads=1)
            if name != "plain":
                optimizer.attach(model)
            train(model, optimizer, 3)
            return model, optimizer


        if __name__ == "__main__":
            wanted, children = {}, []
            for name in ("plain", "attached"):
                model, optimizer = pair_of(name)
                train(model, optimizer, 2)
                wanted[name] = bits(model, optimizer)
            assert wanted["plain"] == wanted["attached"]
            queues = {}
            for method, name in (("spawn", "attached"), ("forkserver", "plain")):
                context = multiprocessing.get_context(method)
                queue = queues[name] = context.Queue()
                pair = pair_of(name)
                child = context.Process(target=work, args=(queue, name, pair, pickle.dumps(pair)))
                child.start()
                children.append((child, pair))
            for name, queue in queues.items():
                for how in ("as an argument", "as bytes"):
                    got = queue.get(timeout=120)
                    assert not isinstance(got[1], str), got
                    assert got == (name, wanted[name]), f"{name}, {how}"
            for child, (model, optimizer) in children:
                child.join()
                assert child.exitcode == 0
                # The child has trained the shared weights; the state here is the parent's, and it goes on.
                assert all(p.is_shared() for p in model.parameters())
                before = [p.detach().clone() for p in model.parameters()]
                train(model, optimizer, 1)
                optimizer.synchronize()
                assert {float(s["step"]) for s in optimizer.state.values()} == {4.0}
                for p, old in zip(model.parameters(), before):
                    assert (p != old).any()
        """,
    )


# ---- thread counts


def test_torchrun(tmp_path) -> None:
    """Two real ranks, started by torchrun, which sets OMP_NUM_THREADS to 1: each takes half of the CPUs."""
    printed = run(
        tmp_path / "program.py",
        """
        import json, os

        import torch

        import outboard

        p = torch.nn.Parameter(torch.linspace(-1, 1, 5000))
        optimizer = outboard.AdamW([p])
        p.grad = torch.ones_like(p)
        optimizer.step()
        stats = optimizer.stats()
        found = {"omp": os.environ["OMP_NUM_THREADS"], "threads": stats["threads"], "why": stats["threads_why"]}
        # In one write: the ranks share the output.
        os.write(1, ("\\n" + json.dumps({**found, "rank": int(os.environ["RANK"])}) + "\\n").encode())
        """,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    )
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    usable = len(os.sched_getaffinity(0))
    assert sorted(each["rank"] for each in found) == [0, 1]
    for each in found:
        assert each["omp"] == "1"
        assert 1 <= each["threads"] <= max(1, usable // 2)
        assert "LOCAL_WORLD_SIZE" in each["why"]


#: For each version of control groups: limits of two groups, from the outermost in, and the CPUs that they allow.
LIMITS: dict[str, dict[str, tuple[str, str, int]]] = {
    "cgroup v2": {
        "no limit": ("max 100000", "max 100000", 1000),
        "one CPU": ("max 100000", "100000 100000", 1),
        "below one CPU": ("max 100000", "25000 100000", 1),
        "one and a half": ("max 100000", "150000 100000", 1),
        "the outer one is smaller": ("100000 100000", "800000 100000", 1),
        "the outer one is below one CPU": ("50000 100000", "max 100000", 1),
        "larger than the machine": ("max 100000", "102400000 100000", 1000),
    },
    "cgroup v1": {
        "no limit": ("-1 100000", "-1 100000", 1000),
        "one CPU": ("-1 100000", "100000 100000", 1),
        "below one CPU": ("-1 100000", "25000 100000", 1),
        "the outer one is smaller": ("100000 100000", "800000 100000", 1),
        "another period": ("-1 100000", "20000 20000", 1),
    },
}


@pytest.mark.parametrize("version", LIMITS)
def test_limits_of_control_groups(version, python, tmp_path) -> None:
    """What a container's runtime writes, in groups within groups, of both versions: the smallest counts, at least 1.

    The files are this test's, put over the kernel's in a mount namespace of the program's own.
    """
    usable = len(os.sched_getaffinity(0))
    if usable < 2:
        pytest.skip("os.sched_getaffinity(0) has one CPU, which hides every limit")
    program = """
        import ctypes, json, os, sys
        from pathlib import Path

        version, limits, where = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
        libc = ctypes.CDLL(None, use_errno=True)
        NEW_NAMESPACE, BIND, PRIVATE = 0x20000, 0x1000, 0x44000
        if libc.unshare(NEW_NAMESPACE):
            print("null")
            sys.exit()
        own, root = where / "cgroup", where / "groups"
        own.write_text("0::/outer/inner\\n" if "v2" in version else "3:memory:/\\n1:cpu,cpuacct:/outer/inner\\n")
        outer = (root if "v2" in version else root / "cpu") / "outer"
        (outer / "inner").mkdir(parents=True)
        mounts = ("none", "/", PRIVATE), (own, f"/proc/{os.getpid()}/cgroup", BIND), (root, "/sys/fs/cgroup", BIND)
        for what, over, flags in mounts:
            status = libc.mount(str(what).encode(), over.encode(), None, flags, None)
            assert status == 0, os.strerror(ctypes.get_errno())
        assert Path("/proc/self/cgroup").read_text() == own.read_text()

        import outboard, torch

        found = {}
        for name, (*both, _) in limits.items():
            for group, limit in zip((outer, outer / "inner"), both):
                if "v2" in version:
                    (group / "cgroup.controllers").write_text("cpu")
                    (group / "cpu.max").write_text(limit)
                else:
                    quota, period = limit.split()
                    (group / "cpu.cfs_quota_us").write_text(quota)
                    (group / "cpu.cfs_period_us").write_text(period)
            stats = outboard.AdamW([torch.ones(1, requires_grad=True)]).stats()
            found[name] = stats["threads"], stats["threads_why"]
        print(json.dumps(found))
    """
    arguments = version, json.dumps(LIMITS[version]), str(tmp_path)
    found = json.loads(python(program, *arguments, OUTBOARD_NUM_THREADS="", LOCAL_WORLD_SIZE=""))
    if found is None:
        pytest.skip("no mount namespace can be made here: `unshare -m true` fails (not root?)")
    assert found.keys() == LIMITS[version].keys()
    for name, (_, _, allowed) in LIMITS[version].items():
        count, why = found[name]
        assert count == min(usable, allowed), name
        assert ("usable" in why) == (count < (os.cpu_count() or 1)), why


# ---- threads


@pytest.mark.usefixtures("small_ones_have_hooks")
@pytest.mark.parametrize("when", EAGER, ids=EAGER_IDS)
def test_threads_that_each_train_a_model(lanes_device, when) -> None:
    """At once, each with a model and an attached optimizer of its own, which share a device and worker threads."""
    rigs: list[FusedRig] = []
    for _ in range(3):
        rigs.append(FusedRig(lanes_device, mlp(64), mlp_loss, lr=0.01, **when))
    started = threading.Barrier(len(rigs))
    errors: list[BaseException] = []

    def train(rig: FusedRig) -> None:
        try:
            torch.set_num_threads(1)
            started.wait(60)
            for step in range(6):
                rig.step(step)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(rig,)) for rig in rigs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for rig in rigs:
        assert (rig.eager_updates > 0) == (when["eager"] is not False)
        rig.check()


@pytest.mark.usefixtures("small_ones_have_hooks")
@pytest.mark.parametrize("when", EAGER[:3], ids=EAGER_IDS[:3])
def test_two_optimizers_of_one_model_in_one_thread(lanes_device, when) -> None:
    """As for a generator and a discriminator, or a body and a head: one backward, two attached optimizers, in turn."""
    body, head = mlp(64).to(lanes_device.device), torch.nn.Linear(16, 16).to(lanes_device.device)

    def both_of(rigs: list[Any], number: int) -> torch.Tensor:
        return rigs[1](rigs[0](torch.linspace(-1, 1, 64, device=lanes_device.device).reshape(4, 16) + number)).sum()

    rigs = [
        FusedRig(lanes_device, model, lambda m, step: m, lr=lr, **when) for model, lr in ((body, 0.01), (head, 0.1))
    ]
    for step in range(5):
        both_of([rig.model for rig in rigs], step).backward()
        for rig in rigs if step % 2 else reversed(rigs):
            rig.opt.step()
            rig.opt.zero_grad()
        both_of([rig.their_model for rig in rigs], step).backward()
        for rig in rigs:
            rig.twin.step()
    for rig in rigs:
        assert (rig.eager_updates > 0) == (when["eager"] is not False)
        rig.check()


# ---- Pythons


def test_a_free_threaded_python_is_told(python) -> None:
    """The extension is of the stable ABI, which such a Python cannot load: an ImportError that says so."""
    printed = python(
        """
        import sysconfig
        sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1
        try:
            import outboard
        except ImportError as error:
            print(error)
        """
    )
    assert "free-threaded Python cannot load" in printed
