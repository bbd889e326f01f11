"""The options of a chapter, and their checks before any rank starts.

In a notebook the kernel's own arguments are left alone; options come from the environment: CHAPTER="--small".
"""

import argparse
import builtins
import math
import os
import shlex
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from scaling.common.console import PROFILE, SEEDS, Parser, integer, picture, place
from scaling.common.torchrun import first_rank, world_size
from scaling.spec import ShardingError, parse
from scaling.spec.sizes import format_sizes, parse_mesh

LEAST = 10_000  # least bytes of a text that a chapter can learn
RANKS = 256  # the largest number that a chapter starts on one machine

Fits = tuple[Iterable[str], dict[str, int]]


def in_notebook() -> bool:
    """Return whether this runs in IPython's kernel or prompt rather than in a script."""
    return hasattr(builtins, "__IPYTHON__")


def judging() -> bool:
    """Return whether the judge runs this chapter."""
    watch = sys.modules.get("scaling.collectives.linear")
    return watch is not None and watch.who_watches() is not None


class ChapterParser(Parser):
    """A parser that reports errors and prints help on rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        """Print the error on rank 0, and exit with code 2."""
        if not first_rank():
            sys.exit(2)
        super().error(message)

    def print_help(self, file=None) -> None:
        """Print the help on rank 0."""
        if first_rank():
            super().print_help(file)


def chapter_parser(doc: str, mesh="", axes="", *, device=False, seed=False, plot=False, **options) -> ChapterParser:
    """Return the parser of a chapter with this docstring, with the options that its `Page` asks for."""
    first, _, rest = doc.strip().partition("\n")
    parser = ChapterParser(description=first, epilog=rest)
    parser.add_argument("--small", action="store_true", help="smaller sizes: a few seconds")
    if mesh:
        fitted = f"axes and sizes (default {mesh}, fitted to torchrun's ranks)"
        also = f"; further axes: {', '.join(axes)}" if axes else ""
        parser.add_argument("--mesh", metavar=mesh, help=fitted + also)
        parser.add_argument("--profile", type=place, metavar="PLACE", help=PROFILE)
    if device:
        parser.add_argument("--device", default="cpu", help="cpu, or cuda: a GPU for each rank (default cpu)")
    if seed:
        parser.add_argument("--seed", type=integer(0, SEEDS), default=0, help="seed of the random operands (default 0)")
    if plot:
        parser.add_argument("--plot", type=picture, metavar="FILE", help="write the pictures too, PNG or SVG")
    for name, (default, text, *checked) in options.items():
        usual = "" if default in ("", None) else f" (default {default})"
        kind = checked[0] if checked else integer() if type(default) is int else type(default)
        parser.add_argument(f"--{name}", type=kind, default=default, help=text + usual)
    return parser


def read_options(parser: ChapterParser, mesh: str, axes: str, fits: Fits) -> argparse.Namespace:
    """Return the options given, with `mesh` as sizes; refuse impossible ones, and a script whose lines break a rule.

    If ranks cannot be forked, the script is then started again as torchrun's ranks.
    """
    args = parser.parse_args(shlex.split(os.environ.get("CHAPTER", "")) if in_notebook() else None)
    if judging() and hasattr(args, "steps"):
        args.steps = 1  # one step shows the judge all types
    if hasattr(args, "device"):
        _check_device(parser, args.device)
    if mesh:
        if args.profile and in_notebook():
            parser.error("--profile: a notebook's ranks are not profiled; fix: run the chapter as a script")
        args.mesh = _mesh(parser, mesh, axes, args.mesh)
        _check_sizes(parser, args, mesh, *fits)
        _check_text(parser, args)
        if not in_notebook():
            _check_script()
            from scaling.launch import start_by_torchrun

            start_by_torchrun(args.mesh, getattr(args, "device", "cpu"))
    return args


def _check_text(parser: ChapterParser, args: argparse.Namespace) -> None:
    """Refuse a text that does not exist or is too short."""
    if text := getattr(args, "text", ""):
        size, least = Path(text).is_file() and Path(text).stat().st_size, max(LEAST, 2 * getattr(args, "batch", 0))
        if size < least:
            why = f"{size:,} bytes, of {least:,} that it takes" if Path(text).is_file() else "no such file"
            parser.error(f"--text {text}: {why}; fix: leave it out for Python's standard library")


def _check_script() -> None:
    """Exit with the judge's findings in the chapter, before its ranks start.

    The judge runs the chapter, which then does not ask it again. No line of a chapter goes through the judge: like the
    profiler it is a tool that the page calls by its module's name.
    """
    if not first_rank() or judging() or not Path(sys.argv[0]).is_file():
        return
    check_source = import_module("scaling.check").check_source
    findings = check_source(Path(sys.argv[0]).read_text(encoding="utf-8"), sys.argv[0])
    if faults := [finding for finding in findings if finding.rule != "unjudged"]:
        sys.exit("\n".join(map(str, faults)))


def _check_device(parser: ChapterParser, device: str) -> None:
    """Refuse a device that does not exist here."""
    if device not in ("cpu", "cuda"):
        parser.error(
            f"--device {device}: must be cpu, or cuda, where each rank takes a GPU of its own; fix: --device cpu"
        )
    from scaling.mesh import check_device

    try:
        check_device(device)
    except ShardingError as error:
        parser.error(f"--device {device}: {error}")


def _mesh(parser: ChapterParser, usual: str, axes: str, given: str | None) -> dict[str, int]:
    """Return the mesh asked for, or the usual one fitted to torchrun's ranks; axes that are not named have size 1."""
    try:
        sizes = parse_mesh(usual)
        if given:
            asked, known = parse_mesh(given), [*sizes, *axes]
            if strange := [axis for axis in asked if axis not in known]:
                fix = f"fix: name {', '.join(known)}"
                parser.error(f"--mesh {given}: {strange[0]} is no axis of this chapter; {fix}")
            return {**dict.fromkeys(sizes, 1), **asked}
        if world_size() == 1:
            return sizes
        from scaling.launch import fit_mesh

        return fit_mesh(sizes)
    except ShardingError as error:
        why = str(error).splitlines()[0].removeprefix(f"--mesh {given}").removeprefix("--mesh").removeprefix(": ")
        parser.error(f"--mesh {given or usual}: {why}; fix: --mesh {usual}")


def _check_sizes(parser: ChapterParser, args: argparse.Namespace, usual: str, types: Iterable, sizes: dict) -> None:
    """Refuse a mesh or a batch over which these types do not divide, or a mesh for another number of ranks."""
    devices, given = math.prod(args.mesh.values()), format_sizes(args.mesh).replace(" ", "")
    world = world_size()
    fix = f"fix: --mesh {usual}"
    if world > 1 and math.prod(parse_mesh(usual).values()) != world:
        fix = f"fix: torchrun --nproc-per-node {math.prod(parse_mesh(usual).values())}"
    if world == 1 and devices > RANKS:
        parser.error(f"--mesh {given}: {devices} ranks, of at most {RANKS} on one machine; {fix}")
    for spec in map(parse, types):
        ours = {"B": getattr(args, "batch", 0), **sizes}
        of_batch = "B" in spec.dim_names and "B" not in sizes
        try:
            spec.local_shape(ours, {**dict.fromkeys(spec.axes, 1), **args.mesh})
        except ShardingError as error:
            why = str(error).splitlines()[0]
            if of_batch:
                parser.error(f"--batch {args.batch}: {why}; fix: --batch {32 * devices}")
            parser.error(f"--mesh {given}: {why}; {fix}")
    if world not in (1, devices):
        fix = f"fix: torchrun --nproc-per-node {devices}, or another --mesh"
        parser.error(f"{format_sizes(args.mesh)} is a mesh of {devices}, and torchrun started {world} ranks; {fix}")
