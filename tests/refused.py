"""Tables as text; and of what is refused: {what: a call, or (a call, words of its error)}, as one test."""

import itertools
import re
from functools import partial

import pytest

from scaling.spec.sizes import parse_mesh


def read_table(text: str, names: dict, words: tuple[str, ...] = ()) -> list[tuple]:
    """The rows of a table in columns two spaces apart, below their names: meshes as in X=2,Y=2, options by name, those
    that are named as `words`, all else as Python. A line that begins with # is a comment."""

    def read(column, cell):
        if column in words:
            return cell
        return parse_mesh(cell) if column == "mesh" else eval(f"dict({cell})" if column == "options" else cell, names)

    head, *rows = (re.split("  +", line) for line in text.strip().split("\n") if not line.startswith("#"))
    return [tuple(itertools.starmap(read, itertools.zip_longest(head, row, fillvalue=""))) for row in rows]


def refused(calls: dict, error: type[Exception] = ValueError, always: str = "fix:"):
    """A test in which each call raises such an error, with these words and always with a fix."""

    @pytest.mark.parametrize("what", calls)
    def test(what):
        call, words = calls[what] if isinstance(calls[what], tuple) else (calls[what], "")
        with pytest.raises(error, match=re.escape(words or always)) as found:
            call()
        assert always in str(found.value)

    return test


def by_words(calls: dict) -> dict:
    """A table of {words of its error: a call}."""
    return {words: (call, words) for words, call in calls.items()}


def rows_of(text: str) -> list[list[str]]:
    """The rows of a table of two columns below their names: what is too long for its line stands below it, indented. A
    line that begins with # is a comment."""
    lines = [line for line in text.strip().split("\n")[1:] if not line.startswith("#")]
    return [re.split("  +", row, maxsplit=1) for row in "\n".join(lines).replace("\n    ", "  ").split("\n")]


def pairs(text: str) -> dict[str, str]:
    """A table of two columns, such as calls and the words of their errors, in which \\n is a line break."""
    return {first: "".join(second).replace("\\n", "\n") for first, *second in rows_of(text)}


def named(text: str, names: dict) -> dict:
    """A table of two columns, of which the second is Python."""
    return {name: eval(value, names) for name, value in rows_of(text)}


def evaluated(calls: dict | str, names: dict) -> dict:
    """A table of {a call as it is written: words of its error}, in a module's names."""
    calls = pairs(calls) if isinstance(calls, str) else calls
    return {call: (partial(eval, call, names), words) for call, words in calls.items()}
