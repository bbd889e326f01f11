"""Calls, read and not run (see scaling.check): which function it is, and what it returns."""

import ast
from dataclasses import replace

from scaling.check.arithmetic import Arithmetic
from scaling.check.docstrings import documented
from scaling.check.gradients import Derivatives
from scaling.check.helpers import Helpers
from scaling.check.lines import Lines, readable
from scaling.check.methods import Methods
from scaling.check.torch_functions import TorchFunctions
from scaling.check.torch_names import names
from scaling.check.values import (
    ANY,
    Class,
    Each,
    Function,
    Known,
    Many,
    Number,
    Pull,
    Record,
    Shard,
    Text,
    Var,
    as_array,
    element,
    has_arrays,
)
from scaling.spec import ShardingError, Spec, parse_line

SAME_ITEMS = ("list", "tuple", "reversed", "sorted", "iter")
SAYS_LINEAR = names("""vjp jvp pull wait linear copy clone cast scale view shape head split merge chunk stack concat
    transpose permute pad flat to_ identity checkpoint""")  # parts of the names of functions that are not known
REDUCES = names("reduc sync gather scatter sum comm send exchange shard")
COMMUNICATES = ("mesh", "group", "comm", "pg")
DEPTH = 8  # calls inside calls that are followed


class Calls(Lines, Methods, Helpers, TorchFunctions, Arithmetic, Derivatives):
    """The part of the reader that reads calls."""

    def call(self, node: ast.Call, frame):
        fn = node.func
        callee = self.callee(fn, frame)
        if isinstance(callee, Known) and callee.kind == "typed":
            return self.typed_call(callee.name, node, frame)
        args, spread = self.arguments_of(node, frame)
        keywords = {k.arg: self.value(k.value, frame) for k in node.keywords}
        if isinstance(fn, ast.Attribute) and fn.attr == "update" and self.is_optimizer(node, args, keywords):
            return self.optimizer_update(node, args, keywords, frame)
        match callee:
            case None:
                pass
            case Known(kind="torch", name=name):
                if name in self.TRANSFORMS:
                    return self.transform(name, node, args, keywords, frame)
                return self.of_torch(name, node, args or list(keywords.values()), keywords, frame)
            case Known(kind="gives partial sums", name=axes):
                return Shard(Spec("Out", (), tuple(axes.split())), sure=False, loose=True, parts="sum")
            case Known(kind="special", name=name):
                return self.special(name, node, args, keywords, frame)
            case Known(kind="builtin", name=name):
                return self.builtin(name, node, args, frame)
            case Function():
                return self.followed_call(callee, node, args, keywords, spread, frame)
            case Class():
                return self.instance(callee, args, keywords, frame)
            case Pull():
                return self.cotangents(callee)
        if isinstance(fn, ast.Attribute):
            return self.method(fn, node, args, keywords, frame)
        return self.unfollowed(node, [*args, *keywords.values()], frame)

    def callee(self, fn: ast.expr, frame):
        """What is called; of a method of an array, and of what is not known, None."""
        if isinstance(fn, ast.Attribute):
            held = self.value(fn.value, frame)
            self.holders[id(fn)] = held
            if isinstance(held, (Shard, Text, Many, Each, Var)):
                return None
            if isinstance(held, Record) and held.kind is None and held.get(fn.attr) is None:
                return None
            return self.attribute_of(held, fn.attr)
        return self.value(fn, frame)

    def arguments_of(self, node: ast.Call, frame) -> tuple[list, bool]:
        """(values of the positional arguments, whether some of them are not known to be where they stand)."""
        values: list = []
        for argument in node.args:
            found = self.value(argument, frame)
            if not isinstance(argument, ast.Starred):
                values.append(found)
            elif isinstance(found, Many):
                values += found.items
            else:
                return [*values, element(found)], True
        return values, False

    def builtin(self, name: str, node: ast.Call, args: list, frame):
        if name == "zip":
            if args and all(isinstance(a, Many) and len(a.items) == len(args[0].items) for a in map(self.spread, args)):
                return Many(tuple(Many(row) for row in zip(*(self.spread(a).items for a in args), strict=True)))
            return Each(Many(tuple(map(element, args))))
        if name == "enumerate" and args:
            return Each(Many((None, element(args[0]))))
        if name in SAME_ITEMS and args:
            return Many(args[0].items[::-1]) if name == "reversed" and isinstance(args[0], Many) else args[0]
        if name == "dict":
            given = {k.arg: self.value(k.value, frame) for k in node.keywords if k.arg}
            items = dict(args[0].items) if args and isinstance(args[0], Record) else {}
            pairs = args[0].items if args and isinstance(args[0], Many) else [element(args[0])] if args else []
            for pair in pairs:
                if isinstance(pair, Many) and len(pair.items) == 2:
                    key = pair.items[0].text if isinstance(pair.items[0], Text) else ANY
                    items[key] = pair.items[1]
            return Record(tuple((items | given).items()))
        if name == "sum" and args:
            start = args[1] if len(args) > 1 else Number(0.0)
            return self.combine(node, "+", element(args[0]), start, (node, node), frame)
        if name in ("abs", "max", "min", "pow", "round"):
            for held in args:
                if isinstance(held, Shard) and held.spec.unreduced and held.spec.dims:
                    self.nonlinear(node, name, held, frame)
            return next((replace(a, key="") for a in args if isinstance(a, Shard)), None)
        if name == "next" and args:
            return element(args[0])
        if name == "map" and len(args) > 1 and isinstance(args[0], Function):
            return Each(self.followed_call(args[0], node, list(map(element, args[1:])), {}, False, frame))
        return None

    def spread(self, value):
        """The items of a tuple; those of a dict are its values."""
        return Many(tuple(item for _, item in value.items)) if isinstance(value, Record) else value

    def followed_call(self, fn: Function, node: ast.expr | ast.stmt, args, keywords, spread: bool, frame):
        """Read a function whose source is known with what it is called with; what it returns."""
        given = {k: v for k, v in keywords.items() if k}
        telling = any(has_arrays(v) or (isinstance(v, Text) and "[" in v.text) for v in [*args, *given.values()])
        if spread or len(self.active) > DEPTH or fn.node in self.active:
            return self.unfollowed(node, [*args, *given.values()], frame)
        if not telling and not fn.module.uses_lines:
            return None
        if fn.bound is not None:
            args = [fn.bound, *args]
        env = self.bind_arguments(fn, args, given)
        try:
            key = fn.node, frozenset(env.items()), id(fn.around) if fn.around else 0
            remembered = self.memory.get(key)
        except TypeError:
            key, remembered = None, None
        if remembered is not None:
            for rule, message in remembered[1]:
                self.at_call(frame.site or node, rule, message)
            return remembered[0]
        before = len(self.elsewhere)
        found = believed(fn, self.function(fn, env, frame, node))
        if key is not None:
            self.memory[key] = found, tuple(self.elsewhere[before:])
        return found

    def bind_arguments(self, fn: Function, args: list, keywords: dict) -> dict:
        """The variables that a function starts with."""
        spec, env = fn.node.args, {}
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        outside = self.frame_of(fn.module)
        outside.env = dict(fn.around)
        for name, default in zip(names[::-1], spec.defaults[::-1], strict=False):
            env[name] = self.value(default, outside)
        for argument, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
            env[argument.arg] = self.value(default, outside) if default is not None else None
        env |= dict(zip(names, args, strict=False))
        if spec.vararg:
            env[spec.vararg.arg] = Many(tuple(args[len(names) :]))
        known = {*names, *(a.arg for a in spec.kwonlyargs)}
        if spec.kwarg:
            env[spec.kwarg.arg] = Record(tuple((k, v) for k, v in keywords.items() if k not in known))
        env |= {k: v for k, v in keywords.items() if k in known}
        for name in names:
            env.setdefault(name, None)
        return env

    def instance(self, cls: Class, args: list, keywords: dict, frame):
        """An object of a class: of a NamedTuple or dataclass its fields are known."""
        names = [n.target.id for n in cls.node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        defaults = {
            n.target.id: self.value(n.value, self.frame_of(cls.module))
            for n in cls.node.body
            if isinstance(n, ast.AnnAssign) and n.value is not None and isinstance(n.target, ast.Name)
        }
        items = defaults | dict(zip(names, args, strict=False)) | {k: v for k, v in keywords.items() if k in names}
        return Record(tuple((name, items.get(name)) for name in names), cls)

    def of_class(self, cls: Class, name: str, held):
        """A method of a class, bound to the object if there is one; a property's value."""
        node = cls.members.get(name)
        if isinstance(node, ast.FunctionDef):
            marks = {getattr(d, "id", getattr(d, "attr", "")) for d in node.decorator_list}
            if marks & {"property", "cached_property"}:
                fn = Function(node, cls.module, {}, held)
                return self.followed_call(fn, node, [], {}, False, self.frame_of(cls.module))
            bound = cls if "classmethod" in marks else None if "staticmethod" in marks else held
            return Function(node, cls.module, {}, bound)
        if node is not None:
            kind = self.annotated(node.annotation, cls.module)
            return Record((), kind) if kind is not None else None
        if name == "apply" and any("Function" in ast.unparse(base) for base in cls.node.bases):
            forward = self.of_class(cls, "forward", None)
            takes_context = isinstance(forward, Function) and forward.node.args.args[:1] and (
                forward.node.args.args[0].arg in ("ctx", "context")
            )  # fmt: skip
            return None if takes_context else forward
        return None

    def unfollowed(self, node: ast.expr | ast.stmt, values: list, frame):
        """A function that is not known: it returns what a line that it is given says; or what it is given keeps its
        type, unless it gets a mesh to communicate on."""
        if not isinstance(node, ast.Call):
            return None
        if values and isinstance(values[0], Text) and "->" in values[0].text:
            try:
                line = parse_line(readable(values[0], node)[0])
            except ShardingError:
                return None
            self.operands("", line.operands, list(zip(node.args[1:], values[1:], strict=False)), {}, frame)
            return Shard(line.result)
        arrays = [a for a in map(as_array, values) if a is not None and not a.pending]
        if not arrays and not any(isinstance(v, Var) for v in values):
            return None
        given = [*node.args, *(k.value for k in node.keywords)]
        label = getattr(node.func, "attr", getattr(node.func, "id", "")).lower()
        if any(isinstance(x, ast.Name) and any(w in x.id.lower() for w in COMMUNICATES) for x in given):
            return None
        loose, arrays = [a for a in arrays if a.loose], [a for a in arrays if not a.loose]
        if any(word in label for word in REDUCES) or not arrays + loose:
            return next((v for v in values if isinstance(v, Var)), None) if not arrays + loose else None
        unreduced = sorted({axis for a in arrays + loose for axis in a.spec.unreduced})
        first = (arrays or loose)[0].spec
        through = ""
        if unreduced and not any(word in label for word in SAYS_LINEAR):
            through = ast.unparse(node.func)
        alike = not loose and all(a.spec.dims == first.dims for a in arrays)
        if any(axis in first.axes for axis in unreduced) or (not alike and not unreduced):
            return None
        return Shard(Spec(first.name, first.dims, tuple(unreduced)), sure=False, loose=not alike, through=through)


def believed(fn: Function, found):
    """What a function returns: where its body does not tell, what its docstring says, if that names mesh axes."""
    types, results = documented(fn.node)
    if not any(spec.axes or spec.unreduced for spec in [*types.values(), *results]):
        return found
    said = [Shard(spec, sure=False, parts="sum" if spec.unreduced else "") for spec in results]
    if isinstance(found, Many):
        known = [said[i] if i < len(said) and untold(item, said[i]) else item for i, item in enumerate(found.items)]
        return Many(tuple(known))
    return (said[0] if len(said) == 1 else Many(tuple(said))) if untold(found, said[0]) else found


def untold(value, said: Shard) -> bool:
    """Whether the type of what may be an array is not known, or a guess that takes it for reduced, or for not."""
    if not isinstance(value, Shard):
        return value is None or isinstance(value, (Number, Var))
    guess = not value.sure and {*value.spec.unreduced} != {*said.spec.unreduced}
    return (value.loose or guess) and not value.pending
