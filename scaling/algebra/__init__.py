"""The algebra of shardings: from types alone to the steps that a computation takes (Part 3). Pure Python.

    matmul("A[I, J_X]", "B[J_X, K]", "C[I, K]")     which of the four cases, and the cheapest plan
    reshard("A[I_XY]", "A[I_Y]")                    the cheapest plan between two types of an array
    derive("In[B_X, D] * W_in[D_X, F] * W_out[F, D_X] -> Out[B_X, D]")      FSDP, forward and backward

Plans and programs are data: print them, count their bytes and FLOPs, or run them on a mesh.

    rules                   how each collective may change a type
    ops, labels, law        how an operation changes types: torch's functions by kind, the dims of a call, and the law
    layouts, steps          types without names, and the steps between them with the bytes that they send
    resharding, planner     the cheapest plan between two types of an array, and of a whole program
    products, programs      the book's four cases of a product, and algorithms derived from one line
"""

from scaling.algebra.products import Product, cases, matmul, matmul_via
from scaling.algebra.programs import Program, derive
from scaling.algebra.resharding import reshard
from scaling.algebra.steps import COLLECTIVES, Plan, Step, permutation

__all__ = ["COLLECTIVES", "Plan", "Product", "Program", "Step", "cases", "derive", "matmul", "matmul_via"]
__all__ += ["permutation", "reshard"]
