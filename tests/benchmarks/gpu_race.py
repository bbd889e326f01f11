"""Contests on the ranks of this run, as gpu.py has them, and seconds of one call."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch.distributed as dist
from harness import losses_of, raced, settle, slowest
from report import quartiles, ratios


def race_here(sides: dict[str, Callable], samples: int, size: Any, flops: float, pairs: dict, **about) -> dict:
    """A row: ms of each side's step as `raced` has them, peak memory, and the ratios of `pairs` {name: (side, other)}.
    `flops`: of a step on all ranks, for the MFU."""
    ranks = everyone(raced(sides, samples, size))
    times = {name: slowest([rank["seconds"][name] for rank in ranks]) for name in ranks[0]["seconds"]}
    losses, wrong = losses_of(ranks, size.dtype)
    failed = ranks[0]["failed"] | ({"losses": wrong} if wrong else {})
    row = {**about, "failed": failed, "flops": flops, "ranks": len(ranks), "losses": losses}
    row["ms"] = {name: [1e3 * t for t in quartiles(each)] for name, each in times.items()}
    row["MB"] = {name: max(rank["peaks"][name] for rank in ranks) / 1e6 for name in times}
    row["ratio"] = {
        name: ratios(times[mine], times[other]) for name, (mine, other) in pairs.items() if {mine, other} <= {*times}
    }
    return row


def everyone(mine: dict) -> list[dict]:
    """What each rank has, in their order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def seconds_of(call: Callable, samples: int = 5, least: float = 0.02) -> float:
    """Seconds of one call: the median of samples, each long enough for the clock."""
    call()
    settle()
    start = perf_counter()
    call()
    settle()
    often = 1 + int(least / max(perf_counter() - start, 1e-7))
    found = []
    for _ in range(samples):
        start = perf_counter()
        for _ in range(often):
            call()
        settle()
        found.append((perf_counter() - start) / often)
    return quartiles(found)[1]
