"""The judge: the types of a program, found by running it on an abstract mesh.

    report = judge(forward, {"W_in": "W_in[D_X, F]", "W_out": "W_out[F, D_X]"}, "In[B_X, D]", mesh, mesh=mesh)
    report.findings, report.unjudged, report.result

Each text among the arguments becomes a shard of that type, on the meta device. A typed line is judged where it is
called, every other function of torch by the table and the law that explicit mode reads. What was not judged is named:
a function that the table lacks, and a value without a type that reaches a typed line, which is taken at its word.
It does not follow the derivatives that torch.func makes, a reshape that changes dims, ppermute, or what is donated.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import scaling
from scaling._torch import in_transform, no_torch_function, storage_of
from scaling.algebra.law import Illegal, LabelledOp
from scaling.algebra.layouts import DimAxes
from scaling.algebra.ops import function_name, op_kind
from scaling.check.judgement import JudgedFault, Judgement
from scaling.check.rules import broken_rule, said
from scaling.check.values import ANY, Shard
from scaling.collectives.calls import Pending
from scaling.collectives.multiply import einsum
from scaling.collectives.watch import watcher
from scaling.explicit.functions import SEVERAL, read_call
from scaling.spec import ShardingError, Spec, mesh_sizes, parse, parse_line

RULE_OF = {"": "nonlinear", "all": "partial-plus-whole", "each": "product-of-sums", "first": "nonlinear"}
FIX = "reduce_scatter or all_reduce it first"
EMPTY = ("empty_like", "new_empty")
OWN = str(Path(scaling.__file__).parent / "")
ENGINE = tuple(f"{OWN}/{room}/" for room in ("check", "collectives", "trace"))


class _Judge(TorchFunctionMode):
    """Knows the type of each tensor, by the object and by its place in memory, and where it was made."""

    def __init__(self, report: Judgement):
        super().__init__()
        self.report = report
        self.held: dict[Any, tuple[Any, Spec, str]] = {}  # what is held keeps its id and its memory
        self.products: set[Any] = set()  # what lines of products made: partial sums
        self.pending: list[tuple[Pending, str, str]] = []

    def entry(self, x: Any) -> tuple[Any, Spec, str] | None:
        """What is known of x; of a buffer whose parts along its first dim were written one by one, what they are."""
        if not isinstance(x, Tensor):
            return None
        known = self.held.get(id(x)) or self.held.get(_memory(x))
        if known is None and x.dim() and len(x):
            rows = [self.held.get(_memory(row)) for row in x]
            if rows[0] is None:
                rows = [self.held.get(_memory(row)) for row in x.split(1)]
            types = {
                None if row is None else str(Spec("", row[1].dims[-x.dim() + 1 :], row[1].unreduced)) for row in rows
            }
            if rows[0] is not None and len(types) == 1:
                _, spec, place = rows[0]
                return x, Spec(spec.name, ((ANY, ()), *spec.dims[-x.dim() + 1 :]), spec.unreduced), place
        return known

    def type_of(self, x: Any) -> Spec | None:
        known = self.entry(x)
        return None if known is None else known[1]

    def give(self, x: Tensor, spec: Spec, place: str) -> None:
        self.held[id(x)] = self.held[_memory(x)] = x, spec, place

    def forget(self, x: Tensor) -> None:
        """What is written over has no type any more, under whatever view."""
        for key, (held, *_) in list(self.held.items()):
            if _memory(held)[0] == _memory(x)[0] and _first(held) <= _last(x) and _first(x) <= _last(held):
                del self.held[key]

    def find(self, place: str, rule: str, text: str, x: Any = None) -> None:
        with no_torch_function():
            known = self.entry(x)
        found = JudgedFault(place, rule, text, known[2] if known is not None else "")
        if found not in self.report.findings:
            self.report.findings.append(found)

    def skip(self, place: str, why: str) -> None:
        if (place, why) not in self.report.unjudged:
            self.report.unjudged.append((place, why))

    def typed_call(self, call: Callable, *args, **kwargs) -> Any:
        """A typed line: its operands against what is known of them; its result has the type that it says."""
        einsum_line = call is einsum
        line = args[0] if einsum_line else args[1]
        operands = [x for x in (args[1:3] if einsum_line else args[2:3]) if x is not None]
        place = _place()
        if in_transform() is not None:
            self.skip(place, f"{line}: inside a transform of torch.func")
            return self.unwatched(call, *args, **kwargs)
        typed = parse_line(line if "->" in line else f"{parse(line).whole()} -> {line}")
        with no_torch_function():
            for x, declared in zip(operands, typed.operands, strict=True):
                self.compare(x, declared, place, line)
            if not einsum_line and args[-1] != "sum" and self.products & {id(operands[0]), _memory(operands[0])}:
                what = f"{line}\n  it is a sum of products, and op={args[-1]!r}"
                self.find(place, "how-reduced", said(what, "how-reduced", 'op="sum"'), operands[0])
            result = self.unwatched(call, *args, **kwargs)
        if isinstance(result, Pending):
            finish = result.finish
            self.pending.append((result, place, line))

            def finished() -> Any:
                made: Any = finish() if finish is not None else None
                self.give(made, typed.result, place)
                return made

            result.finish = finished
        elif isinstance(result, Tensor):
            self.give(result, typed.result, place)
            if einsum_line and typed.result.unreduced:
                self.products.update((id(result), _memory(result)))
        return result

    def unwatched(self, call: Callable, *args, **kwargs) -> Any:
        token = watcher.set(None)
        try:
            return call(*args, **kwargs)
        finally:
            watcher.reset(token)

    def compare(self, x: Any, declared: Spec, place: str, line: str) -> None:
        if not isinstance(x, Tensor):
            return
        held = self.type_of(x)
        if held is None:
            self.skip(place, f"{line}: a value without a type, taken for {declared}")
            return
        self.report.judged += 1
        if (broken := broken_rule(Shard(held), declared)) is not None:
            rule, text = broken
            self.find(place, rule, f"{line}\n  the operand is {held}: {text}", x)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if in_transform() is not None:
            return func(*args, **kwargs)
        with no_torch_function():
            result = func(*args, **kwargs)
            everything: Any = (args, kwargs)
            tensors = [x for x in optree.tree_leaves(everything, none_is_leaf=True) if isinstance(x, Tensor)]
            if any(self.type_of(x) is not None for x in tensors):
                self.infer(func, args, kwargs, tensors, result)
        return result

    def infer(self, func, args, kwargs, operands: list[Tensor], result: Any) -> None:
        name, place = function_name(func), _place()
        writes = name.endswith("_") and not name.endswith("__")
        if writes or op_kind(name) == "writes":
            copied = self.type_of(operands[-1]) if name == "copy_" and len(operands) == 2 else None
            self.forget(operands[0])
            if copied is not None and operands[0].shape == operands[-1].shape:
                self.give(operands[0], copied, place)
            else:
                self.skip(place, f"{name}: changes its argument, which has no type from here on")
            return
        made = [x for x in optree.tree_leaves(result, none_is_leaf=True) if isinstance(x, Tensor)]
        if not made or name in EMPTY:
            return  # a shape, a dtype, a device; a buffer
        untyped = [x for x in operands if self.type_of(x) is None]
        if untyped or name.strip("_") == "get" or op_kind(name) in (None, *SEVERAL) or not isinstance(result, Tensor):
            self.skip(place, f"{name}: {'an operand without a type' if untyped else 'not in the table'}")
            return
        specs = [spec for x in operands if (spec := self.type_of(x)) is not None]
        try:
            op = read_call(func, args, kwargs, lambda x: isinstance(x, Tensor)).op
        except ShardingError as error:
            self.skip(place, f"{name}: {str(error).splitlines()[0]}")
            return
        if not isinstance(op, LabelledOp):
            if tuple(result.shape) == tuple(operands[0].shape):
                self.give(result, specs[0], place)
            else:
                self.skip(place, f"{name}: dims are merged or cut")
            return
        self.report.judged += 1
        try:
            _, at = op.infer([DimAxes(tuple(axes for _, axes in spec.dims), spec.unreduced) for spec in specs])
        except Illegal as error:
            partial = next((i for i, spec in enumerate(specs) if spec.unreduced), 0)
            rule = RULE_OF[op.linear] if specs[partial].unreduced else "split"
            what = f"{name}({', '.join(map(str, specs))})\n  {error.what}"
            self.find(place, rule, said(what, rule, FIX, error.rule), operands[partial])
            return
        names: dict[str, str] = {}
        for labels, spec in zip(op.inputs, specs, strict=True):
            for label, dim in zip(labels, spec.dim_names, strict=True):
                if label is not None and names.setdefault(label, dim) != dim and ANY not in (dim, names[label]):
                    what = f"{name}({', '.join(map(str, specs))})\n  dim {names[label]} meets dim {dim}"
                    self.find(place, "dims", said(what, "dims", "give the dims one order"), operands[0])
        dims = tuple((names.get(label, ANY), axes) for label, axes in zip(op.output, at.dims, strict=True))
        self.give(result, Spec("", dims, at.unreduced), place)

    def end(self, result: Any = None) -> None:
        """What is never waited for."""
        for pending, place, line in self.pending:
            if pending.finish is not None:
                self.find(place, "never-waited", f"{line}\n  " + said("it is under way", "never-waited", "wait(x)"))
                pending.finish = None


def _memory(x: Tensor) -> tuple:
    return storage_of(x), x.storage_offset(), tuple(x.shape), x.stride()


def _first(x: Tensor) -> int:
    return int(x.storage_offset())


def _last(x: Tensor) -> int:
    return int(x.storage_offset()) + sum((int(n) - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True))


def _place() -> str:
    """file:line of the innermost call outside the machinery."""
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(ENGINE) and "/torch/" not in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


@contextmanager
def judged(values: "dict[str, Tensor] | None" = None) -> Iterator[Judgement]:
    """What runs inside is judged; `values`: the types of tensors that it begins with, {"In[B_X, D]": In, ...}."""
    report = Judgement()
    judge = _Judge(report)
    for text, x in (values or {}).items():
        judge.give(x, parse(text), _place())
    with _watching(judge):
        yield report


@contextmanager
def _watching(judge: _Judge) -> Iterator[None]:
    token = watcher.set(judge.typed_call)
    try:
        with judge:
            yield
    finally:
        watcher.reset(token)
        judge.end()


def judge(fn: Callable, *args: Any, mesh: Any, returns: Any = None) -> Judgement:
    """`fn(*args)` on an abstract mesh, judged. A text among `args` (dicts, lists and tuples are searched) becomes a
    float32 shard of that type, each dim of another size; `returns`: the types of its result."""
    report, sizes = Judgement(), {}
    judge = _Judge(report)
    every = 1
    for size in mesh_sizes(mesh).values():
        every *= size

    def shard(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        spec = parse(text)
        for dim in spec.dim_names:
            sizes.setdefault(dim, int(dim) if dim.isdigit() else every * (len(sizes) + 5))
        x = torch.empty(spec.local_shape([sizes[d] for d in spec.dim_names], mesh), device="meta")
        judge.give(x, spec, "the arguments")
        return x

    tree: Any = args
    given = optree.tree_map(shard, tree, none_is_leaf=True)
    with _watching(judge):
        try:
            result = fn(*given)
        except ShardingError as error:
            judge.find(_raised(error), "illegal-line", str(error))
            return report
    place = f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}" if hasattr(fn, "__code__") else repr(fn)
    report.result = optree.tree_map(judge.type_of, result, none_is_leaf=True)
    if returns is not None:
        wanted, structure = optree.tree_flatten(returns, none_is_leaf=True)
        found, ours = optree.tree_flatten(result, none_is_leaf=True)
        if structure != ours:
            judge.find(place, "result", said(f"it returns {ours}, not {structure}", "result", "return what it says"))
            return report
        for x, text in zip(found, wanted, strict=True):
            judge.compare(x, parse(text), place, f"result {text}")
    return report


def _raised(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ENGINE)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
