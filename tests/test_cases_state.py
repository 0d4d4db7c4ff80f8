"""The state mapping, and how parameters are bound and followed. Each docstring quotes its case or rule.

Over 500 lines: independent cases in the order of their table, read one at a time.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Mapping

import pytest
import torch

import outboard
from oracle import FLOAT, Oracle, assert_same, decode, encode

BF16, FP16 = torch.bfloat16, torch.float16


def leaf(values: torch.Tensor) -> torch.Tensor:
    return values.detach().clone().requires_grad_()


def stepped(dtype: torch.dtype = FLOAT, numel: int = 50, **options):
    """An optimizer of one parameter after one step, and the oracle of it."""
    p = leaf(torch.randn(numel).to(dtype))
    optimizer = outboard.AdamW([("p", p)], **options)
    oracle = Oracle(p, **{k: v for k, v in options.items() if k in ("lr", "amsgrad", "master")})
    p.grad = torch.randn(numel).to(dtype)
    optimizer.step()
    oracle.step(p.grad)
    return optimizer, p, oracle


# ---- reading


def test_state_is_a_view() -> None:
    """`state` as zero-copy views of the arena."""
    optimizer, p, oracle = stepped(amsgrad=True)
    state = optimizer.state[p]
    tensors = {key: state[key] for key in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    pointers = {key: tensor.data_ptr() for key, tensor in tensors.items()}
    for _ in range(2):
        p.grad = torch.randn(50)
        optimizer.step()
        oracle.step(p.grad)
    for key, tensor in tensors.items():
        assert optimizer.state[p][key] is tensor
        assert tensor.data_ptr() == pointers[key]
    assert_same(tensors["exp_avg"], oracle.exp_avg)
    assert_same(tensors["max_exp_avg_sq"], oracle.max_exp_avg_sq)
    assert float(tensors["step"]) == 3
    # In-place writes are seen by the step.
    tensors["exp_avg"].zero_()
    oracle.exp_avg = torch.zeros(50)
    p.grad = torch.randn(50)
    optimizer.step()
    oracle.step(p.grad)
    oracle.assert_equal(optimizer, p)


def test_state_is_a_mapping_that_tools_know() -> None:
    optimizer, p, _ = stepped(BF16)
    assert isinstance(optimizer.state, dict)
    assert isinstance(optimizer.state[p], dict)
    assert isinstance(optimizer.state[p], Mapping)
    assert list(optimizer.state) == [p]
    assert p in optimizer.state
    assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq", "residual"}
    assert dict(optimizer.state[p].items()).keys() == optimizer.state[p].keys()
    assert optimizer.state.get(p) is optimizer.state[p]
    assert optimizer.state.get(torch.ones(1)) is None
    assert "exp_avg" in optimizer.state[p]
    assert repr(optimizer).startswith("AdamW (")


def test_reading_state_of_a_stranger() -> None:
    """torch's `state` is a defaultdict: reading a foreign key gives an empty dict."""
    optimizer, _, _ = stepped()
    stranger = torch.ones(2)
    assert dict(optimizer.state[stranger]) == {}


# ---- writing


WAYS = {
    "item": lambda optimizer, p, key, value: optimizer.state[p].__setitem__(key, value),
    "update": lambda optimizer, p, key, value: optimizer.state[p].update({key: value}),
    "whole": lambda optimizer, p, key, value: optimizer.state.__setitem__(p, {**optimizer.state[p], key: value}),
    "same type": lambda optimizer, p, key, value: optimizer.state.__setitem__(
        p, type(optimizer.state[p])(OrderedDict({**optimizer.state[p], key: value}))
    ),
    "attribute": lambda optimizer, p, key, value: setattr(
        optimizer, "state", defaultdict(dict, {p: {**optimizer.state[p], key: value}})
    ),
    "__setstate__": lambda optimizer, p, key, value: optimizer.state.update({p: {**optimizer.state[p], key: value}}),
    "copy_": lambda optimizer, p, key, value: optimizer.state[p][key].copy_(value),
}


@pytest.mark.parametrize("kind", [FLOAT, BF16, torch.float64], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_foreign_tensor_is_copied_into_its_plane(way, kind) -> None:
    """A foreign tensor is copied into its plane at assignment, whatever its dtype; the next step uses it."""
    optimizer, p, oracle = stepped(BF16)
    plane = optimizer.state[p]["exp_avg"]
    residual = optimizer.state[p]["residual"].clone()
    value = torch.randn(50).to(kind)
    WAYS[way](optimizer, p, "exp_avg", value)
    assert optimizer.state[p]["exp_avg"].data_ptr() == plane.data_ptr()
    assert optimizer.state[p]["exp_avg"].dtype is FLOAT
    assert_same(plane, value.to(FLOAT))
    assert_same(optimizer.state[p]["residual"], residual)
    assert float(optimizer.state[p]["step"]) == 1
    oracle.exp_avg = value.to(FLOAT).clone()
    value.zero_()
    p.grad = torch.randn(50).to(BF16)
    optimizer.step()
    oracle.step(p.grad)
    oracle.assert_equal(optimizer, p)


def test_lightning_moves_state() -> None:
    """Lightning assigns `v[key]` on the device and moves back at teardown."""
    optimizer, p, oracle = stepped(BF16)
    for parameter, state in list(optimizer.state.items()):
        optimizer.state[parameter] = type(state)({key: value.clone() for key, value in state.items()})
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.to("cpu", copy=True)
    oracle.assert_equal(optimizer, p)
    p.grad = torch.randn(50).to(BF16)
    optimizer.step()
    oracle.step(p.grad)
    oracle.assert_equal(optimizer, p)


def test_zero_writes_state_before_the_first_step() -> None:
    """ZeRO writes `opt.state[p]`."""
    p = leaf(torch.randn(50))
    optimizer, oracle = outboard.AdamW([p]), Oracle(p)
    oracle.exp_avg, oracle.exp_avg_sq, oracle.step_count = torch.randn(50), torch.rand(50), 4
    optimizer.state[p] = {
        "step": torch.tensor(4.0),
        "exp_avg": oracle.exp_avg.clone(),
        "exp_avg_sq": oracle.exp_avg_sq.clone(),
    }
    p.grad = torch.randn(50)
    optimizer.step()
    oracle.step(p.grad)
    oracle.assert_equal(optimizer, p)


@pytest.mark.parametrize("master", ["split", "full"])
def test_assigned_master_and_residual_of_the_other_kind(master) -> None:
    """What a checkpoint of the other kind of master holds is not lost when a tool assigns it to `opt.state[p]`."""
    optimizer, p, _ = stepped(BF16, master=master, lr=0.1)
    wanted = decode(p.detach(), torch.randint(-9999, 9999, (50,), dtype=torch.int16))
    assert_same(encode(wanted)[0], p.detach())
    state = {key: value.clone() for key, value in optimizer.state[p].items() if key not in ("residual", "master")}
    if master == "split":
        state["master"] = wanted.clone()
    else:
        state["residual"] = encode(wanted)[1]
    optimizer.state[p] = state
    assert_same(optimizer.master(p), wanted)
    own, other = ("residual", "master") if master == "split" else ("master", "residual")
    saved = optimizer.state_dict()["state"][0]
    assert own in saved
    assert other not in saved, "two truths in one checkpoint"


@pytest.mark.parametrize("how", ["dict item", "data"])
def test_state_tensors_replaced_behind_our_back(how) -> None:
    """`step()` also compares identities: a tensor put in a plane's place behind the mapping's back is copied too."""
    for look in ("step", "state_dict"):
        optimizer, p, oracle = stepped()
        new = torch.randn(50)
        if how == "dict item":
            dict.__setitem__(optimizer.state[p], "exp_avg", new.clone())
        else:
            optimizer.state[p]["exp_avg"].data = new.clone()
        oracle.exp_avg = new
        if look == "state_dict":
            saved = optimizer.state_dict()["state"][0]["exp_avg"]
            assert_same(saved, new)
        p.grad = torch.randn(50)
        optimizer.step()
        oracle.step(p.grad)
        oracle.assert_equal(optimizer, p, look)
        assert_same(optimizer.state_dict()["state"][0]["exp_avg"], oracle.exp_avg)


@pytest.mark.parametrize("how", ["dict item", "data"])
def test_state_tensors_exchanged_behind_our_back(how) -> None:
    """Of two parameters: neither is written before both have been read."""
    params = [leaf(torch.ones(50)) for _ in range(2)]
    optimizer = outboard.AdamW(params)
    for p in params:
        p.grad = torch.randn(50)
    optimizer.step()
    states = [optimizer.state[p] for p in params]
    tensors = [state["exp_avg"] for state in states]
    wanted = [tensor.clone() for tensor in reversed(tensors)]
    if how == "dict item":
        for state, tensor in zip(states, reversed(tensors), strict=True):
            dict.__setitem__(state, "exp_avg", tensor)
    else:
        tensors[0].data, tensors[1].data = tensors[1].data, tensors[0].data
    saved = optimizer.state_dict()["state"]
    for number in range(2):
        assert_same(saved[number]["exp_avg"], wanted[number])


def test_user_keys() -> None:
    optimizer, p, oracle = stepped()
    state = optimizer.state[p]
    state["note"] = 1
    state.setdefault("other", []).append(2)
    assert state.setdefault("note", 5) == 1
    assert state["note"] == 1
    assert state.pop("note") == 1
    assert state.pop("note", None) is None
    with pytest.raises(KeyError):
        state.pop("note")
    with pytest.raises(KeyError):
        state["nothing"]
    oracle.assert_equal(optimizer, p)


RESETS = {
    "del": lambda optimizer, p: optimizer.state.__delitem__(p),
    "clear": lambda optimizer, p: optimizer.state.clear(),
    "pop": lambda optimizer, p: optimizer.state.pop(p),
    "clear one": lambda optimizer, p: optimizer.state[p].clear(),
    "empty": lambda optimizer, p: optimizer.state.__setitem__(p, {}),
    "attribute": lambda optimizer, p: setattr(optimizer, "state", defaultdict(dict)),
    "reset": lambda optimizer, p: optimizer.reset(p),
}


@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
@pytest.mark.parametrize("way", RESETS)
def test_state_taken_away_starts_again(way, dtype) -> None:
    """`optimizer.state = defaultdict(dict)` and the like, as users reset torch's optimizers."""
    optimizer, p, _ = stepped(dtype)
    RESETS[way](optimizer, p)
    weight = p.detach().clone()
    assert_same(optimizer.master(p), weight.float())
    oracle = Oracle(weight)
    for _ in range(2):
        p.grad = torch.randn(50).to(dtype)
        optimizer.step()
        oracle.step(p.grad)
        oracle.assert_equal(optimizer, p)


def test_popped_state_is_a_copy() -> None:
    optimizer, p, oracle = stepped()
    popped = optimizer.state.pop(p)
    assert_same(popped["exp_avg"], oracle.exp_avg)
    optimizer.step()
    assert_same(popped["exp_avg"], oracle.exp_avg)


# ---- binding


def test_params_replaced_before_the_first_use() -> None:
    """accelerate's FSDP2 rewrites `param_group["params"]` in place."""
    old = [leaf(torch.randn(5)) for _ in range(3)]
    optimizer = outboard.AdamW(old)
    new = [leaf(torch.randn(7)) for _ in range(3)]
    optimizer.param_groups[0]["params"][:] = new
    oracles = [Oracle(p) for p in new]
    for p, oracle in zip(new, oracles, strict=True):
        p.grad = torch.randn(7)
        oracle.step(p.grad)
    optimizer.step()
    for p, oracle in zip(new, oracles, strict=True):
        oracle.assert_equal(optimizer, p)
    assert set(optimizer.state_dict()["state"]) == {0, 1, 2}
    assert optimizer.stats()["parameters"] == 3


def test_params_replaced_after_steps() -> None:
    """`load_state_dict(assign=True)` makes new objects: those that are listed then are trained, from zero state."""
    model = torch.nn.Linear(4, 3)
    optimizer = outboard.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    model.load_state_dict({"weight": torch.randn(3, 4), "bias": torch.randn(3)}, assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    oracle = Oracle(model.weight)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    oracle.step(model.weight.grad)
    oracle.assert_equal(optimizer, model.weight)
    assert set(optimizer.state_dict()["state"]) == {0, 1}
    assert_same(optimizer.state_dict()["state"][0]["exp_avg"], oracle.exp_avg)


def test_a_parameter_taken_out_and_put_back() -> None:
    """A parameter that is not listed is not stepped; torch keeps its state until it is listed again."""
    optimizer, p, oracle = stepped()
    q = leaf(torch.randn(3))
    optimizer.param_groups[0]["params"] = [q]
    optimizer.param_groups[0].pop("param_names", None)
    q.grad, p.grad = torch.ones(3), torch.ones(50)
    optimizer.step()
    assert_same(p, oracle.weight)
    assert set(optimizer.state_dict()["state"]) == {0}
    optimizer.param_groups[0]["params"] = [q, p]
    optimizer.step()
    oracle.step(p.grad)
    oracle.assert_equal(optimizer, p)


def test_dtype_changed_before_the_first_use() -> None:
    """`.to(bf16)` keeps the object and changes its memory."""
    model = torch.nn.Linear(40, 30)
    optimizer = outboard.AdamW(model.parameters())
    assert optimizer.state_dict()["state"] == {}
    model.to(BF16)
    oracle = Oracle(model.weight)
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(BF16)
    optimizer.step()
    oracle.step(model.weight.grad)
    oracle.assert_equal(optimizer, model.weight)


@pytest.mark.parametrize(("old", "new"), [(FLOAT, BF16), (BF16, FLOAT), (BF16, FP16), (FLOAT, torch.float64)], ids=str)
def test_a_dtype_change_raises_with_the_name(old, new) -> None:
    """A dtype change raises with the name."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to(old)
    optimizer = outboard.AdamW(model.named_parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    model[1].to(new)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(TypeError, match=rf"1\.weight.*{old}.*{new}|1\.weight.*{new}"):
        optimizer.step()
    for key, value in model.state_dict().items():
        assert_same(value, before[key])
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_moved_memory_is_followed() -> None:
    """Each step compares the pointer: a move rebinds."""
    optimizer, p, oracle = stepped(BF16)
    for _ in range(3):
        p.data = p.data.clone()
        p.grad = torch.randn(50).to(BF16)
        optimizer.step()
        oracle.step(p.grad)
        oracle.assert_equal(optimizer, p)
    old = p.data
    p.data = torch.randn(50).to(BF16)
    oracle.weight = p.detach().clone()
    untouched = old.clone()
    optimizer.step()
    oracle.step(p.grad)
    oracle.assert_equal(optimizer, p)
    assert_same(old, untouched, "the memory it has left")


def test_a_shape_change_raises_with_the_name() -> None:
    optimizer, p, _ = stepped()
    p.grad = None
    p.data = torch.ones(60)
    p.grad = torch.ones(60)
    with pytest.raises(ValueError, match=r"p: .*50.*60"):
        optimizer.step()
    assert_same(p, torch.ones(60))


def test_a_gradient_of_another_shape() -> None:
    """torch forbids it, `.data` does not."""
    good, bad = leaf(torch.ones(3)), leaf(torch.ones(4, 2))
    bad.grad = torch.ones(4, 2)
    bad.grad.data = torch.ones(2, 4)
    good.grad = torch.ones(3)
    optimizer = outboard.AdamW([("good", good), ("bad", bad)])
    with pytest.raises(ValueError, match="gradient of bad"):
        optimizer.step()
    assert_same(good, torch.ones(3))


def test_moved_onto_another_parameter_is_refused() -> None:
    """Parameters whose memory overlaps are refused by name, also when they come to overlap later."""
    p, q = leaf(torch.ones(10)), leaf(torch.ones(10))
    optimizer = outboard.AdamW([("one", p), ("two", q)])
    p.grad, q.grad = torch.ones(10), torch.ones(10)
    optimizer.step()
    q.data = p.data
    before = p.detach().clone()
    with pytest.raises(ValueError, match="one and two share memory"):
        optimizer.step()
    assert_same(p, before)
    q.data = torch.ones(10)
    optimizer.step()


def test_expanded_later_is_refused() -> None:
    optimizer, p, _ = stepped()
    p.data = torch.ones(1).expand(50)
    with pytest.raises(ValueError, match=r"p: .*share memory"):
        optimizer.step()


def test_memory_reused_by_another_parameter() -> None:
    """Memory that one parameter has left may be another's."""
    p, q = leaf(torch.ones(1000)), leaf(torch.ones(1000))
    optimizer = outboard.AdamW([p, q])
    p.grad, q.grad = torch.ones(1000), torch.ones(1000)
    optimizer.step()
    p.data, q.data = q.data, p.data
    optimizer.step()
    assert_same(p, q)
    late = leaf(torch.ones(5))
    p.data, old = torch.ones(1000), p.data
    late.data = old[:5]
    late.grad = torch.ones(5)
    optimizer.add_param_group({"params": [late]})
    optimizer.step()


@pytest.mark.parametrize("kind", ["lazy", "meta", "negated", "sparse", "mkldnn"])
def test_parameters_without_usable_memory(kind) -> None:
    if kind == "lazy":
        module = torch.nn.LazyLinear(3)
        with pytest.raises(ValueError, match=r"weight.*not initialised"):
            outboard.AdamW(module.named_parameters())
        return
    if kind == "meta":
        p = torch.nn.Parameter(torch.ones(3, device="meta"))
        p.grad = torch.ones(3, device="meta")
    elif kind == "sparse":
        p = torch.ones(3, 3).to_sparse().requires_grad_()
        p.grad = torch.ones(3, 3).to_sparse()
    elif kind == "mkldnn":
        if not torch.backends.mkldnn.is_available():
            pytest.skip("torch.backends.mkldnn.is_available() is False")
        p = torch.ones(3, 3).to_mkldnn().requires_grad_()
        p.grad = torch.ones(3, 3).to_mkldnn()
    else:
        p = torch.ones(3, dtype=torch.complex64).conj().imag.detach().requires_grad_()
        assert p.is_neg()
        p.grad = torch.ones(3)
    with pytest.raises((outboard.DeviceError, TypeError), match=r"layer\.p"):
        outboard.AdamW([("layer.p", p)]).step()


def test_a_negated_gradient() -> None:
    """Lazy negation is a bit on the tensor: it must not be lost."""
    p = leaf(torch.ones(3))
    p.grad = torch.complex(torch.zeros(3), torch.tensor([1.0, -2.0, 3.0])).conj().imag
    assert p.grad.is_neg()
    optimizer, oracle = outboard.AdamW([("layer.p", p)]), Oracle(p)
    with pytest.raises(TypeError, match=r"gradient of layer\.p.*resolve_neg"):
        optimizer.step()
    assert_same(p, torch.ones(3))
    p.grad = p.grad.resolve_neg()
    optimizer.step()
    oracle.step(torch.tensor([-1.0, 2.0, -3.0]))
    oracle.assert_equal(optimizer, p)


def test_subclasses_of_parameter() -> None:
    class Special(torch.nn.Parameter):
        pass

    p = Special(torch.randn(5))
    optimizer, oracle = outboard.AdamW([p]), Oracle(p.data)
    p.grad = torch.randn(5)
    optimizer.step()
    oracle.step(p.grad)
    assert_same(p.data, oracle.weight)

    # What has no memory of its own is refused by name.
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(str(func))

    wrapped = Wrapper(torch.ones(3))
    optimizer = outboard.AdamW([("wrapped", wrapped)])
    with pytest.raises(TypeError, match=r"wrapped.*Wrapper"):
        optimizer.state[wrapped]


def test_weights_in_shared_and_mapped_memory(tmp_path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(400))
    for p in (torch.randn(100).share_memory_(), torch.from_file(str(path), shared=True, size=100)):
        p = p.requires_grad_()
        optimizer, oracle = outboard.AdamW([p]), Oracle(p)
        p.grad = torch.randn(100)
        optimizer.step()
        oracle.step(p.grad)
        oracle.assert_equal(optimizer, p)
    assert path.read_bytes() != bytes(400)


def test_misaligned_memory_is_refused() -> None:
    """FSDP2's gradients arrive at 12-byte offsets, which is fine; a frombuffer tensor can be at any byte."""
    raw = bytearray(4 * 100 + 1)
    p = torch.frombuffer(memoryview(raw)[1:], dtype=FLOAT).requires_grad_()
    p.grad = torch.ones(100)
    with pytest.raises(ValueError, match=r"odd.*aligned"):
        outboard.AdamW([("odd", p)]).step()
    assert not any(raw)
    q = leaf(torch.ones(50))
    optimizer, oracle = outboard.AdamW([q]), Oracle(q)
    q.grad = torch.randn(53)[3:]
    assert q.grad.data_ptr() % 16 == 12
    optimizer.step()
    oracle.step(q.grad)
    oracle.assert_equal(optimizer, q)


@pytest.mark.parametrize("what", ["weight", "gradient", "master", "state"])
def test_freed_storage_is_refused(what, python) -> None:
    """FSDP1 and some offloaders free storages; torch's kernels raise then. In a process of its own: it crashed once."""
    program = """
        import sys
        import outboard, torch
        p = torch.ones(5000, requires_grad=True)
        p.grad = torch.ones(5000)
        optimizer = outboard.AdamW([("layer.p", p)])
        what = sys.argv[1]
        if what != "state":
            optimizer.step()
        (p.grad if what == "gradient" else p).untyped_storage().resize_(0)
        try:
            if what == "master":
                optimizer.master(p)
            elif what == "state":
                print("layer.p", optimizer.state[p].keys())  # needs no weights
                optimizer.step()
            else:
                optimizer.step()
        except (ValueError, RuntimeError) as error:
            print(error)
            sys.exit(7)
    """
    assert "layer.p" in python(program, what, expect=7)


def test_memory_that_is_used_twice() -> None:
    """Weight, gradient and state of one step must not share memory: torch's order of updates would decide."""
    p, q = leaf(torch.ones(50)), leaf(torch.ones(50))
    optimizer = outboard.AdamW([("one", p), ("two", q)])
    p.grad, q.grad = torch.ones(50), torch.ones(50)
    optimizer.step()
    weights = [p.detach().clone(), q.detach().clone()]
    for break_it in (
        lambda: setattr(p, "grad", p.detach()),
        lambda: setattr(p, "grad", q.detach()),
        lambda: setattr(p, "grad", optimizer.state[q]["exp_avg"]),
    ):
        break_it()
        with pytest.raises(ValueError, match=r"one|two"):
            optimizer.step()
        for x, weight in zip((p, q), weights, strict=True):
            assert_same(x, weight)
    # A gradient that two share is only read, so it may be shared.
    p.grad = q.grad = torch.full((50,), 2.0)
    optimizer.step()
    assert_same(p, q)
    # With a scale it is written.
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    with pytest.raises(ValueError, match=r"gradient of .*one.*gradient of .*two|two.*one"):
        optimizer.step()
    assert bool((p.grad == 2).all())
    p.grad, q.grad = torch.tensor(2.0).expand(50), None
    with pytest.raises(ValueError, match="gradient of one"):
        optimizer.step()


def test_default_device() -> None:
    """Under `torch.device("meta")`, as models are built lazily, nothing of ours lands on it."""
    with torch.device("meta"):
        for dtype in (FLOAT, BF16, FP16):
            p = torch.ones(50, dtype=dtype, device="cpu", requires_grad=True)
            p.grad = torch.ones(50, dtype=dtype, device="cpu")
            optimizer = outboard.AdamW([p], max_grad_norm=1.0)
            optimizer.step()
            again = outboard.AdamW([p])
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            again.load_master(p, optimizer.master(p))
            again.step()
            assert {t.device.type for t in again.state[p].values()} == {"cpu"}
            assert float(again.state[p]["step"]) == 2


# ---- versions and autograd


def test_a_stale_backward_fails() -> None:
    """Updates bump the autograd version of the weight, so a stale backward fails as it does in torch."""
    p = leaf(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    optimizer = outboard.AdamW([p])
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_versions_of_what_was_not_updated_stay() -> None:
    p, q = leaf(torch.ones(3)), leaf(torch.ones(3))
    optimizer = outboard.AdamW([p, q], nonfinite="skip")
    p.grad = torch.ones(3)
    before = p._version, q._version
    optimizer.step()
    assert p._version > before[0]
    assert q._version == before[1]
    before = p._version
    p.grad = torch.full((3,), float("nan"))
    with pytest.warns(RuntimeWarning, match="changed nothing"):
        optimizer.step()
    assert p._version == before


def test_modes() -> None:
    """A step in `no_grad`, in `inference_mode`, and with gradients enabled."""
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        optimizer, p, oracle = stepped()
        p.grad = torch.randn(50)
        with mode():
            optimizer.step()
        oracle.step(p.grad)
        oracle.assert_equal(optimizer, p, mode.__name__)
        assert p.requires_grad
    with torch.inference_mode():
        q = torch.ones(3)
        q.grad = torch.ones(3)
        outboard.AdamW([q]).step()
        assert bool((q < 1).all())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch.compile's own
def test_compiled_training_step() -> None:
    """A compiled function may hold the whole training step, optimizer and all, as with torch's optimizers."""
    found = []
    for make in (outboard.AdamW, lambda parameters: torch.optim.AdamW(parameters, fused=True)):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = torch.nn.Linear(16, 16)
        optimizer = make(model.parameters())

        def train(x, model=model, optimizer=optimizer):
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        compiled = torch.compile(train, backend="eager")
        for _ in range(3):
            compiled(torch.ones(2, 16))
        found.append((model.weight, model.bias))
        assert float(optimizer.state[model.weight]["step"]) == 3
    for p, q in zip(*found, strict=True):
        assert_same(p, q)


def test_steps_in_backward() -> None:
    """One optimizer per parameter, stepped in its post-accumulate hook, as memory-saving recipes do."""
    found = []
    for make in (outboard.AdamW, lambda parameters: torch.optim.AdamW(parameters, fused=True)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
        optimizers = {p: make([p]) for p in model.parameters()}

        def hook(p, optimizers=optimizers) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        for _ in range(4):
            model(torch.ones(3, 16)).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        found.append(list(model.parameters()))
    for p, q in zip(*found, strict=True):
        assert_same(p, q)


def test_swapped_tensors() -> None:
    """`load_state_dict` under `set_swap_module_params_on_conversion`: the same object with another inside."""
    model = torch.nn.Linear(16, 4)
    optimizer, oracle = outboard.AdamW(model.parameters()), Oracle(model.weight)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for step in range(4):
            if step == 2:
                optimizer.zero_grad()
                weight = torch.randn(4, 16)
                model.load_state_dict({"weight": weight, "bias": torch.randn(4)})
                assert_same(model.weight, weight)
                oracle.weight = weight.clone()
            for p in model.parameters():
                p.grad = torch.randn(p.shape)
            optimizer.step()
            oracle.step(model.weight.grad)
            oracle.assert_equal(optimizer, model.weight, f"step {step}")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_gradients_are_left_alone() -> None:
    """The gradient stays as it is, `grad.requires_grad` and all."""
    p = leaf(torch.ones(3))
    (grad,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
    p.grad = grad
    values = grad.detach().clone()
    optimizer = outboard.AdamW([p], max_grad_norm=0.1)
    optimizer.step()
    assert p.grad is grad
    assert_same(grad.detach(), values)
    assert p.is_leaf
    assert p.requires_grad
    assert grad.requires_grad


def test_zero_grad() -> None:
    optimizer, p, _ = stepped()
    optimizer.zero_grad(set_to_none=False)
    assert not p.grad.any()
    optimizer.zero_grad()
    assert p.grad is None


# ---- lifetime


def test_optimizers_and_parameters_are_freed() -> None:
    """Dropping an optimizer frees it and its parameters without a garbage collection."""
    gc.disable()
    try:
        p = leaf(torch.ones(10))
        optimizer = outboard.AdamW([p])
        p.grad = torch.ones(10)
        optimizer.step()
        assert len(optimizer.state[p]) == 3
        optimizer.state_dict()
        gone = weakref.ref(optimizer), weakref.ref(p)
        del optimizer, p
        assert gone[0]() is None, "the optimizer is in a cycle"
        assert gone[1]() is None, "the parameter is kept alive"
    finally:
        gc.enable()


def test_a_dropped_parameters_address_is_not_mistaken() -> None:
    """Slots are found by object: one that is gone must not lend its state to another at the same address."""
    p = leaf(torch.ones(4))
    optimizer = outboard.AdamW([p])
    p.grad = torch.ones(4)
    optimizer.step()
    for _ in range(20):
        optimizer.param_groups[0]["params"].clear()
        del p
        p = leaf(torch.ones(4))
        optimizer.param_groups[0]["params"].append(p)
        oracle = Oracle(p)
        p.grad = torch.full((4,), 0.5)
        optimizer.step()
        oracle.step(p.grad)
        oracle.assert_equal(optimizer, p)
