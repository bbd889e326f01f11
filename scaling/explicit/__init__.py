"""Explicit mode (Part 10): arrays that carry their type, and functions that derive the type of their result.

`array` makes one, `reshard` changes its type, and `grad` and `vjp` differentiate, typed by the law of cotangents.
`einsum`, `matmul`, `sum`, `amax`, `reshape`, `broadcast_to` and `take` are torch's functions with an argument `out`,
the result's type. The rules are in `algebra.law`, the table of torch's functions in `algebra.ops`. `functions` reads a
call and poses the questions to the planner.
"""

from scaling.explicit.arrays import Array, amax, array, broadcast_to, einsum, matmul, mean, reshape, reshard, sum, take
from scaling.explicit.derivatives import grad, vjp

__all__ = [
    "Array",
    "amax",
    "array",
    "broadcast_to",
    "einsum",
    "grad",
    "matmul",
    "mean",
    "reshape",
    "reshard",
    "sum",
]
__all__ += ["take", "vjp"]
