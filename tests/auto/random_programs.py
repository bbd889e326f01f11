"""Random programs on whole arrays, with types for what goes in and out: for torch and for JAX (tests/oracles)."""

import itertools
import random
from typing import NamedTuple

from scaling.algebra.layouts import DimAxes as At
from scaling.algebra.layouts import arrangements, divides

MESH = {"X": 4, "Y": 2}
SIZES = {"B": 16, "D": 24, "F": 32, "G": 8}


class Program(NamedTuple):
    """`arguments`: the dims of each; `steps`: (what, operands by number, detail); the last step is the result."""

    arguments: tuple[str, ...]
    steps: tuple[tuple[str, tuple[int, ...], str], ...]
    in_types: tuple[str, ...]
    out_type: str

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(SIZES[d] for d in dims) for dims in self.arguments]


def draw(seed: int) -> Program:
    """Three to six operations on two to four matrices and cubes, every value used."""
    rng = random.Random(seed)
    arguments, steps = [], []

    def argument(wanted: str) -> int:
        arguments.append(wanted)
        return -len(arguments)

    def fresh(n: int) -> str:
        return "".join(rng.sample("BDFG", n))

    value, own = argument(own := fresh(rng.choice((2, 2, 3)))), own
    kept = [(value, own)]
    for _ in range(rng.randint(3, 6)):
        what = rng.choice(("product", "product", "product", "square", "add", "tanh", "sum", "turn"))
        if what == "product":
            summed = rng.choice(own)
            others = [d for d in "BDFG" if d not in own]
            new = rng.choice(others) if others and rng.random() < 0.8 else ""
            after = own.replace(summed, new)
            if not after:
                continue
            other = argument(summed + new)
            steps.append(("einsum", (value, other), f"{own},{summed + new}->{after}"))
            own = after
        elif what == "add":
            like = [v for v, d in kept if d == own and v != value]
            steps.append(("add", (value, rng.choice(like) if like else argument(own)), ""))
        elif what in ("square", "tanh"):
            steps.append((what, (value,), ""))
        elif what == "sum" and len(own) > 2:
            steps.append(("einsum", (value,), f"{own}->{own.replace(rng.choice(own), '')}"))
            own = steps[-1][2].split("->")[1]
        elif what == "turn" and len(own) > 1:
            after = "".join(rng.sample(own, len(own)))
            steps.append(("einsum", (value,), f"{own}->{after}"))
            own = after
        else:
            continue
        value = len(steps) - 1
        kept.append((value, own))
    types = [typed(rng, name, d) for name, d in zip("ABCEHKMN", arguments, strict=False)]
    return Program(tuple(arguments), tuple(steps), tuple(types), typed(rng, "Out", own))


def typed(rng: random.Random, name: str, dims: str) -> str:
    """A random type of an array with these dims."""
    ways = [w for w in arrangements(tuple(MESH), len(dims)) if divides(At(w), [SIZES[d] for d in dims], MESH)]
    way = rng.choice(ways)
    return f"{name}[{', '.join(d + ('_' + ''.join(axes) if axes else '') for d, axes in zip(dims, way, strict=True))}]"


def function(program: Program, einsum, tanh, types=None, reshard=None):
    """The program as a Python function, with this library's einsum and tanh. With `types` each line's result has one,
    by `einsum(equation, *operands, out)`, or by `reshard(x, type)` of the operands."""

    def run(*arguments):
        made = []
        for number, (what, operands, detail) in enumerate(program.steps):
            xs = [made[i] if i >= 0 else arguments[-1 - i] for i in operands]
            if what == "einsum":
                made.append(einsum(detail.lower(), *xs, **({"out": types[number]} if types else {})))
                continue
            xs = [reshard(x, types[number]) for x in xs] if types else xs
            made.append(xs[0] + xs[1] if what == "add" else xs[0] * xs[0] if what == "square" else tanh(xs[0]))
        return made[-1]

    return run


def programs(count: int = 50) -> list[tuple[int, Program]]:
    """The first `count` seeds with at least one product."""
    drawn = ((seed, draw(seed)) for seed in itertools.count())
    of_products = ((s, p) for s, p in drawn if sum(len(step[1]) == 2 for step in p.steps) > 1)
    return [*itertools.islice(of_products, count)]
