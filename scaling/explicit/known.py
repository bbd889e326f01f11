"""The names of torch's functions whose sharding is known, and what is said of the others."""

from collections.abc import Callable
from typing import NoReturn

from scaling.spec import ShardingError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


POINTWISE = _names(
    "exp log log1p expm1 relu gelu silu sigmoid tanh sqrt rsqrt square abs cos sin reciprocal erf clamp pow softplus "
    "leaky_relu maximum minimum where masked_fill eq ne lt le gt ge logical_and logical_or logical_not "
    "bitwise_and bitwise_or bitwise_not rsub rdiv rtruediv rpow remainder floor round sign isfinite isnan invert and or"
)
LINEAR = _names("neg positive clone contiguous detach float double half bfloat16 to type")
SUMS, PRODUCTS = _names("add radd sub subtract"), _names("mul rmul multiply")
QUOTIENTS = _names("div divide truediv true_divide")
ALONG = _names("softmax log_softmax cumsum flip tril triu")
EXTREME = _names("amax amin prod any all logsumexp")
PERMUTING = _names("permute transpose swapaxes t T mT movedim")
VALUES = _names("item tolist numpy bool float int index complex array nonzero is_nonzero equal allclose setitem")
RESHAPING = _names("reshape view flatten unflatten squeeze unsqueeze view_as reshape_as")


def function_name(func: Callable) -> str:
    """A function's name, of `x.mT` the attribute's, without underscores."""
    name = getattr(func, "__name__", str(func))
    return (getattr(func.__self__, "__name__", name) if name == "__get__" else name).strip("_")


def refuse_unknown(name: str) -> NoReturn:
    raise ShardingError(
        f"{name}: not a function whose sharding is known\n"
        f"  rule: known are einsum, matmul, elementwise functions, reductions, softmax, reshape, transpose, indexing\n"
        f"  fix: write it with these, or in manual mode"
    )


def refuse_values(name: str) -> NoReturn:
    raise ShardingError(
        f"{name}: of an array whose numbers no device has all of\n"
        "  rule: arrays decide nothing in Python, and are not changed\n"
        "  fix: torch.where(mask, x, y); x.whole() first, in explicit mode; or give the number as an argument"
    )
