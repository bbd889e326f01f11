"""Operators on arrays, read and not run (see scaling.check): what may meet, and what the result is."""

import ast
import re
from dataclasses import replace

from scaling.check.part import Part
from scaling.check.rules import broken_rule, hidden, said, same_dims, under_way
from scaling.check.values import Each, Many, Number, Shard, Text, Var, aligned, together
from scaling.spec import Spec, format_axes

OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"}
OPERATORS |= {ast.MatMult: "@"}
BIAS = re.compile(r"(^|_)(b|bias|beta)(_|\d|$)|bias$", re.IGNORECASE)  # names of what is added to a layer's result
PARAMS = ("params", "weights", "W", "p")  # names of what holds params


def looks_whole(node: ast.AST) -> bool:
    """Whether an expression that nothing is known of is a param, by its name: params are never partial sums."""
    label = {ast.Name: "id", ast.Attribute: "attr", ast.Constant: "value"}
    inner = node.slice if isinstance(node, ast.Subscript) else node
    name = getattr(inner, label.get(type(inner), ""), "") if type(inner) in label else ""
    if isinstance(node, ast.Subscript):
        base = node.value
        of_params = isinstance(base, ast.Name) and base.id in PARAMS and isinstance(name, str) and bool(name)
        return of_params or bool(isinstance(name, str) and BIAS.search(name)) or looks_whole(base)
    return bool(isinstance(name, str) and BIAS.search(name))


class Arithmetic(Part):
    """The part of the reader that knows operators."""

    def combine(self, node: ast.AST, op: str, a, b, sides, frame):
        """a op b. `sides`: the expressions that a and b come from."""
        a, b = self.known(a), self.known(b)
        if isinstance(a, Text) and isinstance(b, Text) and op == "+":
            return Text(a.text + b.text)
        if isinstance(a, (Many, Each)) and isinstance(b, (Many, Each)) and op == "+":
            return together(a, b)
        if isinstance(a, Number) and isinstance(b, Number):
            return Number(0.0 if op == "*" and (a.zero or b.zero) else None)
        arrays = [value for value in (a, b) if isinstance(value, Shard)]
        if any(value.pending for value in arrays):
            self.report(node, "pending", f"{ast.unparse(node)}: {under_way()}", frame)
            return None
        if not arrays:
            return next((value for value in (a, b) if isinstance(value, Var)), None)
        if op == "@":
            return self.matrix_product(node, a, b, frame)
        if len(arrays) == 1:
            return self.with_other(node, op, arrays[0], a, b, sides, frame)
        return self.meet(node, op, arrays[0], arrays[1], frame)

    def with_other(self, node, op: str, held: Shard, a, b, sides, frame):
        """An array and a number, or something unknown."""
        other, side = (b, sides[1]) if held is a else (a, sides[0])
        if held.spec.unreduced:
            if op in "+-":
                if isinstance(other, Number) and not other.zero:
                    self.nonlinear(node, ast.unparse(node), held, frame)
                elif not isinstance(other, Number) and looks_whole(side):
                    self.partial_plus_whole(node, held, ast.unparse(side), frame)
            elif op in ("//", "%", "**") or (op == "/" and held is b):
                self.nonlinear(node, ast.unparse(node), held, frame)
        if isinstance(other, Number):
            scaled = op in "*/" and held.parts == "mean"  # a mean that is scaled may be meant to be summed
            return replace(held, parts="" if scaled else held.parts, key="")
        return replace(held, sure=False, key="", parts="" if op in "*/" and held.parts == "mean" else held.parts)

    def meet(self, node, op: str, a: Shard, b: Shard, frame):
        """Two arrays in one elementwise operation."""
        dims = None if a.loose or b.loose else aligned(a.spec, b.spec)
        if op in "+-":
            if set(a.spec.unreduced) != set(b.spec.unreduced):
                whole, partial = sorted((a, b), key=lambda x: len(x.spec.unreduced))
                moving = not whole.sure and set(whole.spec.axes) & set(partial.spec.unreduced)
                if not (moving or a.through or b.through or hidden(a.spec) or hidden(b.spec)):
                    self.partial_plus_whole(node, partial, str(whole), frame)
                return None
        elif op == "*":
            if both := set(a.spec.unreduced) & set(b.spec.unreduced):
                axes = format_axes(sorted(both))
                fix = f"reduce_scatter or all_reduce one of them over {axes} first"
                self.report(
                    node, "product-of-sums", said(f"{ast.unparse(node)}: {a} times {b}", "product-of-sums", fix), frame
                )
        elif (b if op == "/" else a if op == "**" and not b.spec.unreduced else b).spec.unreduced:
            self.nonlinear(node, ast.unparse(node), b if b.spec.unreduced else a, frame)
        elif op in ("//", "%", "**") and a.spec.unreduced:
            self.nonlinear(node, ast.unparse(node), a, frame)
        if dims is None:
            self.split_alike(node, a, b, frame)
            unreduced = {*a.spec.unreduced, *b.spec.unreduced}
            held = a if len(a.spec.dims) >= len(b.spec.dims) else b
            return held.typed(unreduced=unreduced, sure=False, loose=True, parts="", summed=False)
        if a.sure and b.sure:
            self.split_alike(node, a, b, frame)
        unreduced = {*a.spec.unreduced, *b.spec.unreduced}
        parts = {x.parts for x in (a, b) if x.spec.unreduced}
        if any(axis in unreduced for _, axes in dims for axis in axes):
            return None
        return a.typed(
            dims, unreduced, sure=a.sure and b.sure, parts=parts.pop() if len(parts) == 1 else "",
            summed=a.summed and b.summed, through=a.through or b.through,
        )  # fmt: skip

    def split_alike(self, node, a: Shard, b: Shard, frame) -> None:
        """Report two arrays of the same dims that are split differently."""
        if a.loose or b.loose or not same_dims(a.spec, b.spec) or a.through or b.through:
            return
        wrong = broken_rule(a, Spec(b.spec.name, b.spec.dims, a.spec.unreduced))
        if wrong and "1" not in (*a.spec.dim_names, *b.spec.dim_names):
            what = f"{ast.unparse(node)}: one operand is {a.spec}, the other {b.spec}: {wrong[1]}"
            self.report(node, wrong[0], what, frame)

    def partial_plus_whole(self, node, partial: Shard, whole: str, frame) -> None:
        axes = format_axes(partial.spec.unreduced)
        what = f"{ast.unparse(node)}: one operand is {partial}, the other {whole}: it would be added on every device"
        fix = f"reduce_scatter or all_reduce the partial sums over {axes} first, then add it once"
        detail = f"to a partial sum {{U_{axes}}} only partial sums over the same axes are added"
        self.report(node, "partial-plus-whole", said(what, "partial-plus-whole", fix, detail), frame)

    def nonlinear(self, node: ast.AST, what: str, held: Shard, frame) -> None:
        if held.parts == "root":
            return
        axes = format_axes(held.spec.unreduced)
        fix = f"reduce_scatter or all_reduce it over {axes} first"
        self.report(node, "nonlinear", said(f"{what} of {held}", "nonlinear", fix), frame)

    def matrix_product(self, node, a, b, frame):
        """a @ b, without a line."""
        if not (isinstance(a, Shard) and isinstance(b, Shard)):
            held = a if isinstance(a, Shard) else b
            return replace(held, sure=False, loose=True, key="") if held.spec.unreduced else None
        if both := set(a.spec.unreduced) & set(b.spec.unreduced):
            fix = f"reduce_scatter or all_reduce one of them over {format_axes(sorted(both))} first"
            what = f"{ast.unparse(node)}: {a} times {b}"
            self.report(node, "product-of-sums", said(what, "product-of-sums", fix), frame)
            return None
        unreduced = {*a.spec.unreduced, *b.spec.unreduced}  # what it contracts, only a line could say
        return a.typed(unreduced=unreduced, sure=False, loose=True) if unreduced else None
