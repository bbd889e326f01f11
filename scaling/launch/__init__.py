"""Start ranks, here or under torchrun, and watch them."""

from scaling.launch.ranks import can_fork, fit_mesh, free_memory, keep_freed_memory, run, start, start_by_torchrun
from scaling.launch.watch import RankError
from scaling.spec.sizes import parse_mesh

__all__ = [
    "RankError",
    "can_fork",
    "fit_mesh",
    "free_memory",
    "keep_freed_memory",
    "parse_mesh",
    "run",
    "start",
    "start_by_torchrun",
]
