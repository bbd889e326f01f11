"""Items of arrays, tuples and dicts, read and not run (see scaling.check): `x[i]`, `params["W"]`, `x[..., None]`."""

import ast
from dataclasses import replace

from scaling.check.part import Part
from scaling.check.torch_functions import literal_value
from scaling.check.values import Each, Many, Record, Shard, Text, element


class Indexing(Part):
    """The part of the reader that reads what stands under an index or a key."""

    def item(self, node: ast.Subscript, frame):
        held, index = self.value(node.value, frame), node.slice
        found = self.value(index, frame) if not isinstance(index, (ast.Slice, ast.Tuple)) else None
        for child in ast.walk(index) if isinstance(index, (ast.Slice, ast.Tuple)) else ():
            if isinstance(child, ast.Name):
                self.value(child, frame)
        if isinstance(held, Record):
            return held.get(found.text) if isinstance(found, Text) else element(Many(tuple(v for _, v in held.items)))
        if isinstance(held, Many):
            number = literal_value(index)
            if isinstance(number, int) and -len(held.items) <= number < len(held.items):
                return held.items[number]
            return Each(element(held)) if isinstance(index, ast.Slice) else element(held)
        if isinstance(found, Shard) and found.spec.unreduced:
            self.nonlinear(node, ast.unparse(node), found, frame)
        if isinstance(held, Shard):
            return self.indexed(held, index)
        if isinstance(index, ast.Slice):
            return held if isinstance(held, Each) else None
        return element(held)

    def indexed(self, held: Shard, index: ast.expr) -> Shard:
        """x[i], x[None], x[..., None], x[:n]: the dims as far as they can be told."""
        if held.pending or held.loose:
            return held
        parts = list(index.elts) if isinstance(index, ast.Tuple) else [index]
        dims, kept, at, loose = list(held.spec.dims), [], 0, False
        for position, part in enumerate(parts):
            value = literal_value(part) if isinstance(part, (ast.Constant, ast.UnaryOp)) else part
            if isinstance(part, ast.Constant) and part.value is None:
                kept.append(("1", ()))
            elif value is ...:
                rest = sum(1 for p in parts[position + 1 :] if not (isinstance(p, ast.Constant) and p.value is None))
                while at < len(dims) - rest:
                    kept.append(dims[at])
                    at += 1
            elif at >= len(dims):
                return replace(held, loose=True, key="")
            elif isinstance(part, ast.Slice):
                kept.append(dims[at])
                at += 1
            elif isinstance(value, int) or isinstance(part, ast.Name):
                if dims[at][1] or (isinstance(part, ast.Name) and len(parts) > 1):
                    return replace(held, loose=True, sure=False, key="")
                loose = len(parts) > 1 or dims[at][0] != "1"
                at += 1
            else:
                return replace(held, loose=True, sure=False, key="")
        key = held.key if len(parts) == 1 and len(kept) + len(dims[at:]) == len(dims) - 1 else ""
        # an item is often taken for an array of its own: one block of keys, one layer
        return replace(held.typed([*kept, *dims[at:]], sure=held.sure and not loose, loose=loose and not key), key=key)
