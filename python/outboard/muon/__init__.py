"""Muon: momentum orthogonalised by Newton-Schulz, for matrices, and AdamW for the rest.

`Muon` is the optimizer, `param_groups` makes the usual split of a model, `set_ns_compile` turns compilation of the
Newton-Schulz iteration off and on.
"""

from outboard.muon._clip import parse_qk_name
from outboard.muon._groups import param_groups
from outboard.muon._newton_schulz import ns_compile, orthogonalize, set_ns_compile
from outboard.muon._optimizer import Muon

__all__ = ["Muon", "ns_compile", "orthogonalize", "param_groups", "parse_qk_name", "set_ns_compile"]
