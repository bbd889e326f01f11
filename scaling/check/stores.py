"""What is stored in dicts, lists and arrays, read and not run (see scaling.check): `grads["W_in"] = dW`, `x[i] = y`."""

import ast
from dataclasses import replace

from scaling.check.docstrings import commented
from scaling.check.part import Part
from scaling.check.rules import broken_rule
from scaling.check.values import ANY, Each, Many, Number, Record, Shard, Text, Var, element, merge
from scaling.spec import Spec


class Stores(Part):
    """The part of the reader that reads what is stored by an index or a key."""

    def put(self, target: ast.Subscript, found, frame) -> None:
        """`grads["W_in"] = dW` changes what is known of a dict."""
        name, key = getattr(target.value, "id", ""), target.slice
        held = frame.env.get(name)
        if isinstance(held, (Shard, Number)):
            self.written(target, held, found, frame)
        elif isinstance(held, Record):
            text = self.value(key, frame)
            known = text.text if isinstance(text, Text) else ANY
            frame.env[name] = held.put(known, found if known != ANY else merge(held.get(ANY), found))
        elif isinstance(held, Many) and isinstance(key, ast.Constant) and isinstance(key.value, int):
            items = list(held.items)
            if -len(items) <= key.value < len(items):
                items[key.value] = found
                frame.env[name] = Many(tuple(items))
        elif isinstance(held, Many) and not isinstance(key, ast.Slice):
            frame.env[name] = Each(merge(element(held), found))
        elif isinstance(held, Each) and not isinstance(key, ast.Slice):
            frame.env[name] = Each(merge(held.item, found))

    def by_comment(self, node: ast.Assign, found, frame):
        """What is assigned; if nothing is known of it, what the comment beside it says. Else they are to agree."""
        name = getattr(node.targets[0], "id", "")
        spec = commented(frame.module.lines[(node.end_lineno or node.lineno) - 1], name) if name else None
        if spec is None or isinstance(found, (Many, Record, Each)):
            return found
        if isinstance(found, Shard) and (wrong := broken_rule(found, spec)):
            self.report(node, wrong[0], f"{name} is {found}, but its comment says {spec}: {wrong[1]}", frame)
        tells = isinstance(found, Shard) and found.sure and not found.loose
        return found if tells else Shard(spec, parts="sum" if spec.unreduced else "")

    def written(self, target: ast.Subscript, held: "Shard | Number", found, frame) -> None:
        """`x[i] = y`: into partial sums go partial sums or zeros; an array of constants becomes what is put there."""
        name = getattr(target.value, "id", "")
        if isinstance(held, Number):
            if isinstance(found, Shard) and found.spec.unreduced and not found.pending:
                frame.env[name] = replace(found, loose=True, sure=False, key="")
        elif held.spec.unreduced and not held.pending and not isinstance(found, Var):
            self.combine(target, "+", held, found, (target, target), frame)

    def stored(self, node: ast.AST, target: ast.expr, found, frame) -> None:
        """Into `grads["W_in"][l]` goes what SPECS calls W_in."""
        if not self.specs or not isinstance(found, Shard):
            return
        keys = [
            n.slice.value
            for n in ast.walk(target)
            if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant)
        ]
        base = next((n.id for n in ast.walk(target) if isinstance(n, ast.Name) and "grad" in n.id), None)
        for spec in (one_layer(self.specs[key]) for key in keys if base and key in self.specs):
            if wrong := broken_rule(found, spec):
                what = f"{found.spec} is stored in {ast.unparse(target)}, typed {spec}: {wrong[1]}"
                self.report(node, "gradient" if wrong[0] == "unreduced" else wrong[0], what, frame)


def one_layer(spec: Spec) -> Spec:
    """The type of one layer of params, whose leading dim L, if their type names it, counts the layers."""
    return Spec(spec.name, spec.dims[1:], spec.unreduced) if spec.dim_names[:1] == ("L",) else spec
