"""Calls above the collectives held against one device: strategies, pipelines, a Transformer, attention, checkpoints."""

import torch
from misuse import entries as c
from misuse import plain
from misuse.draw import Draw
from misuse.entries import Entry, spoils

from scaling import collectives, optim, tree
from scaling.configs import Config
from scaling.models import transformer as model
from scaling.models.mlp import block
from scaling.schedules import gpipe, one_f_one_b
from scaling.strategies import context, data_parallel, fsdp, fsdp_tp, pipeline, tensor_parallel, transformer
from scaling.strategies.axes import present
from scaling.train import checkpoint, guards

f64 = torch.float64


def through(whole: dict, x: torch.Tensor) -> torch.Tensor:
    """The book's stack of layers on one device."""
    for a, b in zip(whole["W_in"], whole["W_out"], strict=True):
        x = block(x, a, b, "gelu")
    return x


def with_grad(whole: dict) -> dict:
    return tree.map(lambda W: W.clone().requires_grad_(), whole)


def listing(draw: Draw) -> dict:
    """A step of a strategy over the mesh's axes."""
    mesh, B, D, F = draw.mesh, 4 * draw.mesh.size(), 2 * draw.mesh.size(), 2 * draw.mesh.size()
    known = {"X": (data_parallel, fsdp), "Y": (tensor_parallel,), "XY": (fsdp_tp,)}
    strategy = draw.choice(known["".join(mesh.sizes)])
    whole = with_grad({"W_in": draw.normal(2, D, F), "W_out": draw.normal(2, F, D)})
    In, dOut = draw.normal(B, D), draw.normal(B, D)
    Out = through(whole, In)
    Out.backward(dOut)
    types = {name: strategy.SPECS[name].replace("[", "[L, ") for name in whole}
    params = tree.shard(tree.map(torch.Tensor.detach, whole), types, mesh)
    In, dOut = (tree.shard(x, strategy.SPECS["In"], mesh) for x in (In, dOut))
    given = {"mesh": mesh, "strategy": strategy, "params": params, "In": In, "dOut": dOut, "types": types}
    return given | {"wanted": (Out.detach(), tree.map(lambda W: W.grad, whole))}


def listed(mesh, strategy, params, In, dOut, types, activation="gelu", residual=False, norm=False):
    Out, saved = strategy.forward(params, In, mesh, activation, residual, norm)
    _, grads = strategy.backward(dOut, saved, params, mesh)
    return tree.unshard(Out, strategy.SPECS["Out"], mesh), tree.unshard(grads, types, mesh)


def wider(given: dict, draw: Draw) -> dict:
    params = given["params"]
    return {"params": {"W_in": torch.cat([params["W_in"]] * 2, 2), "W_out": torch.cat([params["W_out"]] * 2, 1)}}


def stages(draw: Draw) -> dict:
    """A pipeline over X."""
    mesh, Z, at = draw.mesh, draw.mesh.sizes["X"], slice(draw.mesh.coord["X"], draw.mesh.coord["X"] + 1)
    whole = with_grad({"W_in": draw.normal(Z, 4, 6), "W_out": draw.normal(Z, 6, 4)})
    In, Target, (make, other) = draw.normal(8, 4), draw.normal(8, 4), draw.sample([gpipe, one_f_one_b], 2)
    loss = squares(through(whole, In), Target)
    loss.backward()
    given = {"mesh": mesh, "params": tree.map(lambda W: W.detach()[at], whole), "In": In, "Target": Target}
    given |= {"make": make, "other": other, "microbatches": 4}
    return given | {"wanted": (loss.detach(), tree.map(lambda W: W.grad[at], whole))}


def squares(Out, Target):
    return (Out - Target).square().sum() / 8


def staged(mesh, params, In, Target, make, other, microbatches):
    schedule = make(mesh.sizes["X"], microbatches)
    return pipeline.value_and_grad(params, In, Target, mesh, schedule, squares, axis="X")


CONFIG = Config("small", L=2, D=8, F=8, N=4, K=4, H=2, V=16)
CHANGED = {"theta": {"theta": 100.0}, "eps": {"eps": 1e-2}, "activation": {"activation": "relu"}, "layers": {"L": 1}}
CHANGED |= {"window": {"window": 2}, "gated": {"gated": False}, "tied": {"tied": True}, "features": {"F": 16}}


def training(draw: Draw) -> dict:
    """Loss and gradients of a Transformer."""
    mesh, seed = draw.mesh, draw.randrange(100)
    tokens = draw.whole_numbers(16, 4 * mesh.size(), 9)
    leaf = with_grad(model.init(CONFIG, seed, f64, mesh.device))
    loss = model.loss(leaf, tokens, config=CONFIG)
    loss.backward()
    batch = str(present("t[B_X, T]", mesh))
    ids, targets = (tree.shard(x.contiguous(), batch, mesh) for x in (tokens[:, :-1], tokens[:, 1:]))
    given = {"mesh": mesh, "ids": ids, "targets": targets, "config": CONFIG, "seed": seed}
    given |= {"schedule": "1f1b", "microbatches": 2} if "Z" in mesh.sizes else {}
    return given | {"wanted": (loss.detach(), tree.map(lambda W: W.grad, leaf))}


def trained(mesh, ids, targets, config, seed, dtype=f64, zero=3, replica=False, schedule=None, **options):
    types = transformer.specs(config, mesh, zero=zero, schedule=schedule)
    params = model.init(config, seed, dtype, mesh=mesh, specs=types)
    if replica:
        params["norm"] = params["norm"] + 1.0
        guards.check_replicas(params, types, mesh, 1)  # as training does every so many steps
    options |= {"zero": zero, "schedule": schedule}
    loss, grads = transformer.loss_and_grads(params, ids, targets, config, mesh, **options)
    return loss, transformer.unshard(grads, CONFIG, mesh, schedule=schedule)


def batch(change):
    return lambda given, draw: {name: change(given[name]) for name in ("ids", "targets")}


TYPES = {"w": "w[I_X, J]", "b": "b[J]"}


def leaves(draw: Draw) -> dict:
    return {"w": draw.normal(2 * draw.mesh.sizes["X"], 3), "b": draw.normal(3)}


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


def queries(draw: Draw) -> dict:
    """Of a sequence that is split over X; the layout of zig-zag is another one, where it is."""
    n = draw.mesh.sizes["X"]
    heads = [draw.normal(1, 4 * n, each * n, 2) for each in (4, 2, 2)]
    how = {"causal": n > 1 or draw.maybe(0.7), "window": draw.choice([2, 3]), "scale": 0.7}
    given = dict(zip("QKV", tree.shard(heads, [SEQUENCE] * 3, draw.mesh), strict=True))
    form = draw.choice(["ring", "gather", "ulysses"] + ["zigzag"] * (n == 1))
    return given | how | {"mesh": draw.mesh, "form": form, "wanted": plain.attend(*heads, **how)}


SEQUENCE = "A[B, T_X, N, H]"


def attention(mesh, Q, K, V, **options):
    return collectives.unshard(SEQUENCE, context.attention(Q, K, V, mesh, axis="X", **options), mesh)


def held_state(draw: Draw) -> dict:
    state = tree.shard(leaves(draw), TYPES, draw.mesh)
    given = {"mesh": draw.mesh, "state": state | {"n": 4}, "line": TYPES["w"], "step": 3, "keep": 1}
    return given | {"folder": draw.folder, "wanted": state}


def stored(mesh, state, line, step, keep, folder, load="", more=False, async_op=False):
    types = TYPES | {"w": line} | ({"c": "c[K]"} if more else {})
    done = checkpoint.save(folder, state, types, mesh, step, keep=keep, async_op=async_op)
    if done is not None:
        done.result()
    found = checkpoint.load(folder, TYPES | {"w": load or line}, mesh, step)[0]
    return {name: found[name] for name in TYPES}


def other_leaf(name: str, change):
    return lambda given, draw: {"state": given["state"] | {name: change(given["state"].get(name))}}


ENTRIES = {
    "listing": Entry(
        listing,
        listed,
        twists=spoils("params", only=("dtype",))
        | {
            "layers": lambda given, draw: {"params": tree.map(lambda W: W[:1], given["params"])},
            "features": wider,
            "activation": {"activation": "relu"},
            "rows": lambda given, draw: {"In": torch.cat([given["In"]] * (1 + ("Y" in draw.mesh.sizes)))},
            "residual": {"residual": True},
            "norm": {"norm": True},
        },
    ),
    "pipeline": Entry(
        stages,
        staged,
        twists=spoils("In", only=("shape", "dtype", "dim"))
        | {
            "schedule": lambda given, draw: {"make": given["other"]},
            "microbatches": {"microbatches": 2},
            "layers": lambda given, draw: {"params": tree.map(lambda W: torch.cat([W, W]), given["params"])},
            "params dtype": lambda given, draw: {"params": tree.map(torch.Tensor.float, given["params"])},
        },
        messages=True,
    ),
    "training": Entry(
        training,
        trained,
        twists={name: {"config": CONFIG.with_(**change)} for name, change in CHANGED.items()}
        | {
            "smoothing": {"label_smoothing": 0.1},
            "z loss": {"z_loss": 0.1},
            "ignore": {"ignore_index": 3},
            "microbatches": {"microbatches": 2},
            "remat": {"remat": "block"},
            "scale": {"scale": 2.0},
            "sums": {"sums": torch.float32},
            "zero": {"zero": 1},
            "dtype": {"dtype": torch.float32},
            "a replica": {"replica": True},
            "seed": lambda given, draw: {"seed": given["seed"] + 1},
            "weights": lambda given, draw: {"weights": torch.ones(given["targets"].shape, dtype=f64)},
            "segments": lambda given, draw: {"segments": torch.zeros_like(given["targets"])},
            "rows": batch(lambda x: torch.cat([x, x])),
            "length": batch(lambda x: x[:, :4].contiguous()),
        },
    ),
    "update": Entry(
        step,
        updated,
        kinds={"params": c.params, "grads": c.params, "donate": c.flag}
        | dict.fromkeys(("lr", "decay", "most"), c.positive),
        twists=spoils("params", "grads", only=("shape", "dtype"))
        | {
            "max norm": {"most": 0.9},
            "lr": {"lr": 0.2},
            "decay": {"decay": 0.3},
            "types": {"types": {"w": "w[I, J]", "b": "b[J]"}},
            "state": {"steps": 5},
            "a replica": lambda given, draw: {"grads": given["grads"] | {"b": given["grads"]["b"] + 1}},
        },
    ),
    "attention": Entry(
        queries,
        attention,
        kinds=dict.fromkeys("QKV", c.floats) | {"causal": c.flag, "window": c.whole, "scale": c.positive},
        twists=spoils(*"QKV", only=("shape", "dtype", "dim"))
        | {
            "causal": {"causal": False},
            "window": {"window": 4},
            "scale": {"scale": 0.5},
            "form": lambda given, draw: {"form": draw.choice(["ring", "gather", "ulysses"])},
        },
    ),
    "checkpoint": Entry(
        held_state,
        stored,
        kinds={"line": c.line, "step": c.whole, "keep": c.whole},
        twists={
            "shape": other_leaf("w", lambda w: torch.cat([w, w])),
            "dtype": other_leaf("w", torch.Tensor.float),
            "a replica": other_leaf("b", lambda b: b + 1),
            "number": other_leaf("n", lambda _: 5),
            "value": lambda given, draw: other_leaf("w", lambda w: w * 0 + 7)(given, draw) | {"unheld": True},
            "a leaf more": lambda given, draw: other_leaf("c", lambda _: torch.ones(2))(given, draw) | {"more": True},
            "types": {"line": "w[I, J_X]", "load": "w[I_X, J]"},
            "load types": {"load": "w[I, J]", "unheld": True},
            "step": {"step": 6},
            "keep": {"keep": None},
            "folder": lambda given, draw: {"folder": given["folder"] + "-other"},
            "async": {"async_op": True},
        },
    ),
}
