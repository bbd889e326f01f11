"""Context parallelism: outputs and gradients equal dense attention, whatever the form, the tiles and the dtype."""

import math
import warnings

import pytest
import torch
from torch.func import jvp, linearize, vjp, vmap

from scaling.book.largest import largest
from scaling.mesh import Mesh
from scaling.models import blockwise, tiles
from scaling.strategies import context

FORMS, T, H, B = ("ring", "zigzag", "gather", "ulysses"), 48, 8, 2
HEADS = {"N=K": (4, 4), "K=1": (4, 1), "G=2": (8, 4), "K=6": (12, 6)}
PLAIN = {}
PACKED = {"window": 11, "segments": True}  # windows and documents that end inside chunks


def arrays(N, K, dtype=torch.float64, T=T):
    """Q, K, V, cotangent and tangents, none of them uniform along T or over heads; and documents of unequal lengths."""
    g = torch.Generator().manual_seed(N + K)
    shapes = [(B, T, heads, H) for heads in (N, K, K, N, N, K, K)]
    made = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    made[0] *= torch.linspace(0.1, 3, T)[:, None, None]
    made[2] += torch.linspace(-2, 2, T)[:, None, None]
    at = torch.arange(T)
    return [x.to(dtype) for x in made], torch.stack([at // 7 + (at > 30), (at > 20).long()])


def dense(Q, K, V, causal=True, window=None, segments=None, scale=None):
    """All scores at once, every query head with its own copy of the keys."""
    K, V = (x.repeat_interleave(Q.shape[2] // K.shape[2], 2) for x in (K, V))
    ahead = torch.arange(Q.shape[1]) - torch.arange(Q.shape[1])[:, None]
    hidden = (ahead > 0) & causal | (ahead.abs() >= (window or math.inf))
    if segments is not None:
        hidden = hidden | (segments[:, None, :, None] != segments[:, None, None, :])
    scores = torch.einsum("btnh,bsnh->bnts", Q, K) * (scale or Q.shape[-1] ** -0.5)
    return torch.einsum("bnts,bsnh->btnh", scores.masked_fill(hidden, -math.inf).softmax(-1), V)


def on_mesh(mesh, form, axis, segments, **options):
    """attention of shards in plain order; the zig-zag order is taken and left inside."""

    def attend(Q, K, V):
        return context.attention(Q, K, V, mesh, axis=axis, form=form, segments=segments, **options)

    def zigzag(*operands):
        return context.from_zigzag(attend(*(context.to_zigzag(x, 1, mesh, axis) for x in operands)), 1, mesh, axis)

    return zigzag if form == "zigzag" else attend


def errors(mesh, form, axis, heads, options, dtype=torch.float64, length=T):
    """The largest differences of O, dQ, dK, dV (by torch.func, by autograd) and of a tangent, over their maximum."""
    whole, segments = arrays(*HEADS[heads], dtype, length)
    options = dict(options)
    segments = segments if options.pop("segments", False) else None
    group = mesh.group(tuple(axis))
    shard = lambda x: x.chunk(group.size, 1)[group.index].clone()  # noqa: E731
    mine = None if segments is None else shard(segments)
    if form == "zigzag" and mine is not None:
        mine = context.to_zigzag(mine, 1, mesh, axis)
    f = on_mesh(mesh, form, tuple(axis) if form == "usp" else axis, mine, **options)
    operands, dO, tangents = [shard(x) for x in whole[:3]], shard(whole[3]), tuple(shard(x) for x in whole[4:])
    O, pull = vjp(f, *operands)
    got = [O, *pull(dO)]
    wide = [x.double() for x in whole]
    want_O, want_pull = vjp(lambda *x: dense(*x, segments=segments, **options), *wide[:3])
    wanted = [want_O, *want_pull(wide[3])]
    if dtype == torch.float64:
        leaves = [x.clone().requires_grad_() for x in operands]
        got += torch.autograd.grad(f(*leaves), leaves, dO)
        wanted += wanted[1:]
    if dtype == torch.float64 and group.size < 4:
        with warnings.catch_warnings(action="ignore"):  # of torch's own code
            got.append(jvp(f, tuple(operands), tangents)[1])
            wanted.append(jvp(lambda *x: dense(*x, segments=segments, **options), tuple(wide[:3]), tuple(wide[4:]))[1])
    return [float((a - shard(b)).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True)]


def several(mesh, cases):
    return [errors(mesh, *case) for case in cases]


SIDES = {"causal": False, "window": 5, "scale": 0.7}
USP = [("usp", "CY", heads, mask) for heads, mask in (("K=1", PLAIN), ("K=6", PACKED))]
CASES = {
    "1": ({"C": 1}, [("ring", "C", "G=2", PACKED), ("zigzag", "C", "K=1", PLAIN), ("ulysses", "C", "N=K", SIDES)]),
    "2": ({"C": 2}, [(form, "C", "K=6", PACKED) for form in FORMS]),
    "4": (
        {"C": 4},
        [
            ("ring", "C", "N=K", PLAIN),
            ("ring", "C", "K=1", PACKED),
            ("zigzag", "C", "G=2", PLAIN),
            ("zigzag", "C", "K=1", PACKED),
            ("gather", "C", "K=6", {"causal": False}),
            ("ulysses", "C", "K=1", PACKED),
            ("ulysses", "C", "K=6", SIDES),
        ],
    ),
    "8": ({"C": 8}, [("ring", "C", "G=2", PACKED), ("zigzag", "C", "K=1", SIDES)]),
    "ulysses inside a ring": ({"C": 2, "Y": 2}, USP),
    "ulysses alone": ({"Y": 2, "C": 1}, USP),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_dense(ranks, case):
    """K < C, K that does not divide C, a window shorter than a block, documents, both kinds of heads and masks."""
    mesh, cases = CASES[case]
    for worst in ranks(several, mesh, cases):
        assert largest(map(largest, worst)) < 1e-11, list(zip(cases, worst, strict=True))


def test_tiles_and_kernels(monkeypatch):
    """Tiles smaller than a chunk, and the kernel in matmuls, change nothing."""
    monkeypatch.setattr(blockwise, "TILE", 5)
    mesh = Mesh({"C": 1})
    assert largest(errors(mesh, "ring", "C", "G=2", PACKED)) < 1e-11
    monkeypatch.setattr(blockwise.KeyBlock, "kernel", lambda self, device: tiles.written)
    assert largest(errors(mesh, "ring", "C", "G=2", PACKED)) < 1e-11


def test_parts_are_as_long_as_a_tile_allows(monkeypatch):
    monkeypatch.setattr(blockwise, "TILE", 10)
    parts = blockwise.KeyBlock((), (), tiles.Mask(), 1.0).parts((range(4), range(40, 65)))
    assert parts == [range(4), range(40, 50), range(50, 60), range(60, 65)]


def bf16_errors(mesh, forms):
    return [errors(mesh, form, "C", "G=2", PLAIN, torch.bfloat16, 128) for form in forms]


@pytest.mark.slow
def test_rounding_does_not_grow_with_the_ring(ranks):
    """bfloat16 on eight ranks is as near to the exact result as on one."""
    one = bf16_errors(Mesh({"C": 1}), ["ring"])[0]
    eight = torch.tensor(ranks(bf16_errors, {"C": 8}, FORMS)).amax(0)
    assert (eight < 1.5 * torch.tensor(one)).all(), (one, eight)


def large_scores(mesh):
    """Scores of some thousands, rising and falling along T: exp of them, or of their differences, overflows."""
    Q = torch.full((1, 16, 1, 4), 50.0) * torch.linspace(-1, 1, 4).roll(mesh.rank)
    return context.attention(Q, Q, Q, mesh, form="ring", scale=10.0)


def test_large_scores_do_not_overflow(ranks):
    Q = torch.cat([torch.full((1, 16, 1, 4), 50.0) * torch.linspace(-1, 1, 4).roll(rank) for rank in range(4)], 1)
    got = torch.cat(ranks(large_scores, {"C": 4}), 1)
    torch.testing.assert_close(got, dense(Q, Q, Q, scale=10.0))


def test_what_was_seen_of_nothing_merges():
    """A query that a block hides from everything adds nothing, in any order, and is no nan."""
    seen = blockwise.Attended(torch.randn(1, 2, 1, 4), torch.tensor([[[700.0], [-900.0]]]))
    nothing = blockwise.Attended(torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1), -math.inf))
    for merged in (blockwise.merge_attended(seen, nothing), blockwise.merge_attended(nothing, seen)):
        torch.testing.assert_close(merged, seen, rtol=0, atol=0)
    assert not blockwise.merge_attended(nothing, nothing).O.isnan().any()
    q, k, v, hidden = torch.randn(1, 1, 2, 3, 4), *torch.randn(2, 1, 1, 1, 5, 4), torch.rand(3, 5) < 0.4
    hidden[1] = True
    for kernel in (tiles.fused, tiles.written):
        O, lse = kernel.forward(q, k, v, hidden, 0.5)
        assert not O[..., 1, :].any()
        assert lse[..., 1].isneginf().all()
        assert lse[..., 0].isfinite().all()


def test_vmap_and_second_derivatives():
    mesh, (whole, _) = Mesh({"C": 1}), arrays(4, 4)
    Q, K, V, dO = whole[:4]
    stacked = torch.stack([Q, -Q])
    f = lambda Q: context.attention(Q, K, V, mesh)  # noqa: E731
    gradient = lambda Q: vjp(f, Q)[1](dO)[0]  # noqa: E731
    torch.testing.assert_close(vmap(gradient)(stacked), torch.stack([gradient(Q), gradient(-Q)]))
    with pytest.raises(NotImplementedError, match="second derivative"):
        vjp(gradient, Q)[1](dO)


def compiled(mesh):
    """One graph of a step by torch.func, and linearize: the largest differences from the same run eagerly."""
    torch._dynamo.reset()
    whole, segments = arrays(8, 4)
    *operands, dO = (x.chunk(2, 1)[mesh.rank].clone() for x in whole[:4])
    f = on_mesh(mesh, "ring", "C", segments.chunk(2, 1)[mesh.rank].clone(), window=9)
    tangents = tuple(x.flip(1) for x in operands)

    def step(dO, *operands):
        O, pull = vjp(f, *operands)
        return O, *pull(dO)

    with warnings.catch_warnings(action="ignore"):  # of torch's own code
        got = torch.compile(step, backend="aot_eager", fullgraph=True)(dO, *operands)
        linear, tangent = linearize(f, *operands)[1](*tangents), jvp(f, tuple(operands), tangents)[1]
    pairs = zip((*got, linear), (*step(dO, *operands), tangent), strict=True)
    return [float((a - b).abs().max()) for a, b in pairs]


@pytest.mark.compile
@pytest.mark.slow
def test_compiled_and_linearized(ranks):
    for off in ranks(compiled, {"C": 2}):
        assert largest(off) < 1e-13
