"""What a variable can hold while code is read and not run: the values of the static type checker, and how they meet.

A value that nothing is known about is None. What is known of an array is its type; a guess (`sure` False) is what a
function that is not followed most likely returned: it is compared with a declared type only if the dims are the same.
"""

import ast
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from scaling.spec import Spec

ANY = "?"  # a dim whose name is not known


@dataclass(frozen=True)
class Shard:
    """A shard of a known type.

    `pending`: still under way, to be waited for. `loose`: its dims were not followed, only its {U} counts. `parts`: how
    the parts of {U} make the whole, if known: "sum", "mean", "max", "min", or "root", of which one is not zero.
    `summed`: an AllReduce made it. `through`: the function, not known to be linear, that these partial sums went
    through. `key`: the param that it is.
    """

    spec: Spec
    sure: bool = True
    pending: bool = False
    loose: bool = False
    parts: str = ""
    summed: bool = False
    through: str = ""
    key: str = ""

    def __str__(self) -> str:
        return f"a view of {self.spec}" if self.loose else str(self.spec)

    @property
    def matrix(self) -> bool:
        return not self.loose and len(self.spec.dims) == 2

    def typed(self, dims=None, unreduced=None, **changes) -> "Shard":
        """This array with other dims or {U}, which is no param any more."""
        dims = self.spec.dims if dims is None else tuple(dims)
        spec = Spec(self.spec.name, dims, self.spec.unreduced if unreduced is None else tuple(sorted(unreduced)))
        return replace(self, spec=spec, key="", **changes)


@dataclass(frozen=True)
class Var:
    """An argument of which nothing is known yet: it has the type of the first line that it, or a function of it that
    keeps types, is given to."""

    number: int


@dataclass(frozen=True)
class Number:
    """A constant: a number, or an array that is the same number everywhere. None: some number."""

    value: float | None

    @property
    def zero(self) -> bool:
        return self.value == 0


@dataclass(frozen=True)
class Text:
    """A string that is known: the type of a line may be kept in a variable."""

    text: str


@dataclass(frozen=True)
class Many:
    """A tuple or list of known length."""

    items: tuple


@dataclass(frozen=True)
class Each:
    """A list, an iterator or a stack of layers, all of whose items are alike."""

    item: object


@dataclass(frozen=True)
class Record:
    """A dict by constant keys, such as params and gradients. `names`: those of a NamedTuple's or dataclass's fields."""

    items: tuple[tuple[str, object], ...]
    kind: Any = None  # the Class that it is an instance of

    def get(self, key):
        items = dict(self.items)
        return items.get(key, items.get(ANY))  # ANY: what stands under a key that is not known

    def put(self, key: str, value) -> "Record":
        return replace(self, items=tuple((dict(self.items) | {key: value}).items()))


@dataclass(frozen=True, eq=False)
class Function:
    """A function whose source is known: of a module, with the variables around it, perhaps bound to an object."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    module: Any
    around: dict = field(default_factory=dict)
    bound: object = None

    @property
    def name(self) -> str:
        return getattr(self.node, "name", "lambda")


@dataclass(frozen=True, eq=False)
class Class:
    """A class whose source is known."""

    node: ast.ClassDef
    module: Any

    @cached_property
    def members(self) -> "dict[str, ast.FunctionDef | ast.AnnAssign]":
        """Its methods and annotated fields."""
        found: dict = {}
        for node in self.node.body:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, node)
            elif isinstance(node, ast.AnnAssign):
                found.setdefault(getattr(node.target, "id", ""), node)
        return found


@dataclass(frozen=True)
class Known:
    """A name that the checker knows by itself: `kind` "typed" (a collective, einsum), "torch", "module", "special",
    "gives partial sums" (a function, by the axes of its result's {U})."""

    kind: str
    name: str


@dataclass(frozen=True)
class Gone:
    """What was donated, by donate=True: it must not be read again."""

    was: str
    line: int


@dataclass(frozen=True, eq=False)
class Pull:
    """What torch.func.vjp returns beside the result: the cotangents of `primals`, all of them in a tuple unless `one`.

    `result` is what the function returned: the cotangents are unreduced over the axes over which it is.
    """

    primals: tuple
    result: object
    one: bool = False


def merge(a, b):
    """What holds after either of two branches: the one that is known, or what both agree on."""
    if a is b or a is None or b is None or a == b:
        return b if a is None else a
    if isinstance(a, (Number, Var)) or isinstance(b, (Number, Var)):
        known, other = (b, a) if isinstance(a, (Number, Var)) else (a, b)
        return known if isinstance(known, Shard) or isinstance(other, Number) else None
    if isinstance(a, Gone) or isinstance(b, Gone):
        return a if isinstance(a, Gone) else b
    if isinstance(a, Shard) and isinstance(b, Shard):
        if a.pending != b.pending or a.spec.unreduced != b.spec.unreduced:
            return None
        if a.loose != b.loose:
            return replace(b if a.loose else a, sure=False)
        both = a if a.spec.same_sharding(b.spec) else replace(a, loose=True)
        parts = a.parts if a.parts == b.parts or not b.parts else "" if a.parts else b.parts
        return replace(
            both, sure=a.sure and b.sure, loose=both.loose or b.loose, parts=parts, summed=a.summed and b.summed,
            through=a.through or b.through, key=a.key if a.key == b.key else "",
        )  # fmt: skip
    if isinstance(a, Many) and isinstance(b, Many) and len(a.items) == len(b.items):
        return Many(tuple(map(merge, a.items, b.items)))
    if isinstance(a, (Each, Many)) and isinstance(b, (Each, Many)):
        return Each(merge(element(a), element(b)))
    if isinstance(a, Record) and isinstance(b, Record):
        keys = dict.fromkeys([key for key, _ in a.items + b.items])
        return Record(tuple((key, merge(a.get(key), b.get(key))) for key in keys), a.kind)
    return None


def element(value):
    """What iterating over a value, or indexing it by a variable, gives."""
    if value is None:
        return None
    if isinstance(value, Each):
        return value.item
    if isinstance(value, Many):
        held = None
        for item in value.items:
            if held is not None and item is not None and merge(held, item) is None:
                return None
            held = merge(held, item)
        return held
    if isinstance(value, Shard) and not value.loose and value.spec.dims and not value.pending:
        return value.typed(value.spec.dims[1:]) if not value.spec.dims[0][1] else replace(value, loose=True)
    return value if isinstance(value, Shard) and not value.pending else None


def together(a, b):
    """Two lists, one after the other."""
    if isinstance(a, Many) and isinstance(b, Many):
        return Many(a.items + b.items)
    return Each(merge(element(a), element(b)))


def as_array(value) -> "Shard | None":
    """A value as an operand: a stack of layers may stand for what its layers are."""
    if isinstance(value, Each) and isinstance(value.item, Shard):
        return replace(value.item, sure=False)
    return value if isinstance(value, Shard) else None


def arrays_in(value) -> "list[tuple[str, Shard]]":
    """(where, array) of all arrays in a tree of values."""
    if isinstance(value, Shard):
        return [("", value)]
    if isinstance(value, Record):
        return [(f"[{key!r}]{where}", found) for key, item in value.items for where, found in arrays_in(item)]
    if isinstance(value, Many):
        return [(f"[{i}]{where}", found) for i, item in enumerate(value.items) for where, found in arrays_in(item)]
    return [(f"[...]{where}", found) for where, found in arrays_in(value.item)] if isinstance(value, Each) else []


def has_arrays(value) -> bool:
    """Whether there is an array in a tree of values."""
    if isinstance(value, Record):
        return any(has_arrays(item) for _, item in value.items)
    if isinstance(value, Many):
        return any(map(has_arrays, value.items))
    return has_arrays(value.item) if isinstance(value, Each) else isinstance(value, Shard)


def settled(value) -> Any:
    """The value once all of it that is under way has been waited for."""
    if isinstance(value, Shard):
        return replace(value, pending=False)
    if isinstance(value, Many):
        return Many(tuple(map(settled, value.items)))
    if isinstance(value, Each):
        return Each(settled(value.item))
    if isinstance(value, Record):
        return replace(value, items=tuple((key, settled(item)) for key, item in value.items))
    return value


def aligned(a: Spec, b: Spec) -> "tuple | None":
    """The dims of an elementwise function of two arrays, aligned from the last; None if their names do not match."""
    dims, width = [], max(len(a.dims), len(b.dims))
    for i in range(1, width + 1):
        one, other = (s.dims[-i] if i <= len(s.dims) else ("1", ()) for s in (a, b))
        if one[0] not in ("1", other[0], ANY) and other[0] not in ("1", ANY):
            return None
        dims.insert(0, other if one[0] in ("1", ANY) else one)
    axes = [axis for _, split in dims for axis in split]
    return tuple(dims) if len(set(axes)) == len(axes) else None
