"""Choose the sizes at which a training step is traced, each a prime, so that one trace answers for all other sizes.

What decides which code a step runs is its *structure*: the kind of the model, the axes of the mesh, the stages and the
parts of sequences, the recipe. Every other size is a symbol (`scaling.trace.symbols`), or the length of a loop that is
run only a few times.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import NamedTuple

from scaling import tree
from scaling.common.limits import LIMITS, Limits
from scaling.configs import Latent
from scaling.mesh import AbstractMesh
from scaling.models.rope import check_positions
from scaling.strategies.context.ring import check_length, work
from scaling.strategies.transformer import types
from scaling.strategies.transformer.api import look_up_step
from scaling.strategies.transformer.layers import packed_leaves
from scaling.strategies.transformer.step import StepOptions, TrainStep
from scaling.trace.symbols import NotMonomial, Symbols, prime_factors, primes_for
from scaling.train.counting import step_shapes
from scaling.train.settings import Settings

FEW = 24  # up to this number, all experts of a rank and all chunks of the loss are run
LEAST: dict[str, int] = dict.fromkeys(  # the least prime of each; a row is longer than a span
    ("span", *"EKGHbTYDFVXPSOR", "kv", "nope", "rope", "row", "copies"), 59
)
LEAST |= {"El": 11, "J": 17}
TERM = {"E+1": "E", "M": "rope", "A": "rope", "W": "nope"}  # a term of each sum that is not T - 1
ENDLESS = 1 << 62


class Loops(NamedTuple):
    """The lengths of a step's loops.

    They are the layers, the microbatches, the stages, the receives that the rank posts ahead, the experts of a rank and
    the chunks of the loss. The rank is at the stage `stage`.
    """

    layers: int
    microbatches: int
    stages: int = 1
    stage: int = 0
    ahead: int = LIMITS.ahead
    experts: int = 1
    chunks: int = 1


@dataclass(frozen=True)
class Structure:
    """A step to be traced: a run's settings and its mesh, whose sizes are primes, one for each symbol."""

    settings: Settings
    mesh: tuple[tuple[str, int], ...]
    coord: tuple[tuple[str, int], ...]
    backend: str
    limits: Limits
    symbols: Symbols
    windows: tuple[tuple[int, int], ...]  # by the window that is traced (0: none), the scores per head of all blocks


def structure_of(
    settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int] | None, backend: str, loops: Loops,
    least: Mapping[str, int] = LEAST,
) -> Structure:  # fmt: skip
    """Return the structure of a step, to be traced with these loops.

    Each symbol's prime is at least its `least`. Where a size of the run is 1 on a rank, it is 1 in the structure,
    because torch copies such arrays less often.

    Raises:
        NotMonomial: The step has sizes that are not products.
    """
    model, (L, M, Z, z, ahead, El, J) = settings.model, loops
    Y, C = (sizes.get(axis, 1) for axis in "YC")
    odd = settings.optimizer == "muon" or settings.adapters or settings.precision
    odd = odd or model.rotary_share != 1 or model.dropout  # a part of H, and masks of the whole batch
    grouped = model.expert_groups > 1 and sizes.get("E", 1) == 1
    if odd or model.capacity or model.linear or grouped:
        raise NotMonomial(f"{model.name}: some sizes are not products")
    if (model.K % Y and Y % model.K) or model.k > El * (LEAST["E"] if sizes.get("E", 1) > 1 else 1):
        raise NotMonomial(f"{model.name}: {model.K} heads on {Y} ranks, or {model.k} of so few experts")
    dense = tuple(l for l in model.dense if l < L)
    stage = (L - len(dense)) // Z
    counts = {L, M, Z, Z - 1, C, stage, stage + 1, len(dense), El, El + 1, J} - {0}
    own = ("El", El, model.E // sizes.get("E", 1)), ("J", J, loss_chunks(settings, sizes)[0])
    loop = {name: n for name, n, whole in own if n != whole}
    p = primes_for([*LEAST], counts - {*loop.values()}, {**least, **loop})
    X, Y, E = (p[axis] if sizes.get(axis, 1) > 1 else 1 for axis in "XYE")
    E *= model.expert_groups
    copies = p["copies"] if sizes.get("Y", 1) > model.K else 1  # ranks that have the same KV head
    heads = p["K"] if model.K > 1 and sizes.get("Y", 1) != model.K else 1
    Y = heads * copies if copies > 1 else Y
    K, G = heads * (1 if copies > 1 else Y), (p["G"] if model.G > 1 else 1) * copies
    split = J * (E * El if model.moe else 1)  # rows of a rank that chunks and experts divide
    alone = rows_of_rank(settings, sizes) == 1
    low, row = {}, p["row"]
    if latent := model.latent:  # whose keys are wider than its values
        low, row = {"R": p["R"] * row * X, "kv": p["kv"] * row * X, "nope": 4 * p["nope"], "rope": 2 * p["rope"]}, 1
    at = {
        "b": 1 if alone else p["b"] * split, "T": p["T"] * 2 * C * Y * (split if alone else 1),
        "D": p["D"] * p["row"] * X, "F": p["F"] * Y, "G": G, "H": 2 * p["H"] * row, "V": p["V"] * Y * Z,
        "S": p["S"] * Y, "O": p["O"] * Y, "K": K, **low, **loop, "P": p["P"], "X": X, "E": E, "Y": Y, "row": p["row"],
        "span": p["span"],
    }  # fmt: skip
    prime = p | ({"Y": copies} if copies > 1 else {})
    try:
        check_positions(model, at["T"], packed=True)
    except ValueError as error:  # the run's own length is not at["T"]
        raise NotMonomial(f"{model.name}: {at['T']} positions are traced, which are too many for it") from error
    if copies > 1:  # K divides Y, else Y divides K
        at["K"] = at.pop("K")
    order = [(name, n, prime[name]) for name, n in at.items() if n > 1 and n % prime[name] == 0]
    counted = prime_factors({*range(1, 59), *counts} - {*loop.values()}) - {prime for *_, prime in order}
    windows, pairs = traced_windows(settings, sizes, at["T"], coord)
    changes = {x: at[x] for x in "DFHVK"} | {"N": K * G, "L": L, "window": windows[:L]}
    if latent:
        rank = latent.q_rank and at["R"]
        changes |= {"latent": Latent(rank, at["kv"], at["nope"], at["rope"], at["H"], latent.interleaved)}
    changes |= {"unrotated": tuple(l for l in model.unrotated if l < L)}
    changes |= {"E": El * E} if model.moe else {}
    changes |= {"F_shared": at["S"]} if model.shared else {}
    changes |= {"F_dense": at["O"], "dense_layers": dense} if model.dense else {}
    axes = {axis: at.get(axis, n) for axis, n in {**sizes, "Z": Z}.items() if n > 1} or {"X": 1}
    small = replace(
        Settings(model.with_(**changes), "", ""), microbatches=M, seq=at["T"], dtype=settings.dtype,
        batch=M * at["b"] * prod(axes.get(axis, 1) for axis in "PXE"), remat=settings.remat, zero=settings.zero,
        keep_weights=settings.keep_weights, pipeline=settings.pipeline, reduce=settings.reduce,
    )  # fmt: skip
    sums: tuple = ("T-1", at["T"] - 1), *((("E+1", El * E + 1),) if model.moe and (E > 1 or "El" in loop) else ())
    if latent:
        sums += tuple((x, small.model.sizes[x]) for x in "MAW")
    if packed := packed_sizes(settings, sizes):
        sums += tuple(packed_sizes(small, axes, ENDLESS).items())
    logits = 4 * at["b"] * at["T"] // C * (at["V"] // Y)
    span = p["span"] if settings.seq > LIMITS.span else ENDLESS
    limits = Limits(logits // J if J > 1 else ENDLESS, ENDLESS if packed else 0, p["row"], span, ahead)
    symbols = Symbols(tuple(order), sums, tuple(sorted(counted)))
    if (collide := {TERM.get(name, "T") for name in symbols.collide}) and max(least.values()) < 400:
        more = {**least, **{x: p[x] + 1 for x in collide}}
        return structure_of(settings, sizes, coord, backend, loops, more)
    on = tuple(axes.items()), tuple({**(coord or {}), **({"Z": z} if Z > 1 else {})}.items()), backend
    return Structure(small, *on, limits, symbols, pairs)


def rows_of_rank(settings: Settings, sizes: Mapping[str, int]) -> int:
    """Return the rows of a rank in a microbatch."""
    return settings.batch // (settings.microbatches * prod(sizes.get(axis, 1) for axis in "PXE"))


def traced_windows(settings: Settings, sizes: Mapping[str, int], T: int, coord: Mapping[str, int] | None) -> tuple:
    """Return each layer's window in the trace, and the scores per head that the rank computes with each window.

    The second result is ((window, scores), ...).
    """
    C, windows = sizes.get("C", 1), settings.model.windows
    if settings.model.chunked or C == 1:  # only which layers share a mask matters; a chunk is masked as a document
        order = [*dict.fromkeys(windows)]
        pairs = ((0, pairs_of_rank(T, C, coord, None)),) if C > 1 else ()
        return tuple(w and order.index(w) + (1 if w < settings.seq else T) for w in windows), pairs
    half, real = T // (2 * C), settings.seq // (2 * C)
    found = {}
    for window in {*windows}:
        small = window and 1 + (window - 1) * half // real
        if window and (-(-(window - 1) // real) != -(-((small or 1) - 1) // half) or small in found.values()):
            raise NotMonomial(f"a window of {window} tokens, of parts of {real}")
        found[window] = small
    pairs = tuple((small or 0, pairs_of_rank(T, C, coord, small)) for small in found.values())
    return tuple(found[window] for window in windows), pairs


def resolved(settings: Settings, sizes: Mapping[str, int]) -> tuple[dict, TrainStep]:
    """Return (the params of a rank on the meta device, the step resolved for the mesh).

    Raises:
        ShardingError: or ValueError, for params, rows or sequences that do not divide over the mesh, or sequences
            that are too long.
    """
    return _resolved(settings, tuple(sizes.items()))


@lru_cache(maxsize=64)
def _resolved(settings: Settings, given: tuple[tuple[str, int], ...]) -> tuple[dict, TrainStep]:
    mesh = AbstractMesh(sizes := dict(given))
    check_positions(settings.model, settings.seq, packed=False)
    params, (tokens, targets, _) = step_shapes(settings, mesh)
    options = StepOptions(**settings.step_options(sizes))
    if (C := sizes.get("C", 1)) > 1:
        check_length(settings.context, settings.seq, C)
    return params, look_up_step(options, settings.model, params, (tokens, targets, None, None), mesh, seed=0)


def packed_sizes(settings: Settings, sizes: Mapping[str, int], small: int = LIMITS.small) -> dict[str, int]:
    """Return by stack the elements of a layer that a rank sends along X in one message; {} if it sends leaf by leaf."""
    if sizes.get("X", 1) == 1:
        return {}
    params, step = resolved(settings, sizes)
    whole, found = sizes["X"] if settings.zero in (1, 2) else 1, {}
    stacks = [stack for stack in ("layers", "dense", "linear") if stack in params]
    for stack in stacks:
        layer = [W[0] for W in tree.leaves(params[stack])]
        if dims := packed_leaves(layer, step.lines[stack], step.mesh, small):
            found[stack] = sum(layer[i].numel() for i in dims) // whole
    if found and len(found) < len(stacks):
        raise NotMonomial("one stack of layers in one message each, and one not")
    return found


def loss_chunks(settings: Settings, sizes: Mapping[str, int]) -> tuple[int, Fraction]:
    """Return the number of chunks in `ends.chunked_loss`, and all rows as a multiple of one chunk's."""
    Y, parts = sizes.get("Y", 1), prod(sizes.get(axis, 1) for axis in "PXEC")
    rows = settings.batch * settings.seq // (parts * settings.microbatches)
    V = types.padded_sizes(settings.model, AbstractMesh(sizes))["V"]
    count = max(1, -(-4 * rows * (V // Y) // LIMITS.chunk))
    size = max(1, -(-rows // count))
    return -(-rows // size), Fraction(rows, size)


def pairs_of_rank(T: int, C: int, coord: Mapping[str, int] | None, window: int | None) -> int:
    """Return the scores per head that a rank computes of a sequence."""
    return int(work("zigzag", T, C, window=window)[(coord or {}).get("C", 0)])
