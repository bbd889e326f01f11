"""Where the time of a chapter goes: `python -m scaling.profile PLACE chapters/05_fsdp_tp.py --mesh X=4,Y=2`.

The chapter runs as it does by itself, with its own options, which stand last; under torchrun, too: `torchrun
--nproc-per-node 8 -m scaling.profile PLACE CHAPTER`. What it has its ranks do is one step of a profile, and each time
that it does so has a profile of its own: the second is written to PLACE-2.
"""

import argparse
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from unittest.mock import patch

from scaling import launch
from scaling.book.page import Page
from scaling.check.findings import judging
from scaling.common.console import PROFILE, Parser, complain, place
from scaling.profile.record import profile


def profiled(mesh, fn: Callable, where: str, *args):
    """fn(mesh, *args), its result; all of it is one step of a profile, which rank 0 writes to `where`."""
    with profile() as p:
        result = fn(mesh, *args)
    if mesh.rank == 0:
        p.save(where)
    return result


def numbered(first: str) -> Iterator[str]:
    """The place asked for, then the same with numbers."""
    yield first
    for number in count(2):
        path = Path(first)
        yield str(path.with_stem(f"{path.stem}-{number}"))


def main(argv: list[str] | None = None) -> int:
    about, *more = (__doc__ or "").split("\n\n")
    parser = Parser(prog="python -m scaling.profile", description=about, epilog="\n\n".join(more))
    parser.add_argument("place", type=place, metavar="PLACE", help=PROFILE)
    parser.add_argument("chapter", metavar="CHAPTER", help="a script that starts ranks by its Page")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="the chapter's own")
    given = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(given)
    if not Path(args.chapter).is_file():
        parser.error(f"{args.chapter}: there is no such chapter")
    plain, later, written = Page.on_ranks, numbered(args.place), []

    def on_ranks(page: Page, fn: Callable, *rest, checked: bool = True):
        if judging():
            return plain(page, fn, *rest, checked=checked)
        written.append(next(later))
        return plain(page, profiled, fn, written[-1], *rest, checked=checked)

    again = partial(launch.start_by_torchrun, command=["-m", "scaling.profile", *given])
    with (
        patch.object(Page, "on_ranks", on_ranks),
        patch.object(launch, "start_by_torchrun", again),
        patch.object(sys, "argv", [args.chapter, *args.options]),
    ):
        runpy.run_path(args.chapter, run_name="__main__")
    if not written:
        complain(f"{args.chapter} started no ranks: there is nothing to profile")
    return 0 if written else 1
