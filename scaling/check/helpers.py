"""The project's own functions that the checker knows by itself (see scaling.check): wait, tree.map, tree.shard, ...."""

import ast
from dataclasses import replace

from scaling.check.part import Part
from scaling.check.rules import broken_rule
from scaling.check.values import Each, Function, Known, Many, Record, Shard, Text, arrays_in, as_array, element, settled
from scaling.spec import ShardingError, parse


class Helpers(Part):
    """The part of the reader that knows the project's helpers."""

    def special(self, name: str, node: ast.Call, args: list, keywords: dict, frame):
        """The project's own functions that the checker knows."""
        if name == "wait":
            return settled(args[0]) if args else None
        if name == "joined":
            return element(args[0]) if args else None
        if name == "tree.map" and args and isinstance(args[0], Function):
            return self.mapped(args[0], node, args[1:], frame)
        if name == "leaves" and args:
            return Many(tuple(held for _, held in arrays_in(args[0]))) if arrays_in(args[0]) else None
        if name == "clip_by_global_norm" and args:
            self.hold_gradients(node, args[0], None, frame)
            return Many((args[0], None))
        if name == "stateless" and len(args) > 2:
            return self.stateless(args[2])
        if name in ("tree.shard", "tree.unshard") and len(args) > 1:
            return self.by_types(name, node, args[0], args[1], frame)
        return None

    def by_types(self, name: str, node: ast.Call, tree, types, frame):
        """tree.shard and tree.unshard, by types that are known: each leaf is of its type, and then whole."""
        if isinstance(types, (Record, Many)):
            own = dict(_rows(tree))
            made = {key: self.by_types(name, node, own.get(key), each, frame) for key, each in _rows(types)}
            return Record(tuple(made.items())) if isinstance(types, Record) else Many(tuple(made.values()))
        try:
            spec = parse(types.text) if isinstance(types, Text) else None
        except ShardingError:
            return None
        if spec is None or name == "tree.shard":
            return spec and Shard(spec, sure=False)
        held = as_array(tree)
        if held is not None and (wrong := broken_rule(held, spec)):
            what = f"{ast.unparse(node)}: of what has the type {spec}, it is given {held}: {wrong[1]}"
            self.report(node, wrong[0], what, frame)
        return Shard(spec.whole(), sure=False)

    def stateless(self, used) -> "Known | None":
        """A module called with params of these types: a bias that is a partial sum says that the result is one."""
        try:
            axes = {axis for spec in self.types_of(used).values() for axis in spec.unreduced}
        except ShardingError:
            return None
        return Known("gives partial sums", " ".join(sorted(axes))) if axes else None

    def mapped(self, fn: Function, node, trees: list, frame):
        """tree.map: the function of the leaves."""
        first = trees[0] if trees else None
        if isinstance(first, (Record, Many)) and all(type(t) is type(first) for t in trees):
            if isinstance(first, Record):
                items = [(key, [t.get(key) for t in trees]) for key, _ in first.items]
                return replace(first, items=tuple((k, self.mapped(fn, node, row, frame)) for k, row in items))
            if all(len(t.items) == len(first.items) for t in trees):
                rows = zip(*(t.items for t in trees), strict=True)
                return Many(tuple(self.mapped(fn, node, list(row), frame) for row in rows))
        if isinstance(first, Each) and all(isinstance(t, Each) for t in trees):
            return Each(self.mapped(fn, node, list(map(element, trees)), frame))
        return self.followed_call(fn, node, trees, {}, False, frame)


def _rows(value) -> list:
    """(key or number, item) of a dict's or a tuple's items."""
    return list(value.items) if isinstance(value, Record) else list(enumerate(getattr(value, "items", ())))
