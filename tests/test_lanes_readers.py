"""Whoever reads a weight while its update is under way sees the updated one; whoever writes it comes after.

The updates are held back by a large parameter that the lanes take first. Each test looks that what it reads is pending
before, and that the old weights would have given another result.

Over 500 lines: independent cases, read one at a time.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import outboard
from lanes import TwinModel, is_pending, plain_grad, set_grad
from oracle import assert_same, same_bits

# A test that hangs does so in native code, where a signal does not reach it.
pytestmark = pytest.mark.timeout(60, method="thread")

WIDTH = 32


class Zoo(torch.nn.Module):
    """Weights that are read in every way. The ballast comes first and keeps all others waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = torch.nn.Parameter(torch.randn(600_000))
        self.child = torch.nn.Linear(WIDTH, WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 4)
        self.list = torch.nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(3)])
        self.dict = torch.nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(WIDTH)})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.normed = torch.nn.utils.weight_norm(torch.nn.Linear(WIDTH, WIDTH))
        self.parametrized = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(WIDTH, WIDTH))
        self.spectral = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(WIDTH, WIDTH))
        self.gru = torch.nn.GRU(WIDTH, WIDTH)
        self.embedding = torch.nn.Embedding(20, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.scalar = torch.nn.Parameter(torch.tensor(0.5))
        self.low = torch.nn.Parameter(torch.randn(WIDTH, WIDTH).to(torch.bfloat16))

    @property
    def x(self) -> torch.Tensor:
        return torch.linspace(-1, 1, 3 * WIDTH, device=self.ballast.device).view(3, 1, WIDTH)


class Rig:
    """A zoo with an update under way, its twin that has had it, and what it was."""

    def __init__(self, lanes_device: Any) -> None:
        # Equal ones: torch does not copy those with the old weight_norm.
        self.zoo, self.old, equal = (seeded().to(lanes_device.device) for _ in range(3))
        self.twin = TwinModel(self.zoo, equal=equal, lr=0.05)
        self.opt = outboard.AdamW(self.zoo.parameters(), lr=0.05, threads=1, chunk_elems=2_000).attach(self.zoo)

    def host(self, name: str) -> torch.Tensor:
        """Return the twin's copy of a parameter in host memory."""
        return dict(zip(dict(self.zoo.named_parameters()), self.twin.twin.params, strict=True))[name]

    def step(self) -> None:
        grads = [torch.randn_like(p) for p in self.zoo.parameters()]
        for p, grad in zip(self.zoo.parameters(), grads, strict=True):
            set_grad(p, grad)
        self.twin.twin.step(grads)
        self.twin.copy_back()
        self.opt.step()
        assert all(is_pending(p) for p in self.zoo.parameters())


def seeded() -> Zoo:
    torch.manual_seed(5)
    return Zoo()


@pytest.fixture
def rig(lanes_device: Any) -> Rig:
    return Rig(lanes_device)


def numbers(value: Any) -> list[torch.Tensor]:
    """Return all tensors of a result, to compare."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in numbers(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in numbers(item)]
    if isinstance(value, (int, float)):
        return [torch.tensor(float(value))]
    assert isinstance(value, str), type(value)
    return [torch.tensor(list(value.encode()), dtype=torch.float32)]


def saved(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def averaged(zoo: Zoo) -> Any:
    average = torch.optim.swa_utils.AveragedModel(
        torch.nn.Linear(WIDTH, WIDTH).to(zoo.ballast.device),
        multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5),
    )
    with torch.no_grad():
        for p in average.parameters():
            p.fill_(1)
    average.update_parameters(zoo.child)
    average.update_parameters(zoo.child)
    return list(average.parameters())


def out_argument(zoo: Zoo) -> torch.Tensor:
    out = torch.zeros(WIDTH, device=zoo.ballast.device)
    with torch.no_grad():
        torch.add(zoo.dict["a"], 1, out=out)
    return out


def in_a_thread(zoo: Zoo) -> torch.Tensor:
    result: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: result.append(zoo.child.weight.detach().clone()))
    thread.start()
    thread.join()
    return result[0]


def functional(zoo: Zoo) -> Any:
    weights = {name: p.detach() for name, p in zoo.child.named_parameters()}
    return torch.func.grad(lambda w: torch.func.functional_call(zoo.child, w, (zoo.x,)).sin().sum())(weights)


def functional_of_weights(zoo: Zoo) -> Any:
    weights = dict(zoo.child.named_parameters())
    return torch.func.grad(lambda w: torch.func.functional_call(zoo.child, w, (zoo.x,)).sin().sum())(weights)


def vector_of(zoo: Zoo) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(p for name, p in zoo.named_parameters() if name != "low")


READERS: dict[str, Callable[[Zoo], Any]] = {
    # modules' forwards
    "forward": lambda zoo: zoo.child(zoo.x),
    "attention": lambda zoo: zoo.attention(zoo.x, zoo.x, zoo.x)[0],
    "attention's out_proj alone": lambda zoo: F.linear(zoo.x, zoo.attention.out_proj.weight),
    "old weight_norm": lambda zoo: zoo.normed(zoo.x),
    "parametrized weight_norm": lambda zoo: zoo.parametrized(zoo.x),
    "parametrized weight": lambda zoo: zoo.parametrized.weight,
    "gru": lambda zoo: zoo.gru(zoo.x)[0],
    "embedding": lambda zoo: zoo.embedding(torch.arange(20, device=zoo.ballast.device)),
    "tied head": lambda zoo: zoo.head(zoo.x),
    # others' weights
    "child.weight": lambda zoo: F.linear(zoo.x, zoo.child.weight, zoo.child.bias),
    "keyword": lambda zoo: F.linear(input=zoo.x, weight=zoo.child.weight),
    "operator": lambda zoo: zoo.x @ zoo.child.weight,
    "right operator": lambda zoo: 2.0 * zoo.child.weight - 1.0,
    "list": lambda zoo: sum(p.sum() for p in zoo.list),
    "list item": lambda zoo: zoo.x @ zoo.list[1],
    "dict": lambda zoo: [p * 2 for p in zoo.dict.values()],
    "stack": lambda zoo: torch.stack(list(zoo.list)),
    "cat": lambda zoo: torch.cat([p.flatten() for p in zoo.list] + [zoo.dict["b"]]),
    "einsum": lambda zoo: torch.einsum("ij,jk,kl->il", *zoo.list),
    "foreach": lambda zoo: torch._foreach_mul(list(zoo.list), 2.0),
    "index": lambda zoo: zoo.child.weight[3:7, ::2],
    "index by weight": lambda zoo: zoo.x[0, 0][(zoo.dict["a"] * 1e4).long() % WIDTH],
    "iteration": lambda zoo: [row.sum() for row in zoo.child.weight],
    "out=": out_argument,
    "where": lambda zoo: torch.where(zoo.dict["a"] > 0, zoo.dict["a"], zoo.dict["b"]),
    # values
    "data": lambda zoo: zoo.child.weight.data,
    "detach": lambda zoo: zoo.child.weight.detach(),
    "clone": lambda zoo: zoo.child.weight.clone(),
    "view": lambda zoo: zoo.child.weight.view(-1),
    "T": lambda zoo: zoo.child.weight.T,
    "mT": lambda zoo: zoo.child.weight.mT,
    "float": lambda zoo: zoo.low.float(),
    "to": lambda zoo: zoo.child.weight.to(torch.float64),
    "cpu": lambda zoo: zoo.child.weight.cpu(),
    "item": lambda zoo: zoo.scalar.item(),
    "float()": lambda zoo: float(zoo.scalar.detach()),
    "complex()": lambda zoo: complex(zoo.scalar.detach()).real,
    "tolist": lambda zoo: zoo.dict["a"].tolist(),
    "repr": lambda zoo: repr(zoo.dict["a"]),
    "str": lambda zoo: f"{zoo.scalar}",
    "numpy": lambda zoo: torch.as_tensor(zoo.dict["a"].detach().cpu().numpy().copy()),
    "equal": lambda zoo: float(torch.equal(zoo.dict["a"], zoo.dict["a"])) + zoo.scalar.item(),
    "bool": lambda zoo: float(bool(zoo.scalar > 0)) + zoo.scalar.item(),
    "norm of weights": lambda zoo: sum(p.float().norm() for p in zoo.parameters()),
    "grad of a loss on weights": lambda zoo: torch.autograd.grad(zoo.child.weight.pow(3).sum(), zoo.child.weight),
    "storage": lambda zoo: torch.tensor(zoo.scalar.untyped_storage().tolist(), dtype=torch.float32),
    "view of another dtype": lambda zoo: zoo.child.weight.detach().view(torch.int32).float(),
    # whole models
    "parameters_to_vector": vector_of,
    "AveragedModel": averaged,
    "state_dict": lambda zoo: zoo.state_dict(),
    "state_dict of a child": lambda zoo: zoo.attention.state_dict(keep_vars=True),
    "torch.save of a state_dict": lambda zoo: saved(zoo.state_dict()),
    "torch.save of a parameter": lambda zoo: saved(zoo.child.weight),
    "deepcopy": lambda zoo: list(copy.deepcopy(zoo.list).parameters()),
    "deepcopy of a parameter": lambda zoo: copy.deepcopy(zoo.child.weight),
    "copy of a parameter": lambda zoo: copy.copy(zoo.child.weight),
    "pickle": lambda zoo: list(pickle.loads(pickle.dumps(zoo.list)).parameters()),
    "load_state_dict into another": lambda zoo: loaded_from(zoo),
    "copy_ into another": lambda zoo: torch.empty_like(zoo.child.weight).copy_(zoo.child.weight),
    "clip of weights": lambda zoo: torch.nn.utils.get_total_norm(list(zoo.list)),
    "functional_call": functional,
    "thread": in_a_thread,
    "functional_call of the weights themselves": functional_of_weights,
}
#: Readers in C++, which see no class: these need `opt.wait()` first.
UNSEEN: dict[str, Callable[[Zoo], Any]] = {
    "vmap": lambda zoo: torch.vmap(lambda row: row.sin())(zoo.child.weight),
    "torch.func.grad": lambda zoo: torch.func.grad(lambda w: w.sin().sum())(zoo.child.weight),
    "vmap of attributes": lambda zoo: torch.vmap(lambda x: zoo.child.weight @ x)(zoo.x[:, 0]),
    "from_dlpack": lambda zoo: torch.from_dlpack(zoo.child.weight.requires_grad_(False)).clone(),
}


def loaded_from(zoo: Zoo) -> Any:
    other = torch.nn.Linear(WIDTH, WIDTH).to(zoo.ballast.device)
    other.load_state_dict(zoo.child.state_dict())
    return list(other.parameters())


@pytest.mark.parametrize("reader", READERS)
def test_readers(rig, reader) -> None:
    read = READERS[reader]
    rig.step()
    got = numbers(read(rig.zoo))
    wanted = numbers(read(rig.twin.model))
    old = numbers(read(rig.old))
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert_same(a.cpu(), b.cpu(), reader)
    assert not all(same_bits(a, b) for a, b in zip(got, old, strict=False)), "the old weights give the same"


@pytest.mark.parametrize("reader", UNSEEN)
def test_readers_in_cpp_after_wait(rig, reader) -> None:
    read = UNSEEN[reader]
    rig.step()
    rig.opt.wait(rig.zoo.child.weight)
    for a, b in zip(numbers(read(rig.zoo)), numbers(read(rig.twin.model)), strict=True):
        assert_same(a.cpu(), b.cpu(), reader)


@pytest.mark.parametrize("reader", ["deepcopy of the model", "pickle of the model", "torch.save of the model"])
def test_readers_of_everything(rig, reader) -> None:
    # torch does not copy models with the old weight_norm.
    for name in ("normed",) if reader.startswith("deepcopy") else ("normed", "parametrized", "spectral"):
        delattr(rig.zoo, name)
    rig.twin = TwinModel(rig.zoo, lr=0.05)
    rig.opt = outboard.AdamW(rig.zoo.parameters(), lr=0.05, threads=1, chunk_elems=2_000).attach(rig.zoo)
    rig.step()
    how = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved}
    copied = how[reader.split()[0]](rig.zoo)
    for (name, p), q in zip(copied.named_parameters(), rig.twin.model.parameters(), strict=True):
        assert_same(p.detach(), q.detach(), name)
        assert type(p) is torch.nn.Parameter
    rig.twin.check(rig.opt)


def test_evaluation(rig) -> None:
    """torch's fast path in C++ reads weights of modules that are not called."""
    del rig.zoo.normed
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, dropout=0.0).to(rig.zoo.ballast.device)
    model = torch.nn.ModuleList([rig.zoo, layer])
    twin = TwinModel(model, lr=0.05)
    opt = outboard.AdamW(model.parameters(), lr=0.05, threads=1, chunk_elems=2_000).attach(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    twin.twin.step()
    twin.copy_back()
    opt.step()
    x = torch.randn(2, 5, WIDTH, device=rig.zoo.ballast.device)
    assert all(is_pending(p) for p in layer.parameters())
    with torch.no_grad():
        old = copy.deepcopy(layer)  # no longer pending
        del old
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    for p in rig.zoo.parameters():
        p.grad = torch.ones_like(p)
    twin.twin.step()
    twin.copy_back()
    before = layer.linear2.weight.detach().clone()
    opt.step()
    assert all(is_pending(p) for p in layer.parameters())
    layer.eval()
    twin.model[1].eval()
    with torch.inference_mode():
        got, wanted = layer(x), twin.model[1](x)
    # The fast path is not taken for a subclass, and has other bits.
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.equal(before, layer.linear2.weight)
    twin.check(opt)


@pytest.mark.parametrize("reader", ["state", "state_dict", "master", "pickle", "deepcopy", "torch.save"])
def test_readers_of_the_optimizer(rig, reader) -> None:
    rig.step()
    p, q = rig.zoo.low, rig.host("low")
    opt, twin = rig.opt, rig.twin.optimizer
    if reader == "state":
        got, wanted = opt.state[p], twin.state[q]
    elif reader == "state_dict":
        number = next(i for i, r in enumerate(rig.zoo.parameters()) if r is p)
        got, wanted = opt.state_dict()["state"][number], twin.state_dict()["state"][number]
    elif reader == "master":
        got, wanted = {"master": opt.master(p)}, {"master": twin.master(q)}
    else:
        how = {"deepcopy": copy.deepcopy, "pickle": lambda o: pickle.loads(pickle.dumps(o)), "torch.save": saved}
        copied = how[reader](opt)
        number = next(i for i, r in enumerate(rig.zoo.parameters()) if r is p)
        mine = copied.param_groups[0]["params"][number]
        assert_same(mine.detach().cpu(), q.detach())
        got, wanted = copied.state[mine], twin.state[q]
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_same(torch.as_tensor(got[name]).cpu(), torch.as_tensor(value), name)
    rig.twin.check(opt)


# ---- what does not wait

METADATA: dict[str, Callable[[torch.Tensor], Any]] = {
    "grad": lambda p: p.grad,
    "set grad": lambda p: setattr(p, "grad", None),
    "requires_grad": lambda p: p.requires_grad,
    "shape": lambda p: p.shape,
    "size()": lambda p: p.size(),
    "size(0)": lambda p: p.size(0),
    "dim": lambda p: p.dim(),
    "ndim": lambda p: p.ndim,
    "numel": lambda p: p.numel(),
    "stride": lambda p: p.stride(),
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "layout": lambda p: p.layout,
    "is_leaf": lambda p: p.is_leaf,
    "grad_fn": lambda p: p.grad_fn,
    "is_cuda": lambda p: p.is_cuda,
    "_version": lambda p: p._version,
    "is_contiguous": lambda p: p.is_contiguous(),
    "element_size": lambda p: p.element_size(),
    "is_floating_point": lambda p: p.is_floating_point(),
    "isinstance": lambda p: isinstance(p, torch.nn.Parameter),
    "hash": lambda p: hash(p),
    "identity": lambda p: p is p,
    "id in a dict": lambda p: {p: 1}[p],
    "attribute": lambda p: getattr(p, "tensor_model_parallel", False),
    "set attribute": lambda p: setattr(p, "of_mine", 3),
    "register_hook": lambda p: p.register_hook(lambda grad: None).remove(),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_does_not_wait(rig, name) -> None:
    wanted = METADATA[name](rig.twin.model.child.weight)
    rig.step()
    p = rig.zoo.child.weight
    version = p._version
    got = METADATA[name](p)
    assert is_pending(p), f"{name} has waited"
    if name not in ("_version", "hash"):
        assert got == wanted
    else:
        assert name == "hash" or got == version


def test_bookkeeping_does_not_wait(rig) -> None:
    """What training loops do between step() and the next forward."""
    rig.step()
    params = list(rig.zoo.parameters())
    assert sum(p.numel() for p in params if p.requires_grad) > 600_000
    assert len({id(p) for p in params}) == len(params)
    rig.zoo.train()
    rig.zoo.zero_grad()
    rig.opt.zero_grad()
    rig.opt.zero_grad(set_to_none=False)
    dict(rig.zoo.named_parameters())
    assert [p for group in rig.opt.param_groups for p in group["params"] if p.grad is not None] == []
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    rig.opt.stats()
    repr(rig.opt)
    assert all(is_pending(p) for p in params)
    rig.twin.check(rig.opt)


def test_one_reader_waits_for_its_own_weights_alone(rig) -> None:
    rig.step()
    rig.zoo.child(rig.zoo.x)
    pending = {name for name, p in rig.zoo.named_parameters() if is_pending(p)}
    assert pending == {name for name, _ in rig.zoo.named_parameters()} - {"child.weight", "child.bias"}


def test_a_reader_that_raises_leaves_all_in_order(rig) -> None:
    rig.step()
    with pytest.raises(RuntimeError):
        rig.zoo.child.weight @ torch.zeros(3, 3, device=rig.zoo.ballast.device)
    assert type(rig.zoo.child.weight) is torch.nn.Parameter
    with pytest.raises(RuntimeError):
        rig.zoo.child.bias.view(7, 7)
    rig.twin.check(rig.opt)


# ---- writers


@torch.no_grad()
def assign_data(p: torch.Tensor) -> None:
    p.data = torch.full_like(p, 0.125)


@torch.no_grad()
def setitem(p: torch.Tensor) -> None:
    p[2:5] = 4.0


WRITERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda p: p.mul_(0.5),
    "add_ with itself": lambda p: p.add_(p, alpha=0.25),
    "zero_": lambda p: p.zero_(),
    "copy_": lambda p: p.copy_(torch.full_like(p, 3.0)),
    "setitem": setitem,
    "data": assign_data,
    "data.mul_": lambda p: p.data.mul_(0.5),
    "detach().mul_": lambda p: p.detach().mul_(0.5),
    "init": lambda p: torch.nn.init.constant_(p, 0.75),
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "iadd": lambda p: p.__iadd__(1.0),
    "out=": lambda p: torch.mul(p, 2.0, out=p.detach()),
    "lerp_": lambda p: p.lerp_(torch.ones_like(p), 0.5),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "index_fill_": lambda p: p.index_fill_(0, torch.tensor([1, 3], device=p.device), 9.0),
    "set_": lambda p: p.set_(torch.full_like(p, 0.5)),
    "vector": lambda p: torch.nn.utils.vector_to_parameters(torch.full((p.numel(),), 2.0).to(p), [p]),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_writers_come_after_what_is_pending(rig, writer) -> None:
    """And the next step follows them, master and all."""
    rig.step()
    with torch.no_grad():
        for name in ("child.weight", "low"):
            p, twin = rig.zoo.get_parameter(name), rig.twin.model.get_parameter(name)
            assert is_pending(p)
            WRITERS[writer](p)
            WRITERS[writer](twin)
            assert_same(p.detach().cpu(), twin.detach().cpu(), writer)
    take_over(rig)
    rig.step()
    rig.twin.check(rig.opt)


def take_over(rig: Rig) -> None:
    """Let the twin's host parameters follow what was written to its model."""
    with torch.no_grad():
        for p, q in zip(rig.twin.twin.params, rig.twin.model.parameters(), strict=True):
            p.copy_(q)


def test_load_state_dict_of_the_model(rig) -> None:
    kept = {name: value.clone() for name, value in rig.zoo.state_dict().items()}
    rig.step()
    rig.zoo.load_state_dict(kept)
    rig.twin.model.load_state_dict(kept)
    for name, p in rig.zoo.named_parameters():
        assert_same(p.detach(), kept[name], name)
    take_over(rig)
    rig.step()
    rig.twin.check(rig.opt)


def test_load_state_dict_of_the_optimizer(rig) -> None:
    rig.step()
    kept, kept_by_twin = copy.deepcopy(rig.opt.state_dict()), copy.deepcopy(rig.twin.optimizer.state_dict())
    rig.step()
    rig.opt.load_state_dict(kept)
    rig.twin.optimizer.load_state_dict(kept_by_twin)
    rig.twin.check(rig.opt)
    rig.step()
    rig.twin.check(rig.opt)


@pytest.mark.parametrize("key", ["exp_avg", "step", "all"])
def test_assignments_to_the_state(rig, key) -> None:
    rig.step()
    for opt, p in ((rig.opt, rig.zoo.child.weight), (rig.twin.optimizer, rig.host("child.weight"))):
        if key == "exp_avg":
            opt.state[p]["exp_avg"] = torch.full(p.shape, 0.5)
        elif key == "step":
            opt.state[p]["step"] = 41
        else:
            new = {name: torch.full(p.shape, 0.25) for name in ("exp_avg", "exp_avg_sq")}
            opt.state[p] = {"step": torch.tensor(3.0), **new}
    rig.step()
    rig.twin.check(rig.opt)


def test_state_written_through_a_view_between_steps(rig) -> None:
    """State tensors are live: what is written once all is complete is used."""
    rig.step()
    rig.opt.state[rig.zoo.child.weight]["exp_avg"].mul_(0.5)
    rig.twin.optimizer.state[rig.host("child.weight")]["exp_avg"].mul_(0.5)
    rig.step()
    rig.twin.check(rig.opt)


def test_reset_and_load_master(rig) -> None:
    rig.step()
    rig.opt.reset(rig.zoo.child.weight)
    rig.twin.optimizer.reset(rig.host("child.weight"))
    rig.step()
    values = torch.randn(WIDTH, WIDTH)
    rig.opt.load_master(rig.zoo.low, values)
    rig.twin.optimizer.load_master(rig.host("low"), values)
    assert_same(rig.opt.master(rig.zoo.low).cpu(), rig.twin.optimizer.master(rig.host("low")))
    rig.twin.copy_back()
    rig.step()
    rig.twin.check(rig.opt)


def test_gradients_of_a_step_are_kept_until_it_is_done(rig) -> None:
    """The memory of a gradient that nobody else has is not given to the next one while its update reads it."""
    for _ in range(5):
        grads = [torch.randn_like(p) for p in rig.zoo.parameters()]
        rig.twin.twin.step(grads)
        for p, grad in zip(rig.zoo.parameters(), grads, strict=True):
            set_grad(p, grad)
        del grads, grad
        rig.opt.step()
        assert all(plain_grad(p) is None for p in rig.zoo.parameters())
        # Takes what is free, if it is.
        junk = [torch.full_like(p, float("nan")) for p in rig.twin.model.parameters()]
        del junk
    rig.twin.check(rig.opt)


@pytest.mark.cuda
def test_a_reader_on_another_stream_takes_nothing_from_the_training_stream() -> None:
    """Whoever waits takes the mark off a weight, on whatever stream: the stream of the step is ordered all the same."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(1 << 22, device="cuda"))
    model = torch.nn.Module()
    model.p = p
    opt = outboard.AdamW([p], lr=0.1, mode="cpu", threads=1).attach(model)
    expected = torch.nn.Parameter(p.detach().cpu().clone())
    grad = torch.randn(1 << 22)
    expected.grad = grad.clone()
    outboard.AdamW([expected], lr=0.1, threads=1).step()
    side = torch.cuda.Stream()
    # What the gradient waits for: nothing lands before.
    late = torch.cuda.Stream()
    with torch.cuda.stream(late):
        torch.cuda._sleep(400_000_000)
        set_grad(p, grad.to("cuda", non_blocking=True))
    torch.cuda.current_stream().wait_stream(late)
    opt.step()
    assert is_pending(p)
    with torch.cuda.stream(side):
        elsewhere = p.detach() * 1
    assert not is_pending(p)
    here = p.detach() * 1
    assert_same(here.cpu(), expected.detach())
    side.synchronize()
    assert_same(elsewhere.cpu(), expected.detach())
