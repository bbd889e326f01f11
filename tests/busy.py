"""Tests of time on a machine that does other things too.

What other programs delay now and then holds once among several tries; what is wrong fails each of them. And what has to
end soon ends long before the timeout that would end it otherwise.
"""

from collections.abc import Callable

SOON = 40.0  # seconds: most of them are other programs'; without these it is well under one


def once(check: Callable[[], None], tries: int = 6) -> None:
    """The check must hold in one of so many tries."""
    for left in reversed(range(tries)):
        try:
            return check()
        except AssertionError:
            if not left:
                raise
