"""The judge at typed lines: operands against what is known of them; a result has the type that its line says."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from scaling.check.compared import (
    OWN,
    PODS,
    at_hand,
    axes_in,
    broken_rule,
    dim_part,
    not_whole,
    place_of_call,
    type_without,
    unwrapped_by_all,
    without_pods,
)
from scaling.check.findings import Finding, Judgement, place_parts
from scaling.check.held import DimPart, HeldMemory, HeldType, axes_along, name_along
from scaling.check.ops import of_nothing
from scaling.collectives.linear import Pending, run_op, watcher
from scaling.collectives.masks import zeroed
from scaling.collectives.multiply import einsum
from scaling.common.torch_private import is_wrapped, storage_of
from scaling.spec import Spec, parse, parse_line

SAID = ("result ", "argument ", "forward returns", "backward returns")  # what is no line of the program's
BOOK = f"{OWN}/book/"  # a page's own tools, which compare arrays of whatever types


class TypedLines:
    """Knows the type of each array by its memory."""

    judging: Any  # of the mode, which also writes
    write: Any

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
        self.sizes: dict[str, int] = dict(sizes or {})

    def live(self, spec: Spec) -> Spec:
        """The type without the axes that the mesh lacks, or has of size 1."""
        if not self.sizes:
            return spec
        on = lambda axes: tuple(axis for axis in axes if self.sizes.get(axis, 1) > 1)  # noqa: E731
        return Spec(spec.name, tuple((dim, on(axes)) for dim, axes in spec.dims), on(spec.unreduced))

    def held(self, x: Tensor) -> HeldType:
        known = self.memory.get(storage_of(x))
        return of_nothing(x.shape) if known is None or known.unset else known.view(x.shape, x.stride())

    def give(self, x: Tensor, held: HeldType, unset: bool = False) -> None:
        self.memory[storage_of(x)] = HeldMemory.of(x.shape, x.stride(), held, unset=unset, keep=x)

    def declare(self, x: Any, spec: Spec, place: str, parts: str = "") -> None:
        """x is what a line says: dims in front that the line has not are of vmap, or of stacked layers."""
        x, spec = unwrapped_by_all(x), self.live(spec)
        extra = x.dim() - len(spec.dims)
        if extra < 0:
            return
        own = self.held(x).dims[:extra]
        sizes = x.shape[extra:]
        self.ones |= {axis for n, (_, axes) in zip(sizes, spec.dims, strict=True) if n == 1 for axis in axes}
        dims = tuple((dim_part(n, dim, axes),) for n, (dim, axes) in zip(sizes, spec.dims, strict=True))
        self.give(x, HeldType((*own, *dims), frozenset(spec.unreduced), parts, "line", spec.name, place))

    def find(self, rule: str, text: str, made: str = "", place: str = "") -> None:
        text += f"\n  the value was made at {made}" if made else ""
        found = Finding(*place_parts(place or place_of_call()), text, rule)
        if not self.quiet and not found.place.startswith(BOOK) and found not in self.report.findings:
            self.report.findings.append(found)

    def skip(self, why: str, place: str = "") -> None:
        entry = place or place_of_call(), why
        if not self.quiet and entry not in self.report.unjudged:
            self.report.unjudged.append(entry)

    def compare(self, x: Any, declared: Spec, line: str, by: str = "sum", place: str = "") -> None:
        """Whether x is what a line says of its operand."""
        if not isinstance(x, Tensor) or unwrapped_by_all(x).dim() < len(declared.dims):
            return
        x, declared = unwrapped_by_all(self.meta(x)), self.live(declared)
        held = self.held(x)
        self.report.judged += 1
        if self.sizes.get(PODS, 1) > 1 and PODS not in {*axes_in(line), *declared.axes, *declared.unreduced}:
            held = replace(
                at_hand(held, (PODS,), "drop"),
                unreduced=held.unreduced if line.startswith(SAID) else without_pods(held),
            )
        if by == "mean" and self.apart & {*declared.unreduced} and not held.parts:
            held = replace(held, unreduced=frozenset(declared.unreduced), parts="sum", made="")
        if (
            held.unreduced is not None
            and (apart := self.apart & {*declared.unreduced} - held.unreduced)
            and held.made not in ("line", "seed")
        ):
            held = replace(held, unreduced=held.unreduced | apart, parts=held.parts or "sum", made="")
        gone = {*declared.unreduced} - held.unreduced if held.unreduced is not None else set()
        if gone and held.unreduced is not None and prod(self.sizes.get(axis, 1) for axis in gone) in held.shares:
            held = replace(held, unreduced=held.unreduced | gone)
        self.judge_held(held, declared, line, by, place)

    def judge_held(self, held: HeldType, declared: Spec, line: str, by: str, place: str) -> None:
        names = {*re.split(r"[^A-Za-z0-9]+", line.replace("_", " "))}
        if (broken := broken_rule(held, declared, by, self.params, names, self.ones)) is not None:
            rule, text = broken
            rule = "result" if line.startswith(SAID) else rule
            self.find(rule, f"{line}\n  the operand is {held}: {text}", held.place, place)

    def typed_call(self, call: Callable, *args, **kwargs) -> Any:
        if call != "said":
            self.report.reached.add(place_parts(place_of_call()))
        if call is run_op:
            return self.collective(*args)
        if call is einsum:
            self.report.reached.add(("", args[0]))
            return self.product(*args, **kwargs)
        if call == "typed":
            x, spec, where, mesh = args
            self.sizes = dict(mesh.sizes)
            self.declare(x, spec, place_of_call())
            if f'["{spec.name}"]' in where:
                self.params.add(spec.name)
            return self.meta(x)
        if call == "masked":
            line, x, mask = args
            x, mask = self.meta(x), self.meta(mask)
            spec = parse(line)
            self.skip(f"{line}: the mask decides, and the type is taken at its word")
            with self.silence():
                result = zeroed(x, mask)
            self.declare(result, spec, place_of_call(), "sum")
            return result
        if call == "called":
            self.ran.add(args[0])
            self.sizes = dict(args[1].sizes) if args[1] is not None else self.sizes
            return None
        if call == "said":
            return self.said(*args)
        if call == "apart":
            self.apart |= set(args)
            return None
        if call == "reshard":
            result, spec, axes = args
            self.apart |= set(axes)
            self.declare(result, spec, place_of_call(), "sum" if spec.unreduced else "")
            return result
        if call == "transfer":
            return self.transferred(*args)
        if call == "ragged":
            line, x = args
            x = self.meta(x)
            self.skip(f"{line}: rows are sent by their values; the result is taken to be as it says")
            return x.index_select(0, torch.arange(len(x), device=x.device))
        what, x, mesh, *rest = args
        self.sizes = dict(mesh.sizes)
        result = call(what, self.meta(x), mesh, *rest)
        if isinstance(result, Pending):
            self.pending.append((result, place_of_call(), what[1]))
        return result

    def transferred(self, line: Any, x: Tensor, source: Any, target: Any, into: Any) -> Tensor:
        """On ranks of its own mesh, seen from one that gives and takes."""
        before, after = line.operands[0], line.result
        self.sizes = dict(source.sizes)
        self.compare(x, before, str(line))
        whole = [n * source.size(axes) for n, (_, axes) in zip(x.shape, before.dims, strict=True)]
        self.sizes = dict(target.sizes)
        with self.silence():
            result = torch.empty(after.local_shape(into or whole, target), dtype=x.dtype, device="meta")
        self.declare(result, after, place_of_call())
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

    def said(self, x: Any, spec: Spec, line: str, place: str) -> None:
        """What a docstring or a comment says of a value: of one that is made of no typed array, its type."""
        if isinstance(x, Pending):
            made = next((line for pending, _, line in self.pending if pending is x), "")
            x = parse_line(made).result if "->" in made else x
        elif hasattr(x, "type") and isinstance(x.type, Spec):
            x = x.type
        if isinstance(x, Spec):
            dims = tuple((DimPart(2, dim, axes),) for dim, axes in self.live(x).dims)
            held = HeldType(dims, frozenset(self.live(x).unreduced), name=x.name)
            self.judge_held(held, self.live(spec), line, "", place)
        elif isinstance(x, Tensor) and unwrapped_by_all(x).dim() >= len(spec.dims):
            known = self.held(unwrapped_by_all(self.meta(x)))
            before = len(self.report.findings)
            self.compare(x, spec, line, "", place)
            pods = self.sizes.get(PODS, 1) > 1 and PODS in known.axes - {*self.live(spec).axes}
            if unwrapped_by_all(x).dim() == len(spec.dims) and len(self.report.findings) == before and not pods:
                self.declare(self.meta(x), spec, known.place or place, known.parts or "sum")

    def collective(self, x: Tensor, op: Any) -> Tensor:
        typed = parse_line(op.line)
        declared, place, by = typed.operands[0], place_of_call(), ""
        if op.kind in ("AllReduce", "ReduceScatter", "Reduce"):
            by = op.by
        held = self.held(unwrapped_by_all(x))
        if op.kind == "CollectivePermute":  # along a ring it is the block at hand, or the sums so far of one
            self.give(unwrapped_by_all(x), at_hand(not_whole(held), op.axes))
        if op.kind == "CollectivePermute":
            self.compare(x, type_without(declared, op.axes), op.line, by, place)
        else:
            self.compare(x, declared, op.line, by, place)
        with self.silence():
            result = run_op(x, op)
        parts = "root" if op.kind in ("Gather", "Reduce") else held.parts
        self.declare(result, typed.result, place, parts)
        y = unwrapped_by_all(result)
        self.give(y, self.inside_pods(self.held(y), [(held, declared)], op.line))
        if op.kind == "CollectivePermute":
            self.give(
                unwrapped_by_all(result), replace(at_hand(self.held(unwrapped_by_all(result)), op.axes), made="ring")
            )
        return result

    def inside_pods(self, made: HeldType, operands: list[tuple[HeldType, Spec]], line: str) -> HeldType:
        """A line that says nothing of pods runs in each of them: what is split over P stays so."""
        if self.sizes.get(PODS, 1) == 1 or PODS in axes_in(line):
            return made
        over = set()
        for held, spec in operands:
            pairs = zip(held.dims[-len(spec.dims) :], spec.dim_names, strict=False)
            over |= {name for dim, name in pairs if PODS in (axes_along(dim) or ())}
        partial = any(PODS in (held.unreduced or ()) for held, _ in operands)
        dims = tuple(
            (dim[0]._replace(axes=(PODS, *(dim[0].axes or ()))), *dim[1:]) if name_along(dim) in over else dim
            for dim in made.dims
        )
        if over - {name_along(dim) for dim in made.dims} or partial:
            made = replace(made, unreduced=(made.unreduced or frozenset()) | {PODS}, parts=made.parts or "sum")
        return replace(made, dims=dims)

    def product(self, line: str, a: Any, b: Any, *, out=None, add=False) -> Tensor:
        a, b, place = self.meta(a), self.meta(b), place_of_call()
        typed = parse_line(line)
        for x, declared in zip([x for x in (a, b) if x is not None], typed.operands, strict=False):
            self.compare(x, declared, line, "", place)
        with self.silence():
            result = einsum(line, a, b, out=out, add=add)
        x, spec = unwrapped_by_all(result), self.live(typed.result)
        if x.dim() != len(spec.dims):
            return result
        dims = tuple((dim_part(n, dim, axes),) for n, (dim, axes) in zip(x.shape, spec.dims, strict=True))
        parts = "sum" if spec.unreduced else ""
        made = HeldType(dims, frozenset(spec.unreduced), parts, "line", spec.name, place)
        given = [
            (self.held(unwrapped_by_all(y)), s) for y, s in zip((a, b), typed.operands, strict=False) if y is not None
        ]
        made = self.inside_pods(made, given, line)
        if out is None:
            self.give(x, made)
        else:
            with self.judging(place):
                self.write(unwrapped_by_all(out), made, add)
        return result

    def meta(self, x: Any) -> Any:
        """A CPU tensor's twin on the meta device, where a line of an abstract mesh meets it."""
        if not isinstance(x, Tensor) or is_wrapped(x) or x.is_meta:
            return x
        with self.silence():
            return self.twin(x)

    def twin(self, x: Tensor) -> Tensor:
        kept = self.twins.get(id(x))
        if kept is None or kept[1].shape != x.shape:
            other = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            self.give(other, self.held(x))
            kept = self.twins[id(x)] = x, other
        return kept[1]
