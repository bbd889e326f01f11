"""Expressions, read and not run (see scaling.check): what each gives; reading it reports its faults."""

import ast
from dataclasses import replace
from functools import reduce

from scaling.check.arithmetic import OPERATORS
from scaling.check.calls import Calls
from scaling.check.indexing import Indexing
from scaling.check.rules import partly_reduced, said
from scaling.check.values import (
    ANY,
    Class,
    Each,
    Function,
    Gone,
    Known,
    Many,
    Number,
    Record,
    Shard,
    Text,
    Var,
    element,
    merge,
)

GIVEN = (Shard, Many, Record, Each, Text, Number, Function)  # what is not None
TRANSPOSED, SAME = ("T", "mT", "H", "mH"), ("data", "real")  # attributes of a tensor


class Expressions(Calls, Indexing):
    """The part of the reader that gives expressions their values."""

    def value(self, node: ast.expr, frame):
        """What an expression gives; reading it reports its faults."""
        found = READS.get(type(node), unread)(self, node, frame)
        return self.bound.get(found.number, found) if type(found) is Var else found

    def known(self, value):
        """An argument whose type has been learned meanwhile."""
        return self.bound.get(value.number, value) if isinstance(value, Var) else value

    def constant(self, node: ast.Constant, frame) -> "Text | Number | None":
        value = node.value
        if isinstance(value, str):
            return Text(value)
        return Number(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def choice(self, node: ast.IfExp, frame):
        self.value(node.test, frame)
        one, other = self.value(node.body, frame.inside()), self.value(node.orelse, frame.inside())
        holds = self.decided(node.test, frame)
        if holds is not None:
            return one if holds else other
        if torn := partly_reduced(one, other, node.test):
            self.report(node, "branches", f"{ast.unparse(node)}: {torn}", frame)
        return merge(one, other)

    def either(self, node: ast.BoolOp, frame):
        """and, or: any of the values."""
        return reduce(merge, [self.value(item, frame) for item in node.values])

    def unary(self, node: ast.UnaryOp, frame):
        held = self.value(node.operand, frame)
        if isinstance(node.op, ast.Invert):
            self.bitwise(node, [held], frame)
        return Number(None) if isinstance(held, Number) and not held.zero else held

    def named(self, node: ast.NamedExpr, frame):
        found = self.value(node.value, frame)
        self.bind(node.target, found, frame)
        return found

    def inner(self, node: "ast.Starred | ast.Await", frame):
        return self.value(node.value, frame)

    def decided(self, test: ast.expr, frame) -> "bool | None":
        """Whether `p is None` holds, of an argument p that is known to be given here, alone or beside other tests; of
        other tests None."""
        match test:
            case ast.BoolOp(op=op, values=values):
                settles = isinstance(op, ast.Or)
                return settles if settles in [self.decided(each, frame) for each in values] else None
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot() as op]):
                with_none = getattr(test.comparators[0], "value", ...) is None
                argument = frame.called and name not in frame.bound
                if with_none and argument and isinstance(self.known(frame.env.get(name)), GIVEN):
                    return isinstance(op, ast.IsNot)
        return None

    def name(self, node: ast.Name, frame):
        frame.read(node.id)
        found = frame.env[node.id] if node.id in frame.env else self.global_name(frame.module, node.id)
        if isinstance(found, Gone) and isinstance(node.ctx, ast.Load):
            what = f"{node.id} was donated in line {found.line}, to {found.was}"
            fix = "use the result, or leave donate=True out"
            self.report(node, "donated", said(what, "donated", fix), frame)
            return None
        return found

    def row(self, node: "ast.Tuple | ast.List", frame):
        items = []
        for item in node.elts:
            found = self.value(item, frame)
            if isinstance(item, ast.Starred):
                if not isinstance(found, Many):
                    rest = [self.value(other, frame) for other in node.elts]
                    return Each(None) if rest else None
                items += found.items
            else:
                items.append(found)
        return Many(tuple(items))

    def dictionary(self, node: ast.Dict, frame):
        items: dict = {}
        for key, item in zip(node.keys, node.values, strict=True):
            found = self.value(item, frame)
            name = self.value(key, frame) if key is not None else None
            if isinstance(name, Text):
                items[name.text] = found
            elif key is not None:
                items[ANY] = merge(items.get(ANY), found)
            elif key is None and isinstance(found, Record):
                items |= dict(found.items)
        return Record(tuple(items.items()))

    def formatted(self, node: ast.JoinedStr, frame) -> Text:
        """An f-string. A part that is not known is numbered: the same expression has the same number."""
        text = ""
        for part in node.values:
            if not isinstance(part, ast.FormattedValue):
                text += str(getattr(part, "value", ""))
                continue
            found = self.value(part.value, frame)
            plain = part.conversion == -1 and part.format_spec is None
            if isinstance(found, Text) and plain:
                text += found.text
            elif isinstance(found, Number) and isinstance(found.value, int) and plain:
                text += str(found.value)
            else:
                text += f"⟨{self.hole(part.value)}⟩"
        return Text(text)

    def hole(self, node: ast.expr) -> int:
        """The number of what is not known in an f-string: one for all places with the same text."""
        if node not in self.numbered:
            self.numbered[node] = self.holes.setdefault(ast.unparse(node), len(self.holes))
        return self.numbered[node]

    def row_by_row(self, node, frame):
        """[f(x) for x in y]: of a tuple of arrays item by item, of other things one item for all."""
        first = node.generators[0]
        over = self.value(first.iter, frame.inside()) if len(node.generators) == 1 and not first.ifs else None
        if not isinstance(over, Many) or not any(isinstance(item, Shard) for item in over.items):
            return Each(self.value(node.elt, self.comprehension(node, frame)))
        items, inner = [], frame.inside()
        for item in over.items:
            self.bind(first.target, item, inner)
            items.append(self.value(node.elt, inner))
        return Many(tuple(items))

    def mapping(self, node: ast.DictComp, frame) -> Each:
        inner = self.comprehension(node, frame)
        self.value(node.key, inner)
        return Each(self.value(node.value, inner))

    def comprehension(self, node, frame):
        inner = frame.inside()
        for part in node.generators:
            self.bind(part.target, element(self.value(part.iter, inner)), inner)
            for test in part.ifs:
                self.value(test, inner)
        return inner

    def binary(self, node: ast.BinOp, frame):
        """An operator; a long sum is read from its first term on."""
        chain = [node]
        while isinstance(chain[-1].left, ast.BinOp):
            chain.append(chain[-1].left)
        found = self.value(chain[-1].left, frame)
        for each in reversed(chain):
            found = self.operator(each, found, self.value(each.right, frame), frame)
        return found

    def operator(self, node: ast.BinOp, a, b, frame):
        if isinstance(node.op, ast.BitOr) and isinstance(a, Record) and isinstance(b, Record):
            return replace(a, items=tuple((dict(a.items) | dict(b.items)).items()))
        if isinstance(node.op, ast.Mult) and isinstance(a, Many) and isinstance(b, Number):
            return Many(a.items * b.value) if isinstance(b.value, int) and b.value < 9 else Each(element(a))
        if type(node.op) not in OPERATORS:
            self.bitwise(node, [a, b], frame)
            return None
        return self.combine(node, OPERATORS[type(node.op)], a, b, (node.left, node.right), frame)

    def comparison(self, node: ast.Compare, frame):
        values = [self.value(side, frame) for side in (node.left, *node.comparators)]
        if not any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops):
            self.bitwise(node, [x for x in values if isinstance(x, Shard) and x.spec.dims], frame)
        return None

    def bitwise(self, node: ast.expr, values: list, frame) -> None:
        """An operator that no partial sum may go through."""
        for held in values:
            if isinstance(held, Shard) and held.spec.unreduced and not held.pending:
                self.nonlinear(node, ast.unparse(node), held, frame)

    def attribute(self, node: ast.Attribute, frame):
        return self.attribute_of(self.value(node.value, frame), node.attr)

    def attribute_of(self, held, name: str):
        if held is None:
            return None
        if isinstance(held, Known) and held.kind == "module":
            return self.member(held.name, name)
        if isinstance(held, Known) and held.kind == "torch":
            return Known("torch", name)
        if isinstance(held, Shard):
            if name in TRANSPOSED:
                return held.typed(held.spec.dims[::-1]) if held.matrix else replace(held, loose=True, key="")
            return held if name in SAME else None
        if isinstance(held, Record):
            found = held.get(name)
            return found if found is not None or held.kind is None else self.of_class(held.kind, name, held)
        if isinstance(held, Class):
            return self.of_class(held, name, None)
        return None

    def lambda_(self, node: ast.Lambda, frame) -> Function:
        """A lambda: its body is read once with arguments that are not known, and again where it is called."""
        inner = frame.inside()
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            inner.env[argument.arg] = self.unknown()
        for argument, default in zip(node.args.args[::-1], node.args.defaults[::-1], strict=False):
            found = self.value(default, frame)
            inner.env[argument.arg] = None if isinstance(found, Text) else found  # another line may be given
        self.value(node.body, inner)
        return Function(node, frame.module, frame.env)


def unread(self: Expressions, node: ast.expr, frame) -> None:
    """Of any other kind of expression its parts are read, and nothing is known of what it gives."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            self.value(child, frame)


READS = {
    ast.Name: Expressions.name,
    ast.Constant: Expressions.constant,
    ast.Attribute: Expressions.attribute,
    ast.Call: Expressions.call,
    ast.Tuple: Expressions.row,
    ast.List: Expressions.row,
    ast.Dict: Expressions.dictionary,
    ast.JoinedStr: Expressions.formatted,
    ast.IfExp: Expressions.choice,
    ast.ListComp: Expressions.row_by_row,
    ast.GeneratorExp: Expressions.row_by_row,
    ast.SetComp: Expressions.row_by_row,
    ast.DictComp: Expressions.mapping,
    ast.Subscript: Expressions.item,
    ast.BinOp: Expressions.binary,
    ast.UnaryOp: Expressions.unary,
    ast.Compare: Expressions.comparison,
    ast.Lambda: Expressions.lambda_,
    ast.NamedExpr: Expressions.named,
    ast.Starred: Expressions.inner,
    ast.Await: Expressions.inner,
    ast.BoolOp: Expressions.either,
}
