"""`outboard.AdamW` and `outboard.Adam`."""

from __future__ import annotations

from typing import Any

import torch

from outboard._arguments import check_torch_switches
from outboard._lanes import MIB, LaneOptions
from outboard._optimizer import OffloadedOptimizer


class _AdamFamily(OffloadedOptimizer):
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
        eager: str | bool = "auto",
        max_grad_norm: float | None = None,
        compute_grad_norm: bool = False,
        nonfinite: str | None = None,
        state_dtype: torch.dtype = torch.float32,
        master: str = "split",
        accumulation_steps: int = 1,
        offload_gradients: bool = False,
        device_state_bytes: float = 0,
        transfer: str = "auto",
        pin: str | bool = "auto",
        max_pinned_bytes: int | None = None,
        device_ring_bytes: int | None = None,
        host_ring_bytes: int = 64 * MIB,
        max_waiting_bytes: int = 8192 * MIB,
        threads: int | None = None,
        chunk_elems: int | None = None,
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
            fused=fused,
        )
        defaults["betas"] = tuple(float(beta) for beta in betas)
        super().__init__(
            params,
            defaults,
            lanes=LaneOptions(
                mode=mode,
                transfer=transfer,
                chunk_elems=chunk_elems,
                device_ring_bytes=device_ring_bytes,
                host_ring_bytes=host_ring_bytes,
                max_waiting_bytes=max_waiting_bytes,
                pin=pin,
                max_pinned_bytes=max_pinned_bytes,
                device_state_bytes=device_state_bytes,
                offload_gradients=offload_gradients,
                accumulation_steps=accumulation_steps,
            ),
            eager=eager,
            max_grad_norm=max_grad_norm,
            compute_grad_norm=compute_grad_norm,
            nonfinite=nonfinite,
            state_dtype=state_dtype,
            master=master,
            threads=threads,
            seed=seed,
        )


class AdamW(_AdamFamily):
    r"""AdamW whose state lives in host memory, with the bits of `torch.optim.AdamW(fused=True)` on fp32 CPU tensors.

    I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", ICLR 2019. The order of operations is in
    docs/numerics.md.

    Parameters
    ----------
    params : iterable
        Parameters, named parameters or groups, as torch takes them. fp32, bf16 or fp16, in host memory or on CUDA
        devices, of any shape and strides; gradients may have any of the three dtypes.
    lr : float or one-element Tensor
        Learning rate. Read at each step, or in backward by updates that begin there (see `eager`).
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
        Where updates of parameters on a device are computed: on the device, with state that is streamed past it, on the
        CPU, or on both at once. Parameters in host memory are updated there in any mode. Changes no bits.
    eager : {"auto", True, False}
        Whether updates of an attached model begin in backward. "auto": once a whole step has shown that nobody touches
        gradients between backward and `step()`, which goes on being checked. True: from the first backward, and
        gradients are freed as they are used; a promise that nobody reads or changes them. False: at `step()`. Options
        that need all gradients first make "auto" wait for `step()`.
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
    accumulation_steps : int
        Backward passes of the attached model that make a step; updates in backward begin in the last one.
    offload_gradients : bool
        Gradients of an attached model leave the device during backward, into host memory: in the weight's dtype, or
        with `accumulation_steps` above 1 added up in fp32.
    device_state_bytes : int or float
        State that stays on the device, for the parameters listed first: bytes for each device, or, as a float, a
        fraction (at most 1.0) of the state of its parameters.
    transfer : {"auto", "staged", "zero_copy"}
        How a device meets state in host memory: by copies through a ring on it, or in place. "auto" measures both once
        for each device of a machine.
    pin : {"auto", True, False}
        Whether state of parameters on devices is pinned. "auto": unless `mode` is "cpu"; what cannot be pinned is
        warned of, and updated on the CPU. True: all of it, or the call that makes it raises (`ValueError` beyond
        `max_pinned_bytes`, `DeviceError` where the system refuses), with nothing made.
    max_pinned_bytes : int, optional
        The most state that may be pinned. None: 0.7 of the machine's memory.
    device_ring_bytes : int, optional
        Of device memory through which state is streamed. None: 20 MiB for each chunk in flight.
    host_ring_bytes : int
        Of pinned host memory, for gradients and weights on their way to the CPU and back.
    max_waiting_bytes : int
        Gradients that may wait for updates begun in backward; backward waits then. One is always let in.
    threads : int, optional
        Worker threads. None: the CPUs this process may use, shared with the other ranks of this machine; for parameters
        on devices an eighth less.
    chunk_elems : int, optional
        Elements that are taken at once, at most. None: 262,144 in host memory, and what a ring's slot holds for
        parameters on devices. Changes no bits.
    seed : int
        Of the stochastic rounding.
    foreach, fused : bool, optional
        Accepted and ignored: there is one implementation. As in torch, not both True, and no `foreach` with tensors.
    capturable, differentiable : bool
        Only False, in groups too. A checkpoint of torch's that has them loads, and its groups have False afterwards.

    Raises
    ------
    TypeError, ValueError
        As torch, for values of another type or out of range; for a choice that is not among those listed, and for
        options that contradict each other.
    DeviceError
        For parameters neither in host memory nor on a CUDA device, and with ``mode="gpu"`` where no CUDA device can be
        used.

    See Also
    --------
    attach : Overlap updates with backward and forward. What is ordered and what is refused: docs/gpu.md.
    """

    _decoupled = True
    _default_weight_decay = 1e-2


class Adam(_AdamFamily):
    r"""Adam whose state lives in host memory, with the bits of `torch.optim.Adam(fused=True)` on fp32 CPU tensors.

    D. P. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015. As `AdamW`, but weight decay is
    coupled: `weight_decay * weight` (default 0) is added to the gradient.
    """

    _decoupled = False
    _default_weight_decay = 0.0
