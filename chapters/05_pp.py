# %% [markdown]
"""Part 5, "Pipelining": the book's listing on ranks, and schedules that fill its bubble: drawn, simulated and run.
https://jax-ml.github.io/scaling-book/training

    In[L_Z, B, D][i] * W_in[L_Z, D, F][i] * W_out[L_Z, F, D][i] -> Out[L_Z, B, D][i]

Layers are split over Z, and activations move from stage to stage. First one batch runs by the book's listing and shows
the bubble; then come two ways to shrink it, drawn and run; and last the training. With X and Y (`--mesh Z=2,X=2,Y=2`)
the stages use FSDP and tensor parallelism inside.
"""

# %% [markdown]
# ## Why split by layers?
# Only activations pass from one layer to the next, once for each boundary between two ranks. So a pipeline needs the
# least bandwidth of all strategies, works over slow networks, and leaves each rank with only its layers' weights. Z is
# the axis of the pipeline and its number of ranks, or stages. In the line above a dim L counts the layers, of which
# each stage has L/Z, and [i] picks the layer that runs; the book calls that an abuse of notation, because the layers
# run one after the other and not at once.
#
# The price is waiting. A batch that is not split is at one stage at a time, and all other stages wait. If it is split
# into microbatches, stages still wait while the pipeline fills and empties; this idle time is the bubble. A schedule of
# forwards and backwards has to be chosen, and it is harder to write and to debug than any collective. Pipelines also do
# not suit ZeRO-3. Either each of M microbatches gathers the weights of its stage again, and M times as many bytes are
# sent; or the gathered weights stay, and their memory is not saved. Large runs on GPUs therefore combine pipelines with
# ZeRO-1 and tensor parallelism. On a TPU's torus FSDP's gathers are cheap, so the book treats pipelines only briefly.

# %%
from functools import partial, reduce
from time import perf_counter, sleep

import torch
from torch.func import functional_call, grad_and_value, vjp

from scaling import data, tree
from scaling.book import learning
from scaling.book.listing import EXACT, difference
from scaling.book.page import Page
from scaling.collectives import all_reduce, recv, send, unshard
from scaling.common.console import integer, number, picture
from scaling.models import mlp
from scaling.schedules import SCHEDULES, closed_forms, make
from scaling.schedules.simulator import simulate
from scaling.show.timelines import draw_on, save_schedule
from scaling.strategies import fsdp_tp, pipeline, stage

SIZES = {"B": 8, "D": 32, "F": 64}  # for the schedules: B rows per microbatch; all must divide over --mesh
page = Page(
    __doc__, mesh="Z=4,X=1,Y=1", fits=((fsdp_tp.SPECS["In"], fsdp_tp.SPECS["W_in"]), SIZES), device=True, seed=True,
    **learning.OPTIONS, microbatches=(8, "microbatches of a batch", integer(1, 128)),
    tick=(20.0, "milliseconds of a computation; 0: as fast as it goes", number(0, 1000)),
    only=("", "schedules to run, by commas"),
    draw=(None, "write the charts to this .svg", partial(picture, ends=(".svg",))),
)  # fmt: skip
Z, M, TICK = page.args.mesh["Z"], page.args.microbatches, min(page.args.tick, 4.0 if page.small else 1000.0)
if page.args.batch < M:
    page.refuse(f"--batch {page.args.batch}: fewer rows than {M} microbatches; fix: --batch {32 * M}")
try:
    asked = [make(name, Z, M) and name for name in page.args.only.split(",") if name]
except ValueError as error:
    page.refuse(f"--only {page.args.only}: {error}".replace("\n  fix:", "; fix:"))

# %% [markdown]
# ## One batch goes through the stages
# This is the book's listing, as a rank of Z runs it with one layer. The activations x come from the rank before and go
# to the next rank. At the last rank the loss is computed, and the cotangents dx come back. Each rank keeps
# `intermediate`, the activations that its layer needs for the backward, and computes the gradient of its own weights,
# which never move.

# %%
ROWS, WIDTH = 32, 128  # batch_size and d_model


def layer_fn(x, weight):
    return x @ weight


def loss_fn(batch):
    return (batch**2).mean()


def book_step(x, weight, mesh):
    """x[B, D], weight[D, E] -> Loss[] {U_Z}, weight[D, E]: the loss, and the updated weight of this rank's layer."""
    z, last = mesh.coord["Z"], mesh.sizes["Z"] - 1
    if z > 0:
        x = recv("x[B, D]", x, mesh, "Z", z - 1)
    intermediate = x
    x = layer_fn(x, weight)
    if z < last:
        send("x[B, D]", x, mesh, "Z", z + 1)
        loss, dx = torch.zeros((), dtype=x.dtype), recv("dx[B, D]", x, mesh, "Z", z + 1)
    else:
        dx, loss = grad_and_value(loss_fn)(x)
    _, f_vjp = vjp(layer_fn, intermediate, weight)
    dx, dw = f_vjp(dx)
    weight = weight - 0.01 * dw
    if z > 0:
        send("dx[B, D]", dx, mesh, "Z", z - 1)
    return loss, weight


# %% [markdown]
# The loss, and all weights after a step, are compared with one device's.


# %%
def book(mesh, seed):
    """Return rows (name, difference from one device, limit)."""
    rng = torch.Generator().manual_seed(seed)
    shapes = (ROWS, WIDTH), (Z, WIDTH, WIDTH)
    x, weights = (torch.randn(s, generator=rng, dtype=torch.float64).to(mesh.device) / WIDTH**0.5 for s in shapes)
    loss, weight = book_step(x, weights[mesh.coord["Z"]], mesh)
    loss = all_reduce("Loss[] {U_Z} -> Loss[]", loss, mesh)
    layer = weight[None]  # layer[L_Z, D, E]
    updated = unshard("W[L_Z, D, E]", layer, mesh)  # updated[L, D, E]
    grads, one = grad_and_value(lambda weights: loss_fn(reduce(layer_fn, weights, x)))(weights)
    off = difference(loss, one, mesh), difference(updated, weights - 0.01 * grads, mesh)
    return [("loss", off[0], EXACT), ("weights after the step", off[1], EXACT)]


page.title(f"The book's listing: B={ROWS}, D={WIDTH}, one matmul a layer, in float64")
page.equal(page.on_ranks(book, page.args.seed))
page.say("\nAs printed, the book's listing does not run: weights[i] = ... is refused for an array of JAX, where "
         "weights.at[i].set(...) gives a new one; and f_vjp gives a vjp, not the jvp of its comment.")  # fmt: skip

# %% [markdown]
# ## The bubble
# In the charts time runs to the right, with one line per rank. F0 is the forward of microbatch 0 (here the whole
# batch), which takes one tick, and B0 its backward, which takes two, because it has twice the products. In a gap (dots
# in a terminal) a rank waits. The line above a chart sums it up. The makespan is the number of ticks, and the bubble is
# the share of them in which a rank waits. The live activations are the largest number of microbatches for which each
# rank stores activations at once; a part of a rank's layers counts as that part of a microbatch. Rank 0 computes first
# and last, and waits for all others in between.

# %%
alone, idle = simulate(make("naive", Z, 1)), closed_forms.bubble("naive", Z, 1)
page.title("One batch")
draw_on(page, alone)
page.check("the listing's bubble", idle == alone.bubble and Z * (1 - idle) == 1)
page.say(f"\nOf {2 * Z} turns, forward and back, a rank computes in 2: it is idle for {float(idle):.1%} of the time.")

# %% [markdown]
# ## The first way out: microbatches
# If each of M microbatches starts when the one before is back, nothing is gained (naive). GPipe sends all microbatches
# forward and then all backward. 1F1B takes a backward as soon as there is one. In both, a rank computes for M turns,
# each a forward and a backward, and waits for Z - 1 turns while the pipeline fills and empties. So the bubble is
# (Z - 1)/(M + Z - 1).
#
# In the interleaved schedule a rank has v = 2 chunks of layers that are not adjacent, of which the charts write the
# second in small letters. So each microbatch passes twice, in computations half as long. The waits are half as long,
# too, and the bubble is (Z - 1)/(vM + Z - 1), at the price of sending activations twice as often. A computation that is
# drawn too narrow for its number has none.

# %% tags=["hide-input"]
drawn = {}


def draw(*names: str) -> None:
    """Simulate schedules of M microbatches and print their charts, or why Z and M do not allow them."""
    for name in names:
        try:
            drawn[name] = simulate(make(name, Z, M))
            draw_on(page, drawn[name])
        except ValueError as error:
            page.say(str(error).replace("\n  fix:", "; fix:"))


page.title(f"{M} microbatches")
draw("naive", "gpipe", "1f1b", "interleaved")

# %% [markdown]
# GPipe and 1F1B differ in memory. With more microbatches the bubble of both gets smaller. GPipe then keeps the
# activations of all microbatches, and 1F1B those of at most Z. But a batch cannot be split ever further: each
# microbatch must have so many rows that its products take longer than reading the weights (01_roofline.py).

# %%
page.title("The bubble of both, and the microbatches whose activations rank 0 keeps")
rows = [(m, f"{float(closed_forms.bubble('1f1b', Z, m)):.1%}",
         *(float(closed_forms.live_activations(name, Z, m)[0]) for name in ("gpipe", "1f1b")))
        for m in (1, 2, 4, 8, 16, 32, 64)]  # fmt: skip
page.table(rows, ["microbatches", "bubble", "kept by GPipe", "kept by 1F1B"])

# %% [markdown]
# ## The second way out: the backward in halves
# The rank before waits for dx only, and no rank waits for dW. So the backward can be split in two: I, which computes
# dL/dx, comes first, and W, which computes dL/dW, fills the gaps. ZB-H1 (zero bubble) does that, and no rank keeps more
# activations than rank 0 does in 1F1B. DualPipeV is a later form of DeepSeek-V3's schedule, which the book's figure
# shows: each rank has an early and a late chunk of layers, so rank 0 has the first and the last ones. Compare the
# makespans with 1F1B's. In ZB-H1 the ranks still wait for the first microbatch to reach them. In DualPipeV the later
# ranks begin earlier, and wait in the middle instead. The price of splitting the backward is memory: the cotangents are
# kept until W has run.

# %%
page.title("The backward in halves")
draw("zb-h1", "dualpipev")

# %% [markdown]
# ## The same schedules on ranks
# Now the schedules run: the book's stack of blocks is split into stages. The charts should show the schedule and not
# this machine's few cores, so each stage sleeps until its computation has taken a fixed time, `--tick`.


# %%
def paced(stage, seconds: float, chunks: int):
    """Return a stage that takes at least `seconds` for each computation of all of a rank's layers."""

    def slow(f, weights, batch, *args):
        count = len(batch) if f is stage.backward_weight else 1  # the weight halves of several microbatches run at once
        end = perf_counter() + count * seconds / chunks
        result = f(weights, batch, *args)
        sleep(max(0.0, end - perf_counter()))
        return result

    return stage._replace(**{part: partial(slow, getattr(stage, part)) for part in stage._fields[1:4]})


# %% [markdown]
# A rank takes its layers in the order in which the schedule deals them out (`arrange`), and runs its part of the
# schedule (`measure`), in seconds. Compare each chart with the simulated one. A gap that the simulated chart lacks is a
# wait for communication, or for a busy core of this machine.


# %%
def schedules(mesh, names, seed):
    """Return {schedule: (its measured timeline, rows of differences from one device)}."""
    config = mlp.MLPConfig(L=2 * Z, D=SIZES["D"], F=SIZES["F"])
    whole = mlp.init(config, seed, torch.float64, device=mesh.device)["blocks"]
    rng = torch.Generator().manual_seed(seed)
    In, Target = torch.randn((2, SIZES["B"] * M, config.D), generator=rng, dtype=torch.float64).to(mesh.device)

    def loss(Out, Target):
        return (Out - Target).square().sum() / (SIZES["B"] * M)

    one_device = grad_and_value(lambda params: loss(functional_call(mlp.MLPStack(config), params, (In,)), Target))
    want_grads, want_loss = one_device(whole)
    plain = stage.of_strategy(fsdp_tp.STRATEGY, config.activation, config.residual, config.norm)
    specs = {name: plain.specs[name] for name in whole}
    In, Target = (tree.shard(x, plain.specs["In"], mesh) for x in (In, Target))
    found = {}
    for name in names:
        schedule = make(name, Z, M)
        params = tree.shard(pipeline.arrange(whole, schedule), specs, mesh)
        slowed = paced(plain, TICK / 1e3, schedule.chunks) if TICK else plain
        pipeline.value_and_grad(params, In, Target, mesh, schedule, loss, plain)  # connects the ranks
        Loss, grads, measured = pipeline.measure(params, In, Target, mesh, schedule, loss, slowed)
        grads = pipeline.restore(tree.unshard(grads, specs, mesh), schedule)
        off = difference(Loss, want_loss, mesh), difference(grads, want_grads, mesh)
        found[name] = measured, [(f"{name}: loss", off[0], EXACT), (f"{name}: gradients", off[1], EXACT)]
    return found


names = asked or [name for name in (("1f1b", "zb-h1") if page.small else SCHEDULES) if name in drawn]
runs = page.on_ranks(schedules, names, page.args.seed)
page.title(f"Schedules of {M} microbatches, measured")
for measured, _ in runs.values():
    draw_on(page, measured, "s")

# %% [markdown]
# The table has the bubble and the memory of each schedule: by the published formula, simulated, and measured. Formula
# and simulation agree to the last digit. Memory, in microbatches on the fullest rank, is equal in all three. The
# measured bubble is larger, by the time that sending takes here, and by the waits of ranks that share this machine's
# cores. F, I and W take one tick each, and B two.

# %%
rows = []
for name, (measured, _) in runs.items():
    simulated, chunks = drawn[name], make(name, Z, M).chunks
    formula, memory = closed_forms.bubble(name, Z, M, chunks), max(closed_forms.live_activations(name, Z, M, chunks))
    same = formula == simulated.bubble and memory == max(simulated.live) == max(measured.live)
    bubble = [f"{float(each):.1%}" for each in (formula, simulated.bubble, measured.bubble)]
    live = [f"{float(each):g}" for each in (memory, max(simulated.live), max(measured.live))]
    rows.append((name, *bubble, *live, page.check(f"{name}: bubble and memory", same)))
page.title("Bubble and memory: closed form, simulated, measured")
page.table(rows, ["schedule", "bubble", "simu-\nlated", "mea-\nsured", "memory", "simu-\nlated", "mea-\nsured", "same"])
page.say()
page.equal([row for _, off in runs.values() for row in off])
if page.first and page.args.draw:
    save_schedule(page.args.draw, *(each for name in runs for each in (drawn[name], runs[name][0])))

# %% [markdown]
# ## Training, by 1F1B
# A byte model is trained whose blocks are pipelined. Embedding and head are on every rank. Their gradients are computed
# on the first and on the last rank, and an AllReduce gives them to all. The losses are one device's.

# %%
ADAMW, ARGS = learning.ADAMW, page.args
ARGS.steps, ARGS.batch = min(ARGS.steps, 3) if page.small else ARGS.steps, ARGS.batch // M * M


def ends_reduced(dIn, dW_head, mesh):
    """dIn[B, D] {U_Z}, dW_head[D, V] {U_Z} -> dIn[B, D], dW_head[D, V]: from the first stage, and from the last."""
    dIn = all_reduce("dIn[B, D] {U_Z} -> dIn[B, D]", dIn, mesh)
    return dIn, all_reduce("dW_head[D, V] {U_Z} -> dW_head[D, V]", dW_head, mesh)


def training(mesh, args) -> tuple[dict, list[float], list]:
    """Return (the first step's gradients, whole; the loss of each step; their differences between ranks)."""
    config = mlp.MLPConfig(L=2 * Z)
    text, first, losses = data.split(learning.load_given_text(args, mesh.device))[0], None, []
    own = mlp.init(config, args.seed, device=mesh.device)
    specs = {"W_in": pipeline.SPECS["W_in"], "W_out": pipeline.SPECS["W_out"]}
    params = own | {"blocks": tree.shard(own["blocks"], specs, mesh)}
    state, schedule = ADAMW.init(params), make("1f1b", Z, M)
    blocks = stage.mlp(config.activation, config.residual, config.norm)
    batches = data.endless(text, config.K, args.batch, seed=args.seed)

    def terms(head, Out, targets):  # the loss is the sum over microbatches, the mean over rows
        return mlp.cross_entropy(mlp.head(Out, head, config.norm), targets, args.batch)

    for _, (tokens, targets) in zip(range(args.steps), batches, strict=False):
        In, embed_vjp = vjp(lambda E, tokens=tokens: mlp.embed(E, tokens), params["embed"])
        loss, grads = pipeline.with_ends(params["blocks"], params["head"], In, targets, mesh, schedule, terms, blocks)
        dIn, dW_head = ends_reduced(grads.dIn, grads.head, mesh)
        grads = {"embed": embed_vjp(dIn)[0], "blocks": grads.params, "head": dW_head}
        first = first or grads | {"blocks": tree.unshard(grads["blocks"], specs, mesh)}
        params, state = ADAMW.update(grads, state, params)
        losses.append(loss.item())
    return tree.map(torch.Tensor.cpu, first), losses, learning.ranks_alike(losses, first, mesh)


page.title(f"Training a byte model of {2 * Z} layers by 1F1B, in float32")
first, losses, alike = page.on_ranks(training, ARGS)
learning.beside_one_device(page, losses, first, alike, mlp.MLPConfig(L=2 * Z), ARGS)
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `weight = weight - 0.01 * dw` by `weight = weight - 0.01 * mesh.sizes["Z"] * dw`: a gradient that
#    counts every stage. Which row says NO?
#    Answer: That of the weights after the step. The loss is still right, because it was computed before; it would be
#    wrong only in the next step.
# 2. Question: how many microbatches bring 1F1B's bubble on 16 stages down to 5%? Evaluate `next(m for m in range(1,
#    999) if closed_forms.bubble("1f1b", 16, m) <= 1 / 20)`.
#    Answer: 285: (Z - 1)/(M + Z - 1) = 15/300.
# 3. Flag: run with `--only zb-h1 --mesh Z=2`. How much of a bubble has the zero-bubble schedule on two stages?
#    Answer: 4%, (Z - 1)/(3M + Z - 1): rank 1 waits for the first microbatch to arrive, and rank 0 for the first one to
#    come back.
