"""Tensor parallelism (Part 5, Tensor Parallelism):  In[B, D_Y] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B, D_Y].

Weights are split along F and never move; activations are split along D between layers, gathered before each layer and
reduce-scattered after it, both on the critical path. The numbers are the book's steps.
Where the result is scattered along D, the operand that has D stands first: its dims are then the outer ones in memory,
and the blocks need no copy.
"""

from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.strategies.stack import Strategy

SPECS = {"In": "In[B, D_Y]", "W_in": "W_in[D, F_Y]", "W_out": "W_out[F_Y, D]", "Out": "Out[B, D_Y]"}


def layer_forward(W_in, W_out, In_Y, mesh, block):
    """In[B, D_Y] -> Out[B, D_Y]."""
    In = all_gather("In[B, D_Y] -> In[B, D]", In_Y, mesh)  # 1. on the critical path
    Tmp = einsum("In[B, D] * W_in[D, F_Y] -> Tmp[B, F_Y]", block.norm(In), W_in)  # 2.
    Act = block.act(Tmp)
    Out = einsum("W_out[F_Y, D] * Act[B, F_Y] -> Out[B, D] {U_Y}", W_out, Act)  # 3.
    Out = reduce_scatter("Out[B, D] {U_Y} -> Out[B, D_Y]", Out, mesh)  # 4. on the critical path
    return Out, (In if block.keep else In_Y, Tmp, Act)


def layer_backward(W_in, W_out, dOut, saved, mesh, block):
    """dOut[B, D_Y] -> dIn[B, D_Y], dW_in[D, F_Y], dW_out[F_Y, D]: the batch is whole, so they are the gradients."""
    In, Tmp, Act = saved
    dOut = all_gather("dOut[B, D_Y] -> dOut[B, D]", dOut, mesh)  # 2. on the critical path
    dW_out = einsum("Act[B, F_Y] * dOut[B, D] -> dW_out[F_Y, D]", Act, dOut, defer=True)  # 3.
    dAct = einsum("dOut[B, D] * W_out[F_Y, D] -> dAct[B, F_Y]", dOut, W_out)  # 4.
    dTmp = block.act_vjp(Tmp, dAct)
    In = In if block.keep else all_gather("In[B, D_Y] -> In[B, D]", In, mesh)  # 5. can be shared with the forward's 1.
    dW_in = einsum("In[B, D] * dTmp[B, F_Y] -> dW_in[D, F_Y]", block.norm(In), dTmp, defer=True)  # 6.
    dIn = einsum("W_in[D, F_Y] * dTmp[B, F_Y] -> dIn[B, D] {U_Y}", W_in, dTmp)  # 7.
    dIn = block.norm_vjp(In, dIn)
    dIn = reduce_scatter("dIn[B, D] {U_Y} -> dIn[B, D_Y]", dIn, mesh, async_op=True)  # 8. during 3. and 6.
    return dIn, dW_in, dW_out


STRATEGY = Strategy(SPECS, layer_forward, layer_backward)
forward, backward = STRATEGY.forward, STRATEGY.backward
