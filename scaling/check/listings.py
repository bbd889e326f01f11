"""A strategy's functions followed from one to the next (see scaling.check): what gather returns, forward gets.

A listing is `SPECS` and its functions, given to `Strategy(SPECS, forward, backward, gather, reduce, ...)`:
gather(*weights), forward(*weights, In), backward(*weights, dOut, saved), reduce(*gradients), reduce_slow(*gradients).
Without a Strategy, functions called forward and backward are taken by the names of their arguments: params, saved, and
what SPECS names, `In`, `W_in`, `dOut`.
"""

import ast

from scaling.check.rules import broken_rule
from scaling.check.statements import Statements
from scaling.check.stores import one_layer
from scaling.check.values import Class, Each, Function, Many, Record, Shard, Text, settled
from scaling.spec import ShardingError, Spec, parse

FIELDS = ("SPECS", "layer_forward", "layer_backward", "gather", "reduce", "reduce_slow", "GRADS")
ENDS = ("In", "Out")


class Listings(Statements):
    """The part of the reader that follows listings; `followed` holds the functions that it has read."""

    def types_of(self, found) -> dict[str, Spec]:
        """The types in a dict of texts; ShardingError if one cannot be read."""
        items = found.items if isinstance(found, Record) else ()
        return {name: parse(item.text) for name, item in items if isinstance(item, Text)}

    def read_listings(self) -> None:
        """The functions that the module gives to `Strategy(...)`, and its forward and backward if there is none."""
        for node in ast.walk(self.module.tree) if "Strategy" in self.module.text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Strategy":
                frame = self.frame_of(self.module)
                given = dict(zip(FIELDS, node.args, strict=False)) | {k.arg: k.value for k in node.keywords}
                self.quiet += 1
                found = {field: self.value(argument, frame) for field, argument in given.items() if field}
                self.quiet -= 1
                try:
                    specs, grads = self.types_of(found.get("SPECS")), self.types_of(found.get("GRADS"))
                except ShardingError as error:
                    self.report(node, "specs", str(error), frame)
                    continue
                if specs:
                    own, self.specs = self.specs, specs
                    self.follow(found, grads)
                    self.specs = own
        self.read_by_name()

    def follow(self, functions: dict, grads: dict[str, Spec]) -> None:
        """Read the functions of one listing with what they are given; hold what they return against the types."""
        weights = [name for name in self.specs if name not in ENDS]
        W: list = [Shard(self.specs[name], key=name) for name in weights]
        run = {field: fn for field, fn in functions.items() if followable(fn)}
        if "gather" in functions:
            fn = run.get("gather")
            W = self.several(self.run_listed(fn, W), len(weights)) if fn else [None] * len(weights)
        saved, last, products = None, None, [None] * len(weights)
        if fn := run.get("layer_forward"):
            Out, saved = self.several(self.run_listed(fn, [*W, self.typed("In")]), 2)
            self.hold(fn, "Out", Out, self.specs.get("Out"), late=False)
        if last := run.get("layer_backward"):
            result = self.run_listed(last, [*W, self.typed("Out", "dOut"), saved])
            dIn, *products = self.several(result, 1 + len(weights))
            self.hold(last, "dIn", dIn, self.specs.get("In"))
        for field in ("reduce", "reduce_slow"):
            if fn := run.get(field):
                given = [settled(p) for p in products]
                given = [self.over_batch(p) for p in given] if field == "reduce_slow" else given
                products, last = self.several(self.run_listed(fn, given), len(weights)), fn
            elif functions.get(field) is not None:
                products, last = [None] * len(weights), None
        if last is None:
            return
        for name, product in zip(weights, products, strict=True):
            self.hold(last, "d" + name, product, grads.get(name, self.specs[name]))

    def over_batch(self, product):
        """A weight's gradient before the slow reduction: a sum over the batch, so partial sums over what splits it,
        also where the lines of another strategy, which made it, do not name that axis."""
        In = self.specs.get("In")
        if not isinstance(product, Shard) or In is None or not In.dims:
            return product
        return product.typed(unreduced={*product.spec.unreduced} | {*In.dims[0][1]} - {*product.spec.axes}, parts="sum")

    def typed(self, name: str, called: str = "") -> "Shard | None":
        return Shard(self.specs[name].with_name(called or name)) if name in self.specs else None

    def run_listed(self, fn: Function, values: list):
        """Read a function with its first arguments known; what it returns. Weights may be under way: einsum waits."""
        self.followed.add(fn.node)
        names = [a.arg for a in fn.node.args.posonlyargs + fn.node.args.args]
        env = dict.fromkeys(names) | dict(zip(names, values, strict=False))
        if "block" in env and env["block"] is None:
            env["block"] = self.block()
        return self.function(fn, env, self.frame_of(self.module))

    def block(self) -> "Record | None":
        """What a listing gets as `block`: the functions between its products."""
        module = self.modules.find("scaling.strategies.block", self.module.path)
        found = self.global_name(module, "Block") if module else None
        return Record((), found) if isinstance(found, Class) else None

    def several(self, found, count: int) -> list:
        """The items of a tuple of this length; of anything else nothing is known."""
        if isinstance(found, Record) and found.kind is not None:
            found = Many(tuple(item for _, item in found.items))
        if isinstance(found, Many) and len(found.items) == count:
            return list(found.items)
        return [found] if count == 1 else [None] * count

    def hold(self, fn: Function, what: str, result, wanted: "Spec | None", late: bool = True, by="SPECS") -> None:
        """What a function returns is of the type that SPECS says, or its docstring; it may be under way, if it may come
        late."""
        result = self.known(result)
        if not isinstance(result, Shard) or wanted is None or fn.module is not self.module:
            return
        if wrong := broken_rule(settled(result) if late else result, wanted):
            shown = f"{what} as {result}" if what else f"{result}"
            text = f"{fn.name} returns {shown}, but {by} says {wanted}: {wrong[1]}"
            body = fn.node.body
            self.report(body[-1] if isinstance(body, list) else body, "result", text, self.frame_of(self.module))

    def read_by_name(self) -> None:
        """forward and backward that are given to no Strategy, by the names of their arguments."""
        saved = None
        for name in ("forward", "layer_forward", "backward", "layer_backward"):
            bindings = self.module.scope.get(name, ())
            node = bindings[-1][0] if bindings else None
            if not isinstance(node, ast.FunctionDef) or node in self.followed or not self.specs:
                continue
            env = self.by_name(node)
            for argument in ("saved", "residuals", "cache"):
                if argument in env and name.endswith("backward"):
                    env[argument] = saved
            self.followed.add(node)
            fn = Function(node, self.module)
            result = self.function(fn, env, self.frame_of(self.module))
            if name.endswith("forward"):
                several = result.items if isinstance(result, Many) else ()
                Out, saved = several[:2] if len(several) > 1 else (result, None)
                self.hold(fn, "", Out, self.specs.get("Out"), late=False)
            else:
                self.hold_backward(fn, result)

    def by_name(self, node: ast.FunctionDef) -> dict:
        """What is known of a function's arguments: those that SPECS names, and params."""
        env: dict = {}
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            name = argument.arg
            base = name[1:] if name[:1] == "d" and name[1:] in self.specs else name
            if name == "params" and self.specs:
                env[name] = self.params()
            elif base in self.specs:
                env[name] = Shard(one_layer(self.specs[base]).with_name(name), key=name if name in self.specs else "")
            else:
                env[name] = self.block() if name == "block" else self.unknown()
        return env

    def params(self) -> Record:
        """The params by SPECS: each may be stacked over layers, or be that of one layer."""
        weights = [name for name in self.specs if name not in ENDS]
        return Record(tuple((name, Each(Shard(one_layer(self.specs[name]), key=name))) for name in weights))

    def hold_backward(self, fn: Function, result) -> None:
        """backward returns (dIn, gradients) or (dIn, *gradients): a dict, a tuple or a NamedTuple, as the weights."""
        weights = [name for name in self.specs if name not in ENDS]
        if isinstance(result, Record):
            return self.hold_named(fn, result)
        if not isinstance(result, Many) or not result.items:
            return self.hold(fn, "dIn", result, self.specs.get("In"))
        dIn, *rest = result.items
        self.hold(fn, "dIn", dIn, self.specs.get("In"))
        if len(rest) == 1 and isinstance(rest[0], Record):
            return self.hold_named(fn, rest[0])
        rest = list(rest[0].items) if len(rest) == 1 and isinstance(rest[0], Many) else rest
        for name, product in zip(weights, rest, strict=False) if len(rest) == len(weights) else ():
            self.hold(fn, "d" + name, product, one_layer(self.specs[name]))

    def hold_named(self, fn: Function, grads: Record) -> None:
        for key, product in grads.items:
            name = key if key in self.specs else key.removeprefix("d")
            held = product.item if isinstance(product, Each) else product
            if name in self.specs:
                wanted = self.specs[name] if key in self.specs or name not in ENDS else self.specs["In"]
                self.hold(fn, f"gradient {key}", held, one_layer(wanted))


def followable(fn) -> bool:
    return isinstance(fn, Function) and isinstance(fn.node, ast.FunctionDef)
