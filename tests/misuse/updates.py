"""Random cases of optimizers and of trees: shards of a tree, and updates of it, against plain formulas in float64."""

import torch
from misuse.draw import Draw
from misuse.hold import REFUSALS, Wrong

from scaling import optim, tree
from scaling.spec import Spec


def leaves_of(draw: Draw, dtype, g) -> dict:
    names = "abc"[: draw.randrange(1, 4)]
    shapes = draw.sample([(3, 4), (4,), (), (2, 3, 2), (0, 2), (1, 5), (3, 4)], len(names))
    params = {name: torch.randn(shape, generator=g).to(dtype) for name, shape in zip(names, shapes, strict=True)}
    return {"nested": [params.pop("a")], **params} if draw.maybe(0.3) else params


def formula(rule: str, p, g, m, v, t: int, lr, momentum, nesterov, decay):
    """One update of a leaf, in float64: (p, m, v)."""
    if rule == "adamw":
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        change = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        return p - lr * decay * p - lr * change, m, v
    g = g + decay * p
    m = momentum * m + g
    return p - lr * (g + momentum * m if nesterov else m if momentum else g), m, v


def update(draw: Draw, mesh, case: int) -> str:
    """Two updates, or one that is to be refused."""
    g, dtype = torch.Generator().manual_seed(case), draw.choice([torch.float64, torch.float32])
    rule, momentum, decay = draw.choice(["sgd", "adamw"]), draw.choice([0.0, 0.9]), draw.choice([0.0, 0.1])
    nesterov, donate, lr = bool(momentum) and draw.maybe(0.5), draw.maybe(0.5), draw.choice([0.0, 0.01, 0.1])
    params = leaves_of(draw, dtype, g)
    decays = [draw.maybe(0.7) for _ in tree.leaves(params)]
    mask = None if all(decays) else tree.unflatten(params, decays)
    options = {"weight_decay": decay, "mask": mask}
    options |= {"momentum": momentum, "nesterov": nesterov} if rule == "sgd" else {}
    wrong, specs = "", None
    how = draw.choice(["lr", "name", "missing", "extra", "shape", "tied", "alias", "state", "specs"] + [""] * 9)
    if how == "lr":
        lr, wrong = draw.choice([-0.1, float("nan"), lambda step: -1.0 - step]), how
    constant = draw.maybe(0.5) or callable(lr)
    try:
        optimizer = getattr(optim, rule)(lr if constant else lambda step: lr + 0 * step, **options)
    except REFUSALS:
        if wrong:
            return "refused"
        raise
    grads = tree.map(lambda p: torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype), params)
    if how == "tied" and "b" in params:
        params["d"], grads["d"], donate, wrong = params["b"].view(params["b"].shape), grads["b"].clone(), True, how
        wrong = how if params["b"].numel() else ""
        decays = [True] * len(tree.leaves(params))
        optimizer = getattr(optim, rule)(0.1 if wrong else lr, **(options | {"mask": None}))
    state = optimizer.init(params)
    if how == "name" and "b" in grads:
        grads["z"], wrong = grads.pop("b"), how
    if how == "missing" and len(grads) > 1:
        grads, wrong = dict(list(grads.items())[1:]), how
    if how == "extra":
        grads, wrong = grads | {"z": torch.ones(1)}, how
    if how == "shape":
        name = draw.choice(list(grads))
        if isinstance(grads[name], torch.Tensor) and grads[name].dim():
            grads[name] = torch.ones([1] * grads[name].dim()).to(dtype)  # which torch would broadcast
            wrong = how if grads[name].shape != params[name].shape else ""
    if how == "alias" and "b" in grads and grads["b"].numel() and "m" in state:
        grads["b"], donate, wrong = state["m"]["b"], True, how
    if how == "state":
        state, wrong = draw.choice([{}, {"step": state["step"], "other": params}, [state["step"]]]), how
    if how == "specs":
        specs = tree.map(lambda p: "W[" + ", ".join(f"D{i}" for i in range(p.dim())) + "]", params)
        if draw.maybe(0.7):
            name = draw.choice(list(specs))
            if isinstance(specs[name], str):
                specs[name], wrong = specs[name] + " {U_X}", how
    kept = tree.map(torch.clone, (params, grads))
    what = f"{rule} {options}, lr {lr}, donate {donate}, {how}: {tree.map(lambda p: tuple(p.shape), (params, grads))}"
    wanted = [
        [p.double().clone(), torch.zeros_like(p).double(), torch.zeros_like(p).double()] for p in tree.leaves(params)
    ]
    new = params
    for t in (1, 2):
        try:
            new, state = optimizer.update(grads, state, new, donate=donate, specs=specs, mesh=mesh if specs else None)
        except REFUSALS as error:
            if not wrong:
                raise Wrong(f"refused: {what}\n{error}") from error
            if t == 1 and not all(map(torch.equal, tree.leaves(kept), tree.leaves((params, grads)))):
                raise Wrong(f"changed, though refused: {what}") from error
            return "refused"
        except Exception as error:
            raise Wrong(f"an error that says nothing: {what}\n{type(error).__name__}: {error}") from error
        if wrong:
            raise Wrong(f"accepted: {what}")
        rows = zip(wanted, tree.leaves(kept[1]), decays, strict=True)
        wanted = [formula(rule, p, g.double(), m, v, t, lr, momentum, nesterov, decay * d) for (p, m, v), g, d in rows]
    for ours, (theirs, _, _) in zip(tree.leaves(new), wanted, strict=True):
        if ours.dtype != dtype or not torch.allclose(ours.double(), theirs, rtol=1e-5, atol=1e-6):
            raise Wrong(f"another number: {what}\n{ours}\n{theirs}")
    if not donate and not all(map(torch.equal, tree.leaves(kept), tree.leaves((params, grads)))):
        raise Wrong(f"an argument was changed: {what}")
    return "right"


def trees(draw: Draw, mesh, case: int) -> str:
    """Shards of a tree, and the way back; or trees that do not fit."""
    g, whole, specs, wrong = torch.Generator().manual_seed(case), {}, {}, ""
    for name in "ab":
        spec, local = draw.spec(mesh, draw.randrange(3))
        spec = Spec(spec.name, tuple((f"D{i}", axes) for i, (_, axes) in enumerate(spec.dims)))
        shape = [n * mesh.size(axes) for n, (_, axes) in zip(local, spec.dims, strict=True)]
        whole[name], specs[name] = torch.randint(0, 9, shape, generator=g), str(spec)
    how = draw.choice(["", "", "", "missing", "extra", "dims", "unreduced", "divides", "no tensor", "axis"])
    if how == "missing":
        wrong, whole = how, {"a": whole["a"]}
    if how == "extra":
        wrong, whole = how, whole | {"c": whole["a"]}
    if how == "dims":
        wrong, whole["a"] = how, whole["a"][None]
    if how == "unreduced":
        wrong, specs["a"] = how, "A[D_Y] {U_X}"
    if how == "divides":
        wrong, specs["a"], whole["a"] = how, "A[D_X, F_Y]", torch.ones(3, 5)
    if how == "axis":
        wrong, specs["a"], whole["a"] = how, "A[D_W]", torch.ones(4)
    if how == "no tensor":
        wrong, whole["a"] = how, draw.choice([whole["a"].numpy(), 3.0, "a"])
    what = f"tree.shard {specs} of {tree.map(lambda x: tuple(getattr(x, 'shape', ())), whole)}, {how}"
    try:
        shards = tree.shard(whole, specs, mesh)
        back = tree.unshard(shards, specs, mesh)
    except REFUSALS as error:
        if wrong:
            return "refused"
        raise Wrong(f"refused: {what}\n{error}") from error
    except Exception as error:
        raise Wrong(f"an error that says nothing: {what}\n{type(error).__name__}: {error}") from error
    if wrong:
        raise Wrong(f"accepted: {what}")
    for name, x in whole.items():
        place = tree.paired(whole, specs)[list(whole).index(name)][2].slices(tuple(x.shape), mesh, mesh.coord)
        if not torch.equal(shards[name], x[place]) or not torch.equal(back[name], x):
            raise Wrong(f"another number: {what}")
        shards[name] += 1
        back[name] += 1
    if not all(torch.equal(x, whole[name]) for name, x in whole.items()):
        raise Wrong(f"a result shares memory with the tree: {what}")
    return "right"
