"""An interrupt as soon as the native half has taken updates over: whoever reads the weights then still waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import outboard
from lanes import Stack, TwinModel, is_pending

pytestmark = [pytest.mark.timeout(60, method="thread"), pytest.mark.usefixtures("small_ones_have_hooks")]


class Interrupted:
    """A native half one of whose calls is followed, or preceded, by Ctrl-C."""

    def __init__(self, core: Any, name: str, *, before: bool = False) -> None:
        self._core, self._name, self._before, self.is_armed = core, name, before, True

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._core, name)
        if name != self._name or not self.is_armed:
            return call

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            self.is_armed = False
            if not self._before:
                call(*args, **kwargs)
            raise KeyboardInterrupt

        return interrupted


def attached(lanes_device: Any, **options: Any) -> tuple[Any, TwinModel, Any]:
    model = Stack(3000, 70_000, 700).to(lanes_device.device)
    twin = TwinModel(model, outboard.AdamW)
    return model, twin, outboard.AdamW(model.parameters(), threads=1, chunk_elems=1_000, **options).attach(model)


@pytest.mark.parametrize("eager", [True, False])
def test_after_updates_have_begun(lanes_device: Any, eager: bool) -> None:
    model, _, opt = attached(lanes_device, eager=eager)
    opt._slots.core = Interrupted(opt._slots.core, "update_one" if eager else "step")
    loss = model.loss(0)
    if eager:
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    else:
        loss.backward()
        with pytest.raises(KeyboardInterrupt):
            opt.step()
    begun = [p for p in model.parameters() if is_pending(p)]
    assert len(begun) == (1 if eager else 3)
    read = [p.detach().clone() for p in begun]
    assert opt.stats()["devices"], "the update has begun"
    opt.synchronize()
    for p, value in zip(begun, read, strict=True):
        assert torch.equal(p, value)


@pytest.mark.parametrize("call", ["wait", "synchronize"])
def test_before_the_wait(lanes_device: Any, call: str) -> None:
    model, twin, opt = attached(lanes_device, eager=False)
    model.loss(0).backward()
    opt.step()
    twin.model.loss(0).backward()
    twin.step()
    opt._slots.core = Interrupted(opt._slots.core, call, before=True)
    first = next(iter(model.parameters()))
    with pytest.raises(KeyboardInterrupt):
        first.sum() if call == "wait" else opt.synchronize()
    assert all(map(is_pending, model.parameters()))
    twin.check(opt)
