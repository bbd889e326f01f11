"""Data parallelism (Part 5, Data Parallelism):  In[B_X, D] * W_in[D, F] * W_out[F, D] -> Out[B_X, D].

Activations are split along the batch, params are replicated. Only the backward communicates: it all-reduces each
weight's gradient, and only the optimizer waits for it. The numbers are the book's steps.
"""

from scaling.collectives import all_reduce, einsum
from scaling.strategies.stack import Strategy

SPECS = {"In": "In[B_X, D]", "W_in": "W_in[D, F]", "W_out": "W_out[F, D]", "Out": "Out[B_X, D]"}


def layer_forward(W_in, W_out, In, mesh, block):
    """In[B_X, D] -> Out[B_X, D]."""
    Tmp = einsum("In[B_X, D] * W_in[D, F] -> Tmp[B_X, F]", block.norm(In), W_in)  # 1.
    Act = block.act(Tmp)
    Out = einsum("Act[B_X, F] * W_out[F, D] -> Out[B_X, D]", Act, W_out)  # 2.
    return Out, (In, Tmp, Act)


def layer_backward(W_in, W_out, dOut, saved, mesh, block):
    """dOut[B_X, D] -> dIn[B_X, D], dW_in[D, F] {U_X}, dW_out[F, D] {U_X}."""
    In, Tmp, Act = saved
    dW_out = einsum("Act[B_X, F] * dOut[B_X, D] -> dW_out[F, D] {U_X}", Act, dOut, defer=True)  # 2.
    dAct = einsum("dOut[B_X, D] * W_out[F, D] -> dAct[B_X, F]", dOut, W_out)  # 4.
    dTmp = block.act_vjp(Tmp, dAct)
    dW_in = einsum("In[B_X, D] * dTmp[B_X, F] -> dW_in[D, F] {U_X}", block.norm(In), dTmp, defer=True)  # 5.
    dIn = einsum("dTmp[B_X, F] * W_in[D, F] -> dIn[B_X, D]", dTmp, W_in)  # 7.
    return block.norm_vjp(In, dIn), dW_in, dW_out


def reduce(dW_in, dW_out, mesh):
    """Reduce the gradients of one layer, or of several at once, off the critical path."""
    dW_out = all_reduce("dW_out[F, D] {U_X} -> dW_out[F, D]", dW_out, mesh, async_op=True, donate=True)  # 3.
    dW_in = all_reduce("dW_in[D, F] {U_X} -> dW_in[D, F]", dW_in, mesh, async_op=True, donate=True)  # 6.
    return dW_in, dW_out


STRATEGY = Strategy(SPECS, layer_forward, layer_backward, reduce=reduce)
forward, backward = STRATEGY.forward, STRATEGY.backward
