"""A pipeline stage with FSDP and tensor parallelism inside (Part 5, Pipelining):

    In[B_X, D_Y] * W_in[L_Z, D_X, F_Y] * W_out[L_Z, F_Y, D_X] -> Out[B_X, D_Y]

Activations pass from stage to stage as shards. A stage's weights are gathered over X once a step, and their gradients
are summed over all microbatches before one ReduceScatter over X: per microbatch only the activations' collectives over
Y remain. So the weights of one stage are held whole along D during the step, which pipelining made Z times smaller.
"""

from functools import partial

from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.strategies.block import Layer, act, act_vjp, normed, normed_vjp
from scaling.strategies.stage import Rest, Stage, joined, times_transposed

SPECS = {"In": "In[B_X, D_Y]", "W_in": "W_in[L_Z, D_X, F_Y]", "W_out": "W_out[L_Z, F_Y, D_X]", "Out": "Out[B_X, D_Y]"}


def fsdp_tp(activation: str = "gelu", residual: bool = False, norm: bool = False) -> Stage:
    """In[B_X, D_Y] -> Out[B_X, D_Y] through l layers W_in[l, D_X, F_Y], W_out[l, F_Y, D_X]."""
    options = {"activation": activation, "residual": residual, "norm": norm}
    return Stage(
        SPECS,
        partial(forward, **options),
        partial(backward_input, **options),
        backward_weight,
        prepare,
        make_sums,
        reduce,
    )


def prepare(params, mesh):
    """{W_in[l, D, F_Y], W_out[l, F_Y, D]}: gathered over X, once a step."""
    W_in = all_gather("W_in[L, D_X, F_Y] -> W_in[L, D, F_Y]", params["W_in"], mesh, async_op=True)
    W_out = all_gather("W_out[L, F_Y, D_X] -> W_out[L, F_Y, D]", params["W_out"], mesh, async_op=True)
    return {"W_in": W_in.wait(), "W_out": W_out.wait()}


def forward(weights, In, mesh, activation, residual, norm):
    layers = []
    for W_in, W_out in zip(weights["W_in"].unbind(), weights["W_out"].unbind(), strict=True):
        In_D = all_gather("In[B_X, D_Y] -> In[B_X, D]", In, mesh)
        Tmp = einsum("Hid[B_X, D] * W_in[D, F_Y] -> Tmp[B_X, F_Y]", normed(In_D, norm), W_in)
        Act = act(Tmp, activation)
        Out = einsum("Act[B_X, F_Y] * W_out[F_Y, D] -> Out[B_X, D] {U_Y}", Act, W_out)
        Out = reduce_scatter("Out[B_X, D] {U_Y} -> Out[B_X, D_Y]", Out, mesh)
        layers.append(Layer(In_D, Tmp, Act))
        In = In + Out if residual else Out
    return In, layers


def backward_input(weights, dOut, saved, mesh, wanted=True, activation="gelu", residual=False, norm=False):
    rest: list[Rest] = [None] * len(saved)
    for l in reversed(range(len(saved))):
        In, Tmp, Act = saved.pop()
        dOut_D = all_gather("dOut[B_X, D_Y] -> dOut[B_X, D]", dOut, mesh)
        dAct = times_transposed("dOut[B_X, D] * W_out[F_Y, D] -> dAct[B_X, F_Y]", dOut_D, weights["W_out"][l])
        dTmp = act_vjp(Tmp, dAct, activation)
        rest[l] = Rest(normed(In, norm), dTmp, Act, dOut_D)
        if l > 0 or wanted:
            dHid = times_transposed("dTmp[B_X, F_Y] * W_in[D, F_Y] -> dHid[B_X, D] {U_Y}", dTmp, weights["W_in"][l])
            dIn = normed_vjp(In, dHid, norm)
            dIn = reduce_scatter("dIn[B_X, D] {U_Y} -> dIn[B_X, D_Y]", dIn, mesh)
            dOut = dOut + dIn if residual else dIn
    return dOut if wanted else None, rest


def backward_weight(weights, rests, sums, mesh, add):
    for l, (Hid, dTmp, Act, dOut) in enumerate(joined(rests)):
        # dOut first: D is then the outer dim in memory, and its blocks need no copy to be scattered
        einsum("dOut[B_X, D] * Act[B_X, F_Y] -> dW_out[F_Y, D] {U_X}", dOut, Act, out=sums["W_out"][l], add=add)
        einsum("Hid[B_X, D] * dTmp[B_X, F_Y] -> dW_in[D, F_Y] {U_X}", Hid, dTmp, out=sums["W_in"][l], add=add)


def make_sums(params, grads, mesh):
    """Buffers for {dW_in[l, D, F_Y] {U_X}, dW_out[l, F_Y, D] {U_X}}, D the outer dim in memory."""
    L, d, F = params["W_in"].shape
    whole = params["W_in"].new_empty((2, L, mesh.sizes["X"] * d, F))
    return {"W_in": whole[0], "W_out": whole[1].mT}


def reduce(sums, grads, mesh):
    """Sums over the microbatches of this rank -> grads typed as params, layer by layer; still under way."""
    late = []
    for l in range(len(grads["W_in"])):
        dW_in, dW_out = sums["W_in"][l], sums["W_out"][l]
        into = {"mesh": mesh, "async_op": True}
        late.append(reduce_scatter("dW_in[D, F_Y] {U_X} -> dW_in[D_X, F_Y]", dW_in, out=grads["W_in"][l], **into))
        late.append(reduce_scatter("dW_out[F_Y, D] {U_X} -> dW_out[F_Y, D_X]", dW_out, out=grads["W_out"][l], **into))
    return late
