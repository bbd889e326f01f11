"""Leaves, states and options that an update would cast, cut off, or take for something else: refused with their fix."""

import pytest
import torch

from scaling import optim
from scaling.mesh import Mesh

W, B = torch.ones(3, 4, dtype=torch.float64), torch.full((4,), 2.0, dtype=torch.float64)


def updated(rule=None, change=None, leaf=None, state=None, **options):
    """An update of {"w", "b"}, with a leaf of the gradients, of the params or of the state that is another."""
    rule = optim.adamw(0.1) if rule is None else rule
    trees = {"grads": {"w": W / 2, "b": B}, "params": {"w": W.clone(), "b": B.clone()}}
    held = rule.init(trees["params"])
    for name, given in (change or {}).items():
        (held if name in held else trees)[name] = given if leaf is None else {"w": leaf, "b": B}
    return rule.update(trees["grads"], held | (state or {}), trees["params"], **options)


LEAVES = {
    "ints": W.int(),
    "bools": W > 0,
    "complex": W.to(torch.complex128),
    "meta": W.to("meta"),
    "sparse": W.to_sparse(),
    "a number": 1.0,
    "numpy's": W.numpy(),
    "8 bits": W.to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("part", ["grads", "params", "m"])
def test_leaves_that_are_no_floats_or_elsewhere_are_refused(part, leaf):
    for rule in (optim.adamw(0.1), optim.sgd(0.1, momentum=0.9), optim.adamw(0.1, master=True)):
        for donate in (False, True):
            with pytest.raises(ValueError, match="fix:"):
                updated(rule, {part: None}, leaf, donate=donate)


@pytest.mark.parametrize("step", [torch.tensor(1.0), torch.tensor(True), torch.zeros(2).long(), 3, None])
def test_a_state_counts_its_steps_in_an_int64(step):
    with pytest.raises(ValueError, match=r'state\["step"\](.|\n)*fix:'):
        updated(state={"step": step})


def test_moments_of_another_precision_are_refused():
    with pytest.raises(ValueError, match=r'state\["m"\] has other dtypes'):
        updated(state={"m": {"w": W.float(), "b": B.float()}})


INF, NAN = float("inf"), float("nan")
ONE = Mesh({"X": 1})
RATES = (INF, NAN, -0.1, True, "1", None, 1j, torch.ones(4))
BETAS = (0.9, None, (0.9,), (NAN, 0.9), (0.9, 1.0), (1.0, 0.9), (-0.1, 0.9))
WRONG = {
    **{f"lr {lr!r}": lambda lr=lr: updated(optim.sgd(lr)) for lr in RATES},
    **{f"schedule {lr!r}": lambda lr=lr: updated(optim.adamw(lambda _: lr)) for lr in RATES},
    "a schedule that falls below 0": lambda: updated(
        optim.sgd(lambda step: 0.1 - step), state={"step": torch.tensor(1)}
    ),
    **{f"momentum {n}": lambda n=n: optim.sgd(0.1, momentum=n) for n in (INF, -1)},
    "decay": lambda: optim.adamw(0.1, weight_decay=INF),
    **{f"eps {n}": lambda n=n: optim.adamw(0.1, eps=n) for n in (INF, -1e-8)},
    **{f"betas {betas!r}": lambda betas=betas: optim.adamw(0.1, betas) for betas in BETAS},
    "nesterov": lambda: optim.sgd(0.1, 0.9, nesterov="no"),
    "nesterov without momentum": lambda: optim.sgd(0.1, nesterov=True),
    "a state of ints": lambda: optim.sgd(0.1).init({"w": W.int()}),
    **{f"clip {n!r}": lambda n=n: optim.clip(n) for n in (-1.0, NAN)},
    "master": lambda: optim.adamw(0.1, master="no"),
    "donate": lambda: updated(donate="no"),
    **{f"mask {m!r}": lambda m=m: updated(optim.adamw(0.1, mask={"w": m, "b": True})) for m in ("no", 2, W, None)},
    **{
        f"norm {n!r}": lambda n=n: optim.clip_by_global_norm({"w": W}, {"w": "w[D, F]"}, ONE, n)
        for n in (-1.0, NAN, "1")
    },
    "clip's eps": lambda: optim.clip_by_global_norm({"w": W}, {"w": "w[D, F]"}, ONE, 1.0, eps=-9.0),
    "a norm of other dims": lambda: optim.global_norm({"w": W}, {"w": "w[D_X]"}, ONE),
    "a norm of ints": lambda: optim.global_norm({"w": W.int()}, {"w": "w[D, F]"}, ONE),
    "chain of nothing": lambda: optim.chain(),
    "chain of a number": lambda: optim.chain(3, optim.sgd(0.1)),
    "scale": lambda: optim.loss_scaled(optim.sgd(0.1), first=INF),
    **{f"interval {n}": lambda n=n: optim.loss_scaled(optim.sgd(0.1), interval=n) for n in (1.5, 0)},
    "scale of nothing": lambda: optim.loss_scaled(None),
    **{f"finite {f!r}": lambda f=f: updated(optim.loss_scaled(optim.sgd(0.1)), finite=f) for f in ("no", None, W)},
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_options_that_are_no_numbers_or_out_of_range_are_refused(call):
    with pytest.raises(ValueError, match="fix:"):
        call()


def test_a_state_without_its_scale_is_refused():
    rule, inner = optim.loss_scaled(optim.sgd(0.1)), optim.sgd(0.1)
    with pytest.raises(ValueError, match="no scale"):
        rule.update({"w": W}, inner.init({"w": W}), {"w": W}, finite=True)
