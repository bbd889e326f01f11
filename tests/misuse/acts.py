"""Calls of collectives in which one rank may differ from the others, held against one device."""

import torch
from misuse.draw import Draw
from misuse.entries import Entry, spoils

from scaling import collectives as c
from scaling import tree
from scaling.mesh import Mesh

f64 = torch.float64
COLLECTIVES = {  # kind: the line, another one, and one by another dim
    "all_gather": ("A[I_X, J] -> A[I, J]", "B[I_X, J] -> B[I, J]", "A[I, J_X] -> A[I, J]"),
    "reduce_scatter": ("A[I, J] {U_X} -> A[I_X, J]", "B[I, J] {U_X} -> B[I_X, J]", "A[I, J] {U_X} -> A[I, J_X]"),
    "all_reduce": ("A[I, J] {U_X} -> A[I, J]", "A[I, K] {U_X} -> A[I, K]", "A[I, J_X] -> A[I, J]"),
    "all_to_all": ("A[I_X, J] -> A[I, J_X]", "A[I_X, K] -> A[I, K_X]", "A[I, J_X] -> A[I_X, J]"),
    "broadcast": ("A[I, J] {U_X} -> A[I, J]", "B[I, J] {U_X} -> B[I, J]", "A[I_X, J] -> A[I, J]"),
}


def collective(draw: Draw) -> dict:
    """What is wanted is computed from all ranks' contributions."""
    mesh, kind, axis = draw.mesh, draw.choice([*COLLECTIVES]), draw.choice([*draw.mesh.sizes])
    n, at = mesh.sizes[axis], mesh.coord[axis]
    parts = draw.normal(mesh.size(), 2 * n, 2 * n)
    stack = parts[[mesh.rank_at({**mesh.coord, axis: i}) for i in range(n)]]
    wanted = {
        "all_gather": lambda: torch.cat(list(stack)),
        "reduce_scatter": lambda: stack.sum(0).chunk(n)[at],
        "all_reduce": lambda: stack.sum(0),
        "all_to_all": lambda: torch.cat([part.chunk(n, 1)[at] for part in stack]),
        "broadcast": lambda: stack[0],
    }[kind]()
    given = {"mesh": mesh, "kind": kind, "axis": axis, "x": parts[mesh.rank].clone(), "async_op": draw.maybe(0.3)}
    return given | {"wanted": wanted}


def collected(mesh, kind, axis, x, line=0, dropped=False, inference=False, **options):
    with torch.inference_mode(inference):
        found = getattr(c, kind)(COLLECTIVES[kind][line].replace("X", axis), x, mesh, **options)
        return None if dropped else c.wait(found).detach()


def of(*kinds: str, **values):
    """A twist of these collectives alone."""
    return lambda given, draw: values if given["kind"] in kinds else {}


def out(given: dict, draw: Draw) -> dict:
    fits = {
        "all_gather": lambda x, n: (n * len(x), x.shape[1]),
        "reduce_scatter": lambda x, n: (len(x) // n, x.shape[1]),
    }
    fits = fits.get(given["kind"])
    return {"out": torch.empty(fits(given["x"], draw.mesh.sizes[given["axis"]]), dtype=f64)} if fits else {}


def reshard(draw: Draw) -> dict:
    placed = [["", ""], ["", ""]]  # of each type the axes of I and of J
    for axes in placed:
        for axis in draw.sample([*draw.mesh.sizes], len(draw.mesh.sizes)):
            where = draw.randrange(3)
            if where < 2:
                axes[where] += axis
    before, after = (
        f"A[{', '.join(dim + '_' * bool(a) + a for dim, a in zip('IJ', axes, strict=True))}]" for axes in placed
    )
    whole = draw.normal(4 * draw.mesh.size(), 4 * draw.mesh.size())
    x, wanted = (tree.shard(whole, spec, draw.mesh) for spec in (before, after))
    return {"mesh": draw.mesh, "before": before, "after": after, "x": x, "wanted": wanted}


def permuted(draw: Draw) -> dict:
    mesh, n = draw.mesh, draw.mesh.sizes["X"]
    parts, source = draw.normal(mesh.size(), 2, 3), mesh.rank_at({**mesh.coord, "X": (mesh.coord["X"] - 1) % n})
    pairs = [(i, (i + 1) % n) for i in range(n)]
    return {"mesh": mesh, "x": parts[mesh.rank], "pairs": pairs, "wanted": parts[source]}


def message(draw: Draw) -> dict:
    x = draw.normal(2, 3)
    return {"mesh": draw.mesh, "line": "A[I, J]", "x": x, "wanted": x}


def sent(mesh, line, x):
    """From rank 0 along X to rank 1."""
    if mesh.coord["X"] == 0:
        c.send(line, x, mesh, "X", 1)
    return c.recv(line, x, mesh, "X", 0) if mesh.coord["X"] == 1 else None


def ragged(draw: Draw) -> dict:
    n, at = draw.mesh.sizes["X"], draw.mesh.coord["X"]
    counts = torch.tensor([[draw.randrange(3) for _ in range(n)] for _ in range(n)])
    rows = draw.normal(n, 2 * n + 1, 3)
    blocks = [rows[i][: int(counts[i].sum())].split(counts[i].tolist())[at] for i in range(n)]
    return {"mesh": draw.mesh, "rows": rows[at], "sends": counts[at].tolist(), "receives": counts[:, at].tolist(),
            "wanted": torch.cat(blocks)}  # fmt: skip


def exchanged(mesh, rows, sends, receives):
    x = rows[..., : sum(sends), :]
    return c.ragged_all_to_all("Row[G_X, E, R, D] -> Row[G, E_X, R, D]", x, sends, receives, mesh).detach()


def one_more(name: str):
    def more(given: dict, draw: Draw) -> dict:
        before = (draw.mesh.coord["X"] - 1) % len(given[name])
        return {name: [n + (i == before) for i, n in enumerate(given[name])]}

    return more


def another_mesh(draw: Draw) -> dict:
    x = draw.normal(draw.mesh.size(), 2)
    return {"mesh": draw.mesh, "x": x, "sizes": dict(draw.mesh.sizes), "checked": True, "wanted": x}


def gathered(mesh, x, sizes, checked):
    another = Mesh(sizes, checked=checked, timeout=mesh.timeout)
    return c.all_gather(f"A[I_{''.join(sizes)}, J] -> A[I, J]", x[another.rank][None], another)


ENTRIES = {
    "collective": Entry(
        collective,
        collected,
        twists=spoils("x")
        | {f"op {op}": of("reduce_scatter", "all_reduce", op=op) for op in ("mean", "max", "min")}
        | {
            "line": {"line": 1},
            "turned": {"line": 2},
            "axis": lambda given, draw: {"axis": next((a for a in draw.mesh.sizes if a != given["axis"]), "Q")},
            "kind": lambda given, draw: {"kind": draw.choice([*COLLECTIVES])},
            "root": of("broadcast", root=1),
            "out": out,
            "wrong out": of("all_gather", "reduce_scatter", out=torch.empty(3, dtype=f64)),
            "donate": of("all_reduce", donate=True),
            "async": lambda given, draw: {"async_op": not given["async_op"]},
            "dropped": {"dropped": True, "async_op": True},
            "no grad": {"inference": True},
        },
    ),
    "reshard": Entry(
        reshard,
        lambda mesh, before, after, x: c.reshard(f"{before} -> {after}", x, mesh),
        twists=spoils("x", unheld=True) | {"line": {"after": "A[I, J]", "unheld": True}},  # what sends nothing
    ),
    "ppermute": Entry(
        permuted,
        lambda mesh, x, pairs: c.ppermute("A[I_X, J]", x, mesh, "X", pairs),
        twists=spoils("x") | {"pairs": lambda given, draw: {"pairs": given["pairs"][:1]}},
    ),
    "message": Entry(
        message, sent, twists=spoils("x", only=("shape", "dtype", "dim")) | {"line": {"line": "B[I, J]"}}, messages=True
    ),
    "ragged": Entry(
        ragged,
        exchanged,
        twists=spoils("rows", only=("dtype", "dim", "differentiated"))
        | {name: one_more(name) for name in ("sends", "receives")},
    ),
    "mesh": Entry(
        another_mesh,
        gathered,
        twists={
            "order": lambda given, draw: {"sizes": dict(reversed(given["sizes"].items()))},
            "sizes": lambda given, draw: {"sizes": {"X" if len(given["sizes"]) > 1 else "Q": draw.mesh.size()}},
            "product": lambda given, draw: {"sizes": {"X": draw.mesh.size() * 2}},
            "unchecked": {"checked": False},
        },
    ),
}
