"""Explicit mode (Part 10): arrays that carry their type, and functions that know what becomes of it.

`array` makes one, `reshard` changes its type, `grad` and `vjp` differentiate, typed by the law of cotangents. `einsum`,
`matmul`, `sum`, `amax` and `reshape` are torch's with an argument `out`, the result's type. `ops` has the rules,
`functions` the table of torch's functions, `cheapest` the search behind an error's fix.
"""

from scaling.explicit.arrays import Array, array, reshard
from scaling.explicit.derivatives import grad, vjp
from scaling.explicit.typed import amax, einsum, matmul, mean, reshape, sum

__all__ = ["Array", "amax", "array", "einsum", "grad", "matmul", "mean", "reshape", "reshard", "sum", "vjp"]
