"""No false alarm: in right variants of strategies, chapters, serving and the Transformer nothing is found.

Every second of a hundred is checked here, and all by right_variants.py.
"""

import ast

import pytest
from mutant_programs import judgement
from right_variants import variants

VARIANTS = list(variants(100, seed=0))


def test_they_differ_from_what_is_checked_anyway():
    assert len({text for _, _, text in VARIANTS}) == 100
    assert len({file for file, _, _ in VARIANTS}) > 10


@pytest.mark.slow
@pytest.mark.parametrize("number", range(0, 100, 10))
def test_nothing_is_found(number):
    for file, done, text in VARIANTS[number : number + 10 : 2]:
        ast.parse(text)
        assert [str(found) for found in judgement(file, text).findings] == [], done
