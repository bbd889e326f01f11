"""Part 5, "Data Parallelism": https://jax-ml.github.io/scaling-book/training

    In[B_X, D] * W_in[D, F] * W_out[F, D] -> Out[B_X, D]

The batch is split, the params are replicated. The forward moves nothing; the backward leaves each weight's gradient as
partial sums {U_X}, and an AllReduce adds them up. Nothing waits for it but the optimizer, so it can run behind the rest
of the backward: `scaling/strategies/data_parallel.py` does that, for L layers, and can reduce several in one bucket.

    torchrun chapters/05_dp.py
    torchrun --nproc-per-node 2 chapters/05_dp.py --mesh X=2
"""

# %%
import torch
from torch.func import grad

from scaling import data, optim
from scaling.book.learning import Trained, clock, learned
from scaling.book.lesson import Report, options, run
from scaling.book.listing import module_equality, one_layer, stack_equality
from scaling.collectives import all_reduce, einsum
from scaling.models import mlp
from scaling.strategies.stack import Strategy
from scaling.strategies.stateless import call, reduce_grads
from scaling.train.byte_lm import batch_axes, loss_and_grads, param_specs, reduced

# %% First by types alone: any nn.Module of yours, the types of its params, and torch.func.grad

STORED = USED = {"fc1.weight": "W[F, D]", "fc1.bias": "b[F]", "fc2.weight": "V[D, F]", "fc2.bias": "c[D]"}


def gradients(module, params, x, mesh):
    """params typed STORED, x[B_X, D] -> the gradients of sum Out^2 over the whole batch, typed as the params."""
    f = call(module, STORED, USED, mesh)  # nothing to gather: the params are replicated

    def loss(params):
        return f(params, x).square().sum()  # Loss[] {U_X}: each rank's own rows

    return reduce_grads(grad(loss)(params), STORED, mesh, over="X")  # the AllReduce of data parallelism


# %% The book's layer, line by line: what each rank does

SPECS = {"In": "In[B_X, D]", "W_in": "W_in[D, F]", "W_out": "W_out[F, D]", "Out": "Out[B_X, D]"}


def forward(W_in, W_out, In, mesh, block):
    """W_in[D, F], W_out[F, D], In[B_X, D] -> Out[B_X, D]."""
    Tmp = einsum("In[B_X, D] * W_in[D, F] -> Tmp[B_X, F]", block.norm(In), W_in)  # 1.
    Act = block.act(Tmp)
    Out = einsum("Act[B_X, F] * W_out[F, D] -> Out[B_X, D]", Act, W_out)  # 2.
    return Out, (In, Tmp, Act)


def backward(W_in, W_out, dOut, saved, mesh, block):
    """dOut[B_X, D] -> dIn[B_X, D], dW_in[D, F], dW_out[F, D]."""
    In, Tmp, Act = saved
    dW_out = einsum("Act[B_X, F] * dOut[B_X, D] -> dW_out[F, D] {U_X}", Act, dOut)  # 2.
    dW_out = all_reduce("dW_out[F, D] {U_X} -> dW_out[F, D]", dW_out, mesh)  # 3. not on the critical path
    dAct = einsum("dOut[B_X, D] * W_out[F, D] -> dAct[B_X, F]", dOut, W_out)  # 4.
    dTmp = block.act_vjp(Tmp, dAct)
    dW_in = einsum("In[B_X, D] * dTmp[B_X, F] -> dW_in[D, F] {U_X}", block.norm(In), dTmp)  # 5.
    dW_in = all_reduce("dW_in[D, F] {U_X} -> dW_in[D, F]", dW_in, mesh)  # 6. not on the critical path
    dIn = einsum("dTmp[B_X, F] * W_in[D, F] -> dIn[B_X, D]", dTmp, W_in)  # 7. needed by the layer before
    return block.norm_vjp(In, dIn), dW_in, dW_out


# %% L layers of it, with gelu, norm and residual, trained on real text


def train(layer, mesh, text, args):
    """The listing above, over all layers: pure steps from params and optimizer state to new ones."""
    config, optimizer = mlp.Config(), optim.adamw(3e-3, betas=(0.9, 0.99))
    params = mlp.init(config, args.seed, torch.float32, mesh, param_specs(layer))
    state, losses, first, began = optimizer.init(params), [], None, clock(mesh.device)
    batches = data.endless(text, config.K, args.batch, mesh, batch_axes(layer), args.seed)
    for _, (tokens, targets) in zip(range(args.steps), batches, strict=False):
        loss, grads = loss_and_grads(layer, params, tokens, targets, config, mesh)
        first = grads if first is None else first
        params, state = optimizer.update(grads, state, params)
        losses.append(reduced(layer, loss, mesh))
    return Trained(config, optimizer, losses, first, params, state, clock(mesh.device) - began)


# %% The layer on this mesh, beside one device; then the training


def main(mesh, args):
    report = Report(mesh, __doc__)
    report.title("By types alone: the gradients of an nn.Module, in float64")
    module_equality(gradients, STORED, mesh, report, args.seed)
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

    layer = Strategy(SPECS, forward, backward)
    report.title("Four layers of it with gelu, norm and residual, in float64")
    stack_equality(layer, mesh, report, args.seed)
    report.title("Memory and training: a byte model on real text, in float32")
    text = data.load_text(args.text, max_bytes=1_000_000).to(mesh.device)
    learned(report, layer, train(layer, mesh, data.split(text)[0], args), text, args)
    return report.done()


if __name__ == "__main__":
    run(main, options(__doc__, mesh="X=4"))
