"""Collectives and steps within torch.compile: the same numbers as eagerly. test_drawn.py has the forms of the calls
that a compiler follows, run without one: what these refuse is here."""

from functools import partial

import pytest
import torch
from machine import on_ranks
from problems import drawn
from torch.func import grad, grad_and_value

from scaling import optim, tree
from scaling.collectives import all_gather, all_reduce, einsum, reduce_scatter
from scaling.mesh import Mesh
from scaling.schedules import make
from scaling.spec import ShardingError
from scaling.strategies import data_parallel, fsdp, fsdp_tp, pipeline, pods, tensor_parallel, zero
from scaling.strategies.stage import mlp, of_strategy

compile_ = partial(torch.compile, backend="aot_eager", fullgraph=True)
STEPS = {
    "dp": (data_parallel, {"X": 2}, {}),
    "dp, two layers a bucket": (data_parallel, {"X": 2}, {"bucket_bytes": 4 * 8 * 8 * 16}),
    "zero": (zero, {"X": 2}, {}),
    "fsdp": (fsdp, {"X": 2}, {}),
    "tp": (tensor_parallel, {"Y": 2}, {}),
    "fsdp_tp": (fsdp_tp, {"X": 2, "Y": 2}, {}),
    "pods": (pods, {"P": 2, "X": 1, "Y": 2}, {}),
}
CASES = [  # marked sweep, but for one
    pytest.param(mesh, name, id=name, marks=() if name == "fsdp" else pytest.mark.sweep)
    for name, (_, mesh, _) in STEPS.items()
]


def problem(mesh, types, layers, batch=8):
    """(params, In) on this rank."""
    rng, D, F = torch.Generator().manual_seed(0), 8, 16
    shapes = {"W_in": (layers, D, F), "W_out": (layers, F, D), "In": (batch, D)}
    whole = {name: torch.randn(shape, generator=rng).double() for name, shape in shapes.items()}
    params = tree.shard(whole, {name: types[name] for name in shapes}, mesh)
    return params, params.pop("In")


@pytest.mark.compile
@pytest.mark.parametrize(("mesh", "name"), CASES)
def test_a_strategy_s_whole_step_in_one_graph(mesh, name):
    """dIn, params and state after a step are those of the same run eagerly; for dp with two sizes of batch: dynamic
    shapes."""
    torch._dynamo.reset()
    strategy, _, options = STEPS[name]
    rule, types = optim.adamw(0.01), strategy.SPECS
    types = {leaf: types[leaf].replace("[", "[L, ") for leaf in ("W_in", "W_out")} | {"In": types["In"]}
    params, In = problem(mesh, types, 3 if strategy is data_parallel else 2)
    state = zero.init(rule, params, mesh) if strategy is zero else rule.init(params)

    def step(params, state, In):
        Out, saved = strategy.forward(params, In, mesh, residual=True, norm=True)
        dIn, grads = strategy.backward(2 * Out, saved, params, mesh, donate=True, **options)
        if strategy is zero:
            return dIn, *zero.update(rule, grads, state, params, mesh)
        return dIn, *rule.update(grads, state, params)

    compiled, batches = compile_(step), [In, In[:-1]] if name == "dp" else [In]
    for In in batches:
        eager = step(params, state, In)
        torch.testing.assert_close(compiled(params, state, In), eager, rtol=1e-10, atol=1e-12)


@pytest.mark.compile
@pytest.mark.sweep
@pytest.mark.parametrize(("mesh", "kind"), [({"Z": 2}, "mlp"), ({"Z": 2, "X": 1, "Y": 2}, "fsdp_tp")])
def test_a_pipeline_s_stages_compiled(mesh, kind):
    """(Loss, grads) of a pipeline: as it is, and with the stage's functions compiled."""
    torch._dynamo.reset()
    stage = mlp(residual=True) if kind == "mlp" else of_strategy(fsdp_tp.STRATEGY, residual=True)
    params, In = problem(mesh, stage.specs, layers=4)
    compiled = {name: compile_(getattr(stage, name)) for name in ("forward", "backward_input")}
    eager, compiled = (
        pipeline.value_and_grad(params, In, In, mesh, make("1f1b", 2, 4), lambda Out, _: Out.square().sum() / 8, each)
        for each in (stage, stage._replace(**compiled))
    )
    torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-12)


def loss_of(W, In, mesh):
    """An FSDP layer: Loss[] {U_X}."""
    W = all_gather("W[D_X, F] -> W[D, F]", W, mesh)
    Tmp = einsum("In[B_X, D] * W[D, F] -> Tmp[B_X, F]", In, W)
    return Tmp.square().sum()


def step(W, In, mesh):
    """The same, its gradient written out."""
    whole = all_gather("W[D_X, F] -> W[D, F]", W, mesh, async_op=True)
    Tmp = einsum("In[B_X, D] * W[D, F] -> Tmp[B_X, F]", In, whole.wait())
    dW = einsum("In[B_X, D] * dTmp[B_X, F] -> dW[D, F] {U_X}", In, 2 * Tmp)
    dW = reduce_scatter("dW[D, F] {U_X} -> dW[D_X, F]", dW, mesh)
    return dW, all_reduce("Loss[] {U_X} -> Loss[]", Tmp.square().sum(), mesh)


@pytest.mark.compile
@on_ranks({"X": 2})
def test_a_step_and_its_derivatives_compiled(mesh):
    torch._dynamo.reset()
    W, In = drawn((4, 6), (5, 8), seed=mesh.rank)

    def by_torch_func(W, In):
        dW, loss = grad_and_value(loss_of)(W, In, mesh)
        return dW, all_reduce("Loss[] {U_X} -> Loss[]", loss, mesh)

    leaf = W.clone().requires_grad_()
    compile_(lambda W: loss_of(W, In, mesh))(leaf).backward()
    dW, loss = step(W, In, mesh)
    for other in (compile_(by_torch_func)(W, In), by_torch_func(W, In), (leaf.grad, loss)):
        torch.testing.assert_close(other, (dW, loss), rtol=1e-12, atol=1e-12)


@pytest.mark.compile
@on_ranks({"X": 2})
def test_reductions_compiled(mesh):
    """By each way to put parts together. The sizes of a mesh are numbers of a graph."""
    torch._dynamo.reset()
    x = torch.tensor([[0.0, 1.0, 2.0, 2.0], [0.0, 3.0, 1.0, 2.0]])[mesh.rank]  # with ties

    def f(x):
        found = [all_reduce("A[I] {U_X} -> A[I]", x, mesh, op=by) for by in ("mean", "max")]
        found.append(reduce_scatter("A[I] {U_X} -> A[I_X]", x, mesh, op="min"))
        return sum(n * y.square().sum() for n, y in enumerate(found, mesh.size() + mesh.size("X"))), found

    g = grad_and_value(f, has_aux=True)
    torch.testing.assert_close(compile_(g)(x), g(x), rtol=1e-6, atol=0)


ONE = Mesh({"X": 1})


@pytest.mark.slow
@pytest.mark.compile
def test_an_illegal_line_is_refused_while_compiling():
    wrong = lambda W: all_gather("W[D_X] -> W[D_X]", W, ONE)  # noqa: E731
    with pytest.raises(Exception, match=r"ShardingError: AllGather: .*\n  no dim changes"):  # of dynamo's, quoting ours
        torch.compile(wrong, backend="aot_eager")(torch.ones(2))
    with pytest.raises(ShardingError, match="no dim changes"):
        grad(lambda W: wrong(W).sum())(torch.ones(2))


INTO = {  # a call on x[2, 3], and the shape of its result
    "matrices": (lambda x, **out: einsum("A[I, J] * B[K, J] -> C[I, K]", x, x, **out), (2, 2)),
    "transposed": (lambda x, **out: einsum("A[I, J] -> C[J, I]", x, **out), (3, 2)),
    "gathered": (lambda x, **out: all_gather("A[I_X, J] -> A[I, J]", x, ONE, **out), (2, 3)),
    "scattered": (lambda x, **out: reduce_scatter("A[I, J] {U_X} -> A[I_X, J]", x, ONE, **out), (2, 3)),
}


@pytest.mark.parametrize("what", INTO)
def test_a_buffer_that_does_not_fit_is_refused_in_a_graph(what, monkeypatch):
    (call, shape), x = INTO[what], torch.arange(6.0).view(2, 3)
    wanted, out = call(x), torch.full(shape, 5.0)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert call(x, out=out) is out
    assert torch.equal(out, wanted)
    for misfit in (torch.ones(1, *shape), torch.ones(shape).double()):
        with pytest.raises(ShardingError, match="out has the result's shape and dtype"):
            call(x, out=misfit)
    with pytest.raises(ShardingError):
        call(x[0])
    if shape != (2, 3):
        with pytest.raises(ShardingError, match="fix: give out="):
            call(x, add=True)
