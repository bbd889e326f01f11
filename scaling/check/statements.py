"""Statements, read and not run (see scaling.check): what they bind, and what a strategy returns."""

import ast

from scaling.check.calls import Calls
from scaling.check.listings import Listings, listings
from scaling.check.sources import layer, specs_of, types_in
from scaling.check.values import Array, Each, Many, Text, Tree, difference, element, merge, partly_reduced
from scaling.spec import ShardingError, Spec

TURNED, SAME = ("T", "mT"), ("data", "real")  # attributes of a tensor: its transpose, and what keeps its type


class Reader(Calls, Listings):
    """Reads one module. `findings`: {(line, message)}; `specs`: the module's SPECS."""

    def __init__(self, tree: ast.Module):
        self.tree, self.findings, self.depth, self.appended, self.followed = tree, set(), 0, {}, set()
        self.functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        self.imports(tree)
        self.specs = self.find_specs()

    def report(self, node: ast.AST, message: str) -> None:
        self.findings.add((getattr(node, "lineno", 0), message))

    def find_specs(self) -> dict[str, Spec]:
        try:
            return specs_of(self.tree)
        except ShardingError as error:
            self.report(self.tree.body[0], str(error))
            return {}

    def read(self) -> None:
        """Read the module's own statements and each of its functions; nothing, if it uses no typed call."""
        if not self.typed and not self.modules:
            return
        self.body(self.tree.body, {})
        for names in listings(self.tree):
            self.follow(names, types_in(self.tree, names.get("GRADS", "")))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef) and node.name not in self.followed:
                self.function(node, self.arguments(node))

    def arguments(self, fn: ast.FunctionDef) -> dict:
        """What is known of a function's arguments: of a strategy's by SPECS, of others only `params`."""
        env = {}
        for argument in fn.args.posonlyargs + fn.args.args + fn.args.kwonlyargs:
            name = argument.arg
            base = name[1:] if name[:1] == "d" and name[1:] in self.specs else name
            if name == "params" and self.specs:
                env[name] = Tree(tuple((key, Each(Array(layer(spec)))) for key, spec in self.specs.items()))
            elif fn.name in ("forward", "backward") and base in self.specs:
                env[name] = Array(self.specs[base].with_name(name))
        return env

    def function(self, fn: ast.FunctionDef, env: dict):
        """Read a function's body; what it returns, if all its returns agree."""
        self.depth += 1
        outer, self.returned = getattr(self, "returned", None), []
        self.current, before = fn, getattr(self, "current", None)
        self.body(fn.body, dict(env))
        returned, self.returned, self.current = self.returned, outer, before
        self.depth -= 1
        self.unused_sums(fn)
        self.waited_for(fn)
        value = returned[0] if returned else None
        for other in returned[1:]:
            value = merge(value, other)
        return value

    def body(self, statements, env: dict) -> None:
        for statement in statements:
            self.statement(statement, env)

    def statement(self, node: ast.stmt, env: dict) -> None:
        if isinstance(node, ast.Assign):
            value = self.value(node.value, env)
            for target in node.targets:
                self.bind(target, value, env)
        elif isinstance(node, ast.AnnAssign) and node.value:
            self.bind(node.target, self.value(node.value, env), env)
        elif isinstance(node, ast.AugAssign):
            both = ast.copy_location(ast.BinOp(_load(node.target), node.op, node.value), node)
            self.bind(node.target, self.value(both, env), env)
        elif isinstance(node, ast.Expr):
            self.value(node.value, env)
        elif isinstance(node, ast.Return):
            value = self.value(node.value, env) if node.value else None
            self.check_returned(node, value)
            if self.returned is not None:
                self.returned.append(value)
        elif isinstance(node, ast.If):
            self.value(node.test, env)
            self.branches([node.body, node.orelse], env)
        elif isinstance(node, ast.For):
            self.loop(node, element(self.value(node.iter, env)), env)
        elif isinstance(node, ast.While):
            self.value(node.test, env)
            self.loop(node, None, env)
        elif isinstance(node, ast.With):
            for item in node.items:
                self.value(item.context_expr, env)
            self.body(node.body, env)
        elif isinstance(node, ast.Try):
            self.body(node.body, env)
            self.branches([handler.body for handler in node.handlers] + [[]], env)
            self.body(node.orelse + node.finalbody, env)
        elif isinstance(node, ast.FunctionDef):
            env[node.name] = None

    def branches(self, bodies, env: dict) -> None:
        """Read each body from the same start; afterwards a variable is what the branches that end here agree on."""
        ends = []
        for body in bodies:
            branch = dict(env)
            self.body(body, branch)
            if not (body and isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))):
                ends.append(branch)
        for name in {name for end in ends for name in end}:
            value = ends[0].get(name)
            for end in ends[1:]:
                value = merge(value, end.get(name))
            env[name] = value

    def loop(self, node, item, env: dict) -> None:
        """A body is read twice: as it is entered, and with what its first round left behind."""
        for _ in range(2):
            if isinstance(node, ast.For):
                self.bind(node.target, item, env)
            self.body(node.body, env)
        self.body(node.orelse, env)

    def bind(self, target: ast.expr, value, env: dict) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            items = value.items if isinstance(value, Many) and len(value.items) == len(target.elts) else None
            for position, part in enumerate(target.elts):
                inner = part.value if isinstance(part, ast.Starred) else part
                spread = isinstance(part, ast.Starred) or items is None
                one = items[position] if items is not None and not spread else None
                self.bind(inner, element(value) if spread and isinstance(value, Each) else one, env)
        elif isinstance(target, ast.Subscript):
            self.value(target.value, env)
            self.stored(target, target, value)

    def check_returned(self, node: ast.Return, value) -> None:
        """Of a strategy: forward returns what SPECS calls Out, backward the cotangents of In and of the params."""
        name = getattr(getattr(self, "current", None), "name", "")
        wanted = self.specs.get({"forward": "Out", "backward": "In"}.get(name, ""))
        if wanted is None or self.depth != 1 or name in self.followed:  # of a listing, `follow` says so
            return
        first, second = value.items[:2] if isinstance(value, Many) and len(value.items) > 1 else (value, None)
        results = [(wanted, first)]
        if name == "backward" and isinstance(second, Tree):
            results += [(spec, second.get(key)) for key, spec in self.specs.items()]
        for spec, result in results:
            if isinstance(result, Array) and (wrong := difference(result, spec)):
                self.report(node, f"{name} returns {result.spec}, but SPECS says {spec}: {wrong}")

    def unused_sums(self, fn: ast.FunctionDef) -> None:
        """A partial sum that is given a name and never used again was never reduced."""
        read = {n.id for n in ast.walk(fn) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        for node in ast.walk(fn):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.targets) == 1:
                target, result = node.targets[0], self.results.get(id(node.value))
                unused = isinstance(target, ast.Name) and target.id not in read
                if unused and isinstance(result, Array) and result.spec.unreduced:
                    self.report(
                        node,
                        f"{result.spec} is never reduced: nothing uses {ast.unparse(target)} afterwards\n"
                        "  rule: a partial sum is reduced before it is a result\n"
                        "  fix: reduce_scatter or all_reduce it",
                    )

    def stored(self, node: ast.AST, target: ast.expr, value) -> None:
        """Into `grads["W_in"][l]` goes what SPECS calls W_in."""
        keys = [
            n.slice.value
            for n in ast.walk(target)
            if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant)
        ]
        base = next((n.id for n in ast.walk(target) if isinstance(n, ast.Name) and "grad" in n.id), None)
        for spec in (layer(self.specs[key]) for key in keys if base and key in self.specs):
            if isinstance(value, Array) and (wrong := difference(value, spec)):
                self.report(node, f"{value.spec} is stored in {ast.unparse(target)}, typed {spec}: {wrong}")

    def waited_for(self, fn: ast.FunctionDef) -> None:
        """A list that is given to a function that waits holds what is under way."""
        waits = {n.id for call in ast.walk(fn) if isinstance(call, ast.Call) and "wait" in getattr(call.func, "id", "")
                 for n in call.args if isinstance(n, ast.Name)}  # fmt: skip
        for node, name, held in self.appended.pop(fn.name, ()):
            if name in waits and held.sure and not held.pending and held.spec.unreduced:
                self.report(node, f"{held.spec} joins {name}, which is waited for, but nothing reduces it\n"
                                  "  rule: a partial sum is reduced before it is a result")  # fmt: skip

    def value(self, node: ast.expr, env: dict):
        """What an expression gives; reading it reports its faults."""
        if isinstance(node, ast.Constant):
            return Text(node.value) if isinstance(node.value, str) else None
        if isinstance(node, ast.Name):
            return env.get(node.id)
        if isinstance(node, (ast.Tuple, ast.List)):
            return Many(tuple(self.value(item, env) for item in node.elts))
        if isinstance(node, ast.Dict):
            items = [(key.value if isinstance(key, ast.Constant) else None, self.value(item, env))
                     for key, item in zip(node.keys, node.values, strict=True)]  # fmt: skip
            return Tree(tuple((key, item) for key, item in items if isinstance(key, str)))
        if isinstance(node, ast.IfExp):
            self.value(node.test, env)
            one, other = self.value(node.body, env), self.value(node.orelse, env)
            if torn := partly_reduced(one, other):
                self.report(node, f"{ast.unparse(node)}: {torn}")
            return merge(one, other)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            inner = dict(env)
            for part in node.generators:
                self.bind(part.target, element(self.value(part.iter, inner)), inner)
            return Each(self.value(node.elt, inner))
        if isinstance(node, ast.Subscript):
            return self.item(node, env)
        if isinstance(node, ast.Call):
            return self.call(node, env)
        if isinstance(node, (ast.BinOp, ast.UnaryOp)):
            return self.arithmetic(node, env)
        if isinstance(node, ast.Attribute):
            held = self.value(node.value, env)
            if isinstance(held, Array) and node.attr in TURNED and len(held.spec.dims) == 2:
                return Array(Spec(held.spec.name, held.spec.dims[::-1], held.spec.unreduced), held.sure)
            return held if node.attr in SAME else None
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr) and not isinstance(node, ast.Lambda):
                self.value(child, env)
        return None

    def item(self, node: ast.Subscript, env: dict):
        held, index = self.value(node.value, env), node.slice
        self.value(index, env)
        if isinstance(index, ast.Constant):
            if isinstance(held, Tree) and isinstance(index.value, str):
                return held.get(index.value)
            if (
                isinstance(held, Many)
                and isinstance(index.value, int)
                and -len(held.items) <= index.value < len(held.items)
            ):
                return held.items[index.value]
        if isinstance(index, ast.Slice):
            return held if isinstance(held, Each) else None
        return element(held)


def _load(target: ast.expr) -> ast.expr:
    """An assignment's target as an expression that reads it."""
    return ast.parse(ast.unparse(target), mode="eval").body
