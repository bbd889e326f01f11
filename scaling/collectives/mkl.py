"""The product of two matrices, in parts where that is faster on a CPU.

On Intel's processors, MKL walks a matrix larger than a core's caches in an order that suits large products. A few rows
(a microbatch, or a small batch) times a weight take as little as 0.55 of the time if some rows of the weight are
multiplied after others, and the gradient of a weight from so few rows 0.6 if some rows of it are made after others
(float32 and float64). Several threads wait for each other after each part of a sum, so that for them 8 rows in parts
would take 1.8 of the time.

On AMD's these parts gain nothing, but in a product of a few rows in float32 MKL leaves most of the work to one thread.
A batch of products, each of some columns of the weight, divides it evenly: two threads take 0.6 to 0.86 of the time.
All other products are torch's, whole. `tests/benchmarks/overhead.py` measures both.
"""

import contextlib
import platform

import torch

from scaling.collectives.linear import observed


def processor() -> str:
    """What the system says of the processor, its maker among it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        return file.read(256)
    return platform.processor()


MKL = torch.backends.mkl.is_available()
AMD = "AuthenticAMD" in processor()
FEW = 128  # rows of a batch, at most, for which a product is made in parts
SHORT = 40  # terms of a sum, at most, for which no product is made in parts
WIDE = 1024  # columns, at least, of a weight of which some rows are multiplied after others
NARROW = 128  # columns, at least, that a part has of a weight
LARGE = 1 << 17  # numbers, at least, of a weight whose columns are divided among the threads


def mkl_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[M, K] b[K, N]."""
    if b.shape[1] == 1 < len(a):
        return mkl_matmul(b.t(), a.t()).t()
    parts = in_parts(a, b)
    if not parts or observed(a) or observed(b) or torch.is_autocast_enabled("cpu"):
        return a @ b  # in parts it would have no derivative, and autocast no say in its dtype
    if parts == "columns":
        return by_columns(a, b).reshape(len(a), b.shape[1])
    return matmul_into(a, b, a.new_empty(len(a), b.shape[1]), False)


def by_columns(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[M, K] b[K, N] as a view [M, P, N / P]: P products, as many for each thread, of columns that fit its cache."""
    M, N, count = len(a), b.shape[1], torch.get_num_threads()
    while M > 1 and N % (2 * count) == 0 and 2 * count * NARROW <= N:
        count *= 2
    return torch.bmm(a.expand(count, *a.shape), b.unflatten(1, (count, -1)).transpose(0, 1)).transpose(0, 1)


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
    elif parts == "columns":
        product = by_columns(a, b)
        whole = out.unflatten(1, product.shape[1:])
        whole.add_(product) if add else whole.copy_(product)
    else:
        multiply(a, b, out, add)
    return out


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)


def in_parts(a: torch.Tensor, b: torch.Tensor) -> str:
    """How to make a[M, K] b[K, N]: by "rows" or "columns" of the result, "terms" of its sums, or "" for at once."""
    (M, K), N = a.shape, b.shape[1]
    if not MKL or not a.is_cpu or a.dtype not in (torch.float32, torch.float64):
        return ""
    threads = torch.get_num_threads()
    if AMD:
        even = N % threads == 0 and threads * NARROW <= N and 1 in b.stride()
        large = K * N >= LARGE and a.dtype is torch.float32
        return "columns" if threads > 1 and M <= FEW and even and large else ""
    if M > FEW:
        return "rows" if SHORT < K <= FEW else ""
    return "terms" if threads == 1 and M >= 4 and K > FEW and N >= WIDE and b.stride(1) == 1 else ""
