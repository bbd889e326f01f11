"""Simulate a systolic array, the MXU of a TPU, cycle by cycle (Part 2, Appendix B).

The array is an n x n grid of cells, and each cell multiplies and adds once per cycle. Weights W[K, N] stay in the
cells. Rows of X[M, K] enter from the left, into row k of the grid one cycle later than into row k - 1, and move right
by one cell per cycle. Partial sums move down, and X W leaves at the bottom, column j one cycle after column j - 1.

Larger matrices are cut into tiles of n x n weights. A cell has a second weight, which is loaded from above while the
first one is in use. Loading takes n cycles, so the next tile's rows of X follow without a gap if X has at least n rows.
"""

from dataclasses import dataclass

import torch

from scaling.common.arguments import whole


@dataclass(frozen=True)
class SystolicRun:
    """The result of a matmul, `out` [M, N], with its `cycles` and its `useful` multiply-adds, M K N."""

    out: torch.Tensor
    cycles: int
    useful: int
    n: int

    @property
    def utilization(self) -> float:
        """Useful multiply-adds as a share of the number that the grid could have done in these cycles."""
        return self.useful / (self.cycles * self.n**2)


def systolic_matmul(X: torch.Tensor, W: torch.Tensor, n: int, frames: list | None = None) -> SystolicRun:
    """Multiply X[M, K] by W[K, N] on an n x n array.

    `frames`, if given, collects two grids [n, n] for each cycle: the row of X that is in each cell (-1 for none), and
    the partial sum that the cell passes down.
    """
    if X.ndim != 2 or W.ndim != 2 or X.shape[1] != W.shape[0] or 0 in X.shape + W.shape:
        raise ValueError(
            f"X{list(X.shape)} W{list(W.shape)}\n  fix: give two matrices that multiply, [M, K] and [K, N]"
        )
    whole(n=n)
    (M, K), N = X.shape, W.shape[1]
    down, across = -(-K // n), -(-N // n)
    Xp, Wp = torch.zeros(M, down * n, dtype=X.dtype), torch.zeros(down * n, across * n, dtype=W.dtype)
    Xp[:, :K], Wp[:K, :N] = X, W
    tiles = [(i, j) for j in range(across) for i in range(down)]
    weights = torch.stack([Wp[i * n : i * n + n, j * n : j * n + n] for i, j in tiles])

    period = max(M, n)  # cycles per tile, for its M rows or for loading the next tile's weights
    last = period * (len(tiles) - 1) + M + 2 * n - 2  # the last output leaves the array in this cycle
    out = torch.zeros(M, across * n, dtype=X.dtype)
    moving, sums = torch.zeros(n, n, dtype=X.dtype), torch.zeros(n, n, dtype=X.dtype)
    first_k, first_n = torch.tensor(tiles).mul(n).T
    tags, rows = torch.full((n, n), -1), torch.full((n, n), -1)  # tile and row of the x in each cell
    lane, column = torch.arange(n), torch.arange(n).expand(n, n)

    for cycle in range(last):
        tile, row = (cycle - lane).div(period, rounding_mode="floor"), (cycle - lane) % period
        enters = (cycle >= lane) & (tile < len(tiles)) & (row < M)
        tile = torch.where(enters, tile, -1)
        x = torch.where(enters, Xp[row.clamp(max=M - 1), first_k[tile.clamp(min=0)] + lane], 0)
        moving = torch.cat([x[:, None], moving[:, :-1]], 1)
        tags = torch.cat([tile[:, None], tags[:, :-1]], 1)
        rows = torch.cat([torch.where(enters, row, -1)[:, None], rows[:, :-1]], 1)
        product = moving * weights[tags.clamp(min=0), lane[:, None], column]
        sums = torch.cat([torch.zeros(1, n, dtype=X.dtype), sums[:-1]]) + torch.where(tags >= 0, product, 0)
        if frames is not None:
            frames.append((rows.clone(), sums.clone()))
        leaves = torch.nonzero(tags[-1] >= 0).flatten()
        out.index_put_((rows[-1, leaves], first_n[tags[-1, leaves]] + leaves), sums[-1, leaves], accumulate=True)
    return SystolicRun(out[:, :N], n + last, M * K * N, n)


def cycles(M: int, K: int, N: int, n: int) -> int:
    """Return the cycles of `systolic_matmul`, by a closed form.

    They are n to load the first weights, then the tiles' cycles, then 2n - 2 for the last row to cross the grid.
    """
    tiles = -(-K // n) * -(-N // n)
    return n + max(M, n) * (tiles - 1) + M + 2 * n - 2


def draw(frame: tuple[torch.Tensor, torch.Tensor], values: bool = False) -> list[str]:
    """Draw one cycle's grid as lines of text, with the row of X in each cell, or with `values` its partial sum.

    A dot is a cell without a row.
    """
    rows, sums = (grid.tolist() for grid in frame)
    cells = [
        ["." if row < 0 else f"{value:g}" if values else str(row) for row, value in zip(*line, strict=True)]
        for line in zip(rows, sums, strict=True)
    ]
    width = max(len(cell) for line in cells for cell in line)
    return [" ".join(cell.rjust(width) for cell in line) for line in cells]
