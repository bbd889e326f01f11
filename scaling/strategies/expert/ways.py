"""A layer of experts in four ways (Part 10, Question 2).

    A[S_X, D], W[E_X, D, F], experts int64[S_X, k] -> Out[S_X, F],   Out[s] = mean over k of A[s] W[experts[s, k]]

Each expert is one matrix, and a token's k results are averaged. Two ways run on one device: a loop over the experts
that masks, and products of groups of rows. Two run on a mesh: either all tokens go to every device, or each chunk of
tokens goes to the devices of its experts. None makes an array [S, D, F].
"""

import torch
from torch import Tensor

from scaling.collectives import all_gather, all_to_all, ragged_all_to_all, reduce_scatter
from scaling.models.moe import by_expert, expert_rows
from scaling.spec import ShardingError

LINE = "A[R, D] * W[D, F] -> Out[R, F]"  # of one expert's rows


def masked_loop(A: Tensor, W: Tensor, experts: Tensor) -> Tensor:
    """Multiply every token by every expert and mask the products not chosen, with E/k times the FLOPs needed."""
    Out = A.new_zeros(len(A), W.shape[2])
    for e in range(len(W)):
        chosen = (experts == e).sum(1, keepdim=True).to(A.dtype)
        Out = Out + chosen * (A @ W[e])
    return Out / experts.shape[1]


def grouped(A: Tensor, W: Tensor, experts: Tensor) -> Tensor:
    """Sort one row per choice by expert, and multiply each expert's rows (perhaps none) by it."""
    rows = expert_rows(experts, len(W))
    Out = by_expert(LINE, rows.spread(A), W, rows.counts.tolist())
    return rows.collect(Out, torch.full_like(experts, 1, dtype=A.dtype) / experts.shape[1])


def gathered(A: Tensor, W: Tensor, experts: Tensor, mesh, axis: str = "X") -> Tensor:
    """Gather all tokens on every device, which computes its experts' terms; then sum the terms."""
    A = all_gather(f"A[S_{axis}, D] -> A[S, D]", A, mesh)  # 1.
    everyone = all_gather(f"B[S_{axis}, K] -> B[S, K]", experts, mesh)  # 2. whole numbers
    first = mesh.coord[axis] * len(W)
    mine = torch.where((everyone >= first) & (everyone < first + len(W)), everyone - first, len(W))
    kept = mine < len(W)
    rows = expert_rows(mine.clamp(max=len(W) - 1), len(W), kept)  # 3. only its own experts' rows
    Out = by_expert(LINE, rows.spread(A), W, rows.counts.tolist())
    Out = rows.collect(Out, kept.to(A.dtype) / experts.shape[1])  # Out[S, F] {U_X}
    return reduce_scatter(f"Out[S, F] {{U_{axis}}} -> Out[S_{axis}, F]", Out, mesh)  # 4.


def ragged(A: Tensor, W: Tensor, experts: Tensor, mesh, axis: str = "X", *, chunk: int = 128) -> Tensor:
    """Send tokens to the devices of their experts and back, `chunk` of each device's at a time.

    So a device never holds more than |X| chunk k rows of others' tokens, however many tokens there are.
    """
    if chunk < 1:
        raise ShardingError(
            f"ragged(chunk={chunk})\n  rule: a chunk has at least one token\n"
            "  fix: give a chunk of 1 or more, such as 128"
        )
    some = zip(A.split(chunk), experts.split(chunk), strict=True)
    return torch.cat([_exchanged(tokens, W, chosen, mesh, axis) for tokens, chosen in some])


def _exchanged(A: Tensor, W: Tensor, experts: Tensor, mesh, axis: str) -> Tensor:
    """A[S_X, D] -> Out[S_X, F] of one chunk, by two ragged AllToAlls of its rows."""
    n, X = mesh.sizes[axis], f"_{axis}"
    rows = expert_rows(experts, n * len(W))  # 1. by expert, so by device
    counts = all_to_all(f"n[G{X}, E] -> n[G, E{X}]", rows.counts[None], mesh)  # 2. who sends how many to whom
    sends, receives = rows.counts.view(n, -1).sum(1).tolist(), counts.sum(1).tolist()
    Row = ragged_all_to_all(f"Row[G{X}, E, R, D] -> Row[G, E{X}, R, D]", rows.spread(A), sends, receives, mesh)  # 3.
    order = torch.arange(len(W), device=A.device).repeat(n).repeat_interleave(counts.flatten()).argsort(stable=True)
    Out = by_expert(LINE, Row.index_select(0, order), W, counts.sum(0).tolist())  # 4. each its own
    Out = Out.index_select(0, order.argsort())
    Out = ragged_all_to_all(f"Out[G, E{X}, R, F] -> Out[G{X}, E, R, F]", Out, receives, sends, mesh)  # 5.
    return rows.collect(Out, torch.full_like(experts, 1, dtype=A.dtype) / experts.shape[1])  # 6. the mean of its k
