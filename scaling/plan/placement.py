"""Mesh axes on a TPU's torus: which part of which torus axis each one takes, and what its collectives then cost.

A mesh axis takes whole torus axes, and at most one part of a further one, whose rest another mesh axis takes: inside
it, as a line of neighbours, or outside of it, as a ring with a stride. On 16x20x28, TP 8 is half of the axis of 16, a
line, whose links run one way: half the bandwidth of a ring (Part 2, "TPU Networking"; Part 3, "A Deeper Dive ...").
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from scaling.hardware import Chip


@dataclass(frozen=True)
class AxisSpan:
    """What a mesh axis takes of a torus axis: `size` chips, `stride` apart; `ring`, whether its ends are joined."""

    torus: int
    size: int
    stride: int
    ring: bool
    whole: bool

    @property
    def ports(self) -> float:
        """Links' worth of bandwidth: two of a ring, one of a line, shared with the groups between two neighbours."""
        return (2 if self.ring else 1) / self.stride

    @property
    def hops(self) -> int:
        return (self.size // 2 if self.ring else self.size - 1) * self.stride

    def __str__(self) -> str:
        shape = "ring" if self.ring else "line"
        return f"{shape} of {self.size}" + (f", every {self.stride}th" if self.stride > 1 else "")


Placement = dict[str, tuple[AxisSpan, ...]]  # by mesh axis


def slice_shape(chip: Chip, chips: int) -> tuple[int, ...]:
    """The most cubic slice of so many chips that the pod has, rings first; ValueError if there is none."""
    pod = chip.need("pod")
    if chips == chip.pod_chips:
        return tuple(pod)
    shapes = [
        shape
        for shape in _shapes(chips, len(pod))
        if all(a <= b for a, b in zip(shape, sorted(pod), strict=True))
    ]  # fmt: skip
    if not shapes:
        whole, near = "x".join(map(str, pod)), _near(chip, chips)
        raise ValueError(f"{chips:,} chips are not a slice of a {whole} pod of {chip.name}; fix: take {near:,}")
    return min(shapes, key=lambda shape: (not all(chip.wraps(shape)), max(shape) / min(shape)))


def _shapes(chips: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Sorted lengths whose product is `chips`."""
    if axes == 1:
        yield (chips,)
        return
    for length in range(1, round(chips ** (1 / axes)) + 1):
        if chips % length == 0:
            yield from ((length, *rest) for rest in _shapes(chips // length, axes - 1) if rest[0] >= length)


def _near(chip: Chip, chips: int) -> int:
    """The largest slice of fewer chips."""
    pod = sorted(chip.need("pod"))
    for fewer in range(min(chips, chip.pod_chips), 0, -1):
        for shape in _shapes(fewer, len(pod)):
            if all(a <= b for a, b in zip(shape, pod, strict=True)):
                return fewer
    return 1


@lru_cache(maxsize=64)
def placements(chip: Chip, shape: tuple[int, ...], axes: tuple[str, ...], most: tuple[int, ...]) -> list[Placement]:
    """All ways to lay mesh `axes`, outermost first, on a slice; none of them longer than `most` says."""
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


def join_spans(spans: Sequence[AxisSpan]) -> tuple[AxisSpan, ...]:
    """The spans of several mesh axes as those of one: two parts of a torus axis are the whole of it."""
    found: dict[int, AxisSpan] = {}
    for span in spans:
        if (other := found.get(span.torus)) is None:
            found[span.torus] = span
        else:
            ring = span.ring or other.ring
            found[span.torus] = AxisSpan(span.torus, span.size * other.size, 1, ring, True)
    return tuple(found.values())


def gather_price(chip: Chip, spans: Sequence[AxisSpan]) -> tuple[float, float]:
    """(seconds a byte of V, latency) of an AllGather over these spans; a ReduceScatter is the same.

    Parts of torus axes first, the slowest before the others, while there is little to send; then all whole ones at
    once.
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
        lacking = 1 if any(span.ring for span in whole) else 1 - 1 / math.prod(span.size for span in whole)
        seconds += lacking / (sum(span.ports for span in whole) * link)
    return seconds, sum(span.hops for span in spans) * chip.hop_latency


def exchange(chip: Chip, spans: Sequence[AxisSpan]) -> tuple[float, float]:
    """(seconds for each byte that a chip sends in all, latency) of an AllToAll over these spans."""
    spans = join_spans(spans)
    slowest = max((span.size / (4 * span.ports * chip.need("link_bw")) for span in spans), default=0.0)
    return slowest, sum(span.hops for span in spans) * chip.hop_latency
