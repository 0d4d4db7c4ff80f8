"""`outboard.AdamW` and `outboard.Adam`."""

from __future__ import annotations

from typing import Any

import torch

from outboard._arguments import check_torch_switches
from outboard._host import HostOptimizer

#: Elements that one worker takes at once: 1 MiB of each fp32 plane.
CHUNK_ELEMS = 256 * 1024


class _AdamFamily(HostOptimizer):
    """The one constructor; the classes differ in their rule of weight decay and its default."""

    _default_weight_decay: float

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool | None = None,
        mode: str = "auto",
        max_grad_norm: float | None = None,
        compute_grad_norm: bool = False,
        nonfinite: str | None = None,
        state_dtype: torch.dtype = torch.float32,
        master: str = "split",
        threads: int | None = None,
        chunk_elems: int = CHUNK_ELEMS,
        seed: int = 0,
    ) -> None:
        if weight_decay is None:
            weight_decay = self._default_weight_decay
        if decoupled_weight_decay is None:
            decoupled_weight_decay = self._decoupled
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        self._check_rules(defaults)
        check_torch_switches(
            lr=lr,
            betas=betas,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        defaults["betas"] = tuple(float(beta) for beta in betas)
        super().__init__(
            params,
            defaults,
            mode=mode,
            max_grad_norm=max_grad_norm,
            compute_grad_norm=compute_grad_norm,
            nonfinite=nonfinite,
            state_dtype=state_dtype,
            master=master,
            threads=threads,
            chunk_elems=chunk_elems,
            seed=seed,
        )


class AdamW(_AdamFamily):
    r"""AdamW whose state lives in the arena, with the bits of `torch.optim.AdamW(fused=True)` on fp32 CPU tensors.

    I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", ICLR 2019. The order of operations is in
    docs/numerics.md.

    Parameters
    ----------
    params : iterable
        Parameters, named parameters or groups, as torch takes them. fp32, bf16 or fp16, in host memory, of any shape
        and strides; gradients may have any of the three dtypes.
    lr : float or one-element Tensor
        Learning rate. Read at each step.
    betas : pair of float
        Decay rates of the moments, in [0, 1).
    eps : float
        Added to the root of the second moment.
    weight_decay : float
        Each step multiplies weights by ``1 - lr * weight_decay``. Default 0.01.
    amsgrad : bool
        Use the maximum of all second moments so far. S. J. Reddi, S. Kale, S. Kumar, ICLR 2018.
    maximize : bool
        Climb instead of descending.
    mode : {"auto", "cpu", "gpu"}
        Where updates are computed. For parameters in host memory "auto" is "cpu"; "gpu" raises `DeviceError`.
    max_grad_norm : float, optional
        Scale gradients by ``min(1, max_grad_norm / (norm + 1e-6))``, as `torch.nn.utils.clip_grad_norm_` does, where
        norm is that of all gradients together. `p.grad` is not changed. May be set between steps.
    compute_grad_norm : bool
        Report `last_grad_norm` without clipping. May be set between steps.
    nonfinite : {None, "skip", "raise", "propagate"}
        What a step with an infinite or NaN gradient does. "skip": changes nothing, is counted, warns once. "raise":
        changes nothing and raises `NonFiniteError`. "propagate": as torch. None: "skip" where a norm is computed, else
        "propagate". May be set between steps.
    state_dtype : torch.float32 or torch.bfloat16
        Of the moments. bf16 ones are rounded stochastically, from a counter, so they too are reproducible.
    master : {"split", "full"}
        How fp32 values of bf16 weights are kept: as a 16-bit residual beside the weight, or as an fp32 copy. fp16
        weights always have a full one.
    threads : int, optional
        Worker threads. None: the CPUs this process may use, shared with the other ranks of this machine.
    chunk_elems : int
        Elements that one worker takes at once. Changes no bits.
    seed : int
        Of the stochastic rounding.
    foreach, fused : bool, optional
        Accepted and ignored: there is one implementation.
    capturable, differentiable : bool
        Only False.

    Raises
    ------
    TypeError, ValueError
        As torch, for values of another type or out of range.
    DeviceError
        For parameters on another device than the CPU.
    """

    _decoupled = True
    _default_weight_decay = 1e-2


class Adam(_AdamFamily):
    r"""Adam whose state lives in the arena, with the bits of `torch.optim.Adam(fused=True)` on fp32 CPU tensors.

    D. P. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015. As `AdamW`, but weight decay is
    coupled: `weight_decay * weight` (default 0) is added to the gradient.
    """

    _decoupled = False
    _default_weight_decay = 0.0
