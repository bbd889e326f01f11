"""The lanes of a mesh: what a byte costs in each of its collectives, on a torus, on a tree of switches, or as measured.

A lane is a group of chips that a collective runs over, and which links it loads: lanes over different links can run at
once, those over the same one add up. V is the book's measure, as in `scaling.trace`: the gathered array of one group.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from scaling.cost import gpu
from scaling.hardware import Chip, Efficiency
from scaling.plan.layout import AXES, Amount
from scaling.plan.placement import AxisSpan, Placement, exchange, gather_price, placements, slice_shape

LANES = {  # lane: the mesh axes of its group, under ZeRO-3 and otherwise
    "tensor": (("tensor",), ("tensor",)),
    "context": (("context",), ("context",)),
    "expert": (("expert",), ("expert",)),
    "weights": (("fsdp", "context", "expert"), ()),
    "experts": (("fsdp", "context"), ()),
    "data": (("data",), ("data", "context", "expert")),
    "experts data": (("data",), ("data", "context")),
    "pipe": (("pipe",), ("pipe",)),
    "pod": (("pod",), ("pod",)),
}
LINKS = 4  # of a torus its axes, of a tree the node's and the network's; the last one is the datacenter's


@dataclass(frozen=True)
class Lane:
    """Seconds a byte of V, or of `expert` and `pipe` a byte that a chip sends; at least `latency`; over which links.

    `ranks` of the group; `where`: in words; `near`: over links that kernels drive themselves, so that collectives can
    run behind the matmuls that wait for them (a torus, a node). Numbers may be columns, of many meshes.
    """

    per_byte: Amount = 0.0
    latency: Amount = 0.0
    links: tuple[Amount, ...] = (False,) * LINKS
    ranks: Amount = 1
    where: str = ""
    near: Amount = True

    @staticmethod
    def columns(lanes: Sequence["Lane"]) -> "Lane":
        """Many as one whose numbers are arrays."""
        numbers: dict[str, Any] = {name: np.array([float(getattr(lane, name)) for lane in lanes]) for name in NUMBERS}
        links = zip(*(lane.links for lane in lanes), strict=True)
        return Lane(**numbers, links=tuple(np.array(column, dtype=float) for column in links))

    def take(self, index: np.ndarray) -> "Lane":
        """Rows of columns, by number."""
        numbers: dict[str, Any] = {name: getattr(self, name)[index] for name in NUMBERS}
        return Lane(**numbers, links=tuple(link[index] for link in self.links))

    def seconds(self, nbytes: Amount) -> Amount:
        """Of one collective, at the peak."""
        return np.maximum(self.latency, nbytes * self.per_byte)

    def forecast(self, nbytes: Amount, rate: Efficiency) -> Amount:
        """The same as it is likely to be: starting it and its hops take time beside the bytes."""
        hops = rate.launch + np.maximum(self.latency, (self.ranks - 1) * rate.launch / 16)
        return np.where(self.ranks > 1, hops, 0.0) + nbytes * self.per_byte / rate.links


NUMBERS = ("per_byte", "latency", "ranks", "near")


@dataclass(frozen=True)
class Network:
    """A mesh on the chips: sizes of AXES, whether params are sharded (ZeRO-3), and its lanes."""

    chip: Chip
    sizes: Mapping[str, int]
    zero: int
    lanes: Mapping[str, Lane]

    def seconds(self, op: str, nbytes: float, lane: str) -> float:
        """Seconds of one collective of V bytes; an AllReduce is two passes."""
        return (2 if op == "AllReduce" else 1) * self.lanes[lane].seconds(nbytes)


class Unplaced(ValueError):
    """A mesh that the chips' network cannot hold, with the reason."""


def _on(*links: int) -> tuple[bool, ...]:
    return tuple(i in links for i in range(LINKS))


def pod_lane(chip: Chip, pods: int) -> Lane:
    if pods == 1:
        return Lane()
    return Lane(1 / chip.need("dcn_bw"), 0.0, _on(LINKS - 1), pods, "datacenter network")


# --- A tree of switches: the axes lie side by side, tensor innermost


@lru_cache(maxsize=256)
def _filled(chip: Chip, chips: int) -> Chip:
    """The chip in nodes that are filled alike: of 72 GPUs, 64 are used where the cluster is no multiple of 72."""
    node, *rest = chip.levels
    even = 2 ** (node.degree.bit_length() - 1)
    if chips <= node.degree or chips % node.degree == 0 or even == node.degree:
        return chip
    if rest:
        rest[0] = replace(rest[0], links=rest[0].links * even // node.degree)
    return replace(chip, levels=(replace(node, degree=even), *rest))


def tree(chip: Chip, sizes: Mapping[str, int], zero: int, copies: int = 1, groups: int = 1) -> Network:
    """Lanes on a cluster of GPUs. Unplaced if the ranks of an axis would lie across nodes now and then."""
    cluster = math.prod(sizes.values())
    chip = _filled(chip, cluster)
    node = chip.node_gpus
    lanes = {}
    for name, (sharded, plain) in LANES.items():
        axes = sharded if zero == 3 else plain
        size = math.prod(sizes[axis] for axis in axes)
        inner = math.prod(sizes[axis] for axis in AXES[AXES.index(axes[-1]) + 1 :]) if axes else 1
        if size == 1 or name == "pod":
            lanes[name] = Lane() if size == 1 else pod_lane(chip, size)
            continue
        total = size * inner
        if node % total and total % node and total != cluster:
            raise Unplaced(f"groups of {total} GPUs lie across nodes of {node}")
        if name == "pipe":
            lanes[name] = _hop(chip, inner)
        elif name == "expert":
            lanes[name] = _dispatch(chip, size, inner, copies, groups)
        else:
            lanes[name] = _tree_lane(chip, size, inner)
    return Network(chip, sizes, zero, lanes)


@lru_cache(maxsize=16384)
def _tree_lane(chip: Chip, size: int, inner: int) -> Lane:
    try:
        spans = gpu.spans(chip, size, inner)
    except ValueError as error:
        raise Unplaced(str(error).splitlines()[0]) from error
    across = any(below >= chip.node_gpus for below, *_ in spans)
    where = "network" if across else "node"
    return Lane(gpu.all_gather(inner, chip, size, inner), 0.0, _on(int(across)), size, where, near=not across)


@lru_cache(maxsize=1024)
def _hop(chip: Chip, inner: int) -> Lane:
    """A hop between stages: a GPU's own links in a node, its share of the node's beyond."""
    across = inner >= chip.node_gpus
    return Lane(1 / gpu.hop_bandwidth(chip, inner), 0.0, _on(int(across)), 2, "network" if across else "node")


@lru_cache(maxsize=4096)
def _dispatch(chip: Chip, size: int, inner: int, copies: int, groups: int) -> Lane:
    """Tokens to experts: each copy over the node's links, at most one a node over the network (Part 12)."""
    node = chip.node_gpus
    nodes = max(1, size * inner // node)
    inside = copies * (1 - 1 / size) / chip.need("levels")[0].group_bw(min(size * inner, node))
    if nodes == 1:
        return Lane(inside, 0.0, _on(0), size, "node")
    sent = min(copies, nodes, groups) * (1 - 1 / nodes)
    beyond = sent / (chip.bandwidth("scale-out") / node)
    return Lane(max(inside, beyond), 0.0, _on(1), size, "network", near=False)


# --- A torus


def torus(chip: Chip, sizes: Mapping[str, int], zero: int, placed: Placement, copies: int = 1) -> Network:
    """Lanes on a slice of a TPU pod, by a placement of the mesh axes."""
    lanes = {}
    for name, (sharded, plain) in LANES.items():
        axes = sharded if zero == 3 else plain
        size = math.prod(sizes[axis] for axis in axes)
        if size == 1 or name == "pod":
            lanes[name] = Lane() if size == 1 else pod_lane(chip, size)
            continue
        spans = tuple(span for axis in axes for span in placed.get(axis, ()))
        lanes[name] = _torus_lane(chip, name, spans, size, copies)
    return Network(chip, sizes, zero, lanes)


@lru_cache(maxsize=65536)
def _torus_lane(chip: Chip, name: str, spans: tuple[AxisSpan, ...], size: int, copies: int) -> Lane:
    links = _on(*(span.torus for span in spans))
    where = " x ".join(str(span) for span in spans)
    if name == "pipe":
        stride = min(span.stride for span in spans)
        return Lane(stride / chip.need("link_bw"), stride * chip.hop_latency, links, 2, where)
    if name == "expert":
        per_byte, latency = exchange(chip, spans)
        return Lane(per_byte * copies, latency, links, size, where)
    return Lane(*gather_price(chip, spans), links, size, where)


def book(chip: Chip, sizes: Mapping[str, int], axes: Mapping[str, int], zero: int = 3) -> Network:
    """Lanes as Part 5 assumes them: each mesh axis spans so many rings of the torus, of whatever length."""
    first, placed = 0, {}
    for axis, m in axes.items():
        length = math.ceil(sizes[axis] ** (1 / m))
        placed[axis] = tuple(AxisSpan(first + i, length, 1, True, True) for i in range(m))
        first += m
    return torus(chip, {axis: sizes.get(axis, 1) for axis in AXES}, zero, placed)


# --- Measured


def measured(chip: Chip, sizes: Mapping[str, int], zero: int) -> Network:
    """Lanes from a chip file's measured AllGathers; every lane waits for every other: they share the machine."""
    lanes, rows = {}, {row.ranks: row for row in chip.measured if row.op == "AllGather"}
    for name, (sharded, plain) in LANES.items():
        size = math.prod(sizes[axis] for axis in (sharded if zero == 3 else plain))
        if size == 1:
            lanes[name] = Lane()
        elif size in rows:
            lanes[name] = Lane(1 / rows[size].bandwidth, rows[size].latency, _on(0), size, "measured")
        else:
            has = ", ".join(map(str, rows)) or "none"
            raise Unplaced(f"an AllGather over {size} ranks was not measured (of ranks: {has})")
    return Network(chip, sizes, zero, lanes)


# --- All of them


def torus_meshes(chip: Chip, chips: int, pods: int, axes: tuple[str, ...], most: tuple[int, ...]) -> Iterator[tuple]:
    """(sizes, placement) of every mesh of the axes on a slice; of equal sizes only what is not worse in all lanes."""
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
