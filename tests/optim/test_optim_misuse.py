"""What an update refuses, what decays, and clipping in a chain."""

import pytest
import torch

from scaling import optim, tree
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError

G = torch.Generator().manual_seed(0)
RULES = {"sgd": lambda **kw: optim.sgd(0.1, momentum=0.9, **kw), "adamw": lambda **kw: optim.adamw(0.1, **kw)}
SPECS = {"W1": "W1[D, F]", "W2": "W2[D, F]"}


def two(names=("W1", "W2"), dtype=torch.float64):
    return {name: torch.randn(3, 4, generator=G, dtype=torch.float64).to(dtype) for name in names}


@pytest.mark.parametrize("rule", RULES)
def test_trees_are_compared_by_name(rule):
    params, optimizer = two(), RULES[rule]()
    state = optimizer.init(params)
    before = tree.map(torch.clone, (params, state))
    with pytest.raises(ValueError, match=r'grads\["W1"\] has shape nothing, its param \(3, 4\)'):
        optimizer.update(two(("W2", "W3")), state, params)
    with pytest.raises(ValueError, match=r'grads\["W2"\] has shape \(4,\), its param \(3, 4\)'):
        optimizer.update(two() | {"W2": torch.zeros(4)}, state, params)
    with pytest.raises(ValueError, match=r'grads\["W3"\] has shape \(3, 4\), its param nothing'):
        optimizer.update(two(("W1", "W2", "W3")), state, params)
    with pytest.raises(ValueError, match=r'state\["m"\]\["W1"\] has shape nothing'):
        optimizer.update(two(), state | {"m": two(("W2", "W3"))}, params)
    with pytest.raises(ValueError, match=r'state\["m"\]\["W2"\] has shape \(4,\), its param \(3, 4\)'):
        optimizer.update(two(), state | {"m": state["m"] | {"W2": torch.zeros(4)}}, params, donate=True)
    with pytest.raises(ValueError, match=r"the state holds \['step'\], not \['step', .*'m'"):
        optimizer.update(two(), {"step": state["step"]}, params)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves((params, state)), strict=True))
    as_lists = optimizer.update([two(), two()], optimizer.init([params, params]), (params, params))
    assert len(tree.leaves(as_lists[0])) == 4, "a list is as good as a tuple"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("master", [False, True])
def test_donated_tensors_share_no_memory(rule, master):
    optimizer, buffer = RULES[rule](master=master), torch.randn(8, 4, generator=G, dtype=torch.float64)
    for params, words in {
        "tied": ({"W1": buffer[:3], "W2": buffer[:3]}, r'params\["W1"\] and params\["W2"\] share memory'),
        "in part": ({"W1": buffer[:3], "W2": buffer[2:5]}, r'params\["W1"\] and params\["W2"\] share memory'),
        "turned": ({"W1": buffer[1:4], "W2": buffer[:4, :3].t()}, r"share memory"),
        "expanded": (
            {"W1": buffer[:1].expand(3, 4), "W2": buffer[1:4]},
            r'params\["W1"\]: elements share their memory',
        ),
    }.values():
        state, grads, kept = optimizer.init(params), two(), buffer.clone()
        with pytest.raises(ValueError, match=words):
            optimizer.update(grads, state, params, donate=True)
        assert torch.equal(buffer, kept)
        wanted, _ = optimizer.update(grads, state, tree.map(torch.clone, params))
        new, _ = optimizer.update(grads, state, params)
        assert all(torch.equal(new[name], wanted[name]) for name in new)
    params = {"W1": buffer[:3], "W2": buffer[3:6]}  # views of one buffer that are apart
    state, grads = optimizer.init(params), two()
    wanted, _ = optimizer.update(grads, state, params)
    new, _ = optimizer.update(grads, state, params, donate=True)
    assert all(torch.equal(new[name], wanted[name]) for name in new)
    state = optimizer.init(params)
    for grads, words in {
        "a gradient that is a moment": ({"W1": state["m"]["W2"], "W2": two()["W2"]}, r'state\["m"\]\["W2"\]'),
        "a gradient that is a param": ({"W1": two()["W1"], "W2": params["W1"]}, r'params\["W1"\] and grads\["W2"\]'),
    }.values():
        with pytest.raises(ValueError, match=words):
            optimizer.update(grads, state, params, donate=True)
    one = two()["W1"]
    optimizer.update({"W1": one, "W2": one}, state, params, donate=True)  # gradients are only read
    with pytest.raises(ValueError, match=r'state\["(m|v)"\]'):
        optimizer.update(two(), state | {"m": params}, params, donate=True)


def test_columns_of_one_buffer_are_apart():
    buffer = torch.randn(4, 6, generator=G, dtype=torch.float64)
    params, grads, optimizer = (
        {"a": buffer[:, ::2], "b": buffer[:, 1::2]},
        {"a": buffer + 0, "b": buffer + 1},
        RULES["adamw"](),
    )
    grads = tree.map(lambda g: g[:, :3], grads)
    wanted, _ = optimizer.update(grads, optimizer.init(params), params)
    new, _ = optimizer.update(grads, optimizer.init(params), params, donate=True)
    assert all(torch.equal(new[name], wanted[name]) for name in new)
    assert new["a"].data_ptr() == buffer.data_ptr()


@pytest.mark.slow
def test_gradients_of_unreduced_types_are_refused():
    params, grads, mesh, optimizer = two(), two(), Mesh({"X": 1}), RULES["adamw"]()
    state = optimizer.init(params)
    for specs, words in [
        (
            SPECS | {"W2": "W2[D, F] {U_X}"},
            r'grads\["W2"\]: W2\[D, F\] \{U_X\} is unreduced.*\n  fix: reduce it to W2\[D, F\]',
        ),
        (SPECS | {"W2": "W2[D_Y, F]"}, "unknown mesh axis Y"),
        (SPECS | {"W2": "W2[D]"}, r'grads\["W2"\]: W2\[D\] has 1 dims, but the gradient \(3, 4\)'),
        ({"W1": SPECS["W1"]}, r'grads\["W2"\]: has no spec'),
    ]:
        with pytest.raises(ShardingError, match=words):
            optimizer.update(grads, state, params, specs=specs, mesh=mesh)
    wanted, typed = (optimizer.update(grads, state, params, **kw)[0] for kw in ({}, {"specs": SPECS, "mesh": mesh}))
    assert all(torch.equal(wanted[name], typed[name]) for name in params)
    with pytest.raises(ShardingError, match="is unreduced"):
        optimizer.update(grads, state, params, specs=SPECS | {"W1": "W1[D, F] {U_X}"})
    for specs in (SPECS | {"W2": "W2[D, F] {U_X}"}, SPECS | {"W2": "W2[D_Y, F]"}):
        torch._dynamo.reset()
        update = torch.compile(
            lambda g, s=specs: optimizer.update(g, state, params, specs=s, mesh=mesh), backend="eager"
        )
        with pytest.raises(Exception, match="ShardingError"):
            update(grads)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_decay_by_leaf(rule, donate):
    """As torch's param groups, of which one has weight_decay=0."""
    params = {"W": torch.randn(3, 4, generator=G), "b": torch.randn(4, generator=G), "g": [torch.randn(3, generator=G)]}
    all_grads = [tree.map(lambda p: torch.randn(p.shape, generator=G), params) for _ in range(3)]
    theirs = tree.map(lambda p: torch.nn.Parameter(p.clone()), params)
    reference = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[rule]
    bare = {"params": [theirs["b"], *theirs["g"]], "weight_decay": 0.0}
    reference = reference([{"params": [theirs["W"]]}, bare], lr=0.1, weight_decay=0.3)
    masks = [{"W": True, "b": False, "g": [False]}, lambda params: tree.map(lambda p: p.dim() > 1, params)]
    optimizers = [getattr(optim, rule)(0.1, weight_decay=0.3, mask=mask) for mask in masks]
    ours = [(tree.map(torch.clone, params), optimizer.init(params)) for optimizer in optimizers]
    for grads in all_grads:
        for p, g in zip(tree.leaves(theirs), tree.leaves(grads), strict=True):
            p.grad = g
        reference.step()
        ours = [o.update(grads, s, p, donate=donate) for o, (p, s) in zip(optimizers, ours, strict=True)]
    for mine, _ in ours:
        for a, b in zip(tree.leaves(mine), tree.leaves(theirs), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=3e-7, atol=3e-7)
    with pytest.raises(ValueError, match="mask must be a bool for each of"):
        optim.adamw(0.1, mask={"W": True}).update(all_grads[0], optim.adamw(0.1).init(params), params)


def chained(mesh, max_norm):
    specs = {"W1": "W1[D_X, F]", "W2": "W2[D, F_X]", "b": "b[F]"}
    whole = {"W1": torch.arange(12.0).view(4, 3), "W2": torch.ones(2, 4), "b": torch.tensor([3.0, -1.0, 0.5])}
    whole = tree.map(torch.Tensor.double, whole)
    optimizer = optim.chain(optim.clip(max_norm), optim.sgd(0.5, momentum=0.9))
    params, grads = (tree.shard(tree.map(f, whole), specs, mesh) for f in (torch.zeros_like, torch.clone))
    state = optimizer.init(params)
    for _ in range(2):
        params, state = optimizer.update(grads, state, params, specs=specs, mesh=mesh)
    return tree.unshard(params, specs, mesh), state["step"]


@pytest.mark.parametrize("sizes", [{"X": 1}, {"X": 2}], ids=str)
def test_a_chain_clips_by_the_whole_gradient(ranks, sizes):
    whole = {"W1": torch.arange(12.0).view(4, 3), "W2": torch.ones(2, 4), "b": torch.tensor([3.0, -1.0, 0.5])}
    ps = {name: torch.nn.Parameter(torch.zeros_like(g).double()) for name, g in whole.items()}
    reference = torch.optim.SGD(ps.values(), lr=0.5, momentum=0.9)
    for _ in range(2):
        for name, p in ps.items():
            p.grad = whole[name].double()
        torch.nn.utils.clip_grad_norm_(ps.values(), 2.0)
        reference.step()
    for params, step in ranks(chained, sizes, 2.0):
        assert step == 2
        for name, p in ps.items():
            torch.testing.assert_close(params[name], p.detach(), rtol=1e-12, atol=0)


def test_a_norm_is_of_gradients_of_their_types():
    mesh = Mesh({"X": 1})
    for grads, why in [
        ({"w": torch.ones(2)}, "has 2 dims, but the gradient"),
        ({"w": torch.ones(2, 2, dtype=torch.int64)}, "float"),
        ({"v": torch.ones(2, 2)}, "missing"),
    ]:
        with pytest.raises(ValueError, match=why):
            optim.global_norm(grads, {"w": "w[I, J]"}, mesh)
    with pytest.raises(ValueError, match="grads are on cpu, meta"):
        optim.global_norm({"v": torch.ones(2), "w": torch.ones(2, device="meta")}, {"v": "v[I]", "w": "w[J]"}, mesh)


def test_a_chain_is_given_types_and_ends_in_an_optimizer():
    optimizer, params = optim.chain(optim.clip(1.0), optim.adamw(0.1)), two()
    state = optimizer.init(params)
    assert optimizer.state_specs(SPECS) == optim.adamw(0.1).state_specs(SPECS)
    with pytest.raises(ValueError, match=r"fix: update\(..., specs=..., mesh=mesh\)"):
        optimizer.update(two(), state, params)
    with pytest.raises(ShardingError, match="unreduced"):
        optimizer.update(two(), state, params, specs=SPECS | {"W1": "W1[D, F] {U_X}"}, mesh=AbstractMesh({"X": 2}))
    for parts in ([optim.adamw(0.1), optim.clip(1.0)], [optim.adamw(0.1), optim.sgd(0.1)], [optim.clip(1.0)]):
        with pytest.raises(ValueError, match="one optimizer, which comes last"):
            optim.chain(*parts)
    twice = optim.chain(lambda grads, specs, mesh: tree.map(lambda g: 2 * g, grads), optim.sgd(0.1))
    new, _ = twice.update(params, twice.init(params), params)
    for name in params:
        torch.testing.assert_close(new[name], 0.8 * params[name])
