"""Collective matmuls on a wire of a given speed, beside the collective and the product one after the other.

    python tests/benchmarks/collective_matmul.py [--ranks 2] [--wire 0,100] [--steps 10]

The kernel paces each connection to `--wire` 10^6 bytes a second (0: not at all), as in overlap.py. Of each form and
size, in turn on the same ranks: the product alone, the hops alone, the two calls one after the other, and the
collective matmul; `derived` is what that should take, by the first two. Linux only.
"""

from functools import partial

import torch
from harness import in_turn, medians, on_ranks, slow_wire, speed
from report import machine, options, show

from scaling import collectives as c
from scaling.collectives import rings
from scaling.strategies import collective_matmul as cm

SIZES = {"large": (256, 1024, 4096), "small": (16, 64, 256)}  # B, D, F


def parts(form: str, mesh, size: tuple[int, int, int], ways: int) -> dict:
    """The functions to be timed, of the shards A[B, D_Y] and W."""
    (B, D, F), n = size, mesh.sizes["Y"]
    a, whole, out = torch.randn(B, D // n), torch.randn(B, D), torch.randn(B, F)
    w = torch.randn(D, F // n) if form == "gather" else torch.randn(D // n, F)

    def scattered():
        return rings.reduce_scatter(out.T, mesh, "Y", ways)

    hops, serial, collective = {
        "gather": (
            lambda: rings.all_gather(a, mesh, "Y", ways),
            lambda: c.all_gather("A[B, D_Y] -> A[B, D]", a, mesh) @ w,
            cm.gather_matmul,
        ),
        "scatter": (
            scattered,
            lambda: c.reduce_scatter("Out[B, F] {U_Y} -> Out[B, F_Y]", a @ w, mesh),
            cm.matmul_scatter,
        ),
        "reduce": (
            lambda: rings.all_gather(scattered(), mesh, "Y", ways),
            lambda: c.all_reduce("Out[B, F] {U_Y} -> Out[B, F]", a @ w, mesh),
            cm.matmul_reduce,
        ),
    }[form]
    apart = {"product": partial(torch.matmul, whole if form == "gather" else a, w), "hops": hops, "serial": serial}
    return apart | {"collective": partial(collective, a, w, mesh, ways=ways)}


def derived(form: str, n: int, product: float, hops: float, tiles: int = 2) -> float:
    """Seconds: a block's product cannot be hidden; the others are beside the hops. Of an AllReduce, tile by tile: the
    first tile's sums travel alone, then each tile's beside the gather of the one before, then the last one's gather."""
    block = product / n
    if form != "reduce":
        return block + max(hops, product - block)
    rest = (product - block) / tiles
    return block + max(hops / 2 / tiles, rest) + (tiles - 1) * max(hops / tiles, rest) + hops / 2 / tiles


def measure(mesh, wires: list[float], steps: int) -> dict:
    """{(form, ways, size, wire): seconds of each part}"""
    found = {}
    for form in ("gather", "scatter", "reduce"):
        for ways in (1, 2) if mesh.size() > 2 else (1,):  # of two devices, both ways are one
            for name, size in SIZES.items():
                timed = parts(form, mesh, size, ways)
                slow_wire(0)
                in_turn(timed, 1)  # all connections are made
                for wire in wires:
                    slow_wire(wire)
                    found[form, ways, name, wire] = in_turn(timed, steps, warmup=1)
    return found


if __name__ == "__main__":
    args, rows = options(__doc__, ranks=2, wire=(0.0, 100.0), steps=10).parse_args(), []
    results = on_ranks(measure, {"Y": args.ranks}, args.wire, args.steps)
    for case in results[0]:
        ms = {part: 1e3 * seconds for part, seconds in medians([rank[case] for rank in results]).items()}
        form, ways, size, wire = case
        should = derived(form, args.ranks, ms["product"], ms["hops"])
        figures = [*(f"{each:.2f}" for each in ms.values()), f"{should:.2f}", f"{ms['collective'] / ms['serial']:.2f}"]
        rows.append([form, ways, size, speed(wire), *figures])
    print(f"{args.ranks} ranks, one thread each, on {machine()}; medians of {args.steps}; B, D, F: {SIZES}\n")
    headers = ["form", "ways", "size", "wire", "product, ms", "hops, ms", "in sequence, ms"]
    headers += ["collective matmul, ms", "derived, ms", "matmul / sequence"]
    show(rows, headers, 4)
