"""Record the transfers and computations of a run, event by event.

    with trace() as log:
        Out, saved = fsdp_tp.forward(params, In, mesh)
    print(log.table())

Each collective and each einsum that runs inside the block adds one `Event`. This holds on a real mesh and on an
`AbstractMesh`, in a hand-written backward and in one that `torch.func.vjp` runs. A trace only observes, so the numbers
do not change.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from time import perf_counter
from typing import Any

from scaling.common.console import WIDE, table
from scaling.spec import Spec, format_axes


@dataclass(slots=True)
class Event:
    """One collective or einsum.

    All times are seconds of `time.perf_counter`. `called`, `left`, `waited`, `group` and `peers` serve profiles.

    Attributes:
        op: AllGather, ReduceScatter, AllReduce, AllToAll, CollectivePermute, Slice, Einsum, Broadcast, Scatter, Gather,
            Reduce, Send, Recv or Transfer.
        axes: The mesh axes that it ran over.
        before: The operand's type; for an Einsum, the tuple of its operands' types.
        after: The result's type.
        nbytes: V, the book's measure (Part 3): the bytes of the gathered or unreduced array as one group sees it. An
            AllReduce, which takes two passes over V, is listed with V.
        wire_bytes: The bytes that this rank sends.
        flops: The FLOPs of an Einsum on this rank.
        start: When it started.
        end: When it ended; an asynchronous event ends once it has been waited for.
        async_op: Whether the event is asynchronous.
        called: When the line was reached, before the ranks agreed on it.
        left: When the call of an asynchronous event returned.
        waited: When the wait for an asynchronous event began.
        group: The process group's name.
        peers: The ranks, by their index in the group, without which this rank cannot go on; () means all of them.
        memory: The bytes of each operand and of the result of an Einsum.
        pairs: Of a block of attention: the scores per head, and the mask's window or 0.
        dtype: The operand's dtype.
        key: A key that tells operands apart.
        perm: Of a CollectivePermute: its (source, target) blocks along the axes.
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
    memory: tuple[int, ...] = ()
    pairs: tuple[int, int] = (0, 0)
    dtype: Any = None
    key: tuple[int, ...] = ()
    perm: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return _text(self.op, self.axes, self.before, self.after)


@lru_cache(maxsize=4096)
def _text(op: str, axes: tuple[str, ...], before: "Spec | tuple[Spec, ...]", after: Spec) -> str:
    if op == "Einsum":
        return f"{after} = " + " * ".join(map(str, before if isinstance(before, tuple) else (before,)))
    return f"{after} = {op}{'_' + format_axes(axes) if axes else ''}({before})"


@dataclass
class Log:
    """The events of one `trace()` block, in the order in which they were started.

    `watch`, if given, is called with an event and the name of a moment: "reached" when a collective's line is reached,
    before the ranks agree on it; "started"; "returned" and "waited", for an asynchronous event, when its call returns
    and when the wait for it begins; and "ended". `loads` has load[E] of each layer of experts and each microbatch: how
    many tokens of all ranks chose each expert.
    """

    events: list[Event] = field(default_factory=list)
    watch: Callable[[Event, str], None] | None = None
    loads: list[Any] = field(default_factory=list)

    def collectives(self) -> list[Event]:
        """Return the events that move data between devices, which are all but Einsum and Slice."""
        return [event for event in self.events if event.op not in ("Einsum", "Slice")]

    def count(self, op: str, axes: tuple[str, ...] | str | None = None) -> int:
        """Return the number of events of this op, over these axes if any are given."""
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
        """FLOPs of this rank's einsums."""
        return sum(event.flops for event in self.events)

    def table(self) -> str:
        """Return a table of the lines in the order in which they ran, with their bytes, FLOPs and milliseconds."""
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


open_logs: list[Log] = []  # the logs of the open blocks, innermost last


@contextmanager
def trace(watch: Callable[[Event, str], None] | None = None) -> Iterator[Log]:
    """Collect an Event for each collective and each einsum that runs in the block.

    Blocks nest: each sees its own events and the events of inner blocks. `watch` is described at `Log`.
    """
    log = Log(watch=watch)
    open_logs.append(log)
    try:
        yield log
    finally:
        open_logs[:] = [other for other in open_logs if other is not log]  # not by ==, which compares the events


def reached(event: Event) -> Event:
    """Note that a collective's line is reached, which may have to wait for other ranks before it is recorded."""
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
    """Note that the call of an asynchronous event returns now."""
    event.left = now()
    _tell(event, "returned")


def waited(event: Event) -> None:
    """Note that the wait for an asynchronous event begins now."""
    event.waited = now()
    _tell(event, "waited")


def done(event: Event) -> None:
    """Note that an event ends now."""
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
    """Return the time of the clock that events use, in seconds."""
    return perf_counter()
