"""Checkpoints of optimizers: files that are whole or not there, with progress, as torch's own or as safetensors.

`from_torchao`, `from_bitsandbytes` and `from_deepspeed` read what these libraries have saved, without their code.
Converting is done in torch, tensor by tensor; nothing here is used by a step.
"""

from outboard.checkpoint._bitsandbytes import from_bitsandbytes
from outboard.checkpoint._deepspeed import from_deepspeed
from outboard.checkpoint._foreign import read_foreign
from outboard.checkpoint._match import load_matched
from outboard.checkpoint._safetensors import load_safetensors, save_safetensors
from outboard.checkpoint._torch import load, save
from outboard.checkpoint._torchao import from_torchao

__all__ = [
    "save",
    "load",
    "save_safetensors",
    "load_safetensors",
    "load_matched",
    "read_foreign",
    "from_torchao",
    "from_bitsandbytes",
    "from_deepspeed",
]
