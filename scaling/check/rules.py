"""The rules that the static checker knows, by name, and what it says when one is broken (docs/rules.md shows each)."""

import ast

from scaling.check.values import ANY, Shard
from scaling.spec import Spec, format_axes

RULES = {
    "illegal-line": "a line obeys the notation by itself, whatever its operands are",
    "dims": "an operand has the dims that its type says, in their order",
    "split": "only a collective changes how an array is split",
    "unreduced": "a partial sum stays {U} until it is reduced",
    "reduced-twice": "what is reduced already is not reduced again",
    "partial-plus-whole": "to a partial sum only partial sums over the same axes are added",
    "nonlinear": "a nonlinear function of partial sums is not the sum of the function's parts",
    "product-of-sums": "a product of two partial sums is not the sum of the products",
    "how-reduced": "the parts are put together the way they were made: parts of a sum are added",
    "branches": "a value is unreduced over the same axes whichever way it is made",
    "never-reduced": "a partial sum is reduced before it is a result",
    "never-waited": "what async_op=True or defer=True returns is waited for",
    "discarded": "a collective changes nothing in place: what it returns is used",
    "pending": "what is still under way is waited for before it is used",
    "donated": "what was donated, by donate=True or as out=, is not read again",
    "wrong-name": "a param goes into a line under its own name",
    "result": "a strategy's functions return what SPECS says",
    "gradient": "an optimizer needs gradients typed as the params",
    "loss": "a loss is differentiated while it is unreduced, each device's own terms; its value is reduced afterwards",
    "specs": "SPECS is a dict of types",
    "ignore": "a comment that silences the checker names the rule: # scaling: ignore[rule]",
    "python": "the checker reads Python",
}


def said(what: str, rule: str, fix: str = "", detail: str = "") -> str:
    """The text of a finding: what is wrong, the rule (or its `detail` here) and the fix."""
    return f"{what}\n  rule: {detail or RULES[rule]}" + (f"\n  fix: {fix}" if fix else "")


def same_dims(a: Spec, b: Spec) -> bool:
    """Whether the dims have the same names, in order; a name that is not known is any name."""
    pairs = zip(a.dim_names, b.dim_names, strict=False)
    return len(a.dims) == len(b.dims) and all(x == y or {x, y} & {ANY, "1"} for x, y in pairs)


def broken_rule(held: Shard, declared: Spec) -> "tuple[str, str] | None":
    """(rule, what is wrong and the fix) about using an array as the declared type; None if nothing is."""
    if held.pending:
        return "pending", under_way()
    spec, loose = held.spec, held.loose
    over = [axis for axis in spec.unreduced if axis not in declared.unreduced]
    gone = [axis for axis in declared.unreduced if axis not in spec.unreduced]
    alike = same_dims(spec, declared)
    if hidden(spec) or hidden(declared):
        return None if alike or loose or not held.sure else unlike_dims(spec, declared)
    if not loose and not alike:
        return unlike_dims(spec, declared) if held.sure else None
    if over and (loose or spec.dims == declared.dims or not gone):
        axes = format_axes(over)
        fix = f"reduce_scatter or all_reduce it over {axes}"
        detail = f"a partial sum stays {{U_{axes}}} until it is reduced"
        return "unreduced", said(f"it is still unreduced over {axes}", "unreduced", fix, detail)
    if held.through and declared.unreduced:
        fix = f"reduce it over {format_axes(declared.unreduced)} before {held.through}"
        return "nonlinear", said(f"{held.through} is not known to be linear", "nonlinear", fix)
    if gone and not over and not held.sure:
        return None
    if gone and (loose or spec.dims == declared.dims):
        what = f"it is not unreduced over {format_axes(gone)}"
        return "reduced-twice", said(what, "reduced-twice", "drop the reduction, or the {U} of this type")
    for (dim, was), (other, says) in zip(spec.dims, declared.dims, strict=True) if not loose else ():
        if was != says and not {dim, other} & {ANY, "1"}:
            a, b = (format_axes(axes) if axes else "no axis" for axes in (was, says))
            fix = "let the type say how the array is split, or all_gather, reduce_scatter or shard it first"
            return "split", said(f"{dim} is split over {a}, not over {b}", "split", fix)
    if (over or gone) and not loose:
        return "unreduced", said("the unreduced axes differ", "unreduced", "", "only a reduction removes axes from {U}")
    return None


def under_way() -> str:
    return said("it is still under way", "pending", "wait(x), or x.wait(), first")


def unlike_dims(spec: Spec, declared: Spec) -> tuple[str, str]:
    fix = "give the operands in the order of their types, and transpose what must be"
    return "dims", said(f"the dims differ: {list(spec.dim_names)} and {list(declared.dim_names)}", "dims", fix)


def hidden(spec: Spec) -> bool:
    """Whether a type has an axis that is only known when the code runs, as of f"A[I_{axis}]"."""
    return any(axis.startswith("hole") for axis in spec.axes + spec.unreduced)


def partly_reduced(a, b, test: ast.expr) -> str:
    """What is wrong with a value that is one of two arrays, of which one is a partial sum and the other is not; where
    the `test` asks for a mesh or a size nothing is: over an axis of size 1 a partial sum is whole."""
    if not isinstance(a, Shard) or not isinstance(b, Shard) or a.pending != b.pending:
        return ""
    if a.spec.unreduced == b.spec.unreduced or not same_dims(a.spec, b.spec) or a.loose or b.loose:
        return ""
    if hidden(a.spec) or hidden(b.spec) or any(word in ast.unparse(test) for word in ("mesh", "size")):
        return ""
    return said(f"it is {a.spec} or {b.spec}", "branches", "reduce it in both branches, or in neither")
