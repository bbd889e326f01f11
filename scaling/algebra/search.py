"""The cheapest plan of a chain of products, when the sizes are known (Part 3; Questions 4 and 9).

The search goes through all plans at once: from the operands' types to all that they can be resharded to, at their
costs (Dijkstra, scaling.algebra.resharding); every legal product of two such types; and from all the results' types
on to the next product. So gathering before or after, reducing partial products, or moving an axis by AllToAll are all
weighed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scaling.algebra.law import LabelledOp
from scaling.algebra.layouts import DimAxes, layout, retyped, setting
from scaling.algebra.resharding import START, Key, Reached, path, shortest
from scaling.algebra.steps import Step
from scaling.spec import Spec

WAYS = 1500  # to split the dims of a product over the axes in play: of more, the rules of the four cases decide


@dataclass(frozen=True)
class Product:
    """One product of a chain: the steps that bring its two operands into shape, and the Einsum."""

    a_steps: tuple[Step, ...]
    b_steps: tuple[Step, ...]
    einsum: Step

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.a_steps, *self.b_steps, self.einsum)


class Way(NamedTuple):
    """The cheapest way found to a layout of a product, from layouts of its operands."""

    key: Key
    a: DimAxes
    b: DimAxes


class ChainArray(NamedTuple):
    """An array of the chain, with every layout that it can be brought to."""

    spec: Spec
    found: Mapping[DimAxes, Reached]


class ChainProduct(NamedTuple):
    """One product of the chain, in every way that it can be made."""

    a: ChainArray
    b: ChainArray
    result: Spec
    ways: Mapping[DimAxes, Way]


class ChainSearch:
    """The cheapest plan of one chain; `sizes` and `mesh` as of `products.matmul`."""

    def __init__(self, operands: Sequence[Spec], out: Spec, sizes, mesh, cost):
        partial = (axis for axis in out.unreduced if all(axis not in spec.unreduced for spec in operands))
        self.within = setting((*operands, out), mesh, partial, cost)
        self.sizes, self.shaped = sizes, sizes is not None and mesh is not None

    def fits(self, a: Spec, b: Spec) -> bool:
        """Whether there are few enough ways to split the dims of this product to look at all of them."""
        axes, dims = len(self.within.axes), len({*a.dim_names, *b.dim_names})
        ways = (math.perm(axes, n) * math.comb(n + dims - 1, n) for n in range(axes + 1))
        return sum(ways) <= WAYS

    def shape(self, spec: Spec) -> tuple[int, ...] | None:
        return tuple(self.sizes[dim] for dim in spec.dim_names) if self.shaped else None

    def elements(self, dims) -> int:
        return 1 if self.sizes is None else math.prod(self.sizes[dim] for dim in dims)

    def reach(self, spec: Spec, sources: Mapping[DimAxes, Key], target: DimAxes | None = None) -> ChainArray:
        """An array that can be had in some layouts, at their costs, in all others (or until one is reached)."""
        elements = self.elements(spec.dim_names)
        return ChainArray(spec, shortest(sources, spec, self.shape(spec), elements, self.within, target))

    def multiply(self, a: ChainArray, b: ChainArray, result: Spec, whole: bool) -> ChainProduct:
        """The product of two arrays in every way; `whole`: `a` may not be unreduced."""
        scale = math.prod(self.within.sizes.values())  # so that multiplications divide into any number of parts
        flops = self.elements({*a.spec.dim_names, *b.spec.dim_names}) * scale
        op = LabelledOp("", (a.spec.dim_names, b.spec.dim_names), result.dim_names, "each")
        may = [() if whole else self.within.partial + a.spec.unreduced, self.within.partial + b.spec.unreduced]
        ways: dict[DimAxes, Way] = {}
        for (at_a, at_b), after in op.legal(tuple(self.within.sizes), may):
            if at_a not in a.found or at_b not in b.found:
                continue  # a dim does not divide; every dim of the result is one of theirs
            a_key, b_key, spent = a.found[at_a].key, b.found[at_b].key, 0
            if self.within.cost:
                spent = self.within.cost(_einsum(a.spec, at_a, b.spec, at_b, result, after))
            # of an operand of the chain nothing is multiplied yet; all plans have as many products
            parts = self.within.count({axis for axes in (*at_a.dims, *at_b.dims) for axis in axes})
            key = (a_key[0] + b_key[0] + spent, a_key[1] + flops // parts, a_key[2] + b_key[2])
            if after not in ways or key < ways[after].key:
                ways[after] = Way(key, at_a, at_b)
        return ChainProduct(a, b, result, ways)


def cheapest(operands, results, out: Spec, sizes, mesh, cost) -> "tuple[tuple[Product, ...], tuple[Step, ...]] | None":
    """The products of the cheapest plan, and the steps after the last one; None if there are too many to look at.

    Arguments as of `products.chain`; `results`: the products' types, of which the dims and the names count.
    """
    search = ChainSearch(operands, out, sizes, mesh, cost)
    if not all(map(search.fits, (operands[0], *results), operands[1:])):
        return None
    current, stages = search.reach(operands[0], {layout(operands[0]): START}), []
    for b, result in zip(operands[1:], results, strict=True):
        stage = search.multiply(current, search.reach(b, {layout(b): START}), result, whole=bool(stages))
        stages.append(stage)
        sources = {at: way.key for at, way in stage.ways.items()}
        current = search.reach(result, sources, layout(out) if len(stages) == len(results) else None)
    tail, at = path(current.found, current.spec, layout(out))
    products: list[Product] = []
    for stage in reversed(stages):
        way, after = stage.ways[at], at
        a_steps, at = path(stage.a.found, stage.a.spec, way.a)
        b_steps, _ = path(stage.b.found, stage.b.spec, way.b)
        einsum = _einsum(stage.a.spec, way.a, stage.b.spec, way.b, stage.result, after)
        products.insert(0, Product(a_steps, b_steps, einsum))
    return tuple(products), tail


def _einsum(a: Spec, at_a: DimAxes, b: Spec, at_b: DimAxes, result: Spec, after: DimAxes) -> Step:
    return Step("Einsum", (), (retyped(a, at_a), retyped(b, at_b)), retyped(result, after))
