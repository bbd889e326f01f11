"""Part 5, "Data Parallelism": https://jax-ml.github.io/scaling-book/training

    In[B_X, D] * W_in[D, F] * W_out[F, D] -> Out[B_X, D]

The batch is split, the params are replicated. The forward moves nothing; the backward leaves each weight's gradient as
partial sums {U_X}, and an AllReduce adds them up. Nothing waits for it but the optimizer, so it can run behind the rest
of the backward: `scaling/strategies/data_parallel.py` does that, for L layers, and can reduce several in one bucket.

    torchrun chapters/05_dp.py
    torchrun --nproc-per-node 2 chapters/05_dp.py --mesh X=2
"""

# %%
from scaling.book.lesson import Report, one_layer, options, run, stack_equality, training
from scaling.collectives import all_reduce, einsum
from scaling.strategies import data_parallel

# %% One layer: what each rank does

SPECS = {"In": "In[B_X, D]", "W_in": "W_in[D, F]", "W_out": "W_out[F, D]", "Out": "Out[B_X, D]"}


def forward(W_in, W_out, In, mesh):
    """W_in[D, F], W_out[F, D], In[B_X, D] -> Out[B_X, D]."""
    Tmp = einsum("In[B_X, D] * W_in[D, F] -> Tmp[B_X, F]", In, W_in)  # 1.
    Out = einsum("Tmp[B_X, F] * W_out[F, D] -> Out[B_X, D]", Tmp, W_out)  # 2.
    return Out, Tmp


def backward(dOut, Tmp, W_in, W_out, In, mesh):
    """dOut[B_X, D] -> dIn[B_X, D], dW_in[D, F], dW_out[F, D]."""
    dW_out = einsum("Tmp[B_X, F] * dOut[B_X, D] -> dW_out[F, D] {U_X}", Tmp, dOut)  # 2.
    dW_out = all_reduce("dW_out[F, D] {U_X} -> dW_out[F, D]", dW_out, mesh)  # 3. not on the critical path
    dTmp = einsum("dOut[B_X, D] * W_out[F, D] -> dTmp[B_X, F]", dOut, W_out)  # 4.
    dW_in = einsum("In[B_X, D] * dTmp[B_X, F] -> dW_in[D, F] {U_X}", In, dTmp)  # 5.
    dW_in = all_reduce("dW_in[D, F] {U_X} -> dW_in[D, F]", dW_in, mesh)  # 6. not on the critical path
    dIn = einsum("dTmp[B_X, F] * W_in[D, F] -> dIn[B_X, D]", dTmp, W_in)  # 7. needed by the layer before
    return dIn, dW_in, dW_out


# %% The layer on this mesh, beside one device; then L layers, trained


def main(mesh, args):
    report = Report(mesh, __doc__)
    X = mesh.sizes["X"]
    B, D, F = 8 * X, 32, 64
    fwd, bwd = one_layer(forward, backward, SPECS, {"B": B, "D": D, "F": F}, mesh, report, args.seed)

    report.title("Bytes that one layer moves (8 bytes an element), by the book's count")
    rows = [
        ("forward", "0", 0, fwd.book_bytes),
        ("backward", "32DF", 32 * D * F, bwd.book_bytes),
    ]
    report.same(rows, ["", "closed form", "bytes", "counted"])
    report.say("An AllReduce counts twice: it is a ReduceScatter and an AllGather. With the book's 2 bytes it is 8DF.")

    report.title("scaling.strategies.data_parallel: four layers with gelu, norm and residual, in float64")
    stack_equality(data_parallel, mesh, report, args.seed)
    report.title("Memory and training: a byte model on real text, in float32")
    training(data_parallel, mesh, report, args)
    return report.done()


if __name__ == "__main__":
    run(main, options(__doc__, mesh="X=4"))
