"""Search for the cheapest plan of a program: the layout of each operation, and the way its arrays get there.

A program is its values in order: the arguments, then the results of operations, each with the ways in which it is
legal. A matmul, a chain of products (`products`), a call in explicit mode and a whole program in auto mode are all
such programs. The search walks through the values once. A state records the layouts of the arrays that are still
needed, and each way to compute the next value leads to another state. A resharded array is available in both layouts.
Of states with equal layouts the cheapest is kept, by the bytes sent (or `cost`), then FLOPs, then steps. An array that
is used for the last time is brought from all its states at once (`resharding.shortest`), so that a chain of products
takes one search for each array.

With many arrays alive there are too many states. Then the `beam` best are kept, ranked by their cost so far plus a
lower bound for each remaining array, computed separately.
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
    """A way to compute a value: the operands' layouts, the result's, and the cost without resharding operands."""

    needed: tuple[DimAxes, ...]
    result: DimAxes
    key: Key = START


class Value(NamedTuple):
    """A value of a program: its array, its operands by number, and the ways to compute it (none for an argument)."""

    array: PlannedArray
    operands: tuple[int, ...] = ()
    ways: Sequence[Way] = ()


class ChosenWay(NamedTuple):
    """The choice for one value: the layouts from which its operands are resharded, and the way to compute it."""

    starts: tuple[DimAxes, ...]
    way: Way


HeldLayouts = tuple[DimAxes, ...]  # the layouts in which an array is available, sorted


class SearchState(NamedTuple):
    """A state of the search: its cost, the layouts of each live array, and the state and choice that led to it."""

    key: Key
    held: Mapping[int, HeldLayouts]
    before: "SearchState | None" = None
    choice: ChosenWay | None = None


class Outcome(NamedTuple):
    """A value computed in one way: its cost, the layouts afterwards, and the layout that the `lead` operand needs."""

    key: Key
    held: Mapping[int, HeldLayouts]
    choice: ChosenWay
    lead: DimAxes | None


def cheapest(
    values: Sequence[Value], inputs: Sequence[DimAxes], within: Setting, beam: float = math.inf
) -> tuple[Key, list[ChosenWay]]:
    """Search for the cheapest plan of a program.

    Args:
        values: the values of the program; the arguments come first.
        inputs: the layouts of the arguments.
        within: the Setting.
        beam: the number of states kept after each value, ranked by their cost so far plus a lower bound for each array.

    Returns:
        The cost, and a choice for each value that is not an argument. There is a plan, since whole operands are legal.
    """
    search = _Search(values, inputs, within)
    states = [SearchState(START, {n: (at,) for n, at in enumerate(inputs) if n in search.last})]
    for number in range(len(inputs), len(values)):
        states = search.after(states, number)
        if len(states) > beam:
            states = sorted(states, key=search.promise)[: int(beam)]
    state, choices = min(states, key=lambda state: state.key), []
    key = state.key
    while state.before is not None and state.choice is not None:
        choices.append(state.choice)
        state = state.before
    return key, choices[::-1]


class _Search:
    """The lookup tables of one walk through the values of a program."""

    def __init__(self, values: Sequence[Value], inputs: Sequence[DimAxes], within: Setting):
        self.values, self.inputs, self.within = values, inputs, within
        self.last = {n: number for number, value in enumerate(values) for n in value.operands}
        self.found: dict[tuple[int, DimAxes], Reach] = {}
        self.needs: dict[int, list[dict[HeldLayouts, float]]] = {}
        self.least: dict[tuple[int, DimAxes], float] = {}

    def sent(self, n: int, at: DimAxes, to: DimAxes) -> Key:
        """Return the cost of bringing an array from one layout into another, infinite if it cannot be done."""
        array = self.values[n].array
        if (n, at) not in self.found:
            self.found[n, at] = ways_from(at, array, self.within)
        if to not in self.found[n, at]:
            return (math.inf, 0, 0)
        cost, flops, steps = self.found[n, at][to].key
        return (cost if self.within.cost else cost * array.weight), flops, steps

    def after(self, states: Sequence[SearchState], number: int) -> list[SearchState]:
        """Return the states after a value, the cheapest for each combination of layouts."""
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
        """Return the array that this value uses last and that has the most layouts; None if none has several."""
        operands = self.values[number].operands
        held = {
            n: {at for state in states for at in state.held[n]}
            for n in operands
            if self.last[n] == number and operands.count(n) == 1
        }
        lead = max(held, key=lambda n: len(held[n]), default=None)
        return lead if lead is not None and len(held[lead]) > 1 else None

    def groups(self, states: Sequence[SearchState], lead: int | None) -> Iterable[dict[Any, SearchState]]:
        """Group the states that differ only in the layout of the lead, and keep the cheapest for each layout."""
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
        """Compute a value in each way from operands in these layouts, and keep the best of equal outcomes."""
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
        """Return a lower bound for the total cost of a plan through this state, then its cost so far."""
        made = range(len(self.inputs), len(self.values))
        for n in reversed(made if not self.needs else ()):  # once, from the last value that is computed
            self.needs[n] = [self.rest(n, number) for number, value in enumerate(self.values) if n in value.operands]
        held = ((n, layouts) for n, layouts in state.held.items() if n in made)
        return state.key[0] + sum(min(self.later(n, at) for at in layouts) for n, layouts in held), state.key

    def later(self, n: int, at: DimAxes) -> float:
        """Return a lower bound for the later cost of a computed array, taken separately, from one of its layouts."""
        if (n, at) not in self.least:
            self.least[n, at] = 0.0
            for needs in self.needs[n]:
                costs = (sum(self.sent(n, at, to)[0] for to in own) + rest for own, rest in needs.items())
                self.least[n, at] = max(self.least[n, at], min(costs))
        return self.least[n, at]

    def rest(self, n: int, number: int) -> dict[HeldLayouts, float]:
        """Return {the layouts in which a value needs array `n`: a lower bound of its other costs}.

        These are the costs of its other arguments and of the values after it. Its computed operands share them equally.
        """
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
    """Yield each legal (operands as the kernel takes them, result) of an operation whose operands divide over the mesh.

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
    """Return the ways to do an operation, each with the FLOPs of one device in the units of the setting.

    Args:
        op: the operation.
        operands: its operands.
        result: its result.
        may: the axes over which each operand may be unreduced.
        within: the Setting.
        flops: the FLOPs of all devices together.
    """
    axes, ways = tuple(within.sizes), []
    shapes = [array.shape for array in operands]
    for needed, made in dict.fromkeys(legal_ways(op, shapes, axes, may, within.sizes)):
        parts, cost = within.count({axis for at in needed for axis in itertools.chain(*at.dims)}), 0
        if within.cost is not None:
            before = tuple(retyped(array.spec, at) for array, at in zip(operands, needed, strict=True))
            cost = within.cost(Step("Einsum", (), before, retyped(result.spec, made)))
        # the FLOPs divide into any number of parts
        ways.append(Way(needed, made, (cost, flops * within.count(axes) // parts, 0)))
    return ways


def all_layouts(shape: Sizes, sizes, axes: Axes, unreduced: Axes = ()) -> list[DimAxes]:
    """Return every layout of an array of this shape over some of the axes, and unreduced over some of `unreduced`."""
    found = []
    for dims in arrangements(tuple(axes), len(shape)):
        used = set(itertools.chain(*dims))
        for over in subsets(tuple(sorted(set(unreduced) - used)), least=0):
            if divides(at := DimAxes(dims, over), shape, sizes):
                found.append(at)
    return found
