"""Auto mode (Part 10): a program on whole arrays with a few types given; the planner inserts the collectives.

    step = auto.jit(fn, mesh, ("In[B_X, D_Y]", "W[D_Y, F]"), "Out[B_X, F]")
    print(step.lower(In, W).listing)
    Out = step(In, W)

`explicit.tracing` finds the operations, and `explicit.planning` the layouts that send the least; `program` has `jit`,
and writes and runs the lines. Inside the program `explicit.reshard` asks for a type, as JAX's
`with_sharding_constraint` does.
"""

from scaling.auto.program import jit

__all__ = ["jit"]
