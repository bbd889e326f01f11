"""The published pipeline schedules (Part 5, "Pipelining"), each a pure function of (stages, microbatches, chunks).

naive         one microbatch at a time, as in the book's listing
gpipe         all forwards, then all backwards       Huang et al. 2018, arXiv:1811.06965
one_f_one_b   each backward as soon as possible      Narayanan et al. 2021 (PipeDream-Flush), arXiv:2104.04473
interleaved   1F1B with several chunks per rank      Narayanan et al. 2021, arXiv:2104.04473, section 2.2
zb_h1         1F1B with the weight half deferred     Qi et al. 2023, arXiv:2401.10241, section 2
dualpipe_v    two chunks per rank, placed in a V     DeepSeek-V3, arXiv:2412.19437; github.com/deepseek-ai/DualPipe
"""

from collections.abc import Callable
from functools import lru_cache

from scaling.common.arguments import whole
from scaling.schedules.schedule import Schedule, from_orders

MOST_CHUNKS = 1000  # of a rank: a schedule lists every step of each, and models have fewer layers


def naive(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Schedule one microbatch at a time: it passes forward through all stages and back before the next one starts."""
    _check("naive", stages, microbatches, chunks, only_chunks=1)
    order = [step for m in range(microbatches) for step in (("F", 0, m), ("B", 0, m))]
    return from_orders("naive", stages, microbatches, [order] * stages, _line(stages))


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Schedule all forwards, then all backwards in the same order; every stage keeps all microbatches' activations."""
    _check("gpipe", stages, microbatches, chunks, only_chunks=1)
    order = [(kind, 0, m) for kind in "FB" for m in range(microbatches)]
    return from_orders("gpipe", stages, microbatches, [order] * stages, _line(stages))


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Schedule one forward and one backward in turn, after stages - 1 - r forwards on rank r.

    Rank r then keeps the activations of at most stages - r microbatches.
    """
    _check("1f1b", stages, microbatches, chunks, only_chunks=1)
    forwards = backwards = [(0, m) for m in range(microbatches)]
    orders = [_one_f_one_b(forwards, backwards, ahead=stages - 1 - rank) for rank in range(stages)]
    return from_orders("1f1b", stages, microbatches, orders, _line(stages))


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Schedule 1F1B over chunks: rank r holds virtual stages r, r + stages, ...; a round has `stages` microbatches.

    Raises:
        ValueError: The microbatches are not a multiple of the stages, as the published schedule requires.
    """
    _check("interleaved", stages, microbatches, chunks)
    if microbatches % stages:
        raise ValueError(
            f"interleaved: {microbatches} microbatches are not a multiple of {stages} stages: each round takes one "
            f"microbatch a stage\n  fix: use a multiple of {stages}, or 1f1b"
        )
    rounds = range(0, microbatches, stages)
    forwards = [(c, m) for first in rounds for c in range(chunks) for m in range(first, first + stages)]
    backwards = [(chunks - 1 - c, m) for c, m in forwards]
    orders = []
    for rank in range(stages):
        ahead = 2 * (stages - 1 - rank) + (chunks - 1) * stages if chunks > 1 else stages - 1 - rank
        orders.append(_one_f_one_b(forwards, backwards, ahead))
    return from_orders("interleaved", stages, microbatches, orders, tuple(range(stages)) * chunks)


def zb_h1(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Schedule 1F1B with the backward split into its input half and its weight half.

    Rank r defers each weight half by r microbatches, so that the last weight halves fill the drain. Every rank keeps as
    many activations as rank 0 of 1F1B.
    """
    _check("zb-h1", stages, microbatches, chunks, only_chunks=1)
    both, orders = [(0, m) for m in range(microbatches)], []
    for rank in range(stages):
        order = []
        for kind, chunk, m in _one_f_one_b(both, both, ahead=stages - 1 - rank):
            order.append(("F" if kind == "F" else "I", chunk, m))
            if kind == "B" and m >= rank:
                order.append(("W", chunk, m - rank))
        order += [("W", 0, m) for m in range(max(0, microbatches - rank), microbatches)]
        orders.append(order)
    return from_orders("zb-h1", stages, microbatches, orders, _line(stages))


def dualpipe_v(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Schedule the V-shaped half of DualPipe: rank r holds virtual stages r and 2*stages - 1 - r.

    So the last rank's two virtual stages are neighbours, and rank 0 has both In and the loss.

    Raises:
        ValueError: There are fewer than 2*stages microbatches, so the two directions of the V would never overlap.
    """
    _check("dualpipev", stages, microbatches, chunks)
    if chunks != 2:
        raise ValueError(f"dualpipev: a V has 2 chunks a rank, not {chunks}\n  fix: leave chunks out, or give 2")
    if microbatches < 2 * stages:
        raise ValueError(
            f"dualpipev: {microbatches} microbatches are fewer than 2 * {stages} stages"
            f"\n  fix: use at least {2 * stages}, "
            "or zb-h1"
        )
    placement = tuple(range(stages)) + tuple(reversed(range(stages)))
    return from_orders(
        "dualpipev", stages, microbatches, [_v(stages, microbatches, r) for r in range(stages)], placement
    )


def _v(stages: int, microbatches: int, rank: int) -> list[tuple]:
    """Return one rank's order in DualPipeV, by the eight steps of its authors."""
    order, weights, count = [], [], {}

    def next_(kind: str, chunk: int) -> tuple[str, int, int]:
        key = (kind == "F", chunk)
        count[key] = count.get(key, -1) + 1
        return kind, chunk, count[key]

    def do(kind: str, chunk: int) -> None:
        order.append(next_(kind, chunk))
        if kind == "I":
            weights.append(order[-1][1:])

    def weight() -> None:
        order.append(("W", *weights.pop(0)))

    def both(forward: int, backward: int) -> None:
        order.append((next_("F", forward), next_("B", backward)))

    after = stages - 1 - rank  # number of ranks between this one and the turn of the V
    for _ in range(2 * after):  # 1. forwards down the V
        do("F", 0)
    for _ in range(rank + 1):  # 2. forwards down and up the V in turn
        do("F", 0)
        do("F", 1)
    for _ in range(after):  # 3. the first backwards, split so that the next stage does not wait for weight gradients
        do("I", 1)
        weight()
        do("F", 1)
    for i in range(microbatches - 2 * stages + rank + 1):  # 4. forwards and backwards in pairs
        if i == 0 and after == 0:  # the last rank's first pair runs separately, since it has nothing to overlap with
            do("F", 0)
            do("B", 1)
        else:
            both(0, 1)
        both(1, 0)
    for _ in range(after):  # 5. no forwards down the V are left
        do("B", 1)
        both(1, 0)
    half = (rank + 1) // 2
    for i in range(rank + 1):  # 6. only backwards are left, which are split from the middle on
        do("I" if i > half or (i == half and rank % 2 == 1) else "B", 1)
        do("I" if i >= half else "B", 0)
    for _ in range(after):  # 7. weight halves fill the wait for the last backwards
        weight()
        do("I", 0)
    while weights:  # 8. the remaining weight halves
        weight()
    return order


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "dualpipev": dualpipe_v,
}


@lru_cache(maxsize=64, typed=True)
def make(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Return the schedule called `name`, a key of SCHEDULES, or with its chunks per rank, such as "interleaved:4".

    If `chunks` is not given either way, a rank has 2 if it may have several.
    """
    family, colon, count = str(name).partition(":")
    if family not in SCHEDULES or (colon and not (count.isdecimal() and chunks is None)):
        raise ValueError(f"unknown schedule {name!r}\n  fix: choose one of {', '.join(SCHEDULES)}, or interleaved:4")
    chunks = int(count) if colon else chunks
    return SCHEDULES[family](stages, microbatches, **({} if chunks is None else {"chunks": chunks}))


def _check(name: str, stages: int, microbatches: int, chunks: int, only_chunks: int | None = None) -> None:
    whole(stages=stages, microbatches=microbatches, chunks=chunks)
    if chunks > MOST_CHUNKS:
        raise ValueError(f"{name}: {chunks} chunks on a rank\n  fix: give at most {MOST_CHUNKS}")
    if only_chunks not in (None, chunks):
        raise ValueError(f"{name}: each rank holds one chunk, not {chunks}\n  fix: use interleaved for several")


def _line(stages: int) -> tuple[int, ...]:
    """Return the placement of one chunk per rank: virtual stage i is on rank i."""
    return tuple(range(stages))


def _one_f_one_b(forwards: list, backwards: list, ahead: int) -> list[tuple[str, int, int]]:
    """Return (kind, chunk, microbatch) in order: `ahead` forwards, forward and backward in turn, other backwards."""
    ahead = min(ahead, len(forwards))
    order = [("F", *f) for f in forwards[:ahead]]
    for f, b in zip(forwards[ahead:], backwards, strict=False):
        order += [("F", *f), ("B", *b)]
    return order + [("B", *b) for b in backwards[len(forwards) - ahead :]]
