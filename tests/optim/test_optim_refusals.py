"""What optimizers, clipping and chains refuse: leaves, states and options that an update would cast, cut off, or take
for something else; and what they take as it is."""

import pytest
import torch
from refused import refused

from scaling import optim, tree
from scaling.mesh import AbstractMesh, Mesh

INF, NAN = float("inf"), float("nan")
ONE = Mesh({"X": 1})
G = torch.Generator().manual_seed(0)
W, B = (torch.randn(shape, generator=G, dtype=torch.float64) for shape in ((3, 4), (4,)))
SPECS = {"w": "w[D, F]", "b": "b[F]"}
RULES = {
    "sgd": lambda **kw: optim.sgd(0.1, momentum=0.9, **kw),
    "adamw": lambda **kw: optim.adamw(0.1, **kw),
    "master": lambda **kw: optim.adamw(0.1, **(kw | {"master": True})),
}


def equal(a, b) -> bool:
    """Of what is a dense tensor."""
    a, b = (
        [x for x in tree.leaves(part) if torch.is_tensor(x) and not x.is_meta and not x.is_sparse] for part in (a, b)
    )
    return len(a) == len(b) and all(map(torch.equal, a, b))


def updated(rule=None, grads=None, params=None, state=None, **options):
    """An update of {"w", "b"}, of which something is another; what is refused has changed nothing."""
    rule = optim.adamw(0.1) if rule is None else rule
    given = {"w": W.clone(), "b": B.clone()}
    held = rule.init(given)
    grads = {"w": W / 2, "b": B.clone()} if grads is None else grads
    params, held = given if params is None else params, state(held) if state else held
    kept = tree.map(lambda x: x.clone() if torch.is_tensor(x) else x, (grads, params, held))
    try:
        return rule.update(grads, held, params, **options)
    except ValueError:
        assert equal(kept, (grads, params, held))
        raise


def norm(grads, spec="w[D, F]", mesh=ONE):
    return optim.global_norm(grads, dict.fromkeys(grads, spec), mesh)


def clipped(max_norm, **options):
    return optim.clip_by_global_norm({"w": W}, {"w": "w[D, F]"}, ONE, max_norm, **options)


def chained(**options):
    return updated(optim.chain(optim.clip(1.0), optim.adamw(0.1)), **options)


def scaled(**options):
    return updated(optim.loss_scaled(optim.sgd(0.1)), **options)


def muon(matrices="D -> F", specs="W[D, F]", lr=0.1, params=None, **options):
    params = {"W": torch.ones(4, 4)} if params is None else params
    rule = optim.muon(lr, matrices if isinstance(matrices, dict) else dict.fromkeys(params, matrices))
    specs = dict.fromkeys(params, specs) if specs else None
    return rule.update(tree.map(torch.clone, params), rule.init(params), params, specs=specs, **options)


def given_m(value):
    return lambda state: state | {"m": state["m"] | {"w": value}}


TREES = {
    "a gradient is missing": ({"grads": {"b": B, "z": W}}, 'grads["w"] has shape nothing, its param (3, 4)'),
    "a gradient of another shape": ({"grads": {"w": B, "b": B}}, 'grads["w"] has shape (4,), its param (3, 4)'),
    "a gradient too many": (
        {"grads": {"w": W, "b": B, "z": W}},
        'grads["z"] has shape (3, 4), its param nothing',
    ),
    "moments of another name": (
        {"state": lambda state: state | {"m": {"b": B, "z": W}}},
        'state["m"]["w"] has shape nothing',
    ),
    "a moment of another shape": ({"state": given_m(B)}, 'state["m"]["w"] has shape (4,), its param (3, 4)'),
    "moments of another precision": ({"state": given_m(W.float())}, 'state["m"] has other dtypes'),
    "no moments": ({"state": lambda state: {"step": state["step"]}}, "the state holds ['step'], not ['step', "),
    **{
        f"step {step!r}": ({"state": lambda state, step=step: state | {"step": step}}, 'state["step"]')
        for step in (torch.tensor(1.0), torch.tensor(True), torch.zeros(2).long(), 3, None)
    },
    "partial": ({"specs": SPECS | {"w": "w[D, F] {U_X}"}, "mesh": ONE}, "reduce it to w[D, F]"),
    "partial, of which all share": (
        {"specs": SPECS | {"w": "w[D, F] {U_X}"}},
        'grads["w"]: w[D, F] {U_X} is unreduced',
    ),
    "no such axis": ({"specs": SPECS | {"w": "w[D_Y, F]"}, "mesh": ONE}, "unknown mesh axis Y"),
    "a dim less": (
        {"specs": SPECS | {"w": "w[D]"}, "mesh": ONE},
        'grads["w"]: w[D] has 1 dims, but the gradient (3, 4)',
    ),
    "no spec": ({"specs": {"w": "w[D, F]"}, "mesh": ONE}, 'grads["b"]: has no spec'),
    "donate": ({"donate": "no"}, "donate"),
}
LEAVES = {
    "ints": W.int(), "bools": W > 0, "complex": W.to(torch.complex128), "meta": W.to("meta"), "sparse": W.to_sparse(),
    "a number": 1.0, "numpy's": W.numpy(), "8 bits": W.to(torch.float8_e4m3fn),
}  # fmt: skip
TREES |= {f"grads of {kind}": ({"grads": {"w": leaf, "b": B}}, "fix:") for kind, leaf in LEAVES.items()}
TREES |= {f"params of {kind}": ({"params": {"w": leaf, "b": B}}, "fix:") for kind, leaf in LEAVES.items()}
TREES |= {f"moments of {kind}": ({"state": given_m(leaf)}, "fix:") for kind, leaf in LEAVES.items()}
RATES = (INF, NAN, -0.1, True, "1", None, 1j, torch.ones(4))
BETAS = (0.9, None, (0.9,), (NAN, 0.9), (0.9, 1.0), (1.0, 0.9), (-0.1, 0.9))
# what: the call, or the call and words of its error
ORDER = "one optimizer, which comes last"
CALLS = {
    **{f"lr {lr!r}": lambda lr=lr: updated(optim.sgd(lr)) for lr in RATES},
    **{f"schedule {lr!r}": lambda lr=lr: updated(optim.adamw(lambda _: lr)) for lr in RATES},
    "a schedule that falls below 0": lambda: updated(
        optim.sgd(lambda step: 0.1 - step), state=lambda state: {"step": torch.tensor(1)}),
    **{f"momentum {n}": lambda n=n: optim.sgd(0.1, momentum=n) for n in (INF, -1)},
    "decay": lambda: optim.adamw(0.1, weight_decay=INF),
    **{f"eps {n}": lambda n=n: optim.adamw(0.1, eps=n) for n in (INF, -1e-8)},
    **{f"betas {betas!r}": lambda betas=betas: optim.adamw(0.1, betas) for betas in BETAS},
    "nesterov": lambda: optim.sgd(0.1, 0.9, nesterov="no"),
    "nesterov without momentum": lambda: optim.sgd(0.1, nesterov=True),
    "master": lambda: optim.adamw(0.1, master="no"),
    "a state of ints": lambda: optim.sgd(0.1).init({"w": W.int()}),
    **{f"mask {m!r}": (lambda m=m: updated(optim.adamw(0.1, mask={"w": m, "b": True})), "mask must be a bool for each")
       for m in ("no", 2, W, None)},
    "mask of another tree": (lambda: updated(optim.adamw(0.1, mask={"w": True})), "mask must be a bool for each of"),
    **{f"clip {n!r}": lambda n=n: optim.clip(n) for n in (-1.0, NAN)},
    **{f"norm {n!r}": lambda n=n: clipped(n) for n in (-1.0, NAN, "1")},
    "clip's eps": lambda: clipped(1.0, eps=-9.0),
    "a norm of other dims": (lambda: norm({"w": W}, "w[D]"), "has 1 dims, but the gradient"),
    "a norm of ints": (lambda: norm({"w": W.int()}), "float"),
    "a norm of an axis that is not there": (lambda: norm({"w": W}, "w[D_Y, F]"), "unknown mesh axis Y"),
    "a norm of partial sums": (lambda: norm({"W": W}, "W[D, F] {U_X}"), 'grads["W"]: W[D, F] {U_X} is unreduced'),
    "a norm of another tree": (lambda: optim.global_norm({"v": W}, {"w": "w[D, F]"}, ONE), "missing"),
    "a norm of two devices": (lambda: norm({"v": W, "w": W.to("meta")}), "grads are on cpu, meta"),
    "chain of nothing": (lambda: optim.chain(), ORDER),
    "chain of a number": (lambda: optim.chain(3, optim.sgd(0.1)), ORDER),
    "chain without an optimizer": (lambda: optim.chain(optim.clip(1.0)), ORDER),
    "chain in another order": (lambda: optim.chain(optim.adamw(0.1), optim.clip(1.0)), ORDER),
    "chain of two": (lambda: optim.chain(optim.adamw(0.1), optim.sgd(0.1)), ORDER),
    "chain without types": (chained, "fix: update(..., specs=..., mesh=mesh)"),
    "chain of partial sums": (
        lambda: chained(specs=SPECS | {"w": "w[D, F] {U_X}"}, mesh=AbstractMesh({"X": 2})), "unreduced"),
    "scale": lambda: optim.loss_scaled(optim.sgd(0.1), first=INF),
    **{f"interval {n}": lambda n=n: optim.loss_scaled(optim.sgd(0.1), interval=n) for n in (1.5, 0)},
    "scale of nothing": lambda: optim.loss_scaled(None),
    **{f"finite {f!r}": lambda f=f: scaled(finite=f) for f in ("no", None, W)},
    "a state without its scale": (lambda: scaled(state=lambda state: {"step": state["step"]}, finite=True), "no scale"),
    "muon without types": (lambda: muon(specs=None), "muon needs the types"),
    "muon of a vector": (lambda: muon(params={"g": torch.ones(4)}), 'params["g"]: Muon updates matrices'),
    "muon of another tree": (lambda: muon({"V": "D -> F"}), "matrices is not a tree like params"),
    "muon of one side": (lambda: muon("D"), "names no matrix"),
    "muon of another dim": (lambda: muon("D -> N"), "has no dim N"),
    "muon of partial sums": (lambda: muon(specs="W[D, F] {U_X}"), "is unreduced"),
    "muon's form": (lambda: optim.muon(0.1, {"W": "D -> F"}, form="all"), "form"),
    "muon's scale": (lambda: optim.muon(0.1, {"W": "D -> F"}, scale="rms"), "scale"),
    "muon's decay": (lambda: optim.muon(0.1, {"W": "D -> F"}, weight_decay=-1), "weight_decay"),
    "muon's nesterov": lambda: optim.muon(0.1, {"W": "D -> F"}, nesterov="no"),
    "muon's rate": (lambda: muon(lr=lambda step: step - 1), "zero or more"),
    "muon of tied params": (lambda: muon(params=dict.fromkeys("VW", torch.ones(4, 4)), donate=True), "share memory"),
    "muon of ints": (lambda: muon(params={"W": torch.ones(4, 4).int()}), "dense tensors of floats"),
}  # fmt: skip
CALLS |= {
    f"{rule}, {what}, donate={donate}": (
        lambda rule=rule, options=options, donate=donate: updated(RULES[rule](), **({"donate": donate} | options)),
        words,
    )
    for what, (options, words) in TREES.items()
    for rule in RULES
    for donate in (False, True)
}

test_refused = refused(CALLS)


def test_a_list_is_as_good_as_a_tuple():
    params, rule = [W, B], optim.adamw(0.1)
    new, _ = rule.update([W, B], rule.init(params), (W, B))
    assert len(tree.leaves(new)) == 2


@pytest.mark.parametrize("rule", RULES)
def test_donated_tensors_share_no_memory(rule):
    optimizer, buffer = RULES[rule](), torch.randn(8, 6, generator=G, dtype=torch.float64)
    shared = r'params\["W1"\] and params\["W2"\] share memory'
    one, other = (torch.randn(3, 3, generator=G, dtype=torch.float64) for _ in range(2))
    for a, b, words in [
        (buffer[:3, :3], buffer[:3, :3], shared),
        (buffer[:3], buffer[2:5], shared),
        (buffer[1:4, :4], buffer[:4, :3].t(), "share memory"),
        (buffer[:1].expand(3, 6), buffer[1:4], r'params\["W1"\]: elements share their memory'),
        (buffer[:3], buffer[3:6], ""),
        (buffer[:, ::2], buffer[:, 1::2], ""),  # columns of one buffer are apart
    ]:
        params, kept = {"W1": a, "W2": b}, buffer.clone()
        grads, state = tree.map(lambda p: p + 1, params), optimizer.init(params)
        wanted, _ = optimizer.update(grads, state, tree.map(torch.clone, params))
        assert equal(wanted, optimizer.update(grads, state, params)[0])
        if words:
            with pytest.raises(ValueError, match=words):
                optimizer.update(grads, state, params, donate=True)
            assert torch.equal(buffer, kept)
        else:
            new, _ = optimizer.update(grads, state, params, donate=True)
            assert equal(wanted, new)
            assert new["W1"].data_ptr() == buffer.data_ptr()
    params = {"W1": one, "W2": other}
    state = optimizer.init(params)
    for grads, words in [
        ({"W1": state["m"]["W2"], "W2": one + 1}, r'state\["m"\]\["W2"\]'),
        ({"W1": one + 1, "W2": params["W1"]}, r'params\["W1"\] and grads\["W2"\]'),
    ]:
        with pytest.raises(ValueError, match=words):
            optimizer.update(grads, state, params, donate=True)
    optimizer.update(dict.fromkeys(params, one + 1), state, params, donate=True)  # gradients are only read
    with pytest.raises(ValueError, match=r'state\["(m|v)"\]'):
        optimizer.update({"W1": one + 1, "W2": other + 1}, state | {"m": params}, params, donate=True)


@pytest.mark.slow
def test_partial_sums_are_refused_by_a_compiled_update():
    params, optimizer = {"w": W, "b": B}, optim.adamw(0.1)
    state = optimizer.init(params)
    assert equal(
        optimizer.update(params, state, params), optimizer.update(params, state, params, specs=SPECS, mesh=ONE)
    )
    for specs in (SPECS | {"w": "w[D, F] {U_X}"}, SPECS | {"w": "w[D_Y, F]"}):
        torch._dynamo.reset()
        update = torch.compile(
            lambda g, s=specs: optimizer.update(g, state, params, specs=s, mesh=ONE), backend="eager"
        )
        with pytest.raises(Exception, match="ShardingError"):
            update(params)
