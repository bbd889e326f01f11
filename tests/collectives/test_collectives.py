"""Every collective against one device: what it computes, and its derivatives under each transform of torch.func.

The oracle holds the ranks' operands stacked along a leading dim: a collective is a map of that stack. The global
loss is the sum of the ranks' own losses, so its gradient is what autograd says of the stacked map. The last test is
what this project exists for, said of torch: how its own collectives are differentiated. Where it fails, torch has
changed, and README, notation.md and the collectives' own Function are to be thought over.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.func import grad, jvp, linearize, vjp, vmap

from scaling import collectives as c
from scaling import launch
from scaling.collectives import all_reduce

I, J = 8, 4
N = 4  # ranks


def stack_all_gather(s):
    return s.flatten(0, 1).expand(N, N * s.shape[1], J)


def stack_reduce_scatter(s):
    return s.sum(0).view(N, I // N, J)


def stack_all_to_all(s):  # [rank, I, J] -> [rank, N*I, J/N]
    return torch.stack([s[:, :, r * J // N : (r + 1) * J // N].flatten(0, 1) for r in range(N)])


def stack_ppermute(s):  # 0 -> 1 -> 2 -> 3: rank 0 receives nothing
    return torch.cat([torch.zeros_like(s[:1]), s[:-1]])


def stack_slice(s):
    return torch.stack([s[r, r * I // N : (r + 1) * I // N] for r in range(N)])


def only_root(x):
    return torch.cat([torch.zeros_like(x[:2]), x[2:3], torch.zeros_like(x[3:])])


# name -> (call, the same on stacked operands)
MAPS = {
    "all_gather": (lambda x, m: c.all_gather("A[I_X, J] -> A[I, J]", x, m), stack_all_gather),
    "reduce_scatter": (lambda x, m: c.reduce_scatter("A[I, J] {U_X} -> A[I_X, J]", x, m), stack_reduce_scatter),
    "all_reduce": (lambda x, m: c.all_reduce("A[I, J] {U_X} -> A[I, J]", x, m), lambda s: s.sum(0).expand_as(s)),
    "all_to_all": (lambda x, m: c.all_to_all("A[I_X, J] -> A[I, J_X]", x, m), stack_all_to_all),
    "ppermute": (lambda x, m: c.ppermute("A[I_X, J]", x, m, "X", [(0, 1), (1, 2), (2, 3)]), stack_ppermute),
    "shard": (lambda x, m: c.shard("A[I, J] -> A[I_X, J]", x, m), stack_slice),
    "broadcast": (
        lambda x, m: c.broadcast("A[I] {U_X} -> A[I]", x[:, 0], m, root=2),
        lambda s: s[2, :, 0].expand(N, I),
    ),
    "reduce": (
        lambda x, m: c.reduce("A[I, J] {U_X} -> A[I, J] {U_X}", x, m, root=2),
        lambda s: only_root(s.sum(0).expand_as(s)),
    ),
    "all_reduce mean": (
        lambda x, m: c.all_reduce("A[I, J] {U_X} -> A[I, J]", x, m, op="mean"),
        lambda s: s.mean(0).expand_as(s),
    ),
    "all_reduce max": (
        lambda x, m: c.all_reduce("A[I, J] {U_X} -> A[I, J]", x, m, op="max"),
        lambda s: s.amax(0).expand_as(s),
    ),
    "reduce_scatter max": (
        lambda x, m: c.reduce_scatter("A[I, J] {U_X} -> A[I, J_X]", x, m, op="max"),
        lambda s: s.amax(0).view(I, N, J // N).movedim(1, 0),
    ),
    "reduce max": (
        lambda x, m: c.reduce("A[I, J] {U_X} -> A[I, J] {U_X}", x, m, root=2, op="max"),
        lambda s: only_root(s.amax(0).expand_as(s)),
    ),
    "scatter": (lambda x, m: c.scatter("A[I, J] {U_X} -> A[I_X, J]", x, m, root=2), lambda s: s[2].view(N, I // N, J)),
    "gather": (
        lambda x, m: c.gather("A[I_X, J] -> A[I, J] {U_X}", x, m, root=2),
        lambda s: only_root(stack_all_gather(s)),
    ),
}


def operands(seed=0):
    g = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(N, I, J, generator=g, dtype=torch.float64)).round() / 4  # of few values: a maximum is a tie


def loss_of(y, w):
    return (y.sin() * w).sum()


def run_derivatives(mesh, name):
    """All derivatives of one map on this rank: the operands' gradient and so on."""
    call, r = MAPS[name][0], mesh.rank
    x, t = operands()[r], operands(1)[r]
    weights = lambda y: 1.0 + torch.arange(y.numel(), dtype=y.dtype).view(y.shape) + r  # noqa: E731
    f = lambda x: call(x, mesh)  # noqa: E731
    curved = lambda x: f(x).sin()  # noqa: E731
    own = lambda x: loss_of(f(x), weights(f(x).detach()))  # noqa: E731
    out = {"value": f(x), "grad": grad(own)(x)}
    leaf = x.clone().requires_grad_()
    own(leaf).backward()
    out["autograd"] = leaf.grad
    y, pull = vjp(f, x)
    out["vjp"] = pull(weights(y))[0]
    with warnings.catch_warnings():  # torch's own, of its tracer
        warnings.simplefilter("ignore")
        out["jvp"] = jvp(curved, (x,), (t,))[1]
        out["linearize"] = linearize(curved, x)[1](t)
    out["vmap"] = vmap(f, in_dims=2, out_dims=1)(torch.stack([x, t, x + t], 2))
    out["vmap_grad"] = vmap(grad(own))(torch.stack([x, t]))
    out["grad_grad"] = grad(lambda x: (grad(own)(x) * t).sum())(x)
    out["sent"] = x
    return out


def expected(name):
    stacked = MAPS[name][1]
    x, t = operands(), operands(1)
    with torch.no_grad():
        shape = stacked(x).shape
    w = torch.stack([1.0 + torch.arange(shape[1:].numel(), dtype=x.dtype).view(shape[1:]) + r for r in range(N)])
    loss = lambda x: loss_of(stacked(x), w)  # noqa: E731
    g = grad(loss)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tangent = jvp(lambda s: stacked(s).sin(), (x,), (t,))[1]
    return {
        "value": stacked(x),
        "grad": g,
        "autograd": g,
        "vjp": vjp(stacked, x)[1](w)[0],
        "jvp": tangent,
        "linearize": tangent,
        "vmap": torch.stack([stacked(x), stacked(t), stacked(x + t)], 2),
        "vmap_grad": torch.stack([g, grad(loss)(t)], 1),
        "grad_grad": grad(lambda x: (grad(loss)(x) * t).sum())(x),
        "sent": x,
    }


@pytest.mark.parametrize("name", MAPS)
def test_values_and_derivatives(ranks, name):
    got = ranks(run_derivatives, {"X": N}, name)
    for what, wanted in expected(name).items():
        for r in range(N):
            torch.testing.assert_close(
                got[r][what], wanted[r], rtol=1e-12, atol=1e-12, msg=lambda m, w=what: f"{w}: {m}"
            )


def extremes(mesh):
    nan, inf, r = float("nan"), float("inf"), mesh.rank
    x = torch.tensor([nan if r == 0 else 1.0, nan if r == 3 else 2.0, -inf, inf if r == 1 else 0.0, -0.5 - r])
    return str(c.all_reduce("A[I] {U_X} -> A[I]", x, mesh, op="max").tolist())


def test_a_nan_is_not_lost(ranks):
    assert ranks(extremes, {"X": 4}) == ["[nan, nan, -inf, inf, -0.5]"] * 4


def drop(mesh, x):
    """Each rank drops what the other one waits for."""
    for _ in range(3):
        c.all_gather("A[I_X] -> A[I]", x, mesh, async_op=mesh.rank == 0)
    if mesh.rank == 1:
        c.send("B[I]", x, mesh, "X", 0, async_op=True)
    else:
        c.recv("B[I]", x, mesh, "X", 1)


def drop_and_go_on(mesh):
    x = torch.full((200_000,), mesh.rank + 1.0)
    with pytest.warns(RuntimeWarning) as warned:
        drop(mesh, x)
    c.all_gather("A[I_X] -> A[I]", x, mesh, async_op=True).wait()
    return [str(each.message) for each in warned], c.all_reduce("A[I] {U_X} -> A[I]", x, mesh)[0].item()


def test_what_is_dropped_without_wait_is_named_and_holds_nobody_up(ranks):
    what = "\n  its Pending was dropped without wait(), so that nobody has the result\n  fix: call .wait(), or "
    (first, sum0), (second, sum1) = ranks(drop_and_go_on, {"X": 2})
    assert (sum0, sum1, len(first), len(second)) == (3.0, 3.0, 3, 1)
    assert all(message.startswith("AllGather: A[I_X] -> A[I]" + what) for message in first)
    assert second[0].startswith("Send: B[I]" + what)


def gradients(mesh):
    """The gradient of sum(w * y), y the sum over the ranks of x, as torch's raw collective has it, and as ours; what
    the functional one says."""
    w = torch.arange(3.0) + 10 * mesh.rank
    group = mesh.group(("X",)).pg

    def raw(x):
        y = x.clone()
        dist.all_reduce(y, group=group)
        return (y * w).sum()

    def ours(x):
        return (all_reduce("y[I] {U_X} -> y[I]", x, mesh) * w).sum()

    try:
        found = torch.func.grad(lambda x: (functional.all_reduce(x, "sum", group) * w).sum())(torch.ones(3))
    except RuntimeError as error:
        found = str(error)
    return torch.func.grad(raw)(torch.ones(3)), torch.func.grad(ours)(torch.ones(3)), found, w


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own
def test_torch_s_own_collectives_under_torch_func():
    results = launch.run(gradients, {"X": 2}, checked=False)
    right = sum(w for *_, w in results)  # each rank's x is in every rank's y
    for raw, ours, functional_says, w in results:
        assert torch.equal(raw, w), "a raw all_reduce has the gradient of the identity, without a word"
        assert torch.equal(ours, right)
        assert "setup_context" in functional_says, "the functional collectives refuse"
