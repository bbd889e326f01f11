"""What a chapter writes on: the same cells print in a terminal, under torchrun (rank 0 alone), and in a notebook.

    page = Page(__doc__, mesh="X=4", plot=True)     the options that the chapter has; --small is always one
    page.title("Where the time goes")
    page.table(rows, headers)                       at most 100 columns, or as many as the terminal has
    page.check("the halves add up", same)           what must hold, besides the answers
    page.answers([Answer(...), ...])
    page.end()                                      what held; a failed script exits with 1

In a notebook the kernel's own arguments are left alone; options come from the environment: CHAPTER="--small".
"""

import argparse
import builtins
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

from scaling.book import layout
from scaling.book.answers import Answer, answer_table, verdict_counts
from scaling.check import check_file
from scaling.console import PROFILE, SEEDS, Parser, fold, integer, picture, place
from scaling.show import charts
from scaling.sizes import format_sizes, parse_mesh
from scaling.spec import ShardingError, parse

LEAST = 10_000  # bytes of a text that a chapter can learn from
RANKS = 256  # the most that a chapter starts on one machine


Fits = tuple[Iterable[str], dict[str, int]]


class ChapterParser(Parser):
    """The options of a chapter, of which rank 0 alone says what is wrong and what there are."""

    def error(self, message: str) -> NoReturn:
        if int(os.environ.get("RANK", 0)):
            sys.exit(2)
        super().error(message)

    def print_help(self, file=None) -> None:
        if not int(os.environ.get("RANK", 0)):
            super().print_help(file)


def in_notebook() -> bool:
    """Whether this is IPython's kernel or prompt rather than a script."""
    return hasattr(builtins, "__IPYTHON__")


class Page:
    """Prints, and keeps the verdicts: `answers` given so far, `checks` as (what, held)."""

    def __init__(
        self, doc, *, mesh="", axes="", fits: Fits = ((), {}), device=False, seed=False, plot=False, **options
    ):
        """`mesh`: the default one of the chapter's ranks; `axes`: others that it may name; `fits`: (types, their dims'
        sizes) that must divide over it, where B is --batch if it has no size; `options`: name=(default, help), as
        `page.args.name` then, or (default, help, a type for argparse)."""
        self.doc, self.began = doc or "", time.perf_counter()
        self.checks: list[tuple[str, bool]] = []
        self.given: list[Answer] = []
        self.pictures: list[tuple[str, Callable]] = []
        self.profiles = 0
        self.first = int(os.environ.get("RANK", 0)) == 0
        self.args = self._parse(mesh, axes, fits, device, seed, plot, options)
        self.opening = "" if in_notebook() else self.doc.split("\n\n")[0].strip()

    def _parse(self, mesh: str, axes: str, fits: Fits, device, seed, plot, options) -> argparse.Namespace:
        first, _, rest = self.doc.strip().partition("\n")
        parser = ChapterParser(description=first, epilog=rest)
        parser.add_argument("--small", action="store_true", help="smaller sizes: a few seconds")
        if mesh:
            fitted = f"axes and sizes (default {mesh}, fitted to torchrun's ranks)"
            also = f"; further axes: {', '.join(axes)}" if axes else ""
            parser.add_argument("--mesh", metavar=mesh, help=fitted + also)
            parser.add_argument("--profile", type=place, default="", metavar="PLACE", help=PROFILE)
        if device:
            parser.add_argument("--device", default="cpu", help="cpu, or cuda: a GPU for each rank (default cpu)")
        if seed:
            parser.add_argument(
                "--seed", type=integer(0, SEEDS), default=0, help="seed of the random operands (default 0)"
            )
        if plot:
            parser.add_argument("--plot", type=picture, metavar="FILE", help="write the pictures too, PNG or SVG")
        for name, (default, text, *checked) in options.items():
            usual = "" if default in ("", None) else f" (default {default})"
            kind = checked[0] if checked else integer() if type(default) is int else type(default)
            parser.add_argument(f"--{name}", type=kind, default=default, help=text + usual)
        args = parser.parse_args(shlex.split(os.environ.get("CHAPTER", "")) if in_notebook() else None)
        self.refuse = parser.error
        if device:
            self._device(parser, args.device)
        if mesh:
            args.mesh = self._mesh(parser, mesh, axes, args.mesh)
            self._divides(parser, args, mesh, *fits)
            self._ready(parser, args)
        return args

    def _ready(self, parser: ChapterParser, args: argparse.Namespace) -> None:
        """Refuse what no rank could do, and lines of the script that break a rule, before any rank starts."""
        if text := getattr(args, "text", ""):
            size, least = Path(text).is_file() and Path(text).stat().st_size, max(LEAST, 2 * getattr(args, "batch", 0))
            if size < least:
                why = f"{size:,} bytes, of {least:,} that it takes" if Path(text).is_file() else "no such file"
                parser.error(f"--text {text}: {why}; fix: leave it out for Python's standard library")
        if not in_notebook():
            if Path(sys.argv[0]).is_file() and (findings := check_file(sys.argv[0])):
                sys.exit("\n".join(map(str, findings)) if self.first else 1)
            from scaling.launch import start_by_torchrun

            start_by_torchrun(args.mesh, getattr(args, "device", "cpu"))

    @staticmethod
    def _device(parser: ChapterParser, device: str) -> None:
        """Refuse a device that is none here."""
        if device not in ("cpu", "cuda"):
            parser.error(f"--device {device}: must be cpu, or cuda, where each rank takes a GPU of its own")
        from scaling.mesh import check_device

        try:
            check_device(device)
        except ShardingError as error:
            parser.error(f"--device {device}: {error}")

    @staticmethod
    def _mesh(parser: ChapterParser, usual: str, axes: str, given: "str | None") -> dict[str, int]:
        """The mesh asked for, or the usual one fitted to torchrun's ranks; axes that are not named have size 1."""
        try:
            sizes = parse_mesh(usual)
            if given:
                asked, known = parse_mesh(given), [*sizes, *axes]
                if strange := [axis for axis in asked if axis not in known]:
                    fix = f"fix: name {', '.join(known)}"
                    parser.error(f"--mesh {given}: {strange[0]} is no axis of this chapter; {fix}")
                return {**dict.fromkeys(sizes, 1), **asked}
            if int(os.environ.get("WORLD_SIZE", 1)) == 1:
                return sizes
            from scaling.launch import fit_mesh

            return fit_mesh(sizes)
        except ShardingError as error:
            why = str(error).splitlines()[0].removeprefix(f"--mesh {given}").removeprefix("--mesh").removeprefix(": ")
            parser.error(f"--mesh {given or usual}: {why}; fix: --mesh {usual}")

    @staticmethod
    def _divides(parser: ChapterParser, args: argparse.Namespace, usual: str, types: Iterable, sizes: dict) -> None:
        """Refuse a mesh, or a batch, over which arrays of these types do not divide, or of another number of ranks."""
        devices, given = math.prod(args.mesh.values()), format_sizes(args.mesh).replace(" ", "")
        world = int(os.environ.get("WORLD_SIZE", 1))
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

    @property
    def small(self) -> bool:
        return self.args.small

    @property
    def columns(self) -> int:
        """How many columns may be printed."""
        return layout.width()

    def say(self, text: str = "") -> None:
        """Print text, its long lines continued on the next ones; from rank 0 alone."""
        self.open()
        if self.first:
            print(fold(str(text)), flush=True)

    def open(self) -> None:
        """Print the first paragraph, once: before anything else, and after what the chapter may refuse."""
        opening, self.opening = self.opening, ""
        if opening:
            self.say(opening)

    def title(self, text: str) -> None:
        self.say(f"\n{text}\n{'-' * min(len(text), layout.width())}")

    def table(self, rows: Iterable[Sequence], headers: Sequence[str]) -> None:
        self.say(layout.table(rows, headers))

    def chart(self, name: str, series, *labels: str, points=None, marks=(), log: bool | str = True, height=18) -> None:
        """A chart (scaling.show.charts): as text, in a notebook as a picture; `--plot` also writes it, by its name."""
        options: dict[str, Any] = {"points": points, "marks": marks, "log": log}
        if not self.picture(name, lambda: charts.figure(series, *list[Any](labels), **options)):
            width = min(layout.width(), 90) - charts.MARGIN - 1
            self.say("\n" + charts.chart(series, *labels, width=width, height=height, **options))

    def picture(self, name: str, make: Callable) -> bool:
        """Keep a picture, `make()` its matplotlib Figure, for `--plot`; in a notebook show it. Whether it was shown."""
        self.pictures.append((name, make))
        if not in_notebook():
            return False
        from IPython.display import Image, display

        try:
            make().savefig(image := BytesIO(), format="png", dpi=100)
        except RuntimeError:  # no matplotlib
            return False
        display(Image(image.getvalue()))
        return True

    def check(self, what: str, held: bool) -> str:
        """Keep a verdict, and give its word for a table: "yes", or "NO" if it does not hold."""
        self.checks.append((what, bool(held)))
        return "yes" if held else "NO"

    def equal(self, rows) -> None:
        """A table of (what, difference, limit): the difference from one device's result, relative to its largest."""
        words = [(what, f"{off:.1e}", f"{limit:.0e}", self.check(what, off <= limit)) for what, off, limit in rows]
        self.table(words, ["compared with one device", "difference", "limit", "equal"])

    def same(self, rows, headers: Sequence[str]) -> None:
        """A table of (what, the book's formula, its value, what was counted): the two numbers must be one."""
        words = []
        for what, formula, value, counted in rows:
            held = abs(value - counted) <= 1e-9 * abs(value)
            words.append((what, formula, layout.exact(value), layout.exact(counted), self.check(what, held)))
        self.table(words, [*headers, "the same"])

    def answers(self, answers: Sequence[Answer]) -> None:
        """The book's answers beside ours; those that differ fail the chapter."""
        self.given += answers
        self.say("\n" + answer_table(answers))

    def on_ranks(self, fn: Callable, *args, checked: bool = True) -> Any:
        """`fn(mesh, *args)` on every rank of `--mesh`, started here or torchrun's: the result of rank 0."""
        from scaling import launch

        sizes, device = self.args.mesh, getattr(self.args, "device", "cpu")
        self.open()  # the ranks may print, too
        sys.stdout.flush()
        if self.args.profile:
            from scaling.profile.steps import profiled

            fn, args = profiled, (fn, self._place(), *args)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            from scaling.mesh import Mesh

            return fn(Mesh(sizes, device, checked), *args)
        if in_notebook():
            return launch.run(fn, sizes, *args, device=device, checked=checked)[0]
        return launch.start(fn, sizes, *args, device=device, checked=checked)

    def _place(self) -> str:
        """Where the next profile is written: the place asked for, the second and further ones with their number."""
        self.profiles += 1
        place = Path(self.args.profile)
        return str(place if self.profiles == 1 else place.with_stem(f"{place.stem}-{self.profiles}"))

    @property
    def failures(self) -> list[str]:
        """What did not hold: answers that differ, and checks."""
        wrong = [answer.question for answer in self.given if answer.verdict == "DIFFERS"]
        return wrong + [what for what, held in self.checks if not held]

    def end(self) -> None:
        """Write the pictures asked for and say what held. What did not: ends a script with 1, raises in a notebook."""
        for path in self._save() if self.first and getattr(self.args, "plot", None) else ():
            self.say(f"wrote {path}")
        parts = [verdict_counts(self.given)] if self.given else []
        parts += [f"{len(self.checks)} checks"] if self.checks else []
        took = time.perf_counter() - self.began
        seconds = f"{took:.1f} s" if took < 100 else f"{took:.0f} s"
        verdict = f"{len(self.failures)} FAILED: {', '.join(self.failures)}" if self.failures else "all hold"
        self.say(f"\nWhat held: {', '.join(parts)}: {verdict} ({seconds})")
        if "torch.distributed" in sys.modules:
            import torch.distributed as dist

            if dist.is_initialized() and int(os.environ.get("WORLD_SIZE", 1)) > 1:
                dist.destroy_process_group()
        if self.failures and in_notebook():
            raise AssertionError(verdict)
        if self.failures:
            sys.exit(1 if self.first else f"rank {os.environ['RANK']}: {verdict}")

    def _save(self) -> list[Path]:
        """The pictures as files: one under the name given, several with their own names added to it."""
        path = Path(self.args.plot)
        paths = [path.with_stem(f"{path.stem}-{name}") if len(self.pictures) > 1 else path for name, _ in self.pictures]
        for file, (_, make) in zip(paths, self.pictures, strict=True):
            make().savefig(file, dpi=150)
        return paths
