"""Random calls of the rooms above the collectives, right and wrong: no wrong number without an error.

    python tests/sweeps/fuzz.py rooms [--cases 10000] [--seed 0]

Each case draws a call: a loss on one device and on a mesh, a decode step, the engine, sampling, an update, clipping,
attention over a split sequence, experts, masks, ragged rows, a transfer, a program of shard_map, of explicit and of
auto mode, a checkpoint. One of its arguments is spoiled: its shape, dtype, device, range, name, memory. It ends well if
the numbers are those of a reference written out in float64 (`plain`), or if the call raises a ValueError that names the
fix. All is done in one process. A test of the suite runs some hundred cases.
"""

import tempfile
import warnings
from collections import Counter
from functools import partial

import torch
from misuse import entries as c
from misuse import plain, steps
from misuse.draw import Draw
from misuse.entries import Entry, called, tried

from scaling import auto, collectives, explicit, optim, serve
from scaling.configs import Config
from scaling.mesh import Mesh
from scaling.models import transformer
from scaling.serve import engine, sampling
from scaling.serve.states import Options
from scaling.shard_map import all_gather, psum, psum_scatter, shard_map
from scaling.strategies import transformer as strategy
from scaling.strategies.expert import moe

ONE = Mesh({"X": 1, "Y": 1, "C": 1})
CONFIG = Config("small", L=1, D=4, F=6, N=2, K=1, H=2, V=8)
EXPERTS = CONFIG.with_(E=4, k=2)
PARAMS = transformer.init(CONFIG, 1, torch.float64)


def tokens(draw: Draw, *shape: int) -> torch.Tensor:
    return draw.whole_numbers(CONFIG.V, *shape)


def batch(draw: Draw) -> dict:
    x = tokens(draw, 2, 4)
    weights = draw.normal(2, 3).abs()
    return {"params": PARAMS, "inside": x[:, :-1].contiguous(), "targets": x[:, 1:].contiguous(), "weights": weights}


def one_device(params, tokens, weights):
    return transformer.loss(params, tokens, config=CONFIG, weights=weights)


def on_mesh(params, inside, targets, weights, **options):
    return strategy.loss_and_grads(params, inside, targets, CONFIG, ONE, weights=weights, **options)[0]


def mean_loss(params, inside, targets, weights, **_):
    return plain.loss(params, inside, targets, CONFIG, weights)


def held(draw: Draw) -> dict:
    return {
        "params": PARAMS,
        "prompt": tokens(draw, 2, 3),
        "next": tokens(draw, 2),
        "donate": draw.maybe(0.5),
    }


def decoded(params, prompt, next, donate):
    cache = serve.init_cache(CONFIG, 2, 6)
    cache = serve.prefill(params, prompt, cache, CONFIG)[1]
    return serve.decode(params, next, cache, CONFIG, donate=donate)[0]


def clipped(draw: Draw) -> dict:
    return {"grads": {"w": draw.normal(2, 3), "b": draw.normal(3)}, "most": draw.choice([0.5, 50.0])}


def layer(draw: Draw) -> dict:
    shapes = {"router": (4, 4), "W_in": (4, 4, 6), "W_gate": (4, 4, 6), "W_out": (4, 6, 4)}
    return {"params": {name: draw.normal(*shape) for name, shape in shapes.items()}, "x": draw.normal(1, 3, 4)}


def drawing(draw: Draw) -> dict:
    filters = {"top_k": draw.choice([1, 3, 8]), "top_p": draw.choice([0.3, 0.9]), "min_p": draw.choice([0.0, 0.2])}
    return {"logits": draw.normal(2, 8), "temperature": 0.7} | filters


def distribution(logits, **how):
    return sampling.probabilities(logits, sampling.Sampling(**how))


def masking(draw: Draw) -> dict:
    return {"x": draw.normal(2, 3, 4), "mask": draw.normal(2, 3) > 0, "line": "x[B, T, D_X] {U_Y}"}


PROGRAMS = {
    "psum": (lambda v: psum(v, "X"), "A[I, J]"),
    "psum_scatter": (lambda v: psum_scatter(v, "X", tiled=True), "A[I_X, J]"),
    "all_gather": (lambda v: all_gather(v, "X", tiled=True, to="invarying"), "A[I, J]"),
}


def mapped(x, line, kind):
    program, out = PROGRAMS[kind]
    return shard_map(program, {"X": 2, "Y": 2}, (line,), out, in_process=True)(x)


def blocks(x, line, kind):
    return x if kind == "all_gather" else x[:2] + x[2:]


def served(max_new_tokens, pages, page, slots, budget):
    """What is given greedily by the engine and by generate: the same."""
    options = Options(pages, page, slots, budget)
    request = engine.Request(0, (1, 2, 3), max_new_tokens)
    done = engine.serve(PARAMS, CONFIG, [(0.0, request)], options).requests[0]
    if "refused" in done.reason:
        raise ValueError(done.reason + "\n  fix: (a request is refused by its reason)")
    assert [list(done.tokens)] == serve.generate(PARAMS, [[1, 2, 3]], CONFIG, max_new_tokens)
    return torch.tensor(done.tokens)


def greedy(max_new_tokens, **_):
    row = [1, 2, 3]
    for _ in range(max_new_tokens):
        row.append(int(plain.logits(PARAMS, torch.tensor([row]), CONFIG)[0, -1].argmax()))
    return torch.tensor(row[3:])


BATCH = {"params": c.params, "inside": c.ids, "targets": c.ids, "weights": c.weights}
ENTRIES = {name: entry for name, entry in steps.ENTRIES.items() if entry.kinds} | {
    "loss": Entry(
        lambda draw: {
            "params": PARAMS,
            "tokens": tokens(draw, 2, 4),
            "weights": draw.normal(2, 3).abs(),
        },
        one_device,
        lambda params, tokens, weights: plain.loss(params, tokens[:, :-1], tokens[:, 1:], CONFIG, weights),
        {"params": c.params, "tokens": c.ids, "weights": c.weights},
    ),
    "loss on a mesh": Entry(
        lambda draw: batch(draw) | {"microbatches": 1, "z_loss": 0.0, "scale": 2.0},
        on_mesh,
        mean_loss,
        BATCH | {"microbatches": c.whole, "z_loss": c.positive, "scale": c.positive},
    ),
    "decode": Entry(
        held,
        decoded,
        lambda params, prompt, next, **_: plain.logits(params, torch.cat([prompt, next[:, None]], 1), CONFIG)[:, -1],
        {"params": c.params, "prompt": c.ids, "next": c.ids, "donate": c.flag},
    ),
    "serve": Entry(
        lambda draw: {"max_new_tokens": 2, "pages": 4, "page": 2, "slots": 2, "budget": 4},
        served,
        greedy,
        dict.fromkeys(("max_new_tokens", "pages", "page", "slots", "budget"), c.whole),
    ),
    "sampling": Entry(
        drawing,
        distribution,
        lambda logits, **how: torch.stack([plain.drawn_from(row, sampling.Sampling(**how)) for row in logits]),
        {"temperature": c.positive, "top_k": c.whole, "top_p": c.positive, "min_p": c.positive},
    ),
    "clip": Entry(
        clipped,
        lambda grads, most: optim.clip_by_global_norm(grads, {"w": "w[D_X, F]", "b": "b[F]"}, ONE, most, eps=0.0)[0],
        plain.clip,
        {"grads": partial(c.params, kind=c.dense), "most": c.positive},
    ),
    "experts": Entry(
        layer,
        lambda params, x: moe(params, x, EXPERTS, ONE, "X")[0],
        lambda params, x: plain.experts(params, x, EXPERTS),
        {"params": c.params, "x": c.floats},
    ),
    "masked": Entry(
        masking,
        lambda x, mask, line: collectives.masked(line, x, mask, ONE),
        lambda x, mask, line: x * mask[..., None],
        {"x": c.masked, "mask": lambda draw, mask: c.picked(draw, [("floats", mask.double()), ("cut", mask[:1])], [])},
    ),
    "ragged": Entry(
        lambda draw: {"x": draw.normal(5, 3), "count": 5},
        lambda x, count: collectives.ragged_all_to_all("R[G_X, E, R, D] -> R[G, E_X, R, D]", x, [5], [count], ONE),
        lambda x, count: x,
        {"count": c.whole},
    ),
    "transfer": Entry(
        lambda draw: {"x": draw.normal(4, 3), "line": "A[I_X, J] -> A[I, J]", "below": 3},
        lambda x, line, below: collectives.transfer(line, x, ONE, ONE, below=(below, 3)),
        lambda x, line, below: torch.cat([x[:3], torch.zeros(1, 3)]),
        {"line": c.line, "below": c.whole},
    ),
    "shard_map": Entry(
        lambda draw: {"x": draw.normal(4, 2), "line": "A[I_X, J]", "kind": draw.choice(list(PROGRAMS))},
        mapped,
        blocks,
        {"x": c.array, "line": c.line},
    ),
    "explicit": Entry(
        lambda draw: {"x": draw.normal(4, 2), "line": "A[I_X, J]"},
        lambda x, line: explicit.einsum("ij,kj->ik", *[explicit.array(x, line, ONE)] * 2, out="[4, 4_X]").whole(),
        lambda x, line: x @ x.T,
        {"x": lambda draw, x: c.picked(draw, [("list", x.tolist()), ("dims", x[None])], []), "line": c.line},
    ),
    "auto": Entry(
        lambda draw: {"x": draw.normal(4, 2), "line": "A[I_X, J]"},
        lambda x, line: auto.jit(lambda v: v @ v.T, ONE, (line,))(x),
        lambda x, line: x @ x.T,
        {"x": lambda draw, x: c.picked(draw, [("list", x.tolist()), ("dims", x[None])], []), "line": c.line},
    ),
}


def run(cases: int, seed: int) -> tuple[Counter, list[str]]:
    """(how often each outcome came, what was wrong)."""
    warnings.simplefilter("ignore")  # torch's own, of complex numbers cut off
    with tempfile.TemporaryDirectory() as folder:

        def case(number: int) -> str:
            draw = Draw.on(ONE, f"{folder}/{number}", f"rooms {seed} {number}")
            name = draw.choice(list(ENTRIES))
            return called(draw, name, ENTRIES[name])

        return tried(case, cases)


def spoiled(name: str, cases: int) -> tuple[Counter, list[str]]:
    """The same of the calls of one entry, which write no files."""
    return tried(lambda number: called(Draw.on(ONE, "", f"{name} {number}"), name, ENTRIES[name]), cases)
