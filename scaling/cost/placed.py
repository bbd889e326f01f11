"""Seconds of a collective of a mesh on the chips that it is laid on: a torus, a tree of switches, or as measured."""

import math
from collections.abc import Mapping, Sequence

from scaling.cost import collectives as torus
from scaling.cost import gpu
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


def mesh_seconds(
    op: str, nbytes: float, axes: Sequence[str], sizes: Mapping[str, int], chip: Chip, shape: Sequence[int] = (),
    wrap: bool | None = None,
) -> float:  # fmt: skip
    """Seconds of a collective of V bytes over these axes of a mesh, whose `sizes` come innermost first.

    On a torus `shape` is the slice: a mesh axis that is part of a torus axis is a line, a whole one a ring if the slice
    closes it (`wrap`: as if all were). On a tree the axes lie side by side, and a collective takes the chip's `launch`
    at least. A hop between stages is a CollectivePermute.
    """
    op = "CollectivePermute" if op == "Recv" else op
    axes = [axis for axis in sizes if axis in axes and sizes[axis] > 1]
    ranks = math.prod(sizes[axis] for axis in axes)
    if ranks == 1:
        return 0.0
    if chip.measured or chip.kind not in ("gpu", "tpu"):
        return torus.seconds(op, nbytes, chip, ranks)
    if chip.kind == "gpu":
        return max(_on_tree(op, nbytes, axes, sizes, chip, ranks), chip.efficiency.launch)
    placed = place_axes(shape, sizes)
    lengths = [math.prod(placed[axis][i] for axis in axes) for i in range(len(shape))]
    rings = [(wrap or ring) and length == side for length, ring, side in
             zip(lengths, chip.wraps(tuple(shape)), shape, strict=True)]  # fmt: skip
    return torus.seconds(op, nbytes, chip, lengths, rings)


def _on_tree(op: str, nbytes: float, axes: list[str], sizes: Mapping[str, int], chip: Chip, ranks: int) -> float:
    names = list(sizes)
    span = names[: names.index(axes[-1]) + 1]
    inner = math.prod(sizes[name] for name in span) // ranks  # GPUs from one of a group to the next
    if op == "CollectivePermute":
        return nbytes / gpu.hop_bandwidth(chip, inner)
    if op == "AllToAll":
        return gpu.all_to_all(nbytes, chip, ranks)
    return (2 if op == "AllReduce" else 1) * gpu.all_gather(nbytes * inner, chip, ranks, inner)
