"""Slow ranks in programs whose answer is known: who, where, by how much; and nobody where there is nothing."""

import random
from dataclasses import replace

import pytest
from synthetic_traces import play

from scaling.profile import of
from scaling.profile.clock import waited_within
from scaling.profile.stragglers import END


def product(*seconds, call=0.001):
    """A product that takes each rank so long, and a collective."""
    return [("work", "P", list(seconds)), ("call", "C", call)]


def slow(programs, ranks: int = 2):
    return of(play(programs, ranks)[0]).stragglers()


@pytest.mark.parametrize("seed", range(20))
def test_a_planted_delay_is_found_exactly(seed):
    """In a product, or in the gap before it, of one run of its line, in every step; every line runs twice."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4])
    once = [
        item
        for i in range(rng.randint(2, 5))
        for item in (("gap", "", 0.001), ("work", f"P{i}", 0.01 + 0.01 * rng.random()), ("call", f"C{i}", 0.005))
    ]
    items = [(kind, line, t if kind == "call" else [t] * ranks) for kind, line, t in (*once, *once)]
    rank, place = rng.randrange(ranks), rng.choice([i for i, item in enumerate(items) if item[0] != "call"])
    items[place][2][rank] += 0.03
    (found,) = slow([items] * 4, ranks)
    inside = items[place][0] == "work"
    line = items[place if inside else place + 1][1]
    occurrence = 1 + (place >= len(once))
    assert (found.rank, found.line, found.inside, found.occurrence) == (rank, line, inside, occurrence)
    assert (found.seconds, found.waited) == (pytest.approx(0.03), pytest.approx(0.03))
    assert str(found).startswith(f"rank {rank} is 30.0 ms slow {'in' if inside else 'before'} {line}")


def test_a_rank_is_slow_though_its_group_alone_waits():
    """Ranks 2 and 3 meet each other only: 0 and 1 do not wait for 3, and 2 waits for all that it is late by."""
    pairs = [play([product(0.01, second)] * 4, 2)[0] for second in (0.01, 0.04)]
    others = [
        replace(own, rank=own.rank + 2, runs=tuple(replace(run, group=run.group and (2, 3)) for run in own.runs))
        for own in pairs[1]
    ]
    (found,) = of([*pairs[0], *others]).stragglers()
    assert (found.rank, found.line, found.inside) == (3, "P", True)
    assert found.waited == pytest.approx(0.03)


IN_EACH = [item for i in range(10) for item in (("work", f"P{i}", [0.01, 0.012]), ("call", f"C{i}", 0.001))]


@pytest.mark.parametrize(
    ("programs", "found"),
    [
        ([[*product(0.01, 0.01), ("gap", "", [0.0, 0.02])]] * 4, [(1, END, False, None, 0.02)]),
        ([product(0.05, 0.06 + extra) for extra in (-0.009, 0.009, 0, 0.009)], []),
        ([IN_EACH] * 4, [(1, "", True, None, 0.02)]),
        ([[("work", "P", [0.01, 0.05])]] * 4, []),
        ([[*product(0.05, 0.05), ("work", "Q", [0.05, 0.08]), ("call", "C", 0.001)]], [(1, "Q", True, 0, 0.03)]),
    ],
    ids=["after the last line", "by less than steps differ", "in every line", "nobody waits", "one step alone"],
)
def test_who_is_slow(programs, found):
    assert [(s.rank, s.line, s.inside, s.step, pytest.approx(s.seconds)) for s in slow(programs)] == found


def test_a_delay_in_one_step_is_found_once():
    """50 ms in the third of five steps; not if the rank waited for a core meanwhile."""
    steps = [product(0.05, 0.05)] * 5
    steps[2] = product(0.05, 0.1)
    zero, one = play(steps, 2)[0]
    (found,) = of([zero, one]).stragglers()
    assert (found.rank, found.line, found.inside, found.step) == (1, "P", True, 2)
    assert found.seconds == pytest.approx(0.05)
    waited = ((0.0, 0.0), (one.marks[2], 0.001), (one.marks[3], 0.05), (one.marks[-1], 0.05))
    assert of([zero, replace(one, waited=waited)]).stragglers() == []


def test_waiting_for_a_core_is_counted_between_looks():
    waited = [(0.0, 0.0), (1.0, 0.5), (2.0, 0.5), (3.0, 0.9)]
    assert waited_within(waited, 0.2, 0.8) == pytest.approx(0.5)
    assert waited_within(waited, 1.0, 2.0) == pytest.approx(0.0)
    assert waited_within(waited, 1.5, 2.5) == pytest.approx(0.4)
    assert waited_within((), 0.0, 1.0) == 0.0
