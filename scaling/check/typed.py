"""The judge at typed lines: an operand is compared with its declared type, and a result gets its declared type."""

from collections.abc import Callable, Mapping, Sequence, Set
from math import prod
from typing import Any

import torch
from torch import Tensor

from scaling.check.findings import Judgement, fault_text, place_of_call, place_parts
from scaling.check.held import (
    LOOK_UP,
    PODS,
    HeldType,
    axes_along,
    broken_rule,
    dims_of_type,
    is_interleaved,
    look_up_over,
    ring_block,
    with_slices,
    with_unknown,
)
from scaling.check.known import KnownArrays
from scaling.collectives.calls import zeroed
from scaling.collectives.linear import Pending, run_op
from scaling.collectives.multiply import Deferred, einsum
from scaling.spec import Line, Spec, parse, parse_line, refuse

SAID = "result ", "argument ", "forward returns", "backward returns", "update returns"  # not a line of the program


def check_abstract(what: str, mesh: Any) -> None:
    """Raise ShardingError if the mesh moves data."""
    if (device := getattr(mesh, "device", None)) is not None and device.type != "meta":
        rule = "the judge runs a program on an AbstractMesh, where arrays have types and shapes and no data"
        refuse(f"{what} on {mesh}", f"its ranks are on {device}", rule, f"take AbstractMesh({mesh.sizes})")


class TypedLines(KnownArrays):
    """The part of the judge that typed calls report their operands to (`collectives.linear.who_watches`)."""

    write: Any  # defined by the mode

    def __init__(self, report: Judgement, sizes: "Mapping[str, int] | None" = None):
        super().__init__(report, sizes)
        self.params: set[str] = set()
        self.pending: list[tuple[Pending, str, str]] = []  # with their places and lines
        self.deferred: dict[int, tuple[Deferred, str, str]] = {}  # by id: the product, its place, the line shown
        self.ran: set[Any] = set()  # the code of the typed functions that were called
        self.messaged: set[str] = set()  # axes along which ranks send to each other, each having its own part
        self.passed_on: set[str] = set()  # axes along which blocks are passed to the next rank of a ring

    def reached(self) -> str:
        """Note that the running typed call was reached; return its place."""
        place = place_of_call()
        self.report.reached.add(place_parts(place))
        return place

    def compare(self, held: HeldType, declared: Spec, line: str, by: str = "", place: str = "") -> None:
        """Report an array that differs from the type that a line declares for it."""
        declared = self.live(declared)
        if len(held.dims) < len(declared.dims):
            return
        self.report.judged += 1
        if held.unreduced is not None:
            missing = {*declared.unreduced} - held.unreduced
            own = self.messaged & {*declared.unreduced}
            if own and (held.made not in ("line", "seed") or (by == "mean" and not held.parts)):
                held = held._replace(unreduced=held.unreduced | own, parts=held.parts or "sum", made="")
            elif missing and self.is_share(held, missing):
                held = held._replace(unreduced=held.unreduced | missing)
        if (broken := broken_rule(held, declared, line, by, self.params, self.ones)) is not None:
            rule, text = broken
            rule = "result" if line.startswith(SAID) else rule
            self.find(rule, f"{line}\n  the operand is {held}: {text}", held.place, place)
        elif held.through.startswith(LOOK_UP) and held.unreduced is None:
            self.skip("which rows are taken depends on their numbers, so the line's type is believed", place)

    def unseen(self, held: HeldType) -> Set[str]:
        """Return the axes over which an array may be a sum: no view shows that a dim of one element was summed over."""
        return self.ones if held.made not in ("line", "seed") else frozenset()

    def is_share(self, held: HeldType, axes: Set[str]) -> bool:
        """Return whether an array was divided by the number of devices along these axes, which add their shares."""
        return any(prod(map(self.size, some)) in held.shares for some in (axes, axes - self.unseen(held)))

    def in_slices(self, line: Line, operands: Sequence[HeldType], every_axis: bool = False) -> Line:
        """Return a line as each slice of the mesh runs it, along axes that it does not name.

        Each of these axes, the pods or all, is added where an array is split or unreduced over it, as the major one.
        """
        named = {axis for spec in (*line.operands, line.result) for axis in spec.named_axes}
        for axis in reversed([*(self.sizes or ())] if every_axis else [PODS]):
            if self.size(axis) > 1 and axis not in named:
                line = self._in_slice(line, operands, axis)
        return line

    def _in_slice(self, line: Line, operands: Sequence[HeldType], axis: str) -> Line:
        split, partial = [], False
        for held, spec in zip(operands, line.operands, strict=False):
            dims = zip(held.dims[len(held.dims) - len(spec.dims) :], spec.dim_names, strict=False)
            split.append([name for dim, name in dims if axis in (axes_along(dim) or ())])
            partial |= axis in (held.unreduced or ())
        every = {name for names in split for name in names}
        inside = [
            with_slices(spec, axis, names, axis in (held.unreduced or ()))
            for held, spec, names in zip(operands, line.operands, split, strict=False)
        ]
        result = with_slices(line.result, axis, every, partial or bool(every - {*line.result.dim_names}))
        return Line((*inside, *line.operands[len(inside) :]), result)

    # The reports of typed calls.

    def called(self, code: Any, mesh: Any) -> None:
        """Note that a function whose docstring declares types was called."""
        self.ran.add(code)
        self.sizes = dict(mesh.sizes) if mesh is not None else self.sizes

    def check_declared(self, x: Any, spec: Spec, line: str, place: str, sliced: bool = False) -> None:
        """Compare a value with the type that a docstring or comment declares; an untyped value gets this type.

        `sliced` says whether it is the type of a slice of the mesh (`mesh.sliced`).
        """
        if isinstance(x, Pending):
            made = next((line for pending, _, line in self.pending if pending is x), "")
            x = parse_line(made).result if "->" in made else x
        elif isinstance(getattr(x, "type", None), Spec):
            x = x.type
        if isinstance(x, Spec):
            x = self.live(x)
            held = HeldType(dims_of_type([2] * len(x.dims), x), frozenset(x.unreduced), name=x.name)
            self.compare(held, spec, line, "", place)
        elif isinstance(x, Tensor):
            x, before = self.meta(x), len(self.report.findings)
            held = self.held(x)
            inside = self.in_slices(Line((spec,), spec), [held], sliced).operands[0]
            if line.startswith(SAID):
                inside = Spec(spec.name, inside.dims, spec.unreduced)
            self.compare(held, inside, line, "", place)
            if len(held.dims) == len(spec.dims) and len(self.report.findings) == before:
                self.declare(x, inside, held.place or place, held.parts or "sum")

    def typed(self, x: Tensor, spec: Spec, where: str, mesh: Any) -> Tensor:
        """Note that x is a shard of this type, and return it, or its twin on the meta device."""
        self.sizes = dict(mesh.sizes)
        self.declare(x, spec, place_of_call())
        if f'["{spec.name}"]' in where:
            self.params.add(spec.name)
        return self.meta(x)

    def dropped(self, line: str, x: Any, mesh: Any) -> Any:
        """Judge and return the operand of a line that sends nothing on this mesh, which lacks the axes it moves."""
        place, self.sizes = self.reached(), dict(mesh.sizes)
        spec, x = parse_line(line).operands[0] if "->" in line else parse(line), self.meta(x)
        if isinstance(x, Tensor):  # not an array with scales
            self.compare(self.held(x), spec, line, "", place)
            if self.held(x).is_untyped:
                self.declare(x, spec, place)
        return x

    def masked(self, line: str, x: Any, mask: Any, mesh: Any) -> Tensor:
        """Return x where the mask is true, and zeros elsewhere: each device's term of a sum.

        The type is certain for rows looked up in an array that is split over the sum's axes. Otherwise it depends on
        values, so the type that the line gives is taken to be right.
        """
        self.sizes = dict(mesh.sizes)
        x, mask, spec, place = self.meta(x), self.meta(mask), parse(line), self.reached()
        held, axes = self.held(x), self.live(spec).unreduced
        if held.through != look_up_over(axes) or held.axes & {*axes}:
            self.skip("what the mask leaves depends on values, so the line's type is believed", place)
        partial = None if held.unreduced is None else held.unreduced - {*spec.unreduced}
        whole = Spec(spec.name, spec.dims)
        self.compare(held._replace(unreduced=partial, through=""), whole, line, "", place)
        with self.silence():
            result = zeroed(x, mask)
        self.declare(result, spec, place, "sum")
        return result

    def own_part(self, x: Any, axis: str) -> None:
        """Note that x is each rank's own part along an axis: its program passes on what other parts need of it."""
        if isinstance(x, Tensor):
            self.give(x, ring_block(self.held(x), axis, True)._replace(unreduced=self.held(x).unreduced))

    def message(self, kind: str, spec: Spec, x: Any, axis: str) -> None:
        """Judge a message along an axis."""
        self.messaged.add(axis)
        place = self.reached()
        if kind == "Send":
            self.compare(self.held(self.meta(x)), spec, f"send {spec}", "", place)

    def receive(self, buffer: Tensor, spec: Spec) -> None:
        """Declare the type of an array that another rank sends."""
        self.declare(buffer, spec, place_of_call(), "sum" if spec.unreduced else "")

    def ragged(self, line: str, x: Any) -> Tensor:
        """Return as many rows as are sent, since the number that arrives depends on values."""
        x, before, place = self.meta(x), parse_line(line).operands[0], self.reached()
        self.skip("which rows are sent depends on their values, so the line's type is believed", place)
        row = before.dims[len(before.dims) - x.dim() + 1 :]
        self.compare(self.held(x), Spec(before.name, row, before.unreduced), line, "", place)
        return x.index_select(0, torch.arange(len(x), device=x.device))

    def resharded(self, result: Tensor, spec: Spec, axes: Sequence[str]) -> Tensor:
        """Declare the result of a planner's step that has no line."""
        self.messaged |= set(axes)
        self.declare(result, spec, self.reached(), "sum" if spec.unreduced else "")
        return result

    def transferred(self, line: Line, x: Tensor, source: Any, target: Any, into: Any) -> Tensor:
        """Judge a transfer between two meshes, as a rank sees it that both sends and receives."""
        before, after, place = line.operands[0], line.result, self.reached()
        self.sizes = dict(source.sizes)
        self.compare(self.held(self.meta(x)), before, str(line), "", place)
        whole = [n * source.size(axes) for n, (_, axes) in zip(x.shape, before.dims, strict=True)]
        self.sizes = dict(target.sizes)
        with self.silence():
            result = torch.empty(after.local_shape(into or whole, target), dtype=x.dtype, device="meta")
        self.declare(result, after, place)
        return result

    def call(self, call: Callable, key: tuple, x: Any, mesh: Any, *options: Any) -> Any:
        """Run a collective on the meta device, and note its result if it is pending."""
        _, line, *_ = key
        check_abstract(line, mesh)
        place, self.sizes = self.reached(), dict(mesh.sizes)
        result = call(key, self.meta(x), mesh, *options)
        if isinstance(result, Pending):
            self.pending.append((result, self.shown_at(place), line))
        return result

    def collective(self, x: Tensor, op: Any) -> Tensor:
        """Judge a collective, run it, and declare its result."""
        typed, place, held = parse_line(op.line), self.reached(), self.held(x)
        declared, ring = typed.operands[0], op.kind == "CollectivePermute"
        if ring:  # x is a block that a ring passes on, or the ring's sum so far
            self.passed_on |= set(op.axes)
            held, declared = ring_block(held, op.axes, True), declared.without(op.axes)
            self.give(x, held)
        line = self.in_slices(Line((declared,), typed.result), [held], op.sliced)
        if op.kind in ("Broadcast", "Scatter") and held.unreduced is not None:  # only the root's part counts
            held = held._replace(unreduced=held.unreduced | {*op.axes}, parts="root")
        by = op.by if op.kind in ("AllReduce", "ReduceScatter", "Reduce") else ""
        self.compare(held, line.operands[0], op.line, by, place)
        self.check_blocks(held, line, op.line, place)
        with self.silence():
            result = run_op(x, op)
        self.declare(result, line.result, place, "root" if op.kind in ("Gather", "Reduce") else held.parts)
        if op.sliced:
            self.give(result, with_unknown(self.held(result), held, line))
        if ring:
            self.give(result, ring_block(self.held(result), op.axes, True)._replace(made="ring"))
        if op.kind in ("Gather", "Reduce") and op.at_root:  # for the root it is whole, for a sum it is one term
            self.give(result, self.held(result)._replace(unreduced=None))
        return result

    def check_blocks(self, held: HeldType, line: Line, text: str, place: str) -> None:
        """Report a collective that moves the interleaved blocks of a merged dim."""
        dims = held.dims[len(held.dims) - len(line.result.dims) :]
        for dim, (name, was), (_, now) in zip(dims, line.operands[0].dims, line.result.dims, strict=False):
            if was != now and is_interleaved(dim):
                what = f"{name} was merged or joined of dims of which a later one is split: its blocks are interleaved"
                text += "\n  " + fault_text(what, "split", "move the axes before that")
                self.find("split", text, held.place, place)

    def parts(
        self, line: str, mesh: Any, xs: Sequence, specs: Sequence[Spec], results: Sequence[Spec], run: Callable
    ) -> Sequence:
        """Judge a line on values and scales: compare each part with its type, run, and declare the results' parts."""
        self.sizes = self.sizes if mesh is None else dict(mesh.sizes)
        place, xs = self.reached(), [self.meta(x) for x in xs]
        before = len(self.report.findings)
        for x, spec in zip(xs, specs, strict=True):
            if len(self.report.findings) == before:  # a wrong line is wrong for values and scales
                self.compare(self.held(x), spec, line, "", place)
        with self.silence():
            found = run(*xs)
        for x, spec in zip(found, results, strict=True):
            self.declare(x, self.live(spec), place, "sum" if spec.unreduced else "")
        return found

    def defer(self, product: Deferred) -> Deferred:
        """Note a product that is computed when it is waited for; a fault belongs to the line that deferred it."""
        place = self.reached()
        self.deferred[id(product)] = product, place, self.shown_at(place)
        return product

    def join(self, products: Sequence[Deferred], joined: Deferred) -> Deferred:
        """Note that deferred products became one."""
        known = [self.deferred.pop(id(product)) for product in products if id(product) in self.deferred]
        if known:
            self.deferred[id(joined)] = joined, *known[0][1:]
        return joined

    def product(
        self, text: str, a: Any, b: Any, out: "Tensor | None", add: bool, deferred: "Deferred | None" = None
    ) -> Tensor:
        """Judge a product, and return its result."""
        known = self.deferred.pop(id(deferred), None)
        a, b, place = self.meta(a), self.meta(b), known[1] if known else self.reached()
        given = [self.held(x) for x in (a, b) if isinstance(x, Tensor)]
        line = self.in_slices(parse_line(text), given)
        for held, declared in zip(given, line.operands, strict=False):
            self.compare(held, declared, text, "", place)
        with self.silence():
            result = einsum(text, a, b, out=out, add=add)
        spec = self.live(line.result)
        if result.dim() != len(spec.dims):
            return result
        parts = "sum" if spec.unreduced else ""
        made = HeldType(dims_of_type(result.shape, spec), frozenset(spec.unreduced), parts, "line", spec.name, place)
        if out is None:
            self.give(result, made)
        else:
            self.write(out, made, add)
        self.params.discard(spec.name)  # the result of a line is not a param: In and Out in a tree of all arrays
        return result
