"""What a product of shards may be: the rules behind every ShardingError of `scaling.collectives.einsum` (Part 3).

1. a contracted dim is split alike in both operands; where it is split over X, the result is unreduced `{U_X}`;
2. a dim of the result is split as it is in the operand that brings it, and no two of them over the same axis;
3. an operand may be unreduced over X if the other one is replicated over X; then so is the result.
"""

from collections.abc import Sequence
from typing import NoReturn

from scaling.algebra.law import Illegal, LabelledOp
from scaling.algebra.layouts import layout, retyped
from scaling.spec import Line, ShardingError, Spec, format_axes, parse_line, refuse

BROKEN = {  # by the law: what, the rule, the fix, in the words of a product's line; X is the axis
    "two sums": (
        "both operands are unreduced over one axis",
        "a product of sums is not the sum of the products",
        "all_reduce or reduce_scatter one of them first",
    ),
    "meets": (
        "one operand is unreduced over {X}, over which the other is split",
        "a partial sum over {X} may only meet what is replicated over {X}",
        "all_reduce or reduce_scatter it over {X} first",
    ),
    "case 4": (
        "two dims of the operands are split over {X}, and not the same one",
        "case 4: each device along {X} would hold only the diagonal blocks of the product",
        "all_gather one operand over {X} first",
    ),
}


def result_type(line: str | Line) -> Spec:
    """The type that the operands' product has, with the dims of the result; ShardingError if there is none."""
    line = parse_line(line)
    axes_of: dict[str, tuple[str, ...]] = {}
    for dim, axes in (pair for spec in line.operands for pair in spec.dims):
        if axes_of.setdefault(dim, axes) != axes:
            a, b = (f"over {format_axes(x)}" if x else "not at all" for x in (axes_of[dim], axes))
            refuse_product(
                line,
                f"dim {dim} is split {a} in one operand and {b} in the other",
                "case 2: both operands of a product are split alike along a dim that they share",
                f"all_gather one of them over {format_axes(axes_of[dim] or axes)}, or shard the other",
            )
    names = line.result.dim_names
    for dim in names:
        if dim not in axes_of:
            rule = "every dim of the result comes from an operand"
            refuse_product(line, f"dim {dim} is in no operand", rule, "leave it out, or name it in an operand")
    product = LabelledOp("einsum", tuple(spec.dim_names for spec in line.operands), names, "each")
    try:
        return retyped(line.result, product.infer([layout(spec) for spec in line.operands])[1])
    except Illegal as illegal:
        refuse_product(line, *(words.format(X=illegal.axis) for words in BROKEN[illegal.broken]))


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
