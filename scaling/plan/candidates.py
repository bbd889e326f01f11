"""Every layout of a job on a given number of chips: all meshes with all recipes, evaluated as columns, the best first.

No heuristic skips a layout. A mesh that breaks a rule of the model or of the network is left out, and counted with its
reason, so that the error "no mesh suits" can say why.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from scaling.common.arguments import whole
from scaling.cost.lanes import Lane
from scaling.hardware import Chip
from scaling.plan.classes import is_unusual, sure_seconds, usual_error
from scaling.plan.evaluate import Estimate, evaluate
from scaling.plan.job import ANY, AXES, Fixed, Job, Layout, Question, row
from scaling.plan.network import Network, Unplaced, measured, slice_shape, torus, torus_meshes, tree
from scaling.plan.recipes import no_recipe, recipes
from scaling.plan.ties import TIE, simplest_first

STAGES, PART = 64, 128  # the most pipeline stages; the fewest tokens in one chunk of a sequence
ROWS = 16_000  # rows of columns that are evaluated at once, so that they stay in the cache


def divisors(n: int) -> list[int]:
    """Return the divisors of n, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def splits(axes: Sequence[str], n: int, allowed: Callable[[str, int], bool]) -> Iterator[dict[str, int]]:
    """Yield every way to split n chips over the axes, of the sizes that are allowed."""
    if not axes:
        yield from [{}] if n == 1 else []
        return
    for size in [n] if len(axes) == 1 else divisors(n):
        if allowed(axes[0], size):
            yield from ({axes[0]: size} | rest for rest in splits(axes[1:], n // size, allowed))


def _refusal(job: Job, sizes: dict[str, int]) -> str | None:
    """Return the rule of the model that a mesh breaks, or None."""
    w, C, E, Y = job.work, sizes["context"], sizes["expert"], sizes["tensor"]
    if w.heads % Y:
        return f"TP does not divide the {w.heads} heads"
    if (w.kv_heads < Y and Y % w.kv_heads) or (w.kv_heads >= Y and w.kv_heads % Y):
        return f"TP neither divides the {w.kv_heads} KV heads nor is a multiple of them"
    if w.experts_count % E:
        return f"EP does not divide the {w.experts_count} experts"
    if C > 1 and (job.seq % (2 * C) or job.seq < 2 * C * PART):
        return f"CP does not cut sequences of {job.seq:,} into 2 CP parts of at least {PART} tokens"
    if sizes["pipe"] > min(STAGES, w.L):
        return f"more stages than {min(STAGES, w.L)}"
    several = job.config.linear or isinstance(job.config.dense_layers, tuple)
    if sizes["pipe"] > 1 and several:
        return "stages store layers of one kind"
    if math.prod(sizes[axis] for axis in ("pod", "data", "fsdp", "expert")) > job.sequences:
        return f"more replicas than the {job.sequences:,} sequences"
    return None


def _meshes(job: Job, chip: Chip, chips: int, fixed: Fixed, refused: Counter) -> Iterator[Network]:
    """Yield every mesh of `chips` chips that the model and the network allow; count the others in `refused`."""
    w, wanted = job.work, dict(fixed.axes)
    for reason in _impossible(chip, chips, fixed):
        refused[reason] += 1
        return
    most = {
        "pipe": min(STAGES, w.L), "data": chips, "fsdp": chips, "expert": w.experts_count, "tensor": w.heads,
        "context": max(1, job.seq // (2 * PART)) if w.exchanged else 1,
    }  # fmt: skip
    for sizes, placed in _sizes(chip, chips, fixed, most, refused):
        sizes = {axis: sizes.get(axis, 1) for axis in AXES}
        if any(sizes[axis] != size for axis, size in wanted.items()):
            continue
        if reason := _refusal(job, sizes):
            refused[reason] += 1
            continue
        shared = math.prod(sizes[axis] for axis in job.shards if axis != "fsdp")
        for zero in (1, 3) if fixed.zero is None else (fixed.zero,):
            if (zero == 3) != (sizes["fsdp"] > 1) and not (zero == 3 and shared > 1):
                if fixed.zero is not None:
                    refused[
                        f"ZeRO-{zero} shards {'params, over fsdp' if zero == 3 else 'no params, and fsdp does'}"
                    ] += 1
                continue
            try:
                if placed is not None:
                    yield torus(chip, sizes, zero, placed, max(1, w.copies), job.shards)
                elif chip.measured:
                    yield measured(chip, sizes, zero, job.shards)
                else:
                    yield tree(chip, sizes, zero, max(1, w.copies), w.groups, job.shards)
            except Unplaced as error:
                refused[str(error)] += 1


def _impossible(chip: Chip, chips: int, fixed: Fixed) -> Iterator[str]:
    """Yield each contradiction in the axes' sizes that the user gave, which no sizes of the other axes can mend."""
    wanted = dict(fixed.axes)
    pods = wanted.get("pod", fixed.pods or 1)
    if fixed.pods and pods != fixed.pods:
        yield f"pod={pods} and {fixed.pods} pods contradict each other"
    if chip.kind != "tpu" and pods > 1:
        yield f"{chip.name} has no pods: replicas over its network are data={pods}"
    if chips % pods:
        yield f"{pods} pods do not divide {chips:,} chips"
    if (product := math.prod(wanted.values())) and chips % product:
        given = ", ".join(f"{axis}={size}" for axis, size in wanted.items())
        yield f"{given} {'does' if len(wanted) == 1 else 'do'} not divide {chips:,} chips"
    elif len(wanted) == len(AXES) and product != chips:
        yield f"all axes are given, and they make {product:,} chips"


def _sizes(chip: Chip, chips: int, fixed: Fixed, most: dict[str, int], refused: Counter) -> Iterator[tuple]:
    """Yield (sizes, placement on a torus or None)."""
    if chip.kind == "tpu":
        given = fixed.pods or dict(fixed.axes).get("pod")
        for pods in [given] if given else pod_counts(chip, chips):
            for replicas in ("data", "fsdp"):
                axes = tuple(a for a in AXES[1:] if most[a] > 1 and a not in {"data", "fsdp"} - {replicas})
                for sizes, placed in torus_meshes(chip, chips, pods, axes, tuple(most[a] for a in axes)):
                    if replicas == "data" or sizes.get("fsdp", 1) > 1:
                        yield sizes | {"pod": pods}, placed
        return
    wanted = dict(fixed.axes)

    def allowed(axis: str, size: int) -> bool:
        return size == wanted[axis] if axis in wanted else size <= most[axis]

    yield from (
        (sizes, None) for sizes in splits(("tensor", "expert", "context", "pipe", "fsdp", "data"), chips, allowed)
    )


def pod_counts(chip: Chip, chips: int) -> list[int]:
    """Return [the fewest pods that hold `chips` chips in equal slices]; ValueError if there is no such number."""
    least = max(1, -(-chips // chip.pod_chips)) if chip.pod else 1
    for pods in range(least, min(chips, 64 * least) + 1):
        if chips % pods == 0:
            try:
                slice_shape(chip, chips // pods)
            except ValueError:
                continue
            return [pods]
    slice_shape(chip, chips // least)  # raises, naming the next best
    return [least]


def rank(found: Estimate) -> tuple:
    """Return the sort key of an estimate: what fits comes first, then the shortest forecast by `sure_seconds`."""
    seconds = sure_seconds(found.job, found.network.chip, found.layout, found.forecast)
    return found.misses, seconds, found.worst, found.held.total


class Found(Sequence):
    """The best estimate of each mesh, the best first; each is computed when it is looked at."""

    def __init__(self, question: Question, chosen: list[tuple[tuple, Network, Layout]]):
        self.question = question
        self.chosen = simplest_first(chosen, max(TIE, usual_error(question.job, question.chip) or 0.0))
        self.known: dict[int, Estimate] = {}

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, i) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        if i not in self.known:
            self.known[i] = evaluate(self.question.job, *self.chosen[i][1:])
        return self.known[i]

    def layouts(self) -> Iterator[tuple[int, Layout]]:
        """Return pairs (index, layout) of all meshes, without computing their estimates."""
        return ((i, layout) for i, (_, _, layout) in enumerate(self.chosen))

    @property
    def faster(self) -> Estimate | None:
        """The layout with the shortest forecast among the ones that fit; None if it is the chosen one."""
        asked, count = self.question, self.fitting
        rare = (i for i, layout in self.layouts() if is_unusual(asked.job, asked.chip, layout))
        best = min((i for i in (0, 1, next(rare, count)) if i < count), key=lambda i: self[i].forecast, default=0)
        return self[best] if best else None

    @cached_property
    def fitting(self) -> int:
        """The number of meshes that fit."""
        return sum(key[0] == 0 for key, *_ in self.chosen)


@dataclass(frozen=True)
class SearchResult:
    """The meshes that were found, the number of layouts that were evaluated, and the refusals by reason."""

    found: Found
    layouts: int
    refused: Counter


def search(job: Job, chip: Chip, chips: int, fixed: Fixed = ANY) -> SearchResult:
    """Evaluate all layouts on `chips` chips, and keep each mesh with its best recipe."""
    whole(chips=chips)
    for dtype in (job.dtype, job.wide):
        chip.flops(dtype)  # ValueError for a chip without it
    refused: Counter = Counter()
    networks = list(_meshes(job, chip, chips, fixed, refused))
    options = [recipes(job, network, fixed) for network in networks]
    for network, found in zip(networks, options, strict=True):
        if not len(found):
            refused[no_recipe(job, network, fixed)] += 1
    kept = [i for i, found in enumerate(options) if len(found)]
    chosen, start, count = [], 0, 0
    while start < len(kept):
        end, rows = start, 0
        while end < len(kept) and (rows == 0 or rows + len(options[kept[end]]) <= ROWS):
            rows += len(options[kept[end]])
            end += 1
        chosen += _block(job, chip, [networks[i] for i in kept[start:end]], [options[i] for i in kept[start:end]])
        start, count = end, count + rows
    return SearchResult(Found(Question(job, chip, chips, fixed), chosen), count, refused)


def _block(job: Job, chip: Chip, networks: list[Network], options: list[np.ndarray]) -> list[tuple]:
    """Return (rank, network, layout) of each mesh with its best recipe: the fastest that fits, or else the smallest."""
    lengths = [len(found) for found in options]
    index = np.repeat(np.arange(len(networks)), lengths)
    chosen = np.concatenate(options)
    sizes = np.array([[network.sizes[axis] for axis in AXES] for network in networks], dtype=float)
    zero = np.array([network.zero for network in networks], dtype=np.int8)
    lanes = {name: Lane.columns([network.lanes[name] for network in networks]) for name in networks[0].lanes}

    def priced(which: np.ndarray, recipe: np.ndarray) -> Estimate:
        """Return the estimates of the meshes with these numbers, each with its recipe."""
        names = ("microbatches", "schedule", "chunks", "remat", "reduce")
        fields: dict[str, Any] = {axis: sizes[which, i] for i, axis in enumerate(AXES)} | {"zero": zero[which]}
        fields |= {name: recipe[:, i].astype(float if i in (0, 2) else np.int8) for i, name in enumerate(names)}
        over = {name: lane.take(which) for name, lane in lanes.items()}
        return Estimate(job, Network(chip, {}, 0, over), Layout(**fields))

    every = priced(index, chosen)
    misses = every.misses
    key = np.where(misses > 0, 1e12 + misses, sure_seconds(job, chip, every.layout, every.forecast))
    best = np.minimum.reduceat(key, np.cumsum([0, *lengths[:-1]]))
    hits = np.flatnonzero(key == best[index])
    firsts = hits[np.searchsorted(index[hits], np.arange(len(networks)))]
    found = priced(np.arange(len(networks)), chosen[firsts])
    keys = np.stack(np.broadcast_arrays(*rank(found)), 1)
    return [(tuple(keys[i].tolist()), networks[i], row(found.layout, i)) for i in range(len(networks))]


def plans(job: Job, chip: Chip, chips: int, fixed: Fixed = ANY) -> Found:
    """Return all meshes, each with its best recipe, the best first.

    Meshes on which the job does not fit come last, the one that needs least memory first.

    Raises:
        ValueError: The model and the chips' network allow no mesh at all; it gives the reasons.
    """
    found = search(job, chip, chips, fixed)
    if not found.found:
        counted = ((reason, f"{count:,} meshes") for reason, count in found.refused.most_common(4))
        why = "; ".join(f"{reason} ({count})" if count != "1 meshes" else reason for reason, count in counted)
        raise ValueError(
            f"no mesh of {chips:,} {chip.name} suits {job.config.name}: {why or 'its torus has no axes of these sizes'}"
            "\n  fix: choose other sizes, another number of chips, or a larger batch"
        )
    return found.found


def answer(asked: Question) -> Found:
    """Return the `plans` of a question."""
    return plans(asked.job, asked.chip, asked.chips, asked.fixed)
