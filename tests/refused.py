"""Tables as text; and of what is refused: {what: a call, or (a call, words of its error)}, as one test."""

import itertools
import re
from functools import partial

import pytest

from scaling.spec.sizes import parse_mesh


def read_table(text: str, names: dict, words: tuple[str, ...] = ()) -> list[tuple]:
    """Return the rows of a table in columns two spaces apart, below their names: meshes as in X=2,Y=2, options by name,
    the columns named as `words` as they are, all others as Python.

    What is too long for its line is on the next one, indented; in words \\n is a line break; a line that begins with #
    is a comment."""

    def read(column, cell):
        if column in words:
            return cell.replace("\\n", "\n")
        return parse_mesh(cell) if column == "mesh" else eval(f"dict({cell})" if column == "options" else cell, names)

    lines = "\n".join(line for line in text.strip().split("\n") if not line.startswith("#")).replace("\n    ", "  ")
    head, *rows = lines.split("\n")
    columns = re.split("  +", head)
    cells = (re.split("  +", row, maxsplit=len(columns) - 1) for row in rows)
    return [tuple(itertools.starmap(read, itertools.zip_longest(columns, row, fillvalue=""))) for row in cells]


def named(text: str, names: dict | None = None) -> dict:
    """Return a table of two columns as {words: Python in these names, or without names words}."""
    columns = re.split("  +", text.strip().partition("\n")[0])
    return dict(read_table(text, names or {}, tuple(columns if names is None else columns[:1])))


def refused(calls: dict, error: type[Exception] = ValueError, always: str = "fix:"):
    """A test in which each call raises such an error, with these words and always with a fix."""

    @pytest.mark.parametrize("what", calls)
    def test(what):
        call, words = calls[what] if isinstance(calls[what], tuple) else (calls[what], "")
        with pytest.raises(error, match=re.escape(words or always)) as found:
            call()
        assert always in str(found.value)

    return test


def evaluated(calls: dict | str, names: dict) -> dict:
    """Return {a call as it is written: (the call, words of its error)}, in a module's names."""
    calls = named(calls) if isinstance(calls, str) else calls
    return {call: (partial(eval, call, names), words) for call, words in calls.items()}
