"""Functions with the result's type as an argument: `einsum("bd,df->bf", In, W, out="[8_X, 8192_Y]")`.

JAX's `out_sharding`. Without `out` each is torch's function of that name. With it operands and result are resharded by
the cheapest lines, also where the operation itself would be refused. They take plain tensors, of one device, too.
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
    """The product that the equation says, of one or two operands; `{U_Y}` where a dim over Y is summed over."""
    return _typed(torch.einsum, (equation, *operands), out)


def matmul(a, b, out: Type = None):
    """a[..., I, J] times b[..., J, K]."""
    return _typed(torch.matmul, (a, b), out)


def sum(x, dim=None, keepdim: bool = False, out: Type = None):
    """The sum over a dim, several, or all: `{U_Y}` where they are split over Y."""
    return _typed(Tensor.sum, (x, dim), out, keepdim=keepdim)


def mean(x, dim=None, keepdim: bool = False, out: Type = None):
    """The mean, as `sum`."""
    return _typed(Tensor.mean, (x, dim), out, keepdim=keepdim)


def amax(x, dim=(), keepdim: bool = False, out: Type = None):
    """The largest elements along dims, which must be whole unless `out` is given."""
    return _typed(Tensor.amax, (x, dim), out, keepdim=keepdim)


def reshape(x, shape, out: Type = None):
    """Dims split and merged, where that cuts no block."""
    return _typed(Tensor.reshape, (x, shape), out)


def broadcast_to(x, shape, out: Type = None):
    """Copies along new dims, and along dims of one element."""
    return _typed(torch.broadcast_to, (x, shape), out)


def take(x, index, dim: int = 0, out: Type = None):
    """The elements of a dim, which must be whole unless `out` is given, at the places index[N]: [..., N, ...]."""
    return _typed(torch.index_select, (x, dim, index), out)
