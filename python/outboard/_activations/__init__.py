"""Activations that spend the time between forward and backward in host memory."""

from outboard._activations._handle import ActivationOffload, offload_activations
from outboard._activations._saved import ActivationError

__all__ = ["ActivationError", "ActivationOffload", "offload_activations"]
