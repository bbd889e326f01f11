"""Slow ranks in programs whose answer is known: who, where, by how much; and nobody where there is nothing."""

import random
from dataclasses import replace

import pytest
from synthetic_traces import play

from scaling.profile import RankTimeline, of
from scaling.profile.cores import waited_within
from scaling.profile.stragglers import END


def program(rng: random.Random, ranks: int) -> list:
    """Products that take all ranks the same, gaps, collectives; every line twice."""
    items = []
    for i in range(rng.randint(2, 5)):
        items.append(("gap", [0.001] * ranks))
        items.append(("work", f"P{i}", [0.01 + 0.01 * rng.random()] * ranks))
        items.append(("call", f"C{i}", 0.005))
    return [*items, *items]


def slowed(item, rank: int, seconds: float):
    kind, *rest = item
    times = [t + seconds * (r == rank) for r, t in enumerate(rest[-1])]
    return (kind, *rest[:-1], times)


@pytest.mark.parametrize("seed", range(20))
def test_a_planted_delay_is_found_exactly(seed):
    """In a product, or in the gap before it, of one run of its line, in every step."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4])
    items, rank = program(rng, ranks), rng.randrange(ranks)
    place = rng.choice([i for i, item in enumerate(items) if item[0] in ("gap", "work")])
    inside = items[place][0] == "work"
    items[place] = slowed(items[place], rank, 0.03)
    (found,) = of(play(items, ranks, steps=4)[0]).stragglers()
    line = items[place if inside else place + 1][1]
    occurrence = sum(item[1] == line for item in items[: place + 2] if item[0] == "work")
    assert (found.rank, found.line, found.inside, found.occurrence) == (rank, line, inside, occurrence)
    assert found.seconds == pytest.approx(0.03)
    assert found.waited == pytest.approx(0.03)
    assert str(found).startswith(f"rank {rank} is 30.0 ms slow {'in' if inside else 'before'} {line}")


def test_a_rank_is_slow_though_its_group_alone_waits():
    """Ranks 2 and 3 meet each other only: 0 and 1 do not wait for 3, and 2 waits for all that it is late by."""
    items = [("work", "P", [0.01, 0.01]), ("call", "C", 0.001)]
    pairs = play(items, 2, steps=4)[0], play([slowed(items[0], 1, 0.03), items[1]], 2, steps=4)[0]
    others = [
        replace(own, rank=own.rank + 2, runs=tuple(replace(run, group=run.group and (2, 3)) for run in own.runs))
        for own in pairs[1]
    ]
    (found,) = of([*pairs[0], *others]).stragglers()
    assert (found.rank, found.line, found.inside) == (3, "P", True)
    assert found.waited == pytest.approx(0.03)


def test_a_delay_after_the_last_line_is_named_as_such():
    items = [("work", "P", [0.01, 0.01]), ("call", "C", 0.001), ("gap", [0.0, 0.02])]
    (found,) = of(play(items, 2, steps=4)[0]).stragglers()
    assert (found.rank, found.line, found.inside) == (1, END, False)


def test_who_is_late_by_less_than_steps_differ_is_not_slow():
    """A product that takes rank 1 10 ms longer, give or take 9 ms, from step to step."""
    steps = [
        play([("work", "P", [0.05, 0.06 + extra]), ("call", "C", 0.001)], 2)[0] for extra in (-0.009, 0.009, 0, 0.009)
    ]
    timelines = []
    for rank in (0, 1):
        marks, runs = [0.0], []
        for step in steps:
            runs += step[rank].moved(marks[-1]).runs
            marks.append(marks[-1] + max(each.marks[-1] for each in step))
        timelines.append(RankTimeline(rank, tuple(marks), tuple(runs)))
    assert of(timelines).stragglers() == []


def test_a_rank_that_is_slower_in_every_line_is_named_too():
    items = [item for i in range(10) for item in (("work", f"P{i}", [0.01, 0.012]), ("call", f"C{i}", 0.001))]
    (found,) = of(play(items, 2, steps=4)[0]).stragglers()
    assert (found.rank, found.line) == (1, "")
    assert found.seconds == pytest.approx(0.02)


def test_a_slow_rank_that_nobody_waits_for_is_none():
    """Without a collective ranks do not meet."""
    assert of(play([("work", "P", [0.01, 0.05])], 2, steps=4)[0]).stragglers() == []


def test_a_delay_in_one_step_is_found_once():
    """50 ms in the third of five steps; not if the rank waited for a core meanwhile."""
    items = [("work", "P", [0.05, 0.05]), ("call", "C", 0.001)]
    plain, late = (play(steps, 2)[0] for steps in (items, [slowed(items[0], 1, 0.05), items[1]]))
    steps, timelines = [plain, plain, late, plain, plain], []
    for rank in (0, 1):
        marks, runs = [0.0], []
        for step in steps:
            runs += step[rank].moved(marks[-1]).runs
            marks.append(marks[-1] + step[rank].marks[-1])
        timelines.append(RankTimeline(rank, tuple(marks), tuple(runs)))
    (found,) = of(timelines).stragglers()
    assert (found.rank, found.line, found.inside, found.step) == (1, "P", True, 2)
    assert found.seconds == pytest.approx(0.05)
    begin, end = timelines[1].steps[2]
    waited = ((0.0, 0.0), (begin, 0.001), (end, 0.05), (timelines[1].marks[-1], 0.05))
    assert of([timelines[0], replace(timelines[1], waited=waited)]).stragglers() == []


def test_one_step_alone():
    """Of a single step a delay of 30 ms is found too."""
    items = [("work", "P", [0.05, 0.05]), ("call", "C", 0.001), ("work", "Q", [0.05, 0.08]), ("call", "C", 0.001)]
    (found,) = of(play(items, 2)[0]).stragglers()
    assert (found.rank, found.line, found.step) == (1, "Q", 0)


def test_waiting_for_a_core_is_counted_between_looks():
    waited = [(0.0, 0.0), (1.0, 0.5), (2.0, 0.5), (3.0, 0.9)]
    assert waited_within(waited, 0.2, 0.8) == pytest.approx(0.5)
    assert waited_within(waited, 1.0, 2.0) == pytest.approx(0.0)
    assert waited_within(waited, 1.5, 2.5) == pytest.approx(0.4)
    assert waited_within((), 0.0, 1.0) == 0.0
