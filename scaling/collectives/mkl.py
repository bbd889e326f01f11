"""The product of two matrices, in parts where that is faster on a CPU.

MKL walks a matrix larger than a core's caches in an order that suits large products. A few rows (a microbatch, or a
small batch) times a weight take as little as 0.55 of the time if some rows of the weight are multiplied after others,
and the gradient of a weight from so few rows 0.6 if some rows of it are made after others (float32 and float64).
Several threads wait for each other after each part of a sum, so that for them 8 rows in parts would take 1.8 of the
time. All other products are torch's, whole. `tests/benchmarks/overhead.py` measures both, of one thread.
"""

import torch

from scaling.collectives.linear import observed

MKL = torch.backends.mkl.is_available()
FEW = 128  # rows of a batch, at most, for which a product is made in parts
SHORT = 40  # terms of a sum, at most, for which no product is made in parts
WIDE = 1024  # columns, at least, of a weight of which some rows are multiplied after others


def mkl_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[M, K] b[K, N]."""
    if not in_parts(a, b) or observed(a) or observed(b) or torch.is_autocast_enabled("cpu"):
        return a @ b  # in parts it would have no derivative, and autocast no say in its dtype
    return matmul_into(a, b, a.new_empty(len(a), b.shape[1]), False)


def matmul_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> torch.Tensor:
    """out = a b, or with `add` out += a b, in place."""
    if a.shape[1] <= SHORT:
        multiply(a, b, out, add)
        return out
    if out.stride(0) == 1 < out.stride(1):  # stored by columns
        return matmul_into(b.t(), a.t(), out.t(), add).t()
    parts = in_parts(a, b)
    if parts == "rows":
        for some, rows in zip(a.split(FEW), out.split(FEW), strict=True):
            multiply(some, b, rows, add)
    elif parts == "terms":
        count = 32 if len(a) <= 16 else 64 if len(a) <= 48 else 128
        for x, y in zip(a.split(count, 1), b.split(count), strict=True):
            multiply(x, y, out, add)
            add = True
    else:
        multiply(a, b, out, add)
    return out


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)


def in_parts(a: torch.Tensor, b: torch.Tensor) -> str:
    """How to make a[M, K] b[K, N]: by "rows" of the result, by "terms" of its sums, or "" for at once."""
    M, K = a.shape
    if not MKL or K <= SHORT or M < 4 or (M <= FEW) is not (K > FEW):
        return ""
    if not a.is_cpu or a.dtype not in (torch.float32, torch.float64):
        return ""
    if M > FEW:
        return "rows"
    alone = torch.get_num_threads() == 1
    return "terms" if alone and b.shape[1] >= WIDE and b.stride(1) == 1 else ""
