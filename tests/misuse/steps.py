"""What trains, as calls of rooms.py and ranks.py: the book's layers, a pipeline, a Transformer, updates, attention over
a split sequence, checkpoints."""

import torch
from misuse import entries as c
from misuse import plain
from misuse.entries import SPOILS, Draw, Entry, others, spoils, tree_of
from torch.func import grad_and_value, vjp

from scaling import collectives, optim, tree
from scaling.configs import Config
from scaling.models import transformer as model
from scaling.models.mlp import block
from scaling.schedules import gpipe, one_f_one_b
from scaling.spec import present
from scaling.strategies import context, data_parallel, fsdp, fsdp_tp, pipeline, tensor_parallel, transformer
from scaling.train import checkpoint, guards

f64 = torch.float64
CONFIG = Config("small", L=2, D=8, F=8, N=4, K=4, H=2, V=16)
# what one rank's config has instead
CHANGED = {"theta": 100.0, "eps": 1e-2, "activation": "relu", "gated": False, "tied": True, "window": 2, "L": 1, "F": 4}
TYPES = {"w": "w[I_X, J]", "b": "b[J]"}
SEQUENCE = "A[B, T_X, N, H]"


def tensors(draw: Draw, **shapes) -> dict:
    return {name: draw.normal(*shape) for name, shape in shapes.items()}


def through(whole: dict, x: torch.Tensor) -> torch.Tensor:
    """The stack of layers on one device."""
    for a, b in zip(whole["W_in"], whole["W_out"], strict=True):
        x = block(x, a, b, "gelu")
    return x


def listing(draw: Draw) -> dict:
    """The book's layers, by a strategy over the mesh's axes."""
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


def initial(given: dict, seed: int = 0, config=CONFIG, dtype=f64, **layout) -> dict:
    """What makes the params, as all ranks do at one time: another config or seed is refused there."""
    mesh, seed = given["mesh"], given["seed"] + seed
    specs = transformer.specs(config, mesh, **layout)
    return {"params": lambda: model.init(config, seed, dtype, mesh=mesh, specs=specs)}


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
    return given | initial(given, **layout) | {"wanted": (loss, grads)}


def trained(mesh, params, ids, targets, config, seed, replica=False, zero=3, schedule=None, **options):
    params = params() if callable(params) else params
    if replica:
        params["norm"] = params["norm"] + 1.0
        guards.check_replicas(params, transformer.specs(config, mesh, zero=zero, schedule=schedule), mesh, 1)
    options |= {"zero": zero, "schedule": schedule}
    loss, grads = transformer.loss_and_grads(params, ids, targets, config, mesh, **options)
    return loss, transformer.unshard(grads, CONFIG, mesh, schedule=schedule)


def of_config(name: str, value):
    config = CONFIG.with_(**{name: value})
    return lambda given, draw: {"config": config} | initial(given, config=config)


def leaves(draw: Draw) -> dict:
    return tensors(draw, w=(2 * draw.mesh.sizes["X"], 3), b=(3,))


def step(draw: Draw) -> dict:
    """Clipping and AdamW on shards."""
    params, grads = leaves(draw), leaves(draw)
    mine = {"params": tree.shard(params, TYPES, draw.mesh), "grads": tree.shard(grads, TYPES, draw.mesh)}
    wanted = plain.adamw(params, plain.clip(grads, 0.5, 1e-6), 0.1, 0.01)
    return mine | {"mesh": draw.mesh, "lr": 0.1, "decay": 0.01, "most": 0.5, "donate": False, "wanted": wanted}


def updated(mesh, params, grads, lr, decay, most, donate, types=TYPES, steps=0):
    rule = optim.adamw(lr, weight_decay=decay)
    state = rule.init(params)
    if steps:
        state["step"] += steps
    clipped, _ = optim.clip_by_global_norm(grads, types, mesh, most)
    found, _ = rule.update(clipped, state, params, donate=donate, specs=types, mesh=mesh)
    guards.check_replicas(found, TYPES, mesh, 1)
    return tree.unshard(found, TYPES, mesh)


def queries(draw: Draw) -> dict:
    """Of a sequence that is split over X; the layout of zig-zag is another one, where it is."""
    n = draw.mesh.sizes["X"]
    heads = [draw.normal(1, 4 * n, each * n, 2) for each in (4, 2, 2)]
    how = {"causal": n > 1 or draw.maybe(0.7), "window": draw.choice([2, 3]), "scale": 0.7}
    given = dict(zip("QKV", tree.shard(heads, [SEQUENCE] * 3, draw.mesh), strict=True))
    form = draw.choice(["ring", "gather", "ulysses"] + ["zigzag"] * (n == 1))
    return given | how | {"mesh": draw.mesh, "form": form, "wanted": plain.attend(*heads, **how)}


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


ENTRIES = {
    "listing": Entry(
        listing,
        listed,
        twists=spoils("params", "float32")
        | others(activation="relu", residual=True, norm=True)
        | {
            "layers": lambda given, draw: {"params": tree.map(lambda W: W[:1], given["params"])},
            "features": lambda given, draw: {
                "params": {name: torch.cat([W, W], 2 if name == "W_in" else 1) for name, W in given["params"].items()}
            },
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
            "layers": lambda given, draw: {"params": tree.map(SPOILS["twice"], given["params"])},
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
            "zero": lambda given, draw: {"zero": 1} | initial(given, zero=1),
            "dtype": lambda given, draw: initial(given, dtype=torch.float32),
            "seed": lambda given, draw: initial(given, seed=1),
        },
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
        lambda mesh, Q, K, V, **options: collectives.unshard(
            SEQUENCE, context.attention(Q, K, V, mesh, axis="X", **options), mesh
        ),
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
}
