"""What happened on one rank, as data: the runs of its lines, its memory, the operations between the lines.

Times are seconds on one clock for all ranks. A line takes the lane that computes, `held`: an einsum while it runs; a
collective while the lane stands still for it, in the call and where it is waited for. What it does beside that is
hidden behind other work.
"""

from dataclasses import dataclass, replace

from scaling.profile.intervals import Interval, subtract, union

LOCAL = ("Einsum", "Slice")  # ops that no other rank takes part in


@dataclass(frozen=True)
class LineRun:
    """One run of one line on one rank.

    `line`: as the book writes it; `op`, `axes`, `before`, `after`: as in `scaling.trace.Event`. `called`, `end`: from
    where it was reached to where its result was there. `held`: the intervals in which the lane that computes was its;
    `transfer`: when a transport was seen to move it, if it was. `nbytes`: V of a collective, else the bytes of operands
    and result. `group`: the ranks that take part; `peers`: those without which this one cannot go on, if not all.
    """

    line: str
    op: str
    axes: tuple[str, ...]
    called: float
    end: float
    held: tuple[Interval, ...]
    before: str = ""
    after: str = ""
    transfer: Interval | None = None
    nbytes: int = 0
    wire_bytes: int = 0
    flops: int = 0
    dtype: str = ""
    key: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()
    async_op: bool = False

    @property
    def communicates(self) -> bool:
        return self.op not in LOCAL and len(self.group) > 1

    def moved(self, seconds: float) -> "LineRun":
        """The same, so much later."""

        def later(interval: Interval) -> Interval:
            return interval[0] + seconds, interval[1] + seconds

        return replace(self, called=self.called + seconds, end=self.end + seconds, held=tuple(map(later, self.held)),
                       transfer=self.transfer and later(self.transfer))  # fmt: skip


@dataclass(frozen=True)
class RankTimeline:
    """One rank's: `marks` are the steps' borders, ascending, the first one the beginning; `runs` in the order of their
    calls; `memory`: (when, bytes allocated or, negative, freed); `ops`: (name, start, end) of the operations as
    torch.profiler saw them, outermost only; `device`: cpu or cuda; `waited`: (when, seconds that the thread has waited
    for a core so far), where it is known."""

    rank: int
    marks: tuple[float, ...]
    runs: tuple[LineRun, ...]
    memory: tuple[tuple[float, int], ...] = ()
    ops: tuple[tuple[str, float, float], ...] = ()
    device: str = "cpu"
    waited: tuple[tuple[float, float], ...] = ()

    @property
    def steps(self) -> list[Interval]:
        return list(zip(self.marks[:-1], self.marks[1:], strict=True))

    def moved(self, seconds: float) -> "RankTimeline":
        """The same on a clock that is so much ahead."""
        return replace(self, marks=tuple(t + seconds for t in self.marks),
                       runs=tuple(run.moved(seconds) for run in self.runs),
                       memory=tuple((t + seconds, nbytes) for t, nbytes in self.memory),
                       ops=tuple((name, a + seconds, b + seconds) for name, a, b in self.ops),
                       waited=tuple((t + seconds, waited) for t, waited in self.waited))  # fmt: skip

    def of_step(self, step: int) -> list[LineRun]:
        """The runs that were called in a step."""
        start, end = self.steps[step]
        return [run for run in self.runs if start <= run.called < end]


def disjoint(runs: list[LineRun]) -> list[LineRun]:
    """Runs of one rank so that no two hold the lane at once: of two, one inside the other, the inner one has it."""
    order = sorted(range(len(runs)), key=lambda i: runs[i].called)
    held = {}
    open_: list[int] = []  # runs that may contain the next one
    for i in order:
        open_ = [j for j in open_ if held[j] and held[j][-1][1] > runs[i].called]
        held[i] = union(runs[i].held)
        for j in open_:
            held[j] = subtract(held[j], held[i])
        open_.append(i)
    return [replace(run, held=tuple(held[i])) for i, run in enumerate(runs)]
