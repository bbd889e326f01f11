"""Parts `nccl`, `shared` and `equal` of gpu.py: what several devices compute is what one device does.

Collectives are the drawn ones of tests/misuse, right and wrong: whole numbers, whose sums are exact in every order and
dtype, held bit by bit against what the types say, with derivatives, buffers, modes and memory layouts. Rows, messages,
strategies, pipelines, attention, updates and the Transformer are held against one device, in float64.
"""

import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import split
from misuse import typed
from misuse.entries import AsOnNccl, Draw, tried, twisted
from misuse.rooms import ON_RANKS

from scaling import collectives
from scaling.collectives import moves
from scaling.common import torch_private
from scaling.common.torchrun import this_rank, world_size
from scaling.mesh import Mesh
from scaling.models.blockwise import KeyBlock, block_backward, block_forward, merge_attended
from scaling.models.pointwise import gained_norm, gained_norm_vjp
from scaling.models.tiles import Mask

TIMEOUT = 100.0  # seconds that a rank waits for the others
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
MODES = ("plain", "no_grad", "leaf", "vjp", "jvp", "vmap")
DRAWN = 25  # calls of each kind, each in every mode
SHAPE = 64, 48


def join(device: str, shared: bool = False) -> Callable[[dict], Mesh]:
    """Be one of torchrun's ranks, each on a GPU of its own or all on the first; returns what makes a mesh of sizes."""
    if device == "cuda":
        torch.cuda.set_device(0 if shared else this_rank().local_rank)
    if not dist.is_initialized() and world_size() > 1:
        how = "gloo" if shared or device == "cpu" else "nccl"
        dist.init_process_group(how, timeout=timedelta(seconds=TIMEOUT))
    if shared and device == "cuda":
        moves.gather_over = gathered_by_sums
    return lambda sizes: (AsOnNccl if shared else Mesh)(sizes, device, timeout=TIMEOUT)


def gathered_by_sums(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """x[m, ...] -> [n*m, ...]: each block among zeros, summed. gloo's own AllGather in a graph takes the address of a
    GPU's memory for one of the host's, and ends the process (torch 2.11)."""
    own = dist.get_rank(torch_private.process_group(group))
    return torch_private.sum_over(torch.cat([x if i == own else torch.zeros_like(x) for i in range(size)]), group)


def held(kind: str, line: str, calls: int) -> list[dict]:
    """The row of a table."""
    return [{"kind": kind, "line": line, "calls": calls}]


def drawn(kind: str, mesh: Mesh) -> list[dict]:
    """Calls of one collective, right and wrong, the same on all ranks."""

    def case(number):
        draw = Draw.on(mesh, "", f"{kind} {number // len(MODES)}")
        draw.dtypes, draw.modes, draw.sizes = DTYPES, [MODES[number % len(MODES)]], [2, 4, 6]
        return typed.collective(draw, [kind])

    outcomes, wrong = tried(case, DRAWN * len(MODES))
    if wrong:
        raise ValueError(f"{len(wrong)} of {DRAWN * len(MODES)} are wrong: {wrong[0]}")
    return [row for how, count in outcomes.items() for row in held(kind, how, count)]


def act(name: str, make_mesh: Callable[[], Mesh], times: int = 3) -> list[dict]:
    """Calls above the collectives, beside one device."""
    mesh = make_mesh()
    for seed in range(times):
        twisted(Draw.on(mesh, tempfile.gettempdir(), seed), name, ON_RANKS[name], "")
    return held(name, str(mesh), times)


def in_a_graph(mesh: Mesh) -> list[dict]:
    """Four collectives in one graph of torch.compile, forward and backward."""
    axis = next(iter(mesh.sizes))

    def f(x):
        x = collectives.all_gather(f"A[I_{axis}, J] -> A[I, J]", x, mesh)
        x = collectives.all_reduce(f"A[I, J] {{U_{axis}}} -> A[I, J]", x * 2, mesh)
        x = collectives.reduce_scatter(f"A[I, J] {{U_{axis}}} -> A[I_{axis}, J]", x, mesh)
        return collectives.all_to_all(f"A[I_{axis}, J] -> A[I, J_{axis}]", x, mesh)

    draw = Draw.on(mesh, "", mesh.rank)
    x = draw.whole_numbers(7, SHAPE[0] // mesh.sizes[axis], SHAPE[1]).double().requires_grad_()
    ways = (f, torch.compile(f, fullgraph=True, backend="aot_eager"))
    results = [(y := way(x), *torch.autograd.grad(y, x, torch.ones_like(y))) for way in ways]
    if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
        raise ValueError("compiled, collectives or their gradients differ")
    return held("torch.compile", "four collectives in one graph", 1)


def norms(device: str) -> list[dict]:
    """RMSNorm and its derivatives, one kernel each on a GPU, beside the lines of a CPU in float64."""
    g = torch.Generator().manual_seed(0)
    x, dy, gain = (torch.randn(*shape, 48, generator=g, dtype=torch.float64) for shape in ((3, 5), (3, 5), ()))
    y, r = gained_norm(x, gain, 1e-5)
    wanted = y, r, *gained_norm_vjp(x, gain, r, dy)
    for dtype, apart in zip(DTYPES, (1e-12, 1e-5, 5e-2), strict=True):
        x_, dy_, gain_ = (each.to(device, dtype) for each in (x, dy, gain))
        y, r = gained_norm(x_, gain_, 1e-5)
        for a, b in zip((y, r, *gained_norm_vjp(x_, gain_, r, dy_)), wanted, strict=True):
            torch.testing.assert_close(a.double().cpu(), b, rtol=apart, atol=apart * float(b.abs().max()))
    return held("norm", "RMSNorm and its derivatives", len(DTYPES))


def attended(device: str) -> list[dict]:
    """Attention to two blocks of keys, merged, and its backward, beside a CPU's in float64. In 16 bits a GPU has flash
    attention for the tiles without a mask, and matmuls for those at the edge of the window."""
    g = torch.Generator().manual_seed(0)
    made = [
        torch.randn(*shape, 64, generator=g, dtype=torch.float64) for shape in ((2, 64, 4), (2, 64, 4), (2, 2, 128, 2))
    ]
    for window in (None, 40):
        wanted = through_blocks(*made, window)
        for dtype, apart in zip(DTYPES, (1e-11, 1e-4, 5e-2), strict=True):
            found = through_blocks(*(x.to(device, dtype) for x in made), window)
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a.double().cpu(), b, rtol=apart, atol=apart * float(b.abs().max()))
    return held("attention", "two blocks of keys and their backward", 2 * len(DTYPES))


def through_blocks(Q, dO, KV, window: int | None) -> list[torch.Tensor]:
    """(O, lse, dQ and dKV of each block) of queries at 64 to 127 to keys at 0 to 127."""
    seen, each, rows = None, [], (range(64, 128),)
    for at in (range(64, 128), range(64)):
        each.append((Q, KV[:, :, at.start : at.stop], KeyBlock(rows, (at,), Mask(True, window), 0.125)))
        seen = merge_attended(seen, block_forward(*each[-1]))
    grads = (g for block in each for g in block_backward(dO, seen.O.to(Q.dtype), seen.lse, *block))
    return [seen.O, seen.lse, *grads]


def cases_equal(device, tiny, shared=False):
    mesh_of, ranks = join(device, shared), world_size()
    axes_of = ("X", "Y", "XY") if ranks > 2 else ("X", "Y")
    mesh = mesh_of(split("XY" if ranks > 2 else "X", ranks))
    cases: dict[str, Callable] = {kind: partial(drawn, kind, mesh) for kind in typed.KINDS}
    cases |= {"torch.compile": partial(in_a_graph, mesh), "norm": partial(norms, device)}
    cases["flash"] = partial(attended, device)
    wanted = {"listing": axes_of, "training": axes_of, "attention": "X", "update": "X"}
    alike = ["ragged"]  # on the same mesh
    if not shared or device == "cpu":  # gloo sends no messages from a GPU
        wanted |= {"pipeline": "X", "training": (*axes_of, "ZX" if ranks > 2 else "Z")}
        alike += ["message"]
    cases |= {name: partial(act, name, lambda: mesh) for name in alike}
    for name, meshes in wanted.items():
        for axes in meshes:
            cases[f"{name} over {axes}"] = partial(act, name, lambda axes=axes: mesh_of(split(axes, ranks)))
    return cases


cases_shared = partial(cases_equal, shared=True)


def cases_nccl(device, tiny):
    """What torch's calls give back by NCCL with one rank is what they were given. On a CPU gloo stands in for it."""
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    pg = dist.group.WORLD
    name = pg.group_name

    def into(start, x):
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

    def alike(what, call):
        ways = [call, torch.compile(call, backend="aot_eager", fullgraph=True)] if "graph" in what else [call]
        for dtype in DTYPES:
            x = torch.arange(SHAPE[0] * SHAPE[1], device=device).view(SHAPE).remainder(7).to(dtype)
            if not all(torch.equal(way(x), x) for way in ways):
                raise ValueError(f"{what} in {dtype}: what came back is not what was sent")
        return held("one rank", what, len(DTYPES))

    return {what: partial(alike, what, call) for what, call in calls.items()}
