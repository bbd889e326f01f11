"""Collectives that reduce by something else than a sum: values in every dtype, and what each refuses."""

import pytest
import torch

from scaling import collectives as c
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError
from scaling.trace import trace

MESH = {"X": 2, "Y": 2}
BY = {"mean": lambda s, dim: s.mean(dim), "max": torch.amax, "min": torch.amin}
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
REDUCE, SCATTER = "A[I, J] {U_XY} -> A[I, J]", "A[I, J] {U_XY} -> "


def parts(dtype):
    """[x, y, I, J]: what each rank has, exact in every dtype, and with ties."""
    x = torch.randint(0, 9, (2, 2, 8, 4), generator=torch.Generator().manual_seed(0))
    return (x / 4 if dtype.is_floating_point else x).to(dtype)


def reduced(mesh, by, dtype):
    x = parts(dtype)[mesh.coord["X"], mesh.coord["Y"]]
    kept, given, out = x.clone(), x.clone(), torch.empty(8, 2, dtype=dtype)
    over_x = c.reduce_scatter("A[I, J] {U_X} -> A[I, J_X]", x, mesh, op=by, out=out)
    assert over_x is out
    assert c.all_reduce(REDUCE, given, mesh, op=by, donate=True) is given
    results = {
        "over X": c.unshard("A[I, J_X]", over_x, mesh),
        "at once": c.all_reduce(REDUCE, x, mesh, op=by),
        "later": c.all_reduce(REDUCE, x, mesh, op=by, async_op=True).wait(),
        "donated": given,
        "scattered": c.unshard("A[I_YX, J]", c.reduce_scatter(SCATTER + "A[I_YX, J]", x, mesh, op=by), mesh),
        "two dims": c.unshard("A[I_X, J_Y]", c.reduce_scatter(SCATTER + "A[I_X, J_Y]", x, mesh, op=by), mesh),
        "at the root": c.reduce(SCATTER + "A[I, J] {U_XY}", x, mesh, root=3, op=by),
    }
    if dtype.is_floating_point:
        results["differentiated"] = c.all_reduce(REDUCE, x.clone().requires_grad_(), mesh, op=by).detach()
    assert torch.equal(x, kept)
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by", BY)
def test_values(ranks, by, dtype):
    if by == "mean" and not dtype.is_floating_point:
        return
    s = parts(dtype)
    for rank, results in enumerate(ranks(reduced, MESH, by, dtype)):
        over_x, whole = BY[by](s, 0)[rank % 2], BY[by](s.flatten(0, 1), 0)
        for how, y in results.items():
            wanted = over_x if how == "over X" else whole
            wanted = torch.zeros_like(whole) if how == "at the root" and rank != 3 else wanted
            assert y.dtype == dtype, how
            assert torch.equal(y, wanted), f"{how}:\n{y}\n{wanted}"


def extremes(mesh):
    nan, inf, r = float("nan"), float("inf"), mesh.rank
    x = torch.tensor([nan if r == 0 else 1.0, nan if r == 3 else 2.0, -inf, inf if r == 1 else 0.0, -0.5 - r])
    found = {
        shape: c.all_reduce("A[I] {U_X} -> A[I]", torch.full((shape,), float(r)), mesh, op="min") for shape in (0, 1)
    }
    scalar = c.all_reduce("A[] {U_X} -> A[]", torch.tensor(float(r)), mesh, op="max")
    return c.all_reduce("A[I] {U_X} -> A[I]", x, mesh, op="max").tolist(), [*found[0], *found[1]], scalar


def test_a_nan_is_not_lost_and_any_size_will_do(ranks):
    for greatest, least, scalar in ranks(extremes, {"X": 4}):
        assert str(greatest) == "[nan, nan, -inf, inf, -0.5]"
        assert (least, scalar) == ([0], 3)


def softmax(mesh):
    """The loss of a softmax over logits[B, V_X], its shift by the greatest logit a constant."""
    logits = (4 * torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).round()
    mine = c.shard("L[B, V] -> L[B, V_X]", logits, mesh)

    def loss(mine):
        top = c.all_reduce("Top[B] {U_X} -> Top[B]", mine.detach().amax(1), mesh, op="max")
        total = c.all_reduce("Sum[B] {U_X} -> Sum[B]", (mine - top[:, None]).exp().sum(1), mesh)
        return (total.log() + top).sum() / mesh.size()  # terms: each rank's share of what all have

    dmine, value = torch.func.grad_and_value(loss)(mine)
    dlogits = c.unshard("L[B, V_X]", dmine, mesh)
    return value * mesh.size(), logits.logsumexp(1).sum(), dlogits, logits.softmax(1)


def test_a_softmax_over_a_sharded_dim(ranks):
    for value, wanted, dlogits, dwanted in ranks(softmax, {"X": 4}):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=0)
        torch.testing.assert_close(dlogits, dwanted, rtol=1e-12, atol=1e-15)


def compiled(mesh):
    x = parts(torch.float64)[mesh.rank, 0, 0]

    def f(x):
        wholes = [c.all_reduce("A[I] {U_X} -> A[I]", x, mesh, op=by) for by in BY]
        shards = [c.reduce_scatter("A[I] {U_X} -> A[I_X]", x, mesh, op=by) for by in BY]
        each = zip((1, 2, 3), wholes, shards, strict=True)  # by its weight each gradient is known
        weighted = [n * (y * torch.arange(4.0)).sum() + 10 * n * z.sum() for n, y, z in each]
        return sum(weighted), (wholes, shards)

    g = torch.func.grad_and_value(f, has_aux=True)
    return g(x), torch.compile(g, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.compile
@pytest.mark.slow
def test_compiled(ranks):
    wanted = [BY[by](parts(torch.float64)[:, 0, 0], 0) for by in BY]
    for rank, (eager, graph) in enumerate(ranks(compiled, {"X": 2})):
        torch.testing.assert_close(graph, eager, rtol=1e-12, atol=0)
        _, (_, (wholes, shards)) = graph
        assert all(map(torch.equal, wholes, wanted))
        assert all(map(torch.equal, shards, [whole.view(2, -1)[rank] for whole in wanted]))


def traced(mesh):
    with trace() as log:
        c.all_reduce("A[I] {U_X} -> A[I]", torch.ones(8), mesh, op="max")
        c.reduce_scatter("A[I] {U_X} -> A[I_X]", torch.ones(8), mesh, op="mean")
    return [(event.op, event.nbytes, event.wire_bytes) for event in log.events]


def test_a_trace_counts_them_as_sums(ranks):
    wanted = [("AllReduce", 32, 32), ("ReduceScatter", 32, 16)]
    assert ranks(traced, {"X": 2}) == [wanted] * 2
    assert traced_abstract() == wanted


def traced_abstract():
    mesh, x = AbstractMesh({"X": 2}), torch.ones(8, device="meta")
    with trace() as log:
        c.all_reduce("A[I] {U_X} -> A[I]", x, mesh, op="max")
        c.reduce_scatter("A[I] {U_X} -> A[I_X]", x, mesh, op="mean")
    return [(event.op, event.nbytes, event.wire_bytes) for event in log.events]


REFUSED = {
    "another word": (lambda x, m: c.all_reduce("A[I] {U_X} -> A[I]", x, m, op="avg"), "one of sum, mean, max, min"),
    "by position": (lambda x, m: c.all_reduce("A[I] {U_X} -> A[I]", x, m, "mean"), "positional"),
    "a mean of whole numbers": (
        lambda x, m: c.all_reduce("A[I] {U_X} -> A[I]", x.int(), m, op="mean"),
        "a mean has fractions",
    ),
    "the greatest complex number": (
        lambda x, m: c.reduce_scatter("A[I] {U_X} -> A[I_X]", x.to(torch.complex64), m, op="max"),
        "the max of torch.complex64",
    ),
    "a sum of short integers": (
        lambda x, m: c.all_reduce("A[I] {U_X} -> A[I]", x.short(), m),
        "the sum of torch.int16",
    ),
    "a sum of float8": (
        lambda x, m: c.reduce_scatter("A[I] {U_X} -> A[I_X]", x.to(torch.float8_e4m3fn), m),
        "fix: convert it",
    ),
    "a broadcast of short integers": (lambda x, m: c.broadcast("A[I] {U_X} -> A[I]", x.short(), m), "torch.int16"),
}


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("mesh", [AbstractMesh({"X": 2}), Mesh({"X": 1})], ids=str)
@pytest.mark.parametrize("what", REFUSED)
def test_refused_on_every_mesh_alike(what, mesh, compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    call, words = REFUSED[what]
    with pytest.raises((ShardingError, TypeError)) as error:
        call(torch.ones(4, device=mesh.device), mesh)
    assert words in str(error.value)
    assert isinstance(error.value, ShardingError) or words == "positional"
