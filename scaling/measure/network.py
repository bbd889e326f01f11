"""Measure each collective's bandwidth by axis and size, and name slow ranks: `python -m scaling.measure network`.

For example, `--mesh X=2,Y=2`. Bus bandwidth is the bytes that a rank must send, divided by the time. So collectives and
numbers of ranks compare with each other and with a link's nominal figure. All groups along an axis run at once, as they
do in training.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from scaling import collectives, launch
from scaling.common.console import Parser, complaining, folder, integer, number, table
from scaling.cost.lines import share_of_sent
from scaling.spec import format_axes
from scaling.spec.sizes import format_sizes, parse_mesh

LINES = {
    "AllGather": ("A[I_X, J] -> A[I, J]", collectives.all_gather),
    "ReduceScatter": ("A[I, J] {U_X} -> A[I_X, J]", collectives.reduce_scatter),
    "AllReduce": ("A[I, J] {U_X} -> A[I, J]", collectives.all_reduce),
    "AllToAll": ("A[I_X, J] -> A[I, J_X]", collectives.all_to_all),
}
SIZES = (2**16, 2**20, 2**24)  # bytes V of the gathered or unreduced array


def barrier(mesh) -> None:
    """Return when every rank of the mesh has arrived."""
    if axes := [axis for axis, size in mesh.sizes.items() if size > 1]:
        collectives.all_reduce(f"N[] {{U_{format_axes(axes)}}} -> N[]", torch.zeros((), device=mesh.device), mesh)


def laps(fs: Sequence[Callable], mesh, rounds: int, to_the_last: bool = False, unseen: int = 1) -> list[list[float]]:
    """Return for each function the seconds that it took in each round, if all ranks begin it together.

    The functions take turns, so that other work on the machine affects all of them alike.

    Args:
        fs: The functions.
        mesh: The mesh of the ranks.
        rounds: The number of rounds.
        to_the_last: Whether a call lasts until all ranks are done.
        unseen: The number of rounds before those, which are not timed.
    """
    found: list[list[float]] = [[] for _ in fs]
    for turn in range(unseen + rounds):
        for f, seconds in zip(fs, found, strict=True):
            barrier(mesh)
            start = time.perf_counter()
            f()
            if mesh.device.type == "cuda":
                torch.cuda.synchronize()
            if to_the_last:
                barrier(mesh)
            seconds += [time.perf_counter() - start] if turn >= unseen else []
    return found


def lower_quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile of times, since other work on the machine can only lengthen them."""
    return sorted(seconds)[len(seconds) // 4]


def rates(mesh, sizes, repeats: int) -> dict[tuple[str, str, int], float]:
    """Return {(axis, op, V): this rank's median seconds}."""
    found = {}
    for axis, n in mesh.sizes.items():
        for op, (line, call) in LINES.items() if n > 1 else ():
            text = line.replace("X", axis)
            for V in sizes:
                rows = n if "{U" in line else 1
                columns = max(n, V // 4 // n // n * n)
                x = torch.ones(rows, columns, device=mesh.device)
                found[axis, op, V] = statistics.median(laps([partial(call, text, x, mesh)], mesh, repeats)[0])
    return found


def rank_alone(mesh, folder: str) -> tuple[float, float]:
    """Return this rank's own (bytes/s of memory, bytes/s to the disk), which reveal a slow host or disk."""
    x, file = torch.ones(2**22, device=mesh.device), Path(folder) / f".measure-{mesh.rank}"
    began = time.perf_counter()
    for _ in range(5):
        x = x + 1
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    memory = 5 * 2 * x.nbytes / (time.perf_counter() - began)
    began = time.perf_counter()
    try:
        with open(file, "wb") as out:
            out.write(bytes(2**24))
            out.flush()
            os.fsync(out.fileno())
        return memory, 2**24 / (time.perf_counter() - began)
    finally:
        file.unlink(missing_ok=True)


def _measured(mesh, sizes, repeats: int, folder: str):
    return rates(mesh, sizes, repeats), rank_alone(mesh, folder)


def slow(values: list[float], what: str) -> list[str]:
    """Return a line for each rank that has less than half of the median of all."""
    usual = statistics.median(values)
    return [f"rank {r}: {what} {v / 1e9:.2f} GB/s, the median is {usual / 1e9:.2f}" for r, v in enumerate(values)
            if v < usual / 2]  # fmt: skip


def _report(results: list, sizes: dict[str, int], link: float | None) -> str:
    """Return the table of the slowest rank's rates, and the ranks that are slow when measured alone."""
    rows = []
    for axis, op, V in results[0][0]:
        took = max(times[axis, op, V] for times, _ in results)
        over, under = share_of_sent(op, sizes[axis])
        rate = V * over / under / took
        share = [f"{rate / link:.0%}"] if link else []
        rows.append([axis, op, f"{V:,}", f"{took * 1e6:,.0f}", f"{rate / 1e9:.2f}", *share])
    head = ["axis", "collective", "V bytes", "us", "bus GB/s", *(["of the link"] if link else [])]
    text = table(rows, head)
    named = slow([own[0] for _, own in results], "memory") + slow([own[1] for _, own in results], "disk")
    return "\n".join([text, *(named or ["no rank's memory or disk is slow beside the others'"])])


@complaining(ValueError, OSError, launch.RankError)
def main(argv=None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="python -m scaling.measure network", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mesh", default="X=2", help="mesh axes and their sizes (default X=2)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="device of the ranks (default cpu)")
    parser.add_argument("--repeats", type=integer(1, 10**6), default=9, help="repetitions per size (default 9)")
    parser.add_argument(
        "--link", type=number(1e-6), help="nominal bandwidth of a link in GB/s, each way, to compare with"
    )
    parser.add_argument("--folder", type=folder, default=".", help="a folder on the disk to be timed (default .)")
    args = parser.parse_args(argv)
    sizes = parse_mesh(args.mesh)
    if math.prod(sizes.values()) < 2:
        raise ValueError(f"a mesh of {format_sizes(sizes)} has no network\n  fix: give --mesh with two ranks or more")
    results = launch.run(_measured, sizes, SIZES, args.repeats, args.folder, device=args.device, checked=False)
    print(_report(results, sizes, args.link * 1e9 if args.link else None))
    return 0
