"""Clipping, non-finite gradients, scalers, failures, options and checkpoints of parameters on a device.

Over 500 lines: independent cases in the order of their table, read one at a time.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import time
import warnings
from typing import Any

import pytest
import torch

import outboard
from lanes import Layer, Stack, Twin, TwinModel, host_only, is_pending, plain_grad, set_grad, train
from oracle import assert_same, norm64, same_bits
from outboard._lanes import LaneOptions

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = pytest.mark.timeout(60, method="thread")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MODES = ("cpu", "gpu", "auto")
SIZES = (70_000, 5, 66_001, 300, 0, 1)


def mixed(number: int) -> torch.dtype:
    return (FP32, BF16, FP16)[number % 3]


class Rig:
    """Parameters of several kinds with an optimizer, attached or not, and a twin."""

    def __init__(
        self,
        lanes_device: Any,
        *,
        sizes: tuple[int, ...] = SIZES,
        dtype: Any = mixed,
        cls: Any = outboard.AdamW,
        attached: bool = False,
        **options: Any,
    ) -> None:
        self.model = Stack(*sizes, dtype=dtype).to(lanes_device.device)
        self.params = list(self.model.parameters())
        self.names = [f"p{i}" for i in range(len(sizes))]
        options = {"lr": 0.01, **options}
        self.twin = Twin(self.params, cls, **options)
        self.opt = cls(
            list(zip(self.names, self.params, strict=True)), **{"threads": 2, "chunk_elems": 9_000, **options}
        )
        self.attached = attached
        if attached:
            self.opt.attach(self.model)

    def set_grads(self, scale: float = 1.0, **special: float) -> list[torch.Tensor]:
        """Set random gradients; `p0=inf` puts a value into the last element of that parameter's."""
        for name, p in zip(self.names, self.params, strict=True):
            grad = torch.randn(p.shape, device=p.device) * scale
            if name in special:
                grad[-1] = special[name]
            set_grad(p, grad.to(p.dtype))
        return [plain_grad(p) for p in self.params]

    def step(self, scale: float = 1.0, **special: float) -> None:
        self.set_grads(scale, **special)
        self.twin.step()
        self.opt.step()

    def check(self, what: str = "") -> None:
        self.twin.check(self.opt, what)


# ---- clipping and the norm


@pytest.mark.parametrize("max_norm", [1e-3, 30.0, 1e6, 0.0])
@pytest.mark.parametrize("mode", MODES)
def test_clipping(lanes_device, attached, mode, max_norm) -> None:
    rig = Rig(lanes_device, attached=attached, mode=mode, max_grad_norm=max_norm)
    assert rig.opt.last_grad_norm is None
    for step in range(3):
        grads = rig.set_grads(10.0**step)
        exact = norm64([grad.cpu() for grad in grads])
        rig.twin.step()
        rig.opt.step()
        assert math.isclose(rig.opt.last_grad_norm, exact, rel_tol=1e-6)
        assert rig.opt.last_grad_norm == rig.twin.optimizer.last_grad_norm
    rig.check()


@pytest.mark.parametrize("dtypes", [(FP32,), (BF16,), (FP16,), (FP32, BF16, FP16)], ids=str)
def test_norm_of_gradients_of_other_dtypes(lanes_device, dtypes) -> None:
    params = [lanes_device.parameter(torch.zeros(n)) for n in (1_000_003, 7, 65_536, 4096, 4097, 0)]
    twin = Twin(params, compute_grad_norm=True)
    opt = outboard.AdamW(params, compute_grad_norm=True, threads=2)
    for step in range(2):
        for number, p in enumerate(params):
            set_grad(p, (torch.randn_like(p) * 0.01).to(dtypes[(number + step) % len(dtypes)]))
        exact = norm64([plain_grad(p).cpu() for p in params])
        twin.step()
        opt.step()
        assert math.isclose(opt.last_grad_norm, exact, rel_tol=1e-6)
        assert opt.last_grad_norm == twin.optimizer.last_grad_norm
    twin.check(opt)


def test_norm_without_clipping_changes_no_weight(lanes_device, attached) -> None:
    rig = Rig(lanes_device, attached=attached)
    rig.opt.compute_grad_norm = True
    rig.step()
    grads = rig.set_grads()
    exact = norm64([grad.cpu() for grad in grads])
    rig.twin.step()
    rig.opt.step()
    assert math.isclose(rig.opt.last_grad_norm, exact, rel_tol=1e-6)
    rig.opt.compute_grad_norm = False
    rig.step()
    assert math.isclose(rig.opt.last_grad_norm, exact, rel_tol=1e-6)
    rig.check()


def test_norm_of_large_constant_and_tiny_gradients(lanes_device) -> None:
    """Nothing over- or underflows, and the same gradient has the same norm for ever."""
    p = lanes_device.parameter(torch.zeros(300_000))
    opt = outboard.AdamW([p], compute_grad_norm=True, threads=2)
    for value in (3e38, 1e-40, 1e-3):
        seen = set()
        for _ in range(5):
            p.grad = torch.full_like(p, value)
            opt.step()
            seen.add(opt.last_grad_norm)
        assert len(seen) == 1
        assert math.isclose(seen.pop(), float(torch.tensor(value, dtype=FP32)) * math.sqrt(300_000), rel_tol=1e-6)


def test_clipping_in_training(lanes_device) -> None:
    model = Stack(70_000, 5, 66_000, dtype=BF16).to(lanes_device.device)
    twin = TwinModel(model, lr=0.01, max_grad_norm=0.5)
    opt = outboard.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.5, threads=2).attach(model)
    train(model, opt, twin, 10)
    twin.check(opt)
    assert opt.last_grad_norm == twin.optimizer.last_grad_norm


def test_norm_counts_what_has_a_gradient(lanes_device) -> None:
    rig = Rig(lanes_device, max_grad_norm=1.0)
    rig.set_grads()
    set_grad(rig.params[2], None)
    exact = norm64([grad.cpu() for grad in map(plain_grad, rig.params) if grad is not None])
    rig.twin.step()
    rig.opt.step()
    assert math.isclose(rig.opt.last_grad_norm, exact, rel_tol=1e-6)
    rig.check()


# ---- non-finite gradients

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("where", ["p0", "p1", "p2", "p5"])
@pytest.mark.parametrize("option", [{"max_grad_norm": 1.0}, {"compute_grad_norm": True}, {"nonfinite": "skip"}])
def test_a_nonfinite_step_changes_nothing(lanes_device, attached, value, where, option) -> None:
    rig = Rig(lanes_device, attached=attached, **option)
    rig.step()
    rig.set_grads(**{where: value})
    with pytest.warns(RuntimeWarning, match="changed nothing"):
        rig.opt.step()
    rig.opt.zero_grad()
    rig.check("after the skipped step")
    assert rig.opt.stats()["skipped_steps"] == 1
    # Without a second warning, which would be an error here.
    rig.set_grads(**{where: value})
    rig.opt.step()
    assert rig.opt.stats()["skipped_steps"] == 2
    rig.opt.zero_grad()
    rig.step()
    rig.check()
    assert rig.opt.stats()["steps"] == 4


def test_a_skipped_step_lets_attached_gradients_go(lanes_device) -> None:
    """`p.grad` is None after step(): a loop without zero_grad() does not add to an infinite gradient for ever."""
    rig = Rig(lanes_device, attached=True, nonfinite="skip")
    rig.set_grads(p0=INF)
    with pytest.warns(RuntimeWarning, match="changed nothing"):
        rig.opt.step()
    assert all(plain_grad(p) is None for p in rig.params)


@pytest.mark.parametrize("options", [{"nonfinite": "raise"}, {"nonfinite": "raise", "max_grad_norm": 1.0}], ids=str)
def test_a_nonfinite_step_that_raises(lanes_device, attached, options) -> None:
    rig = Rig(lanes_device, attached=attached, **options)
    rig.step()
    rig.set_grads(p2=NAN)
    with pytest.raises(outboard.NonFiniteError, match="p2"):
        rig.opt.step()
    rig.opt.zero_grad()
    rig.check("after the error")
    rig.step()
    rig.check()


@pytest.mark.parametrize("options", [{}, {"nonfinite": "propagate", "max_grad_norm": 1.0}], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_nonfinite_gradients_that_propagate(lanes_device, attached, mode, options) -> None:
    rig = Rig(lanes_device, attached=attached, mode=mode, **options)
    rig.step()
    rig.step(p0=INF, p2=NAN, p1=-INF)
    rig.step()
    rig.check()
    assert rig.params[0].isnan().any()
    assert rig.opt.stats()["skipped_steps"] == 0


def test_nonfinite_in_training_with_eager_auto(lanes_device) -> None:
    """'skip' switches updates in backward off, whenever it is set."""
    model = Stack(70_000, 300).to(lanes_device.device)
    twin = TwinModel(model, lr=0.01)
    opt = outboard.AdamW(model.parameters(), lr=0.01, threads=2).attach(model)
    train(model, opt, twin, 3)
    opt.nonfinite = twin.optimizer.nonfinite = "skip"
    train(model, opt, twin, 2, 3)
    (model.loss(1) * INF).backward()
    with pytest.warns(RuntimeWarning, match="changed nothing"):
        opt.step()
    opt.zero_grad()
    train(model, opt, twin, 2, 5)
    twin.check(opt)


# ---- GradScaler


def scaled_loop(lanes_device: Any, opt: Any, params: list[torch.Tensor], grads: list[list[torch.Tensor]], init: float):
    """Step with gradients that are scaled by a GradScaler; returns what `p.grad` was afterwards, and the scales."""
    scaler = torch.amp.GradScaler(lanes_device.device.type, init_scale=init, growth_interval=2)
    seen, scales = [], []
    for of_step in grads:
        loss = scaler.scale(torch.ones((), device=params[0].device))
        for p, grad in zip(params, of_step, strict=True):
            set_grad(p, (grad.float() * loss).to(grad.dtype))
        scaler.step(opt)
        scaler.update()
        seen.append([None if plain_grad(p) is None else plain_grad(p).clone() for p in params])
        scales.append(scaler.get_scale())
        opt.zero_grad()
    return seen, scales


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_grad_scaler_unattached(lanes_device, dtype, mode, max_norm) -> None:
    """Unscaled by a division, and written back to `p.grad`, as torch's fused optimizers do."""
    if not lanes_device.is_simulated and dtype is BF16:
        pytest.skip("torch's GradScaler has no CUDA kernel that unscales bf16 gradients")
    values = [torch.randn(n).to(dtype) for n in (70_000, 5, 300)]
    grads = [[torch.randn_like(v) * 0.1 for v in values] for _ in range(4)]
    params = [lanes_device.parameter(v) for v in values]
    host = [torch.nn.Parameter(v.clone()) for v in values]
    opt = outboard.AdamW(params, lr=0.01, mode=mode, max_grad_norm=max_norm, threads=2)
    with host_only():
        twin = outboard.AdamW(host, lr=0.01, max_grad_norm=max_norm, threads=1)
    on_device = [[lanes_device.put(g) for g in of_step] for of_step in grads]
    on_device[1][2][0] = INF
    on_host = [[g.cpu().clone() for g in of_step] for of_step in on_device]
    got, scales = scaled_loop(lanes_device, opt, params, on_device, 2.0**9)

    class Host:
        device = torch.device("cpu")

    wanted, twin_scales = scaled_loop(Host(), twin, host, on_host, 2.0**9)
    assert scales == twin_scales
    assert scales[1] < scales[0]
    for step, (a, b) in enumerate(zip(got, wanted, strict=True)):
        for p, q in zip(a, b, strict=True):
            if step != 1:
                assert_same(p.cpu(), q, f"gradient of step {step}")
    for p, q in zip(params, host, strict=True):
        assert_same(p.detach().cpu(), q.detach())
        assert float(opt.state[p]["step"]) == 3
    assert opt.stats()["skipped_steps"] == 1


def test_unscaled_gradients_of_other_strides(lanes_device) -> None:
    p = lanes_device.parameter(torch.randn(300, 256))
    twin = Twin([p], lr=0.01)
    opt = outboard.AdamW([p], lr=0.01, threads=2)
    for number, make in enumerate((lambda g: g[:, 20:276], lambda g: g.t()[:300, :256], lambda g: g[:, ::2][:, :256])):
        base = torch.randn(520, 520, device=p.device)
        view = make(base[:300] if number != 1 else base)[:300]
        before = base.clone()
        p.grad = view
        for o, scale in ((opt, torch.tensor(8.0)), (twin.optimizer, torch.tensor(8.0))):
            o.grad_scale, o.found_inf = scale, torch.tensor(0.0)
        twin.step()
        opt.step()
        assert p.grad is view
        assert_same(view.cpu(), twin.params[0].grad, "unscaled")
        view.copy_(make(before[:300] if number != 1 else before)[:300])
        assert_same(base.cpu(), before.cpu(), "around the gradient")
    twin.check(opt)


@pytest.mark.parametrize("eager", ["auto", False])
def test_grad_scaler_attached(lanes_device, eager) -> None:
    model = Stack(70_000, 300, 5, dtype=FP16).to(lanes_device.device)
    twin = TwinModel(model, lr=0.01)
    opt = outboard.AdamW(model.parameters(), lr=0.01, threads=2, eager=eager).attach(model)
    scalers = [torch.amp.GradScaler(p, init_scale=64.0, growth_interval=2) for p in (lanes_device.device.type, "cpu")]
    for step in range(5):
        overflow = INF if step == 2 else 1.0
        scalers[0].scale(model.loss(step) * overflow).backward()
        scalers[0].step(opt)
        scalers[0].update()
        opt.zero_grad()
        scale = scalers[1].scale(torch.ones(()))
        (twin.model.loss(step) * overflow * scale.to(lanes_device.device)).backward()
        for p, q in zip(twin.twin.params, twin.model.parameters(), strict=True):
            p.grad = q.grad.cpu().clone()
        scalers[1].step(twin.optimizer)
        scalers[1].update()
        twin.copy_back()
        twin.model.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert opt.stats()["eager_updates"] == 0
    assert opt.stats()["skipped_steps"] == 1
    twin.check(opt)


def test_grad_scaler_with_eager(lanes_device) -> None:
    model = Stack(70_000, 300).to(lanes_device.device)
    opt = outboard.AdamW(model.parameters(), threads=2, eager=True).attach(model)
    scaler = torch.amp.GradScaler(lanes_device.device.type)
    scaler.scale(model.loss()).backward()
    with pytest.raises((RuntimeError, AssertionError), match=r"scaler|No inf checks"):
        scaler.step(opt)
    opt.abandon()


def test_grad_scaler_after_auto_was_proven(lanes_device) -> None:
    model = Stack(70_000, 300).to(lanes_device.device)
    opt = outboard.AdamW(model.parameters(), threads=2).attach(model)
    for step in range(2):
        model.loss(step).backward()
        opt.step()
    scaler = torch.amp.GradScaler(lanes_device.device.type, init_scale=4.0)
    scaler.scale(model.loss()).backward()
    with pytest.raises(RuntimeError, match=r"gradient.*eager=False"):
        scaler.step(opt)
    opt.abandon()


def test_unscale_then_clip_by_hand(lanes_device) -> None:
    """`scaler.unscale_()`, torch's clipping, `scaler.step()`: the usual recipe, which is never eager."""
    model = Stack(70_000, 300).to(lanes_device.device)
    twin = TwinModel(model, lr=0.01)
    opt = outboard.AdamW(model.parameters(), lr=0.01, threads=2).attach(model)
    scaler = torch.amp.GradScaler(lanes_device.device.type, init_scale=8.0)
    for step in range(4):
        scaler.scale(model.loss(step)).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        (twin.model.loss(step) * 8.0).backward()
        with torch.no_grad():
            for p in twin.model.parameters():
                p.grad.div_(8.0)
        torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.25)
        twin.step()
    assert opt.stats()["eager_updates"] == 0
    twin.check(opt)


# ---- failures


def test_a_worker_that_fails(lanes_device) -> None:
    """The parameter is named and poisoned, the others are updated; every step raises until it is cured."""
    for cure in ("reset", "load", "assign"):
        rig = Rig(lanes_device, mode="cpu", dtype=FP32)
        rig.step()
        kept = copy.deepcopy(rig.opt.state_dict())
        weight = rig.params[2].detach().clone()
        rig.opt._core.fail_next_step(rig.params[2], 33_000)
        rig.set_grads()
        with pytest.raises(outboard.WorkerError, match="p2"):
            rig.opt.step()
        assert list(rig.opt.stats()["poisoned"]) == ["p2"]
        for _ in range(2):
            rig.set_grads()
            with pytest.raises(outboard.PoisonedError, match="p2"):
                rig.opt.step()
        with pytest.raises(outboard.PoisonedError, match="p2"):
            rig.opt.state_dict()
        # The others have had the step that failed and no other.
        for index, p in enumerate(rig.params):
            assert float(rig.opt.state[p]["step"]) == (1 if index == 2 else 2)
        with torch.no_grad():
            rig.params[2].copy_(weight)
        if cure == "reset":
            rig.opt.reset(rig.params[2])
        elif cure == "load":
            rig.opt.load_state_dict(kept)
        else:
            rig.opt.state[rig.params[2]] = dict(kept["state"][2])
        assert rig.opt.stats()["poisoned"] == {}
        twin = Twin(rig.params, lr=0.01)
        twin.optimizer.load_state_dict(rig.opt.state_dict())
        rig.set_grads()
        twin.step()
        rig.opt.step()
        twin.check(rig.opt, cure)


@pytest.mark.parametrize(
    "waits",
    ["step", "synchronize", "read", "wait", "state", "forward", "zero_grad"],
)
def test_a_worker_that_fails_after_step_has_returned(lanes_device, waits) -> None:
    """The next call that touches the engine raises."""
    rig = Rig(lanes_device, mode="cpu", attached=True, dtype=FP32, sizes=(600_000, 70_000, 66_000), chunk_elems=2_000)
    rig.set_grads()
    rig.twin.step()
    rig.opt.state_dict()
    rig.opt._core.fail_next_step(rig.params[1], 69_999)
    try:
        rig.opt.step()
    except outboard.WorkerError:
        pytest.fail("600,000 elements in front of it are not done at once")
    calls = {
        "step": rig.opt.step,
        "synchronize": rig.opt.synchronize,
        "read": lambda: rig.params[1].sum(),
        "wait": rig.opt.wait,
        "state": lambda: rig.opt.state,
        "forward": rig.model.loss,
        "zero_grad": lambda: (rig.opt.zero_grad(), rig.opt.synchronize()),
    }

    def call() -> None:
        # Not all wait for all: it may not have failed yet.
        until = time.monotonic() + (0.3 if waits == "read" else 20)
        while time.monotonic() < until:
            calls[waits]()

    try:
        with pytest.raises(outboard.WorkerError, match="p1"):
            call()
    finally:
        with contextlib.suppress(outboard.WorkerError):
            rig.opt.synchronize()
    assert list(rig.opt.stats()["poisoned"]) == ["p1"]
    # The others are complete, the failed one can be read without a hang.
    rig.opt.synchronize()
    for index in (0, 2):
        assert_same(rig.params[index].detach().cpu(), rig.twin.params[index])
    assert rig.params[1].isfinite().all()
    rig.opt.reset(rig.params[1])
    assert rig.opt.stats()["poisoned"] == {}
    rig.set_grads()
    rig.opt.step()
    rig.opt.synchronize()
    counts = [float(rig.opt.state[p]["step"]) for p in rig.params]
    assert counts == [2.0, 1.0, 2.0]


def test_an_attached_step_that_raises_has_taken_its_gradients(lanes_device) -> None:
    """Those that were updated are not updated again by the next one."""
    rig = Rig(lanes_device, mode="cpu", dtype=FP32, sizes=(70_000, 300))
    base = lanes_device.put(torch.randn(40, 64))
    strided = torch.nn.Parameter(base[:, 8:56])  # waits in step()
    rig.model[0].strided = strided
    params = [*rig.params, strided]
    twin = Twin(params, lr=0.01)
    opt = outboard.AdamW(params, lr=0.01, mode="cpu", threads=1).attach(rig.model)
    for p in params:
        p.grad = torch.randn_like(p)
    twin.step()
    opt.step()
    for p in params:
        p.grad = torch.randn_like(p)
    twin.step()
    opt._core.fail_next_step(rig.params[0], 5)
    with pytest.raises(outboard.WorkerError, match="parameter 0"):
        opt.step()
    assert all(plain_grad(p) is None for p in params)
    opt.reset(rig.params[0])
    opt.step()
    for index in (1, 2):
        assert_same(params[index].detach().cpu(), twin.params[index])
        assert float(opt.state[params[index]]["step"]) == 2


def test_all_failures_of_a_step_are_told(lanes_device) -> None:
    rig = Rig(lanes_device, mode="cpu", dtype=FP32)
    rig.step()
    for index in (0, 1, 3):
        rig.opt._core.fail_next_step(rig.params[index], 0)
    rig.set_grads()
    with pytest.raises(outboard.WorkerError) as caught:
        rig.opt.step()
    assert all(name in str(caught.value) for name in ("p0", "p1", "p3"))
    assert sorted(rig.opt.stats()["poisoned"]) == ["p0", "p1", "p3"]


def test_a_failure_is_not_lost_when_the_optimizer_is_closed(lanes_device) -> None:
    for how in ("close", "del"):
        rig = Rig(lanes_device, mode="cpu", attached=True, dtype=FP32)
        rig.step()
        rig.opt.synchronize()
        rig.opt._core.fail_next_step(rig.params[2], 5)
        rig.set_grads()
        rig.opt.step()
        with pytest.warns(RuntimeWarning, match=r"failed.*p2"):
            rig.opt.close() if how == "close" else delattr(rig, "opt")
        if how == "close":
            assert list(rig.opt.stats()["poisoned"]) == ["p2"]
            rig.set_grads()
            with pytest.raises(outboard.PoisonedError, match="p2"):
                rig.opt.step()


def test_load_after_a_failure_that_nobody_has_seen(lanes_device) -> None:
    rig = Rig(lanes_device, mode="cpu", attached=True, dtype=FP32)
    rig.step()
    kept = copy.deepcopy(rig.opt.state_dict())
    weights = [p.detach().clone() for p in rig.params]
    rig.opt._core.fail_next_step(rig.params[0], 5)
    rig.set_grads()
    rig.opt.step()
    with pytest.warns(RuntimeWarning, match="an earlier step failed"):
        rig.opt.load_state_dict(kept)
    with torch.no_grad():
        for p, weight in zip(rig.params, weights, strict=True):
            p.copy_(weight)
    rig.check()
    rig.step()
    rig.check()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_refused_steps_leave_all_as_it_was(lanes_device, attached) -> None:
    rig = Rig(lanes_device, attached=attached)
    rig.step()
    rig.set_grads()
    wrong = torch.sparse_coo_tensor([[0]], [1.0], (66_001,), device=lanes_device.device, check_invariants=True)
    set_grad(rig.params[2], wrong)
    with pytest.raises(TypeError, match=r"p2.*(sparse|layout)"):
        rig.opt.step()
    set_grad(rig.params[2], torch.randn(66_001, device=lanes_device.device, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"p2.*float64"):
        rig.opt.step()
    set_grad(rig.params[2], None)
    set_grad(rig.params[3], plain_grad(rig.params[3])[:1].expand(300))
    rig.opt.zero_grad()
    rig.check()
    rig.step()
    rig.check()


def test_gradient_on_another_device_is_refused(lanes_device) -> None:
    """torch itself refuses to assign one; state and weights do share memory with nothing."""
    p = lanes_device.parameter(torch.randn(100))
    opt = outboard.AdamW([("p", p)])
    p.grad = torch.randn_like(p)
    opt.step()
    p.grad = p.detach()
    with pytest.raises(ValueError, match=r"p.*share memory"):
        opt.step()
    if lanes_device.is_simulated:
        p.grad = opt.state[p]["exp_avg"]
        with pytest.raises(ValueError, match=r"p.*state"):
            opt.step()


# ---- options


BAD = [
    ({"mode": "fast"}, r"mode must be one of 'auto', 'cpu', 'gpu', not 'fast'"),
    ({"mode": None}, r"mode must be one of"),
    ({"transfer": "dma"}, r"transfer must be one of 'auto', 'staged', 'zero_copy', not 'dma'"),
    ({"eager": "yes"}, r"eager must be one of 'auto', True, False, not 'yes'"),
    ({"eager": None}, r"eager must be one of"),
    ({"eager": 2}, r"eager must be one of"),
    ({"pin": "maybe"}, r"pin must be one of 'auto', True, False, not 'maybe'"),
    ({"nonfinite": "ignore"}, r"nonfinite must be one of None, 'skip', 'raise', 'propagate', not 'ignore'"),
    ({"master": "half"}, r"master must be one of 'split', 'full', not 'half'"),
    ({"state_dtype": torch.float16}, r"state_dtype must be one of torch.float32, torch.bfloat16"),
    ({"chunk_elems": 0}, r"chunk_elems must be at least 1"),
    ({"device_ring_bytes": 0}, r"device_ring_bytes must be at least 1"),
    ({"host_ring_bytes": -1}, r"host_ring_bytes must be at least 1"),
    ({"max_waiting_bytes": 0}, r"max_waiting_bytes must be at least 1"),
    ({"max_pinned_bytes": 0}, r"max_pinned_bytes must be at least 1"),
    ({"accumulation_steps": 0}, r"accumulation_steps must be at least 1"),
    ({"threads": 0}, r"threads must be at least 1"),
    ({"max_grad_norm": -1.0}, r"max_grad_norm must be at least 0"),
    ({"max_grad_norm": NAN}, r"max_grad_norm must be at least 0"),
    ({"compute_grad_norm": "yes"}, r"compute_grad_norm must be one of True, False"),
    ({"seed": -1}, r"seed must be at least 0"),
    ({"eager": True, "max_grad_norm": 1.0}, r"max_grad_norm.*eager"),
    ({"eager": True, "compute_grad_norm": True}, r"compute_grad_norm.*eager"),
    ({"eager": True, "nonfinite": "skip"}, r"nonfinite.*eager"),
    ({"eager": True, "nonfinite": "raise"}, r"nonfinite.*eager"),
]
WRONG_TYPES = [
    {"chunk_elems": 1.5},
    {"device_ring_bytes": "1 MiB"},
    {"host_ring_bytes": True},
    {"accumulation_steps": 2.0},
    {"max_grad_norm": "1"},
    {"threads": "2"},
    {"seed": 1.0},
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_bad_options(lanes_device, options, message) -> None:
    p = lanes_device.parameter(torch.ones(3))
    with pytest.raises(ValueError, match=message):
        outboard.AdamW([p], **options)
    with pytest.raises(ValueError, match=message):
        outboard.Adam([p], **options)


@pytest.mark.parametrize("options", WRONG_TYPES, ids=str)
def test_options_of_wrong_types(lanes_device, options) -> None:
    with pytest.raises(TypeError, match=next(iter(options))):
        outboard.AdamW([lanes_device.parameter(torch.ones(3))], **options)


def test_options_set_later_with_eager(lanes_device) -> None:
    opt = outboard.AdamW([lanes_device.parameter(torch.ones(3))], eager=True)
    for name, value in (("max_grad_norm", 1.0), ("compute_grad_norm", True), ("nonfinite", "skip")):
        with pytest.raises(ValueError, match="eager=True"):
            setattr(opt, name, value)
    opt.max_grad_norm, opt.compute_grad_norm, opt.nonfinite = None, False, "propagate"


def test_options_survive_copies(lanes_device) -> None:
    options = {"mode": "cpu", "transfer": "zero_copy", "eager": False, "accumulation_steps": 3, "chunk_elems": 77}
    p = lanes_device.parameter(torch.randn(3))
    opt = copy.deepcopy(outboard.AdamW([p], **options, max_waiting_bytes=5, max_grad_norm=2.0))
    assert (opt._lanes.mode, opt._lanes.transfer, opt._lanes.chunk_elems) == ("cpu", "zero_copy", 77)
    assert (opt._lanes.max_waiting_bytes, opt._eager, opt._lanes.accumulation_steps) == (5, False, 3)
    assert opt.max_grad_norm == 2.0


@pytest.mark.parametrize("transfer", ["auto", "staged", "zero_copy"])
def test_stats_of_lanes(lanes_device, transfer) -> None:
    rig = Rig(lanes_device, transfer=transfer, attached=True)
    rig.step()
    rig.opt.synchronize()
    stats = rig.opt.stats()
    (lanes,) = stats["devices"].values()
    elements = sum(p.numel() for p in rig.params)
    assert lanes["gpu_lane"]["elements"] + lanes["cpu_lane"]["elements"] == elements
    assert stats["elements"] == elements
    assert stats["steps"] == 1
    while lanes["queued"]:  # told a moment after all have landed
        (lanes,) = rig.opt.stats()["devices"].values()
    assert lanes["waiting_gradient_bytes"] == 0
    assert lanes["most_waiting_gradient_bytes"] > 0
    assert stats["pinned_bytes"] + stats["pageable_bytes"] == stats["arena_bytes"]
    assert stats["state_bytes"] <= stats["arena_bytes"]


def test_memory_that_may_not_be_pinned(lanes_device) -> None:
    params = [lanes_device.parameter(torch.randn(70_000)) for _ in range(2)]
    twin = Twin(params)
    opt = outboard.AdamW(params, max_pinned_bytes=1, threads=2)
    for p in params:
        p.grad = torch.randn_like(p)
    twin.step()
    with pytest.warns(RuntimeWarning, match=r"may be pinned.*CPU lane alone.*max_pinned_bytes"):
        opt.step()
    (lanes,) = opt.stats()["devices"].values()
    assert lanes["gpu_lane"]["chunks"] == 0
    assert opt.stats()["pinned_bytes"] == 0
    twin.check(opt)


def limit_pins(lanes_device: Any, monkeypatch: Any, state_bytes: int) -> None:
    """Let the system pin no more than a lane's ring of 1 MiB, its tables and so many bytes of state."""
    if not lanes_device.is_simulated:
        pytest.skip("needs a system with a limit")
    opt = outboard.AdamW([lanes_device.parameter(torch.ones(3))], host_ring_bytes=1 << 20, pin=False)
    assert opt.state
    (lanes,) = opt.stats()["devices"].values()
    monkeypatch.setattr(LaneOptions, "simulated_pinnable_bytes", lanes["host_ring_bytes"] + state_bytes)


def test_memory_that_the_system_does_not_pin(lanes_device, monkeypatch) -> None:
    limit_pins(lanes_device, monkeypatch, 1 << 20)
    params = [lanes_device.parameter(torch.randn(70_000)) for _ in range(8)]
    twin = Twin(params)
    opt = outboard.AdamW(params, host_ring_bytes=1 << 20, threads=2)
    for p in params:
        p.grad = torch.randn_like(p)
    twin.step()
    with pytest.warns(RuntimeWarning, match=r"cannot pin.*cudaErrorMemoryAllocation.*CPU lane alone.*locked") as told:
        opt.step()
    assert len(told) == 1
    assert opt.stats()["pinned_bytes"] == 0
    twin.check(opt)


@pytest.mark.parametrize("by", ["attach", "step", "state", "load"])
@pytest.mark.parametrize("limit", ["max_pinned_bytes", "system"])
def test_pin_is_a_demand(lanes_device, monkeypatch, by, limit) -> None:
    """What cannot be pinned is an error that says why; nothing has been made, and once it can be all goes on."""
    options, error, message = {}, outboard.DeviceError, r"pin=True: cannot pin \d+ bytes.*cudaErrorMemoryAllocation"
    if limit == "system":
        limit_pins(lanes_device, monkeypatch, 1 << 20)
    else:
        error = ValueError
        options = {"max_pinned_bytes": 1 << 20}
        message = r"pin=True: \d+ bytes of optimizer state would exceed the 1048576 bytes .*\(0 are\): raise max_pinned"
    model = Stack(70_000, 140_000, 70_000).to(lanes_device.device)
    params, frozen = list(model.parameters())[:2], model[2].weight
    frozen.requires_grad_(False)
    opt = outboard.AdamW(model.parameters(), pin=True, host_ring_bytes=1 << 20, threads=2, **options)
    twin = Twin(params)
    saved = {"state": {0: {"step": 1.0, "exp_avg": torch.ones(70_000), "exp_avg_sq": torch.ones(70_000)}}}
    saved["state"][1] = {"step": 1.0, "exp_avg": torch.ones(140_000), "exp_avg_sq": torch.ones(140_000)}
    saved["param_groups"] = opt.state_dict()["param_groups"]
    before = [p.detach().clone() for p in params]
    calls = {
        "attach": lambda: opt.attach(model),
        "step": opt.step,
        "state": lambda: opt.state[params[0]],
        "load": lambda: opt.load_state_dict(saved),
    }
    for p in params:
        p.grad = torch.randn_like(p)
    grads = [p.grad for p in params]
    for _ in range(2):
        with pytest.raises(error, match=f"{message}.*pin='auto'"):
            calls[by]()
        stats = opt.stats()
        assert (stats["parameters"], stats["arena_bytes"], stats["pinned_bytes"], stats["steps"]) == (0, 0, 0, 0)
        assert [p.grad for p in params] == grads
        assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
        assert opt.state_dict()["state"] == {}
    # Less state fits.
    opt.param_groups[0]["params"] = [params[0]]
    twin.step([grads[0], None])
    opt.step()
    assert opt.stats()["pinned_bytes"] == opt.stats()["arena_bytes"] > 0
    assert_same(params[0].detach().cpu(), twin.params[0], "after the error")
    # That state stays as it is when more is refused.
    opt.param_groups[0]["params"] = params
    with pytest.raises(error, match=message.replace(r"\(0 are\)", r"\(\d+ are\)")):
        opt.step()
    assert opt.stats()["parameters"] == 1


def test_resident_state_goes_back_if_other_state_is_refused(lanes_device) -> None:
    params = [lanes_device.parameter(torch.randn(70_000)) for _ in range(2)]
    opt = outboard.AdamW(params, pin=True, max_pinned_bytes=1, device_state_bytes=0.5, threads=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="pin=True"):
            opt.state  # noqa: B018
        assert opt.stats()["resident_parameters"] == 0
    opt._slots.resident.budget([])
    assert opt._slots.resident.take(params[0], amsgrad=False, is_device=True) is not None


# ---- checkpoints


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("settings", [{}, {"amsgrad": True}, {"master": "full"}, {"state_dtype": BF16}], ids=str)
def test_save_load_continue(lanes_device, attached, dtype, settings) -> None:
    """Six steps, or three, a file and three: the same bits; and into a host optimizer and back."""
    rig = Rig(lanes_device, dtype=dtype, attached=attached, **settings)
    for _ in range(3):
        rig.step()
    stream = io.BytesIO()
    torch.save({"model": rig.model.state_dict(), "opt": rig.opt.state_dict()}, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    model = Stack(*SIZES, dtype=dtype).to(lanes_device.device)
    opt = outboard.AdamW(model.parameters(), lr=0.5, threads=2, **settings)
    if attached:
        opt.attach(model)
    model.load_state_dict(loaded["model"])
    opt.load_state_dict(loaded["opt"])
    assert opt.param_groups[0]["lr"] == 0.01
    for _ in range(3):
        grads = rig.set_grads()
        for p, grad in zip(model.parameters(), grads, strict=True):
            set_grad(p, grad.clone())
        rig.twin.step()
        rig.opt.step()
        opt.step()
    rig.check()
    for p, q in zip(model.parameters(), rig.params, strict=True):
        assert_same(p.detach().cpu(), q.detach().cpu())
        for name, value in opt.state[p].items():
            assert_same(torch.as_tensor(value), torch.as_tensor(rig.opt.state[q][name]), name)
    with host_only():
        host_params = [torch.nn.Parameter(p.detach().cpu().clone()) for p in rig.params]
        host = outboard.AdamW(host_params, threads=1, **settings)
        host.load_state_dict(rig.opt.state_dict())
    opt.load_state_dict(host.state_dict())
    rig.step()
    for p, twin, grad in zip(model.parameters(), rig.twin.params, rig.twin.params, strict=True):
        set_grad(p, grad.grad.to(p.device))
        del twin
    opt.step()
    for p, twin in zip(model.parameters(), rig.twin.params, strict=True):
        assert_same(p.detach().cpu(), twin.detach())


@pytest.mark.parametrize(("ours", "theirs"), [(outboard.AdamW, torch.optim.AdamW), (outboard.Adam, torch.optim.Adam)])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_interchange_with_torch(lanes_device, ours, theirs, amsgrad) -> None:
    """On fp32 the state of torch's optimizer loads, and the other way round; the bits are the host's."""
    values = [torch.randn(70_016), torch.randn(16, 32)]
    torchs = [lanes_device.parameter(v) for v in values]
    reference = theirs(torchs, lr=0.01, weight_decay=0.1, amsgrad=amsgrad)
    for _ in range(3):
        for p in torchs:
            p.grad = torch.randn_like(p)
        reference.step()
    params = [lanes_device.parameter(p) for p in torchs]
    opt = ours(params, lr=0.5, threads=2)
    opt.load_state_dict(reference.state_dict())
    assert opt.param_groups[0]["lr"] == 0.01
    assert opt.param_groups[0]["amsgrad"] is amsgrad
    twin = Twin(params, ours)
    twin.optimizer.load_state_dict(reference.state_dict())
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        twin.step()
        opt.step()
    twin.check(opt)
    # And back: torch takes it over, on its own device, and steps on.
    back = [lanes_device.parameter(p) for p in params]
    other = theirs(back, lr=0.5)
    other.load_state_dict(opt.state_dict())
    for p, q in zip(back, params, strict=True):
        assert other.state[p]["exp_avg"].device == p.device
        assert_same(other.state[p]["exp_avg"].cpu(), opt.state[q]["exp_avg"])
        assert float(other.state[p]["step"]) == 5
        p.grad = torch.randn_like(p)
    other.step()
    assert not same_bits(back[0].cpu(), params[0].cpu())


def test_step_counts(lanes_device, attached) -> None:
    """Each parameter's own, exact past 2^24."""
    rig = Rig(lanes_device, attached=attached, dtype=FP32)
    for step in range(4):
        rig.set_grads()
        if step % 2:
            set_grad(rig.params[0], None)
        rig.twin.step()
        rig.opt.step()
        rig.opt.zero_grad()
    assert [float(rig.opt.state[p]["step"]) for p in rig.params] == [2.0] + [4.0] * 5
    for opt, params in ((rig.opt, rig.params), (rig.twin.optimizer, rig.twin.params)):
        for p in params:
            opt.state[p]["step"] = 2**24
    for _ in range(3):
        rig.step()
    assert rig.opt.state_dict()["state"][0]["step"].item() == 2**24 + 3
    rig.check()


def test_state_dict_before_the_first_step_changes_nothing(lanes_device) -> None:
    for attached in (False, True):
        rig = Rig(lanes_device, attached=False)
        assert rig.opt.state_dict()["state"] == {}
        if attached:
            rig.opt.attach(rig.model)
        for p in rig.params:
            assert float(rig.opt.state[p]["step"]) == 0
        assert len(rig.opt.state_dict()["state"]) == len(rig.params)
        rig.step()
        rig.step()
        rig.check()


def test_states_are_independent_after_loading(lanes_device) -> None:
    one = Rig(lanes_device, attached=True)
    one.step()
    model = Stack(*SIZES, dtype=mixed).to(lanes_device.device)
    model.load_state_dict(one.model.state_dict())
    other = outboard.AdamW(model.parameters(), lr=0.01, threads=2).attach(model)
    other.load_state_dict(one.opt.state_dict())
    twin = Twin(model.parameters(), lr=0.01)
    twin.optimizer.load_state_dict(one.opt.state_dict())
    one.step()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    twin.step()
    other.step()
    one.step()
    one.check()
    twin.check(other)


def test_planes_are_in_host_memory(lanes_device) -> None:
    rig = Rig(lanes_device)
    rig.step()
    for p in rig.params:
        for name, value in rig.opt.state[p].items():
            assert value.device.type == "cpu", name
            assert name == "step" or value.shape == p.shape
            assert name == "step" or not p.numel() or value.stride() == p.stride()


def test_a_mixture_of_host_and_device_parameters(lanes_device) -> None:
    """One step over both; a norm over both. On the simulated device all host memory is a device's."""
    here, there = torch.nn.Parameter(torch.randn(70_000)), lanes_device.parameter(torch.randn(66_000))
    twin = Twin([here, there], lr=0.01, max_grad_norm=1.0)
    opt = outboard.AdamW([here, there], lr=0.01, max_grad_norm=1.0, threads=2)
    for _ in range(3):
        here.grad, there.grad = torch.randn_like(here), torch.randn_like(there)
        twin.step()
        opt.step()
        assert opt.last_grad_norm == twin.optimizer.last_grad_norm
    twin.check(opt)


def test_attached_with_tensor_learning_rate(lanes_device) -> None:
    model = torch.nn.Sequential(Layer(70_000), Layer(30)).to(lanes_device.device)
    model.loss = lambda step: model(torch.full((3,), 0.1 * step, device=lanes_device.device)).sum()
    rate = torch.tensor(0.02)
    twin = TwinModel(torch.nn.Sequential(model[0], model[1]), lr=rate)
    twin.model.loss = lambda step: twin.model(torch.full((3,), 0.1 * step, device=lanes_device.device)).sum()
    twin.twin.originals = list(model.parameters())
    opt = outboard.AdamW(model.parameters(), lr=rate, threads=1, eager=True).attach(model)
    for step in range(3):
        train(model, opt, twin, 1, step)
        rate.mul_(0.5)
    twin.check(opt)


def test_warnings_are_errors_here() -> None:
    """What the tests above take for granted."""
    with pytest.raises(RuntimeWarning):
        warnings.warn("it is", RuntimeWarning, stacklevel=1)


def test_pending_after_an_attached_step_with_a_norm(lanes_device) -> None:
    rig = Rig(lanes_device, attached=True, max_grad_norm=1.0)
    rig.step()
    assert all(is_pending(p) for p in rig.params)
    assert all(plain_grad(p) is None for p in rig.params)
    rig.check()
