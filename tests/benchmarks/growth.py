"""How a step's time and bytes grow with ranks, layers, width and rows, beside the cost model; and what overlaps.

    python tests/benchmarks/growth.py [--strategies dp,fsdp,tp,fsdp_tp] [--steps 20] [--json FILE]

One of them varies at a time. Of each point are measured, in turn on the same ranks: a step (SGD); its computing alone
(the same matmuls and update on this rank, nothing sent); its collectives alone, one after the other. `hidden` is how
much of the smaller of these two the step hides behind the larger: (computing + communicating - step) / smaller.
The model is Part 5's without overlap, T = FLOPs/C + bytes/W + t L: `cost.layer_flops` and the book's `cost.layer_bytes`
of L layers; C, W and the seconds t of a layer are fitted to all points of a strategy, by least squares of the relative
errors. Ranks share the cores of this machine, so FLOPs and bytes are those of all ranks, divided by the cores in use.
"""

import os
from dataclasses import replace
from functools import partial

import torch
from harness import RATE, Size, in_turn, initial, rows, sent_by, slowest
from report import machine, options, quartiles, show, write
from versus_torch import BUCKET, both_axes, ours, over_both, over_x, over_y

from scaling import collectives, cost, launch, optim
from scaling.mesh import AbstractMesh
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel
from scaling.trace import trace

MODULES = {"dp": data_parallel, "fsdp": fsdp, "tp": tensor_parallel, "fsdp_tp": fsdp_tp}
AXES = {"dp": lambda n: {"X": n}, "fsdp": lambda n: {"X": n}, "tp": lambda n: {"Y": n}, "fsdp_tp": both_axes}
CLOSED = {"dp": over_x(2), "fsdp": over_x(3), "tp": over_y, "fsdp_tp": over_both}
OPTIONS = {"dp": {"bucket_bytes": BUCKET}}
CALLS = {
    "AllGather": collectives.all_gather,
    "ReduceScatter": collectives.reduce_scatter,
    "AllReduce": partial(collectives.all_reduce, donate=True),
}
BASE, RANKS = Size(4, 512, 2048, 256), 2
POINTS = [(n, BASE) for n in (1, 2, 4)]
POINTS += [(RANKS, replace(BASE, L=L)) for L in (2, 8)]
POINTS += [(RANKS, replace(BASE, D=D, F=4 * D)) for D in (128, 256, 768)]
POINTS += [(RANKS, replace(BASE, rows=rows)) for rows in (64, 1024)]


def computing(strategy, mesh, size: Size):
    """What one rank computes in a step: its rows, its columns of F, whole along D; and the update of its shards."""
    X, Y = mesh.sizes.get("X", 1), mesh.sizes.get("Y", 1)
    alone = AbstractMesh(dict.fromkeys(mesh.sizes, 1))
    alone.device = mesh.device  # one device computes for itself: every collective is the identity
    local = replace(size, F=size.F // Y, rows=size.rows // X)
    params, In = initial(local), rows(local)
    shards = {
        name: torch.zeros_like(W[:, : W.shape[1] // (1 if strategy is data_parallel else X)])
        for name, W in params.items()
    }
    rule = optim.sgd(RATE)
    state, grads = rule.init(shards), {name: torch.zeros_like(W) for name, W in shards.items()}

    def step():
        nonlocal shards, state
        Out, saved = strategy.forward(params, In, alone)
        strategy.backward(Out * (2 / local.rows), saved, params, alone)
        shards, state = rule.update(grads, state, shards, donate=True)

    return step


def communicating(step, mesh, size: Size, at_once: bool = False):
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
            [collectives.wait(x) for x in pending]

    return replay


def measure(mesh, name: str, size: Size, steps: int) -> dict:
    strategy = MODULES[name]
    step = ours(strategy, mesh, size, "sgd", **OPTIONS.get(name, {}))
    sides = {
        "step": step,
        "computing": computing(strategy, mesh, size),
        "communicating": communicating(step, mesh, size),
    }
    return {"seconds": in_turn(sides, steps), "sent": sent_by(step)}


def modelled(name: str, ranks: int, size: Size) -> tuple[float, float, float]:
    """(FLOPs, bytes, layers) of a step, the first two per core in use."""
    mesh = {"X": 1, "Y": 1} | AXES[name](ranks)
    share = ranks / min(ranks, os.cpu_count())
    shape = cost.LayerShape(size.rows, size.D, size.F, dtype="f32")
    flops = size.L * cost.layer_flops(shape, ranks)
    moved = cost.layer_bytes(name, shape, mesh["X"], mesh["Y"])
    return flops * share, size.L * sum(moved.values()) * share, size.L


def fit(points: list[tuple], seconds: list[float]) -> tuple[list[float], list[float]]:
    """Non-negative seconds per FLOP, per byte, per layer; and the modelled seconds of each point."""
    A, t = torch.tensor(points, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    used, rates = list(range(A.shape[1])), torch.zeros(A.shape[1], dtype=torch.float64)
    while used:
        scale = (A[:, used] / t[:, None]).norm(dim=0).clamp(min=1e-300)
        found = torch.linalg.lstsq(A[:, used] / t[:, None] / scale, torch.ones(len(t), 1, dtype=torch.float64)).solution
        found = found.squeeze(1) / scale
        if (found >= 0).all():
            rates[used] = found
            break
        del used[int((found * scale).argmin())]
    return rates.tolist(), (A @ rates).tolist()


def main() -> None:
    args = options(__doc__, strategies=MODULES, steps=20, json=None).parse_args()
    print(f"One thread a rank, on {machine()}; medians of {args.steps} steps.")
    found = []
    for name in args.strategies:
        points = [(n, size) for n, size in POINTS if name != "fsdp_tp" or n == 4 or size != BASE]
        points = [(4 if name == "fsdp_tp" else n, size) for n, size in points]
        measured, models, seconds = [], [], []
        for n, size in points:
            results = launch.run(measure, AXES[name](n), name, size, args.steps, checked=False, timeout=600)
            middle = {
                part: quartiles(slowest([result["seconds"][part] for result in results]))[1]
                for part in ("step", "computing", "communicating")
            }
            smaller = min(middle["computing"], middle["communicating"])
            hidden = (middle["computing"] + middle["communicating"] - middle["step"]) / smaller
            sent = [result["sent"] for result in results]
            sent = None if None in sent else sum(sent) / n
            closed = CLOSED[name](AXES[name](n), size)
            row = {"ranks": n, "size": str(size), **middle, "hidden": hidden, "sent": sent, "closed form": closed}
            measured.append(row)
            models.append(modelled(name, n, size))
            seconds.append(middle["step"])
        rates, predicted = fit(models, seconds)
        lines = []
        for row, model in zip(measured, predicted, strict=True):
            row["model"] = model
            several = row["ranks"] > 1
            lines.append(
                [row["ranks"], row["size"], *(f"{row[part] * 1e3:.1f}" for part in ("step", "computing"))]
                + ([f"{row['communicating'] * 1e3:.1f}", f"{row['hidden']:.0%}"] if several else ["", ""])
                + ["" if row["sent"] is None else f"{row['sent'] / 1e6:.2f}", f"{row['closed form'] / 1e6:.2f}"]
                + [f"{model * 1e3:.1f}", f"{model / row['step'] - 1:+.0%}"]
            )
        headers = ["ranks", "size", "step, ms", "computing", "communicating", "hidden", "MB sent", "closed form"]
        print(f"\n{name}\n")
        show(lines, [*headers, "model, ms", "off by"], 2)
        (C, W), t = ((1 / rate if rate else float("inf") for rate in rates[:2]), rates[2])
        print(
            f"C = {C / 1e9:.1f} GFLOPs/s and W = {W / 1e9:.2f} GB/s of a core, t = {t * 1e3:.2f} ms a layer", flush=True
        )
        found.append({"strategy": name, "points": measured, "rates": rates})
    write(args.json, found)


if __name__ == "__main__":
    main()
