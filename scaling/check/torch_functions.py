"""Torch's functions and methods, read and not run (see scaling.check): every function of a partial sum that is not
known to be linear is reported."""

import ast
from dataclasses import replace

from scaling.check.part import Part
from scaling.check.rules import hidden, said, under_way
from scaling.check.torch_names import (
    ADDED,
    BILINEAR,
    CONSTANTS,
    INTEGERS,
    JOINS,
    KEEP,
    LOOSE,
    MULTIPLY_ADD,
    PARTS,
    PLAIN,
    POINTWISE,
    SIGNS,
    SUMS,
    ZEROS,
)
from scaling.check.values import ANY, Each, Many, Number, Shard, Var, as_array, element
from scaling.spec import Spec


class TorchFunctions(Part):
    """The part of the reader that knows torch."""

    def of_torch(self, name: str, node: ast.Call, args: list, keywords: dict, frame):
        """What `torch.name(*args)`, or `args[0].name(*args[1:])`, gives."""
        if name.endswith("_") and not name.endswith("__"):
            name = name[:-1]
        args = [self.known(value) for value in args]
        held = as_array(args[0]) if args else None
        if name in PLAIN:
            return None
        if name in ZEROS:
            return Number(0.0)
        if name in CONSTANTS and not any(isinstance(value, Shard) and value.spec.unreduced for value in args[1:]):
            return Number(None)
        if any(isinstance(value, Shard) and value.pending for value in args):
            self.report(node, "pending", f"{ast.unparse(node)}: {under_way()}", frame)
            return None
        partial = next((x for x in map(as_array, args) if x is not None and x.spec.unreduced), None)
        if name in SIGNS and len(args) > 1:
            if name in ("add", "sub", "subtract") and isinstance(keywords.get("alpha"), Shard):
                return None
            return self.combine(node, SIGNS[name], args[0], args[1], self.sides(node), frame)
        if name in JOINS:
            return self.joined(name, node, args, keywords, frame)
        if name == "embedding" and len(args) > 1:
            if held is not None and held.spec.unreduced:
                self.nonlinear(node, name, held, frame)
            return looked_up(held, as_array(args[1]))
        if name == "where" and len(args) == 3:
            condition, a, b = args if len(node.args) == 3 else (args[1], args[0], args[2])
            return self.chosen(node, condition, a, b, frame)
        if name == "masked_fill" and len(args) > 1:
            return self.chosen(node, args[1], args[0], args[2] if len(args) > 2 else keywords.get("value"), frame)
        if name in ADDED and args:
            return self.combine(node, "+", args[0], args[-1], [node, node], frame) if partial else args[0]
        if name in MULTIPLY_ADD and len(args) > 2 and partial is not None:
            product = self.bilinear(name, node, args[1:3], {}, frame) or (Shard(Spec("", ()), loose=True))
            return self.combine(node, "+", args[0], product, [node, node], frame)
        if name in BILINEAR:
            return self.bilinear(name, node, args, keywords, frame)
        if name in ("lerp",) and len(args) > 1:
            return self.combine(node, "+", args[0], args[1], self.sides(node), frame)
        if isinstance(args[0] if args else None, Var):
            return args[0] if name in KEEP | POINTWISE else None
        if isinstance(args[0] if args else None, Number):
            return args[0] if name in KEEP | LOOSE else None
        if held is None:
            return None
        if partial is not None and (partial is not held or (name in ("to", "type") and to_integers(node))):
            self.nonlinear(node, name, partial, frame)
        if name == "pad" and partial is held and pads_with_more(args, keywords):
            self.nonlinear(node, ast.unparse(node), held, frame)
        if name in KEEP:
            return replace(held, key="")
        if name in SUMS and not (held.spec.unreduced and SUMS[name] in ("max", "min")):
            return self.reduced_over_dims(SUMS[name], node, held, args[1:], keywords)
        if name in PARTS:
            return Each(replace(self.turned(name, node, held), key=""))
        index = as_array(args[2]) if name in ("gather", "take_along_dim") and len(args) > 2 else None
        if index is not None and not index.loose and not {*index.spec.axes} & {*held.spec.unreduced}:
            return held.typed(index.spec.dims, loose=False, summed=False)
        if name in LOOSE:
            return self.turned(name, node, held)
        if partial is not None:
            if partial is held:
                self.nonlinear(node, name, partial, frame)
            return replace(partial, sure=False, key="", loose=partial.loose or name not in POINTWISE)
        return replace(held, key="", summed=False) if name in POINTWISE else None

    def sides(self, node: ast.Call) -> list[ast.AST]:
        """The two operands of add(a, b) or a.add(b), as they are written."""
        given = [node.func.value, *node.args] if isinstance(node.func, ast.Attribute) else node.args
        operands: list[ast.AST] = [*(given if len(node.args) < 2 else node.args), *(k.value for k in node.keywords)]
        return operands[:2] if len(operands) > 1 else [node, node]

    def alike(self, node: ast.Call, items: Many, frame) -> None:
        """Report partial sums beside whole arrays in one array."""
        arrays = [x for x in map(as_array, items.items) if x is not None and not x.pending and not x.through]
        whole = next((x for x in arrays if not x.spec.unreduced), None)
        partial = next((x for x in arrays if x.spec.unreduced), None)
        if whole is None or partial is None or any(hidden(x.spec) for x in arrays):
            return
        if whole.sure or not {*whole.spec.axes} & {*partial.spec.unreduced}:
            self.partial_plus_whole(node, partial, str(whole), frame)

    def joined(self, name: str, node: ast.Call, args, keywords, frame):
        """cat and stack of a list of arrays."""
        items = args[0] if args else keywords.get("tensors")
        if isinstance(items, Many):
            self.alike(node, items, frame)
        held = as_array(element(items))
        if held is None or held.loose or held.pending:
            return replace(held, key="") if held is not None else None
        if isinstance(items, Many) and None in items.items:
            held = replace(held, sure=False)
        dim = literal_value(node.args[1] if len(node.args) > 1 else None)
        if name == "stack" and (dim == 0 or (len(node.args) == 1 and not node.keywords)):
            return held.typed(((ANY, ()), *held.spec.dims))
        return replace(held, loose=True, key="")

    def chosen(self, node, condition, a, b, frame):
        """where(condition, a, b), whose condition is the same on every device, or the caller's own affair."""
        if isinstance(condition, Shard) and condition.spec.unreduced:
            self.nonlinear(node, ast.unparse(node), condition, frame)
        partial = next((x for x in (a, b) if isinstance(x, Shard) and x.spec.unreduced), None)
        other = b if partial is a else a
        if partial is not None and isinstance(other, Number) and not other.zero:
            self.nonlinear(node, ast.unparse(node), partial, frame)
        if isinstance(a, Shard) and isinstance(b, Shard):
            return self.combine(node, "+", a, b, [node, node], frame)
        return replace(found, sure=False, key="") if (found := a if isinstance(a, Shard) else as_array(b)) else None

    def bilinear(self, name: str, node, args, keywords, frame):
        """A product of two arrays, or of several; of F.linear also with its bias."""
        arrays = [value for value in args if isinstance(value, Shard)]
        if name in ("mm", "matmul") and len(args) == 2 and arrays:
            return self.matrix_product(node, args[0], args[1], frame)
        partial = [value for value in arrays if value.spec.unreduced]
        if not partial:
            return None
        bias = args[2] if len(args) > 2 else keywords.get("bias")
        if name == "linear" and partial[0] is args[0] and (len(node.args) > 2 or "bias" in keywords):
            if not isinstance(bias, Shard) or set(bias.spec.unreduced) != set(partial[0].spec.unreduced):
                self.partial_plus_whole(node, partial[0], "its bias", frame)
            return None
        if len(partial) > 1 and set(partial[0].spec.unreduced) & set(partial[1].spec.unreduced):
            what = f"{ast.unparse(node)}: {partial[0]} times {partial[1]}"
            self.report(node, "product-of-sums", said(what, "product-of-sums", "reduce one of them first"), frame)
        return replace(partial[0], sure=False, loose=True, key="")

    def reduced_over_dims(self, how: str, node: ast.Call, held: Shard, args, keywords):
        """sum, mean, amax, amin: over a dim that is split they leave parts, {U}, of the sum, the mean, the maximum."""
        if held.loose:  # of a whole array it may be parts of a sum over any axis that splits it
            unknown = held.spec.axes and not held.spec.unreduced
            return None if unknown else replace(held, key="", sure=False)
        given = node.args if isinstance(node.func, ast.Attribute) and len(args) == len(node.args) else node.args[1:]
        where = next((k.value for k in node.keywords if k.arg in ("dim", "axis")), given[0] if given else None)
        keep = next((k.value for k in node.keywords if k.arg == "keepdim"), given[1] if len(given) > 1 else None)
        count, dims = len(held.spec.dims), held.spec.dims
        over = literal_value(where) if where is not None else range(count)
        over = (over,) if isinstance(over, int) else over
        if over is None or not all(isinstance(i, int) and -count <= i < count for i in over):
            return replace(held, loose=True, sure=False, key="")
        gone = {i % count for i in over}
        summed = [axis for i in gone for axis in dims[i][1]]
        kept = bool(literal_value(keep)) if keep is not None else False
        left = [("1", ()) if i in gone else dim for i, dim in enumerate(dims) if kept or i not in gone]
        unreduced = {*held.spec.unreduced, *summed}
        parts = how if summed else held.parts
        if summed and held.spec.unreduced and held.parts != how:
            parts = ""
        # lines need not mention every axis that splits a dim: it may be a sum over more
        return held.typed(left, unreduced, parts=parts, sure=held.sure and not summed)

    def turned(self, name: str, node, held: Shard) -> Shard:
        """Transposes and views: the dims as far as they can be told."""
        dims, numbers = held.spec.dims, [literal_value(a) for a in getattr(node, "args", ())]
        if held.loose:
            return replace(held, key="")
        if name in ("T", "mT", "t", "H", "mH", "adjoint") and len(dims) == 2:
            return held.typed(dims[::-1])
        if numbers and not isinstance(numbers[0], int) and isinstance(node.func, ast.Attribute):
            numbers = numbers[1:]
        given = len(numbers)
        numbers = [n for n in numbers if isinstance(n, int) and -len(dims) <= n <= len(dims)]
        if len(numbers) == given:
            if name in ("transpose", "swapaxes", "swapdims") and len(numbers) == 2:
                order = list(range(len(dims)))
                a, b = (n % len(dims) for n in numbers)
                order[a], order[b] = order[b], order[a]
                return held.typed(dims[i] for i in order)
            if name == "permute" and len(numbers) == len(dims):
                return held.typed(dims[n % len(dims)] for n in numbers)
            if name == "unsqueeze" and len(numbers) == 1:
                at = numbers[0] % (len(dims) + 1)
                return held.typed((*dims[:at], ("1", ()), *dims[at:]))
        return replace(held, loose=True, key="")


def looked_up(ids: "Shard | None", table: "Shard | None") -> "Shard | None":
    """Rows of a table by their numbers: also where its rows are split they are no partial sums, before a mask."""
    if table is None or table.loose or table.pending:
        return table
    dims = (*ids.spec.dims, *table.spec.dims[1:]) if ids is not None and not ids.loose else table.spec.dims[1:]
    free = [axis for _, axes in dims for axis in axes]
    if len(free) != len(set(free)):
        return None
    known = ids is not None and not ids.loose
    return Shard(Spec("", dims, table.spec.unreduced), sure=table.sure, loose=not known)


def to_integers(node: ast.Call) -> bool:
    """Whether x.to(...) or x.type(...) is given a type of whole numbers."""
    given = [*node.args, *(k.value for k in node.keywords)]
    return any(getattr(each, "attr", getattr(each, "id", "")) in INTEGERS for each in given)


def pads_with_more(args: list, keywords: dict) -> bool:
    """Whether pad(x, width, mode, value) adds other numbers than zeros."""
    value = args[3] if len(args) > 3 else keywords.get("value")
    return isinstance(value, Number) and not value.zero


def literal_value(node):
    """The value of an expression that is written out; None of any other."""
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
