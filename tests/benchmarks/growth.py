"""How a step's time and bytes grow with ranks, layers, width and rows; and what overlaps.

    python tests/benchmarks/growth.py [--strategies dp,fsdp,tp,fsdp_tp] [--steps 20] [--json FILE]

One of them varies at a time. Of each point are measured, in turn on the same ranks: a step (SGD); its computing alone
(the same matmuls and update on this rank, nothing sent); its collectives alone, one after the other. `hidden` is how
much of the smaller of these two the step hides behind the larger: (computing + communicating - step) / smaller.
(`python -m scaling.measure` fits a machine's rates to steps, and predicts them.)
"""

from dataclasses import replace
from functools import partial

import torch
from harness import RATE, Size, hidden, in_turn, initial, medians, rows, sent_by
from report import machine, options, show, write
from versus_torch import BUCKET, both_axes, ours, over_both, over_x, over_y

from scaling import collectives, launch, optim
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


def main() -> None:
    args = options(__doc__, strategies=MODULES, steps=20, json=None).parse_args()
    print(f"One thread a rank, on {machine()}; medians of {args.steps} steps.")
    found = []
    for name in args.strategies:
        points = [(n, size) for n, size in POINTS if name != "fsdp_tp" or n == 4 or size != BASE]
        rows, lines = [], []
        for n, size in points:
            mesh = AXES[name](4 if name == "fsdp_tp" else n)
            results = launch.run(measure, mesh, name, size, args.steps, checked=False, timeout=600)
            seconds, sent = medians([result["seconds"] for result in results]), [result["sent"] for result in results]
            row = {"mesh": mesh, "size": str(size), **seconds, "hidden": hidden(seconds)}
            row |= {"sent": None if None in sent else sum(sent) / len(sent), "closed form": CLOSED[name](mesh, size)}
            rows.append(row)
            lines.append([len(results), row["size"], *(f"{row[part] * 1e3:.1f}" for part in seconds)])
            lines[-1] += [f"{row['hidden']:.0%}" if len(results) > 1 else ""]
            lines[-1] += ["" if row[each] is None else f"{row[each] / 1e6:.2f}" for each in ("sent", "closed form")]
        print(f"\n{name}\n")
        show(lines, ["ranks", "size", "step, ms", "computing", "communicating", "hidden", "MB sent", "closed form"], 2)
        found.append({"strategy": name, "points": rows})
    write(args.json, found)


if __name__ == "__main__":
    main()
