"""A layer under each strategy: the ledger of Part 5's algorithms, thresholds held to the functions that they are
thresholds of, the book's numbers, and what hides behind what."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling import cost
from scaling.cost import gpu
from scaling.hardware import chip

approx = pytest.approx
V5P = chip("v5p")
C, W = V5P.flops(), V5P.ici_bw
LAYER = cost.LayerShape(1e6, 8192, 32768)
TPUS = st.sampled_from(["v4p", "v5p", "v5e", "v6e"]).map(chip)
GPUS = st.sampled_from(["h100", "h800", "b200", "gb200"]).map(chip)
WIDTHS, SIZES, MATRICES = st.integers(256, 100_000), st.integers(2, 64), st.sampled_from([2, 3])
EACH = settings(deadline=None, derandomize=True, max_examples=20)
SLOWER, FASTER = 1 - 1e-6, 1 + 1e-6


def test_bytes_by_strategy():
    """What the strategies themselves move of a plain layer, plan/test_ledger.py holds; here what is beside it."""
    B, D, F, X, Y = 4096, 512, 2048, 8, 4
    shape = cost.LayerShape(B, D, F)
    for strategy, x, y in (("dp", X, 1), ("fsdp", X, 1), ("tp", 1, Y), ("fsdp_tp", X, Y)):
        ways = [cost.layer_bytes(strategy, shape, x, y, way).values() for way in ("forward", "backward")]
        assert [*cost.layer_bytes(strategy, shape, x, y).values()] == [a + b for a, b in zip(*ways, strict=True)]
        one = cost.layer(strategy, LAYER, cost.Links(C))  # a single chip moves nothing
        assert (one.comms, one.axes, one.bound) == (0, (), "compute")
        assert one.lower == one.upper == one.math == approx(12 * 1e6 * 8192 * 32768 / C)
    assert cost.layer_bytes("tp", shape, 1, Y, "backward", regather=True)["Y"] == 6 * B * D
    assert cost.layer_bytes("fsdp", replace(shape, matrices=3), X, 1, "forward")["X"] == 6 * D * F
    assert cost.layer_bytes("tp", replace(shape, dtype="int8", blocks=2), 1, Y, "forward")["Y"] == 4 * B * D


def test_overlap_models():
    links = cost.Links(C, 2 * W, W)
    together, after = (cost.layer("fsdp_tp", LAYER, links, 1024, 8, overlap=way) for way in ("max", "sum"))
    assert together.axes == after.axes
    assert after.comms == approx(sum(t for _, t in after.axes))
    assert together.comms == sum(max(t for _, t in part.axes) for part in together.parts) < after.comms
    assert together.upper == after.upper == approx(after.math + after.comms)
    assert together.scaled(3).comms == approx(3 * together.comms)
    assert together.scaled(3).lower == approx(3 * together.lower)


def test_what_backward_communicates_does_not_hide_behind_forward():
    """DP at 0.8 of its threshold: computing both ways takes 1.2 times the AllReduce, but backward alone only 0.8."""
    both = cost.layer("dp", replace(LAYER, B=0.8 * 64 * C / W), cost.Links(C, X=W), X=64)
    forward, backward = both.parts
    assert both.math == approx(1.2 * both.comms)
    assert (forward.bound, backward.bound, both.bound) == ("compute", "X", "X")
    assert both.math < both.lower == approx(forward.math + backward.comms)


# --- Each threshold is where the functions that it is a threshold of cross


@EACH
@given(
    TPUS, st.sampled_from([2, 4, 8, 16, (4, 4), (2, 4), (1, 2)]), st.sampled_from([None, True, False]), st.booleans()
)
def test_latency_bound_bytes(hw, axes, wrap, exact):
    V, least = cost.latency_bound_bytes(hw, axes, wrap, exact), cost.all_gather(0, hw, axes, wrap, exact)
    assert cost.all_gather(SLOWER * V, hw, axes, wrap, exact) == least
    assert cost.all_gather(FASTER * V, hw, axes, wrap, exact) > least


@EACH
@given(TPUS, st.integers(2, 4096), WIDTHS, WIDTHS, MATRICES)
def test_data_threshold_and_tensor_limit(hw, X, D, F, matrices):
    """Of DP and FSDP by tokens a chip, whatever the matrices; of TP by Y, where F is matrices / 2 times as wide."""
    C, W = hw.flops(), hw.bandwidth("ici")
    links, B = cost.Links(C, X=W, Y=W), X * cost.data_threshold(C, W)
    for tokens, bound in ((FASTER * B, "compute"), (SLOWER * B, "X")):
        shape = cost.LayerShape(tokens, D, F, matrices)
        for strategy, direction in (("fsdp", "forward"), ("fsdp", "backward"), ("dp", "backward")):
            assert cost.layer(strategy, shape, links, X=X, direction=direction).bound == bound
    limit, shape = cost.tensor_limit(F * matrices / 2, C, W), cost.LayerShape(1e6, D, F, matrices)
    for Y in {*range(2, 9), max(2, int(limit)), max(2, int(limit) + 1)}:
        assert (cost.layer("tp", shape, links, Y=Y, direction="forward").bound == "compute") == (limit >= Y)


@EACH
@given(SIZES, SIZES, st.integers(1, 2), st.sampled_from(["max", "sum"]), MATRICES)
def test_mixed_threshold_and_optimum(X, Y, m_x, overlap, matrices):
    """At its best X both axes' collectives take the same time, at the threshold that of computing."""
    F, N = 16384, X * Y
    B = X**2 * matrices * F / (2 * N * m_x)  # whose optimum is this X
    assert cost.mixed_optimum(B, F, N, m_x, 1, matrices) == approx(X)
    links = cost.Links(C, m_x * W, W)
    forward = cost.layer(
        "fsdp_tp", cost.LayerShape(B, 4096, F, matrices), links, X, Y, "forward", overlap=overlap
    )  # fmt: skip
    times = dict(forward.axes)
    assert times["X"] == approx(times["Y"])
    least = cost.mixed_threshold(F, C, m_x * W, W, overlap, matrices)
    assert (forward.comms / forward.math) ** 2 == approx(least / (B / N))
    assert forward.comms == approx(times["X"] * (1 if overlap == "max" else 2))


@EACH
@given(GPUS, st.integers(2, 16))
def test_gpu_data_threshold(hw, nodes):
    """The book's V/W between nodes is over all of them; a part (X - 1)/X leaves a node, and 1 - 1/G a GPU inside it."""
    inside = hw.flops() * gpu.all_gather(1, hw, hw.node_gpus)
    between = hw.intensity("scale-out") * (nodes - 1) / nodes
    assert gpu.data_threshold(hw, nodes) == approx(max(inside, between))
    assert gpu.data_threshold(hw, nodes, 4) == approx(between / 4)
    assert gpu.data_threshold(hw) >= gpu.data_threshold(hw, nodes)


@EACH
@given(GPUS, SIZES, st.integers(1, 16))
def test_expert_min_width(hw, units, k):
    Z = units * hw.node_gpus
    F = gpu.expert_min_width(Z, k, hw)
    assert gpu.expert_layer(1e6, 4096, FASTER * F, Z, k, hw).bound == "compute"
    assert gpu.expert_layer(1e6, 4096, SLOWER * F, Z, k, hw).bound == "Z"
