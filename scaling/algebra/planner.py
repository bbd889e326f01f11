"""The cheapest plan of a program: in which layouts its operations are done, and how its arrays are brought into them.

A program is its values in order: arguments, then what operations make of them, each with the ways in which it is legal;
a matmul, a chain of products (`products`), a call in explicit mode and a whole program in auto mode are all that. They
are walked once. A state says in which layouts the arrays that are still needed are held; a value leads from it to
others, one for each way. An array that was resharded is held in both layouts. Of states alike the cheapest is kept, by
what is sent (or `cost`), then FLOPs, then steps. An array that is used for the last time is brought from all its states
at once (`resharding.shortest`), so that a chain of products takes one search for each array.

Where many arrays are alive there are too many states: the `beam` best are kept, by what they have cost and what each
array still costs at the least, on its own.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from scaling.algebra.law import Illegal, Inferred, LabelledOp, Reshape, Sizes
from scaling.algebra.layouts import Axes, DimAxes, Setting, arrangements, divides, retyped, subsets
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
from scaling.algebra.steps import Step


class Way(NamedTuple):
    """A way to compute a value: its operands' layouts, its own, and what it costs beside bringing them there."""

    needed: tuple[DimAxes, ...]
    result: DimAxes
    key: Key = START


class Value(NamedTuple):
    """A value of a program: its operands by number and the ways to compute it, none of an argument."""

    array: PlannedArray
    operands: tuple[int, ...] = ()
    ways: Sequence[Way] = ()


class ChosenWay(NamedTuple):
    """How a value is computed: the layouts that its operands are brought from, and the way."""

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
    """A value computed in one way: what that costs, what is held then; `lead`: what is needed of that operand."""

    key: Key
    held: Mapping[int, HeldLayouts]
    choice: ChosenWay
    lead: DimAxes | None


def cheapest(
    values: Sequence[Value], inputs: Sequence[DimAxes], within: Setting, beam: float = math.inf
) -> tuple[Key, list[ChosenWay]]:
    """The cheapest plan of a program: its cost and a choice for each value that is no argument; infinite and none if
    there is no plan.

    `inputs`: how the arguments are there, the first of the values; `within`: the Setting. `beam`: so many states are
    kept after a value, by what they have cost and what each array still costs at the least, on its own.
    """
    search = _Search(values, inputs, within)
    states = [SearchState(START, {n: (at,) for n, at in enumerate(inputs) if n in search.last})]
    for number in range(len(inputs), len(values)):
        states = search.after(states, number)
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
    """What a walk through the values of one program looks up."""

    def __init__(self, values: Sequence[Value], inputs: Sequence[DimAxes], within: Setting):
        self.values, self.inputs, self.within = values, inputs, within
        self.last = {n: number for number, value in enumerate(values) for n in value.operands}
        self.found: dict[tuple[int, DimAxes], Reach] = {}
        self.needs: dict[int, list[dict[HeldLayouts, float]]] = {}
        self.least: dict[tuple[int, DimAxes], float] = {}

    def sent(self, n: int, at: DimAxes, to: DimAxes) -> Key:
        """What it costs to bring an array from a layout into another; infinite where it cannot be."""
        array = self.values[n].array
        if (n, at) not in self.found:
            self.found[n, at] = ways_from(at, array, self.within)
        if to not in self.found[n, at]:
            return (math.inf, 0, 0)
        cost, flops, steps = self.found[n, at][to].key
        return (cost if self.within.cost else cost * array.weight), flops, steps

    def after(self, states: Sequence[SearchState], number: int) -> list[SearchState]:
        """The states after a value, the cheapest of those alike."""
        operands, lead, best, outcomes = self.values[number].operands, self.lead(states, number), {}, {}
        for sources in self.groups(states, lead):
            keys: dict[Any, Key] = {at: state.key for at, state in sources.items()}
            found = {at: Reached(key) for at, key in keys.items()}
            if lead is not None:
                found = shortest(keys, self.values[lead].array, self.within)
            held = next(iter(sources.values())).held
            own = {n: held[n] for n in operands if n != lead}
            rest = {n: h for n, h in held.items() if n not in operands}
            if (known := tuple(own.items())) not in outcomes:
                outcomes[known] = self.outcomes(own, lead, number)
            for outcome in outcomes[known]:
                if outcome.lead not in found:
                    continue
                key, after = key_sum(found[outcome.lead].key, outcome.key), rest | outcome.held
                alike = frozenset(after.items())
                if alike not in best or key < best[alike].key:
                    start, (starts, way) = begins_at(found, outcome.lead), outcome.choice
                    starts = tuple(start if n == lead else at for n, at in zip(operands, starts, strict=True))
                    best[alike] = SearchState(key, after, sources[start], ChosenWay(starts, way))
        return list(best.values())

    def lead(self, states: Sequence[SearchState], number: int) -> int | None:
        """The array that this value uses last and that is held in the most layouts, if in several."""
        operands = self.values[number].operands
        held = {
            n: {at for state in states for at in state.held[n]}
            for n in operands
            if self.last[n] == number and operands.count(n) == 1
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

    def outcomes(self, own: Mapping, lead: int | None, number: int) -> list[Outcome]:
        """A value's ways from operands held so: the best of those alike."""
        best: dict = {}
        for way in self.values[number].ways:
            key, held, starts, wanted = way.key, dict(own), [], None
            for n, to in zip(self.values[number].operands, way.needed, strict=True):
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
            held[number] = (way.result,)
            held = {n: h for n, h in held.items() if self.last.get(n, 0) > number}
            alike = frozenset(held.items()), wanted
            if key[0] < math.inf and (alike not in best or key < best[alike].key):
                best[alike] = Outcome(key, held, ChosenWay(tuple(starts), way), wanted)
        return list(best.values())

    def promise(self, state: SearchState) -> tuple[float, Key]:
        """What a state has cost and will cost at the least."""
        made = range(len(self.inputs), len(self.values))
        for n in reversed(made if not self.needs else ()):  # once; from the last one that is made
            self.needs[n] = [self.rest(n, number) for number, value in enumerate(self.values) if n in value.operands]
        held = ((n, layouts) for n, layouts in state.held.items() if n in made)
        return state.key[0] + sum(min(self.later(n, at) for at in layouts) for n, layouts in held), state.key

    def later(self, n: int, at: DimAxes) -> float:
        """What an array that is made costs at the least from a layout on, on its own."""
        if (n, at) not in self.least:
            self.least[n, at] = 0.0
            for needs in self.needs[n]:
                costs = (sum(self.sent(n, at, to)[0] for to in own) + rest for own, rest in needs.items())
                self.least[n, at] = max(self.least[n, at], min(costs))
        return self.least[n, at]

    def rest(self, n: int, number: int) -> dict[HeldLayouts, float]:
        """By the layouts that a value may need an array in, what it and those after it cost beside at the least: the
        operands of a value that are made share that."""
        _, operands, ways = self.values[number]
        sharing, rests = len({m for m in operands if m >= len(self.inputs)}), {}
        for way in ways:
            rest = self.later(number, way.result)
            own: dict[DimAxes, None] = {}
            for m, to in zip(operands, way.needed, strict=True):
                if m == n:
                    own[to] = None
                elif m < len(self.inputs):
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


def ways_of(
    op: LabelledOp | Reshape,
    operands: Sequence[PlannedArray],
    result: PlannedArray,
    may: Sequence[Axes],
    within: Setting,
    flops: int,
) -> list[Way]:
    """The ways of an operation of so many FLOPs in all, each with one device's, in the units of the setting; operand i
    may be unreduced over the axes `may[i]`."""
    axes, ways = tuple(within.sizes), []
    shapes = [array.shape for array in operands]
    for needed, made in dict.fromkeys(legal_ways(op, shapes, axes, may, within.sizes)):
        if not divides(made, result.shape, within.sizes):
            continue
        parts, cost = within.count({axis for at in needed for axis in itertools.chain(*at.dims)}), 0
        if within.cost is not None:
            before = tuple(retyped(array.spec, at) for array, at in zip(operands, needed, strict=True))
            cost = within.cost(Step("Einsum", (), before, retyped(result.spec, made)))
        # the FLOPs divide into any number of parts
        ways.append(Way(needed, made, (cost, flops * within.count(axes) // parts, 0)))
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
