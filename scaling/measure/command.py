"""Measure this machine, write a chip file for the cost model, and check how well that file predicts.

    python -m scaling.measure --ranks 4 --out machine.toml
    python -m scaling.measure --ranks 4 --chip machine.toml       # the predictions of that file once more
    python -m scaling.train --plan 4 --chip machine.toml          # the mesh to train on

All ranks measure at once, as they will run, because they share cores and memory. Then training steps on several meshes
are predicted from the file alone and run, and the errors are printed. The meshes are taken from the ranking that
--plan makes. Kendall's tau says whether their order is right: it counts the pairs of meshes in the right order minus
the pairs in the wrong one, over all pairs.
"""

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from scaling import launch
from scaling.common import console
from scaling.common.console import Parser, complaining, integer, output
from scaling.configs import get
from scaling.hardware import Chip, load_chip
from scaling.measure import network
from scaling.measure.rates import combine_ranks, measure_rank
from scaling.mesh import Mesh
from scaling.plan.choose import TRIED, choices
from scaling.plan.transformer_step import transformer_step
from scaling.spec.sizes import format_sizes
from scaling.train.settings import DTYPES, Settings

MODEL = get("tiny").with_(L=4, D=256, F=1024, N=8, K=4, H=32)
SETTINGS = Settings(MODEL, "", "", batch=16, seq=128, microbatches=2)
MOST_MESHES = 10  # the number of meshes that are run


@dataclass(frozen=True)
class Check:
    """A step on a mesh of these sizes as predicted and as measured, in seconds."""

    sizes: dict[str, int]
    predicted: float
    seconds: float

    @property
    def error(self) -> float:
        """The relative error: +0.2 if the prediction is 20% too long."""
        return self.predicted / self.seconds - 1


def check_steps(settings: Settings, chip: Chip, ranks: int, rounds: int, most: int = MOST_MESHES) -> list[Check]:
    """Predict and run a step on at most `most` meshes of `ranks` ranks, spread evenly over the planner's ranking.

    Raises:
        ValueError: no mesh suits.
    """
    found, refused = choices(settings, ranks, chip)
    if not found:
        raise ValueError(f"no mesh of {ranks} ranks suits: {refused[0]}\n  fix: use another number of ranks")
    tried = [found[i * (len(found) - 1) // (most - 1)] for i in range(most)] if len(found) > most > 1 else found[:most]
    per_rank = launch.run(take_turns, {"X": ranks}, settings, [each.sizes for each in tried], rounds, checked=False)
    slowest = map(max, zip(*per_rank, strict=True))
    return [Check(each.sizes, each.seconds, seconds) for each, seconds in zip(tried, slowest, strict=True)]


def take_turns(mesh, settings: Settings, meshes: Sequence[dict[str, int]], rounds: int) -> list[float]:
    """Return the seconds of the step on each mesh, on this rank: the lower quartile of all rounds."""
    ready = [transformer_step(settings, Mesh(sizes)) for sizes in meshes]
    return [network.lower_quartile(seconds) for seconds in network.laps(ready, mesh, rounds)]


def tau(checks: Sequence[Check]) -> float:
    """Return Kendall's tau, from -1 to 1."""
    signs = [(a.predicted - b.predicted) * (a.seconds - b.seconds) for a, b in combinations(checks, 2)]
    return sum((s > 0) - (s < 0) for s in signs) / max(1, len(signs))


def median_error(checks: Sequence[Check]) -> float:
    """Return the median of the relative errors, without sign."""
    return statistics.median(abs(c.error) for c in checks)


def table(checks: Sequence[Check]) -> str:
    """Return the predictions and measurements as a table with their summary."""
    rows = [(format_sizes(c.sizes), f"{1e3 * c.predicted:.1f}", f"{1e3 * c.seconds:.1f}", f"{c.error:+.0%}")
            for c in checks]  # fmt: skip
    shown = console.table(rows, ["mesh", "predicted ms", "measured ms", "error"])
    return f"{shown}\n\nmedian error {median_error(checks):.0%}, Kendall's tau {tau(checks):.2f}"


def chip_table(chip: Chip) -> str:
    """Return the chip's measured rates and latencies as a table."""
    rows = [(f"matmul {dtype}", f"{rate / 1e9:,.1f} GFLOPs/s a rank", "") for dtype, rate in chip.peaks]
    rows += [("causal attention", f"{chip.efficiency.attention:.0%} of that", "")]
    for m in chip.measured:
        name = f"{m.op}, {m.ranks} ranks" if m.ranks > 1 else f"{m.op}, one rank"
        name += " alone" if m.alone or m.ranks == 1 else ""
        unit = "GFLOPs/s" if m.op == "Matmul" else "GB/s"
        rate = f"{m.bandwidth / 1e9:,.2f} {unit}" if m.bandwidth < 1e15 else ""
        rows.append((name, rate, f"{m.latency * 1e6:,.0f} us"))
    return console.table(rows, ["", "rate", "latency"])


def toml(chip: Chip) -> str:
    """Return the chip as the text of a file that `scaling.hardware.load_chip` reads."""
    lines = [f'name = "{chip.name}"', f'kind = "{chip.kind}"', f'source = "{chip.source}"']
    lines += [f"hbm_bytes = {chip.hbm_bytes:.6g}", f"hbm_bw = {chip.hbm_bw:.6g}", "", "[flops]"]
    lines += [f"{dtype} = {rate:.6g}" for dtype, rate in chip.peaks]
    lines += ["", "[efficiency]", f"attention = {chip.efficiency.attention:.6g}"]
    for m in chip.measured:
        lines += ["", "[[measured]]", f'op = "{m.op}"', f"ranks = {m.ranks}"]
        lines += [f"latency = {m.latency:.6g}", f"bandwidth = {m.bandwidth:.6g}"]
        lines += ["alone = true"] if m.alone else []
    return "\n".join(lines) + "\n"


@complaining(ValueError, OSError, launch.RankError, code=2)
def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["network"]:
        return network.main(given[1:])
    parser = Parser(prog="python -m scaling.measure", description=__doc__)
    parser.add_argument(
        "--ranks", type=integer(2, TRIED), default=2, help="number of ranks, one thread each (default 2)"
    )
    parser.add_argument(
        "--dtypes",
        default="fp32,bf16",
        help=f"dtypes of the matmuls, by commas: {', '.join(DTYPES)} (default fp32,bf16)",
    )
    parser.add_argument(
        "--repeats", type=integer(1, 10**6), default=15, help="repetitions per measurement (default 15)"
    )
    parser.add_argument("--out", type=output, metavar="FILE", help="write the chip file, such as machine.toml")
    parser.add_argument("--chip", metavar="FILE", help="measure nothing: check the predictions of this chip file")
    parser.add_argument("--no-check", action="store_true", help="do not run training steps to check the predictions")
    args = parser.parse_args(given)
    dtypes = args.dtypes.split(",")
    if unknown := set(dtypes) - DTYPES.keys():
        raise ValueError(f"unknown dtype {', '.join(sorted(unknown))}\n  fix: give some of {', '.join(DTYPES)}")
    if (load := os.getloadavg()[0]) > (os.cpu_count() or 1) + 1:
        busy = f"This machine is busy (load {load:.1f} on {os.cpu_count()} cores): expect the times to be off.\n"
        print(busy, file=sys.stderr)
    if args.chip is not None:
        chip = load_chip(args.chip)
    else:
        found = launch.run(measure_rank, {"X": args.ranks}, dtypes, args.repeats, checked=False)
        chip = combine_ranks(found, platform.node() or "machine")
    if args.out:
        Path(args.out).write_text(toml(chip))
    print(chip_table(chip) + (f"\nwrote {args.out}" if args.out else ""), flush=True)
    if not args.no_check:
        checks = check_steps(SETTINGS, chip, args.ranks, min(args.repeats, 9))
        m, run = SETTINGS.model, f"{SETTINGS.batch} x {SETTINGS.seq} tokens in {SETTINGS.microbatches} microbatches"
        print(f"\nA Transformer's step, L={m.L} D={m.D}, {run}, predicted from these numbers and run\n{table(checks)}")
    return 0
