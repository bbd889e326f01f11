"""Calls of collectives in which one rank may differ from the others, held against one device."""

import re

import torch
from misuse import entries as c
from misuse import typed
from misuse.entries import Draw, Entry, others, spoils

from scaling import collectives
from scaling.mesh import Mesh

f64 = torch.float64
MOVED = "all_gather reduce_scatter"
FIVE = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]


def right(kinds: list[str], size: int):
    """A right call of one of these collectives, which sends something. Ranks tell calls apart by what these send: each
    entry has its own size."""

    def make(draw: Draw) -> dict:
        draw.dtypes, draw.sizes = [f64], [size]
        while True:
            kind = draw.choice(kinds)
            case, before, after, line, more = typed.drawn(draw, kind)
            sends = kind == "ppermute" or before != after
            if sends and before.dims and case.wanted is not None and not (case.wrong or case.may_refuse):
                break
        options = case.options | ({} if kind == "reshard" else {"async_op": draw.maybe(0.3)})
        given = {"mesh": draw.mesh, "kind": kind, "line": line, "x": case.x, "more": more, "options": options}
        return given | {"shape": case.wanted.shape, "wanted": case.wanted}

    return make


def collected(mesh, kind, line, x, more, options, shape, dropped=False, inference=False):
    with torch.inference_mode(inference):
        found = getattr(collectives, kind)(line, x, mesh, *more, **options)
        return None if dropped else collectives.wait(found).detach()


def option(kinds: str, **options):
    """A twist of these collectives alone."""
    return lambda given, draw: {"options": given["options"] | options} if given["kind"] in kinds.split() else {}


def turned(where: str = ""):
    """A twist: the axes of the first two dims change places, in all types after `where`."""

    def other(given: dict, draw: Draw) -> dict:
        before, found, after = given["line"].partition(where) if where else ("", "", given["line"])
        after = re.sub(r"\[([A-Z\d]+)(_[A-Z]+)?, ([A-Z\d]+)(_[A-Z]+)?", r"[\1\4, \3\2", after)
        return {"line": before + found + after}

    return other


def other_axes(given: dict, draw: Draw) -> dict:
    other = {"X": "Y", "Y": "X"} if len(draw.mesh.sizes) > 1 else dict.fromkeys(draw.mesh.sizes, "Q")
    return {"line": given["line"].translate(str.maketrans(other))}


def sent(mesh, line, x):
    """From rank 0 along X to rank 1."""
    if mesh.coord["X"] == 0:
        collectives.send(line, x, mesh, "X", 1)
    return collectives.recv(line, x, mesh, "X", 0) if mesh.coord["X"] == 1 else None


def ragged(draw: Draw) -> dict:
    n, at = draw.mesh.sizes["X"], draw.mesh.coord["X"]
    counts = torch.tensor([[draw.randrange(3) for _ in range(n)] for _ in range(n)])
    rows = draw.normal(n, 2 * n + 1, 3)
    blocks = [rows[i][: int(counts[i].sum())].split(counts[i].tolist())[at] for i in range(n)]
    return {"mesh": draw.mesh, "rows": rows[at], "sends": counts[at].tolist(), "receives": counts[:, at].tolist(),
            "wanted": torch.cat(blocks)}  # fmt: skip


def no_count(draw: Draw, counts: list):
    how, first, wrong = c.WHOLE(draw, counts[0])
    return how, [first, *counts[1:]], wrong


def one_more(name: str):
    """A twist: of what goes to the rank before, or comes from it."""

    def more(given: dict, draw: Draw) -> dict:
        before = (draw.mesh.coord["X"] - 1) % len(given[name])
        return {name: [n + (i == before) for i, n in enumerate(given[name])]}

    return more


def gathered(x, sizes, checked):
    another = Mesh(sizes, checked=checked, timeout=20.0)
    return collectives.all_gather(f"A[I_{''.join(sizes)}, J] -> A[I, J]", x[another.rank][None], another)


ENTRIES = {
    "collective": Entry(
        right(FIVE, 2),
        collected,
        twists=spoils("x")
        | others(inference=True)
        | {f"op {op}": option("reduce_scatter all_reduce", op=op) for op in ("mean", "max", "min")}
        | {
            "line": lambda given, draw: {"line": given["line"].replace("A[", "B[")},
            "turned": turned(),
            "axis": other_axes,
            "kind": lambda given, draw: {"kind": draw.choice(FIVE), "options": {}},
            "root": option("broadcast", root=1),
            "out": lambda given, draw: option(MOVED, out=torch.empty(given["shape"], dtype=f64))(given, draw),
            "wrong out": option(MOVED, out=torch.empty(3, dtype=f64)),
            "donate": option("all_reduce", donate=True),
            "async": lambda given, draw: {"options": {"async_op": not given["options"]["async_op"]}},
            "dropped": lambda given, draw: {"dropped": True, "options": given["options"] | {"async_op": True}},
        },
    ),
    "reshard": Entry(
        right(["reshard"], 6),
        collected,
        twists=spoils("x") | {"line": turned(" -> ")},
        unheld=[*c.EVERY.split(", "), "line"],  # what sends nothing
    ),
    "ppermute": Entry(
        right(["ppermute"], 4),
        collected,
        twists=spoils("x") | {"pairs": lambda given, draw: {"more": [given["more"][0], given["more"][1][:1]]}},
    ),
    "message": Entry(
        lambda draw: {"mesh": draw.mesh, "line": "A[I, J]", "x": draw.normal(2, 3)},
        sent,
        lambda mesh, line, x: x,
        twists=spoils("x", "twice, float32, one dim more") | others(line="B[I, J]"),
        messages=True,
    ),
    "ragged": Entry(
        ragged,
        lambda mesh, rows, sends, receives: collectives.ragged_all_to_all(
            "Row[G_X, E, R, D] -> Row[G, E_X, R, D]", rows[..., : sum(sends), :], sends, receives, mesh
        ).detach(),
        kinds={"receives": no_count},
        twists=spoils("rows", "float32, one dim more, a leaf")
        | {name: one_more(name) for name in ("sends", "receives")},
    ),
    "mesh": Entry(
        lambda draw: {"x": draw.normal(draw.mesh.size(), 2), "sizes": dict(draw.mesh.sizes), "checked": True},
        gathered,
        lambda x, **_: x,
        twists=others(checked=False)
        | {
            "order": lambda given, draw: {"sizes": dict(reversed(given["sizes"].items()))},
            "sizes": lambda given, draw: {"sizes": {"X" if len(given["sizes"]) > 1 else "Q": draw.mesh.size()}},
            "product": lambda given, draw: {"sizes": {"X": draw.mesh.size() * 2}},
        },
    ),
}
