"""The AdamW kernel on a CUDA device against the host optimizer: the same bits, for every combination of dtypes.

Run by `make test-gpu` where there is a device.
"""

import itertools

import pytest
import torch

import outboard
from outboard import _native

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or _native.cuda_status()["compiled"] is None,
        reason="needs a CUDA device and the CUDA library (`python -m outboard doctor` says which is missing)",
    ),
]

STEPS = 4
# Two whole blocks of threads, a tail, and one element more than the vectorised part.
NUMEL = 2 * 256 * 8 + 8 + 5

WEIGHTS = {
    "float32": (torch.float32, "split"),
    "bfloat16-split": (torch.bfloat16, "split"),
    "bfloat16-full": (torch.bfloat16, "full"),
    "float16-full": (torch.float16, "full"),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIONS = {
    "default": {},
    "amsgrad": {"amsgrad": True},
    "maximize, lerp from the gradient": {"maximize": True, "betas": (0.3, 0.99)},
    "no decay": {"weight_decay": 0.0},
}


def values(numel: int, generator: torch.Generator, special: bool) -> torch.Tensor:
    """Random values over many magnitudes, with zeros, denormals, infinities and NaN if asked."""
    scale = torch.exp2(torch.randint(-20, 4, (numel,), generator=generator).float())
    result = torch.randn(numel, generator=generator) * scale
    if special:
        for at, value in enumerate([0.0, -0.0, 1e-40, -1e-40, float("inf"), float("-inf"), float("nan"), 3e38]):
            result[at * 37 % numel] = value
    return result


def same_bits(device: torch.Tensor, host: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN for NaN, zeros by their sign."""
    device = device.cpu()
    if not host.is_floating_point():
        return torch.equal(device, host)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[host.element_size()]
    equal = device.view(integer) == host.view(integer)
    return bool((equal | (device.isnan() & host.isnan())).all())


@pytest.mark.parametrize("adam", [outboard.AdamW, outboard.Adam], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(
    ("weight", "grad", "moment"), list(itertools.product(WEIGHTS, DTYPES, ["float32", "bfloat16"]))
)
@pytest.mark.parametrize("offset", [0, 3], ids=["aligned", "12 bytes off"])
def test_same_bits_as_the_host(adam, options, weight, grad, moment, offset):
    dtype, master = WEIGHTS[weight]
    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(values(NUMEL, generator, special=True).to(dtype))
    parameter.grad_dtype = None
    settings = {"lr": 1e-2, "weight_decay": 0.1, **options}
    optimizer = adam([parameter], master=master, state_dtype=DTYPES[moment], seed=7, **settings)
    state = optimizer.state[parameter]

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a host tensor, `offset` elements into its allocation."""
        buffer = torch.empty(NUMEL + offset, dtype=tensor.dtype, device="cuda")
        buffer[offset:].copy_(tensor.detach())
        return buffer[offset:]

    planes = {name: on_device(tensor) for name, tensor in state.items() if name != "step"}
    device_weight = on_device(parameter)
    kept = planes.get("residual", planes.get("master"))
    for step in range(1, STEPS + 1):
        gradient = values(NUMEL, generator, special=step == 2).to(DTYPES[grad])
        parameter.grad = gradient.clone()
        device_gradient = on_device(gradient)
        optimizer.step()
        # In two runs, so that the second starts inside the parameter.
        for first, length in ((0, 2048), (2048, NUMEL - 2048)):

            def address(tensor, first=first):
                return 0 if tensor is None else tensor.data_ptr() + first * tensor.element_size()

            _native.cuda_adamw(
                optimizer.param_groups[0],
                weight_kind=weight,
                grad_kind=grad,
                moment_kind=moment,
                weight=address(device_weight),
                kept=address(kept),
                grad=address(device_gradient),
                exp_avg=address(planes["exp_avg"]),
                exp_avg_sq=address(planes["exp_avg_sq"]),
                max_exp_avg_sq=address(planes.get("max_exp_avg_sq")),
                len=length,
                first=first,
                step=float(step),
                clip=1.0,
                seed=7,
                number=0,
                grad_scale=None,
                stream=torch.cuda.current_stream().cuda_stream,
            )
        torch.cuda.synchronize()
        assert same_bits(device_weight, parameter.detach()), f"weight, step {step}"
        for name, plane in planes.items():
            assert same_bits(plane, state[name]), f"{name}, step {step}"
