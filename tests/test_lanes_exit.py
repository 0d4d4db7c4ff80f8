"""Ends of processes and of optimizers with updates under way: the exit code is as intended, and every update that was
accepted is complete.

The weights lie in a file that is mapped: what a process has written to them is seen after it. Memory of a GPU is not,
so there only the exit codes are.

Over 500 lines: independent cases, read one at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outboard
from kill import INTERRUPTED
from lanes import Stack, TwinModel, is_pending
from oracle import assert_same

pytestmark = pytest.mark.timeout(120, method="thread")

SIZES = (500_000, 300_000, 70_000, 5)

PRELUDE = """
import os, signal, sys, threading, time
signal.alarm(60)  # what hangs dies of it, in native code too
import torch, outboard
from lanes import Stack, is_pending
from outboard._lanes import LaneOptions

device, seed, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if device == "cpu":
    LaneOptions.simulate = seed
torch.manual_seed(1)


class Failing(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Failing.armed:
            Failing.armed()
        return grad


class Model(Stack):
    def forward(self, x):
        for number, layer in enumerate(self):
            x = layer(Failing.apply(x) if number == 2 else x)
        return x


model = Model(*{sizes})
if device == "cpu":
    # Nothing of a simulated device outlives its process but this.
    mapped = torch.from_file(path, shared=True, size=sum({sizes}))
    at = 0
    for p in model.parameters():
        mapped[at : at + p.numel()] = p.detach()
        p.data = mapped[at : at + p.numel()]
        at += p.numel()
model.to(device)


def optimizer(**options):
    return outboard.AdamW(model.parameters(), lr=0.1, threads=1, chunk_elems=2_000, **options).attach(model)


def start(steps=1, **options):
    # Leave the last step's updates under way.
    opt = optimizer(**options)
    for step in range(steps):
        model.loss(step).backward()
        opt.step()
    assert all(map(is_pending, model.parameters()))
    return opt
"""


class Programs:
    """Runs programs, and says what weights they should have left."""

    def __init__(self, lanes_device: Any, python: Callable[..., str], tmp_path: Path) -> None:
        self.device, self.python, self.tmp_path = lanes_device, python, tmp_path
        self.path = tmp_path / "weights"
        self.path.write_bytes(bytes(4 * sum(SIZES)))

    def run(self, program: str, expect: int | tuple[int, ...] = 0, seed: int = 0) -> str:
        import textwrap

        from outboard._lanes import LaneOptions

        seed += LaneOptions.simulate or 0
        text = PRELUDE.replace("{sizes}", str(SIZES)) + textwrap.dedent(program)
        return self.python(text, str(self.device.device), str(seed), str(self.path), expect=expect)

    @property
    def stderr(self) -> str:
        return (self.tmp_path / "stderr").read_text()

    def check(self, steps: int = 1, only: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        """Fail unless all updates were complete; `only` these layers have had the last one."""
        if not self.device.is_simulated:
            return
        torch.manual_seed(1)
        model = Stack(*SIZES)
        twin = TwinModel(model, lr=0.1)
        for step in range(steps):
            twin.model.loss(step).backward()
            if step == steps - 1:
                for index, p in enumerate(twin.model.parameters()):
                    p.grad = p.grad if index in only else None
            twin.step()
        left = torch.from_file(str(self.path), shared=False, size=sum(SIZES)).split(SIZES)
        for index, (weight, wanted) in enumerate(zip(left, twin.twin.params, strict=True)):
            assert_same(weight, wanted.detach(), f"layer {index}")


@pytest.fixture
def programs(lanes_device: Any, python: Callable[..., str], tmp_path: Path) -> Programs:
    return Programs(lanes_device, python, tmp_path)


EAGER = pytest.mark.parametrize("eager", [True, False])


@EAGER
def test_the_program_ends(programs, eager) -> None:
    programs.run(f"opt = start(steps=2, eager={eager!r})")
    programs.check(2)


@EAGER
def test_sys_exit(programs, eager) -> None:
    programs.run(f"opt = start(eager={eager!r}); sys.exit(3)", expect=3)
    programs.check()


@EAGER
def test_exception_in_forward(programs, eager) -> None:
    programs.run(
        f"""
        opt = start(steps=2, eager={eager!r})
        model[3].forward = lambda x: 1 / 0
        model.loss(2)
        """,
        expect=1,
    )
    assert "ZeroDivisionError" in programs.stderr
    programs.check(2)


def test_exception_in_backward(programs) -> None:
    """The layers behind it have been updated, those before it have not."""
    programs.run(
        """
        def fail():
            raise ZeroDivisionError("in backward")

        opt = start(eager=True)
        Failing.armed = fail
        model.loss(1).backward()
        """,
        expect=1,
    )
    assert "ZeroDivisionError: in backward" in programs.stderr
    # The last one is tiny: those are taken at the end of backward, which did not come.
    programs.check(2, only=(2,))


def test_sys_exit_in_backward(programs) -> None:
    programs.run(
        """
        opt = start(eager=True)
        Failing.armed = lambda: sys.exit(7)
        model.loss(1).backward()
        """,
        expect=7,
    )
    programs.check(2, only=(2,))


def test_exception_between_backward_and_step(programs) -> None:
    hooks = "from outboard import _roster; _roster.TINY_ELEMS = 0; "  # on all of them
    programs.run(hooks + "opt = start(eager=True); model.loss(1).backward(); 1 / 0", expect=1)
    programs.check(2)


@EAGER
def test_keyboard_interrupt(programs, eager) -> None:
    programs.run(
        f"opt = start(eager={eager!r}); os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", expect=INTERRUPTED
    )
    assert "KeyboardInterrupt" in programs.stderr
    programs.check()


def test_keyboard_interrupt_in_backward(programs) -> None:
    programs.run(
        """
        opt = start(eager=True)
        Failing.armed = lambda: os.kill(os.getpid(), signal.SIGINT)
        model.loss(1).backward()
        time.sleep(30)
        """,
        expect=INTERRUPTED,
    )
    assert "KeyboardInterrupt" in programs.stderr
    # It is raised where Python gets to run next, maybe after all of backward.
    try:
        programs.check(2, only=(2,))
    except AssertionError:
        programs.check(2)


def test_keyboard_interrupt_while_waiting(programs) -> None:
    for seed in range(2):
        programs.run(
            f"""
            opt = start()
            signal.setitimer(signal.ITIMER_REAL, 0.001 * {seed + 1})
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            opt.synchronize()
            time.sleep(30)
            """,
            expect=INTERRUPTED,
            seed=seed,
        )
        assert "KeyboardInterrupt" in programs.stderr
        programs.check()


def test_keyboard_interrupt_that_is_caught(programs) -> None:
    """One goes on with the same optimizer."""
    programs.run(
        """
        opt = start()
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        except KeyboardInterrupt:
            pass
        model.loss(1).backward()
        opt.step()
        """
    )
    programs.check(2)


@pytest.mark.parametrize("how", ["del opt", "opt = None", "opt = optimizer()", "opt.close()", "opt.detach()"])
def test_the_optimizer_goes(programs, how) -> None:
    """`os._exit` leaves no time for anything: it was complete before."""
    programs.run(f"opt = start(); {how}; print('gone'); sys.stdout.flush(); os._exit(5)", expect=5)
    programs.check()


def test_the_optimizer_goes_while_its_state_stays(programs) -> None:
    programs.run(
        "opt = start(); state = opt.state; model.loss(1).backward(); opt.step(); del opt; os._exit(5)", expect=5
    )
    programs.check(2)


def test_the_optimizer_goes_in_a_cycle(programs) -> None:
    programs.run(
        """
        import gc
        opt = start()
        kept = list(model.parameters())
        opt.model, model.opt = model, opt
        del opt, model
        gc.collect()
        os._exit(5)
        """,
        expect=5,
    )
    programs.check()


def test_the_optimizer_goes_in_another_thread(programs) -> None:
    programs.run(
        """
        box = [start()]
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        os._exit(5)
        """,
        expect=5,
    )
    programs.check()


def test_trained_in_a_thread(programs) -> None:
    programs.run(
        """
        threading.Thread(target=lambda: globals().update(opt=start(steps=3))).start()
        """
    )
    programs.check(3)


def test_two_optimizers_at_the_end(programs) -> None:
    programs.run(
        """
        others = [torch.nn.Parameter(torch.ones(200_000, device=device)) for _ in range(3)]
        for p in others:
            p.grad = torch.ones_like(p)
        host = torch.nn.ParameterList(others)
        second = outboard.Adam(others, threads=1, chunk_elems=3_000).attach(host)
        opt = start()
        second.step()
        assert all(map(is_pending, others))
        """
    )
    programs.check()


def test_exit_handlers_that_read(programs) -> None:
    """Registered before outboard was imported, they run after it has closed its engines."""
    program = """
    def report():
        assert not opt.stats()["poisoned"]
        print(sum(p.double().sum().item() for p in model.parameters()))
        print(sorted(opt.state_dict()["state"][0]))

    import atexit
    from outboard import _engines
    atexit.unregister(_engines._close_all)
    atexit.register(report)
    atexit.register(_engines._close_all)
    opt = start()
    """
    out = programs.run(program).splitlines()
    programs.check()
    if programs.device.is_simulated:
        left = torch.from_file(str(programs.path), shared=False, size=sum(SIZES)).split(SIZES)
        assert float(out[0]) == sum(float(weight.double().sum()) for weight in left)
    assert out[1] == "['exp_avg', 'exp_avg_sq', 'step']"


def test_stepping_in_an_exit_handler(programs) -> None:
    programs.run(
        """
        def again():
            model.loss(1).backward()
            opt.step()
            opt.synchronize()

        import atexit
        from outboard import _engines
        atexit.unregister(_engines._close_all)
        atexit.register(again)
        atexit.register(_engines._close_all)
        opt = start()
        """
    )
    programs.check(2)


def test_a_failure_at_the_end_is_told(programs) -> None:
    programs.run(
        """
        opt = optimizer(mode="cpu", eager=False)
        model.loss(0).backward()
        opt._core.fail_next_step(model[1].weight, 299_999)
        opt.step()
        """
    )
    assert "parameter 1 of group 0" in programs.stderr
    assert "failed" in programs.stderr
    if programs.device.is_simulated:
        with pytest.raises(AssertionError, match="layer 1"):
            programs.check()


def test_killed(programs) -> None:
    programs.run("opt = start(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", expect=-15)
    programs.run("opt = start(); os._exit(4)", expect=4)


# ---- forks

FORK = """
import warnings
warnings.simplefilter("ignore")


def fork(then):
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            then()
        except SystemExit:
            raise
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(9)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""

CALLS = [
    "opt.step()",
    "opt.synchronize()",
    "opt.wait()",
    "opt.state",
    "opt.state_dict()",
    "opt.load_state_dict(saved)",
    "opt.attach(model)",
    "opt.master(model[0].weight)",
    "opt.reset(model[0].weight)",
    "opt.abandon()",
    "opt.stats()",
    "opt.plan()",
    "opt.take_timeline()",
    "__import__('copy').deepcopy(opt)",
    "__import__('pickle').dumps(opt)",
    "model[0].weight.sum()",
    "model.loss()",
    "model.state_dict()",
]


def test_what_a_fork_may_not_do(programs) -> None:
    """Each call raises ForkedError; none hangs, and the parent goes on."""
    out = programs.run(
        FORK
        + f"""
opt = start(steps=2)
saved = None
for number, call in enumerate({CALLS!r}):
    def then():
        try:
            eval(call)
        except outboard.ForkedError:
            pass
        except RuntimeError as error:
            # torch's own, of the tensors that the loss is made of.
            if device == "cpu" or "forked subprocess" not in str(error):
                raise
        else:
            print("no error:", call, flush=True)
    code = fork(then)
    if code:
        print("exit code", code, "of", call, flush=True)
"""
    )
    assert out == ""
    programs.check(2)


def test_what_a_fork_may_do(programs) -> None:
    """Leave, in every way, and drop what it has inherited; what looks on only may."""
    out = programs.run(
        FORK
        + """
def drop():
    global opt
    opt = None

def detach():
    try:
        opt.detach()
    except outboard.ForkedError:
        pass

def close():
    try:
        opt.close()
    except outboard.ForkedError:
        pass

def collect():
    global opt, model
    opt.model, model.opt = model, opt
    opt = model = None
    __import__("gc").collect()

opt = start(steps=2)
for then in (drop, detach, close, collect, lambda: [p.shape for p in model.parameters()], lambda: repr(opt)):
    code = fork(then)
    if code:
        print("exit code", code, flush=True)
for code in (0, 6):
    # The whole way out, exit handlers and all.
    found = fork(lambda: sys.exit(code))
    if found != code:
        print("exit code", found, "not", code, flush=True)
"""
    )
    assert out == ""
    programs.check(2)


def test_stats_in_a_fork(programs) -> None:
    """Whatever locks are held in the moment of the fork: the error comes before any is asked for."""
    out = programs.run(
        FORK
        + """
opt = optimizer(eager=False)
for step in range(12):
    model.loss(step).backward()
    opt.step()
    time.sleep(0.0005 * step)
    def then():
        try:
            opt.stats()
        except outboard.ForkedError:
            pass
    code = fork(then)
    if code:
        print("exit code", code, flush=True)
        break
"""
    )
    assert out == ""


def test_data_loader_workers(programs) -> None:
    """Forked in mid-flight at each epoch, they leave as usual and the parent's updates are right."""
    out = programs.run(
        FORK
        + """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(float(index))

opt = optimizer()
step = 0
for epoch in range(2):
    for batch in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        model.loss(step).backward()
        opt.step()
        step += 1
print(step)
"""
    )
    assert out == "4\n"
    programs.check(4)


def test_a_fork_trains_with_an_optimizer_of_its_own(programs) -> None:
    if not programs.device.is_simulated:
        pytest.skip("CUDA does not survive a fork")
    out = programs.run(
        FORK
        + """
opt = start()
opt.synchronize()

def then():
    mine = Stack(1000, 5)
    own = outboard.AdamW(mine.parameters(), threads=1).attach(mine)
    before = mine[0].weight.detach().clone()
    mine.loss().backward()
    own.step()
    assert not torch.equal(before, mine[0].weight)

code = fork(then)
if code:
    print("exit code", code)
"""
    )
    assert out == ""
    programs.check()


# ---- in this process


def test_garbage_with_updates_under_way(lanes_device) -> None:
    """In cycles, with the optimizer, its attachment and its native half in one heap of garbage."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = Stack(200_000, 5).to(lanes_device.device)
        twin = TwinModel(model, lr=0.1)
        opt = outboard.AdamW(model.parameters(), lr=0.1, threads=1, chunk_elems=2_000).attach(model)
        opt.register_step_post_hook(lambda *_, opt=opt: None)
        opt.param_groups[0]["mine"] = [opt, opt.state]
        model.loss().backward()
        opt.step()
        assert any(is_pending(p) for p in model.parameters())
        twin.model.loss().backward()
        twin.step()
        del opt
        gc.collect()
        twin.check_weights(f"round {seed}")
        assert all(type(p) is torch.nn.Parameter for p in model.parameters())
