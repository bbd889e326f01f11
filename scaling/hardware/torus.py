"""Count on a torus of chips, link by link: neighbours, hops, and an AllToAll's load on every link (Parts 2 and 3).

Each axis is a ring or a line. A link goes one way: `(chip, axis, step)` is the link out of a chip to its neighbour one
`step` (+1 or -1) along an axis, so a pair of neighbours has a link each way. This is plain Python.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from scaling.common.arguments import whole
from scaling.hardware import Chip

Coord = tuple[int, ...]
Link = tuple[Coord, int, int]


@dataclass(frozen=True)
class Torus:
    """Chips at the points of a grid of this `shape`, where `wrap` says for each axis whether its ends are joined."""

    shape: tuple[int, ...]
    wrap: tuple[bool, ...]

    def __post_init__(self):
        if len(self.wrap) != len(self.shape) or not self.shape:
            raise ValueError(
                f"shape {self.shape} and wrap {self.wrap}: one length and one bool for each axis"
                "\n  fix: give as many of the one as of the other"
            )
        for length in self.shape:
            whole(length=length)

    @property
    def size(self) -> int:
        """The number of chips."""
        return math.prod(self.shape)

    def chips(self) -> Iterator[Coord]:
        """Yield the coordinates of all chips, the last axis fastest."""
        return product(*map(range, self.shape))

    def check(self, chip: Coord) -> None:
        """Raise ValueError unless this is the coordinate of a chip."""
        if len(chip) != len(self.shape) or not all(0 <= c < n for c, n in zip(chip, self.shape, strict=True)):
            raise ValueError(f"no chip {chip} in a torus of {self.shape}\n  fix: give a coordinate inside the torus")

    def neighbour(self, chip: Coord, axis: int, step: int) -> Coord | None:
        """Return the chip one step along an axis, or None beyond the end of a line."""
        to, length = chip[axis] + step, self.shape[axis]
        if length == 1 or (not self.wrap[axis] and not 0 <= to < length):
            return None
        return (*chip[:axis], to % length, *chip[axis + 1 :])

    def neighbours(self, chip: Coord) -> list[Coord]:
        """Return the chips that the links of `chip` lead to, 2 per ring and 1 or 2 per line."""
        self.check(chip)
        found = (self.neighbour(chip, axis, step) for axis in range(len(self.shape)) for step in (1, -1))
        return [other for other in found if other is not None]

    def links(self) -> Iterator[Link]:
        """Yield all links, one each way for each pair of neighbours."""
        for chip in self.chips():
            for axis, step in product(range(len(self.shape)), (1, -1)):
                if self.neighbour(chip, axis, step) is not None:
                    yield chip, axis, step

    def ways(self, axis: int, start: int, end: int) -> list[tuple[int, int, float]]:
        """Return the shortest ways along one axis as (step, hops, share of the bytes); halfway round a ring has two."""
        length = self.shape[axis]
        if not self.wrap[axis]:
            return [(1 if end > start else -1, abs(end - start), 1.0)] if end != start else []
        up, down = (end - start) % length, (start - end) % length
        if up == down:
            return [(1, up, 0.5), (-1, down, 0.5)] if up else []
        return [(1, up, 1.0)] if up < down else [(-1, down, 1.0)]

    def distance(self, a: Coord, b: Coord) -> int:
        """Return the number of hops between two chips."""
        self.check(a)
        self.check(b)
        ways = (self.ways(axis, a[axis], b[axis]) for axis in range(len(self.shape)))
        return sum(found[0][1] for found in ways if found)

    @property
    def diameter(self) -> int:
        """The number of hops between the two farthest chips, X // 2 per ring and X - 1 per line."""
        return sum(n // 2 if ring else n - 1 for n, ring in zip(self.shape, self.wrap, strict=True))

    @property
    def mean_distance(self) -> float:
        """The mean number of hops between two chips drawn at random, about X/4 per ring and X/3 per line."""
        return sum(
            sum(min(d, n - d) if ring else 2 * (n - d) * d / n for d in range(n)) / n
            for n, ring in zip(self.shape, self.wrap, strict=True)
        )

    @property
    def bisection_links(self) -> int:
        """The number of links one way across the narrowest even cut.

        A cut across an axis of even length X has N/X links, and twice as many if the axis is a ring.
        """
        cuts = [
            self.size // n * (2 if ring else 1) for n, ring in zip(self.shape, self.wrap, strict=True) if n % 2 == 0
        ]
        if not cuts:
            raise ValueError(
                f"{self.shape}: no axis of even length, so no even cut\n  fix: choose a shape with an even length"
            )
        return min(cuts)

    def route(self, a: Coord, b: Coord) -> Iterator[tuple[Link, float]]:
        """Yield the links from a to b, axis after axis (dimension-ordered), each with the share of bytes it carries."""
        self.check(a)
        self.check(b)
        corner = a  # the chip where the next axis begins
        for axis in range(len(self.shape)):
            for step, hops, share in self.ways(axis, a[axis], b[axis]):
                current: Coord | None = corner
                for _ in range(hops):
                    assert current is not None, "a route that leaves a line"
                    yield (current, axis, step), share
                    current = self.neighbour(current, axis, step)
            corner = (*corner[:axis], b[axis], *corner[axis + 1 :])

    def all_to_all_loads(self) -> Counter[Link]:
        """Return the number of chunks that each link carries when every chip sends a chunk to every other chip."""
        loads: Counter[Link] = Counter()
        for a, b in product(self.chips(), repeat=2):
            for link, share in self.route(a, b):
                loads[link] += share  # pyright: ignore[reportArgumentType]: a half, where two ways are equally long
        return loads

    def all_to_all_seconds(self, nbytes: float, link_bw: float) -> float:
        """Return the seconds that the fullest link needs for an AllToAll over all chips, in chunks of V/N^2.

        Args:
            nbytes: V, the bytes of all chips together.
            link_bw: Bytes/s of one link, one way.
        """
        if nbytes < 0 or link_bw <= 0:
            raise ValueError(
                f"nbytes = {nbytes}, link_bw = {link_bw}: bytes are not negative, bandwidth is positive"
                "\n  fix: give at least 0 bytes, and bytes/s above 0"
            )
        return max(self.all_to_all_loads().values(), default=0) * nbytes / self.size**2 / link_bw


def slice_of(chip: Chip, shape: tuple[int, ...]) -> Torus:
    """Return a slice of a chip's pod as a torus, with the wraparound that the slice has in the pod."""
    return Torus(tuple(shape), chip.wraps(shape))
