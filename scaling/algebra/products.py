"""Products of sharded arrays: which of the book's four cases a product is, and the cheapest plan for it (Part 3).

Each device multiplies its own shards, which is legal under the rules of `law`. A plan reshards the operands to such
types, multiplies, and reshards the result. The rules of the four cases choose these types (`by_rule`). If the sizes
are known, the planner chooses them by the cost of the whole chain instead: it compares gathering before a product or
after it, reducing partial products, and moving an axis by AllToAll (Questions 4 and 9).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from scaling.algebra.law import LabelledOp, product_type
from scaling.algebra.layouts import NOMINAL, layout, retyped, setting, unsplit_spec
from scaling.algebra.planner import Value, Way, cheapest, ways_of
from scaling.algebra.resharding import NOTE, PlannedArray, exact_steps, reshard
from scaling.algebra.rules import parse_plain
from scaling.algebra.steps import Plan, Step, common_prefix
from scaling.spec import ShardingError, Spec, mesh_sizes, parse

WAYS = 1500  # of splitting a product's dims over the axes in play; beyond this, the rules of the four cases decide


@dataclass(frozen=True)
class Product:
    """One product of a chain: the steps that bring its two operands into shape, and the Einsum."""

    a_steps: tuple[Step, ...]
    b_steps: tuple[Step, ...]
    einsum: Step

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps of the product, in order."""
        return (*self.a_steps, *self.b_steps, self.einsum)


def matmul(a, b, out=None, sizes=None, mesh=None, cost=None) -> Plan:
    """Find the case and the cheapest plan of `a * b -> out`, an einsum of two operands.

    Dims are matched by name. A dim of `a` or `b` that `out` lacks is summed over, and a dim that all three have is a
    batch dim. The cheapest plan sends the fewest bytes from each device, then has the fewest FLOPs, then the fewest
    collectives. Given a `cost`, it has the least sum of costs over the steps, the Einsum included.

    Without `sizes` and `cost` the book's rules decide. In case 2 the operand that is sharded along the contraction is
    gathered. In case 3 the product is reduced, by a ReduceScatter if `out` is split over that axis and by an AllReduce
    if not. In case 4 the operand whose dim `out` does not split is gathered, or else the second one. Without `out` the
    rules decide, too: case 3 then leaves the result unreduced, and case 4, given sizes, gathers the operand that is
    cheaper to gather. They also decide if there are too many axes to search, and the plan's `note` says so.

    Args:
        a: the first operand's type, as text or a Spec.
        b: the second operand's type.
        out: the result's type.
        sizes: the sizes of the dims.
        mesh: the axes and their sizes. Axes that no type names stay idle, unless there is a `cost`.
        cost: a function of a Step, to be minimised in sum.

    Raises:
        ShardingError: the dims do not fit, or do not divide over their axes.
    """
    a, b = parse_plain(a), parse_plain(b)
    out = None if out is None else parse_plain(out)
    if out is None and cost is not None:
        raise ShardingError(f"{a} * {b}: without a result the rules decide, not a cost\n  fix: give out=, or no cost")
    dims = dict.fromkeys(a.dim_names + b.dim_names)
    if out is not None and (unknown := [dim for dim in out.dim_names if dim not in dims]):
        raise ShardingError(
            f"{a} * {b} -> {out}: dim {unknown[0]} of the result is in no operand\n"
            f"  fix: leave it out, or name it in an operand"
        )
    axes = None if mesh is None else tuple(mesh_sizes(mesh).items())
    return _matmul(a, b, out, known_sizes(dims, sizes), axes, cost)


def known_sizes(dims, sizes) -> "tuple[tuple[str, int], ...] | None":
    """Return the sizes of these dims as pairs, or None if no sizes are given; raise ShardingError if one is missing."""
    if sizes is None:
        return None
    if missing := [dim for dim in dims if dim not in sizes and not dim.isdigit()]:
        raise ShardingError(
            f"dim {missing[0]} has no size in {dict(sizes)}\n  fix: give every dim a size, or no sizes at all"
        )
    return tuple((dim, sizes[dim] if dim in sizes else int(dim)) for dim in dims)


@lru_cache(maxsize=16384)
def _matmul(a: Spec, b: Spec, out, sizes, mesh, cost) -> Plan:
    sizes, mesh = (None if sizes is None else dict(sizes)), (None if mesh is None else dict(mesh))
    if out is not None:
        products, tail, note = product_chain((a, b), (out.whole(),), out, sizes, mesh, cost)
        return Plan((a, b), out, products[0].steps + tail, cases(a, b, out.dim_names), note)
    plans = []  # by the rules; in case 4, given sizes, the cheaper of two plans is taken
    for gathered in ("b", "a"):
        plans.append(matmul_via(a, b, None, *by_rule(a, b, free_dims(a, b), None, gathered), sizes, mesh))
    axes = mesh or dict.fromkeys(a.named_axes + b.named_axes, NOMINAL)
    return plans[0] if sizes is None else min(plans, key=lambda plan: plan.wire_bytes(sizes, axes, 1))


def matmul_via(a, b, out, a_local, b_local, sizes=None, mesh=None) -> Plan:
    """Plan a product of operands in the given local types, e.g. one of the strategies of Question 4.

    Without `out` the result is left as the product gives it. Raises ShardingError if the two local types cannot be
    multiplied.
    """
    a, b, *local = (parse_plain(x) for x in (a, b, a_local, b_local))
    result = unsplit_spec("C", free_dims(a, b)) if out is None else parse(out)
    bring = resharder(sizes, mesh)
    ((product,), made) = _multiplied((a, b), (result,), lambda *_: local, bring)
    end = made if out is None else result
    return Plan((a, b), end, product.steps + bring(made, end), cases(a, b, result.dim_names))


Bring = Callable[[Spec, Spec], tuple[Step, ...]]  # the steps from one type of an array to another


def resharder(sizes, mesh) -> Bring:
    """Return a function that plans the cheapest steps from one type of an array to another."""
    return lambda src, dst: reshard(src, dst, sizes and {d: sizes[d] for d in src.dim_names}, mesh).steps


def _multiplied(
    operands: Sequence[Spec], results: Sequence[Spec], types: Callable[[int, Spec], Sequence[Spec]], bring: Bring
) -> tuple[tuple[Product, ...], Spec]:
    """Return the products of a chain, and the type of the last one's result.

    `types(number, current)` gives the types in which a product multiplies the result `current` of the previous product
    and the next operand.
    """
    current, products = operands[0], []
    for number, (b, result) in enumerate(zip(operands[1:], results, strict=True)):
        at_a, at_b = types(number, current)
        einsum = Step("Einsum", (), (at_a, at_b), product_type(at_a, at_b, result.dim_names, result.name))
        products.append(Product(bring(current, at_a), bring(b, at_b), einsum))
        current = einsum.after
    return tuple(products), current


def free_dims(a: Spec, b: Spec) -> tuple[str, ...]:
    """Return the default dims of a matmul's result: the dims that only one operand has."""
    return tuple(d for d in a.dim_names if d not in b.dim_names) + tuple(d for d in b.dim_names if d not in a.dim_names)


def cases(a: Spec, b: Spec, kept: tuple[str, ...]) -> tuple[int, ...]:
    """Return the book's cases of a product with the result dims `kept`; several may apply, axis by axis.

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


def by_rule(a: Spec, b: Spec, kept: tuple[str, ...], out: Spec | None, gathered: str = "b") -> tuple[Spec, Spec]:
    """Choose the local types of the operands by the rules of the four cases, with the result dims `kept`.

    A contracted dim keeps the axes that split it alike in both operands (case 3) and is gathered over others (case 2).
    If an axis splits two dims of the result (case 4), the operand whose dim `out` does not split over it is gathered,
    or the operand `gathered` if that does not decide. If `out` splits a dim over axes that neither operand uses, the
    dim is sliced.
    """
    a = a.with_unreduced(axis for axis in a.unreduced if axis not in b.named_axes)
    b = b.with_unreduced(axis for axis in b.unreduced if axis not in a.axes)
    for dim in a.dim_names:
        if dim in b.dim_names:
            axes = _alike(a, b, dim, dim in kept)
            a, b = a.with_axes(dim, axes), b.with_axes(dim, axes)
    while clash := _clash(a, b):
        axis, a_dim, b_dim = clash
        wanted = next((dim for dim in (a_dim, b_dim) if out and axis in out.axes_of(dim)), None)
        if (gathered == "a" and wanted is None) or wanted == b_dim:
            a = _without(a, a_dim, axis, out)
        else:
            b = _without(b, b_dim, axis, out)
    for dim, wanted in out.dims if out else ():
        now = a.axes_of(dim) or b.axes_of(dim)
        free = set(wanted) - {*a.named_axes, *b.named_axes}
        if wanted[: len(now)] == now:
            fresh = tuple(itertools.takewhile(free.__contains__, wanted[len(now) :]))
            a, b = (spec.with_axes(dim, now + fresh) if dim in spec.dim_names else spec for spec in (a, b))
    return a, b


def _alike(a: Spec, b: Spec, dim: str, batch: bool) -> tuple[str, ...]:
    """Return the axes over which both operands shall split a shared dim: those on which their types agree.

    If only one operand splits a batch dim further, these are all of its axes, and the other operand is sliced.
    """
    ours, theirs = a.axes_of(dim), b.axes_of(dim)
    if set(ours) == set(theirs):
        return ours
    agreed = common_prefix(ours, theirs)
    longer, other = (ours, b) if len(ours) > len(theirs) else (theirs, a)
    free = not set(longer[len(agreed) :]) & {*other.named_axes}
    return longer if batch and len(agreed) == min(len(ours), len(theirs)) and free else agreed


def _clash(a: Spec, b: Spec) -> tuple[str, str, str] | None:
    """Return the first axis that splits a dim of `a` and another dim of `b`, and these dims."""
    pairs = ((axis, dim, other) for dim, axes in a.dims for axis in axes for other in b.dim_names if other != dim)
    return next((found for found in pairs if found[0] in b.axes_of(found[2])), None)


def _without(spec: Spec, dim: str, axis: str, out: Spec | None) -> Spec:
    """Return the type gathered over an axis: over it alone if `out` keeps all others, else also over its minor axes."""
    axes = spec.axes_of(dim)
    others = tuple(x for x in axes if x != axis)
    return spec.with_axes(dim, others if out and others == out.axes_of(dim) else axes[: axes.index(axis)])


def product_chain(
    operands, results, out: Spec, sizes=None, mesh=None, cost=None
) -> tuple[tuple[Product, ...], tuple[Step, ...], str]:
    """Plan `((A * B) * C) ... -> out`; return its products, the steps after the last one, and the note of Plan.

    Only the names and the dims of `results`, one for each product, count. Between two products the array is reduced
    over every axis, since a nonlinearity may follow. Given `sizes` or `cost` the search covers the chain as a whole.
    Without them, and if there are too many axes, each product follows the rules of the four cases.
    """
    for spec in (*operands, out) if mesh is not None else ():
        spec.check_axes(mesh)
        if sizes is not None:
            spec.local_shape({dim: sizes[dim] for dim in spec.dim_names}, mesh)
    searched = sizes is not None or cost is not None
    found = searched_types(operands, results, out, sizes, mesh, cost) if searched else None
    local, bring = found or ((), resharder(sizes, mesh))

    def types(number: int, current: Spec) -> Sequence[Spec]:
        if found:
            return local[number]
        b, dims = operands[number + 1], results[number].dim_names
        start = reduced_for(current, b, dims) if number else current
        return by_rule(start, b, dims, out if number == len(results) - 1 else None)

    products, made = _multiplied(operands, results, types, bring)
    return products, bring(made, out), NOTE if searched and not found else ""


def searched_types(
    operands: Sequence[Spec], results: Sequence[Spec], out: Spec, sizes, mesh, cost
) -> tuple[list[tuple[Spec, ...]], Bring] | None:
    """Search for the operands' types of each product in the cheapest plan.

    Returns:
        The types, and a function that brings an array from one type to another; None if there are too many ways.
    """
    partial = (axis for axis in out.unreduced if all(axis not in spec.unreduced for spec in operands))
    within, n = setting((*operands, out), mesh, partial, cost), len(operands)
    pairs = [((0 if i == 1 else n + i - 2), i, n + i - 1) for i in range(1, n)]  # (a, b, result) by number
    specs = (*operands, *results)
    if not all(few_ways(specs[a], specs[b], len(within.axes)) for a, b, _ in pairs):
        return None

    def planned(spec: Spec) -> PlannedArray:
        shape = None if sizes is None else tuple(sizes[dim] for dim in spec.dim_names)
        return PlannedArray(spec, shape if mesh else None, math.prod(shape or ()))

    def bring(src: Spec, dst: Spec) -> tuple[Step, ...]:
        return exact_steps(planned(src), layout(src), layout(dst), within)

    values = [Value(planned(spec)) for spec in operands]
    for a, b, c in pairs:
        arrays, result = [values[a].array, values[b].array], planned(specs[c])
        names = specs[a].dim_names, specs[b].dim_names
        op = LabelledOp("", names, specs[c].dim_names, ((0,), (1,)))
        may = [() if a >= n else within.partial + specs[a].unreduced, within.partial + specs[b].unreduced]
        flops = math.prod([1 if sizes is None else sizes[dim] for dim in {*names[0], *names[1]}])
        values.append(Value(result, (a, b), ways_of(op, arrays, result, may, within, flops)))
    values.append(Value(planned(out), (2 * n - 2,), [Way((layout(out),), layout(out))]))
    _, (*choices, _) = cheapest(values, [layout(spec) for spec in operands], within)
    needed = [choice.way.needed for choice in choices]
    return [
        (retyped(specs[a], at_a), retyped(specs[b], at_b))
        for (a, b, _), (at_a, at_b) in zip(pairs, needed, strict=True)
    ], bring


def few_ways(a: Spec, b: Spec, axes: int) -> bool:
    """Return whether a product's dims can be split over `axes` axes in few enough ways to try all of them."""
    dims = len({*a.dim_names, *b.dim_names})
    return sum(math.perm(axes, n) * math.comb(n + dims - 1, n) for n in range(axes + 1)) <= WAYS


def reduced_for(spec: Spec, b: Spec, kept: tuple[str, ...]) -> Spec:
    """Return a product's result as the next one takes it: scattered as `b` splits a contracted dim, else reduced."""
    for dim, axes in spec.dims:
        wanted = b.axes_of(dim)
        if dim not in kept and wanted[: len(axes)] == axes:
            new = tuple(itertools.takewhile(set(spec.unreduced).__contains__, wanted[len(axes) :]))
            spec = spec.with_unreduced(axis for axis in spec.unreduced if axis not in new).with_axes(dim, axes + new)
    return spec.with_unreduced(())
