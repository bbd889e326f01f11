"""`python -m scaling.measure`, and `python -m scaling.measure network`."""

import sys

from scaling import measure
from scaling.console import command
from scaling.measure import network


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    return network.main(given[1:]) if given[:1] == ["network"] else measure.main(given)


if __name__ == "__main__":
    sys.exit(command(main))
