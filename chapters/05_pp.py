# %% [markdown]
"""Part 5, "Pipelining": the book's listing on ranks, and schedules that fill its bubble: drawn, simulated and run.
https://jax-ml.github.io/scaling-book/training

    In[L_Z, B, D][i] * W_in[L_Z, D, F][i] * W_out[L_Z, F, D][i] -> Out[L_Z, B, D][i]

Layers are split over Z and activations move from stage to stage. First the book's listing, as each rank runs it; then
its two ways out of the bubble, microbatches and the backward in halves, as schedules: drawn, simulated, and run here.
With X and Y in the mesh (`--mesh Z=2,X=2,Y=2`), stages have FSDP and tensor parallelism inside.
"""

# %%
from argparse import Namespace
from fractions import Fraction
from time import perf_counter, sleep

import torch
from torch.func import functional_call, grad_and_value, vjp

from scaling import data, optim, tree
from scaling.book import learning
from scaling.book.listing import EXACT, SINGLE, difference
from scaling.book.page import Page
from scaling.collectives import all_reduce, recv, send, unshard
from scaling.console import integer, number, output, picture
from scaling.models import mlp
from scaling.schedules import SCHEDULES, make
from scaling.schedules import closed_forms as bubbles
from scaling.schedules.simulator import simulate
from scaling.schedules.timeline import write_chrome
from scaling.show.timelines import save_schedule, schedule_chart, summary
from scaling.strategies import fsdp_tp, one_device, pipeline
from scaling.strategies import stage as stages

ROWS, WIDTH = 32, 128  # batch_size and d_model of the book's listing
SIZES = {"B": 8, "D": 32, "F": 64}  # B rows a microbatch; they must divide over --mesh
FITS = (fsdp_tp.SPECS["In"], fsdp_tp.SPECS["W_in"]), SIZES
page = Page(
    __doc__, mesh="Z=4", axes="XY", fits=FITS, device=True, seed=True, **learning.OPTIONS,
    microbatches=(8, "microbatches of a batch", integer(1, 128)),
    tick=(20.0, "milliseconds of a computation; 0: as fast as it goes", number(0, 1000)),
    only=("", "schedules, by commas; all if empty"), draw=(None, "write the charts to this .svg or .png", picture),
    trace=(None, "write the measured runs as a Chrome trace", output),
)  # fmt: skip
Z, M = page.args.mesh["Z"], page.args.microbatches
if page.args.batch < M:
    page.refuse(f"--batch {page.args.batch}: fewer rows than {M} microbatches; fix: --batch {32 * M}")
names = []
for name in page.args.only.split(",") if page.args.only else ("1f1b", "zb-h1") if page.small else SCHEDULES:
    try:
        names.append(make(name, Z, M) and name)
    except ValueError as error:
        why = str(error).replace("\n  fix:", "; fix:")
        page.refuse(f"--only {page.args.only}: {why}") if page.args.only else page.say(why)
INSIDE = not {"X", "Y"}.isdisjoint(page.args.mesh)
page.args.mesh |= dict.fromkeys("XY" if INSIDE else (), 1) | page.args.mesh
TICK = min(page.args.tick, 4.0) if page.small else page.args.tick

# %% [markdown]
# ## The book's listing
# One layer a rank: each keeps W[L_Z, D, D] and runs these lines. The activations go down, their cotangents come back
# up, and at any moment one rank of Z computes.


# %%
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


def book_on_one_device(x, weights):
    def loss(weights):
        Out = x
        for weight in weights:
            Out = layer_fn(Out, weight)
        return loss_fn(Out)

    grads, value = grad_and_value(loss)(weights)
    return value, weights - 0.01 * grads


def book(mesh, seed):
    """Rows (what, difference from one device, limit)."""
    rng = torch.Generator().manual_seed(seed)
    x, weights = (torch.randn(s, generator=rng, dtype=torch.float64) for s in ((ROWS, WIDTH), (Z, WIDTH, WIDTH)))
    x, weights = x.to(mesh.device), (weights / WIDTH**0.5).to(mesh.device)
    loss, weight = book_step(x, weights[mesh.coord["Z"]], mesh)
    loss = all_reduce("Loss[] {U_Z} -> Loss[]", loss, mesh)
    layer = weight[None]  # layer[L_Z, D, E]
    updated = unshard("W[L_Z, D, E]", layer, mesh)  # updated[L, D, E]
    one, want = book_on_one_device(x, weights)
    pairs = (("loss", loss, one), ("weights after the step", updated, want))
    return [(what, difference(got, wanted, mesh), EXACT) for what, got, wanted in pairs]


if not INSIDE:
    page.title(f"The book's listing: B={ROWS}, D={WIDTH}, one matmul a layer, in float64")
    page.equal(page.on_ranks(book, page.args.seed))
    idle = bubbles.bubble("naive", Z, 1)
    page.check("the listing's bubble", idle == simulate(make("naive", Z, 1)).bubble == 1 - Fraction(2, 2 * Z))
    page.say(
        f"\nOf {2 * Z} turns, forward and back, each rank computes in 2: it is idle for {float(idle):.1%} of the time."
    )
    page.say("\nAs printed, the book's listing does not run: weights[i] = ... is refused for an array of JAX, where "
             "weights.at[i].set(...) gives a new one; and f_vjp gives a vjp, not the jvp of its comment.")  # fmt: skip

# %% [markdown]
# ## Microbatches, and any schedule
# The book's stack of blocks, cut into stages. So that the measured charts show the schedule and not this machine's few
# cores, each stage sleeps until its computation has taken a fixed time, `--tick`. F3 is the forward of microbatch 3, B
# a backward, I and W its two halves; look for the idle dots, and how each schedule fills them.


# %%
def paced(stage, seconds: float, chunks: int):
    """A stage whose computations take at least `seconds` each for all of a rank's layers: as if on its own device."""

    def pace(f):
        def slow(weights, batch, *args):
            count = len(batch) if f is stage.backward_weight else 1  # weight halves of several microbatches at once
            end = perf_counter() + count * seconds / chunks
            result = f(weights, batch, *args)
            sleep(max(0.0, end - perf_counter()))
            return result

        return slow

    return stage._replace(**{part: pace(getattr(stage, part)) for part in stage._fields[1:4]})


def problem(mesh, seed):
    config = mlp.MLPConfig(L=2 * Z, D=SIZES["D"], F=SIZES["F"])
    rng = torch.Generator().manual_seed(seed)
    shapes = {"W_in": (config.L, config.D, config.F), "W_out": (config.L, config.F, config.D)}
    params = {name: torch.randn(s, generator=rng, dtype=torch.float64) / s[1] ** 0.5 for name, s in shapes.items()}
    In, Target = torch.randn((2, SIZES["B"] * M, config.D), generator=rng, dtype=torch.float64)
    params, In, Target = tree.map(lambda x: x.to(mesh.device), [params, In, Target])

    def loss(Out, Target):
        return (Out - Target).square().sum() / len(In)

    def whole(params):
        return loss(functional_call(mlp.MLPStack(config), params, (In,)), Target)

    return config, params, In, Target, loss, grad_and_value(whole)(params)


def schedules(mesh, names, seed):
    """{schedule: (its measured timeline, rows of differences from one device)}."""
    config, whole, In, Target, loss, (want_grads, want_loss) = problem(mesh, seed)
    listing = fsdp_tp if INSIDE else one_device
    plain = stages.of_strategy(listing.STRATEGY, config.activation, config.residual, config.norm)
    specs = {name: spec for name, spec in plain.specs.items() if name in whole}
    In, Target = (tree.shard(x, plain.specs["In"], mesh) for x in (In, Target))
    found = {}
    for name in names:
        schedule = make(name, Z, M)
        params = tree.shard(pipeline.arrange(whole, schedule), specs, mesh)
        stage = paced(plain, TICK / 1e3, schedule.chunks) if TICK else plain
        pipeline.value_and_grad(params, In, Target, mesh, schedule, loss, plain)  # connects the ranks
        Loss, grads, measured = pipeline.measure(params, In, Target, mesh, schedule, loss, stage)
        grads = pipeline.restore(tree.unshard(grads, specs, mesh), schedule)
        off = (("loss", Loss, want_loss), ("gradients", grads, want_grads))
        found[name] = measured, [(f"{name}: {what}", difference(a, b, mesh), EXACT) for what, a, b in off]
    return found


seconds = 3 * (M + Z) * TICK / 1e3 * len(names)
if seconds > 20:
    page.say(f"\n{len(names)} schedules, of {M} microbatches and {TICK:g} ms a computation: about {seconds:.0f} s.")
runs = page.on_ranks(schedules, names, page.args.seed)

page.title(
    f"Schedules, {M} microbatches{', FSDP and tensor parallelism inside' if INSIDE else ''}: simulated, measured"
)
rows, drawn = [], []
for name, (measured, _) in runs.items():
    schedule = make(name, Z, M)
    simulated = simulate(schedule)
    for timeline, unit in ((simulated, ""), (measured, "s")):
        page.say(f"{summary(timeline, unit)}\n{schedule_chart(timeline, width=page.columns - 10)}")
    formula = bubbles.bubble(name, Z, M, schedule.chunks)
    memory = max(bubbles.live_activations(name, Z, M, schedule.chunks))
    same = formula == simulated.bubble and memory == max(simulated.live) == max(measured.live)
    bubble = [f"{float(each):.1%}" for each in (formula, simulated.bubble, measured.bubble)]
    live = [f"{float(each):g}" for each in (memory, max(simulated.live), max(measured.live))]
    rows.append((name, *bubble, *live, page.check(f"{name}: bubble and memory", same)))
    drawn += [simulated, measured]
page.title("Bubble and memory: closed form, simulated, measured")
headers = ["schedule", "bubble", "simu-\nlated", "mea-\nsured", "memory", "simu-\nlated", "mea-\nsured", "the same"]
page.table(rows, headers)
page.say("\nMemory is the number of microbatches whose activations the fullest rank keeps. The same: closed form and "
         "simulation, and all three memories. Forward, dIn and dW take one tick each.\n")  # fmt: skip
page.equal([row for _, off in runs.values() for row in off])
if page.first and page.args.draw:
    save_schedule(page.args.draw, *drawn)
if page.first and page.args.trace:
    write_chrome(page.args.trace, *drawn[1::2])

# %% [markdown]
# ## Training, by 1F1B
# A byte model whose blocks are pipelined, its embedding and head on every rank, beside one device.


# %%
def ends_reduced(dIn, dW_head, mesh):
    """dIn[B, D] {U_Z}, dW_head[D, V] {U_Z} -> dIn[B, D], dW_head[D, V]: of the first stage, and of the last."""
    dIn = all_reduce("dIn[B, D] {U_Z} -> dIn[B, D]", dIn, mesh)
    return dIn, all_reduce("dW_head[D, V] {U_Z} -> dW_head[D, V]", dW_head, mesh)


def training(mesh, args) -> tuple[dict, list[float], list]:
    """(the first step's gradients, whole; the loss of each step; how far they differ between ranks)."""
    config = mlp.MLPConfig(L=2 * Z)
    text, first, losses = learning.load_given_text(args, mesh.device), None, []
    own = mlp.init(config, args.seed, device=mesh.device)
    specs = {"W_in": pipeline.SPECS["W_in"], "W_out": pipeline.SPECS["W_out"]}
    params = own | {"blocks": tree.shard(own["blocks"], specs, mesh)}
    state = ADAMW.init(params)
    schedule, stage = make("1f1b", Z, M), stages.mlp(config.activation, config.residual, config.norm)
    batches = data.endless(text, config.K, args.batch, seed=args.seed)
    for _, (tokens, targets) in zip(range(args.steps), batches, strict=False):

        def terms(head, Out, targets):  # the loss is the sum over microbatches, the mean over rows
            return mlp.cross_entropy(mlp.head(Out, head, config.norm), targets, args.batch)

        In, embed_vjp = vjp(lambda E, tokens=tokens: mlp.embed(E, tokens), params["embed"])
        run = params["blocks"], params["head"], In, targets, mesh, schedule, terms, stage
        loss, grads = pipeline.with_ends(*run)
        dIn, dW_head = ends_reduced(grads.dIn, grads.head, mesh)
        grads = {"embed": embed_vjp(dIn)[0], "blocks": grads.params, "head": dW_head}
        first = first or grads | {"blocks": tree.unshard(grads["blocks"], specs, mesh)}
        params, state = ADAMW.update(grads, state, params)
        losses.append(loss.item())
    first = tree.map(torch.Tensor.cpu, first)
    return first, losses, learning.ranks_alike(losses, first, mesh)


ADAMW, args = optim.adamw(3e-3, betas=(0.9, 0.99)), Namespace(**vars(page.args))
args.steps, args.batch = min(args.steps, 3) if page.small else args.steps, args.batch // M * M
if not INSIDE:
    page.title(f"Training a byte model of {2 * Z} layers by 1F1B, in float32")
    first, losses, alike = page.on_ranks(training, args)
    if page.first:
        text = learning.load_given_text(args, torch.device(args.device))
        one = learning.one_device(mlp.MLPConfig(L=2 * Z), text, ADAMW, args, text.device)
        pairs = (("loss", losses[0], one.losses[0]), ("gradients", first, one.first))
        page.equal([*((f"first {what}, float32", difference(got, want), SINGLE) for what, got, want in pairs), *alike])
        page.say()
        shown = range(0, args.steps, max(1, args.steps // 8))
        ours, theirs = (mlp.bits_per_byte(torch.tensor(each)).tolist() for each in (losses, one.losses))
        page.table([(i + 1, f"{ours[i]:.5f}", f"{theirs[i]:.5f}") for i in shown],
                   ["step", "bits per byte on ranks", "on one device"])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `weight = weight - 0.01 * dw` by `weight = weight - 0.01 * mesh.sizes["Z"] * dw`: a gradient that
#    counts every stage.
# 2. Question: how many microbatches bring 1F1B's bubble on 16 stages down to 5%? Evaluate
#    `next(m for m in range(1, 999) if bubbles.bubble("1f1b", 16, m) <= 1 / 20)`.
# 3. Flag: run with `--only zb-h1 --mesh Z=2`: of the zero-bubble schedule's halves, on two stages.
