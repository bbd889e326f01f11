"""FSDP, or ZeRO-3 (Part 5, Fully-Sharded Data Parallelism).

    In[B_X, D] * W_in[D_X, F] * W_out[F, D_X] -> Out[B_X, D]

This is data parallelism in which each rank keeps only a shard of every weight, its gradient and its optimizer state.
The weights of a layer are gathered during the layer before and thrown away after use; gradients are reduce-scattered.
The numbers are the book's steps.
"""

from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.strategies.stack import Strategy

SPECS = {"In": "In[B_X, D]", "W_in": "W_in[D_X, F]", "W_out": "W_out[F, D_X]", "Out": "Out[B_X, D]"}


def gather(W_in, W_out, mesh):
    """Start to gather W_in[D, F] and W_out[F, D]; both passes can do it ahead of time."""
    W_in = all_gather("W_in[D_X, F] -> W_in[D, F]", W_in, mesh, async_op=True)  # 1., in the backward 8.
    W_out = all_gather("W_out[F, D_X] -> W_out[F, D]", W_out, mesh, async_op=True)  # 3., in the backward 4.
    return W_in, W_out


def layer_forward(W_in, W_out, In, mesh, block):
    """In[B_X, D] -> Out[B_X, D]."""
    Tmp = einsum("In[B_X, D] * W_in[D, F] -> Tmp[B_X, F]", block.norm(In), W_in)  # 2.
    Act = block.act(Tmp)
    Out = einsum("Act[B_X, F] * W_out[F, D] -> Out[B_X, D]", Act, W_out)  # 4.
    return Out, (In, Tmp, Act)


def layer_backward(W_in, W_out, dOut, saved, mesh, block):
    """dOut[B_X, D] -> dIn[B_X, D], dW_in[D, F] {U_X}, dW_out[F, D] {U_X}."""
    In, Tmp, Act = saved
    dW_out = einsum("Act[B_X, F] * dOut[B_X, D] -> dW_out[F, D] {U_X}", Act, dOut, defer=True)  # 2.
    dAct = einsum("dOut[B_X, D] * W_out[F, D] -> dAct[B_X, F]", dOut, W_out)  # 5.
    dTmp = block.act_vjp(Tmp, dAct)
    dW_in = einsum("In[B_X, D] * dTmp[B_X, F] -> dW_in[D, F] {U_X}", block.norm(In), dTmp, defer=True)  # 6.
    dIn = einsum("dTmp[B_X, F] * W_in[D, F] -> dIn[B_X, D]", dTmp, W_in)  # 9.
    return block.norm_vjp(In, dIn), dW_in, dW_out


def reduce(dW_in, dW_out, mesh):
    """Reduce the gradients of one layer, or of several at once, off the critical path."""
    dW_out = reduce_scatter("dW_out[F, D] {U_X} -> dW_out[F, D_X]", dW_out, mesh, async_op=True)  # 3.
    dW_in = reduce_scatter("dW_in[D, F] {U_X} -> dW_in[D_X, F]", dW_in, mesh, async_op=True)  # 7.
    return dW_in, dW_out


STRATEGY = Strategy(SPECS, layer_forward, layer_backward, gather, reduce)
forward, backward = STRATEGY.forward, STRATEGY.backward
