"""Draw pipelines, with time across and a row for each rank, in the terminal, or as SVG, and count their bubbles.

    python -m scaling.show schedule 1f1b --stages 4 --microbatches 8
    print(schedule_chart(simulate(one_f_one_b(4, 8))))
    save_schedule("1f1b.svg", simulate(...), measured)

A timeline may be simulated or measured. The colours follow the book's figure: forward is orange, dL/dx green, dL/dW
blue. A whole Backward is teal, and a rank's second chunk (and fourth ...) is lighter.
"""

import argparse
import sys
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

from scaling.common.console import Parser, complain, integer, number, picture
from scaling.schedules import SCHEDULES, make, split_backward
from scaling.schedules.closed_forms import bubble_time
from scaling.schedules.schedule import Backward, BackwardInput, BackwardWeight, Forward
from scaling.schedules.simulator import Timeline, Times, simulate
from scaling.show import bars, svg
from scaling.show.bars import Bar

LETTERS = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}
WORDS = {Forward: "forward", Backward: "backward", BackwardInput: "dL/dx", BackwardWeight: "dL/dW"}
SECOND = ", second chunk"
ANSI = {"forward": 215, "backward": 79, "dL/dx": 114, "dL/dW": 111}
COLOURS = {"forward": "#f5a45d", "backward": "#5fc7b0", "dL/dx": "#86cf7f", "dL/dW": "#86aef0"}
ANSI |= {kind + SECOND: colour for kind, colour in ANSI.items()}
COLOURS |= {kind + SECOND: f"{colour}8c" for kind, colour in COLOURS.items()}  # lighter
WIDTH = 120  # columns of a text chart


def bars_of(timeline: Timeline) -> list[Bar]:
    """Return the computations of each rank as bars from time 0; `F3` is the forward of microbatch 3.

    Small letters are a rank's second chunk (and fourth ...).
    """
    chunk, found = _chunks(timeline), []
    start = min((s.start for s in timeline.compute), default=0)
    for s in sorted(timeline.compute, key=lambda s: (s.rank, s.start)):
        letter, kind = LETTERS[type(s.step)], WORDS[type(s.step)]
        if chunk[s.rank, s.step.stage] % 2:
            letter, kind = letter.lower(), kind + SECOND
        found.append(Bar(f"rank {s.rank}", f"{letter}{s.step.microbatch}", s.start - start, s.end - start, kind))
    return found


def schedule_chart(timeline: Timeline, width: int | None = None, colour: bool = False) -> str:
    """Return the chart as text: `F3` is the forward of microbatch 3, `B` a backward, `I` and `W` its halves, `·` idle.

    Small letters are a rank's second chunk (and fourth ...). `width` is the number of columns for the time, by default
    enough to write the name of the shortest computation, but at most 120 (longer names are cut). `colour` adds ANSI's.
    """
    if not timeline.compute:
        raise ValueError(
            f"{timeline.name}: nothing to draw: the timeline holds no computation"
            "\n  fix: draw the timeline of a whole run"
        )
    drawn = bars_of(timeline)
    shortest = min(bar.seconds for bar in drawn if bar.seconds > 0)
    longest = max(len(bar.label) for bar in drawn)
    if width is None:
        columns = max(1, min(longest, int(WIDTH * shortest / timeline.makespan)))  # of the shortest computation
        width = min(WIDTH, round(float(timeline.makespan / shortest * columns)))
    chart = bars.text(drawn, width, idle="·", fill=" " if colour else "-", paint=ANSI if colour else None)
    kinds = [kind for kind in LETTERS if any(isinstance(s.step, kind) for s in timeline.compute)]
    legend = "  ".join(f"{LETTERS[kind]} {WORDS[kind]}" for kind in kinds) + "  · idle"
    return f"{chart}\n{'':>{len(str(timeline.ranks - 1)) + 6}} {legend}"


def summary(timeline: Timeline, unit: str = "") -> str:
    """Return a timeline's makespan, bubble and memory in one line."""
    live = ", ".join(f"{float(peak):g}" for peak in timeline.live)
    makespan = f"{float(timeline.makespan):.4g}{' ' + unit if unit else ''}"
    return f"{timeline.name}: makespan {makespan}, bubble {float(timeline.bubble):.1%}, live activations {live}"


def draw_on(page, timeline: Timeline, unit: str = "") -> None:
    """Show a timeline on a chapter's page, as text, or in a notebook as a picture."""
    text = f"{summary(timeline, unit)}\n{schedule_chart(timeline, width=page.columns - 10)}"
    page.show(text, lambda: schedule_svg(timeline, unit=unit))


def schedule_svg(*timelines: Timeline, unit: str = "") -> str:
    """Return timelines below each other as an SVG."""
    return svg.time_lines([(summary(each, unit), bars_of(each)) for each in timelines], COLOURS, unit)


def save_schedule(file: str | Path, *timelines: Timeline) -> None:
    """Draw timelines below each other into a file.svg."""
    Path(file).write_text(schedule_svg(*timelines), encoding="utf-8")


def _chunks(timeline: Timeline) -> dict[tuple[int, int], int]:
    """Return the index of each (rank, virtual stage) among the rank's chunks."""
    chunk, seen = {}, dict.fromkeys(range(timeline.ranks), 0)
    for rank, stage in sorted({(s.rank, s.step.stage) for s in timeline.compute}):
        chunk[rank, stage] = seen[rank]
        seen[rank] += 1
    return chunk


# The command

MOST_FORWARDS = 20_000  # the most forward passes that are drawn, which takes some seconds


def _parser(**options) -> Parser:
    arguments = Parser(description="Draw a pipeline schedule and count its bubble", **options)
    arguments.add_argument("schedule", choices=[*SCHEDULES, "all"], help="the schedule, or all of them")
    arguments.add_argument("--stages", type=integer(1), default=4, help="ranks along the pipeline axis (default 4)")
    arguments.add_argument("--microbatches", type=integer(1), default=8, help="number of microbatches (default 8)")
    arguments.add_argument("--chunks", type=integer(1, 1000), help="chunks of layers per rank (interleaved: default 2)")
    times = "a rank's times for a microbatch: forward, and the backward's input and weight half (default 1,1,1)"
    arguments.add_argument("--times", type=_times, default=Times(), metavar="F,B,W", help=times)
    arguments.add_argument(
        "--hop", type=number(kind=Fraction), default=Fraction(0), help="time of a transfer (default 0)"
    )
    arguments.add_argument("--split", action="store_true", help="split the backward: send dIn before dW is computed")
    arguments.add_argument(
        "--width", type=integer(1, 10_000), help="width of the chart in columns (default: the terminal's)"
    )
    colour = {"action": argparse.BooleanOptionalAction, "default": sys.stdout.isatty()}
    arguments.add_argument("--colour", "--color", **colour, help="colour the chart (default: on a terminal)")
    arguments.add_argument("--plot", type=partial(picture, ends=(".svg",)), metavar="FILE.svg", help="write an SVG")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Draw one schedule, or all that are defined for these sizes; return the exit code."""
    options = _parser(prog="python -m scaling.show schedule")
    arguments = options.parse_args(argv)
    if (forwards := arguments.stages * arguments.microbatches * (arguments.chunks or 1)) > MOST_FORWARDS:
        options.error(
            f"{forwards:,} forward passes are not drawn, at most {MOST_FORWARDS:,} are"
            "; fix: give fewer stages or microbatches"
        )
    names = list(SCHEDULES) if arguments.schedule == "all" else [arguments.schedule]
    times = replace(arguments.times, hop=arguments.hop)
    timelines = []
    for name in names:
        try:
            chunks = None if arguments.schedule == "all" else arguments.chunks
            schedule = make(name, arguments.stages, arguments.microbatches, chunks)
            if arguments.split:
                schedule = split_backward(schedule)
            timelines.append(timeline := simulate(schedule, times))
        except ValueError as error:
            complain(f"{error}\n")
            continue
        print(summary(timeline))
        print(schedule_chart(timeline, arguments.width, arguments.colour))
        print(_published(schedule, times, timeline, arguments.split))
    if timelines and arguments.plot:
        save_schedule(arguments.plot, *timelines)
    return 0 if timelines else 2


def _published(schedule, times: Times, timeline, split: bool) -> str:
    """Return a line that compares the closed form with the simulation."""
    if split:
        return ""
    try:
        idle = bubble_time(schedule.name, schedule.stages, schedule.microbatches, schedule.chunks, times)
    except ValueError as error:
        return f"no closed form: {error}\n"
    simulated = timeline.idle(schedule.stages - 1)
    equal = "=" if idle == simulated else "DIFFERS from"
    return f"bubble of the last rank: closed form {float(idle):g} {equal} simulated {float(simulated):g}\n"


def _times(text: str) -> Times:
    parts = text.split(",")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not three times; fix: write them as 1,1,1")
    return Times(*map(number(kind=Fraction), parts))
