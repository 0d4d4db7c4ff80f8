"""torch's own database of optimizer inputs (`optim_db`), run against outboard.

What `TestOptimRenewed` of torch's test suite does with its entries for Adam and AdamW on the CPU is done here:
constructor inputs, error inputs and sets of schedulers.
"""

from __future__ import annotations

import copy
import io
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

import outboard
from oracle import assert_same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of numba and others, which torch's test tools import where they are installed
    from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

DATABASE = {info.name: info for info in optim_db if info.name in ("Adam", "AdamW")}
OURS = {"Adam": outboard.Adam, "AdamW": outboard.AdamW}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(dtype: torch.dtype = torch.float32):
    return [
        pytest.param(name, entry.kwargs, id=f"{name}-{entry.desc}")
        for name, info in DATABASE.items()
        for entry in info.optim_inputs_func(device="cpu", dtype=dtype)
    ]


def inputs_and_more():
    """The database keeps its tensor settings for GPUs; they must work here too, less `capturable`."""
    more = {
        "Tensor lr": {"lr": torch.tensor(0.01)},
        "Tensor lr and betas": {"lr": torch.tensor(0.001), "betas": (torch.tensor([[[0.9]]]), torch.tensor([[0.99]]))},
        "Tensor betas, amsgrad": {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "amsgrad": True},
        "fused": {"fused": True, "weight_decay": 0.1},
        "foreach": {"foreach": True, "amsgrad": True},
    }
    return inputs() + [
        pytest.param(name, kwargs, id=f"{name}-{desc}") for name in DATABASE for desc, kwargs in more.items()
    ]


def errors():
    return [
        pytest.param(name, number, id=f"{name}-{error.optimizer_error_input.desc}")
        for name, info in DATABASE.items()
        for number, error in enumerate(info.optim_error_inputs_func(device="cpu", dtype=torch.float32))
    ]


def schedules():
    return [
        pytest.param(name, schedulers, id=f"{name}-{number}")
        for name, info in DATABASE.items()
        for number, schedulers in enumerate(info.scheduler_inputs)
    ]


def fused(name: str, at, kwargs) -> torch.optim.Optimizer:
    """torch's fused optimizer; tensor settings as the floats that they hold."""

    def plain(value):
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return value.item() if isinstance(value, torch.Tensor) else value

    kwargs = {key: plain(value) for key, value in kwargs.items() if key not in ("foreach", "fused")}
    return DATABASE[name].optim_cls(at, fused=True, **kwargs)


def pair(*shapes, dtype: torch.dtype = torch.float32):
    start = [torch.randn(shape).to(dtype) for shape in shapes]
    return tuple([p.clone().requires_grad_() for p in start] for _ in range(2))


def test_the_database_has_what_is_tested() -> None:
    assert set(DATABASE) == set(OURS)
    assert len(inputs()) >= 10
    assert len(errors()) >= 20
    assert len(schedules()) >= 8


# ---- constructor inputs


@pytest.mark.parametrize(("name", "kwargs"), inputs_and_more())
def test_same_results_as_fused(name, kwargs) -> None:
    ours_at, theirs_at = pair((16, 8), (64,), (2, 3, 32))
    ours, theirs = OURS[name](ours_at, **kwargs), fused(name, theirs_at, kwargs)
    for _ in range(7):
        for p, q in zip(ours_at, theirs_at, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(ours_at, theirs_at, strict=True):
        assert_same(p, q)
        for key, value in theirs.state[q].items():
            if key == "step":
                assert float(ours.state[p][key]) == float(value)
            else:
                assert_same(ours.state[p][key], value, key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("number", range(10))
def test_16_bit_as_the_for_loop_does(number, dtype) -> None:
    """torch's own comparison of implementations in low precision, with its tolerance of 5e-3."""
    entries = [(name, e) for name, info in DATABASE.items() for e in info.optim_inputs_func(device="cpu", dtype=dtype)]
    name, entry = entries[number]
    ours_at, theirs_at = pair((17, 8), (5,), dtype=dtype)
    ours = OURS[name](ours_at, **entry.kwargs)
    theirs = DATABASE[name].optim_cls(theirs_at, foreach=False, **entry.kwargs)
    for _ in range(3):
        for p, q in zip(ours_at, theirs_at, strict=True):
            p.grad = torch.randn(p.shape).to(dtype)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(ours_at, theirs_at, strict=True):
        torch.testing.assert_close(p, q, atol=5e-3, rtol=1.6e-2 if dtype is torch.bfloat16 else 5e-3)


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@pytest.mark.parametrize(("name", "kwargs"), inputs())
def test_goes_in_the_right_direction(name, kwargs, contiguous) -> None:
    """`test_forloop_goes_right_direction`: a least-squares loss falls (or rises, with maximize)."""
    if contiguous:
        weight, bias = torch.randn((10, 5)), torch.randn(10)
    else:
        weight, bias = torch.randn((10, 5, 2))[..., 0], torch.randn((10, 2))[..., 0]
    weight, bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    target = torch.randn(5)
    optimizer = OURS[name]([weight, bias], **kwargs)

    def closure():
        optimizer.zero_grad()
        loss = (weight.mv(target) + bias).pow(2).sum()
        loss.backward()
        return loss

    initial = closure().item()
    for _ in range(20):
        optimizer.step(closure)
    if kwargs.get("maximize"):
        assert closure().item() > initial
    else:
        assert closure().item() < initial


@pytest.mark.parametrize(("name", "schedulers"), schedules())
def test_scheduler_sets(name, schedulers) -> None:
    """`test_forloop_goes_right_direction` with each set of schedulers, over each constructor input; as torch."""
    for entry in DATABASE[name].optim_inputs_func(device="cpu", dtype=torch.float32):
        ours_at, theirs_at = pair((10, 16), (16,))
        target = torch.randn(16)
        runs = []
        for at, make in ((ours_at, OURS[name]), (theirs_at, lambda p, **kwargs: fused(name, p, kwargs))):
            groups = [{"params": [at[0]], "lr": 0.005}, {"params": [at[1]]}]
            optimizer = make(groups, **entry.kwargs)
            runs.append((at, optimizer, [scheduler(optimizer) for scheduler in schedulers]))
        losses = []
        for _ in range(20):
            for (weight, bias), optimizer, steps in runs:

                def closure(optimizer=optimizer, weight=weight, bias=bias, target=target):
                    optimizer.zero_grad()
                    loss = (weight.mv(target) + bias.sum()).pow(2).sum()
                    loss.backward()
                    return loss

                loss = optimizer.step(closure).detach()
                losses.append(loss.item())
                for scheduler in steps:
                    if isinstance(scheduler, ReduceLROnPlateau):
                        scheduler.step(loss)
                    else:
                        scheduler.step()
            assert losses[-1] == losses[-2]
        for p, q in zip(ours_at, theirs_at, strict=True):
            assert_same(p, q, entry.desc)
        assert (losses[-1] > losses[0]) == bool(entry.kwargs.get("maximize"))


@pytest.mark.parametrize("name", DATABASE)
def test_param_groups_lr_and_weight_decay(name) -> None:
    for key, value in (("lr", 0.05), ("weight_decay", 0.3), ("betas", (0.5, 0.8)), ("eps", 1e-3)):
        for entry in DATABASE[name].optim_inputs_func(device="cpu", dtype=torch.float32):
            ours_at, theirs_at = pair((10, 16), (16,))
            ours, theirs = (
                make([{"params": [a], key: value}, {"params": [b]}], entry.kwargs)
                for make, (a, b) in (
                    (lambda groups, kwargs: OURS[name](groups, **kwargs), ours_at),
                    (lambda groups, kwargs: fused(name, groups, kwargs), theirs_at),
                )
            )
            assert ours.param_groups[0][key] == value
            assert ours.param_groups[1][key] == theirs.param_groups[1][key]
            for _ in range(3):
                for p, q in zip(ours_at, theirs_at, strict=True):
                    p.grad = torch.randn(p.shape)
                    q.grad = p.grad.clone()
                ours.step()
                theirs.step()
            for p, q in zip(ours_at, theirs_at, strict=True):
                assert_same(p, q, f"{key} {entry.desc}")


# ---- error inputs


@pytest.mark.parametrize(("name", "number"), errors())
def test_error_inputs(name, number) -> None:
    """`test_errors`: the error's type and its text, by torch's regular expression."""
    error = DATABASE[name].optim_error_inputs_func(device="cpu", dtype=torch.float32)[number]
    entry = error.optimizer_error_input
    assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
    params = entry.params if entry.params is not None else [torch.randn(1, requires_grad=True)]
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            OURS[name](params, **entry.kwargs)
    else:
        with pytest.raises(error.error_type, match=error.error_regex):
            OURS[name](params, **entry.kwargs)


# ---- steps that do nothing


@pytest.mark.parametrize(("name", "kwargs"), inputs())
def test_step_is_noop_when_params_have_no_grad(name, kwargs) -> None:
    p = torch.randn(4, requires_grad=True)
    before = p.detach().clone()
    optimizer = OURS[name]([p], **kwargs)
    assert optimizer.step(lambda: torch.tensor([1])) == torch.tensor([1])
    assert_same(p, before)


@pytest.mark.parametrize(("name", "kwargs"), inputs())
def test_step_is_noop_for_zero_grads(name, kwargs) -> None:
    p = torch.randn(4, requires_grad=True)
    before = p.detach().clone()
    kwargs = {**kwargs, "weight_decay": 0.0}
    optimizer = OURS[name]([p], **kwargs)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert_same(p, before)
    assert float(optimizer.state[p]["step"]) == 1


@pytest.mark.parametrize("name", DATABASE)
def test_does_not_step_if_found_inf(name) -> None:
    """`test_fused_does_not_step_if_foundinf`."""
    if not DATABASE[name].supports_fused_on:
        pytest.skip(f"torch has no fused {name}")
    p = torch.ones(3, requires_grad=True)
    optimizer = OURS[name]([p])
    for steps in range(3):
        p.grad = torch.ones(3)
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(1.0)
        before = p.detach().clone()
        optimizer.step()
        assert_same(p, before)
        assert float(optimizer.state[p]["step"]) == steps
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(0.0)
        optimizer.step()
        assert bool((p != before).all())


# ---- printing, copying, saving


def assert_equal(a, b) -> None:
    """Fail unless two state dicts hold the same, tensors to the bit."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    elif isinstance(a, torch.Tensor):
        assert_same(a, b)
    else:
        assert a == b


@pytest.mark.parametrize(("name", "kwargs"), inputs())
def test_can_be_printed(name, kwargs) -> None:
    optimizer = OURS[name]([torch.nn.Parameter(torch.randn(2, 3))], **kwargs)
    repr(optimizer)
    assert str(optimizer).startswith(f"{name} (\nParameter Group 0")


def least_squares(name, kwargs, names: bool = False):
    weight, bias = torch.nn.Parameter(torch.randn(2, 3)), torch.nn.Parameter(torch.randn(2))
    parameters = [("weight", weight), ("bias", bias)] if names else [weight, bias]
    optimizer = OURS[name](parameters, **kwargs)
    x = torch.randn(3)

    def step(optimizer=optimizer, weight=weight, bias=bias):
        optimizer.zero_grad()
        loss = (weight.mv(x) + bias).pow(2).sum()
        loss.backward()
        optimizer.step()

    return SimpleNamespace(weight=weight, bias=bias, optimizer=optimizer, step=step)


@pytest.mark.parametrize("names", [False, True], ids=["", "named"])
@pytest.mark.parametrize(("name", "kwargs"), inputs())
def test_state_dict_deterministic(name, kwargs, names) -> None:
    """`test_state_dict_deterministic`, `test_can_load_from_to_named_state_dict`."""
    run = least_squares(name, kwargs, names)
    for _ in range(10):
        run.step()
    weight, bias = (torch.nn.Parameter(x.detach().clone()) for x in (run.weight, run.bias))
    other = OURS[name]([("weight", weight), ("bias", bias)] if names else [weight, bias], **kwargs)
    saved = copy.deepcopy(run.optimizer.state_dict())
    other.load_state_dict(run.optimizer.state_dict())
    assert_equal(saved, run.optimizer.state_dict())
    for _ in range(10):
        run.step()
        run.step(other, weight, bias)
        assert_same(weight, run.weight)
        assert_same(bias, run.bias)
    assert_equal(other.state_dict(), run.optimizer.state_dict())


@pytest.mark.parametrize(("name", "kwargs"), inputs())
def test_can_load_older_state_dict(name, kwargs) -> None:
    """`test_can_load_older_state_dict`: groups that lack the flags that torch added later."""
    run = least_squares(name, kwargs)
    run.step()
    saved = copy.deepcopy(run.optimizer.state_dict())
    flags = (*DATABASE[name].not_og_supported_flags, "decoupled_weight_decay")
    for group in saved["param_groups"]:
        for flag in flags:
            group.pop(flag, None)
    run.optimizer.load_state_dict(saved)
    for flag in flags:
        assert flag in run.optimizer.param_groups[0]
    run.step()


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize(("name", "kwargs"), inputs())
def test_save_load_equality(name, kwargs, weights_only) -> None:
    run = least_squares(name, kwargs)
    for _ in range(3):
        run.step()
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    assert_equal(loaded, run.optimizer.state_dict())
    assert loaded["param_groups"] == run.optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize(("name", "kwargs"), inputs())
def test_load_nontensor_step(name, kwargs) -> None:
    """`test_load_nontensor_step`."""
    run = least_squares(name, kwargs)
    run.step()
    saved = copy.deepcopy(run.optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = state["step"].item()
    run.optimizer.load_state_dict(saved)
    run.step()
    assert float(run.optimizer.state[run.weight]["step"]) == 2


@pytest.mark.parametrize(("name", "kwargs"), inputs())
def test_deepcopy_copies_all_public_attrs(name, kwargs) -> None:
    run = least_squares(name, kwargs)
    for _ in range(3):
        run.step()
    copied = copy.deepcopy(run.optimizer)

    def public(optimizer) -> set[str]:
        return {key for key in dir(optimizer) if not key.startswith("_")}

    assert public(copied) == public(run.optimizer)


@pytest.mark.parametrize("name", DATABASE)
def test_hooks(name) -> None:
    """`test_step_post_hook`, `test_step_pre_hook`, `test_step_all_hooks`, and the six hooks of state dicts."""
    run = least_squares(name, {})
    data = 2

    def pre(optimizer, args, kwargs):
        nonlocal data
        data += 2

    def post(optimizer, args, kwargs):
        nonlocal data
        data *= 10

    handles = [run.optimizer.register_step_pre_hook(pre), run.optimizer.register_step_post_hook(post)]
    run.optimizer.step()
    assert data == 40
    for handle in handles:
        handle.remove()
    run.optimizer.step()
    assert data == 40

    saved = run.optimizer.state_dict()["param_groups"]
    seen = []

    def replaces(optimizer, state_dict):
        seen.append("replaces")
        groups = [{**group, "lr": 2 * group["lr"]} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    def first(optimizer, state_dict):
        seen.append("first")

    handles = [
        run.optimizer.register_load_state_dict_pre_hook(replaces),
        run.optimizer.register_load_state_dict_pre_hook(first, prepend=True),
        run.optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append("post")),
    ]
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert seen == ["first", "replaces", "post"]
    assert run.optimizer.param_groups[0]["lr"] == 2 * saved[0]["lr"]
    for handle in handles:
        handle.remove()
    post_hook = run.optimizer.register_state_dict_post_hook(lambda optimizer, state_dict: {"only": 1})
    assert run.optimizer.state_dict() == {"only": 1}
    post_hook.remove()
    assert "state" in run.optimizer.state_dict()


@pytest.mark.parametrize("name", DATABASE)
def test_hooks_survive_deepcopy_and_pickle_as_with_torch(name) -> None:
    """torch keeps no hooks in `__getstate__`."""
    for how in (copy.deepcopy,):
        found = []
        for cls in (OURS[name], DATABASE[name].optim_cls):
            optimizer = cls([torch.nn.Parameter(torch.ones(2))])
            optimizer.register_step_pre_hook(lambda *a: None)
            found.append(len(how(optimizer)._optimizer_step_pre_hooks))
        assert found[0] == found[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DATABASE)
def test_mixed_device_dtype_groups(name, dtype) -> None:
    """Parameters of several dtypes and sizes in one list, one of them empty."""
    parameters = [
        torch.nn.Parameter(torch.randn(2, 3).to(dtype)),
        torch.nn.Parameter(torch.randn(4)),
        torch.nn.Parameter(torch.empty(0).to(dtype)),
        torch.nn.Parameter(torch.randn(()).to(dtype)),
    ]
    optimizer = OURS[name](parameters)
    for p in parameters:
        p.grad = torch.rand_like(p) + 0.5
    before = [p.detach().clone() for p in parameters]
    for _ in range(10):
        optimizer.step()
    for p, old in zip(parameters, before, strict=True):
        assert bool((p < old).all())


@pytest.mark.parametrize("name", DATABASE)
def test_complex_is_refused(name) -> None:
    """`test_complex` of torch: complex parameters are supported there; here a clear error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"complex64"):
        OURS[name]([p])
