"""Part 5, "Fully-Sharded Data Parallelism (FSDP)": https://jax-ml.github.io/scaling-book/training

    In[B_X, D] * W_in[D_X, F] * W_out[F, D_X] -> Out[B_X, D]

Data parallelism whose AllReduce is taken apart: a ReduceScatter leaves each rank a shard of every gradient, it keeps
only that shard of the params and of Adam's state, and AllGathers bring the weights back for as long as they are used.
None of it is on the critical path. `scaling/strategies/fsdp.py` is the same for L layers, with gathers a layer ahead;
`zero.py` has ZeRO-1 and ZeRO-2, which shard the optimizer's state, and the gradients, but not the params.

    torchrun chapters/05_fsdp.py
    torchrun --nproc-per-node 2 chapters/05_fsdp.py --mesh X=2
"""

# %%
import torch
from torch.func import grad

from scaling import data, optim, tree
from scaling.book.learning import Trained, clock, learned
from scaling.book.lesson import SINGLE, Report, options, run
from scaling.book.listing import module_equality, one_layer, stack_equality
from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.models import mlp
from scaling.strategies import data_parallel, fsdp, zero
from scaling.strategies.stack import Strategy
from scaling.strategies.stateless import call, reduce_grads
from scaling.train.byte_lm import batch_axes, loss_and_grads, param_specs, reduced

# %% First by types alone: any nn.Module of yours, the types of its params, and torch.func.grad

STORED = {"fc1.weight": "W[F, D_X]", "fc1.bias": "b[F_X]", "fc2.weight": "V[D_X, F]", "fc2.bias": "c[D_X]"}
USED = {"fc1.weight": "W[F, D]", "fc1.bias": "b[F]", "fc2.weight": "V[D, F]", "fc2.bias": "c[D]"}


def gradients(module, params, x, mesh):
    """params typed STORED, x[B_X, D] -> the gradients of sum Out^2 over the whole batch, typed as the params."""
    f = call(module, STORED, USED, mesh)  # gathers what is stored as shards, calls the module, drops it

    def loss(params):
        return f(params, x).square().sum()  # Loss[] {U_X}: each rank's own rows

    return reduce_grads(grad(loss)(params), STORED, mesh, over="X")  # nothing: a gather's transpose reduces


# %% The book's layer, line by line: what each rank does

SPECS = {"In": "In[B_X, D]", "W_in": "W_in[D_X, F]", "W_out": "W_out[F, D_X]", "Out": "Out[B_X, D]"}


def forward(W_in, W_out, In, mesh, block):
    """W_in[D_X, F], W_out[F, D_X], In[B_X, D] -> Out[B_X, D]."""
    W_in = all_gather("W_in[D_X, F] -> W_in[D, F]", W_in, mesh)  # 1. can be done during the layer before
    Tmp = einsum("In[B_X, D] * W_in[D, F] -> Tmp[B_X, F]", block.norm(In), W_in)  # 2. W_in[D, F] can be thrown away now
    Act = block.act(Tmp)
    W_out = all_gather("W_out[F, D_X] -> W_out[F, D]", W_out, mesh)  # 3. can be done during the layer before
    Out = einsum("Act[B_X, F] * W_out[F, D] -> Out[B_X, D]", Act, W_out)  # 4.
    return Out, (In, Tmp, Act)


def backward(W_in, W_out, dOut, saved, mesh, block):
    """dOut[B_X, D] -> dIn[B_X, D], dW_in[D_X, F], dW_out[F, D_X]."""
    In, Tmp, Act = saved
    dW_out = einsum("Act[B_X, F] * dOut[B_X, D] -> dW_out[F, D] {U_X}", Act, dOut)  # 2.
    dW_out = reduce_scatter("dW_out[F, D] {U_X} -> dW_out[F, D_X]", dW_out, mesh)  # 3. not on the critical path
    W_out = all_gather("W_out[F, D_X] -> W_out[F, D]", W_out, mesh)  # 4. can be done ahead of time
    dAct = einsum("dOut[B_X, D] * W_out[F, D] -> dAct[B_X, F]", dOut, W_out)  # 5. W_out[F, D] can be thrown away
    dTmp = block.act_vjp(Tmp, dAct)
    dW_in = einsum("In[B_X, D] * dTmp[B_X, F] -> dW_in[D, F] {U_X}", block.norm(In), dTmp)  # 6.
    dW_in = reduce_scatter("dW_in[D, F] {U_X} -> dW_in[D_X, F]", dW_in, mesh)  # 7. not on the critical path
    W_in = all_gather("W_in[D_X, F] -> W_in[D, F]", W_in, mesh)  # 8. can be done ahead of time
    dIn = einsum("dTmp[B_X, F] * W_in[D, F] -> dIn[B_X, D]", dTmp, W_in)  # 9. needed by the layer before
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
    B, D, F = 8 * X, 8 * X, 16 * X
    fwd, bwd = one_layer(forward, backward, SPECS, {"B": B, "D": D, "F": F}, mesh, report, args.seed)

    report.title("Bytes that one layer moves (8 bytes an element), by the book's count")
    rows = [
        ("forward", "16DF", 16 * D * F, fwd.book_bytes),
        ("backward", "32DF", 32 * D * F, bwd.book_bytes),
    ]
    report.same(rows, ["", "closed form", "bytes", "counted"])
    report.say("With the book's 2 bytes: 4DF forward, and 8DF backward, as much as data parallelism's AllReduces.")

    layer = Strategy(SPECS, forward, backward)
    report.title("Four layers of it with gelu, norm and residual, in float64")
    stack_equality(layer, mesh, report, args.seed)

    report.title("ZeRO-1, 2 and 3: bytes on each rank, of 2 layers with D=64, F=256, in float32")
    zero_table(mesh, report, args.seed)
    report.title("Memory and training: a byte model on real text, in float32")
    text = data.load_text(args.text, max_bytes=1_000_000).to(mesh.device)
    learned(report, layer, train(layer, mesh, data.split(text)[0], args), text, args)
    return report.done()


def zero_table(mesh, report, seed):
    """One step of each stage on the same params: what is kept, and whether the params come out the same."""
    L, B, D, F, X = 2, 8 * mesh.size(), 64, 256, mesh.sizes["X"]
    rng = torch.Generator().manual_seed(seed)
    shapes = {"W_in": (L, D, F), "W_out": (L, F, D)}
    params = {name: torch.randn(shape, generator=rng).to(mesh.device) * D**-0.5 for name, shape in shapes.items()}
    In, dOut = (torch.randn(B, D, generator=rng).to(mesh.device) for _ in range(2))
    In, dOut = tree.shard([In, dOut], [SPECS["In"], SPECS["Out"]], mesh)
    adamw, n, results, rows = optim.adamw(0.01), 2 * L * D * F, {}, []
    for stage in (0, 1, 2, 3):
        strategy = fsdp if stage == 3 else zero if stage else data_parallel
        own = tree.shard(params, STACKED, mesh) if stage == 3 else params
        state = zero.init(adamw, own, mesh) if stage in (1, 2) else adamw.init(own)
        _, saved = strategy.forward(own, In, mesh)
        if stage == 1:  # the whole gradients are kept until the end of the backward
            _, whole = data_parallel.backward(dOut, saved, own, mesh, reduce=False)
            held, grads = tree.nbytes(whole), zero.scatter_grads(whole, mesh)
        else:
            _, grads = strategy.backward(dOut, saved, own, mesh)
            held = tree.nbytes(grads)
        if stage in (1, 2):
            new, state = zero.update(adamw, grads, state, own, mesh)
        else:
            new, state = adamw.update(grads, state, own)
        results[stage] = tree.unshard(new, STACKED, mesh) if stage == 3 else new
        shards = [1 if stage < s else X for s in (3, 2, 1)]  # params, gradients, Adam's state
        kept = [tree.nbytes(new), held, tree.nbytes([state["m"], state["v"]])]
        for what, size, parts, found in zip(("params", "gradients", "m and v"), (4, 4, 8), shards, kept, strict=True):
            formula = f"{size}N" + (f"/{parts}" if parts > 1 else "")
            rows.append((f"{f'ZeRO-{stage}' if stage else 'DP'}: {what}", formula, size * n // parts, found))
    report.same(rows, ["kept", "formula", "bytes", "held"])
    report.say()
    report.equal([(f"params after a step of ZeRO-{s}, against DP", results[s], results[0], SINGLE) for s in (1, 2, 3)])


STACKED = {"W_in": "W_in[L, D_X, F]", "W_out": "W_out[L, F, D_X]"}

if __name__ == "__main__":
    run(main, options(__doc__, mesh="X=4"))
