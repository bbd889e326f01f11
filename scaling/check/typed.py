"""The judge at typed lines: operands against what is known of them; a result has the type that its line says."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from scaling.check.compared import (
    ENGINE,
    OWN,
    PODS,
    at_hand,
    axes_named,
    broken_rule,
    dims_said,
    over_pods,
    place_of_call,
    without_axes,
)
from scaling.check.findings import Finding, Judgement, place_parts
from scaling.check.held import HeldType, Pieces, any_dim, axes_along, dims_of_view, look_up_over, of_nothing, pieces_of
from scaling.collectives.linear import Pending, run_op, watcher
from scaling.collectives.masks import zeroed
from scaling.collectives.multiply import einsum
from scaling.common.torch_private import is_wrapped, storage_of, unwrapped_by_all
from scaling.spec import Line, Spec, parse, parse_line

SAID = ("result ", "argument ", "forward returns", "backward returns")  # what is no line of the program's
BOOK = f"{OWN}/book/"  # a page's own tools, which compare arrays of whatever types


@dataclass
class HeldMemory:
    """What a storage holds: the type of `keep`, by whose sizes and strides; `unset`: nothing has been written yet."""

    keep: Tensor
    held: HeldType
    pieces: Pieces
    unset: bool = False


class TypedLines:
    """Knows the type of each array by its memory. Typed calls tell it what they are called with (`watcher`)."""

    write: Any  # of the mode

    def __init__(self, report: Judgement, sizes: "Mapping[str, int] | None" = None):
        self.report = report
        self.params: set[str] = set()
        self.memory: dict[int, HeldMemory] = {}
        self.twins: dict[int, tuple[Tensor, Tensor]] = {}  # of a CPU tensor its meta tensor
        self.pending: list[tuple[Pending, str, str]] = []
        self.quiet = 0
        self.ones: set[str] = set()  # axes that split a dim into parts of one element: no view shows which dim
        self.ran: set[Any] = set()  # the code of functions with types that were called
        self.apart: set[str] = set()  # axes along which ranks send to each other: each has its own part
        self.passed_on: set[str] = set()  # axes along which blocks are, to the next rank of a ring
        self.sizes: dict[str, int] = dict(sizes or {})

    def live(self, spec: Spec) -> Spec:
        """The type without the axes that the mesh lacks, or has of size 1."""
        return without_axes(spec, [axis for axis in axes_named(spec) if self.sizes and self.sizes.get(axis, 1) == 1])

    def held(self, x: Tensor) -> HeldType:
        x = unwrapped_by_all(x)
        known, shape = self.memory.get(storage_of(x)), tuple(x.shape)
        if known is None or known.unset:
            return of_nothing(shape)
        if 1 in shape and shape == tuple(known.keep.shape) and x.stride() == known.keep.stride():
            return known.held  # a dim of one element has no stride to be found by
        dims, known.pieces = dims_of_view(known.pieces, shape, x.stride())
        return known.held._replace(dims=dims)

    def give(self, x: Tensor, held: HeldType, unset: bool = False) -> None:
        x = unwrapped_by_all(x)
        shape = tuple(x.shape)
        if held.shape != shape:
            held = held._replace(dims=tuple(map(any_dim, shape)))
        self.memory[storage_of(x)] = HeldMemory(x, held, pieces_of(shape, x.stride(), held.dims), unset)

    def declare(self, x: Tensor, spec: Spec, place: str, parts: str = "") -> None:
        """x is what a line says: dims in front that the line has not are of vmap, or of stacked layers."""
        x, spec = unwrapped_by_all(x), self.live(spec)
        if x.dim() < len(spec.dims):
            return
        sizes = x.shape[x.dim() - len(spec.dims) :]
        self.ones |= {axis for n, (_, axes) in zip(sizes, spec.dims, strict=True) if n == 1 for axis in axes}
        dims = *self.held(x).dims[: x.dim() - len(spec.dims)], *dims_said(sizes, spec)
        self.give(x, HeldType(dims, frozenset(spec.unreduced), parts, "line", spec.name, place))

    def find(self, rule: str, text: str, made: str = "", place: str = "") -> None:
        text += f"\n  the value was made at {made}" if made else ""
        place = place or place_of_call()
        if place.startswith(BOOK):
            if rule != "partial-plus-whole":
                return
            place = place_of_call((*ENGINE, BOOK))  # partial sums beside a whole array: who gave them
        found = Finding(*place_parts(place), text, rule)
        if not self.quiet and found not in self.report.findings:
            self.report.findings.append(found)

    def skip(self, why: str, place: str = "") -> None:
        entry = place or place_of_call(), why
        if not self.quiet and not entry[0].startswith(BOOK) and entry not in self.report.unjudged:
            self.report.unjudged.append(entry)

    def reached(self, line: str = "") -> str:
        """The place of a typed call, which is reached."""
        place = place_of_call()
        self.report.reached |= {place_parts(place), ("", line)}
        return place

    def compare(self, held: HeldType, declared: Spec, line: str, by: str = "", place: str = "") -> None:
        """Whether what is held is what a line says of its operand."""
        declared = self.live(declared)
        if len(held.dims) < len(declared.dims):
            return
        self.report.judged += 1
        if held.unreduced is not None:
            gone = {*declared.unreduced} - held.unreduced
            own = self.apart & {*declared.unreduced}
            if own and (held.made not in ("line", "seed") or (by == "mean" and not held.parts)):
                held = held._replace(unreduced=held.unreduced | own, parts=held.parts or "sum", made="")
            elif gone and prod(self.sizes.get(axis, 1) for axis in gone) in held.shares:
                held = held._replace(unreduced=held.unreduced | gone)
        if (broken := broken_rule(held, declared, line, by, self.params, self.ones)) is not None:
            rule, text = broken
            rule = "result" if line.startswith(SAID) else rule
            self.find(rule, f"{line}\n  the operand is {held}: {text}", held.place, place)

    def in_pods(self, line: Line, operands: Sequence[HeldType]) -> Line:
        """A line that says nothing of pods runs in each of them: what is split or unreduced over P stays so."""
        specs = *line.operands, line.result
        if self.sizes.get(PODS, 1) == 1 or any(PODS in axes_named(spec) for spec in specs):
            return line
        split, partial = [], False
        for held, spec in zip(operands, line.operands, strict=False):
            dims = zip(held.dims[len(held.dims) - len(spec.dims) :], spec.dim_names, strict=False)
            split.append([name for dim, name in dims if PODS in (axes_along(dim) or ())])
            partial |= PODS in (held.unreduced or ())
        every = {name for names in split for name in names}
        inside = [
            over_pods(spec, names, PODS in (held.unreduced or ()))
            for held, spec, names in zip(operands, line.operands, split, strict=False)
        ]
        result = over_pods(line.result, every, partial or bool(every - {*line.result.dim_names}))
        return Line((*inside, *line.operands[len(inside) :]), result)

    # What typed calls tell.

    def called(self, code: Any, mesh: Any) -> None:
        """A function that says its types."""
        self.ran.add(code)
        self.sizes = dict(mesh.sizes) if mesh is not None else self.sizes

    def told(self, x: Any, spec: Spec, line: str, place: str) -> None:
        """What a docstring or a comment says of a value: of one that is made of no typed array, its type."""
        if isinstance(x, Pending):
            made = next((line for pending, _, line in self.pending if pending is x), "")
            x = parse_line(made).result if "->" in made else x
        elif isinstance(getattr(x, "type", None), Spec):
            x = x.type
        if isinstance(x, Spec):
            x = self.live(x)
            held = HeldType(dims_said([2] * len(x.dims), x), frozenset(x.unreduced), name=x.name)
            self.compare(held, spec, line, "", place)
        elif isinstance(x, Tensor):
            x, before = self.meta(x), len(self.report.findings)
            held = self.held(x)
            inside = self.in_pods(Line((spec,), spec), [held]).operands[0]
            if line.startswith(SAID):
                inside = Spec(spec.name, inside.dims, spec.unreduced)
            self.compare(held, inside, line, "", place)
            if len(held.dims) == len(spec.dims) and len(self.report.findings) == before:
                self.declare(x, inside, held.place or place, held.parts or "sum")

    def typed(self, x: Tensor, spec: Spec, where: str, mesh: Any) -> Tensor:
        """A shard of this type."""
        self.sizes = dict(mesh.sizes)
        self.declare(x, spec, place_of_call())
        if f'["{spec.name}"]' in where:
            self.params.add(spec.name)
        return self.meta(x)

    def masked(self, line: str, x: Any, mask: Any) -> Tensor:
        """What each device has of a sum: rows looked up in what is split over the sum's axes; of all else the values
        decide, and the type is taken at its word."""
        x, mask, spec, place = self.meta(x), self.meta(mask), parse(line), self.reached()
        held, axes = self.held(x), self.live(spec).unreduced
        if held.through != look_up_over(axes) or held.axes & {*axes}:
            self.skip("the mask decides, and the type is taken at its word", place)
        partial = None if held.unreduced is None else held.unreduced - {*spec.unreduced}
        whole = Spec(spec.name, spec.dims)
        self.compare(held._replace(unreduced=partial, through=""), whole, line, "", place)
        with self.silence():
            result = zeroed(x, mask)
        self.declare(result, spec, place, "sum")
        return result

    def ragged(self, line: str, x: Any) -> Tensor:
        """Rows that are sent by their values: as many are taken to come."""
        x, before, place = self.meta(x), parse_line(line).operands[0], self.reached()
        self.skip("rows are sent by their values; which, the line is taken at its word", place)
        row = before.dims[len(before.dims) - x.dim() + 1 :]
        self.compare(self.held(x), Spec(before.name, row, before.unreduced), line, "", place)
        return x.index_select(0, torch.arange(len(x), device=x.device))

    def resharded(self, result: Tensor, spec: Spec, axes: Sequence[str]) -> Tensor:
        """A planner's step that is no line."""
        self.apart |= set(axes)
        self.declare(result, spec, self.reached(), "sum" if spec.unreduced else "")
        return result

    def transferred(self, line: Line, x: Tensor, source: Any, target: Any, into: Any) -> Tensor:
        """On ranks of its own mesh, seen from one that gives and takes."""
        before, after, place = line.operands[0], line.result, self.reached()
        self.sizes = dict(source.sizes)
        self.compare(self.held(self.meta(x)), before, str(line), "", place)
        whole = [n * source.size(axes) for n, (_, axes) in zip(x.shape, before.dims, strict=True)]
        self.sizes = dict(target.sizes)
        with self.silence():
            result = torch.empty(after.local_shape(into or whole, target), dtype=x.dtype, device="meta")
        self.declare(result, after, place)
        return result

    def call(self, call: Callable, what: tuple, x: Any, mesh: Any, *options: Any) -> Any:
        """A collective, before it is known how it runs."""
        place, self.sizes = self.reached(), dict(mesh.sizes)
        result = call(what, self.meta(x), mesh, *options)
        if isinstance(result, Pending):
            self.pending.append((result, place, what[1]))
        return result

    def collective(self, x: Tensor, op: Any) -> Tensor:
        typed, place, held = parse_line(op.line), self.reached(), self.held(x)
        declared, ring = typed.operands[0], op.kind == "CollectivePermute"
        if ring:  # it is the block at hand, or the sums so far of one
            self.passed_on |= set(op.axes)
            held, declared = at_hand(held, op.axes, True), without_axes(declared, op.axes)
            self.give(x, held)
        line = self.in_pods(Line((declared,), typed.result), [held])
        by = op.by if op.kind in ("AllReduce", "ReduceScatter", "Reduce") else ""
        self.compare(held, line.operands[0], op.line, by, place)
        with self.silence():
            result = run_op(x, op)
        self.declare(result, line.result, place, "root" if op.kind in ("Gather", "Reduce") else held.parts)
        if ring:
            self.give(result, at_hand(self.held(result), op.axes)._replace(made="ring"))
        return result

    def product(self, text: str, a: Any, b: Any, out: "Tensor | None", add: bool) -> Tensor:
        a, b, place = self.meta(a), self.meta(b), self.reached(text)
        given = [self.held(x) for x in (a, b) if isinstance(x, Tensor)]
        line = self.in_pods(parse_line(text), given)
        for held, declared in zip(given, line.operands, strict=False):
            self.compare(held, declared, text, "", place)
        with self.silence():
            result = einsum(text, a, b, out=out, add=add)
        spec = self.live(line.result)
        if result.dim() != len(spec.dims):
            return result
        parts = "sum" if spec.unreduced else ""
        made = HeldType(dims_said(result.shape, spec), frozenset(spec.unreduced), parts, "line", spec.name, place)
        if out is None:
            self.give(result, made)
        else:
            self.write(out, made, add)
        return result

    @contextmanager
    def silence(self) -> Iterator[None]:
        token = watcher.set(None)
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1
            watcher.reset(token)

    def meta(self, x: Any) -> Any:
        """A CPU tensor's twin on the meta device, where a line of an abstract mesh meets it."""
        if not isinstance(x, Tensor) or is_wrapped(x):
            return x
        with self.silence():
            return self.twin(x)

    def twin(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return x
        kept = self.twins.get(id(x))
        if kept is None or kept[1].shape != x.shape:
            other = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            self.give(other, self.held(x))
            kept = self.twins[id(x)] = x, other
        return kept[1]
