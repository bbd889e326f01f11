"""Tables of what is refused: {what: a call, or (a call, words of its error)}, as one test."""

import re
from functools import partial

import pytest


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


def evaluated(calls: dict, names: dict) -> dict:
    """A table of {a call as it is written: words of its error}, in a module's names."""
    return {call: (partial(eval, call, names), words) for call, words in calls.items()}
