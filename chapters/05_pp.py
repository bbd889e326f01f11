"""Part 5, "Pipelining": https://jax-ml.github.io/scaling-book/training

    In[L_Z, B, D][i] * W_in[L_Z, D, F][i] * W_out[L_Z, F, D][i] -> Out[L_Z, B, D][i]

Layers are split over Z and activations move from stage to stage. First the book's listing, as each rank runs it; then
its two ways out of the bubble, microbatches and the backward in halves, as schedules: drawn, simulated, and run here.
So that the measured charts show the schedule and not this machine's few cores, each stage sleeps until its computation
has taken a fixed time (--tick; 0 to run at full speed). With X and Y in the mesh, stages have FSDP and tensor
parallelism inside.

    torchrun chapters/05_pp.py
    torchrun --nproc-per-node 8 chapters/05_pp.py --mesh Z=2,X=2,Y=2
    python chapters/05_pp.py --only 1f1b,zb-h1 --plot schedules.svg --trace run.json
"""

# %%
from time import perf_counter, sleep

import torch
from torch.func import functional_call, grad_and_value, vjp

from scaling import data, optim, tree
from scaling.book.lesson import EXACT, SINGLE, Report, options, run
from scaling.collectives import all_reduce, recv, send, unshard
from scaling.models import mlp
from scaling.schedules import SCHEDULES, make
from scaling.schedules import closed_forms as bubbles
from scaling.schedules.simulator import simulate
from scaling.schedules.timeline import write_chrome
from scaling.show.timelines import save_schedule, schedule_chart, summary
from scaling.strategies import fsdp_tp, one_device, pipeline
from scaling.strategies import stage as stages

# %% The book's listing, one layer a rank: each rank keeps W[L_Z, D, D] and runs these lines


def layer_fn(x, weight):
    return x @ weight


def loss_fn(batch):
    return (batch**2).mean()


def book_step(x, weight, mesh):
    """x[B, D], weight[D, D] of this rank's layer -> (Loss[] {U_Z}, updated weight)."""
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


def book(mesh, report, seed):
    Z, B, D = mesh.sizes["Z"], 32, 128
    rng = torch.Generator().manual_seed(seed)
    x, weights = (torch.randn(s, generator=rng, dtype=torch.float64) for s in ((B, D), (Z, D, D)))
    weights /= D**0.5
    loss, weight = book_step(x, weights[mesh.coord["Z"]], mesh)
    loss = all_reduce("Loss[] {U_Z} -> Loss[]", loss, mesh)
    updated = unshard("W[L_Z, D, E]", weight[None], mesh)
    one, want = book_on_one_device(x, weights)
    report.equal([("loss", loss, one, EXACT), ("weights after the step", updated, want, EXACT)])
    idle = float(bubbles.bubble("naive", Z, 1))
    report.say(f"\nOf {2 * Z} turns, forward and back, each rank computes in 2: it is idle for {idle:.1%} of the time.")


# %% The same with microbatches and any schedule: the book's stack of blocks


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
    config = mlp.Config(L=8, D=32, F=64)
    rng = torch.Generator().manual_seed(seed)
    shapes = {"W_in": (config.L, config.D, config.F), "W_out": (config.L, config.F, config.D)}
    params = {name: torch.randn(s, generator=rng, dtype=torch.float64) / s[1] ** 0.5 for name, s in shapes.items()}
    In, Target = torch.randn((2, 64, config.D), generator=rng, dtype=torch.float64)
    params, In, Target = tree.map(lambda x: x.to(mesh.device), [params, In, Target])

    def loss(Out, Target):
        return (Out - Target).square().sum() / len(In)

    def whole(params):
        return loss(functional_call(mlp.Stack(config), params, (In,)), Target)

    return config, params, In, Target, loss, grad_and_value(whole)(params)


def schedules(mesh, report, args):
    config, whole, In, Target, loss, (want_grads, want_loss) = problem(mesh, args.seed)
    listing = fsdp_tp if "X" in mesh.sizes else one_device
    plain = stages.of_strategy(listing.STRATEGY, config.activation, config.residual, config.norm)
    specs = {name: spec for name, spec in plain.specs.items() if name in whole}
    In, Target = (tree.shard(x, plain.specs["In"], mesh) for x in (In, Target))
    rows, equal, drawn = [], [], []
    for name in args.only.split(",") if args.only else SCHEDULES:
        try:
            schedule = make(name, mesh.sizes["Z"], args.microbatches)
        except ValueError as error:
            report.say(f"\n{error}")
            continue
        params = tree.shard(pipeline.arrange(whole, schedule), specs, mesh)
        stage = paced(plain, args.tick / 1e3, schedule.chunks) if args.tick else plain
        pipeline.value_and_grad(params, In, Target, mesh, schedule, loss, plain)  # connects the ranks
        Loss, grads, measured = pipeline.measure(params, In, Target, mesh, schedule, loss, stage)
        simulated = simulate(schedule)
        report.say(f"\n{summary(simulated)}\n{schedule_chart(simulated)}")
        report.say(f"{summary(measured, 's')}\n{schedule_chart(measured, width=110)}")
        formula = bubbles.bubble(name, schedule.stages, schedule.microbatches, schedule.chunks)
        memory = max(bubbles.live_activations(name, schedule.stages, schedule.microbatches, schedule.chunks))
        same = formula == simulated.bubble and memory == max(simulated.live) == max(measured.live)
        verdict = report.judge(f"{name}: bubble and memory", same)
        bubble = [f"{float(each):.1%}" for each in (formula, simulated.bubble, measured.bubble)]
        live = [f"{float(each):g}" for each in (memory, max(simulated.live), max(measured.live))]
        rows.append((name, *bubble, *live, verdict))
        grads = pipeline.restore(tree.unshard(grads, specs, mesh), schedule)
        equal += [(f"{name}: loss", Loss, want_loss, EXACT), (f"{name}: gradients", grads, want_grads, EXACT)]
        drawn += [simulated, measured]
    report.title(
        "Bubble: closed form, simulated, measured. Memory: microbatches whose activations the fullest rank keeps"
    )
    headers = ["schedule", "bubble", "simulated", "measured", "memory", "simulated", "measured", "verdict"]
    report.table(rows, headers)
    report.say(
        "(verdict: of closed form and simulation, and of all three memories; forward, dIn and dW one tick each)\n"
    )
    report.equal(equal)
    if args.plot and mesh.rank == 0:
        save_schedule(args.plot, *drawn)
    if args.trace and mesh.rank == 0:
        write_chrome(args.trace, *drawn[1::2])


# %% Training: a byte model whose blocks are pipelined by 1F1B, its embedding and head on every rank


def training(mesh, report, args):
    config = mlp.Config(L=2 * mesh.sizes["Z"])
    text, adamw = data.load_text(args.text, max_bytes=1_000_000).to(mesh.device), optim.adamw(3e-3, betas=(0.9, 0.99))
    own = mlp.init(config, args.seed, device=mesh.device)
    specs = {"W_in": pipeline.SPECS["W_in"], "W_out": pipeline.SPECS["W_out"]}
    params = own | {"blocks": tree.shard(own["blocks"], specs, mesh)}
    state, own_state, curve = adamw.init(params), adamw.init(own), []
    schedule = make("1f1b", mesh.sizes["Z"], args.microbatches)
    stage = stages.mlp(config.activation, config.residual, config.norm)
    rows = args.batch // args.microbatches * args.microbatches
    batches = data.endless(text, config.K, rows, seed=args.seed)
    for step, (tokens, targets) in zip(range(args.steps), batches, strict=False):

        def terms(head, Out, targets):  # the loss is the sum over microbatches, the mean over rows
            return mlp.cross_entropy(mlp.head(Out, head, config.norm), targets, rows)

        In, embed_vjp = vjp(lambda E, tokens=tokens: mlp.embed(E, tokens), params["embed"])
        args_of_run = params["blocks"], params["head"], In, targets, mesh, schedule, terms, stage
        loss, grads = pipeline.with_ends(*args_of_run)
        dIn = all_reduce("dIn[B, D] {U_Z} -> dIn[B, D]", grads.dIn, mesh)
        head = all_reduce("dW_head[D, V] {U_Z} -> dW_head[D, V]", grads.head, mesh)
        grads = {"embed": embed_vjp(dIn)[0], "blocks": grads.params, "head": head}
        own_grads, own_loss = grad_and_value(mlp.loss_fn)(own, tokens, targets, config)
        if step == 0:
            whole = grads | {"blocks": tree.unshard(grads["blocks"], specs, mesh)}
            report.equal([("loss, float32", loss, own_loss, SINGLE), ("gradients, float32", whole, own_grads, SINGLE)])
        params, state = adamw.update(grads, state, params)
        own, own_state = adamw.update(own_grads, own_state, own)
        curve.append((step + 1, *(f"{mlp.bits_per_byte(each).item():.5f}" for each in (loss, own_loss))))
    report.say()
    shown = curve[:: max(1, args.steps // 8)]
    report.table(
        shown if curve[-1] in shown else [*shown, curve[-1]], ["step", f"bits per byte on {mesh}", "one device"]
    )


# %% Run


def main(mesh, args):
    report = Report(mesh)
    report.say(f"{__doc__.split(chr(10))[0]}\n\n{__doc__.split(chr(10))[2].strip()}")
    if "X" not in mesh.sizes:
        report.title(f"The book's listing on {mesh}: B=32, D=128, one matmul a layer, in float64")
        book(mesh, report, args.seed)
    inside = ", stages with FSDP and tensor parallelism inside" if "X" in mesh.sizes else ""
    report.title(f"Schedules on {mesh}, {args.microbatches} microbatches{inside}: simulated, then measured")
    schedules(mesh, report, args)
    if "X" not in mesh.sizes and args.steps:
        report.title(f"Training a byte model of {2 * mesh.sizes['Z']} layers by 1F1B, in float32")
        training(mesh, report, args)
    return report.done()


if __name__ == "__main__":
    own = {"microbatches": (8, "microbatches of a batch"), "tick": (20.0, "milliseconds of a computation")}
    own |= {"only": ("", "schedules, by commas; all if empty"), "plot": ("", "write the charts to this .svg or .png")}
    run(main, options(__doc__, mesh="Z=4", **own, trace=("", "write the measured runs as a Chrome trace")))
