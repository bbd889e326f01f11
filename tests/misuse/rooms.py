"""The rooms above the collectives: calls held against references, with an argument spoiled or one rank's other way.

Each case draws a call: a loss on one device and on a mesh, a decode step, the engine, sampling, an update, clipping,
attention over a split sequence, experts, masks, ragged rows, a transfer, a program of shard_map, of explicit and of
auto mode, a checkpoint, the shards of a tree. One of its arguments is spoiled: its shape, dtype, device, range, name,
memory. It ends well if the numbers are those of a reference written out in float64 (`plain`), or if the call raises a
ValueError that names the fix. All is done in one process. A test of the suite runs some hundred cases.

Those that have twists are also calls of ranks.py, where one rank does another thing.
"""

import re
import tempfile
from collections import Counter

import torch
from misuse import entries as c
from misuse import plain, steps, typed
from misuse.entries import Draw, Entry, Kind, called, others, spoils, tried
from misuse.steps import tensors

from scaling import auto, collectives, explicit, serve
from scaling.configs import Config
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.serve import engine, sampling
from scaling.serve.states import Options
from scaling.shard_map import all_gather, psum, psum_scatter, shard_map
from scaling.strategies.expert import moe

SMALL = Config("small", L=1, D=4, F=6, N=2, K=1, H=2, V=8)
EXPERTS = SMALL.with_(E=4, k=2)
PARAMS = model.init(SMALL, 1, torch.float64)
PROGRAMS = {  # on whole arrays
    "psum": (lambda v: psum(v, "X"), "A[I, J]"),
    "psum_scatter": (lambda v: psum_scatter(v, "X", tiled=True), "A[I_X, J]"),
    "all_gather": (lambda v: all_gather(v, "X", tiled=True, to="invarying"), "A[I, J]"),
}


def tokens(draw: Draw, *shape: int) -> torch.Tensor:
    return draw.whole_numbers(SMALL.V, *shape)


def decoded(params, prompt, next, donate):
    cache = serve.prefill(params, prompt, serve.init_cache(SMALL, 2, 6), SMALL)[1]
    return serve.decode(params, next, cache, SMALL, donate=donate)[0]


def served(max_new_tokens, pages, page, slots, budget):
    """What is given greedily by the engine and by generate: the same."""
    request = engine.Request(0, (1, 2, 3), max_new_tokens)
    done = engine.serve(PARAMS, SMALL, [(0.0, request)], Options(pages, page, slots, budget)).requests[0]
    if "refused" in done.reason:
        raise ValueError(done.reason + "\n  fix: (a request is refused by its reason)")
    assert [list(done.tokens)] == serve.generate(PARAMS, [[1, 2, 3]], SMALL, max_new_tokens)
    return torch.tensor(done.tokens)


def greedy(max_new_tokens, **_):
    row = [1, 2, 3]
    for _ in range(max_new_tokens):
        row.append(int(plain.logits(PARAMS, torch.tensor([row]), SMALL)[0, -1].argmax()))
    return torch.tensor(row[3:])


def drawing(draw: Draw) -> dict:
    filters = {"top_k": draw.choice([1, 3, 8]), "top_p": draw.choice([0.3, 0.9]), "min_p": draw.choice([0.0, 0.2])}
    return {"logits": draw.normal(2, 8), "temperature": 0.7} | filters


def mapped(mesh, x, line, kind):
    program, out = PROGRAMS[kind]
    return shard_map(program, {"X": 2, "Y": 2}, (line,), out, in_process=True)(x)


def array_of(draw: Draw) -> dict:
    return {"mesh": draw.mesh, "x": draw.normal(4, 2), "line": "A[I_X, J]"}


TWO_DIMS = {"x": Kind("a list, one dim more"), "line": c.LINE}
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


OF_COLLECTIVES = {
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


ENTRIES = OF_COLLECTIVES | steps.ENTRIES | {
    "loss": Entry(
        lambda draw: {"params": PARAMS, "tokens": tokens(draw, 2, 4), "weights": draw.normal(2, 3).abs()},
        lambda params, tokens, weights: model.loss(params, tokens, config=SMALL, weights=weights),
        lambda params, tokens, weights: plain.loss(params, tokens[:, :-1], tokens[:, 1:], SMALL, weights),
        {"params": c.PARAMS, "tokens": c.IDS, "weights": c.WEIGHTS},
    ),
    "decode": Entry(
        lambda draw: {
            "params": PARAMS, "prompt": tokens(draw, 2, 3), "next": tokens(draw, 2), "donate": draw.maybe(0.5),
        },
        decoded,
        lambda params, prompt, next, **_: plain.logits(params, torch.cat([prompt, next[:, None]], 1), SMALL)[:, -1],
        {"params": c.PARAMS, "prompt": c.IDS, "next": c.IDS, "donate": c.FLAG},
    ),
    "serve": Entry(
        lambda draw: {"max_new_tokens": 2, "pages": 4, "page": 2, "slots": 2, "budget": 4},
        served,
        greedy,
        dict.fromkeys(("max_new_tokens", "pages", "page", "slots", "budget"), c.WHOLE),
    ),
    "sampling": Entry(
        drawing,
        lambda logits, **how: sampling.probabilities(logits, sampling.Sampling(**how)),
        lambda logits, **how: torch.stack([plain.drawn_from(row, sampling.Sampling(**how)) for row in logits]),
        {"temperature": c.POSITIVE, "top_k": c.WHOLE, "top_p": c.POSITIVE, "min_p": c.POSITIVE},
    ),
    "experts": Entry(
        lambda draw: {
            "mesh": draw.mesh,
            "params": tensors(draw, router=(4, 4), W_in=(4, 4, 6), W_gate=(4, 4, 6), W_out=(4, 6, 4)),
            "x": draw.normal(1, 3, 4),
        },
        lambda mesh, params, x: moe(params, x, EXPERTS, mesh, "X")[0],
        lambda mesh, params, x: plain.experts(params, x, EXPERTS),
        {"params": c.PARAMS, "x": c.FLOATS},
    ),
    "masked": Entry(
        lambda draw: {"mesh": draw.mesh, "x": draw.normal(2, 3, 4), "mask": draw.normal(2, 3) > 0},
        lambda mesh, x, mask: collectives.masked("x[B, T, D_X] {U_Y}", x, mask, mesh),
        lambda mesh, x, mask: x * mask[..., None],
        {"x": c.MASKED, "mask": Kind("floats, fewer")},
    ),
    "transfer": Entry(
        lambda draw: {"mesh": draw.mesh, "x": draw.normal(4, 3), "line": "A[I_X, J] -> A[I, J]", "below": 3},
        lambda mesh, x, line, below: collectives.transfer(line, x, mesh, mesh, below=(below, 3)),
        lambda x, **_: torch.cat([x[:3], torch.zeros(1, 3)]),
        {"line": c.LINE, "below": c.WHOLE},
    ),
    "shard_map": Entry(
        lambda draw: array_of(draw) | {"kind": draw.choice([*PROGRAMS])},
        mapped,
        lambda mesh, x, line, kind: x if kind == "all_gather" else x[:2] + x[2:],
        {"x": c.WHOLE_ARRAY, "line": c.LINE},
    ),
    "explicit": Entry(
        array_of,
        lambda mesh, x, line: explicit.einsum(
            "ij,kj->ik", *[explicit.array(x, line, mesh)] * 2, out="[4, 4_X]"
        ).whole(),
        lambda x, **_: x @ x.T,
        TWO_DIMS,
    ),
    "auto": Entry(
        array_of,
        lambda mesh, x, line: auto.jit(lambda v: v @ v.T, mesh, (line,))(x),
        lambda x, **_: x @ x.T,
        TWO_DIMS,
    ),
}  # fmt: skip
ON_RANKS = {name: entry for name, entry in ENTRIES.items() if entry.twists}
SPOILED = {name: entry for name, entry in ENTRIES.items() if entry.kinds}


def spoiled(name: str, cases: int, seed: int = 0) -> tuple[Counter, list[str]]:
    """(how often each outcome came, what was wrong) of calls of one entry, or of any if it has no name."""
    mesh = Mesh({"X": 1, "Y": 1, "C": 1})
    with tempfile.TemporaryDirectory() as folder:

        def case(number: int) -> str:
            draw = Draw.on(mesh, f"{folder}/{number}", f"{name} {seed} {number}")
            of = name or draw.choice([*SPOILED])
            return called(draw, of, SPOILED[of])

        return tried(case, cases)
