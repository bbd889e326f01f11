"""What a plan is priced at is what it sends: every pair of types on two meshes; products beside algebra.matmul."""

import itertools

import pytest
import torch

from scaling import auto
from scaling.algebra import matmul, reshard
from scaling.algebra.layouts import spec_of
from scaling.algebra.planner import all_layouts
from scaling.book.largest import largest
from scaling.collectives.plans import run_step
from scaling.mesh import AbstractMesh
from scaling.trace import trace

MESHES = [{"X": 2, "Y": 4}, {"X": 2, "Y": 2, "Z": 2}]
SHAPE = (64, 128)


def text(at) -> str:
    return str(spec_of(at, "A"))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_price_is_what_is_sent(sizes):
    """Of every pair of layouts, of many every third; and never more than `reshard` sends, which leaves idle axes alone;
    explicit mode sends the same."""
    mesh, x = AbstractMesh(sizes), torch.empty(SHAPE, device="meta")
    every, less = all_layouts(SHAPE, sizes, tuple(sizes), tuple(sizes)), 0
    for src, dst in list(itertools.product(every, every))[:: 1 if len(every) < 50 else 3]:
        if set(dst.unreduced) - set(src.unreduced):
            continue  # only a product makes partial sums
        lowered = auto.jit(lambda x: x, mesh, text(src), text(dst)).lower(x)
        assert lowered.wire_bytes == pytest.approx(lowered.planned), (src, dst)
        explicit = reshard(spec_of(src), spec_of(dst), SHAPE, mesh, idle=True).wire_bytes(SHAPE, mesh, 4)
        assert explicit == pytest.approx(lowered.wire_bytes), (src, dst)
        plain = reshard(spec_of(src), spec_of(dst), SHAPE, mesh).wire_bytes(SHAPE, mesh, 4)
        assert lowered.wire_bytes <= plain, (src, dst)
        less += lowered.wire_bytes < plain
    assert less > 0


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "pairs"), [(MESHES[0], 18**2), (MESHES[1], 92**2)], ids=str)
def test_every_step_sends_its_price(sizes, pairs):
    """Of all plans between two layouts, sums that are made included: what a trace sees the busiest rank send."""
    mesh, every = AbstractMesh(sizes), all_layouts(SHAPE, sizes, tuple(sizes), tuple(sizes))
    plans = [reshard(spec_of(a), spec_of(b), SHAPE, mesh, idle=True) for a, b in itertools.product(every, every)]
    assert len(plans) == pairs
    ranks = [AbstractMesh(sizes, mesh.coord_of(rank)) for rank in range(8)]
    for step in {step for plan in plans for step in plan.steps}:
        x, sent = torch.empty(step.before.local_shape(SHAPE, mesh), device="meta"), []
        for rank in ranks:
            with trace() as log:
                run_step(step, [x], rank)
            sent.append(sum(event.wire_bytes for event in log.events))
        assert largest(sent) == step.wire_bytes(SHAPE, mesh, x.dtype), step


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_product_never_sends_more_than_matmul_plans(sizes):
    mesh, (I, J, K) = AbstractMesh(sizes), (64, 128, 32)
    arguments = torch.empty(I, J, device="meta"), torch.empty(J, K, device="meta")
    of_a, of_b, of_out = (all_layouts(shape, sizes, tuple(sizes)) for shape in ((I, J), (J, K), (I, K)))
    drawn = [*itertools.product(of_a, of_b, of_out)][:: 37 if len(sizes) == 2 else 997]
    for a, b, out in drawn:
        types = [str(spec_of(at, name)) for at, name in ((a, "A"), (b, "B"), (out, "C"))]
        lowered = auto.jit(torch.matmul, mesh, (types[0], types[1]), types[2]).lower(*arguments)
        assert lowered.wire_bytes == pytest.approx(lowered.planned), types
        lines = types[0], types[1].replace("J", "K").replace("I", "J"), types[2].replace("J", "K")
        planned = matmul(*lines, sizes={"I": I, "J": J, "K": K}, mesh=sizes)
        assert lowered.wire_bytes <= planned.wire_bytes({"I": I, "J": J, "K": K}, mesh, 4), types


def test_the_product_that_sent_more():
    mesh = AbstractMesh(MESHES[0])
    run = auto.jit(torch.matmul, mesh, ("A[I, J_X]", "B[J, K_X]"), "C[I_Y, K]")
    assert run.lower(torch.empty(64, 128, device="meta"), torch.empty(128, 32, device="meta")).wire_bytes <= 5120


@pytest.mark.slow
def test_states_are_kept_by_what_their_arrays_still_cost():
    """More states than are kept: kept by what they have sent alone, they led to a plan that sends 17,408 bytes."""

    def attention(x, W_Q, W_K, W_V, W_O):
        Q, K, V = x @ W_Q, x @ W_K, x @ W_V
        return x + torch.einsum("bts,bsh->bth", torch.softmax(torch.einsum("bth,bsh->bts", Q, K), -1), V) @ W_O

    types = ("x[B_Y, T, D_X]", "W_Q[D_Y, F]", "W_K[D, F_Y]", "W_V[D, F_Y]", "W_O[D_YX, F]")
    arguments = [torch.empty(8, 16, 32, device="meta"), *(torch.empty(32, 32, device="meta") for _ in types[1:])]
    assert auto.jit(attention, AbstractMesh({"X": 4, "Y": 2}), types).lower(*arguments).wire_bytes <= 11264
