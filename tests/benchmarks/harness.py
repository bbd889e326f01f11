"""What the benchmarks share: contestants timed in turn, with the bytes that they sent and their peak memory.

A `Contest` is one strategy of ours against PyTorch's own. `ours` and `theirs` are called on every rank as
`build(mesh, size, optimizer)`, with optimizer "sgd" or "adamw", and return `step() -> loss` (this rank's share, a
tensor), which makes one training step: forward, loss = sum of squares / rows, backward, optimizer update. Both start
from `initial(size)` and see `rows(size)`, so that their losses agree; a contest whose losses differ is an error.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from kernel import bytes_sent, reset_peak, resident
from report import quartiles, ratios

from scaling import launch
from scaling.book.largest import largest

SIDES = ("ours", "theirs", "tuned")
RATE = 1e-4  # learning rate
AGREE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # how far the losses of two sides may lie apart, relative


@dataclass(frozen=True, kw_only=True)
class Timed:
    """`repeat`: steps in one timed sample."""

    repeat: int = 1
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Size(Timed):
    """L layers of W_in[D, F], W_out[F, D], and the rows of the whole batch."""

    L: int
    D: int
    F: int
    rows: int

    def __str__(self) -> str:
        return f"L={self.L} D={self.D} F={self.F} rows={self.rows}"

    @property
    def params(self) -> int:
        return 2 * self.L * self.D * self.F

    @property
    def flops(self) -> int:
        """Of one step on all ranks together: 2 forward, 4 backward, for each param and row."""
        return 6 * self.params * self.rows


SIZES = {
    "compute": Size(2, 512, 4096, 2048),
    "default": Size(8, 512, 2048, 256),
    "communication": Size(8, 1024, 1024, 32),
    "tiny": Size(8, 64, 256, 32, repeat=5),
}


@dataclass(frozen=True)
class Contest:
    """`axes(ranks)`: the mesh; `wire_bytes(mesh_sizes, size)`: what a rank sends in a step, by the closed form;
    `chunks`: of a pipeline, the parts of the model that each rank has.

    `theirs` has PyTorch's defaults, or with `tuned=True` its fastest settings. But for pipelines both take
    `compiled=True`: by torch.compile.
    """

    name: str
    rival: str
    axes: Callable[[int], dict[str, int]]
    ours: Callable
    theirs: Callable
    wire_bytes: Callable[[dict[str, int], Size], float]
    chunks: int = 1

    def side(self, name: str) -> Callable:
        """`build(mesh, size, optimizer)` of one of SIDES."""
        fast, together = partial(self.theirs, tuned=True), partial(self.ours, compiled=True)
        sides = {"ours": self.ours, "theirs": self.theirs, "tuned": fast, "ours compiled": together}
        return (sides | {"tuned compiled": partial(fast, compiled=True)})[name]


def initial(size: Size, device="cpu") -> dict[str, torch.Tensor]:
    """The whole params, the same on every rank: unit scale through the stack of gelus."""
    to = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": size.dtype}
    return {
        "W_in": torch.randn(size.L, size.D, size.F, **to) / size.D**0.5,
        "W_out": torch.randn(size.L, size.F, size.D, **to) / (0.65 * size.F**0.5),
    }


def rows(size: Size, device="cpu") -> torch.Tensor:
    """The whole batch In[B, D]."""
    g = torch.Generator(device).manual_seed(1)
    return torch.randn(size.rows, size.D, generator=g, device=device, dtype=size.dtype)


def in_turn(
    steps: dict[str, Callable], count: int, repeat: int = 1, warmup: int = 3, clock: Callable = perf_counter
) -> dict[str, list[Any]]:
    """Seconds of a step on this rank, `count` samples of `repeat` steps each; `clock` may read several clocks at once.

    The sides take turns, and turns in going first; all ranks start each sample together.
    """
    names, seconds = list(steps), {name: [] for name in steps}
    for sample in range(-warmup, count):
        for name in names if sample % 2 else reversed(names):
            together()
            start = clock()
            for _ in range(repeat):
                steps[name]()
            settle()
            if sample >= 0:
                seconds[name].append((clock() - start) / repeat)
    return seconds


def together() -> None:
    settle()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
        settle()


def settle() -> None:
    """Wait for what runs on the GPU, where there is one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def medians(results: list[dict[str, list[float]]]) -> dict[str, float]:
    """Of each part that was timed on all ranks."""
    return {part: quartiles(slowest([result[part] for result in results]))[1] for part in results[0]}


def hidden(seconds: dict[str, float]) -> float:
    """The share of the smaller of computing and communicating by which the step is shorter than both together."""
    parts = seconds["computing"], seconds["communicating"]
    return (sum(parts) - seconds["step"]) / min(parts)


def slowest(per_rank: list[list[float]]) -> list[float]:
    """A step lasts as long as on its slowest rank."""
    return [max(times) for times in zip(*per_rank, strict=True)]


def per_call(f: Callable, seconds: float = 0.2, batches: int = 20) -> float:
    """Seconds of one call: the least of the means over several batches, which a busy machine disturbs least."""
    f()
    start = perf_counter()
    f()
    count = max(1, int(seconds / batches / max(perf_counter() - start, 1e-7)))
    best = float("inf")
    for _ in range(batches):
        start = perf_counter()
        for _ in range(count):
            f()
        best = min(best, (perf_counter() - start) / count)
    return best


def sent_by(step: Callable, count: int = 2) -> float | None:
    """Bytes that this rank sends in one step."""
    together()
    before = bytes_sent()
    for _ in range(count):
        step()
    return None if before is None else (bytes_sent() - before) / count


# Contests


def race(
    contest: Contest,
    size: Any,
    optimizer: str,
    ranks: int,
    steps: int,
    threads: int = 1,
    rivals: Sequence[str] = SIDES[1:],
    *,
    small: Any = SIZES["tiny"],
) -> dict:
    """One line of the table: all sides in turn on the same ranks, then each by itself on fresh ones for its memory."""
    mesh, sides = contest.axes(ranks), ("ours", *rivals)
    options = {"checked": False, "threads": threads, "timeout": 600}
    results = launch.run(_raced, mesh, contest, sides, size, optimizer, steps, **options)
    if wrong := "".join(results[0]["failed"].values()) or losses_of(results, size.dtype)[1]:
        raise ValueError(f"{contest.name}, {size}, {optimizer}: {wrong}")
    times = {side: slowest([result["seconds"][side] for result in results]) for side in sides}
    row = {"contest": contest.name, "rival": contest.rival, "optimizer": optimizer, "mesh": mesh}
    row |= {side: quartiles(times[side]) for side in times}
    for side in rivals:
        row[f"ratio_{side}"] = ratios(times["ours"], times[side])
    for side in sides:
        sent = [result["sent"][side] for result in results]
        row[f"sent_{side}"] = None if None in sent else sum(sent) / len(sent)
        row[f"peak_{side}"] = max(launch.run(peak_of, mesh, contest.side(side), size, optimizer, small, **options))
    words = ", ".join(f"{side} {row[f'ratio_{side}'][1]:.2f}" for side in rivals)
    print(f"{size}, {contest.name}, {optimizer}: {words}", file=sys.stderr, flush=True)
    return row | {"wire_bytes": contest.wire_bytes(mesh, size)}


def _raced(mesh, contest: Contest, names: tuple, size: Size, optimizer: str, steps: int) -> dict:
    return raced({side: partial(contest.side(side), mesh, size, optimizer) for side in names}, steps, size)


def raced(sides: dict[str, Callable], samples: int, size: Any) -> dict:
    """Of each side on this rank: seconds of its steps, in turn; bytes sent in one; its peak memory and its loss.

    `sides`: name -> build() -> step() -> this rank's share of the loss. A side that cannot be built, or does not run,
    on all ranks alike, is named in "failed", and the others go on.
    """
    made, found = {}, {part: {} for part in ("sent", "peaks", "losses", "failed")}
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
            found["peaks"][name] = resident(peak=True) - before
            again = float(step().detach())
            found["losses"][name] = first if size.dtype == torch.bfloat16 else again  # bf16 rounds small updates
            found["sent"][name] = sent_by(step)
            made[name] = step
        except Exception as error:
            found["failed"][name] = f"{type(error).__name__}: {error}"[:600]
    return found | {"seconds": in_turn(made, samples, size.repeat, warmup=1) if made else {}}


def losses_of(results: list[dict], dtype: torch.dtype) -> tuple[dict[str, float], str]:
    """(each side's loss over all ranks; what is wrong if they differ)."""
    totals = {side: sum(result["losses"][side] for result in results) for side in results[0]["seconds"]}
    first = next(iter(totals.values()), 0.0)
    if totals and not largest(abs(total - first) for total in totals.values()) <= AGREE[dtype] * abs(first):
        return totals, f"the sides differ in their loss: {totals}"
    return totals, ""


def peak_of(mesh, build: Callable, size: Any, optimizer: str, small: Any) -> int:
    """The most bytes that the third step has in memory, beyond what this rank had before there was this model.

    Fresh ranks: what one side has given back to the allocator must not serve the other. A tiny model goes first, so
    that code, threads and sockets, which every program has, do not count.
    """
    step = build(mesh, small, optimizer)
    step()
    del step
    gc.collect()
    together()
    before = resident()
    step = build(mesh, size, optimizer)
    for _ in range(2):
        step()
    gc.collect()
    reset_peak()
    step()
    together()
    return resident(peak=True) - before
