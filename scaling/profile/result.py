"""A profile: the timelines of all ranks, the questions that they answer, and all of it as text."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import mean

from scaling.common.console import fold, table
from scaling.hardware import Chip
from scaling.profile import stragglers
from scaling.profile.advice import Suggestion, suggestions
from scaling.profile.split import LineTotal, Parts, by_line, split_waiting, step_parts
from scaling.profile.timeline import Moment, RankTimeline
from scaling.profile.torch_trace import RankTrace, Spans, join_traces
from scaling.trace import now

STEP = "scaling.profile: step"
COLUMNS, LEAST, RANKS = 100, 30, 6  # columns of a table; least columns of a line's name; ranks that are shown
PARTS = {
    "products": "products",
    "communication exposed": "exposed",
    "waiting for others": "waiting",
    "operations between lines": "between",
    "between operations": "python",
    "a step": "step",
    "communication hidden": "hidden",
}


@dataclass
class Profile:
    """The result of `profile()`; everything but `step()` needs the end of the block, and is equal on all ranks.

    Times are seconds. Predictions need a `chip` (`load_chip("machine.toml")`).
    """

    made: tuple[RankTimeline, ...] = ()
    traces: list[RankTrace] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    spans: Spans = field(default_factory=Spans)
    synchronize: Callable[[], None] | None = None

    def step(self) -> None:
        """Mark the end of a step; on a GPU, wait for its work first."""
        if self.synchronize is not None:
            self.synchronize()
        self.spans.end(STEP)
        self.marks.append(now())
        self.spans.begin(STEP, f"{STEP} {len(self.marks) - 1}")

    def finish(self) -> None:
        """Mark the end of the block, which is its only step if none was marked.

        Work after the last marked step belongs to no step.
        """
        if len(self.marks) == 1:
            self.step()

    @cached_property
    def timelines(self) -> tuple[RankTimeline, ...]:
        """The timelines of all ranks, in their order, with each collective's time split.

        Raises:
            ValueError: the block has not ended yet.
        """
        if not self.made:
            raise ValueError("the profile is made at the end of its block\n  fix: ask after `with profile() as p:`")
        return split_waiting(self.made)

    def parts(self, rank: int = 0) -> list[Parts]:
        """Return the parts of each step of a rank."""
        return list(map(step_parts, self.timelines[rank].steps))

    @property
    def seconds(self) -> float:
        """The seconds of a step: the mean over steps and ranks."""
        return mean(step.seconds for timeline in self.timelines for step in timeline.steps)

    def lines(self) -> list[LineTotal]:
        """Return the totals of each line in the order of first runs: a step's mean over steps and ranks."""
        return by_line(self.timelines)

    def stragglers(self) -> list[stragglers.Straggler]:
        """Return the ranks that others wait for, each with the line at which it is slow, the slowest first."""
        return stragglers.find(self.timelines)

    def suggestions(self) -> list[Suggestion]:
        """Return the suggested changes with their gains, the largest gain first."""
        return suggestions(self.timelines)

    def memory(self, rank: int = 0) -> list[Moment]:
        """Return the memory of live tensors after each line of the first step."""
        return self.timelines[rank].steps[0].memory()

    def table(self, chip: Chip | None = None, dtype: str = "fp32", columns: int = COLUMNS) -> str:
        """Return the lines, the parts of a step, stragglers and suggestions, as text of at most `columns` characters.

        With a chip, the table also has the time of each line by the chip's roofline. For a collective it is
        compared with the time of the transfer, exposed and hidden, without the waiting.
        """
        parts = [self.parts(rank) for rank in range(len(self.timelines))][:RANKS]
        text = [table_of_parts(parts)]
        if slow := self.stragglers():
            text.append("\n".join(["slow ranks", *(f"  {each}" for each in slow)]))
        if advice := self.suggestions():
            text.append("\n".join(["to change", *(f"  {i}. {each}" for i, each in enumerate(advice, 1))]))
        return "\n\n".join(
            [table_of_lines(self.lines(), chip, dtype, columns), *(fold(part, columns) for part in text)]
        )

    def save(self, where: "str | Path", chip: Chip | None = None) -> list[Path]:
        """Write a trace of all ranks, which ui.perfetto.dev and chrome://tracing open: to FILE.json, or into a folder.

        In a folder the table is written, too, with predictions for a `chip`. Call it on rank 0, which has the exports
        of torch.profiler on all ranks.
        """
        timelines = self.timelines
        if not all(own.text for own in self.traces) or not self.traces:
            raise ValueError(
                "there is no trace: torch.profiler did not run, or ran on another rank"
                "\n  fix: profile() without ops=False; save on rank 0"
            )
        path, alone = Path(where), Path(where).suffix == ".json"
        trace, lines = path if alone else path / "trace.json", path / "lines.txt"
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.write_text(json.dumps(join_traces(self.traces, timelines)))
        if not alone:
            lines.write_text(self.table(chip) + "\n")
        return [trace] if alone else [trace, lines]


def of(timelines: Sequence[RankTimeline]) -> Profile:
    """Return a profile of timelines that come from elsewhere, stored or synthetic."""
    return Profile(tuple(timelines))


def table_of_lines(totals: Sequence[LineTotal], chip: Chip | None, dtype: str, columns: int = COLUMNS) -> str:
    """Return a table of the lines and the milliseconds of a step in which they held the rank, for collectives split."""
    heads = ["calls", "ms", "exposed", "hidden", "waiting", "GFLOP", "MB", *(["predicted", "of roof"] if chip else [])]
    rows, names = [_row(total, chip, dtype) for total in totals], [total.line for total in totals]
    taken = sum(2 + max(map(len, cells)) for cells in zip(heads, *rows, strict=True))
    right = [False, *([True] * len(heads))]
    if columns - taken >= LEAST:
        rows = [[name, *cells] for name, cells in zip(names, rows, strict=True)]
        return table(rows, ["line", *heads], columns, right=right, hang="  ")
    return table([["", *cells] for cells in rows], ["line", *heads], columns, right=right, above=names)


def _row(total: LineTotal, chip: Chip | None, dtype: str) -> list[str]:
    moves = total.run.communicates
    waiting = f"{total.waiting * 1e3:.2f}" + (f" for {total.behind}" if total.behind is not None else "")
    calls = f"{total.calls:.0f}" if abs(total.calls - round(total.calls)) < 0.01 else f"{total.calls:.1f}"
    cells = [calls, f"{total.seconds * 1e3:.2f}"]
    cells += [f"{total.exposed * 1e3:.2f}", f"{total.hidden * 1e3:.2f}", waiting] if moves else [""] * 3
    cells += [f"{total.flops / 1e9:.3f}" if total.flops else "", f"{total.nbytes / 1e6:.2f}" if total.nbytes else ""]
    if chip:
        predicted, took = total.predicted(chip, dtype), total.exposed + total.hidden if moves else total.seconds
        cells += ["", ""] if not predicted else [f"{predicted * 1e3:.2f}", f"{predicted / took:.0%}" if took else ""]
    return cells


def table_of_parts(parts: Sequence[Sequence[Parts]]) -> str:
    """Return a table of the parts of a step on each rank, in milliseconds: the mean over its steps."""
    rows = [[name, *(f"{mean(getattr(each, part) for each in mine) * 1e3:.2f}" for mine in parts)]
            for name, part in PARTS.items()]  # fmt: skip
    return table(rows, ["ms a step", *(f"rank {rank}" for rank in range(len(parts)))])
