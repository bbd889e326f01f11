"""Calibration: what this machine does, as a chip file that the cost model reads; and how well that predicts.

    python -m scaling.measure --out machine.toml
    python -m scaling.plan --model my.toml --chip machine.toml --chips 2 --batch 64k --dtype fp32

All ranks measure at once, as they will run: cores and memory are shared. Of repeated times the lower quartile counts
(whatever else the machine does only adds to them), of ranks the slowest. Then the step of each strategy is predicted
from the file alone, run, and the error printed.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from tabulate import tabulate

from scaling import collectives, launch
from scaling.console import integer, output
from scaling.hardware import Chip, Measured, load_chip
from scaling.models import pointwise
from scaling.plan.layer import DTYPES
from scaling.plan.predict import Prediction, Size, predict, shards, step
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel

LINES = {
    "AllGather": ("A[I_X, J] -> A[I, J]", collectives.all_gather),
    "ReduceScatter": ("A[I, J] {U_X} -> A[I_X, J]", collectives.reduce_scatter),
    "AllReduce": ("A[I, J] {U_X} -> A[I, J]", collectives.all_reduce),
    "AllToAll": ("A[I_X, J] -> A[I, J_X]", collectives.all_to_all),
}
PRODUCTS = (  # of a layer, forward and backward; the dims of a rank's shards
    ("In[B, D] * W[D, F] -> Tmp[B, F]", "BD", "DF"),
    ("W[F, D] * Act[B, F] -> Out[B, D]", "FD", "BF"),
    ("dOut[B, D] * W[F, D] -> dAct[B, F]", "BD", "FD"),
    ("dOut[B, D] * Act[B, F] -> dW[F, D]", "BD", "BF"),
    ("W[D, F] * dTmp[B, F] -> dIn[B, D]", "DF", "BF"),
    ("In[B, D] * dTmp[B, F] -> dW[D, F]", "BD", "BF"),
)
VOLUMES = tuple(4**i * 1024 for i in range(1, 8))  # bytes V of the collectives measured: 4 kB to 16 MB
SIZES = (Size(4, 512, 512, 2048), Size(8, 256, 512, 2048), Size(4, 128, 512, 512), Size(4, 512, 256, 1024))
MESHES = (
    ("DP", data_parallel, {"X": 0}),
    ("FSDP", fsdp, {"X": 0}),
    ("TP", tensor_parallel, {"Y": 0}),
    ("FSDP+TP", fsdp_tp, {"X": 0, "Y": 1}),
    ("FSDP+TP", fsdp_tp, {"X": 1, "Y": 0}),
)


def timed(f: Callable, mesh, repeats: int) -> float:
    """Seconds of a call, the lower quartile of repeated ones; all ranks begin each together."""
    seconds = []
    for i in range(repeats + 2):
        barrier(mesh)
        start = perf_counter()
        f()
        seconds += [perf_counter() - start] if i >= 2 else []
    return sorted(seconds)[len(seconds) // 4]


def barrier(mesh) -> None:
    axes = "".join(mesh.sizes)
    if mesh.size() > 1:
        collectives.all_reduce(f"N[] {{U_{axes}}} -> N[]", torch.zeros(()), mesh)


def matmul_rate(mesh, dtype: str, repeats: int, B: int = 256, D: int = 512, F: int = 2048) -> float:
    """FLOPs/s of a rank over the six products of a layer."""
    dims = {"B": B, "D": D, "F": F}
    cases = []
    for line, a, b in PRODUCTS:
        cases.append((line, *(torch.randn(*(dims[d] for d in x)).to(DTYPES[dtype]) for x in (a, b))))
    seconds = timed(lambda: [collectives.einsum(*case) for case in cases], mesh, repeats)
    return 6 * 2 * B * D * F / seconds


def memory_rate(mesh, repeats: int, n: int = 2**20) -> float:
    """Bytes/s through memory of what lies between matmuls: a pointwise op on 4 MB, its result newly allocated."""
    x = torch.randn(n)
    return 2 * 4 * n / timed(lambda: torch.relu(x), mesh, repeats)


def times(mesh, repeats: int, volumes: Sequence[int] = VOLUMES) -> dict[str, list[tuple[int, float]]]:
    """(V, seconds) of each collective over the mesh's one axis; of what lies between matmuls, V bytes of one array."""
    n, found = mesh.size(), {}

    def record(op: str, make: Callable, call: Callable) -> None:
        found[op] = []
        for V in volumes:
            x = make(V)
            found[op].append((V, timed(lambda x=x: call(x), mesh, repeats)))

    for op, (line, call) in LINES.items() if n > 1 else ():
        rows = 64 if op in ("ReduceScatter", "AllReduce") else 64 // n
        record(op, lambda V, rows=rows: torch.ones(rows, V // 256), lambda x, f=call, line=line: f(line, x, mesh))
    if n > 1:
        ring = [(i, (i + 1) % n) for i in range(n)]
        record("CollectivePermute", flat, lambda x: collectives.ppermute("A[I]", x, mesh, "X", ring))
    record("Activation", flat, lambda x: pointwise.act_vjp(x, pointwise.act(x, "gelu"), "gelu"))
    record("Update", lambda V: (flat(V), flat(V)), lambda x: x[0].sub_(x[1], alpha=1e-4))
    return found


def flat(V: int) -> torch.Tensor:
    return torch.randn(V // 4)


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(latency, bandwidth) with seconds = latency + V / bandwidth, by least squares of the relative error, both > 0."""
    rows = [(1 / t, v / t) for v, t in points]
    aa, ab, bb = (sum(f(r) for r in rows) for f in (lambda r: r[0] ** 2, lambda r: r[0] * r[1], lambda r: r[1] ** 2))
    a, b = sum(r[0] for r in rows), sum(r[1] for r in rows)
    det = aa * bb - ab * ab
    latency, slope = ((a * bb - b * ab) / det, (b * aa - a * ab) / det) if det > 0 else (0.0, b / bb)
    if latency <= 0:
        latency, slope = 1e-7, b / bb
    if slope <= 0:
        latency, slope = a / aa, 1e-15
    return latency, 1 / slope


@dataclass(frozen=True)
class RankMeasured:
    """What one rank measured: FLOPs/s by dtype, bytes/s through memory, (V, seconds) by op."""

    flops: dict[str, float]
    memory: float
    times: dict[str, list[tuple[int, float]]]


def measure_rank(mesh, dtypes: Sequence[str], repeats: int) -> RankMeasured:
    rates = {dtype: matmul_rate(mesh, dtype, repeats) for dtype in dtypes}
    return RankMeasured(rates, memory_rate(mesh, repeats), times(mesh, repeats))


def combine(ranks: Sequence[RankMeasured], name: str) -> Chip:
    """One chip of all ranks' measurements: the slowest rank of each."""
    world = len(ranks)
    measured = []
    for op, first in ranks[0].times.items():
        points = [(V, max(r.times[op][i][1] for r in ranks)) for i, (V, _) in enumerate(first)]
        measured.append(Measured(op, world, *fit(points)))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Chip(
        name=name,
        kind="cpu",
        source=f"scaling.measure: one of {world} ranks of {platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}",
        peaks=tuple((dtype, min(r.flops[dtype] for r in ranks)) for dtype in ranks[0].flops),
        hbm_bytes=total / world,
        hbm_bw=min(r.memory for r in ranks),
        measured=tuple(measured),
    )


def toml(chip: Chip) -> str:
    """The chip as a file that `scaling.hardware.load_chip` reads."""
    lines = [f'name = "{chip.name}"', f'kind = "{chip.kind}"', f'source = "{chip.source}"']
    lines += [f"hbm_bytes = {chip.hbm_bytes:.6g}", f"hbm_bw = {chip.hbm_bw:.6g}", "", "[flops]"]
    lines += [f"{dtype} = {rate:.6g}" for dtype, rate in chip.peaks]
    for m in chip.measured:
        lines += ["", "[[measured]]", f'op = "{m.op}"', f"ranks = {m.ranks}"]
        lines += [f"latency = {m.latency:.6g}", f"bandwidth = {m.bandwidth:.6g}"]
    return "\n".join(lines) + "\n"


def step_seconds(mesh, module, size: Size, repeats: int, dtype: str = "fp32") -> float:
    """Seconds of the strategy's training step, on this rank."""
    make = torch.Generator().manual_seed(mesh.rank)
    scale = size.D**-0.5
    params, In = shards(
        module, size, mesh, lambda shape: (torch.randn(shape, generator=make) * scale).to(DTYPES[dtype])
    )
    return timed(lambda: step(module, params, In, mesh), mesh, repeats)


@dataclass(frozen=True)
class Check:
    """A strategy's step as predicted and as measured."""

    name: str
    mesh: dict[str, int]
    size: Size
    prediction: Prediction
    seconds: float

    @property
    def error(self) -> float:
        """Relative: +0.2 if the prediction is 20% too long."""
        return self.prediction.total / self.seconds - 1


def check(chip: Chip, ranks: int, sizes: Sequence[Size] = SIZES, repeats: int = 7, dtype: str = "fp32") -> list[Check]:
    """Predict and run the step of each strategy over so many ranks."""
    checks = []
    for name, module, axes in MESHES:
        mesh = {axis: n or ranks for axis, n in axes.items()}

        def job(mesh, module=module):
            return [step_seconds(mesh, module, size, repeats, dtype) for size in sizes]

        per_rank = launch.run(job, mesh, checked=False)
        for size, seconds in zip(sizes, (max(times) for times in zip(*per_rank, strict=True)), strict=True):
            checks.append(Check(name, mesh, size, predict(module, size, mesh, chip, dtype), seconds))
    return checks


def checks_table(checks: Sequence[Check]) -> str:
    rows = []
    for c in checks:
        p, comms = c.prediction, sum(s for _, s in c.prediction.comms)
        mesh = ",".join(f"{axis}={n}" for axis, n in c.mesh.items())
        times = [f"{1e3 * s:.1f}" for s in (p.math, p.between, comms, p.total, c.seconds)]
        rows.append((c.name, mesh, str(c.size), *times, f"{c.error:+.0%}"))
    head = ["strategy", "mesh", "size", "matmuls", "between", "comms", "predicted ms", "measured ms", "error"]
    return tabulate(rows, head, "simple", disable_numparse=True)


def median_error(checks: Sequence[Check]) -> float:
    return statistics.median(abs(c.error) for c in checks)


def chip_table(chip: Chip) -> str:
    rows = [(f"matmul {dtype}", f"{rate / 1e9:,.1f} GFLOPs/s a rank", "") for dtype, rate in chip.peaks]
    rows += [("memory", f"{chip.need('hbm_bw') / 1e9:,.1f} GB/s a rank", "")]
    rows += [(m.op, f"{m.bandwidth / 1e9:,.2f} GB/s (V)", f"{m.latency * 1e6:,.0f} us") for m in chip.measured]
    return tabulate(rows, ["", "rate", "latency"], "simple", disable_numparse=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scaling.measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=integer(2, 4096), default=2, help="how many, a thread each (default 2)")
    parser.add_argument("--dtypes", default="fp32,bf16", help=f"of matmuls: {', '.join(DTYPES)} (default fp32,bf16)")
    parser.add_argument("--repeats", type=integer(1, 10**6), default=15, help="per measurement (default 15)")
    parser.add_argument("--out", type=output, metavar="FILE", help="write the chip file, such as machine.toml")
    parser.add_argument("--chip", metavar="FILE", help="measure nothing: check the predictions of this chip file")
    parser.add_argument("--no-check", action="store_true", help="do not run the strategies")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    args = parser.parse_args(arguments)
    try:
        if unknown := set(args.dtypes.split(",")) - DTYPES.keys():
            raise ValueError(f"unknown dtype {', '.join(sorted(unknown))}: one of {', '.join(DTYPES)}")
        if (load := os.getloadavg()[0]) > (os.cpu_count() or 1) + 1:
            busy = f"This machine is busy (load {load:.1f} on {os.cpu_count()} cores): expect the times to be off.\n"
            print(busy, file=sys.stderr)
        if args.chip:
            chip = load_chip(args.chip)
        else:
            found = launch.run(measure_rank, {"X": args.ranks}, args.dtypes.split(","), args.repeats, checked=False)
            chip = combine(found, platform.node() or "machine")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.out:
        Path(args.out).write_text(toml(chip))
    if not args.json:
        print(chip_table(chip) + (f"\nwrote {args.out}" if args.out else ""), flush=True)
    checks = [] if args.no_check else check(chip, args.ranks, repeats=args.repeats)
    if args.json:
        print(json.dumps(as_dict(chip, checks), indent=1))
    elif checks:
        print("\nA training step of each strategy, predicted from these numbers and run\n" + checks_table(checks))
        print(f"\nmedian error {median_error(checks):.0%}")
    return 0


def as_dict(chip: Chip, checks: Sequence[Check]) -> dict:
    """What was measured, in FLOPs/s, bytes/s and seconds, as --json prints it."""
    collectives = {m.op: {"bandwidth": m.bandwidth, "latency": m.latency} for m in chip.measured}
    steps = [
        {"strategy": c.name, "mesh": c.mesh, "size": asdict(c.size), "predicted": c.prediction.total,
         "measured": c.seconds, "error": c.error}
        for c in checks
    ]  # fmt: skip
    return {"chip": chip.name, "matmul": dict(chip.peaks), "memory": chip.hbm_bw, "collectives": collectives,
            "steps": steps, "median_error": median_error(checks) if checks else None}  # fmt: skip
