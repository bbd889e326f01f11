"""Auto mode (Part 10): a program on whole arrays, a few types given; the collectives are put in by the planner.

    step = auto.jit(fn, mesh, ("In[B_X, D_Y]", "W[D_Y, F]"), "Out[B_X, F]")
    print(step.lower(In, W).listing)
    Out = step(In, W)

`explicit.tracing` finds the operations, `explicit.planning` the layouts that send the least; `program` has `jit`, and
writes and runs the lines.
`explicit.reshard` inside the program asks for a type: JAX's `with_sharding_constraint`.
"""

from scaling.auto.program import jit

__all__ = ["jit"]
