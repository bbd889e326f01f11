"""A step captured as a CUDA graph: its kernels start together, without Python (torch.cuda.CUDAGraph).

A replay reads and writes the memory that the capture saw, so params, cache and the static input must stay in place. The
step also runs to warm up, so it must give the same result however often it runs: the values that it writes to the cache
may depend on its input alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaling.configs import Config

WARM_UPS = 2  # runs before the capture, in which libraries allocate their workspaces


def why_eager(config: Config) -> str | None:
    """Return why no step of this model can be compiled or captured, or None."""
    if config.linear:  # capturing would run a step several times
        return f"{config.name} has linear layers, whose states a step changes each time that it runs"
    return None


def why_not(config: Config, mesh: Any, device: torch.device) -> str | None:
    """Return why no step of this model can be captured here, or None if it can."""
    if device.type != "cuda":
        return f"there are no CUDA graphs on {device.type}"
    if getattr(mesh, "checked", False) and mesh.size() > 1:
        return "the ranks of a checked mesh compare their calls on the host"
    return why_eager(config)


class Captured:
    """step(x) -> y of one input on the device, captured for x's shape. Each call returns new memory.

    Args:
        step: The function to capture.
        x: An input of the shape.
        pool: A handle of torch.cuda.graph_pool_handle. Graphs may share it if only one runs at a time.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], x: Tensor, pool: Any):
        self.x = x.clone()
        side = torch.cuda.Stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step(self.x)
        torch.cuda.current_stream(x.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.y = step(self.x)

    def __call__(self, x: Tensor) -> Tensor:
        """Copy x to the static input, replay, and return a copy of the result."""
        self.x.copy_(x)
        self.graph.replay()
        return self.y.clone()
