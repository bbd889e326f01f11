"""The systems of the book "How to Scale Your Model" as pure functions in PyTorch.

    from scaling import Mesh, all_gather, derive, einsum, parse, run

These names are loaded when they are first used, so that `import scaling` takes no time and loads no torch. The
subpackages can be used directly, too: `scaling.optim`, `scaling.strategies`, `scaling.trace` ...
"""

from typing import TYPE_CHECKING

from scaling.common.lazy import lazy

if TYPE_CHECKING:
    from scaling import algebra, cost, data, models, optim, schedules, strategies, trace, train, tree
    from scaling.algebra import derive, matmul
    from scaling.collectives import (
        all_gather,
        all_reduce,
        all_to_all,
        broadcast,
        einsum,
        gather,
        masked,
        ppermute,
        reduce,
        reduce_scatter,
        reshard,
        scatter,
        shard,
        unshard,
        wait,
    )
    from scaling.hardware import chip
    from scaling.launch import run
    from scaling.mesh import AbstractMesh, Mesh
    from scaling.spec import ShardingError, Spec, parse, parse_line

__version__ = "0.1.0"
__all__ = [
    "AbstractMesh", "Mesh", "ShardingError", "Spec", "__version__", "algebra", "all_gather", "all_reduce", "all_to_all",
    "broadcast", "chip", "cost", "data", "derive", "einsum", "gather", "masked", "matmul", "models", "optim", "parse",
    "parse_line", "ppermute", "reduce", "reduce_scatter", "reshard", "run", "scatter", "schedules", "shard",
    "strategies", "trace", "train", "tree", "unshard", "wait",
]  # fmt: skip

_HOMES = {  # module -> what of it stands here
    "scaling.algebra": ("derive", "matmul"),
    "scaling.collectives": (
        "all_gather", "all_reduce", "all_to_all", "broadcast", "einsum", "gather", "masked", "ppermute", "reduce",
        "reduce_scatter", "reshard", "scatter", "shard", "unshard", "wait",
    ),
    "scaling.hardware": ("chip",),
    "scaling.launch": ("run",),
    "scaling.mesh": ("AbstractMesh", "Mesh"),
    "scaling.spec": ("ShardingError", "Spec", "parse", "parse_line"),
}  # fmt: skip

__getattr__, __dir__ = lazy("scaling", _HOMES, __all__)
