"""Rooflines of a chip, memory, and the collectives of GPUs."""

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling import cost
from scaling.cost import gpu
from scaling.hardware import chip

V5E, H100 = chip("v5e"), chip("h100")
C, W = V5E.flops(), V5E.hbm_bw
approx = partial(pytest.approx, rel=1e-6, abs=0)  # seconds a byte are below the usual absolute tolerance
numbers = st.floats(1, 1e15)
powers = st.integers(0, 10).map(lambda e: 2**e)
EACH = settings(deadline=None, max_examples=60, derandomize=True)


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


def test_matmuls():
    op = cost.matmul(2, 3, 5, C, W)
    assert (op.flops, op.nbytes) == (60, 2 * (6 + 15 + 10))
    assert cost.matmul(2, 3, 5, C, W, exact_flops=True).flops == 2 * 5 * (2 * 3 - 1)
    assert cost.matmul(2, 3, 5, C, W, ("bf16", "int4", "fp32")).nbytes == 2 * 6 + 7.5 + 4 * 10
    assert cost.tiled_matmul(256, 512, 128, (256, 512, 128), C, W) == cost.matmul(256, 512, 128, C, W)
    tiled = cost.tiled_matmul(256, 512, 128, (64, 128, 32), C, W)
    assert tiled.nbytes == 2 * 4 * 4 * (4 * (64 * 128 + 128 * 32) + 64 * 32)
    for B, F in ((1, 128), (4096, 8192)):  # a contraction that is split depends on D alone
        assert [cost.split_contraction(B, D, F, C, 4.5e10).bound for D in (8755, 8756)] == ["comms", "compute"]


def test_memory():
    """Of Adam, by stages of ZeRO; of checkpoints, as in Part 4's quiz."""
    assert cost.training_memory(13e9, grad_bytes=0).total == 130e9
    assert cost.largest_model(96e9) == 9.6e9
    assert cost.training_memory(70e9, Y=8, grad_bytes=0).total == 87.5e9
    by_stage = [cost.training_memory(1e9, X=10, zero=stage).total for stage in range(4)]
    assert by_stage == [12e9, 4e9 + 8e8, 2e9 + 1e9, 1.2e9]
    assert cost.training_memory(1e9, activations=64e9, X=4, Y=2, Z=2, zero=3).total == 12e9 / 16 + 64e9 / 16
    assert cost.checkpoint_bytes(16e6, [5120, 13824, 13824], 40) == approx(4.2e13, rel=0.01)
    assert cost.checkpoint_bytes(4e6, [8192] * 4, 80) == approx(20.97e12, rel=1e-3)


# --- GPUs


def test_gathers_of_gpus():
    """Bandwidths of the book's table; over nodes the sharded axis helps by the nodes that it spans; a node that is half
    full has half the links; larger clusters follow by rule; without switches few GPUs are slow."""
    node, leaf = 450e9 * 8 / 7, 400e9 * 32 / 31
    rates = {8: node, 16: node, 256: leaf, 512: leaf, 1024: leaf}
    assert [gpu.collective_bw(H100, n) for n in rates] == approx([*rates.values()])
    assert gpu.all_gather(1e9, H100, 1) == 0
    assert gpu.all_reduce(1e9, H100, 8) == 2 * gpu.reduce_scatter(1e9, H100, 8)
    assert [gpu.all_reduce(1e9, H100, n, sharp=True) for n in (8, 1024)] == [1e9 / 450e9, 1e9 / 400e9]
    for Y in (2**i for i in range(8)):
        rough = gpu.all_gather(1, H100, 256 // Y, Y, exact=False)
        assert rough == approx(1 / (400e9 if Y <= 8 else Y * 50e9))
    assert gpu.all_gather(1, H100, 4, 2, exact=False) == approx(1 / (2 * 450e9))  # in a node by Y
    assert gpu.all_gather(1, H100, 4, 256) == approx(3 / 4 / 12.8e12)
    assert gpu.all_gather(1, H100, 12) == approx(2 / 3 / 200e9)  # 4 GPUs lack two thirds
    assert gpu.all_gather(1, H100, 12, inner=4) == approx(5 / 6 / 400e9)
    assert gpu.all_gather(1, H100, 3, inner=4) == approx(2 / 3 / 200e9)
    assert gpu.all_gather(1, H100, 16) == approx(7 / 8 / 450e9)  # two whole nodes: within them
    assert gpu.all_gather(1, H100, 16_384) == approx(gpu.all_gather(1, H100, 256))  # each node has its 400 GB/s
    mi300x = chip("mi300x")
    assert [gpu.all_gather(1, mi300x, n) for n in (8, 2)] == approx([7 / 8 / 448e9, 1 / 2 / 64e9])


@EACH
@given(powers, powers)
def test_exact_is_less_and_no_less_than_half(x, y):
    if x * y <= 1024 and x > 1:
        exact, rough = (gpu.all_gather(1e9, H100, x, y, exact=e) for e in (True, False))
        assert rough / 2 <= exact < rough


@pytest.mark.parametrize("n", [2, 8, 16, 64, 256, 512])
def test_all_to_all_by_counting(n):
    """What each GPU, node and unit sends out of itself."""
    worst = 0.0
    for below, bandwidth in ((1, 450e9), (8, 400e9), (256, 12.8e12)):
        if n > below:
            out = sum(1 / n**2 for a in range(below) for b in range(n) if b // below != a // below)
            worst = max(worst, out / bandwidth)
    assert gpu.all_to_all(1, H100, n) == approx(worst)


def test_all_to_all_forms():
    assert gpu.all_to_all(1, H100, 8, exact=False) == approx(1 / 8 / 450e9)
    assert gpu.all_to_all(1, H100, 8, k=2) == approx(gpu.all_to_all(1, H100, 8) / 4)
    assert gpu.all_to_all(1, H100, 8, k=100) == gpu.all_to_all(1, H100, 8)
    assert gpu.all_to_all(1, H100, 2048) == approx(255 / 256**2 / 400e9)
    assert gpu.nonzero_share(4, 4, random=True) * 3 / 4 == approx(0.513, abs=1e-3)
    distinct = [len({a, b}) for a in range(3) for b in range(3)]  # two dice of three faces
    assert gpu.nonzero_share(3, 2, random=True) == approx(sum(distinct) / len(distinct) / 3)


def test_expert_parallelism():
    Z, k, B, D, F = 64, 4, 1e6, 7168, 2048
    layer = gpu.expert_layer(B, D, F, Z, k, H100)
    assert layer.math == approx(4 * B * k * D * F / (Z * 9.9e14))
    assert layer.comms == approx(4 * B * D * (Z - 8) / (400e9 * Z) * min(8 * k / Z, 1))
    two = 2 * gpu.all_to_all(2 * B * D * 8, H100, 64, k=4)  # the tokens, once for each of 8 nodes, there and back
    assert layer.comms == approx(two)


def test_gpu_thresholds():
    F = 28_672
    Y = gpu.tensor_limit_across(F, H100)
    assert approx(8 + F / 2475) == Y
    assert approx(4 * (Y / 8 - 1) / (Y / 8 * 400e9)) == 4 * F / (Y * 9.9e14)
    given = {(None, 1): 2475, (2, 1): 1925, (2, 2): 1237.5 / 2, (None, 8): 309.375}
    assert [gpu.data_threshold(H100, *each) for each in given] == [*given.values()]
    assert gpu.replicas_fit(70e9, H100) == 9
