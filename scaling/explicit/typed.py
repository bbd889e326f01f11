"""Functions with the result's type as an argument: `einsum("bd,df->bf", In, W, out="[8_X, 8192_Y]")`.

`out` is JAX's `out_sharding`. Without it each is torch's function of that name. With it operands and result are
resharded by the cheapest lines, also if the operation alone would be refused. They take plain tensors, of one device,
too.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from scaling.explicit.arrays import Array, call_typed, reshard
from scaling.spec import Spec


def _with_out(func: Callable) -> Callable[..., Any]:
    """Return a torch function with one more argument, `out`, the result's type."""

    @wraps(func)
    def call(*args: Any, out: str | Spec | None = None, **kwargs: Any) -> Any:
        if any(isinstance(x, Array) for x in args):
            return call_typed(func, args, kwargs, out)
        result = func(*args, **kwargs)
        return result if out is None else reshard(result, out)

    return call


einsum, matmul, sum, mean = map(_with_out, (torch.einsum, torch.matmul, torch.sum, torch.mean))
amax, reshape, broadcast_to = map(_with_out, (torch.amax, torch.reshape, torch.broadcast_to))
_index_select = _with_out(torch.index_select)


def take(x, index, dim: int = 0, out: str | Spec | None = None):
    """Pick elements of a dim, which must be whole unless `out` is given, at the indices index[N]: [..., N, ...]."""
    return _index_select(x, dim, index, out=out)
