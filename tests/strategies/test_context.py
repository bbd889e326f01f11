"""Context parallelism: outputs and gradients equal dense attention, whatever the form, the tiles and the dtype; and the
work and bytes of each form, by closed form."""

import itertools
import math
import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
from machine import on_ranks
from problems import close, drawn, on_one_device, pulled
from refused import read_table
from torch.func import jvp, linearize, vjp, vmap

from scaling import tree
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import blockwise, tiles
from scaling.models.attention import sdpa
from scaling.models.pointwise import vjp as tape
from scaling.strategies import context
from scaling.strategies.context import costs
from scaling.strategies.context.ring import _from_whole
from scaling.trace import trace

FORMS, T, H, B = ("ring", "zigzag", "gather", "ulysses"), 48, 8, 2
HEADS = {"N=K": (4, 4), "K=1": (4, 1), "G=2": (8, 4), "K=6": (12, 6)}
PLAIN = {}
PACKED = {"window": 11, "segments": True}  # windows and documents that end inside chunks


def arrays(heads, T=T):
    """(Q, K, V) and the cotangent, none of them uniform along T or over heads; and documents of unequal
    lengths."""
    N, K = HEADS[heads]
    made = drawn(*((B, T, heads, H) for heads in (N, K, K, N)), seed=N + K)
    made[0] *= torch.linspace(0.1, 3, T)[:, None, None]
    made[2] += torch.linspace(-2, 2, T)[:, None, None]
    at = torch.arange(T)
    return made[:3], made[3], torch.stack([at // 7 + (at > 30), (at > 20).long()])


def dense(Q, K, V, sinks=None, causal=True, window=None, segments=None, scale=None, cap=None):
    """All scores at once, every query head with its own copy of the keys, and a last key without a value for sinks."""
    K, V = (x.repeat_interleave(Q.shape[2] // K.shape[2], 2) for x in (K, V))
    ahead = torch.arange(Q.shape[1]) - torch.arange(Q.shape[1])[:, None]
    hidden = (ahead > 0) & causal | (ahead.abs() >= (window or math.inf))
    if segments is not None:
        hidden = hidden | (segments[:, None, :, None] != segments[:, None, None, :])
    scores = torch.einsum("btnh,bsnh->bnts", Q, K) * (scale or Q.shape[-1] ** -0.5)
    scores = (scores if cap is None else cap * torch.tanh(scores / cap)).masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return torch.einsum("bnts,bsnh->btnh", scores.softmax(-1)[..., : K.shape[1]], V)


def on_mesh(mesh, form, axis, segments, **options):
    """attention of shards in plain order; the zig-zag order is taken and left inside."""

    def attend(Q, K, V, sinks=None):
        return context.attention(Q, K, V, mesh, axis=axis, form=form, segments=segments, sinks=sinks, **options)

    def zigzag(Q, K, V, sinks=None):
        ordered = (context.to_zigzag(x, 1, mesh, axis) for x in (Q, K, V))
        return context.from_zigzag(attend(*ordered, sinks), 1, mesh, axis)

    return zigzag if form == "zigzag" else attend


CAPPED = PACKED | {"cap": 0.8, "sinks": True}
SIDES = {"causal": False, "window": 5, "scale": 0.7}
USP = [("usp", "CY", heads, mask) for heads, mask in (("K=1", PLAIN), ("K=6", PACKED), ("G=2", CAPPED))]
ON_4 = read_table(
    """
form       axis  heads  mask
# two hops
"ring"     "C"   "K=1"  PACKED | {"window": 14}
"zigzag"   "C"   "G=2"  PLAIN
"zigzag"   "C"   "K=1"  PACKED
"gather"   "C"   "K=6"  {"causal": False}
"ulysses"  "C"   "K=1"  PACKED
"ulysses"  "C"   "K=6"  SIDES
"zigzag"   "C"   "K=1"  SIDES
# of scores of some thousands exp overflows
"ring"     "C"   "N=K"  {"scale": 200.0}
""",
    globals(),
)
CASES = {
    "1": ({"C": 1}, [("ring", "C", "G=2", PACKED), ("zigzag", "C", "K=1", PLAIN), ("ulysses", "C", "N=K", SIDES)]),
    "2": ({"C": 2}, [(form, "C", "K=6", mask) for form in FORMS for mask in (PACKED, CAPPED)]),
    "4": ({"C": 4}, ON_4),
    "ulysses inside a ring": ({"C": 2, "Y": 2}, USP),
    "ulysses alone": ({"Y": 2, "C": 1}, USP),
}


@pytest.mark.parametrize(("mesh", "cases"), CASES.values(), ids=CASES)
def test_equal_to_dense(mesh, cases):
    """O, dQ, dK and dV, by torch.func or by autograd, and a tangent: K < C, K that does not divide C, a window shorter
    than a block, documents, both kinds of heads and masks."""
    for by, (form, axis, heads, options) in zip(itertools.cycle((vjp, tape)), cases):
        operands, dO, segments = arrays(heads)
        options = dict(options)
        segments = segments if options.pop("segments", False) else None
        sinks = drawn((HEADS[heads][0],), seed=1) if options.pop("sinks", False) else []
        type_, mine = f"O[B, T_{axis}, N, H]", None
        if segments is not None:
            mine = tree.shard(segments, f"s[B, T_{axis}]", mesh)
            mine = context.to_zigzag(mine, 1, mesh, axis) if form == "zigzag" else mine
        f = on_mesh(mesh, form, tuple(axis) if form == "usp" else axis, mine, **options)
        one = partial(dense, segments=segments, **options)
        operands, types = [*operands, *sinks], [type_] * 3 + ["s[N]"] * len(sinks)
        close(pulled(f, mesh, operands, types, type_, dO, by), on_one_device(one, operands, dO), 1e-11)
        if mesh.size() < 4:
            tangents = drawn(*(x.shape for x in operands), seed=2)
            given = (tuple(tree.shard(each, types, mesh)) for each in (operands, tangents))
            with warnings.catch_warnings(action="ignore"):  # of torch's own code
                found, wanted = jvp(f, *given)[1], jvp(one, tuple(operands), tuple(tangents))[1]
            close(tree.unshard(found, type_, mesh), wanted, 1e-11)


def test_tiles_and_kernels(monkeypatch):
    """Tiles smaller than a chunk, of which queries see nothing, the kernel in matmuls, and the one of GPUs, which takes
    whole chunks where there is no mask, change nothing. On a CPU its flash attention is the CPU's."""
    cases = [(form, "C", "G=2", PACKED) for form in ("ring", "zigzag")]
    monkeypatch.setattr(blockwise, "TILE", 5)
    test_equal_to_dense(Mesh({"C": 1}), cases)
    monkeypatch.setattr(blockwise.KeyBlock, "kernel", lambda self, Q: tiles.written(None))
    test_equal_to_dense(Mesh({"C": 1}), cases)
    monkeypatch.setattr(blockwise.KeyBlock, "kernel", lambda self, Q: tiles.by_mask)
    test_equal_to_dense(Mesh({"C": 1}), [*cases, ("zigzag", "C", "K=6", PLAIN), ("ring", "C", "G=2", {"window": 20})])
    parts = blockwise.KeyBlock((), (), tiles.Mask(), 1.0).parts((range(4), range(40, 48)), 5)
    assert parts == [range(4), range(40, 45), range(45, 48)]


def bf16_errors(mesh, forms):
    """The largest differences of O, dQ, dK and dV from the exact ones."""
    operands, dO, _ = arrays("G=2", 128)
    *operands, dO = (x.bfloat16() for x in (*operands, dO))
    wanted = tree.leaves(on_one_device(dense, [x.double() for x in operands], dO.double()))
    type_ = "O[B, T_C, N, H]"
    each = [pulled(on_mesh(mesh, form, "C", None), mesh, operands, [type_] * 3, type_, dO) for form in forms]
    pairs = [zip(tree.leaves(found), wanted, strict=True) for found in each]
    return torch.tensor([[(a - b).abs().max() / b.abs().max() for a, b in some] for some in pairs])


def bf16_errors_by_mask(mesh, forms):
    """The errors of the kernel of GPUs, whose tiles are in bfloat16; its flash attention is the CPU's."""
    with patch.object(blockwise.KeyBlock, "kernel", lambda self, Q: tiles.by_mask):
        return bf16_errors(mesh, forms)


def test_rounding_does_not_grow_with_the_ring(ranks):
    """bfloat16 on four ranks is as near to the exact result as on one. The kernel of GPUs rounds what each hop adds:
    then it is within 2.5 times the error of torch's own attention on one device."""
    one = bf16_errors(Mesh({"C": 1}), ["ring"])
    four = ranks(bf16_errors, {"C": 4}, FORMS)[0]
    assert (four < 1.5 * one).all(), (one, four)
    with patch.object(context, "attention", lambda Q, K, V, *_, **__: sdpa(Q, K, V)):
        own = bf16_errors(Mesh({"C": 1}), ["ring"])
    narrow = ranks(bf16_errors_by_mask, {"C": 4}, FORMS)[0]
    assert (narrow < 2.5 * own).all(), (own, narrow)


def test_vmap_and_second_derivatives():
    (Q, K, V), dO, _ = arrays("N=K")

    def gradient(Q):
        return vjp(lambda Q: context.attention(Q, K, V, Mesh({"C": 1})), Q)[1](dO)[0]

    torch.testing.assert_close(vmap(gradient)(torch.stack([Q, -Q])), torch.stack([gradient(Q), gradient(-Q)]))
    with pytest.raises(NotImplementedError, match="second derivative"):
        vjp(gradient, Q)[1](dO)


@pytest.mark.compile
@on_ranks({"C": 2})
def test_compiled_and_linearized(mesh):
    """One graph of a step by torch.func, and linearize, are the same run eagerly."""
    torch._dynamo.reset()
    operands, dO, segments = arrays("G=2")
    *shards, dO = (x.chunk(2, 1)[mesh.rank].clone() for x in (*operands, dO))
    f = on_mesh(mesh, "ring", "C", segments.chunk(2, 1)[mesh.rank].clone(), window=9)

    def step(dO, *operands):
        O, pull = vjp(f, *operands)
        return O, *pull(dO)

    with warnings.catch_warnings(action="ignore"):  # of torch's own code
        got = torch.compile(step, backend="aot_eager", fullgraph=True)(dO, *shards)
        linear, tangent = linearize(f, *shards)[1](*shards), jvp(f, tuple(shards), tuple(shards))[1]
    close((*got, linear), (*step(dO, *shards), tangent))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 40, 100])
def test_work(causal, window):
    ahead = torch.arange(24) - torch.arange(24)[:, None]
    seen = ((ahead <= 0) | (not causal)) & (ahead.abs() < (window or 99))
    blocks = seen.view(8, -1).sum(1)
    plain = seen.view(4, -1).sum(1).tolist()
    want = {"ring": plain, "gather": plain, "zigzag": [blocks[[c, 7 - c]].sum().item() for c in range(4)]}
    want["ulysses"] = [seen.sum().item() / 4] * 4
    for form, each in want.items():
        assert context.work(form, 24, 4, causal=causal, window=window) == each


def as_the_types_say(mesh, form, axis, sizes, dtype="bfloat16", window=None):
    """What this rank sends, by axis and pass, and computes is the closed form."""
    shapes = [(sizes["B"], sizes["T"] // mesh.size(tuple(axis)), sizes[heads], sizes["H"]) for heads in "NKK"]
    operands = [torch.ones(shape, dtype=getattr(torch, dtype), device=mesh.device) for shape in shapes]
    options = {"axis": tuple(axis) if form == "usp" else axis, "form": form, "window": window}
    with trace() as forward:
        O, pull = vjp(lambda *x: context.attention(*x, mesh, **options), *operands)
    with trace() as backward:
        pull(O)
    logs = forward, backward
    if form in ("ring", "zigzag", "gather"):  # no heads are exchanged, so every product is of this rank's own queries
        names = {"T": sizes["T"], "S": sizes["T"]} | {key: sizes[key] for key in "BNKH"}
        queries = [e.before[0] for log in logs for e in log.events if e.op == "Einsum"]
        assert {each.local_shape({d: names[d] for d in each.dim_names}, mesh) for each in queries} == {shapes[0]}
    sent = {a: tuple(sum(e.wire_bytes for e in log.events if e.axes == (a,)) for log in logs) for a in axis}
    assert sent == costs(form, sizes, mesh, axis=tuple(axis), dtype=dtype, window=window).sent
    scores = context.work(form, sizes["T"], mesh.sizes["C"], window=window)[mesh.coord["C"]]
    each = 14 * sizes["B"] * sizes["N"] * sizes["H"]  # of a score: two matmuls forward, five backward
    assert sum(log.flops for log in logs) == each * scores / (mesh.sizes["Y"] if form == "usp" else 1)


SMALL = {"B": 2, "T": 24, "N": 4, "K": 2, "H": 8}
LARGE = {"B": 1, "T": 1 << 17, "N": 128, "K": 8, "H": 128}  # LLaMA-3 405B's sizes
CHIPS = {"X": 32, "C": 16, "Y": 8}  # 4,096 of them, 8 heads each
MOVED = [(CHIPS, form, "C", LARGE) for form in FORMS] + [
    (CHIPS, "usp", "CY", LARGE),
    ({"C": 2, "Y": 2}, "usp", "CY", SMALL | {"K": 4}, "float32"),
    ({"C": 4}, "ring", "C", SMALL | {"K": 1}, "float64"),
    ({"C": 4}, "gather", "C", SMALL, "bfloat16", 7),
    ({"C": 4}, "ring", "C", SMALL, "bfloat16", 7),
    ({"C": 4}, "ulysses", "C", SMALL | {"N": 12, "K": 6}),
]


@pytest.mark.parametrize(("sizes", "case"), [(sizes, case) for sizes, *case in MOVED])
def test_bytes_and_flops(sizes, case):
    for c in [0] if sizes is CHIPS else range(sizes["C"]):
        as_the_types_say(AbstractMesh(sizes, dict.fromkeys(sizes, 0) | {"C": c}), *case)


def test_a_window_ends_the_ring():
    """Blocks that nobody sees are not passed on; in zig-zag order both neighbours of a chunk need it, all the way."""
    sizes = {"B": 1, "T": 64, "N": 1, "K": 1, "H": 1}
    for window, hops in ((1, 0), (2, 1), (9, 1), (10, 2), (57, 7), (None, 7)):
        ring = costs("ring", sizes, {"C": 8}, window=window, dtype="bf16")
        assert ring.rounds == hops
        as_the_types_say(AbstractMesh({"C": 8}), "ring", "C", sizes, window=window)
        assert ring.held == 2 * 64 // 8 * 2 * (2 if hops else 1)  # KV of its own block, and of the one that comes
        assert costs("gather", sizes, {"C": 8}, window=window, dtype="bf16").held == 2 * 64 * 2
    assert costs("zigzag", sizes, {"C": 8}, window=2).rounds == 7
    for Y, rounds in ((1, 7), (4, 7 + 2)):  # heads that are split are exchanged, there and back
        assert costs("usp", sizes | {"N": 4}, {"C": 8, "Y": Y}, axis=("C", "Y")).rounds == rounds


@on_ranks({"C": 1}, {"C": 2}, {"C": 3})
def test_zigzag_order(mesh):
    C, c = mesh.sizes["C"], mesh.rank
    x = torch.arange(6).view(1, 6) + 6 * mesh.rank
    z = context.to_zigzag(x, 1, mesh, "C")
    assert torch.equal(context.from_zigzag(z, -1, mesh, "C"), x)
    assert torch.equal(context.positions("zigzag", 6, mesh, "C"), z[0])
    chunks = torch.arange(6 * C).view(2 * C, 3)
    wanted = [chunks[[c, 2 * C - 1 - c]].flatten() for c in range(C)]
    assert torch.equal(z[0], wanted[c])
    whole = chunks.flatten()  # what a compiled graph has gathered
    assert torch.equal(_from_whole(whole, 0, C, c, back=False), wanted[c])
    assert torch.equal(_from_whole(torch.cat(wanted), 0, C, c, back=True), x[0])
