"""How much of its communication a step hides behind its computing, on a wire of a given speed.

    python tests/benchmarks/overlap.py [--ranks 2] [--only dp,fsdp] [--wire 0,400,800] [--steps 20] [--json FILE]

Over loopback, sending costs the cores as much time as it takes, so ranks that fill the cores can hide little. Therefore
the kernel paces each connection to `--wire` 10^6 bytes a second (0: not at all), as a network would: then sending takes
time but not the cores'. Of each wire are measured, in turn on the same ranks: a step (SGD); its computing alone (the
same matmuls and update, nothing sent); its collectives alone, all in flight together; and PyTorch's step, tuned. `dp`
reduces each gradient by itself, as the book has it; `dp-buckets` 25 MB of them together, which have to wait longer.
`hidden` = (computing + communicating - step) / the smaller of the two: 100% is perfect overlap, 0% none. Linux only.
"""

from growth import communicating, computing
from harness import SIZES, Size, hidden, in_turn, medians
from kernel import paced, slow_wire, speed
from report import machine, options, show, write
from versus_torch import BUCKET, contests, ours

from scaling import launch
from scaling.strategies import data_parallel, fsdp, zero

STRATEGIES = {  # the module, its options, and PyTorch's contest
    "dp": (data_parallel, {}, "dp"),
    "dp-buckets": (data_parallel, {"bucket_bytes": BUCKET}, "dp"),
    "fsdp": (fsdp, {}, "fsdp"),
    "zero": (zero, {}, "zero"),
}


def measure(mesh, name: str, size: Size, wires: list[float], steps: int) -> list[dict[str, list[float]]]:
    """Seconds of each part, for each wire."""
    strategy, options, rival = STRATEGIES[name]
    step = ours(strategy, mesh, size, "sgd", **options)
    parts = {
        "step": step,
        "computing": computing(strategy, mesh, size),
        "communicating": communicating(step, mesh, size, at_once=True),
        "theirs": contests()[rival].theirs(mesh, size, "sgd", tuned=True),
    }
    in_turn(parts, 1)  # all connections are made
    found = []
    for wire in wires:
        slow_wire(wire * 1e6 or 1e12)
        found.append(in_turn(parts, steps, warmup=1))
    return found


def main() -> None:
    parser = options(__doc__, only=STRATEGIES, wire="0,400,800", steps=20, json=None)
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--size", choices=SIZES, default="default")
    args = parser.parse_args()
    wires, rows = paced(args.wire), []
    for name in args.only:
        size = SIZES[args.size]
        mesh = {"X": args.ranks}
        results = launch.run(measure, mesh, name, size, wires, args.steps, checked=False, timeout=600)
        for wire, per_rank in zip(wires, zip(*results, strict=True), strict=True):
            seconds = medians(per_rank)
            rows.append({"strategy": name, "wire": wire} | seconds | {"hidden": hidden(seconds)})
    lines = [
        [row["strategy"], speed(row["wire"])]
        + [f"{row[part] * 1e3:.1f}" for part in ("computing", "communicating", "step")]
        + [f"{row['hidden']:.0%}", f"{row['theirs'] * 1e3:.1f}", f"{row['step'] / row['theirs']:.2f}"]
        for row in rows
    ]
    print(f"{args.ranks} ranks, one thread each, {SIZES[args.size]}, on {machine()}; {args.steps} samples.\n")
    headers = ["ours", "wire", "computing, ms", "communicating", "step", "hidden", "PyTorch's, tuned", "ratio"]
    show(lines, headers, 2)
    write(args.json, rows)


if __name__ == "__main__":
    main()
