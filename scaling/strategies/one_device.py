"""One device (Part 5, the layer that every strategy splits):  In[B, D] * W_in[D, F] * W_out[F, D] -> Out[B, D].

Nothing is sent. A pipeline's stage, which holds whole layers, runs this listing.
"""

from scaling.collectives import einsum
from scaling.strategies.stack import Strategy

SPECS = {"In": "In[B, D]", "W_in": "W_in[D, F]", "W_out": "W_out[F, D]", "Out": "Out[B, D]"}


def layer_forward(W_in, W_out, In, mesh, block):
    """In[B, D] -> Out[B, D]."""
    Tmp = einsum("In[B, D] * W_in[D, F] -> Tmp[B, F]", block.norm(In), W_in)
    Act = block.act(Tmp)
    Out = einsum("Act[B, F] * W_out[F, D] -> Out[B, D]", Act, W_out)
    return Out, (In, Tmp, Act)


def layer_backward(W_in, W_out, dOut, saved, mesh, block):
    """dOut[B, D] -> dIn[B, D], dW_in[D, F], dW_out[F, D]."""
    In, Tmp, Act = saved
    dW_out = einsum("Act[B, F] * dOut[B, D] -> dW_out[F, D]", Act, dOut, defer=True)
    dAct = einsum("dOut[B, D] * W_out[F, D] -> dAct[B, F]", dOut, W_out)
    dTmp = block.act_vjp(Tmp, dAct)
    dW_in = einsum("In[B, D] * dTmp[B, F] -> dW_in[D, F]", block.norm(In), dTmp, defer=True)
    dIn = einsum("dTmp[B, F] * W_in[D, F] -> dIn[B, D]", dTmp, W_in)
    return block.norm_vjp(In, dIn), dW_in, dW_out


STRATEGY = Strategy(SPECS, layer_forward, layer_backward)
forward, backward = STRATEGY.forward, STRATEGY.backward
