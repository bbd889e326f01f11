"""Every collective beside a map of the stack of all ranks' operands: what it computes, and each derivative that
torch.func and autograd know, over two axes of which the second is the major one.

The global loss is the sum of the ranks' own losses, so its gradient is what autograd says of the stacked map. Then what
is done in place, dropped, or not a number. The last test is what this project exists for, said of torch: how its own
collectives are differentiated. Where it fails, torch has changed, and README, notation.md and the collectives' own
Function are to be thought over.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from machine import on_ranks
from torch.distributed import _functional_collectives as functional
from torch.func import grad, jvp, linearize, vjp, vmap
from torch.nn.functional import pad

from scaling import collectives as c
from scaling.algebra import reshard

I = J = 8
ROWS = torch.tensor([0, 7, 9, 30, 9, 999])  # looked up in a table that is split; the last is in no part
SUM, ROOT = "A[I, J] {U_YX} -> ", {"root": 2}


def counts(n: int) -> list[list[int]]:
    """How many rows go from block i to block j; from block 1 none."""
    return [[(3 * i + j * j) % 5 * (i != 1) for j in range(n)] for i in range(n)]


def padded(rows):
    return pad(rows, (0, 0, 0, I * J // 2 - len(rows)))


def ragged(x, mesh):
    block, table = mesh.group(("Y", "X")).index, counts(mesh.size())
    sends, receives = table[block], [row[block] for row in table]
    rows = x.reshape(-1, 2)[: sum(sends)]
    line = "A[G_YX, E, R, D] -> A[G, E_YX, R, D]"
    return padded(c.ragged_all_to_all(line, rows, sends, receives, mesh, async_op=True).wait())


def stacked_ragged(s):
    parts = [x.reshape(-1, 2)[: sum(row)].split(row) for x, row in zip(s, counts(len(s)), strict=True)]
    return torch.stack([padded(torch.cat(came)) for came in zip(*parts, strict=True)])


def masked(x, mesh):
    here = mesh.group(("Y", "X")).index == ROWS // I
    return c.masked("x[B, J] {U_YX}", x[ROWS % I], here, mesh)


def stacked_masked(s):
    return torch.stack([torch.where((block == ROWS // I)[:, None], x[ROWS % I], 0) for block, x in enumerate(s)])


def by_axes(s):
    """[Y, X, I, J]: X is 2."""
    return s.view(-1, 2, I, J)


def on_each(y, s):
    return y.expand(len(s), *y.shape)


def at_root(y, s, root=2):
    """y on the rank that holds block 2, zeros elsewhere."""
    return (torch.arange(len(s)) == root)[:, None, None] * y


def second(s):
    """Where block 2 over X, Y stands: {U} has its axes in order, in which X is the major one."""
    x, y = divmod(2, len(s) // 2)
    return 2 * y + x


def ppermute(x, mesh):
    return c.ppermute("A[I, J]", x, mesh, "YX", [(i, i + 1) for i in range(mesh.size() - 1)])


def at_once(x, mesh):
    """Axes of several dims by one call, where each costs the same."""
    plan = reshard("A[I_Y, K, J_X]", "A[I, K, J]", (I * mesh.sizes["Y"], 2, J), mesh, cost=lambda step: 1.0)
    assert [step.op for step in plan.steps] == ["AllGather"]
    return c.run(plan, x.reshape(I, 2, J // 2), mesh)


def of(call, line, **options):
    return lambda x, mesh: c.wait(call(line, x, mesh, **options))


# name -> (the call, the same on operands stacked by block)
MAPS = {
    "all_gather": (of(c.all_gather, "A[I_YX, J] -> A[I, J]"), lambda s: on_each(s.flatten(0, 1), s)),
    "two dims": (
        of(c.all_gather, "A[I_Y, J_X] -> A[I, J]"),
        lambda s: on_each(by_axes(s).transpose(1, 2).reshape(-1, 2 * J), s),
    ),
    "two dims at once": (
        at_once,
        lambda s: on_each(by_axes(s).unflatten(3, (2, -1)).movedim(1, 3).flatten(0, 1).flatten(2, 3), s),
    ),
    "unshard": (of(c.unshard, "A[I_Y, J] {U_X}"), lambda s: on_each(by_axes(s).sum(1).flatten(0, 1), s)),
    "all_reduce": (of(c.all_reduce, SUM + "A[I, J]", async_op=True), lambda s: on_each(s.sum(0), s)),
    "mean": (of(c.all_reduce, SUM + "A[I, J]", op="mean"), lambda s: on_each(s.mean(0), s)),
    "max": (of(c.all_reduce, SUM + "A[I, J]", op="max"), lambda s: on_each(s.amax(0), s)),
    "reduce_scatter": (of(c.reduce_scatter, SUM + "A[I_YX, J]", async_op=True), lambda s: s.sum(0).view(len(s), -1, J)),
    "its min": (
        of(c.reduce_scatter, SUM + "A[I, J_YX]", op="min"),
        lambda s: s.amin(0).view(I, len(s), -1).movedim(1, 0),
    ),
    "all_to_all": (
        of(c.all_to_all, "A[I_YX, J] -> A[I, J_YX]"),
        lambda s: s.view(len(s), I, len(s), -1).permute(2, 0, 1, 3).flatten(1, 2),
    ),
    "ppermute": (ppermute, lambda s: torch.cat([torch.zeros_like(s[:1]), s[:-1]])),
    "shard": (
        of(c.shard, "A[I, J] -> A[I_YX, J]"),
        lambda s: torch.stack([x.chunk(len(s))[block] for block, x in enumerate(s)]),
    ),
    "broadcast": (of(c.broadcast, SUM + "A[I, J]", **ROOT), lambda s: on_each(s[second(s)], s)),
    "reduce": (of(c.reduce, SUM + "A[I, J] {U_YX}", **ROOT), lambda s: at_root(s.sum(0), s, second(s))),
    "its max": (of(c.reduce, SUM + "A[I, J] {U_YX}", **ROOT, op="max"), lambda s: at_root(s.amax(0), s, second(s))),
    "scatter": (of(c.scatter, SUM + "A[I_YX, J]", **ROOT), lambda s: s[2].view(len(s), -1, J)),
    "gather": (of(c.gather, "A[I_YX, J] -> A[I, J] {U_YX}", **ROOT), lambda s: at_root(s.flatten(0, 1), s)),
    "ragged": (ragged, stacked_ragged),
    "masked": (masked, stacked_masked),
}
LINEARIZED = "all_gather", "max", "reduce_scatter", "all_to_all", "ppermute", "scatter", "ragged"  # each way to send


def operands(ranks: int, seed: int) -> torch.Tensor:
    """[block, I, J] of few values: a maximum is a tie."""
    rng = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(ranks, I, J, generator=rng, dtype=torch.float64)).round() / 4


def weights(of_block: int, y: torch.Tensor) -> torch.Tensor:
    return 1.0 + torch.arange(y.numel(), dtype=y.dtype).view(y.shape) + of_block


def transformed(f, x: dict, t: dict, weights_of, every: bool) -> dict:
    """What f, of {name: operand}, and its derivatives give at x: with `every`, along t and the second ones too."""
    value = f(x)
    w = {name: weights_of(y) for name, y in value.items()}

    def loss(x):
        return sum((y.sin() * w[name]).sum() for name, y in f(x).items())

    def curved(x):
        return {name: y.sin() for name, y in f(x).items()}

    leaves = {name: each.clone().requires_grad_() for name, each in x.items()}
    loss(leaves).backward()
    autograd = {name: leaf.grad for name, leaf in leaves.items()}
    found = {"value": value, "autograd": autograd, "vjp": vjp(f, x)[1](w)[0], "grad": grad(loss)(x)}
    if not every:
        return found
    some, along = ({name: each[name] for name in LINEARIZED} for each in (x, t))
    several = {name: torch.stack([x[name], t[name], x[name] + t[name]], -1) for name in x}
    return found | {
        "jvp": jvp(curved, (x,), (t,))[1],
        "linearize": linearize(curved, some)[1](along),
        "vmap": vmap(f, -1, -1)(several),
        "vmap of grad": vmap(grad(loss), -1, -1)(several),
        "grad of grad": grad(lambda x: sum((g * t[name]).sum() for name, g in grad(loss)(x).items()))(x),
    }


def of_rank(mesh, every):
    block = mesh.group(("Y", "X")).index
    x, t = (dict.fromkeys(MAPS, operands(mesh.size(), seed)[block]) for seed in (0, 1))
    kept = x["masked"].clone()
    f = lambda x: {name: MAPS[name][0](each, mesh) for name, each in x.items()}  # noqa: E731
    with warnings.catch_warnings():  # torch's own, of its tracer
        warnings.simplefilter("ignore")
        found = transformed(f, x, t, lambda y: weights(block, y), every)
    assert torch.equal(x["masked"], kept)
    return block, found


@pytest.mark.parametrize(("sizes", "every"), [({"X": 2, "Y": 2}, True), ({"X": 2, "Y": 4}, False)])
def test_values_and_derivatives(ranks, sizes, every):
    """On X=2, Y=4 the order of blocks is not its own inverse."""
    answers = ranks(of_rank, sizes, every)
    x, t = (dict.fromkeys(MAPS, operands(len(answers), seed)) for seed in (0, 1))
    stacked = lambda x: {name: MAPS[name][1](each) for name, each in x.items()}  # noqa: E731
    weights_of = lambda y: torch.stack([weights(block, part) for block, part in enumerate(y)])  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = transformed(stacked, x, t, weights_of, every)
    for block, found in answers:
        for what, name in [(kind, name) for kind in wanted for name in wanted[kind]]:
            said = lambda text, what=f"{what} of {name}": f"{what}: {text}"  # noqa: E731
            torch.testing.assert_close(found[what][name], wanted[what][name][block], rtol=1e-12, atol=1e-12, msg=said)
        sent, got = (values["value"]["broadcast"].signbit() for values in (wanted, found))  # -0.0 stays -0.0
        assert torch.equal(got, sent[block])


@pytest.mark.parametrize(("mesh", "order"), [({"X": 1}, "X"), ({"X": 2}, "X"), ({"X": 2, "Y": 2}, "YX")])
def test_in_place(mesh, order):
    """The operand of an AllGather may be its own block of the buffer: nothing is copied. What is donated, in whatever
    layout, holds the sum."""
    n, line = mesh.size(), f"A[I_{order}, J] -> A[I, J]"
    whole = torch.arange(4.0 * n).view(2 * n, 2)
    for layout in (lambda t: t, lambda t: t.t().contiguous().t()):
        buffer = layout(torch.full_like(whole, -1))
        mine = c.shard(f"A[I_{order}, J]", buffer, mesh)
        place = buffer.narrow(0, 2 * mesh.group(tuple(order)).index, 2)
        assert torch.equal(mine, place)
        place.copy_(c.shard(f"A[I_{order}, J]", whole, mesh))
        assert c.all_gather(line, place, mesh, out=buffer) is buffer
        assert torch.equal(buffer, whole)
    x = torch.arange(6.0).view(2, 3)
    for given in (x.t().contiguous().t(), torch.stack([x, x])[1], torch.complex(x, -x), torch.complex(x, -x).real):
        before = given.clone()
        assert c.all_reduce(f"A[I, J] {{U_{order}}} -> A[I, J]", given, mesh, donate=True) is given
        assert torch.equal(given, n * before)


@on_ranks({"X": 4})
def test_a_nan_is_lost_only_where_it_is_masked(mesh):
    nan, inf, r = float("nan"), float("inf"), mesh.rank
    x = torch.tensor([nan if r == 0 else 1.0, nan if r == 3 else 2.0, -inf, inf if r == 1 else 0.0, -0.5 - r])
    hidden = c.masked("x[B] {U_X}", torch.full((2,), nan), torch.full((2,), r == 1), mesh)
    greatest = c.all_reduce("A[I] {U_X} -> A[I]", x, mesh, op="max")
    assert str(greatest.tolist()) == "[nan, nan, -inf, inf, -0.5]"
    assert str(hidden.tolist()) == ("[nan, nan]" if r == 1 else "[0.0, 0.0]")


@on_ranks({"X": 2})
def test_a_pending_dropped_without_wait_is_named_and_blocks_nobody(mesh):
    """Each rank drops what the other one waits for."""
    x = torch.full((200_000,), mesh.rank + 1.0)
    with warnings.catch_warnings(record=True, action="always") as warned:
        for _ in range(3):
            c.all_gather("A[I_X] -> A[I]", x, mesh, async_op=mesh.rank == 0)
        if mesh.rank == 1:
            c.send("B[I]", x, mesh, "X", 0, async_op=True)
        else:
            c.recv("B[I]", x, mesh, "X", 1)
    c.all_gather("A[I_X] -> A[I]", x, mesh, async_op=True).wait()
    assert c.all_reduce("A[I] {U_X} -> A[I]", x, mesh)[0] == 3
    dropped = ["Send: B[I]"] if mesh.rank else ["AllGather: A[I_X] -> A[I]"] * 3
    what = "\n  its Pending was dropped without wait(), so that nobody has the result\n  fix: call .wait(), or "
    for warning, call in zip(warned, dropped, strict=True):
        assert warning.category is RuntimeWarning
        assert str(warning.message).startswith(call + what)


@on_ranks({"X": 2})
def test_torch_s_own_collectives_under_torch_func(mesh):
    """The gradient of sum(w * y), y the sum over the ranks of x, as torch's raw collective has it, and as ours; what
    the functional one says."""
    w, x, group = torch.arange(3.0) + 10 * mesh.rank, torch.ones(3), mesh.group(("X",)).pg

    def raw(x):
        y = x.clone()
        dist.all_reduce(y, group=group)
        return (y * w).sum()

    def ours(x):
        return (c.all_reduce("y[I] {U_X} -> y[I]", x, mesh) * w).sum()

    with warnings.catch_warnings():  # torch's own
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="setup_context"):  # the functional collectives refuse
            grad(lambda x: (functional.all_reduce(x, "sum", group) * w).sum())(x)
    assert torch.equal(grad(raw)(x), w), "a raw all_reduce has the gradient of the identity, without a word"
    assert torch.equal(grad(ours)(x), 2 * torch.arange(3.0) + 10)  # each rank's x is in every rank's y
