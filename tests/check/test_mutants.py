"""Faulty edits that, run on ranks, change numbers and say nothing: the judge finds them on an abstract mesh.

What came of each edit is stored (outcomes.py runs them); here one in 25 is judged.
"""

import pytest
from mutant_programs import judgement
from mutants import mutants
from outcomes import digest, stored

KNOWN = stored()
SILENT = [case for case in mutants() if KNOWN.get(digest(case[1], *case[3:5])) == "wrong"]
HOPS = [case for case in SILENT if case[0] == "collective dropped" and case[3].startswith("ppermute")]
GAPS = {  # edits that the judge does not find: (file, what stands in the collective's place)
    ("chapters/05_pp.py", "loss"),
    ("chapters/05_moe.py", "experts"),
    ("chapters/03_products.py", "o"),
}
SEEN = [case for case in SILENT if case not in HOPS and (case[1], case[4]) not in GAPS][::25]


def test_enough_were_run():
    assert len(KNOWN) > 3400
    assert len(SILENT) > 660


def test_a_block_that_a_ring_does_not_pass_on():
    assert HOPS
    assert all(judgement(case[1], case[5]).findings for case in HOPS)


@pytest.mark.parametrize(("kind", "file", "line", "before", "edit", "text"), SEEN)
def test_is_refused(kind, file, line, before, edit, text):
    assert judgement(file, text).findings, f"{kind}: {file}:{line}: {edit}"
