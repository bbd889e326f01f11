"""Timelines whose answer is known: a program of products and collectives, played on ranks with given speeds.

Every rank runs the same items: ("work", line, seconds by rank), ("call", line, seconds of the transfer) waited for at
once, ("start", line, seconds) and ("wait", line) of an asynchronous one. A transfer begins when all have come.
"""

import random
from dataclasses import dataclass, field

from scaling.profile import LineRun, RankTimeline


@dataclass
class Truth:
    """Of each collective: {rank: seconds}, by its number in the program."""

    waiting: dict = field(default_factory=dict)
    exposed: dict = field(default_factory=dict)
    begins: dict = field(default_factory=dict)
    ends: dict = field(default_factory=dict)


def play(items, ranks: int, steps: int = 1, **options):
    """(timelines, the truth of each step's collectives in their order)."""
    now, everyone = [0.0] * ranks, tuple(range(ranks))
    runs, marks, truths = [[] for _ in everyone], [[0.0] for _ in everyone], []
    for _ in range(steps):
        truth, under_way, number = Truth(), {}, 0
        for kind, line, *rest in items:
            if kind == "work":
                for r in everyone:
                    end = now[r] + rest[0][r]
                    runs[r].append(LineRun(line, "Einsum", (), now[r], end, ((now[r], end),), flops=1))
                    now[r] = end
            elif kind == "gap":
                now = [now[r] + line[r] for r in everyone]
            elif kind == "wait":
                n, seconds, called, places = under_way.pop(line)
                begin = max(called)
                truth.begins[n], truth.ends[n] = begin, begin + seconds
                for r in everyone:
                    end = max(now[r], begin + seconds)
                    still = end - now[r]
                    truth.waiting[n, r] = max(0.0, min(begin, end) - now[r])
                    truth.exposed[n, r] = still - truth.waiting[n, r]
                    held = ((called[r], called[r]), (now[r], end))
                    runs[r][places[r]] = LineRun(line, "AllGather", ("X",), called[r], end, held, group=everyone,
                                             transfer=(begin, begin + seconds), async_op=True, **options)  # fmt: skip
                    now[r] = end
            else:
                number += 1
                if kind == "start":
                    under_way[line] = number, rest[0], list(now), [len(own) for own in runs]
                    for own in runs:
                        own.append(None)
                    continue
                begin = max(now)
                for r in everyone:
                    truth.waiting[number, r], truth.exposed[number, r] = begin - now[r], rest[0]
                    truth.begins[number], truth.ends[number] = begin, begin + rest[0]
                    held = ((now[r], begin + rest[0]),)
                    runs[r].append(
                        LineRun(line, "AllReduce", ("X",), now[r], begin + rest[0], held, group=everyone, **options)
                    )
                    now[r] = begin + rest[0]
        for r in everyone:
            marks[r].append(now[r])
        truths.append(truth)
    return [RankTimeline(r, tuple(marks[r]), tuple(runs[r])) for r in everyone], truths


def program(rng: random.Random, ranks: int, length: int = 12) -> list:
    """A random one, whose asynchronous collectives are all waited for."""
    items, open_ = [], []
    for i in range(length):
        kind = rng.choice(["work", "work", "gap", "call", "start", "wait"])
        if kind == "work":
            items.append(("work", f"P{i}", [rng.random() for _ in range(ranks)]))
        elif kind == "gap":
            items.append(("gap", [rng.random() for _ in range(ranks)]))
        elif kind == "wait" and open_:
            items.append(("wait", open_.pop(rng.randrange(len(open_)))))
        elif kind != "wait":
            open_ += [f"C{i}"] if kind == "start" else []
            items.append((kind, f"C{i}", rng.random()))
    return items + [("wait", line) for line in open_]
