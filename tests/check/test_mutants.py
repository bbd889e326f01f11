"""Faulty edits of typed lines: the judge finds them on an abstract mesh, those that on ranks change numbers and say
nothing, and those that raise there. In right variants of the same files it finds nothing.

What came of each edit on ranks is stored (outcomes.py runs them); here some are judged, and all by outcomes.py.
"""

import pytest
from mutant_programs import judgement
from mutants import mutants
from outcomes import digest, stored
from right_variants import variants

from scaling.check.lines import check_lines

KNOWN, EVERY = stored(), list(mutants())
SILENT, RAISED = ([c for c in EVERY if KNOWN.get(digest(c[1], *c[3:5])) == outcome] for outcome in ("wrong", "raises"))
HOPS = [case for case in SILENT if case[0] == "collective dropped" and case[3].startswith("ppermute")]
GAPS = {  # edits that the judge does not find: (file, what stands in the collective's place)
    ("scaling/serve/forms/experts.py", "all_gather('Out[B_EY, T, D] -> Out[B, T, D]', Out, at.mesh)"),
    ("scaling/serve/forms/experts.py", "all_gather('Out[B_EY, T, D] -> Out[B_X, T, D]', Out, at.mesh)"),
}
SEEN = [case for case in SILENT if case not in HOPS and (case[1], case[4]) not in GAPS][::25]
TYPES = "axis dropped in one type", "another axis in one type", "{U} dropped"
LISTINGS = tuple(f"scaling/strategies/{name}.py" for name in ("data_parallel", "fsdp", "tensor_parallel", "fsdp_tp"))
SEEN += [case for case in RAISED if case[0] in TYPES and case[1] in LISTINGS][::7]
RIGHT = list(variants(100, seed=0))


def test_enough_were_run():
    assert len(KNOWN) > 3400
    assert len(SILENT) > 660
    assert len(RAISED) > 1800
    assert len({text for _, _, text in RIGHT}) == 100
    assert len({file for file, _, _ in RIGHT}) > 10


def test_a_block_that_a_ring_does_not_pass_on():
    assert HOPS
    assert all(judgement(case[1], case[5]).findings for case in HOPS)


@pytest.mark.parametrize(("kind", "file", "line", "before", "edit", "text"), SEEN)
def test_is_refused(kind, file, line, before, edit, text):
    assert judgement(file, text).findings, f"{kind}: {file}:{line}: {edit}"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(0, 100, 10))
def test_nothing_is_found_in_right_variants(number):
    for file, done, text in RIGHT[number : number + 10 : 2]:
        assert [str(found) for found in [*check_lines(text, file)[0], *judgement(file, text).findings]] == [], done


def test_rows_chosen_in_an_array_whose_dims_are_half_known():
    """Serving's experts, with one of a stack of shards taken: which device chose a row is not known there."""
    file, done, text = list(variants(20, seed=7))[-1]
    assert "stack" in done[0]
    assert [str(found) for found in judgement(file, text).findings] == []
