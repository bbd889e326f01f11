"""A systolic array, cycle by cycle: the MXU of a TPU (Part 2, Appendix B).

An n x n grid of cells, each of which multiplies and adds once a cycle. Weights W[K, N] stay in the cells; rows of
X[M, K] come in from the left, row k of the grid one cycle after row k - 1, and move right by one cell a cycle; partial
sums move down, and X W comes out below, column j one cycle after column j - 1.

Larger matrices are cut into tiles of n x n weights. A cell has a second weight, loaded from above while the first is in
use: the next tile's rows follow those of the last without a gap, if there are at least the n rows that loading takes.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SystolicRun:
    """What a matmul took: `out` [M, N], `cycles`, and the multiply-adds that were `useful`, M K N."""

    out: torch.Tensor
    cycles: int
    useful: int
    n: int

    @property
    def utilization(self) -> float:
        """Useful multiply-adds over those that the grid could have done in these cycles."""
        return self.useful / (self.cycles * self.n**2)


def systolic_matmul(X: torch.Tensor, W: torch.Tensor, n: int, frames: list | None = None) -> SystolicRun:
    """X[M, K] W[K, N] on an n x n array. `frames` collects two grids [n, n] for each cycle: which row of X is in which
    cell (-1 for none), and the partial sum that the cell passes down."""
    if X.ndim != 2 or W.ndim != 2 or X.shape[1] != W.shape[0] or 0 in X.shape + W.shape:
        raise ValueError(
            f"X{list(X.shape)} W{list(W.shape)}\n  fix: give two matrices that multiply, [M, K] and [K, N]"
        )
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"n = {n!r}: the side of the array is a whole number, 1 or more\n  fix: give 128, say")
    (M, K), N = X.shape, W.shape[1]
    down, across = -(-K // n), -(-N // n)
    Xp, Wp = torch.zeros(M, down * n, dtype=X.dtype), torch.zeros(down * n, across * n, dtype=W.dtype)
    Xp[:, :K], Wp[:K, :N] = X, W
    tiles = [(i, j) for j in range(across) for i in range(down)]
    weights = torch.stack([Wp[i * n : i * n + n, j * n : j * n + n] for i, j in tiles])

    period = max(M, n)  # a tile's rows, or as long as the next tile's weights take to come down
    last = period * (len(tiles) - 1) + M + 2 * n - 2  # the last output leaves the array in this cycle
    out = torch.zeros(M, across * n, dtype=X.dtype)
    moving, sums = torch.zeros(n, n, dtype=X.dtype), torch.zeros(n, n, dtype=X.dtype)
    first_k, first_n = torch.tensor(tiles).mul(n).T
    tags, rows = torch.full((n, n), -1), torch.full((n, n), -1)  # the tile and the row that a cell's x belongs to
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
    """Cycles of `run`: n to load the first weights, then the tiles, then 2n - 2 for the last row to cross the grid."""
    tiles = -(-K // n) * -(-N // n)
    return n + max(M, n) * (tiles - 1) + M + 2 * n - 2


def draw(frame: tuple[torch.Tensor, torch.Tensor], values: bool = False) -> list[str]:
    """One cycle's grid as lines of text: the row of X in each cell, or the cell's partial sum; a dot where none is."""
    rows, sums = (grid.tolist() for grid in frame)
    cells = [
        ["." if row < 0 else f"{value:g}" if values else str(row) for row, value in zip(*line, strict=True)]
        for line in zip(rows, sums, strict=True)
    ]
    width = max(len(cell) for line in cells for cell in line)
    return [" ".join(cell.rjust(width) for cell in line) for line in cells]
