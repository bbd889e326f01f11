"""Part 5, "Combining FSDP and Tensor Parallelism": https://jax-ml.github.io/scaling-book/training

    In[B_X, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_X, D_Y]

Weights are split over both mesh axes. Gathers over X move weights (FSDP), those over Y move activations (tensor
parallelism); each moves 1/Y, or 1/X, of what it would move alone. The layer below is the book's listing, line by line:
change a line and see what breaks. `scaling/strategies/fsdp_tp.py` is the same for L layers, with gathers started ahead.

    torchrun chapters/05_fsdp_tp.py
    torchrun --nproc-per-node 4 chapters/05_fsdp_tp.py --mesh X=2,Y=2
"""

# %%
import torch

from scaling import data, optim
from scaling.book.learning import Trained, clock, learned
from scaling.book.lesson import Report, options, run
from scaling.book.listing import one_layer, stack_equality
from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.models import mlp
from scaling.strategies.stack import Strategy
from scaling.train.byte_lm import batch_axes, loss_and_grads, param_specs, reduced

# %% One layer: what each rank does

SPECS = {"In": "In[B_X, D_Y]", "W_in": "W_in[D_X, F_Y]", "W_out": "W_out[F_Y, D_X]", "Out": "Out[B_X, D_Y]"}


def forward(W_in, W_out, In_Y, mesh, block):
    """W_in[D_X, F_Y], W_out[F_Y, D_X], In[B_X, D_Y] -> Out[B_X, D_Y]."""
    In = all_gather("In[B_X, D_Y] -> In[B_X, D]", In_Y, mesh)  # 1. on the critical path
    W_in = all_gather("W_in[D_X, F_Y] -> W_in[D, F_Y]", W_in, mesh)  # 2. can be done ahead of time
    Tmp = einsum("In[B_X, D] * W_in[D, F_Y] -> Tmp[B_X, F_Y]", block.norm(In), W_in)  # 3.
    Act = block.act(Tmp)
    W_out = all_gather("W_out[F_Y, D_X] -> W_out[F_Y, D]", W_out, mesh)  # 4. can be done ahead of time
    Out = einsum("Act[B_X, F_Y] * W_out[F_Y, D] -> Out[B_X, D] {U_Y}", Act, W_out)  # 5.
    Out = reduce_scatter("Out[B_X, D] {U_Y} -> Out[B_X, D_Y]", Out, mesh)  # 6. on the critical path
    return Out, (In_Y, Tmp, Act)


def backward(W_in, W_out, dOut, saved, mesh, block):
    """dOut[B_X, D_Y] -> dIn[B_X, D_Y], dW_in[D_X, F_Y], dW_out[F_Y, D_X]."""
    In_Y, Tmp, Act = saved
    dOut = all_gather("dOut[B_X, D_Y] -> dOut[B_X, D]", dOut, mesh)  # 2. on the critical path
    dW_out = einsum("Act[B_X, F_Y] * dOut[B_X, D] -> dW_out[F_Y, D] {U_X}", Act, dOut)  # 3.
    dW_out = reduce_scatter("dW_out[F_Y, D] {U_X} -> dW_out[F_Y, D_X]", dW_out, mesh)  # 4.
    W_out = all_gather("W_out[F_Y, D_X] -> W_out[F_Y, D]", W_out, mesh)  # 5. can be done ahead of time
    dAct = einsum("dOut[B_X, D] * W_out[F_Y, D] -> dAct[B_X, F_Y]", dOut, W_out)  # 6.
    dTmp = block.act_vjp(Tmp, dAct)
    In = all_gather("In[B_X, D_Y] -> In[B_X, D]", In_Y, mesh)  # 7. can be shared with the forward's 1.
    dW_in = einsum("In[B_X, D] * dTmp[B_X, F_Y] -> dW_in[D, F_Y] {U_X}", block.norm(In), dTmp)  # 8.
    dW_in = reduce_scatter("dW_in[D, F_Y] {U_X} -> dW_in[D_X, F_Y]", dW_in, mesh)  # 9.
    W_in = all_gather("W_in[D_X, F_Y] -> W_in[D, F_Y]", W_in, mesh)  # 10. can be done ahead of time
    dIn = einsum("dTmp[B_X, F_Y] * W_in[D, F_Y] -> dIn[B_X, D] {U_Y}", dTmp, W_in)  # 11.
    dIn = block.norm_vjp(In, dIn)
    dIn = reduce_scatter("dIn[B_X, D] {U_Y} -> dIn[B_X, D_Y]", dIn, mesh)  # 12. on the critical path
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
    X, Y = mesh.sizes["X"], mesh.sizes["Y"]
    B, D, F = 8 * X * Y, 8 * X * Y, 16 * X * Y
    fwd, bwd = one_layer(forward, backward, SPECS, {"B": B, "D": D, "F": F}, mesh, report, args.seed)

    report.title("Bytes that one layer moves (8 bytes an element), by the book's count")
    rows = [
        ("forward", "16BD/X + 16DF/Y", 16 * B * D // X + 16 * D * F // Y, fwd.book_bytes),
        ("backward", "24BD/X + 32DF/Y", 24 * B * D // X + 32 * D * F // Y, bwd.book_bytes),
    ]
    report.same(rows, ["", "closed form", "bytes", "counted"])
    report.say(
        "The book's table has 8BD/X for the backward in bfloat16; by its own listing it is 6BD/X, as counted here,"
    )
    report.say("or 4BD/X where step 7 reuses the In that the forward gathered.")

    layer = Strategy(SPECS, forward, backward)
    report.title("Four layers of it with gelu, norm and residual, in float64")
    stack_equality(layer, mesh, report, args.seed)
    report.title("Memory and training: a byte model on real text, in float32")
    text = data.load_text(args.text, max_bytes=1_000_000).to(mesh.device)
    learned(report, layer, train(layer, mesh, data.split(text)[0], args), text, args)
    return report.done()


if __name__ == "__main__":
    run(main, options(__doc__, mesh="X=4,Y=2"))
