"""The cheapest plan of a program: in which layouts its operations are done, and how its arrays are brought into them.

An operation is a stage with the ways in which it is legal; a matmul, a chain of products (`products`), a call in
explicit mode and a whole program in auto mode are all lists of stages. They are walked once. A state says in which
layouts the arrays that are still needed are held; a stage leads from it to others, one for each way. An array that was
resharded is held in both layouts. Of states alike the cheapest is kept, by what is sent (or `cost`), then FLOPs, then
steps. An array that a stage uses last is brought from all its states at once (`resharding.shortest`), so that a chain
of products takes one search for each array.

Where many arrays are alive there are too many states: the `beam` best are kept, by what they have cost and what each
array still costs at the least, on its own.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from scaling.algebra.law import Illegal, Inferred, LabelledOp, Sizes
from scaling.algebra.layouts import Axes, DimAxes, Setting, arrangements, divides, subsets
from scaling.algebra.resharding import (
    START,
    Key,
    PlannedArray,
    Reach,
    Reached,
    begins_at,
    key_sum,
    shortest,
    ways_from,
)


class Way(NamedTuple):
    """A way to compute a stage: its operands' layouts, its result's, and what it costs beside bringing them there."""

    needed: tuple[DimAxes, ...]
    result: DimAxes
    key: Key = START


class PlannedOp(NamedTuple):
    """An operation: its operands and its result by number (a result of the program has none), and the ways."""

    operands: tuple[int, ...]
    result: int | None
    ways: Sequence[Way]


class ChosenWay(NamedTuple):
    """How a stage is done: the layouts that its operands are brought from, and the way."""

    starts: tuple[DimAxes, ...]
    way: Way


HeldLayouts = tuple[DimAxes, ...]  # the layouts in which an array is held, sorted


class SearchState(NamedTuple):
    """What it took to come here, what is held, and the state and the choice that led here."""

    key: Key
    held: Mapping[int, HeldLayouts]
    before: "SearchState | None" = None
    choice: ChosenWay | None = None


class Outcome(NamedTuple):
    """A stage done in one way: what that costs, what is held of its arrays then; `lead`: what is needed of that one."""

    key: Key
    held: Mapping[int, HeldLayouts]
    choice: ChosenWay
    lead: DimAxes | None


def cheapest(
    arrays: Sequence[PlannedArray], inputs: Mapping[int, DimAxes], stages: Sequence[PlannedOp], within, beam=math.inf
) -> tuple[Key, list[ChosenWay]]:
    """The cheapest plan of a program: its cost and a choice for each stage; infinite and none if there is no plan.

    `arrays`: by number; `inputs`: those that are there, and how; `within`: the Setting. `beam`: so many states are
    kept after a stage, by what they have cost and what each array still costs at the least, on its own.
    """
    search = _Search(arrays, inputs, stages, within)
    states = [SearchState(START, {n: (at,) for n, at in inputs.items() if n in search.last})]
    for number, stage in enumerate(stages):
        states = search.after(states, number, stage)
        if len(states) > beam:
            states = sorted(states, key=search.promise)[: int(beam)]
    if not states:
        return (math.inf, 0, 0), []
    state, choices = min(states, key=lambda state: state.key), []
    key = state.key
    while state.before is not None and state.choice is not None:
        choices.append(state.choice)
        state = state.before
    return key, choices[::-1]


class _Search:
    """What a walk through the stages of one program looks up."""

    def __init__(self, arrays: Sequence[PlannedArray], inputs, stages: Sequence[PlannedOp], within: Setting):
        self.arrays, self.inputs, self.stages, self.within = arrays, inputs, stages, within
        self.last = {n: i for i, stage in enumerate(stages) for n in stage.operands}
        self.made = {stage.result for stage in stages if stage.result is not None}
        self.found: dict[tuple[int, DimAxes], Reach] = {}
        self.needs: dict[int, list[dict[HeldLayouts, float]]] = {}
        self.least: dict[tuple[int, DimAxes], float] = {}

    def sent(self, n: int, at: DimAxes, to: DimAxes) -> Key:
        """What it costs to bring an array from a layout into another; infinite where it cannot be."""
        array = self.arrays[n]
        if (n, at) not in self.found:
            self.found[n, at] = ways_from(at, array, self.within)
        if to not in self.found[n, at]:
            return (math.inf, 0, 0)
        cost, flops, steps = self.found[n, at][to].key
        return (cost if self.within.cost else cost * array.weight), flops, steps

    def after(self, states: Sequence[SearchState], number: int, stage: PlannedOp) -> list[SearchState]:
        """The states after a stage, the cheapest of those alike."""
        lead, best, outcomes = self.lead(states, number, stage), {}, {}
        for sources in self.groups(states, lead):
            keys: dict[Any, Key] = {at: state.key for at, state in sources.items()}
            found = {at: Reached(key) for at, key in keys.items()}
            if lead is not None:
                found = shortest(keys, self.arrays[lead], self.within)
            held = next(iter(sources.values())).held
            own = {n: held[n] for n in stage.operands if n != lead}
            rest = {n: h for n, h in held.items() if n not in stage.operands}
            if (known := tuple(own.items())) not in outcomes:
                outcomes[known] = self.outcomes(own, lead, number, stage)
            for outcome in outcomes[known]:
                if outcome.lead not in found:
                    continue
                key, after = key_sum(found[outcome.lead].key, outcome.key), rest | outcome.held
                alike = frozenset(after.items())
                if alike not in best or key < best[alike].key:
                    start, (starts, way) = begins_at(found, outcome.lead), outcome.choice
                    starts = tuple(start if n == lead else at for n, at in zip(stage.operands, starts, strict=True))
                    best[alike] = SearchState(key, after, sources[start], ChosenWay(starts, way))
        return list(best.values())

    def lead(self, states: Sequence[SearchState], number: int, stage: PlannedOp) -> int | None:
        """The array that this stage uses last and that is held in the most layouts, if in several."""
        held = {
            n: {at for state in states for at in state.held[n]}
            for n in stage.operands
            if self.last[n] == number and stage.operands.count(n) == 1
        }
        lead = max(held, key=lambda n: len(held[n]), default=None)
        return lead if lead is not None and len(held[lead]) > 1 else None

    def groups(self, states: Sequence[SearchState], lead: int | None) -> Iterable[dict[Any, SearchState]]:
        """The states that differ in nothing but the layout of the lead: the cheapest for each of its layouts."""
        if lead is None:
            return [{None: state} for state in states]
        groups: dict = {}
        for state in states:
            group = groups.setdefault(frozenset((n, h) for n, h in state.held.items() if n != lead), {})
            for at in state.held[lead]:
                if at not in group or state.key < group[at].key:
                    group[at] = state
        return groups.values()

    def outcomes(self, own: Mapping, lead: int | None, number: int, stage: PlannedOp) -> list[Outcome]:
        """A stage's ways from operands held so: the best of those alike."""
        best: dict = {}
        for way in stage.ways:
            key, held, starts, wanted = way.key, dict(own), [], None
            for n, to in zip(stage.operands, way.needed, strict=True):
                if n == lead:
                    wanted = to
                    starts.append(to)
                    continue
                start = to if to in held[n] else min(held[n], key=lambda at, n=n, to=to: self.sent(n, at, to))
                starts.append(start)
                if start != to:
                    sent = self.sent(n, start, to)
                    key = key_sum(key, sent)
                    held[n] = tuple(sorted((*held[n], to))) if sent[0] else held[n]
            if stage.result in self.last:
                held[stage.result] = (way.result,)
            held = {n: h for n, h in held.items() if self.last[n] > number}
            alike = frozenset(held.items()), wanted
            if key[0] < math.inf and (alike not in best or key < best[alike].key):
                best[alike] = Outcome(key, held, ChosenWay(tuple(starts), way), wanted)
        return list(best.values())

    def promise(self, state: SearchState) -> tuple[float, Key]:
        """What a state has cost and will cost at the least."""
        for n in sorted(self.made - self.needs.keys(), reverse=True):  # once; from the last one that is made
            self.needs[n] = [self.rest(n, stage) for stage in self.stages if n in stage.operands]
        made = ((n, held) for n, held in state.held.items() if n in self.made)
        return state.key[0] + sum(min(self.later(n, at) for at in held) for n, held in made), state.key

    def later(self, n: int, at: DimAxes) -> float:
        """What an array that is made costs at the least from a layout on, on its own."""
        if (n, at) not in self.least:
            self.least[n, at] = 0.0
            for needs in self.needs[n]:
                costs = (sum(self.sent(n, at, to)[0] for to in own) + rest for own, rest in needs.items())
                self.least[n, at] = max(self.least[n, at], min(costs))
        return self.least[n, at]

    def rest(self, n: int, stage: PlannedOp) -> dict[HeldLayouts, float]:
        """By the layouts that a stage may need an array in, what the stage and those after it cost beside at the least:
        the arrays of a stage that are made share that."""
        sharing, rests = len({*stage.operands} & self.made), {}
        for way in stage.ways:
            rest = 0.0 if stage.result is None else self.later(stage.result, way.result)
            own: dict[DimAxes, None] = {}
            for m, to in zip(stage.operands, way.needed, strict=True):
                if m == n:
                    own[to] = None
                elif m in self.inputs:
                    rest += self.sent(m, self.inputs[m], to)[0]
            rests[tuple(own)] = min(rests.get(tuple(own), math.inf), rest / sharing)
        return rests


def legal_ways(op, shapes: Sequence[Sizes | None], axes: Axes, may: Sequence[Axes], sizes) -> Iterator[Inferred]:
    """Every (operands as the kernel takes them, result) of an operation, whose operands divide over the mesh.

    Operand i may be unreduced over the axes `may[i]`.
    """
    if isinstance(op, LabelledOp):
        for needed, result in op.legal(axes, may):
            if all(divides(at, shape, sizes) for at, shape in zip(needed, shapes, strict=True)):
                yield needed, result
        return
    for at in all_layouts(shapes[0] or (), sizes, axes, may[0]):
        with contextlib.suppress(Illegal):
            yield op.infer((at,), shapes, sizes)


def ways_of(op, shapes: Sequence[Sizes | None], may: Sequence[Axes], within: Setting, flops: int) -> list[Way]:
    """The ways of an operation of so many FLOPs in all, each with one device's, in the units of the setting."""
    axes, ways = tuple(within.sizes), []
    for needed, result in dict.fromkeys(legal_ways(op, shapes, axes, may, within.sizes)):
        parts = within.count({axis for at in needed for axis in itertools.chain(*at.dims)})
        ways.append(
            Way(needed, result, (0, flops * within.count(axes) // parts, 0))
        )  # divides into any number of parts
    return ways


def all_layouts(shape: Sizes, sizes, axes: Axes, unreduced: Axes = ()) -> list[DimAxes]:
    """Every layout of an array of this shape over some of the axes; unreduced over some of `unreduced`."""
    found = []
    for dims in arrangements(tuple(axes), len(shape)):
        used = set(itertools.chain(*dims))
        for over in subsets(tuple(sorted(set(unreduced) - used)), least=0):
            if divides(at := DimAxes(dims, over), shape, sizes):
                found.append(at)
    return found
