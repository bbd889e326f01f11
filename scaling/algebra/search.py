"""The cheapest plan of a chain of products, when the sizes are known (Part 3; Questions 4 and 9).

The search goes through all plans at once: from the operands' types to all that they can be resharded to, at their
costs (Dijkstra, scaling.algebra.resharding); every legal product of two such types; and from all the results' types
on to the next product. So gathering before or after, reducing partial products, or moving an axis by AllToAll are all
weighed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scaling.algebra.layouts import DimAxes, Setting, arrangements, layout, retyped, setting, subsets
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


class LocalProduct(NamedTuple):
    """A product of shards: layouts of the operands and of the result, and into how many parts its work is divided."""

    a: DimAxes
    b: DimAxes
    result: DimAxes
    parts: int


class Way(NamedTuple):
    """The cheapest way found to a layout of a product."""

    key: Key
    local: LocalProduct


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
        every = {*a.spec.dim_names, *b.spec.dim_names}
        scale = math.prod(self.within.sizes.values())  # so that multiplications divide into any number of parts
        flops = self.elements(every) * scale
        ways: dict[DimAxes, Way] = {}
        for local in local_products(a.spec, b.spec, result.dim_names, self.within, whole):
            if local.a not in a.found or local.b not in b.found:
                continue  # a dim does not divide; every dim of the result is one of theirs
            a_key, b_key, spent = a.found[local.a].key, b.found[local.b].key, 0
            if self.within.cost:
                spent = self.within.cost(_einsum(a.spec, b.spec, result, local))
            # of an operand of the chain nothing is multiplied yet; all plans have as many products
            key = (a_key[0] + b_key[0] + spent, a_key[1] + flops // local.parts, a_key[2] + b_key[2])
            if local.result not in ways or key < ways[local.result].key:
                ways[local.result] = Way(key, local)
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
        local = stage.ways[at].local
        a_steps, at = path(stage.a.found, stage.a.spec, local.a)
        b_steps, _ = path(stage.b.found, stage.b.spec, local.b)
        products.insert(0, Product(a_steps, b_steps, _einsum(stage.a.spec, stage.b.spec, stage.result, local)))
    return tuple(products), tail


def _einsum(a: Spec, b: Spec, result: Spec, local: LocalProduct) -> Step:
    return Step("Einsum", (), (retyped(a, local.a), retyped(b, local.b)), retyped(result, local.result))


def local_products(a: Spec, b: Spec, kept: Sequence[str], within: Setting, whole: bool) -> Iterator[LocalProduct]:
    """Every legal product of shards over the axes in play. `whole`: `a` may not be unreduced, as a nonlinearity has
    acted on it."""
    axes = tuple(within.sizes)
    every = tuple(dict.fromkeys(a.dim_names + b.dim_names))
    for split in arrangements(axes, len(every)):
        over = dict(zip(every, split, strict=True))
        used = {axis for some in split for axis in some}
        summed = tuple(axis for dim in every if dim not in kept for axis in over[dim])
        idle = sorted(axis for axis in axes if axis not in used)
        may_a = tuple(axis for axis in idle if not whole and axis in within.partial + a.unreduced)
        may_b = tuple(axis for axis in idle if axis in within.partial + b.unreduced)
        for left_a in subsets(may_a, least=0):
            for left_b in subsets(tuple(axis for axis in may_b if axis not in left_a), least=0):
                yield LocalProduct(
                    DimAxes(tuple(over[dim] for dim in a.dim_names), left_a),
                    DimAxes(tuple(over[dim] for dim in b.dim_names), left_b),
                    DimAxes(tuple(over[dim] for dim in kept), tuple(sorted(summed + left_a + left_b))),
                    within.count(used),
                )
