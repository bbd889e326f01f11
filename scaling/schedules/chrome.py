"""Chrome traces, for chrome://tracing and ui.perfetto.dev: what pipelines and profiles write. Times in seconds."""

import json
from collections.abc import Sequence
from pathlib import Path


def row_name(name: str, pid: int, tid: int | None = None) -> dict:
    """The name of a process, or of one of its rows."""
    if tid is None:
        return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
    return {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def time_bar(name: str, pid: int, tid: int, start: float, end: float, args: dict, cat: str = "") -> dict:
    """Something that runs on a row, from when to when."""
    kind = {"cat": cat} if cat else {}
    return {"name": name, **kind, "ph": "X", "pid": pid, "tid": tid, "args": args,
            "ts": start * 1e6, "dur": (end - start) * 1e6}  # fmt: skip


def write_events(path: str | Path, events: Sequence[dict]) -> None:
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
