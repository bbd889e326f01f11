"""Profiles of programs whose answer is known: waiting, exposed and hidden; the parts of a step; sets of times."""

import random

import pytest
from synthetic_traces import play, program

from scaling.profile import LineRun, RankTimeline, intervals, of
from scaling.profile.clock import offset
from scaling.profile.timeline import disjoint


def run(op, called, end, rank=0, **fields):
    return LineRun(op, op, ("X",), called, end, ((called, end),), after="A[B]", **fields)


@pytest.mark.parametrize("seed", range(30))
def test_random_programs_are_split_exactly(seed):
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4])
    profile, truth = play([program(rng, ranks)], ranks)
    profile = of(profile)
    for rank, timeline in enumerate(profile.timelines):
        runs = [run for run in timeline.runs if run.communicates]
        still = intervals.union(i for run in runs for i in run.held)
        own = [found for (_, r), found in sorted(truth.items()) if r == rank]
        hidden = [intervals.length(intervals.subtract([transfer], still)) for *_, transfer in own]
        assert [r.waiting for r in runs] == pytest.approx([waiting for waiting, *_ in own], abs=1e-9)
        assert [r.exposed for r in runs] == pytest.approx([exposed for _, exposed, _ in own], abs=1e-9)
        assert [r.hidden for r in runs] == pytest.approx(hidden, abs=1e-9)
        (part,) = profile.parts(rank)
        assert part.total == pytest.approx(part.step, abs=1e-9)
        assert part.products == pytest.approx(sum(r.end - r.called for r in timeline.runs if not r.communicates))
        assert part.waiting == pytest.approx(sum(waiting for waiting, *_ in own), abs=1e-9)
        assert part.exposed == pytest.approx(sum(exposed for _, exposed, _ in own), abs=1e-9)


def test_who_is_waited_for_is_who_came_last():
    timelines, _ = play([[("work", "P", [0.1, 0.5, 0.2]), ("call", "C", 0.3)]], 3)
    found = [timeline.runs[1] for timeline in of(timelines).timelines]
    assert [s.behind for s in found] == [1, None, 1]
    assert [s.waiting for s in found] == pytest.approx([0.4, 0.0, 0.3])
    assert [s.exposed for s in found] == pytest.approx([0.3, 0.3, 0.3])


def test_only_those_that_are_needed_are_waited_for():
    """In a ring rank 0 hears from 1 alone, and goes on before 2 has come. One rank alone waits for nobody."""
    times = (0.0, 0.3), (0.2, 0.9), (0.8, 0.9)
    runs = [run("CollectivePermute", *at, group=(0, 1, 2), peers=((r + 1) % 3,)) for r, at in enumerate(times)]
    found = of([RankTimeline(r, (0.0, 1.0), (own,)) for r, own in enumerate(runs)]).timelines
    zero, one, two = (timeline.runs[0] for timeline in found)
    assert (zero.behind, zero.waiting, zero.exposed) == (1, pytest.approx(0.2), pytest.approx(0.1))
    assert (one.behind, one.waiting) == (2, pytest.approx(0.6))
    assert two.behind is None
    alone = run("AllReduce", 0.0, 1.0, group=(0,))
    assert of([RankTimeline(0, (0.0, 1.0), (alone,))]).timelines[0].runs == (alone,)
    assert (alone.waiting, alone.exposed, alone.hidden) == (0, 0, 0)


def test_messages_meet_by_their_ends_and_order():
    """Two messages each way between ranks 0 and 1; the second Recv waits for a late Send."""
    rows = [[("Send", 0.0, 0.1), ("Recv", 0.2, 3.5), ("Send", 5.0, 5.5)],
            [("Recv", 0.5, 1.0), ("Send", 3.0, 3.5), ("Recv", 4.0, 5.5)]]  # fmt: skip
    found = of([
        RankTimeline(r, (0.0, 9.0), tuple(run(*each, group=(0, 1), peers=(1 - r,)) for each in row))
        for r, row in enumerate(rows)
    ]).timelines  # fmt: skip
    zero, one = (timeline.runs for timeline in found)
    assert [s.waiting for s in zero] == pytest.approx([0.0, 2.8, 0.0])
    assert [s.waiting for s in one] == pytest.approx([0.0, 0.0, 1.0])
    assert one[2].behind == 0


def test_a_run_inside_another_has_its_own_time():
    kept = disjoint([run("Einsum", 0.0, 10.0), run("Einsum", 2.0, 5.0)])
    assert [each.held for each in kept] == [((0.0, 2.0), (5.0, 10.0)), ((2.0, 5.0),)]


@pytest.mark.parametrize("seed", range(20))
def test_sets_of_times_are_sets(seed):
    """Against sets of the whole numbers that they cover."""
    rng = random.Random(seed)

    def draw():
        return intervals.union((rng.randrange(30), rng.randrange(30)) for _ in range(rng.randrange(6)))

    def covered(some):
        return {t for a, b in some for t in range(a, b)}

    a, b = draw(), draw()
    assert covered(intervals.intersect(a, b)) == covered(a) & covered(b)
    assert covered(intervals.subtract(a, b)) == covered(a) - covered(b)
    assert covered(intervals.union([*a, *b])) == covered(a) | covered(b)
    assert covered(intervals.intersect(a, [(7, 19)])) == covered(a) & set(range(7, 19))
    assert covered(intervals.gaps(a, (3, 25))) == set(range(3, 25)) - covered(a)
    assert intervals.length(a) == len(covered(a))


def test_the_quickest_exchange_tells_the_other_clock():
    """The other clock is 100 s ahead; messages take 1 ms there and 1 to 9 ms back."""
    exchanges = [(t, t + 100.001, t + 0.001 + back) for t, back in ((0.0, 0.009), (1.0, 0.001), (2.0, 0.004))]
    assert offset(exchanges) == pytest.approx(100.0)
