"""The trace of all ranks as a file for ui.perfetto.dev and chrome://tracing: the lines by their names in the book.

A process for each rank, in it the lines (what holds the lane that computes), the transfers (what is under way), which
may overlap, and the operations; waiting, exposed and hidden stand in a collective's details; memory is a counter.
"""

from collections.abc import Sequence
from pathlib import Path

from scaling.profile import memory
from scaling.profile.split import Split
from scaling.profile.timeline import RankTimeline
from scaling.schedules.chrome import row_name, time_bar, write_events

TRACKS = ("lines", "transfers", "operations")


def events(timelines: Sequence[RankTimeline], splits: Sequence[Sequence[Split]]) -> list[dict]:
    """The trace's events, in microseconds after the first mark of any rank."""
    zero = min(timeline.marks[0] for timeline in timelines)
    made: list[dict] = []

    def span(rank: int, track: str, name: str, start: float, end: float, **args) -> None:
        made.append(time_bar(name, rank, TRACKS.index(track), start - zero, end - zero, args))

    for timeline, found in zip(timelines, splits, strict=True):
        rank = timeline.rank
        made.append(row_name(f"rank {rank}", rank))
        made += (row_name(name, rank, i) for i, name in enumerate(TRACKS))
        for number, (start, end) in enumerate(timeline.steps):
            span(rank, "operations", f"step {number}", start, end)
        for i, (run, split) in enumerate(zip(timeline.runs, found, strict=True)):
            detail = {"op": run.op, "V": run.nbytes, "sent": run.wire_bytes, "FLOPs": run.flops}
            if run.communicates:
                detail |= {"waiting ms": split.waiting * 1e3, "exposed ms": split.exposed * 1e3}
                detail |= {"hidden ms": split.hidden * 1e3, "waiting for rank": split.behind}
                under_way = {"name": run.line, "cat": "transfer", "id": f"{rank}.{i}", "pid": rank, "tid": 1}
                made.append({**under_way, "ph": "b", "ts": (run.called - zero) * 1e6, "args": detail})
                made.append({**under_way, "ph": "e", "ts": (run.end - zero) * 1e6})
            for start, end in run.held:
                span(rank, "lines", run.line, start, end, **detail)
        for name, start, end in timeline.ops:
            span(rank, "operations", name, start, end)
        for when, total in memory.live(timeline):
            at = (when - zero) * 1e6
            made.append({"name": "live bytes", "ph": "C", "pid": rank, "ts": at, "args": {"bytes": total}})
    return made


def write_trace(path: Path, timelines: Sequence[RankTimeline], splits: Sequence[Sequence[Split]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_events(path, events(timelines, splits))
    return path
