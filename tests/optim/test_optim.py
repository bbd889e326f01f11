"""Optimizers against torch.optim's, in every way that an update may be made; and clipping by the norm of all gradients:
each element counts once, whatever the mesh."""

import math
import random
from functools import partial
from itertools import product

import pytest
import torch
from machine import on_ranks
from problems import same
from torch._subclasses import FakeTensorMode

from scaling import optim, tree
from scaling.collectives import all_gather
from scaling.mesh import AbstractMesh, Mesh
from scaling.trace import trace

SHAPES = {"W_in": (3, 8, 12), "norm": (5,), "scalar": ()}
SPECS = {"W_in": "W[L, D, F]", "norm": "g[D]", "scalar": "s[]"}
EXACT = {torch.float64: 4e-16, torch.float32: 3e-7}  # one or two units in the last place
RULES = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("adamw", {}),
    ("adamw", {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    ("adamw", {"weight_decay": 0.0}),
]
LAYOUTS = {  # a gathered weight is a transposed view, a shard may be a part of a larger buffer
    "plain": torch.clone,
    "transposed": lambda t: torch.empty(t.shape[::-1], dtype=t.dtype).permute([*range(t.dim())][::-1]).copy_(t),
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
    optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name](groups, lr=0.1, **options)
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


def buffers(params, state):
    """What an update moves: the count of steps is none of it."""
    return params, {part: value for part, value in state.items() if part != "step"}


def pointers(part) -> list[int]:
    return [t.data_ptr() for t in tree.leaves(part)]


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
        state = optimizer.init(whole)
        params, moments = tree.map(lay_out, buffers(whole, state))
        state |= moments
        for step, grad in enumerate(grads, 1):
            grad, moved = tree.map(draw.choice([*LAYOUTS.values()]), grad), buffers(params, state)
            kept, before = tree.map(torch.clone, (moved, grad)), pointers(moved)
            beside = tree.map(around, moved) if layout == "gaps" else ()
            params, state = optimizer.update(grad, state, params, donate=donate)
            assert state["step"] == step
            now = pointers(buffers(params, state))
            assert now == before if donate else set(now).isdisjoint(before)
            assert same(kept[1], grad)
            assert donate or same(kept[0], moved)
            assert not beside or same(beside, tree.map(around, moved))
        for a, b in zip(params.values(), torch_run(name, whole, grads, schedule, bare, **options), strict=True):
            torch.testing.assert_close(a, b, rtol=EXACT[dtype], atol=EXACT[dtype])
        assert tree.structure(state) == tree.structure(optimizer.state_specs(dict.fromkeys(SHAPES, "")))


@pytest.mark.parametrize(("name", "options"), RULES)
def test_bfloat16_rounds_no_worse_than_torch_and_a_master_copy_not_at_all(name, options):
    given, make = params_and_grads(torch.bfloat16, steps=20), partial(getattr(optim, name), 0.1, **options)
    floats = tree.map(torch.Tensor.float, given)
    exact = torch_run(name, *tree.map(torch.Tensor.double, given), **options)
    wanted, _ = our_run(make(), *floats)
    masters, state = our_run(make(master=True), *tree.map(torch.clone, given), donate=True)
    assert same(state["master"], wanted)
    assert same(masters, tree.map(torch.Tensor.bfloat16, wanted))

    def error(found):
        return sum((a.double() - b).abs().sum() for a, b in zip(tree.leaves(found), exact, strict=True))

    assert error(masters) < error(our_run(make(), *given)[0]) < 1.25 * error(torch_run(name, *given, **options))
    if name == "adamw":
        assert same([*wanted.values()], torch_run(name, *floats, fused=True, **options))  # to the bit


def test_params_that_require_grad_and_mixed_dtypes_in_lists_and_tuples():
    a, b, c = (torch.ones(3, dtype=dtype) for dtype in (*EXACT, torch.bfloat16))
    new, state = our_run(optim.adamw(0.1), {"a": a.requires_grad_(), "b": [b, c]}, [{"a": a, "b": (b, c)}])
    assert [leaf.dtype for leaf in tree.leaves(new)] == [*EXACT, torch.bfloat16]
    assert not any(leaf.requires_grad for leaf in tree.leaves((new, state)))
    assert [float(leaf[0]) for leaf in tree.leaves(new)] == pytest.approx([0.899] * 3, abs=2e-3)


@pytest.mark.compile
@pytest.mark.slow
def test_clipped_adamw_under_torch_compile():
    """As it is without; partial sums, and axes that are not there, are refused while it is compiled."""
    params, grads = params_and_grads(steps=3)
    rule = optim.adamw(lambda step: 0.1 / (1 + step))

    def clipped(grads, state, params, *, specs, mesh, **options):
        grads, _ = optim.clip_by_global_norm(grads, specs, mesh, 0.1)
        return rule.update(grads, state, params, specs=specs, mesh=mesh, **options)

    optimizer = rule._replace(update=clipped)
    typed = {"specs": SPECS, "mesh": Mesh({"X": 1})}
    compiled = optimizer._replace(update=torch.compile(optimizer.update, backend="aot_eager", fullgraph=True))
    found, _ = our_run(compiled, params, grads, **typed)
    torch.testing.assert_close(found, our_run(optimizer, params, grads, **typed)[0], rtol=4e-16, atol=4e-16)
    for wrong in ("g[D] {U_X}", "g[D_Y]"):
        with pytest.raises(Exception, match="ShardingError"):
            our_run(compiled, params, grads, **typed | {"specs": SPECS | {"norm": wrong}})


def test_on_a_gpu_the_kernel_is_not_given_a_rate_less_precise_than_the_params(monkeypatch):
    """It takes a rate that is a tensor as float32."""
    rates = []
    monkeypatch.setattr(optim.rules, "fused_adamw_", lambda *args, lr, **options: rates.append(lr))
    for dtype, lr in product(EXACT, (0.1, lambda step: 0.1 + step)):
        adamw = optim.adamw(lr)
        with FakeTensorMode():
            params = {"W": torch.empty(3, dtype=dtype, device="cuda")}
            adamw.update(params, adamw.init(params), params)
    assert [getattr(rate, "dtype", rate) for rate in rates] == [0.1, 0.1, torch.float32]


def test_the_scales_are_those_of_grad_scaler():
    rule = optim.loss_scaled(optim.adamw(0.1), first=64.0, interval=3)
    params = {"W": torch.tensor([1.0, -2.0])}
    state, theirs = rule.init(params), params["W"].clone().requires_grad_()
    adamw, scaler = torch.optim.AdamW([theirs], 0.1), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for slope in [1.0, math.inf, 2.0, 0.5, 3.0, 1.0, math.inf, math.inf, *[0.25] * 7]:
        grad = torch.tensor([slope, 0.5])
        adamw.zero_grad()
        scaler.scale((theirs * grad).sum()).backward()
        scaler.step(adamw)
        scaler.update()
        params, state = rule.update({"W": grad}, state, params, finite=slope < math.inf)
        assert state["scale"].item() == scaler.get_scale()
        torch.testing.assert_close(params["W"], theirs.detach(), rtol=1e-6, atol=0)
    assert state["step"].item() == 12


CLIPPED = {"a": "a[D_X, F_Y]", "b": "b[D, F_XY]", "c": ["c[D]", "d[F_Y, D]"], "e": "e[]", "f": "f[D_Y, F_X]"}


@on_ranks({"X": 1, "Y": 1}, {"X": 2, "Y": 2})
@pytest.mark.parametrize(("dtype", "max_norm"), [(torch.float64, 3.0), (torch.float32, 3.0), (torch.float64, 1e3)])
def test_clipping_counts_each_element_once(mesh, dtype, max_norm):
    """Alone, and in two steps of SGD, from zeros. Gradients that are given away are scaled where they lie.

    One scalar is sent for each set of axes, in the mesh's order, whatever that of a type is.
    """
    inits, one = tree.map(lambda _: tree.Normal(1.0), CLIPPED), AbstractMesh({"X": 1, "Y": 1})
    whole = tree.init(inits, CLIPPED, {"D": 8, "F": 16}, one, dtype=dtype, device="cpu")
    theirs = [torch.nn.Parameter(torch.zeros_like(g)) for g in tree.leaves(whole)]
    sgd = torch.optim.SGD(theirs, lr=0.5, momentum=0.9)
    for _ in range(2):
        for p, g in zip(theirs, tree.leaves(whole), strict=True):
            p.grad = g.clone()
        wanted = [torch.nn.utils.clip_grad_norm_(theirs, max_norm)]
        sgd.step()
    wanted += [*(p.grad for p in theirs), *(p.detach() for p in theirs)]
    grads = tree.shard(whole, CLIPPED, mesh)
    with trace() as log:
        clipped, norm = optim.clip_by_global_norm(grads, CLIPPED, mesh, max_norm)
    rule = optim.sgd(0.5, momentum=0.9)
    params, _ = our_run(rule, tree.map(torch.zeros_like, grads), [clipped] * 2, specs=CLIPPED, mesh=mesh)
    given = optim.scaled_to(grads, norm, max_norm, donate=True)
    assert pointers(given) == pointers(grads)
    assert same(given, clipped)
    found = [norm, *tree.leaves([tree.unshard(each, CLIPPED, mesh) for each in (clipped, params)])]
    torch.testing.assert_close(found, wanted, rtol=1e-14 if dtype == torch.float64 else 1e-6, atol=0)
    assert len({*all_gather("n[R_XY] -> n[R]", norm[None], mesh).tolist()}) == 1  # to the bit
    sent = [(event.op, event.axes, event.nbytes) for event in log.events]
    assert mesh.size() == 1 or sent == [("AllReduce", axes, norm.nbytes) for axes in (("X", "Y"), ("Y",))]


def test_the_norm_of_a_large_leaf_is_the_same_however_it_is_split():
    """torch's own adds its squares in float32 one after the other, and is 0.04% off here."""
    x = torch.randn(4096, 576, generator=torch.Generator().manual_seed(0)) * 1e-3
    x[:200, 0] = 2
    true = pytest.approx(x.double().square().sum().item(), rel=1e-6)
    assert optim.global_norm([x], ["x[D, F]"], Mesh({"X": 1})).item() ** 2 == true
    assert optim.global_norm([x.bfloat16()], ["x[D, F]"], Mesh({"X": 1})).dtype == torch.float32
    assert sum(optim.clipping.sum_of_squares(shard) for shard in x.T.chunk(3)).item() == true
