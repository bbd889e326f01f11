from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling import cost
from scaling.cost import gpu
from scaling.hardware import chip

V5P = chip("v5p")
C, W = V5P.flops(), V5P.ici_bw
LAYER = cost.LayerShape(1e6, 8192, 32768)
sizes = st.integers(2, 64)


def test_bytes_by_strategy_are_the_ledger_of_the_algorithms():
    B, D, F, X, Y = 4096, 512, 2048, 8, 4
    shape = cost.LayerShape(B, D, F)
    ledger = {  # Part 5: AllGather equivalents, forward and backward
        ("dp", X, 1): ({"X": 0, "Y": 0}, {"X": 8 * D * F, "Y": 0}),
        ("fsdp", X, 1): ({"X": 4 * D * F, "Y": 0}, {"X": 8 * D * F, "Y": 0}),
        ("tp", 1, Y): ({"X": 0, "Y": 4 * B * D}, {"X": 0, "Y": 4 * B * D}),
        ("fsdp_tp", X, Y): (
            {"X": 4 * D * F / Y, "Y": 4 * B * D / X},
            {"X": 8 * D * F / Y, "Y": 4 * B * D / X},
        ),
    }
    for (strategy, x, y), (forward, backward) in ledger.items():
        assert cost.layer_bytes(strategy, shape, x, y, "forward") == forward
        assert cost.layer_bytes(strategy, shape, x, y, "backward") == backward
        both = cost.layer_bytes(strategy, shape, x, y)
        assert both == {axis: forward[axis] + backward[axis] for axis in "XY"}
    assert cost.layer_bytes("tp", shape, 1, Y, "backward", regather=True)["Y"] == 6 * B * D
    gated, attends = replace(shape, matrices=3), replace(shape, dtype="int8", blocks=2)
    assert cost.layer_bytes("fsdp", gated, X, 1, "forward")["X"] == 6 * D * F
    assert cost.layer_bytes("tp", attends, 1, Y, "forward")["Y"] == 4 * B * D


def test_a_single_chip_moves_nothing():
    for strategy in cost.STRATEGIES:
        one = cost.layer(strategy, LAYER, cost.Links(C))
        assert (one.comms, one.axes, one.bound) == (0, (), "compute")
        assert one.lower == one.upper == one.math == pytest.approx(12 * 1e6 * 8192 * 32768 / C)


def equal_at(strategy, links, mesh, direction="forward", **changes):
    layer = cost.layer(strategy, replace(LAYER, **changes), links, **mesh, direction=direction)
    return layer.comms / layer.math


def test_thresholds_are_where_math_equals_comms():
    n = 64
    for strategy, direction in (("dp", "backward"), ("fsdp", "forward"), ("fsdp", "backward")):
        B = cost.data_threshold(C, W) * n
        assert equal_at(strategy, cost.Links(C, X=W), {"X": n}, direction, B=B) == pytest.approx(1)
    Y = 16
    F = Y * C / W
    assert cost.tensor_limit(F, C, W) == pytest.approx(Y)
    for direction, share in (("forward", 1), ("backward", 0.5)):
        assert equal_at("tp", cost.Links(C, Y=W), {"Y": Y}, direction, F=F) == pytest.approx(share)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(sizes, sizes, st.integers(1, 2), st.sampled_from(["max", "sum"]))
def test_mixed_threshold_and_optimum(X, Y, m_x, overlap):
    F, m_y, N = 16384, 1, X * Y
    B = X**2 * F * m_y / (N * m_x)  # whose optimum is this X
    assert cost.mixed_optimum(B, F, N, m_x, m_y) == pytest.approx(X)
    links = cost.Links(C, m_x * W, m_y * W)
    forward = cost.layer("fsdp_tp", cost.LayerShape(B, 4096, F), links, X, Y, "forward", overlap=overlap)
    times = dict(forward.axes)
    assert times["X"] == pytest.approx(times["Y"])
    least = cost.mixed_threshold(F, C, m_x * W, m_y * W, overlap)
    assert (forward.comms / forward.math) ** 2 == pytest.approx(least / (B / N))
    assert forward.comms == pytest.approx(times["X"] * (1 if overlap == "max" else 2))


def test_numbers_of_part_5():
    three = V5P.bandwidth("ici", 3)
    assert cost.data_threshold(C, W) == 2550
    assert cost.data_threshold(C, three) == 850
    assert cost.data_threshold(C, three) * 8960 == pytest.approx(7.6e6, rel=0.01)
    assert 40e6 / cost.data_threshold(C, three) == pytest.approx(47_059, abs=1)
    assert cost.tensor_limit(30_000, C, W) == pytest.approx(11.8, abs=0.05)  # 8 ways, not 16
    assert cost.tensor_limit(50_000, C, W) == pytest.approx(19.6, abs=0.05)
    assert 8 * C / W == 20_400
    two, one = V5P.bandwidth("ici", 2), W
    assert cost.mixed_threshold(32768, C, two, one, "max") == pytest.approx(99.2, abs=0.1)
    assert cost.mixed_threshold(32768, C, two, one, "sum") == pytest.approx(397, abs=0.5)
    assert cost.mixed_threshold(13824, C, two, one) == pytest.approx(235, abs=0.5)
    assert cost.mixed_threshold(28672, C, two, one) == pytest.approx(113, abs=0.5)
    assert cost.mixed_optimum(48_000, 32768, 64, 2, 1) == pytest.approx(13.69, abs=0.01)  # the book has 13.9
    assert cost.mixed_optimum(3e6, 13824, 4096, 2, 1) == pytest.approx(1333, abs=1)
    assert cost.mixed_optimum(4.19e6, 28672, 8960, 2, 1) == pytest.approx(1618, abs=1)
    assert cost.pod_threshold(C, V5P.dcn_bw) == 73_440


def test_where_the_curves_of_part_5_cross():
    """Figure math-comms-time: 4096 chips, the batch at which each mesh becomes compute-bound."""

    def crossing(X, Y, m_x, m_y):
        def bound(B):
            links = cost.Links(C, *(V5P.bandwidth("ici", m) if m else None for m in (m_x, m_y)))
            strategy = "fsdp_tp" if Y > 1 else "fsdp"
            return cost.layer(strategy, replace(LAYER, B=B), links, X, Y, "forward").bound

        return next((B for B in range(1000, 8_000_000, 1000) if bound(B) == "compute"), None)

    assert crossing(4096, 1, 3, 0) == pytest.approx(3.48e6, rel=0.002)
    assert crossing(512, 8, 2, 1) == pytest.approx(652_800, rel=0.002)
    assert crossing(1024, 4, 2, 1) == pytest.approx(1.306e6, rel=0.002)
    assert crossing(256, 16, 2, 1) is None
    flat = cost.layer(
        "fsdp", replace(LAYER, B=1e5), cost.Links(C, V5P.bandwidth("ici", 3)), X=4096, direction="forward"
    )
    assert flat.comms == pytest.approx(1.988e-3, rel=1e-3)


def test_overlap_models():
    links = cost.Links(C, 2 * W, W)
    together, after = (cost.layer("fsdp_tp", LAYER, links, 1024, 8, overlap=way) for way in ("max", "sum"))
    assert together.axes == after.axes
    assert after.comms == pytest.approx(sum(t for _, t in after.axes))
    assert together.comms == sum(max(t for _, t in part.axes) for part in together.parts) < after.comms
    assert together.upper == after.upper == pytest.approx(after.math + after.comms)
    assert together.scaled(3).comms == pytest.approx(3 * together.comms)
    assert together.scaled(3).lower == pytest.approx(3 * together.lower)


def test_what_backward_communicates_does_not_hide_behind_forward():
    """DP at 0.8 of its threshold: computing both ways takes 1.2 times the AllReduce, but backward alone only 0.8."""
    both = cost.layer("dp", replace(LAYER, B=0.8 * 64 * C / W), cost.Links(C, X=W), X=64)
    forward, backward = both.parts
    assert both.math == pytest.approx(1.2 * both.comms)
    assert (forward.bound, backward.bound, both.bound) == ("compute", "X", "X")
    assert both.lower > both.math
    assert both.lower == pytest.approx(forward.math + backward.comms)


def test_bound_names_the_axis():
    links = cost.Links(C, W, W)
    assert cost.layer("fsdp_tp", replace(LAYER, B=1e4), links, 64, 4).bound == "X"
    assert cost.layer("fsdp_tp", replace(LAYER, B=1e8, F=4096), links, 4, 64).bound == "Y"


# Pipelines and whole runs


def test_pipeline_comms():
    assert cost.pipeline_comms(1e6, 8192, 4e11, 1, 8) == 0
    assert cost.pipeline_comms(1e6, 8192, 4e11, 4, 8) == pytest.approx(2 * 1e6 * 8192 / (4e11 * 8) * 10)


def test_mfu_and_seconds():
    assert cost.seconds_at(6.3e24, 8960, C, 0.4) / 86400 == pytest.approx(44.3, abs=0.1)
    assert cost.mfu(6.3e24, cost.seconds_at(6.3e24, 8960, C, 0.4), 8960, C) == pytest.approx(0.4)


# Each threshold is where the functions that it is a threshold of cross

TPUS = st.sampled_from(["v4p", "v5p", "v5e", "v6e"]).map(chip)
GPUS = st.sampled_from(["h100", "h800", "b200", "gb200"]).map(chip)
WIDTHS = st.integers(256, 100_000)
EACH = settings(deadline=None, derandomize=True)
SLOWER, FASTER = 1 - 1e-6, 1 + 1e-6


@EACH
@given(
    TPUS, st.sampled_from([2, 4, 8, 16, (4, 4), (2, 4), (1, 2)]), st.sampled_from([None, True, False]), st.booleans()
)
def test_latency_bound_bytes(hw, axes, wrap, exact):
    V, least = cost.latency_bound_bytes(hw, axes, wrap, exact), cost.all_gather(0, hw, axes, wrap, exact)
    assert cost.all_gather(SLOWER * V, hw, axes, wrap, exact) == least
    assert cost.all_gather(FASTER * V, hw, axes, wrap, exact) > least


@EACH
@given(TPUS, st.integers(2, 4096), WIDTHS, WIDTHS, st.sampled_from([2, 3]))
def test_data_threshold_and_tensor_limit(hw, X, D, F, matrices):
    """Of DP and FSDP by tokens a chip, whatever the matrices; of TP by Y, where F is matrices / 2 times as wide."""
    C, W = hw.flops(), hw.bandwidth("ici")
    links, B = cost.Links(C, X=W, Y=W), X * cost.data_threshold(C, W)
    for tokens, bound in ((FASTER * B, "compute"), (SLOWER * B, "X")):
        shape = cost.LayerShape(tokens, D, F, matrices)
        assert cost.layer("fsdp", shape, links, X=X, direction="forward").bound == bound
        assert cost.layer("dp", shape, links, X=X, direction="backward").bound == bound
    limit = cost.tensor_limit(F * matrices / 2, C, W)
    for Y in range(2, 200):
        bound = cost.layer("tp", cost.LayerShape(1e6, D, F, matrices), links, Y=Y, direction="forward").bound
        assert (bound == "compute") == (limit >= Y)


@EACH
@given(st.floats(1e13, 1e15), st.floats(1e10, 1e12), st.floats(1e10, 1e12), WIDTHS, st.sampled_from([2, 3, 3.5]),
       st.integers(2, 10**5), st.sampled_from(["max", "sum"]))  # fmt: skip
def test_mixed_threshold_at_the_best_X(C, W_X, W_Y, F, matrices, N, overlap):
    """T_X = 2 M D F / (Y W_X), T_Y = 4 B D / (X W_Y) and the math 2 M B D F / (N C), any real X; D drops out."""
    B = N * cost.mixed_threshold(F, C, W_X, W_Y, overlap, matrices)

    def comms(X):
        both = 2 * matrices * F * X / N / W_X, 4 * B / X / W_Y
        return max(both) if overlap == "max" else sum(both)

    best = cost.mixed_optimum(B, F, N, W_X, W_Y, matrices)
    assert comms(best) == pytest.approx(2 * matrices * B * F / N / C)
    assert comms(best) <= min(comms(1.01 * best), comms(best / 1.01))


@EACH
@given(GPUS, st.integers(2, 16))
def test_gpu_data_threshold(hw, nodes):
    """The book's V/W between nodes is over all of them; a part (X - 1)/X leaves a node, and 1 - 1/G a GPU inside it."""
    inside = hw.flops() * gpu.all_gather(1, hw, hw.node_gpus)
    between = hw.intensity("scale-out") * (nodes - 1) / nodes
    assert gpu.data_threshold(hw, nodes) == pytest.approx(max(inside, between))
    assert gpu.data_threshold(hw, nodes, 4) == pytest.approx(between / 4)
    assert gpu.data_threshold(hw) >= gpu.data_threshold(hw, nodes)


@EACH
@given(GPUS, st.integers(2, 64), st.integers(1, 16))
def test_expert_min_width(hw, units, k):
    Z = units * hw.node_gpus
    F = gpu.expert_min_width(Z, k, hw)
    assert gpu.expert_layer(1e6, 4096, FASTER * F, Z, k, hw).bound == "compute"
    assert gpu.expert_layer(1e6, 4096, SLOWER * F, Z, k, hw).bound == "Z"


def test_the_figures_of_a_v5e_and_of_a_gated_layer():
    v5e, v5p = chip("v5e"), chip("v5p")
    assert [cost.latency_bound_bytes(v5e, n, wrap=False) for n in (8, 4, 2)] == pytest.approx([360e3, 180e3, 90e3])
    assert cost.latency_bound_bytes(v5e, (4, 4)) == pytest.approx(576e3)
    links = v5p.flops(), v5p.bandwidth("ici", axes=2), v5p.bandwidth("ici", axes=1)
    assert cost.mixed_threshold(28672, *links, matrices=3) == pytest.approx(75.6, abs=0.05)
    assert gpu.data_threshold(chip("h100"), 2) == 1925
