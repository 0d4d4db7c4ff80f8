"""State of any torch optimizer in host memory between steps: `outboard.offload_state`."""

from outboard._offload._state_offload import StateOffload, offload_state

__all__ = ["StateOffload", "offload_state"]
