"""Steps and plans: the lines of an algorithm on typed arrays, and the cost of each line (Part 3).

A `Step` is one collective or one local product with its types before and after; a `Plan` is a list of them. They are
data: planned by `scaling.algebra`, counted here, run by `scaling.collectives.plans`. Pure Python.

| op                | example                                | bytes V (the book's)  | sent by each device, n = group |
|-------------------|----------------------------------------|-----------------------|--------------------------------|
| AllGather         | A[I_X, J] -> A[I, J]                   | local, after          | V (n-1)/n                      |
| ReduceScatter     | A[I, J] {U_X} -> A[I_X, J]             | local, before         | V (n-1)/n                      |
| AllReduce         | A[I, J] {U_X} -> A[I, J]               | local                 | 2 V (n-1)/n                    |
| AllToAll          | A[I_X, J] -> A[I, J_X]                 | local times n         | V (n-1)/n^2                    |
| CollectivePermute | A[I_XY] -> A[I_YX]                     | local                 | V                              |
| Slice             | A[I, J] -> A[I_X, J]                   | 0: keeps its own block of a replicated array           |
| Pad               | A[I_X, J] -> A[I, J] {U_X}             | 0: its own block among zeros; the transpose of Slice   |
| Mask              | A[I, J] -> A[I, J] {U_X}               | 0: the first device of X keeps the data, others zeros  |
| Einsum            | A[I, J_X] * B[J_X, K] -> C[I, K] {U_X} | 0                     | 0                              |
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scaling.spec import Spec, block_index, dtype_bytes, format_axes, mesh_sizes

COLLECTIVES = ("AllGather", "ReduceScatter", "AllReduce", "AllToAll", "CollectivePermute")
FREE = ("Slice", "Pad", "Mask")


@dataclass(frozen=True)
class Step:
    """One line of an algorithm: `op` over the mesh `axes`, from the type(s) `before` to the type `after`.

    `before` is a Spec, and a tuple of two Specs for an Einsum. A derived program also has lines that only name an
    array, `Loss[B_X] = ...`: op "Loss" or "Cotangent". In a program `when` marks a line as "critical" (the layer's
    output waits for it), "ahead" (it does not wait for the layer's input, so it can run ahead of time) or "async" (the
    layer's output does not wait for it). It is "" outside programs, and does not count in comparisons.
    """

    op: str
    axes: tuple[str, ...]
    before: "Spec | tuple[Spec, ...]"
    after: Spec
    when: str = field(default="", compare=False)

    @property
    def operands(self) -> tuple[Spec, ...]:
        """The types before the step, as a tuple."""
        return self.before if isinstance(self.before, tuple) else (self.before,)

    @property
    def contracted(self) -> tuple[str, ...]:
        """The dims that an Einsum sums over, which its operands have and its result lacks."""
        dims = dict.fromkeys(dim for spec in self.operands for dim in spec.dim_names)
        return tuple(dim for dim in dims if dim not in self.after.dim_names) if self.op == "Einsum" else ()

    @property
    def line(self) -> str:
        """The types as `scaling.collectives` takes them: `A[I_X, J] -> A[I, J]`, `A[I, J] * B[J, K] -> C[I, K]`."""
        return " * ".join(map(str, self.operands)) + f" -> {self.after}"

    def __str__(self) -> str:
        """Return the book's line: `W[D, F] = AllGather_X(W[D_X, F])`, `C[I, K] = A[I, J] *_J B[J, K]`."""
        if self.op == "Einsum":
            dims = self.contracted
            over = "" if not dims else "_" + (dims[0] if len(dims) == 1 else "{" + ",".join(dims) + "}")
            return f"{self.after} = " + f" *{over} ".join(map(str, self.operands))
        if self.op in ("Loss", "Cotangent"):
            return f"{self.after} = ..."
        return f"{self.after} = {self.op}_{format_axes(self.axes)}({self.before})"

    def group(self, mesh) -> int:
        """Return the number of devices that take part together, the product of the sizes of the step's axes."""
        return math.prod(mesh_sizes(mesh)[axis] for axis in self.axes)

    def nbytes(self, sizes, mesh, dtype) -> float:
        """Return V, the bytes by the book's measure (see the table above); 0 for a step that does not communicate."""
        if self.op not in COLLECTIVES:
            return 0
        local = (self.after if self.op == "AllGather" else self.operands[0]).nbytes(sizes, mesh, dtype_bytes(dtype))
        return local * self.group(mesh) if self.op == "AllToAll" else local

    def gather_bytes(self, sizes, mesh, dtype) -> float:
        """Return V in AllGathers of equal cost: an AllReduce counts twice, as a ReduceScatter and an AllGather."""
        return self.nbytes(sizes, mesh, dtype) * (2 if self.op == "AllReduce" else 1)

    def wire_bytes(self, sizes, mesh, dtype) -> float:
        """Return the bytes that each device sends (in a permutation, that the busiest one sends)."""
        if self.op not in COLLECTIVES or (self.op == "CollectivePermute" and self.stays(mesh)):
            return 0
        sent, of = sent_share(self.op, self.group(mesh))
        return self.operands[0].nbytes(sizes, mesh, dtype_bytes(dtype)) * sent / of

    def stays(self, mesh) -> bool:
        """Return whether every device already holds the block it needs, since only axes of size 1 change positions."""
        sizes = mesh_sizes(mesh)
        before, after = ([axes for _, axes in spec.dims] for spec in (self.operands[0], self.after))
        return splitting(before, sizes) == splitting(after, sizes)

    def flops(self, sizes, mesh) -> int:
        """Return one device's FLOPs in an Einsum: 2 per multiply-add, 1 per product if nothing is summed (Part 4)."""
        if self.op != "Einsum":
            return 0
        local = {}
        for spec in self.operands:
            shape = {dim: sizes[dim] if dim in sizes else int(dim) for dim in spec.dim_names}
            local |= dict(zip(spec.dim_names, spec.local_shape(shape, mesh), strict=True))
        return (2 if self.contracted else 1) * math.prod(local.values())


def sent_share(op: str, n: int) -> tuple[int, int]:
    """Return the share of its data before the step that each of n devices sends: (n - 1, n) for a ReduceScatter."""
    shares = {"AllGather": (n - 1, 1), "ReduceScatter": (n - 1, n), "AllReduce": (2 * (n - 1), n)}
    return (shares | {"AllToAll": (n - 1, n), "CollectivePermute": (1, 1)}).get(op, (0, 1))


def splitting(dims: Sequence[tuple[str, ...]], sizes) -> list[tuple[str, ...]]:
    """Return the axes that split each dim, without the axes of size 1."""
    return [tuple(axis for axis in axes if sizes[axis] > 1) for axes in dims]


class Counted:
    """The costs of a sequence of steps: the base of Plan and Program, which hold their `steps`."""

    steps: tuple[Step, ...]

    def gather_bytes(self, sizes, mesh, dtype) -> float:
        """Return the sum of the steps' V with an AllReduce counted twice, as in the book's tables."""
        return sum(step.gather_bytes(sizes, mesh, dtype) for step in self.steps)

    def wire_bytes(self, sizes, mesh, dtype) -> float:
        """Return the bytes that each device sends."""
        return sum(step.wire_bytes(sizes, mesh, dtype) for step in self.steps)

    def flops(self, sizes, mesh) -> int:
        """Return the FLOPs of one device."""
        return sum(step.flops(sizes, mesh) for step in self.steps)


@dataclass(frozen=True)
class Plan(Counted):
    """The `steps` that lead from typed `operands` to a typed `result`.

    For a product `cases` holds the numbers of the book's cases that apply and `case` the lowest of them; for a
    resharding they are () and None. `sizes` are dims, as in Spec.nbytes. `note` says if the search for a cheaper plan
    was cut short, and is "" if it was not; it does not count in comparisons.
    """

    operands: tuple[Spec, ...]
    result: Spec
    steps: tuple[Step, ...]
    cases: tuple[int, ...] = ()
    note: str = field(default="", compare=False)

    @property
    def case(self) -> "int | None":
        """The lowest of the cases that apply, or None for a resharding."""
        return min(self.cases, default=None)

    @property
    def collectives(self) -> tuple[Step, ...]:
        """The steps that communicate."""
        return tuple(step for step in self.steps if step.op in COLLECTIVES)

    def __str__(self) -> str:
        lines = [f"{number}. {step}" for number, step in enumerate(self.steps, 1)] or [f"{self.result}: as it is"]
        return "\n".join(lines + ([f"({self.note})"] if self.note else []))


def moved(before: Sequence, after: Sequence) -> tuple[list, list]:
    """Return, per dim, the axes that a permutation shuffles, without the common prefix and suffix of both types."""
    ours, theirs = [], []
    for a, b in zip(before, after, strict=True):
        start = len(common_prefix(a, b))
        end = len(common_prefix(a[start:][::-1], b[start:][::-1]))
        ours.append(a[start : len(a) - end])
        theirs.append(b[start : len(b) - end])
    return ours, theirs


def common_prefix(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, ...]:
    """Return the axes at the beginning of both sequences, as far as these are equal."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
    return tuple(axis for axis, _ in same)


def permutation(step: Step, mesh) -> tuple[tuple[int, int], ...]:
    """Return the (source, target) pairs of a CollectivePermute, as row-major indices over `step.axes`.

    Both types cut the array into equal blocks, so that some device holds each block that is needed. A device that
    already holds its block is its own source.
    """
    sizes = mesh_sizes(mesh)
    held, needed = {}, {}
    ours, theirs = moved(*([axes for _, axes in spec.dims] for spec in (*step.operands, step.after)))
    for index, coords in enumerate(itertools.product(*(range(sizes[axis]) for axis in step.axes))):
        at = dict(zip(step.axes, coords, strict=True))
        held.setdefault(tuple(block_index(axes, at, sizes) for axes in ours), []).append(index)
        needed.setdefault(tuple(block_index(axes, at, sizes) for axes in theirs), []).append(index)
    pairs = []
    for block, targets in needed.items():
        stay = [index for index in targets if index in held[block]]
        sources = [index for index in held[block] if index not in stay]
        pairs += [(index, index) for index in stay]
        pairs += zip(sources, (index for index in targets if index not in stay), strict=True)
    return tuple(sorted(pairs))
