# %% [markdown]
"""Part 5, mixtures of experts: tokens go to the experts they choose (with Parts 4 and 12).
"Sparsity and Mixture-of-Experts": https://jax-ml.github.io/scaling-book/transformers
"Expert Parallelism": https://jax-ml.github.io/scaling-book/gpus

    x[B_X, T, D], router[D, E], W_in[E_X, D, F], W_out[E_X, F, D] -> y[B_X, T, D]

This chapter writes one layer line by line, counts its bytes, and compares it on several meshes with the dense
computation of one device. Then it measures the load by expert, evens it out by a bias, and counts DeepSeek-V3's layer.
"""

# %% [markdown]
# ## Why experts?
# A model learns more with more params, but every param costs 6 FLOPs for each token. A mixture of experts has E MLPs
# instead of one, and each token uses k of them: the model has the params of E MLPs and computes the FLOPs of k.
#
# The price is locality. All E experts have to be stored, and a chip has only some of them, so tokens travel to their
# experts and back in every layer, forward and backward. The data decides how many tokens go where: all ranks wait for
# an expert that most tokens choose, so the load has to be balanced. And each expert sees only k/E of the tokens, so the
# batch has to be E/k times as large before a chip spends more time on products than on reading weights. Where memory or
# bandwidth binds, a dense model of the same FLOPs is simpler.
#
# The letters: a batch has B sequences of T tokens, each a vector of D numbers. Every expert has a hidden dim of F. The
# experts lie along the same mesh axis X as the data, so that a rank has both B/X sequences and E/X experts.

# %%
import torch
import torch.nn.functional as F
from torch.func import vjp

from scaling import tree
from scaling.book.answers import Answer
from scaling.book.arrays import drawn, empty, largest
from scaling.book.layout import bar, format_number
from scaling.book.listing import difference, lines
from scaling.book.page import Page
from scaling.collectives import all_gather, all_reduce, all_to_all, ragged_all_to_all
from scaling.configs import Config, get
from scaling.cost import gpu
from scaling.hardware import chip
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import moe
from scaling.show import svg
from scaling.show.frames import frames_of, text
from scaling.spec import format_axes, parse
from scaling.strategies import expert
from scaling.trace import trace

page = Page(__doc__, mesh="X=4", seed=True)
n, LIMIT = page.args.mesh["X"], 1e-11
B, T, D, E, k = 4 * n, 4 * n, 32, 2 * n, 2
config = Config("layer", L=1, D=D, F=16 * n, N=1, K=1, H=1, V=1, E=E, k=k)
SPECS = {"router": "router[D, E]", "W_in": "W_in[E_X, D, F]", "W_gate": "W_gate[E_X, D, F]",
         "W_out": "W_out[E_X, F, D]"}  # fmt: skip
ROWS = {"y": "y[B_X, T, D]", "dx": "dx[B_X, T, D]"}

# %% [markdown]
# ## One layer, line by line
# A router scores each token for each of E experts, and the token goes to the k experts with the highest scores. Each
# expert is a gated MLP. So tokens travel to their experts (line 3) and back (line 5). A token with k = 2 experts
# travels as two rows.
#
# The rows form a table, `Row[G, E, R, D]`. G is the group of tokens that a row comes from, with one group on each rank;
# E is the row's expert; R is its position among this group's rows for this expert. R is ragged: it differs by group and
# expert. So the ranks first exchange how many rows they will send (line 2). The choice of experts (line 1) is a set of
# integers and has no gradient; the router learns through the weights with which line 6 adds up the k results. Here each
# AllToAll blocks. `scaling.strategies.expert` runs the same lines, and computes the expert that all tokens share, or
# gradients of weights, while rows are in flight.


# %%
def layer(params, x, mesh):
    """x[B_X, T, D] -> (y[B_X, T, D], the values that the backward reads, with the experts that the tokens chose)."""
    tokens = x.flatten(0, 1)
    logits = moe.router_logits(tokens, params["router"])
    experts = moe.choose_experts(tokens, params["router"], config)  # 1. k experts for each token
    weights, rows = moe.weigh(logits, experts, config), moe.expert_rows(experts, E)  # the choices, sorted by expert
    count = all_to_all("n[G_X, E] -> n[G, E_X]", rows.counts[None], mesh)  # 2.
    sends, receives = rows.counts.view(len(count), -1).sum(1).tolist(), count.sum(1).tolist()
    Row = rows.spread(tokens)
    Row = ragged_all_to_all("Row[G_X, E, R, D] -> Row[G, E_X, R, D]", Row, sends, receives, mesh)  # 3. dispatch
    mine = torch.arange(count.shape[1], device=x.device).repeat(len(count))  # which of its experts each block is for
    order = mine.repeat_interleave(count.flatten()).argsort(stable=True)  # rows arrive by group; sort by expert
    Row, own = Row[order], count.sum(0).tolist()  # 4. `by_expert` multiplies the rows of each expert by its matrix
    Tmp = moe.by_expert("Row[R, D] * W_in[D, F] -> Tmp[R, F]", Row, params["W_in"], own)
    Gate = moe.by_expert("Row[R, D] * W_gate[D, F] -> Gate[R, F]", Row, params["W_gate"], own)
    Act = F.silu(Gate) * Tmp
    Out = moe.by_expert("Act[R, F] * W_out[F, D] -> Out[R, D]", Act, params["W_out"], own)[order.argsort()]
    Out = ragged_all_to_all("Out[G, E_X, R, D] -> Out[G_X, E, R, D]", Out, receives, sends, mesh)  # 5. combine
    saved = (tokens, logits, experts, rows), (sends, receives, order, own), (Row, Tmp, Gate, Act, Out)
    return rows.collect(Out, weights).view_as(x), saved  # 6. the weighted sum of each token's k


# %% [markdown]
# The backward has the transpose of each line, from the last to the first. The cotangents of the results go to the
# experts as the rows did (line 5), and the rows' cotangents come back (line 3). In between each product has two
# transposes: one by the experts' weights, on the critical path, and one that gives the gradient of the weights. The
# router learns through the weights of line 6: the cotangent of a weight is the dot product of its row with dy. The
# routing is saved, so that nothing is chosen again.


# %%
def layer_backward(params, dy, saved, mesh):
    """dy[B_X, T, D] -> (dx[B_X, T, D], dW); the router's gradient is unreduced over X."""
    (tokens, logits, experts, rows), (sends, receives, order, own), (Row, Tmp, Gate, Act, Out) = saved
    dTokens = dy.flatten(0, 1)
    weights, pull = vjp(lambda logits: moe.weigh(logits, experts, config), logits)
    dweights, dOut = rows.dotted(Out, dTokens), rows.scaled(rows.spread(dTokens), weights)  # 6.
    dOut = ragged_all_to_all("dOut[G_X, E, R, D] -> dOut[G, E_X, R, D]", dOut, sends, receives, mesh)[order]  # 5.
    dAct = moe.by_expert("dOut[R, D] * W_out[F, D] -> dAct[R, F]", dOut, params["W_out"], own)  # 4.
    dTmp, dGate = dAct * F.silu(Gate), torch.ops.aten.silu_backward(dAct * Tmp, Gate)
    dRow = moe.by_expert("dTmp[R, F] * W_in[D, F] -> dRow[R, D]", dTmp, params["W_in"], own)
    dRow = moe.by_expert("dGate[R, F] * W_gate[D, F] -> dRow[R, D]", dGate, params["W_gate"], own, add_to=dRow)
    dRow = dRow[order.argsort()]
    dRow = ragged_all_to_all("dRow[G, E_X, R, D] -> dRow[G_X, E, R, D]", dRow, receives, sends, mesh)  # 3.
    (dlogits,) = pull(dweights)
    dx = rows.collect(dRow) + dlogits @ params["router"].T
    dW = {"router": tokens.T @ dlogits}
    dW |= moe.gradient_by_expert(params, "W_in", "Row[R, D] * dTmp[R, F] -> dW_in[D, F]", Row, dTmp, own)
    dW |= moe.gradient_by_expert(params, "W_gate", "Row[R, D] * dGate[R, F] -> dW_gate[D, F]", Row, dGate, own)
    dW |= moe.gradient_by_expert(params, "W_out", "Act[R, F] * dOut[R, D] -> dW_out[F, D]", Act, dOut, own)
    return dx.view_as(dy), dW


# %% [markdown]
# ## The same layer on one device, densely
# The oracle is a dense layer. Every expert computes every token, and a token's sum takes only its k experts. The tokens
# here have a mean that is not zero, so that some experts are chosen far more often than others. Two auxiliary losses
# are compared further below: one grows as the load becomes uneven, the other with the router's logits (`--aux-coef` and
# `--z-coef` of `scaling.train`). `of_losses` are their cotangents.


# %%
def problem(config, of_losses=(0.3, 0.07)):
    """Return params, x and the cotangents of y and of the two losses, whole, in float64."""
    types = {"params": expert.specs(config, None), "x": "x[B, T, D]", "mean": "mean[D]", "dy": "dy[B, T, D]"}
    whole = drawn(types, config.sizes | {"B": B, "T": T}, page.args.seed)
    params = tree.map(lambda W: W / D**0.5, whole["params"])
    return params, whole["x"] + whole["mean"], (whole["dy"], *torch.tensor(of_losses, dtype=torch.float64))


def one_device(config, *of_losses):
    """Return (outputs, gradients of params and x, the load of each expert) by the dense computation."""
    params, x, cotangents = problem(config, *of_losses)

    def outputs(params, x):
        y, aux = moe.dense(params, x, config)
        return (y, aux["balance"], aux["z"]), aux["load"]

    outs, pull, load = vjp(outputs, params, x, has_aux=True)
    return outs, pull(cotangents), load


dense = one_device(config, (0.0, 0.0))

# %% [markdown]
# ## The layer on ranks
# Each rank runs both listings. The router is on every rank, so its gradient is a partial sum {U_X}, which is reduced at
# the end. In the tables, the two ragged AllToAlls of each pass are all the communication, apart from counts and router.
# Between the two of the forward are three products for each of the rank's two experts, and in the backward six; they
# have no FLOPs where an expert got no rows. V is the book's measure, the bytes of the whole array. A rank knows only
# its own rows, so the table has X times these, which is right on average.


# %%
def one_layer(mesh) -> dict:
    params, x, (dy, *_) = problem(config)
    (want, *_), (want_grads, want_dx), _ = dense
    params, (x, dy) = tree.shard(params, SPECS, mesh), tree.shard([x, dy], list(ROWS.values()), mesh)
    with trace() as forward:
        y, saved = layer(params, x, mesh)
    with trace() as backward:
        dx, grads = layer_backward(params, dy, saved, mesh)
    (_, _, experts, _), *_ = saved
    d = grads["router"]  # d[D, E] {U_X}, like the gradient of every replicated weight
    grads["router"] = all_reduce("d[D, E] {U_X} -> d[D, E]", d, mesh)
    moved = forward.collectives()[1:] + backward.collectives()  # the rows: all but the counts
    totals = torch.tensor([[sum(e.nbytes for e in moved) // n, sum(e.wire_bytes for e in moved)]])  # totals[G_X, K]
    totals = all_gather("b[G_X, K] -> b[G, K]", totals, mesh)  # totals[G, K]
    whole = tree.unshard(grads | {"y": y, "dx": dx}, ROWS | SPECS, mesh)
    wanted = want_grads | {"y": want, "dx": want_dx}
    return {
        "frames": frames_of(event for event in forward.collectives() if "R" in event.after.dim_names),
        "forward": lines(forward),
        "backward": lines(backward),
        "differences": [(name, difference(x, wanted[name], mesh), LIMIT) for name, x in whole.items()],
        "bytes": totals.sum(0).tolist(),
        "experts": all_gather("e[N_X, K] -> e[N, K]", experts, mesh),
    }


result = page.on_ranks(one_layer)
for name in ("forward", "backward"):
    page.title(f"{name} on {n} ranks, as rank 0 ran it: B={B} T={T} D={D} F={config.F} E={E} k={k}, float64")
    page.table(result[name], ["line", "V bytes", "sent", "FLOPs"])
page.title("The result, dx and the gradient of each weight, whole, against one device's")
page.equal(result["differences"])

# %% [markdown]
# ## Who has which rows?
# The picture shows lines 3 and 5, drawn from their types. Each rank's square is the table of rows, with groups
# downwards and experts to the right. A digit is the rank from which a block comes: in the dispatch the rank whose
# tokens these are, and in the combine the rank whose experts computed them. Before the dispatch a rank has the rows of
# its own group, a line of the table. After it, the rank has the rows for its own experts, a column with tokens of all
# groups. The combine turns the columns back into lines. Each block goes to one rank only; in an AllGather every rank
# would receive the whole table. The numbers below are the sizes of the blocks, R by group and expert, which are far
# from even.

# %%
mesh = AbstractMesh({"X": n})
page.title("The rows of each rank before and after the dispatch and the combine")
page.show(text(result["frames"], mesh), lambda: svg.player(result["frames"], mesh))
page.title("Rows by group and expert")
sizes = F.one_hot(result["experts"].view(n, -1), E).sum(1)
page.table([(g, *row) for g, row in enumerate(sizes.tolist())], ["group", *(f"e{expert}" for expert in range(E))])

# %% [markdown]
# ## Bytes moved
# Each choice is a row of D numbers that travels there and back, forward and backward, so the four AllToAlls carry 4 k B
# T D elements. If a token's expert is on its own rank, the row stays; with an even load that is one row in X. The load
# here is not even, so the second line counts the rows that leave.

# %%
params, x, _ = problem(config)
experts = moe.choose_experts(x, params["router"], config)
chosen = page.check("the ranks choose as one device does", torch.equal(result["experts"], experts.flatten(0, 1)))
home = torch.arange(B).view(-1, 1, 1) // (B // n)
leaving, (whole, sent) = int((experts // (E // n) != home).sum()), result["bytes"]
page.title("Bytes of all ranks, forward and backward")
page.same([
    ("rows, V", "4 k B T D elements", 4 * k * B * T * D * 8, whole),
    ("sent", f"4 D elements for each of {leaving} choices of another rank's", 4 * D * 8 * leaving, sent),
], ["", "closed form", "bytes", "counted"])  # fmt: skip
once = F.one_hot(experts // (E // n), n).amax(-2).sum(-1).double().mean().item()
page.say(f"\nThe ranks choose as one device does: {chosen}. A token's {k} choices lie on {once:.2f} ranks; the book "
         f"sends it once to each node, which would be {once / k:.0%} of these bytes.")  # fmt: skip

# %% [markdown]
# ## Every layout equals one device
# Now the same layer runs by `scaling.strategies.expert`, with the features of real models: sigmoid scores, a bias, an
# expert that every token shares, and the auxiliary losses. Experts are split over the data axis X or over an axis E of
# their own. C splits the sequences, and Y splits F inside each expert. A capacity limits how many tokens an expert
# takes, and drops the same ones on every mesh. The backward pass computes the layer again with the same routing, as
# `--remat block` does.

# %%
full = config.with_(routing="sigmoid", shared=1)
a, b = (2, n // 2) if n % 2 == 0 else (1, n)
LAYOUTS = [
    ({"X": n}, "X", None, "x[B_X, T, D]", full),
    ({"X": a, "E": b}, "E", None, "x[B_XE, T, D]", full),
    ({"X": b, "C": a}, "X", None, "x[B_X, T_C, D]", full),
    ({"X": a, "Y": b}, "X", "Y", "x[B_X, T, D]", full),
    ({"X": a, "Y": b}, "X", "Y", "x[B_X, T_Y, D]", full),
    ({"X": n}, "X", None, "x[B_X, T, D]", full.with_(capacity=1.0)),
    ({"X": a, "E": b}, "E", None, "x[B_XE, T, D]", full.with_(capacity=1.0)),
][:: 2 if page.small else 1]


def on_layout(mesh, axis, tensor, spec, config, reference):
    """Return (differences of y, the losses and the gradients from one device's; whether the load is the same)."""
    params, x, (dy, *weights) = problem(config)
    types = expert.specs(config, axis, tensor)
    params, (x, dy) = tree.shard(params, types, mesh), tree.shard([x, dy], [spec, spec], mesh)
    over = tuple(dict.fromkeys((*parse(spec).axes, *([tensor] if tensor else []))))
    copies = 1 if tensor is None or tensor in parse(spec).axes else mesh.sizes[tensor]  # of y; each takes a share of dy

    at = expert.expert_layout(mesh, config.E, axis, tensor, spec)
    routing = expert.route_tokens(params, x, config, mesh, axis, tensor=tensor, spec=spec)
    tokens = all_gather(f"x[{at.BT_Y}, D] -> x[{at.BT}, D]", x, mesh) if at.sequence else x
    given = {"y": tokens, "routing": routing}, config, mesh, at
    y, losses, _ = expert.forward(params, *given)
    *_, saved = expert.forward(params, *given)  # again, for the backward
    dx, dW = expert.backward(params, dy / copies, dict(zip(losses, weights, strict=True)), saved, *given[1:])

    def whole(grad, spec):
        spec = parse(spec)
        return tree.unshard(grad, spec.with_unreduced([axis for axis in over if axis not in spec.axes]), mesh)

    losses = [all_reduce(f"l[] {{U_{format_axes(over)}}} -> l[]", loss, mesh) for loss in losses.values()]
    grads = tree.map(whole, (dW, dx), (types, spec))
    (want, *want_losses), want_grads, want_load = reference
    pairs = (tree.unshard(y, spec, mesh), want), (losses, want_losses), (grads, want_grads)
    return [difference(*pair, mesh) for pair in pairs], difference(routing.load, want_load, mesh) == 0


# %% [markdown]
# Each row of the table is a mesh, with the differences of y, of the two losses and of all gradients from one device's.

# %%
references = [one_device(layout[-1]) for layout in LAYOUTS]


def all_layouts(mesh):
    return [
        on_layout(Mesh(sizes, mesh.device, mesh.checked), *layout, reference)
        for (sizes, *layout), reference in zip(LAYOUTS, references, strict=True)
    ]


page.title("Differences from one device, in float64, relative to the largest element")
rows = []
for (sizes, axis, tensor, spec, used), (off, same) in zip(LAYOUTS, page.on_ranks(all_layouts), strict=True):
    at = ", ".join(f"{name}={size}" for name, size in sizes.items())
    what = f"E over {axis}" + (f", F over {tensor}" if tensor else "") + (", capacity" if used.capacity else "")
    held = page.check(f"{at}: {what}, {spec}", largest(off) <= LIMIT and same)
    rows.append((at, spec, what, *(f"{o:.0e}" for o in off), held))
page.table(rows, ["mesh", "x", "layout", "y", "losses", "gradients", "equal"])

# %% [markdown]
# ## The load by expert
# All ranks wait for the busiest expert, so an uneven load costs time. DeepSeek-V3 adds a bias to the scores, but only
# for the choice: after each step the bias rises where an expert had too few tokens, and falls where it had too many.
# The weights of the sum do not see the bias. `scaling.train` does the same after each step, by `--bias-rate`.

# %%
sigmoid, tokens, bias = config.with_(routing="sigmoid"), x.flatten(0, 1), torch.zeros(E).double()
before = load = moe.load_of(moe.choose_experts(tokens, params["router"], sigmoid), E)
for _ in range(300):
    bias = moe.update_bias(bias, load, rate=0.003)
    load = moe.load_of(moe.choose_experts(tokens, params["router"], sigmoid, bias), E)
mean = B * T * k // E
page.title(f"Tokens by expert, {mean} if even, and after 300 updates of the bias")
both = zip(before.tolist(), load.tolist(), bias.tolist(), strict=True)
rows = [(e, u, bar(u, mean), v, bar(v, mean), f"{up:+.2f}") for e, (u, v, up) in enumerate(both)]
page.table(rows, ["expert", "before", "", "after", "", "bias"])
busiest = [max(row[column] for row in rows) / mean for column in (1, 3)]
held = page.check("the bias evens out the load", busiest[1] <= min(1.25, busiest[0]))
page.say(f"the busiest expert has {busiest[0]:.2f} and then {busiest[1]:.2f} of the mean; evened out: {held}")

# %% [markdown]
# Other models give an expert a capacity, a factor times the mean, and drop the choices beyond it: a dropped token skips
# this expert. Every rank then has a known amount of work, at the price of tokens that are not computed. If the load is
# even, these are few.

# %%
rows = []
for factor in (1.0, 1.25, 2.0):
    most = moe.capacity_of(sigmoid.with_(capacity=factor), B * T)
    lost = [int((count - most).clamp(min=0).sum()) / (B * T * k) for count in (before, load)]
    page.check(f"capacity {factor}", most == factor * mean)
    rows.append((factor, most, *(f"{share:.1%}" for share in lost)))
page.say()
page.table(rows, ["capacity", "tokens", "dropped before", "dropped after"])

# %% [markdown]
# ## On thousands of chips
# The same function runs on an abstract mesh, for a layer of DeepSeek-V3 as it was trained: 15,360 sequences of 4,096
# tokens on 2,048 GPUs are 30,720 tokens on each. The experts are spread over 64 GPUs, and the abstract mesh gives each
# of them the same number of rows, because its arrays hold no scores to choose by.
#
# When do the AllToAlls take less time than the experts? Each row that is sent costs D numbers of communication and D F
# multiply-adds for each matrix, so experts have to be wide: F has to exceed the number below. In its formula alpha is
# a GPU's FLOPs/s over the bytes/s between nodes of 8 GPUs. The book counts two matrices an expert (W_in and W_out), and
# 12_gpu_rooflines.py derives its condition.

# %%
v3, big, length = get("deepseek-v3"), AbstractMesh({"P": 32, "X": 64}), 30_720
weights = empty(expert.specs(v3, "X"), v3.sizes, big)
tokens = torch.empty(1, length, v3.D, dtype=torch.bfloat16, device="meta")
with trace() as log:
    at = expert.expert_layout(big, v3.E, "X", spec="x[B_PX, T, D]")
    routing = expert.route_tokens(weights, tokens, v3, big, "X", spec="x[B_PX, T, D]")
    y, losses, saved = expert.forward(weights, {"y": tokens, "routing": routing}, v3, big, at)
    expert.backward(weights, y, dict.fromkeys(losses, 1.0), saved, v3, big, at)
moved = [event for event in log.collectives() if "R" in event.after.dim_names]
page.title(f"One layer of DeepSeek-V3, forward and backward, on {big.size():,} abstract chips, bf16")
page.same([
    ("V of 64 chips", "4 k B T D elements", 4 * v3.k * 64 * length * v3.D * 2, sum(e.nbytes for e in moved)),
    ("sent by each", "4 k T D 63/64", 4 * v3.k * length * v3.D * 2 * 63 // 64, sum(e.wire_bytes for e in moved)),
], ["", "closed form", "bytes", "counted"])  # fmt: skip
h100 = chip("h100")
width = gpu.expert_min_width(64, v3.k, h100)
page.answers([
    Answer("DeepSeek-V3's experts over 64 H100: F >", "", width, "",
           f"alpha (64 - 8)/k, each token sent at most once to each node; with its F = {v3.F} the AllToAlls take "
           f"{format_number(width / v3.F, 2)} times as long as the products with W_in and W_out"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `all_reduce("d[D, E] {U_X} -> d[D, E]", d, mesh)` by `d`: whose gradient is wrong now, and why not
#    that of the experts?
#    Answer: That of the router. It is on every rank, and each rank has the terms of its own tokens only. Run as a
#    script, the chapter is refused before a rank starts: the gradient is still {U_X}. In a notebook, which is not
#    judged, the row of the router says NO. An expert is on one rank, to which all of its tokens came, so its gradient
#    is whole already.
# 2. Question: from how many tokens on is DeepSeek-V3's layer compute-bound on one H100 in bf16? Evaluate
#    `h100.intensity("hbm") * v3.E / v3.k`.
#    Answer: About 9,300: each expert sees k/E = 1/32 of the tokens and needs 291 of them, the intensity of an H100.
# 3. Flag: run with `--mesh X=2`. On how many ranks do a token's two choices lie now, and what would it save to send
#    the token once to each?
#    Answer: On 1.95 of two, so it would save 2%. The two experts that most tokens choose are on different ranks here;
#    which ones are popular matters more than the number of ranks.
