"""Plans by time: the seconds of each step on a chip's torus, as the `cost` that `scaling.algebra` minimizes (Part 3).

matmul(a, b, out, sizes, mesh, cost=seconds_on(chip("v5p"), sizes, mesh))
"""

from collections.abc import Callable
from functools import lru_cache

from scaling import cost
from scaling.algebra.steps import COLLECTIVES, Step
from scaling.hardware import Chip
from scaling.spec import mesh_sizes


def seconds_on(chip: Chip, sizes, mesh, dtype="bf16", flops: bool = True) -> Callable[[Step], float]:
    """Return a function from a Step to its seconds, where each mesh axis is an axis of the torus of that length.

    Collectives take the time of `scaling.cost.collectives`, products run at the chip's peak (or are free with
    `flops=False`), and slices and the like take no time. Equal arguments give the identical function, so that plans
    made with it are cached.
    """
    return _seconds_on(chip, tuple(sizes.items()), tuple(mesh_sizes(mesh).items()), dtype, flops)


@lru_cache(maxsize=256)
def _seconds_on(chip: Chip, dims: tuple, axes: tuple, dtype, flops: bool) -> Callable[[Step], float]:
    sizes, mesh = dict(dims), dict(axes)

    def seconds(step: Step) -> float:
        if step.op in COLLECTIVES:
            lengths = tuple(mesh[axis] for axis in step.axes)
            return cost.seconds(step.op, step.nbytes(sizes, mesh, dtype), chip, lengths)
        return step.flops(sizes, mesh) / chip.flops(dtype) if flops else 0.0

    return seconds
