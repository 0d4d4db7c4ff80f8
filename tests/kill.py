"""Processes that end in the middle of training, for `test_kill.py`.

Run as a program, it imports torch, which takes seconds, and forks a process for each case that it is told to run. Each
process imports outboard itself, trains an attached model and ends as the case says. What is checked then is checked at
exit, after outboard's own exit handler: each parameter has been updated as often as its `step` says, completely, weight
and state; a run that updates synchronously says what that gives.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

STEPS = 14
WIDTH = 288  # weights are large enough for a hook of their own
LAYERS = 4
#: Exit status of a process in which updates were lost or half done.
LOST = 99
#: What an interrupt that nobody catches ends a process with: the signal, or 1 where a function of torch's compiler at
#: exit imports `tabulate`, if that is installed, after which Python does not know of the interrupt any more (seen with
#: torch 2.11 once an optimizer had been made). Whoever expects this also looks for KeyboardInterrupt on stderr.
INTERRUPTED = (-signal.SIGINT, 1)
#: What each case's process is to exit with.
STATUS = {
    "exception in backward": (1,),
    "exception in forward": (1,),
    "interrupt": INTERRUPTED,
    "interrupt that is caught": (0,),
    "exit": (7,),
    "drop": (0,),
}
LIMIT_SECONDS = 60


class Model(torch.nn.Module):
    def __init__(self, fails_at: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.fails_at = fails_at
        self.armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from lanes import Fails  # imports outboard: see `Case.run`

        for number, layer in enumerate(self.layers):
            if number == self.fails_at:
                if self.armed:
                    raise RuntimeError("asked for in forward")
                x = Fails.apply(x)
            x = torch.tanh(layer(x))
        return x


class Case:
    """One process's training, up to its end."""

    def __init__(self, kind: str, seed: int, device: str) -> None:
        self.kind = kind
        self.random = random.Random(f"{kind}/{seed}")
        self.device = torch.device("cuda" if device == "cuda" else "cpu")
        self.dtype = self.random.choice([torch.float32, torch.bfloat16])
        self.fails_at = self.random.randrange(1, LAYERS)  # the input has no gradient
        self.last = self.random.randrange(2, STEPS)
        self.seed = seed

    def model(self) -> Model:
        return Model(self.fails_at).to(self.dtype).to(self.device)

    def backward(self, model: Model, step: int) -> None:
        torch.manual_seed(step)
        x = torch.randn(4, WIDTH).to(self.dtype).to(self.device)
        model(x).float().square().mean().backward()

    def reference(self, outboard: Any) -> list[list[dict[str, torch.Tensor]]]:
        """Weights and state after each number of updates, by a host optimizer that is done when `step()` returns."""
        model = self.model()
        params = [torch.nn.Parameter(p.detach().cpu().clone()) for p in model.parameters()]
        optimizer = outboard.AdamW(params, lr=1e-2, threads=1)
        after = []
        for step in range(STEPS + 1):
            after.append([self.snapshot(p, optimizer.state[p]) for p in params])
            model.zero_grad()
            self.backward(model, step)
            for p, copy in zip(model.parameters(), params, strict=True):
                copy.grad = p.grad.cpu()
            optimizer.step()
            with torch.no_grad():
                for p, copy in zip(model.parameters(), params, strict=True):
                    p.copy_(copy)
        return after

    @staticmethod
    def snapshot(p: torch.Tensor, state: Any) -> dict[str, torch.Tensor]:
        return {"weight": p.detach().cpu().clone(), **{key: plane.cpu().clone() for key, plane in state.items()}}

    def check(self, *, of_state: bool = True) -> None:
        """Fail unless each parameter is what so many updates make of it, those that `step()` accepted among them."""
        for number, p in enumerate(self.trained.parameters()):
            found = self.snapshot(p, self.views[number])
            updates = int(found["step"])
            assert self.stepped <= updates <= self.stepped + 1, (number, updates, self.stepped)
            wanted = self.expected[updates][number]
            for key in wanted if of_state else ["weight"]:
                assert torch.equal(found[key], wanted[key]), f"parameter {number}, {key}, after {updates} updates"

    def run(self) -> None:
        # Before outboard is imported: called after its own.
        atexit.register(self.check_at_exit)
        import outboard
        from outboard._lanes import LaneOptions

        began = time.perf_counter()
        self.expected = self.reference(outboard)
        seconds = time.perf_counter() - began
        if self.device.type == "cpu":
            LaneOptions.simulate = self.seed
        model = self.trained = self.model()
        choose = self.random.choice
        optimizer = outboard.AdamW(
            model.parameters(),
            lr=1e-2,
            mode=choose(["auto", "auto", "cpu", "gpu"]),
            transfer=choose(["staged", "zero_copy"]),
            eager=choose(["auto", True, False]),
            chunk_elems=choose([None, 8192, 50_000]),
            device_state_bytes=choose([0, 0.3]),
            offload_gradients=choose([False, False, True]),
            threads=choose([1, 2]),
        ).attach(model)
        # Tensors over the planes: they outlive the optimizer.
        self.views = [dict(optimizer.state[p]) for p in model.parameters()]
        self.stepped = 0
        if self.kind.startswith("interrupt"):
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
            signal.setitimer(signal.ITIMER_REAL, max(1e-4, self.random.random() * seconds))
        try:
            self.train(model, optimizer)
        except KeyboardInterrupt:
            if self.kind != "interrupt that is caught":
                raise
            # As somebody does who saves the model as it is. The state is not looked at: tensors from before are not
            # ordered after what comes later.
            self.check(of_state=False)
        if self.kind == "drop":
            del optimizer
            if self.random.random() < 0.5:
                gc.collect()
            self.check()

    def train(self, model: Model, optimizer: Any) -> None:
        from lanes import Fails

        step_is_missing = self.random.random() < 0.5
        for step in range(STEPS):
            ends = step == self.last
            model.armed = ends and self.kind == "exception in forward"
            Fails.armed = ends and self.kind == "exception in backward"
            self.backward(model, step)
            if ends and step_is_missing:
                if self.kind == "exit":
                    sys.exit(STATUS["exit"])
                if self.kind == "drop":
                    return
            optimizer.step()
            self.stepped += 1
            if ends and self.kind == "exit":
                sys.exit(STATUS["exit"])
            if ends and self.kind == "drop":
                return
            optimizer.zero_grad()
        # The interrupt is late, or came where Python lets no exception out.
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(LIMIT_SECONDS)

    def check_at_exit(self) -> None:
        try:
            self.check()
            print("checked", flush=True)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(LOST)


def start(kind: str, seed: int, device: str, output: Path) -> int:
    """Fork a process that writes to two files; returns its number here, and 0 in it."""
    child = os.fork()
    if child:
        return child
    for number, name in ((0, os.devnull), (1, f"{output}.out"), (2, f"{output}.err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    faulthandler.enable(2)
    # One who was started in the background may have inherited that interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return 0


def serve() -> Case | None:
    """Run orders from stdin, each a line of JSON; in a process that is one of its cases, return the case."""
    for line in sys.stdin:
        order = json.loads(line)
        waiting = [(kind, seed) for seed in order["seeds"] for kind in order["kinds"]]
        running: dict[int, tuple[str, int, float]] = {}
        results = []
        while waiting or running:
            while waiting and len(running) < order["parallel"]:
                kind, seed = waiting.pop(0)
                child = start(kind, seed, order["device"], Path(order["folder"]) / f"{kind} {seed}")
                if not child:
                    return Case(kind, seed, order["device"])
                running[child] = (kind, seed, time.monotonic())
            for child, (kind, seed, began) in list(running.items()):
                done, status = os.waitpid(child, os.WNOHANG)
                hangs = not done and time.monotonic() - began > LIMIT_SECONDS
                if hangs:
                    os.kill(child, signal.SIGABRT)  # faulthandler says where it was
                    done, status = os.waitpid(child, 0)
                if done:
                    del running[child]
                    seconds = time.monotonic() - began
                    results.append([kind, seed, "hang" if hangs else os.waitstatus_to_exitcode(status), seconds])
            time.sleep(0.005)
        print(json.dumps(results), flush=True)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.SGD([torch.ones(1, requires_grad=True)])  # imports the rest of torch, which is lazy
    CASE = serve()
    if CASE is not None:
        CASE.run()
