"""Collectives as data: an `Op` is one collective over one group, as constants that a compiler can keep in its graph."""

from functools import lru_cache
from typing import NamedTuple

from scaling.mesh import Group
from scaling.spec import parse_line


class Op(NamedTuple):
    """One collective over one group.

    `dim`: the dim that grows (AllGather, Pad, Gather, AllToAll) or is split (ReduceScatter, Slice, Scatter); `to`: the
    dim that an AllToAll splits; `pairs`: of a CollectivePermute, its (source, target) blocks; `root`: of an op that has
    one, the root's block; `by`: how partial values are put together, "sum", "max" or "min"; `mean`: whoever calls it
    divides the sum by the number of ranks; `line`: the types before and after; `checked`: where ranks compare calls
    first.
    """

    kind: str
    group: str
    size: int
    index: int
    backend: str
    order: tuple[int, ...] = ()
    dim: int = 0
    to: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    root: int | None = None
    by: str = "sum"
    mean: bool = False
    axes: tuple[str, ...] = ()
    line: str = ""
    checked: str = ""

    @property
    def reduction(self) -> str:
        """What the caller gets of partial values: their "sum", "mean", "max" or "min"."""
        return "mean" if self.mean else self.by

    @staticmethod
    def over(group: Group, kind: str, line: str, **options) -> "Op":
        """The op over a group, its other fields given by name."""
        g = group
        return Op(
            kind, g.name, g.size, g.index, g.backend, g.order, axes=g.axes, line=line, checked=g.checked, **options
        )

    def batched(self) -> "Op":
        """The op under vmap: the same on tensors with one more dim in front."""
        return self._replace(dim=self.dim + 1, to=self.to + 1)


@lru_cache(maxsize=4096)
def dual_line(line: str, axes: tuple[str, ...]) -> str:
    """The types of the transpose: cotangents, which are unreduced over `axes` where the array was replicated, and
    replicated where it was unreduced."""
    before, after = parse_line(line).operands[0], parse_line(line).result
    return f"{after.cotangent(axes)} -> {before.cotangent(axes)}"
