"""Count a training step in symbols: its code is traced once per structure, and the result is evaluated for any sizes.

A step is linear in its layers, microbatches, experts and chunks of the loss. So a structure is traced with a few of
each, and the weighted sum of these traces is the count of the whole step (`cost.lines`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from scaling.common.disk_cache import on_disk
from scaling.common.limits import LIMITS, Limits
from scaling.configs import Config
from scaling.cost.counted import CountedStep, weighted_sum
from scaling.cost.lines import LiveBytes, Polynomial, Shares, StepProgram, share_of_sent
from scaling.mesh import AbstractMesh
from scaling.schedules import make
from scaling.strategies.transformer import types
from scaling.trace.count import Numbers
from scaling.trace.events import Event
from scaling.trace.peak import PeakMemory
from scaling.trace.symbols import LiveSymbols, NotMonomial
from scaling.train.settings import Settings
from scaling.train.step import count, counted_run
from scaling.train.structure import (
    FEW,
    LEAST,
    Loops,
    Structure,
    loss_chunks,
    packed_sizes,
    pairs_of_rank,
    resolved,
    rows_of_rank,
    structure_of,
)

DECIDE = (  # the settings that determine a step
    "batch", "seq", "microbatches", "optimizer", "dtype", "remat", "precision", "zero", "keep_weights", "lora",
    "lora_on", "lora_alpha", "pipeline", "reduce",
)  # fmt: skip


def step_by_symbols(
    settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int] | None = None, backend: str = "gloo",
    documents: bool = True, memory: bool = True,
) -> CountedStep:  # fmt: skip
    """Return the count of a step, as `step.count` gives it, from the programs of its structure.

    Without `memory` fewer layers and microbatches are traced. If some size is not a product of symbols, as in a step of
    Muon or of adapters, the same numbers of layers and microbatches are counted at the step's own sizes.
    """
    resolved(settings, sizes)  # for its refusals, which are the run's own
    given = sizes, coord, backend, documents
    short = short_pipelines(settings, sizes, coord) if memory else []
    live = memory and not short
    depths = traced_depths(settings, sizes, coord, live)
    step = weighted_steps(settings, *given, depths, live) if len(depths) > 1 else counted(settings, *given)
    return replace(step, peaks=weighted_steps(settings, *given, short).peaks) if short else step


def step_memory(settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int], backend: str) -> float:
    """Return the most bytes at once of a step, which needs fewer traces than its other numbers."""
    resolved(settings, sizes)
    if short := short_pipelines(settings, sizes, coord):
        return weighted_steps(settings, sizes, coord, backend, True, short).memory
    return step_by_symbols(settings, sizes, coord, backend).memory


def weighted_steps(
    settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int] | None, backend: str, documents: bool,
    depths: Sequence[tuple[Fraction, Loops]], live: bool = True,
) -> CountedStep:  # fmt: skip
    """Return the weighted sum of the steps of these depths, by their programs or else at the step's own sizes.

    If not `live`, the programs need not count the bytes that are live.
    """
    given = sizes, coord, backend, documents

    def program_of(depth: Loops, El: int, J: int) -> CountedStep:
        structure = structure_of(settings, *given, depth._replace(experts=El, chunks=J))
        return program_at(program(structure, live), structure, settings, sizes, coord)

    try:
        loops = traced_loops(settings, sizes)
        return weighted_sum(
            (weight * times, program_of(depth, El, J)) for weight, depth in depths for times, El, J in loops
        )
    except NotMonomial:
        return weighted_sum((weight, counted_few(settings, *given, depth)) for weight, depth in depths)


def counted_few(
    settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int] | None, backend: str, documents: bool,
    depth: Loops,
) -> CountedStep:  # fmt: skip
    """Return the count of a step with fewer layers, microbatches and stages, but arrays of the same sizes."""
    some, Z, own = with_few(settings, depth.layers, depth.microbatches), depth.stages, sizes.get("Z", 1)
    there = {**(coord or {}), "Z": depth.stage} if own > 1 else coord
    if own == Z:
        return counted(some, sizes, there, backend, documents)
    V = types.padded_sizes(settings.model, AbstractMesh(sizes))["V"] * Z // own
    tokens = rows_of_rank(settings, sizes) * settings.seq // sizes.get("C", 1)
    chunk = -(-4 * tokens * (V // sizes.get("Y", 1)) // loss_chunks(settings, sizes)[0])  # as many chunks of the loss
    limits = Limits(chunk, ahead=depth.ahead)
    return counted(replace(some, model=some.model.with_(V=V)), {**sizes, "Z": Z}, there, backend, documents, limits)


def short_pipelines(
    settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int] | None
) -> list[tuple[Fraction, Loops]]:
    """Return [(weight, depth)] of short pipelines whose weighted peaks are those of a long one's first or last stage.

    The number of microbatches in flight is linear in the number of stages, once all stages are busy. A rank of a short
    pipeline has as large a part of the vocabulary as a rank of the long one. The list is empty if this does not hold
    for the step, for instance because it has too few stages or microbatches.
    """
    model, M, Z, z = settings.model, settings.microbatches, sizes.get("Z", 1), (coord or {}).get("Z", 0)
    rounds = settings.pipeline.startswith("interleaved")
    if Z <= 3 or z not in (0, Z - 1) or settings.optimizer == "muon" or period(model) > 1:
        return []
    dense = len(model.dense)
    if settings.schedule_on(sizes) and not rounds:
        return []
    few = 2  # the stages of the shorter pipeline
    if busy_from(Z, z, LIMITS.ahead, rounds) <= M:
        start = {n: 3 * n if rounds else 4 for n in (few, few + 1, Z)}  # microbatches, by stages
    elif M == Z > LIMITS.ahead + 2 and not rounds:  # all microbatches are in flight at once
        few, start = 4, {n: n for n in (4, 5, Z)}
    else:
        return []
    chunks = chunks_on(settings, sizes)
    layers, more = divmod(model.L - dense, Z * chunks)
    per_stage = samples(layers, 1, 2)
    deepest = per_stage[-1][1]

    def depth(n: int, M: int, stages: int = few, ahead: int = 1) -> Loops:
        L = dense + n * stages * chunks + more // Z * stages + (more % Z > 0)
        return Loops(L, M, stages, z and stages - 1, ahead)

    found: defaultdict[Loops, Fraction] = defaultdict(Fraction)
    later = Fraction(M - start[Z], few if rounds else 1)  # further microbatches add their tokens
    parts = [(a * b, depth(n, start[k], k)) for a, n in per_stage for b, k in between(Z, few, few + 1, few, few + 1)]
    for a, n in per_stage if model.moe else [(Fraction(1), deepest)]:
        more_of = depth(n, start[few] + (few if rounds else 1))
        parts += [(a * later, more_of), (-a * later, depth(n, start[few]))]
    posted = Fraction(LIMITS.ahead - 1)
    parts += [(posted, depth(deepest, start[few], ahead=2)), (-posted, depth(deepest, start[few]))]
    for weight, each in parts:
        found[each] += weight
    return [(weight, each) for each, weight in found.items() if weight]


def busy_from(Z: int, z: int, ahead: int, rounds: bool) -> int:
    """Return the number of microbatches from which on the memory of stage z is linear in them.

    The stage and all after it are busy then, and as many messages are pending as are posted ahead.
    """
    if rounds:  # the stages of an interleaved pipeline are busy after two rounds of Z microbatches
        return Z * (2 + -(-ahead // Z))
    return max(Z - z, ahead + 1) + 1


def traced_depths(
    settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int] | None, memory: bool
) -> list[tuple[Fraction, Loops]]:
    """Return [(weight, depth)] of the steps to trace: their weighted counts sum to the whole step's.

    Under a schedule that is neither 1F1B nor interleaved, the peak depends on the number of microbatches, so all are
    traced.
    """
    model, Z, M = settings.model, sizes.get("Z", 1), settings.microbatches
    chunks, in_rounds = chunks_on(settings, sizes), settings.pipeline.startswith("interleaved")
    if not memory:
        few, full = 2, 2 * Z if chunks > 1 else 2
    elif Z == 1:
        few, full = 3, 3
    else:
        few, full = 2, busy_from(Z, (coord or {}).get("Z", 0), LIMITS.ahead, in_rounds)
    if memory and Z > 1 and (2 * full >= M or (settings.schedule_on(sizes) and not in_rounds)):
        full = M  # one run of all microbatches takes less than runs of two smaller numbers
    unit, dense = period(model) * Z * chunks, model.dense_layers
    first = 2 * unit if isinstance(dense, tuple) else dense  # counts are linear from two runs of each kind on
    layers = samples(model.L, unit, first + few * Z * chunks)
    if model.linear or settings.optimizer == "muon":  # Muon's update deals the matrices of all layers out to the ranks
        layers = [(Fraction(1), model.L)]
    batches = samples(M, Z if chunks > 1 else 1, full)
    z = (coord or {}).get("Z", 0)
    return [(a * b, Loops(L, m, Z, z)) for (a, L), (b, m) in product(layers, batches)]


def chunks_on(settings: Settings, sizes: Mapping[str, int]) -> int:
    """Return the number of chunks of layers that a rank's stages have."""
    Z = sizes.get("Z", 1)
    return make(settings.pipeline, Z, 2 * Z).chunks if Z > 1 else 1


def traced_loops(settings: Settings, sizes: Mapping[str, int]) -> list[tuple[Fraction, int, int]]:
    """Return [(weight, experts of a rank, chunks of the loss)] to trace, weighted as in `traced_depths`."""
    El, J = settings.model.E // sizes.get("E", 1), loss_chunks(settings, sizes)[0]
    return [(a * b, e, j) for (a, e), (b, j) in product(primed(El, "El"), primed(J, "J"))]


def with_few(settings: Settings, L: int, M: int) -> Settings:
    """Return the settings with the first L layers and M microbatches of as many rows."""
    model, rows = settings.model, settings.batch // settings.microbatches
    windows = model.window[:L] if isinstance(model.window, tuple) else model.window
    here = {name: tuple(l for l in getattr(model, name) if l < L) for name in ("unrotated", "dense")}
    model = model.with_(L=L, window=windows, unrotated=here["unrotated"], dense_layers=here["dense"])
    return replace(settings, model=model, batch=rows * M, microbatches=M)


def samples(whole: int, unit: int, least: int) -> list[tuple[Fraction, int]]:
    """Return [(weight, size)] whose weighted counts sum to the count at size `whole`.

    A count is linear in the size from `least` on, so two sizes that differ by a unit are enough. If `whole` is less
    than two units larger than the first of them, it is the only size.
    """
    first = least + (whole - least) % unit
    times = (whole - first) // unit
    return between(times, 0, 1, first, first + unit) if times > 1 else [(Fraction(1), whole)]


def between(whole: int, a: int, b: int, *sizes: int) -> list[tuple[Fraction, int]]:
    """Return [(weight, size)] of two counts, at a and b, whose weighted sum is the count at `whole`."""
    share = Fraction(whole - a, b - a)
    return [*zip((1 - share, share), sizes, strict=True)]


def primed(whole: int, name: str) -> list[tuple[Fraction, int]]:
    """Return [(weight, size)] of the sizes at which to trace a loop: its own if that is small, else two primes.

    The parts of such a loop shrink as it grows.
    """
    if whole <= FEW:
        return [(Fraction(1), whole)]
    first, second = LEAST[name], LEAST[name] + 2
    return between(whole, first, second, first, second)


def period(model: Config) -> int:
    """Return the number of layers after which their windows, rotations and kinds repeat, dense first layers aside."""
    mixed = model.dense if isinstance(model.dense_layers, tuple) else ()
    kinds = [(window, l in model.unrotated, l in mixed) for l, window in enumerate(model.windows)]
    return next(p for p in range(1, len(kinds) + 1) if kinds[p:] == kinds[:-p])


class Symbolic(Numbers):
    """Read the numbers of a trace as monomials of the structure's symbols."""

    def __init__(self, structure: Structure):
        self.symbols, self.windows, self.mesh = structure.symbols, dict(structure.windows), dict(structure.mesh)

    def of(self, n: int, times: int = 1) -> Polynomial:
        """Return a number of bytes or of FLOPs as a polynomial of the symbols, `times` over."""
        return self.symbols.monomial(n) * times

    def attention(self, event: Event) -> Polynomial:
        """Return the FLOPs of a block of attention: a pair's FLOPs times this block's share of all blocks' pairs."""
        pairs, window = event.pairs
        monomial, n = self.of(event.flops // pairs).single
        share = Fraction(pairs, self.windows[window])
        return Polynomial({tuple(sorted((*monomial, (f"pairs {window}", 1)))): n * share})

    def sent(self, event: Event) -> Shares:
        """Return the bytes that a rank sends, as a share of the bytes that its group gathers or reduces."""
        fixed = set(event.axes) <= {"Z", "C"}
        if event.op in ("Send", "Recv", "CollectivePermute"):
            return Shares({self.of(event.wire_bytes).single: 1})
        over, under = share_of_sent(event.op, prod(self.mesh.get(axis, 1) for axis in event.axes))
        monomial, n = self.of(event.nbytes).single
        if event.wire_bytes == event.nbytes * over // under:
            return Shares({(monomial, n * Fraction(over, under) if fixed else n): 1})
        if fixed:  # it is the root, or another rank
            return Shares({self.of(event.wire_bytes).single: 1})
        raise NotMonomial(f"{event}: a rank sends {event.wire_bytes} of {event.nbytes} bytes")


def counted(settings: Settings, *given: Any) -> CountedStep:
    """Return `step.count` of a step, kept on disk under the settings that determine it."""
    decides = {name: getattr(settings, name) for name in DECIDE}
    return count_on_disk(Settings(settings.model, "", "", **decides), *given)


@on_disk
def count_on_disk(settings: Settings, *given: Any) -> CountedStep:
    """Return the count of a step at its own sizes."""
    return count(settings, *given)


@lru_cache(maxsize=512)
def program(structure: Structure, live: bool) -> StepProgram:
    """Return the program of a structure: one traced step, in the structure's symbols; without memory if not `live`.

    Raises:
        NotMonomial: Some number of the trace is not a product of the structure's sizes.
    """
    if isinstance(found := traced(structure, live), NotMonomial):
        raise found
    return found


@on_disk
def traced(structure: Structure, live: bool) -> StepProgram | NotMonomial:
    """Trace the step of a structure, and return its program or the number that could not be read."""
    mesh = AbstractMesh(dict(structure.mesh), dict(structure.coord), structure.backend)
    memory, s = LiveSymbols(symbols=structure.symbols) if live else PeakMemory(), structure
    try:
        step = counted_run(s.settings, mesh, s.documents, Symbolic(s), memory, s.limits)
    except NotMonomial as error:
        return error
    if not isinstance(memory, LiveSymbols):
        return StepProgram(step, {})
    if memory.error:
        return memory.error
    return StepProgram(step, {line: LiveBytes.of([*memory.columns], rows) for line, rows in memory.rows.items()})


def program_at(
    found: StepProgram, structure: Structure, settings: Settings, sizes: Mapping[str, int],
    coord: Mapping[str, int] | None,
) -> CountedStep:  # fmt: skip
    """Return a step's bytes sent, FLOPs and memory: a structure's program evaluated at a run's own sizes."""
    model, (number, held), C = settings.model, loss_chunks(settings, sizes), sizes.get("C", 1)
    at: dict[str, Any] = {axis: sizes.get(axis, 1) for axis in "PXYE"}
    at |= {letter: getattr(model, letter) for letter in "DFGKHS"} | {"O": model.F_dense, "El": model.E // at["E"]}
    shorter = Fraction(dict(structure.mesh).get("Z", 1), sizes.get("Z", 1))
    at |= {
        "V": int(types.padded_sizes(model, AbstractMesh(sizes))["V"] * shorter),
        "b": rows_of_rank(settings, sizes),
        "T": settings.seq,
    }
    at |= {"E+1": model.E + 1, "T-1": settings.seq - 1, "J": number, "row": LIMITS.row}
    at |= packed_sizes(settings, sizes)
    if C > 1:
        for small, real in {*zip(structure.settings.model.windows, model.windows, strict=False)}:
            own = (0, None) if model.chunked else (small or 0, real)
            at[f"pairs {own[0]}"] = pairs_of_rank(settings.seq, C, coord, own[1])
    return found.at(at, sizes, {"J": held}, "ZC")
