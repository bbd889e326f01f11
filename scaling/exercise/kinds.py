"""The kinds of exercises, and how each is judged.

say       the file sets values, types or numbers, which must be right; known slips get a hint write     a function of
shards: the judge checks its types, ranks its results, and the trace the bytes it sends order     a pipeline's order of
work for each rank: whether it runs, how long it takes, and how much it keeps
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from scaling.exercise.compared import mismatch, ranks_say
from scaling.exercise.page import Exercise
from scaling.schedules.schedule import from_orders
from scaling.schedules.simulator import Deadlock, simulate


def say(exercise: Exercise, names: Mapping, text: str) -> tuple[bool, str]:
    """Judge values: `wanted` is {name: value}, `slips` is [{name, value, hint}] of known wrong values."""
    wanted = exercise.data["wanted"]
    for name, value in wanted.items():
        if name not in names:
            return False, f"{name} is not set"
        given = names[name]
        if problem := mismatch(given, value):
            for slip in exercise.data.get("slips", ()):
                if slip["name"] == name and not mismatch(given, slip["value"]):
                    return False, slip["hint"]
            return False, f"{name} is {given!r}: {problem}"
    return True, exercise.data.get("then", "all of it")


def order(exercise: Exercise, names: Mapping, text: str) -> tuple[bool, str]:
    """Judge a pipeline's order: `fn(rank, stages, microbatches)` gives a list such as ["F0", "F1", "B0", ...].

    `makespan` is the best known length in units of a forward, `live` the number of microbatches that rank 0 keeps.
    """
    stages, microbatches = exercise.data["stages"], exercise.data["microbatches"]
    orders = []
    for rank in range(stages):
        given = names[exercise.data["fn"]](rank, stages, microbatches)
        steps = sorted(given)
        all_of = sorted(f"{kind}{m}" for kind in "FB" for m in range(microbatches))
        if steps != all_of:
            missing, extra = [s for s in all_of if s not in steps], [s for s in steps if s not in all_of]
            what = (
                f"lacks {', '.join(missing)}" if missing else f"has {', '.join(extra)}" if extra else "repeats a step"
            )
            return False, f"rank {rank} {what}: it runs F and B of each of {microbatches} microbatches once"
        for m in range(microbatches):
            if given.index(f"B{m}") < given.index(f"F{m}"):
                return False, f"rank {rank} runs B{m} before F{m}"
        orders.append([(step[0], 0, int(step[1:])) for step in given])
    schedule = from_orders("yours", stages, microbatches, orders, tuple(range(stages)))
    try:
        timeline = simulate(schedule)
    except Deadlock as error:
        return False, f"it never ends: {str(error).splitlines()[0]}"
    span, live = float(timeline.makespan), max(timeline.live)
    if span > exercise.data["makespan"]:
        return (
            False,
            f"it takes {span:g} where {exercise.data['makespan']:g} are enough: a rank waits where it could work",
        )
    if live > exercise.data["live"]:
        return (
            False,
            f"a rank keeps {live} microbatches where {exercise.data['live']} are enough: it runs too far ahead",
        )
    return True, f"it takes {span:g}, and no rank keeps more than {live} microbatches"


Grader = Callable[[Exercise, Mapping, str], tuple[bool, str]]
KINDS: Mapping[str, Grader] = MappingProxyType({"say": say, "write": ranks_say, "order": order})
