"""Calls of the collectives, for `fuzz_ranks.py`: held against one device, with the ways in which one rank may make
another one."""

import torch
from misuse.act import PLAIN, Act, hold, normal, spoilt
from misuse.draw import Draw

from scaling import collectives as c
from scaling import tree
from scaling.mesh import Mesh

f64 = torch.float64
COLLECTIVES = {
    "all_gather": ("A[I_X, J] -> A[I, J]", "B[I_X, J] -> B[I, J]", "A[I, J_X] -> A[I, J]"),
    "reduce_scatter": ("A[I, J] {U_X} -> A[I_X, J]", "B[I, J] {U_X} -> B[I_X, J]", "A[I, J] {U_X} -> A[I, J_X]"),
    "all_reduce": ("A[I, J] {U_X} -> A[I, J]", "A[I, K] {U_X} -> A[I, K]", "A[I, J_X] -> A[I, J]"),
    "all_to_all": ("A[I_X, J] -> A[I, J_X]", "A[I_X, K] -> A[I, K_X]", "A[I, J_X] -> A[I_X, J]"),
    "broadcast": ("A[I, J] {U_X} -> A[I, J]", "B[I, J] {U_X} -> B[I, J]", "A[I_X, J] -> A[I, J]"),
}


def collective(draw: Draw, mesh, twist: str, folder: str) -> None:
    """Held against what is computed from all ranks' contributions."""
    kind = draw.choice([*COLLECTIVES])
    line, other, turned = COLLECTIVES[kind]
    axis = draw.choice([*mesh.sizes])
    line, other, turned = (text.replace("X", axis) for text in (line, other, turned))
    if twist == "axis":
        line = line.replace(axis, next((name for name in mesh.sizes if name != axis), "Q"))
    n, asynchronous = mesh.sizes[axis], draw.maybe(0.3)
    parts = normal(draw, mesh.size(), 2 * n, 2 * n)
    mine = [mesh.rank_at({**mesh.coord, axis: i}) for i in range(n)]
    x, stack, at = parts[mesh.rank].clone(), parts[mine], mesh.coord[axis]
    wanted = {
        "all_gather": lambda: torch.cat(list(stack)),
        "reduce_scatter": lambda: stack.sum(0).chunk(n)[at],
        "all_reduce": lambda: stack.sum(0),
        "all_to_all": lambda: torch.cat([part.chunk(n, 1)[at] for part in stack]),
        "broadcast": lambda: stack[0],
    }[kind]()
    options = {}
    if twist == "op" and kind in ("reduce_scatter", "all_reduce"):
        options["op"] = draw.choice(["mean", "max", "min"])
    if twist == "root" and kind == "broadcast":
        options["root"] = 1
    if twist == "out" and kind in ("all_gather", "reduce_scatter"):
        options["out"] = torch.empty_like(wanted)
    if twist == "wrong out" and kind in ("all_gather", "reduce_scatter"):
        options["out"] = torch.empty(3, dtype=f64)
    if twist == "donate" and kind == "all_reduce":
        options["donate"] = True
    if twist == "async":
        asynchronous = not asynchronous
    if twist == "kind":
        kind = draw.choice([*COLLECTIVES])
        line = COLLECTIVES[kind][0].replace("X", axis)
    line = {"line": other, "turned": turned}.get(twist, line)
    if twist == "no grad":
        with torch.inference_mode():
            found = c.wait(getattr(c, kind)(line, x, mesh, async_op=asynchronous, **options))
    else:
        found = getattr(c, kind)(line, spoilt(x, twist), mesh, async_op=asynchronous or twist == "dropped", **options)
        if twist == "dropped":
            return
        found = c.wait(found)
    hold(found.detach(), wanted, kind)


def reshard(draw: Draw, mesh, twist: str, folder: str) -> None:
    axes = [*mesh.sizes]
    placed = [["", ""], ["", ""]]  # of each type the axes of I and of J
    for of in placed:
        for axis in draw.sample(axes, len(axes)):
            where = draw.randrange(3)
            if where < 2:
                of[where] += axis
    before, after = (
        f"A[{', '.join(dim + '_' * bool(a) + a for dim, a in zip('IJ', of, strict=True))}]" for of in placed
    )
    whole = normal(draw, 4 * mesh.size(), 4 * mesh.size())
    x, wanted = (tree.shard(whole, spec, mesh) for spec in (before, after))
    after = "A[I, J]" if twist == "line" else after
    found = c.reshard(f"{before} -> {after}", spoilt(x, twist), mesh)
    if not twist:  # a reshard that sends nothing is each rank's own
        hold(found, wanted, "reshard")


def permuted(draw: Draw, mesh, twist: str, folder: str) -> None:
    n, parts = mesh.sizes["X"], normal(draw, mesh.size(), 2, 3)
    pairs = [(i, (i + 1) % n) for i in range(n)]
    source = mesh.rank_at({**mesh.coord, "X": (mesh.coord["X"] - 1) % n})
    if twist == "pairs":
        pairs = pairs[:1]
    y = c.ppermute("A[I_X, J]", spoilt(parts[mesh.rank], twist), mesh, "X", pairs)
    hold(y.detach(), parts[source], "ppermute")


def message(draw: Draw, mesh, twist: str, folder: str) -> None:
    """From rank 0 along X to rank 1."""
    x, at = normal(draw, 2, 3), mesh.coord["X"]
    line = "B[I, J]" if twist == "line" else "A[I, J]"
    if at == 0:
        c.send(line, spoilt(x, twist), mesh, "X", 1)
    elif at == 1:
        hold(c.recv(line, spoilt(x, twist), mesh, "X", 0), x, "a message")


def ragged(draw: Draw, mesh, twist: str, folder: str) -> None:
    n = mesh.sizes["X"]
    counts = torch.tensor([[draw.randrange(3) for _ in range(n)] for _ in range(n)])
    at, rows = mesh.coord["X"], normal(draw, n, 2 * n, 3)
    sends, receives = counts[at].tolist(), counts[:, at].tolist()
    x = rows[at][: sum(sends)]
    if twist == "receives":
        receives[at - 1] += 1
    if twist == "sends":
        sends[at - 1] += 1
        x = rows[at][: sum(sends)]
    blocks = [rows[i][: int(counts[i].sum())].split(counts[i].tolist())[at] for i in range(n)]
    y = c.ragged_all_to_all("Row[G_X, E, R, D] -> Row[G, E_X, R, D]", spoilt(x, twist), sends, receives, mesh)
    hold(y.detach(), torch.cat(blocks), "ragged rows")


def meshes(draw: Draw, mesh, twist: str, folder: str) -> None:
    sizes = dict(reversed(mesh.sizes.items())) if twist == "order" else dict(mesh.sizes)
    if twist == "sizes":
        sizes = {"X": mesh.size()} if len(sizes) > 1 else {"Q": mesh.size()}
    if twist == "product":
        sizes = {"X": mesh.size() * 2}
    another = Mesh(sizes, checked=twist != "unchecked", timeout=mesh.timeout)
    x = normal(draw, mesh.size(), 2)
    axes = "".join(sizes)
    hold(c.all_gather(f"A[I_{axes}, J] -> A[I, J]", x[another.rank][None], another), x, "another mesh")


LINES = ("line", "turned", "axis", "kind", "op", "root")
OPTIONS = ("out", "wrong out", "donate", "async", "dropped", "no grad")
ACTS = {
    "collective": Act(collective, (*PLAIN, *LINES, *OPTIONS)),
    "reshard": Act(reshard, (*PLAIN, "line")),
    "ppermute": Act(permuted, (*PLAIN, "pairs")),
    "message": Act(message, ("shape", "dtype", "line", "dim"), messages=True),
    "ragged": Act(ragged, ("dtype", "dim", "sends", "receives", "differentiated")),
    "mesh": Act(meshes, ("order", "sizes", "product", "unchecked")),
}
