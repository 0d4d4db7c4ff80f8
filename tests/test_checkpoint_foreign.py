"""Checkpoints of torchao, bitsandbytes and DeepSpeed, read without these libraries.

The fixtures have exactly the layouts that were seen in files written by these versions on torch 2.14.1, all on CPUs:

- torchao 0.18.0: AdamW8bit, AdamW4bit and AdamWFp8 after three steps; CPUOffloadOptimizer over torch's AdamW with its
  streams and pinned memory replaced by nothing. `from_torchao` gave `dequantize()`'s values and those of
  torch.optim.AdamW, bit for bit.
- bitsandbytes 0.50.2: AdamW32bit, AdamW8bit and PagedAdamW after three steps. `from_bitsandbytes` gave
  `functional.dequantize_blockwise`'s values, bit for bit.
- DeepSpeed 0.19.8, two ranks over gloo: ZeRO-1 and 2 with fp32 and bf16 weights, `round_robin_gradients`,
  `elastic_checkpoint`, `offload_optimizer` with DeepSpeedCPUAdam, BF16_Optimizer (`grad_accum_dtype` fp32).
  `from_deepspeed` gave the masters of `safe_get_full_fp32_param`, bit for bit, and in fp32 the moments of
  torch.optim.AdamW on the ranks' mean gradient within 1e-4.

Over 500 lines: three libraries' layouts, each read by itself.
"""

from __future__ import annotations

import enum
import os
import pickle
import sys
import types
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import outboard
from oracle import assert_same
from outboard import checkpoint

FP32, BF16 = torch.float32, torch.bfloat16

#: What foreign code would have done.
ran: list[str] = []


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts classes into modules of other libraries until the file is written."""
    modules: list[str] = []
    ran.clear()

    def install(**classes: type) -> None:
        for cls in classes.values():
            parts = cls.__module__.split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                if name not in sys.modules:
                    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
                    modules.append(name)
            setattr(sys.modules[cls.__module__], cls.__qualname__, cls)

    def remove() -> None:
        for name in modules:
            monkeypatch.delitem(sys.modules, name, raising=False)

    install.remove = remove
    return install


def placed(cls: Any, module: str) -> Any:
    """Say that a class is another library's."""
    cls.__module__, cls.__qualname__ = module, cls.__name__
    return cls


def group(params: list[int], **more: Any) -> dict[str, Any]:
    """As torch's AdamW writes it."""
    return {
        "lr": 0.01,
        "betas": (0.8, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": True,
        "decoupled_weight_decay": True,
        "params": params,
        **more,
    }


# ---- torchao


def quantised_class(name: str, module: str, attributes: tuple[str, ...]) -> Any:
    """Make a class as torchao's: a wrapper without memory, whose attributes are the content."""

    class Quantised(torch.Tensor):
        @staticmethod
        def __new__(cls, shape: Any, dtype: torch.dtype, **values: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cpu")

        def __init__(self, shape: Any, dtype: torch.dtype, **values: Any) -> None:
            self.__dict__.update(values)
            assert tuple(values) == attributes

        def __setstate__(self, state: Any) -> None:
            ran.append(name)

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.detach.default:
                return args[0]
            ran.append(str(func))
            raise NotImplementedError(str(func))

    Quantised.__name__ = name
    return placed(Quantised, module)


LOW_BIT = {
    "8bit": ("OptimState8bit", ("codes", "scale", "qmap", "signed", "block_size")),
    "4bit": ("OptimState4bit", ("codes", "scale", "qmap", "signed", "_shape", "block_size")),
    "fp8": ("OptimStateFp8", ("codes", "scale", "block_size")),
}


def low_bit(kind: str, shape: tuple[int, ...], signed: bool) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a quantised moment's attributes, and its values, computed one by one."""
    count, block = torch.Size(shape).numel(), 128 if kind == "4bit" else 256
    scale = torch.rand(count // block) + 0.1
    values: dict[str, Any] = {"scale": scale, "signed": signed, "_shape": torch.Size(shape), "block_size": block}
    if kind == "fp8":
        values["codes"] = (torch.randn(shape) * 50).to(torch.float8_e4m3fn)
        numbers = values["codes"].float().flatten().tolist()
    else:
        levels = 256 if kind == "8bit" else 16
        values["qmap"] = torch.linspace(-1 if signed else 0, 1, levels)
        plain = torch.randint(0, levels, (count,), dtype=torch.uint8)
        numbers = [float(values["qmap"][code]) for code in plain.tolist()]
        packed = [16 * first + second for first, second in plain.view(-1, 2).tolist()]
        values["codes"] = plain.view(shape) if kind == "8bit" else torch.tensor(packed, dtype=torch.uint8)
    expected = [torch.tensor(number) * scale[place // block] for place, number in enumerate(numbers)]
    return {name: values[name] for name in LOW_BIT[kind][1]}, torch.stack(expected).view(shape)


@pytest.mark.parametrize("kind", ["8bit", "4bit", "fp8"])
def test_torchao_low_bit(kind, foreign, tmp_path) -> None:
    name, attributes = LOW_BIT[kind]
    cls = quantised_class(name, f"torchao.optim.subclass_{kind}", attributes)
    foreign(cls=cls)
    moments = {}
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        values, moments[f"{key} expected"] = low_bit(kind, (64, 72), signed)
        moments[key] = cls((64, 72), FP32, **values)
    saved = {
        "state": {
            0: {"step": torch.tensor(3.0), "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]},
            1: {"step": torch.tensor(3.0), "exp_avg": torch.ones(5), "exp_avg_sq": torch.ones(5)},
        },
        "param_groups": [
            {"lr": torch.tensor(0.5), "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}
            | {"params": [0, 1]}
        ],
    }
    torch.save(saved, tmp_path / "x.pt")
    foreign.remove()
    ran.clear()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "x.pt", weights_only=True)
    read = checkpoint.read_foreign(tmp_path / "x.pt")
    converted = checkpoint.from_torchao(read)
    assert ran == [], "no code of the file's classes"
    for key in ("exp_avg", "exp_avg_sq"):
        assert_same(converted["state"][0][key], moments[f"{key} expected"], key)
    with pytest.raises(TypeError, match="that was not loaded"):
        torch.add(read["state"][0]["exp_avg"], 1)
    assert "OptimState" in repr(read)
    params = [torch.ones(64, 72, requires_grad=True), torch.ones(5, requires_grad=True)]
    optimizer = outboard.AdamW(params)
    optimizer.load_state_dict(converted)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert float(optimizer.state[params[0]]["step"]) == 3
    assert_same(optimizer.state[params[0]]["exp_avg"], moments["exp_avg expected"])
    # A moment that is no quantised one of torchao's.
    read["state"][0]["exp_avg"].scale = torch.ones(7)
    with pytest.raises(ValueError, match=r"parameter 0: exp_avg: .* 7 scales"):
        checkpoint.from_torchao(read)
    del read["state"][0]["exp_avg"].codes
    with pytest.raises(TypeError, match="parameter 0: exp_avg is a OptimState"):
        checkpoint.from_torchao(read)


def offloaded_layout(params: list[torch.Tensor], theirs: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of torch's AdamW as CPUOffloadOptimizer holds it: large ones alone, small ones together."""
    full = theirs.state_dict()
    offloaded, on_device, state, number = [], [], {}, 0
    for index, each in enumerate(theirs.param_groups):
        small = []
        for p, key in zip(each["params"], full["param_groups"][index]["params"], strict=True):
            if not p.requires_grad:
                continue
            settings = {name: value for name, value in full["param_groups"][index].items() if name != "params"}
            if p.numel() >= 4096:
                offloaded.append({"state": {0: full["state"][key]}, "param_groups": [{**settings, "params": [0]}]})
            else:
                state[number] = full["state"][key]
                small.append(number)
                number += 1
        if small:
            on_device.append({**settings, "params": small})
    return {"offloaded": offloaded, "on-device": {"state": state, "param_groups": on_device}}


def offloaded_params() -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    shapes = [(64, 72), (16,), (32,), (4096,), (4, 4), (5008,)]
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    params[2].requires_grad = False
    return params


def offloaded_groups(params: list[Any]) -> list[dict[str, Any]]:
    return [
        {"params": params[:4], "lr": 0.1},
        {"params": params[4:5], "weight_decay": 0.5},
        {"params": params[5:], "lr": 0.3},
    ]


def test_torchao_cpu_offload(tmp_path) -> None:
    """Which state is whose: large parameters in order, then the small ones; the bits go on as torch's."""
    params, ours = offloaded_params(), offloaded_params()
    theirs = torch.optim.AdamW(offloaded_groups(params), betas=(0.8, 0.95), fused=True)

    def step(params: Any, optimizer: Any, number: int) -> None:
        for p in params:
            if p.requires_grad:
                p.grad = torch.linspace(-number - 1, 1, p.numel()).view(p.shape)
        optimizer.step()

    for number in range(3):
        step(params, theirs, number)
    saved = offloaded_layout(params, theirs)
    torch.save(saved, tmp_path / "x.pt")
    read = torch.load(tmp_path / "x.pt", weights_only=True)
    converted = checkpoint.from_torchao(read, offloaded_groups(ours))
    optimizer = outboard.AdamW(offloaded_groups(ours))
    optimizer.load_state_dict(converted)
    with torch.no_grad():
        for p, q in zip(params, ours, strict=True):
            q.copy_(p)
    for number in range(3, 6):
        step(params, theirs, number)
        step(ours, optimizer, number)
    for p, q in zip(params, ours, strict=True):
        assert_same(q, p)
    assert [each["lr"] for each in optimizer.param_groups] == [0.1, 1e-3, 0.3]
    # Named ones keep their names; one group may be given as a list.
    named = checkpoint.from_torchao(
        read, [{**each, "params": [(str(id(p)), p) for p in each["params"]]} for each in offloaded_groups(ours)]
    )
    assert named["param_groups"][1]["param_names"] == [str(id(ours[4]))]
    one = {"offloaded": read["offloaded"][:1]}
    assert checkpoint.from_torchao(one, [ours[0]])["state"].keys() == {0}


def test_torchao_cpu_offload_refuses_other_parameters() -> None:
    params = offloaded_params()
    theirs = torch.optim.AdamW(offloaded_groups(params))
    for p in params:
        p.grad = torch.ones_like(p) if p.requires_grad else None
    theirs.step()
    saved = offloaded_layout(params, theirs)
    with pytest.raises(ValueError, match="names no parameters"):
        checkpoint.from_torchao(saved)
    with pytest.raises(ValueError, match="give the parameters"):
        checkpoint.from_torchao(saved, offloaded_groups(params)[:2])
    with pytest.raises(ValueError, match="minimal_size"):
        checkpoint.from_torchao(saved, offloaded_groups(params), minimal_size=10)
    others = [torch.nn.Parameter(p.detach().flatten(), p.requires_grad) for p in params]
    with pytest.raises(ValueError, match=r"parameter 0: exp_avg has shape \(64, 72\), the parameter \(4608,\)"):
        checkpoint.from_torchao(saved, offloaded_groups(others))


# ---- bitsandbytes


def blockwise(count: int, size: int) -> tuple[dict[str, Any], list[float]]:
    qmap, codes = torch.linspace(-1, 1, 256), torch.randint(0, 256, (count,), dtype=torch.uint8)
    absmax = torch.rand(-(-count // size)) + 0.5
    values = [float(qmap[code] * absmax[place // size]) for place, code in enumerate(codes.tolist())]
    return {"state": codes, "qmap": qmap, "absmax": absmax}, values


@pytest.mark.parametrize("is_wrapped", [True, False], ids=["wrapped", "flat"])
@pytest.mark.parametrize("size", [256, 2048])
def test_bitsandbytes(size, is_wrapped, tmp_path) -> None:
    """32-bit state, and 8-bit state in blocks, the last of which is short."""
    first, first_values = blockwise(4096 + 77, size)
    second, second_values = blockwise(4096 + 77, size)
    eight = {f"{key}1": value for key, value in first.items()} | {f"{key}2": value for key, value in second.items()}
    states = {0: eight, 1: {"state1": torch.randn(5), "state2": torch.rand(5)}}
    settings = {"lr": 0.25, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    saved = {
        "state": {
            number: {"step": 3, **({"__bnb_optimizer_quant_state__": state} if is_wrapped else state)}
            for number, state in states.items()
        },
        "param_groups": [{**settings, "alpha": 0.0, "t_alpha": None, "t_beta3": None, "params": [0, 1]}],
    }
    torch.save(saved, tmp_path / "x.pt")
    converted = checkpoint.from_bitsandbytes(torch.load(tmp_path / "x.pt", weights_only=True))
    assert_same(converted["state"][0]["exp_avg"], torch.tensor(first_values))
    assert_same(converted["state"][0]["exp_avg_sq"], torch.tensor(second_values))
    params = [torch.ones(4096 + 77, dtype=BF16, requires_grad=True), torch.ones(5, requires_grad=True)]
    optimizer = outboard.AdamW(params)
    optimizer.load_state_dict(converted)
    assert_same(optimizer.state[params[0]]["exp_avg"], torch.tensor(first_values))
    assert_same(optimizer.state[params[1]]["exp_avg_sq"], states[1]["state2"])
    assert float(optimizer.state[params[0]]["step"]) == 3
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert "alpha" not in optimizer.param_groups[0]


def test_bitsandbytes_of_other_kinds_is_refused() -> None:
    codes = torch.zeros(5000, dtype=torch.uint8)
    eight = {"step": 1, "state1": codes, "state2": codes, "qmap1": torch.zeros(256), "qmap2": torch.zeros(256)}
    for state, message in (
        ({"step": 1, "state1": torch.ones(3)}, "parameter 7: its state has no state2"),
        ({**eight, "max1": torch.ones(1), "max2": torch.ones(1)}, r"parameter 7: .* without blocks"),
        ({**eight, "absmax1": torch.ones(4999), "absmax2": torch.ones(1)}, "4999 blocks do not make 5000 elements"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoint.from_bitsandbytes({"state": {7: state}, "param_groups": [{"params": [7]}]})


# ---- DeepSpeed


@dataclass
class fragment_address:
    numel: int
    start: int


class ZeroStageEnum(int, enum.Enum):
    optimizer_states = 1
    gradients = 2


class LossScaler:
    def __init__(self, scale: float) -> None:
        self.cur_scale = scale
        self.dynamic = False

    def __setstate__(self, state: Any) -> None:
        ran.append("LossScaler")


#: Names and shapes in each group; the partitions of two ranks cut through `a` and `b`.
SHAPES: list[dict[str, tuple[int, ...]]] = [{"a": (7, 5), "c": (3, 2, 2)}, {"b": (11,), "s": (1,)}]


def deepspeed_values(key: str, name: str, dtype: torch.dtype = FP32) -> torch.Tensor:
    shape = {name: shape for each in SHAPES for name, shape in each.items()}[name]
    generator = torch.Generator().manual_seed(sum(map(ord, key + name)))
    values = torch.rand(shape, generator=generator) + 0.5
    if key != "master":
        return values
    return values if dtype is FP32 else values * (1 + 2**-10)


def write_deepspeed(
    folder: Path, foreign: Any, *, dtype: torch.dtype = BF16, elastic: bool = False, order: str = "as given"
) -> None:
    """Write what `save_checkpoint` writes for two ranks, each partition aligned to two elements."""
    foreign(
        a=placed(fragment_address, "deepspeed.utils.tensor_fragment"),
        b=placed(ZeroStageEnum, "deepspeed.runtime.zero.config"),
        c=placed(LossScaler, "deepspeed.runtime.fp16.loss_scaler"),
    )
    (folder / "tag").mkdir(parents=True)
    (folder / "latest").write_text("tag")
    names = [list(each) if order == "as given" else list(reversed(each)) for each in SHAPES]
    for rank in range(2):
        flats: dict[str, list[torch.Tensor]] = {"exp_avg": [], "exp_avg_sq": [], "master": []}
        mappings, paddings = [], []
        for index in range(2):
            total = sum(torch.Size(shape).numel() for shape in SHAPES[index].values())
            size = -(-total // 4) * 2
            paddings.append(max(0, (rank + 1) * size - total))
            mapping, begin = OrderedDict(), 0
            for name in names[index]:
                count = torch.Size(SHAPES[index][name]).numel()
                low, high = max(begin, rank * size), min(begin + count, (rank + 1) * size)
                if low < high:
                    mapping[name] = fragment_address(numel=high - low, start=low - rank * size)
                begin += count
            mappings.append(mapping)
            for key, parts in flats.items():
                whole = torch.cat([deepspeed_values(key, name, dtype).flatten() for name in names[index]])
                padded = torch.nn.functional.pad(whole, (0, 2 * size - total))
                parts.append(padded[rank * size : (rank + 1) * size].clone())
        lean = [flat[: flat.numel() - pad] for flat, pad in zip(flats["master"], paddings, strict=True)]
        moments = [
            {"step": torch.tensor(3.0), "exp_avg": flats["exp_avg"][index], "exp_avg_sq": flats["exp_avg_sq"][index]}
            for index in range(2)
        ]
        base: Any = {
            "state": dict(enumerate(moments)),
            "param_groups": [group([0], name="decay"), group([1], lr=0.002, weight_decay=0.0)],
        }
        if elastic:
            base = [
                {key: value[: len(lean[index])] if value.dim() else value for key, value in moments[index].items()}
                for index in range(2)
            ]
        state = {
            "loss_scaler": LossScaler(1.0),
            "dynamic_loss_scale": False,
            "overflow": False,
            "clip_grad": 1.0,
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": lean,
            "zero_stage": ZeroStageEnum.gradients,
            "group_paddings": paddings,
            "param_alignment_paddings": [[0, 0], [0, 0]],
            "partition_count": [2, 2],
            "ds_version": "0.19.8",
            "param_slice_mappings": mappings,
        }
        prefix = "bf16_zero" if dtype is BF16 else "zero"
        torch.save(
            {"optimizer_state_dict": state, "ds_config": {"zero_optimization": {"stage": 2}}, "ds_version": "0.19.8"},
            folder / "tag" / f"{prefix}_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    weights = {name: deepspeed_values("master", name, dtype).to(dtype) for each in SHAPES for name in each}
    model = {
        # A parameter without elements is in the optimizer's groups, and DeepSpeed leaves it out of its own.
        "module": OrderedDict(weights | {"frozen": torch.ones(4, dtype=dtype), "none": torch.ones(0, 2, dtype=dtype)}),
        "buffer_names": [],
        "param_shapes": [OrderedDict((n, torch.Size(SHAPES[i][n])) for n in names[i]) for i in range(2)],
        "frozen_param_shapes": None,
        "ds_version": "0.19.8",
    }
    torch.save(model, folder / "tag" / "mp_rank_00_model_states.pt")
    foreign.remove()
    ran.clear()


def remove_key(path: Path, key: str) -> None:
    """Write a file again without a key, and without what was an object of a foreign class."""
    content = checkpoint.read_foreign(path, mmap=False)
    for each in (key, "loss_scaler", "zero_stage"):
        content["optimizer_state_dict"].pop(each, None)
    torch.save(content, path)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("order", ["as given", "round robin"])
@pytest.mark.parametrize("elastic", [False, True], ids=["rigid", "elastic"])
def test_deepspeed(elastic, order, dtype, foreign, tmp_path) -> None:
    """The ranks' partitions are merged, parameters matched by name, masters become masters."""
    write_deepspeed(tmp_path, foreign, dtype=dtype, elastic=elastic, order=order)
    assert "deepspeed" not in sys.modules
    converted = checkpoint.from_deepspeed(tmp_path)
    assert ran == [], "no code of the file's classes"
    assert checkpoint.from_deepspeed(tmp_path / "tag")["param_groups"] == converted["param_groups"]
    names = [name for each in converted["param_groups"] for name in each["param_names"]]
    for number, name in enumerate(names):
        state = converted["state"][number]
        assert float(state["step"]) == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same(state[key], deepspeed_values(key, name), f"{name} {key}")
        assert ("master" in state) == (dtype is BF16)

    weights = torch.load(tmp_path / "tag" / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    params = {name: torch.nn.Parameter(weights[name].clone()) for name in ("a", "c", "b", "s", "none")}
    options = {"lr": 9.0, "master": "full"} if dtype is BF16 else {"lr": 9.0}
    optimizer = outboard.AdamW(
        [{"params": [(name, params[name]) for name in each]} for each in (("a", "c"), ("b", "s", "none"))], **options
    )
    optimizer.param_groups[1]["lr"] = 8.0
    checkpoint.load_matched(optimizer, converted)
    for name in names:
        p = params[name]
        assert_same(optimizer.state[p]["exp_avg"], deepspeed_values("exp_avg", name), name)
        assert_same(optimizer.master(p), deepspeed_values("master", name, dtype), name)
    # An elastic checkpoint has no settings: the optimizer's stay.
    assert [each["lr"] for each in optimizer.param_groups] == ([9.0, 8.0] if elastic else [0.01, 0.002])
    assert optimizer.param_groups[0]["betas"] == ((0.9, 0.999) if elastic else (0.8, 0.95))


def test_deepspeed_without_the_models_file(foreign, tmp_path) -> None:
    write_deepspeed(tmp_path, foreign)
    (tmp_path / "tag" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(FileNotFoundError, match="shapes="):
        checkpoint.from_deepspeed(tmp_path)
    shapes = {name: shape for each in SHAPES for name, shape in each.items()}
    converted = checkpoint.from_deepspeed(tmp_path, shapes=shapes)
    assert_same(converted["state"][0]["master"], deepspeed_values("master", "a", BF16))
    assert "master" not in checkpoint.from_deepspeed(tmp_path, shapes=shapes, fp32_weights=True)["state"][0]
    with pytest.raises(ValueError, match=r"a: its parts in the ranks' files have 35 elements, the parameter 36"):
        checkpoint.from_deepspeed(tmp_path, shapes={**shapes, "a": (6, 6)})
    del shapes["s"]
    with pytest.raises(ValueError, match="s: its shape is not known"):
        checkpoint.from_deepspeed(tmp_path, shapes=shapes)


def test_deepspeed_of_other_layouts_is_refused(foreign, tmp_path) -> None:
    write_deepspeed(tmp_path, foreign)
    tag = tmp_path / "tag"
    one, two = (tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))

    def refused(match: str, error: type[Exception] = ValueError) -> None:
        with pytest.raises(error, match=match):
            checkpoint.from_deepspeed(tmp_path)

    content = two.read_bytes()
    two.unlink()
    refused("files of 1 ranks, and its state is in 2 partitions", FileNotFoundError)
    two.write_bytes(content)
    one_content = one.read_bytes()
    one.unlink()
    refused("no file of rank 0", FileNotFoundError)
    one.write_bytes(one_content)
    (tag / "zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(content)
    refused("tensor parallelism")
    (tag / "zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()

    remove_key(two, "param_slice_mappings")
    refused("do not say where each parameter is")
    remove_key(two, "single_partition_of_fp32_groups")
    refused("not of ZeRO-1 or ZeRO-2")
    one.unlink()
    two.unlink()
    refused("has no zero_pp_rank", FileNotFoundError)


# ---- a file that is not what it seems


class Evil:
    def __reduce__(self) -> Any:
        return (os.makedirs, ("written-by-a-pickle",))


@pytest.mark.parametrize("mmap", [False, True])
def test_a_pickle_that_runs_code_runs_none(mmap, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Evil(), "y": torch.ones(2)}, "evil.pt")
    try:
        read = checkpoint.read_foreign("evil.pt", mmap=mmap)
    except pickle.UnpicklingError:
        read = None
    assert read is None or "not loaded" in repr(read["x"])
    assert os.listdir(tmp_path) == ["evil.pt"]


def test_stand_ins_are_not_left_behind(foreign, tmp_path) -> None:
    """What `read_foreign` allows, it allows for as long as it reads."""
    write_deepspeed(tmp_path, foreign)
    # torch keeps a set.
    before = set(torch.serialization.get_safe_globals())
    path = tmp_path / "tag" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    read = checkpoint.read_foreign(path)
    assert "LossScaler" in repr(read["optimizer_state_dict"]["loss_scaler"])
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
