"""What torch.profiler saw, out of the trace that it exports: operations, memory, transfers, kernels.

`gloo:*` spans are the work of a collective on gloo's thread, waiting for others included (`c10d::*` are only the
calls). On a GPU a kernel belongs to the line during which it was launched, wherever and whenever it then runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scaling.profile.intervals import Interval

MARK = "scaling.profile: clock"  # a span in which perf_counter was read; the shortest one tells best
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Seen:
    """Seconds of `perf_counter`. `ops`: (name, start, end) on the thread that calls, outermost only; `memory`: (when,
    bytes); `transfers`: (name, start, end) of gloo's; `kernels`: (when launched, name, start, end) on a GPU."""

    ops: tuple[tuple[str, float, float], ...] = ()
    memory: tuple[tuple[float, int], ...] = ()
    transfers: tuple[tuple[str, float, float], ...] = ()
    kernels: tuple[tuple[float, str, float, float], ...] = ()


def read_trace(trace: Mapping, marked: Sequence[float], device: str = "cpu") -> Seen:
    """Of an exported trace; `marked`: when perf_counter was read within the spans named MARK, in their order."""
    events = [event for event in trace["traceEvents"] if "ts" in event]
    marks = sorted((e for e in events if e["name"] == MARK and "dur" in e), key=lambda e: e["ts"])
    if not marks:
        return Seen()
    closest, when = min(zip(marks, marked, strict=False), key=lambda pair: pair[0]["dur"])
    shift, thread = (closest["ts"] + closest["dur"] / 2) * 1e-6 - when, closest["tid"]

    def span(event: Mapping) -> Interval:
        start = event["ts"] * 1e-6 - shift
        return start, start + event.get("dur", 0.0) * 1e-6

    launched = {e["args"]["correlation"]: span(e)[0] for e in events
                if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})}  # fmt: skip
    kernels = [
        (launched[e["args"]["correlation"]], e["name"], *span(e))
        for e in events
        if e.get("cat") in DEVICE_WORK and e.get("args", {}).get("correlation") in launched
    ]
    ops = [(e["name"], *span(e)) for e in events if e.get("cat") == "cpu_op" and e["tid"] == thread]
    kind = {"cpu": 0, "cuda": 1}[device]
    memory = [
        (span(e)[0], int(e["args"]["Bytes"]))
        for e in events
        if e["name"] == "[memory]" and e["args"].get("Device Type") == kind
    ]
    transfers = [(e["name"], *span(e)) for e in events if e["name"].startswith("gloo:") and "dur" in e]
    return Seen(tuple(outermost(ops)), tuple(sorted(memory)), tuple(sorted(transfers, key=lambda t: t[1])),
                tuple(sorted(kernels)))  # fmt: skip


def outermost(ops: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Those that lie in no other one, by their start."""
    kept: list[tuple[str, float, float]] = []
    for op in sorted(ops, key=lambda op: (op[1], -op[2])):
        if not kept or op[1] >= kept[-1][2]:
            kept.append(op)
    return kept
