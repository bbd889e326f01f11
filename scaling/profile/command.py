"""Show where the time of a chapter goes: `python -m scaling.profile PLACE chapters/05_fsdp_tp.py --mesh X=4,Y=2`.

The chapter runs with its own options, which come last. It also works under torchrun: `torchrun --nproc-per-node 8 -m
scaling.profile PLACE CHAPTER`. Each time that the chapter calls a function on its ranks, that call is one step of a
profile; the second profile is written to PLACE-2. A chapter's own `--profile PLACE` does the same.
"""

import argparse
import runpy
import sys
from pathlib import Path

from scaling.common.console import PROFILE, Parser, complain, place


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    about, *more = (__doc__ or "").split("\n\n")
    parser = Parser(prog="python -m scaling.profile", description=about, epilog="\n\n".join(more))
    parser.add_argument("place", type=place, metavar="PLACE", help=PROFILE)
    parser.add_argument("chapter", metavar="CHAPTER", help="a script that starts ranks by its Page")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="the chapter's own")
    args = parser.parse_args(argv)
    if not Path(args.chapter).is_file():
        parser.error(f"{args.chapter}: there is no such chapter")
    before, sys.argv = sys.argv, [args.chapter, *args.options, "--profile", args.place]
    try:
        names = runpy.run_path(args.chapter, run_name="__main__")
    finally:
        sys.argv = before
    if any(getattr(page, "profiles", ()) for page in names.values()):
        return 0
    complain(f"{args.chapter} started no ranks: there is nothing to profile")
    return 1
