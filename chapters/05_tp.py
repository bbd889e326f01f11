"""Part 5, "Tensor Parallelism": https://jax-ml.github.io/scaling-book/training

    In[B, D_Y] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B, D_Y]

The weights are split along F and stay where they are; activations move. Between layers they are split along D; each
layer gathers them, and reduce-scatters what it makes, in the forward and in the backward alike. All four collectives
are on the critical path: the matmuls wait for them. `scaling/strategies/tensor_parallel.py` is the same for L layers.

    torchrun chapters/05_tp.py
    torchrun --nproc-per-node 2 chapters/05_tp.py --mesh Y=2
"""

# %%
import torch
from torch.func import grad

from scaling import data, optim
from scaling.book.learning import Trained, clock, learned
from scaling.book.lesson import Report, options, run
from scaling.book.listing import module_equality, one_layer, stack_equality
from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.models import mlp
from scaling.strategies.stack import Strategy
from scaling.strategies.stateless import call, reduce_grads
from scaling.train.byte_lm import batch_axes, loss_and_grads, param_specs, reduced

# %% First by types alone: any nn.Module of yours, the types of its params, and torch.func.grad

STORED = {"fc1.weight": "W[F_Y, D]", "fc1.bias": "b[F_Y]", "fc2.weight": "V[D, F_Y]", "fc2.bias": "c[D]"}
USED = STORED | {"fc2.bias": "c[D] {U_Y}"}  # Out is a sum over Y: one rank along Y adds the bias, not all of them


def gradients(module, params, x, mesh):
    """params typed STORED, x[B, D] -> the gradients of sum Out^2 over the whole batch, typed as the params."""
    f = call(module, STORED, USED, mesh)  # the module on F_Y: its output is a sum over Y

    def loss(params):
        Out = reduce_scatter("Out[B, D] {U_Y} -> Out[B, D_Y]", f(params, x), mesh)
        return Out.square().sum()  # Loss[] {U_Y}: each rank's own columns

    return reduce_grads(grad(loss)(params), STORED, mesh, over="Y")  # of the bias, which is replicated


# %% The book's layer, line by line: what each rank does

SPECS = {"In": "In[B, D_Y]", "W_in": "W_in[D, F_Y]", "W_out": "W_out[F_Y, D]", "Out": "Out[B, D_Y]"}


def forward(W_in, W_out, In_Y, mesh, block):
    """W_in[D, F_Y], W_out[F_Y, D], In[B, D_Y] -> Out[B, D_Y]."""
    In = all_gather("In[B, D_Y] -> In[B, D]", In_Y, mesh)  # 1. on the critical path
    Tmp = einsum("In[B, D] * W_in[D, F_Y] -> Tmp[B, F_Y]", block.norm(In), W_in)  # 2.
    Act = block.act(Tmp)
    Out = einsum("Act[B, F_Y] * W_out[F_Y, D] -> Out[B, D] {U_Y}", Act, W_out)  # 3.
    Out = reduce_scatter("Out[B, D] {U_Y} -> Out[B, D_Y]", Out, mesh)  # 4. on the critical path
    return Out, (In_Y, Tmp, Act)


def backward(W_in, W_out, dOut, saved, mesh, block):
    """dOut[B, D_Y] -> dIn[B, D_Y], dW_in[D, F_Y], dW_out[F_Y, D]."""
    In_Y, Tmp, Act = saved
    dOut = all_gather("dOut[B, D_Y] -> dOut[B, D]", dOut, mesh)  # 2. on the critical path
    dW_out = einsum("Act[B, F_Y] * dOut[B, D] -> dW_out[F_Y, D]", Act, dOut)  # 3.
    dAct = einsum("dOut[B, D] * W_out[F_Y, D] -> dAct[B, F_Y]", dOut, W_out)  # 4.
    dTmp = block.act_vjp(Tmp, dAct)
    In = all_gather("In[B, D_Y] -> In[B, D]", In_Y, mesh)  # 5. can be shared with the forward's 1.
    dW_in = einsum("In[B, D] * dTmp[B, F_Y] -> dW_in[D, F_Y]", block.norm(In), dTmp)  # 6.
    dIn = einsum("dTmp[B, F_Y] * W_in[D, F_Y] -> dIn[B, D] {U_Y}", dTmp, W_in)  # 7.
    dIn = block.norm_vjp(In, dIn)
    dIn = reduce_scatter("dIn[B, D] {U_Y} -> dIn[B, D_Y]", dIn, mesh)  # 8. on the critical path
    return dIn, dW_in, dW_out


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

    layer = Strategy(SPECS, forward, backward)
    report.title("Four layers of it with gelu, norm and residual, in float64")
    stack_equality(layer, mesh, report, args.seed)
    report.title("Memory and training: a byte model on real text, in float32")
    text = data.load_text(args.text, max_bytes=1_000_000).to(mesh.device)
    learned(report, layer, train(layer, mesh, data.split(text)[0], args), text, args)
    return report.done()


if __name__ == "__main__":
    run(main, options(__doc__, mesh="Y=4"))
