"""Pipelines drawn: time across, a row for each rank; in the terminal, or as SVG or PNG with matplotlib (`plot` extra).

    print(schedule_chart(simulate(one_f_one_b(4, 8))))
    save_schedule("1f1b.svg", simulate(...), measured)

A timeline may be simulated or measured. The colours are those of the book's figure: forward orange, dL/dx green, dL/dW
blue; a whole Backward is teal.
"""

from pathlib import Path

from scaling.schedules.instructions import Backward, BackwardInput, BackwardWeight, Forward
from scaling.schedules.timeline import Timeline

LETTERS = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}
WORDS = {Forward: "forward", Backward: "backward", BackwardInput: "dL/dx", BackwardWeight: "dL/dW"}
ANSI = {Forward: 215, Backward: 79, BackwardInput: 114, BackwardWeight: 111}
WIDTH = 120  # columns of a text chart
COLOURS = {Forward: "#f5a45d", Backward: "#5fc7b0", BackwardInput: "#86cf7f", BackwardWeight: "#86aef0"}


def schedule_chart(timeline: Timeline, width: int | None = None, colour: bool = False) -> str:
    """The chart as text: `F3` is the forward of microbatch 3, `B` a backward, `I` and `W` its halves, `·` idle.

    Small letters are a rank's second chunk (and fourth ...). `width`: columns for the time; by default as many as give
    the shortest computation room for its name, but at most 120 (a name that finds no room is cut). `colour`: ANSI.
    """
    if not timeline.compute:
        raise ValueError(
            f"{timeline.name}: nothing to draw: the timeline holds no computation"
            "\n  fix: draw the timeline of a whole run"
        )
    start, span = min(s.start for s in timeline.compute), timeline.makespan
    chunk = _chunks(timeline)
    shortest = min(s.end - s.start for s in timeline.compute if s.end > s.start)
    longest = max(len(_label(s, chunk)) for s in timeline.compute)
    if width is None:
        columns = max(1, min(longest, int(WIDTH * shortest / span)))  # of the shortest computation
        width = min(WIDTH, round(float(span / shortest * columns)))
    lines = []
    spans = [[] for _ in range(timeline.ranks)]
    for s in timeline.compute:
        spans[s.rank].append(s)
    for rank in range(timeline.ranks):
        row: list[str] = ["·"] * width
        paint: list[type | None] = [None] * width
        for s in sorted(spans[rank], key=lambda s: s.start):
            first = round(float((s.start - start) / span * width))
            last = max(first + 1, round(float((s.end - start) / span * width)))
            cells = _label(s, chunk)[: last - first].ljust(last - first, "-" if not colour else " ")
            row[first:last], paint[first:last] = cells[: width - first], [type(s.step)] * min(last, width - first)
        lines.append(f"rank {rank} |{_painted(row[:width], paint[:width]) if colour else ''.join(row[:width])}|")
    kinds = [kind for kind in LETTERS if any(isinstance(s.step, kind) for s in timeline.compute)]
    legend = "  ".join(f"{LETTERS[kind]} {WORDS[kind]}" for kind in kinds) + "  · idle"
    return "\n".join([*lines, f"{'':>{len(str(timeline.ranks - 1)) + 6}} {legend}"])


def summary(timeline: Timeline, unit: str = "") -> str:
    """Makespan, bubble and memory of a timeline in one line."""
    live = ", ".join(f"{float(peak):g}" for peak in timeline.live)
    makespan = f"{float(timeline.makespan):.4g}{' ' + unit if unit else ''}"
    return f"{timeline.name}: makespan {makespan}, bubble {float(timeline.bubble):.1%}, live activations {live}"


def save_schedule(file: str | Path, *timelines: Timeline, unit: str = "") -> None:
    """Draw timelines below each other into a file; the suffix says the format (.svg, .png, .pdf)."""
    figure(*timelines, unit=unit).savefig(file)


def figure(*timelines: Timeline, unit: str = ""):
    """Timelines below each other, as a matplotlib Figure."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("pictures need matplotlib\n  fix: pip install 'scaling-book-torch[plot]'") from error
    drawn = Figure(figsize=(12, sum(0.9 + 0.35 * t.ranks for t in timelines) + 0.4), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(len(timelines), squeeze=False, height_ratios=[t.ranks for t in timelines])[:, 0]
    for ax, timeline in zip(axes, timelines, strict=True):
        start, chunk = min(s.start for s in timeline.compute), _chunks(timeline)
        room = float(timeline.makespan) / 90
        for s in timeline.compute:
            left, length = float(s.start - start), float(s.end - s.start)
            light = 0.55 if chunk[s.rank, s.step.stage] else 1.0
            bar = {"color": COLOURS[type(s.step)], "alpha": light, "edgecolor": "white", "linewidth": 0.6}
            ax.barh(s.rank, length, left=left, height=0.9, **bar)
            if length > room:
                ax.text(left + length / 2, s.rank, str(s.step.microbatch), ha="center", va="center", fontsize=7)
        ax.set(
            title=summary(timeline, unit), ylabel="rank", yticks=range(timeline.ranks), xlabel=f"time {unit}".strip()
        )
        ax.title.set_fontsize(9)
        ax.set_xlim(0, float(timeline.makespan))
        ax.invert_yaxis()
    kinds = [kind for kind in LETTERS if any(isinstance(s.step, kind) for t in timelines for s in t.compute)]
    handles = [Patch(color=COLOURS[kind], label=WORDS[kind]) for kind in kinds]
    drawn.legend(handles=handles, loc="outside lower center", ncols=len(kinds), fontsize=8)
    return drawn


def _chunks(timeline: Timeline) -> dict[tuple[int, int], int]:
    """(rank, virtual stage) -> which of the rank's chunks it is."""
    chunk, seen = {}, dict.fromkeys(range(timeline.ranks), 0)
    for rank, stage in sorted({(s.rank, s.step.stage) for s in timeline.compute}):
        chunk[rank, stage] = seen[rank]
        seen[rank] += 1
    return chunk


def _label(span, chunk: dict) -> str:
    letter = LETTERS[type(span.step)]
    return f"{letter.lower() if chunk[span.rank, span.step.stage] % 2 else letter}{span.step.microbatch}"


def _painted(row: list[str], paint: list) -> str:
    """Each run of cells of one kind on its colour; a cell that starts a computation (a letter) is set bold."""
    out = []
    for character, kind in zip(row, paint, strict=True):
        if kind is None:
            out.append(character)
        else:
            bold = "1;" if character.isalpha() else "22;"
            out.append(f"\x1b[{bold}38;5;16;48;5;{ANSI[kind]}m{character}\x1b[0m")
    return "".join(out)
