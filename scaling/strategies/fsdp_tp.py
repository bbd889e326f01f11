"""FSDP + tensor parallelism (Part 5, Combining FSDP and Tensor Parallelism):

    In[B_X, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_X, D_Y]

Weights are split along D over X, as in FSDP, and along F over Y, as in tensor parallelism: gathers and reductions over
X move weights and can be done ahead of time or late; those over Y move activations, on the critical path. The numbers
are the book's steps; 11 and 12 are taken before 3 and 8, which then run while the ReduceScatter does.
"""

from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.strategies import fsdp
from scaling.strategies.block import Layer, Saved, act, act_vjp, normed, normed_vjp, slot, wait_all

SPECS = {"In": "In[B_X, D_Y]", "W_in": "W_in[D_X, F_Y]", "W_out": "W_out[F_Y, D_X]", "Out": "Out[B_X, D_Y]"}
ENDS = {"embed": "E[K, V, D_YX]", "head": "W_head[D_YX, V]"}  # of the byte model around the blocks


def gather_weights(params, l, mesh):
    """Start to gather the weights of layer l: (W_in[D, F_Y], W_out[F_Y, D]), both pending."""
    return (
        all_gather("W_in[D_X, F_Y] -> W_in[D, F_Y]", params["W_in"][l], mesh, async_op=True),
        all_gather("W_out[F_Y, D_X] -> W_out[F_Y, D]", params["W_out"][l], mesh, async_op=True),
    )


def forward(params, In, mesh, activation="gelu", residual=False, norm=False, keep=True):
    """In[B_X, D_Y] -> (Out[B_X, D_Y], saved), through L layers: W_in[L, D_X, F_Y], W_out[L, F_Y, D_X].

    `keep`: keep each gathered In[B_X, D] for the backward; otherwise that gathers it again (the book's step 7).
    """
    L, layers = len(params["W_in"]), []
    ahead = gather_weights(params, 0, mesh)
    for l in range(L):
        W_in, W_out = ahead  # 2. and 4. done ahead of time
        ahead = gather_weights(params, l + 1, mesh) if l + 1 < L else None
        In_D = all_gather("In[B_X, D_Y] -> In[B_X, D]", In, mesh)  # 1. on the critical path
        Hid = normed(In_D, norm)
        Tmp = einsum("Hid[B_X, D] * W_in[D, F_Y] -> Tmp[B_X, F_Y]", Hid, W_in.wait())  # 3.
        Act = act(Tmp, activation)
        # W_out first: D is then the outer dim in memory, and its blocks need no copy to be scattered
        Out = einsum("W_out[F_Y, D] * Act[B_X, F_Y] -> Out[B_X, D] {U_Y}", W_out.wait(), Act)  # 5.
        Out = reduce_scatter("Out[B_X, D] {U_Y} -> Out[B_X, D_Y]", Out, mesh)  # 6. on the critical path
        layers.append(Layer(In_D if keep else In, Tmp, Act))
        In = In + Out if residual else Out
    return In, Saved(layers, activation, residual, norm, keep)


def backward(dOut, saved, params, mesh, partial=None, reduce=True, donate=False):
    """dOut[B_X, D_Y] -> (dIn[B_X, D_Y], grads typed as params: reduce-scattered over X).

    For microbatches: `partial`, the gradients {U_X} of earlier ones, whole along D (given away), is added to; with
    `reduce=False` nothing is reduced, and the sum so far is returned as the partial of the next microbatch.
    `donate`: `saved` is given away, and each layer's activations are freed once they have been used.
    """
    grads = fsdp.room(params, partial, reduce)
    L, late = saved.depth(params), []
    ahead = gather_weights(params, L - 1, mesh)
    for l in reversed(range(L)):
        In, Tmp, Act = saved.take(l, donate)
        W_in, W_out = ahead  # 5. and 10. done ahead of time
        ahead = gather_weights(params, l - 1, mesh) if l > 0 else None
        dOut_D = all_gather("dOut[B_X, D_Y] -> dOut[B_X, D]", dOut, mesh)  # 2. on the critical path
        dAct = einsum("dOut[B_X, D] * W_out[F_Y, D] -> dAct[B_X, F_Y]", dOut_D, W_out.wait())  # 6.
        dTmp = act_vjp(Tmp, dAct, saved.activation)
        In_D = In if saved.keep else all_gather("In[B_X, D_Y] -> In[B_X, D]", In, mesh)  # 7. skipped if it was kept
        dHid = einsum("W_in[D, F_Y] * dTmp[B_X, F_Y] -> dHid[B_X, D] {U_Y}", W_in.wait(), dTmp)  # 11.
        dIn_D = normed_vjp(In_D, dHid, saved.norm)
        dIn = reduce_scatter("dIn[B_X, D] {U_Y} -> dIn[B_X, D_Y]", dIn_D, mesh, async_op=True)  # 12. during 3. and 8.
        # dOut first: D is then the outer dim in memory, and its blocks need no copy to be scattered
        into = slot(partial, "W_out", l)
        dW_out = einsum("dOut[B_X, D] * Act[B_X, F_Y] -> dW_out[F_Y, D] {U_X}", dOut_D, Act, **into)  # 3.
        if reduce:
            shard, line = grads["W_out"][l], "dW_out[F_Y, D] {U_X} -> dW_out[F_Y, D_X]"
            late.append(reduce_scatter(line, dW_out, mesh, async_op=True, out=shard))  # 4.
        Hid, into = normed(In_D, saved.norm), slot(partial, "W_in", l)
        dW_in = einsum("Hid[B_X, D] * dTmp[B_X, F_Y] -> dW_in[D, F_Y] {U_X}", Hid, dTmp, **into)  # 8.
        if reduce:
            shard, line = grads["W_in"][l], "dW_in[D, F_Y] {U_X} -> dW_in[D_X, F_Y]"
            late.append(reduce_scatter(line, dW_in, mesh, async_op=True, out=shard))  # 9.
        dOut = dOut + dIn.wait() if saved.residual else dIn.wait()
        late = wait_all(late, leave=2)  # so that no more than two layers' whole gradients are held
    wait_all(late)
    return dOut, grads


partial_sums = fsdp.partial_sums  # W_in[L, D, F_Y] {U_X}, W_out[L, F_Y, D] {U_X}
