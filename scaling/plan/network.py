"""A mesh on the chips: where each axis lies, on a torus or on a tree of switches, and the lanes of its collectives.

`scaling.cost.lanes` has the cost of a byte over a lane.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from scaling.cost.lanes import LINKS, AxisSpan, Lane, gather_price, measured_lane, on_links, torus_lane, tree_lane
from scaling.hardware import Chip
from scaling.plan.job import AXES, SHARDS

LANES = {  # lane: the mesh axes of its group
    "tensor": ("tensor",),
    "context": ("context",),
    "expert": ("expert",),
    "weights": ("fsdp", "context", "expert"),  # of these the axes over which ZeRO-3 shards them
    "experts": ("fsdp", "context"),
    "data": ("data", "context", "expert"),  # of these the others
    "experts data": ("data", "context"),
    "pipe": ("pipe",),
    "pod": ("pod",),
}
HOW = {"pipe": "CollectivePermute", "expert": "AllToAll"}  # the other lanes are priced as AllGathers


@dataclass(frozen=True)
class Network:
    """A mesh on the chips: the sizes of AXES, the stage of ZeRO, and its lanes."""

    chip: Chip
    sizes: Mapping[str, int]
    zero: int
    lanes: Mapping[str, Lane]


class Unplaced(ValueError):
    """A mesh that the chips' network cannot hold, with the reason."""


def placed_lanes(
    chip: Chip, sizes: Mapping[str, int], zero: int, shards: Sequence[str],
    lane_of: Callable[[str, tuple[str, ...], int], Lane],
) -> Network:  # fmt: skip
    """Return a network with all lanes of a mesh.

    Args:
        chip: The chip.
        sizes: The sizes of AXES.
        zero: The stage of ZeRO.
        shards: The axes over which ZeRO-3 shards weights.
        lane_of: The function (op, axes, size) -> the lane of a group of `size` chips; pods have their own.
    """
    lanes, split = {}, shards if zero == 3 else ()
    for name, axes in LANES.items():
        if name in ("weights", "experts"):
            axes = tuple(axis for axis in axes if axis in split)
        elif name in ("data", "experts data"):
            axes = tuple(axis for axis in axes if axis not in split)
        if (size := math.prod(sizes[axis] for axis in axes)) == 1:
            lanes[name] = Lane()
        elif name == "pod":
            lanes[name] = Lane(1 / chip.need("dcn_bw"), 0.0, on_links(LINKS - 1), size, "datacenter network")
        else:
            lanes[name] = lane_of(HOW.get(name, "AllGather"), axes, size)
    return Network(chip, sizes, zero, lanes)


def _or_unplaced(lane_of: Callable[..., Lane], *given) -> Lane:
    try:
        return lane_of(*given)
    except ValueError as error:
        raise Unplaced(str(error).splitlines()[0]) from error


# --- A tree of switches: the axes lie side by side, tensor innermost


@lru_cache(maxsize=256)
def _filled(chip: Chip, chips: int) -> Chip:
    """Return the chip in nodes that are filled alike: 64 of 72 GPUs are used if the cluster is no multiple of 72."""
    node, *rest = chip.levels
    even = 2 ** (node.degree.bit_length() - 1)
    if chips <= node.degree or chips % node.degree == 0 or even == node.degree:
        return chip
    if rest:
        rest[0] = replace(rest[0], links=rest[0].links * even // node.degree)
    return replace(chip, levels=(replace(node, degree=even), *rest))


def tree(
    chip: Chip, sizes: Mapping[str, int], zero: int, copies: int = 1, groups: int = 1, shards: Sequence[str] = SHARDS
) -> Network:
    """Return the lanes on a cluster of GPUs.

    Raises:
        Unplaced: The ranks of an axis would sometimes lie across nodes.
    """
    cluster = math.prod(sizes.values())
    chip = _filled(chip, cluster)
    node = chip.node_gpus

    def lane_of(op: str, axes: tuple[str, ...], size: int) -> Lane:
        inner = math.prod(sizes[axis] for axis in AXES[AXES.index(axes[-1]) + 1 :])
        total = size * inner
        if cluster > node and node % total and total % node and total != cluster:
            raise Unplaced(f"groups of {total} GPUs lie across nodes of {node}")
        return _or_unplaced(tree_lane, chip, op, size, inner, copies, groups)

    return placed_lanes(chip, sizes, zero, shards, lane_of)


# --- A torus


Placement = dict[str, tuple[AxisSpan, ...]]  # by mesh axis


def slice_shape(chip: Chip, chips: int) -> tuple[int, ...]:
    """Return the most cubic slice of `chips` chips in the pod, rings first; ValueError if the pod has none."""
    pod = chip.need("pod")
    if chips == chip.pod_chips:
        return tuple(pod)
    shapes = [shape for shape in _shapes(chips, len(pod)) if inside(shape, chip.longest)]
    if not shapes:
        whole, near = "x".join(map(str, pod)), _near(chip, chips)
        raise ValueError(f"{chips:,} chips are not a slice of a {whole} pod of {chip.name}; fix: take {near:,}")
    return min(shapes, key=lambda shape: (not all(chip.wraps(shape)), max(shape) / min(shape)))


def _shapes(chips: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield sorted lengths whose product is `chips`."""
    if axes == 1:
        yield (chips,)
        return
    for length in range(1, round(chips ** (1 / axes)) + 1):
        if chips % length == 0:
            yield from ((length, *rest) for rest in _shapes(chips // length, axes - 1) if rest[0] >= length)


def _near(chip: Chip, chips: int) -> int:
    """Return the largest slice of fewer chips."""
    for fewer in range(min(chips, chip.pod_chips), 0, -1):
        if any(inside(shape, chip.longest) for shape in _shapes(fewer, chip.axes)):
            return fewer
    return 1


def inside(shape: tuple[int, ...], longest: tuple[int, ...]) -> bool:
    """Return whether a slice of these sorted lengths lies inside the longest ones, sorted too."""
    return all(length <= most for length, most in zip(shape, longest, strict=True))


@lru_cache(maxsize=64)
def placements(chip: Chip, shape: tuple[int, ...], axes: tuple[str, ...], most: tuple[int, ...]) -> list[Placement]:
    """Return all ways to lay mesh `axes`, outermost first, on a slice, with sizes of at most `most`."""
    rings = chip.wraps(shape)
    limit = dict(zip(axes, most, strict=True))

    def ways(i: int) -> Iterator[dict[str, AxisSpan]]:
        length, ring = shape[i], rings[i]
        for axis in axes:
            if length <= limit[axis]:
                yield {axis: AxisSpan(i, length, 1, ring, True)}
        for outer, inner in combinations(axes, 2):
            for size in range(2, length):
                if length % size == 0 and size <= limit[inner] and length // size <= limit[outer]:
                    yield {
                        inner: AxisSpan(i, size, 1, False, False),
                        outer: AxisSpan(i, length // size, size, ring, False),
                    }

    found: list[Placement] = []

    def walk(i: int, placed: Placement):
        if i == len(shape):
            found.append(placed)
            return
        if shape[i] == 1:
            walk(i + 1, placed)
            return
        for way in ways(i):
            both = dict(placed)
            for axis, span in way.items():
                spans = (*placed.get(axis, ()), span)
                if sum(not s.whole for s in spans) > 1 or math.prod(s.size for s in spans) > limit[axis]:
                    break
                both[axis] = spans
            else:
                walk(i + 1, both)

    walk(0, {})
    return found


def torus(
    chip: Chip, sizes: Mapping[str, int], zero: int, placed: Placement, copies: int = 1, shards: Sequence[str] = SHARDS
) -> Network:
    """Return the lanes on a slice of a TPU pod, by a placement of the mesh axes."""

    def lane_of(op: str, axes: tuple[str, ...], size: int) -> Lane:
        return torus_lane(chip, op, tuple(span for axis in axes for span in placed.get(axis, ())), copies)

    return placed_lanes(chip, sizes, zero, shards, lane_of)


def book(chip: Chip, sizes: Mapping[str, int], axes: Mapping[str, int], zero: int = 3) -> Network:
    """Return the lanes that Part 5 assumes: each mesh axis spans a number of the torus's rings, of any length."""
    first, placed = 0, {}
    for axis, m in axes.items():
        length = math.ceil(sizes[axis] ** (1 / m))
        placed[axis] = tuple(AxisSpan(first + i, length, 1, True, True) for i in range(m))
        first += m
    return torus(chip, {axis: sizes.get(axis, 1) for axis in AXES}, zero, placed)


# --- Measured


def measured(chip: Chip, sizes: Mapping[str, int], zero: int, shards: Sequence[str] = SHARDS) -> Network:
    """Return the lanes by a chip file's measured AllGathers.

    Each waits for all others, since they share the machine.
    """

    def lane_of(op: str, axes: tuple[str, ...], size: int) -> Lane:
        return _or_unplaced(measured_lane, chip, "AllGather", size)

    return placed_lanes(chip, sizes, zero, shards, lane_of)


# --- All of them


def torus_meshes(chip: Chip, chips: int, pods: int, axes: tuple[str, ...], most: tuple[int, ...]) -> Iterator[tuple]:
    """Yield (sizes, placement) of every mesh of the axes on a slice.

    Of placements with equal sizes, one that is no faster than another in any lane is left out.
    """
    kept: dict[tuple, dict[tuple, Placement]] = {}
    for placed in placements(chip, slice_shape(chip, chips // pods), axes, most):
        sizes = tuple(math.prod(span.size for span in placed.get(axis, ())) for axis in axes)
        price = tuple(gather_price(chip, placed[axis])[0] if axis in placed else 0.0 for axis in axes)
        kept.setdefault(sizes, {}).setdefault(price, placed)
    for sizes, found in kept.items():
        for price, placed in found.items():
            worse = (
                other for other in found if other != price and all(a <= b for a, b in zip(other, price, strict=True))
            )
            if not any(worse):
                yield dict(zip(axes, sizes, strict=True)), placed
