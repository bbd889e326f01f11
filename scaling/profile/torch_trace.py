"""torch.profiler's trace of a rank: the typed lines are spans in it, and it says what ran between them and when.

`gloo:*` spans are the work of a collective on gloo's thread, waiting for others included (`c10d::*` are only the
calls). On a GPU a kernel belongs to the line during which it was launched, wherever and whenever it then runs.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaling import trace
from scaling.common.torch_private import RecordedSpan
from scaling.profile.intervals import Interval

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
PLACES = 1000  # processes and devices of a rank


@dataclass
class Spans:
    """Spans of torch's trace, open and closed; of all, in order, the name and when it began, by `perf_counter`."""

    begun: list[tuple[str, float]] = field(default_factory=list)
    open: dict[Hashable, Any] = field(default_factory=dict)

    def begin(self, key: Hashable, name: str) -> None:
        span = self.open[key] = RecordedSpan(name)
        self.begun.append((name, trace.now()))
        span.__enter__()

    def end(self, key: Hashable) -> None:
        if key in self.open:
            self.open.pop(key).__exit__(None, None, None)

    def close(self) -> None:
        """End those that an error has left open, the innermost first."""
        for key in reversed(list(self.open)):
            self.end(key)

    def watch(self, event: trace.Event, moment: str) -> None:
        """A line is a span while it holds the thread; an asynchronous one twice, in its call and where it is waited
        for."""
        if moment in ("returned", "ended"):
            self.end(id(event))
        elif id(event) not in self.open:
            self.begin(id(event), f"{event}" + " is waited for" * (moment == "waited"))


@dataclass(frozen=True)
class Seen:
    """Seconds of `perf_counter`, which is `shift` behind the trace's clock. `ops`: (name, start, end) on the thread
    that calls, outermost only; `memory`: (when, bytes); `transfers`: (name, start, end) of gloo's; `kernels`: (when
    launched, name, start, end) on a GPU."""

    ops: tuple[tuple[str, float, float], ...] = ()
    memory: tuple[tuple[float, int], ...] = ()
    transfers: tuple[tuple[str, float, float], ...] = ()
    kernels: tuple[tuple[float, str, float, float], ...] = ()
    shift: float = 0.0


def read_trace(found: Mapping, begun: Sequence[tuple[str, float]], device: str = "cpu") -> Seen:
    """Of an exported trace in which these spans were begun: the one that followed its time soonest tells the clock."""
    events = [event for event in found["traceEvents"] if "ts" in event]
    names = {name for name, _ in begun}
    spans = sorted((e for e in events if e["name"] in names and "dur" in e), key=lambda e: e["ts"])
    if not spans:
        return Seen()
    shift = min(span["ts"] * 1e-6 - when for span, (_, when) in zip(spans, begun, strict=True))

    def interval(event: Mapping) -> Interval:
        start = event["ts"] * 1e-6 - shift
        return start, start + event.get("dur", 0.0) * 1e-6

    launched = {e["args"]["correlation"]: interval(e)[0] for e in events
                if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})}  # fmt: skip
    kernels = [
        (launched[e["args"]["correlation"]], e["name"], *interval(e))
        for e in events
        if e.get("cat") in DEVICE_WORK and e.get("args", {}).get("correlation") in launched
    ]
    ops = [(e["name"], *interval(e)) for e in events
           if e.get("cat") == "cpu_op" and e["tid"] == spans[0]["tid"] and e["name"] not in names]  # fmt: skip
    kind = {"cpu": 0, "cuda": 1}[device]
    memory = [
        (interval(e)[0], int(e["args"]["Bytes"]))
        for e in events
        if e["name"] == "[memory]" and e["args"].get("Device Type") == kind
    ]
    transfers = [(e["name"], *interval(e)) for e in events if e["name"].startswith("gloo:") and "dur" in e]
    return Seen(tuple(outermost(ops)), tuple(sorted(memory)), tuple(sorted(transfers, key=lambda t: t[1])),
                tuple(sorted(kernels)), shift)  # fmt: skip


def outermost(ops: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Those that lie in no other one, by their start."""
    kept: list[tuple[str, float, float]] = []
    for op in sorted(ops, key=lambda op: (op[1], -op[2])):
        if not kept or op[1] >= kept[-1][2]:
            kept.append(op)
    return kept


@dataclass(frozen=True)
class RankTrace:
    """What torch.profiler exported on a rank, as text; `shift`: what takes its times to rank 0's clock, in seconds."""

    text: str
    shift: float


def join_traces(traces: Sequence[RankTrace], details: Sequence[Mapping[str, Sequence[dict]]]) -> dict:
    """The ranks' traces as one, for ui.perfetto.dev and chrome://tracing. `details`: of each rank, {line: what is said
    of each of its runs}."""
    events = []
    for rank, own in enumerate(traces):
        places: defaultdict = defaultdict(lambda base=rank * PLACES: base + len(places))  # noqa: B023
        met: Counter = Counter()
        for event in sorted(json.loads(own.text)["traceEvents"], key=lambda event: event.get("ts", 0)):
            event["pid"] = places[event.get("pid")]
            event["ts"] = event.get("ts", 0) + own.shift * 1e6
            if event["name"] == "process_name":
                event["args"] = {"name": f"rank {rank}"}
            elif "id" in event:  # of an arrow
                event["id"] = f"{rank}.{event['id']}"
            elif event["name"] == "[memory]":
                event |= {"name": "bytes", "ph": "C", "args": {"live": event["args"]["Total Allocated"]}}
            elif event["name"] in details[rank]:
                event.setdefault("args", {}).update(details[rank][event["name"]][met[event["name"]]])
                met[event["name"]] += 1
            events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: Path, traces: Sequence[RankTrace], details: Sequence[Mapping[str, Sequence[dict]]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(join_traces(traces, details)))
    return path
