"""What the benchmarks share: contestants timed in turn, with the bytes that they sent and their peak memory.

A `Contest` is one strategy of ours against PyTorch's own. `ours` and `theirs` are called on every rank as
`build(mesh, size, optimizer)`, with optimizer "sgd" or "adamw", and return `step() -> loss` (this rank's share, a
tensor), which makes one training step: forward, loss, backward, optimizer update. Both start from the same params and
see the same rows, so that their losses agree; a contest whose losses differ is an error.
"""

import ctypes
import gc
import itertools
import math
import os
import platform
import socket
import statistics
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from report import machine, options, quartiles, ratios, show, spread

from scaling import launch
from scaling.book.arrays import largest

RIVALS = ("theirs", "tuned")
RATE = 1e-4  # learning rate
AGREE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # how far the losses of two sides may lie apart, relative
on_ranks = partial(launch.run, checked=False, timeout=600)


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


def split(axes: str, ranks: int) -> dict[str, int]:
    """A mesh of these axes, two on the last where there are several."""
    return {axes: ranks} if len(axes) == 1 else {axes[0]: ranks // 2, axes[1]: 2}


@dataclass(frozen=True)
class Contest:
    """`theirs` has PyTorch's defaults, or with `tuned=True` its fastest settings. But for pipelines both take
    `compiled=True`: by torch.compile.

    `wire_bytes(mesh_sizes, size)`: what a rank sends in a step, by the closed form. `chunks`: of a pipeline, the parts
    of the model that each rank has.
    """

    name: str
    rival: str
    axes: str
    ours: Callable
    theirs: Callable
    wire_bytes: Callable[[dict[str, int], Any], float] | None = None
    chunks: int = 1

    def side(self, name: str) -> Callable:
        """`build(mesh, size, optimizer)` of "ours", "theirs" or "tuned", each also as in "ours compiled"."""
        how = {word: True for word in ("tuned", "compiled") if word in name}
        return partial(self.ours if "ours" in name else self.theirs, **how)

    def fits(self, size: Any, ranks: int) -> bool:
        """Two ranks make no mesh of two axes; and layers are to divide over stages."""
        sizes = split(self.axes, ranks)
        return 1 not in sizes.values() and size.L % (sizes.get("Z", 1) * self.chunks) == 0


def stepping(pure: Callable, params: Any, state: Any, *inputs: torch.Tensor, compiled: bool = False) -> Callable:
    """step() -> loss, of `pure(params, state, *inputs) -> loss, params, state`."""
    run = torch.compile(pure, fullgraph=True, dynamic=False) if compiled else pure

    def step():
        nonlocal params, state
        loss, params, state = run(params, state, *inputs)
        return loss

    return step


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


def slowest(results: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Of what was timed on all ranks: a step lasts as long as on its slowest one."""
    return {part: [max(times) for times in zip(*(rank[part] for rank in results), strict=True)] for part in results[0]}


def medians(results: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    return {part: statistics.median(times) for part, times in slowest(results).items()}


def hidden(seconds: dict[str, float]) -> float:
    """The share of the smaller of computing and communicating by which the step is shorter than both together."""
    parts = seconds["computing"], seconds["communicating"]
    return (sum(parts) - seconds["step"]) / min(parts)


def seconds_of(call: Callable, samples: int = 5, least: float = 0.02, chosen: Callable = statistics.median) -> float:
    """Seconds of one call: of samples, each long enough for the clock, the median or another that is chosen."""
    for _ in range(2):
        settle()
        start = perf_counter()
        call()
        settle()
    often, found = 1 + int(least / max(perf_counter() - start, 1e-7)), []
    for _ in range(samples):
        start = perf_counter()
        for _ in range(often):
            call()
        settle()
        found.append((perf_counter() - start) / often)
    return chosen(found)


def sent_by(step: Callable, count: int = 2) -> float:
    """Bytes that this rank sends in one step."""
    together()
    before = bytes_sent()
    for _ in range(count):
        step()
    return (bytes_sent() - before) / count


def raced(mesh, contest: Contest, sides: Sequence[str], size: Any, optimizer: str, samples: int, small=None) -> dict:
    """Of each side on this rank: seconds of its steps, in turn; bytes sent in one; the most that the third one holds in
    memory, beyond what this rank had before there was this model; and its loss.

    A side that cannot be built, or does not run, on all ranks alike, is named in "failed", and the others go on.
    `small`: a step of this size goes first, so that code, threads and sockets, which every program has, do not count.
    """
    made, found = {}, {part: {} for part in ("sent", "peaks", "losses", "failed")}
    for side in sides:
        build = contest.side(side)
        try:
            if small:
                build(mesh, small, optimizer)()
            gc.collect()
            together()
            before = resident()
            step = build(mesh, size, optimizer)
            first = float(step().detach())
            step()
            gc.collect()
            reset_peak()
            step()
            settle()
            found["peaks"][side] = resident(peak=True) - before
            again = float(step().detach())
            found["losses"][side] = first if size.dtype == torch.bfloat16 else again  # bf16 rounds small updates
            found["sent"][side] = sent_by(step)
            made[side] = step
        except Exception as error:
            found["failed"][side] = f"{type(error).__name__}: {error}"[:600]
    return found | {"seconds": in_turn(made, samples, size.repeat, warmup=1) if made else {}}


def compared(ranks: list[dict], size: Any) -> dict:
    """What `raced` gave on all ranks, by side: quartiles of milliseconds, MB sent, peak MB, loss, and each rival's
    ratio, of ours to its; and what failed."""
    times, failed = slowest([rank["seconds"] for rank in ranks]), dict(ranks[0]["failed"])
    losses = {side: sum(rank["losses"][side] for rank in ranks) for side in times}
    first = next(iter(losses.values()), 0.0)
    if times and not largest(abs(loss - first) for loss in losses.values()) <= AGREE[size.dtype] * abs(first):
        failed["losses"] = f"the sides differ in their loss: {losses}"
    row: dict = {"failed": failed, "flops": size.flops, "ranks": len(ranks), "losses": losses, "ratio": {}}
    row["ms"] = {side: [1e3 * t for t in quartiles(each)] for side, each in times.items()}
    row["sent"] = {side: sum(rank["sent"][side] for rank in ranks) / len(ranks) / 1e6 for side in times}
    row["MB"] = {side: max(rank["peaks"][side] for rank in ranks) / 1e6 for side in times}
    for rival in times:
        mine = "ours compiled" if "compiled" in rival else "ours"
        if rival != mine and mine in times:
            row["ratio"][rival] = ratios(times[mine], times[rival])
    return row


def race(contest: Contest, sides: Sequence[str], size: Any, optimizer: str, samples: int, ranks: int, small=None):
    """`compared`, of ranks that are started for it; none of the sides may fail."""
    row = compared(on_ranks(raced, split(contest.axes, ranks), contest, sides, size, optimizer, samples, small), size)
    if row["failed"]:
        raise ValueError(f"{contest.name}, {size}, {optimizer}: {row['failed']}")
    return row


def peak(contest: Contest, side: str, size: Any, optimizer: str, ranks: int, small: Any) -> float:
    """MB that the fullest rank holds in a step, on fresh ranks: what one side has given back to the allocator must not
    serve the other."""
    return race(contest, [side], size, optimizer, 1, ranks, small)["MB"][side]


def compete(about: str | None, known: dict[str, Contest], sizes: dict, optimizers: Sequence[str], small: Any) -> None:
    """A command: the table of these contests. All sides in turn on the same ranks, then each alone for its memory."""
    parser = options(about, ranks=4, only=known, sizes=sizes, optimizers=optimizers, rivals=RIVALS, steps=20)
    args, lines = parser.parse_args(), []
    torch.set_num_threads(1)
    ranks, rivals = args.ranks, args.rivals
    for label, name, optimizer in itertools.product(args.sizes, args.only, args.optimizers):
        contest, size = known[name], sizes[label]
        if not contest.fits(size, ranks):
            continue
        sides = ("ours", *rivals)
        row = race(contest, sides, size, optimizer, args.steps, ranks)
        line = [label, name, contest.rival, optimizer, f"{row['ms']['ours'][1]:.1f}"]
        for rival in rivals:
            line += [f"{row['ms'][rival][1]:.1f}", spread(row["ratio"][rival])]
        closed = f"{contest.wire_bytes(split(contest.axes, ranks), size) / 1e6:.1f}" if contest.wire_bytes else ""
        line += [f"{row['sent']['ours']:.1f}", closed, f"{row['sent'][rivals[0]]:.1f}"]
        lines.append([*line, *(f"{peak(contest, side, size, optimizer, ranks, small):.1f}" for side in sides)])
        print(", ".join(map(str, lines[-1])), file=sys.stderr, flush=True)
    chosen = "; ".join(f"{label}: {sizes[label]}" for label in args.sizes)
    print(f"{ranks} ranks on {machine()}; {args.steps} samples of each side, 1 thread a rank.\n{chosen}.\n")
    headers = ["size", "ours", "PyTorch's", "optimizer", "ours, ms"]
    headers += [head for rival in rivals for head in (f"{rival}, ms", f"ours / {rival}")]
    headers += ["ours, MB sent", "closed form, MB", f"{rivals[0]}, MB sent"]
    show(lines, [*headers, *(f"{side}, peak MB" for side in ("ours", *rivals))], 4)


TCP_INFO, BYTES_SENT = 11, 200  # of linux/tcp.h: a struct tcp_info, and its member tcpi_bytes_sent (Linux 4.19)
MAX_PACING_RATE = 47  # of asm-generic/socket.h: SO_MAX_PACING_RATE


def tcp_sockets() -> Iterator[tuple[socket.socket, bytes]]:
    """This process's TCP sockets, each with its struct tcp_info."""
    if platform.system() != "Linux":
        raise OSError("only Linux counts what its sockets send, and paces them\n  fix: run it there")
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as s:
                yield s, s.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
        except OSError:  # closed since, or not TCP
            continue


def bytes_sent() -> float:
    """Payload bytes that this process has sent over its TCP sockets so far; NaN where the kernel does not tell.

    Each socket's own counter, not the interface's: other processes on this machine do not count.
    """
    infos = [info for _, info in tcp_sockets()]
    if any(len(info) < BYTES_SENT + 8 for info in infos):
        return math.nan
    return sum(struct.unpack_from("Q", info, BYTES_SENT)[0] for info in infos)


def speed(wire: float) -> str:
    return f"{wire:.0f} MB/s" if wire else "loopback"


def slow_wire(wire: float) -> None:
    """Let the kernel send on each of this process's TCP connections no faster than so many MB/s; 0: as fast as it can.

    Loopback is as fast as the cores copy: to send takes their time. On a slowed wire it takes time, but not theirs.
    """
    for s, _ in tcp_sockets():
        s.setsockopt(socket.SOL_SOCKET, MAX_PACING_RATE, struct.pack("Q", int(wire * 1e6 or 1e12)))


def resident(peak: bool = False) -> int:
    """Bytes of this process in memory, now or at most since `reset_peak`; on a GPU of its tensors there."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    if not peak:
        trim()
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def reset_peak() -> None:
    if torch.cuda.is_initialized():
        return torch.cuda.reset_peak_memory_stats()
    trim()
    Path("/proc/self/clear_refs").write_text("5")


def trim() -> None:
    """Give the allocator's free memory back, where it is glibc's: what was freed must not count as held."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
