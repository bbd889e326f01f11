"""Typed calls, read and not run (see scaling.check): the line by itself, its operands, and what it returns."""

import ast
import re
from dataclasses import replace

from scaling.algebra import rules
from scaling.algebra.contraction import check_product
from scaling.algebra.resharding import reshard
from scaling.check.part import Part
from scaling.check.rules import broken_rule, hidden, said
from scaling.check.values import Each, Gone, Known, Many, Record, Shard, Text, Var, as_array
from scaling.spec import ShardingError, Spec, format_axes, parse, parse_line

KINDS = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "all_to_all": "AllToAll",
    "ragged_all_to_all": "AllToAll",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "scatter": "Scatter",
    "gather": "Gather",
}
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
UNNAMED = re.compile("⟨(\\d+)⟩")  # a part of a text that is only known when the code runs


class Lines(Part):
    """The part of the reader that checks typed calls. `seen`: {call: why it cannot be read, "" if it can}."""

    def typed_call(self, name: str, node: ast.Call, frame):
        """Check the line by itself and its operands; what it returns."""
        nodes, values = self.spread_operands(node, frame)
        keywords = {k.arg: self.value(k.value, frame) for k in node.keywords}
        line = values[0] if values else keywords.get("line")
        text, why = readable(line, node)
        if why:
            self.seen.setdefault(node, (frame.module, why))
            self.taken(node, values, None, frame)
            return carried(name, values)
        try:
            before, after = declared(name, text)
        except ShardingError as error:
            if "hole" in text:
                self.seen.setdefault(node, (frame.module, unreadable(node)))
                return carried(name, values)
            self.seen[node] = frame.module, ""
            self.report(node, "illegal-line", str(error), frame)
            return None
        self.seen[node] = frame.module, ""
        named = {"x": 0, "a": 0, "b": 1}
        given = list(zip(nodes[1:], values[1:], strict=False))
        given += [(k.value, keywords[k.arg]) for k in node.keywords if k.arg in named]
        if name == "einsum":  # it waits for operands that are under way
            given = [(argument, settle(value)) for argument, value in given]
        held = self.operands(name, before, given, keywords, frame)
        result = self.result(name, node, before, after, held, keywords, frame)
        self.taken(node, values, result, frame)
        return result

    def spread_operands(self, node: ast.Call, frame) -> tuple[list, list]:
        """(expressions, values) of the positional arguments; after a starred one of unknown length nothing is known."""
        nodes, values = [], []
        for argument in node.args:
            found = self.value(argument, frame)
            if isinstance(argument, ast.Starred) and not isinstance(found, Many):
                break
            each = found.items if isinstance(argument, ast.Starred) else (found,)
            nodes += [argument] * len(each)
            values += each
        return nodes, values

    def operands(self, name: str, before, given, keywords, frame) -> "list[Shard | None]":
        """Hold the operands against the types that the line declares; from then on they are trusted."""
        found = []
        for spec, (argument, value) in zip(before, given, strict=False):
            value = self.known(value)
            held = as_array(value)
            found.append(held)
            if isinstance(value, Var):
                self.bound.setdefault(value.number, Shard(spec, sure=False))
            # a ring: each block collects its sum on its way round
            collects = held is not None and name == "ppermute" and {*held.spec.unreduced} & {*spec.axes}
            if held is not None and not collects and (wrong := broken_rule(side_by_side(held, spec), spec)):
                what = f"{ast.unparse(argument)} holds {held}, but the line says {spec}"
                self.report(argument, wrong[0], f"{what}: {wrong[1]}", frame)
            elif wrong := self.misnamed(argument, held, spec, frame):
                self.report(argument, "wrong-name", wrong, frame)
            elif (held is None or held.loose) and name == "all_gather" and (wrong := self.unlike_specs(spec)):
                what = f"{ast.unparse(argument)} is gathered as {spec}, but {wrong}"
                fix = "gather over the axes that SPECS names"
                self.report(argument, "split", said(what, "split", fix), frame)
            if held is not None and name in REDUCTIONS:
                self.how_reduced(argument, held, before[0], keywords.get("op"), frame)
            if isinstance(argument, ast.Name) and not isinstance(value, (Each, Record, Var)):
                same = held if held is not None and held.spec.same_sharding(spec) else None
                frame.env[argument.id] = Shard(spec) if same is None else replace(same, sure=True)
        return found

    def how_reduced(self, node, held: Shard, before: Spec, op, frame) -> None:
        """A sum's parts are added, a mean's averaged."""
        how = op.text if isinstance(op, Text) else "sum" if op is None else ""
        if held.parts in ("", "root", how) or not how or not before.unreduced:
            return
        axes = format_axes(before.unreduced)
        if held.parts == "mean":
            what = f"{ast.unparse(node)} is a mean over each device's own part, and op={how!r} puts the means together"
            fix = f"take its sum() and divide by the whole size, or give op='mean' if the parts over {axes} are equal"
        else:
            what = f"{ast.unparse(node)} holds parts of a {held.parts} over {axes}, which op={how!r} would not give"
            fix = "leave out op" if held.parts == "sum" else f"give op={held.parts!r}"
        self.report(node, "how-reduced", said(what, "how-reduced", fix), frame)

    def misnamed(self, argument, held: "Shard | None", spec: Spec, frame) -> str:
        """A param, or an item of a dict by its name, that goes into a line under another param's name."""
        key = held.key if held is not None else ""
        others = {name for name in self.specs if name not in ("In", "Out")}
        inner = argument.value if isinstance(argument, ast.Subscript) and not _key_of(argument) else argument
        if not key and _key_of(inner):
            key, others = _key_of(inner), frame.module_keys
        if not key or not spec.name or key == spec.name or spec.name not in others or key not in others:
            return ""
        what = f"{ast.unparse(argument)} is {key}, but the line says {spec}"
        return said(what, "wrong-name", f"take {spec.name}, or name it {key} in the line")

    def unlike_specs(self, spec: Spec) -> str:
        """Of a gathered array of which only the name is known: an axis that SPECS has for another dim, or nowhere."""
        known, axes_known = self.specs.get(spec.name), {axis for s in self.specs.values() for axis in s.axes}
        if known is None or hidden(spec):
            return ""
        for dim, axes in spec.dims:
            for axis in axes:
                elsewhere = axis in known.axes and axis not in known.axes_of(dim)
                if dim in known.dim_names and (elsewhere or axis not in axes_known):
                    return f"SPECS says {known}: {dim} is not split over {axis}"
        return ""

    def result(self, name: str, node: ast.Call, before, after: Spec, held, keywords, frame):
        flags = [k.value for k in node.keywords if k.arg in ("async_op", "defer")]
        parts = {x.parts for x in held if x is not None and x.spec.unreduced}
        if name in ("einsum", "masked") and {*after.unreduced} - {axis for spec in before for axis in spec.unreduced}:
            parts.add("sum")
        parts = parts.pop() if len(parts) == 1 and after.unreduced else ""
        parts = "root" if name in ("gather", "reduce") else parts  # what the root has: the other parts are zero
        summed = name == "all_reduce" or (name not in REDUCTIONS and any(x is not None and x.summed for x in held))
        moves = name in ("ppermute", "send", "recv")  # of a block on its way only its sender knows what it is
        return Shard(
            after,
            sure=not moves,
            pending=any(getattr(flag, "value", False) for flag in flags),
            parts=parts,
            summed=summed,
        )

    def taken(self, node: ast.Call, values, result, frame) -> None:
        """What donate=True and out= take away: the one variable is gone, the other holds the result."""
        for keyword in node.keywords:
            if keyword.arg == "donate" and getattr(keyword.value, "value", False) is True and len(node.args) > 1:
                operand = node.args[1]
                if isinstance(operand, ast.Name):
                    frame.env[operand.id] = Gone(ast.unparse(node.func), node.lineno)
            elif keyword.arg == "out" and isinstance(keyword.value, ast.Name) and isinstance(result, Shard):
                frame.env[keyword.value.id] = result

    def discarded(self, call: ast.Call, frame) -> None:
        """Report a typed call whose result is thrown away, though its operand, left as it is, is read afterwards."""
        callee, x = self.callee(call.func, frame), call.args[1] if len(call.args) > 1 else None
        takes = any(k.arg in ("out", "donate") for k in call.keywords)
        if takes or not isinstance(x, ast.Name) or not isinstance(callee, Known) or callee.kind != "typed":
            return
        if callee.name != "send" and read_after(x.id, call, frame.module.tree):
            name = ast.unparse(call.func)
            what = f"what {name} returns is thrown away, and {x.id}, which it leaves as it is, is read afterwards"
            self.report(call, "discarded", said(what, "discarded", f"{x.id} = {name}(...)"), frame)


def carried(name: str, values: list) -> "Shard | None":
    """What a line that is not known makes of partial sums: all but a reduction leaves them unreduced."""
    partial = next((x for x in map(as_array, values) if x is not None and x.spec.unreduced), None)
    linear = partial is not None and name in ("einsum", "all_gather", "all_to_all", "ppermute", "shard")
    return replace(partial, sure=False, loose=True, pending=False, key="") if partial is not None and linear else None


def side_by_side(held: Shard, spec: Spec) -> Shard:
    """Partial sums {U_Y} whose first dim is 1 as the parts that they are, in a dim split over Y: what is summed."""
    dims = held.spec.dims[1:]
    if held.loose or held.spec.dims[:1] != (("1", ()),) or spec.dims[0][1] != held.spec.unreduced != ():
        return held
    return held.typed((spec.dims[0], *dims), ())


def line_of(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def _ends(node: ast.AST) -> int:
    """The last line of a node."""
    return getattr(node, "end_lineno", None) or line_of(node)


def read_after(name: str, call: ast.Call, tree: ast.Module) -> bool:
    """Whether a variable is read below a call in its function before it gets another value; not by the same call."""
    around = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.lineno < call.lineno <= _ends(n)]
    if not around:
        return False
    forks = [n for n in ast.walk(around[-1]) if isinstance(n, ast.If) and n.body[0].lineno <= call.lineno]
    other = {id(n) for f in forks if call.lineno <= _ends(f.body[-1]) for s in f.orelse for n in ast.walk(s)}
    below = [n for n in ast.walk(around[-1]) if getattr(n, "lineno", 0) > _ends(call) and id(n) not in other]
    again = {id(n) for c in below if isinstance(c, ast.Call) and same_call(c, call) for n in ast.walk(c)}
    reads = [line_of(n) for n in below if is_name(n, name, ast.Load) and id(n) not in again]
    binds = [line_of(n) for n in below if is_name(n, name, ast.Store)]
    return bool(reads) and min(reads) <= min(binds, default=min(reads))


def is_name(node: ast.AST, name: str, context: type) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, context)


def same_call(a: ast.Call, b: ast.Call) -> bool:
    """Whether a call is made again, as a benchmark does."""
    return ast.dump(a) == ast.dump(b)


def settle(value):
    """An operand of einsum, which waits for what is under way."""
    return replace(value, pending=False) if isinstance(value, Shard) else value


def _key_of(node) -> str:
    """The constant name of an item, `params["W_in"]`; empty if the expression is something else."""
    name = getattr(node.slice, "value", None) if isinstance(node, ast.Subscript) else None
    return name if isinstance(name, str) else ""


def readable(line, node: ast.Call) -> tuple[str, str]:
    """(the text of a line, why it cannot be read). Axes that are only known when it runs get a name: hole0."""
    if not isinstance(line, Text):
        return "", unreadable(node)
    text = line.text
    for before, after in (("_⟨", "_{hole⟨"), ("(?<=[A-Za-z0-9'])⟨", "_{hole⟨")):
        text = re.sub(before + "(\\d+)⟩", lambda m, after=after: f"{after[:-1]}{m[1]}}}", text)
    text = re.sub("\\]⟨(\\d+)⟩", "] {U_{hole\\1}}", text)
    return (text, "") if "⟨" not in text else ("", unreadable(node))


def unreadable(node: ast.Call) -> str:
    shown = ast.unparse(node.args[0]) if node.args else "its line"
    return f"{shown} is only known when it runs"


def declared(name: str, text: str) -> tuple[tuple[Spec, ...], Spec]:
    """The types of the operands and of the result that a line declares; ShardingError if the line breaks a rule."""
    if name == "einsum":
        line = check_product(text)
        return line.operands, line.result
    if name in ("ppermute", "send", "recv") and "->" not in text:
        return (parse(text),), parse(text)
    if name == "masked":
        spec = parse(text)
        if not spec.unreduced:
            raise ShardingError(
                f"masked: {spec}\n  rule: a mask makes partial sums\n  fix: give their type, {spec} {{U_X}}"
            )
        return (spec.with_unreduced(()),), spec
    if name == "unshard":
        spec = parse(text)
        return (spec,), spec.whole()
    if name == "shard" and "->" not in text:
        spec = parse(text)
        return (Spec(spec.name, tuple((dim, ()) for dim in spec.dim_names)),), spec
    line = parse_line(text)
    if name == "reshard":
        reshard(line.operands[0], line.result)
    elif name != "ppermute" and not (name == "shard" and line.operands[0].same_sharding(line.result)):
        rules.collective_steps(KINDS.get(name, "Slice"), text)
    return line.operands, line.result
