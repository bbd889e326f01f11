"""Read the last collectives of each rank of a run, also after a rank has hung, timed out or died.

Each rank writes its collectives as a ring of fixed-size lines into a memory-mapped file in the run's folder. The record
outlives the process however it ends, and `python -m scaling.train flight RUN` can read it while a run hangs.
"""

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scaling.common.console import Parser, complain
from scaling.trace import Event, Log, trace

LAST, WIDTH = 64, 192  # the number of lines in a record, and the bytes of each line
TOOK, TEXT = 32, WIDTH - 46  # the column of a collective's duration, and the bytes of its description
LATE = ("Send", "Recv", "Transfer", "AllToAll")  # some of these are only reported when they start
NAME, ALL = "flight-{:04d}.txt", "flight-*.txt"


class Flight:
    """This rank's flight record, a file in the run's folder."""

    def __init__(self, folder, rank: int):
        path = Path(folder) / NAME.format(rank)
        path.write_bytes((b" " * (WIDTH - 1) + b"\n") * LAST)
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), LAST * WIDTH)
        self.count = self.number = 0
        self.open: dict[int, tuple[int, Event]] = {}  # the pending events by id, with their number
        self.lines: dict[tuple, tuple[bytes, Event]] = {}  # the text of each kind of event

    @contextmanager
    def step(self, number: int) -> Iterator[Log]:
        """Trace one step, and record each of its collectives when it is reached and when it ends."""
        self.number = number
        with trace(self.watch) as log:
            yield log

    def watch(self, event: Event, moment: str) -> None:
        """Record that an event is reached or ends. Messages and some collectives are reported only when they start."""
        if moment == "reached" or (moment == "started" and event.op in LATE and id(event) not in self.open):
            self.write_start(event)
        elif moment == "ended" and id(event) in self.open:
            self.write_end(*self.open.pop(id(event)))

    def write_start(self, event: Event) -> None:
        """Write a line for an event that has begun."""
        self.count += 1
        key = id(event.before), id(event.after), event.op  # types are made once, with the lines of the program
        if key not in self.lines:
            self.lines[key] = str(event).encode()[:TEXT].ljust(TEXT), event  # keeps the types alive, and so their ids
        at = self.count % LAST * WIDTH
        head = b"%9d %14.3f %6d %12s " % (self.count, time.time(), self.number, b"in flight")
        self.memory[at : at + WIDTH - 1] = head + self.lines[key][0]
        self.open[id(event)] = self.count, event

    def write_end(self, count: int, event: Event) -> None:
        """Write the duration into the event's line, unless a later line has replaced it."""
        if self.count - count < LAST:
            at = count % LAST * WIDTH + TOOK
            self.memory[at : at + 12] = b"%9.2f ms" % ((event.end - event.called) * 1e3)


def records(folder) -> dict[int, list[str]]:
    """Return {rank: its last collectives, the newest last}."""
    found = {}
    for path in Path(folder).glob(ALL):
        lines = sorted(text for text in path.read_text(errors="replace").splitlines() if text.strip())
        found[int(path.stem.removeprefix("flight-"))] = [format_line(text) for text in lines]
    return dict(sorted(found.items()))


def format_line(text: str) -> str:
    """Return a line of a record for printing, with the time of day instead of the time stamp."""
    _, when, step, rest = text.split(None, 3)
    clock = time.strftime("%H:%M:%S", time.localtime(float(when)))
    return f"{clock}{when[-4:]} step {step} {rest.rstrip()}"


def keep_earlier(folder) -> None:
    """Rename the records of an earlier run before this run begins, so that they are kept."""
    for path in Path(folder).glob(ALL):
        path.replace(path.with_suffix(".before"))


def last_lines(folder, last: int = 1) -> str:
    """Return the last collectives of each rank, as lines of text."""
    return "\n".join(f"rank {rank}: {text}" for rank, lines in records(folder).items() for text in lines[-last:])


def main(argv=None) -> int:
    """Run the command; return 1 if there is no record."""
    parser = Parser(prog="python -m scaling.train flight", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run, also of one that hangs")
    parser.add_argument(
        "--last", type=int, default=8, help=f"collectives shown of each rank (default 8, at most {LAST})"
    )
    args = parser.parse_args(argv)
    if not os.path.isdir(args.run) or not (text := last_lines(args.run, args.last)):
        why = "its ranks have sent nothing" if os.path.exists(args.run / "run.toml") else "no run is here"
        complain(f"{args.run}: {why}")
        return 1
    print(text)
    return 0
