"""The cheapest plan of a chain of products, when the sizes are known (Part 3; Questions 4 and 9).

The search goes through all plans at once: from the operands' types to all that they can be resharded to, at their
costs (Dijkstra, scaling.algebra.resharding); every legal product of two such types; and from all the results' types
on to the next product. So gathering before or after, reducing partial products, or moving an axis by AllToAll are all
weighed.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from scaling.algebra.resharding import Layout, Setting, arrangements, divides, layout, path, retyped, setting, shortest
from scaling.algebra.steps import Step
from scaling.spec import Spec


@dataclass(frozen=True)
class Product:
    """One product of a chain: the steps that bring its two operands into shape, and the Einsum."""

    a_steps: tuple[Step, ...]
    b_steps: tuple[Step, ...]
    einsum: Step

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.a_steps, *self.b_steps, self.einsum)


def cheapest(operands, results, names, out, sizes, mesh, cost) -> tuple[tuple[Product, ...], tuple]:
    """The products of the cheapest plan, and the steps after the last one; arguments as of `products.chain`."""
    partial = (axis for axis in out.unreduced if all(axis not in spec.unreduced for spec in operands))
    within = setting((*operands, out), mesh, partial, cost)
    axes, scale = within.sizes, math.prod(n for _, n in within.axes)

    def shape_of(dims):
        return None if sizes is None or mesh is None else tuple(sizes[dim] for dim in dims)

    def elements(dims):
        return 1 if sizes is None else math.prod(sizes[dim] for dim in dims)

    def search(sources, spec, target=None):
        dims = spec.dim_names
        return shortest(sources, spec, shape_of(dims), elements(dims), within, target)

    start, current, stages = (0, 0, 0), operands[0], []
    found = search({layout(current): start}, current)
    for number, (b, dims, name) in enumerate(zip(operands[1:], results, names, strict=True)):
        b_found = search({layout(b): start}, b)
        every = tuple(dict.fromkeys(current.dim_names + b.dim_names))
        result, ways = Spec(name, tuple((dim, ()) for dim in dims)), {}
        flops = elements(every) * scale * (2 if set(every) - set(dims) else 1)
        for at_a, at_b, product, parts in local_products(current, b, dims, within, whole=number > 0):
            if at_a in found and at_b in b_found and divides(product, shape_of(dims), axes):
                ka, kb, spent = found[at_a][0], b_found[at_b][0], 0
                if cost:
                    pair = (retyped(current, at_a), retyped(b, at_b))
                    spent = cost(Step("Einsum", (), pair, retyped(result, product)))
                key = (ka[0] + kb[0] + spent, ka[1] + kb[1] + flops // parts, ka[2] + kb[2] + 1)
                if product not in ways or key < ways[product][0]:
                    ways[product] = (key, at_a, at_b)
        stages.append((current, found, b, b_found, result, ways))
        current, ends = result, {at: way[0] for at, way in ways.items()}
        found = search(ends, result, layout(out) if b is operands[-1] else None)
    steps, at = path(found, current, layout(out))
    tail, products = _renamed(steps, out), []
    for before, a_found, b, b_found, result, ways in reversed(stages):
        _, at_a, at_b = ways[at]
        einsum = Step("Einsum", (), (retyped(before, at_a), retyped(b, at_b)), retyped(result, at))
        a_steps, at = path(a_found, before, at_a)
        products.insert(0, Product(a_steps, path(b_found, b, at_b)[0], einsum))
    return tuple(products), tail


def local_products(
    a: Spec, b: Spec, kept, within: Setting, whole: bool
) -> Iterator[tuple[Layout, Layout, Layout, int]]:
    """Every legal product of shards over the axes in play: layouts of the operands and of the product, and into how
    many parts its FLOPs are divided. `whole`: `a` may not be unreduced, as a nonlinearity has acted on it."""
    axes = within.sizes
    every = tuple(dict.fromkeys(a.dim_names + b.dim_names))
    for split in arrangements(tuple(axes), len(every)):
        over = dict(zip(every, split, strict=True))
        used = {axis for some in split for axis in some}
        summed = tuple(axis for dim in every if dim not in kept for axis in over[dim])
        idle = [axis for axis in axes if axis not in used]
        may_a = [axis for axis in idle if not whole and axis in within.partial + a.unreduced]
        may_b = [axis for axis in idle if axis in within.partial + b.unreduced]
        for left_a in _subsets(may_a):
            for left_b in _subsets([axis for axis in may_b if axis not in left_a]):
                yield (
                    Layout(tuple(over[dim] for dim in a.dim_names), left_a),
                    Layout(tuple(over[dim] for dim in b.dim_names), left_b),
                    Layout(tuple(over[dim] for dim in kept), tuple(sorted(summed + left_a + left_b))),
                    math.prod(axes[axis] for axis in used),
                )


def _renamed(steps, out: Spec) -> tuple[Step, ...]:
    return tuple(Step(s.op, s.axes, s.before.with_name(out.name), s.after.with_name(out.name)) for s in steps)


def _subsets(axes) -> list[tuple[str, ...]]:
    axes = sorted(axes)
    return [subset for n in range(len(axes) + 1) for subset in itertools.combinations(axes, n)]
