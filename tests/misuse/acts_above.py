"""Calls above the collectives, for `fuzz_ranks.py`: held against one device, with the ways in which one rank may make
another one."""

import torch
from misuse.act import Act, hold, normal, spoilt
from misuse.draw import Draw
from misuse.hold import Wrong

from scaling import collectives as c
from scaling import optim, tree
from scaling.configs import Config
from scaling.models import transformer as model
from scaling.models.mlp import block
from scaling.schedules import gpipe, one_f_one_b
from scaling.strategies import fsdp, fsdp_tp, pipeline, transformer
from scaling.strategies.context import attention
from scaling.train import checkpoint, guards

f64 = torch.float64


def listing(draw: Draw, mesh, twist: str, folder: str) -> None:
    """A step of FSDP, or FSDP and TP, beside one device's."""
    strategy = fsdp_tp if "Y" in mesh.sizes else fsdp
    B, D, F, act = 4 * mesh.size(), 2 * mesh.size(), 2 * mesh.size(), "gelu"
    whole = {"W_in": normal(draw, 2, D, F), "W_out": normal(draw, 2, F, D)}
    In, dOut = normal(draw, B, D), normal(draw, B, D)
    types = {name: strategy.SPECS[name].replace("[", "[L, ") for name in whole}
    if twist == "layers":
        whole = tree.map(lambda W: W[:1], whole)
    if twist == "features":
        whole = {"W_in": torch.cat([whole["W_in"]] * 2, 2), "W_out": torch.cat([whole["W_out"]] * 2, 1)}
    params = tree.shard(whole, types, mesh)
    if twist == "dtype":
        params = tree.map(torch.Tensor.float, params)
    act = "relu" if twist == "activation" else act
    In, dOut = (tree.shard(x, strategy.SPECS["In"], mesh) for x in (In, dOut))
    In = torch.cat([In, In]) if twist == "rows" else In
    Out, saved = strategy.forward(params, In, mesh, act, twist == "residual", twist == "norm")
    if twist == "rows" and strategy is fsdp:  # whose ranks exchange weights alone
        return
    if twist in ("rows", "layers", "features", "dtype"):
        raise Wrong("a forward of other shapes went through")
    _, grads = strategy.backward(dOut, saved, params, mesh)
    leaf = {name: W.clone().requires_grad_() for name, W in whole.items()}
    given = tree.unshard(In, strategy.SPECS["In"], mesh).requires_grad_()
    x = given
    for a, b in zip(leaf["W_in"], leaf["W_out"], strict=True):
        x = block(x, a, b, "gelu")
    x.backward(tree.unshard(dOut, strategy.SPECS["In"], mesh))
    hold(tree.unshard(Out, strategy.SPECS["Out"], mesh), x.detach(), "Out")
    hold(tree.unshard(grads, types, mesh), {name: W.grad for name, W in leaf.items()}, "gradients")


def stages(draw: Draw, mesh, twist: str, folder: str) -> None:
    """A pipeline over X beside one device."""
    Z, M, (make, other) = mesh.sizes["X"], 4, draw.sample([gpipe, one_f_one_b], 2)
    whole = {"W_in": normal(draw, Z, 4, 6), "W_out": normal(draw, Z, 6, 4)}
    In, Target = normal(draw, 8, 4), normal(draw, 8, 4)
    make = other if twist == "schedule" else make
    schedule = make(Z, 2 if twist == "microbatches" else M)
    params = tree.map(lambda W: W[mesh.coord["X"] : mesh.coord["X"] + 1], whole)
    if twist == "layers":
        params = tree.map(lambda W: torch.cat([W, W]), params)
    if twist == "params dtype":
        params = tree.map(torch.Tensor.float, params)
    loss = lambda Out, Target: (Out - Target).square().sum() / 8  # noqa: E731
    found, grads = pipeline.value_and_grad(params, spoilt(In, twist), Target, mesh, schedule, loss, axis="X")
    leaf = {name: W.clone().requires_grad_() for name, W in whole.items()}
    x = In
    for a, b in zip(leaf["W_in"], leaf["W_out"], strict=True):
        x = block(x, a, b, "gelu")
    value = loss(x, Target)
    value.backward()
    hold(found, value.detach(), "the loss")
    hold(grads, tree.map(lambda W: W.grad[mesh.coord["X"] : mesh.coord["X"] + 1], leaf), "gradients")


CONFIG = Config("small", L=2, D=8, F=8, N=4, K=4, H=2, V=16)
CHANGED = {"theta": {"theta": 100.0}, "eps": {"eps": 1e-2}, "activation": {"activation": "relu"}, "layers": {"L": 1}}
CHANGED |= {"window": {"window": 2}, "gated": {"gated": False}, "tied": {"tied": True}, "features": {"F": 16}}
LOSSES = {"smoothing": {"label_smoothing": 0.1}, "z loss": {"z_loss": 0.1}, "ignore": {"ignore_index": 3}}
LOSSES |= {"microbatches": {"microbatches": 2}, "remat": {"remat": "block"}, "scale": {"scale": 2.0}}
LOSSES |= {"sums": {"sums": torch.float32}, "weights": {}, "segments": {}, "zero": {"zero": 1}, "context": {}}


def training(draw: Draw, mesh, twist: str, folder: str) -> None:
    """Loss and gradients of a Transformer beside one device."""
    seed, config = draw.randrange(100), CONFIG
    options = dict(LOSSES.get(twist, {}))
    if twist in CHANGED:
        try:
            config = CONFIG.with_(**CHANGED[twist])
        except (TypeError, ValueError):
            return training(draw, mesh, "", folder)
    B = 4 * mesh.size()
    tokens = torch.randint(0, 16, (B, 9), generator=torch.Generator().manual_seed(seed))
    types = transformer.specs(config, mesh, zero=options.get("zero", 3))
    mine = model.init(config, seed + (twist == "seed"), f64, mesh=mesh, specs=types)
    if twist == "dtype":
        mine = tree.map(torch.Tensor.float, mine)
    if twist == "a replica":
        mine["norm"] = mine["norm"] + 1.0
    ids, targets = (tree.shard(x.contiguous(), "t[B_X, T]", mesh) for x in (tokens[:, :-1], tokens[:, 1:]))
    if twist == "rows":
        ids, targets = torch.cat([ids, ids]), torch.cat([targets, targets])
    if twist == "length":
        ids, targets = ids[:, :4].contiguous(), targets[:, :4].contiguous()
    if twist == "weights":
        options["weights"] = torch.ones(targets.shape, dtype=f64)
    if twist == "segments":
        options["segments"] = torch.zeros_like(targets)
    if twist == "a replica":  # as training does every so many steps
        guards.check_replicas(mine, types, mesh, 1)
    found, grads = transformer.loss_and_grads(mine, ids, targets, config, mesh, **options)
    params = model.init(CONFIG, seed, f64)
    leaf = tree.map(lambda W: W.clone().requires_grad_(), params)
    value = model.loss(leaf, tokens, config=CONFIG)
    value.backward()
    hold(found, value.detach(), "the loss")
    hold(transformer.unshard(grads, CONFIG, mesh), tree.map(lambda W: W.grad, leaf), "gradients")


def update(draw: Draw, mesh, twist: str, folder: str) -> None:
    """Clipping and AdamW on shards beside one device."""
    n = mesh.sizes["X"]
    whole, grads = ({"w": normal(draw, 2 * n, 3), "b": normal(draw, 3)} for _ in range(2))
    types = {"w": "w[I_X, J]", "b": "b[J]"}
    most, rate = (0.9 if twist == "max norm" else 0.5), (0.2 if twist == "lr" else 0.1)
    decay = 0.3 if twist == "decay" else 0.0
    mine, gs = tree.shard(whole, types, mesh), tree.shard(grads, types, mesh)
    if twist == "a replica":
        gs["b"] = gs["b"] + 1
    if twist in ("shape", "dtype"):
        mine, gs = (tree.map(lambda x: spoilt(x, twist), each) for each in (mine, gs))
    if twist == "types":
        types = {"w": "w[I, J]", "b": "b[J]"}
    rule = optim.chain(optim.clip(most), optim.adamw(rate, weight_decay=decay))
    state = rule.init(mine)
    if twist == "state":
        state["step"] += 5
    found, _ = rule.update(gs, state, mine, specs=types, mesh=mesh)
    guards.check_replicas(found, {"w": "w[I_X, J]", "b": "b[J]"}, mesh, 1)
    leaf = {name: W.clone().requires_grad_() for name, W in whole.items()}
    for name, W in leaf.items():
        W.grad = grads[name].clone()
    torch.nn.utils.clip_grad_norm_(leaf.values(), 0.5)
    torch.optim.AdamW(leaf.values(), lr=0.1, weight_decay=0.0).step()
    hold(tree.unshard(found, {"w": "w[I_X, J]", "b": "b[J]"}, mesh), tree.map(torch.Tensor.detach, leaf), "params")


def saved(draw: Draw, mesh, twist: str, folder: str) -> None:
    """A checkpoint, and what is loaded of it."""
    n = mesh.sizes["X"]
    whole, types = {"w": normal(draw, 2 * n, 3), "b": normal(draw, 3)}, {"w": "w[I_X, J]", "b": "b[J]"}
    mine = tree.shard(whole, types, mesh) | {"n": 4}
    if twist in ("shape", "dtype"):
        mine["w"] = spoilt(mine["w"], twist)
    if twist == "a replica":
        mine["b"] = mine["b"] + 1
    if twist == "number":
        mine["n"] = 5
    if twist == "a leaf more":
        mine, types = mine | {"c": torch.ones(2)}, types | {"c": "c[K]"}
    if twist == "types":
        types = {"w": "w[I, J_X]", "b": "b[J]"}
    if twist == "value":
        mine["w"][:] = 7.0
    step, keep = (6 if twist == "step" else 5), (1 if twist == "keep" else None)
    where = folder + "-other" if twist == "folder" else folder
    done = checkpoint.save(where, mine, types, mesh, step, keep=keep, async_op=twist == "async" or draw.maybe(0.0))
    if done is not None:
        done.result()
    types = {"w": "w[I_X, J]", "b": "b[J]"}
    if twist == "load types":
        types = {"w": "w[I, J]", "b": "b[J]"}
    found, _ = checkpoint.load(where, types, mesh, 5 if twist != "step" else 6)
    if twist in ("load types", "value"):
        return
    hold({name: found[name] for name in types}, tree.shard(whole, types, mesh), "what is loaded")


def queries(draw: Draw, mesh, twist: str, folder: str) -> None:
    """Attention over a split sequence, beside one device."""
    n, forms = mesh.sizes["X"], ["ring", "gather", "ulysses"]
    form = draw.choice(forms)
    Q, K, V = (normal(draw, 1, 4 * n, 2 * n, 4) for _ in range(3))
    types = "A[B, T_C, N, H]".replace("C", "X")
    mine = [tree.shard(x, types, mesh) for x in (Q, K, V)]
    options = {"causal": twist != "causal", "window": 2 if twist == "window" else None}
    options |= {"scale": 0.5} if twist == "scale" else {}
    form = draw.choice(forms) if twist == "form" else form
    mine = [spoilt(x, twist) for x in mine]
    found = attention(mine[0], mine[1], mine[2], mesh, form=form, axis="X", **options)
    q, k, v = (x.transpose(1, 2) for x in (Q, K, V))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    hold(c.unshard(types, found, mesh), wanted.transpose(1, 2), f"attention by {form}")


STATES = ("shape", "dtype", "a replica", "number", "a leaf more", "types", "value", "step", "keep", "folder", "async")
ACTS = {
    "listing": Act(listing, ("layers", "features", "dtype", "activation", "rows", "residual", "norm")),
    "pipeline": Act(
        stages, ("shape", "dtype", "dim", "schedule", "microbatches", "layers", "params dtype"), messages=True
    ),
    "training": Act(training, (*CHANGED, *LOSSES, "seed", "dtype", "a replica", "rows", "length")),
    "attention": Act(queries, ("shape", "dtype", "dim", "causal", "window", "scale", "form")),
    "update": Act(update, ("shape", "dtype", "max norm", "lr", "decay", "types", "state", "a replica")),
    "checkpoint": Act(saved, (*STATES, "load types")),
}
