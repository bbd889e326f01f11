"""`with scaling.profile.profile() as p:` around any code with typed lines, on one process or on all ranks alike.

    with profile() as p:
        for batch in batches:
            params, state, metrics = step(params, state, batch)
            p.step()                                        # the end of a step; without any, the block is one
    print(p.table())

torch.profiler runs underneath, and has the lines as spans in its trace; their own times are those of `scaling.trace`,
a few clock readings each. Nothing runs when no profile is open. At the end of the block the ranks exchange what they
saw, so all of them must reach it.
"""

import json
import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from scaling import trace
from scaling.common.torch_private import process_group, profiling
from scaling.hardware import chip
from scaling.profile.clock import offset_to_first
from scaling.profile.cores import watched_cores
from scaling.profile.intervals import Interval, subtract, union
from scaling.profile.result import Profile
from scaling.profile.timeline import LineRun, RankTimeline, disjoint
from scaling.profile.torch_trace import RankTrace, Seen, Spans, read_trace

GLOO = {"AllReduce": "gloo:all_reduce", "ReduceScatter": "gloo:all_to_all", "AllToAll": "gloo:all_to_all"}

SKIP, COUNT = 2, 5  # steps that are not profiled first, since they make buffers and connections; and steps that are


@contextmanager
def profile(*, ops: bool = True, memory: bool = True) -> Iterator[Profile]:
    """Profile a block. `ops`: also what torch.profiler sees, the operations between the lines and the transfers;
    `memory`: and the memory of live tensors; within another profile, which has that one already, neither. What the
    block raises goes through, and no profile is made."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    spans = Spans()
    found = Profile(spans=spans, synchronize=torch.cuda.synchronize if cuda else None)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write when it starts and stops
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    below = None
    if not profiling() and (ops or memory):
        below, blocks = torch_profile(activities=activities, profile_memory=memory, acc_events=True), [torch.empty(1)]
        below.start()
        if memory:
            _free_in_silence(blocks)
    try:
        with watched_cores() as looks:

            def watch(event: trace.Event, moment: str) -> None:
                spans.watch(event, moment)
                looks.look(event, moment)

            with trace.trace(watch) as log:
                found.step()
                yield found
                found.finish()
    finally:
        spans.close()
        if below is not None:
            below.stop()
    device, seen, text = "cuda" if cuda else "cpu", Seen(), ""
    if below is not None:
        text = _exported(below)
        seen = read_trace(json.loads(text), spans.begun, device)
    mine = replace(timeline(log.events, found.marks, seen, device), waited=looks.waited)
    found.made, found.traces = _gathered(mine, text, seen.shift)


def watched(numbers: Iterable[int], where: str, rank: int, predict: str = "") -> Iterator[int]:
    """The numbers of a run's steps; some of the steps are profiled between them, and written to `where` by rank 0 (see
    `Profile.save`), beside what the chip `predict` would take, if one is named. Without a place it is the numbers
    alone. A loop that is left early writes nothing."""
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


def _free_in_silence(blocks: list[torch.Tensor]) -> None:
    """Free blocks that were allocated before a profile, with the standard error closed meanwhile.

    torch warns there at the first such block of a process. A profile counts only what is allocated within it.
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


def timeline(events: Sequence[trace.Event], marks: Sequence[float], seen: Seen, device: str) -> RankTimeline:
    """This rank's, on its own clock, of the events of a trace and of what torch.profiler saw."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    groups: dict[str, tuple[int, ...]] = {"": ()}
    for name in {event.group for event in events} - {""}:
        groups[name] = tuple(dist.get_process_group_ranks(process_group(name)))
    runs = with_transfers([run_of(event, groups[event.group]) for event in events], seen.transfers)
    ops = seen.ops
    if device == "cuda":
        runs, ops = on_device(runs, seen.kernels)
        marks = [*marks[:-1], max([marks[-1], *(run.end for run in runs)])]
    return RankTimeline(rank, tuple(marks), tuple(disjoint(runs)), seen.memory, ops, device)


def run_of(event: trace.Event, group: tuple[int, ...]) -> LineRun:
    """An event of a trace as a run that holds the calling thread: in the call, and where it is waited for."""
    end = max(event.end, event.left, event.called)
    held: tuple[Interval, ...] = ((event.called, end),)
    if event.async_op:
        held = ((event.called, event.left or event.start), (event.waited, end) if event.waited else (end, end))
    before = event.before if isinstance(event.before, tuple) else (event.before,)
    return LineRun(
        str(event), event.op, event.axes, event.called, end, held, " * ".join(map(str, before)), str(event.after),
        None, event.nbytes or event.memory, event.wire_bytes, event.flops,
        str(event.dtype or "").removeprefix("torch."), event.key, group,
        tuple(group[i] for i in event.peers) if group else (), event.async_op,
    )  # fmt: skip


def with_transfers(runs: Sequence[LineRun], transfers: Sequence[tuple[str, float, float]]) -> list[LineRun]:
    """The runs with gloo's spans, each the first one of its kind that began within the run and is no earlier run's."""
    waiting, found = {name: deque(t for t in transfers if t[0] == name) for name in GLOO.values()}, []
    for run in runs:
        mine = waiting[GLOO[run.op]] if run.communicates and run.op in GLOO else deque()
        while mine and mine[0][1] < run.called:
            mine.popleft()
        seen = mine.popleft()[1:] if mine and mine[0][1] <= run.end else None
        found.append(replace(run, transfer=seen))
    return found


def on_device(runs: Sequence[LineRun], kernels: Sequence[tuple[float, str, float, float]]):
    """(runs, ops) on a GPU: lines hold it by the kernels that were launched in them, a collective by what of its
    transfer no other kernel covers; kernels that were launched between the lines are ops."""
    mine: list[list[tuple[float, str, float, float]]] = [[] for _ in runs]
    ops, i = [], 0
    spans = sorted((held[0], held[1], i) for i, run in enumerate(runs) for held in run.held)
    for kernel in sorted(kernels):
        while i < len(spans) and spans[i][1] < kernel[0]:
            i += 1
        if i < len(spans) and spans[i][0] <= kernel[0]:
            mine[spans[i][2]].append(kernel)
        else:
            ops.append(kernel[1:])
    computing = union(
        [(a, b) for run, own in zip(runs, mine, strict=True) if not run.communicates for _, _, a, b in own]
        + [(a, b) for _, a, b in ops]
    )
    placed = []
    for run, own in zip(runs, mine, strict=True):
        busy = union((a, b) for _, _, a, b in own)
        if not busy:
            placed.append(replace(run, held=()))
            continue
        whole = busy[0][0], busy[-1][1]
        held = subtract([whole], computing) if run.communicates else busy
        placed.append(replace(run, called=whole[0], end=whole[1], held=tuple(held),
                              transfer=whole if run.communicates else None))  # fmt: skip
    return placed, tuple(ops)


def _gathered(mine: RankTimeline, text: str, shift: float) -> tuple[tuple[RankTimeline, ...], list[RankTrace]]:
    """The timelines of all ranks, in their order, on rank 0's clock; their traces on rank 0 alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return (mine,), [RankTrace(text, -shift)]
    where = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    offset = offset_to_first(where)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine.moved(offset))
    traces: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(RankTrace(text, offset - shift), traces)
    return tuple(everyone), traces or []
