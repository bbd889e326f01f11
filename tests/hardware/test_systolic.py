import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling.hardware import systolic

side = st.integers(1, 9)


@pytest.mark.slow
@settings(deadline=None, max_examples=60, derandomize=True)
@given(side, side, side, st.integers(1, 5), st.integers(0, 100))
def test_it_multiplies_in_the_cycles_it_says(M, K, N, n, seed):
    g = torch.Generator().manual_seed(seed)
    X, W = (torch.randint(-9, 10, shape, generator=g).double() for shape in ((M, K), (K, N)))
    run = systolic.systolic_matmul(X, W, n)
    assert torch.equal(run.out, X @ W)
    assert run.cycles == systolic.cycles(M, K, N, n)
    assert run.utilization == M * K * N / (run.cycles * n * n) <= 1


def test_a_row_a_cycle_once_full():
    assert systolic.cycles(1024 + 8, 128, 128, 128) - systolic.cycles(1024, 128, 128, 128) == 8
    assert 2**20 / systolic.cycles(2**20, 128, 128, 128) > 0.999


def test_weights_loading_is_hidden_only_behind_n_rows():
    n = 8
    per_tile = [systolic.cycles(M, 10 * n, n, n) - systolic.cycles(M, 9 * n, n, n) for M in (2, n, 3 * n)]
    assert per_tile == [n, n, 3 * n]


def test_rows_enter_diagonally():
    frames = []
    systolic.systolic_matmul(torch.ones(2, 3), torch.full((3, 3), 5.0), 3, frames)
    assert systolic.draw(frames[1]) == ["1 0 .", "0 . .", ". . ."]
    assert systolic.draw(frames[3]) == [". . 1", ". 1 0", "1 0 ."]
    assert systolic.draw(frames[2], values=True) == [" .  5  5", "10 10  .", "15  .  ."]
    assert len(frames) == 2 + 2 * 3 - 2


@pytest.mark.parametrize(
    ("x", "w", "n"), [((2, 3), (4, 2), 2), ((3,), (3, 2), 2), ((0, 3), (3, 2), 2), ((2, 3), (3, 2), 0)]
)
def test_nonsense_is_refused(x, w, n):
    with pytest.raises(ValueError, match=r"give two matrices|whole number"):
        systolic.systolic_matmul(torch.ones(x), torch.ones(w), n)
