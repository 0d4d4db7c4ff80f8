"""Groups, schedulers, frozen and tied parameters. Each docstring quotes its case."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import lr_scheduler as sched
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

import outboard
from oracle import FLOAT, Oracle, assert_same

BF16 = torch.bfloat16
#: Every torch scheduler, for runs of 12 steps.
SCHEDULERS = {
    "LambdaLR": lambda o: sched.LambdaLR(o, [lambda t, k=k: 0.9 ** (t * k) for k in range(len(o.param_groups))]),
    "MultiplicativeLR": lambda o: sched.MultiplicativeLR(o, lambda t: 0.95),
    "StepLR": lambda o: sched.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: sched.MultiStepLR(o, [2, 5, 9], gamma=0.3),
    "ConstantLR": lambda o: sched.ConstantLR(o, factor=0.25, total_iters=4),
    "LinearLR": lambda o: sched.LinearLR(o, start_factor=0.1, total_iters=7),
    "LinearLR to zero": lambda o: sched.LinearLR(o, start_factor=1.0, end_factor=0.0, total_iters=5),
    "ExponentialLR": lambda o: sched.ExponentialLR(o, gamma=0.8),
    "PolynomialLR": lambda o: sched.PolynomialLR(o, total_iters=8, power=0.9),
    "CosineAnnealingLR": lambda o: sched.CosineAnnealingLR(o, 6, eta_min=1e-5),
    "CosineAnnealingWarmRestarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "CyclicLR": lambda o: sched.CyclicLR(o, 1e-3, 1e-2, step_size_up=3, cycle_momentum=False),
    "CyclicLR with beta1": lambda o: sched.CyclicLR(o, 1e-3, 1e-2, step_size_up=3, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: sched.OneCycleLR(o, 1e-2, total_steps=12),
    "OneCycleLR per group": lambda o: sched.OneCycleLR(
        o, [1e-2 * (k + 1) for k in range(len(o.param_groups))], total_steps=12, three_phase=True
    ),
    "ReduceLROnPlateau": lambda o: sched.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SequentialLR": lambda o: sched.SequentialLR(
        o, [sched.LinearLR(o, start_factor=0.1, total_iters=4), sched.CosineAnnealingLR(o, 8)], milestones=[4]
    ),
    "ChainedScheduler": lambda o: sched.ChainedScheduler(
        [sched.ConstantLR(o, factor=0.5, total_iters=3), sched.ExponentialLR(o, gamma=0.9)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=5e-4, anneal_epochs=4),
}


def leaf(values: torch.Tensor) -> torch.Tensor:
    return values.detach().clone().requires_grad_()


def pairs(shapes, dtype: torch.dtype = FLOAT):
    start = [torch.randn(shape).to(dtype) for shape in shapes]
    return [leaf(p) for p in start], [leaf(p) for p in start]


def step_both(ours, theirs, ours_at, theirs_at) -> None:
    for p, q in zip(ours_at, theirs_at, strict=True):
        p.grad = torch.randn(p.shape)
        q.grad = p.grad.clone()
    ours.step()
    theirs.step()


def assert_like(ours_at, theirs_at, what: str = "") -> None:
    for number, (p, q) in enumerate(zip(ours_at, theirs_at, strict=True)):
        assert_same(p, q, f"{what} parameter {number}")


def test_every_scheduler_of_torch_is_here() -> None:
    """A scheduler that torch adds must be added here."""
    public = {
        name
        for name, value in vars(sched).items()
        if isinstance(value, type)
        and issubclass(value, (sched.LRScheduler, sched.ReduceLROnPlateau))
        and not name.startswith("_")
        and name != "LRScheduler"
    }
    assert public <= {name.split()[0] for name in SCHEDULERS}


@pytest.mark.parametrize("lr", ["float", "tensor", "tensor of shape (1,)"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name, lr) -> None:
    """Every torch scheduler, OneCycle and ReduceLROnPlateau included, over several groups, float and tensor lr: as
    torch.
    """
    ours_at, theirs_at = pairs([(64, 16), (32,), (128,)])
    found = []
    for cls, at, options in (
        (outboard.AdamW, ours_at, {}),
        (torch.optim.AdamW, theirs_at, {"fused": True}),
    ):
        make = {
            "float": float,
            "tensor": lambda x: torch.tensor(x, dtype=torch.float64),
            "tensor of shape (1,)": lambda x: torch.tensor([x]),
        }[lr]
        groups = [
            {"params": at[:1], "lr": make(1e-2)},
            {"params": at[1:2], "lr": make(3e-3), "weight_decay": 0.0, "betas": (0.8, 0.95)},
            {"params": at[2:], "weight_decay": 0.1},
        ]
        if lr == "tensor of shape (1,)" and cls is torch.optim.AdamW:
            # torch's fused kernel takes no tensor of shape (1,): the same values as 0-d ones.
            for group in groups[:2]:
                group["lr"] = group["lr"].squeeze()
        optimizer = cls(groups, lr=make(2e-3).squeeze() if lr != "float" else 2e-3, **options)
        found.append((optimizer, SCHEDULERS[name](optimizer)))
    (ours, our_schedule), (theirs, their_schedule) = found
    for step in range(12):
        step_both(ours, theirs, ours_at, theirs_at)
        arguments = [1.0 / (1 + step % 4)] if "Plateau" in name else []
        if step < 11:
            our_schedule.step(*arguments)
            their_schedule.step(*arguments)
        for a, b in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert float(a["lr"]) == float(b["lr"])
            assert isinstance(a["lr"], torch.Tensor) == isinstance(b["lr"], torch.Tensor)
            assert tuple(map(float, a["betas"])) == tuple(map(float, b["betas"]))
        assert_like(ours_at, theirs_at, f"step {step}")


def test_scheduler_wraps_step() -> None:
    """LRScheduler replaces `optimizer.step` by a wrapper to warn of a wrong order: the warning comes as with torch."""
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3)
    optimizer = outboard.AdamW([p])
    schedule = sched.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        schedule.step()
    optimizer = outboard.AdamW([p])
    schedule = sched.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 5e-4


def test_tensor_lr_changes_in_place() -> None:
    """A tensor lr is read at each step."""
    (p,), (q,) = pairs([(64,)])
    lr, other = torch.tensor(1e-2), torch.tensor(1e-2)
    ours, theirs = outboard.AdamW([p], lr=lr), torch.optim.AdamW([q], lr=other, fused=True)
    for factor in (1.0, 0.5, 3.0):
        lr.mul_(factor)
        other.mul_(factor)
        step_both(ours, theirs, [p], [q])
        assert_like([p], [q])
    assert ours.param_groups[0]["lr"] is lr


def test_settings_change_between_steps() -> None:
    """lr, betas, eps, weight_decay, maximize and amsgrad of a group are read at each step."""
    (p,), (q,) = pairs([(64,)])
    ours, theirs = outboard.AdamW([p]), torch.optim.AdamW([q], fused=True)
    for changes in (
        {},
        {"lr": 0.1},
        {"betas": (0.5, 0.9)},
        {"betas": [0.6, 0.9]},
        {"eps": 1e-3},
        {"weight_decay": 0.3},
        {"maximize": True},
        {"lr": 0},
        {"lr": 1, "weight_decay": 0},
    ):
        ours.param_groups[0].update(changes)
        theirs.param_groups[0].update(changes)
        step_both(ours, theirs, [p], [q])
        assert_like([p], [q], str(changes))


@pytest.mark.parametrize("betas", [[0.6, 0.9], (torch.tensor(0.6), torch.tensor(0.9)), (0.0, 0.9)], ids=str)
def test_betas_of_a_group_as_torch_takes_them(betas) -> None:
    """A list, as configuration files give, and tensors are pairs of numbers too, in the constructor and in a group."""
    (p, q), (r, s) = pairs([(64,), (64,)])
    ours = outboard.AdamW([{"params": [p], "betas": betas}, {"params": [q]}], betas=betas)
    theirs = torch.optim.AdamW([r, s], betas=tuple(float(x) for x in betas), fused=True)
    for _ in range(2):
        step_both(ours, theirs, [p, q], [r, s])
    assert_like([p, q], [r, s])
    saved = ours.state_dict()
    again = outboard.AdamW([{"params": [p]}, {"params": [q]}])
    again.load_state_dict(saved)
    step_both(again, theirs, [p, q], [r, s])
    assert_like([p, q], [r, s])


def test_amsgrad_turned_on_and_off() -> None:
    """amsgrad of a group turned on after steps begins its maximum at zero, as a new one would."""
    p = leaf(torch.randn(70))
    optimizer, oracle = outboard.AdamW([p]), Oracle(p)
    for step in range(6):
        if step == 2:
            optimizer.param_groups[0]["amsgrad"] = True
            oracle.max_exp_avg_sq = torch.zeros(70)
        p.grad = torch.randn(70) * (10 if step < 3 else 0.1)
        optimizer.step()
        oracle.step(p.grad)
        oracle.assert_equal(optimizer, p, f"step {step}")
    optimizer.param_groups[0]["amsgrad"] = False
    kept, oracle.max_exp_avg_sq = oracle.max_exp_avg_sq, None
    p.grad = torch.randn(70)
    optimizer.step()
    oracle.step(p.grad)
    assert_same(p, oracle.weight)
    assert_same(optimizer.state[p]["max_exp_avg_sq"], kept)


# ---- frozen


def test_frozen_parameters() -> None:
    """Frozen parameters in the list; one unfrozen later: skipped; then trained or a clear error."""
    ours_at, theirs_at = pairs([(16,), (32,), (64,)])
    for at in (ours_at, theirs_at):
        at[1].requires_grad = False
    ours, theirs = outboard.AdamW(ours_at), torch.optim.AdamW(theirs_at, fused=True)
    frozen = ours_at[1].clone()

    def go() -> None:
        for at, optimizer in ((ours_at, ours), (theirs_at, theirs)):
            optimizer.zero_grad()
            sum((p * p * (number + 1)).sum() for number, p in enumerate(at)).backward()
            optimizer.step()

    for _ in range(3):
        go()
    assert_same(ours_at[1], frozen)
    assert ours_at[1] not in ours.state
    assert set(ours.state_dict()["state"]) == set(theirs.state_dict()["state"]) == {0, 2}
    for at in (ours_at, theirs_at):
        at[1].requires_grad = True
    for _ in range(3):
        go()
    assert_like(ours_at, theirs_at)
    assert float(ours.state[ours_at[1]]["step"]) == 3
    assert float(ours.state[ours_at[0]]["step"]) == 6
    # And frozen again, with its gradient still there, as torch: the gradient counts.
    for at in (ours_at, theirs_at):
        at[0].requires_grad = False
    ours.step()
    theirs.step()
    assert_like(ours_at, theirs_at)


# ---- groups


def test_decay_and_no_decay() -> None:
    """Decay / no-decay split; a group with a single bias; add_param_group after some steps: as torch."""
    ours_at, theirs_at = pairs([(64, 32), (16,), (1,), (48,), (32, 16)])
    made = []
    for cls, at, options in ((outboard.AdamW, ours_at, {}), (torch.optim.AdamW, theirs_at, {"fused": True})):
        groups = [
            {"params": [at[0]], "weight_decay": 0.1},
            {"params": [at[1]], "weight_decay": 0.0},
            {"params": at[2], "weight_decay": 0.0, "lr": 1e-2},
        ]
        made.append(cls(groups, lr=3e-3, **options))
    ours, theirs = made
    for step in range(9):
        if step == 3:
            ours.add_param_group({"params": [ours_at[3]], "betas": (0.5, 0.9)})
            theirs.add_param_group({"params": [theirs_at[3]], "betas": (0.5, 0.9)})
        if step == 6:
            ours.add_param_group({"params": ours_at[4], "lr": 0.1, "maximize": True})
            theirs.add_param_group({"params": theirs_at[4], "lr": 0.1, "maximize": True})
        listed = 3 + (step >= 3) + (step >= 6)
        step_both(ours, theirs, ours_at[:listed], theirs_at[:listed])
        # The single element lies in torch's scalar tail, which rounds v by itself.
        for number in range(listed):
            if number == 2:
                assert torch.allclose(ours_at[2], theirs_at[2], rtol=1e-6)
            else:
                assert_same(ours_at[number], theirs_at[number], f"step {step} parameter {number}")
    assert [float(ours.state[p]["step"]) for p in ours_at] == [9, 9, 9, 6, 3]
    assert [g["params"] for g in ours.state_dict()["param_groups"]] == [
        g["params"] for g in theirs.state_dict()["param_groups"]
    ]


def test_a_refused_group_adds_nothing() -> None:
    p = torch.ones(3, requires_grad=True)
    optimizer = outboard.AdamW([("p", p)])
    complex_one = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    for bad, error in (
        ({"params": [("q", complex_one)]}, TypeError),
        ({"params": [("p2", p)]}, ValueError),
        ({"params": [torch.ones(2, requires_grad=True)]}, ValueError),
        ({"params": {torch.ones(2)}}, TypeError),
        ({"params": ["x"]}, (TypeError, ValueError)),
        ({"params": [("y", (p * 2))]}, ValueError),
    ):
        with pytest.raises(error):
            optimizer.add_param_group(bad)
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("q", torch.ones(2, requires_grad=True))]})


def test_many_groups() -> None:
    """A group per parameter, as layer-wise learning rates make."""
    ours_at, theirs_at = pairs([(16 * (1 + i % 5),) for i in range(60)])
    groups = [
        [{"params": [p], "lr": 1e-3 * (1 + i), "eps": 1e-8 * 10 ** (i % 4)} for i, p in enumerate(at)]
        for at in (ours_at, theirs_at)
    ]
    ours, theirs = outboard.AdamW(groups[0]), torch.optim.AdamW(groups[1], fused=True)
    for _ in range(3):
        step_both(ours, theirs, ours_at, theirs_at)
    assert_like(ours_at, theirs_at)


# ---- tied


def test_tied_embedding_and_head() -> None:
    """Tied embedding and head: one update with the summed gradient."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.embedding = torch.nn.Embedding(32, 16)
            self.head = torch.nn.Linear(16, 32, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.embedding(x))

    ours_at, theirs_at = Tied(), Tied()
    ours = outboard.AdamW(ours_at.parameters())
    theirs = torch.optim.AdamW(theirs_at.parameters(), fused=True)
    assert len(ours.param_groups[0]["params"]) == 1
    for _ in range(4):
        tokens = torch.randint(0, 32, (4, 8))
        for model, optimizer in ((ours_at, ours), (theirs_at, theirs)):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
    assert_same(ours_at.head.weight, theirs_at.head.weight)
    assert ours_at.head.weight is ours_at.embedding.weight
    assert float(ours.state[ours_at.head.weight]["step"]) == 4


def test_the_same_parameter_listed_twice() -> None:
    """The same parameter listed twice: torch's warning or error."""
    p = leaf(torch.ones(4))
    with pytest.raises(ValueError, match="more than one parameter group"):
        outboard.AdamW([{"params": [p]}, {"params": [p]}])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = outboard.AdamW([p, p])
    # torch's fused step would update it twice; one update with the gradient is right.
    oracle = Oracle(p)
    for _ in range(2):
        p.grad = torch.full((4,), 0.5)
        optimizer.step()
        oracle.step(p.grad)
        oracle.assert_equal(optimizer, p)
    saved = optimizer.state_dict()
    assert len(saved["state"]) == 1
    optimizer.load_state_dict(saved)
    oracle.assert_equal(optimizer, p)


# ---- averaging and the like, which read weights


def test_averaged_model() -> None:
    """`AveragedModel` sees updated weights; it copies the module, not the optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = outboard.AdamW(model.parameters(), lr=0.1)
    averaged = AveragedModel(model)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
        seen.append(model[0].weight.detach().clone())
    assert torch.allclose(averaged.module[0].weight, torch.stack(seen).mean(0), atol=1e-6)
    update_bn([torch.randn(4, 8)], averaged)


def test_training_lowers_the_loss() -> None:
    """bf16 weights with tiny updates: without a master none would arrive."""
    p = leaf(torch.ones(4096).to(BF16))
    optimizer = outboard.AdamW([p], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert math.isclose(float(optimizer.master(p).mean()), 1 - 100 * 1e-4, rel_tol=1e-5)
    assert bool((p < 1).all())
