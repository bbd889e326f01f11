"""Lanes: the seconds per byte of a collective over a group of chips: on a torus, on a tree of switches, or measured.

Every price of a collective comes from here: the book's for whole axes of a torus (`collectives`), the prices of a mesh
that lies on chips (`mesh_lane`), and the prices of all meshes that the planner compares. V is the book's measure, as in
`scaling.trace`: the gathered array of one group.

On a torus a mesh axis takes whole torus axes, and at most a part of a further one, shared with another mesh axis: a
part inside is a line of neighbours, a part outside a ring with a stride. On 16x20x28, TP 8 is half of the axis of 16.
It is a line, whose links run one way, so it has half the bandwidth of a ring (Part 2, "TPU Networking"; Part 3, "A
Deeper Dive ...").
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from scaling.cost import gpu
from scaling.hardware import Chip, Efficiency

if TYPE_CHECKING:  # only columns need it, which the planner uses and the playground does not
    import numpy as np

Amount = Any  # a number, or an array of numbers with the same arithmetic
LINKS = 4  # the axes of a torus, or a tree's node and network; the last is the datacenter
NUMBERS = ("per_byte", "latency", "ranks", "near")


@dataclass(frozen=True)
class Lane:
    """The price of a collective over a group of chips. Numbers may be columns, one entry for each of many meshes.

    Attributes:
        per_byte: Seconds per byte of V; for AllToAlls and hops, per byte that a chip sends.
        latency: The least seconds.
        links: Whether each kind of link is used: the axes of a torus, or a tree's node and network; the last is the
            datacenter's. Lanes over different links can run at once, over a common link they add up.
        ranks: The ranks of the group.
        where: The links in words.
        near: Whether kernels drive the links themselves (a torus, a node), so that collectives can run behind the
            matmuls that wait for them.
    """

    per_byte: Amount = 0.0
    latency: Amount = 0.0
    links: tuple[Amount, ...] = (False,) * LINKS
    ranks: Amount = 1
    where: str = ""
    near: Amount = True

    @staticmethod
    def columns(lanes: Sequence["Lane"]) -> "Lane":
        """Return many lanes as one with columns."""
        import numpy as np

        numbers: dict[str, Any] = {name: np.array([float(getattr(lane, name)) for lane in lanes]) for name in NUMBERS}
        links = zip(*(lane.links for lane in lanes), strict=True)
        return Lane(**numbers, links=tuple(np.array(column, dtype=float) for column in links))

    def take(self, index: "np.ndarray") -> "Lane":
        """Return the entries at `index` of a lane with columns, again as columns."""
        numbers: dict[str, Any] = {name: getattr(self, name)[index] for name in NUMBERS}
        return Lane(**numbers, links=tuple(link[index] for link in self.links))

    def seconds(self, nbytes: Amount) -> Amount:
        """Return the seconds of one collective at the peak."""
        import numpy as np

        return np.maximum(self.latency, nbytes * self.per_byte)

    def forecast(self, nbytes: Amount, rate: Efficiency) -> Amount:
        """Return the likely seconds of one collective, which include its launch and hops."""
        import numpy as np

        hops = rate.launch + np.maximum(self.latency, (self.ranks - 1) * rate.launch / 16)
        return np.where(self.ranks > 1, hops, 0.0) + nbytes * self.per_byte / rate.links


def on_links(*links: int) -> tuple[bool, ...]:
    """Return the `links` of a lane that uses these links, given by number."""
    return tuple(i in links for i in range(LINKS))


# --- On a torus


@dataclass(frozen=True)
class AxisSpan:
    """The part of a torus axis that a mesh axis takes: `size` chips, `stride` apart, with joined ends if a `ring`."""

    torus: int
    size: int
    stride: int
    ring: bool
    whole: bool

    @property
    def ports(self) -> float:
        """The bandwidth in links: two for a ring, one for a line; the `stride` groups that interleave share it."""
        return (2 if self.ring else 1) / self.stride

    @property
    def hops(self) -> int:
        """Hops of the farthest bytes: X/2 on a ring of X (both ways round), X - 1 on a line."""
        return (self.size // 2 if self.ring else self.size - 1) * self.stride

    def __str__(self) -> str:
        shape = "ring" if self.ring else "line"
        return f"{shape} of {self.size}" + (f", every {self.stride}th" if self.stride > 1 else "")


def join_spans(spans: Sequence[AxisSpan]) -> tuple[AxisSpan, ...]:
    """Join the spans of several mesh axes: two parts of the same torus axis become one span, the whole axis."""
    found: dict[int, AxisSpan] = {}
    for span in spans:
        if (other := found.get(span.torus)) is None:
            found[span.torus] = span
        else:
            ring = span.ring or other.ring
            found[span.torus] = AxisSpan(span.torus, span.size * other.size, 1, ring, True)
    return tuple(found.values())


def latency_of(chip: Chip, spans: Sequence[AxisSpan]) -> float:
    """Return the seconds of the hops over these spans."""
    return sum(span.hops for span in spans) * chip.hop_latency


def gather_price(chip: Chip, spans: Sequence[AxisSpan], exact: bool = False) -> tuple[float, float]:
    """Return (seconds per byte of V, latency) of an AllGather, or a ReduceScatter, over these spans.

    The gather runs over parts of torus axes first, the slowest of them first while there is little to send, and then
    over all whole axes at once. For the whole axes, the share that each chip already has is subtracted only if all of
    them are lines, or with `exact`.
    """
    spans = join_spans(spans)
    link = chip.need("link_bw")
    size = math.prod(span.size for span in spans)
    parts = sorted((span for span in spans if not span.whole), key=lambda span: span.ports)
    whole = [span for span in spans if span.whole]
    seconds, held = 0.0, 1
    for span in parts:
        held *= span.size
        lacking = 1 if span.ring else 1 - 1 / span.size
        seconds += held / size * lacking / (span.ports * link)
    if whole:
        lacking = 1 - 1 / math.prod(span.size for span in whole) if exact or not any(s.ring for s in whole) else 1
        seconds += lacking / (sum(span.ports for span in whole) * link)
    return seconds, latency_of(chip, spans)


def exchange(chip: Chip, spans: Sequence[AxisSpan], exact: bool = False) -> tuple[float, float]:
    """Return (seconds per byte that a chip sends in all, latency) of an AllToAll over the slowest of these spans.

    A line has half the links of a ring, so it takes twice as long. `exact` counts odd lengths exactly (1 - 1/X^2, as
    the middle of an odd axis is a chip).
    """
    spans, link = join_spans(spans), chip.need("link_bw")
    times = [
        span.size * (1 - 1 / span.size**2 if exact and span.size % 2 else 1) / (4 * span.ports * link) for span in spans
    ]
    return max(times, default=0.0), latency_of(chip, spans)


@lru_cache(maxsize=65536)
def torus_lane(chip: Chip, op: str, spans: tuple[AxisSpan, ...], copies: int = 1) -> Lane:
    """Return the lane of a group on these spans. In an AllToAll each chip sends its bytes `copies` times."""
    links, where = on_links(*(span.torus for span in spans)), " x ".join(str(span) for span in spans)
    ranks = math.prod(span.size for span in spans)
    if op == "CollectivePermute":
        stride = min(span.stride for span in spans)
        return Lane(stride / chip.need("link_bw"), stride * chip.hop_latency, links, 2, where)
    if op == "AllToAll":
        per_byte, latency = exchange(chip, spans)
        return Lane(per_byte * copies, latency, links, ranks, where)
    return Lane(*gather_price(chip, spans), links, ranks, where)


# --- On a tree of switches


@lru_cache(maxsize=16384)
def tree_lane(chip: Chip, op: str, size: int, inner: int, copies: int = 1, groups: int = 1) -> Lane:
    """Return the lane of `size` GPUs, `inner` apart.

    A hop runs over a GPU's own links in a node, and over its share of the node's links beyond. In an AllToAll each copy
    runs over the node's links, and at most one per node and group over the network (Part 12).
    """
    node = chip.node_gpus
    if op == "CollectivePermute":
        across, per_byte, size = inner >= node, 1 / gpu.hop_bandwidth(chip, inner), 2
    elif op == "AllToAll":
        nodes = -(-size * inner // node)
        across = nodes > 1
        per_byte = copies * (1 - 1 / size) / chip.need("levels")[0].group_bw(min(size * inner, node))
        if across:
            sent = min(copies, nodes, groups) * (1 - 1 / nodes)
            per_byte = max(per_byte, sent / (chip.bandwidth("scale-out") / node))
    else:
        across = any(below >= node for below, *_ in gpu.spans(chip, size, inner))
        per_byte = gpu.all_gather(inner, chip, size, inner)
    near = op == "CollectivePermute" or not across
    return Lane(per_byte, 0.0, on_links(int(across)), size, "network" if across else "node", near)


# --- As measured


def measured_lane(chip: Chip, op: str, ranks: int) -> Lane:
    """Return the measured lane of a collective over this many ranks. Raise a ValueError if it was not measured."""
    for row in chip.measured:
        if (row.op, row.ranks, row.alone) == (op, ranks, False):
            return Lane(1 / row.bandwidth, row.latency, on_links(0), ranks, "measured")
    has = ", ".join(f"{row.op} over {row.ranks}" for row in chip.measured) or "none"
    raise ValueError(
        f"{chip.name}: {op} over {ranks} ranks was not measured (there is: {has})"
        "\n  fix: measure it (python -m scaling.measure), or choose what is there"
    )


# --- Of a mesh on the chips that it is laid on


def place_axes(shape: Sequence[int], sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the lengths of each mesh axis along the axes of a slice: Y = 8, Z = 2 on 4x4 are (4, 2), (1, 2).

    Axes are placed in the order given. Sizes that do not fill the slice in this way are a ValueError.
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


def mesh_lane(op: str, axes: Sequence[str], sizes: Mapping[str, int], chip: Chip, shape: Sequence[int] = ()) -> Lane:
    """Return the lane of a collective over these axes of a mesh, whose `sizes` come innermost first.

    On a torus of the slice `shape`, a mesh axis that takes a part of a torus axis is a line, and one that takes the
    whole is a ring if the slice closes it. On a tree the axes are nested. A hop
    between stages is a CollectivePermute.
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
        lane = tree_lane(chip, op, ranks, span // ranks)  # the stride of the group in GPUs
    else:
        placed, rings, spans = place_axes(shape, sizes), chip.wraps(tuple(shape)), []
        for i, side in enumerate(shape):
            if (length := math.prod(placed[axis][i] for axis in axes)) > 1:
                spans.append(AxisSpan(i, length, 1, rings[i] and length == side, True))
        lane = torus_lane(chip, op, tuple(spans))
    if op == "AllReduce":  # two passes
        return replace(lane, per_byte=2 * lane.per_byte, latency=2 * lane.latency)
    return replace(lane, per_byte=lane.per_byte / ranks) if op == "AllToAll" else lane


def mesh_seconds(
    op: str, nbytes: float, axes: Sequence[str], sizes: Mapping[str, int], chip: Chip, shape: Sequence[int] = ()
) -> float:
    """Return the seconds of a collective of V bytes at the peak, at least the chip's `launch`; or as measured."""
    lane = mesh_lane(op, axes, sizes, chip, shape)
    if chip.measured:
        return float(lane.forecast(nbytes, chip.efficiency))
    return float(max(lane.seconds(nbytes), chip.efficiency.launch)) if lane.ranks > 1 else 0.0
