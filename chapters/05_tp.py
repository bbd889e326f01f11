"""Part 5, "Tensor Parallelism": https://jax-ml.github.io/scaling-book/training

    In[B, D_Y] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B, D_Y]

The weights are split along F and stay where they are; activations move. Between layers they are split along D; each
layer gathers them, and reduce-scatters what it makes, in the forward and in the backward alike. All four collectives
are on the critical path: the matmuls wait for them. `scaling/strategies/tensor_parallel.py` is the same for L layers.

    torchrun chapters/05_tp.py
    torchrun --nproc-per-node 2 chapters/05_tp.py --mesh Y=2
"""

# %%
from scaling.book.lesson import Report, one_layer, options, run, stack_equality, training
from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.strategies import tensor_parallel

# %% One layer: what each rank does

SPECS = {"In": "In[B, D_Y]", "W_in": "W_in[D, F_Y]", "W_out": "W_out[F_Y, D]", "Out": "Out[B, D_Y]"}


def forward(W_in, W_out, In, mesh):
    """W_in[D, F_Y], W_out[F_Y, D], In[B, D_Y] -> Out[B, D_Y]."""
    In = all_gather("In[B, D_Y] -> In[B, D]", In, mesh)  # 1. on the critical path
    Tmp = einsum("In[B, D] * W_in[D, F_Y] -> Tmp[B, F_Y]", In, W_in)  # 2.
    Out = einsum("Tmp[B, F_Y] * W_out[F_Y, D] -> Out[B, D] {U_Y}", Tmp, W_out)  # 3.
    Out = reduce_scatter("Out[B, D] {U_Y} -> Out[B, D_Y]", Out, mesh)  # 4. on the critical path
    return Out, Tmp


def backward(dOut, Tmp, W_in, W_out, In, mesh):
    """dOut[B, D_Y] -> dIn[B, D_Y], dW_in[D, F_Y], dW_out[F_Y, D]."""
    dOut = all_gather("dOut[B, D_Y] -> dOut[B, D]", dOut, mesh)  # 2. on the critical path
    dW_out = einsum("Tmp[B, F_Y] * dOut[B, D] -> dW_out[F_Y, D]", Tmp, dOut)  # 3.
    dTmp = einsum("dOut[B, D] * W_out[F_Y, D] -> dTmp[B, F_Y]", dOut, W_out)  # 4.
    In = all_gather("In[B, D_Y] -> In[B, D]", In, mesh)  # 5. can be shared with the forward's 1.
    dW_in = einsum("In[B, D] * dTmp[B, F_Y] -> dW_in[D, F_Y]", In, dTmp)  # 6.
    dIn = einsum("dTmp[B, F_Y] * W_in[D, F_Y] -> dIn[B, D] {U_Y}", dTmp, W_in)  # 7.
    dIn = reduce_scatter("dIn[B, D] {U_Y} -> dIn[B, D_Y]", dIn, mesh)  # 8. on the critical path
    return dIn, dW_in, dW_out


# %% The layer on this mesh, beside one device; then L layers, trained


def main(mesh, args):
    report = Report(mesh, __doc__)
    Y = mesh.sizes["Y"]
    B, D, F = 32, 16 * Y, 32 * Y
    fwd, bwd = one_layer(forward, backward, SPECS, {"B": B, "D": D, "F": F}, mesh, report, args.seed)

    report.title("Bytes that one layer moves (8 bytes an element), by the book's count")
    rows = [
        ("forward", "16BD", 16 * B * D, fwd.book_bytes),
        ("backward", "24BD", 24 * B * D, bwd.book_bytes),
    ]
    report.same(rows, ["", "closed form", "bytes", "counted"])
    report.say("With the book's 2 bytes: 4BD forward and 6BD backward, or 4BD where step 5 reuses the forward's In.")

    report.title("scaling.strategies.tensor_parallel: four layers with gelu, norm and residual, in float64")
    stack_equality(tensor_parallel, mesh, report, args.seed)
    report.title("Memory and training: a byte model on real text, in float32")
    training(tensor_parallel, mesh, report, args)
    return report.done()


if __name__ == "__main__":
    run(main, options(__doc__, mesh="Y=4"))
