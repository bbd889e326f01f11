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


@settings(deadline=None, max_examples=60, derandomize=True)
@given(numbers, numbers, numbers, numbers)
def test_bounds_of_a_roofline(flops, nbytes, c, w):
    op = cost.roofline(flops, nbytes, c, w)
    assert op.lower <= op.upper <= 2 * op.lower
    assert (op.bound == "compute") == (op.math >= op.comms)
    if not math.isclose(op.intensity, op.critical, rel_tol=1e-9):
        assert (op.bound == "compute") == (op.intensity > op.critical)
    assert op.attained == approx(cost.attainable(op.intensity, c, w), rel=1e-9)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(300, 20000), st.integers(300, 20000), st.sampled_from(["bf16", "int8", ("bf16", "int8", "bf16")]))
def test_critical_batch_is_where_math_equals_comms(D, F, dtypes):
    B = cost.critical_batch(C, W, D, F, dtypes)
    if math.isfinite(B):
        op = cost.matmul(B, D, F, C, W, dtypes)
        assert op.math == approx(op.comms)
        assert cost.critical_batch(C, W, dtypes=dtypes) < B
    else:
        assert cost.matmul(1e9, D, F, C, W, dtypes).bound == "comms"


def test_matmul():
    op = cost.matmul(2, 3, 5, C, W)
    assert (op.flops, op.nbytes) == (60, 2 * (6 + 15 + 10))
    assert cost.matmul(2, 3, 5, C, W, exact_flops=True).flops == 2 * 5 * (2 * 3 - 1)
    assert cost.matmul(2, 3, 5, C, W, ("bf16", "int4", "fp32")).nbytes == 2 * 6 + 7.5 + 4 * 10


def test_tiled_matmul():
    whole = cost.tiled_matmul(256, 512, 128, (256, 512, 128), C, W)
    assert whole == cost.matmul(256, 512, 128, C, W)
    tiled = cost.tiled_matmul(256, 512, 128, (64, 128, 32), C, W)
    assert tiled.nbytes == 2 * 4 * 4 * (4 * (64 * 128 + 128 * 32) + 64 * 32)


def test_split_contraction_depends_on_d_alone():
    for B, F in ((1, 128), (4096, 8192)):
        assert cost.split_contraction(B, 8755, F, C, 4.5e10).bound == "comms"
        assert cost.split_contraction(B, 8756, F, C, 4.5e10).bound == "compute"


# Memory


def test_memory_of_adam():
    plain = cost.training_memory(13e9, grad_bytes=0)
    assert plain.total == 130e9
    assert cost.largest_model(96e9) == 9.6e9
    assert cost.training_memory(70e9, Y=8, grad_bytes=0).total == 87.5e9


def test_stages_of_zero():
    bytes_ = [cost.training_memory(1e9, X=10, zero=stage).total for stage in range(4)]
    assert bytes_ == [12e9, 4e9 + 8e8, 2e9 + 1e9, 1.2e9]
    spread = cost.training_memory(1e9, activations=64e9, X=4, Y=2, Z=2, zero=3)
    assert spread.total == 12e9 / 16 + 64e9 / 16


def test_checkpoints():
    assert cost.checkpoint_bytes(16e6, [5120, 13824, 13824], 40) == approx(4.2e13, rel=0.01)
    assert cost.checkpoint_bytes(4e6, [8192] * 4, 80) == approx(20.97e12, rel=1e-3)


# GPUs


def test_collective_bandwidths():
    rates = {n: gpu.collective_bw(H100, n) for n in (8, 16, 256, 512, 1024)}
    node, leaf = 450e9 * 8 / 7, 400e9 * 32 / 31
    assert rates == {n: approx(bw) for n, bw in {8: node, 16: node, 256: leaf, 512: leaf, 1024: leaf}.items()}
    assert gpu.all_gather(1e9, H100, 1) == 0
    assert gpu.all_reduce(1e9, H100, 8) == 2 * gpu.reduce_scatter(1e9, H100, 8)
    assert gpu.all_reduce(1e9, H100, 8, sharp=True) == 1e9 / 450e9
    assert gpu.all_reduce(1e9, H100, 1024, sharp=True) == 1e9 / 400e9


def test_the_sharded_axis_helps_by_the_nodes_it_spans():
    times = {Y: gpu.all_gather(1, H100, 256 // Y, Y, exact=False) for Y in (1, 2, 4, 8, 16, 32, 64, 128)}
    assert all(times[Y] == approx(1 / 400e9) for Y in (1, 2, 4, 8))
    assert all(times[Y] == approx(1 / (Y * 50e9)) for Y in (16, 32, 64, 128))
    assert gpu.all_gather(1, H100, 4, 2, exact=False) == approx(1 / (2 * 450e9))  # in a node by Y
    assert gpu.all_gather(1, H100, 4, 256) == approx(3 / 4 / 12.8e12)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(powers, powers)
def test_exact_is_less_and_no_less_than_half(x, y):
    if x * y <= 1024 and x > 1:
        exact, rough = (gpu.all_gather(1e9, H100, x, y, exact=e) for e in (True, False))
        assert rough / 2 <= exact < rough


def routed(n: int) -> float:
    """Seconds of an AllToAll by counting what each GPU, node and unit sends out of itself."""
    worst = 0.0
    for below, bandwidth in ((1, 450e9), (8, 400e9), (256, 12.8e12)):
        if n > below:
            out = sum(1 / n**2 for a in range(below) for b in range(n) if b // below != a // below)
            worst = max(worst, out / bandwidth)
    return worst


@pytest.mark.parametrize("n", [2, 8, 16, 64, 256, 512])
def test_all_to_all_by_counting(n):
    assert gpu.all_to_all(1, H100, n) == approx(routed(n))


def test_all_to_all_forms():
    assert gpu.all_to_all(1, H100, 8) == approx(7 / 64 / 450e9)
    assert gpu.all_to_all(1, H100, 64) == approx(7 / 64 / 400e9)  # M = 8 nodes
    assert gpu.all_to_all(1, H100, 8, exact=False) == approx(1 / 8 / 450e9)
    assert gpu.all_to_all(1, H100, 8, k=2) == approx(gpu.all_to_all(1, H100, 8) / 4)
    assert gpu.all_to_all(1, H100, 8, k=100) == gpu.all_to_all(1, H100, 8)
    assert gpu.nonzero_share(4, 4, random=True) * 3 / 4 == approx(0.513, abs=1e-3)


def test_random_share_is_what_dice_give():
    faces, k = 3, 2
    distinct = [len({a, b}) for a in range(faces) for b in range(faces)]
    assert gpu.nonzero_share(faces, k, random=True) == approx(sum(distinct) / len(distinct) / faces)


def test_expert_parallelism():
    Z, k, B, D, F = 64, 4, 1e6, 7168, 2048
    layer = gpu.expert_layer(B, D, F, Z, k, H100)
    assert layer.math == approx(4 * B * k * D * F / (Z * 9.9e14))
    assert layer.comms == approx(4 * B * D * (Z - 8) / (400e9 * Z) * min(8 * k / Z, 1))
    F = gpu.expert_min_width(Z, k, H100)
    at = gpu.expert_layer(B, D, F, Z, k, H100)
    assert at.math == approx(at.comms)
    two = 2 * gpu.all_to_all(2 * B * D * 8, H100, 64, k=4)  # the tokens, once for each of 8 nodes, there and back
    assert layer.comms == approx(two)


def test_tensor_parallelism_over_nodes():
    F = 28_672
    Y = gpu.tensor_limit_across(F, H100)
    assert approx(8 + F / 2475) == Y
    M = Y / 8
    assert approx(4 * (M - 1) / (M * 400e9)) == 4 * F / (Y * 9.9e14)


def test_a_node_that_is_half_full_has_half_the_links():
    assert gpu.all_gather(1, H100, 12) == approx(2 / 3 / 200e9)  # 4 GPUs lack two thirds
    assert gpu.all_gather(1, H100, 12, inner=4) == approx(5 / 6 * 4 / 4 / 400e9)
    assert gpu.all_gather(1, H100, 3, inner=4) == approx(max(2 / 3 / 200e9, 1 / 2 / 450e9) / 4 * 4)
    assert gpu.all_gather(1, H100, 16) == approx(max(1 / 2 / 400e9, 7 / 8 / 450e9))  # two whole nodes: within them


def test_larger_clusters_follow_by_rule():
    assert gpu.all_gather(1, H100, 16_384) == approx(gpu.all_gather(1, H100, 256))  # each node has its 400 GB/s
    assert gpu.all_to_all(1, H100, 2048) == approx(255 / 256**2 / 400e9)


def test_without_switches_few_gpus_are_slow():
    mi300x = chip("mi300x")
    assert gpu.all_gather(1, mi300x, 8) == approx(7 / 8 / 448e9)
    assert gpu.all_gather(1, mi300x, 2) == approx(1 / 2 / 64e9)


def test_gpu_thresholds():
    assert gpu.data_threshold(H100) == 2475
    assert gpu.data_threshold(H100, nodes=2, model_nodes=2) == 1237.5 / 2
    assert gpu.data_threshold(H100, model_nodes=8) == 309.375
    assert gpu.replicas_fit(70e9, H100) == 9
