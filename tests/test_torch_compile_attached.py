"""Compiled functions and backward passes around a model that is attached as it is, not compiled by itself.

Hooks that wait are not traced: a compiled caller breaks its graph at them, and says why where it may not. A compiled
backward has no hooks of outboard's in it: `step()` takes its gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from fused import EAGER, EAGER_IDS, FusedRig
from test_torch_compile import Model, batch, compiler, loss

__all__ = ["compiler"]
pytestmark = [
    pytest.mark.usefixtures("small_ones_have_hooks", "compiler"),
    # torch's compiler's own: of gradients that it looks for, and of what it makes of hooks.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]


@pytest.mark.parametrize("when", EAGER[:3], ids=EAGER_IDS[:3])
@pytest.mark.parametrize("how", ["a function", "torch.compile", "model.compile"])
def test_a_graph_breaks_at_modules_that_wait(lanes_device, how, when, recwarn) -> None:
    """Right, in pieces: one for each module, which are compiled once, and none of outboard's own functions."""
    rig = FusedRig(lanes_device, Model(), loss, lr=0.01, **when)
    counter = CompileCounter()
    called: Any = rig.model
    if how == "a function":
        called = torch.compile(lambda x: rig.model(x), backend=counter)
    elif how == "torch.compile":
        called = torch.compile(rig.model, backend=counter)
    else:
        rig.model.compile(backend=counter)
    frames = []
    for step in range(5):
        called(batch(rig.model, step)).square().mean().backward()
        rig.opt.step()
        rig.opt.zero_grad()
        rig.loss(rig.their_model, step).backward()
        rig.twin.step()
        frames.append(counter.frame_count)
    # A weight that another module reads is marked from the second step on: that is compiled for once more.
    assert frames[1] == frames[-1] <= frames[0] + 1, frames
    assert not [w for w in recwarn if "perf_counter" in str(w.message)]
    rig.check()


def test_why_there_is_no_full_graph(lanes_device) -> None:
    rig = FusedRig(lanes_device, Model(), loss, lr=0.01)
    graph = torch.compile(rig.model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compile the model first, and attach\(\) what"):
        graph(batch(rig.model, 0))
    rig.opt.attach(graph)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's, of what it cannot trace
@pytest.mark.parametrize("when", EAGER, ids=EAGER_IDS)
def test_compiled_autograd(lanes_device, when) -> None:
    """Updates begin at `step()`, whatever `eager` says."""
    rig = FusedRig(lanes_device, Model(), loss, lr=0.01, **when)
    counter = CompileCounterWithBackend("eager")
    for number in range(4):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=counter)):
            rig.loss(rig.model, number).backward()
        rig.opt.step()
        rig.opt.zero_grad()
        rig.loss(rig.their_model, number).backward()
        rig.twin.step()
    assert counter.frame_count >= 1, "backward has been compiled"
    assert rig.eager_updates == 0
    rig.check()
    # And the usual backward begins in backward as before.
    for number in range(4, 7):
        rig.step(number)
    assert (rig.eager_updates > 0) == (when["eager"] is not False)
    rig.check()
