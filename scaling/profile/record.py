"""Record a profile around any code with typed lines, on one process or on all ranks alike.

    with profile() as p:
        for batch in batches:
            params, state, metrics = step(params, state, batch)
            p.step()                                        # the end of a step; without any, the block is one
    print(p.table())

torch.profiler runs underneath and shows the lines as spans in its trace. The lines' times come from `scaling.trace`,
which needs a few clock readings for each. Nothing runs when no profile is open. At the end of the block the ranks
exchange their timelines, so all of them must reach it.

Times are on one clock for all ranks. On one machine `perf_counter` is the same clock for all. Across machines each rank
exchanges messages with rank 0. The quickest exchange tells most, since the other clock was read somewhere between
sending and receiving (as in NTP).

A rank is not called slow for other work of the machine. Linux counts for each thread how long it was ready to run while
the cores ran others (/proc/thread-self/schedstat, the second number, in nanoseconds); reading it takes a microsecond.
Other systems have no such count.
"""

import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from scaling import trace
from scaling.common.torch_private import process_group, profiling
from scaling.hardware import chip
from scaling.profile.result import Profile
from scaling.profile.timeline import LineRun, RankTimeline, disjoint
from scaling.profile.torch_trace import RankTrace, Seen, Spans, on_device, read_trace, with_transfers

BOOT = Path("/proc/sys/kernel/random/boot_id")
COUNTER = "/proc/thread-self/schedstat"
ROUNDS = 16  # exchanges of messages with rank 0
SKIP, COUNT = 2, 5  # steps that run first unprofiled, since they make buffers and connections; steps that are profiled


@contextmanager
def profile(*, ops: bool = True, memory: bool = True) -> Iterator[Profile]:
    """Profile a block. If the block raises, the error passes through and no profile is made.

    Args:
        ops: whether to record torch.profiler's view, too: the operations between the lines, and the transfers.
        memory: whether to record the memory of live tensors. Within another profile, which holds torch.profiler,
            neither is recorded.
    """
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    spans, device = Spans(not profiling() and (ops or memory)), "cuda" if cuda else "cpu"
    found = Profile(spans=spans, synchronize=torch.cuda.synchronize if cuda else None)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences its messages at start and stop
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    below = None
    if spans.read:
        below, blocks = torch_profile(activities=activities, profile_memory=memory, acc_events=True), [torch.empty(1)]
        below.start()
        if memory:
            _free_in_silence(blocks)
    try:
        with core_waits() as cores:

            def watch(event: trace.Event, moment: str) -> None:
                spans.watch(event, moment)
                if moment in ("started", "ended"):
                    cores.look()

            with trace.trace(watch) as log:
                found.step()
                yield found
                found.finish()
    finally:
        spans.close()
        if below is not None:
            below.stop()
    ahead, text, seen = offset_to_first(), "", Seen()
    if below is not None:
        text = _exported(below)
        seen = read_trace(json.loads(text), spans.begun, device, ahead)
    marks, runs, ops_seen = [mark + ahead for mark in found.marks], runs_of(log.events, ahead), seen.ops
    runs = with_transfers(runs, seen.transfers)
    if cuda:
        runs, ops_seen = on_device(runs, seen.kernels)
        marks[-1] = max([marks[-1], *(run.end for run in runs)])
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = RankTimeline(rank, tuple(marks), tuple(disjoint(runs)), seen.memory, ops_seen, device, cores.waited(ahead))
    found.made, found.traces = _gathered(mine, RankTrace(text, seen.shift))


def watched(numbers: Iterable[int], where: str, rank: int, predict: str = "") -> Iterator[int]:
    """Yield the numbers of a run's steps, and profile COUNT steps after the first SKIP.

    Rank 0 writes the profile to `where` (see `Profile.save`), compared with the predictions for the chip `predict` if
    one is named. If `where` is "", nothing is profiled. A loop that is left early writes nothing.
    """
    coming = iter(numbers)
    if where:
        for _, number in zip(range(SKIP), coming, strict=False):
            yield number
        with profile() as p:
            for _, number in zip(range(COUNT), coming, strict=False):
                yield number
                p.step()
        if rank == 0:
            p.save(where, chip(predict) if predict else None)
    yield from coming


def profiled(mesh, fn: Callable, where: str, *args):
    """Call fn(mesh, *args) in a profile of one step, which rank 0 writes to `where`; return the call's result."""
    with profile() as p:
        result = fn(mesh, *args)
    if mesh.rank == 0:
        p.save(where)
    return result


def _free_in_silence(blocks: list[torch.Tensor]) -> None:
    """Free blocks that were allocated before a profile, with standard error closed meanwhile.

    torch warns there at the first such block of a process. A profile counts only blocks that are allocated within it.
    """
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    blocks.clear()
    os.dup2(kept, 2)
    os.close(kept)
    os.close(nowhere)


def _exported(below: torch_profile) -> str:
    with tempfile.TemporaryDirectory(prefix="scaling-profile-") as folder:
        below.export_chrome_trace(path := f"{folder}/trace.json")
        return Path(path).read_text()


def runs_of(events: Iterable[trace.Event], ahead: float = 0.0) -> list[LineRun]:
    """Return the events of a trace as runs of lines, with `ahead` seconds added to their times.

    An asynchronous line occupies the computing lane twice: during its call, and while its result is waited for.
    """
    groups: dict[str, tuple[int, ...]] = {"": ()}
    found = []
    for event in events:
        if (name := event.group) not in groups:
            groups[name] = tuple(dist.get_process_group_ranks(process_group(name)))
        group, called, end = groups[name], event.called + ahead, max(event.end, event.left, event.called) + ahead
        held = ((called, end),)
        if event.async_op:
            waited = event.waited + ahead if event.waited else end
            held = ((called, (event.left or event.start) + ahead), (waited, end))
        before = event.before if isinstance(event.before, tuple) else (event.before,)
        found.append(LineRun(
            str(event), event.op, event.axes, called, end, held, " * ".join(map(str, before)), str(event.after),
            None, event.nbytes or sum(event.memory), event.wire_bytes, event.flops,
            str(event.dtype or "").removeprefix("torch."), event.key, group,
            tuple(group[i] for i in event.peers) if group else (), event.async_op,
        ))  # fmt: skip
    return found


def _gathered(mine: RankTimeline, trace: RankTrace) -> tuple[tuple[RankTimeline, ...], list[RankTrace]]:
    """Return the timelines of all ranks, in their order, and on rank 0 their traces."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return (mine,), [trace]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    traces: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(trace, traces)
    return tuple(everyone), traces or []


def machine() -> str:
    """Return a text that is equal for two processes if they share a clock."""
    return BOOT.read_text().strip() if BOOT.exists() else socket.gethostname()


def offset(exchanges: Iterable[tuple[float, float, float]]) -> float:
    """Return the seconds to add to this clock, from (sent, the other's time, received) of several exchanges.

    The error is at most half of the quickest exchange's duration, received - sent.
    """
    sent, theirs, received = min(exchanges, key=lambda each: each[2] - each[0])
    return theirs - (sent + received) / 2


def offset_to_first() -> float:
    """Return the seconds to add to this rank's clock to get rank 0's; all ranks of the world call it."""
    if not dist.is_initialized():
        return 0.0
    machines: list = [None] * dist.get_world_size()
    dist.all_gather_object(machines, machine())
    if len(set(machines)) == 1:
        return 0.0
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    exchanges = []
    for rank in range(1, len(machines)):
        for _ in range(ROUNDS if dist.get_rank() in (0, rank) else 0):
            time = torch.zeros(1, dtype=torch.float64, device=device)
            if dist.get_rank() == rank:
                sent = trace.now()
                dist.send(time, 0)
                dist.recv(time, 0)
                exchanges.append((sent, time.item(), trace.now()))
            else:
                dist.recv(time, rank)
                dist.send(time.fill_(trace.now()), rank)
    return offset(exchanges) if exchanges else 0.0


@dataclass
class CoreWaits:
    """Readings of a thread's counter of seconds for which it waited for a core (see above): (when, the file's text)."""

    file: int | None
    read: list[tuple[float, bytes]] = field(default_factory=list)

    def look(self) -> None:
        """Read the counter, and keep its text with the time."""
        if self.file is not None:
            self.read.append((trace.now(), os.pread(self.file, 64, 0)))

    def waited(self, later: float = 0.0) -> tuple[tuple[float, float], ...]:
        """Return (when, seconds that the thread has waited for a core so far), with `later` added to the clock."""
        return tuple((when + later, int(text.split()[1]) * 1e-9) for when, text in self.read)


@contextmanager
def core_waits() -> Iterator[CoreWaits]:
    """Read this thread's counter at the beginning and at the end of the block, and at each `look()` in between."""
    looks = CoreWaits(os.open(COUNTER, os.O_RDONLY) if os.path.exists(COUNTER) else None)
    looks.look()
    try:
        yield looks
        looks.look()
    finally:
        if looks.file is not None:
            os.close(looks.file)
