"""What was moved and computed, event by event.

    with trace() as log:
        Out, saved = fsdp_tp.forward(params, In, mesh)
    print(log.table())

Each collective and each einsum that runs inside the block adds one `Event`, on a real mesh and on an `AbstractMesh`
alike, in a hand-written backward and in one that `torch.func.vjp` runs. A trace only observes: numbers do not change.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from scaling.common.tables import WIDE, table
from scaling.spec import Spec, format_axes


@dataclass(slots=True)
class Event:
    """One collective or einsum.

    `op`: AllGather, ReduceScatter, AllReduce, AllToAll, CollectivePermute, Slice, Einsum, Broadcast, Scatter, Gather,
    Reduce, Send, Recv or Transfer; `axes`: the mesh axes it ran over; `before`: the operand's type (of an Einsum, a
    tuple); `after`: the result's. `nbytes`: V, the book's measure (Part 3): the gathered or unreduced array as one
    group sees it (an AllReduce, which takes two passes over V, is listed with V). `wire_bytes`: what this rank sends.
    `flops`: of an Einsum, on this rank. `start`, `end`: seconds of `time.perf_counter`; an asynchronous event ends
    where it was waited for.

    For a profile: `called`, when the line was reached, before ranks agreed on it; of an asynchronous event `left`, when
    the call returned, and `waited`, when it was waited for. `group`: the process group's name; `peers`: the ranks, by
    their place in it, without which this one cannot go on (none: all). `memory`: bytes of the operands and the result
    of an Einsum; `dtype` of the operand; `key` tells operands apart.
    """

    op: str
    axes: tuple[str, ...]
    before: "Spec | tuple[Spec, ...]"
    after: Spec
    nbytes: int = 0
    wire_bytes: int = 0
    flops: int = 0
    start: float = 0.0
    end: float = 0.0
    async_op: bool = False
    called: float = 0.0
    left: float = 0.0
    waited: float = 0.0
    group: str = ""
    peers: tuple[int, ...] = ()
    memory: int = 0
    dtype: Any = None
    key: tuple[int, ...] = ()

    def __str__(self) -> str:
        over = "_" + format_axes(self.axes) if self.axes else ""
        if self.op == "Einsum":
            operands = self.before if isinstance(self.before, tuple) else (self.before,)
            return f"{self.after} = " + " * ".join(map(str, operands))
        return f"{self.after} = {self.op}{over}({self.before})"


@dataclass
class Log:
    """The events of one `trace()` block, in the order in which they were started. `watch`, if given, is called with an
    event and its moments: "reached", the line of a collective, before ranks agree on it; "started"; of an asynchronous
    one "returned", as its call does, and "waited", when it is waited for; "ended"."""

    events: list[Event] = field(default_factory=list)
    watch: Callable[[Event, str], None] | None = None

    def collectives(self) -> list[Event]:
        """The events that move data between devices: all but Einsum and Slice."""
        return [event for event in self.events if event.op not in ("Einsum", "Slice")]

    def count(self, op: str, axes: tuple[str, ...] | str | None = None) -> int:
        return sum(event.op == op and (axes is None or event.axes == tuple(axes)) for event in self.events)

    @property
    def book_bytes(self) -> int:
        """Bytes by the book's count (Part 5, Takeaways): V for each collective, 2V for an AllReduce."""
        return sum(event.nbytes * (2 if event.op == "AllReduce" else 1) for event in self.collectives())

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(event.wire_bytes for event in self.events)

    @property
    def flops(self) -> int:
        return sum(event.flops for event in self.events)

    def table(self) -> str:
        """The lines as they ran, with their bytes, FLOPs and milliseconds."""
        rows = [
            (
                str(event),
                f"{event.nbytes:,}" if event.op not in ("Einsum", "Slice") else "",
                f"{event.wire_bytes:,}" if event.wire_bytes else "",
                f"{event.flops:,}" if event.flops else "",
                f"{(event.end - event.start) * 1e3:.2f}" + (" async" if event.async_op else ""),
            )
            for event in self.events
        ]
        return table(rows, ["line", "V bytes", "sent", "FLOPs", "ms"], WIDE, right=[False, True, True, True, False])


open_logs: list[Log] = []  # being written, innermost last


@contextmanager
def trace(watch: Callable[[Event, str], None] | None = None) -> Iterator[Log]:
    """Collect an Event for everything that runs in the block. Blocks nest: each sees its own events and inner ones'.
    `watch` as in `Log`."""
    log = Log(watch=watch)
    open_logs.append(log)
    try:
        yield log
    finally:
        open_logs[:] = [other for other in open_logs if other is not log]  # not by ==, which goes by the events


def reached(event: Event) -> Event:
    """The line of a collective has been reached, which may have to wait for other ranks before it is recorded."""
    _tell(event, "reached")
    return event


def record(event: Event) -> Event:
    """Add an event, which starts now, to every open log; called by collectives and einsum."""
    event.start = now()
    event.called = event.called or event.start
    for log in open_logs:
        log.events.append(event)
    _tell(event, "started")
    return event


def call_returned(event: Event) -> None:
    """The call of an asynchronous event returns."""
    event.left = now()
    _tell(event, "returned")


def waited(event: Event) -> None:
    """An asynchronous event is waited for from now on."""
    event.waited = now()
    _tell(event, "waited")


def done(event: Event) -> None:
    """An event ends now."""
    event.end = now()
    _tell(event, "ended")


def _tell(event: Event, moment: str) -> None:
    for log in open_logs:
        if log.watch is not None:
            log.watch(event, moment)


def in_product() -> bool:
    """Return whether the product of an einsum line is being computed now."""
    last = open_logs[-1].events[-1:] if open_logs else []
    return bool(last) and last[0].op == "Einsum" and not last[0].end


def now() -> float:
    return perf_counter()
