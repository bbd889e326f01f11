"""What each form of attention over a context axis computes and sends, by closed form."""

import pytest
import torch
from test_context import FORMS
from torch.func import vjp

from scaling.mesh import AbstractMesh
from scaling.strategies import context
from scaling.strategies.context.compare import costs, table
from scaling.strategies.context.layout import _from_whole
from scaling.trace import trace


def test_work():
    balance = lambda form, T, C: max(context.work(form, T, C)) / sum(context.work(form, T, C)) * C  # noqa: E731
    assert balance("zigzag", 256, 4) == 1
    assert balance("ring", 256, 8) == pytest.approx(1.872, abs=5e-4)  # 53.4% of ideal, as is measured
    assert [balance("gather", 1 << 20, C) for C in (2, 4, 8)] == pytest.approx([2 - 1 / C for C in (2, 4, 8)], abs=1e-4)
    assert balance("ulysses", 256, 8) == 1
    for causal in (True, False):
        for window in (None, 1, 5, 40, 100):
            ahead = torch.arange(24) - torch.arange(24)[:, None]
            seen = ((ahead <= 0) | (not causal)) & (ahead.abs() < (window or 99))
            want = {"ring": seen.view(4, -1).sum(1).tolist()}
            want["zigzag"] = [seen.view(8, -1).sum(1)[[c, 7 - c]].sum().item() for c in range(4)]
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
CASES = [
    ("ring", "C", SMALL | {"K": 1}, "float64"),
    ("gather", "C", SMALL, "bfloat16", 7),
    ("ring", "C", SMALL, "bfloat16", 7),
    ("ulysses", "C", SMALL | {"N": 12, "K": 6}),
]


def each_as_the_types_say(mesh, cases):
    for case in cases:
        as_the_types_say(mesh, *case)


def test_bytes_and_flops_of_ranks(ranks):
    ranks(each_as_the_types_say, {"C": 4}, CASES)
    ranks(each_as_the_types_say, {"C": 2, "Y": 2}, [("usp", "CY", SMALL | {"K": 4}, "float32")])


@pytest.mark.parametrize("form", [*FORMS, "usp"])
def test_bytes_and_flops_on_thousands_of_chips(form):
    """32-way data and 16-way context parallelism, 8 heads each: 4,096 chips, at LLaMA-3 405B's sizes."""
    sizes = {"B": 1, "T": 1 << 17, "N": 128, "K": 8, "H": 128}
    as_the_types_say(AbstractMesh({"X": 32, "C": 16, "Y": 8}), form, "CY" if form == "usp" else "C", sizes)


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


def test_table():
    shown = table({"B": 1, "T": 48, "N": 6, "K": 2, "H": 64}, ranks=4).splitlines()
    assert "N=6 query heads do not divide over 4 ranks" in shown[5]
    assert shown[3].split()[-3:] == ["2C", "|", "T"]


def orders(mesh):
    x = torch.arange(6).view(1, 6) + 6 * mesh.rank
    z = context.to_zigzag(x, 1, mesh, "C")
    assert torch.equal(context.from_zigzag(z, -1, mesh, "C"), x)
    assert torch.equal(context.positions("zigzag", 6, mesh, "C"), z[0])
    return z[0].tolist()


@pytest.mark.parametrize("C", [1, 2, 3, 4])
def test_zigzag_order(ranks, C):
    chunks = torch.arange(6 * C).view(2 * C, 3)
    wanted = [chunks[[c, 2 * C - 1 - c]].flatten() for c in range(C)]
    assert ranks(orders, {"C": C}) == [each.tolist() for each in wanted]
    x = chunks.flatten()  # what a compiled graph has gathered
    assert all(torch.equal(_from_whole(x, 0, C, c, back=False), each) for c, each in enumerate(wanted))
    assert torch.equal(torch.cat([_from_whole(torch.cat(wanted), 0, C, c, back=True) for c in range(C)]), x)
