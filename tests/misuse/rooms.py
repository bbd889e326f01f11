"""The rooms above the collectives: calls held against references, with an argument spoiled or one rank's other way.

    python tests/sweeps/fuzz.py rooms [--cases 10000] [--seed 0]

Each case draws a call: a loss on one device and on a mesh, a decode step, the engine, sampling, an update, clipping,
attention over a split sequence, experts, masks, ragged rows, a transfer, a program of shard_map, of explicit and of
auto mode, a checkpoint. One of its arguments is spoiled: its shape, dtype, device, range, name, memory. It ends well if
the numbers are those of a reference written out in float64 (`plain`), or if the call raises a ValueError that names the
fix. All is done in one process. A test of the suite runs some hundred cases.

Those that have twists are also calls of ranks.py, where one rank does another thing.
"""

import tempfile
from collections import Counter

import torch
from misuse import acts, plain
from misuse import entries as c
from misuse.draw import Draw
from misuse.entries import SPOILS, Entry, Kind, called, others, spoils, tree_of, tried
from torch.func import grad_and_value, vjp

from scaling import auto, collectives, explicit, optim, serve, tree
from scaling.configs import Config
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.models.mlp import block
from scaling.schedules import gpipe, one_f_one_b
from scaling.serve import engine, sampling
from scaling.serve.states import Options
from scaling.shard_map import all_gather, psum, psum_scatter, shard_map
from scaling.strategies import context, data_parallel, fsdp, fsdp_tp, pipeline, tensor_parallel, transformer
from scaling.strategies.axes import present
from scaling.strategies.expert import moe
from scaling.train import checkpoint, guards

f64 = torch.float64
SMALL = Config("small", L=1, D=4, F=6, N=2, K=1, H=2, V=8)  # of one device
CONFIG = Config("small", L=2, D=8, F=8, N=4, K=4, H=2, V=16)  # of a mesh
EXPERTS = SMALL.with_(E=4, k=2)
PARAMS = model.init(SMALL, 1, f64)


def tensors(draw: Draw, **shapes) -> dict:
    return {name: draw.normal(*shape) for name, shape in shapes.items()}


def twice(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return torch.cat([x, x], dim)


# The book's layers: a strategy over the mesh's axes, and a pipeline over X


def through(whole: dict, x: torch.Tensor) -> torch.Tensor:
    """The stack of layers on one device."""
    for a, b in zip(whole["W_in"], whole["W_out"], strict=True):
        x = block(x, a, b, "gelu")
    return x


def listing(draw: Draw) -> dict:
    mesh, n = draw.mesh, draw.mesh.size()
    known = {"X": (data_parallel, fsdp), "Y": (tensor_parallel,), "XY": (fsdp_tp,)}
    strategy = draw.choice(known["".join(mesh.sizes)])
    whole = tensors(draw, W_in=(2, 2 * n, 2 * n), W_out=(2, 2 * n, 2 * n))
    In, dOut = draw.normal(4 * n, 2 * n), draw.normal(4 * n, 2 * n)
    Out, pull = vjp(lambda whole: through(whole, In), whole)
    types = {name: strategy.SPECS[name].replace("[", "[L, ") for name in whole}
    of_rows = strategy.SPECS["In"]
    given = {"mesh": mesh, "strategy": strategy, "params": tree.shard(whole, types, mesh), "types": types}
    given |= {"In": tree.shard(In, of_rows, mesh), "dOut": tree.shard(dOut, of_rows, mesh)}
    return given | {"wanted": (Out, pull(dOut)[0])}


def listed(mesh, strategy, params, In, dOut, types, activation="gelu", residual=False, norm=False):
    Out, saved = strategy.forward(params, In, mesh, activation, residual, norm)
    _, grads = strategy.backward(dOut, saved, params, mesh)
    return tree.unshard(Out, strategy.SPECS["Out"], mesh), tree.unshard(grads, types, mesh)


def wider(given: dict, draw: Draw) -> dict:
    return {"params": {name: twice(W, 2 if name == "W_in" else 1) for name, W in given["params"].items()}}


def stages(draw: Draw) -> dict:
    mesh, Z = draw.mesh, draw.mesh.sizes["X"]
    whole, at = tensors(draw, W_in=(Z, 4, 6), W_out=(Z, 6, 4)), slice(mesh.coord["X"], mesh.coord["X"] + 1)
    In, Target, (make, other) = draw.normal(8, 4), draw.normal(8, 4), draw.sample([gpipe, one_f_one_b], 2)
    grads, loss = grad_and_value(lambda whole: squares(through(whole, In), Target))(whole)
    given = {"mesh": mesh, "params": tree.map(lambda W: W[at], whole), "In": In, "Target": Target}
    given |= {"make": make, "other": other, "microbatches": 4}
    return given | {"wanted": (loss, tree.map(lambda W: W[at], grads))}


def squares(Out, Target):
    return (Out - Target).square().sum() / 8


def staged(mesh, params, In, Target, make, other, microbatches):
    schedule = make(mesh.sizes["X"], microbatches)
    return pipeline.value_and_grad(params, In, Target, mesh, schedule, squares, axis="X")


# The Transformer: trained, decoded, served


# the config of one rank
CHANGED = {"theta": 100.0, "eps": 1e-2, "activation": "relu", "gated": False, "tied": True, "window": 2, "L": 1, "F": 4}


def initial(mesh, seed: int, config=CONFIG, dtype=f64, **layout):
    """What makes the params, as all ranks do at one time: another config or seed is refused there."""
    return lambda: model.init(config, seed, dtype, mesh=mesh, specs=transformer.specs(config, mesh, **layout))


def training(draw: Draw) -> dict:
    """Loss and gradients of a Transformer."""
    mesh, seed, staged = draw.mesh, draw.randrange(100), "Z" in draw.mesh.sizes
    tokens, weights = draw.whole_numbers(CONFIG.V, 4 * mesh.size(), 9), draw.normal(4 * mesh.size(), 8).abs()
    params = model.init(CONFIG, seed, f64, mesh.device)
    grads, loss = grad_and_value(lambda params: model.loss(params, tokens, config=CONFIG, weights=weights))(params)
    parts = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights)
    ids, targets, weights = tree.shard(parts, (str(present("t[B_X, T]", mesh)),) * 3, mesh)
    layout = {"schedule": "1f1b"} if staged else {}
    given = {"mesh": mesh, "ids": ids, "targets": targets, "weights": weights, "config": CONFIG, "seed": seed}
    given |= layout | {"microbatches": 2 if staged else 1, "z_loss": 0.0, "scale": 1.0}
    return given | {"params": initial(mesh, seed, **layout), "wanted": (loss, grads)}


def trained(mesh, params, ids, targets, config, seed, replica=False, zero=3, schedule=None, **options):
    params = params() if callable(params) else params
    if replica:
        params["norm"] = params["norm"] + 1.0
        guards.check_replicas(params, transformer.specs(config, mesh, zero=zero, schedule=schedule), mesh, 1)
    options |= {"zero": zero, "schedule": schedule}
    loss, grads = transformer.loss_and_grads(params, ids, targets, config, mesh, **options)
    return loss, transformer.unshard(grads, CONFIG, mesh, schedule=schedule)


def otherwise(given: dict, seed: int = 0, **options) -> dict:
    """Params of one rank alone."""
    return {"params": initial(given["mesh"], given["seed"] + seed, **options)}


def of_config(name: str, value):
    config = CONFIG.with_(**{name: value})
    return lambda given, draw: {"config": config} | otherwise(given, config=config)


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


# Updates, attention over a split sequence, checkpoints

TYPES = {"w": "w[I_X, J]", "b": "b[J]"}


def leaves(draw: Draw) -> dict:
    return tensors(draw, w=(2 * draw.mesh.sizes["X"], 3), b=(3,))


def step(draw: Draw) -> dict:
    """Clipping and AdamW on shards."""
    params, grads = leaves(draw), leaves(draw)
    mine = {"params": tree.shard(params, TYPES, draw.mesh), "grads": tree.shard(grads, TYPES, draw.mesh)}
    wanted = plain.adamw(params, plain.clip(grads, 0.5, 1e-6), 0.1, 0.01)
    return mine | {"mesh": draw.mesh, "lr": 0.1, "decay": 0.01, "most": 0.5, "donate": False, "wanted": wanted}


def updated(mesh, params, grads, lr, decay, most, donate, types=TYPES, steps=0):
    rule = optim.chain(optim.clip(most), optim.adamw(lr, weight_decay=decay))
    state = rule.init(params)
    if steps:
        state["step"] += steps
    found, _ = rule.update(grads, state, params, donate=donate, specs=types, mesh=mesh)
    guards.check_replicas(found, TYPES, mesh, 1)
    return tree.unshard(found, TYPES, mesh)


SEQUENCE = "A[B, T_X, N, H]"


def queries(draw: Draw) -> dict:
    """Of a sequence that is split over X; the layout of zig-zag is another one, where it is."""
    n = draw.mesh.sizes["X"]
    heads = [draw.normal(1, 4 * n, each * n, 2) for each in (4, 2, 2)]
    how = {"causal": n > 1 or draw.maybe(0.7), "window": draw.choice([2, 3]), "scale": 0.7}
    given = dict(zip("QKV", tree.shard(heads, [SEQUENCE] * 3, draw.mesh), strict=True))
    form = draw.choice(["ring", "gather", "ulysses"] + ["zigzag"] * (n == 1))
    return given | how | {"mesh": draw.mesh, "form": form, "wanted": plain.attend(*heads, **how)}


def attention(mesh, Q, K, V, **options):
    return collectives.unshard(SEQUENCE, context.attention(Q, K, V, mesh, axis="X", **options), mesh)


def held_state(draw: Draw) -> dict:
    state = tree.shard(leaves(draw), TYPES, draw.mesh)
    given = {"mesh": draw.mesh, "state": state | {"n": 4}, "line": TYPES["w"], "step": 3, "keep": 1}
    return given | {"folder": draw.folder, "wanted": state}


def stored(mesh, state, line, step, keep, folder, load="", async_op=False):
    types = TYPES | {"w": line} | ({"c": "c[K]"} if "c" in state else {})
    done = checkpoint.save(folder, state, types, mesh, step, keep=keep, async_op=async_op)
    if done is not None:
        done.result()
    found = checkpoint.load(folder, TYPES | {"w": load or line}, mesh, step)[0]
    return {name: found[name] for name in TYPES}


def leaf(name: str, change):
    """Another leaf of one rank's state."""
    return lambda given, draw: {"state": given["state"] | {name: change(given["state"].get(name))}}


# Programs on whole arrays

PROGRAMS = {
    "psum": (lambda v: psum(v, "X"), "A[I, J]"),
    "psum_scatter": (lambda v: psum_scatter(v, "X", tiled=True), "A[I_X, J]"),
    "all_gather": (lambda v: all_gather(v, "X", tiled=True, to="invarying"), "A[I, J]"),
}


def mapped(mesh, x, line, kind):
    program, out = PROGRAMS[kind]
    return shard_map(program, {"X": 2, "Y": 2}, (line,), out, in_process=True)(x)


def array_of(draw: Draw) -> dict:
    return {"mesh": draw.mesh, "x": draw.normal(4, 2), "line": "A[I_X, J]"}


TWO_DIMS = {"x": Kind("a list, one dim more"), "line": c.LINE}


def squared(mesh, x, line):
    return x @ x.T


ENTRIES = {
    "listing": Entry(
        listing,
        listed,
        twists=spoils("params", "float32")
        | others(activation="relu", residual=True, norm=True)
        | {
            "layers": lambda given, draw: {"params": tree.map(lambda W: W[:1], given["params"])},
            "features": wider,
            "rows": lambda given, draw: {"In": torch.cat([given["In"]] * (1 + ("Y" in draw.mesh.sizes)))},
        },
    ),
    "pipeline": Entry(
        stages,
        staged,
        twists=spoils("In", "twice, float32, one dim more")
        | others(microbatches=2)
        | {
            "schedule": lambda given, draw: {"make": given["other"]},
            "layers": lambda given, draw: {"params": tree.map(twice, given["params"])},
            "params dtype": spoils("params", "float32")["float32"],
        },
        messages=True,
    ),
    "training": Entry(
        training,
        trained,
        kinds={"ids": c.IDS, "targets": c.IDS, "weights": c.WEIGHTS, "microbatches": c.WHOLE}
        | {"params": lambda draw, made: c.PARAMS(draw, made()), "z_loss": c.POSITIVE, "scale": c.POSITIVE},
        twists={name: of_config(name, value) for name, value in CHANGED.items()}
        | spoils("ids targets weights", "twice, cut")
        | others(label_smoothing=0.1, z_loss=0.1, ignore_index=3, remat="block", scale=2.0, sums=torch.float32)
        | others(weights=None, replica=True)
        | {
            "microbatches": lambda given, draw: {"microbatches": 3 - given["microbatches"]},
            "segments": lambda given, draw: {"segments": torch.zeros_like(given["targets"])},
            "zero": lambda given, draw: {"zero": 1} | otherwise(given, zero=1),
            "dtype": lambda given, draw: otherwise(given, dtype=torch.float32),
            "seed": lambda given, draw: otherwise(given, seed=1),
        },
    ),
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
    "update": Entry(
        step,
        updated,
        kinds={"params": c.PARAMS, "grads": c.PARAMS, "donate": c.FLAG}
        | dict.fromkeys(("lr", "decay", "most"), c.POSITIVE),
        twists=spoils("params grads", "twice, float32")
        | others(most=0.9, lr=0.2, decay=0.3, types={"w": "w[I, J]", "b": "b[J]"}, steps=5)
        | {"a replica": lambda given, draw: {"grads": given["grads"] | {"b": given["grads"]["b"] + 1}}},
    ),
    "clip": Entry(
        lambda draw: {"mesh": draw.mesh, "grads": leaves(draw), "most": draw.choice([0.5, 50.0])},
        lambda mesh, grads, most: optim.clip_by_global_norm(grads, TYPES, mesh, most, eps=0.0)[0],
        lambda mesh, grads, most: plain.clip(grads, most),
        {"grads": tree_of(c.DENSE), "most": c.POSITIVE},
    ),
    "attention": Entry(
        queries,
        attention,
        kinds=dict.fromkeys("QKV", c.FLOATS) | {"causal": c.FLAG, "window": c.WHOLE, "scale": c.POSITIVE},
        twists=spoils("Q K V", "twice, float32, one dim more")
        | others(causal=False, window=4, scale=0.5)
        | {"form": lambda given, draw: {"form": draw.choice(["ring", "gather", "ulysses"])}},
    ),
    "checkpoint": Entry(
        held_state,
        stored,
        kinds={"line": c.LINE, "step": c.WHOLE, "keep": c.WHOLE},
        twists={how: leaf("w", SPOILS[how]) for how in ("twice", "float32")}
        | others(load="w[I, J]", step=6, keep=None, async_op=True)
        | {
            "a replica": leaf("b", lambda b: b + 1),
            "number": leaf("n", lambda _: 5),
            "value": leaf("w", lambda w: w * 0 + 7),
            "a leaf more": leaf("c", lambda _: torch.ones(2)),
            "types": {"line": "w[I, J_X]", "load": "w[I_X, J]"},
            "folder": lambda given, draw: {"folder": given["folder"] + "-other"},
        },
        unheld=("value", "load"),
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
        squared, TWO_DIMS,
    ),
    "auto": Entry(array_of, lambda mesh, x, line: auto.jit(lambda v: v @ v.T, mesh, (line,))(x), squared, TWO_DIMS),
}  # fmt: skip
ON_RANKS = {name: entry for name, entry in (acts.ENTRIES | ENTRIES).items() if entry.twists}
SPOILED = {name: entry for name, entry in (acts.ENTRIES | ENTRIES).items() if entry.kinds}


def spoiled(name: str, cases: int, seed: int = 0) -> tuple[Counter, list[str]]:
    """(how often each outcome came, what was wrong) of calls of one entry, or of any if it has no name."""
    mesh = Mesh({"X": 1, "Y": 1, "C": 1})
    with tempfile.TemporaryDirectory() as folder:

        def case(number: int) -> str:
            draw = Draw.on(mesh, f"{folder}/{number}", f"{name} {seed} {number}")
            of = name or draw.choice([*SPOILED])
            return called(draw, of, SPOILED[of])

        return tried(case, cases)
