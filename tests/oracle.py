"""What a step must give, written from the recipe in the documentation and from nothing else.

`Oracle` holds one parameter and does each operation of the recipe on fp32 tensors, one elementary torch operation at a
time; the two fused multiply-adds are done in float64 with round-to-odd, which makes the final rounding to fp32 the only
one. `ref` is plain AdamW in float64: what the mathematics says, without any rule about rounding.
"""

from __future__ import annotations

import math

import torch

FLOAT = torch.float32
SIXTEEN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def scalar(value: float) -> torch.Tensor:
    """Round a Python float to fp32 once."""
    return torch.tensor(value, dtype=torch.float64).to(FLOAT)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return `a*b + c` in fp32, rounded once.

    The product of two fp32 numbers is exact in float64. The sum is rounded to odd there (53 bits against fp32's 24, so
    the second rounding cannot tell the difference).
    """
    product = a.double() * b.double()
    addend = c.double().expand_as(product)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    inexact = torch.isfinite(total) & torch.isfinite(error) & (error != 0) & (bits % 2 == 0)
    outward = (error > 0) == (total > 0)
    step = torch.where(outward, 1, -1)
    return torch.where(inexact, bits + step, bits).view(torch.float64).to(FLOAT)


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """Return the correctly rounded fp32 root.

    torch's own fp32 root is MKL's and often one ulp off. In float64 even one that is an ulp off lies on the right side
    of every midpoint of two fp32 numbers: these have 25 bits and the root of a 24-bit number cannot come that close.
    """
    return x.double().sqrt().to(FLOAT)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits as non-negative int64."""
    kind = {4: torch.int32, 2: torch.int16, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(kind).long()
    return bits & 0xFFFFFFFF if kind is torch.int32 else bits & 0xFFFF if kind is torch.int16 else bits


def from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of non-negative int64 bits."""
    if dtype is FLOAT:
        return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(FLOAT)
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all elements are equal to the bit, or both NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach(), b.detach()
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool(((bits_of(a) == bits_of(b)) | (a.isnan() & b.isnan())).all())


def differences(a: torch.Tensor, b: torch.Tensor) -> str:
    """Say where two tensors differ, for an assertion's message."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{tuple(a.shape)} and {b.dtype}{tuple(b.shape)}"
    flat_a, flat_b = a.detach().reshape(-1), b.detach().reshape(-1)
    both_nan = flat_a.isnan() & flat_b.isnan()
    wrong = ((bits_of(flat_a) != bits_of(flat_b)) & ~both_nan).nonzero().flatten()
    first = [(int(i), float(flat_a[i]), float(flat_b[i])) for i in wrong[:3]]
    return f"{len(wrong)} of {flat_a.numel()} differ; (index, got, wanted): {first}"


def assert_same(got: torch.Tensor, wanted: torch.Tensor, what: str = "") -> None:
    """Fail unless all bits are equal (or both are NaN)."""
    assert same_bits(got, wanted), f"{what} {differences(got, wanted)}"


# ---- masters


def round_to(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp32 values to a 16-bit dtype, to nearest even; NaN becomes the dtype's quiet NaN."""
    nan = from_bits(torch.tensor(SIXTEEN[dtype]), dtype)
    if dtype is torch.float16:
        return torch.where(master.isnan(), nan, master.to(torch.float16))
    bits = bits_of(master)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return torch.where(master.isnan(), nan, from_bits(rounded & 0xFFFF, torch.bfloat16))


def decode(weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master of a bf16 weight and its residual."""
    high = bits_of(weight)
    low = residual.long()
    magnitude = high & 0x7FFF
    void = (magnitude == 0) & (low < 0)
    void |= (magnitude == 0x7F80) & (low > 0)
    void |= magnitude > 0x7F80
    void |= (low == -0x8000) & (high % 2 == 1)
    return from_bits((high << 16) + torch.where(void, 0, low), FLOAT)


def encode(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bf16 weight and residual of a master.

    A tie that rounds down needs +32768, which does not fit: there the master moves one ulp toward the weight.
    """
    weight = round_to(master, torch.bfloat16)
    low = bits_of(master) - (bits_of(weight) << 16)
    low = torch.where(master.isnan(), 0, low).clamp(max=0x7FFF)
    return weight, low.to(torch.int16)


# ---- the recipe


class Oracle:
    """One parameter and its state, stepped by the recipe. Everything is in the parameter's logical order.

    Parameters
    ----------
    weight : Tensor
        fp32, bf16 or fp16; copied.
    master : {"split", "full"}
        Of a bf16 weight; an fp16 one always has a full master, an fp32 one is its own.
    decoupled : bool
        AdamW's weight decay, or Adam's.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
        master: str = "split",
        decoupled: bool = True,
    ) -> None:
        self.weight = weight.detach().clone(memory_format=torch.contiguous_format)
        shape = self.weight.shape
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.maximize, self.decoupled = maximize, decoupled
        self.step_count = 0
        self.exp_avg = torch.zeros(shape, dtype=FLOAT)
        self.exp_avg_sq = torch.zeros(shape, dtype=FLOAT)
        self.max_exp_avg_sq = torch.zeros(shape, dtype=FLOAT) if amsgrad else None
        self.residual: torch.Tensor | None = None
        self.full: torch.Tensor | None = None
        if weight.dtype is torch.bfloat16 and master == "split":
            self.residual = torch.zeros(shape, dtype=torch.int16)
        elif weight.dtype is not FLOAT:
            self.full = self.weight.to(FLOAT)

    @property
    def master(self) -> torch.Tensor:
        """The fp32 values that the next step starts from."""
        if self.residual is not None:
            return decode(self.weight, self.residual)
        if self.full is not None:
            kept = bits_of(round_to(self.full, self.weight.dtype)) == bits_of(self.weight)
            return torch.where(kept, self.full, self.weight.to(FLOAT))
        return self.weight

    def step(self, grad: torch.Tensor, *, clip: float = 1.0, grad_scale: float | None = None) -> None:
        """Do one step; `clip` is the factor, rounded to fp32 here."""
        self.step_count += 1
        t, (b1, b2) = self.step_count, self.betas
        w = scalar(1 - b1)
        step_size = scalar(self.lr / (1 - b1**t))
        sqrt_bc2 = scalar(math.sqrt(1 - b2**t))
        p, m, v = self.master, self.exp_avg, self.exp_avg_sq

        g = grad.detach().to(FLOAT)
        if grad_scale is not None:
            g = g / scalar(grad_scale)
        g = scalar(clip) * g
        if self.maximize:
            g = -g
        if not self.decoupled and self.weight_decay != 0:
            g = fma(p, scalar(self.weight_decay), g)
        m = fma(w, g - m, m) if abs(float(w)) < 0.5 else fma(w - scalar(1.0), g - m, g)
        v = fma(scalar(1 - b2) * g, g, scalar(b2) * v)
        shown = v
        if self.max_exp_avg_sq is not None:
            self.max_exp_avg_sq = shown = torch.maximum(self.max_exp_avg_sq, v)
        d = sqrt(shown) / sqrt_bc2 + scalar(self.eps)
        if self.decoupled:
            p = p * scalar(1 - self.lr * self.weight_decay)
        p = p - (step_size * m) / d

        self.exp_avg, self.exp_avg_sq = m, v
        if self.residual is not None:
            self.weight, self.residual = encode(p)
        elif self.full is not None:
            self.weight, self.full = round_to(p, self.weight.dtype), p
        else:
            self.weight = p

    def assert_equal(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, what: str = "") -> None:
        """Fail unless the optimizer's weight and state of a parameter are these, bit for bit."""
        assert_same(parameter, self.weight, f"{what} weight")
        state = optimizer.state[parameter]
        assert float(state["step"]) == self.step_count, f"{what} step"
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "residual"):
            wanted = getattr(self, name)
            assert (name in state) == (wanted is not None), f"{what} {name}"
            if wanted is not None:
                assert_same(state[name], wanted, f"{what} {name}")
        if self.full is not None:
            assert_same(state["master"], self.full, f"{what} master")


def clip_factor(max_norm: float, norm: float) -> float:
    """Return torch's factor, formed in float64."""
    return min(1.0, max_norm / (norm + 1e-6))


def norm64(tensors: list[torch.Tensor]) -> float:
    """Return the norm of all tensors together, in float64."""
    squares = [torch.linalg.vector_norm(t.detach().double()).item() ** 2 for t in tensors]
    return math.sqrt(math.fsum(squares))


# ---- what the mathematics says


class Ref:
    """AdamW (or Adam) in float64."""

    def __init__(
        self,
        weight: torch.Tensor,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        decoupled: bool = True,
    ) -> None:
        self.weight = weight.detach().double().clone()
        self.lr, self.betas, self.eps = lr, betas, eps
        self.weight_decay, self.decoupled = weight_decay, decoupled
        self.m = torch.zeros_like(self.weight)
        self.v = torch.zeros_like(self.weight)
        self.t = 0

    def step(self, grad: torch.Tensor) -> None:
        """Do one step."""
        self.t += 1
        b1, b2 = self.betas
        g = grad.detach().double()
        if not self.decoupled:
            g = g + self.weight_decay * self.weight
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        if self.decoupled:
            self.weight = self.weight * (1 - self.lr * self.weight_decay)
        m_hat, v_hat = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        self.weight = self.weight - self.lr * m_hat / (v_hat.sqrt() + self.eps)


def ref(weight: torch.Tensor, grads: list[torch.Tensor], **settings: object) -> torch.Tensor:
    """Return the weight after one float64 step per gradient."""
    reference = Ref(weight, **settings)  # type: ignore[arg-type]
    for grad in grads:
        reference.step(grad)
    return reference.weight
