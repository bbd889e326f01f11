"""Measure the rates of each rank of this machine while all others do the same, because they share cores and memory.

Everything is measured as it occurs in a training step: operands are not in the caches, since others were used in the
meantime, and each rank has computed before a collective, so that the ranks do not arrive together. Of repeated times
the lower quartile counts, since other work on the machine only adds to them; of ranks the slowest counts.
"""

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy
import torch
import torch.nn.functional as F

from scaling import collectives
from scaling.configs import get
from scaling.hardware import Chip, Efficiency, Measured
from scaling.measure.network import LINES, barrier, laps, lower_quartile
from scaling.mesh import Mesh
from scaling.models import pointwise
from scaling.plan.transformer_step import transformer_step
from scaling.trace.count import attention_flops
from scaling.train.counting import count
from scaling.train.settings import DTYPES, Settings

PRODUCTS = (  # a layer's products, forward and backward, and the dims of their operands
    ("In[B, D] * W[D, F] -> Tmp[B, F]", "BD", "DF"),
    ("W[F, D] * Act[B, F] -> Out[B, D]", "FD", "BF"),
    ("dOut[B, D] * W[F, D] -> dAct[B, F]", "BD", "FD"),
    ("dOut[B, D] * Act[B, F] -> dW[F, D]", "BD", "BF"),
    ("W[D, F] * dTmp[B, F] -> dIn[B, D]", "DF", "BF"),
    ("In[B, D] * dTmp[B, F] -> dW[D, F]", "BD", "BF"),
)
# B, D, F:
SHAPES = ((16, 32, 32), (64, 128, 256), (128, 256, 1024), (256, 512, 512), (256, 512, 2048), (1024, 128, 512))
VOLUMES = (2**10, 2**14, 2**17, 2**19, 2**21, 2**23)  # bytes V of the measured arrays: 1 kB to 8 MB
POOL, MOST, ROUNDS = 2**26, 64, 4  # bytes of operands used in turn, and their number at most; collectives in a row
BUSY = 256, 512, 768  # B, D, F of the product that is computed before a collective
GUESS = 3e-5, 5e10  # seconds of a call, FLOPs/s: they size each timing of products to about 20 ms
ATTENTION = 2, 256, 8, 32  # B, T, N, H
CALLS = ("Product", "Pointwise", "Activation")  # operations that cost at least a call
SMALL = Settings(get("tiny").with_(L=2, D=16, F=32, N=2, K=2, H=8, V=32), "", "", batch=1, seq=8)
Points = list[tuple[float, float]]  # (bytes, seconds)


@dataclass(frozen=True)
class RankMeasured:
    """The measurements of one rank.

    Attributes:
        flops: FLOPs/s of matmuls by dtype, while all ranks compute.
        alone: FLOPs/s while the other ranks wait.
        attention: FLOPs/s of attention.
        memory: Bytes/s through memory.
        call: Seconds of an operation that does next to nothing.
        times: [(amount, seconds)] by (operation, ranks).
        idle: The same for collectives, while the ranks outside the group stand still.
    """

    flops: dict[str, float]
    alone: float
    attention: float
    memory: float
    call: float
    times: dict[tuple[str, int], Points]
    idle: dict[tuple[str, int], Points] = field(default_factory=dict)


def timed(f: Callable, mesh, repeats: int, times: int = 1) -> float:
    """Return the seconds of one call, if each rank makes `times` calls in a row: the lower quartile over repeated rows.

    All ranks begin together, and a row lasts until all are done, since ranks that share cores and run first end early.
    """
    (seconds,) = laps([lambda: [f() for _ in range(times)]], mesh, repeats, to_the_last=True, unseen=2)
    return lower_quartile(seconds) / times


def added(f: Callable, more: Callable, mesh, repeats: int) -> float:
    """Return the seconds that `more` takes longer than f: the median over pairs of calls, one right after the other.

    Each call lasts until all ranks are done, as in `timed`. Otherwise a collective, which all ranks end together, would
    also be charged for their different ends of f.
    """
    pairs = zip(*laps([f, more], mesh, repeats, to_the_last=True), strict=True)
    return max(1e-6, statistics.median(longer - short for short, longer in pairs))


def measure_rank(
    mesh, dtypes: Sequence[str], repeats: int, volumes: Sequence[int] = VOLUMES, shapes: Sequence = SHAPES
) -> RankMeasured:
    """Measure everything, on all ranks at once.

    `volumes` are the sizes of the arrays in bytes, `shapes` the B, D, F of the products.
    """
    n, found, idle = mesh.size(), {}, {}
    rates, product = {}, []
    for dtype in dtypes:
        rates[dtype], points = matmuls(mesh, dtype, repeats, shapes)
        product = points if dtype == dtypes[0] else product
    found["Product", n] = product
    for d in (d for d in range(2, n + 1) if n % d == 0):
        groups = Mesh({"W": n // d, "X": d})
        found |= times(groups, repeats, volumes)
        idle |= times(groups, repeats, volumes, of_one=True) if d < n else {}
    found["Pointwise", n] = bytewise(mesh, repeats, between_matmuls, volumes)
    found["Activation", n] = bytewise(mesh, repeats, curved, volumes)
    own = [Mesh({"X": 1}, ranks=[rank]) for rank in range(n)][mesh.rank]
    single, attending = alone(mesh, own, dtypes[0], repeats), attention(mesh, dtypes[0], repeats)
    memory = fit(found["Pointwise", n])[1]
    return RankMeasured(rates, single, attending, memory, _call(mesh, own, repeats), found, idle)


def _call(mesh, own, repeats: int) -> float:
    """Return the seconds of an operation with the Python, the views and the tapes around it.

    They are measured on a Transformer's step that is so small that nothing else takes time.
    """
    did = count(SMALL, own.sizes, backend="abstract", documents=False)
    calls = did.products.number + did.attention.number + did.plain.number + did.curved.number
    return timed(transformer_step(SMALL, own), mesh, 3 * repeats, 2) / calls


def matmuls(mesh, dtype: str, repeats: int, shapes: Sequence) -> tuple[float, Points]:
    """Measure the six products of a layer.

    Returns (FLOPs/s of a rank, [(bytes of a product, its seconds beyond the time of its FLOPs)]).
    """
    rows = []
    for B, D, F_ in shapes:
        dims = {"B": B, "D": D, "F": F_}
        cases = [(line, *(torch.randn(*(dims[d] for d in x)).to(DTYPES[dtype]) for x in ab)) for line, *ab in PRODUCTS]
        nbytes = sum(a.nbytes + b.nbytes for _, a, b in cases) + 2 * (B * D + B * F_ + D * F_) * DTYPES[dtype].itemsize
        often = 1 + int(0.02 / (6 * (GUESS[0] + 2 * B * D * F_ / GUESS[1])))
        seconds = timed(lambda cases=cases: [collectives.einsum(*case) for case in cases], mesh, repeats, often)
        rows.append((2 * B * D * F_, nbytes / 6, seconds / 6))
    call, rate, memory = fit_prices([(1.0, flops, nbytes) for flops, nbytes, _ in rows], [t for *_, t in rows])
    return 1 / rate, [(nbytes, call + memory * nbytes) for _, nbytes, _ in rows]


def alone(mesh, own, dtype: str, repeats: int) -> float:
    """Return the FLOPs/s of the first rank on its `own` mesh while the others wait for it; theirs are 0."""
    B, D, F_ = SHAPES[4]
    a, b = torch.randn(B, D).to(DTYPES[dtype]), torch.randn(D, F_).to(DTYPES[dtype])
    rate = 2 * B * D * F_ / timed(lambda: torch.mm(a, b), own, repeats) if mesh.rank == 0 else 0.0
    barrier(mesh)
    return rate


def attention(mesh, dtype: str, repeats: int) -> float:
    """Return the FLOPs/s of a rank in causal attention, forward and backward."""
    B, T, N, H = ATTENTION
    Q, K, V = heads = [torch.randn(B, N, T, H).to(DTYPES[dtype]).requires_grad_() for _ in range(3)]
    dO = torch.ones(B, N, T, H, dtype=DTYPES[dtype])

    def once():
        torch.autograd.grad(F.scaled_dot_product_attention(Q, K, V, is_causal=True), heads, dO)

    return 3.5 * attention_flops("", heads[:2]) / timed(once, mesh, repeats, 2)


def bytewise(mesh, repeats: int, f: Callable, volumes: Sequence[int]) -> Points:
    """Return (bytes read and written, seconds) of a call, for arrays of several sizes."""
    found = []
    for V in (volumes[0], *volumes[len(volumes) // 2 :]):
        pool = torch.randn(min(MOST, POOL // V), V // 4).unbind()
        moved, calls = f(pool[0], None)

        def once(pool=pool):
            for x in pool:
                f(x, pool[0])

        found.append((moved / calls, timed(once, mesh, repeats, 1 + 2**24 // (V * len(pool))) / calls / len(pool)))
    return found


def between_matmuls(x: torch.Tensor, y: torch.Tensor | None) -> tuple[int, int]:
    """Run elementwise operations as between matmuls if y is given; return their (bytes, calls)."""
    if y is not None:
        torch.mul(x, y)  # into newly allocated memory, as in most steps
        torch.add(x, y)
        y.add_(x)
    return 9 * x.nbytes, 3


def curved(x: torch.Tensor, y: torch.Tensor | None) -> tuple[int, int]:
    """Run an activation and its derivative if y is given; return their (bytes, calls)."""
    if y is not None:
        pointwise.act_vjp(x, pointwise.act(x, "gelu"), "gelu")
    return (2 + 3) * x.nbytes, 2


def times(mesh, repeats: int, volumes: Sequence[int], of_one: bool = False) -> dict[tuple[str, int], Points]:
    """Return (V, seconds) of each collective over X.

    If the mesh has W, too, all groups along X run at once, or with `of_one` the first alone.
    """
    n, found = mesh.sizes["X"], {}
    idle = of_one and mesh.coord["W"] > 0
    a, b = torch.randn(BUSY[0], BUSY[1]), torch.randn(BUSY[1], BUSY[2])

    def work():
        for _ in range(0 if idle else ROUNDS):
            torch.mm(a, b)

    def record(op: str, make: Callable, call: Callable) -> None:
        found[op, n] = []
        for V in volumes:
            pool = [make(V) for _ in range(ROUNDS)]

            def both(pool=pool):
                for x in () if idle else pool:
                    torch.mm(a, b)
                    call(x)

            found[op, n].append((V, added(work, both, mesh, repeats) / ROUNDS))

    for op, (line, call) in LINES.items():
        rows = 64 if op in ("ReduceScatter", "AllReduce") else 64 // n
        record(op, lambda V, r=rows: torch.ones(r, max(n, V // 256)), lambda x, f=call, line=line: f(line, x, mesh))
    ring = [(i, (i + 1) % n) for i in range(n)]
    record(
        "CollectivePermute", lambda V: torch.ones(V // 4), lambda x: collectives.ppermute("A[I]", x, mesh, "X", ring)
    )
    return found


def fit_prices(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Fit prices > 0 of the amounts in each row, by least squares of the relative error.

    Amounts whose price would be negative are left out.
    """
    A, t, least = numpy.array(rows, float), numpy.array(seconds, float), 1e-18
    A = A / t[:, None]
    used = list(range(A.shape[1]))
    while True:
        found = numpy.linalg.lstsq(A[:, used], numpy.ones(len(t)), rcond=None)[0]
        if (found > 0).all() or len(used) == 1:
            break
        used.pop(int(found.argmin()))
    prices = numpy.full(A.shape[1], least)
    prices[used] = numpy.maximum(found, least)
    return [float(price) for price in prices]


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (latency, bandwidth), both > 0, with seconds = latency + V / bandwidth."""
    call, each = fit_prices([(1.0, V) for V, _ in points], [t for _, t in points])
    return max(call, 1e-9), min(1 / each, 1e18)


def combine_ranks(ranks: Sequence[RankMeasured], name: str) -> Chip:
    """Return one chip from all ranks' measurements; each figure is the slowest rank's."""
    world, first = len(ranks), ranks[0]
    measured, memory = [], min(r.memory for r in ranks)
    for alone in (False, True):
        each = [r.idle if alone else r.times for r in ranks]
        for op, n in each[0]:
            points = [(V, max(rank[op, n][i][1] for rank in each)) for i, (V, _) in enumerate(each[0][op, n])]
            latency, bandwidth = fit(points)
            latency = max(r.call for r in ranks) if op in CALLS else latency
            bandwidth = bandwidth if op in CALLS else min(bandwidth, memory)  # what arrives is written to memory
            measured.append(Measured(op, n, latency, bandwidth, alone))
    flops = {dtype: min(r.flops[dtype] for r in ranks) for dtype in first.flops}
    own = next(iter(flops.values()))
    measured += [Measured("Matmul", world, 1e-9, own), Measured("Matmul", 1, 1e-9, max(r.alone for r in ranks))]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Chip(
        name=name,
        kind="cpu",
        source=f"scaling.measure: one of {world} ranks of {platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}",
        peaks=tuple(flops.items()),
        hbm_bytes=total / world,
        hbm_bw=memory,
        measured=tuple(measured),
        efficiency=Efficiency(attention=min(1.0, min(r.attention for r in ranks) / own)),
    )
