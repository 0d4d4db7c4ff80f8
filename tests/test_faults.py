"""Failures and refused calls: what they say, what they leave alone, and how one goes on afterwards.

Most tests step a twin beside the optimizer: it has the same history without the refused call and must have the same
bits once both have stepped again.

Over 500 lines: independent cases in the order of their table, read one at a time.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import outboard
from oracle import assert_same

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Run:
    """An optimizer over parameters of every kind, with reproducible gradients."""

    def __init__(self, cls: type[torch.optim.Optimizer] = outboard.AdamW, **options: Any) -> None:
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.parameters = {
            "embedding": random(40, 25),
            "norm": random(7).to(FP16),
            "projection": random(3, 300).to(BF16),
            "convolution": random(4, 3, 2, 2),
            "bias": random(1),
            "unused": random(5),
        }
        self.parameters = {name: torch.nn.Parameter(value) for name, value in self.parameters.items()}
        items = list(self.parameters.items())
        groups = [
            {"params": items[:3], "weight_decay": 0.1},
            {"params": items[3:], "lr": 0.02, "betas": (0.5, 0.9)},
        ]
        self.optimizer = cls(groups, lr=0.01, threads=2, chunk_elems=64, **options)
        self.seed = 0

    def __getitem__(self, name: str) -> torch.nn.Parameter:
        return self.parameters[name]

    def gradients(self) -> None:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        for name, p in self.parameters.items():
            if name != "unused":
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)

    def step(self, count: int = 1) -> Run:
        for _ in range(count):
            self.gradients()
            self.optimizer.step()
        assert len(self.optimizer.state) == len(self.parameters)  # all have state from here on
        return self


def tree(value: Any) -> Any:
    """Copy nested dicts and lists, tensors included."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [tree(item) for item in value]
    return value


def snapshot(run: Run) -> dict[str, Any]:
    """Return everything that a refused call may not change.

    State that is all zeros counts as none: whether it has been made already is nobody's business.
    """
    optimizer = run.optimizer
    parameters = run.parameters.items()
    poisoned = optimizer.stats()["poisoned"]
    states = {}
    for name, p in parameters:
        if poisoned or not optimizer.state_dict()["state"]:
            break
        states[name] = tree(dict(optimizer.state[p]))
    return {
        "weights": {name: p.detach().clone() for name, p in parameters},
        "gradients": {name: p.grad.clone() for name, p in parameters if p.grad is not None and not p.grad.is_sparse},
        "versions": {name: p._version for name, p in parameters},
        "state": {name: state for name, state in states.items() if state["step"] > 0},
        "groups": [{k: tree(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "members": [[id(p) for p in group["params"]] for group in optimizer.param_groups],
        "options": (
            optimizer.max_grad_norm,
            optimizer.compute_grad_norm,
            optimizer.nonfinite,
            optimizer.last_grad_norm,
        ),
        "counts": {key: optimizer.stats()[key] for key in ("parameters", "steps", "skipped_steps", "poisoned")},
    }


def assert_equal(got: Any, wanted: Any, where: str = "") -> None:
    """Compare nested values, tensors bit for bit."""
    assert type(got) is type(wanted), f"{where}: {got!r}, not {wanted!r}"
    if isinstance(wanted, torch.Tensor):
        assert_same(got, wanted, where)
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), f"{where}: {got.keys()}, not {wanted.keys()}"
        for key in wanted:
            assert_equal(got[key], wanted[key], f"{where}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted), where
        for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert_equal(a, b, f"{where}[{index}]")
    else:
        assert got == wanted or got != got, f"{where}: {got!r}, not {wanted!r}"


@contextmanager
def refused(run: Run, error: type[BaseException], *words: str, changes: tuple[str, ...] = ()) -> Iterator[None]:
    """Expect exactly this exception with these words in it, and that nothing but `changes` has changed."""
    before = snapshot(run)
    with pytest.raises(error) as caught:
        yield
    assert caught.type is error, repr(caught.value)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"
    after = snapshot(run)
    for key in before.keys() - set(changes):
        if key == "counts" and not before["counts"]["parameters"]:
            after["counts"]["parameters"] = 0
        assert_equal(after[key], before[key], key)


def assert_twins(run: Run, twin: Run) -> None:
    for name, p in run.parameters.items():
        assert_same(p, twin[name], name)
        mine, other = run.optimizer.state[p], twin.optimizer.state[twin[name]]
        assert mine.keys() == other.keys()
        for key in mine:
            assert_same(mine[key], other[key], f"{name} {key}")
            if key != "step":
                assert mine[key].stride() == other[key].stride(), f"{name} {key}"


# ---- steps that are refused


def wrong_gradient_dtype(run: Run) -> None:
    run["projection"].grad_dtype = None
    run["projection"].grad = torch.randn(3, 300, dtype=torch.float64)


def sparse_gradient(run: Run) -> None:
    run["projection"].grad = torch.randn(3, 300).to(BF16).to_sparse()


def negated_gradient(run: Run) -> None:
    # In fp32, where complex numbers have the parts.
    run["bias"].grad = torch.complex(torch.ones(()), torch.ones(())).conj().imag.unsqueeze(0)


def gradient_that_is_the_weight(run: Run) -> None:
    run["embedding"].grad = run["embedding"].detach()


def gradient_that_overlaps_another_weight(run: Run) -> None:
    run["convolution"].grad = run["embedding"].detach().flatten()[100:148].view(4, 3, 2, 2)


def gradient_that_is_state(run: Run) -> None:
    run["embedding"].grad = run.optimizer.state[run["embedding"]]["exp_avg"]


def weight_that_is_state(run: Run) -> None:
    run["embedding"].data = run.optimizer.state[run["convolution"]]["exp_avg"].flatten()[:1].expand(40, 25)


def expanded_weight(run: Run) -> None:
    run["embedding"].data = torch.randn(1, 25).expand(40, 25)


def negated_weight(run: Run) -> None:
    run["embedding"].data = torch.randn(40, 25, dtype=torch.complex64).conj().imag


def another_dtype(run: Run) -> None:
    run["embedding"].data = run["embedding"].detach().to(BF16)
    run["embedding"].grad = torch.ones(40, 25, dtype=BF16)


def another_shape(run: Run) -> None:
    run["embedding"].data = run["embedding"].detach().flatten()
    run["embedding"].grad = torch.ones(1000)


def misaligned_weight(run: Run) -> None:
    memory = bytearray(4 * 1000 + 2)
    run["embedding"].data = torch.frombuffer(memory, dtype=FP32, offset=2, count=1000).view(40, 25)


def moved_onto_another(run: Run) -> None:
    both = torch.randn(1002)
    run["embedding"].data, run["bias"].data = both[:1000].view(40, 25), both[500:501]


def restrided_onto_another(run: Run) -> None:
    run["embedding"].data = run["embedding"].detach().as_strided((40, 25), (25, 1))
    run["bias"].data = run["embedding"].detach()[20, 3:4]


#: Case by case: what is done to the parameters and gradients, the exception, its words.
BAD_STEPS: dict[str, tuple[Callable[[Run], None], type[BaseException], tuple[str, ...]]] = {
    "gradient of another dtype": (wrong_gradient_dtype, TypeError, ("gradient", "projection", "torch.float64")),
    "sparse gradient": (sparse_gradient, TypeError, ("gradient", "projection", "sparse")),
    "negated gradient": (negated_gradient, TypeError, ("gradient", "bias", "negate")),
    "gradient is the weight": (gradient_that_is_the_weight, ValueError, ("gradient", "embedding", "share memory")),
    "gradient overlaps another weight": (
        gradient_that_overlaps_another_weight,
        ValueError,
        ("gradient of convolution", "embedding", "share memory"),
    ),
    "gradient is state": (gradient_that_is_state, ValueError, ("embedding", "state")),
    "weight is state": (weight_that_is_state, ValueError, ("embedding",)),
    "expanded weight": (expanded_weight, ValueError, ("embedding", "share memory")),
    "negated weight": (negated_weight, TypeError, ("embedding", "negate")),
    "weight of another dtype": (another_dtype, TypeError, ("embedding", "torch.bfloat16", "torch.float32")),
    "weight of another shape": (another_shape, ValueError, ("embedding", "1000")),
    "misaligned weight": (misaligned_weight, ValueError, ("embedding", "aligned")),
    "weight moved onto another": (moved_onto_another, ValueError, ("embedding", "bias", "share memory")),
    "weight restrided onto another": (restrided_onto_another, ValueError, ("embedding", "bias", "share memory")),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_a_refused_step_changes_nothing_however_often_it_is_tried(case: str) -> None:
    """What is wrong with one parameter stops all; once it is cured, the run goes on as if nothing had been."""
    damage, error, words = BAD_STEPS[case]
    run, twin = Run().step(2), Run().step(2)
    run.gradients()
    healthy = {name: (p.data, p.grad, p.data.clone()) for name, p in run.parameters.items()}
    damage(run)
    for _ in range(3):
        with refused(run, error, *words):
            run.optimizer.step()
    for name, p in run.parameters.items():
        p.grad = None
        p.data, p.grad, values = healthy[name]
        assert_same(p, values, f"{name} was written to")
    run.optimizer.step()
    assert_twins(run, twin.step())
    assert_twins(run.step(), twin.step())


@pytest.mark.parametrize("case", [case for case in BAD_STEPS if "state" not in case])
def test_a_refused_first_step_changes_nothing(case: str) -> None:
    damage, _, _ = BAD_STEPS[case]
    run, twin = Run(), Run()
    run.gradients()
    healthy = {name: (p.data, p.grad, p.data.clone()) for name, p in run.parameters.items()}
    damage(run)
    if case in ("weight of another dtype", "weight of another shape"):  # which it may have from the start
        run.optimizer.step()
        return
    before = snapshot(run)
    with pytest.raises((TypeError, ValueError)):
        run.optimizer.step()
    after = snapshot(run)
    for key in ("weights", "gradients", "state", "groups", "members", "options"):
        assert_equal(after[key], before[key], key)
    for name, p in run.parameters.items():
        p.grad = None
        p.data, p.grad, values = healthy[name]
        assert_same(p, values, f"{name} was written to")
    run.optimizer.step()
    assert_twins(run, twin.step())


@pytest.mark.parametrize("later", ["sparse gradient", "negated gradient", "expanded weight"])
def test_a_refusal_does_not_hide_an_overlap(later: str) -> None:
    """Two things are wrong; curing one of them must not let the other through."""
    run = Run().step()
    run.gradients()
    convolution = run["convolution"].data
    run["convolution"].data = torch.randn(48).view(4, 3, 2, 2)
    run["bias"].data = run["convolution"].detach().flatten()[7:8]
    healthy = {name: (p.data, p.grad) for name, p in run.parameters.items()}
    damage, error, words = BAD_STEPS[later]
    damage(run)
    with refused(run, error, *words):
        run.optimizer.step()
    for name, p in run.parameters.items():
        p.grad = None
        p.data, p.grad = healthy[name]
    for _ in range(2):
        with refused(run, ValueError, "convolution", "bias", "share memory"):
            run.optimizer.step()
    run["convolution"].data = convolution
    run.optimizer.step()


@pytest.mark.parametrize("what", ["another gradient", "nonfinite", "worker"])
def test_state_is_whole_where_a_step_fails_after_a_change_of_memory_format(what: str) -> None:
    """Planes have been reordered by then: the state's tensors must know."""
    run, twin = Run().step(2), Run().step(2)
    for each in (run, twin):
        each["convolution"].data = each["convolution"].detach().contiguous(memory_format=torch.channels_last)
    held = run.optimizer.state
    state = held[run["convolution"]]
    before = state["exp_avg"].clone()
    run.gradients()
    saved = {name: p.grad for name, p in run.parameters.items()}
    error: type[BaseException] = TypeError
    if what == "another gradient":
        negated_gradient(run)
    elif what == "nonfinite":
        error = outboard.NonFiniteError
        run.optimizer.nonfinite = "raise"
        run["embedding"].grad[3, 4] = torch.inf
        saved["embedding"] = run["embedding"].grad.clone()
        saved["embedding"][3, 4] = torch.randn(40, 25, generator=torch.Generator().manual_seed(run.seed))[3, 4]
    else:
        error = outboard.WorkerError
        run.optimizer._core.fail_next_step(run["convolution"], 47)
    with pytest.raises(error):
        run.optimizer.step()
    for each in (state, held[run["convolution"]], run.optimizer.state[run["convolution"]]):
        assert each["exp_avg"].stride() == run["convolution"].stride()
    if what == "worker":
        # 48 elements are one chunk here: it was not begun.
        assert_same(state["exp_avg"], before)
        return
    assert_same(state["exp_avg"], before)
    run.optimizer.nonfinite = None
    for name, p in run.parameters.items():
        p.grad = saved[name]
    run.optimizer.step()
    assert_twins(run, twin.step())


def test_one_that_moved_away_may_be_replaced() -> None:
    """Memory that a parameter has left is free for another, although the first has no gradient in that step."""
    run = Run().step()
    run.gradients()
    left = run["embedding"].data
    run["embedding"].data = left.clone()
    run["embedding"].grad = None
    run["bias"].data = left[0, :1]
    run.optimizer.step()
    assert float(run.optimizer.state[run["bias"]]["step"]) == 2
    assert float(run.optimizer.state[run["embedding"]]["step"]) == 1


def test_gradients_that_share_memory() -> None:
    """Read by all, that is harmless; unscaled in place, each would divide the other's."""
    p, q = (torch.nn.Parameter(torch.ones(50)) for _ in range(2))
    optimizer = outboard.AdamW([("p", p), ("q", q)])
    p.grad = q.grad = torch.randn(50)
    optimizer.step()
    assert_same(p, q)
    before = p.grad.clone()
    optimizer.grad_scale = torch.tensor(4.0)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"gradient of .* and .*gradient of .* share memory"):
            optimizer.step()
    assert_same(p.grad, before)
    q.grad = p.grad.clone()
    optimizer.step()
    assert_same(p, q)
    assert_same(p.grad, before / 4)


def test_an_overlapping_gradient_cannot_be_unscaled() -> None:
    p = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = outboard.AdamW([("p", p)])
    p.grad = torch.tensor([1.0, 2.0, 3.0]).expand(4, 3)
    optimizer.step()
    optimizer.grad_scale = torch.tensor(2.0)
    with pytest.raises(ValueError, match="gradient of p"):
        optimizer.step()
    assert p.grad[2].tolist() == [1.0, 2.0, 3.0]
    assert float(optimizer.state[p]["step"]) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", "fast"),
        ("lr", None),
        ("lr", torch.ones(2)),
        ("betas", 0.9),
        ("betas", (0.9,)),
        ("betas", (0.9, "b")),
        ("eps", [1e-8]),
        ("weight_decay", {}),
    ],
)
@pytest.mark.parametrize("stepped", [False, True], ids=["first step", "later step"])
def test_settings_that_cannot_be_read_are_refused_by_the_step(stepped: bool, key: str, value: Any) -> None:
    """Of the second group: the first would have been updated already."""
    run, twin = Run(), Run()
    if stepped:
        run.step()
        twin.step()
    run.gradients()
    good = run.optimizer.param_groups[1][key]
    run.optimizer.param_groups[1][key] = value
    before = snapshot(run)
    with pytest.raises((TypeError, ValueError), match=key):
        run.optimizer.step()
    after = snapshot(run)
    for part in ("weights", "gradients", "versions", "state", "members", "options"):
        assert_equal(after[part], before[part], part)
    run.optimizer.param_groups[1][key] = good
    run.optimizer.step()
    assert_twins(run, twin.step())


def test_a_closure_that_fails_changes_nothing() -> None:
    run, twin = Run().step(), Run().step()
    run.gradients()
    with refused(run, ZeroDivisionError):
        run.optimizer.step(lambda: 1 / 0)
    run.optimizer.step()
    assert_twins(run, twin.step())


# ---- other calls that are refused


@pytest.mark.parametrize("master", ["split", "full"])
def test_refused_assignments_change_nothing(master: str) -> None:
    """Each of these would have changed something by the time it comes to what is wrong."""
    run, twin = Run(master=master).step(2), Run(master=master).step(2)
    optimizer = run.optimizer
    p, q, stranger = run["projection"], run["embedding"], torch.nn.Parameter(torch.ones(3))
    good = {key: torch.ones_like(value) for key, value in optimizer.state[q].items()}
    short = {"exp_avg": torch.ones(40, 25), "exp_avg_sq": torch.ones(24)}
    everything = {parameter: dict(optimizer.state[parameter]) for parameter in run.parameters.values()}
    bad_last = {**everything, q: good, p: short}
    calls: list[tuple[type[BaseException], Callable[[], Any]]] = [
        (ValueError, lambda: optimizer.state[p].__setitem__("exp_avg", torch.ones(3, 299))),
        (TypeError, lambda: optimizer.state[p].__setitem__("exp_avg", 1.0)),
        (TypeError, lambda: optimizer.state[p].__setitem__("exp_avg", torch.ones(3, 300, dtype=torch.int64))),
        (ValueError, lambda: optimizer.state[p].__setitem__("step", -1.0)),
        (ValueError, lambda: optimizer.state[p].__setitem__("step", torch.nan)),
        (TypeError, lambda: optimizer.state[p].__setitem__("step", "two")),
        (ValueError, lambda: optimizer.state[q].update(short)),
        (ValueError, lambda: optimizer.state.__setitem__(q, short)),
        (TypeError, lambda: optimizer.state.__setitem__(q, 3)),
        (ValueError, lambda: optimizer.state.update(bad_last)),
        (ValueError, lambda: setattr(optimizer, "state", bad_last)),
        (TypeError, lambda: setattr(optimizer, "state", {**everything, q: good, p: None})),
        (TypeError, lambda: optimizer.state[p].__delitem__("exp_avg")),
        (TypeError, lambda: optimizer.state[p].popitem()),
        (ValueError, lambda: optimizer.load_master(p, torch.ones(300, 3))),
        (TypeError, lambda: optimizer.load_master(p, torch.ones(3, 300, dtype=torch.int32))),
        (ValueError, lambda: optimizer.load_master(stranger, torch.ones(3))),
        (ValueError, lambda: optimizer.master(stranger)),
        (ValueError, lambda: optimizer.reset(stranger)),
        (ValueError, lambda: setattr(optimizer, "max_grad_norm", -1.0)),
        (ValueError, lambda: setattr(optimizer, "max_grad_norm", float("nan"))),
        (TypeError, lambda: setattr(optimizer, "max_grad_norm", "one")),
        (ValueError, lambda: setattr(optimizer, "nonfinite", "ignore")),
        (ValueError, lambda: setattr(optimizer, "compute_grad_norm", "yes")),
    ]
    for index, (error, call) in enumerate(calls):
        before = snapshot(run)
        with pytest.raises(error):
            call()
        assert_equal(snapshot(run), before, f"after call {index}")
    run.optimizer.step(), twin.optimizer.step()
    assert_twins(run, twin)


@pytest.mark.parametrize(
    "group",
    [
        {"params": [torch.nn.Parameter(torch.ones(2))], "lr": -1.0},
        {"params": [torch.nn.Parameter(torch.ones(2))], "betas": (0.9, 1.0)},
        {"params": [torch.nn.Parameter(torch.ones(2))], "eps": "small"},
        {"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": float("nan")},
        {"params": [torch.nn.Parameter(torch.ones(2))], "decoupled_weight_decay": False},
        {"params": [torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))]},
        {"params": [torch.nn.UninitializedParameter()]},
        {"params": [torch.ones(2) * torch.ones(2, requires_grad=True)]},
        {"params": ["weight"]},
        {"params": {torch.nn.Parameter(torch.ones(2))}},
        {},
        [],
    ],
    ids=str,
)
def test_refused_groups_are_not_added(group: Any) -> None:
    run, twin = Run().step(), Run().step()
    if isinstance(group, dict) and "params" in group and isinstance(group["params"], list):
        group = {**group, "params": [("late", p) if isinstance(p, torch.Tensor) else p for p in group["params"]]}
    before = snapshot(run)
    with pytest.raises((TypeError, ValueError, KeyError)):
        run.optimizer.add_param_group(group)
    assert_equal(snapshot(run), before)
    assert_twins(run.step(), twin.step())


def test_a_listed_parameter_cannot_be_added_again() -> None:
    run, twin = Run().step(), Run().step()
    with refused(run, ValueError):
        run.optimizer.add_param_group({"params": [("embedding", run["embedding"])]})
    assert_twins(run.step(), twin.step())


def test_a_group_that_overlaps_is_refused_at_its_first_step() -> None:
    """Whose memory it is shows only then; the groups stay as the user made them."""
    run, twin = Run().step(), Run().step()
    rows = torch.nn.Parameter(run["embedding"].detach()[3:5])
    run.optimizer.add_param_group({"params": [("rows", rows)]})
    run.gradients()
    rows.grad = torch.ones(2, 25)
    weights = {name: p.detach().clone() for name, p in run.parameters.items()}
    for call in (run.optimizer.step, run.optimizer.step, lambda: run.optimizer.state, run.optimizer.state_dict):
        with pytest.raises(ValueError, match="embedding and rows share memory"):
            call()
        for name, p in run.parameters.items():
            assert_same(p, weights[name], name)
    rows.data = rows.detach().clone()
    run.optimizer.step()
    twin.step()
    for name, p in run.parameters.items():
        assert_same(p, twin[name], name)


# ---- failures in workers


def fail(run: Run, name: str, element: int) -> pytest.ExceptionInfo[outboard.WorkerError]:
    run.gradients()
    run.optimizer._core.fail_next_step(run[name], element)
    with pytest.raises(outboard.WorkerError) as caught:
        run.optimizer.step()
    return caught


@pytest.mark.parametrize(
    ("name", "element", "elements"),
    [
        ("embedding", 0, "0..64"),
        ("embedding", 63, "0..64"),
        ("embedding", 64, "64..128"),
        ("embedding", 999, "960..1000"),
        ("projection", 500, "448..512"),
        ("norm", 6, "0..7"),
        ("bias", 0, "0..1"),
    ],
)
def test_a_worker_error_names_its_chunk_and_the_others_are_updated(name: str, element: int, elements: str) -> None:
    run, twin = Run().step(), Run().step()
    versions = {key: p._version for key, p in run.parameters.items()}
    caught = fail(run, name, element)
    assert caught.type is outboard.WorkerError
    assert isinstance(caught.value, outboard.OutboardError)
    message = str(caught.value)
    assert f"{name}, elements {elements}" in message
    assert "failure asked for by a test" in message
    others = run.parameters.keys() - {name}
    assert not any(f"{other}," in message for other in others), message
    twin.step()
    for other in others:
        assert_same(run[other], twin[other], other)
        if other != "unused":
            assert run[other]._version > versions[other], "a stale backward must notice"
            state, wanted = run.optimizer.state[run[other]], twin.optimizer.state[twin[other]]
            for key in wanted:
                assert_same(state[key], wanted[key], f"{other} {key}")
    assert run[name]._version > versions[name]
    assert float(run.optimizer.state[run[name]]["step"]) == 1
    assert list(run.optimizer.stats()["poisoned"]) == [name]


def test_all_failures_of_a_step_are_in_the_message() -> None:
    run, twin = Run().step(), Run().step()
    run.gradients()
    for name, element in (("bias", 0), ("embedding", 999), ("projection", 0), ("embedding", 70)):
        run.optimizer._core.fail_next_step(run[name], element)
    message = "4 of this step's chunks failed: embedding, elements 64..128: .*; embedding, elements 960..1000: .*; "
    with pytest.raises(outboard.WorkerError, match=f"^{message}projection, elements 0..64: .*; bias, elements 0..1: "):
        run.optimizer.step()
    twin.step()
    for name in ("norm", "convolution"):
        assert_same(run[name], twin[name], name)
    assert sorted(run.optimizer.stats()["poisoned"]) == ["bias", "embedding", "projection"]
    for name in ("bias", "embedding"):
        run.optimizer.reset(run[name])
        with refused(run, outboard.PoisonedError):
            run.optimizer.step()
    run.optimizer.reset(run["projection"])
    run.optimizer.step()


def test_nothing_steps_copies_or_saves_a_poisoned_parameter() -> None:
    run = Run().step()
    saved = copy.deepcopy(run.optimizer.state_dict())
    fail(run, "projection", 100)
    calls: list[Callable[[], Any]] = [
        run.optimizer.step,
        lambda: run.optimizer.step(lambda: 1.0),
        run.optimizer.state_dict,
        lambda: copy.deepcopy(run.optimizer),
        lambda: copy.copy(run.optimizer),
        lambda: pickle.dumps(run.optimizer),
        # Part of the state does not make it whole.
        lambda: (run.optimizer.state[run["projection"]].update(step=1.0), run.optimizer.step()),
    ]
    for call in calls:
        with refused(run, outboard.PoisonedError, "projection", "failure asked for by a test"):
            call()
    assert list(run.optimizer.stats()["poisoned"]) == ["projection"]
    # A refused load does not cure it.
    broken = copy.deepcopy(saved)
    broken["state"][0]["exp_avg"] = torch.ones(3)
    with refused(run, ValueError, "embedding"):
        run.optimizer.load_state_dict(broken)
    with refused(run, outboard.PoisonedError, "projection"):
        run.optimizer.step()


@pytest.mark.parametrize("cure", ["load_state_dict", "reset", "state", "load_state_dict without it", "delete"])
def test_a_poisoned_parameter_is_cured(cure: str) -> None:
    """Afterwards it is as a parameter that never failed, with the weights and the state that it was given."""
    run, twin = Run(max_grad_norm=1.0).step(2), Run(max_grad_norm=1.0).step(2)
    saved = copy.deepcopy(run.optimizer.state_dict())
    weights = {name: p.detach().clone() for name, p in run.parameters.items()}
    fail(run, "projection", 100)
    p, number = run["projection"], 2
    if cure == "load_state_dict":
        run.optimizer.load_state_dict(saved)
    elif cure == "load_state_dict without it":
        del saved["state"][number]
        run.optimizer.load_state_dict(saved)
    elif cure == "reset":
        run.optimizer.reset(p)
    elif cure == "state":
        run.optimizer.state[p] = saved["state"][number]
    else:
        del run.optimizer.state[p]
    assert run.optimizer.stats()["poisoned"] == {}
    if cure in ("reset", "delete", "load_state_dict without it"):
        twin.optimizer.reset(twin["projection"])
    if not cure.startswith("load"):
        run.optimizer.load_state_dict(
            {**saved, "state": {**saved["state"], number: tree(twin.optimizer.state_dict()["state"][number])}}
        )
    with torch.no_grad():
        for name, parameter in run.parameters.items():
            parameter.copy_(weights[name])
    run.seed = twin.seed
    run.step(2), twin.step(2)
    assert_twins(run, twin)


def test_one_failure_after_another() -> None:
    run = Run().step()
    for turn, name in enumerate(("embedding", "bias", "embedding", "norm")):
        fail(run, name, 0)
        assert list(run.optimizer.stats()["poisoned"]) == [name]
        run.optimizer.reset(run[name])
        assert float(run.optimizer.state[run["convolution"]]["step"]) == turn + 2
    run.step()
    assert float(run.optimizer.state[run["norm"]]["step"]) == 1
    assert float(run.optimizer.state[run["embedding"]]["step"]) == 2
    assert float(run.optimizer.state[run["projection"]]["step"]) == 6


# ---- NaN and infinities

VALUES = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["embedding", "norm", "projection", "bias"])
@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 1.0}, {"compute_grad_norm": True}, {"nonfinite": "skip"}], ids=str
)
def test_skip(options: dict[str, Any], name: str, value: str) -> None:
    """The default where a norm is computed. Nothing changes, it is counted, the first one warns, the norm says so."""
    run, twin = Run(**options).step(2), Run(**options).step(2)
    for skipped in (1, 2):
        run.gradients()
        run[name].grad.view(-1)[-1] = VALUES[value]
        before = snapshot(run)
        if skipped == 1:
            with pytest.warns(RuntimeWarning, match="step 3 changed nothing"):
                run.optimizer.step()
        else:
            run.optimizer.step()
        after = snapshot(run)
        for part in ("weights", "gradients", "versions", "state", "groups"):
            assert_equal(after[part], before[part], part)
        assert run.optimizer.stats()["skipped_steps"] == skipped
        norm = run.optimizer.last_grad_norm
        if options.get("nonfinite"):
            assert norm is None
        else:
            assert norm is not None
            assert not norm < float("inf")
    run.seed = twin.seed
    assert_twins(run.step(), twin.step())
    assert run.optimizer.last_grad_norm == twin.optimizer.last_grad_norm


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=str)
def test_raise_names_all_parameters(options: dict[str, Any], value: str) -> None:
    run, twin = Run(nonfinite="raise", **options).step(), Run(nonfinite="raise", **options).step()
    run.gradients()
    saved = {name: run[name].grad.clone() for name in ("norm", "convolution")}
    for name in saved:
        run[name].grad.view(-1)[0] = VALUES[value]
    for _ in range(2):
        with refused(run, outboard.NonFiniteError, "norm, convolution"):
            run.optimizer.step()
    for name, grad in saved.items():
        run[name].grad = grad
    run.optimizer.step()
    assert_twins(run, twin.step())


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("options", [{}, {"nonfinite": "propagate"}], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_propagate_is_torch(amsgrad: bool, options: dict[str, Any], value: str) -> None:
    """The default without a norm: one bad element spoils itself and nothing else, as in torch."""
    start, grads = torch.randn(1024), torch.randn(4, 1024)
    grads[1, 100] = VALUES[value]
    p, q = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    ours = outboard.AdamW([p], amsgrad=amsgrad, chunk_elems=64, **options)
    theirs = torch.optim.AdamW([q], amsgrad=amsgrad, fused=True)
    for grad in grads:
        p.grad, q.grad = grad.clone(), grad.clone()
        ours.step(), theirs.step()
        assert_same(p, q)
    assert p.isnan().nonzero().flatten().tolist() == [100]
    for key in ours.state[p].keys() - {"step"}:
        assert_same(ours.state[p][key], theirs.state[q][key], key)
    assert ours.stats()["skipped_steps"] == 0


def test_propagate_with_a_norm_spoils_everything() -> None:
    """An infinite norm must not look like no clipping."""
    run = Run(max_grad_norm=1.0, nonfinite="propagate").step()
    run.gradients()
    run["bias"].grad.fill_(torch.nan)
    run.optimizer.step()
    assert run.optimizer.last_grad_norm != run.optimizer.last_grad_norm
    assert all(p.isnan().all() for name, p in run.parameters.items() if name != "unused")
    assert not run["unused"].isnan().any()


def test_the_policy_may_change_between_steps() -> None:
    run = Run().step()
    run.gradients()
    run["bias"].grad.fill_(torch.inf)
    run.optimizer.nonfinite = "raise"
    with refused(run, outboard.NonFiniteError, "bias"):
        run.optimizer.step()
    run.optimizer.nonfinite = "skip"
    with pytest.warns(RuntimeWarning):
        run.optimizer.step()
    assert float(run.optimizer.state[run["bias"]]["step"]) == 1
    run.optimizer.nonfinite = None
    run.optimizer.max_grad_norm = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.optimizer.step()  # skips, and has warned already
    assert float(run.optimizer.state[run["bias"]]["step"]) == 1
    run.optimizer.max_grad_norm = None
    run.optimizer.step()
    assert float(run.optimizer.state[run["bias"]]["step"]) == 2
    assert run["bias"].isnan().all()
    assert not run["embedding"].isnan().any()
    assert run.optimizer.stats()["skipped_steps"] == 2


@pytest.mark.parametrize("found", [True, False])
def test_the_scalers_word(found: bool) -> None:
    """`found_inf` skips without a warning; a scale without it divides and writes back, whatever the dtype."""
    run, twin = Run().step(), Run().step()
    run.gradients()
    twin.gradients()
    grads = {name: p.grad.clone() for name, p in run.parameters.items() if p.grad is not None}
    for p in run.parameters.values():
        if p.grad is not None:
            p.grad.mul_(8)
    run.optimizer.grad_scale = torch.tensor(8.0)
    run.optimizer.found_inf = torch.tensor(float(found))
    before = snapshot(run)
    run.optimizer.step()
    if found:
        after = snapshot(run)
        for part in ("weights", "gradients", "versions", "state"):
            assert_equal(after[part], before[part], part)
        assert run.optimizer.stats()["skipped_steps"] == 1
        run.optimizer.found_inf = torch.tensor(0.0)
        run.optimizer.step()
    for name, grad in grads.items():
        assert_same(run[name].grad, grad, name)
    del run.optimizer.grad_scale, run.optimizer.found_inf
    twin.optimizer.step()
    assert_twins(run, twin)


# ---- state that comes from state


def test_state_may_be_assigned_from_itself() -> None:
    run, twin = Run(amsgrad=True).step(2), Run(amsgrad=True).step(2)
    optimizer = run.optimizer
    for assign in (
        lambda: setattr(optimizer, "state", optimizer.state),
        lambda: setattr(optimizer, "state", dict(optimizer.state)),
        lambda: setattr(optimizer, "state", {p: dict(state) for p, state in optimizer.state.items()}),
        lambda: optimizer.state.update({p: dict(state) for p, state in optimizer.state.items()}),
        lambda: optimizer.state.__setitem__(run["embedding"], dict(optimizer.state[run["embedding"]])),
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
        lambda: [optimizer.load_master(p, optimizer.master(p)) for p in run.parameters.values()],
    ):
        assign()
        assert_twins(run, twin)
    assert_twins(run.step(), twin.step())


def test_state_of_one_parameter_for_another() -> None:
    """Live tensors of the same optimizer as the source, in an order that overwrites them."""
    ps = [torch.nn.Parameter(torch.full((6,), float(i))) for i in range(3)]
    optimizer = outboard.AdamW(ps)
    for i, p in enumerate(ps):
        p.grad = torch.full((6,), float(i + 1))
    optimizer.step()
    averages = [float(optimizer.state[p]["exp_avg"][0]) for p in ps]
    packed = optimizer.state_dict()
    live = packed["state"]
    for order in ([1, 2, 0], [1, 0, None], [None, 0, 1], [2, 2, 2]):
        wanted = [0.0 if source is None else averages[source] for source in order]
        chosen = {i: live[source] for i, source in enumerate(order) if source is not None}
        optimizer.load_state_dict({**packed, "state": chosen})
        averages = [float(optimizer.state[p]["exp_avg"][5]) for p in ps]
        assert averages == wanted, order
        live = optimizer.state_dict()["state"]


def test_a_loaded_residual_survives_a_refused_step() -> None:
    """A split checkpoint in an optimizer with full masters: residual and weight are combined by the first step."""
    run = Run().step(3)
    saved = copy.deepcopy(run.optimizer.state_dict())
    loaded = {}
    for refuse in (False, True):
        full = Run(master="full")
        full.optimizer.load_state_dict(saved)
        with torch.no_grad():
            for name, p in full.parameters.items():
                p.copy_(run[name])
        full.gradients()
        if refuse:
            weight, grad = full["projection"].data, full["projection"].grad
            full["projection"].grad = None
            full["projection"].data = weight.float()
            full["projection"].grad = torch.ones(3, 300)
            with pytest.raises(TypeError, match="projection"):
                full.optimizer.step()
            full["projection"].grad = None
            full["projection"].data, full["projection"].grad = weight, grad
        full.optimizer.step()
        loaded[refuse] = full
    assert_twins(loaded[True], loaded[False])
    run.seed = 0
    assert_same(
        loaded[True].optimizer.master(loaded[True]["projection"]), run.step().optimizer.master(run["projection"])
    )


@pytest.mark.parametrize("first", ["state", "state_dict", "step", "master"])
def test_state_first_read_under_inference_mode(first: str) -> None:
    """As in a checkpoint that an evaluation loop writes; it can be written to afterwards."""
    run, twin = Run(), Run()
    if first == "step":
        run.gradients()
        with torch.inference_mode():
            run.optimizer.step()
        twin.step()
    else:
        run.gradients()
        run.optimizer.step()
        twin.step()
        with torch.inference_mode():
            if first == "state":
                assert float(run.optimizer.state[run["bias"]]["step"]) == 1
            elif first == "state_dict":
                run.optimizer.state_dict()
            else:
                run.optimizer.master(run["projection"])
    saved = copy.deepcopy(twin.optimizer.state_dict())
    run.optimizer.load_state_dict(saved)
    run.optimizer.state[run["embedding"]]["exp_avg"].mul_(2)
    twin.optimizer.state[twin["embedding"]]["exp_avg"].mul_(2)
    assert_twins(run.step(), twin.step())


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_masters_from_views_of_what_they_change(dtype: torch.dtype) -> None:
    base = torch.randn(9001).to(dtype)
    p = torch.nn.Parameter(base[1:])
    optimizer = outboard.AdamW([p])
    wanted = base[:-1].float().clone()
    optimizer.load_master(p, base[:-1])
    assert_same(optimizer.master(p), wanted)

    square = torch.nn.Parameter(torch.randn(70, 70).to(dtype))
    optimizer = outboard.AdamW([square], master="full")
    square.grad = torch.randn(70, 70).to(dtype)
    optimizer.step()
    source = optimizer.state[square].get("master", square.detach()).t()
    wanted = source.float().clone()
    optimizer.load_master(square, source)
    assert_same(optimizer.master(square), wanted)


def test_amsgrad_may_be_switched_off_and_on() -> None:
    """As torch: the maximum rests while it is off."""
    start, grads = torch.randn(256), torch.randn(9, 256)
    grads[:2] *= 10
    p, q = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    ours, theirs = outboard.AdamW([p], amsgrad=True), torch.optim.AdamW([q], amsgrad=True, fused=True)
    for step, grad in enumerate(grads):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["amsgrad"] = not 3 <= step < 6
        p.grad, q.grad = grad.clone(), grad.clone()
        ours.step(), theirs.step()
        assert_same(p, q, f"step {step}")
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            assert_same(ours.state[p][key], theirs.state[q][key], f"step {step} {key}")


# ---- the caller's floating-point modes


def test_flushing_denormals_reaches_nothing() -> None:
    """`torch.set_flush_denormal(True)` is the caller's own affair: the same bits, and the setting stays."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush denormals")
    torch.set_flush_denormal(False)

    def run(flush: bool) -> list[torch.Tensor]:
        tiny = torch.tensor([1e-6, -2e-5, 6e-8, 1e-39, -1e-42, 1.0, 1e-30])
        ps = [torch.nn.Parameter(tiny.to(dtype).repeat(20)) for dtype in (FP32, BF16, FP16)]
        optimizer = outboard.AdamW(ps, lr=1e-3, eps=1e-40, max_grad_norm=1.0, threads=3, chunk_elems=32)
        for p in ps:
            p.grad = (tiny * 1e-3).to(p.dtype).repeat(20)
        first = [p.detach().clone() for p in ps]
        torch.set_flush_denormal(flush)
        try:
            masters = [optimizer.master(p) for p in ps]
            optimizer.step()
            masters += [optimizer.master(p) for p in ps]
            optimizer.load_master(ps[2], masters[2])
            masters.append(optimizer.master(ps[2]))
            still = float(torch.tensor(1e-39) * 1.0) == 0.0
        finally:
            torch.set_flush_denormal(False)
        assert still == flush, "the caller's setting was changed"
        for p, value, master in zip(ps, first, masters, strict=False):
            assert_same(master, value.float(), f"{p.dtype} master")
        tensors = masters + [p.detach().clone() for p in ps]
        return tensors + [t.clone() for p in ps for t in optimizer.state[p].values()]

    for index, (got, wanted) in enumerate(zip(run(True), run(False), strict=True)):
        assert_same(got, wanted, f"tensor {index}")
