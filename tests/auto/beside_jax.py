"""What is compared with JAX, stored beside its answers (by tests/oracles/jax_answers.py): every typing of a few
operations, with the result's (typings.txt); and 50 programs drawn at random (programs.json) with types for what goes in
and for each line's result, the bytes that XLA's partitioner moves, and the types and digests of value and gradients.
"""

import ast
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scaling.algebra.layouts import DimAxes, arrangements, divides

TYPINGS, PROGRAMS = (Path(__file__).with_name(name) for name in ("typings.txt", "programs.json"))
MESH = {"X": 4, "Y": 2}
SIZES = {"B": 16, "D": 24, "F": 32, "G": 8}


class Case(NamedTuple):
    kind: str
    detail: tuple
    shapes: tuple
    mesh: dict
    typing: tuple  # of each operand, the axes of each dim


def called(case: Case, lib, xs) -> tuple:
    """A library's function of a case, and its arguments."""
    if case.kind == "einsum":
        return lib.einsum, (*case.detail, *xs)
    return getattr(lib, case.kind), (*xs, case.detail) if case.detail else tuple(xs)


def splits(shape: tuple, mesh: dict) -> list[tuple]:
    """Every typing of an array: dims of size 1 stay whole, and blocks divide."""
    return sorted(w for w in arrangements(tuple(mesh), len(shape)) if divides(DimAxes(w), shape, mesh))


def cases() -> Iterator[tuple[str, list[Case], list[str]]]:
    """(an operation as it is stored, its cases, JAX's answers: the result's axes as `written`, or ! for a refusal)."""
    lines = TYPINGS.read_text().splitlines()
    for operation, answers in zip(lines[::2], lines[1::2], strict=True):
        given = ast.literal_eval(operation)
        _, _, shapes, mesh = given
        typings = itertools.product(*(splits(shape, mesh) for shape in shapes))
        yield operation, [Case(*given, typing) for typing in typings], answers.split(" ")


def written(dims) -> str:
    """The axes of each dim: ((), ("X", "Y")) -> "-,XY"; of a scalar "."."""
    return ",".join("".join(axes) or "-" for axes in dims) or "."


class Program(NamedTuple):
    """`arguments`: the dims of each; `steps`: (what, operands by number, equation); `types`: of each step's result."""

    arguments: list[str]
    steps: list[tuple[str, list[int], str]]
    in_types: list[str]
    types: list[str]
    xla_bytes: float
    derivatives: list[tuple[str, list[float]]]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(SIZES[d] for d in dims) for dims in self.arguments]

    def run(self, einsum, tanh, *arguments, reshard=None):
        """The last step's result, by this library's functions. With `reshard` each step's result has its type, by
        `einsum(equation, *operands, out=type)`, or by `reshard(x, type)` of the operands."""
        made = []
        for (what, operands, equation), type in zip(self.steps, self.types, strict=True):
            xs = [made[i] if i >= 0 else arguments[-1 - i] for i in operands]
            if what == "einsum":
                made.append(einsum(equation, *xs, **({"out": type} if reshard else {})))
                continue
            xs = [reshard(x, type) for x in xs] if reshard else xs
            made.append(xs[0] + xs[1] if what == "add" else xs[0] * xs[0] if what == "square" else tanh(xs[0]))
        return made[-1]


def programs() -> list[Program]:
    return [Program(**row) for row in json.loads(PROGRAMS.read_text())]


def store(path: Path, rows: list[dict]) -> None:
    path.write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")


def filling(shape, seed: int) -> list[float]:
    """The numbers of an array, in order: no generator, so that all libraries have the same."""
    return [math.sin(1.3 * i + 0.7 * seed + 0.1) for i in range(math.prod(shape))]


def digest(numbers: list[float]) -> list[float]:
    """What is stored of an array: two sums that tell it from others, all elements weighted, and its norm."""
    return [*(sum(x * math.cos(k * i + k) for i, x in enumerate(numbers)) for k in (0.37, 1.91)), math.hypot(*numbers)]


def close(arrays: list[list[float]], stored: list[list[float]]) -> bool:
    """Whether arrays are those whose digests are stored, to 1e-12 of their norms."""
    return all(
        abs(a - b) <= 1e-12 * wanted[-1]
        for numbers, wanted in zip(arrays, stored, strict=True)
        for a, b in zip(digest(numbers), wanted, strict=True)
    )
