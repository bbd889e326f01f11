"""The reader of one module (see scaling.check): its names, the order in which it is read, and what it reports."""

import ast
import builtins
from typing import NamedTuple

from scaling.check.docstrings import documented
from scaling.check.listings import Listings
from scaling.check.modules import TYPED, TYPED_IN, Module, Modules
from scaling.check.statements import Frame
from scaling.check.values import Class, Function, Known, Many, Record, Shard, Var
from scaling.spec import ShardingError, Spec

SPECIAL = {"wait": "wait", "joined": "joined"}
HELPERS = {("scaling.tree", "map"): "tree.map", ("scaling.optim", "clip_by_global_norm"): "clip_by_global_norm"}
HELPERS |= {
    ("optree", "tree_map"): "tree.map",
    ("scaling.tree", "leaves"): "leaves",
    ("optree", "tree_leaves"): "leaves",
}
HELPERS |= {("scaling.strategies.stateless", "call"): "stateless"}
HELPERS |= {("scaling.tree", "shard"): "tree.shard", ("scaling.tree", "unshard"): "tree.unshard"}
AS_TORCH = (("scaling.strategies.tape", "vjp"),)  # functions of the project that are read as torch's of that name
IN_OTHERS = ("illegal-line", "never-reduced", "never-waited", "specs")  # faults of another module's own


class Fault(NamedTuple):
    """A finding by its line, and the last line of what it is about."""

    line: int
    last: int
    rule: str
    message: str


class Reader(Listings):
    """Reads one module. `faults`: what is wrong; `specs`: the module's SPECS; `seen`: its typed calls."""

    def __init__(self, module: Module, modules: Modules):
        self.module, self.modules, self.faults, self.quiet = module, modules, set(), 0
        self.active, self.followed, self.bound, self.holders = [], set(), {}, {}
        self.memory, self.names, self.seen, self.numbers = {}, {}, {}, 0
        self.holes, self.numbered = {}, {}
        self.notes: list[str] = []
        self.elsewhere: list[tuple[str, str]] = []  # faults in functions of other modules, in the order of the reading
        self.specs = {}  # while they are looked for, which may read functions
        self.specs = self.find_specs()

    def report(self, node: ast.AST, rule: str, message: str, frame: Frame) -> None:
        """A fault in this module, or in a function of another one with what it is called with here."""
        if self.quiet:
            return
        if frame.module is self.module:
            line = getattr(node, "lineno", 1)
            self.faults.add(Fault(line, getattr(node, "end_lineno", line) or line, rule, message))
        elif frame.site is not None and rule not in IN_OTHERS:
            where = f"{frame.name} ({frame.module.name}, line {getattr(node, 'lineno', 0)})"
            self.at_call(frame.site, rule, f"in {where}, as it is called here: {message}")

    def at_call(self, site: ast.expr | ast.stmt, rule: str, message: str) -> None:
        """A fault in a function of another module, at the call in this one; kept for the next such call."""
        self.elsewhere.append((rule, message))
        if not self.quiet:
            self.faults.add(Fault(site.lineno, site.end_lineno or site.lineno, rule, message))

    def unknown(self) -> Var:
        self.numbers += 1
        return Var(self.numbers)

    def frame_of(self, module: Module) -> Frame:
        return Frame(module)

    def find_specs(self) -> dict[str, Spec]:
        found = self.global_name(self.module, "SPECS") if "SPECS" in self.module.scope else None
        try:
            return self.types_of(found)
        except ShardingError as error:
            node = self.module.scope["SPECS"][-1][0]
            self.report(node, "specs", str(error), self.frame_of(self.module))
            return {}

    # names

    def global_name(self, module: Module, name: str):
        """What a name stands for at the top level of a module."""
        if module is None:
            return None
        key = module, name
        if key not in self.names:
            self.names[key] = None  # what a circular import sees
            self.names[key] = self.resolve(module, name)
        return self.names[key]

    def resolve(self, module: Module, name: str):
        bindings = module.scope.get(name)
        if not bindings:
            if name in TYPED:  # its import is missing
                return Known("typed", name)
            return Known("builtin", name) if hasattr(builtins, name) else None
        node, detail = bindings[-1]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return Function(node, module)
        if isinstance(node, ast.ClassDef):
            return Class(node, module)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return self.imported(module, *bindings[0])
        if len(bindings) > 1 or isinstance(node, ast.AugAssign) or node.value is None:
            return None
        self.quiet += 1
        frame = self.frame_of(module)
        found = self.value(node.value, frame)
        if not isinstance(detail, ast.Name):
            self.bind(detail, found, frame)
            found = frame.env.get(name)
        self.quiet -= 1
        return found

    def imported(self, module: Module, node, alias: ast.alias):
        """What an import binds."""
        if isinstance(node, ast.Import):
            name = alias.name if alias.asname else alias.name.split(".")[0]
            return Known("torch", name) if name.split(".")[0] == "torch" else Known("module", name)
        return self.member(module.absolute(node), alias.name, module)

    def member(self, source: str, name: str, importer: "Module | None" = None):
        """What a module has under a name: a typed call, a function of torch, something of its source, a submodule."""
        if source.split(".")[0] in ("torch", "operator") or (source, name) in AS_TORCH:
            return Known("torch", name)
        if source.startswith(TYPED_IN) and (name in TYPED or name in SPECIAL):
            return Known("typed", name) if name in TYPED else Known("special", name)
        if (source, name) in HELPERS:
            return Known("special", HELPERS[source, name])
        if (source, name) == ("scaling", "collectives"):
            return Known("module", "scaling.collectives")
        if source.startswith(("scaling.collectives", "scaling.spec")):
            return None
        near = (importer or self.module).path
        found = self.modules.find(source, near)
        if found is not None and found is not importer and name in found.scope:
            return self.global_name(found, name)
        return Known("module", f"{source}.{name}") if self.modules.find(f"{source}.{name}", near) else None

    # reading

    def relevant(self) -> bool:
        """Whether the module has typed calls, or imports from a module that has."""
        return self.module.uses_lines or any(m.uses_lines for m in self.imported_modules())

    def imported_modules(self):
        for bindings in self.module.scope.values():
            for node, alias in bindings:
                names = [alias.name] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    source = self.module.absolute(node)
                    names = [source, f"{source}.{alias.name}"]
                for name in names:
                    if (found := self.modules.find(name, self.module.path)) is not None:
                        yield found

    def read(self) -> None:
        """Read the module's own statements and each of its functions; nothing, if no typed call is in reach."""
        if not self.relevant():
            return
        top = Frame(self.module)
        self.body(self.module.tree.body, top)
        self.read_listings()
        for fn in top.nested:
            if fn.node not in self.followed:
                self.alone(Function(fn.node, self.module))

    def alone(self, fn: Function, held=None) -> None:
        """Read a function by itself. What its lines tell of its arguments is known when it is read once more."""
        types, results = documented(fn.node)
        arguments = self.arguments(fn.node, held)
        for name, spec in types.items():
            if isinstance(arguments.get(name), Var):
                arguments[name] = Shard(spec, parts="sum" if spec.unreduced else "")
        before = set(self.faults)
        found = self.returns(fn, dict(arguments), self.frame_of(self.module))
        given = {k: self.known(v) for k, v in arguments.items()}
        learned = {k: v for k, v in given.items() if v is not arguments[k]}
        if learned:
            self.faults, self.memory = before, {}
            found = self.returns(fn, arguments | learned, self.frame_of(self.module))
        for each in found if results else ():
            for item, result in zip(each.items if isinstance(each, Many) else (each,), results, strict=False):
                self.hold(fn, "", item, result, late=False, by="its docstring")

    def arguments(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, held=None) -> dict:
        """What is known of a function's arguments: params by SPECS, objects of a class by their annotation."""
        env: dict = {}
        for position, argument in enumerate((*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)):
            if argument.arg == "params" and self.specs:
                env[argument.arg] = self.params()
            elif position == 0 and held is not None:
                env[argument.arg] = held
            else:
                kind = self.annotated(argument.annotation, self.module)
                env[argument.arg] = Record((), kind) if kind is not None else self.unknown()
        defaults = dict(zip([a.arg for a in node.args.args][::-1], node.args.defaults[::-1], strict=False))
        for name, default in defaults.items():
            if isinstance(default, ast.Constant) and isinstance(default.value, str):
                env[name] = None
        return env

    def annotated(self, annotation, module: Module) -> "Class | None":
        """The class that an annotation in a module names."""
        name = annotation.value if isinstance(annotation, ast.Constant) else getattr(annotation, "id", "")
        found = self.global_name(module, name) if isinstance(name, str) and name in module.scope else None
        return found if isinstance(found, Class) else None

    def class_body(self, node: ast.ClassDef, frame: Frame) -> None:
        """The methods of a class."""
        cls = Class(node, self.module)
        frame.env[node.name] = cls
        if frame.module is not self.module:
            return
        for item in node.body:
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                marks = {getattr(d, "id", "") for d in item.decorator_list}
                held = None if "staticmethod" in marks else cls if "classmethod" in marks else Record((), cls)
                self.alone(Function(item, self.module, dict(frame.env) if frame.name else {}), held)
            elif isinstance(item, (ast.Assign, ast.AnnAssign)) and item.value is not None:
                self.value(item.value, frame)
