"""Read torch.profiler's trace of a rank, in which the typed lines are spans: what ran between them, and when.

`gloo:*` spans are the work of a collective on gloo's thread, including its waiting for others (`c10d::*` are only the
calls). On a GPU a kernel belongs to the line during which it was launched, wherever and whenever it then runs.
"""

import json
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scaling import trace
from scaling.common.torch_private import RecordedSpan
from scaling.profile.timeline import Interval, LineRun, RankTimeline, subtract, union

GLOO = {"AllReduce": "gloo:all_reduce", "ReduceScatter": "gloo:all_to_all", "AllToAll": "gloo:all_to_all"}
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
PLACES = 1000  # ids of processes and devices set apart for each rank
OpSpan = tuple[str, float, float]  # name, start, end
KernelSpan = tuple[float, str, float, float]  # launch time, name, start, end


@dataclass
class Spans:
    """Opens and closes spans in torch's trace, and keeps the name and the beginning (`perf_counter`) of each, in order.

    If no trace is `read`, it does nothing, since the spans of a nested profile would appear in the outer one's trace.
    """

    read: bool = True
    begun: list[tuple[str, float]] = field(default_factory=list)
    open: dict[Hashable, Any] = field(default_factory=dict)

    def begin(self, key: Hashable, name: str) -> None:
        """Open a span under this key."""
        if not self.read:
            return
        span = self.open[key] = RecordedSpan(name)
        self.begun.append((name, trace.now()))
        span.__enter__()

    def end(self, key: Hashable) -> None:
        """Close the span of this key, if it is open."""
        if key in self.open:
            self.open.pop(key).__exit__(None, None, None)

    def close(self) -> None:
        """Close the spans that an error has left open, the innermost first."""
        for key in reversed(list(self.open)):
            self.end(key)

    def watch(self, event: trace.Event, moment: str) -> None:
        """Show a line as a span while it holds the thread; an asynchronous line has two, for its call and its wait."""
        if moment in ("returned", "ended"):
            self.end(id(event))
        elif id(event) not in self.open:
            self.begin(id(event), f"{event}" + " is waited for" * (moment == "waited"))


@dataclass(frozen=True)
class Seen:
    """The contents of a trace, in seconds of the wanted clock, which is `shift` ahead of the trace's own.

    `ops`: the outermost operations on the calling thread; `memory`: (when, bytes); `transfers`: of gloo; `kernels`: on
    a GPU.
    """

    ops: tuple[OpSpan, ...] = ()
    memory: tuple[tuple[float, int], ...] = ()
    transfers: tuple[OpSpan, ...] = ()
    kernels: tuple[KernelSpan, ...] = ()
    shift: float = 0.0


def read_trace(found: Mapping, begun: Sequence[tuple[str, float]], device: str = "cpu", ahead: float = 0.0) -> Seen:
    """Read an exported trace in which the spans `begun` were opened; the wanted clock is `ahead` of `perf_counter`.

    The span that appears in the trace soonest after its recorded beginning relates the two clocks.
    """
    events = [event for event in found["traceEvents"] if "ts" in event]
    names = {name for name, _ in begun}
    spans = sorted((e for e in events if e["name"] in names and "dur" in e), key=lambda e: e["ts"])
    if not spans:
        return Seen()
    shift = ahead - min(span["ts"] * 1e-6 - when for span, (_, when) in zip(spans, begun, strict=True))

    def interval(event: Mapping) -> Interval:
        start = event["ts"] * 1e-6 + shift
        return start, start + event.get("dur", 0.0) * 1e-6

    launched, kernels, ops, memory, transfers = {}, [], [], [], []
    for e in events:
        kind, args = e.get("cat"), e.get("args", {})
        if kind in ("cuda_runtime", "cuda_driver") and "correlation" in args:
            launched[args["correlation"]] = interval(e)[0]
        elif kind in DEVICE_WORK:
            kernels.append((args.get("correlation"), e["name"], *interval(e)))
        elif kind == "cpu_op" and e["tid"] == spans[0]["tid"] and e["name"] not in names:
            ops.append((e["name"], *interval(e)))
        elif e["name"] == "[memory]" and args.get("Device Type") == {"cpu": 0, "cuda": 1}[device]:
            memory.append((interval(e)[0], int(args["Bytes"])))
        elif e["name"].startswith("gloo:") and "dur" in e:
            transfers.append((e["name"], *interval(e)))
    kernels = sorted((launched[number], *rest) for number, *rest in kernels if number in launched)
    transfers.sort(key=lambda transfer: transfer[1])
    return Seen(tuple(outermost(ops)), tuple(sorted(memory)), tuple(transfers), tuple(kernels), shift)


def outermost(ops: Iterable[OpSpan]) -> list[OpSpan]:
    """Return the operations that are nested in no other one, sorted by their start."""
    kept: list[OpSpan] = []
    for op in sorted(ops, key=lambda op: (op[1], -op[2])):
        if not kept or op[1] >= kept[-1][2]:
            kept.append(op)
    return kept


def with_transfers(runs: Sequence[LineRun], transfers: Sequence[OpSpan]) -> list[LineRun]:
    """Return the runs with gloo's spans: each run gets the first free span of its kind that began within it."""
    waiting, found = {name: deque(t for t in transfers if t[0] == name) for name in GLOO.values()}, []
    for run in runs:
        mine = waiting[GLOO[run.op]] if run.communicates and run.op in GLOO else deque()
        while mine and mine[0][1] < run.called:
            mine.popleft()
        seen = mine.popleft()[1:] if mine and mine[0][1] <= run.end else None
        found.append(replace(run, transfer=seen))
    return found


def on_device(runs: Sequence[LineRun], kernels: Sequence[KernelSpan]) -> tuple[list[LineRun], tuple[OpSpan, ...]]:
    """Return the lines as runs on a GPU, and the kernels between them as ops.

    A line holds the GPU while the kernels launched in it run; a collective holds it while its transfer is covered by no
    other kernel. Kernels that were launched between the lines are the ops.
    """
    mine: list[list[Interval]] = [[] for _ in runs]
    ops, i = [], 0
    spans = sorted((held[0], held[1], i) for i, run in enumerate(runs) for held in run.held)
    for launched, name, start, end in sorted(kernels):
        while i < len(spans) and spans[i][1] < launched:
            i += 1
        if i < len(spans) and spans[i][0] <= launched:
            mine[spans[i][2]].append((start, end))
        else:
            ops.append((name, start, end))
    computing = union(
        [each for run, own in zip(runs, mine, strict=True) if not run.communicates for each in own]
        + [(start, end) for _, start, end in ops]
    )
    placed = []
    for run, busy in zip(runs, map(union, mine), strict=True):
        changes: dict[str, Any] = {"held": tuple(busy)}
        if busy:
            whole = busy[0][0], busy[-1][1]
            changes |= {"called": whole[0], "end": whole[1], "transfer": None}
            if run.communicates:
                changes |= {"held": tuple(subtract([whole], computing)), "transfer": whole}
        placed.append(replace(run, **changes))
    return placed, tuple(ops)


@dataclass(frozen=True)
class RankTrace:
    """The text that torch.profiler exported on a rank; `shift` takes its times to rank 0's clock, in seconds."""

    text: str
    shift: float


def join_traces(traces: Sequence[RankTrace], timelines: Sequence[RankTimeline]) -> dict:
    """Join the ranks' traces for ui.perfetto.dev and chrome://tracing, with the details of each line's run."""
    events = []
    for rank, own in enumerate(traces):
        places: defaultdict = defaultdict(lambda base=rank * PLACES: base + len(places))  # noqa: B023
        said: defaultdict[str, deque[dict]] = defaultdict(deque)
        for run in timelines[rank].runs:
            said[run.line].append(details(run))
        for event in sorted(json.loads(own.text)["traceEvents"], key=lambda event: event.get("ts", 0)):
            event["pid"] = places[event.get("pid")]
            event["ts"] = event.get("ts", 0) + own.shift * 1e6
            if event["name"] == "process_name":
                event["args"] = {"name": f"rank {rank}"}
            elif "id" in event:  # the event is an arrow
                event["id"] = f"{rank}.{event['id']}"
            elif event["name"] == "[memory]":
                event |= {"name": "bytes", "ph": "C", "args": {"live": event["args"]["Total Allocated"]}}
            elif said[event["name"]]:
                event.setdefault("args", {}).update(said[event["name"]].popleft())
            events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def details(run: LineRun) -> dict[str, Any]:
    """Return the details of a line's run that a trace shows."""
    said: dict[str, Any] = {"V": run.nbytes, "sent": run.wire_bytes, "FLOPs": run.flops}
    if run.communicates:
        said |= {"waiting ms": run.waiting * 1e3, "exposed ms": run.exposed * 1e3}
        said |= {"hidden ms": run.hidden * 1e3, "waiting for rank": run.behind}
    return said
