"""Run the command `python -m scaling.show`."""

import sys

from scaling.common.console import command
from scaling.show.shardings import main


def run(argv: list[str]) -> int:
    """Run `listing`, which needs torch, or a command of scaling.show.shardings; return the exit code."""
    if argv[:1] == ["listing"]:
        from scaling.book.drawing import main as draw_listing

        return draw_listing(argv[1:])
    return main(argv)


if __name__ == "__main__":
    sys.exit(command(lambda: run(sys.argv[1:])))
