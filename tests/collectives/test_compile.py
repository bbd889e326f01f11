"""Collectives within torch.compile: the same numbers as eagerly, of a function and of its gradients. test_drawn.py has
the forms of the calls that a compiler follows, run without one; their buffers are here."""

from functools import partial

import pytest
import torch
from torch.func import grad, grad_and_value

from scaling import optim, tree
from scaling.collectives import all_gather, all_reduce, all_to_all, einsum, reduce_scatter
from scaling.mesh import Mesh
from scaling.schedules import make
from scaling.spec import ShardingError
from scaling.strategies import data_parallel, fsdp, fsdp_tp, pipeline, pods, tensor_parallel, zero
from scaling.strategies.stage import mlp, of_strategy


def compiled(test):
    return pytest.mark.slow(pytest.mark.compile(test))


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


def compiled_and_eager(mesh):
    torch._dynamo.reset()
    g = torch.Generator().manual_seed(mesh.rank)
    W, In = torch.randn(4, 6, generator=g, dtype=torch.float64), torch.randn(5, 8, generator=g, dtype=torch.float64)
    compile_ = lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)  # noqa: E731

    def by_torch_func(W, In):
        dW, loss = grad_and_value(loss_of)(W, In, mesh)
        return dW, all_reduce("Loss[] {U_X} -> Loss[]", loss, mesh)

    leaf = W.clone().requires_grad_()
    compile_(lambda W: loss_of(W, In, mesh))(leaf).backward()
    written_out = step(W, In, mesh)
    return written_out, [
        compile_(by_torch_func)(W, In),
        by_torch_func(W, In),
        (leaf.grad, written_out[1]),
    ]


def reduced(mesh):
    """By each way to put parts together."""
    torch._dynamo.reset()
    x = torch.tensor([[0.0, 1.0, 2.0, 2.0], [0.0, 3.0, 1.0, 2.0]])[mesh.rank]  # with ties

    def f(x):
        ways = "mean", "max", "min"
        wholes = [all_reduce("A[I] {U_X} -> A[I]", x, mesh, op=by) for by in ways]
        shards = [reduce_scatter("A[I] {U_X} -> A[I_X]", x, mesh, op=by) for by in ways]
        return sum(n * y.square().sum() for n, y in enumerate(wholes + shards)), (wholes, shards)

    g = grad_and_value(f, has_aux=True)
    torch.testing.assert_close(torch.compile(g, backend="aot_eager", fullgraph=True)(x), g(x), rtol=1e-6, atol=0)


@compiled
def test_reductions_compiled(ranks):
    ranks(reduced, {"X": 2})


def refused(mesh):
    torch._dynamo.reset()
    wrong = lambda W: all_gather("W[D_X] -> W[D_X]", W, mesh)  # noqa: E731
    with pytest.raises(Exception, match=r"ShardingError: AllGather: .*\n  no dim changes"):  # of dynamo's, quoting ours
        torch.compile(wrong, backend="aot_eager")(torch.ones(2))
    with pytest.raises(ShardingError, match="no dim changes"):
        grad(lambda W: wrong(W).sum())(torch.ones(2))


@compiled
def test_a_step_and_its_derivatives_compiled(ranks):
    for (dW, loss), others in ranks(compiled_and_eager, {"X": 2}):
        for other in others:
            torch.testing.assert_close(other, (dW, loss), rtol=1e-12, atol=1e-12)


@compiled
def test_an_illegal_line_is_refused_while_compiling(ranks):
    ranks(refused, {"X": 2})


STEPS = {
    "dp": (data_parallel, {"X": 2}, {}),
    "dp, two layers a bucket": (data_parallel, {"X": 2}, {"bucket_bytes": 4 * 8 * 8 * 16}),
    "zero": (zero, {"X": 2}, {}),
    "fsdp": (fsdp, {"X": 2}, {}),
    "tp": (tensor_parallel, {"Y": 2}, {}),
    "fsdp_tp": (fsdp_tp, {"X": 2, "Y": 2}, {}),
    "pods": (pods, {"P": 2, "X": 1, "Y": 2}, {}),
}


def whole_step(mesh, name):
    """(eager, compiled): dIn, params and state after a step; for dp with two sizes of batch: dynamic shapes."""
    torch._dynamo.reset()
    strategy, _, options = STEPS[name]
    rule, types = optim.adamw(0.01), strategy.SPECS
    g = torch.Generator().manual_seed(0)
    L, D, F = 3 if strategy is data_parallel else 2, 8, 16
    params = {"W_in": torch.randn(L, D, F, generator=g).double(), "W_out": torch.randn(L, F, D, generator=g).double()}
    params = tree.shard(params, {k: types[k].replace("[", "[L, ") for k in params}, mesh)
    state = zero.init(rule, params, mesh) if strategy is zero else rule.init(params)

    def step(params, state, In):
        Out, saved = strategy.forward(params, In, mesh, residual=True, norm=True)
        dIn, grads = strategy.backward(2 * Out, saved, params, mesh, donate=True, **options)
        if strategy is zero:
            return dIn, *zero.update(rule, grads, state, params, mesh)
        return dIn, *rule.update(grads, state, params)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    batches = [
        tree.shard(torch.randn(B, D, generator=g).double(), types["In"], mesh) for B in (8, 12)[: 1 + (name == "dp")]
    ]
    return [(step(params, state, In), compiled(params, state, In)) for In in batches]


@compiled
@pytest.mark.parametrize(
    "name", [name if name == "fsdp" else pytest.param(name, marks=pytest.mark.sweep) for name in STEPS]
)
def test_a_strategy_s_whole_step_in_one_graph(ranks, name):
    for results in ranks(whole_step, STEPS[name][1], name):
        for eager, compiled in results:
            torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-12)


def pipelined(mesh, kind):
    """(Loss, grads) of a pipeline: as it is, and with the stage's functions compiled."""
    torch._dynamo.reset()
    g = torch.Generator().manual_seed(0)
    L, B, D, F = 4, 8, 8, 16
    params = {"W_in": torch.randn(L, D, F, generator=g).double(), "W_out": torch.randn(L, F, D, generator=g).double()}
    stage = mlp(residual=True) if kind == "mlp" else of_strategy(fsdp_tp.STRATEGY, residual=True)
    params = tree.shard(params, {name: stage.specs[name] for name in params}, mesh)
    In = tree.shard(torch.randn(B, D, generator=g).double(), stage.specs["In"], mesh)

    def loss(Out, Target):
        return Out.square().sum() / B

    compile_ = partial(torch.compile, backend="aot_eager", fullgraph=True)
    compiled = {name: compile_(getattr(stage, name)) for name in ("forward", "backward_input")}
    runs = (stage, stage._replace(**compiled))
    return [pipeline.value_and_grad(params, In, In, mesh, make("1f1b", 2, 4), loss, each) for each in runs]


@compiled
@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "mesh"), [("mlp", {"Z": 2}), ("fsdp_tp", {"Z": 2, "X": 1, "Y": 2})])
def test_a_pipeline_s_stages_compiled(ranks, kind, mesh):
    for eager, compiled in ranks(pipelined, mesh, kind):
        torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-12)


ONE = Mesh({"X": 1})
INTO = {  # what a compiler follows, run without one: a call on x[2, 3], and the shape of its result
    "matrices": (lambda x, **out: einsum("A[I, J] * B[K, J] -> C[I, K]", x, x, **out), (2, 2)),
    "elements": (lambda x, **out: einsum("A[I, J] * B[I, J] -> C[I, J]", x, x, **out), (2, 3)),
    "transposed": (lambda x, **out: einsum("A[I, J] -> C[J, I]", x, **out), (3, 2)),
    "gathered": (lambda x, **out: all_gather("A[I_X, J] -> A[I, J]", x, ONE, **out), (2, 3)),
    "scattered": (lambda x, **out: reduce_scatter("A[I, J] {U_X} -> A[I_X, J]", x, ONE, **out), (2, 3)),
}


@pytest.mark.parametrize("what", INTO)
def test_a_buffer_in_a_graph_holds_the_eager_result_or_is_refused(what, monkeypatch):
    (call, shape), x = INTO[what], torch.arange(6.0).view(2, 3)
    wanted, out = call(x), torch.full(shape, 5.0)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(call(x), wanted)
    assert call(x, out=out) is out
    assert torch.equal(out, wanted)
    if what in ("matrices", "elements", "transposed"):
        assert torch.equal(call(x, out=out, add=True), 2 * wanted)
        with pytest.raises(ShardingError, match="fix: give out="):
            call(x, add=True)
    for misfit in (torch.ones(1, *shape), torch.ones(shape).double()):
        with pytest.raises(ShardingError, match="out has the result's shape and dtype"):
            call(x, out=misfit)
    with pytest.raises(ShardingError):
        call(x[0])


@pytest.mark.parametrize("line", ["A[I, J] {U_X} -> A[I, J]", "A[I_X, J] -> A[I, J_X]"])
def test_a_right_call_in_a_graph_is_not_refused(line, monkeypatch):
    call, x = all_reduce if "U" in line else all_to_all, torch.arange(6.0).view(2, 3)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(call(line, x, ONE), x)
    with pytest.raises(ShardingError):
        call(line, x[0], ONE)
