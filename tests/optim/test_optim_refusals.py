"""What optimizers, clipping and chains refuse: leaves, states and options that an update would cast, cut off, or take
for something else."""

from functools import partial
from itertools import product

import pytest
import torch
from problems import same
from refused import evaluated, named, read_table, refused

from scaling import optim, tree
from scaling.mesh import Mesh

INF, NAN = float("inf"), float("nan")
ONE = Mesh({"X": 1})
G = torch.Generator().manual_seed(0)
W, B = (torch.randn(shape, generator=G, dtype=torch.float64) for shape in ((3, 4), (4,)))
SPECS = {"w": "w[D, F]", "b": "b[F]"}
PARTIAL, TYPED = SPECS | {"w": "w[D, F] {U_X}"}, {"W": "W[D, F]"}
SGD, ADAMW = partial(optim.sgd, lr=0.1), partial(optim.adamw, lr=0.1)
MUON = partial(optim.muon, lr=0.1, matrices={"W": "D -> F"})
RULES = {"sgd": SGD(momentum=0.9), "adamw": ADAMW(), "master": ADAMW(master=True)}


def dense(part) -> list[torch.Tensor]:
    """What can be compared of it."""
    return [x for x in tree.leaves(part) if torch.is_tensor(x) and not x.is_meta and not x.is_sparse]


def updated(rule=RULES["adamw"], grads=None, params=None, state=None, **options):
    """An update of {"w", "b"}, of which something is another; what is refused has changed nothing."""
    given = {"w": W.clone(), "b": B.clone()}
    held = rule.init(given)
    grads = {"w": W / 2, "b": B.clone()} if grads is None else grads
    params, held = given if params is None else params, state(held) if state else held
    kept = tree.map(lambda x: x.clone() if torch.is_tensor(x) else x, (grads, params, held))
    try:
        return rule.update(grads, held, params, **options)
    except ValueError:
        assert all(map(torch.equal, dense(kept), dense((grads, params, held))))
        raise


def norm(grads, spec="w[D, F]"):
    return optim.global_norm(grads, dict.fromkeys(grads, spec), ONE)


def muon(specs, W=W, **options):
    rule, params = MUON(**options), {"W": W}
    return rule.update(params, rule.init(params), params, specs=specs)


def given_m(value, name="w"):
    return lambda state: state | {"m": {"b": state["m"]["b"], name: value}}


SCALED = optim.loss_scaled(SGD())
CLIP = partial(optim.clip_by_global_norm, {"w": W}, {"w": "w[D, F]"}, ONE, max_norm=1.0)
LOSS_SCALED = partial(optim.loss_scaled, SGD())
NO_RATE = (INF, NAN, -0.1, True, "1", None, 1j, torch.ones(4))
MASKS = *({"w": m, "b": True} for m in ("no", 2, W, None)), {"w": True}
# the error names the option
TABLE = """
what makes it                                  option        what it is not
SGD                                            lr            NO_RATE
SGD                                            momentum      (INF, -1)
partial(SGD, momentum=0.9)                     nesterov      ("no",)
# which needs a momentum
SGD                                            nesterov      (True,)
ADAMW                                          weight_decay  (INF,)
ADAMW                                          eps           (INF, -1e-8)
ADAMW                                          betas         (0.9, (0.9,), (0.9, 1.0), (1.0, 0.9))
ADAMW                                          master        ("no",)
MUON                                           form          ("all",)
MUON                                           scale         ("rms",)
MUON                                           weight_decay  (-1,)
MUON                                           nesterov      ("no",)
CLIP                                           max_norm      (-1.0, NAN, "1")
CLIP                                           eps           (-9.0,)
LOSS_SCALED                                    first         (INF,)
LOSS_SCALED                                    interval      (1.5, 0)
partial(updated, SCALED)                       finite        ("no", None, W)
lambda mask: updated(ADAMW(mask=mask))         mask          MASKS
lambda lr: updated(ADAMW(lr=lambda _: lr))     lr            NO_RATE
"""
OPTIONS = read_table(TABLE, globals(), ("option",))
ILLEGAL = {  # a call: words of its error
    "updated(SGD(lr=lambda step: 0.1 - step), state=lambda _: {'step': torch.tensor(1)})": "zero or more",
    "SGD().init({'w': W.int()})": "dense tensors of floats", "norm({'w': W.int()})": "float",
    "norm({'W': W}, 'W[D, F] {U_X}')": 'grads["W"]: W[D, F] {U_X} is unreduced',
    "norm({'v': W, 'w': W.to('meta')})": "grads are on cpu, meta",
    "optim.loss_scaled(None)": "give an optimizer",
    "updated(SCALED, state=lambda state: {'step': state['step']}, finite=True)": "no scale",
    "muon(None)": "muon needs the types", "muon(TYPED, B)": 'params["W"]: Muon updates matrices',
    "muon(TYPED, matrices={'V': 'D -> F'})": "matrices is not a tree like params",
    "muon(TYPED, matrices={'W': 'D'})": "names no matrix", "muon(TYPED, matrices={'W': 'D -> N'})": "has no dim N",
    "muon({'W': 'W[D, F] {U_X}'})": "is unreduced",
}  # fmt: skip
CALLS = {
    f"{make.func.__name__ if isinstance(make, partial) else 'updated'}, {name}={value!r}": (
        partial(make, **{name: value}), name)
    for make, name, values in OPTIONS for value in values
}  # fmt: skip
# what is another in an update, and words of its error
TREES = named(
    """
what                          what is another in an update, words of its error
a gradient is missing         ({"grads": {"b": B, "z": W}}, 'grads["w"] has shape nothing, its param (3, 4)')
a gradient of another shape   ({"grads": {"w": B, "b": B}}, 'grads["w"] has shape (4,), its param (3, 4)')
a gradient too many           ({"grads": {"w": W, "b": B, "z": W}}, 'grads["z"] has shape (3, 4), its param nothing')
moments of another name       ({"state": given_m(W, "z")}, 'state["m"]["w"] has shape nothing')
a moment of another shape     ({"state": given_m(B)}, 'state["m"]["w"] has shape (4,), its param (3, 4)')
moments of another precision  ({"state": given_m(W.float())}, 'state["m"] has other dtypes')
no moments
    ({"state": lambda state: {"step": state["step"]}}, "the state holds ['step'], not ['step', ")
partial                       ({"specs": PARTIAL, "mesh": ONE}, "reduce it to w[D, F]")
partial, of which all share   ({"specs": PARTIAL}, 'grads["w"]: w[D, F] {U_X} is unreduced')
no such axis                  ({"specs": SPECS | {"w": "w[D_Y, F]"}, "mesh": ONE}, "unknown mesh axis Y")
a dim less
    ({"specs": SPECS | {"w": "w[D]"}, "mesh": ONE}, 'grads["w"]: w[D] has 1 dims, but the gradient (3')
no spec                       ({"specs": {"w": "w[D, F]"}, "mesh": ONE}, 'grads["b"]: has no spec')
donate                        ({"donate": "no"}, "donate")
""",
    globals(),
)
for step in (torch.tensor(1.0), torch.zeros(2).long(), 3):
    TREES[f"step {step!r}"] = {"state": lambda state, step=step: state | {"step": step}}, 'state["step"]'
for kind, leaf in {
    "ints": W.int(), "complex": W.to(torch.complex128), "meta": W.to("meta"), "sparse": W.to_sparse(), "a number": 1.0,
    "8 bits": W.to(torch.float8_e4m3fn),
}.items():  # fmt: skip
    TREES |= {f"{part} of {kind}": ({part: {"w": leaf, "b": B}}, "fix:") for part in ("grads", "params")}
    TREES[f"moments of {kind}"] = {"state": given_m(leaf)}, "fix:"
for (what, (options, words)), (name, rule), donate in product(TREES.items(), RULES.items(), (False, True)):
    CALLS[f"{name}, {what}, donate={donate}"] = partial(updated, rule, **({"donate": donate} | options)), words

test_refused = refused(evaluated(ILLEGAL, globals()) | CALLS)


def test_donated_tensors_share_no_memory():
    adamw, buffer = RULES["adamw"], torch.randn(8, 6, generator=G, dtype=torch.float64)
    for a, b, words in [
        (buffer[:3], buffer[2:5], r'params\["W1"\] and params\["W2"\] share memory'),
        (buffer[1:4, :4], buffer[:4, :3].t(), "share memory"),
        (buffer[:1].expand(3, 6), buffer[1:4], r'params\["W1"\]: elements share their memory'),
        (buffer[:3], buffer[3:6], ""),
        (buffer[:, ::2], buffer[:, 1::2], ""),  # columns of one buffer are apart
    ]:
        params, kept = {"W1": a, "W2": b}, buffer.clone()
        grads, state = tree.map(lambda p: p + 1, params), adamw.init(params)
        wanted, _ = adamw.update(grads, state, params)
        if words:
            with pytest.raises(ValueError, match=words):
                adamw.update(grads, state, params, donate=True)
            assert torch.equal(buffer, kept)
        else:
            adamw.update(grads, state, params, donate=True)
            assert same(wanted, params)
    params = {"W1": torch.ones(3, 3), "W2": torch.zeros(3, 3)}
    grads, state = dict.fromkeys(params, params["W1"] + 1), adamw.init(params)
    moment = grads | {"W1": state["m"]["W2"]}
    for moved in (moment, state, params), (params, state, params), (grads, state | {"m": params}, params):
        with pytest.raises(ValueError, match="share memory"):
            adamw.update(*moved, donate=True)
    adamw.update(grads, state, params, donate=True)  # gradients are only read, and may be one
