"""What a product of shards may be: the rules behind every ShardingError of `scaling.collectives.einsum` (Part 3).

1. a contracted dim is split alike in both operands; where it is split over X, the result is unreduced `{U_X}`;
2. a dim of the result is split as it is in the operand that brings it, and no two of them over the same axis;
3. an operand may be unreduced over X if the other one is replicated over X; then so is the result.
"""

from collections.abc import Sequence
from typing import NoReturn

from scaling.spec import Line, ShardingError, Spec, format_axes, parse_line, refuse


def result_type(line: str | Line) -> Spec:
    """The type that the operands' product has, with the dims of the result; ShardingError if there is none."""
    line = parse_line(line)
    operands, result = line.operands, line.result
    axes_of, unreduced = {}, []
    for spec in operands:
        unreduced += spec.unreduced
        for dim, axes in spec.dims:
            if axes_of.setdefault(dim, axes) != axes:
                a, b = (f"over {format_axes(x)}" if x else "not at all" for x in (axes_of[dim], axes))
                refuse_product(
                    line,
                    f"dim {dim} is split {a} in one operand and {b} in the other",
                    "case 2: both operands of a product are split alike along a dim that they share",
                    f"all_gather one of them over {format_axes(axes_of[dim] or axes)}, or shard the other",
                )
    if len(set(unreduced)) < len(unreduced):
        what, rule = "both operands are unreduced over one axis", "a product of sums is not the sum of the products"
        refuse_product(line, what, rule, "all_reduce or reduce_scatter one of them first")
    summed = [axis for dim, axes in axes_of.items() if dim not in result.dim_names for axis in axes]
    for axis in unreduced:
        if any(axis in spec.axes for spec in operands):
            refuse_product(line, f"one operand is unreduced over {axis}, over which the other is split",
                    f"a partial sum over {axis} may only meet what is replicated over {axis}",
                    f"all_reduce or reduce_scatter it over {axis} first")  # fmt: skip
    for dim in result.dim_names:
        if dim not in axes_of:
            rule = "every dim of the result comes from an operand"
            refuse_product(line, f"dim {dim} is in no operand", rule, "leave it out, or name it in an operand")
    dims = tuple((dim, axes_of[dim]) for dim in result.dim_names)
    used = [axis for _, axes in dims for axis in axes] + summed
    for axis in used:
        if used.count(axis) > 1:
            refuse_product(line, f"two dims of the operands are split over {axis}, and not the same one",
                    f"case 4: each device along {axis} would hold only the diagonal blocks of the product",
                    f"all_gather one operand over {axis} first")  # fmt: skip
    return Spec(result.name, dims, tuple(sorted({*unreduced, *summed})))


def product_type(a: Spec, b: Spec, kept: Sequence[str], name: str = "") -> Spec:
    """The type of the product of two shards, with the result dims `kept`; ShardingError if they may not multiply."""
    return result_type(Line((a, b), Spec(name, tuple((dim, ()) for dim in kept))))


def check_product(line: "str | Line") -> Line:
    """The line, or a ShardingError unless it is a product that sends nothing."""
    line = parse_line(line)
    if len(line.operands) > 2:
        raise ShardingError(
            f"{line}\n  einsum multiplies two operands at a time\n  fix: write one line for each product"
        )
    dims = [set(spec.dim_names) for spec in line.operands]
    for dim in line.contract:
        if not all(dim in names for names in dims) or dim in line.result.dim_names:
            what, rule = f"*_{dim} says that {dim} is contracted", "both operands have it and the result does not"
            refuse_product(line, what, rule, "name such a dim after *_, or none")
    natural = result_type(line)
    if natural.same_sharding(line.result):
        return line
    if missing := [axis for axis in natural.unreduced if axis not in line.result.unreduced]:
        over = format_axes(missing)
        carried = [axis for spec in line.operands for axis in spec.unreduced]
        rule = f"case 3: contracting a dim that is split over {over} leaves the result unreduced"
        refuse_product(line, f"each device along {over} holds only a partial sum of the result",
                "a product with a partial sum is a partial sum" if set(missing) & set(carried) else rule,
                f"write {natural}, then reduce_scatter or all_reduce it")  # fmt: skip
    rule = "a product is split as its operands are: einsum sends nothing"
    refuse_product(line, f"the product of these operands is {natural}", rule, "reshard the operands or the result")


def refuse_product(line, what: str, rule: str, fix: str) -> NoReturn:
    refuse(f"einsum: {line}", what, rule, fix)
