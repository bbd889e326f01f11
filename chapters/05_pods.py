"""Part 5, "Scaling Across Pods": https://jax-ml.github.io/scaling-book/training

    In[B_PX, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_PX, D_Y]

P is a slow outer axis, the datacenter's network between pods; inside a pod weights are split over X and Y. Gradients
are reduce-scattered over X before they cross, so that every chip sends its own shard over its own share of the network.
The order is the whole trick: run `grads_of_layer` and swap its two reductions to see what it saves.

    torchrun chapters/05_pods.py
    torchrun --nproc-per-node 8 chapters/05_pods.py --mesh P=2,X=2,Y=2
"""

# %%
from time import perf_counter

import torch

from scaling import cost, data, optim
from scaling.book.answers import Answer, table
from scaling.book.learning import Trained, clock, learned
from scaling.book.lesson import EXACT, Report, options, run
from scaling.book.listing import stack_equality
from scaling.collectives import all_reduce, reduce_scatter
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.models import mlp
from scaling.spec import parse
from scaling.strategies import pods
from scaling.strategies.pods import SPECS
from scaling.trace import trace
from scaling.train.byte_lm import batch_axes, loss_and_grads, param_specs, reduced

# %% The gradient of one weight: partial sums {U_PX} in, this rank's shard of the sum out


def grads_of_layer(dW_in, mesh):
    """Hierarchical: over X inside the pod first, so that DF/(XY) elements cross P."""
    dW_in = reduce_scatter("dW_in[D, F_Y] {U_PX} -> dW_in[D_X, F_Y] {U_P}", dW_in, mesh)
    return all_reduce("dW_in[D_X, F_Y] {U_P} -> dW_in[D_X, F_Y]", dW_in, mesh)


def grads_of_layer_flat(dW_in, mesh):
    """The other order: DF/Y elements cross P, X times as many."""
    dW_in = all_reduce("dW_in[D, F_Y] {U_PX} -> dW_in[D, F_Y] {U_X}", dW_in, mesh)
    return reduce_scatter("dW_in[D, F_Y] {U_X} -> dW_in[D_X, F_Y]", dW_in, mesh)


# %% Bytes of a whole step on each axis, by a trace


def step_bytes(mesh, sizes: dict, dtype) -> dict[str, int]:
    """Forward and backward of L layers, by the book's count (an AllReduce twice), on each axis of the mesh."""
    meta = {"dtype": dtype, "device": mesh.device}
    types = {name: SPECS[name].replace("[", "[L, ") for name in ("W_in", "W_out")} | {"In": SPECS["In"]}
    arrays = {name: torch.zeros(parse(spec).local_shape(sizes, mesh), **meta) for name, spec in types.items()}
    In = arrays.pop("In")
    with trace() as log:
        Out, saved = pods.forward(arrays, In, mesh)
        pods.backward(Out, saved, arrays, mesh)
    moved = dict.fromkeys(mesh.sizes, 0)
    for event in log.collectives():
        moved[event.axes[0]] += event.nbytes * (2 if event.op == "AllReduce" else 1)
    return moved


def closed_forms(mesh, sizes: dict, element: int) -> list[tuple]:
    """(axis, formula, bytes) of one rank; `element` bytes each, the book's factors being for 2."""
    P, X, Y = (mesh.sizes[axis] for axis in "PXY")
    L, B, D, F = (sizes[dim] for dim in "LBDF")
    return [
        ("P", "4 DF/(XY) elements a layer", L * 4 * D * F // (X * Y) * element),
        ("X", "6 DF/Y elements a layer", L * 6 * D * F // Y * element),
        ("Y", "4 BD/(PX) elements a layer", L * 4 * B * D // (P * X) * element),
    ]


HEADERS = ["axis", "formula", "bytes", "counted"]

# %% The book's numbers


def answers() -> list[Answer]:
    v5p = chip("v5p")
    C, dcn, pod, B, F = v5p.flops("bf16"), v5p.need("dcn_bw"), v5p.pod_chips, 2e6, 30_000
    mixed = cost.mixed_threshold(F, C, v5p.bandwidth("ici", axes=2), v5p.bandwidth("ici", axes=1))
    data = cost.data_threshold(C, v5p.bandwidth("ici", axes=3))
    mesh, sizes = AbstractMesh({"P": 2, "X": 1024, "Y": 8}), {"L": 1, "B": 2**21, "D": 8192, "F": 32768}
    crossing = step_bytes(mesh, sizes, torch.bfloat16)["P"]
    math = 8 * sizes["B"] * sizes["D"] * sizes["F"] / (mesh.size() * C)
    return [
        Answer("a host's share of the network for each chip", "6.25e9", dcn, "B/s"),
        Answer("smallest batch per slice, C / W_dcn", "73,440", cost.pod_threshold(C, dcn), "tokens"),
        Answer("T_math / T_comms at 1M tokens a slice, from the trace's bytes", "", math / (crossing / dcn),
               note=f"(1M = {2**20:,}) / 73,440: far above 1, so DCN is hidden"),
        Answer("LLaMA-3 70B at 2M tokens: FSDP up to", "2,400", B / data, "chips"),
        Answer("FSDP+TP: smallest batch per chip", "108", mixed, "tokens"),
        Answer("FSDP+TP up to", "18,000", B / mixed, "chips"),
        Answer("chips in a pod", "8960", float(pod), note="the text rounds it to 8k"),
        Answer("two pods: batch per chip", "111", B / 2 / pod, "tokens"),
    ]  # fmt: skip


# %% Training on real text


def train(layer, mesh, text, args):
    """`scaling.strategies.pods` over all layers: pure steps from params and optimizer state to new ones."""
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


# %% Run


def main(mesh, args):
    report, P, X = Report(mesh), mesh.sizes["P"], mesh.sizes["X"]
    report.say(f"{__doc__.split(chr(10))[0]}\n\n{SPECS['In']} * {SPECS['W_in']} * {SPECS['W_out']} -> {SPECS['Out']}")

    report.title(f"One weight's gradient on {mesh}: the same sum in two orders, as rank 0 ran them")
    D, F = 64 * X, 128 * mesh.sizes["Y"]
    partial = torch.randn(D, F // mesh.sizes["Y"], generator=torch.Generator().manual_seed(mesh.rank)).double()
    with trace() as good:
        shard = grads_of_layer(partial, mesh)
    with trace() as flat:
        other = grads_of_layer_flat(partial, mesh)
    report.say(f"over X, then P\n{good.table()}\n\nover P, then X\n{flat.table()}\n")
    report.equal([("both orders", shard, other, EXACT)])
    crossed = [sum(2 * e.nbytes for e in log.events if e.axes == ("P",)) for log in (good, flat)]
    report.say()
    rows = [("over P, then X", f"{X} times as many bytes cross P", X * crossed[0], crossed[1])]
    report.same(rows, ["order", "formula", "bytes", "counted"])
    times = [_milliseconds(f, partial, mesh) for f in (grads_of_layer, grads_of_layer_flat)]
    report.say(f"\n{times[0]} against {times[1]} ms here, where P is no slower than X")

    report.title("Bytes that a rank moves in a step of 4 layers, in float64, by the book's count")
    sizes = {"L": 4, "B": 8 * P * X, "D": 16 * mesh.size(), "F": 16 * mesh.size()}
    moved = step_bytes(mesh, sizes, torch.float64)
    report.same([(*row, moved[row[0]]) for row in closed_forms(mesh, sizes, 8)], HEADERS)

    book = {"L": 1, "B": 2**21, "D": 8192, "F": 32768}
    big = AbstractMesh({"P": 2, "X": 1024, "Y": 8})
    report.title(f"The same on {big}, {big.size():,} chips: one layer D=8192, F=32768 in bfloat16, 1M tokens a pod")
    moved = step_bytes(big, book, torch.bfloat16)
    report.same([(*row, moved[row[0]]) for row in closed_forms(big, book, 2)], HEADERS)

    report.title("The book's numbers (TPU v5p)")
    numbers = answers()
    report.say(table(numbers))
    for answer in numbers:
        report.judge(answer.question, answer.verdict != "DIFFERS")

    report.title("scaling.strategies.pods: four layers with gelu, norm and residual, in float64")
    stack_equality(pods, mesh, report, args.seed)
    report.title("Memory and training: a byte model on real text, in float32")
    text = data.load_text(args.text, max_bytes=1_000_000).to(mesh.device)
    learned(report, pods, train(pods, mesh, data.split(text)[0], args), text, args)
    return report.done()


def _milliseconds(f, x, mesh, count: int = 10) -> str:
    f(x, mesh)
    start = perf_counter()
    for _ in range(count):
        f(x, mesh)
    return f"{(perf_counter() - start) / count * 1e3:.1f}"


if __name__ == "__main__":
    run(main, options(__doc__, mesh="P=2,X=2,Y=2"))
