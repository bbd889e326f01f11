"""The product of two matrices, by the way that is fastest on this CPU; elsewhere, and of other dtypes, it is torch's.

torch multiplies float32 and float64 matrices by MKL. On Intel's processors, MKL walks a matrix larger than a core's
caches in an order that suits large products. A few rows (a microbatch, or a small batch) times a weight take as little
as 0.55 of the time if some rows of the weight are multiplied after others, and the gradient of a weight from so few
rows 0.6 if some rows of it are made after others. Several threads wait for each other after each part of a sum, so that
for them 8 rows in parts would take 1.8 of the time.

On AMD's processors, MKL leaves half of each core idle: it has no AVX-512 for them. oneDNN, which torch has as well,
takes 0.5 to 0.9 of the time for float32 products that are not small. One row times a weight stored by rows is bound by
memory, and there MKL leaves most of the work to one thread: a batch of products, each of some columns of the weight,
divides it evenly. `tests/benchmarks/overhead.py` measures all of this.
"""

import contextlib
import platform

import torch

from scaling._torch import is_lazy, onednn_matmul
from scaling.collectives.linear import observed


def processor() -> str:
    """What the system says of the processor, its maker among it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        return file.read(256)
    return platform.processor()


MKL = torch.backends.mkl.is_available()
AMD = "AuthenticAMD" in processor()
ONEDNN = AMD and torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
FEW = 128  # rows of a batch, at most, for which a product is made in parts
MANY = 128  # rows, more than which are worth the copy that oneDNN makes of a lazy weight
SHORT = 40  # terms of a sum, at most, for which no product is made in parts
WIDE = 1024  # columns, at least, of a weight of which some rows are multiplied after others
NARROW = 128  # columns, at least, that a thread has of a weight
LARGE = (
    1 << 17
)  # numbers, at least, of a weight for which a call of oneDNN, which takes longer to begin, is soon won back
BLOCK = 1 << 22  # bytes of a product that is made beside its place
WORK = 1 << 21  # multiplications, at least, of a product with another one for which it is


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[M, K] b[K, N]."""
    if b.shape[1] == 1 < len(a):
        return matmul(b.t(), a.t()).t()
    how = way(a, b)
    if not how or observed(a) or observed(b) or torch.is_autocast_enabled("cpu"):
        return a @ b  # otherwise it would have no derivative, and autocast no say in its dtype
    if how in WHOLE:
        return WHOLE[how](a, b)
    return matmul_into(a, b, a.new_empty(len(a), b.shape[1]), False)


@torch.library.custom_op("scaling::onednn_matmul", mutates_args=())
def onednn_in_graph(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[M, K] b[K, N] by oneDNN for torch.compile, whose own products of float32 are MKL's. It has no derivative."""
    return onednn_matmul(a, b)


@onednn_in_graph.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def by_columns(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[1, K] b[K, N]: for each thread as many columns."""
    count = torch.get_num_threads()
    return torch.bmm(a.expand(count, *a.shape), b.unflatten(1, (count, -1)).transpose(0, 1)).reshape(1, b.shape[1])


WHOLE = {"oneDNN": onednn_matmul, "columns": by_columns}  # which have no `out`


def matmul_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> torch.Tensor:
    """out = a b, or with `add` out += a b, in place."""
    if out.stride(0) == 1 < out.stride(1):  # stored by columns
        return matmul_into(b.t(), a.t(), out.t(), add).t()
    how = way(a, b)
    if how == "rows":
        for some, rows in zip(a.split(FEW), out.split(FEW), strict=True):
            multiply(some, b, rows, add)
    elif how == "terms":
        count = 32 if len(a) <= 16 else 64 if len(a) <= 48 else 128
        for x, y in zip(a.split(count, 1), b.split(count), strict=True):
            multiply(x, y, out, add)
            add = True
    elif how and not (observed(a) or observed(b)):
        rows = max(1, BLOCK // max(1, out.shape[1] * out.element_size()))  # no second array as large as out
        for some, place in zip(a.split(rows), out.split(rows), strict=True):
            product = WHOLE[how](some, b)
            place.add_(product) if add else place.copy_(product)
    else:  # which torch refuses if it is differentiated
        multiply(a, b, out, add)
    return out


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)


def way(a: torch.Tensor, b: torch.Tensor) -> str:
    """How to make a[M, K] b[K, N]: by "rows" of the result, "terms" of its sums, "columns" of b, "oneDNN", or "" for
    torch's own product."""
    (M, K), N = a.shape, b.shape[1]
    if not MKL or not a.is_cpu or a.dtype not in (torch.float32, torch.float64):
        return ""
    threads = torch.get_num_threads()
    if AMD:
        if fits_onednn(a, b) and (M > MANY or not is_lazy(b)):
            return "oneDNN"
        even = threads > 1 and N % threads == 0 and threads * NARROW <= N
        return "columns" if ONEDNN and M == 1 and even and K * N >= LARGE and a.dtype is torch.float32 else ""
    if M > FEW:
        return "rows" if SHORT < K <= FEW else ""
    return "terms" if threads == 1 and M >= 4 and K > FEW and N >= WIDE and b.stride(1) == 1 else ""


def fits_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether oneDNN's product a[M, K] b[K, N] is faster than MKL's."""
    if not ONEDNN or not a.is_cpu or a.dtype is not torch.float32 or b.dtype is not torch.float32:
        return False
    (M, K), N = a.shape, b.shape[1]
    return (M > 1 or (M == 1 and b.stride(1) != 1)) and (K * N >= LARGE or M * K * N >= WORK)
