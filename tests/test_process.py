"""Forks, exits, threads, memory and the environment: what an optimizer does to the process it lives in.

Over 500 lines: independent cases in the order of their table, read one at a time.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import outboard
from oracle import Oracle, assert_same

Program = Callable[..., str]

#: Imports torch once (seconds) and runs each program in a fork of its own: it has one thread and has not seen outboard.
#: Where the end is what is tested, it ends as any interpreter does. A program that hangs is ended by its alarm.
SERVER = """
import json, os, signal, sys, warnings

import torch

# From 3.12 on Python warns of any fork beside threads; some programs fork beside their own.
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
torch.set_num_threads(1)
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # imports the compiler
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(output, 1)
os.dup2(output, 2)
os.environ.update(request["environment"])
sys.argv = ["program", *request["arguments"]]
signal.alarm(150)
exec(compile(request["program"], "<program>", "exec"))
if not request["exits"]:
    sys.stdout.flush()
    os._exit(0)  # half a second of taking torch apart
"""

#: What the programs below begin with: `train` steps an optimizer, `in_child` runs a function in a fork.
PRELUDE = """
import copy, gc, os, pickle, signal, sys, threading, time, traceback

import torch

import outboard


def parameters(sizes=(700, 3), dtype=torch.float32):
    return [torch.nn.Parameter(torch.arange(1.0, n + 1).to(dtype)) for n in sizes]


def train(optimizer, steps=1):
    for step in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = (p.detach() * (step + 1) - 2).to(p.dtype)
        optimizer.step()


def bits(optimizer):
    tensors = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    for state in optimizer.state_dict()["state"].values():
        tensors += [state[key] for key in sorted(state)]
    return [t.double().tolist() for t in tensors]


def in_child(work, exits=False):
    '''Return the exit status of a fork that calls `work`, and ends as an interpreter does if it `exits`.'''
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            work()
        except SystemExit:
            raise
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)
        if exits:
            sys.exit()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def raises(error, work, *words):
    try:
        work()
    except error as caught:
        assert type(caught) is error, repr(caught)
        assert all(word in str(caught) for word in words), str(caught)
    else:
        raise AssertionError(f"no {error.__name__}")
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """Run a program in a process of its own, check its exit status and return what it printed."""
    output: Path = tmp_path_factory.mktemp("programs") / "output"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OUTBOARD_")}
    environment.pop("LOCAL_WORLD_SIZE", None)
    command = [sys.executable, "-W", "error", "-c", SERVER]
    server = subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None

    def run(program: str, *arguments: str, expect: int = 0, exits: bool = False, **environment: str) -> str:
        assert server.stdin is not None
        assert server.stdout is not None
        request = {"program": textwrap.dedent(program), "arguments": arguments, "environment": environment}
        request |= {"output": str(output), "exits": exits}
        print(json.dumps(request), file=server.stdin, flush=True)
        status = server.stdout.readline()
        printed = output.read_text()
        assert status == f"{expect}\n", f"exit status {status}{printed}"
        assert "Fatal" not in printed, printed
        return printed

    yield run
    server.stdin.close()
    server.stdout.close()
    assert server.wait(60) == 0


@pytest.fixture
def program(bare: Program) -> Program:
    """Run a program that begins with the prelude."""
    return lambda text, *arguments, **options: bare(PRELUDE + textwrap.dedent(text), *arguments, **options)


# ---- forks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_child_gets_an_error_from_everything_and_the_parent_goes_on(program: Program, dtype: str) -> None:
    program(
        """
        dtype = getattr(torch, sys.argv[1])
        ps = parameters(dtype=dtype)
        optimizer = outboard.AdamW(ps, max_grad_norm=1.0)
        twin = outboard.AdamW(parameters(dtype=dtype), max_grad_norm=1.0)
        train(optimizer), train(twin)
        saved = copy.deepcopy(optimizer.state_dict())
        state = optimizer.state

        def child():
            p, weights = ps[0], [p.detach().clone() for p in ps]
            p.grad = torch.ones_like(p)
            for work in (
                lambda: optimizer.step(),
                lambda: optimizer.step(lambda: 0.0),
                lambda: optimizer.state,
                lambda: optimizer.state_dict(),
                lambda: optimizer.load_state_dict(saved),
                lambda: copy.deepcopy(optimizer),
                lambda: pickle.dumps(optimizer),
                lambda: optimizer.master(p),
                lambda: optimizer.load_master(p, torch.ones(700)),
                lambda: optimizer.reset(p),
                lambda: state[p].update(step=5.0),
                lambda: state[p].__setitem__("exp_avg", torch.ones(700)),
                lambda: setattr(optimizer, "state", {}),
                lambda: state.clear(),
            ):
                raises(outboard.ForkedError, work, str(os.getppid()), str(os.getpid()))
            assert all(torch.equal(p, w) for p, w in zip(ps, weights))
            optimizer.zero_grad()
            repr(optimizer)

        def grandchild():
            assert in_child(lambda: raises(outboard.ForkedError, optimizer.step)) == 0

        for turn, work in enumerate((child, grandchild, child)):
            assert in_child(work, exits=turn == 0) == 0
            train(optimizer), train(twin)
            assert bits(optimizer) == bits(twin)
        """,
        dtype,
    )


def test_an_optimizer_that_was_never_bound_works_in_the_child(program: Program) -> None:
    """Made before the fork and first used after it, in the child, in a second child and in the parent."""
    program(
        """
        other = outboard.AdamW(parameters())
        train(other)  # the parent has a pool of this many threads already
        optimizer = outboard.AdamW(parameters(), amsgrad=True)
        wanted = outboard.AdamW(parameters(), amsgrad=True)
        train(wanted, 3)
        wanted = bits(wanted)

        def child():
            assert optimizer.state_dict()["state"] == {}
            train(optimizer, 3)
            assert bits(optimizer) == wanted
            # What it has made itself is another process's for its own children.
            assert in_child(lambda: raises(outboard.ForkedError, optimizer.step, str(os.getppid()))) == 0
            train(optimizer)

        assert in_child(child, exits=True) == 0
        assert in_child(child) == 0
        train(optimizer, 3)
        assert bits(optimizer) == wanted
        raises_in_child = lambda: raises(outboard.ForkedError, optimizer.step)
        assert in_child(raises_in_child) == 0
        """
    )


def test_a_child_may_build_and_drop_while_the_parent_steps(program: Program) -> None:
    """Forks at any moment of another thread's steps: the child inherits no held lock and joins no absent thread."""
    program(
        """
        stop = threading.Event()
        stepping = outboard.AdamW(parameters((100_000,)), threads=2, chunk_elems=1000)

        def steps():
            while not stop.is_set():
                train(stepping)

        thread = threading.Thread(target=steps)
        train(stepping)
        wanted = outboard.AdamW(parameters(), threads=2)
        train(wanted, 2)
        wanted = bits(wanted)
        thread.start()

        def child():
            global stepping
            fresh = outboard.AdamW(parameters(), threads=2)
            train(fresh, 2)
            assert bits(fresh) == wanted
            try:
                stepping.step()
            except RuntimeError:  # ForkedError, unless the fork fell into the step
                pass
            else:
                raise AssertionError("an inherited optimizer stepped")
            del stepping, fresh
            gc.collect()

        try:
            assert [in_child(child) for _ in range(8)] == [0] * 8
        finally:
            stop.set()
            thread.join()
        """
    )


def test_multiprocessing_children(program: Program) -> None:
    program(
        """
        import multiprocessing

        context = multiprocessing.get_context("fork")
        optimizer = outboard.AdamW(parameters())
        train(optimizer)

        def work(queue, optimizer):
            try:
                optimizer.step()
            except outboard.ForkedError as error:
                queue.put(str(error))

        queue = context.Queue()
        children = [context.Process(target=work, args=(queue, optimizer)) for _ in range(2)]
        for child in children:
            child.start()
        messages = [queue.get(timeout=60) for _ in children]
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0, 0], children
        assert all("fork" in message for message in messages), messages
        train(optimizer)
        """
    )


def test_data_loader_with_forked_workers_each_epoch(program: Program) -> None:
    """DataLoader workers fork at each epoch while the optimizer is alive: the same training as without workers."""
    printed = program(
        """
        from torch.utils.data import DataLoader, TensorDataset

        data = TensorDataset(torch.arange(96.0).reshape(24, 4) / 96, torch.arange(24.0) / 24)

        def run(**workers):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
            optimizer = outboard.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
            losses = []
            for epoch in range(4):
                for x, y in DataLoader(data, batch_size=6, **workers):
                    loss = (model(x).squeeze(1) - y).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
            return losses, bits(optimizer)

        alone = run()
        assert run(num_workers=2, multiprocessing_context="fork") == alone
        assert alone[0][-1] < alone[0][0]
        print("trained")
        """
    )
    assert printed == "trained\n"


# ---- exits

ENDINGS = {
    "alive in every way": """
view, state = optimizer.state[ps[0]]['exp_avg'], optimizer.state
optimizer.itself = ps[0].owner = optimizer
orphan = outboard.AdamW(parameters())
train(orphan)
orphan = orphan.state
thread = threading.Thread(target=train, args=(optimizer,))
thread.start()
thread.join()
""",
    "stepped and made by atexit": """
import atexit

atexit.register(lambda: train(outboard.AdamW(parameters(), threads=3)))
atexit.register(train, optimizer)
""",
    "held by threads that go on": """
def work():
    own = outboard.AdamW(parameters(), threads=2)
    for _ in range(30):
        train(own)
        time.sleep(0.001)

for _ in range(3):
    threading.Thread(target=work).start()
thread = threading.Thread(target=lambda held: None, args=(optimizer,))
del optimizer
thread.start()
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_exits(program: Program, ending: str) -> None:
    start = "ps = parameters()\noptimizer = outboard.AdamW(ps, threads=2)\ntrain(optimizer)\n"
    program(start + ENDINGS[ending], exits=True)


FAILURES = {
    "in backward": """
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in backward")

(Fails.apply(ps[0]).sum() + ps[1].sum()).backward()
""",
    "after a worker's": """
optimizer._core.fail_next_step(ps[0], 500)
try:
    optimizer.step()
except outboard.WorkerError:
    pass
optimizer.step()
""",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_the_interpreter_exits_on_an_exception(program: Program, failure: str) -> None:
    """Status 1 is Python's for an exception that nobody catches: no signal, no hang."""
    start = "ps = parameters()\noptimizer = outboard.AdamW(ps, threads=2, chunk_elems=100)\ntrain(optimizer)\n"
    program(start + FAILURES[failure], expect=1, exits=True)


def test_an_exception_in_a_thread_leaves_the_others(program: Program) -> None:
    program(
        """
        failed = []
        threading.excepthook = lambda args: failed.append(args.exc_type)

        def work(fails):
            optimizer = outboard.AdamW(parameters(), threads=2, chunk_elems=50)
            train(optimizer, 5)
            if fails:
                optimizer._core.fail_next_step(optimizer.param_groups[0]["params"][0], 300)
            train(optimizer, 5)
            results.append(bits(optimizer))

        results = []
        threads = [threading.Thread(target=work, args=(i % 3 == 0,)) for i in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == [outboard.WorkerError] * 3, failed
        assert len(results) == 6 and all(result == results[0] for result in results)
        """
    )


# ---- threads


def test_threads_step_different_optimizers_at_once() -> None:
    """Optimizers that share the pool, stepped at once: each as its oracle."""
    mismatches: list[BaseException] = []
    started = threading.Barrier(6)

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            start = torch.randn(257 * (seed + 1), generator=generator)
            p = torch.nn.Parameter(start.clone())
            optimizer = outboard.AdamW([p], lr=0.01 * (seed + 1), threads=2, chunk_elems=64)
            oracle = Oracle(start, lr=0.01 * (seed + 1))
            started.wait(60)
            for _ in range(25):
                grad = torch.randn(p.shape, generator=generator)
                p.grad = grad.clone()
                optimizer.step()
                oracle.step(grad)
            oracle.assert_equal(optimizer, p)
        except BaseException as error:
            mismatches.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mismatches


def test_worker_threads_end_with_the_last_optimizer(program: Program) -> None:
    program(
        """
        def workers():
            names = []
            for task in os.listdir("/proc/self/task"):
                try:
                    with open(f"/proc/self/task/{task}/comm") as file:
                        names.append(file.read().strip())
                except (FileNotFoundError, ProcessLookupError):
                    pass
            return sorted(name for name in names if name.startswith("outboard-"))

        def expect(*numbers):
            # A thread takes its name once it runs, and leaves the listing a moment after it has been joined.
            wanted = [f"outboard-{number}" for number in numbers]
            for _ in range(6000):
                if workers() == wanted:
                    return
                time.sleep(0.01)
            raise AssertionError(f"{workers()}, wanted {wanted}")

        expect()
        first = outboard.AdamW(parameters(), threads=3)
        expect()
        train(first)
        expect(0, 1, 2)
        second = outboard.Adam(parameters(), threads=3)
        train(second)
        expect(0, 1, 2)  # optimizers share their threads
        view = second.state[second.param_groups[0]["params"][0]]["exp_avg"]
        third = outboard.AdamW(parameters(), threads=2)
        train(third)
        expect(0, 0, 1, 1, 2)
        del first, second
        expect(0, 1)
        del third
        expect()
        assert view.abs().sum() > 0
        """
    )


# ---- memory


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "state read", "copied", "refused"])
def test_memory_is_flat_over_200_optimizers(program: Program, kind: str) -> None:
    """4 MiB of state or more each: 200 leaked ones would take 800 MiB. The collector is off, as torch needs none."""
    program(
        """
        kind = sys.argv[1]
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        ps = [torch.nn.Parameter(torch.ones(1 << 17, dtype=dtype)) for _ in range(4)]
        for p in ps:
            p.grad = torch.ones_like(p)

        def once():
            optimizer = outboard.AdamW(ps, lr=1e-3)
            optimizer.step()
            if kind == "state read":
                views = [optimizer.state[p]["exp_avg_sq"] for p in ps]
                assert views[0][0] > 0 and len(optimizer.state_dict()["state"]) == 4
            if kind == "copied":
                other = outboard.AdamW(ps)
                other.load_state_dict(optimizer.state_dict())
                other.step()
            if kind == "refused":
                ps[3].grad = torch.ones(1 << 17).to_sparse()
                raises(TypeError, optimizer.step, "sparse")
                optimizer._core.fail_next_step(ps[0], 0)
                ps[3].grad = torch.ones(1 << 17)
                raises(outboard.WorkerError, optimizer.step)

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        def mappings():
            with open("/proc/self/maps") as file:
                return len(file.readlines())

        for _ in range(10):
            once()
        gc.collect()
        gc.disable()
        before = resident(), mappings()
        for _ in range(200):
            once()
        grown = resident() - before[0], mappings() - before[1]
        assert grown[0] < 60 << 20, f"{grown[0] >> 20} MiB more after 200 optimizers"
        assert grown[1] < 50, f"{grown[1]} mappings more after 200 optimizers"
        """,
        kind,
    )


def test_state_is_freed_with_the_optimizer_and_the_last_view(program: Program) -> None:
    """Dropping the optimizer frees its memory at once, but for what a view holds; the view stays whole."""
    program(
        """
        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

        ps = [torch.nn.Parameter(torch.ones(16 << 20)), torch.nn.Parameter(torch.ones(5))]
        for p in ps:
            p.grad = torch.full_like(p, 0.5)
        gc.collect()
        gc.disable()
        before = resident()
        optimizer = outboard.AdamW(ps, betas=(0.5, 0.999))
        optimizer.step()
        state = optimizer.state[ps[1]]
        assert resident() >= before + 120, "128 MiB of state"
        view = optimizer.state[ps[0]]["exp_avg"][10:]
        wanted = torch.full_like(view, 0.25)
        del optimizer
        assert resident() >= before + 120 + 50, "the view holds its slab"
        assert torch.equal(view, wanted)
        view.mul_(2)
        assert view.sum().item() == 0.5 * len(view)
        del view, wanted
        assert state["exp_avg"].tolist() == [0.25] * 5
        del state
        assert resident() < before + 40, f"{resident() - before} MiB left"
        """
    )


def test_optimizers_are_freed_without_the_collector() -> None:
    p = torch.nn.Parameter(torch.ones(100))
    gc.collect()
    gc.disable()
    try:
        optimizer = outboard.AdamW([p])
        p.grad = torch.ones(100)
        optimizer.step()
        assert optimizer.state[p]["step"] == 1
        assert len(optimizer.state_dict()["state"]) == 1
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["a parameter's attribute", "a step hook", "a module", "state", "itself"])
def test_cycles_through_an_optimizer_are_collected(kind: str) -> None:
    """As with torch's, which keep nothing the collector cannot see."""
    model = torch.nn.Linear(3, 3)
    optimizer = outboard.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    if kind == "a parameter's attribute":
        model.weight.owner = optimizer
    elif kind == "a step hook":
        optimizer.register_step_post_hook(lambda *_, optimizer=optimizer: None)
    elif kind == "a module":
        model.optimizer, optimizer.model = optimizer, model
    elif kind == "state":
        optimizer.state[model.weight]["mine"] = optimizer
    else:
        optimizer.itself = optimizer
    gone = weakref.ref(optimizer), weakref.ref(model)
    del optimizer, model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_views_read_and_write_after_the_optimizer() -> None:
    p, q = torch.nn.Parameter(torch.ones(3, 5)), torch.nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
    optimizer = outboard.AdamW([p, q], amsgrad=True)
    p.grad, q.grad = torch.full((3, 5), 2.0), torch.ones(7, dtype=torch.bfloat16)
    optimizer.step()
    views = {(i, key): tensor for i, t in enumerate((p, q)) for key, tensor in optimizer.state[t].items()}
    wanted = {key: tensor.clone() for key, tensor in views.items()}
    rows = views[0, "exp_avg"][1:, ::2]
    del optimizer
    gc.collect()
    others = []
    for _ in range(5):  # would take the memory over if it were free
        other = torch.nn.Parameter(torch.ones(3, 5))
        others.append(outboard.AdamW([other]))
        other.grad = torch.ones(3, 5)
        others[-1].step()
    for key, tensor in views.items():
        assert_same(tensor, wanted[key], str(key))
    views[0, "exp_avg"].fill_(9.0)
    views.clear()
    gc.collect()
    assert rows.tolist() == [[9.0] * 3] * 2


@pytest.mark.parametrize("offset", [0, 2, 1000])
def test_freed_storage_is_refused(program: Program, offset: int) -> None:
    """A storage of no bytes behind a tensor that still has its size, as sharding libraries leave it: no crash."""
    program(
        """
        offset = int(sys.argv[1])
        for steps in (0, 1):
            for what in ("parameter", "gradient"):
                print(steps, what, flush=True)
                p = torch.nn.Parameter(torch.ones(5000)[offset:])
                optimizer = outboard.AdamW([("weight", p)])
                for _ in range(steps):
                    p.grad = torch.ones(5000)[offset:]
                    optimizer.step()
                p.grad = torch.ones(5000)[offset:]
                (p if what == "parameter" else p.grad).untyped_storage().resize_(0)
                for _ in range(2):
                    raises(ValueError, optimizer.step, "weight", "freed")
        """,
        str(offset),
    )


# ---- the environment


def threads_of(bare: Program, before: str = "", threads: str = "None", **environment: str) -> tuple[int, str, int]:
    """Return the count that stats() reports, why, and how many threads there are."""
    program = f"""
import os, time

{before}
import torch

import outboard

p = torch.nn.Parameter(torch.ones(5))
optimizer = outboard.AdamW([p], threads={threads})
p.grad = torch.ones(5)
optimizer.step()

def running():
    count = 0
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{{task}}/comm") as file:
            count += file.read().startswith("outboard-")
    return count

# A thread takes its name once it runs.
deadline = time.monotonic() + 60
while running() < optimizer.stats()["threads"] and time.monotonic() < deadline:
    time.sleep(0.01)
print(optimizer.stats()["threads"])
print(optimizer.stats()["threads_why"])
print(running())
"""
    clean = {"OMP_NUM_THREADS": "", "LOCAL_WORLD_SIZE": "", "OUTBOARD_NUM_THREADS": ""}
    count, why, running = bare(program, **{**clean, **environment}).splitlines()
    return int(count), why, int(running)


def test_thread_counts(bare: Program) -> None:
    usable, why, running = threads_of(bare)
    online = os.cpu_count() or 1
    assert 1 <= usable <= len(os.sched_getaffinity(0))
    assert running == usable
    assert "CPUs" in why
    # torchrun sets it to 1 for reasons of its own.
    assert threads_of(bare, OMP_NUM_THREADS="1") == (usable, why, usable)
    count, why, running = threads_of(bare, OUTBOARD_NUM_THREADS="5", LOCAL_WORLD_SIZE="2")
    assert (count, running) == (5, 5)
    assert "OUTBOARD_NUM_THREADS" in why
    ranks = 4
    shared = usable if usable * ranks <= online else max(1, usable // ranks)
    count, why, running = threads_of(bare, LOCAL_WORLD_SIZE=str(ranks))
    assert (count, running) == (shared, shared)
    assert "LOCAL_WORLD_SIZE" in why
    count, why, running = threads_of(bare, threads="3", OUTBOARD_NUM_THREADS="5")
    assert (count, running) == (3, 3)
    assert "asked for" in why


def test_thread_counts_follow_the_affinity(bare: Program) -> None:
    bind = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    count, why, running = threads_of(bare, bind)
    assert (count, running) == (1, 1), why
    count, why, _ = threads_of(bare, bind, LOCAL_WORLD_SIZE="1")
    assert count == 1, why
    count, why, _ = threads_of(bare, bind, LOCAL_WORLD_SIZE="64")
    assert count == 1, why
    count, _, running = threads_of(bare, bind, OUTBOARD_NUM_THREADS="2")
    assert (count, running) == (2, 2)


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", "99999999999999999999"])
def test_a_bad_thread_count_is_an_error(bare: Program, value: str) -> None:
    bare(
        """
        import os

        import torch

        import outboard

        for _ in range(2):
            try:
                outboard.AdamW([torch.nn.Parameter(torch.ones(2))])
            except ValueError as error:
                assert f"OUTBOARD_NUM_THREADS={os.environ['OUTBOARD_NUM_THREADS']}" in str(error), error
            else:
                raise AssertionError("accepted")
        # A count of one's own does not read it.
        outboard.AdamW([torch.nn.Parameter(torch.ones(2))], threads=1)
        """,
        OUTBOARD_NUM_THREADS=value,
    )


def test_importing_loads_nothing_heavy_and_no_cuda(bare: Program) -> None:
    bare(
        """
        import sys

        import torch

        torch.cuda._lazy_init = lambda: 1 / 0
        assert "outboard" not in sys.modules
        before = set(sys.modules)
        import outboard

        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        assert new - set(sys.stdlib_module_names) == {"outboard"}, new
        with open("/proc/self/maps") as file:
            loaded_on_import = file.read()
        p = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        optimizer = outboard.AdamW([p], max_grad_norm=1.0, fused=None)
        p.sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.stats(), optimizer.master(p), repr(optimizer)
        assert not torch.cuda.is_initialized()
        with open("/proc/self/maps") as file:
            loaded_by_use = file.read()
        assert "libcuda.so" not in loaded_on_import + loaded_by_use
        """
    )


HASH = """
import hashlib

import torch

import outboard

torch.manual_seed(1)
ps = [torch.nn.Parameter(torch.randn(1003).to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
optimizer = outboard.AdamW(ps, amsgrad=True, state_dtype=torch.bfloat16, max_grad_norm=0.5)
for _ in range(5):
    for p in ps:
        p.grad = torch.randn(1003).to(p.dtype)
    optimizer.step()
digest = hashlib.sha256()
for p in ps:
    for tensor in (p.detach(), *optimizer.state[p].values()):
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        digest.update(repr(tensor.view(kind).tolist()).encode())
print(optimizer.stats()["isa"], digest.hexdigest())
"""


def test_every_isa_level_gives_the_same_bits(bare: Program) -> None:
    levels = outboard.build_info()["isa_available"]
    assert "portable" in levels
    default = bare(HASH, OUTBOARD_ISA="").split()
    assert default[0] == levels[0]
    for level in levels:
        assert bare(HASH, OUTBOARD_ISA=level).split() == [level, default[1]]


@pytest.mark.parametrize("level", ["sse9", "AVX2", "neon", "avx512"])
def test_a_level_that_is_not_there_is_a_clear_error(bare: Program, level: str) -> None:
    if level in outboard.build_info()["isa_available"]:
        pytest.skip(f"{level} is here")
    bare(
        """
        import os

        try:
            import torch

            import outboard

            outboard.AdamW([torch.nn.Parameter(torch.ones(2))])
        except ValueError as error:
            assert f"OUTBOARD_ISA={os.environ['OUTBOARD_ISA']}" in str(error), error
            assert "available: " in str(error) and "portable" in str(error), error
        else:
            raise AssertionError("accepted")
        """,
        OUTBOARD_ISA=level,
    )
