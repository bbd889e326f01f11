"""Faulty edits that, run on four ranks, change numbers and say nothing: the checker refuses them without running any.

What came of each edit is stored (outcomes.py runs them); here one in twelve is read.
"""

import pytest
from mutants import mutants
from outcomes import digest, stored

from scaling.check import check_source
from scaling.check.modules import Modules

KNOWN = stored()
SILENT = [case for case in mutants() if KNOWN.get(digest(case[1], *case[3:5])) == "wrong"]


def test_enough_were_run():
    assert len(KNOWN) > 1500
    assert len(SILENT) > 380


@pytest.fixture(scope="module")
def modules():
    return Modules()


@pytest.mark.parametrize(("kind", "file", "line", "before", "edit", "text"), SILENT[::12])
def test_is_refused(kind, file, line, before, edit, text, modules):
    assert check_source(text, file, modules), f"{kind}: {file}:{line}: {edit}"
