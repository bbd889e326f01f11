"""Chunks streamed through a core: loaded from HBM into VMEM, computed, stored back (Part 2, "What Is a TPU?").

Two units work at once, HBM (loads and stores, one after the other) and the core. A chunk waits in one of `buffers`
places in VMEM: with one, the next load waits until the chunk before it has been computed and stored, so times add up;
with two (double buffering) it comes in while the core computes, and the slower unit is never idle.
"""

from dataclasses import dataclass
from typing import NamedTuple


class StreamWork(NamedTuple):
    """One transfer or computation: of which unit ("HBM" or "core"), what ("load", "compute", "store"), which chunk."""

    unit: str
    kind: str
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class Stream:
    """What happened when, in seconds."""

    works: tuple[StreamWork, ...]

    @property
    def seconds(self) -> float:
        return max(work.end for work in self.works)

    def busy(self, unit: str) -> float:
        """Seconds that a unit works."""
        return sum(work.end - work.start for work in self.works if work.unit == unit)


def stream_chunks(
    chunks: int, load: float, compute: float, store: float, buffers: int = 2, first: float = 0.0
) -> Stream:
    """`chunks` chunks that take `load`, `compute` and `store` seconds each; `first`: seconds of loading before them.

    HBM takes the loads that there is room for before the stores that wait. ValueError for less than one of a thing.
    """
    if chunks < 1 or buffers < 1:
        raise ValueError(f"chunks = {chunks}, buffers = {buffers}\n  fix: one or more of each")
    works, hbm, core = [StreamWork("HBM", "load", -1, 0.0, first)] if first else [], first, 0.0
    computed: list[float] = []

    def bring(chunk: int) -> None:
        nonlocal hbm, core
        start = max(hbm, computed[chunk - buffers] if chunk >= buffers else 0.0)
        hbm = start + load
        works.append(StreamWork("HBM", "load", chunk, start, hbm))
        begin = max(hbm, core)
        core = begin + compute
        works.append(StreamWork("core", "compute", chunk, begin, core))
        computed.append(core)

    for chunk in range(min(buffers, chunks)):
        bring(chunk)
    for chunk in range(chunks):
        start = max(hbm, computed[chunk])
        hbm = start + store
        works.append(StreamWork("HBM", "store", chunk, start, hbm))
        if chunk + buffers < chunks:
            bring(chunk + buffers)
    return Stream(tuple(works))


def draw_stream(run: Stream, columns: int = 64, seconds: float | None = None) -> str:
    """The two units' time as text, `columns` for `seconds` (default: all of it): L, C and S with the chunk's number."""
    seconds = seconds or run.seconds
    lines = []
    for unit in ("HBM", "core"):
        row = ["."] * columns
        for work in run.works:
            if work.unit == unit and work.start < seconds:
                begin, end = round(work.start / seconds * columns), round(min(work.end, seconds) / seconds * columns)
                name = f"{work.kind[0].upper()}{work.chunk if work.chunk >= 0 else 'X'}"
                row[begin:end] = name[: end - begin].ljust(end - begin, "-")
        lines.append(f"{unit:<4} |{''.join(row)}|")
    return "\n".join(lines)
