"""Parts `nccl`, `shared` and `equal` of gpu.py: what several devices compute is what one device does.

Collectives move whole numbers, so that every sum is exact in every order and dtype, and results are compared bit by
bit with the blocks of the whole array, which every rank knows. Of a derivative, the adjoint: over all ranks together,
<f(x), w> = <x, f^T(w)>, in whole numbers too.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from gpu_strategies import STRATEGIES, pipelined, strategy, whole_transformer

from scaling import collectives
from scaling.common import torch_private
from scaling.mesh import Mesh
from scaling.spec import block_index, parse_line

TIMEOUT = 100.0  # seconds that a rank waits for the others
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
LINES = {
    collectives.all_gather: (
        "A[I_X, J] -> A[I, J]",
        "A[I, J_Y] -> A[I, J]",
        "A[I_YX, J] -> A[I, J]",
        "A[I, J_XY] -> A[I, J]",
    ),
    collectives.all_reduce: ("A[I, J] {U_X} -> A[I, J]", "A[I, J] {U_XY} -> A[I, J]"),
    collectives.reduce_scatter: (
        "A[I, J] {U_X} -> A[I_X, J]",
        "A[I, J] {U_Y} -> A[I, J_Y]",
        "A[I, J] {U_YX} -> A[I_YX, J]",
        "A[I, J] {U_YX} -> A[I, J_YX]",
    ),
    collectives.all_to_all: ("A[I_X, J] -> A[I, J_X]", "A[I, J_YX] -> A[I_YX, J]"),
}
SHAPE = {"I": 64, "J": 48}


class OfNccl(Mesh):
    """A mesh over gloo whose collectives take the ways that they take on NCCL: of CUDA tensors, gloo has only those."""

    def _make_group(self, axes):
        group = super()._make_group(axes)
        return group if group.pg is None else replace(group, backend="nccl")


def join(device: str, shared: bool = False) -> Callable[[dict], Mesh]:
    """Be one of torchrun's ranks, each on a GPU of its own or all on the first; returns what makes a mesh of sizes."""
    if device == "cuda":
        torch.cuda.set_device(0 if shared else int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        how = "gloo" if shared or device == "cpu" else "nccl"
        dist.init_process_group(how, timeout=timedelta(seconds=TIMEOUT))
    return lambda sizes: (OfNccl if shared else Mesh)(sizes, device, timeout=TIMEOUT)


def split(axes: str, ranks: int) -> dict[str, int]:
    """A mesh of these axes, two on the last where there are several."""
    return {axes: ranks} if len(axes) == 1 else {axes[0]: ranks // 2, axes[1]: 2}


def whole_numbers(seed: int, shape, device) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, tuple(shape), generator=g).double().to(device)


def everywhere(value: torch.Tensor) -> float:
    """The sum over all ranks, by torch's own call."""
    total = value.detach().double().reshape(1).clone()
    dist.all_reduce(total)
    return float(total)


# Collectives


def one_line(call: Callable, line: str, mesh: Mesh, mapped: bool = True) -> list[dict]:
    """A collective in every dtype, its vjp by torch.func and by autograd, its jvp, and under vmap."""
    (before,), after = parse_line(line).operands, parse_line(line).result
    shape = [SHAPE[dim] for dim, _ in before.dims]
    terms = [whole_numbers(term, shape, mesh.device) for term in range(mesh.size(before.unreduced))]
    place = block_index(before.unreduced, mesh.coord, mesh.sizes)
    x = terms[place][before.slices(SHAPE, mesh.sizes, mesh.coord)]
    wanted = sum(terms)[after.slices(SHAPE, mesh.sizes, mesh.coord)]
    for dtype in DTYPES:
        found = call(line, x.to(dtype), mesh)
        late = call(line, x.to(dtype), mesh, async_op=True).wait()
        same(f"{line} in {dtype}", found, wanted)
        same(f"{line} in {dtype}, async", late, wanted)

    def f(x):
        return call(line, x, mesh)

    derivatives(f, x, wanted, mesh.rank, line, mapped)
    return [{"kind": call.__name__, "line": line, "off by": 0.0}]


def same(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """ValueError unless both are equal to the bit, in the dtype of `found`."""
    if not torch.equal(found, wanted.to(found.dtype)):
        raise ValueError(f"{what} is off by {(found.double() - wanted).abs().max():.3g}")


def derivatives(f: Callable, x: torch.Tensor, y: torch.Tensor, rank: int, line: str, mapped: bool = True) -> None:
    """ValueError unless vjp, autograd, jvp and vmap of a linear f are what they must be."""
    for draw in range(3):
        w, t = (whole_numbers(1000 * (1 + draw) + 2 * rank + i, like.shape, x.device) for i, like in enumerate((y, x)))
        sent = everywhere((f(t) * w).sum())
        own = t.clone().requires_grad_()
        for way, back in (
            ("vjp", torch.func.vjp(f, t)[1](w)[0]),
            ("autograd", torch.autograd.grad(f(own), own, w)[0]),
        ):
            if everywhere((back * t).sum()) != sent:
                raise ValueError(f"{line}: <x, f^T(w)> by {way} is not <f(x), w> = {sent:.0f}")
        if not torch.equal(torch.func.jvp(f, (x,), (t,))[1], f(t)):
            raise ValueError(f"{line}: its jvp is not the collective of the tangent")
        if mapped and not torch.equal(torch.func.vmap(f)(torch.stack([x, t])), torch.stack([f(x), f(t)])):
            raise ValueError(f"{line}: under vmap it is not the collective of each")


def permuted(mesh: Mesh, axes: str) -> list[dict]:
    """Each block to the next rank along the axes, and the derivatives."""
    n, line = mesh.size(axes), f"A[I_{axes}, J]"
    ring, at = [(i, (i + 1) % n) for i in range(n)], mesh.group(tuple(axes)).index
    blocks = whole_numbers(0, SHAPE.values(), mesh.device).chunk(n)

    def f(x):
        return collectives.ppermute(line, x, mesh, axes, ring)

    same(f"ppermute {line}", f(blocks[at]), blocks[at - 1])
    derivatives(f, blocks[at], blocks[at - 1], mesh.rank, line)
    return [{"kind": "ppermute", "line": line, "off by": 0.0}]


def from_root(name: str, mesh: Mesh) -> list[dict]:
    """Broadcast, Reduce, Scatter and Gather over X, with the last rank along it as the root."""
    n, me = mesh.sizes["X"], mesh.coord["X"]
    parts = [whole_numbers(i, SHAPE.values(), mesh.device) for i in range(n)]
    at_root = float(me == n - 1)
    line, x, y = {
        "broadcast": ("A[I, J] {U_X} -> A[I, J]", parts[me], parts[-1]),
        "reduce": ("A[I, J] {U_X} -> A[I, J] {U_X}", parts[me], sum(parts) * at_root),
        "scatter": ("A[I, J] {U_X} -> A[I_X, J]", parts[me], parts[-1].chunk(n)[me]),
        "gather": ("A[I_X, J] -> A[I, J] {U_X}", parts[0].chunk(n)[me], parts[0] * at_root),
    }[name]

    def f(x):
        return getattr(collectives, name)(line, x, mesh, root=n - 1)

    for dtype in DTYPES:
        same(f"{name} {line} in {dtype}", f(x.to(dtype)), y)
    derivatives(f, x, y, mesh.rank, f"{name} {line}")
    return [{"kind": name, "line": line, "off by": 0.0}]


def largest_of(mesh: Mesh) -> list[dict]:
    line, n = "A[I, J] {U_X} -> A[I, J]", mesh.sizes["X"]
    parts = torch.stack([whole_numbers(i, SHAPE.values(), mesh.device) for i in range(n)])
    same("all_reduce by max", collectives.all_reduce(line, parts[mesh.coord["X"]], mesh, op="max"), parts.amax(0))
    same("all_reduce by min", collectives.all_reduce(line, parts[mesh.coord["X"]], mesh, op="min"), parts.amin(0))
    return [{"kind": "all_reduce", "line": f"{line} by max and min", "off by": 0.0}]


def ragged(mesh: Mesh) -> list[dict]:
    """Rank i along X sends 1 + (i + 2j) % 3 rows to rank j."""
    n, me, line = mesh.sizes["X"], mesh.coord["X"], "x[G_X, E, R, D] -> x[G, E_X, R, D]"
    counts = [[1 + (i + 2 * j) % 3 for j in range(n)] for i in range(n)]
    rows = [whole_numbers(i, (sum(counts[i]), 16), mesh.device) for i in range(n)]
    y = torch.cat([rows[i].split(counts[i])[me] for i in range(n)])

    def f(x):
        return collectives.ragged_all_to_all(line, x, counts[me], [row[me] for row in counts], mesh)

    same(line, f(rows[me]), y)
    derivatives(f, rows[me], y, mesh.rank, line, mapped=False)
    return [{"kind": "ragged_all_to_all", "line": line, "off by": 0.0}]


def messages(mesh: Mesh) -> list[dict]:
    """A message to the next rank along X, which goes round."""
    n, me, line = mesh.sizes["X"], mesh.coord["X"], "A[I, J]"
    parts = [whole_numbers(i, SHAPE.values(), mesh.device) for i in range(n)]
    arriving = collectives.recv(line, torch.empty_like(parts[me]), mesh, "X", (me - 1) % n, async_op=True)
    leaving = collectives.send(line, parts[me], mesh, "X", (me + 1) % n, async_op=True)
    same("recv", collectives.wait(arriving), parts[me - 1])
    collectives.wait(leaving)
    return [{"kind": "send and recv", "line": line, "off by": 0.0}]


def in_a_graph(mesh: Mesh) -> list[dict]:
    """All of them in one graph of torch.compile, forward and backward."""
    axis = next(iter(mesh.sizes))

    def f(x):
        x = collectives.all_gather(f"A[I_{axis}, J] -> A[I, J]", x, mesh)
        x = collectives.all_reduce(f"A[I, J] {{U_{axis}}} -> A[I, J]", x * 2, mesh)
        x = collectives.reduce_scatter(f"A[I, J] {{U_{axis}}} -> A[I_{axis}, J]", x, mesh)
        return collectives.all_to_all(f"A[I_{axis}, J] -> A[I, J_{axis}]", x, mesh)

    x = whole_numbers(mesh.rank, (SHAPE["I"] // mesh.sizes[axis], SHAPE["J"]), mesh.device).requires_grad_()
    ways = (f, torch.compile(f, fullgraph=True, backend="aot_eager"))
    results = [(y := way(x), *torch.autograd.grad(y, x, torch.ones_like(y))) for way in ways]
    if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
        raise ValueError("compiled, collectives or their gradients differ")
    return [{"kind": "torch.compile", "line": "four collectives in one graph", "off by": 0.0}]


def cases_equal(device: str, tiny: bool, shared: bool = False) -> dict[str, Callable]:
    mesh_of, ranks = join(device, shared), int(os.environ.get("WORLD_SIZE", 1))
    mesh = mesh_of(split("XY", ranks) if ranks > 2 else {"X": 2})
    cases: dict[str, Callable] = {}
    for call, lines in LINES.items():
        for line in lines:
            if all(axis in mesh.sizes for axis in "XY" if axis in line.replace("A[", "[").replace("{U", "{")):
                cases[f"{call.__name__} {line}"] = partial(one_line, call, line, mesh)
    for axes in ("X", "YX")[: len(mesh.sizes)]:
        cases[f"ppermute over {axes}"] = partial(permuted, mesh, axes)
    for name in ("broadcast", "reduce", "scatter", "gather"):
        cases[name] = partial(from_root, name, mesh)
    cases["all_reduce by max and min"] = partial(largest_of, mesh)
    cases["ragged_all_to_all"] = partial(ragged, mesh)
    cases["torch.compile"] = partial(in_a_graph, mesh)
    for name, (_, axes) in STRATEGIES.items():
        if ranks > 2 or len(axes) == 1:
            cases[name] = lambda name=name, axes=axes: strategy(name, mesh_of(split(axes, ranks)))
    for axes in ("X", "Y", "XY")[: 3 if ranks > 2 else 2]:
        cases[f"Transformer over {axes}"] = lambda axes=axes: whole_transformer(mesh_of(split(axes, ranks)))
    if not shared or device == "cpu":  # gloo sends no messages from a GPU
        cases["send and recv"] = partial(messages, mesh)
        if ranks == 2:
            cases["1f1b"] = lambda: pipelined(mesh_of({"Z": ranks}), "1f1b")
        stages = {"Z": 2, "X": ranks // 2} if ranks > 2 else {"Z": 2}
        cases["Transformer over Z"] = lambda: whole_transformer(mesh_of(stages), schedule="1f1b", microbatches=2)
    return cases


def cases_shared(device: str, tiny: bool) -> dict[str, Callable]:
    return cases_equal(device, tiny, shared=True)


# NCCL with one rank: what each of torch's calls gives back is what it was given. On a CPU gloo stands in for it


def cases_nccl(device: str, tiny: bool) -> dict[str, Callable]:
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    pg = dist.group.WORLD
    name = pg.group_name

    def into(start: Callable, x):
        y = torch.empty_like(x)
        start(y, x, pg).wait()
        return y

    def reduced(x):
        y = x.clone()
        pg.allreduce([y]).wait()
        return y

    calls = {
        "all_reduce": reduced,
        "all_gather": partial(into, torch_private.gather_into),
        "reduce_scatter": partial(into, torch_private.scatter_sum_into),
        "all_to_all": partial(into, torch_private.exchange_into),
        "all_to_all, uneven": partial(into, lambda y, x, pg: torch_private.exchange_into(y, x, pg, [len(x)], [len(x)])),
        "all_reduce in a graph": lambda x: torch_private.sum_over(x, name),
        "all_gather in a graph": lambda x: torch_private.gather_over(x, 1, name),
        "reduce_scatter in a graph": lambda x: torch_private.scatter_sum_over(x, 1, name),
        "all_to_all in a graph": lambda x: torch_private.exchange_over(x, [len(x)], [len(x)], name),
    }

    def alike(what: str, call: Callable) -> list[dict]:
        for dtype in DTYPES:
            x = whole_numbers(0, SHAPE.values(), device).to(dtype)
            if not torch.equal(call(x), x):
                raise ValueError(f"{what} in {dtype}: what came back is not what was sent")
            compiled = torch.compile(call, backend="aot_eager", fullgraph=True) if "graph" in what else call
            if not torch.equal(compiled(x), x):
                raise ValueError(f"{what} in {dtype}, compiled: what came back is not what was sent")
        return [{"kind": "one rank", "line": what, "off by": 0.0}]

    return {what: partial(alike, what, call) for what, call in calls.items()}
