"""Random calls of the rooms above the collectives, of which one argument is spoiled: held against `plain`."""

import tempfile
from functools import partial

import torch
from misuse import corrupt, plain
from misuse.draw import Draw
from misuse.entries import Entry, called

from scaling import auto, collectives, explicit, optim, serve, tree
from scaling.configs import Config
from scaling.mesh import Mesh
from scaling.models import transformer
from scaling.serve import engine, sampling
from scaling.serve.states import Options
from scaling.shard_map import all_gather, psum, psum_scatter, shard_map
from scaling.strategies import context
from scaling.strategies import transformer as strategy
from scaling.strategies.expert import moe
from scaling.train import checkpoint

ONE = Mesh({"X": 1, "Y": 1, "C": 1})
CONFIG = Config("small", L=1, D=4, F=6, N=2, K=1, H=2, V=8)
EXPERTS = CONFIG.with_(E=4, k=2)
PARAMS = transformer.init(CONFIG, 1, torch.float64)


def normal(draw: Draw, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)), dtype=torch.float64)


def tokens(draw: Draw, *shape: int) -> torch.Tensor:
    return torch.randint(0, CONFIG.V, shape, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)))


def batch(draw: Draw) -> dict:
    x = tokens(draw, 2, 4)
    weights = normal(draw, 2, 3).abs()
    return {"params": PARAMS, "inside": x[:, :-1].contiguous(), "targets": x[:, 1:].contiguous(), "weights": weights}


def one_device(params, tokens, weights):
    return transformer.loss(params, tokens, config=CONFIG, weights=weights)


def on_mesh(params, inside, targets, weights, **options):
    return strategy.loss_and_grads(params, inside, targets, CONFIG, ONE, weights=weights, **options)[0]


def mean_loss(params, inside, targets, weights, **_):
    return plain.loss(params, inside, targets, CONFIG, weights)


def held(draw: Draw) -> dict:
    return {"params": PARAMS, "prompt": tokens(draw, 2, 3), "next": tokens(draw, 2), "donate": draw.maybe(0.5)}


def decoded(params, prompt, next, donate):
    cache = serve.init_cache(CONFIG, 2, 6)
    cache = serve.prefill(params, prompt, cache, CONFIG)[1]
    return serve.decode(params, next, cache, CONFIG, donate=donate)[0]


def rule(draw: Draw) -> dict:
    params = {"w": normal(draw, 2, 3), "b": normal(draw, 3)}
    grads = tree.map(lambda p: normal(draw, *p.shape), params)
    return {"params": params, "grads": grads, "lr": 0.1, "decay": 0.01, "donate": False}


def updated(params, grads, lr, decay, donate):
    adamw = optim.adamw(lr, weight_decay=decay)
    return adamw.update(grads, adamw.init(params), params, donate=donate)[0]


def clipped(draw: Draw) -> dict:
    return {"grads": {"w": normal(draw, 2, 3), "b": normal(draw, 3)}, "most": 0.5}


def norm_of(grads) -> torch.Tensor:
    return torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()


def queries(draw: Draw) -> dict:
    heads = {"Q": normal(draw, 1, 4, 4, 2), "K": normal(draw, 1, 4, 2, 2), "V": normal(draw, 1, 4, 2, 2)}
    form = draw.choice(["ring", "zigzag", "gather", "ulysses"])
    return heads | {"form": form, "causal": draw.maybe(0.7), "window": draw.choice([2, 3]), "scale": 0.7}


def attention(Q, K, V, form, **options):
    return context.attention(Q, K, V, ONE, form=form, **options)


def layer(draw: Draw) -> dict:
    shapes = {"router": (4, 4), "W_in": (4, 4, 6), "W_gate": (4, 4, 6), "W_out": (4, 6, 4)}
    return {"params": {name: normal(draw, *shape) for name, shape in shapes.items()}, "x": normal(draw, 1, 3, 4)}


def drawing(draw: Draw) -> dict:
    filters = {"top_k": draw.choice([1, 3, 8]), "top_p": draw.choice([0.3, 0.9]), "min_p": draw.choice([0.0, 0.2])}
    return {"logits": normal(draw, 2, 8), "temperature": 0.7} | filters


def distribution(logits, **how):
    return sampling.probabilities(logits, sampling.Sampling(**how))


def masking(draw: Draw) -> dict:
    return {"x": normal(draw, 2, 3, 4), "mask": normal(draw, 2, 3) > 0, "line": "x[B, T, D_X] {U_Y}"}


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


def stored(state, line, step, keep):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, state, {"w": line, "b": "b[F]"}, ONE, step, keep=keep)
        return checkpoint.load(folder, {"w": line, "b": "b[F]"}, ONE, step)[0]


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


c = corrupt
BATCH = {"params": c.params, "inside": c.ids, "targets": c.ids, "weights": c.weights}
ENTRIES = {
    "loss": Entry(
        lambda draw: {"params": PARAMS, "tokens": tokens(draw, 2, 4), "weights": normal(draw, 2, 3).abs()},
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
    "adamw": Entry(
        rule,
        updated,
        lambda params, grads, lr, decay, donate: plain.adamw(params, grads, lr, decay),
        {"params": c.params, "grads": c.params, "lr": c.positive, "decay": c.positive, "donate": c.flag},
    ),
    "clip": Entry(
        clipped,
        lambda grads, most: optim.clip_by_global_norm(grads, {"w": "w[D_X, F]", "b": "b[F]"}, ONE, most, eps=0.0)[0],
        lambda grads, most: tree.map(lambda g: g * min(1.0, most / float(norm_of(grads))), grads),
        {"grads": partial(c.params, kind=c.dense), "most": c.positive},
    ),
    "attention": Entry(
        queries,
        attention,
        lambda Q, K, V, form, **options: plain.attend(Q, K, V, **options),
        {"Q": c.floats, "K": c.floats, "V": c.floats, "causal": c.flag, "window": c.whole, "scale": c.positive},
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
        lambda draw: {"x": normal(draw, 5, 3), "count": 5},
        lambda x, count: collectives.ragged_all_to_all("R[G_X, E, R, D] -> R[G, E_X, R, D]", x, [5], [count], ONE),
        lambda x, count: x,
        {"count": c.whole},
    ),
    "transfer": Entry(
        lambda draw: {"x": normal(draw, 4, 3), "line": "A[I_X, J] -> A[I, J]", "below": 3},
        lambda x, line, below: collectives.transfer(line, x, ONE, ONE, below=(below, 3)),
        lambda x, line, below: torch.cat([x[:3], torch.zeros(1, 3)]),
        {"line": c.text, "below": c.whole},
    ),
    "shard_map": Entry(
        lambda draw: {"x": normal(draw, 4, 2), "line": "A[I_X, J]", "kind": draw.choice(list(PROGRAMS))},
        mapped,
        blocks,
        {"x": c.array, "line": c.text},
    ),
    "explicit": Entry(
        lambda draw: {"x": normal(draw, 4, 2), "line": "A[I_X, J]"},
        lambda x, line: explicit.einsum("ij,kj->ik", *[explicit.array(x, line, ONE)] * 2, out="[4, 4_X]").whole(),
        lambda x, line: x @ x.T,
        {"x": lambda draw, x: c.picked(draw, [("list", x.tolist()), ("dims", x[None])], []), "line": c.text},
    ),
    "auto": Entry(
        lambda draw: {"x": normal(draw, 4, 2), "line": "A[I_X, J]"},
        lambda x, line: auto.jit(lambda v: v @ v.T, ONE, (line,))(x),
        lambda x, line: x @ x.T,
        {"x": lambda draw, x: c.picked(draw, [("list", x.tolist()), ("dims", x[None])], []), "line": c.text},
    ),
    "checkpoint": Entry(
        lambda draw: {
            "state": {"w": normal(draw, 4, 2), "b": normal(draw, 3)},
            "line": "w[I_X, J]",
            "step": 3,
            "keep": 1,
        },
        stored,
        lambda state, **_: state,
        {"line": c.text, "step": c.whole, "keep": c.whole},
    ),
}


def room(draw: Draw) -> str:
    """One call of some room; its outcome in words. Raises Wrong."""
    name = draw.choice(list(ENTRIES))
    return called(draw, name, ENTRIES[name])
