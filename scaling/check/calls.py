"""Calls and arithmetic, read and not run (see scaling.check): collectives, torch's functions, helpers, operators."""

import ast
from dataclasses import replace

from scaling.algebra import rules
from scaling.algebra.contraction import check_product
from scaling.algebra.resharding import reshard
from scaling.check.part import Part
from scaling.check.values import Array, Each, Many, Text, Tree, as_array, difference, element, guess
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
TYPED = {*KINDS, "einsum", "shard", "reshard", "unshard", "ppermute", "send", "recv"}
ITERATION = ("list", "tuple", "reversed", "sorted", "iter")
LINEAR = {
    "neg",
    "clone",
    "zeros_like",
    "empty_like",
    "detach",
    "contiguous",
    "to",
    "float",
    "double",
    "half",
    "bfloat16",
}
LINEAR |= {"cpu", "cuda", "type", "requires_grad_", "mul", "div"}
NONLINEAR = {
    "relu",
    "gelu",
    "silu",
    "sigmoid",
    "tanh",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "square",
    "pow",
    "abs",
    "softmax",
}
NONLINEAR |= {"log_softmax", "softplus", "leaky_relu", "elu", "clamp", "sign", "erf", "reciprocal"}
MODULES = ("torch", "F", "functional", "nn")


class Calls(Part):
    """The part of the reader that reads calls; `results` holds what each call was found to return, by its node."""

    def imports(self, tree: ast.Module) -> None:
        self.results, self.known, self.typed, self.modules = {}, {}, {}, set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "scaling":
                self.modules |= {a.asname or a.name for a in node.names if a.name == "collectives"}
            elif isinstance(node, ast.ImportFrom) and node.module in (
                "scaling.collectives",
                "scaling.collectives.multiply",
            ):
                self.typed |= {a.asname or a.name: a.name for a in node.names if a.name in TYPED}
            elif isinstance(node, ast.Import):
                self.modules |= {a.asname for a in node.names if a.name == "scaling.collectives" and a.asname}

    def call(self, node: ast.Call, env: dict):
        result = self.results[id(node)] = self._call(node, env)
        return result

    def _call(self, node: ast.Call, env: dict):
        fn, name = node.func, None
        if isinstance(fn, ast.Name):
            name = self.typed.get(fn.id)
        elif isinstance(fn, ast.Attribute) and isinstance(fn.value, ast.Name) and fn.value.id in self.modules:
            name = fn.attr if fn.attr in TYPED else None
        if name:
            return self.typed_call(name, node, env)
        if isinstance(fn, ast.Attribute):
            return self.method(fn, node, env)
        self_args = [self.value(a.value if isinstance(a, ast.Starred) else a, env) for a in node.args]
        keywords = {k.arg: self.value(k.value, env) for k in node.keywords}
        if not isinstance(fn, ast.Name):
            self.value(fn, env)
            return None
        if fn.id == "wait" and self_args and isinstance(self_args[0], Array):
            return Array(self_args[0].spec, self_args[0].sure)
        if fn.id == "zip":
            return Each(Many(tuple(map(element, self_args))))
        if fn.id == "enumerate" and self_args:
            return Each(Many((None, element(self_args[0]))))
        if fn.id in ITERATION and self_args:
            return self_args[0]
        if fn.id in self.functions:
            return self.inlined(self.functions[fn.id], node, self_args, keywords)
        return self.unfollowed(node, [*self_args, *keywords.values()], env)

    def unfollowed(self, node: ast.Call, values, env: dict):
        """A function from elsewhere: it returns what a line that it is given says; or what it is given keeps its type,
        unless it gets a mesh to communicate on."""
        if values and isinstance(values[0], Text) and "->" in values[0].text:
            try:
                line = parse_line(values[0].text)
            except ShardingError:
                return None
            self.operands(node, values, line.operands, env)
            return Array(line.result)
        given = [*node.args, *(k.value for k in node.keywords)]
        if any(isinstance(x, ast.Name) and "mesh" in x.id.lower() for x in given):
            return None
        return guess(values)

    def inlined(self, fn: ast.FunctionDef, node: ast.Call, args, keywords):
        """Read a function of this module with what it is called with; what it returns."""
        if self.depth > 6 or any(isinstance(a, ast.Starred) for a in node.args):
            return None
        names = [a.arg for a in fn.args.posonlyargs + fn.args.args]
        env = dict(zip(names, args, strict=False)) | {k: v for k, v in keywords.items() if k}
        key = (fn.name, tuple(sorted(env.items(), key=lambda item: item[0])))
        if key not in self.known:
            self.known[key] = None  # what a recursive call sees
            self.known[key] = self.function(fn, env)
        return self.known[key]

    def method(self, fn: ast.Attribute, node: ast.Call, env: dict):
        args = [self.value(a.value if isinstance(a, ast.Starred) else a, env) for a in node.args]
        args += [self.value(k.value, env) for k in node.keywords]
        of_torch = (isinstance(fn.value, ast.Name) and fn.value.id in MODULES) or (
            isinstance(fn.value, ast.Attribute) and fn.value.attr in MODULES
        )  # fmt: skip
        if of_torch:
            return self.elementwise(fn.attr, node, args[:1]) if args else None
        held = self.value(fn.value, env)
        if fn.attr == "append" and isinstance(fn.value, ast.Name) and args and isinstance(args[0], Array):
            self.appended.setdefault(getattr(self.current, "name", ""), []).append((node, fn.value.id, args[0]))
        if fn.attr == "copy_" and args:
            self.stored(node, fn.value, args[0])
        if fn.attr == "wait" and isinstance(held, Array):
            return Array(held.spec, held.sure)
        if fn.attr == "t" and isinstance(held, Array) and len(held.spec.dims) == 2:
            return Array(Spec(held.spec.name, held.spec.dims[::-1], held.spec.unreduced), held.sure)
        if fn.attr in ("items", "values") and isinstance(held, Tree):
            values = element(Many(tuple(item for _, item in held.items)))
            return Each(values if fn.attr == "values" else Many((None, values)))
        if isinstance(held, Array):
            return self.elementwise(fn.attr, node, [held])
        root = fn.value
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        known = held is not None or (isinstance(root, ast.Name) and root.id in env)
        return None if known else self.unfollowed(node, args, env)  # a method of a list, or a function of a module

    def elementwise(self, name: str, node: ast.AST, args):
        """A function of torch on one array: linear ones keep its type, nonlinear ones need it reduced."""
        held = as_array(args[0]) if args else None
        if held is None or held.pending or name not in LINEAR | NONLINEAR:
            return None
        if name in NONLINEAR and held.spec.unreduced:
            self.nonlinear(node, name, held)
            return Array(Spec(held.spec.name, held.spec.dims), held.sure)
        return held

    def nonlinear(self, node: ast.AST, what: str, held: Array) -> None:
        axes = format_axes(held.spec.unreduced)
        self.report(
            node,
            f"{what} of {held.spec}\n  rule: a nonlinear function of partial sums is not the sum of the function's "
            f"parts\n  fix: reduce_scatter or all_reduce it over {axes} first",
        )

    def arithmetic(self, node, env: dict):
        if isinstance(node, ast.UnaryOp):
            return self.value(node.operand, env)
        values = [self.value(side, env) for side in (node.left, node.right)]
        if isinstance(node.op, ast.Add) and all(isinstance(v, Text) for v in values):
            return Text(values[0].text + values[1].text)
        arrays = [v for v in values if isinstance(v, Array)]
        constant = any(isinstance(side, ast.Constant) and side.value for side in (node.left, node.right))
        if len(arrays) == 2 and arrays[0].spec.dim_names == arrays[1].spec.dim_names:
            return self.meet(node, *arrays)
        if len(arrays) != 1 or isinstance(node.op, ast.MatMult) or not (constant or None in values):
            return None
        (held,) = arrays
        below = isinstance(node.op, (ast.Div, ast.FloorDiv)) and values[1] is held
        shifted = constant and isinstance(node.op, (ast.Add, ast.Sub))
        if held.spec.unreduced and not held.pending and (below or shifted or isinstance(node.op, ast.Pow)):
            self.nonlinear(node, ast.unparse(node), held)
            return Array(Spec(held.spec.name, held.spec.dims), held.sure)
        return Array(held.spec, False, held.pending) if constant else guess([held])

    def meet(self, node: ast.BinOp, a: Array, b: Array):
        """Two arrays of the same dims in one elementwise operation: they must be split alike."""
        linear = isinstance(node.op, (ast.Add, ast.Sub))
        if linear or a.pending or b.pending or a.spec.dims != b.spec.dims:
            if wrong := difference(a if a.pending else b, a.spec if b.pending or not a.pending else b.spec):
                self.report(node, f"{ast.unparse(node)}: one operand is {a.spec}, the other {b.spec}: {wrong}")
        elif both := set(a.spec.unreduced) & set(b.spec.unreduced):
            self.nonlinear(node, ast.unparse(node), Array(Spec(a.spec.name, a.spec.dims, tuple(sorted(both)))))
        return guess([a, b]) if not (a.pending or b.pending) else None

    def typed_call(self, name: str, node: ast.Call, env: dict):
        """A collective, einsum and the like: check the line by itself, its operands, and give the result's type."""
        values = [self.value(argument, env) for argument in node.args]
        keywords = {k.arg: self.value(k.value, env) for k in node.keywords}
        line = values[0] if values else keywords.get("line")
        if not isinstance(line, Text):
            return None
        try:
            before, after = declared(name, line.text)
        except ShardingError as error:
            self.report(node, str(error))
            return None
        if name == "einsum":  # it waits for operands that are under way
            values = [replace(v, pending=False) if isinstance(v, Array) else v for v in values]
        self.operands(node, values, before, env, gathers=name == "all_gather")
        flag = next((k.value for k in node.keywords if k.arg in ("async_op", "defer")), None)
        if flag is not None and not isinstance(flag, ast.Constant):
            return None
        return Array(after, pending=flag is not None and bool(flag.value))

    def unlike_specs(self, spec: Spec) -> str:
        """Of a gathered array of which only the name is known: an axis that SPECS has for another dim, or nowhere."""
        known, axes_known = self.specs.get(spec.name), {axis for s in self.specs.values() for axis in s.axes}
        if known is None:
            return ""
        for dim, axes in spec.dims:
            for axis in axes:
                elsewhere = axis in known.axes and axis not in known.axes_of(dim)
                if dim in known.dim_names and (elsewhere or axis not in axes_known):
                    return f"SPECS says {known}: {dim} is not split over {axis}"
        return ""

    def operands(self, node: ast.Call, values, before: tuple[Spec, ...], env: dict, gathers=False) -> None:
        """Hold the operands after a line against the types that it declares; from then on they are trusted."""
        for spec, argument, value in zip(before, node.args[1:], values[1:], strict=False):
            held = as_array(value)
            if held is not None and (wrong := difference(held, spec)):
                text = ast.unparse(argument)
                self.report(node, f"{text} holds {held.spec}, but the line says {spec}: {wrong}")
            elif value is None and gathers and (wrong := self.unlike_specs(spec)):
                self.report(node, f"{ast.unparse(argument)} is gathered as {spec}, but {wrong}")
            if isinstance(argument, ast.Name) and not isinstance(value, Each):
                env[argument.id] = Array(spec)


def declared(name: str, text: str) -> tuple[tuple[Spec, ...], Spec]:
    """The types of the operands and of the result that a line declares; ShardingError if the line breaks a rule."""
    if name == "einsum":
        line = check_product(text)
        return line.operands, line.result
    if name in ("ppermute", "send", "recv") and "->" not in text:
        return (parse(text),), parse(text)
    if name == "unshard":
        spec = parse(text)
        return (spec,), Spec(spec.name, tuple((dim, ()) for dim in spec.dim_names))
    if name == "shard" and "->" not in text:
        spec = parse(text)
        return (Spec(spec.name, tuple((dim, ()) for dim in spec.dim_names)),), spec
    line = parse_line(text)
    if name == "reshard":
        reshard(line.operands[0], line.result)
    elif name != "ppermute" and not (name == "shard" and line.operands[0].same_sharding(line.result)):
        rules.collective_steps(KINDS.get(name, "Slice"), text)
    return line.operands, line.result
