"""FSDP + tensor parallelism (Part 5, Combining FSDP and Tensor Parallelism).

    In[B_X, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_X, D_Y]

Weights are split along D over X, as in FSDP, and along F over Y, as in tensor parallelism: gathers and reductions over
X move weights, prefetched or deferred; over Y they move activations, on the critical path. The numbers are the book's
steps, 1-6 of the forward and 1-12 of the backward (`layer_backward`). If D is scattered next, the operand that has D
comes first, so that the blocks need no copy.
"""

from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.strategies.stack import Strategy

SPECS = {"In": "In[B_X, D_Y]", "W_in": "W_in[D_X, F_Y]", "W_out": "W_out[F_Y, D_X]", "Out": "Out[B_X, D_Y]"}


def gather(W_in, W_out, mesh):
    """Start to gather W_in[D, F_Y] and W_out[F_Y, D]; both passes can do it ahead of time."""
    W_in = all_gather("W_in[D_X, F_Y] -> W_in[D, F_Y]", W_in, mesh, async_op=True)  # 2., in the backward 10.
    W_out = all_gather("W_out[F_Y, D_X] -> W_out[F_Y, D]", W_out, mesh, async_op=True)  # 4., in the backward 5.
    return W_in, W_out


def layer_forward(W_in, W_out, In_Y, mesh, block):
    """In[B_X, D_Y] -> Out[B_X, D_Y]."""
    In = all_gather("In[B_X, D_Y] -> In[B_X, D]", In_Y, mesh)  # 1. on the critical path
    Tmp = einsum("In[B_X, D] * W_in[D, F_Y] -> Tmp[B_X, F_Y]", block.norm(In), W_in)  # 3.
    Act = block.act(Tmp)
    Out = einsum("W_out[F_Y, D] * Act[B_X, F_Y] -> Out[B_X, D] {U_Y}", W_out, Act)  # 5.
    Out = reduce_scatter("Out[B_X, D] {U_Y} -> Out[B_X, D_Y]", Out, mesh)  # 6. on the critical path
    return Out, (In if block.keep else In_Y, Tmp, Act)


def layer_backward(W_in, W_out, dOut, saved, mesh, block):
    """dOut[B_X, D_Y] -> dIn[B_X, D_Y], dW_in[D, F_Y] {U_X}, dW_out[F_Y, D] {U_X}.

    The book's steps run in this order: 5 and 10 gather W_out and W_in, in `gather`, while the layer above runs; 2; 6, 7
    and 11 on the critical path; 12 starts; 3 and 8, the gradients of weights, run while 12 is in flight; 4 and 9 reduce
    them, in `reduce`, while the layer below runs. Step 1 is dOut, which is given.
    `defer=True` returns a product that is computed when it is waited for, so 3 and 8 are written where the book has
    them and run after 12 has started.
    """
    In, Tmp, Act = saved
    dOut = all_gather("dOut[B_X, D_Y] -> dOut[B_X, D]", dOut, mesh)  # 2. on the critical path
    dW_out = einsum("Act[B_X, F_Y] * dOut[B_X, D] -> dW_out[F_Y, D] {U_X}", Act, dOut, defer=True)  # 3.
    dAct = einsum("dOut[B_X, D] * W_out[F_Y, D] -> dAct[B_X, F_Y]", dOut, W_out)  # 6.
    dTmp = block.act_vjp(Tmp, dAct)
    In = In if block.keep else all_gather("In[B_X, D_Y] -> In[B_X, D]", In, mesh)  # 7. can be shared with the forward's
    dW_in = einsum("In[B_X, D] * dTmp[B_X, F_Y] -> dW_in[D, F_Y] {U_X}", block.norm(In), dTmp, defer=True)  # 8.
    dIn = einsum("W_in[D, F_Y] * dTmp[B_X, F_Y] -> dIn[B_X, D] {U_Y}", W_in, dTmp)  # 11.
    dIn = block.norm_vjp(In, dIn)
    dIn = reduce_scatter("dIn[B_X, D] {U_Y} -> dIn[B_X, D_Y]", dIn, mesh, async_op=True)  # 12. during 3. and 8.
    return dIn, dW_in, dW_out


def reduce(dW_in, dW_out, mesh):
    """Reduce the gradients of one layer, or of several at once, off the critical path."""
    dW_out = reduce_scatter("dW_out[F_Y, D] {U_X} -> dW_out[F_Y, D_X]", dW_out, mesh, async_op=True)  # 4.
    dW_in = reduce_scatter("dW_in[D, F_Y] {U_X} -> dW_in[D_X, F_Y]", dW_in, mesh, async_op=True)  # 9.
    return dW_in, dW_out


STRATEGY = Strategy(SPECS, layer_forward, layer_backward, gather, reduce)
forward, backward = STRATEGY.forward, STRATEGY.backward
