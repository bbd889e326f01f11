"""What the timed parts of gpu.py share: sides that take turns on the ranks of this run, and the time of one call."""

import gc
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
from harness import in_turn, quartiles, reset_peak, resident, settle, slowest

from scaling.book.largest import largest

AGREE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # how far losses may lie apart, relative


def race(sides: dict[str, Callable], samples: int, dtype: torch.dtype, flops: float, pairs: dict, **about) -> dict:
    """A row: ms of each side's step, its peak memory, and the ratios of `pairs` {name: (side, other side)}.

    `sides`: name -> build() -> step() -> this rank's share of the loss. A side that cannot be built, or does not run,
    on all ranks alike, is named in "failed", and the others go on. `flops`: of a step on all ranks, for the MFU.
    """
    made, peaks, losses, failed = {}, {}, {}, {}
    for name, build in sides.items():
        try:
            gc.collect()
            before = resident()
            step = build()
            first = float(step().detach())
            step()
            reset_peak()
            step()
            settle()
            peaks[name] = resident(peak=True) - before
            losses[name] = first if dtype == torch.bfloat16 else float(step().detach())  # bf16 rounds small updates
            made[name] = step
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:600]
    seconds = in_turn(made, samples, warmup=1) if made else {}
    ranks = everyone({"seconds": seconds, "peaks": peaks, "losses": losses})
    row = {**about, "ms": {}, "MB": {}, "ratio": {}, "failed": failed, "flops": flops, "ranks": len(ranks)}
    times = {name: slowest([rank["seconds"][name] for rank in ranks]) for name in made}
    for name in made:
        row["ms"][name] = [1e3 * t for t in quartiles(times[name])]
        row["MB"][name] = max(rank["peaks"][name] for rank in ranks) / 1e6
    for name, (mine, other) in pairs.items():
        if mine in made and other in made:
            row["ratio"][name] = quartiles([a / b for a, b in zip(times[mine], times[other], strict=True)])
    totals = {name: sum(rank["losses"][name] for rank in ranks) for name in made}
    row["losses"] = totals
    first = next(iter(totals.values()), 0.0)
    if totals and not largest(abs(total - first) for total in totals.values()) <= AGREE[dtype] * abs(first):
        failed["losses"] = f"the sides differ in their loss: {totals}"
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
