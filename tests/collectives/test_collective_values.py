"""Masks, ragged counts and sizes of a transfer that would be cut off, ignored or taken for others: refused."""

import pytest
import torch

from scaling.collectives import masked, ppermute, ragged_all_to_all, transfer
from scaling.mesh import Mesh
from scaling.spec import ShardingError

ONE = Mesh({"X": 1, "Y": 1})
X, MASK = torch.arange(24.0).view(2, 3, 4), torch.tensor([[True, False, True], [False, True, False]])
LINE = "x[B, T, D] {U_Y}"
MASKED = {
    "floats": (LINE, X, MASK.float()),
    "a list": (LINE, X, MASK.tolist()),
    "none": (LINE, X, None),
    "of fewer rows": (LINE, X, MASK[:1]),
    "of the last dims": (LINE, X, MASK[0]),
    "elsewhere": (LINE, X, MASK.to("meta")),
    "of nothing": (LINE, None, MASK),
    "of bools": ("m[B, T] {U_Y}", MASK, MASK),
    "of other dims": (LINE, X[0], MASK),
    "of another number": ("x[9, T, D] {U_Y}", X, MASK),
    "sparse": (LINE, X.to_sparse(), MASK),
    "a type that is no sum": ("x[B, T, D]", X, MASK),
}


@pytest.mark.parametrize(("line", "x", "mask"), MASKED.values(), ids=MASKED)
def test_a_mask_fits_what_it_masks(line, x, mask):
    with pytest.raises(ShardingError, match="fix:"):
        masked(line, x, mask, ONE)


ROWS, RAGGED = torch.arange(20.0).view(5, 4), "Row[G_X, E, R, D] -> Row[G, E_X, R, D]"
COUNTS = {
    "it keeps other rows": (ROWS, [5], [3]),
    "below 0": (ROWS, [5], [-5]),
    "floats": (ROWS, [5.0], [5]),
    "bools": (ROWS[:1], [True], [True]),
    "texts": (ROWS, ["5"], ["5"]),
    "none": (ROWS, None, None),
    "rows of one dim": (ROWS[:, 0], [5], [5]),
    "no rows": (None, [5], [5]),
}


@pytest.mark.parametrize(("x", "sends", "receives"), COUNTS.values(), ids=COUNTS)
def test_counts_of_rows_fit_the_rows(x, sends, receives):
    with pytest.raises(ValueError, match="fix:"):
        ragged_all_to_all(RAGGED, x, sends, receives, ONE)


def test_counts_may_be_a_tensor():
    assert torch.equal(ragged_all_to_all(RAGGED, ROWS, torch.tensor([5]), torch.tensor([5]), ONE), ROWS)


SIZES = [{"into": size} for size in ((-1,), (6.0,), 6, (3, 2))] + [{"below": size} for size in ((-1,), (2.5,), (1, 2))]


@pytest.mark.parametrize("given", SIZES, ids=str)
def test_sizes_of_a_transfer_are_whole_numbers(given):
    with pytest.raises(ShardingError, match="fix:"):
        transfer("A[I_X] -> A[I]", torch.arange(6.0), ONE, ONE, **given)


@pytest.mark.parametrize("perm", [[(0.9, 0)], [("0", "0")], [(0,)], 3, None])
def test_a_permutation_is_pairs_of_whole_numbers(perm):
    with pytest.raises(ShardingError, match="fix:"):
        ppermute("A[I_X]", torch.arange(6.0), ONE, "X", perm)


def test_a_permutation_of_what_is_stacked():
    assert torch.equal(ppermute("A[J_X]", ROWS, ONE.stacked("I"), "X", [(0, 0)]), ROWS)
