"""Arrays with scales: FP8, MXFP8, NVFP4 and small integers, with the dims that share a scale in the type (Part 12).

    W = quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W, mesh, "mxfp8")       W.q[D_X, F] and W.s[D/32_X, F]
    W = all_gather("W[D_X, F] {Q_D} -> W[D, F] {Q_D}", W, mesh)          both parts
    Tmp = einsum("In[B_X, D] {Q_D} * W[D, F] {Q_D} -> Tmp[B_X, F]", In, W)

`rounding` has the numbers that each dtype can hold, `arrays` the lines, `recipes` the scaled products of a training
step and of its experts. The laws are in notation.md and `scaling.algebra.rules`; the formats are data in
`scaling.spec.FORMATS`.
"""

from scaling.scaled.arrays import Scaled, check_block, dequantize, quantize
from scaling.scaled.recipes import (
    RECIPES,
    UNSCALED,
    check_matrix,
    gather_matrix,
    products_of,
)

__all__ = ["RECIPES", "UNSCALED", "Scaled", "dequantize", "quantize"]
__all__ += ["check_block", "check_matrix", "gather_matrix", "products_of"]
