"""Count a training step in symbols: its code is traced once per structure, and the result is evaluated for any sizes.

A step is linear in its layers, microbatches, experts and chunks of the loss. So a structure is traced with a few of
each, and the weighted sum of these traces is the count of the whole step (`cost.lines`).
"""

from collections import defaultdict
from collections.abc import Mapping
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
from scaling.trace.symbols import LiveSymbols, NotMonomial
from scaling.train.counting import count, counted_run
from scaling.train.settings import Settings
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

ONE_WAY = "Send", "Recv", "CollectivePermute", "Broadcast", "Reduce", "Scatter", "Gather"  # ranks send unequally


def step_by_symbols(
    settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int] | None = None, backend: str = "gloo",
    memory: bool = True,
) -> CountedStep:  # fmt: skip
    """Return the count of a step, as `counting.count` gives it, from the programs of its structure.

    Without `memory` the peaks are not those of the whole step, and fewer layers and microbatches are traced. If some
    size is not a product of symbols, as in a step of Muon or of adapters, the same numbers of layers and microbatches
    are counted at the step's own sizes.
    """
    resolved(settings, sizes)  # for its refusals, which are the run's own
    depths = traced_depths(settings, sizes, coord, memory)

    def program_of(depth: Loops, El: int, J: int) -> CountedStep:
        structure = structure_of(settings, sizes, coord, backend, depth._replace(experts=El, chunks=J))
        return program_at(program(structure), structure, settings, sizes, coord)

    try:
        El, J = settings.model.E // sizes.get("E", 1), loss_chunks(settings, sizes)[0]
        (first, El), *more = primed(El, "El")
        (_, J), *chunks = primed(J, "J")
        loops = [(first, El, J), *((a, e, J) for a, e in more)]
        loops += [(sign * b, El, at) for b, j in chunks for sign, at in ((1, j), (-1, J))]  # the loss has no experts
        return weighted_sum((weight * a, program_of(depth, e, j)) for weight, depth in depths for a, e, j in loops)
    except NotMonomial:
        return weighted_sum((weight, counted_few(settings, sizes, coord, backend, depth)) for weight, depth in depths)


def counted_few(
    settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int] | None, backend: str, depth: Loops
) -> CountedStep:
    """Return the count of a step with fewer layers, microbatches and stages, but arrays of the same sizes."""
    some, Z, own = with_few(settings, depth.layers, depth.microbatches), depth.stages, sizes.get("Z", 1)
    if own == Z:
        return count_on_disk(some, sizes, coord, backend)
    V = types.padded_sizes(settings.model, AbstractMesh(sizes))["V"] * Z // own
    tokens = rows_of_rank(settings, sizes) * settings.seq // sizes.get("C", 1)
    chunk = -(-4 * tokens * (V // sizes.get("Y", 1)) // loss_chunks(settings, sizes)[0])  # as many chunks of the loss
    some, short = replace(some, model=some.model.with_(V=V)), {**sizes, "Z": Z}
    limits = Limits(chunk, ahead=depth.ahead)
    step, lines = count_on_disk(some, short, {**(coord or {}), "Z": depth.stage}, backend, True, limits), {}
    for kind, calls in step.lines.items():
        if "Z" in kind.axes and kind.op not in ONE_WAY:  # the group is larger
            over, under = share_of_sent(kind.op, prod(sizes.get(axis, 1) for axis in kind.axes))
            calls = calls._replace(sent=calls.amount * over / under)
        lines[kind] = calls
    return replace(step, lines=lines)


def traced_depths(
    settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int] | None, memory: bool
) -> list[tuple[Fraction, Loops]]:
    """Return [(weight, depth)] of the steps to trace: their weighted counts sum to the whole step's.

    Under a schedule that is neither 1F1B nor interleaved, the peak depends on the number of microbatches, so all are
    traced.
    """
    if short := short_pipelines(settings, sizes, coord, memory):
        return short
    model, Z, M, z = settings.model, sizes.get("Z", 1), settings.microbatches, (coord or {}).get("Z", 0)
    chunks, in_rounds = chunks_on(settings, sizes), settings.pipeline.startswith("interleaved")
    if Z == 1:
        few, full = 3, 3
    elif not memory:
        few, full = 2, 2 * Z if chunks > 1 else 2
    else:
        few, full = fewest_layers(settings), busy_from(Z, z, LIMITS.ahead, in_rounds)
    if memory and Z > 1 and (2 * full >= M or (settings.pipeline_on(sizes) and not in_rounds)):
        full = M  # one run of all microbatches takes less than runs of two smaller numbers
    unit, dense = period(model) * Z * chunks, model.dense_layers
    first = 2 * unit if isinstance(dense, tuple) else dense  # counts are linear from two runs of each kind on
    layers = samples(model.L, unit, first + few * Z * chunks)
    if model.linear or settings.optimizer == "muon":  # Muon's update deals the matrices of all layers out to the ranks
        layers = [(Fraction(1), model.L)]
    batches = samples(M, Z if chunks > 1 else 1, full)
    return [(a * b, Loops(L, m, Z, z)) for (a, L), (b, m) in product(layers, batches)]


def short_pipelines(
    settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int] | None, memory: bool
) -> list[tuple[Fraction, Loops]]:
    """Return [(weight, depth)] of short pipelines whose weighted counts sum to that of a rank of a long one.

    Counts are linear in the layers of a stage, in the microbatches, and, because the first and last stage send parts
    of the vocabulary to the others, in the number of stages. A rank of a short pipeline has as large a part of the
    vocabulary as a rank of the long one. With `memory` the rank is on the first or last stage: the number of
    microbatches in flight is linear in the number of stages, once all stages are busy. The list is empty if this does
    not hold for the step, for instance because it has too few stages or microbatches.
    """
    model, M, Z, z = settings.model, settings.microbatches, sizes.get("Z", 1), (coord or {}).get("Z", 0)
    chunks, in_rounds = chunks_on(settings, sizes), settings.pipeline.startswith("interleaved")
    if Z <= 3 or M == 1 or settings.optimizer == "muon" or period(model) > 1:
        return []
    few = 2 if z in (0, Z - 1) else 3  # the stages of the shorter pipeline
    start = {n: 3 * n if chunks > 1 else 4 for n in (few, few + 1)}  # microbatches, by stages
    if memory and (few == 3 or (settings.pipeline_on(sizes) and not in_rounds)):
        return []
    if memory and model.tied and z == 0 and in_rounds:  # a table's gradient may be fullest in long ones alone
        return []
    if memory and busy_from(Z, z, LIMITS.ahead, in_rounds) > M:
        if M != Z or busy_from(Z, 1, LIMITS.ahead, in_rounds) > Z:
            return []
        few, start = 4, {n: n for n in (4, 5, 6)}  # all microbatches are in flight at once
    stages = between(Z, 4, 5, 6) if few == 4 else between(Z, few, few + 1)  # counts are quadratic if both grow
    if few == 3 and not model.tied:
        stages = [(Fraction(1), few)]
    layers, more = divmod(model.L - len(model.dense), Z * chunks)
    per_stage = samples(layers, 1, fewest_layers(settings))
    found: defaultdict[Loops, Fraction] = defaultdict(Fraction)

    def add(weight: Fraction, n: int, M: int, stages: int, ahead: int = 1) -> None:
        stage = 0 if z == 0 else 1 if few == 3 else stages - 1
        L = n * stages * chunks + more // Z * stages + (more % Z > 0) * (1 + (few == 3 and z < more % Z))
        found[Loops(len(model.dense) + L, M, stages, stage, ahead)] += weight

    for (a, n), (b, k) in product(per_stage, stages):
        unit = k if chunks > 1 else 1
        later = Fraction(M - start[k], unit) if few < 4 else Fraction(0)  # further microbatches
        add(a * b * (1 - later), n, start[k], k)
        add(a * b * later, n, start[k] + unit, k)
    if memory:
        posted = Fraction(LIMITS.ahead - 1)
        add(posted, per_stage[-1][1], start[few], few, ahead=2)
        add(-posted, per_stage[-1][1], start[few], few)
    return [(weight, each) for each, weight in found.items() if weight]


def busy_from(Z: int, z: int, ahead: int, in_rounds: bool) -> int:
    """Return the number of microbatches from which on the memory of stage z is linear in them.

    The stage and all after it are busy then, and as many messages are pending as are posted ahead.
    """
    if in_rounds:  # the stages of an interleaved pipeline are busy after two rounds of Z microbatches
        return Z * (2 + -(-ahead // Z))
    return max(Z - z, ahead + 1) + 1


def fewest_layers(settings: Settings) -> int:
    """Return the number of layers of a stage from which on its memory is linear in them.

    The weights of the layer below arrive while a layer runs backward, and if gradients are reduced in each microbatch,
    those of the layer above are sent.
    """
    return 3 if settings.reduce == "each" else 2


def chunks_on(settings: Settings, sizes: Mapping[str, int]) -> int:
    """Return the number of chunks of layers that a rank's stages have."""
    Z = sizes.get("Z", 1)
    return make(settings.pipeline, Z, 2 * Z).chunks if Z > 1 else 1


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
    return between(whole, first, first + unit) if whole > first + unit else [(Fraction(1), whole)]


def between(whole: int, *sizes: int) -> list[tuple[Fraction, int]]:
    """Return [(weight, size)] by which a polynomial's values at these sizes add up to its value at `whole`.

    The polynomial's degree is below the number of sizes.
    """
    return [(prod(Fraction(whole - b, a - b) for b in sizes if b != a), a) for a in sizes]  # type: ignore[misc]


def primed(whole: int, name: str) -> list[tuple[Fraction, int]]:
    """Return [(weight, size)] of the sizes at which to trace a loop: its own if that is small, else two primes.

    The parts of such a loop shrink as it grows.
    """
    if whole <= FEW:
        return [(Fraction(1), whole)]
    return between(whole, LEAST[name], LEAST[name] + 2)


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
        if event.op in ONE_WAY and {*event.axes} <= {*"ZC"}:
            return Shares({self.of(event.wire_bytes).single: 1})
        over, under = share_of_sent(event.op, prod(self.mesh.get(axis, 1) for axis in event.axes))
        if event.op in ONE_WAY or event.wire_bytes != event.nbytes * over // under:
            raise NotMonomial(f"{event}: a rank sends {event.wire_bytes} of {event.nbytes} bytes")
        return Shares({self.of(event.nbytes).single: 1})


count_on_disk = on_disk(count)


@lru_cache(maxsize=512)
def program(structure: Structure) -> StepProgram:
    """Return the program of a structure: one traced step, in the structure's symbols.

    Raises:
        NotMonomial: Some number of the trace is not a product of the structure's sizes.
    """
    if isinstance(found := traced(structure), NotMonomial):
        raise found
    return found


@on_disk
def traced(structure: Structure) -> StepProgram | NotMonomial:
    """Trace the step of a structure, and return its program or the number that could not be read."""
    mesh = AbstractMesh(dict(structure.mesh), dict(structure.coord), structure.backend)
    memory = LiveSymbols(symbols=structure.symbols)
    try:
        step = counted_run(structure.settings, mesh, True, Symbolic(structure), memory, structure.limits)
    except NotMonomial as error:
        return error
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
    V = types.padded_sizes(model, AbstractMesh(sizes))["V"]
    at |= {
        "V": V * Fraction(dict(structure.mesh).get("Z", 1), sizes.get("Z", 1)),  # the part of a rank is as large
        "b": rows_of_rank(settings, sizes),
        "T": settings.seq,
    }
    at |= {"E+1": model.E + 1, "T-1": settings.seq - 1, "J": number, "row": LIMITS.row, "span": LIMITS.span}
    at |= packed_sizes(settings, sizes)
    if latent := model.latent:
        at |= {"kv": latent.kv_rank, "nope": latent.nope, "rope": latent.rope, **{x: model.sizes[x] for x in "RMAW"}}
    if C > 1:
        for small, real in {*zip(structure.settings.model.windows, model.windows, strict=False)}:
            own = (0, None) if model.chunked else (small or 0, real)
            at[f"pairs {own[0]}"] = pairs_of_rank(settings.seq, C, coord, own[1])
    return found.at(at, sizes, {"J": held}, ONE_WAY, {"V": V})
