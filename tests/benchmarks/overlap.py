"""How much of its communication a step hides behind its computing, on a wire of a given speed.

    python tests/benchmarks/overlap.py [--only dp,fsdp] [--wire 0,400,800] [--steps 20]

Over loopback, sending costs the cores as much time as it takes, so ranks that fill the cores can hide little. Therefore
the kernel paces each connection to `--wire` 10^6 bytes a second (0: not at all), as a network would: then sending takes
time but not the cores'. Of each wire are measured, in turn on the same two ranks: a step (SGD); its computing alone
(the same matmuls and update, nothing sent); its collectives alone, all in flight together; and PyTorch's step, tuned.
`dp` reduces each gradient by itself, as the book has it; `dp-buckets` 25 MB of them at once, which have to wait longer.
`hidden` = (computing + communicating - step) / the smaller of the two: 100% is perfect overlap, 0% none. Linux only.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from harness import RATE, SIZES, Size, hidden, in_turn, medians, on_ranks, slow_wire, speed, stepping
from report import machine, options, show
from versus_torch import BUCKET, CONTESTS, initial, ours, rows

from scaling import optim
from scaling.collectives import all_gather, all_reduce, reduce_scatter, wait
from scaling.mesh import AbstractMesh
from scaling.strategies import data_parallel, fsdp, zero
from scaling.trace import trace

RANKS = 2
STRATEGIES = {  # the module, its options, and PyTorch's contest
    "dp": (data_parallel, {}, "dp"),
    "dp-buckets": (data_parallel, {"bucket_bytes": BUCKET}, "dp"),
    "fsdp": (fsdp, {}, "fsdp"),
    "zero": (zero, {}, "zero"),
}
CALLS = {"AllGather": all_gather, "ReduceScatter": reduce_scatter, "AllReduce": partial(all_reduce, donate=True)}


def parts(strategy, mesh, size: Size, **options) -> dict[str, Callable]:
    """A step; and what of it is computing, and what communicating."""
    step = ours(strategy, mesh, size, "sgd", **options)
    alone = {"computing": computing(strategy, mesh, size), "communicating": communicating(step, mesh, size)}
    return {"step": step, **alone}


def computing(strategy, mesh, size: Size) -> Callable:
    """What one rank computes in a step: its rows, with whole weights; and the update of its shards."""
    X, alone = mesh.sizes["X"], AbstractMesh(dict.fromkeys(mesh.sizes, 1))
    alone.device = mesh.device  # one device computes for itself: every collective is the identity
    local = replace(size, rows=size.rows // X)
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


def communicating(step: Callable, mesh, size: Size) -> Callable:
    """The collectives that a step makes, on arrays of the same shapes, all in flight."""
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
        for pending in [call(line, x, mesh, async_op=True) for call, line, x in calls]:
            wait(pending)

    return replay


def measure(mesh, name: str, size: Size, wires: list[float], steps: int) -> list[dict[str, list[float]]]:
    """Seconds of each part, for each wire."""
    strategy, options, rival = STRATEGIES[name]
    timed = parts(strategy, mesh, size, **options)
    timed["theirs"] = CONTESTS[rival].side("tuned")(mesh, size, "sgd")
    in_turn(timed, 1)  # all connections are made
    found = []
    for wire in wires:
        slow_wire(wire)
        found.append(in_turn(timed, steps, warmup=1))
    return found


if __name__ == "__main__":
    parser = options(__doc__, only=STRATEGIES, wire=(0.0, 400.0, 800.0), steps=20)
    parser.add_argument("--size", choices=SIZES, default="default")
    args, lines = parser.parse_args(), []
    for name in args.only:
        results = on_ranks(measure, {"X": RANKS}, name, SIZES[args.size], args.wire, args.steps)
        for wire, per_rank in zip(args.wire, zip(*results, strict=True), strict=True):
            seconds = medians(per_rank)
            ms = [f"{seconds[part] * 1e3:.1f}" for part in ("computing", "communicating", "step", "theirs")]
            ms.insert(3, f"{hidden(seconds):.0%}")
            lines.append([name, speed(wire), *ms, f"{seconds['step'] / seconds['theirs']:.2f}"])
    print(f"{RANKS} ranks, one thread each, {SIZES[args.size]}, on {machine()}; {args.steps} samples.\n")
    headers = ["ours", "wire", "computing, ms", "communicating, ms", "ours, ms a step", "hidden"]
    show(lines, [*headers, "tuned, ms a step", "ours / tuned"], 2)
