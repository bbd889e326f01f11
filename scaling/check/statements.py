"""Statements, read and not run (see scaling.check): what they bind, and what functions return."""

import ast
from dataclasses import dataclass, field, replace
from typing import Any

from scaling.check.expressions import Expressions
from scaling.check.rules import broken_rule, partly_reduced, said
from scaling.check.stores import Stores
from scaling.check.values import Each, Function, Many, Record, Shard, element, merge
from scaling.spec import format_axes


@dataclass
class Frame:
    """Where the reader is: in a function of a module, with its variables.

    `site`: the call in the checked module on whose behalf a function of another module is read. `made`: what was bound
    to which name, by the place; `unread`: {name: the places whose value it has}. `straight`: not in a loop or a branch;
    `called`: with arguments that are known; `over`: it has returned with these.
    """

    module: Any
    env: dict = field(default_factory=dict)
    returned: list = field(default_factory=list)
    site: ast.expr | ast.stmt | None = None
    name: str = ""
    made: dict = field(default_factory=dict)
    bound: dict = field(default_factory=dict)
    used: set = field(default_factory=set)
    straight: bool = True
    called: bool = False
    over: bool = False
    nested: list = field(default_factory=list)

    def read(self, name: str) -> None:
        if name in self.bound:
            self.used |= self.bound[name]

    def inside(self) -> "Frame":
        """The same place, with variables of its own: of a comprehension, a lambda, a branch."""
        fields: dict[str, Any] = vars(self) | {"env": dict(self.env), "bound": dict(self.bound)}
        return Frame(**fields)

    @property
    def module_keys(self) -> set[str]:
        return self.module.keys


class Statements(Expressions, Stores):
    """The part of the reader that runs through statements."""

    def body(self, statements, frame: Frame) -> None:
        for statement in statements:
            if not frame.over:
                self.statement(statement, frame)

    def statement(self, node: ast.stmt, frame: Frame) -> None:
        match node:
            case ast.Assign():
                found = self.by_comment(node, self.value(node.value, frame), frame)
                for target in node.targets:
                    self.bind(target, found, frame)
            case ast.AnnAssign() if node.value is not None:
                self.bind(node.target, self.value(node.value, frame), frame)
            case ast.AugAssign():
                both = ast.copy_location(ast.BinOp(_load(node.target), node.op, node.value), node)
                self.bind(node.target, self.value(both, frame), frame)
            case ast.Expr():
                if isinstance(node.value, (ast.Yield, ast.YieldFrom)):
                    frame.returned.append(Each(self.value(node.value.value, frame)) if node.value.value else None)
                    return
                found = self.value(node.value, frame)
                if isinstance(found, Shard) and found.pending:
                    self.never_waited(node, ast.unparse(getattr(node.value, "func", node.value)), frame)
                elif isinstance(node.value, ast.Call):
                    self.discarded(node.value, frame)
            case ast.Return():
                found = self.value(node.value, frame) if node.value else None
                self.returning(node, found, frame)
                frame.returned.append(found)
            case ast.If():
                self.value(node.test, frame)
                self.branches([node.body, node.orelse], frame, node)
            case ast.For() | ast.AsyncFor():
                self.loop(node, element(self.value(node.iter, frame)), frame)
            case ast.While():
                self.value(node.test, frame)
                self.loop(node, None, frame)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    found = self.value(item.context_expr, frame)
                    if item.optional_vars is not None:
                        self.bind(item.optional_vars, found, frame)
                refused = any(expects_an_error(item.context_expr) for item in node.items)
                self.quiet += refused
                self.body(node.body, frame)
                self.quiet -= refused
            case ast.Try():
                self.body(node.body, frame)
                self.branches([handler.body for handler in node.handlers] + [[]], frame)
                self.body(node.orelse + node.finalbody, frame)
            case ast.Match():
                self.value(node.subject, frame)
                for case in node.cases:
                    for name in (n.name for n in ast.walk(case.pattern) if isinstance(n, (ast.MatchAs, ast.MatchStar))):
                        frame.env |= {name: None} if name else {}
                self.branches([case.body for case in node.cases] + [[]], frame)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                frame.env[node.name] = fn = Function(node, frame.module, frame.env)
                frame.nested.append(fn)
            case ast.ClassDef():
                self.class_body(node, frame)
            case ast.Assert() | ast.Raise() | ast.Delete() | ast.Import() | ast.ImportFrom():
                self.other(node, frame)

    def other(self, node: ast.stmt, frame: Frame) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                frame.env[name] = self.imported(frame.module, node, alias)
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, frame)

    def branches(self, bodies, frame: Frame, node: "ast.If | None" = None) -> None:
        """Read each body from the same start; afterwards a variable is what the branches that end here agree on. One
        that is not taken is read for its faults alone."""
        ends, holds = [], None if node is None else self.decided(node.test, frame)
        for number, body in enumerate(bodies):
            branch = frame.inside()
            branch.straight = False
            taken = holds is None or holds == (number == 0)
            if not taken and frame.module is not self.module:  # there it is read by itself
                continue
            if not taken:
                branch.returned, branch.made = [], {}
            self.body(body, branch)
            if taken and not (body and isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))):
                ends.append(branch)
            elif holds is not None and taken and isinstance(body[-1], (ast.Return, ast.Raise)):
                frame.over = True
        for name in {name for end in ends for name in end.env}:
            found = ends[0].env.get(name)
            for other in [end.env.get(name) for end in ends[1:]]:
                if other is found:
                    continue
                if node is not None and (torn := partly_reduced(found, other, node.test)):
                    self.report(node, "branches", f"{name} after `if {ast.unparse(node.test)}`: {torn}", frame)
                found = merge(found, other)
            frame.env[name] = found
        for name in {name for end in ends for name in end.bound}:
            frame.bound[name] = set().union(*(end.bound.get(name, set()) for end in ends))

    def loop(self, node, item, frame: Frame) -> None:
        """A body is read as it is entered, and again with what its first round left behind."""
        straight, frame.straight = frame.straight, False
        for _ in range(2):
            before, entered = dict(frame.bound), dict(frame.env)
            if isinstance(node, (ast.For, ast.AsyncFor)):
                self.bind(node.target, item, frame)
            else:
                self.value(node.test, frame)
            self.body(node.body, frame)
            for name, places in before.items():
                frame.bound[name] = frame.bound.get(name, set()) | places
            if all(found is entered.get(name) for name, found in frame.env.items()):
                break
        frame.straight = straight
        self.body(node.orelse, frame)

    def bind(self, target: ast.expr, found, frame: Frame) -> None:
        match target:
            case ast.Name(id=name):
                place = id(target)
                frame.env[name] = found
                frame.bound[name] = {place}
                frame.made[place] = (target, found)
                if frame.name == "" or name.startswith("_"):
                    frame.used.add(place)
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                self.unpack(elts, found, frame)
            case ast.Subscript():
                self.value(target.value, frame)
                self.stored(target, target, found, frame)
                self.put(target, found, frame)
            case ast.Attribute(value=owner, attr=name):
                held = self.value(owner, frame)
                if isinstance(owner, ast.Name) and isinstance(held, Record):
                    frame.env[owner.id] = held.put(name, found)
            case ast.Starred():
                self.bind(target.value, found, frame)

    def unpack(self, targets, found, frame: Frame) -> None:
        star = next((i for i, part in enumerate(targets) if isinstance(part, ast.Starred)), None)
        items = found.items if isinstance(found, (Many, Record)) else None
        if isinstance(found, Record):
            items = tuple(item for _, item in found.items) if found.kind is not None else None
        if items is not None and star is None and len(items) == len(targets):
            for part, item in zip(targets, items, strict=True):
                self.bind(part, item, frame)
        elif items is not None and star is not None and len(items) >= len(targets) - 1:
            after = len(targets) - star - 1
            rows = [*items[:star], Many(tuple(items[star : len(items) - after])), *items[len(items) - after :]]
            for part, item in zip(targets, rows, strict=True):
                self.bind(part.value if isinstance(part, ast.Starred) else part, item, frame)
        else:
            for part in targets:
                starred = isinstance(part, ast.Starred)
                sure = isinstance(found, Shard) and found.sure
                each = element(found) if isinstance(found, Each) or sure else None
                self.bind(part.value if starred else part, Each(each) if starred else each, frame)

    def function(self, fn: Function, env: dict, outer: Frame, site: ast.expr | ast.stmt | None = None):
        """Read a function's body; what it returns, if all its returns agree."""
        returned = self.returns(fn, env, outer, site)
        found = returned[0] if returned else None
        for other in returned[1:]:
            found = merge(found, other)
        return found

    def returns(self, fn: Function, env: dict, outer: Frame, site: ast.expr | ast.stmt | None = None) -> list:
        """Read a function's body; what each of its returns gives."""
        if isinstance(fn.node, ast.Lambda):
            frame = Frame(fn.module, dict(fn.around) | env, site=outer.site or self.site_for(fn, site), name="lambda")
            self.active.append(fn.node)
            found = self.value(fn.node.body, frame)
            self.active.pop()
            return [found]
        frame = Frame(fn.module, dict(fn.around) | env, site=outer.site or self.site_for(fn, site), name=fn.node.name)
        frame.called = site is not None
        self.active.append(fn.node)
        self.body(fn.node.body, frame)
        self.read_nested(frame)
        self.active.pop()
        self.leftover(frame)
        return frame.returned

    def read_nested(self, frame: Frame) -> None:
        """Functions inside: once with arguments that are not known, and with the variables around them at the end."""
        for fn in frame.nested if frame.module is self.module else ():
            if fn.node not in self.active:
                names = [a.arg for a in (*fn.node.args.posonlyargs, *fn.node.args.args, *fn.node.args.kwonlyargs)]
                inner = Function(fn.node, fn.module, frame.env)
                self.function(inner, {name: self.unknown() for name in names}, frame)
                for name in {n.id for n in ast.walk(fn.node) if isinstance(n, ast.Name)}:
                    frame.read(name)

    def site_for(self, fn: Function, site):
        return site if fn.module is not self.module else None

    def leftover(self, frame: Frame) -> None:
        """What was given a name and never used: a partial sum was never reduced, a call under way never waited for."""
        for place, (target, found) in frame.made.items() if not frame.over else ():
            if place in frame.used or not isinstance(found, Shard) or not found.sure:
                continue
            if found.pending:
                self.never_waited(target, target.id, frame)
            elif found.spec.unreduced and not found.loose:
                axes = format_axes(found.spec.unreduced)
                what = f"{found.spec} is never reduced: nothing uses {target.id} afterwards"
                fix = f"reduce_scatter or all_reduce it over {axes}, or return it"
                self.report(target, "never-reduced", said(what, "never-reduced", fix), frame)

    def never_waited(self, node: ast.AST, what: str, frame: Frame) -> None:
        text = said(f"nothing waits for {what}", "never-waited", "wait(x), or x.wait(), before it is needed")
        self.report(node, "never-waited", text, frame)

    def returning(self, node: ast.Return, found, frame: Frame) -> None:
        """A function that is not known to be linear is no way to return partial sums."""
        if isinstance(found, Shard) and found.through and found.spec.unreduced:
            wrong = broken_rule(replace(found, pending=False), found.spec)
            if wrong:
                self.report(node, wrong[0], f"{ast.unparse(node)}: {wrong[1]}", frame)


def expects_an_error(node: ast.expr) -> bool:
    """Whether a `with` is a test's pytest.raises: what stands in it is meant to be wrong."""
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("raises", "assertRaises", "warns")


def _load(target: "ast.Name | ast.Attribute | ast.Subscript") -> ast.expr:
    """An assignment's target as an expression that reads it."""
    fields: dict[str, Any] = dict(ast.iter_fields(target)) | {"ctx": ast.Load()}
    return ast.copy_location(type(target)(**fields), target)
