"""Optimizers against torch.optim's, in every way that an update may be made."""

import random
from itertools import product

import pytest
import torch
from torch._subclasses import FakeTensorMode

from scaling import optim, tree
from scaling.mesh import Mesh

SHAPES = {"W_in": (3, 8, 12), "norm": (5,), "scalar": ()}
SPECS = {"W_in": "W[L, D, F]", "norm": "g[D]", "scalar": "s[]"}
EXACT = {torch.float64: 4e-16, torch.float32: 3e-7}  # one or two units in the last place
REFERENCE = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
RULES = [
    ("sgd", {}),
    ("sgd", {"weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("adamw", {}),
    ("adamw", {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    ("adamw", {"weight_decay": 0.0}),
]


def transposed(t):
    backwards = [*reversed(range(t.dim()))]
    return t.permute(backwards).clone(memory_format=torch.contiguous_format).permute(backwards)


LAYOUTS = {  # a gathered weight is a transposed view, a shard may be a slice of a larger buffer
    "plain": torch.clone,
    "transposed": transposed,
    "slice": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]] if t.dim() else t.clone(),
    "gaps": lambda t: torch.stack([t, t], -1)[..., 0],  # the fused kernel would walk through all of it
}


def params_and_grads(dtype=torch.float64, steps=6):
    rng = torch.Generator().manual_seed(0)
    draw = lambda: {k: torch.randn(s, generator=rng, dtype=torch.float64).to(dtype) for k, s in SHAPES.items()}  # noqa: E731
    return draw(), [draw() for _ in range(steps)]


def torch_run(name, params, grads, schedule=None, bare=(), **options):
    """torch's params after these steps; the leaves named in `bare` do not decay."""
    ps = {leaf: torch.nn.Parameter(p.clone()) for leaf, p in params.items()}
    groups = [{"params": [p for leaf, p in ps.items() if leaf not in bare]}]
    groups += [{"params": [ps[leaf] for leaf in bare], "weight_decay": 0.0}] if bare else []
    optimizer = REFERENCE[name](groups, lr=0.1, **options)
    for step, grad in enumerate(grads):
        for leaf, p in ps.items():
            p.grad = grad[leaf].clone()
        for group in optimizer.param_groups:
            group["lr"] = schedule(step) if schedule else 0.1
        optimizer.step()
    return [p.detach() for p in ps.values()]


def our_run(optimizer, params, grads, **options):
    state = optimizer.init(params)
    for grad in grads:
        params, state = optimizer.update(grad, state, params, **options)
    return params, state


def equal(a, b) -> bool:
    return all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


def pointers(*parts) -> list[int]:
    return [t.data_ptr() for t in tree.leaves(parts)]


def around(x):
    """What lies in x's memory and is none of its elements."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    others = torch.ones(len(memory), dtype=torch.bool)
    others.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
    return memory[others]


@pytest.mark.parametrize("plain", [False, True], ids=["fused", "plain"])
@pytest.mark.parametrize(("name", "options"), RULES)
def test_equal_to_torch(name, options, plain, monkeypatch):
    """In any layout, with a rate or a schedule, of leaves that decay or not, on copies or in the buffers given away."""
    if plain:
        monkeypatch.setattr(optim.rules, "_fused", lambda p, rate: False)
    draw = random.Random(f"{name} {options} {plain}")
    for dtype, donate, (layout, lay_out) in product(EXACT, (False, True), LAYOUTS.items()):
        schedule = draw.choice([None, lambda step: 0.1 * (step + 1) / 3])
        bare, master = draw.sample([*SHAPES], draw.randrange(3)), draw.choice([False, True])
        mask = {leaf: leaf not in bare for leaf in SHAPES}
        mask = draw.choice([mask, lambda _, mask=mask: mask] + [None] * (not bare))
        optimizer = getattr(optim, name)(schedule or 0.1, master=master, mask=mask, **options)
        whole, grads = params_and_grads(dtype)
        params, state = tree.map(lay_out, whole), optimizer.init(whole)
        state = {part: value if part == "step" else tree.map(lay_out, value) for part, value in state.items()}
        for step, grad in enumerate(grads, 1):
            grad = tree.map(draw.choice([*LAYOUTS.values()]), grad)
            moved = params, {part: value for part, value in state.items() if part != "step"}
            kept, before = tree.map(torch.clone, (moved, grad)), pointers(*moved)
            beside = tree.map(around, moved) if layout in ("slice", "gaps") and step == 1 else ()
            params, state = optimizer.update(grad, state, params, donate=donate)
            assert state["step"] == step
            now = pointers(params, {part: value for part, value in state.items() if part != "step"})
            assert now == before if donate else set(now).isdisjoint(before)
            assert equal(kept[1], grad)
            assert donate or equal(kept[0], moved)
            assert not beside or equal(beside, tree.map(around, moved))
        for a, b in zip(params.values(), torch_run(name, whole, grads, schedule, bare, **options), strict=True):
            torch.testing.assert_close(a, b, rtol=EXACT[dtype], atol=EXACT[dtype])
        assert tree.structure(state) == tree.structure(optimizer.state_specs(dict.fromkeys(SHAPES, "")))


@pytest.mark.parametrize(("name", "options"), RULES)
def test_bfloat16_rounds_no_worse_than_torch_and_a_master_copy_not_at_all(name, options):
    params, grads = params_and_grads(torch.bfloat16, steps=20)
    floats, make = tree.map(torch.Tensor.float, (params, grads)), getattr(optim, name)
    exact = torch_run(name, *tree.map(torch.Tensor.double, (params, grads)), **options)
    wanted, _ = our_run(make(0.1, **options), *floats)
    masters, state = our_run(make(0.1, master=True, **options), tree.map(torch.clone, params), grads, donate=True)
    assert equal(state["master"], wanted)
    assert equal(masters, tree.map(torch.Tensor.bfloat16, wanted))

    def error(found):
        return sum((a.double() - b).abs().sum() for a, b in zip(tree.leaves(found), exact, strict=True))

    without = error(our_run(make(0.1, **options), params, grads)[0])
    assert error(masters) < without < 1.25 * error(torch_run(name, params, grads, **options))
    if name == "adamw":
        assert equal(wanted, torch_run(name, *floats, fused=True, **options))  # to the bit


def test_params_that_require_grad_and_mixed_dtypes_in_lists_and_tuples():
    params, (grad, *_) = params_and_grads()
    params = {"a": params["W_in"].requires_grad_(), "b": params["norm"].float(), "c": [params["scalar"].bfloat16()]}
    grads = {"a": grad["W_in"], "b": grad["norm"].float(), "c": (grad["scalar"].bfloat16(),)}
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
def test_clipped_adamw_under_torch_compile():
    params, grads = params_and_grads(steps=4)
    optimizer = optim.chain(optim.clip(0.1), optim.adamw(lambda step: 0.1 / (1 + step)))
    typed = {"specs": SPECS, "mesh": Mesh({"X": 1})}
    compiled = torch.compile(optimizer.update, backend="aot_eager", fullgraph=True)
    found, _ = our_run(optimizer._replace(update=compiled), params, grads, **typed)
    for a, b in zip(tree.leaves(found), tree.leaves(our_run(optimizer, params, grads, **typed)[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=4e-16, atol=4e-16)


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
