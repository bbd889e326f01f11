"""Counts of steps on fake devices, which several tests of a room share."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scaling.train import programs


@contextmanager
def counted_once() -> Iterator[pytest.MonkeyPatch]:
    """While the block runs, a step of one rank of a mesh is counted once, whatever asks for it."""
    known, count = {}, programs.count

    def counted(some, sizes, coord=None, backend="gloo", documents=True):
        key = some, tuple(sizes.items()), tuple((coord or {}).items()), backend, documents
        if key not in known:
            known[key] = count(some, sizes, coord, backend, documents)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "count", counted)
        yield patch
