"""How a step's time and bytes grow with ranks, layers, width and rows; and what overlaps.

    python tests/benchmarks/growth.py [--strategies dp,fsdp,tp,fsdp_tp] [--vary ranks,layers,width,rows] [--steps 20]

One of them varies at a time. Of each point are measured, in turn on the same ranks: a step (SGD); its computing alone
(the same matmuls and update on this rank, nothing sent); its collectives alone, one after the other. `hidden` is how
much of the smaller of these two the step hides behind the larger: (computing + communicating - step) / smaller.
(`python -m scaling.measure` fits a machine's rates to steps, and predicts them.)
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from harness import RATE, Size, hidden, in_turn, medians, on_ranks, sent_by, split, stepping
from report import machine, options, show
from versus_torch import BUCKET, CONTESTS, initial, ours, rows

from scaling import optim
from scaling.collectives import all_gather, all_reduce, reduce_scatter, wait
from scaling.mesh import AbstractMesh
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel
from scaling.trace import trace

STRATEGIES = {
    "dp": (data_parallel, {"bucket_bytes": BUCKET}),
    "fsdp": (fsdp, {}),
    "tp": (tensor_parallel, {}),
    "fsdp_tp": (fsdp_tp, {}),
}
CALLS = {"AllGather": all_gather, "ReduceScatter": reduce_scatter, "AllReduce": partial(all_reduce, donate=True)}
BASE, RANKS = Size(4, 512, 2048, 256), 2
POINTS = {  # what varies
    "ranks": [(n, BASE) for n in (1, 2, 4)],
    "layers": [(RANKS, replace(BASE, L=L)) for L in (2, 8)],
    "width": [(RANKS, replace(BASE, D=D, F=4 * D)) for D in (128, 256, 768)],
    "rows": [(RANKS, replace(BASE, rows=rows)) for rows in (64, 1024)],
}


def parts(strategy, mesh, size: Size, at_once: bool, **options) -> dict[str, Callable]:
    """A step; and what of it is computing, and what communicating."""
    step = ours(strategy, mesh, size, "sgd", **options)
    alone = {"computing": computing(strategy, mesh, size), "communicating": communicating(step, mesh, size, at_once)}
    return {"step": step, **alone}


def computing(strategy, mesh, size: Size) -> Callable:
    """What one rank computes in a step: its rows, its columns of F, whole along D; and the update of its shards."""
    X, Y = mesh.sizes.get("X", 1), mesh.sizes.get("Y", 1)
    alone = AbstractMesh(dict.fromkeys(mesh.sizes, 1))
    alone.device = mesh.device  # one device computes for itself: every collective is the identity
    local = replace(size, F=size.F // Y, rows=size.rows // X)
    params, In = initial(local), rows(local)
    width = size.D if strategy is data_parallel else size.D // X
    shards = {name: torch.zeros_like(W[:, :width]) for name, W in params.items()}
    rule = optim.sgd(RATE)
    grads = {name: torch.zeros_like(W) for name, W in shards.items()}

    def pure(shards, state):
        Out, saved = strategy.forward(params, In, alone)
        strategy.backward(Out * (2 / local.rows), saved, params, alone)
        return None, *rule.update(grads, state, shards, donate=True)

    return stepping(pure, shards, rule.init(shards))


def communicating(step: Callable, mesh, size: Size, at_once: bool) -> Callable:
    """The collectives that a step makes, on arrays of the same shapes: one after the other, or all in flight."""
    with trace() as log:
        step()
    sizes = {"L": size.L, "B": size.rows, "D": size.D, "F": size.F}
    calls = []
    for event in log.collectives():
        shape = list(event.before.local_shape(sizes, mesh))
        if event.before.dim_names[0] == "L":  # a bucket of layers
            shape[0] = event.nbytes // (4 * torch.Size(shape[1:]).numel())
        calls.append((CALLS[event.op], f"{event.before} -> {event.after}", torch.zeros(shape)))

    def replay():
        pending = [call(line, x, mesh, async_op=at_once) for call, line, x in calls]
        if at_once:
            [wait(x) for x in pending]

    return replay


def measure(mesh, name: str, size: Size, steps: int) -> tuple[dict, float]:
    strategy, more = STRATEGIES[name]
    sides = parts(strategy, mesh, size, at_once=False, **more)
    return in_turn(sides, steps), sent_by(sides["step"])


if __name__ == "__main__":
    args = options(__doc__, strategies=STRATEGIES, vary=POINTS, steps=20).parse_args()
    print(f"One thread a rank, on {machine()}; medians of {args.steps} steps.")
    for name in args.strategies:
        lines, contest = [], CONTESTS[name]
        points = [point for what in args.vary for point in POINTS[what]]
        points = [(4, size) if contest.axes == "XY" else (n, size) for n, size in points]
        for n, size in dict.fromkeys(points):
            mesh = split(contest.axes, n)
            times, sent = zip(*on_ranks(measure, mesh, name, size, args.steps), strict=True)
            seconds, closed = medians(times), contest.wire_bytes(mesh, size)
            line = [n, size, *(f"{each * 1e3:.1f}" for each in seconds.values())]
            line += [f"{hidden(seconds):.0%}" if n > 1 else "", f"{sum(sent) / n / 1e6:.2f}", f"{closed / 1e6:.2f}"]
            lines.append(line)
        print(f"\n{name}\n")
        show(lines, ["ranks", "size", "step, ms", "computing", "communicating", "hidden", "MB sent", "closed form"], 2)
