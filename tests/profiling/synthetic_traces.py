"""Timelines whose answer is known: a program of products and collectives, played on ranks with given speeds.

Every rank runs the same items: ("work", line, seconds by rank), ("gap", "", seconds by rank), ("call", line, seconds of
the transfer) waited for at once, ("start", line, seconds) and ("wait", line, 0) of an asynchronous one. A transfer
begins when all have come.
"""

import random

from scaling.profile import LineRun, RankTimeline


def play(programs, ranks: int, **options):
    """(timelines of a step for each program; by (number of a collective, rank): (waiting, exposed, the transfer))."""
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
                begin = max(called)
                for r in everyone:
                    end = max(now[r], begin + seconds)
                    waiting = max(0.0, min(begin, end) - now[r])
                    truth[n, r] = waiting, end - now[r] - waiting, (begin, begin + seconds)
                    more = {"held": ((now[r], end),)}
                    if kind == "wait":
                        more = {"held": ((called[r], called[r]), (now[r], end)), "async_op": True,
                                "transfer": (begin, begin + seconds)}  # fmt: skip
                    runs[r][places[r]] = LineRun(
                        line, "AllReduce", ("X",), called[r], end, group=everyone, **more, **options
                    )
                    now[r] = end
        for r in everyone:
            marks[r].append(now[r])
    return [RankTimeline(r, tuple(marks[r]), tuple(runs[r])) for r in everyone], truth


def program(rng: random.Random, ranks: int, length: int = 12) -> list:
    """A random one, whose asynchronous collectives are all waited for."""
    items, open_ = [], []
    for i in range(length):
        kind = rng.choice(["work", "work", "gap", "call", "start", "wait"])
        if kind in ("work", "gap"):
            items.append((kind, f"P{i}", [rng.random() for _ in range(ranks)]))
        elif kind == "wait" and open_:
            items.append(("wait", open_.pop(rng.randrange(len(open_))), 0))
        elif kind != "wait":
            open_ += [f"C{i}"] if kind == "start" else []
            items.append((kind, f"C{i}", rng.random()))
    return items + [("wait", line, 0) for line in open_]
