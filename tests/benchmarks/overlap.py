"""How much of its communication a step hides behind its computing, on a wire of a given speed.

    python tests/benchmarks/overlap.py [--only dp,fsdp] [--wire 0,400,800] [--steps 20]

Over loopback, sending costs the cores as much time as it takes, so ranks that fill the cores can hide little. Therefore
the kernel paces each connection to `--wire` 10^6 bytes a second (0: not at all), as a network would: then sending takes
time but not the cores'. Of each wire are measured, in turn on the same two ranks: a step (SGD); its computing alone
(the same matmuls and update, nothing sent); its collectives alone, all in flight together; and PyTorch's step, tuned.
`dp` reduces each gradient by itself, as the book has it; `dp-buckets` 25 MB of them at once, which have to wait longer.
`hidden` = (computing + communicating - step) / the smaller of the two: 100% is perfect overlap, 0% none. Linux only.
"""

from growth import parts
from harness import SIZES, Size, hidden, in_turn, medians, on_ranks
from kernel import slow_wire, speed
from report import machine, options, show
from versus_torch import BUCKET, CONTESTS

from scaling.strategies import data_parallel, fsdp, zero

RANKS = 2
STRATEGIES = {  # the module, its options, and PyTorch's contest
    "dp": (data_parallel, {}, "dp"),
    "dp-buckets": (data_parallel, {"bucket_bytes": BUCKET}, "dp"),
    "fsdp": (fsdp, {}, "fsdp"),
    "zero": (zero, {}, "zero"),
}


def measure(mesh, name: str, size: Size, wires: list[float], steps: int) -> list[dict[str, list[float]]]:
    """Seconds of each part, for each wire."""
    strategy, options, rival = STRATEGIES[name]
    timed = parts(strategy, mesh, size, at_once=True, **options)
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
