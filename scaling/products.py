"""Products of sharded arrays: which of the book's four cases a product is, and the cheapest plan for it (Part 3).

Each device multiplies its own shards. That is legal if both operands split every dim they share alike, if no axis
splits two dims of the result, and if an unreduced operand meets only replicas. A plan reshards the operands to such
types, multiplies, and reshards the result. The search below goes through all of them, for a chain of products at once:
the operands' cheapest reshardings, every legal product of them, and the cheapest way on from all these results.
"""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from scaling.resharding import Layout, arrangements, divides, layout, path, retyped, setting, shortest
from scaling.resharding import reshard as reshard_plan
from scaling.spec import ShardingError, Spec, mesh_sizes, parse
from scaling.steps import Plan, Step


@dataclass(frozen=True)
class Product:
    """One product of a chain: the steps that bring its two operands into shape, and the Einsum."""

    a_steps: tuple[Step, ...]
    b_steps: tuple[Step, ...]
    einsum: Step

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.a_steps, *self.b_steps, self.einsum)


def matmul(a, b, out=None, sizes=None, mesh=None, cost=None) -> Plan:
    """The case and the cheapest plan of `a * b -> out` (types, as text or Specs; any einsum of two operands).

    Dims are matched by name: those of `a` or `b` that `out` lacks are summed over, those that all three have are batch
    dims. Cheapest: least bytes sent by each device, then fewest FLOPs, then fewest steps; or, given `cost`, a function
    of a Step, its least sum over the steps (the Einsum's included). `sizes` gives the dims, `mesh` the axes; those that
    no type names stay idle, unless there is a `cost`.
    Without `sizes` (and `cost`) the plan follows the book's default: arrays count as equally large; of case 2 the
    operand sharded along the contraction is gathered, and no operand is moved by AllToAll or sliced along the
    contraction; in case 3 the product is reduced, by a ReduceScatter if `out` is split over that axis and an AllReduce
    if not. Without `out` the rules alone decide: case 2 gathers, case 3 leaves the result unreduced, case 4 gathers the
    second operand (given sizes, the one that is cheaper to gather).
    Raises ShardingError if the dims do not fit, or do not divide over their axes.
    """
    a, b = parse(a), parse(b)
    out = None if out is None else parse(out)
    dims = dict.fromkeys(a.dim_names + b.dim_names)
    if out is not None and (unknown := [dim for dim in out.dim_names if dim not in dims]):
        raise ShardingError(
            f"{a} * {b} -> {out}: dim {unknown[0]} of the result is in no operand\n"
            f"  mend: leave it out, or name it in an operand"
        )
    axes = None if mesh is None else tuple(mesh_sizes(mesh).items())
    return _matmul(a, b, out, known_sizes(dims, sizes), axes, cost)


def known_sizes(dims, sizes) -> "tuple[tuple[str, int], ...] | None":
    """The sizes of these dims, as pairs; None if no sizes are given; ShardingError if one is missing."""
    if sizes is None:
        return None
    if missing := [dim for dim in dims if dim not in sizes and not dim.isdigit()]:
        raise ShardingError(
            f"dim {missing[0]} has no size in {dict(sizes)}\n  mend: give every dim a size, or no sizes at all"
        )
    return tuple((dim, sizes[dim] if dim in sizes else int(dim)) for dim in dims)


@lru_cache(maxsize=16384)
def _matmul(a: Spec, b: Spec, out, sizes, mesh, cost) -> Plan:
    sizes, mesh = (None if sizes is None else dict(sizes)), (None if mesh is None else dict(mesh))
    if out is None:
        a_local, b_local = natural(a, b, sizes, mesh, cost)
        return matmul_via(a, b, None, a_local, b_local, sizes, mesh)
    products, tail = chain((a, b), (out.dim_names,), (out.name,), out, sizes, mesh, cost)
    return Plan((a, b), out, products[0].steps + tail, cases(a, b, out.dim_names))


def matmul_via(a, b, out, a_local, b_local, sizes=None, mesh=None) -> Plan:
    """The plan that multiplies the operands as the given local types, e.g. one of the strategies of Question 4.

    `out` None: the result is left as it comes. Raises ShardingError where the two types cannot be multiplied locally.
    """
    a, b, a_local, b_local = (parse(x) for x in (a, b, a_local, b_local))
    target = None if out is None else parse(out)
    names = free_dims(a, b) if target is None else target.dim_names
    product = local_product(a_local, b_local, names, "C" if target is None else target.name)
    steps = _steps(a, a_local, sizes, mesh) + _steps(b, b_local, sizes, mesh)
    steps += (Step("Einsum", (), (a_local, b_local), product),)
    result = product if target is None else target
    return Plan((a, b), result, steps + _steps(product, result, sizes, mesh), cases(a, b, names))


def _steps(src: Spec, dst: Spec, sizes, mesh) -> tuple[Step, ...]:
    return reshard_plan(src, dst, sizes and {dim: sizes[dim] for dim in src.dim_names}, mesh).steps


def free_dims(a: Spec, b: Spec) -> tuple[str, ...]:
    """The dims of a matmul's result when nothing else is said: those that only one operand has."""
    return tuple(d for d in a.dim_names if d not in b.dim_names) + tuple(d for d in b.dim_names if d not in a.dim_names)


def cases(a: Spec, b: Spec, kept: tuple[str, ...]) -> tuple[int, ...]:
    """Which of the book's cases a product with the result dims `kept` is; several may apply, axis by axis.

    2: an axis splits a contracted dim of one operand only. 3: it splits it in both. 4: it splits a dim of the result
    in one operand and another one in the other. 1: none of these.
    """
    found = set()
    for dim in dict.fromkeys(a.dim_names + b.dim_names):
        ours, theirs = set(a.axes_of(dim)), set(b.axes_of(dim))
        if dim not in kept:
            found |= ({3} if ours & theirs else set()) | ({2} if ours ^ theirs else set())
        elif set(ours) & {axis for other in b.dim_names if other != dim and other in kept for axis in b.axes_of(other)}:
            found.add(4)
    return tuple(sorted(found or {1}))


def local_product(a: Spec, b: Spec, kept: tuple[str, ...], name: str) -> Spec:
    """The type of the product of two shards, with the result dims `kept`; ShardingError if they may not multiply."""
    axes, owner = {}, {}
    for spec in (a, b):
        for dim, over in spec.dims:
            if axes.setdefault(dim, over) != over:
                raise ShardingError(
                    f"{a} * {b}: dim {dim} is split over {axes[dim] or 'nothing'} in one operand and over "
                    f"{over or 'nothing'} in the other (case 2)\n  mend: gather or slice one of them"
                )
    for dim, over in axes.items():
        for axis in over:
            if owner.setdefault(axis, dim) != dim:
                raise ShardingError(
                    f"{a} * {b}: axis {axis} splits both {owner[axis]} and {dim} (case 4: only diagonal blocks)\n"
                    f"  mend: gather one operand over {axis}"
                )
    partial = [axis for dim, over in axes.items() if dim not in kept for axis in over] + [*a.unreduced, *b.unreduced]
    if len(set(partial)) < len(partial) or set(a.unreduced + b.unreduced) & set(owner):
        raise ShardingError(
            f"{a} * {b}: what is unreduced over an axis may only meet what is replicated over it\n"
            f"  mend: reduce it first"
        )
    return Spec(name, tuple((dim, axes[dim]) for dim in kept), tuple(sorted(partial)))


def natural(a: Spec, b: Spec, sizes=None, mesh=None, cost=None) -> tuple[Spec, Spec]:
    """The local types by the rules of the four cases alone, as `matmul` without `out` uses them."""
    a = a.with_unreduced(axis for axis in a.unreduced if axis not in b.axes + b.unreduced)
    b = b.with_unreduced(axis for axis in b.unreduced if axis not in a.axes)
    for dim in a.dim_names:
        ours, theirs = a.axes_of(dim), b.axes_of(dim)
        if dim in b.dim_names and ours != theirs:
            agreed = ours if set(ours) == set(theirs) else _common_prefix(ours, theirs)
            a, b = a.with_axes(dim, agreed), b.with_axes(dim, agreed)
    shared = [dim for dim in a.dim_names if dim in b.dim_names]
    both = {x for d in a.dim_names if d not in shared for x in a.axes_of(d)} & set(b.axes)
    if not both:
        return a, b
    other_a, other_b = (
        Spec(s.name, tuple((dim, tuple(x for x in axes if x not in both)) for dim, axes in s.dims), s.unreduced)
        for s in (a, b)
    )
    if sizes is not None:
        lengths = []
        for s, other in ((a, other_a), (b, other_b)):
            steps = _steps(s, other, sizes, mesh)
            axes = mesh or dict.fromkeys(s.axes + s.unreduced, 4)
            lengths.append(sum(cost(x) if cost else x.wire_bytes(sizes, axes, 1) for x in steps))
        if lengths[0] < lengths[1]:
            return other_a, b
    return a, other_b


def _common_prefix(ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[str, ...]:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
    return tuple(axis for axis, _ in same)


def chain(operands, results, names, out, sizes=None, mesh=None, cost=None) -> tuple[tuple[Product, ...], tuple]:
    """The cheapest plan of `((A * B) * C) ... -> out` as a whole: its products, and the steps after the last one.

    `results` and `names`: dims and name of each product's result. Between two products the array is whole: reduced over
    every axis, since a nonlinearity may stand there.
    """
    check_divisible((*operands, out), sizes, mesh)
    partial = (axis for axis in out.unreduced if all(axis not in spec.unreduced for spec in operands))
    within = setting((*operands, out), mesh, partial, cost)
    axes, scale = within.sizes, math.prod(n for _, n in within.axes)

    def shape_of(dims):
        return None if sizes is None or mesh is None else tuple(sizes[dim] for dim in dims)

    def elements(dims):
        return 1 if sizes is None else math.prod(sizes[dim] for dim in dims)

    def search(sources, spec, target=None, rules=within):
        dims = spec.dim_names
        return shortest(sources, spec, shape_of(dims), elements(dims), rules, target)

    current, start = operands[0], (0, 0, 0)

    by_rule = sizes is None and cost is None
    between = within._replace(slices=((), ())) if by_rule else within

    def argument(spec, summed):
        if not by_rule:
            return search({layout(spec): start}, spec)
        fresh = tuple(axis for axis in axes if axis not in spec.axes + spec.unreduced)
        kept = tuple(i for i, dim in enumerate(spec.dim_names) if dim not in summed)
        return search({layout(spec): start}, spec, rules=within._replace(slices=(fresh, kept)))

    found, stages = argument(current, set(current.dim_names) - set(results[0])), []
    for number, (b, dims, name) in enumerate(zip(operands[1:], results, names, strict=True)):
        b_found = argument(b, set(b.dim_names) - set(dims))
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
        found = search(ends, result, layout(out)) if last else search(ends, result, rules=between)
    steps, at = path(found, current, layout(out))
    tail, products = _renamed(steps, out), []
    for before, a_found, b, b_found, result, ways in reversed(stages):
        _, at_a, at_b = ways[at]
        einsum = Step("Einsum", (), (retyped(before, at_a), retyped(b, at_b)), retyped(result, at))
        a_steps, at = path(a_found, before, at_a)
        products.insert(0, Product(a_steps, path(b_found, b, at_b)[0], einsum))
    return tuple(products), tail


def check_divisible(specs, sizes, mesh) -> None:
    """ShardingError if a type names an axis that the mesh lacks, or splits a dim that does not divide."""
    for spec in specs if mesh is not None else ():
        spec.check_axes(mesh)
        if sizes is not None:
            spec.local_shape({dim: sizes[dim] for dim in spec.dim_names}, mesh)


def _renamed(steps, out: Spec) -> tuple[Step, ...]:
    return tuple(Step(s.op, s.axes, s.before.with_name(out.name), s.after.with_name(out.name)) for s in steps)


def _subsets(axes) -> list[tuple[str, ...]]:
    axes = sorted(axes)
    return [subset for n in range(len(axes) + 1) for subset in itertools.combinations(axes, n)]
