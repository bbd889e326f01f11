"""Clipping by the norm of all gradients: each element counts once, whatever the mesh."""

import pytest
import torch

from scaling import optim, tree
from scaling.mesh import AbstractMesh, Mesh
from scaling.trace import trace

SPECS = {"a": "a[D_X, F_Y]", "b": "b[D, F_XY]", "c": ["c[D]", "d[F_Y, D]"], "e": "e[]", "f": "f[D_Y, F_X]"}
SIZES = {"D": 8, "F": 16}


def whole_grads(dtype):
    inits = tree.map(lambda _: tree.Normal(1.0), SPECS)
    return tree.init(inits, SPECS, SIZES, AbstractMesh(dict.fromkeys("XY", 1)), dtype=dtype, device="cpu")


def clip_on_rank(mesh, dtype, max_norm):
    """The norm, the clipped gradients, and what two steps of a chain with SGD make of params of zeros, whole."""
    grads = tree.shard(whole_grads(dtype), SPECS, mesh)
    rule = optim.chain(optim.clip(max_norm), optim.sgd(0.5, momentum=0.9))
    params = tree.map(torch.zeros_like, grads)
    state = rule.init(params)
    for _ in range(2):
        params, state = rule.update(grads, state, params, specs=SPECS, mesh=mesh)
    assert state["step"] == 2
    clipped, norm = optim.clip_by_global_norm(grads, SPECS, mesh, max_norm)
    return [norm, *tree.leaves([tree.unshard(each, SPECS, mesh) for each in (clipped, params)])]


@pytest.mark.parametrize("sizes", [{"X": 1, "Y": 1}, {"X": 2, "Y": 1}, {"X": 2, "Y": 2}])
def test_clipping_counts_each_element_once(ranks, sizes):
    for dtype, max_norm in ((torch.float64, 3.0), (torch.float32, 3.0), (torch.float64, 1e3)):
        grads = tree.leaves(whole_grads(dtype))
        params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
        sgd = torch.optim.SGD(params, lr=0.5, momentum=0.9)
        for _ in range(2):
            for p, g in zip(params, grads, strict=True):
                p.grad = g.clone()
            norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
            sgd.step()
        wanted = [norm, *(p.grad for p in params), *(p.detach() for p in params)]
        results = ranks(clip_on_rank, sizes, dtype, max_norm)
        for found in results:
            assert found[0] == results[0][0]
            torch.testing.assert_close(found, wanted, rtol=1e-14 if dtype == torch.float64 else 1e-6, atol=0)


def test_the_norm_of_a_large_leaf_is_the_same_however_it_is_split():
    """torch's own adds its squares in float32 one after the other, and is 0.2% off here."""
    x = torch.randn(49152, 576, generator=torch.Generator().manual_seed(0)) * 1e-3
    x[:200, 0] = 2
    true = x.double().square().sum().sqrt().item()
    assert optim.global_norm([x], ["x[D, F]"], Mesh({"X": 1})).item() == pytest.approx(true, rel=5e-7)
    for parts in (2, 3, 4):
        total = sum(optim.clipping.sum_of_squares(shard) for shard in x.chunk(parts))
        assert total.sqrt().item() == pytest.approx(true, rel=5e-7)
    assert optim.clipping.sum_of_squares(x[:3, :5].T).item() == pytest.approx(x[:3, :5].double().square().sum().item())


def test_clipping_sends_one_scalar_for_each_set_of_axes():
    mesh = AbstractMesh({"X": 4, "Y": 2})
    grads = tree.init(tree.map(lambda _: tree.Normal(1.0), SPECS), SPECS, SIZES, mesh, dtype=torch.bfloat16)
    with trace() as log:
        clipped, norm = optim.clip_by_global_norm(grads, SPECS, mesh, 1.0)
    assert sorted((event.op, event.axes, event.nbytes) for event in log.events) == [
        ("AllReduce", ("X", "Y"), 4),
        ("AllReduce", ("Y",), 4),
    ]
    assert norm.dtype == torch.float32
    assert clipped["a"].dtype == torch.bfloat16
    named, meta = AbstractMesh({"data": 2, "model": 2}), torch.empty(4, device="meta")
    with trace() as log:
        optim.clip_by_global_norm([meta, meta], ["a[D_{model,data}]", "b[D_data]"], named, 1.0)
    assert [event.axes for event in log.events] == [("data", "model"), ("data",)]


def test_gradients_that_are_given_away_are_scaled_where_they_lie():
    grads = {"W": torch.tensor([3.0, 4.0])}
    kept, norm = optim.clip_by_global_norm(grads, {"W": "W[D]"}, AbstractMesh({}), 1.0)
    assert grads["W"].tolist() == [3.0, 4.0]
    given = optim.scaled_to(grads, norm, 1.0, donate=True)
    assert given["W"] is grads["W"]
    assert torch.equal(given["W"], kept["W"])


def test_a_chain_takes_any_function_of_gradients():
    twice = optim.chain(lambda grads, specs, mesh: tree.map(lambda g: 2 * g, grads), optim.sgd(0.1))
    params = {"W": torch.tensor([3.0, 4.0])}
    new, _ = twice.update(params, twice.init(params), params)
    torch.testing.assert_close(new["W"], 0.8 * params["W"])
    assert twice.state_specs(SPECS) == optim.sgd(0.1).state_specs(SPECS)
