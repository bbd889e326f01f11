"""A profile: the timelines of all ranks, and what is asked of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import mean

from scaling.hardware import Chip
from scaling.profile import memory, stragglers, table
from scaling.profile.advice import Suggestion, suggestions
from scaling.profile.split import LineTotal, Parts, Split, by_line, splits, step_parts
from scaling.profile.timeline import RankTimeline
from scaling.profile.torch_trace import RankTrace, Spans, write_trace
from scaling.trace import now

STEP = "scaling.profile: step"


@dataclass
class Profile:
    """What `profile()` gives. `step()` marks the end of a step; all else is there once the block has ended, the same on
    every rank. Times are seconds; a `chip` is what predictions are made with (`load_chip("machine.toml")`)."""

    made: tuple[RankTimeline, ...] = ()
    traces: list[RankTrace] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    spans: Spans = field(default_factory=Spans)
    synchronize: Callable[[], None] | None = None

    def step(self) -> None:
        """A step ends here; on a GPU its work is waited for."""
        if self.synchronize is not None:
            self.synchronize()
        self.spans.end(STEP)
        self.marks.append(now())
        self.spans.begin(STEP, f"{STEP} {len(self.marks) - 1}")

    def finish(self) -> None:
        """The end of the block: of its only step, or of what came after the last one, which then is no step."""
        if len(self.marks) == 1:
            self.step()

    @property
    def timelines(self) -> tuple[RankTimeline, ...]:
        """Of all ranks, in their order. ValueError before the block has ended."""
        if not self.made:
            raise ValueError("the profile is made at the end of its block\n  fix: ask after `with profile() as p:`")
        return self.made

    @cached_property
    def splits(self) -> list[list[Split]]:
        """Of each rank and run: waiting, exposed and hidden."""
        return splits(self.timelines)

    def parts(self, rank: int = 0) -> list[Parts]:
        """Where each step of a rank went."""
        found = self.timelines[rank]
        return [step_parts(found, self.splits[rank], step) for step in found.steps]

    @property
    def seconds(self) -> float:
        """Of a step: the mean over steps and ranks."""
        return mean(end - start for timeline in self.timelines for start, end in timeline.steps)

    def lines(self) -> list[LineTotal]:
        """By line of the algorithm, a step's mean over steps and ranks, in the order in which they first run."""
        return by_line(self.timelines, self.splits)

    def stragglers(self) -> list[stragglers.Straggler]:
        """Ranks that others wait for, and in which of their lines the time goes; the slowest first."""
        return stragglers.find(self.timelines, self.splits)

    def suggestions(self) -> list[Suggestion]:
        """What to change, and what it would gain; the largest gain first."""
        return suggestions(self.timelines, self.splits)

    def memory(self, rank: int = 0) -> list[memory.Moment]:
        """The memory of live tensors after each line of the first step."""
        return memory.memory_by_line(self.timelines[rank])

    def table(self, chip: Chip | None = None, dtype: str = "fp32", columns: int = table.COLUMNS) -> str:
        """The lines, the parts of a step, stragglers and suggestions, as text of so many columns at most. With a chip
        also what the lines take by its roofline: of a collective, `hidden` counts as time that it took."""
        return table.report(self, chip, dtype, columns)

    def save(self, where: "str | Path", chip: Chip | None = None) -> list[Path]:
        """Write a trace of all ranks, which ui.perfetto.dev and chrome://tracing open: to FILE.json, or into a folder,
        with the table beside it, for a `chip` too. On rank 0, which has what torch.profiler saw on each."""
        self.timelines  # noqa: B018  which says that it is too early
        if not all(own.text for own in self.traces) or not self.traces:
            raise ValueError(
                "there is no trace: torch.profiler did not run, or ran on another rank"
                "\n  fix: profile() without ops=False; save on rank 0"
            )
        path = Path(where)
        if path.suffix == ".json":
            return [write_trace(path, self.traces, self._details())]
        path.mkdir(parents=True, exist_ok=True)
        (path / "lines.txt").write_text(self.table(chip) + "\n")
        return [write_trace(path / "trace.json", self.traces, self._details()), path / "lines.txt"]

    def _details(self) -> list[dict[str, list[dict]]]:
        """Of each rank, {line: what a trace says of each of its runs}."""
        found: list[dict[str, list[dict]]] = []
        for timeline, each in zip(self.timelines, self.splits, strict=True):
            mine: dict[str, list[dict]] = {}
            for run, split in zip(timeline.runs, each, strict=True):
                said = {"V": run.nbytes, "sent": run.wire_bytes, "FLOPs": run.flops}
                if run.communicates:
                    said |= {"waiting ms": split.waiting * 1e3, "exposed ms": split.exposed * 1e3}
                    said |= {"hidden ms": split.hidden * 1e3, "waiting for rank": split.behind}
                mine.setdefault(run.line, []).append(said)
            found.append(mine)
        return found


def of(timelines: Sequence[RankTimeline]) -> Profile:
    """A profile of timelines that were made elsewhere: stored ones, synthetic ones."""
    return Profile(tuple(timelines))
