"""Draw a pipeline schedule and count its bubble: `python -m scaling.show schedule 1f1b --stages 4 --microbatches 8`."""

import argparse
import sys
from dataclasses import replace
from fractions import Fraction
from functools import partial

from scaling.common.console import Parser, complain, integer, number, picture
from scaling.schedules import SCHEDULES, make, split_backward
from scaling.schedules.closed_forms import bubble_time
from scaling.schedules.simulator import Times, simulate
from scaling.show.timelines import save_schedule, schedule_chart, summary

MOST_FORWARDS = 20_000  # the most forward passes that are drawn, which takes some seconds


def _parser(**options) -> Parser:
    arguments = Parser(description=__doc__, **options)
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
