"""Optimizers against torch.optim's, in place and out of place."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from scaling import optim, tree

SHAPES = {"W_in": (3, 8, 12), "norm": (5,), "scalar": ()}
EXACT = {torch.float64: 4e-16, torch.float32: 3e-7}  # one or two units in the last place


def params_and_grads(dtype=torch.float64, steps=6):
    rng = torch.Generator().manual_seed(0)
    draw = lambda: {k: torch.randn(s, generator=rng, dtype=torch.float64).to(dtype) for k, s in SHAPES.items()}  # noqa: E731
    return draw(), [draw() for _ in range(steps)]


def torch_run(make, params, grads, schedule=None):
    ps = [torch.nn.Parameter(p.clone()) for p in tree.leaves(params)]
    optimizer = make(ps)
    for step, grad in enumerate(grads):
        for p, g in zip(ps, tree.leaves(grad), strict=True):
            p.grad = g.clone()
        if schedule:
            optimizer.param_groups[0]["lr"] = schedule(step)
        optimizer.step()
    return [p.detach() for p in ps]


def our_run(optimizer, params, grads, donate=False):
    state = optimizer.init(params)
    for grad in grads:
        params, state = optimizer.update(grad, state, params, donate=donate)
    return params, state


def close(ours, theirs, dtype):
    for a, b in zip(tree.leaves(ours), theirs, strict=True):
        assert a.dtype == b.dtype == dtype
        torch.testing.assert_close(a, b, rtol=EXACT[dtype], atol=EXACT[dtype])


SGD = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
]
ADAMW = [{}, {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}, {"weight_decay": 0.0}]


@pytest.mark.parametrize("plain", [False, True], ids=["fused", "plain"])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize(("name", "options"), [("sgd", o) for o in SGD] + [("adamw", o) for o in ADAMW])
def test_equal_to_torch(name, options, dtype, donate, plain, monkeypatch):
    if plain:
        monkeypatch.setattr(optim.rules, "_fused", lambda p, rate: False)
    params, grads = params_and_grads(dtype)
    reference = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    theirs = torch_run(lambda ps: reference(ps, lr=0.1, **options), params, grads)
    optimizer = getattr(optim, name)(0.1, **options)
    ours, state = our_run(optimizer, params, grads, donate)
    close(ours, theirs, dtype)
    assert state["step"] == len(grads)
    assert set(state) == set(optimizer.state_specs(dict.fromkeys(SHAPES, "")))


def test_adamw_equal_to_the_bit_to_torch_fused():
    params, grads = params_and_grads(torch.float32)
    theirs = torch_run(lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True), params, grads)
    ours, _ = our_run(optim.adamw(0.1), params, grads)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(ours), theirs, strict=True))


@pytest.mark.parametrize(("name", "options"), [("sgd", o) for o in SGD] + [("adamw", o) for o in ADAMW])
def test_bfloat16_rounds_no_worse_than_torch(name, options):
    params, grads = params_and_grads(torch.bfloat16)
    reference = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    theirs = torch_run(lambda ps: reference(ps, lr=0.1, **options), params, grads)
    exact = torch_run(lambda ps: reference(ps, lr=0.1, **options), *tree.map(torch.Tensor.double, (params, grads)))
    ours, _ = our_run(getattr(optim, name)(0.1, **options), params, grads)

    def error(found):
        return sum((a.double() - b).abs().sum() for a, b in zip(found, exact, strict=True))

    assert error(tree.leaves(ours)) < 1.25 * error(theirs)


@pytest.mark.parametrize("plain", [False, True], ids=["fused", "plain"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_schedule_is_a_function_of_the_step(name, plain, monkeypatch):
    if plain:
        monkeypatch.setattr(optim.rules, "_fused", lambda p, rate: False)
    params, grads = params_and_grads()
    reference = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    theirs = torch_run(lambda ps: reference(ps, lr=1.0), params, grads, lambda step: 0.1 * (step + 1) / 3)
    ours, _ = our_run(getattr(optim, name)(lambda step: 0.1 * (step + 1) / 3), params, grads)
    close(ours, theirs, torch.float64)


@pytest.mark.parametrize("make", [lambda: optim.adamw(0.1), lambda: optim.adamw(0.1, master=True)])
def test_pure_unless_donated(make):
    params, (grad, *_) = params_and_grads(torch.float32)
    state = make().init(params)
    before = tree.map(torch.clone, (params, state, grad))
    new, new_state = make().update(grad, state, params)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves((params, state, grad)), strict=True))
    held = {t.data_ptr() for t in tree.leaves((params, state))}
    assert held.isdisjoint(t.data_ptr() for t in tree.leaves((new, new_state)))

    given, given_state = make().update(grad, state, params, donate=True)
    same = [(given, params)] + [(given_state[k], state[k]) for k in state if k != "step"]
    for ours, theirs in same:
        assert [t.data_ptr() for t in tree.leaves(ours)] == [t.data_ptr() for t in tree.leaves(theirs)]
    both = zip(tree.leaves((given, given_state)), tree.leaves((new, new_state)), strict=True)
    assert all(torch.equal(a, b) for a, b in both)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before[2]), tree.leaves(grad), strict=True))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_master_copies_keep_what_bfloat16_would_round_away(name, donate):
    params, grads = params_and_grads(torch.bfloat16, steps=40)
    make = getattr(optim, name)
    wanted, _ = our_run(
        make(1e-3), tree.map(torch.Tensor.float, params), [tree.map(torch.Tensor.float, g) for g in grads]
    )
    ours, state = our_run(make(1e-3, master=True), tree.map(torch.clone, params), grads, donate)
    for key in SHAPES:
        assert ours[key].dtype == torch.bfloat16
        assert torch.equal(state["master"][key], wanted[key])
        assert torch.equal(ours[key], wanted[key].bfloat16())
    without, _ = our_run(make(1e-3), params, grads)
    error = lambda p: (p["W_in"].float() - wanted["W_in"]).abs().mean()  # noqa: E731
    assert error(ours) < 0.6 * error(without)


def test_params_that_require_grad_and_mixed_dtypes():
    params, (grad, *_) = params_and_grads()
    params = {"a": params["W_in"].requires_grad_(), "b": params["norm"].float(), "c": [params["scalar"].bfloat16()]}
    grads = {"a": grad["W_in"], "b": grad["norm"].float(), "c": [grad["scalar"].bfloat16()]}
    new, state = our_run(optim.adamw(0.1), params, [grads])
    assert [t.dtype for t in tree.leaves(new)] == [torch.float64, torch.float32, torch.bfloat16]
    assert not any(t.requires_grad for t in tree.leaves((new, state)))
    torch.testing.assert_close(new["a"], 0.999 * params["a"].detach() - 0.1 * grads["a"].sign(), rtol=1e-6, atol=1e-6)


def test_shapes_alone_on_meta():
    params = {"W": torch.empty(1 << 20, 1 << 20, device="meta", dtype=torch.bfloat16)}
    new, state = our_run(optim.adamw(0.1, master=True), params, [params])
    assert new["W"].is_meta
    assert tree.nbytes(state) == 12 * 2**40 + 8


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("sgd", marks=pytest.mark.sweep), "adamw"])
def test_under_torch_compile(name):
    params, grads = params_and_grads(steps=4)
    optimizer = getattr(optim, name)(lambda step: 0.1 / (1 + step))
    compiled = torch.compile(optimizer.update, backend="aot_eager", fullgraph=True)
    state, ours = optimizer.init(params), params
    for grad in grads:
        ours, state = compiled(grad, state, ours)
    close(ours, tree.leaves(our_run(optimizer, params, grads)[0]), torch.float64)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("layout", ["transposed", "slice", "transposed grads"])
def test_memory_order_does_not_matter(layout, donate):
    """A gathered weight is a transposed view, a shard may be a slice of a larger buffer: the numbers stay the same."""
    g = torch.Generator().manual_seed(0)
    p, *gs = (torch.randn(4, 6, generator=g, dtype=torch.float64) for _ in range(4))
    lay = {"transposed": lambda t: t.t().contiguous().t(), "slice": lambda t: torch.cat([t, t], 1)[:, :6]}
    odd_p, odd_g = lay.get(layout, torch.clone), lay.get(layout, lay["transposed"])
    adamw = optim.adamw(0.1)
    wanted, state, odd, odd_state = {"W": p}, adamw.init({"W": p}), {"W": odd_p(p)}, adamw.init({"W": odd_p(p)})
    for grad in gs:
        wanted, state = adamw.update({"W": grad}, state, wanted)
        odd, odd_state = adamw.update({"W": odd_g(grad)}, odd_state, odd, donate=donate)
        torch.testing.assert_close(odd["W"], wanted["W"], rtol=1e-14, atol=0)
        torch.testing.assert_close(odd_state["v"], state["v"], rtol=1e-14, atol=0)


def test_what_lies_between_the_elements_is_left_alone():
    """Params and moments that are every second element of a buffer: the fused kernel would walk through all of it."""
    buffers = torch.randn(4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).abs()
    every = [row[::2] for row in buffers]  # p, g, m, v
    adamw, others, step = optim.adamw(0.1), buffers[:, 1::2].clone(), torch.tensor(3)

    def updated(p, g, m, v):
        state = {"step": step, "m": {"W": m}, "v": {"W": v}}
        new, state = adamw.update({"W": g}, state, {"W": p}, donate=True)
        return torch.stack([new["W"], state["m"]["W"], state["v"]["W"]])

    torch.testing.assert_close(updated(*[x.clone() for x in every]), updated(*every), rtol=1e-14, atol=0)
    assert torch.equal(buffers[:, 1::2], others)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("scheduled", [False, True])
def test_on_a_gpu_the_kernel_is_not_given_a_rate_less_precise_than_the_params(dtype, scheduled, monkeypatch):
    """It takes a rate that is a tensor as float32."""
    rates = []
    monkeypatch.setattr(optim.rules, "fused_adamw_", lambda *args, lr, **options: rates.append(lr))
    adamw = optim.adamw((lambda step: 0.1 + step) if scheduled else 0.1)
    with FakeTensorMode():
        params = {"W": torch.empty(3, dtype=dtype, device="cuda")}
        adamw.update(params, adamw.init(params), params)
    if dtype == torch.float64 and scheduled:
        assert rates == []
    else:
        (rate,) = rates
        assert rate.dtype == torch.float32 if scheduled else rate == 0.1
