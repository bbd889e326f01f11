"""The cheapest plan of a chain of products, when the sizes are known (Part 3; Questions 4 and 9).

The search goes through all plans at once: from the operands' types to all that they can be resharded to, at their
costs (Dijkstra, scaling.resharding); every legal product of two such types; and from all the results' types on to the
next product. So gathering before or after, reducing partial products, or moving an axis by AllToAll are all weighed.
"""

import itertools
import math
from dataclasses import dataclass

from scaling.resharding import Layout, arrangements, divides, layout, path, retyped, setting, shortest
from scaling.spec import Spec
from scaling.steps import Step


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
    """The products of the cheapest plan, and the steps after the last one; arguments as of `scaling.products.chain`."""
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

    current, start = operands[0], (0, 0, 0)

    found, stages = search({layout(current): start}, current), []
    for number, (b, dims, name) in enumerate(zip(operands[1:], results, names, strict=True)):
        b_found = search({layout(b): start}, b)
        every = tuple(dict.fromkeys(current.dim_names + b.dim_names))
        result = Spec(name, tuple((dim, ()) for dim in dims))
        shape, ways = shape_of(every), {}
        count = elements(every) * (2 if set(every) - set(dims) else 1)
        for split in arrangements(tuple(axes), len(every)):
            over = dict(zip(every, split, strict=True))
            if not divides(Layout(split), shape, axes):
                continue
            used = {axis for axes_ in split for axis in axes_}
            parts = math.prod(axes[axis] for axis in used)
            summed = tuple(axis for dim in every if dim not in dims for axis in over[dim])
            free = set(axes) - used
            may_a = [x for x in free if x in within.partial or (number == 0 and x in current.unreduced)]
            may_b = [x for x in free if x in within.partial or x in b.unreduced]
            for left_a in _subsets(may_a if number == 0 else []):
                for left_b in _subsets([x for x in may_b if x not in left_a]):
                    at_a = Layout(tuple(over[dim] for dim in current.dim_names), left_a)
                    at_b = Layout(tuple(over[dim] for dim in b.dim_names), left_b)
                    if at_a not in found or at_b not in b_found:
                        continue
                    product = Layout(tuple(over[dim] for dim in dims), tuple(sorted(summed + left_a + left_b)))
                    ka, kb = found[at_a][0], b_found[at_b][0]
                    spent = 0
                    if cost:
                        pair = (retyped(current, at_a), retyped(b, at_b))
                        spent = cost(Step("Einsum", (), pair, retyped(result, product)))
                    key = (ka[0] + kb[0] + spent, ka[1] + kb[1] + count * scale // parts, ka[2] + kb[2] + 1)
                    if product not in ways or key < ways[product][0]:
                        ways[product] = (key, at_a, at_b)
        stages.append((current, found, b, b_found, result, ways))
        current = result
        last = number == len(results) - 1
        ends = {at: way[0] for at, way in ways.items()}
        found = search(ends, result, layout(out) if last else None)
    steps, at = path(found, current, layout(out))
    tail, products = _renamed(steps, out), []
    for before, a_found, b, b_found, result, ways in reversed(stages):
        _, at_a, at_b = ways[at]
        einsum = Step("Einsum", (), (retyped(before, at_a), retyped(b, at_b)), retyped(result, at))
        a_steps, at = path(a_found, before, at_a)
        products.insert(0, Product(a_steps, path(b_found, b, at_b)[0], einsum))
    return tuple(products), tail


def _renamed(steps, out: Spec) -> tuple[Step, ...]:
    return tuple(Step(s.op, s.axes, s.before.with_name(out.name), s.after.with_name(out.name)) for s in steps)


def _subsets(axes) -> list[tuple[str, ...]]:
    axes = sorted(axes)
    return [subset for n in range(len(axes) + 1) for subset in itertools.combinations(axes, n)]
