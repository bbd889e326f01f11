"""Each threshold of `scaling.cost` is where the functions that it is a threshold of cross."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling import cost
from scaling.cost import gpu
from scaling.hardware import chip

TPUS = st.sampled_from(["v4p", "v5p", "v5e", "v6e"]).map(chip)
GPUS = st.sampled_from(["h100", "h800", "b200", "gb200"]).map(chip)
WIDTHS = st.integers(256, 100_000)
SLOWER, FASTER = 1 - 1e-6, 1 + 1e-6


@given(
    TPUS, st.sampled_from([2, 4, 8, 16, (4, 4), (2, 4), (1, 2)]), st.sampled_from([None, True, False]), st.booleans()
)
def test_latency_bound_bytes(hw, axes, wrap, exact):
    V, least = cost.latency_bound_bytes(hw, axes, wrap, exact), cost.all_gather(0, hw, axes, wrap, exact)
    assert cost.all_gather(SLOWER * V, hw, axes, wrap, exact) == least
    assert cost.all_gather(FASTER * V, hw, axes, wrap, exact) > least


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


@given(GPUS, st.integers(2, 16))
def test_gpu_data_threshold(hw, nodes):
    """The book's V/W between nodes is over all of them; a part (X - 1)/X leaves a node, and 1 - 1/G a GPU inside it."""
    inside = hw.flops() * gpu.all_gather(1, hw, hw.node_gpus)
    between = hw.intensity("scale-out") * (nodes - 1) / nodes
    assert gpu.data_threshold(hw, nodes) == pytest.approx(max(inside, between))
    assert gpu.data_threshold(hw, nodes, 4) == pytest.approx(between / 4)
    assert gpu.data_threshold(hw) >= gpu.data_threshold(hw, nodes)


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
