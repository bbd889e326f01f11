"""Collectives on a torus (Part 3, "A Deeper Dive into TPU Communication Primitives"): seconds from bytes.

`nbytes` is V, the book's measure: the bytes of the group's whole array, i.e. the gathered array of an AllGather,
the unreduced one of a ReduceScatter or AllReduce, and for an AllToAll the local bytes times the group's size. Other
mesh axes that shard the array divide V; axes that it is replicated over do not.

`axes` are the lengths of the torus axes that the collective runs over, e.g. 16, or (4, 4) if a mesh axis spans two
torus axes. `wrap` says which of them are rings; by default the chip's pod decides (`Chip.wraps`).
Each chip has one link of `link_bw` bytes/s each way per neighbour: two per ring, and one at the end of a line.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from scaling.algebra.steps import COLLECTIVES, Step
from scaling.common.arguments import not_negative, one_of, whole
from scaling.cost.lanes import AxisSpan, exchange, gather_price, measured_lane
from scaling.hardware import Chip, check_slice
from scaling.spec import mesh_sizes

OPS = ("AllGather", "ReduceScatter", "AllReduce", "AllToAll", "CollectivePermute", "Gather", "Scatter")
ROOTED = ("Gather", "Scatter")  # the root receives, or sends, as many bytes as every device in an AllGather


def _spans(chip: Chip, axes: int | Sequence[int], wrap) -> list[AxisSpan]:
    """Return whole axes of the torus of these lengths, without axes of length 1."""
    lengths = check_slice(chip, axes)
    rings = chip.wraps(lengths) if wrap is None else (wrap,) * len(lengths) if isinstance(wrap, bool) else tuple(wrap)
    if len(rings) != len(lengths):
        raise ValueError(
            f"wrap = {wrap!r}: one value, or one for each of the {len(lengths)} axes"
            "\n  fix: give a bool, or a tuple of them"
        )
    each = enumerate(zip(lengths, rings, strict=True))
    return [AxisSpan(i, length, 1, ring, True) for i, (length, ring) in each if length > 1]


def all_gather(nbytes: float, chip: Chip, axes: int | Sequence[int], wrap=None, exact: bool = False) -> float:
    """Return the seconds of an AllGather: max(hops * hop_latency, V / (W_ici * number of axes)), for any lengths.

    A chip can receive over two links per ring and one per line. `exact` subtracts the share that each chip already has,
    a factor of (1 - 1/N); on lines alone it is always subtracted, as in Part 3, Pop Quiz 2.
    """
    not_negative(nbytes=nbytes)
    per_byte, latency = gather_price(chip, _spans(chip, axes, wrap), exact)
    return max(latency, nbytes * per_byte)


def reduce_scatter(nbytes: float, chip: Chip, axes: int | Sequence[int], wrap=None, exact: bool = False) -> float:
    """Return the seconds of a ReduceScatter, which equal an AllGather's, since it is the reverse."""
    return all_gather(nbytes, chip, axes, wrap, exact)


def all_reduce(nbytes: float, chip: Chip, axes: int | Sequence[int], wrap=None, exact: bool = False) -> float:
    """Return the seconds of an AllReduce: a ReduceScatter and an AllGather."""
    return 2 * all_gather(nbytes, chip, axes, wrap, exact)


def all_to_all(nbytes: float, chip: Chip, axes: int | Sequence[int], wrap=None, exact: bool = False) -> float:
    """Return the seconds of an AllToAll over N devices: V * X / (4 N W_ici) for the slowest axis, of length X.

    On one axis that is V / (4 W_ici), a quarter of an AllGather.
    `exact` counts odd lengths exactly. scaling.hardware.torus routes every message and confirms these times.
    """
    not_negative(nbytes=nbytes)
    spans = _spans(chip, axes, wrap)
    per_byte, latency = exchange(chip, spans, exact)
    return max(latency, nbytes / math.prod(span.size for span in spans) * per_byte)


def permute(nbytes: float, chip: Chip, hops: int = 1) -> float:
    """Return the seconds of a CollectivePermute: each chip sends `nbytes` through one link, to a chip `hops` away."""
    return point_to_point(nbytes, chip, hops, ports=1)


def point_to_point(nbytes: float, chip: Chip, hops: int, ports: int = 1) -> float:
    """Return the seconds to send `nbytes` over `hops` hops, through `ports` links at once: latency plus transfer.

    Part 2, Question 5. The messages are cut into packets which follow each other, so the hops delay only the first.
    """
    not_negative(nbytes=nbytes)
    whole(hops=hops, ports=ports)
    if ports > 2 * chip.need("axes"):
        raise ValueError(
            f"ports = {ports}: {chip.name} has {2 * chip.axes} links\n  fix: give a number of ports that the chip has"
        )
    return nbytes / (ports * chip.need("link_bw")) + hops * chip.hop_latency


def latency_bound_bytes(chip: Chip, axes: int | Sequence[int], wrap=None, exact: bool = False) -> float:
    """Return the V below which an AllGather is bound by latency (Part 3): X * 45 kB on a ring of X v5e."""
    per_byte, latency = gather_price(chip, _spans(chip, axes, wrap), exact)
    return latency / per_byte if per_byte else 0.0


def seconds(op: str, nbytes: float, chip: Chip, axes: int | Sequence[int], wrap=None, exact: bool = False) -> float:
    """Return the seconds of a collective by its name in `scaling.trace` and `scaling.algebra`.

    If the chip's file has measurements of collectives, they are used: latency + V / bandwidth. A Gather and a Scatter
    take as long as an AllGather, since the root has as many bytes on its links.
    """
    one_of("op", op, OPS)
    op = "AllGather" if op in ROOTED else op
    if chip.measured:
        not_negative(nbytes=nbytes)
        ranks = math.prod((axes,) if isinstance(axes, int) else axes)
        return float(measured_lane(chip, op, ranks).forecast(nbytes, chip.efficiency)) if ranks > 1 else 0.0
    if op == "CollectivePermute":
        return permute(nbytes, chip)
    time = {"AllGather": all_gather, "ReduceScatter": reduce_scatter, "AllReduce": all_reduce, "AllToAll": all_to_all}
    return time[op](nbytes, chip, axes, wrap, exact)


@lru_cache(maxsize=256)
def _seconds_on(chip: Chip, dims: tuple, axes: tuple, dtype, flops: bool) -> Callable[[Step], float]:
    sizes, mesh = dict(dims), dict(axes)

    def of(step: Step) -> float:
        if step.op in COLLECTIVES:
            lengths = tuple(mesh[axis] for axis in step.axes)
            return seconds(step.op, step.nbytes(sizes, mesh, dtype), chip, lengths)
        return step.flops(sizes, mesh) / chip.flops(dtype) if flops else 0.0

    return of


def seconds_on(chip: Chip, sizes, mesh, dtype="bf16", flops: bool = True) -> Callable[[Step], float]:
    """Return a function from a Step to its seconds, where each mesh axis is an axis of the torus of that length.

    It is the `cost` by which `scaling.algebra` plans by time: matmul(a, b, out, sizes, mesh, cost=seconds_on(...)).
    Products run at the chip's peak (or are free with `flops=False`), and slices and the like take no time. Equal
    arguments give the identical function, so that plans made with it are cached.
    """
    return _seconds_on(chip, tuple(sizes.items()), tuple(mesh_sizes(mesh).items()), dtype, flops)
