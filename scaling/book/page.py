"""The page that a chapter prints on: in a terminal, under torchrun (on rank 0 alone), and in a notebook.

    page = Page(__doc__, mesh="X=4", plot=True)     the options that the chapter has; --small is always one
    page.title("Where the time goes")
    page.table(rows, headers)                       at most 100 columns, or as many as the terminal has
    page.check("the halves add up", same)           a condition that must hold, besides the answers
    page.answers([Answer(...), ...])
    page.end()                                      the verdict; a failed script exits with 1

The options and their checks are in options.py.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from scaling.book import layout
from scaling.book.answers import ANSWERED, Answer, answer_table, verdict_counts
from scaling.book.options import Fits, chapter_parser, in_notebook, judging, read_options
from scaling.common.console import fold
from scaling.common.torchrun import first_rank, this_rank, world_size
from scaling.show import charts


class Page:
    """Prints a chapter's results and keeps the verdicts: `given` answers, and `checks` as (name, held)."""

    def __init__(
        self, doc, *, mesh="", axes="", fits: Fits = ((), {}), device=False, seed=False, plot=False, **options
    ):
        """Read the options and check them.

        Args:
            doc: the chapter's docstring.
            mesh: the default mesh of the chapter's ranks; "" if it has none.
            axes: other axes that --mesh may name.
            fits: (types, their dims' sizes) that must divide over the mesh, where B is --batch if it has no size.
            device: whether the chapter has --device.
            seed: whether it has --seed.
            plot: whether it has --plot.
            **options: name=(default, help) or (default, help, a type for argparse); the value is `page.args.name`.
        """
        self.doc, self.began = doc or "", time.perf_counter()
        self.checks: list[tuple[str, bool]] = []
        self.given: list[Answer] = []
        self.pictures: list[tuple[str, Callable]] = []
        self.profiles: list[Path] = []  # the profiles that `--profile` asked for
        try:
            self.first = first_rank()
        except ValueError as error:
            sys.exit(fold(f"ValueError: {error}"))
        parser = chapter_parser(self.doc, mesh, axes, device=device, seed=seed, plot=plot, **options)
        self.args, self.refuse = read_options(parser, mesh, axes, fits), parser.error
        self.opening = "" if in_notebook() else self.doc.split("\n\n")[0].strip()

    @property
    def small(self) -> bool:
        """Whether --small was given."""
        return self.args.small

    @property
    def columns(self) -> int:
        """The number of columns that may be printed."""
        return layout.width()

    def say(self, text: object = "") -> None:
        """Print text from rank 0 alone, and fold its long lines.

        In a notebook one line of prose is shown as a paragraph. Text of several lines, or with words that are aligned
        by spaces, is printed as in a terminal.
        """
        text = str(text)
        prose = text.strip()
        if prose and "\n" not in prose and "  " not in prose:
            self.show(text, lambda: f"<p>{escape(prose)}</p>")
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        self.open()
        if self.first:
            print(fold(text), flush=True)

    def open(self) -> None:
        """Print the chapter's first paragraph, once: before all other output, after the options are checked."""
        opening, self.opening = self.opening, ""
        if opening:
            self._print(opening)

    def show(self, text: str, html: Callable[[], str]) -> None:
        """Print text, if there is any; in a notebook, show HTML instead, which `html()` returns."""
        if in_notebook() and self.first and find_spec("IPython"):
            from IPython.display import display

            self.open()
            display({"text/plain": text, "text/html": html()}, raw=True)
        elif text:
            self._print(text)

    def title(self, text: str) -> None:
        """Print an underlined title; in a notebook, show a heading."""
        underlined = f"\n{text}\n{'-' * min(len(text), layout.width())}"
        self.show(underlined, lambda: f"<h4>{escape(text)}</h4>")

    def table(self, rows: Iterable[Sequence], headers: Sequence[str]) -> None:
        """Print rows under their headers; in a notebook, show them as an HTML table."""
        rows = [*map(tuple, rows)]
        self.show(layout.table(rows, headers), lambda: layout.html_table(rows, headers))

    def chart(self, name: str, series, *labels: str, points=None, marks=(), log: bool | str = True, height=18) -> None:
        """Show a chart (scaling.show.charts) as text, in a notebook as a picture; `--plot` writes it by its name."""
        options: dict[str, Any] = {"points": points, "marks": marks, "log": log}
        if not self.picture(name, lambda: charts.figure(series, *list[Any](labels), **options)):
            width = min(layout.width(), 90) - charts.MARGIN - 1
            self.say("\n" + charts.chart(series, *labels, width=width, height=height, **options))

    def picture(self, name: str, make: Callable) -> bool:
        """Keep a picture for `--plot`; in a notebook show it. Return whether it was shown.

        `make()` returns the matplotlib Figure.
        """
        self.pictures.append((name, make))
        if not in_notebook():
            return False
        from IPython.display import SVG, display

        try:
            make().savefig(image := BytesIO(), format="svg")
        except (ImportError, RuntimeError):  # no matplotlib
            return False
        display(SVG(image.getvalue()))
        return True

    def check(self, what: str, held: bool) -> str:
        """Keep a verdict and return its word for a table: "yes", or "NO" if it does not hold."""
        self.checks.append((what, bool(held)))
        return "yes" if held else "NO"

    def equal(self, rows, other: str = "one device") -> None:
        """Print a table of (name, difference, limit), the difference relative to the other result's largest."""
        words = [(what, f"{off:.1e}", f"{limit:.0e}", self.check(what, off <= limit)) for what, off, limit in rows]
        self.table(words, [f"compared with {other}", "difference", "limit", "equal"])

    def same(self, rows, headers: Sequence[str]) -> None:
        """Print a table of (name, the book's formula, its value, the count); the numbers must be equal."""
        words = []
        for what, formula, value, counted in rows:
            held = abs(value - counted) <= 1e-9 * abs(value)
            words.append((what, formula, layout.exact(value), layout.exact(counted), self.check(what, held)))
        self.table(words, [*headers, "the same"])

    def answers(self, answers: Sequence[Answer], agreeing: bool = True) -> None:
        """Print the book's answers and ours; an answer that differs fails the chapter.

        With `agreeing=False` answers that agree are only counted, where the chapter shows their numbers in a table.
        """
        self.given += answers
        shown = [answer for answer in answers if agreeing or answer.verdict != "agrees"]
        why = [answer.why for answer in shown]
        if shown:
            html = partial(layout.html_table, [answer.row for answer in shown], ANSWERED, why)
            self.show("\n" + answer_table(shown), html)
        if not agreeing:
            self.say(f"{len(answers) - len(shown)} of {len(answers)} numbers agree with the book's.")

    def on_ranks(self, fn: Callable, *args, checked: bool = True) -> Any:
        """Run `fn(mesh, *args)` on every rank of `--mesh`, started here or by torchrun, and return rank 0's result.

        With `--profile` each such call makes another profile; the second is in PLACE-2.
        """
        from scaling import launch

        if self.args.profile and not judging():
            path, number = Path(self.args.profile), len(self.profiles) + 1
            self.profiles.append(path if number == 1 else path.with_stem(f"{path.stem}-{number}"))
            fn, args = import_module("scaling.profile.record").profiled, (fn, str(self.profiles[-1]), *args)
        sizes, device = self.args.mesh, getattr(self.args, "device", "cpu")
        self.open()  # because the ranks may print, too
        sys.stdout.flush()
        if world_size() > 1:
            from scaling.mesh import Mesh

            return fn(Mesh(sizes, device, checked), *args)
        if in_notebook():
            return launch.run(fn, sizes, *args, device=device, checked=checked)[0]
        return launch.start(fn, sizes, *args, device=device, checked=checked)

    @property
    def failures(self) -> list[str]:
        """The answers that differ and the checks that do not hold."""
        wrong = [answer.question for answer in self.given if answer.verdict == "DIFFERS"]
        return wrong + [what for what, held in self.checks if not held]

    def end(self) -> None:
        """Write the pictures and print the verdict. A failure ends a script with 1 and raises in a notebook."""
        for path in self._save() if self.first and getattr(self.args, "plot", None) else ():
            self.say(f"wrote {path}")
        parts = [verdict_counts(self.given)] if self.given else []
        parts += [f"{len(self.checks)} checks"] if self.checks else []
        took = time.perf_counter() - self.began
        seconds = f"{took:.1f} s" if took < 100 else f"{took:.0f} s"
        verdict = f"{len(self.failures)} FAILED: {', '.join(self.failures)}" if self.failures else "all hold"
        self._print(f"\nWhat held: {', '.join(parts)}: {verdict} ({seconds})")
        if "torch.distributed" in sys.modules:
            import torch.distributed as dist

            if dist.is_initialized() and world_size() > 1:
                dist.destroy_process_group()
        if self.failures and in_notebook():
            raise AssertionError(verdict)
        if self.failures:
            sys.exit(1 if self.first else f"rank {this_rank().rank}: {verdict}")

    def _save(self) -> list[Path]:
        """Write the pictures: one under the name given, several with their own names added to it."""
        path = Path(self.args.plot)
        paths = [path.with_stem(f"{path.stem}-{name}") if len(self.pictures) > 1 else path for name, _ in self.pictures]
        for file, (_, make) in zip(paths, self.pictures, strict=True):
            make().savefig(file, dpi=150)
        return paths
