"""Programs whose gradients explicit mode is compared with JAX's on: those of tests/auto, each line's type drawn too."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "auto"))
from random_programs import Program, programs, typed

from scaling.book.largest import largest


def typed_programs(count: int = 50) -> list[tuple[Program, list[str]]]:
    """(program, the type of each line's result)."""
    found = []
    for seed, program in programs(count):
        rng, dims, types = random.Random(seed), [], []
        for what, operands, detail in program.steps:
            first = dims[operands[0]] if operands[0] >= 0 else program.arguments[-1 - operands[0]]
            dims.append(detail.split("->")[1] if what == "einsum" else first)
            types.append(typed(rng, "T", dims[-1]))
        found.append((program, [*types[:-1], program.out_type]))
    return found


def function(program: Program, types: list[str], einsum, reshard, tanh):
    """The program with its lines' types: `einsum(equation, *operands, out)`, and `reshard(x, type)` before the rest."""

    def run(*arguments):
        made = []
        for (what, operands, detail), type in zip(program.steps, types, strict=True):
            xs = [made[i] if i >= 0 else arguments[-1 - i] for i in operands]
            if what == "einsum":
                made.append(einsum(detail.lower(), *xs, out=type))
                continue
            xs = [reshard(x, type) for x in xs]
            made.append(xs[0] + xs[1] if what == "add" else xs[0] * xs[0] if what == "square" else tanh(xs[0]))
        return made[-1]

    return run


def numbers(count: int, seed: int) -> list[float]:
    """Numbers that every library has to the last bit."""
    return [((i + 1) * 7919 * (seed + 3) % 1009 - 504) / 1024 for i in range(count)]


def digest(values: list[float]) -> list[float]:
    """Two projections of an array, and its largest size: what the table keeps of it."""
    by = [numbers(len(values), seed) for seed in (90, 91)]
    return [*(sum(a * b for a, b in zip(values, row, strict=True)) for row in by), largest(map(abs, values))]
