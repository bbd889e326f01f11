"""Functions with the result's type as an argument: `einsum("bd,df->bf", In, W, out="[8_X, 8192_Y]")`.

`out` is JAX's `out_sharding`. Without it each is torch's function of that name. With it operands and result are
resharded by the cheapest lines, also if the operation alone would be refused. They take plain tensors, of one device,
too.
"""

import torch
from torch import Tensor

from scaling.explicit.arrays import Array, call_typed, reshard
from scaling.spec import Spec

Type = str | Spec | None


def _typed(func, args: tuple, out: Type, **kwargs):
    if any(isinstance(x, Array) for x in args):
        return call_typed(func, args, kwargs, out)
    result = func(*args, **kwargs)
    return result if out is None else reshard(result, out)


def einsum(equation: str, *operands, out: Type = None):
    """Compute the product of the equation, of one or two operands; `{U_Y}` if a dim over Y is summed over."""
    return _typed(torch.einsum, (equation, *operands), out)


def matmul(a, b, out: Type = None):
    """Multiply a[..., I, J] by b[..., J, K]."""
    return _typed(torch.matmul, (a, b), out)


def sum(x, dim=None, keepdim: bool = False, out: Type = None):
    """Sum over a dim, several, or all; the result is `{U_Y}` if they are split over Y."""
    return _typed(Tensor.sum, (x, dim), out, keepdim=keepdim)


def mean(x, dim=None, keepdim: bool = False, out: Type = None):
    """Average over a dim, several, or all; the result is `{U_Y}` if they are split over Y."""
    return _typed(Tensor.mean, (x, dim), out, keepdim=keepdim)


def amax(x, dim=(), keepdim: bool = False, out: Type = None):
    """Return the largest elements along dims, which must be whole unless `out` is given."""
    return _typed(Tensor.amax, (x, dim), out, keepdim=keepdim)


def reshape(x, shape, out: Type = None):
    """Split and merge dims, in ways that cut no block."""
    return _typed(Tensor.reshape, (x, shape), out)


def broadcast_to(x, shape, out: Type = None):
    """Copy along new dims, and along dims of one element."""
    return _typed(torch.broadcast_to, (x, shape), out)


def take(x, index, dim: int = 0, out: Type = None):
    """Pick elements of a dim, which must be whole unless `out` is given, at the indices index[N]: [..., N, ...]."""
    return _typed(torch.index_select, (x, dim, index), out)
