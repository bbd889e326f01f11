"""Rooflines of a chip, memory, and the collectives of GPUs and TPUs, by what they must be at any sizes, and where no
chapter has them: the book's numbers are the chapters' answers (book/test_chapters.py)."""

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling import cost
from scaling.cost import gpu
from scaling.hardware import Chip, chip
from scaling.hardware.torus import Torus

V5E, H100 = chip("v5e"), chip("h100")
C, W = V5E.flops(), V5E.hbm_bw
approx = partial(pytest.approx, rel=1e-6, abs=0)  # seconds a byte are below the usual absolute tolerance
numbers = st.floats(1, 1e15)
EACH = settings(deadline=None, max_examples=20, derandomize=True)


@EACH
@given(numbers, numbers, numbers, numbers)
def test_bounds_of_a_roofline(flops, nbytes, c, w):
    op = cost.roofline(flops, nbytes, c, w)
    assert op.lower <= op.upper <= 2 * op.lower
    assert (op.bound == "compute") == (op.math >= op.comms)
    if not math.isclose(op.intensity, op.critical, rel_tol=1e-9):
        assert (op.bound == "compute") == (op.intensity > op.critical)
    assert op.attained == approx(cost.attainable(op.intensity, c, w), rel=1e-9)


@EACH
@given(st.integers(300, 20000), st.integers(300, 20000), st.sampled_from(["bf16", "int8", ("bf16", "int8", "bf16")]))
def test_critical_batch_is_where_math_equals_comms(D, F, dtypes):
    B = cost.critical_batch(C, W, D, F, dtypes)
    if math.isfinite(B):
        op = cost.matmul(B, D, F, C, W, dtypes)
        assert op.math == approx(op.comms)
        assert cost.critical_batch(C, W, dtypes=dtypes) < B
    else:
        assert cost.matmul(1e9, D, F, C, W, dtypes).bound == "comms"


def test_bytes_of_matmuls():
    op, tiled = cost.matmul(2, 3, 5, C, W), cost.tiled_matmul(256, 512, 128, (64, 128, 32), C, W)
    assert (op.flops, op.nbytes) == (60, 2 * (6 + 15 + 10))
    assert tiled.nbytes == 2 * 4 * 4 * (4 * (64 * 128 + 128 * 32) + 64 * 32)
    assert cost.matmul(2, 3, 5, C, W, exact_flops=True).flops == 2 * 5 * (2 * 3 - 1)


def test_memory_by_stages_of_zero():
    by_stage = [cost.training_memory(1e9, X=10, Y=2, zero=stage).total for stage in range(4)]
    assert by_stage == [6e9, 2e9 + 4e8, 1e9 + 5e8, 6e8]
    assert cost.training_memory(1e9, activations=64e9, X=4, Y=2, Z=2, zero=3).total == 12e9 / 16 + 64e9 / 16


# --- GPUs


def test_gathers_of_gpus():
    """Over nodes the sharded axis helps by the nodes that it spans; a node that is half full has half the links;
    without switches few GPUs are slow."""
    assert gpu.all_gather(1e9, H100, 1) == 0
    assert gpu.all_reduce(1, H100, 8) == 2 * gpu.reduce_scatter(1, H100, 8) == approx(2 * 7 / 8 / 450e9)
    assert gpu.all_reduce(1, H100, 1024, sharp=True) == 1 / 400e9
    for Y in (8, 16, 128):
        assert gpu.all_gather(1, H100, 256 // Y, Y, exact=False) == approx(1 / (Y * 50e9))
    for gpus, inner, seconds in (
        (4, 256, 3 / 4 / 12.8e12),
        (16_384, 1, 31 / 32 / 400e9),  # larger clusters follow by rule
        (12, 1, 2 / 3 / 200e9),  # 4 GPUs lack two thirds
        (12, 4, 5 / 6 / 400e9),
        (3, 4, 2 / 3 / 200e9),
    ):
        assert gpu.all_gather(1, H100, gpus, inner) == approx(seconds)
    assert [gpu.all_gather(1, chip("mi300x"), n) for n in (8, 2)] == approx([7 / 8 / 448e9, 1 / 2 / 64e9])


def test_all_to_all_by_counting():
    """What each GPU, node and unit sends out of itself."""
    for n in (2, 8, 16, 256, 512):
        worst = 0.0
        for below, bandwidth in ((1, 450e9), (8, 400e9), (256, 12.8e12)):
            if n > below:
                out = sum(1 / n**2 for a in range(below) for b in range(n) if b // below != a // below)
                worst = max(worst, out / bandwidth)
        assert gpu.all_to_all(1, H100, n) == approx(worst)


def test_tensor_parallelism_over_nodes():
    Y = gpu.tensor_limit_across(28_672, H100)
    assert approx(4 * (Y / 8 - 1) / (Y / 8 * 400e9)) == 4 * 28_672 / (Y * 9.9e14)


# --- Collectives of TPUs


V5P = chip("v5p")
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def tori(draw):
    shape = draw(shapes)
    return Torus(shape, tuple(draw(st.booleans()) for _ in shape))


@settings(deadline=None, max_examples=30, derandomize=True)
@given(tori())
def test_all_to_all_takes_as_long_as_its_fullest_link_and_hops_are_the_diameter(torus):
    slow = Chip("own", "tpu", axes=3, link_bw=1e9, wrap="none")
    routed = torus.all_to_all_seconds(1e12, 1e9)
    assert cost.all_to_all(1e12, slow, torus.shape, torus.wrap, exact=True) == pytest.approx(routed, rel=1e-9)
    assert cost.all_gather(0, slow, torus.shape, torus.wrap) == pytest.approx(torus.diameter * 1e-6)


@pytest.mark.slow
@settings(deadline=None, max_examples=15, derandomize=True)
@given(tori())
def test_torus_links_and_distances(torus):
    for a in torus.chips():
        assert all(torus.distance(a, b) == 1 or torus.size == 1 for b in torus.neighbours(a))
    distances = [torus.distance(a, b) for a in torus.chips() for b in torus.chips()]
    assert max(distances) == torus.diameter
    assert sum(distances) / torus.size**2 == pytest.approx(torus.mean_distance)
    loads = torus.all_to_all_loads()
    assert sum(loads.values()) == pytest.approx(sum(distances))  # every hop is on some link
    assert set(loads) <= set(torus.links())


def test_links_across_an_even_cut():
    assert [Torus((16, 4), (wrap, False)).bisection_links for wrap in (True, False)] == [8, 4]


def test_gathers_on_a_torus():
    for axes, exact, seconds in (
        (4, False, 1 / 1.8e11),  # a ring: whatever its length
        (8, True, 7 / 8 / 1.8e11),
        ((4, 8, 4), False, 1 / 5.4e11),
    ):
        assert cost.all_gather(1e9, V5P, axes, exact=exact) == approx(1e9 * seconds)
    assert cost.all_gather(1e9, V5E, 8) == approx(7 / 8 / 45)  # a line
    assert cost.all_gather(1e9, V5E, (8, 16)) == approx(1 / (3 * 45))  # one line, one ring


def test_by_name():
    for op, f in (("AllGather", cost.all_gather), ("AllReduce", cost.all_reduce), ("AllToAll", cost.all_to_all)):
        assert cost.seconds(op, 1e8, V5P, (4, 4)) == f(1e8, V5P, (4, 4))
    assert cost.seconds("CollectivePermute", 1e8, V5P, 4) == cost.permute(1e8, V5P)
    for op in ("Gather", "Scatter"):  # the root has all blocks but its own on the two links of its ring
        assert 0.75e8 / 1.8e11 <= cost.seconds(op, 1e8, V5P, 4) <= 1e8 / 1.8e11
