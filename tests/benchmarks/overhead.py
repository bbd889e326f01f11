"""What the notation costs: a typed call against the raw one, and an explicit step against nn.Module's, on one rank.

    python tests/benchmarks/overhead.py [--sizes tiny,default] [--no-compile]

1. Calls. Matrices of 8 x 8, so that the call is all there is. The raw side does the same by hand: it allocates the same
   buffers and calls torch.distributed. Collectives go to torch's "fake" process group, in which nothing is sent and
   nobody waits, so what differs is this project's own Python. Calls that add 5 microseconds or more are named.
2. Steps on one rank and one thread: `data_parallel.forward` and `.backward` with `scaling.optim`, against an nn.Module
   with autograd and torch.optim (fused); and, each compiled by torch.compile as a whole, the explicit step and the
   module (whose update is not compiled). Medians of samples taken in turn.
"""

import itertools
import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
from harness import SIZES, Size, in_turn, seconds_of
from report import machine, ms, options, ratios, show, spread
from versus_torch import OPTIMIZERS, ours, theirs

from scaling.collectives import all_gather, all_reduce, all_to_all, einsum, reduce_scatter
from scaling.launch import keep_freed_memory
from scaling.mesh import Mesh
from scaling.strategies import data_parallel

PRODUCT, ELEMENTS = "A[I, J] * B[J, K] -> C[I, K]", "A[I, J] * B[I, J] -> C[I, J]"
LIMIT = 5  # microseconds that a typed call should add at most
PAIRS = {
    "explicit / module": ("explicit", "module"),
    "both compiled": ("compiled", "compiled module"),
    "compiled / explicit": ("compiled", "explicit"),
}


def calls() -> list[tuple[str, float, float]]:
    """(name, microseconds raw, typed) of each call, on two ranks of which this process is one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = Mesh({"X": 2})
    mesh._groups["X",] = replace(mesh.group(("X",)), backend="gloo")  # take the way that gloo's groups take
    pg = mesh.group(("X",)).pg
    a, b, out = torch.randn(8, 8), torch.randn(8, 8), torch.empty(8, 8)

    def gathered():
        blocks = a.new_empty((2, 8, 8))
        dist.all_gather(list(blocks), a, group=pg)
        return blocks.flatten(0, 1)

    def reduced():
        total = a.clone()
        dist.all_reduce(total, group=pg)
        return total

    def scattered():
        received = torch.empty_like(a)
        dist.all_to_all_single(received, a, group=pg)
        return received.unflatten(0, (2, 4)).sum(0)

    def exchanged():
        sent = a.unflatten(1, (2, 4)).movedim(1, 0).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=pg)
        return received.flatten(0, 1)

    pairs = {
        "einsum": (lambda: a @ b, lambda: einsum(PRODUCT, a, b)),
        "einsum, one turned": (lambda: a.t() @ b, lambda: einsum("A[J, I] * B[J, K] -> C[I, K]", a, b)),
        "einsum, result turned": (lambda: (a @ b).t(), lambda: einsum("A[I, J] * B[J, K] -> C[K, I]", a, b)),
        "einsum into out": (lambda: torch.mm(a, b, out=out), lambda: einsum(PRODUCT, a, b, out=out)),
        "einsum, not a matmul": (lambda: torch.einsum("ij,ij->ij", a, b), lambda: einsum(ELEMENTS, a, b)),
        "all_gather": (gathered, lambda: all_gather("A[I_X, J] -> A[I, J]", a, mesh)),
        "all_reduce": (reduced, lambda: all_reduce("A[I, J] {U_X} -> A[I, J]", a, mesh)),
        "reduce_scatter": (scattered, lambda: reduce_scatter("A[I, J] {U_X} -> A[I_X, J]", a, mesh)),
        "all_to_all": (exchanged, lambda: all_to_all("A[I_X, J] -> A[I, J_X]", a, mesh)),
    }
    try:
        # The least of several means, which a busy machine disturbs least.
        return [(name, *(1e6 * seconds_of(call, 20, 0.01, min) for call in pair)) for name, pair in pairs.items()]
    finally:
        dist.destroy_process_group()


def steps(size: Size, optimizer: str, count: int, compiled: bool) -> dict[str, list[float]]:
    """Of `ours`, and of an nn.Module with autograd and torch.optim; compiled: its forward and backward."""
    given = Mesh({"X": 1}), size, optimizer
    sides = {"explicit": ours(data_parallel, *given), "module": theirs("module", *given, tuned=True)}
    if compiled:
        torch._dynamo.reset()
        sides["compiled"] = ours(data_parallel, *given, compiled=True)
        sides["compiled module"] = theirs("module", *given, tuned=True, compiled=True)
    return in_turn(sides, count, size.repeat)


if __name__ == "__main__":
    parser = options(__doc__, sizes=reversed(SIZES), optimizers=OPTIMIZERS, steps=20)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: it needs a C++ compiler")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch's own code
    keep_freed_memory()
    measured = calls()
    print(f"One rank, one thread, on {machine()}; {args.steps} samples of each side.\n")
    lines = [[name, *(f"{us:.2f}" for us in (raw, typed, typed - raw))] for name, raw, typed in measured]
    show(lines, ["call", "raw, us", "typed, us", "added, us"])
    pairs, lines, headers = list(PAIRS.items())[: 1 if args.no_compile else None], [], []
    for label, optimizer in itertools.product(args.sizes, args.optimizers):
        seconds = steps(SIZES[label], optimizer, args.steps, not args.no_compile)
        spreads = [spread(ratios(seconds[mine], seconds[other])) for _, (mine, other) in pairs]
        lines.append([label, optimizer, *(ms(times, 2) for times in seconds.values()), *spreads])
        headers = ["size", "optimizer", *(f"{side}, ms" for side in seconds), *(name for name, _ in pairs)]
    show(lines, headers, 2)
    if slow := [name for name, raw, typed in measured if typed - raw >= LIMIT]:
        print(f"These typed calls add {LIMIT} microseconds or more: {', '.join(slow)}")
