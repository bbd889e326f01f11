"""Data parallelism over pods, with FSDP and tensor parallelism inside each (Part 5, Scaling Across Pods).

    In[B_PX, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_PX, D_Y]

P is the slow axis, the datacenter's network: each pod holds all the weights and works on its own rows, by the lines of
fsdp_tp; only gradients cross. They are reduce-scattered over X inside the pod first, so that the AllReduce over P moves
each rank's shard alone, a 1/(X Y) of the weights, and all of a pod's links to the outside carry a part.
"""

from scaling.collectives import all_reduce
from scaling.strategies import fsdp_tp
from scaling.strategies.stack import Strategy

SPECS = {"In": "In[B_PX, D_Y]", "W_in": "W_in[D_X, F_Y]", "W_out": "W_out[F_Y, D_X]", "Out": "Out[B_PX, D_Y]"}


def reduce_slow(dW_in, dW_out, mesh):
    """Start to all-reduce across pods the shards that the ReduceScatter over X left, while the layers below run."""
    dW_in = all_reduce("dW_in[D_X, F_Y] {U_P} -> dW_in[D_X, F_Y]", dW_in, mesh, async_op=True, donate=True)
    dW_out = all_reduce("dW_out[F_Y, D_X] {U_P} -> dW_out[F_Y, D_X]", dW_out, mesh, async_op=True, donate=True)
    return dW_in, dW_out


STRATEGY = Strategy(
    SPECS, fsdp_tp.layer_forward, fsdp_tp.layer_backward, fsdp_tp.gather, fsdp_tp.reduce, reduce_slow=reduce_slow
)
forward, backward = STRATEGY.forward, STRATEGY.backward
