"""Profiles of programs whose answer is known: waiting, exposed and hidden; the parts of a step; sets of times."""

import random

import pytest
from synthetic_traces import play, program

from scaling.profile import LineRun, RankTimeline, intervals, of
from scaling.profile.clock import offset
from scaling.profile.split import Split
from scaling.profile.timeline import disjoint


@pytest.mark.parametrize("seed", range(30))
def test_random_programs_are_split_exactly(seed):
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4])
    timelines, (truth,) = play(program(rng, ranks), ranks)
    profile = of(timelines)
    for rank, (timeline, found) in enumerate(zip(timelines, profile.splits, strict=True)):
        communicating = [s for run, s in zip(timeline.runs, found, strict=True) if run.communicates]
        still = intervals.union(i for run in timeline.runs if run.communicates for i in run.held)
        for n, each in enumerate(communicating, 1):
            assert each.waiting == pytest.approx(truth.waiting[n, rank], abs=1e-9)
            assert each.exposed == pytest.approx(truth.exposed[n, rank], abs=1e-9)
            hidden = intervals.subtract([(truth.begins[n], truth.ends[n])], still)
            assert each.hidden == pytest.approx(intervals.length(hidden), abs=1e-9)
        (part,) = profile.parts(rank)
        assert part.total == pytest.approx(part.step, abs=1e-9)
        assert part.products == pytest.approx(sum(r.end - r.called for r in timeline.runs if not r.communicates))
        assert part.waiting == pytest.approx(sum(truth.waiting[n, rank] for n in truth.begins), abs=1e-9)
        assert part.exposed == pytest.approx(sum(truth.exposed[n, rank] for n in truth.begins), abs=1e-9)


def test_who_is_waited_for_is_who_came_last():
    timelines, _ = play([("work", "P", [0.1, 0.5, 0.2]), ("call", "C", 0.3)], 3)
    found = [splits[1] for splits in of(timelines).splits]
    assert [s.behind for s in found] == [1, None, 1]
    assert [s.waiting for s in found] == pytest.approx([0.4, 0.0, 0.3])
    assert [s.exposed for s in found] == pytest.approx([0.3, 0.3, 0.3])


def test_only_those_that_are_needed_are_waited_for():
    """In a ring rank 0 hears from 1 alone, and goes on before 2 has come."""
    runs = [LineRun("C", "CollectivePermute", ("X",), t, end, ((t, end),), group=(0, 1, 2), peers=((rank + 1) % 3,))
            for rank, (t, end) in enumerate([(0.0, 0.3), (0.2, 0.9), (0.8, 0.9)])]  # fmt: skip
    zero, one, two = (s[0] for s in of([RankTimeline(r, (0.0, 1.0), (run,)) for r, run in enumerate(runs)]).splits)
    assert (zero.behind, zero.waiting, zero.exposed) == (1, pytest.approx(0.2), pytest.approx(0.1))
    assert (one.behind, one.waiting) == (2, pytest.approx(0.6))
    assert two.behind is None


def test_messages_meet_by_their_ends_and_order():
    """Two messages each way between ranks 0 and 1; the second Recv waits for a late Send."""

    def run(op, peer, called, end):
        return LineRun(op, op, ("Z",), called, end, ((called, end),), after="A[B]", group=(0, 1), peers=(peer,))

    first = RankTimeline(0, (0.0, 9.0), (run("Send", 1, 0.0, 0.1), run("Recv", 1, 0.2, 3.5), run("Send", 1, 5.0, 5.5)))
    second = RankTimeline(1, (0.0, 9.0), (run("Recv", 0, 0.5, 1.0), run("Send", 0, 3.0, 3.5), run("Recv", 0, 4.0, 5.5)))
    zero, one = of([first, second]).splits
    assert [s.waiting for s in zero] == pytest.approx([0.0, 2.8, 0.0])
    assert [s.waiting for s in one] == pytest.approx([0.0, 0.0, 1.0])
    assert one[2].behind == 0


def test_a_run_inside_another_has_its_own_time():
    outer, inner = (LineRun(n, "Einsum", (), a, b, ((a, b),)) for n, a, b in (("A", 0.0, 10.0), ("B", 2.0, 5.0)))
    kept = disjoint([outer, inner])
    assert kept[0].held == ((0.0, 2.0), (5.0, 10.0))
    assert kept[1].held == ((2.0, 5.0),)


def test_one_rank_waits_for_nobody():
    run = LineRun("C", "AllReduce", ("X",), 0.0, 1.0, ((0.0, 1.0),), group=(0,))
    assert of([RankTimeline(0, (0.0, 1.0), (run,))]).splits == [[Split()]]


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
    assert covered(intervals.within(a, 7, 19)) == covered(a) & set(range(7, 19))
    assert covered(intervals.between(a, (0, 30))) == set(range(30)) - covered(a)
    assert intervals.length(a) == len(covered(a))


def test_the_quickest_exchange_tells_the_other_clock():
    """The other clock is 100 s ahead; messages take 1 ms there and 1 to 9 ms back."""
    exchanges = [(t, t + 100.001, t + 0.001 + back) for t, back in ((0.0, 0.009), (1.0, 0.001), (2.0, 0.004))]
    assert offset(exchanges) == pytest.approx(100.0)
