"""Seconds of a collective of a mesh on the chips that it is laid on: a torus, a tree of switches, or as measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scaling.cost.lanes import AxisSpan, Lane, measured_lane, torus_lane, tree_lane
from scaling.hardware import Chip


def place_axes(shape: Sequence[int], sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Each mesh axis as lengths along the axes of a slice, in the order given: Y = 8, Z = 2 on 4x4 are (4, 2), (1, 2).

    ValueError where the sizes do not fill the slice so.
    """
    left, placed = list(shape), {}
    for axis, size in sizes.items():
        own, rest = [1] * len(left), size
        for i, room in enumerate(left):
            own[i] = math.gcd(room, rest)
            left[i], rest = room // own[i], rest // own[i]
        if rest > 1:
            raise ValueError(
                f"{dict(sizes)} on a slice of {'x'.join(map(str, shape))}: {axis} = {size} does not fit"
                "\n  fix: choose sizes of which the product is the slice's number of chips"
            )
        placed[axis] = tuple(own)
    if math.prod(left) > 1:
        raise ValueError(
            f"{dict(sizes)} leave chips of a slice of {'x'.join(map(str, shape))} idle"
            "\n  fix: choose sizes that fill the slice"
        )
    return placed


def mesh_lane(
    op: str, axes: Sequence[str], sizes: Mapping[str, int], chip: Chip, shape: Sequence[int] = (),
    wrap: bool | None = None,
) -> Lane:  # fmt: skip
    """What a byte of V costs in a collective over these axes of a mesh, whose `sizes` come innermost first.

    On a torus `shape` is the slice: a mesh axis that is part of a torus axis is a line, a whole one a ring if the slice
    closes it (`wrap`: as if all were). On a tree the axes lie side by side. A hop between stages is a
    CollectivePermute.
    """
    op = {"Recv": "CollectivePermute", "Gather": "AllGather", "Scatter": "AllGather"}.get(op, op)
    names = list(sizes)
    axes = [axis for axis in names if axis in axes and sizes[axis] > 1]
    ranks = math.prod(sizes[axis] for axis in axes)
    if ranks == 1:
        return Lane()
    if chip.measured or chip.kind not in ("gpu", "tpu"):
        return measured_lane(chip, op, ranks)
    if chip.kind == "gpu":
        span = math.prod(sizes[name] for name in names[: names.index(axes[-1]) + 1])
        lane = tree_lane(chip, op, ranks, span // ranks)  # so many GPUs from one of a group to the next
    else:
        placed, rings, spans = place_axes(shape, sizes), chip.wraps(tuple(shape)), []
        for i, side in enumerate(shape):
            if (length := math.prod(placed[axis][i] for axis in axes)) > 1:
                spans.append(AxisSpan(i, length, 1, bool(wrap or rings[i]) and length == side, True))
        lane = torus_lane(chip, op, tuple(spans))
    if op == "AllReduce":  # two passes
        return replace(lane, per_byte=2 * lane.per_byte, latency=2 * lane.latency)
    return replace(lane, per_byte=lane.per_byte / ranks) if op == "AllToAll" else lane


def mesh_seconds(
    op: str, nbytes: float, axes: Sequence[str], sizes: Mapping[str, int], chip: Chip, shape: Sequence[int] = (),
    wrap: bool | None = None,
) -> float:  # fmt: skip
    """Seconds of such a collective of V bytes at the peak, but for the chip's `launch`; or as measured."""
    lane = mesh_lane(op, axes, sizes, chip, shape, wrap)
    if chip.measured:
        return float(lane.forecast(nbytes, chip.efficiency))
    return float(max(lane.seconds(nbytes), chip.efficiency.launch)) if lane.ranks > 1 else 0.0
