"""Profiles of programs whose answer is known: waiting, exposed and hidden; the parts of a step; who is slow, where,
by how much, and nobody where there is nothing; sets of times.

A program of products and collectives is played on ranks with given speeds. Every rank runs the same items: ("work",
line, seconds by rank), ("gap", "", seconds by rank), ("call", line, seconds of the transfer) waited for at once,
("start", line, seconds) and ("wait", line, 0) of an asynchronous one. A transfer begins when all have come; that of a
line R when the next rank in a ring has, from which alone each hears.
"""

import random
from dataclasses import replace

import pytest

from scaling.profile import LineRun, RankTimeline, of
from scaling.profile.record import offset
from scaling.profile.stragglers import waited_within
from scaling.profile.timeline import disjoint, gaps, intersect, length, subtract, union

approx = pytest.approx


def play(programs, ranks: int):
    """(timelines of a step for each program; by (number of a collective, rank): (waiting, for whom, exposed, the
    transfer))."""
    now, everyone = [0.0] * ranks, tuple(range(ranks))
    runs, marks, truth, number = [[] for _ in everyone], [[0.0] for _ in everyone], {}, 0
    for items in programs:
        under_way = {}
        for kind, line, given in items:
            if kind in ("work", "gap"):
                for r in everyone:
                    end = now[r] + given[r]
                    if kind == "work":
                        runs[r].append(LineRun(line, "Einsum", (), now[r], end, ((now[r], end),), flops=1))
                    now[r] = end
                continue
            if kind in ("call", "start"):
                number += 1
                under_way[line] = number, given, list(now), [len(own) for own in runs]
                for own in runs:
                    own.append(None)
            if kind in ("call", "wait"):
                n, seconds, called, places = under_way.pop(line)
                for r in everyone:
                    ring = {"peers": ((r + 1) % ranks,)} if line.startswith("R") else {}
                    needed = (r, *ring["peers"]) if ring else everyone
                    begin = max(called[other] for other in needed)
                    end = max(now[r], begin + seconds)
                    waiting = max(0.0, min(begin, end) - now[r])
                    behind = max(other for other in needed if called[other] == begin) if waiting else None
                    truth[n, r] = waiting, behind, end - now[r] - waiting, (begin, begin + seconds)
                    more = {"held": ((now[r], end),), **ring}
                    if kind == "wait":
                        more |= {"held": ((called[r], called[r]), (now[r], end)), "async_op": True,
                                 "transfer": (begin, begin + seconds)}  # fmt: skip
                    op = "CollectivePermute" if ring else "AllReduce"
                    runs[r][places[r]] = LineRun(line, op, ("X",), called[r], end, group=everyone, **more)
                    now[r] = end
        for r in everyone:
            marks[r].append(now[r])
    return [RankTimeline(r, tuple(marks[r]), tuple(runs[r])) for r in everyone], truth


def program(rng: random.Random, ranks: int, length: int = 12) -> list:
    """A random one, whose asynchronous collectives are all waited for."""
    items, open_ = [], []
    for i in range(length):
        call = f"{rng.choice('CR')}{i}"
        kind = rng.choice(["work", "work", "gap", "call", "start", "wait"])
        if kind in ("work", "gap"):
            items.append((kind, f"P{i}", [rng.random() for _ in range(ranks)]))
        elif kind == "wait" and open_:
            items.append(("wait", open_.pop(rng.randrange(len(open_))), 0))
        elif kind != "wait":
            open_ += [call] if kind == "start" else []
            items.append((kind, call, rng.random()))
    return items + [("wait", line, 0) for line in open_]


def test_sets_of_times_are_sets_and_a_run_inside_another_has_its_own():
    """Nested, touching, and turned round, which covers none."""
    a, b = union([(12, 15), (0, 9), (2, 3), (15, 16), (20, 18)]), [(1, 4), (8, 13)]
    assert a == [(0, 9), (12, 16)]
    assert intersect(a, b) == [(1, 4), (8, 9), (12, 13)]
    assert subtract(a, b) == [(0, 1), (4, 8), (13, 16)]
    assert gaps(a, (3, 14)) == [(9, 12)]
    kept = disjoint([run("Einsum", 0.0, 10.0), run("Einsum", 2.0, 5.0)])
    assert [each.held for each in kept] == [((0.0, 2.0), (5.0, 10.0)), ((2.0, 5.0),)]


def run(op, called, end, rank=0, **fields):
    return LineRun(op, op, ("X",), called, end, ((called, end),), after="A[B]", **fields)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_are_split_exactly(seed):
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4])
    timelines, truth = play([program(rng, ranks)], ranks)
    profile = of(timelines)
    for rank, timeline in enumerate(profile.timelines):
        runs = [run for run in timeline.runs if run.communicates]
        still = union(i for run in runs for i in run.held)
        waiting, behind, exposed, transfers = zip(
            *[own for (_, r), own in sorted(truth.items()) if r == rank], strict=True
        )
        hidden = [length(subtract([transfer], still)) for transfer in transfers]
        assert [r.waiting for r in runs] == approx(waiting, abs=1e-9)
        assert [r.behind for r in runs] == list(behind)
        assert [r.exposed for r in runs] == approx(exposed, abs=1e-9)
        assert [r.hidden for r in runs] == approx(hidden, abs=1e-9)
        (part,) = profile.parts(rank)
        assert (part.total, part.waiting, part.exposed) == approx((part.step, sum(waiting), sum(exposed)), abs=1e-9)
        assert part.products == approx(sum(r.end - r.called for r in timeline.runs if not r.communicates))


def test_messages_meet_by_their_ends_and_order():
    """Two messages each way between ranks 0 and 1; the second Recv waits for a late Send."""
    rows = [[("Send", 0.0, 0.1), ("Recv", 0.2, 3.5), ("Send", 5.0, 5.5)],
            [("Recv", 0.5, 1.0), ("Send", 3.0, 3.5), ("Recv", 4.0, 5.5)]]  # fmt: skip
    runs = [tuple(run(*each, group=(0, 1), peers=(1 - r,)) for each in row) for r, row in enumerate(rows)]
    zero, one = (timeline.runs for timeline in of([RankTimeline(r, (0.0, 9.0), runs[r]) for r in (0, 1)]).timelines)
    assert [s.waiting for s in (*zero, *one)] == approx([0.0, 2.8, 0.0, 0.0, 0.0, 1.0])
    assert one[2].behind == 0


def test_the_quickest_exchange_tells_the_other_clock():
    """The other clock is 100 s ahead; messages take 1 ms there and 1 to 9 ms back."""
    exchanges = [(t, t + 100.001, t + 0.001 + back) for t, back in ((0.0, 0.009), (1.0, 0.001), (2.0, 0.004))]
    assert offset(exchanges) == approx(100.0)


# --- Stragglers


def product(*seconds, call=0.001):
    """A product that takes each rank so long, and a collective."""
    return [("work", "P", list(seconds)), ("call", "C", call)]


def slow(programs, ranks: int = 2):
    return of(play(programs, ranks)[0]).stragglers()


@pytest.mark.parametrize("seed", range(10))
def test_a_planted_delay_is_found_exactly(seed):
    """In a product, or in the gap before it, of one run of its line, in every step; every line runs twice."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4])
    once = [
        item
        for i in range(rng.randint(2, 5))
        for item in (("gap", "", 0.001), ("work", f"P{i}", 0.01 + 0.01 * rng.random()), ("call", f"C{i}", 0.005))
    ]
    items: list = [(kind, line, t if kind == "call" else [t] * ranks) for kind, line, t in (*once, *once)]
    rank, place = rng.randrange(ranks), rng.choice([i for i, item in enumerate(items) if item[0] != "call"])
    items[place][2][rank] += 0.03
    (found,) = slow([items] * 4, ranks)
    where = f"in {items[place][1]}" if items[place][0] == "work" else f"before {items[place + 1][1]}"
    assert str(found) == f"rank {rank} is 30.0 ms slow {where}: others wait 30.0 ms"
    assert found.occurrence == 1 + (place >= len(once))


def test_a_rank_is_slow_though_its_group_alone_waits():
    """Ranks 2 and 3 meet each other only: 0 and 1 do not wait for 3, and 2 waits for all that it is late by."""
    pairs = [play([product(0.01, second)] * 4, 2)[0] for second in (0.01, 0.04)]
    others = [
        replace(own, rank=own.rank + 2, runs=tuple(replace(run, group=run.group and (2, 3)) for run in own.runs))
        for own in pairs[1]
    ]
    (found,) = of([*pairs[0], *others]).stragglers()
    assert str(found) == "rank 3 is 30.0 ms slow in P: others wait 30.0 ms"


IN_EACH = [item for i in range(10) for item in (("work", f"P{i}", [0.01, 0.012]), ("call", f"C{i}", 0.001))]
DELAYED = [product(0.05, second) for second in (0.05, 0.05, 0.1, 0.05, 0.05)]
SLOW = {  # what rank 1 is, by the steps that two ranks make
    "after the last line": (
        [[*product(0.01, 0.01), ("gap", "", [0.0, 0.02])]] * 4,
        "20.0 ms slow before the end of the step: others wait 20.0 ms",
    ),
    "less than steps differ": ([product(0.05, 0.06 + extra) for extra in (-0.009, 0.009, 0, 0.009)], ""),
    "every line": ([IN_EACH] * 4, "20.0 ms slow in all its lines: others wait 20.0 ms"),
    "nobody waits": ([[("work", "P", [0.01, 0.05])]] * 4, ""),
    "one step alone": (
        [[*product(0.05, 0.05), *product(0.05, 0.08)]], "30.0 ms slow in P in step 0: others wait 30.0 ms"
    ),
    "one of five": (DELAYED, "50.0 ms slow in P in step 2: others wait 50.0 ms"),
}  # fmt: skip


@pytest.mark.parametrize("name", SLOW)
def test_slow_ranks_are_found(name):
    programs, found = SLOW[name]
    assert [str(one) for one in slow(programs)] == [f"rank 1 is {found}"] * bool(found)


def test_waiting_within_a_span_is_counted_and_who_waited_for_a_core_is_not_slow():
    waited = [(0.0, 0.0), (1.0, 0.5), (2.0, 0.5), (3.0, 0.9)]
    assert [waited_within(waited, *span) for span in ((0.2, 0.8), (1.0, 2.0), (1.5, 2.5))] == approx([0.5, 0.0, 0.4])
    assert waited_within((), 0.0, 1.0) == 0.0
    zero, one = play(DELAYED, 2)[0]
    waited = ((0.0, 0.0), (one.marks[2], 0.001), (one.marks[3], 0.05), (one.marks[-1], 0.05))
    assert of([zero, replace(one, waited=waited)]).stragglers() == []
